"""Layers of attention (Vaswani et al., 2017), as the Transformers use them.

With e the embeddings of words, p a table of positions, and norms before what reads them (Xiong et
al., 2020), a stack of layers computes x, a row [hidden] for each of n words:

    words        x = e[words] + p[:n]
    each layer   x = x + A(norm(x), norm(x))
                 x = x + A(norm(x), memory)                 where there is a memory
                 x = x + W_2 gelu(W_1 norm(x) + b_1) + b_2
    at the end   x = norm(x)

A(x, y) is attention of rows x to rows y with several heads. Queries Q x, keys K y and values V y
are cut into heads of d = hidden / heads numbers. A row of x gets the mean of the values, weighted
by softmax(q · k / √d) over the rows of y; with a memory, over those of x up to its own. O joins
what the heads of a row got.

Shapes: x [n, hidden], y [m, hidden]; Q, K, V, O [hidden, hidden]; W_1 [hidden, 4 hidden], W_2
[4 hidden, hidden]; e [words, hidden], p [max_length, hidden]. Norms, networks and projections go
row by row; only attention relates rows to each other.

References:
  Vaswani et al., Attention is all you need, NeurIPS 2017.
  Xiong et al., On layer normalization in the Transformer architecture, ICML 2020.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

# Maps q [n, heads, d], k and v [m, heads, d], and `causal`, to [n, heads, d]: `plain_attention` or
# `jedbatch.ragged.attention`.
Attend = Callable[..., jax.Array]


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Computes `jedbatch.ragged.attention`, written out for one sentence."""
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))  # [heads, n, d]
    fit = q @ jnp.swapaxes(k, 1, 2) / q.shape[-1] ** 0.5
    if causal:
        is_seen = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None]
        fit = jnp.where(is_seen[None], fit, -jnp.inf)
    return jnp.swapaxes(jax.nn.softmax(fit) @ v, 0, 1)


class Attention(nnx.Module):
    """Attention with several heads, from rows [n, hidden] to rows [m, hidden]."""

    def __init__(self, hidden: int, heads: int, attend: Attend, rngs: nnx.Rngs):
        self.queries = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.keys = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.values = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.join = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.heads = heads
        self.attend = attend

    def __call__(self, x: jax.Array, memory: jax.Array, causal: bool = False) -> jax.Array:
        """Returns what each row of x reads from the memory [n, hidden]."""
        q, k, v = self.queries(x), self.keys(memory), self.values(memory)
        q, k, v = (rows.reshape(rows.shape[0], self.heads, -1) for rows in (q, k, v))
        return self.join(self.attend(q, k, v, causal=causal).reshape(x.shape))


class Layer(nnx.Module):
    """Attention to the own rows, to a memory if there is one, and a network for every row."""

    def __init__(self, hidden: int, heads: int, attend: Attend, has_memory: bool, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = Attention(hidden, heads, attend, rngs)
        if has_memory:
            self.memory_norm = nnx.LayerNorm(hidden, rngs=rngs)
            self.memory_attention = Attention(hidden, heads, attend, rngs)
        self.network_norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.widen = nnx.Linear(hidden, 4 * hidden, rngs=rngs)
        self.narrow = nnx.Linear(4 * hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        """The rows [n, hidden] after the layer; with a memory, they see no rows after them."""
        normal = self.norm(x)
        x = x + self.attention(normal, normal, causal=memory is not None)
        if memory is not None:
            x = x + self.memory_attention(self.memory_norm(x), memory)
        return x + self.narrow(jax.nn.gelu(self.widen(self.network_norm(x))))


class Stack(nnx.Module):
    """Embeddings of words and of positions, layers, and a norm."""

    def __init__(
        self,
        num_words: int,
        hidden: int,
        heads: int,
        layers: int,
        max_length: int,
        attend: Attend,
        has_memory: bool,
        rngs: nnx.Rngs,
    ):
        self.words = nnx.Embed(num_words, hidden, rngs=rngs)
        self.positions = nnx.Embed(max_length, hidden, rngs=rngs)
        self.layers = nnx.List(
            [Layer(hidden, heads, attend, has_memory, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)

    def __call__(self, words: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        """The states [n, hidden] of words [n]."""
        n, positions = words.shape[0], self.positions.embedding
        if isinstance(n, int) and n > positions.shape[0]:
            raise ValueError(
                f"a Transformer for {positions.shape[0]} words at most got {n}; expected shorter "
                "sentences. Make it with a larger `max_length`, or cut what is too long."
            )
        x = self.words(words) + positions[:n]
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)
