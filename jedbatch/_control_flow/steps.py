"""`Steps`: what an instance records between two decisions, and whether it records the same again.

In a loop that Python decides on, each step of an instance records what the step before did: the
same calls, on values of its own, on values at the same places of the step before, and on older
ones that stay. What comes next can then be foreseen (see `_control_flow.ahead`).

Letters: `F` fibres. Sizes of a recording are four: nodes, references, inputs, values.
"""

from typing import TYPE_CHECKING

import numpy as np

from jedbatch._record.run.recorder import Recorder
from jedbatch._support.native import core

if TYPE_CHECKING:
    from jaxtyping import Int64

# The columns of the table of steps: sizes when the last step but one began, when the last step
# began, how much it recorded, sizes when the step at hand began, and the value that was read at the
# end of the last step, counted from its first one. Of a step but one with more values than the last
# step, such as the first one with what comes before a loop, only as many at its end count.
BEFORE, LAST, COUNTS, NOW = slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)
READ = 16
NUM_COLUMNS = 17
NODES, REFERENCES, INPUTS, VALUES = range(4)


class Steps:
    """The steps of the fibres of a call.

    Attributes:
      table: int64[F, 17], of every fibre; see `BEFORE` and what follows it.
      columns: of the recording: calls, references, groups of inputs, and how many values.
    """

    def __init__(self, recorder: Recorder, num_fibers: int):
        self.table: Int64[np.ndarray, "F 17"] = np.full((num_fibers, NUM_COLUMNS), -1)
        self.columns = (
            recorder.call_specs,
            recorder.references,
            recorder.input_group,
            recorder.counter,
        )
        compiled = core()
        is_compiled = compiled is not None and isinstance(recorder.counter, compiled.Ints)
        self._compiled = compiled if is_compiled else None

    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of what was recorded."""
        calls, references, groups, counter = self.columns
        return len(calls), len(references), len(groups), counter[0]

    def begin(self, fiber: int) -> None:
        """Notes that a fibre goes on, after others have recorded."""
        if fiber >= len(self.table):
            more = np.full((fiber + 1, NUM_COLUMNS), -1)
            self.table = np.concatenate([self.table, more])
        if self._compiled is not None:
            self._compiled.begin_step(self.columns, (self.table,), fiber)
        else:
            self.table[fiber, NOW] = self.sizes()

    def follow(self, fiber: int, value: int) -> bool:
        """Notes that a step ends; returns whether it is the same as the step before.

        The twin of `_support/c/steps.c`.

        Args:
          fiber: whose step it is.
          value: that it needs.
        """
        if self._compiled is not None:
            return self._compiled.follow_step(self.columns, (self.table,), fiber, value)
        row = self.table[fiber]
        before, last, counts, now = row[BEFORE], row[LAST], row[COUNTS], row[NOW]
        end = np.array(self.sizes())
        read = value - now[VALUES]
        same = (
            bool((before >= 0).all())
            and np.array_equal(end - now, counts)
            and read == row[READ]
            and self._is_alike(before, last, counts, now)
        )
        more = counts[VALUES] - (end - now)[VALUES]  # before what comes again
        row[:] = [*last, *now, *(end - now), *end, read]
        row[BEFORE][VALUES] += max(0, more)
        return same

    def _is_alike(
        self, before: np.ndarray, last: np.ndarray, counts: np.ndarray, now: np.ndarray
    ) -> bool:
        """Returns whether a step has the calls, references and inputs of the one before."""
        calls, references, groups, _ = self.columns
        for column, size in ((calls, NODES), (groups, INPUTS)):
            a, b, count = int(last[size]), int(now[size]), int(counts[size])
            if list(column[a : a + count]) != list(column[b : b + count]):
                return False
        first, count = int(now[REFERENCES]), int(counts[REFERENCES])
        was = int(last[REFERENCES])
        pairs = zip(references[first : first + count], references[was : was + count], strict=True)
        for x, y in pairs:
            if x >= now[VALUES]:
                same = x - now[VALUES] == y - last[VALUES]
            elif x >= last[VALUES] and x < last[VALUES] + counts[VALUES]:
                same = x - last[VALUES] == y - before[VALUES]
            elif x < -now[INPUTS]:
                same = x + now[INPUTS] == y + last[INPUTS]
            else:  # and no value of the step before, which would move on
                is_chained = y >= before[VALUES] and y < before[VALUES] + counts[VALUES]
                same = x == y and not is_chained
            if not same:
                return False
        return True
