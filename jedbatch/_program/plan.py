"""`Plan`: a minibatch ready to run, and its printed summary."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from jedbatch._graph.degeneracy import Degeneracy
from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.storage import Kind, row_bytes
from jedbatch._layout.layout import Layout
from jedbatch._program.lower import Lowered
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.memory_use import held_bytes, live_bytes, size
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.sharded import DeviceAxis, Route
from jedbatch._program.signature import Signature
from jedbatch._schedule.policy import policies_compared
from jedbatch._schedule.schedule import Schedule, lower_bound
from jedbatch._support import native
from jedbatch._support.types import Array

if TYPE_CHECKING:
    from jaxtyping import Int32


MAX_NAMES = 1024  # of arenas that are kept; names of dtypes take long to write
FOLDED_TYPES = 8  # from so many that look alike on, a printed plan has one line for them
UNKNOWN = "without lock step where it pays, which is known once the program is made"
# Attributes of plans that are not for users, who are not shown them.
OF_PROGRAMS = {"host", "ragged", "reverse_table", "routes", "static", "table"}
FOR_JAX = {"tree_flatten", "tree_unflatten"}
READ_AS = ("gathered", "read as slices", "as strided slices", "broadcast")  # see `_layout.access`


class PlanSource(Protocol):
    """What a plan prints of the programs kept (see `_session.programs.program_cache`)."""

    @property
    def compilations(self) -> Mapping[str, int]:
        """XLA programs built, counted by kind."""
        ...


@dataclass(frozen=True)
class Static:
    """The part of a plan that is compiled: equal for plans that share programs.

    Attributes:
      keeps: whether everything is kept that the reverse would read.
      stages: what runs before (see `_ragged.calls`).
      devices: axes of a mesh over which the minibatch is cut; None if it is not.
    """

    programs: PlanSource
    signature: Signature
    reverse: ReverseSignature | None
    results: OutputSpec
    keeps: bool
    stages: tuple[Any, ...] = ()
    devices: DeviceAxis | None = None


class RaggedSummary(Protocol):
    """The calls that run before a graph (see `_ragged.calls`), as far as a plan prints them."""

    @property
    def counts(self) -> tuple[int, int]:
        """(rows that exist, rows computed)."""
        ...

    @property
    def lines(self) -> list[str]:
        """Lines of a printed plan."""
        ...


@dataclass(frozen=True)
class PaddedRows:
    """Counts of the rows that nodes on padded arrays run over.

    Attributes:
      nodes: that there are.
      exist: rows that they run over, all together.
      computed: these rows with those of the padding.
    """

    nodes: int
    exist: int
    computed: int

    def __str__(self) -> str:
        more = f", {self.computed / self.exist - 1:.1%} more than there are" if self.exist else ""
        return f"{self.nodes:,} nodes on padded arrays: {self.computed:,} rows{more}"


@dataclass(frozen=True, eq=False)
class Host:
    """The host's side of a plan: its placement, and how it was planned.

    Attributes:
      made: the minibatch as the program runs it, or what makes it when somebody looks at it.
      seconds: time spent in each stage of planning.
      num_known: instances whose graphs were known already.
      tracers: what is read from outside, by number or by name (see `SharedValue`).
      ragged_calls: calls that run before the graph, if there are ragged arrays.
      apart: why arrays of different lengths are not run together; None if they are.
      assumed: of instances (see `RecordCache.shown`).
      count_padded: counts the rows that nodes on padded arrays run over, if there are such nodes.
      unpadded: why programs of ragged arrays run by themselves that nodes on padded arrays could
        replace, if there are such.
      device_seconds: a run took, if it was measured.
      outline: what has the batches and lanes of the minibatch, and may have no more; None if that
        is its placement.
      numbers: of the instances, where they are a part of a minibatch; None where they are all.
      slow_calls: calls of cells that were looked into, as no others were known to be like them.
    """

    made: Lowered | Callable[[], Lowered]
    seconds: Mapping[str, float]
    num_known: int = 0
    tracers: Any = ()
    ragged_calls: RaggedSummary | None = None
    apart: str | None = None
    assumed: Sequence[str] = ()
    count_padded: Callable[[], PaddedRows] | None = None
    unpadded: str | None = None
    device_seconds: float | None = None
    outline: Placement | None = None
    numbers: Sequence[int] | None = None
    slow_calls: int = 0

    @functools.cached_property
    def padded(self) -> PaddedRows | None:
        """Rows that nodes on padded arrays run over, if there are such nodes."""
        return None if self.count_padded is None else self.count_padded()

    @functools.cached_property
    def lowered(self) -> Lowered:
        return self.made() if callable(self.made) else self.made

    @property
    def placed(self) -> Placement:
        return self.lowered.placed

    @property
    def counted(self) -> Placement:
        """The placement with the kernels, batches and lanes of the minibatch."""
        return self.outline or self.placed


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A minibatch ready to run: integer tables, inputs, and what to compile.

    As a pytree a plan has its tables and its inputs for leaves and a hashable rest, so a train
    step that takes a plan compiles once for every topology. What planning found out does not
    survive flattening: print a plan, or draw it with `jedbatch.viz`, before passing it on.

    Attributes:
      inputs: dict from dtype and shape, such as "float32[300]", to array [rows, *shape]: the
        values that enter, instance after instance, up to a capacity.
      graph, schedule, layout: what was planned; None once the plan has been flattened.
      device_seconds: seconds a run took, if it was measured (`Batched.profile`).
      shards: of a minibatch that is cut over devices, the plan of each part, to look at; nothing
        once the plan has been flattened. Such a plan has no graph of its own, and tables and inputs
        of all shards, along a first axis that is cut over the devices.
    """

    static: Static
    table: Int32[np.ndarray | jax.Array, " Z"]
    reverse_table: Int32[np.ndarray | jax.Array, " _"] | None
    inputs: dict[str, Array]
    ragged: tuple[Any, ...] = ()  # the tables of what runs before
    routes: tuple[Route, ...] = ()  # of shards: one for all arenas, or one for each
    host: Host | None = None
    shards: tuple[Plan, ...] = ()

    @property
    def device_seconds(self) -> float | None:
        return self.host.device_seconds if self.host else None

    def tree_flatten(self) -> Any:
        """For JAX: (leaves, static part).

        Returns:
          ((tables, inputs, tables of ragged calls, routes of shards), `Static`).
        """
        tables = self.table, self.reverse_table
        return (*tables, self.inputs, self.ragged, self.routes), self.static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Plan:
        """For JAX: a plan without the records of the host.

        Args:
          static: the compiled part.
          children: the leaves of `tree_flatten`.

        Returns:
          The plan, without `graph`, `schedule`, `layout` and `shards`.
        """
        return cls(static, *children)

    @property
    def graph(self) -> Graph | None:
        return self.host.placed.graph if self.host else None

    @property
    def schedule(self) -> Schedule | None:
        return self.host.placed.schedule if self.host else None

    @property
    def layout(self) -> Layout | None:
        return self.host.placed.layout if self.host else None

    @property
    def ragged_rows(self) -> tuple[int, int] | None:
        """(rows computed, rows that exist) of arrays that differ in length, where rows are alike.

        Of row-wise phases before the graph, and of nodes on padded arrays, each as often as it is
        run over.
        None if there are none, or once the plan has been flattened.
        """
        if self.host is None or not (self.host.ragged_calls or self.host.padded):
            return None
        exist, computed = self.host.ragged_calls.counts if self.host.ragged_calls else (0, 0)
        padded = self.host.padded or PaddedRows(0, 0, 0)
        return computed + padded.computed, exist + padded.exist

    def __reduce__(self) -> str:
        """Raises `TypeError`: plans name the compiled programs of this process."""
        raise TypeError(
            "`pickle` got a plan, which names programs that this process has compiled; expected "
            "something that other processes can read. Pickle the instances and plan them there, or "
            "pickle what `planner = batched.planner(*shared, instances)` returns for instances: "
            "`planner.attach` makes plans of it in the process that made the planner. "
            "`batched.export` writes the programs to a file, for processes without the function."
        )

    def __copy__(self) -> Plan:
        return self  # it is frozen

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        copied = [copy.deepcopy(x, memo) for x in self.tree_flatten()[0]]
        return replace(self.tree_unflatten(self.static, copied), host=self.host, shards=self.shards)

    def _timed(self, device_seconds: float) -> Plan:
        """Returns the same plan, of which a run took so long."""
        assert self.host is not None
        return replace(self, host=replace(self.host, device_seconds=device_seconds))

    def __str__(self) -> str:
        if self.shards:
            return summarize_shards(self)
        if self.host is None:
            types = len(self.static.signature.kernels)
            return f"Plan of {types} node types (its host records did not survive flattening)"
        return summarize(self)

    __repr__ = __str__

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_PROGRAMS | FOR_JAX]


