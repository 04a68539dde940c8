"""Keys that tell operations of JAX apart: keys of primitives, their parameters and jaxprs."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.identity import Same, typed_or_same
from jedbatch._jaxpr.symbolic_dims import symbols_in
from jedbatch._jaxpr.versions import OpenProgram, consts_of, is_program, without_consts
from jedbatch._record.closures import function_identity
from jedbatch._record.instance_arrays import is_array
from jedbatch._support.caches import Memory

MANY_JAXPRS = 1024  # programs known by identity
MANY_ELEMENTS = 4096  # of a constant, before it is told apart by identity


def _const_key(const: Any) -> Hashable:
    """A constant by what is in it, if it is small; nobody can change it (see `owned`)."""
    if not is_array(const) or isinstance(const, Tracer) or const.size > MANY_ELEMENTS:
        return Same(const)
    if jax.dtypes.issubdtype(const.dtype, jax.dtypes.extended):  # random keys
        return Same(const)
    return "const", str(jax.typeof(const)), np.asarray(const).tobytes()


class Keys:
    """The keys of what has been met.

    Attributes:
      reached: see `Registry`.
    """

    def __init__(self) -> None:
        self.reached: Mapping[int, Hashable] = {}
        self._ids: dict[Hashable, Any] = {}
        self._jaxprs: dict[Hashable, Hashable] = Memory(MANY_JAXPRS)
        self._by_identity: dict[tuple, tuple[PrimitiveKey, dict]] = Memory(MANY_JAXPRS)

    def __len__(self) -> int:
        return len(self._ids)

    def primitive_key(self, primitive: Any, params: dict[str, Any]) -> PrimitiveKey:
        """A primitive and its parameters as one object.

        JAX hands us the same parameters whenever a jit-ted function meets the same types, so
        those are known by identity.
        """
        same = None
        if "jaxpr" in params:
            same = (primitive, *params, *map(id, params.values()))
            entry = self._by_identity.get(same)
            if entry is not None:
                return entry[0]
        content = primitive, self.params_key(params)
        key = self._ids.get(("primitive", content))
        if key is None:
            is_ragged = bool(symbols_in(params))
            key = self._ids["primitive", content] = PrimitiveKey(content, is_ragged)
        if same is not None:
            self._by_identity[same] = key, params  # ids are good while this is alive
        return key

    def params_key(self, value: Any) -> Hashable:
        """The parameters of a primitive as something hashable; unequal if in doubt."""
        kind = type(value)
        if kind is int or kind is str or kind is bool or value is None:
            return kind, value
        if kind is tuple:
            return kind, *map(self.params_key, value)
        if is_program(value):
            return self.jaxpr_key(value)
        if isinstance(value, dict):
            return dict, *((k, self.params_key(v)) for k, v in sorted(value.items()))
        if isinstance(value, tuple | list):
            return type(value), *map(self.params_key, value)
        if callable(value):
            return function_identity(value, self.reached)
        return typed_or_same(value)

    def jaxpr_key(self, jaxpr: OpenProgram) -> Hashable:
        """Equal for programs that are equal up to the names of their variables."""
        same = Same(jaxpr)
        key = self._jaxprs.get(same)
        if key is None:
            content = ("written", self._write(jaxpr))
            key = self._jaxprs[same] = self._ids.setdefault(content, ("jaxpr", len(self._ids)))
        return key

    def _write(self, jaxpr: OpenProgram) -> Hashable:
        """A jaxpr as nested tuples, variables numbered by first appearance."""
        inner = without_consts(jaxpr)
        numbers: dict[Any, int] = {}

        def atom(x: Any) -> Hashable:
            if isinstance(x, Literal):
                return "literal", np.asarray(x.val).tobytes(), str(x.aval)
            return numbers.setdefault(x, len(numbers)), str(x.aval)

        parts: list[Hashable] = [_const_key(c) for c in consts_of(jaxpr)]
        parts += map(atom, (*inner.constvars, *inner.invars))
        for eqn in inner.eqns:
            parts += eqn.primitive, self.params_key(eqn.params)
            parts += map(atom, (*eqn.invars, *eqn.outvars))
        return (*parts, *map(atom, inner.outvars))
