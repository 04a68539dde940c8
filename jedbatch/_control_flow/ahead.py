"""Running ahead: steps of a loop that are computed before Python asks for them.

Where Python decides on values, a round is a call of a program, after which every instance records
one more step. In a loop each step is the same as the one before (see `_control_flow.steps`), so
what comes next can be foreseen: which values it reads is known, and where they will be. A round
that has repeated itself runs a number of further steps in the same call:

    round 3     step 3 of instances 0 to 3, which wait for its values
                steps 4, 5 of all of them, foreseen
    instances   0, 1, 3 record step 4, as foreseen: its values are there; then step 5, and step 6
                2 stops after step 3: its steps 4 and 5 were for nothing
    round 4     step 6 of instances 0, 1, 3, and more steps ahead

An instance still runs its own Python for every step, since it decides. What it records is compared
with what was foreseen, numbers that it brings included, and as soon as it does anything else, it
waits for a round as ever. So values are those of the plain loop: all that may be wrong with what
is foreseen is that it was computed for nothing. Steps behind the last one of an instance run on
values that the plain loop never meets, so what may not end there, calls Python, or is searched for
NaNs does not run ahead.

Numbers that a step brings are foreseen in one of three ways: they stay, they are what Python read
at the end of the step before (the word that a decoder wrote), or they go up or down by the same.

How many steps are run ahead: see `_control_flow.depths`.

Source: speculation with a check before anything depends on it, as processors do with branches.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jedbatch._control_flow.depths import MAX_STEPS
from jedbatch._control_flow.recorded import Recorded
from jedbatch._control_flow.recorded_graph import RecordedGraph
from jedbatch._control_flow.scripts import (
    COUNTS_ON,
    NUMBERS,
    STAYS,
    WAS_READ,
    ForeseenNumber,
    Script,
    same_number,
)
from jedbatch._control_flow.steps import (
    BEFORE,
    COUNTS,
    INPUTS,
    LAST,
    NODES,
    READ,
    REFERENCES,
    VALUES,
)
from jedbatch._graph.paths import distinct, ranges
from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._jaxpr.storage import Kind, row_bytes
from jedbatch._program.round_template import (
    NOT_RUN,
    BoundTemplate,
    RoundTemplate,
    TemplateInputs,
)
from jedbatch._record.run.trace import host_rows

if TYPE_CHECKING:
    from jaxtyping import Int64

MAX_INSTRUCTIONS = 64  # of a round that is worth running ahead: others take long themselves
MAX_INSTRUCTIONS_AHEAD = 1 << 11  # of all steps in one call, with those of the round
MAX_RETURNED_BYTES = 1 << 16  # of values that are read, for all steps in one call


Ways = Mapping[int, tuple[int, int]]  # (how, by how much it goes up) of the inputs of a step


class Ahead(NamedTuple):
    """The wish to run ahead.

    Attributes:
      steps: int64[F, 17], the steps of the fibres that wait, in order (see `_control_flow.steps`).
      same: whether each is like the one before; otherwise steps are only foreseen where, in an
        earlier call, a round like this one was followed by others like it.
      known: returns the value of that number; None if it was not read.
      most: returns of a template how many steps ahead.
    """

    steps: np.ndarray
    same: bool
    known: Callable[[int], np.ndarray | None]
    most: Callable[[RoundTemplate], int]


@dataclass(frozen=True, eq=False)
class Foreseen:
    """The steps after a round, if all instances go on as they did.

    Letters: `F` fibres, `Q` older operands and `J` inputs read, as in `RoundTemplate`.

    Attributes:
      steps: int64[F, 17], the steps of the fibres that wait (see `_control_flow.steps`).
      places: int64[F, 4], where their nodes, references, inputs and values are in the round.
      chained: int64[Q], the value of the step before that becomes the operand; -1 if it stays.
      read: int64[J], the value of the step before that becomes the input; -1 if it stays.
      counting: of the inputs that count on the number of this round, and by how much.
      numbers: of each fibre.
      ways: how the inputs of a step are foreseen, by place, and by how much they go up in a step;
        None if fibres differ in that.
      same: whether the steps are like the ones before.
    """

    steps: np.ndarray
    places: np.ndarray
    chained: np.ndarray
    read: np.ndarray
    counting: Mapping[int, tuple[int, int]]
    numbers: list[list[ForeseenNumber]]
    ways: Ways | None
    same: bool

    @staticmethod
    def of(
        template: RoundTemplate,
        new: Recorded,
        ahead: Ahead,
        brought: Sequence[Any],
        graph: RecordedGraph,
        ways: Ways | None = None,
    ) -> "Foreseen | None":
        """Returns what comes after a round; None if nothing can be foreseen.

        Args:
          template: of the round.
          new: what was recorded.
          ahead: what is wanted.
          brought: the inputs of all instances.
          graph: all that was recorded.
          ways: those of an earlier call; None if steps are like those before, which tells them.
        """
        steps = ahead.steps
        counts = steps[:, COUNTS]
        if len(template.wanted) != 1 or template.cares_for_values or finds_faults():
            return None
        places = new.places_of_turns(steps[:, LAST])
        ((kind, wanted),) = template.wanted.items()
        within = places, places + counts
        if not is_within(*within, NODES, template.nodes):
            return None
        if not is_within(*within, INPUTS, template.inputs):
            return None
        owner = np.searchsorted(places[:, REFERENCES], template.old_reference, "right") - 1
        own_reference = new.references[template.old_reference]
        first = steps[owner, BEFORE.start + VALUES]
        is_chained = (own_reference >= first) & (own_reference < first + counts[owner, VALUES])
        place = places[owner, VALUES] + own_reference - first
        chained = np.where(is_chained, place, -1)

        owner = np.searchsorted(places[:, INPUTS], template.inputs, "right") - 1
        place = template.inputs - places[owner, INPUTS]
        now = (steps[owner, LAST.start + INPUTS] + place).tolist()
        kind_of = {g: graph.kind_of_group(g) for g in distinct(new.groups).tolist()}
        kinds = [kind_of[g] for g in new.groups[template.inputs].tolist()]
        if ways is not None:
            of_each = [ways.get(k) for k in place.tolist()]
        else:
            of_each = find_ways(template, new, ahead, brought, graph, owner, place)
        read = np.full(len(place), -1)
        counting: dict[int, tuple[int, int]] = {}
        numbers: list[list[ForeseenNumber]] = [[] for _ in steps]
        parts = enumerate(zip(owner.tolist(), place.tolist(), now, of_each, kinds, strict=True))
        for j, (f, k, number, way, own_kind) in parts:
            if way is None:
                return None
            x, (how, by) = brought[number], way
            if how == WAS_READ:
                if own_kind != kind or type(x) not in NUMBERS:  # an earlier call read another value
                    return None
                read[j] = wanted[f]
            elif how == COUNTS_ON:
                if type(x) is not int or abs(x) + MAX_STEPS * abs(by) >= 1 << 31:
                    return None
                counting[j] = x, by
            numbers[f].append(ForeseenNumber(k, how, x, by))
        if ways is None:
            pairs = set(zip(place.tolist(), of_each, strict=True))
            ways = {k: way for k, way in pairs if way is not None}
            ways = ways if len(ways) == len(pairs) else None
        return Foreseen(steps, places, chained, read, counting, numbers, ways, ahead.same)

    def steps_with_room(self, template: RoundTemplate, free: Mapping[Kind, int], most: int) -> int:
        """Returns how many steps there is room for the numbers of, given free rows by arena."""
        for kind in {group.kind for group in template.groups}:
            groups = [group for group in template.groups if group.kind == kind]
            per_step = sum(j in self.counting for group in groups for j in group.places.tolist())
            most = min(most, free[kind] // per_step if per_step else most)
        return most

    def rows(
        self, value_rows: np.ndarray, input_row: np.ndarray, old_row: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of inputs, [S, J], and of older operands, [S, Q], of all steps.

        Args:
          value_rows: int64[S, V].
          input_row: int64[J], of the first step.
          old_row: int64[Q], of the first step.
        """
        found = []
        for row, source in ((input_row, self.read), (old_row, self.chained)):
            rows = np.repeat(row[None], len(value_rows), axis=0)
            rows[1:, source >= 0] = value_rows[:-1, source[source >= 0]]
            found.append(rows)
        return found[0], found[1]

    def counted(
        self, template: RoundTemplate, count: int
    ) -> Iterator[tuple[TemplateInputs, list[int], np.ndarray]]:
        """Yields groups of inputs, which of them count on, and the numbers of so many steps."""
        for group in template.groups if self.counting else ():
            places = [j for j in group.places.tolist() if j in self.counting]
            pairs = [self.counting[j] for j in places]
            numbers = [x + s * by for s in range(1, 1 + count) for x, by in pairs]
            if numbers:
                yield group, places, host_rows(numbers, group.type)


