"""Pictures of what was planned: graphs, batches, time and memory, as SVG.

Every function returns a `Picture`. A notebook shows it, `Picture.save` writes it to a file, and
names, counts and reasons appear where the mouse rests on a mark. Nothing is computed on a device.

- `graph`: the graph of one instance, or of all.
- `batches`: which nodes run together.
- `timeline`: when which type runs, and how wide the batches are.
- `memory`: which rows hold what, from when until when, and how they are read.
- `time_split`: where the time goes, of one plan or of several.
- `state_machine`: a learned policy.

Small graphs are drawn node by node. Large ones are counted: a mark stands for many nodes and says
for how many, so that pictures stay small whatever the minibatch.

Examples:
  >>> from jedbatch import Graph, schedule, viz
  >>> graph = Graph.from_dag([0, 0, 1, 1], [[], [], [0, 1], [2]], names=["word", "phrase"])
  >>> viz.graph(graph)
  <Picture of 2 kB: Graph of 1 instance: 4 nodes of 2 types; a notebook shows it, ...>
  >>> picture = viz.batches(graph, schedule(graph))
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch._draw.batches import draw_batches, draw_timeline
from jedbatch._draw.graph import draw_graph
from jedbatch._draw.memory import arenas_of, draw_memory
from jedbatch._draw.styles import TypeStyles
from jedbatch._graph.graph import Graph
from jedbatch._program.plan import Plan
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.schedule import Schedule
from jedbatch._support.canvas import (
    GREY,
    MARGIN,
    WIDTH,
    Canvas,
    Picture,
    colours,
    counted,
    fitted,
    text_width,
)

__all__ = ["Picture", "batches", "graph", "memory", "state_machine", "time_split", "timeline"]


def graph(source: Plan | Graph, instance: int | None = None) -> Picture:
    """Draws what instances compute: nodes by type and level, and what they read.

    The level of a node is the longest path to it from the inputs, so no node can run before those
    on its left. More than 400 nodes are counted by level and type.

    Args:
      source: a plan, or a graph.
      instance: which instance to draw, as an index; all by default.

    Returns:
      The picture.

    Raises:
      IndexError: there is no such instance.
      TypeError: the source is neither a plan nor a graph, or the instance no index.
      ValueError: the plan has lost its graph (see `batches`).

    Examples:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 1, 1], [[], [0], [0, 1]])
      >>> jedbatch.viz.graph(graph).save("graph.svg")  # doctest: +SKIP
    """
    whole_graph = _graph_of(source, "graph")
    styles = TypeStyles.of(whole_graph)
    if instance is None:
        instances = counted(whole_graph.num_instances, "instance")
        return draw_graph(
            whole_graph, styles, f"Graph of {instances}: {_size_of_graph(whole_graph)}"
        )
    if isinstance(instance, bool) or not isinstance(instance, (int, np.integer)):
        raise TypeError(
            f"`viz.graph` got instance {checks.brief(instance)}; expected its index, or none "
            "to draw all."
        )
    if not -whole_graph.num_instances <= instance < whole_graph.num_instances:
        raise IndexError(
            f"`viz.graph` got instance {instance} of {whole_graph.num_instances}; expected an "
            f"index from 0 to {whole_graph.num_instances - 1}, or none to draw all."
        )
    i = range(whole_graph.num_instances)[instance]
    part = Graph.select([(whole_graph, i)])
    return draw_graph(
        part, styles.counted_in(part), f"Graph of instance {i}: {_size_of_graph(part)}", i
    )


def batches(source: Plan | Graph, schedule: Schedule | None = None) -> Picture:
    """Draws which nodes run together: a box for every batch, in the order they run.

    Inside of a plan's boxes nodes are in the order of their lanes. Edges side by side can be read
    as slices, those that cross must be gathered.

    Args:
      source: a plan, or a graph.
      schedule: the batches of a graph; a plan has its own.

    Returns:
      The picture.

    Raises:
      TypeError: the source is neither a plan nor a graph, or the schedule is missing or too much.
      ValueError: the schedule is not one of this graph; or the plan has been through `jax.jit`
        or another transformation, which keeps what is needed to run it and no more.

    Examples:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 0, 1], [[], [], [0, 1]])
      >>> jedbatch.viz.batches(graph, jedbatch.schedule(graph))
      <Picture of 2 kB: 2 batches of 3 nodes; a notebook shows it, ...>

    References:
      Chen et al., ED-Batch, ICML 2023, figure 1.
    """
    graph, cut = _scheduled(source, schedule, "batches")
    layout = source.layout if isinstance(source, Plan) else None
    node = cut.node if layout is None else layout.node
    return draw_batches(graph, cut, node, TypeStyles.of(graph), _grouped(cut))


def timeline(source: Plan | Graph, schedule: Schedule | None = None) -> Picture:
    """Draws a schedule over time: a lane for every node type, a mark for every batch.

    The caption says how many batches are certainly needed.

    Args:
      source: a plan, or a graph.
      schedule: the batches of a graph; a plan has its own.

    Returns:
      The picture.

    Raises:
      TypeError, ValueError: as for `batches`.

    Examples:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 0, 1], [[], [0], [0, 1]])
      >>> picture = jedbatch.viz.timeline(graph, jedbatch.schedule(graph))
    """
    graph, cut = _scheduled(source, schedule, "timeline")
    return draw_timeline(graph, cut, TypeStyles.of(graph), f"Timeline: {_grouped(cut)}")


def memory(plan: Plan, arena: str | None = None) -> Picture:
    """Draws the rows of an arena over time: who writes them, how long they live, who reads them.

    Slices are one stroke over neighbouring rows, in black; rows that are gathered are red. The
    numbers are what the program reads and add up to those of `print(plan)`.

    Args:
      plan: what `Batched.plan` returned.
      arena: which values, by dtype and shape, such as `"float32[64]"`; by default those whose
        rows take most bytes.

    Returns:
      The picture.

    Raises:
      TypeError: it is no plan.
      ValueError: there is no such arena, or the plan has lost its graph (see `batches`).

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> total = jedbatch.batch(lambda weights, x: jnp.tanh(x * weights).sum())
      >>> plan = total.plan(jnp.ones(3), [jnp.ones(3), jnp.zeros(3)])
      >>> picture = jedbatch.viz.memory(plan, "float32[3]")
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            f"`viz.memory` got {type(plan).__name__}; expected a plan, as `Batched.plan` returns."
        )
    graph = _graph_of(plan, "memory")
    arenas = arenas_of(plan)
    if arena is None:
        arena = max(arenas, key=lambda name: arenas[name].rows * arenas[name].row_bytes)
    if checks.of_type("viz.memory", arena, str, "the name of an arena") not in arenas:
        raise ValueError(
            f"`viz.memory` got arena {arena!r}; this plan has {', '.join(map(repr, arenas))}."
        )
    return draw_memory(plan, arenas[arena], TypeStyles.of(graph))


