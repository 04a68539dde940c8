"""Packed rows: room for them, and where a minibatch has them.

The rows of an array [n, ...] of all instances are *packed*: instance after instance, with nothing
in between. How many there are is data; what is compiled has room for more.

    lengths        3, 1, 2
    packed rows    a0 a1 a2 b0 c0 c1 ·  ·       first rows 0, 3, 4

Letters: `K` calls (instances, or parts of instances that run a program), `R` room for rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jedbatch._jaxpr.symbolic_dims import ragged_axes
from jedbatch._kernel.target import Target
from jedbatch._layout.bucketing import Ladder
from jedbatch._program.arenas import row, take
from jedbatch._program.tables import TableForm
from jedbatch._ragged.groups import Groups


@dataclass(frozen=True)
class RowCapacity:
    """What a packed program is compiled for.

    Attributes:
      calls: capacity of calls, K.
      rows: capacity of rows, for each extent of the program.
      lengths: the rooms for the rows of an instance, ascending.
      guarded: whether a length may be 0.
      target: the kind of device it is made for.
      slots: how many instances run in each of these rooms, all of them at once (see
        `_ragged.groups`); nothing where instances run a few at a time, in loops.
    """

    calls: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    guarded: bool
    target: Target
    slots: tuple[int, ...] = ()

    @property
    def groups(self) -> Groups:
        """The groups of instances that run at once."""
        return self.lengths, self.slots

    @property
    def blocks(self) -> Ladder | None:
        """How rows are cut into blocks; None if all of them are one."""
        return None if self.slots else self.target.blocks

    @property
    def longest(self) -> int:
        """The greatest length there is room for."""
        return self.lengths[-1]

    @functools.cached_property
    def together(self) -> tuple[int, ...]:
        """How many instances run at a time, for each of these rooms.

        Of few instances there are still fewer of one length.
        """
        if self.slots:
            return self.slots
        few = -(-self.calls // self.target.together)
        return tuple(min(max(1, self.target.rows_together // n), few) for n in self.lengths)


def table_form(room: RowCapacity, num_symbols: int) -> TableForm:
    """Where things are in the table of a minibatch."""
    form = TableForm()
    form.add(("lengths",), num_symbols, room.calls)
    if room.slots:
        form.add(("order",), sum(room.slots))
        form.add(("slot",), room.calls)
    else:
        form.add(("order",), room.calls + sum(g - 1 for g in room.together))
        form.add(("trips",), len(room.lengths))
    form.add(("calls",), 1)
    for e, rows in enumerate(room.rows):
        form.add(("starts", e), room.calls)
        form.add(("call", e), rows)
        form.add(("total", e), 1)
        if room.slots:
            form.add(("place", e), rows)
        else:
            form.add(("blocks", e), len(room.target.blocks.widths))
    return form


class PackedBatch:
    """What the phases of one run have in common: a minibatch's table, and how to read it.

    Attributes:
      extents: of the rows that are kept, by number.
      symbols: by number.
      room: what is compiled.
      table: int32[...], of the minibatch.
    """

    def __init__(
        self, extents: Sequence[Any], symbols: Sequence[str], room: RowCapacity, table: Any
    ):
        self.extents, self.symbols, self.room, self.table = extents, symbols, room, table
        self._form = table_form(room, len(symbols))

    def get(self, *name: Any, start: Any = 0, size: int = 0) -> Any:
        """A part of the table."""
        return row(self._form, self.table, name, start=start, size=size)

    def reading(self, table: Any) -> "PackedBatch":
        """The same with another table, such as a traced one."""
        return PackedBatch(self.extents, self.symbols, self.room, table)

    def index(self, extent: Any) -> int:
        """The number of an extent."""
        return self.extents.index(extent)

    def trips(self, e: int) -> Any:
        """How many blocks of rows of an extent there are of each width; None if all are one."""
        return None if self.room.slots else self.get("blocks", e)

    def total(self, e: int) -> Any:
        """Rows there are of an extent."""
        return self.get("total", e)[0]

    def lengths(self) -> dict[str, Any]:
        """int32[K], what every call has for each symbol."""
        return {
            s: row(self._form, self.table, ("lengths",), i, start=0, size=self.room.calls)
            for i, s in enumerate(self.symbols)
        }

    def positions(self, e: int) -> Any:
        """int32[R], the place of every row in its instance; those beyond repeat the last one."""
        starts = take(self.get("starts", e), self.get("call", e))
        rows = jnp.arange(self.room.rows[e], dtype=jnp.int32)
        return jnp.minimum(rows, jnp.maximum(self.total(e) - 1, 0)) - starts

    def empty(self, variable: Any) -> Any:
        """Zeros for what all calls have of a variable: [R, ...], or [K, ...]."""
        axis = ragged_axis(variable)
        lead = self.room.calls
        if axis is not None:
            lead = self.room.rows[self.index(variable.aval.shape[axis])]
        return jnp.zeros((lead, *row_shape(variable)), variable.aval.dtype)


def ragged_axis(variable: Any) -> int | None:
    """The ragged axis of a variable that is kept; None if it has none."""
    axes = ragged_axes(variable.aval.shape)
    return axes[0] if axes else None


def row_shape(variable: Any) -> tuple[int, ...]:
    """The shape of a variable without its ragged axis."""
    axis = ragged_axis(variable)
    return tuple(d for a, d in enumerate(variable.aval.shape) if a != axis)
