"""A machine for lanes that are at different places of a program.

Under `jax.vmap`, a loop in a loop waits in each trip of the outer one for the lane whose inner loop
takes longest. Here each lane has a program counter, the basic block that it runs next (see
`basic_blocks`), and registers, the rows of arrays [lanes, ...]. At each block lanes wait in a
queue. A step of the machine chooses a block and a width, takes so many lanes from the queue, reads
their registers, runs the block for them by `vmap`, writes their registers, and puts each into the
queue of the block it comes to. Nobody waits for a lane that is not at the same block.

**Which block.** The one at which most lanes wait is next, in the widest step that these fill, or
the narrowest where they fill none. A step of W lanes takes the time S + W c, where c is the work of
the block and S what a step costs by itself; `widths` has those that are worth their time.

**Short bodies.** The body of an innermost loop is a block that comes after itself. It runs again
for the same lanes until places of lanes that have left would have done the work of a step: what
is lost that way, and what a step costs, are at most twice the lesser of both.

Each lane does in its own order what it would do alone. Places that are empty repeat a lane which is
there, and write nothing. Derivatives in forward mode are those of the program, cut anew.

Source: A. Radul, B. Patton, D. Maclaurin, M. Hoffman, R. Saurous. Automatically Batching
Control-Intensive Programs for Modern Accelerators. MLSys 2020: lanes with program counters, the
block with most lanes next. Here blocks take lanes packed together, of several widths, in the
order in which they came.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.basic_blocks import cut
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.lane_loops import like_last, one_of, where_lanes, with_copies
from jedbatch._jaxpr.lane_steps import is_counting, tell
from jedbatch._jaxpr.registers import BasicBlock, BlockProgram, Slot
from jedbatch._jaxpr.storage import from_stored, stored, to_stored
from jedbatch._support.types import Array

BRANCH_LANES = 32  # of a branch that run together
STEP_WORK = 5e4  # floating-point operations done while a step of the machine is started
SHARE = 4.0  # work of a step of the width that is best, as a multiple of that
LEAST_WIDTH = 32  # of lanes, where there are twice as many
NARROWER = 4  # how much narrower steps are where fewer lanes are left
NARROWEST = 4
NEST_WORK = 8.0  # of all lanes in the block with most, as a multiple of that, to pay
SMALL = 128  # lanes that are ranked by a product of matrices

Registers = dict[Slot, Array]  # [N, ...] each, keys as the integers they are made of


@dataclass(frozen=True)
class LaneRule:
    """How lanes run.

    Attributes:
      step_work: floating-point operations done while a step is started.
      branch_lanes: how many lanes of a branch run together.
      nest_work: of all lanes in the block with most work, in starts of steps, from which on loops
        are expected to run faster than in lock step.
      nests: whether loops run inside of the loop over steps. On a CPU they save copies and starts
        of steps. On a GPU each is a node of a CUDA graph, which costs more than it saves.
    """

    step_work: float = STEP_WORK
    branch_lanes: int = BRANCH_LANES
    nest_work: float = NEST_WORK
    nests: bool = True


class _LaneState(NamedTuple):
    """The state that a step changes; `B` blocks and `N` lanes."""

    registers: Registers
    queue: Array  # [B, N], lanes that wait at each block, around the end to the start
    head: Array  # [B], the place of the first
    count: Array  # [B], how many wait
    tally: Array | None  # int32[steps, 3]: how often each ran, its lanes, those needed; or None
    choice: Array  # the number of the next step; that of all steps where no lane is left


def run_lanes(
    program: Any,
    args: Sequence[Array],
    in_batched: Sequence[bool],
    size: int,
    in_lock_step: Callable | None = None,
    rule: LaneRule | None = None,
) -> list[Array]:
    """Runs a program for lanes with program counters; one of those like the last, for all.

    Args:
      program: a closed program of one lane.
      args: arrays [N, ...] of lanes, or of all lanes.
      in_batched: which of these they are.
      size: N.
      in_lock_step: from the same arrays to the same results; what is differentiated, if given.
      rule: how they run; None for the default.

    Returns:
      The results [N, ...] of lanes.
    """
    lanes = rule or LaneRule()

    @jax.custom_jvp
    def run(*args: Array) -> list[Array]:
        repeats = like_last(list(itertools.compress(args, in_batched)))
        return with_copies(repeats, _run(program, args, in_batched, one_of(repeats), lanes))

    def push(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list, list]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        moved = [*primals, *(tangents[i] for i in moving)]
        if in_lock_step is not None:
            every = _with_tangents(in_lock_step, moving, moved)
        else:
            flags = [*in_batched, *(in_batched[i] for i in moving)]
            kinds = [
                jax.ShapeDtypeStruct(x.shape[batched:], x.dtype)
                for x, batched in zip(moved, flags, strict=True)
            ]
            fn = functools.partial(jax.core.eval_jaxpr, program.jaxpr, program.consts)
            pushed = jax.make_jaxpr(lambda *xs: _with_tangents(fn, moving, xs))(*kinds)
            every = run_lanes(pushed, moved, flags, size, None, lanes)
        outs = every[: len(program.jaxpr.outvars)]
        found = iter(every[len(outs) :])
        return outs, [
            next(found) if has_gradient(x.dtype) else zero_from_primal(x, symbolic_zeros=True)
            for x in outs
        ]

    run.defjvp(push, symbolic_zeros=True)
    return run(*args)


def _with_tangents(fn: Callable, moving: Sequence[int], operands: Sequence[Array]) -> list[Array]:
    """Returns the results of a function and the tangents of those that have some.

    Args:
      fn: from arrays to arrays.
      moving: which of its arguments have a tangent.
      operands: the arguments, and these tangents.
    """
    args = list(operands[: len(operands) - len(moving)])

    def of_moved(*moved: Array) -> list[Array]:
        every = dict(enumerate(args)) | dict(zip(moving, moved, strict=True))
        found: list[Array] = fn(*every.values())
        return found

    moved = tuple(args[i] for i in moving)
    outs, tangents = jax.jvp(of_moved, moved, tuple(operands[len(args) :]))
    return [*outs, *(t for x, t in zip(outs, tangents, strict=True) if has_gradient(x.dtype))]


def pays(
    program: Any, args: Sequence[Array], in_batched: Sequence[bool], size: int, rule: LaneRule
) -> bool:
    """Returns whether a program is expected to run faster than in lock step; as in `run_lanes`."""
    works: list[float] = []

    def cut_up(*args: Array) -> None:
        works.extend(block.work for block in _cut_for(program, args, in_batched).blocks[1:-1])

    jax.eval_shape(cut_up, *args)
    return bool(works) and size * max(works) >= rule.nest_work * rule.step_work


def _cut_for(program: Any, args: Sequence[Array], in_batched: Sequence[bool]) -> BlockProgram:
    """Returns a program cut into blocks; arguments as in `run_lanes`."""
    given = [
        Slot(x.shape[1:], x.dtype) if batched else x
        for x, batched in zip(args, in_batched, strict=True)
    ]
    return cut(program.jaxpr, program.consts, given)


def widths(block: BasicBlock, size: int, step_work: float = STEP_WORK) -> list[int]:
    """Returns how many lanes of a block run at a time.

    So many that a step does `SHARE` times the work of starting it, but half of all at most, so that
    it can be filled; fewer at the end; and all, as long as nobody has left. A block with little
    work runs for all who wait.
    """
    if block.work * size <= step_work:
        return [size]
    best = 1 << math.ceil(math.log2(max(1.0, SHARE * step_work / block.work)))
    half = 1 << math.floor(math.log2(max(1, size // 2)))
    best = min(half, max(LEAST_WIDTH, best))
    found = {best // NARROWER, best, size}
    return sorted(w for w in found if w >= min(NARROWEST, best))


def steps_of(
    blocks: Sequence[BasicBlock], size: int, step_work: float = STEP_WORK
) -> list[tuple[int, int]]:
    """Returns the steps of blocks at which lanes wait: the place of each one's block, its width."""
    return [(i, w) for i, block in enumerate(blocks) for w in widths(block, size, step_work)]


