"""Attention among the rows of each instance, by one call of the compiled core.

    out = softmax(scale · Q Kᵀ) V      of every head, for the rows of one instance

A phase over instances that does this, and no more, need not pad: the core goes from instance to
instance, reads their packed rows where they are, and keeps the scores of a few queries of one head
(see `_support/c/attention.c`). By operations of XLA instances are padded to one of a few lengths,
each of which is a program to compile, and on a CPU products of matrices as small as those of a
sentence take several times as long. Long sequences run by operations of XLA, which have all cores.

Where there is no core, in exported programs, and for derivatives of forward mode, the phase runs as
any other one.

Source: FlashAttention (Dao et al., 2022) for scores that are computed again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching

from jedbatch._jaxpr.interpret import reads, run_equations
from jedbatch._jaxpr.native_calls import over_lanes_of, register_lowering
from jedbatch._jaxpr.padding.axis_rules import VIEWS
from jedbatch._jaxpr.padding.row_rules import run_row
from jedbatch._jaxpr.padding.softmax import SHIFTS
from jedbatch._jaxpr.symbolic_dims import ragged_axes
from jedbatch._jaxpr.versions import Equation
from jedbatch._ragged.packing import PackedBatch, row_shape
from jedbatch._ragged.phases import Phase
from jedbatch._support.types import Array

LEAST_SCALE, MOST_SCALE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class AttentionPhase(NamedTuple):
    """A phase that is attention.

    Attributes:
      places: of queries, keys and values among what the phase reads.
      heads: how many there are.
      width: numbers of a query and of a key, in each head.
      value_width: the same of a value.
      scale: that scores are multiplied by.
      extents: how many queries there are, and how many keys and values, as text.
    """

    places: tuple[int, int, int]
    heads: int
    width: int
    value_width: int
    scale: float
    extents: tuple[str, str]

    def numbers(self, batch: PackedBatch) -> tuple[int, ...]:
        """Returns what the core is told: sizes, and places in the table of a minibatch."""
        form, found = batch.form, list[int]()
        known = list(map(str, batch.extents))
        for e in map(known.index, self.extents):
            found += [form.offset(("starts", e)), form.offset(("total", e))]
        scale = int(np.float64(self.scale).view(np.int64))
        sizes = self.heads, self.width, self.value_width
        return (*sizes, scale, *found, form.offset(("calls",)))


class _NoAttentionError(Exception):
    """A phase does something else."""


def find_attention(phase: Phase) -> AttentionPhase | None:
    """Returns the attention that a phase is; None if it does anything else."""
    if phase.indexed or phase.shared or len(phase.writes) != 1:
        return None
    variables = (*phase.reads, *(v for eqn in phase.equations for v in eqn.outvars))
    if any(v.aval.dtype != np.float32 for v in variables):
        return None
    try:
        return _Finder(phase).attention()
    except _NoAttentionError:
        return None


def _ask(condition: bool) -> None:
    if not condition:
        raise _NoAttentionError


class _Finder:
    """Looks for attention in a phase; what raises `_NoAttentionError` has met something else."""

    def __init__(self, phase: Phase):
        self._phase = phase
        self._maker = {v: eqn for eqn in phase.equations for v in eqn.outvars}
        self._met: set[int] = set()  # equations that are part of it

    def attention(self) -> AttentionPhase:
        """Returns what the phase is."""
        out = self._made(self._phase.writes[0], "dot_general")
        k = int(len(ragged_axes(out.invars[1].aval.shape)) == 2)  # the weights
        weights: Any = out.invars[k]
        order = range(weights.aval.ndim)
        if self._is_made(weights, "transpose"):
            turned = self._made(weights, "transpose")
            order, weights = turned.params["permutation"], turned.invars[0]
        product, scale, along = self._softmax(weights)
        pair = [self._head_rows(product, i) for i in (0, 1)]
        heads = len(_sides(product)[0][1])
        queries, keys = pair if along == heads + 1 else pair[::-1]
        values = self._values(out, k, order, heads, along)
        _ask(len(self._met) == len(self._phase.equations))
        _ask(queries.shape == keys.shape and keys.shape[0] == values.shape[0])
        _ask(keys.extent == values.extent)
        return AttentionPhase(
            (queries.place, keys.place, values.place),
            *queries.shape,
            values.shape[1],
            scale,
            (queries.extent, keys.extent),
        )

    def _is_made(self, v: Any, *names: str) -> bool:
        eqn = None if isinstance(v, Literal) else self._maker.get(v)
        return eqn is not None and eqn.primitive.name in names

    def _made(self, v: Any, *names: str) -> Equation:
        """Returns the operation that computes a variable, which is one of these."""
        _ask(self._is_made(v, *names))
        eqn = self._maker[v]
        self._met.add(id(eqn))
        return eqn

    def _softmax(self, weights: Any) -> tuple[Equation, float, int]:
        """Returns (the product of queries and keys, scale, axis) of which weights are a softmax."""
        division = self._made(weights, "div")
        exponential = self._made(division.invars[0], "exp")
        difference = self._made(exponential.invars[0], "sub")
        total = self._through(division.invars[1], "reduce_sum")
        largest = self._through(difference.invars[1], "reduce_max")
        scores: Any = largest.invars[0]
        _ask(difference.invars[0] is scores and total.invars[0] is exponential.outvars[0])
        axes = largest.params["axes"]
        _ask(len(axes) == 1 and total.params["axes"] == axes)
        along = tuple(1 if a in axes else n for a, n in enumerate(scores.aval.shape))
        _ask(division.invars[1].aval.shape == difference.invars[1].aval.shape == along)
        scale = 1.0
        while self._is_made(scores, "mul", "div"):
            eqn = self._made(scores, "mul", "div")
            is_product, (x, y) = eqn.primitive.name == "mul", eqn.invars
            if isinstance(x, Literal) and is_product:
                x, y = y, x
            _ask(isinstance(y, Literal) and not np.shape(y.val))
            number = float(y.val)
            _ask(number != 0)
            scale = scale * number if is_product else scale / number
            scores = x
        # The core multiplies infinity by it, where there is no key: 0 would make it no number.
        _ask(LEAST_SCALE <= abs(scale) <= MOST_SCALE)
        return self._made(scores, "dot_general"), scale, axes[0]

    def _through(self, v: Any, name: str) -> Equation:
        """Returns an operation of which a value is the result, in another shape."""
        while not self._is_made(v, name):
            eqn = self._made(v, *SHIFTS)
            given = reads(eqn)
            _ask(len(given) == 1 and _keeps_order(eqn))
            (v,) = given
        return self._made(v, name)

    def _head_rows(self, product: Equation, k: int) -> "_HeadRows":
        """Returns operand `k` of the product of queries and keys."""
        contracted, batch = _sides(product)[k]
        v = product.invars[k]
        _ask(len(contracted) + len(batch) == v.aval.ndim - 1)
        return self._rows_of(v, (*batch, *contracted), len(batch))

    def _values(
        self, out: Equation, k: int, order: Sequence[int], heads: int, along: int
    ) -> "_HeadRows":
        """Returns the values, which the weights, operand `k` of the last product, are of.

        Axes of the weights are axes of the scores in some `order`.
        """
        contracted, batch = (tuple(order[a] for a in axes) for axes in _sides(out)[k])
        of_values, value_batch = _sides(out)[1 - k]
        v = out.invars[1 - k]
        _ask(contracted == (along,) and batch == tuple(range(heads)))
        _ask(of_values == tuple(ragged_axes(v.aval.shape)))
        rest = [a for a in range(v.aval.ndim) if a not in (*value_batch, *of_values)]
        return self._rows_of(v, (*value_batch, *rest), len(value_batch))

    def _rows_of(self, v: Any, order: Sequence[int], heads: int) -> "_HeadRows":
        """Returns which of the rows that the phase reads are those of a variable.

        The numbers of such a row are those of the heads, one after the other.

        Args:
          v: the variable.
          order: its axes but that of rows: those of heads, then the others.
          heads: how many axes of heads there are.
        """
        _ask(not isinstance(v, Literal) and len(ragged_axes(v.aval.shape)) == 1)
        (axis,) = ragged_axes(v.aval.shape)
        _ask(axis not in order)
        shape = [v.aval.shape[a] for a in order]
        views: list[Equation] = []
        root = v
        while root not in self._phase.reads:
            views.append(self._made(root, *VIEWS))
            _ask(len(views[-1].invars) == 1)
            (root,) = views[-1].invars
            _ask(len(ragged_axes(root.aval.shape)) == 1)
        (root_axis,) = ragged_axes(root.aval.shape)
        extent = str(v.aval.shape[axis])
        _ask(extent == str(root.aval.shape[root_axis]))
        size = math.prod(row_shape(root))
        numbers = np.arange(size, dtype=np.float32)
        env = {root: numbers.reshape(row_shape(root))}
        with jax.ensure_compile_time_eval():
            run_equations(views[::-1], env, lambda eqn, values: run_row(eqn, values, None))
        row = np.asarray(env[v]).transpose([a - (a > axis) for a in order])
        _ask(np.array_equal(row.ravel(), numbers))
        counted = math.prod(shape[:heads]), math.prod(shape[heads:])
        return _HeadRows(self._phase.reads.index(root), counted, extent)


class _HeadRows(NamedTuple):
    """Rows of queries, keys or values.

    Attributes:
      place: among what the phase reads.
      shape: (heads, numbers in each).
      extent: how many rows there are, as text.
    """

    place: int
    shape: tuple[int, int]
    extent: str


def _keeps_order(eqn: Equation) -> bool:
    """Returns whether the numbers of a result are those of its operand, in order."""
    name, (out,) = eqn.primitive.name, eqn.outvars
    if name == "max":  # with what is less than all numbers
        return [x.val for x in eqn.invars if isinstance(x, Literal)] == [-np.inf]
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        return list(axes) == sorted(axes)
    if name in ("reshape", "expand_dims", "squeeze"):
        before, after = ([n for n in v.aval.shape if n != 1] for v in (eqn.invars[0], out))
        return before == after
    return name == "stop_gradient"


def _sides(product: Equation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns (contracted axes, batch axes) of each operand of a product."""
    contracted, batch = product.params["dimension_numbers"]
    return [(tuple(c), tuple(b)) for c, b in zip(contracted, batch, strict=True)]


