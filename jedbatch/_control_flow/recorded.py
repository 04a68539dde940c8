"""`Recorded`: what instances have recorded since the last round, told apart from anything else.

Rounds that are recorded alike run alike, whatever came before: the same calls by as many instances
in the same order, which read the same values of this round. Values and inputs are counted from the
first one of the round; those of earlier rounds count as one, since it makes no difference to a
round which of them it reads, once they are computed.
"""

import functools
from typing import NamedTuple

import numpy as np

from jedbatch._graph.paths import int64_of
from jedbatch._record.recorder import Recorder
from jedbatch._support.native import core

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


class Recorded:
    """The part of a recording that came since a round began.

    Attributes:
      first: how much was recorded before.
      recorder: what records.
      turns: of each turn its instance, and nodes and inputs in all at its end.
    """

    def __init__(self, first: Beginning, recorder: Recorder, turns: list[int]):
        self.first = first
        self.recorder = recorder
        self.turns = turns

    @functools.cached_property
    def calls(self) -> np.ndarray:
        """int64[N], the id of the call spec of each node."""
        return int64_of(self.recorder.call_specs, self.first.nodes)

    @functools.cached_property
    def references(self) -> np.ndarray:
        """int64[R], what they read, as in `Recorder.references`."""
        return int64_of(self.recorder.references, self.first.references)

    @functools.cached_property
    def groups(self) -> np.ndarray:
        """int64[I], the group of each input."""
        return int64_of(self.recorder.input_group, self.first.inputs)

    def key(self, values: np.ndarray) -> bytes | None:
        """Returns what a round that computes some values is known by, wherever it comes.

        None if a value was recorded in an earlier round. The twin of `_support/c/rounds.c`.
        """
        first, recorder, compiled = self.first, self.recorder, core()
        if compiled is not None and isinstance(recorder.call_specs, compiled.Ints):
            columns = recorder.call_specs, recorder.references, recorder.input_group, self.turns
            begins = first.nodes, first.references, first.inputs, first.turns, first.values
            return compiled.round_key(columns, (values,), begins)
        if not len(values) or values.min() < first.values:
            return None
        references, turns = self.references, int64_of(self.turns, first.turns).reshape(-1, 3)
        older = (references >= -first.inputs) & (references < first.values)
        begin = np.where(references < 0, -first.inputs, first.values)
        shifted = np.where(older, OLD, references - begin)
        ends = turns[:, 1:] - (first.nodes, first.inputs)
        is_new = (np.diff(ends, axis=0, prepend=0) > 0).any(1)  # others record nothing
        owner, ends = turns[is_new, 0], ends[is_new]
        ascend = (owner[1:] > owner[:-1]).all()  # unless parts of instances take turns
        rank = owner[:0] if ascend else np.unique(owner, return_inverse=True)[1]
        counts = [*map(len, (self.calls, shifted, self.groups, owner)), len(values)]
        parts = self.calls, shifted, self.groups, ends.ravel(), values - first.values, rank
        return np.concatenate([np.array(counts, np.int64), *parts]).tobytes()
