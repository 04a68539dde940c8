"""Instances that go on along known paths, without Python.

What an instance will record is known as long as its answers are among those met before (see
`_control_flow.known_paths`). So it is recorded for all of them at once, up to where the path is
likely to end, and the values that are asked for on the way are computed in one round:

    round 1     all that instances 0 to 3 record if their loops go on as often as before
    answers     0, 1, 3 as expected: done
                2 goes on: what it recorded since it was to stop was for nothing
    round 2     what instance 2 records from there on

An instance whose answer was not met there before is left to Python, from the start. As for steps
that run ahead, what runs for nothing must end, and not call Python; nor look up rows of tables by
numbers of the instance's arrays, since there need not be such rows.
"""

import bisect
import collections
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jedbatch._control_flow.depths import ROUND_WORK
from jedbatch._control_flow.known_paths import Guess, InstanceResult, PathBlock, PathSegment
from jedbatch._control_flow.workspace import Workspace
from jedbatch._graph.paths import add_int64
from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._layout.layout import Layout

# layout, how many instances, when it began, steps ahead, how many of these, how many were of use
NoteRound = Callable[[Layout, int, float, int, int, int], None]
Ending = Callable[[Mapping[int, InstanceResult]], None]


class Place(list[tuple[int, int, int, int]]):
    """Where what an instance recorded is, block after block.

    Of each the first number of values and of inputs, in the path, and in the recording.
    """

    def reference(self, reference: int) -> int:
        """The reference in the recording to what one in the path refers to."""
        if reference >= 0:
            own, _, first, _ = self[bisect.bisect_right(self, reference, key=lambda x: x[0]) - 1]
            return reference - own + first
        number = -1 - reference
        _, own, _, first = self[bisect.bisect_right(self, number, key=lambda x: x[1]) - 1]
        return -1 - (number - own + first)


