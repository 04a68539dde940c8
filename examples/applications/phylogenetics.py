"""Phylogenetics: likelihoods and gradients of a thousand gene trees, no two of them alike.

A gene tree is a sequence, int[sites] of nucleotides, or `(left, time, right, time)`. Under a
general reversible model with rates Q the likelihoods of what is below a node, given its nucleotide,
are L = (exp(Q t_left) L_left) ⊙ (exp(Q t_right) L_right), [4, sites] (Felsenstein, 1981). Trees
differ in their taxa and in their sites. All share Q, whose gradient is asked for. Of proteins there
are 20 states instead of 4; how many follows from the parameters.

    python examples/applications/phylogenetics.py [--quick] [--write]
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

# --- rates ---


def spectrum(params):
    """(eigenvalues, left and right eigenvectors of Q, frequencies of nucleotides)."""
    frequencies = jax.nn.softmax(params["frequencies"])
    root = jnp.sqrt(frequencies)
    n = len(frequencies)
    above = jnp.zeros((n, n)).at[jnp.triu_indices(n, 1)].set(jnp.exp(params["rates"]))
    exchange = above + above.T
    symmetric = root[:, None] * exchange * root - jnp.diag(exchange @ frequencies)
    values, vectors = jnp.linalg.eigh(symmetric)
    return values, vectors / root[:, None], vectors.T * root, frequencies


def evolve(rates, time, likelihoods):
    values, left, right, _ = rates
    return (left * jnp.exp(values * time)) @ right @ likelihoods


# --- one tree ---


@jedbatch.cell
def observe(rates, sequence):
    return jax.nn.one_hot(sequence, len(rates[-1]), axis=0)


@jedbatch.cell
def join(rates, left, left_time, right, right_time):
    return evolve(rates, left_time, left) * evolve(rates, right_time, right)


def prune(rates, tree):
    if not isinstance(tree, tuple):
        return observe(rates, tree)
    left, left_time, right, right_time = tree
    return join(rates, prune(rates, left), left_time, prune(rates, right), right_time)


def log_likelihood(rates, tree):
    return jnp.log(rates[-1] @ prune(rates, tree)).sum()


# --- value and gradient ---


def with_gradient(of_trees):
    """(likelihoods of all trees, gradient of their sum), a function of (params, trees)."""

    def total(params, trees):
        each = of_trees(spectrum(params), trees)
        return each.sum(), each

    def run(params, trees):
        gradient, each = jax.grad(total, has_aux=True)(params, trees)
        return each, gradient

    return run


# --- padded levels ---


def by_height(trees):
    """(sequences, for each height the rows of two children and their times, rows of the roots)."""
    sequences, levels, places = [], [], []

    def visit(tree):
        """(height, number among those of this height)."""
        if not isinstance(tree, tuple):
            sequences.append(tree)
            return 0, len(sequences) - 1
        left, left_time, right, right_time = tree
        below = visit(left), visit(right)
        height = 1 + max(h for h, _ in below)
        while len(levels) < height:
            levels.append([])
        levels[height - 1].append((below, (left_time, right_time)))
        return height, len(levels[height - 1]) - 1

    places = [visit(tree) for tree in trees]
    return sequences, levels, places


def widest(minibatches):
    """The numbers of sequences and of nodes of each height, where there are most of them."""
    counts = [[len(x), *map(len, levels)] for x, levels, _ in map(by_height, minibatches)]
    return [max(x) for x in itertools.zip_longest(*counts, fillvalue=0)]


def padded(_, trees, widths, most):
    """The arrays of a minibatch, of the same shapes for all."""
    sequences, levels, places = by_height(trees)
    starts = np.cumsum([0, *widths])
    rows = lambda nodes: [starts[height] + number for height, number in nodes]
    leaves = np.zeros((widths[0], most), np.int32)
    for i, sequence in enumerate(sequences):
        leaves[i, : len(sequence)] = sequence
    found = []
    for width, level in itertools.zip_longest(widths[1:], levels, fillvalue=()):
        children, times = np.zeros((width, 2), np.int32), np.zeros((width, 2), np.float32)
        for i, (below, lengths) in enumerate(level):
            children[i], times[i] = rows(below), lengths
        found.append((children, times))
    sites = np.array([num_sites(tree) for tree in trees], np.int32)
    return leaves, found, np.array(rows(places), np.int32), sites


def by_levels(rates, arrays):
    leaves, levels, roots, sites = arrays
    states = [jax.nn.one_hot(leaves, len(rates[-1]), axis=1)]
    for children, times in levels:
        below = jnp.concatenate(states)[children]
        both = jax.vmap(jax.vmap(functools.partial(evolve, rates)))(times, below)
        states.append(both[:, 0] * both[:, 1])
    of_sites = jnp.log(jnp.einsum("n,tns->ts", rates[-1], jnp.concatenate(states)[roots]))
    return jnp.where(jnp.arange(of_sites.shape[1]) < sites[:, None], of_sites, 0).sum(1)


# --- loop ---


def loop(rates, trees):
    return jnp.stack([log_likelihood(rates, tree) for tree in trees])


# --- gene trees ---


def num_sites(tree):
    while isinstance(tree, tuple):
        tree = tree[0]
    return len(tree)


def gene_trees(rng, count, taxa, sites, states=4):
    """Random trees whose sequences are mutated copies of each other."""

    def grow(number, sequence):
        mutated = np.where(
            rng.random(len(sequence)) < 0.1, rng.integers(states, size=len(sequence)), sequence
        )
        if number == 1:
            return mutated.astype(np.int32)
        left = int(rng.integers(1, number))
        times = (rng.exponential(0.1, size=2) + 0.01).tolist()
        return grow(left, mutated), times[0], grow(number - left, mutated), times[1]

    sizes = rng.integers(sites[0], sites[1] + 1, size=count)
    numbers = rng.integers(taxa[0], taxa[1] + 1, size=count)
    return [
        grow(int(n), rng.integers(states, size=size))
        for n, size in zip(numbers, sizes, strict=True)
    ]


def parameters(rng, states=4):
    normal = lambda size: jnp.asarray(0.3 * rng.normal(size=size), jnp.float32)
    return {"rates": normal(states * (states - 1) // 2), "frequencies": normal(states)}


def make(quick):
    rng = np.random.default_rng(0)
    count, taxa, sites = (6, (2, 4), (7, 8)) if quick else (100, (4, 24), (100, 1000))
    minibatches = [gene_trees(rng, count, taxa, sites) for _ in range(4 if quick else 10)]
    params = parameters(rng)
    widths = widest(minibatches)

    def sides():
        batched = jedbatch.batch(log_likelihood)
        plan = lambda params, trees: batched.plan(jax.eval_shape(spectrum, params), trees)
        pad = functools.partial(padded, widths=widths, most=sites[1])
        few = max(1, count // 50)
        first = lambda found: (found[0][:few], None)
        of_few = lambda params, trees: (with_gradient(loop)(params, trees)[0], None)
        return {
            "jedbatch": Side(plan, jax.jit(with_gradient(batched.apply))),
            "padded levels": Side(pad, jax.jit(with_gradient(by_levels))),
            "loop": Side(lambda _, trees: trees[:few], of_few, 1, count / few, first),
        }

    return Application(params, minibatches, with_gradient(loop), sides, rtol=1e-3)


def illustrate(axis):
    """Taxa and sites of the trees."""
    trees = gene_trees(np.random.default_rng(0), 1000, (4, 24), (100, 1000))
    taxa = lambda tree: taxa(tree[0]) + taxa(tree[2]) if isinstance(tree, tuple) else 1
    axis.plot([num_sites(t) for t in trees], [taxa(t) for t in trees], ".", alpha=0.4)
    axis.set(xlabel="sites", ylabel="taxa of a gene tree")


SHARES = {
    "jedbatch": ["rates", "one tree", "value and gradient"],
    "padded levels": ["rates", "value and gradient", "padded levels"],
    "loop": ["rates", "one tree", "value and gradient", "loop"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
