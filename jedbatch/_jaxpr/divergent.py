"""Loops and branches that values decide on, for many lanes at a time, without lock step.

`jax.vmap` runs a `while_loop` for all lanes until the last of them is done, and all branches of a
`cond` or `switch` for every lane. Here, once so many lanes are done that a step of all would be a
waste, the others run a few at a time: one that is done leaves, and the next that waits takes its
place. Of branches each runs for its own lanes, in blocks. Every lane computes what it would compute
alone. Loops and branches inside of `scan`, `jit` and the like run so too; loops that take about as
many trips in each lane, as far as their programs say, are loops of all lanes (`trip_counts`).

Where a step has little work, lanes that are done are not exchanged for others: the loop runs in
lock step, and narrows as they get fewer (`narrowing`); unless a CPU can run it as one kernel, in
which exchanging them costs next to nothing (`packed_loops`).

Where loops are nested, or branches with much work are in a loop, lanes have program counters
instead: `program_counters` runs all from the first such loop to the last one as one program.

All are rules for `vmap` (`jax.custom_batching`), put into a program after it was differentiated:
what is written here has forward mode. Branches may have a reverse instead, for gradients of weights
that all lanes share; or run in lock step, which has both.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from jedbatch._jaxpr.basic_blocks import is_cut, is_nest
from jedbatch._jaxpr.branches import LaneBranch, apart, apart_with_reverse
from jedbatch._jaxpr.interpret import reads, shape_of, used_variables, with_programs, work
from jedbatch._jaxpr.lane_loops import LoopOfLanes, Repeats, carries_of_lanes, where_lanes
from jedbatch._jaxpr.lane_steps import is_counting, note_form, tell
from jedbatch._jaxpr.narrowing import counted, narrowed, narrower_widths, rows_at
from jedbatch._jaxpr.packed_loops import PackableLoop, packs
from jedbatch._jaxpr.program_counters import STEP_WORK, LaneRule, pays, run_lanes
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

LEAST_LANES = 8  # that run at the same time
LONGEST = 6.0  # the longest loop of many, as a multiple of the mean, where nothing is known
FEWEST = 4  # times as many lanes as run at a time, for a loop to be refilled
EXCHANGE = 4.0  # starts of steps; loops whose steps of some at a time do less narrow instead
MANY_BYTES = 1 << 17  # of lanes that run, beyond which those that change are moved one by one
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
    repeats: Var | None = None,
) -> Any:
    """Returns a program whose loops and branches do not wait for other lanes under `vmap`.

    Args:
      program: closed or open.
      mode: "auto" where it is expected to pay, "lanes" wherever there are enough lanes, "lockstep"
        nowhere.
      branches: the mode in which those can be differentiated: "forward", "reverse", or "both",
        which has them in lock step.
      rule: how lanes run, and what it costs; None for the default.
      repeats: a variable that has whether a lane has the operands of the last one, where the
        program is run; of these lanes loops that are in no other program run one.
    """
    if mode == "lockstep" or not diverges(program):
        return program
    program = with_equal_trips(program)
    rule = rule or LaneRule()
    jaxpr = without_consts(program)
    return with_equations(program, _with_nests(jaxpr, mode, branches, rule, repeats))


def _without_lock_step(
    equations: Sequence[Equation],
    mode: ControlFlowName,
    branches: BranchesName,
    rule: LaneRule,
    repeats: Var | None = None,
) -> list[Any]:
    change = functools.partial(without_lock_step, mode=mode, branches=branches, rule=rule)
    eqns = []
    for eqn in equations:
        name = eqn.primitive.name
        values_decide = name in _RULES and not _by_platform(eqn)
        if values_decide and not eqn.effects and (name != "cond" or branches != "both"):
            own = repeats if name == "while" else None
            eqns.append(_ruled(eqn, _RULES[name](eqn, mode, branches, rule), own))
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


def _ruled(eqn: Equation, rule: Callable, repeats: Var | None) -> Any:
    """Returns an operation with another rule for `vmap`, which reads what `repeats`, too."""
    operands = [*eqn.invars, *_present(repeats)]

    @jax.custom_batching.custom_vmap
    def call(*xs: Array) -> Any:
        return eqn.primitive.bind(*xs[: len(eqn.invars)], **eqn.params)

    call.def_vmap(rule)
    traced = jax.make_jaxpr(call)(*(v.aval for v in operands))
    (called,) = traced.eqns
    return eqn.replace(primitive=called.primitive, params=called.params, invars=operands)


def _present(v: Var | None) -> list[Var]:
    return [] if v is None else [v]


def _in_lock_step(eqn: Equation, in_batched: Sequence[bool], args: Sequence[Array]) -> Any:
    """Returns what JAX's own rule does, and that all results are of lanes."""
    axes = [0 if batched else None for batched in in_batched]
    outs = jax.vmap(lambda *xs: eqn.primitive.bind(*xs, **eqn.params), axes)(*args)
    return outs, [True] * len(outs)


