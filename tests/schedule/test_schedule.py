"""Schedules: valid, no better than the bound, and known where the answer is known."""

import numpy as np
import pytest
from cases.helpers import fewest, random_dag

import jedbatch
from jedbatch import Graph, lower_bound, policies, schedule
from jedbatch._schedule.components import by_rank
from jedbatch._schedule.fsm import FSM
from jedbatch.errors import NothingReadyError

HEURISTICS = [
    policies.depth,
    policies.agenda,
    policies.height,
    policies.critical,
    policies.sufficient,
]


def random_graph(seed, num_nodes=10, num_types=3):
    return Graph.from_dag(*random_dag(np.random.default_rng(seed), num_nodes, num_types))


@pytest.mark.parametrize("policy", [None, *HEURISTICS])
@pytest.mark.parametrize("seed", range(12))
def test_valid_and_not_below_the_bound(policy, seed):
    graph = random_graph(seed, num_nodes=40)
    found = schedule(graph, policy)
    found.check(graph)
    assert len(found) >= lower_bound(graph)
    assert sum(len(nodes) for _, nodes in found.batches) == 40
    again = schedule(graph, policy)
    np.testing.assert_array_equal(found.node, again.node)


@pytest.mark.parametrize("seed", range(25))
def test_against_exhaustive_search(seed):
    graph = random_graph(seed)
    best = fewest(graph)
    assert lower_bound(graph) <= best
    assert all(len(schedule(graph, p)) >= best for p in HEURISTICS[1:])
    optimal = by_rank(graph)
    if optimal is not None:
        optimal.check(graph)
        assert len(optimal) == best == lower_bound(graph) == optimal.bound


@pytest.mark.parametrize("seed", range(12))
def test_none_is_the_best_heuristic(seed):
    graph = random_graph(seed, num_nodes=30)
    assert len(schedule(graph)) <= min(len(schedule(graph, p)) for p in HEURISTICS)


@pytest.mark.parametrize("seed", range(25))
def test_what_the_frontier_says(seed):
    """Every number a policy sees, against brute force after every batch."""
    graph = random_graph(seed, num_nodes=16)
    types, (maker, reader) = graph.node_type, graph.edges
    preds = [maker[reader == n].tolist() for n in range(16)]
    succs = [reader[maker == n].tolist() for n in range(16)]
    before, depth, height = [], [], [0] * 16
    for n in range(16):
        before.append(set(preds[n]).union(*(before[p] for p in preds[n])))
        depth.append(max((depth[p] + 1 for p in preds[n]), default=0))
    chain = [0] * 16
    for n in reversed(range(16)):
        height[n] = max((height[s] + 1 for s in succs[n]), default=0)
        after = [m for m in range(16) if n in before[m] and types[m] == types[n]]
        chain[n] = 1 + max((chain[m] for m in after), default=0)

    frontier, done = policies.Frontier(graph), set()
    rng = np.random.default_rng(seed)
    while len(done) < 16:
        left = [n for n in range(16) if n not in done]
        ready = [n for n in left if done.issuperset(preds[n])]
        assert frontier.ready_types == sorted({int(types[n]) for n in ready})
        for t in frontier.ready_types:
            mine = [n for n in left if types[n] == t]
            first = [n for n in mine if not any(m in before[n] for m in mine)]
            assert frontier.num_ready[t] == sum(types[n] == t for n in ready)
            assert frontier.num_left[t] == len(mine)
            assert frontier.num_next(t) == len(first)
            assert frontier.mean_depth(t) == pytest.approx(np.mean([depth[n] for n in mine]))
            top = max(height[n] for n in ready if types[n] == t)
            tallest = [n for n in ready if types[n] == t and height[n] == top]
            turning = [
                any(height[s] == top - 1 and types[s] != t for s in succs[n]) for n in tallest
            ]
            assert frontier.tallest(t) == (top, len(tallest), sum(turning))
            longest = max(chain[n] for n in mine)
            begins = {n for n in mine if chain[n] == longest}
            assert frontier.shortens(t) == begins.issubset(ready)
        done.update(frontier.run(int(rng.choice(frontier.ready_types))))


def test_known_counts():
    """Figure 1 of the ED-Batch paper: a tree with an output at every node.

    Leaves I, inner nodes and outputs O; with inner nodes first, the outputs run once.
    """
    # Two trees ((a b) c) and (d e) with an output per node.
    types = [0, 0, 0, 1, 1] + [0, 0, 1] + [2] * 8
    preds = [[], [], [], [0, 1], [3, 2], [], [], [5, 6]] + [[n] for n in range(8)]
    graph = Graph.from_dag(types, preds)
    assert lower_bound(graph) == 1 + 2 + 1
    assert len(schedule(graph, policies.sufficient)) == 4
    assert len(schedule(graph, policies.depth)) == 6
    assert len(schedule(graph)) == 4


