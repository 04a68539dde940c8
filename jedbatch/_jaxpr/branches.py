"""Branches, each for its own lanes: forwards, and in reverse for weights that all lanes share.

Lanes are put in the order of their branches and run in blocks, each of one branch. A block reads
and writes what its branch reads: in reverse it adds to the gradients of these arrays alone, and of
an array of which the branch reads a slice to this slice (see `_jaxpr.sums`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.derivatives import pull_back_some
from jedbatch._jaxpr.interpret import has_gradient, inlined
from jedbatch._jaxpr.lane_steps import is_counting, tell
from jedbatch._jaxpr.program_counters import BRANCH_LANES
from jedbatch._jaxpr.sums import added
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._support.types import Array


class LaneBranch(NamedTuple):
    """A branch as a function of one lane.

    Attributes:
      run: from the operands to the results.
      reads: the positions of operands that results depend on.
      work: floating-point operations, roughly.
    """

    run: Callable[..., list[Array]]
    reads: frozenset[int]
    work: int = 0


def apart(
    branches: Sequence[LaneBranch],
    index: Array,
    args: Sequence[Array],
    in_batched: Sequence[bool],
    width: int = BRANCH_LANES,
) -> list[Array]:
    """Runs for each lane the branch that it takes.

    Args:
      branches: from operands of one lane to results.
      index: int[N], the branch of each lane, clamped to those there are.
      args: operands of lanes, or of all lanes.
      in_batched: which of these they are.
      width: how many lanes of a branch run together.

    Returns:
      The results of lanes, [N, ...] each.
    """
    axes = [0 if batched else None for batched in in_batched]

    def block(branch: LaneBranch, lanes: Array, _: Array, results: list[Array]) -> list[Array]:
        outs = jax.vmap(branch.run, axes, axis_size=len(lanes))(*_taken(args, in_batched, lanes))
        return [x.at[lanes].set(y) for x, y in zip(results, outs, strict=True)]

    size = len(index)
    kinds = jax.eval_shape(lambda: jax.vmap(branches[0].run, axes, axis_size=size)(*args))
    results = [jnp.zeros(x.shape, x.dtype) for x in kinds]
    return _each_block(branches, index, block, results, width)


def apart_with_reverse(
    branches: Sequence[LaneBranch],
    index: Array,
    args: Sequence[Array],
    in_batched: Sequence[bool],
    width: int = BRANCH_LANES,
) -> list[Array]:
    """Does the same, and can be differentiated in reverse: each branch for its own lanes."""
    axes = [0 if batched else None for batched in in_batched]

    @jax.custom_vjp
    def run(index: Array, args: Sequence[Array]) -> list[Array]:
        return apart(branches, index, args, in_batched, width)

    def forward(index: Array, args: Sequence[Array]) -> tuple[list[Array], Any]:
        return apart(branches, index, args, in_batched, width), (index, args)

    def backward(read: Any, cotangents: Sequence[Array]) -> tuple[None, list[Any]]:
        index, args = read
        returned = [s for s, x in enumerate(cotangents) if has_gradient(x.dtype)]
        every = [i for i, x in enumerate(args) if has_gradient(x.dtype)]

        def block(
            branch: LaneBranch, lanes: Array, exists: Array, sums: list[Array]
        ) -> list[Array]:
            operands = _taken(args, in_batched, lanes)
            moving = [i for i in every if i in branch.reads]
            given = [
                where_alive(exists.reshape(-1, *[1] * (x.ndim - 1)), x)
                for x in (cotangents[s][lanes] for s in returned)
            ]

            def pulled_back(operands: Sequence[Array], given: Sequence[Array]) -> list[Array]:
                run = jax.vmap(branch.run, axes, axis_size=len(lanes))
                of_results: Any = dict(zip(returned, given, strict=True))
                found = pull_back_some(lambda xs: run(*xs), operands, moving, returned, of_results)
                return [found[i] for i in moving]

            closed = inlined(jax.make_jaxpr(pulled_back)(operands, given))
            place = [every.index(i) for i in moving]
            totals = [sums[p] for p in place]
            parts = [
                jnp.zeros((len(lanes), *x.shape[1:]), x.dtype) if in_batched[i] else x
                for i, x in zip(moving, totals, strict=True)
            ]
            found = added(closed, jax.tree.leaves((operands, given)), parts)
            after = list(sums)
            for i, p, total, x in zip(moving, place, totals, found, strict=True):
                after[p] = total.at[lanes].add(x) if in_batched[i] else x
            return after

        sums = [jnp.zeros_like(args[i]) for i in every]
        sums = _each_block(branches, index, block, sums, width)
        by_place = dict(zip(every, sums, strict=True))
        return None, [by_place.get(i) for i in range(len(args))]

    run.defvjp(forward, backward)
    return run(index, args)


def _each_block(
    branches: Sequence[LaneBranch], index: Array, block: Callable, state: list[Array], width: int
) -> list[Array]:
    """Runs `block(branch, lanes, exists, state)` for the lanes of each branch, `width` at a time.

    Where there are not as many as a block has, the last is there again, and does not `exist`.
    """
    index = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
    order = jnp.argsort(index).astype(jnp.int32)
    counts = jnp.zeros(len(branches), jnp.int32).at[index].add(1)
    ends = jnp.cumsum(counts)
    if is_counting():
        steps = -(-counts // width)
        parts = [(number, branch.work, width) for number, branch in enumerate(branches)]
        tell("branch", parts, jnp.stack([steps, steps * width, counts], axis=1))
    for number, branch in enumerate(branches):
        end, begin = ends[number], ends[number] - counts[number]

        def one(i: Array, state: list[Array], branch=branch, begin=begin, end=end) -> list[Array]:
            place = begin + i * width + jnp.arange(width, dtype=jnp.int32)
            lanes = order[jnp.minimum(place, end - 1)]
            found: list[Array] = block(branch, lanes, place < end, state)
            return found

        state = lax.fori_loop(0, -(-counts[number] // width), one, state)
    return state


def _taken(args: Sequence[Array], in_batched: Sequence[bool], lanes: Array) -> list[Array]:
    """Returns operands of some lanes."""
    return [x[lanes] if batched else x for x, batched in zip(args, in_batched, strict=True)]
