"""Microbatches: calls are distributed among few, and what they compute is what the loop does.

Letters: `K` calls, `E` extents; `n` nodes and `e` edges of a graph.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check_types_by_traces, compilations, number

import jedbatch
from jedbatch import testing
from jedbatch._ragged.microbatches import (
    distributed,
    evenly_distributed,
    fine_rows,
    packed_places,
    places_of_calls,
)

CPU = jedbatch.Target.named("cpu")
GROUPS = ((8, 64), (6, 4))


def target_of(rows):
    """A CPU with microbatches of about so many rows."""
    return dataclasses.replace(CPU, name=f"microbatches of {rows}", microbatch_rows=rows)


# --- distributing ---


def fits(counts, longest, rows, calls, groups):
    """Whether there is room for some calls in one microbatch, by trying slots one by one."""
    if len(longest) > calls or (counts.sum(1) > rows).any():
        return False
    slots = sorted(np.repeat(*groups).tolist())
    for length in sorted(longest.tolist()):
        slot = next((s for s in slots if s >= length), None)
        if slot is None:
            return False
        slots.remove(slot)
    return True


@pytest.mark.parametrize("seed", range(8))
def test_every_call_is_in_one_microbatch_that_has_room_for_it(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 40, (2, 50)) * [[1], [3]]
    longest, rows = counts[0], (130, 370)
    found = distributed(counts, longest, rows, 9, GROUPS, 50)
    assert sorted(np.concatenate(found).tolist()) == list(range(50))
    for members in found:
        assert fits(counts[:, members], longest[members], rows, 9, GROUPS)
    totals = counts.sum(1)
    least = max(-(-total // room) for total, room in zip([*totals, 50], [*rows, 9], strict=True))
    assert least <= len(found) <= 1.5 * least + 1
    assert distributed(counts, longest, rows, 9, GROUPS, len(found) - 1) is None


@pytest.mark.parametrize("seed", range(6))
def test_few_calls_are_in_as_few_microbatches_as_can_be_or_one_more(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, (1, 7))
    longest, rows, groups = counts[0], (45,), ((8, 32), (2, 2))
    fewest = next(
        n
        for n in range(1, 8)
        for where in itertools.product(range(n), repeat=7)
        if all(
            fits(counts[:, np.equal(where, m)], longest[np.equal(where, m)], rows, 4, groups)
            for m in range(n)
        )
    )
    found = distributed(counts, longest, rows, 4, groups, 7)
    assert fewest <= len(found) <= fewest + 1


def test_what_no_microbatch_has_room_for():
    one = np.array([[5, 60]])
    assert distributed(one, one[0], (59,), 4, GROUPS, 9) is None
    assert distributed(one, np.array([5, 65]), (60,), 4, GROUPS, 9) is None
    assert len(distributed(one, one[0], (60,), 4, GROUPS, 9)) == 2
    nothing = np.zeros((0, 5), int)  # no extents: calls alone are counted
    assert len(distributed(nothing, np.zeros(5, int), (), 2, GROUPS, 9)) == 3


@pytest.mark.parametrize("seed", range(4))
def test_microbatches_are_alike(seed):
    rng = np.random.default_rng(seed)
    nodes = np.exp(rng.uniform(np.log(5), np.log(100), 64)).astype(int)
    counts = np.array([nodes, 12 * nodes])
    rows = [counts[1, members].sum() for members in evenly_distributed(counts, 8)]
    assert max(rows) <= 1.1 * np.mean(rows)


def test_places():
    counts = np.array([2, 1, 0, 3])
    microbatches = (np.array([1, 3]), np.array([0, 2]))
    assert places_of_calls(microbatches, 3).tolist() == [3, 0, 4, 1]
    assert packed_places(counts, microbatches, 5).tolist() == [5, 6, 0, 1, 2, 3]
    assert [fine_rows(n) for n in (0, 1, 255.5, 257, 1000, 1100, 4000)] == [
        *(0, 16, 256, 272, 1024, 1152, 4096),
    ]


# --- values and gradients ---

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 2, jnp.float32)


def graphs(sizes, seed=0):
    """Graphs (x [n, 3], source [e], target [e])."""
    rng = np.random.default_rng(seed)

    def ends(n, e):
        return rng.integers(0, n, size=e).astype(np.int32)

    return [(rng.normal(size=(n, 3)).astype(np.float32), ends(n, e), ends(n, e)) for n, e in sizes]


def passed(w, x, source, target):
    return jnp.tanh(x @ w + jax.ops.segment_sum(0.1 * jnp.sin(x[source]) @ w, target, x.shape[0]))


def mean_of_nodes(w, graph):
    return passed(w, *graph).mean(0)


def nodes_and_edges(w, graph):
    _, source, target = graph
    h = passed(w, *graph)
    return h, source.shape[0], (h[source] * h[target]).sum(-1), h.sum(0), w.sum()


def attended(w, graph):
    """Phases by index, over rows and over instances, which are padded."""
    h = passed(w, *graph)
    weights = jax.nn.softmax(h @ h.T, axis=-1)
    return jnp.square(weights @ graph[0]).sum(0)


def force(w, graph):
    """A gradient by the instance."""
    x, *ends = graph
    return jnp.square(jax.grad(lambda x: jnp.square(passed(w, x, *ends)).sum())(x)).sum()


SIZES = [(3, 9), (1, 1), (6, 2), (2, 30), (4, 0), (5, 12), (9, 40), (2, 3)]
FUNCTIONS = [mean_of_nodes, nodes_and_edges, attended, force]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_values_and_gradients_are_those_of_the_loop(fn, monkeypatch):
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    batched = jedbatch.batch(fn, target=target_of(20), out_axes=None)
    alone = jax.jit(lambda w, instances: [fn(w, graph) for graph in instances])
    stages = batched.plan(W, graphs(SIZES)).host.ragged_calls.stages
    assert max(stage.capacity.microbatches for stage in stages) >= 4
    for seed, sizes in enumerate((SIZES, SIZES[::-1], SIZES[3:], [(7, 40), (1, 0), (3, 3)])):
        instances = graphs(sizes, seed)
        assert_close(batched(W, instances), alone(W, instances), 2e-5)

        def slopes(run, instances=instances):
            nodes = [graph[0] for graph in instances]

            def loss(w, nodes):
                whole = [(x, *graph[1:]) for x, graph in zip(nodes, instances, strict=True)]
                return number(run(w, whole))

            return jax.grad(loss, argnums=(0, 1))(W, nodes)

        assert_close(slopes(batched), slopes(alone), 2e-4)


@pytest.mark.parametrize("fn", [nodes_and_edges, attended])
def test_types_of_results_are_those_of_a_trace(fn, monkeypatch):
    checked = check_types_by_traces(monkeypatch)
    batched = jedbatch.batch(fn, target=target_of(20), out_axes=None)
    plan = batched.plan(W, graphs(SIZES))
    stages = plan.host.ragged_calls.stages
    assert max(stage.capacity.microbatches for stage in stages) > 1
    checked.clear()
    jax.eval_shape(batched.apply, W, plan)
    assert len(checked) > 1  # the loop, and what runs in it


@pytest.mark.slow
def test_derivatives_of_second_order():
    instances = graphs(SIZES[2:6])
    batched = jedbatch.batch(mean_of_nodes, target=target_of(20))

    def loop(w, instances):
        return jnp.stack([mean_of_nodes(w, graph) for graph in instances])

    def losses(run):
        return lambda w: (run(w, instances) ** 2).sum()

    mine, theirs = losses(batched), losses(loop)
    assert_close(jax.hessian(mine)(W), jax.hessian(theirs)(W), 1e-3)

    def twice(f):
        return jax.grad(lambda w: jnp.square(jax.grad(f)(w)).sum())

    assert_close(twice(mine)(W), twice(theirs)(W), 1e-3)
    assert_close(jax.jvp(mine, (W,), (W,)), jax.jvp(theirs, (W,), (W,)), 2e-4)


def test_nan_stays_in_its_instance():
    instances = graphs(SIZES)
    instances[3][0][:] = np.nan
    batched = jedbatch.batch(mean_of_nodes, target=target_of(20))
    found = batched(W, instances)
    expected = jnp.stack([mean_of_nodes(W, graph) for graph in instances])
    others = np.arange(len(SIZES)) != 3
    assert jnp.isfinite(found[others]).all()
    assert_close(found[others], expected[others], 2e-5)

    def loss(w):  # which does not read what is not a number
        return batched(w, instances)[others].sum()

    theirs = jax.grad(
        lambda w: jnp.stack([mean_of_nodes(w, instances[i]) for i in np.flatnonzero(others)]).sum()
    )
    assert_close(jax.grad(loss)(W), theirs(W), 2e-4)


# --- what is compiled, and computed ---


def molecules(count, seed, most=115):
    """Graphs of 5 to `most` nodes, as many small as large ones, with about 13 edges a node."""
    rng = np.random.default_rng(seed)
    nodes = np.exp(rng.uniform(np.log(5), np.log(most + 1), count)).astype(int)
    return graphs([(n, int(n * min(n - 1, rng.integers(11, 16)))) for n in nodes], seed)


def plans(batched, minibatches):
    """How many programs are there after each minibatch, and its calls."""
    seen, calls = [], []
    for minibatch in minibatches:
        found = batched.plan(W, minibatch).host.ragged_calls
        seen.append(found.stages)
        calls.append(found)
    return [len(set(seen[: i + 1])) for i in range(len(seen))], calls


STREAMS = {
    "of one size": ([64] * 12, 115, 2),
    "of few": ([8] * 16, 115, 4),
    "of many": ([256] * 3, 115, 1),
    "growing": ([4, 8, 16, 32, 64, 128, 256], 115, 5),
    "shrinking": ([256, 128, 64, 32, 16, 8, 4], 115, 5),
    "few after many": ([64, 8, 64, 8, 64, 8], 115, 3),
    "of any size": ([40, 3, 64, 17, 1, 90, 30, 64, 5, 77, 2, 12], 115, 6),
}


@pytest.mark.parametrize("name", STREAMS)
def test_few_programs_serve_a_stream(name):
    counts, most, programs = STREAMS[name]
    batched = jedbatch.batch(mean_of_nodes)
    made, calls = plans(batched, [molecules(k, seed, most) for seed, k in enumerate(counts)])
    assert made[-1] <= programs, made
    for k, found in zip(counts, calls, strict=True):
        exist, computed = found.counts
        if k >= 64:
            assert computed <= 1.35 * exist
        if k >= 8:
            assert computed <= 3 * exist + 1000  # none pays for what others need


def test_large_ones_among_small():
    """A graph with more edges than a microbatch would have, in some minibatches."""
    batched = jedbatch.batch(mean_of_nodes)
    large = graphs([(300, 9000)], seed=9)
    stream = [molecules(64, seed) + (large if seed % 2 else []) for seed in range(8)]
    made, calls = plans(batched, stream)
    assert made[-1] <= 3, made
    for found in calls:
        exist, computed = found.counts
        assert computed <= 2 * exist


def test_nothing_is_compiled_late():
    batched = jedbatch.batch(mean_of_nodes, target=target_of(256))

    @jax.jit
    def step(w, plan):
        return jax.grad(lambda w: (batched.apply(w, plan) ** 2).sum())(w)

    def minibatch(seed):
        return molecules(12, seed, most=30)

    sample = [graph for seed in range(4) for graph in minibatch(seed)]
    batched.warm(W, sample, batch_size=12, gradient=True, calls=False)
    for seed in range(4, 7):
        step(W, batched.plan(W, minibatch(seed)))
    unseen = [batched.plan(W, minibatch(seed)) for seed in range(7, 17)]
    assert len({plan.host.ragged_calls.tables[0][0] for plan in unseen}) > 1  # microbatches
    with testing.assert_no_recompile(), compilations() as compiled:
        for plan in unseen:
            step(W, plan)
    assert not compiled


def looked_up(params, graph):
    words, source, target = graph
    x = params["words"][words]
    return jax.ops.segment_sum(x[source], target, x.shape[0]).sum(0)


@pytest.mark.parametrize(("words", "several"), [(100, True), (150_000, False)])
def test_gradients_of_large_arrays_are_added_up_seldom(words, several):
    batched = jedbatch.batch(looked_up)
    instances = [(np.zeros(len(x), np.int32), *ends) for x, *ends in molecules(64, 0)]
    plan = batched.plan({"words": jnp.zeros((words, 64))}, instances)
    stages = plan.host.ragged_calls.stages
    assert (max(stage.capacity.microbatches for stage in stages) > 1) == several


def test_a_gpu_runs_all_calls_at_once():
    batched = jedbatch.batch(mean_of_nodes, target="gpu")
    (stage,) = batched.plan(W, molecules(16, 0)).host.ragged_calls.stages
    assert stage.capacity.slots
    assert stage.capacity.microbatches == 1


def test_the_plan_says_how_many_there_are():
    batched = jedbatch.batch(mean_of_nodes, target=target_of(20))
    plan = batched.plan(W, graphs(SIZES))
    assert f"in {plan.host.ragged_calls.tables[0][0]} microbatches" in str(plan)
    assert "microbatches" not in str(jedbatch.batch(mean_of_nodes).plan(W, graphs(SIZES)))
