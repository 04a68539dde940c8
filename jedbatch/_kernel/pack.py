"""Products of a cell with weights, put together: as few and as large as its dependencies allow.

A cell is written gate by gate. An LSTM multiplies x and h by four weights each and adds:

    i = σ(x Wi + h Ui + bi)     f = σ(x Wf + h Uf + bf)     o = ...     u = tanh(...)

Products of few rows are bound by reading weights and by starting kernels. One product

    [x, h] [[Wi Wf Wo Wu]
            [Ui Uf Uo Uu]]  +  [bi bf bo bu]

computes all eight. So the products of a cell are collected in a table, with the values that are
multiplied (x, h) as rows and the sums of products (gates) as *columns*, `_kernel.covering` says
which of them become one, and the program is written again with these.

Weights are packed from shared values only: a kernel moves that to its prologue (`_kernel.kernel`),
so it runs once per program, and gradients flow back through it. Sums are taken in another order,
all else is computed as it was. Products of other dtypes or precisions are never put together; what
is inside of loops, branches, `jax.checkpoint` and functions with rules of their own is left alone.
So is elementwise work: an LSTM with one logistic of three gates that lie next to each other takes
1.00 to 1.05 of the time that it takes with three, which XLA fuses (hidden sizes 64 and 256, 8 and
256 lanes, on a CPU), and another order of its gates makes no difference.

Vectors are concatenated to save a product, which moves one row per instance. Matrices, as in an
MV-RNN, are not: it took 1.6 of the time of two products (8 instances, 64 × 64). Two products of
the same matrix are one, though.

Where a derivative on the way to rows or weights may be infinite, as that of `sqrt(w)`, products
that different results depend on stay apart: zeros that come back through one would meet it (see
`_jaxpr.zeros`).

A product `W x` alone is written anew too, as `x` times the transpose of W: two to thirty rows times
a matrix take XLA:CPU up to twice as long if it sums over the last axis of the matrix.
"""

import functools
import graphlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Var

from jedbatch._jaxpr.gates import find_leads, has_finite_derivatives
from jedbatch._jaxpr.interpret import Bindings, reads, run_equation, run_equations
from jedbatch._jaxpr.versions import Atom, ClosedProgram, Equation, OpenProgram, is_program
from jedbatch._jaxpr.zeros import NO_SOURCES, Sources
from jedbatch._kernel.covering import Group, ProductTable, Rectangle, cover
from jedbatch._kernel.products import CellProgram, Product, join, split_sizes, sum_of
from jedbatch._support.types import Array


def fused(closed: ClosedProgram, num_shared: int) -> Any:
    """The program of a cell with products of row values and weights put together.

    Args:
      closed: the closed jaxpr of one instance. Its first `num_shared` arguments are shared by all
        instances, others are the instance's own.
      num_shared: how many are shared.

    Returns:
      A program of the same results; `closed` itself if no product can be saved.
    """
    program = CellProgram(closed, num_shared)
    if not program.products:
        return closed
    sums, columns = find_sums(program)
    grid, table = make_table(program.jaxpr, sums, columns)
    groups = cover(table)
    packed = [group for group in groups if is_better_packed(grid.products_of(group))]
    if not packed:
        return closed
    parts: list[list[Any]] = [[] for _ in columns]  # keys of what each column is the sum of
    steps = [_equation_step(program.jaxpr, eqn) for eqn in program.jaxpr.eqns]
    with_constants: set[int] = set()
    for group in packed:
        step = _group_step(grid, group, set(grid.columns_of(group)) - with_constants)
        with_constants.update(grid.columns_of(group))
        steps.append(step)
        for key in step.writes:
            parts[key[0]].append(key)
    for group in groups:
        if group not in packed:
            (p,) = grid.products_of(group)
            parts[group[0].columns[0]].append(p.result)
    for v, (mine, others) in sums.items():
        if with_constants.intersection(mine):
            late = [c for c in mine if c not in with_constants]
            constants = [x for c in late for x in columns[c].constants]
            steps.append(_sum_step(v, [*(x for c in mine for x in parts[c]), *constants, *others]))
    results = [v for v in program.jaxpr.outvars if isinstance(v, Var)]
    return program.traced(functools.partial(_run_steps, steps, results))


# --- columns, and the table ---


class Column(NamedTuple):
    """A sum of products of one kind, those of a matrix by themselves, and of shared constants."""

    products: list[Product]
    constants: list[Any]


class Sum(NamedTuple):
    """A variable that is a sum of columns, one of each kind or matrix, and of others."""

    columns: list[int]
    others: list[Any]


