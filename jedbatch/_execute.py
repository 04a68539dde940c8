"""Running a program: one XLA program for every topology.

The table of a program is data, so XLA compiles once per signature. The arenas are the carry
of a loop over batches, and XLA updates them in place only as long as they never pass through
the result of a conditional. What to run is therefore chosen by loops whose trip counts are
read from the table:

    for each stretch (kernel and width, first lane, number of chunks):
        for each kernel and width:      # as many trips as the stretch has chunks, or none
            gather operands, run the kernel under vmap, write consecutive rows

Differentiating such a loop with JAX costs a copy of the arenas per step. The program is one
`jax.custom_vjp` instead, whose reverse walks the batches backwards: it sums up the cotangent
rows of each value's readers, runs the kernel's reverse, writes a row per operand. There is no
scatter in it, and sums are always taken in the same order. Weight gradients follow after the
sweep, from all lanes at once (see `_cells`).

There are two executors. `fused` is the loop above as one program. `dispatch` calls the same
chunks one by one from Python, each its own small XLA program with donated arenas: slower on a
CPU, easier to debug, and the same results.

Source: ED-Batch for batches over contiguous arenas; the forms of the loop were measured.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._cells import differentiable
from jedbatch._cotangents import ReverseSignature
from jedbatch._jaxpr import has_gradient
from jedbatch._layout import BLOCKS, COARSE, NUM_WIDTHS
from jedbatch._program import Signature, TableForm

GROUP = 4  # loops in a row before they are nested


def row(form: TableForm, table: Any, name: tuple, *index: int, start: Any = 0, size: int = 0):
    """`table[name][*index, start : start + size]`; to the end of the row without a size."""
    offset, shape = form.places[name]
    stride = math.prod(shape)
    for i, extent in zip(index, shape, strict=False):
        stride //= extent
        offset = offset + i * stride
    return cut(table, offset + start, size or shape[-1])


def take(arena: Any, rows: Any) -> Any:
    """Rows of an arena, known to exist."""
    return arena.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


def cut(arena: Any, start: Any, size: int) -> Any:
    """Consecutive rows of an arena."""
    return lax.dynamic_slice_in_dim(arena, start, size, allow_negative_indices=False)


def put(arena: Any, rows: Any, start: Any) -> Any:
    """The arena with consecutive rows replaced."""
    rows = rows.astype(arena.dtype)
    return lax.dynamic_update_slice_in_dim(arena, rows, start, 0, allow_negative_indices=False)


def isolated(lane: Any, write: Callable, state: Any) -> Any:
    """`write(lane, state)` in a loop of its own, of one trip.

    Otherwise XLA fuses reading rows with writing them and copies the arena to be able to.
    """

    def once(carry):
        at, state = carry
        return at + 1, write(at, state)

    return lax.while_loop(lambda carry: carry[0] == lane, once, (lane, state))[1]


def empty(rows: int, kind: tuple[tuple[int, ...], Any]) -> Any:
    """An arena of zeros."""
    shape, dtype = kind
    return jnp.zeros((rows, *shape), dtype)


class Forward:
    """The forward half of a program.

    Its state is `(arenas, saved)`: the rows of every value, and for each kernel the rows its
    reverse cannot read again, if `saving`.
    """

    def __init__(self, signature: Signature, saving: bool):
        self.signature = signature
        self.saving = saving

    def start(self, inputs: Sequence[Any]) -> Any:
        """The state before the first batch."""
        signature = self.signature
        arenas = []
        for rows, kind, given in zip(signature.rows, signature.arenas, inputs, strict=True):
            fresh = empty(rows - len(given), kind)
            arenas.append(jnp.concatenate([given, fresh]) if len(given) else fresh)
        saved = []
        if self.saving:
            for kernel, lanes in zip(signature.kernels, signature.lanes, strict=True):
                saved.append(tuple(empty(lanes, kind) for kind in kernel.reverse.saved))
        return tuple(arenas), tuple(saved)

    def operands(self, k: int, table: Any, arenas: Any, lane: Any, width: int, wanted=None):
        """Operands of `width` lanes of kernel k; None in place of those not wanted."""
        signature = self.signature
        found = []
        for j, t in enumerate(signature.kernels[k].operands):
            rows = row(signature.form, table, ("operands", k), j, start=lane, size=width)
            arena = arenas[signature.arena(t)]
            found.append(take(arena, rows) if wanted is None or j in wanted else None)
        return found

    def chunk(self, k: int, width: int, consts: Any, table: Any, state: Any, lane: Any) -> Any:
        """Runs `width` lanes of kernel k, from `lane` on."""
        signature = self.signature
        kernel = signature.kernels[k]
        operands = self.operands(k, table, state[0], lane, width)

        def write(lane, state):
            arenas, saved = list(state[0]), list(state[1])
            if self.saving:
                save = jax.vmap(kernel.reverse.save, in_axes=(None, 0), axis_size=width)
                results, rows = save(consts[k], operands)
                saved[k] = tuple(
                    put(arena, x, lane) for arena, x in zip(saved[k], rows, strict=True)
                )
            else:
                run = jax.vmap(kernel.forward, in_axes=(None, 0), axis_size=width)
                results = run(consts[k], operands)
            for t, base, rows in zip(kernel.results, signature.bases[k], results, strict=True):
                a = signature.arena(t)
                arenas[a] = put(arenas[a], rows, base + lane)
            return tuple(arenas), tuple(saved)

        return isolated(lane, write, state)

    def finish(self, table: Any, state: Any) -> tuple[Any, ...]:
        """The rows returned from each arena."""
        form = self.signature.form
        return tuple(
            take(arena, row(form, table, ("outputs", a))) for a, arena in enumerate(state[0])
        )


class Reverse:
    """The reverse half of a program.

    Its state is `(cotangents, rooms)`: for each arena a row per operand of every lane; and for
    each kernel what was saved, which the rows that weight gradients are made of replace as the
    sweep goes.
    """

    def __init__(self, signature: ReverseSignature):
        self.signature = signature
        self.forward = Forward(signature.forward, saving=True)

    def start(self, outputs: Sequence[Any], saved: Any) -> Any:
        """The state before the first step; `outputs` are cotangents of the rows returned."""
        signature, forward = self.signature, self.signature.forward
        cotangents = []
        for a, (kind, given) in enumerate(zip(forward.arenas, outputs, strict=True)):
            if has_gradient(kind[1]):
                fresh = empty(signature.zero[a] + 1 - len(given), kind)
                cotangents.append(jnp.concatenate([given, fresh]) if len(given) else fresh)
            else:
                cotangents.append(None)
        rooms = [
            (*rows, *(empty(lanes, kind) for kind in kernel.reverse.extra))
            for kernel, lanes, rows in zip(forward.kernels, forward.lanes, saved, strict=True)
        ]
        return tuple(cotangents), tuple(rooms)

    def gather(self, name: tuple, table: Any, cotangents: Any, start: Any = 0, size: int = 0):
        """Sums of the cotangent rows listed in the columns of a table."""
        form = self.signature.form
        count, width = form.places[name][1]
        size = size or width
        if not count or not size:
            return jnp.zeros((size, *cotangents.shape[1:]), cotangents.dtype)
        columns = [
            take(cotangents, row(form, table, name, i, start=start, size=size))
            for i in range(count)
        ]
        return functools.reduce(jnp.add, columns)

    def chunk(self, k, width, consts, tables, arenas, state, lane):
        """Reverses `width` lanes of kernel k, from `lane` on."""
        signature, forward = self.signature, self.signature.forward
        kernel = forward.kernels[k]
        cotangents, rooms = state
        back = kernel.reverse
        operands = self.forward.operands(k, tables[0], arenas, lane, width, back.operands_read)
        results, given = [], []
        for s, t in enumerate(kernel.results):
            a = forward.arena(t)
            again = s in back.results_read
            results.append(cut(arenas[a], forward.bases[k][s] + lane, width) if again else None)
            name = ("readers", k, s)
            moving = differentiable(t)
            given.append(
                self.gather(name, tables[1], cotangents[a], lane, width) if moving else None
            )
        kept = [cut(rows, lane, width) for rows in rooms[k][: len(back.saved)]]

        def write(lane, state):
            cotangents, rooms = list(state[0]), list(state[1])
            run = jax.vmap(back.backward, in_axes=(None, 0, 0, 0, 0), axis_size=width)
            sent, rows = run(consts[k], operands, results, kept, given)
            inexact = [j for j, t in enumerate(kernel.operands) if differentiable(t)]
            for j, out in zip(inexact, sent, strict=True):
                a = forward.arena(kernel.operands[j])
                cotangents[a] = put(cotangents[a], out, signature.bases[k][j] + lane)
            mine = list(rooms[k])
            for room, x in zip(back.rooms, rows, strict=True):
                mine[room] = put(mine[room], x, lane)
            rooms[k] = tuple(mine)
            return tuple(cotangents), tuple(rooms)

        return isolated(lane, write, state)

    def sum_chunk(self, a: int, width: int, table: Any, state: Any, lane: Any) -> Any:
        """Computes `width` sums of cotangent rows of arena a, from `lane` on."""
        cotangents = list(state[0])
        rows = self.gather(("sums", a), table, cotangents[a], lane, width)
        cotangents[a] = put(cotangents[a], rows, self.signature.sum_bases[a] + lane)
        return tuple(cotangents), state[1]

    def inputs(self, table: Any, state: Any) -> tuple[Any, ...]:
        """Cotangents of the input rows of each arena; None where there are none."""
        return tuple(
            None if cotangents is None else self.gather(("input_readers", a), table, cotangents)
            for a, cotangents in enumerate(state[0])
        )

    def consts(self, consts: Any, tables: Any, arenas: Any, state: Any) -> list[list[Any]]:
        """Gradients of the consts of every kernel, from the rows the sweep left behind."""
        gradients = []
        for k, kernel in enumerate(self.signature.forward.kernels):
            total = [jnp.zeros(*kind) for kind in kernel.const_kinds]
            for tap in kernel.reverse.taps:
                total = self._tap(k, tap, consts[k], tables, arenas, state[1][k], total)
            gradients.append(total)
        return gradients

    def _tap(self, k, tap, consts, tables, arenas, rooms, total):
        """Adds what one tapped operation contributes to the gradients of its consts."""
        forward, form = self.signature.forward, self.signature.form
        back = forward.kernels[k].reverse
        saved = rooms[: len(back.saved)]

        def rows_of(lane, width):
            operands = self.forward.operands(k, tables[0], arenas, lane, width)
            kept = [cut(rows, lane, width) for rows in saved]
            return jax.vmap(tap.rows, axis_size=width)(operands, kept)

        def block(width, lane, total):
            rows = rows_of(lane, width)
            if not tap.linear:  # lanes that never ran hold zeros; the first lane will do
                used = row(form, tables[1], ("used", k))
                live = lane + jnp.arange(width) < used
                first = rows_of(0, 1)
                rows = [
                    jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, y)
                    for x, y in zip(rows, first, strict=True)
                ]
            given = [cut(rooms[back.rooms[c]], lane, width) for c in tap.cotangents]
            total = list(total)
            for c, gradient in zip(tap.consts, tap.gradient(consts, rows, given), strict=True):
                total[c] = total[c] + gradient
            return total

        lanes = forward.lanes[k]
        if tap.look_up:
            return block(lanes, 0, total)
        trips = row(form, tables[1], ("blocks", k))
        state = (total, jnp.int32(0))
        for i, width in reversed([(i, w) for i, w in enumerate(BLOCKS.widths) if w <= lanes]):
            state = lax.fori_loop(
                0,
                trips[i],
                lambda _, s, width=width: (block(width, s[1], s[0]), s[1] + width),
                state,
            )
        return state[0]


# --- fused ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Body:
    """What runs the chunks of one kernel and width.

    Attributes:
      kind: number in the table.
      width: lanes of a chunk.
      chunk: `chunk(width, state, lane)` runs one.
      backwards: whether the last chunk of a stretch comes first.
    """

    kind: int
    width: int
    chunk: Callable
    backwards: bool = False


def bodies_of(kind: int, widths: Sequence[int], chunk: Callable, backwards=False) -> list[Body]:
    """What runs the chunks of a kernel."""
    numbered = enumerate(widths, kind * NUM_WIDTHS)
    return [Body(number, width, chunk, backwards) for number, width in numbered]


def choose(bodies: Sequence[Body], carry: Any) -> Any:
    """Runs the chunks of one stretch, by loops of which all but one make no trips.

    `carry` is (chunks run, stretch, state). A `lax.switch` would copy every array that its
    branches return. XLA runs short sequences of operations one by one and long ones on several
    threads, which costs more than these operations take, so a loop is all there is for each body:
    it counts on where the last one stopped.
    """
    size = 1 if len(bodies) <= GROUP else math.ceil(len(bodies) / GROUP)
    for i in range(0, len(bodies), size):
        group = bodies[i : i + size]
        if len(group) == 1:
            carry = run_chunks(group[0], carry)
            continue
        first, last = group[0].kind, group[-1].kind

        def inside(carry, first=first, last=last):
            done, (kind, _, _), _ = carry
            return (done == 0) & (kind >= first) & (kind <= last)

        carry = lax.while_loop(inside, functools.partial(choose, group), carry)
    return carry


def run_chunks(body: Body, carry: Any) -> Any:
    """Runs the chunks of a stretch if it is of the kind of the body."""

    def more(carry):
        done, (kind, _, trips), _ = carry
        return (kind == body.kind) & (done < trips)

    def run(carry):
        done, stretch, state = carry
        _, lane, trips = stretch
        lane += body.width * (trips - 1 - done if body.backwards else done)
        state = lax.optimization_barrier(body.chunk(body.width, state, lane))
        return done + 1, stretch, state

    return lax.while_loop(more, run, carry)


def sweep(form: TableForm, table: Any, bodies: Sequence[Body], state: Any) -> Any:
    """Runs the stretches of a table."""

    def stretch(i, state):
        offset, (_, columns) = form.places["stretches",]
        found = cut(table, offset + i * columns, columns)
        return choose(bodies, (jnp.int32(0), found, state))[2]

    if not bodies:  # nothing to do but to return inputs
        return state
    return lax.fori_loop(0, row(form, table, ("num_stretches",))[0], stretch, state)


def fused_forward(forward: Forward, consts: Any, inputs: Any, table: Any) -> tuple[Any, Any]:
    """(rows returned from each arena, state after the last batch)."""
    signature = forward.signature

    def chunk(k):
        return lambda width, state, lane: forward.chunk(k, width, consts, table, state, lane)

    bodies = [
        b for k, widths in enumerate(signature.widths) for b in bodies_of(k, widths, chunk(k))
    ]
    state = sweep(signature.form, table, bodies, forward.start(inputs))
    return forward.finish(table, state), state


def fused_reverse(reverse: Reverse, consts: Any, tables: Any, values: Any, outputs: Any):
    """(gradients of the consts of each kernel, cotangents of the inputs of each arena)."""
    arenas, saved = values
    signature, forward = reverse.signature, reverse.signature.forward

    def chunk(k):
        return lambda width, state, lane: reverse.chunk(
            k, width, consts, tables, arenas, state, lane
        )

    def sums(a):
        return lambda width, state, lane: reverse.sum_chunk(a, width, tables[1], state, lane)

    bodies = [
        b for k, widths in enumerate(forward.widths) for b in bodies_of(k, widths, chunk(k), True)
    ]
    for a, rows in enumerate(signature.sums):
        widths = [w for w in COARSE.widths if w <= rows]
        bodies += bodies_of(len(forward.kernels) + a, widths, sums(a), True)
    state = sweep(signature.form, tables[1], bodies, reverse.start(outputs, saved))
    gradients = reverse.consts(consts, tables, arenas, state)
    return gradients, reverse.inputs(tables[1], state)


# --- executors --------------------------------------------------------------------------


class Fused:
    """Each half of a program as one XLA program."""

    name = "fused"

    def __init__(self, prepare: Callable, signature: Signature, compiled: Callable[[str], None]):
        self.prepare = prepare
        self.signature = signature
        self.compiled = compiled
        self.infer = jax.jit(self._infer)
        self.save = jax.jit(self._save)
        self.reverse = jax.jit(self._reverse, static_argnums=0)

    def _infer(self, shared, inputs, table):
        self.compiled("inference")
        forward = Forward(self.signature, saving=False)
        return fused_forward(forward, self.prepare(shared), inputs, table)[0]

    def _save(self, shared, inputs, table):
        self.compiled("training")
        forward = Forward(self.signature, saving=True)
        return fused_forward(forward, self.prepare(shared), inputs, table)

    def _reverse(self, signature, shared, tables, values, outputs):
        self.compiled("reverse")
        consts, pull_back = jax.vjp(self.prepare, shared)
        gradients, inputs = fused_reverse(Reverse(signature), consts, tables, values, outputs)
        return pull_back(_cotangents_like(consts, gradients))[0], inputs


class Dispatch:
    """Every chunk an XLA program of its own, called from Python; for debugging."""

    name = "dispatch"

    def __init__(self, prepare: Callable, signature: Signature, compiled: Callable[[str], None]):
        self.signature = signature
        self.compiled = compiled
        self.prepare = prepare
        self._jitted: dict[Any, Callable] = {}

    def _call(self, key: Any, function: Callable, *args: Any, donate: Any = ()) -> Any:
        if key not in self._jitted:

            def counted(*args):
                self.compiled("chunk")
                return function(*args)

            self._jitted[key] = jax.jit(counted, donate_argnums=donate)
        return self._jitted[key](*args)

    def infer(self, shared, inputs, table):
        """The rows returned from each arena."""
        return self._run(Forward(self.signature, saving=False), shared, inputs, table)[0]

    def save(self, shared, inputs, table):
        """The rows returned from each arena, and the state after the last batch."""
        return self._run(Forward(self.signature, saving=True), shared, inputs, table)

    def _run(self, forward, shared, inputs, table):
        saving = forward.saving
        consts = self._call("prepare", self.prepare, shared)
        state = self._call(("start", saving), forward.start, inputs)
        for k, width, lane in _host_chunks(self.signature, self.signature.form, table):

            def chunk(consts_k, table, state, lane, k=k, width=width):
                return forward.chunk(k, width, {k: consts_k}, table, state, lane)

            key = ("chunk", saving, k, width)
            state = self._call(key, chunk, consts[k], table, state, lane, donate=2)
        return self._call(("finish", saving), forward.finish, table, state), state

    def reverse(self, signature, shared, tables, values, outputs):
        """Cotangents of the shared values and of the inputs."""
        reverse = Reverse(signature)
        kinds = len(signature.forward.kernels)
        consts = self._call("prepare", self.prepare, shared)
        arenas, saved = values
        state = self._call(("start", signature), reverse.start, outputs, saved)
        for k, width, lane in _host_chunks(signature.forward, signature.form, tables[1], -1):
            if k < kinds:

                def chunk(consts_k, tables, arenas, state, lane, k=k, width=width):
                    return reverse.chunk(k, width, {k: consts_k}, tables, arenas, state, lane)

                key = ("reverse", signature, k, width)
                args = (consts[k], tables, arenas, state, lane)
                state = self._call(key, chunk, *args, donate=3)
            else:

                def sums(table, state, lane, a=k - kinds, width=width):
                    return reverse.sum_chunk(a, width, table, state, lane)

                key = ("sums", signature, k, width)
                state = self._call(key, sums, tables[1], state, lane, donate=1)

        def finish(shared, tables, arenas, state):
            consts, pull_back = jax.vjp(self.prepare, shared)
            gradients = reverse.consts(consts, tables, arenas, state)
            pulled = pull_back(_cotangents_like(consts, gradients))[0]
            return pulled, reverse.inputs(tables[1], state)

        return self._call(("finish", signature), finish, shared, tables, arenas, state)


def _host_chunks(forward: Signature, form: TableForm, table: Any, sign: int = 1) -> Any:
    """Yields (kind, width, first lane) of every chunk of a table, in order; see `sweep`."""
    table = np.asarray(table)
    count = int(form.view(table, "num_stretches")[0])
    for kind, lane, trips in form.view(table, "stretches")[:count].tolist():
        k, i = divmod(kind, NUM_WIDTHS)
        width = (forward.kernels[k].ladder if k < len(forward.kernels) else COARSE).widths[i]
        for step in range(trips)[::sign]:
            yield k, width, np.int32(lane + step * width)


def _cotangents_like(values: Any, cotangents: Any) -> Any:
    """The cotangents, with what JAX wants in place of those of integers."""
    return jax.tree.map(
        lambda x, ct: ct if has_gradient(x.dtype) else np.zeros(x.shape, jax.dtypes.float0),
        values,
        cotangents,
    )


EXECUTORS = {"fused": Fused, "dispatch": Dispatch}


def differentiable_run(executor_of: Callable, reverse_of: Callable) -> Callable:
    """`run(shared, inputs, table, reverse_table)` with the reverse rule of the program.

    `executor_of(values)` is who runs it on these values, which may be traced or not;
    `reverse_of(reverse_table)` gives the reverse signature and table when they are needed.
    """

    @jax.custom_vjp
    def run(shared, inputs, table, reverse_table):
        given = shared, inputs, table
        return executor_of(given).infer(*given)

    def forwards(shared, inputs, table, reverse_table):
        given = shared, inputs, table
        outputs, values = executor_of(given).save(*given)
        return outputs, (shared, table, reverse_table, values)

    def backwards(residuals, outputs):
        shared, table, reverse_table, values = residuals
        signature, reverse_table = reverse_of(reverse_table)
        outputs = tuple(
            x if has_gradient(kind[1]) else None
            for x, kind in zip(outputs, signature.forward.arenas, strict=True)
        )
        tables = (table, reverse_table)
        executor = executor_of((shared, tables, values, outputs))
        of_shared, of_inputs = executor.reverse(signature, shared, tables, values, outputs)
        return [x if has_gradient(x.dtype) else None for x in of_shared], of_inputs, None, None

    run.defvjp(forwards, backwards)
    return run


def median_seconds(functions: Sequence[Any], repeat: int) -> np.ndarray:
    """float[F], the median time of each function, run in turns and warmed up."""
    times = np.zeros((repeat, len(functions)))
    for row in [np.zeros(len(functions)), *times]:
        for i, run in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(run())
            row[i] = time.perf_counter() - start
    return np.median(times, axis=0)
