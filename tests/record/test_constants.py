"""Arrays that functions make themselves, of any length: constants of instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import jedbatch

D = 4
WORDS = [f"w{k}" for k in range(20)]
VOCABULARY = {word: k for k, word in enumerate(WORDS)}
PARAMS = {
    "E": jax.random.normal(jax.random.key(0), (20, D)),
    "W": jax.random.normal(jax.random.key(1), (D, D)),
}


def texts(seed, count=8, longest=20):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, n)) for n in random.integers(2, longest, count)]


def numbers(text):
    return [VOCABULARY[word] for word in text.split()]


def attend(rows):
    return (jax.nn.softmax(rows @ rows.T) @ rows).mean(0)


def check(fn, instances, batched=None):
    """Compares values with those of the loop; returns the batched function."""
    batched = batched or jedbatch.batch(fn)
    for ours, instance in zip(batched(PARAMS, instances), instances, strict=True):
        assert_allclose(ours, fn(PARAMS, instance), rtol=1e-5, atol=1e-5)
    return batched


def of_jax(params, text):
    return attend(params["E"][jnp.array(numbers(text))])


def of_numpy(params, text):
    return attend(params["E"][np.array(numbers(text))])


def of_tuple(params, words):
    return attend(params["E"][np.array(words)])


def with_mask_and_places(params, instance):
    words = instance["text"].split()
    mask = jnp.array([word != "w3" for word in words])
    rows = params["E"][jnp.array(numbers(instance["text"]))] + params["E"][jnp.arange(len(words))]
    return attend(rows * mask[:, None]) * instance["y"] + jnp.ones(D)


@jedbatch.cell
def encode(params, words):
    return attend(params["E"][words])


def of_tree(params, tree):
    if isinstance(tree, str):
        return encode(params, np.array(numbers(tree)))
    return jnp.tanh(of_tree(params, tree[0]) @ params["W"] + of_tree(params, tree[1]))


def labelled(seed):
    return [{"text": text, "y": float(k)} for k, text in enumerate(texts(seed))]


def trees(seed):
    own = texts(seed, 12)
    return [(a, (b, c)) for a, b, c in zip(own[::3], own[1::3], own[2::3], strict=True)] + own


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (of_jax, texts),
        (of_numpy, texts),
        (of_tuple, lambda seed: [tuple(numbers(x)) for x in texts(seed)]),
        (with_mask_and_places, labelled),
        (of_tree, trees),
    ],
)
def test_lengths_never_met_compile_nothing(fn, make):
    batched = check(fn, make(0))
    check(fn, make(1), batched)
    before = batched.compilations
    for seed in (2, 3):
        check(fn, make(seed), batched)
    assert batched.compilations == before


def test_gradient_is_that_of_the_loop():
    instances = labelled(0)
    batched = jedbatch.batch(with_mask_and_places)
    ours = jax.grad(lambda p: batched(p, instances).sum())(PARAMS)
    its = jax.grad(lambda p: sum(with_mask_and_places(p, x).sum() for x in instances))(PARAMS)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, its)


def test_all_of_it_runs_packed():
    batched = jedbatch.batch(of_jax)
    assert not len(batched.plan(PARAMS, texts(0)).graph.node_type)


def test_what_is_known_is_not_recorded_again():
    calls = []

    def fn(params, text):
        calls.append(text)
        return of_jax(params, text)

    batched = check(fn, texts(0), jedbatch.batch(fn))
    calls.clear()
    batched(PARAMS, texts(0)[::-1])
    assert not calls
    batched(PARAMS, texts(1))
    assert len(calls) == 8


def test_python_may_read_what_it_made():
    def fn(params, text):
        words = jnp.array(numbers(text))
        rows = params["E"][words]
        return rows.sum(0) if int(words[0]) > 9 else attend(rows)

    batched = check(fn, texts(0, 6, 5))
    check(fn, texts(1, 6, 5), batched)


def test_function_sees_other_tables_later():
    table = dict(VOCABULARY)

    def fn(params, text):
        return attend(params["E"][jnp.array([table[word] for word in text.split()])])

    batched = check(fn, texts(0))
    table.update(w3=4, w4=3)
    check(fn, texts(0), batched)


def test_weights_of_several_lengths_are_no_constants_of_instances():
    random = np.random.default_rng(0)
    layers = [random.normal(size=(n, D)).astype(np.float32) for n in (2, 3, 5, 6, 7)]

    def fn(params, x):
        return jnp.tanh(sum((params["W"] @ layer.T).sum() for layer in layers) + x)

    instances = [np.float32(k) for k in range(6)]
    plain = jedbatch.batch(fn)
    check(fn, instances, plain)
    graph = plain.plan(PARAMS, instances).graph
    assert len(graph.present_types) == 2  # the sum, of what is computed once, and the function


def test_arrays_that_all_instances_make_keep_their_length():
    def fn(params, text):
        start = jnp.zeros(D)  # of D rows in all of them
        scores = jnp.array([float(k) for k in numbers(text)])
        return jnp.tanh(start @ params["W"] + (params["E"][:1] * scores[:, None]).sum(0))

    batched = check(fn, texts(0))
    check(fn, texts(1), batched)
    before = batched.compilations
    check(fn, texts(2), batched)
    assert batched.compilations == before
