"""Rounds of functions that decide on values, and of lazy scopes, with the tables that run."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch import data

from .plans import digest, printed

HIDDEN = 3
TREES = data.synthetic_treebank(5, num_words=9, seed=2, mean_length=4)


@contextlib.contextmanager
def tables_run() -> Iterator[list[str]]:
    """Yields a list that grows by digests of the tables that compiled programs are called with."""
    found: list[str] = []
    jit = jax.jit

    def is_table(x: Any) -> bool:
        of_integers = getattr(x, "dtype", None) in (np.int32, np.uint32)
        return isinstance(x, np.ndarray | jax.Array) and of_integers and x.ndim == 1

    class Spied:
        """A compiled function that notes its flat integer arguments, and tuples of such."""

        def __init__(self, *args: Any, **options: Any):
            self._call = jit(*args, **options)

        def __call__(self, *args: Any, **options: Any) -> Any:
            parts = [[y for y in (x if type(x) is tuple else [x]) if y is not None] for x in args]
            tables = [x for part in parts if all(map(is_table, part)) for x in part]
            if tables:
                found.append(digest(*tables))
            return self._call(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._call, name)

    with mock.patch("jax.jit", Spied):
        yield found


@jedbatch.cell
def leaf(params: Any, word: Any) -> jax.Array:
    """The vector of a word."""
    return jnp.tanh(params["words"][word])


@jedbatch.cell
def node(params: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """The vector of a pair."""
    return jnp.tanh(params["w"] @ left - params["v"] @ right)


def parameters() -> dict[str, jax.Array]:
    """Weights that are far from where decisions change."""
    rng = np.random.default_rng(0)
    shapes = {"words": (9, HIDDEN), "w": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN)}
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def encode(params: Any, t: Any) -> jax.Array:
    """The vector of a tree: (label, word) or (label, left, right)."""
    if len(t) == 2:
        return leaf(params, t[1])
    return node(params, encode(params, t[1]), encode(params, t[2]))


def pruned(params: Any, t: Any) -> tuple[jax.Array, int]:
    """Reads right subtrees only where the left one is not small."""
    if len(t) == 2:
        return leaf(params, t[1]), 1
    left, seen = pruned(params, t[1])
    if left.sum() < 0:
        return left, seen
    right, more = pruned(params, t[2])
    return node(params, left, right), seen + more


def settled(params: Any, t: Any) -> tuple[jax.Array, int]:
    """Halves a vector until it is small."""
    h, steps = encode(params, t), 0
    while jnp.abs(h).max() > 0.2:
        h, steps = node(params, h / 2, h), steps + 1
        if steps == 4:
            break
    return h, steps


def deciding() -> str:
    """Rounds of calls of functions that decide on values, and of a gradient."""
    depth = jedbatch.policies.depth
    lines = []
    with tables_run() as tables:
        for fn in (pruned, settled):
            batched = jedbatch.batch(fn, policy=depth)
            for trees in (TREES, TREES[:2]):
                batched(parameters(), trees)
                lines += [f"# {fn.__name__}, {len(trees)} trees", ""]
                lines += [printed(batched.last_rounds), *_taken(tables)]
            lines += [f"{batched.compilations} programs compiled", ""]

        def total(params: Any) -> jax.Array:
            return batch_of_pruned(params, TREES)[0].sum()

        batch_of_pruned = jedbatch.batch(pruned, policy=depth)
        jax.grad(total)(parameters())
        lines += ["# gradient of pruned", *_taken(tables)]
    return "\n".join([*lines, f"{batch_of_pruned.compilations} programs compiled"]) + "\n"


def _taken(tables: list[str]) -> list[str]:
    found = ["", f"  tables {' '.join(tables)}", ""]
    tables.clear()
    return found


def lazily() -> str:
    """Rounds of a lazy scope: a loop, a value that is read in between, and a gradient."""
    lines = []
    make_scope = jedbatch.Lazy(policy=jedbatch.policies.depth)
    params = parameters()
    with tables_run() as tables:
        with make_scope() as scope:
            found = [encode(params, t) for t in TREES]
            number = float(found[0].sum() * 0)
            found += [encode(params, t) + number for t in TREES[:2]]
        lines += ["# scope", "", _rounds(scope), *_taken(tables)]

        def total(params: Any) -> jax.Array:
            with make_scope():
                return sum(encode(params, t).sum() for t in TREES)

        jax.grad(total)(params)
        lines += ["# gradient", *_taken(tables)]
    return "\n".join(lines)


def _rounds(scope: Any) -> str:
    return "\n".join(
        f"{r.nodes} nodes in {r.batches} batches for {r.futures} futures" for r in scope.rounds
    )


ROUNDS = {"rounds": deciding, "lazy": lazily}
