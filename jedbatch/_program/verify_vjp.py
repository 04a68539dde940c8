"""Verifying the reverse of plans, on the names of cotangents (see `_program.verify`)."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.vjp import differentiable
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.verify import Trial, check_apart, chunks_in_table, require


def flow(kernel: Kernel) -> list[set[int]]:
    """For each operand, the results that send it a cotangent."""
    return [set(results) for results in kernel.reverse.flow_of_operands]


Sender = tuple[Any, ...]  # ("lane", kernel, operand, lane) or ("output", position)


class ReverseTrial:
    """A reverse program that runs on names of cotangents.

    Attributes:
      forward: what ran forwards.
      signature: of the reverse program.
      rows: who sent what is in each row of cotangents, by arena.
      received: the senders whose cotangents each (arena, row) has got so far.
    """

    def __init__(self, forward: Trial, signature: ReverseSignature):
        require(forward.signature == signature.forward, "the reverse is that of another program")
        self.forward = forward
        self.signature = signature
        self.rows: list[dict[int, list[Sender]]] = []
        self.received: dict[tuple[int, int], list[Sender]] = {}  # by (arena, row)
        self._done: set[tuple[int, int]] = set()
        self._check_signature()
        for a in range(len(signature.forward.arenas)):
            received_here: dict[int, list[Sender]] = {signature.zero[a]: []}
            received_here.update(
                (i, [("output", a, i)]) for i in range(signature.forward.outputs[a])
            )
            self.rows.append(received_here)

    def _check_signature(self) -> None:
        signature, forward = self.signature, self.signature.forward
        ranges_taken = [[(0, n, "outputs")] for n in forward.outputs]
        owners = zip(forward.kernels, forward.lanes, signature.bases, strict=True)
        for kernel, lanes, bases in owners if signature.sent is None else ():
            for parameter, base in zip(kernel.parameters, bases, strict=True):
                if differentiable(parameter.type):
                    end = base + lanes * parameter.num_rows
                    ranges_taken[forward.arena(parameter.type)].append(
                        (base, end, str(kernel.node_type))
                    )
        for spans, rows, first in zip(
            ranges_taken, signature.sent or (), forward.outputs, strict=False
        ):
            spans.append((first, first + rows, "shared"))
        for a, spans in enumerate(ranges_taken):
            spans.append((signature.sum_bases[a], signature.zero[a], "sums"))
            spans.append((signature.zero[a], signature.zero[a] + 1, "no reader"))
            subject = f"rows of cotangents of {forward.arenas[a]}"
            check_apart(spans, signature.zero[a] + 1, subject)

    def run(self, tables: Sequence[np.ndarray], outputs: Sequence[Sequence[int]]) -> None:
        """Obeys a reverse table; `outputs` are positions, by arena, that are read."""
        signature, forward = self.signature, self.signature.forward
        table = np.asarray(tables[1])
        require(table.shape == (signature.form.size,), "a reverse table of another size")
        widths = [
            k.buckets.widths[:n] for k, n in zip(forward.kernels, forward.widest, strict=True)
        ]
        of_sums = forward.target.sums.widths
        widths += [tuple(w for w in of_sums if w <= rows) for rows in signature.sums]
        for number, width, lane in chunks_in_table(table, signature, widths):
            if number < len(forward.kernels):
                self._chunk(table, number, width, lane)
            else:
                self._sums(table, number - len(forward.kernels), width, lane)
        for k, kernel in enumerate(forward.kernels):
            if kernel.reverse.is_leaf:  # read at the end, when gradients of shared values are made
                for lane in self.forward.lanes[k]:
                    self._receive(table, k, lane)
                    self._done.add((k, lane))
        ran = {
            (k, lane) for k, kernel_lanes in enumerate(self.forward.lanes) for lane in kernel_lanes
        }
        require(ran == self._done, f"{len(ran ^ self._done)} lanes run in one direction only")
        for a, kind in enumerate(forward.arenas):
            view = signature.form.view(table, "input_readers", a)
            if has_gradient(kind[1]):
                for row in range(view.shape[1]):
                    self.received[a, row] = self._gather(a, view[:, row])
        self._check_readers(np.asarray(tables[0]), outputs)
        self._check_blocks(table)

    def _gather(self, a: int, listed: np.ndarray) -> list[Sender]:
        """Returns the senders of the rows in a column of a table."""
        senders: list[Sender] = []
        for row in listed.tolist():
            require(
                row in self.rows[a],
                f"row {row} of the cotangents of {self.signature.forward.arenas[a]} is read before "
                "it is written",
            )
            senders += self.rows[a][row]
        return senders

    def _chunk(self, table: np.ndarray, k: int, width: int, lane: int) -> None:
        forward = self.signature.forward
        kernel = forward.kernels[k]
        require(lane + width <= forward.lanes[k], f"lane {lane} of {kernel.node_type} in reverse")
        for i in range(lane, lane + width):
            self._receive(table, k, i)
        sent = self._sent(table, k, lane, width)
        for i in range(lane, lane + width):
            require((k, i) not in self._done, f"lane {i} of {kernel.node_type} runs back twice")
            self._done.add((k, i))
            for first, parameter in zip(sent, kernel.parameters, strict=True):
                if differentiable(parameter.type):
                    rows = self.rows[forward.arena(parameter.type)]
                    begin = first + (i - lane) * parameter.num_rows
                    own = parameter.operands[: parameter.num_rows]  # of a sum, in place of all
                    rows.update((begin + e, [("lane", k, j, i)]) for e, j in enumerate(own))

    def _receive(self, table: np.ndarray, k: int, lane: int) -> None:
        """Notes from whom the results of a lane get their cotangents."""
        signature, forward = self.signature, self.signature.forward
        for s, t in enumerate(forward.kernels[k].results):
            if differentiable(t):
                view, a = signature.form.view(table, "readers", k, s), forward.arena(t)
                self.received[a, forward.bases[k][s] + lane] = self._gather(a, view[:, lane])

    def _sent(self, table: np.ndarray, k: int, lane: int, width: int) -> list[int]:
        """Returns the first row of what each parameter of a chunk sends."""
        signature, forward = self.signature, self.signature.forward
        parameters = forward.kernels[k].parameters
        if signature.sent is None:
            pairs = zip(signature.bases[k], parameters, strict=True)
            return [base + lane * parameter.num_rows for base, parameter in pairs]
        rows = signature.form.view(table, "sent", k)[:, lane].tolist()
        for parameter, row in zip(parameters, rows, strict=True):
            if differentiable(parameter.type):
                a, size = forward.arena(parameter.type), width * parameter.num_rows
                inside = forward.outputs[a] <= row <= signature.sum_bases[a] - size
                require(inside, f"rows {row} of cotangents of {forward.arenas[a]} are not shared")
        return rows

    def _sums(self, table: np.ndarray, a: int, width: int, lane: int) -> None:
        view, base = self.signature.form.view(table, "sums", a), self.signature.sum_bases[a]
        require(lane + width <= view.shape[1], f"sum {lane} of {view.shape[1]}")
        sums_made = {base + i: self._gather(a, view[:, i]) for i in range(lane, lane + width)}
        again = sums_made.keys() & self.rows[a].keys()
        require(not again, f"sum {sorted(again)[:1]} is computed twice")
        self.rows[a].update(sums_made)

    def _check_readers(self, table: np.ndarray, outputs: Sequence[Sequence[int]]) -> None:
        """Every value gets the cotangents of all its readers once, and padding sends none."""
        forward, signature = self.forward, self.signature.forward
        readers: dict[tuple[int, int], set[Sender]] = collections.defaultdict(set)
        times: collections.Counter[Sender] = collections.Counter()
        for k, (kernel, lanes) in enumerate(zip(signature.kernels, forward.lanes, strict=True)):
            sent = _sent_by(kernel)
            for i, lane in lanes.items():
                for j, t in enumerate(kernel.operands):
                    if differentiable(t) and j not in lane.lacks:
                        sender = ("lane", k, sent[j], i)
                        readers[signature.arena(t), lane.rows[j]].add(sender)
                        times[sender] += 1
        must: set[Sender] = set()
        for a, positions in enumerate(outputs):
            if has_gradient(signature.arenas[a][1]):
                for i in positions:
                    readers[a, forward.output(table, a, i)].add(("output", a, i))
                    must.add(("output", a, i))
        times_read: collections.Counter[Sender] = collections.Counter()
        for place, senders in self.received.items():
            a, row = place
            strangers = set(senders) - readers[place]
            listed = (
                f"row {row} of {signature.arenas[a]} gets the cotangent of {sorted(strangers)[:1]}"
            )
            require(not strangers, f"{listed}, which does not read it")
            times_read.update(senders)
        twice = [sender for sender, n in times_read.items() if n > max(1, times[sender])]
        require(not twice, f"the cotangent of {twice[:1]} counts twice")
        seldom = [sender for sender, n in times_read.items() if n < times[sender]]
        require(not seldom, f"the cotangent of {seldom[:1]} does not reach all elements of a sum")
        require(
            must <= times_read.keys(),
            f"no value gets the cotangent of {sorted(must - times_read.keys())[:1]}",
        )
        self._check_alive(times_read, readers)

    def _check_alive(
        self,
        seen: collections.Counter[Sender],
        readers: dict[tuple[int, int], set[Sender]],
    ) -> None:
        """Raises unless exactly the operands that get a cotangent from an alive result send one.

        A result is alive if it is returned, or if such an operand reads it. Lanes that are not read
        for this, padding among them, send nothing.
        """
        forward, signature = self.forward, self.signature.forward
        flows = [flow(kernel) for kernel in signature.kernels]
        wanted = {sender for sender in seen if sender[0] == "output"}
        order = [
            (lane.chunk, k, i)
            for k, kernel_lanes in enumerate(forward.lanes)
            for i, lane in kernel_lanes.items()
        ]
        for _, k, i in sorted(order, reverse=True):
            kernel = signature.kernels[k]
            alive = set()
            for s, t in enumerate(kernel.results):
                place = signature.arena(t), signature.bases[k][s] + i
                if differentiable(t) and readers.get(place, set()) & wanted:
                    alive.add(s)
            lacks, sent = forward.lanes[k][i].lacks, _sent_by(kernel)
            wanted |= {
                ("lane", k, sent[j], i)
                for j, result_ids in enumerate(flows[k])
                if result_ids & alive and j not in lacks
            }
        lost, more = wanted - seen.keys(), seen.keys() - wanted
        require(not lost, f"no value gets the cotangent of {sorted(lost)[:1]}")
        require(not more, f"{sorted(more)[:1]} sends a cotangent, and gets none")

    def _check_blocks(self, table: np.ndarray) -> None:
        """Weight gradients run over all lanes that ran; idle ones of a block have no cotangents."""
        form, forward = self.signature.form, self.signature.forward
        for k, (kernel, lanes) in enumerate(zip(forward.kernels, self.forward.lanes, strict=True)):
            need = max(lanes, default=-1) + 1
            name = str(kernel.node_type)
            trips = form.view(table, "blocks", k)
            check_cover(trips, kernel.blocks, need, forward.lanes[k], f"lanes of {name}")
            idle = [lane for lane in range(kernel.blocks.lanes(trips)) if lane not in lanes]
            for s, t in enumerate(kernel.results):
                if differentiable(t):
                    rows = form.view(table, "readers", k, s)[:, idle]
                    none = self.signature.zero[forward.arena(t)]
                    require((rows == none).all(), f"lanes of {name} have readers and do not run")


def _sent_by(kernel: Kernel) -> list[int]:
    """Returns for each operand the one whose cotangent it gets: the first of those summed up."""
    return [x.first if x.is_sum else j for x in kernel.parameters for j in x.operands]


def check_cover(trips: np.ndarray, blocks: Buckets, used: int, room: int, what: str) -> None:
    """Blocks cover all that is used, and stay inside of the room."""
    covered = 0
    for n, width in zip(trips.tolist(), blocks.widths, strict=True):
        require(not n or width <= room, f"blocks for {what} that are wider than there is room")
        covered += n * width
    require(used <= covered <= max(room, used), f"blocks of {covered} for {used} {what}")
