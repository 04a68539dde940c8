"""Rounds that instances join while they run, and leave as soon as they are done.

A server has no minibatch: instances come one by one, and some take many rounds. So between two
rounds those that have come begin, and each that is done has its results computed by the next round,
with what the others wait for:

    instance 0    record ─ if a > 0?   ─ record ─ if b > 0?  ─ record ─ done
    instance 1    record ─ done        .                     .
    instance 2             (comes)     record ─ if c > 0?    ─ record ─ done
                         round 1: a, result of 1      round 2: b, c      round 3: results of 0, 2

A computed value stays in its row until the last instance has left, since lanes are only ever
appended (see `_control_flow.workspace`). So after a number of instances no more join; once all have
left, rounds begin anew.

An instance that fails is told so, and the others go on; so is one that the caller has end. If a
round fails, those that have not left by then are left to the caller, who runs them otherwise.

Source: Yu et al., Orca, 2022, schedule requests for Transformers by iteration and not by request.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import set_current_trace

from jedbatch._control_flow.attempt import Attempt, InstanceResult
from jedbatch._control_flow.padded_nodes import PaddedInstance
from jedbatch._control_flow.rounds import Stepwise
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.configuration import EAGER
from jedbatch._jaxpr.storage import from_stored
from jedbatch._jaxpr.symbolic_dims import noting_questions
from jedbatch._jaxpr.transfers import unguarded
from jedbatch._program.host_arrays import rows_apart
from jedbatch._ragged.lengths import of_lengths
from jedbatch._record.cell import pause
from jedbatch._record.run.trace import begin_recording, ending, trace_of_caller
from jedbatch._session.core import Core
from jedbatch._session.records.recording import keyed
from jedbatch._support.guards import GuardFailed
from jedbatch._support.restored import Restored
from jedbatch._support.types import Array, Leaf

GENERATION = 8  # times as many instances as run at once join before rounds begin anew


class Joining(NamedTuple):
    """An instance that joins.

    Attributes:
      token: by which the caller knows it.
      instance: the mapped arguments.
    """

    token: Any
    instance: tuple


class Settled(NamedTuple):
    """The outcome of an instance: a result, or the error that it raised.

    Attributes:
      result: a pytree of arrays of NumPy; None if there is an error.
      error: None if there is a result.
    """

    result: Any
    error: Exception | None


Take = Callable[[int], Sequence[Joining]]  # from how many may join to those that do
Left = list[tuple[Any, Settled]]  # the tokens of instances that leave, and what came of them
Give = Callable[[Left], None]
Ended = Callable[[Any], Exception | None]  # from a token to why its instance is to end, if it is


class Continuous(Stepwise):
    """A call of a function that decides on values, which instances join while it runs.

    Attributes:
      open: those that have joined and not left, by number.
      room: how many run at once at most.
    """

    def __init__(self, core: Core, shared: tuple[Any, ...], room: int):
        session, self._leaves = core.session(shared)
        super().__init__(core, session, [], on_host=True)
        self.open: dict[int, Joining] = {}
        self.room = room

    def serve(
        self, first: Sequence[Joining], take: Take, give: Give, ended: Ended
    ) -> list[Joining]:
        """Runs rounds until nobody is there; returns those that are left because a round failed.

        Args:
          first: instances that begin.
          take: is asked between rounds who joins.
          give: is told who leaves.
          ended: is asked before each round who is to leave with an error.
        """
        core, outer = self.core, trace_of_caller()
        with core.planning, core.reading(self.session) as reached, set_current_trace(outer):
            self._names = reached.names
            with set_current_trace(EAGER):
                outside = self._outside((), reached.arrays)
                attempt = OpenAttempt(self, self._leaves, outside)
                end = ending(attempt.recorder)
                with Restored(end), Restored(end), set_current_trace(attempt.recorder):
                    begin_recording(attempt.recorder)
                    try:
                        with noting_questions():
                            attempt.serve(first, take, give, ended)
                    except (Exception, GuardFailed):
                        pass  # which instance it was, the caller finds out
                    else:
                        attempt.workspace.close()
        return list(self.open.values())

    def refuse_lengths(self, own: PaddedInstance, error: Exception) -> None:
        """Leaves all who are there to the caller if lengths may be why an instance failed."""
        if of_lengths(error, own.asked):
            raise GuardFailed


class OpenAttempt(Attempt):
    """The rounds of a call that instances join.

    Attributes:
      errors: of instances that failed, by number.
    """

    def __init__(self, call: Continuous, leaves: Sequence[Leaf], outside: dict[Hashable, Any]):
        arrays: list[Sequence[Array]] = []
        padded: list[PaddedInstance | None] = []
        super().__init__(call, leaves, arrays, (), outside, padded, size=-call.room)
        self._all_padded = padded  # which its nodes have, too
        self.errors: dict[int, Exception] = {}
        self._open_call = call
        self._all_arrays = arrays  # which the workspace has, too
        self._instances: list[tuple] = []
        call.instances = self._instances

    def serve(self, first: Sequence[Joining], take: Take, give: Give, ended: Ended) -> None:
        """Lets instances record and computes rounds until nobody is there."""
        call, fibers = self._open_call, self._fibers
        self._shared = self.recorder.share()
        self.recorder.begin(None, ())
        try:
            self._admit(first)
            while call.open:
                fibers.turns(self.workspace.graph.note_turn)
                if self.recorder.tracers:
                    raise GuardFailed
                self._end(ended)
                give(self._next_round())
                fibers.resume()
                if len(self._instances) < GENERATION * call.room:
                    self._admit(take(call.room - len(call.open)))
        finally:
            fibers.close()
            self._shared = ()

    def _admit(self, joining: Sequence[Joining]) -> None:
        """Has instances begin at the next turn."""
        for one in joining:
            number = len(self._instances)
            self._open_call.open[number] = one
            self._instances.append(one.instance)
            self._results.append(None)
            self._all_arrays.append(())
            self._all_padded.append(None)
            try:
                every = [keyed(0, one.instance)[1]]
                (padded,), (arrays,) = self._open_call.pad([one.instance], every)
            except Exception as error:
                self.errors[number] = error
            else:
                self._all_arrays[number], self._all_padded[number] = arrays, padded
                self._fibers.add(functools.partial(self._record, number), number)

    def _end(self, ended: Ended) -> None:
        """Ends the instances that are to leave with an error."""
        for number, one in self._open_call.open.items():
            error = ended(one.token)
            if error is not None:
                self.recorder.turn_to(self._instances[number])
                self._script = None
                self._fibers.close(number)
                self.workspace.graph.note_turn(number)
                self._results[number], self.errors[number] = None, error

    def _record(self, instance: int) -> None:
        try:
            super()._record(instance)
        except Exception as error:
            self.errors[instance] = error

    def _number(self, instance: int) -> int:
        return 0  # each is a call of its own

    @unguarded
    def _next_round(self) -> Left:
        """Computes what instances wait for, and the results of those that are done."""
        still_open = self._open_call.open
        done = [i for i in still_open if self._results[i] is not None]
        wanted = list(self._fibers.waiting.values())
        values = list(
            dict.fromkeys(wanted + [r for i in done for r in self._results[i].references])
        )
        computed: dict[int, np.ndarray] = {}
        if values:
            with pause():
                found = self.workspace.compute(np.array(values))[1]
            computed = dict(zip(values, rows_apart(found), strict=True))
        self._known.update((v, computed[v]) for v in wanted)
        settled = {i: Settled(self._result(i, computed), None) for i in done}
        settled |= {i: Settled(None, error) for i, error in self.errors.items()}
        self.errors.clear()
        return [(still_open.pop(i).token, outcome) for i, outcome in settled.items()]

    def _result(self, instance: int, computed: dict[int, np.ndarray]) -> Any:
        found: InstanceResult = self._results[instance]
        leaves = []
        for position, (kind, r) in enumerate(zip(found.types, found.references, strict=True)):
            x = computed[r]
            if position in found.padded:
                x = x[tuple(map(slice, found.padded[position].shape))]
            leaves.append(from_stored(x, ValueType(*kind)))
        return jax.tree.unflatten(found.structure, leaves)
