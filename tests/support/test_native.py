"""The compiled core against the Python that it stands for, on plans, schedules and paths."""

import copy
import dataclasses
import functools
import importlib
import types

import jax
import numpy as np
import pytest
from cases.compiled_core import assert_equal, both, columns, compiled

import jedbatch
from jedbatch._graph.analysis import sorted_by
from jedbatch._graph.paths import int64_of, longest_chains, longest_paths, ranges
from jedbatch._layout.node_order import ORDERS
from jedbatch._record.instances.key import (
    immutable,
    instance_key,
    keys_with_arrays,
    plain_keys,
)
from jedbatch._schedule.encodings import ENCODINGS, encode
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.heuristics import FALLBACKS
from jedbatch._support import native
from jedbatch.models.workloads import WORKLOADS


@compiled
@pytest.mark.parametrize(
    "name",  # trees, lists, matrices, lattices and sentences of spelled words
    ["treelstm2", "childsum", "mvrnn", "lattice_lstm", "tagger_chars", "lattice_gru by critical"],
)
def test_plans_are_equal(monkeypatch, name):
    """Those of one instance after the other are compared in `test_copies.py` for other models."""
    name, _, by_critical = name.partition(" by ")
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=6)
    cells = workload.cells(hidden=4, **sizes)
    params = jax.eval_shape(cells.init, jax.random.key(0))

    def plans():
        policy = jedbatch.policies.critical if by_critical else workload.policy()
        batched = jedbatch.batch(workload.scorer(cells), policy=policy)
        minibatches = instances[:3], instances[3:]
        return [x for few in minibatches for x in columns(batched.plan(params, few))]

    assert_equal(*both(monkeypatch, plans))


def random_graph(rng, num_nodes, num_types):
    """A graph whose nodes read up to three of the last twenty before them."""
    makers = [
        rng.choice(np.arange(max(0, i - 20), i), min(i, rng.integers(4)), replace=False).tolist()
        for i in range(num_nodes)
    ]
    return jedbatch.Graph.from_dag(rng.integers(num_types, size=num_nodes).tolist(), makers)


def machine(rng, graphs, encoding, fallback):
    """A machine that knows half of the frontiers that random decisions lead to."""
    table, met = {}, set()
    for graph in graphs:
        frontier, left = Frontier(graph), len(graph.node_type)
        numbers = list(range(len(graph.types)))
        while left:
            ready = frontier.ready_types
            run = int(rng.choice(ready))
            code = encode(encoding, frontier, ready, numbers)
            if len(ready) > 1 and code not in met and rng.random() < 0.5:
                table[code] = run
            met.add(code)
            left -= len(frontier.run(run))
    labels = max((g.labels for g in graphs), key=len)
    return FSM.of(encoding, labels, table, fallback=fallback)


@compiled
@pytest.mark.parametrize("heuristic", FALLBACKS)
def test_heuristics_schedule_equally(monkeypatch, heuristic):
    rng = np.random.default_rng(1)
    for num_nodes, num_types in ((1, 1), (40, 2), (300, 4), (300, 9), (700, 3)):
        graph = random_graph(rng, num_nodes, num_types)
        a, b = both(monkeypatch, lambda g=graph: jedbatch.schedule(g.bare(), FALLBACKS[heuristic]))
        a.check(graph)
        assert (a.policy, a.unseen) == (b.policy, b.unseen)
        assert_equal((a.batch_type, a.node_ptr, a.node), (b.batch_type, b.node_ptr, b.node))


@compiled
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_machines_schedule_equally(monkeypatch, encoding):
    rng = np.random.default_rng(2)
    for fallback in FALLBACKS:
        graphs = [random_graph(rng, 200, 4) for _ in range(3)]
        fsm = machine(rng, graphs, encoding, fallback)
        unseen = 0
        for graph in graphs:
            a, b = both(monkeypatch, lambda g=graph, p=fsm: jedbatch.schedule(g.bare(), p))
            a.check(graph)
            assert (a.policy, a.unseen) == (b.policy, b.unseen)
            assert_equal((a.batch_type, a.node_ptr, a.node), (b.batch_type, b.node_ptr, b.node))
            unseen += a.unseen
        assert unseen


