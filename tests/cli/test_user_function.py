"""`show` and `bench` for a function of the user's, as a user runs them."""

import importlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from cases.helpers import assert_close, mostly_slow

from jedbatch import testing
from jedbatch.__main__ import command_line, main
from jedbatch._commands.lookup import attribute_of
from jedbatch._commands.loop import compiled_cells
from jedbatch._commands.user_commands import Times, digits, ways_to_run
from jedbatch._commands.user_function import UserFunction

MODEL = """
import jax.numpy as jnp
import jedbatch

@jedbatch.cell
def leaf(params, number):
    return params["w"] * number

@jedbatch.cell
def join(params, left, right):
    return jnp.tanh(params["w"] * left + right)

def encode(params, tree):
    if isinstance(tree, float):
        return leaf(params, tree)
    return join(params, encode(params, tree[0]), encode(params, tree[1]))

def settle(params, tree):
    state = encode(params, tree)
    return join(params, state, state) if state.sum() > 0 else state

def total(tree):
    return tree if isinstance(tree, float) else total(tree[0]) + total(tree[1])

def weighted(scale, params, tree, weight):
    return scale * weight * encode(params, tree)

def length(params, tree):
    return jnp.argmax(encode(params, tree))

def broken(params, tree):
    raise ValueError("of mine")

def of_name(name):
    return name

encode_all = jedbatch.batch(encode)
trees_first = jedbatch.batch(lambda tree, params: encode(params, tree), in_axes=(0, None))
params = {"w": jnp.ones(2), "activation": jnp.tanh}
instances = [(0.5, (i / 10, 0.25)) if i % 2 else (i / 10, 1.0) for i in range(9)]
one, few, none, numbers = 3, instances[:2], [], list(range(9))
weights = [0.5] * 9
alike = [(i / 10, 1.0) for i in range(9)]

def training_set():
    return instances

def generated():
    yield from instances
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the current folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(MODEL)
    yield "of_mine"
    for name in ("of_mine", "fails", "needs"):
        sys.modules.pop(name, None)


def columns(text, kind):
    """Numbers of a line of the table; nan for a dash."""
    (line,) = re.findall(rf"^{kind}  +(.*)$", text, re.MULTILINE)
    cells = line.replace(" x", "").replace(",", "").replace("–", "nan").split()
    return [float(x) for x in cells]


@pytest.mark.parametrize(
    "args",
    [
        ["of_mine:encode"],
        ["of_mine.py:encode"],
        ["of_mine:encode_all", "--params", "params", "--instances", "training_set"],
        ["of_mine:trees_first"],
    ],
)
def test_show(module, args, capsys):
    assert main(["show", *args, "--batch", "5"]) == 0
    text = capsys.readouterr().out
    assert f"{args[0]}: a minibatch of 5, of 9 instances; parameters: 2 numbers" in text
    assert "Plan of 5 instances" in text
    assert "graph     19 nodes of 2 types" in text  # 7 joins of 12 numbers
    assert "XLA programs built so far: none yet" in text
    assert "how each operand is read" not in text


def test_show_of_several_arguments(module, capsys, tmp_path):
    names = ["--params", "one", "--params", "params", "--instances", "instances"]
    options = ["--instances", "weights", "--explain", "--gradient", "--pictures", "drawn"]
    assert main(["show", f"{module}:weighted", *names, *options]) == 0
    text = capsys.readouterr().out
    assert "Plan of 9 instances" in text
    assert "how each operand is read" in text
    assert (tmp_path / "drawn" / "batches.svg").exists()


def test_show_runs_what_decides_on_values(module, capsys):
    assert main(["show", f"{module}:settle", "--batch", "2"]) == 0
    assert "No plan, since the function decides on values; 2 rounds: " in capsys.readouterr().out


def test_bench(module, capsys):
    """One program serves all minibatches, and one their gradients."""
    assert main(["bench", f"{module}:encode", "--batch", "3", "--instances", "alike"]) == 0
    text = capsys.readouterr().out
    for kind in ("value", "value and gradient"):
        assert len([t for t in columns(text, kind) if t > 0]) == 5  # and first
    assert "schedule  2 batches" in text
    assert re.search(r"compiled  2 XLA programs, and 0 after the first 2 minibatches", text)
    assert "Medians of 3 rounds" in text
    assert "the loop ran on 3 of 3" in text
    assert "loop: the function, with jit-ted cells, on one instance" in text


def test_bench_of_what_decides_on_values(module, capsys):
    """It is called and not planned; of two minibatches, the second has not been seen."""
    args = ["--batch", "4", "--no-gradient", "--loop", "encode"]
    assert main(["bench", f"{module}:settle", *args]) == 0
    text = capsys.readouterr().out
    loop, unseen, known, planned, first = columns(text, "value")
    assert min(loop, unseen, known, first) > 0
    assert planned != planned
    assert "value and gradient" not in text
    assert "No plan, since the function decides on values; 2 rounds" in text
    assert "loop: `encode`, on one instance" in text


def test_the_loop_calls_compiled_cells(module):
    m, _ = attribute_of(f"{module}:encode")
    leaf = m.leaf
    looped = compiled_cells(m.encode, m)
    with testing.compilations() as compiled:
        got = looped(m.params, m.instances[1])
    assert len(compiled) == 2  # leaf and join
    assert_close(got, m.encode(m.params, m.instances[1]), 1e-6)
    assert m.leaf is leaf
    assert compiled_cells(re.compile, re) is None


def test_learn(module, capsys, tmp_path):
    saved = ["--save", "policy.json", "--batch-size", "4", "--device", "cpu"]
    assert main(["learn", f"{module}:encode", *saved]) == 0
    text = capsys.readouterr().out
    assert "certified lower bound" in text
    assert "; --verbose lists them" in text
    assert (tmp_path / "policy.json").exists()
    assert main(["learn", f"{module}:settle"]) == 1
    assert "`learn` needs plans, and of_mine:settle decides" in capsys.readouterr().err


def test_numbers_have_three_digits():
    found = [digits(x) for x in (30_680.8, 752.72, 99.96, 1.0, 0.01234, 0.0, float("nan"))]
    assert found == ["30,700", "753", "100", "1.00", "0.0123", "0.00", "–"]


def test_bench_without_parameters_and_without_new_minibatches(module, capsys):
    assert main(["bench", f"{module}:total"]) == 0
    text = capsys.readouterr().out
    assert "no gradient: what all instances share has no floating-point numbers" in text
    assert columns(text, "value")[1] != columns(text, "value")[1]
    assert "unseen    not measured: there are 9 instances, 18 are needed" in text


LOOPS = {  # (arguments, the function of an instance by its number)
    "trees_first": ([], lambda m, p, i: m.encode(p, m.instances[i])),
    "settle": ([], lambda m, p, i: m.settle(p, m.instances[i])),
    "weighted": (
        ["--params=one", "--params=params", "--instances=instances", "--instances=weights"],
        lambda m, p, i: m.one * m.weights[i] * m.encode(p, m.instances[i]),
    ),
}


@pytest.mark.parametrize("name", mostly_slow(LOOPS, "settle", "trees_first"))
def test_what_is_timed_computes_what_the_loop_does(module, name):
    """Each way to run it, and the gradient of the sum of its results."""
    options, fn = LOOPS[name]
    user = UserFunction.of(command_line().parse_args(["bench", f"{module}:{name}", *options]), 9)
    m, mapped = importlib.import_module(module), user.minibatch(2, 3)

    def together(w):
        return jnp.stack([fn(m, m.params | {"w": w}, i) for i in (2, 3, 4)])

    value, slope = together(m.params["w"]), jax.grad(lambda w: together(w).sum())(m.params["w"])
    instances = list(zip(*mapped, strict=True))
    for gradient in (False, True):
        ways = ways_to_run(user, gradient, decides=name == "settle")
        found = [ways.whole(mapped)]
        if ways.plan is not None:
            found.append(ways.planned(ways.plan(mapped)))
        alone = [ways.one(x) for x in instances]
        if gradient:
            found.append(jax.tree.map(lambda *xs: sum(xs), *alone))
            for total, (found_slope,) in found:
                assert_close(total, value.sum(), 1e-5)
                assert_close(found_slope, slope, 1e-5)
        else:
            for x in (*found, jnp.stack(alone)):
                assert_close(x, value, 1e-5)


def test_times_are_medians_and_medians_of_ratios(capsys):
    seconds = {"loop": [4.0, 2.0, 8.0], "unseen": [1.0], "known": [1.0, 1.0, 0.5], "planned": []}
    Times(seconds, 0.5, (0, 0), 1, "").print_as("value")
    text = capsys.readouterr().out
    assert [f"{x:.0f}" for x in columns(text, "value")] == ["4000", "1000", "1000", "nan", "500"]
    assert columns(text, "  as fast as the loop")[:2] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["nowhere:x"], "nowhere:x cannot be imported: No module named 'nowhere', neither inst"),
        (["nowhere.py:x"], "there is no file nowhere.py in "),
        (["./of_mine:encode"], "'./of_mine' is no module; expected module:attribute, with"),
        ([":encode"], "'' is no module; expected module:attribute, with a module as in an"),
        (["of_mine:nothing"], "of_mine.py has no 'nothing'; expected module:attribute"),
        (["of_mine:encode", "--params", "p"], "has no `p`; write `p = {...}` or `def p(): return"),
        (["of_mine:encode", "--instances", "i"], "has no `i`; write `i = [...]` or `def i(): ret"),
        (["json:dumps"], "has no `instances`; write `instances = [...]` or `def instances(): re"),
        (["of_mine:encode", "--instances", "one"], "`one` of"),
        (["of_mine:encode", "--instances", "one"], "is 3 of type int; expected a sequence of ins"),
        (["of_mine:encode", "--instances", "generated"], "of type generator; expected a sequence"),
        (["of_mine:encode", "--instances", "none"], "is empty; expected instances"),
        (["of_mine:encode", "--instances", "of_name"], "takes (name); expected a value, or a fun"),
        (["of_mine:encode", "--hidden", "3"], "--hidden is for the models of `jedbatch.models`"),
        (["of_mine:weighted"], "takes (scale, params, tree, weight) and got params for what all"),
        (["of_mine:encode_all", "--params", "one", "--params", "two"], "in_axes=(None, 0) and got"),
        (
            [
                "of_mine:weighted",
                *("--params=one", "--params=params", "--instances=instances", "--instances=few"),
            ],
            "there are {'instances': 9, 'few': 2} instances; expected as many",
        ),
        (["of_mine:settle", "--explain"], "need a plan, and of_mine:settle decides on values"),
    ],
)
def test_show_explains_what_is_wrong(module, args, match, capsys):
    assert main(["show", *args]) == 1
    assert match in capsys.readouterr().err


def test_bench_explains_what_is_wrong(module, capsys):
    assert main(["bench", f"{module}:length"]) == 1
    assert "returns no floating-point numbers to differentiate; write --no-gradient" in (
        capsys.readouterr().err
    )
    assert main(["bench", f"{module}:encode", "--loop", "one"]) == 1
    assert "--loop one is 3 of type int; expected a function" in capsys.readouterr().err
    assert main(["bench", f"{module}:encode", "--policy", "nowhere.json"]) == 1
    assert "nowhere.json" in capsys.readouterr().err


def test_errors_of_the_module_are_passed_on(module, tmp_path):
    """With the lines where they happen; nothing is left of a module that was not imported."""
    with pytest.raises(ValueError, match="of mine"):
        main(["show", f"{module}:broken"])
    (tmp_path / "fails.py").write_text("raise RuntimeError('while importing')")
    (tmp_path / "needs.py").write_text("import nowhere_to_be_found")
    for name in ("fails.py:x", "fails:x"):
        with pytest.raises(RuntimeError, match="while importing"):
            main(["show", name])
        assert "fails" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        main(["show", "needs:x"])


def test_files_with_the_names_of_modules(module, tmp_path, capsys):
    (tmp_path / "json.py").write_text("x = 1")
    assert main(["show", "json.py:x"]) == 1
    assert "json.py would be imported as `json`, which is " in capsys.readouterr().err
