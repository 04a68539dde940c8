"""Instances with arrays that were met before: found at a glance, with the answers of the loop."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch._program import host_arrays
from jedbatch._ragged.lengths import Lengths
from jedbatch._session.records import recording

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(3, 3)), jnp.float32)


def vector():
    return RNG.normal(size=3).astype(np.float32)


def scaled(w, instance):
    x, number = instance
    return jnp.tanh(x @ w) * number


def of_both(w, instance):
    return {"h": jnp.tanh(instance["x"] @ w) + instance["y"], "n": instance["k"].sum()}


def longest(w, instance):
    """Depends on lengths in Python alone."""
    x, _ = instance
    return jnp.tanh(x[0] @ w) * len(x)


def both_rows(w, instance):
    x, number, y = instance
    return jnp.stack([x - y, y]) @ w * number


def of_tokens(w, instance):
    words, place = instance
    return w[words % 3].sum(0) + place


def with_sum(w, instance):
    x, empty = instance
    return jnp.tanh(x @ w) + jnp.tanh(empty).sum()


def check_call(batched, fn, minibatch):
    assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)


MINIBATCHES = {
    "numbers": (scaled, lambda i: (vector(), 0.5 * (i % 3))),
    "dicts": (of_both, lambda i: {"x": vector(), "y": vector(), "k": RNG.integers(0, 9, 2)}),
    "numbers of 64 bits": (of_tokens, lambda i: (RNG.integers(0, 9, 4), np.array(i % 4))),
    "two arrays of a shape": (both_rows, lambda i: [vector(), 1.0, vector()]),
    "arrays without columns": (with_sum, lambda i: (vector(), np.zeros((2, 0), np.float32))),
    "two dtypes": (of_tokens, lambda i: (np.arange(4, dtype=f"i{4 + i % 2 * 4}"), np.array(i))),
}


@pytest.fixture
def looked_at(monkeypatch):
    """Counts instances whose keys are made at length, looks at lengths, and rows one by one."""
    counts = collections.Counter()

    def counting(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    counting(recording, "instance_key")
    counting(Lengths, "_observe")
    counting(host_arrays, "rows_of_inputs")
    return counts


@pytest.mark.parametrize("name", MINIBATCHES)
@pytest.mark.parametrize("native", ["1", "0"])
def test_known_instances_are_not_looked_at(monkeypatch, looked_at, name, native):
    monkeypatch.setenv("JEDBATCH_NATIVE", native)
    fn, instance = MINIBATCHES[name]
    batched = jedbatch.batch(fn)
    counts = []
    for _ in range(4):
        minibatch = [instance(i) for i in range(6)]
        check_call(batched, fn, minibatch)
        counts.append(looked_at.copy())
        looked_at.clear()
    assert (counts[0]["instance_key"], counts[1]["instance_key"]) == (6, 6)
    assert counts[2] == counts[3] == {}
    assert batched.plan(W, minibatch).host.num_known == 6


def test_parts_of_known_minibatches_are_known(looked_at):
    batched = jedbatch.batch(scaled)
    for _ in range(2):
        batched(W, [(vector(), i) for i in range(6)])
    looked_at.clear()
    minibatch = [(vector(), i) for i in (5, 0, 5, 3, 2)]
    check_call(batched, scaled, minibatch)
    assert not looked_at["instance_key"]
    minibatch[2] = vector(), 7
    check_call(batched, scaled, minibatch)
    assert looked_at["instance_key"] == 5


def test_arrays_that_are_met_twice_are_no_others():
    def fn(w, pair):
        x, y = pair
        return (x @ w) * (3.0 if x is y else 1.0)

    batched = jedbatch.batch(fn)
    for _ in range(3):
        x, y = vector(), vector()
        for minibatch in [[(x, y)] * 6, [(x, x)] * 6, [(x, y), (y, y), (y, x), (x, x), (x, y)]]:
            check_call(batched, fn, minibatch)


def test_dtypes_are_told_apart():
    fn = lambda w, x: jnp.asarray(x) * 2 + jnp.ones_like(x)  # noqa: E731
    batched = jedbatch.batch(fn)
    for _ in range(3):
        for dtype in (np.float32, np.int32, np.int64, jnp.bfloat16):
            minibatch = [(10 * vector()).astype(dtype) for _ in range(6)]
            found = batched(W, minibatch)
            assert found.dtype == jnp.asarray(minibatch[0]).dtype
            assert_close(found, loop(fn, W, minibatch), 1e-2)


def test_lengths_that_come_to_differ(looked_at):
    """From then on instances are recorded for all lengths, those that were known as well."""
    batched = jedbatch.batch(longest, in_axes=(None, 0))

    def minibatch(*lengths):
        return [(RNG.normal(size=(n, 3)).astype(np.float32), 1) for n in lengths]

    for _ in range(3):
        few = minibatch(*[4] * 6)
        check_call(batched, longest, few)
    assert looked_at["instance_key"] == 12
    for lengths in ([4, 5, 4, 5, 2, 2], [4] * 6, [4] * 6):
        few = minibatch(*lengths)
        check_call(batched, longest, few)
    assert looked_at["instance_key"] == 30  # those of known lengths are found at a glance
    few = minibatch(7, 4, 4, 4, 4, 4)
    check_call(batched, longest, few)
    assert batched.plan(W, few).host.num_known == 6


def through_tree(w, tree):
    """States of any length travel from the leaves of a tree to its root."""
    if not isinstance(tree, tuple):
        return tree
    return jnp.tanh(through_tree(w, tree[0]) @ w) + through_tree(w, tree[1])


def of_rows(w, instance):
    x, number = instance
    return (jnp.tanh(x @ w) * number).sum(0)


def of_trees(w, instance):
    tree, number = instance
    return through_tree(w, tree).max(0) * number


def tree_of(size, rows):
    if size == 1:
        return RNG.normal(size=(rows, 3)).astype(np.float32)
    left = int(RNG.integers(1, size))
    return tree_of(left, rows), tree_of(size - left, rows)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("fn", [of_rows, of_trees])
def test_known_instances_of_any_length(monkeypatch, looked_at, fn, native):
    """They are known once they were recorded, until another length is learned of."""
    monkeypatch.setenv("JEDBATCH_NATIVE", native)

    def minibatch(seed):
        shapes = np.random.default_rng(seed).integers((1, 9), (6, 30), (6, 2)).tolist()
        if fn is of_rows:
            return [(tree_of(1, rows), size) for size, rows in shapes]
        return [(tree_of(size, rows), 0.5 * size) for size, rows in shapes]

    batched = jedbatch.batch(fn)
    for seed in range(4):
        check_call(batched, fn, minibatch(seed))
    batched.plan(W, again := minibatch(5))
    looked_at.clear()
    other = jax.tree.map(lambda x: -x if isinstance(x, np.ndarray) else x, again)
    check_call(batched, fn, other)
    check_call(batched, fn, other[::-1])
    assert not looked_at["instance_key"] + looked_at["_observe"]
    assert batched.plan(W, other).host.num_known == 6
    longer = [(jax.tree.map(lambda x: np.concatenate([x, x]), tree), k) for tree, k in other]
    check_call(batched, fn, longer)
    assert looked_at["instance_key"] == 6
    loss = lambda w: (batched(w, longer) ** 2).sum()  # noqa: E731
    judge = lambda w: sum((fn(w, x) ** 2).sum() for x in longer)  # noqa: E731
    assert_close(jax.grad(loss)(W), jax.grad(judge)(W), 1e-4)


def test_what_does_not_fit_is_refused_again():
    batched = jedbatch.batch(of_tokens)
    for _ in range(3):
        batched(W, [(np.arange(4), np.array(i)) for i in range(6)])
    minibatch = [(np.arange(4), np.array(i)) for i in range(6)]
    minibatch[4] = np.array([0, 1, 2, 1 << 40]), np.array(0)
    with pytest.raises(OverflowError, match="instance 4 has int64 values from 0 to 1099511627776"):
        batched(W, minibatch)


def test_what_the_function_reads_may_change(looked_at):
    read = {"shift": jnp.ones(3), "times": 2.0}
    fn = lambda w, x: (jnp.tanh(x @ w) + read["shift"]) * read["times"]  # noqa: E731
    batched = jedbatch.batch(fn)
    for times in (2.0, 3.0, 2.0):
        read["times"] = times
        for _ in range(3):
            check_call(batched, fn, [vector() for _ in range(6)])
    # Twice for each number, and once where one comes back.
    assert looked_at["instance_key"] == 5 * 6
    for _ in range(2):
        read["shift"] = read["shift"] + 1
        check_call(batched, fn, [vector() for _ in range(6)])


def test_numbers_that_only_floats_could_hold_together():
    """Of signed and unsigned numbers of 64 bits NumPy makes floats, which round them."""
    numbers = [np.array([i, (1 << 31) - 1 - i], ["i8", "i4", "u8"][i % 3]) for i in range(6)]
    fn = lambda w, x: x + jnp.int32(0) * w.astype(jnp.int32).sum()  # noqa: E731
    batched = jedbatch.batch(fn)
    for _ in range(3):
        found = batched(W, numbers)
    assert found.tolist() == [x.tolist() for x in numbers]


def test_gradients_of_known_instances():
    batched = jedbatch.batch(scaled)
    for _ in range(3):
        minibatch = [(vector(), 0.5 * (i % 3)) for i in range(6)]
        loss = lambda w, few=minibatch: (batched(w, few) ** 2).sum()  # noqa: E731
        judge = lambda w, few=minibatch: sum((scaled(w, x) ** 2).sum() for x in few)  # noqa: E731
        assert_close(jax.grad(loss)(W), jax.grad(judge)(W), 1e-5)
        x = jnp.stack([x for x, _ in minibatch])
        of_rows = lambda x: [(row, 0.5 * (i % 3)) for i, row in enumerate(x)]  # noqa: E731
        loss = lambda x, f=of_rows: (batched(W, f(x)) ** 2).sum()  # noqa: E731
        judge = lambda x, f=of_rows: sum((scaled(W, i) ** 2).sum() for i in f(x))  # noqa: E731
        assert_close(jax.grad(loss)(x), jax.grad(judge)(x), 1e-5)


def test_a_plan_has_its_own_numbers():
    """Numbers are kept for plans to come: what is written to those of one is not in another."""
    batched = jedbatch.batch(scaled)
    minibatch = [(vector(), 2.0) for _ in range(6)]
    for _ in range(3):
        plan = batched.plan(W, minibatch, gradient=False)
        for rows in plan.inputs.values():
            rows *= 0
    check_call(batched, scaled, minibatch)


def test_of_minibatches_numbers_are_kept_and_no_arrays():
    batched = jedbatch.batch(lambda w, pair: pair[0].sum() * pair[1])
    for _ in range(3):
        batched(W, [(np.ones((400, 500), np.float32), 2.0) for _ in range(6)])
    (session,) = batched._core.sessions.values()
    assert session.arranged.bytes < 200_000 < 6 * 400 * 500 * 4


def test_known_instances_have_a_bound():
    batched = jedbatch.batch(scaled, cache_size=4)
    for k in range(4):
        minibatch = [(vector(), float(8 * (k % 2) + i)) for i in range(6)]
        check_call(batched, scaled, minibatch)
    (session,) = batched._core.sessions.values()
    assert len(session.records.with_arrays._records) <= 4
