"""Graphs as data: built from arrays, merged, checked, stored, computed."""

import copy
import dataclasses
import itertools
import json
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, mostly_slow, random_dag

import jedbatch
from jedbatch import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import distinct, pointers, ranges
from jedbatch._graph.prune import without_unread
from jedbatch._graph.types import NodeType, ValueType


def ancestors(preds):
    """The nodes before each node, by brute force."""
    before = []
    for reads in preds:
        before.append(set(reads).union(*(before[p] for p in reads)))
    return before


@pytest.mark.parametrize("seed", range(20))
def test_rank_counts_nodes_of_a_kind_on_a_path(seed):
    rng = np.random.default_rng(seed)
    types, preds = random_dag(rng, 14, 3)
    graph = Graph.from_dag(types, preds)
    before = ancestors(preds)
    rank = []
    for n, t in enumerate(types):
        rank.append(max((rank[p] + 1 for p in before[n] if types[p] == t), default=0))
    assert graph.rank.tolist() == rank


@pytest.mark.parametrize("seed", range(10))
def test_chains_turns_and_components_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    types, preds = random_dag(rng, 16, 4)
    graph = Graph.from_dag(types, preds)
    before = ancestors(preds)
    count = range(len(types))
    after = [{n for n in count if m in before[n]} for m in count]
    chain, height = [0] * len(types), [0] * len(types)
    for m in reversed(count):
        chain[m] = 1 + max((chain[n] for n in after[m] if types[n] == types[m]), default=0)
        height[m] = 1 + max((height[n] for n in count if m in preds[n]), default=-1)
    assert graph.chain.tolist() == chain
    assert graph.height.tolist() == height
    turns = [
        any(m in preds[n] and height[m] == height[n] + 1 and types[m] != types[n] for n in count)
        for m in count
    ]
    assert graph.changes_type.tolist() == turns
    leads = {(types[m], types[n]) for m in count for n in after[m]}
    for _ in types:
        leads |= {(a, c) for a, b in leads for x, c in leads if b == x}
    groups = {frozenset([t, *(u for u in types if {(t, u), (u, t)} <= leads)]) for t in types}
    assert {frozenset(types_of) for types_of in graph.components} == groups
    place = {t: i for i, types_of in enumerate(graph.components) for t in types_of}
    assert all(place[a] <= place[b] for a, b in leads)
    cyclic = {g for g in groups if len(g) > 1 or {(t, t) for t in g} <= leads}
    assert {frozenset(types_of) for types_of in graph.cyclic_components} == cyclic
    ranks = zip(graph.rank.tolist(), types, strict=True)
    alone = [rank if len(graph.components[place[t]]) == 1 else 0 for rank, t in ranks]
    assert dataclasses.replace(graph).rank_alone.tolist() == alone


@pytest.mark.parametrize("seed", range(5))
def test_instances_selected_are_moved(seed):
    """The union of instances, some of them twice, against their columns in a Python loop."""
    rng = np.random.default_rng(seed)
    graphs = []
    for _ in range(3):
        types, preds = random_dag(rng, 7, 3)
        reads = [[*r, -1 - int(rng.integers(2))] for r in preds]
        graphs.append(Graph.from_dag(types, reads, names=["a", "b", "c"], inputs=[np.arange(2.0)]))
    whole = Graph.concatenate(graphs)
    parts = [(whole, int(i)) for i in rng.integers(3, size=5)] + [(graphs[0], 0), (whole, 1)]
    union = Graph.select(parts)
    union.check()
    node_type, operands, outputs, nodes, inputs = [], [], [], 0, 0
    for g, i in parts:
        one = graphs[i] if g is whole else g
        move = lambda x, up=nodes, down=inputs: x + up if x >= 0 else x - down  # noqa: E731
        node_type += one.node_type.tolist()
        split = np.split(one.operand, one.operand_ptr[1:-1])
        operands += [list(map(move, r.tolist())) for r in split]
        outputs += list(map(move, one.outputs.tolist()))
        nodes, inputs = nodes + len(one.node_type), inputs + one.num_inputs
    assert union.node_type.tolist() == node_type
    assert [r.tolist() for r in np.split(union.operand, union.operand_ptr[1:-1])] == operands
    assert union.outputs.tolist() == outputs
    assert union.num_inputs == inputs
    assert np.diff(union.node_ptr).tolist() == [len(g.split()[i].node_type) for g, i in parts]


