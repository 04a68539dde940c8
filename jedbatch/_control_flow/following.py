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
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jedbatch._control_flow.depths import ROUND_WORK
from jedbatch._control_flow.known_paths import Guess, InstanceResult, PathBlock, PathSegment
from jedbatch._control_flow.workspace import Workspace
from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._layout.layout import Layout

# layout, how many instances, when it began, steps ahead, how many of these, how many were of use
NoteRound = Callable[[Layout, int, float, int, int, int], None]


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

    def __init__(self, workspace: Workspace, first: Mapping[int, PathSegment], note: NoteRound):
        """Begins.

        Args:
          workspace: of the call.
          first: the segment that each instance begins with.
          note: is told of every round.
        """
        self.results: dict[int, InstanceResult] = {}
        self._workspace, self._note = workspace, note
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
            if len(asked):
                layout, computed, _ = self._workspace.compute(asked)
                answers = [x.item() for x in computed]
            waiting = sum(len(block.asked) > 0 for block in blocks)
            used = self._go_on(guesses, blocks, answers)
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
        parts = [block.written for block in blocks]
        sizes = [(len(p.calls), len(p.references), len(p.groups), p.num_values) for p in parts]
        counts = np.array(sizes).T
        before = len(recorder.call_specs), 0, len(recorder.input_group), recorder.num_values
        nodes, place, inputs, values = counts.cumsum(axis=1) + np.array(before)[:, None]
        first_value, first_input = values - counts[3], inputs - counts[2]
        references = np.concatenate([block.relative for block in blocks])
        references += np.concatenate([x.new for x in blocks]) * first_value.repeat(counts[1])
        references -= np.concatenate([x.new_inputs for x in blocks]) * first_input.repeat(counts[1])
        num_asked = [len(block.asked) for block in blocks]
        asked = np.concatenate([block.asked for block in blocks])
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
        recorder.call_specs += np.concatenate([p.calls for p in parts]).tolist()
        recorder.references += references.tolist()
        recorder.input_group += np.concatenate([p.groups for p in parts]).tolist()
        for p in parts:
            recorder.input_value += p.inputs
        recorder.num_values = int(values[-1])
        graph.turns += np.stack([list(self._at), nodes, inputs], axis=1).ravel().tolist()
        return asked

    def _go_on(
        self, guesses: Sequence[Guess], blocks: Sequence[PathBlock], answers: list[int]
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
                self._end(i, segment)
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

    def _end(self, instance: int, segment: PathSegment) -> None:
        """Notes what an instance returns that is done."""
        assert segment.result is not None
        found = tuple(map(self._places[instance].reference, segment.result.references))
        self.results[instance] = segment.result._replace(references=found)
