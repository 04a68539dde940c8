"""Errors of exported models: sizes, types, parameters, files."""

import io
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch import Exported, Graph
from jedbatch._export import archive

ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(p["w"] * (x + y)), name="add")
LEAF = jedbatch.cell(lambda p, n: p["b"]["c"] * n, name="leaf")
P = {"w": jnp.ones(3), "b": {"c": jnp.arange(3.0)}}
TREES = [((1, 2), 3), (4, 5)]


def total(p, t):
    return ADD(p, total(p, t[0]), total(p, t[1])) if isinstance(t, tuple) else LEAF(p, t)


TOTAL = jedbatch.batch(total)


@pytest.fixture(scope="module")
def exported():
    return TOTAL.export(P, TREES)


def chain(exported, leaves):
    """The graph of a tree of so many leaves, each the sibling of all before."""
    kinds = ["leaf"] * leaves + ["add"] * (leaves - 1)
    reads = [[-1 - i] for i in range(leaves)]
    reads += [[i and leaves + i - 1, i + 1] for i in range(leaves - 1)]
    return exported.graph(kinds, reads, inputs=[np.ones(leaves, np.int32)])


def test_too_many_instances(exported):
    graph = chain(exported, 2)
    with pytest.raises(ValueError, match="got 3 instances; expected at most 2"):
        exported.plan([graph] * 3)


def test_too_many_nodes(exported):
    room = exported.sizes
    with pytest.raises(ValueError, match=r"takes 5,\d+ lanes of `leaf.*room for") as error:
        exported.plan(chain(exported, 5000))
    assert f"{room['leaf']:,}" in str(error.value)
    assert "export the model with `sizes={'leaf': 5" in str(error.value)


def test_sizes_can_be_asked_for():
    """As the message says, until it fits."""
    exported, sizes = TOTAL.export(P, TREES), {}
    graph = chain(exported, 1500)
    with pytest.raises(ValueError, match="does not fit") as error:
        exported.plan(graph)
    sizes = eval(str(error.value).split("`sizes=")[1].split("`")[0])
    larger = TOTAL.export(P, TREES, sizes=sizes)
    got = larger(P, chain(larger, 1500))
    assert got.shape == (1, 3)
    with pytest.raises(ValueError, match=r"sizes of \['nodes'\]"):
        TOTAL.export(P, TREES, sizes={"nodes": 3})


@pytest.mark.slow
def test_readers():
    """With gradients, programs list as many readers of a value as the sample has, or as asked."""
    few = TOTAL.export(P, TREES, gradient=True)
    many = TOTAL.export(P, TREES, gradient=True, sizes={"readers": 9})

    def shared(exported):  # one leaf that nine nodes read, twice each
        kinds = ["leaf"] + ["add"] * 9
        reads = [[-1], *([[0, 0]] * 9)]
        return exported.graph(kinds, reads, inputs=[[2]], outputs=[9])

    with pytest.raises(ValueError, match="readers of one value"):
        few.plan(shared(few), gradient=True)
    params = jax.tree.map(lambda x: x / 8, P)  # `tanh` of more has hardly a slope
    want = jnp.tanh(params["w"] * 4 * params["b"]["c"])
    assert_close(few(params, shared(few)), want[None], rtol=1e-6)
    plan = many.plan(shared(many), gradient=True)
    got = jax.grad(lambda p: many.apply(p, plan).sum())(params)
    want = jax.grad(lambda p: jnp.tanh(p["w"] * 4 * p["b"]["c"]).sum())(params)
    assert_close(got, want, rtol=1e-6)


def test_unknown_types(exported):
    with pytest.raises(ValueError, match=r"type 'mul'.*not exported.*0 `leaf.*1 `add") as error:
        exported.plan(Graph.from_dag([0], [[]], names=["mul"]))
    assert "sample of instances that has nodes of all types" in str(error.value)
    with pytest.raises(ValueError, match="got type 7 of node 1"):
        exported.graph([0, 7], [[-1], [0, 0]], inputs=[[1]])
    other = jedbatch.batch(lambda p, t: ADD({"w": p["b"]["c"]}, p["w"], LEAF(p, t)))
    with pytest.raises(ValueError, match="which was not exported"):
        exported.plan(other.graph(P, [1]))


