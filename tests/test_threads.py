"""One batched function, called by several threads."""

import threading

import jax.numpy as jnp
import numpy as np
import programs

import jedbatch
from jedbatch import _batch


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

    class Slow(_batch.Session):
        def __init__(self, *args):
            both.wait(timeout=60)
            super().__init__(*args)

    monkeypatch.setattr(_batch, "Session", Slow)
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
