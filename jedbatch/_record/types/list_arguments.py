"""The lists among the arguments of cells."""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jedbatch._graph.types import NodeType
from jedbatch._record.instances.arrays import flatten

Given = tuple[tuple, dict[str, Any]]  # arguments by position, and by keyword


class ListArgument(NamedTuple):
    """A list among the arguments of a call, which may be of any length.

    Attributes:
      which: position of the argument, of `*args` the first, and the way from it to the list.
      length: of the list.
      first: its first leaf among those of all arguments.
      leaves: of each element.
    """

    which: tuple
    length: int
    first: int
    leaves: int


def weak_among_others(
    of: NodeType, lists: Sequence[ListArgument], slots: Sequence[bool]
) -> tuple[bool, ...]:
    """Returns which operands in lists have weak types; nothing where all have, or none has."""
    in_lists = {x.first + k for x in lists for k in range(x.length * x.leaves)}
    operands = zip(itertools.compress(itertools.count(), slots), of.operands, strict=True)
    weak = tuple(t.weak for leaf, t in operands if leaf in in_lists)
    return weak if len(set(weak)) > 1 else ()


def first_variable_of(fn: Callable) -> int | None:
    """Returns the position of the first of `*args` of a function; None if it has none."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None
    kinds = [p.kind for p in parameters]
    variable = inspect.Parameter.VAR_POSITIONAL
    return kinds.index(variable) if variable in kinds else None


def lists_among(
    given: Given, first_variable: int | None, num_leaves: int
) -> Iterator[ListArgument]:
    """Yields the lists and tuples of elements of one structure among arguments.

    Args:
      given: see `Arities.note`.
      first_variable: the position of the first of `*args`; None if there are none.
      num_leaves: of all that a call is given.
    """
    args, by_keyword = given
    named = args if first_variable is None else args[:first_variable]
    candidates: list[Any] = list(named)
    if first_variable is not None:
        candidates.append(args[first_variable:])
    yield from _lists_inside(enumerate(candidates), (), 0)
    if by_keyword:  # the last leaves
        first = num_leaves - len(flatten(by_keyword, "an argument")[0])
        yield from _lists_inside(sorted(by_keyword.items()), (), first)


def _lists_inside(
    parts: Iterable[tuple[Hashable, Any]], way: tuple, first: int
) -> Iterator[ListArgument]:
    """Yields the lists in parts of a container, and in containers there.

    Args:
      parts: with their keys, in the order of their leaves.
      way: to the container.
      first: its first leaf among those of all arguments.
    """
    for key, part in parts:
        leaves, structure = flatten(part, "an argument")
        if type(part) in (list, tuple):
            elements = structure.children()
            if all(element == elements[0] for element in elements):
                of_each = elements[0].num_leaves if elements else 0
                yield ListArgument((*way, key), len(part), first, of_each)
                first += len(leaves)
                continue
        is_inside = functools.partial(operator.is_not, part)
        inside, _ = jax.tree_util.tree_flatten_with_path(part, is_leaf=is_inside)
        if inside and inside[0][0]:  # it is no leaf
            yield from _lists_inside(inside, (*way, key), first)
        first += len(leaves)
