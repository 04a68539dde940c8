"""Streams of instances, against the plain loop; how much is read, and what is compiled."""

import gc
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import Counted, assert_close
from cases.totals import W, assert_no_planning_threads, halved, total, trees

import jedbatch


def by_loop(fn, instances, w=W):
    return [fn(w, x) for x in instances]


def drained(results):
    """(results up to an error, the error)."""
    got = []
    try:
        for result in results:
            got.append(result)
    except Exception as error:
        return got, error
    raise AssertionError("there is no error")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_results_are_those_of_the_loop(ahead):
    given = trees(37)
    batched = jedbatch.batch(total)
    got = list(batched.stream(W, iter(given), batch_size=8, ahead=ahead))
    assert_close(got, by_loop(total, given), 1e-6)
    assert all(type(x) is np.ndarray for x in got)
    assert not list(batched.stream(W, [], ahead=ahead))
    assert_no_planning_threads()


def test_any_number_of_instances_runs_by_the_same_programs():
    """A last minibatch of any size is one of those that a program fits."""
    given, batched = trees(64), jedbatch.batch(total)
    list(batched.stream(W, given, batch_size=16))
    before = batched.compilations
    for rest in (1, 2, 5, 11, 15):
        got = list(batched.stream(W, given[: 32 + rest], batch_size=16))
        assert_close(got, by_loop(total, given[: 32 + rest]), 1e-6)
    assert batched.compilations == before


def test_a_stream_shares_what_is_kept():
    """Graphs of instances, but no plan whose results are of another form."""
    given, batched = trees(6), jedbatch.batch(total)
    expected = batched(W, given)
    for _ in range(2):
        assert_close(list(batched.stream(W, given, batch_size=6)), list(expected), 1e-6)
        assert_close(batched(W, given), expected, 1e-6)
    assert len(next(iter(batched._core.sessions.values())).records.by_key) == len(set(given))


def test_functions_that_decide_on_values():
    given, batched = trees(7), jedbatch.batch(halved)
    expected = [halved(W, tree) for tree in given]
    assert len({steps for _, steps in expected}) > 1
    got = list(batched.stream(W, given, batch_size=5))
    assert_close([state for state, _ in got], [state for state, _ in expected], 1e-5)
    assert [int(steps) for _, steps in got] == [steps for _, steps in expected]


def test_arrays_of_any_length_and_results_of_any_shape():
    def softened(w, x):
        hidden = jnp.tanh(x * w[None])
        return {"rows": hidden, "total": hidden.sum(0)}

    rng = np.random.default_rng(0)
    given = [rng.random((n, 3)).astype(np.float32) for n in (2, 5, 1, 3, 7)]
    for axes in (0, None):
        fn = jedbatch.batch(softened, out_axes=axes)
        got = list(fn.stream(W, given, batch_size=3))
        assert_close(got, [softened(W, x) for x in given], 1e-6)
        assert all(type(x) is np.ndarray for x in jax.tree.leaves(got))


def test_random_keys_and_numbers_as_results():
    def keys(w, n):
        return jax.random.fold_in(w, n), jnp.int32(n) + 1

    key = jax.random.key(0)
    got = list(jedbatch.batch(keys).stream(key, range(3), batch_size=2))
    for n, (found, number) in enumerate(got):
        assert (jax.random.key_data(found) == jax.random.key_data(keys(key, n)[0])).all()
        assert (number.shape, number.dtype, int(number)) == ((), np.int32, n + 1)


def test_several_arguments_and_none_shared():
    weighed = jedbatch.batch(lambda w, tree, x: x * total(w, tree), in_axes=(None, 0, 0))
    given = trees(5)
    got = list(weighed.stream(W, given, [1.0, 2.0, 3.0, 4.0, 5.0], batch_size=2))
    assert_close(got, [(i + 1) * total(W, tree) for i, tree in enumerate(given)], 1e-6)
    with pytest.raises(ValueError, match="different numbers of instances"):
        list(weighed.stream(W, given, [1.0, 2.0], batch_size=2))
    doubled = jedbatch.batch(lambda x: 2 * jnp.float32(x), in_axes=0)
    assert [float(x) for x in doubled.stream([1.0, 2.0, 3.0], batch_size=2)] == [2.0, 4.0, 6.0]


def test_unordered_results_have_their_numbers():
    given = trees(11)
    got = list(jedbatch.batch(total).stream(W, given, batch_size=4, ordered=False))
    assert sorted(number for number, _ in got) == list(range(11))
    for number, result in got:
        assert_close(result, total(W, given[number]), 1e-6)


# --- memory and threads ---


