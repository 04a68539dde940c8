"""Attention of one instance, by its definition written out in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check
from jax.test_util import check_grads

import jedbatch
from jedbatch import ragged

SIZES = {  # n, m, heads, d, e, causal
    "to itself": (4, 4, 2, 3, 3, False),
    "causal": (5, 5, 2, 3, 3, True),
    "to another": (3, 5, 2, 4, 2, False),
    "one row": (1, 1, 1, 2, 2, True),
    "one head": (3, 4, None, 2, 3, False),
    "one causal head": (4, 4, None, 2, 3, True),
    "no queries": (0, 3, 2, 2, 2, False),
    "no keys": (3, 0, 2, 2, 2, False),
    "nothing": (0, 0, 2, 2, 2, True),
}


def random_arrays(n, m, heads, d, e, dtype=np.float64):
    rng = np.random.default_rng(n + 10 * m)
    shapes = [(n, d), (m, d), (m, e)]
    if heads is not None:
        shapes = [(rows, heads, features) for rows, features in shapes]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_definition(q, k, v, causal, scale):
    """Row by row and head by head, with NumPy in double precision."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if q.ndim == 2:
        return by_definition(q[:, None], k[:, None], v[:, None], causal, scale)[:, 0]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for i, head in np.ndindex(*q.shape[:2]):
        keys = range(i + 1 if causal else len(k))
        weights = [np.exp(scale * (q[i, head] @ k[j, head])) for j in keys]
        for j in keys:
            out[i, head] += weights[j] / sum(weights) * v[j, head]
    return out


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "scale"), [*((name, None) for name in SIZES), ("causal", 0.3), ("one head", 0.3)]
)
def test_values_and_gradients(name, scale):
    *shape, causal = SIZES[name]
    q, k, v = random_arrays(*shape)

    def attend(q, k, v):
        return ragged.attention(q, k, v, causal=causal, scale=scale)

    expected = by_definition(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    assert_close(attend(q, k, v), expected, 1e-12)
    if q.size and k.size:
        check_grads(attend, (q, k, v), order=1, modes=("rev",))


def test_without_keys_rows_and_gradients_are_zeros():
    q, k, v = random_arrays(3, 0, 2, 2, 2, np.float32)
    out, back = jax.vjp(ragged.attention, q, k, v)
    assert not out.any()
    assert not back(jnp.ones_like(out))[0].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_single(dtype):
    """Nothing is rounded but the result, which has the dtype of v."""
    q, k, v = random_arrays(40, 40, 2, 8, 4, dtype)
    expected = by_definition(q, k, v, False, 8**-0.5).astype(np.float32)
    rounding = 0.51 * float(jnp.finfo(dtype).eps)
    for wider in (dtype, jnp.float32):
        out = ragged.attention(q.astype(wider), k.astype(wider), v)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(np.float32), expected, rtol=rounding, atol=1e-5)


def test_large_logits_do_not_overflow():
    q = jnp.float32([[300.0], [-300.0]])
    out, back = jax.vjp(lambda q: ragged.attention(q, q, jnp.eye(2)), q)
    assert_close(out, jnp.eye(2), 1e-6)
    assert np.isfinite(back(jnp.ones((2, 2)))[0]).all()


@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("causal", [False, True])
def test_symbolic_numbers_of_rows(heads, causal):
    n, m = jax.export.symbolic_shape("n, m", constraints=["n <= 64", "m <= 64"])
    m = n if causal else m
    q, k, v = (
        jax.ShapeDtypeStruct((rows, *heads, features), np.float32)
        for rows, features in ((n, 4), (m, 4), (m, 3))
    )

    def loss(q, k, v):
        return ragged.attention(q, k, v, causal=causal).sum()

    (equation,) = [
        e for e in jax.make_jaxpr(loss)(q, k, v).eqns if e.params.get("name") == "ragged_attention"
    ]
    assert equation.outvars[0].aval.shape == (n, *(heads or (1,)), 3)
    slopes = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v).out_avals
    assert [slope.shape for slope in slopes] == [q.shape, k.shape, v.shape]