@compiled
def test_paths_are_equal(monkeypatch):
    rng = np.random.default_rng(3)
    for num_nodes, num_kinds in ((0, 1), (1, 1), (50, 1), (400, 3), (400, 40)):
        maker, reader = random_graph(rng, num_nodes, 1).edges if num_nodes else np.zeros((2, 0))
        kind = rng.integers(num_kinds, size=num_nodes).astype(np.int32)
        edges = maker.astype(np.int32), reader.astype(np.int32)
        assert_equal(
            *both(
                monkeypatch,
                lambda n=num_nodes, k=kind, e=edges: (longest_paths(n, *e), longest_chains(k, *e)),
            )
        )


OF_GRAPHS = ("rank", "rank_alone", "chain", "height", "depth", "changes_type", "makes_chains")


def recorded_graph(name, few):
    """The graph of some instances, whose nodes may have two results."""
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=few)
    cells = workload.cells(hidden=2, **sizes)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    return jedbatch.batch(workload.scorer(cells)).plan(params, instances).graph


def looked_at(graph):
    """Returns the properties that a graph derives of itself from its columns alone."""
    new = dataclasses.replace(graph)
    arrays = [getattr(new, name) for name in OF_GRAPHS]
    pairs = *new.preds, *new.edges, *new.succs, *new.inside(new.present_types[:2])[2]
    counts = new.value_ptr, new.nodes_per_type, np.array(new.num_values)
    return *arrays, *pairs, *counts, new.components, new.cyclic_components


GRAPHS = {
    "one node": lambda: random_graph(np.random.default_rng(4), 1, 1),
    "two types": lambda: random_graph(np.random.default_rng(5), 300, 2),
    "gaps in the ids of types": lambda: jedbatch.Graph.from_dag([3, 3, 7], [[], [0], [1, 1, 0]]),
    "many types": lambda: random_graph(np.random.default_rng(6), 600, 150),
    "many types that read each other": lambda: random_graph(np.random.default_rng(6), 400, 20),
    "chains": lambda: jedbatch.Graph.from_dag([0] * 40, [[], *([i] for i in range(39))]),
    "trees": lambda: recorded_graph("treelstm", 6),
    "lattices": lambda: recorded_graph("lattice_lstm", 4),
    "sentences": lambda: recorded_graph("tagger", 4),
}


@functools.cache
def made(name):
    """One of the graphs; a test that looks at what a graph derives of itself copies it."""
    return GRAPHS[name]()


@compiled
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_looked_at_equally(monkeypatch, name):
    graph = made(name)
    *a, components, cyclic = looked_at(graph)
    monkeypatch.setenv(native.SWITCH, "0")
    *b, components_in_python, cyclic_in_python = looked_at(graph)
    assert_equal(a, b)
    assert (components, cyclic) == (components_in_python, cyclic_in_python)


@compiled
@pytest.mark.parametrize("known", [False, True])
def test_unions_are_equal(monkeypatch, known):
    """Whole graphs and single instances, some of them time and again."""
    graphs = [recorded_graph("treelstm", 5), recorded_graph("lattice_gru", 3)]
    rng = np.random.default_rng(7)
    for whole in graphs:
        parts = [(whole, int(i)) for i in rng.integers(whole.num_instances, size=9)]
        one = whole.split()[1]
        parts = [*parts[:4], (one, 0), *parts[4:], (one, 0)]

        def union(parts=parts, whole=whole, one=one):
            fresh = {id(g): dataclasses.replace(g) for g in (whole, one)}
            for graph in fresh.values() if known else ():
                _ = graph.rank, graph.chain, graph.height
            joined = jedbatch.Graph.select([(fresh[id(g)], i) for g, i in parts])
            joined.check()
            assert ("rank" in vars(joined)) == known
            pointers = joined.node_ptr, joined.input_ptr, joined.output_ptr
            own = joined.node_type, joined.operand_ptr, joined.operand, joined.outputs
            return *pointers, *own, joined.rank, joined.chain, joined.height

        a, b = both(monkeypatch, union)
        assert_equal(a, b)
        from_columns = dataclasses.replace(jedbatch.Graph.select(parts))
        assert_equal(a[-3:], (from_columns.rank, from_columns.chain, from_columns.height))


