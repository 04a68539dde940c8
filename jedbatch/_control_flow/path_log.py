"""`PathLog`: what instances record between decisions, noted while Python runs, to be learned."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jedbatch._control_flow.known_paths import InstanceResult, KnownPaths, PathSegment, Written
from jedbatch._control_flow.steps import INPUTS, NODES, REFERENCES, VALUES, Steps
from jedbatch._graph.paths import int64_of
from jedbatch._record.recorder import Recorder


class PathLog:
    """The segments of some instances of a call."""

    def __init__(self, known: Mapping[int, KnownPaths], steps: Steps, met: int):
        """Makes an empty one.

        Args:
          known: what is known of each instance that is to be learned.
          steps: of the call.
          met: how much the registry has met by now.
        """
        self._known, self._steps, self._met = known, steps, met
        self._begun: dict[int, tuple[int, ...]] = {}
        self._of: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int | None]]] = {}

    def begin(self, instance: int) -> None:
        """Notes that an instance begins, or goes on after others have recorded."""
        self._begun[instance] = self._steps.sizes()

    def end(self, instance: int, asked: int | None) -> None:
        """Notes that an instance asks for a value, or is done."""
        sizes = self._steps.sizes()
        self._of.setdefault(instance, []).append((self._begun[instance], sizes, asked))
        self._begun[instance] = sizes

    def refuse(self, instance: int) -> None:
        """Notes that an instance does what its key and answers do not tell."""
        if instance in self._known:
            self._known[instance].forget()

    def learn(
        self,
        recorder: Recorder,
        results: Sequence[InstanceResult],
        value: Callable[[int], np.ndarray | None],
    ) -> Mapping[int, KnownPaths]:
        """Adds what was noted to what is known, and returns that.

        Args:
          recorder: of the call.
          results: of the instances.
          value: returns a value that was asked for.
        """
        columns = [
            int64_of(x) for x in (recorder.call_specs, recorder.references, recorder.input_group)
        ]
        is_brought = np.array([how == "value" for how, *_ in recorder.registry.groups], bool)
        for instance, known in self._known.items():
            noted = self._of.get(instance, ())
            answers = [value(asked) for _, _, asked in noted if asked is not None]
            may_learn = recorder.caching and known.learns and noted and noted[-1][2] is None
            if not may_learn or not all(map(_is_answer, answers)):
                known.forget()
                continue
            path = _path(noted, columns, recorder.input_value, results[instance], is_brought)
            if path is None:
                known.forget()
            else:
                met = self._met, recorder.registry.size
                known.learn(path, [x.item() for x in answers if x is not None], met)
        return self._known


def _is_answer(value: np.ndarray | None) -> bool:
    return value is not None and value.size == 1 and value.dtype.kind in "biu"


def _path(
    noted: Sequence[tuple[tuple[int, ...], tuple[int, ...], int | None]],
    columns: Sequence[np.ndarray],
    given: Sequence[Any],
    result: InstanceResult,
    is_brought: np.ndarray,
) -> list[PathSegment] | None:
    """Returns the segments of an instance; None if it reads what others have recorded.

    Constants are inputs of the instance that reads them first, but its own in every path.
    """
    begins, ends, asked = zip(*noted, strict=True)
    calls, references, groups = columns
    parts = [slice(b[REFERENCES], e[REFERENCES]) for b, e in zip(begins, ends, strict=True)]
    returned = np.array(result.references, np.int64)
    values = _OwnNumbers([x[VALUES] for x in begins], [x[VALUES] for x in ends])
    read = [*(references[part] for part in parts), returned, np.array(asked[:-1], np.int64)]
    every = np.concatenate(read)
    is_input = every < 0
    inputs, first, which = np.unique(-1 - every[is_input], return_index=True, return_inverse=True)
    own_inputs = _OwnNumbers([x[INPUTS] for x in begins], [x[INPUTS] for x in ends])
    local = values.local(every)
    if (local[~is_input] < 0).any() or not (
        is_brought[groups[inputs]] | (own_inputs.local(inputs) >= 0)
    ).all():
        return None
    order = first.argsort()
    rank = order.argsort()
    local[is_input] = -1 - rank[which]
    read_by = np.repeat(np.arange(len(read)), list(map(len, read)))[is_input]
    counts = np.bincount(np.minimum(read_by[first], len(noted) - 1), minlength=len(noted))
    of_each = np.split(local, np.cumsum(list(map(len, read)))[:-1])
    of_inputs = np.split(inputs[order], counts.cumsum()[:-1])
    path = []
    for k, (begin, end, own) in enumerate(zip(begins, ends, of_inputs, strict=True)):
        written = Written(
            calls[begin[NODES] : end[NODES]],
            of_each[k],
            groups[own],
            [given[i] for i in own.tolist()],
            end[VALUES] - begin[VALUES],
        )
        is_last = asked[k] is None
        found = result._replace(references=tuple(of_each[-2].tolist())) if is_last else None
        number = None if is_last else int(of_each[-1][k])
        begun = values.first[k], int(counts[:k].sum())
        numbers = references[parts[k]]
        read_groups = np.unique(groups[-1 - numbers[numbers < 0]])
        path.append(PathSegment(begun, written, read_groups, number, found))
    return path


class _OwnNumbers:
    """The numbers of an instance's values or inputs, in ascending ranges."""

    def __init__(self, begins: Sequence[int], ends: Sequence[int]):
        self._begins, self._ends = np.array(begins), np.array(ends)
        sizes = self._ends - self._begins
        self.first = (sizes.cumsum() - sizes).tolist()
        self._offset = np.array(self.first) - self._begins

    def local(self, numbers: np.ndarray) -> np.ndarray:
        """Returns which of them numbers are, from 0; -1 of others."""
        place = np.maximum(np.searchsorted(self._begins, numbers, "right") - 1, 0)
        is_own = (numbers >= self._begins[place]) & (numbers < self._ends[place])
        return np.where(is_own, numbers + self._offset[place], -1)
