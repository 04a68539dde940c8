"""Several lists in one computation, of which each has a length of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop, mostly_slow

import jedbatch

P = {
    "e": jnp.asarray(np.random.default_rng(0).normal(size=(30, 4)), jnp.float32),
    "w": jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)) / 2, jnp.float32),
}
LEAF = jedbatch.cell(lambda p, i: p["e"][i], name="leaf")


def sums(p, a, b):
    return jnp.tanh(sum(a) @ p["w"] + sum(b))


def means(p, a, b):
    return jnp.stack(a).mean(0) - len(b) * jnp.stack(b).max(0)


def attention(p, a, b):
    """Of the elements of one list to those of the other."""
    a, b = jnp.stack(a), jnp.stack(b)
    return (jax.nn.softmax(a @ p["w"] @ b.T) @ b).mean(0) + a.max(0)


def among_each(p, a, b):
    a, b = jnp.stack(a), jnp.stack(b)
    return (jax.nn.softmax(a @ a.T) @ a).sum(0) - jnp.cumsum(b @ p["w"], 0)[-1]


def positions(p, a, b):
    return (jnp.stack(a) + p["e"][: len(a)]).max(0) + (jnp.stack(b) * p["e"][: len(b)]).sum(0)


def end_to_end(p, a, b):
    return jnp.concatenate([jnp.stack(a), jnp.stack(b)]).max(0)


def scans(p, a, b):
    def step(h, x):
        return jnp.tanh(h @ p["w"] + x), None

    return jax.lax.scan(step, jax.lax.scan(step, jnp.zeros(4), jnp.stack(a))[0], jnp.stack(b))[0]


def both_lengths(p, a, b):
    """Numbers that follow from both lengths."""
    rows = jnp.concatenate([jnp.stack(a), jnp.stack(b)]) + p["e"][: len(a) + len(b)]
    pairs = (jnp.stack(a)[:, None] * jnp.stack(b)[None]).reshape(len(a) * len(b), 4)
    return rows.mean(0) + pairs.max(0) + (sum(a) + sum(b)) / (len(a) + len(b))


def three(p, a, b, c):
    return (jnp.stack(a) @ p["w"] @ jnp.stack(b).T).max(1).mean() * sum(c)


CELLS = [
    sums,
    means,
    attention,
    among_each,
    positions,
    end_to_end,
    scans,
    both_lengths,
    three,
]


def instances(rng, num_lists, count=8, most=9):
    def words():
        return rng.integers(0, 30, rng.integers(2, most)).tolist()

    return [tuple(words() for _ in range(num_lists)) for _ in range(count)]


def of_lists(fn):
    """A function of lists of words, and the loop's."""
    cell = jedbatch.cell(fn)

    def model(p, lists):
        return cell(p, *[[LEAF(p, word) for word in words] for words in lists])

    return model


@pytest.mark.parametrize("fn", mostly_slow(CELLS, "sums", "both_lengths"))
def test_lists_of_any_lengths_share_types(fn):
    model, rng = of_lists(fn), np.random.default_rng(0)
    batched, known = jedbatch.batch(model), []
    for _ in range(5):
        given = instances(rng, 3 if fn is three else 2)
        assert_close(batched(P, given), loop(model, P, given), rtol=1e-4)
        known.append(batched.compilations)
    assert known[-1] == known[-2]
    plan = batched.plan(P, given)
    assert len(plan.graph.present_types) <= 3  # the leaf, and room for 4 or for 8 elements
    given += [([3], *[[1, 2]] * (len(given[0]) - 1)), ([4],) * len(given[0])]
    squares = jax.grad(lambda p: jnp.square(batched(p, given)).sum())(P)
    expected = jax.grad(lambda p: jnp.square(loop(model, p, given)).sum())(P)
    assert_close(squares, expected, rtol=1e-4)


def test_lists_that_were_equally_long_at_first():
    model, rng = of_lists(sums), np.random.default_rng(0)
    batched = jedbatch.batch(model)
    equal = [(a, b[: len(a)]) for a, b in instances(rng, 2) if len(b) >= len(a)]
    for given in (equal * 2, *(instances(rng, 2) for _ in range(3)), equal):
        assert_close(batched(P, given), loop(model, P, given), rtol=1e-4)


