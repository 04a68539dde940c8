"""Requests to a server, against the plain loop: nothing is lost, and nothing wrong."""

import asyncio
import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close
from cases.totals import W, add, halved, total, trees

import jedbatch
from jedbatch.errors import UnfinishedLoopError
from jedbatch.serve import DeadlineExceeded, Overloaded, Server, ServerClosed


@functools.cache
def by_loop(tree, scale=1.0):
    return np.asarray(total(scale * W, tree))


def run(scenario):
    """Runs a scenario, within a minute; no thread is left."""
    result = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert not [t for t in threading.enumerate() if t.name == "jedbatch-serve"]
    return result


class Held:
    """A batched function that computes when it is told to."""

    def __init__(self):
        self.may_go, self.begun = threading.Event(), threading.Event()
        self.batched = jedbatch.batch(self.fn)

    def fn(self, w, tree):
        if tree == "hold":
            self.begun.set()
            assert self.may_go.wait(30)
            return total(w, 1.0)
        return total(w, tree)

    async def begin(self, server):
        """A request that the worker is at."""
        task = asyncio.ensure_future(server("hold"))
        await asyncio.to_thread(self.begun.wait, 30)
        assert len(server._queue) == 0
        return task


# --- results ---


def test_results_are_those_of_the_loop():
    given = trees(50)

    async def scenario():
        async with Server(jedbatch.batch(total), W, max_batch=8) as server:
            one = await server(given[0])
            results = await asyncio.gather(*map(server, given))
            return one, results, server.metrics

    one, results, metrics = run(scenario)
    assert_close([one, *results], [by_loop(given[0]), *map(by_loop, given)], 1e-6)
    assert all(type(x) is np.ndarray for x in results)
    assert (metrics.done, metrics.failed, metrics.queued, metrics.running) == (51, 0, 0, 0)
    assert sum(size * n for size, n in metrics.batch_sizes.items()) == 51
    assert max(metrics.batch_sizes) == 8


def test_functions_that_decide_on_values():
    given = trees(5, seed=1)

    async def scenario():
        async with Server(jedbatch.batch(halved), W, max_batch=4) as server:
            return await asyncio.gather(*map(server, given), return_exceptions=True)

    for (state, steps), tree in zip(run(scenario), given, strict=True):
        expected = halved(W, tree)
        assert_close(state, np.asarray(expected[0]), 1e-5)
        assert int(steps) == expected[1]


def test_several_arguments_and_none_shared():
    async def scenario():
        weighed = jedbatch.batch(lambda w, x, n: n * w * x, in_axes=(None, 0, 0))
        async with Server(weighed, W) as server:
            with pytest.raises(TypeError, match="got 1 mapped arguments; expected 2"):
                await server(1.0)
            both = await server(1.0, 2.0)
        async with Server(jedbatch.batch(lambda x: 2 * jnp.float32(x), in_axes=0)) as server:
            assert server.params == ()
            return both, await server(3.0)

    both, doubled = run(scenario)
    assert_close(both, np.asarray(2 * W), 1e-6)
    assert doubled == 6


def test_after_warming_nothing_is_compiled():
    sample, given = trees(40), trees(60, seed=1)

    async def scenario():
        batched = jedbatch.batch(total)
        async with Server(batched, W, max_batch=8) as server:
            await server.warm(sample)
            before = batched.compilations
            results = []
            for first in range(0, 60, 7):
                for size in (1, 2, 7):
                    some = given[first : first + size]
                    results += zip(some, await asyncio.gather(*map(server, some)), strict=True)
            await server.swap(2 * W)
            results.append((given[0], await server(given[0]) / 1))
            assert server.metrics.compilations == batched.compilations == before
            return results

    *results, (tree, last) = run(scenario)
    for tree, result in results:
        assert_close(result, by_loop(tree), 1e-6)
    assert_close(last, by_loop(given[0], 2.0), 1e-6)