@functools.lru_cache(maxsize=MAX_NAMES)
def input_name(kind: Kind) -> str:
    """The name of an arena among a plan's inputs."""
    shape, dtype = kind
    return f"{dtype}[{','.join(map(str, shape))}]"


def summarize(plan: Plan) -> str:
    """Returns the text that a plan prints as."""
    assert plan.host is not None
    host, placed, static = plan.host, plan.host.placed, plan.static
    graph, schedule, layout = placed.graph, placed.schedule, placed.layout
    by_policy = ", ".join(f"{name} {n}" for name, n in policies_compared(graph).items())
    bound = lower_bound(graph)
    certified = "optimal" if len(schedule) == bound else f"certified lower bound {bound}"
    fallback = f", {schedule.unseen} left to its fallback" if schedule.unseen else ""
    degenerate = Degeneracy.of(graph)
    verdict = f": hardly batched, {degenerate}" if degenerate else ""
    lines = [
        f"Plan of {graph.num_instances} instances{verdict}",
        f"  graph     {len(graph.node_type):,} nodes of {len(placed.type_ids)} types, "
        f"{len(graph.operand):,} operands, {graph.num_inputs:,} inputs",
        f"  schedule  {len(schedule)} batches {schedule.policy}{fallback}: {certified} "
        f"({by_policy})",
        *(host.ragged_calls.lines if host.ragged_calls else ()),
        *([f"  padded    {host.padded}"] if host.padded else ()),
        *([f"  padded    none for some arrays, since {host.unpadded}"] if host.unpadded else ()),
        *([f"  lengths   grouped by equal shapes, since {host.apart}"] if host.apart else ()),
        *(f"  assumed   {x}" for x in host.assumed),
        "",
        "  nodes  batches  widest  padding  slices  type",
    ]
    lines += _type_lines(host, by_name=degenerate is not None)
    arenas = sum(
        rows * row_bytes(kind)
        for rows, kind in zip(static.signature.rows, static.signature.arenas, strict=True)
    )
    read = ", ".join(
        f"{size(n)} {how}"
        for n, how in zip(host.lowered.read_bytes.tolist(), READ_AS, strict=True)
        if n
    )
    held, once = held_bytes(placed)
    kept = f"{size(held)} for results"
    if placed.reuse:
        kept += f", {size(once)} if rows were not used again"
    kernels = sum(static.signature.widest)
    compiled = static.programs.compilations
    programs = ", ".join(f"{n} {kind}" for kind, n in sorted(compiled.items())) or "none yet"
    times = ", ".join(f"{stage} {1e3 * s:.1f}" for stage, s in host.seconds.items())
    slowly = f"; {host.slow_calls:,} calls recorded slowly" if host.slow_calls else ""
    diverging = [f"{k.node_type.name}: {k.forms or UNKNOWN}" for k in placed.kernels if k.diverges]
    lines += [
        "",
        *(f"  lanes     {x}" for x in dict.fromkeys(diverging)),
        f"  operands  {read or 'none'}; order {layout.order}",
        f"  memory    {kept}, {size(live_bytes(graph, schedule))} live at most; "
        f"arenas of {size(arenas)}",
        f"  program   {len(static.signature.kernels)} types in {kernels} widths; "
        f"XLA programs built so far: {programs}",
        f"  host      {1e3 * sum(host.seconds.values()):.1f} ms: {times} "
        f"({host.num_known} of {graph.num_instances} instances known{slowly})",
        *([] if native.core() else [f"            planned in {native.described()}"]),
    ]
    if plan.device_seconds is not None:
        lines.append(f"  device    {1e3 * plan.device_seconds:.1f} ms")
    return "\n".join(lines)


