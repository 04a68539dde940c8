"""Programs as data, for which other processes can lower minibatches.

Of a program, lowering needs sizes, not what its kernels compute. So kernels cross as `KernelForm`.
A process that lowers has kernels of its own, of the types that it has met; one takes the place of a
form if both have one `identity`: the same program, written out, of the same shared values. What
fits no program there is left to the process that has the programs, and that alone makes new ones.
"""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.transfers import fetched
from jedbatch._jaxpr.versions import RULES_OF, consts_of, is_program, without_consts
from jedbatch._kernel.facts import KernelFacts, facts_of
from jedbatch._kernel.kernel import Kernel
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.placement import Placement
from jedbatch._program.plan import Plan
from jedbatch._program.signature import Signature
from jedbatch._record.identity.environment import AccessPath
from jedbatch._record.passes.projections import Projections
from jedbatch._record.types.registry import Registry
from jedbatch._session.program_cache import ProgramCache


class NoProgramError(Exception):
    """A minibatch fits none of the programs that this process knows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelForm(KernelFacts):
    """A kernel as far as lowering asks for it.

    Attributes:
      identity: of the kernel; None if it has none, or another one has the same.
      is_leaf: of its reverse; None if there is none.
    """

    identity: bytes | None
    is_leaf: bool | None

    @property
    def reverse(self) -> "KernelForm":
        return self


@dataclass(frozen=True)
class ProgramForms:
    """Programs for other processes.

    Attributes:
      version: another one if there are others.
      forward: by number, those with `KernelForm` in place of kernels.
      reverse: by number, (number of the program that it reverses, the same without that program).
      reserved: numbers of programs that are used before others.
    """

    version: int
    forward: dict[int, Signature]
    reverse: dict[int, tuple[int, ReverseSignature]]
    reserved: frozenset[int]


def identity_of(kernel: Kernel, registry: Registry) -> bytes | None:
    """Returns a digest of what a kernel computes, and how it is differentiated.

    It is the same in another process exactly if the program is, whatever it was traced from. None
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
        return None
    return text.digest


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

    Attributes:
      forward, reverse: programs by number.
    """

    def __init__(self, programs: ProgramCache):
        self._programs = programs
        self.forward: list[Signature] = []
        self.reverse: list[ReverseSignature] = []
        self._identities: dict[Kernel, bytes | None] = {}
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
        numbers = [_number(self.forward, s) for s in forward]
        has_reverse = {kernel for r in reverse for kernel in r.forward.kernels}
        forms = self._forms({k: None for s in forward for k in s.kernels}, has_reverse)
        made = [replace(s, kernels=tuple(forms[k] for k in s.kernels)) for s in forward]
        reverses: dict[int, tuple[int, Any]] = {}
        for r in reverse:
            without: Any = replace(r, forward=None)  # type: ignore[arg-type]
            reverses[_number(self.reverse, r)] = numbers[forward.index(r.forward)], without
        return ProgramForms(
            self._exported.version + 1 if self._exported else 0,
            dict(zip(numbers, made, strict=True)),
            reverses,
            frozenset(numbers[forward.index(s)] for s in reserved),
        )

    def _forms(self, kernels: Any, has_reverse: set[Kernel]) -> dict[Kernel, Any]:
        for kernel in kernels:
            if kernel not in self._identities:
                self._identities[kernel] = identity_of(kernel, self._programs.registry)
        identities = [self._identities[kernel] for kernel in kernels]
        return {
            kernel: KernelForm(
                identity=identity if identities.count(identity) == 1 else None,
                is_leaf=kernel.reverse.is_leaf if kernel in has_reverse else None,
                **facts_of(kernel),
            )
            for kernel, identity in zip(kernels, identities, strict=True)
        }

    def digest(self, plan: Plan) -> bytes:
        """Returns a digest of what a plan computes; see `digest_of`."""
        return digest_of(plan, self._programs.registry, self._identities)


def _number(programs: list[Any], program: Any) -> int:
    """Returns the position of a program in a list, to which it is added if it is not there."""
    if program not in programs:
        programs.append(program)
    return programs.index(program)


def cuts_of(projections: Projections, programs: ProgramCache) -> dict[bytes, tuple[int, ...]]:
    """Returns where nodes are cut in two, by the identity of their types."""
    found = {}
    for node_type, places in projections.decided.items():
        identity = identity_of(programs.kernel(node_type), programs.registry)
        if identity is not None:
            found[identity] = places
    return found


def follow_cuts(
    projections: Projections, programs: ProgramCache, cuts: Mapping[bytes, tuple[int, ...]]
) -> None:
    """Has nodes be cut where `cuts_of` says of another process."""

    def followed(node_type: int) -> tuple[int, ...] | None:
        identity = identity_of(programs.kernel(node_type), programs.registry)
        return None if identity is None else cuts.get(identity)

    projections.followed = followed


class ImportedPrograms(ProgramCache):
    """The programs of another process, as far as lowering needs them; there are no others."""

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
        self._exported: ProgramForms | None = None
        self._own: dict[bytes, Kernel | None] = {}  # None for one that two have
        self.identities: dict[Kernel, bytes | None] = {}
        self._is_old = True
        self._numbers: dict[Signature, int] = {}
        self._reverse_numbers: dict[ReverseSignature, int] = {}

    @property
    def version(self) -> int:
        """The version of the programs; -1 if there are none."""
        return self._exported.version if self._exported else -1

    def accept(self, exported: ProgramForms) -> None:
        """Replaces the programs by others."""
        self._exported, self._is_old = exported, True

    def kernel(self, type_id: int) -> Kernel:
        """The kernel of a node type."""
        is_new = type_id not in self._kernels
        kernel = super().kernel(type_id)
        if is_new:
            identity = self.identities[kernel] = identity_of(kernel, self.registry)
            if identity is not None:
                self._own[identity] = None if identity in self._own else kernel
            self._is_old = True
        return kernel

    def place(self, *args: Any, **options: Any) -> Placement:
        """Does the same as there, and brings programs and kernels together."""
        placed = super().place(*args, **options)
        if self._is_old:
            self._match()
        return placed

    def _match(self) -> None:
        """Makes programs of own kernels where there are such."""
        assert self._exported is not None
        made = {}
        for number, signature in self._exported.forward.items():
            kernels: list[Any] = []
            for form in signature.kernels:
                own = self._own.get(form.identity) if form.identity else None  # type: ignore[attr-defined]
                kernels.append(form if own is None else own)
            made[number] = replace(signature, kernels=tuple(kernels))
        reverses = {
            number: replace(reverse, forward=made[forward])
            for number, (forward, reverse) in self._exported.reverse.items()
        }
        self._signatures, self._reverses = list(made.values()), list(reverses.values())
        self._reserved = {made[number] for number in self._exported.reserved}
        self._numbers = {s: number for number, s in made.items()}
        self._reverse_numbers = {r: number for number, r in reverses.items()}
        self._used.clear()
        self._latest = None
        self._is_old = False

    def _make(self, placed: Placement, model: Signature | None) -> Signature:
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


def digest_of(plan: Plan, registry: Registry, identities: dict[Kernel, bytes | None]) -> bytes:
    """Returns a digest of the graph of a plan, whatever the types are numbered here."""
    assert plan.host is not None
    placed, graph = plan.host.placed, plan.host.placed.graph
    of_type: list[bytes | None] = [None] * len(graph.types)
    for type_id, kernel in zip(placed.type_ids, placed.kernels, strict=True):
        if kernel not in identities:
            identities[kernel] = identity_of(kernel, registry)
        of_type[type_id] = identities[kernel]
    nodes = [of_type[t] for t in graph.node_type.tolist()]
    arrays = graph.operand_ptr, graph.operand, graph.outputs, graph.node_ptr, graph.input_ptr
    inputs = [(str(chunk.type), len(chunk)) for chunk in graph.inputs]
    written = pickle.dumps((nodes, [np.asarray(x, np.int64).tobytes() for x in arrays], inputs))
    return hashlib.blake2b(written, digest_size=16).digest()
