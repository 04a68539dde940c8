"""The settings of a thread, for work that goes on in another one.

Its context variables, what JAX is configured to be by `with` blocks, its mesh, and who gets
operations and calls of cells. Locks, the names of mapped axes and whatever else is kept per thread
are not taken along.
"""

import contextlib
import contextvars
from collections.abc import Callable
from typing import TypeVar

import jax
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._record.cell import recording

T = TypeVar("T")

# Of JAX, each a context manager `jax.name(value)` and an option `jax_name`; not those that set
# others, or say which threads there may be.
OTHERS = {"thread_guard", "transfer_guard"}
SETTINGS = [x for x in dir(jax) if hasattr(jax.config, f"jax_{x}") and x not in OTHERS]


class ThreadSettings:
    """The settings of the thread in which this is made."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._settings = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}
        with take_current_trace() as trace:
            self._trace = trace
        self._recorder = recording.recorder
        self._mesh = jax.sharding.get_abstract_mesh()

    def run(self, work: Callable[[], T]) -> T:
        """Returns `work()`, done in this thread as it is set now; one thread at a time."""
        with contextlib.ExitStack() as stack:
            for name, value in self._settings.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            if not self._mesh.empty:
                stack.enter_context(jax.sharding.use_abstract_mesh(self._mesh))
            before, recording.recorder = recording.recorder, self._recorder
            try:
                with set_current_trace(self._trace):
                    return self._context.run(work)
            finally:
                recording.recorder = before
