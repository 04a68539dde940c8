"""Tiered compilation: a program that compiles soon, until a better one is there.

Most of the time until a first result goes into compiling, and most of that into the widths of
chunks: each kernel is compiled in up to five. So the first calls run a program that has the
narrowest of each kernel alone, on the same tables (see `_program.interpreter`). At the second call
another thread begins to compile the one with all widths, which takes over as soon as it is there.

Source: the tiers of compilers of Java and JavaScript, such as Paleczny et al., *The Java HotSpot
server compiler* (2001).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jedbatch._jaxpr.configuration import finds_faults, is_staging
from jedbatch._program.executors import Dispatch, Fused
from jedbatch._program.signature import Signature
from jedbatch._record.thread_settings import ThreadSettings


class Tiered:
    """Executes a program as `Fused` does, in two tiers.

    Programs that run in rounds have one tier.

    Attributes:
      first: with narrow chunks alone.
      last: with chunks of all widths.
      signature: of both.
      has_tiers: whether chunks can be narrow; if not, all runs in the last tier.
    """

    name = "tiered"

    def __init__(self, prepare: Callable, signature: Signature, compiled: Callable[[str], None]):
        self.signature = signature
        self.has_tiers = signature.target.control == "loops"
        self.first = Fused(prepare, signature, compiled, narrow=True)
        self.last = Fused(prepare, signature, compiled)
        self._threads: dict[Hashable, threading.Thread | None] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.last, name)

    def infer(self, *args: Any) -> Any:
        """See `Fused.infer`."""
        return self._run(("infer",), args)

    def watch(self, *args: Any) -> Any:
        """See `Fused.watch`."""
        return self._run(("watch",), args)

    def save(self, *args: Any) -> Any:
        """See `Fused.save`."""
        return self._run(("save",), args)

    def reverse(self, *args: Any) -> Any:
        """See `Fused.reverse`."""
        return self._run(("reverse", args[0]), args)

    def release(self) -> None:
        """See `Fused.release`."""
        self.first.release()
        self.last.release()

    def wait(self) -> None:
        """Returns when all that is being compiled by other threads is there."""
        for thread in filter(None, list(self._threads.values())):
            thread.join()

    def _run(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Runs the better of the programs that are there; a key begins with the method to call."""
        has_one = not self.has_tiers or is_staging() or finds_faults()
        if has_one or self._is_there(key, args):
            return _in_own_context(getattr(self.last, key[0]), args)
        return getattr(self.first, key[0])(*args)

    def _is_there(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
        """Returns whether the last tier is compiled; begins with it at the second call."""
        with self._lock:
            if key not in self._threads:
                self._threads[key] = None
                return False
            thread = self._threads[key]
            if thread is None:
                work = functools.partial(_in_own_context, getattr(self.last, key[0]), args)
                thread = self._threads[key] = _in_background(work)
        return not thread.is_alive()


def _in_own_context(function: Callable, args: tuple[Any, ...]) -> Any:
    """Returns the results of a function, called with the mesh that is set now, if it is none.

    Where none is set, JAX tells contexts of a reverse, which say so, from others, which do not; and
    what it has compiled in one of them is not found in the other.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return function(*args)


def _in_background(work: Callable[[], Any]) -> threading.Thread:
    """Starts work that compiles a program, in a thread of the same settings.

    An error is left to the next call, which meets it as well.
    """
    settings = ThreadSettings()

    def run() -> None:
        with contextlib.suppress(Exception):
            settings.run(work)

    thread = threading.Thread(target=run, name="jedbatch-compiler")
    thread.start()
    return thread


Executor = Fused | Dispatch | Tiered
EXECUTORS: dict[str, type[Executor]] = {
    "fused": Fused,
    "dispatch": Dispatch,
    "tiered": Tiered,
}