def _run(
    program: Any,
    args: Sequence[Array],
    in_batched: Sequence[bool],
    exists: Array,
    rule: LaneRule,
) -> list[Array]:
    """Runs a program for the lanes that exist; results of others are anything."""
    size = len(exists)
    blocks = _cut_for(program, args, in_batched)
    of_lanes = itertools.compress(args, in_batched)
    registers = {
        slot: to_stored(x, _kind_of(slot))
        for slot, x in zip(blocks.operands, of_lanes, strict=True)
    }
    for slot in blocks.registers:
        if slot not in registers:
            shape, dtype = stored(_kind_of(slot))
            registers[slot] = jnp.zeros((size, *shape), dtype)
    # All lanes run the first block together, and the last one, where all of them end.
    first, last = blocks.blocks[0], blocks.blocks[-1]
    registers, after = _run_alone(first, registers, size)
    if last is not first:
        registers = _until_last(blocks, registers, after, exists, rule)
        registers, _ = _run_alone(last, registers, size)
    return _results_in(blocks, registers, size)


def _run_alone(block: BasicBlock, registers: Registers, size: int) -> tuple[Registers, Array]:
    """Runs a block that writes no rows of arrays for all lanes.

    Returns:
      (the registers after it, int32[N] the block that each lane comes to).
    """
    outs, after, writes = _over_lanes(block, {x: _all(registers, x) for x in block.inputs}, size)
    assert not writes
    return registers | _as_stored(block, outs), after


