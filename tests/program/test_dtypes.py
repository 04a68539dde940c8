"""Values of every dtype that JAX has, wherever rows are moved; they are the loop's, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.dtypes import DTYPES, as_written, numbers

import jedbatch
from jedbatch import Exported

IS_FIRST = np.array([True, False, True])
ONE_OF_EACH_SIZE = [  # of truth values, whole numbers, floats and complex numbers; one without zero
    *("bool", "int2", "uint4", "int8", "uint16", "int32", "uint64"),
    *("float4_e2m1fn", "float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "float32"),
    *("complex64", "complex128"),
]


def mixed(values):
    """Of arrays by dtype, entries of both; nothing is computed with them."""
    a, b = values
    return {k: jnp.where(IS_FIRST, a[k], jnp.flip(b[k])) for k in a}


leaf = jedbatch.cell(lambda p, x: jax.tree.map(jnp.flip, x))
node = jedbatch.cell(lambda p, a, b: mixed((a, b)))
listed = jedbatch.cell(lambda p, xs: mixed((xs[0], xs[-1])))


def encode(p, tree):
    if isinstance(tree, list):
        return listed(p, [encode(p, x) for x in tree])
    return node(p, *(encode(p, x) for x in tree)) if isinstance(tree, tuple) else leaf(p, tree)


def in_stacks(p, xs):
    """Lists of any length, whose elements lie in one array."""
    return {k: jnp.flip(jnp.stack([x[k] for x in xs]), 0) for k in xs[0]}


def ragged(p, tree):
    """Arrays of any length: from cell to cell, by index, and in reverse.

    XLA cannot compile a concatenation of numbers of less than a byte with little optimization.
    """

    def of_tree(tree):
        return chosen(p, *map(of_tree, tree)) if isinstance(tree, tuple) else tree

    places = jnp.array([0, 9, -1])
    found = of_tree(tree)
    at = {k: jnp.take(x, places, axis=0, mode="clip") for k, x in found.items()}
    return at, {k: x[::-1] for k, x in found.items()}


@jedbatch.cell
def chosen(p, a, b):
    return {k: jnp.where(jnp.arange(len(a[k]))[:, None] % 2 == 0, a[k], b[k]) for k in a}


def of_all(seed, *shape, dtypes=DTYPES):
    """Arrays of all dtypes, and keys."""
    arrays = {str(dtype): numbers(np.dtype(dtype), shape, seed) for dtype in dtypes}
    return arrays | {"key": jax.random.split(jax.random.key(seed), shape)}


def trees(*shapes):
    """Trees, of which each has leaves of one shape, and lists among them."""
    counter = iter(range(99))
    found = []
    for k, shape in enumerate(shapes):
        a, b, c, d = (of_all(next(counter), *shape) for _ in range(4))
        found.append([a, (a, b), ((c, b), (d, a))][k % 3])
    return found


def without(tree, *names):
    """Trees without arrays of some dtypes."""
    if isinstance(tree, dict):
        return {k: x for k, x in tree.items() if k not in names}
    return type(tree)(without(x, *names) for x in tree)


def assert_same(found, expected):
    found, expected = (jax.tree.flatten_with_path(x) for x in (found, expected))
    assert found[1] == expected[1]
    for (path, x), (_, y) in zip(found[0], expected[0], strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        np.testing.assert_array_equal(as_written(x), as_written(y), jax.tree_util.keystr(path))


def agree(fn, instances):
    """Returns the batched function, whose results are the loop's."""
    expected = [fn(None, x) for x in instances]
    batched = jedbatch.batch(fn, out_axes=None)
    assert_same(batched(None, instances), expected)
    return batched, expected


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def test_between_cells():
    agree(encode, [*trees((3,), (3,), (3,)), trees((3,), (3,))])


def test_exported():
    """But for whole numbers of two bits, for which JAX's files have no name."""
    instances = trees((3,), (3,))
    with pytest.raises(TypeError, match="values of dtype int2"):
        jedbatch.batch(encode).export(None, [{"int2": jnp.ones(3, jnp.int2)}])
    instances = without(instances, "int2", "uint2")
    batched, expected = agree(encode, instances)
    exported = Exported.deserialize(batched.export(None, instances).serialize())
    assert_same(exported(None, batched.graph(None, instances)), expected)


def test_in_stacked_lists():
    made = functools.partial(of_all, dtypes=ONE_OF_EACH_SIZE)
    agree(in_stacks, [[made(n * 7 + k, 3) for k in range(n)] for n in (2, 3)])


def test_in_ragged_arrays():
    made = functools.partial(of_all, dtypes=ONE_OF_EACH_SIZE)
    agree(ragged, [(made(n, n, 2), made(n + 1, n, 2)) for n in (2, 11)])
