"""Symbolic zeros: results that are not differentiated are not pulled back.

A cotangent that does not exist is not the same as a cotangent of zeros: `0 * inf` is NaN, and a
backward rule of the user's may not be linear. JAX knows at trace time which cotangents exist. In a
batch it differs from lane to lane: the same cell may have a result that is read for one
node and not for the next. So for every variable of a backward program we find the results whose
cotangents it depends on, its *sources*; a lane in which none of these is alive has zero there,
whatever was computed. Where variables of different sources meet, those without a source that is
alive are replaced by zeros, by one `select` for each. Everything downstream is then right.

They may meet inside of a loop, a branch or a call, too, whose programs are run in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import (
    REBUILT,
    Bindings,
    bodies_of,
    has_gradient,
    is_fixed,
    names_in,
    run_equation,
    run_equations,
    run_with_bodies,
    shape_of,
    value_of,
)
from jedbatch._jaxpr.versions import (
    Equation,
    OpenProgram,
    consts_of,
    scan_parts,
    without_consts,
)
from jedbatch._support.types import Array

Sources = frozenset[int]
NO_SOURCES: Sources = frozenset()
_ENTERED = REBUILT - {"while"}
_MOVING = names_in(  # what adds and moves numbers: of zeros it makes zeros
    "add_any broadcast_in_dim concatenate convert_element_type copy expand_dims neg reduce_sum",
    "reshape rev slice split squeeze stack transpose unstack",
)


def find_sources(jaxpr: OpenProgram, known_sources: Mapping[Var, Sources]) -> dict[Var, Sources]:
    """For each variable that depends on some given ones the union of what these depend on."""
    sources = dict(known_sources)
    for eqn in jaxpr.eqns:
        of_operands = [_source(v, sources) for v in eqn.invars]
        if any(of_operands):
            sources.update(zip(eqn.outvars, _sources_of_results(eqn, of_operands), strict=True))
    return sources


def _source(atom: Any, sources: Mapping[Var, Sources]) -> Sources:
    """The sources of a variable, or of a literal, which has none."""
    return NO_SOURCES if isinstance(atom, Literal) else sources.get(atom, NO_SOURCES)


def _sources_of_results(eqn: Equation, operands: Sequence[Sources]) -> list[Sources]:
    """The sources of the results of an equation, from those of its operands."""
    name = eqn.primitive.name
    if name == "scan":
        return _through(eqn.params["jaxpr"], _sources_in_scan(eqn, operands))
    if name == "cond":
        of_branches = [_through(x, operands[1:]) for x in eqn.params["branches"]]
        return [operands[0].union(*x) for x in zip(*of_branches, strict=True)]
    if name in _ENTERED:
        (program,) = bodies_of(eqn)
        return _through(program, operands)
    return [NO_SOURCES.union(*operands)] * len(eqn.outvars)


def _through(program: Any, operands: Sequence[Sources]) -> list[Sources]:
    """The sources of the results of a program, from those of its arguments."""
    jaxpr = without_consts(program)
    sources = find_sources(jaxpr, dict(zip(jaxpr.invars, operands, strict=True)))
    return [_source(v, sources) for v in jaxpr.outvars]


def _sources_in_scan(eqn: Equation, operands: Sequence[Sources]) -> list[Sources]:
    """The sources of what the body of a `scan` is given in any of its steps."""
    found = list(operands)
    first, count = scan_parts(eqn)
    while True:
        results = _through(eqn.params["jaxpr"], found)
        before = found[first : first + count]
        after = [a | b for a, b in zip(before, results, strict=False)]
        if after == before:
            return found
        found[first : first + count] = after


def followed(closed: Any) -> list[Sources]:
    """For each result of a program the numbers of the arguments that it has a derivative by.

    What JAX knows to have none, as behind `stop_gradient`, `floor` or an integer, has none here.
    """
    types = closed.in_avals
    moving = [k for k, x in enumerate(types) if has_gradient(x.dtype)]

    def push(args: Sequence[Array], tangents: Sequence[Array]) -> list[Any]:
        def run(*moved: Array) -> list[Array]:
            given = dict(enumerate(args)) | dict(zip(moving, moved, strict=True))
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *given.values())

        return jax.jvp(run, [args[k] for k in moving], tangents)[1]

    pushed = jax.make_jaxpr(push)(types, [types[k] for k in moving]).jaxpr
    given = {v: frozenset([k]) for k, v in zip(moving, pushed.invars[len(types) :], strict=True)}
    sources = find_sources(pushed, given)
    return [_source(v, sources) for v in pushed.outvars]


def where_alive(alive: Array, x: Array) -> Array:
    """x, or zeros."""
    return jnp.where(alive, x, jnp.zeros_like(x))


def guarded(jaxpr: OpenProgram, consts: Sequence[Array], cotangents: Sequence[Array]) -> Any:
    """A backward program that is told which of its cotangents are alive.

    Args:
      jaxpr: the program.
      consts: its constants.
      cotangents: those of its arguments that are cotangents.

    Returns:
      A closed jaxpr with one more argument for each cotangent, bool[]. Results without a source
      that is alive may be anything.
    """
    place = {v: i for i, v in enumerate(cotangents)}
    given = [frozenset([place[v]]) if v in place else NO_SOURCES for v in jaxpr.invars]

    def evaluate(args: Sequence[Array], alive: Sequence[Array]) -> list[Array]:
        return _run_guarded(jaxpr, consts, args, given, alive)

    flags = [jax.ShapeDtypeStruct((), jnp.bool_) for _ in cotangents]
    return jax.make_jaxpr(evaluate)(list(map(shape_of, jaxpr.invars)), flags)


def _run_guarded(
    jaxpr: OpenProgram,
    consts: Sequence[Array],
    args: Sequence[Array],
    of_args: Sequence[Sources],
    alive: Sequence[Array],
    of_results: Sequence[Sources] = (),
) -> list[Array]:
    """Returns the results of a program in which nothing meets what is not alive.

    Args:
      jaxpr: the program.
      consts: its constants.
      args: its arguments. Those with one source are zeros if this is not alive.
      of_args: the sources of each.
      alive: bool[] for each source.
      of_results: for some results the sources that they have for who reads them: a result that has
        some, and others than these, is zeros unless one of its own is alive.
    """
    sources = find_sources(jaxpr, dict(zip(jaxpr.invars, of_args, strict=True)))
    zeroed: dict[Any, Array] = {}

    def with_zeros(v: Any, x: Array, met: Sources) -> Array:
        """x, or zeros where it meets values of other sources and has none that is alive."""
        own = _source(v, sources)
        if not own or own == met:
            return x
        if v not in zeroed:
            zeroed[v] = where_alive(jnp.stack([alive[i] for i in sorted(own)]).any(), x)
        return zeroed[v]

    def rule(eqn: Equation, values: list[jax.Array]) -> list[Array]:
        of_operands = [_source(v, sources) for v in eqn.invars]
        met = NO_SOURCES.union(*of_operands)
        pairs = zip(eqn.invars, values, strict=True)
        operands = [with_zeros(v, x, met) for v, x in pairs]
        if len(met) > 1 and eqn.primitive.name in _ENTERED and not is_fixed(eqn):
            return _run_bodies_guarded(eqn, operands, of_operands, alive)
        return run_equation(jaxpr, eqn, operands)

    env: Bindings = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    run_equations(jaxpr.eqns, env, rule)
    results = [value_of(v, env) for v in jaxpr.outvars]
    for i, (v, met) in enumerate(zip(jaxpr.outvars, of_results, strict=False)):
        results[i] = with_zeros(v, results[i], met)
    return results


def _inside(
    program: Any,
    of_args: Sequence[Sources],
    alive: Sequence[Array],
    of_results: Sequence[Sources],
) -> Callable[..., list[Array]]:
    """From the arguments of a program to its results; see `_run_guarded`."""
    jaxpr, consts = without_consts(program), consts_of(program)
    return lambda *args: _run_guarded(jaxpr, consts, args, of_args, alive, of_results)


def _run_bodies_guarded(
    eqn: Equation, values: Sequence[Array], of_operands: Sequence[Sources], alive: Sequence[Array]
) -> list[Array]:
    """Returns the results of a loop, a branch or a call; see `_run_guarded`."""
    given, of_results = list(of_operands), list[Sources]()
    if eqn.primitive.name == "scan":
        given = _sources_in_scan(eqn, of_operands)
        first, count = scan_parts(eqn)
        of_results = given[first : first + count]
    elif eqn.primitive.name == "cond":
        of_results = _sources_of_results(eqn, of_operands)
        given = given[1:]
    bodies = [_inside(x, given, alive, of_results) for x in bodies_of(eqn)]
    return run_with_bodies(eqn, bodies, values)


def sources_of(jaxpr: OpenProgram, cotangents: Sequence[Array]) -> list[Sources]:
    """For each result of a backward program the numbers of the cotangents it depends on."""
    sources = find_sources(jaxpr, {v: frozenset([i]) for i, v in enumerate(cotangents)})
    return [sources.get(v, NO_SOURCES) if isinstance(v, Var) else NO_SOURCES for v in jaxpr.outvars]


def keeps_zeros(jaxpr: OpenProgram, cotangents: Sequence[Var]) -> list[bool]:
    """For each result of a backward program whether it is zeros where the cotangents are.

    That is known of sums of them and of pieces of them, which need no guard: nothing that may be
    infinite meets them.
    """
    kept = set(cotangents)

    def is_kept(atom: Any) -> bool:
        return isinstance(atom, Var) and atom in kept

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVING and all(map(is_kept, eqn.invars)):
            kept.update(eqn.outvars)
    return list(map(is_kept, jaxpr.outvars))
