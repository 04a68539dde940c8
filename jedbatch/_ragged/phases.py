"""A program over ragged arrays as a sequence of phases, none of which pads.

What an instance does to its arrays [n, ...] alternates between kinds of work. Most of the
arithmetic is *row-wise* (see `_jaxpr.padding.axis_rules`): embeddings, products with weights,
normalisation, feed-forward layers. Rows of all instances run through that side by side, as one
array of as many rows as there are. The rest takes the rows of *one instance* together: sums,
attention, sorting.

    x [n, d]  ─rows→  q, k, v  ─instances→  softmax(q kᵀ) v [n, d]  ─rows→  …  ─instances→ [d]

A third kind takes rows from one place to another, by indices: the rows of all instances at once
too (see `_jaxpr.padding.indexing`).

    x [n, d]  ─index→  x[source] [e, d]  ─rows→  messages [e, d]  ─index→  their sums [n, d]

A phase is a longest run of one kind of work. Between phases values have at most one ragged axis,
and are kept as rows of all instances one after the other. Values with two, such as the scores q kᵀ
of one instance, exist inside of a phase only, for a few instances at a time; a phase that needs
them again computes them again. A loop that fills a table of them is not run again: whatever reads
the table is computed in the phase of the loop (see `padding.padded_loops`). What depends on extents
alone (positions, causal masks, divisors) is computed wherever it is read, and so are values that
are others in another shape.

Source: InsNet (padding-free batching of operators); the phases are ours.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from jedbatch._jaxpr.interpret import (
    has_gradient,
    inner_programs,
    reads,
    used_variables,
)
from jedbatch._jaxpr.padding.axis_rules import (
    SCATTERS,
    VIEWS,
    CannotMergeError,
    mixed_axes,
)
from jedbatch._jaxpr.padding.flat_programs import INSIDE, flattened
from jedbatch._jaxpr.padding.indexing import find_indexing
from jedbatch._jaxpr.storage import is_key
from jedbatch._jaxpr.symbolic_dims import (
    is_ragged,
    ragged_axes,
    shape_at,
    symbols_in,
)
from jedbatch._jaxpr.versions import (
    Atom,
    ClosedProgram,
    Equation,
    OpenProgram,
)
from jedbatch._ragged.needed_rows import NeededRows, extents_of, refuse_shrinking, variables_of
from jedbatch._support.types import AxisSize

BY_INDEX = "by index"  # a kind of phase
IN_PLACE = {"dynamic_update_slice", *SCATTERS, *INSIDE}  # what else they return was there before


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a program.

    Attributes:
      extent: that of the rows it runs over; None if it runs over instances, or by index.
      equations: that it computes, in order.
      reads: variables of instances that it reads: operands, or results of earlier phases.
      shared: variables that it reads and that all instances share.
      writes: its variables that are read later, or returned.
      indexed: its equations that read or write rows by index; nothing if it is of another kind.
    """

    extent: AxisSize
    equations: tuple[Any, ...]
    reads: tuple[Any, ...]
    shared: tuple[Any, ...]
    writes: tuple[Any, ...]
    indexed: tuple[Any, ...] = ()

    def __str__(self) -> str:
        subject = "over instances" if self.extent is None else f"over rows of {self.extent}"
        if self.indexed:
            subject = "by index"
        names: dict[str, int] = {}
        for eqn in self.equations:
            names[eqn.primitive.name] = names.get(eqn.primitive.name, 0) + 1
        counted = ", ".join(k if n == 1 else f"{n} {k}" for k, n in names.items())
        return f"{subject}: {counted}"


