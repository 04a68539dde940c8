"""The owners of frames: modules of this package know each other by marks, not by their names.

Who asks about lengths, and the line of the user's code, are found by `_jaxpr.symbolic_dims`.

Where an operation is recorded, and who asks about the length of an array, is seen from the frames
of Python's stack. A frame has the globals of the module that its function is defined in, and these
say what there is to know: `__name__`, which begins with the package and an underscore in private
modules, and the marks below, which modules define.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

# Defined where functions of users are called in order to record them.
RECORDS_CALLS = "RECORDS_CALLS"
# Defined in public modules that ask about lengths as generally as private ones.
HOLDS_FOR_ALL_LENGTHS = "HOLDS_FOR_ALL_LENGTHS"

_PRIVATE = __name__.partition(".")[0] + "._"


def depth() -> int:
    """Returns how many frames of Python there are, that of the caller included."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def is_private(module: str) -> bool:
    """Returns whether a name is that of a private module of this package."""
    return module.startswith(_PRIVATE)


def records_calls(names: Mapping[str, Any]) -> bool:
    """Returns whether globals are those of a module that calls what is recorded."""
    return RECORDS_CALLS in names and is_private(names["__name__"])
