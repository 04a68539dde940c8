"""`Attempt`: the rounds of a call, unless it has to begin again.

Instances take turns; each records until it needs a value, and goes on when a round has computed it.
"""

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import set_current_trace, take_current_trace
from jax.tree_util import PyTreeDef

from jedbatch._control_flow.ahead import Ahead, RanAhead
from jedbatch._control_flow.depths import Depths
from jedbatch._control_flow.fibers import Fibers
from jedbatch._control_flow.moving import Moving
from jedbatch._control_flow.padded_nodes import PaddedInstance, PaddedNodes
from jedbatch._control_flow.scripts import Script
from jedbatch._control_flow.steps import BEFORE, LAST, NOW, Steps
from jedbatch._control_flow.workspace import Workspace
from jedbatch._graph.paths import int64_of
from jedbatch._jaxpr.configuration import configuration
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind, is_key
from jedbatch._jaxpr.transfers import unguarded
from jedbatch._layout.layout import Layout
from jedbatch._program.host_arrays import rows_apart, rows_of_inputs
from jedbatch._program.output_spec import OutputSpec, PaddedPlace
from jedbatch._ragged.padded_records import padded_results
from jedbatch._record.cell import pause, recording
from jedbatch._record.instances.arrays import flatten
from jedbatch._record.operations.failures import lost_gradient
from jedbatch._record.operations.symbols import Shared, Symbol, Value
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.trace import cut_inputs, trace_of_caller
from jedbatch._session.plans.indices import fewest_rows
from jedbatch._session.plans.round import Round
from jedbatch._support.guards import GuardFailed
from jedbatch._support.types import Array, Leaf
from jedbatch.errors import SymbolicValueError, UnfinishedLoopError


class InstanceResult(NamedTuple):
    """The result of an instance; see `_graph.record`.

    Attributes:
      structure, types, references: of its leaves.
      padded: the places of those that are padded, by position.
    """

    structure: PyTreeDef
    types: tuple[tuple, ...]
    references: tuple[int, ...]
    padded: Mapping[int, PaddedPlace]


