"""Values that do not depend on the instance, and how they are computed before the nodes."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from jedbatch._jaxpr.zeros import followed
from jedbatch._record.cell import pause
from jedbatch._support.types import Leaf


@dataclass(frozen=True, eq=False)
class SharedValue:
    """A value that does not depend on the instance.

    It is leaf number `leaf` of the shared arguments; or `array`, which the function closes over;
    or what is read from outside as `tracer`: a tracer of an outer transformation by its number, an
    array that the function reaches by the way to it, a weight of a lazy scope by its name; or
    result `result` of `call(*args)` on earlier shared values.
    """

    aval: ShapedArray
    leaf: int | None = None
    array: Any = None
    tracer: Hashable = None
    call: Callable | None = None
    args: tuple[int, ...] = ()
    result: int = 0
    applied: dict[Hashable, int] = field(default_factory=dict)  # times each operation led to it
    followed: Callable[[], Any] | None = None  # the arguments that have a derivative, by result

    @property
    def follows(self) -> tuple[int, ...]:
        """The earlier shared values that it has a derivative with respect to."""
        if self.followed is None:
            return ()
        with pause():
            return tuple([self.args[k] for k in sorted(self.followed()[self.result])])


def owned(const: object) -> Any:
    """A constant that no other code can change."""
    return const.copy() if isinstance(const, np.ndarray) else const


def derived(
    operation: Hashable, call: Callable, args: tuple[int, ...], shared: Sequence[SharedValue]
) -> list[SharedValue]:
    """The results of `call(*args)`, an operation on shared values, which is traced."""
    given = [shared[a] for a in args]
    with pause():
        closed = jax.make_jaxpr(lambda *xs: call(*xs))(*(x.aval for x in given))
    call = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, list(map(owned, closed.consts)))
    applied: dict[Hashable, int] = {}
    for x in given:
        applied.update((k, max(n, applied.get(k, 0))) for k, n in x.applied.items())
    applied[operation] = applied.get(operation, 0) + 1
    of_results = functools.cache(lambda: followed(closed))
    return [
        SharedValue(aval, call=call, args=args, result=k, applied=applied, followed=of_results)
        for k, aval in enumerate(closed.out_avals)
    ]


def prologue(
    shared: Sequence[SharedValue], num_leaves: int, wanted: Sequence[Sequence[int]]
) -> tuple[Callable, list[int]]:
    """Returns a function that computes shared values, and ids of closed-over ones it needs.

    Args:
      shared: all shared values, by id.
      num_leaves: leaves of the shared arguments.
      wanted: lists of ids; the function returns a list of values for each. Its one argument is
        the leaves of the shared arguments followed by the closed-over values.
    """
    order: dict[int, None] = {}

    def visit(index: int) -> None:
        if index not in order:
            for earlier in shared[index].args:
                visit(earlier)
            order[index] = None

    for ids in wanted:
        for index in ids:
            visit(index)
    arguments = [i for i in order if shared[i].array is not None or shared[i].tracer is not None]

    def compute(values: Sequence[Leaf]) -> list[list[Any]]:
        env = dict(zip(arguments, values[num_leaves:], strict=True))
        results: dict[tuple, list[Any]] = {}
        for index in order:
            value = shared[index]
            if value.leaf is not None:
                env[index] = values[value.leaf]
            elif value.call is not None:
                call = (value.call, value.args)
                if call not in results:
                    results[call] = list(value.call(*(env[a] for a in value.args)))
                env[index] = results[call][value.result]
        return [[env[index] for index in ids] for ids in wanted]

    return compute, arguments
