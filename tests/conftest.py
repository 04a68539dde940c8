"""Strict settings for every test; warnings are errors, see `pyproject.toml`.

The tests of a package lie in the folder of its name, programs and helpers that several of them use
in `cases`, texts that must not change by accident in `golden`. Tests marked as slow are the rest of
a table of which some cases are always run (`cases.helpers.mostly_slow`), or train a model.

Most of the time of tests goes into compiling. The modules in `OPTIMIZED`, of which each is about
what programs of a kind compute, compile as users do; all others, and slow tests, with little
optimization of the machine's code, and on JAX 0.10 with XLA's older emitters of fusions, in
half of the time. Single operations, of which the plain loop compiles hundreds, and draws of
random numbers are compiled with little optimization in all tests.
"""

import functools
import gc
import inspect
import os
import threading
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests run side by side, and gain nothing from programs that several threads compile.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")

import jax
import pytest
from jax._src import compiler  # JAX has no setting for options of all programs
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(20_000, 20, 20)  # tracing makes many objects, hardly any of them garbage in cycles


def pytest_configure(config):
    """Keeps compiled programs with pytest's cache, for the other processes and for later runs.

    A first run takes 3 % longer, and one whose programs are there less than a quarter of the time.
    `-p no:cacheprovider` runs without, `--cache-clear` begins anew.
    """
    if config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


LITTLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # XLA's passes run but for one, LLVM's hardly any
GIVEN = LITTLE in os.environ
HAS_EMITTERS = jax.__version_info__ < (0, 11)  # of fusions, two kinds
OLDER_EMITTERS = {"xla_cpu_use_fusion_emitters": "False"}
ARE_OPTIMIZED = pytest.StashKey[bool]()  # the programs that this process holds


OPTIMIZED = {
    "control_flow/test_values.py",
    "docs/test_companions.py",
    "docs/test_notebooks.py",
    "docs/test_site.py",
    "export/test_export.py",
    "kernel/test_fusion.py",
    "models/test_models.py",
    "program/test_derivatives.py",
    "program/test_dtypes.py",
    "program/test_oracle.py",
    "program/test_uninitialized.py",
    "program/test_unread.py",
    "ragged/test_ragged.py",
    "session/test_regressions.py",
    "test_tiny.py",
}


def is_optimized(item):
    """Returns whether the programs of a test are compiled as users compile them."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return path in OPTIMIZED and not item.get_closest_marker("slow")


DRAWS = {
    f"jit_{name}"
    for name, fn in vars(inspect.getmodule(jax.random.normal)).items()
    if hasattr(fn, "trace")  # it is compiled where it is called by itself
}


def is_small(program):
    """Returns whether a program is an operation of the plain loop, or draws random numbers."""
    if program.operation.attributes["sym_name"].value in DRAWS:
        return True
    blocks = [b for fn in program.body.operations for region in fn.regions for b in region.blocks]
    return sum(len(block.operations) for block in blocks) <= 4  # of which one returns


@functools.partial(setattr, compiler, "compile_or_get_cached")
def compile_program(backend, program, devices, options, *rest, make=compiler.compile_or_get_cached):
    """The compiled program of a module of MLIR, made with little optimization of what is small."""
    debug = options.executable_build_options.debug_options
    if is_small(program):
        debug.xla_backend_optimization_level = 0
        debug.xla_llvm_disable_expensive_passes = True
    if debug.xla_backend_optimization_level == 0 and not debug.xla_disable_hlo_passes:
        debug.xla_disable_hlo_passes = "while-loop-invariant-code-motion"  # costly
    if debug.xla_backend_optimization_level == 0 and HAS_EMITTERS:
        given = dict(options.env_option_overrides)
        options.env_option_overrides = list((OLDER_EMITTERS | given).items())
    return make(backend, program, devices, options, *rest)


def pytest_collection_modifyitems(items):
    """Begins with the longest test, which would run alone at the end; those alike come together."""
    items.sort(key=lambda item: (item.name != "test_eight_devices", is_optimized(item)))


class Contexts(threading.local):
    """Makes contexts of MLIR, each of them for ten programs of a thread, as JAX 0.12 does.

    To make one takes longer than to lower a program of a few operations. A program that is lowered
    while another one is has a context of its own, or it would become a part of that one.
    """

    def __init__(self, make):
        self.make, self.left = make, 0

    def __call__(self):
        if mlir.ir.Context.current is not None:
            return self.make()
        if not self.left:
            self.context, self.left = self.make(), 10
        self.left -= 1
        return self.context


if HAS_EMITTERS:
    mlir.make_ir_context = Contexts(mlir.make_ir_context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Compiles the programs of a test and of processes it starts with much or little optimization.

    What is given in the environment holds for all of them.
    """
    if GIVEN:
        return (yield)
    held = item.session.stash
    if HAS_EMITTERS and held.get(ARE_OPTIMIZED, None) is not is_optimized(item):
        jax.clear_caches()  # emitters differ in the last bit of `tanh`, gradients in more
        held[ARE_OPTIMIZED] = is_optimized(item)
    if is_optimized(item):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LITTLE, "1")
        jax.config.update(LITTLE.lower(), True)
        try:
            return (yield)
        finally:
            jax.config.update(LITTLE.lower(), False)


MOST_MAPPINGS = (
    15_000  # or some 4 GB: Linux allows 65,530 to a process, of which a program of XLA takes ten
)


@pytest.fixture(autouse=True, scope="module")
def _enough_mappings():
    """Lets go what earlier modules compiled before XLA finds no memory to map, and crashes.

    Nothing stays frozen here: while it traces a cell the package does so itself. Where others have,
    as a server does, it counts what they froze for each cell, a tenth of a second where there are a
    million objects.
    """
    gc.unfreeze()
    if mappings() > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def mappings():
    """Regions of memory that this process maps; 0 where Linux does not say it."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture
def x64():
    """Computes in 64 bits for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def older_frozen(monkeypatch):
    """Freezes the objects that there are, for a test that collects garbage or lists objects.

    Of millions that other tests have left it takes a second each time. See `_enough_mappings` why
    the package is not to count them.
    """
    gc.freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)
    yield
    gc.unfreeze()


@pytest.fixture(params=["calls", "XLA"])
def maker(request, monkeypatch):
    """By which of the two programs on CPUs do what the compiled core can do."""
    from jedbatch._support import native

    if request.param == "XLA":
        monkeypatch.setenv(native.SWITCH, "0")
    elif native.core() is None:
        pytest.skip("no compiled core")
    return request.param
