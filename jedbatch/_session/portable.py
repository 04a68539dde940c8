"""Programs as data, for which other processes can lower minibatches.

Of a program, lowering needs sizes, not what its kernels compute. So kernels cross as `KernelSpec`s.
A process that lowers plans with these in place of its own kernels, wherever both have one
`identity`: the same program, written out, of the same shared values. What fits no program there is
left to the process that has the programs, and that alone makes new ones.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.transfers import fetched
from jedbatch._jaxpr.versions import RULES_OF, consts_of, is_program, without_consts
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.kernel_spec import KernelSpec
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.plan import Plan
from jedbatch._program.signature import Signature
from jedbatch._record.identity.environment import AccessPath
from jedbatch._record.passes.projections import Projections
from jedbatch._record.types.registry import Registry
from jedbatch._session.program_cache import ProgramCache


class NoProgramError(Exception):
    """A minibatch fits none of the programs that this process knows."""


@dataclass(frozen=True)
class ProgramForms:
    """Programs for other processes.

    Attributes:
      version: another one if there are others.
      forward: by number, those with `KernelSpec`s in place of kernels.
      reverse: by number, (number of the program that it reverses, the same without that program).
      reserved: numbers of programs that are used before others.
    """

    version: int
    forward: dict[int, Signature]
    reverse: dict[int, tuple[int, ReverseSignature]]
    reserved: frozenset[int]


def described(kernel: Kernel, identity: str) -> NodeType:
    """Returns the type of a kernel as other processes know it."""
    return replace(kernel.node_type, operation=None, shared=(), identity=identity)


def identity_of(kernel: Kernel, registry: Registry) -> str:
    """Returns a digest of what a kernel computes, and how it is differentiated.

    It is the same in another process exactly if the program is, whatever it was traced from. ""
    if that cannot be told, as of programs that call Python.
    """
    text = Text()
    closed = operation_of(kernel.node_type).jaxpr
    try:
        text.add(kernel.node_type.label, kernel.node_type)
        text.add_program(closed.jaxpr, closed.consts)
        written: dict[int, bytes] = {}
        for index in kernel.node_type.shared:
            text.add(_written(index, registry, written))
        if text.has_rules:  # of differentiation, which show in what they make
            for program, consts in kernel.reverse.programs:
                text.add_program(program, consts)
    except NotWrittenError:
        return ""
    return text.digest.hex()


def _written(index: int, registry: Registry, written: dict[int, bytes]) -> bytes:
    """Returns a digest of a shared value: a leaf, a constant, a way to an array, or a computation.

    Args:
      index: of the value.
      registry: that has it.
      written: those of values that were met before, by index.
    """
    if index not in written:
        value, text = registry.shared[index], Text()
        if value.leaf is not None:
            text.add("leaf", value.leaf)
        elif value.call is not None:
            call, avals = value.call, [registry.shared[arg].aval for arg in value.args]
            program = jax.make_jaxpr(lambda *xs: list(call(*xs)))(*avals)
            text.add("result", value.result)
            text.add_program(program.jaxpr, program.consts)
            if text.has_rules:  # JAX differentiates it by rules that are not written
                raise NotWrittenError
            text.add(*(_written(arg, registry, written) for arg in value.args))
        elif isinstance(value.tracer, AccessPath):
            text.add("at", value.tracer, value.aval)
        else:
            text.add_array(value.array)
        written[index] = text.digest
    return written[index]


class NotWrittenError(Exception):
    """A program cannot be told apart from others by text."""


class Text:
    """A digest of programs, written out: operations, what they read, parameters, constants.

    Attributes:
      has_rules: whether there is a function with a rule of differentiation of its own.
    """

    def __init__(self) -> None:
        self._hashed = hashlib.blake2b(digest_size=16)
        self.has_rules = False

    @property
    def digest(self) -> bytes:
        return self._hashed.digest()

    def add(self, *parts: object) -> None:
        """Writes objects as they print."""
        for part in parts:
            text = str(part)
            if " at 0x" in text:
                raise NotWrittenError
            self._hashed.update(f"{type(part).__name__} {text}".encode() + b"\0")

    def add_array(self, array: Any) -> None:
        """Writes an array by its bits."""
        dtype = getattr(array, "dtype", None)
        array = jax.random.key_data(array) if dtype is not None and is_key(dtype) else array
        values = np.asarray(fetched(array))
        self.add("array", dtype, values.shape)
        self._hashed.update(values.tobytes())

    def add_program(self, program: Any, consts: Sequence[Any]) -> None:
        """Writes an open program, with its constants."""
        numbers = {v: n for n, v in enumerate((*program.constvars, *program.invars))}
        self.add("program", len(program.constvars), *(v.aval.str_short() for v in numbers))
        for const in consts:
            self.add_array(const)
        for eqn in program.eqns:
            self.add(eqn.primitive.name)
            for atom in eqn.invars:
                self._add_atom(atom, numbers)
            for name, value in sorted(eqn.params.items()):
                self._add_parameter(eqn, name, value)
            for v in eqn.outvars:
                numbers[v] = len(numbers)
                self.add(v.aval.str_short(), getattr(v.aval, "weak_type", False))
        self.add("returns")
        for atom in program.outvars:
            self._add_atom(atom, numbers)

    def _add_atom(self, atom: Any, numbers: dict[Any, int]) -> None:
        if isinstance(atom, Literal):
            self.add_array(atom.val)
            self.add(getattr(atom.aval, "weak_type", False))
        else:
            self.add(numbers[atom])

    def _add_parameter(self, eqn: Any, name: str, value: Any) -> None:
        if name in RULES_OF.get(eqn.primitive.name, ()):
            self.has_rules = True
            return
        self.add(name)
        if is_program(value):
            self.add_program(without_consts(value), consts_of(value))
        elif type(value) in (tuple, list):
            self.add(len(value))
            for part in value:
                self._add_parameter(eqn, "", part)
        elif isinstance(value, np.ndarray | jax.Array):
            self.add_array(value)
        elif callable(value) and not isinstance(value, type | jax.sharding.Mesh):
            raise NotWrittenError
        else:
            self.add(value)


class Exporter:
    """Numbers the programs of a session, and exports them.

    Args:
      programs: of the session.
      gradient: whether minibatches are planned with their reverse.

    Attributes:
      forward, reverse: programs by number.
    """

    def __init__(self, programs: ProgramCache, gradient: bool):
        self._programs, self._gradient = programs, gradient
        self.forward: list[Signature] = []
        self.reverse: list[ReverseSignature] = []
        self._identities: dict[Kernel, str] = {}
        self._exported: ProgramForms | None = None
        self._in_use: Any = None

    def export(self) -> ProgramForms:
        """Returns the programs in use."""
        in_use = self._programs.in_use
        if self._exported is None or in_use != self._in_use:
            self._exported, self._in_use = self._make(*in_use), in_use
        return self._exported

    def _make(
        self,
        forward: list[Signature],
        reverse: list[ReverseSignature],
        reserved: list[Signature],
    ) -> ProgramForms:
        if self._gradient:
            forward = [s for s in forward if any(r.forward == s for r in reverse)]
        specs = self._specs(list(dict.fromkeys(k for s in forward for k in s.kernels)))
        made = {
            _number(self.forward, s): replace(s, kernels=tuple(specs[k] for k in s.kernels))
            for s in forward
        }
        reverses: dict[int, tuple[int, Any]] = {}
        for r in reverse if self._gradient else ():
            without: Any = replace(r, forward=None)  # type: ignore[arg-type]
            reverses[_number(self.reverse, r)] = self.forward.index(r.forward), without
        return ProgramForms(
            self._exported.version + 1 if self._exported else 0,
            made,
            reverses,
            frozenset(self.forward.index(s) for s in reserved if s in forward),
        )

    def _specs(self, kernels: Sequence[Kernel]) -> dict[Kernel, Any]:
        """Returns kernels without their programs, without an identity if several have the same."""
        own = list(map(self.identity, kernels))
        found = [x if own.count(x) == 1 else "" for x in own]
        return {
            kernel: KernelSpec.of(kernel, described(kernel, identity), self._gradient)
            for kernel, identity in zip(kernels, found, strict=True)
        }

    def identity(self, kernel: Kernel) -> str:
        """Returns the identity of a kernel; see `identity_of`."""
        if kernel not in self._identities:
            self._identities[kernel] = identity_of(kernel, self._programs.registry)
        return self._identities[kernel]


def _number(programs: list[Any], program: Any) -> int:
    """Returns the position of a program in a list, to which it is added if it is not there."""
    if program not in programs:
        programs.append(program)
    return programs.index(program)


def cuts_of(projections: Projections, programs: ProgramCache) -> dict[str, tuple[int, ...]]:
    """Returns where nodes are cut in two, by the identity of their types."""
    found = {
        identity_of(programs.kernel(node_type), programs.registry): places
        for node_type, places in projections.decided.items()
    }
    return {identity: places for identity, places in found.items() if identity}


class ImportedPrograms(ProgramCache):
    """The programs of another process, as far as lowering needs them; there are no others.

    Attributes:
      version: of the programs; -1 if there are none.
    """

    def __init__(self, programs: ProgramCache):
        """Takes the place of programs that are not used."""
        super().__init__(
            programs.registry,
            programs.target,
            programs.environment,
            (),
            programs.control_flow,
            programs.max_steps,
            programs.lanes.policy,
        )
        self.version = -1
        self._specs: dict[str, KernelSpec] = {}
        self._identities: dict[int, str] = {}
        self._numbers: dict[Signature, int] = {}
        self._reverse_numbers: dict[ReverseSignature, int] = {}

    def accept(self, exported: ProgramForms) -> None:
        """Replaces the programs by others, in which kernels that were known stay what they are."""

        def known(spec: Any) -> Any:
            identity = spec.node_type.identity
            return self._specs.setdefault(identity, spec) if identity else spec

        made = {
            number: replace(s, kernels=tuple(map(known, s.kernels)))
            for number, s in exported.forward.items()
        }
        reverses = {
            number: replace(reverse, forward=made[forward])
            for number, (forward, reverse) in exported.reverse.items()
        }
        self.version = exported.version
        self._signatures, self._reverses = list(made.values()), list(reverses.values())
        self._reserved = {made[number] for number in exported.reserved}
        self._numbers = {s: number for number, s in made.items()}
        self._reverse_numbers = {r: number for number, r in reverses.items()}
        self._used.clear()
        self._latest = None

    def identity(self, type_id: int) -> str:
        """Returns the identity of a node type."""
        if type_id not in self._identities:
            self._identities[type_id] = identity_of(super().kernel(type_id), self.registry)
        return self._identities[type_id]

    def kernel(self, type_id: int) -> Any:
        """The kernel of a node type, without its program.

        Raises:
          NoProgramError: no program has it.
        """
        found = self._kernels.get(type_id)
        if not isinstance(found, KernelSpec):
            spec: Any = self._specs.get(self.identity(type_id))
            if spec is None or spec in self._kernels.values():  # of another type
                raise NoProgramError
            found = self._kernels[type_id] = spec
        return found

    def _make(self, placed: Any, model: Signature | None) -> Signature:
        """Raises an error: programs are made elsewhere."""
        raise NoProgramError

    def _make_reverse(self, *args: Any) -> ReverseSignature:
        """Raises an error: programs are made elsewhere."""
        raise NoProgramError

    def reads_tracers(self, signature: Signature) -> bool:
        """Returns False: there are no transformations around what is planned here."""
        return False

    def numbers_of(self, plan: Plan) -> tuple[int, int | None]:
        """Returns the numbers of the program of a plan, and of its reverse."""
        static = plan.static
        reverse = None if static.reverse is None else self._reverse_numbers[static.reverse]
        return self._numbers[static.signature], reverse


def digest_of(plan: Plan, identity: Callable[[Any], str]) -> bytes:
    """Returns a digest of the graph of a plan, whatever the types are numbered here.

    Args:
      plan: made here.
      identity: of a kernel of the plan.
    """
    assert plan.host is not None
    placed, graph = plan.host.placed, plan.host.placed.graph
    of_type = dict(zip(placed.type_ids, map(identity, placed.kernels), strict=True))
    nodes = [of_type[t] for t in graph.node_type.tolist()]
    arrays = graph.operand_ptr, graph.operand, graph.outputs, graph.node_ptr, graph.input_ptr
    inputs = [(str(chunk.type), len(chunk)) for chunk in graph.inputs]
    written = pickle.dumps((nodes, [np.asarray(x, np.int64).tobytes() for x in arrays], inputs))
    return hashlib.blake2b(written, digest_size=16).digest()
