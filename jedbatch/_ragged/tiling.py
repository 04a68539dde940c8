"""Cutting the rows of long instances into tiles.

Scores of attention q kᵀ have a number for every pair of rows, so that one long instance alone may
ask for more memory than all the rest. But row i of softmax(q kᵀ) v needs row i of q only, and all
rows of k and v: queries may come a few at a time. Whether a phase can be cut like that, and along
which axes of its values, follows from its equations. Axes are tied to each other where an equation
is row-wise: row i of q becomes row i of the scores and of the result. If no equation takes the rows
along the tied axes together, the phase runs tile by tile.
"""

from typing import Any

from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.interpret import ELEMENTWISE_OPERATIONS, reads
from jedbatch._jaxpr.padding.axis_rules import (
    REDUCTIONS,
    SHAPE_PARAMETERS,
    Axes,
    is_look_up,
    mixed_axes,
)
from jedbatch._jaxpr.symbolic_dims import is_ragged, ragged_axes, symbols_in
from jedbatch._jaxpr.versions import Equation
from jedbatch._ragged.phases import Phase


def find_tiles(phase: Phase) -> Axes:
    """Returns the axes of a phase over instances that can be cut into tiles together, if any.

    Results are then written tile by tile, and operands are read in tiles or whole.
    """
    tied: UnionFind[tuple[Any, int]] = UnionFind()
    barred = set()  # axes along which rows are taken together, or that we cannot follow
    for eqn in phase.equations:
        mixed = mixed_axes(eqn)
        followed = set()
        for i, v in enumerate(eqn.invars):
            for a in ragged_axes(v.aval.shape):
                b = None if (i, a) in mixed else _follow(eqn, i, a)
                if b is None:
                    barred.add((v, a))
                    continue
                followed.add(b)
                tied.union((v, a), (eqn.outvars[0], b))
        name = eqn.primitive.name
        if name not in ("broadcast_in_dim", "iota"):  # those give as many rows as they are told to
            output_axes = [(v, a) for v in eqn.outvars for a in ragged_axes(v.aval.shape)]
            is_indexed = name not in SHAPE_PARAMETERS and (
                is_look_up(eqn) or symbols_in(eqn.params)
            )
            barred.update((v, a) for v, a in output_axes if is_indexed or a not in followed)
    written_axes = {tied.find((v, a)) for v in phase.writes for a in ragged_axes(v.aval.shape)}
    ragged = all(is_ragged(v.aval.shape) for v in phase.writes)
    if not ragged or written_axes & set(map(tied.find, barred)):
        return {}
    variables = {v for eqn in phase.equations for v in (*reads(eqn), *eqn.outvars)}
    tiles: Axes = {}
    for v in variables:
        axes = ragged_axes(v.aval.shape)
        tiles[v] = frozenset(a for a in axes if tied.find((v, a)) in written_axes)
    if any(len(axes) > 1 for axes in tiles.values()):
        return {}
    return {v: axes for v, axes in tiles.items() if axes}


def _follow(eqn: Equation, i: int, a: int) -> int | None:
    """Returns the axis of the first result that axis a of operand i becomes, if it is known."""
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE_OPERATIONS or name == "custom_jvp_call":
        return a
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][a]
    if name == "transpose":
        return params["permutation"].index(a)
    if name == "squeeze":
        return a - sum(d < a for d in params["dimensions"])
    if name in REDUCTIONS:
        return a - sum(d < a for d in params["axes"])
    if name == "reshape":
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        same = [b for b in ragged_axes(after) if after[b] == before[a]]
        place = len([x for x in ragged_axes(before) if x < a])
        return same[place] if len(same) == len(ragged_axes(before)) else None
    if name == "dot_general":
        summed, batch = params["dimension_numbers"]
        if a in batch[i]:
            return batch[i].index(a)
        free = [
            [x for x in range(v.aval.ndim) if x not in summed[k] and x not in batch[k]]
            for k, v in enumerate(eqn.invars)
        ]
        return len(batch[0]) + (len(free[0]) if i else 0) + free[i].index(a)
    return None
