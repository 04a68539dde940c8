"""Traced values that outlive their trace: kept by the user, or by the caches of libraries.

`jax.checking_leaks` takes every traced value that is alive for an escape. JAX itself and libraries
such as Equinox keep programs in caches, and traced values that these close over; nobody meets them
again. So where it finds something we look who holds the values, from holder to holder: what leads
to caches and to installed packages only is none.
"""

import contextlib
import gc
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

from jax.core import Tracer

from jedbatch._record.identity.functions import is_installed
from jedbatch._support.native import function_types
from jedbatch._support.types import Leaf

CACHES = ("WeakrefLRUCache", "_lru_cache_wrapper")
CONTAINERS = (list, dict, tuple, set)
FROZEN_BY_PYTHON = 1000  # objects at most: 3.12 freezes some hundred as it starts
COUNTED_FOR = 1.0  # seconds that objects are taken to stay frozen; counting looks at each
_frozen_until = 0.0  # by `time.monotonic`


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within it the collector of garbage looks at what is made there, and at nothing older.

    `jax.checking_leaks` collects all of Python's garbage up to once a trace, a tenth of a second
    where a program holds a million objects. What the caller has frozen stays frozen.
    """
    global _frozen_until
    now = time.monotonic()
    if now > _frozen_until and gc.get_freeze_count() > FROZEN_BY_PYTHON:
        _frozen_until = now + COUNTED_FOR
    if now <= _frozen_until:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_tracers() -> list[Any]:
    """All traced values that there are."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), Tracer)]


def is_kept(tracers: Sequence[Leaf], before: set[int]) -> bool:
    """Returns whether code that is not of an installed package can reach some of these.

    `before` has the ids of what there was before these were made; newer things do not count.
    """
    layer: Any = list(tracers)
    seen_ids = {id(tracers), *map(id, tracers)}
    while layer:
        seen_ids.add(id(layer))
        holders = gc.get_referrers(*layer)
        seen_ids.add(id(holders))
        referents = {id(x) for holder in holders for x in gc.get_referents(holder)}
        if any(
            isinstance(x, CONTAINERS) and id(x) not in referents and id(x) in before for x in layer
        ):
            return True  # by a function that runs
        new = [x for x in holders if id(x) not in seen_ids and not _is_cache(x)]
        if any(id(x) in before and _is_of_user(x) for x in new):
            return True
        seen_ids |= set(map(id, new))
        layer = [x for x in new if not _is_end(x)]
        del new, holders
    return False


def _is_cache(x: object) -> bool:
    return type(x).__name__ in CACHES


def _is_module(x: object) -> bool:
    return type(x) is dict and "__name__" in x and "__spec__" in x


def _is_end(x: object) -> bool:
    """Returns whether who holds it does not matter."""
    return _is_module(x) or isinstance(x, types.FrameType | types.ModuleType)


def _is_of_user(x: Leaf) -> bool:
    if isinstance(x, types.FrameType):
        return not is_installed(x.f_globals.get("__name__", ""))
    if _is_module(x):
        return not is_installed(x["__name__"])
    module = x.__module__ if isinstance(x, function_types()) else type(x).__module__
    return not is_installed(module or "")
