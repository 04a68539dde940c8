"""Pickling what other processes are sent: functions by name where they have one there.

Functions that are made in others have none, and are sent as code if cloudpickle is installed. What
a script defines at its top level is found there by name, as processes that are spawned run it
again; so instances of its classes are of one class, whether they come with the function or later.
"""

import io
import operator
import pickle
import sys
from typing import Any

try:
    import cloudpickle  # type: ignore[import-untyped]
except ImportError:
    cloudpickle = None

CAN_SEND_CLOSURES = cloudpickle is not None


def dumps(value: Any) -> bytes:
    """Returns a value, pickled; `pickle.loads` reads it."""
    file = io.BytesIO()
    (Pickler if cloudpickle else pickle.Pickler)(file).dump(value)
    return file.getvalue()


if cloudpickle:

    class Pickler(cloudpickle.Pickler):
        """Sends by name what can be found by name."""

        def reducer_override(self, value: Any) -> Any:
            """Returns the name of a value, or what cloudpickle makes of it."""
            return name_of(value) or super().reducer_override(value)


def name_of(value: Any) -> str | None:
    """Returns the name by which a function, a class or the like is found in its module."""
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return None
    namespace = sys.modules.get(module)
    if namespace is None or (module == "__main__" and not hasattr(namespace, "__file__")):
        return None
    try:
        return name if operator.attrgetter(name)(namespace) is value else None
    except AttributeError:
        return None
