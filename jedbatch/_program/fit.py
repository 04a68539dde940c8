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
from jedbatch._program.lower import body_runs, find_all_modes, operand_rows, value_rows
from jedbatch._program.placement import Placement, capacity, result_bytes
from jedbatch._program.signature import Signature

SLACK = 4  # a program is used for minibatches down to a quarter of its size
SMALL = 1 << 20  # bytes of results; a program of this size will do for any minibatch


def fits(placed: Placement, signature: Signature) -> bool:
    """Returns whether a program can run a minibatch without too much room going to waste."""
    place = {kernel: k for k, kernel in enumerate(signature.kernels)}
    arenas = signature._arena_ids
    if not (set(placed.kernels) <= place.keys() and set(placed.arenas) <= arenas.keys()):
        return False
    mine = [place[kernel] for kernel in placed.kernels]
    arena_ids = [arenas[kind] for kind in placed.arenas]
    return (
        placed.target == signature.target
        and resembles(placed, signature)
        and all(n <= signature.lanes[k] for k, n in zip(mine, placed.lanes, strict=True))
        and all(n <= signature.widest[k] for k, n in zip(mine, placed.widest, strict=True))
        and all(
            n <= signature.inputs[a] for a, n in zip(arena_ids, placed.input_counts, strict=True)
        )
        and len(placed.runs) <= signature.num_instructions
        and all(
            n <= (signature.shared_rows or ())[a]
            for a, n in zip(arena_ids, placed.shared_rows, strict=False)
        )
        and all(
            len(x) <= signature.outputs[a] for a, x in zip(arena_ids, placed.outputs, strict=True)
        )
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
    return same and size <= max(SMALL, SLACK * result_bytes(placed.kernels, placed.lanes))


def make_signature(placed: Placement, model: Signature | None) -> Signature:
    """A signature with room for a minibatch, and for what `model` had room for.

    Growing from the last program instead of starting anew makes capacities settle after a few
    minibatches.
    """
    lanes = {kernel: n for kernel, (n, _) in zip(placed.kernels, placed.room, strict=True)}
    widest = {kernel: n for kernel, (_, n) in zip(placed.kernels, placed.room, strict=True)}
    needed = map(placed.capacity, placed.input_counts)
    inputs = dict(zip(placed.arenas, needed, strict=True))
    shared = dict(zip(placed.arenas, map(placed.capacity, placed.shared_rows), strict=False))
    returned = [len(x) if placed.stacked else placed.capacity(len(x)) for x in placed.outputs]
    outputs = dict(zip(placed.arenas, returned, strict=True))
    readings: dict[Kernel, tuple[Reading, ...]] = {}
    num_instructions = 0
    if model is not None:
        for kernel, n, w in zip(model.kernels, model.lanes, model.widest, strict=True):
            lanes[kernel] = max(n, lanes.get(kernel, 0))
            widest[kernel] = max(w, widest.get(kernel, 0))
        for kind, n, m in zip(model.arenas, model.inputs, model.outputs, strict=True):
            inputs[kind] = max(n, inputs.get(kind, 0))
            outputs[kind] = max(m, outputs.get(kind, 0))
        for kind, n in zip(model.arenas, model.shared_rows or (), strict=False):
            shared[kind] = max(n, shared.get(kind, 0))
        readings |= {k: r for k, r in zip(model.kernels, model.readings, strict=True) if r}
        num_instructions = model.num_instructions
    if placed.reuse:  # room for every chunk that is compiled, whether it ever runs or not
        for kernel in lanes:
            for kind in map(stored, kernel.results):
                widths = kernel.buckets.widths[: widest[kernel]]
                shared[kind] = max(shared.get(kind, 0), *widths)
    made = Signature(
        tuple(lanes),
        tuple(lanes.values()),
        tuple(widest[kernel] for kernel in lanes),
        tuple(inputs),
        tuple(inputs.values()),
        tuple(outputs.get(kind, 0) for kind in inputs),
        num_instructions,
        tuple(shared.get(kind, 0) for kind in inputs) if placed.reuse else None,
        tuple(readings.get(kernel, ()) for kernel in lanes),
        placed.target,
    )
    rows = operand_rows(placed, value_rows(placed, made)[0])
    modes = find_all_modes(placed, made, rows)
    for kernel, found in zip(placed.kernels, modes, strict=True):
        live = placed.chunks.live[placed.chunks.kernel == placed.kernels.index(kernel)]
        readings.setdefault(kernel, choose_reading(found, live > 1, placed.worth_slicing))
    made = replace(made, readings=tuple(readings.get(kernel, ()) for kernel in lanes))
    runs = body_runs(placed, made, modes)
    longest = placed.target.superinstruction
    made = replace(made, branches=made.instructions.learn(runs, longest))
    num_needed = len(made.instructions.encode(runs))
    # Depths vary more than sums over instances.
    return replace(made, num_instructions=max(num_instructions, capacity(2 * num_needed)))