@compiled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["two types", "chains", "trees", "lattices", "sentences"])
def test_layouts_are_equal(monkeypatch, name, order):
    def lanes():
        graph = dataclasses.replace(made(name))
        schedule = jedbatch.schedule(graph, jedbatch.policies.agenda)
        found = jedbatch.layout(graph, schedule, order=order)
        found.check(graph)
        rows = found.space, found.block, found.rows, *found.values
        return found.node, found.lane, found.lane_node, found.lane_ptr, found.start, *rows

    assert_equal(*both(monkeypatch, lanes))


def test_ranges_and_places_of_keys():
    starts, counts = np.array([5, 0, 7, 2]), np.array([2, 3, 0, 1])
    assert ranges(starts, counts).tolist() == [5, 6, 0, 1, 2, 2]
    keys = np.random.default_rng(8).integers(6, size=50).astype(np.int32)
    ptr, places = sorted_by(keys, 7)
    assert places.tolist() == sorted(range(50), key=lambda i: keys[i])
    assert ptr.tolist() == [int((keys < k).sum()) for k in range(8)]


def nested(depth):
    tree = (1, 2)
    for _ in range(depth):
        tree = (tree, 3)
    return tree


class Number(int):
    pass


SHARED = (1, 2)
CIRCLE = [1]
CIRCLE.append(CIRCLE)

INSTANCES = {
    "a number": 3,
    "an array": np.ones(2),
    "a tree": ((1, 2.0), [True, None, {"a": b"x", 2: "y", None: 1j}], ()),
    "a deep tree": nested(5_000),
    "a wide tree": [(i, i + 1) for i in range(5_000)],
    "a part that is met twice": (SHARED, [SHARED]),
    "an empty tuple that is met twice": ((), ((),)),
    "a circle": CIRCLE,
    "an array inside": (1, [np.ones(2)]),
    "a key that is a tuple": {(1, 2): 3},
    "a NumPy scalar": (1, np.int32(2)),
    "an integer of a class of its own": (1, Number(2)),
    "a set": (1, {2}),
}


@compiled
def test_keys_of_plain_trees_are_equal(monkeypatch):
    """Of all at once, in whichever order: what one leaves behind is not met in the next."""
    instances = [*INSTANCES.values(), *reversed(INSTANCES.values()), ((1, 2), (3, (4, "x")))]
    a, b = both(monkeypatch, lambda: plain_keys(instances))
    assert a == b
    keys, are_constant = a
    for key, is_constant, instance in zip(keys, are_constant, instances, strict=True):
        assert key is None or key == instance_key(instance)[0]
        assert is_constant == (key is not None and immutable(instance))
    assert keys[-1] is not None
    assert sum(key is None for key in keys) == 2 * 11


EDGES = [0, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**70, 0.0, -0.0, 1.5, np.inf, -np.nan]
EDGES += ["", "word", "字", "a\0b", "\ud800", None, True, False, b"x", 1j, {"a": 1}, (), []]


def random_tree(rng, depth):
    if depth == 0 or rng.integers(4) == 0:
        return EDGES[int(rng.integers(len(EDGES)))]
    parts = [random_tree(rng, depth - 1) for _ in range(int(rng.integers(4)))]
    return parts if rng.integers(3) == 0 else (*parts, 1)


