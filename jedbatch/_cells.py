"""What XLA runs for a node type: its program for one lane, forwards and backwards.

A node type brings a jaxpr that maps shared values and operands to results. Three things are
done to it, once, when the type first runs:

**Shared work is lifted out.** What depends on shared values only (`w.T`, a slice of packed
weights) moves to a prologue that runs once per program. It is ordinary JAX, so gradients flow
back through it. What is left maps `consts`, computed by the prologue, and `operands`, one row
each, to results.

**Products put rows first.** For a vector x, JAX writes `x @ w` as `dot_general(w, x)`, which
batches to a transposed result. Swapped, a batch of them is one matrix product of the rows.

**Weight gradients are deferred.** The gradient of a const is a sum over every lane of every
batch. Adding it up as the reverse sweep goes would read and write a matrix per batch. An
operation in which a const meets a row is therefore *tapped*: the sweep leaves behind the
cotangent of its result, one row per lane, and the const's gradient is computed afterwards from
all rows at once: one large matrix product for `x @ w`, one sum for a bias, one scatter for an
embedding. Any other operation with a const is differentiated again from its operands.

The reverse of a lane is `jax.vjp` of the lane. What it saves is looked up in the jaxpr: operands,
results and consts can be read again, only the rest needs room.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, Var

from jedbatch._graph import NodeType, ValueType

# Linear in a const for given rows, and zero for zero rows: lanes never run may be zeros.
_LINEAR = frozenset({"dot_general", "add", "add_any", "sub", "mul", "conv_general_dilated"})
# Their derivative with respect to a const does not depend on the rows at all.
_ADDITIVE = frozenset({"add", "add_any", "sub"})
# The same as linear, and their gradient is a scatter, better done once than block by block.
_LOOK_UPS = frozenset({"gather", "dynamic_slice"})
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# Whatever runs a program of its own is not run again in reverse.
_EXPENSIVE = frozenset({"scan", "while", "cond", "custom_vjp_call"})
PRODUCT = "product"
_keep_products = jax.checkpoint_policies.save_only_these_names(PRODUCT)
# Only move or convert elements: cheaper to do again than to save the result.
_STRUCTURAL = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)


def is_key(dtype: Any) -> bool:
    """True of the dtypes of random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def stored(value_type: ValueType) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) in which a value is kept: random keys as the integers they are made of."""
    if is_key(value_type.dtype):
        key = jax.eval_shape(lambda: jax.random.key_data(jnp.empty((), value_type.dtype)))
        return (*value_type.shape, *key.shape), key.dtype
    return value_type.shape, np.dtype(value_type.dtype)


def has_gradient(dtype: Any) -> bool:
    """True of the dtypes of real and complex numbers."""
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


def differentiable(value_type: ValueType) -> bool:
    """True of values that have a cotangent."""
    return has_gradient(value_type.dtype)


@dataclass(frozen=True, eq=False)
class Tap:
    """An operation in which consts meet rows.

    Attributes:
      consts: positions of the consts it reads that have a gradient.
      fixed: positions of the consts it reads that have none (integers).
      cotangents: which of the rows the sweep leaves behind belong to its results.
      rows: maps (operands, saved) of one lane to the other things it reads.
      apply: maps (consts, fixed, rows) of one lane to its results that have a cotangent.
      linear: zero rows give zero, so lanes that never ran may hold zeros.
      look_up: its gradient is a scatter.
    """

    consts: tuple[int, ...]
    fixed: tuple[int, ...]
    cotangents: tuple[int, ...]
    rows: Callable
    apply: Callable
    linear: bool
    look_up: bool

    def gradient(self, consts: Sequence[Any], rows: Any, cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of its consts, summed over lanes; `rows` and `cotangents` are batched."""
        fixed = [consts[c] for c in self.fixed]

        def batched(moving):
            lane = functools.partial(self.apply, moving, fixed)
            return jax.vmap(lane, axis_size=len(cotangents[0]))(rows)

        _, vjp = jax.vjp(batched, [consts[c] for c in self.consts])
        return vjp(list(cotangents))[0]


