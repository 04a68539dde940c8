"""Scripts: the values that an instance will ask for, as far as they are there already.

An instance that goes on as foreseen runs its Python from decision to decision without waiting. At
each it ends a step, which is compared with the step before (see `_control_flow.steps`), numbers
that it brings included, and the value that it asks for is the next one of its script.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jedbatch._control_flow.steps import COUNTS, INPUTS, NOW

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


@dataclass(eq=False)
class Script:
    """The values that an instance will ask for.

    Attributes:
      values: at the ends of the step before and of all steps that are foreseen.
      numbers: that the instance brings.
      bound: below which numbers have to be, and not negative, to be foreseen; or None.
      inputs: the values of all inputs that are recorded.
      begins: int64[4], the sizes of the recording when the instance went on.
      num_inputs: that each step records.
      done: how many steps it took as foreseen.
    """

    values: np.ndarray
    numbers: Sequence[ForeseenNumber]
    bound: int | None
    inputs: Sequence[Any]
    begins: np.ndarray = field(default_factory=lambda: np.zeros(4, np.int64))
    num_inputs: int = 0
    done: int = 0

    def begin(self, step: np.ndarray) -> None:
        """Notes that the instance goes on, given int64[17], its step (see `Steps`)."""
        self.begins = step[NOW].copy()
        self.num_inputs = int(step[COUNTS][INPUTS])  # which other steps will change

    def next_value(self) -> np.ndarray | None:
        """Returns the value at the end of a step like the one before; None if it is not there."""
        if self.done + 1 == len(self.values) or (self.numbers and not self._has_numbers()):
            return None
        self.done += 1
        return self.values[self.done, ...]

    def _has_numbers(self) -> bool:
        """Returns whether the numbers of the step that ends are those foreseen."""
        first = int(self.begins[INPUTS]) + self.done * self.num_inputs
        for place, how, latest, by in self.numbers:
            x = self.inputs[first + place]
            if how == STAYS:
                if not same_number(x, latest):
                    return False
                continue
            if how == COUNTS_ON:
                latest += (self.done + 1) * by
            elif type(x) in NUMBERS:
                latest = type(x)(self.values[self.done])
            is_there = self.bound is None or type(x) is not int or 0 <= x < self.bound
            if not same_number(x, latest) or not is_there:
                return False
        return True
