"""The judges of `jedbatch.testing`: what is right passes, and whatever is wrong does not."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs, values
from cases.helpers import mostly_slow
from hypothesis import HealthCheck, given, seed, settings

import jedbatch
from jedbatch import testing
from jedbatch.__main__ import main
from jedbatch.testing import strategies
from jedbatch.testing.cases import UnclearError
from jedbatch.testing.fuzz import Failure, Fuzz, FuzzReport, draw, run

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) / 3, jnp.float32)
node = jedbatch.cell(lambda w, a, b: jnp.tanh(w @ a + b))


def encode(w, tree):
    return node(w, encode(w, tree[0]), encode(w, tree[1])) if isinstance(tree, tuple) else w[tree]


TREES = [((0, 1), 2), 3, ((0, 1), (2, (3, 0)))]


# --- values ---


def wrong_at(where, by=1e-3):
    """A function that is wrong for trees that hold three words or more, and only if batched."""

    def fn(w, tree):
        result = {"h": encode(w, tree), "n": 3}
        recorded = not isinstance(result["h"], jax.Array) or isinstance(w, jax.core.Tracer)
        if jax.tree.leaves(tree) == where and recorded:
            result["h"] = result["h"] * (1 + by)
        return result

    return fn


def test_a_wrong_value_is_named():
    with pytest.raises(AssertionError, match=r"a call: leaf \['h'\] of instance 1: largest diff"):
        testing.check_against_loop(wrong_at([3]), W, TREES, gradients=False)


def test_what_agrees_is_returned():
    batched = testing.check_against_loop(encode, W, TREES, thorough=True)
    assert isinstance(batched, jedbatch.Batched)
    testing.check_against_loop(encode, W, TREES, gradients=False, out_axes=None)


def test_a_wrong_gradient_is_blamed_on_its_instance():
    bent = jax.custom_vjp(lambda x: x)
    bent.defvjp(lambda x: (x, None), lambda _, ct: (1.5 * ct,))

    def fn(w, tree):
        return bent(encode(w, tree)) if tree == 3 else encode(w, tree)

    with pytest.raises(AssertionError, match="gradient of a call: leaf of the result") as caught:
        testing.check_against_loop(fn, W, TREES, alone=encode)
    (note,) = caught.value.__notes__
    assert "instance 1: " in note
    assert "instance 0: " not in note


@pytest.mark.parametrize(
    ("got", "expected", "match"),
    [
        ([1.0], (1.0,), r"the result is a PyTreeDef\(\[\*\]\)"),
        (jnp.ones(2), jnp.ones(3), r"float32\[2\]; expected float32\[3\]"),
        (jnp.ones(2), jnp.ones(2, jnp.bfloat16), r"float32\[2\]; expected bfloat16\[2\]"),
        ({"a": jnp.array([1.0, 2.0, 4.5])}, {"a": jnp.array([1.0, 2.0, 4.0])}, r"0\.5 at \[2\]"),
        (jnp.array([1.0, jnp.nan]), jnp.array([1.0, 2.0]), r"difference inf at \[1\]"),
        (jnp.array([1, 2]), jnp.array([1, 3]), r"difference 1 at \[1\], 2 instead of 3"),
        (jnp.array([True]), jnp.array([False]), "1 of 1 elements differ"),
        (jax.random.key(0), jax.random.key(1), "elements differ"),
    ],
)
def test_what_differs_is_said(got, expected, match):
    with pytest.raises(AssertionError, match=match):
        testing.assert_close(got, expected, 1e-5)
    testing.assert_close(got, got, 1e-5)
    testing.assert_close(expected, expected, 1e-5)


def test_compilations_are_named():
    with testing.assert_no_recompile():
        pass
    quaint = jax.jit(name_as("quaint")(lambda x: x + 3))
    ones = np.ones(7, np.float32)
    match = r"compiled 1 programs .*jit\(quaint\)"
    with pytest.raises(AssertionError, match=match), testing.assert_no_recompile():
        quaint(ones)
    with pytest.raises(KeyError), testing.assert_no_recompile():
        raise KeyError


def name_as(name):
    def named(fn):
        fn.__name__ = name
        return fn

    return named


# --- merged ---


def scaled(w, x):
    return jax.lax.scan(lambda h, _: (h * x["by"], None), w[0], None, length=2)[0]


def test_numbers_in_programs_are_not_merged():
    many = [{"by": 0.5 * i} for i in range(3)]
    with pytest.raises(AssertionError, match=r"3 types of `scan.*constants of each: 0\.0; 0\.5"):
        testing.assert_merged(jedbatch.batch(scaled).plan(W, many))
    arrays = [{"by": np.float32(0.5 * i)[None]} for i in range(3)]
    testing.assert_merged(jedbatch.batch(scaled).plan(W, arrays))


def test_lengths_without_a_rule_are_not_merged():
    some = [np.ones((n, 4), np.float32) for n in (1, 2, 3)]
    testing.assert_merged(jedbatch.batch(lambda w, x: (x @ w).sum(0)).plan(W, some))
    odd = jedbatch.batch(lambda w, x: jnp.abs(jnp.fft.fft(x, axis=0)).sum(0) @ w)
    with pytest.raises(AssertionError, match="grouped by equal shapes, since"):
        testing.assert_merged(odd.plan(W, some))


def test_unknown_states_are_not_merged():
    a, b = jedbatch.cell(jnp.sin), jedbatch.cell(jnp.cos)
    empty = jedbatch.policies.FSM("phase", (), ())
    either = jedbatch.batch(lambda w, n: a(b(w[0])) if n else b(a(w[0])), policy=empty)
    plan = either.plan(W, [0, 1])
    with pytest.raises(AssertionError, match="to its fallback"):
        testing.assert_merged(plan)
    flat = jax.tree.unflatten(*jax.tree.flatten(plan)[::-1])
    with pytest.raises(ValueError, match="flattened"):
        testing.assert_merged(flat)
    with pytest.raises(TypeError, match="expected a plan"):
        testing.assert_merged(TREES)


# --- plans ---


def plans():
    """Plans of all kinds: for training, with rows used again, and with ragged parts."""
    fn, params, instances = programs.several_results(9, seed=2)
    yield jedbatch.batch(fn, granularity="cell").plan(params, instances)
    yield jedbatch.batch(fn, reuse=True).plan(params, instances, gradient=False)
    fn, params, instances = programs.unread_and_twice(40, seed=2)  # slices, sums of cotangents
    yield jedbatch.batch(fn).plan(params, instances)
    yield jedbatch.batch(fn, reuse=True).plan(params, instances, gradient=False)

    def ragged(w, xs):
        return node(w, jnp.tanh(xs[0] @ w).mean(0), jax.nn.softmax(xs[1] @ w[0]) @ xs[1])

    rng = np.random.default_rng(1)
    draw = lambda n: rng.normal(size=(n, 4)).astype(np.float32)  # noqa: E731
    yield jedbatch.batch(ragged).plan(W, [(draw(n), draw(7 - n)) for n in (1, 4, 2)])


@pytest.fixture(scope="module")
def made():
    return list(plans())


def test_plans_are_right(made):
    for plan in made:
        testing.check_plan(plan)
        testing.check_plan(jax.tree.unflatten(*jax.tree.flatten(plan)[::-1]))
    with pytest.raises(TypeError, match="expected a plan"):
        testing.check_plan(made)


def parts(form, table):
    """(first, end) of each part of a table that is not empty."""
    return [(o, o + int(np.prod(s))) for o, s in form.places.values() if np.prod(s)]


@pytest.mark.parametrize("which", ["table", "reverse_table"])
def test_what_is_wrong_in_a_table_is_found_or_without_effect(which):
    """Entries replaced by others of the same part; what passes computes the same bits.

    Most entries of a part belong to lanes that do not run; half of those replaced do not.
    """
    fn, params, instances = programs.unread_and_twice(9, seed=2)
    batched = jedbatch.batch(fn)
    plan = batched.plan(params, instances)
    form = (plan.static.signature if which == "table" else plan.static.reverse).form
    right = np.asarray(getattr(plan, which))
    run = jax.jit(jax.value_and_grad(lambda p, plan: jnp.square(batched.apply(p, plan)).sum()))
    expected = run(params, plan)
    rng = np.random.default_rng(0)
    found = passed = 0
    for first, end in parts(form, right):
        values, counts = np.unique(right[first:end], return_counts=True)
        of_lanes_that_run = np.flatnonzero(right[first:end] != values[counts.argmax()])
        for i in range(20 if len(of_lanes_that_run) else 0):
            wrong = right.copy()
            place = rng.choice(of_lanes_that_run) if i % 2 else rng.integers(end - first)
            wrong[first + place] = rng.choice(values)
            if (wrong == right).all():
                continue
            plan = dataclasses.replace(plan, **{which: wrong})
            try:
                testing.check_plan(plan)
            except AssertionError as error:
                assert "not a valid plan" in str(error)  # noqa: PT017
                found += 1
            else:
                passed += 1
                got = run(params, plan)
                jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert found > 10
    assert passed > 5


def backwards(runs):
    """Those that run in reverse order."""
    count = np.count_nonzero(runs[:, 2])
    return np.concatenate([runs[:count][::-1], runs[count:]])


@pytest.mark.parametrize(
    ("number", "part", "change", "match"),
    [
        (0, ("outputs", 0), lambda x: x[::-1], "is another value"),
        (0, ("instructions",), backwards, "which has not been written"),
        (0, ("num_instructions",), lambda x: x - 1, "nodes are in no lane"),
        (0, ("num_instructions",), lambda x: x + 10**6, "instructions in room for"),
        (1, ("results", 1), lambda x: x[:, :1] + 0 * x, "which has not been written"),
        (0, ("operands", 1), lambda x: x[:, :1] + 0 * x, "what no node does|in no lane"),
        (0, ("operands", 1), lambda x: x + 10**6, "rows outside of"),
    ],
)
def test_what_is_wrong_is_said(made, number, part, change, match):
    plan = made[number]
    table = plan.table.copy()
    view = plan.static.signature.form.view(table, *part)
    view[:] = change(view.copy())
    broken = dataclasses.replace(plan, table=table)
    with pytest.raises(AssertionError, match=match):
        testing.check_plan(broken)


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("readers", lambda x, zero: np.full_like(x, zero), "sends no cotangent|no value gets"),
        ("readers", lambda x, zero: np.repeat(x[:1], len(x), 0), "counts twice"),
        ("instructions", lambda x, zero: backwards(x), "before it is written"),
        ("num_instructions", lambda x, zero: x - 1, "one direction only|before it is written"),
        ("blocks", lambda x, zero: 0 * x, "blocks of 0 for"),
    ],
)
def test_what_is_wrong_in_reverse_is_said(made, part, change, match):
    plan = made[2]
    reverse = plan.static.reverse
    table = plan.reverse_table.copy()
    for name in reverse.form.places:
        if name[0] == part:
            view = reverse.form.view(table, *name)
            view[:] = change(view.copy(), reverse.zero[0])
    broken = jedbatch.Plan(plan.static, plan.table, table, plan.inputs, plan.ragged, plan.host)
    with pytest.raises(AssertionError, match=match):
        testing.check_plan(broken)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("call", lambda x: x + 1),
        ("starts", lambda x: x + 1),
        ("lengths", lambda x: x + 1),
        ("total", lambda x: x - 1),
        ("order", lambda x: 0 * x),
        ("trips", lambda x: 0 * x),
        ("blocks", lambda x: 0 * x),
    ],
)
def test_what_is_wrong_in_packed_rows_is_found(made, part, change):
    plan = made[4]
    table = plan.ragged[0][0].copy()
    (stage, *_) = plan.static.stages
    form = stage.region.packed.form(stage.capacity)
    for name in form.places:
        if name[0] == part:
            view = form.view(table, *name)
            view[:] = change(view.copy())
    ragged = ((table, *plan.ragged[0][1:]), plan.ragged[1])
    broken = jedbatch.Plan(plan.static, plan.table, plan.reverse_table, plan.inputs, ragged)
    with pytest.raises(AssertionError, match="not a valid plan"):
        testing.check_plan(broken)


def test_all_plans_are_checked_if_wanted(monkeypatch):
    checked = []
    verify = jedbatch._session.plans.pipeline.verify
    monkeypatch.setattr(
        "jedbatch._session.plans.pipeline.verify", lambda p: (checked.append(p), verify(p))
    )
    batched = jedbatch.batch(encode)
    batched(W, TREES)
    assert not checked
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    batched(W, TREES)
    with jedbatch.lazy():
        kept = encode(W, TREES[0])
    assert len(checked) == 2
    assert kept.shape == (4,)


def test_rounds_are_checked_if_wanted(monkeypatch):
    """Valid rounds and their reverse pass the checks; a corrupted table does not."""
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    fn, params, instances = values.data_dependent_recursion(5, seed=1)
    batched = jedbatch.batch(fn)
    total = lambda p: batched(p, instances)[0].sum()  # noqa: E731
    jax.grad(total)(params)
    run = jedbatch._control_flow.workspace.Workspace._run

    def wrong(self, table, *args):
        table = table.copy()
        view = self.signature.form.view(table, "operands", 0)
        view[:] = view[:, ::-1]
        return run(self, table, *args)

    monkeypatch.setattr("jedbatch._control_flow.workspace.Workspace._run", wrong)
    with pytest.raises(AssertionError, match="not a valid plan"):
        jax.grad(total)(params)


# --- random programs ---


@pytest.mark.parametrize("decides", mostly_slow([False, True], False))
def test_random_programs(decides, monkeypatch):
    """A few, always the same; `python -m jedbatch fuzz` runs more."""
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    unclear = 0
    for number in range(4):
        try:
            draw(6, number, decides).check()
        except UnclearError:
            unclear += 1
    assert unclear < 2


@seed(0)
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(strategies.cases())
def test_random_programs_are_programs(case):
    """Sources are complete, and programs that decide on no value can be traced."""
    fn = case.program.function()
    assert str(case).startswith(case.program.source)
    assert all(line in case.program.source for line in case.program.lines)
    jax.make_jaxpr(lambda p: 0)(case.params)
    first = [column[0] for column in case.columns]
    if not case.program.decides:
        jax.eval_shape(lambda p: fn(p, *first), case.params)


def test_plans_of_random_programs():
    report = Fuzz(shrink=0, plans=True).run(programs=12, seed=5)
    assert not report.failures, str(report)


def test_programs_have_numbers():
    """The same seed and number give the same program, in whatever part of a run it comes."""
    some = [draw(3, number) for number in range(8)]
    assert [draw(3, number) for number in range(4, 8)] == some[4:]
    assert len(set(map(str, some))) == len(some)
    assert draw(4, 0) != some[0]
    assert not draw(3, 5, decides=False).program.decides


def test_parts_run_in_processes(monkeypatch, capsys):
    """Numbers of failures are those of the whole run, wherever a part begins."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    report = run(2, seed=5, plans=True, first=7, jobs=2)
    assert (report.programs, report.failures) == (2, {})
    assert "2 programs, 0 failed" in capsys.readouterr().out


