"""The values of a program of a list, as what they are for lists of any length (see `rolling`)."""

from typing import Any, NamedTuple


class CannotRollError(Exception):
    """A program that is not known to be the same for lists of any length."""


class Single(NamedTuple):
    """A value that is computed once; its shape may depend on how many elements there are."""

    id: int


class Element(NamedTuple):
    """A value of the element at a position."""

    id: int
    position: int


class Chain(NamedTuple):
    """A reduction over the first elements, `op(op(base, x0), x1)`; `base` may be None."""

    id: int
    op: str
    base: int | None
    num_elements: int


class StackedElements(NamedTuple):
    """An array that has one row for each element along an axis, and each as it is."""

    id: int
    axis: int


class JoinedValues(NamedTuple):
    """Values that are stacked, or concatenated, along an axis."""

    values: tuple[Any, ...]
    axis: int
    is_stack: bool
