"""Signatures for minibatches: whether a program fits one, and a new one with room for it.

A program that exists is used again for every minibatch that fits it, so that a stream of new
topologies soon compiles nothing.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from jedbatch._jaxpr.storage import Kind, stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._layout.access import (
    Reading,
    choose_reading,
)
from jedbatch._program.capacity import (
    MAX_OVERSIZE,
    Capacity,
    result_bytes,
    round_up,
)
from jedbatch._program.lower import (
    Lowered,
    Rows,
    body_runs,
    find_all_modes,
    lower,
    narrowed,
    operand_rows,
)
from jedbatch._program.lower_vjp import (
    Readers,
    ReverseSignature,
    make_reverse_signature,
    reverse_ample,
    reverse_fits,
    reverse_table,
)
from jedbatch._program.placement import Placement
from jedbatch._program.signature import Signature
from jedbatch._program.widths import is_cut_cheaply

# Bytes of results; a program of this size will do for any minibatch. In inference, rows that nobody
# writes take memory and no time, but under `jax.vmap` and `jax.lax.map`, where XLA fills them; in
# training, weight gradients are computed over all lanes.
SMALL_RESULT_BYTES, SMALL_IN_INFERENCE = 1 << 20, 1 << 23


def fits(placed: Placement, signature: Signature, most: float = MAX_OVERSIZE) -> bool:
    """Returns whether a program can run a minibatch without too much room going to waste.

    Chunks that are wider than those of the program are cut if that costs little.
    """
    if placed.target != signature.target or not resembles(placed, signature, most):
        return False
    if not signature.places.keys() >= set(placed.kernels):
        return False
    cut = narrowed(placed, signature)
    if cut is not placed and not is_cut_cheaply(placed.target, placed.cost, cut.cost):
        return False
    return signature.capacity.holds(cut.need)


def resembles(placed: Placement, signature: Signature, most: float = MAX_OVERSIZE) -> bool:
    """Returns whether a program returns what a minibatch returns, and is not much too large for it.

    Nor may it need tracers that the minibatch does not bring. It is much too large from `most`
    times as many bytes of results on.
    """
    if not signature.transient <= set(placed.kernels):
        return False
    if (signature.shared_rows is not None) != placed.reuse:
        return False
    mine, its = placed.returned, signature.returned
    same = mine == its if placed.exact else mine.keys() <= its.keys()
    small = SMALL_RESULT_BYTES if placed.keeps else SMALL_IN_INFERENCE
    if not same or signature.result_bytes <= small:
        return same
    return signature.result_bytes <= most * result_bytes(placed.kernels, placed.lanes)


def make_signature(
    placed: Placement,
    model: Signature | None,
    forgotten: Collection[Kernel] = (),
    ample: Capacity | None = None,
) -> Signature:
    """A signature with room for a minibatch, and for what `model` had room for.

    Growing from the last program instead of starting anew makes capacities settle after a few
    minibatches. Kernels that are `forgotten` are left out. `ample` is the room for the minibatch;
    None gives it some headroom, and more if the program is grown.
    """
    capacity = ample or (placed.ample if model is None else placed.more_ample)
    if model is not None:
        capacity = _with_more_instances(capacity, placed, model)
        capacity = capacity.joined(_without(model, forgotten, placed.arenas))
    readings: dict[Kernel, tuple[Reading, ...]] = {}
    if model is not None:
        readings |= {k: r for k, r in zip(model.kernels, model.readings, strict=True) if r}
    if placed.reuse:  # room for every chunk that is compiled, whether it ever runs or not
        shared = dict(capacity["shared_rows"])
        for kernel, num_widths in capacity["widest"].items():
            for kind in map(stored, kernel.results):
                shared[kind] = max(shared.get(kind, 0), *kernel.buckets.widths[:num_widths])
        capacity = Capacity({**capacity.sizes, "shared_rows": shared})
    made = Signature.of(capacity, placed.target, readings, placed.reuse)
    placed = narrowed(placed, made)
    modes = []
    if placed.target.has_slice_bodies:
        modes = find_all_modes(placed, made, operand_rows(placed, Rows.of(placed, made)))
    for kernel, kernel_modes in zip(placed.kernels, modes, strict=False):
        live = placed.chunks.live[placed.chunks.kernel == placed.kernels.index(kernel)]
        readings.setdefault(kernel, choose_reading(kernel_modes, live > 1, placed.worth_slicing))
    made = replace(made, readings=tuple(readings.get(kernel, ()) for kernel in made.kernels))
    runs = body_runs(placed, made, modes)
    longest = placed.target.superinstruction
    made = replace(made, branches=made.instructions.learn(runs, longest))
    num_needed = len(made.instructions.encode(runs))
    # Depths vary more than sums over instances.
    return replace(made, num_instructions=max(made.num_instructions, round_up(2 * num_needed)))


def _with_more_instances(capacity: Capacity, placed: Placement, model: Signature) -> Capacity:
    """Returns room for results of more instances, if they are stacked and the model had too few."""
    has_room = all(n <= model.returned.get(kind, 0) for kind, n in placed.returned.items())
    if has_room or placed.exact or not placed.stacked:
        return capacity
    count = placed.graph.num_instances
    rows = {kind: -(-n // count) * round_up(count) for kind, n in capacity["outputs"].items()}
    return Capacity({**capacity.sizes, "outputs": rows})


def _without(
    signature: Signature, forgotten: Collection[Kernel], kinds: Collection[Kind]
) -> Capacity:
    """The capacity of a program without some kernels, and without arenas that no other has.

    Arenas of some `kinds` stay.
    """
    if not forgotten:
        return signature.capacity
    kept = {kernel for kernel in signature.kernels if kernel not in forgotten}
    values = {stored(t) for kernel in kept for t in (*kernel.operands, *kernel.results)}
    names = {*kept, *values, *kinds, None}
    return Capacity(
        {
            name: {key: size for key, size in sizes.items() if key in names}
            for name, sizes in signature.capacity.sizes.items()
        }
    )


def make_ample_signature(
    minibatches: Sequence[Placement], model: Signature | None, forgotten: Collection[Kernel]
) -> Signature:
    """A signature with room for each of some minibatches and others like them.

    It is the model if that has so much room. If not, kernels that are `forgotten` are left out.
    """
    signature = model
    for placed in by_size(minibatches):
        if signature is None or not signature.capacity.holds(placed.more_ample):
            signature = make_signature(placed, signature, forgotten, placed.more_ample)
    assert signature is not None
    most = max(num_instructions(placed, signature) for placed in minibatches)
    if most > signature.num_instructions:
        signature = replace(signature, num_instructions=round_up(2 * most))
    return signature


def make_ample_reverse(
    minibatches: Sequence[Placement],
    readers_of: Callable[[Placement, bool | None], Readers],
    forward: Signature,
    model: ReverseSignature | None,
) -> ReverseSignature:
    """The same of reverse signatures.

    Args:
      minibatches: of which there are some.
      readers_of: from a minibatch, and whether its cotangents share rows, to its readers.
      forward: the program to be reversed.
      model: a program for it, or for another one with the same kernels, if there is one.
    """
    reverse, shares = model, None if model is None else model.sent is not None
    for placed in by_size(minibatches):
        readers = readers_of(placed, shares)
        placed = narrowed(placed, forward)
        shares = readers.sent is not None
        ample = reverse_ample(placed, readers, forward)
        is_own = reverse is not None and reverse.forward == forward
        if reverse is None or not is_own or not reverse_fits(ample, readers, reverse):
            reverse = make_reverse_signature(placed, readers, forward, reverse)
    assert reverse is not None
    return reverse


def by_size(minibatches: Sequence[Placement]) -> list[Placement]:
    """Returns minibatches, the one with most lanes first."""
    return sorted(minibatches, key=lambda placed: -sum(placed.lanes))


def lowered_for(minibatches: Sequence[Placement], signature: Signature) -> list[Lowered]:
    """Returns minibatches for a program, whose size does not matter; none if one does not fit."""
    several = []
    for placed in minibatches:
        lowered = lower(placed, signature) if fits(placed, signature, math.inf) else None
        if lowered is None:
            return []
        several.append(lowered)
    return several


def reverse_tables(
    minibatches: Sequence[Lowered], readers: Sequence[Readers], reverse: ReverseSignature
) -> list[np.ndarray]:
    """Returns the tables of minibatches for a reverse program that they fit."""
    pairs = zip(minibatches, readers, strict=True)
    return [reverse_table(lowered.placed, own, reverse) for lowered, own in pairs]


def with_instructions_for(minibatches: Sequence[Placement], signature: Signature) -> Signature:
    """Returns a program with room for the instructions that minibatches take, and as many again."""
    most = max(num_instructions(placed, signature) for placed in minibatches)
    return replace(signature, num_instructions=max(signature.num_instructions, round_up(2 * most)))


def num_instructions(placed: Placement, signature: Signature) -> int:
    """Returns how many instructions of a program a minibatch takes."""
    placed = narrowed(placed, signature)
    rows = operand_rows(placed, Rows.of(placed, signature))
    runs = body_runs(placed, signature, find_all_modes(placed, signature, rows))
    return len(signature.instructions.encode(runs))
