"""Computing calls one after the other, without a program: on arrays, symbols or what is traced.

Rows of arrays are mapped so, plans are verified so, and so are nodes that became one.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jedbatch._graph.graph import Graph

Called = TypeVar("Called")


def straight(
    calls: Iterable[tuple[Called, Iterable[Any]]],
    inputs: Mapping[Any, Any],
    run: Callable[[Called, list[Any]], Iterable[Any]],
) -> dict[Any, Any]:
    """Returns the inputs, and by their numbers the values that calls compute.

    Args:
      calls: for each what is called, and the names of what it reads: of inputs, or numbers of
        values computed before.
      inputs: by name, which is no such number; those of a graph are -1, -2, and so on.
      run: from what is called and its operands to its results.
    """
    values, number = dict(inputs), itertools.count()
    for called, names in calls:
        results = run(called, [values[name] for name in names])
        values.update((n, result) for result, n in zip(results, number, strict=False))
    return values


def calls_of(graph: Graph) -> Iterator[tuple[int, list[int]]]:
    """Yields for each node of a graph the number of its type, and what it reads."""
    operand, bounds = graph.operand.tolist(), itertools.pairwise(graph.operand_ptr.tolist())
    for t, (begin, end) in zip(graph.node_type.tolist(), bounds, strict=True):
        yield t, operand[begin:end]


def inputs_of(inputs: Iterable[Any]) -> dict[int, Any]:
    """Returns the inputs of a graph by name."""
    return {-1 - i: x for i, x in enumerate(inputs)}
