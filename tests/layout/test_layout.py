"""Layout: lanes, rows, slices and gathers, and what runs on them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.chains import HIDDEN, embed, encode, make_params, sentences, step
from cases.helpers import assert_close, check, loop, mostly_slow, number, random_dag
from cases.models import random_params

import jedbatch
from jedbatch._kernel.target import CPU
from jedbatch._layout.access import (
    BROADCAST,
    GATHER,
    SLICE,
    STRIDE,
    STRIDED,
    choose_reading,
    find_modes,
    usable,
)
from jedbatch._layout.bucketing import COARSE_BUCKETS, FINE_BUCKETS
from jedbatch._layout.layout import assign_lanes
from jedbatch._layout.live_ranges import last_reads
from jedbatch._layout.node_order import ORDERS
from jedbatch._program.placement import Placement
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree


@pytest.fixture
def params():
    return make_params()


def physical_reads(plan):
    """(kernel, width, live lanes, row indices and mode of every operand) of each chunk."""
    signature, lowered = plan.static.signature, plan.host.lowered
    chunks = lowered.placed.chunks
    for i, (kernel, modes) in enumerate(zip(lowered.placed.kernels, lowered.modes, strict=True)):
        table = signature.form.view(plan.table, "operands", signature.kernels.index(kernel))
        for c, mode in zip(np.flatnonzero(chunks.kernel == i), modes.T, strict=True):
            first, width = chunks.lane[c], chunks.width[c]
            yield kernel, width, chunks.live[c], table[:, first : first + width], mode


# --- orders -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", mostly_slow(sorted(ORDERS)))
def test_every_order_gives_the_values_and_gradients_of_the_loop(params, order):
    check(encode, params, sentences(1, 9), layout=order)


@pytest.mark.parametrize("order", mostly_slow(sorted(ORDERS), "reader"))
@pytest.mark.parametrize("reuse", mostly_slow([True, False], True))
def test_every_order_gives_the_values_of_the_loop_on_trees(order, reuse):
    cells = tree.plain_cells(500, 5, HIDDEN)
    params = random_params(cells)
    trees = synthetic_treebank(6, seed=2)
    fn = tree.scorer(cells)
    expected = loop(fn, params, trees)
    batched = jedbatch.batch(fn, layout=order, reuse=reuse)
    assert_close(batched(params, trees), expected, 1e-5)
    plan = batched.plan(params, trees, gradient=False)
    plan.layout.check(plan.graph)
    assert_close(batched.apply(params, plan), expected, 1e-5)


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("seed", range(8))
def test_layouts_of_random_graphs_are_valid(order, seed):
    rng = np.random.default_rng(seed)
    graph = jedbatch.Graph.from_dag(*random_dag(rng, int(rng.integers(1, 60)), 4))
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    for reuse in (True, False):
        layout = jedbatch.layout(graph, batches, order=order, reuse=reuse)
        layout.check(graph)
        for nodes, (_, expected) in zip(
            np.split(layout.node, batches.node_ptr[1:-1]), batches.batches, strict=True
        ):
            assert sorted(nodes) == sorted(expected)
        again = jedbatch.layout(graph, batches, order=order, reuse=reuse)
        assert (again.node == layout.node).all()
        assert (again.block == layout.block).all()


def test_live_values_never_share_a_row():
    """Judged from the values alone, one by one."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        graph = jedbatch.Graph.from_dag(*random_dag(rng, 40, 3))
        batches = jedbatch.schedule(graph, jedbatch.policies.depth)
        layout = jedbatch.layout(graph, batches)
        space, row = layout.values
        batch, last = batches.batch[graph.value_node], last_reads(graph, batches)
        for v in range(graph.num_values):
            for w in range(v):
                apart = last[v] < batch[w] or last[w] < batch[v]
                assert apart or (space[v], row[v]) != (space[w], row[w])


def test_last_reads_are_those_of_the_readers():
    rng = np.random.default_rng(6)
    graph = jedbatch.Graph.from_dag(*random_dag(rng, 50, 3))
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    found = last_reads(graph, batches)
    for v in range(graph.num_values):
        readers = [
            n
            for n in range(len(graph.node_type))
            if v in graph.operand[graph.operand_ptr[n] : graph.operand_ptr[n + 1]]
        ]
        expected = max([batches.batch[n] for n in readers] + [batches.batch[graph.value_node[v]]])
        assert found[v] == (len(batches) if v in graph.outputs else expected)


