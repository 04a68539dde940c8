"""Sum–product networks of random structure: each instance has a circuit and values of its own.

A circuit is `("leaf", variable, value)`, `("product", *children)` or `("sum", kind, *children)`
with 2 to 8 children. A node has a vector, the logarithms of h densities: of Gaussians in leaves,
summed by products; sums mix the components of their children, with weights that depend on the kind.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program, forest

VARIABLES = 16
KINDS = 4


def density(params, variable, value):
    deviation = (value - params["mean"][variable]) * jnp.exp(params["precision"][variable])
    return params["precision"][variable] - jnp.square(deviation) / 2


@jedbatch.cell
def leaf(params, variable, value):
    return density(params, variable, value)


@jedbatch.cell
def product(children):
    return sum(children)


@jedbatch.cell
def mix(params, kind, children):
    below = jax.nn.logsumexp(jnp.stack(children), axis=0) - jnp.log(len(children))
    weights = jax.nn.log_softmax(params["mix"][kind], axis=0)
    return jax.nn.logsumexp(below[:, None] + weights, axis=0)


def evaluate(params, circuit):
    kind, *rest = circuit
    if kind == "leaf":
        variable, value = rest
        return leaf(params, variable, value)
    if kind == "product":
        return product([evaluate(params, child) for child in rest])
    number, *children = rest
    return mix(params, number, [evaluate(params, child) for child in children])


def model(params, circuit):
    return jax.nn.logsumexp(evaluate(params, circuit))


def instances(rng, count, tiny):
    def grow(depth, is_sum):
        if depth == 0 or rng.random() < 0.2:
            return "leaf", int(rng.integers(VARIABLES)), float(rng.normal())
        children = [grow(depth - 1, not is_sum) for _ in range(rng.integers(2, 4 if tiny else 9))]
        return ("sum", int(rng.integers(KINDS)), *children) if is_sum else ("product", *children)

    return [grow(2 if tiny else 3, True) for _ in range(count)]


def parameters(key, tiny):
    size = 3 if tiny else 32
    mean, precision, mixed = jax.random.split(key, 3)
    return {
        "mean": jax.random.normal(mean, (VARIABLES, size)),
        "precision": 0.1 * jax.random.normal(precision, (VARIABLES, size)),
        "mix": jax.random.normal(mixed, (KINDS, size, size)),
    }


def prepare(minibatches):
    """Circuits whose data are (variable or kind, value)."""

    def read(_, circuit):
        kind, *rest = circuit
        if kind == "leaf":
            return 0, np.array(rest), ()
        if kind == "product":
            return 0, np.zeros(2), rest
        return 1, np.array([rest[0], 0.0]), rest[1:]

    return forest.prepare(minibatches, read, 2)


def by_hand(params, circuits):
    def leaves(data):
        variables, values = data.T
        return density(params, variables.astype(int), values[:, None])

    def products(data, below, parent):
        return forest.total(below, parent, len(data))

    def sums(data, below, parent):
        most = jax.ops.segment_max(jax.lax.stop_gradient(below), parent, len(data))
        most = jnp.where(jnp.isfinite(most), most, 0.0)  # of padding
        total = forest.total(jnp.exp(below - most[parent]), parent, len(data))
        count = forest.total(jnp.ones(len(below)), parent, len(data))[:, None]
        there = count > 0
        mean = most + jnp.log(jnp.where(there, total, 1.0)) - jnp.log(jnp.where(there, count, 1.0))
        weights = jax.nn.log_softmax(params["mix"], axis=1)[data[:, 0].astype(int)]
        return jax.nn.logsumexp(mean[:, :, None] + weights, axis=1)

    return jax.nn.logsumexp(forest.climb(circuits, leaves, [products, sums]), axis=-1)


PROGRAMS = {"circuits": Program(instances, parameters, model, prepare, by_hand)}
