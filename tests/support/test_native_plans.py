"""The compiled core against the Python: what comes between a recording and a table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._layout.bucketing import COARSE_BUCKETS, DIVERGING_BUCKETS, FINE_BUCKETS
from jedbatch._layout.layout import assign_lanes
from jedbatch._schedule.components import by_component, by_rank
from jedbatch._support import native
from jedbatch.policies import agenda
from tests.support.test_native import assert_equal, both, columns, compiled

BUCKETS = FINE_BUCKETS, COARSE_BUCKETS, DIVERGING_BUCKETS


def random_dag(rng, num_nodes, num_types, *, in_order):
    """Types and operands; types read those before them alone, if they are in order."""
    types = rng.integers(num_types, size=num_nodes)
    makers = []
    for i in range(num_nodes):
        before = np.arange(max(0, i - 20), i)
        before = before[types[before] <= types[i]] if in_order else before
        count = min(len(before), int(rng.integers(4)))
        makers.append(rng.choice(before, count, replace=False).tolist())
    return types.tolist(), makers


@compiled
@pytest.mark.parametrize("in_order", [True, False])
def test_schedules_by_rank_are_equal(monkeypatch, in_order):
    rng = np.random.default_rng(in_order)
    sizes = zip(rng.integers(1, 90, 40).tolist(), rng.integers(1, 7, 40).tolist(), strict=True)
    dags = [random_dag(rng, n, t, in_order=in_order) for n, t in sizes]
    by_ranks = []

    def schedules():
        found = []
        for dag in dags:
            graph = jedbatch.Graph.from_dag(*dag)
            all_batches = (
                by_rank(graph),
                by_component(graph, lambda g: jedbatch.schedule(g, agenda)),
            )
            by_ranks.append(all_batches[0] is not None)
            for batches in filter(None, all_batches):
                batches.check(graph)
                bound = np.array(batches.bound)
                found += [batches.batch_type, batches.node_ptr, batches.node, bound]
            found += [graph.rank, graph.makes_chains, *graph.edges, graph.preds[0]]
            found += [*graph._relations, np.array([str(graph.components)])]
        return found

    assert_equal(*both(monkeypatch, schedules))
    assert any(by_ranks)
    assert all(by_ranks) == in_order


@compiled
def test_lanes_are_equal(monkeypatch):
    """Types of several buckets, batches from one node to more than the widest chunk has."""
    rng = np.random.default_rng(2)
    dags = [random_dag(rng, n, 4, in_order=True) for n in (1, 5, 60, 400)]
    dags.append(([0] * 5000, [[]] * 5000))

    def lanes():
        found = []
        for dag in dags:
            graph = jedbatch.Graph.from_dag(*dag)
            present = graph.present_types
            kinds = [BUCKETS[t % 3] if t in present else None for t in range(len(graph.types))]
            layout = assign_lanes(graph, jedbatch.schedule(graph, agenda), kinds)
            layout.check(graph)
            found += [layout.trips, layout.start, layout.lane_ptr, layout.lane_node, layout.lane]
            found += [layout.space, layout.block, layout.rows, layout.padded, layout.widest]
            again = dataclasses.replace(layout)  # finds out what was noted on the way
            found += [again.padded, again.widest]
        return found

    in_c, in_python = both(monkeypatch, lanes)
    assert_equal(in_c, in_python)
    for padded, widest, padded_again, widest_again in zip(
        *(in_c[k::12] for k in (8, 9, 10, 11)), strict=True
    ):
        assert_equal([padded, widest], [padded_again, widest_again])


@compiled
def test_recordings_are_finished_equally(monkeypatch):
    """Inputs of several groups, inputs that nobody reads, results that are inputs, no nodes."""

    def fn(params, instance):
        number, vector, table = instance
        jnp.sin(vector)  # nobody reads it
        x = params["w"] @ vector + table[1] if number > 1 else vector
        return x * number, table[0], x + table[2]

    rng = np.random.default_rng(0)
    instances = [
        (float(i % 3), rng.normal(size=3).astype(np.float32), rng.normal(size=(3, 3)))
        for i in range(7)
    ]
    instances = [(a, b, c.astype(np.float32)) for a, b, c in instances]
    params = {"w": jnp.ones((3, 3))}

    def plans():
        batched = jedbatch.batch(fn, out_axes=None)
        few = instances[:3], instances[3:], instances[:1]
        return [x for part in few for x in columns(batched.plan(params, part))]

    assert_equal(*both(monkeypatch, plans))
    batched = jedbatch.batch(fn, out_axes=None)
    for instance, result in zip(instances, batched(params, instances), strict=True):
        for own, expected in zip(result, fn(params, instance), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-6)
    batched = jedbatch.batch(lambda x: x, in_axes=0)
    np.testing.assert_array_equal(batched(np.arange(4.0, dtype=np.float32)), np.arange(4.0))


@compiled
def test_programs_that_have_too_little_room_are_left_equally(monkeypatch):
    """Compilations are as many, and plans the same, when minibatches outgrow programs."""
    cell = jedbatch.cell(lambda params, *states: jnp.tanh(sum(states) + params))

    def fold(params, tree):
        if isinstance(tree, float):
            return cell(params, tree * params)
        return cell(params, *(fold(params, part) for part in tree))

    def tree(rng, depth):
        if depth == 0:
            return float(rng.normal())
        return tuple(tree(rng, depth - 1) for _ in range(int(rng.integers(1, 4))))

    rng = np.random.default_rng(3)
    minibatches = [[tree(rng, d) for _ in range(n)] for d, n in ((1, 2), (3, 4), (5, 9), (2, 1))]
    params = jnp.ones(2)

    def plans():
        batched, found = jedbatch.batch(fold), []
        for few in minibatches:
            plan = batched.plan(params, few, gradient=False)
            found += columns(plan)
            found.append(np.array(plan.static.signature.lanes))
        return found

    assert_equal(*both(monkeypatch, plans))
    batched = jedbatch.batch(fold)
    expected = jax.vmap(lambda x: x)(jnp.stack([fold(params, x) for x in minibatches[1]]))
    np.testing.assert_allclose(batched(params, minibatches[1]), expected, rtol=1e-5)


@compiled
def test_arrays_of_plans_that_do_not_fit_are_refused():
    core = native.core()
    i32, i64 = (lambda *x: np.array(x, np.int32)), (lambda *x: np.array(x, np.int64))
    u8, zeros = (lambda *x: np.array(x, np.uint8)), (lambda n: np.zeros(n, np.int64))

    def rank(types=(0, 0), operand_ptr=(0, 0, 1), operand=(0,), batches=2, related=1):
        given = i32(*types), i32(1), i64(*operand_ptr), i32(*operand)
        edges = zeros(len(types) + 1), i32(*[0] * len(operand)), i32(*[0] * len(operand))
        ranks = i32(0, 0), i32(0, 0), zeros(batches + 1), i32(0, 0), i32(0, 0), u8(0)
        return core.rank_batches(0.9, (*given, *edges, *ranks, u8(*[0] * related), u8(0)))

    assert rank() == (1, 2)
    for wrong in (
        {"types": (0, 1)},
        {"operand": (2,)},
        {"operand": (1,)},  # itself
        {"operand_ptr": (0, 1, 1)},  # a node after it
        {"operand_ptr": (0, 2, 1)},
        {"batches": 1},
        {"related": 2},
    ):
        with pytest.raises(ValueError, match="do not fit"):
            rank(**wrong)

    def write(**changed):
        given = {
            "node_type": i32(0, 0),
            "results": i32(1),
            "value_ptr": i64(0, 1, 2),
            "operand_ptr": i64(0, 1, 2),
            "operand": i32(-1, 0),
            "lane": i64(0, 1),
            "lane_ptr": i64(0, 2),
            "lane_node": i32(0, 1),
            "input_row": i64(7),
            "base": i64(3),
            "runs": i64(0, 0, 1),
            "form": i64(0, 0, 1, 4, 3),
            "widths": i64(2, 0, 0, 0, 0),
            "row": zeros(3),
            "own_runs": zeros(3),
            "table": np.zeros(7, np.int32),
        }
        given |= changed
        core.write_table(1, tuple(given.values()))
        return given["table"].tolist()

    assert write() == [0, 0, 0, 2, 7, 3, 7]
    for name, wrong in {
        "node_type": i32(0, 1),
        "value_ptr": i64(0, 3, 2),
        "operand_ptr": i64(0, 2, 2),
        "operand": i32(-1, 3),
        "lane": i64(0),
        "lane_ptr": i64(0, 3),
        "lane_node": i32(0, 2),
        "input_row": i64(7, 8),
        "base": i64(),
        "runs": i64(-1, 0, 1),
        "form": i64(0, 1, 1, 4, 3),
        "widths": i64(),
        "row": zeros(2),
        "own_runs": zeros(2),
        "table": np.zeros(6, np.int32),
    }.items():
        with pytest.raises(ValueError, match="do not fit"):
            write(**{name: wrong})
    for form in ((1, 0, 1, 4, 3), (0, 0, 1, -1, 3), (0, 0, 1, 4, 1), (0, 0, 2**40, 4, 2**40)):
        with pytest.raises(ValueError, match="do not fit"):
            write(form=i64(*form))

    def finish(num_groups=2, **changed):
        given = {
            "recorded": i64(0, 0),
            "references": i64(-1, -3),
            "arity": i64(1),
            "group": i64(1, 0, 0),
            "result": i64(1, 0),
            "input_ptr": i64(0, 3),
            "node_type": i32(0, 0),
            "operand_ptr": zeros(3),
            "operand": i32(0, 0),
            "results": i32(0, 0),
            "kept": zeros(3),
            "kept_ptr": zeros(2),
            "cuts": zeros(3),
        }
        given |= changed
        counts = core.write_graph(num_groups, tuple(given.values()))
        names = "node_type", "operand", "results", "kept", "kept_ptr", "cuts"
        return counts, *(given[name].tolist() for name in names)

    found = (2, 2), [0, 0], [-2, -1], [1, 0], [2, 0, 0], [0, 2], [0, 1, 0]
    assert finish() == found
    for name, wrong in {
        "recorded": i64(0, 1),
        "references": i64(-1, -4),
        "arity": i64(-1),
        "group": i64(1, 0, 2),
        "result": i64(1, -4),
        "input_ptr": i64(0, 2),
        "node_type": i32(0),
        "operand_ptr": zeros(2),
        "operand": i32(0),
        "results": i32(0),
        "kept": zeros(2),
        "kept_ptr": zeros(1),
        "cuts": zeros(2),
    }.items():
        with pytest.raises(ValueError, match="do not fit"):
            finish(**{name: wrong})
    for calls in ({"recorded": i64(0, -1)}, {"references": i64(-1)}, {"arity": i64(2**40)}):
        with pytest.raises(ValueError, match="do not fit"):
            finish(**calls)
    with pytest.raises(ValueError, match="do not fit"):
        finish(num_groups=0)
