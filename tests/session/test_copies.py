"""Minibatches in which structures recur, against the same planned instance by instance."""

import functools

import jax
import numpy as np
import pytest
from cases.compiled_core import assert_equal, both, columns, compiled
from jax import lax

import jedbatch
from jedbatch._graph.graph import Graph
from jedbatch._graph.structures import Structures, counted, written_out
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.heuristics import FALLBACKS, depth
from jedbatch._schedule.policy import schedule, schedule_copies
from jedbatch._session.plans.copies import Copies
from jedbatch._session.plans.verify import verify
from jedbatch._support.caches import Budget
from jedbatch.models.workloads import WORKLOADS

POLICIES = {**FALLBACKS, "depth": depth, "none": None}


def random_graph(rng, num_nodes, num_types):
    """A graph whose nodes read up to three of the last ten before them."""
    makers = [
        rng.choice(np.arange(max(0, i - 10), i), min(i, rng.integers(4)), replace=False).tolist()
        for i in range(num_nodes)
    ]
    types = rng.integers(num_types, size=num_nodes).tolist()
    return Graph.from_dag(types, makers, names=[f"type {t}" for t in range(num_types)])


def batches_of(graph, batches):
    """The nodes of each batch, as sets."""
    return [(t, set(nodes.tolist())) for t, nodes in batches.batches]


def expanded(graph, copies, batches):
    """The batches of a graph of single copies, in terms of that of all copies."""
    first = np.cumsum([0, *np.repeat(np.diff(graph.node_ptr), copies)])
    begins = np.cumsum([0, *copies])
    found = []
    for t, nodes in batches.batches:
        own = set()
        for node in nodes.tolist():
            i = int(graph.node_instance[node])
            within = node - int(graph.node_ptr[i])
            own |= {int(first[k]) + within for k in range(begins[i], begins[i + 1])}
        found.append((t, own))
    return found


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("seed", range(6))
def test_counted_nodes_run_as_their_copies_do(monkeypatch, name, native, seed):
    """The frontier's numbers are sums over copies, so a policy sees the same."""
    monkeypatch.setenv("JEDBATCH_NATIVE", native)
    rng = np.random.default_rng(seed)
    parts = [random_graph(rng, int(rng.integers(5, 40)), 4) for _ in range(3)]
    copies = rng.integers(1, 6, len(parts))
    distinct = Graph.concatenate(parts)
    whole = Graph.concatenate([g for g, n in zip(parts, copies, strict=True) for _ in range(n)])
    policy = POLICIES[name]
    few = schedule_copies(counted(distinct, copies), policy, int(copies.sum()))
    few.check(distinct)
    many = schedule(whole, policy)
    assert batches_of(whole, many) == expanded(distinct, copies, few)


@pytest.mark.parametrize("seed", range(4))
def test_a_frontier_counts_copies(seed):
    """All that a policy can ask for, while random types run."""
    rng = np.random.default_rng(seed)
    parts = [random_graph(rng, 30, 3) for _ in range(3)]
    copies = rng.integers(1, 5, len(parts))
    whole = Graph.concatenate([g for g, n in zip(parts, copies, strict=True) for _ in range(n)])
    few, many = Frontier(counted(Graph.concatenate(parts), copies)), Frontier(whole)
    while ready := many.ready_types:
        assert few.ready_types == ready
        assert few.num_ready == many.num_ready
        assert few.num_left == many.num_left
        for t in ready:
            assert few.tallest(t) == many.tallest(t)
            assert few.shortens(t) == many.shortens(t)
            assert few.num_next(t) == many.num_next(t)
            assert few.mean_depth(t) == pytest.approx(many.mean_depth(t))
        t = int(rng.choice(ready))
        few.run(t), many.run(t)


def mixture(name, seed, size=24, shapes=5):
    """Instances of a workload, each several times, some with other numbers; and what runs them."""
    instances, params, score = model(name, shapes)
    rng = np.random.default_rng(seed)
    drawn = [instances[i] for i in rng.integers(len(instances), size=size)]
    return drawn, params, score, WORKLOADS[name].policy()


@functools.cache
def model(name, shapes):
    """A few instances of a workload, parameters, and a function of both."""
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=shapes)
    cells = workload.cells(hidden=4, **sizes)
    return instances, cells.init(jax.random.key(0)), workload.scorer(cells)


@functools.cache
def loop_over_mixture(name, seed):
    """Results of the instances of a mixture, those that are one object computed once."""
    instances, params, score, _ = mixture(name, seed)
    results = {id(x): score(params, x) for x in {id(x): x for x in instances}.values()}
    return [results[id(x)] for x in instances]


