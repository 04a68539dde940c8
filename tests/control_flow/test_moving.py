"""Values that leave JAX under a derivative, judged by the plain loop under the same derivative.

Where the loop raises we raise, and name the line; where it does not, gradients are the loop's.
"""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop
from numpy.linalg import norm

import jedbatch
from jedbatch._jaxpr.zeros import followed
from jedbatch.errors import SymbolicValueError
from jedbatch.testing import check_against_loop

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)
XS = [np.full(3, s, np.float32) for s in (1, 2)]
still = jax.lax.stop_gradient

LEAVING = {
    "jnp.tanh": lambda w, h: np.tanh(h).sum() * w.sum(),
    "jnp.maximum": lambda w, h: np.maximum(h, 0).sum(),
    "jnp.add": lambda w, h: np.add(np.ones(3, np.float32), h).sum(),
    "jnp.dot": lambda w, h: np.dot(np.ones(3, np.float32), h),
    "jnp.linalg.norm": lambda w, h: np.linalg.norm(h),
    "jnp.linalg.norm itself": lambda w, h: norm(h),
    "jnp.where": lambda w, h: np.where(h > 0, h, 0.0).sum(),
    "jnp.stack": lambda w, h: np.stack([h, w[0]]).sum(),
    "jnp.array": lambda w, h: np.array(h).sum(),
    "jnp.array of a list": lambda w, h: np.array([h[0], w[0, 0]]).sum(),
    "jnp.asarray": lambda w, h: jnp.asarray(np.asarray(h)).sum(),
    "jnp.float32": lambda w, h: np.float32(h[0]) * w.sum(),
    "jnp.exp": lambda w, h: math.exp(h[0]) * w.sum(),
    "jnp.floor": lambda w, h: math.floor(h[0]) * w.sum(),
    "float": lambda w, h: float(h[0]) * w.sum(),
    "float of what is shared": lambda w, h: float(w[0, 0]) * h.sum(),
    "complex": lambda w, h: (complex(h[0]) * w.sum()).real,
    "tolist": lambda w, h: sum(h.tolist()) * w.sum(),
    "beside the result": lambda w, h: (h.sum(), float(h[0])),
    "into a cell": lambda w, h: jedbatch.cell(lambda w, a: w.sum() * a)(w, float(h[0])),
}


def after(fn):
    """The same on what a layer makes of an instance."""
    return lambda w, x: fn(w, jnp.tanh(w @ x))


def total(results):
    return sum(x.sum() for x in jax.tree.leaves(jax.tree.map(jnp.asarray, results)))


def by_loop(fn, w, instances=XS):
    return sum(total(fn(w, x)) for x in instances)


def both(fn, differentiate=jax.grad, instances=XS):
    """Derivatives of the batched function and of the loop."""
    batched = jedbatch.batch(fn)
    return (
        differentiate(lambda w: total(batched(w, instances)))(W),
        differentiate(lambda w: by_loop(fn, w, instances))(W),
    )


@pytest.mark.parametrize("name", LEAVING)
def test_what_leaves_jax_is_an_error_where_it_is_one_in_the_loop(name):
    fn = after(LEAVING[name])
    with pytest.raises((jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)):
        jax.grad(lambda w: by_loop(fn, w))(W)
    with pytest.raises(SymbolicValueError) as caught:
        jax.grad(lambda w: total(jedbatch.batch(fn)(w, XS)))(W)
    line = inspect.getsourcelines(LEAVING[name])[1]
    assert f" at {__file__}:{line} takes the value" in str(caught.value)
    instead, called = name.split(" ")[0], name.startswith("jnp.")
    expected = f"JAX: write `{instead}` instead." if called else "compute with the array as it is."
    assert expected in str(caught.value)


def test_without_a_gradient_values_leave():
    """All in one function: what NumPy makes of values is the loop's."""

    def fn(w, x):
        h = jnp.tanh(w @ x)
        return jnp.stack([jnp.asarray(total(f(w, h)), jnp.float32) for f in LEAVING.values()])

    assert_close(jedbatch.batch(fn)(W, XS), loop(fn, W, XS), 1e-5)


@jax.jit
def stopped(x):
    return still(x) + 1


def stays(w, x):
    """Reads nothing but what has no gradient."""
    h = jnp.tanh(w @ x)
    numbers = [float(still(h[0])), float(jnp.floor(3 * h[1])), float(h[2] > 0)]
    of_data = [float(x[0]), float(jnp.tanh(x) @ x), np.linalg.norm(x), x.tolist()[0], x[1].item()]
    of_shared = [float(still(w[0, 0])), float(jnp.round(4 * w[1, 1])), float(stopped(h[1]))]
    order = np.asarray(jnp.argsort(h))
    return sum([*numbers, *of_data, *of_shared]) * (w[order[0]] @ h), np.sum(h), np.max(w[0] * h)


