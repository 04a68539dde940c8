"""Gates: what comes back through one result stays apart from what comes through another.

A loss may read one result of an instance and not another one. To the latter come zeros, which times
a derivative that is infinite are NaN, where the loop over instances computes nothing. These must
not be added to what comes back through the former. They meet where an equation reads a value that
both results depend on: there a gate hands the value on as it is, and what comes back as zeros
unless something comes back through a result that depends on this equation.

    y ──> tanh ──> a        to y comes back what tanh sends, and what sqrt sends if something
      └─|─> sqrt ──> b      comes back through b

Loops and branches have gates inside, too, where results of theirs differ in what depends on them,
unless all derivatives in them are finite.

What all instances of a phase share is not gated as a whole: behind a gate each instance would have
a copy, and a product with a weight would be as many products. There are gates before equations
whose derivatives may be infinite, and what comes back through others is then zeros anyway: through
products, too, as their factors are zeros where nothing comes back.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import (
    REBUILT,
    Rule,
    Run,
    bodies_of,
    has_gradient,
    inner_programs,
    interpret,
    is_fixed,
    is_inexact,
    names_in,
    reads,
    run_equation,
    run_with_bodies,
)
from jedbatch._jaxpr.symbolic_dims import is_ragged, symbols_in
from jedbatch._jaxpr.versions import (
    Atom,
    Equation,
    consts_of,
    scan_parts,
    without_consts,
)
from jedbatch._jaxpr.zeros import NO_SOURCES, Sources, where_alive
from jedbatch._support.types import Array

# Operations whose derivatives are finite wherever their operands are.
_FINITE = names_in(
    "add add_any and argmax argmin broadcast_in_dim clamp concatenate convert_element_type",
    "copy cos cumsum dim_as_value dot_general dynamic_slice expand_dims gather reshape slice",
    "squeeze transpose",
    "dynamic_update_slice eq floor ge gt iota le logistic lt max min mul ne neg not or pad",
    "reduce_sum rev scatter scatter-add select_n sign sin split square",
    "stop_gradient sub tanh",
)
# Of these, those whose derivatives are not where an operand is infinite, or no number.
_FINITE_AT_NUMBERS = names_in("cos dot_general mul sin square")
# What has programs in which there may be gates.
_ENTERED = REBUILT - {"while"}


@dataclass(frozen=True, eq=False)
class Gates:
    """Where equations read values that more results depend on than on the equation.

    Attributes:
      leads: for variables, the results that depend on them, by their positions among some.
      results: all of these.
      shared: variables that all instances share, where they are not to be copied for each.
      entered: the results that depend on any of the equations.
      closes: whether flags may be unset though something comes back to the results: the equations
        are of a body whose steps an instance need not take.
    """

    leads: Mapping[Any, Sources]
    results: Sources
    shared: frozenset[Any]
    entered: Sources
    closes: bool = False

    @staticmethod
    def find(
        equations: Sequence[Equation], results: Sequence[Atom], shared: Iterable[Atom] = ()
    ) -> "Gates":
        """Returns the gates of some equations.

        Args:
          equations: in their order.
          results: variables that something may come back to.
          shared: variables that are not to be copied for each instance.
        """
        leads = find_leads(equations, results, [frozenset([k]) for k in range(len(results))])
        every = frozenset(range(len(results)))
        return Gates(leads, every, with_derived(equations, shared), every)

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
        through = self.entered if readers is None else self.through(readers)
        leads = self.leads.get(atom, through)
        if not through & leads:
            return lax.stop_gradient(x) if leads else x
        if leads == through and not always:
            return x
        opens = _any(flags, through & leads)
        return gated(x, lax.expand_dims(opens, range(jnp.ndim(opens), jnp.ndim(x))))

    def rule(self, run: Rule, flags: Sequence[jax.Array]) -> Rule:
        """Returns a rule for equations that runs them by another rule, behind their gates."""

        def gated_rule(eqn: Equation, values: list[Array]) -> Sequence[Array]:
            before = self._as_number if self._meets_infinity(eqn) else self._before
            values = [before(v, x, eqn, flags) for v, x in zip(eqn.invars, values, strict=True)]
            if not self.has_gates_inside(eqn) or _has_rules_of_lengths(eqn):
                return run(eqn, values)
            bodies = [self._body(eqn, program, flags) for program in bodies_of(eqn)]
            return run_with_bodies(eqn, bodies, values)

        return gated_rule

    def _body(self, eqn: Equation, program: Any, flags: Sequence[jax.Array]) -> Run:
        inside = self.inside(eqn, program)
        return lambda *args: inside.run_inside(program, args, flags)

    def _before(self, atom: Any, x: Array, eqn: Equation, flags: Sequence[jax.Array]) -> Array:
        """Returns a value as an equation reads it."""
        through = self.through(eqn.outvars)
        is_finite = eqn.primitive.name in _ENTERED or has_finite_derivatives([eqn])
        if self.is_shared(atom):
            if is_finite:
                return x
            closes = self.closes and not all(map(self.is_uniform, eqn.invars))
            always = closes or through != self.results
        else:
            always = self.closes or (bool(self.shared) and through != self.results)
        return self.at(atom, x, flags, eqn.outvars, always and not is_finite)

    def _meets_infinity(self, eqn: Equation) -> bool:
        """Returns whether an equation that nobody may read sends what is no number to weights."""
        if eqn.primitive.name not in _FINITE_AT_NUMBERS or not is_inexact(eqn.outvars[0]):
            return False
        if not self.shared or all(map(self.is_uniform, eqn.invars)):
            return False
        return self.closes or self.through(eqn.outvars) != self.results

    def _as_number(self, atom: Any, x: Array, eqn: Equation, flags: Sequence[jax.Array]) -> Array:
        """Returns a value as an equation reads it that multiplies what comes back by it.

        It may be infinite; it is zeros if nothing comes back, as nobody reads the result then.
        """
        x = self._before(atom, x, eqn, flags)
        if self.is_uniform(atom):
            return x
        opens = _any(flags, self.through(eqn.outvars) or self.results)
        return where_alive(lax.expand_dims(opens, range(jnp.ndim(opens), jnp.ndim(x))), x)

    def through(self, variables: Iterable[Atom]) -> Sources:
        """Returns the results that depend on one of some variables."""
        return NO_SOURCES.union(*map(self.through_one, variables))

    def through_one(self, variable: Atom) -> Sources:
        """Returns the results that depend on a variable; on a literal, none do."""
        return self.leads.get(variable, NO_SOURCES) if isinstance(variable, Var) else NO_SOURCES

    def is_shared(self, atom: Any) -> bool:
        """Returns whether all instances share a variable, which is not to be copied for each."""
        return isinstance(atom, Var) and atom in self.shared

    def is_uniform(self, atom: Any) -> bool:
        """Returns whether a variable or literal has one value for all instances."""
        return isinstance(atom, Literal) or atom in self.shared

    def has_gates_inside(self, eqn: Equation) -> bool:
        """Returns whether there are gates in a program that an equation runs.

        They are where results of the equation differ in what depends on them, or where what all
        instances share cannot have one before it.
        """
        if eqn.primitive.name not in _ENTERED or is_fixed(eqn):
            return False
        of_results = list(map(self.through_one, eqn.outvars))
        is_shared = any(map(self.is_shared, eqn.invars))
        every = NO_SOURCES.union(*of_results)
        differs = len(set(of_results)) > 1 or (is_shared and every != self.results)
        return (differs or self.closes) and not has_finite_derivatives([eqn])

    def inside(self, eqn: Equation, program: Any, closes: bool = False) -> "Gates":
        """Returns the gates in a program that an equation runs.

        If it is a body that `closes`, flags are not set in steps that an instance does not take.
        """
        jaxpr = without_consts(program)
        of_results = list(map(self.through_one, eqn.outvars))
        of_program = _leads_of_program(eqn, program, of_results)
        leads = find_leads(jaxpr.eqns, jaxpr.outvars, of_program)
        pairs = zip(jaxpr.invars, _constant_operands(eqn, program), strict=False)
        shared = [v for v, operand in pairs if self.is_shared(operand)]
        return Gates(
            leads,
            self.results,
            with_derived(jaxpr.eqns, [*jaxpr.constvars, *shared]),
            NO_SOURCES.union(*of_results),
            closes or self.closes,
        )

    def run_inside(
        self,
        program: Any,
        args: Sequence[Array],
        flags: Sequence[jax.Array],
        run: Rule | None = None,
    ) -> list[Array]:
        """Returns the results of a program that has these gates inside.

        Args:
          program: with constants or without.
          args: its arguments, which go through gates first.
          flags: see `at`.
          run: a rule for its equations; None to run them as JAX does.
        """
        jaxpr, consts = without_consts(program), consts_of(program)
        pairs = zip(jaxpr.invars, args, strict=True)
        args = [x if self.is_shared(v) else self.at(v, x, flags, None) for v, x in pairs]
        rule = self.rule(run or functools.partial(run_equation, jaxpr), flags)
        return interpret(jaxpr, consts, args, rule)


def with_derived(equations: Sequence[Equation], shared: Iterable[Any]) -> frozenset[Any]:
    """Returns variables that all instances share, and what follows from these alone."""
    found = set(shared)
    for eqn in equations:
        if derives(eqn, found):
            found.update(eqn.outvars)
    return frozenset(found)


def derives(eqn: Equation, variables: set[Any] | frozenset[Any]) -> bool:
    """Returns whether an equation reads some variables, and no others."""
    operands = reads(eqn)
    return bool(operands) and variables.issuperset(operands)


def find_leads(
    equations: Sequence[Equation], results: Sequence[Any], of_results: Sequence[Sources]
) -> dict[Any, Sources]:
    """Returns what each variable leads to, from what results of equations lead to."""
    leads: dict[Any, Sources] = {}

    def add(variables: Sequence[Any], several: Sequence[Sources]) -> None:
        for v, found in zip(variables, several, strict=True):
            if isinstance(v, Var):
                leads[v] = leads.get(v, NO_SOURCES) | found

    add(results, of_results)
    for eqn in reversed(equations):
        outs = [leads.get(v, NO_SOURCES) for v in eqn.outvars]
        add(eqn.invars, _leads_of_operands(eqn, outs))
    return leads


def _leads_of_arguments(program: Any, of_results: Sequence[Sources]) -> list[Sources]:
    """Returns the leads of the arguments of a program, from those of its results."""
    jaxpr = without_consts(program)
    leads = find_leads(jaxpr.eqns, jaxpr.outvars, of_results)
    return [leads.get(v, NO_SOURCES) for v in jaxpr.invars]


def _leads_of_operands(eqn: Equation, of_results: Sequence[Sources]) -> list[Sources]:
    """Returns the leads of the operands of an equation, from those of its results."""
    name, every = eqn.primitive.name, NO_SOURCES.union(*of_results)
    if len(set(of_results)) > 1:
        if name == "cond":
            branches = [_leads_of_arguments(x, of_results) for x in eqn.params["branches"]]
            return [every, *(NO_SOURCES.union(*x) for x in zip(*branches, strict=True))]
        if name in _ENTERED:
            (program,) = bodies_of(eqn)
            return _leads_of_arguments(program, _leads_of_program(eqn, program, of_results))
    return [every] * len(eqn.invars)


def _leads_of_program(
    eqn: Equation, program: Any, of_results: Sequence[Sources]
) -> Sequence[Sources]:
    """Returns the leads of the results of a program that an equation runs."""
    name = eqn.primitive.name
    if name == "while":
        if program is not eqn.params["body_jaxpr"]:
            return [NO_SOURCES]
        first = len(without_consts(program).invars) - len(of_results)
        return _leads_of_carried(program, first, len(of_results), of_results)
    if name == "scan":
        return _leads_of_carried(program, *scan_parts(eqn), of_results)
    return of_results


def _leads_of_carried(
    program: Any, first: int, count: int, of_results: Sequence[Sources]
) -> list[Sources]:
    """Returns the leads of the results of a body; what is carried leads where later steps do."""
    found = list(of_results)
    while True:
        carried = _leads_of_arguments(program, found)[first : first + count]
        after = [a | b for a, b in zip(found, carried, strict=False)] + found[count:]
        if after == found:
            return found
        found = after


def _constant_operands(eqn: Equation, program: Any) -> Sequence[Any]:
    """Returns operands that are the first arguments of a program, the same in all of its steps."""
    params, name = eqn.params, eqn.primitive.name
    if name == "scan":
        return eqn.invars[: scan_parts(eqn)[0]]
    if name == "while":
        before = params["cond_nconsts"]
        if program is not params["body_jaxpr"]:
            return eqn.invars[:before]
        return eqn.invars[before : before + params["body_nconsts"]]
    return eqn.invars[1:] if name == "cond" else eqn.invars


def has_finite_derivatives(equations: Sequence[Equation]) -> bool:
    """Returns whether derivatives are finite wherever operands are, of equations and in them."""
    for eqn in equations:
        programs = inner_programs(eqn)
        if eqn.primitive.name not in (_ENTERED if programs else _FINITE):
            return False
        if not all(has_finite_derivatives(x.eqns) for x in programs):
            return False
    return True


def _has_rules_of_lengths(eqn: Equation) -> bool:
    """Returns whether an equation is run by other rules, since there are lengths in it."""
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    return any(map(is_ragged, shapes)) or bool(symbols_in(eqn.params))


def _any(flags: Sequence[jax.Array], results: Sources) -> Array:
    """Returns whether one of some flags is set."""
    return functools.reduce(jnp.logical_or, [flags[k] for k in sorted(results)])


@jax.custom_jvp
def gated(x: Array, opens: Array) -> Array:
    """Returns x, to which nothing comes back where `opens`, bool[...], is not set."""
    return jnp.where(opens, x, x)  # under `vmap` it has the axis that its derivative has


@gated.defjvp
def _gated_tangent(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    x, opens = primals
    return gated(x, opens), where_alive(opens, tangents[0])
