"""Graphs whose nodes have several results: nodes that are cut, and when results are last read.

Both are judged by what a plain loop over nodes finds.
"""

import itertools

import numpy as np

import jedbatch
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.paths import pointers
from jedbatch._graph.rewrite import rewrite
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._layout.live_ranges import find_live_ranges
from jedbatch._record.passes.projections import TwoTypes, codes_of_operands, halves

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


def test_last_reads_of_blocks():
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

        found = find_live_ranges(graph, batches, np.diff(batches.node_ptr))
        blocks = zip(found.batch, found.slot, strict=True)
        assert dict(zip(blocks, found.last, strict=True)) == last
