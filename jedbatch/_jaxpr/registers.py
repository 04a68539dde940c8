"""Basic blocks, and the registers of values that live between them.

A value of a lane that one block computes and another reads is kept in a *register*: it is *live*
where the block ends. What no later block reads needs no register, and what nobody reads is not
computed. Blocks of which one always follows the other, and no other does, are one.

Source: A. Aho, M. Lam, R. Sethi, J. Ullman. Compilers: Principles, Techniques, and Tools, 2nd
edition, 2006: basic blocks in 8.4, live variables in 9.2.5.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jedbatch._support.types import Array


def same(*values: Array) -> list[Array]:
    """Returns the values: what an instruction runs that copies them."""
    return list(values)


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A value that each lane has by itself; `shape` and `dtype` are of one lane."""

    shape: tuple[int, ...]
    dtype: Any


Value = Any  # a `Slot`, or an array that all lanes share


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A computation for one lane.

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
class BasicBlock:
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

    blocks: tuple[BasicBlock, ...]
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


def merged(blocks: list[BasicBlock]) -> list[BasicBlock]:
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


def find_registers(blocks: list[BasicBlock], results: Sequence[Slot]) -> None:
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


def _after(block: BasicBlock, live: Sequence[set[Slot]]) -> set[Slot]:
    return set().union(*(live[t] for t in block.targets))


def _needed(block: BasicBlock, after: set[Slot]) -> tuple[list[Instruction], set[Slot]]:
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
        if step.run is same:  # of many copies those that are read
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


def _written(block: BasicBlock) -> Iterator[Slot]:
    yield from (x.row for x in block.reads)
    yield from (x for step in block.instructions for x in step.results)


def _read(block: BasicBlock) -> Iterator[Slot]:
    """Yields what a block reads beside its instructions."""
    for x in block.reads:
        if isinstance(x.index, Slot):
            yield x.index
    for x in block.writes:
        yield from (y for y in (x.index, x.row) if isinstance(y, Slot))
    if isinstance(block.which, Slot):
        yield block.which
