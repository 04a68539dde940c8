"""A program cut at its control flow into basic blocks, for lanes at different places in it.

A `while_loop` or `cond` that lanes run differently is where a lane may wait for others. The program
is cut there: what lies between is a *basic block*, which runs from its first operation to its last
and then names the block that comes next. `scan` becomes a loop over blocks where its body is cut,
and calls (`jit`, `checkpoint`, functions with derivatives of their own) are gone through.

What all lanes do alike stays inside of a block as it is: loops whose number of trips is the same
for all lanes and whose bodies are not cut. So do branches with little work, and loops whose body
has little work beside that of the loop around it, in lock step: a lane that waits there loses less
than it costs to put it down and to take it up again. Values that are the same for all lanes are
computed once, before the lanes start.

Blocks assign the carry of a loop; arrays that a `scan` goes along are read and written row by row.
The test of a loop is done twice, before it and at the end of its body, so that the body of an
innermost loop is one block, which may come after itself. `registers` has what is made here.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import any_performs, inner_programs, run_equation, work
from jedbatch._jaxpr.registers import (
    BasicBlock,
    BlockProgram,
    Instruction,
    RowAccess,
    Slot,
    Value,
    find_registers,
    merged,
    same,
)
from jedbatch._jaxpr.single_instances import ends_alone, goes_on_alone
from jedbatch._jaxpr.versions import (
    CALLS,
    Equation,
    OpenProgram,
    consts_of,
    scan_parts,
    without_consts,
)
from jedbatch._support.types import Array

LIGHT = 4000  # floating-point operations of all branches of a `cond` that stays inside of a block
LIGHTER = 16  # times the work of a loop's body that the loop around it does beside, for it to stay


def cut(jaxpr: OpenProgram, consts: Sequence[Array], args: Sequence[Value]) -> BlockProgram:
    """Cuts a program into blocks.

    Args:
      jaxpr: the program of one lane.
      consts: the values of its constants, the same for all lanes.
      args: for each argument a `Slot`, or the array that all lanes share.
    """
    cutter = _Cutter()
    results = cutter.walk(jaxpr, consts, args)
    cutter.end()
    blocks = merged(cutter.blocks)
    operands = tuple(x for x in args if isinstance(x, Slot))
    live = tuple(x for x in results if isinstance(x, Slot))
    find_registers(blocks, live)
    registers = dict.fromkeys([*operands, *live])
    for block in blocks:
        found = [x.array for x in (*block.reads, *block.writes)]
        registers.update(dict.fromkeys([*block.inputs, *block.outputs, *found]))
    return BlockProgram(tuple(blocks), operands, tuple(results), tuple(registers))


def is_cut(eqn: Equation, varies: Sequence[bool], around: int = 0) -> bool:
    """Returns whether an operation is cut.

    Args:
      eqn: the operation.
      varies: which operands differ from lane to lane.
      around: work of the body of the loop that it is in; 0 if it is in none.
    """
    return _analysis(eqn, varies, around)[1]


def differs_in_length(eqn: Equation, varies: Sequence[bool]) -> bool:
    """Returns whether a `while` may run longer in one lane than in another; as in `is_cut`."""
    return _of_while(eqn, varies)[1]


def is_nest(eqn: Equation) -> bool:
    """Returns whether an operation is, or contains, a loop in which something is cut.

    It is asked as if all operands differed from lane to lane.
    """
    if not is_cut(eqn, [True] * len(eqn.invars)):
        return False
    if eqn.primitive.name == "scan":
        return True
    if eqn.primitive.name == "while":
        body = without_consts(eqn.params["body_jaxpr"])
        around = _work_of(body)
        return any(is_cut(x, [True] * len(x.invars), around) for x in body.eqns)
    return any(is_nest(x) for program in inner_programs(eqn) for x in program.eqns)


class _Cutter:
    """Goes through a program and appends to the last of the blocks."""

    def __init__(self) -> None:
        self.blocks = [BasicBlock()]
        self._around = 0  # work of the body of the innermost loop around

    def walk(self, jaxpr: OpenProgram, consts: Sequence[Value], args: Sequence[Value]) -> list:
        """Appends what a program does; returns its results."""
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Value:
            is_literal = isinstance(atom, Literal)
            return np.asarray(atom.val, atom.aval.dtype) if is_literal else env[atom]

        for eqn in jaxpr.eqns:
            found = self._equation(jaxpr, eqn, list(map(value, eqn.invars)))
            env.update(zip(eqn.outvars, found, strict=True))
        return list(map(value, jaxpr.outvars))

    def _copied(self, values: Sequence[Value]) -> list[Slot]:
        """Returns slots that keep some values, whatever is assigned to theirs later."""
        slots = [_slot_of(x) for x in values]
        self._assign(slots, values)
        return slots

    def end(self) -> None:
        """Goes to the end of the program from the last block."""
        self._go(len(self.blocks))

    def _equation(self, jaxpr: OpenProgram, eqn: Equation, values: list[Value]) -> list[Value]:
        varies = [isinstance(x, Slot) for x in values]
        if is_cut(eqn, varies, self._around):
            name = eqn.primitive.name
            if name in CALLS:
                inner = eqn.params[CALLS[name]]
                return self.walk(without_consts(inner), consts_of(inner), values)
            return getattr(self, f"_{name}")(eqn, values)
        is_certain = len(self.blocks) == 1 or not any_performs([eqn], "while")
        if not any(varies) and is_certain:  # a loop may not end where it is not reached
            return run_equation(jaxpr, eqn, values)
        results = tuple(Slot(v.aval.shape, v.aval.dtype) for v in eqn.outvars)
        run = functools.partial(_run, jaxpr, eqn)
        self.blocks[-1].instructions.append(Instruction(run, tuple(values), results, work(eqn)))
        return list(results)

    def _assign(self, slots: Sequence[Slot], values: Sequence[Value]) -> None:
        if slots:
            copies = Instruction(same, tuple(values), tuple(slots))
            self.blocks[-1].instructions.append(copies)

    def _compute(self, run: Callable, *operands: Value) -> Slot:
        """Appends an operation with a scalar int32 or a row as its result."""
        (kind,) = jax.eval_shape(run, *map(_kind_of, operands))
        result = Slot(kind.shape, kind.dtype)
        self.blocks[-1].instructions.append(Instruction(run, operands, (result,)))
        return result

    def _go(self, *targets: int, which: Value = None) -> None:
        self.blocks[-1].targets, self.blocks[-1].which = targets, which

    def _start(self) -> int:
        """Starts a block; returns its number."""
        self.blocks.append(BasicBlock())
        return len(self.blocks) - 1

    def _while(self, eqn: Equation, values: list[Value]) -> list[Value]:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = ends_alone(eqn.params["cond_jaxpr"]), goes_on_alone(eqn.params["body_jaxpr"])
        of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
        carry = values[num_cond + num_body :]
        moves = _moving(without_consts(body), num_body)
        slots = [_slot_of(carry[i]) for i in moves]
        self._assign(slots, [carry[i] for i in moves])
        for i, slot in zip(moves, slots, strict=True):
            carry[i] = slot

        def test() -> Value:
            return self.walk(without_consts(cond), consts_of(cond), [*of_cond, *carry])[0]

        goes_on = test()
        before = len(self.blocks) - 1
        first = self._start()
        outs = self._body(body, [*of_body, *carry])
        self._assign(slots, [outs[i] for i in moves])
        goes_on_again = test()
        last = len(self.blocks) - 1
        after = self._start()
        for number, which in ((before, goes_on), (last, goes_on_again)):
            self.blocks[number].targets, self.blocks[number].which = (after, first), which
        return carry

    def _body(self, program: Any, args: Sequence[Value]) -> list[Value]:
        """Appends the body of a loop; returns its results."""
        around, self._around = self._around, _work_of(program)
        outs = self.walk(without_consts(program), consts_of(program), args)
        self._around = around
        return outs

    def _cond(self, eqn: Equation, values: list[Value]) -> list[Value]:
        index, operands = values[0], values[1:]
        results = [Slot(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        before = len(self.blocks) - 1
        firsts, lasts = [], []
        for branch in eqn.params["branches"]:
            firsts.append(self._start())
            self._assign(results, self.walk(without_consts(branch), consts_of(branch), operands))
            lasts.append(len(self.blocks) - 1)
        after = self._start()
        self.blocks[before].targets, self.blocks[before].which = tuple(firsts), index
        for last in lasts:
            self.blocks[last].targets = (after,)
        return results

    def _scan(self, eqn: Equation, values: list[Value]) -> list[Value]:
        num_consts, num_carried = scan_parts(eqn)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carried]
        arrays = values[num_consts + num_carried :]
        moves = _moving(without_consts(body), num_consts, num_carried)
        slots = [_slot_of(carry[i]) for i in moves]
        index = Slot((), jnp.dtype("int32"))
        start, step, stop = (length - 1, -1, -1) if eqn.params["reverse"] else (0, 1, length)
        self._assign([*slots, index], [*(carry[i] for i in moves), jnp.int32(start)])
        for i, slot in zip(moves, slots, strict=True):
            carry[i] = slot
        self._go(len(self.blocks))
        first = self._start()
        rows = [self._row(x, index) for x in arrays]
        outs = self._body(body, [*consts, *carry, *rows])
        stacked = [Slot(v.aval.shape, v.aval.dtype) for v in eqn.outvars[num_carried:]]
        at, *rows = self._copied([index, *outs[num_carried:]])
        accesses = zip(stacked, rows, strict=True)
        self.blocks[-1].writes += [RowAccess(array, at, row) for array, row in accesses]
        index_after = self._compute(lambda i: [i + jnp.int32(step)], index)
        self._assign([*slots, index], [*(outs[i] for i in moves), index_after])
        goes_on = self._compute(lambda i: [i != stop], index)
        last, after = len(self.blocks) - 1, self._start()
        self.blocks[last].targets, self.blocks[last].which = (after, first), goes_on
        return [*carry, *stacked]

    def _row(self, array: Value, index: Slot) -> Slot:
        """Returns a row of an array, read when the block starts."""
        if not isinstance(array, Slot):
            return self._compute(lambda i: [_row_of(array, i)], index)
        row = Slot(array.shape[1:], array.dtype)
        self.blocks[-1].reads.append(RowAccess(array, index, row))
        return row


def _run(jaxpr: OpenProgram, eqn: Equation, *values: Array) -> list[Array]:
    return run_equation(jaxpr, eqn, values)


def _row_of(array: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _kind_of(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _slot_of(value: Value) -> Slot:
    """Returns another slot for values of the kind of a value."""
    kind = _kind_of(value)
    return Slot(kind.shape, kind.dtype)


def _moving(body: OpenProgram, num_consts: int, num_carried: int | None = None) -> list[int]:
    """Returns the positions of carried values that the body of a loop changes."""
    num_carried = len(body.outvars) if num_carried is None else num_carried
    carried = body.invars[num_consts : num_consts + num_carried]
    pairs = zip(carried, body.outvars[:num_carried], strict=True)
    return [i for i, (before, after) in enumerate(pairs) if before is not after]


# --- what is cut ---


def _analysis(eqn: Equation, varies: Sequence[bool], around: int) -> tuple[list[bool], bool]:
    """Returns (which results differ from lane to lane, whether the operation is cut).

    `around` is the work of the body of the loop that it is in.
    """
    name = eqn.primitive.name
    differs = any(varies)
    everywhere = [differs] * len(eqn.outvars)
    if not any_performs([eqn], "while", "cond") or eqn.effects:
        return everywhere, False
    if name in CALLS:
        return _of_program(eqn.params[CALLS[name]], varies, around)
    if name == "while":
        carried, decides, cuts = _of_while(eqn, varies)
        if not (decides or cuts):
            return carried, False
        for i in _moving(without_consts(eqn.params["body_jaxpr"]), eqn.params["body_nconsts"]):
            carried[i] = True
        own = work(eqn)
        return carried, own * LIGHTER > around - own
    if name == "cond":
        found = [_of_program(x, varies[1:], around) for x in eqn.params["branches"]]
        cuts = any(cuts for _, cuts in found)
        total = sum(work(e) for x in inner_programs(eqn) for e in x.eqns)
        if cuts or (varies[0] and total >= LIGHT):
            return [True] * len(eqn.outvars), True
        return [varies[0] or any(xs) for xs in zip(*(xs for xs, _ in found), strict=True)], False
    if name == "scan" and eqn.params["length"]:
        num_consts, num_carried = scan_parts(eqn)
        consts, rows = varies[:num_consts], list(varies[num_consts + num_carried :])
        carried = list(varies[num_consts : num_consts + num_carried])
        carried, cuts = _of_carry(eqn.params["jaxpr"], consts, carried, rows)
        body = eqn.params["jaxpr"]
        outs, _ = _of_program(body, [*consts, *carried, *rows], _work_of(body))
        if not cuts:
            return outs, False
        for i in _moving(without_consts(eqn.params["jaxpr"]), num_consts, num_carried):
            carried[i] = True
        return [*carried, *[True] * (len(outs) - num_carried)], True
    return everywhere, False


def _of_while(eqn: Equation, varies: Sequence[bool]) -> tuple[list[bool], bool, bool]:
    """Returns (which carried values differ, whether the condition does, whether there is a cut)."""
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = varies[:num_cond], varies[num_cond : num_cond + num_body]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    carried, in_body = _of_carry(body, of_body, list(varies[num_cond + num_body :]), [])
    (decides, *_), in_cond = _of_program(cond, [*of_cond, *carried], _work_of(body))
    return carried, decides, in_cond or in_body


def _work_of(program: Any) -> int:
    return sum(map(work, without_consts(program).eqns))


def _of_program(program: Any, varies: Sequence[bool], around: int) -> tuple[list[bool], bool]:
    """Returns (which results differ from lane to lane, whether something is cut).

    `around` is the work of the body of the innermost loop that the program is, or is in.
    """
    jaxpr = without_consts(program)
    differing = set(itertools.compress(jaxpr.invars, varies))
    cuts = False
    for eqn in jaxpr.eqns:
        given = [isinstance(x, Var) and x in differing for x in eqn.invars]
        found, is_one = _analysis(eqn, given, around)
        cuts = cuts or is_one
        differing.update(itertools.compress(eqn.outvars, found))
    return [isinstance(x, Var) and x in differing for x in jaxpr.outvars], cuts


def _of_carry(
    body: Any, consts: Sequence[bool], carried: list[bool], rows: list[bool]
) -> tuple[list[bool], bool]:
    """Returns (which carried values differ at some time, whether something in the body is cut)."""
    while True:
        outs, cuts = _of_program(body, [*consts, *carried, *rows], _work_of(body))
        after = [a or b for a, b in zip(carried, outs, strict=False)]
        if after == carried:
            return carried, cuts
        carried = after
