"""Results one by one, on the host, as streams and servers ask a batched function for them.

To cut a list of results on the device takes a call for each row. So rows are fetched as they are
returned, all of an arena at once, and cut by NumPy: minibatches of any size run by the same
programs.

Where some instance fails, so does its minibatch. Which one it was is found by halves, so that a
minibatch with one that fails takes twice the time, about.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jedbatch import checks
from jedbatch._batch.calling import run_stepwise
from jedbatch._batch.warming import cut_evenly, one_of_each, reserve
from jedbatch._control_flow.continuous import (
    GENERATION,
    Continuous,
    Joining,
    Left,
    Settled,
)
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.transfers import fetched
from jedbatch._program.host_arrays import results_from, rows_on_host
from jedbatch._program.plan import Plan
from jedbatch._record.cell import recording
from jedbatch._session.core import Core
from jedbatch._session.plans.pipeline import run_plan
from jedbatch._support.types import Array, PyTree

Item = TypeVar("Item")


class OneByOne:
    """A batched function whose results are given one by one, as arrays of NumPy.

    Attributes:
      core: of the batched function.
    """

    def __init__(self, who: str, core: Core, shared: tuple[Any, ...]):
        """Checks that there are values to compute with.

        Args:
          who: the function that needs them, for messages.
          core: of the batched function.
          shared: the shared arguments.

        Raises:
          TypeError: a shared argument is traced, or a shape.
          RuntimeError: the function at hand is an instance of another batched function.
        """
        if recording.recorder is not None:
            raise RuntimeError(
                f"`{who}` is called inside of a batched function or a lazy scope, where nothing "
                f"has a value; call the batched `{core.name}` there."
            )
        for leaf in core.arguments.leaves(shared)[0]:
            if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
                raise TypeError(
                    f"`{who}` got {checks.shown(leaf)} among the shared arguments of "
                    f"`{core.name}`; expected arrays with values, since results are read on "
                    "the host. Under transformations of JAX use `plans` and `apply`."
                )
        self.core = core

    def plan(self, shared: tuple[Any, ...], instances: Sequence[tuple[Any, ...]]) -> Plan | None:
        """Returns a plan, which may be run once; None if the function decides on values.

        Args:
          shared: the shared arguments.
          instances: the mapped arguments of each.
        """
        core = self.core
        session, leaves = core.session(shared)
        return session.unless_decides(
            lambda read: core.plan(session, list(instances), False, leaves, read, stacked=False),
        )

    def start(
        self,
        shared: tuple[Any, ...],
        instances: Sequence[tuple[Any, ...]],
        plan: Plan | None,
        check: Callable[[], object] | None = None,
    ) -> Callable[[], list[PyTree]]:
        """Has the device begin; returns what waits for the results, a list.

        A function that decides on values has computed them by then. Before each of its rounds
        `check` is called, which may raise an error to end it.
        """
        core = self.core
        session, leaves = core.session(shared)
        if plan is None:
            results = run_stepwise(
                core, session, leaves, list(instances), on_host=True, check=check
            )
            return lambda: results
        outputs, packed = run_plan(plan, leaves, plan.inputs, f"the batched `{core.name}`")
        static = plan.static

        def fetch() -> list[PyTree]:
            found = results_from(static.results, static.signature, rows_on_host(outputs), packed)
            return jax.tree.map(_on_host, found) if static.stages else found

        return fetch

    def warm(
        self, shared: tuple[Any, ...], sample: Sequence[tuple[Any, ...]], sizes: Sequence[int]
    ) -> None:
        """Compiles what minibatches of some sizes need, with headroom (see `Batched.warm`).

        Args:
          shared: the shared arguments.
          sample: the mapped arguments of instances like those to come, at least one.
          sizes: instances in a minibatch; of rounds that instances join, the largest counts.
        """
        for size in sizes:
            if not self._warm_minibatches(shared, sample, size):
                for _ in range(2):  # once more, from the beginning by the largest program
                    self._warm_rounds(shared, sample, max(sizes))
                return

    def _warm_minibatches(self, shared: tuple, sample: Sequence[tuple], size: int) -> bool:
        """Does so for one size, unless the function decides on values; returns whether it did."""
        core = self.core
        session, _ = core.session(shared)
        minibatches = cut_evenly(sample, size)
        plans = session.unless_decides(
            lambda read: reserve(core, session, minibatches, False, read, stacked=False),
        )
        for minibatch in one_of_each(minibatches, plans[False]) if plans else ():
            self.run(shared, minibatch)
        return plans is not None

    def _warm_rounds(self, shared: tuple, sample: Sequence[tuple], room: int) -> None:
        """Runs rounds that as many instances join as may."""
        rest = itertools.islice(itertools.cycle(sample), GENERATION * room)
        coming = (Joining(number, instance) for number, instance in enumerate(rest))
        errors: list[Exception] = []

        def take(most: int) -> list[Joining]:
            return list(itertools.islice(coming, most))

        def give(left: Left) -> None:
            errors.extend(x.error for _, x in left if x.error is not None)

        call = Continuous(self.core, shared, room)
        failed = call.serve(take(room), take, give, lambda _: None)
        if failed:
            self.run(shared, [x.instance for x in failed])  # which says why
        if errors:
            raise errors[0]

    def run(
        self,
        shared: tuple[Any, ...],
        instances: Sequence[tuple[Any, ...]],
        check: Callable[[], object] | None = None,
    ) -> list[PyTree]:
        """Returns the results of a minibatch, once they are computed; see `start`."""
        return self.start(shared, instances, self.plan(shared, instances), check)()


def _on_host(x: Array) -> Any:
    """Returns an array as one of NumPy; random keys stay what they are."""
    return x if isinstance(x, np.ndarray) or is_key(x.dtype) else fetched(x)


def settled(
    run: Callable[[Sequence[Item]], Sequence[Any]],
    items: Sequence[Item],
    fetch: Callable[[], Sequence[Any]] | None = None,
) -> Iterator[Settled]:
    """Yields the outcome of each item, in order.

    Args:
      run: from items to their results. It may be called several times for an item.
      items: at least one.
      fetch: waits for their results if they are computed already.
    """
    try:
        results = run(items) if fetch is None else fetch()
    except Exception as error:
        if fetch is not None:
            yield from settled(run, items)
        elif len(items) == 1:
            yield Settled(None, error)
        else:
            middle = len(items) // 2
            yield from settled(run, items[:middle])
            yield from settled(run, items[middle:])
    else:
        yield from (Settled(result, None) for result in results)
