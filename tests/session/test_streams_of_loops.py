"""Streams of instances with loops whose length values decide on, against the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import Counted
from cases.totals import assert_no_planning_threads
from jax import lax

import jedbatch
from jedbatch.errors import UnfinishedLoopError

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32)


@jedbatch.cell
def spin(w, n, x):
    """A loop with work before it and after, which reads what was there before."""
    y = jnp.tanh(x * 2)

    def body(state):
        i, x = state
        return i + 1, jnp.tanh(x @ w)

    count, out = lax.while_loop(lambda state: state[0] < n, body, (jnp.int32(0), y))
    return out + y, count * 10


def whole(w, instance):
    return spin(w, *instance)


def loop_in_loop(w, instance):
    n, x = instance

    def body(state):
        i, x = state
        x = lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, jnp.sin(c[1] @ w)), (0, x))[1]
        return i + 1, jnp.tanh(x @ w)

    return lax.while_loop(lambda state: state[0] < n, body, (0, x))[1]


@jedbatch.cell
def twice(w, n, x):
    x = lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)
    return lax.fori_loop(0, 2 * n, lambda _, x: jnp.sin(x @ w), x), x.sum()


@jedbatch.cell
def row_of(table, word):
    return table[word]


def loop_after_loop(w, instance):
    return twice(w, *instance)


def branch_in_loop(w, instance):
    n, x = instance

    def body(state):
        i, x = state
        return i + 1, lax.cond(i % 3 == 0, lambda x: jnp.tanh(x @ w), lambda x: x + 1, x)

    return {"x": lax.while_loop(lambda state: state[0] < n, body, (0, x))[1]}


FUNCTIONS = [whole, loop_in_loop, loop_after_loop, branch_in_loop]


def instances(count, most=12, seed=0):
    rng = np.random.default_rng(seed)
    numbers = np.where(rng.random(count) < 0.1, 4 * most, rng.integers(0, most, count))
    return [(int(n), rng.normal(size=8).astype(np.float32)) for n in numbers]


def by_loop(fn, given, w=W):
    one = jax.jit(fn)
    return [one(w, x) for x in given]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if np.issubdtype(y.dtype, np.integer):
                np.testing.assert_array_equal(x, y)
            else:
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def drained(results, kind):
    """(results up to an error of a kind, the error)."""
    got = []
    try:
        for result in results:
            got.append(result)
    except kind as error:
        assert_no_planning_threads()
        return got, error
    raise AssertionError("there is no error")


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_results_are_those_of_the_loop(fn, ordered):
    given, batched = instances(90), jedbatch.batch(fn)
    expected = by_loop(fn, given)
    got = list(batched.stream(W, iter(given), batch_size=16, ordered=ordered))
    if not ordered:
        assert sorted(number for number, _ in got) == list(range(90))
        got = [result for _, result in sorted(got, key=lambda pair: pair[0])]
    assert_same(got, expected)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(got))
    assert_no_planning_threads()


def test_any_number_of_instances_runs_by_one_program():
    batched = jedbatch.batch(whole)
    for count in (0, 1, 3, 16, 17, 32, 75, 48):
        for ahead in (0, 2):
            given = instances(count, seed=count)
            got = list(batched.stream(W, given, batch_size=16, ahead=ahead))
            assert_same(got, by_loop(whole, given))


def test_what_a_lane_computes_does_not_depend_on_others():
    """Bit by bit where nothing is added up, with a NaN in some lanes."""

    def walk(w, instance):
        key, n, x = instance

        def body(state):
            i, key, x = state
            key, now = jax.random.split(key)
            return i + 1, key, jnp.maximum(x / 2, jax.random.uniform(now))

        _, key, x = lax.while_loop(lambda c: c[0] < n, body, (0, key, x))
        return key, x

    given = [
        (jax.random.key(i), int(n), np.float32(np.nan if i % 7 == 3 else i))
        for i, n in enumerate(np.random.default_rng(0).geometric(1 / 5, 40))
    ]
    batched = jedbatch.batch(walk)
    got = list(batched.stream(jnp.float32(3), given, batch_size=8))
    for (key, x), (its_key, y) in zip(got, by_loop(walk, given, jnp.float32(3)), strict=True):
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(its_key))
        np.testing.assert_array_equal(x, y)


def test_arrays_lists_and_lookups_are_inputs():
    def fn(params, instance):
        words, n = instance
        x = sum(row_of(params["E"], word) for word in words)
        return twice(params["W"], n, x)

    params = {"E": jnp.asarray(rng.normal(size=(20, 8)), jnp.float32), "W": W}
    given = [(rng.integers(20, size=3).tolist(), np.int32(n)) for n in rng.integers(0, 20, 50)]
    batched = jedbatch.batch(fn)
    assert_same(list(batched.stream(params, given, batch_size=16)), by_loop(fn, given, params))
    with pytest.raises(IndexError, match="looks up row 20 of a table") as caught:
        list(batched.stream(params, [*given[:30], ([1, 20, 2], np.int32(3))], batch_size=16))
    assert any("in instance 30 of a stream" in note for note in caught.value.__notes__)


# --- counts ---


def test_counts_of_a_stream_are_those_of_its_minibatches():
    given = instances(96, most=20)
    batched = jedbatch.batch(whole, control_flow="lanes")
    counts = batched.lane_steps(W, given, batch_size=48)
    assert counts.needed == sum(n for n, _ in given)
    apart = [batched.lane_steps(W, minibatch) for minibatch in (given[:48], given[48:])]
    assert counts.steps == sum(x.steps for x in apart)
    assert counts.lanes == sum(x.lanes for x in apart)


# --- memory and order ---


def test_results_do_not_pile_up():
    fn = jedbatch.batch(
        lambda w, x: lax.while_loop(lambda x: x > 1.0, lambda x: x * w, x[0]), cache_size=1
    )
    given = ([Counted(i % 50)] for i in range(640))
    before, most = Counted.alive, 0
    for _ in fn.stream(jnp.float32(0.9), given, batch_size=8):
        most = max(most, Counted.alive - before)
    assert most <= 8 * 5


def test_results_do_not_wait_for_the_next_minibatch():
    seen = []

    def given():
        for i in range(24):
            assert len(seen) >= i // 8 * 8  # the next ones depend on what came before
            yield 5, np.full(8, i, np.float32)

    batched = jedbatch.batch(whole)
    for result in batched.stream(W, given(), batch_size=8, ahead=0):
        seen.append(result)
    assert len(seen) == 24
    with pytest.raises(TypeError, match="refill"):
        batched.stream(W, [], refill=False)


# --- structures and settings ---


def test_instances_of_several_structures():
    mixed = [*instances(20), *((float(n), x) for n, x in instances(9)), *instances(11)]
    batched = jedbatch.batch(whole)
    got = list(batched.stream(W, mixed, batch_size=8))
    assert_same(got, by_loop(whole, mixed))


def test_trees_and_what_runs_in_lock_step():
    def tree(w, node):
        n, x, *children = node
        total = x + sum(tree(w, child) for child in children)
        return spin(w, n, total)[0]

    leaves = [(n, x) for n, x in instances(12)]
    given = [leaves[0], (2, np.ones(8, np.float32), leaves[1], leaves[2]), *leaves[3:]]
    batched = jedbatch.batch(tree)
    got = list(batched.stream(W, given, batch_size=4))
    assert_same(got, [tree(W, x) for x in given])
    lockstep = jedbatch.batch(whole, control_flow="lockstep")
    assert_same(list(lockstep.stream(W, leaves, batch_size=4)), by_loop(whole, leaves))


def test_functions_without_loops_and_calls_of_python():
    def called(w, instance):
        n, x = instance
        return lax.fori_loop(
            0, n, lambda _, x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"), x
        )

    for fn in (called, lambda w, instance: jnp.tanh(instance[1] @ w)):
        given, batched = instances(10), jedbatch.batch(fn)
        assert_same(list(batched.stream(W, given, batch_size=4)), by_loop(fn, given))


# --- errors ---


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("bad", [0, 13, 39])
def test_loops_that_do_not_end_name_their_instance(bad, ordered):
    given = [(int(n), x) for n, (_, x) in zip(rng.integers(0, 9, 40), instances(40), strict=True)]
    given[bad] = (1000, given[bad][1])
    batched = jedbatch.batch(whole, max_steps=50)
    results = batched.stream(W, given, batch_size=8, ordered=ordered)
    got, error = drained(results, UnfinishedLoopError)
    assert "max_steps=50" in str(error)
    assert any(f"in instance {bad} of a stream" in note for note in error.__notes__)
    if ordered:
        assert_same(got, by_loop(whole, given[:bad]))
    else:
        found = dict(got)
        assert set(range(bad)) <= found.keys()
        assert bad not in found
        assert_same(list(found.values()), by_loop(whole, [given[i] for i in found]))


@pytest.mark.parametrize("ordered", [True, False])
def test_an_instance_at_fault_comes_after_those_before_it(ordered):
    given = [*instances(21), (3, "no array"), *instances(10)]
    results = jedbatch.batch(whole).stream(W, given, batch_size=8, ordered=ordered)
    got, error = drained(results, TypeError)
    assert any("in instance 21 of a stream" in note for note in error.__notes__)
    got = got if ordered else [x for _, x in sorted(got, key=lambda pair: pair[0])]
    assert_same(got, by_loop(whole, given[:21]))


@pytest.mark.parametrize("count", [11, 16])
def test_errors_of_what_is_read_come_after_what_was_read(count):
    def given():
        yield from instances(count)
        raise OSError("no such file")

    got, error = drained(jedbatch.batch(whole).stream(W, given(), batch_size=8), OSError)
    assert str(error) == "no such file"
    assert_same(got, by_loop(whole, instances(count)))
    assert f"where instance {count} of a stream was read" in error.__notes__[-1]


def test_closing_early_leaves_no_thread_and_faults_of_the_device_are_found():
    results = jedbatch.batch(whole).stream(W, iter(instances(100)), batch_size=8)
    next(results)
    results.close()
    assert_no_planning_threads()
    given = instances(20)
    given[11] = (3, np.full(8, np.nan, np.float32))
    with jax.debug_nans(True):
        results = jedbatch.batch(whole).stream(W, given, batch_size=8)
        got, error = drained(results, FloatingPointError)
    assert any("in instance 11 of a stream" in note for note in error.__notes__)
    assert_same(got, by_loop(whole, given[:11]))


# --- what programs read ---


@pytest.mark.parametrize("setting", [jax.checking_leaks, lambda: jax.transfer_guard("disallow")])
def test_it_runs_where_jax_is_strict(setting):
    batched, given = jedbatch.batch(whole), instances(20)
    with setting():
        got = list(batched.stream(W, given, batch_size=8))
    assert_same(got, by_loop(whole, given))


def test_numbers_of_64_bits():
    with jax.enable_x64(True):
        w = W.astype(jnp.float64)
        given = [(n, x.astype(np.float64)) for n, x in instances(20)]
        batched = jedbatch.batch(whole)
        assert_same(list(batched.stream(w, given, batch_size=8)), by_loop(whole, given, w))


def test_parameters_on_a_device_of_their_own_and_weights_of_now():
    on_device = jax.device_put(W, jax.devices()[-1])
    batched, given = jedbatch.batch(whole), instances(40)
    assert_same(list(batched.stream(on_device, given, batch_size=8)), by_loop(whole, given))
    held = {"w": W}
    closed = jedbatch.batch(lambda instance: spin(held["w"], *instance), in_axes=0)
    for scale in (1.0, 0.5):
        held["w"] = scale * W
        got = list(closed.stream(given, batch_size=8))
        assert_same(got, by_loop(whole, given, held["w"]))


def changed_mapping(given, change):
    params = {"w": W}
    batched = jedbatch.batch(lambda params, instance: whole(params["w"], instance))
    for k, result in enumerate(batched.stream(params, given, batch_size=8, ahead=0, ordered=False)):
        if k == change:
            params["w"] = W / 2
        yield result


def changed_array(given, change):
    weights, batched = np.array(W), jedbatch.batch(whole)
    for k, result in enumerate(
        batched.stream(weights, given, batch_size=8, ahead=0, ordered=False)
    ):
        if k == change:
            weights /= 2
        yield result


def changed_closure(given, change):
    held = {"w": W}
    batched = jedbatch.batch(lambda instance: spin(held["w"], *instance), in_axes=0)
    for k, result in enumerate(batched.stream(given, batch_size=8, ahead=0, ordered=False)):
        if k == change:
            held["w"] = W / 2
        yield result


@pytest.mark.parametrize("changed", [changed_mapping, changed_array, changed_closure])
def test_an_instance_runs_with_the_weights_of_its_minibatch(changed):
    """Weights change while the first minibatch is used."""
    given = [(30 if k % 8 == 3 else 2, np.full(8, k / 8 + 0.1, np.float32)) for k in range(32)]
    got = list(changed(given, 4))
    by_number = [result for _, result in sorted(got, key=lambda pair: pair[0])]
    assert_same(by_number[:8], by_loop(whole, given[:8]))
    assert_same(by_number[8:], by_loop(whole, given[8:], W / 2))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [(None, None), ("d", None), (None, "d")])
def test_weights_on_several_devices(axes, kind):
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=kinds)
    spec = jax.sharding.PartitionSpec(*axes)
    weights = jax.device_put(W, jax.sharding.NamedSharding(mesh, spec))
    batched, given = jedbatch.batch(whole), instances(40)
    assert_same(list(batched.stream(weights, given, batch_size=8)), by_loop(whole, given))


def test_rows_of_arrays_whose_cells_read_small_tables_have_the_same_bound():
    """Functions of a row of a table, which are computed for each row elsewhere, run in the lane."""

    @jedbatch.cell
    def mixed(table, kind, n):
        row = jax.nn.log_softmax(table[kind])
        return lax.while_loop(lambda c: c[0] != n, lambda c: (c[0] + 1, c[1] + row), (0, row))[1]

    table = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    batched = jedbatch.batch(mixed, (None, 0, 0), max_steps=20)
    kinds, numbers = jnp.arange(40) % 4, jnp.arange(40, dtype=jnp.int32) % 7
    assert batched(table, kinds, numbers).shape == (40, 8)
    with pytest.raises(UnfinishedLoopError, match="instance 3"):
        batched(table, kinds, numbers.at[3].set(-1))