def test_the_collector_of_garbage_is_left_alone():
    """Python, and the process that a server is part of, say when it runs."""
    given, collected = trees(12, seed=3), []

    def note(phase, info):
        collected.append((phase, info["generation"]))

    async def scenario():
        async with Server(jedbatch.batch(total, cache_size=4), W, max_batch=8) as server:
            await server.warm(given)
            gc.callbacks.append(note)
            for tree in given:
                await server(tree)
            return server.metrics.minibatches

    thresholds = gc.get_threshold()
    gc.set_threshold(1 << 30)  # so many objects that Python does nothing by itself
    try:
        assert run(scenario) == len(given)
        assert not collected
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)


def test_requests_that_come_while_it_works_join_the_next_minibatch():
    held, given = Held(), trees(5)

    async def scenario():
        async with Server(held.batched, W, max_batch=16) as server:
            first = await held.begin(server)
            others = [asyncio.ensure_future(server(tree)) for tree in given]
            await asyncio.sleep(0)
            assert (server.metrics.queued, server.metrics.running) == (5, 1)
            held.may_go.set()
            return await asyncio.gather(first, *others), server.metrics.batch_sizes

    (_, *results), sizes = run(scenario)
    assert_close(results, list(map(by_loop, given)), 1e-6)
    assert sizes == {1: 1, 5: 1}


def test_waiting_for_others():
    """Minibatches are closed when they are full, or when the oldest request has waited."""

    async def scenario():
        async with Server(jedbatch.batch(total), W, max_batch=4, max_wait_ms=60_000) as server:
            tasks = []
            for tree in trees(4):
                tasks.append(asyncio.ensure_future(server(tree)))
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            assert server.metrics.batch_sizes == {4: 1}
        async with Server(jedbatch.batch(total), W, max_batch=4, max_wait_ms=50) as server:
            await asyncio.gather(*map(server, trees(3)))
            return server.metrics.batch_sizes

    assert run(scenario) == {3: 1}


def test_requests_join_running_rounds():
    """Where a function decides on values, short requests are answered while a long one runs."""
    may_end = threading.Event()

    def fn(w, tree):
        state = total(w, 1.0 if tree == "long" else tree)
        while state.sum() > -1 and tree == "long" and not may_end.is_set():
            state = add(w, state, 0.5)
        return state

    given = trees(4)

    async def scenario():
        async with Server(jedbatch.batch(fn), W, max_batch=4) as server:
            long = asyncio.ensure_future(server("long"))
            results = [await server(tree) for tree in given]
            assert not long.done()
            swapped = asyncio.ensure_future(server.swap(2 * W))
            late = asyncio.ensure_future(server(given[0]))
            await asyncio.sleep(0.1)
            assert not late.done()  # it waits for the new ones, and those for the long one
            may_end.set()
            await asyncio.gather(long, swapped)
            return results, await late

    results, late = run(scenario)
    assert_close(results, list(map(by_loop, given)), 1e-6)
    assert_close(late, by_loop(given[0], 2.0), 1e-6)


def test_after_warming_rounds_compile_nothing():
    given = trees(12, seed=2)

    async def scenario():
        batched = jedbatch.batch(halved)
        async with Server(batched, W, max_batch=4) as server:
            await server.warm(given)
            before = batched.compilations
            for size in (1, 3, 12):
                await asyncio.gather(*map(server, given[::-1][:size]))
            return batched.compilations - before

    assert run(scenario) == 0


# --- requests that never end ---


def endless(w, tree):
    """Decides on values for ever where a tree is "never"; a long one takes 30 rounds."""
    state, steps = total(w, 1.0 if isinstance(tree, str) else tree), 0
    while state.sum() > -99 and (tree == "never" or (tree == "long" and steps < 30)):
        state, steps = add(w, state, 0.5), steps + 1
    return state


def slow(tree):
    return np.asarray(endless(W, tree))


def test_a_request_that_takes_too_many_rounds_fails_alone():
    given = [*trees(3), "long", "never", *trees(3, seed=1), "never"]

    async def scenario():
        async with Server(jedbatch.batch(endless, max_steps=40), W, max_batch=4) as server:
            return await asyncio.gather(*map(server, given), return_exceptions=True)

    for tree, result in zip(given, run(scenario), strict=True):
        if isinstance(tree, str) and tree == "never":
            named = r"max_steps=40, and instance 0 needs values to decide on in `endless`"
            with pytest.raises(UnfinishedLoopError, match=named):
                raise result
            assert result.instances == (0,)
        else:
            assert_close(result, slow(tree), 1e-6)


