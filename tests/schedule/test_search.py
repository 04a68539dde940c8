"""Searches, against exhaustive search and against each other."""

import dataclasses

import numpy as np
import pytest
from cases.helpers import fewest, random_dag

import jedbatch
from jedbatch import Graph, lower_bound, policies, schedule
from jedbatch._schedule.search import in_turn, quotient

GROUPS = 12


def graphs(seed, count, most=12):
    """Random graphs of up to `most` nodes and 4 types."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        num_nodes, num_types = int(rng.integers(1, most + 1)), int(rng.integers(1, 5))
        yield Graph.from_dag(*random_dag(rng, num_nodes, num_types))


@pytest.mark.parametrize("group", range(GROUPS))
def test_bound_optimal_beam(group):
    """bound <= optimal = exhaustive search <= beam, on 300 graphs in all."""
    for graph in graphs(group, 300 // GROUPS):
        best = fewest(graph)
        assert lower_bound(graph) <= best
        found = schedule(graph, policies.optimal)
        found.check(graph)
        assert len(found) == found.bound == best
        for width in (1, 4):
            searched = schedule(graph, policies.beam(width=width))
            searched.check(graph)
            assert len(searched) >= best
        assert all(len(schedule(graph, p)) >= best for p in (None, policies.critical))


def weights_of(graph):
    """Some cost for a batch of each type."""
    return np.array([1.0, 2.5, 0.25, 4.0])[: len(graph.types)]


@pytest.mark.parametrize("group", range(GROUPS))
def test_optimal_costs(group):
    for graph in graphs(100 + group, 25, most=10):
        weights = weights_of(graph)
        best = fewest(graph, weights)
        found = schedule(graph, policies.optimal(objective=weights_of))
        assert weights[found.batch_type].sum() == pytest.approx(best)
        assert lower_bound(graph, weights) <= best + 1e-9
        assert found.bound == pytest.approx(best)
        searched = schedule(graph, policies.beam(objective=weights_of))
        assert weights[searched.batch_type].sum() >= best - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_a_spent_budget_leaves_a_certified_bound(seed):
    graph = Graph.from_dag(*random_dag(np.random.default_rng(seed), 120, 4))
    bounds = []
    for max_nodes in (0, 10, 300):
        found = schedule(graph, policies.optimal(max_nodes=max_nodes))
        found.check(graph)
        assert lower_bound(graph) <= found.bound <= len(found)
        bounds.append(found.bound)
    assert bounds == sorted(bounds)
    late = schedule(graph, policies.optimal(seconds=0.0))
    late.check(graph)
    assert lower_bound(graph) == late.bound <= len(late)
    best = schedule(graph, policies.optimal)
    assert max(bounds) <= best.bound <= len(best) <= len(found)


def test_wider_beams_are_deterministic():
    graph = Graph.from_dag(*random_dag(np.random.default_rng(0), 200, 4))
    for width in (1, 8):
        first, again = (schedule(graph, policies.beam(width=width)) for _ in range(2))
        np.testing.assert_array_equal(first.node, again.node)
        assert first.policy == again.policy == f"beam {width}"


@pytest.mark.parametrize("seed", range(10))
def test_classes_run_together(seed):
    """Nodes of one class of the quotient are in one batch, whatever the order of types."""
    rng = np.random.default_rng(seed)
    graph = Graph.from_dag(*random_dag(rng, 40, 3, most=1))
    small, of = quotient(graph)
    assert len(small.node_type) == of.max() + 1 < 40
    types = rng.integers(0, 3, 400)
    whole, reduced = schedule(graph, in_turn(types)), schedule(small, in_turn(types))
    whole.check(graph)
    reduced.check(small)
    when = np.empty(40, int)
    when[whole.node] = np.repeat(np.arange(len(whole)), np.diff(whole.node_ptr))
    small_when = np.empty(len(small.node_type), int)
    small_when[reduced.node] = np.repeat(np.arange(len(reduced)), np.diff(reduced.node_ptr))
    np.testing.assert_array_equal(when, small_when[of])


def test_searches_are_policies():
    params = np.float32(1.0)
    fn = lambda p, n: p * sum(range(n), start=p)  # noqa: E731
    for policy in (policies.beam, policies.optimal, policies.beam(width=2)):
        plan = jedbatch.batch(fn, policy=policy).plan(params, [1, 2, 3])
        plan.schedule.check(plan.graph)


def test_unknown_options():
    with pytest.raises(TypeError, match="unexpected keyword"):
        policies.beam(wide=3)
    assert dataclasses.replace(policies.beam, width=3) == policies.beam(width=3)


@pytest.mark.parametrize(
    "objective", [lambda g: [1.0], lambda g: np.zeros(len(g.types)), lambda g: np.nan]
)
def test_what_is_no_objective(objective):
    graph = next(graphs(0, 1))
    with pytest.raises(ValueError, match="a positive number for each"):
        schedule(graph, policies.optimal(objective=objective))