# --- loops in loops ---


def _with_nests(
    jaxpr: OpenProgram,
    mode: ControlFlowName,
    branches: BranchesName,
    rule: LaneRule,
    repeats: Var | None,
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
        return _without_lock_step(eqns, mode, branches, rule, repeats)
    ranges = [(i, i + 1) for i in nests]
    if branches == "forward":
        loops = [i for i, eqn in enumerate(eqns) if is_cut(eqn, [True] * len(eqn.invars))]
        ranges = [(loops[0], loops[-1] + 1)]
    found: list[Any] = []
    end = 0
    for first, last in ranges:
        read = {v for eqn in eqns[last:] for v in reads(eqn)}
        read.update(v for v in jaxpr.outvars if isinstance(v, Var))
        nest = _nest(jaxpr, eqns[first:last], read, mode, branches, rule, repeats)
        found += [*_without_lock_step(eqns[end:first], mode, branches, rule, repeats), nest]
        end = last
    return [*found, *_without_lock_step(eqns[end:], mode, branches, rule, repeats)]


def _nest(
    jaxpr: OpenProgram,
    eqns: list[Equation],
    read: set[Var],
    mode: ControlFlowName,
    how: BranchesName,
    lanes: LaneRule,
    repeats: Var | None,
) -> Any:
    """Returns one equation for some; `read` is what others read, the rest of `_with_nests`."""
    made = {v for eqn in eqns for v in eqn.outvars}
    operands = list(dict.fromkeys(v for eqn in eqns for v in reads(eqn) if v not in made))
    results = [v for eqn in eqns for v in eqn.outvars if v in read]
    part = jaxpr.replace(constvars=[], invars=operands, outvars=results, eqns=eqns)
    closed = jax.make_jaxpr(functools.partial(jax.core.eval_jaxpr, part, []))(
        *(shape_of(v) for v in operands)
    )
    waiting = with_equations(closed, _without_lock_step(closed.jaxpr.eqns, mode, how, lanes))
    can_reverse = how == "both" and eqns[0].primitive.name != "while"
    given = [*operands, *_present(repeats)]

    def rule(size: int, in_batched: Sequence[bool], *found: Array) -> Any:
        args, in_batched = found[: len(operands)], in_batched[: len(operands)]
        like_last = None if repeats is None else found[-1]
        if not any(in_batched):  # but what repeats
            outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
            return outs, [False] * len(outs)
        axes = [0 if batched else None for batched in in_batched]

        def otherwise(*args: Array) -> list[Array]:
            run = functools.partial(jax.core.eval_jaxpr, waiting.jaxpr, waiting.consts)
            found: list[Array] = jax.vmap(run, axes, axis_size=size)(*args)
            return found

        by_lanes = mode == "lanes" or pays(closed, args, in_batched, size, lanes)
        note_form("loops in loops", LANES if size > 1 and by_lanes else LOCK_STEP, size)
        if size < 2 or not by_lanes:
            outs = otherwise(*args)
        else:
            in_lock_step = otherwise if can_reverse else None
            outs = run_lanes(closed, args, in_batched, size, in_lock_step, lanes, like_last)
        return outs, [True] * len(outs)

    @jax.custom_batching.custom_vmap
    def call(*xs: Array) -> Any:
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs[: len(operands)])

    call.def_vmap(rule)
    traced = jax.make_jaxpr(call)(*map(shape_of, given))
    (called,) = traced.eqns
    return called.replace(invars=given, outvars=results)


