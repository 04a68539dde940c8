"""Garbage collection of a server: which generation is collected when, and that nothing stays."""

import asyncio
import collections
import gc
import sys
import threading
import weakref

import pytest
from cases.totals import W, total, trees

import jedbatch
from jedbatch.serve import Server
from jedbatch.serve.garbage import Garbage


@pytest.fixture
def collected():
    """Generations that were collected, with the thread that did so; settings are put back."""
    found = []

    def note(phase, info):
        if phase == "stop":
            found.append((threading.current_thread().name, info["generation"]))

    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    (gc.enable if was_enabled else gc.disable)()


def serve(requests, given, keep=1):
    """Serves requests one after the other; returns (minibatches, cycles that were left).

    Each comes with an object that refers to itself, and lives for so many requests.
    """
    left, kept, most = set(), collections.deque(maxlen=keep), 0

    class Cycle:
        def __init__(self, number):
            self.own = self
            left.add(number)
            weakref.finalize(self, left.remove, number)

    async def scenario():
        nonlocal most
        async with Server(jedbatch.batch(total, cache_size=8), W, max_batch=8) as server:
            for i in range(requests):
                kept.append(Cycle(i))
                await server(given[i % len(given)])
                most = max(most, len(left))
            return server.metrics.minibatches

    return asyncio.run(scenario()), most


@pytest.mark.parametrize("off", ["", "disabled", "threshold"])
def test_after_each_minibatch(collected, off):
    """Where a cache frees as much as comes, Python seldom does; none where it is turned off."""
    (gc.disable if off == "disabled" else gc.enable)()
    if off == "threshold":
        gc.set_threshold(0)
    minibatches, _ = serve(40, trees(40, seed=3))
    assert minibatches == 40
    by_worker = [generation for name, generation in collected if name == "jedbatch-serve"]
    assert not by_worker if off else len(by_worker) >= 40


def test_garbage_that_outlives_its_minibatch(collected):
    """Collections of the youngest alone would leave all of it."""
    gc.enable()
    _, most = serve(400, trees(1))
    assert most < 100


def test_generations(collected):
    """By thresholds, and the oldest only where memory has grown."""
    gc.enable()
    gc.set_threshold(1 << 20, 3, 2)  # so many that Python does nothing by itself
    gc.collect()
    garbage, thrice = Garbage(), [0] * 4 + [1]
    for grown, last in ((False, [1]), (True, [2]), (False, [1])):
        first = len(collected)
        garbage._blocks = 1 if grown else 2 * sys.getallocatedblocks()
        for _ in range(20):
            garbage.collect()
        found = [generation for _, generation in collected[first:]]
        assert found == thrice * 3 + [0] * 4 + last
        if not grown:
            gc.collect()
            assert not garbage._has_grown()
            assert garbage._blocks < 1.5 * sys.getallocatedblocks()  # what it was then