def test_compiled_for_symbolic_numbers_of_rows():
    n, m = jax.export.symbolic_shape("n, m")
    types = [jax.ShapeDtypeStruct((rows, 2, 3), np.float32) for rows in (n, m, m)]
    attend = jax.export.export(jax.jit(ragged.attention))(*types)
    for sizes in ((2, 3), (4, 1)):
        arrays = random_arrays(*sizes, 2, 3, 3, np.float32)
        assert_close(attend.call(*arrays), ragged.attention(*arrays), 1e-6)


def test_sentences_of_several_lengths():
    """Self-attention of sentences, batched."""
    rng = np.random.default_rng(0)
    params = rng.normal(size=(3, 4, 4)).astype(np.float32)
    sentences = [rng.normal(size=(n, 4)).astype(np.float32) for n in (3, 1, 5, 3)]

    def model(params, x):
        out = ragged.attention(*(x @ w for w in params), causal=True)
        return (out**2).sum()

    check(model, params, sentences)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((3,), (3,), (3,)), {}, r"q \(3,\).*expected \[n, heads, d\].*one instance"),
        (((3, 2, 4), (3, 4), (3, 4)), {}, r"k \(3, 4\).*or none with heads"),
        (((9, 3, 2, 4),) * 3, {}, "`jedbatch.batch` or `jax.vmap`"),
        (((3, 4), (3, 5), (3, 4)), {}, "differ in their number only"),
        (((3, 2, 4), (3, 1, 4), (3, 1, 4)), {}, "as many heads and features"),
        (((3, 2, 4), (3, 2, 4), (3, 1, 4)), {}, r"queries, 2.*jnp.repeat"),
        (((3, 4), (3, 4), (2, 4)), {}, r"v \(2, 4\).*a value for every key"),
        (((3, 4), (5, 4), (5, 4)), {"causal": True}, "causal=True; expected as many"),
    ],
)
def test_shapes_that_do_not_fit(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        ragged.attention(*map(jnp.zeros, shapes), **options)


def test_integers_and_scales_that_are_no_numbers():
    x = jnp.ones((3, 4))
    with pytest.raises(TypeError, match=r"got v of int32.*`v.astype"):
        ragged.attention(x, x, x.astype(jnp.int32))
    with pytest.raises(TypeError, match=r"expected a finite number.*scale=1.0"):
        ragged.attention(x, x, x, scale=jnp.ones(()))


def rows(count, width, seed=0):
    numbers = np.random.default_rng([seed, count]).normal(size=(count, width))
    return jnp.asarray(numbers, jnp.float32)


def test_no_number_reaches_other_instances():
    """Neither what is no number, nor what is too large, nor what comes back to it."""

    def fn(p, x):
        return jnp.tanh(jax.nn.softmax(jnp.tanh(x @ p[0]) @ jnp.tanh(x @ p[1]).T / 2) @ x @ p[0])

    p, (x, y, z) = [rows(6, 6, seed=s) / 2 for s in range(2)], [rows(n, 6) for n in (4, 6, 5)]
    batched = jedbatch.batch(fn, out_axes=None)

    def total(p, xs):
        first, _, last = batched(p, xs)
        return jnp.sum(first) + jnp.sum(last)

    def loop(p, xs):
        return jnp.sum(fn(p, xs[0])) + jnp.sum(fn(p, xs[2]))

    for wrong in (jnp.nan, jnp.inf):
        xs = [x, y.at[2].set(wrong), z]
        assert np.isnan(batched(p, xs)[1]).any()
        found = jax.value_and_grad(total)(p, xs)
        assert_close(found, jax.value_and_grad(loop)(p, xs), 1e-5)


def test_keys_that_no_query_meets_have_no_weight():
    """Scores of less than all numbers, by keys that are masked."""
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
    assert np.isfinite(expected).all()
    assert_close(slope, expected, 1e-5)
