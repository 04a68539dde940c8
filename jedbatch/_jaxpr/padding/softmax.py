"""Softmax along ragged axes: one selection instead of one for every operation.

A softmax takes a maximum and a sum along an axis, and mostly its weights are multiplied with rows:

    m = max(x)      e = exp(x - m)      w = e / sum(e)      w @ rows

Each of these has to leave padding out, by a selection that takes about as long as the operation.
If scores x are -inf in their padding, e and w are 0 there, which is what a sum and a product need:
one selection, of x, does for all of them. Sums of exponentials, as in `jax.nn.logsumexp`, are the
same up to the division.

The axis must have a row: the maximum of none is -inf, and -inf - m is no number then. Gradients
stay finite as long as nothing but sums and products reads e and w: what comes back to e is finite,
and times exp(-inf) it is 0. A logarithm of w would send back 0 / 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import names_in, reads
from jedbatch._jaxpr.padding.axis_rules import mixed_axes
from jedbatch._jaxpr.symbolic_dims import is_ragged, symbols_in
from jedbatch._jaxpr.versions import Equation

# What may lie between the maximum and its subtraction. It does not vary along the axis.
SHIFTS = names_in(
    "broadcast_in_dim convert_element_type expand_dims is_finite max reshape select_n squeeze",
    "stop_gradient",
)
Axes = tuple[int, ...]


@dataclass(frozen=True)
class SoftmaxMasks:
    """Where a program needs no selections, because of others.

    Attributes:
      scores: variables to be -inf in their padding, each with the ragged axes of that padding.
      settled: (id of an equation, number of its operand): operands that need no selection.
    """

    scores: Mapping[Var, Axes]
    settled: frozenset[tuple[int, int]]


NO_MASKS = SoftmaxMasks({}, frozenset())


def find_softmax_masks(equations: Sequence[Equation], returned: Sequence[Var]) -> SoftmaxMasks:
    """Returns where equations have a softmax along ragged axes.

    Args:
      equations: of a program, in order.
      returned: its variables that others read.
    """
    finder = _Finder(equations, returned)
    scores: dict[Var, Axes] = {}
    settled: set[tuple[int, int]] = set()
    for eqn in equations:
        if eqn.primitive.name == "reduce_max" and isinstance(eqn.invars[0], Var):
            axes = tuple(a for _, a in mixed_axes(eqn))
            found = finder.settled_by(eqn, axes) if axes else None
            if found is not None:
                scores[eqn.invars[0]] = axes
                settled.update(found)
    return SoftmaxMasks(scores, frozenset(settled))


class _Finder:
    """Looks for softmaxes among equations."""

    def __init__(self, equations: Sequence[Equation], returned: Sequence[Var]):
        self._returned = set(returned)
        self._maker = {v: eqn for eqn in equations for v in eqn.outvars}
        self._readers: dict[Var, list[Equation]] = {}
        for eqn in equations:
            for v in dict.fromkeys(reads(eqn)):
                self._readers.setdefault(v, []).append(eqn)

    def settled_by(self, maximum: Equation, axes: Axes) -> set[tuple[int, int]] | None:
        """Returns the operands that need no selection if that of a maximum is -inf in its padding.

        None if it must not be.
        """
        x = maximum.invars[0]
        readers = self._readers[x]
        if x in self._returned or not all(_is_length(x.aval.shape[a]) for a in axes):
            return None
        if len(readers) != 2 or maximum not in readers:
            return None
        (difference,) = (eqn for eqn in readers if eqn is not maximum)
        if difference.primitive.name != "sub" or difference.invars[0] is not x:
            return None
        shift = difference.invars[1]
        if isinstance(shift, Literal) or shift is x or _varies(shift, axes):
            return None
        if not self._follows(shift, maximum.outvars[0]):
            return None
        exponential = self._only_reader(difference)
        if exponential is None or exponential.primitive.name != "exp":
            return None
        found = self._read_as_zeros(exponential.outvars[0], axes)
        return None if found is None else {(id(maximum), 0), *found}

    def _only_reader(self, eqn: Equation) -> Equation | None:
        (out,) = eqn.outvars
        readers = self._readers.get(out, [])
        return readers[0] if len(readers) == 1 and out not in self._returned else None

    def _follows(self, atom: Any, source: Var) -> bool:
        """Returns whether a value is a function of another one alone, along no axis of its own."""
        if atom is source or isinstance(atom, Literal):
            return True
        eqn = self._maker.get(atom)
        return (
            eqn is not None
            and eqn.primitive.name in SHIFTS
            and all(self._follows(v, source) for v in eqn.invars)
        )

    def _read_as_zeros(self, x: Var, axes: Axes) -> set[tuple[int, int]] | None:
        """Returns the operands that need no selection if x is 0 in its padding along some axes.

        None if something reads x that might not be finite then, or might not have a gradient.
        """
        settled: set[tuple[int, int]] = set()
        waiting = [(x, axes)]
        sums: set[Var] = set()
        divisions: list[Equation] = []
        while waiting:
            v, zero = waiting.pop()
            for eqn in self._readers.get(v, []):
                operands = [i for i, w in enumerate(eqn.invars) if w is v]
                name, out = eqn.primitive.name, eqn.outvars[0]
                if name in ("reduce_sum", "dot_general"):
                    mixed = mixed_axes(eqn)
                    if any({a for i, a in mixed if i == k} != set(zero) for k in operands):
                        return None
                    settled.update((id(eqn), k) for k in operands)
                    if name == "reduce_sum":
                        sums.add(out)
                elif name == "div" and operands == [0] and isinstance(eqn.invars[1], Var):
                    divisions.append(eqn)
                    waiting.append((out, zero))
                else:
                    moved = _moved(eqn, zero)
                    if moved is None:
                        return None
                    waiting.append((out, moved))
        for eqn in divisions:
            if not self._follows_any(eqn.invars[1], sums):
                return None
        return settled

    def _follows_any(self, v: Var, sources: set[Var]) -> bool:
        """Returns whether a value is that of some source in another shape or type."""
        while v not in sources:
            eqn = self._maker.get(v)
            if eqn is None or eqn.primitive.name not in SHIFTS or len(eqn.invars) != 1:
                return False
            (v,) = eqn.invars
            if isinstance(v, Literal):
                return False
        return True


def _varies(v: Any, axes: Axes) -> bool:
    """Returns whether a value that is broadcast may vary along some axes."""
    shape = v.aval.shape
    return bool(shape) and any(shape[a] != 1 for a in axes)


def _moved(eqn: Equation, axes: Axes) -> Axes | None:
    """Returns where axes are in the result of an equation that moves them at most; None if not."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("convert_element_type", "copy", "stop_gradient"):
        return axes
    if name == "transpose":
        return tuple(params["permutation"].index(a) for a in axes)
    return None


def _is_length(extent: Any) -> bool:
    """Returns whether an extent is the length of an array, and no expression of lengths."""
    return is_ragged((extent,)) and symbols_in((extent,)) == {str(extent)}
