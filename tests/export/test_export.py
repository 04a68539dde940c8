"""Exported models against the loop over instances, here and in a process without the model."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, loop, mostly_slow, number

import jedbatch
from jedbatch import Exported
from jedbatch._support import native

P = {"w": jnp.linspace(-0.5, 0.5, 32).reshape(8, 4), "e": jnp.sin(jnp.arange(36.0)).reshape(9, 4)}
LEAF = jedbatch.cell(lambda p, i: p["e"][i], name="leaf")
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), name="add")
TREES = [((1, 2), 3), 4, ((5, 6), (7, 8)), (1, (2, (3, 4)))]


def encode(p, tree):
    return LEAF(p, tree) if isinstance(tree, int) else ADD(p, *(encode(p, t) for t in tree))


def squared(x):
    return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(x))


@pytest.fixture(scope="module")
def model():
    """(the batched function, it exported with gradients for up to 4 instances)."""
    batched = jedbatch.batch(encode)
    return batched, batched.export(P, TREES, gradient=True)


def again(exported):
    return Exported.deserialize(exported.serialize())


PROGRAMS = (
    programs.no_work,
    programs.tree_raw,
    programs.chain_nnx,
    programs.dag,
    programs.several_results,
    programs.dropout,
    programs.custom_rules,
    programs.values_and_options,
)


@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, "no_work"))
def test_equal_to_the_loop(program):
    """Values and gradients, in `jax.jit` and outside, of what the batched function recorded."""
    fn, params, instances = program(6, 0)
    batched = jedbatch.batch(fn)
    exported = again(batched.export(params, instances, gradient=True))
    fewer = [instances[i] for i in (4, 1, 2)]
    plan = exported.plan(batched.graph(params, fewer).split(), gradient=True)
    want = loop(fn, params, fewer)
    got = exported.apply(params, plan)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), rtol=1e-5)

    def of_loop(p):
        return number(jax.tree.leaves(loop(fn, p, fewer)))

    def of_exported(p, plan):
        return number(jax.tree.leaves(exported.apply(p, plan)))

    slope = jax.grad(of_loop)(params)
    assert_close(jax.jit(jax.grad(of_exported))(params, plan), slope, rtol=1e-4)


def test_sums_of_other_lengths_are_no_part():
    """Programs are for the types of the sample, whatever a cell may be called with later."""
    plus = jedbatch.cell(lambda *xs: functools.reduce(jnp.add, xs), name="plus")

    def fn(p, count):
        return plus(*[p["e"][k] for k in range(count)])

    batched = jedbatch.batch(fn)
    exported = again(batched.export(P, [2, 4], gradient=True))
    assert len(exported.node_types) == 3  # a row of `e`, and sums of two and of four
    plan = exported.plan(batched.graph(P, [4, 2]).split(), gradient=True)

    def of_loop(p):
        return squared([fn(p, n) for n in (4, 2)])

    value, slope = jax.value_and_grad(lambda p: squared(exported.apply(p, plan)))(P)
    assert_close((value, slope), jax.value_and_grad(of_loop)(P), 1e-5)


def test_any_topology(model):
    """Of other graphs, made from arrays; what is compiled once serves all."""
    exported = again(model[1])
    run = jax.jit(jax.value_and_grad(lambda p, plan: squared(exported.apply(p, plan))))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        graphs, words = [], []
        for _ in range(4):  # nodes read any of those before, as trees do not
            leaves, inner = int(rng.integers(1, 5)), int(rng.integers(1, 4))
            reads = [[-1 - i] for i in range(leaves)]
            reads += [rng.integers(0, leaves + i, 2).tolist() for i in range(inner)]
            words.append(rng.integers(0, 9, leaves))
            kinds = ["leaf"] * leaves + ["add"] * inner
            graph = exported.graph(kinds, reads, inputs=words[-1:], outputs=[leaves + inner - 1])
            graphs.append((graph, reads[leaves:], words[-1]))
        plan = exported.plan([g for g, _, _ in graphs])

        def by_hand(p, graphs=graphs):
            results = []
            for _, reads, numbers in graphs:
                values = [p["e"][i] for i in numbers]
                for a, b in reads:
                    values.append(jnp.tanh(jnp.concatenate([values[a], values[b]]) @ p["w"]))
                results.append(values[-1])
            return jnp.stack(results)

        assert_close(exported.apply(P, plan), by_hand(P), rtol=1e-6)
    assert exported.compilations == {"inference": 1}
    plan = exported.plan(model[0].graph(P, TREES), gradient=True)
    fewer = exported.plan(model[0].graph(P, TREES[2:]), gradient=True)
    assert plan.static.signature is fewer.static.signature
    want = jax.value_and_grad(lambda p: squared(loop(encode, p, TREES)))(P)
    assert_close(run(P, plan), want, rtol=1e-5)


def test_in_a_fresh_process(model, tmp_path):
    """From files, where nothing of the model can be imported; a second one compiles nothing."""
    batched, exported = model
    exported.save(tmp_path / "model")
    batched.graph(P, TREES).save(tmp_path / "graphs.npz")
    np.savez(tmp_path / "params.npz", **P)
    script = Path(__file__).parent / "fresh.py"
    names = "model", "graphs.npz", "params.npz", "results.npz"
    command = [sys.executable, str(script), *(str(tmp_path / name) for name in names)]
    root = str(Path(jedbatch.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    printed = []
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        assert "add(2 × f32[4]) -> f32[4]" in done.stdout
        printed.append(done.stdout.split("\n")[-2].split())
    (compiled, _, read, _), again = printed
    assert int(compiled) > 3  # values, and both halves of a gradient, with what is around them
    assert again == ["0", "misses", str(int(compiled) + int(read)), "hits"]
    slope = jax.grad(lambda p: squared(loop(encode, p, TREES)))(P)
    with np.load(tmp_path / "results.npz") as got:
        assert_close(got["values"], np.asarray(loop(encode, P, TREES)), rtol=1e-6)
        assert_close(got["by_hand"], np.asarray(loop(encode, P, [(1, 2)])), rtol=1e-6)
        assert_close({name: got[name] for name in P}, slope, rtol=1e-5)


def test_files_are_the_same_every_time(model):
    assert model[1].serialize() == again(model[1]).serialize()


def test_arenas_that_are_kept():
    """Large arenas are handed from call to call, and parameters may be arrays of NumPy."""
    batched = jedbatch.batch(encode)
    exported = batched.export(P, TREES, sizes={"leaf": 80_000})
    assert exported._variant(0, "inference")[1].is_large
    for trees in (TREES, TREES[2:], TREES[:1]):
        want = loop(encode, P, trees)
        for params in (P, jax.tree.map(np.asarray, P)):
            assert_close(exported(params, batched.graph(P, trees)), want, rtol=1e-6)
    assert exported.compilations == {"inference": 2}  # with packed weights, and with others


def test_where_jax_looks_for_faults(model):
    batched, exported = model
    with jax.debug_nans(True):
        got = exported(P, batched.graph(P, TREES))
    assert_close(got, loop(encode, P, TREES), rtol=1e-6)


def test_another_default_device():
    """See `two_devices.py`."""
    script = Path(__file__).parent / "two_devices.py"
    path = [str(Path(jedbatch.__file__).parents[1]), str(script.parents[1])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


def test_where_the_core_is_not(model, monkeypatch):
    """Programs for a CPU call the compiled core where it is of the same revision, only there."""
    batched, exported = model
    graph, want = batched.graph(P, TREES), loop(encode, P, TREES)
    variant, _ = exported._variant(0, "inference")
    assert variant.calls_core == (native.core() is not None)
    for here in (variant.calls_core, False):
        there = again(exported)
        assert there._variant(0, "inference")[0].calls_core == here
        assert_close(there(P, graph), want, rtol=1e-6)
        monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.undo()
    monkeypatch.setattr(native, "REVISION", native.REVISION + 1)
    assert not variant.calls_core


def test_platforms():
    """Programs for GPUs and TPUs are made here too, one target each."""
    batched = jedbatch.batch(encode)
    exported = again(batched.export(P, TREES, platforms=("cuda", "cpu", "tpu"), gradient=True))
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
    assert_close(exported(P, batched.graph(P, TREES)), loop(encode, P, TREES), rtol=1e-6)
    on_gpu = exported.plan(batched.graph(P, TREES), platform="cuda", gradient=True)
    assert on_gpu.static.signature.target.name == "gpu"
    elsewhere = again(batched.export(P, TREES, platforms=["cuda"]))
    with pytest.raises(ValueError, match="exported for cuda, and this process computes on 'cpu'"):
        elsewhere.plan(batched.graph(P, TREES))


def test_arrays_that_differ_in_length():
    """They may be as long as the longest one is padded to, and as short as none of them is."""

    def mean(p, words):
        return jnp.tanh(p["e"][words] @ p["w"][:4]).mean(0)

    batched, rng = jedbatch.batch(mean), np.random.default_rng(0)
    words = [rng.integers(0, 9, n) for n in (18, 25, 20)]
    exported = again(batched.export(P, words, gradient=True))
    others = [rng.integers(0, 9, n) for n in (1, 12, 31)]
    graph = batched.graph(P, others)
    assert_close(exported(P, graph), loop(mean, P, others), rtol=1e-5)
    plan = exported.plan(graph, gradient=True)
    slope = jax.grad(lambda p: squared(exported.apply(p, plan)))(P)
    assert_close(slope, jax.grad(lambda p: squared(loop(mean, p, others)))(P), rtol=1e-5)


@pytest.mark.slow
def test_lists_of_results():
    """Of other structures; a graph that returns what no instance did gets a tuple."""

    def outs(p, tree):
        state = encode(p, tree)
        return [state] if isinstance(tree, int) else {"b": state, "a": (state[:2], state.sum())}

    batched = jedbatch.batch(outs, out_axes=None)
    exported = again(batched.export(P, TREES, gradient=True))
    graph = batched.graph(P, TREES[:3])
    want = [jax.tree.leaves(outs(P, t)) for t in TREES[:3]]
    got = exported(P, graph)
    assert [type(x) for x in got] == [tuple] * 3
    assert_close([list(x) for x in got], want, rtol=1e-6)
    plan = exported.plan(graph, gradient=True)
    slope = jax.grad(lambda p: squared(exported.apply(p, plan)[2]))(P)
    assert_close(slope, jax.grad(lambda p: squared(outs(p, TREES[2])))(P), rtol=1e-5)


class Params(NamedTuple):
    w: jax.Array
    e: jax.Array


class Pair(NamedTuple):
    state: jax.Array
    root: jax.Array


def test_containers_of_the_model():
    """Parameters are found by their paths; results come in dicts where classes are not known."""

    def outs(p, tree):
        return [Pair(encode(p._asdict(), tree), encode(p._asdict(), tree).sum()), None]

    batched, p = jedbatch.batch(outs), Params(P["w"], P["e"])
    exported = again(batched.export(p, TREES))
    (got, nothing) = exported(P, batched.graph(p, TREES))
    assert nothing is None
    want = loop(encode, P, TREES)
    assert_close(got, {"state": want, "root": want.sum(1)}, rtol=1e-6)


def test_types_of_parameters_will_do():
    """There need be no parameters yet; 16 bits, and two functions of one name."""
    first = jedbatch.cell(lambda p, x: jnp.tanh(p["a"] * x), name="f")
    second = jedbatch.cell(lambda p, x: jnp.tanh(p["b"] * x), name="f")
    p = {"a": jnp.full(3, 0.5, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    scale = jnp.full(3, 2, jnp.bfloat16)
    batched = jedbatch.batch(lambda p, x: second(p, first(p, scale * x)))
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p)
    xs = [np.float32([1, 2, 3]), np.float32([3, 2, 1])]
    exported = again(batched.export(specs, xs))
    got = exported(p, batched.graph(specs, xs))
    want = loop(lambda p, x: jnp.tanh(p["b"] * jnp.tanh(p["a"] * (scale * x))), p, xs)
    assert_close(got, want, rtol=1e-2)
    with pytest.raises(ValueError, match="'f', a name of 2 types"):
        exported.graph(["f"], [[-1]], inputs=[xs])
    assert len(set(exported.sizes)) == len(exported.sizes)


def test_closed_over_arrays_are_part_of_it():
    table, bias = jnp.arange(12.0).reshape(3, 4), np.float32(2.5)

    def fn(p, n):
        return jnp.tanh(p * table[n] + table.sum(0)) + bias

    batched = jedbatch.batch(jedbatch.cell(fn, name="cell"))
    exported = again(batched.export(jnp.ones(4), [0, 1, 2]))
    graph = exported.graph([0, 0], [[-1], [-2]], inputs=[[2, 1]], outputs=[0])
    assert_close(exported(jnp.ones(4), graph), fn(jnp.ones(4), 2)[None], rtol=1e-6)


@pytest.mark.slow
def test_inputs_are_differentiated():
    total = jedbatch.batch(lambda p, xs: sum((jnp.tanh(p * x) for x in xs), start=p))
    xs = [np.ones(3, np.float32), np.full(3, 2, np.float32)]
    exported = total.export(jnp.ones(3), [xs, xs[:1]], gradient=True)
    plan = exported.plan(total.graph(jnp.ones(3), [xs]), gradient=True)

    def f(inputs):
        return exported.apply(jnp.ones(3), plan, inputs=inputs).sum()

    got = jax.grad(f)(plan.inputs)["float32[3]"][:2]
    want = jnp.stack([1 - jnp.tanh(x) ** 2 for x in xs])
    assert_close(got, want, rtol=1e-6)


def test_policies():
    """A learned machine goes along, and gives the same batches; so does a heuristic."""
    fn, params, instances = programs.tree_cells(8, 0)
    for policy in (None, jedbatch.policies.depth):
        batched = jedbatch.batch(fn, policy=policy)
        machine = batched.learn(params, instances) if policy is None else policy
        exported = again(batched.export(params, instances))
        plan = exported.plan(batched.graph(params, instances))
        want = batched.plan(params, instances).schedule
        assert plan.schedule.batch_type.tolist() == want.batch_type.tolist()
        assert type(exported.policy) is type(machine)
    mine = jedbatch.batch(fn, policy=lambda frontier: jedbatch.policies.agenda(frontier))
    with pytest.raises(TypeError, match="which is Python; expected an `FSM`"):
        mine.export(params, instances)


def test_rows_of_tables_are_checked(model):
    bad = model[1].graph(["leaf"], [[-1]], inputs=[[9]])
    with pytest.raises(IndexError, match="row 9 of a table of 9 rows"):
        model[1].plan(bad)


def test_results_of_nodes_one_by_one():
    """A node that returns two values: a pair names one of them, a number both."""
    both = jedbatch.cell(lambda p, n: (p * n, p + n), name="both")
    mix = jedbatch.cell(lambda a, b: a - 2 * b, name="mix")
    batched = jedbatch.batch(lambda p, n: mix(*both(p, n)))
    p = jnp.ones(3)
    exported = batched.export(p, [1.0, 2.0], sizes={"mix": 4})
    for reads in ([[-1], [0]], [[-1], [(0, 0), (0, 1)]]):
        graph = exported.graph(["both", "mix"], reads, inputs=[np.float32([3])])
        assert_close(exported(p, graph), (p * 3 - 2 * (p + 3))[None], rtol=1e-6)
    swapped = exported.graph(["both", "mix"], [[-1], [(0, 1), (0, 0)]], inputs=[np.float32([3])])
    assert_close(exported(p, swapped), (p + 3 - 2 * p * 3)[None], rtol=1e-6)
    csr = np.array([0, 1, 2]), np.array([-1, 0])
    graph = exported.graph([0, 1], csr, inputs=[np.float32([3])])
    assert graph.operand.tolist() == [-1, 0, 1]