def test_the_wrong_layout_is_refused():
    graph = jedbatch.Graph.from_dag([0, 0, 1], [[], [], [0, 1]])
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    layout = jedbatch.layout(graph, batches)
    layout.block[1] = 0
    with pytest.raises(ValueError, match="overlap"):
        layout.check(graph)


def test_unknown_orders_are_named():
    with pytest.raises(ValueError, match=r"`batch` got layout='best'.*'append'"):
        jedbatch.batch(encode, layout="best")
    with pytest.raises(ValueError, match=r"`batch` got layout=.*names no order"):
        jedbatch.batch(encode, layout=["auto"])
    with pytest.raises(TypeError, match="`batch` got reuse='yes'; expected True or False"):
        jedbatch.batch(encode, reuse="yes")
    graph = jedbatch.Graph.from_dag([0], [[]])
    with pytest.raises(ValueError, match="`layout` got order='best'"):
        jedbatch.layout(graph, jedbatch.schedule(graph, jedbatch.policies.agenda), order="best")


# --- reading ----------------------------------------------------------------------------


def test_modes_are_those_of_the_rows():
    """Judged by looking at every chunk."""
    rng = np.random.default_rng(7)
    seen = set()
    for _ in range(300):
        lanes = int(rng.integers(1, 20))
        step = rng.integers(0, 4, lanes)
        step[rng.random(lanes) < 0.8] = rng.integers(0, 3)
        rows = np.cumsum(step).reshape(1, -1)
        first = rng.integers(0, lanes, 5)
        count = np.array([[int(rng.integers(1, lanes - f + 1)) for f in first]])
        for c, mode in enumerate(find_modes(rows, first, count)[0]):
            mine = rows[0, first[c] : first[c] + count[0, c]]
            start, n = mine[0], np.arange(len(mine))
            expected = GATHER
            for delta, kind in ((1, SLICE), (STRIDE, STRIDED), (0, BROADCAST)):
                if (mine == start + delta * n).all():
                    expected = kind
                    break
            assert mode == expected
            seen.add(int(mode))
    assert seen == {GATHER, SLICE, STRIDED, BROADCAST}


def test_the_reading_that_occurs_most_is_chosen():
    often = np.array([[SLICE] * 8 + [GATHER] * 4, [SLICE] * 9 + [GATHER] * 3])
    every = np.ones(12, bool)
    assert choose_reading(often, every) == ((SLICE, SLICE),)
    assert usable((SLICE, SLICE), often).tolist() == [True] * 8 + [False] * 4
    assert choose_reading(np.array([[STRIDED] * 12, [GATHER] * 12]), every) == ((STRIDED, GATHER),)
    assert choose_reading(np.full((2, 12), GATHER), every) == ()
    assert choose_reading(np.zeros((0, 12), np.int8), every) == ()
    rare = np.full((2, 12), GATHER)
    rare[:, :2] = SLICE
    assert choose_reading(rare, every) == ()
    assert choose_reading(often, np.zeros(12, bool)) == ()


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("gradient", "target"), [(True, "cpu"), (False, "cpu"), (False, "gpu")])
def test_what_is_read_as_a_slice_is_one(params, gradient, reuse, target):
    batched = jedbatch.batch(encode, reuse=reuse, target=target)
    plan = batched.plan(params, sentences(3, 300, longest=20), gradient=gradient)
    slices, signature = 0, plan.static.signature
    for kernel, width, live, rows, modes in physical_reads(plan):
        for j, mode in enumerate(modes):
            if mode == GATHER:
                continue
            n = width if gradient else live
            step = {SLICE: 1, STRIDED: STRIDE, BROADCAST: 0}[mode]
            assert (rows[j][:n] == rows[j][0] + step * np.arange(n)).all()
            arena = signature.arena(kernel.operands[j])
            reach = {SLICE: width, STRIDED: STRIDE * width, BROADCAST: 1}[mode]
            assert rows[j][0] + reach <= signature.rows[arena]
            slices += 1
    assert slices > 10


def test_chains_of_any_lengths_are_read_as_slices(params):
    """In length order every step reads the first rows of the step before and of its words."""
    batched = jedbatch.batch(encode)
    plan = batched.plan(params, sentences(4, 64), gradient=False)
    gathered, sliced, *_ = plan.host.lowered.read_bytes.tolist()
    assert sliced > 3 * gathered
    lines = plan.layout.explain().splitlines()
    assert sum("step: 0–2 slice" in line for line in lines) == 1
    recorded = jedbatch.batch(encode, layout="append").plan(
        params, sentences(4, 64), gradient=False
    )
    assert recorded.host.lowered.read_bytes[SLICE] < 0.75 * sliced  # of equal lengths
    assert f"order {plan.layout.order}" in str(plan)
    assert "read as slices" in str(plan)


