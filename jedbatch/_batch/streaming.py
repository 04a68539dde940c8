"""Streams: results of any number of instances, one by one, in bounded memory.

A thread reads instances, plans minibatches of them and hands these to the device, a few ahead; the
results of one are read while the next are computed. Planned minibatches run on the device, so the
thread has them begin as soon as they are planned, and nobody waits for whoever uses the results.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jedbatch import checks
from jedbatch._batch.ahead import MAX_AHEAD, made_ahead
from jedbatch._batch.one_by_one import OneByOne, settled
from jedbatch._record.run.thread_settings import ThreadSettings
from jedbatch._session.core import Core
from jedbatch._support.types import PyTree

MAX_BATCH = 1 << 20


Begun = tuple[int, Sequence[tuple], Callable[[], list[PyTree]] | None]  # see `_begun`


def stream(core: Core, args: tuple, batch_size: int, ahead: int, ordered: bool) -> Iterator[Any]:
    """Yields the results of any number of instances; see `Batched.stream`."""
    checks.whole("stream", "batch_size", batch_size, least=1, most=MAX_BATCH)
    checks.whole("stream", "ahead", ahead, least=0, most=MAX_AHEAD)
    checks.flag("stream", "ordered", ordered)
    shared, rows = core.arguments.streams(args)
    one_by_one = OneByOne("stream", core, shared)
    minibatches = (_begun(one_by_one, shared, *x) for x in minibatches_of(rows, batch_size))
    settings = ThreadSettings()

    def run(instances: Sequence[tuple]) -> list[PyTree]:
        return settings.run(lambda: one_by_one.run(shared, instances))

    return _results(made_ahead(minibatches, ahead, ThreadSettings()), run, ordered)


def _begun(
    one_by_one: OneByOne, shared: tuple[Any, ...], first: int, instances: Sequence[tuple]
) -> Begun:
    """Plans a minibatch, and has the device begin.

    Returns (the number of its first instance, the mapped arguments of each, what waits for the
    results; None if it could not be planned).
    """
    try:
        plan = one_by_one.plan(shared, instances)
        return first, instances, one_by_one.start(shared, instances, plan)
    except Exception:  # in its turn, and once it is known whose it is
        return first, instances, None


def minibatches_of(rows: Iterator[tuple], size: int) -> Iterator[tuple[int, list[tuple]]]:
    """Yields (the number of its first instance, mapped arguments of each) of each minibatch.

    An error of the iterator is raised after the minibatch that was begun.
    """
    first, error = 0, None
    while error is None:
        found: list[tuple] = []
        try:
            for row in itertools.islice(rows, size):
                found.append(row)  # each, so that an error leaves those before it
        except Exception as raised:
            error = raised
        if found:
            yield first, found
        elif error is None:
            return
        first += len(found)
    error.add_note(f"This happened where instance {first} of a stream was read.")
    raise error


def _results(
    minibatches: Iterator[Begun], run: Callable[[Sequence[tuple]], list[PyTree]], ordered: bool
) -> Iterator[Any]:
    """Yields the results of minibatches, those of some by halves (see `settled`)."""
    with contextlib.closing(minibatches):  # type: ignore[type-var]
        for first, instances, fetch in minibatches:
            for number, (result, error) in enumerate(settled(run, instances, fetch), first):
                if error is not None:
                    error.add_note(
                        f"This happened in instance {number} of a stream, which was run by itself, "
                        "so that it is number 0 elsewhere in this message."
                    )
                    raise error
                yield result if ordered else (number, result)
