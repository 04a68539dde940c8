"""Trees whose loop runs inside of a lazy scope, and by itself."""

import jax
import jax.numpy as jnp
from cases import programs

import jedbatch

H = programs.H
node = jedbatch.cell(programs.node)
leaf = jedbatch.cell(programs.leaf)


def encode(params, t):
    return (
        node(params, encode(params, t[0]), encode(params, t[1]))
        if isinstance(t, tuple)
        else (leaf(params, t))
    )


PARAMS = programs.tree_params(0)
TREES = programs.trees(6, seed=1)


def total(params, trees=TREES, scope=jedbatch.lazy):
    """The sum of the squares of all encodings, added up inside of the scope."""
    with scope():
        return sum((encode(params, t) ** 2).sum() for t in trees)


def total_by_loop(params, trees=TREES):
    return sum((encode(params, t) ** 2).sum() for t in trees)


def loop_in_scope(fn, params, instances, scope=jedbatch.lazy):
    with scope():
        results = [fn(params, instance) for instance in instances]
    return jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(r) for r in rows]), *results)