def planned_alone(monkeypatch, make):
    """Returns the result of a function with instances planned one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(Copies, "of", staticmethod(lambda *_: None))
        return make()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("treelstm", "inference and training"),
        ("lattice_lstm", "inference and training"),
        ("childsum", "inference and training"),
        ("lattice_lstm", "rows used again"),
        ("tagger", "rows used again"),
    ],
)
def test_plans_have_the_batches_and_lanes_of_all_instances(monkeypatch, name, how):
    reuse = how == "rows used again"
    instances, params, score, policy = mixture(name, 0)

    def plans():
        batched = jedbatch.batch(score, policy=policy, reuse=reuse)
        pieces = instances, instances[::-1], instances[:17]
        return batched, [
            batched.plan(params, few, gradient=gradient)
            for gradient in ([False] if reuse else [False, True])
            for few in pieces
        ]

    batched, found = plans()
    for own, other in zip(found, planned_alone(monkeypatch, plans)[1], strict=True):
        verify(own)
        own.schedule.check(own.graph)
        own.layout.check(own.graph)
        assert_equal(batches_of(own.graph, own.schedule), batches_of(other.graph, other.schedule))
        np.testing.assert_array_equal(own.layout.lanes, other.layout.lanes)
        np.testing.assert_array_equal(own.graph.operand, other.graph.operand)
        gathered, before = (x.host.lowered.read_bytes[0] for x in (own, other))
        assert gathered <= 1.01 * before
        np.testing.assert_array_equal(own.table, own.host.lowered.table)
    loop = loop_over_mixture(name, 0)
    for plan in found[::3]:
        for got, expected in zip(batched.apply(params, plan), loop, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_structures_are_scheduled_not_instances(monkeypatch):
    """Minibatches that fit a program are planned without the graph of all instances."""
    instances, params, score, _ = mixture("treelstm", 1, size=40)
    batched = jedbatch.batch(score)
    batched.plan(params, instances, gradient=False)
    selected = []
    select = Graph.select

    def counting(parts):
        selected.append(len(parts))
        return select(parts)

    monkeypatch.setattr(Graph, "select", staticmethod(counting))
    plan = batched.plan(params, instances[::-1], gradient=False)
    assert all(n <= 5 for n in selected)
    assert plan.graph.num_instances == 40
    assert selected[-1] == 40
    few = batched.plan(params, instances[7:], gradient=False)
    assert few.host.counted.lanes == few.host.placed.lanes
    assert few.host.counted.input_counts == few.host.placed.input_counts


def test_rounds_count_all_copies(monkeypatch):
    instances, params, score, _ = mixture("treelstm", 2)
    batched = jedbatch.batch(score)
    batched(params, instances)
    batched(params, instances[::-1])
    own = batched.last_rounds[0]
    other = jedbatch.batch(score)
    planned_alone(monkeypatch, lambda: other(params, instances[::-1]))
    expected = other.last_rounds[0]
    assert (own.nodes, own.batches, own.lanes) == (expected.nodes, expected.batches, expected.lanes)
    assert [x[1:] for x in own.ran] == [x[1:] for x in expected.ran]


@compiled
@pytest.mark.parametrize("name", ["treelstm", "lattice_gru", "treegru"])
def test_plans_are_equal_in_python(monkeypatch, name):
    instances, params, score, policy = mixture(name, 3)

    def plans():
        batched = jedbatch.batch(score, policy=policy)
        pieces = instances, instances[::-1], instances[2:]
        return [x for few in pieces for x in columns(batched.plan(params, few, gradient=False))]

    assert_equal(*both(monkeypatch, plans))


def alone(record):
    """The graph of an instance, apart from the values of its inputs."""
    graph = Graph.select([(record.whole, record.index)])
    arrays = graph.node_type, graph.operand_ptr, graph.operand, graph.outputs
    return [x.tolist() for x in arrays], [(x.type, len(x)) for x in graph.inputs]


@pytest.mark.parametrize("native", ["0", "1"])
def test_instances_have_one_structure_if_their_graphs_do(monkeypatch, native):
    """Recorded alone or together."""
    monkeypatch.setenv("JEDBATCH_NATIVE", native)
    instances, params, score, _ = mixture("treelstm", 4, size=30, shapes=9)
    batched = jedbatch.batch(score)
    session = batched._core.session((params,))[0]
    records = [batched._core.record(session, [(x,)]).records[0] for x in instances[:10]]
    records += batched._core.record(session, [(x,) for x in instances]).records
    own = Structures(100, Budget())
    for a, b in zip(records[:5], own.of(records[:1]) + own.of(records[1:5]), strict=True):
        assert alone(a) == alone(b.record)
    found = own.of(records)
    for a, of_a in zip(records, found, strict=True):
        for b, of_b in zip(records, found, strict=True):
            assert (of_a is of_b) == (alone(a) == alone(b))


def test_structures_are_looked_for_where_there_are_few():
    instances, params, score, _ = mixture("treelstm", 5, size=20, shapes=20)
    batched = jedbatch.batch(score)
    session = batched._core.session((params,))[0]
    records = batched._core.record(session, [(x,) for x in instances]).records
    own = Structures(100, Budget())
    each = dict(zip(records, own.of(records), strict=True))
    assert len(set(each.values())) == len(each) > 5
    few = dict(zip(records, own.of(records[:4]), strict=False))
    assert all(x.record is not None and x is not each[record] for record, x in few.items())
    assert own.of(records) == [(each | few)[record] for record in records]
    assert all(x.record is not None for x in own.of(records[4:8] * 4))


@compiled
@pytest.mark.parametrize("seed", range(4))
def test_structures_are_written_alike(monkeypatch, seed):
    """By the compiled core, and in Python."""
    rng = np.random.default_rng(seed)
    graph = Graph.concatenate([random_graph(rng, int(rng.integers(1, 9)), 2) for _ in range(40)])
    ptr = np.arange(0, 123, 3)
    words = rng.integers(2, size=120).astype(np.int32)
    for which in (np.arange(40), rng.permutation(40)[:7]):
        found = both(monkeypatch, lambda which=which: written_out(graph, which, ptr, words, 40))
        assert found[0] == found[1]
        few = both(monkeypatch, lambda which=which: written_out(graph, which, ptr, words, 2))
        assert few == (None, None)


@pytest.mark.parametrize("native", ["0", "1"])
def test_instances_with_results_of_other_structures_have_another_one(monkeypatch, native):
    monkeypatch.setenv("JEDBATCH_NATIVE", native)
    double = jedbatch.cell(lambda x: x + x)
    batched = jedbatch.batch(lambda x: {x[0]: double(x[1])}, in_axes=0, out_axes=None)
    instances = [(name, float(n)) for n, name in enumerate("ababbaab")]
    records = batched._core.record(batched._core.session(())[0], [(x,) for x in instances]).records
    found = Structures(100, Budget()).of(records)
    for (name, _), own in zip(instances, found, strict=True):
        for (other_name, _), other in zip(instances, found, strict=True):
            assert (own is other) == (name == other_name)
    results = batched(instances)
    assert [{k: float(x) for k, x in one.items()} for one in results] == [
        {name: 2 * n} for name, n in instances
    ]


def test_results_come_back_in_the_order_of_instances():
    @jedbatch.cell
    def add(a, b):
        return a + b

    def total(tree):
        return tree if isinstance(tree, int) else add(total(tree[0]), total(tree[1]))

    rng = np.random.default_rng(0)
    forms = [lambda a, b, c: (a, (b, c)), lambda a, b, c: ((a, b), c), lambda a, b, c: a]

    def plain(tree):
        return tree if isinstance(tree, int) else plain(tree[0]) + plain(tree[1])

    for out_axes in (0, None):
        batched = jedbatch.batch(total, in_axes=0, out_axes=out_axes)
        for _ in range(5):
            which = rng.integers(3, size=20)
            trees = [forms[k](*rng.integers(100, size=3).tolist()) for k in which]
            assert [int(x) for x in batched(trees)] == list(map(plain, trees))


def test_a_row_that_is_not_there_is_named():
    table = np.arange(6, dtype=np.float32)
    look_up = jedbatch.cell(lambda table, i: table[i])
    batched = jedbatch.batch(lambda table, i: look_up(table, i) + 1)
    batched(table, [1, 2, 3, 4])
    with pytest.raises(IndexError, match="instance 2 looks up row 7"):
        batched(table, [1, 2, 7, 4])


@pytest.mark.parametrize("copies", [1, 3, 12])
def test_lists_that_repeat_elements_are_told_from_shorter_ones(copies):
    """Where several lengths share a type, the graph of a list reads elements that do not exist."""
    leaf = jedbatch.cell(lambda table, i: table[i])
    add_all = jedbatch.cell(lambda table, xs: jax.numpy.tanh(sum(xs)))

    def total(table, instance):
        words, which = instance
        leaves = [leaf(table, word) for word in words]
        return add_all(table, [leaves[k] for k in which])

    table = jax.random.normal(jax.random.key(0), (10, 4))
    batched = jedbatch.batch(total)
    batched(table, [((1, 2, 3, 4, 5, 6, 7), tuple(range(n))) for n in range(1, 8)] * 3)
    for which in ((0, 1), (0, 1, 0), (0, 1, 0, 0), (0, 1, 0), (0, 1, 0, 0, 0)):
        instances = [((1, 2), which)] * copies
        found = batched(table, instances)
        expected = [total(table, x) for x in instances]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("native", ["0", "1"])
def test_instances_may_compute_nothing(monkeypatch, native):
    """Loops over numbers run while they are recorded: all results are constants."""
    monkeypatch.setenv("JEDBATCH_NATIVE", native)

    def power(n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, 2 * c[1]), (0, 1.0))[1]

    batched = jedbatch.batch(power, in_axes=0, control_flow="lockstep")
    for start in (0, 0, 0, 2, 5):
        n = np.arange(start, start + 16, dtype=np.int32)
        np.testing.assert_array_equal(batched(n), 2.0**n)