def test_wrong_operands(exported):
    with pytest.raises(ValueError, match=r"node 1 with 1 operands.*has 2"):
        exported.graph(["leaf", "add"], [[-1], [0]], inputs=[[1]])
    with pytest.raises(ValueError, match=r"node 1 of type `add` whose operand 1 is i32\[\]"):
        exported.graph(["leaf", "add"], [[-1], [0, -1]], inputs=[[1]])
    with pytest.raises(ValueError, match=r"inputs of type f32\[2\]; nodes read values of"):
        exported.graph(["leaf"], [[-1]], inputs=[np.ones((1, 2), np.float32)])
    with pytest.raises(ValueError, match=r"got \(0, 1\) as an operand"):
        exported.graph(["leaf", "add"], [[-1], [0, (0, 1)]], inputs=[[1]])
    with pytest.raises(OverflowError, match="do not fit the int32"):
        exported.graph(["leaf"], [[-1]], inputs=[[2**40]])
    recorded = TOTAL.plan(P, TREES).graph
    assert recorded.inputs[0].leaf is None
    with pytest.raises(TypeError, match="a graph, or a list of graphs"):
        exported.plan(TREES)


def test_wrong_parameters(exported):
    graph = chain(exported, 2)
    with pytest.raises(ValueError, match=r"no array at argument 0 at 'b/c' and has.*at 'b'"):
        exported({"w": P["w"], "b": P["w"]}, graph)
    with pytest.raises(ValueError, match=r"float32\[4\] as argument 0 at 'w'.*float32\[3\]"):
        exported({**P, "w": jnp.ones(4)}, graph)
    with pytest.raises(ValueError, match=r"int32\[3\] as argument 0 at 'w'"):
        exported({**P, "w": jnp.ones(3, int)}, graph)
    with pytest.raises(TypeError, match="0 shared arguments; expected 1"):
        exported(graph)
    plan = TOTAL.plan(P, TREES)
    with pytest.raises(TypeError, match="a plan of this exported model"):
        exported.apply(P, plan)
    with pytest.raises(ValueError, match="exported without gradients"):
        exported.plan(graph, gradient=True)


def test_second_derivatives():
    exported = TOTAL.export(P, TREES, gradient=True)
    plan = exported.plan(chain(exported, 2), gradient=True)

    def f(p):
        return exported.apply(p, plan).sum()

    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(f, (P,), (P,))
    with pytest.raises(TypeError, match=r"differentiated twice|forward mode"):
        jax.grad(lambda p: jax.grad(f)(p)["w"].sum())(P)
    inference = exported.plan(chain(exported, 2))
    with pytest.raises(ValueError, match="gradient=True"):
        jax.grad(lambda p: exported.apply(p, inference).sum())(P)


def changed(exported, added=(), **header):
    data = zipfile.ZipFile(io.BytesIO(exported.serialize()))
    members = {name: data.read(name) for name in data.namelist()}
    written = json.loads(members.pop("header.json"))
    written.update(header)
    members.update(added)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("header.json", json.dumps(written))
        for name, member in members.items():
            file.writestr(name, member)
    return out.getvalue()


def test_files(exported, tmp_path):
    data, path = exported.serialize(), tmp_path / "model"
    with pytest.raises(FileNotFoundError):
        Exported.load(path)
    newer = changed(exported, version=archive.VERSION + 1, jedbatch="9.9")
    with pytest.raises(ValueError, match=r"version 4, written by jedbatch 9\.9"):
        Exported.deserialize(newer)
    for bad in (b"", data[:-9], data[:300] + b"x" + data[301:], b"x" * 99, newer[:50]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"cannot read '.*model'"):
            Exported.load(path)
    for wrong in ({"format": "other"}, {"types": 3}, {"targets": []}, {"parameters": [[0]]}):
        with pytest.raises(ValueError, match="cannot read the bytes"):
            Exported.deserialize(changed(exported, **wrong))
    with pytest.raises(TypeError, match="name of a file"):
        Exported.load(3)