def _results_in(program: BlockProgram, registers: Registers, size: int) -> list[Array]:
    """Returns the results [N, ...] of lanes that are at the end."""
    return [
        _all(registers, x) if isinstance(x, Slot) else jnp.broadcast_to(x, (size, *jnp.shape(x)))
        for x in program.results
    ]


def _until_last(
    program: BlockProgram,
    registers: Registers,
    after: Array,
    exists: Array,
    rule: LaneRule,
) -> Registers:
    """Runs lanes until all have come to the last block; returns the registers.

    Args:
      program: cut into blocks.
      registers: of lanes.
      after: int32[N], the block that each is at.
      exists: bool[N], whether there is one.
      rule: how they run.
    """
    size = len(after)
    between = program.blocks[1:-1]
    steps = steps_of(between, size, rule.step_work)
    choose = chooser(steps)
    arrived = _Arrived(after - 1, exists, len(between))
    none = jnp.zeros(len(between), jnp.int32)
    queue = jnp.zeros((len(between), size), jnp.int32)
    queue, count = arrived.put(jnp.arange(size, dtype=jnp.int32), queue, none, none)
    read = [x for x in registers if any(_touches(block, x) for block in between)]
    tally = jnp.zeros((len(steps), 3), jnp.int32) if is_counting() else None
    state = _LaneState({x: registers[x] for x in read}, queue, none, count, tally, choose(count))
    bodies = [
        functools.partial(_step, between[b], width, choose, size, rule, number)
        for number, (b, width) in enumerate(steps)
    ]

    def round_of(values: Any) -> Any:
        if not rule.nests:
            branches = [functools.partial(run_behind, body) for body in bodies]
            return lax.switch(values[-1], branches, values)
        # On a CPU a conditional would copy what it returns, a loop does not.
        for number, body in enumerate(bodies):

            def is_chosen(values: Any, number: int = number) -> Array:
                return values[-1] == number

            def run(values: Any, body: Callable = body) -> Any:
                return unpack(body(pack(values)))

            values = lax.while_loop(is_chosen, run, values)
        return values

    def run_behind(body: Callable, values: Any) -> Any:
        """Runs a step; behind a barrier no branch of XLA:GPU's conditional copies registers."""
        return lax.optimization_barrier(unpack(body(pack(values))))

    def pack(values: Any) -> _LaneState:
        return _LaneState(dict(zip(read, values[0], strict=True)), *values[1:])

    def unpack(state: _LaneState) -> Any:
        return [state.registers[x] for x in read], *state[1:]

    values = lax.while_loop(lambda values: values[-1] < len(steps), round_of, unpack(state))
    state = pack(values)
    if state.tally is not None:
        parts = [(between[b].number, between[b].work, width) for b, width in steps]
        tell("block", parts, state.tally)
    return registers | state.registers


