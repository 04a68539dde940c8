"""`OutputSpec`: how the rows that a program returns become results."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from jedbatch._jaxpr.identity import tree_key
from jedbatch._jaxpr.storage import Kind


@dataclass(frozen=True)
class Slice:
    """The place of a ragged result of an instance: rows of the result of a region.

    Attributes:
      stage, result: whose rows.
      start: the first of them.
      shape: what they make up, the ragged axes at their places.
      axes: those places; several of a table, which has a row for each of its entries.
    """

    stage: int
    result: int
    start: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class PaddedPlace:
    """The place of a ragged result of an instance that an arena returns padded.

    Attributes:
      first: its row among what the arena returns.
      kind: shape and dtype of the padded array.
      shape: of the part of it that exists.
    """

    first: int
    kind: Kind
    shape: tuple[int, ...]


def with_batch(place: Any, batch: int, room: int) -> Any:
    """Returns the place of stacked results of so many instances where there is room for others.

    Args:
      place: the first row of a leaf, or a `PaddedPlace`.
      batch: instances.
      room: for so many.
    """
    if isinstance(place, PaddedPlace):
        return replace(place, first=place.first // batch * room)
    return place // batch * room


@dataclass(frozen=True)
class OutputSpec:
    """The results of instances, in terms of rows.

    Attributes:
      structures: the pytree structure of each instance's result, or of all stacked ones.
      places: for each of these, (shape and dtype, first row) of every leaf; a ragged one is a
        `Slice` or a `PaddedPlace`, or one for each instance.
      batch: instances stacked along the first axis; None for a list of results.
      is_list_stacked: whether a list of results is stacked in the end, as some have a ragged leaf
        where others have rows.
    """

    structures: tuple[Any, ...]
    places: tuple[tuple[tuple[Kind, Any], ...], ...]
    batch: int | None
    is_list_stacked: bool = False
    _keys: tuple[Hashable, ...] = field(init=False, repr=False)  # tell structures apart exactly

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keys", tuple(map(tree_key, self.structures)))
