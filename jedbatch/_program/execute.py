"""Running a program: one XLA program for every topology.

The table of a program is data, so XLA compiles once per signature. The arenas are the carry
of a loop over batches, which XLA updates in place (see `_program.interpreter` for how it finds the
next):

    for each run (kernel and width, first lane, number of chunks):
        for each chunk of it:
            read operands, run the kernel under vmap, write consecutive rows

A kernel may have two bodies for each width: one gathers its operands row by row, the other reads
those as slices that often are.

Differentiating such a loop with JAX costs a copy of the arenas per step. The program is one
primitive instead (see `_jaxpr.derivatives`), whose reverse walks the batches backwards: it sums up
the cotangent rows of each value's readers, runs the kernel's reverse, writes a row per operand.
There is no scatter in it, and sums are always taken in the same order. Weight gradients follow
after the sweep, from all lanes at once (see `_kernel.kernel`).

Source: ED-Batch for batches over contiguous arenas; the forms of the loop were measured.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.unknown_numbers import unknown
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.vjp import differentiable
from jedbatch._layout.access import GATHER, Reading, extent
from jedbatch._program.arenas import (
    broadcast_flags,
    empty,
    number_at,
    put,
    read,
    row,
    slice_rows,
    take,
)
from jedbatch._program.interpreter import bodies_of, sweep
from jedbatch._program.lanes import Lanes, reverse_lanes, run_lanes
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.rows import Read, Write, after, put_rows, take_rows
from jedbatch._program.signature import Signature
from jedbatch._program.stopped import has_bounds
from jedbatch._support.types import Array, PyTree


class Forward:
    """The forward half of a program.

    Its state is `(arenas, saved)`: the rows of every value, and for each kernel the rows its
    reverse cannot read again, if `saving`; if not, and if loops have a bound, for each kernel that
    has such loops bool[lanes], in which lanes one was stopped.
    """

    def __init__(self, signature: Signature, saving: bool):
        self.signature = signature
        self.saving = saving

    def start(self, inputs: Sequence[Any], used: Sequence[Any] | None = None) -> PyTree:
        """The state before the first batch, in `used` arenas, if there are any, or new ones."""
        signature = self.signature
        arenas = []
        if used is not None:
            arenas = [put(x, input_rows, 0) for x, input_rows in zip(used, inputs, strict=True)]
        else:
            arenas = self._arenas()
            for a, input_rows in enumerate(inputs):
                if len(input_rows):
                    arenas[a] = put(arenas[a], input_rows, 0)
        saved: list[tuple[Array, ...]] = []
        if self.saving:
            for k, kernel in enumerate(signature.kernels):
                saved.append(self.lanes_of(k, "saved", kernel.reverse.saved))
        elif has_bounds(signature):
            for kernel, lanes in zip(signature.kernels, signature.lanes, strict=True):
                saved.append((jnp.zeros(lanes, bool),) if kernel.is_bounded else ())
        return tuple(arenas), tuple(saved)

    def _arenas(self) -> list[Array]:
        kinds = zip(self.signature.rows, self.signature.arenas, strict=True)
        return [empty(rows, kind, "values", a) for a, (rows, kind) in enumerate(kinds)]

    def lanes_of(self, k: int, name: str, kinds: Sequence[Kind]) -> tuple[Array, ...]:
        """Arrays with a row for each lane of kernel k."""
        lanes = self.signature.lanes[k]
        return tuple(empty(lanes, kind, name, k, i) for i, kind in enumerate(kinds))

    def resume(self, inputs: Sequence[Any], state: PyTree) -> PyTree:
        """A state with input rows written again, where there are any."""
        arenas = zip(state[0], inputs, strict=True)
        return tuple(put(x, rows, 0) if len(rows) else x for x, rows in arenas), state[1]

    def moved(self, before: Signature, state: PyTree) -> PyTree:
        """The state of a smaller program with the same kernels, as one of this program."""
        signature = self.signature
        arenas = self._arenas()
        for a, (kind, rows) in enumerate(zip(before.arenas, before.inputs, strict=True)):
            new = signature.arena_ids[kind]
            arenas[new] = put(arenas[new], slice_rows(state[0][a], 0, rows), 0)
        saved = list(self.start([x[:0] for x in arenas])[1])
        for k, (kernel, lanes) in enumerate(zip(before.kernels, before.lanes, strict=True)):
            new = signature.places[kernel]
            for s, t in enumerate(kernel.results):
                rows = slice_rows(state[0][before.arena(t)], before.bases[k][s], lanes)
                a = signature.arena(t)
                arenas[a] = put(arenas[a], rows, signature.bases[new][s])
            if self.saving:
                pairs = zip(saved[new], state[1][k], strict=True)
                saved[new] = tuple(put(room, rows, 0) for room, rows in pairs)
        return tuple(arenas), tuple(saved)

    def operands(
        self,
        k: int,
        table: Array,
        arenas: PyTree,
        lane: Array,
        width: int,
        reading: Reading | None = None,
        wanted: Collection[int] | None = None,
    ) -> list[Array]:
        """Operands of `width` lanes of kernel k, and lists of them (see `Kernel.parameters`).

        None in place of those not wanted.
        """
        signature = self.signature
        kernel, form = signature.kernels[k], signature.form
        operand_rows: list[Any] = [None] * len(kernel.parameters)
        reads: dict[int, Read] = {}
        for p, parameter in enumerate(kernel.parameters):
            j, length, t = parameter[:3]
            if wanted is not None and p not in wanted:
                continue
            a, name = signature.arena(t), ("operands", k)
            mode = reading[j] if reading and length is None else GATHER
            if mode == GATHER or extent(mode, width) > len(arenas[a]):  # never runs
                lanes, is_sum = signature.lanes[k], parameter.is_sum
                reads[p] = Read(a, form.offset(name, j), lanes, length, is_sum, may_lack=is_sum)
            else:
                first = row(form, table, name, j, start=lane, size=1)[0]
                operand_rows[p] = read(arenas[a], first, mode, width)
        taken = take_rows(signature.target, table, lane, arenas, list(reads.values()), width)
        for p, x in zip(reads, taken, strict=True):
            operand_rows[p] = x
        return operand_rows

    def chunk(
        self,
        k: int,
        width: int,
        consts: PyTree,
        table: Array,
        state: PyTree,
        lane: Array,
        reading: Reading | None = None,
    ) -> PyTree:
        """Runs `width` lanes of kernel k, from `lane` on."""
        signature = self.signature
        kernel = signature.kernels[k]
        operands = after(signature.target, self.operands(k, table, state[0], lane, width, reading))
        results, residuals = run_lanes(kernel, consts[k], operands, width, self.saving)
        arenas, saved = list(state[0]), list(state[1])
        arrays, rows, writes = list(arenas), list(results), self.results(k)
        if self.saving:
            arrays += saved[k]
            rows += residuals
            writes += map(Write, range(len(arenas), len(arrays)))
        arrays = put_rows(signature.target, table, lane, arrays, rows, writes)
        if self.saving:
            saved[k] = tuple(arrays[len(arenas) :])
        elif kernel.is_bounded:
            saved[k] = (put(saved[k][0], residuals[0], lane),)
        return tuple(arrays[: len(arenas)]), tuple(saved)

    def results(self, k: int) -> list[Write]:
        """Where chunks of kernel k write their results."""
        signature = self.signature
        ids = list(map(signature.arena, signature.kernels[k].results))
        if signature.shared_rows is None:
            return [Write(a, base) for a, base in zip(ids, signature.bases[k], strict=True)]
        offsets = [signature.form.offset(("results", k), s) for s in range(len(ids))]
        return [Write(a, offset=offset) for a, offset in zip(ids, offsets, strict=True)]

    def finish(self, table: Array, state: PyTree) -> tuple[Any, ...]:
        """The rows returned from each arena."""
        signature, returned = self.signature, []
        for a, count in enumerate(signature.outputs):
            read = Read(a, signature.form.offset(("outputs", a)))
            returned += take_rows(signature.target, table, 0, state[0], [read], count)
        return tuple(returned)


def rooms_for_more(kernel: Kernel) -> Sequence[Kind]:
    """(shape, dtype) of the rows of a kernel for which there is no room over what was saved."""
    return () if kernel.reverse.is_leaf else kernel.reverse.extra


class Backward:
    """The reverse half of a program.

    Its state is `(cotangents, rooms, marks)`: for each arena the rows that operands send back; for
    each kernel what was saved, which the rows that weight gradients are made of replace as the
    sweep goes; and, if it marks what exists, for each arena bool[rows] and for each kernel
    bool[lanes, results], else nothing. Its tables are that of the forward half, its own, and, if
    the program tells results apart, int32[1]: which of them are differentiated, as bits; if it
    marks what exists, for each arena bool[outputs].
    """

    def __init__(self, signature: ReverseSignature):
        self.signature = signature
        self.forward = Forward(signature.forward, saving=True)

    def start(self, outputs: Sequence[Array], saved: Any, exist: Any = None) -> PyTree:
        """The state before the first step; `outputs` are cotangents of the rows returned.

        `exist` is the last table, if the program marks what exists.
        """
        signature, forward = self.signature, self.signature.forward
        cotangents = []
        for a, (kind, output_rows) in enumerate(zip(forward.arenas, outputs, strict=True)):
            if signature.has_cotangents(a):
                rows = empty(signature.zero[a] + 1, kind, "cotangents", a)
                rows = put(rows, jnp.zeros((1, *rows.shape[1:]), rows.dtype), signature.zero[a])
                cotangents.append(put(rows, output_rows, 0) if len(output_rows) else rows)
            else:
                cotangents.append(None)
        rooms = [
            (*rows, *self.forward.lanes_of(k, "room", rooms_for_more(kernel)))
            for k, (kernel, rows) in enumerate(zip(forward.kernels, saved, strict=True))
        ]
        return tuple(cotangents), tuple(rooms), self._marks(exist) if signature.marks else ()

    def _marks(self, exist: Any) -> PyTree:
        """Marks of the cotangents that exist before the first step."""
        signature, forward = self.signature, self.signature.forward
        of_rows = []
        for a, flags in enumerate(exist):
            fresh = jnp.zeros(signature.zero[a] + 1 - len(flags), bool)
            there = signature.has_cotangents(a)
            of_rows.append(jnp.concatenate([flags, fresh]) if there else None)
        of_lanes = [
            jnp.zeros((lanes, len(kernel.results)), bool)
            for kernel, lanes in zip(forward.kernels, forward.lanes, strict=True)
        ]
        return tuple(of_rows), tuple(of_lanes)

    def gather(
        self,
        names: Sequence[tuple[tuple, int]],
        table: Array,
        cotangents: PyTree,
        start: Array = 0,
        size: int = 0,
    ) -> list[Array]:
        """Sums of the cotangent rows listed in the columns of a table, for each (name, arena)."""
        form = self.signature.form
        sums: list[Any] = [None] * len(names)
        reads: dict[int, Read] = {}
        for i, (name, a) in enumerate(names):
            count, width = form.places[name][1]
            if count and (size or width):
                reads[i] = Read(a, form.offset(name), width, count, is_sum=True)
            else:
                shape = size or width, *cotangents[a].shape[1:]
                sums[i] = jnp.zeros(shape, cotangents[a].dtype)
        widths = {size or form.places[names[i][0]][1][1] for i in reads}
        for width in widths:  # one, but of all rows of several tables
            here = [i for i in reads if width == (size or form.places[names[i][0]][1][1])]
            target = self.signature.forward.target
            taken = take_rows(target, table, start, cotangents, [reads[i] for i in here], width)
            for i, x in zip(here, taken, strict=True):
                sums[i] = x
        return sums

    def prepare(self, consts: Sequence[Array]) -> list[tuple[Any, Any]]:
        """For each kernel its consts, and what its reverse makes of them."""
        kernels = self.signature.forward.kernels
        return [(c, k.reverse.prepare(c)) for k, c in zip(kernels, consts, strict=True)]

    def alive(
        self, k: int, s: int, tables: PyTree, state: PyTree, start: Array = 0, size: int = 0
    ) -> PyTree:
        """bool[size]: whether result s of lanes of kernel k has a cotangent."""
        signature, form = self.signature, self.signature.form
        a, name = (
            signature.forward.arena(signature.forward.kernels[k].results[s]),
            ("readers", k, s),
        )
        if signature.marks:
            return self.marked(name, tables[1], state[2][0][a], start, size)
        if signature.tells:
            leads_to = row(form, tables[1], ("leads_to", k, s), start=start, size=size)
            return (leads_to & tables[2]) != 0
        return row(form, tables[1], name, 0, start=start, size=size) != signature.zero[a]

    def marked(
        self, name: tuple, table: Array, marks: Any, start: Array = 0, size: int = 0
    ) -> PyTree:
        """Whether any of the rows listed in the columns of a table is marked."""
        form = self.signature.form
        columns = [
            take(marks, row(form, table, name, i, start=start, size=size))
            for i in range(form.places[name][1][0])
        ]
        return functools.reduce(jnp.logical_or, columns)

    def alive_by(
        self,
        k: int,
        tables: PyTree,
        state: PyTree,
        sources: Collection[int],
        start: Array,
        size: int,
    ) -> PyTree:
        """bool[size]: whether any of some results had a cotangent, after the last step."""
        size = size or self.signature.forward.lanes[k]
        if self.signature.marks and not self.signature.forward.kernels[k].reverse.is_leaf:
            marks = slice_rows(state[2][1][k], start, size)
            return marks[:, jnp.array(sorted(sources), int)].any(axis=1)
        flags = [self.alive(k, s, tables, state, start, size) for s in sorted(sources)]
        return functools.reduce(jnp.logical_or, flags, jnp.zeros(size, bool))

    def chunk(self, k, width, consts, tables, arenas, state, lane):
        """Reverses `width` lanes of kernel k, from `lane` on; consts are prepared."""
        signature, forward = self.signature, self.signature.forward
        kernel = forward.kernels[k]
        cotangents, rooms, marks = state
        back = kernel.reverse
        operands = self.forward.operands(
            k, tables[0], arenas, lane, width, wanted=back.operands_read
        )
        ids = list(map(forward.arena, kernel.results))
        results: list[Any] = [None] * len(ids)
        for s in back.results_read:
            results[s] = slice_rows(arenas[ids[s]], forward.bases[k][s] + lane, width)
        given: list[Any] = [None] * len(ids)
        names = [(("readers", k, s), ids[s]) for s in sorted(back.returned)]
        sums = self.gather(names, tables[1], cotangents, lane, width)
        for s, x in zip(sorted(back.returned), sums, strict=True):
            given[s] = x
        kept = [slice_rows(rows, lane, width) for rows in rooms[k][: len(back.saved)]]
        alive = {
            s: self.alive(k, s, tables, state, lane, width)
            for s in back.returned
            if back.is_guarded or signature.tells or signature.marks
        }
        read = operands, results, kept, given, *([alive] if signature.marks else [])
        operands, results, kept, given = after(forward.target, read)[:4]
        const_values, prepared = consts[k]
        sent, rows = reverse_lanes(
            back, const_values, prepared, operands, results, kept, given, alive, width
        )

        none = jnp.zeros(width, bool)
        first_room = len(cotangents)
        first_mark = first_room + len(rooms[k])
        arrays = [*cotangents, *rooms[k]]
        writes = [Write(first_room + place) for place in back.rooms]
        written = list(rows)
        of_rows, of_lanes = marks or ((), ())
        if signature.marks:
            arrays += [*of_rows, of_lanes[k]]
            writes.append(Write(len(arrays) - 1))
            written.append(jnp.stack([alive.get(s, none) for s in range(len(ids))], axis=1))
        inexact = [p for p, x in enumerate(kernel.parameters) if differentiable(x.type)]
        for p, out in zip(inexact, sent, strict=True):
            parameter = kernel.parameters[p]
            place = self.sent(k, p)
            if not signature.has_cotangents(place.array):
                continue
            flags = functools.reduce(
                jnp.logical_or, [alive[s] for s in sorted(back.flow[p]) if s in alive], none
            )
            if (signature.tells or signature.marks) and back.flow[p]:
                out = where_alive(broadcast_flags(flags, out), out)  # else it is not read
            if parameter.num_rows > 1 and out is not None:
                out = out.reshape(-1, *out.shape[2:])
                flags = jnp.repeat(flags, parameter.num_rows)
            writes.append(place)
            written.append(out)
            if signature.marks:
                writes.append(place._replace(array=first_mark + place.array))
                written.append(flags)
        arrays = put_rows(forward.target, tables[1], lane, arrays, written, writes)
        rooms = list(rooms)
        rooms[k] = tuple(arrays[first_room:first_mark])
        if signature.marks:
            of_lanes = list(of_lanes)
            of_lanes[k] = arrays[-1]
            marks = tuple(arrays[first_mark:-1]), tuple(of_lanes)
        return tuple(arrays[:first_room]), tuple(rooms), marks

    def sent(self, k: int, p: int) -> Write:
        """Where chunks of kernel k write the cotangents of parameter p, if it has any."""
        signature = self.signature
        parameter = signature.forward.kernels[k].parameters[p]
        a = signature.forward.arena(parameter.type)
        if signature.sent is None:
            return Write(a, signature.bases[k][p], parameter.num_rows)
        return Write(a, offset=signature.form.offset(("sent", k), p))

    def sum_chunk(self, a: int, width: int, table: Array, state: PyTree, lane: Array) -> PyTree:
        """Computes `width` sums of cotangent rows of arena a, from `lane` on."""
        if not self.signature.has_cotangents(a):
            return state
        target = self.signature.forward.target
        cotangents, rooms, marks = state
        sums = self.gather([(("sums", a), a)], table, cotangents, lane, width)
        place = Write(a, self.signature.sum_bases[a])
        if self.signature.marks:
            flags = self.marked(("sums", a), table, marks[0][a], lane, width)
            of_rows = put_rows(target, table, lane, marks[0], [flags], [place])
            marks = tuple(of_rows), marks[1]
        cotangents = put_rows(target, table, lane, cotangents, after(target, sums), [place])
        return tuple(cotangents), rooms, marks

    def inputs(self, table: Array, state: PyTree) -> tuple[Any, ...]:
        """Cotangents of the input rows of each arena; None where there are none."""
        there = [a for a, cotangents in enumerate(state[0]) if cotangents is not None]
        sums = self.gather([(("input_readers", a), a) for a in there], table, state[0])
        by_arena = dict(zip(there, sums, strict=True))
        return tuple(map(by_arena.get, range(len(state[0]))))

    def consts(
        self, consts: PyTree, tables: PyTree, arenas: PyTree, state: PyTree
    ) -> tuple[list[list[Array]], list[list[Array]]]:
        """Gradients of the consts of every kernel, from the rows the sweep left behind.

        None for those that have none. And for each, bool[], whether it comes from any lane.
        """
        gradients, alive = [], []
        for k, kernel in enumerate(self.signature.forward.kernels):
            taps = kernel.reverse.taps
            sources: dict[int, set[int]] = {}
            for tap in taps:
                for c in tap.consts:
                    sources.setdefault(c, set()).update(*tap.sources)
            kinds = enumerate(kernel.const_kinds)
            total = [jnp.zeros(*kind) if c in sources else None for c, kind in kinds]
            if taps:
                lanes = self._lanes(k, consts[k], tables, arenas, state)
                total = lanes.add_gradients(total)
            gradients.append(total)
            flags = [
                self.alive_by(k, tables, state, sources[c], 0, 0).any() if c in sources else None
                for c in range(kernel.num_consts)
            ]
            alive.append(flags)
        return gradients, alive

    def _lanes(
        self, k: int, consts: PyTree, tables: PyTree, arenas: PyTree, state: PyTree
    ) -> Lanes:
        """Returns the lanes of kernel k, of which the sweep left rows behind."""
        forward = self.signature.forward
        kernel, target = forward.kernels[k], forward.target

        def echoed(tap, lane, width):
            results = [kernel.reverse.echoed[c] for c in tap.cotangents]
            names = [(("readers", k, s), forward.arena(kernel.results[s])) for s in results]
            return self.gather(names, tables[1], state[0], lane, width)

        place, (widths,) = self.signature.form.places["blocks", k]
        trips = [unknown(place + i) for i in range(widths)]
        return Lanes(
            kernel,
            consts,
            state[1][k],
            lambda lane, width: self.forward.operands(k, tables[0], arenas, lane, width),
            lambda sources, lane, width: self.alive_by(k, tables, state, sources, lane, width),
            kernel.blocks if forward.lanes[k] > target.straight_rows else None,
            forward.lanes[k],
            lambda i, done: done < number_at(tables[1], trips[i]),
            echoed if kernel.reverse.is_leaf else None,
        )


# --- all of it as one program --------------------------------------------------------------


def fused_forward(
    forward: Forward, consts: PyTree, inputs: PyTree, table: Array, used: Any = None
) -> tuple[PyTree, PyTree]:
    """(rows returned from each arena, state after the last batch)."""
    return advance(forward, consts, table, forward.start(inputs, used))


def advance(forward: Forward, consts: PyTree, table: Array, state: PyTree) -> tuple[PyTree, PyTree]:
    """Runs the batches of a table: (rows returned from each arena, state after the last)."""
    signature = forward.signature

    def chunk(k, reading):
        return lambda width, state, lane: forward.chunk(
            k, width, consts, table, state, lane, reading
        )

    bodies = [
        b
        for number, (k, reading) in enumerate(signature.bodies)
        for b in bodies_of(number, signature.widths[k], chunk(k, reading))
    ]
    state = sweep(signature.form, table, bodies, signature.instructions, state)
    return forward.finish(table, state), state


def fused_reverse(
    reverse: Backward, consts: PyTree, tables: PyTree, values: PyTree, outputs: PyTree
):
    """(gradients of the consts of each kernel, which exist, cotangents of inputs by arena)."""
    arenas, saved = values
    signature, forward = reverse.signature, reverse.signature.forward
    prepared = reverse.prepare(consts)

    def chunk(k):
        return lambda width, state, lane: reverse.chunk(
            k, width, prepared, tables, arenas, state, lane
        )

    def sums(a):
        return lambda width, state, lane: reverse.sum_chunk(a, width, tables[1], state, lane)

    runs = [*map(chunk, range(len(forward.kernels))), *map(sums, range(len(signature.sums)))]
    bodies = [
        b
        for kind, (widths, run) in enumerate(zip(signature.widths, runs, strict=True))
        for b in bodies_of(kind, widths, run, True)
    ]
    start = reverse.start(outputs, saved, tables[-1])
    state = sweep(signature.form, tables[1], bodies, signature.instructions, start)
    gradients, alive = reverse.consts(consts, tables, arenas, state)
    return gradients, alive, reverse.inputs(tables[1], state)
