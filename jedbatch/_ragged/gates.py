"""Gates: what comes back through one result of a phase stays apart from what does through another.

A loss may read one result of an instance and not another one. To the latter come zeros, which times
a derivative that is infinite are NaN, where the loop over instances computes nothing. These must
not be added to what comes back through the former. They meet where an equation reads a value that
both results depend on: there a gate hands the value on as it is, and what comes back as zeros
unless something comes back through a result that depends on this equation.

    y ──> tanh ──> a        to y comes back what tanh sends, and what sqrt sends if something
      └─|─> sqrt ──> b      comes back through b
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jedbatch._jaxpr.interpret import Rule, has_gradient
from jedbatch._jaxpr.versions import Atom
from jedbatch._jaxpr.zeros import NO_SOURCES, Sources, where_alive
from jedbatch._program.arenas import broadcast_flags
from jedbatch._ragged.phases import Phase
from jedbatch._support.types import Array


@dataclass(frozen=True, eq=False)
class Gates:
    """Where equations of a phase read values that more results depend on than on the equation.

    Attributes:
      leads: for variables, the results that depend on them, by their positions among some.
      results: how many these are.
    """

    leads: dict[Any, Sources]
    results: int

    @staticmethod
    def find(phase: Phase, results: Sequence[int]) -> "Gates":
        """Returns the gates of a phase; `results` are positions of what it writes."""
        leads: dict[Any, Sources] = {}
        for k, i in enumerate(results):
            v = phase.writes[i]
            leads[v] = leads.get(v, NO_SOURCES) | {k}
        for eqn in reversed(phase.equations):
            through = NO_SOURCES.union(*(leads.get(v, NO_SOURCES) for v in eqn.outvars))
            for v in eqn.invars:
                if isinstance(v, Var):
                    leads[v] = leads.get(v, NO_SOURCES) | through
        return Gates(leads, len(results))

    def at(
        self,
        atom: Atom,
        x: Array,
        flags: Sequence[jax.Array],
        readers: Iterable[Atom] | None,
        always: bool = False,
    ) -> Array:
        """Returns a value as it is read, behind its gate if there is one.

        Args:
          atom: the variable, or literal, of which it is the value.
          x: the value.
          flags: bool[...] for each of the results, whether something comes back through it: of the
            shape of x, or of its first axes.
          readers: the results of the equation that reads it; None where the phase itself reads it,
            before all equations.
          always: whether there is a gate, too, where all results that depend on the variable do on
            what reads it.
        """
        aval: Any = atom.aval
        if not isinstance(atom, Var) or not has_gradient(aval.dtype):
            return x
        through = self._all if readers is None else self.through(readers)
        leads = self.leads.get(atom, through)
        if not through & leads or (leads == through and not always):
            return x
        opens = _any(flags, through & leads)
        return gated(x, broadcast_flags(opens, x))

    def rule(self, run: Rule, flags: Sequence[jax.Array]) -> Rule:
        """Returns a rule for equations that runs them by another rule, behind their gates."""
        return lambda eqn, values: run(
            eqn,
            [self.at(v, x, flags, eqn.outvars) for v, x in zip(eqn.invars, values, strict=True)],
        )

    def through(self, variables: Iterable[Atom]) -> Sources:
        """Returns the results that depend on one of some variables."""
        return NO_SOURCES.union(*(self.leads.get(v, NO_SOURCES) for v in variables))

    @property
    def _all(self) -> Sources:
        return frozenset(range(self.results))


def _any(flags: Sequence[jax.Array], results: Sources) -> Array:
    """Returns whether one of some flags is set."""
    return functools.reduce(jnp.logical_or, [flags[k] for k in sorted(results)])


@jax.custom_jvp
def gated(x: Array, opens: Array) -> Array:
    """Returns x, to which nothing comes back where `opens`, bool[...], is not set."""
    return x


@gated.defjvp
def _gated_tangent(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    x, opens = primals
    return gated(x, opens), where_alive(opens, tangents[0])
