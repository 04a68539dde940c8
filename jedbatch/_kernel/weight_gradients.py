"""Gradients of consts: from the rows that they met, and the cotangents of what came of it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.sums import added
from jedbatch._jaxpr.zeros import Sources
from jedbatch._support.types import Array


@dataclass(frozen=True, eq=False)
class Tap:
    """A place where consts meet rows.

    Attributes:
      consts: positions of the consts there that have a gradient.
      fixed: positions of those that have none (integers).
      cotangents: which of the rows the sweep leaves behind hold its results' cotangents.
      shapes: of these cotangents.
      sources: for each of these the results of the kernel whose cotangents it is made of.
      rows: maps (operands, saved) of one lane to the other things it reads.
      apply: maps (consts, fixed, rows) of one lane to its results that have a cotangent.
      linear: zero rows give zero, so lanes that never ran may hold zeros.
      look_up: its gradient is a scatter.
      scale: it multiplies a row by a const of its shape, element by element.
    """

    consts: tuple[int, ...]
    fixed: tuple[int, ...]
    cotangents: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    sources: tuple[Sources, ...]
    rows: Callable
    apply: Callable
    linear: bool = True
    look_up: bool = False
    scale: bool = False

    def gradient(
        self, consts: Sequence[Array], rows: Array, cotangents: Sequence[Array]
    ) -> list[Array]:
        """Gradients of its consts, summed over lanes; `rows` and `cotangents` are batched."""
        if self.scale:  # XLA:CPU sums products over lanes 15 times as fast by a product
            (row,), (cotangent,) = rows, cotangents
            terms = (row * cotangent).reshape(len(row), -1)
            ones = jnp.ones(len(row), terms.dtype)
            total = jnp.dot(ones, terms, precision=jax.lax.Precision.HIGHEST)
            return [total.reshape(row.shape[1:])]
        fixed = [consts[c] for c in self.fixed]

        def batched(moving):
            lane = functools.partial(self.apply, moving, fixed)
            return jax.vmap(lane, axis_size=len(cotangents[0]))(rows)

        _, vjp = jax.vjp(batched, [consts[c] for c in self.consts])
        return vjp(list(cotangents))[0]

    def added(
        self,
        total: Sequence[Array],
        consts: Sequence[Array],
        rows: Array,
        cotangents: Sequence[Array],
        all_lanes: bool,
    ) -> list[Array]:
        """The gradients of its consts added to `total`; those of look-ups row by row.

        Over all lanes, numbers of 16 bits are added up in float32: GPUs have no atomic addition of
        them, and lanes that never ran all add their zeros to the same row.
        """
        given = [consts[c].dtype for c in self.consts]
        if self.look_up and all_lanes:
            consts, cotangents = _widened(consts), _widened(cotangents)
        if not self.look_up or given != [consts[c].dtype for c in self.consts]:
            gradient = self.gradient(consts, rows, cotangents)
            return [x + y.astype(x.dtype) for x, y in zip(total, gradient, strict=True)]
        closed = inlined(jax.make_jaxpr(self.gradient)(consts, rows, cotangents))
        return added(closed, jax.tree.leaves((consts, rows, cotangents)), total)


def _widened(arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays of which those of 16-bit floats are in float32."""
    narrow = (jnp.bfloat16, jnp.float16)
    return [x.astype(jnp.float32) if x.dtype in narrow else x for x in arrays]