def find_sums(program: CellProgram) -> tuple[dict[Var, Sum], list[Column]]:
    """Sums by variable, and their columns.

    A product belongs to the sum that is its only reader, that one to the next, and so on.
    """
    same = _same(program.jaxpr)
    inside: set[Var] = set()
    roots: dict[Var, None] = {}
    for v in program.products:
        while v is not None and v not in inside:
            inside.add(v)
            if program.adds_up(v) is None:
                roots[v] = None
            v = program.adds_up(v)
    sums: dict[Var, Sum] = {}
    columns: list[Column] = []
    columns_known: dict[Hashable, int] = {}  # columns that are written twice are computed once
    for root in roots:
        parts: dict[Hashable, list[Product]] = {}
        constants: list[Any] = []
        addends: list[Any] = []
        stack = [root]
        while stack:
            v = stack.pop()
            if v in roots and v is not root:
                addends.append(v)
            elif v in program.products:
                p = program.products[v]
                matrix = same[p.row] if p.kind.free else None  # dear to concatenate
                part = parts.setdefault((p.kind, matrix), [])
                if p.sums_in_full or all(same[p.row] != same[product.row] for product in part):
                    part.append(p)
                else:  # adding up its weight and the other's would round
                    parts[p.kind, matrix, p.result] = [p]
            elif v in inside:
                stack.extend(reversed(program.maker[v].invars))
            else:
                (constants if v in program.shared else addends).append(v)
        sum_products = []
        for products in parts.values():
            factors = tuple((p.kind, same[p.row], same[p.weight], p.weight_axis) for p in products)
            column = columns_known.setdefault((factors, tuple(constants)), len(columns))
            if column == len(columns):
                columns.append(Column(products, constants))
            sum_products.append(column)
            constants = []
        sums[root] = Sum(sum_products, addends)
    return sums, columns


def _same(jaxpr: OpenProgram) -> dict[Var, Any]:
    """For each variable the first one that is computed from the same in the same way."""
    first: dict[Hashable, Any] = {}
    same: dict[Var, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}

    def known(x: Array) -> Any:
        if isinstance(x, Var):
            return same[x]
        return x.aval.shape, x.aval.dtype, x.aval.weak_type, np.asarray(x.val).tobytes()

    for eqn in jaxpr.eqns:
        key: Any = id(eqn)
        if all(map(_is_told_by_its_text, eqn.params.values())):
            key = eqn.primitive.name, tuple(map(known, eqn.invars)), str(eqn.params)
        for i, v in enumerate(eqn.outvars):
            same[v] = first.setdefault((key, i), v)
    return same


def _is_told_by_its_text(parameter: object) -> bool:
    """False of programs, whose constants are not printed, and of arrays."""
    if isinstance(parameter, tuple | list):
        return all(map(_is_told_by_its_text, parameter))
    is_array = isinstance(parameter, np.ndarray | jax.Array)
    return not (is_array or is_program(parameter))


class Grid(NamedTuple):
    """The table of a cell.

    Attributes:
      rows: the variables that are multiplied.
      columns: what is to be computed.
      entries: by row and column, the products there; their weights are added up.
    """

    rows: list[Any]
    columns: list[Column]
    entries: dict[tuple[int, int], list[Product]]

    def columns_of(self, group: Group) -> list[int]:
        """The columns of a group."""
        return [c for rectangle in group for c in rectangle.columns]

    def products_of(self, group: Group) -> list[Product]:
        """The products of a group."""
        places = [(r, c) for rows, columns in group for r in rows for c in columns]
        return [p for place in places for p in self.entries[place]]


def make_table(
    jaxpr: OpenProgram, sums: dict[Var, Sum], columns: list[Column]
) -> tuple[Grid, ProductTable]:
    """Returns the products that have to be computed, as variables and as a table."""
    same = _same(jaxpr)
    rows: dict[Var, int] = {}
    entries: dict[tuple[int, int], list[Product]] = {}
    for c, column in enumerate(columns):
        for p in column.products:
            r = rows.setdefault(same[p.row], len(rows))
            entries.setdefault((r, c), []).append(p)
    needs: dict[Var, int] = {}  # columns that each variable depends on
    for eqn in jaxpr.eqns:
        columns_read = 0
        for v in reads(eqn):
            columns_read |= needs.get(v, 0)
        for v in eqn.outvars:
            needs[v] = columns_read | sum(1 << c for c in (sums[v].columns if v in sums else ()))
    heights = {r: products[0].height for (r, _), products in entries.items()}
    leads = _leads_of_columns(jaxpr, sums, len(columns))
    steep = _steep(jaxpr)
    rows_are_flat = steep.isdisjoint(rows)

    def content(place: tuple[int, int]) -> Array:
        """The factors; matrices are not stacked, so nothing equals theirs."""
        factors = [(same[p.weight], p.weight_axis) for p in entries[place]]
        apart = None if rows_are_flat else leads[place[1]]
        return place if entries[place][0].kind.free else (apart, *factors)

    def kind(c: int) -> Hashable:
        """Columns of weights with infinite derivatives are told apart by their results."""
        column = columns[c]
        of_weights = [*column.constants, *(p.weight for p in column.products)]
        return column.products[0].kind, None if steep.isdisjoint(of_weights) else leads[c]

    table = ProductTable(
        {place: content(place) for place in entries},
        list(map(kind, range(len(columns)))),
        [needs.get(v, 0) for v in rows],
        [heights[r] for r in range(len(rows))],
        [column.products[0].width for column in columns],
    )
    return Grid(list(rows), columns, entries), table