class Kernel:
    """The program of a node type for one lane.

    Attributes:
      node_type: whose program it is.
      num_consts: consts the lane reads.
      saved: (shape, dtype) of what `save` returns besides the results.
      taps: operations whose consts get their gradient after the sweep.
      cotangents: (shape, dtype) of the rows `backward` leaves for the taps.
    """

    def __init__(self, node_type: NodeType):
        self.node_type = node_type
        self.operands = node_type.operands
        self.results = node_type.results
        jaxpr = _inlined(node_type.operation.jaxpr)
        self._split(jaxpr, len(node_type.shared))

    def _split(self, closed: Any, num_shared: int) -> None:
        inner = closed.jaxpr
        known = {*inner.constvars, *inner.invars[:num_shared]}
        before, body = [], []
        for eqn in inner.eqns:
            reads = [v for v in eqn.invars if isinstance(v, Var)]
            if reads and known.issuperset(reads):
                before.append(eqn)
                known.update(eqn.outvars)
            else:
                body.append(eqn)
        read = [v for eqn in body for v in eqn.invars] + list(inner.outvars)
        self._const_vars = list(dict.fromkeys(v for v in read if isinstance(v, Var) and v in known))
        self._prologue = _closed(
            inner, inner.constvars, inner.invars[:num_shared], before, self._const_vars
        )
        self._prologue_consts = list(closed.consts)
        self._operand_vars = inner.invars[num_shared:]
        self._body, self._outvars, self._inner = body, inner.outvars, inner
        self.num_consts = len(self._const_vars)
        self.const_types = tuple(
            ValueType(v.aval.shape, v.aval.dtype) for v in self._const_vars
        )

    def prologue(self, shared: Sequence[Any]) -> list[Any]:
        """The consts, from the shared values the type reads; once per program."""
        return jax.core.eval_jaxpr(self._prologue, self._prologue_consts, *shared)

    def forward(self, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Results of one lane, in stored form."""
        return self._evaluate(consts, operands)[0]

    def _evaluate(self, consts, operands, taps=(), deltas=()):
        """(results, all values) of one lane; `deltas` count as added to the variables `taps`."""
        env = dict(zip(self._const_vars, consts, strict=True))
        operands = map(_wrapped, operands, self.operands)
        env.update(zip(self._operand_vars, operands, strict=True))
        const_vars = set(self._const_vars)

        def read(v):
            return v.val if isinstance(v, Literal) else env[v]

        deltas = dict(zip(taps, deltas, strict=True))
        for eqn in self._body:
            outs = _run(self._inner, eqn, [read(v) for v in eqn.invars], const_vars)
            for v, out in zip(eqn.outvars, outs, strict=True):
                if eqn.primitive.name in _PRODUCTS:
                    out = checkpoint_name(out, PRODUCT)
                env[v] = _tap(out, deltas[v]) if v in deltas else out
        results = [_unwrapped(read(v), t) for v, t in zip(self._outvars, self.results, strict=True)]
        return results, env

    @functools.cached_property
    def _reverse(self) -> "_Reverse":
        return _Reverse(self)

    @property
    def saved(self):
        return self._reverse.saved

    @property
    def cotangents(self):
        return self._reverse.cotangents

    @property
    def rooms(self):
        """Where the rows for the taps are put: over something saved, or behind it."""
        return self._reverse.rooms

    @property
    def extra(self):
        """(shape, dtype) of the rooms behind what is saved."""
        return self._reverse.extra

    @property
    def taps(self):
        return self._reverse.taps

    @property
    def reads_back(self):
        """What `backward` reads again: positions of operands, and of results."""
        return self._reverse.operands_read, self._reverse.results_read

    def save(self, consts, operands):
        """(results, saved) of one lane."""
        return self._reverse.save(consts, operands)

    def backward(self, consts, operands, results, saved, cotangents):
        """(cotangents of the operands that have one, rows for the taps) of one lane."""
        return self._reverse.backward(consts, operands, results, saved, cotangents)


class _Reverse:
    """The reverse of a kernel, found by tracing `jax.vjp` of it and sorting what it saves."""

    def __init__(self, kernel: Kernel):
        const_vars = set(kernel._const_vars)
        position = {v: i for i, v in enumerate(kernel._const_vars)}
        tapped = [eqn for eqn in kernel._body if _has_const_gradient(eqn, const_vars)]
        again = _recomputable(kernel)
        wanted = [
            v
            for eqn in tapped
            for v in _rows_read(eqn, const_vars)
            if v not in again
        ]
        wanted = list(dict.fromkeys(wanted))
        taps = [v for eqn in tapped for v in eqn.outvars if _inexact(v)]
        inexact = [j for j, t in enumerate(kernel.operands) if differentiable(t)]
        returned = [s for s, t in enumerate(kernel.results) if differentiable(t)]
        structure = []
        cheap = not any(eqn.primitive.name in _EXPENSIVE for eqn in kernel._body)

        def save(consts, operands):
            def run(moving, deltas):
                full = list(operands)
                for j, x in zip(inexact, moving, strict=True):
                    full[j] = x
                results, env = kernel._evaluate(consts, full, taps, deltas)
                return [results[s] for s in returned], (results, [env[v] for v in wanted])

            deltas = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in taps]
            moving = [operands[j] for j in inexact]
            if cheap:
                run = jax.checkpoint(run, policy=_keep_products, prevent_cse=False)
            _, vjp, (results, rows) = jax.vjp(run, moving, deltas, has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            structure.append(tree)
            return results, rows, leaves

        const_avals = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in kernel.const_types]
        operand_avals = [jax.ShapeDtypeStruct(*stored(t)) for t in kernel.operands]
        forward = jax.make_jaxpr(save)(const_avals, operand_avals)
        inner = forward.jaxpr
        num_results = len(kernel.results)
        result_vars = inner.outvars[:num_results]
        row_vars = inner.outvars[num_results : num_results + len(wanted)]
        leaf_vars = inner.outvars[num_results + len(wanted) :]

        def back(leaves, cotangents):
            moving, deltas = jax.tree.unflatten(structure[-1], leaves)(cotangents)
            return moving, deltas

        backward = jax.make_jaxpr(back)(
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in leaf_vars],
            [jax.ShapeDtypeStruct(*stored(kernel.results[s])) for s in returned],
        )
        if cheap:
            backward = _inlined(backward, ("jit", "remat2", "checkpoint"))
        back_inner = backward.jaxpr
        used = _used(back_inner)
        num_leaves = len(leaf_vars)

        # Where each leaf the reverse reads can be found again.
        consts_in, operands_in = inner.invars[: kernel.num_consts], inner.invars[kernel.num_consts :]
        room: dict[Any, int] = {}  # variables that must be saved
        derived: dict[Any, int] = {}  # variables that depend on consts alone
        moving = set(operands_in)
        for eqn in inner.eqns:
            if any(isinstance(v, Var) and v in moving for v in eqn.invars):
                moving.update(eqn.outvars)
        for v in row_vars:
            if isinstance(v, Var) and v not in operands_in:
                room.setdefault(v, len(room))
        sources = []
        for v, argument in zip(leaf_vars, back_inner.invars[:num_leaves], strict=True):
            if argument not in used:
                sources.append(("nothing", v.aval))
            elif isinstance(v, Literal):
                sources.append(("literal", v.val))
            elif v in consts_in:
                sources.append(("const", consts_in.index(v)))
            elif v in operands_in:
                sources.append(("operand", operands_in.index(v)))
            elif v in inner.constvars:
                sources.append(("literal", forward.consts[inner.constvars.index(v)]))
            elif v in result_vars:
                sources.append(("result", result_vars.index(v)))
            elif v not in moving:
                sources.append(("derived", derived.setdefault(v, len(derived))))
            else:
                sources.append(("saved", room.setdefault(v, len(room))))
        self.sources = sources
        self.saved = tuple((v.aval.shape, v.aval.dtype) for v in room)
        self.operands_read = {i for kind, i in sources if kind == "operand"}
        self.results_read = {i for kind, i in sources if kind == "result"}
        self._derived = inner.replace(
            invars=consts_in,
            outvars=list(derived),
            eqns=[eqn for eqn in inner.eqns if not moving.intersection(eqn.outvars)],
        )
        self._forward = inner.replace(outvars=[*result_vars, *room])
        self._forward_consts, self._num_results = forward.consts, num_results
        self._operand_types, self._returned = kernel.operands, returned

        # Taps whose cotangents are one variable (a product and its bias) share a row.
        moving_vars = back_inner.outvars[: len(inexact)]
        delta_vars = back_inner.outvars[len(inexact) :]
        rows: dict[Any, int] = {}
        shares = [
            rows.setdefault(v if isinstance(v, Var) else ("zero", k), len(rows))
            for k, v in enumerate(delta_vars)
        ]
        share = dict(zip(taps, shares, strict=True))
        first = {row: k for k, row in reversed(list(enumerate(shares)))}
        kept = [delta_vars[first[row]] for row in range(len(rows))]
        self.cotangents = tuple((v.aval.shape, v.aval.dtype) for v in kept)
        # A cotangent may take the room of something saved that is not needed after the sweep.
        needed = {room[v] for v in row_vars if v in room}
        free = {s: kind for s, kind in enumerate(self.saved) if s not in needed}
        self.rooms, extra = [], []
        for kind in self.cotangents:
            s = next((s for s, other in free.items() if other == kind), None)
            if s is None:
                self.rooms.append(len(self.saved) + len(extra))
                extra.append(kind)
            else:
                self.rooms.append(s)
                del free[s]
        self.extra = tuple(extra)
        self._backward = back_inner.replace(outvars=[*moving_vars, *kept])
        self._backward_consts, self._num_moving = backward.consts, len(inexact)
        self.taps = tuple(
            _make_tap(
                kernel,
                eqn,
                tuple(share[v] for v in eqn.outvars if _inexact(v)),
                position,
                again,
                lambda operands, saved, v: self._saved_row(v, wanted, row_vars, room, operands, saved),
            )
            for eqn in tapped
        )
        self._operands_in = operands_in

    def save(self, consts, operands):
        out = jax.core.eval_jaxpr(self._forward, self._forward_consts, *consts, *operands)
        return out[: self._num_results], out[self._num_results :]

    def _saved_row(self, v, wanted, row_vars, room, operands, saved):
        var = row_vars[wanted.index(v)]
        if var in self._operands_in:
            return operands[self._operands_in.index(var)]
        return saved[room[var]]

    def backward(self, consts, operands, results, saved, cotangents):
        derived = jax.core.eval_jaxpr(self._derived, self._forward_consts, *consts)
        places = {
            "const": consts,
            "derived": derived,
            "operand": operands,
            "result": results,
            "saved": saved,
        }
        leaves = [
            places[kind][x]
            if kind in places
            else x
            if kind == "literal"
            else jnp.zeros(x.shape, x.dtype)
            for kind, x in self.sources
        ]
        cotangents = [cotangents[s] for s in self._returned]
        out = jax.core.eval_jaxpr(self._backward, self._backward_consts, *leaves, *cotangents)
        return out[: self._num_moving], out[self._num_moving :]


def _make_tap(kernel, eqn, cotangents, position, again, saved_row):
    const_vars = set(kernel._const_vars)
    reads = [v for v in dict.fromkeys(eqn.invars) if isinstance(v, Var)]
    moving = [v for v in reads if v in const_vars and _inexact(v)]
    fixed = [v for v in reads if v in const_vars and not _inexact(v)]
    others = _rows_read(eqn, const_vars)
    unread = [v for v in reads if v not in const_vars and v not in others]

    def rows(operands, saved):
        env = dict(zip(kernel._operand_vars, map(_wrapped, operands, kernel.operands), strict=True))
        for v in others:
            for step in again.get(v, ()):
                values = [x.val if isinstance(x, Literal) else env[x] for x in step.invars]
                outs = _run(kernel._inner, step, values, set())
                env.update(zip(step.outvars, outs, strict=True))
            if v not in again:
                env[v] = saved_row(operands, saved, v)
        return [env[v] for v in others]

    def apply(moving_values, fixed_values, row_values):
        env = dict(zip(moving, moving_values, strict=True))
        env.update(zip(fixed, fixed_values, strict=True))
        env.update(zip(others, row_values, strict=True))
        env.update((v, jnp.zeros(v.aval.shape, v.aval.dtype)) for v in unread)
        values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        outs = _run(kernel._inner, eqn, values, const_vars)
        return [x for v, x in zip(eqn.outvars, outs, strict=True) if _inexact(v)]

    name = eqn.primitive.name
    return Tap(
        tuple(position[v] for v in moving),
        tuple(position[v] for v in fixed),
        cotangents,
        rows,
        apply,
        name in _LINEAR or name in _LOOK_UPS,
        name in _LOOK_UPS,
    )


def _inexact(v: Any) -> bool:
    return has_gradient(v.aval.dtype)


def _is_const(v: Any, const_vars: set) -> bool:
    return isinstance(v, Var) and v in const_vars


def _has_const_gradient(eqn: Any, const_vars: set) -> bool:
    return any(_is_const(v, const_vars) and _inexact(v) for v in eqn.invars) and any(
        _inexact(v) for v in eqn.outvars
    )


def _rows_read(eqn: Any, const_vars: set) -> list[Any]:
    """The row variables that the gradient of a tapped operation's consts depends on."""
    if eqn.primitive.name in _ADDITIVE:
        return []
    return [v for v in dict.fromkeys(eqn.invars) if isinstance(v, Var) and v not in const_vars]


def _recomputable(kernel: Kernel) -> dict[Any, list[Any]]:
    """Variables that structural operations make from operands, with those operations."""
    again: dict[Any, list[Any]] = {v: [] for v in kernel._operand_vars}
    for eqn in kernel._body:
        reads = [v for v in eqn.invars if isinstance(v, Var)]
        if eqn.primitive.name in _STRUCTURAL and reads and all(v in again for v in reads):
            steps = [e for v in reads for e in again[v]]
            for v in eqn.outvars:
                again[v] = [*dict.fromkeys(steps), eqn]
    return again


@jax.custom_jvp
def _tap(y: Any, delta: Any) -> Any:
    """y; its derivative with respect to `delta` is as if delta were added."""
    return y


@_tap.defjvp
def _tap_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1]