class AttentionCall(NamedTuple):
    """How attention is called.

    Attributes:
      numbers: for the core.
      otherwise: the same by operations of XLA.
    """

    numbers: tuple[int, ...]
    otherwise: Callable


attention_p = Primitive("attention")
attention_back_p = Primitive("attention_back")
attention_back_p.multiple_results = True


def _attend(table: Array, *given: Array, call: AttentionCall, kind: Any) -> Array:
    return call.otherwise(table, *given)


def _pull_back(table: Array, *given: Array, call: AttentionCall, kinds: Any) -> list[Array]:
    return call.otherwise(table, *given)


@attention_p.def_abstract_eval
def _type(*given, call, kind):
    return ShapedArray(*kind)


@attention_back_p.def_abstract_eval
def _types(*given, call, kinds):
    return [ShapedArray(*kind) for kind in kinds]


def _numbers(*, call: AttentionCall, **_: Any) -> dict[str, Any]:
    return {"numbers": np.array(call.numbers, np.int64)}


def _push(operations: Callable) -> Callable:
    """Returns the rule of forward mode: that of operations of XLA."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

        def run(*some: Array) -> Any:
            values = list(primals)
            for i, x in zip(moving, some, strict=True):
                values[i] = x
            return operations(*values, **params)

        return jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])

    return rule


for _primitive, _operations in ((attention_p, _attend), (attention_back_p, _pull_back)):
    _primitive.def_impl(_operations)
    register_lowering(_primitive, _primitive.name, _operations, _numbers)
    batching.primitive_batchers[_primitive] = over_lanes_of(_operations)
    ad.primitive_jvps[_primitive] = _push(_operations)


def attend(
    found: AttentionPhase,
    batch: PackedBatch,
    operands: Sequence[Array],
    kind: Any,
    otherwise: Callable,
) -> Array:
    """Returns the packed rows of a result.

    Args:
      found: the attention.
      batch: the minibatch.
      operands: what the phase reads.
      kind: (shape, dtype) of the result.
      otherwise: computes it from a table and what the phase reads, by operations of XLA.
    """
    places = found.places

    def run(table: Array, *given: Array) -> Array:
        return otherwise(table, [given[places.index(i)] for i in range(len(operands))])

    call = AttentionCall(found.numbers(batch), run)
    return attention_p.bind(batch.table, *(operands[i] for i in places), call=call, kind=kind)


def pull_back(
    found: AttentionPhase,
    batch: PackedBatch,
    operands: Sequence[Array],
    moves: Array,
    cotangent: Array,
    otherwise: Callable,
) -> list[Array]:
    """Returns the cotangents of what the phase reads.

    Args:
      found: the attention.
      batch: the minibatch.
      operands: what the phase reads.
      moves: bool[K], the calls to which something comes back.
      cotangent: of the result.
      otherwise: computes these from a table, what the phase reads, moves and the cotangent, by
        operations of XLA.
    """
    places = found.places

    def run(table: Array, q: Array, k: Array, v: Array, moves: Array, cotangent: Array) -> Any:
        given = q, k, v
        read = [given[places.index(i)] for i in range(len(operands))]
        return otherwise(table, read, moves, cotangent)

    call = AttentionCall((*found.numbers(batch), *places), run)
    kinds = tuple((x.shape, x.dtype) for x in operands)
    given = *(operands[i] for i in places), moves, cotangent
    return list(attention_back_p.bind(batch.table, *given, call=call, kinds=kinds))
