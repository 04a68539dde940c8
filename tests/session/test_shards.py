"""Minibatches cut over devices: how they are cut, errors, and all else on eight devices."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop
from cases.processes import environment
from jax.sharding import Mesh

import jedbatch
from jedbatch import testing, viz
from jedbatch._program.sharded import Route, most_instances
from jedbatch._session.plans.shards import Costs, cut_by_cost

ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(p * (x + y)), name="add")
TREES = [((1, 2), 3), 4, (5, (6, (7, 8))), (9, 10), 11]


def total(p, t):
    return ADD(p, total(p, t[0]), total(p, t[1])) if isinstance(t, tuple) else p * t


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    return Mesh(np.array(jax.devices()[:1]).reshape(shape), names)


def test_eight_devices():
    """See `eight_devices.py`."""
    script = Path(__file__).parent / "eight_devices.py"
    env = environment("--xla_force_host_platform_device_count=8")
    command = [sys.executable, "-W", "error::DeprecationWarning", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


def test_one_device():
    batched, p = jedbatch.batch(total), jnp.ones(3)
    plan = batched.plan(p, TREES, mesh=mesh_of(1))
    want, slope = jax.value_and_grad(lambda p: loop(total, p, TREES).sum())(p)
    for step in (lambda f: f, jax.jit):
        run = step(jax.value_and_grad(lambda p, plan: batched.apply(p, plan).sum()))
        assert_close(run(p, plan), (want, slope), rtol=1e-6)


def test_instances_are_recorded_once():
    """Whether they are graphs alone, or are recorded anew with padded arrays, which is kept."""
    batched, p = jedbatch.batch(total), jnp.ones(3)
    assert "(0 of 5 instances known)" in str(batched.plan(p, TREES, mesh=mesh_of(1)).shards[0])
    calls = []

    def mean(p, xs):
        calls.append(xs)
        return jnp.tanh(xs @ p).mean(0)

    batched = jedbatch.batch(mean)
    for lengths in ([2, 4, 3], [5, 2, 7], [6, 9, 1]):
        arrays = [np.ones((n, 3), np.float32) for n in lengths]
        calls.clear()
        batched.plan(p, arrays, mesh=mesh_of(1), gradient=False)
    assert not calls


def test_lists_of_other_lengths_are_told_apart():
    """A few instances are planned as others whose graphs have their form, which the lists have."""
    leaf = jedbatch.cell(lambda table, i: table[i])
    add_all = jedbatch.cell(lambda table, xs: jnp.tanh(sum(xs)))

    def sums(table, instance):
        words, which = instance
        leaves = [leaf(table, word) for word in words]
        return add_all(table, [leaves[k] for k in which])

    table = jax.random.normal(jax.random.key(0), (10, 4))
    batched = jedbatch.batch(sums)
    batched(table, [((1, 2, 3, 4, 5, 6, 7), tuple(range(n))) for n in range(1, 8)] * 3)
    lengths = ((0, 1), (0, 1, 0), (0, 1, 0, 0), (0, 1, 0))
    for which in lengths * 2:  # all of them known the second time
        instances = [((1, 2), which)] * 2
        plan = batched.plan(table, instances, mesh=mesh_of(1))
        run = jax.value_and_grad(lambda table, plan=plan: (batched.apply(table, plan) ** 2).sum())
        alone = jax.value_and_grad(lambda t, xs=instances: (loop(sums, t, xs) ** 2).sum())
        assert_close(run(table), alone(table), rtol=1e-5)


# --- cutting ---


def costs(work, chains=None, start=(0.0,)):
    chains = np.zeros((len(work), 1), int) if chains is None else np.array(chains)
    return Costs(np.array(work, float), chains, np.array(start))


def test_the_most_expensive_comes_first():
    parts = cut_by_cost(costs([1, 7, 5, 4, 3, 2]), 2)
    assert [x.tolist() for x in parts] == [[0, 1, 4], [2, 3, 5]]


@pytest.mark.parametrize("seed", range(5))
def test_at_most_a_third_worse_than_the_best(seed):
    """The bound of Graham for the longest processing time first, 4/3 - 1/(3 m)."""
    rng = np.random.default_rng(seed)
    work = rng.integers(1, 30, 9)
    parts = cut_by_cost(costs(work), 3)
    sums = [work[x].sum() for x in parts]
    assert sorted(np.concatenate(parts).tolist()) == list(range(9))
    best = min(
        max(np.bincount(owner, work, minlength=3))
        for owner in np.array(np.meshgrid(*[range(3)] * 9)).reshape(9, -1).T[: 3**9]
        if max(np.bincount(owner, minlength=3)) <= most_instances(9, 3)
    )
    assert max(sums) <= best * (4 / 3 - 1 / 9)


def test_no_shard_is_empty():
    parts = cut_by_cost(costs([0.0] * 5), 5)
    assert sorted(x.tolist() for x in parts) == [[0], [1], [2], [3], [4]]


def test_chains_start_chunks():
    """As many as the longest of a shard has nodes."""
    parts = cut_by_cost(costs([0.1] * 5, [[5], [1], [1], [1], [1]], [1.0]), 2)
    assert [x.tolist() for x in parts] == [[0], [1, 2, 3, 4]]


def test_a_shard_has_so_many_instances_at_most():
    parts = cut_by_cost(costs([100.0] * 3 + [1.0] * 9), 4)
    assert [len(x) for x in parts] == [2, 2, 2, 6]


def test_costs_are_those_of_nodes():
    """Nodes of a chain wait for each other, those of a bush do not."""
    batched, p = jedbatch.batch(total), jnp.ones(3)
    instances = [((((1, 2), 3), 4), 5), ((1, 2), (3, 4)), 6]
    plan = batched.plan(p, instances)
    found = Costs.of(plan.static.programs, plan.graph)
    assert found.chains.max(axis=1).tolist() == [4, 2, 1]
    nodes = np.diff(plan.graph.node_ptr)
    assert (np.argsort(found.work) == np.argsort(nodes)).all()


def test_routes_lead_back():
    parts = [np.array([1, 4]), np.array([0, 2, 3])]
    route = Route.of(5, parts, 4)
    returned = np.full((2, 4), -1)
    for s, part in enumerate(parts):
        returned[s, : len(part)] = part
    assert returned.ravel()[route.order].tolist() == [0, 1, 2, 3, 4]
    assert np.where(route.rows < 5, route.rows, -1).tolist() == returned.tolist()


# --- what is printed, and errors ---


def test_a_plan_of_shards_prints():
    batched, p = jedbatch.batch(total), jnp.ones(3)
    plan = batched.plan(p, TREES, mesh=mesh_of(1))
    assert "Plan of 5 instances in 1 shards over data (1)" in str(plan)
    assert "the slowest shard costs 1.000 times the mean" in str(plan)
    assert str(plan.shards[0]).startswith("Plan of 5 instances")
    flat = jax.tree.unflatten(jax.tree.structure(plan), jax.tree.leaves(plan))
    assert flat.shards == ()
    with pytest.raises(ValueError, match="1 shards, each of which has a graph"):
        viz.graph(plan)
    with pytest.raises(ValueError, match="was flattened"):
        testing.check_plan(flat)
    testing.assert_merged(plan)
    assert plan.graph is None


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"axis": "data"}, ValueError, "no mesh; expected both"),
        ({"mesh": 8}, TypeError, "expected a `jax.sharding.Mesh`"),
        ({"mesh": mesh_of(1, 1)}, ValueError, "'data' of 1 devices, 'model' of 1 devices, and no"),
        ({"mesh": mesh_of(1), "axis": "batch"}, ValueError, "it has 'data' of 1 devices"),
        ({"mesh": mesh_of(1), "axis": ()}, ValueError, "expected an axis of the mesh"),
        ({"mesh": mesh_of(1), "axis": ("data", "data")}, ValueError, "different ones"),
    ],
)
def test_meshes_and_axes(options, error, text):
    batched = jedbatch.batch(total)
    for run in (batched.plan, batched.warm, batched.plans):
        with pytest.raises(error, match=text):
            run(jnp.ones(3), [TREES] if run == batched.plans else TREES, **options)


def test_workers_plan_no_shards():
    batched = jedbatch.batch(total)
    with pytest.raises(ValueError, match="Leave out `workers`"):
        batched.plans(jnp.ones(3), [TREES], mesh=mesh_of(1), workers=2)


def test_arrays_that_differ_in_length():
    """They are padded; lengths never seen compile nothing. Calls without a mesh pack them."""

    def attend(p, xs):
        weights = jax.nn.softmax((xs @ p) @ (xs @ p).T)
        return jnp.tanh(weights @ xs @ p).mean(0), jnp.cumsum(xs @ p, axis=0)

    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    batched = jedbatch.batch(attend, out_axes=None)

    def step(p, plan):
        return sum(jnp.square(x).sum() for x in jax.tree.leaves(batched.apply(p, plan)))

    run, known = jax.jit(jax.value_and_grad(step)), []
    for lengths in ([2, 4, 3, 9], [1, 12, 5, 2], [13, 6, 1, 8]):
        arrays = [rng.normal(size=(n, 3)).astype(np.float32) for n in lengths]
        plan = batched.plan(p, arrays, mesh=mesh_of(1))
        testing.check_plan(plan)

        def alone(p, arrays=arrays):
            found = [attend(p, xs) for xs in arrays]
            return sum(jnp.square(x).sum() for x in jax.tree.leaves(found)), found

        # Operations of each length would be compiled one by one.
        (total, expected), slope = jax.jit(jax.value_and_grad(alone, has_aux=True))(p)
        assert_close(batched.apply(p, plan), expected, rtol=1e-5)
        assert_close(run(p, plan), (total, slope), rtol=1e-4)
        known.append(batched.compilations)
    assert known[-1] == known[-2]
    here = batched.plan(p, arrays)
    assert here.ragged
    assert_close(batched.apply(p, here), expected, rtol=1e-5)


def test_what_cannot_be_padded_is_grouped_by_shapes():
    spectrum = jedbatch.batch(lambda p, x: jnp.abs(jnp.fft.fft(x * p)).max())
    arrays = [np.arange(n, dtype=np.float32) for n in (4, 6, 4, 5)]
    plan = spectrum.plan(jnp.float32(2), arrays, mesh=mesh_of(1))
    assert "grouped by equal shapes, since `fft`" in str(plan.shards[0])
    expected = jnp.array([np.abs(np.fft.fft(2 * x)).max() for x in arrays])
    assert_close(spectrum.apply(jnp.float32(2), plan), expected, rtol=1e-5)


def test_functions_that_decide_have_no_plan():
    def settle(p, x):
        return x if (x * p).sum() > 1 else x * p

    with pytest.raises(jedbatch.errors.SymbolicValueError):
        jedbatch.batch(settle).plan(jnp.ones(3), [np.ones(3, np.float32)], mesh=mesh_of(1))


def test_traced_values_cannot_be_kept():
    def run(scale):
        batched = jedbatch.batch(lambda p, x: ADD(p, x * scale, x))
        return batched.plan(jnp.ones(3), [1.0, 2.0], mesh=mesh_of(1)).table

    with pytest.raises(ValueError, match="closes over a traced value"):
        jax.jit(run)(2.0)
