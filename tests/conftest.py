"""Strict settings for every test; warnings are errors, see `pyproject.toml`."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _freeze():
    """What earlier modules compiled stays; searching it for garbage would take minutes in all."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def x64():
    """Computes in 64 bits for one test."""
    with jax.enable_x64(True):
        yield