def test_slices_are_slices_in_the_compiled_program(params, monkeypatch):
    def row_slices():
        batched = jedbatch.batch(encode, target="gpu")
        plan = batched.plan(params, sentences(4, 64), gradient=False)
        text = jax.jit(batched.apply).lower(params, plan).as_text()
        found = re.findall(rf"stablehlo.dynamic_slice.*-> tensor<(\d+)x{HIDDEN}xf32>", text)
        return len(plan.static.signature.bodies), set(map(int, found)) - {1}

    bodies, widths = row_slices()
    assert bodies > 2
    assert widths
    monkeypatch.setattr(Placement, "worth_slicing", 2)  # never worth it
    assert row_slices() == (2, set())


def test_explain_says_why():
    graph = jedbatch.Graph.from_dag(
        [0, 0, 0, 0, 1, 1, 2, 2, 3, 3],
        [[], [], [], [], [0, 2], [1, 2], [4, 3], [5, 0], [6, 4], [7, 1]],
    )
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    text = jedbatch.layout(graph, batches, order="append").explain()
    assert "type 0: reads nothing" in text
    assert "type 1: 0 slice · 1 broadcast" in text
    assert "type 2: 0 slice · 1 gather (in another order than they were computed)" in text
    assert "type 3: 0 slice · 1 gather (from 2 batches)" in text


def test_explain_knows_where_inputs_are():
    """Inputs of each shape and dtype are rows of their own."""
    add = jedbatch.cell(lambda a, b: a.sum() + b.sum())
    fn = lambda x: add(x[0], x[1])  # noqa: E731
    instances = [(np.ones(3, np.float32), np.ones(2, np.float32))] * 80
    plan = jedbatch.batch(fn, 0).plan(instances, gradient=False)
    assert "0–1 slice" in plan.layout.explain()
    assert plan.host.lowered.read_bytes[SLICE] > 0 or len(plan.host.placed.chunks.lane) < 8


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_graphs_without_nodes(order):
    batched = jedbatch.batch(lambda _, x: x, layout=order)
    assert_close(batched({}, [np.ones(2, np.float32)] * 3), jnp.ones((3, 2)), 0)
    graph = jedbatch.Graph.from_dag([], [])
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    layout = jedbatch.layout(graph, batches, order=order)
    layout.check(graph)
    assert str(layout).startswith("Layout of 0 nodes")


def test_padding_never_reads_garbage_where_it_could_do_harm(params):
    """Indices, and loops that might not end, are never read past the last live lane."""

    @jedbatch.cell
    def count_down(n, x):
        return jax.lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * 1.5), (n, x))[1]

    @jedbatch.cell
    def wait(x, limit):
        return jax.lax.while_loop(lambda x: x < limit, lambda x: x + 1.0, x)

    def fn(_, words):
        x = jnp.float32(1.0)
        for word in words:
            x = count_down(jnp.int32(word % 3), x)
            x = wait(x, jnp.float32(word)) - 3.0
        return x

    batched = check(fn, params, sentences(8, 21), gradients=False)
    plan = batched.plan(params, sentences(8, 21), gradient=False)
    loose = {k.node_type.name: k.loose for k in plan.static.signature.kernels}
    assert not any((*loose["count_down"], *loose["wait"]))
    indexed = jedbatch.batch(encode).plan(params, sentences(8, 21), gradient=False)
    loose = {k.node_type.name: k.loose for k in indexed.static.signature.kernels}
    assert loose == {"embed": (False,), "step": (True, True, True)}


# --- memory -----------------------------------------------------------------------------


def test_a_chain_of_any_length_runs_in_two_blocks(params):
    """Words apart, which are all embedded first."""

    def run(params, n):
        x = embed(params, 3)
        h, c = x, x
        for _ in range(n):
            h, c = step(params, h, c, h)
        return h

    batched = jedbatch.batch(run, reuse=True)
    rows = set()
    for n in (5, 50, 500):
        plan = batched.plan(params, [n] * 8, gradient=False)
        rows.add(int(plan.layout.rows.sum()))
        assert_close(batched.apply(params, plan), loop(run, params, [n] * 8), 1e-5)
    assert rows == {4 * 8}


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_within_bounds_of_what_is_alive(seed):
    """At least what is alive, at most 1.15 times as much, padding included."""
    rng = np.random.default_rng(seed)
    graph = jedbatch.Graph.from_dag(*random_dag(rng, 400, 4))
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    layout = jedbatch.layout(graph, batches)
    alive = np.zeros(len(batches))
    last = last_reads(graph, batches)
    for b in range(len(batches)):
        mine = (
            graph.value_node[:, None] == layout.node[batches.node_ptr[b] : batches.node_ptr[b + 1]]
        )
        end = last[mine.any(axis=1)].max()
        alive[b : end + 1] += layout.padded[b]
    assert alive.max() <= layout.rows.sum() <= 1.15 * alive.max()
    assert layout.rows.sum() <= jedbatch.layout(graph, batches, reuse=False).rows.sum()