def _steep(jaxpr: OpenProgram) -> set[Any]:
    """Returns the variables on the way to which a derivative may be infinite."""
    steep: set[Any] = set()
    for eqn in jaxpr.eqns:
        if not (steep.isdisjoint(reads(eqn)) and has_finite_derivatives([eqn])):
            steep.update(eqn.outvars)
    return steep


def _leads_of_columns(jaxpr: OpenProgram, sums: Mapping[Var, Sum], count: int) -> list[Sources]:
    """Returns the results that depend on each column."""
    results = [frozenset([k]) for k in range(len(jaxpr.outvars))]
    leads = find_leads(jaxpr.eqns, jaxpr.outvars, results)
    found = [NO_SOURCES] * count
    for v, (columns, _) in sums.items():
        for c in columns:
            found[c] |= leads.get(v, NO_SOURCES)
    return found


# --- the program that computes it ---


class PackedStep(NamedTuple):
    """Something to run: `run(env)` reads and adds to the values by key."""

    reads: Sequence[Any]
    writes: Sequence[Any]
    run: Callable[[Bindings], None]


def is_better_packed(products: Sequence[Product]) -> bool:
    """True of several products, and of a vector times a transposed matrix, `W @ x`."""
    (first, *further) = products
    return bool(further) or (first.weight_axis == 1 and first.kind.free == ())


def _run_steps(steps: Sequence[PackedStep], results: Iterable[Any], env: Bindings) -> None:
    """Runs the steps that the results depend on; of two that write a key, the later one."""
    maker = {key: i for i, step in enumerate(steps) for key in step.writes}
    after: dict[int, list[int]] = {}
    stack = [maker[key] for key in results if key in maker]
    while stack:
        i = stack.pop()
        if i not in after:
            after[i] = [maker[key] for key in steps[i].reads if key in maker]
            stack += after[i]
    for i in graphlib.TopologicalSorter(after).static_order():
        steps[i].run(env)


def _equation_step(jaxpr: OpenProgram, eqn: Equation) -> PackedStep:
    rule = functools.partial(run_equation, jaxpr)
    return PackedStep(reads(eqn), eqn.outvars, lambda env: run_equations([eqn], env, rule))


def _sum_step(v: Atom, terms: Sequence[object]) -> PackedStep:
    return PackedStep(terms, [v], lambda env: env.update({v: sum_of([env[x] for x in terms])}))


def _group_step(grid: Grid, group: Group, new: set[int]) -> PackedStep:
    """One product. Constants of the columns `new` are added to it.

    Its results are pieces of columns, by (column, rectangle).
    """
    first = group[0]
    kind = grid.columns[first.columns[0]].products[0].kind
    widths = [grid.columns[c].products[0].width for c in first.columns]
    constants: dict[tuple[int, Rectangle], list[Any]] = {}
    for x in group:
        constants.update({(c, x): grid.columns[c].constants for c in x.columns if c in new})
        new = new.difference(x.columns)
    any_constants = any(constants.values())

    def pack(env: Bindings) -> Array:
        blocks = [
            [sum_of([p.matrix(env) for p in grid.entries[r, c]]) for c in first.columns]
            for r in first.rows
        ]
        return join([join(row, 1) for row in blocks], 0)

    def bias(rectangle: Rectangle, env: Bindings) -> Array:
        each = [[env[v] for v in constants.get((c, rectangle), ())] for c in rectangle.columns]
        constant_values = [
            sum_of(x) if x else kind.zeros(width) for x, width in zip(each, widths, strict=True)
        ]
        return join(constant_values, kind.axis)

    def run(env: Bindings) -> None:
        values = [join([env[grid.rows[r]] for r in x.rows], kind.row_axis) for x in group]
        result = kind.multiply(_stack(values), pack(env))
        if any_constants:
            result = lax.add(result, _stack([bias(x, env) for x in group]))
        for x, row in zip(group, _unstack(result, len(group)), strict=True):
            pieces = split_sizes(row, widths, kind.axis)
            env.update(zip(((c, x) for c in x.columns), pieces, strict=True))

    reads_needed = [grid.rows[r] for x in group for r in x.rows]
    reads_needed += [p.weight for p in grid.products_of((first,))]
    reads_needed += [v for constant_values in constants.values() for v in constant_values]
    return PackedStep(reads_needed, [(c, x) for x in group for c in x.columns], run)


def _stack(values: Sequence[jax.Array]) -> Array:
    """Several vectors as a matrix; one value as it is."""
    if len(values) == 1:
        return values[0]
    return lax.concatenate([lax.expand_dims(x, (0,)) for x in values], 0)


def _unstack(x: Array, count: int) -> Sequence[Any]:
    return [lax.squeeze(row, (0,)) for row in lax.split(x, [1] * count)] if count > 1 else [x]
