"""Control flow on values: compute what is recorded, decide, record on.

Under `if`, `while`, `int()` and their like an instance needs a value that has not been computed.
It waits; the others go on (see `_control_flow.fibers`). When none can go on, a *round* computes
what the waiting instances wait for, in batches across all of them, and they resume:

    instance 0    record ─ if a > 0?        ─ record ─ if b > 0?     ─ record ─ done
    instance 1    record ─ done             .                        .
    instance 2    record ─ while e > tol?   ─ record ─ done          .
                         round 1: a, e               round 2: b              round 3: the rest

A round computes what is waited for; what no decision needs is put off until the end, where batches
are largest. Nothing is computed for a branch that was not taken, or twice. Only where all instances
repeat a step, further steps of them are computed as well, and waited for no more (see
`_control_flow.ahead`).

Which branches are taken depends on the parameters, so nothing of this can be planned ahead, and
under `jax.jit`, where there are no values, it is an error. Differentiation works: the call is one
`jax.custom_vjp`, whose forward rule is given concrete values, and whose reverse is one sweep over
all rounds (see `_control_flow.workspace`).

Source: Zha et al., Just-in-time dynamic batching, 2019, and DyNet compute all that has been
recorded when one value is read, which ends batching; waiting in turns does not.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.extend.core import set_current_trace

from jedbatch._control_flow.attempt import Attempt, InstanceResult
from jedbatch._control_flow.padded_nodes import PaddedInstance, padded_instances
from jedbatch._jaxpr.configuration import EAGER
from jedbatch._jaxpr.symbolic_dims import noting_questions
from jedbatch._jaxpr.transfers import unguarded
from jedbatch._program.host_arrays import results_from, rows_on_host
from jedbatch._program.lower import lower
from jedbatch._program.pullback import EVERYTHING, Pullback, refuse_derivative
from jedbatch._program.returned import Pieces, split_outputs
from jedbatch._ragged.lengths import of_lengths
from jedbatch._record.identity.environment import AccessPath, Reached
from jedbatch._record.run.recursion import deeply
from jedbatch._record.run.trace import begin_recording, ending, trace_of_caller
from jedbatch._session.core import Core
from jedbatch._session.plans.outputs import Returned, form_of_results
from jedbatch._session.plans.round import Round
from jedbatch._session.session import Session
from jedbatch._support.guards import GuardFailed, until_guards_hold
from jedbatch._support.restored import Restored
from jedbatch._support.types import Array, Leaf, PyTree
from jedbatch.errors import SymbolicValueError


def _cotangent(x: Array) -> Any:
    """None for a cotangent that does not exist."""
    return None if isinstance(x, SymbolicZero) else x


@dataclass(eq=False)
class Stepwise:
    """One call of a batched function that decides on values.

    Attributes:
      core: of the function.
      session: what is kept from call to call.
      instances: the mapped arguments of each instance.
      on_host: whether results are arrays of NumPy; they are a list then.
      check: is called before each round, if there is one, and may raise an error to end the call.
      rounds: what ran so far.
      tracers: of an outer transformation, met while recording.
      padded: the instances that have arrays of any length; None for each other one.
    """

    core: Core
    session: Session
    instances: Sequence[tuple[PyTree, ...]]
    on_host: bool = False
    check: Callable[[], object] | None = None
    rounds: list[Round] = field(default_factory=list)
    tracers: Sequence[Leaf] = ()
    padded: Sequence[PaddedInstance | None] = ()
    _refused: tuple[PaddedInstance, Exception] | None = None
    _names: tuple[AccessPath, ...] = ()  # of the arrays that the function reads beside
    _attempt: Attempt | None = None  # the latest

    def results(self, outcomes: Sequence[InstanceResult], references: np.ndarray) -> Returned:
        """(what each arena returns, the form of the result); see `Core.results`."""
        padded = [outcome.padded for outcome in outcomes]
        stacked = self.core.stacks and not self.on_host
        return form_of_results(self.core.name, outcomes, references, padded, stacked)

    def run(
        self, leaves: Sequence[Leaf], arrays: Sequence[Sequence[Array]], reached: Reached
    ) -> Any:
        """The results.

        The `leaves` of the shared arguments, the instances' arrays and those that the function
        reads beside may be traced.
        """
        self._names = reached.names
        cache = self.session.records

        def attempt() -> Any:
            if self._refused is not None:
                return self._run(leaves, arrays, reached.arrays)
            self.padded, padded = self.pad(self.instances, arrays)
            return self._run(leaves, padded, reached.arrays)

        def assumed() -> tuple[Hashable, ...]:
            version = cache.registry.assumptions.version("lengths", "constants")
            return len(self.tracers), self._refused, version

        results = until_guards_hold(attempt, assumed)
        if self._refused is not None:  # lengths were the reason
            (own, error), self._refused = self._refused, None
            learned = cache.learn(own.types, own.asked, error)
            if learned or cache.lengths.join_equal(own.types, error):
                return results
            if cache.lengths.keep_numbers(own.types, own.asked):
                return results
            if len(own.lengths) > len(own.symbols):
                cache.constants.note_refused()
            cache.lengths.give_up(error, own.types, own.asked)
        return results

    def pad(
        self, instances: Sequence[tuple], arrays: Sequence[Sequence[Array]]
    ) -> tuple[list[PaddedInstance | None], list[Sequence[Array]]]:
        """Returns (see `padded`, the arrays), both of some instances, given their arrays."""
        found = padded_instances(
            self.session.records, instances, arrays, self.core.recording.classes
        )
        return found, [own.pad(x) if own else x for own, x in zip(found, arrays, strict=True)]

    def refuse_lengths(self, own: PaddedInstance, error: Exception) -> None:
        """Has an instance that raised an error be recorded again, by its shapes in the end."""
        learn, asked = self.session.records.learn, own.asked
        if not (of_lengths(error, asked) and learn(own.types, asked, error)):
            self._refused = own, error
            self.padded = [None] * len(self.padded)
        raise GuardFailed

    def check_lengths(self, own: PaddedInstance) -> None:
        """Raises `GuardFailed` if lengths were compared by which instances are not told apart."""
        cache = self.session.records
        if cache.lengths.relate(own.types, own.asked, None):
            raise GuardFailed
        if own.made is not None:
            cache.constants.note([own.made])

    def _run(
        self, leaves: Sequence[Leaf], arrays: Sequence[Sequence[Array]], reached: Sequence[Leaf]
    ) -> Any:
        arguments = list(leaves), [list(x) for x in arrays], list(self.tracers), list(reached)
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
            outputs = self._compute(*arguments)
        else:
            moving = any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments[1]))
            outputs = self._differentiable(moving)(*arguments)
        latest = self._latest
        signature = latest.workspace.signature
        assert signature is not None
        if not latest.saving:  # or it would be left to the collector with all that was recorded
            self._attempt = None
        if self.on_host:
            outputs = rows_on_host(outputs)
        return results_from(latest.form, signature, outputs)

    @property
    def _latest(self) -> "Attempt":
        assert self._attempt is not None
        return self._attempt

    def _split(self, outputs: PyTree) -> Pieces:
        signature = self._latest.workspace.signature
        return split_outputs(outputs, self._latest.form, signature.arenas if signature else ())

    def _differentiable(self, moving: bool) -> Callable:
        """Returns the function to differentiate; arrays of instances are traced if `moving`."""

        @jax.custom_vjp
        def run(leaves, arrays, tracers, reached):
            outputs = self._compute(leaves, arrays, tracers, reached)
            return self._split(outputs)

        def forwards(*primals):
            leaves, arrays, tracers, reached = custom_vjp_primal_tree_values(primals)
            moving = jax.tree.map(lambda x: x.perturbed, primals)
            outputs = self._compute(leaves, arrays, tracers, reached, moving)
            residuals = leaves, arrays, tracers, reached, self._latest.workspace.state
            return self._split(outputs), residuals

        run.defvjp(forwards, functools.partial(self._backwards, moving), symbolic_zeros=True)
        return run

    @unguarded
    def _backwards(self, moving, residuals, cotangents):
        leaves, arrays, tracers, reached, values = residuals
        attempt, programs = self._latest, self.session.programs
        workspace = attempt.workspace
        placed, signature = workspace.whole(attempt.returned)
        lowered = lower(placed, signature)
        assert lowered is not None
        placed = lowered.placed
        pieces = tuple([_cotangent(x) for x in of_leaf] for of_leaf in cotangents)
        refuse = functools.partial(refuse_derivative, "a batched function")
        pullback = Pullback(signature, attempt.form, refuse, None, placed, workspace.reverse)
        outputs, exist = pullback.join(pieces)
        reverse, *tables = pullback.tables(None, exist, EVERYTHING)
        closed_over = programs.program(signature)[1]
        shared = programs.outside.read(closed_over, leaves, self._outside(tracers, reached))
        executor = programs.executor(signature)
        given = shared, (lowered.table, *tables), values, outputs
        of_shared, of_inputs = executor.reverse(reverse, *given)
        of_tracers: list[Leaf] = [None] * len(tracers)
        of_reached: list[Leaf] = [None] * len(reached)
        for index, cotangent in zip(closed_over, of_shared[len(leaves) :], strict=True):
            position = programs.registry.shared[index].tracer
            if isinstance(position, int):
                of_tracers[position] = cotangent
            elif isinstance(position, AccessPath):
                of_reached[self._names.index(position)] = cotangent
        of_arrays = workspace.pull_back(arrays, of_inputs) if moving else None
        return of_shared[: len(leaves)], of_arrays, of_tracers, of_reached

    def _outside(self, tracers: Sequence[Leaf], reached: Sequence[Leaf]) -> dict[Hashable, Any]:
        """Returns the values that programs read from outside, by name (see `SharedValue`)."""
        return dict(enumerate(tracers)) | dict(zip(self._names, reached, strict=True))

    # --- rounds ---

    def _compute(self, leaves, arrays, tracers, reached, moving: PyTree = None) -> Any:
        """Runs all rounds; returns the rows that are returned from each arena.

        Under a derivative `moving` says which of the others are differentiated.
        """
        given = leaves, arrays, tracers, reached
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
            raise SymbolicValueError(
                "a batched function decides on the value of an array (`if`, `while`, `int()`, "
                "...), and there are no values here: it is called under `jax.jit`, `jax.vmap` or "
                "a second derivative. Call it outside of them; `jax.grad` of it is fine, and "
                "`jedbatch.lazy` has values in derivatives of any order. "
                "`help(jedbatch.errors.SymbolicValueError)` says more."
            )
        return deeply(functools.partial(self._compute_alone, given, moving))

    def _compute_alone(self, given: PyTree, moving: PyTree) -> Any:
        """Does the same, with recursion as deep as this thread allows."""
        leaves, arrays, tracers, reached = given
        # `ensure_compile_time_eval` would also fold constants of cells while these are traced, into
        # arrays that may change for all we know: such cells are traced at every call.
        with set_current_trace(trace_of_caller()), set_current_trace(EAGER):
            self.rounds.clear()
            outside = self._outside(tracers, reached)
            if moving is not None:
                moving = *moving[:2], self._outside(*moving[2:])
            self._attempt = attempt = Attempt(
                self, leaves, arrays, tracers, outside, self.padded, moving
            )
            end = ending(attempt.recorder)
            with Restored(end), Restored(end), set_current_trace(attempt.recorder):
                begin_recording(attempt.recorder)
                with noting_questions():
                    begun = attempt.turns()
            return attempt.last(begun)