@jedbatch.cell
def counted(w, n, x):
    """A loop of JAX that never ends where n is below zero."""
    return jax.lax.while_loop(
        lambda c: c[0] != 0, lambda c: (c[0] - 1, jnp.tanh(c[1] * w)), (n, x)
    )[1]


def counted_if_large(w, instance):
    """The same, where Python decides on a value before."""
    n, x = instance
    return counted(w, n, x) if jnp.abs(x).max() > 0.5 else x


@pytest.mark.parametrize("fn", [lambda w, instance: counted(w, *instance), counted_if_large])
def test_a_request_with_a_loop_of_jax_that_never_ends_fails_alone(fn):
    given = [(np.int32(n), np.ones(W.shape[0], np.float32)) for n in (3, 5, -1, 2, 0)]

    async def scenario():
        async with Server(jedbatch.batch(fn, max_steps=7), W, max_batch=4) as server:
            return await asyncio.gather(*map(server, given), return_exceptions=True)

    for (n, x), result in zip(given, run(scenario), strict=True):
        if n < 0:
            with pytest.raises(UnfinishedLoopError, match=r"max_steps=7, and a loop in `counted\("):
                raise result
        else:
            assert_close(result, np.asarray(counted(W, n, x)), 1e-6)


@pytest.mark.parametrize("how", ["deadline", "cancelled", "left"])
def test_an_instance_ends_when_nobody_waits_for_it(how):
    """Also where it cleans up with values of its own; the others go on."""
    cleaned, begun = [], threading.Event()

    def fn(w, tree):
        try:
            if isinstance(tree, str) and tree == "never":
                begun.set()
            return endless(w, tree)
        finally:
            if isinstance(tree, str) and tree == "never":
                cleaned.append(add(w, total(w, 1.0), 0.5))

    async def scenario():
        results = []
        async with Server(jedbatch.batch(fn), W, max_batch=4) as server:
            await server.warm([1.0, 2.0])
            never = asyncio.ensure_future(
                server("never", deadline_ms=300 if how == "deadline" else None)
            )
            await asyncio.to_thread(begun.wait, 30)
            beside = asyncio.ensure_future(server("long"))
            if how == "left":
                results.append(await beside)
                await server.close(drain=False)
            elif how == "cancelled":
                never.cancel()
            (ended,) = await asyncio.gather(never, return_exceptions=True)
            if how != "left":
                results += [await beside, await server("long")]
        return ended, results

    ended, results = run(scenario)
    error = {
        "deadline": DeadlineExceeded,
        "cancelled": asyncio.CancelledError,
        "left": ServerClosed,
    }
    assert isinstance(ended, error[how])
    assert len(cleaned) == 1
    assert_close(results, [slow("long")] * len(results), 1e-6)


def test_deadlines_hold_after_a_round_has_failed():
    """Instances run by halves then, and one that never ends leaves the others."""

    def read(x):
        if np.isnan(x).any():
            raise ArithmeticError("no such state")
        return x

    @jedbatch.cell
    def checked(state):
        return jax.pure_callback(read, state, state, vmap_method="sequential")

    def fn(w, tree):
        if isinstance(tree, tuple):
            return checked(tree[0]) * (1 if checked(tree[0]).sum() > 0 else 2)
        return endless(w, tree)

    async def scenario():
        async with Server(jedbatch.batch(fn), W, max_batch=4) as server:
            never = server("never", deadline_ms=3000)
            bad = server((np.full(4, np.nan, np.float32),))
            return await asyncio.gather(never, bad, server(3.0), return_exceptions=True)

    never, bad, good = run(scenario)
    assert isinstance(never, DeadlineExceeded)
    assert isinstance(bad, RuntimeError)
    assert "no such state" in str(bad)
    assert_close(good, slow(3.0), 1e-6)


# --- requests that fail ---


