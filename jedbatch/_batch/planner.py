"""`Planner`: minibatches are planned in other processes, and attached here.

Another process has the function, of which it records instances, and learns from this one which
programs there are (see `_session.programs.portable`). It sends a `Prepared`: tables and inputs for
one of these programs, or the instances and the reason why they fit none. Those are planned here, as
if there were no other process, so that errors are those of planning here.
"""

import importlib
import operator
import os
import pickle
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._batch.pickling import CAN_SEND_CLOSURES, dumps, name_of
from jedbatch._jaxpr.configuration import CONFIGURATION
from jedbatch._learn.adaptive import Adaptive, FixedPolicy
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.plan import Plan
from jedbatch._record.instances.arrays import array_type
from jedbatch._record.run.thread_settings import SETTINGS
from jedbatch._session.core import Core
from jedbatch._session.programs.portable import (
    Exporter,
    ImportedPrograms,
    NoProgramError,
    ProgramForms,
    cuts_of,
    digest_of,
)
from jedbatch._session.records.degenerate import warn_once
from jedbatch._support.types import Array
from jedbatch.errors import PlannedHereWarning

MANY_PLANNED_HERE = 8  # minibatches, and half of all, before we warn
NEW_TYPES = "they fit no program that was known there"
ANOTHER_FUNCTION = (
    "the function computes something else there; something that it reads was set after its module "
    "was imported"
)
CHANGED = "what the function reads besides its arguments has changed since processes began"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A minibatch as another process planned it; `Planner.attach` makes a plan of it.

    Attributes:
      planner: the identity of the planner.
      instances: the minibatch, if it is to be planned where the programs are; else None.
      reason: why it is.
      program, reverse: numbers of the programs (see `ProgramForms`).
      tables: of both.
      inputs: as of plans.
      results: pytrees with the structures of results, and the rest of an `OutputSpec`.
      kernels: positions of the kernels in use among those of the program.
    """

    planner: str
    instances: Sequence[Any] | None = None
    reason: str | None = None
    program: int = 0
    reverse: int | None = None
    tables: tuple[Any, Any] = (None, None)
    inputs: dict[str, Array] | None = None
    results: tuple[Any, Any, Any] = ((), (), None)
    kernels: tuple[int, ...] = ()


class Planner:
    """Plans minibatches in other processes; made by `Batched.planner`.

    It can be pickled, and called with a list of instances in any process. There it imports the
    function, and uses no accelerator.
    """

    def __init__(
        self, core: Core, shared: tuple[Any, ...], sample: list[tuple[Any, ...]], gradient: bool
    ):
        """Plans a sample, so that there are programs and a policy."""
        self._identity = uuid.uuid4().hex
        self._process = os.getpid()
        self._core, self._shared = core, shared
        self._sample, self._gradient = sample, gradient
        _, leaves = core.session(shared)
        self._session = core.record_graphs(shared, sample).session
        self._types = [*map(array_type, leaves)]
        self._exporter = Exporter(self._session.programs, gradient)
        self._num_attached = self._num_planned_here = 0
        self._digest = digest_of(self._plan(sample), self._session.programs)
        self._reached = core.environment.look().number
        self._read = self._reading()
        self._pickled()

    def __repr__(self) -> str:
        planned = (
            f"{self._num_attached} minibatches attached, {self._num_planned_here} planned here"
        )
        return f"Planner({self._core.name}): {planned}"

    def __call__(self, instances: Sequence[Any]) -> Prepared:
        """Plans a minibatch; it can be the `collate_fn` of a loader of data.

        In the process that made the planner it leaves that to `attach`.

        Args:
          instances: of the minibatch; if several arguments are mapped, a tuple of these for each.

        Returns:
          What `attach` makes a plan of.

        Raises:
          RuntimeError: this is a fork of the process in which the planner was made.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "a planner was called in a fork of the process that made it, where JAX does not "
                "work; start processes by spawning them, such as by `multiprocessing_context="
                '"spawn"` of a `torch.utils.data.DataLoader`.'
            )
        return Prepared(self._identity, list(instances))

    def attach(self, prepared: Prepared) -> Plan:
        """Makes a plan of a minibatch that was planned elsewhere.

        Args:
          prepared: what a call returned, in whichever process.

        Returns:
          The plan, for `apply`. It has no `graph`, `schedule` and `layout` unless it was made here.

        Raises:
          TypeError: it is something else, or what `plan` raises.
          ValueError: it is of another planner, or what `plan` raises.
          RuntimeError: what the function reads besides its arguments has changed.
        """
        checks.of_type("Planner.attach", prepared, Prepared, "what the planner returned")
        if prepared.planner != self._identity:
            raise ValueError(
                "`Planner.attach` got a minibatch that another planner prepared; expected one that "
                "this planner, or a copy of it in another process, returned."
            )
        if prepared.instances is not None:
            instances = _arguments_of(self._sample, prepared.instances)
            return self._planned_here(instances, prepared.reason)
        if not self._is_current:
            raise RuntimeError(
                f"what the batched `{self._core.name}` reads besides its arguments has changed "
                "since its planner was made; make another one."
            )
        return self._attached(prepared)

    @property
    def _is_current(self) -> bool:
        """True as long as the function reads the same besides its arguments as at first.

        Arrays of JAX may be others: programs are given those that are there when they run.
        """
        environment = self._core.environment
        number = environment.look().number
        if number != self._reached and environment.digest() == self._read[0]:
            self._reached = number
        is_current = bool(number == self._reached)
        if is_current and len(environment.classes) != self._read[1]:
            self._read = self._reading()
        return is_current

    def _reading(self) -> tuple[bytes, int]:
        """(a digest of what the function reads, of how many classes of objects in instances)."""
        environment = self._core.environment
        return environment.digest(), len(environment.classes)

    @property
    def _is_imported(self) -> bool:
        """True if other processes import the function; else it is sent with what it reads."""
        portable = _portable(self._core.fn)
        return isinstance(portable, tuple) or name_of(portable) is not None

    def _plan(self, instances: list[tuple]) -> Plan:
        """Returns a plan made here, of the mapped arguments of each instance."""
        return self._core.lasting_plan(self._session, instances, self._gradient)

    def _planned_here(self, instances: list[tuple], reason: str | None) -> Plan:
        """Returns a plan made here; notes the reason why, if another process should have made it.

        Warns if most cannot be planned elsewhere.
        """
        self._num_attached += 1
        if reason is not None:
            self._num_planned_here += 1
            num = self._num_planned_here
            if num >= MANY_PLANNED_HERE and 2 * num > self._num_attached:
                warn_once(
                    PlannedHereWarning,
                    f"other processes could not plan {num} of {self._num_attached} minibatches of "
                    f"the batched `{self._core.name}`, the last one since {reason}. They were "
                    "planned in the process that runs them",
                    self._session.registry.warned,
                )
        return self._plan(instances)

    def _attached(self, prepared: Prepared) -> Plan:
        """Returns the plan of a minibatch that fits a program."""
        self._num_attached += 1
        programs = self._session.programs
        signature = self._exporter.forward[prepared.program]
        reverse = None if prepared.reverse is None else self._exporter.reverse[prepared.reverse]
        programs.note_used(signature, [signature.kernels[k] for k in prepared.kernels])
        trees, places, batch = prepared.results
        form = OutputSpec(tuple(map(jax.tree.structure, trees)), places, batch)
        static = programs.static(signature, reverse, form, self._gradient, ())
        assert prepared.inputs is not None
        return Plan(static, *prepared.tables, prepared.inputs)

    def _programs(self) -> ProgramForms:
        """Returns the programs in use by now."""
        return self._exporter.export()

    def _pickled(self) -> bytes:
        """Returns what another process needs."""
        core = self._core
        structure = core.arguments.leaves(self._shared)[1]
        specs = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in self._types]
        programs = self._session.programs
        options = replace(core.options, target=programs.target, packs=programs.options.packs)
        axes = core.arguments.axes, core.out_axes
        parts = {
            "function": _portable(core.fn),
            "options": (*axes, self._policy, options),
            "shared arguments": jax.tree.unflatten(structure, specs),
            "instances": self._sample,
            "classes of instances": core.environment.classes,
        }
        pickled = {}
        for name, part in parts.items():
            try:
                pickled[name] = dumps(part)
            except Exception as error:
                cure = "Define" if CAN_SEND_CLOSURES else "Install cloudpickle, or define"
                raise TypeError(
                    f"the {name} of the batched `{core.name}` cannot be sent to other "
                    f"processes: {checks.cut(error)}. {cure} functions and classes at the top "
                    "level of a module."
                ) from error
        names = {*CONFIGURATION, *(f"jax_{name}" for name in SETTINGS)}
        names.remove("jax_default_device")  # of another process
        settings = {name: getattr(jax.config, name) for name in sorted(names)}
        state = {
            "process": self._process,
            "settings": settings,
            "identity": self._identity,
            "parts": pickled,
            "gradient": self._gradient,
            "digests": (self._digest, self._read[0] if self._is_imported else None),
            "programs": self._programs(),
            "cuts": self._cuts(),
            "sequences": self._session.records.sequences.known,
        }
        return pickle.dumps(state)

    def _cuts(self) -> dict[str, tuple[int, ...]]:
        """Returns which types of nodes are cut in two, and where."""
        projections = self._session.projections
        return {} if projections is None else cuts_of(projections, self._session.programs)

    @property
    def _policy(self) -> Any:
        """The policy for other processes, which learn none of their own."""
        policy: Any = self._core.fixed_policy
        return FixedPolicy(policy) if isinstance(self._core.policy, Adaptive) else policy

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannerCopy, (self._pickled(),)


