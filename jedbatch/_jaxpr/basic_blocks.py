"""A program cut at its control flow into basic blocks, for lanes at different places in it.

A `while_loop` or `cond` that lanes run differently is where a lane may wait for others. The program
is cut there: what lies between is a *basic block*, which runs from its first operation to its last
and then names the block that comes next. `scan` becomes a loop over blocks where its body is cut,
and calls (`jit`, `checkpoint`, functions with derivatives of their own) are gone through.

What all lanes do alike stays inside of a block as it is: loops whose number of trips is the same
for all lanes and whose bodies are not cut, and branches with little work. Values that are the same
for all lanes are computed once, before the lanes start.

A value of a lane that one block computes and another reads is kept in a *register*. The carry of a
loop has registers that blocks assign; arrays that a `scan` goes along are read and written row by
row. The test of a loop is done twice, before it and at the end of its body, so that the body of an
innermost loop is one block, which may come after itself.

Source: A. Aho, M. Lam, R. Sethi, J. Ullman. Compilers: Principles, Techniques, and Tools, 2nd
edition, 2006: basic blocks in 8.4, live variables in 9.2.5.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import any_performs, inner_programs, run_equation, work
from jedbatch._jaxpr.versions import (
    Equation,
    OpenProgram,
    consts_of,
    scan_parts,
    without_consts,
)
from jedbatch._support.types import Array

LIGHT = 4000  # floating-point operations of all branches of a `cond` that stays inside of a block

# Calls whose body is gone through, by the names of the parameter that has it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A value that each lane has by itself; `shape` and `dtype` are of one lane."""

    shape: tuple[int, ...]
    dtype: Any


