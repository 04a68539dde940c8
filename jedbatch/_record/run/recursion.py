"""Recursion deeper than Python's limit.

A model recurses as deep as its instances are nested, which may be tens of thousands of frames, and
Python stops at 1,000. `sys.setrecursionlimit` is no cure. It holds for every thread of the process,
and until Python 3.12 it guards C code too, which calls itself (`repr`, `json`, `copy`) or Python
back (`map`, `sorted`, `jax.tree.map`), and whose stack ends after some ten thousand calls: with a
high limit, endless recursion anywhere in the process is a segmentation fault.

So a function runs as Python has it, and what fails with a `RecursionError` runs once more, on a
thread of its own, whose stack is large enough for a limit that holds for this thread alone. Memory
of a stack is taken as it is used. The limit ends with the thread; nothing has to be restored.

Python keeps a limit for each thread, but has no function that sets that of one. We write it where
it is kept: two neighbouring numbers in the state of the thread, the frames that are left, which
fall by one with every call, and the limit. If they are not found, the `RecursionError` stands.

What the thread of the caller is set to is taken along (see `_record.run.thread_settings`).

Frames of Python functions need no C stack. What recurses through much else, such as `jax.jit`, does
not run again: JAX takes time in proportion to the depth for every frame that an error passes.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jedbatch._record.run.thread_settings import ThreadSettings
from jedbatch._support.frames import depth
from jedbatch._support.restored import Restored

T = TypeVar("T")

STACK_BYTES = (1 << 30, 1 << 29, 1 << 28)  # bytes, tried in this order
# Bytes of stack for each count of recursion; `sorted` takes 1,700, most take 600.
FRAME_BYTES = 1 << 14
# Of all counts, one in so many is a frame of a function that is worth running again.
COUNTS_PER_FRAME = 4
STATE_WORDS = 64  # of the state of a thread that are looked at
_IN_JAX = os.path.dirname(jax.__file__) + os.sep


class Stopped(SystemExit):
    """The thread that waits for this one was interrupted."""


def deeply(work: Callable[[], T]) -> T:
    """Returns `work()`, called again on a thread with a larger stack if it recurses too deep."""
    try:
        return work()
    except RecursionError as error:
        if not _worth_it(error):
            raise
        first = error
    outcome = _Thread(work).run()
    if not outcome:
        first.add_note(
            "Here there can be no thread with a larger stack, on which recursion may be deeper: "
            "memory is limited, or threads are greenlets. `sys.setrecursionlimit` allows more."
        )
    elif isinstance(outcome[0], RecursionError):
        first.add_note(
            f"Nor did it end on a thread for up to {STACK_BYTES[0] // FRAME_BYTES} frames."
        )
        outcome = ()
    problem, result = outcome or (first, None)
    try:
        if problem is not None:
            raise problem
        return result
    finally:
        del outcome, problem, first  # they hold on to the frames that they went through


def _worth_it(error: RecursionError) -> bool:
    """Returns whether what recursed too deep was mostly functions of Python, other than JAX's."""
    num_frames = 0
    place = error.__traceback__
    while place is not None:
        num_frames += not place.tb_frame.f_code.co_filename.startswith(_IN_JAX)
        place = place.tb_next
    return COUNTS_PER_FRAME * num_frames > sys.getrecursionlimit() - depth()


class _Thread:
    """A thread with a large stack that does some work, set to what the caller's is set to."""

    def __init__(self, work: Callable[[], Any]):
        self._work = work
        self._settings = ThreadSettings()
        self._caller = _state()
        self._outcome: tuple[Any, ...] = ()
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()
        self._begun = self._stopped = False
        self._done = threading.Event()

    def run(self) -> tuple[Any, ...]:
        """(error, result), of which one is None; nothing if there can be no such thread.

        Starts the thread and waits for its end; an interrupt stops it.
        """
        try:
            if self._start():
                self._done.wait()
        except BaseException:
            self._stop()
            raise
        return self._outcome

    def _start(self) -> bool:
        for size in STACK_BYTES:
            self._thread = thread = threading.Thread(target=self._main, args=(size // FRAME_BYTES,))
            restore = functools.partial(threading.stack_size, threading.stack_size())
            with contextlib.suppress(ValueError, RuntimeError):  # no such stack, or no room for it
                with Restored(restore), Restored(restore):
                    threading.stack_size(size)
                    thread.start()
                return True
        return False

    def _stop(self) -> None:
        """Ends the thread by an exception, or keeps it from beginning."""
        with self._gate:
            self._stopped = True
        tell = ctypes.pythonapi.PyThreadState_SetAsyncExc
        thread = self._thread
        while self._begun and thread is not None and thread.is_alive():
            tell(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
            with contextlib.suppress(KeyboardInterrupt):  # one more; the first is raised
                self._done.wait(1)

    def _main(self, limit: int) -> None:
        try:
            with self._gate:
                self._begun = not self._stopped
            if self._begun and _state() != self._caller and _set_limit(limit):
                self._outcome = None, self._settings.run(self._work)
        except BaseException as error:
            self._outcome = error, None
        finally:
            del self._work
            self._done.set()


def _state() -> int:
    """The address of the state of this thread."""
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    return get()


def _set_limit(limit: int) -> bool:
    """Sets the recursion limit of this thread; whether it could."""
    words = (ctypes.c_int * STATE_WORDS).from_address(_state())

    def look(times: int) -> list[list[int]]:
        return [list(words), *(look(times - 1) if times else ())]

    states = list(zip(*look(3), strict=True))
    usual = sys.getrecursionlimit()
    places = [
        i
        for i, (before, after) in enumerate(itertools.pairwise(states))
        if set(after) == {usual} and [before[0] - x for x in before] == [0, 1, 2, 3]
    ]
    if len(places) != 1:
        return False
    (place,) = places
    words[place] += limit - usual
    words[place + 1] = limit
    return True
