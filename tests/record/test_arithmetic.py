"""What Python and NumPy compute with numbers that cells hold, to the last bit, against the loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch

# In the first minibatch nothing tells 32 bits from 64: all numbers are far from where they do.
MINIBATCHES = ([0.25, 0.27, 0.31, 0.42, 0.45], [0.3, 0.25, 0.1, 0.2, 0.6, 0.7])

OF_REALS = {
    "//": lambda t: t // 0.1,
    "%": lambda t: t % 0.1,
    "% of another": lambda t: 1 % (t + 1),
    "divmod": lambda t: sum(divmod(t, 0.1)),
    "divmod of another": lambda t: sum(divmod(5.0, t + 0.1)),
    "cancellation": lambda t: 1 / (t - 0.3 + 1e-9),
    "**": lambda t: (1 + 1e-9) ** (t * 1e9),
    "round": lambda t: round(t, 1) + round(t * 7),
    "comparison": lambda t: (t == 0.1 + 0.2) + 2 * (t <= 0.3),
    "branch of JAX": lambda t: jnp.where(t >= 0.3, 1.0, 2.0),
    "steps": lambda t: functools.reduce(lambda y, _: y * 1.0000001, range(30), t) - t,
    "abs": lambda t: abs(t - 0.3) - 1e-17,
    "complex": lambda t: (t * 1j * t).imag - t * t,
    "attributes": lambda t: t.real // 0.1 + t.imag,
    "NumPy's number": lambda t: np.float64(0.1) + t - 0.3,
    "NumPy's array": lambda t: (np.array([0.1, 0.2]) * t - 0.03 + 1e-9).sum(),
    "of JAX's array": lambda t: jnp.asarray(t) // 0.1,
    "of another of JAX's arrays": lambda t: jnp.array(t) % 0.1,
    "of 32 bits": lambda t: jnp.float32(t) // 0.1,
    "of JAX and of Python": lambda t: jnp.sin(t) + (t - 0.3) * 1e8,
}


OF_INTEGERS = {
    "too large for 32 bits on the way": lambda n: (n * 4) // 4,
    "powers": lambda n: n**5 % 97,
    "shifts": lambda n: (n << 40) >> 40,
    "bits": lambda n: (n & 5) + (n ^ 3) + ~n,
    "quotient": lambda n: n / 7 - n // 7,
}
OF_ARRAYS = {
    "cancellation": lambda a: (a - 0.3 + 1e-9).sum() * 1e9,
    "elements": lambda a: a[0] // 0.1 + a[::-1][0] % 0.1,
    "iterated over": lambda a: sum(x // 0.1 for x in a),
    "of JAX's array": lambda a: jnp.ravel(a).sum() // 0.1,
    "mean": lambda a: 1 / (a.mean() - 0.3 + 1e-9),
    "matrix product": lambda a: (a @ np.array([1.0, -1.0])) * 1e9,
}


def call(scales, p, t):
    """A cell that multiplies by what functions of Python make of a number."""

    def scaled(p):
        return p * jnp.stack([jnp.asarray(scale(t), float) for scale in scales.values()])

    return jedbatch.cell(scaled)(p)


def check_minibatches(fn, minibatches, rtol):
    p = jnp.asarray(2.0)
    batched = jedbatch.batch(fn)
    for numbers in minibatches:
        expected = [fn(p, t) for t in numbers]
        np.testing.assert_allclose(batched(p, numbers), expected, rtol=rtol, atol=0)
    return batched.plan(p, minibatches[-1]).graph


@pytest.mark.parametrize("wide", [False, True])
def test_python_computes_with_numbers_as_in_the_loop(wide):
    with jax.enable_x64(wide):
        fn = functools.partial(call, OF_REALS)
        graph = check_minibatches(fn, MINIBATCHES, 1e-13 if wide else 1e-6)
        assert len(graph.present_types) == 1


def test_python_computes_with_whole_numbers_of_any_size():
    fn = functools.partial(call, OF_INTEGERS)
    numbers = [1, 2, 5, 7, 9, 11], [3, 2**30, 2**20 + 1, -5, 60_000, 0]
    assert len(check_minibatches(fn, numbers, 1e-6).present_types) == 1


def test_numpy_computes_with_numbers_and_arrays_in_64_bits():
    def fn(p, t):
        one, two = np.float64(t), np.array([t, 0.6 - t])
        return call(OF_REALS, p, one), call(OF_ARRAYS, p, two)

    p = jnp.float32(2)
    batched = jedbatch.batch(fn)
    for numbers in MINIBATCHES:
        found, expected = batched(p, numbers), [fn(p, t) for t in numbers]
        for k in range(2):
            np.testing.assert_allclose(found[k], [x[k] for x in expected], rtol=1e-6, atol=0)


@dataclasses.dataclass(frozen=True)
class Rated:
    rate: float

    def scaled(self, p):
        return p * (self.rate // 0.1)


HOLDERS = {
    "default": lambda t: lambda p, t=t: p * (t // 0.1),
    "partial": lambda t: functools.partial(lambda t, p: p * (t // 0.1), t),
    "method": lambda t: Rated(t).scaled,
    "body": lambda t: lambda p: jax.lax.fori_loop(0, 2, lambda _, x: x * (t // 0.1), p),
    "branch": lambda t: lambda p: jax.lax.cond(p > 0, lambda: p * (t // 0.1), lambda: p),
    "derivative": lambda t: jax.grad(lambda p: p * p * (t // 0.1)),
    "result": lambda t: lambda p: (p, t // 0.1)[1] + 0 * p,
}


def test_python_computes_wherever_a_cell_holds_a_number():
    def fn(p, t):
        return jnp.stack([jedbatch.cell(make(t))(p) for make in HOLDERS.values()])

    new = [0.81, 0.93, 1.05, 1.17]
    graph = check_minibatches(fn, (*MINIBATCHES, new), 1e-6)
    assert len(graph.present_types) == len(HOLDERS) + 1


def test_errors_of_python_are_raised_where_the_cell_gets_there():
    fn = lambda p, t: jedbatch.cell(lambda p: p * (1 / t))(p)  # noqa: E731
    batched = jedbatch.batch(fn)
    batched(2.0, [1.0, 2.0, 3.0, 4.0, 5.0])
    with pytest.raises(ZeroDivisionError):
        batched(2.0, [1.0, 0.0])


def test_what_differs_in_64_bits_is_told_apart():
    def fn(p, t):
        return jedbatch.cell(lambda p: p * (t * (1 + 1e-6) if type(t) is float else t))(p)

    with jax.enable_x64():
        minibatches = [0.25, 0.2700001234567, 0.3100007654321, 0.5, 0.6], [0.4200011, 0.1234567891]
        check_minibatches(fn, minibatches, 1e-14)


def test_positional_numbers_are_those_of_jit():
    fn = lambda p, k: (k * 4) // 4 + p  # noqa: E731
    numbers = [5, 2**30, -(2**29)]
    found = jedbatch.batch(jedbatch.cell(fn))(0, numbers)
    assert found.tolist() == [int(jax.jit(fn)(0, k)) for k in numbers]
