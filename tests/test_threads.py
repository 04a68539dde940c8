"""One batched function, called by several threads."""

import threading

import numpy as np
import programs

import jedbatch


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
