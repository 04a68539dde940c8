"""Programs without calls: what is called stands in place of the call."""

from typing import Any

import jax

from jedbatch._jaxpr.interpret import body_of, inlined, shape_of
from jedbatch._jaxpr.padding.axis_rules import VIEWS, CannotMergeError, is_elementwise
from jedbatch._jaxpr.symbolic_dims import is_ragged, symbols_in
from jedbatch._jaxpr.versions import ClosedProgram, Equation, with_equations, without_consts

# The programs of loops and branches, by the names of parameters.
INSIDE = {"scan": ["jaxpr"], "while": ["cond_jaxpr", "body_jaxpr"], "cond": ["branches"]}
SOFTMAX = {"exp", "div", "reduce_sum", "reduce_max", "max", "sub", "stop_gradient", *VIEWS}


def flattened(closed: ClosedProgram) -> Any:
    """Returns a program without calls, but for elementwise functions with derivative rules.

    So are the programs of loops and branches in it.
    """
    closed = inlined(closed, _body)
    equations = [_flattened_inside(eqn) for eqn in without_consts(closed).eqns]
    return with_equations(closed, equations)


def _flattened_inside(eqn: Equation) -> Any:
    if eqn.primitive.name not in INSIDE or not (_is_ragged(eqn) or symbols_in(eqn.params)):
        return eqn
    params = dict(eqn.params)
    for name in INSIDE[eqn.primitive.name]:
        program = params[name]
        inner = isinstance(program, tuple)
        params[name] = tuple(map(flattened, program)) if inner else flattened(program)
    return eqn.replace(params=params)


called = body_of("jit", "remat2", "checkpoint", "closed_call")


def _body(eqn: Equation) -> Any:
    """Returns the program that is called; None for operations."""
    if _changes_nothing(eqn):
        return jax.make_jaxpr(lambda *xs: xs)(*map(shape_of, eqn.invars))
    own_rule = eqn.primitive.name == "custom_jvp_call"
    if not own_rule or is_elementwise(eqn) or not _is_ragged(eqn):
        return called(eqn)
    inner = eqn.params["call_jaxpr"]
    if not _is_softmax(inner):
        raise CannotMergeError("a function with a derivative of its own")
    return inner


def _changes_nothing(eqn: Equation) -> bool:
    """Returns whether the results are the operands: of a cut into one piece, and of a copy.

    Derivatives in all directions, such as `jax.hessian`, cut into one piece.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "device_put":
        return not any((*params["devices"], *params["srcs"]))
    return name == "split" and len(params["sizes"]) == 1


def _is_softmax(closed: ClosedProgram) -> bool:
    """Returns whether a function with a derivative rule has the derivative that JAX would find.

    The rule of `jax.nn.softmax` saves memory, no more.
    """
    names = [eqn.primitive.name for eqn in flattened(closed).jaxpr.eqns]
    sums = names.count("exp") == names.count("div") == names.count("reduce_sum") == 1
    return sums and set(names) <= SOFTMAX


def _is_ragged(eqn: Equation) -> bool:
    return any(is_ragged(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
