"""Loops and branches that values decide on, for many lanes at a time, without lock step.

`jax.vmap` runs a `while_loop` for all lanes until the last of them is done, and all branches of a
`cond` or `switch` for every lane. Here lanes have program counters (`program_counters`): once so
many are done that a step of all would be a waste, the others run a few at a time. Loops in loops,
and branches with much work in a loop, are one program of such lanes, from the first such loop to
the last one. Of other branches each runs for its own lanes, in blocks. Every lane computes what it
would compute alone. Loops and branches inside of `scan`, `jit` and the like run so too; loops that
take about as many trips in each lane, as far as their programs say, are loops of all lanes
(`trip_counts`).

Where a step has little work, lanes that are done are not exchanged for others, and the loop runs in
lock step; unless a CPU can run it as one kernel, in which exchanging them costs next to nothing
(`packed_loops`).

All are rules for `vmap` (`jax.custom_batching`), put into a program after it was differentiated:
what is written here has forward mode. Branches may have a reverse instead, for gradients of weights
that all lanes share; or run in lock step, which has both.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jedbatch._jaxpr.basic_blocks import differs_in_length, is_cut, is_nest
from jedbatch._jaxpr.branches import LaneBranch, apart, apart_with_reverse
from jedbatch._jaxpr.interpret import reads, shape_of, used_variables, with_programs, work
from jedbatch._jaxpr.lane_loops import as_function
from jedbatch._jaxpr.lane_steps import note_form
from jedbatch._jaxpr.packed_loops import PackableLoop, packs
from jedbatch._jaxpr.program_counters import LaneRule, pays, run_lanes
from jedbatch._jaxpr.single_instances import ends_alone, goes_on_alone
from jedbatch._jaxpr.single_kernel import is_tried
from jedbatch._jaxpr.trip_counts import with_equal_trips
from jedbatch._jaxpr.versions import (
    Equation,
    OpenProgram,
    is_program,
    with_equations,
    without_consts,
)
from jedbatch._support.types import Array, ControlFlowName

BranchesName = Literal["forward", "reverse", "both"]

BRANCH_WORK = 20.0  # of all branches for all lanes, in steps' starts, for them to be kept apart

LANES, LOCK_STEP = "by lanes", "in lock step"  # forms, as users are told

# Of these JAX expects that the same results differ from lane to lane whether differentiated or not;
# here all results of a loop do.
RULES_OF_REVERSE = ("custom_vjp_call", "custom_vjp_call_jaxpr")


def without_lock_step(
    program: Any,
    mode: ControlFlowName,
    branches: BranchesName = "forward",
    rule: LaneRule | None = None,
) -> Any:
    """Returns a program whose loops and branches do not wait for other lanes under `vmap`.

    Args:
      program: closed or open.
      mode: "auto" where it is expected to pay, "lanes" wherever there are enough lanes, "lockstep"
        nowhere.
      branches: the mode in which those can be differentiated: "forward", "reverse", or "both",
        which has them in lock step.
      rule: how lanes run, and what it costs; None for the default.
    """
    if mode == "lockstep" or not diverges(program):
        return program
    program = with_equal_trips(program)
    rule = rule or LaneRule()
    jaxpr = without_consts(program)
    return with_equations(program, _with_nests(jaxpr, mode, branches, rule))


def _without_lock_step(
    equations: Sequence[Equation], mode: ControlFlowName, branches: BranchesName, rule: LaneRule
) -> list[Any]:
    change = functools.partial(without_lock_step, mode=mode, branches=branches, rule=rule)
    eqns = []
    for eqn in equations:
        name = eqn.primitive.name
        values_decide = name in _RULES and not _by_platform(eqn)
        if values_decide and not eqn.effects and (name != "cond" or branches != "both"):
            own = _RULES[name](eqn, mode, branches, rule)
            run = functools.partial(eqn.primitive.bind, **eqn.params)
            eqns.append(_ruled(run, own, eqn.invars, eqn.outvars))
        elif name in RULES_OF_REVERSE and branches != "forward":
            eqns.append(eqn)
        else:
            eqns.append(with_programs(eqn, change))
    return eqns


def diverges(program: Any) -> bool:
    """Returns whether values decide what a program does, in it or somewhere inside."""
    for eqn in without_consts(program).eqns:
        if eqn.primitive.name in _RULES and not _by_platform(eqn):
            return True
        values = [x for p in eqn.params.values() for x in (p if type(p) in (tuple, list) else [p])]
        if any(diverges(x) for x in values if is_program(x)):
            return True
    return False


def _by_platform(eqn: Equation) -> bool:
    """Returns whether a branch is chosen for the platform, as in `jnp.diag`, and not by a value."""
    return eqn.params.get("branches_platforms") is not None


def _ruled(run: Callable, rule: Callable, operands: list[Any], results: list[Any]) -> Any:
    """Returns an operation that runs a function, and has another rule for `vmap`."""
    call = jax.custom_batching.custom_vmap(run)
    call.def_vmap(rule)
    (called,) = jax.make_jaxpr(call)(*(v.aval for v in operands)).eqns
    return called.replace(invars=operands, outvars=results)


def _in_lock_step(eqn: Equation, in_batched: Sequence[bool], args: Sequence[Array]) -> Any:
    """Returns what JAX's own rule does, and that all results are of lanes."""
    axes = [0 if batched else None for batched in in_batched]
    outs = jax.vmap(lambda *xs: eqn.primitive.bind(*xs, **eqn.params), axes)(*args)
    return outs, [True] * len(outs)


