"""Lengths of several arrays of an instance: equal by chance, equal by need, and looked at."""

import collections
import functools
import math
import numbers
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, number

import jedbatch
from jedbatch import ragged, testing
from jedbatch._ragged.length_families import LengthFamily
from jedbatch.errors import GroupedByShapesWarning

CHANCE = [[(3, 3), (5, 2)], [(5, 2), (3, 3), (1, 4)], [(2, 2), (2, 2), (1, 3), (0, 3)]]
WEIGHT = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)


def arrays(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.normal(size=(n, 2)).astype(np.float32) for n in mine) for mine in lengths]


def apart(batched):
    """Why a batched function tells arrays apart by their shapes, if it does."""
    (session,) = batched._core.sessions.values()
    return session.records.lengths.shown


def agree(fn, instances, batched=None):
    """Values, and gradients of the weight and the arrays, are those of the loop."""
    batched = batched or jedbatch.batch(fn, out_axes=None)

    def slopes(run):
        def loss(weight, instances):
            results = run(weight, instances)
            return number(results), results

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(WEIGHT), instances)

    got, results = slopes(batched)
    alone = jax.jit(fn)
    want, expected = slopes(lambda weight, xs: [alone(weight, x) for x in xs])
    assert_close(results, expected, 2e-5)
    assert_close(got, want, 2e-4)
    return batched


def test_one_row_repeated_as_often_as_there_are_rows():
    """`jnp.tile` of a row of a weight, and of what an instance computes, beside its rows."""

    def beside(weight, pair):
        (x, _) = pair
        of_all = jnp.tile((x @ weight).mean(0)[None], (x.shape[0], 1))
        of_weight = jnp.tile(weight[None, 0], (x.shape[0], 1))
        return jnp.tanh(jnp.concatenate([x, of_all, of_weight], 1)).max(0)

    batched = agree(beside, arrays((3, 1), (5, 2)))
    for lengths in [(4, 1), (1, 1)], [(7, 2), (2, 2)]:
        instances = arrays(*lengths)
        before = batched.compilations
        got = batched(WEIGHT, instances)
        assert_close(got, [beside(WEIGHT, x) for x in instances], 2e-5)
    assert batched.compilations == before
    assert apart(batched) is None


# --- parts that some lengths leave nothing of ---


def next_words(weight, pair):
    """A language model: every row says which is the next one."""
    (x, _) = pair
    words = (x[:, 0] > 0).astype(jnp.int32)
    chances = jax.nn.log_softmax(x[:-1] @ weight)
    by_axis = jnp.take_along_axis(chances, words[1:, None], axis=1)
    by_place = chances[jnp.arange(x.shape[0] - 1), words[1:]]
    return by_axis.sum() + (by_place * jnp.arange(x.shape[0] - 1)).sum()


def last_of_parts(weight, pair):
    (x, _) = pair
    y = jnp.tanh(x @ weight)
    return y[:-1][-1] + jnp.flip(y[1:], 0).cumsum(0)[0] * jnp.argmax(y[1:], 0)


def behind_two_rows(weight, pair):
    (x, _) = pair
    y = jnp.sin(x @ weight)[2:]
    places = jnp.linspace(0.0, 1.0, y.shape[0])
    return jnp.sort(y, 0)[-1] + jnp.flip(y, 0)[0] + (places[:, None] * y).sum(0)


def spread_behind_one_row(weight, pair):
    return jnp.cov(jnp.tanh(pair[0] @ weight)[1:].T)  # NaN if there is no row


@pytest.mark.parametrize(
    ("fn", "fewest"),
    [(next_words, 1), (last_of_parts, 2), (behind_two_rows, 3), (spread_behind_one_row, 1)],
)
def test_parts_without_rows_for_some_lengths(fn, fewest):
    """Instances that have too few rows are recorded by themselves, or refused as the loop does."""
    batched = agree(fn, arrays((5, 1), (fewest, 1), (7, 1)))
    counts = []
    for seed, lengths in enumerate([(5, 7), (6, 4)]):
        instances = arrays(*((n, 1) for n in (*lengths, fewest)), seed=seed)
        found = batched(WEIGHT, instances)
        counts.append(batched.compilations)
        assert_close(found, [fn(WEIGHT, x) for x in instances], 2e-5)
    assert counts[0] == counts[1]
    assert apart(batched) is None
    if fewest > 1:
        short = arrays((6, 1), (fewest - 1, 1))
        for run in (batched, lambda weight, xs: [fn(weight, x) for x in xs]):
            with pytest.raises((ValueError, IndexError, TypeError)):
                run(WEIGHT, short)


