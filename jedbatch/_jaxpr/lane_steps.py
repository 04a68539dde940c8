"""Counts of what lanes do where values decide: the steps that run, and the lanes in them.

A step of a loop, a block of a branch or a step of the machine of program counters runs some lanes
at a time, some of which may be empty or done. While a program is made for counting, it tells the
host after each run how many steps there were, how many lanes they ran, and how many of these did
something that a lane needs. The last is the certified least: nobody can run fewer lanes.

Which form a loop or a branch takes is known while its program is made, and noted then.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import numpy as np

from jedbatch._support.types import Array

What = Literal["loop", "branch", "block"]


@dataclass(frozen=True)
class LaneCount:
    """Counts of the lanes that ran a loop in one kernel, a branch, or a block of loops.

    Attributes:
      cell: the node type that it is in.
      what: "loop", "branch" or "block".
      number: of the branch or block; 0 for loops.
      work: floating-point operations of a lane in a step, roughly.
      width: how many lanes a step runs.
      steps: how many steps ran.
      lanes: how many lanes ran in them, with those that are empty or done.
      needed: the least that any order would run: the steps that each lane takes, added up.
    """

    cell: str
    what: What
    number: int
    work: int
    width: int
    steps: int
    lanes: int
    needed: int

    def __str__(self) -> str:
        name = self.what if self.what == "loop" else f"{self.what} {self.number}"
        return (
            f"{name}, {self.width} at a time, work {self.work}: {self.steps} steps, "
            f"{self.lanes} lanes, {self.needed} needed"
        )


class LaneSteps(tuple[LaneCount, ...]):
    """The counts of a call; printed with a line for each."""

    @property
    def steps(self) -> int:
        """The number of steps that ran."""
        return sum(x.steps for x in self)

    @property
    def lanes(self) -> int:
        """The number of lanes that ran in them."""
        return sum(x.lanes for x in self)

    @property
    def needed(self) -> int:
        """The number of lanes that had to run: the steps that each lane takes, added up."""
        return sum(x.needed for x in self)

    def __str__(self) -> str:
        if not self:
            return "no loop or branch ran by lanes: there is none, or they ran in lock step"
        share = f", {self.lanes / self.needed:.2f} times as many" if self.needed else ""
        lines = [f"{self.steps} steps, {self.lanes} lanes, {self.needed} needed{share}"]
        for cell in dict.fromkeys(x.cell for x in self):
            lines += [f"  {cell}", *(f"    {x}" for x in self if x.cell == cell)]
        return "\n".join(lines)

    __repr__ = __str__


class LaneForms(dict[tuple[str, int], str]):
    """The forms that loops and branches of a program take: how they run, by (what, lanes)."""

    def __str__(self) -> str:
        sizes: dict[str, dict[str, list[str]]] = {}
        for (what, lanes), how in sorted(self.items()):
            sizes.setdefault(what, {}).setdefault(how, []).append(str(lanes))
        found = []
        for what, forms in sizes.items():
            parts = [f"{how} where {' or '.join(of)} run" for how, of in forms.items()]
            found.append(f"{what} {', '.join(parts)}")
        return "; ".join(found)

    __repr__ = __str__


@dataclass
class LaneCounter:
    """Counts while programs are made and run.

    Attributes:
      cell: whose program is being made.
      found: (steps, lanes, needed) by all else that a count has.
    """

    cell: str = ""
    found: dict[tuple[str, What, int, int, int], np.ndarray] = field(default_factory=dict)

    def add(self, keys: Sequence[tuple[str, What, int, int, int]], counts: Array) -> None:
        """Adds counts [len(keys), 3]."""
        for key, row in zip(keys, np.asarray(counts, np.int64), strict=True):
            self.found[key] = self.found.get(key, 0) + row

    def begin(self) -> None:
        """Forgets what was counted, once all that runs has ended."""
        jax.effects_barrier()
        self.found.clear()

    def result(self) -> LaneSteps:
        """Returns what was counted, without what did not run."""
        jax.effects_barrier()
        rows = sorted(self.found.items())
        return LaneSteps(LaneCount(*key, *row.tolist()) for key, row in rows if row[0])


_counter: contextvars.ContextVar[LaneCounter | None] = contextvars.ContextVar(
    "counter", default=None
)
_forms: contextvars.ContextVar[LaneForms | None] = contextvars.ContextVar("forms", default=None)


@contextlib.contextmanager
def counting() -> Iterator[LaneCounter]:
    """Makes programs that are traced meanwhile count."""
    counter = LaneCounter()
    token = _counter.set(counter)
    try:
        yield counter
    finally:
        _counter.reset(token)


def is_counting() -> bool:
    """Returns whether programs are to count."""
    return _counter.get() is not None


@contextlib.contextmanager
def program_of(
    cell: object, forms: LaneForms | None = None, own: LaneCounter | None = None
) -> Iterator[None]:
    """Says whose program is made.

    Args:
      cell: its node type.
      forms: where to note how its loops and branches run.
      own: counts its steps, unless something else counts.
    """
    counter = _counter.get() or own
    tokens = _counter.set(counter), _forms.set(forms)
    before = "" if counter is None else counter.cell
    if counter is not None:
        counter.cell = str(cell)
    try:
        yield
    finally:
        _counter.reset(tokens[0])
        _forms.reset(tokens[1])
        if counter is not None:
            counter.cell = before


def note_form(what: str, how: str, lanes: int) -> None:
    """Notes how loops or branches run in the program that is made, for so many lanes.

    Where several of them differ, all forms are kept.
    """
    forms = _forms.get()
    if forms is not None:
        before = forms.get((what, lanes), how)
        forms[what, lanes] = before if how in before.split(" and ") else f"{before} and {how}"


def tell(what: What, parts: Sequence[tuple[int, int, int]], counts: Array) -> None:
    """Has a program tell its counts, if it is to count.

    Args:
      what: was run.
      parts: (number, work, width) of each.
      counts: int[len(parts), 3], the steps, lanes and lanes needed of each.
    """
    counter = _counter.get()
    if counter is not None:
        keys = [(counter.cell, what, number, work, width) for number, work, width in parts]
        jax.debug.callback(functools.partial(counter.add, keys), counts)