@pytest.mark.parametrize("seed", range(5))
def test_edges_and_their_inverse(seed):
    types, preds = random_dag(np.random.default_rng(seed), 14, 3)
    graph = Graph.from_dag(types, preds)
    maker, reader = graph.edges
    edges = {(p, n) for n, reads in enumerate(preds) for p in reads}
    assert set(zip(maker.tolist(), reader.tolist(), strict=True)) == edges
    ptr, index = graph.succs
    assert {(n, r) for n in range(14) for r in index[ptr[n] : ptr[n + 1]].tolist()} == edges


def test_lists_and_csr_give_the_same_graph():
    lists = Graph.from_dag([0, 5, 0], [[], [0, 0], [1, 0]])
    csr = Graph.from_dag(np.array([0, 5, 0]), (np.array([0, 0, 2, 4]), np.array([0, 0, 1, 0])))
    for name in ("node_type", "operand_ptr", "operand", "outputs"):
        np.testing.assert_array_equal(getattr(lists, name), getattr(csr, name))
    assert lists.outputs.tolist() == [2]


def test_concatenate_and_split_are_inverse():
    rng = np.random.default_rng(0)
    names = ["a", "b", "c"]
    graphs = [
        Graph.from_dag(
            *random_dag(rng, n, 3), names=names, inputs=[rng.normal(size=(2, 3))], outputs=[n - 1]
        )
        for n in (1, 4, 7)
    ]
    whole = Graph.concatenate(graphs)
    whole.check()
    assert whole.num_instances == 3
    assert whole.node_ptr.tolist() == [0, 1, 5, 12]
    for part, graph in zip(whole.split(), graphs, strict=True):
        for name in ("node_type", "operand_ptr", "operand", "outputs"):
            np.testing.assert_array_equal(getattr(part, name), getattr(graph, name))
        np.testing.assert_array_equal(part.inputs[0].rows, graph.inputs[0].rows)
    back = Graph.concatenate(whole.split())
    np.testing.assert_array_equal(back.operand, whole.operand)


def test_instances_in_any_order_and_twice():
    one = Graph.from_dag([0, 1], [[-1], [0, -2]], inputs=[np.arange(2.0)])
    two = Graph.from_dag([1, 0], [[-1, -1], [0]], inputs=[np.arange(5.0, 6.0)])
    whole = Graph.concatenate([one, two])
    picked = Graph.select([(whole, 1), (whole, 0), (whole, 1)])
    picked.check()
    values = np.concatenate([chunk.rows for chunk in picked.inputs])
    assert values.tolist() == [5, 0, 1, 5]
    assert picked.operand.tolist() == [-1, -1, 0, -2, 2, -3, -4, -4, 4]


