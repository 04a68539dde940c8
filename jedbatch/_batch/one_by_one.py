"""Results one by one, on the host: what streams and servers ask of a batched function.

Results that are stacked make a program for each number of instances. A list of results does not,
but to cut it on the device takes a call for each row. So rows are fetched as they are returned, all
of an arena at once, and cut by NumPy: minibatches of any size run by the same programs.

Where some instance fails, so does its minibatch. Which one it was is found by halves, so that a
minibatch with one that fails takes twice the time, about.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jedbatch import checks
from jedbatch._batch.warming import cut_evenly, one_of_each, reserve
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.transfers import fetched
from jedbatch._program.host_arrays import results_from, rows_on_host
from jedbatch._program.plan import Plan
from jedbatch._record.cell import recording
from jedbatch._session.pipeline import run_plan
from jedbatch._support.types import Array, PyTree

Item = TypeVar("Item")


class Settled(NamedTuple):
    """What came of an item: a result, or the error that it raised.

    Attributes:
      result: None if there is an error.
      error: None if there is a result.
    """

    result: Any
    error: Exception | None


class OneByOne:
    """A batched function whose results are given one by one, as arrays of NumPy.

    Attributes:
      batched: the function.
    """

    def __init__(self, who: str, batched: Any, shared: tuple):
        """Checks that there are values to compute with.

        Args:
          who: the function that needs them, for messages.
          batched: the batched function.
          shared: the shared arguments.

        Raises:
          TypeError: a shared argument is traced, or a shape.
          RuntimeError: the function at hand is an instance of another batched function.
        """
        if recording.recorder is not None:
            raise RuntimeError(
                f"`{who}` is called inside of a batched function or a lazy scope, where nothing "
                f"has a value; call the batched `{batched._name}` there."
            )
        for leaf in batched._arguments.leaves(shared)[0]:
            if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
                raise TypeError(
                    f"`{who}` got {checks.shown(leaf)} among the shared arguments of "
                    f"`{batched._name}`; expected arrays with values, since results are read on "
                    "the host. Under transformations of JAX use `plans` and `apply`."
                )
        self.batched = batched

    def plan(self, shared: tuple, instances: Sequence[tuple]) -> Plan | None:
        """Returns a plan, which may be run once; None if the function decides on values.

        Args:
          shared: the shared arguments.
          instances: the mapped arguments of each.
        """
        batched = self.batched
        session, leaves = batched._session(shared)
        return batched._unless_decides(
            session,
            lambda read: batched._plan(
                session, list(instances), False, leaves, read, stacked=False
            ),
        )

    def start(
        self, shared: tuple, instances: Sequence[tuple], plan: Plan | None
    ) -> Callable[[], list[PyTree]]:
        """Has the device begin; returns what waits for the results, a list.

        A function that decides on values has computed them by then.
        """
        batched = self.batched
        session, leaves = batched._session(shared)
        if plan is None:
            results = batched._run_stepwise(session, leaves, list(instances), on_host=True)
            return lambda: results
        outputs, packed = run_plan(plan, leaves, plan.inputs, f"the batched `{batched._name}`")
        static = plan.static

        def fetch() -> list[PyTree]:
            found = results_from(static.results, static.signature, rows_on_host(outputs), packed)
            return jax.tree.map(_on_host, found) if static.stages else found

        return fetch

    def warm(self, shared: tuple, sample: Sequence[tuple], size: int) -> None:
        """Compiles what minibatches of `size` instances need, with headroom (see `Batched.warm`).

        Args:
          shared: the shared arguments.
          sample: the mapped arguments of instances like those to come, at least one.
          size: instances in a minibatch.
        """
        batched = self.batched
        session, _ = batched._session(shared)
        minibatches = cut_evenly(sample, size)
        plans = batched._unless_decides(
            session,
            lambda read: reserve(batched, session, minibatches, False, read, stacked=False),
        )
        for minibatch in one_of_each(minibatches, plans[False]) if plans else minibatches:
            self.run(shared, minibatch)

    def run(self, shared: tuple, instances: Sequence[tuple]) -> list[PyTree]:
        """Returns the results of a minibatch, once they are computed."""
        return self.start(shared, instances, self.plan(shared, instances))()


def _on_host(x: Array) -> Any:
    """Returns an array as one of NumPy; random keys stay what they are."""
    return x if isinstance(x, np.ndarray) or is_key(x.dtype) else fetched(x)


def settled(run: Callable[[Sequence[Item]], Sequence[Any]], items: Sequence[Item]) -> Iterator:
    """Yields what comes of each item, in order: `Settled`.

    Args:
      run: from items to their results. It may be called several times for an item.
      items: at least one.
    """
    try:
        results = run(items)
    except Exception as error:
        if len(items) == 1:
            yield Settled(None, error)
            return
        middle = len(items) // 2
    else:
        yield from (Settled(result, None) for result in results)
        return
    yield from settled(run, items[:middle])
    yield from settled(run, items[middle:])