@pytest.mark.parametrize("fn", [total, halved])
def test_a_bad_instance_fails_alone(fn):
    given = trees(8)
    given[3], given[7] = "word", (1.0, (None, 2.0))

    async def scenario():
        async with Server(jedbatch.batch(fn), W, max_batch=16) as server:
            results = await asyncio.gather(*map(server, given), return_exceptions=True)
            return results, server.metrics

    results, metrics = run(scenario)
    for i, (tree, result) in enumerate(zip(given, results, strict=True)):
        if i in (3, 7):
            assert isinstance(result, TypeError)
        else:
            assert_close(
                jax.tree.leaves(result)[0], np.asarray(jax.tree.leaves(fn(W, tree))[0]), 1e-5
            )
    assert (metrics.done, metrics.failed) == (6, 2)


def test_a_word_that_is_not_there_fails_alone():
    """Planning finds the error, not recording."""
    look = jedbatch.cell(lambda table, word: table[word])

    async def scenario():
        async with Server(jedbatch.batch(look), jnp.eye(4)) as server:
            return await asyncio.gather(*map(server, [0, 3, 9, 1]), return_exceptions=True)

    results = run(scenario)
    assert isinstance(results[2], IndexError)
    assert_close(
        [results[i] for i in (0, 1, 3)], [np.eye(4, dtype=np.float32)[i] for i in (0, 3, 1)], 0
    )


def test_an_instance_that_fails_while_it_is_computed():
    def checked(x):
        if x == 2:
            raise ValueError("two")
        return x

    def fn(w, x):
        return jax.pure_callback(checked, jax.ShapeDtypeStruct((), np.float32), w * x)

    async def scenario():
        async with Server(jedbatch.batch(fn), jnp.float32(1)) as server:
            given = [np.float32(x) for x in range(5)]
            return await asyncio.gather(*map(server, given), return_exceptions=True)

    results = run(scenario)
    assert "two" in str(results.pop(2))
    assert results == [0, 1, 3, 4]


def test_an_error_that_futures_refuse():
    def stops(w, x):
        raise StopIteration

    async def scenario():
        async with Server(jedbatch.batch(stops), W) as server:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await server(1.0)

    run(scenario)


# --- the bound of the queue ---


def test_a_full_queue_refuses():
    held, given = Held(), trees(4)

    async def scenario():
        async with Server(held.batched, W, max_queue=3) as server:
            first = await held.begin(server)
            others = [asyncio.ensure_future(server(tree)) for tree in given[:3]]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="3 others wait"):
                await server(given[3])
            held.may_go.set()
            return await asyncio.gather(first, *others), server.metrics

    (_, *results), metrics = run(scenario)
    assert_close(results, list(map(by_loop, given[:3])), 1e-6)
    assert (metrics.done, metrics.refused) == (4, 1)


def test_a_full_queue_makes_wait():
    held, given = Held(), trees(30)

    async def scenario():
        async with Server(held.batched, W, max_queue=3, max_batch=2, when_full="wait") as server:
            first = await held.begin(server)
            others = [asyncio.ensure_future(server(tree)) for tree in given]
            await asyncio.sleep(0)
            assert server.metrics.queued == 30
            others[0].cancel()
            others[20].cancel()
            await asyncio.sleep(0)
            assert server.metrics.queued == 28
            held.may_go.set()
            return await asyncio.gather(first, *others, return_exceptions=True)

    _, *results = run(scenario)
    for i, (tree, result) in enumerate(zip(given, results, strict=True)):
        if i in (0, 20):
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert_close(result, by_loop(tree), 1e-6)


# --- deadlines and cancellation ---


@pytest.mark.parametrize("of_server", [True, False])
def test_deadlines(of_server):
    held, tree = Held(), trees(1)[0]
    options = {"deadline_ms": 20.0}

    async def scenario():
        async with Server(held.batched, W, **(options if of_server else {})) as server:
            first = asyncio.ensure_future(server("hold", deadline_ms=60_000))
            await asyncio.to_thread(held.begun.wait, 30)
            with pytest.raises(DeadlineExceeded, match="not done in 20 ms"):
                await server(tree, **({} if of_server else options))
            assert len(server._queue) == 0
            held.may_go.set()
            await first
            return server.metrics

    metrics = run(scenario)
    assert (metrics.done, metrics.expired, metrics.cancelled) == (1, 1, 0)
    assert metrics.batch_sizes == {1: 1}  # the late one was never computed


