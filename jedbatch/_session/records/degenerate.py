"""Warnings of minibatches that hardly batch, before compiling (see `_graph.degeneracy`)."""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from jedbatch._graph.degeneracy import MAX_TYPES, Degeneracy
from jedbatch._graph.graph import Graph
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.symbolic_dims import is_ragged, user_level
from jedbatch._ragged.calls import RegionCalls
from jedbatch._ragged.lengths import Lengths
from jedbatch._record.passes.coalesce import is_cell, num_operations
from jedbatch._record.run.units import Unit
from jedbatch._record.types.registry import MANY_REPEATED, Registry
from jedbatch._support.types import Array
from jedbatch.errors import (
    GroupedByShapesWarning,
    GrowingTypesWarning,
    ManyTypesWarning,
    NoCellsWarning,
    PerformanceWarning,
    RecompilationWarning,
    SlowCallsWarning,
)

GROWING_PLANS = 6  # plans in a row with types that none before had,
GROWING_TYPES = 8  # if there are more than these by then,
GROUPED_PLANS = 3  # and so many where instances are grouped by equal shapes
WARMING_UP = 3  # minibatches, in which calls are new
MANY_OPERATIONS = 2048  # of a minibatch that are worth a warning,
SOME_OPERATIONS, MUCH_TIME = 512, 0.1  # or so many that take so many seconds,
CALLS = 10  # of cells that are recorded in the time of an operation, at least
MOST_NAMED, MIN_PART = 3, 0.1  # which names so many functions, each with so much of them
MOST_SLOW = 0.2  # of the nodes that were recorded
MOST_REPEATED = 0.5  # operations on shared arguments for each of these nodes
FEW_LENGTHS = 2  # of lists, which make no more types than a program may have
FEW_PROGRAMS = 8  # for one instance or length of a minibatch each, of which there is no warning

FOR_ALL_LENGTHS = (
    "Write it with operations that run for several lengths at once (`x.shape[0]` in place of "
    "`len(x)`), or pad arrays to a few lengths"
)


def warn_if_degenerate(
    graph: Graph, registry: Registry, new_in_a_row: int, apart: str | None
) -> None:
    """Warns of a graph that hardly batches, once for each cause.

    Args:
      graph: of a minibatch.
      registry: of its types; notes the causes that have been warned of.
      new_in_a_row: plans, up to this one, that each had types that none before had.
      apart: why instances are grouped by equal shapes; None if they are not.
    """
    lines, warned = registry.lines, registry.warned
    if RecompilationWarning in warned:  # that names what makes the types
        return
    cause = GroupedByShapesWarning if apart else ManyTypesWarning
    if cause not in warned and (degenerate := Degeneracy.of(graph)) is not None:
        difference, cure = degenerate.difference
        where = sorted({lines[t] for t in degenerate.types if t in lines})
        at = f" ({', '.join(where[:3])})" if where else ""
        text = (
            f"a minibatch of {graph.num_instances} instances has {degenerate}; each type is "
            f"compiled and run by itself. {len(degenerate.types)} of them are `{degenerate.name}`"
            f"{at} and differ in {difference}. "
        )
        text += f"Instances are grouped by equal shapes, since {apart}. " if apart else ""
        warn_once(cause, f"{text}{cure}", warned)
        return
    if apart and new_in_a_row >= GROUPED_PLANS:
        warn_once(
            cause,
            f"{new_in_a_row} minibatches in a row had lengths that none before had, each of which "
            f"is compiled and run by itself. Instances are grouped by equal shapes, since {apart}. "
            f"{FOR_ALL_LENGTHS}",
            warned,
        )
        return
    grows = new_in_a_row >= GROWING_PLANS and len(graph.types) > GROWING_TYPES
    run = [t for t in range(len(graph.types)) if is_run(registry, t)] if grows else []
    are_many = len(run) > GROWING_TYPES and Degeneracy.of(graph) is None
    if are_many and GrowingTypesWarning not in warned:
        last = run[-1]
        at = f" ({lines[last]})" if last in lines else ""
        warn_once(
            GrowingTypesWarning,
            f"{new_in_a_row} minibatches in a row had node types that none before had, "
            f"{len(run)} by now, and each time programs are compiled again. The last one "
            f"is `{graph.types[last]}`{at}. Pass what differs from instance to instance as an "
            "array, or as a positional argument of a cell",
            warned,
        )


