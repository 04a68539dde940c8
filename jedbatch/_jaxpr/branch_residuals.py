"""Residuals of branches, without those that are there anyway.

The reverse of a `cond` reads values of the branch that was taken. JAX has the `cond` return all of
them, its operands and what depends on operands alone that are not differentiated among them: of a
branch that multiplies by weights, a copy of these for every lane. Here branches return what depends
on operands that are differentiated; the reverse gets the operands it reads, and computes again what
depends on the others alone, such as a slice of weights.

What branches return beside their results are *slots*, each of a shape and dtype; every branch puts
its own values into them, as far as there are, and zeros into the rest.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Literal

from jedbatch._jaxpr.interpret import (
    any_performs,
    cares_for_padding,
    dependents,
    has_gradient,
    is_fixed,
    shape_of,
    used_variables,
    with_programs,
)
from jedbatch._jaxpr.versions import Equation, with_equations, without_consts
from jedbatch._support.types import Array

Kind = tuple[tuple[int, ...], Any]  # shape, dtype


def saving_little(program: Any) -> Any:
    """Returns a program whose branches save little for their reverse, those in loops too."""
    if not any_performs(without_consts(program).eqns, "cond"):
        return program

    eqns = []
    for eqn in without_consts(program).eqns:
        if not eqn.primitive.name.startswith("custom_"):  # has a derivative of its own
            eqn = with_programs(eqn, saving_little)
            if eqn.primitive.name == "cond" and _can_be_told(eqn):
                eqn = _with_slots(eqn)
        eqns.append(eqn)
    return with_equations(program, eqns)


def _can_be_told(eqn: Equation) -> bool:
    """Returns whether the branches of a `cond` may be differentiated, each by itself."""
    return not (is_fixed(eqn) or cares_for_padding(eqn))


def _with_slots(eqn: Equation) -> Any:
    """Returns a `cond` with a reverse that reads slots."""
    branches = eqn.params["branches"]

    @jax.custom_vjp
    def call(index: Array, *args: Array) -> Any:
        return eqn.primitive.bind(index, *args, **eqn.params)

    def forward(index: CustomVJPPrimal, *args: CustomVJPPrimal) -> tuple[list[Array], Any]:
        moving = [i for i, x in enumerate(args) if x.perturbed and has_gradient(x.value.dtype)]
        values = [x.value for x in args]
        split = [_split(branch, values, moving) for branch in branches]
        kinds = _slots([part.kinds for part in split])
        run = [functools.partial(_run, part, kinds) for part in split]
        outs, slots = jax.lax.switch(index.value, run, *values)
        read = sorted({i for part in split for i in part.reads})
        results = [shape_of(v) for v in eqn.outvars]
        reverse = _BranchReverse(split, kinds, len(args), moving, read, results)
        back = jax.tree_util.Partial(reverse.run)
        return outs, (back, index.value, [values[i] for i in read], slots)

    def backward(saved: Any, cotangents: Sequence[Any]) -> Any:
        back, *operands = saved
        return None, *back(*operands, cotangents)

    call.defvjp(forward, backward, symbolic_zeros=True)
    traced = jax.make_jaxpr(call)(*map(shape_of, eqn.invars))
    (called,) = traced.eqns
    return eqn.replace(primitive=called.primitive, params=called.params)


class _Split(NamedTuple):
    """A branch forwards and in reverse.

    Attributes:
      forward: from the operands to the results and what is saved.
      num_results: how many of these are results.
      kinds: of what is saved.
      again: from the operands to what the reverse reads and is computed again.
      reads: the positions of operands that are read for this.
      sources: for each value that the reverse reads, whether it is saved, and its number among
        those that are or among those computed again.
      structure: of the function that pulls back, whose leaves these values are.
    """

    forward: Any
    num_results: int
    kinds: list[Kind]
    again: Any
    reads: list[int]
    sources: list[tuple[bool, int]]
    structure: Any


def _split(branch: Any, values: Sequence[Array], moving: Sequence[int]) -> _Split:
    """Splits a branch, differentiated with respect to some operands."""
    structure = []

    def run(*values: Array) -> tuple[list[Array], list[Array]]:
        def of_moving(*moved: Array) -> list[Array]:
            every = dict(enumerate(values)) | dict(zip(moving, moved, strict=True))
            found: list[Array] = jax.core.eval_jaxpr(branch.jaxpr, branch.consts, *every.values())
            return found

        outs, pull_back = jax.vjp(of_moving, *(values[i] for i in moving))
        leaves, tree = jax.tree.flatten(pull_back)
        structure.append(tree)
        return outs, leaves

    closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values))
    jaxpr = closed.jaxpr
    num_results = len(branch.jaxpr.outvars)
    leaves = jaxpr.outvars[num_results:]
    operands = [jaxpr.invars[i] for i in moving]
    varying = dependents(jaxpr, operands)
    saved: dict[Any, int] = {}
    again: dict[int, Any] = {}
    sources = []
    for place, v in enumerate(leaves):
        if isinstance(v, Literal) or v not in varying or v in operands:
            sources.append((False, len(again)))
            again[place] = v
        else:
            sources.append((True, saved.setdefault(v, len(saved))))
    made_again = jaxpr.replace(outvars=list(again.values()))
    used = used_variables(made_again)
    made_again = made_again.replace(eqns=[e for e in jaxpr.eqns if used.intersection(e.outvars)])
    return _Split(
        forward=closed.replace(jaxpr=jaxpr.replace(outvars=[*jaxpr.outvars[:num_results], *saved])),
        num_results=num_results,
        kinds=[(v.aval.shape, v.aval.dtype) for v in saved],
        again=closed.replace(jaxpr=made_again),
        reads=[i for i, v in enumerate(jaxpr.invars) if v in used],
        sources=sources,
        structure=structure[-1],
    )


def _slots(of_branches: Sequence[Sequence[Kind]]) -> list[Kind]:
    """Returns the slots that have room for what each branch saves."""
    slots: collections.Counter[Kind] = collections.Counter()
    for kinds in of_branches:
        slots |= collections.Counter(kinds)
    return list(slots.elements())


def _places(kinds: Sequence[Kind], slots: Sequence[Kind]) -> list[int]:
    """Returns the slot of each value that a branch saves."""
    free: dict[Kind, list[int]] = collections.defaultdict(list)
    for place, kind in enumerate(slots):
        free[kind].append(place)
    return [free[kind].pop(0) for kind in kinds]


def _run(part: _Split, slots: Sequence[Kind], *values: Array) -> tuple[list[Array], list[Array]]:
    """Returns (the results of a branch, what it puts into slots)."""
    found = jax.core.eval_jaxpr(part.forward.jaxpr, part.forward.consts, *values)
    saved = dict(zip(_places(part.kinds, slots), found[part.num_results :], strict=True))
    filled = [saved[i] if i in saved else jnp.zeros(*kind) for i, kind in enumerate(slots)]
    return found[: part.num_results], filled


class _BranchReverse(NamedTuple):
    """Facts of a reverse that are known before it runs: how branches were split, and of what.

    Attributes:
      split: the branches.
      slots: they save into.
      num_operands: of the branches.
      moving: the positions of operands that are differentiated.
      read: the positions of operands that it is given.
      results: of the branches, as shapes and dtypes.
    """

    split: list[_Split]
    slots: list[Kind]
    num_operands: int
    moving: list[int]
    read: list[int]
    results: list[jax.ShapeDtypeStruct]

    def run(
        self,
        index: Array,
        operands: Sequence[Array],
        slots: Sequence[Array],
        cotangents: Sequence[Any],
    ) -> list[Any]:
        """Returns cotangents of the operands, None for what has none."""
        exist = [i for i, x in enumerate(cotangents) if not isinstance(x, SymbolicZero)]
        given = [cotangents[i] for i in exist]
        back = [functools.partial(self._back, part, exist) for part in self.split]
        found = jax.lax.switch(index, back, operands, slots, given)
        by_place = dict(zip(self.moving, found, strict=True))
        return [by_place.get(i) for i in range(self.num_operands)]

    def _back(
        self,
        part: _Split,
        exist: Sequence[int],
        operands: Sequence[Array],
        slots: Sequence[Array],
        cotangents: Sequence[Array],
    ) -> list[Array]:
        """Returns cotangents of the operands that are differentiated, of a branch."""
        by_place = dict(zip(self.read, operands, strict=True))
        kinds = [v.aval for v in part.again.jaxpr.invars]
        values = [by_place[i] if i in by_place else _zeros(x) for i, x in enumerate(kinds)]
        again = jax.core.eval_jaxpr(part.again.jaxpr, part.again.consts, *values)
        saved = [slots[i] for i in _places(part.kinds, self.slots)]
        leaves = [saved[n] if is_saved else again[n] for is_saved, n in part.sources]
        given = dict(zip(exist, cotangents, strict=True))
        every = [given[i] if i in given else _zeros(x) for i, x in enumerate(self.results)]
        return list(jax.tree.unflatten(part.structure, leaves)(every))


def _zeros(kind: Any) -> Any:
    """Returns zeros of a shape and dtype; as cotangents, of what has some."""
    if not has_gradient(kind.dtype):
        return np.zeros(kind.shape, jax.dtypes.float0)
    return jnp.zeros(kind.shape, kind.dtype)