Value = Any  # a `Slot`, or an array that all lanes share


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What is computed for one lane.

    Attributes:
      run: from arrays to a list of arrays.
      operands: what it reads.
      results: what it writes, after all is read.
      work: floating-point operations, roughly.
    """

    run: Callable[..., Sequence[Array]]
    operands: tuple[Value, ...]
    results: tuple[Slot, ...]
    work: int = 0


@dataclasses.dataclass(frozen=True)
class RowAccess:
    """A row `array[index]` that is read into, or written from, `row`."""

    array: Slot
    index: Value
    row: Value


@dataclasses.dataclass
class Block:
    """Operations that run one after the other.

    Attributes:
      number: its place among the blocks.
      instructions: the operations.
      reads: rows that are read before them.
      writes: rows that are written after them.
      which: number of the target that comes next, clamped to those there are; None for the first.
      targets: numbers of blocks that may come next; the number of blocks is the end.
      inputs: registers read, those of whole rows of `reads` excepted.
      outputs: registers written that are read later.
    """

    number: int = -1
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    reads: list[RowAccess] = dataclasses.field(default_factory=list)
    writes: list[RowAccess] = dataclasses.field(default_factory=list)
    which: Value = None
    targets: tuple[int, ...] = ()
    inputs: list[Slot] = dataclasses.field(default_factory=list)
    outputs: list[Slot] = dataclasses.field(default_factory=list)

    @property
    def work(self) -> int:
        """Floating-point operations for one lane, roughly."""
        return sum(x.work for x in self.instructions)

    @property
    def repeats(self) -> bool:
        """Returns whether a few trips may run at once: it may come after itself."""
        return self.number in self.targets and not self.reads and not self.writes

    def run(self, values: dict[Slot, Array]) -> tuple[list[Array], Array, list[tuple]]:
        """Runs the block for one lane.

        Args:
          values: of its inputs, and of the rows that it reads.

        Returns:
          (values of its outputs, number of the next block, (index, row) of each of its writes).
        """
        env = dict(values)

        def value(x: Value) -> Array:
            return env[x] if isinstance(x, Slot) else x

        for step in self.instructions:
            found = step.run(*map(value, step.operands))
            env.update(zip(step.results, found, strict=True))
        written = [(value(x.index), value(x.row)) for x in self.writes]
        if self.which is None:
            after = jnp.int32(self.targets[0])
        else:
            which = jnp.clip(jnp.asarray(value(self.which), jnp.int32), 0, len(self.targets) - 1)
            after = jnp.asarray(self.targets, jnp.int32)[which]
        return [env[x] for x in self.outputs], after, written


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """Blocks, the first of which is where all lanes start.

    Attributes:
      blocks: in the order of the program.
      operands: for each operand of the program that lanes have by themselves, its register.
      results: for each result of the program, its register, or what all lanes share.
      registers: all of them.
    """

    blocks: tuple[Block, ...]
    operands: tuple[Slot, ...]
    results: tuple[Value, ...]
    registers: tuple[Slot, ...]

    def check(self) -> None:
        """Raises `AssertionError` if a block reads what nobody has written."""
        every = set(self.registers)
        known = [set(self.operands), *(every for _ in self.blocks)]
        seen = {0}
        arrays = {x.array for block in self.blocks for x in block.writes}
        waiting = [0]
        while waiting:
            number = waiting.pop()
            if number == len(self.blocks):
                continue
            block, before = self.blocks[number], known[number]
            missing = set(block.inputs) - before - arrays
            assert not missing, f"block {number} reads {missing}"
            after = before | set(block.outputs)
            for target in block.targets:
                met = known[target] & after
                if met != known[target] or target not in seen:
                    known[target] = met
                    seen.add(target)
                    waiting.append(target)

    def __str__(self) -> str:
        """Returns a line for each block: its work, what it reads and writes, what comes next."""
        names = {x: f"r{i}" for i, x in enumerate(self.registers)}
        lines = []
        for n, block in enumerate(self.blocks):
            read, written = (
                " ".join(names.get(x, "?") for x in xs) for xs in (block.inputs, block.outputs)
            )
            after = ", ".join("end" if t == len(self.blocks) else str(t) for t in block.targets)
            lines.append(f"{n}: work {block.work}, reads {read}, writes {written} -> {after}")
        return "\n".join(lines)


def cut(jaxpr: OpenProgram, consts: Sequence[Array], args: Sequence[Value]) -> BlockProgram:
    """Cuts a program into blocks.

    Args:
      jaxpr: the program of one lane.
      consts: the values of its constants, the same for all lanes.
      args: for each argument a `Slot`, or the array that all lanes share.
    """
    cutter = _Cutter()
    results = cutter.walk(jaxpr, consts, args)
    cutter.end()
    blocks = _merged(cutter.blocks)
    operands = tuple(x for x in args if isinstance(x, Slot))
    live = tuple(x for x in results if isinstance(x, Slot))
    _find_registers(blocks, live)
    registers = dict.fromkeys([*operands, *live])
    for block in blocks:
        found = [x.array for x in (*block.reads, *block.writes)]
        registers.update(dict.fromkeys([*block.inputs, *block.outputs, *found]))
    return BlockProgram(tuple(blocks), operands, tuple(results), tuple(registers))


def is_cut(eqn: Equation, varies: Sequence[bool]) -> bool:
    """Returns whether an operation is cut, if some operands differ from lane to lane."""
    return _analysis(eqn, varies)[1]


def is_nest(eqn: Equation) -> bool:
    """Returns whether an operation is, or contains, a loop in which something is cut.

    It is asked as if all operands differed from lane to lane.
    """
    if not is_cut(eqn, [True] * len(eqn.invars)):
        return False
    if eqn.primitive.name == "scan":
        return True
    if eqn.primitive.name == "while":
        body = without_consts(eqn.params["body_jaxpr"])
        return any(is_cut(x, [True] * len(x.invars)) for x in body.eqns)
    return any(is_nest(x) for program in inner_programs(eqn) for x in program.eqns)


class _Cutter:
    """Goes through a program and appends to the last of the blocks."""

    def __init__(self) -> None:
        self.blocks = [Block()]

    def walk(self, jaxpr: OpenProgram, consts: Sequence[Value], args: Sequence[Value]) -> list:
        """Appends what a program does; returns its results."""
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Value:
            is_literal = isinstance(atom, Literal)
            return np.asarray(atom.val, atom.aval.dtype) if is_literal else env[atom]

        for eqn in jaxpr.eqns:
            found = self._equation(jaxpr, eqn, list(map(value, eqn.invars)))
            env.update(zip(eqn.outvars, found, strict=True))
        return list(map(value, jaxpr.outvars))

    def _copied(self, values: Sequence[Value]) -> list[Slot]:
        """Returns slots that keep some values, whatever is assigned to theirs later."""
        slots = [_slot_of(x) for x in values]
        self._assign(slots, values)
        return slots

    def end(self) -> None:
        """Goes to the end of the program from the last block."""
        self._go(len(self.blocks))

    def _equation(self, jaxpr: OpenProgram, eqn: Equation, values: list[Value]) -> list[Value]:
        varies = [isinstance(x, Slot) for x in values]
        if is_cut(eqn, varies):
            name = eqn.primitive.name
            if name in _CALLS:
                inner = eqn.params[_CALLS[name]]
                return self.walk(without_consts(inner), consts_of(inner), values)
            return getattr(self, f"_{name}")(eqn, values)
        is_certain = len(self.blocks) == 1 or not any_performs([eqn], "while")
        if not any(varies) and is_certain:  # a loop may not end where it is not reached
            return run_equation(jaxpr, eqn, values)
        results = tuple(Slot(v.aval.shape, v.aval.dtype) for v in eqn.outvars)
        run = functools.partial(_run, jaxpr, eqn)
        self.blocks[-1].instructions.append(Instruction(run, tuple(values), results, work(eqn)))
        return list(results)

    def _assign(self, slots: Sequence[Slot], values: Sequence[Value]) -> None:
        if slots:
            copies = Instruction(_same, tuple(values), tuple(slots))
            self.blocks[-1].instructions.append(copies)

    def _compute(self, run: Callable, *operands: Value) -> Slot:
        """Appends an operation with a scalar int32 or a row as its result."""
        (kind,) = jax.eval_shape(run, *map(_kind_of, operands))
        result = Slot(kind.shape, kind.dtype)
        self.blocks[-1].instructions.append(Instruction(run, operands, (result,)))
        return result

    def _go(self, *targets: int, which: Value = None) -> None:
        self.blocks[-1].targets, self.blocks[-1].which = targets, which

    def _start(self) -> int:
        """Starts a block; returns its number."""
        self.blocks.append(Block())
        return len(self.blocks) - 1

    def _while(self, eqn: Equation, values: list[Value]) -> list[Value]:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
        carry = values[num_cond + num_body :]
        moves = _moving(without_consts(body), num_body)
        slots = [_slot_of(carry[i]) for i in moves]
        self._assign(slots, [carry[i] for i in moves])
        for i, slot in zip(moves, slots, strict=True):
            carry[i] = slot

        def test() -> Value:
            return self.walk(without_consts(cond), consts_of(cond), [*of_cond, *carry])[0]

        goes_on = test()
        before = len(self.blocks) - 1
        first = self._start()
        outs = self.walk(without_consts(body), consts_of(body), [*of_body, *carry])
        self._assign(slots, [outs[i] for i in moves])
        goes_on_again = test()
        last = len(self.blocks) - 1
        after = self._start()
        for number, which in ((before, goes_on), (last, goes_on_again)):
            self.blocks[number].targets, self.blocks[number].which = (after, first), which
        return carry

    def _cond(self, eqn: Equation, values: list[Value]) -> list[Value]:
        index, operands = values[0], values[1:]
        results = [Slot(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        before = len(self.blocks) - 1
        firsts, lasts = [], []
        for branch in eqn.params["branches"]:
            firsts.append(self._start())
            self._assign(results, self.walk(without_consts(branch), consts_of(branch), operands))
            lasts.append(len(self.blocks) - 1)
        after = self._start()
        self.blocks[before].targets, self.blocks[before].which = tuple(firsts), index
        for last in lasts:
            self.blocks[last].targets = (after,)
        return results

    def _scan(self, eqn: Equation, values: list[Value]) -> list[Value]:
        num_consts, num_carried = scan_parts(eqn)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carried]
        arrays = values[num_consts + num_carried :]
        moves = _moving(without_consts(body), num_consts, num_carried)
        slots = [_slot_of(carry[i]) for i in moves]
        index = Slot((), jnp.dtype("int32"))
        start, step, stop = (length - 1, -1, -1) if eqn.params["reverse"] else (0, 1, length)
        self._assign([*slots, index], [*(carry[i] for i in moves), jnp.int32(start)])
        for i, slot in zip(moves, slots, strict=True):
            carry[i] = slot
        self._go(len(self.blocks))
        first = self._start()
        rows = [self._row(x, index) for x in arrays]
        outs = self.walk(without_consts(body), consts_of(body), [*consts, *carry, *rows])
        stacked = [Slot(v.aval.shape, v.aval.dtype) for v in eqn.outvars[num_carried:]]
        at, *rows = self._copied([index, *outs[num_carried:]])
        accesses = zip(stacked, rows, strict=True)
        self.blocks[-1].writes += [RowAccess(array, at, row) for array, row in accesses]
        index_after = self._compute(lambda i: [i + jnp.int32(step)], index)
        self._assign([*slots, index], [*(outs[i] for i in moves), index_after])
        goes_on = self._compute(lambda i: [i != stop], index)
        last, after = len(self.blocks) - 1, self._start()
        self.blocks[last].targets, self.blocks[last].which = (after, first), goes_on
        return [*carry, *stacked]

    def _row(self, array: Value, index: Slot) -> Slot:
        """Returns a row of an array, read when the block starts."""
        if not isinstance(array, Slot):
            return self._compute(lambda i: [_row_of(array, i)], index)
        row = Slot(array.shape[1:], array.dtype)
        self.blocks[-1].reads.append(RowAccess(array, index, row))
        return row


def _run(jaxpr: OpenProgram, eqn: Equation, *values: Array) -> list[Array]:
    return run_equation(jaxpr, eqn, values)


def _same(*values: Array) -> list[Array]:
    return list(values)


def _row_of(array: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _kind_of(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _slot_of(value: Value) -> Slot:
    """Returns another slot for values of the kind of a value."""
    kind = _kind_of(value)
    return Slot(kind.shape, kind.dtype)


def _moving(body: OpenProgram, num_consts: int, num_carried: int | None = None) -> list[int]:
    """Returns the positions of carried values that the body of a loop changes."""
    num_carried = len(body.outvars) if num_carried is None else num_carried
    carried = body.invars[num_consts : num_consts + num_carried]
    pairs = zip(carried, body.outvars[:num_carried], strict=True)
    return [i for i, (before, after) in enumerate(pairs) if before is not after]


# --- what is cut ---


def _analysis(eqn: Equation, varies: Sequence[bool]) -> tuple[list[bool], bool]:
    """Returns (which results differ from lane to lane, whether the operation is cut)."""
    name = eqn.primitive.name
    differs = any(varies)
    everywhere = [differs] * len(eqn.outvars)
    if not any_performs([eqn], "while", "cond") or eqn.effects:
        return everywhere, False
    if name in _CALLS:
        return _of_program(eqn.params[_CALLS[name]], varies)
    if name == "while":
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_cond, of_body = varies[:num_cond], varies[num_cond : num_cond + num_body]
        body = eqn.params["body_jaxpr"]
        carried, cuts = _of_carry(body, of_body, list(varies[num_cond + num_body :]), [])
        (decides, *_), in_cond = _of_program(eqn.params["cond_jaxpr"], [*of_cond, *carried])
        if not (decides or in_cond or cuts):
            return carried, False
        for i in _moving(without_consts(body), num_body):
            carried[i] = True
        return carried, True
    if name == "cond":
        found = [_of_program(x, varies[1:]) for x in eqn.params["branches"]]
        cuts = any(cuts for _, cuts in found)
        total = sum(work(e) for x in inner_programs(eqn) for e in x.eqns)
        if cuts or (varies[0] and total >= LIGHT):
            return [True] * len(eqn.outvars), True
        return [varies[0] or any(xs) for xs in zip(*(xs for xs, _ in found), strict=True)], False
    if name == "scan" and eqn.params["length"]:
        num_consts, num_carried = scan_parts(eqn)
        consts, rows = varies[:num_consts], list(varies[num_consts + num_carried :])
        carried = list(varies[num_consts : num_consts + num_carried])
        carried, cuts = _of_carry(eqn.params["jaxpr"], consts, carried, rows)
        outs, _ = _of_program(eqn.params["jaxpr"], [*consts, *carried, *rows])
        if not cuts:
            return outs, False
        for i in _moving(without_consts(eqn.params["jaxpr"]), num_consts, num_carried):
            carried[i] = True
        return [*carried, *[True] * (len(outs) - num_carried)], True
    return everywhere, False


def _of_program(program: Any, varies: Sequence[bool]) -> tuple[list[bool], bool]:
    """Returns (which results differ from lane to lane, whether something is cut)."""
    jaxpr = without_consts(program)
    differing = set(itertools.compress(jaxpr.invars, varies))
    cuts = False
    for eqn in jaxpr.eqns:
        given = [isinstance(x, Var) and x in differing for x in eqn.invars]
        found, is_one = _analysis(eqn, given)
        cuts = cuts or is_one
        differing.update(itertools.compress(eqn.outvars, found))
    return [isinstance(x, Var) and x in differing for x in jaxpr.outvars], cuts


def _of_carry(
    body: Any, consts: Sequence[bool], carried: list[bool], rows: list[bool]
) -> tuple[list[bool], bool]:
    """Returns (which carried values differ at some time, whether something in the body is cut)."""
    while True:
        outs, cuts = _of_program(body, [*consts, *carried, *rows])
        after = [a or b for a, b in zip(carried, outs, strict=False)]
        if after == carried:
            return carried, cuts
        carried = after


# --- registers ---


def _merged(blocks: list[Block]) -> list[Block]:
    """Returns blocks without those that come after one alone which goes nowhere else."""
    end = len(blocks)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for number, block in enumerate(blocks):
        for target in block.targets:
            before[target].append(number)
    into: dict[int, int] = {}
    for here, block in enumerate(blocks):
        if here in into:
            continue
        number = here
        while len(block.targets) == 1 and block.targets[0] < end:
            (target,) = block.targets
            after = blocks[target]
            if before[target] != [number] or after.reads or blocks[here].writes or target == here:
                break
            blocks[here].instructions += after.instructions
            blocks[here].writes += after.writes
            blocks[here].targets, blocks[here].which = after.targets, after.which
            into[target] = here
            number, block = target, blocks[here]
    left = [n for n in range(end) if n not in into]
    numbers = {n: k for k, n in enumerate([*left, end])}
    for n in left:
        blocks[n].number = numbers[n]
        blocks[n].targets = tuple(numbers[t] for t in blocks[n].targets)
    return [blocks[n] for n in left]


def _find_registers(blocks: list[Block], results: Sequence[Slot]) -> None:
    """Finds the inputs and outputs of blocks; leaves out what nobody reads.

    Args:
      blocks: are changed.
      results: what is read at the end.
    """
    live: list[set[Slot]] = [*(set() for _ in blocks), set(results)]
    while True:
        changed = False
        for number in reversed(range(len(blocks))):
            read = _needed(blocks[number], _after(blocks[number], live))[1]
            changed = changed or read != live[number]
            live[number] = read
        if not changed:
            break
    for number, block in enumerate(blocks):
        after = _after(block, live)
        block.instructions = _needed(block, after)[0]
        block.writes = [x for x in block.writes if x.array in after]
        made = {x for step in block.instructions for x in step.results}
        made |= {x.row for x in block.reads}
        block.outputs = [x for x in dict.fromkeys(_written(block)) if x in after and x in made]
        also = list(_read(block))
        defined = {x.row for x in block.reads}
        first: list[Slot] = []
        for step in block.instructions:
            first += [x for x in step.operands if isinstance(x, Slot) and x not in defined]
            defined.update(step.results)
        first += [x for x in also if x not in defined]
        block.inputs = [x for x in dict.fromkeys(first) if x in live[number]]


def _after(block: Block, live: Sequence[set[Slot]]) -> set[Slot]:
    return set().union(*(live[t] for t in block.targets))


def _needed(block: Block, after: set[Slot]) -> tuple[list[Instruction], set[Slot]]:
    """Returns (the instructions whose results are read, what is read of what was before)."""
    live = set(after)
    for x in block.writes:
        if x.array in after:
            live.update(y for y in (x.index, x.row) if isinstance(y, Slot))
    if isinstance(block.which, Slot):
        live.add(block.which)
    kept = []
    for step in reversed(block.instructions):
        if live.isdisjoint(step.results):
            continue
        if step.run is _same:  # of many copies those that are read
            every = zip(step.operands, step.results, strict=True)
            operands, results = zip(*((x, y) for x, y in every if y in live), strict=True)
            step = dataclasses.replace(step, operands=operands, results=results)
        live.difference_update(step.results)
        live.update(x for x in step.operands if isinstance(x, Slot))
        kept.append(step)
    for x in block.reads:
        if x.row in live:
            live.discard(x.row)
            live.update(y for y in (x.array, x.index) if isinstance(y, Slot))
    return kept[::-1], live


def _written(block: Block) -> Iterator[Slot]:
    yield from (x.row for x in block.reads)
    yield from (x for step in block.instructions for x in step.results)


def _read(block: Block) -> Iterator[Slot]:
    """Yields what a block reads beside its instructions."""
    for x in block.reads:
        if isinstance(x.index, Slot):
            yield x.index
    for x in block.writes:
        yield from (y for y in (x.index, x.row) if isinstance(y, Slot))
    if isinstance(block.which, Slot):
        yield block.which
