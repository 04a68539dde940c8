"""Totals of trees of numbers, the least model that batches, for tests of streams and servers."""

import functools
import threading
import time

import jax.numpy as jnp
import numpy as np
from cases.helpers import random_tree

import jedbatch

W = jnp.linspace(0.5, 1.5, 3)


@jedbatch.cell
def add(w, x, y):
    return jnp.tanh(w * (x + y))


def total(w, tree):
    return add(w, total(w, tree[0]), total(w, tree[1])) if isinstance(tree, tuple) else w * tree


def halved(w, tree):
    """As many steps as the value of a tree needs."""
    state, steps = total(w, tree), 0
    while jnp.abs(state).max() > 0.3 and steps < 4:
        state, steps = add(w, state, -0.6 * state), steps + 1
    return state, steps


def trees(count, seed=0):
    """Returns random trees of one to eight numbers."""
    rng = np.random.default_rng(seed)
    leaves = functools.partial(rng.choice, [0.25, 0.5, 0.75])
    return [
        random_tree(rng, int(rng.integers(1, 9)), lambda: float(leaves())) for _ in range(count)
    ]


def planning_threads():
    """Returns the threads of the package that plan ahead."""
    return [t for t in threading.enumerate() if t.name.startswith("jedbatch-plans")]


def assert_no_planning_threads():
    """Waits until none is left, five seconds at most."""
    for _ in range(100):
        if not planning_threads():
            return
        time.sleep(0.05)
    raise AssertionError(planning_threads())
