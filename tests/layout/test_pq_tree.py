"""PQ-trees, against the enumeration of all orders."""

import itertools
import sys

import numpy as np
import pytest

from jedbatch._layout.pq_tree import PQTree


def keeps_together(order, leaves):
    """Whether a set is consecutive in an order."""
    places = [place for place, leaf in enumerate(order) if leaf in leaves]
    return not places or places[-1] - places[0] + 1 == len(places)


def random_sets(rng, num_leaves, most=8):
    """A family of random sets, dense or sparse."""
    density = rng.choice([0.25, 0.4, 0.6, 0.8])
    for _ in range(int(rng.integers(1, most + 1))):
        yield np.flatnonzero(rng.random(num_leaves) < density).tolist()


def judge(tree, sets, orders):
    """Reduces by sets, and compares what is permitted with a filter; returns (taken, refused)."""
    counts = [0, 0]
    for leaves in sets:
        before, changes = str(tree), tree.num_changes
        left = [order for order in orders if keeps_together(order, set(leaves))]
        taken = tree.reduce(leaves)
        tree.check()
        counts[not taken] += 1
        assert taken == bool(left), (before, leaves)
        assert (tree.num_changes > changes) == (0 < len(left) < len(orders))
        if taken:
            orders = left
        else:
            assert str(tree) == before
        permitted = [tuple(order) for order in tree.orders()]
        assert len(permitted) == len(orders), (before, leaves, str(tree))
        assert set(permitted) == set(orders), (before, leaves, str(tree))
        assert tuple(tree.frontier()) in set(orders)
    return np.array(counts)


@pytest.mark.parametrize("seed", range(8))
def test_all_orders(seed):
    """4,000 families of up to 5 leaves, 200 of 6 and 24 of 7 in all."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(2, int)
    sizes = [*rng.integers(0, 6, 500).tolist(), *[6] * 25, *[7] * 3]
    for num_leaves in sizes:
        orders = list(itertools.permutations(range(num_leaves)))
        counts += judge(PQTree(num_leaves), random_sets(rng, num_leaves), orders)
    assert counts.min() > 50


@pytest.mark.parametrize("seed", range(4))
def test_the_printed_form_depends_on_the_orders_alone(seed):
    """The order in which sets are reduced leaves no trace, nor do copies or sets refused."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        num_leaves = int(rng.integers(2, 15))
        hidden = rng.permutation(num_leaves)
        sets = []
        for _ in range(int(rng.integers(1, 10))):
            first, last = sorted(rng.integers(0, num_leaves + 1, 2).tolist())
            sets.append(hidden[first:last].tolist())
        tree, other = PQTree(num_leaves), PQTree(num_leaves)
        assert all(tree.reduce(leaves) for leaves in sets)
        for leaves in rng.permutation(len(sets)):
            copy = other.copy()
            copy.reduce(rng.permutation(num_leaves)[:3])
            other.reduce(rng.permutation(sets[leaves]))
        assert str(tree) == str(other)
        assert tree.frontier() == other.frontier()
        assert all(keeps_together(tree.frontier(), set(leaves)) for leaves in sets)


@pytest.mark.parametrize("seed", range(6))
def test_intervals_of_a_hidden_order(seed):
    num_leaves = 2_000
    rng = np.random.default_rng(seed)
    hidden = rng.permutation(num_leaves).tolist()
    tree = PQTree(num_leaves)
    sets = []
    for _ in range([200, 800, 2_000][seed % 3]):
        size = min(num_leaves, 1 + int(rng.geometric([0.15, 0.02][seed % 2])))
        first = int(rng.integers(0, num_leaves - size + 1))
        sets.append(hidden[first : first + size])
        assert tree.reduce(sets[-1])
    tree.check()
    row = np.empty(num_leaves, int)
    row[tree.frontier()] = np.arange(num_leaves)
    assert sorted(row) == list(range(num_leaves))
    for leaves in sets:
        assert np.ptp(row[leaves]) + 1 == len(leaves)


def test_refused_sets_leave_no_trace():
    """A large tree, and sets that it mostly refuses."""
    rng = np.random.default_rng(0)
    num_leaves, refused = 300, 0
    hidden = rng.permutation(num_leaves)
    tree = PQTree(num_leaves)
    for _ in range(400):
        first = int(rng.integers(0, num_leaves - 12))
        assert tree.reduce(hidden[first : first + 12])
        before = str(tree)
        if not tree.copy().reduce(some := rng.permutation(num_leaves)[:5]):
            refused += 1
            assert not tree.reduce(some)
            assert str(tree) == before
            tree.check()
    assert refused > 300


def test_printed_forms():
    tree = PQTree(6)
    assert str(tree) == "(0 1 2 3 4 5)"
    assert tree.reduce([4, 5])
    assert tree.reduce([3, 4, 5])
    assert tree.reduce([2, 3])
    assert str(tree) == "(0 1 [2 3 (4 5)])"
    assert tree.frontier() == [0, 1, 2, 3, 4, 5]
    assert tree.kind[tree.root] == "P"
    assert [tree.kind[node] for node in tree.children(tree.root)] == ["leaf", "leaf", "Q"]
    assert not tree.reduce([2, 5, 1, 0])
    assert tree.reduce([5, 0])
    assert str(tree) == "([0 5 4 3 2] 1)"


@pytest.mark.parametrize(("num_leaves", "text"), [(0, ""), (1, "0"), (2, "(0 1)"), (3, "(0 1 2)")])
def test_small_trees(num_leaves, text):
    tree = PQTree(num_leaves)
    tree.check()
    for leaves in ([], range(num_leaves), range(min(1, num_leaves))):
        assert tree.reduce(leaves)
    assert str(tree) == text
    assert tree.frontier() == list(range(num_leaves))
    assert tree.num_changes == 0


def test_subtrees():
    tree = PQTree(7)
    for leaves in ([0, 1], [1, 2], [2, 3], [4, 5, 6], [3, 4, 5, 6]):
        assert tree.reduce(leaves)
    assert str(tree) == "[0 1 2 3 (4 5 6)]"
    assert tree.subtree([2]) == []
    ((node, children),) = tree.subtree([1, 3, 2])
    assert node == tree.root
    assert children in ([1, 2, 3], [3, 2, 1])
    (inner, parts), (node, children) = tree.subtree([5, 3, 6, 4])
    assert tree.kind[inner] == "P"
    assert sorted(parts) == [4, 5, 6]
    assert node == tree.root
    assert set(children) == {inner, 3}


def test_deep_trees():
    """A chain of nested sets is as deep as it has leaves; nothing recurses."""
    num_leaves = 1_500
    assert num_leaves > sys.getrecursionlimit()
    tree = PQTree(num_leaves)
    for size in range(num_leaves - 1, 1, -1):
        assert tree.reduce(range(size))
    assert tree.frontier() == list(range(num_leaves))
    assert str(tree).count("(") == num_leaves - 1
    tree.check()
    for leaf in range(num_leaves - 2):
        assert tree.reduce([leaf + 1, leaf + 2])
    assert str(tree) == f"[{' '.join(map(str, range(num_leaves)))}]"


def test_cost_is_that_of_the_set():
    """Small sets in a large tree visit few nodes."""
    tree = PQTree(100_000)
    visits = 0
    parent = tree.parent

    def counting(node):
        nonlocal visits
        visits += 1
        return parent(node)

    tree.parent = counting
    for first in range(0, 5_000, 5):
        assert tree.reduce(range(first, first + 8))
    assert visits < 30 * 1_000