def test_pairs_of_sentences_of_which_python_asks_the_lengths():
    def match(p, pair):
        a, b = (p["e"][words] + p["e"][: len(words)] for words in (pair["a"], pair["b"]))
        return (jax.nn.softmax(a @ p["w"] @ b.T) @ b).mean(0)

    rng = np.random.default_rng(0)
    batched, known = jedbatch.batch(match), []
    for _ in range(4):
        pairs = [
            {k: rng.integers(0, 30, rng.integers(2, 20)) for k in ("a", "b")} for _ in range(8)
        ]
        assert_close(batched(P, pairs), loop(match, P, pairs), rtol=1e-4)
        known.append(batched.compilations)
    assert known[-1] == known[-3]
    assert len(batched.plan(P, pairs).graph.present_types) <= 2


def test_what_is_done_with_a_list_that_nobody_reads():
    def unread(p, a, b):
        jnp.stack(b) * p["e"][: len(b)]
        return jnp.stack(a).mean(0)

    model, rng = of_lists(unread), np.random.default_rng(0)
    batched = jedbatch.batch(model)
    for _ in range(3):
        given = [*instances(rng, 2), ([1, 2, 3], [4])]
        assert_close(batched(P, given), loop(model, P, given), rtol=1e-4)


def rows_of_both(p, a, b):
    """Results of both lists are read row by row."""
    a, b = jnp.stack(a), jnp.stack(b)
    left, right, h = jax.nn.softmax(a @ b.T) @ b, jax.nn.softmax(b @ a.T) @ a, p["w"][0]
    for k in range(len(a)):
        h = STEP(p, h, left[k])
    for k in range(len(b)):
        h = STEP(p, h, -right[k])
    return h


def layers(p, a, b):
    """Lists attend to each other again and again."""
    a, b = jnp.stack(a), jnp.stack(b)
    for _ in range(2):
        a, b = a + jax.nn.softmax(a @ b.T) @ b, b + jax.nn.softmax(b @ p["w"] @ a.T) @ a
    return a.mean(0) - b.max(0)


STEP = jedbatch.cell(lambda p, h, x: jnp.tanh(h @ p["w"] + x), name="step")
OUTSIDE = {attention: 8, end_to_end: 4, rows_of_both: 10, layers: 6}  # fn: node types at most


@pytest.mark.parametrize("fn", mostly_slow(OUTSIDE, "layers", "end_to_end"))
def test_lists_outside_of_cells(fn):
    """Some are as long as their elements or as each other, and some have one element."""

    def model(p, pair):
        return fn(p, *([LEAF(p, word) for word in words] for words in pair))

    rng = np.random.default_rng(0)
    batched, known = jedbatch.batch(model), []
    for _ in range(5):
        given = instances(rng, 2)
        assert_close(batched(P, given), loop(model, P, given), rtol=1e-4)
        known.append(batched.compilations)
    assert known[-1] == known[-2]
    assert len(batched.plan(P, given).graph.present_types) <= OUTSIDE[fn]
    given += [([3], [1, 2]), ([4], [5])]
    squares = jax.grad(lambda p: jnp.square(batched(p, given)).sum())(P)
    expected = jax.grad(lambda p: jnp.square(loop(model, p, given)).sum())(P)
    assert_close(squares, expected, rtol=1e-4)


def test_lists_given_by_keyword():
    """Beside positional lists, and by themselves."""
    mean = jedbatch.cell(lambda p, a, *, b: sum(a) / (len(a) + 1) + jnp.stack(b).max(0))
    rows = jedbatch.cell(lambda p, *, scale, b: jnp.stack(b).mean(0) * scale)

    def model(p, pair):
        a, b = ([LEAF(p, word) for word in words] for words in pair)
        return mean(p, a, b=b) + rows(p, scale=2.0, b=b)

    rng, batched = np.random.default_rng(0), jedbatch.batch(model)
    for _ in range(4):
        given = instances(rng, 2)
        assert_close(batched(P, given), loop(model, P, given), rtol=1e-4)
    assert len(batched.plan(P, given).graph.present_types) <= 6