@compiled
@pytest.mark.parametrize("seed", range(4))
def test_keys_of_random_trees_are_equal(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    instances = [copy.deepcopy(random_tree(rng, 5)) for _ in range(200)]
    instances += [nested(depth) for depth in (250, 254, 255, 256, 257, 258, 1990, 1999, 2000, 2001)]
    a, b = both(monkeypatch, lambda: plain_keys(instances))
    assert a == b
    assert sum(key is not None for key in a[0]) > 100


ARRAYS = [
    np.ones((2, 3), np.float32),
    np.zeros(()),
    np.ones(4, np.int8),
    np.zeros((0, 2), jax.numpy.bfloat16),
]


@compiled
@pytest.mark.parametrize("seed", range(2))
def test_keys_of_trees_with_arrays_are_equal(monkeypatch, seed):
    """Two are equal where what `instance_key` writes is, but for what it knows of dtypes."""
    rng = np.random.default_rng(seed)
    dtypes = {x.dtype: i for i, x in enumerate(ARRAYS[1:])}
    instances = [*INSTANCES.values(), *(nested(depth) for depth in (255, 256, 257))]
    for _ in range(200):
        tree = copy.deepcopy(random_tree(rng, 2))
        array = ARRAYS[int(rng.integers(len(ARRAYS)))].copy()
        instances.append([(array, tree), {"x": [array], 2: tree}, array][int(rng.integers(3))])
    instances += [(ARRAYS[1], ARRAYS[1]), {(1, 2): ARRAYS[1]}, (np.ones(2, ">f8"), 1)]
    a, b = both(monkeypatch, lambda: [keys_with_arrays([x], dtypes) for x in instances])
    keys = {}
    for found, other, instance in zip(a, b, instances, strict=True):
        assert (found is None) == (other is None)
        if found is not None:
            assert found[0] == other[0]
            assert list(map(id, found[1][0])) == list(map(id, other[1][0]))
            with jax.enable_x64(True):
                expected, arrays = instance_key(instance)
            assert list(map(id, found[1][0])) == list(map(id, arrays))
            assert keys.setdefault(found[0][0], expected) == expected
    assert 100 < sum(x is not None for x in a) < len(a) - 50
    assert keys_with_arrays(instances, dtypes) is None


@pytest.mark.parametrize("native", ["1", "0"])
def test_keys_are_written_where_little_recursion_is_left(monkeypatch, native):
    monkeypatch.setenv("JEDBATCH_NATIVE", native)
    instance, dtypes = (nested(250), ARRAYS[1]), {ARRAYS[1].dtype: 0}

    def within(frames):
        return within(frames - 1) if frames else keys_with_arrays([instance], dtypes)

    assert within(700) == keys_with_arrays([instance], dtypes)


def test_a_part_that_others_hold_is_met_once():
    part = [1, (2,)]
    assert plain_keys([(part, 3), (part, part)])[0][1] is None
    assert plain_keys([(part, 3), ([1, (2,)], [1, (2,)])])[0] != [None, None]


@compiled
def test_numbers_are_copied(monkeypatch):
    for numbers in ([], [0, -1, 2**40, -(2**63)]):
        for start in range(len(numbers) + 1):
            assert_equal(*both(monkeypatch, lambda n=numbers, i=start: [int64_of(n, i)]))
    with pytest.raises(OverflowError):
        int64_of([2**63])
    with pytest.raises(TypeError):
        int64_of(["1"])


@compiled
def test_arrays_that_do_not_fit_are_refused():
    core = native.core()
    i32, i64 = (lambda *x: np.array(x, np.int32)), (lambda *x: np.array(x, np.int64))
    for wrong in ((i32(0), i32(3), i32(0, 0)), (i32(-1), i32(0), i32(0)), (i32(0), i32(), i32(0))):
        with pytest.raises(ValueError, match="out of range"):
            core.longest_paths(wrong)
    with pytest.raises(ValueError, match="not one kind"):
        core.longest_chains((i32(0), i32(1), i32(0, 0), i32(0)))
    with pytest.raises(TypeError, match="items of 8 bytes; expected 4"):
        core.longest_paths((i64(0), i32(1), i32(0, 0)))
    with pytest.raises(TypeError, match="tuple of 3 arrays"):
        core.longest_paths((i32(0), i32(1)))
    frozen = i32(0, 0)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only|not writable"):
        core.longest_paths((i32(0), i32(1), frozen))
    with pytest.raises(ValueError, match="longer than the list"):
        core.copy_ints([1], (i64(0, 0),))

    u8 = lambda *x: np.array(x, np.uint8)  # noqa: E731
    bounds = i64(0, 2, 0, 1, 0, 0, 0, 1, 0, 2, 0)
    columns = i32(0, 0), i64(0, 0, 1), i32(0), i32(1)
    new = [np.empty_like(x) for x in columns]
    core.join([columns], (bounds, *new))
    assert_equal(new, columns)

    def copies(first=0, lane=0, padded=3, operand=0, offset=0):
        nodes = i32(0), i64(0, 1), i32(0), i64(0), i64(padded), i64(lane), i64(2), i64(first)
        form = i64(0, 0, 1, offset, 4)
        inputs = i32(0), i64(0), i64(5, 7)
        table = i32(9, 9, 9, 9)
        return 1, (*nodes, i64(0, 1), i32(operand), i64(3), *inputs, form, i32(0), table)

    for operand, rows in ((0, [3, 4, 4, 3]), (-1, [5, 7, 7, 5])):
        given = copies(operand=operand)
        core.write_copies(*given)
        assert given[1][-1].tolist() == rows
    wrong_calls = {
        "bounds beyond a graph": lambda: core.join([columns], (bounds + i64(1, 1, *[0] * 9), *new)),
        "a column that is too short": lambda: core.join([columns], (bounds, i32(0), *new[1:])),
        "bounds that fall": lambda: core.join([columns], (i64(2, 0, *bounds[2:]), *new)),
        "too many columns": lambda: core.join([columns], (bounds, *new, *[i32(0, 0)] * 5)),
        "a node": lambda: core.sort_batches((i32(0, 2), i64(0, 2), u8(1), i32(0, 0))),
        "keys far apart": lambda: core.sort_batches((i32(0, 1), i64(0, 2), u8(1), i32(0, 1 << 30))),
        "a copy": lambda: core.write_copies(*copies(first=1)),
        "a lane of a copy": lambda: core.write_copies(*copies(lane=1)),
        "copies in too few lanes": lambda: core.write_copies(*copies(padded=1)),
        "an operand of copies": lambda: core.write_copies(*copies(operand=1)),
        "an input of copies": lambda: core.write_copies(*copies(operand=-2)),
        "a table for copies": lambda: core.write_copies(*copies(offset=1)),
    }
    for call in wrong_calls.values():
        with pytest.raises(ValueError, match="do not fit"):
            call()

    def schedule(ptr=(0, 1, 1), succ=(1,), types=(0, 0), when=(0, 0), num_types=1):
        depths = i32(0, 1), np.array([1.0])
        arrays = i64(*ptr), i32(*succ), i32(*types), i32(*when)
        return core.schedule(num_types, 0, 0, None, (*arrays, *[None] * 2, *depths, *[None] * 6))

    assert schedule() == ([0, 0], 0)
    with pytest.raises(ValueError, match="out of range"):
        schedule(succ=(2,))
    with pytest.raises(ValueError, match="out of range"):
        schedule(types=(0, 1))
    with pytest.raises(ValueError, match="out of range"):
        schedule(ptr=(0, 2, 1))
    with pytest.raises(ValueError, match="wait for each other"):
        schedule(ptr=(0, 1, 2), succ=(1, 0))
    for wrong in ({"when": (0,)}, {"ptr": (0, 1)}, {"num_types": 0}):
        with pytest.raises(ValueError, match="do not fit"):
            schedule(**wrong)


@pytest.fixture
def not_loaded(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


def importing(monkeypatch, error):
    load = importlib.import_module

    def import_module(name):
        if name == native.MODULE:
            raise error
        return load(name)

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_without_a_compiler(monkeypatch, not_loaded):
    importing(monkeypatch, ModuleNotFoundError("No module named 'native_core'"))
    assert native.core() is None
    assert "a compiler of C" in jedbatch.info()
    plan = jedbatch.batch(lambda w, x: w * x).plan(2.0, [1.0, 2.0])
    assert "planned in Python, slower: the core is not built" in str(plan)


def test_a_broken_core_is_reported_once(monkeypatch, not_loaded):
    importing(monkeypatch, ImportError("undefined symbol: schedule"))
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded \(undefined symbol: schedule\)"):
        assert native.core() is None
    assert native.core() is None
    assert "undefined symbol" in native.described()


@compiled
def test_a_core_of_other_sources_is_not_used(monkeypatch, not_loaded):
    before = native.REVISION
    monkeypatch.setattr(native, "REVISION", before + 1)
    with pytest.warns(RuntimeWarning, match=f"built from other sources, revision {before}"):
        assert native.core() is None


def test_a_core_without_a_revision_is_not_used(monkeypatch, not_loaded):
    monkeypatch.setattr(importlib, "import_module", types.ModuleType)
    with pytest.warns(RuntimeWarning, match="built from other sources, revision 0"):
        assert native.core() is None


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.core() is None
    assert jedbatch.info().endswith(f"planning  Python, as {native.SWITCH}=0 says")
    assert "planned in Python, as" in str(jedbatch.batch(lambda w, x: w * x).plan(2.0, [1.0]))