# --- loops ---


def _rule_of_while(
    eqn: Equation, mode: ControlFlowName, branches: BranchesName, lanes: LaneRule
) -> Callable:
    num_cond = eqn.params["cond_nconsts"]
    num_consts, num_operands = num_cond + eqn.params["body_nconsts"], len(eqn.invars)
    alone = ends_alone(eqn.params["cond_jaxpr"]), goes_on_alone(eqn.params["body_jaxpr"])
    decides = _what_decides(eqn)
    body_work = sum(map(work, eqn.params["body_jaxpr"].jaxpr.eqns))

    def rule(size: int, in_batched: Sequence[bool], *given: Array) -> Any:
        args, in_batched = given[:num_operands], in_batched[:num_operands]
        repeats = Repeats(*given[num_operands:])
        if not any(in_batched):  # but what repeats
            outs = eqn.primitive.bind(*args, **eqn.params)
            return outs, [False] * len(outs)
        if not any(in_batched[i] for i in decides):
            return _in_lock_step(eqn, in_batched, args)
        at_a_time = lanes_at_a_time(size, body_work, mode, lanes.step_work)
        is_refilled = size >= FEWEST * at_a_time
        is_light = at_a_time * body_work < EXCHANGE * lanes.step_work and not is_nest(eqn)
        is_narrow = mode == "auto" and lanes.nests and is_light
        widths = narrower_widths(size, body_work, lanes.step_work) if is_narrow else []
        consts, in_consts = args[:num_consts], in_batched[:num_consts]
        start = carries_of_lanes(args[num_consts:], in_batched[num_consts:], size)
        if is_narrow and is_tried() and packs(size, body_work, lanes.step_work):
            packable = PackableLoop(alone, num_cond, consts, in_consts)
            if packable.runs_in_kernel(start):
                note_form("loops", LANES, size)
                outs = packable.run(start, repeats, widths, body_work, lanes.step_work)
                return outs, [True] * len(outs)
        narrows = f"{LOCK_STEP} that narrows"
        note_form("loops", narrows if widths else LANES if is_refilled else LOCK_STEP, size)
        if not (widths or is_refilled):
            return _in_lock_step(eqn, in_batched, args)
        inside: ControlFlowName = "lockstep" if widths else mode
        cond, body = (_function(x, inside, "forward", lanes) for x in alone)
        loop = LoopOfLanes.of(cond, body, num_cond, consts, in_consts)
        goes_on = repeats.begin(loop, start)
        if widths:
            outs = narrowed(loop, start, goes_on, widths, body_work, lanes.step_work)
        else:
            few = lanes_to_wait(size, at_a_time, body_work, lanes.step_work)
            outs = refilled(loop, start, goes_on, at_a_time, few, body_work, lanes.nests)
        return repeats.filled(outs), [True] * len(outs)

    return rule


def lanes_at_a_time(
    size: int, body_work: int, mode: ControlFlowName, step_work: float = STEP_WORK
) -> int:
    """Returns how many lanes of a loop run at the same time, once few are left.

    With fewer, there are more steps; with more, more of them wait at the end. A step costs
    `step_work` and the work of its lanes; where the longest loop takes `LONGEST` times as many
    steps as the mean, what is best grows with the root of the lanes.
    """
    best = math.sqrt(2 * size * step_work / (LONGEST * max(1, body_work)))
    found = 1 << math.ceil(math.log2(max(1.0, best)))
    if mode == "lanes":
        found = min(found, 1 << math.floor(math.log2(max(1.0, size / FEWEST))))
    return max(LEAST_LANES, found)