def is_run(registry: Registry, number: int) -> bool:
    """Returns whether nodes of a type run: those of lists or ragged values become others."""
    of = registry.node_types[number]
    is_other = any(is_ragged(t.shape) for t in (*of.operands, *of.results))
    return not is_other and number not in registry.arities.padded


def warn_if_programs_grow(
    calls: Sequence[RegionCalls], registry: Registry, new_in_a_row: int, apart: str | None
) -> None:
    """Warns of instances whose arrays of any length are a program of their own, each compiled anew.

    Args:
      calls: of each program of a minibatch.
      registry: notes the causes that have been warned of.
      new_in_a_row: minibatches, up to this one, that each had programs that none before had.
      apart: why nodes on padded arrays cannot take their place; None if they can, or need not.
    """
    if apart is None or not new_in_a_row:
        return
    single = sum(len(of_region.calls) == 1 for of_region in calls)
    if new_in_a_row < GROUPED_PLANS and single < FEW_PROGRAMS:
        return
    found = f"{single} instances of a minibatch need a program each"
    if new_in_a_row >= GROUPED_PLANS:
        found = f"{new_in_a_row} minibatches in a row needed programs that none before had"
    warn_once(
        GroupedByShapesWarning,
        f"{found}, which are compiled one by one: what they do to arrays of any length cannot be "
        f"padded between nodes, {apart}. Reduce such arrays to vectors before instances differ "
        "in what is done with them, or pad them to a few lengths",
        registry.warned,
    )


def warn_if_slowly_recorded(registry: Registry, num_before: int) -> None:
    """Warns of what is looked into each time, or goes through JAX, if it is much.

    These are calls of cells, and operations on shared arguments alone.

    Args:
      registry: has how many there were, and why; of some the user can help nothing.
      num_before: minibatches that were recorded before; the first ones have calls that are new.
    """
    if num_before < WARMING_UP:
        return
    repeated = registry.num_repeated
    if repeated >= max(MANY_REPEATED, MOST_REPEATED * registry.num_recorded):
        warn_once(
            NoCellsWarning,
            f"{repeated} operations on shared arguments alone, such as that at "
            f"{registry.line_repeated}, were recorded for the instances of a minibatch. Each is "
            "computed once, but JAX takes tens of microseconds to pass it on again for each "
            "instance. Compute before what depends on shared arguments alone, and pass it to the "
            "batched function as an argument",
            registry.warned,
        )
    if not registry.slow_calls:
        return
    slow = Counter({k: n for k, n in registry.slow_calls.items() if k[1]})
    if slow.total() <= MOST_SLOW * registry.num_recorded:
        return
    (name, reason), count = slow.most_common(1)[0]
    warn_once(
        SlowCallsWarning,
        f"{slow.total():,} calls were recorded slowly in a minibatch, many times as "
        f"long as others take: {count:,} of `{name}`, which {reason}",
        registry.warned,
    )


def warn_if_some_are_apart(registry: Registry, lengths: Lengths) -> None:
    """Warns of instances that run by themselves beside others of all lengths.

    Args:
      registry: notes the causes that have been warned of.
      lengths: those of the minibatch, looked at last.
    """
    if lengths.are_some_apart:
        warn_once(
            GroupedByShapesWarning,
            f"some instances of a minibatch run by themselves, with programs for their lengths: "
            f"{lengths.apart}. {FOR_ALL_LENGTHS}",
            registry.warned,
        )


