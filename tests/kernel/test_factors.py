"""Products of matrices of a lane, whose first factors are summed over their last axes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, number, random_tree
from jax import lax

import jedbatch
from jedbatch._kernel.factors import with_summed_last

# Products of [2, 3, 4] and [2, 3, 5], or [3, 4] and [3, 5], and how many of them are transposed.
PRODUCTS = {
    "first axis": (lambda a, b, w: a[0].T @ b[0], 1),
    "last axis": (lambda a, b, w: a[0] @ a[1].T, 0),
    "batch": (lambda a, b, w: jnp.einsum("bij,bik->bjk", a, b), 1),
    "batch in the middle": (lambda a, b, w: jnp.einsum("ibj,ibk->bjk", a, b), 1),
    "two axes": (lambda a, b, w: jnp.einsum("bij,bik->jk", a, b), 1),
    "axes in another order": (
        lambda a, b, w: lax.dot_general(a, a, (((1, 0), (1, 0)), ((), ()))),
        1,
    ),
    "transposed": (lambda a, b, w: (b[0].T @ a[0]).T, 1),
    "transposed beside another": (lambda a, b, w: (b[0].T @ a[0]).T + a[0].T @ b[0], 2),
    "transposed and read twice": (lambda a, b, w: (x := b[0].T @ a[0]).T @ x, 2),
    "batch elsewhere": (
        lambda a, b, w: lax.dot_general(a.T, b[:, :, 0], (((1,), (1,)), ((2,), (0,)))),
        0,
    ),
    "vector": (lambda a, b, w: a[0].T @ b[0, :, 0], 0),
    "weights": (lambda a, b, w: (w.T @ w) * a[0, 0, 0], 0),
    "with weights": (lambda a, b, w: w.T @ b[0] + (b[0].T @ w).T, 0),
    "integers": (lambda a, b, w: a[0].astype(int).T @ b[0].astype(int), 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_program_computes_the_same(name):
    fn, expected = PRODUCTS[name]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 4), (2, 3, 5), (3, 4))]
    closed = jax.make_jaxpr(fn)(*args)
    program = with_summed_last(closed.jaxpr, closed.jaxpr.invars[2:])
    assert str(program).count("optimization_barrier") == expected
    got = jax.core.eval_jaxpr(program, closed.consts, *args)
    assert_close(got, [fn(*args)], 1e-5)


@jedbatch.cell
def join(params, left, right):
    return jnp.tanh(params["weight"] @ (left @ right) + params["bias"])


def product(params, tree):
    if not isinstance(tree, tuple):
        return params["scale"] * tree
    return join(params, *(product(params, child) for child in tree))


def test_products_of_compiled_programs_sum_over_last_axes():
    rng = np.random.default_rng(0)
    params = {"bias": jnp.ones((3, 3)), "scale": jnp.float32(0.5), "weight": jnp.eye(3) + 0.1}
    leaf = lambda: rng.normal(size=(3, 3)).astype(np.float32)  # noqa: E731
    instances = [random_tree(rng, n, leaf) for n in (3, 5, 2)]
    check(product, params, instances)
    counts = {}
    for target in ("cpu", "gpu"):
        batched = jedbatch.batch(product, target=target)
        step = jax.jit(jax.grad(lambda p, plan, fn=batched.apply: number(fn(p, plan))))
        compiled = step.lower(params, batched.plan(params, instances)).compile().as_text()
        found = re.findall(r" dot\(.*lhs_batch_dims=\{0\}, lhs_contracting_dims=\{(\d)\}", compiled)
        counts[target] = found.count("1"), len(found)
    assert counts["cpu"][0] == 0 < counts["cpu"][1]
    assert counts["gpu"][0] > 0  # compiled here, as nothing was asked for