# --- lengths that are equal by chance ---


def pooled_and_spread(weight, pair):
    """The larger of two rows each, of rows padded to pairs, and these twice, as U-Nets have it."""
    (x,) = pair
    n = x.shape[0]
    pairs = jnp.pad(x @ weight, ((0, n % 2), (0, 0))).reshape(-1, 2, 2)
    return pairs.max(1), x * jnp.repeat(pairs.max(1), 2, axis=0)[:n]


def attend_in_chunks(weight, pair):
    """Attention within four rows each, of rows padded to a multiple of four."""
    (x,) = pair
    n = x.shape[0]
    chunks = jnp.pad(x, ((0, -n % 4), (0, 0))).reshape((n + -n % 4) // 4, 4, 2)
    scores = jnp.einsum("cid,de,cje->cij", chunks, weight, chunks)
    return (jax.nn.softmax(scores) @ chunks).reshape(-1, 2)[:n]


@pytest.mark.parametrize("fn", [pooled_and_spread, attend_in_chunks])
def test_rows_padded_to_a_multiple(fn):
    batched = agree(fn, arrays((2,), (5,), (1,), (8,), (3,)))
    assert apart(batched) is None


def related(weight, pair):
    x, y = pair
    far = ((x[:, None] - y[None]) ** 2).sum(-1)
    steps = y.shape[0] - x.shape[0] + y.shape[0] // (x.shape[0] + 1)
    return {
        "cross attention": (jax.nn.softmax(x @ weight @ y.T) @ y).sum(0),
        "chamfer": far.min(1, initial=9.0).sum(),
        "arithmetic": x.sum(0) * (steps + y.shape[0] / (x.shape[0] + 1)),
        "joined": jnp.concatenate([x, y]).sum(0) * jnp.arange(y.shape[0]).sum(),
        "lengths": (x.shape[0], y.shape[0] - 1),
    }


@pytest.mark.slow
def test_lengths_equal_by_chance():
    batched = agree(related, arrays(*CHANCE[0]))
    for lengths in CHANCE[1:]:
        instances = arrays(*lengths)
        assert_close(batched(WEIGHT, instances), [related(WEIGHT, i) for i in instances], 2e-5)
    assert apart(batched) is None


@jedbatch.cell
def attend(weight, x, y):
    return jnp.tanh(jax.nn.softmax((x @ weight) @ y.T) @ y) / (1 + y.shape[0])


def test_trees_whose_sentences_meet():
    def encode(weight, tree):
        if not isinstance(tree, tuple):
            return tree
        return attend(weight, *(encode(weight, part) for part in tree))

    def total(weight, tree):
        return encode(weight, tree).sum(0)

    def trees(seed, *lengths):
        ((a, b, c, d),) = arrays(lengths, seed=seed)
        return [(a, b), ((c, d), a)]

    batched = jedbatch.batch(total, out_axes=None)
    for seed, lengths in enumerate([(3, 3, 2, 5), (4, 2, 4, 1)]):
        instances = trees(seed, *lengths)
        expected = [total(WEIGHT, tree) for tree in instances]
        assert_close(batched(WEIGHT, instances), expected, 2e-5)
        assert apart(batched) is None
    before = batched.compilations
    batched(WEIGHT, trees(2, 1, 2, 3, 3))
    assert batched.compilations == before


def test_documents_whose_last_sentences_are_equally_long():
    """By chance, in all that have so many: others with as many need not."""

    def total(weight, sentences):
        return sum(jnp.tanh(x @ weight).sum(0) for x in sentences)

    documents = arrays((3, 2), (5, 2), (4,))
    batched = agree(total, documents)
    batched(WEIGHT, documents)
    before = batched.compilations
    instances = arrays((3, 4), (1, 3), (2,))
    expected = [total(WEIGHT, sentences) for sentences in instances]
    assert_close(list(batched(WEIGHT, instances)), expected, 2e-5)
    assert batched.compilations == before


def test_what_differs_in_the_names_of_symbols_only_runs_together():
    """Without a cell: JAX makes functions of its own of the same rules, again and again."""

    def leaf(weight, x):
        return (jax.nn.softmax(x @ weight @ x.T) @ jax.nn.relu(x)).sum(0)

    def encode(weight, tree):
        return leaf(weight, tree) if not isinstance(tree, tuple) else sum_of(weight, tree)

    def sum_of(weight, tree):
        return encode(weight, tree[0]) - encode(weight, tree[1])

    ((a, b, c, d),) = arrays((3, 1, 4, 3))
    plan = jedbatch.batch(encode).plan(WEIGHT, [(a, b), (c, (d, a)), ((a, b), (c, d))])
    assert len(plan.host.ragged_calls.stages) == 1


# --- lengths that must be equal ---

EQUAL = {
    "sum": lambda w, t: ((t[0] + t[1]) @ w).sum(0),
    "loop": lambda w, t: jax.lax.scan(
        lambda h, rows: (jnp.tanh(h @ w + rows[0] * rows[1]), None), jnp.ones(2), t[:2]
    )[0],
    "keys and values": lambda w, t: ragged.attention(t[2] @ w, t[0], t[1]).sum(0),
    "causal": lambda w, t: ragged.attention(t[0] @ w, t[1], t[1], causal=True).sum(0),
}


@pytest.mark.slow
def test_lengths_that_must_be_equal():
    def fn(weight, instance):
        return {name: part(weight, instance) for name, part in EQUAL.items()}

    instances = arrays((3, 3, 2), (2, 2, 2), (4, 4, 1))
    batched = agree(fn, instances)
    assert apart(batched) is None
    batched(WEIGHT, instances)
    before = batched.compilations
    batched(WEIGHT, arrays((5, 5, 1), (1, 1, 3), (2, 2, 3)))
    assert batched.compilations == before
    with pytest.raises(TypeError, match=r"\(3, 2\), \(2, 2\)"):
        batched(WEIGHT, arrays((3, 3, 2), (3, 2, 2)))
    assert apart(batched) is None


def test_lengths_that_must_be_equal_or_one():
    """A row that is added to all rows is another function: those instances run by themselves."""
    fn = EQUAL["sum"]
    for lengths in ([(2, 2), (1, 5), (4, 4)], [(1, 5), (3, 3)]):
        instances = arrays(*lengths)
        batched = jedbatch.batch(fn)
        expected = jnp.stack([fn(WEIGHT, pair) for pair in instances])
        assert_close(batched(WEIGHT, instances), expected, 2e-5)
        assert "has to know the lengths" in apart(batched)
        batched.plan(WEIGHT, arrays((4, 4), (3, 3), (2, 2)))
        assert apart(batched) is None


def odd_one(weight, instance):
    """By a mark: what has a rule for lengths, or one of two things that have none."""
    x, mark = instance
    if mark == 1:
        return jnp.real(jnp.fft.fft(x, axis=0)).sum() * weight.sum()
    if mark == 2:
        return jnp.linalg.norm(x, 2) * weight.sum()
    return jnp.tanh(x @ weight).sum()


def marked(lengths, marks):
    return [(x, mark) for (x,), mark in zip(arrays(*zip(lengths)), marks, strict=True)]


@pytest.mark.parametrize("begins", ["alike", "odd"])
def test_an_instance_without_a_rule_for_lengths_runs_by_itself(begins):
    """The others run together, as do all later ones; the plan and one warning name it."""
    batched = jedbatch.batch(odd_one)

    def agree(given):
        got, slope = jax.value_and_grad(lambda w: batched(w, given).sum())(jnp.asarray(WEIGHT))
        loop = lambda w: sum(odd_one(w, x) for x in given)  # noqa: E731
        want, theirs = jax.value_and_grad(loop)(jnp.asarray(WEIGHT))
        assert_close((got, slope), (want, theirs), 1e-4)

    if begins == "alike":
        agree(marked((3, 5, 7), (0, 0, 0)))
    mixed = marked((3, 6, 4, 5), (0, 1, 0, 2))
    fft, loop = (
        r"`fft` of arrays of different lengths, in instance 1",
        r"`svd` .*, in instance 3",
    )
    with pytest.warns(GroupedByShapesWarning, match=f"by themselves.*{fft}.*{loop}|{loop}.*{fft}"):
        agree(mixed)
    plan = batched.plan(WEIGHT, mixed)
    assert re.search(fft, str(plan))
    assert re.search(loop, str(plan))
    batched.plan(WEIGHT, marked((6, 2), (1, 1)))
    assert apart(batched) == "`fft` of arrays of different lengths"
    agree(marked((2, 8, 4), (0, 0, 0)))
    assert apart(batched) is None
    assert "graph     0 nodes of 0 types" in str(
        batched.plan(WEIGHT, marked((9, 10, 11), (0, 0, 0)))
    )
    batched(WEIGHT, marked((9, 10, 11), (0, 0, 0)))
    compilations = batched.compilations
    for lengths in ((3, 7, 5), (2, 6, 8)):
        batched(WEIGHT, marked(lengths, (0, 0, 0)))
    assert batched.compilations == compilations


def test_many_instances_without_a_rule_are_found_at_once():
    """Their number is no factor in how often all others are recorded."""
    calls = []

    def fn(weight, instance):
        calls.append(instance)
        x, mark = instance
        return jnp.fft.fft(x, axis=0).real.sum() * mark if mark % 2 else (x @ weight).sum() * mark

    batched = jedbatch.batch(fn)
    given = marked([2 + k % 3 for k in range(12)], range(12))
    with pytest.warns(GroupedByShapesWarning):
        got = batched(WEIGHT, given)
    assert len(calls) <= 6 * len(given)
    assert_close(got, jnp.stack([fn(WEIGHT, x) for x in given]), 1e-5)
    assert "in instances 1, 3, 5, 7, 9, 11" in apart(batched)


def test_instances_none_of_which_has_a_rule_are_recorded_once():
    """No two are alike but for lengths, so that none says anything of the others by its key."""
    calls = []

    def fn(weight, instance):
        calls.append(instance)
        marks, x = instance
        return (jnp.stack([weight[1 - m] for m in marks]) * x[:, None]).sum(0)

    def minibatch(seed):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(6, 10, 24).tolist()
        return [
            (rng.integers(0, 2, n).tolist(), rng.normal(size=n).astype(np.float32)) for n in lengths
        ]

    batched = jedbatch.batch(fn)
    for seed in range(5):
        batched.plan(WEIGHT, minibatch(seed))
    assert "has to know the lengths" in apart(batched)
    calls.clear()
    given = minibatch(5)
    batched.plan(WEIGHT, given)
    assert len(calls) <= len(given)
    assert_close(batched(WEIGHT, given), jnp.stack([fn(WEIGHT, x) for x in given]), 1e-5)


@pytest.mark.parametrize("cache_size", [None, 1])
def test_instances_are_told_apart_in_several_ways_at_once(cache_size):
    """As few as are kept, what one does does not make another be looked at for ever."""

    def fn(weight, triple):
        x, y, z = triple
        return ((x + y) * z).sum(0) @ weight

    options = {} if cache_size is None else {"cache_size": cache_size}
    batched = jedbatch.batch(fn, **options)
    given = arrays((1, 5, 5), (5, 1, 5), (5, 5, 1), (4, 4, 4), (3, 3, 3), (1, 1, 4))
    assert_close(batched(WEIGHT, given), jnp.stack([fn(WEIGHT, x) for x in given]), 1e-5)


def test_what_one_form_has_shown_is_known_of_others():
    def encode(weight, tree):
        if len(tree) == 3:
            return encode(weight, tree[0]) - encode(weight, tree[1])
        words, marks = tree
        return (jnp.tanh(words @ weight) * marks[:, None]).sum(0)

    def tree(*lengths):
        leaves = [(x, np.ones(len(x), np.float32) * len(x)) for (x,) in arrays(*lengths)]
        return functools.reduce(lambda a, b: (a, b, None), leaves)

    runs = []

    def counted(weight, instance):
        runs.append(instance)
        return encode(weight, instance)

    trees = [tree((3,), (2,)), tree((2,), (2,), (4,)), tree((1,), (3,), (3,), (2,))]
    batched = jedbatch.batch(counted)
    expected = jnp.stack([encode(WEIGHT, t) for t in trees])
    assert_close(batched(WEIGHT, trees), expected, 1e-5)
    assert apart(batched) is None
    runs.clear()
    batched.plan(WEIGHT, [tree((1,), (2,), (5,), (5,), (3,), (4,))])
    assert len(runs) == 1


# --- Python looks at lengths ---


@functools.lru_cache
def remembered(n):
    return 1.0 * n


@functools.partial(jax.jit, static_argnames="n")
def scaled(x, n):
    return x.sum(0) * n


def caught(x, y):
    try:
        return 2 if x.shape[0] == 3 else 1
    except Exception:
        return 5


LOOKS = {
    "set": lambda x, y: 2 if x.shape[0] in {3, 4} else 1,
    "dict": lambda x, y: {3: 2, 5: 3}.get(len(x), 1),
    "dict of shapes": lambda x, y: {(3, 2): 2, (5, 2): 3}.get(x.shape, 1),
    "tuple": lambda x, y: 2 if x.shape[0] in (3, 4) else 1,
    "range": lambda x, y: 2 if x.shape[0] in range(4) else 1,
    "distinct": lambda x, y: len({x.shape, y.shape}),
    "counted": lambda x, y: max(collections.Counter([x.shape[0], y.shape[0]]).values()),
    "cache": lambda x, y: remembered(x.shape[0]),
    "equal shapes": lambda x, y: 1 if x.shape == y.shape else 2,
    "unequal": lambda x, y: 1 if x.shape[0] != y.shape[0] else 2,
    "order": lambda x, y: 1 if x.shape < y.shape else 2,
    "difference": lambda x, y: 1 if x.shape[0] - y.shape[0] else 2,
    "larger": lambda x, y: int(max(x.shape[0], y.shape[0])),
    "sorted": lambda x, y: int(sorted([x.shape[0], y.shape[0]])[0]),
    "cut": lambda x, y: 1 if x[: y.shape[0]].shape[0] == 2 else 2,
    "f-string": lambda x, y: 2 if f"{x.shape[0]}" == "3" else 1,
    "padded": lambda x, y: 2 if f"{x.shape[0]:02d}" == "03" else 1,
    "str": lambda x, y: 2 if str(x.shape) == "(3, 2)" else 1,
    "percent": lambda x, y: 2 if "%s" % x.shape[0] == "3" else 1,  # noqa: UP031
    "number": lambda x, y: len(f"{10 ** x.shape[0]}"),
    "int": lambda x, y: int(x.shape[0]),
    "root": lambda x, y: math.sqrt(x.shape[0]),
    "numpy": lambda x, y: int(np.maximum(x.shape[0], y.shape[0])),
    "rows": lambda x, y: sum(1 for _ in x),
    "list": lambda x, y: sum([1, 2, 3, 4, 5, 6, 7][: x.shape[0]]),
    "equal types": lambda x, y: 1 if jax.typeof(x) == jax.typeof(y) else 2,
    "unequal types": lambda x, y: 1 if jax.typeof(x) != jax.typeof(y) else 2,
    "set of types": lambda x, y: len({jax.typeof(x), jax.typeof(y)}),
    "dict of types": lambda x, y: {jax.typeof(jnp.ones((3, 2))): 2}.get(jax.typeof(x), 1),
    "written type": lambda x, y: 2 if "[3,2]" in str(jax.typeof(x)) else 1,
    "array_equal": lambda x, y: jnp.where(jnp.array_equal(x, y), 2, 3),
    "caught": caught,
    "bit": lambda x, y: x.shape[0] & 1,
}


# Python is not told here: it looks a length up, or asks for what is no comparison of numbers.
GROUPED = {"set", "dict of shapes", "distinct", "counted", "cache", "number", "bit", "array_equal"}
GROUPED |= {"set of types", "dict of types", "written type"}


@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_lengths(name):
    """Every instance is recorded as the loop computes it; nothing is compiled here."""
    look = LOOKS[name]
    seen = []

    def fn(weight, pair):
        factor = look(*pair)
        seen.append(factor)
        return pair[0].sum(0)

    pairs = arrays((3, 3), (5, 2), (1, 4), (3, 2))
    batched = jedbatch.batch(fn)
    plan = batched.plan(WEIGHT, pairs)
    assert "test_lengths.py" in str(plan)
    assert (plan.host.apart is not None) == (name in GROUPED)
    got = [str(x) for x in seen[-len(pairs) :]]
    if "array_equal" not in look.__code__.co_names:
        assert got == [str(look(*pair)) for pair in pairs]


def test_hashing_by_jax_is_no_look():
    def fn(weight, pair):
        x, y = pair
        return scaled(x @ weight, n=y.shape[0]) + (jnp.eye(x.shape[0], y.shape[0]) @ y).sum(0)

    plan = jedbatch.batch(fn).plan(WEIGHT, arrays((3, 3), (5, 2), (1, 4)))
    assert plan.host.apart is None


def matched(n):
    match n:
        case int():
            return 2.0
    return 1.0


NO_LOOKS = {
    "int": lambda x, y: 2.0 if isinstance(y.shape[0], int) else 1.0,
    "not a float": lambda x, y: 2.0 if isinstance(x.shape[0] + 1, float | np.ndarray) else 1.0,
    "integral": lambda x, y: 2.0 if isinstance(x.shape[0], numbers.Integral) else 1.0,
    "match": lambda x, y: matched(x.shape[0]),
    "own type": lambda x, y: 2.0 if jax.typeof(x) == jax.typeof(jnp.sin(x)) else 1.0,
    "other dtype": lambda x, y: 2.0 if jax.typeof(x) == jax.typeof(y > 0) else 1.0,
    "weak": lambda x, y: 2.0 if x.aval.weak_type else 1.0,
    "like": lambda x, y: jnp.ones(jax.typeof(x).shape, y.aval.dtype).sum(),
    "shape of": lambda x, y: jax.eval_shape(jnp.sin, x).shape[0] * jnp.ones(()),
}


def test_what_holds_for_all_lengths_is_no_look():
    def fn(pair):
        return [1.0 * look(*pair) for look in NO_LOOKS.values()]

    pairs = [tuple(map(jnp.asarray, pair)) for pair in arrays((3, 3), (5, 2), (1, 4))]
    batched = jedbatch.batch(fn, in_axes=0, out_axes=None)
    assert_close(batched(pairs), [fn(pair) for pair in pairs], 0)
    assert apart(batched) is None


def test_powers_of_lengths_are_numbers():
    """Other ones than whole powers are no extents."""

    def fn(w, x):
        n, total = x.shape[0], (x @ w).sum()
        exponents = (2, 0.5, -0.5, -1, np.float32(1.5), jnp.float32(-2), jnp.int32(2))
        return [total * n**p for p in exponents] + [total * (n + 1) ** 0.5, total * 2.0**n]

    xs = [x for (x,) in arrays((3,), (5,), (1,))]
    assert apart(agree(fn, xs)) is None
    kinds = [[r.dtype for r in fn(WEIGHT, x)] for x in xs]
    assert [
        [r.dtype for r in out] for out in jedbatch.batch(fn, out_axes=None)(WEIGHT, xs)
    ] == kinds


def test_reasons_are_sentences_about_the_program():
    for fn in (
        lambda w, x: jnp.interp(0.5, x[:, 0], x[:, 1]),
        lambda w, x: x.sum(0) * round(x.shape[0]),
        lambda w, x: jnp.convolve(x[:, 0], x[:, 1]).sum(),
        lambda w, x: jnp.squeeze(x).sum(),
    ):
        batched = jedbatch.batch(fn)
        reason = batched.plan(WEIGHT, [x for (x,) in arrays((3,), (4,))]).host.apart
        assert "test_lengths.py" in reason, reason
        assert "object" not in reason


# --- arrays that are returned as they came ---


def test_arrays_returned_as_they_came():
    def fn(weight, instance):
        x, mask = instance
        return {"x": x, "mask": mask, "y": x @ weight, "sum": x.sum(0)}

    instances = [(x, x[:, 0] > 0) for (x,) in arrays((3,), (1,), (4,))]
    batched = jedbatch.batch(fn, out_axes=None)
    assert_close(batched(WEIGHT, instances), [fn(WEIGHT, i) for i in instances], 1e-5)
    assert apart(batched) is None
    xs = [x for x, _ in instances]
    same = jedbatch.batch(lambda x: x, in_axes=0, out_axes=None)
    assert_close(same(xs), [jnp.asarray(x) for x in xs], 0)
    slope = jax.grad(lambda xs: sum((x**3).sum() for x in same(xs)))(xs)
    assert_close(slope, [3 * jnp.asarray(x) ** 2 for x in xs], 1e-5)


def test_cotangents_of_results_of_other_lengths_compile_nothing():
    """Of rows, of a table and of rows along the last axis; some have none."""

    def fn(weight, pair):
        x, _ = pair
        y = jnp.tanh(x @ weight)
        return {"rows": y, "table": y @ y.T, "columns": jnp.sin(y).T, "sum": y.sum()}

    def pulled(run, instances):
        results, back = jax.vjp(lambda weight: run(weight, instances), jnp.asarray(WEIGHT))
        return back([jax.tree.map(lambda y: jnp.asarray(np.cos(y)), x) for x in results])[0]

    batched = jedbatch.batch(fn, out_axes=None)
    alone = jax.jit(fn)
    of_all = [arrays(*lengths) for lengths in CHANCE[1:]]
    of_all[0] += of_all[1][:1]
    for instances in of_all:
        expected = pulled(lambda weight, xs: [alone(weight, x) for x in xs], instances)
        assert_close(pulled(batched, instances), expected, 1e-4)
    turned = of_all[0][::-1]
    expected = pulled(lambda weight, xs: [alone(weight, x) for x in xs], turned)
    with testing.assert_no_recompile():
        found = pulled(batched, turned)
    assert_close(found, expected, 1e-4)

    def of_tables(run, weight):
        return sum(jnp.square(x["table"]).sum() for x in run(weight, turned))

    runs = [batched, lambda weight, xs: [alone(weight, x) for x in xs]]
    for derivative in (jax.grad, jax.hessian, lambda f: jax.jit(jax.grad(f)), jax.jacfwd):
        found, expected = (derivative(functools.partial(of_tables, run))(WEIGHT) for run in runs)
        assert_close(found, expected, 1e-3)


@jedbatch.cell
def repeated(weight, x, *, n):
    return (x @ weight).sum(0) * n


def test_lengths_as_static_arguments_of_cells():
    def fn(weight, xs):
        x, y, z = xs
        first = x.shape[0]
        return [repeated(weight, part, n=first) for part in (x, y, z)]

    batched = jedbatch.batch(fn, out_axes=None)
    instances = arrays((3, 2, 1), (1, 2, 2))
    assert_close(batched(WEIGHT, instances), [fn(WEIGHT, i) for i in instances], 2e-5)
    assert apart(batched) is None


def test_which_arrays_are_equally_long_of_one_instance_and_of_many():
    """And the least of each set, against sets that are put together one by one."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        count = int(rng.integers(2, 9))
        family = LengthFamily([((int(n), 2), np.dtype(np.float32), False) for n in range(count)])
        family.add([tuple(sorted(rng.choice(count, 2, replace=False).tolist())) for _ in range(3)])
        family.group([sorted(rng.choice(count, 2, replace=False).tolist())])
        lengths = rng.integers(1, 4, (4, count)).tolist()
        every = family.equal(lengths)
        assert [family.equal([own])[0] for own in lengths] == every
        for own, equal in zip(lengths, every, strict=True):
            sets = [{i} for i in range(count)]
            for a, b in [*family.pairs, *family.groups]:
                if own[a] == own[b]:
                    sets = [sets[a] | sets[b] if s & (sets[a] | sets[b]) else s for s in sets]
            assert family.classes(equal) == list(map(min, sets))


@pytest.mark.parametrize("words", ["n comes before m", "k, l, m and n", "it is broken"])
def test_errors_of_users_say_nothing_of_lengths(words):
    """What they are called, or that they may be for want of a bound, as a table's rows are one."""
    table = jnp.ones((40, 2))

    def fn(weight, instance):
        broken, x, y = instance
        if broken:
            raise ValueError(words)
        return ((jax.nn.softmax(x @ weight @ y.T) @ y).sum(0) + table[0]).sum()

    def given(*lengths, broken=False):
        return [(broken, *pair) for pair in arrays(*lengths)]

    batched = jedbatch.batch(fn)
    for _ in range(2):
        batched(WEIGHT, given((3, 5), (4, 6), (7, 2)))
        (session,) = batched._core.sessions.values()
        lengths, version = session.records.lengths, session.registry.assumptions.version
        before = lengths.bound, lengths.least, version("lengths")
        with pytest.raises(ValueError, match=words):
            batched(WEIGHT, [*given((3, 5)), *given((4, 4), broken=True)])
        assert (lengths.bound, lengths.least, version("lengths")) == before
    mixed = given((3, 5), (4, 4), (6, 6), (2, 9), (5, 5))
    lines = str(batched.plan(WEIGHT, mixed)).splitlines()
    assert [line.split(":")[0] for line in lines if "calls with" in line] == [
        "  ragged    5 calls with 49 rows"  # of one program, whatever is equally long
    ]
    assert_close(batched(WEIGHT, mixed), jnp.stack([fn(WEIGHT, x) for x in mixed]), 2e-5)
