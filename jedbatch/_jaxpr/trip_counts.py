"""Trip counts of loops, as far as their programs say.

A loop may differ from lane to lane and yet hardly: that over the stages of a Runge-Kutta step
begins at the first stage or at the second. Its counter starts at one of two numbers, grows by one,
and is compared with a number, all of which the program says. Lanes that put such a loop down and
take it up again gain less than they pay. So it becomes a `scan` of as many trips as any lane takes,
in which lanes that are done keep what they carry: as under `vmap`, and no reason to cut the
program.

Of scalars that are whole numbers or truth values we follow all values that they may have, if these
are few. A loop is counted by taking its trips on the numbers that are known, from each of the
values that they may have at the start, by NumPy, whose integers wrap around as those of JAX do. It
is counted if its condition is known before each trip.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

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
MOST_TRIPS = 128  # that are taken to count a loop
MOST_VALUES = 8  # that are followed of a scalar, and of all scalars at the start of a loop

Known = frozenset[Any] | None  # all values that a scalar of NumPy may have
_TRUTH = frozenset([np.bool_(False), np.bool_(True)])

# The operand that is the result, too.
_SAME = {"copy": 0, "copy_p": 0, "nonbatchable": 0, "stop_gradient": 0, "select_if_vmap": 1}
_SAME |= {"reduce_and": 0, "reduce_or": 0}  # of a scalar
_FUNCTIONS = {
    "add": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


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
    if math.prod(len(x) for x in start if x is not None) > MOST_VALUES:
        return None
    counts = [
        _trips_from(eqn, given)
        for given in itertools.product(*([x] if x is None else map(_one, x) for x in start))
    ]
    found = [count for count in counts if count is not None]
    return (min(found), max(found)) if len(found) == len(counts) else None


def _one(value: Any) -> Known:
    return frozenset([value])


def _trips_from(eqn: Equation, start: Sequence[Known]) -> int | None:
    """Returns the trips of a loop, of whose operands one value is known or none."""
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = ends_alone(eqn.params["cond_jaxpr"]), eqn.params["body_jaxpr"]
    of_cond, of_body = start[:num_cond], start[num_cond : num_cond + num_body]
    carry = list(start[num_cond + num_body :])
    for count in range(MOST_TRIPS + 1):
        (goes_on,) = _known(cond, [*of_cond, *carry])
        if goes_on is None or len(goes_on) > 1:
            return None
        if not all(goes_on):
            return count
        carry = _known(body, [*of_body, *carry])
    return None


# --- programs ---


def _rewritten(program: Any, args: Sequence[Known]) -> tuple[Any, list[Known]]:
    """Returns (a program with `scan` for such loops, what is known of its results)."""
    eqns = []

    def visit(eqn: Equation, operands: list[Known]) -> list[Known]:
        changed, outs = _equation(eqn, operands)
        eqns.append(changed)
        return outs

    outs = _known(program, args, visit)
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


def _known(program: Any, args: Sequence[Known], visit: Callable | None = None) -> list[Known]:
    """Returns what is known of the results of a program.

    Args:
      program: closed or open.
      args: what is known of its arguments.
      visit: from an equation, and what is known of its operands, to what is of its results.
    """
    jaxpr = without_consts(program)
    env: dict[Any, Known] = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        outs = (visit or _results)(eqn, [_of_atom(x, env) for x in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_of_atom(x, env) for x in jaxpr.outvars]


def _of_atom(atom: Any, env: dict[Any, Known]) -> Known:
    if not isinstance(atom, Literal):
        return env.get(atom)
    return _one(np.asarray(atom.val, shape_of(atom).dtype)[()]) if _is_followed(atom) else None


def _is_followed(atom: Any) -> bool:
    """Returns whether a variable is a scalar, and a whole number or a truth value."""
    return not atom.aval.shape and getattr(atom.aval.dtype, "kind", "") in ("b", "i", "u")


def _results(eqn: Equation, operands: Sequence[Known]) -> list[Known]:
    """Returns what is known of the results of an operation."""
    name = eqn.primitive.name
    if name in CALLS:
        return _known(eqn.params[CALLS[name]], operands)
    if len(eqn.outvars) != 1 or not _is_followed(eqn.outvars[0]):
        return [None] * len(eqn.outvars)
    found = _result(eqn, operands)
    return [None if found is None or len(found) > MOST_VALUES else found]


def _result(eqn: Equation, operands: Sequence[Known]) -> Known:
    """Returns what is known of a scalar."""
    name = eqn.primitive.name
    if name in _SAME:
        return operands[_SAME[name]]
    if name == "select_n":
        which, *cases = operands
        chosen = cases if which is None else [cases[int(k)] for k in which]
        return None if None in chosen else frozenset().union(*(x for x in chosen if x))
    function: Callable | None = _FUNCTIONS.get(name)
    if name == "convert_element_type":
        before, after = (x.aval.dtype for x in (*eqn.invars, *eqn.outvars))
        function = functools.partial(np.ndarray.astype, dtype=after)
        operands = [_TRUTH if x is None and before == np.bool_ else x for x in operands]
    if function is None or None in operands:
        return None
    with np.errstate(over="ignore"):
        given = itertools.product(*(map(np.asarray, x) for x in operands if x))
        return frozenset(function(*xs)[()] for xs in given)
