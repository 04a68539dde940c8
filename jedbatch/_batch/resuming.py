"""`Plans`: plans of one minibatch after the other, from any position on.

Minibatches are read and planned before their plans are asked for. A checkpoint needs the position
of what was handed out, not of what was read: the position after each minibatch is kept until its
plan is handed out.
"""

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jedbatch import checks
from jedbatch._program.plan import Plan
from jedbatch._session.records.arguments import Minibatches


class Plans(Iterator[Plan]):
    """An iterator of plans, whose position can be stored and continued, as those of Grain can.

    It ends what plans ahead once it is closed, or left and forgotten.
    """

    def __init__(
        self,
        minibatches: Minibatches,
        start: Callable[[Iterator[list[Any]], int], Iterator[Plan]],
    ):
        """Begins to plan.

        Args:
          minibatches: the arguments of each.
          start: from the arguments of minibatches, and the number of the first, to their plans.
        """
        self._minibatches, self._start = minibatches, start
        self._state = minibatches.get_state()
        self._read: collections.deque[dict[str, Any]] = collections.deque()  # not handed out
        rows = _noting(minibatches, self._read)
        self._made: Any = start(rows, self._state["position"])

    def __repr__(self) -> str:
        return f"Plans: {self._state['position']} handed out, {len(self._read)} more read ahead"

    def __next__(self) -> Plan:
        plan: Plan = next(self._made)
        self._state = self._read.popleft()
        return plan

    def close(self) -> None:
        """Ends planning ahead; there are no plans after that, unless a state is set."""
        self._made.close()

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last plan that was handed out.

        Returns:
          A dict for a checkpoint, of numbers and of what the loader of data calls its state: JSON,
          if that is. Minibatches that were planned ahead are not counted.

        Examples:
          >>> import jax.numpy as jnp, jedbatch
          >>> double, minibatches = jedbatch.batch(lambda w, x: w * x), [[1.0], [2.0], [3.0]]
          >>> plans = double.plans(jnp.ones(()), minibatches)
          >>> _ = next(plans)
          >>> state = plans.get_state()                 # for a checkpoint
          >>> again = double.plans(jnp.ones(()), minibatches)
          >>> again.set_state(state)
          >>> [double.apply(jnp.ones(()), plan).tolist() for plan in again]
          [[2.0], [3.0]]
        """
        return copy.deepcopy(self._state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned, here or in another process.

        Minibatches must be the same as there, in the same order. Loaders of data whose iterators
        have `get_state` and `set_state`, such as Grain's, go there at once; of others, minibatches
        before it are read once more and left out.

        Args:
          state: what `get_state` returned.

        Raises:
          TypeError: it is no such state.
          ValueError: there are fewer minibatches, or they come from an iterator that cannot begin
            again.
        """
        if not isinstance(state, Mapping) or set(state) != {"position", "sources"}:
            raise TypeError(
                f"`Plans.set_state` got {checks.shown(state)}; expected what `get_state` returned, "
                'a dict with "position" and "sources".'
            )
        checks.whole("Plans.set_state", "position", state["position"])
        self.close()
        there = Plans(self._minibatches.at(state), self._start)
        self._minibatches, self._state = there._minibatches, there._state
        self._read, self._made = there._read, there._made


def _noting(
    minibatches: Minibatches, read: collections.deque[dict[str, Any]]
) -> Iterator[list[Any]]:
    """Yields the arguments of minibatches; notes the position after each."""
    for arguments in minibatches:
        read.append(minibatches.get_state())
        yield arguments
