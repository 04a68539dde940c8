"""Values that follow from what all calls share: they are computed once, before all regions.

A loss may read no result that depends on one of them. Then zeros come back to it, which must not
meet a derivative that is infinite (see `_jaxpr.gates`). Where there may be one, what comes back is
asked first, value by value, whether it is zeros.
"""

import functools
import itertools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jedbatch._jaxpr.derivatives import pull_back_some
from jedbatch._jaxpr.gates import Gates, has_finite_derivatives
from jedbatch._jaxpr.interpret import (
    Bindings,
    Rule,
    any_performs,
    has_gradient,
    inlined,
    reads,
    run_equation,
    run_equations,
    value_of,
)
from jedbatch._jaxpr.symmetric import DifferentiableFunction, refuse_rules
from jedbatch._jaxpr.versions import Equation, OpenProgram
from jedbatch._ragged.phases import Phase
from jedbatch._support.types import Array, PyTree


class SharedValues:
    """A program on values that all calls share.

    JAX differentiates rules of the user's twice (`jax.custom_vjp`), which we refuse to. So
    equations that have one are run as JAX does, and those between them in parts of their own.

    Attributes:
      asks: whether a part asks what comes back.
    """

    def __init__(self, jaxpr: OpenProgram, consts: Sequence[Array]):
        """Prepares a program; `consts` are its constants, which nobody traces."""
        self._jaxpr, self._consts = jaxpr, consts
        grouped = itertools.groupby(jaxpr.eqns, lambda x: any_performs([x], "custom_vjp_call"))
        groups = [(has_rule, list(eqns)) for has_rule, eqns in grouped]
        read = {v for v in jaxpr.outvars if isinstance(v, Var)}
        parts: list[_Part] = []
        for has_rule, eqns in reversed(groups):
            parts.append(_Part(jaxpr, eqns, read, has_rule))
            read.update(v for eqn in eqns for v in reads(eqn))
        self._parts = parts[::-1]
        self.asks = any(part.asks for part in parts)

    def run(self, given: Sequence[Array]) -> list[Array]:
        """Returns what the program returns."""
        variables = (*self._jaxpr.constvars, *self._jaxpr.invars)
        env = dict(zip(variables, (*self._consts, *given), strict=True))
        for part in self._parts:
            part.run(env)
        return [jnp.asarray(value_of(v, env)) for v in self._jaxpr.outvars]


class _Part:
    """Equations of a program on values that all calls share, one after the other.

    Attributes:
      asks: whether they ask what comes back: a derivative of theirs may be infinite.
    """

    def __init__(
        self, jaxpr: OpenProgram, eqns: Sequence[Equation], read: Container[Any], has_rule: bool
    ):
        """Prepares equations.

        Args:
          jaxpr: the program that they are of.
          eqns: the equations.
          read: what is read after them.
          has_rule: whether they have a rule of the user's in them.
        """
        self._jaxpr = jaxpr
        made = [v for eqn in eqns for v in eqn.outvars]
        known = set(made)
        before = (v for eqn in eqns for v in reads(eqn) if v not in known)
        self._given = list(dict.fromkeys(before))
        writes = tuple(v for v in made if v in read)
        self._phase = Phase(None, tuple(eqns), (), tuple(self._given), writes)
        self.asks = not (has_rule or has_finite_derivatives(eqns))

    def run(self, env: Bindings) -> None:
        """Adds what the equations compute to the values of variables."""
        given = [jnp.asarray(env[v]) for v in self._given]
        made = self._function(given) if self.asks else self._made(given)
        env.update(zip(self._phase.writes, made, strict=True))

    def _made(
        self, given: Sequence[Array], gates: Gates | None = None, flags: Sequence[jax.Array] = ()
    ) -> list[Array]:
        """Returns the values that are computed; `flags`, bool[] each, are for `gates`."""
        rule: Rule = functools.partial(run_equation, self._jaxpr)
        if gates is not None:
            pairs = zip(self._given, given, strict=True)
            given = [gates.at(v, x, flags, None, always=True) for v, x in pairs]
            rule = gates.rule(rule, flags)
        env = dict(zip(self._given, given, strict=True))
        run_equations(self._phase.equations, env, rule)
        return [jnp.asarray(env[v]) for v in self._phase.writes]

    @functools.cached_property
    def _function(self) -> DifferentiableFunction:
        """From what is given to the values that are computed."""
        phase = self._phase

        def pull_back(given, results, residuals, cotangents, wanted, moves):
            inexact = [has_gradient(v.aval.dtype) for v in self._given]
            moving = [i for i, x in enumerate(inexact) if x and wanted[i]]
            returned = [i for i, x in enumerate(cotangents) if x is not None]
            gates = Gates.find(phase.equations, [phase.writes[i] for i in returned])
            flags = [moves[i] for i in returned]

            run = functools.partial(self._made, gates=gates, flags=flags)
            return pull_back_some(run, given, moving, returned, cotangents)

        def marks(given, cotangents):
            return [jnp.zeros((), bool) if x is None else (x != 0).any() for x in cotangents]

        kinds = [(v.aval.shape, v.aval.dtype) for v in phase.writes]
        return DifferentiableFunction(
            self._made,
            lambda given: (self._made(given), []),
            pull_back,
            functools.partial(refuse_rules, "what is made of shared arguments", phase.equations),
            lambda: kinds,
            marks,
        )


def run_gated(compute: Callable, given: PyTree) -> PyTree:
    """Returns `compute(given)`, a pytree; what is given is shared by all calls."""
    closed, shapes = jax.make_jaxpr(compute, return_shape=True)(given)
    closed = inlined(closed)
    values = SharedValues(closed.jaxpr, closed.consts)
    if not values.asks:
        return compute(given)
    return jax.tree.unflatten(jax.tree.structure(shapes), values.run(jax.tree.leaves(given)))
