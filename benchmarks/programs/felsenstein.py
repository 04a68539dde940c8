"""The likelihood of aligned sequences at the leaves of a tree (Felsenstein, 1981).

A tree is a sequence, int[sites] of nucleotides, or `(left, time, right, time)`. Under a general
reversible model with rates Q, the likelihoods of what is below a node, given its nucleotide, are
L = (exp(Q t_left) L_left) ⊙ (exp(Q t_right) L_right), [4, sites]. The result is the mean over sites
of the logarithm of the likelihood.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program, forest

NUCLEOTIDES = 4


def spectrum(params):
    """(eigenvalues, left and right eigenvectors of Q, frequencies of nucleotides)."""
    frequencies = jax.nn.softmax(params["frequencies"])
    root = jnp.sqrt(frequencies)
    above = jnp.zeros((4, 4)).at[jnp.triu_indices(4, 1)].set(jnp.exp(params["rates"]))
    symmetric = root[:, None] * (above + above.T) * root[None, :]
    rates = (above + above.T) @ frequencies
    values, vectors = jnp.linalg.eigh(symmetric - jnp.diag(rates))
    return values, vectors / root[:, None], vectors.T * root[None, :], frequencies


def evolve(of_rates, time, likelihoods):
    values, left, right, _ = of_rates
    return (left * jnp.exp(values * time)) @ right @ likelihoods


@jedbatch.cell
def join(of_rates, left, left_time, right, right_time):
    return evolve(of_rates, left_time, left) * evolve(of_rates, right_time, right)


def prune(of_rates, tree):
    if not isinstance(tree, tuple):
        return jax.nn.one_hot(tree, NUCLEOTIDES, axis=0)
    left, left_time, right, right_time = tree
    left, right = prune(of_rates, left), prune(of_rates, right)
    return join(of_rates, left, left_time, right, right_time)


def model(params, tree):
    of_rates = spectrum(params)
    frequencies = of_rates[-1]
    return jnp.log(frequencies @ prune(of_rates, tree)).mean()


def instances(rng, count, tiny):
    sites = 8 if tiny else 512

    def grow(leaves):
        if leaves == 1:
            return rng.integers(NUCLEOTIDES, size=sites).astype(np.int32)
        left = int(rng.integers(1, leaves))
        times = rng.exponential(0.3, size=2) + 0.01
        return grow(left), float(times[0]), grow(leaves - left), float(times[1])

    return [grow(int(rng.integers(*((2, 5) if tiny else (6, 17))))) for _ in range(count)]


def parameters(key, tiny):
    rates, frequencies = jax.random.split(key)
    return {
        "rates": 0.3 * jax.random.normal(rates, (6,)),
        "frequencies": 0.3 * jax.random.normal(frequencies, (NUCLEOTIDES,)),
    }


def prepare(minibatches):
    """Data of leaves are sequences, of inner nodes both times, in the first two places."""

    def read(_, tree):
        if not isinstance(tree, tuple):
            return 0, tree.astype(np.float32), ()
        left, left_time, right, right_time = tree
        return 0, np.array([left_time, right_time]), (left, right)

    return forest.prepare(minibatches, read)


def by_hand(params, trees):
    of_rates = spectrum(params)
    both = jax.vmap(lambda times, x: jax.vmap(evolve, (None, 0, 0))(of_rates, times, x).prod(0))

    def inner(times, below, parent):
        return both(times, below.reshape(len(times), 2, *below.shape[1:]))

    def leaf(sequences):
        return jax.nn.one_hot(sequences.astype(int), NUCLEOTIDES, axis=1)

    roots = forest.climb(trees, leaf, [inner])
    return jnp.log(jnp.einsum("n,ins->is", of_rates[-1], roots)).mean(1)


PROGRAMS = {"felsenstein": Program(instances, parameters, model, prepare, by_hand, 16)}