ONE = Graph.from_dag([0], [[]])
BAD = {
    "does not come before": lambda: Graph.from_dag([0, 0], [[1], []]),
    "names input 3": lambda: Graph.from_dag([0], [[-4]], inputs=[np.zeros(2)]),
    "give one list of operands per node": lambda: Graph.from_dag([0, 0], [[]]),
    "give a name for every id": lambda: Graph.from_dag([0, 2], [[], []], names=["a", "b"]),
    "names result 7": lambda: Graph.from_dag([0], [[]], outputs=[7]),
    "id that is not in": lambda: Graph.from_dag([-1], [[]]),
    "4294967296 in `preds`": lambda: Graph.from_dag([0, 0], [[], [2**32]]),
    "-4294967297 in `preds`": lambda: Graph.from_dag([0], [[-(2**32) - 1]]),
    "1000000000000.* in `preds`": lambda: Graph.from_dag([0], [[10**40]]),
    "4294967296 in `node_type`": lambda: Graph.from_dag(np.array([2**32]), [[]]),
    "4294967296 in `outputs`": lambda: Graph.from_dag([0], [[]], outputs=np.array([2**32])),
    "Number types from 0": lambda: Graph.from_dag([2**31 - 1], [[]]),
    "must start at 0": lambda: Graph.from_dag([0, 0], (np.array([2, 2, 3]), np.array([-1, -1, 0]))),
    "decreases": lambda: Graph.from_dag([0, 0], (np.array([0, 1, 0]), np.array([-1]))),
    "must end at E": lambda: Graph.from_dag([0], (np.array([0, 1]), np.array([0, 0]))),
    "type 0 is 'cosine' and 'sine'": lambda: Graph.concatenate(
        [Graph.from_dag([0, 1], [[], []], names=["sine", "b"]), named("cosine")]
    ),
    "no graphs; expected at least one": lambda: Graph.concatenate([]),
}
WRONG_TYPES = {
    "`preds` of dtype float64": lambda: Graph.from_dag([0, 0], [[], [0.9]]),
    "`preds` of dtype <U1": lambda: Graph.from_dag([0, 0], [[], ["0"]]),
    "`preds` of dtype bool": lambda: Graph.from_dag([0, 0], [[], [False]]),
    "'0' in `preds`; expected lists": lambda: Graph.from_dag([0, 0], [[], "0"]),
    "0 in `preds`; expected lists": lambda: Graph.from_dag([0], [0]),
    "preds=None; expected a list of lists": lambda: Graph.from_dag([0], None),
    "for `preds`": lambda: Graph.from_dag([0, 0], [[], [[0]]]),
    "`node_type` of dtype float64": lambda: Graph.from_dag([0.7], [[]]),
    "`node_type` with 0 axes": lambda: Graph.from_dag(3, [[]]),
    "`outputs` of dtype float64": lambda: Graph.from_dag([0], [[]], outputs=[0.5]),
    "names='ab'; expected a list of strings": lambda: Graph.from_dag([0], [[]], names="ab"),
    "expected a list of strings": lambda: Graph.from_dag([0], [[]], names=[1]),
    "inputs .* of dtype object": lambda: Graph.from_dag([0], [[]], inputs=[np.array([{}, 1])]),
    "of dtype float64 with 0 axes": lambda: Graph.from_dag([0], [[]], inputs=np.ones(2)),
    "of dtype <U1": lambda: Graph.from_dag([0], [[]], inputs=[["a"]]),
    "expected a list of graphs": lambda: Graph.concatenate([ONE, 3]),
    "of type Graph; expected|got graphs=": lambda: Graph.concatenate(ONE),
}


def named(*names):
    return Graph.from_dag([0], [[]], names=names)


@pytest.mark.parametrize("match", BAD)
def test_what_is_no_graph(match):
    with pytest.raises(ValueError, match=match):
        BAD[match]()


@pytest.mark.parametrize("match", WRONG_TYPES)
def test_what_is_no_array_of_whole_numbers(match):
    with pytest.raises(TypeError, match=match):
        WRONG_TYPES[match]()


def test_check_knows_the_types():
    f32 = ValueType((), np.dtype(np.float32))
    node_type = NodeType("f", "op", (f32,), (), (f32,))
    inputs = (InputRows(f32, np.zeros(1, np.float32)),)
    ptr, operand = np.array([0, 2]), np.array([-1, -1])
    graph = Graph((node_type,), np.array([0]), ptr, operand, inputs)
    with pytest.raises(ValueError, match="2 operands and its type 1"):
        graph.check()


