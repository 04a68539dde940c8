"""Options of JAX: which change results, and that what was kept before they changed is not used."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._jaxpr.configuration import CONFIGURATION
from jedbatch._record.run.thread_settings import SETTINGS
from tests.cases.helpers import assert_close

# All options of `jax.config`, of all versions, by what they do. A new one belongs in here, and in
# `CONFIGURATION` if what is traced depends on it.
TRACED = {  # changes what is traced: programs, types of results, errors
    *("allow_f16_reductions", "check_static_indices", "default_matmul_precision"),
    *("default_prng_impl", "enable_custom_prng", "enable_x64"),
    *("error_checking_behavior_divide", "error_checking_behavior_nan"),
    *("error_checking_behavior_oob", "explicit_x64_dtypes", "high_dynamic_range_gumbel"),
    *("legacy_prng_key", "numpy_dtype_promotion", "numpy_rank_promotion", "random_seed_offset"),
    *("softmax_custom_jvp", "threefry_partitionable"),
}
COMPILED = {  # read where programs are lowered or compiled; `jax.jit` compiles them anew
    *("accurate_erf_inv", "bcoo_cusparse_lowering", "memory_fitting_level"),
    *("compiler_enable_remat_pass", "default_device", "disable_most_optimizations"),
    *("embedded_constants_max_bytes", "enable_pgle", "exec_time_optimization_effort"),
    *("hlo_source_file_canonicalization_regex", "memory_fitting_effort", "mosaic_allow_hlo"),
    *("mosaic_unzip_debug_locations", "optimization_level", "pallas_auto_assign_collective_ids"),
    *("pallas_auto_assign_collective_ids_limit", "pallas_enable_debug_checks"),
    *("pallas_poison_buffers", "pallas_use_mosaic_gpu", "pgle_aggregation_percentile"),
    *("pgle_profiling_runs", "ragged_dot_use_gpu_pallas_triton_lowering"),
    *("ragged_dot_use_ragged_dot_instruction", "send_traceback_to_runtime"),
    *("threefry_gpu_kernel_lowering", "use_emit_pipeline_primitive", "use_hlo_logistic_lowering"),
    *("use_magma", "use_shardy_partitioner", "use_simplified_jaxpr_constants"),
    *("xla_profile_version",),
}
SAME_RESULTS = {  # programs are traced, differentiated or run in another way, with equal results
    *("custom_jvp3", "custom_vjp3", "disable_jit", "eager_constant_folding", "refs_to_pins"),
    *("remat3", "remat_barrier_no_cotangents", "scan3", "use_cpp_shard_args"),
    *("use_direct_linearize", "use_rgv3"),
}
CHECKS = {  # of traces, programs and transfers, which raise or log as these are made
    *("array_garbage_collection_guard", "auto_pcast", "captured_constants_report_frames"),
    *("captured_constants_warn_bytes", "check_tracer_leaks", "check_vma", "debug_infs"),
    *("debug_key_reuse", "debug_nans", "disable_bwd_checks", "disable_vmap_shmap_error"),
    *("disallow_mesh_context_manager", "enable_checks", "mutable_array_checks", "no_collectives"),
    *("no_execution", "no_tracing", "raise_on_ppermute_sort_diff"),
    *("remove_size_one_mesh_axis_from_type", "thread_guard", "transfer_guard"),
    *("transfer_guard_device_to_device", "transfer_guard_device_to_host"),
    *("transfer_guard_host_to_device",),
}
MESSAGES = {
    *("compiler_detailed_logging_min_ops", "debug_log_modules", "distributed_debug"),
    *("dump_ir_modes", "dump_ir_to", "explain_cache_misses", "include_debug_info_in_dumps"),
    *("include_full_tracebacks_in_locations", "log_checkpoint_residuals", "log_compiles"),
    *("logging_level", "pallas_verbose_errors", "pprint_use_color", "source_url_schema"),
    *("traceback_filtering", "traceback_in_locations_limit"),
    *("tracer_error_num_traceback_frames",),
}
BEFORE_THE_START = {  # of devices and processes
    *("backend_target", "check_proxy_envs", "cpu_collectives_implementation"),
    *("cpu_enable_async_dispatch", "cpu_get_global_topology_timeout_minutes"),
    *("cpu_get_local_topology_timeout_minutes", "cross_host_transfer_socket_address"),
    *("cross_host_transfer_timeout_seconds", "cross_host_transfer_transfer_size"),
    *("cross_host_transport_addresses", "cuda_visible_devices"),
    *("debug_leaked_clients_on_clear_backends", "distributed_verify_secure_credentials"),
    *(
        "enable_preemption_service",
        "enable_recoverability",
        "experimental_unsafe_xla_runtime_errors",
    ),
    *("force_dcn_cross_host_transfers", "mock_gpu_topology", "mock_num_gpu_processes"),
    *("mtls_ca_file", "mtls_cert_file", "mtls_key_file", "mtls_peer_uri_prefix"),
    *("num_cpu_devices", "oneapi_visible_devices", "pjrt_client_create_options", "platform_name"),
    *("platforms", "rocm_visible_devices", "sort_devices_by_process_index", "xla_backend"),
}
FILES = {  # caches of programs, and exports
    *("compilation_cache_check_contents", "compilation_cache_dir", "compilation_cache_expect_pgle"),
    *("compilation_cache_include_metadata_in_key", "compilation_cache_max_size"),
    *("enable_compilation_cache", "export_calling_convention_version"),
    *("export_deserialize_expired_versions", "export_ignore_forward_compatibility"),
    *("jax2tf_associative_scan_reductions", "jax2tf_default_native_serialization"),
    *("persistent_cache_enable_xla_caches", "persistent_cache_min_compile_time_secs"),
    *("persistent_cache_min_entry_size_bytes", "raise_persistent_cache_errors"),
    *("remove_custom_partitioning_ptr_from_cache_key", "serialization_version"),
    *("share_binary_between_hosts", "share_binary_between_hosts_timeout_ms"),
}
CLASSES = TRACED, COMPILED, SAME_RESULTS, CHECKS, MESSAGES, BEFORE_THE_START, FILES


def test_every_option_is_known():
    known = [name for names in CLASSES for name in names]
    assert len(known) == len(set(known))
    names = {name.removeprefix("jax_") for name in jax.config.values}
    assert names <= set(known)
    assert {f"jax_{name}" for name in TRACED & names} == set(CONFIGURATION)


def test_settings_of_blocks_are_taken_to_other_threads():
    """All that `with jax.name(...)` sets, but for what tells threads apart."""
    names = {name for name in dir(jax) if hasattr(jax.config, f"jax_{name}")}
    assert names - {"thread_guard", "transfer_guard"} == set(SETTINGS)


@contextlib.contextmanager
def configured(name, value):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def noise(p, x):
    return x * p + jax.random.normal(jax.random.key(0), (3,))


def promoted(p, x):
    return x * p + jnp.arange(3)


FOLLOWED = {  # option: (values, what it changes)
    "allow_f16_reductions": (
        [False],
        lambda p, x: jax.lax.reduce_sum(jnp.float16(p) * x.astype("float16"), (0,)),
    ),
    "check_static_indices": ([True], lambda p, x: jnp.tanh(x)[7] * p),
    "default_prng_impl": (["rbg"], noise),
    "enable_custom_prng": ([True], lambda p, x: x * p * jax.random.PRNGKey(0).ndim),
    "enable_x64": ([True], lambda p, x: x * p + jnp.arange(3.0)),
    "explicit_x64_dtypes": (["error"], lambda p, x: x * p + jnp.ones(3, "float64")),
    "high_dynamic_range_gumbel": (
        [True],
        lambda p, x: x * p + jax.random.gumbel(jax.random.key(0), (3,)),
    ),
    "legacy_prng_key": (
        ["error"],
        lambda p, x: x * p + jax.random.normal(jax.random.PRNGKey(1), (3,)),
    ),
    "numpy_dtype_promotion": (["strict"], promoted),
    "numpy_rank_promotion": (["allow"], lambda p, x: x * p + jnp.ones((2, 3))),
    "random_seed_offset": ([7, 8], noise),
    "threefry_partitionable": ([False], noise),
}


def outcome(function, *args):
    """The kind of error that a function raises, or its results."""
    try:
        return jax.tree.map(np.asarray, function(*args))
    except (ValueError, TypeError, IndexError, jax.errors.JAXTypeError) as error:
        return type(error).__name__


def differ(a, b):
    if isinstance(a, str) or isinstance(b, str):
        return type(a) is not type(b) or a != b
    return a.dtype != b.dtype or a.shape != b.shape or not np.allclose(a, b)


def assert_same(got, expected):
    assert not differ(got, expected), (got, expected)


XS = [np.arange(3, dtype=np.float32) + i for i in range(2)]
ROWS = np.stack(XS * 4)


def loop(fn, xs):
    return np.stack([fn(2.0, x) for x in xs])


def lazily(fn, xs):
    with jedbatch.lazy():
        results = [fn(2.0, x) for x in xs]
    return np.stack(results)


# Traces of jit-ted functions are kept by JAX whatever these are.
KEPT_BY_JIT = "default_prng_impl", "enable_custom_prng", "legacy_prng_key"


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.parametrize(
    "kind", [lambda fn: fn, jedbatch.cell, jax.jit], ids=["plain", "cell", "jit"]
)
def test_a_change_is_followed(name, kind):
    values, own = FOLLOWED[name]
    fn, option = kind(lambda p, x: own(p, x)), f"jax_{name}"
    batched = jedbatch.batch(lambda p, x: fn(p, x))
    is_kept = kind is jax.jit and name in KEPT_BY_JIT
    before, found = jax.config.values[option], []
    for value in (before, *values, before):
        with configured(option, value):
            for xs in (XS, ROWS):
                expected = outcome(loop, fn if is_kept else own, xs)
                assert_same(outcome(batched, 2.0, xs), expected)
            assert_same(outcome(lazily, fn, xs), expected)
            found.append(expected)
    assert is_kept or any(map(differ, found[1:], found))


BATCHED = jedbatch.batch(lambda p, x: p * x)
OTHERS = {f"jax_{name}": values[0] for name, (values, _) in FOLLOWED.items()} | {
    "jax_default_matmul_precision": "highest",
    "jax_error_checking_behavior_divide": "raise",
    "jax_error_checking_behavior_nan": "raise",
    "jax_error_checking_behavior_oob": "raise",
    "jax_softmax_custom_jvp": not jax.config.jax_softmax_custom_jvp,
}


@pytest.mark.parametrize("option", CONFIGURATION)
def test_plans_are_of_one_configuration(option):
    plan = BATCHED.plan(2.0, XS)
    told = pytest.raises(ValueError, match=rf"{option} was .* and is .*Make a new one")
    with configured(option, OTHERS[option]), told:
        BATCHED.apply(2.0, plan)
    assert_close(BATCHED.apply(2.0, plan), np.stack(XS) * 2, 1e-6)
