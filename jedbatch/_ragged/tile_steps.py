"""The program of a node on ragged values as steps on tiles, of a fixed number of rows each.

A node that reads and gives arrays [n, ...] becomes nodes of fixed shapes, whatever n is: one for
each *tile* of `T` rows. Its program is cut into *steps*:

    x [n, 4], w [4]  ─tiles→  y = exp(x) [n, 4], its sums  ─combine→  s [4]  ─tiles→  y / s [n, 4]

A step over rows is row-wise (see `padding.axis_rules`) and runs once for each tile. It may end in
reductions over the rows of a tile: rows of the last tile beyond the n-th are left out there, and
nowhere else, since what they hold reaches nothing but such rows. Results of tiles are combined two
by two. A step without rows runs once. Operations across rows that are no such reductions, such as
a sort or a cumulative sum, have no steps (see `_ragged.joined_tiles`).
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jedbatch._jaxpr.interpret import reads, used_variables, work
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError, is_look_up, mixed_axes
from jedbatch._jaxpr.padding.flat_programs import flattened
from jedbatch._jaxpr.padding.row_rules import bind_rows, run_row
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes, symbols_in
from jedbatch._jaxpr.versions import ClosedProgram, Equation
from jedbatch._ragged.needed_rows import nonempty_extents
from jedbatch._ragged.phases import extents_of
from jedbatch._ragged.tile_reductions import REDUCED_IN_TILES, TileRows
from jedbatch._support.types import Array, AxisSize, Dtype

INLINED_WORK = 1 / 32  # of a tile, that is done again in each rather than once for all
FEW_OPERATIONS = 16  # that are done again wherever they are read

TypeOfValue = tuple[tuple[AxisSize, ...], Dtype, bool]  # (shape, dtype, weak), maybe ragged


@dataclass(frozen=True, eq=False)
class Work:
    """A part of a step.

    Attributes:
      reads: variables.
      writes: variables.
      run: maps the values read, and the rows of the tile, to those written.
      extent: of the rows it runs over; None if there are none.
      reads_rows: whether it asks which rows of the array those of the tile are.
      cost: operations, for tiles of one row.
    """

    reads: tuple[Hashable, ...]
    writes: tuple[Hashable, ...]
    run: Callable[[Sequence[Array], Any], Sequence[Array]]
    extent: AxisSize | None
    reads_rows: bool
    cost: int


@dataclass(frozen=True, eq=False)
class Combination:
    """How the results of tiles are combined two by two.

    Attributes:
      extent: of the rows that tiles are of.
      parts: variables of a tile.
      writes: variables of all tiles.
      combine: maps the parts of two neighbours, one after the other, to those of both.
      identity: the parts of no tile at all; None if there must be one.
    """

    extent: AxisSize
    parts: tuple[Hashable, ...]
    writes: tuple[Hashable, ...]
    combine: Callable[..., Sequence[Array]]
    identity: tuple[np.ndarray, ...] | None


@dataclass(frozen=True, eq=False)
class TileStep:
    """Work that one node does.

    Attributes:
      extent: of the rows, if it runs once for each tile; None if it runs once.
      work: in order.
      reads: variables of other steps, and operands.
      shared: variables that all instances share.
      writes: variables that are read elsewhere.
    """

    extent: AxisSize | None
    work: tuple[Work, ...]
    reads: tuple[Hashable, ...]
    shared: tuple[Hashable, ...]
    writes: tuple[Hashable, ...]

    @property
    def reads_rows(self) -> bool:
        """Returns whether it asks which rows of the array those of a tile are."""
        return any(w.reads_rows for w in self.work)


@dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of a node in steps.

    Attributes:
      invars: its variables: shared values, then operands.
      outvars: its results; variables, or numbers.
      steps: in order.
      types: of all variables.
      lengths: the extents that variables are the numbers of.
      constants: values of variables.
      nonempty: extents that must not be 0, each with the operation that says so.
    """

    invars: tuple[Hashable, ...]
    outvars: tuple[Hashable, ...]
    steps: tuple[TileStep | Combination, ...]
    types: dict[Hashable, TypeOfValue]
    lengths: dict[Hashable, AxisSize]
    constants: dict[Hashable, Any]
    nonempty: tuple[tuple[AxisSize, str], ...]

    def run(
        self,
        step: TileStep,
        shared: Sequence[Array],
        values: Sequence[Array],
        rows: TileRows | None,
    ) -> list[Array]:
        """Returns what a step writes."""
        env = {**self.constants, **dict(zip(step.shared, shared, strict=True))}
        env.update(zip(step.reads, values, strict=True))
        for part in step.work:
            results = part.run([env[v] for v in part.reads], rows)
            env.update(zip(part.writes, results, strict=True))
        return [env[v] for v in step.writes]


