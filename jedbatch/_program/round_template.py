"""`RoundTemplate`: a round met before, as a table to be shifted.

Rounds of a function that decides on values are alike: in a loop each runs the same nodes as the one
before, on other values. All that differs is where things are. The lanes of a type follow those of
earlier rounds, new inputs come behind older ones, and what is read of earlier rounds is in some
other row. So a template is made of a round that was met twice, with everything that does not depend
on its place, and is bound to a program: a table in which lanes count from 0, and for each operand
where its row is to be written and where that row is found. To run a round, the first lanes are
added, and rows are looked up.

A template is for rounds that are recorded alike: the same calls, on values and inputs that are
equally far behind, by as many instances in the same order (see `_control_flow.workspace`, which
keeps templates by all of that). It does not know which instances, nor which values of earlier
rounds are read: their rows are given.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.storage import Kind
from jedbatch._layout.bucketing import NUM_WIDTHS, in_blocks
from jedbatch._program.placement import Placement
from jedbatch._program.signature import Signature

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64

NOT_RUN = -(1 << 40)  # in place of the row or lane of what does not run; far below what is added


class TemplateInputs(NamedTuple):
    """Inputs of a round that are read alike.

    Attributes:
      type: of their values.
      kind: their arena.
      places: int64[_], where they are in `RoundTemplate.inputs`.
      numbers: which they are, counted from the first one recorded.
      is_brought: whether they are numbers and arrays that functions bring; others are parts of the
        arrays of instances.
    """

    type: ValueType
    kind: Kind
    places: np.ndarray
    numbers: list[int]
    is_brought: bool


@dataclass(frozen=True, eq=False)
class RoundTemplate:
    """A round that was met before.

    Letters: `N` nodes that run; `V` values recorded, of those that run and others; `E` operands of
    the nodes that run; `J` inputs recorded that they read; `Q` operands that are older than the
    round.

    Attributes:
      placed: its nodes in batches, and their lanes, counted from 0.
      nodes: those that run, counted from the first one recorded.
      value_kernel, value_lane, value_slot: the place in `placed.kernels`, lane and number of each
        value as a result; the lane is `NOT_RUN` if its node does not run.
      source: where the row of each operand is: among those of values, inputs and older operands,
        one after the other.
      old_reference: which of the references recorded each older operand is.
      inputs: the inputs read, counted from the first one recorded, ascending.
      num_inputs: how many were recorded.
      groups: the inputs read, by value type.
      wanted: values whose rows are returned, by arena.
      pending: how many nodes of each type were recorded that do not run.
    """

    placed: Placement
    nodes: Int64[np.ndarray, " N"]
    value_kernel: Int64[np.ndarray, " V"]
    value_lane: Int64[np.ndarray, " V"]
    value_slot: Int64[np.ndarray, " V"]
    source: Int64[np.ndarray, " E"]
    old_reference: Int64[np.ndarray, " Q"]
    inputs: Int64[np.ndarray, " J"]
    num_inputs: int
    groups: tuple[TemplateInputs, ...]
    wanted: Mapping[Kind, Int64[np.ndarray, " _"]]
    pending: Mapping[int, int]
    _bound: tuple[Signature, BoundTemplate | None] | None = None

    @functools.cached_property
    def cares_for_values(self) -> bool:
        """Whether it must not run on values that no instance has (see `cares_for_padding`)."""
        return any(kernel.cares_for_values for kernel in self.placed.kernels)

    @functools.cached_property
    def lanes(self) -> tuple[int, ...]:
        """The lanes of each kernel that it uses."""
        return tuple(self.placed.layout.lanes[list(self.placed.type_ids)].tolist())

    def bound_to(self, signature: Signature) -> BoundTemplate | None:
        """Returns the same as `bind`; that of the latest program is kept."""
        if self._bound is None or self._bound[0] is not signature:
            object.__setattr__(self, "_bound", (signature, self.bind(signature)))
        assert self._bound is not None
        return self._bound[1]

    def bind(self, signature: Signature) -> BoundTemplate | None:
        """Returns the round for a program; None if that lacks a type, widths or room to return."""
        placed, form = self.placed, signature.form
        if any(signature.readings) or not all(k in signature.places for k in placed.kernels):
            return None
        place = [signature.places[kernel] for kernel in placed.kernels]
        if any(n > signature.widest[k] for k, n in zip(place, placed.widest, strict=True)):
            return None
        returned = signature.returned
        if any(returned.get(kind, 0) < len(values) for kind, values in self.wanted.items()):
            return None
        if any(group.kind not in signature.arena_ids for group in self.groups):
            return None
        runs = placed.runs.copy()
        kernel, width = np.divmod(runs[:, 0], NUM_WIDTHS)
        runs[:, 0] = np.array(place, np.int64)[kernel] * NUM_WIDTHS + width
        if len(signature.instructions.encode(runs)) > signature.num_instructions:
            return None
        at, at_kernel, read = self._operand_places(signature, place)
        slots = max((len(k.results) for k in placed.kernels), default=0)
        base = np.zeros((len(place) + 1, slots + 1), np.int64)
        for k, own in enumerate(place):
            base[k, : len(signature.bases[own])] = signature.bases[own]
        outputs = []
        for kind, values in self.wanted.items():
            first = form.offset(("outputs", signature.arena_ids[kind]))
            outputs.append((kind, first, values))
        return BoundTemplate(
            self,
            signature,
            runs,
            kernel,
            tuple(signature.lanes[k] for k in place),
            base[self.value_kernel, self.value_slot] + self.value_lane,
            at,
            at_kernel,
            read,
            tuple(outputs),
        )

    def _operand_places(self, signature: Signature, place: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Returns where each lane's operands go in a table, of which kernel, and their sources."""
        graph, layout, form = self.placed.graph, self.placed.layout, signature.form
        at, at_kernel, read = [], [], []
        for k, (own, t) in enumerate(zip(place, self.placed.type_ids, strict=True)):
            nodes = layout.lane_node[layout.lane_ptr[t] : layout.lane_ptr[t + 1]]
            for position in range(len(self.placed.kernels[k].operands)):
                first = form.offset(("operands", own), position)
                at.append(first + np.arange(len(nodes)))
                at_kernel.append(np.full(len(nodes), k))
                read.append(self.source[graph.operand_ptr[nodes] + position])
        nothing = [np.zeros(0, np.int64)]
        return tuple(map(np.concatenate, (nothing + at, nothing + at_kernel, nothing + read)))


