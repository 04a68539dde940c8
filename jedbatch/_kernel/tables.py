"""Functions of the rows of small tables, computed once for every row there is.

`log_softmax(mix[kind])` in a cell is done again in each of a thousand lanes, for four kinds. Where
a lane looks up a row of a shared array, what it makes of this row alone is a row of another table.
That is computed before the lanes run, and looked up instead, if it costs no more than starting a
chunk of lanes, and saves more than it moves.

The cotangents of such a table are added up over lanes, and go back through the function row by row.
A row that no lane has read has no cotangent, which is not the same as zeros: `0 * inf` is NaN. So
the rows that were read are known then.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from jedbatch._jaxpr.interpret import (
    ELEMENTWISE_OPERATIONS,
    Bindings,
    has_gradient,
    names_in,
    reads,
    run_equation,
    run_equations,
    shape_of,
    value_of,
    work,
)
from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.versions import ClosedProgram, Equation, OpenProgram
from jedbatch._jaxpr.zeros import where_alive
from jedbatch._kernel.residuals import STRUCTURAL_OPERATIONS
from jedbatch._support.types import Array

LEAST_WORK = 1024  # floating-point operations of a lane that are worth a table
WORK_OF_MOVING = 2  # floating-point operations that take as long as looking up an element
FUNCTIONS = (
    ELEMENTWISE_OPERATIONS
    | STRUCTURAL_OPERATIONS
    | names_in(
        "argmax argmin cumlogsumexp cummax cummin cumprod cumsum custom_jvp_call dot_general iota",
        "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum",
    )
)


@dataclass(frozen=True, eq=False)
class Table:
    """Functions of every row of a shared array.

    Attributes:
      source: the array's position among those that `Tabulated.program` returns.
      rows: of the array.
      function: maps a row, [1, ...], to what is made of it.
      kinds: (shape, dtype) of the tables with these, [rows, ...].
    """

    source: int
    rows: int
    function: Callable[[Array], list[Array]]
    kinds: tuple[Kind, ...]

    def compute(self, source: Array) -> list[Array]:
        """The tables, from the array."""
        return jax.vmap(self.function)(source[:, None])

    def pull_back(
        self, source: Array, cotangents: Sequence[Array | None], was_read: Array
    ) -> Array:
        """The cotangent of the array.

        Args:
          source: the array.
          cotangents: of the tables, None for zeros.
          was_read: bool[rows]; other rows send nothing back.
        """
        moving = [i for i, x in enumerate(cotangents) if x is not None]

        def of_row(row: Array, cotangents: Sequence[Array]) -> Array:
            def made(row: Array) -> list[Array]:
                results = self.function(row)
                return [results[i] for i in moving]

            return jax.vjp(made, row)[1](cotangents)[0]

        sent = jax.vmap(of_row)(source[:, None], [cotangents[i] for i in moving])[:, 0]
        return where_alive(was_read.reshape(-1, *[1] * (sent.ndim - 1)), sent)


class Tabulated(NamedTuple):
    """The program of a lane that looks functions of rows up.

    Attributes:
      program: from shared values, tables, and operands to results, and arrays that tables are
        made of.
      tables: how they are made.
    """

    program: ClosedProgram
    tables: tuple[Table, ...]


class _Replaced(NamedTuple):
    """A look-up in place of which others are done.

    Attributes:
      look_up: the equation.
      equations: what is made of its row, and of nothing else.
      made: of it, the variables that are looked up instead.
    """

    look_up: Equation
    equations: list[Equation]
    made: list[Var]


def tabulated(closed: ClosedProgram, num_shared: int, most_work: float) -> Tabulated:
    """Returns the program of a lane with functions of rows in tables of their own.

    Args:
      closed: the program, without calls of others.
      num_shared: arguments that all lanes share.
      most_work: floating-point operations that a table may cost.
    """
    jaxpr = closed.jaxpr
    fixed = {*jaxpr.constvars, *jaxpr.invars[:num_shared]}  # the same in all lanes
    literal: set[Var] = set()
    for eqn in jaxpr.eqns:
        if not reads(eqn) or literal.issuperset(reads(eqn)):
            literal.update(eqn.outvars)
        elif fixed.union(literal).issuperset(reads(eqn)):
            fixed.update(eqn.outvars)
    found = [
        replaced
        for eqn in jaxpr.eqns
        if _is_look_up(eqn, fixed)
        and (replaced := _replaced(jaxpr, eqn, literal, most_work)) is not None
    ]
    if not found:
        return Tabulated(closed, ())
    sources = list(dict.fromkeys(r.look_up.invars[0] for r in found))
    tables = tuple(
        Table(
            sources.index(r.look_up.invars[0]),
            r.look_up.invars[0].aval.shape[0],
            functools.partial(_run_function, closed, r),
            tuple(
                ((shape_of(r.look_up.invars[0]).shape[0], *shape_of(v).shape), shape_of(v).dtype)
                for v in r.made
            ),
        )
        for r in found
    )
    index_of = {v: r.look_up.invars[1] for r in found for v in r.made}
    eqns = _needed(jaxpr, [*jaxpr.outvars, *sources, *index_of.values()], index_of)

    def run(shared: Sequence[Array], given: Sequence[Array], rest: Sequence[Array]) -> list[Array]:
        table_of = dict(zip(index_of, given, strict=True))
        env: Bindings = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, [*shared, *rest], strict=True))

        def add(index: Var | None) -> None:
            rows = [v for v in table_of if index_of[v] is index]
            env.update((v, _look_up(table_of[v], env[index])) for v in rows)

        for v in jaxpr.invars:
            add(v)
        for eqn in eqns:
            values = [value_of(x, env) for x in eqn.invars]
            outs = run_equation(jaxpr, eqn, values)
            env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if v not in table_of)
            for v in eqn.outvars:
                add(v)
        return [value_of(x, env) for x in [*jaxpr.outvars, *sources]]

    avals = list(map(shape_of, jaxpr.invars))
    kinds = [jax.ShapeDtypeStruct(*kind) for table in tables for kind in table.kinds]
    return Tabulated(jax.make_jaxpr(run)(avals[:num_shared], kinds, avals[num_shared:]), tables)


def _is_look_up(eqn: Equation, fixed: Collection[Var]) -> bool:
    """Returns whether an equation looks up one row of a shared array, by an index of the lane."""
    if eqn.primitive.name != "dynamic_slice" or len(eqn.invars) < 2:
        return False
    array, index, *_ = eqn.invars
    if not isinstance(index, Var) or index in fixed or array not in fixed:
        return False
    shape = array.aval.shape
    return eqn.params["slice_sizes"] == (1, *shape[1:]) and has_gradient(array.aval.dtype)


def _replaced(
    jaxpr: OpenProgram, look_up: Equation, literal: set[Var], most_work: float
) -> _Replaced | None:
    """Returns what takes the place of a look-up; None if it is not worth it."""
    (raw,) = look_up.outvars
    plain, of_row = {raw}, {raw}  # the row in other shapes, and what is made of it
    equations = []
    for eqn in jaxpr.eqns:
        read = [v for v in reads(eqn) if v not in literal]
        if literal.issuperset(eqn.outvars):
            equations.append(eqn)
        elif eqn.primitive.name in FUNCTIONS and read and of_row.issuperset(read):
            equations.append(eqn)
            of_row.update(eqn.outvars)
            if eqn.primitive.name in STRUCTURAL_OPERATIONS and plain.issuperset(read):
                plain.update(eqn.outvars)
    own = {id(eqn) for eqn in equations if of_row.issuperset(eqn.outvars)}
    read_elsewhere = {v for eqn in jaxpr.eqns if id(eqn) not in own for v in reads(eqn)}
    read_elsewhere.update(v for v in jaxpr.outvars if isinstance(v, Var))
    wanted = read_elsewhere & of_row - plain
    made = [v for eqn in equations for v in eqn.outvars if v in wanted]
    if not made:
        return None
    equations = _needed(jaxpr.replace(eqns=equations), made, ())
    saved = sum(work(eqn) for eqn in equations if id(eqn) in own)
    moved = sum(math.prod(v.aval.shape) for v in made)
    if plain.isdisjoint(read_elsewhere):
        moved -= math.prod(raw.aval.shape)
    rows = look_up.invars[0].aval.shape[0]
    if saved < LEAST_WORK + WORK_OF_MOVING * max(0, moved) or rows * saved > most_work:
        return None
    return _Replaced(look_up, equations, made)


def _needed(jaxpr: OpenProgram, results: Sequence[Any], known: Collection[Var]) -> list[Equation]:
    """Returns the equations that some results depend on, if some variables are known."""
    needed = {v for v in results if isinstance(v, Var)}.difference(known)
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in reads(eqn) if v not in known)
            eqns.append(eqn)
    return eqns[::-1]


def _run_function(closed: ClosedProgram, replaced: _Replaced, row: Array) -> list[Array]:
    """Computes the functions of a row, [1, ...]."""
    jaxpr = closed.jaxpr
    env: Bindings = {replaced.look_up.outvars[0]: row}
    run_equations(replaced.equations, env, functools.partial(run_equation, jaxpr))
    return [env[v] for v in replaced.made]


def _look_up(table: Array, index: Array) -> Array:
    """A row of a table, by the index of the look-up that it takes the place of."""
    starts = [index, *[jnp.zeros_like(index)] * (table.ndim - 1)]
    row = lax.dynamic_slice(table, starts, (1, *table.shape[1:]), allow_negative_indices=False)
    return row.reshape(table.shape[1:])