def warn_if_many_lengths(
    arrays: Sequence[Sequence[Array]], graph: Graph, registry: Registry, apart: str | None
) -> None:
    """Warns of a minibatch with types for each of many lengths, before they are compiled.

    Args:
      arrays: of its instances.
      graph: of it; rows that are read one by one share types.
      registry: notes the causes that have been warned of.
      apart: why instances are grouped by equal shapes; None if they are not.
    """
    if apart is None or GroupedByShapesWarning in registry.warned:
        return
    of_types = [x for t in graph.present_types for x in graph.types[t].operands]
    read = _lengths(x for x in of_types if not is_ragged(x.shape))
    given = _lengths(itertools.chain.from_iterable(arrays))
    many = max((len(given[kind] & read.get(kind, set())) for kind in given), default=0)
    if many >= FEW_PROGRAMS:
        warn_once(
            GroupedByShapesWarning,
            f"a minibatch has arrays of {many} lengths, each of which is compiled and run by "
            f"itself. Instances are grouped by equal shapes, since {apart}. {FOR_ALL_LENGTHS}",
            registry.warned,
        )


def _lengths(arrays: Iterable[Array | ValueType]) -> dict[tuple, set[int]]:
    """Returns the lengths of arrays by their kinds, (shape without length, dtype)."""
    lengths: dict[tuple, set[int]] = {}
    for x in arrays:
        if x.shape:
            lengths.setdefault((x.shape[1:], x.dtype), set()).add(x.shape[0])
    return lengths


def lengths_that_differ(arrays: Iterable[Array]) -> set[tuple]:
    """Returns the kinds, (shape without length, dtype), of arrays that are not equally long."""
    return {kind for kind, found in _lengths(arrays).items() if len(found) > 1}


def last_for_a_length(registry: Registry, first: int, kinds: set[tuple]) -> int | None:
    """Returns the last type, from a first one on, that reads an array of some kinds; None if none.

    Args:
      registry: of the types.
      first: of them that is looked at.
      kinds: see `lengths_that_differ`.
    """
    for t in reversed(range(first, len(registry.node_types))):
        operands = registry.node_types[t].operands
        if any((x.shape[1:], x.dtype) in kinds for x in operands if x.shape):
            return t
    return None


def warn_if_lengths_grow(
    registry: Registry, calls_in_a_row: int, last: int, apart: str | None
) -> None:
    """Warns of calls that decide on values, each of which had types for lengths that were new.

    Args:
      registry: of the types.
      calls_in_a_row: up to this one.
      last: of these types.
      apart: why lengths are told apart; None if they are not.
    """
    if calls_in_a_row < GROUPED_PLANS or apart is None:
        return
    at = f" ({registry.lines[last]})" if last in registry.lines else ""
    warn_once(
        GroupedByShapesWarning,
        f"{calls_in_a_row} calls in a row had arrays of lengths that none before had, and each "
        f"time programs were compiled, since {apart}. The last type is "
        f"`{registry.node_types[last]}`{at}. {FOR_ALL_LENGTHS}",
        registry.warned,
    )


def warn_if_rounds_grow(registry: Registry, num_compiled: int, padded: Collection[int]) -> None:
    """Warns of lists that are longer in every round of a call, so that each is compiled anew.

    Where Python decides on values, each length makes types of its own, of cells, too.

    Args:
      registry: of the types.
      num_compiled: programs for rounds that the call compiled.
      padded: types that are not counted, since they read lengths behind their operands.
    """
    if num_compiled < GROUPED_PLANS:
        return
    lengths: dict[str, dict[int, int]] = {}  # a type by the number of operands, by name
    for t, node_type in enumerate(registry.node_types):
        if t not in padded:
            lengths.setdefault(node_type.name, {})[len(node_type.operands)] = t
    name, types = max(lengths.items(), key=lambda item: len(item[1]))
    are_many = len(types) > FEW_LENGTHS and len(registry.node_types) > MAX_TYPES
    if not are_many and min(num_compiled, len(types)) < GROWING_PLANS:
        return
    last = types[max(types)]
    at = f" ({registry.lines[last]})" if last in registry.lines else ""
    warn_once(
        GrowingTypesWarning,
        f"{num_compiled} programs were compiled in one call, since rounds had node types that none "
        f"before had. `{name}`{at} has {min(types)} to {max(types)} operands, and where Python "
        "decides on values each number is a type. Keep what grows in an array with room for all, "
        "`jnp.zeros((most, d)).at[i].set(x)`, and mask what is not there, or fold the list by a "
        "cell of two operands",
        registry.warned,
    )


