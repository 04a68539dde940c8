"""A child-sum TreeLSTM as a transformed function of Haiku."""

import haiku as hk
import jax
import jax.numpy as jnp

import jedbatch
from benchmarks.programs import Program, childsum


def child_sum(word, children):
    size = childsum.HIDDEN
    x = hk.Embed(childsum.WORDS, size, name="embedding")(word)
    gates = hk.Linear(3 * size, name="gates")(x)
    of_children = hk.Linear(3 * size, with_bias=False, name="gates_of_children")
    forget = hk.Linear(size, name="forget")
    forget_of_child = hk.Linear(size, with_bias=False, name="forget_of_child")
    if children:
        gates = gates + of_children(sum(h for h, _ in children))
    i, o, u = jnp.split(gates, 3)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    for child_h, child_c in children:
        f = jax.nn.sigmoid(forget(x) + forget_of_child(child_h))
        c = c + f * child_c
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


transformed = hk.without_apply_rng(hk.transform(child_sum))
node = jedbatch.cell(transformed.apply)


def parameters(key, tiny):
    state = jnp.zeros(childsum.HIDDEN)
    return transformed.init(key, 0, [(state, state)])


def by_hand(params, trees):
    weights = childsum.Weights(
        params["embedding"]["embeddings"],
        params["gates"]["w"],
        params["gates"]["b"],
        params["gates_of_children"]["w"],
        params["forget"]["w"],
        params["forget"]["b"],
        params["forget_of_child"]["w"],
    )
    return childsum.by_hand(weights, trees)


PROGRAMS = {
    "childsum_haiku": Program(
        childsum.instances, parameters, childsum.model_of(node), childsum.prepare, by_hand
    )
}