@dataclass(frozen=True, eq=False)
class BoundTemplate:
    """A round that was met before, for a program.

    Attributes:
      template: the round.
      signature: the program.
      runs, run_kernel: its runs, and of which kernel each is.
      lanes: how many lanes the program has of each kernel.
      value_row: the row of each value, if lanes begin at 0; far below 0 if it does not run.
      at, at_kernel, read: for each operand of each lane the place in a table if lanes begin at 0,
        the kernel, and the place in `RoundTemplate.source`'s rows.
      outputs: for each arena that returns rows, its kind, where in the table, and values.
    """

    template: RoundTemplate
    signature: Signature
    runs: Int64[np.ndarray, "_ 3"]
    run_kernel: Int64[np.ndarray, " _"]
    lanes: tuple[int, ...]
    value_row: Int64[np.ndarray, " V"]
    at: Int64[np.ndarray, " _"]
    at_kernel: Int64[np.ndarray, " _"]
    read: Int64[np.ndarray, " _"]
    outputs: tuple[tuple[Kind, int, np.ndarray], ...]

    def has_lanes(self, first_lane: Sequence[int]) -> bool:
        """Returns whether there are as many lanes of each kernel behind some."""
        kernels = self.template.placed.kernels
        ends = map(operator.add, first_lane, self.template.lanes)
        return all(
            in_blocks(end, kernel.blocks) <= lanes
            for end, kernel, lanes in zip(ends, kernels, self.lanes, strict=True)
        )

    def value_rows(self, first_lane: Int64[np.ndarray, "S K"]) -> Int64[np.ndarray, "S V"]:
        """Returns the row of each value, for each of `S` rounds; below 0 if it does not run."""
        return self.value_row + first_lane[:, self.template.value_kernel]

    def table(
        self, first_lane: Int64[np.ndarray, "S K"], rows: Int64[np.ndarray, "S _"]
    ) -> Int32[np.ndarray, " Z"]:
        """Returns the table of a round, or of several like it, one after the other.

        Args:
          first_lane: of each kernel, for each of `S` rounds.
          rows: of its values, of the inputs it reads, and of the older operands.
        """
        signature, num_rounds = self.signature, len(first_lane)
        runs = np.repeat(self.runs[None], num_rounds, axis=0)
        runs[:, :, 1] += first_lane[:, self.run_kernel]
        instructions = signature.instructions.encode(runs.reshape(-1, 3))
        table = np.zeros(signature.form.size, np.int32)
        count, first = self.instructions_at
        table[count] = len(instructions)
        table[first : first + instructions.size] = instructions.ravel()
        table[self.at + first_lane[:, self.at_kernel]] = rows[:, self.read]
        for _, first, values in self.outputs:
            table[first : first + num_rounds * len(values)] = rows[:, values].ravel()
        return table

    @functools.cached_property
    def num_instructions(self) -> int:
        """How many instructions the round has."""
        return len(self.signature.instructions.encode(self.runs))

    @functools.cached_property
    def instructions_at(self) -> tuple[int, int]:
        """Where the number of instructions is in a table, and where the instructions begin."""
        form = self.signature.form
        return form.offset(("num_instructions",)), form.offset(("instructions",))


def find_sources(
    operand: Int64[np.ndarray, " E"],
    first_value: int,
    first_input: int,
    num_values: int,
    inputs: Int64[np.ndarray, " J"],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the rows of operands are (see `RoundTemplate.source`), and which are older.

    Args:
      operand: values, and inputs as `-1 - i`.
      first_value: of the round.
      first_input: of the round.
      num_values: of the round.
      inputs: those of the round that it reads, counted from its first one, ascending.
    """
    source = operand - first_value
    is_new_input = operand < -first_input
    number = -1 - operand[is_new_input] - first_input
    source[is_new_input] = num_values + np.searchsorted(inputs, number)
    old = np.flatnonzero(~is_new_input & (operand < first_value))
    source[old] = num_values + len(inputs) + np.arange(len(old))
    return source, old
