"""One batched function, called by several threads."""

import sys
import threading
import weakref

import greenlet
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch._record import cell as _cell
from jedbatch._session import core


def test_threads_share_a_batched_function():
    fn, params, instances = programs.tree_cells(24, seed=1)
    expected = np.asarray(jedbatch.batch(fn)(params, instances))
    batched = jedbatch.batch(fn)
    got = {}

    def work(k):
        mine = instances[3 * k : 3 * k + 3]
        got[k] = np.asarray(batched(params, mine))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(8):
        np.testing.assert_allclose(got[k], expected[3 * k : 3 * k + 3], rtol=1e-5)


def test_the_first_plans_of_two_threads(monkeypatch):
    """Both have nothing yet; what one of them makes is kept, and the plan of either can run."""
    both = threading.Barrier(2)

    class Slow(core.Session):
        def __init__(self, *args, **options):
            both.wait(timeout=60)
            super().__init__(*args, **options)

    monkeypatch.setattr(core, "Session", Slow)
    batched = jedbatch.batch(jedbatch.cell(lambda p, x: p * x))
    params, plans = jnp.ones(2), []
    threads = [
        threading.Thread(target=lambda: plans.append(batched.plan(params, [params])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plan in plans:
        np.testing.assert_array_equal(batched.apply(params, plan), np.ones((1, 2)))


# --- greenlets ---


class PerGreenlet:
    """A stand-in for `threading.local` as patched by gevent: one recorder for each greenlet."""

    def __init__(self):
        self.recorders = weakref.WeakKeyDictionary()

    @property
    def recorder(self):
        return self.recorders.get(greenlet.getcurrent())

    @recorder.setter
    def recorder(self, recorder):
        self.recorders[greenlet.getcurrent()] = recorder


@pytest.fixture
def per_greenlet(monkeypatch):
    before, after = _cell.recording, PerGreenlet()
    for name, module in list(sys.modules.items()):
        if name.startswith("jedbatch.") and getattr(module, "recording", None) is before:
            monkeypatch.setattr(module, "recording", after)


@pytest.mark.usefixtures("per_greenlet")
def test_decisions_where_threads_are_greenlets():
    step = jedbatch.cell(lambda p, x: jnp.tanh(p * x))

    def fn(p, x):
        while x.sum() > 0.5:
            x = step(p, x)
        return step(p, x)

    params, instances = jnp.float32(0.8), [np.float32([1, 2]), np.float32([0, 0])]
    expected = loop(fn, params, instances)
    assert_close(jedbatch.batch(fn)(params, instances), expected, 1e-5)


@pytest.mark.usefixtures("per_greenlet")
def test_greenlets_that_record_at_the_same_time():
    """The one that comes second is refused; the first goes on as if nothing had been."""
    double = jedbatch.cell(lambda p, x: p * x)
    params = jnp.ones(2)

    def second():
        with pytest.raises(RuntimeError, match="another greenlet"), jedbatch.lazy():
            pass
        with pytest.raises(RuntimeError, match="another greenlet"):
            jedbatch.batch(double).plan(params, [params])

    with jedbatch.lazy():
        h = double(params, 2.0)
        greenlet.greenlet(second).switch()
        h = double(params, h)
    assert_close(jnp.asarray(h), jnp.full(2, 2.0), 1e-6)