class Attempt:
    """The rounds of a call, with all tracers of outer transformations that are known so far.

    Attributes:
      recorder, workspace: what instances record, and what of it is computed.
      returned: the values that each arena returns.
      form: how they become results.
      saving: whether everything is kept that the reverse would read.
    """

    def __init__(
        self,
        call: Any,
        leaves: Sequence[Leaf],
        arrays: Sequence[Sequence[Array]],
        tracers: Sequence[Leaf],
        outside: dict[Hashable, Any],
        padded: Sequence[PaddedInstance | None],
        moving: tuple | None = None,
        size: int | None = None,
    ):
        """Prepares recording.

        Args:
          call: the `Stepwise` that it belongs to, where rounds are noted.
          leaves: of the shared arguments.
          arrays: of the instances.
          tracers: values of those that were met before.
          outside: values that programs read from outside, by name (see `SharedValue`).
          padded: the instances of which some arrays are padded; None for each other one.
          moving: what is differentiated (see `Moving`), so that everything is kept that the reverse
            reads; None if nothing is.
          size: of the workspace, which says whose programs it begins with.
        """
        session = call.session
        self.recorder = Recorder(
            session.registry, trace_of_caller(), read=self._read, together=self._together
        )
        self.recorder.keeps_types = True
        self.saving = saving = moving is not None
        self._moving = None if moving is None else Moving(self.recorder, moving, session.followed)
        self.recorder.leaving = self._leave if saving else None
        self.recorder.tracers += call.tracers
        self.workspace = Workspace(
            session.programs,
            self.recorder,
            arrays,
            call.core.policy,
            lambda closed_over: session.programs.outside.read(closed_over, leaves, outside),
            saving,
            size,
        )
        self.returned: dict[Kind, list[int]] = {}
        self.form = OutputSpec((), (), None)
        self._call = call
        self._session = session
        self._leaves, self._arrays, self._outside = leaves, arrays, outside
        self._num_tracers = len(tracers)
        self._configuration = configuration()
        self._shared: Sequence[Any] = ()
        self._known: dict[int, np.ndarray] = {}  # results and inputs, by reference
        self._known_shared: dict[int, np.ndarray] = {}
        self._readable: set[int] = set()  # types of values that Python may read
        self._waited: dict[int, tuple[int, int]] = {}  # how often, and the last round, by instance
        self._results: list[Any] = [None] * len(call.instances)
        self._padded = PaddedNodes(self.recorder, session.records, padded)
        self._steps = Steps(self.recorder, len(call.instances))
        self._is_same: dict[int, bool] = {}  # whether a fibre's step is like the one before
        self._may_run_ahead = not saving and self.workspace.trial is None
        self._depths = Depths(session.programs.depths)
        self._ran: RanAhead | None = None  # in the latest round
        self._scripts: dict[int, Script] = {}  # of fibres, by what ran ahead
        self._script: Script | None = None  # of the fibre whose turn it is
        self._tails: list[list[int]] = []  # of turns since (see `Recorded`)
        parked = session.of_thread.__dict__.setdefault("greenlets", [])
        self._fibers = Fibers(self._record, 0, parked)

    def turns(self) -> float:
        """Lets all instances record until they are done; returns when the last round began."""
        recorder, fibers = self.recorder, self._fibers
        self._shared = recorder.share()
        recorder.begin(None, ())
        try:
            for i in range(len(self._results)):
                fibers.add(functools.partial(self._record, i), i)
            while True:
                begun = time.perf_counter()
                fibers.turns(self._note_turn if self._ran else self.workspace.graph.note_turn)
                if len(recorder.tracers) > self._num_tracers:
                    self._call.tracers = recorder.tracers
                    raise GuardFailed
                if self._ran is not None:
                    self._note_ahead(self._ran)
                if not fibers.waiting:
                    return begun
                if not self._call.rounds and self._padded.look():
                    raise GuardFailed
                if self._call.check is not None:
                    self._call.check()
                self._round(begun)
                fibers.resume()
        except BaseException as error:
            for fiber_left in fibers.close():
                error.add_note(f"Another instance failed while it was stopped: {fiber_left!r}")
            raise
        finally:
            self._shared = ()

    def _record(self, instance: int) -> None:
        """Runs the function for one instance, in a fibre of its own."""
        recorder = self.recorder
        recording.recorder = recorder  # to gevent, what is kept per thread is kept per greenlet
        self._script = None
        self._turn_to(instance)
        self._steps.begin(self._fibers.fiber)
        recorder.registry.shared_operands.num_instances += 1
        own, given = self._padded.own, self._call.instances[instance]
        with set_current_trace(recorder):
            try:
                types = own and own.types.types
                mapped = recorder.symbolic(given, self._arrays[instance], types)
                core = self._call.core
                result = core.recording.fn(*core.arguments.join(self._shared, mapped))
                leaves, structure = flatten(result, "the result of the function")
                outputs_found = [recorder.output(leaf) for leaf in leaves]
                if own is not None:
                    own.asked.check()
                    self._padded.pad()
            except Exception as error:
                if own is not None and own.lengths:
                    self._call.refuse_lengths(own, error)
                    self._padded.pad()
                raise
        if own is not None:
            self._call.check_lengths(own)
        references = tuple(r for r, _ in outputs_found)
        kinds: tuple[tuple, ...] = tuple(t for _, t in outputs_found)
        padded: Mapping[int, PaddedPlace] = {}
        if own is not None:
            padded, kinds = padded_results(kinds, own.lengths, own.sizes)
        self._results[instance] = InstanceResult(structure, kinds, references, padded)

    def _turn_to(self, instance: int) -> None:
        """Records into an instance from now on."""
        self.recorder.turn_to(self._call.instances[instance])
        self._padded.turn_to(instance)

    def _read(self, symbol: Symbol) -> np.ndarray:
        """The value of a symbol; the instance that asks waits until there is one."""
        own = self._padded.own
        other = recording.recorder is not self.recorder
        if own is None or other or not isinstance(symbol, Value):
            return self._value(symbol)
        self._padded.pad()
        return own.cut(self._value(symbol), self.recorder.registry.value_types[symbol.type].shape)

    def _value(self, symbol: Symbol) -> np.ndarray:
        """Does the same for values as they are computed, which may be padded."""
        recorder = self.recorder
        script = self._script
        if script is not None and type(symbol) is Value and recording.recorder is recorder:
            key = symbol.index
            value = self._known.get(key)
            if value is None and key >= 0:
                fiber = self._fibers.fiber
                same = self._steps.follow(fiber, key)
                value = script.next_value() if same else None
                if value is None:  # it has done something else, or there is no more
                    self._is_same[fiber] = same
                    self._script = None
                else:
                    self._known[key] = value
                    self._count_wait(foreseen=True)
            if value is not None:
                return value
        if recording.recorder is not recorder:
            raise SymbolicValueError(
                "a cell decides on the value of an array that it closes over; inside of cells "
                "values are unknown. Pass the array to the cell and choose with `jnp.where` or "
                "`jax.lax.cond`, or decide outside of the cell."
            )
        if isinstance(symbol, Shared) or symbol.type not in self._readable:
            if is_key(symbol.dtype):
                raise TypeError("a random key has no value to decide on; draw from it first.")
            if isinstance(symbol, Value):
                self._readable.add(symbol.type)
        if configuration() != self._configuration:
            raise ValueError(
                "a value is needed inside of a block that changes the configuration of JAX, such "
                "as `with jax.default_matmul_precision(...)`; it would hold for other instances "
                "too, which go on meanwhile. Put the block around the call of the batched "
                "function, or inside of a cell."
            )
        known, key = self._known, symbol.index
        if isinstance(symbol, Shared):
            known = self._known_shared
            if key not in known:
                if len(recorder.tracers) > self._num_tracers:
                    self._fibers.wait(None)  # for a start with all of them
                known[key] = self._shared_value(key)
        elif key not in known:
            if key < 0:
                known[key] = self._input_value(-1 - key)
            else:
                fiber = self._fibers.fiber
                self._count_wait()
                self._script = None
                if fiber not in self._is_same:
                    self._is_same[fiber] = self._steps.follow(fiber, key)
                self._fibers.wait(key)
                self._turn_to(self._fibers.current)
                self._go_on(fiber)
        return known[key]

    def _leave(self, symbol: Symbol, what: str) -> None:
        """Raises `SymbolicValueError` if a value loses its gradient as it leaves JAX, by `what`."""
        if self._moving is None or not has_gradient(symbol.dtype):
            return
        self._padded.pad()
        if self._moving.has(symbol, self._fibers.current):
            raise SymbolicValueError(lost_gradient(what, symbol.aval))

    def _go_on(self, fiber: int) -> None:
        """Notes that a fibre goes on, after others have recorded."""
        self._steps.begin(fiber)
        script = self._scripts.get(fiber)
        if script is not None:
            script.begin(self._steps.table[fiber])
        self._script = script

    def _count_wait(self, foreseen: bool = False) -> None:
        """Raises `UnfinishedLoopError` if the instance that asks has waited too often.

        It counts, too, if it need not wait for what was `foreseen`.
        """
        bound, current = self._session.options.max_steps, self._fibers.current
        if bound is None:
            return
        now = self._fibers.resumed
        waited, latest = self._waited.get(current, (0, -1))
        if foreseen:
            waited += 1
        elif latest != now:  # its parts may wait in the same round
            waited, latest = waited + 1, now
        self._waited[current] = waited, latest
        if waited > bound:
            number = self._number(current)
            raise UnfinishedLoopError(
                f"`batch` got max_steps={bound}, and instance {number} needs values to decide on "
                f"in `{self._call.core.name}` after that many rounds. Expected functions that end "
                "before; give a larger max_steps, or bound the loop in its condition.",
                (number,),
            )

    def _number(self, instance: int) -> int:
        """Returns the number that an instance has for the caller."""
        return instance

    def _together(self, parts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Returns the results of parts of an instance, which wait for values each on its own."""
        recorder = self.recorder
        instance = self._fibers.current
        self._padded.pad()
        with take_current_trace() as current:
            trace = current  # the recorder, or a transformation inside of the function

        def run(part: Callable[[], Any]) -> Any:
            recording.recorder = recorder
            self._script = None
            self._turn_to(instance)
            self._steps.begin(self._fibers.fiber)
            with set_current_trace(trace):
                try:
                    return part()
                finally:  # an error of a part may be caught
                    self._padded.pad()

        fiber = self._fibers.fiber
        self._script = None
        try:
            return self._fibers.together([functools.partial(run, part) for part in parts])
        finally:  # the function may catch what a part raised, and go on
            self._turn_to(instance)
            self._script = None
            self._is_same.pop(fiber, None)
            self._steps.begin(fiber)

    @unguarded
    def _shared_value(self, index: int) -> np.ndarray:
        """A value that all instances share."""
        compute, closed_over = self._session.registry.prologue([[index]])
        with pause():
            values = self._session.programs.outside.read(closed_over, self._leaves, self._outside)
            return np.asarray(compute(values)[0][0])

    @unguarded
    def _input_value(self, index: int) -> np.ndarray:
        """A number, or a part of an array of the instance that asks."""
        recorder = self.recorder
        group = np.array([recorder.input_group[index]])
        (chunk,) = cut_inputs(
            recorder.registry, recorder.input_value, np.array([index]), np.zeros(1), group
        )
        instance = self._fibers.current
        return np.asarray(rows_of_inputs(chunk, self._arrays[instance], instance))[0]

    @unguarded
    def _round(self, start: float) -> None:
        """Computes what instances wait for."""
        waiting = self._fibers.waiting
        values = list(dict.fromkeys(waiting.values()))
        self._depths.note_round(list(waiting))
        ahead = self._ahead() if len(values) == len(waiting) else None
        with pause():
            layout, computed, ran = self.workspace.compute(int64_of(values), ahead)
        self._known.update(zip(values, rows_apart(computed), strict=True))
        self._note_round(layout, len(waiting), start, 0 if ran is None else ran.ahead)
        self._is_same.clear()
        self._ran = ran
        if ran is not None:
            registry, type_ids = self._session.registry, ran.template.placed.type_ids
            bound = fewest_rows(registry, type_ids)
            scripts = ran.scripts(bound, self.recorder.input_value)
            self._scripts = dict(zip(waiting, scripts, strict=True))

    def _ahead(self) -> Ahead | None:
        """The wish to run ahead, if every instance that waits may go on like that."""
        owners, is_same, fibers = self._fibers.owners, self._is_same, list(self._fibers.waiting)
        if not self._may_run_ahead or len({owners[fiber] for fiber in fibers}) < len(fibers):
            return None
        same, steps = all(is_same.get(fiber, False) for fiber in fibers), self._steps.table[fibers]
        if not same and (steps[:, BEFORE] < 0).any():
            return None
        most = functools.partial(self._depths.most, fibers=fibers)
        return Ahead(steps, same, self._known.get, most)

    def _note_turn(self, instance: int) -> None:
        """Notes what an instance has recorded that was not foreseen."""
        self.workspace.graph.note_turn(instance)
        fiber = self._fibers.fiber
        begin = LAST if fiber in self._is_same else NOW  # a step has ended, or not
        self._tails.append([*self._steps.table[fiber, begin].tolist(), *self._steps.sizes()])

    def _note_ahead(self, ran: RanAhead) -> None:
        """Notes how far instances went as foreseen."""
        done = np.array([script.done for script in self._scripts.values()])
        begins = np.array([script.begins for script in self._scripts.values()])
        self.workspace.note_ahead(ran, begins, done, np.array(self._tails))
        used, foreseen = int(done.sum()), ran.ahead * len(done)
        rounds = self._call.rounds
        rounds[-1] = replace(rounds[-1], foreseen=foreseen, used=used)
        self._depths.note(ran.template, list(self._scripts), ran.ahead, done)
        self._ran = None
        self._scripts = {}
        self._script = None
        self._tails.clear()

    def _note_round(self, layout: Layout, instances: int, start: float, num_ahead: int = 0) -> None:
        """Notes what ran in a round, for those who waited for it."""
        made = Round.of(layout, instances, time.perf_counter() - start)
        self._call.rounds.append(made.and_ahead(num_ahead) if num_ahead else made)

    @unguarded
    def last(self, start: float) -> Any:
        """Computes what is returned."""
        workspace = self.workspace
        references = [r for result in self._results for r in result.references]
        values = np.array(references, np.int64)
        self.returned, self.form = self._call.results(self._results, values)
        layout = workspace.compute(values, returned=self.returned)[0]
        outputs = workspace.results(self.returned)
        self._note_round(layout, 0, start)
        self._depths.finish()
        if workspace.trial is not None:
            workspace.trial.finish(*workspace.whole(self.returned))
        workspace.close()
        return outputs