def summarize_shards(plan: Plan) -> str:
    """Returns the text that a plan prints as that is cut over devices."""
    static, devices = plan.static, plan.static.devices
    hosts = [shard.host for shard in plan.shards if shard.host is not None]
    costs = np.array([host.placed.cost for host in hosts])
    instances = sum(host.placed.graph.num_instances for host in hosts)
    seconds: dict[str, float] = {}
    for host in hosts:
        for stage, s in host.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + s
    times = ", ".join(f"{stage} {1e3 * s:.1f}" for stage, s in seconds.items())
    compiled = static.programs.compilations
    programs = ", ".join(f"{n} {kind}" for kind, n in sorted(compiled.items())) or "none yet"
    known = sum(host.num_known for host in hosts)
    lines = [
        f"Plan of {instances} instances in {len(hosts)} shards over {devices}",
        f"  balance   the slowest shard costs {costs.max() / costs.mean():.3f} times the mean",
        "",
        "  shard  instances  nodes  batches  cost",
    ]
    for i, (host, cost) in enumerate(zip(hosts, (costs / costs.mean()).tolist(), strict=True)):
        placed = host.placed
        lines.append(
            f"  {i:5}  {placed.graph.num_instances:9}  {len(placed.graph.node_type):5}  "
            f"{len(placed.schedule):7}  {cost:.2f}"
        )
    kernels = sum(static.signature.widest)
    lines += [
        "",
        f"  program   {len(static.signature.kernels)} types in {kernels} widths; "
        f"XLA programs built so far: {programs}",
        f"  host      {1e3 * sum(seconds.values()):.1f} ms: {times} "
        f"({known} of {instances} instances known)",
        "  more      print(plan.shards[0])",
    ]
    return "\n".join(lines)


