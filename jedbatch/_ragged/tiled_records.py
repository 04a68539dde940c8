"""Records of instances whose arrays [n, ...] travel through their graphs as tiles.

Sentences at the leaves of trees run before the graph, all together (see `_ragged.regions`). Where
such arrays are the states of a recursion, as the rows [sites, 4] of every node of a phylogenetic
tree are, what is done to them is another program for every tree. Then nodes on arrays become nodes
on tiles (see `_ragged.tiled_graph`), which are scheduled like all others: types of nodes depend
neither on how long the arrays are nor on the tree.

The rows of the last tile beyond the last row of the array repeat that row, so that what is computed
of them is nothing that is not computed anyway.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jedbatch._graph.graph import Graph
from jedbatch._graph.record import Record
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.symbolic_dims import extent_at, is_ragged, ragged_axes
from jedbatch._program.output_spec import TileRun
from jedbatch._program.plan import TiledRows
from jedbatch._ragged.needed_rows import nothing_error
from jedbatch._ragged.regions import RaggedRecord, Regions, some_are_ragged
from jedbatch._ragged.tile_templates import TemplateForm, make_templates
from jedbatch._ragged.tiled_arrays import added_arrays
from jedbatch._ragged.tiled_graph import TileTemplates, repeat_nodes
from jedbatch._support.caches import Budget, Memory
from jedbatch._support.types import Array, AxisSize

MAX_EXPANDED = 4096  # records for numbers of tiles that are kept


class TiledGraph:
    """The graph of instances with nodes on tiles, for all lengths.

    Args:
      graph: of the instances, with nodes on arrays of any length.
      shapes: of the results that it returns of each instance.
      num_arrays: of each instance.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Sequence[Sequence[tuple[AxisSize, ...]]],
        num_arrays: Sequence[int],
    ):
        self._given = graph, shapes, num_arrays
        self._templates: dict[int, tuple[TileTemplates, list[TemplateForm]]] = {}

    def templates(self, regions: Regions) -> tuple[TileTemplates, list[TemplateForm]]:
        """Returns its templates, and what belongs to each instance, for tiles as they are now."""
        rows, (graph, shapes, num_arrays) = regions.tiles.rows, self._given
        if rows not in self._templates:
            self._templates[rows] = make_templates(graph, regions, shapes, num_arrays)
        return self._templates[rows]


@dataclass(frozen=True, eq=False)
class TiledRecord(RaggedRecord):
    """The record of an instance with nodes on tiles, for all lengths.

    Attributes:
      tiled: its graph is the one with its number.
      leaves: for each symbol, an array of the instance whose length it is.
    """

    tiled: TiledGraph = None  # type: ignore[assignment]
    leaves: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ExpandedRecord(RaggedRecord):
    """The record of an instance with nodes on tiles, for so many rows.

    Attributes:
      size: rows of a tile.
      templates: those of its nodes for this size, and others.
      tiled: the record for all lengths, with its number among them.
      symbols: of which its arrays have the lengths, in order.
      runs: the ragged results that tiles make up, by position.
    """

    size: int = 0
    templates: TileTemplates = None  # type: ignore[assignment]
    tiled: TiledRecord = None  # type: ignore[assignment]
    symbols: tuple[str, ...] = ()
    runs: dict[int, TileRun] = field(default_factory=dict)


