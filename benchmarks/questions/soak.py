"""Does memory stay as it is over ten thousand steps of training on new instances?

Small models on `--size` new random trees a step, differentiated and updated as in a loop without
`jax.jit`. Models differ in what is made anew in every call: nothing, cells with closures, lists of
children that are stacked, shared containers, derivative rules, strings and numbers.

RSS MB     of the process.
objects    that Python's collector watches.
held MB    counted against `cache_bytes` by the session; what each of its caches holds is estimated.
types      entries of what types are made of, which stay until there are 50,000.
compiled   programs, so far.

A smaller `--cache-bytes` shows sooner where it ends: with the default that is at 65,536 instances
(`cache_size`) and 1,024 minibatches.
"""

import functools
import gc
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common

HIDDEN = 8
WORDS = 50


def row(p, word):
    """The state of a word."""
    return p["words"][word], jnp.zeros(HIDDEN)


def lstm(p, left, right):
    """The state of a node of a binary TreeLSTM."""
    i, f, o, u = jnp.split((left[0] + right[0]) @ p["gates"], 4)
    c = jax.nn.sigmoid(i) * jnp.tanh(u) + jax.nn.sigmoid(f) * (left[1] + right[1])
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


leaf, node = jedbatch.cell(row, name="leaf"), jedbatch.cell(lstm, name="node")
joined = jedbatch.cell(lambda p, xs: jnp.tanh(jnp.stack(xs).mean(0) @ p["w"]), name="joined")


def encode(p, tree, leaf=leaf, node=node):
    """The state of a tree."""
    if isinstance(tree, int):
        return leaf(p, tree)
    return node(p, *(encode(p, part, leaf, node) for part in tree))


def marked(p, tree):
    """Marked cells."""
    return encode(p, tree)[0].sum()


def made(p, tree):
    """Cells of closures and partials that each call makes."""
    scale = 1 + len(str(tree)) % 3
    own = jedbatch.cell(lambda p, x, y: tuple(scale * z for z in lstm(p, x, y)), name="made")
    first = jedbatch.cell(functools.partial(lambda _, p, i: row(p, i), 2.0), name="partial")
    return encode(p, tree, first, own)[0].sum()


def lists(p, tree):
    """Lists of children in cells."""

    def of(tree):
        if isinstance(tree, int):
            return leaf(p, tree)[0]
        return joined(p, [of(part) for part in tree])

    return of(tree).sum()


def stacks(p, tree):
    """Lists of children outside of cells."""

    def of(tree):
        if isinstance(tree, int):
            return leaf(p, tree)[0]
        return jnp.tanh(jnp.stack([of(part) for part in tree]).mean(0) @ p["w"])

    return of(tree).sum()


def containers(p, tree):
    """Shared containers that each call makes."""

    def of(tree):
        own = dict(p)
        return leaf(own, tree) if isinstance(tree, int) else node(own, *map(of, tree))

    return of(tree)[0].sum()


def plain(p, tree):
    """No cells."""

    def of(tree):
        return p["words"][tree] if isinstance(tree, int) else jnp.tanh(sum(map(of, tree)) @ p["w"])

    return of(tree).sum()


def rules(p, tree):
    """A derivative rule that each call makes."""

    @jax.custom_vjp
    def bounded(x):
        return jnp.tanh(x)

    bounded.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))
    return bounded(encode(p, tree)[0]).sum()


def named(p, instance):
    """A string and a number of its own for each instance."""
    name, number, tree = instance
    return marked(p, tree) * number + len(name)


MODELS = [marked, made, lists, stacks, containers, plain, rules, named]


def random_tree(rng: np.random.Generator, leaves: int, most: int) -> Any:
    """A tree whose nodes have up to `most` children."""
    if leaves == 1:
        return int(rng.integers(WORDS))
    parts = int(rng.integers(2, min(most, leaves) + 1))
    cuts = np.sort(rng.choice(np.arange(1, leaves), parts - 1, replace=False)).tolist()
    ends = zip([0, *cuts], [*cuts, leaves], strict=True)
    return tuple([random_tree(rng, b - a, most) for a, b in ends])


def resident_megabytes() -> float:
    """Memory of the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(table: common.Table, fn: Any, args: Any) -> None:
    """Trains a model, and adds what it holds to a table."""
    rng = np.random.default_rng(0)
    shapes = {"words": (WORDS, HIDDEN), "gates": (HIDDEN, 4 * HIDDEN), "w": (HIDDEN, HIDDEN)}
    params = {k: jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for k, s in shapes.items()}
    model = jedbatch.batch(fn, cache_bytes=args.cache_bytes)
    gradient = jax.grad(lambda params, trees: model(params, trees).mean())
    most = 5 if fn in (lists, stacks) else 2
    for step in range(args.steps + 1):
        instances = [random_tree(rng, int(rng.integers(2, 20)), most) for _ in range(args.size)]
        if fn is named:
            instances = [(f"{rng.integers(10**9)}", rng.normal(), tree) for tree in instances]
        slope = gradient(params, instances)
        params = jax.tree.map(lambda x, d: x - 1e-3 * d, params, slope)
        if step % args.every == 0:
            gc.collect()
            registries = [session.registry for session in model._core.sessions.values()]
            table.row(
                fn.__name__,
                step,
                f"{resident_megabytes():.1f}",
                len(gc.get_objects()),
                f"{sum(r.budget.bytes for r in registries) / 1e6:.2f}",
                sum(r.size for r in registries),
                model.compilations,
            )


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="(default %(default)s)")
    parser.add_argument("--every", type=int, default=500, help="steps (default %(default)s)")
    parser.add_argument("--size", type=int, default=8, help="instances a step")
    parser.add_argument("--cache-bytes", type=int, default=1 << 30, help="(default %(default)s)")
    parser.add_argument("--models", default="", help="names, separated by semicolons")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.every, args.cache_bytes = 4, 2, 100_000
    print(common.machine())
    print(f"cache_bytes {args.cache_bytes:,}")
    table = common.Table("model", "step", "RSS MB", "objects", "held MB", "types", "compiled")
    chosen = [name for name in args.models.split(";") if name] or (
        ["marked"] if args.quick else [fn.__name__ for fn in MODELS]
    )
    for fn in MODELS:
        if fn.__name__ in chosen:
            soak(table, fn, args)


if __name__ == "__main__":
    main()
