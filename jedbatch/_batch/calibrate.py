"""The costs of batches on this machine.

Fewest batches is a stand-in for least time. A batch of type t with so many nodes takes about

    per_batch[t] + per_node[t] * nodes + per_byte * bytes gathered,

and `calibrate` measures these numbers. Every node runs once, whatever the schedule, so all
schedules of a graph agree in the second and third term; what a policy can save is the sum of
`per_batch` over its batches. A `Calibration` is therefore an objective for `jedbatch.learn` and
the searches: the cost of a batch of each type.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch import checks
from jedbatch._batch.batched import Batched, core_of
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.record import Record
from jedbatch._jaxpr.storage import is_key, row_bytes, stored
from jedbatch._program.executors import median_seconds
from jedbatch._schedule.fsm import match_labels
from jedbatch._schedule.heuristics import agenda
from jedbatch._schedule.schedule import Schedule
from jedbatch._session.session import Flags, Minibatch
from jedbatch._support.files import content_of, read_text, reading, write_text
from jedbatch._support.types import PyTree

FORMAT = "jedbatch calibration, version 1"
COUNTS, WIDTHS = (16, 80), (8, 64)  # batches and nodes in each of the programs that are timed


@dataclass(frozen=True)
class TypeCost:
    """Microseconds for a batch of a type and for each of its nodes, and bytes a node gathers."""

    per_batch: float
    per_node: float
    bytes: int


@dataclass(frozen=True)
class Calibration:
    """Measured costs of batches, an objective for `jedbatch.learn`.

    Attributes:
      types: the costs of each node type, by its label.
      per_byte: microseconds per byte gathered.
      machine: where this was measured.
    """

    types: Mapping[str, TypeCost]
    per_byte: float
    machine: str = ""

    def __post_init__(self) -> None:
        checks.of_type("Calibration", self.types, Mapping, "a dict from labels to costs")
        for cost in self.types.values():
            checks.of_type("Calibration", cost, TypeCost, "a dict from labels to costs")
        checks.number("Calibration", "per_byte", self.per_byte, least=0)
        checks.of_type("Calibration", self.machine, str, "a text that names the machine")
        if not self.types:
            raise ValueError(
                "`Calibration` got no types; expected the costs of at least one, as "
                "`jedbatch.calibrate` measures them."
            )

    def _costs(self, graph: Graph) -> list[TypeCost]:
        checked_graph("Calibration", graph)
        labels = list(self.types)
        middle = TypeCost(
            float(np.median([c.per_batch for c in self.types.values()])),
            float(np.median([c.per_node for c in self.types.values()])),
            0,
        )
        numbers = match_labels(labels, graph.labels)
        return [self.types[labels[n]] if n >= 0 else middle for n in numbers]

    def __call__(self, graph: Graph) -> np.ndarray:
        """float[T], microseconds for a batch of each type of a graph, however many its nodes.

        A type that was not measured is taken to cost what the median type does.

        Args:
          graph: the graph, of T types.

        Returns:
          float[T], microseconds by type id.
        """
        return np.array([cost.per_batch for cost in self._costs(graph)])

    def microseconds(self, graph: Graph, schedule: Schedule) -> float:
        """Returns the microseconds that running a schedule is expected to take.

        Args:
          graph: what was scheduled.
          schedule: its batches.

        Returns:
          Microseconds.

        Raises:
          TypeError: `graph` is no graph, or `schedule` no schedule.
        """
        checks.of_type("Calibration.microseconds", schedule, Schedule, "a schedule of the graph")
        costs = self._costs(graph)
        per_node = np.array([c.per_node + self.per_byte * c.bytes for c in costs])
        return float(self(graph)[schedule.batch_type].sum() + per_node[graph.node_type].sum())

    def __str__(self) -> str:
        lines = [
            f"Calibration of {len(self.types)} types on {self.machine}: "
            f"{1e6 * self.per_byte:.3g} µs per MB gathered",
            "  µs/batch   µs/node  type",
        ]
        lines += [f"  {c.per_batch:8.2f}  {c.per_node:8.3f}  {t}" for t, c in self.types.items()]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON, whole or not at all.

        Args:
          path: the file.
        """
        content = {
            "format": FORMAT,
            "machine": self.machine,
            "per_byte": self.per_byte,
            "types": {label: vars(cost) for label, cost in self.types.items()},
        }
        write_text("Calibration.save", path, json.dumps(content, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> "Calibration":
        """Reads what `save` wrote; raises `ValueError` on anything else.

        Args:
          path: the file.

        Returns:
          The calibration.

        Raises:
          FileNotFoundError: there is no such file.
          TypeError: it is no name of a file.
          ValueError: it is not a calibration, or one of another version.
        """
        text, source = read_text("Calibration.load", path)
        with reading("Calibration", source):
            content = content_of(text, FORMAT)
            machine = content["machine"]
            if not isinstance(machine, str):
                raise ValueError(f"its machine is {checks.brief(machine)}, not a text")
            types = {
                label: TypeCost(
                    _cost(cost, "per_batch"),
                    _cost(cost, "per_node"),
                    checks.whole("Calibration.load", "bytes", cost["bytes"]),
                )
                for label, cost in content["types"].items()
            }
            return Calibration(types, _cost(content, "per_byte"), machine)


def _cost(content: Mapping[str, object], name: str) -> float:
    return checks.number("Calibration.load", name, content[name], least=0)


def calibrate(
    batched: Batched[*tuple[Any, ...], Any], *args: PyTree, repeat: int = 15
) -> Calibration:
    """Measures what batches of each node type cost on this machine.

    Compiles and times a small program for every type, some seconds each. Run it when the machine
    does nothing else, and keep the result: `Calibration.save`.

    Args:
      batched: what `jedbatch.batch` returned.
      *args: as for a call; instances that use all the types there are.
      repeat: how often each program is timed; medians count. What a batch of a small cell costs
        is a few microseconds, and hard to measure: no type is taken to cost less than a tenth of
        the median type.

    Returns:
      The calibration, for `jedbatch.learn(..., objective=calibration)`.

    Raises:
      TypeError: it is no batched function, or arguments are not what it takes.
      ValueError: `repeat` is not positive, or there is nothing to measure.

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> square = jedbatch.batch(lambda p, x: p * x * x)
      >>> costs = jedbatch.calibrate(square, jnp.float32(1), [jnp.float32(2)], repeat=2)
      >>> sorted(costs.types)
      ['multiply(f32[]) @ [0]', 'multiply(f32[], f32[])']
    """
    if not isinstance(batched, Batched):
        raise TypeError(
            f"`calibrate` got {checks.shown(batched)}; expected what `jedbatch.batch` "
            "returned, and then the arguments of a call."
        )
    checks.whole("calibrate", "repeat", repeat, least=1, most=10**6)
    probe = core_of(batched).twin(policy=agenda, out_axes=None)
    shared, instances = probe.arguments.split(args)
    session, leaves = probe.session(shared)
    graph = probe.lasting_plan(session, instances, gradient=False).graph
    assert graph is not None
    per_byte, flags = gather_cost(repeat), Flags(stacked=False)
    types: dict[str, TypeCost] = {}
    for t in graph.present_types:
        node_type = graph.types[t]
        if any(is_key(operand.dtype) for operand in node_type.operands):
            continue
        minibatches = [
            Minibatch(session, [_only(graph, t, n * w)], [()], _Rows(t, w), results=probe.results)
            for w in WIDTHS
            for n in COUNTS
        ]
        plans = [probe.plan_recorded(x, flags) for x in minibatches]
        seconds = median_seconds(
            [lambda p=p: probe.run(p, leaves, p.inputs) for p in plans], repeat
        )
        narrow, wide = (np.diff(seconds.reshape(2, 2))[:, 0] / (COUNTS[1] - COUNTS[0])).tolist()
        per_node = max(0.0, (wide - narrow) / (WIDTHS[1] - WIDTHS[0]))
        per_batch = max(0.01, 1e6 * (narrow - per_node * WIDTHS[0]))
        num_bytes = sum(row_bytes(stored(operand)) for operand in node_type.operands)
        rest = max(0.0, 1e6 * per_node - per_byte * num_bytes)
        types[graph.labels[t]] = TypeCost(per_batch, rest, num_bytes)
    if not types:
        raise ValueError(
            "`calibrate` found no node type to measure; expected instances for which the function "
            "computes something, and not on random keys alone."
        )
    floor = 0.1 * float(np.median([cost.per_batch for cost in types.values()]))
    types = {
        label: TypeCost(max(floor, cost.per_batch), cost.per_node, cost.bytes)
        for label, cost in types.items()
    }
    device = jax.devices()[0].device_kind
    return Calibration(types, per_byte, f"{platform.machine()}, {device}, JAX {jax.__version__}")


def _only(graph: Graph, t: int, num_nodes: int) -> Record:
    """A recording of nodes of one type that read inputs of zeros."""
    node_type = graph.types[t]
    arity = len(node_type.operands)
    zeros = [
        InputRows(kind, np.zeros((num_nodes, *kind.shape), kind.dtype))
        for kind in node_type.operands
    ]
    column = np.arange(num_nodes)[:, None] + num_nodes * np.arange(arity)
    alone = Graph(
        graph.types,
        np.full(num_nodes, t, np.int32),
        arity * np.arange(num_nodes + 1),
        (-1 - column).astype(np.int32).ravel(),
        tuple(zeros),
        np.array([(num_nodes - 1) * node_type.num_results], np.int32),
    )
    result = node_type.results[0]
    return Record(alone, 0, jax.tree.structure(0), ((result.shape, result.dtype, result.weak),))


@dataclass(frozen=True)
class _Rows:
    """Batches of equal width, whatever is ready."""

    type_id: int
    width: int

    def schedule(self, graph: Graph) -> Schedule:
        """All nodes, `width` at a time."""
        nodes = np.arange(len(graph.node_type)).reshape(-1, self.width).tolist()
        return Schedule.of([self.type_id] * len(nodes), nodes, "calibration")


def gather_cost(repeat: int) -> float:
    """Microseconds per byte of a gather of rows."""
    table = jnp.zeros((8192, 256), jnp.float32)
    rows = [
        jnp.asarray(np.random.default_rng(0).integers(0, 8192, n), jnp.int32) for n in (512, 8192)
    ]
    take = jax.jit(lambda table, index: table[index])
    few, many = median_seconds([lambda index=index: take(table, index) for index in rows], repeat)
    return max(0.0, 1e6 * float(many - few) / ((8192 - 512) * 1024))
