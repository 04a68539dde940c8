"""A child-sum TreeLSTM as a module of Flax NNX, which is a pytree of its parameters."""

import jax.numpy as jnp
from flax import nnx

import jedbatch
from benchmarks.programs import Program, childsum


class ChildSum(nnx.Module):
    """The cell of a node."""

    def __init__(self, size, rngs):
        self.embedding = nnx.Embed(childsum.WORDS, size, rngs=rngs)
        self.gates = nnx.Linear(size, 3 * size, rngs=rngs)
        self.gates_of_children = nnx.Linear(size, 3 * size, use_bias=False, rngs=rngs)
        self.forget = nnx.Linear(size, size, rngs=rngs)
        self.forget_of_child = nnx.Linear(size, size, use_bias=False, rngs=rngs)

    def __call__(self, word, children):
        """(h, c) of a node."""
        x = self.embedding(jnp.asarray(word))
        gates = self.gates(x)
        if children:
            gates = gates + self.gates_of_children(sum(h for h, _ in children))
        i, o, u = jnp.split(gates, 3)
        c = nnx.sigmoid(i) * nnx.tanh(u)
        for child_h, child_c in children:
            f = nnx.sigmoid(self.forget(x) + self.forget_of_child(child_h))
            c = c + f * child_c
        return nnx.sigmoid(o) * nnx.tanh(c), c


@jedbatch.cell
def node(module, word, children):
    return module(word, children)


def by_hand(module, trees):
    weights = childsum.Weights(
        module.embedding.embedding[...],
        module.gates.kernel[...],
        module.gates.bias[...],
        module.gates_of_children.kernel[...],
        module.forget.kernel[...],
        module.forget.bias[...],
        module.forget_of_child.kernel[...],
    )
    return childsum.by_hand(weights, trees)


PROGRAMS = {
    "childsum_nnx": Program(
        childsum.instances,
        lambda key, tiny: ChildSum(childsum.HIDDEN, nnx.Rngs(key)),
        childsum.model_of(node),
        childsum.prepare,
        by_hand,
    )
}