def test_save_and_load(tmp_path):
    rng = np.random.default_rng(1)
    types, preds = random_dag(rng, 20, 3)
    graph = Graph.from_dag(types, preds, names=["x", "y", "ü"], inputs=[rng.normal(size=(4, 2))])
    graph.save(tmp_path / "graph.npz")
    back = Graph.load(tmp_path / "graph.npz")
    assert [t.name for t in back.types] == ["x", "y", "ü"]
    for name in ("node_type", "operand_ptr", "operand", "outputs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(graph, name))
    np.testing.assert_array_equal(back.inputs[0].rows, graph.inputs[0].rows)


def test_load_rejects_other_files(tmp_path):
    path = tmp_path / "other.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"written by `Graph\.save`"):
        Graph.load(path)
    with pytest.raises(FileNotFoundError):
        Graph.load(tmp_path / "nowhere.npz")
    for what in (3, None, [path]):
        with pytest.raises(TypeError, match="expected the name of a file"):
            Graph.load(what)


def stored(path, header=None, **changes):
    """A file like that of a graph, but for some of its arrays."""
    arrays = {name: getattr(ONE, name) for name in ("node_type", "operand_ptr", "operand")}
    arrays |= {"outputs": ONE.outputs} | changes
    header = {"format": "jedbatch graph, version 1", "names": ["a"]} if header is None else header
    arrays |= {"header": np.array(json.dumps(header))}
    np.savez_compressed(path, **{name: x for name, x in arrays.items() if x is not None})
    return path


MALFORMED = {
    "its format is 'something else'": {"header": {"format": "something else"}},
    "its format is ": {"header": ["x" * 10**6]},
    "its names are None": {"header": {"format": "jedbatch graph, version 1"}},
    "expected a list of strings": {"header": {"format": "jedbatch graph, version 1", "names": [1]}},
    "nobody.npy": {"nobody": np.zeros(3)},
    "it holds .* expected header.npy": {"node_type": None},
    "input_0.npy and so on": {"input_1": np.zeros(3)},
    "`node_type` is of dtype object": {"node_type": np.array([{}], object)},
    "`node_type` of dtype float64": {"node_type": np.zeros(1)},
    "4294967296 in `outputs`": {"outputs": np.array([2**32])},
    "`node_type` with 2 axes": {"node_type": np.zeros((1, 1), int)},
    "names result 9": {"outputs": np.array([9])},
}


@pytest.mark.parametrize("match", MALFORMED)
def test_load_rejects_archives_of_something_else(match, tmp_path):
    with pytest.raises(ValueError, match=match) as caught:
        Graph.load(stored(tmp_path / "graph.npz", **MALFORMED[match]))
    assert "written by `Graph.save`" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_load_reads_no_more_than_it_may(tmp_path):
    zeros = stored(tmp_path / "graph.npz", input_0=np.zeros((1 << 20, 1), np.uint8))
    assert Graph.load(zeros).num_inputs == 1 << 20
    with pytest.raises(ValueError, match=r"pass `max_bytes=10\d{5}`"):
        Graph.load(zeros, max_bytes=1 << 20)
    with pytest.raises(TypeError, match="max_bytes='1'"):
        Graph.load(zeros, max_bytes="1")


def test_load_does_not_believe_the_headers_of_arrays(tmp_path):
    """An array that says it has a million million entries, and has two."""
    good = stored(tmp_path / "good.npz")
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "bad.npz", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"(2,), }" + 12 * b" ", b"(1000000000000,), }"))
    with pytest.raises(ValueError, match=r"has 16 bytes for shape \(10{12},\)"):
        Graph.load(tmp_path / "bad.npz")