def find_steps(closed: ClosedProgram, num_shared: int, tile: int) -> StepProgram:
    """Cuts a program of symbolic shapes into steps; its first arguments are shared.

    Args:
      closed: the program.
      num_shared: how many of its arguments all instances share.
      tile: rows of a tile.

    Raises:
      CannotMergeError: an operation takes rows together in a way that tiles cannot.
    """
    closed = flattened(closed)
    finder = _StepFinder(closed, num_shared, tile)
    used = used_variables(closed.jaxpr)
    equations = [eqn for eqn in closed.jaxpr.eqns if used.intersection(eqn.outvars)]
    for eqn in equations:
        finder.place(eqn)
    return finder.program(tuple(nonempty_extents(equations)))


class _StepFinder:
    """Puts the equations of a program into steps, one after the other.

    Attributes:
      known: variables that all instances share.
      anywhere: work that is done again in every step that reads its results, by result.
      level: for each variable, how many reductions come before it.
      reduced: variables that reductions give.
      placed: work by (level, extent).
      combinations: by (level, extent) of the tiles.
    """

    def __init__(self, closed: ClosedProgram, num_shared: int, tile: int):
        jaxpr = closed.jaxpr
        self.jaxpr, self.tile = jaxpr, tile
        self.known: set[Hashable] = {*jaxpr.constvars, *jaxpr.invars[:num_shared]}
        self.shared: set[Hashable] = set(jaxpr.invars[:num_shared])
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.anywhere: dict[Hashable, Work] = {}
        self.level: dict[Hashable, int] = dict.fromkeys(jaxpr.invars[num_shared:], 0)
        self.placed: dict[tuple[int, AxisSize | None], list[Work]] = {}
        self.combinations: dict[tuple[int, AxisSize | None], list[Combination]] = {}
        self.types: dict[Hashable, TypeOfValue] = {}
        self.lengths: dict[Hashable, AxisSize] = {}
        self._stopped = _only_stopped(jaxpr.eqns)
        for v in (*jaxpr.constvars, *jaxpr.invars):
            self._note(v)

    def _note(self, v: Any) -> None:
        """Takes note of the type of a variable, or raises an error if it cannot be cut in tiles."""
        refuse_uncut(v)
        self.types[v] = v.aval.shape, v.aval.dtype, v.aval.weak_type

    def place(self, eqn: Equation) -> None:
        """Puts an equation into the first step it can be in."""
        for v in eqn.outvars:
            self._note(v)
        if eqn.primitive.name == "dim_as_value":
            self.lengths[eqn.outvars[0]] = eqn.params["dim"]
            self.level[eqn.outvars[0]] = 0
            return
        mixed = mixed_axes(eqn)  # complains of what is not known
        variables = [v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)]
        extents = list(dict.fromkeys(e for v in variables for e in extents_of(v)))
        if len(extents) > 1:
            raise CannotMergeError(f"`{eqn.primitive.name}` of arrays of different lengths")
        extent = extents[0] if extents else None
        if mixed:
            self._place_reduction(eqn, mixed)
            return
        position = bool(extents) and (eqn.primitive.name == "iota" or is_look_up(eqn))
        run = functools.partial(_run_by_row if position else _run, eqn)
        part = Work(tuple(reads(eqn)), tuple(eqn.outvars), run, extent, position, _cost(eqn))
        if all(v in self.known or v in self.anywhere for v in part.reads):
            self.anywhere.update(dict.fromkeys(part.writes, part))
            if extent is None:
                self.known.update(part.writes)
            return
        self._place(part)

    def _level_of(self, variables: Sequence[Hashable]) -> int:
        return max((self.level[v] for v in variables if v in self.level), default=0)

    def _place(self, part: Work) -> int:
        """Puts work into a step; returns its level."""
        level = self._level_of(part.reads)
        self.placed.setdefault((level, part.extent), []).append(part)
        self.level.update(dict.fromkeys(part.writes, level))
        return level

    def _place_reduction(self, eqn: Equation, mixed: Sequence[tuple[int, int]]) -> None:
        """Puts a reduction over rows into a step, and what combines its results behind it."""
        name, (out, *more) = eqn.primitive.name, eqn.outvars
        axes = {(i, a) for i, v in enumerate(eqn.invars) for a in ragged_axes(v.aval.shape)}
        make = REDUCED_IN_TILES.get(name)
        if make is None or set(mixed) != axes or is_ragged(out.aval.shape) or more:
            raise CannotMergeError(f"`{name}` across the rows of an array")
        extents = [eqn.invars[i].aval.shape[a] for i, a in mixed]
        shape, dtype = out.aval.shape, out.aval.dtype
        reduction = make(eqn, out in self._stopped)
        parts = tuple(_Name("part") for _ in reduction.dtypes)
        wholes = tuple(_Name("all") for _ in reduction.dtypes)
        for v, of_part in zip((*parts, *wholes), 2 * reduction.dtypes, strict=True):
            self.types[v] = shape, of_part or dtype, False
        variables = tuple(reads(eqn))

        def run(values: Sequence[Array], rows: TileRows) -> Sequence[Array]:
            return reduction.reduce(_atoms(eqn, variables, values), mixed, rows)

        cost = sum(
            int(np.prod([1 if is_ragged((d,)) else d for d in v.aval.shape])) for v in eqn.invars
        )
        part = Work(variables, parts, run, extents[0], True, cost)
        level = self._place(part)
        identity = reduction.identity and tuple(
            np.full(shape, x, d or dtype)
            for x, d in zip(reduction.identity, reduction.dtypes, strict=True)
        )
        combination = Combination(extents[0], parts, wholes, reduction.combine, identity)
        self.combinations.setdefault((level, extents[0]), []).append(combination)
        self.level.update(dict.fromkeys(wholes, level + 1))
        finish = Work(wholes, (out,), lambda values, _: [reduction.finish(*values)], None, False, 1)
        if reduction.finishes:
            self._place(finish)
        else:
            replaced = replace(combination, writes=(out,))
            self.combinations[level, extents[0]][-1] = replaced
            self.level[out] = level + 1

    def program(self, nonempty: tuple[tuple[AxisSize, str], ...]) -> StepProgram:
        """Returns the program in steps, each with the variables that it reads and writes."""
        outvars = self._results()
        places = sorted(self.placed, key=lambda place: (place[0], place[1] is not None))
        work = {place: self._complete(self.placed[place]) for place in places}
        inlined: set[Hashable] = set()  # computed where it is read, so no result
        for place in [p for p in places if p[1] is None]:
            readers = self._inlined(place, work, outvars)
            if readers is not None:
                inlined.update(v for part in work[place] for v in part.writes)
                for reader in readers:
                    work[reader] = tuple(dict.fromkeys((*work[place], *work[reader])))
                del work[place]
        read_later = set(outvars)
        for parts in work.values():
            read_later.update(_free_reads(parts))
        read_later.update(v for cs in self.combinations.values() for c in cs for v in c.parts)
        steps: list[TileStep | Combination] = []
        for place, parts in work.items():
            free = _free_reads(parts)
            written = list(dict.fromkeys(v for part in parts for v in part.writes))
            again = {*self.anywhere, *inlined}
            steps.append(
                TileStep(
                    place[1],
                    tuple(parts),
                    tuple(v for v in free if v not in self.known),
                    tuple(v for v in free if v in self.shared),
                    tuple(v for v in written if v in read_later and v not in again),
                )
            )
            steps += self.combinations.get(place, ())
        invars = tuple(self.jaxpr.invars)
        return StepProgram(
            invars, outvars, tuple(steps), self.types, self.lengths, self.constants, nonempty
        )

    def _results(self) -> tuple[Hashable, ...]:
        """Returns the results of the program, each a variable of a step or an operand."""
        outvars: list[Hashable] = []
        for v in self.jaxpr.outvars:
            if not isinstance(v, Literal) and v in self.level:
                outvars.append(v)
                continue
            # a number, or what is done anywhere: a step of its own gives it
            name = _Name("result")
            self.types[name] = v.aval.shape, v.aval.dtype, v.aval.weak_type
            literal = isinstance(v, Literal)
            extents = extents_of(v)
            run = (lambda _, __, x=v: [jnp.asarray(x.val, x.aval.dtype)]) if literal else _same
            read = () if literal else (v,)
            self._place(Work(read, (name,), run, extents[0] if extents else None, False, 0))
            outvars.append(name)
        return tuple(outvars)

    def _complete(self, parts: Sequence[Work]) -> tuple[Work, ...]:
        """Returns work with what is done again wherever it is read."""
        complete: dict[Work, None] = {}

        def visit(part: Work) -> None:
            for v in part.reads:
                if v in self.anywhere:
                    visit(self.anywhere[v])
            complete[part] = None

        for part in parts:
            visit(part)
        return tuple(complete)

    def _inlined(
        self,
        place: tuple[int, AxisSize | None],
        work: dict[tuple[int, AxisSize | None], tuple[Work, ...]],
        outvars: Sequence[Hashable],
    ) -> list[tuple[int, AxisSize | None]] | None:
        """Returns the steps over rows in which work without rows is done again, if it is little."""
        written = {v for part in work[place] for v in part.writes} - set(self.anywhere)
        if written.intersection(outvars):
            return None
        readers = [
            p for p, parts in work.items() if p != place and written & set(_free_reads(parts))
        ]
        cost = sum(part.cost for part in work[place])
        for reader in readers:
            of_tile = self.tile * sum(part.cost for part in work[reader] if part.extent is not None)
            if cost > max(INLINED_WORK * of_tile, FEW_OPERATIONS):
                return None
        return readers