def foresee(
    template: RoundTemplate,
    new: Recorded,
    ahead: Ahead,
    brought: Sequence[Any],
    graph: RecordedGraph,
    memory: MutableMapping[tuple[int, ...], Ways | None],
) -> Foreseen | None:
    """Returns what comes after a round, as the steps before or an earlier call tell.

    Args:
      template: of the round.
      new: what was recorded.
      ahead: what is wanted.
      brought: the inputs of all instances.
      graph: all that was recorded.
      memory: ways in which inputs are foreseen, by the types of nodes in a step; None where
        something else came.
    """
    key = template.placed.type_ids
    ways = None if ahead.same else memory.get(key)
    if not ahead.same and ways is None:
        return None
    found = Foreseen.of(template, new, ahead, brought, graph, ways)
    if found is not None:
        memory.setdefault(key, found.ways)
    return found


def find_ways(
    template: RoundTemplate,
    new: Recorded,
    ahead: Ahead,
    brought: Sequence[Any],
    graph: RecordedGraph,
    owner: np.ndarray,
    place: np.ndarray,
) -> list[tuple[int, int] | None]:
    """Returns how each input is foreseen, as the step before tells; None of one that cannot be.

    Args:
      template: of the round.
      new: what was recorded.
      ahead: what is wanted.
      brought: the inputs of all instances.
      graph: all that was recorded.
      owner: int64[J], the fibre of each input.
      place: int64[J], where it is among the inputs of a step.
    """
    steps = ahead.steps
    ways: list[tuple[int, int] | None] = []
    (kind,) = template.wanted
    was_read = (steps[:, BEFORE.start + VALUES] + steps[:, READ]).tolist()
    values = [ahead.known(x) for x in was_read]
    groups = new.groups[template.inputs].tolist()
    kinds = {g: graph.kind_of_group(g) for g in set(groups)}
    now = (steps[owner, LAST.start + INPUTS] + place).tolist()
    before = (steps[owner, BEFORE.start + INPUTS] + place).tolist()
    for f, number_now, number_before, group in zip(owner, now, before, groups, strict=True):
        x, y, value = brought[number_now], brought[number_before], values[f]
        is_kind = value is not None and kinds[group] == kind and type(x) in NUMBERS
        if is_kind and not value.shape and same_number(x, type(x)(value)):
            ways.append((WAS_READ, 0))
        elif same_number(x, y):
            ways.append((STAYS, 0))
        elif type(x) is int and type(y) is int:
            ways.append((COUNTS_ON, x - y))
        else:
            ways.append(None)
    return ways