def lanes_to_wait(size: int, at_a_time: int, body_work: int, step_work: float = STEP_WORK) -> int:
    """Returns how many lanes are left when they no longer run all together.

    By then a step of all costs more for each lane that goes on than steps of some at a time do. At
    least one is done: where all take as many steps, all run together to the end.
    """
    of_all = step_work + size * body_work
    of_some = step_work / at_a_time + body_work
    return max(at_a_time, min(size - 1, int(of_all / of_some)))


def refilled(
    loop: LoopOfLanes,
    start: Sequence[Array],
    goes_on: Array,
    at_a_time: int,
    few: int,
    body_work: int,
    nests: bool = True,
) -> list[Array]:
    """Runs a loop for many lanes until all are done.

    As long as many of them go on, all run, as by `vmap`. Then the others run some at a time: the
    place of one that is done is taken by the next that waits, looked for after every step, or, if
    it `nests`, by a loop around one that runs until some are done.

    Args:
      loop: that runs.
      start: carries at first, [N, ...] each.
      goes_on: bool[N], which lanes run.
      at_a_time: how many lanes run once few are left.
      few: how many lanes that is.
      body_work: floating-point operations of a step of a lane, for counts of steps.
      nests: see `LaneRule`.

    Returns:
      The carries [N, ...] at the end.
    """
    (more, step, own), size = loop, len(start[0])

    def together(state: Any) -> Any:
        goes_on, carry, tally = state
        tally = counted(tally, 0, goes_on)
        carry = where_lanes(goes_on, step(own, carry), carry)
        return goes_on & more(own, carry), carry, tally

    tally = jnp.zeros((2, 3), jnp.int32) if is_counting() else None
    state: Any = goes_on, list(start), tally
    goes_on, ends, tally = lax.while_loop(lambda state: state[0].sum() > few, together, state)
    num_left = goes_on.sum(dtype=jnp.int32)
    (left,) = jnp.nonzero(goes_on, size=few, fill_value=size)
    left = left.astype(jnp.int32)

    def one_step(mine: Sequence[Array], state: Any) -> Any:
        goes_on, carry, tally = state
        tally = counted(tally, 1, goes_on)
        carry = where_lanes(goes_on, step(mine, carry), carry)
        return goes_on & more(mine, carry), carry, tally

    def exchange(state: Any) -> Any:
        """Runs until lanes leave, writes their carries, and puts others in their places."""
        lane, goes_on, next_one, mine, carry, ends, tally = state

        def none_leaves(state: Any) -> Array:
            goes_on = state[0]
            return goes_on.all() | (goes_on.any() & (next_one >= num_left))

        run = functools.partial(one_step, mine)
        state = goes_on, carry, tally
        goes_on, carry, tally = lax.while_loop(none_leaves, run, state) if nests else run(state)
        place = next_one + jnp.cumsum(~goes_on, dtype=jnp.int32) - 1
        comes = jnp.where(goes_on, lane, left.at[place].get(mode="fill", fill_value=size))
        one_by_one = nests and row_bytes * at_a_time >= MANY_BYTES
        put = _put_one_by_one if one_by_one else _put_together
        mine, carry, ends = put(goes_on, lane, comes, own, mine, carry, ends)
        next_one = jnp.minimum(next_one + (~goes_on).sum(dtype=jnp.int32), num_left)
        return comes, comes < size, next_one, mine, carry, ends, tally

    row_bytes = sum(x.nbytes // size for x in (*own, *start))
    lane = left[:at_a_time]
    rows = rows_at(own, lane), rows_at(ends, lane)
    state = lane, lane < size, jnp.minimum(num_left, at_a_time), *rows, ends, tally
    if nests:
        *_, ends, tally = lax.while_loop(lambda state: state[1].any(), exchange, state)
    else:
        state = lax.while_loop(lambda state: state[2] < num_left, exchange, state)
        lane, goes_on, _, mine, carry, ends, tally = state
        run, state = functools.partial(one_step, mine), (goes_on, carry, tally)
        _, carry, tally = lax.while_loop(lambda state: state[0].any(), run, state)
        ends = [x.at[lane].set(y, mode="drop") for x, y in zip(ends, carry, strict=True)]
    if tally is not None:
        tell("loop", [(0, body_work, size), (0, body_work, at_a_time)], tally)
    return ends


def _put_together(
    goes_on: Array,
    leaves: Array,
    comes: Array,
    own: Sequence[Array],
    mine: Sequence[Array],
    carry: Sequence[Array],
    ends: Sequence[Array],
) -> tuple[list[Array], list[Array], list[Array]]:
    """Puts lanes in the places of those that are done; the first is false there.

    Args:
      goes_on: bool[W].
      leaves: int[W], the lane at each place; N where there is none.
      comes: int[W], the lane that is to be there.
      own: constants of all lanes, [N, ...] each.
      mine: those of the lanes at the places, [W, ...] each.
      carry: what these carry.
      ends: what all carry, [N, ...] each.

    Returns:
      (mine, carry, ends) with the lanes that come, and what lanes carried that leave.
    """
    written = jnp.where(goes_on, len(ends[0]), leaves)
    pairs = zip(ends, carry, strict=True)
    ends = [x.at[written].set(y, mode="drop") for x, y in pairs]
    mine = where_lanes(goes_on, mine, rows_at(own, comes))
    return mine, where_lanes(goes_on, carry, rows_at(ends, comes)), ends


def _put_one_by_one(
    goes_on: Array,
    leaves: Array,
    comes: Array,
    own: Sequence[Array],
    mine: Sequence[Array],
    carry: Sequence[Array],
    ends: Sequence[Array],
) -> tuple[list[Array], list[Array], list[Array]]:
    """Does as `_put_together`, and touches rows of lanes that leave and come only."""
    (places,) = jnp.nonzero(~goes_on, size=len(goes_on), fill_value=0)

    def put(i: Array, state: Any) -> Any:
        mine, carry, ends = state
        place = places[i]
        old, new = leaves[place], comes[place]
        pairs = zip(ends, carry, strict=True)
        ends = [x.at[old].set(y[place], mode="drop") for x, y in pairs]
        mine = [x.at[place].set(y.at[new].get(mode="clip")) for x, y in zip(mine, own, strict=True)]
        pairs = zip(carry, ends, strict=True)
        carry = [x.at[place].set(y.at[new].get(mode="clip")) for x, y in pairs]
        return mine, carry, ends

    state = list(mine), list(carry), list(ends)
    found: Any = lax.fori_loop(0, (~goes_on).sum(dtype=jnp.int32), put, state)
    return found


def _what_decides(eqn: Equation) -> set[int]:
    """Returns the positions of the operands that decide how often a loop runs."""
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    in_cond = used_variables(cond)
    consts = {i for i, v in enumerate(cond.invars[:num_cond]) if v in in_cond}
    carried = {i for i, v in enumerate(cond.invars[num_cond:]) if v in in_cond}
    of_body: set[int] = set()
    while True:
        before = len(carried) + len(of_body)
        outs = [body.outvars[i] for i in carried]
        used = used_variables(body.replace(outvars=outs)) | {v for v in outs if isinstance(v, Var)}
        of_body |= {i for i, v in enumerate(body.invars[:num_body]) if v in used}
        carried |= {i for i, v in enumerate(body.invars[num_body:]) if v in used}
        if len(carried) + len(of_body) == before:
            break
    first = num_cond + num_body
    return consts | {num_cond + i for i in of_body} | {first + i for i in carried}


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
    return LaneBranch(_function(closed, mode, how, lanes), read, sum(map(work, jaxpr.eqns)))


def _function(
    closed: Any, mode: ControlFlowName, branches: BranchesName, lanes: LaneRule
) -> Callable:
    """Returns a program of one lane as a function."""
    made = without_lock_step(closed, mode, branches, lanes)
    return functools.partial(jax.core.eval_jaxpr, made.jaxpr, made.consts)


_RULES = {"while": _rule_of_while, "cond": _rule_of_cond}