def why_uncut(shape: Sequence[AxisSize], dtype: Dtype) -> str | None:
    """Returns why arrays cannot be cut into tiles; None if they can."""
    extents = [shape[a] for a in ragged_axes(shape)]
    if len(extents) > 1:
        return f"a value of shape [{', '.join(map(str, shape))}], with two ragged axes"
    if extents and symbols_in(extents[0]) != {str(extents[0])}:
        return f"an array of {extents[0]} rows, which is no length of an array"
    return "an array of random keys is ragged" if extents and is_key(dtype) else None


def refuse_uncut(v: Any) -> None:
    """Raises `CannotMergeError` if a variable is an array that cannot be cut into tiles."""
    reason = why_uncut(v.aval.shape, v.aval.dtype)
    if reason is not None:
        raise CannotMergeError(reason)


class _Name:
    """A variable that is no variable of the program."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _free_reads(parts: Sequence[Work]) -> dict[Hashable, None]:
    """Returns the variables that work reads and does not write."""
    written = {v for part in parts for v in part.writes}
    return dict.fromkeys(v for part in parts for v in part.reads if v not in written)


def _cost(eqn: Equation) -> int:
    """Returns roughly the operations of an equation on one row."""
    if any(is_ragged(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)):
        shapes = [[1 if is_ragged((d,)) else d for d in v.aval.shape] for v in eqn.invars]
        sizes = [int(np.prod(shape)) for shape in shapes]
        out = [[1 if is_ragged((d,)) else d for d in v.aval.shape] for v in eqn.outvars]
        return max([*sizes, *(int(np.prod(shape)) for shape in out)])
    return work(eqn)


def _only_stopped(equations: Sequence[Equation]) -> set[Hashable]:
    """Returns the variables through which no derivative is taken."""
    readers: dict[Hashable, list[str]] = {}
    for eqn in equations:
        for v in reads(eqn):
            readers.setdefault(v, []).append(eqn.primitive.name)
    return {v for v, names in readers.items() if set(names) == {"stop_gradient"}}


def _atoms(eqn: Equation, variables: Sequence[Any], values: Sequence[Array]) -> list[Array]:
    """Returns the operands of an equation."""
    env = dict(zip(variables, values, strict=True))
    return [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]


def _same(values: Sequence[Array], rows: Any) -> Sequence[Array]:
    return values


def _run(eqn: Equation, values: Sequence[Array], rows: TileRows | None) -> Sequence[Array]:
    """Returns the results of a row-wise equation for a tile, or of one without rows."""
    size = rows.size if rows else 0
    return bind_rows(eqn, _atoms(eqn, tuple(reads(eqn)), values), lambda _: size)


def _run_by_row(eqn: Equation, values: Sequence[Array], rows: TileRows) -> Sequence[Array]:
    """Returns the results of an equation that asks for the places of rows.

    Rows beyond the last one repeat it, so they have its place (see `_jaxpr.padding.singular`).
    """
    operands = _atoms(eqn, tuple(reads(eqn)), values)
    places = rows.start + jnp.minimum(jnp.arange(rows.size, dtype=jnp.int32), rows.count - 1)
    (axis,) = ragged_axes(eqn.outvars[0].aval.shape)
    (result,) = jax.vmap(lambda k: tuple(run_row(eqn, operands, k)), out_axes=axis)(places)
    return [result]
