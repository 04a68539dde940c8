"""What fills padding changes nothing: every operation that takes rows together, of every dtype."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.dtypes import DTYPES, as_written, is_whole, numbers
from jax import export, lax

from jedbatch._jaxpr import monoids
from jedbatch._jaxpr.interpret import interpret
from jedbatch._jaxpr.list_reductions import reduced
from jedbatch._jaxpr.native_calls import has_whole_bytes
from jedbatch._jaxpr.padding.axis_rules import CUMULATIVE_OPERATIONS
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.symbolic_dims import make_symbol

N = make_symbol("n", export.SymbolicScope(["n >= 3"]))
EXIST, ROOM, COLUMNS = 5, 8, 6  # rows that exist, and all of them


def can_join(monoid, dtype):
    """Returns whether JAX joins numbers of a dtype so, and there is a number that changes none."""
    if monoid in ("and", "or", "xor"):
        return is_whole(dtype) or dtype == np.bool_
    has_zero = np.array(0, dtype) == 0
    return monoid in ("max", "min") or (dtype != np.bool_ and (monoid == "mul" or has_zero))


def test_identities():
    """Joined with any number, from the left and from the right, they give that number."""
    with jax.enable_x64(True):
        pairs = [x for x in itertools.product(monoids.JOINED_BY, DTYPES) if can_join(*x)]
        values = {str(dtype): numbers(dtype, (64,)) for dtype in DTYPES}

        @jax.jit
        def joined(values):
            found = []
            for monoid, dtype in pairs:
                x, identity = values[str(dtype)], monoids.identity_of(monoid, dtype)
                join = monoids.JOINED_BY[monoid]
                found.append((join(x, identity), join(jnp.full_like(x, identity), x)))
            return found

        for (monoid, dtype), both in zip(pairs, joined(values), strict=True):
            assert monoids.identity_of(monoid, dtype).dtype == dtype
            for x in both:
                expected = as_written(values[str(dtype)])
                np.testing.assert_array_equal(as_written(x), expected, f"{monoid} {dtype}")


def operation(name):
    """Returns an operation of [rows, columns] that takes rows together."""
    primitive = getattr(lax, name, None)
    if name in monoids.REDUCTIONS:
        return lambda x: primitive(x, axes=(0,))
    if name in monoids.PLACES:
        return lambda x: primitive(x, 0, jnp.int32)
    if name in CUMULATIVE_OPERATIONS:
        return lambda x: primitive(x, axis=0, reverse=True)
    if name in monoids.WINDOWS:
        monoid = monoids.WINDOWS[name]
        join = monoids.JOINED_BY[monoid]
        return lambda x: lax.reduce_window(
            x, monoids.identity_of(monoid, x.dtype), join, (3, 1), (1, 1), "SAME"
        )
    assert name == "top_k"
    return lambda x: lax.top_k(x.T, 3)[0].T


def is_computed(name, dtype):
    """Returns whether XLA computes what JAX traces, without writing where it must not."""
    if str(dtype) == "float8_e8m0fnu" and monoids.MONOIDS.get(name) in ("max", "min"):
        return False  # JAX begins with infinity, which is no number there
    if name in monoids.PLACES:
        return dtype.kind != "c" and not str(dtype).endswith("int2")
    if name == "top_k":
        return has_whole_bytes(dtype)
    return name != "cumlogsumexp" or (not is_whole(dtype) and dtype.itemsize > 1)


def padded(closed, x):
    rows = Padded({"n": ROOM}, {"n": jnp.int32(EXIST)}, guarded=True)
    (found,) = interpret(closed.jaxpr, closed.consts, [x], rows.run)
    return found


def in_lists(closed, x):
    (eqn,) = closed.jaxpr.eqns
    exists = jnp.arange(ROOM) < EXIST
    return reduced(monoids.REDUCTIONS[eqn.primitive.name], [x], exists)


ROUNDED = {name for name, monoid in monoids.MONOIDS.items() if monoid in ("add", "mul")}
ROUNDED |= {"cumlogsumexp"}
PLACES = {"padded": padded, "lists": in_lists}
KNOWN = {
    "padded": [*monoids.MONOIDS, "cumlogsumexp"],
    "lists": list(monoids.REDUCTIONS),
}


# One of each kind; the rest of the table is slow.
SOME = ["bool", "int8", "uint64", "int4", "bfloat16", "float32", "float8_e4m3fn", "complex64"]


def tolerance(name, dtype):
    """Sums are rounded in another order in lists, and what XLA rounds in between is its affair."""
    is_rounded = name not in ROUNDED or dtype == np.bool_ or is_whole(dtype)
    return 0 if is_rounded else 8 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("which", ["some", pytest.param("others", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_rows_that_do_not_exist_change_nothing(place, which):
    dtypes = [dtype for dtype in DTYPES if (str(dtype) in SOME) == (which == "some")]
    with jax.enable_x64(True):
        traced, values = {}, {}
        for name, dtype in itertools.product(KNOWN[place], dtypes):
            try:
                closed = jax.make_jaxpr(operation(name))(jax.ShapeDtypeStruct((N, COLUMNS), dtype))
            except (TypeError, ValueError):  # JAX has no such operation of such numbers
                continue
            if name in [e.primitive.name for e in closed.jaxpr.eqns] and is_computed(name, dtype):
                at = name, str(dtype)
                traced[at] = closed
                values[at] = numbers(dtype, (ROOM, COLUMNS), ends=name not in ROUNDED)
        run = jax.jit(lambda xs: {at: PLACES[place](traced[at], x) for at, x in xs.items()})
        plain = jax.jit(lambda xs: {at: operation(at[0])(x[:EXIST]) for at, x in xs.items()})
        found, expected = run(values), plain(values)
    assert {name for name, _ in expected} == set(KNOWN[place])
    for (name, dtype), x in expected.items():
        y = found[name, dtype]
        assert y.dtype == x.dtype
        x, y, rtol = as_written(x), as_written(y)[: len(x)], tolerance(name, x.dtype)
        if rtol:
            np.testing.assert_allclose(y, x, rtol, rtol, err_msg=f"{name} {dtype}")
        else:
            np.testing.assert_array_equal(y, x, f"{name} {dtype}")
