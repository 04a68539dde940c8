"""Programs for GPUs, run on the CPU: the loop's answers, and nothing copied or compiled again."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, compilations, random_tree

import jedbatch
from jedbatch._layout.bucketing import Buckets, in_blocks
from jedbatch._program.instructions import InstructionSet
from jedbatch.testing import check_against_loop

CPU, GPU = map(jedbatch.Target.named, ("cpu", "gpu"))
VERSION = tuple(map(int, jax.__version__.split(".")[:2]))


@jedbatch.cell
def leaf(params, x):
    return jnp.tanh(params["w"] * x), params["w"] + x


@jedbatch.cell
def node(params, left, right):
    (a, c), (b, d) = left, right
    return jnp.tanh(jnp.concatenate([a, b]) @ params["u"]), c * d


@jedbatch.cell
def join(params, left, right):
    return left[0] + right[0] * params["w"], left[1]


def encode(params, tree):
    if isinstance(tree, float):
        return leaf(params, tree)
    left, right, *kind = tree
    return (join if kind else node)(params, encode(params, left), encode(params, right))


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"w": (4,), "u": (8, 4)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def trees(seed, count):
    rng = np.random.default_rng(seed)

    def kinds(tree):
        if isinstance(tree, float):
            return tree
        return kinds(tree[0]), kinds(tree[1]), *(["join"] if rng.random() < 0.4 else [])

    sizes = rng.integers(1, 12, count)
    return [kinds(random_tree(rng, n, lambda: float(rng.normal()))) for n in sizes]


def test_values_and_gradients_are_the_loops(params, monkeypatch):
    monkeypatch.setenv("JEDBATCH_CHECK", "1")  # every table is verified, too
    check(encode, params, trees(0, 6), target="gpu", thorough=True)


def test_many_rounds_of_many_chunks_are_reversed():
    """A switch has an instruction for each chunk; there is room for those of all rounds."""
    one = Buckets((4,), 4)
    narrow = dataclasses.replace(
        GPU, heavy=(4,), light=(4,), sums=one, blocks=one, superinstruction=1
    )

    def fn(w, x):
        for _ in range(6):
            x = jnp.tanh(w * x)
            if x[0] > 2:
                break
        return x

    xs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    check_against_loop(fn, jnp.ones(3), xs, plans=False, target=narrow)


def test_unseen_topologies_compile_nothing(params):
    batched = jedbatch.batch(encode, target="gpu")
    run = jax.jit(lambda p, plan: batched.apply(p, plan)[0])
    for seed in range(3):
        run(params, batched.plan(params, trees(seed, 12)))
    with compilations() as compiled:
        for seed in range(3, 8):
            run(params, batched.plan(params, trees(seed, 12)))
    assert not compiled


@pytest.mark.skipif(VERSION < (0, 11), reason="XLA copies what branches pass on before JAX 0.11")
def test_no_arena_is_copied(params):
    """A branch that does not write an arena hands it on as it is."""
    batched = jedbatch.batch(encode, target="gpu")
    plan = batched.plan(params, trees(0, 12))
    run = jax.jit(jax.grad(lambda p, plan: batched.apply(p, plan)[0].sum()))
    text = run.lower(params, plan).compile().as_text()
    signature = plan.static.signature
    for (shape, _), rows in zip(signature.arenas, signature.rows, strict=True):
        dims = ",".join(map(str, (rows, *shape)))
        assert not re.search(rf"\w+\[{dims}\]\S* copy\(", text)


def test_a_chunk_writes_all_its_rows_of_an_arena_at_once(params):
    target = dataclasses.replace(GPU, superinstruction=0)  # no branches but single opcodes
    batched = jedbatch.batch(encode, target=target)
    plan = batched.plan(params, trees(0, 12))
    text = jax.jit(lambda p, plan: batched.apply(p, plan)).lower(params, plan).as_text()
    opcodes = sum(map(len, plan.static.signature.widths))  # of cells that have two results each
    assert (
        text.count('"stablehlo.scatter"(')
        == opcodes
        == len(plan.static.signature.instructions.branches)
    )


def test_weight_gradients_need_no_loops(params):
    def loops(target):
        batched = jedbatch.batch(encode, target=target)
        plan = batched.plan(params, trees(0, 12))
        grad = jax.jit(jax.grad(lambda p, plan: batched.apply(p, plan)[0].sum()))
        return grad.lower(params, plan).as_text().count("stablehlo.while")

    single = dataclasses.replace(GPU, superinstruction=0)
    assert loops(single) == 2 < loops(dataclasses.replace(single, straight_rows=0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_look_ups_in_sixteen_bits_are_exact(dtype):
    @jedbatch.cell
    def row(table, i):
        return table[i]

    batched = jedbatch.batch(lambda table, word: row(table, word).sum(), target="gpu")
    table, words = jnp.zeros((3, 2), dtype), [np.int32(1)] * 1000 + [np.int32(2)] * 24

    gradient = jax.grad(lambda table: batched(table, words).sum().astype(jnp.float32))(table)

    assert gradient.dtype == dtype  # in bfloat16 itself, 256 + 1 is 256
    np.testing.assert_array_equal(
        np.asarray(gradient, np.float32), [[0, 0], [1000, 1000], [24, 24]]
    )


@pytest.mark.parametrize("is_exported", [False, True])
def test_types_that_a_minibatch_lacks_have_no_gradient(is_exported):
    """Weight gradients are those of all lanes there is room for, of which none exists here."""
    double = jedbatch.cell(lambda params, x: x * params)
    fn = lambda params, given: double(params, given[1]) if given[0] else given[1]  # noqa: E731
    x, params = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), jnp.ones(4)
    batched = jedbatch.batch(fn, target="gpu")
    some, none = [(k < 2, x[k]) for k in range(6)], [(False, x[k]) for k in range(6)]
    exported = batched.export(params, some, gradient=True)

    def slope(instances):
        if is_exported:
            run, graph = exported.apply, batched.graph(params, instances)
            plan = exported.plan(graph.split(), gradient=True)
        else:
            run, plan = batched.apply, batched.plan(params, instances)
            assert plan.static.signature.kernels  # the program of the others serves it
        return jax.grad(lambda params: jnp.square(run(params, plan)).sum())(params)

    for _ in range(2):
        np.testing.assert_allclose(slope(some), 2 * np.square(x[:2]).sum(0), rtol=1e-6)
        np.testing.assert_array_equal(slope(none), np.zeros(4))


def test_instructions_of_the_reverse_are_found_once(params, monkeypatch):
    batched = jedbatch.batch(encode, target="gpu")
    batched.plan(params, trees(0, 4), gradient=True)
    found = []
    method = InstructionSet._encode
    counted = lambda self, *args: found.append(self.reverse) or method(self, *args)  # noqa: E731
    monkeypatch.setattr(InstructionSet, "_encode", counted)
    batched.plan(params, trees(0, 4)[::-1], gradient=True)
    assert found.count(True) == 1


def test_few_widths_are_compiled():
    wide = GPU.buckets(work=10**7, row_bytes=10**4)
    light = GPU.buckets(work=10, row_bytes=8)
    assert wide.overhead < light.overhead == GPU.longest_start
    assert wide.cover(np.array([200]))[0].sum() <= 2
    assert light.cover(np.array([2000]))[0].sum() == 1
    assert GPU.buckets(work=1, row_bytes=GPU.chunk_bytes).widths == GPU.heavy[:2]


def test_chunks_of_long_light_rows_fit_into_a_cache():
    *narrower, widest = CPU.light
    for row_bytes in (8, 1_000, 2_000, 5_000, 50_000, CPU.chunk_bytes):
        widths = CPU.buckets(work=10, row_bytes=row_bytes).widths
        assert widths[:2] == CPU.light[:2]
        halved = [widest >> n for n in range(4)]
        largest = [n for n in halved if n * row_bytes <= CPU.light_bytes]
        assert widths == (*narrower, *largest[:1])
        assert all(width % widths[0] == 0 for width in widths)
    assert CPU.buckets(work=10**7, row_bytes=5_000).widths == CPU.heavy
    assert GPU.buckets(work=10, row_bytes=10_000).widths == GPU.light


WORK = 119_565  # of the largest block of chains of Hamiltonian Monte Carlo, see `nested`
LOOPS = {256: 4096, 1024: 1024}  # instances by units, of loops x + tanh(x A) B


def test_loops_on_a_gpu_run_as_measured():
    least = GPU.nest_work * GPU.step_work  # of a block, to run by lanes
    assert 256 * WORK < least < 4096 * WORK
    assert all(least < n * 4 * units * units for units, n in LOOPS.items())


@pytest.mark.parametrize(
    ("instances", "widths"), [(3, 1), (256, 1), (300, 2), (1024, 2), (4096, 3), (5000, 4)]
)
def test_one_chunk_holds_all_loops_on_a_gpu(instances, widths):
    @jedbatch.cell
    def run(factor, count, x):
        return jax.lax.while_loop(
            lambda state: state[0] > 0, lambda state: (state[0] - 1, factor * state[1]), (count, x)
        )[1]

    batched = jedbatch.batch(lambda factor, row: run(factor, *row), target="gpu")
    counts = np.arange(instances, dtype=np.int32) % 7
    rows = [(n, np.float32(k)) for k, n in enumerate(counts)]
    plan = batched.plan(np.float32(2), rows)
    signature = plan.static.signature
    (kernel,) = signature.kernels
    assert kernel.buckets.cover(np.array([instances]))[0].sum() == 1
    assert signature.widths == (GPU.diverging.widths[:widths],)
    if instances <= 300:
        want = [k * 2.0**n for k, n in enumerate(counts)]
        np.testing.assert_array_equal(batched.apply(np.float32(2), plan), want)


@pytest.fixture
def optimizes():
    """Has JAX optimize programs, or not, for one test, whatever the environment says."""
    before = jax.config.read("jax_disable_most_optimizations")
    set_to = lambda on: jax.config.update("jax_disable_most_optimizations", not on)  # noqa: E731
    set_to(True)
    yield set_to
    set_to(not before)


def test_options_for_jit(optimizes):
    assert jedbatch.compiler_options("cpu") == {"xla_backend_optimization_level": "2"}
    optimizes(False)
    assert jedbatch.compiler_options("cpu") == {}  # JAX knows better
    assert "WHILE" in jedbatch.compiler_options("gpu")["xla_gpu_enable_command_buffer"]
    plain = dataclasses.replace(GPU, name="plain", command_buffers=())
    assert jedbatch.compiler_options(plain) == {}


def test_calls_are_compiled_with_the_options(params, optimizes):
    target = dataclasses.replace(CPU, name="wrong", optimization_level="unknown")  # to XLA
    fn = lambda p, tree: encode(p, tree)[0]  # noqa: E731
    batched, minibatch = jedbatch.batch(fn, target=target), trees(0, 2)
    plan = batched.plan(params, minibatch)
    refused = pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level")
    with refused:
        batched(params, minibatch)
    with refused:
        jax.grad(lambda p: batched(p, minibatch).sum())(params)
    with refused:
        jax.jit(batched.apply, compiler_options=target.compiler_options())(params, plan)
    loop = [fn(params, tree) for tree in minibatch]
    np.testing.assert_allclose(jax.jit(batched.apply)(params, plan), loop, rtol=1e-5)


def test_blocks_of_weight_gradients():
    """Lanes that do little are compiled in one width, heavy ones in two."""
    assert [CPU.weight_blocks(work, 1000).widths for work in (10**5, 10**6)] == [(64,), (64, 256)]
    assert CPU.weight_blocks(10**5, 1000, rows=32).widths == (16,)
    for work in (10**5, 10**12):
        assert GPU.weight_blocks(work, 1000).widths == (512, 2048)


@pytest.mark.parametrize("widths", [(1,), (16,), (64, 256), (6, 12, 36)])
def test_lanes_in_blocks_are_those_of_the_blocks(widths):
    blocks = Buckets(widths, overhead=3)
    for lanes in range(6 * widths[-1]):
        assert in_blocks(lanes, blocks) == blocks.cover(np.array([lanes]))[0] @ widths >= lanes


def test_targets_that_do_not_exist():
    with pytest.raises(ValueError, match=r"`batch` got target='tpu'; expected one of \['cpu'"):
        jedbatch.batch(encode, target="tpu")
    with pytest.raises(TypeError, match="expected one of"):
        jedbatch.batch(encode, target=3)
    with pytest.raises(TypeError, match=r"`Target\.named` got None"):
        jedbatch.Target.named(None)
    with pytest.raises(ValueError, match="`compiler_options` got target='cuda'"):
        jedbatch.compiler_options("cuda")
