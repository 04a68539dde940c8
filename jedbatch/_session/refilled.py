"""Instances of a stream whose loops go on from one minibatch to the next.

The graph of one instance is one program for lanes with program counters, run in segments: a lane
that is done makes room for an instance of the next minibatch, and those that take long go on beside
them (see `_jaxpr.lane_segments`). That is for streams of instances of one structure that have loops
whose length values decide on. Where each instance has a structure of its own, as trees have, what a
loop computes is read by nodes of other types, and minibatches run one after the other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._graph.structures import Structure
from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.interpret import calls_python
from jedbatch._jaxpr.lane_segments import (
    Coming,
    LeftLanes,
    Segment,
    SegmentShape,
    run_segment,
    segment_shape,
)
from jedbatch._jaxpr.lane_steps import program_of
from jedbatch._jaxpr.storage import Kind, from_stored, stored
from jedbatch._jaxpr.transfers import handed_over
from jedbatch._jaxpr.trip_counts import with_equal_trips
from jedbatch._program.host_arrays import assemble
from jedbatch._program.plan import input_name
from jedbatch._session.indices import may_be_absent
from jedbatch._session.program_cache import ProgramCache
from jedbatch._support.announce import announce, announced
from jedbatch._support.types import Array, Leaf

MAX_EQUATIONS = 256  # of the graph of one instance
NAME = "a stream"  # of the program, in counts of steps


class RefilledProgram:
    """The graph of one instance as a program for lanes, run in segments.

    Attributes:
      record: of an instance.
      size: instances in a minibatch.
      shape: of the segments; None if instances are better planned.
    """

    def __init__(self, structure: Structure, programs: ProgramCache, size: int):
        self.record: Record = structure.record
        self.size = size
        self._programs = programs
        self._graph = Graph.select([(self.record.whole, self.record.index)])
        self._types = self._graph.present_types
        types = [chunk.type for chunk in self._graph.inputs for _ in range(len(chunk))]
        kinds = list(map(stored, types))
        # The kind of each input, and its place among those of its kind.
        self._inputs = [(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]
        self._counts = {kind: kinds.count(kind) for kind in kinds}
        self.shape: SegmentShape | None = None
        if self._may_pay():
            kernels = [programs.kernel(t).plain for t in self._types]
            self._compute, self._closed_over = programs.registry.prologue(
                [kernel.node_type.shared for kernel in kernels]
            )
            self._kernels = dict(zip(self._types, kernels, strict=True))
            self.shape = self._shape()
        self._run = announced(jax.jit(self._segment))

    def _may_pay(self) -> bool:
        """Returns whether the graph is short, and calls no Python."""
        nodes = self._graph.node_type.tolist()
        programs = {t: operation_of(self._graph.types[t]).jaxpr.jaxpr for t in self._types}
        size = sum(len(programs[t].eqns) for t in nodes)
        if size > MAX_EQUATIONS or not self._inputs or self._programs.control_flow == "lockstep":
            return False
        every = [eqn for program in programs.values() for eqn in program.eqns]
        return not any(calls_python(eqn) or eqn.effects for eqn in every)

    def _shape(self) -> SegmentShape | None:
        """Returns the shape of segments."""
        registry = self._programs.registry
        read = [*range(registry.num_leaves), *self._closed_over]
        avals = [registry.shared[i].aval for i in read]
        shared = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        consts = jax.eval_shape(self._consts, shared)
        rows = {
            kind: jax.ShapeDtypeStruct((self.size, k, *kind[0]), kind[1])
            for kind, k in self._counts.items()
        }
        found: list[SegmentShape | None] = []

        def find(consts: Any, rows: Any) -> None:
            program, args, in_batched = self._of_one(consts, rows)
            step_work = self._programs.target.step_work
            found.append(segment_shape(program, args, in_batched, self.size, step_work))

        jax.eval_shape(find, consts, rows)
        return found[0]

    def assemble(
        self, records: Sequence[Record], arrays: Sequence[Sequence[Array]], first: int
    ) -> dict[str, np.ndarray] | None:
        """Returns the inputs of instances, at most `size`, of each kind [size, k, ...].

        None if one of them is to be planned, which says what is wrong with it.

        Args:
          records: of the instances, all of one structure.
          arrays: of the instances.
          first: the number of the first, for messages.
        """
        rooms = {kind: self.size * k for kind, k in self._counts.items()}
        numbers = range(first, first + len(records))
        inputs = assemble(rooms, records, arrays, numbers)
        if may_be_absent(self._programs.registry, self._types, inputs):
            return None
        return {
            input_name(kind): inputs[input_name(kind)].reshape(self.size, k, *kind[0])
            for kind, k in self._counts.items()
        }

    def read(self, leaves: list[Leaf], before: Sequence[Leaf] | None) -> Sequence[Leaf]:
        """Returns the shared values that segments read: those read before if they are the same.

        Args:
          leaves: of the shared arguments. Arrays of NumPy are copied, since they may be written to.
          before: what was read before; None for nothing.

        Raises:
          ValueError: an array that the function closes over is not where it was.
        """
        now = self._programs.shared_values(self._closed_over, leaves, ())
        if before is not None and all(map(_is_same, before, now)):
            return before
        return [x.copy() if isinstance(x, np.ndarray) else x for x in now]

    def __call__(
        self,
        shared: Sequence[Leaf],
        inputs: dict[str, np.ndarray],
        before: LeftLanes,
        told: Coming,
    ) -> Segment:
        """Runs a segment; its results are those of the instances, and whether a loop was stopped.

        Args:
          shared: what `read` returns.
          inputs: what `assemble` returns.
          before: lanes that were left.
          told: what the segment is told.
        """
        segment: Segment = self._run(list(shared), *handed_over((inputs, before, told)))
        return segment

    def nobody(self, shared: Sequence[Leaf]) -> LeftLanes:
        """Returns what the first segment begins with, on the devices of the shared values."""
        assert self.shape is not None
        lanes = handed_over(self.shape.nobody())
        placed = [x.sharding for x in shared if getattr(x, "committed", False)]
        if not placed:
            return lanes
        first = placed[0]
        if isinstance(first, NamedSharding):  # its axes are those of another array
            return jax.device_put(lanes, NamedSharding(first.mesh, PartitionSpec()))
        return jax.device_put(lanes, first) if len(first.device_set) == 1 else lanes

    def results(self, columns: Sequence[np.ndarray], place: int) -> Any:
        """Returns the result of the instance at a place, from the results of a segment."""
        kinds = [ValueType(*kind[:2]) for kind in self.record.types]
        pairs = zip(columns, kinds, strict=False)
        leaves = [from_stored(x[place, ...], kind) for x, kind in pairs]
        return jax.tree.unflatten(self.record.structure, leaves)

    def was_stopped(self, columns: Sequence[np.ndarray], place: int) -> bool:
        """Returns whether a loop of the instance at a place was stopped (`max_steps`)."""
        return any(x[place] for x in columns[len(self.record.types) :])

    def _consts(self, shared: Sequence[Any]) -> list[list[Array]]:
        pairs = zip(self._kernels.values(), self._compute(shared), strict=True)
        return [kernel.prologue(values) for kernel, values in pairs]

    def _segment(
        self,
        shared: Sequence[Array],
        inputs: dict[str, Array],
        before: LeftLanes,
        told: Coming,
    ) -> Segment:
        self._programs.count("refilled")
        announce(f"compiling a program for streams in minibatches of {self.size}")
        rows = {kind: inputs[input_name(kind)] for kind in self._counts}
        program, args, in_batched = self._of_one(self._consts(shared), rows)
        with program_of(NAME):
            return run_segment(program, args, in_batched, before, told, self._programs.lanes)

    def _of_one(self, consts: Any, rows: dict[Kind, Array]) -> tuple[Any, list[Array], list[bool]]:
        """Returns (the program of one lane, its arguments, which of them differ by lane)."""
        shared, structure = jax.tree.flatten(consts)
        own = [rows[kind][:, place] for kind, place in self._inputs]

        def one(shared: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
            by_type = dict(zip(self._types, jax.tree.unflatten(structure, shared), strict=True))
            return self._one(by_type, inputs)

        one_of = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in own]
        all_of = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shared]
        program = with_equal_trips(jax.make_jaxpr(one)(all_of, one_of))
        return program, [*shared, *own], [False] * len(shared) + [True] * len(own)

    def _one(self, consts: dict[int, list[Array]], inputs: Sequence[Array]) -> list[Array]:
        """Returns the results of one instance, as they are kept, and whether loops were stopped."""
        graph = self._graph
        values: list[Array] = []
        stopped: list[Array] = []

        def read(references: np.ndarray) -> list[Array]:
            return [values[r] if r >= 0 else inputs[-1 - r] for r in references.tolist()]

        for n, t in enumerate(graph.node_type.tolist()):
            kernel = self._kernels[t]
            operands = read(graph.operand[graph.operand_ptr[n] : graph.operand_ptr[n + 1]])
            found, flags = kernel.forward_alone(consts[t], kernel.arguments(operands))
            values += found
            stopped += flags
        return [*read(graph.outputs), *stopped]


def _is_same(before: Leaf, now: Leaf) -> bool:
    """Returns whether a shared value is what it was before; arrays of JAX do not change."""
    if before is now or isinstance(now, jax.Array) or type(before) is not type(now):
        return before is now
    return getattr(before, "dtype", None) == getattr(now, "dtype", None) and np.array_equal(
        before, now
    )