def test_no_more_is_read_than_asked_for():
    taken = []

    def instances():
        for i in itertools.count():
            taken.append(i)
            yield float(i)

    results = jedbatch.batch(total).stream(W, instances(), batch_size=4, ahead=2)
    assert not taken
    next(results)
    time.sleep(0.5)
    assert len(taken) <= 4 * 3  # the one that was asked for and two ahead
    for _ in range(40):
        next(results)
    time.sleep(0.1)
    assert len(taken) <= 4 * (11 + 2)
    results.close()
    assert_no_planning_threads()


def test_results_do_not_pile_up():
    """Instances and results are gone once they were used, whoever is slow."""
    batched = jedbatch.batch(lambda w, xs: w * xs[0], cache_size=1)
    before, most = Counted.alive, 0
    for _ in batched.stream(W, ([Counted(i)] for i in range(400)), batch_size=8):
        most = max(most, Counted.alive - before)
    gc.collect()
    assert most <= 8 * 5


@pytest.mark.parametrize("fn", [total, halved])
def test_closing_early_leaves_no_thread(fn):
    results = jedbatch.batch(fn).stream(W, iter(trees(50)), batch_size=4)
    next(results)
    results.close()
    assert_no_planning_threads()
    assert not list(results)


# --- errors ---


FAILING = [(total, 0, 6), (total, 2, 0), (total, 2, 9), (halved, 2, 6)]


@pytest.mark.parametrize(("fn", "ahead", "bad"), FAILING)
def test_an_instance_that_fails(fn, ahead, bad):
    given = [*trees(bad), (1.0, ("word", 2.0)), *trees(5, seed=1)]
    results = jedbatch.batch(fn).stream(W, given, batch_size=4, ahead=ahead)
    got, error = drained(results)
    assert isinstance(error, TypeError)
    assert any(f"in instance {bad} of a stream" in note for note in error.__notes__)
    assert_close(got, jax.tree.map(jnp.asarray, by_loop(fn, given[:bad])), 1e-5)
    assert_no_planning_threads()
    assert not list(results)


def test_an_instance_that_fails_while_it_is_computed():
    """The device says so when results are read."""

    def checked(x):
        if x == 7:
            raise ValueError("seven")
        return x

    def fn(w, x):
        return jax.pure_callback(checked, jax.ShapeDtypeStruct((), np.float32), w * x)

    given = np.arange(12, dtype=np.float32)
    got, error = drained(jedbatch.batch(fn).stream(jnp.float32(1), given, batch_size=4))
    assert "seven" in str(error)
    assert got == [0, 1, 2, 3, 4, 5, 6]
    assert any("in instance 7 of a stream" in note for note in error.__notes__)


def test_errors_of_what_is_read_come_after_what_was_read():
    def instances():
        yield from (1.0, 2.0, 3.0)
        raise OSError("no such file")

    got, error = drained(jedbatch.batch(total).stream(W, instances(), batch_size=2))
    assert len(got) == 3
    assert str(error) == "no such file"
    assert "where instance 3 of a stream was read" in error.__notes__[-1]


def test_what_cannot_be_streamed():
    batched = jedbatch.batch(total)
    with pytest.raises(TypeError, match="expected an iterable of instances"):
        batched.stream(W, 3)
    with pytest.raises(TypeError, match="call it"):
        batched.stream(W, {"x": np.ones(3)})
    with pytest.raises(ValueError, match="batch_size=0"):
        batched.stream(W, [1.0], batch_size=0)
    with pytest.raises(ValueError, match="ahead=-1"):
        batched.stream(W, [1.0], ahead=-1)
    with pytest.raises(TypeError, match="ordered"):
        batched.stream(W, [1.0], ordered="yes")
    with pytest.raises(TypeError, match="use `plans` and `apply`"):
        jax.jit(lambda w: next(batched.stream(w, [1.0])))(W)
    outer = jedbatch.batch(lambda w, x: next(batched.stream(w, [x])))
    with pytest.raises(RuntimeError, match="inside of a batched function"):
        outer(W, [1.0])


def test_it_runs_as_jax_is_configured_where_it_is_called():
    batched = jedbatch.batch(total)
    with jax.enable_x64(True):
        results = batched.stream(jnp.ones(3, jnp.float64), [1.0, 2.0])
    assert [x.dtype for x in results] == [np.float64] * 2


def test_weights_that_it_closes_over_are_those_of_now():
    held = {"w": W}
    batched = jedbatch.batch(lambda tree: total(held["w"], tree), in_axes=0)
    given = trees(3)
    for scale in (1.0, 2.0):
        held["w"] = scale * W
        assert_close(list(batched.stream(given)), by_loop(total, given, held["w"]), 1e-6)
