"""Units: the functions of the user that would be cells of the operations that are recorded.

Operations belong together that are performed in one call of a function, between two recursive calls
or in one round of a loop. So the unit of an operation is the function that the innermost recursive
function calls, or the one with the innermost loop, on the way to the operation.

Only functions of the user count; layers of a library call each other through the same few functions
of the library, whatever the model.
"""

import collections
import dis
import functools
import sys
from types import CodeType, FrameType
from typing import NamedTuple

from jedbatch._support.frames import is_private, records_calls

MAX_FRAMES = 256  # looked at for one operation

# Functions of these do not recur on the user's behalf; the standard library is one of them.
LIBRARIES = frozenset({"jax", "jaxlib", "flax", "equinox", "haiku", "numpy", "optax"})


class Unit(NamedTuple):
    """A function of the user that does one step of what recurs or loops around it.

    Attributes:
      name, line: of the function, and the line where it begins.
      is_whole: whether there is none: this one recurs or loops itself, or is the outermost.
    """

    name: str
    line: str
    is_whole: bool


class Units:
    """Counts operations while they are recorded, by the units that they are performed in.

    Attributes:
      counts: of operations.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[Unit] = collections.Counter()
        self._recursive: set[CodeType] = set()

    def note(self) -> None:
        """Notes an operation of the caller."""
        codes: list[CodeType] = []  # of named functions of the user, from the innermost
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MAX_FRAMES):
            if frame is None or records_calls(frame.f_globals):
                break
            if _is_of_user(frame):
                if frame.f_code in codes:
                    self._recursive.add(frame.f_code)
                codes.append(frame.f_code)
            frame = frame.f_back
        if codes:
            self.counts[self._unit(codes)] += 1

    def _unit(self, codes: list[CodeType]) -> Unit:
        """Returns the unit of an operation, given the functions it is performed in."""
        recursive = next((k for k, code in enumerate(codes) if code in self._recursive), None)
        around = codes[: len(codes) if recursive is None else recursive + 1][::-1]
        inner = 1
        if recursive is None:
            inner += max((k for k, code in enumerate(around) if _has_loops(code)), default=0)
        is_whole = inner == len(around)
        code = around[-1 if is_whole else inner]
        name = code.co_qualname.rpartition("<locals>.")[2]
        return Unit(name, f"{code.co_filename}:{code.co_firstlineno}", is_whole)


def _is_of_user(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__") or ""
    root = module.partition(".")[0]
    if frame.f_code.co_name.startswith("<"):  # a lambda or a comprehension
        return False
    return not (is_private(module) or root in LIBRARIES or root in sys.stdlib_module_names)


@functools.lru_cache(1024)
def _has_loops(code: CodeType) -> bool:
    return any("JUMP_BACKWARD" in x.opname for x in dis.get_instructions(code))