Times = Mapping[str, float]


def time_split(source: Plan | Sequence[Plan] | Mapping[str, Plan | Times] | Times) -> Picture:
    """Draws where time goes, as bars of stages, to compare plans or anything else measured.

    Args:
      source: a plan, several plans, or a dict from names to plans or to `{stage: seconds}`; or a
        single dict of seconds. The time on the device is there if `Batched.profile` measured it.

    Returns:
      The picture; numbers in milliseconds.

    Raises:
      TypeError: it is none of these.
      ValueError: there is nothing to draw, a number of seconds is negative or not finite, or a
        plan has lost its records (see `batches`).

    Examples:
      >>> import jedbatch
      >>> picture = jedbatch.viz.time_split({
      ...     "before": {"trace": 0.020, "schedule": 0.004},
      ...     "after": {"trace": 0.003, "schedule": 0.004},
      ... })
    """
    return _draw_bars(_bars(source))


def state_machine(fsm: FSM) -> Picture:
    """Draws a learned policy: its states, which types are ready in them and which one runs.

    Args:
      fsm: what `jedbatch.learn` returned.

    Returns:
      The picture, the one that a notebook shows of the policy itself.

    Raises:
      TypeError: it is no state machine.

    Examples:
      >>> import jedbatch
      >>> graph = jedbatch.Graph.from_dag([0, 1, 1, 0], [[], [], [0], [1]])
      >>> picture = jedbatch.viz.state_machine(jedbatch.learn([graph]))
    """
    if not isinstance(fsm, FSM):
        raise TypeError(
            f"`viz.state_machine` got {type(fsm).__name__}; expected a policy that "
            "`jedbatch.learn` returned or `FSM.load` read."
        )
    states = counted(len(fsm), "state")
    return Picture(fsm._repr_svg_(), f"State machine over {fsm.encoding}: {states}")


# --- what came ---


def _graph_of(source: Any, name: str) -> Graph:
    """Returns the graph to draw; raises an error that says what to do if there is none."""
    if isinstance(source, Graph):
        return source
    if not isinstance(source, Plan):
        raise TypeError(
            f"`viz.{name}` got {type(source).__name__}; expected a plan, as `Batched.plan` "
            "returns, or a `jedbatch.Graph`."
        )
    if source.shards:
        raise ValueError(
            f"`viz.{name}` got a plan of {len(source.shards)} shards, each of which has a graph; "
            f"draw one of them, as in `viz.{name}(plan.shards[0])`."
        )
    if source.graph is None:
        raise ValueError(
            f"`viz.{name}` got a plan that has been through `jax.jit` or another transformation "
            "and has no graph any more; draw the plan that `Batched.plan` returned, before "
            "passing it on."
        )
    return source.graph


def _scheduled(source: Any, schedule: Schedule | None, name: str) -> tuple[Graph, Schedule]:
    """Returns the graph and its batches."""
    graph = _graph_of(source, name)
    if isinstance(source, Plan):
        if schedule is not None:
            raise TypeError(
                f"`viz.{name}` got a plan and a schedule; a plan has its own. To draw another, "
                f"pass the graph: `viz.{name}(plan.graph, schedule)`."
            )
        assert source.schedule is not None
        return graph, source.schedule
    if not isinstance(schedule, Schedule):
        got = (
            "a graph without its schedule"
            if schedule is None
            else f"schedule {checks.brief(schedule)}"
        )
        raise TypeError(
            f"`viz.{name}` got {got}; cut it into batches first: "
            f"`viz.{name}(graph, jedbatch.schedule(graph))`."
        )
    schedule.check(graph)
    return graph, schedule


