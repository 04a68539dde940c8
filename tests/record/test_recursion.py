"""Recursion: as deep as instances are nested, and an error, not a crash, where it has no end."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from _thread import interrupt_main

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch

DEPTH = 3000  # frames; Python allows 1,000
P = jnp.float32(0.5)


def deep(depth, at_the_end):
    """A function of an instance that does something `depth` frames below, and adds 1 in each."""

    def fn(p, n):
        return at_the_end(p) if n == 0 else fn(p, n - 1) + 1.0

    return jedbatch.batch(fn), [depth, 2]


@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_what_recurses_deep_sees_what_its_caller_set():
    """Settings of JAX, and the transformations around the call and inside of the function."""
    seen = []

    def end(p):
        config = jax.config
        seen.append((config.jax_numpy_dtype_promotion.value, config.jax_default_matmul_precision))
        return p * outer

    def total(p, q):
        nonlocal outer
        outer = q
        batched, instances = deep(DEPTH, end)
        return batched(p, instances).sum()

    outer = P
    with jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        slopes = jax.grad(total, (0, 1))(P, P)
        number = jax.jit(total)(P, P)
    assert set(seen) == {("strict", "highest")}
    assert_close(jnp.stack(slopes), jnp.ones(2, jnp.float32), 1e-6)
    assert_close(number, jnp.float32(2 * 0.25 + DEPTH + 2), 1e-6)


def test_deep_decisions():
    """Instances that wait do so on the stack of the thread that has room for them."""
    batched, instances = deep(DEPTH, lambda p: p if p > 0 else -p)
    for sign in (1, -1):
        got = batched(sign * P, instances)
        assert_close(got, jnp.float32([DEPTH + 0.5, 2.5]), 1e-6)
    assert threading.stack_size() == 0


def test_an_error_far_down():
    def fail(p):
        raise KeyError("far down")

    batched, instances = deep(DEPTH, fail)
    with pytest.raises(KeyError, match="far down") as error:
        batched(P, instances)
    assert "instance 0" in str(error.value.__notes__)
    assert gc.isenabled()


MOST_SECONDS = 30  # to wait for an interrupt


@pytest.fixture
def heeds_interrupts():
    """Also where the shell that started the tests in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_an_interrupt_stops_what_recurses_deep():
    went_on = []

    def wait(p):
        interrupt_main()
        end = time.monotonic() + MOST_SECONDS
        while time.monotonic() < end:
            went_on.append(time.sleep(0.001))
        return p

    batched, instances = deep(DEPTH, wait)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        batched(P, instances)
    assert threading.active_count() == threads
    assert gc.isenabled()
    batched, instances = deep(DEPTH, lambda p: p)
    assert_close(batched(P, instances), jnp.float32([DEPTH + 0.5, 2.5]), 1e-6)


CRASHES = """
    import copy, functools, json, sys, threading
    import jax, jax.numpy as jnp, jedbatch

    def through_map(x): return list(map(through_map, [x]))
    def through_sorted(x): return sorted([x, x], key=through_sorted)
    def through_partial(x): return functools.partial(through_partial, x)()
    def through_tree(x): return jax.tree.map(through_tree, [x])
    def through_jit(x): return jax.jit(through_jit)(x)
    def plain(x): return plain(x)
    def through_json(x): return json.loads("[" * 200_000)
    class Endless:
        def __repr__(self): return repr(Endless())
    def through_repr(x): return repr(Endless())

    def must_end(run):
        try:
            run()
        except RecursionError:
            return
        raise AssertionError(run)

    def in_another_thread(x):
        ended = []
        def run():
            must_end(lambda: through_map(0))
            ended.append(True)
        thread = threading.Thread(target=run)
        thread.start(), thread.join()
        assert ended
        return x

    def deep(p, n):
        return deep(p, n - 1) if n else in_another_thread(p)

    one = [jnp.ones(3)]
    for way in [through_map, through_sorted, through_partial, through_tree, through_jit, plain,
                through_json, through_repr]:
        must_end(lambda: jedbatch.batch(lambda p, x: way(x)).plan(jnp.ones(3), one))
    jedbatch.batch(deep).plan(jnp.ones(3), [10, 3000])
    with jedbatch.lazy():
        must_end(lambda: through_map(0))
    assert sys.getrecursionlimit() == 1000
    print("all ended")
"""


def test_recursion_without_an_end_is_an_error():
    """Also through C code, whose stack ends before a limit for deep recursion is reached."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CRASHES)], capture_output=True, text=True
    )
    assert run.stdout.endswith("all ended\n"), (run.returncode, run.stderr[-2000:])


def test_recursion_in_a_lazy_scope():
    def endless():
        return endless()

    with pytest.raises(RecursionError) as error, jedbatch.lazy():
        endless()
    assert "sys.setrecursionlimit" in str(error.value.__notes__)


# --- what holds itself ---

CIRCLE = [1]
CIRCLE.append(CIRCLE)


@jedbatch.cell
def with_options(p, *, options):
    return p


@pytest.mark.parametrize(
    ("fn", "params", "message"),
    [
        (lambda p, x: x, CIRCLE, "shared argument"),
        (lambda p, x: CIRCLE, P, "result of the function"),
        (lambda p, x: {"a": (x, CIRCLE)} if x.sum() < 99 else x, P, "result of the function"),
        (lambda p, x: jedbatch.cell(lambda p, x: p)(p, CIRCLE), P, "argument of cell"),
        (lambda p, x: with_options(p, options=CIRCLE), P, "argument `options`"),
        (lambda p, x: jedbatch.cell(lambda p: CIRCLE)(p), P, "result of cell"),
    ],
)
def test_what_holds_itself(fn, params, message):
    with pytest.raises(ValueError, match=rf"{message}.* a list that holds itself"):
        jedbatch.batch(fn)(params, [np.ones(2, np.float32)])


def test_results_nested_too_deep():
    nested = []
    for _ in range(DEPTH):
        nested = [nested]
    with pytest.raises(RecursionError, match="deeper than JAX can look into"):
        jedbatch.batch(lambda p, x: nested).plan(P, [1])