def warn_once(cause: type[PerformanceWarning], text: str, warned: set[type]) -> None:
    """Warns at the user's line, unless the cause is among those that have been warned of."""
    if cause in warned:
        return
    text = f"{text}. `help(jedbatch.errors.{cause.__name__})` says more."
    warnings.warn(text, cause, stacklevel=user_level())
    warned.add(cause)  # not if the warning is an error


def warn_if_costly(
    graph: Graph,
    merged: Graph,
    seconds: float,
    registry: Registry,
    *,
    has_new_types: bool,
    units: Callable[[], Counter[Unit]],
) -> None:
    """Warns of many operations that calls of cells would take the place of.

    Where these are fewer, or the function calls cells, too, that is if recording takes much time,
    though nothing is traced: operations take from 10 to 700 µs.

    Args:
      graph: of the new instances of a minibatch, with a node for each operation.
      merged: the same as it is planned, with operations merged.
      seconds: that recording them has taken.
      registry: has the lines of operations, and which warnings there have been.
      has_new_types: whether types were met, and traced, that none before had.
      units: counts operations by what would be a cell of them.
    """
    if NoCellsWarning in registry.warned or len(graph.node_type) < SOME_OPERATIONS:
        return
    total = num_operations(graph)
    if total < SOME_OPERATIONS:
        return
    num_calls = len(graph.node_type) - total
    takes_long = seconds >= MUCH_TIME and not has_new_types and num_calls <= CALLS * total
    if not takes_long and (total < MANY_OPERATIONS or total < len(graph.node_type)):
        return
    if Degeneracy.of(merged) is not None:  # which is warned of first
        return
    num_nodes = num_operations(merged)
    counts = units() if num_nodes < total else Counter[Unit]()
    part = MIN_PART * counts.total()
    named = [u for u, num in counts.most_common(MOST_NAMED) if num >= part]
    cures = []
    if parts := [u for u in named if not u.is_whole]:
        cures.append(f"write `@jedbatch.cell` above {_places(parts)}")
    if wholes := [u for u in named if u.is_whole]:
        cures.append(
            "make a function with `@jedbatch.cell` above it of what is done for one node in "
            f"{_places(wholes)}"
        )
    if not cures and num_nodes == total:
        cures.append(
            f"call cells, such as `jedbatch.cell(jnp.add)`, in place of {_single(merged, registry)}"
        )
    merged_into = ""
    if 0 < num_nodes < total:
        a_node = f"{1e6 * seconds / num_nodes:.0f} µs for each of the {num_nodes} nodes"
        merged_into = f", or {a_node} that they were merged into"
    warn_once(
        NoCellsWarning,
        f"{total} operations of a minibatch were recorded one by one, as they are not in cells: in "
        f"{1e3 * seconds:.0f} ms, {1e6 * seconds / total:.1f} µs each{merged_into}. "
        "A call of a cell is recorded at once, in about one: "
        f"{'; '.join(cures) or 'write `@jedbatch.cell` above what is done for one node'}",
        registry.warned,
    )


def _single(graph: Graph, registry: Registry) -> str:
    """Returns the names of the operations that most nodes are, and where each was met first."""
    counts = np.bincount(graph.node_type, minlength=len(graph.types))
    counts[[not t.operands or is_cell(t) for t in graph.types]] = 0  # some are shared values
    most = np.argsort(-counts, kind="stable")[:MOST_NAMED].tolist()
    names = [(str(graph.types[t]), registry.lines.get(t)) for t in most if counts[t]]
    return ", ".join(f"`{name}` ({line})" if line else f"`{name}`" for name, line in names)


def _places(units: Sequence[Unit]) -> str:
    return ", ".join(f"`{u.name}` ({u.line})" for u in units)
