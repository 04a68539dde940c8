"""The rows that operations need, which instances of any length may not have.

A maximum or a row by index is of one row at least, the largest five of five. With a symbol for the
length JAX supposes that there are enough, so what operations need is noted here, and compared with
the lengths of every instance before anything runs.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Var

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.interpret import inner_programs, reads
from jedbatch._jaxpr.padding.axis_rules import SCATTERS, CannotMergeError, mixed_axes
from jedbatch._jaxpr.padding.indexing import find_indexing
from jedbatch._jaxpr.symbolic_dims import (
    extent_at,
    grows,
    is_ragged,
    ragged_axes,
    symbols_in,
)
from jedbatch._jaxpr.versions import Atom, Equation, OpenProgram
from jedbatch._record.instances.arrays import array_type
from jedbatch._support.types import Array, AxisSize

EXTREMES = {
    "reduce_max": "a maximum",
    "reduce_min": "a minimum",
    "argmax": "the place of a maximum",
    "argmin": "the place of a minimum",
}


@dataclass(frozen=True, eq=False)
class NeededRows:
    """The rows that a program needs.

    Attributes:
      extents: of its values, each once.
      nonempty: extents that must not be 0, each with the operation that says so.
      looked_up: (extent, how many rows are looked up by index) of arrays that must have a row then.
      taken: (extent, k) of arrays of which the k largest are taken.
      windows: (extent, how many rows) of arrays of which a part of so many rows is read, or
        written. In loops and branches also those that `nonempty` and `looked_up` tell elsewhere. A
        divisor is 0 at least.
    """

    extents: tuple[AxisSize, ...]
    nonempty: tuple[tuple[AxisSize, str], ...]
    looked_up: tuple[tuple[Any, Any], ...]
    taken: tuple[tuple[Any, Any], ...]
    windows: tuple[tuple[AxisSize, int], ...]

    @staticmethod
    def of(jaxpr: OpenProgram, equations: Sequence[Equation]) -> "NeededRows":
        """Returns the rows that a program needs, given those of its equations that are used."""
        divided_by = [(extent, 0) for extent in divisors(jaxpr.eqns)]
        return NeededRows(
            tuple(all_extents(jaxpr)),
            tuple(nonempty_extents(equations)),
            tuple(looked_up(equations)),
            tuple(dict.fromkeys(taken(equations))),
            tuple(dict.fromkeys((*windows(jaxpr.eqns), *divided_by))),
        )

    @functools.cached_property
    def lacks_nothing(self) -> bool:
        """Whether instances have all rows they need as long as none of their lengths is 0."""
        needed = (*self.extents, *(e for e, _ in self.nonempty))
        extents_are_lengths = all(symbols_in(e) == {str(e)} for e in needed)
        return extents_are_lengths and not (self.looked_up or self.taken)

    def lacking(self, lengths: Mapping[str, int]) -> bool:
        """Returns whether an instance has fewer rows than some part of them has less, as `x[1:]`.

        Or than a part of a known size takes, as `x[-1:]`; or none where an extent is a number
        modulo that of rows, as of `jnp.roll`.
        """
        if self.lacks_nothing and not self.windows:
            return False
        try:
            if any(extent_at(e, lengths) < 0 for e in self.extents):
                return True
            return any(extent_at(e, lengths) < rows for e, rows in self.windows)
        except ZeroDivisionError:
            return True

    def refuse_lacking(
        self,
        lengths: Mapping[str, np.ndarray],
        instances: Sequence[int],
        arrays: Sequence[Sequence[Array]],
    ) -> None:
        """Raises `ValueError` if something is taken of rows of which an instance has too few.

        Args:
          lengths: of all calls of the program, by symbol.
          instances: that they are of.
          arrays: of each instance.
        """
        if self.lacks_nothing and all(x.all() for x in lengths.values()):
            return
        none = np.zeros(len(instances), bool)
        for x in lengths.values():
            none |= x == 0
        conditions = [(e, operation, extent_at(e, lengths) == 0) for e, operation in self.nonempty]
        for table, rows in self.looked_up:
            fails = (extent_at(table, lengths) <= 0) & (extent_at(rows, lengths) > 0)
            none |= fails
            conditions.append((table, "rows by index", fails))
        for extent, k in self.taken:
            fewer = np.flatnonzero(extent_at(extent, lengths) < extent_at(k, lengths))
            if len(fewer):
                n = int(np.broadcast_to(extent_at(extent, lengths), none.shape)[fewer[0]])
                raise ValueError(
                    f"`top_k` takes the largest {k} of {n} rows in instance "
                    f"{instances[fewer[0]]}; expected {extent} to be {k} at least. Leave such "
                    "instances out, or write `jnp.sort(x)[..., ::-1][..., :k]`, which gives as "
                    "many as there are."
                )
        conditions += [(e, "a part", extent_at(e, lengths) < 0) for e in self.extents]
        for extent, operation, fails in conditions:
            empty = np.flatnonzero(none & fails)
            if len(empty):
                instance = instances[empty[0]]
                raise nothing_error(instance, arrays[instance], operation, extent)


def variables_of(jaxpr: OpenProgram) -> list[Any]:
    """Returns the variables of a program."""
    return [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def extents_of(variable: Atom) -> list[AxisSize]:
    """Returns the ragged extents of a variable."""
    shape = variable.aval.shape
    return [shape[a] for a in ragged_axes(shape)]


def all_extents(jaxpr: OpenProgram) -> list[AxisSize]:
    """Returns the ragged extents of values, each once."""
    return list(dict.fromkeys(e for v in variables_of(jaxpr) for e in extents_of(v)))


def refuse_shrinking(extents: Sequence[AxisSize]) -> None:
    """Raises `CannotMergeError` if an extent may be more than it is of lengths that are more."""
    for extent in extents:
        if not grows(extent):
            raise CannotMergeError(f"{extent} rows are not the more, the longer the arrays are")


def nonempty_extents(equations: Sequence[Equation]) -> list[tuple[Any, str]]:
    """Returns extents that must not be 0, each with what is taken of so many rows.

    Maxima that do not start from a number, as that of a softmax does. A mean is NaN, as in JAX.
    """
    readers: dict[Var, list[Any]] = {}
    for eqn in equations:
        for v in reads(eqn):
            readers.setdefault(v, []).append(eqn)
    extents = []
    for eqn in equations:
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        if name in EXTREMES and not _starts(readers.get(out, ())):
            extents += [(eqn.invars[i].aval.shape[a], EXTREMES[name]) for i, a in mixed_axes(eqn)]
        elif name == "conv_general_dilated":
            extents += [(d, "a transposed convolution") for d in _dilated(eqn)]
    return extents


def _dilated(eqn: Equation) -> list[AxisSize]:
    """Returns the ragged extents of axes whose rows a convolution moves apart."""
    shape, params = eqn.invars[0].aval.shape, eqn.params
    pairs = zip(params["dimension_numbers"].lhs_spec[2:], params["lhs_dilation"], strict=True)
    return [shape[a] for a, dilation in pairs if dilation != 1 and is_ragged((shape[a],))]


def nothing_error(
    instance: int, arrays: Sequence[Array], operation: str, extent: AxisSize
) -> ValueError:
    """Returns the error of an instance without the rows of which an operation needs some."""
    empty = [f", {ValueType(*array_type(x))}" for x in arrays if x.ndim and not len(x)]
    return ValueError(
        f"instance {instance} has an array of length 0{''.join(empty[:1])}, and the function takes "
        f"{operation} of {extent} rows; expected at least one. Leave such instances out, "
        "or write what there is instead, such as `x.max(0, initial=0.0)`."
    )


def looked_up(equations: Sequence[Equation]) -> list[tuple[Any, Any]]:
    """Returns (extent, that of the indices) of the arrays whose rows are looked up by index."""
    found = []
    for eqn in equations:
        indexing = find_indexing(eqn) if eqn.primitive.name == "gather" else None
        if indexing is not None:
            table, indices = (v.aval.shape for v in eqn.invars)
            found.append((table[indexing.axis], indices[indexing.batch]))
    return list(dict.fromkeys(found))


def taken(equations: Sequence[Equation]) -> Iterator[tuple[Any, Any]]:
    """Yields (extent, k) of the arrays of which the k largest are taken, also in loops."""
    for eqn in equations:
        for program in inner_programs(eqn):
            yield from taken(program.eqns)
        if eqn.primitive.name == "top_k":
            yield from ((eqn.invars[i].aval.shape[a], eqn.params["k"]) for i, a in mixed_axes(eqn))


def divisors(equations: Sequence[Equation]) -> Iterator[AxisSize]:
    """Yields extents that are divided by: of `n - 1` less than no rows, `jnp.cov` has no value."""
    extent: dict[Any, Any] = {}
    for eqn in equations:
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        if name == "dim_as_value":
            extent[out] = eqn.params["dim"]
        elif name in ("convert_element_type", "copy", "broadcast_in_dim", "reshape"):
            extent.update((out, extent[v]) for v in reads(eqn) if v in extent)
        elif name == "div" and isinstance(eqn.invars[1], Var) and eqn.invars[1] in extent:
            yield extent[eqn.invars[1]]


def windows(equations: Sequence[Equation], inside: bool = False) -> Iterator[tuple[AxisSize, int]]:
    """Yields (extent, how many rows) of parts of known sizes; `inside` of loops and branches."""
    for eqn in equations:
        for program in inner_programs(eqn):
            yield from windows(program.eqns, inside=True)
        name, params = eqn.primitive.name, eqn.params
        sizes: Sequence[AxisSize] = ()
        single: Sequence[int] = ()
        if name == "gather":
            sizes = params["slice_sizes"]
            if not inside and find_indexing(eqn) is not None:  # see `looked_up`
                single = params["dimension_numbers"].collapsed_slice_dims
        elif name in SCATTERS and eqn.invars[1].aval.ndim == 1:
            named = params["dimension_numbers"].scatter_dims_to_operand_dims
            sizes = [int(a in named) for a in range(eqn.invars[0].aval.ndim)]
        elif name == "dynamic_slice":
            sizes = params["slice_sizes"]
        elif name == "slice":
            sizes = params["limit_indices"]
        elif inside and name in EXTREMES:
            sizes = [1] * eqn.invars[0].aval.ndim
        shape = eqn.invars[0].aval.shape if sizes else ()
        axes = [a for a in ragged_axes(shape) if a not in single]
        yield from ((shape[a], size) for a in axes if type(size := sizes[a]) is int and size)


def _starts(equations: Sequence[Equation]) -> bool:
    """Returns whether an extreme is read only together with a number that it starts from."""
    return bool(equations) and all(
        eqn.primitive.name in ("max", "min") and any(not v.aval.shape for v in eqn.invars)
        for eqn in equations
    )