def test_inference_uses_less_memory_than_training(params):
    batched = jedbatch.batch(encode, reuse=True)
    instances = sentences(9, 64, longest=40)
    inference = batched.plan(params, instances, gradient=False)
    training = batched.plan(params, instances)
    assert inference.layout.rows.sum() < 0.7 * training.layout.rows.sum()
    assert "if rows were not used again" in str(inference)


@pytest.mark.parametrize("reuse", [True, False])
def test_plans_for_inference_are_not_differentiated(params, reuse):
    batched = jedbatch.batch(encode, reuse=reuse)
    plan = batched.plan(params, sentences(10, 5), gradient=False)
    with pytest.raises(ValueError, match=r"made for inference.*gradient=True"):
        jax.grad(lambda p: batched.apply(p, plan).sum())(params)
    assert_close(jax.jit(batched.apply)(params, plan), batched.apply(params, plan), 1e-6)


def test_rows_are_shared_where_it_saves_much(params, monkeypatch):
    monkeypatch.setattr(Placement, "worth_sharing", 1 << 16)
    batched = jedbatch.batch(encode)
    small = batched.plan(params, sentences(1, 8), gradient=False)
    assert not small.host.placed.reuse
    words = [tuple(range(20)) * 10] * 64  # 64 × 200 states of 2 × 16 bytes
    large = batched.plan(params, words, gradient=False)
    assert large.host.placed.reuse
    assert not batched.plan(params, words).host.placed.reuse


def test_calls_under_grad_keep_what_the_reverse_reads(params):
    batched = jedbatch.batch(encode, reuse=True)
    instances = sentences(11, 7)
    for _ in range(2):  # before and after calls for inference
        got = jax.grad(lambda p: number(batched(p, instances)))(params)
        expected = jax.grad(lambda p: number(loop(encode, p, instances)))(params)
        assert_close(got, expected, 1e-5)
        batched(params, instances)


def test_checkpointed_cells_keep_less(params):
    """`jax.checkpoint` on a cell: its products are computed again instead of kept."""

    def deep(params, x):
        for _ in range(4):
            x = jnp.tanh(x @ params["w"][:HIDDEN, :HIDDEN])
        return x

    def kept(cell):
        def fn(params, words):
            x = embed(params, words[0])
            for _ in words:
                x = cell(params, x)
            return x

        batched = check(fn, params, sentences(15, 5))
        plan = batched.plan(params, sentences(15, 5))
        kernels = {k.node_type.name: k for k in plan.static.signature.kernels}
        return len(kernels["deep"].reverse.saved)

    plain = jedbatch.cell(deep, name="deep")
    again = jedbatch.cell(jax.checkpoint(deep), name="deep")
    assert kept(again) < kept(plain)


def test_lanes_have_widths_of_their_ladder():
    graph = jedbatch.Graph.from_dag([0] * 70, [[]] * 70)
    batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
    for buckets in (FINE_BUCKETS, COARSE_BUCKETS):
        layout = assign_lanes(graph, batches, [buckets])
        assert layout.padded.tolist() == layout.lanes.tolist()
        assert layout.padded[0] >= 70


@pytest.mark.slow
def test_chunks_of_long_rows_are_narrow():
    """What a chunk reads and writes stays in caches, however many nodes a batch has."""
    mix = jedbatch.cell(lambda w, x, y: jnp.sin(x + w * y), name="mix")
    n = 256  # a matrix of 256 KB
    xs = np.random.default_rng(0).normal(size=(40, n, n)).astype(np.float32)
    batched = check(lambda w, x: mix(w, x, x.T)[0], jnp.float32(2), list(xs))
    (kernel,) = [
        k for k in batched.plan(1.0, list(xs)).static.signature.kernels if k.node_type.name == "mix"
    ]
    chunk = kernel.buckets.widths[-1] * 3 * 4 * n * n  # two matrices are read, one is written
    assert chunk <= CPU.chunk_bytes < 512 * 3 * 4 * n * n
