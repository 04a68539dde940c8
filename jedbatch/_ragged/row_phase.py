"""Phases over rows: equations that do the same to every row, of all instances.

Such a phase is a kernel whose lanes are rows (see `_kernel.kernel`), so that its weights' gradients
are taken from many rows at once. It runs in blocks of a few widths (`Target.blocks`: 192 and 16
rows on a CPU, and more where no gradient is planned); how many of each there are is data, so few
rows are computed that are not read.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._graph.operations import Operation
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.interpret import run_equations
from jedbatch._jaxpr.padding.axis_rules import is_look_up
from jedbatch._jaxpr.padding.row_rules import run_row
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.symbolic_dims import extent_at
from jedbatch._jaxpr.symmetric import DifferentiableFunction, refuse_rules
from jedbatch._jaxpr.versions import Equation
from jedbatch._jaxpr.zeros import Sources, where_alive
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.vjp import KernelVjp, differentiable
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.arenas import broadcast_flags, empty, put, slice_rows, take, zeros
from jedbatch._program.lanes import Lane, Lanes, each_block, reverse_lanes, run_lanes
from jedbatch._ragged.moving_calls import moving_calls
from jedbatch._ragged.packing import PackedBatch, RowCapacity, ragged_axis, row_shape
from jedbatch._ragged.phases import Phase
from jedbatch._support.types import Array


class RowPhase:
    """A phase over rows: a kernel whose lanes are rows.

    The operands of a row are the variables that the phase reads; extents that it needs as numbers;
    and the position of the row, if that matters.
    """

    def __init__(self, phase: Phase):
        self.phase = phase
        self._functions: dict[RowCapacity, RowFunction] = {}
        self._extents = [
            e.params["dim"] for e in phase.equations if e.primitive.name == "dim_as_value"
        ]
        self._placed = any(is_look_up(e) or e.primitive.name == "iota" for e in phase.equations)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The program of one row."""
        phase = self.phase
        operands = [ValueType(row_shape(v), v.aval.dtype) for v in phase.reads]
        operands += [ValueType((), np.dtype(np.int32))] * (len(self._extents) + self._placed)
        results = tuple(ValueType(row_shape(v), v.aval.dtype) for v in phase.writes)
        jaxpr = jax.make_jaxpr(self._lane)(
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in phase.shared],
            [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands],
        )
        shared = tuple(range(len(phase.shared)))
        operation = Operation(("rows", phase), jaxpr)
        node_type = NodeType("rows", operation, tuple(operands), shared, results)
        return Kernel(node_type, lists=False, plain=True)

    def _lane(self, shared: Sequence[Any], operands: Sequence[Any]) -> list[Array]:
        phase = self.phase
        env = dict(zip(phase.shared, shared, strict=True))
        env.update(zip(phase.reads, operands, strict=False))
        extents = iter(operands[len(phase.reads) :])
        position = operands[-1] if self._placed else None

        def rule(eqn: Equation, values: list[Array]) -> list[Array]:
            if eqn.primitive.name == "dim_as_value":
                return [next(extents).astype(eqn.outvars[0].aval.dtype)]
            return run_row(eqn, values, position)

        run_equations(phase.equations, env, rule)
        return [env[v] for v in phase.writes]

    def run(
        self,
        batch: PackedBatch,
        shared: Sequence[jax.Array],
        reads: Sequence[jax.Array],
        number: int,
    ) -> list[Array]:
        """Returns the variables that the phase writes, packed; `number` is that of the phase."""
        e = batch.index(self.phase.extent)
        lengths = batch.lengths()
        operands = [*reads]
        operands += [jnp.asarray(extent_at(d, lengths), jnp.int32) for d in self._extents]
        if self._placed:
            operands.append(batch.positions(e))
        consts = self.kernel.prologue(shared)
        if batch.capacity not in self._functions:
            self._functions[batch.capacity] = self._function(batch.capacity, e)
        call, total, trips = batch.get("call", e), batch.total(e), batch.trips(e)
        arguments = RowArguments(consts, operands, call, total, trips, jnp.int32(number))
        return self._functions[batch.capacity].differentiable(arguments)

    def _function(self, capacity: RowCapacity, e: int) -> "RowFunction":
        """Returns the kernel for packed rows of extent number e."""
        by_row = [ragged_axis(v) is not None for v in self.phase.reads]
        by_row += [False] * len(self._extents) + [True] * self._placed
        rows, calls = capacity.rows[e], capacity.calls
        return RowFunction(self.kernel, rows, calls, capacity.blocks(e), tuple(by_row))


