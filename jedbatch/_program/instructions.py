"""The instructions of a program: chunks in the order in which they run, as rows of a table.

A chunk is an opcode (a body and a width) and its first lane. How chunks become instructions
depends on how a target finds the next one (see `_kernel.target`):

    loops     opcode, first lane, stop      chunks of one opcode that follow one another in its
              3       64          384       lanes are one instruction, which runs in a loop
    switch    branch, trips, first lanes    a branch runs one opcode or several in a row, a
              7       2      64 128 0 192   *superinstruction*, once or in a loop

On a GPU, finding the next instruction takes about as long as half a chunk, and every trip of a loop
half of that. But to launch a CUDA graph takes the longer the larger it is, whatever of it runs; so
what is compiled must pay. Candidates are loops over one opcode, a few chunks in a trip, and
sequences found as byte pair encoding finds words: the pair of neighbours that occurs most becomes
one, time and again. Of these are taken those that shorten the minibatch that a program is made for.
What other minibatches run is covered by the same branches as far as it contains them, and by single
opcodes elsewhere.

Sources: Ertl & Gregg, The structure and performance of efficient interpreters, 2003, for
superinstructions; Gage 1994 for byte pair encoding.
"""

import collections
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

# Microseconds to find the next instruction, for a trip of a loop, and to launch a CUDA
# graph with one more chunk in it, run or not; chosen by runs on an H100.
SWITCH, TRIP, LAUNCH = 15.0, 12.0, 8.0
UNROLLED_CHUNKS = (1, 4, 8)  # chunks in a trip of a loop over one opcode
HEAD_COLUMNS = 2  # columns before the first lanes
LOOP_COLUMNS = 3  # of a program with loops: opcode, first lane, stop

Opcodes = tuple[int, ...]


class Branch(NamedTuple):
    """A branch of a program with a switch.

    Attributes:
      opcodes: of its chunks, in order.
      repeated: whether it is a loop, over chunks that follow one another in their lanes.
    """

    opcodes: Opcodes
    repeated: bool = False


