"""The compiled core: twins in C of the functions in which planning spends most of its time.

A twin does what its Python does, with the same results; the Python says what that is and why. The
core is built when the package is installed, where there is a compiler of C (sources: `_support/c`).
Where there is none, or the environment has `JEDBATCH_NATIVE=0`, the Python runs.
"""

import functools
import importlib
import os
import types
import warnings
from types import ModuleType

SWITCH = "JEDBATCH_NATIVE"  # of the environment
BUILD = "`pip install -e .` in a clone"
MODULE = "jedbatch._support.native_core"
REVISION = 29  # of what the functions of the core take and return, as in `_support/c/core.h`


def core() -> ModuleType | None:
    """Returns the compiled core; None where there is none, or where it is turned off.

    Planning asks often, and `os.environ` takes twenty times as long as C.
    """
    module = _loaded()[0]
    return None if module is None or module.is_off() else module


def function_types() -> tuple[type, ...]:
    """Returns the types of functions: Python's, and that of cells, if they are compiled."""
    module = _loaded()[0]
    return (types.FunctionType,) if module is None else (types.FunctionType, module.CellFunction)


def described() -> str:
    """Returns in one line whether the compiled core is used, and if not, why."""
    if os.environ.get(SWITCH) == "0":
        return f"Python, as {SWITCH}=0 says"
    module, reason = _loaded()
    return "compiled" if module else f"Python, slower: {reason}"


@functools.cache
def _loaded() -> tuple[ModuleType | None, str]:
    """(the compiled core or None, the reason why there is none)."""
    try:
        module = importlib.import_module(MODULE)
        revision = getattr(module, "REVISION", 0)
        if revision != REVISION:
            raise ImportError(f"it was built from other sources, revision {revision}")
        return module, ""
    except ModuleNotFoundError:
        return None, f"the core is not built; {BUILD} builds it, with a compiler of C"
    except ImportError as error:
        if os.environ.get(SWITCH) != "0":
            warnings.warn(
                f"jedbatch plans in Python, which is slower: its compiled core cannot be loaded "
                f"({error}). Install it again, or set {SWITCH}=0.",
                RuntimeWarning,
                stacklevel=2,
            )
        return None, f"the compiled core cannot be loaded ({error})"
