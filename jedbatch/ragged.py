"""Operations that relate the rows of one instance to each other, for instances of any length.

A sentence is an array [n, ...] with one row for each word, and n differs from sentence to sentence.
What a model does to every row alike, such as a linear layer or a norm, is the same for all
sentences stacked on top of each other; only a few operations have to know where one sentence ends
and the next begins. Attention is the most important of them:

    attention(q, k, v) = softmax(scale · q kᵀ) v

Written for one instance it needs no mask: nothing is padded, so there is nothing to hide. The
functions here are ordinary functions of arrays, which work anywhere in JAX; in what JAX traces they
keep their name, so that code which runs many instances together can tell what is meant. Numbers of
rows may be symbolic dimensions of `jax.export.symbolic_shape`, other sizes may not.

References:
  Vaswani et al., Attention is all you need, NeurIPS 2017, sections 3.2.1 and 3.2.2.

Examples:
  >>> import jax, jax.numpy as jnp
  >>> from jedbatch import ragged
  >>> words = jax.random.normal(jax.random.key(0), (5, 8))  # a sentence of five words
  >>> ragged.attention(words, words, words).shape
  (5, 8)
"""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jedbatch import checks

__all__ = ["attention"]

HOLDS_FOR_ALL_LENGTHS = True  # see `_support.frames`


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Attention of the rows of one instance to those of the same or of another one.

    Row i of the result is the mean of the rows of v, each weighted by how well its key fits:

        a_i = scale · k q_i          out_i = Σ_j w_j v_j   with   w = softmax(a_i)

    for every head by itself. With `causal` row i attends to rows j ≤ i only. The softmax is taken
    in float32 at least. Where there is nothing to attend to (m is 0), rows are zeros.

    Args:
      q: queries [n, heads, d], or [n, d] for one head.
      k: keys [m, heads, d], or [m, d].
      v: values [m, heads, e], or [m, e].
      causal: whether rows see those before them and themselves only; n and m must be equal.
      scale: a number, 1/√d if None.

    Returns:
      [n, heads, e], or [n, e] for one head; of the dtype of v.

    Raises:
      ValueError: if shapes do not fit.
      TypeError: if arrays are not of floating point numbers, or `scale` is not a number.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jedbatch import ragged
      >>> q, k = jnp.zeros((3, 2)), jnp.zeros((3, 2))  # no key fits better than another
      >>> v = jnp.array([[1.0], [2.0], [6.0]])
      >>> ragged.attention(q, k, v)[:, 0].tolist()
      [3.0, 3.0, 3.0]
      >>> ragged.attention(q, k, v, causal=True)[:, 0].tolist()
      [1.0, 1.5, 3.0]
    """
    checks.flag("attention", "causal", causal)
    _check(q, k, v, causal)
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    elif isinstance(scale, bool) or not isinstance(scale, numbers.Real) or scale - scale != 0:
        raise TypeError(
            f"`attention` got scale={checks.brief(scale)}; expected a finite number. One that is "
            "computed or learned goes into the queries: `attention(scale * q, k, v, scale=1.0)`."
        )
    if q.ndim == 3:
        return ragged_attention(q, k, v, causal=bool(causal), scale=float(scale))
    q, k, v = (jnp.expand_dims(x, 1) for x in (q, k, v))
    return jnp.squeeze(attention(q, k, v, causal=causal, scale=scale), 1)


@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def ragged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, scale: float
) -> jax.Array:
    """`attention` of checked arrays with an axis of heads; known by its name in a jaxpr."""
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    fit = scale * jnp.einsum("ihd,jhd->hij", q.astype(wide), k.astype(wide))
    if causal:
        seen = jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[None]
        fit = jnp.where(seen[None], fit, -jnp.inf)
    # Finite where there is no key, so that nothing is subtracted from infinity.
    best = jnp.max(fit, axis=-1, keepdims=True, initial=jnp.finfo(wide).min)
    weight = jnp.exp(fit - jax.lax.stop_gradient(best))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight / jnp.where(total == 0, 1, total)
    return jnp.einsum("hij,jhe->ihe", weight, v.astype(wide)).astype(v.dtype)


def _check(q: Any, k: Any, v: Any, causal: bool) -> None:
    """Raises an error if the arrays do not go together. Numbers of rows may be symbolic."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"`attention` got {checks.shown(x)} for {name}; expected an array.")
    came = f"`attention` got q {q.shape}, k {k.shape} and v {v.shape}"
    if not (q.ndim == k.ndim == v.ndim and q.ndim in (2, 3)):
        raise ValueError(
            f"{came}; expected [n, heads, d], [m, heads, d] and [m, heads, e], or none with heads. "
            "This is for one instance: `jedbatch.batch` or `jax.vmap` run it for many."
        )
    if q.shape[1:] != k.shape[1:]:
        raise ValueError(
            f"{came}; expected queries and keys that differ in their number only. Project them to "
            "as many heads and features, and mind the order: queries, keys, values."
        )
    if q.shape[1:-1] != v.shape[1:-1]:
        raise ValueError(
            f"{came}; expected as many heads of values as of queries, {q.shape[1]}. To let heads "
            "share values, repeat them: `jnp.repeat(v, times, axis=1)`."
        )
    if _differ(k.shape[0], v.shape[0]):
        raise ValueError(
            f"{came}; expected a value for every key. Make both of the same rows, as in "
            "`attention(queries(x), keys(memory), values(memory))`."
        )
    if causal and _differ(q.shape[0], k.shape[0]):
        raise ValueError(
            f"{came} with causal=True; expected as many queries as keys, one of each for every "
            "position. To attend to all rows of another sequence, leave `causal` out."
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"`attention` got {name} of {x.dtype}; expected floating point numbers. Write "
                f"`{name}.astype(jnp.float32)`."
            )


def _differ(a: Any, b: Any) -> bool:
    """Returns whether two sizes differ. Symbols do unless they are the same."""
    return bool(a != b)