def planner(core: Core, args: tuple, gradient: bool) -> Planner:
    """Makes what plans in other processes; see `Batched.planner`."""
    checks.flag("planner", "gradient", gradient)
    shared, instances = core.arguments.split(args)
    return Planner(core, shared, instances, gradient)


class PlannerCopy:
    """A planner in another process."""

    def __init__(self, pickled: bytes):
        self._pickled = pickled
        self._work: _Work | None = None
        self._identity = ""
        self._reason: str | None = None  # why it plans nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannerCopy, (self._pickled,)

    def start(self) -> None:
        """Imports the function and plans the sample."""
        if self._work is not None or self._reason is not None:
            return
        state = pickle.loads(self._pickled)
        self._identity = state["identity"]
        try:
            self._work = _Work(state)
        except Exception as error:
            self._reason = f"it could not be read there: {named(error)}"

    def __call__(self, instances: Sequence[Any], programs: ProgramForms | None = None) -> Prepared:
        """Plans a minibatch; see `Planner.__call__`.

        Args:
          instances: of the minibatch.
          programs: that there are by now; None if they are those that were known.
        """
        instances = list(instances)
        self.start()
        reason = self._reason
        if self._work is not None:
            try:
                return self._work.prepare(instances, programs)
            except NoProgramError:
                reason = NEW_TYPES
            except Exception as error:  # of which there will be one where it is planned
                reason = f"there was {named(error)}"
        return Prepared(self._identity, instances, reason)


