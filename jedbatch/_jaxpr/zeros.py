"""Symbolic zeros: results that are not differentiated are not pulled back.

A cotangent that does not exist is not the same as a cotangent of zeros: `0 * inf` is NaN, and a
backward rule of the user's may not be linear. JAX knows at trace time which cotangents exist. In a
batch it differs from lane to lane: the same cell may have a result that is read for one
node and not for the next. So for every variable of a backward program we find the results whose
cotangents it depends on, its *sources*; a lane in which none of these is alive has zero there,
whatever was computed. Where variables of different sources meet, those without a source that is
alive are replaced by zeros, by one `select` for each. Everything downstream is then right.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import interpret, run_equation, shape_of
from jedbatch._jaxpr.versions import Equation, OpenProgram, scan_parts, without_consts
from jedbatch._support.types import Array

Sources = frozenset[int]
NO_SOURCES: Sources = frozenset()


def find_sources(jaxpr: OpenProgram, known_sources: Mapping[Var, Sources]) -> dict[Var, Sources]:
    """For each variable that depends on some given ones the union of what these depend on."""
    sources = dict(known_sources)
    for eqn in jaxpr.eqns:
        of_operands = [
            NO_SOURCES if isinstance(v, Literal) else sources.get(v, NO_SOURCES) for v in eqn.invars
        ]
        if any(of_operands):
            sources.update(zip(eqn.outvars, _sources_of_results(eqn, of_operands), strict=True))
    return sources


def _sources_of_results(eqn: Equation, operands: Sequence[Sources]) -> list[Sources]:
    """The sources of the results of an equation, from those of its operands."""
    if eqn.primitive.name == "scan":
        return _sources_of_scan(eqn, list(operands))
    return [NO_SOURCES.union(*operands)] * len(eqn.outvars)


def _sources_of_scan(eqn: Equation, operands: list[Sources]) -> list[Sources]:
    body = without_consts(eqn.params["jaxpr"])
    first, count = scan_parts(eqn)
    while True:
        sources = find_sources(body, dict(zip(body.invars, operands, strict=True)))
        results = [
            NO_SOURCES if isinstance(v, Literal) else sources.get(v, NO_SOURCES)
            for v in body.outvars
        ]
        before = operands[first : first + count]
        after = [a | b for a, b in zip(before, results, strict=False)]
        if after == before:
            return results
        operands[first : first + count] = after


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
    sources = find_sources(jaxpr, {v: frozenset([i]) for i, v in enumerate(cotangents)})

    def evaluate(args: Sequence[Array], alive: Sequence[Array]) -> list[Array]:
        zeroed = dict(zip(jaxpr.invars, args, strict=True))
        zeroed = {v: zeroed[v] for v in cotangents}  # those that are not alive are zeros already

        def with_zeros(v: Var, x: Array) -> Array:
            if v not in zeroed:
                flags = [alive[i] for i in sorted(sources[v])]
                zeroed[v] = where_alive(jnp.stack(flags).any(), x)
            return zeroed[v]

        def rule(eqn: Equation, values: list[jax.Array]) -> list[Array]:
            of_operands = [
                NO_SOURCES if isinstance(v, Literal) else sources.get(v, NO_SOURCES)
                for v in eqn.invars
            ]
            everything = NO_SOURCES.union(*of_operands)
            guarded_values = [
                with_zeros(v, x) if source and source != everything else x
                for v, x, source in zip(eqn.invars, values, of_operands, strict=True)
            ]
            return run_equation(jaxpr, eqn, guarded_values)

        return interpret(jaxpr, consts, args, rule)

    flags = [jax.ShapeDtypeStruct((), jnp.bool_) for _ in cotangents]
    return jax.make_jaxpr(evaluate)(list(map(shape_of, jaxpr.invars)), flags)


def sources_of(jaxpr: OpenProgram, cotangents: Sequence[Array]) -> list[Sources]:
    """For each result of a backward program the numbers of the cotangents it depends on."""
    sources = find_sources(jaxpr, {v: frozenset([i]) for i, v in enumerate(cotangents)})
    return [sources.get(v, NO_SOURCES) if isinstance(v, Var) else NO_SOURCES for v in jaxpr.outvars]
