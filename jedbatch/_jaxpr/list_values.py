"""The values of a program of a list, as what they are for lists of any length (see `rolling`)."""

from typing import NamedTuple


class CannotRollError(Exception):
    """A program that is not known to be the same for lists of any length."""


class Single(NamedTuple):
    """A value that is computed once."""

    id: int


class Whole(NamedTuple):
    """An array that is made of all elements; its shape may depend on how many there are."""

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
    """An array that has one row for each element along an axis, or so many as each has there.

    An element's part has that axis if there are rows of `each`; if that is None, it does not.
    """

    id: int
    axis: int
    each: int | None = None


class StackedRange(NamedTuple):
    """An array of the elements from number `first` to `end`, without the last."""

    whole: StackedElements
    first: int
    end: int