class Following:
    """The instances of a call that go on along known paths.

    Attributes:
      results: of those that are done; others have gone where no path is known.
    """

    def __init__(
        self,
        workspace: Workspace,
        first: Mapping[int, PathSegment],
        note: NoteRound,
        expect_end: Ending,
    ):
        """Begins.

        Args:
          workspace: of the call.
          first: the segment that each instance begins with.
          note: is told of every round.
          expect_end: is told, while the last round runs, the results if all goes as it always did.
        """
        self.results: dict[int, InstanceResult] = {}
        self._workspace, self._note, self._expect_end = workspace, note, expect_end
        self._at = dict(first)
        self._ends: dict[int, PathSegment] = {}  # of those that ask for nothing more
        self._places: dict[int, Place] = {i: Place() for i in first}

    def run(self) -> None:
        """Lets all instances go on until they are done, or left."""
        self._workspace.makes_room = False  # there are no steps behind those of a round
        while self._at:
            start = time.perf_counter()
            guesses, blocks = self._blocks()
            asked = self._record(blocks)
            answers: list[int] = []
            ends = functools.cache(functools.partial(self._ends_of, blocks))
            if len(asked):
                self._workspace.meanwhile = functools.partial(self._look_ahead, guesses, ends)
                layout, computed, _ = self._workspace.compute(asked)
                is_array = isinstance(computed, np.ndarray)
                answers = np.ravel(computed).tolist() if is_array else [x.item() for x in computed]
            waiting = sum(len(block.asked) > 0 for block in blocks)
            used = self._go_on(guesses, blocks, answers, ends())
            if len(asked):
                most = max(len(block.asked) for block in blocks) - 1
                self._note(layout, waiting, start, most, len(asked) - waiting, used)
            if not self._at:  # rounds are more alike without the ends of others
                self._at, self._ends = self._ends, {}
        self._workspace.makes_room = True

    def _blocks(self) -> tuple[list[Guess], list[PathBlock]]:
        """Returns the guess of each instance, and as much of it as is worth running."""
        programs = self._workspace.programs
        guesses = []
        for segment in self._at.values():
            if segment.guess is None:
                segment.guess = Guess(segment, programs)
            guesses.append(segment.guess)
        if finds_faults():
            return guesses, [guess.block(1) for guess in guesses]
        counts = collections.Counter(guesses)
        sizes = {guess: guess.size_worth(n, ROUND_WORK) for guess, n in counts.items()}
        return guesses, [guess.block(sizes[guess]) for guess in guesses]

    def _record(self, blocks: Sequence[PathBlock]) -> np.ndarray:
        """Records a block of every instance; returns the values that are asked for."""
        recorder, graph = self._workspace.recorder, self._workspace.graph
        alike = [list(same) for _, same in itertools.groupby(blocks, id)]
        times, each = list(map(len, alike)), [same[0] for same in alike]
        parts = [block.written for block in each]
        sizes = [(len(p.calls), len(p.references), len(p.groups), p.num_values) for p in parts]
        counts = np.repeat(np.array(sizes).T, times, axis=1)

        def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
            pairs = zip(arrays, times, strict=True)
            return np.concatenate([x if n == 1 else np.tile(x, n) for x, n in pairs])

        before = len(recorder.call_specs), 0, len(recorder.input_group), recorder.num_values
        nodes, place, inputs, values = counts.cumsum(axis=1) + np.array(before)[:, None]
        first_value, first_input = values - counts[3], inputs - counts[2]
        references = joined([block.relative for block in each])
        references += joined([block.new for block in each]) * first_value.repeat(counts[1])
        references -= joined([block.new_inputs for block in each]) * first_input.repeat(counts[1])
        asked = joined([block.asked for block in each])
        num_asked = np.repeat([len(block.asked) for block in each], times)
        is_older = asked < 0
        asked += first_value.repeat(num_asked)
        firsts = zip(first_value.tolist(), first_input.tolist(), place - counts[1], strict=True)
        for (i, segment), block, first in zip(self._at.items(), blocks, firsts, strict=True):
            where = self._places[i]
            if block.older:
                at, which = block.older_at
                references[first[2] + at] = np.array(list(map(where.reference, block.older)))[which]
            where.append((*segment.begin, *first[:2]))
        if is_older.any():
            owner = np.repeat(np.arange(len(blocks)), num_asked)
            of_each = list(zip(self._at.items(), first_value.tolist(), strict=True))
            for k in np.flatnonzero(is_older).tolist():
                (i, segment), first = of_each[owner[k]]
                asked[k] = self._places[i].reference(int(asked[k]) - first + segment.begin[0])
        add_int64(recorder.call_specs, joined([p.calls for p in parts]))
        add_int64(recorder.references, references)
        add_int64(recorder.input_group, joined([p.groups for p in parts]))
        for p, n in zip(parts, times, strict=True):
            recorder.input_value += [*p.inputs] * n
        recorder.num_values = int(values[-1])
        add_int64(graph.turns, np.stack([list(self._at), nodes, inputs], axis=1).ravel())
        return asked

    def _ends_of(self, blocks: Sequence[PathBlock]) -> dict[int, InstanceResult]:
        """Returns the results of the instances that are done at the end of their blocks."""
        last = [(i, block.path[-1]) for i, block in zip(self._at, blocks, strict=True)]
        return {i: self._result(i, segment) for i, segment in last if segment.asked is None}

    def _look_ahead(
        self, guesses: Sequence[Guess], ends: Callable[[], Mapping[int, InstanceResult]]
    ) -> None:
        """Prepares, while a device computes, what comes if all is as expected."""
        found = ends()
        is_last = len(found) == len(self._at) and not self._ends
        if is_last and all(guess.is_sure for guess in dict.fromkeys(guesses)):
            self._expect_end({**self.results, **found})

    def _go_on(
        self,
        guesses: Sequence[Guess],
        blocks: Sequence[PathBlock],
        answers: list[int],
        ends: Mapping[int, InstanceResult],
    ) -> int:
        """Goes on by the answers of all instances; returns how many beyond the first are of use."""
        at: dict[int, PathSegment] = {}
        used, end = 0, 0
        for i, guess, block in zip(self._at, guesses, blocks, strict=True):
            begin, end = end, end + len(block.asked)
            own, expected = answers[begin:end], block.answers
            place = len(block.path) - 1
            if own[:place] != expected:
                place = next(k for k, x in enumerate(expected) if own[k] != x)
            used += max(0, min(place, len(own) - 1))
            segment = block.path[place]
            if segment.asked is None:
                guess.note(place, None)
                self.results[i] = ends[i]
                continue
            answer = own[place]
            is_likely = place < len(guess.answers) and answer == guess.answers[place]
            guess.note(place + is_likely, None if is_likely else answer)
            following = segment.after.get(answer)
            if following is not None:
                (self._ends if following.asked is None else at)[i] = following
        self._at = at
        for guess in dict.fromkeys(guesses):
            guess.settle(self._workspace.programs)
        return used

    def _result(self, instance: int, segment: PathSegment) -> InstanceResult:
        """Returns what an instance returns at the end of its path."""
        assert segment.result is not None
        structure, types, references = segment.result
        found = tuple(map(self._places[instance].reference, references))
        return InstanceResult(structure, types, found)
