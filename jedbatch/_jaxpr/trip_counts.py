"""Trip counts of loops, as far as their programs say.

A loop may differ from lane to lane and yet hardly: that over the stages of a Runge-Kutta step
begins at the first stage or at the second. Its counter starts between two numbers, grows by one,
and is compared with a number, all of which the program says. Lanes that put such a loop down and
take it up again gain less than they pay. So it becomes a `scan` of as many trips as any lane takes,
in which lanes that are done keep what they carry: as under `vmap`, and no reason to cut the
program.

Integers are followed as intervals, and in a loop as a carried number plus an interval; the
condition of a loop as a conjunction of inequalities. Integers of JAX wrap around, intervals do not:
an interval that leaves the range of its dtype is unknown. The range of a carried number is known
once trips are counted, and the loop is then followed again with these ranges as intervals. If
nothing leaves its dtype, the count holds; else the loop is not counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import any_performs, performs, shape_of, with_programs
from jedbatch._jaxpr.single_instances import ends_alone, goes_on_alone
from jedbatch._jaxpr.versions import (
    CALLS,
    Equation,
    with_equations,
    without_consts,
)
from jedbatch._support.types import Array

ALIKE = 0.75  # of the most trips that a lane takes, what the fewest must be
MOST_TRIPS = np.iinfo(np.int32).max  # of a `scan`


class Interval(NamedTuple):
    """A whole number: a carried one, or 0, plus some between two bounds."""

    low: int
    high: int
    carried: int | None = None  # the place among the values that a loop carries


class Inequalities(NamedTuple):
    """A truth value: that of each pair the first number is less than the second."""

    pairs: tuple[tuple[Interval, Interval], ...]


Known = Interval | Inequalities | None  # of a scalar

# The operand that is the result, too.
_SAME = {"copy": 0, "copy_p": 0, "nonbatchable": 0, "stop_gradient": 0, "select_if_vmap": 1}
_SAME |= {"reduce_and": 0, "reduce_or": 0}  # of a scalar


def with_equal_trips(program: Any) -> Any:
    """Returns a program in which loops are `scan` whose numbers of trips are about the same.

    Args:
      program: closed or open, of one lane. It has a derivative in forward mode where the result
        has one.
    """
    return _rewritten(program, [None] * len(without_consts(program).invars))[0]


def trips(eqn: Equation, start: Sequence[Known]) -> tuple[int, int] | None:
    """Returns the fewest and the most trips of a loop; None if its program does not say.

    Args:
      eqn: a `while`.
      start: what is known of its operands.
    """
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = start[:num_cond], start[num_cond : num_cond + num_body]
    first = start[num_cond + num_body :]
    carry = [Interval(0, 0, i) if isinstance(x, Interval) else None for i, x in enumerate(first)]
    cond = ends_alone(eqn.params["cond_jaxpr"])
    (goes_on,) = _known(cond, [*of_cond, *carry])
    if not isinstance(goes_on, Inequalities) or not goes_on.pairs:
        return None
    after = _known(eqn.params["body_jaxpr"], [*of_body, *carry])
    followed: dict[int, tuple[Interval, int]] = {}  # carried numbers that the condition reads

    def at_first(x: Interval, step: int) -> Interval | None:
        """Returns a number at the start, if a trip adds `step` to it."""
        if x.carried is None:
            return x if step == 0 else None
        begin = first[x.carried]
        if after[x.carried] != Interval(step, step, x.carried) or not isinstance(begin, Interval):
            return None
        followed[x.carried] = begin, step
        return _sum(begin, x._replace(carried=None))

    bounds = []
    for less, more in goes_on.pairs:
        count, end = at_first(less, 1), at_first(more, 0)
        if count is None or end is None:
            return None
        bounds.append((end.low - count.high, end.high - count.low))
    fewest, most = (max(0, min(ends)) for ends in zip(*bounds, strict=True))
    if most > MOST_TRIPS:
        return None

    def carried(num_trips: int) -> list[Known]:
        """Returns the ranges of carried numbers over the first trips, all others unknown."""
        ranges: list[Known] = [None] * len(first)
        for i, (begin, step) in followed.items():
            ranges[i] = Interval(begin.low, begin.high + step * num_trips)
        return ranges

    conditions = _known(cond, [*of_cond, *carried(most)])
    results = _known(eqn.params["body_jaxpr"], [*of_body, *carried(max(0, most - 1))])
    is_in_range = None not in (*conditions, *(results[i] for i in followed))
    return (fewest, most) if is_in_range else None


# --- programs ---


def _rewritten(program: Any, args: Sequence[Known]) -> tuple[Any, list[Known]]:
    """Returns (a program with `scan` for such loops, what is known of its results)."""
    jaxpr = without_consts(program)
    env: dict[Any, Known] = dict(zip(jaxpr.invars, args, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [_of_atom(x, env) for x in eqn.invars]
        changed, outs = _equation(eqn, operands)
        eqns.append(changed)
        env.update(zip(eqn.outvars, outs, strict=True))
    outs = [_of_atom(x, env) for x in jaxpr.outvars]
    return with_equations(program, eqns) if performs(program, "while") else program, outs


def _equation(eqn: Equation, operands: list[Known]) -> tuple[Any, list[Known]]:
    name = eqn.primitive.name
    if name in CALLS:
        inner, outs = _rewritten(eqn.params[CALLS[name]], operands)
        return eqn.replace(params=eqn.params | {CALLS[name]: inner}), outs
    outs = _results(eqn, operands)
    if name == "while" and not eqn.effects and not _has_control_flow(eqn):
        found = trips(eqn, operands)
        if found is not None and found[0] >= ALIKE * found[1]:
            return _as_scan(eqn, *found), outs

    if any_performs([eqn], "while"):
        eqn = with_programs(eqn, with_equal_trips)
    return eqn, outs


def _has_control_flow(eqn: Equation) -> bool:
    programs = (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
    return any(performs(x, "while", "cond") for x in programs)


def _as_scan(eqn: Equation, fewest: int, most: int) -> Any:
    """Returns a loop as a `scan`, and one more in which lanes that are done keep their carry."""
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = ends_alone(eqn.params["cond_jaxpr"]), goes_on_alone(eqn.params["body_jaxpr"])

    def run(*args: Array) -> list[Array]:
        of_cond, of_body = args[:num_cond], args[num_cond : num_cond + num_body]

        def all_go_on(carry: list[Array], _: None) -> tuple[list[Array], None]:
            return jax.core.eval_jaxpr(body.jaxpr, body.consts, *of_body, *carry), None

        def some_are_done(carry: list[Array], _: None) -> tuple[list[Array], None]:
            (goes_on,) = jax.core.eval_jaxpr(cond.jaxpr, cond.consts, *of_cond, *carry)
            pairs = zip(carry, all_go_on(carry, None)[0], strict=True)
            return [x if x is y else lax.select(goes_on, y, x) for x, y in pairs], None

        carry = list(args[num_cond + num_body :])
        carry, _ = lax.scan(all_go_on, carry, length=fewest)
        return lax.scan(some_are_done, carry, length=most - fewest)[0] if fewest < most else carry

    (called,) = jax.make_jaxpr(jax.jit(run))(*map(shape_of, eqn.invars)).eqns
    return eqn.replace(primitive=called.primitive, params=called.params)


# --- numbers ---


def _known(program: Any, args: Sequence[Known]) -> list[Known]:
    """Returns what is known of the results of a program."""
    jaxpr = without_consts(program)
    env: dict[Any, Known] = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        operands = [_of_atom(x, env) for x in eqn.invars]
        env.update(zip(eqn.outvars, _results(eqn, operands), strict=True))
    return [_of_atom(x, env) for x in jaxpr.outvars]


def _of_atom(atom: Any, env: dict[Any, Known]) -> Known:
    if isinstance(atom, Var):
        return env.get(atom)
    if not isinstance(atom, Literal) or np.shape(atom.val):
        return None
    dtype = shape_of(atom).dtype
    if dtype == np.bool_:
        return Inequalities(()) if atom.val else None
    if np.issubdtype(dtype, np.integer):
        return Interval(int(atom.val), int(atom.val))
    return None


def _results(eqn: Equation, operands: list[Known]) -> list[Known]:
    """Returns what is known of the results of an operation."""
    if eqn.primitive.name in CALLS:
        return _known(eqn.params[CALLS[eqn.primitive.name]], operands)
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape:
        return [None] * len(eqn.outvars)
    return [_within(eqn.outvars[0].aval.dtype, _result(eqn, operands))]


def _within(dtype: Any, x: Known) -> Known:
    """Returns a number if a dtype holds it, or if it is carried, so that its range is open."""
    if not isinstance(x, Interval) or x.carried is not None:
        return x
    if not np.issubdtype(dtype, np.integer):
        return None
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return x if least <= x.low and x.high <= most else None


def _result(eqn: Equation, operands: list[Known]) -> Known:
    """Returns what is known of a scalar, if integers do not wrap around."""
    name = eqn.primitive.name
    if name in _SAME:
        return operands[_SAME[name]]
    if name == "convert_element_type":
        return _converted(eqn, operands[0])
    if name == "and":
        a, b = operands
        if isinstance(a, Inequalities) and isinstance(b, Inequalities):
            return Inequalities(a.pairs + b.pairs)
        return None
    if not all(isinstance(x, Interval) for x in operands[name == "select_n" :]):
        return None
    rule: Any = _RULES.get(name)
    return None if rule is None else rule(*operands)


def _converted(eqn: Equation, x: Known) -> Known:
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if before == after:
        return x
    if not np.issubdtype(after, np.integer):
        return None
    return Interval(0, 1) if before == np.bool_ else x


def _sum(a: Interval, b: Interval) -> Interval | None:
    if a.carried is not None and b.carried is not None:
        return None
    carried = b.carried if a.carried is None else a.carried
    return Interval(a.low + b.low, a.high + b.high, carried)


def _difference(a: Interval, b: Interval) -> Interval | None:
    return None if b.carried is not None else Interval(a.low - b.high, a.high - b.low, a.carried)


def _one_of(_: Known, *cases: Interval) -> Interval | None:
    if len({x.carried for x in cases}) != 1:
        return None
    low, high = min(x.low for x in cases), max(x.high for x in cases)
    return Interval(low, high, cases[0].carried)


def _less(a: Interval, b: Interval) -> Inequalities:
    return Inequalities(((a, b),))


def _at_most(a: Interval, b: Interval) -> Inequalities:
    return _less(a, b._replace(low=b.low + 1, high=b.high + 1))


_RULES = {
    "add": _sum,
    "sub": _difference,
    "select_n": _one_of,
    "lt": _less,
    "le": _at_most,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _at_most(b, a),
}
