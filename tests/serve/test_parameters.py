"""Parameters in npz files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

from jedbatch.serve import load_params, save_params

PARAMS = {"encoder": {"kernel": jnp.ones((2, 3)), "bias": jnp.arange(3)}, "scale": np.float32(2)}


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "params.npz"
    save_params(PARAMS, path)
    for like in (None, PARAMS):
        got = load_params(path, like)
        assert_close(got, jax.tree.map(np.asarray, PARAMS), 0)


def test_other_containers_need_to_know_of_what_form(tmp_path):
    path = tmp_path / "params.npz"
    params = [{"w": jnp.ones(2)}, (jnp.zeros(1), jnp.tanh)]
    save_params(params, path)
    got = load_params(path, like=params)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert got[1][1] is jnp.tanh
    assert set(load_params(path)) == {"0", "1"}


def test_what_does_not_fit(tmp_path):
    path = tmp_path / "params.npz"
    save_params({"w": jnp.ones(2)}, path)
    with pytest.raises(ValueError, match=r"'w' of shape \(2,\); expected \(3,\)"):
        load_params(path, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="has no 'b'"):
        load_params(path, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"has \['w'\], too"):
        load_params(path, {})
    with pytest.raises(ValueError, match=r"ends with \.npz"):
        save_params({}, tmp_path / "params.json")
    for dtype in (jnp.bfloat16, jnp.float8_e5m2):
        with pytest.raises(TypeError, match="at 'w', which npz files do not have"):
            save_params({"w": jnp.ones(2, dtype)}, path)
    with pytest.raises(ValueError, match="two arrays of one name"):
        save_params({"a/b": 1.0, "a": {"b": 2.0}}, path)
    path.write_bytes(b"no zip file")
    with pytest.raises(ValueError, match="is no npz file"):
        load_params(path)
    np.savez(path, w=np.array([print], object))
    with pytest.raises(ValueError, match="is no npz file of arrays"):
        load_params(path)
    with pytest.raises(OSError, match="No such file"):
        load_params(tmp_path / "other.npz")
