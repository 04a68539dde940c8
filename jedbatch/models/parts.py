"""What the models share: Flax modules as pure functions, scores, and sums of scores."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jedbatch


class Pure(NamedTuple):
    """A module of `flax.nnx` as two pure functions.

    Attributes:
      init: maps a random key to the parameters, a pytree.
      apply: maps (params, *inputs) to what the module returns for the inputs.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]


def pure(make: Callable[[nnx.Rngs], nnx.Module]) -> Pure:
    """A module of `flax.nnx` as two pure functions.

    Args:
      make: makes the module, given random number generators; its parameters are its only state.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jedbatch.models.parts import pure
      >>> dense = pure(lambda rngs: nnx.Linear(3, 4, rngs=rngs))
      >>> params = dense.init(jax.random.key(0))
      >>> dense.apply(params, jax.numpy.ones(3)).shape
      (4,)
    """
    structure = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return Pure(
        lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param)),
        lambda params, *inputs: nnx.merge(structure, nnx.State(params))(*inputs),
    )


def scored(logits: jax.Array, label: jax.Array) -> jax.Array:
    """[cross-entropy, 1 if the label is right] of logits [labels]."""
    loss = -jax.nn.log_softmax(logits)[label]
    return jnp.stack([loss, (jnp.argmax(logits) == label).astype(loss.dtype)])


@jedbatch.cell(name="plus")
def _plus(*terms: jax.Array) -> jax.Array:
    return sum(terms[1:], start=terms[0])


def total(scores: Sequence[jax.Array]) -> jax.Array:
    """The sum of scores: by eights, then by twos. Few nodes, few batches, two types."""
    scores = list(scores)
    while len(scores) > 1:
        width = 8 if len(scores) >= 8 else 2
        whole = len(scores) - len(scores) % width
        sums = [_plus(*scores[i : i + width]) for i in range(0, whole, width)]
        scores = sums + scores[whole:]
    return scores[0]