class _Work:
    """The function, a session for it and imported programs, in another process."""

    def __init__(self, state: dict[str, Any]):
        if state["process"] != os.getpid():
            jax.config.update("jax_platforms", "cpu")
            for name, value in state["settings"].items():
                if getattr(jax.config, name) != value:
                    jax.config.update(name, value)
        portable, options, shared, sample, classes = map(pickle.loads, state["parts"].values())
        self._identity = state["identity"]
        self._core = Core(_function_of(portable), *options)
        self._core.environment.meet(classes)  # those whose digest was sent
        self._sample, self._gradient = sample, state["gradient"]
        self._session, _ = self._core.session(shared)
        self._programs = ImportedPrograms(self._session.programs)
        self._session.programs = self._programs
        self._programs.accept(state["programs"])
        self._session.records.sequences.learn(state["sequences"])
        if self._session.projections is not None:
            cuts, identity = state["cuts"], self._programs.identity_of_type
            self._session.projections.followed = lambda node_type: cuts.get(identity(node_type))
        self._is_another = not self._computes(*state["digests"])

    def _computes(self, digest: bytes, read: bytes | None) -> bool:
        """Returns whether the sample gives the same graph here, by a function that reads the same.

        A graph of types that are not known there is no reason to think that it is another one.
        """
        if read is not None and self._core.environment.digest() != read:
            return False
        try:
            plan = self._plan(self._sample)
        except NoProgramError:
            return True
        return digest_of(plan, self._programs) == digest

    def _plan(self, arguments: list[tuple]) -> Plan:
        return self._core.lasting_plan(self._session, arguments, self._gradient)

    def prepare(self, instances: list[Any], programs: ProgramForms | None) -> Prepared:
        """Plans a minibatch; raises `NoProgramError` if it fits no program."""
        if self._is_another:
            return Prepared(self._identity, instances, ANOTHER_FUNCTION)
        if programs is not None and programs.version > self._programs.version:
            self._programs.accept(programs)
        arguments = _arguments_of(self._sample, instances)
        plan = self._plan(arguments)
        if plan.ragged:
            return Prepared(self._identity, instances, "arrays differ in length")
        static, host = plan.static, plan.host
        assert host is not None
        form, kernels = static.results, static.signature.kernels
        trees = tuple(jax.tree.unflatten(s, [0] * s.num_leaves) for s in form.structures)
        return Prepared(
            self._identity,
            None,
            None,
            *self._programs.numbers_of(plan),
            (np.asarray(plan.table), plan.reverse_table),
            plan.inputs,
            (trees, form.places, form.batch),
            tuple(map(kernels.index, host.counted.kernels)),
        )


def named(error: Exception) -> str:
    """Returns an error in a line."""
    return f"{type(error).__name__}: {checks.cut(error)}"


def _portable(fn: Callable) -> Any:
    """Returns a function, or (module, name) of what wraps it and stands in its place there."""
    where = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    try:
        found = operator.attrgetter(where[1])(sys.modules[where[0]])
        return where if getattr(found, "__wrapped__", None) is fn else fn
    except (KeyError, AttributeError):
        return fn


def _function_of(portable: Any) -> Any:
    """Returns the function that `_portable` stands for."""
    if not isinstance(portable, tuple):
        return portable
    module, name = portable
    return operator.attrgetter(name)(importlib.import_module(module)).__wrapped__


def _arguments_of(sample: list[tuple], instances: Sequence[Any]) -> list[tuple]:
    """Returns the mapped arguments of each instance, as many as those of a sample have."""
    if len(sample[0]) > 1:
        return [tuple(x) for x in instances]
    return [(x,) for x in instances]
