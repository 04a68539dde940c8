"""The reverse of a kernel: what it saves, what it sends back, and gradients of weights.

**Weight gradients are deferred.** The gradient of a const is a sum over every lane of every
batch. Adding it up as the reverse sweep goes would read and write a matrix per batch. Where a
const meets a row the operation is *tapped* instead: the sweep leaves behind the cotangent of its
result, one row per lane, and the const's gradient is computed afterwards from all rows at once:
one large matrix product for `x @ w`, one sum for a bias, one scatter for an embedding. Any other
operation with a const (a `scan` over weights, say) is differentiated again from its operands.

The reverse of a lane is `jax.vjp` of the lane. Of what it would save we keep products, and what
reductions make of many elements, such as the maximum in a softmax. Operands, results and consts are
read again, and elementwise work is done again, which costs less than the memory to keep it. A cell
that runs a loop of its own keeps what JAX keeps.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.closed_over import without_tracers
from jedbatch._jaxpr.divergent import without_lock_step
from jedbatch._jaxpr.interpret import (
    body_of,
    cares_for_padding,
    has_gradient,
    inlined,
    is_inexact,
    is_reshape,
    reads,
    run_equations,
    shape_of,
    used_variables,
)
from jedbatch._jaxpr.storage import Kind, all_from_stored, all_to_stored, stored
from jedbatch._jaxpr.unknown_numbers import Starts, run_with_starts, unknown_starts
from jedbatch._jaxpr.versions import Atom, Equation
from jedbatch._jaxpr.zeros import Sources, guarded, sources_of
from jedbatch._kernel.residuals import (
    Residuals,
    Source,
    Sourced,
    keep_some,
    recomputable,
    runs_again,
)
from jedbatch._kernel.weight_gradients import MatrixProduct, Tap, alike, gated_function
from jedbatch._support.types import Array, Leaf

# The derivative with respect to a const does not depend on the rows at all.
ADDITIVE_OPERATIONS = frozenset({"add", "add_any", "sub"})
# Linear in a const, and zero for zero rows: lanes that never ran may hold zeros.
LINEAR_OPERATIONS = ADDITIVE_OPERATIONS | {"dot_general", "mul", "conv_general_dilated"}
# The gradient is a scatter, better done once than block by block.
LOOK_UPS = frozenset({"gather", "dynamic_slice"})

CONSTS = -1  # in place of an operand
MAX_SLOTS = 62  # results of a node told apart; further ones are always alive


def differentiable(value_type: ValueType) -> bool:
    """True of values that have a cotangent."""
    return has_gradient(value_type.dtype)


@jax.custom_jvp
def tap(x: jax.Array, delta: jax.Array) -> jax.Array:
    """x; its derivative with respect to `delta` is as if delta were added."""
    return x


@tap.defjvp
def _tap_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1]


class _Traced(NamedTuple):
    """A kernel traced forward and backward.

    Attributes:
      wanted: variables of rows that taps read, and `row_sources`, where they are found.
      sources: where the backward program finds what it reads, its first arguments.
      saved: types of what is saved.
      forward: from consts and operands to the results and what is saved.
      derived: from consts to what the backward program reads of them.
      backward: from what it reads and cotangents of results to those of operands and of places.
    """

    wanted: list[Var]
    row_sources: list[Sourced]
    sources: list[Sourced]
    saved: list[ValueType]
    forward: Jaxpr
    forward_consts: Sequence[jax.Array]
    derived: Jaxpr
    backward: ClosedJaxpr


class KernelVjp:
    """The reverse of a kernel, found by tracing `jax.vjp` of it and sorting what that saves.

    A list of operands that the kernel takes as one array (`Kernel.parameters`) is one operand here.

    Attributes:
      returned: the results that have a cotangent.
      refused: results that JAX cannot differentiate, each with the operands with respect to which
        it cannot, `CONSTS` for shared values among them. To these nothing is sent back: an error,
        if something would have to be.
      flow: for each operand the results whose cotangents it gets something from.
      saved: (shape, dtype) of the rows `save` returns besides the results.
      cotangents: (shape, dtype) of the rows `backward` leaves for the taps.
      rooms: where each of these is put: over something saved, or behind it, with `extra`,
        (shape, dtype) of what is behind.
      taps: the places whose consts get their gradients from these rows.
      is_leaf: whether nothing is computed backwards: it sends nothing, and what taps need is the
        cotangents of results.
      echoed: of a leaf, the result whose cotangent each of these rows is.
      operands_read, results_read: what `backward` reads again.
    """

    def __init__(
        self,
        kernel: Any,
        returned: list[int],
        moving: Sequence[int] | None = None,
        refused: dict[int, frozenset[int]] | None = None,
    ):
        """Finds the reverse of some results; with `moving`, with respect to these operands."""
        self.kernel = kernel
        self.returned = returned
        self.refused = refused or {}
        self._moving = [j for j in _can_move(kernel) if moving is None or j in moving]
        self._again = recomputable(kernel)
        tapped: list[Equation] = []
        consts: list[int] = []
        if returned and (moving is None or CONSTS in moving):
            tapped = list(filter(self._is_tapped, kernel.body))
            consts = [s for s in returned if self._is_weight(kernel.jaxpr.outvars[s])]
        tapped, traced = self._trace_tapped(tapped, consts)
        self._wanted, self._row_sources = traced.wanted, traced.row_sources
        self._sources = traced.sources
        self._saved_types = traced.saved
        self.saved: tuple[Kind, ...] = tuple(map(stored, traced.saved))
        self.operands_read = {i for source, i in self._sources if source is Source.OPERAND}
        self.results_read = {i for source, i in self._sources if source is Source.RESULT}
        self._forward, self._forward_consts = traced.forward, traced.forward_consts
        self._derived = traced.derived
        backward, self._backward_consts = traced.backward.jaxpr, traced.backward.consts
        sources = self._sources_of_results(backward, len(self._sources))
        places = [*_places_of(tapped), *consts]
        self.flow = self._flow(sources)
        num_moving = len(self._moving)
        self._sources_of = dict(zip(places, sources[num_moving:], strict=True))
        backward, self._row_of = self._share_cotangents(backward, places)
        kept: list[Any] = backward.outvars[num_moving:]
        self.cotangents: tuple[Kind, ...] = tuple((v.aval.shape, v.aval.dtype) for v in kept)
        self.rooms, self.extra = self._find_rooms()
        self.taps = tuple(map(self._make_tap, tapped)) + tuple(map(self._make_returned, consts))
        given = self._given(backward, len(self._sources))
        cotangent_of = dict(zip(given, returned, strict=True))
        self.is_leaf = not self._moving and all(
            isinstance(v, Var) and v in cotangent_of for v in kept
        )
        self.echoed = tuple(cotangent_of[v] for v in kept) if self.is_leaf else ()
        self.is_guarded = len(returned) > 1
        self._backward = backward
        if self.is_guarded:  # the program leaves out cotangents that are not alive
            closed = guarded(backward, self._backward_consts, given)
            self._backward, self._backward_consts = closed.jaxpr, closed.consts
        pairs = zip(self._backward.invars, self._sources, strict=False)
        shared = [v for v, (source, _) in pairs if source in (Source.CONST, Source.DERIVED)]
        self._over_lanes = [
            kernel.over_lanes(self._forward, self._forward.invars[: kernel.num_consts]),
            kernel.over_lanes(self._backward, shared),
        ]

    @classmethod
    def of(cls, kernel: Any) -> "KernelVjp":
        """Returns the reverse of all results that can be differentiated."""
        inexact = [s for s, t in enumerate(kernel.results) if differentiable(t)]
        try:
            return cls(kernel, inexact)
        except Exception:
            refused: dict[int, frozenset[int]] = {}
            for s in inexact:
                every = [CONSTS, *_can_move(kernel)]
                if not _can_differentiate(kernel, s, every):
                    operands = [j for j in every if not _can_differentiate(kernel, s, [j])]
                    refused[s] = frozenset(operands or every)
            if not refused:
                raise
            return cls(kernel, inexact, refused=refused)

    def _trace_tapped(
        self, tapped: list[Equation], consts: list[int]
    ) -> tuple[list[Equation], "_Traced"]:
        """Returns (the tapped operations that something comes back to, the trace with these)."""
        while True:
            read = [v for eqn in tapped for v in self._rows_read(eqn) if v not in self._again]
            places = _places_of(tapped)
            traced = self._trace([*places, *consts], list(dict.fromkeys(read)))
            of_results = self._sources_of_results(traced.backward.jaxpr, len(traced.sources))
            sources = dict(zip(places, of_results[len(self._moving) :], strict=False))
            alive = [e for e in tapped if any(sources.get(v) for v in e.outvars)]
            if len(alive) == len(tapped):
                return tapped, traced
            tapped = alive

    def _sources_of_results(self, backward: Jaxpr, num_read: int) -> list[Sources]:
        """For each result of the backward program the results of the kernel it comes from."""
        per_operand = sources_of(backward, self._given(backward, num_read))
        return [frozenset(self.returned[i] for i in source_ids) for source_ids in per_operand]

    def _given(self, backward: Jaxpr, num_read: int) -> list[Var]:
        """The arguments of the backward program that are cotangents, after what it reads."""
        return backward.invars[num_read : num_read + len(self.returned)]

    @property
    def programs(self) -> list[tuple[Jaxpr, Sequence[Any]]]:
        """The programs that run forwards and backwards, and before, with their constants."""
        derived = self._derived, self._forward_consts
        forward, backward = self._forward, self._backward
        return [(forward, derived[1]), (backward, self._backward_consts), derived]

    @functools.cached_property
    def flow_of_operands(self) -> list[Sources]:
        """`flow`, for each operand of a list by itself."""
        pairs = zip(self.kernel.parameters, self.flow, strict=True)
        return [results for parameter, results in pairs for _ in parameter.operands]

    @functools.cached_property
    def flow_bits(self) -> tuple[int, ...]:
        """`flow_of_operands` as bits: for each operand, bit s for result s."""
        return tuple(
            sum({1 << min(s, MAX_SLOTS) for s in result_ids})
            for result_ids in self.flow_of_operands
        )

    @functools.cached_property
    def inexact_bits(self) -> int:
        """The results that can have a cotangent, as bits."""
        results = enumerate(self.kernel.results)
        return sum({1 << min(s, MAX_SLOTS) for s, kind in results if differentiable(kind)})

    @functools.cached_property
    def is_plain(self) -> bool:
        """Returns whether every result sends a cotangent to every operand that can have one."""
        every = frozenset(self.returned)
        results = len(every) == len(self.kernel.results) and not self.refused
        return results and all(self.flow[j] == every for j in self._moving)

    def meets_consts(self, s: int) -> bool:
        """Returns whether result s depends on shared values."""
        if CONSTS in self.refused.get(s, ()):
            return True
        return any(s in source_ids for tap in self.taps for source_ids in tap.sources)

    def _flow(self, sources: list[Sources]) -> tuple[Sources, ...]:
        flow: list[Sources] = [frozenset()] * len(self.kernel.parameters)
        for j, source_ids in zip(self._moving, sources, strict=False):
            flow[j] = source_ids
        return tuple(flow)

    def _is_tapped(self, eqn: Equation) -> bool:
        meets = any(map(self._is_weight, eqn.invars))
        return meets and any(map(is_inexact, eqn.outvars))

    def _is_weight(self, atom: Atom) -> bool:
        """Returns whether an atom is a const that may have a gradient."""
        kernel = self.kernel
        return kernel.is_const(atom) and is_inexact(atom) and not kernel.is_constant(atom)

    def _rows_read(self, eqn: Equation) -> list[Var]:
        """The row variables that the gradient of a tapped operation's consts depends on."""
        if eqn.primitive.name in ADDITIVE_OPERATIONS:
            return []
        return [v for v in reads(eqn) if not self.kernel.is_const(v)]

    def _trace(self, places: list[Any], wanted: list[Var]) -> "_Traced":
        """Traces forward and backward, and finds where the second gets what it reads."""
        kernel = self.kernel
        forward, backward = self._trace_both(places, wanted)
        jaxpr = forward.jaxpr
        first, end = len(kernel.results), len(kernel.results) + len(wanted)
        outvars = list(jaxpr.outvars)
        results, rows, leaves = outvars[:first], outvars[first:end], outvars[end:]
        residuals_known = Residuals(forward, kernel.num_consts, results)
        row_sources = [
            residuals_known.find(v)
            if isinstance(v, Literal) or v in residuals_known.operands
            else residuals_known.save(v)
            for v in rows
        ]
        used = used_variables(backward.jaxpr)
        sources = [
            residuals_known.find(v) if argument in used else (Source.UNREAD, shape_of(v))
            for v, argument in zip(leaves, backward.jaxpr.invars, strict=False)
        ]
        saved = list(residuals_known.saved)
        return _Traced(
            wanted=wanted,
            row_sources=row_sources,
            sources=sources,
            saved=[ValueType(v.aval.shape, v.aval.dtype) for v in saved],
            forward=jaxpr.replace(outvars=[*results, *saved]),
            forward_consts=forward.consts,
            derived=residuals_known.program_of_derived(),
            backward=backward,
        )

    def _trace_both(self, places: list[Any], wanted: list[Var]) -> tuple[ClosedJaxpr, ClosedJaxpr]:
        """Returns (the forward program, the backward program).

        The first takes consts and operands; it returns the results, the rows that taps want and
        what the second takes, besides cotangents of results.
        """
        kernel = self.kernel
        cheap = runs_again(kernel.body)
        kinds = [(kernel.jaxpr.outvars[p] if isinstance(p, int) else p).aval for p in places]
        structure = []
        # Some rules (of `pure_callback`) refuse to be differentiated whatever comes of it.
        refused = [self.refused.get(s, frozenset()) for s in self.returned]
        hopeless = functools.reduce(frozenset.intersection, refused) if refused else frozenset()

        def save(consts, operands):
            def run(moving, deltas):
                full = list(operands)
                for j, x in zip(self._moving, moving, strict=True):
                    full[j] = x
                moved = dict(zip(places, deltas, strict=True))
                apart = [
                    jax.lax.stop_gradient(x) if j in hopeless else x for j, x in enumerate(full)
                ]
                results, env = kernel.evaluate(consts, apart, {} if CONSTS in hopeless else moved)
                out = [
                    self._stopped(s, consts, full, moved) if s in self.refused else results[s]
                    for s in self.returned
                ]
                return out, (results, [env[v] for v in wanted])

            if cheap:
                run = jax.checkpoint(run, policy=keep_some, prevent_cse=False)
            if not self.returned:  # not even differentiated
                return kernel.forward(consts, operands), [], []
            deltas = [jnp.zeros(a.shape, a.dtype) for a in kinds]
            moving = [operands[j] for j in self._moving]
            _, vjp, (results, rows) = jax.vjp(run, moving, deltas, has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            structure.append(tree)
            return results, rows, leaves

        def back(leaves, cotangents):
            if not self.returned:
                return [jnp.zeros(*kernel.parameters[j].kind) for j in self._moving]
            return jax.tree.unflatten(structure[-1], leaves)(cotangents)

        forward = inlined(
            jax.make_jaxpr(save)(
                [jax.ShapeDtypeStruct(*kind) for kind in kernel.const_kinds],
                [jax.ShapeDtypeStruct(*parameter.kind) for parameter in kernel.parameters],
            )
        )
        backward = jax.make_jaxpr(back)(
            list(map(shape_of, forward.jaxpr.outvars[len(kernel.results) + len(wanted) :])),
            [jax.ShapeDtypeStruct(*stored(kernel.results[s])) for s in self.returned],
        )
        if cheap:
            backward = inlined(backward, body_of("jit", "remat2", "checkpoint"))
        return without_tracers(forward), without_tracers(backward)

    def _stopped(self, s: int, consts: Any, operands: Sequence[Array], deltas: Any) -> Any:
        """Result s with a derivative where it has one; XLA finds that it is computed twice."""
        refused = self.refused[s]
        stop = jax.lax.stop_gradient
        operands = [stop(x) if j in refused else x for j, x in enumerate(operands)]
        deltas = {} if CONSTS in refused else deltas
        return self.kernel.evaluate(consts, operands, deltas)[0][s]

    def _share_cotangents(
        self, backward: Jaxpr, places: list[Any]
    ) -> tuple[Jaxpr, dict[Var | int, int]]:
        """Lets taps with one cotangent (a product and its bias) share a row.

        Returns (the backward program with these rows, the row of each place).
        """
        num_moving = len(self._moving)
        outvars = backward.outvars[num_moving:]
        rows: dict[Var | int, int] = {}
        row_of = {}
        maker = {v: eqn for eqn in backward.eqns for v in eqn.outvars}
        for k, (place, v) in enumerate(zip(places, outvars, strict=True)):
            while isinstance(v, Var) and v in maker and is_reshape(maker[v]):
                v = maker[v].invars[0]
            row_of[place] = rows.setdefault(v if isinstance(v, Var) else k, len(rows))
        kept = [v if isinstance(v, Var) else outvars[v] for v in rows]
        return backward.replace(outvars=[*backward.outvars[:num_moving], *kept]), row_of

    def _find_rooms(self) -> tuple[tuple[int, ...], tuple[Kind, ...]]:
        """Returns (`rooms`, `extra`)."""
        saved_ids = {i for source, i in self._row_sources if source is Source.SAVED}
        free = {i: kind for i, kind in enumerate(self.saved) if i not in saved_ids}
        rooms: list[int] = []
        extra: list[Kind] = []
        for kind in self.cotangents:
            over = next((i for i, other in free.items() if other == kind), None)
            if over is None:
                rooms.append(len(self.saved) + len(extra))
                extra.append(kind)
            else:
                rooms.append(over)
                del free[over]
        return tuple(rooms), tuple(extra)

    def _make_tap(self, eqn: Equation) -> Tap:
        kernel = self.kernel
        consts = list(filter(self._is_weight, reads(eqn)))
        fixed = [v for v in reads(eqn) if kernel.is_const(v) and v not in consts]
        others = self._rows_read(eqn)
        unread = [v for v in reads(eqn) if not kernel.is_const(v) and v not in others]
        results = [v for v in eqn.outvars if self._sources_of.get(v)]

        def rows(operands, saved):
            saved = all_from_stored(saved, self._saved_types)
            env = kernel.environment(operands)
            for v in others:
                if v in self._again:
                    run_equations(self._again[v], env, kernel.run)
                else:
                    source, i = self._row_sources[self._wanted.index(v)]
                    kept = operands if source is Source.OPERAND else saved
                    env[v] = i if source is Source.LITERAL else kept[i]
            return [env[v] for v in others]

        over_lanes = functools.partial(
            without_lock_step, mode=kernel.control_flow, branches="reverse", rule=kernel.lanes
        )
        equations = over_lanes(kernel.jaxpr.replace(eqns=[eqn])).eqns

        def apply(const_values, fixed_values, row_values):
            env = dict(zip(consts, const_values, strict=True))
            env.update(zip(fixed, fixed_values, strict=True))
            env.update(zip(others, row_values, strict=True))
            env.update((v, jnp.zeros(v.aval.shape, v.aval.dtype)) for v in unread)
            run_equations(equations, env, kernel.run)
            return [env[v] for v in results]

        name = eqn.primitive.name
        tap = Tap(
            consts=tuple(map(kernel.const_vars.index, consts)),
            fixed=tuple(map(kernel.const_vars.index, fixed)),
            cotangents=tuple(self._row_of[v] for v in results),
            shapes=tuple(v.aval.shape for v in results),
            sources=tuple(self._sources_of[v] for v in results),
            rows=rows,
            apply=apply,
            linear=name in LINEAR_OPERATIONS or name in LOOK_UPS,
            look_up=name in LOOK_UPS,
            scale=name == "mul" and len(others) == 1 and alike(*eqn.invars, *eqn.outvars),
            product=MatrixProduct.of(eqn, kernel.is_const),
            gated=gated_function(eqn, results, [*consts, *fixed], others, over_lanes),
        )
        if cares_for_padding(eqn):  # nothing else is without a reverse
            tap.refuse(kernel.const_kinds, others, results)
        return tap

    def _make_returned(self, s: int) -> Tap:
        """The tap of a const that is itself a result."""
        const = self.kernel.const_vars.index(self.kernel.jaxpr.outvars[s])
        return Tap(
            consts=(const,),
            fixed=(),
            cotangents=(self._row_of[s],),
            shapes=(self.kernel.results[s].shape,),
            sources=(self._sources_of[s],),
            rows=lambda *_: [],
            apply=lambda consts, *_: list(consts),
        )

    def save(self, consts: Sequence[Array], operands: Sequence[Array]) -> tuple[list, list]:
        """(results, saved) of one lane."""
        out = jax.core.eval_jaxpr(self._over_lanes[0], self._forward_consts, *consts, *operands)
        first = len(self.kernel.results)
        return out[:first], all_to_stored(out[first:], self._saved_types)

    def prepare(self, consts: Sequence[jax.Array]) -> tuple[list, Starts]:
        """Computes what `backward` reads and that depends on consts only; once per program."""
        derived = jax.core.eval_jaxpr(self._derived, self._forward_consts, *consts)
        starts = unknown_starts(self._over_lanes[1]) if self.kernel.in_loops else {}
        return derived, starts

    def backward(
        self, consts, prepared, operands, results, saved, cotangents, alive
    ) -> tuple[list, list]:
        """(cotangents of the operands that have one, rows for the taps) of one lane.

        `alive` says of each result whether its cotangent exists, which is zeros if not; what is
        made of no cotangent that exists may be anything.
        """
        derived, starts = prepared
        found = {
            Source.CONST: consts,
            Source.DERIVED: derived,
            Source.OPERAND: operands,
            Source.RESULT: results,
            Source.SAVED: all_from_stored(saved, self._saved_types),
        }
        leaves: list[Leaf] = []
        for source, x in self._sources:
            if source is Source.UNREAD:
                leaves.append(jnp.zeros(x.shape, x.dtype))
            else:
                leaves.append(x if source is Source.LITERAL else found[source][x])
        cotangents_read = [cotangents[s] for s in self.returned]
        flags = [alive[s] for s in self.returned] if self.is_guarded else []
        given = *leaves, *cotangents_read, *flags
        out = run_with_starts(self._over_lanes[1], self._backward_consts, given, starts)
        return out[: len(self._moving)], out[len(self._moving) :]


def _can_move(kernel: Any) -> list[int]:
    """Returns the operands that can have a cotangent."""
    return [j for j, x in enumerate(kernel.parameters) if differentiable(x.type)]


def _places_of(tapped: Sequence[Equation]) -> list[Var]:
    """Returns the results of tapped operations that have a cotangent."""
    return [v for eqn in tapped for v in eqn.outvars if is_inexact(v)]


def _can_differentiate(kernel: Any, s: int, operands: list[int]) -> bool:
    """Returns whether JAX can differentiate result s with respect to some operands."""
    try:
        KernelVjp(kernel, [s], operands)
    except Exception:
        return False
    return True
