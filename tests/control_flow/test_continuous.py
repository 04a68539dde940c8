"""Rounds that instances join, against the plain loop; how many there are, and who leaves when."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values
from cases.helpers import assert_close, mostly_slow

import jedbatch
from jedbatch._batch.batched import core_of
from jedbatch._control_flow.continuous import GENERATION, Continuous, Joining
from jedbatch._control_flow.workspace import Workspace

W = jnp.linspace(0.5, 1.5, 3)
step = jedbatch.cell(lambda w, x: jnp.tanh(w * x), name="step")


def steps(w, n):
    """Waits n times for a value."""
    x = step(w, 1.0 + n)
    for _ in range(n):
        assert x.sum() > 0
        x = step(w, x)
    return x


def never(token):
    """Nobody is told to end."""


def served(fn, params, instances, room, seed=None):
    """Lets instances join at random, or as soon as they may; (results, order, those left)."""
    core = core_of(jedbatch.batch(fn))
    coming = iter([Joining(i, (x,)) for i, x in enumerate(instances)])
    rng = np.random.default_rng(seed)
    results, order, left = {}, [], []

    def take(most):
        most = most if seed is None else int(rng.integers(0, most + 1))
        return list(itertools.islice(coming, most))

    def give(some):
        order.extend(token for token, _ in some)
        results.update((t, x.result if x.error is None else x.error) for t, x in some)

    while first := list(itertools.islice(coming, 1)):
        left += Continuous(core, (params,), room).serve(first, take, give, never)
    return results, order, left


SOME = (values.shift_reduce, values.no_u_turn, values.mixed_with_none, values.all_ways_to_read)


@pytest.mark.parametrize("make", mostly_slow(SOME, "shift_reduce"), ids=lambda f: f.__name__)
def test_agrees_with_loop(make):
    fn, params, instances = make(7, seed=1)
    results, _, left = served(fn, params, instances, room=3, seed=0)
    assert not left
    expected = [jax.tree.map(np.asarray, fn(params, x)) for x in instances]
    got = [results[i] for i in range(7)]
    assert_close(got, jax.tree.map(lambda x, y: y.astype(x.dtype), got, expected), 3e-5)


def test_instances_join_and_leave(monkeypatch):
    """There are as many rounds as the longest takes; others come and go meanwhile."""
    rounds = []
    compute = Workspace.compute
    monkeypatch.setattr(
        Workspace, "compute", lambda self, v: rounds.append(len(v)) or compute(self, v)
    )
    results, order, _ = served(steps, W, [10, 1, 1, 2, 1], room=2)
    assert order == [1, 2, 3, 4, 0]
    assert rounds == [1] + [2] * 9 + [1]  # the long one, and one other at a time
    for i, n in enumerate([10, 1, 1, 2, 1]):
        assert_close(results[i], np.asarray(steps(W, n)), 1e-6)


def test_they_begin_anew_after_a_while():
    """No more join than there should be, and nothing is compiled the second time."""
    given = [1 + i % 3 for i in range(4 * 2 * GENERATION)]
    batched = jedbatch.batch(steps)
    counts = []
    for _ in range(2):
        coming, joined = iter(Joining(i, (n,)) for i, n in enumerate(given)), []

        def take(most, coming=coming, joined=joined):
            some = list(itertools.islice(coming, most))
            joined.extend(some)
            return some

        call = Continuous(core_of(batched), (W,), room=2)
        call.serve(take(2), take, lambda left: None, never)
        assert 2 * GENERATION <= len(joined) <= 2 * GENERATION + 1
        counts.append(batched.compilations)
    assert counts[0] == counts[1]


def test_an_instance_that_fails():
    given = [3, "word", 2, None]
    results, _, left = served(steps, W, given, room=4)
    assert not left
    assert [type(results[i]) for i in (1, 3)] == [TypeError] * 2
    for i in (0, 2):
        assert_close(results[i], np.asarray(steps(W, given[i])), 1e-6)


def test_a_failure_in_the_middle_leaves_the_others_right():
    """An instance that fails after it has recorded, between operations of others."""

    def fn(w, n):
        x = steps(w, abs(n))
        if n < 0:
            step(w, step(w, x) + "word")
        return x

    given = [3, -1, 2, -2, 4]
    results, _, left = served(fn, W, given, room=5)
    assert not left
    for i, n in enumerate(given):
        if n < 0:
            assert isinstance(results[i], TypeError)
        else:
            assert_close(results[i], np.asarray(steps(W, n)), 1e-6)


def test_a_round_that_fails_leaves_all_who_are_there():
    """Nobody knows whose fault it is."""
    look = jedbatch.cell(lambda table, word: table[word])

    def fn(table, word):
        x = look(table, word)
        return look(table, word) + 1 if x.sum() > 0 else x

    _, order, left = served(fn, jnp.eye(4), [1, 9, 2], room=3)
    assert not order
    assert sorted(x.token for x in left) == [0, 1, 2]


def test_results_that_are_no_computed_values():
    key = jax.random.key(1)
    results, _, _ = served(lambda w, x: (x, w if x > 0 else w + w, key), W, [1.0, -1.0], room=2)
    for i, x in enumerate([1.0, -1.0]):
        assert results[i][0] == x
        assert_close(results[i][1], np.asarray(W if x > 0 else W + W), 1e-6)
        assert (jax.random.key_data(results[i][2]) == jax.random.key_data(key)).all()
