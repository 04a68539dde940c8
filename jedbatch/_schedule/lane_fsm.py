"""Policies for lanes as finite-state machines: tables from where lanes wait to the block that runs.

What a learned policy sees of a machine with program counters is, for each block, whether nobody,
few, many or as many lanes wait there as fill a step. It looks up which block runs, and how wide: in
the first, second or third of the widths that the block has, the narrowest first. What is not in the
table is left to `least_loss`.

On the device the table is data: a hashed array, an operand of the compiled program. A machine that
is learned anew compiles nothing.

Programs are known by their blocks, the work of each and where it goes: those of two cells with the
same blocks are one.

Source: Chen et al., ED-Batch, ICML 2023, section 2, for machines of this kind; there a state is
which types of nodes are ready.
"""

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch._schedule.hashing import mixed, salts, slot_of
from jedbatch._schedule.lane_policies import MAX_WIDTHS, LaneFrontier
from jedbatch._support.files import content_of, read_text, reading, write_text
from jedbatch._support.types import Array

LANE_FORMAT = "jedbatch policy for lanes, version 1"
WAITING = ("nobody", "few", "many", "full")  # what is said about a block
MANY = 4  # times as many lanes as these fill a step
NUM_ROWS = 1 << 10  # of the table
REACH = 16  # rows that are looked at, from the one that is hashed to
MAX_ENTRIES = NUM_ROWS // 2
MAX_TRIES = 256  # multipliers tried before entries are left out
TABLE_SIZE = 1 + 2 * NUM_ROWS

LaneCode = tuple[int, ...]  # [B], positions in `WAITING`


def lane_code(frontier: LaneFrontier) -> Array:
    """int32[B], what is said about each block."""
    waiting, filling = frontier.waiting, frontier.blocks.filling
    words = waiting > 0, (waiting > 0) & (MANY * waiting >= filling), waiting >= filling
    few, many, full = (word.astype(np.int32) for word in words)
    return few + many + full


def _number(code: Array, label: str) -> Array:
    """uint32[1], a code and its program as one number."""
    return mixed(code, salts(code.shape[-1])) + np.array([zlib.crc32(label.encode())], np.uint32)


