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

    def __init__(self, known: Mapping[int, KnownPaths], steps: Steps):
        """Makes an empty one.

        Args:
          known: what is known of each instance that is to be learned.
          steps: of the call.
        """
        self._known, self._steps = known, steps
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
        for instance, known in self._known.items():
            noted = self._of.get(instance, ())
            answers = [value(asked) for _, _, asked in noted if asked is not None]
            may_learn = recorder.caching and known.learns and noted and noted[-1][2] is None
            if not may_learn or not all(map(_is_answer, answers)):
                known.forget()
                continue
            path = _path(noted, columns, recorder.input_value, results[instance])
            if path is None:
                known.forget()
            else:
                known.learn(path, [x.item() for x in answers if x is not None])
        return self._known


def _is_answer(value: np.ndarray | None) -> bool:
    return value is not None and value.size == 1 and value.dtype.kind in "biu"


def _path(
    noted: Sequence[tuple[tuple[int, ...], tuple[int, ...], int | None]],
    columns: Sequence[np.ndarray],
    given: Sequence[Any],
    result: InstanceResult,
) -> list[PathSegment] | None:
    """Returns the segments of an instance; None if it reads what others have recorded."""
    begins, ends, _ = zip(*noted, strict=True)
    calls, references, groups = columns
    own = [_OwnNumbers([x[k] for x in begins], [x[k] for x in ends]) for k in (VALUES, INPUTS)]

    def local(numbers: np.ndarray) -> np.ndarray | None:
        found = [own[0].local(numbers), -1 - own[1].local(-1 - numbers)]
        is_lost = np.where(numbers < 0, found[1] >= 0, found[0] < 0)
        return None if is_lost.any() else np.where(numbers < 0, found[1], found[0])

    path = []
    for k, (begin, end, asked) in enumerate(noted):
        parts = [slice(begin[s], end[s]) for s in (NODES, REFERENCES, INPUTS)]
        read, wanted = (
            local(references[parts[1]]),
            local(np.array([] if asked is None else [asked], np.int64)),
        )
        returned = None
        if asked is None:
            found = local(np.array(result.references, np.int64))
            returned = None if found is None else result._replace(references=tuple(found.tolist()))
        if read is None or wanted is None or (asked is None and returned is None):
            return None
        written = Written(
            calls[parts[0]],
            read,
            groups[parts[2]],
            list(given[parts[2]]),
            end[VALUES] - begin[VALUES],
        )
        first = own[0].first[k], own[1].first[k]
        path.append(
            PathSegment(first, written, None if asked is None else int(wanted[0]), returned)
        )
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