def chooser(steps: Sequence[tuple[int, int]]) -> Callable[[Array], Array]:
    """Returns a function from how many lanes wait at each block to the number of a step.

    It is that of all steps where no lane is left.

    Args:
      steps: the place of each one's block, its width; ascending.
    """
    block, width = np.array(steps, np.int32).T

    def choose(count: Array) -> Array:
        is_next = block == count.argmax()
        filled = (is_next & (width <= count[block])).sum(dtype=jnp.int32)
        number = is_next.argmax() + jnp.maximum(filled - 1, 0)
        return jnp.where(count.max() > 0, number, len(steps)).astype(jnp.int32)

    return choose


def _step(
    block: BasicBlock,
    width: int,
    choose: Callable,
    size: int,
    rule: LaneRule,
    number: int,
    state: _LaneState,
) -> _LaneState:
    """Runs a step, whose number is `number`."""
    here = block.number - 1
    head, waiting = state.head[here], state.count[here]
    place = jnp.arange(width, dtype=jnp.int32)
    taken = jnp.minimum(waiting, width)
    exists = place < taken
    lanes = state.queue[here, (head + jnp.minimum(place, taken - 1)) % size]
    written = jnp.where(exists, lanes, size)
    values = {x: from_stored(state.registers[x][lanes], _kind_of(x)) for x in block.inputs}
    for access in block.reads:
        index = values[access.index] if isinstance(access.index, Slot) else access.index
        row = state.registers[access.array][lanes, index]
        values[access.row] = from_stored(row, _kind_of(access.row))
    if block.repeats and rule.nests:
        full = jnp.minimum(width, state.count.sum())
        outs, after, ran = _repeated(block, values, exists, full, rule.step_work)
        writes: list[tuple[Array, Array]] = []
    else:
        outs, after, writes = _over_lanes(block, values, width)
        ran = _counts(1, width, taken)
    registers = dict(state.registers)
    for slot, kept in _as_stored(block, outs).items():
        registers[slot] = registers[slot].at[written].set(kept, mode="drop", unique_indices=True)
    for access, (index, row) in zip(block.writes, writes, strict=True):
        array, kept = access.array, to_stored(row, _kind_of(access.row))
        registers[array] = registers[array].at[written, index].set(kept, mode="drop")
    head = state.head.at[here].set((head + taken) % size)
    count = state.count.at[here].add(-taken)
    arrived = _Arrived(after - 1, exists, len(state.count))
    queue, count = arrived.put(lanes, state.queue, head, count)
    tally = None if state.tally is None else state.tally.at[number].add(ran)
    return _LaneState(registers, queue, head, count, tally, choose(count))


def _counts(trips: Any, width: int, needed: Array) -> Array:
    """Returns int32[3], one row of a tally."""
    return jnp.stack([jnp.int32(trips), jnp.int32(trips) * width, needed])