def test_tables_of_another_version(exported):
    data = zipfile.ZipFile(io.BytesIO(exported.serialize()))
    targets = json.loads(data.read("header.json"))["targets"]
    targets[0]["variants"]["inference"]["tables"] = ["0" * 32]
    with pytest.raises(ValueError, match="makes in another way; export the model again"):
        Exported.deserialize(changed(exported, targets=targets))


def test_targets_of_another_version(exported):
    """Files of versions that knew less of targets, or more, can be read."""
    data = zipfile.ZipFile(io.BytesIO(exported.serialize()))
    targets = json.loads(data.read("header.json"))["targets"]
    text = json.dumps(targets)
    (work,) = {t["step_work"] for t in of_name("target", targets)}
    targets = json.loads(text.replace(f'"step_work": {json.dumps(work)}', '"of a later one": 3'))
    assert all("step_work" not in t for t in of_name("target", targets))
    there = Exported.deserialize(changed(exported, targets=targets))
    graphs = TOTAL.graph(P, TREES)
    assert_close(there(P, graphs), TOTAL(P, TREES), rtol=1e-6)


def test_executables_of_earlier_versions(exported):
    """Are left alone, whatever they are."""
    data = zipfile.ZipFile(io.BytesIO(exported.serialize()))
    (target,) = json.loads(data.read("header.json"))["targets"]
    target["machine"] = {"platform": "cpu", "jaxlib": "0.1"}
    target["variants"]["inference"]["executables"] = {"names": ["forward"], "calls_core": True}
    members = {"executables/0/inference/forward": b"machine code"}
    there = Exported.deserialize(changed(exported, members, targets=[target]))
    assert_close(there(P, TOTAL.graph(P, TREES)), TOTAL(P, TREES), rtol=1e-6)


def test_options_that_are_gone(exported, tmp_path):
    exported.save(tmp_path / "model")
    for call, who in (
        (lambda: TOTAL.export(P, TREES, compiled=True), "Batched.export"),
        (lambda: Exported.load(tmp_path / "model", compiled=True), "Exported.load"),
        (lambda: Exported.deserialize(exported.serialize(), compiled=True), "Exported.deserialize"),
    ):
        message = rf"`{who}` got compiled=True; expected no such.*`jax_compilation_cache_dir`"
        with pytest.raises(TypeError, match=message):
            call()


def of_name(name, written):
    """Returns all values of a name in nested JSON."""
    if isinstance(written, list):
        return [x for part in written for x in of_name(name, part)]
    if not isinstance(written, dict):
        return []
    return [
        x for key, part in written.items() for x in ([part] if key == name else of_name(name, part))
    ]


def test_64_bits(exported):
    with jax.enable_x64(True):
        wide = jedbatch.batch(lambda p, x: p * x).export(jnp.ones(2), [1.0, 2.0]).serialize()
        assert Exported.deserialize(wide).parameters[0].dtype == np.float64
    with pytest.raises(ValueError, match=r"float64, and 64 bits are off"):
        Exported.deserialize(wide)


def test_what_cannot_be_exported():
    lengths = [np.ones((n, 3), np.float32) for n in (2, 5)]
    ragged = jedbatch.batch(lambda p, x: jnp.tanh(x * p[None]), out_axes=None)
    with pytest.raises(ValueError, match="return arrays that differ in length"):
        ragged.export(jnp.ones(3), lengths)
    with pytest.raises(ValueError, match="return arrays that differ in length"):
        ragged.graph(jnp.ones(3), lengths)
    with pytest.raises(ValueError, match="platforms='gpu'"):
        TOTAL.export(P, TREES, platforms=["gpu"])
    with pytest.raises(ValueError, match="no platforms"):
        TOTAL.export(P, TREES, platforms=[])


def test_graphs_of_several_instances_are_stored(tmp_path):
    graph = TOTAL.graph(P, TREES)
    graph.save(tmp_path / "g.npz")
    again = Graph.load(tmp_path / "g.npz")
    for name in ("node_type", "operand_ptr", "operand", "outputs", "node_ptr", "output_ptr"):
        assert (getattr(graph, name) == getattr(again, name)).all()
    assert again.types == graph.types
    assert [t.identity for t in again.types] == [t.identity for t in graph.types]
    assert str(again) == str(graph)
