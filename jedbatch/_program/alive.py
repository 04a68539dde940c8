"""The values of a minibatch that have a cotangent.

A value is *alive* if it is returned, or if a node reads it that has a result which is alive and
sends a cotangent to that operand (see `KernelVjp.flow`). We begin with all alive and take away what
is not: values that are not read, then what was read for their sake, and so on. That is quick,
since nearly everything is alive nearly always.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jedbatch._graph.paths import distinct, ranges
from jedbatch._kernel.vjp import CONSTS, MAX_SLOTS
from jedbatch._program.placement import Placement
from jedbatch._program.signature import Signature

MAX_RESULTS = 31  # results told apart; further ones count as the last


@dataclass(frozen=True, eq=False)
class Alive:
    """The results that have a cotangent, and the operands that receive one.

    Attributes:
      results: int64[N], the results of each node that are alive, as bits.
      reads: bool[E], operands that get something from a result that is alive; None if all do.
    """

    results: np.ndarray
    reads: np.ndarray | None

    @staticmethod
    def everything(placed: Placement) -> "Alive":
        """All results, and all operands."""
        return Alive(_inexact(placed), None)

    @staticmethod
    def find(placed: Placement, wanted: Sequence[np.ndarray] | None = None) -> "Alive":
        """Computes what is alive; `wanted`, bool[outputs] by arena, has what is differentiated."""
        graph = placed.graph
        needs = _needs(placed)
        reader = graph.operand_reader
        position = np.arange(len(graph.operand)) - graph.operand_ptr[reader]
        need = needs[graph.node_type[reader], position]
        results = _inexact(placed)
        reads = need != 0
        target = graph.operand
        count = np.bincount(target[reads & (target >= 0)], minlength=graph.num_values)
        for a, outputs in enumerate(placed.outputs):
            references = outputs if wanted is None else outputs[wanted[a]]
            np.add.at(count, references[references >= 0], 1)
        dead = np.flatnonzero(count == 0)
        while len(dead):
            dead = dead[graph.value_slot[dead] < MAX_SLOTS]
            nodes, bits = graph.value_node[dead], np.int64(1) << graph.value_slot[dead]
            changes = (results[nodes] & bits) != 0
            np.bitwise_and.at(results, nodes[changes], ~bits[changes])
            nodes = distinct(nodes[changes])
            starts = graph.operand_ptr[nodes]
            edges = ranges(starts, graph.operand_ptr[nodes + 1] - starts)
            edges = edges[reads[edges] & (need[edges] & results[reader[edges]] == 0)]
            reads[edges] = False
            lost = target[edges]
            lost = lost[lost >= 0]
            np.subtract.at(count, lost, 1)
            lost = distinct(lost)
            dead = lost[count[lost] == 0]
        return Alive(results, reads)


def computes_what_is_read(placed: Placement, columns: Sequence[np.ndarray]) -> bool:
    """Returns whether some result of every node is used, hence in the first of `columns`."""
    graph = placed.graph
    if not columns:
        return not graph.num_values
    nodes = graph.value_node[np.flatnonzero(columns[0][: graph.num_values] < 0)]
    unread = np.bincount(nodes)
    return bool((unread < graph.num_results[: len(unread)]).all())


def _inexact(placed: Placement) -> np.ndarray:
    """int64[N], the results of each node that can have a cotangent, as bits."""
    bits = np.zeros(len(placed.graph.types), np.int64)
    bits[list(placed.type_ids)] = [kernel.reverse.inexact_bits for kernel in placed.kernels]
    return bits[placed.graph.node_type]


def _needs(placed: Placement) -> np.ndarray:
    """int64[T, J]: for each operand the results that it gets something from, as bits."""
    most = max((len(kernel.operands) for kernel in placed.kernels), default=0)
    needs = np.zeros((len(placed.graph.types), most), np.int64)
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        needs[t, : len(kernel.operands)] = kernel.reverse.flow_bits
    return needs


def find_leads(placed: Placement, leaves: Sequence[np.ndarray]) -> np.ndarray:
    """int32[V]: the results of the function that each value leads to, as bits.

    `leaves`, int[outputs] for each arena, has the number of the result that each row belongs to.
    """
    graph = placed.graph
    leaves = [np.minimum(x, MAX_RESULTS - 1) for x in leaves]
    leads = np.zeros(graph.num_values, np.int32)
    for leaf in range(max(int(x.max(initial=-1)) for x in leaves) + 1):
        alive = Alive.find(placed, [x == leaf for x in leaves])
        slots = np.minimum(graph.value_slot, MAX_SLOTS)
        is_alive = alive.results[graph.value_node] >> slots & 1
        leads |= (is_alive << leaf).astype(np.int32)
    return leads


@dataclass(frozen=True)
class Refused:
    """A result that cannot be differentiated, and that some node would need it of.

    Attributes:
      kernel, result: which.
      leads_to: the results of the function it leads to, as bits.
      origins: with respect to what it cannot: bit 0 shared values, bit 1 + a inputs of arena a.
    """

    kernel: int
    result: int
    leads_to: int
    origins: int


def merged_refused(several: Iterable[Refused]) -> tuple[Refused, ...]:
    """Returns what is refused in any of several minibatches, each result of a kernel once."""
    merged: dict[tuple[int, int], Refused] = {}
    for x in several:
        other = merged.get((x.kernel, x.result), x)
        merged[x.kernel, x.result] = replace(
            x, leads_to=x.leads_to | other.leads_to, origins=x.origins | other.origins
        )
    return tuple(merged[key] for key in sorted(merged))


def find_refused(
    placed: Placement, alive: Alive, leads_to: np.ndarray | None, signature: Signature
) -> tuple[Refused, ...]:
    """Results that cannot be differentiated and would have to be, if what they depend on is."""
    graph = placed.graph
    refused = []
    origins = None
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        for s, operands in kernel.reverse.refused.items():
            nodes = placed.nodes[t]
            nodes = nodes[(alive.results[nodes] >> min(s, MAX_SLOTS) & 1) != 0]
            if len(nodes):
                values = graph.value_ptr[nodes] + s
                origins = find_origins(placed, signature) if origins is None else origins
                bits = 1 if leads_to is None else int(np.bitwise_or.reduce(leads_to[values]))
                where = int(CONSTS in operands)
                positions = [kernel.parameters[p].operands for p in operands - {CONSTS}]
                for j in itertools.chain(*positions):
                    read = graph.operand[graph.operand_ptr[nodes] + j]
                    where |= int(np.bitwise_or.reduce(origins[read]))
                refused.append(Refused(signature.places[kernel], s, bits, where))
    return tuple(refused)


def origin_of_inputs(arena: int) -> int:
    """The bit of `Refused.origins` that stands for the inputs of an arena."""
    return 2 << min(arena, MAX_SLOTS - 1)


def find_origins(placed: Placement, signature: Signature) -> np.ndarray:
    """int64[V + I]: what values are differentiated with respect to; see `Refused.origins`."""
    graph, schedule = placed.graph, placed.schedule
    found = np.zeros(graph.num_values + graph.num_inputs, np.int64)
    arenas = np.array([signature.arena_ids[kind] for kind in placed.arenas], np.int64)
    bits = np.array(list(map(origin_of_inputs, range(len(signature.arenas)))), np.int64)
    found[-1 - np.arange(graph.num_inputs)] = bits[arenas[placed.input_arena]]
    kernels = dict(zip(placed.type_ids, placed.kernels, strict=True))
    for t, a, b in zip(schedule.batch_type, schedule.node_ptr, schedule.node_ptr[1:], strict=False):
        nodes, kernel = schedule.node[a:b], kernels[int(t)]
        reverse = kernel.reverse
        reads = [
            np.bitwise_or.reduce(
                [found[graph.operand[graph.operand_ptr[nodes] + j]] for j in parameter.operands]
            )
            for parameter in kernel.parameters
        ]
        for s in reverse.returned:
            origins = np.full(len(nodes), reverse.meets_consts(s), np.int64)
            for j, operand_values in enumerate(reads):
                if s in reverse.flow[j] or j in reverse.refused.get(s, ()):
                    origins |= operand_values
            found[graph.value_ptr[nodes] + s] = origins
    return found
