"""Packed rows: the capacity for them, and where those of a minibatch are.

The rows of an array [n, ...] of all instances are *packed*: instance after instance, with nothing
in between. How many there are is data; a compiled program has a capacity of more.

    lengths        3, 1, 2
    packed rows    a0 a1 a2 b0 c0 c1 ·  ·       first rows 0, 3, 4

Letters: `K` calls (instances, or parts of instances that run a program), `R` capacity of rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._jaxpr.storage import Kind
from jedbatch._jaxpr.symbolic_dims import ragged_axes
from jedbatch._jaxpr.versions import Atom
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Buckets, in_blocks
from jedbatch._program.arenas import row, take
from jedbatch._program.tables import TableLayout
from jedbatch._ragged.groups import Groups
from jedbatch._ragged.moving_calls import moving_calls
from jedbatch._support.types import AxisSize

MIN_WIDE_BLOCKS = 1.5  # that there is room for, where blocks are that wide


@dataclass(frozen=True)
class RowCapacity:
    """The sizes and the device that a packed program is compiled for.

    Attributes:
      calls: capacity of calls, K.
      rows: capacity of rows, for each extent of the program.
      lengths: capacities of the rows of one instance, ascending.
      guarded: whether a length may be 0.
      target: the kind of device it is made for.
      slots: how many instances run with each of these capacities, all of them at once (see
        `_ragged.groups`); nothing where instances run a few at a time, in loops.
      microbatches: how many of them there may be, each with calls, rows and slots of these numbers
        (see `_ragged.microbatches`).
      few: how many instances run at a time at most with each of these capacities, where loops go
        over tables; nothing where they do not.
    """

    calls: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    guarded: bool
    target: Target
    slots: tuple[int, ...] = ()
    microbatches: int = 1
    few: tuple[int, ...] = ()

    @functools.cached_property
    def of_one(self) -> "RowCapacity":
        """That of one microbatch."""
        return replace(self, microbatches=1)

    @property
    def groups(self) -> Groups:
        """The groups of instances that run at once."""
        return self.lengths, self.slots

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        sizes = self.calls, self.rows, self.lengths, self.slots, self.microbatches, self.few
        return hash((sizes, self.guarded, self.target))

    def __getstate__(self) -> dict[str, object]:
        """Returns the fields: strings have other hashes in other processes."""
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}

    def computed(self, e: int, total: int, microbatches: int = 1) -> int:
        """Returns how many rows are computed where so many of an extent exist."""
        blocks = self.blocks(e)
        return microbatches * self.rows[e] if blocks is None else in_blocks(total, blocks)

    def blocks(self, e: int) -> Buckets | None:
        """Returns the widths of blocks of the rows of an extent; None if all are one block."""
        return None if self.slots else _often_used(self.target.blocks, self.rows[e])

    @property
    def longest(self) -> int:
        """The greatest length of an instance."""
        return self.lengths[-1]

    @functools.cached_property
    def together(self) -> tuple[int, ...]:
        """The number of instances that run at a time, for each of `lengths`.

        Of few instances there are still fewer of one length.
        """
        if self.slots:
            return self.slots
        share = -(-self.calls // self.target.together)
        most = [min(max(1, self.target.rows_together // n), share) for n in self.lengths]
        return tuple(map(min, most, self.few or most))


@functools.lru_cache(256)
def _often_used(blocks: Buckets, rows: int) -> Buckets:
    """Returns blocks without the widths that few minibatches of up to so many rows would use.

    Each width is a program of its own to compile.
    """
    narrowest, *wider = blocks.widths
    often = [width for width in wider if MIN_WIDE_BLOCKS * width <= rows]
    return Buckets((narrowest, *often), blocks.overhead)


@functools.lru_cache(256)
def whole_blocks(need: int, blocks: Buckets) -> int:
    """Returns a capacity for so many rows, in which the blocks of any number up to it have room.

    It is a multiple of the widest block, or half a block less where that does and is more than one.
    For more than half of a wide block it is so large that blocks of all widths are compiled.
    """
    _, *wider = blocks.widths
    widest = blocks.widths[-1]
    if wider and need > wider[0] // 2:  # one wide block is faster then than narrow ones
        need = max(need, int(MIN_WIDE_BLOCKS * widest))
    whole = -(-need // widest) * widest
    less = whole - widest // 2
    if less < max(need, widest):
        return whole
    used = _often_used(blocks, less)
    computed = used.cover(np.arange(less + 1)) @ np.array(used.widths)
    return less if computed.max() <= less else whole


@functools.lru_cache(256)
def table_form(capacity: RowCapacity, num_symbols: int) -> TableLayout:
    """Returns the layout of the table of a minibatch, or of one microbatch."""
    form = TableLayout()
    form.add(("lengths",), num_symbols, capacity.calls)
    if capacity.slots:
        form.add(("order",), sum(capacity.slots))
    else:
        form.add(("order",), capacity.calls + sum(g - 1 for g in capacity.together))
        form.add(("trips",), len(capacity.lengths))
    form.add(("calls",), 1)
    for e, rows in enumerate(capacity.rows):
        form.add(("starts", e), capacity.calls)
        form.add(("call", e), rows)
        form.add(("total", e), 1)
        blocks = capacity.blocks(e)
        if blocks is not None:
            form.add(("blocks", e), len(blocks.widths))
    return form


@functools.lru_cache(256)
def microbatch_form(
    capacity: RowCapacity, num_symbols: int, returned: tuple[int, ...]
) -> TableLayout:
    """Returns the layout of the table of several microbatches.

    Args:
      capacity: that it is for.
      num_symbols: of the program.
      returned: the numbers of the extents of results.
    """
    form, size = TableLayout(), table_form(capacity.of_one, num_symbols).size
    form.add(("trips",), 1)
    form.add(("microbatches",), capacity.microbatches, size)
    for e in returned:
        form.add(("packed", e), capacity.microbatches * capacity.rows[e])
    return form


class PackedBatch:
    """The packed rows of a minibatch: its table, and how it is read.

    Attributes:
      extents: of the rows that are kept, by number.
      symbols: by number.
      capacity: of the compiled program.
      table: int32[...], of the minibatch.
      form: of the table.
    """

    def __init__(
        self,
        extents: Sequence[Any],
        symbols: Sequence[str],
        capacity: RowCapacity,
        table: jax.Array,
    ):
        self.extents, self.symbols, self.capacity, self.table = extents, symbols, capacity, table
        self.form = table_form(capacity, len(symbols))

    def get(self, *name: Any, start: int | jax.Array = 0, size: int = 0) -> jax.Array:
        """Returns a part of the table."""
        return row(self.form, self.table, name, start=start, size=size)

    def reading(self, table: jax.Array) -> "PackedBatch":
        """Returns the same with another table, such as a traced one."""
        return PackedBatch(self.extents, self.symbols, self.capacity, table)

    def without_table(self) -> "PackedBatch":
        """Returns the same for what is known of all minibatches."""
        nothing: Any = None
        return self.reading(nothing)

    def index(self, extent: AxisSize) -> int:
        """Returns the number of an extent."""
        return self.extents.index(extent)

    def trips(self, e: int) -> jax.Array | None:
        """Returns how many blocks of rows an extent has of each width; None if all are one."""
        return None if self.capacity.slots else self.get("blocks", e)

    def total(self, e: int) -> jax.Array:
        """Returns the number of rows of an extent that exist."""
        return self.get("total", e)[0]

    def lengths(self) -> dict[str, jax.Array]:
        """Returns int32[K] for each symbol: its value for every call."""
        return {
            s: row(self.form, self.table, ("lengths",), i, start=0, size=self.capacity.calls)
            for i, s in enumerate(self.symbols)
        }

    def positions(self, e: int) -> jax.Array:
        """Returns int32[R]: the position of every row in its call; rows beyond repeat the last."""
        starts = take(self.get("starts", e), self.get("call", e))
        rows = jnp.arange(self.capacity.rows[e], dtype=jnp.int32)
        return jnp.minimum(rows, jnp.maximum(self.total(e) - 1, 0)) - starts

    def kind(self, variable: Atom) -> Kind:
        """Returns (shape, dtype) of a variable of all calls: [R, ...], or [K, ...]."""
        axis = ragged_axis(variable)
        lead = self.capacity.calls
        if axis is not None:
            lead = self.capacity.rows[self.index(variable.aval.shape[axis])]
        return (lead, *row_shape(variable)), variable.aval.dtype

    def moving_calls(
        self, variables: Sequence[Atom], cotangents: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Returns bool[K] for each variable: the calls in which it has a cotangent other than 0.

        `cotangents` are of all calls, [R, ...] or [K, ...]; None where there is none.
        """
        num_calls = self.capacity.calls
        moves = [jnp.zeros(num_calls, bool)] * len(variables)
        by_extent: dict[AxisSize | None, list[int]] = {}
        for i, v in enumerate(variables):
            axis = ragged_axis(v)
            by_extent.setdefault(None if axis is None else v.aval.shape[axis], []).append(i)
        for extent, own in by_extent.items():
            if extent is None:
                call, total = jnp.arange(num_calls, dtype=jnp.int32), self.get("calls")[0]
            else:
                e = self.index(extent)
                call, total = self.get("call", e), self.total(e)
            found = moving_calls(call, total, [cotangents[i] for i in own], num_calls)
            for i, flags in zip(own, found, strict=True):
                moves[i] = flags
        return moves

    def empty(self, variable: Atom) -> jax.Array:
        """Returns zeros for a variable of all calls: [R, ...], or [K, ...]."""
        return jnp.zeros(*self.kind(variable))


def ragged_axis(variable: Atom) -> int | None:
    """Returns the ragged axis of a variable that is kept; None if it has none."""
    axes = ragged_axes(variable.aval.shape)
    return axes[0] if axes else None


def row_shape(variable: Atom) -> tuple[int, ...]:
    """Returns the shape of a variable without its ragged axis."""
    axis = ragged_axis(variable)
    return tuple(d for a, d in enumerate(variable.aval.shape) if a != axis)
