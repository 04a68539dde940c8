"""`Recorded`: what instances have recorded since the last round, told apart from anything else.

Rounds that are recorded alike run alike, whatever came before: the same calls by as many instances
in the same order, which read the same values of this round. Values and inputs are counted from the
first one of the round; those of earlier rounds count as one, since it makes no difference to a
round which of them it reads, once they are computed.

What was foreseen and has been computed (see `_control_flow.ahead`) is no part of a round. What is
left of each turn, its *tail*, comes behind that, and tails are put together as if nothing were
between them.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jedbatch._control_flow.steps import INPUTS, NODES, REFERENCES, VALUES
from jedbatch._graph.paths import int64_of, ranges
from jedbatch._record.run.recorder import Recorder

OLD = np.iinfo(np.int64).min  # in place of a reference to an earlier round


class Beginning(NamedTuple):
    """The sizes of a recording when a round began."""

    nodes: int
    references: int
    inputs: int
    values: int
    turns: int

    @staticmethod
    def of(recorder: Recorder, num_turns: int) -> "Beginning":
        """Returns the beginning of a round that comes now."""
        return Beginning(
            len(recorder.call_specs),
            len(recorder.references),
            len(recorder.input_group),
            recorder.num_values,
            num_turns,
        )


@dataclass(eq=False)
class Recorded:
    """The part of a recording that came since a round began.

    Attributes:
      first: how much was recorded before.
      recorder: what records.
      turns: of each turn its instance, and nodes and inputs in all at its end.
      tails: int64[T, 8], of each turn the sizes of the recording where its tail begins and ends
        (see `_control_flow.steps`); None if all that was recorded belongs to the round.
    """

    first: Beginning
    recorder: Recorder
    turns: list[int]
    tails: np.ndarray | None = None

    @functools.cached_property
    def calls(self) -> np.ndarray:
        """int64[N], the type of each node."""
        return self._of_tails(int64_of(self.recorder.call_specs, self.first.nodes), NODES)

    @functools.cached_property
    def references(self) -> np.ndarray:
        """int64[R], what they read, as in `Recorder.references`."""
        every = int64_of(self.recorder.references, self.first.references)
        return self._of_tails(every, REFERENCES)

    @functools.cached_property
    def groups(self) -> np.ndarray:
        """int64[I], the group of each input."""
        return self._of_tails(int64_of(self.recorder.input_group, self.first.inputs), INPUTS)

    def places_of_turns(self, begins: np.ndarray) -> np.ndarray:
        """int64[F, 4], where nodes, references, inputs and values of some turns are in the round.

        Args:
          begins: int64[F, 4], the sizes of the recording where they begin; each records a node.
        """
        if self.tails is None:
            return begins - np.array(self.first[:4])
        sizes = self.tails[:, 4:] - self.tails[:, :4]
        turn = np.searchsorted(self.tails[:, NODES], begins[:, NODES], "right") - 1
        return (sizes.cumsum(axis=0) - sizes)[turn]

    def nodes_at(self, places: np.ndarray) -> np.ndarray:
        """The numbers of nodes, given where they are in the round."""
        return self._numbers_at(places, self.first.nodes, NODES)

    def inputs_at(self, places: np.ndarray) -> np.ndarray:
        """The numbers of inputs, given where they are in the round."""
        return self._numbers_at(places, self.first.inputs, INPUTS)

    def values_at(self, places: np.ndarray) -> np.ndarray:
        """The numbers of values, given where they are in the round."""
        return self._numbers_at(places, self.first.values, VALUES)

    def owners_of_inputs(self, numbers: np.ndarray) -> np.ndarray:
        """The instances that inputs of the round belong to."""
        owner, _, end = int64_of(self.turns, self.first.turns).reshape(-1, 3).T
        return owner[np.searchsorted(end, numbers, "right")]

    @functools.cached_property
    def num_values(self) -> int:
        """How many values were recorded."""
        if self.tails is None:
            return self.recorder.num_values - self.first.values
        return len(self._numbers(VALUES))

    def node_places(self, numbers: np.ndarray) -> np.ndarray:
        """Where nodes are in the round; below 0 of others."""
        return self._places_of(numbers, NODES)

    def value_places(self, numbers: np.ndarray) -> np.ndarray:
        """Where values are in the round; below 0 of others."""
        return self._places_of(numbers, VALUES)

    def counted(self, references: np.ndarray) -> np.ndarray:
        """References as if nothing that was foreseen had been recorded; others are any older."""
        first = self.first
        if self.tails is None:
            return references
        place = self._shifted(references)
        counted = np.where(references < 0, place - first.inputs, place + first.values)
        return np.where(place == OLD, -1 if first.inputs else 0, counted)

    def key(self, values: np.ndarray) -> bytes | None:
        """Returns what a round that computes some values is known by, wherever it comes.

        None if a value was recorded in an earlier round.
        """
        first = self.first
        if not len(values) or values.min() < first.values:
            return None
        values = self.value_places(values)
        if values.min() < 0:
            return None
        turns = int64_of(self.turns, first.turns).reshape(-1, 3)
        owner, ends = turns[:, 0], turns[:, 1:] - (first.nodes, first.inputs)
        if self.tails is not None:
            sizes = self.tails[:, 4:] - self.tails[:, :4]
            ends = sizes[:, [NODES, INPUTS]].cumsum(axis=0)
        is_new = (np.diff(ends, axis=0, prepend=0) > 0).any(1)  # others record nothing
        owner, ends = owner[is_new], ends[is_new]
        ascend = (owner[1:] > owner[:-1]).all()  # unless parts of instances take turns
        rank = owner[:0] if ascend else np.unique(owner, return_inverse=True)[1]
        shifted = self._shifted(self.references)
        counts = [*map(len, (self.calls, shifted, self.groups, owner)), len(values)]
        parts = self.calls, shifted, self.groups, ends.ravel(), values, rank
        return np.concatenate([np.array(counts, np.int64), *parts]).tobytes()

    def _shifted(self, references: np.ndarray) -> np.ndarray:
        """Returns references counted from the first value and input of the round."""
        first = self.first
        older = (references >= -first.inputs) & (references < first.values)
        if self.tails is None:
            begin = np.where(references < 0, -first.inputs, first.values)
            return np.where(older, OLD, references - begin)
        shifted = np.full(len(references), OLD)
        is_value, is_input = references >= first.values, references < -first.inputs
        place = self._places(VALUES)[references[is_value] - first.values]
        shifted[is_value] = np.where(place < 0, OLD, place)
        place = self._places(INPUTS)[-1 - references[is_input] - first.inputs]
        shifted[is_input] = np.where(place < 0, OLD, -1 - place)
        return shifted

    def _of_tails(self, items: np.ndarray, size: int) -> np.ndarray:
        """Returns those of the items recorded since the round began that belong to it."""
        return items if self.tails is None else items[self._numbers(size) - self.first[size]]

    def _numbers(self, size: int) -> np.ndarray:
        """The numbers of the nodes (references, inputs, values) in the tails."""
        assert self.tails is not None
        return ranges(self.tails[:, size], self.tails[:, 4 + size] - self.tails[:, size])

    def _numbers_at(self, places: np.ndarray, first: int, size: int) -> np.ndarray:
        return first + places if self.tails is None else self._numbers(size)[places]

    def _places_of(self, numbers: np.ndarray, size: int) -> np.ndarray:
        first = self.first[size]
        if self.tails is None:
            return numbers - first
        places = self._places(size)[np.maximum(numbers - first, 0)]
        return np.where(numbers < first, -1, places)

    def _places(self, size: int) -> np.ndarray:
        """Where the values or inputs recorded since the round began are in it; -1 of others."""
        assert self.tails is not None
        numbers, first = self._numbers(size), self.first[size]
        places = np.full(int(self.tails[-1, 4 + size]) - first, -1)
        places[numbers - first] = np.arange(len(numbers))
        return places