class RowArguments(NamedTuple):
    """The arguments of a kernel that runs over rows.

    Attributes:
      consts: of the kernel, after its prologue.
      operands: [R, ...] or [K, ...] each, see `RowFunction`.
      call: int32[R], the call of every row.
      total: int32[], how many rows exist.
      trips: how many blocks of each width there are; None if all rows are one block.
      number: int32[], of the phase in its program.
    """

    consts: Sequence[jax.Array]
    operands: Sequence[jax.Array]
    call: jax.Array
    total: jax.Array
    trips: jax.Array | None
    number: jax.Array

    def more(self, i: int, done: jax.Array) -> jax.Array:
        """Returns bool[], whether there are more blocks of width number i than are done."""
        assert self.trips is not None
        return done < self.trips[i]


@dataclass(frozen=True, eq=False)
class RowFunction:
    """A kernel as a differentiable function of packed rows.

    Rows beyond those that exist may be anything.

    Attributes:
      kernel: its lanes are rows.
      capacity: of rows, R.
      num_calls: K.
      buckets: how rows are cut into blocks; None if they are not.
      by_row: for each operand, whether it has a row for every row, [R, ...], or for every call.
    """

    kernel: Kernel
    capacity: int
    num_calls: int
    buckets: Buckets | None
    by_row: tuple[bool, ...]

    @functools.cached_property
    def differentiable(self) -> DifferentiableFunction:
        """From `RowArguments` to the results of the kernel for every row, [R, ...] each."""

        def run(arguments):
            return self._forward(arguments, keep_residuals=False)[0]

        def save(arguments):
            return self._forward(arguments, keep_residuals=True)

        def pull_back(arguments, results, residuals, cotangents, _, moves):
            reverse = RowReverse(self, arguments, results, cotangents, moves)
            of_consts, of_operands = reverse.run(residuals)
            nothing = jax.tree.map(lambda _: None, tuple(arguments[2:]))
            return RowArguments(of_consts, of_operands, *nothing)

        refuse = functools.partial(refuse_rules, "what is done to rows of arrays", self.kernel.body)
        types, marks = self._result_types, self._moving_calls
        return DifferentiableFunction(run, save, pull_back, refuse, types, marks)

    def _result_types(self) -> list[Kind]:
        """Returns (shape, dtype) of each result."""
        return [((self.capacity, *t.shape), t.dtype) for t in self.kernel.results]

    def _moving_calls(
        self, arguments: RowArguments, cotangents: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Returns bool[K] for each result: the calls to which something comes back through it."""
        return moving_calls(arguments.call, arguments.total, cotangents, self.num_calls)

    def operands_at(self, arguments: RowArguments, lane: Lane, width: int) -> list[jax.Array]:
        """Returns the operands of `width` rows from `lane` on."""
        exists = lane + jnp.arange(width) < arguments.total
        calls = slice_rows(arguments.call, lane, width)
        rows = []
        for x, by_row in zip(arguments.operands, self.by_row, strict=True):
            if not by_row:
                rows.append(take(x, calls))
                continue
            x = slice_rows(x, lane, width)
            rows.append(jnp.where(broadcast_flags(exists, x), x, x[:1]))  # the first row exists
        return rows

    def unwritten(self, arguments: RowArguments, kind: Kind, *name: Any) -> jax.Array:
        """Returns R rows, each of which is written before it is read; `name` is their own."""
        if self.buckets is None:
            return zeros(self.capacity, kind)
        return empty(self.capacity, kind, "rows", *name, number=arguments.number)

    def unfilled(self, arguments: RowArguments, kind: Kind, *name: Any) -> jax.Array:
        """Returns R rows, of which those that no block will write are zeros; `name` is their own.

        Others may be anything. What is next may read all of them, or add them up.
        """
        if self.buckets is None or arguments.trips is None:
            return zeros(self.capacity, kind)
        widths = np.array(self.buckets.widths, np.int32)
        filled = (arguments.trips * widths).sum(dtype=jnp.int32)
        return empty(self.capacity, kind, "rows", *name, number=arguments.number, filled=filled)

    def _forward(
        self, arguments: RowArguments, keep_residuals: bool
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns (results, residuals) of all rows; residuals only if they are kept."""
        kernel = self.kernel
        saved = kernel.reverse.saved if keep_residuals else ()

        def block(width, lane, state):
            operands = self.operands_at(arguments, lane, width)
            out = run_lanes(kernel, arguments.consts, operands, width, keep_residuals)
            return [put(x, y, lane) for x, y in zip(state, [*out[0], *out[1]], strict=True)]

        made = [
            self.unfilled(arguments, (t.shape, t.dtype), "result", n)
            for n, t in enumerate(kernel.results)
        ]
        made += [self.unwritten(arguments, kind, "residual", n) for n, kind in enumerate(saved)]
        state = each_block(self.buckets, self.capacity, arguments.more, block, made)
        return state[: len(kernel.results)], state[len(kernel.results) :]


@dataclass(frozen=True, eq=False)
class RowReverse:
    """The reverse of a kernel that has run over rows.

    Attributes:
      function: that has run.
      arguments: it ran on.
      results: it returned.
      cotangents: of the results; None where there is none.
      moving_calls: bool[K] for each result, the calls to which something comes back through it.
    """

    function: RowFunction
    arguments: RowArguments
    results: Sequence[jax.Array]
    cotangents: Sequence[jax.Array | None]
    moving_calls: Sequence[jax.Array]

    def run(self, residuals: Sequence[jax.Array]) -> tuple[list[Any], list[Any]]:
        """Returns the cotangents of (consts, operands); None where there is none."""
        kernel = self.function.kernel
        back = kernel.reverse
        if any(map(self.has_cotangent, back.refused)):
            KernelVjp(kernel, list(back.refused))  # raises the error of JAX
        moves = self._moving_rows()
        sums, of_consts = self._sweep(residuals, moves)
        of_operands: list[Array] = [None] * len(self.arguments.operands)
        for j, x in zip(self._moving, sums, strict=True):
            of_operands[j] = x if any(map(self.has_cotangent, back.flow[j])) else None
        return of_consts, of_operands

    def has_cotangent(self, result: int) -> bool:
        """Returns whether something comes back to a result."""
        return self.cotangents[result] is not None

    @property
    def _moving(self) -> list[int]:
        """The operands that have a cotangent."""
        return [j for j, t in enumerate(self.function.kernel.operands) if differentiable(t)]

    def _moving_rows(self) -> dict[Sources, jax.Array]:
        """Returns bool[R] for some results: which rows exist, of calls in which one of them moves.

        These are all sets of results that a block asks for, so that it reads each at once.
        """
        function, back = self.function, self.function.kernel.reverse
        exists = jnp.arange(function.capacity) < self.arguments.total
        wanted = [Sources([s]) for s in back.returned]
        wanted += [Sources(back.flow[j]) for j in self._moving]
        wanted += [Sources(s) for tap in back.taps for s in tap.sources]
        rows = {}
        for sources in dict.fromkeys(wanted):
            calls = [self.moving_calls[s] for s in sorted(sources) if self.has_cotangent(s)]
            if calls:
                moves = functools.reduce(jnp.logical_or, calls)
                rows[sources] = exists & moves[self.arguments.call]
            else:
                rows[sources] = jnp.zeros(function.capacity, bool)
        return rows

    def _cotangents_at(
        self, moves: Mapping[Sources, jax.Array], lane: Lane, width: int
    ) -> tuple[list[jax.Array | None], dict[int, jax.Array]]:
        """Returns (cotangents of results, bool[width]: where they exist, by result) of rows."""
        kernel = self.function.kernel
        cotangents: list[jax.Array | None] = [None] * len(self.cotangents)
        alive = {}
        for s in kernel.reverse.returned:
            has_cotangent, result = self.has_cotangent(s), kernel.results[s]
            alive[s] = slice_rows(moves[Sources([s])], lane, width)
            if has_cotangent:
                x = slice_rows(self.cotangents[s], lane, width)
            else:
                x = jnp.zeros((width, *result.shape), result.dtype)
            cotangents[s] = where_alive(broadcast_flags(alive[s], x), x)
        return cotangents, alive

    def _sweep(
        self, residuals: Sequence[jax.Array], moves: Mapping[Sources, jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array | None]]:
        """Returns (cotangents of the moving operands, those of the consts).

        What a block adds to the gradients of consts is added with the block, which is wide.
        """
        function, arguments = self.function, self.arguments
        back, moving = function.kernel.reverse, self._moving
        prepared = back.prepare(arguments.consts)
        taps = [t for t in back.taps if any(self.has_cotangent(s) for x in t.sources for s in x)]
        tapped_lanes = self._lanes(residuals, moves)
        stand_ins = list(map(tapped_lanes.stand_in, taps))

        def block(width, lane, state):
            sums, gradients = list(state[0]), state[1]
            operands = function.operands_at(arguments, lane, width)
            results = [slice_rows(x, lane, width) for x in self.results]
            saved = [slice_rows(x, lane, width) for x in residuals]
            cotangents, alive = self._cotangents_at(moves, lane, width)
            consts = arguments.consts
            sent, rows = reverse_lanes(
                back, consts, prepared, operands, results, saved, cotangents, alive, width
            )
            for k, (j, x) in enumerate(zip(moving, sent, strict=True)):
                if not any(map(self.has_cotangent, back.flow[j])):
                    continue
                flags = _any_of(moves, back.flow[j], lane, width)
                x = where_alive(broadcast_flags(flags, x), x)
                if function.by_row[j]:
                    sums[k] = put(sums[k], x, lane)
                else:
                    sums[k] = sums[k].at[slice_rows(arguments.call, lane, width)].add(x)
            lanes = replace(
                tapped_lanes,
                operands=lambda *_: operands,
                cotangents=lambda tap, *_: [rows[c] for c in tap.cotangents],
            )
            for tap, stand_in in zip(taps, stand_ins, strict=True):
                gradients = lanes.add_block(tap, stand_in, width, lane, gradients)
            return sums, gradients

        capacity = function.capacity
        sums = [
            function.unfilled(arguments, (x.shape[1:], x.dtype), "sum", j)
            if function.by_row[j]
            else jnp.zeros_like(x)
            for j, x in ((j, arguments.operands[j]) for j in moving)
        ]
        gradients: list[jax.Array | None] = [None] * function.kernel.num_consts
        for c in dict.fromkeys(c for tap in taps for c in tap.consts):
            gradients[c] = jnp.zeros(*function.kernel.const_kinds[c])
        return each_block(function.buckets, capacity, arguments.more, block, (sums, gradients))

    def _lanes(self, residuals: Sequence[jax.Array], moves: Mapping[Sources, jax.Array]) -> Lanes:
        """Returns the lanes of which the gradients of consts are added up."""
        function, arguments = self.function, self.arguments
        return Lanes(
            function.kernel,
            arguments.consts,
            residuals,
            functools.partial(function.operands_at, arguments),
            functools.partial(_any_of, moves),
            function.buckets,
            function.capacity,
            arguments.more,
        )


def _any_of(
    moves: Mapping[Sources, jax.Array], sources: Iterable[int], lane: Lane, width: int
) -> jax.Array:
    """Returns bool[width]: the rows to which something comes back through one of some results."""
    return slice_rows(moves[Sources(sources)], lane, width)