def _runs_by_lanes(
    what: str,
    program: Any,
    args: Sequence[Array],
    in_batched: Sequence[bool],
    size: int,
    mode: ControlFlowName,
    rule: LaneRule,
) -> bool:
    """Returns whether a program is to run by lanes, and notes it."""
    by_lanes = size > 1 and (mode == "lanes" or pays(program, args, in_batched, size, rule))
    note_form(what, LANES if by_lanes else LOCK_STEP, size)
    return by_lanes


# --- loops in loops ---


def _with_nests(
    jaxpr: OpenProgram,
    mode: ControlFlowName,
    branches: BranchesName,
    rule: LaneRule,
) -> Sequence[Equation]:
    """Returns the equations without lock step, one in place of those that program counters run.

    It stands for all from the first of them to the last, or for one each where it might be
    differentiated in reverse.
    """
    eqns = list(jaxpr.eqns)
    nests = [i for i, eqn in enumerate(eqns) if is_nest(eqn)]
    if branches == "both":
        nests = [i for i in nests if eqns[i].primitive.name in ("while", "scan", "cond")]
    if not nests or branches == "reverse":
        return _without_lock_step(eqns, mode, branches, rule)
    ranges = [(i, i + 1) for i in nests]
    if branches == "forward":
        loops = [i for i, eqn in enumerate(eqns) if is_cut(eqn, [True] * len(eqn.invars))]
        ranges = [(loops[0], loops[-1] + 1)]
    found: list[Any] = []
    end = 0
    for first, last in ranges:
        read = {v for eqn in eqns[last:] for v in reads(eqn)}
        read.update(v for v in jaxpr.outvars if isinstance(v, Var))
        nest = _nest(jaxpr, eqns[first:last], read, mode, branches, rule)
        found += [*_without_lock_step(eqns[end:first], mode, branches, rule), nest]
        end = last
    return [*found, *_without_lock_step(eqns[end:], mode, branches, rule)]


def _nest(
    jaxpr: OpenProgram,
    eqns: list[Equation],
    read: set[Var],
    mode: ControlFlowName,
    how: BranchesName,
    lanes: LaneRule,
) -> Any:
    """Returns one equation for some; `read` is what others read, the rest of `_with_nests`."""
    made = {v for eqn in eqns for v in eqn.outvars}
    operands = list(dict.fromkeys(v for eqn in eqns for v in reads(eqn) if v not in made))
    results = [v for eqn in eqns for v in eqn.outvars if v in read]
    part = jaxpr.replace(constvars=[], invars=operands, outvars=results, eqns=eqns)
    closed = jax.make_jaxpr(functools.partial(jax.core.eval_jaxpr, part, []))(
        *(shape_of(v) for v in operands)
    )
    run = as_function(closed)
    waiting = with_equations(closed, _without_lock_step(closed.jaxpr.eqns, mode, how, lanes))
    can_reverse = how == "both" and eqns[0].primitive.name != "while"

    def rule(size: int, in_batched: Sequence[bool], *args: Array) -> Any:
        axes, every = [0 if batched else None for batched in in_batched], [True] * len(results)
        otherwise = jax.vmap(as_function(waiting), axes, axis_size=size)
        given = closed, args, in_batched, size
        if not _runs_by_lanes("loops in loops", *given, mode, lanes):
            return otherwise(*args), every
        return run_lanes(*given, otherwise if can_reverse else None, lanes), every

    return _ruled(run, rule, operands, results)