def test_reports_add_up():
    small, large = draw(3, 1), draw(3, 0)
    assert len(str(small)) < len(str(large))
    total, part = FuzzReport(), FuzzReport(programs=5, unclear=1)
    part.failures["E"] = Failure(large, "E: 1", [3])
    total.add(part)
    part.failures["E"] = Failure(small, "E: 2", [9])
    total.add(part)
    assert (total.programs, total.unclear) == (10, 2)
    failure = total.failures["E"]
    assert (failure.case, failure.numbers) == (small, [3, 9])
    assert "programs 3, 9; the smallest found" in str(total)


def test_failures_become_small(monkeypatch):
    """A fault in one operation comes out as a program of that operation."""

    def check(case):
        if "jnp.sort" in case.program.source and len(case.instances) > 1:
            raise AssertionError("17 elements differ")

    monkeypatch.setattr("jedbatch.testing.cases.Case.check", check)
    told = []
    report = Fuzz(shrink=60, tell=told.append).run(programs=24, seed=0, first=84)
    assert report.programs == 24
    (name,) = report.failures
    assert name == "AssertionError: # elements differ"
    failure = report.failures[name]
    assert failure.count >= 1
    assert len(failure.case.program.body) <= 2
    assert len(failure.case.instances) == 2
    assert "jnp.sort" in str(report)


def test_without_hypothesis():
    """The judges work; what needs it says what to install."""
    code = """
import sys
sys.modules["hypothesis"] = None
from jedbatch import testing
from jedbatch.__main__ import main
testing.assert_close(1.0, 1.0, 1e-5)
assert main(["fuzz", "--programs", "1"]) == 1
from jedbatch.testing import strategies
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("pip install hypothesis") == 2


def test_the_command_line_counts(monkeypatch, capsys):
    monkeypatch.setattr("jedbatch.testing.cases.Case.check", lambda case: None)
    assert main(["fuzz", "--programs", "30", "--seed", "3"]) == 0
    assert "30 programs in" in capsys.readouterr().out

    def check(case):
        raise ValueError("no")

    monkeypatch.setattr("jedbatch.testing.cases.Case.check", check)
    assert main(["fuzz", "--programs", "3", "--first", "40"]) == 1
    out = capsys.readouterr().out
    assert "3 failed in 1 ways" in out
    assert "programs 40, 41, 42" in out
