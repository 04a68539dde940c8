"""The values that enter a graph: where they come from, and those of many instances as columns.

Instances that are recorded together hold their numbers in one array of each type. Cut into
`InputRows`, an array and an object for every instance and type, they take longer to make and to
join again than a small instance takes to record, and most minibatches are planned as they were
recorded. So `InputColumns` keeps the arrays whole and is cut when somebody asks for a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jedbatch._graph.paths import pointers
from jedbatch._graph.types import LENGTH, ValueType

if TYPE_CHECKING:
    from jaxtyping import Int64


@dataclass(frozen=True, eq=False)
class InputRows:
    """Consecutive inputs of one value type: where their values come from.

    Either `rows` holds them, or they are parts of the instance's own array number `leaf`:
    `array[i]` for each entry i of `rows`, or, if `rows` is None, the one that the indices in
    `path` lead to, one after the other.
    """

    type: ValueType
    rows: np.ndarray | None  # [k, *type.shape], or int[k] positions in the leaf
    leaf: int | None = None
    path: tuple = ()

    def __len__(self) -> int:
        return 1 if self.rows is None else len(self.rows)


class InputColumns(Sequence[InputRows]):
    """The `InputRows` of instances that were recorded together, cut out of columns when needed.

    Letters: `C` columns, `K` parts that they are cut into.

    Attributes:
      types: of the columns, C.
      columns: the values of each, part after part.
      column: int64[K], the column that each part is cut out of, in the order of the inputs.
      ends: int64[K + 1], the inputs where the parts begin and end.
    """

    __slots__ = ("_parts", "column", "columns", "ends", "types")

    def __init__(
        self,
        types: Sequence[ValueType],
        columns: Sequence[np.ndarray],
        column: Int64[np.ndarray, " K"],
        ends: Int64[np.ndarray, " K+1"],
    ):
        self.types = tuple(types)
        self.columns = tuple(columns)
        self.column = column
        self.ends = ends
        self._parts: tuple[InputRows, ...] | None = None

    @property
    def parts(self) -> tuple[InputRows, ...]:
        """The parts, K."""
        if self._parts is None:
            self._parts = tuple(self._cut())
        return self._parts

    def _cut(self) -> Iterator[InputRows]:
        begin = [0] * len(self.columns)
        for c, count in zip(self.column.tolist(), self._counts(), strict=True):
            end = begin[c] + count
            yield InputRows(self.types[c], self.columns[c][begin[c] : end])
            begin[c] = end

    def _counts(self) -> list[int]:
        """Returns how many inputs each part has."""
        return (self.ends[1:] - self.ends[:-1]).tolist()

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, key: Any) -> Any:
        return self.parts[key]

    def __iter__(self) -> Iterator[InputRows]:
        return iter(self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return InputColumns, (self.types, self.columns, self.column, self.ends)


def types_and_counts(inputs: Sequence[InputRows]) -> tuple[list[ValueType], list[int]]:
    """Returns (types of parts of inputs, how many inputs each has)."""
    if isinstance(inputs, InputColumns):
        return [inputs.types[c] for c in inputs.column.tolist()], inputs._counts()
    return [part.type for part in inputs], list(map(len, inputs))


def types_in_order(inputs: Sequence[InputRows]) -> tuple[list[ValueType], list[int]]:
    """Returns the same, with parts joined where all are of one type."""
    if isinstance(inputs, InputColumns) and len(inputs.types) == 1:
        return [inputs.types[0]], [count_inputs(inputs)]
    return types_and_counts(inputs)


def count_inputs(inputs: Sequence[InputRows]) -> int:
    """Returns how many inputs there are."""
    return int(inputs.ends[-1]) if isinstance(inputs, InputColumns) else sum(map(len, inputs))


def whole_numbers(inputs: Sequence[InputRows], count: int) -> np.ndarray:
    """Returns int64[count], the inputs that are whole numbers of their own; the others are 0."""
    numbers = np.zeros(count, np.int64)
    first = 0
    for chunk in inputs:
        if chunk.type == LENGTH and chunk.rows is not None and chunk.leaf is None:
            numbers[first : first + len(chunk)] = chunk.rows
        first += len(chunk)
    return numbers


class HeldValues(NamedTuple):
    """The values of inputs that a graph holds itself (I inputs).

    Attributes:
      types: value types.
      values: the values of each type, stacked.
      which: int64[I], the type of each input; -1 if its value is a part of the instance.
      row: int64[I], its place among the values of the type.
    """

    types: tuple[ValueType, ...]
    values: tuple[np.ndarray, ...]
    which: np.ndarray
    row: np.ndarray

    def value(self, number: int) -> np.ndarray:
        """Returns the value of an input that the graph holds."""
        rows: np.ndarray = self.values[self.which[number]]
        return rows[self.row[number]]


def held_values(inputs: Sequence[InputRows]) -> HeldValues:
    """Returns the values that a graph holds for its inputs."""
    types: dict[ValueType, int] = {}
    rows: list[list[np.ndarray]] = []
    which, row = np.full((2, count_inputs(inputs)), -1)
    first = 0
    for part in inputs:
        if part.rows is not None and part.leaf is None:
            number = types.setdefault(part.type, len(types))
            if number == len(rows):
                rows.append([])
            which[first : first + len(part)] = number
            rows[number].append(part.rows)
        first += len(part)
    for number in range(len(rows)):
        own = np.flatnonzero(which == number)
        row[own] = np.arange(len(own))
    return HeldValues(tuple(types), tuple(map(np.concatenate, rows)), which, row)


def chosen_inputs(inputs: Sequence[InputRows], order: np.ndarray) -> tuple[InputRows, ...]:
    """Returns some inputs in some order, int64[...].

    Parts of one type are not joined: what an instance has must not depend on those beside it.
    """
    parts = list(inputs)
    ends = pointers(np.fromiter(map(len, parts), np.int64, len(parts)))
    place = np.searchsorted(ends, order, side="right") - 1
    within = order - ends[place]
    cuts = np.flatnonzero(np.diff(place, prepend=-1, append=-1)).tolist() if len(order) else []
    chosen = []
    for a, b in itertools.pairwise(cuts):
        part = parts[place[a]]
        whole = part.rows is None or b - a == len(part)
        chosen.append(part if whole else replace(part, rows=part.rows[within[a:b]]))
    return tuple(chosen)


def bytes_of_inputs(inputs: Sequence[InputRows]) -> int:
    """Returns the bytes of the values that inputs hold."""
    if isinstance(inputs, InputColumns):
        return sum(x.nbytes for x in inputs.columns)
    return sum(part.rows.nbytes for part in inputs if part.rows is not None)
