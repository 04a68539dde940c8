"""Copies of batched functions: `copy`, `deepcopy` and `pickle`, before they are used and after."""

import copy
import functools
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch.policies import agenda

W = jnp.eye(4) * 0.5
XS = [np.full(4, i, np.float32) for i in range(3)]


def scaled(p, x, by=1.0):
    return jnp.tanh(x @ p) * by


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_used", [False, True])
def test_copies_are_functions_of_their_own(way, is_used):
    options = {"policy": agenda, "out_axes": None, "max_steps": 7}
    batched = jedbatch.batch(functools.partial(scaled, by=2.0), (None, 0), **options)
    if is_used:
        batched(W, XS)
        batched(W, np.stack(XS * 3))
    copied = WAYS[way](batched)
    assert copied.compilations == 0
    assert copied.policy == batched.policy
    assert (copied.in_axes, copied._core.name) == (batched.in_axes, batched._core.name)
    expected = loop(batched._core.fn, W, XS)
    before = batched.compilations
    assert_close(jnp.stack(copied(W, XS)), expected, 1e-6)
    assert copied.compilations > 0
    copied.policy = None
    copied.clear()
    assert batched.compilations == before
    assert batched.policy is agenda
    assert_close(jnp.stack(batched(W, XS)), expected, 1e-6)
    with pytest.raises(ValueError, match="another batched function"):
        batched.apply(W, copied.plan(W, XS))


def test_a_learned_policy_is_learned_again():
    batched = jedbatch.batch(scaled)
    batched(W, XS)
    assert batched.policy is not None
    assert copy.deepcopy(batched).policy is None


class Model:
    def __init__(self, scale):
        self.scale = [scale]
        self.batched = jedbatch.batch(self.one)

    def one(self, p, x):
        return scaled(p, x, self.scale[0])


def test_copies_of_models_compute_with_their_own_values():
    model = Model(2.0)
    model.batched(W, XS)
    copied = copy.deepcopy(model)
    copied.scale[0] = 3.0
    assert_close(copied.batched(W, XS), loop(Model(3.0).one, W, XS), 1e-6)
    assert_close(model.batched(W, XS), loop(Model(2.0).one, W, XS), 1e-6)