def _wrapped(x: Any, value_type: ValueType) -> Any:
    if is_key(value_type.dtype):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(value_type.dtype))
    return x


def _unwrapped(x: Any, value_type: ValueType) -> Any:
    return jax.random.key_data(x) if is_key(value_type.dtype) else x


def _closed(inner: Any, constvars: Any, invars: Any, eqns: Any, outvars: Any) -> Any:
    return inner.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)


def _run(inner: Any, eqn: Any, values: Sequence[Any], const_vars: set) -> list[Any]:
    """Runs one equation of a jaxpr; a product of a const and a vector puts the vector first."""
    if eqn.primitive.name == "dot_general" and _is_const(eqn.invars[0], const_vars):
        (left, right), batch = eqn.params["dimension_numbers"]
        is_vector = len(right) == len(eqn.invars[1].aval.shape)
        if is_vector and not batch[0] and not _is_const(eqn.invars[1], const_vars):
            out = jax.lax.dot_general(
                values[1],
                values[0],
                ((right, left), batch),
                precision=eqn.params["precision"],
                preferred_element_type=eqn.params["preferred_element_type"],
            )
            return [out]
    reads = {v: x for v, x in zip(eqn.invars, values, strict=True) if isinstance(v, Var)}
    one = _closed(inner, [], list(reads), [eqn], list(eqn.outvars))
    return jax.core.eval_jaxpr(one, [], *reads.values())


def _inlined(closed: Any, inline: Sequence[str] = ("jit",)) -> Any:
    """The program with calls of jit-ted (or other) functions replaced by their bodies."""

    def evaluate(jaxpr, consts, args):
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.primitive.name in inline:
                inner = eqn.params["jaxpr"]
                consts_ = getattr(inner, "consts", ())
                outs = evaluate(getattr(inner, "jaxpr", inner), consts_, values)
            else:
                outs = _run(jaxpr, eqn, values, set())
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    if not any(eqn.primitive.name in inline for eqn in closed.jaxpr.eqns):
        return closed
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *xs: evaluate(closed.jaxpr, closed.consts, xs))(*avals)


def _used(jaxpr: Any) -> set:
    """Variables that the results of a jaxpr depend on."""
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in used for v in eqn.outvars):
            used.update(v for v in eqn.invars if isinstance(v, Var))
    return used