@dataclass(frozen=True, eq=False)
class PhasedProgram:
    """A program in phases.

    Attributes:
      jaxpr: the whole program: shared values first, then operands of the instance.
      consts: of the program.
      num_shared: how many of its arguments all instances share.
      before: equations on shared values alone, done once.
      phases: the rest.
      symbols: whose values differ from instance to instance.
      needed: the rows that instances must have.
    """

    jaxpr: OpenProgram
    consts: tuple[Any, ...]
    num_shared: int
    before: tuple[Any, ...]
    phases: tuple[Phase, ...]
    symbols: tuple[str, ...]
    needed: NeededRows

    @property
    def operands(self) -> list[Any]:
        """Variables of what each instance brings."""
        return self.jaxpr.invars[self.num_shared :]

    @property
    def shared_numbers(self) -> int:
        """How many numbers that all instances share have a gradient."""
        shared = self.jaxpr.invars[: self.num_shared]
        return sum(v.aval.size for v in shared if has_gradient(v.aval.dtype))

    def program_of(self, phase: Phase) -> OpenProgram:
        """Returns a phase as a program: of the values that are shared, and of what it reads."""
        program: OpenProgram = self.jaxpr.replace(
            constvars=[],
            invars=[*phase.shared, *phase.reads],
            outvars=list(phase.writes),
            eqns=list(phase.equations),
        )
        return program

    @functools.cached_property
    def extents(self) -> list[AxisSize]:
        """The extents of rows that are kept, each once."""
        variables = [v for p in self.phases for v in (*p.reads, *p.writes)]
        by_index = [eqn for p in self.phases if p.indexed for eqn in p.equations]
        variables += [v for eqn in by_index for v in (*reads(eqn), *eqn.outvars)]
        return list(dict.fromkeys(e for v in (*self.operands, *variables) for e in extents_of(v)))

    @functools.cached_property
    def padded(self) -> frozenset[str]:
        """The symbols that phases over instances know: by those, instances are grouped."""
        equations = [
            eqn for p in self.phases if p.extent is None and not p.indexed for eqn in p.equations
        ]
        variables = [v for eqn in equations for v in (*reads(eqn), *eqn.outvars)]
        extents = [e for v in variables for e in extents_of(v)]
        return symbols_in((*extents, *(eqn.params for eqn in equations)))

    @functools.cached_property
    def has_table_loops(self) -> bool:
        """Whether it has loops whose steps work on ragged arrays, as those over tables do."""
        return any(
            eqn.primitive.name in INSIDE and any(map(symbols_in, inner_programs(eqn)))
            for phase in self.phases
            for eqn in phase.equations
        )

    def table_size(self, length: int) -> int:
        """Returns the numbers in the largest value that steps of loops compute, 1 at least.

        Tables into which they only write some are not computed.

        Args:
          length: of all ragged arrays.
        """
        symbols = dict.fromkeys(self.symbols, length)
        equations = [eqn for phase in self.phases for eqn in phase.equations]
        inside = _computed_inside(eqn for eqn in equations if eqn.primitive.name in INSIDE)
        return max([1, *(math.prod(shape_at(v.aval.shape, symbols)) for v in inside)])

    def __str__(self) -> str:
        return "\n".join(map(str, self.phases))


def find_phases(closed: ClosedProgram, num_shared: int) -> PhasedProgram:
    """Cuts a program of symbolic shapes into phases; its first arguments are shared.

    Raises `CannotMergeError` if instances of different lengths cannot run it together.
    """
    closed = flattened(closed)
    jaxpr = closed.jaxpr
    for v in (*jaxpr.invars, *jaxpr.outvars):
        if _relates(v):
            raise CannotMergeError(f"a value of shape {_shown(v)}, with two ragged axes, is kept")
    for v in variables_of(jaxpr):
        enters = is_ragged(v.aval.shape) and v in jaxpr.invars
        if is_key(v.aval.dtype) and (enters or v in jaxpr.outvars):
            raise CannotMergeError("an array of random keys is part of an instance, or kept")
    used = used_variables(jaxpr)
    equations = [eqn for eqn in jaxpr.eqns if used.intersection(eqn.outvars)]
    finder = _PhaseFinder(jaxpr, num_shared)
    for eqn in equations:
        finder.place(eqn)
    if finder.keeps_tables():
        finder = _PhaseFinder(jaxpr, num_shared, joined=True)
        for eqn in equations:
            finder.place(eqn)
    needed = NeededRows.of(jaxpr, equations)
    symbols = symbols_in((*needed.extents, *(eqn.params for eqn in equations)))
    refuse_shrinking(needed.extents)
    return PhasedProgram(
        jaxpr,
        tuple(closed.consts),
        num_shared,
        tuple(finder.before),
        tuple(finder.phases()),
        tuple(sorted(symbols)),
        needed,
    )


