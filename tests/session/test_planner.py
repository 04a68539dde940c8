"""Plans made in other processes, against the loop and against plans made here."""

import copy
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import planned

import jedbatch
from jedbatch._batch.planner import Planner, Prepared
from jedbatch._batch.processes import Pool, in_processes
from jedbatch.errors import PlannedHereWarning

rng = np.random.default_rng(0)
PARAMS = {
    "table": jnp.asarray(rng.normal(size=(9, 4)), jnp.float32),
    "left": jnp.asarray(rng.normal(size=(4, 4)), jnp.float32),
}


def grow(size):
    if size == 1:
        return int(rng.integers(9))
    cut = int(rng.integers(1, size))
    return grow(cut), grow(size - cut)


class Locked:
    """Something that no other process can have."""

    def __init__(self):
        self.lock = threading.Lock()

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return self is other


def minibatch(count=5):
    return [grow(int(rng.integers(1, 9))) for _ in range(count)]


def single(instances):
    return [(x,) for x in instances]


def assert_is_loop(batched, plan, instances, fn=planned.encode):
    def loss(results):
        return jnp.square(results).sum()

    def loop(params):
        return jnp.stack([fn(params, x) for x in instances])

    np.testing.assert_allclose(batched.apply(PARAMS, plan), loop(PARAMS), rtol=1e-5, atol=1e-6)
    ours = jax.grad(lambda p: loss(batched.apply(p, plan)))(PARAMS)
    theirs = jax.grad(lambda p: loss(loop(p)))(PARAMS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def begun():
    """Makes pools of one process, and closes them."""
    pools = []

    def begin(planner):
        pools.append(Pool(planner, 1))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


def test_another_process_plans_what_would_be_planned_here(begun):
    batched = jedbatch.batch(planned.encode)
    planner = batched.planner(PARAMS, minibatch())
    pool = begun(planner)
    for _ in range(3):
        instances = minibatch()
        prepared = pickle.loads(pool.submit(single(instances)).result())
        assert prepared.reason is None
        plan = planner.attach(prepared)
        assert plan.graph is None
        here = batched.plan(PARAMS, instances)
        assert plan.static is here.static
        np.testing.assert_array_equal(plan.table, here.table)
        np.testing.assert_array_equal(plan.reverse_table, here.reverse_table)
        assert plan.inputs.keys() == here.inputs.keys()
        for name, rows in here.inputs.items():
            np.testing.assert_array_equal(plan.inputs[name], rows)
        assert_is_loop(batched, plan, instances)
    compiled = batched.compilations
    # A type that was not in the sample is planned here, and from then on there.
    news = [((0,), 1), (2,), *minibatch(3)]
    prepared = pickle.loads(pool.submit(single(news)).result())
    assert "no program" in prepared.reason
    assert_is_loop(batched, planner._planned_here(single(news), prepared.reason), news)
    assert batched.compilations > compiled
    news = [(((3,), 4), 5), 6, *minibatch(3)]
    prepared = pickle.loads(pool.submit(single(news)).result())
    assert prepared.reason is None
    compiled = batched.compilations
    assert_is_loop(batched, planner.attach(prepared), news)
    assert batched.compilations == compiled


@pytest.mark.parametrize("is_cut", [True, False])
def test_nodes_are_cut_there_where_they_are_cut_here(is_cut):
    params = {name: jnp.tile(x, 2) for name, x in PARAMS.items()}
    params["left"] = jnp.tile(params["left"], (2, 1)) / 4
    target = replace(jedbatch.Target.named("cpu"), projection_bytes=1)
    batched = jedbatch.batch(planned.chain, target=target)
    if not is_cut:  # no operand depends on nodes of the same type, which is enough in the end
        for few in range(1, 9):
            batched.plan(params, [[few]] * few, gradient=False)
    sample = [[1, 2, 3], [4], [5, 6, 7, 8]]
    planner = batched.planner(params, sample, gradient=False)
    here = batched.plan(params, sample, gradient=False)
    assert any(t.name == "inputs of recur" for t in here.graph.types) is is_cut
    there = copied(planner)
    for instances in ([[8, 1], [2, 3, 4]], [[1, 2], [7], [6, 5, 4, 3]]):
        prepared = there(instances)
        assert prepared.reason is None
        results = batched.apply(params, planner.attach(prepared))
        loop = [planned.chain(params, words) for words in instances]
        np.testing.assert_allclose(results, loop, rtol=1e-5, atol=1e-6)


def test_errors_are_those_of_planning_here():
    batched = jedbatch.batch(planned.encode)
    planner = batched.planner(PARAMS, minibatch())
    copy = copied(planner)
    for wrong in ([(0, None)], [(0, 99)], [(0, 1, 2, 3)]):
        prepared = copy(wrong)
        assert prepared.instances == wrong
        with pytest.raises((TypeError, ValueError, IndexError)) as here:
            jedbatch.batch(planned.encode).plan(PARAMS, wrong)
        with pytest.raises(type(here.value)) as attached:
            planner.attach(prepared)
        assert str(attached.value) == str(here.value)


def test_a_process_that_ends_is_an_error(begun):
    planner = jedbatch.batch(planned.encode).planner(PARAMS, minibatch())
    pool = begun(planner)
    plans = in_processes(pool, iter([single(minibatch()) for _ in range(9)]), 2)
    next(plans)
    pool._executor.submit(os._exit, 1)
    with pytest.raises(RuntimeError, match="a process that plans has ended"):
        list(plans)


def test_what_cannot_be_sent_is_planned_here(begun):
    def labelled(params, pair):
        return planned.encode(params, pair[0])

    batched = jedbatch.batch(labelled)
    first = [(tree, 0) for tree in minibatch()]
    planner = batched.planner(PARAMS, first)
    pool = begun(planner)
    locked = [(tree, Locked()) for tree in minibatch()]
    plans = in_processes(pool, iter([single(first), single(locked)]), 2)
    for plan, instances in zip(plans, (first, locked), strict=True):
        assert_is_loop(batched, plan, instances, labelled)
    assert planner._num_planned_here == 1
    with pytest.raises(TypeError, match=r"the instances of the batched `labelled` cannot be sent"):
        batched.planner(PARAMS, locked)


def test_plans_come_in_order_and_processes_end():
    batched = jedbatch.batch(planned.weighed, in_axes=(None, 0, 0))
    many = [minibatch() for _ in range(12)]
    weights = [[float(x) for x in rng.normal(size=5)] for _ in many]

    plans = batched.plans(PARAMS, iter(many), weights, workers=1)
    came = []
    for instances, of_instances in zip(many, weights, strict=True):
        plan = next(plans)
        results = batched.apply(PARAMS, plan)
        loop = [planned.weighed(PARAMS, *x) for x in zip(instances, of_instances, strict=True)]
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *loop)
        assert results.keys() == stacked.keys()
        for name, x in stacked.items():
            np.testing.assert_allclose(results[name], x, rtol=1e-5, atol=1e-6)
        came.append(plan.graph is None)
    assert came[0] is False
    assert came[-1] is True
    assert_no_process_is_left()  # though no plan was asked for in vain
    assert list(plans) == []


