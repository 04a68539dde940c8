"""The rules of operations along an axis: each row by itself, or rows together.

Whether instances of different lengths can share an operation is decided here. Along an axis an
operation is *row-wise* if row i of its result depends on row i of its operands and on nothing else
of that axis; then it makes no difference which instance a row belongs to. A matrix product with
weights is row-wise along the rows, a softmax over features is, a sum over rows is not.
"""

import jax
from jax.extend.core import Var

from jedbatch._jaxpr import monoids
from jedbatch._jaxpr.interpret import ELEMENTWISE_OPERATIONS, inner_programs, names_in
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes, symbols_in
from jedbatch._jaxpr.versions import Equation, without_consts

REDUCTIONS = frozenset({*monoids.REDUCTIONS, *monoids.PLACES})
CUMULATIVE_OPERATIONS = frozenset({*monoids.CUMULATIVE, "cumlogsumexp"})
WINDOWS = frozenset(monoids.WINDOWS)
# The same elements in another shape or precision.
VIEWS = names_in("broadcast_in_dim convert_element_type copy expand_dims reshape squeeze transpose")
LOOK_UPS = names_in("slice dynamic_slice gather")
SCATTERS = names_in("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
DRAWS = names_in("random_bits random_split")
# These compute values in padding, which may be too large, or zero.
MAKE_MORE = CUMULATIVE_OPERATIONS | names_in("conv_general_dilated scan while cond pad concatenate")
KEY_OPERATIONS = names_in("random_fold_in random_wrap random_unwrap")
SOURCES = frozenset({"iota", "dim_as_value"})  # read nothing, and give what extents say
SHAPE_PARAMETERS = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
TILE_ROWS = 256  # of a tile of an instance whose rows are cut into tiles

Axes = dict[Var, frozenset[int]]  # the axes of a variable along which only a tile is there


class CannotMergeError(Exception):
    """An operation that is not known to run for instances of different lengths together."""


def mixed_axes(eqn: Equation) -> list[tuple[int, int]]:
    """Returns (operand, axis) of the ragged axes along which an equation is not row-wise.

    An equation that makes rows that depend on each other out of no ragged axis, a loop of ragged
    length or random bits, has (0, 0) for a mark.

    Raises `CannotMergeError` for operations that are not known.
    """
    name, params = eqn.primitive.name, eqn.params
    ragged = [(i, a) for i, v in enumerate(eqn.invars) for a in ragged_axes(v.aval.shape)]
    if name == "scan" and (ragged or symbols_in(params["length"])):
        return _scanned_axes(eqn, ragged)
    if name in ("while", "cond") and (ragged or symbols_in(params)):
        return _axes_inside(eqn, ragged)
    if name in ELEMENTWISE_OPERATIONS or name in SOURCES:
        return []
    if name in DRAWS and is_ragged(eqn.outvars[0].aval.shape):
        return _drawn_axes(eqn)
    if inner_programs(eqn) and name != "custom_jvp_call" and symbols_in(params):
        raise CannotMergeError(f"`{name}` of a program that asks for a length")
    if not ragged:
        gives_ragged = any(is_ragged(v.aval.shape) for v in eqn.outvars)
        if gives_ragged and name not in LOOK_UPS and not _broadcasts(eqn):
            raise CannotMergeError(f"`{name}` makes an array of ragged length")
        return []
    rule = _RULES.get(name)
    if rule is None:
        if name == "custom_jvp_call" and is_elementwise(eqn):
            return []
        raise CannotMergeError(f"`{name}` of arrays of different lengths")
    return [(i, a) for i, a in ragged if rule(eqn, params, i, a)]


def _broadcasts(eqn: Equation) -> bool:
    """Returns whether all rows of a result are one row, repeated."""
    if eqn.primitive.name != "tile":
        return eqn.primitive.name == "broadcast_in_dim"
    sizes = zip(eqn.invars[0].aval.shape, eqn.params["reps"], strict=True)
    return all(d == 1 for d, repeats in sizes if is_ragged((repeats,)))


def _scanned_axes(eqn: Equation, ragged: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the axes that a loop runs along, and all others that its program may mix."""
    if symbols_in(eqn.params["jaxpr"]):
        return _axes_inside(eqn, ragged)
    return ragged or [(0, 0)]


def _axes_inside(eqn: Equation, ragged: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ragged axes of a loop or branch, whose programs may take rows together.

    Raises `CannotMergeError` if an operation in them is not known.
    """
    for program in inner_programs(eqn):
        for inner in program.eqns:
            mixed_axes(inner)
    return ragged or [(0, 0)]


def _drawn_axes(eqn: Equation) -> list[tuple[int, int]]:
    """Returns a mark for random bits and keys, which begin alike however many there are."""
    key, shape = eqn.invars[0].aval, eqn.params["shape"]
    axes = ragged_axes(shape)  # none where each row has a key
    counted = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    first = len(axes) == 1 and _product(shape[: axes[0]]) == 1 and not is_ragged(key.shape)
    if axes and not (counted and first and "fry" in str(key.dtype)):
        raise CannotMergeError("random numbers of ragged length, which depend on the length")
    return [(0, 0)]


def is_elementwise(eqn: Equation) -> bool:
    """Returns whether a call consists of operations on single elements."""
    inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params), None)
    if inner is None:
        return eqn.primitive.name in ELEMENTWISE_OPERATIONS
    return all(map(is_elementwise, without_consts(inner).eqns))


