"""A table of programs: what a function of one instance may look like.

Each entry makes `(fn, params, instances)` for a number of instances and a seed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases.helpers import random_dag, random_tree
from flax import linen, nnx

import jedbatch

H = 4
WORDS = 11


def weights(seed, **shapes):
    """Random float32 parameters, zero-mean."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for k, s in shapes.items()}


def trees(num, seed, largest=7):
    """Nested pairs of words."""
    rng = np.random.default_rng(seed)
    word = lambda: int(rng.integers(WORDS))  # noqa: E731
    return [random_tree(rng, int(rng.integers(1, largest)), word) for _ in range(num)]


def tree_params(seed):
    return weights(seed, E=(WORDS, H), W=(2 * H, H), b=(H,), out=(H, 3))


def recursion(leaf, node, out):
    """A model of trees from three functions."""

    def fn(params, tree):
        def visit(t):
            if isinstance(t, tuple):
                return node(params, visit(t[0]), visit(t[1]))
            return leaf(params, t)

        return out(params, visit(tree))

    return fn


def leaf(params, word):
    return jnp.tanh(params["E"][word])


def node(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["W"] + params["b"])


def out(params, h):
    return jax.nn.log_softmax(h @ params["out"])


def tree_cells(num, seed):
    fn = recursion(jedbatch.cell(leaf), jedbatch.cell(node), jedbatch.cell(out))
    return fn, tree_params(seed), trees(num, seed)


def tree_raw(num, seed):
    return recursion(leaf, node, out), tree_params(seed), trees(num, seed, 4)


def tree_jit(num, seed):
    return (
        recursion(jax.jit(leaf), jax.jit(node), jax.jit(out)),
        tree_params(seed),
        trees(num, seed),
    )


def tree_linen(num, seed):
    """Flax linen layers, called without any cell."""
    embed, dense = linen.Embed(WORDS, H), linen.Dense(H)

    def fn(params, tree):
        if isinstance(tree, tuple):
            both = jnp.concatenate([fn(params, tree[0]), fn(params, tree[1])])
            return jnp.tanh(dense.apply(params["dense"], both))
        return embed.apply(params["embed"], jnp.int32(tree))

    keys = jax.random.split(jax.random.key(seed))
    params = {
        "embed": embed.init(keys[0], jnp.int32(0)),
        "dense": dense.init(keys[1], jnp.zeros(2 * H)),
    }
    return fn, params, trees(num, seed, 4)


def chain_nnx(num, seed):
    """A Flax nnx recurrent cell over ragged sequences of vectors, inside a jedbatch cell."""
    definition, state = nnx.split(nnx.GRUCell(3, H, rngs=nnx.Rngs(seed)))

    @jedbatch.cell
    def step(state, h, x):
        return nnx.merge(definition, state)(h, x)[0]

    def fn(state, sequence):
        h = jnp.zeros(H)
        for x in sequence:
            h = step(state, h, x)
        return h

    return fn, state, sequences(num, seed)


def sequences(num, seed, longest=6):
    """Float32 arrays [length, 3]; the first is empty."""
    rng = np.random.default_rng(seed)
    lengths = [0, *rng.integers(1, longest, num).tolist()][:num]
    return [rng.normal(size=(n, 3)).astype(np.float32) for n in lengths]


def mixed(num, seed):
    """A cell, a linen layer, a jit-ted function and single operations in one recursion."""
    dense = linen.Dense(H)
    squash = jax.jit(lambda x: x / (1 + jnp.abs(x)))
    compose = jedbatch.cell(node)

    def fn(params, tree):
        if not isinstance(tree, tuple):
            return squash(params["E"][tree]) * 0.5
        left, right = fn(params, tree[0]), fn(params, tree[1])
        gate = jax.nn.sigmoid(dense.apply(params["dense"], left - right))
        return gate * compose(params, left, right) + (1 - gate) * left

    params = tree_params(seed)
    params["dense"] = dense.init(jax.random.key(seed), jnp.zeros(H))
    return fn, params, trees(num, seed, 4)


def dag(num, seed):
    """Graphs with sharing: every node reads any number of earlier ones."""
    rng = np.random.default_rng(seed)
    instances = []
    for _ in range(num):
        types, preds = random_dag(rng, int(rng.integers(1, 9)), 3)
        instances.append((tuple(types.tolist()), tuple(map(tuple, preds))))

    @jedbatch.cell
    def combine(params, total, *, kind):
        return jnp.sin(params["M"][kind] @ total + params["b"])

    def fn(params, instance):
        values = []
        for kind, preds in zip(*instance, strict=True):
            total = sum((values[p] for p in preds), start=params["b"])
            values.append(combine(params, total, kind=kind))
        return {"last": values[-1], "all": sum(values[1:], start=values[0])}

    return fn, weights(seed, M=(3, H, H), b=(H,)), instances


def several_roots(num, seed):
    """Results that are dicts and tuples of inner values, an input and a parameter."""
    add = jedbatch.cell(node)

    def fn(params, tree):
        words = []

        def visit(t):
            if isinstance(t, tuple):
                return add(params, visit(t[0]), visit(t[1]))
            words.append(t)
            return params["E"][t]

        h = visit(tree)
        first = params["E"][words[0]]
        return {"root": h, "first": (first, words[0]), "bias": params["b"], "count": len(words)}

    return fn, tree_params(seed), trees(num, seed)


