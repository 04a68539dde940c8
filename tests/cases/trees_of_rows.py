"""Trees whose nodes hold arrays of any length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases.helpers import random_tree

import jedbatch

SITES = [1, 5, 8, 16, 17, 30]  # capacities are 8, 16 and 32 here


def weights():
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 4), "v": (4,), "table": (5, 4)}
    return {k: jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for k, s in shapes.items()}


@jedbatch.cell
def merge(params, left, right, time):
    mixing = jax.nn.softmax(params["w"] * time)
    return jnp.tanh(left @ mixing) * (right @ params["w"]) + time


def prune(params, tree):
    """States [sites, 4] of the root of a tree."""
    if not isinstance(tree, tuple):
        return tree
    left, right, time = tree
    return merge(params, prune(params, left), prune(params, right), time)


def grown(rng, size, sites, width=4):
    """A tree of arrays [sites, width], and of a number at every inner node."""
    pairs = random_tree(rng, size, lambda: rng.normal(size=(sites, width)).astype(np.float32))

    def timed(pair):
        return pair if not isinstance(pair, tuple) else (*map(timed, pair), float(rng.random()))

    return timed(pairs)


def trees(seed, count=8, sites=SITES, least=2, most=7):
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(least, most)), int(rng.choice(sites))) for _ in range(count)]
    return [grown(rng, *size) for size in sizes]


def pairs(seed, count=8, most=7, sites=(1, 4, 8, 11, 19)):
    """Trees of pairs of arrays, of one length each."""
    rng = np.random.default_rng(seed)

    def leaf(n, m):
        return tuple(rng.normal(size=(k, 4)).astype(np.float32) for k in (n, m))

    sizes = [(int(rng.integers(2, most)), *rng.choice(sites, 2)) for _ in range(count)]
    return [random_tree(rng, k, functools.partial(leaf, n, m)) for k, n, m in sizes]


def met(node, params, tree):
    """The pair of arrays at the root, where nodes make one of each two."""
    if not isinstance(tree[0], tuple):
        return tree
    (x, y), (u, v) = (met(node, params, child) for child in tree)
    return node(params, x + 0.5 * u, y - v)


def padded_plan(batched, instances, params=None):
    """The plan, which runs nothing before the graph."""
    plan = batched.plan(weights() if params is None else params, instances)
    assert plan.host.apart is None, plan.host.apart
    assert plan.host.unpadded is None, plan.host.unpadded
    assert plan.host.padded is not None
    assert plan.host.ragged_calls is None
    return plan


def compiles_nothing_late(batched, made):
    """After a few minibatches `made(seed, most=7)`, others, somewhat smaller, compile nothing."""
    for seed in (11, 12, 13):
        batched(weights(), made(seed, most=7))
    before = batched.compilations
    for seed in (14, 15):
        batched(weights(), made(seed, most=6))
    assert batched.compilations == before
