"""Values that follow from what all calls share: they are computed once, before all regions.

A loss may read no result that depends on one of them. Then zeros come back to it, which must not
meet a derivative that is infinite (see `_ragged.gates`). Where there may be one, what comes back is
asked first, value by value, whether it is zeros.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jedbatch._jaxpr.derivatives import pull_back_some
from jedbatch._jaxpr.interpret import (
    Bindings,
    Rule,
    any_performs,
    has_gradient,
    inlined,
    names_in,
    run_equation,
    run_equations,
    value_of,
)
from jedbatch._jaxpr.symmetric import DifferentiableFunction, refuse_rules
from jedbatch._jaxpr.versions import OpenProgram
from jedbatch._ragged.axis_rules import LOOK_UPS, VIEWS
from jedbatch._ragged.gates import Gates
from jedbatch._ragged.phases import Phase
from jedbatch._support.types import Array, PyTree

# Operations whose derivatives are finite wherever their operands are.
FINITE = names_in(
    "add add_any and concatenate cos dot_general eq ge gt iota le logistic lt max min mul ne neg",
    "not or pad reduce_sum rev select_n sin square stop_gradient sub tanh",
)


class SharedValues:
    """A program on values that all calls share."""

    def __init__(self, jaxpr: OpenProgram, consts: Sequence[Array]):
        """Prepares a program; `consts` are its constants, which nobody traces."""
        self._jaxpr, self._consts = jaxpr, consts
        computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        returned = (v for v in jaxpr.outvars if isinstance(v, Var) and v in computed)
        made = tuple(dict.fromkeys(returned))
        self._phase = Phase(None, tuple(jaxpr.eqns), (), tuple(jaxpr.invars), made)
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        # JAX differentiates rules of the user's twice (`jax.custom_vjp`), which we refuse to.
        own_rules = any_performs(jaxpr.eqns, "custom_vjp_call")
        self.asks = not (own_rules or names <= FINITE | VIEWS | LOOK_UPS)

    def run(self, given: Sequence[Array]) -> list[Array]:
        """Returns what the program returns."""
        env = self._env(given)
        made = self._function(list(given)) if self.asks else self._made(given)
        env.update(zip(self._phase.writes, made, strict=True))
        return [jnp.asarray(value_of(v, env)) for v in self._jaxpr.outvars]

    def _env(self, given: Sequence[Array]) -> Bindings:
        variables = (*self._jaxpr.constvars, *self._jaxpr.invars)
        return dict(zip(variables, (*self._consts, *given), strict=True))

    def _made(
        self, given: Sequence[Array], gates: Gates | None = None, flags: Sequence[jax.Array] = ()
    ) -> list[Array]:
        """Returns the values that are computed; `flags`, bool[] each, are for `gates`."""
        rule: Rule = functools.partial(run_equation, self._jaxpr)
        if gates is not None:
            pairs = zip(self._jaxpr.invars, given, strict=True)
            given = [gates.at(v, x, flags, None, always=True) for v, x in pairs]
            rule = gates.rule(rule, flags)
        env = self._env(given)
        run_equations(self._jaxpr.eqns, env, rule)
        return [jnp.asarray(env[v]) for v in self._phase.writes]

    @functools.cached_property
    def _function(self) -> DifferentiableFunction:
        """From what is given to the values that are computed."""
        phase = self._phase

        def pull_back(given, results, residuals, cotangents, wanted, moves):
            inexact = [has_gradient(v.aval.dtype) for v in self._jaxpr.invars]
            moving = [i for i, x in enumerate(inexact) if x and wanted[i]]
            returned = [i for i, x in enumerate(cotangents) if x is not None]
            gates, flags = Gates.find(phase, returned), [moves[i] for i in returned]

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