def no_work(num, seed):
    """Every third instance does no work at all, others little."""
    double = jedbatch.cell(lambda params, x: x * params["b"])

    def fn(params, instance):
        kind, x = instance
        if kind == 0:
            return params["b"]
        if kind == 1:
            return x
        return double(params, x)

    rng = np.random.default_rng(seed)
    instances = [(i % 3, rng.normal(size=H).astype(np.float32)) for i in range(num)]
    return fn, weights(seed, b=(H,)), instances


def unread_and_twice(num, seed):
    """Values nobody reads, and one value read twice by one node."""
    twice = jedbatch.cell(lambda params, x, y: jnp.cos(params["W"] @ jnp.concatenate([x, y])))

    def fn(params, length):
        h = params["b"]
        for i in range(length):
            twice(params, h, h + i)  # nobody reads this
            h = twice(params, h, h)
        return h

    return fn, weights(seed, W=(H, 2 * H), b=(H,)), [i % 4 + 1 for i in range(num)]


def several_results(num, seed):
    """A cell whose results differ in shape and dtype, some without a gradient."""

    @jedbatch.cell
    def leaf(params, word):
        h = params["E"][word]
        return {"h": h, "best": jnp.argmax(h), "positive": h > 0, "pair": (h[:2], h.sum())}

    @jedbatch.cell
    def node(params, a, b):
        h = jnp.where(a["positive"], a["h"], b["h"]) * params["b"] + b["pair"][1]
        h = h.at[a["best"]].add(a["pair"][0][1])
        best = jnp.maximum(a["best"], b["best"])
        return {"h": h, "best": best, "positive": h > b["h"], "pair": (h[1:3], h.mean())}

    return recursion(leaf, node, lambda params, s: s), tree_params(seed), trees(num, seed)


def division(num, seed):
    """Cells that divide by their operands: a lane of zeros would make NaN."""

    @jedbatch.cell
    def node(params, left, right):
        return (left @ params["W"] / jnp.linalg.norm(left)) / right + jnp.log(jnp.abs(right))

    def leaf(params, word):
        return params["E"][word] + 3.0

    params = weights(seed, E=(WORDS, H), W=(H, H))
    return recursion(leaf, node, lambda params, h: h), params, trees(num, seed, 5)


def dropout(num, seed):
    """Random keys that belong to instances."""

    @jedbatch.cell
    def drop(key, h):
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)

    def fn(params, instance):
        key, tree = instance

        def visit(t, key):
            left, right, mine = jax.random.split(key, 3)
            if not isinstance(t, tuple):
                return drop(mine, params["E"][t])
            return drop(mine, node(params, visit(t[0], left), visit(t[1], right)))

        return visit(tree, key)

    keys = jax.random.split(jax.random.key(seed), num)
    return fn, tree_params(seed), list(zip(keys, trees(num, seed, 4), strict=True))


def control_flow(num, seed):
    """scan, while and cond inside cells; each instance repeats as often as its number says."""

    @jedbatch.cell
    def settle(params, h, *, steps):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["W"]), None), h, length=steps)[0]

    @jedbatch.cell
    def choose(params, h, n):
        return jax.lax.cond(n > 2, lambda h: h * params["b"], jnp.sin, h)

    @jedbatch.cell
    def shrink(h):
        halve = lambda h: h / 2  # noqa: E731
        return jax.lax.stop_gradient(jax.lax.while_loop(lambda h: jnp.abs(h).max() > 0.3, halve, h))

    def fn(params, n):
        h = params["b"]
        for i in range(n):
            h = choose(params, settle(params, h, steps=2 + i % 2), n)
        return h + shrink(h)

    return fn, weights(seed, W=(H, H), b=(H,)), [1 + i % 4 for i in range(num)]


def custom_rules(num, seed):
    """Functions with derivative rules of their own, inside and outside of cells."""

    @jax.custom_vjp
    def clip(x):
        return jnp.clip(x, -1, 1)

    clip.defvjp(lambda x: (clip(x), None), lambda _, g: (2 * g,))
    act = jedbatch.cell(lambda params, x: clip(jax.nn.silu(x @ params["W"])))

    def fn(params, n):
        h = params["b"]
        for _ in range(n):
            h = clip(jax.nn.softplus(act(params, h)))
        return h

    return fn, weights(seed, W=(H, H), b=(H,)), [1 + i % 4 for i in range(num)]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["n"])
@dataclasses.dataclass(frozen=True)
class Example:
    """An instance: an array and a number."""

    x: np.ndarray
    n: int


def values_and_options(num, seed):
    """Numbers by position, numbers by keyword, arrays in dataclasses, closed-over weights."""
    table = jnp.asarray(np.random.default_rng(seed).normal(size=(3, H)), jnp.float32)

    @jedbatch.cell
    def scale(params, x, factor, *, power):
        return x**power * factor * params["b"] + table[1]

    def fn(params, example):
        h = example.x
        for i in range(example.n):
            h = scale(params, h, 0.1 * i, power=1 + i % 2) + table.sum(axis=0) * 0.5
        return h

    rng = np.random.default_rng(seed)
    instances = [Example(rng.normal(size=H).astype(np.float32), i % 4) for i in range(num)]
    return fn, weights(seed, b=(H,)), instances


PROGRAMS = [
    tree_cells,
    tree_raw,
    tree_jit,
    tree_linen,
    chain_nnx,
    mixed,
    dag,
    several_roots,
    no_work,
    unread_and_twice,
    several_results,
    division,
    dropout,
    control_flow,
    custom_rules,
    values_and_options,
]
