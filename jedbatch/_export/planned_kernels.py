"""`PlannedKernel`: a kernel as planning knows it, without its program.

Scheduling, laying out and lowering need the types that nodes read and return, the widths of chunks,
and which results send cotangents to which operands. All of that is data. The
computation itself is in the programs that were exported.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jedbatch._export.encoding import buckets_of, buckets_to_json, value_type_of
from jedbatch._graph.serialize import value_type_to_json
from jedbatch._graph.types import NodeType
from jedbatch._kernel.facts import KernelFacts
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.operand_lists import ListPlaces, Parameter
from jedbatch._kernel.vjp import CONSTS, MAX_SLOTS, KernelVjp


@dataclass(frozen=True, eq=False)
class PlannedVjp:
    """The reverse of a kernel as far as planning asks for it; see `KernelVjp` for its attributes.

    Attributes:
      from_consts: results that depend on shared values.
      operand_counts: operands of each parameter.
    """

    is_leaf: bool
    is_plain: bool
    inexact_bits: int
    flow: tuple[frozenset[int], ...]
    refused: Mapping[int, frozenset[int]]
    returned: tuple[int, ...]
    from_consts: frozenset[int]
    operand_counts: tuple[int, ...]

    @functools.cached_property
    def flow_of_operands(self) -> list[frozenset[int]]:
        pairs = zip(self.operand_counts, self.flow, strict=True)
        return [results for count, results in pairs for _ in range(count)]

    @functools.cached_property
    def flow_bits(self) -> tuple[int, ...]:
        return tuple(sum({1 << min(s, MAX_SLOTS) for s in x}) for x in self.flow_of_operands)

    def meets_consts(self, s: int) -> bool:
        """Returns whether result s depends on shared values."""
        return CONSTS in self.refused.get(s, ()) or s in self.from_consts


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedKernel(KernelFacts):
    """A kernel as far as planning asks for it; see `Kernel` for its attributes.

    Attributes:
      reverse: None if there are no gradients.
      table_rows: for operands that only look up rows of shared tables, by position, the rows there
        are.
    """

    node_type: NodeType
    diverges: bool
    reverse: PlannedVjp | None
    table_rows: Mapping[int, int]


def kernel_to_json(kernel: Kernel, table_rows: Mapping[int, int], reverse: bool) -> dict[str, Any]:
    """Returns a kernel as JSON, all but its type; with its reverse, if that is wanted."""
    return {
        "parameters": [
            [p.first, p.length, value_type_to_json(p.type), p.is_sum] for p in kernel.parameters
        ],
        "lists": kernel.lists and list(kernel.lists),
        "buckets": buckets_to_json(kernel.buckets),
        "blocks": buckets_to_json(kernel.blocks),
        "loose": list(kernel.loose),
        "lane_work": int(kernel.lane_work),
        "result_bytes": int(kernel.result_bytes),
        "cotangent_bytes": int(kernel.cotangent_bytes),
        "diverges": bool(kernel.diverges),
        "reverse": _reverse_to_json(kernel.reverse) if reverse else None,
        "table_rows": sorted(table_rows.items()),
    }


def _reverse_to_json(reverse: KernelVjp) -> dict[str, Any]:
    results = range(len(reverse.kernel.results))
    return {
        "is_leaf": bool(reverse.is_leaf),
        "is_plain": bool(reverse.is_plain),
        "inexact_bits": reverse.inexact_bits,
        "flow": [sorted(x) for x in reverse.flow],
        "refused": [[s, sorted(x)] for s, x in sorted(reverse.refused.items())],
        "returned": list(reverse.returned),
        "from_consts": [s for s in results if reverse.meets_consts(s)],
    }


def kernel_of(node_type: NodeType, written: Mapping[str, Any]) -> PlannedKernel:
    """Returns what `kernel_to_json` wrote of the kernel of a type."""
    parameters = tuple(
        Parameter(first, length, value_type_of(kind), is_sum)
        for first, length, kind, is_sum in written["parameters"]
    )
    reverse = written["reverse"]
    return PlannedKernel(
        node_type=node_type,
        operands=node_type.operands,
        results=node_type.results,
        parameters=parameters,
        lists=None if written["lists"] is None else ListPlaces(*written["lists"]),
        buckets=buckets_of(written["buckets"]),
        blocks=buckets_of(written["blocks"]),
        loose=tuple(written["loose"]),
        lane_work=written["lane_work"],
        result_bytes=written["result_bytes"],
        cotangent_bytes=written["cotangent_bytes"],
        diverges=written["diverges"],
        reverse=None if reverse is None else _reverse_of(parameters, reverse),
        table_rows=dict(written["table_rows"]),
    )


def _reverse_of(parameters: tuple[Parameter, ...], written: Mapping[str, Any]) -> PlannedVjp:
    return PlannedVjp(
        written["is_leaf"],
        written["is_plain"],
        written["inexact_bits"],
        tuple(map(frozenset, written["flow"])),
        {s: frozenset(x) for s, x in written["refused"]},
        tuple(written["returned"]),
        frozenset(written["from_consts"]),
        tuple(p.num_operands for p in parameters),
    )
