"""The whole product in seconds."""

import jax
import jax.numpy as jnp
import numpy as np
from cases.helpers import assert_no_recompile

import jedbatch


@jedbatch.cell
def word(params, w):
    return params["E"][w]


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(params["W"] @ left + right)


def encode(params, tree):
    if isinstance(tree, int):
        return word(params, tree)
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


PARAMS = {"E": jnp.eye(5), "W": jnp.ones((5, 5)) / 3}
TREES = [((1, 2), 3), 4, ((0, 1), (2, (3, 4)))]


def test_values_gradients_and_counts():
    encode_all = jedbatch.batch(encode)
    expected = jnp.stack([encode(PARAMS, tree) for tree in TREES])
    np.testing.assert_allclose(encode_all(PARAMS, TREES), expected, rtol=1e-6)

    slope = jax.grad(lambda p: sum(encode(p, tree).sum() for tree in TREES))(PARAMS)
    got = jax.grad(lambda p: encode_all(p, TREES).sum())(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, slope)

    plan = encode_all.plan(PARAMS, TREES)
    assert len(plan.schedule) == jedbatch.lower_bound(plan.graph) == 4
    assert encode_all.compilations == 4  # weights turned, inference, training, reverse


def test_a_train_step_compiles_once():
    encode_all = jedbatch.batch(encode)

    @jax.jit
    def step(params, plan):
        return jax.grad(lambda p: encode_all.apply(p, plan).sum())(params)

    step(PARAMS, encode_all.plan(PARAMS, TREES))
    with assert_no_recompile():
        step(PARAMS, encode_all.plan(PARAMS, [3, (1, (2, (3, (4, 0)))), (1, 2)]))


def test_cells_are_plain_functions_outside():
    np.testing.assert_allclose(word(PARAMS, 2), PARAMS["E"][2])
