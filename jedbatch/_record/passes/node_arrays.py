"""`NodeArrays`: recorded nodes as arrays, to look at many of them at a time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jedbatch._graph.paths import int64_of, pointers, ranges
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import Leaf


@dataclass(frozen=True, eq=False)
class NodeArrays:
    """Recorded nodes; every operand is one value (N nodes, E operands, I instances).

    Attributes:
      call_spec, node_type: int64[N].
      site: int64[N], where each was recorded.
      same: bool[N], whether that was in the same call of a function as the node before.
      ptr, operand: int64[N + 1] and int64[E], what each reads: results, or inputs as `-1 - i`.
      start: int64[N + 1], the first result of each.
      input_group, input_value: as the recorder has them.
      outputs: what the instances return.
      ends: for each instance, after zeros, how many nodes, inputs and outputs there are at its end.
    """

    call_spec: np.ndarray
    node_type: np.ndarray
    site: np.ndarray
    same: np.ndarray
    ptr: np.ndarray
    operand: np.ndarray
    start: np.ndarray
    input_group: list[int]
    input_value: list[Leaf]
    outputs: list[int]
    ends: list[tuple[int, int, int]]

    @functools.cached_property
    def maker(self) -> np.ndarray:
        """int64[V], the node of each result."""
        return np.repeat(np.arange(len(self.call_spec)), np.diff(self.start))

    @functools.cached_property
    def reader(self) -> np.ndarray:
        """int64[E], the node of each operand."""
        return np.repeat(np.arange(len(self.call_spec)), np.diff(self.ptr))

    @functools.cached_property
    def begins(self) -> np.ndarray:
        """bool[N], whether a node is the first one of its instance."""
        begins = np.zeros(len(self.call_spec) + 1, bool)
        begins[[n for n, _, _ in self.ends]] = True
        return begins[:-1]

    def without_unread(self) -> "NodeArrays":
        """Returns the nodes that results of instances depend on."""
        alive = np.zeros(len(self.call_spec), bool)
        new = self.maker[[r for r in self.outputs if r >= 0]]
        while len(new):
            alive[new] = True
            read = self.operand[ranges(self.ptr[new], self.ptr[new + 1] - self.ptr[new])]
            makers = np.unique(self.maker[read[read >= 0]])
            new = makers[~alive[makers]]
        if alive.all():
            return self
        kept = np.flatnonzero(alive)
        arity, num_results = np.diff(self.ptr)[kept], np.diff(self.start)[kept]
        start = pointers(num_results)
        place = np.zeros(int(self.start[-1]), np.int64)
        place[ranges(self.start[kept], num_results)] = np.arange(start[-1])
        operand = self.operand[ranges(self.ptr[kept], arity)]
        made = operand >= 0
        operand[made] = place[operand[made]]
        before = pointers(alive)
        return NodeArrays(
            self.call_spec[kept],
            self.node_type[kept],
            self.site[kept],
            self.same[kept],
            pointers(arity),
            operand,
            start,
            self.input_group,
            self.input_value,
            [int(place[r]) if r >= 0 else r for r in self.outputs],
            [(int(before[n]), i, o) for n, i, o in self.ends],
        )

    @staticmethod
    def of_recorder(
        registry: Registry, recorder: Recorder, outputs: list[int], ends: Sequence[tuple[int, ...]]
    ) -> "NodeArrays":
        """Returns what was recorded.

        `ends` are, for each instance, after (0, 0, 0, 0), how many nodes, references, inputs and
        outputs had been recorded when it was done.
        """
        recorded = int64_of(recorder.call_specs)
        return _arrays(
            registry,
            recorded,
            recorder.sites or [(0, False)] * len(recorded),
            pointers(registry.arity[recorded]),
            int64_of(recorder.references),
            recorder.input_group,
            recorder.input_value,
            outputs,
            [(n, i, o) for n, _, i, o in ends],
        )


def _arrays(
    registry: Registry, recorded: np.ndarray, sites: Sequence[tuple], *rest: Any
) -> NodeArrays:
    num_results = np.array([len(t.results) for t in registry.node_types], np.int64)
    site, same = np.array(sites, np.int64).reshape(-1, 2).T
    ptr, operand, *others = rest
    start = pointers(num_results[recorded])
    return NodeArrays(recorded, recorded, site, same > 0, ptr, operand, start, *others)