@dataclass(frozen=True, eq=False)
class InstructionSet:
    """The meaning of the rows of an instruction table.

    Attributes:
      control: "loops" or "switch" (see `_kernel.target`).
      branches: of a program with a switch; every opcode is one by itself.
      kind_of: int64[opcodes], whose lanes the chunks of an opcode run.
      width_of: int64[opcodes], lanes of a chunk.
      reverse: whether lanes descend.
    """

    control: str
    branches: tuple[Branch, ...]
    kind_of: np.ndarray
    width_of: np.ndarray
    reverse: bool = False

    @property
    def columns(self) -> int:
        """Columns of the table."""
        if self.control == "loops":
            return LOOP_COLUMNS
        return HEAD_COLUMNS + max((len(branch.opcodes) for branch in self.branches), default=0)

    def steps(self, opcodes: Opcodes) -> tuple[int, ...]:
        """For each chunk of a sequence, the lanes from it to the same one of its repetition."""
        kinds, widths = self.kind_of[list(opcodes)], self.width_of[list(opcodes)]
        sign = -1 if self.reverse else 1
        return tuple(sign * int(widths[kinds == kind].sum()) for kind in kinds)

    def encode(self, runs: np.ndarray) -> np.ndarray:
        """int64[instructions, columns] that execute some runs (see `chunks_of`)."""
        if self.control == "loops":
            opcode, lane, trips = runs.T
            width = self.width_of[opcode]
            stop = lane + trips * width
            ends = (stop - width, lane - width) if self.reverse else (lane, stop)
            return np.stack([opcode, *ends], axis=1)
        opcodes, lanes = chunks_of(runs, self.width_of, reverse=self.reverse)
        return self._encode(opcodes, lanes)

    def _encode(self, opcodes: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        once = {branch.opcodes: b for b, branch in enumerate(self.branches) if not branch.repeated}
        again = {branch.opcodes: b for b, branch in enumerate(self.branches) if branch.repeated}
        number = again | once
        steps = {opcodes: self.steps(opcodes) for opcodes in again}
        lengths = sorted(set(map(len, number)), reverse=True)
        sequence, places = tuple(opcodes.tolist()), tuple(lanes.tolist())
        columns = self.columns
        rows: list[list[int]] = []
        expected: Any = None  # what would repeat the last instruction
        i = 0
        while i < len(sequence):
            word = next(w for n in lengths if (w := sequence[i : i + n]) in number)
            starts = places[i : i + len(word)]
            i += len(word)
            if expected == (word, starts):
                rows[-1][:HEAD_COLUMNS] = again[word], rows[-1][1] + 1
            else:
                rows.append([number[word], 1, *starts, *[0] * (columns - HEAD_COLUMNS - len(word))])
            if word in again:
                expected = word, tuple(map(operator.add, starts, steps[word]))
            else:
                expected = None
        return np.array(rows, np.int64).reshape(len(rows), columns)

    def learn(self, runs: np.ndarray, longest: int) -> tuple[Branch, ...]:
        """Superinstructions and loops worth a branch of their own, of minibatches like this one.

        Args:
          runs: of a typical minibatch (see `chunks_of`).
          longest: opcodes in a superinstruction at most.
        """
        if self.control == "loops":
            return ()
        chunks = chunks_of(runs, self.width_of, reverse=self.reverse)
        learned, cost = self, self._cost(*chunks)
        often = collections.Counter(chunks[0].tolist())
        for opcode in sorted(often, key=lambda x: (-often[x], x)):
            for count in UNROLLED_CHUNKS:
                if count <= longest:
                    learned, cost = learned._better(Branch((opcode,) * count, True), chunks, cost)
        rows = learned._encode(*chunks)
        alone: list[Opcodes | None] = [
            None if learned.branches[b].repeated else learned.branches[b].opcodes
            for b in rows[:, 0].tolist()
        ]
        for word in sorted(find_superinstructions(alone, longest), key=lambda w: (-len(w), w)):
            for repeated in (False, True):
                learned, cost = learned._better(Branch(word, repeated), chunks, cost)
        return learned.branches[len(self.branches) :]

    def _better(self, branch: Branch, chunks: Any, cost: float) -> tuple["InstructionSet", float]:
        """These instructions with a branch more, if that costs less, and what they cost."""
        extended = replace(self, branches=(*self.branches, branch))
        found = extended._cost(*chunks)
        return (extended, found) if found < cost else (self, cost)

    def _cost(self, opcodes: np.ndarray, lanes: np.ndarray) -> float:
        """Microseconds on top of what the chunks themselves take."""
        rows = self._encode(opcodes, lanes)
        repeated = np.array([branch.repeated for branch in self.branches], bool)
        trips = rows[:, 1][repeated[rows[:, 0]]].sum()
        compiled = sum(len(branch.opcodes) for branch in self.branches)
        return SWITCH * len(rows) + TRIP * float(trips) + LAUNCH * compiled


def chunks_of(
    runs: np.ndarray, width_of: np.ndarray, *, reverse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(opcode, first lane) int64[C] of every chunk, in order.

    Args:
      runs: int64[S, 3], the opcode, first lane and number of chunks of each run.
      width_of: int64[opcodes], lanes of a chunk of each.
      reverse: whether the last chunk of a run comes first.
    """
    opcode, lane, trips = runs.T
    ends = trips.cumsum()
    step = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - trips, trips)
    if reverse:
        step = np.repeat(trips, trips) - 1 - step
    opcode = np.repeat(opcode, trips)
    return opcode, np.repeat(lane, trips) + width_of[opcode] * step


def find_superinstructions(words: list[Opcodes | None], longest: int) -> tuple[Opcodes, ...]:
    """Sequences of opcodes that occur often, parts of others among them.

    Args:
      words: what a typical minibatch runs; None for what cannot be part of a sequence.
      longest: opcodes in one at most.
    """
    candidates: dict[Opcodes, None] = {}
    while True:
        pairs: collections.Counter[Opcodes] = collections.Counter()
        for left, right in itertools.pairwise(words):  # none is followed by itself often
            if left and right and left != right and len(left + right) <= longest:
                pairs[left + right] += 1
        pair, count = max(pairs.items(), key=lambda item: (item[1], item[0]), default=((), 0))
        if count < 2:
            break
        candidates[pair] = None
        words = _joined(words, pair)
    return tuple(candidates)


def _joined(words: Sequence[Opcodes | None], pair: Opcodes) -> list[Opcodes | None]:
    """The words with neighbours that make up a pair put together."""
    joined: list[Opcodes | None] = []
    for word in words:
        if joined and joined[-1] and word and joined[-1] != pair and joined[-1] + word == pair:
            joined[-1] = pair
        else:
            joined.append(word)
    return joined