class Expansion:
    """Graphs of nodes on tiles for the lengths of instances."""

    def __init__(self, regions: Regions, budget: Budget):
        self.regions = regions
        self._known: dict[Any, ExpandedRecord] = Memory(
            MAX_EXPANDED,
            budget,
            lambda _, record: record.whole.nbytes_each,
        )

    def expand(
        self, records: Sequence[Record], arrays: Sequence[Sequence[Array]]
    ) -> tuple[Sequence[Record], Sequence[Sequence[Array]]]:
        """Returns the records of instances for their lengths, and their arrays with tiles."""
        if not some_are_ragged(records):
            return records, arrays
        tiled = [i for i, record in enumerate(records) if isinstance(record, TiledRecord)]
        if not tiled:
            return records, arrays
        records, arrays = list(records), list(arrays)
        leaves: Any = [(i, k) for i in tiled for k in records[i].leaves.values()]  # type: ignore
        self.regions.tiles.choose_rows([len(arrays[i][k]) for i, k in leaves])
        size = self.regions.tiles.rows
        known: dict[Any, Any] = {}
        keys: list[Any] = []
        new: dict[Any, tuple[TiledRecord, list[int]]] = {}
        found = []
        for i in tiled:
            record: Any = records[i]
            form = record.tiled.templates(self.regions)[1][record.index]
            lengths = [len(arrays[i][record.leaves[s]]) for s in form.symbols]
            _refuse_nothing(form, lengths, i, arrays[i])
            returned = any(is_ragged(shape) for shape, _ in record.types)
            numbers = lengths if returned else [-(-n // size) for n in lengths]
            key = record, size, *numbers
            if key not in known:
                known[key] = self._known.get(key)
                if known[key] is None:
                    new[key] = record, lengths
            keys.append(key)
            found.append((form, arrays[i], lengths))
        for i, added in zip(tiled, added_arrays(found, size), strict=True):
            arrays[i] = [*arrays[i], *added]
        fresh = self._expanded(list(new.values()), size)
        made = dict(zip(new, fresh, strict=True))
        for i, key in zip(tiled, keys, strict=True):
            records[i] = made.get(key) or known[key]
        for key, expanded in made.items():
            self._known[key] = expanded
        return records, arrays

    def _expanded(
        self, new: Sequence[tuple[TiledRecord, list[int]]], size: int
    ) -> list[ExpandedRecord]:
        """Returns records for lengths."""
        if not new:
            return []
        tiles = _numbers_of_tiles([lengths for _, lengths in new], size)
        made = [(*record.tiled.templates(self.regions), record.index) for record, _ in new]
        templates = TileTemplates.select([(own, index) for own, _, index in made])
        num_arrays = [record.num_arrays for record, _ in new]
        whole = repeat_nodes(self.regions.tiles, templates, tiles, num_arrays)
        records = []
        for k, ((record, lengths), counts) in enumerate(zip(new, tiles, strict=True)):
            symbols = templates.output_symbols(k)
            runs, kinds = _results(record, symbols, lengths, counts, size)
            records.append(
                ExpandedRecord(
                    whole,
                    k,
                    record.structure,
                    kinds,
                    record.calls,
                    record.num_arrays + made[k][1][record.index].num_added,
                    record.ragged,
                    record.places,
                    size,
                    made[k][0],
                    record,
                    tuple(made[k][1][record.index].symbols),
                    runs,
                )
            )
        return records


def _results(
    record: TiledRecord,
    output_symbols: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[int],
    size: int,
) -> tuple[dict[int, TileRun], tuple[Kind, ...]]:
    """Returns (the ragged results that tiles make up, types of all results) of an instance."""
    elsewhere = {position for position, _, _ in record.ragged}
    symbols = iter(output_symbols)
    runs: dict[int, TileRun] = {}
    kinds: list[Kind] = []
    for position, (shape, dtype) in enumerate(record.types):
        symbol = -1 if position in elsewhere else next(symbols)
        if symbol >= 0:
            (axis,) = ragged_axes(shape)
            tile = tuple(size if a == axis else d for a, d in enumerate(shape))
            shape = tuple(lengths[symbol] if a == axis else d for a, d in enumerate(shape))
            runs[position] = TileRun(0, counts[symbol], (tile, dtype), shape, axis)
        kinds.append((shape, dtype))
    return runs, tuple(kinds)


def _refuse_nothing(
    template: TemplateForm, lengths: Sequence[int], instance: int, arrays: Sequence[Array]
) -> None:
    """Raises `ValueError` if something is taken of rows that an instance has none of."""
    if all(lengths):
        return
    for extent, numbers, operation in template.nonempty:
        if extent_at(extent, {s: lengths[k] for s, k in numbers.items()}) == 0:
            raise nothing_error(instance, arrays, operation, extent)


def counter_of_tiles(
    records: Sequence[Record], arrays: Sequence[Sequence[Array]]
) -> Callable[[], TiledRows] | None:
    """Returns what counts the rows of nodes on tiles; None if there are none.

    It is called for a plan that somebody looks at. Instances of as many tiles share a record, and
    differ in rows.
    """
    if not some_are_ragged(records):
        return None
    found = [
        (record, [len(own[record.tiled.leaves[s]]) for s in record.symbols])
        for record, own in zip(records, arrays, strict=True)
        if isinstance(record, ExpandedRecord)
    ]
    return functools.partial(_count_rows, found) if found else None


def _count_rows(found: Sequence[tuple[ExpandedRecord, list[int]]]) -> TiledRows:
    """Returns the rows of nodes on tiles of some instances, given their lengths."""
    size = found[0][0].size
    templates = TileTemplates.select([(x.templates, x.tiled.index) for x, _ in found])
    lengths = [own for _, own in found]
    exist, computed = templates.count_rows(lengths, _numbers_of_tiles(lengths, size), size)
    return TiledRows(size, exist, computed)


def _numbers_of_tiles(lengths: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Returns how many tiles of so many rows arrays of some lengths are cut into."""
    return [[-(-n // size) for n in own] for own in lengths]


def on_tiles(
    records: Sequence[RaggedRecord],
    regions: Regions,
    leaf_of: Sequence[Mapping[str, Sequence[int]]],
) -> list[RaggedRecord]:
    """Returns the records of instances whose ragged nodes become nodes on tiles, if any do.

    Args:
      records: of all instances of one graph, in order.
      regions: the regions met so far.
      leaf_of: for each, the arrays whose length each symbol is.
    """
    graph = records[0].whole
    if not any(map(regions.is_ragged, graph.present_types)):
        return list(records)
    elsewhere = [{position for position, _, _ in record.ragged} for record in records]
    shapes = [
        [s for k, (s, _) in enumerate(record.types) if k not in apart]
        for record, apart in zip(records, elsewhere, strict=True)
    ]
    num_arrays = [record.num_arrays for record in records]
    tiled = TiledGraph(graph, shapes, num_arrays)
    forms = tiled.templates(regions)[1]
    return [
        TiledRecord(
            record.whole,
            record.index,
            record.structure,
            record.types,
            record.calls,
            record.num_arrays,
            record.ragged,
            record.places,
            tiled,
            {s: leaves[s][0] for s in form.symbols},
        )
        for record, form, leaves in zip(records, forms, leaf_of, strict=True)
    ]