def test_save_writes_no_pickle(tmp_path):
    rows = np.array([{}, 1], object)
    graph = Graph((NodeType("a"),), np.array([0]), np.array([0, 0]), np.zeros(0, np.int32))
    graph = dataclasses.replace(graph, inputs=(InputRows(ValueType((), rows.dtype), rows),))
    with pytest.raises(TypeError, match="inputs of dtype object"):
        graph.save(tmp_path / "graph.npz")
    for dtype in (jnp.bfloat16, jnp.float8_e5m2, jnp.int4):
        with pytest.raises(TypeError, match=f"inputs of dtype {np.dtype(dtype)}"):
            Graph.from_dag([0], [[-1]], inputs=[jnp.ones(2, dtype)]).save(tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_recorded_graphs_with_arrays_of_instances_are_not_stored(tmp_path):
    plan = jedbatch.batch(lambda p, x: p * x).plan(jnp.ones(2), [np.ones(2, np.float32)])
    with pytest.raises(ValueError, match="from_dag"):
        plan.graph.save(tmp_path / "graph.npz")


def test_graphs_of_plans_are_copied_and_say_what_to_pickle_instead():
    batched = jedbatch.batch(lambda p, x: jnp.sin(p * x), in_axes=(None, 0))
    given = jnp.ones(2), [np.ones(2, np.float32)] * 2
    plan = batched.plan(*given)
    copied = copy.deepcopy(plan.graph)
    assert copied.types == plan.graph.types
    assert copied.operand is not plan.graph.operand
    assert copy.deepcopy(plan.layout).explain() == plan.layout.explain()
    for value in (plan.graph, plan.layout):
        with pytest.raises(TypeError, match=r"pickle what `batched.graph"):
            pickle.dumps(value)
    assert str(pickle.loads(pickle.dumps(batched.graph(*given)))) == str(batched.graph(*given))


def test_printing():
    instances = list(np.ones((2, 2), np.float32))
    text = str(jedbatch.batch(lambda p, x: jnp.sin(p * x)).plan(jnp.ones(2), instances).graph)
    assert text.startswith("Graph of 2 instances: 4 nodes, 2 types, 4 operands, 2 inputs")
    assert "2 × sin(f32[2]) -> f32[2]" in text
    assert str(ValueType((3, 2), np.dtype("uint8"), True)) == "u8[3,2]~"


def test_helpers():
    assert pointers(np.array([2, 0, 1])).tolist() == [0, 2, 2, 3]
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert distinct(np.array([3, 1, 3, 2, 1])).tolist() == [1, 2, 3]


# --- graphs prepared without Python per node ---


@jedbatch.cell
def leaf(params, w):
    return {"h": params["E"][w], "n": w}


@jedbatch.cell
def node(params, a, b):
    return {"h": jnp.tanh(params["W"] @ a["h"] + b["h"]), "n": a["n"] + b["n"]}


@jedbatch.cell
def scale(params, a, x):
    return a["h"] * x


CELLS = {"leaf": leaf, "node": node, "scale": scale}
PARAMS = {
    "E": jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32),
    "W": jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32),
}


def prepared(rng, num_leaves):
    """A random tree of nodes over leaves, scaled at the end, as arrays."""
    types, preds, roots = [], [], []
    for i in range(num_leaves):
        types.append(0)
        preds.append([-1 - i])
        roots.append(i)
    while len(roots) > 1:
        a = roots.pop(int(rng.integers(len(roots))))
        b = roots.pop(int(rng.integers(len(roots))))
        roots.append(len(types))
        types.append(1)
        preds.append([a, b])
    types.append(2)
    preds.append([roots[0], -1 - num_leaves])
    words = rng.integers(0, 6, num_leaves).astype(np.int32)
    factor = rng.normal(size=(1, 3)).astype(np.float32)
    return Graph.from_dag(types, preds, names=list(CELLS), inputs=[words, factor])


def model(params, graph):
    return jedbatch.evaluate(graph, CELLS, params)[-1]


def test_prepared_graphs_compute_what_the_cells_do():
    rng = np.random.default_rng(2)
    check(model, PARAMS, [prepared(rng, n) for n in (1, 2, 5, 9)])