def test_cancelled_requests():
    """One that waits leaves the queue; one that is computed does no harm to the others."""
    held, given = Held(), trees(3)

    async def scenario():
        async with Server(held.batched, W) as server:
            first = await held.begin(server)
            others = [asyncio.ensure_future(server(tree)) for tree in given]
            await asyncio.sleep(0)
            others[1].cancel()
            first.cancel()
            await asyncio.sleep(0)
            assert len(server._queue) == 2
            held.may_go.set()
            results = await asyncio.gather(*others, return_exceptions=True)
            return results, server.metrics

    results, metrics = run(scenario)
    assert isinstance(results[1], asyncio.CancelledError)
    assert_close([results[0], results[2]], [by_loop(given[0]), by_loop(given[2])], 1e-6)
    assert (metrics.done, metrics.cancelled) == (2, 2)


def test_timeouts_of_the_function_are_its_own():
    def late(w, x):
        raise TimeoutError("of the function")

    async def scenario():
        async with Server(jedbatch.batch(late), W, deadline_ms=10_000) as server:
            with pytest.raises(TimeoutError, match="of the function") as caught:
                await server(1.0)
            assert not isinstance(caught.value, DeadlineExceeded)

    run(scenario)


# --- shared arguments ---


def test_shared_arguments_are_replaced_between_minibatches():
    held, given = Held(), trees(3)

    async def scenario():
        async with Server(held.batched, W) as server:
            first = await held.begin(server)  # with the old ones
            others = [asyncio.ensure_future(server(tree)) for tree in given]
            server.params = np.asarray(2 * W)
            swapped = asyncio.ensure_future(server.swap(3 * W))
            await asyncio.sleep(0)
            assert not swapped.done()
            held.may_go.set()
            results = await asyncio.gather(first, *others)
            await swapped
            assert_close(server.params, 3 * W, 0)
            return [*results, await server(given[0])], server.metrics.swaps

    (first, *others, last), swaps = run(scenario)
    assert_close(first, by_loop(1.0), 1e-6)
    assert_close([*others, last], [by_loop(tree, 3.0) for tree in [*given, given[0]]], 1e-6)
    assert swaps == 2


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"w": jnp.ones(4), "b": 1.0}, r"f32\[4\] at \[0\]\['w'\]"),
        ({"w": jnp.ones(3, jnp.int32), "b": 1.0}, r"i32\[3\]"),
        ({"w": jnp.ones(3)}, "of structure"),
    ],
)
def test_other_shared_arguments_are_refused(wrong, match):
    batched = jedbatch.batch(lambda p, x: p["w"] * x + p["b"])

    async def scenario():
        async with Server(batched, {"w": W, "b": 1.0}) as server:
            with pytest.raises(ValueError, match=match):
                await server.swap(wrong)
            with pytest.raises(ValueError, match="got 2 shared arguments"):
                await server.swap(W, W)
            return await server(2.0), server.metrics.swaps

    result, swaps = run(scenario)
    assert_close(result, np.asarray(2 * W + 1), 1e-6)
    assert swaps == 0


# --- the end ---


def test_leaving_answers_those_who_wait():
    held, given = Held(), trees(4)

    async def scenario():
        async with Server(held.batched, W, max_batch=2) as server:
            tasks = [await held.begin(server)]
            tasks += [asyncio.ensure_future(server(tree)) for tree in given]
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.1, held.may_go.set)
        assert all(task.done() for task in tasks)
        with pytest.raises(ServerClosed):
            await server(1.0)
        return await asyncio.gather(*tasks)

    assert_close(run(scenario)[1:], list(map(by_loop, given)), 1e-6)


def test_leaving_by_an_error_refuses_those_who_wait():
    held, given = Held(), trees(4)

    async def scenario():
        async def leave(server):
            async with server:
                first = await held.begin(server)
                others = [asyncio.ensure_future(server(tree)) for tree in given]
                tasks.extend([first, *others])
                await asyncio.sleep(0)
                asyncio.get_running_loop().call_later(0.1, held.may_go.set)
                raise KeyError

        tasks, server = [], Server(held.batched, W)
        with pytest.raises(KeyError):
            await leave(server)
        first, *others = tasks
        assert_close(await first, by_loop(1.0), 1e-6)  # it was computed already
        return await asyncio.gather(*others, return_exceptions=True), server.metrics.refused

    results, refused = run(scenario)
    assert [type(x) for x in results] == [ServerClosed] * 4
    assert refused == 4


