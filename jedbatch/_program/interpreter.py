"""Finding the next instruction of a table and running it, again and again, on the device.

Two forms of control (see `_kernel.target`). XLA:CPU updates arenas in place only as long as they
never pass through the result of a conditional, so the opcode is chosen by loops whose trip counts
are read from the table, of which all but one make no trips. XLA:GPU runs a `lax.switch` whose
branches are one opcode or several. What a chunk does is not known here (see `_program.execute`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jax import lax

from jedbatch._jaxpr.unknown_numbers import unknown
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._program.arenas import number_at, row, slice_rows
from jedbatch._program.instructions import LOOP_COLUMNS, InstructionSet
from jedbatch._program.tables import TableLayout
from jedbatch._support.types import Array, PyTree

LOOPS_PER_GROUP = 4  # loops in a row before they are nested


@dataclasses.dataclass(frozen=True)
class Body:
    """The loop body that runs the chunks of one kernel and width.

    Attributes:
      kind: opcode in the table; int32[] where loops choose among bodies, see `unknown`.
      width: lanes of a chunk.
      chunk: `chunk(width, state, lane)` runs one.
      backwards: whether the last chunk of a run comes first.
    """

    kind: int | Array
    width: int
    chunk: Callable
    backwards: bool = False


def bodies_of(kind: int, widths: Sequence[int], chunk: Callable, backwards=False) -> list[Body]:
    """Returns the loop bodies that run the chunks of a kernel, one for each width."""
    numbered = enumerate(widths, kind * NUM_WIDTHS)
    return [Body(number, width, chunk, backwards) for number, width in numbered]


def choose(bodies: Sequence[Body], carry: PyTree) -> PyTree:
    """Executes the chunks of one run, by loops of which all but one make no trips.

    `carry` is (lane, opcode, lane at which the run stops, state). A `lax.switch` would copy every
    array that its branches return. XLA runs short sequences of operations one by one and long ones
    on several threads, which costs more than these operations take, so a loop is all there is for
    each body.
    """
    size = 1 if len(bodies) <= LOOPS_PER_GROUP else math.ceil(len(bodies) / LOOPS_PER_GROUP)
    for i in range(0, len(bodies), size):
        group = bodies[i : i + size]
        if len(group) == 1:
            carry = run_chunks(group[0], carry)
            continue
        first, last = group[0].kind, group[-1].kind

        def inside(carry, first=first, last=last):
            lane, opcode, stop, _ = carry
            return (lane != stop) & (opcode >= first) & (opcode <= last)

        carry = lax.while_loop(inside, functools.partial(choose, group), carry)
    return carry


def run_chunks(body: Body, carry: PyTree) -> PyTree:
    """Executes the chunks of a run if it is of the kind of the body."""
    step = -body.width if body.backwards else body.width

    def more(carry):
        lane, opcode, stop, _ = carry
        return (opcode == body.kind) & (lane != stop)

    def run(carry):
        lane, opcode, stop, state = carry
        state = lax.optimization_barrier(body.chunk(body.width, state, lane))
        return lane + step, opcode, stop, state

    return lax.while_loop(more, run, carry)


def run_branches(
    form: TableLayout,
    table: Array,
    bodies: Sequence[Body],
    instructions: InstructionSet,
    state: PyTree,
) -> PyTree:
    """Runs the instructions of a table one by one, each in a branch of a `lax.switch`.

    The barrier keeps arenas that a branch does not write from being copied (XLA of JAX 0.11).
    """
    body_of = {body.kind: body for body in bodies}

    def branch(opcodes: Sequence[int], repeated: bool) -> Callable:
        steps = instructions.steps(tuple(opcodes))

        def once(trip, lanes, state):
            for position, (opcode, step) in enumerate(zip(opcodes, steps, strict=True)):
                body = body_of[opcode]
                state = body.chunk(body.width, state, lanes[position] + trip * step)
                state = lax.optimization_barrier(state)
            return state

        def run(trips, lanes, state):
            if not repeated:
                return once(0, lanes, state)
            return lax.fori_loop(0, trips, lambda trip, state: once(trip, lanes, state), state)

        return run

    branches = [branch(*b) for b in instructions.branches]

    def step(i, state):
        offset, (_, columns) = form.places["instructions",]
        number, trips, *lanes = slice_rows(table, offset + i * columns, columns)
        return lax.switch(number, branches, trips, lanes, state)

    return lax.fori_loop(0, row(form, table, ("num_instructions",))[0], step, state)


def sweep(
    form: TableLayout,
    table: Array,
    bodies: Sequence[Body],
    instructions: InstructionSet,
    state: PyTree,
) -> PyTree:
    """Runs the instructions of a table."""

    def step(i, state):
        opcode, lane, stop = [number_at(table, place + i * LOOP_COLUMNS) for place in places]
        return choose(alike, (lane, opcode, stop, state))[3]

    if not bodies:  # nothing to do but to return inputs
        return state
    if instructions.control == "switch":
        return run_branches(form, table, bodies, instructions, state)
    first = form.offset(("instructions",))
    places = [unknown(first + column) for column in range(LOOP_COLUMNS)]
    alike = [dataclasses.replace(body, kind=unknown(body.kind)) for body in bodies]
    return lax.fori_loop(0, row(form, table, ("num_instructions",))[0], step, state)
