"""How fast are trees whose nodes hold arrays of another length in every tree, against padding?

likelihood  of aligned sequences (`programs/felsenstein.py`): states are [4, sites], 50 to 400
            sites, as many in all nodes of a tree; nodes treat sites alike.
attention   states are [rows, 64], 20 to 60 rows, as many in all nodes of a tree; the rows of a node
            attend to each other.

By hand, trees run level by level, padded to the widest levels and to the most rows of all
minibatches, and rows that are none are left out of the mean, and of attention. Both run under
`jax.jit`, with everything that the host prepares made before.

ms         milliseconds on the device for 64 trees, medians.
× by hand  how many times as long the padded trees take, with quartiles; both run in turns.
plan ms    milliseconds to plan a minibatch that was never seen, on the clock of its thread.
again ms   the same for a minibatch whose trees were seen, with other numbers.
cores      how many times as fast a minibatch runs that is cut over `jedbatch.cores(N)`; with
           `--cores N`, "–" without.
late       programs that XLA compiled for 10 unseen minibatches after three.
first s    seconds of CPU from a new batched function to the first result.

Values and gradients of both sides are compared before anything is timed.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jedbatch
from benchmarks import common
from benchmarks.programs import felsenstein, forest
from jedbatch.testing import compilations

WARM, UNSEEN = 3, 10  # minibatches


HIDDEN = 64


class Workload(NamedTuple):
    """Trees whose nodes hold arrays of any length, and both sides.

    Attributes:
      params: what both sides get.
      minibatches: of trees.
      derived: maps `params` to what the models of both sides read.
      model: of one tree.
      prepare: the trees of minibatches as the other side gets them, padded.
      by_hand: maps what is derived and a prepared minibatch to the results.
    """

    params: Any
    minibatches: list[list[Any]]
    derived: Callable[[Any], Any]
    model: Callable[[Any, Any], jax.Array]
    prepare: Callable[[list[list[Any]]], list[Any]]
    by_hand: Callable[[Any, Any], jax.Array]


def rows_of(tree: Any) -> int:
    """The number of rows of the arrays of a tree, all the same."""
    while isinstance(tree, tuple):
        tree = tree[0]
    return len(tree)


def padded(minibatches: list[list[Any]], most: int, times: bool) -> list[Any]:
    """Padded trees, and how many rows each has; nodes have the times of both sides or nothing."""

    def read(_: int, tree: Any) -> Any:
        if not isinstance(tree, tuple):
            leaf = np.pad(tree, [(0, most - len(tree))] + [(0, 0)] * (tree.ndim - 1))
            return 0, leaf.astype(np.float32), ()
        children = tree[::2] if times else tree
        return 0, np.array(tree[1::2] if times else [rows_of(tree)], np.float32), children

    sizes = [np.array(list(map(rows_of, m)), np.int32) for m in minibatches]
    return list(zip(forest.prepare(minibatches, read), sizes, strict=True))


# --- the likelihood of sequences ---


@jedbatch.cell
def observe(sequence: jax.Array) -> jax.Array:
    """The likelihoods of a leaf, [4, sites]."""
    return jax.nn.one_hot(sequence, felsenstein.NUCLEOTIDES, axis=0)


def prune(of_rates: Any, tree: Any) -> jax.Array:
    """The likelihoods of a node, [4, sites]."""
    if not isinstance(tree, tuple):
        return observe(tree)
    left, left_time, right, right_time = tree
    left, right = prune(of_rates, left), prune(of_rates, right)
    return felsenstein.join(of_rates, left, left_time, right, right_time)


def likelihood(of_rates: Any, tree: Any) -> jax.Array:
    """The mean log-likelihood of the sites of a tree."""
    return jnp.log(of_rates[-1] @ prune(of_rates, tree)).mean()


def likelihood_by_hand(of_rates: Any, prepared: Any) -> jax.Array:
    """The results of all trees of a minibatch."""
    trees, sites = prepared
    evolve = jax.vmap(felsenstein.evolve, (None, 0, 0))

    def inner(times: Any, below: Any, _: Any) -> Any:
        pairs = below.reshape(len(times), 2, *below.shape[1:])
        left, right = (evolve(of_rates, times[:, i], pairs[:, i]) for i in range(2))
        return left * right

    def leaf(sequences: Any) -> Any:
        return jax.nn.one_hot(sequences.astype(int), felsenstein.NUCLEOTIDES, axis=1)

    roots = forest.climb(trees, leaf, [inner])
    scores = jnp.log(jnp.einsum("n,ins->is", of_rates[-1], roots))
    exist = jnp.arange(scores.shape[1]) < sites[:, None]
    return jnp.where(exist, scores, 0).sum(1) / sites


def likelihoods(rng: np.random.Generator, quick: bool, num_minibatches: int) -> Workload:
    """Trees of 50 to 400 sites."""
    count, least, most, leaves = (4, 2, 16, (2, 4)) if quick else (64, 50, 400, (8, 33))

    def grow(number: int, sites: int) -> Any:
        if number == 1:
            return rng.integers(felsenstein.NUCLEOTIDES, size=sites).astype(np.int32)
        left = int(rng.integers(1, number))
        a, b = (rng.exponential(0.3, size=2) + 0.01).tolist()
        return grow(left, sites), a, grow(number - left, sites), b

    def minibatch() -> list[Any]:
        sizes = rng.integers(least, most + 1, size=count)
        return [grow(int(rng.integers(*leaves)), int(sites)) for sites in sizes]

    return Workload(
        felsenstein.parameters(jax.random.key(0), quick),
        [minibatch() for _ in range(num_minibatches)],
        felsenstein.spectrum,
        likelihood,
        lambda minibatches: padded(minibatches, most, times=True),
        likelihood_by_hand,
    )


# --- attention among rows ---


@jedbatch.cell
def attend(params: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """The rows of a node, each of those of its children and of the rows that it attends to."""
    x = jnp.tanh(jnp.concatenate([left, right], -1) @ params["join"])
    scores = (x @ params["query"]) @ (x @ params["key"]).T / np.sqrt(HIDDEN)
    return x + jax.nn.softmax(scores) @ (x @ params["value"])


def attention(params: Any, tree: Any) -> jax.Array:
    """The mean score of the rows at the root."""

    def visit(tree: Any) -> jax.Array:
        if not isinstance(tree, tuple):
            return tree
        return attend(params, visit(tree[0]), visit(tree[1]))

    return (visit(tree) @ params["score"]).mean()


def attention_by_hand(params: Any, prepared: Any) -> jax.Array:
    """The results of all trees of a minibatch."""
    trees, sizes = prepared

    def inner(rows: Any, below: Any, _: Any) -> Any:
        pairs = below.reshape(len(rows), 2, *below.shape[1:])
        x = jnp.tanh(jnp.concatenate([pairs[:, 0], pairs[:, 1]], -1) @ params["join"])
        query, key, value = (x @ params[name] for name in ("query", "key", "value"))
        scores = jnp.einsum("bnd,bmd->bnm", query, key) / np.sqrt(HIDDEN)
        exist = jnp.arange(x.shape[1]) < rows
        scores = jnp.where(exist[:, None], scores, -1e30)  # a node of padding has no rows at all
        return x + jnp.einsum("bnm,bmd->bnd", jax.nn.softmax(scores), value)

    roots = forest.climb(trees, lambda x: x, [inner])
    scores = roots @ params["score"]
    exist = jnp.arange(scores.shape[1]) < sizes[:, None]
    return jnp.where(exist, scores, 0).sum(1) / sizes


def attentions(rng: np.random.Generator, quick: bool, num_minibatches: int) -> Workload:
    """Trees of 20 to 60 rows."""
    count, least, most, leaves = (4, 2, 16, (2, 4)) if quick else (64, 20, 60, (4, 13))
    square = (HIDDEN, HIDDEN)
    shapes = {"join": (2 * HIDDEN, HIDDEN), "query": square, "key": square, "value": square}
    shapes["score"] = (HIDDEN,)
    params = {
        name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
        for name, shape in shapes.items()
    }

    def grow(number: int, rows: int) -> Any:
        if number == 1:
            return rng.normal(size=(rows, HIDDEN)).astype(np.float32)
        left = int(rng.integers(1, number))
        return grow(left, rows), grow(number - left, rows)

    def minibatch() -> list[Any]:
        sizes = rng.integers(least, most + 1, size=count)
        return [grow(int(rng.integers(*leaves)), int(rows)) for rows in sizes]

    return Workload(
        params,
        [minibatch() for _ in range(num_minibatches)],
        lambda params: params,
        attention,
        lambda minibatches: padded(minibatches, most, times=False),
        attention_by_hand,
    )


WORKLOADS = {"likelihood": likelihoods, "attention": attentions}


def measure(name: str, quick: bool, budget: float, table: common.Table, mesh: Mesh | None) -> None:
    """Prints a row for inference, and one for the gradient."""
    work = WORKLOADS[name](np.random.default_rng(0), quick, WARM + UNSEEN)
    params, minibatches, derived = work.params, work.minibatches, work.derived
    prepared = jax.device_put(work.prepare(minibatches)[0])
    for gradient in (False, True):
        batched = jedbatch.batch(work.model)
        kind = common.with_gradient if gradient else functools.partial
        ours, theirs = (
            jax.jit(kind(lambda p, x, fn=fn: fn(derived(p), x)))
            for fn in (batched.apply, work.by_hand)
        )
        plan_of = functools.partial(batched.plan, derived(params), gradient=gradient)
        start = time.process_time()
        jax.block_until_ready(ours(params, plan_of(minibatches[0])))
        first = time.process_time() - start
        for minibatch in minibatches[:WARM]:
            ours(params, plan_of(minibatch))
        unseen, again = [], []
        with compilations() as late:
            for minibatch in minibatches[WARM:]:
                for seconds in (unseen, again):
                    start = time.thread_time()
                    plan = plan_of(minibatch)
                    seconds.append(time.thread_time() - start)
                jax.block_until_ready(ours(params, plan))
        plan = jax.device_put(plan_of(minibatches[0]))
        runs = [functools.partial(ours, params, plan), functools.partial(theirs, params, prepared)]
        if mesh is not None:
            everywhere = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
            shards = batched.plan(derived(everywhere), minibatches[0], gradient=gradient, mesh=mesh)
            runs.append(functools.partial(ours, everywhere, shards))
        for got, expected in zip(*map(jax.tree.leaves, (runs[-1](), runs[1]())), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
        times = common.interleaved(runs, budget)
        table.row(
            name,
            "gradient" if gradient else "inference",
            f"{1e3 * times.median():.1f}",
            f"{1e3 * times.median(1):.1f}",
            times.ratio(1),
            "–" if mesh is None else f"{times.median() / times.median(2):.2f}",
            *(f"{1e3 * float(np.median(seconds)):.0f}" for seconds in (unseen, again)),
            len(late),
            f"{first:.1f}",
        )


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="for each row (%(default)s)")
    parser.add_argument("--cores", type=int, metavar="N", help="devices to cut minibatches over")
    parser.add_argument("--trees", choices=WORKLOADS, help="all without")
    options = parser.parse_args()
    mesh = jedbatch.cores(options.cores) if options.cores else None  # before any is used
    print(common.machine())
    table = common.Table(
        "trees", "of", "ms", "by hand ms", "× by hand", "cores", "plan ms", "again ms", "late",
        "first s",
    )  # fmt: skip
    for name in [options.trees] if options.trees else WORKLOADS:
        measure(name, options.quick, 0.1 if options.quick else options.seconds, table, mesh)


if __name__ == "__main__":
    main()
