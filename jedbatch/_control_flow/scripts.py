"""Scripts: the values that an instance will ask for, as far as they are there already.

An instance that goes on as foreseen runs its Python from decision to decision without waiting. At
each it ends a step, which is compared with the step before (see `_control_flow.steps`), numbers
that it brings included, and the value that it asks for is the next one of its script. This is most
of what a loop costs that Python decides on, so it has a twin in C (`_support/c/scripts.c`), which
symbols ask directly under `if`, `while`, `int()` and `float()`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jedbatch._control_flow.steps import COUNTS, INPUTS, VALUES, Steps
from jedbatch._record.cell import recording

NUMBERS = (bool, int, float)
STAYS, WAS_READ, COUNTS_ON = range(3)  # how a number is foreseen


class ForeseenNumber(NamedTuple):
    """A number that an instance brings in every step.

    Attributes:
      place: among the inputs that a step records.
      how: it is foreseen.
      latest: the number in the step before the first one that is foreseen.
      by: how much it goes up in a step, if it counts on.
    """

    place: int
    how: int
    latest: Any
    by: int = 0


def same_number(a: Any, b: Any) -> bool:
    """Returns whether two things are one, or equal numbers of one type that differ in nothing."""
    if a is b:
        return True
    if type(a) is not type(b) or type(a) not in NUMBERS or a != b:
        return False
    return type(a) is not float or a != 0 or math.copysign(1.0, a) == math.copysign(1.0, b)


class Script:
    """The values that an instance will ask for; the twin of `_support/c/scripts.c`.

    Attributes:
      done: how many steps it took as foreseen.
      same: whether the last step was like the one before.
      first_value: the number of the first value that was recorded when it began.
    """

    __slots__ = (
        "_bound",
        "_count",
        "_ended",
        "_fiber",
        "_first",
        "_first_input",
        "_first_read",
        "_num_inputs",
        "_num_values",
        "_numbers",
        "_rows",
        "_steps",
        "_stride",
        "_table",
        "done",
        "first_value",
        "same",
    )

    def __init__(
        self,
        steps: Steps,
        rows: np.ndarray,
        places: tuple[int, int, int],
        numbers: Sequence[ForeseenNumber],
        bound: int,
    ):
        """Makes a script.

        Args:
          steps: of the fibres.
          rows: values of all fibres at the ends of all steps.
          places: where the fibre's value at the end of the first step that is foreseen is in them,
            how far it is from there to the next one, and how many there are. The value of the step
            before the first one is as far before it.
          numbers: that the instance brings.
          bound: below which numbers have to be, and not negative, to be foreseen; or -1.
        """
        self.done = 0
        self.same = self._ended = False
        self.first_value = self._first_input = 0
        self._first_read = self._num_inputs = self._num_values = 0
        self._fiber, self._table = -1, steps.table
        self._steps = steps
        self._rows = rows
        self._first, self._stride, self._count = places
        self._numbers = numbers
        self._bound = bound

    def begin(self, table: np.ndarray, fiber: int) -> None:
        """Notes that the turn of the fibre begins, whose step is in a table (see `Steps`)."""
        _, _, groups, counter = self._steps.columns
        self._fiber, self._table = fiber, table
        self._first_input, self.first_value = len(groups), counter[0]

    def read(self, key: int) -> np.ndarray | None:
        """Returns the value of that number, at the end of a step like the one before.

        None if it is not there, and from then on.
        """
        if self._ended:
            return None
        self.same = self._steps.follow(self._fiber, key)
        self._ended = not (self.same and self.done < self._count)
        if self.same and self.done == 0:
            counts = self._table[self._fiber, COUNTS].tolist()  # which other steps will change
            self._num_inputs, self._num_values = counts[INPUTS], counts[VALUES]
            self._first_read = key
        self._ended = self._ended or not self._has_numbers()
        if self._ended:
            return None
        self.done += 1
        return self._value(self.done - 1)

    def value(self, key: int) -> np.ndarray | None:
        """Returns the value of that number if it was read; None if not."""
        if self.done == 0:
            return None
        step, rest = divmod(key - self._first_read, self._num_values)
        return self._value(step) if not rest and 0 <= step < self.done else None

    def _value(self, step: int) -> np.ndarray:
        """Returns the value at the end of a step."""
        return self._rows[self._first + step * self._stride, ...]

    def _has_numbers(self) -> bool:
        """Returns whether the numbers of the step that ends are those foreseen."""
        first = self._first_input + self.done * self._num_inputs
        for place, how, latest, by in self._numbers:
            x = self._steps.input_value[first + place]
            if how == STAYS:
                if not same_number(x, latest):
                    return False
                continue
            if how == COUNTS_ON:
                latest += (self.done + 1) * by
            elif type(x) in NUMBERS:
                latest = type(x)(self._value(self.done - 1))
            is_there = self._bound < 0 or type(x) is not int or 0 <= x < self._bound
            if not same_number(x, latest) or not is_there:
                return False
        return True


def script(
    steps: Steps,
    rows: np.ndarray,
    places: tuple[int, int, int],
    numbers: list[ForeseenNumber],
    bound: int,
) -> Any:
    """Returns a `Script`, or its twin where it is compiled; see there for the arguments."""
    compiled = steps.compiled
    if compiled is None:
        return Script(steps, rows, places, numbers, bound)
    given = steps.columns, steps.input_value, rows, places, numbers, bound, recording
    return compiled.Script(*given)