def _size_of_graph(graph: Graph) -> str:
    """Returns how much is in a graph, for a title."""
    types = len(graph.present_types)
    return f"{counted(len(graph.node_type), 'node')} of {counted(types, 'type')}"


def _grouped(schedule: Schedule) -> str:
    """Returns how much is in a schedule, for a title."""
    batches = counted(len(schedule), "batch", "batches")
    return f"{batches} of {counted(len(schedule.node), 'node')}"


# --- time ---

BAR, BETWEEN = 26, 16  # pixels of a bar and between bars
BARS = 24  # drawn


def _bars(source: Any) -> dict[str, dict[str, float]]:
    """Returns seconds by name and stage."""
    if isinstance(source, Plan):
        source = [source]
    if isinstance(source, Mapping):
        if source and not any(isinstance(x, (Mapping, Plan)) for x in source.values()):
            source = {"": source}
        bars = dict(source)
    elif isinstance(source, Sequence) and not isinstance(source, str):
        bars = {"" if len(source) == 1 else f"plan {i}": plan for i, plan in enumerate(source)}
    else:
        raise TypeError(
            f"`viz.time_split` got {type(source).__name__}; expected a plan, several plans, or a "
            'dict such as {"my plan": plan, "elsewhere": {"trace": 0.01}}.'
        )
    if not bars:
        raise ValueError("`viz.time_split` got nothing; give it at least one plan or measurement.")
    return {str(name): _seconds(str(name), bar) for name, bar in bars.items()}


def _seconds(name: str, bar: Any) -> dict[str, float]:
    """Returns the seconds of one bar."""
    if isinstance(bar, Plan):
        if bar.host is None:
            _graph_of(bar, "time_split")
        assert bar.host is not None
        device = {} if bar.device_seconds is None else {"device": bar.device_seconds}
        return {**bar.host.seconds, **device}
    if not isinstance(bar, Mapping):
        raise TypeError(
            f"`viz.time_split` got {type(bar).__name__} for {name!r}; expected a plan or a dict "
            "from stages to seconds."
        )
    for stage, s in bar.items():
        if not isinstance(s, numbers.Real):
            where = f"{str(stage)!r} of {name!r}" if name else repr(str(stage))
            raise TypeError(
                f"`viz.time_split` got {checks.brief(s)} for {where}; expected a number of seconds"
                f"{'' if name else ', a plan or a dict from stages to seconds'}."
            )
    seconds = {str(stage): float(s) for stage, s in bar.items()}
    for stage, s in seconds.items():
        if not (math.isfinite(s) and s >= 0):
            raise ValueError(f"`viz.time_split` got {s} seconds for {stage!r} of {name!r}.")
    return seconds


def _draw_bars(bars: dict[str, dict[str, float]]) -> Picture:
    """Draws a bar for each name, its stages one after the other."""
    totals = {name: sum(bar.values()) for name, bar in bars.items()}
    stages = list(dict.fromkeys(stage for bar in bars.values() for stage in bar))
    shade = dict(zip(stages, colours(len(stages)), strict=True))
    hidden = len(bars) - BARS
    canvas = Canvas(
        f"Time: {_milliseconds(totals[next(iter(totals))])} ms"
        if len(bars) == 1
        else f"Time of {len(bars)}, in milliseconds",
        "Milliseconds of each stage, from left to right."
        + (f" Drawn are the first {BARS}." if hidden > 0 else ""),
        [(shade[stage], stage, "") for stage in stages],
    )
    shown = list(bars.items())[:BARS]
    left = MARGIN + min(220.0, max(text_width(name) for name, _ in shown) + 10)
    scale = (WIDTH - MARGIN - 64 - left) / max(max(totals[name] for name, _ in shown), 1e-12)
    y = canvas.top
    for name, bar in shown:
        canvas.text(MARGIN, y + BAR / 2 + 4, fitted(name, left - MARGIN - 8), title=name)
        x = left
        for stage, s in bar.items():
            wide = s * scale
            hint = f"{stage}: {_milliseconds(s)} ms, {s / (totals[name] or 1):.0%}"
            marks = {"title": hint, "data_kind": "stage", "data_count": f"{s:.9g}"}
            canvas.rect(x, y, wide, BAR, fill=shade[stage], stroke="white", **marks)
            if text_width(_milliseconds(s), 10) <= wide - 4:
                middle = x + wide / 2, y + BAR / 2 + 4
                label = _milliseconds(s)
                canvas.text(*middle, label, size=10, anchor="middle", fill="white", title=hint)
            x += wide
        canvas.text(x + 6, y + BAR / 2 + 4, _milliseconds(totals[name]), fill=GREY)
        y += BAR + BETWEEN
    return canvas.picture(y - BETWEEN)


def _milliseconds(seconds: float) -> str:
    """Returns milliseconds with three digits."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
