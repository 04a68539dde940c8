"""The state of JAX in this thread: its configuration, what is being traced, where arrays are."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import take_current_trace

with jax.ensure_compile_time_eval(), take_current_trace() as EAGER:
    pass  # what runs operations at once; a part of the keys of JAX's caches, so one for all

# Options of JAX that change what is traced, or how XLA programs are made of it while JAX does not
# notice. Those of other versions are left out.
CONFIGURATION = tuple(
    name
    for name in (
        "jax_allow_f16_reductions",
        "jax_check_static_indices",
        "jax_default_matmul_precision",
        "jax_default_prng_impl",
        "jax_enable_custom_prng",
        "jax_enable_x64",
        "jax_error_checking_behavior_divide",
        "jax_error_checking_behavior_nan",
        "jax_error_checking_behavior_oob",
        "jax_explicit_x64_dtypes",
        "jax_high_dynamic_range_gumbel",
        "jax_legacy_prng_key",
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
        "jax_random_seed_offset",
        "jax_softmax_custom_jvp",
        "jax_threefry_partitionable",
    )
    if hasattr(jax.config, name)
)

_settings = operator.attrgetter(*CONFIGURATION)


def configuration() -> tuple[Any, ...]:
    """Returns the configuration of JAX in this thread, as far as what is traced depends on it."""
    return _settings(jax.config)


def differences(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """Returns the options that differ between two configurations, to be read."""
    options = zip(CONFIGURATION, before, after, strict=True)
    return ", ".join(
        f"{name} was {old!r} and is {new!r}" for name, old, new in options if old != new
    )


def is_staging() -> bool:
    """Returns whether calls now go into a program that is being traced, whatever they are given."""
    with take_current_trace() as trace:
        return not isinstance(trace, type(EAGER))


def any_traced(values: Iterable[object]) -> bool:
    """Returns whether any of some values is traced."""
    return any(issubclass(kind, Tracer) for kind in set(map(type, values)))


def without_mesh() -> Any:
    """Returns a context in which no mesh is set, to trace what is run later, wherever that is.

    Each equation knows the mesh that was set where it was traced, and runs nowhere else.
    """
    return jax.sharding.use_abstract_mesh(_empty_mesh())


@functools.cache
def _empty_mesh() -> jax.sharding.AbstractMesh:
    """Returns a mesh without axes."""
    return jax.sharding.AbstractMesh((), ())


def finds_faults() -> bool:
    """Returns whether JAX looks for faults in results of programs; arenas may hold anything."""
    return any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs"))


def runs_without_jit() -> bool:
    """Returns whether `jax.disable_jit` holds, so that operations run one by one."""
    config: Any = jax.config
    return bool(config.jax_disable_jit)


def devices_of(values: Any) -> tuple[Any, ...] | None:
    """The device that values are bound to, if to one; None if traced or on several devices."""
    leaves = jax.tree.leaves(values)
    if any_traced(leaves):
        return None
    arrays = (x for x in leaves if isinstance(x, jax.Array) and x.committed)
    devices = {
        device for sharding in {x.sharding for x in arrays} for device in sharding.device_set
    }
    if len(devices) > 1:
        return None
    return tuple(devices)