def test_chains_and_trees_are_optimal():
    """Whatever their outputs and reductions."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        types, preds = [], []
        for _ in range(5):
            ends = []
            for _ in range(int(rng.integers(1, 9))):
                types.append(0 if not ends else 1)
                preds.append(ends[-1:])
                ends.append(len(types) - 1)
            outputs = []
            for end in ends:
                types.append(2)
                preds.append([end])
                outputs.append(len(types) - 1)
            types.append(3)
            preds.append(outputs)
        graph = Graph.from_dag(types, preds)
        assert len(schedule(graph)) == lower_bound(graph)


def test_instances_apart_from_others_whose_types_read_each_other():
    """Types are alone among some instances, and read each other in a circle among others."""
    chain = Graph.from_dag([0, 0, 0, 2, 3, 2], [[], [0], [1], [], [3], [4]])
    circle = Graph.from_dag([0, 1, 0, 1, 0, 2, 3], [[], [0], [1], [2], [3], [], []])
    whole = Graph.select([(chain, 0), (circle, 0)])
    machine = FSM("phase", ("0", "1", "2", "3"), ())
    for policy in (machine, None, policies.agenda):
        schedule(whole, policy)
        for k, part in enumerate((chain, circle)):
            batches = schedule(Graph.select([(whole, k)]), policy)
            batches.check(part)
            assert lower_bound(part) <= len(batches) <= len(part.node_type)


def test_a_policy_is_any_callable():
    graph = random_graph(3, num_nodes=20)

    def rarest(frontier):
        return min(frontier.ready_types, key=lambda t: frontier.num_ready[t])

    found = schedule(graph, rarest)
    found.check(graph)
    assert found.policy == "rarest"


@pytest.mark.parametrize("choice", [99, -1, float("nan"), None, "node"])
def test_choosing_what_is_not_ready(choice):
    with pytest.raises(NothingReadyError, match=r"frontier\.ready_types"):
        schedule(random_graph(0), lambda frontier: choice)


def test_what_is_no_policy():
    with pytest.raises(TypeError, match="got policy='agenda'; expected a callable"):
        schedule(random_graph(0), "agenda")


def test_gaps_between_type_ids_and_empty_graphs():
    graph = Graph.from_dag([7, 2, 7], [[], [0], [1]])
    assert [t for t, _ in schedule(graph).batches] == [7, 2, 7]
    empty = Graph.from_dag([], [])
    assert len(schedule(empty)) == lower_bound(empty) == 0


def test_a_wrong_schedule_is_found_out():
    graph = Graph.from_dag([0, 1], [[], [0]])
    right = schedule(graph)
    wrong = jedbatch.Schedule(right.batch_type[::-1], right.node_ptr, right.node[::-1])
    with pytest.raises(ValueError, match="reads node 0"):
        wrong.check(graph)
    with pytest.raises(ValueError, match="never or twice"):
        jedbatch.Schedule(right.batch_type, right.node_ptr, right.node * 0).check(graph)


def test_policies_reach_the_batched_function():
    params = np.float32(1.0)
    fn = lambda p, n: p * sum(range(n), start=p)  # noqa: E731
    for policy in HEURISTICS:
        plan = jedbatch.batch(fn, policy=policy).plan(params, [1, 2, 3])
        assert plan.schedule.policy == policy.__name__


def test_printing():
    assert "in 3 batches (agenda)" in str(
        schedule(Graph.from_dag([0, 0, 1], [[], [0], [0, 1]]), policies.agenda)
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_frontier_can_be_asked_at_any_time(seed):
    """What is asked for late is what was kept up to date from the beginning."""
    graph = random_graph(seed, num_nodes=30)
    rng = np.random.default_rng(seed)
    early, late = policies.Frontier(graph), policies.Frontier(graph)

    def ask(frontier):
        ready = frontier.ready_types
        numbers = [[f(t) for f in (frontier.num_next, frontier.mean_depth)] for t in ready]
        return ready, numbers, [(frontier.tallest(t), frontier.shortens(t)) for t in ready]

    ask(early)
    for _ in range(int(rng.integers(0, len(schedule(graph))))):
        t = int(rng.choice(early.ready_types))
        assert sorted(early.run(t)) == sorted(late.run(t))
    if early.ready_types:
        assert ask(early) == ask(late)
