"""Executables in exported models: the loop over instances, without compiling anything."""

import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, loop, mostly_slow, number

import jedbatch
from jedbatch import Exported
from jedbatch._export import executables
from jedbatch._export.executables import Machine, Precompiled
from jedbatch._support import native
from jedbatch.testing import compilations

P = {"w": jnp.linspace(-0.5, 0.5, 32).reshape(8, 4), "e": jnp.sin(jnp.arange(36.0)).reshape(9, 4)}
LEAF = jedbatch.cell(lambda p, i: p["e"][i], name="leaf")
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), name="add")
TREES = [((1, 2), 3), 4, ((5, 6), (7, 8)), (1, (2, (3, 4)))]
OURS = ("_pack", "_once", "_again", "_save", "_reverse")  # programs by the name of their function


def encode(p, tree):
    return LEAF(p, tree) if isinstance(tree, int) else ADD(p, *(encode(p, t) for t in tree))


def squared(x):
    return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(x))


BATCHED = jedbatch.batch(encode)


@pytest.fixture(scope="module")
def exported():
    """With gradients, and executables."""
    return BATCHED.export(P, TREES, gradient=True, compiled=True)


def again(exported, **options):
    return Exported.deserialize(exported.serialize(), **options)


def ours(names):
    """Those of the names of what was compiled that are programs of a model."""
    return [name for name in names if any(part in name for part in OURS)]


def changed(exported, *, members=None, machine=None):
    """The bytes of a model with another machine in the header, or other members."""
    with zipfile.ZipFile(io.BytesIO(exported.serialize())) as file:
        content = {name: file.read(name) for name in file.namelist()}
    content |= members or {}
    header = json.loads(content["header.json"])
    header["targets"][0]["machine"] |= machine or {}
    content["header.json"] = json.dumps(header).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, member in content.items():
            file.writestr(name, member)
    return out.getvalue()


PROGRAMS = (programs.tree_cells, programs.dag, programs.several_results, programs.dropout)


@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, "tree_cells"))
def test_equal_to_the_loop(program):
    """Values and gradients, by executables alone; in a `jax.jit` its programs are compiled."""
    fn, params, instances = program(6, 0)
    batched = jedbatch.batch(fn)
    exported = batched.export(params, instances, gradient=True, compiled=True)
    graphs = batched.graph(params, [instances[i] for i in (4, 1, 2)]).split()
    fewer = [instances[i] for i in (4, 1, 2)]
    plan = exported.plan(graphs, gradient=True)

    def of_loop(p):
        return number(jax.tree.leaves(loop(fn, p, fewer)))

    def of_exported(p, plan):
        return number(jax.tree.leaves(exported.apply(p, plan)))

    want, slope = jax.tree.leaves(loop(fn, params, fewer)), jax.grad(of_loop)(params)
    with compilations() as names:
        for _ in range(2):  # arenas are handed on
            assert_close(jax.tree.leaves(exported(params, graphs)), want, rtol=1e-5)
            assert_close(jax.grad(of_exported)(params, plan), slope, rtol=1e-4)
    assert not ours(names)
    assert exported.compilations == {}
    assert_close(jax.jit(jax.grad(of_exported))(params, plan), slope, rtol=1e-4)
    assert exported.compilations


def test_arenas_that_are_kept():
    """Large arenas are handed from call to call, and parameters may be arrays of NumPy."""
    exported = BATCHED.export(P, TREES, sizes={"leaf": 80_000}, compiled=True)
    executor = exported._variant(0, "inference")[1]
    assert isinstance(executor, Precompiled)
    assert executor.is_large
    for trees in (TREES, TREES[2:], TREES[:1]):
        want = loop(encode, P, trees)
        for params in (P, jax.tree.map(np.asarray, P)):
            assert_close(exported(params, BATCHED.graph(P, trees)), want, rtol=1e-6)
    assert exported.compilations == {}


@pytest.mark.parametrize("isa", ["", "SSE4_2"])
def test_in_a_fresh_process(exported, tmp_path, isa):
    """Nothing of the model is compiled; with other instructions everything is, and it says so."""
    exported.save(tmp_path / "model")
    BATCHED.graph(P, TREES).save(tmp_path / "graphs.npz")
    np.savez(tmp_path / "params.npz", **P)
    script = Path(__file__).parent / "fresh_executables.py"
    names = "model", "graphs.npz", "params.npz", "results.npz"
    command = [sys.executable, str(script), *(str(tmp_path / name) for name in names)]
    root = str(Path(jedbatch.__file__).parents[1])
    env = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    if isa:
        env["XLA_FLAGS"] = f"--xla_cpu_max_isa={isa}"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    refused, counts, compiled = json.loads(done.stdout)
    if isa and "what XLA knows of processor" in refused:  # other processors have no such flag
        assert set(counts) >= {"inference", "training", "reverse"}
        assert ours(compiled)
        assert "compiles the programs of `encode`, and does not run the executables" in done.stderr
    else:
        assert refused == ""
        assert counts == {}
        assert not ours(compiled)
    slope = jax.grad(lambda p: squared(loop(encode, p, TREES)))(P)
    with np.load(tmp_path / "results.npz") as got:
        assert_close(got["values"], np.asarray(loop(encode, P, TREES)), rtol=1e-6)
        assert_close({name: got[name] for name in P}, slope, rtol=1e-5)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Machine)])
