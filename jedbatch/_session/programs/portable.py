"""Programs as data, for which other processes can lower minibatches.

Of a program, lowering needs sizes, not what its kernels compute. So kernels cross as `KernelSpec`s.
A process that lowers plans with these in place of its own kernels, wherever both have one
`identity`: the same program, written out, of the same shared values. What fits no program there is
left to the process that has the programs, and that alone makes new ones.
"""

import hashlib
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jedbatch._graph.types import NodeType
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.kernel_spec import KernelSpec
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.plan import Plan
from jedbatch._program.signature import Signature
from jedbatch._record.passes.projections import Projections
from jedbatch._session.programs.program_cache import ProgramCache


class NoProgramError(Exception):
    """A minibatch fits none of the programs that this process knows."""


@dataclass(frozen=True)
class ProgramForms:
    """Programs for other processes.

    Attributes:
      version: another one if there are others.
      forward: by number, those with `KernelSpec`s in place of kernels.
      reverse: by number, those that reverse one of them.
      reserved: numbers of programs that are used before others.
    """

    version: int
    forward: dict[int, Signature]
    reverse: dict[int, ReverseSignature]
    reserved: frozenset[int]


def described(kernel: Kernel, identity: str) -> NodeType:
    """Returns the type of a kernel as other processes know it."""
    return replace(kernel.node_type, operation=None, shared=(), identity=identity)


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
        self._exported: ProgramForms | None = None
        self._in_use: Any = None

    def export(self) -> ProgramForms:
        """Returns the programs in use."""
        in_use = self._programs.in_use
        if self._exported is None or in_use != self._in_use:
            version = self._exported.version + 1 if self._exported else 0
            self._exported, self._in_use = self._make(version, *in_use), in_use
        return self._exported

    def _make(
        self,
        version: int,
        forward: list[Signature],
        reverse: list[ReverseSignature],
        reserved: list[Signature],
    ) -> ProgramForms:
        reverse = reverse if self._gradient else []
        if self._gradient:
            forward = [s for s in forward if any(r.forward == s for r in reverse)]
        kernels = list(dict.fromkeys(k for s in forward for k in s.kernels))
        identities = list(map(self._programs.identity, kernels))
        specs: dict[Kernel, Any] = {}  # without an identity if several have the same
        for kernel, found in zip(kernels, identities, strict=True):
            identity = found if identities.count(found) == 1 else ""
            specs[kernel] = KernelSpec.of(kernel, described(kernel, identity), self._gradient)
        made = {s: replace(s, kernels=tuple(specs[k] for k in s.kernels)) for s in forward}
        return ProgramForms(
            version,
            {_number(self.forward, s): there for s, there in made.items()},
            {_number(self.reverse, r): replace(r, forward=made[r.forward]) for r in reverse},
            frozenset(self.forward.index(s) for s in reserved if s in made),
        )


def _number(programs: list[Any], program: Any) -> int:
    """Returns the position of a program in a list, to which it is added if it is not there."""
    if program not in programs:
        programs.append(program)
    return programs.index(program)


def cuts_of(projections: Projections, programs: ProgramCache) -> dict[str, tuple[int, ...]]:
    """Returns where nodes are cut in two, by the identity of their types."""
    found = {
        programs.identity(programs.kernel(node_type)): places
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
        registry, target, environment = programs.registry, programs.target, programs.environment
        super().__init__(registry, target, environment, (), replace(programs.options, counter=None))
        self.version = -1
        self._specs: dict[str, KernelSpec] = {}
        self._numbers: dict[Signature, int] = {}
        self._reverse_numbers: dict[ReverseSignature, int] = {}

    def accept(self, exported: ProgramForms) -> None:
        """Replaces the programs by others, in which kernels that were known stay what they are."""

        def known(spec: Any) -> Any:
            identity = spec.node_type.identity
            return self._specs.setdefault(identity, spec) if identity else spec

        made = {
            s: replace(s, kernels=tuple(map(known, s.kernels))) for s in exported.forward.values()
        }
        self._numbers = {made[s]: number for number, s in exported.forward.items()}
        self._reverse_numbers = {
            replace(r, forward=made[r.forward]): number for number, r in exported.reverse.items()
        }
        self.version = exported.version
        self._signatures, self._reverses = list(self._numbers), list(self._reverse_numbers)
        self._reserved = {made[exported.forward[number]] for number in exported.reserved}
        self._used.clear()
        self._latest = None

    def identity_of_type(self, type_id: int) -> str:
        """Returns the identity of a node type, which no program need have."""
        return self.identity(super().kernel(type_id))

    def kernel(self, type_id: int) -> Any:
        """The kernel of a node type, without its program.

        Raises:
          NoProgramError: no program has it.
        """
        found: Any = super().kernel(type_id)
        if not isinstance(found, KernelSpec):
            found = self._specs.get(self.identity(found))
            if found is None or found in self._kernels.values():  # of another type
                raise NoProgramError
            self._kernels[type_id] = found
        return found

    def _make(self, *args: Any, **options: Any) -> Signature:
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


def digest_of(plan: Plan, programs: ProgramCache) -> bytes:
    """Returns a digest of the graph of a plan, whatever the types are numbered here."""
    assert plan.host is not None
    placed, graph = plan.host.placed, plan.host.placed.graph
    of_type = dict(zip(placed.type_ids, map(programs.identity, placed.kernels), strict=True))
    nodes = [of_type[t] for t in graph.node_type.tolist()]
    arrays = graph.operand_ptr, graph.operand, graph.outputs, graph.node_ptr, graph.input_ptr
    inputs = [(str(chunk.type), len(chunk)) for chunk in graph.inputs]
    written = pickle.dumps((nodes, [np.asarray(x, np.int64).tobytes() for x in arrays], inputs))
    return hashlib.blake2b(written, digest_size=16).digest()
