"""Tuples and lists of numbers that become arrays in the function are arrays of any length."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import jedbatch

D = 4
PARAMS = {
    "E": jax.random.normal(jax.random.key(0), (20, D)),
    "W": jax.random.normal(jax.random.key(1), (D, D)),
}


def attend(rows):
    return (jax.nn.softmax(rows @ rows.T) @ rows).mean(0)


def sentences(seed, count=6, longest=20):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, 20, n).tolist()) for n in random.integers(1, longest, count)]


def check(fn, *columns, batched=None, **close):
    """Compares values with those of the loop; returns the batched function."""
    batched = batched or jedbatch.batch(fn, in_axes=(None, *[0] * len(columns)))
    expected = [fn(PARAMS, *instance) for instance in zip(*columns, strict=True)]
    close = {"rtol": 1e-5, "atol": 1e-5, **close}
    for ours, its in zip(batched(PARAMS, *columns), expected, strict=True):
        assert_allclose(ours, its, **close)
    return batched


def compiles_once(fn, make=lambda words: words, **close):
    """Checks a function of sentences, and that sentences of other lengths compile nothing."""
    batched = check(fn, [make(x) for x in sentences(0)], **close)
    before = batched.compilations
    for seed in (1, 2):
        check(fn, [make(x) for x in sentences(seed)], batched=batched, **close)
    assert batched.compilations == before
    return batched


# --- spellings of one array ---


def of_array(params, words):
    return attend(params["E"][jnp.array(words)])


@pytest.mark.parametrize("make", [tuple, list, lambda words: [np.int32(w) for w in words]])
def test_array_of_a_sequence_has_no_length(make):
    batched = compiles_once(of_array, make)
    plan = batched.plan(PARAMS, [make(x) for x in sentences(3)])
    assert not len(plan.graph.node_type)  # all of it runs packed


def test_nothing_is_recorded_for_new_lengths():
    calls = []

    def fn(params, words):
        calls.append(len(calls))
        return of_array(params, words)

    batched = jedbatch.batch(fn)
    batched(PARAMS, sentences(0))
    recorded = len(calls)
    batched(PARAMS, sentences(1))
    assert len(calls) == recorded


def test_gradient_is_that_of_the_loop():
    words = sentences(4)
    batched = jedbatch.batch(of_array)
    ours = jax.grad(lambda p: batched(p, words).sum())(PARAMS)
    its = jax.grad(lambda p: sum(of_array(p, x).sum() for x in words))(PARAMS)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, its)


class Sentence(typing.NamedTuple):
    words: list
    label: int


@dataclasses.dataclass
class Example:
    words: tuple
    weight: float


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (lambda p, x: of_array(p, x["words"])[x["y"]], lambda w: {"words": w, "y": len(w) % D}),
        (lambda p, x: of_array(p, x.words)[x.label], lambda w: Sentence(list(w), len(w) % D)),
        (lambda p, x: of_array(p, x.words) * x.weight, lambda w: Example(w, len(w) / 2)),
    ],
)
def test_sequences_beside_other_values(fn, make):
    compiles_once(fn, make)


def test_floats_are_an_array():
    def fn(_, series):
        x = jnp.asarray(series)
        return jnp.sin(x).sum() + jnp.cumsum(x).max()

    compiles_once(fn, lambda words: [w / 4 for w in words])


def test_two_sequences_that_are_equally_long():
    def fn(params, words, tags):
        scores = params["E"][jnp.array(words)] @ params["W"]
        return jnp.take_along_axis(scores, jnp.array(tags)[:, None], 1).sum()

    batched = None
    for seed in (0, 1):
        words = sentences(seed)
        tags = [tuple(w % D for w in x) for x in words]
        batched = check(fn, words, tags, batched=batched)
    assert "ragged" in str(batched.plan(PARAMS, words, tags))


def test_lists_of_sentences():
    def fn(params, document):
        return attend(jnp.stack([of_array(params, x) for x in document]))

    documents = [sentences(seed, 3, 9) for seed in range(4)]
    batched = check(fn, documents)
    before = batched.compilations
    check(fn, [sentences(seed, 3, 9) for seed in range(4, 8)], batched=batched)
    assert batched.compilations == before


# --- stacks of what is computed from each element ---


def of_rows(params, words):
    return attend(jnp.stack([params["E"][w] for w in words]))


def of_tanh(params, words):
    return jnp.stack([jnp.tanh(params["E"][w] @ params["W"]) for w in words], 1).max(1)


def of_parts(params, words):
    return attend(jnp.concatenate([params["E"][w][None] for w in words]))


def of_reversed(params, words):
    def step(state, row):
        return jnp.tanh(state @ params["W"] + row), None

    rows = jnp.stack([params["E"][w] for w in reversed(words)])
    return jax.lax.scan(step, jnp.zeros(D), rows)[0]


def of_two(params, words):
    rows = jnp.stack([params["E"][w] for w in words])
    return rows.sum(0) * len(words) + jnp.stack([params["E"][w] ** 2 for w in words]).max(0)


@pytest.mark.parametrize("fn", [of_rows, of_tanh, of_parts, of_reversed, of_two])
def test_stack_of_what_is_computed_from_each(fn):
    """JAX stacks more than sixteen values in two steps, and one by giving it an axis."""
    first = [(3,), (1, 2), tuple(range(17)), tuple(range(19, -1, -1)), (5, 5, 5)]
    batched = check(fn, first)
    before = batched.compilations
    check(fn, [(7,), (9, 1), tuple(range(3, 20)), tuple(range(20)), (0, 1, 0)], batched=batched)
    assert batched.compilations == before
    assert "ragged" in str(batched.plan(PARAMS, first))


def test_sequences_without_their_last_or_first_element():
    def fn(params, words):
        before, after = jnp.array(words[:-1]), jnp.array(words[1:])
        return (params["E"][before] * params["E"][after]).sum()

    words = [tuple(range(n)) for n in (4, 9, 17, 18, 5, 2)]
    batched = check(fn, words)
    check(fn, [x[::-1] for x in words], batched=batched)
    assert "ragged" in str(batched.plan(PARAMS, words))


# --- sequences that stay what they are ---


def by_value(params, words):
    return params["E"][0] * sum(w for w in words if w > 3)


def by_type(params, words):
    return sum(params["E"][w] if isinstance(w, int) else 0 * params["E"][w] for w in words)


def in_cells(params, words):
    state = jnp.zeros(D)
    for w in words:
        state = cell(params, state, w)
    return state


@jedbatch.cell
def cell(params, state, word):
    return jnp.tanh(state @ params["W"] + params["E"][word])


def looked_up(params, words):
    names = {w: k for k, w in enumerate(words)}
    return params["E"][names[words[-1]]]


def by_python(params, words):
    return jnp.stack([params["E"][(w + 3) // 2 % 5] for w in words]).sum(0)


def by_position(params, words):
    return jnp.stack([params["E"][w] * k for k, w in enumerate(words)]).sum(0)


def by_numpy(params, words):
    return params["E"][np.array(words)].sum(0)


def caught(params, words):
    try:
        return params["E"][words[0]] * int(words[0])
    except TypeError:
        return params["E"][0] * 100


def some_of_them(params, words):
    return jnp.stack([params["E"][w] for w in words[::2]]).sum(0)


def changed(params, words):
    own = list(words)
    own.append(0)
    return params["E"][jnp.array(own)].sum(0)


@pytest.mark.parametrize(
    "fn",
    [
        by_value,
        by_type,
        in_cells,
        looked_up,
        by_python,
        by_position,
        by_numpy,
        caught,
        some_of_them,
        changed,
    ],
)
def test_other_uses_see_numbers(fn):
    batched = check(fn, sentences(5, 5, 6))
    check(fn, sentences(6, 5, 6), batched=batched)


def test_lists_may_change_in_the_function():
    def fn(params, words):
        words.append(1)
        return params["E"][jnp.array(words)].sum(0)

    words = [list(x) for x in sentences(7, 4, 6)]
    expected = [fn(PARAMS, [*x]) for x in words]
    batched = jedbatch.batch(fn)
    assert_allclose(batched(PARAMS, [[*x] for x in words]), np.stack(expected), rtol=1e-5)


def test_numbers_that_do_not_fit_are_an_error_as_before():
    batched = jedbatch.batch(of_array)
    with pytest.raises(OverflowError):
        batched(PARAMS, [(1, 2, 3), (1, 2**40)])


def test_a_number_that_names_no_row_is_an_error():
    batched = check(of_rows, sentences(0))
    for words in [(1, 20), (19,) * 5 + (-21,)]:
        with pytest.raises(IndexError):
            batched(PARAMS, [(1, 2), words])


# --- where arrays of any length are no part of a graph ---


def test_exports_take_them_as_they_are():
    words = [(1, 2), (3, 4, 5)]
    batched = check(of_array, words)
    exported = batched.export(PARAMS, words)
    graph = batched.graph(PARAMS, words)
    assert_allclose(exported(PARAMS, graph), batched(PARAMS, words), rtol=1e-5)


def test_elements_that_escape_say_so():
    kept = []

    def fn(params, words):
        kept.append(words)
        return of_array(params, words)

    jedbatch.batch(fn).plan(PARAMS, [(1, 2), (3, 4, 5)])
    assert len(kept[-1]) in (2, 3)
    with pytest.raises(jedbatch.errors.EscapedValueError, match="after its function was recorded"):
        kept[-1][0] + 1


# --- tuples of numbers in lists ---


def edges(seed, count=6):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, count)
    return [[tuple(x) for x in random.integers(0, 20, (n, 2)).tolist()] for n in lengths]


def messages(params, pairs):
    source, target = jnp.asarray(pairs).T
    sent = jnp.tanh(params["E"][source] @ params["W"])
    return jnp.zeros_like(params["E"]).at[target].add(sent).max(0)


def with_labels(params, pairs):
    return sum((params["E"][word] * (label + 1) for word, label in pairs), jnp.zeros(D))


def first_of_numpy(params, pairs):
    return params["E"][np.array(pairs)[:, 0]].sum(0)


def in_a_cell(params, pairs):
    return jedbatch.cell(lambda params, x: params["E"][jnp.array(x)].sum((0, 1)))(params, pairs)


def those_that_differ(params, pairs):
    return params["E"][jnp.array([a for a, b in pairs if a != b] + [0])].sum(0)


def test_lists_of_pairs_are_an_array():
    batched = jedbatch.batch(messages)
    check(messages, edges(0), batched=batched)
    before = batched.compilations
    for seed in (1, 2):
        check(messages, edges(seed), batched=batched)
    assert batched.compilations == before
    assert len(batched.plan(PARAMS, edges(3)).graph.present_types) <= 1  # messages run packed


@pytest.mark.parametrize("fn", [with_labels, first_of_numpy, in_a_cell, those_that_differ])
def test_pairs_at_which_python_looks_are_numbers(fn):
    batched = check(fn, edges(5, 4))
    check(fn, edges(6, 4), batched=batched)


def test_lists_of_tuples_that_are_as_long_by_accident():
    """A document whose sentences are equally long is a document like others."""

    def fn(params, document):
        return sum(params["E"][jnp.array(words)].max(0) for words in document)

    documents = [[(1, 2), (3, 4)], [(1, 2, 3), (4, 5)], [(6,)], [(7, 8, 9)] * 3]
    batched = check(fn, documents)
    check(fn, documents[::-1], batched=batched)


def test_pairs_beside_arrays_of_which_python_asks_the_length():
    def fn(params, graph):
        nodes = params["E"][graph["nodes"]] + params["E"][: len(graph["nodes"])]
        source, target = jnp.array(graph["edges"]).T
        return jnp.zeros_like(nodes).at[target].add(nodes[source]).max(0)

    def graphs(seed):
        random = np.random.default_rng(seed)
        for n in random.integers(3, 12, 6).tolist():
            pairs = [(i, int(random.integers(0, i))) for i in range(1, n)]
            yield {"nodes": random.integers(0, 20, n), "edges": pairs}

    batched = jedbatch.batch(fn)
    for seed in range(3):
        given = list(graphs(seed))
        check(fn, given, batched=batched)
    assert len(batched.plan(PARAMS, given).graph.present_types) <= 6