def _type_lines(host: Host, by_name: bool) -> list[str]:
    """Returns the lines of a printed plan about node types; one of many that look alike.

    Types look alike if they print alike, or if they have the same name, if `by_name`.
    """
    placed, layout = host.placed, host.placed.layout
    graph, schedule = placed.graph, placed.schedule
    sizes, counts = np.diff(schedule.node_ptr), graph.nodes_per_type
    alike: dict[str, list[int]] = {}
    for i, t in enumerate(placed.type_ids):
        alike.setdefault(graph.types[t].name if by_name else str(graph.types[t]), []).append(i)
    rows = [
        part
        for places in alike.values()
        for part in ([places] if len(places) >= FOLDED_TYPES else [[i] for i in places])
    ]
    lines = []
    for places in sorted(rows):
        ids = [placed.type_ids[i] for i in places]
        batches = sizes[np.isin(schedule.batch_type, ids)]
        nodes = int(counts[ids].sum())
        padding = layout.lanes[ids].sum() / nodes - 1
        sliced = np.mean([host.lowered.sliced(i) for i in places])
        text = str(graph.types[ids[0]])
        if len(ids) > 1:
            name = f"{graph.types[ids[0]].name} × {len(ids)} types, such as " if by_name else ""
            text = f"{name}{text}" if by_name else f"{text} × {len(ids)} types"
        lines.append(
            f"  {nodes:5}  {len(batches):7}  {batches.max():6}  {padding:7.0%}  "
            f"{sliced:6.0%}  {text}"
        )
    return lines
