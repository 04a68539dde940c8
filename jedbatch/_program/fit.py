"""Signatures for minibatches: whether a program fits one, and a new one with room for it.

A program that exists is used again for every minibatch that fits it, so that a stream of new
topologies soon compiles nothing.
"""

from dataclasses import replace

from jedbatch._jaxpr.storage import stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._layout.access import (
    Reading,
    choose_reading,
)
from jedbatch._program.capacity import MAX_OVERSIZE, Capacity, round_up
from jedbatch._program.lower import Rows, body_runs, find_all_modes, operand_rows
from jedbatch._program.placement import Placement, result_bytes
from jedbatch._program.signature import Signature

SMALL_RESULT_BYTES = 1 << 20  # bytes of results; a program of this size will do for any minibatch


def fits(placed: Placement, signature: Signature) -> bool:
    """Returns whether a program can run a minibatch without too much room going to waste."""
    return (
        placed.target == signature.target
        and resembles(placed, signature)
        and signature.capacity.holds(placed.need)
    )


def resembles(placed: Placement, signature: Signature) -> bool:
    """Returns whether a program returns what a minibatch returns, and is not much too large for it.

    Nor may it need tracers that the minibatch does not bring.
    """
    if any(kernel.transient and kernel not in placed.kernels for kernel in signature.kernels):
        return False
    if (signature.shared_rows is not None) != placed.reuse:
        return False
    mine = {kind: len(x) for kind, x in zip(placed.arenas, placed.outputs, strict=True) if len(x)}
    its = {kind: n for kind, n in zip(signature.arenas, signature.outputs, strict=True) if n}
    same = mine == its if placed.stacked else mine.keys() <= its.keys()
    size = result_bytes(signature.kernels, signature.lanes)
    most = MAX_OVERSIZE * result_bytes(placed.kernels, placed.lanes)
    return same and size <= max(SMALL_RESULT_BYTES, most)


def make_signature(placed: Placement, model: Signature | None) -> Signature:
    """A signature with room for a minibatch, and for what `model` had room for.

    Growing from the last program instead of starting anew makes capacities settle after a few
    minibatches.
    """
    capacity = placed.ample if model is None else placed.ample.joined(model.capacity)
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
    rows = operand_rows(placed, Rows.of(placed, made).operand)
    modes = find_all_modes(placed, made, rows)
    for kernel, kernel_modes in zip(placed.kernels, modes, strict=True):
        live = placed.chunks.live[placed.chunks.kernel == placed.kernels.index(kernel)]
        readings.setdefault(kernel, choose_reading(kernel_modes, live > 1, placed.worth_slicing))
    made = replace(made, readings=tuple(readings.get(kernel, ()) for kernel in made.kernels))
    runs = body_runs(placed, made, modes)
    longest = placed.target.superinstruction
    made = replace(made, branches=made.instructions.learn(runs, longest))
    num_needed = len(made.instructions.encode(runs))
    # Depths vary more than sums over instances.
    return replace(made, num_instructions=max(made.num_instructions, round_up(2 * num_needed)))