def test_an_error_says_which_minibatch_it_was():
    batched = jedbatch.batch(planned.encode)
    plans = batched.plans(PARAMS, [minibatch(), minibatch(), [(0, None)]], workers=1)
    next(plans)
    next(plans)
    with pytest.raises((TypeError, ValueError, IndexError)) as error:
        next(plans)
    assert "This happened while minibatch 2 was planned." in error.value.__notes__
    assert_no_process_is_left()
    assert list(batched.plans(PARAMS, [], workers=1)) == []
    plans = batched.plans(PARAMS, [minibatch() for _ in range(9)], workers=1)
    next(plans)
    plans.close()
    assert_no_process_is_left()


KILLED = """
import os, signal
import jax.numpy as jnp
import jedbatch
from cases import planned
from jedbatch._batch.processes import Pool, in_processes

if __name__ == "__main__":
    params = {"table": jnp.ones((9, 4)), "left": jnp.ones((4, 4))}
    pool = Pool(jedbatch.batch(planned.encode).planner(params, [1, (2, 3)]), 1)
    pool.submit([(1,)]).result()
    print(*pool._executor._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal that kills")
def test_processes_end_with_one_that_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    env = os.environ | {"PYTHONPATH": str(Path(planned.__file__).parent.parent)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (number,) = map(int, done.stdout.split())
    for _ in range(200):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(number, signal.SIGKILL)
    raise AssertionError(number)


def assert_no_process_is_left():
    for _ in range(200):
        if not multiprocessing.active_children():
            return
        time.sleep(0.05)
    raise AssertionError(multiprocessing.active_children())


def copied(planner):
    """A copy of a planner, as in another process."""
    return pickle.loads(pickle.dumps(planner))


def in_classes():
    return list(map(planned.Scaled, minibatch()))


OF_MODULE = planned.scaled, minibatch, planned, "SCALE"
OF_CLASS = planned.scaled_by_class, in_classes, planned.Scaled, "scale"
outside = pytest.mark.parametrize("case", [OF_MODULE, OF_CLASS], ids=["module", "class"])


@outside
def test_what_changes_here_is_not_planned_there(case, monkeypatch):
    fn, some, *place = case
    batched = jedbatch.batch(fn)
    planner = batched.planner(PARAMS, some())
    instances = some()
    prepared = copied(planner)(instances)
    assert prepared.instances is None
    assert_is_loop(batched, planner.attach(prepared), instances, fn)
    monkeypatch.setattr(*place, 3.0)
    assert not planner._is_current
    with pytest.raises(RuntimeError, match="reads besides its arguments has changed"):
        planner.attach(prepared)


@outside
def test_a_function_that_is_another_one_there_is_not_planned_there(case, monkeypatch):
    fn, some, *place = case
    batched = jedbatch.batch(fn)
    monkeypatch.setattr(*place, 3.0)
    planner = batched.planner(PARAMS, some())
    instances = some()
    with monkeypatch.context() as there:
        there.setattr(*place, 1.0)
        prepared = copied(planner)(instances)
    assert "computes something else there" in prepared.reason
    with pytest.warns(PlannedHereWarning, match=r"8 of 8 minibatches .*`scaled.*something else"):
        plans = [planner.attach(prepared) for _ in range(8)]
    assert_is_loop(batched, plans[-1], instances, fn)


def test_programs_may_have_types_and_classes_that_the_sample_lacks():
    batched = jedbatch.batch(planned.of_pair)
    pairs = [planned.Pair(1, (2, 3)), planned.Pair(4, 5)]
    batched.plan(PARAMS, [planned.Pair((1,), 2), planned.Pair((3, (4,)), 5)])
    planner = batched.planner(PARAMS, pairs)
    prepared = copied(planner)(pairs)
    assert prepared.reason is None
    assert_is_loop(batched, planner.attach(prepared), pairs, planned.of_pair)


def test_plans_of_nested_loops():
    batched = jedbatch.batch(planned.spin, control_flow="lanes")
    numbers = [3, 0, 5, 1, 4]
    planner = batched.planner(PARAMS, numbers, gradient=False)
    prepared = copied(planner)(numbers)
    assert prepared.reason is None
    plan = planner.attach(prepared)
    theirs = [planned.spin(PARAMS, n) for n in numbers]
    np.testing.assert_allclose(batched.apply(PARAMS, plan), theirs, rtol=1e-5, atol=1e-6)


def with_attributes(fn):
    def call(params, tree):
        return fn(params, tree)

    call.cell_names, fn.used_by = ["leaf", "add"], call  # which are not sent
    return call


def test_functions_may_be_closures_and_decorated():
    scale = 0.5

    @jedbatch.cell
    def shrink(x):
        return scale * x

    for batched in (
        jedbatch.batch(lambda params, tree: shrink(planned.encode(params, tree))),
        jedbatch.batch(functools.partial(planned.weighed, weight=2.0)),
        jedbatch.batch(with_attributes(lambda params, tree: planned.encode(params, tree))),
        planned.decorated,
    ):
        planner = batched.planner(PARAMS, minibatch())
        assert copied(copied(planner))(minibatch()).instances is None
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"the function of .*cannot be sent.*top level"):
        jedbatch.batch(lambda p, t: planned.encode(p, t) if lock else 0).planner(PARAMS, [0])


def test_planners_refuse_what_is_not_theirs():
    batched = jedbatch.batch(planned.encode)
    planner, other = (batched.planner(PARAMS, minibatch()) for _ in range(2))
    with pytest.raises(ValueError, match="another planner prepared"):
        planner.attach(other(minibatch()))
    with pytest.raises(TypeError, match=r"`Planner.attach` got .*expected what the planner"):
        planner.attach(minibatch())
    planner._process = -1
    with pytest.raises(RuntimeError, match="fork of the process"):
        planner(minibatch())
    ragged = [np.ones((n, 4), np.float32) for n in (2, 3)]
    equal = jedbatch.batch(planned.total)
    prepared = copied(equal.planner(PARAMS, [x[:2] for x in ragged]))(ragged)
    assert prepared.instances is not None
    with pytest.raises(ValueError, match="workers"):
        batched.plans(PARAMS, [minibatch()], workers=-1)
    assert isinstance(planner, Planner)
    assert isinstance(prepared, Prepared)


def test_arrays_that_differ_in_length():
    """Other processes plan them as nodes on padded arrays."""
    batched, rng = jedbatch.batch(planned.total), np.random.default_rng(0)
    first, other = (
        [rng.normal(size=(n, 4)).astype(np.float32) for n in lengths]
        for lengths in ([2, 3, 7, 1], [5, 1, 6, 4])
    )
    planner = batched.planner(PARAMS, first)
    prepared = copied(planner)(other)
    assert prepared.reason is None
    assert_is_loop(batched, planner.attach(prepared), other, planned.total)


def scaled(scale, name="left"):
    cell = jedbatch.cell(lambda p, x: jnp.tanh(scale * (x * p[name][0])), name="cell")
    return lambda p, x: cell(p, x)


def applied(fn):
    cell = jedbatch.cell(lambda x: fn(x * jnp.ones(4)), name="cell")
    return lambda p, x: cell(x)


def with_rule(factor, forward):
    """A function whose derivative is said to be another one."""
    if forward:
        made = jax.custom_jvp(jnp.sin)
        made.defjvp(lambda xs, ts: (jnp.sin(xs[0]), factor * ts[0]))
    else:
        made = jax.custom_vjp(jnp.sin)
        made.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (factor * g,))
    return applied(made)


def test_kernels_have_one_identity_exactly_if_they_compute_the_same():
    def identities(fn):
        batched = jedbatch.batch(fn)
        plan = batched.plan(PARAMS, [1.0])
        session, _ = batched._core.session((PARAMS,))
        return list(map(session.programs.identity, plan.host.placed.kernels))

    array = np.arange(4, dtype=np.float32)
    inner = [jax.jit(lambda x, mask=mask: jnp.sin(x) * mask) for mask in (array, array + 1)]
    made = [
        lambda: scaled(2.0),
        lambda: scaled(3.0),
        lambda: scaled(2.0, "table"),
        lambda: scaled(array),
        lambda: scaled(array + 1),
        lambda: scaled(jnp.asarray(array)),
        lambda: lambda p, x: scaled(2.0)({"left": p["left"] @ p["left"]}, x),
        lambda: applied(inner[0]),
        lambda: applied(inner[1]),
        lambda: with_rule(1.0, forward=True),
        lambda: with_rule(2.0, forward=True),
        lambda: with_rule(1.0, forward=False),
        lambda: with_rule(2.0, forward=False),
    ]
    found = [identities(make())[0] for make in made]
    assert found == [identities(make())[0] for make in made]
    assert "" not in found
    assert len(set(found)) == len(found)
    kind = jax.ShapeDtypeStruct((4,), jnp.float32)
    calling = applied(lambda x: jax.pure_callback(np.sin, kind, x, vmap_method="expand_dims"))
    assert identities(calling) == [""]


def test_plans_are_not_pickled_and_say_what_is():
    batched = jedbatch.batch(planned.encode)
    params, instances = PARAMS, minibatch(3)
    plan = batched.plan(params, instances)
    with pytest.raises(TypeError, match=r"planner.attach.*batched.export"):
        pickle.dumps(plan)
    for copied in (copy.copy(plan), copy.deepcopy(plan)):
        np.testing.assert_array_equal(batched.apply(params, copied), batched.apply(params, plan))
        assert str(copied) == str(plan)
