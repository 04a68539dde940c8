"""Operations written down so that the names of symbols do not matter.

Every array of an instance has a symbol of its own for its length. So what a function does to two
sentences is recorded twice, once with n and once with m, and JAX traces it for both; that they are
the same must be found out again. Symbols are numbered as they come up, and everything that can hold
an extent (shapes, parameters of primitives, programs) is written with the numbers:

    tanh of f32[n,4], f32[m,4]            both    tanh of f32[s0,4]
    broadcast to (m, 2*m)                         broadcast to (s0, 2*s0)

What cannot be written is told apart by identity: then two operations that are the same are taken to
be different, never the other way round.
"""

from collections.abc import Hashable
from typing import Any

import jax
from jax.extend.core import Literal

from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.extents_inside import numbered_extent
from jedbatch._jaxpr.identity import Same
from jedbatch._jaxpr.interpret import run_equation, value_of
from jedbatch._jaxpr.symbolic_dims import Base
from jedbatch._jaxpr.versions import Equation, OpenProgram, consts_of, is_program, without_consts
from jedbatch._record.registry import Registry
from jedbatch._support.types import Array


class Renaming:
    """Numbers of symbols, given as they come up.

    Args:
      numbers: those given so far.
      registry: knows how parameters of primitives are told apart.
    """

    def __init__(self, numbers: dict[str, int], registry: Registry | None = None):
        self.numbers = numbers
        self.registry = registry
        self._in_rule = False

    def written(self, value: object) -> Hashable:
        """Returns a key with numbers for symbols."""
        if isinstance(value, Base):
            return numbered_extent(value, self.numbers)
        if type(value) is tuple:
            return tuple([self.written(x) for x in value])
        return value

    def program(self, jaxpr: OpenProgram) -> Hashable:
        """Returns a program as a key, with variables numbered by first appearance."""
        assert self.registry is not None
        inner = without_consts(jaxpr)
        variables: dict[Any, int] = {}

        def atom(x: Array) -> Hashable:
            aval = x.aval
            kind = self.written(aval.shape), aval.dtype, aval.weak_type
            if isinstance(x, Literal):
                return "literal", jax.numpy.asarray(x.val).tobytes(), kind
            return variables.setdefault(x, len(variables)), kind

        parts: list[Hashable] = [Same(c) for c in consts_of(jaxpr)]
        parts += map(atom, (*inner.constvars, *inner.invars))
        for eqn in inner.eqns:
            parts.append(eqn.primitive)
            parts += map(atom, eqn.invars)
            parts.append(self._rule(inner, eqn) if _has_rule(eqn) else self._params(eqn.params))
            parts += map(atom, eqn.outvars)
        return (*parts, *map(atom, inner.outvars))

    def _params(self, value: Array) -> Hashable:
        assert self.registry is not None
        if is_program(value):
            return self.program(value)
        if isinstance(value, dict):
            return dict, *((k, self._params(v)) for k, v in sorted(value.items()))
        if isinstance(value, tuple | list):
            return type(value), *map(self._params, value)
        if isinstance(value, Base):
            return self.written(value)
        return self.registry.keys.params_key(value)

    def _rule(self, jaxpr: OpenProgram, eqn: Equation) -> Hashable:
        """Returns a call of a function with a derivative rule as a key: both, as JAX traces them.

        JAX makes another function of the rule whenever it traces such a call. Most rules call what
        they belong to; there the program is enough.
        """
        body_key = self._params(eqn.params["call_jaxpr"])
        if self._in_rule:
            return body_key

        def run(*values: Any) -> list[Array]:
            env = dict(zip(variables, values, strict=True))
            return run_equation(jaxpr, eqn, [value_of(v, env) for v in eqn.invars])

        variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        moved = jax.make_jaxpr(lambda xs, ts: jax.jvp(run, xs, ts))(avals, avals)
        self._in_rule = True
        rule = self.program(moved)
        self._in_rule = False
        return body_key, rule


def _has_rule(eqn: Equation) -> bool:
    inexact = all(jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact) for v in eqn.invars)
    return eqn.primitive.name == "custom_jvp_call" and inexact


def written_type(registry: Registry, type_id: int) -> tuple[Hashable, tuple[str, ...]]:
    """Returns (a key equal for types that differ in the names of symbols only, these)."""
    node_type = registry.node_types[type_id]
    operation = operation_of(node_type)
    if operation.like is not None:
        first, symbols = operation.like
        return written_type(registry, first)[0], symbols
    renaming = Renaming({}, registry)
    operands = [renaming.written((t.shape, t.dtype, t.weak)) for t in node_type.operands]
    program = renaming.program(operation.jaxpr)
    return (tuple(operands), program, node_type.shared), tuple(renaming.numbers)
