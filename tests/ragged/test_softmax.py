"""Softmax along ragged axes: padding changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check
from jax import export

from jedbatch._jaxpr.interpret import interpret
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.symbolic_dims import make_symbol
from jedbatch._ragged.phases import flattened

N = make_symbol("n", export.SymbolicScope())
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)
LAST, PADDED = 4, 6  # rows of X that exist, and all of them


def own_softmax(scores):
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def of_a_vector(x):
    scores = x @ W[0]
    weights = jnp.exp(scores - scores.max())
    return (weights / weights.sum()) @ x


def causal(x):
    scores = x @ W @ x.T
    place = jnp.arange(x.shape[0])
    return jax.nn.softmax(jnp.where(place[:, None] >= place[None], scores, -jnp.inf)) @ x


def in_half_precision(x):
    weights = jax.nn.softmax(x @ W @ x.T).astype(jnp.bfloat16)
    return jnp.einsum("nm,md->nd", weights, x.astype(jnp.bfloat16)).astype(jnp.float32)


SOFTMAXES = {
    "attention": lambda x: jax.nn.softmax(x @ W @ x.T) @ x,
    "written out": lambda x: own_softmax(x @ W @ x.T) @ x,
    "causal": causal,
    "in half precision": in_half_precision,
    "keys first": lambda x: jax.nn.softmax(x @ W @ x.T, axis=0).T @ x,
    "pooling": lambda x: jax.nn.softmax(x @ W[0]) @ x,
    "weights of rows": lambda x: jax.nn.softmax(jnp.tanh(x), axis=0),
    "sum of exponentials": lambda x: jax.nn.logsumexp(x, axis=0),
    "of a vector": of_a_vector,
    "over all": lambda x: jax.nn.logsumexp(x @ W @ x.T),
}


def entropy(x):
    weights = jax.nn.softmax(x @ W[0])
    return -(weights * jnp.log(weights)).sum()


def with_scores(x):
    scores = jnp.tanh(x @ W[0])
    return (jax.nn.softmax(scores) * scores).sum()


OTHERS = {
    "entropy": entropy,
    "with scores": with_scores,
    "of a logarithm": lambda x: (jax.nn.log_softmax(x @ W[0]) * x[:, 0]).sum(),
    "some rows": lambda x: jax.nn.logsumexp((x @ W[0])[1:]),
    "another shift": lambda x: jnp.exp(x @ W[0] - x[0, 0]).sum() + (x @ W[0]).max(),
    "of rows that are read": lambda x: jax.nn.softmax(x, axis=0).T @ x,
    "squared": lambda x: (jax.nn.softmax(x @ W[0]) ** 0.5).sum(),
    "no maximum": lambda x: jnp.exp(x @ W[0]).sum(),
}


def padded_run(fn):
    """Returns a function of [n, 4] as one of padded rows."""
    closed = flattened(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((N, 4), jnp.float32)))
    rules = Padded({"n": PADDED}, {"n": jnp.int32(LAST)}, guarded=False)
    return lambda x: interpret(closed.jaxpr, closed.consts, [x], rules.run)[0]


def assert_padding_changes_nothing(fn, run):
    """Compares values and gradients with those of the rows that exist, by themselves."""
    expected, back = jax.vjp(fn, X[:LAST])
    result, padded_back = jax.vjp(run, X)
    sent = jnp.cos(jnp.arange(expected.size, dtype=expected.dtype)).reshape(expected.shape)
    if result.shape != expected.shape:
        result, sent_padded = result[:LAST], jnp.zeros_like(result).at[:LAST].set(sent)
    else:
        sent_padded = sent
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    (slope,), (padded_slope,) = back(sent), padded_back(sent_padded)
    np.testing.assert_allclose(padded_slope[:LAST], slope, rtol=1e-2, atol=1e-5)
    assert not padded_slope[LAST:].any()


@pytest.mark.parametrize("fn", (SOFTMAXES | OTHERS).values(), ids=SOFTMAXES | OTHERS)
def test_padding_changes_nothing(fn):
    assert_padding_changes_nothing(fn, padded_run(fn))


def test_scores_that_are_all_minus_infinity():
    """They make NaN of their own row, as without padding, and of no other one."""

    def fn(x):
        scores = jnp.where((jnp.arange(x.shape[0]) == 1)[:, None], -jnp.inf, x @ x.T)
        return jax.nn.softmax(scores) @ x

    out = padded_run(fn)(X)[:LAST]
    np.testing.assert_allclose(out, fn(X[:LAST]), 1e-5)
    assert list(np.isnan(out).all(axis=1)) == [False, True, False, False]


def test_minibatches_of_any_lengths():
    """Softmaxes of minibatches have the values and gradients of the loop over instances."""

    def fn(w, x):
        rows = x + jax.nn.softmax(x @ w @ x.T) @ x
        return jax.nn.softmax(rows @ w[0]) @ rows, jax.nn.logsumexp(rows, axis=0).sum()

    xs = [jnp.asarray(RNG.normal(size=(n, 4)), jnp.float32) for n in (1, 7, 3, 40, 2)]
    check(fn, W, xs)