# --- loops ---


def _rule_of_while(
    eqn: Equation, mode: ControlFlowName, branches: BranchesName, lanes: LaneRule
) -> Callable:
    num_cond = eqn.params["cond_nconsts"]
    num_consts = num_cond + eqn.params["body_nconsts"]
    body_work = sum(map(work, eqn.params["body_jaxpr"].jaxpr.eqns))
    closed = jax.make_jaxpr(functools.partial(eqn.primitive.bind, **eqn.params))(
        *map(shape_of, eqn.invars)
    )

    def packable(size: int, in_consts: Sequence[bool], consts: Sequence[Array]) -> Any:
        """Returns the loop as one that a kernel may run; None if it is not to."""
        is_small = packs(size, body_work, lanes.step_work) and not is_nest(eqn)
        if not (mode == "auto" and lanes.nests and is_small and is_tried()):
            return None
        alone = ends_alone(eqn.params["cond_jaxpr"]), goes_on_alone(eqn.params["body_jaxpr"])
        return PackableLoop(alone, num_cond, consts, in_consts)

    def rule(size: int, in_batched: Sequence[bool], *args: Array) -> Any:
        if not differs_in_length(eqn, in_batched):
            return _in_lock_step(eqn, in_batched, args)
        every = [True] * len(eqn.outvars)
        loop = packable(size, in_batched[:num_consts], args[:num_consts])
        pairs = zip(args[num_consts:], in_batched[num_consts:], strict=True)
        start = [x if b else jnp.broadcast_to(x, (size, *jnp.shape(x))) for x, b in pairs]
        if loop is not None and loop.runs_in_kernel(start):
            note_form("loops", LANES, size)
            return loop.run(start, body_work), every
        given = closed, list(map(jnp.asarray, args)), in_batched, size
        if not _runs_by_lanes("loops", *given, mode, lanes):
            return _in_lock_step(eqn, in_batched, args)
        return run_lanes(*given, None, lanes), every

    return rule


# --- branches ---


def _rule_of_cond(
    eqn: Equation, mode: ControlFlowName, how: BranchesName, lanes: LaneRule
) -> Callable:
    branches = [_branch(x, mode, how, lanes) for x in eqn.params["branches"]]
    run = apart_with_reverse if how == "reverse" else apart
    branch_work = [sum(map(work, x.jaxpr.eqns)) for x in eqn.params["branches"]]

    def rule(size: int, in_batched: Sequence[bool], index: Array, *args: Array) -> Any:
        pays = mode == "lanes" or size * sum(branch_work) >= BRANCH_WORK * lanes.step_work
        is_apart = size >= 2 * lanes.branch_lanes and pays
        if in_batched[0]:
            note_form("branches", LANES if is_apart else LOCK_STEP, size)
        if not in_batched[0] or not is_apart:
            return _in_lock_step(eqn, in_batched, (index, *args))
        outs = run(branches, index, list(args), in_batched[1:], lanes.branch_lanes)
        return outs, [True] * len(outs)

    return rule


def _branch(closed: Any, mode: ControlFlowName, how: BranchesName, lanes: LaneRule) -> LaneBranch:
    jaxpr = closed.jaxpr
    used = used_variables(jaxpr)
    read = frozenset(i for i, v in enumerate(jaxpr.invars) if v in used)
    run = as_function(without_lock_step(closed, mode, how, lanes))
    return LaneBranch(run, read, sum(map(work, jaxpr.eqns)))


_RULES = {"while": _rule_of_while, "cond": _rule_of_cond}
