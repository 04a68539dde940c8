"""`Recorded`: what instances have recorded since the last round, told apart from anything else.

Rounds that are recorded alike run alike, whatever came before: the same calls by as many instances
in the same order, which read the same values of this round. Values and inputs are counted from the
first one of the round; those of earlier rounds count as one, since it makes no difference to a
round which of them it reads, once they are computed.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from jedbatch._graph.paths import int64_of
from jedbatch._jaxpr.identity import Same
from jedbatch._record.recorder import Recorder
from jedbatch._schedule.policy import Policy, version_of

OLD = np.iinfo(np.int64).min  # in place of a reference to an earlier round


class Beginning(NamedTuple):
    """How much was recorded before a round."""

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


class Recorded(NamedTuple):
    """What was recorded since a round began.

    Attributes:
      first: how much was recorded before.
      calls: int64[N], the id of the call spec of each node.
      references: int64[R], what they read, as in `Recorder.references`.
      groups: int64[I], the group of each input.
      turns: int64[turns, 3], of each turn its instance, and nodes and inputs in all at its end.
    """

    first: Beginning
    calls: np.ndarray
    references: np.ndarray
    groups: np.ndarray
    turns: np.ndarray

    @staticmethod
    def since(first: Beginning, recorder: Recorder, turns: list[int]) -> "Recorded":
        """Returns what a recorder has recorded, in these turns."""
        return Recorded(
            first,
            int64_of(recorder.call_specs, first.nodes),
            int64_of(recorder.references, first.references),
            int64_of(recorder.input_group, first.inputs),
            int64_of(turns, first.turns).reshape(-1, 3),
        )

    def key(self, policy: Policy | None, values: np.ndarray) -> Hashable | None:
        """Returns what a round that computes some values depends on but for its place.

        None if a value was recorded in an earlier round.
        """
        first, references, turns = self.first, self.references, self.turns
        if not len(values) or values.min() < first.values:
            return None
        is_new = references >= first.values
        shifted = np.where(is_new, references - first.values, references + first.inputs)
        shifted[~is_new & (references >= -first.inputs)] = OLD
        owner, ends = turns[:, 0], turns[:, 1:] - (first.nodes, first.inputs)
        if len(owner) > 1 and (owner[1:] <= owner[:-1]).any():  # parts of instances take turns
            owner = np.unique(owner, return_inverse=True)[1]
        else:
            owner = owner[:0]
        parts = self.calls, shifted, self.groups, owner, ends, values - first.values
        version = None if policy is None else version_of(policy)
        return Same(policy), version, *[x.tobytes() for x in parts]
