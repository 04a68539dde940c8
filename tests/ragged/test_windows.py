"""Windows over rows, padding to a size and associative scans, for all lengths at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, by_themselves, number
from jax import lax

import jedbatch

WEIGHT = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)
ROOM = 12  # rows that arrays are padded to
SEEN, UNSEEN = (9, 5, 7, 6), (8, 10, 4, 5)


def sequences(lengths):
    rng = np.random.default_rng(sum(lengths))
    return [rng.normal(size=(n, 2)).astype(np.float32) for n in lengths]


def slopes_of(run, sequences):
    """Gradients of the weight and the rows, and the results of `run(weight, sequences)`."""

    def loss(weight, sequences):
        results = run(weight, sequences)
        return number(results), results

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(WEIGHT), sequences)


def agrees(batched, fn, lengths):
    """Values and gradients of a batched function are those of the loop."""
    got, results = slopes_of(batched, sequences(lengths))
    want, expected = slopes_of(lambda w, xs: [jax.jit(fn)(w, x) for x in xs], sequences(lengths))
    assert_close(results, expected, 2e-5)
    assert_close(got, want, 2e-4)


def ngrams(weight, x):
    return jnp.stack([x[i : x.shape[0] - 3 + i] @ weight for i in range(4)], 1).max(1)


def convolved(weight, x, stride, padding):
    numbers = ("NWC", "WIO", "NWC")
    kernel = jnp.stack([weight, weight.T, -weight])
    return lax.conv_general_dilated(x[None], kernel, (stride,), padding, dimension_numbers=numbers)


def pooled(x, nothing, combine, size, stride, padding):
    return lax.reduce_window(x, nothing, combine, (size, 1), (stride, 1), padding)


def recurrence(weight, x, reverse=False):
    """h_i = a_i h_{i-1} + b_i, with gates a."""

    def combine(first, second):
        return {"a": first["a"] * second["a"], "b": second["a"] * first["b"] + second["b"]}

    gated = {"a": jax.nn.sigmoid(x @ weight), "b": x}
    return lax.associative_scan(combine, gated, reverse=reverse)["b"]


OF_WINDOWS = {
    "three rows": lambda w, x: jnp.concatenate([x[:-2], x[1:-1], x[2:]], 1) @ jnp.tile(w, (3, 1)),
    "differences": lambda w, x: jnp.tanh((x[2:] - x[:-2]) @ w),
    "sums of windows": lambda w, x: pooled(x @ w, 0.0, lax.add, 3, 1, "VALID"),
    "largest of windows": lambda w, x: pooled(x @ w, -jnp.inf, lax.max, 3, 1, "SAME"),
    "least of windows": lambda w, x: pooled(x @ w, jnp.inf, lax.min, 2, 2, "VALID"),
    "largest of every other window": lambda w, x: pooled(x @ w, -jnp.inf, lax.max, 3, 2, "SAME"),
    "part with padding": lambda w, x: lax.dynamic_slice_in_dim(
        jnp.pad(x @ w, ((2, 2), (0, 0))), 1, 3
    ),
    "every other": lambda w, x: convolved(w, x, 2, "SAME")[0],
    "every third": lambda w, x: convolved(w, x, 3, "SAME").sum(1),
    "there and back": lambda w, x: x + jnp.repeat(x[::2] @ w, 2, axis=0)[: x.shape[0]],
}
OF_FOUR_ROWS = {
    "ngrams": ngrams,
    "dilated": lambda w, x: jnp.tanh(x[4:] @ w + x[2:-2] - x[:-4]),
}
TO_A_SIZE = {
    "padded": lambda w, x: jnp.pad(jnp.tanh(x @ w), ((0, ROOM - x.shape[0]), (0, 0))),
    "written": lambda w, x: jnp.zeros((ROOM, 2)).at[: x.shape[0]].set(jnp.tanh(x @ w)),
    "written behind": lambda w, x: jnp.ones((ROOM + 1, 2)).at[1 : x.shape[0] + 1].add(x @ w),
}
QUICK = (
    "three rows",
    "part with padding",
    "largest of every other window",
    "padded",
    "written",
)


def check_all_lengths(fn, few):
    batched = jedbatch.batch(fn, out_axes=None)
    agrees(batched, fn, SEEN)
    before = batched.compilations
    agrees(batched, fn, UNSEEN)
    assert batched.compilations == before
    plan = batched.plan(WEIGHT, sequences(UNSEEN))
    assert plan.host.apart is None
    results = jax.tree.leaves(jax.eval_shape(fn, WEIGHT, sequences(UNSEEN)[0]))
    assert len(plan.host.ragged_calls.stages) == len(results)  # one program for each
    agrees(batched, fn, (*few, 7))


@pytest.mark.parametrize("fn", by_themselves(OF_WINDOWS | TO_A_SIZE, *QUICK))
def test_all_lengths_at_once(fn):
    """Lengths never seen compile nothing; what is too short for them all runs by itself."""
    check_all_lengths(fn, range(4))


@pytest.mark.parametrize("fn", by_themselves(OF_FOUR_ROWS))
def test_all_lengths_from_four_on(fn):
    check_all_lengths(fn, range(4, 6))


@pytest.mark.parametrize("reverse", [False, True])
def test_associative_scans_are_grouped_by_shapes(reverse):
    """JAX makes a number of the length."""
    fn = functools.partial(recurrence, reverse=reverse)
    batched = jedbatch.batch(fn, out_axes=None)
    agrees(batched, fn, (3, 1, 4, 3))
    assert "test_windows.py" in batched.plan(WEIGHT, sequences((3, 1, 4))).host.apart


def test_what_is_longer_than_the_size_is_the_functions_to_refuse():
    batched = jedbatch.batch(TO_A_SIZE["padded"], out_axes=None)
    assert len(batched(WEIGHT, sequences((3, ROOM, 4)))) == 3
    with pytest.raises(ValueError, match="index can't contain negative values"):
        batched(WEIGHT, sequences((3, ROOM + 1)))
    agrees(batched, TO_A_SIZE["padded"], (5, ROOM))


def test_results_in_a_window_do_not_depend_on_other_instances():
    """The greatest of rows that are all small, in windows that reach beyond the last row."""
    fn = OF_WINDOWS["largest of every other window"]
    instances = [x - 1e6 for x in sequences(SEEN)]
    got = jedbatch.batch(fn, out_axes=None)(WEIGHT, instances)
    assert_close(got, [fn(WEIGHT, x) for x in instances], 1e-6)


def test_transposed_convolutions_need_a_row():
    def fn(weight, x):
        numbers = ("NWC", "WIO", "NWC")
        kernel = jnp.stack([weight, weight.T])
        return lax.conv_transpose(x[None], kernel, (2,), "SAME", dimension_numbers=numbers)[0]

    batched = jedbatch.batch(fn, out_axes=None)
    agrees(batched, fn, (1, 3, 2))
    with pytest.raises(ValueError, match=r"instance 1 .* a transposed convolution of n rows"):
        batched(WEIGHT, sequences((3, 0)))


def test_no_more_rows_are_supposed_than_are_needed():
    """The first rows of a table of positions have a bound; of the first five there may be fewer."""
    positions = jnp.linspace(0.0, 1.0, 64)[:, None]

    def fn(weight, x):
        return jnp.tanh(x[:5] @ weight).sum(0) + (positions[: x.shape[0]] * x).sum(0)

    batched = jedbatch.batch(fn, out_axes=None)
    agrees(batched, fn, SEEN)
    before = batched.compilations
    agrees(batched, fn, (4, 1, 2, 7))
    assert batched.compilations == before
