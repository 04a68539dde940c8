"""A child-sum TreeLSTM as a module of Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jedbatch
from benchmarks.programs import Program, childsum


class ChildSum(eqx.Module):
    """The cell of a node."""

    embedding: eqx.nn.Embedding
    gates: eqx.nn.Linear
    gates_of_children: eqx.nn.Linear
    forget: eqx.nn.Linear
    forget_of_child: eqx.nn.Linear

    def __init__(self, size, key):
        keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(childsum.WORDS, size, key=keys[0])
        self.gates = eqx.nn.Linear(size, 3 * size, key=keys[1])
        self.gates_of_children = eqx.nn.Linear(size, 3 * size, use_bias=False, key=keys[2])
        self.forget = eqx.nn.Linear(size, size, key=keys[3])
        self.forget_of_child = eqx.nn.Linear(size, size, use_bias=False, key=keys[4])

    def __call__(self, word, children):
        """(h, c) of a node."""
        x = self.embedding(word)
        gates = self.gates(x)
        if children:
            gates = gates + self.gates_of_children(sum(h for h, _ in children))
        i, o, u = jnp.split(gates, 3)
        c = jax.nn.sigmoid(i) * jnp.tanh(u)
        for child_h, child_c in children:
            f = jax.nn.sigmoid(self.forget(x) + self.forget_of_child(child_h))
            c = c + f * child_c
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jedbatch.cell
def node(module, word, children):
    return module(word, children)


def by_hand(module, trees):
    weights = childsum.Weights(
        module.embedding.weight,
        module.gates.weight.T,
        module.gates.bias,
        module.gates_of_children.weight.T,
        module.forget.weight.T,
        module.forget.bias,
        module.forget_of_child.weight.T,
    )
    return childsum.by_hand(weights, trees)


PROGRAMS = {
    "childsum_equinox": Program(
        childsum.instances,
        lambda key, tiny: ChildSum(childsum.HIDDEN, key),
        childsum.model_of(node),
        childsum.prepare,
        by_hand,
    )
}
