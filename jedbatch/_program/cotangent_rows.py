"""In which rows the cotangents that operands send back are kept.

In reverse every operand of every lane sends a cotangent to the value it reads. Its row is written
when the lane runs backwards, and read when the node that made the value does. In small programs
every lane has rows of its own. Where these would be many, rows are used again as soon as they have
been read (see `_layout.allocator`): a chain needs those of two steps, whatever its length.
Cotangents of inputs, and those that leaves hand to shared values (look-ups of a table), wait until
the end.
"""

from dataclasses import dataclass

import numpy as np

from jedbatch._graph.paths import pointers
from jedbatch._jaxpr.storage import row_bytes
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.vjp import differentiable
from jedbatch._layout.allocator import allocate
from jedbatch._program.alive import Alive
from jedbatch._program.capacity import round_up
from jedbatch._program.placement import Placement
from jedbatch._program.signature import Signature

MIN_SHARED_BYTES = 1 << 23  # bytes of cotangents; for fewer, sharing rows saves less than it takes
ROW_TOLERANCE = 1.0  # of rows over those needed at a time, for which planning looks no further
MAX_SHARED_SHARE = 0.75  # the rows that are shared, as a part of those for all


@dataclass(frozen=True, eq=False)
class Sent:
    """Blocks of rows for the cotangents that batches send, if they share rows.

    Attributes:
      block: int64[S, parameters], the row in which each operand of each batch begins, or list of
        operands, counted from the first that is shared.
      rows: int64[...], rows shared in each arena of the program.
      own: int64[...], rows there would be in each if every lane had its own.
    """

    block: np.ndarray
    rows: np.ndarray
    own: np.ndarray

    @staticmethod
    def find(placed: Placement, signature: Signature, alive: Alive) -> "Sent":
        """Places the blocks: each is alive from the batch that writes it to the last that reads it.

        Batches run from the last to the first.
        """
        schedule, padded = placed.schedule, placed.layout.padded
        first = np.arange(len(schedule))[::-1]
        arena, lengths, last = _last_reads(placed, signature, alive)
        block = np.zeros_like(last)
        rows, rows_of_outputs = np.zeros((2, len(signature.arenas)), np.int64)
        for a in range(len(rows)):
            batch, parameter = np.nonzero(arena == a)
            if not len(batch):
                continue
            size = padded[batch] * lengths[batch, parameter]
            allocation = allocate(size, first[batch], last[batch, parameter], slack=ROW_TOLERANCE)
            block[batch, parameter] = allocation.offset
            rows[a], rows_of_outputs[a] = allocation.peak, size.sum()
        return Sent(block, rows, rows_of_outputs)

    def saves_much(self, signature: Signature) -> bool:
        """Returns whether rows for all would be many more."""
        sizes = np.array(list(map(row_bytes, signature.arenas)))
        return bool(self.rows @ sizes <= MAX_SHARED_SHARE * (self.own @ sizes))

    def room(self, signature: Signature) -> list[int]:
        """Capacity for each arena: as large a part of the rows for all as this minibatch needs."""
        least = [0] * len(signature.arenas)  # for the widest chunk that is compiled
        for kernel, widths in zip(signature.kernels, signature.widths, strict=True):
            arenas = arenas_of_parameters(signature, kernel)
            for a, parameter in zip(arenas, kernel.parameters, strict=True):
                if a >= 0:
                    least[a] = max(least[a], parameter.num_rows * widths[-1])
        ends, rooms_found = signature.cotangent_rows[1], []
        for a, (rows, rows_alone) in enumerate(
            zip(self.rows.tolist(), self.own.tolist(), strict=True)
        ):
            most = ends[a] - signature.outputs[a]
            rooms_found.append(max(least[a], min(most, round_up(rows * most / max(rows_alone, 1)))))
        return rooms_found

    def rows_of(self, placed: Placement, nodes: np.ndarray, p: int, length: int) -> np.ndarray:
        """int64[nodes], the first shared row of parameter p of some nodes, of so many operands."""
        layout, batch = placed.layout, placed.schedule.batch[nodes]
        return self.block[batch, p] + (layout.lane[nodes] - layout.start[batch]) * length

    def rows_of_lanes(self, placed: Placement, type_id: int, kernel: Kernel) -> np.ndarray:
        """int64[parameters, lanes], the first shared row of every parameter of lanes of a type."""
        layout = placed.layout
        nodes = layout.lane_node[layout.lane_ptr[type_id] : layout.lane_ptr[type_id + 1]]
        pairs = enumerate(kernel.parameters)
        return np.array([self.rows_of(placed, nodes, p, x.num_rows) for p, x in pairs])


def _last_reads(
    placed: Placement, signature: Signature, alive: Alive
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arenas of what batches send, operands each consists of, and the last step that reads it.

    Each is int64[S, parameters]. Steps count the batches from the last to the first; after them,
    gradients of inputs and of what leaves read are made.
    """
    graph, schedule = placed.graph, placed.schedule
    steps = len(schedule)
    arena = np.full((steps, max((len(k.parameters) for k in signature.kernels), default=0)), -1)
    lengths = np.ones_like(arena)
    last = np.repeat(np.arange(steps)[::-1, None], arena.shape[1], axis=1)
    waits = np.zeros(len(graph.types), bool)
    waits[list(placed.type_ids)] = [kernel.reverse.is_leaf for kernel in placed.kernels]
    until = np.full(graph.num_values + graph.num_inputs, steps)  # input i is at -1 - i
    made_at = np.where(waits[graph.node_type], steps, steps - 1 - schedule.batch)
    until[: graph.num_values] = made_at[graph.value_node]
    sizes, types = np.diff(schedule.node_ptr), graph.node_type[schedule.node]
    for t, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        if not kernel.parameters:
            continue
        batches = np.flatnonzero(schedule.batch_type == t)
        nodes = schedule.node[types == t]
        begins = pointers(sizes[batches])[:-1]
        arena[batches, : len(kernel.parameters)] = arenas_of_parameters(signature, kernel)
        for p, parameter in enumerate(kernel.parameters):
            lengths[batches, p] = parameter.num_rows
            edges = graph.operand_ptr[nodes] + np.array(parameter.operands)[:, None]
            read = until[graph.operand[edges]]
            if alive.reads is not None:
                read = np.where(alive.reads[edges], read, 0)
            latest = np.maximum.reduceat(read.max(axis=0), begins)
            last[batches, p] = np.maximum(last[batches, p], latest)
    return arena, lengths, last


def arenas_of_parameters(signature: Signature, kernel: Kernel) -> list[int]:
    """The arena of the cotangent of each parameter of a kernel; -1 if it has none."""
    types = [parameter.type for parameter in kernel.parameters]
    return [signature.arena(t) if differentiable(t) else -1 for t in types]


def shares_rows(signature: Signature) -> bool:
    """Returns whether cotangents of a program share rows."""
    kinds = zip(signature.cotangent_rows[1], signature.outputs, signature.arenas, strict=True)
    return sum((end - n) * row_bytes(kind) for end, n, kind in kinds) > MIN_SHARED_BYTES