def look_up(table: Array, frontier: LaneFrontier) -> Array:
    """Returns the step that a table says; a negative number if it says nothing.

    Args:
      table: int32[TABLE_SIZE]: a multiplier; the number of the code in each row; its block times
        `MAX_WIDTHS` and which of the widths, or -1 in rows without one.
      frontier: how many lanes wait.
    """
    xp = frontier.xp
    number = _number(lane_code(frontier), frontier.blocks.label)
    first = slot_of(number * table[:1].astype(np.uint32), NUM_ROWS).astype(np.int32)
    rows = (first + np.arange(REACH, dtype=np.int32)) % NUM_ROWS
    is_here = table[1 : 1 + NUM_ROWS][rows] == number.astype(np.int32)
    found = xp.where(is_here, table[1 + NUM_ROWS :][rows], np.int32(-1)).max()
    known = xp.maximum(found, 0)
    step = step_at(frontier, known // MAX_WIDTHS, known % MAX_WIDTHS)
    return xp.where(found >= 0, step, np.int32(-1))


def step_at(frontier: LaneFrontier, block: Array, width: Array) -> Array:
    """Returns the step of a block with one of its widths, the widest if it has fewer."""
    xp = frontier.xp
    first = xp.asarray(frontier.blocks.first)
    block = xp.minimum(block, np.int32(len(frontier.blocks.work) - 1))
    return xp.minimum(first[block] + width, first[block + 1] - 1)


def by_table(frontier: LaneFrontier) -> Array:
    """Stands for a table that a program gets as an operand; leaves all to `least_loss` without.

    Args:
      frontier: how many lanes wait.

    Returns:
      A negative number.
    """
    return frontier.xp.int32(-1)


@dataclass(frozen=True)
class LaneDecision:
    """The codes that lead to one decision in a program.

    Attributes:
      program: a position in the machine's `programs`.
      run: the block that runs.
      width: which of its widths, the narrowest being 0.
      when: the codes that lead to it, sorted.
    """

    program: int
    run: int
    width: int
    when: tuple[LaneCode, ...]


@dataclass(frozen=True)
class LaneFSM:
    """A policy for lanes as a finite-state machine; a value that can be compared, hashed and saved.

    Use it as `lane_policy=`; `batched.learn(..., lanes=True)` makes one. It prints as a table.

    Attributes:
      programs: the programs it knows, by their blocks.
      decisions: what it runs when.
      report: how it was learned and how good it is; not part of the files.
    """

    programs: tuple[str, ...]
    decisions: tuple[LaneDecision, ...]
    report: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def of(tables: Mapping[str, Mapping[LaneCode, tuple[int, int]]]) -> "LaneFSM":
        """The machine with these decisions.

        Args:
          tables: for each program the block to run, and which of its widths, by code.

        Returns:
          The machine.

        Raises:
          ValueError: this is no machine that can run.
        """
        groups: dict[tuple[int, int, int], list[LaneCode]] = {}
        for number, table in enumerate(tables.values()):
            for code, choice in table.items():
                groups.setdefault((number, *choice), []).append(code)
        decisions = [LaneDecision(*key, tuple(sorted(groups[key]))) for key in sorted(groups)]
        return LaneFSM(tuple(tables), tuple(decisions))

    def check(self) -> None:
        """Raises `ValueError` unless this is a machine that can run."""

        def require(condition: bool, what: str) -> None:
            if not condition:
                raise ValueError(
                    f"not a valid LaneFSM: {what}; expected one as `batched.learn` returns"
                )

        for name, kind in (("programs", str), ("decisions", LaneDecision)):
            came = getattr(self, name)
            require(
                isinstance(came, tuple) and all(isinstance(x, kind) for x in came),
                f"its {name} are {checks.brief(came)}, not a tuple of {kind.__name__}",
            )
        require(len(set(self.programs)) == len(self.programs), "two of its programs are the same")
        seen = set()
        for x in self.decisions:
            require(0 <= x.program < len(self.programs), "a decision is of no program")
            require(bool(x.when), "a decision has no codes")
            require(0 <= x.width < MAX_WIDTHS, f"there is no width {x.width}")
            sizes = {len(code) for code in x.when}
            require(len(sizes) == 1, "the codes of a decision differ in their blocks")
            for code in x.when:
                require(all(0 <= c < len(WAITING) for c in code), f"{code} is no code")
                require(
                    0 <= x.run < len(code) and code[x.run] > 0,
                    f"it runs block {x.run}, where nobody waits, when {code}",
                )
                require((x.program, code) not in seen, f"{code} is in two decisions")
                seen.add((x.program, code))

    @functools.cached_property
    def table(self) -> np.ndarray:
        """int32[TABLE_SIZE], what `look_up` reads. Of too many entries the first are in it."""
        entries: dict[int, int] = {}
        for x in self.decisions:
            for code in x.when[: MAX_ENTRIES - len(entries)]:
                (number,) = _number(np.array(code, np.int32), self.programs[x.program]).tolist()
                entries.setdefault(number, x.run * MAX_WIDTHS + x.width)
        tries = np.random.default_rng(0).integers(1, 1 << 31, MAX_TRIES).astype(np.uint32) * 2 + 1
        tables = (_filled(entries, multiplier) for multiplier in tries)
        best = np.zeros(0, np.int32), len(entries) + 1
        for table, left_out in tables:
            if left_out < best[1]:
                best = table, left_out
            if not left_out:
                break
        return best[0]

    def __call__(self, frontier: LaneFrontier) -> Array:
        return look_up(frontier.xp.asarray(self.table), frontier)

    def __len__(self) -> int:
        return sum(len(x.when) for x in self.decisions)

    # --- for people ---

    def __str__(self) -> str:
        lines = [
            f"LaneFSM of {len(self.programs)} programs, {len(self)} codes, otherwise least_loss"
        ]
        for number, program in enumerate(self.programs):
            lines.append(f"  blocks: {program}")
            for x in self.decisions:
                if x.program == number:
                    first, *others = map(_described, x.when)
                    runs = f"    run {x.run} in width {x.width} "
                    lines.append(f"{runs}when {first}")
                    lines += [f"{'':{len(runs)}}or {text}" for text in others]
        return "\n".join(lines)

    # --- files ---

    def to_json(self) -> str:
        """The machine as text: see `save`.

        Returns:
          The text.
        """
        decisions = [
            {**vars(x), "when": ["".join(map(str, code)) for code in x.when]}
            for x in self.decisions
        ]
        content = {"format": LANE_FORMAT, "programs": self.programs, "decisions": decisions}
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, source: str = "the text") -> "LaneFSM":
        """Reads what `to_json` wrote; raises `ValueError` on anything else.

        Args:
          text: what `to_json` wrote.
          source: named in errors.

        Returns:
          The machine.

        Raises:
          TypeError: it is no text.
          ValueError: it is not a policy for lanes, or one of another version.
        """
        checks.of_type("LaneFSM.from_json", text, str, "a text", "`LaneFSM.load` reads a file.")
        with reading("LaneFSM", source):
            content = content_of(text, LANE_FORMAT)
            decisions = tuple(
                LaneDecision(
                    checks.whole("LaneFSM.load", "program", x["program"]),
                    checks.whole("LaneFSM.load", "run", x["run"]),
                    checks.whole("LaneFSM.load", "width", x["width"]),
                    tuple(tuple(map(int, code)) for code in x["when"]),
                )
                for x in content["decisions"]
            )
            return LaneFSM(tuple(content["programs"]), decisions)

    def save(self, path: str | Path) -> None:
        """Writes the machine as JSON, whole or not at all.

        Args:
          path: the file.
        """
        write_text("LaneFSM.save", path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> "LaneFSM":
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          The machine.

        Raises:
          FileNotFoundError: there is no such file.
          TypeError: it is no name of a file.
          ValueError: it is not a policy for lanes, or one of another version.
        """
        return LaneFSM.from_json(*read_text("LaneFSM.load", path))


def _described(code: Sequence[int]) -> str:
    """Returns a code in words, such as `0 few, 2 full`."""
    return ", ".join(f"{block} {WAITING[c]}" for block, c in enumerate(code) if c)


def _filled(entries: Mapping[int, int], multiplier: Any) -> tuple[np.ndarray, int]:
    """Returns a table of entries, choice by number of the code, and how many had no place."""
    table = np.full(TABLE_SIZE, -1, np.int32)
    table[0] = np.array([multiplier], np.uint32).astype(np.int32)[0]
    numbers, choices = table[1 : 1 + NUM_ROWS], table[1 + NUM_ROWS :]
    numbers[:] = 0
    left_out = 0
    for number, choice in entries.items():
        mixed_number = np.array([number], np.uint32)
        (first,) = slot_of(mixed_number * multiplier, NUM_ROWS).astype(np.int32)
        rows = (first + np.arange(REACH)) % NUM_ROWS
        free = rows[choices[rows] < 0]
        if not len(free):
            left_out += 1
            continue
        numbers[free[0]] = mixed_number.astype(np.int32)[0]
        choices[free[0]] = choice
    return table, left_out
