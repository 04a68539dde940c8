"""An LSTM along a sequence (Hochreiter and Schmidhuber, 1997), as the sequence models use it.

For an input x and the state (h, c) before it, with σ the logistic function and ⊙ the elementwise
product, as `flax.nnx.LSTMCell` has it:

    step     i = σ(W_ii x + W_hi h + b_i)      f = σ(W_if x + W_hf h + b_f)
             g = tanh(W_ig x + W_hg h + b_g)   o = σ(W_io x + W_ho h + b_o)
             c' = f ⊙ c + i ⊙ g                h' = o ⊙ tanh(c')

Shapes: x [inputs]; h, c [hidden]. A chain has one node type, its step, with the products of x and
of h: a cell of its own for all products of x would save no time, since it writes four gates for
every word, which are then read again. A step takes h and c one by one: zeros in a tuple would be
looked at more closely, which takes longer to record.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jedbatch.models.parts import Params, Pure, pure

State = tuple[Any, Any]  # (h, c), each [hidden]
Step = Callable[..., State]  # maps (params, h, c, *inputs) to the next state


def start(hidden: int) -> State:
    """The state before the first input: zeros."""
    return np.zeros(hidden, np.float32), np.zeros(hidden, np.float32)


def lstm(inputs: int, hidden: int) -> Pure:
    """The parameters of an LSTM, and its step on h, c and inputs of `inputs` numbers together."""
    module = pure(lambda rngs: nnx.LSTMCell(inputs, hidden, rngs=rngs))

    def apply(params: Params, h: jax.Array, c: jax.Array, *xs: jax.Array) -> State:
        (c, h), _ = module.apply(params, (c, h), jnp.concatenate(xs))
        return h, c

    return Pure(module.init, apply)


def embedding(num: int, features: int) -> Pure:
    """A table of `num` vectors [features], and the look-up of one of them by its number."""
    module = pure(lambda rngs: nnx.Embed(num, features, rngs=rngs))
    return Pure(module.init, lambda params, index: module.apply(params, jnp.asarray(index)))


def states(
    step: Step, params: Params, state: State, inputs: Sequence[tuple[Any, ...]]
) -> list[State]:
    """The states after each of the inputs, which are tuples of what `step` reads besides."""
    all_states = []
    for xs in inputs:
        state = step(params, *state, *xs)
        all_states.append(state)
    return all_states
