"""`KernelSpec`: a kernel as far as planning asks for it, without its program.

Scheduling, laying out and lowering need the types that nodes read and return, the widths of chunks,
and which results send cotangents to which operands. All of that is data. The computation itself is
elsewhere: in programs that were exported, in the process for which another one plans.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.storage import Kind, distinct_kinds
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.operand_lists import ListPlaces, Parameter
from jedbatch._kernel.vjp import CONSTS, MAX_SLOTS
from jedbatch._layout.bucketing import Buckets


@dataclass(frozen=True, eq=False)
class VjpSpec:
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

    @staticmethod
    def of(kernel: Kernel) -> "VjpSpec":
        """Returns the reverse of a kernel, which is traced if it was not before."""
        reverse = kernel.reverse
        return VjpSpec(
            bool(reverse.is_leaf),
            bool(reverse.is_plain),
            reverse.inexact_bits,
            tuple(map(frozenset, reverse.flow)),
            dict(reverse.refused),
            tuple(reverse.returned),
            frozenset(filter(reverse.meets_consts, range(len(kernel.results)))),
            tuple(p.num_operands for p in kernel.parameters),
        )

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


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """A kernel as far as planning asks for it; see `Kernel` for its attributes.

    Attributes:
      node_type: as other processes know it: without its operation, with its identity.
      table_rows: of operands that only look up rows of shared tables, (position, rows there are).
      reverse: None if there are no gradients.
    """

    node_type: Any
    parameters: tuple[Parameter, ...]
    lists: ListPlaces | None
    buckets: Buckets
    blocks: Buckets
    loose: tuple[bool, ...]
    lane_work: int
    result_bytes: int
    cotangent_bytes: int
    diverges: bool
    table_rows: tuple[tuple[int, int], ...]
    reverse: VjpSpec | None
    transient = reached = False

    @staticmethod
    def of(
        kernel: Kernel,
        node_type: NodeType | None,
        gradient: bool,
        table_rows: Sequence[tuple[int, int]] = (),
    ) -> "KernelSpec":
        """Returns what planning asks of a kernel; with its reverse, if that is wanted."""
        return KernelSpec(
            node_type,
            tuple(kernel.parameters),
            kernel.lists,
            kernel.buckets,
            kernel.blocks,
            tuple(kernel.loose),
            int(kernel.lane_work),
            int(kernel.result_bytes),
            int(kernel.cotangent_bytes),
            bool(kernel.diverges),
            tuple(table_rows),
            VjpSpec.of(kernel) if gradient else None,
        )

    @functools.cached_property
    def operands(self) -> tuple[ValueType, ...]:
        return self.node_type.operands

    @functools.cached_property
    def results(self) -> tuple[ValueType, ...]:
        return self.node_type.results

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """(shape, dtype) of the rows it reads and writes, each once."""
        return distinct_kinds((*self.operands, *self.results))