def _repeated(
    block: BasicBlock,
    values: dict[Slot, Array],
    exists: Array,
    full: Array,
    step_work: float,
) -> tuple[list[Array], Array, Array | None]:
    """Runs a block for some lanes until many of them have left it.

    Args:
      block: may come after itself.
      values: of its inputs.
      exists: which places have a lane.
      full: how many lanes there could be.
      step_work: floating-point operations done while a step is started.

    Returns:
      (values of its outputs, the number of the block each lane comes to, a row of a tally, or None
      if nobody counts).
    """
    width = len(exists)
    fixed = {x: y for x, y in values.items() if x not in block.outputs}
    start = [
        values[x] if x in values else from_stored(jnp.zeros((width, *kept), dtype), _kind_of(x))
        for x in block.outputs
        for kept, dtype in [stored(_kind_of(x))]
    ]

    def trip(state: Any) -> Any:
        now, after, active, wasted, ran, _ = state
        if ran is not None:
            ran = ran + _counts(1, width, active.sum(dtype=jnp.int32))
        carried = dict(zip(block.outputs, now, strict=True))
        given = fixed | {x: y for x, y in carried.items() if x in values}
        outs, found, _ = _over_lanes(block, given, width)
        now = where_lanes(active, outs, now)
        after = jnp.where(active, found, after)
        active = active & (found == block.number)
        left = active.sum(dtype=jnp.int32)
        wasted = wasted + (full - left).astype(jnp.float32)
        goes_on = (left > 0) & (wasted * block.work < step_work)
        return now, after, active, wasted, ran, goes_on

    after = jnp.full(width, block.number, jnp.int32)
    ran = jnp.zeros(3, jnp.int32) if is_counting() else None
    state = start, after, exists, jnp.float32(0), ran, jnp.bool_(True)
    outs, after, _, _, ran, _ = lax.while_loop(lambda state: state[-1], trip, state)
    return outs, after, ran


class _Arrived:
    """Lanes that come to blocks.

    Args:
      block: int[W], where they come to; others than the blocks there are have no queue.
      exists: bool[W], which of them are there.
      num_blocks: B.
    """

    def __init__(self, block: Array, exists: Array, num_blocks: int):
        self.block = jnp.where(exists, block, num_blocks)
        is_at = self.block[:, None] == jnp.arange(num_blocks)[None]
        if len(block) <= SMALL:  # exact: there are few
            before = jnp.asarray(np.tri(len(block), k=-1, dtype=np.float32))
            ranks = (before @ is_at.astype(jnp.float32)).astype(jnp.int32)
        else:
            ranks = jnp.cumsum(is_at, 0, dtype=jnp.int32) - is_at.astype(jnp.int32)
        self._rank = jnp.where(is_at, ranks, 0).sum(1)
        self._counts = is_at.sum(0, dtype=jnp.int32)

    def put(self, lanes: Array, queue: Array, head: Array, count: Array) -> tuple[Array, Array]:
        """Returns (the queue, how many wait) with the lanes at the end."""
        ends = (head + count).at[self.block].get(mode="clip")
        place = (ends + self._rank) % queue.shape[1]
        return queue.at[self.block, place].set(lanes, mode="drop"), count + self._counts


def _over_lanes(
    block: BasicBlock, values: dict[Slot, Array], width: int
) -> tuple[list[Array], Array, list[tuple[Array, Array]]]:
    """Runs a block for some lanes."""
    slots = list(values)

    def one(rows: Sequence[Array], _: Array) -> Any:
        return block.run(dict(zip(slots, rows, strict=True)))

    found: Any = jax.vmap(one)(list(values.values()), jnp.zeros(width, bool))
    return found


def _touches(block: BasicBlock, slot: Slot) -> bool:
    """Returns whether a block reads or writes a register, or rows of it."""
    rows = [x.array for x in (*block.reads, *block.writes)]
    return slot in block.inputs or slot in block.outputs or slot in rows


def _as_stored(block: BasicBlock, outs: Sequence[Array]) -> Registers:
    return {x: to_stored(y, _kind_of(x)) for x, y in zip(block.outputs, outs, strict=True)}


def _all(registers: Registers, slot: Slot) -> Array:
    return from_stored(registers[slot], _kind_of(slot))


def _kind_of(slot: Slot) -> ValueType:
    """Returns the shape and dtype of the values of a register."""
    return ValueType(slot.shape, slot.dtype)
