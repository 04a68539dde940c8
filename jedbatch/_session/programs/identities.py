"""The identity of a kernel: its program, written out, of the shared values that it reads.

Processes that plan for each other, agree on programs or read exported ones number their types each
in its own way. Two kernels are the same if both have one identity.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.transfers import fetched
from jedbatch._jaxpr.versions import RULES_OF, consts_of, is_program, without_consts
from jedbatch._kernel.kernel import Kernel
from jedbatch._record.identity.environment import AccessPath
from jedbatch._record.types.registry import Registry


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
