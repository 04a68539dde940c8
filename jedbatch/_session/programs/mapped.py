"""Rows of arrays as instances: all have one structure, and run as `jax.vmap` would run them.

Where the instances are the rows of arrays, they differ in values alone. A function that does not
decide on values does the same for each of them: so one is recorded, and its graph, mapped over the
rows, is one XLA program. Neither are arrays cut into rows, nor is anything planned.

Long graphs are left to plans, which compile a cell once for all of its nodes. Loops that values
decide on run as in plans, without lock step (see `_jaxpr.divergent`); where lock step is asked for,
they are left to plans, and so are calls of Python.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.record import Record
from jedbatch._graph.straight import calls_of, inputs_of, straight
from jedbatch._graph.types import ValueType, operation_of
from jedbatch._jaxpr.divergent import BranchesName
from jedbatch._jaxpr.interpret import cares_for_padding
from jedbatch._jaxpr.storage import from_stored, is_key, stored
from jedbatch._jaxpr.transfers import fetched, handed_over
from jedbatch._program.returned import unstacked
from jedbatch._program.stopped import error_of
from jedbatch._session.plans.indices import table_rows
from jedbatch._session.plans.round import Round
from jedbatch._session.programs.program_cache import ProgramCache
from jedbatch._support.announce import announce, announced
from jedbatch._support.types import Array, Leaf

MIN_ROWS = 8  # for fewer, plans are as fast
MAX_EQUATIONS = 256  # of the graph of one instance


class MappedProgram:
    """The graph of one instance as a program for rows of arrays.

    Attributes:
      record: of the instance.
      places: for each array of the instance, which of the arrays that are given it is a row of.
    """

    def __init__(self, record: Record, programs: ProgramCache, places: Sequence[int]):
        self.record = record
        self.places = places
        self._graph = Graph.select([(record.whole, record.index)])
        self._programs = programs
        self._types = self._graph.present_types
        shared = [programs.kernel(t).node_type.shared for t in self._types]
        self._compute, self._closed_over = programs.registry.prologue(shared)
        self._jitted = announced(jax.jit(functools.partial(self._run, branches="forward")))
        self._differentiable = announced(jax.jit(functools.partial(self._run, branches="both")))

    def takes(self, arrays: Sequence[Array]) -> bool:
        """Returns whether rows of arrays are to be mapped; those with numbers at fault are not."""
        if not self._is_short or not all(map(_is_in_range, arrays)):
            return False
        looked_up = [(arrays[place], n) for place, n in self._looked_up]
        return not any(_has_others(x, n) for x, n in looked_up if not isinstance(x, Tracer))

    @functools.cached_property
    def _is_short(self) -> bool:
        programs = {t: operation_of(self._graph.types[t]).jaxpr.jaxpr for t in self._types}
        size = sum(len(programs[t].eqns) for t in self._graph.node_type.tolist())
        in_lock_step = self._programs.options.control_flow == "lockstep"
        if size > MAX_EQUATIONS or not in_lock_step:
            return size <= MAX_EQUATIONS
        equations = (eqn for program in programs.values() for eqn in program.eqns)
        return not any(map(cares_for_padding, equations))

    @functools.cached_property
    def _looked_up(self) -> set[tuple[int, int]]:
        """(place, rows) of arrays whose numbers only name rows of tables (see `plans.indices`)."""
        graph = self._graph
        leaves = [chunk.leaf for chunk in graph.inputs for _ in range(len(chunk))]
        found = set()
        for t in self._types:
            nodes = np.flatnonzero(graph.node_type == t)
            for k, rows in table_rows(graph.types[t]).items():
                read = graph.operand[graph.operand_ptr[nodes] + k]
                of_leaves = [leaves[-1 - r] for r in read[read < 0].tolist()]
                found |= {(self.places[leaf], rows) for leaf in of_leaves if leaf is not None}
        return found

    def __call__(self, leaves: list[Leaf], arrays: Sequence[Array], *, stack: bool) -> Any:
        """Returns the results of all rows, along a new first axis or as a list.

        Args:
          leaves: of the shared arguments.
          arrays: whose rows the instances are.
          stack: whether along a new first axis.
        """
        shared = self._programs.outside.read(self._closed_over, leaves, ())
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((shared, arrays)))
        run = self._differentiable if traced else self._jitted
        results, stopped = run(shared, *handed_over(list(arrays)))
        if stopped and not traced:
            self._check_stopped(stopped)
        if stack:
            return jax.tree.unflatten(self.record.structure, results)
        columns = list(map(unstacked, results))
        rows = [[column[i] for column in columns] for i in range(len(arrays[0]))]
        return [jax.tree.unflatten(self.record.structure, row) for row in rows]

    def _check_stopped(self, stopped: Sequence[Array]) -> None:
        """Raises `UnfinishedLoopError` if a loop was stopped in some row."""
        kernels = [self._programs.kernel(t) for t in self._graph.node_type.tolist()]
        of_nodes = zip([kernel for kernel in kernels if kernel.is_bounded], stopped, strict=True)
        for kernel, flags in of_nodes:
            rows = np.flatnonzero(fetched(flags))
            if len(rows):
                raise error_of(kernel.max_steps, kernel.node_type, rows)

    def round(self, rows: int, seconds: float) -> Round:
        """Returns what ran, each node as a batch of all rows; it took so long to begin."""
        counts = self._graph.nodes_per_type
        ran = tuple(
            (self._graph.types[t], int(counts[t]), int(counts[t]) * rows) for t in self._types
        )
        batches = len(self._graph.node_type)
        return Round(0, batches * rows, batches, batches * rows, ran, seconds)

    def _run(
        self, shared: Sequence[Array], *arrays: Array, branches: BranchesName
    ) -> tuple[list[Array], list[Array]]:
        """Returns (the results of all rows, for each node with bounds where a loop was stopped)."""
        self._programs.count("mapped")
        announce(f"compiling a program for {len(arrays[0])} rows of arrays")
        kernels = [self._programs.kernel(t).plain for t in self._types]
        pairs = zip(kernels, self._compute(shared), strict=True)
        consts = [kernel.prologue(values) for kernel, values in pairs]
        by_type = dict(zip(self._types, zip(kernels, consts, strict=True), strict=True))
        over_rows: Any = jax.vmap(lambda *rows: self._one(by_type, rows, branches))
        found: tuple[list[Array], list[Array]] = over_rows(*arrays)
        return found

    def _one(
        self, by_type: dict[int, tuple[Any, Any]], rows: Sequence[Array], branches: BranchesName
    ) -> tuple[list[Array], list[Array]]:
        """Returns what `_run` does, of one instance; `by_type` has kernels and their consts."""
        graph = self._graph
        mine = [rows[place] for place in self.places]
        inputs = inputs_of(x for chunk in graph.inputs for x in _inputs(chunk, mine))
        stopped: list[Array] = []

        def run(t: int, operands: list[Array]) -> list[Array]:
            kernel, consts = by_type[t]
            found, flags = kernel.forward_bounded(consts, kernel.arguments(operands), branches)
            stopped.extend(flags)
            results: list[Array] = found
            return results

        values = straight(calls_of(graph), inputs, run)
        outputs = [values[r] for r in graph.outputs.tolist()]
        kinds = [ValueType(*kind[:2]) for kind in self.record.types]
        return list(map(from_stored, outputs, kinds)), stopped


def _inputs(chunk: InputRows, arrays: Sequence[Array]) -> list[Array]:
    """Returns the values of some inputs, as they are kept."""
    dtype = stored(chunk.type)[1]
    if chunk.leaf is None:
        assert chunk.rows is not None
        return [jnp.asarray(x, dtype) for x in chunk.rows]
    array = arrays[chunk.leaf]
    if is_key(chunk.type.dtype):
        array = jax.random.key_data(array)
    if chunk.rows is not None:
        return [array[i].astype(dtype) for i in chunk.rows.tolist()]
    return [functools.reduce(lambda part, index: part[index], chunk.path, array).astype(dtype)]


def _is_in_range(array: Array) -> bool:
    """Returns whether JAX computes with the very numbers of an array.

    Without 64 bits, large whole numbers of NumPy would become others.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or not array.size:
        return True
    info = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    return info.min <= int(array.min()) and int(array.max()) <= info.max


def _has_others(array: Array, rows: int) -> bool:
    """Returns whether some number names no row of a table."""
    numbers = fetched(array)
    return bool(((numbers < -rows) | (numbers >= rows)).any())


def places_of(arrays: Sequence[Array], rows: Sequence[Array]) -> tuple[int, ...] | None:
    """Returns which of the stacked arrays each array of the first instance is a row of.

    None if one of them is of none; `rows` are the first ones of the stacked arrays.
    """
    place = {id(row): k for k, row in enumerate(rows)}
    if not all(id(x) in place for x in arrays):
        return None
    return tuple(place[id(x)] for x in arrays)
