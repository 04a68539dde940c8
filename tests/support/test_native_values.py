"""The compiled core against the Python: values between a recording and a layout.

Both are judged by what a plain loop over nodes finds.
"""

import itertools

import numpy as np
import pytest

import jedbatch
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers
from jedbatch._graph.rewrite import rewrite
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._layout.allocator import _scan_through_time, live_bound
from jedbatch._layout.live_ranges import find_live_ranges
from jedbatch._record.passes.projections import TwoTypes, codes_of_operands, halves
from jedbatch._support import native
from tests.cases.compiled_core import assert_equal, both, compiled

NUMBER = ValueType((), np.dtype(np.float32))
NUM_INPUTS = 4
CUTS = {0: TwoTypes(3, 4, (2, 0), (1,)), 2: TwoTypes(5, 6, (1,), (0,))}
ARITIES, RESULTS = (3, 1, 2, 2, 3, 1, 2), (2, 1, 1, 2, 2, 1, 1)
TYPES = tuple(
    NodeType(f"t{t}", operands=(NUMBER,) * ARITIES[t], results=(NUMBER,) * RESULTS[t])
    for t in range(len(ARITIES))
)


def graph_of_many_results(seed):
    """A graph of nodes of the first three types, which read any values before them."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 40))
    node_type = rng.integers(3, size=num_nodes).astype(np.int32)
    made = pointers(np.array(RESULTS)[node_type])
    operand = [
        int(rng.integers(-NUM_INPUTS, made[i]))
        for i, t in enumerate(node_type.tolist())
        for _ in range(ARITIES[t])
    ]
    half = num_nodes // 2
    graph = Graph(
        TYPES,
        node_type,
        pointers(np.array(ARITIES)[node_type]),
        np.array(operand, np.int32),
        (InputRows(NUMBER, np.zeros(NUM_INPUTS, np.float32)),),
        rng.integers(-NUM_INPUTS, made[-1], 5).astype(np.int32),
        np.array([0, 0, half, num_nodes]),
        np.array([0, 1, 2, NUM_INPUTS]),
        np.array([0, 1, 2, 5]),
    )
    graph.check()
    return graph


def computed(graph):
    """Returns results as terms, where two nodes of a cut are the node that was cut."""
    whole = {cut.second: (t, cut) for t, cut in CUTS.items()}
    firsts = {cut.first for cut in CUTS.values()}
    values, of_nodes = [], []
    for i, t in enumerate(graph.node_type.tolist()):
        read = graph.operand[graph.operand_ptr[i] : graph.operand_ptr[i + 1]].tolist()
        terms = [values[r] if r >= 0 else ("input", -1 - r) for r in read]
        if t in whole:
            t, cut = whole[t]
            own, given = terms[: len(cut.second_reads)], terms[len(cut.second_reads) :]
            assert [term[:2] for term in given] == [
                (cut.first, s) for s in range(RESULTS[cut.first])
            ]
            places = dict(zip(cut.second_reads, own, strict=True))
            places |= dict(zip(cut.first_reads, given[0][2], strict=True))
            terms = [places[p] for p in range(ARITIES[t])]
        values += [(t, s, tuple(terms)) for s in range(RESULTS[t])]
        of_nodes.append(None if t in firsts else t)
    returned = [values[o] if o >= 0 else ("input", -1 - o) for o in graph.outputs.tolist()]
    kinds = [
        [t for t in of_nodes[a:b] if t is not None]
        for a, b in itertools.pairwise(graph.node_ptr.tolist())
    ]
    return returned, kinds


def test_nodes_are_cut():
    for seed in range(30):
        graph = graph_of_many_results(seed)
        cut = rewrite(graph, halves(graph, CUTS, TYPES), TYPES)
        cut.check()
        assert computed(cut) == computed(graph)
        made = set()
        maker_of = graph.node_type[graph.value_node].tolist()
        for i, t in enumerate(graph.node_type.tolist()):
            read = graph.operand[graph.operand_ptr[i] : graph.operand_ptr[i + 1]].tolist()
            made |= {(t, k, maker_of[r]) for k, r in enumerate(read) if r >= 0}
        codes, most = codes_of_operands(graph)
        places, makers = np.divmod(codes, len(TYPES))
        assert list(zip(*np.divmod(places, most), makers, strict=True)) == sorted(made)


@compiled
def test_last_reads_of_blocks_are_equal(monkeypatch):
    for seed in range(30):
        graph = graph_of_many_results(seed)
        batches = jedbatch.schedule(graph, jedbatch.policies.agenda)
        last = {(b, s): b for b, t in enumerate(batches.batch_type) for s in range(RESULTS[t])}
        value_block = [
            (batches.batch[n], s) for n, s in zip(graph.value_node, graph.value_slot, strict=True)
        ]
        for read, reader in zip(graph.operand.tolist(), graph.operand_reader, strict=True):
            if read >= 0:
                block = value_block[read]
                last[block] = max(last[block], batches.batch[reader])
        last |= {value_block[o]: len(batches) for o in graph.outputs.tolist() if o >= 0}

        def blocks(graph=graph, batches=batches):
            found = find_live_ranges(graph, batches, np.diff(batches.node_ptr))
            return found.batch, found.slot, found.size, found.last

        batch, slot, _, found = blocks()
        assert dict(zip(zip(batch, slot, strict=True), found, strict=True)) == last
        assert_equal(*both(monkeypatch, blocks))


@compiled
def test_blocks_are_placed_equally(monkeypatch):
    rng = np.random.default_rng(0)
    for num_blocks in (0, 1, 2, 7, 60, 300):
        for longest in (1, 6, 40):
            size = rng.integers(9, size=num_blocks)
            first = rng.integers(max(1, num_blocks // 2), size=num_blocks)
            last = first + rng.integers(longest, size=num_blocks)

            def placed(size=size, first=first, last=last):
                found, bound = _scan_through_time(size, first, last)
                found.check(size, first, last)
                assert bound == live_bound(size, first, last) <= found.peak
                return found.offset, found.peak, bound

            assert_equal(*both(monkeypatch, placed))


@compiled
def test_arrays_of_values_that_do_not_fit_are_refused():
    core = native.core()
    i32, i64 = (lambda *x: np.array(x, np.int32)), (lambda *x: np.array(x, np.int64))

    def reads(operand=0, output=-1, node=(0, 1), ptr=(0, 1, 2), block_ptr=(0, 1, 2), results=1):
        nodes = i32(0, 0), i32(results), i64(0, 0, 1), i32(operand), i32(output)
        last = np.zeros(2, np.int64)
        core.last_reads((*nodes, i32(*node), i64(*ptr), i64(*block_ptr), last))
        return last.tolist()

    assert reads() == [1, 1]
    assert reads(output=1) == [1, 2]
    for wrong in (
        {"operand": 1},
        {"output": 2},
        {"node": (0, 2)},
        {"node": (0,)},
        {"ptr": (0, 1)},
        {"ptr": (0, 1, 3)},
        {"block_ptr": (0, 1, 3)},
        {"results": 2},
        {"results": -1},
    ):
        with pytest.raises(ValueError, match="do not fit"):
            reads(**wrong)

    def scan(size=(1,), first=(0,), last=(0,), room=1):
        return core.scan_through_time((i64(*size), i64(*first), i64(*last), np.zeros(room, int)))

    assert scan() == (1, 1)
    for wrong in ({"size": (-1,)}, {"first": (1,)}, {"last": (0, 0)}, {"room": 2}):
        with pytest.raises(ValueError, match="do not fit"):
            scan(**wrong)
