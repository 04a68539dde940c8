"""How fast are trees whose nodes hold arrays of another length in every tree, against padding?

The likelihood of aligned sequences (`programs/felsenstein.py`): states are [4, sites], and trees
have 50 to 400 sites, as many in all nodes of a tree. By hand, trees run level by level, padded to
the widest levels and to the most sites of all minibatches, and sites that are none are left out of
the mean. Both run under `jax.jit`, with everything that the host prepares made before.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jedbatch
from benchmarks import common
from benchmarks.programs import felsenstein, forest
from jedbatch.testing import compilations

LEAST_SITES, MOST_SITES = 50, 400
WARM, UNSEEN = 3, 10  # minibatches


def trees(rng: np.random.Generator, count: int, most: int, leaves: tuple[int, int]) -> list[Any]:
    """Trees with `most` // 8 to `most` sites each."""

    def grow(number: int, sites: int) -> Any:
        if number == 1:
            return rng.integers(felsenstein.NUCLEOTIDES, size=sites).astype(np.int32)
        left = int(rng.integers(1, number))
        a, b = (rng.exponential(0.3, size=2) + 0.01).tolist()
        return grow(left, sites), a, grow(number - left, sites), b

    sizes = rng.integers(most * LEAST_SITES // MOST_SITES, most + 1, size=count)
    return [grow(int(rng.integers(*leaves)), int(sites)) for sites in sizes]


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


def model(of_rates: Any, tree: Any) -> jax.Array:
    """The mean log-likelihood of the sites of a tree."""
    return jnp.log(of_rates[-1] @ prune(of_rates, tree)).mean()


def sites_of(tree: Any) -> int:
    """The number of sites."""
    while isinstance(tree, tuple):
        tree = tree[0]
    return len(tree)


def prepare(minibatches: list[list[Any]], most: int) -> list[Any]:
    """Padded trees, and how many sites each has."""

    def read(_: int, tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return 0, np.pad(tree, (0, most - len(tree))).astype(np.float32), ()
        left, left_time, right, right_time = tree
        return 0, np.array([left_time, right_time]), (left, right)

    sizes = [np.array(list(map(sites_of, m)), np.int32) for m in minibatches]
    return list(zip(forest.prepare(minibatches, read), sizes, strict=True))


def by_hand(of_rates: Any, prepared: Any) -> jax.Array:
    """The results of all trees of a minibatch."""
    padded, sites = prepared
    evolve = jax.vmap(felsenstein.evolve, (None, 0, 0))

    def inner(times: Any, below: Any, _: Any) -> Any:
        pairs = below.reshape(len(times), 2, *below.shape[1:])
        left, right = (evolve(of_rates, times[:, i], pairs[:, i]) for i in range(2))
        return left * right

    def leaf(sequences: Any) -> Any:
        return jax.nn.one_hot(sequences.astype(int), felsenstein.NUCLEOTIDES, axis=1)

    roots = forest.climb(padded, leaf, [inner])
    scores = jnp.log(jnp.einsum("n,ins->is", of_rates[-1], roots))
    exist = jnp.arange(scores.shape[1]) < sites[:, None]
    return jnp.where(exist, scores, 0).sum(1) / sites


def measure(quick: bool, budget: float, table: common.Table, mesh: Mesh | None) -> None:
    """Prints a row for inference, and one for the gradient."""
    count, most, leaves = (4, 16, (2, 4)) if quick else (64, MOST_SITES, (8, 33))
    rng = np.random.default_rng(0)
    minibatches = [trees(rng, count, most, leaves) for _ in range(WARM + UNSEEN)]
    params = felsenstein.parameters(jax.random.key(0), quick)
    prepared = jax.device_put(prepare(minibatches, most)[0])
    for gradient in (False, True):
        batched = jedbatch.batch(model)
        kind = common.with_gradient if gradient else functools.partial
        ours, theirs = (
            jax.jit(kind(lambda p, x, fn=fn: fn(felsenstein.spectrum(p), x)))
            for fn in (batched.apply, by_hand)
        )
        of_rates = felsenstein.spectrum(params)
        plan_of = functools.partial(batched.plan, of_rates, gradient=gradient)
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
            shards = batched.plan(
                felsenstein.spectrum(everywhere), minibatches[0], gradient=gradient, mesh=mesh
            )
            runs.append(functools.partial(ours, everywhere, shards))
        for got, expected in zip(*map(jax.tree.leaves, (runs[-1](), runs[1]())), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
        times = common.interleaved(runs, budget)
        table.row(
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
    options = parser.parse_args()
    mesh = jedbatch.cores(options.cores) if options.cores else None  # before any is used
    print(common.machine())
    table = common.Table(
        "of", "ms", "by hand ms", "× by hand", "cores", "plan ms", "again ms", "late", "first s"
    )
    measure(options.quick, 0.1 if options.quick else options.seconds, table, mesh)


if __name__ == "__main__":
    main()
