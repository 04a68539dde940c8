"""The form of results depends on what the function returns, and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch

RESULTS = {
    "dict": lambda p, x: {},
    "tuple": lambda p, x: (),
    "none": lambda p, x: None,
    "nested": lambda p, x: {"a": None, "b": ((), [])},
    "decides": lambda p, x: {"a": ()} if x.sum() > -1 else None,
    "number": lambda p, x: 3,
    "beside": lambda p, x: (x * p, None, 3, True, 2j, x.shape, np.int64(7)),
}
W = 2.0


def forms(results):
    """Structures and types of some results."""
    return [
        (jax.tree.structure(r), [(x.shape, x.dtype) for x in jax.tree.leaves(r)]) for r in results
    ]


def expected_forms(fn, xs, stacked):
    plain = [jax.tree.map(jnp.asarray, fn(W, x)) for x in xs]
    return forms([jax.tree.map(lambda *rows: jnp.stack(rows), *plain)] if stacked else plain)


@pytest.mark.parametrize("out_axes", [0, None])
@pytest.mark.parametrize("kind", RESULTS)
def test_forms_depend_on_the_function_alone(kind, out_axes):
    fn = RESULTS[kind]
    batched = jedbatch.batch(fn, out_axes=out_axes)
    outer = jedbatch.batch(lambda p, xs: batched(p, xs))
    for n in (1, 7, 8):
        rows = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        expected = expected_forms(fn, rows, out_axes == 0)
        for given in (list(rows), rows, jnp.asarray(rows)):
            found = [batched(W, given), batched(W, given)]
            if kind != "decides":
                found.append(batched.apply(W, batched.plan(W, given)))
                found.append(jax.jit(batched)(W, given))
            found.append(jax.tree.map(lambda x: x[0], outer(W, [given])))
            for results in found:
                assert forms([results] if out_axes == 0 else results) == expected
        if out_axes is None:
            assert forms(batched.stream(W, list(rows), batch_size=4)) == expected


@pytest.mark.parametrize("out_axes", [0, None])
@pytest.mark.parametrize("result", ["text", b"bytes", object()], ids=["str", "bytes", "object"])
def test_results_that_are_no_arrays(result, out_axes):
    batched = jedbatch.batch(lambda p, x: (x * p, result), out_axes=out_axes)
    outer = jedbatch.batch(lambda p, xs: batched(p, xs))
    for n in (1, 8):
        rows = np.ones((n, 2), np.float32)
        for call in (
            lambda given: batched(W, given),
            lambda given: batched.plan(W, given),
            lambda given: outer(W, [given]),
        ):
            for given in (list(rows), rows):
                with pytest.raises(TypeError, match=r"the function returned .*expected an array"):
                    call(given)