def test_prepared_graphs_may_be_part_of_an_instance():
    rng = np.random.default_rng(3)
    instances = [(prepared(rng, n), 0.5 * n) for n in (2, 3)]

    def fn(params, instance):
        graph, x = instance
        results = jedbatch.evaluate(graph, CELLS, params)
        return jnp.sin(results[-1]) * x + results[0]["h"]

    check(fn, PARAMS, instances)


def test_stored_graphs_compute_the_same(tmp_path):
    graph = prepared(np.random.default_rng(4), 5)
    graph.save(tmp_path / "graph.npz")
    batched = jedbatch.batch(model)
    back = Graph.load(tmp_path / "graph.npz")
    assert_close(batched(PARAMS, [back]), batched(PARAMS, [graph]), 0)


def test_recording_a_prepared_graph_traces_each_cell_once():
    calls = []

    @jedbatch.cell
    def counted(params, w):
        calls.append(1)
        return leaf(params, w)

    rng = np.random.default_rng(5)
    cells = {**CELLS, "leaf": counted}
    fn = lambda params, g: jedbatch.evaluate(g, cells, params)[-1]  # noqa: E731
    jedbatch.batch(fn).plan(PARAMS, [prepared(rng, 50)])
    assert len(calls) == 1


def chained(params, graph, x):
    """The sum of what cells compute with something that differs between instances, if x does."""
    cells = {
        "leaf": lambda w, x, i: params["E"][i] * x + w,
        "node": lambda w, x, a, b: jnp.tanh(a @ params["W"] + x * b),
        "scale": lambda w, x, h, by: h * by * x,
    }
    return jedbatch.evaluate(graph, cells, params["W"][0], x)[-1].sum()


WITH_MORE = {
    "a value of the instance": chained,
    "its gradient": lambda p, g, x: jax.grad(chained, 2)(p, g, x),
    "a gradient of weights": lambda p, g, x: jax.grad(chained)(p, g, 2.0)["W"] * x,
    "several at once": lambda p, g, x: jax.vmap(lambda x: chained(p, g, x))(x * jnp.arange(3.0)),
}


@pytest.mark.parametrize("name", mostly_slow(WITH_MORE, "several at once"))
def test_cells_of_prepared_graphs_that_read_more(name):
    fn, rng = WITH_MORE[name], np.random.default_rng(7)
    instances = [(prepared(rng, n), jnp.float32(x)) for n, x in ((2, 0.5), (4, 2.0))]
    check(lambda params, instance: fn(params, *instance), PARAMS, instances)


def test_evaluate_needs_a_cell_for_every_type():
    graph = prepared(np.random.default_rng(6), 2)
    with pytest.raises(ValueError, match="'scale'"):
        jedbatch.evaluate(graph, {"leaf": leaf, "node": node}, PARAMS)


@pytest.mark.parametrize("seed", range(5))
def test_nodes_that_are_not_read_are_left_out_of_every_instance(seed):
    rng = np.random.default_rng(seed)
    graphs = []
    for _ in range(4):
        node_type, preds = random_dag(rng, 12, 3)
        graph = Graph.from_dag(node_type, preds)
        outputs = rng.choice(12, size=2, replace=False).astype(np.int32)
        ends = np.array([0, len(outputs)])
        graphs.append(dataclasses.replace(graph, outputs=outputs, output_ptr=ends))
    pruned = without_unread(Graph.concatenate(graphs))
    pruned.check()
    for graph, own in zip(graphs, pruned.split(), strict=True):
        preds = [graph.operand[a:b].tolist() for a, b in itertools.pairwise(graph.operand_ptr)]
        before = ancestors(preds)
        kept = sorted(set(graph.outputs.tolist()).union(*(before[v] for v in graph.outputs)))
        place = {node: k for k, node in enumerate(kept)}
        assert own.node_type.tolist() == graph.node_type[kept].tolist()
        assert own.operand.tolist() == [place[p] for node in kept for p in preds[node]]
        assert own.outputs.tolist() == [place[v] for v in graph.outputs.tolist()]
