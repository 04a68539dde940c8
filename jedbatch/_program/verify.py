"""Verifying plans: tables are run on symbols in place of values.

What a minibatch is to compute is in its graph; what a program does is in an int32 table and its
signature. Here every entry of the table is obeyed as `_program.execute` would, but on numbers that
stand for values: equal numbers are equal computations. Nothing that planning found out on the way
is taken for granted, only the graph and what is returned. Then it must hold that

- what a lane reads has been written, and still is there: rows that are used again may not hold what
  somebody wants to read;
- every lane computes a node, its own or, for padding, again what another lane of the chunk does,
  and every node has a lane;
- what is returned is what the graph returns;
- in reverse, every lane that ran runs once; a value gets the cotangents of all its readers, each
  once and after it was written, and padding sends none.

Slow: Python for every lane. It runs for every plan if `JEDBATCH_CHECK=1` is set.
"""

import collections
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.straight import calls_of, inputs_of, straight
from jedbatch._graph.types import LENGTH
from jedbatch._jaxpr.storage import stored
from jedbatch._kernel.kernel import Kernel
from jedbatch._layout.access import BROADCAST, GATHER, SLICE, STRIDE, STRIDED
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._program.signature import Signature

NOTHING = -1  # what a row holds that has not been written, or that must not be relied on


def is_wanted() -> bool:
    """Returns whether every plan is to be verified."""
    return os.environ.get("JEDBATCH_CHECK", "0") not in ("", "0")


def require(holds: Any, message: str) -> None:
    """Raises `AssertionError` unless something holds."""
    if not holds:
        raise AssertionError(f"not a valid plan: {message}")


