"""Transformers and networks of sets: of one instance, an array of any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import lstms
from cases.helpers import assert_close
from cases.models import (
    OF_ARRAYS,
    SIZES,
    TAGGED,
    TRANSLATED,
    encoder,
    encoder_decoder,
    random_params,
    random_points,
    sets,
)

import jedbatch
from jedbatch import ragged
from jedbatch.data import BEGIN, END, as_arrays
from jedbatch.models import deepsets, layers, transformer

ATTENTION = {"plain": layers.plain_attention, "ragged": ragged.attention}
WORDS = as_arrays([((3, 1, 4),), ((5, 0),), ((2, 2, 1),)])


@pytest.mark.slow
def test_states_of_sentences():
    """Results of different shapes, a list."""
    model = encoder()
    params, encode = random_params(model), transformer.encoder(model)
    words = [words for (words,) in WORDS]
    states = jedbatch.batch(encode, out_axes=None)(params, words)
    assert [x.shape for x in states] == [(3, 8), (2, 8), (3, 8)]
    assert_close(states, [encode(params, x) for x in words], 1e-5)


# --- against their equations, with NumPy in double precision ---


def norm(p, x):
    deviation = x - x.mean(axis=1, keepdims=True)
    return (
        deviation / np.sqrt((deviation**2).mean(axis=1, keepdims=True) + 1e-6) * p["scale"]
        + p["bias"]
    )


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def attention(p, x, y, causal=False):
    """Head by head and row by row."""
    q, k, v = (z @ p[of]["kernel"] for of, z in {"queries": x, "keys": y, "values": y}.items())
    got = np.zeros_like(q)
    for head in np.split(np.arange(8), 2):
        for i in range(len(x)):
            end = i + 1 if causal else len(y)
            weights = softmax(k[:end, head] @ q[i, head] / np.sqrt(4))
            got[i, head] = weights @ v[:end, head]
    return got @ p["join"]["kernel"]


def stack(p, words, memory=None):
    x = p["words"]["embedding"][words] + p["positions"]["embedding"][: len(words)]
    for layer in p["layers"].values():
        normal = norm(layer["norm"], x)
        x = x + attention(layer["attention"], normal, normal, causal=memory is not None)
        if memory is not None:
            x = x + attention(layer["memory_attention"], norm(layer["memory_norm"], x), memory)
        wide = gelu(lstms.linear(layer["widen"], norm(layer["network_norm"], x)))
        x = x + lstms.linear(layer["narrow"], wide)
    return norm(p["norm"], x)


def test_encoder_against_its_equations():
    model = transformer.flax_encoder(6, 3, **SIZES | {"layers": 2})
    p = lstms.double(random_params(model, 1))
    params = lstms.single(p)
    words, tags = TAGGED[0]
    states = stack(p["encode"], words)
    assert_close(transformer.encoder(model)(params, words), states.astype(np.float32), 1e-5)
    loss, _ = lstms.score(lstms.linear(p["output"], states), tags)
    assert_close(transformer.tagger(model)(params, (words, tags)), loss, 1e-5)

    logits = lstms.linear(p["output"], states.mean(axis=0))
    assert_close(transformer.classifier(model)(params, words), logits.astype(np.float32), 1e-5)
    score = lstms.score(logits[None], [2])
    assert_close(transformer.scorer(model)(params, (words, np.int32(2))), score, 1e-5)


@pytest.mark.parametrize("attend", ATTENTION.values(), ids=ATTENTION)
def test_translator_against_its_equations(attend):
    model = encoder_decoder(attend)
    p = lstms.double(random_params(model, 1))
    params = lstms.single(p)
    source, target = TRANSLATED[1]
    before = np.array([BEGIN, *target[:-1]])
    states = stack(p["decode"], before, stack(p["encode"], source))
    logits = lstms.linear(p["output"], states)
    assert_close(
        transformer.decoder(model)(params, (source, target)), logits.astype(np.float32), 1e-5
    )
    loss, _ = lstms.score(logits, target)
    assert_close(transformer.translator(model)(params, (source, target)), loss, 1e-5)


@pytest.mark.parametrize("pool", [np.mean, np.max])
def test_sets_against_their_equations(pool):
    model = deepsets.flax_model(2, 3, 4, pool={np.mean: jnp.mean, np.max: jnp.max}[pool])
    p = lstms.double(random_params(model, 1))
    ((points, _),) = random_points(5)
    h = gelu(lstms.linear(p["points"], points))
    for layer in p["layers"].values():
        others = pool(h, axis=0) @ layer["others"]["kernel"]
        h = gelu(lstms.linear(layer["own"], h) + others)
    logits = lstms.linear(p["output"], pool(h, axis=0))
    got = deepsets.classifier(model)(lstms.single(p), points)
    assert_close(got, logits.astype(np.float32), 1e-5)


# --- what the models promise ---


def test_words_do_not_see_what_comes_after_them():
    """Another word t changes no logits up to its own, and all after it."""
    model = encoder_decoder()
    params, decode = random_params(model), jax.jit(transformer.decoder(model))
    source, target = np.array([3, 1, 4]), np.array([2, 4, 2, 3, END])
    logits = decode(params, (source, target))
    for t in range(len(target) - 1):
        other = target.copy()
        other[t] = 0
        changed = np.abs(decode(params, (source, other)) - logits).max(axis=1) > 1e-4
        assert changed.tolist() == [i > t for i in range(len(target))]
    assert (np.abs(decode(params, (source[::-1], target)) - logits).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize("pool", [jnp.mean, jnp.max])
def test_the_order_of_a_set_means_nothing(pool):
    model = sets(pool)
    params, classify = random_params(model), jax.jit(deepsets.classifier(model))
    ((points, _),) = random_points(6)
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(points)
        assert_close(classify(params, shuffled), classify(params, points), 1e-5)


def test_the_order_of_words_matters():
    model = encoder()
    params, classify = random_params(model), transformer.classifier(model)
    there, back = (classify(params, np.array(words)) for words in ([1, 2, 3], [3, 2, 1]))
    assert np.abs(there - back).max() > 1e-3


def symbolic(example):
    """The types of an instance whose arrays have any number of rows, one for each length."""
    lengths = sorted({len(x) for x in example if x.ndim})
    sizes = jax.export.symbolic_shape(
        ", ".join("nm"[: len(lengths)]), constraints=[f"{d} <= 64" for d in "nm"[: len(lengths)]]
    )
    return tuple(
        jax.ShapeDtypeStruct(
            (sizes[lengths.index(len(x))], *x.shape[1:]) if x.ndim else (), x.dtype
        )
        for x in example
    )


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_traced_for_all_lengths_at_once(name):
    model = OF_ARRAYS[name]
    cells = model.cells()
    params = jax.eval_shape(cells.init, jax.random.key(0))
    slopes = jax.grad(lambda p, x: model.loss(cells)(p, x).sum())
    traced = jax.make_jaxpr(slopes)(params, symbolic(model.instances[1]))
    assert [x.shape for x in traced.out_avals] == [x.shape for x in jax.tree.leaves(params)]


@pytest.mark.slow
def test_compiled_for_all_lengths_at_once():
    model = encoder()
    params = random_params(model)
    run = jax.jit(jax.value_and_grad(transformer.tagger(model)))
    compiled = jax.export.export(run)(params, symbolic(TAGGED[0]))
    for sentence in TAGGED[:2]:
        assert_close(compiled.call(params, sentence), run(params, sentence), 3e-5)


def test_long_sentences_need_positions():
    model = encoder()
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"64 words at most got 65.*`max_length`"):
        jax.eval_shape(transformer.encoder(model), params, np.zeros(65, np.int32))