def decides(w, x):
    """Decides on what has a gradient."""
    h, steps = jnp.tanh(w @ x), 1
    while jnp.abs(h).max() > 0.1:
        h, steps = 0.3 * jnp.tanh(w @ h), steps + 1
    row = w[int(9 * h[0]) % 3] if h[1] else h
    return [jnp.sin, jnp.cos, jnp.tanh][jnp.argmax(h)](row) * round(8 * h[1]) * steps


@pytest.mark.parametrize("fn", [stays, decides])
def test_what_may_leave_has_the_gradients_of_the_loop(fn):
    assert_close(*both(fn, lambda f: jax.value_and_grad(lambda w: (f(w), w), has_aux=True)), 1e-5)


def test_an_item_is_an_error_though_the_loop_takes_it_for_a_constant():
    fn = after(lambda w, h: h[0].item() * w.sum())
    assert_close(jedbatch.batch(fn)(W, XS), loop(fn, W, XS), 1e-5)
    with pytest.raises(SymbolicValueError, match=r"`h\[0\]\.item\(\)`"):
        both(fn)

    def in_a_scope(w):
        with jedbatch.lazy():
            return fn(w, XS[0])

    with pytest.raises(SymbolicValueError, match=r"\.item\(\)"):
        jax.grad(in_a_scope)(W)


def in_loop(w, x):
    h = jnp.tanh(w @ x)
    while jnp.abs(h).max() > 0.1:
        h = h * (0.5 * float(h[0]))
    return h


def test_wherever_it_leaves():
    """In a loop on values, in rows of arrays, in another batched function; by other modes."""
    leaves = after(LEAVING["float"])
    nested = lambda w, xs: jedbatch.batch(leaves)(w, xs).sum()  # noqa: E731
    for fn, instances in [(in_loop, XS), (leaves, jnp.ones((16, 3))), (nested, [XS, XS])]:
        with pytest.raises(SymbolicValueError, match=r"`float\(h\[0\]\)` at "):
            jax.grad(lambda w: jedbatch.batch(fn)(w, instances).sum())(W)  # noqa: B023
    batched = jedbatch.batch(leaves)
    for mode in (jax.hessian, lambda f: lambda w: jax.jvp(f, (w,), (w,))):
        with pytest.raises(SymbolicValueError):
            mode(lambda w: batched(w, XS).sum())(W)


def test_what_is_differentiated_decides():
    """Each instance, each of its arrays, and what the function closes over, is told apart."""

    def fn(w, x):
        scale = float(x["scale"][0]) if x["scale"][1] > 0 else 1.0
        return scale * (w @ x["value"]).sum()

    batched = jedbatch.batch(fn)
    instances = [{"scale": s, "value": v} for s, v in ((XS[0], XS[1]), (-XS[0], XS[1]))]

    def replaced(i, name):
        def run(x):
            given = [dict(instance) for instance in instances]
            given[i][name] = x
            return given

        given = instances[i][name]
        found = jax.grad(lambda x: batched(W, run(x)).sum())(given)
        return found, jax.grad(lambda x: by_loop(fn, W, run(x)))(given)

    assert_close(*replaced(0, "value"), 1e-5)
    assert_close(*replaced(1, "scale"), 1e-5)  # of which no number is made
    with pytest.raises(SymbolicValueError, match=r"float\(x\[\"scale\"\]\[0\]\)"):
        jax.grad(lambda x: batched(W, [{"scale": x, "value": x}]).sum())(XS[0])

    def closed(read):
        def loss(v):
            return jedbatch.batch(lambda w, x: read(v[0]) * (w @ x + v).sum())(W, XS).sum()

        return jax.grad(loss)(jnp.full(3, 2.5))

    assert_close(closed(int), np.full(3, 4.0), 1e-6)  # twice 2, for two instances
    with pytest.raises(SymbolicValueError, match=r"`read\(v\[0\]\)`"):
        closed(float)


def test_the_judge_raises_what_the_loop_raises():
    with pytest.raises(jax.errors.TracerArrayConversionError):
        check_against_loop(after(LEAVING["jnp.tanh"]), W, XS)


def test_what_results_follow():
    """Of a program those arguments that the derivative of a result is not zero by."""

    def program(x, y, n, z):
        def step(carry, _):
            a, b = carry
            return (b, a + y[0]), jnp.floor(a)

        (a, _), floors = jax.lax.scan(step, (x[0], x[1]), length=3)
        return [a, floors, still(x) * y, x * n, jnp.argsort(x) * 1.0, jnp.where(x > y, z, 0.0), z]

    closed = jax.make_jaxpr(program)(*[jnp.arange(1.0, 4.0)] * 2, 2, jnp.ones(3))
    found = [set(x) for x in followed(closed)]
    assert found == [{0, 1}, set(), {1}, {0}, set(), {3}, {3}]
