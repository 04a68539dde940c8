"""How long do likelihoods of gene trees take on the grid of figures that others published?

Trees of `nodes` nodes and of random topologies, with sequences of 1,000 sites in 4 states
(nucleotides) or 20 (amino acids), under one reversible model: those of the application in
`examples/applications/phylogenetics.py`, of which each minibatch has `--count`.

value, gradient  milliseconds a tree, of the likelihoods and of the gradient with respect to the
                 model, with a plan made before; medians.
plan             milliseconds a tree, of a minibatch that was never met.
published        milliseconds of one tree of this size by ihh/subby, a scan over nodes in JAX, on
                 another machine (Xeon W-3223), with a reverse written by hand in brackets.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "applications"))

import phylogenetics

SITES = 1000
GRID = (4, 7, "34.9", "4372 (188)"), (20, 31, "35.6", "– (259)")
NUM_TURNS = 9


def milliseconds(run: Any, count: int) -> str:
    """The median of some runs, for one of so many trees."""
    times = []
    for _ in range(NUM_TURNS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return f"{1e3 * float(np.median(times[1:])) / count:.2f}"


def measured(states: int, nodes: int, count: int, sites: int) -> list[str]:
    """Milliseconds a tree to plan unseen minibatches, of values, and of values and gradients."""
    rng = np.random.default_rng(0)
    taxa = (nodes + 1) // 2

    def draw() -> list[Any]:
        return phylogenetics.gene_trees(rng, count, (taxa, taxa), (sites, sites), states)

    params, trees = phylogenetics.parameters(rng, states), draw()
    rates = phylogenetics.spectrum(params)
    batched = jedbatch.batch(phylogenetics.log_likelihood)
    value = jax.jit(lambda params, plan: batched.apply(phylogenetics.spectrum(params), plan))
    gradient = jax.jit(phylogenetics.with_gradient(batched.apply))
    without, plan = (batched.plan(rates, trees, gradient=g) for g in (False, True))
    few = [float(phylogenetics.log_likelihood(rates, tree)) for tree in trees[:3]]
    np.testing.assert_allclose(value(params, without)[:3], few, rtol=1e-3)
    unseen = iter([draw() for _ in range(NUM_TURNS)])
    runs = (
        lambda: batched.plan(rates, next(unseen)),
        lambda: value(params, without),
        lambda: gradient(params, plan),
    )
    return [milliseconds(run, count) for run in runs]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--count", type=int, default=64, help="trees in a minibatch")
    options = parser.parse_args()
    count, sites = (3, 10) if options.quick else (options.count, SITES)
    print(common.machine())
    published = "published value", "published gradient"
    table = common.Table("states", "nodes", "plan", "value", "gradient", *published)
    for states, nodes, *figures in GRID:
        table.row(states, nodes, *measured(states, nodes, count, sites), *figures)


if __name__ == "__main__":
    main()
