"""Running a program on every device of an axis, each with a shard of the minibatch.

Every device runs the whole program on the tables of its shard, under `jax.shard_map`. How often its
loops run depends on the shard, so devices may not wait for each other inside of them. They talk
twice: after the loops forwards, when all get the results of all shards, and after the sweep back,
when the cotangents of the shared values, which all of them have, are summed up.

The two halves are one differentiable program (see `_program.differentiable`), as on one device.
JAX differentiates neither the loops nor `jax.shard_map`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import Kind
from jedbatch._program.arenas import take
from jedbatch._program.executors import Executor, jit_for
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.returned import Pieces
from jedbatch._program.sharded import DeviceAxis
from jedbatch._support.types import Array, PyTree

EVERYWHERE = PartitionSpec()


class OnDevices:
    """Each half of a program as one XLA program for all devices of an axis.

    The arrays of shards have a first axis, of shards. Tables are `(table, rows, order)`: those of
    the shards, and the parts of routes (see `Route`): one route for what every arena returns, or
    one for each. What is returned are pieces, which all devices have: of every arena as many rows
    of the results as its route has, one or several times.
    """

    def __init__(self, executor: Executor, devices: DeviceAxis):
        self.executor = executor
        self.devices = devices
        compiled_for = functools.partial(jit_for, executor.signature.target)
        cut = devices.spec
        tables = cut, cut, EVERYWHERE
        self.once = compiled_for(self._mapped(self._once, (EVERYWHERE, cut, tables), EVERYWHERE))
        self.watched = compiled_for(
            self._mapped(self._watched, (EVERYWHERE, cut, tables), EVERYWHERE)
        )
        save_specs = EVERYWHERE, cut, tables
        self.saved = compiled_for(self._mapped(self._save, save_specs, (EVERYWHERE, cut)))
        self.reversed = compiled_for(self._reverse_mapped, static_argnums=0)

    def infer(self, shared: Sequence[Array], inputs: PyTree, tables: PyTree) -> Pieces:
        """The pieces returned from each arena."""
        return self.once(self.executor._weights(shared), inputs, tables)

    def watch(self, shared: Sequence[Array], inputs: PyTree, tables: PyTree) -> tuple[Pieces, Any]:
        """The pieces returned from each arena, and where loops were stopped (see `Forward`).

        The latter are those of all shards, bool[shards, lanes] each.
        """
        return self.watched(self.executor._weights(shared), inputs, tables)

    def save(self, shared: Sequence[Array], inputs: PyTree, tables: PyTree) -> tuple[Pieces, Any]:
        """The pieces returned from each arena, and the state of each device after its loops."""
        return self.saved(shared, inputs, tables)

    def reverse(
        self,
        signature: ReverseSignature,
        shared: Sequence[Array],
        tables: PyTree,
        values: PyTree,
        pieces: Pieces,
    ) -> tuple[PyTree, PyTree]:
        """Cotangents of the shared values and of the inputs, from those of pieces."""
        return self.reversed(signature, shared, tables, values, pieces)

    def release(self) -> None:
        """Nothing is kept from call to call."""

    def _mapped(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            function,
            mesh=self.devices.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # JAX does not know it of our primitives
        )

    def _once(self, weights, inputs, tables):
        table, rows, order = _own(tables[0]), _own(tables[1]), tables[2]
        outputs = self.executor._once(weights, _own(inputs), table)
        return self._gathered(outputs, rows, order)

    def _watched(self, weights, inputs, tables):
        table, rows, order = _own(tables[0]), _own(tables[1]), tables[2]
        outputs, flags = self.executor._watched(weights, _own(inputs), table)
        every = jax.tree.map(lambda x: lax.all_gather(x, self.devices.names), flags)
        return self._gathered(outputs, rows, order), every

    def _save(self, shared, inputs, tables):
        table, rows, order = _own(tables[0]), _own(tables[1]), tables[2]
        outputs, state = self.executor._save(shared, _own(inputs), table)
        return self._gathered(outputs, rows, order), state

    def _reverse_mapped(self, signature, *args):
        cut = self.devices.spec
        function = functools.partial(self._reverse, signature)
        tables = (cut, cut, EVERYWHERE), cut, EVERYWHERE
        in_specs = EVERYWHERE, tables, cut, EVERYWHERE
        return self._mapped(function, in_specs, (EVERYWHERE, cut))(*args)

    def _reverse(self, signature, shared, tables, values, pieces):
        (table, rows, order), reverse_table, wanted = tables
        rows = _own(rows)
        if signature.marks:
            wanted = tuple(_own_flags(x, *_route(rows, order, a)) for a, x in enumerate(wanted))
        own_tables = _own(table), _own(reverse_table), wanted
        outputs = tuple(
            _scattered(of_arena, kind, *_route(rows, order, a))
            for a, (of_arena, kind) in enumerate(zip(pieces, signature.forward.arenas, strict=True))
        )
        of_shared, of_inputs = self.executor._reverse(
            signature, shared, own_tables, values, outputs
        )
        of_shared = jax.tree.map(lambda x: lax.psum(x, self.devices.names), of_shared)
        return of_shared, jax.tree.map(lambda x: x[None], of_inputs)

    def _found_order(self, rows: Array, order: Array) -> Array:
        """Returns the order of a route whose shards are of several processes."""
        return _order_of(lax.all_gather(rows, self.devices.names), order)

    def _gathered(self, outputs: Sequence[Array], rows: PyTree, order: PyTree) -> Pieces:
        """Returns the pieces of all devices, in the order of the results."""
        pieces: list[list[Array]] = []
        for a, own in enumerate(outputs):
            own_rows, own_order = _route(rows, order, a)
            count, room = len(own), len(own_rows)
            if self.devices.num_processes > 1 and count:
                own_order = self._found_order(own_rows, own_order)
            every = lax.all_gather(own, self.devices.names) if count else own
            pieces.append(
                [
                    take(
                        every[:, first : first + room].reshape(-1, *own.shape[1:]),
                        own_order,
                    )
                    for first in range(0, count, room or 1)
                ]
            )
        return tuple(pieces)


def _order_of(rows: Array, order: Array) -> Array:
    """Returns the order of a route from the rows of all shards; `order` says how many there are."""
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    return jnp.zeros_like(order).at[rows.ravel()].set(positions, mode="drop")


def _own(parts: PyTree) -> PyTree:
    """Returns what a device has of arrays that are cut along their first axis."""
    return jax.tree.map(lambda x: x[0], parts)


def _route(rows: Sequence[Array], order: Sequence[Array], a: int) -> tuple[Array, Array]:
    """Returns the parts of the route of an arena."""
    number = a if len(rows) > 1 else 0
    return rows[number], order[number]


def _scattered(pieces: Sequence[Array], kind: Kind, rows: Array, order: Array) -> Array:
    """Returns the cotangents of the rows that a device returns of an arena, from those of pieces.

    Zeros for rows that are no results; None for numbers that have no cotangents.
    """
    shape, dtype = kind
    if not has_gradient(dtype):
        return None
    count = len(order)
    is_result = (rows < count).reshape(-1, *[1] * len(shape))
    own = [
        jnp.where(is_result, take(x, jnp.minimum(rows, count - 1)), jnp.zeros((), dtype))
        for x in pieces
    ]
    return jnp.concatenate(own) if own else jnp.zeros((0, *shape), dtype)


def _own_flags(flags: Array, rows: Array, order: Array) -> Array:
    """Returns the flags of the rows that a device returns, from those of pieces end to end."""
    count = len(order)
    if not len(flags):
        return jnp.zeros(0, bool)
    of_pieces = flags.reshape(-1, count)[:, jnp.minimum(rows, count - 1)]
    return ((rows < count)[None] & of_pieces).ravel()
