"""Patterns: what several operations compute that become one node."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jedbatch._graph.straight import inputs_of, straight
from jedbatch._graph.types import NodeType, operation_of
from jedbatch._record.types.registry import CallSpec, Registry
from jedbatch._support.types import Leaf


class Pattern(NamedTuple):
    """The computation of operations that become one node.

    Attributes:
      types: the node types of the operations.
      reads: what they read, one after the other: `k >= 0` is value k made inside, `-1 - k` is
        operand k of the node, and a pair (value type, bytes) is a number written into it.
    """

    types: tuple[int, ...]
    reads: tuple[Any, ...]


def pattern_call(
    registry: Registry, pattern: Pattern, shared: tuple[int, ...], leaving: int
) -> Callable:
    """A function of (shared values, operands) that computes a pattern.

    `leaving` has, as bits, the values made inside that it returns.
    """
    reads = iter(pattern.reads)
    types = [registry.node_types[t] for t in pattern.types]
    calls = [(t, list(itertools.islice(reads, len(t.operands)))) for t in types]
    numbers = {}
    for read in pattern.reads:
        if not isinstance(read, int):
            kind, data = read
            value_type = registry.value_types[kind]
            number = np.frombuffer(data, value_type.dtype)[0]
            numbers[read] = number.item() if value_type.weak else number

    def call(shared_values: Sequence[Leaf], operand_values: Sequence[Leaf]) -> list[Leaf]:
        of_shared = dict(zip(shared, shared_values, strict=True))

        def run(node_type: NodeType, operands: list[Any]) -> list[Any]:
            values = [*(of_shared[s] for s in node_type.shared), *operands]
            closed = operation_of(node_type).jaxpr
            results: list[Any] = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *values)
            return results

        values = straight(calls, inputs_of(operand_values) | numbers, run)
        return [values[k] for k in range(leaving.bit_length()) if leaving >> k & 1]

    return call


def merged_call_spec(registry: Registry, pattern: Pattern, leaving: int) -> CallSpec:
    """Returns how to record a node that computes a pattern, of which some values leave.

    Args:
      registry: where types are interned.
      pattern: what it computes.
      leaving: the values made inside that it returns, as bits.
    """
    types = [registry.node_types[t] for t in pattern.types]
    shared = tuple(dict.fromkeys(s for t in types for s in t.shared))
    kinds = itertools.chain.from_iterable(registry.kinds_of(t.operands) for t in types)
    operands = {-1 - r: k for r, k in zip(pattern.reads, kinds, strict=True) if _is_operand(r)}
    call_spec = registry.call_spec(
        f"{types[0].name}..{types[-1].name}",
        ("merged", *pattern, leaving),
        pattern_call(registry, pattern, shared, leaving),
        shared,
        tuple(operands[k] for k in range(len(operands))),
    )
    registry.lines[call_spec.node_type] = registry.lines.get(pattern.types[0], "")
    return call_spec


def _is_operand(read: Any) -> bool:
    return isinstance(read, int) and read < 0
