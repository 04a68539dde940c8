"""The benchmarks' workloads: all that is timed computes the same."""

import collections
import functools
import json
import re
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cases import helpers

import jedbatch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("benchmarks are not installed", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import gpu, plot  # noqa: E402
from benchmarks.edbatch import WORKLOADS  # noqa: E402
from benchmarks.questions import kernels, padding  # noqa: E402
from benchmarks.rivals import by_hand, encoder  # noqa: E402
from benchmarks.suite import harness, report  # noqa: E402

H = 4
COUNT = 2


def small(name):
    """(instances, parameters): a few short instances of a workload."""
    workload = WORKLOADS[name]
    bank = workload.load(None, 24)
    instances = sorted(bank.instances, key=lambda x: len(str(x)))[2 : 2 + COUNT]
    params = workload.parameters(bank.sizes, H)
    keys = jax.random.split(jax.random.key(1), len(params))
    noise = zip(params.items(), keys, strict=True)
    return instances, {n: x + 0.1 * jax.random.normal(key, x.shape) for (n, x), key in noise}


def value_and_gradient(loss, params):
    with jax.numpy_rank_promotion("allow"):  # rows and biases
        return jax.value_and_grad(loss)(params)


@pytest.fixture(params=helpers.mostly_slow(WORKLOADS, "mvrnn"), scope="module")
def case(request):
    """(name, instances, parameters, loss and gradient of the loop)."""
    instances, params = small(request.param)
    loss = WORKLOADS[request.param].loss
    expected = value_and_gradient(lambda p: sum(loss(p, x) for x in instances), params)
    return request.param, instances, params, expected


@pytest.mark.slow
@pytest.mark.parametrize("case", ["treelstm", "bilstm_chars"], indirect=True)
def test_jedbatch_is_the_loop(case):
    name, instances, params, expected = case
    batched = jedbatch.batch(WORKLOADS[name].loss)
    got = value_and_gradient(lambda p: batched(p, instances).sum(), params)
    helpers.assert_close(got, expected, 1e-4)


def test_by_hand_is_the_loop(case):
    name, instances, params, expected = case
    prepared = by_hand.prepare(name, instances)
    run = jax.jit(by_hand.loss(name))
    got = value_and_gradient(lambda p: run(p, prepared), params)
    helpers.assert_close(got, expected, 1e-4)


def test_torch_is_the_loop(case):
    pytest.importorskip("torch")
    from benchmarks.rivals import in_torch

    name, instances, params, expected = case
    sides = [lambda p: in_torch.eager(name)(p, instances)]
    if name == "bilstm_chars":
        with pytest.raises(ValueError, match="no form batched by hand"):
            in_torch.prepare(name, instances)
    else:
        prepared = in_torch.prepare(name, instances)
        sides.append(lambda p: in_torch.by_hand(name)(p, prepared))
    for side in sides:
        tensors = in_torch.parameters(params)
        loss = side(tensors)
        loss.backward()
        slope = {n: jnp.asarray(x.grad.numpy()) for n, x in tensors.items() if x.grad is not None}
        assert slope.keys() == params.keys()
        helpers.assert_close((jnp.asarray(loss.item()), slope), expected, 1e-4)


# h² operations of an instance: 19.1 leaves; 23 words; 44.1 characters and 23.3 words
PEERS = {"treelstm": 405, "bilstm": 1564, "lattice_lstm": 1064}


@pytest.mark.parametrize("name", PEERS)
def test_operations_are_the_peers(name):
    """Ten instances with, together, ten times the mean size."""
    expected = PEERS[name]
    if name == "treelstm":
        lengths = [19] * 9 + [20]
        instances = [functools.reduce(lambda a, b: (0, a, b), [(0, 0)] * n) for n in lengths]
    elif name == "bilstm":
        instances = [((0,) * 23, (0,) * 23)] * 10
    else:
        counts = zip([44] * 9 + [45], [23] * 7 + [24] * 3, strict=True)
        instances = [((0,) * n, ((0, 2, 0),) * words, (0,) * n) for n, words in counts]
    h = 256
    assert WORKLOADS[name].flop(instances, h) / 10 / h**2 == pytest.approx(expected, rel=0.02)


# --- who runs, how often, and what is said of it ---


class Stopwatch:
    """What of the fixture of pytest-benchmark a case uses; counts and times are ours."""

    def __init__(self):
        self.stats = self
        self.data = []

    def pedantic(self, run, setup, rounds):
        for _ in range(rounds):
            setup()
            run()
            self.data.append(1.0)


@pytest.mark.parametrize("mode", helpers.mostly_slow(harness.MODES, "inference"))
def test_rivals_take_turns(mode):
    """Everybody computes the same loss, as often as we do; one by one, less often."""
    with jax.numpy_rank_promotion("allow"):  # plans are of the options they are made under
        case = harness.Case("treelstm", 4, 4, mode)
        bench = harness.Bench.of(case, types.SimpleNamespace(data=None), minibatches=2)
        functions = bench.functions(harness.RIVALS)
        expected = {"planned", "known", "by hand", "by hand, whole", "loop"}
        expected |= {"torch by hand", "torch eager"} if harness.in_torch else set()
        expected |= {"agenda", "depth"} if mode == "inference" else set()
        assert set(functions) == expected
        bench.check(functions)
        with pytest.raises(AssertionError, match="wrong"):
            bench.check({"planned": functions["planned"], "wrong": lambda: jnp.float32(1)})
        calls = collections.Counter()

        def counted(name):
            return lambda: (calls.update([name]), time.sleep(0.01 if name in harness.SLOW else 0))

        found = harness.turns(Stopwatch(), {name: counted(name) for name in functions}, budget=0.05)
        assert set(found) == expected
        for name in expected:
            assert len(found[name]) == calls[name] - 1 >= 2  # the first tells how long it takes
            assert (len(found[name]) < len(found["planned"])) == (name in harness.SLOW)


def test_loops_call_what_jit_compiled():
    bench = harness.Bench.of(
        harness.Case("treelstm", 2, 4, "inference"), types.SimpleNamespace(data=None), minibatches=1
    )
    loss = WORKLOADS["treelstm"].loss
    cells = jax.make_jaxpr(lambda p: loss(p, bench.minibatch[0]))(bench.params)
    assert {eqn.primitive.name for eqn in cells.eqns if eqn.outvars[0].aval.ndim} == {"jit"}


def test_speeds_and_ratios_in_tables():
    row = {
        "title": "TreeLSTM",
        "workload": "treelstm",
        "mode": "inference",
        "batch": 64,
        "hidden": 256,
        "seconds": {"planned": 0.5, "known": 1.0, "by hand": 1.0, "loop": 5.0},
        "ratios": {"by hand": [1.9, 2.0, 2.1], "loop": [9, 10, 11]},
        "unseen": {"trace": 1000.0, "execute": 100.0, "whole": 2000.0},
        "flop": 50e9,
        "product_rate": 200e9,
        "compilations_unseen": 0,
    }
    made = report.throughput([row], "inference")
    said = dict(zip(made.header, made.rows[0], strict=True))
    assert (said["planned /s"], said["known /s"], said["unseen /s"]) == ("128", "64.0", "32.0")
    assert (said["by hand ×"], said["loop ×"]) == ("2.00 (1.90–2.10)", "10.0")
    assert (said["GFLOP/s"], said["of product"], said["compiled"]) == ("100", "50%", "0")
    lines = [line.split(",") for line in made.csv().splitlines()]
    said = dict(zip(*lines, strict=True))
    assert [said["by hand ×" + q] for q in ("", " (25 %)", " (75 %)")] == ["2.00", "1.90", "2.10"]


def test_summary_is_that_of_the_results():
    rows = plot.summary()
    assert len(rows) == 10
    text = (BENCHMARKS / "README.md").read_text()
    assert f"<!-- summary -->\n{plot.markdown(rows)}\n<!-- end -->" in text
    linked = set(re.findall(r"\]\(results/(\w+)\.csv\)", text))
    assert linked == {path.stem for path in plot.RESULTS.glob("*.csv")}


# --- padding ---


def short_sentences(*lengths):
    longest = padding.load(None, len(lengths), seed=0)
    return [(words[:n], label) for n, (words, label) in zip(lengths, longest, strict=True)]


@pytest.mark.parametrize("mode", helpers.mostly_slow(padding.MODES, "inference"))
def test_padded_sentences_are_the_loop(mode):
    """Scores; mean loss and its gradient."""
    params, sentences = encoder.parameters(64, layers=1), short_sentences(3, 5)

    def plain(params):
        if mode == "inference":
            return jnp.stack([encoder.scores(params, words) for words, _ in sentences])
        mean = lambda p: sum(encoder.loss(p, s) for s in sentences) / 2  # noqa: E731
        return jax.value_and_grad(mean)(params)

    sides = [padding.by_padding(mode, width) for width in (padding.longest, padding.power)]
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(plain)(params)
        for run in (*sides, padding.by_loop(mode)):
            got = run(params, sentences)
            helpers.assert_close(jnp.stack(got) if type(got) is list else got, expected, 1e-4)


def test_sentences_may_have_any_length():
    """The model of one sentence can be traced without a length."""
    params = encoder.parameters(64, layers=1)
    (n,) = jax.export.symbolic_shape("n", constraints=[f"n <= {encoder.POSITIONS}"])
    sentence = jax.ShapeDtypeStruct((n,), "int32"), jax.ShapeDtypeStruct((), "int32")
    with jax.numpy_rank_promotion("allow"):
        loss, slope = jax.eval_shape(jax.value_and_grad(encoder.loss), params, sentence)
    assert loss.shape == ()
    assert jax.tree.map(jnp.shape, slope) == jax.tree.map(jnp.shape, params)


def test_rows_and_shapes_of_padding():
    sentences = short_sentences(3, 9, 4, 17, 5, 7, 20, 3)  # 68 rows
    sides = padding.sides_of("inference", sentences, 2)
    counts = {name: tuple(side.counts().values()) for name, side in sides.items()}
    assert counts.pop("jedbatch")[0] == 1  # it says itself what it computes
    assert counts == {
        "longest": (2 * (9 + 17 + 7 + 20) / 68, 4),
        "buckets": (2 * (8 + 8 + 16 + 32) / 68, 3),
        "eights": (2 * (8 + 8 + 16 + 24) / 68, 3),
        "loop": (1, 7),
    }
    lengths = [[len(words) for words, _ in m] for m in sides["longest"].sample(2)]
    assert lengths == [[3, 9], [20, 3]]


def test_sentences_are_read_from_a_file(tmp_path):
    path = tmp_path / padding.FILE.removesuffix(".gz")
    lines = [
        '{"tokens": ["a", "b", "a"], "tags": ["O", "O", "O"]}',
        '{"tokens": ["a"], "tags": ["O"]}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(SystemExit, match="holds 2 sentences; these options need 3"):
        padding.load(str(path), 3, seed=0)
    first, last = sorted(padding.load(str(path), 2, seed=0), key=lambda s: len(s[0]))
    assert (len(first[0]), len(last[0])) == (1, 3)
    assert last[0][0] == last[0][2] == first[0][0] != last[0][1]


# --- the run on a GPU ---


@pytest.mark.slow
def test_a_run_on_a_gpu_goes_on_where_it_was(tmp_path, capsys):
    arguments = ["--tiny", "--out", str(tmp_path), "--part", "throughput"]
    arguments += ["--only", "treelstm 4 32 f32 inference"]
    with jax.numpy_rank_promotion("allow"):  # rows and biases
        gpu.main(arguments)
    first = (tmp_path / "results.jsonl").read_text()
    (row,) = map(json.loads, first.splitlines())
    assert {"jedbatch", "by hand", "unrolled", "unseen"} <= row["found"].keys()
    assert all("error" not in side for side in row["found"].values() if isinstance(side, dict))
    gpu.main(arguments)  # nothing is left to measure
    assert (tmp_path / "results.jsonl").read_text() == first
    assert "| treelstm | 4 | 32 | f32 | inference | gpu |" in (tmp_path / "report.md").read_text()


def test_cases_of_a_gpu():
    for part in gpu.PARTS:
        for tiny in (False, True):
            cases = gpu.cases(part, tiny)
            assert cases
            assert len(set(cases)) == len(cases)
            assert all(case.variant in gpu.VARIANTS for case in cases)


def test_kernels_of_a_gpu():
    """A product, and a loop of a kernel and of a branch with another one."""
    text = """
%body.1 (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %f.1 = (f32[2]{0}, s32[]) fusion(%p), kind=kLoop, calls=%inside.1
  ROOT %c = f32[2]{0} conditional(s32[] %i, %p), branch_computations={%one.1, %two.1}
}

%one.1 (q: f32[2]) -> f32[2] {
  ROOT %copy.1 = f32[2]{0} copy(%q)
}

%two.1 (q: f32[2]) -> f32[2] {
  ROOT %q = f32[2]{0} parameter(0)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %g = (f32[2]{0}, s8[9]{0}) custom-call(%x), custom_call_target="__cublas$lt$matmul"
  ROOT %w = f32[2]{0} while(%x), condition=%cond.1, body=%body.1
}
"""
    assert kernels.summary(text) == [
        "program: 1 (1 product)",
        "  while: 1 (1 fusion)",
        "    conditional: 1 (1 copy)",
        "    conditional: 0 ()",
        "all: 1 conditional, 1 copy, 1 fusion, 1 product, 1 while",
    ]


def test_profile_of_a_gpu():
    """Two runs of two kernels with 2 µs between them, the second also copies."""

    def event(name, start, duration):
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    kernels = [event("dot", 0, 1e6), event("add", 1.002e6, 1e6), event("MemcpyD2D", 3e6, 5e5)]
    stream = types.SimpleNamespace(name="Stream #7", events=kernels)
    calls = types.SimpleNamespace(name="host", events=[event("cuGraphLaunch", 0, 1e5)])
    planes = [
        types.SimpleNamespace(name="/device:GPU:0", lines=[stream]),
        types.SimpleNamespace(name="/host:CPU", lines=[calls]),
    ]
    found = gpu.summarized(planes, 2)
    assert found["kernels per run"] == 1.5
    assert found["busy ms per run"] == pytest.approx(1.25)
    assert found["idle ms per run"] == pytest.approx(0.5)
    assert found["copies per run"] == {"MemcpyD2D": 0.5}
    assert found["host per run"] == {"cuGraphLaunch": [0.5, pytest.approx(0.05)]}
