"""Attention as the compiled core computes it: against the loop, and what is no such attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check

import jedbatch
from jedbatch._jaxpr.native_calls import target_of
from jedbatch._kernel.target import CPU
from jedbatch._ragged.instance_phase import InstancePhase
from jedbatch._support import native

close = functools.partial(assert_close, rtol=1e-5)
CORE = native.core()
LENGTHS = [3, 1, 18]
pytestmark = [
    pytest.mark.unoptimized,
    pytest.mark.skipif(
        CORE is None or "attention" not in CORE.xla_calls(), reason="the core has no attention"
    ),
]


def rows(count, *shape, seed=0):
    numbers = np.random.default_rng([seed, count]).normal(size=(count, *shape))
    return jnp.asarray(numbers, jnp.float32)


def of_heads(p, x):
    q, k, v = (jnp.tanh(x @ w).reshape(x.shape[0], 2, -1) for w in p)
    weights = jax.nn.softmax(jnp.einsum("nhd,mhd->hnm", q, k) * -0.7, axis=-1)
    return jnp.tanh(jnp.einsum("hnm,mhd->nhd", weights, v).reshape(x.shape[0], -1) @ p[0].T)


def of_one_head(p, x):
    return jnp.tanh(jax.nn.softmax(jnp.tanh(x @ p[0]) @ jnp.tanh(x @ p[1]).T / 2) @ x @ p[0])


def to_itself(p, x):
    x = jnp.tanh(x @ p[0])
    return jnp.tanh(jax.nn.softmax(x @ x.T) @ x @ p[1])


def keys_first(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    return jnp.tanh(jax.nn.softmax(k @ q.T, axis=0).T @ v @ p[1])


def to_another(p, pair):
    q, k, v = jnp.tanh(pair[0] @ p[0]), jnp.tanh(pair[1] @ p[1]), jnp.tanh(pair[1] @ p[2])
    return jnp.tanh(jax.nn.softmax(q @ k.T) @ v @ p[0])


def behind_a_row(p, x):
    """Of one row more than the instance has."""
    return of_one_head(p, jnp.concatenate([p[2][:1], x]))


def causal(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    numbers = jnp.arange(x.shape[0])
    seen = numbers[:, None] >= numbers[None]
    return jax.nn.softmax(jnp.where(seen, q @ k.T, -jnp.inf)) @ v


def over_queries(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    return jax.nn.softmax(q @ k.T, axis=0) @ v


def other_heads(p, x):
    q, k, v = (jnp.tanh(x @ w).reshape(x.shape[0], 2, -1) for w in p)
    weights = jax.nn.softmax(jnp.einsum("nhd,mhd->hnm", q, k))
    return jnp.einsum("hnm,mhd->nhd", weights[::-1], v)


def heads_last(p, x):
    q, k, v = (jnp.tanh(x @ w).reshape(x.shape[0], -1, 2) for w in p)
    weights = jax.nn.softmax(jnp.einsum("ndh,mdh->hnm", q, k))
    return jnp.einsum("hnm,mdh->ndh", weights, v)


def squared(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    return jax.nn.softmax(q @ k.T) ** 2 @ v


def weights_too(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    weights = jax.nn.softmax(q @ k.T)
    return weights @ v + weights.max(1, keepdims=True)


def scaled_by_weight(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    return jax.nn.softmax(q @ k.T * p[0][0, 0]) @ v


def scaled_to_nothing(p, x):
    q, k, v = (jnp.tanh(x @ w) for w in p)
    return jax.nn.softmax(q @ k.T * 1e-30 * 1e-30) @ v


def of_pair(p, pair):
    """Forms of attention, among rows and to those of another length."""
    own = [fn(p, pair[0]) for fn in (of_heads, of_one_head, to_itself, keys_first, behind_a_row)]
    return [jnp.square(y).sum() for y in (*own, to_another(p, pair))]


@pytest.fixture
def found(monkeypatch):
    """The attention that phases are, for all that are made."""
    made, init = [], InstancePhase.__init__

    def note(self, phase):
        init(self, phase)
        made.append(self._attention)

    monkeypatch.setattr(InstancePhase, "__init__", note)
    return made


def parameters():
    return [rows(6, 6, seed=s) / 2 for s in range(3)]


def pairs(lengths=LENGTHS):
    return [(rows(n, 6), rows(20 - n, 6, seed=1)) for n in lengths]


def calls_in(fn, *args):
    """How often the core is called for attention, forwards and backwards."""
    text = jax.jit(fn).lower(*args).as_text()
    names = [f"@{target_of(name)}(" for name in ("attention", "attention_back")]
    return [text.count(name) for name in names]


def test_values_and_gradients(found):
    batched = check(of_pair, parameters(), pairs(), alone=jax.jit(of_pair))
    assert sum(x is not None for x in found) == 6
    plan = batched.plan(parameters(), pairs())
    slope = jax.grad(lambda p: sum(map(jnp.sum, batched.apply(p, plan))))
    assert calls_in(slope, parameters()) == [6, 6]


@pytest.mark.parametrize(
    "fn",
    [
        causal,
        over_queries,
        other_heads,
        heads_last,
        squared,
        weights_too,
        scaled_by_weight,
        scaled_to_nothing,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_no_such_attention_runs_by_xla(found, fn):
    jedbatch.batch(fn, out_axes=None).plan(parameters(), [x for x, _ in pairs()])
    assert found
    assert not any(found)


def test_long_instances_run_by_xla():
    target = dataclasses.replace(CPU, attention_rows=16)
    for given, calls in ((CPU, [1, 0]), (target, [0, 0])):
        batched = jedbatch.batch(of_one_head, out_axes=None, target=given)
        plan = batched.plan(parameters(), [x for x, _ in pairs()])
        assert calls_in(lambda p: batched.apply(p, plan), parameters()) == calls  # noqa: B023


def test_programs_without_the_core_run_by_xla(monkeypatch):
    p = parameters()
    batched = jedbatch.batch(lambda p, x: of_one_head(p, x).sum())
    plan = batched.plan(p, [x for x, _ in pairs()])
    found = []
    for calls in ([1, 1], [0, 0]):
        slope = lambda p: jax.grad(lambda p: jnp.square(batched.apply(p, plan)).sum())(p)  # noqa: E731
        assert calls_in(slope, p) == calls
        found.append(jax.jit(slope)(p))
        monkeypatch.setenv(native.SWITCH, "0")
    jax.tree.map(close, *found)


def test_no_number_reaches_other_instances():
    """Neither what is no number, nor what is too large, nor what comes back to it."""
    p, (x, y, z) = parameters(), [x for x, _ in pairs([4, 6, 5])]
    batched = jedbatch.batch(of_one_head, out_axes=None)

    def total(p, xs):
        first, _, last = batched(p, xs)
        return jnp.sum(first) + jnp.sum(last)

    def loop(p, xs):
        return jnp.sum(of_one_head(p, xs[0])) + jnp.sum(of_one_head(p, xs[2]))

    for wrong in (jnp.nan, jnp.inf):
        xs = [x, y.at[2].set(wrong), z]
        assert np.isnan(batched(p, xs)[1]).any()
        found = jax.value_and_grad(total)(p, xs)
        jax.tree.map(close, found, jax.value_and_grad(loop)(p, xs))


def test_other_transforms_run_by_xla():
    """Forward mode, derivatives of derivatives, and several parameters at once."""
    p, xs = parameters(), [x for x, _ in pairs()[:2]]
    batched = jedbatch.batch(lambda p, x: of_one_head(p, x).sum())
    loop = jax.jit(lambda p: jnp.stack([of_one_head(p, x).sum() for x in xs]))
    other = jax.tree.map(jnp.cos, p)

    def moved(run):
        slope = jax.grad(lambda p: jnp.square(run(p)).sum())
        several = jax.tree.map(lambda *leaves: jnp.stack(leaves), p, other)
        return jax.jvp(slope, (p,), (other,)), jax.vmap(run)(several)

    jax.tree.map(close, moved(lambda p: batched(p, xs)), moved(loop))


def test_exponentials_are_those_of_numpy():
    """Weights of any size, down to those that are 0 in single precision."""
    scores = np.linspace(-110, 0, 4001, dtype=np.float32)
    run = jedbatch.batch(lambda k, q: jax.nn.softmax(q @ k.T) @ jnp.eye(len(scores)))
    (weights,) = run(jnp.asarray(scores[:, None]), [jnp.ones((1, 1))])
    expected = np.exp(scores.astype(np.float64))
    assert_close(weights[0], expected / expected.sum(), 1e-6)


def test_keys_that_no_query_meets_have_no_weight(found):
    """Scores of less than all numbers, by keys that are masked; queries are few at a time."""
    p = jnp.abs(rows(3, 3))
    instances = []
    for n in (3, 6):
        keys = rows(n, 2, seed=1).at[1, 0].set(-jnp.inf)
        instances.append((jnp.abs(rows(n, 2)), keys, rows(n, 3, seed=2)))

    def score(p, instance):
        q, k, v = instance[0] @ jnp.eye(2), instance[1] + p[0, 0], instance[2] @ p
        return jnp.square(jnp.tanh(jax.nn.softmax(q @ k.T) @ v @ p)).sum()

    slope = jax.grad(lambda p: jnp.sum(jedbatch.batch(score)(p, instances)))(p)
    expected = jax.grad(lambda p: sum(score(p, x) for x in instances))(p)
    assert any(found)
    assert np.isfinite(expected).all()
    close(slope, expected)
