"""Residuals of branches: none but the operands, which are there anyway.

The reverse of a `cond` reads values of the branch that was taken. JAX has the `cond` return all of
them, its operands and what depends on operands alone that are not differentiated among them: of a
branch that multiplies by weights, a copy of these for every lane. Here the reverse gets the
operands, and runs the branch that was taken again. That takes less time than it does to write and
read what JAX would save, and no more than to save only what depends on differentiated operands.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jedbatch._jaxpr.derivatives import pull_back_some
from jedbatch._jaxpr.interpret import (
    any_performs,
    cares_for_padding,
    has_gradient,
    is_fixed,
    shape_of,
    with_programs,
)
from jedbatch._jaxpr.lane_loops import as_function
from jedbatch._jaxpr.versions import Equation, with_equations, without_consts
from jedbatch._support.types import Array


def saving_little(program: Any) -> Any:
    """Returns a program whose branches save little for their reverse, those in loops too."""
    if not any_performs(without_consts(program).eqns, "cond"):
        return program

    eqns = []
    for eqn in without_consts(program).eqns:
        if not eqn.primitive.name.startswith("custom_"):  # has a derivative of its own
            changed = with_programs(eqn, saving_little)
            if eqn.primitive.name == "cond" and not (is_fixed(eqn) or cares_for_padding(eqn)):
                changed = _running_again(eqn, changed)
            eqn = changed
        eqns.append(eqn)
    return with_equations(program, eqns)


def _running_again(eqn: Equation, changed: Equation) -> Any:
    """Returns a `cond` whose reverse runs the branch that was taken again.

    Args:
      eqn: as it runs forwards, also if that is differentiated in forward mode.
      changed: the same with branches that save little.
    """
    branches = list(map(as_function, changed.params["branches"]))
    run = functools.partial(eqn.primitive.bind, **eqn.params)
    call = jax.custom_vjp(run)

    def forward(index: CustomVJPPrimal, *args: CustomVJPPrimal) -> tuple[list[Array], Any]:
        moving = [i for i, x in enumerate(args) if x.perturbed and has_gradient(x.value.dtype)]
        values = [x.value for x in args]
        back = jax.tree_util.Partial(functools.partial(_reverse, branches, moving))
        return run(index.value, *values), (back, index.value, values)

    def backward(saved: Any, cotangents: Sequence[Any]) -> Any:
        back, index, values = saved
        return None, *back(index, values, cotangents)

    call.defvjp(forward, backward, symbolic_zeros=True)
    (called,) = jax.make_jaxpr(call)(*map(shape_of, eqn.invars)).eqns
    return eqn.replace(primitive=called.primitive, params=called.params)


def _reverse(
    branches: Sequence[Callable],
    moving: Sequence[int],
    index: Array,
    values: Sequence[Array],
    cotangents: Sequence[Any],
) -> list[Any]:
    """Returns cotangents of the operands of a `cond`, None for what has none."""
    exist = [i for i, x in enumerate(cotangents) if not isinstance(x, SymbolicZero)]
    given = {i: cotangents[i] for i in exist}

    def back(branch: Callable, values: Sequence[Array], given: Any) -> list[Array]:
        found = pull_back_some(lambda args: branch(*args), values, moving, exist, given)
        return [found[i] for i in moving]

    backs = [functools.partial(back, branch) for branch in branches]
    found = dict(zip(moving, jax.lax.switch(index, backs, values, given), strict=True))
    return [found.get(i) for i in range(len(values))]
