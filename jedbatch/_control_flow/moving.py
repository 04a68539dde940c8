"""`Moving`: which values depend on what a call is differentiated with respect to.

Under a derivative a value that becomes a number of Python, or an array of NumPy, has no gradient
any more: if it comes back into JAX, the gradient is 0 there, and nobody is told. JAX refuses it. So
does a call that decides on values, for the values that JAX would refuse it for: those that depend
on what is differentiated in a way that has a derivative. All others may leave, and so may answers
to `if`, `while`, `int()` and indices.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from jedbatch._graph.paths import int64_of
from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.zeros import Sources, followed
from jedbatch._record.cell import pause
from jedbatch._record.operations.symbols import Shared, Symbol, Value
from jedbatch._record.run.recorder import Recorder


class Moving:
    """Which values of a recording move with what is differentiated."""

    def __init__(
        self,
        recorder: Recorder,
        given: tuple[Sequence[bool], Sequence[Sequence[bool]], Mapping[Any, bool]],
        by_type: dict[int, list[Sources]],
    ):
        """Begins with what is differentiated.

        Args:
          recorder: records the values.
          given: of the leaves of shared arguments, of the arrays of each instance, and of values
            from outside, by name, whether they are differentiated.
          by_type: of each type of nodes the operands that its results follow; is added to.
        """
        self._recorder = recorder
        self._leaves, self._arrays, self._outside = given
        self._by_type = by_type
        self._first_result, self._first_read = [0], [0]  # of each node, and where they end
        self._reads: list[int] = []
        self._moves: dict[int, bool] = {}

    def has(self, symbol: Symbol, instance: int) -> bool:
        """Returns whether a value that an instance reads moves."""
        if isinstance(symbol, Shared):
            return self._has_shared(symbol.index)
        assert isinstance(symbol, Value)
        self._take_up()
        nodes, values = set[int](), [symbol.index]
        while values:
            value = values.pop()
            if value >= 0 and value not in self._moves:
                node = bisect.bisect_right(self._first_result, value) - 1
                if node not in nodes:
                    nodes.add(node)
                    values += self._operands(node)
        for node in sorted(nodes):  # after those that they read
            self._visit(node, instance)
        return self._has(symbol.index, instance)

    def _take_up(self) -> None:
        """Takes up what was recorded since the last time."""
        recorder, types = self._recorder, self._recorder.registry
        self._reads += int64_of(recorder.references, len(self._reads)).tolist()
        for c in int64_of(recorder.call_specs, len(self._first_read) - 1).tolist():
            call_spec = types.call_specs[c]
            self._first_read.append(self._first_read[-1] + call_spec.arity)
            self._first_result.append(self._first_result[-1] + len(call_spec.results))

    def _call_spec(self, node: int) -> Any:
        return self._recorder.registry.call_specs[self._recorder.call_specs[node]]

    def _operands(self, node: int) -> list[int]:
        """Returns what a node reads."""
        return self._reads[self._first_read[node] : self._first_read[node + 1]]

    def _visit(self, node: int, instance: int) -> None:
        """Notes which results of a node move."""
        type_id = self._call_spec(node).node_type
        node_type = self._recorder.registry.node_types[type_id]
        moving = [self._has_shared(s) for s in node_type.shared]
        moving += [self._has(value, instance) for value in self._operands(node)]
        results = range(self._first_result[node], self._first_result[node + 1])
        if not any(moving):
            self._moves.update(dict.fromkeys(results, False))
            return
        if type_id not in self._by_type:
            with pause():
                self._by_type[type_id] = followed(operation_of(node_type).jaxpr)
        for value, sources in zip(results, self._by_type[type_id], strict=True):
            self._moves[value] = any(moving[k] for k in sources)

    def _has(self, value: int, instance: int) -> bool:
        """Returns whether a result that was visited moves, or an input of an instance."""
        if value >= 0:
            return self._moves[value]
        how, _, *where = self._recorder.registry.groups[self._recorder.input_group[-1 - value]]
        return how == "leaf" and self._arrays[instance][where[0]]

    def _has_shared(self, index: int) -> bool:
        value = self._recorder.registry.shared[index]
        if value.call is not None:
            return any(map(self._has_shared, value.follows))
        if value.leaf is not None:
            return self._leaves[value.leaf]
        return value.tracer is not None and self._outside[value.tracer]
