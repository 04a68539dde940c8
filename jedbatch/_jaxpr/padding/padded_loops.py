"""Loops and branches on padded arrays, of as many steps as each instance needs.

Dynamic programs fill tables over pairs of rows: the chart of a parser [n, n, k], the alignments of
two sequences [n, m]. They do so in loops, `lax.fori_loop` and `lax.scan`, whose number of steps
depends on lengths too, around operations that read and write a few entries of a table.

A table is padded as rows are: entries behind the last row or column hold anything. Every equation
of a body has a rule by which its results are right where they exist, whatever padding holds (see
`padded_rules`); so a body whose equations are run by those rules is right as well, and so
is a loop, if an instance whose steps are over keeps what it has:

    fori_loop(1, n, body, table)        n = 3      1  2  ·  ·
                                        n = 5      1  2  3  4       together 4 steps

Without a gradient, instances that run together take as many steps as the longest of them needs.
What a body writes into a table at some indices, it then writes nowhere for an instance that is
done: the table stays in its place, and nothing is selected. For a gradient the loop becomes a
`scan` of as many steps as there is room for. Steps that are none begin from the first state then,
which a step was meant for: a derivative that is not finite would reach weights as `0 * inf`.

A `lax.fori_loop` up to a length is a `while` to JAX, which has no gradient; with lengths for
numbers it would be a `scan`, which has one. So it has one here.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jedbatch._graph.graph import Graph
from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.gates import Gates, has_finite_derivatives
from jedbatch._jaxpr.interpret import inner_programs, interpret
from jedbatch._jaxpr.padding.axis_rules import SCATTERS
from jedbatch._jaxpr.symbolic_dims import extent_at, grows, is_ragged, symbols_in
from jedbatch._jaxpr.versions import Equation, consts_of, scan_parts, without_consts
from jedbatch._support.types import Array, AxisSize

Known = dict[Any, AxisSize]  # the extents that variables hold as numbers


class PaddedRules(Protocol):
    """The part of `Padded` that loops need; see there."""

    differentiable: bool
    lanes: str | None
    alive: Any
    known: Known
    gates: Gates | None
    flags: Sequence[jax.Array]

    def size(self, extent: AxisSize) -> int: ...

    def length(self, extent: AxisSize) -> jax.Array: ...

    def run(self, eqn: Equation, values: Sequence[jax.Array]) -> list[Array]: ...

    def within(self, alive: Any, chain: frozenset[int], known: Known) -> "PaddedRules": ...


class CountedLoop(NamedTuple):
    """A `while` that counts.

    Attributes:
      counter: number of the carried value that begins at the first index and grows by one.
      limit: position among the operands of the equation of the index that it stops before.
    """

    counter: int
    limit: int


def find_count(eqn: Equation) -> CountedLoop | None:
    """Returns how a `while` counts; None if it stops for another reason."""
    condition, body = (without_consts(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr"))
    num_before, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    (compare,) = condition.eqns
    if condition.outvars != compare.outvars or any(isinstance(v, Literal) for v in compare.invars):
        return None
    counter, limit = map(condition.invars.index, compare.invars)
    if counter < num_before:
        return None
    counter -= num_before
    carried, results = body.invars[num_consts:], body.outvars
    steps = [e for e in body.eqns if results[counter] in e.outvars]
    counts = (
        len(steps) == 1
        and steps[0].primitive.name == "add"
        and steps[0].invars[0] is carried[counter]
        and isinstance(steps[0].invars[1], Literal)
        and steps[0].invars[1].val == 1
    )
    if not counts:
        return None
    if limit < num_before:
        return CountedLoop(counter, limit)
    limit -= num_before
    if results[limit] is not carried[limit]:
        return None
    return CountedLoop(counter, num_before + num_consts + limit)


def may_not_end(program: Any) -> bool:
    """Returns whether a program has, however deep, a `while` that does not count to a limit."""
    return any(
        (eqn.primitive.name == "while" and find_count(eqn) is None)
        or any(map(may_not_end, inner_programs(eqn)))
        for eqn in without_consts(program).eqns
    )


def find_limit(node_type: NodeType) -> int | None:
    """Returns which operand nodes of a type count to that are a `while`; None of others."""
    jaxpr = without_consts(operation_of(node_type).jaxpr)
    if [eqn.primitive.name for eqn in jaxpr.eqns] != ["while"]:
        return None
    count, operands = find_count(jaxpr.eqns[0]), jaxpr.invars[len(node_type.shared) :]
    limit = None if count is None else jaxpr.eqns[0].invars[count.limit]
    return operands.index(limit) if limit in operands else None


def loops_to_lengths(
    graph: Graph, limit_of: Callable[[int], int | None], asks: Callable[[int], bool]
) -> list[int]:
    """Returns the nodes that are loops of as many steps as some array of any length has rows.

    Args:
      graph: of an instance.
      limit_of: `find_limit` of the type of an id.
      asks: whether nodes of a type ask for lengths.
    """
    types = graph.node_type.tolist()
    limits = {t: k for t in set(types) if (k := limit_of(t)) is not None}
    if not limits:
        return []
    begin, maker, found = graph.operand_ptr.tolist(), graph.value_node.tolist(), []
    for node, type_id in enumerate(types):
        if type_id in limits:
            value = int(graph.operand[begin[node] + limits[type_id]])
            if value >= 0 and asks(types[maker[value]]):
                found.append(node)
    return found


def find_chain(body: Any, inputs: Sequence[Var], outputs: Sequence[Any]) -> list[set[int]]:
    """Returns for each carried value the ids of the equations that write into it, if all do.

    Those that write at some indices, and loops around such; the set is empty of a value that is
    computed otherwise.
    """
    maker = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    chains = []
    for begin, out in zip(inputs, outputs, strict=True):
        chain: set[int] = set()
        while isinstance(out, Var) and out is not begin:
            eqn = maker.get(out)
            source = None if eqn is None else _written(eqn, out)
            if source is None:
                break
            chain.add(id(eqn))
            out = source
        chains.append(chain if out is begin else set())
    return chains


def _written(eqn: Equation, out: Var) -> Any:
    """Returns the operand that an equation writes into to give a result; None if it does not."""
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        return eqn.invars[0]
    if name in SCATTERS and eqn.params["dimension_numbers"].scatter_dims_to_operand_dims:
        return eqn.invars[0]
    if name == "while" and find_count(eqn):
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return eqn.invars[first + eqn.outvars.index(out)]
    if name == "scan" and is_table_loop(eqn):
        first, count = scan_parts(eqn)
        k = eqn.outvars.index(out)
        return eqn.invars[first + k] if k < count else None
    return None


def is_table_loop(eqn: Equation) -> bool:
    """Returns whether the program of a loop has ragged arrays, or asks for a length."""
    return eqn.primitive.name == "scan" and bool(symbols_in(eqn.params["jaxpr"]))


def _inner(
    rules: PaddedRules,
    eqn: Equation,
    program: Any,
    args: Sequence[Any],
    alive: Any,
    chain: frozenset[int] = frozenset(),
    atoms: Sequence[Any] = (),
) -> list[Array]:
    """Returns the results of a program on padded arguments.

    Args:
      rules: of the equation that it belongs to.
      eqn: that equation.
      program: to run.
      args: its arguments.
      alive: whether the instance takes this step, or branch.
      chain: ids of equations that write nothing for an instance that does not.
      atoms: for the first arguments, the variables outside that they are.
    """
    jaxpr = without_consts(program)
    known: Known = {}
    for inside, outside in zip(jaxpr.invars, atoms, strict=False):
        extent = extent_of(outside, rules.known)
        if extent is not None:
            known[inside] = extent
    inner = rules.within(alive, chain, known)
    if rules.gates is not None:
        closes = eqn.primitive.name != "cond" and not has_finite_derivatives([eqn])
        inner.gates = rules.gates.inside(eqn, program, closes)
        if closes and alive is not None:
            inner.flags = [flag & alive for flag in rules.flags]
        return inner.gates.run_inside(program, args, inner.flags, inner.run)
    return interpret(jaxpr, consts_of(program), args, inner.run)


def extent_of(atom: Any, known: Known) -> AxisSize | None:
    """Returns the extent that a variable, or a literal, holds as a number; None if it is none."""
    if isinstance(atom, Literal):
        return int(atom.val) if jnp.issubdtype(jnp.result_type(atom.val), jnp.integer) else None
    return known.get(atom)


def note_extent(eqn: Equation, rules: PaddedRules) -> None:
    """Notes that the result of an equation is an extent, or a sum of extents, if its dtype fits."""
    name, out = eqn.primitive.name, eqn.outvars[0]
    if name == "dim_as_value":
        extent = eqn.params["dim"]
    elif name in ("convert_element_type", "copy", "add", "sub"):
        if out.aval.shape or not jnp.issubdtype(out.aval.dtype, jnp.integer):
            return
        values: list[Any] = [extent_of(v, rules.known) for v in eqn.invars]
        if any(x is None for x in values):
            return
        a, *rest = values
        extent = a if not rest else a + rest[0] if name == "add" else a - rest[0]
    else:
        return
    if _fits(extent, out.aval.dtype, rules):
        rules.known[out] = extent


def _fits(extent: AxisSize, dtype: Any, rules: PaddedRules) -> bool:
    """Returns whether an extent does not wrap around in a dtype, wherever there is room for it."""
    if dtype in (np.int32, np.int64):
        return True
    if not _has_room(extent):
        return False
    least = extent_at(extent, dict.fromkeys(symbols_in(extent), 0))
    return bool(jnp.iinfo(dtype).min <= least and rules.size(extent) <= jnp.iinfo(dtype).max)


def run_while(rules: PaddedRules, eqn: Equation, values: Sequence[Any]) -> list[Array]:
    """Returns the results of a `while`."""
    params = eqn.params
    num_before = params["cond_nconsts"]
    first = num_before + params["body_nconsts"]
    before, consts, init = values[:num_before], values[num_before:first], values[first:]
    count = find_count(eqn)
    body = params["body_jaxpr"]
    atoms = list(eqn.invars[num_before:first])
    if count is None:

        def condition(carry: Any) -> Array:
            (more,) = _inner(rules, eqn, params["cond_jaxpr"], [*before, *carry], rules.alive)
            return more if rules.alive is None else more & rules.alive

        def step(carry: Any) -> Any:
            return _inner(rules, eqn, body, [*consts, *carry], rules.alive, atoms=atoms)

        return list(lax.while_loop(condition, step, list(init)))
    begin, limit = init[count.counter], values[count.limit]
    steps = _span(*(jnp.asarray(x, eqn.invars[count.limit].aval.dtype) for x in (begin, limit)))
    begin_of, limit_of = (
        extent_of(eqn.invars[k], rules.known) for k in (first + count.counter, count.limit)
    )
    bound = None
    if begin_of is not None and limit_of is not None:
        span = limit_of - begin_of
        bound = max(0, rules.size(span)) if _has_room(span) else None
    inner_jaxpr = without_consts(body)
    chains = find_chain(inner_jaxpr, inner_jaxpr.invars[len(consts) :], inner_jaxpr.outvars)

    def run_step(k: Any, alive: Any, carry: list[Any], chain: frozenset[int]) -> list[Array]:
        return _inner(rules, eqn, body, [*consts, *carry], alive, chain, atoms)

    carry, _ = _run_steps(rules, run_step, list(init), steps, bound, chains, ([], lambda k: k))
    return carry


def _span(begin: jax.Array, limit: jax.Array) -> jax.Array:
    """Returns int32[], the steps from a whole number to another one; 0 if that one is less.

    The difference of two numbers of a dtype may be out of its range, but as an unsigned number of
    as many bits it is right.
    """
    dtype = np.uint64 if limit.dtype.itemsize > 4 else np.uint32
    span = jnp.where(begin < limit, limit.astype(dtype) - begin.astype(dtype), dtype(0))
    return jnp.minimum(span, dtype(np.iinfo(np.int32).max)).astype(np.int32)


def _has_room(span: AxisSize) -> bool:
    return not symbols_in(span) or grows(span)


def run_scan(rules: PaddedRules, eqn: Equation, values: Sequence[Any]) -> list[Array]:
    """Returns the results of a `scan` whose body has ragged arrays."""
    params, body = eqn.params, eqn.params["jaxpr"]
    cuts = tuple(itertools.accumulate(scan_parts(eqn)))
    consts, init, xs = values[: cuts[0]], values[cuts[0] : cuts[1]], values[cuts[1] :]
    length, room = rules.length(params["length"]), rules.size(params["length"])
    inner_jaxpr = without_consts(body)
    num_carried = len(init)
    chains = find_chain(
        inner_jaxpr,
        inner_jaxpr.invars[cuts[0] : cuts[1]],
        inner_jaxpr.outvars[:num_carried],
    )
    atoms = list(eqn.invars[: cuts[0]])

    def place(k: Any) -> Any:
        return length - 1 - k if params["reverse"] else k

    def run_step(k: Any, alive: Any, carry: list[Any], chain: frozenset[int]) -> list[Array]:
        at = jnp.clip(place(jnp.where(alive, k, 0)), 0, max(0, room - 1))
        rows = [lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in xs]
        return _inner(rules, eqn, body, [*consts, *carry, *rows], alive, chain, atoms)

    shapes = [
        jax.ShapeDtypeStruct(
            (room, *(d if type(d) is int else rules.size(d) for d in v.aval.shape[1:])),
            v.aval.dtype,
        )
        for v in eqn.outvars[num_carried:]
    ]
    if room == 0:
        return [*init, *(jnp.zeros(s.shape, s.dtype) for s in shapes)]
    carry, ys = _run_steps(rules, run_step, list(init), length, room, chains, (shapes, place))
    return [*carry, *ys]


def _run_steps(
    rules: PaddedRules,
    run_step: Callable,
    init: list[Any],
    steps: Any,
    bound: int | None,
    chains: list[set[int]],
    written: tuple[list[jax.ShapeDtypeStruct], Callable],
) -> tuple[list[Array], list[Array]]:
    """Returns (what is carried, what is written) after so many steps of each instance.

    Args:
      rules: of the equation.
      run_step: from (number, whether the instance takes it, carried values, chain) to results.
      init: carried values.
      steps: int32[], of the instance.
      bound: how many there can be at most; None if that is not known.
      chains: see `find_chain`.
      written: (shapes of the results of all steps, where step k writes them).
    """
    shapes, place = written
    if rules.alive is not None:
        steps = jnp.where(rules.alive, steps, 0)
    if rules.differentiable and bound is not None:
        first = list(map(lax.stop_gradient, init))

        def safe_step(carry: list[Any], k: Any) -> Any:
            alive = k < steps
            safe = [jnp.where(alive, x, y) for x, y in zip(carry, first, strict=True)]
            new = run_step(k, alive, safe, frozenset())
            kept = [jnp.where(alive, x, y) for x, y in zip(new, carry, strict=False)]
            return kept, new[len(carry) :]

        carry, ys = lax.scan(
            jax.checkpoint(safe_step, prevent_cse=False), init, jnp.arange(bound, dtype=jnp.int32)
        )
        if shapes:
            at = jnp.clip(place(jnp.arange(bound)), 0, max(0, bound - 1))
            ys = [y[at] for y in ys]  # a loop from the end: step k is that of another row
        return list(carry), list(ys)
    chain = frozenset(itertools.chain(*chains))
    longest = steps if rules.lanes is None else lax.pmax(steps, rules.lanes)
    buffers = [jnp.zeros(s.shape, s.dtype) for s in shapes]

    def step(state: Any) -> Any:
        k, carry, buffers = state
        alive = k < steps
        new = run_step(k, alive, carry, chain)
        kept = [
            x if links else jnp.where(alive, x, y)
            for x, y, links in zip(new, carry, chains, strict=False)
        ]
        if buffers:
            at = jnp.where(alive, place(k), len(buffers[0]))
            rows = new[len(carry) :]
            buffers = [b.at[at].set(x, mode="drop") for b, x in zip(buffers, rows, strict=True)]
        return k + 1, kept, buffers

    _, carry, buffers = lax.while_loop(
        lambda state: state[0] < longest, step, (jnp.zeros_like(longest), init, buffers)
    )
    return carry, buffers


def run_cond(rules: PaddedRules, eqn: Equation, values: Sequence[Any]) -> list[Array]:
    """Returns the results of a `cond` or `switch`."""
    index, *operands = values
    branches = eqn.params["branches"]
    which = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
    atoms = list(eqn.invars[1:])

    def branch(k: int) -> Callable:
        def run(*xs: Any) -> list[Array]:
            alive = which == k if rules.alive is None else (which == k) & rules.alive
            return _inner(rules, eqn, branches[k], xs, alive, atoms=atoms)

        return run

    return list(lax.switch(which, [branch(k) for k in range(len(branches))], *operands))


LOOPS: dict[str, Callable] = {"while": run_while, "scan": run_scan, "cond": run_cond}


def runs_inside(eqn: Equation) -> bool:
    """Returns whether an equation is a loop or branch whose programs are run by padded rules."""
    if eqn.primitive.name not in LOOPS:
        return False
    variables = (*eqn.invars, *eqn.outvars)
    ragged = any(is_ragged(v.aval.shape) for v in variables)
    if eqn.primitive.name == "scan":
        return is_table_loop(eqn)
    counts = eqn.primitive.name == "while" and find_count(eqn) is not None  # to a length, maybe
    return ragged or counts or bool(symbols_in(eqn.params))
