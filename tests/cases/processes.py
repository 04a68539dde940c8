"""Other processes of Python: they import what tests do, and find what tests have compiled."""

import os
from pathlib import Path

import jax

import jedbatch

ROOT = Path(jedbatch.__file__).parents[1]
TESTS = Path(__file__).parents[1]
LITTLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # see `conftest.py`, which sets it for some tests


def environment(flags=""):
    """Variables for another process on CPUs, which compiles as the test that starts it does.

    Args:
      flags: of XLA, besides those of this process.
    """
    path = [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")]
    flags = [os.environ["XLA_FLAGS"], flags]
    if LITTLE in os.environ and jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    found = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(filter(None, flags)),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    if jax.config.jax_compilation_cache_dir:
        found["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        found["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return found
