"""Training by Optax: gradients of a batched function are a pytree like any other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jedbatch


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(params["compose"] @ jnp.concatenate([left, right]))


@jedbatch.cell
def classify(params, state, label):
    return optax.softmax_cross_entropy_with_integer_labels(params["read"] @ state, label)


def loss_of(params, example):
    tree, label = example

    def encode(t):
        return params["embed"][t] if isinstance(t, int) else phrase(params, *map(encode, t))

    return classify(params, encode(tree), label)


rng = np.random.default_rng(0)
shapes = {"embed": (9, 4), "compose": (4, 8), "read": (2, 4)}
params = {k: jnp.asarray(0.5 * rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
examples = [(((1, 2), 3), 0), ((4, (5, (6, 7))), 1), ((8, 1), 0), ((2, (4, 6)), 1)]

losses_of = jedbatch.batch(loss_of)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05))
state = optimizer.init(params)


@jax.jit
def update(params, state, gradient):
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


losses = []
for step in range(4):
    minibatch = examples[:2] if step % 2 else examples[2:]
    loss, gradient = jax.value_and_grad(lambda p, b=minibatch: losses_of(p, b).mean())(params)
    params, state = update(params, state, gradient)
    losses.append(loss)
print("losses", *losses)