def test_a_thread_that_fails_closes_the_server(monkeypatch):
    async def scenario():
        async with Server(jedbatch.batch(total), W) as server:
            monkeypatch.setattr(server._worker, "_begin", None)
            with pytest.raises(ServerClosed, match="its thread failed with TypeError"):
                await server(1.0)
            with pytest.raises(ServerClosed):
                await server(1.0)

    run(scenario)


def test_the_event_loop_is_not_blocked():
    held = Held()

    async def scenario():
        async with Server(held.batched, W) as server:
            first = await held.begin(server)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not first.done()
            held.may_go.set()
            await first

    run(scenario)


def test_what_makes_no_server():
    batched = jedbatch.batch(total)
    with pytest.raises(TypeError, match=r"what `jedbatch\.batch` returned"):
        Server(total, W)
    with pytest.raises(ValueError, match="got 0 shared arguments"):
        Server(batched)
    with pytest.raises(ValueError, match="max_batch=0"):
        Server(batched, W, max_batch=0)
    with pytest.raises(ValueError, match="when_full='drop'"):
        Server(batched, W, when_full="drop")
    with pytest.raises(ValueError, match="deadline_ms=0"):
        Server(batched, W, deadline_ms=0)
    with pytest.raises(TypeError, match="expected arrays with values"):
        Server(batched, jax.ShapeDtypeStruct((3,), np.float32))

    async def scenario():
        server = Server(batched, W)
        with pytest.raises(RuntimeError, match="needs `async with server:`"):
            await server(1.0)
        async with server:
            with pytest.raises(ValueError, match="`warm` got no instance"):
                await server.warm([])
            with pytest.raises(TypeError):
                await server.warm(["word"])
            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(server(1.0)))
        with pytest.raises(RuntimeError, match="a second time"):
            await server.__aenter__()

    run(scenario)


# --- many at a time ---


async def storm(server, given, swaps, seed):
    """Many requests, some bad, some cancelled, with shared arguments replaced meanwhile."""
    rng = np.random.default_rng(seed)
    outcomes = {}

    async def ask(i, tree):
        try:
            outcomes[i] = await server(tree)
        except Exception as error:
            outcomes[i] = error

    tasks, scale, bad, cancelled = [], 1.0, set(), set()
    for i, tree in enumerate(given):
        if rng.random() < 0.03:
            bad.add(i)
            tree = (tree, "word")
        tasks.append(asyncio.ensure_future(ask(i, tree)))
        if rng.random() < 0.03:
            cancelled.add(i)
            asyncio.get_running_loop().call_later(rng.random() / 500, tasks[-1].cancel)
        if i % 16 == 15:
            await asyncio.sleep(rng.random() / 500)
        if (i + 1) % (len(given) // swaps) == 0:
            scale += 1
            await server.swap(scale * W)
    await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes, bad, cancelled, scale


def check_storm(given, outcomes, bad, cancelled, scales):
    for i, tree in enumerate(given):
        if i not in outcomes:
            assert i in cancelled
        elif i in bad:
            assert isinstance(outcomes[i], TypeError)
        else:
            near = [np.allclose(outcomes[i], by_loop(tree, float(s)), rtol=1e-4) for s in scales]
            assert any(near), i
    assert len(outcomes) > len(given) * 0.9


@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_nothing_is_lost_and_nothing_wrong(count):
    few = trees(60)
    given = [few[i % 60] for i in range(count)]

    async def scenario():
        async with Server(jedbatch.batch(total), W, max_batch=32, max_queue=count) as server:
            found = await storm(server, given, swaps=4, seed=0)
            return found, server.metrics

    (outcomes, bad, cancelled, scale), metrics = run(scenario)
    check_storm(given, outcomes, bad, cancelled, np.arange(1, scale + 1))
    assert metrics.done + metrics.failed == len(outcomes)
    assert metrics.cancelled == count - len(outcomes)
    assert (metrics.queued, metrics.running, metrics.swaps) == (0, 0, 4)
