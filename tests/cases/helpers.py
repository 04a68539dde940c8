"""The judge of everything, the plain Python loop over instances; trees and graphs for it."""

import functools

import jax
import numpy as np
import pytest

from jedbatch._jaxpr.symmetric import DifferentiableFunction
from jedbatch.testing import (
    assert_close,
    assert_no_recompile,
    check_against_loop,
    compilations,
    loop,
    weighted_sum,
)

__all__ = [
    "assert_close",
    "assert_no_recompile",
    "by_themselves",
    "check",
    "compilations",
    "loop",
    "mostly_slow",
    "number",
]

# Values come with gradients; calls that are not differentiated are compared by `test_oracle`, and
# where they are a subject of a test.
check, number = functools.partial(check_against_loop, inference=False), weighted_sum


class Counted(float):
    """Numbers that count how many of them there are."""

    alive = 0

    def __new__(cls, value):
        Counted.alive += 1
        return super().__new__(cls, value)

    def __del__(self):
        Counted.alive -= 1


def mostly_slow(cases, *fast):
    """Parameters of a test of which all are marked as slow but those named in `fast`."""
    names = [getattr(case, "__name__", case) for case in cases]
    assert set(fast) <= set(names), (fast, names)
    return [
        case if name in fast else pytest.param(case, marks=pytest.mark.slow)
        for case, name in zip(cases, names, strict=True)
    ]


def by_themselves(functions, *names):
    """Parameters of a test: some functions of a table, and one that returns what all others return.

    The latter is marked as slow. One program for all of them takes less time than one for each.
    """
    others = {name: fn for name, fn in functions.items() if name not in names}

    def together(*args):
        return {name: fn(*args) for name, fn in others.items()}

    alone = [pytest.param(functions[name], id=name) for name in names]
    return [*alone, pytest.param(together, id="others", marks=pytest.mark.slow)]


def random_tree(rng, size, leaf):
    """A nested pair of `size` leaves, each made by `leaf()`."""
    if size == 1:
        return leaf()
    left = int(rng.integers(1, size))
    return random_tree(rng, left, leaf), random_tree(rng, size - left, leaf)


def random_dag(rng, num_nodes, num_types, most=3):
    """(types, predecessors) of a random graph whose nodes read up to `most` earlier nodes."""
    types = rng.integers(0, num_types, num_nodes)
    preds = [
        sorted(rng.choice(n, int(rng.integers(0, min(most, n) + 1)), replace=False).tolist())
        for n in range(num_nodes)
    ]
    return types, preds


def fewest(graph, weights=None):
    """The fewest batches of Algorithm 1, or what they cost, by exhaustive search."""
    num_nodes = len(graph.node_type)
    weights = np.ones(len(graph.types)) if weights is None else weights
    maker, reader = graph.edges
    before = [0] * num_nodes
    for m, r in zip(maker.tolist(), reader.tolist(), strict=True):
        before[r] |= 1 << m
    types = graph.node_type.tolist()
    least, level = {0: 0.0}, {0}
    while level:
        following = set()
        for done in level:
            ready = [n for n in range(num_nodes) if not done >> n & 1 and not before[n] & ~done]
            for t in {types[n] for n in ready}:
                after = done | sum(1 << n for n in ready if types[n] == t)
                cost = least[done] + weights[t]
                if cost < least.get(after, np.inf):
                    least[after] = cost
                    following.add(after)
        level = following
    return least[(1 << num_nodes) - 1]


def check_types_by_traces(monkeypatch):
    """Has every differentiable function compare the types it gives with a trace; returns a list.

    It grows by the (shape, dtype) of all results with each call.
    """
    checked, call = [], DifferentiableFunction.__call__

    def compared(self, args):
        results = call(self, args)
        traced = [(x.shape, x.dtype, x.weak_type) for x in jax.eval_shape(self._run, args)]
        assert [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, results)] == traced
        checked.append(tuple(traced))
        return results

    monkeypatch.setattr(DifferentiableFunction, "__call__", compared)
    return checked