class Symbols:
    """Numbers for computations, equal for equal ones."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, *what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))


@dataclass
class Goal:
    """The computation of a graph, in symbols.

    Attributes:
      nodes: how many nodes compute each symbol.
      values: the symbol of every result by number, and of input i at -1 - i.
      rows: inputs that there are, by kind of value.
      numbers: of elements of lists, by the symbols of inputs.
    """

    nodes: collections.Counter[int]
    values: Mapping[int, int]
    rows: collections.Counter[Any]
    numbers: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, symbols: Symbols) -> "Goal":
        """Computes a graph; inputs are rows of their kind in the order in which they come."""
        present = set(graph.node_type.tolist())
        types = {t: symbols("type", graph.types[t]) for t in present}
        rows: collections.Counter[Any] = collections.Counter()
        inputs: list[int] = []
        numbers: dict[int, int] = {}
        for chunk in graph.inputs:
            kind = stored(chunk.type)
            own = [symbols("input", kind, rows[kind] + i) for i in range(len(chunk))]
            if chunk.type == LENGTH and chunk.leaf is None:
                numbers.update(zip(own, np.asarray(chunk.rows).tolist(), strict=True))
            inputs += own
            rows[kind] += len(chunk)
        nodes: collections.Counter[int] = collections.Counter()

        def run(t: int, operands: list[int]) -> list[int]:
            symbol = symbols("node", types[t], tuple(operands))
            nodes[symbol] += 1
            return [symbols("result", symbol, s) for s in range(graph.types[t].num_results)]

        values = straight(calls_of(graph), inputs_of(inputs), run)
        return Goal(nodes, values, rows, numbers)

    def __getitem__(self, reference: int) -> int:
        """The symbol of a value, or of an input as -1 - i."""
        return self.values[reference]


@dataclass
class Lane:
    """The computation of one lane.

    Attributes:
      symbol: of what it computed.
      chunk: its number, in the order in which they ran.
      rows: that its operands were read from.
      lacks: operands that do not exist.
    """

    symbol: int
    chunk: int
    rows: tuple[int, ...]
    lacks: frozenset[int] = frozenset()


@dataclass
class Trial:
    """A forward program that runs on symbols.

    Attributes:
      signature: of the program.
      symbols: in use.
      goal: what is to be computed, if that is known.
      known: inputs that there are, by kind of value; all there is room for, if that is unknown.
      arenas: what every row holds.
      lanes: what every lane of every kernel did, so far.
      chunks: that have run.
    """

    signature: Signature
    symbols: Symbols
    goal: Goal | None
    known: collections.Counter[Any] | None = None
    arenas: list[np.ndarray] = field(default_factory=list)
    lanes: list[dict[int, Lane]] = field(default_factory=list)
    chunks: int = 0
    _types: list[int] = field(init=False)

    def __post_init__(self) -> None:
        signature = self.signature
        self._check_signature()
        self._types = [self.symbols("type", kernel.node_type) for kernel in signature.kernels]
        if self.goal is not None:
            self.known = self.goal.rows
        for kind, rows, room in zip(
            signature.arenas, signature.rows, signature.inputs, strict=True
        ):
            arena = np.full(rows, NOTHING)
            known = room if self.known is None else self.known[kind]
            require(known <= room, f"{known} inputs of {kind} in room for {room}")
            arena[:known] = [self.symbols("input", kind, i) for i in range(known)]
            self.arenas.append(arena)
        self.lanes += [{} for _ in signature.kernels]

    def resumed(self, signature: Signature, known: collections.Counter[Any]) -> "Trial":
        """The same in a program that has room for more, with more inputs."""
        trial = Trial(signature, self.symbols, None, known, chunks=self.chunks)
        before = self.signature
        for k, kernel in enumerate(before.kernels):
            new = signature.places[kernel]
            trial.lanes[new] = self.lanes[k]
            for s, t in enumerate(kernel.results):
                base = before.bases[k][s]
                rows = self.arenas[before.arena(t)][base : base + before.lanes[k]]
                first = signature.bases[new][s]
                trial.arenas[signature.arena(t)][first : first + len(rows)] = rows
        return trial

    def _check_signature(self) -> None:
        """Rows of inputs and of all results lie apart, unless results share rows."""
        signature = self.signature
        if signature.shared_rows is not None:
            return
        ranges_taken = [[(0, n, "inputs")] for n in signature.inputs]
        for kernel, lanes, bases in zip(
            signature.kernels, signature.lanes, signature.bases, strict=True
        ):
            for t, base in zip(kernel.results, bases, strict=True):
                ranges_taken[signature.arena(t)].append((base, base + lanes, str(kernel.node_type)))
        for kind, rows, spans in zip(signature.arenas, signature.rows, ranges_taken, strict=True):
            check_apart(spans, rows, f"rows of {kind}")

    def run(self, table: np.ndarray, keeps: bool) -> None:
        """Obeys a table. `keeps` says that all is kept that the reverse reads."""
        signature, form = self.signature, self.signature.form
        table = np.asarray(table)
        require(table.shape == (form.size,), f"a table of {table.shape} for {form.size} entries")
        widths_by_body = [
            signature.kernels[k].buckets.widths[: signature.widest[k]] for k, _ in signature.bodies
        ]
        for body, width, lane in chunks_in_table(table, signature, widths_by_body):
            k, reading = signature.bodies[body]
            self._chunk(table, k, width, lane, reading, keeps)
            self.chunks += 1
        if self.goal is not None:
            self._check_nodes()

    def _chunk(self, table: np.ndarray, k: int, width: int, lane: int, reading: Any, keeps: bool):
        signature = self.signature
        kernel = signature.kernels[k]
        name = f"lanes {lane} to {lane + width} of {kernel.node_type}"
        require(lane >= 0 and lane + width <= signature.lanes[k], f"{name} of {signature.lanes[k]}")
        rows = np.empty((len(kernel.operands), width), np.int64)
        read = np.empty_like(rows)
        vague = np.zeros(width, bool)  # lanes that may compute anything
        view = signature.form.view(table, "operands", k)[:, lane : lane + width]
        lacks = self._lacking(kernel, view, name)
        summed = [(x.first, j) for x in kernel.parameters if x.is_sum for j in x.operands]
        for first, j in reversed(summed):  # those that do not exist count as the first one
            require(((view[j] < 0) == lacks[j]).all(), f"{name} add up other elements than exist")
            view = view.copy()
            view[j][lacks[j]] = view[first][lacks[j]]
        for j, t in enumerate(kernel.operands):
            arena = self.arenas[signature.arena(t)]
            rows[j] = _rows_read(view[j], reading[j], width)
            last = rows[j].max() + (reading[j] == STRIDED and STRIDE - 1)
            require(rows[j].min() >= 0 and last < len(arena), f"{name} read rows outside of {t}")
            read[j] = arena[rows[j]]
            if reading[j] != GATHER and kernel.loose[j] and not keeps:
                vague |= True
            else:
                missing = np.flatnonzero(read[j] == NOTHING)
                require(
                    not len(missing),
                    f"lane {lane + missing[:1]} of {kernel.node_type} reads operand {j} from row "
                    f"{rows[j][missing[:1]]}, which has not been written",
                )
        symbols_made = self._compute(k, read, vague, name)
        if keeps or signature.shared_rows is None:
            again = [lane + i for i in range(width) if lane + i in self.lanes[k]]
            require(not again, f"lane {again[:1]} of {kernel.node_type} runs twice")
        for i in range(width):
            self.lanes[k][lane + i] = Lane(
                int(symbols_made[i]),
                self.chunks,
                tuple(rows[:, i].tolist()),
                frozenset(np.flatnonzero(lacks[:, i]).tolist()),
            )
        for s, t in enumerate(kernel.results):
            a = signature.arena(t)
            first = self._result_row(table, k, s, lane)
            inside = signature.inputs[a] <= first <= len(self.arenas[a]) - width
            require(inside, f"{name} write rows from {first} on, outside of those for results")
            values = [
                NOTHING if m == NOTHING else self.symbols("result", m, s)
                for m in symbols_made.tolist()
            ]
            self.arenas[a][first : first + width] = values

    def _lacking(self, kernel: Kernel, view: np.ndarray, name: str) -> np.ndarray:
        """bool[operands, width], operands of lanes that do not exist."""
        lacks = np.zeros(view.shape, bool)
        if kernel.lists is None or self.goal is None:
            return lacks
        length = kernel.lists.length
        arena = self.arenas[self.signature.arena(kernel.operands[length])]
        symbols = arena[view[length]].tolist()
        known = all(symbol in self.goal.numbers for symbol in symbols)
        require(known, f"{name} have lists of unknown length")
        lengths = np.array([self.goal.numbers[symbol] for symbol in symbols], np.int64)
        return ~kernel.lists.exist(lengths)

    def _compute(self, k: int, read: np.ndarray, vague: np.ndarray, name: str) -> np.ndarray:
        """int64[width], the symbols of what lanes compute."""
        results_made = np.full(read.shape[1], NOTHING)
        for i, operands in enumerate(map(tuple, read.T.tolist())):
            if NOTHING in operands:
                require(vague[i], f"lane {i} of {name} reads rows that nothing has written")
                continue
            symbol = self.symbols("node", self._types[k], operands)
            if self.goal is None or symbol in self.goal.nodes:
                results_made[i] = symbol
            else:
                require(vague[i], f"lane {i} of {name} computes what no node does")
        return results_made

    def _result_row(self, table: np.ndarray, k: int, s: int, lane: int) -> int:
        if self.signature.shared_rows is None:
            return self.signature.bases[k][s] + lane
        return int(self.signature.form.view(table, "results", k)[s, lane])

    def _check_nodes(self) -> None:
        """Every node has a lane."""
        assert self.goal is not None
        lanes = collections.Counter(
            lane.symbol for kernel_lanes in self.lanes for lane in kernel_lanes.values()
        )
        missing = [s for s, n in self.goal.nodes.items() if lanes[s] < n]
        require(not missing, f"{len(missing)} nodes are in no lane")

    def output(self, table: np.ndarray, arena: int, position: int) -> int:
        """The row that is returned at some position."""
        view = self.signature.form.view(np.asarray(table), "outputs", arena)
        require(position < len(view), f"result {position} of {len(view)} that are returned")
        row = int(view[position])
        require(0 <= row < len(self.arenas[arena]), f"result {position} is read from row {row}")
        return row

    def check_output(self, table: np.ndarray, arena: int, position: int, expected: int | None):
        """Raises unless `expected`, or any value if that is None, is returned at a position."""
        symbol_found = int(self.arenas[arena][self.output(table, arena, position)])
        kind = self.signature.arenas[arena]
        require(symbol_found != NOTHING, f"result {position} of {kind} has not been computed")
        require(expected in (None, symbol_found), f"result {position} of {kind} is another value")


def _rows_read(listed: np.ndarray, mode: int, width: int) -> np.ndarray:
    """The rows that lanes read an operand from."""
    if mode == GATHER:
        return listed
    steps = {SLICE: 1, BROADCAST: 0, STRIDED: STRIDE}[mode]
    return listed[0] + steps * np.arange(width)


def check_apart(spans: list[tuple[int, int, str]], rows: int, what: str) -> None:
    """Spans (begin, end, whose) of rows do not overlap."""
    end, before = 0, "nothing"
    for begin, stop, whose in sorted(span for span in spans if span[0] < span[1]):
        require(begin >= end, f"{what} of {whose} and {before} overlap")
        end, before = stop, whose
    require(end <= rows, f"{what} of {before} end at {end}, beyond {rows}")


def chunks_in_table(
    table: np.ndarray, signature: Any, widths: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int]]:
    """Yields (number, width, first lane) of all chunks of a table in the order they run in.

    `widths` are those of every number.
    """
    form, instructions = signature.form, signature.instructions
    count = int(form.view(table, "num_instructions")[0])
    rows = form.view(table, "instructions")
    require(0 <= count <= len(rows), f"{count} instructions in room for {len(rows)}")

    def chunk(opcode: int, lane: int) -> tuple[int, int, int]:
        number, column = divmod(opcode, NUM_WIDTHS)
        exists = 0 <= number < len(widths) and column < len(widths[number])
        require(exists, f"an instruction of kind {opcode}, which is not compiled")
        return number, widths[number][column], lane

    if instructions.control == "switch":
        branches = instructions.branches
        for branch, trips, *lanes in rows[:count].tolist():
            require(0 <= branch < len(branches), f"an instruction for branch {branch}")
            opcodes, repeated = branches[branch]
            require(trips > 0 and (repeated or trips == 1), f"branch {branch} runs {trips} times")
            steps = instructions.steps(opcodes)
            for trip in range(trips):
                for opcode, lane, step in zip(opcodes, lanes, steps, strict=False):
                    yield chunk(opcode, lane + trip * step)
        return
    sign = -1 if instructions.reverse else 1
    for what, start, stop in rows[:count].tolist():
        width = chunk(what, start)[1]
        trips, rest = divmod(sign * (stop - start), width)
        require(trips > 0 and not rest, f"a run from lane {start} to {stop} in chunks of {width}")
        for lane in range(start, stop, sign * width):
            yield chunk(what, lane)