def _computed_inside(equations: Iterable[Equation]) -> Iterator[Any]:
    """Yields the variables that programs inside of equations compute, however deep."""
    for eqn in equations:
        for program in inner_programs(eqn):
            for inner in program.eqns:
                if inner.primitive.name not in IN_PLACE:
                    yield from inner.outvars
            yield from _computed_inside(program.eqns)


def _relates(variable: Atom) -> bool:
    """Returns whether a value has a number for every pair of rows."""
    return len(ragged_axes(variable.aval.shape)) > 1


def _shown(variable: Atom) -> str:
    return f"[{', '.join(map(str, variable.aval.shape))}]"


class _PhaseFinder:
    """Puts equations into phases, one after the other.

    Attributes:
      before: equations on shared values alone.
      known: variables that all instances share.
      kinds: of every phase so far: the extent of its rows, None, or `BY_INDEX`.
      equations: of every phase.
      where: for each variable, the phase that computes it; -1 for operands.
      rematerialized: equations that are computed again wherever they are read, by result.

    Args:
      jaxpr: the program.
      num_shared: how many of its arguments are shared.
      joined: whether what comes after a loop that gives a table is all in the phase of that loop,
        which reads the table, for it cannot be kept, and takes long to compute.
    """

    def __init__(self, jaxpr: OpenProgram, num_shared: int, joined: bool = False):
        self.jaxpr = jaxpr
        self.joined = joined
        self.table_phase: int | None = None  # the first in which a loop gives a table
        self.before: list[Any] = []
        self.known = {*jaxpr.constvars, *jaxpr.invars[:num_shared]}
        self.kinds: list[Any] = []
        self.equations: list[list[Any]] = []
        self.where: dict[Var, int] = dict.fromkeys(jaxpr.invars[num_shared:], -1)
        self.rematerialized: dict[Var, Any] = {}
        self._order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        self._free: set[Var] = set()  # depend on extents alone
        self._relating: set[int] = set()  # phases with values that have two ragged axes
        self._returned = {v for v in jaxpr.outvars if isinstance(v, Var)}

    def place(self, eqn: Equation) -> None:
        """Puts an equation into the first phase it can be in."""
        new_reads = [v for v in reads(eqn) if v not in self.known]
        ragged = any(is_ragged(v.aval.shape) for v in eqn.outvars)
        shares = len(new_reads) < len(reads(eqn))
        if not new_reads and not ragged and not symbols_in(eqn.params):
            self.before.append(eqn)
            self.known.update(eqn.outvars)
            return
        free = not shares and self._free.issuperset(new_reads)
        if free:
            self._free.update(eqn.outvars)
        pairs = any(map(_relates, eqn.outvars))
        keys = any(is_key(v.aval.dtype) for v in eqn.outvars)  # have no rows to be kept in
        cheap = free or keys or (eqn.primitive.name in VIEWS and not shares)
        mixed = mixed_axes(eqn)  # complains of what is not known
        table = pairs and eqn.primitive.name in INSIDE  # of a loop
        cheap = cheap and not mixed and not self._returned.intersection(eqn.outvars)
        if (pairs and not table) or cheap or all(is_key(v.aval.dtype) for v in eqn.outvars):
            self.rematerialized.update((v, eqn) for v in eqn.outvars)
            return
        computed = [self.rematerialized[v] for v in new_reads if v in self.rematerialized]
        beside = any(_relates(v) for eqn in computed for v in eqn.outvars)  # as eigenvectors are
        relates = beside or any(map(_relates, new_reads))
        kinds: list[Any]
        if self._is_by_index(eqn, bool(mixed)) and not relates:
            kinds = [BY_INDEX]
        else:
            together = mixed or beside or any(is_key(v.aval.dtype) for v in new_reads)
            kinds = [None] if together else self._kinds_for(eqn, shares)
        after = max((self.where[v] for v in self._stored(new_reads)), default=-1)
        if table and self.table_phase is None:
            if self.joined:
                after, kinds = len(self.kinds) - 1, [None]
            self.table_phase = self._first(after, kinds)
        if mixed and not relates and after in self._relating:
            after += 1  # so that rows of what relates rows can be computed a few at a time
        phase = self._place_for(after, kinds)
        if relates or table:
            self._relating.add(phase)
        self.equations[phase].append(eqn)
        self.where.update((v, phase) for v in eqn.outvars)

    def _is_by_index(self, eqn: Equation, mixed: bool) -> bool:
        """Returns whether an equation reads or writes rows of an instance by index.

        Rows of what all instances share are read one by one, as those of an embedding are.
        """
        table = eqn.invars[0] if eqn.invars else None
        own = isinstance(table, Var) and table not in self.known
        return (mixed or own) and find_indexing(eqn) is not None

    def _kinds_for(self, eqn: Equation, shares: bool) -> list[Any]:
        """Returns the kinds of phases that an equation on single rows can be in, the best first."""
        variables = (*eqn.invars, *eqn.outvars)
        extents = list(dict.fromkeys(e for v in variables for e in extents_of(v)))
        if len(extents) != 1 or any(map(_relates, variables)):
            return [None]
        return [extents[0]] if shares else [extents[0], None]

    def _place_for(self, after: int, kinds: Sequence[object]) -> int:
        """Returns the phase for an equation that can be in phases of these kinds."""
        if not self.joined or self.table_phase is None:
            return self._first(after, kinds)
        for phase in range(max(after, 0), self.table_phase):
            if self.kinds[phase] in kinds:
                return phase
        return self.table_phase

    def keeps_tables(self) -> bool:
        """Returns whether a value with two ragged axes is read in a later phase than its own."""
        return any(_relates(v) for phase in self.phases() for v in phase.writes)

    def _first(self, after: int, kinds: Sequence[object]) -> int:
        """Returns the phase `after` or the first behind it of these kinds, which may be new."""
        for phase in range(max(after, 0), len(self.kinds)):
            if self.kinds[phase] in kinds:
                return phase
        self.kinds.append(kinds[0])
        self.equations.append([])
        return len(self.kinds) - 1

    def _stored(self, variables: Sequence[Any]) -> list[Var]:
        """Returns the variables, or those they depend on, that are kept between phases."""
        stored: dict[Var, None] = {}
        stack = list(variables)
        seen = set()
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self.rematerialized:
                stack += [u for u in reads(self.rematerialized[v]) if u not in self.known]
            else:
                stored[v] = None
        return list(stored)

    def phases(self) -> list[Phase]:
        """Returns the phases, each with the variables that it reads and writes."""
        complete = [self._with_rematerialized(equations) for equations in self.equations]
        phases = []
        for i, (kind, equations) in enumerate(zip(self.kinds, complete, strict=True)):
            defined = {v for eqn in equations for v in eqn.outvars}
            read = list(
                dict.fromkeys(v for eqn in equations for v in reads(eqn) if v not in defined)
            )
            later = {
                v for later_phase in complete[i + 1 :] for eqn in later_phase for v in reads(eqn)
            }
            outputs = [v for eqn in self.equations[i] for v in eqn.outvars]
            phases.append(
                Phase(
                    None if kind is BY_INDEX else kind,
                    tuple(equations),
                    tuple(v for v in read if v not in self.known),
                    tuple(v for v in read if v in self.known),
                    tuple(v for v in outputs if v in later or v in self._returned),
                    tuple(self.equations[i]) if kind is BY_INDEX else (),
                )
            )
        return phases

    def _with_rematerialized(self, equations: Sequence[Equation]) -> list[Equation]:
        """Returns the equations of a phase with those that it rematerializes."""
        by_id = {id(eqn): eqn for eqn in equations}
        stack = list(equations)
        while stack:
            for v in reads(stack.pop()):
                eqn = self.rematerialized.get(v)
                if eqn is not None and id(eqn) not in by_id:
                    by_id[id(eqn)] = eqn
                    stack.append(eqn)
        return sorted(by_id.values(), key=lambda eqn: self._order[id(eqn)])