def _reshape(eqn, params, i, a):
    """Returns whether an axis is merged with others or cut."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if params.get("dimensions") is not None:
        return True
    same_extent = [b for b in ragged_axes(after) if after[b] == before[a]]
    return not any(_product(before[:a]) == _product(after[:b]) for b in same_extent)


def _product(shape):
    total = 1
    for d in shape:
        total = total * d
    return total


def _dot(eqn, params, i, a):
    return a in params["dimension_numbers"][0][i]


def _slice(eqn, params, i, a):
    strides = params["strides"] or (1,) * len(params["start_indices"])
    extent = eqn.invars[0].aval.shape[a]
    same = params["start_indices"][a] == 0 and params["limit_indices"][a] == extent
    return not (same and strides[a] == 1)


def _dynamic_slice(eqn, params, i, a):
    return i == 0 and params["slice_sizes"][a] != eqn.invars[0].aval.shape[a]


def _dynamic_update_slice(eqn, params, i, a):
    return i > 1 or eqn.invars[0].aval.shape[a] != eqn.invars[1].aval.shape[a]


def _gather(eqn, params, i, a):
    numbers = params["dimension_numbers"]
    if i == 1:  # indices: one row for each of theirs
        return a == eqn.invars[1].aval.ndim - 1
    takes_all = params["slice_sizes"][a] == eqn.invars[0].aval.shape[a]
    if a in numbers.operand_batching_dims:
        return False
    return not (takes_all and a not in numbers.start_index_map)


def _scatter(eqn, params, i, a):
    numbers = params["dimension_numbers"]
    target, _, updates = (v.aval.shape for v in eqn.invars)
    if i == 1:
        return a not in numbers.scatter_indices_batching_dims
    window = numbers.update_window_dims
    if i == 2 and a not in window:
        batch = [b for b in range(len(updates)) if b not in window]
        return batch.index(a) not in numbers.scatter_indices_batching_dims
    apart = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    axes = [b for b in range(len(target)) if b not in apart]  # of windows
    if i == 0 and a in apart:
        return a not in numbers.operand_batching_dims
    k = axes.index(a) if i == 0 else window.index(a)
    moves = axes[k] in numbers.scatter_dims_to_operand_dims
    return moves or target[axes[k]] != updates[window[k]]


def _window(eqn, params, i, a):
    steps = (
        params["window_dimensions"],
        params["window_strides"],
        params["base_dilation"],
        params["window_dilation"],
    )
    return any(step[a] != 1 for step in steps) or tuple(params["padding"][a]) != (0, 0)


def _conv(eqn, params, i, a):
    return not (i == 0 and a == params["dimension_numbers"].lhs_spec[0])


def _fft(eqn, params, i, a):
    if a >= eqn.invars[0].aval.ndim - len(params["fft_lengths"]):
        raise CannotMergeError("`fft` of arrays of different lengths")
    return False


def _of_matrix(eqn, params, i, a):
    return a >= eqn.invars[i].aval.ndim - 2


def _triangular_solve(eqn, params, i, a):
    """Returns whether an axis is one of the matrix, or that along which it is solved."""
    from_end = eqn.invars[i].aval.ndim - a
    return from_end <= 2 and (i == 0 or from_end == (2 if params["left_side"] else 1))


_RULES = {
    "broadcast_in_dim": lambda eqn, params, i, a: (
        eqn.outvars[0].aval.shape[params["broadcast_dimensions"][a]] != eqn.invars[0].aval.shape[a]
    ),
    "reshape": _reshape,
    "bitcast_convert_type": lambda eqn, params, i, a: (
        eqn.outvars[0].aval.ndim != eqn.invars[0].aval.ndim
    ),
    "squeeze": lambda *_: False,
    "stack": lambda *_: False,
    "unstack": lambda *_: False,
    **dict.fromkeys(KEY_OPERATIONS, lambda *_: False),
    "expand_dims": lambda *_: False,
    "transpose": lambda *_: False,
    "dot_general": _dot,
    "concatenate": lambda eqn, params, i, a: a == params["dimension"],
    "tile": lambda eqn, params, i, a: params["reps"][a] != 1,
    "split": lambda eqn, params, i, a: a == params["axis"],
    "rev": lambda eqn, params, i, a: a in params["dimensions"],
    "sort": lambda eqn, params, i, a: a == params["dimension"],
    "top_k": lambda eqn, params, i, a: a == params.get("axis", eqn.invars[0].aval.ndim - 1),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    "pad": lambda eqn, params, i, a: tuple(params["padding_config"][a]) != (0, 0, 0),
    "conv_general_dilated": _conv,
    **dict.fromkeys(WINDOWS, _window),
    "fft": _fft,
    "cholesky": _of_matrix,
    "eigh": _of_matrix,
    "triangular_solve": _triangular_solve,
    **{name: lambda eqn, params, i, a: a in params["axes"] for name in REDUCTIONS},
    **{name: lambda eqn, params, i, a: a == params["axis"] for name in CUMULATIVE_OPERATIONS},
}


def is_look_up(eqn: Equation) -> bool:
    """Returns whether as many rows as an extent says are taken of a value without ragged axes."""
    looks = eqn.primitive.name in LOOK_UPS
    out = eqn.outvars[0].aval.shape
    sources = [v.aval.shape for v in eqn.invars]
    return looks and is_ragged(out) and not any(map(is_ragged, sources))