def is_within(begin: np.ndarray, end: np.ndarray, size: int, places: np.ndarray) -> bool:
    """Returns whether all that a round runs (or reads) is part of the steps that end with it.

    What an instance recorded before its step, such as parts of it that took turns, is not: it does
    not come again.

    Args:
      begin: int64[F, 4], where nodes, references, inputs and values of steps begin in the round.
      end: int64[F, 4], where they end.
      size: of the four.
      places: of nodes (or inputs) in the round.
    """
    owner = np.searchsorted(begin[:, size], places, "right") - 1
    return bool((owner >= 0).all() and (places < end[owner, size]).all())


@dataclass(frozen=True, eq=False)
class RanAhead:
    """Steps that ran ahead, as far as they have rows.

    Letters: `S` steps with that of the round itself, `V` values and `I` inputs of a step.

    Attributes:
      foreseen: what they are.
      template: of a step.
      first_lane: int64[S, K], of each kernel.
      value_rows: int64[S, V].
      input_rows: int64[S, I], -1 of what is not read.
      rows: those that are read, of all fibres in each step.
    """

    foreseen: Foreseen
    template: RoundTemplate
    first_lane: np.ndarray
    value_rows: np.ndarray
    input_rows: np.ndarray
    rows: np.ndarray

    @property
    def ahead(self) -> int:
        """How many steps."""
        return len(self.first_lane) - 1

    def scripts(self, bound: int | None, inputs: Sequence[Any]) -> list[Script]:
        """Returns the script of every fibre, given the bound and all inputs (see `Script`)."""
        numbers = self.foreseen.numbers
        rows = self.rows[: len(numbers) * len(self.first_lane)]
        of_each = [rows[i :: len(numbers)] for i in range(len(numbers))]
        pairs = zip(of_each, numbers, strict=True)
        return [Script(values, of_fiber, bound, inputs) for values, of_fiber in pairs]

    def note(
        self, graph: RecordedGraph, begins: "Int64[np.ndarray, 'F 4']", done: np.ndarray
    ) -> None:
        """Notes in a graph which steps were recorded, and where.

        Args:
          graph: all that was recorded.
          begins: of each fibre the sizes of the recording when it went on.
          done: int64[F], how many steps it took as foreseen.
        """
        counts, template = self.foreseen.steps[:, COUNTS], self.template
        fiber = np.arange(len(done)).repeat(done)
        step = ranges(np.zeros_like(done), done)
        layout, type_ids = template.placed.layout, template.placed.type_ids
        kernel = np.zeros(len(layout.lanes), np.int64)
        kernel[list(type_ids)] = np.arange(len(type_ids))
        own_places = self.foreseen.places
        lane = np.full(int((own_places[-1] + counts[-1])[NODES]), NOT_RUN)
        kernel_of = np.zeros(len(lane), np.int64)
        lane[template.nodes] = layout.lane
        kernel_of[template.nodes] = kernel[layout.graph.node_type]
        lanes = np.maximum(lane + self.first_lane[:, kernel_of], -1)

        def recorded(size: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            count = counts[fiber, size]
            numbers = ranges(begins[fiber, size] + step * count, count)
            places = ranges(own_places[fiber, size], count)
            return numbers, rows[1 + step.repeat(count), places]

        graph.note_ahead(
            recorded(NODES, lanes),
            recorded(VALUES, self.value_rows),
            recorded(INPUTS, self.input_rows),
        )


def room_ahead(outputs: Mapping[Kind, int], num_instructions: int) -> tuple[dict[Kind, int], int]:
    """Returns the rows returned and the instructions of a program that can run a round ahead.

    Args:
      outputs: rows that the round itself returns.
      num_instructions: of the round itself.
    """
    if num_instructions > MAX_INSTRUCTIONS:
        return dict(outputs), num_instructions
    most = {kind: MAX_RETURNED_BYTES // max(1, row_bytes(kind)) for kind in outputs}
    larger = {
        kind: max(count, min(count * (1 + MAX_STEPS), most[kind]))
        for kind, count in outputs.items()
    }
    most_instructions = min(num_instructions * (1 + MAX_STEPS), MAX_INSTRUCTIONS_AHEAD)
    return larger, most_instructions if outputs else num_instructions


def steps_that_fit(
    bound: BoundTemplate, first_lane: Sequence[int], num_values: int, most: int
) -> int:
    """Returns how many steps a program can run ahead in one call.

    Args:
      bound: the round, for the program.
      first_lane: that is free, of each kernel.
      num_values: how many are read in each step, all of one arena.
      most: how many are wanted.
    """
    signature, lanes = bound.signature, bound.template.lanes
    (kind,) = bound.template.wanted
    most = min(most, signature.returned[kind] // num_values - 1)
    most = min(most, signature.num_instructions // max(1, bound.num_instructions) - 1)
    while most > 0:
        if bound.has_lanes([a + most * n for a, n in zip(first_lane, lanes, strict=True)]):
            break
        most -= 1
    return max(0, most)