def test_other_machines(exported, field, caplog):
    """The reason names all that differs, and programs are compiled."""
    other = 7 if field == "num_devices" else "another"
    with caplog.at_level(logging.WARNING, "jedbatch"):
        there = Exported.deserialize(changed(exported, machine={field: other}))
    assert there.has_executables
    assert there.executables_refused.startswith(f"{executables.NAMES[field]} was {other!r} and is")
    assert there.executables_refused in caplog.text
    assert there.executables_refused in str(there)
    assert_close(there(P, BATCHED.graph(P, TREES)), loop(encode, P, TREES), rtol=1e-6)
    assert there.compilations == {"inference": 1}


def test_not_wanted(exported, caplog):
    there = again(exported, compiled=False)
    assert there.executables_refused == "as `compiled=False` says"
    assert not caplog.text
    assert_close(there(P, BATCHED.graph(P, TREES)), loop(encode, P, TREES), rtol=1e-6)
    assert there.compilations == {"inference": 1}
    assert there.serialize() == exported.serialize()
    without = again(BATCHED.export(P, TREES))
    assert not without.has_executables
    assert without.executables_refused == ""
    assert "Executables" not in str(without)
    with pytest.raises(TypeError, match="compiled"):
        again(exported, compiled=1)


def test_without_the_core(exported, monkeypatch):
    """Executables that call the compiled core do not run without it."""
    if native.core() is None:
        pytest.skip("there is no compiled core")
    assert "run here" in str(again(exported))
    monkeypatch.setenv(native.SWITCH, "0")
    there = again(exported)
    assert "they call the compiled core" in there.executables_refused
    assert_close(there(P, BATCHED.graph(P, TREES)), loop(encode, P, TREES), rtol=1e-6)


def test_where_jax_looks_for_faults(exported):
    """Its checks are part of what is compiled."""
    there = again(exported)
    with jax.debug_nans(True):
        assert_close(there(P, BATCHED.graph(P, TREES)), loop(encode, P, TREES), rtol=1e-6)
    assert there.compilations == {"inference": 1}


def test_another_default_device():
    """See `two_devices.py`."""
    script = Path(__file__).parent / "two_devices.py"
    path = [str(Path(jedbatch.__file__).parents[1]), str(script.parents[1])]
    env = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    flags = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env |= {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


def test_damaged_files(exported):
    data, name = exported.serialize(), "executables/0/inference/forward"
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        info = file.getinfo(name)
        start, executable = info.header_offset + 200, file.read(name)
    damaged = data[:start] + bytes([data[start] ^ 255]) + data[start + 1 :]
    with pytest.raises(ValueError, match="cannot read the bytes"):
        Exported.deserialize(damaged)
    for wrong in (b"", b"no executable", executable[: len(executable) // 2]):
        there = Exported.deserialize(changed(exported, members={name: wrong}))
        with pytest.raises(ValueError, match=r"cannot be loaded.*compiled=False"):
            there(P, BATCHED.graph(P, TREES))


def test_what_cannot_be_compiled(monkeypatch):
    with pytest.raises(ValueError, match="that of this process among them, 'cpu'"):
        BATCHED.export(P, TREES, platforms=["cuda"], compiled=True)

    class NoTopology:
        pass

    monkeypatch.setattr(executables, "xla_client", NoTopology)
    with pytest.raises(NotImplementedError, match=r"jaxlib .* does not say what it compiles for"):
        BATCHED.export(P, TREES, compiled=True)


def test_several_platforms():
    """Executables are those of this process's platform."""
    exported = BATCHED.export(P, TREES, platforms=("cuda", "cpu"), compiled=True)
    there = again(exported)
    assert there.executables_refused == ""
    assert_close(there(P, BATCHED.graph(P, TREES)), loop(encode, P, TREES), rtol=1e-6)
    assert there.compilations == {}
    on_gpu = there.plan(BATCHED.graph(P, TREES), platform="cuda")
    assert on_gpu.static.signature.target.name == "gpu"
