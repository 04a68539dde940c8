"""Numbers that do nothing in a cell but name a row of a table, and whether there is such a row.

JAX clamps an index that is out of bounds, since it does not know values while it traces. Numbers of
an instance are known when it is planned. If one of them only looks up rows of an array that all
instances share, `params["embedding"][word]`, and there is no such row, it is a mistake, most often
of a vocabulary. Where a number has another use too, such as a mask, what it means is left alone,
and so are `jnp.take` and `jax.lax.dynamic_index_in_dim`, which say what they do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.storage import Kind, stored
from jedbatch._jaxpr.versions import Equation
from jedbatch._program.lower import Placement
from jedbatch._program.plan import input_name
from jedbatch._record.types.registry import Registry

SAME_VALUE_OPERATIONS = ("broadcast_in_dim", "reshape", "squeeze", "copy")
# What a variable is: ("raw", k), ("negative", k), ("from the end", k, n) or ("index", k, n).
State = tuple


def table_rows(node_type: NodeType) -> dict[int, int]:
    """For operands that only look up rows of shared tables, by position: the rows there are."""
    operation = operation_of(node_type)
    program = operation.jaxpr.jaxpr
    first = len(program.invars) - len(node_type.operands)
    tables = set(program.invars[:first])
    states: dict[Any, State] = {
        var: ("raw", k)
        for k, var in enumerate(program.invars[first:])
        if jax.dtypes.issubdtype(var.aval.dtype, np.integer)
    }
    rows_by_index: dict[int, int] = {}
    ambiguous: set[int] = set()
    for eqn in program.eqns if states else ():
        read = [states.get(x) if isinstance(x, Var) else None for x in eqn.invars]
        if not any(read):
            continue
        state = _next(eqn, read)
        if state is not None:
            states[eqn.outvars[0]] = state
            continue
        of_table = isinstance(eqn.invars[0], Var) and eqn.invars[0] in tables
        used = _looked_up(eqn, read) if of_table else {}
        for k, n in used.items():
            rows_by_index[k] = min(n, rows_by_index.get(k, n))
        ambiguous |= {x[1] for x in read if x is not None} - used.keys()
    ambiguous |= {states[x][1] for x in program.outvars if isinstance(x, Var) and x in states}
    return {k: n for k, n in rows_by_index.items() if k not in ambiguous}


def _next(eqn: Equation, read: Sequence[State | None]) -> State | None:
    """Returns the state after a step from an integer to an index; None for any other equation."""
    name, first = eqn.primitive.name, read[0]
    if name in SAME_VALUE_OPERATIONS:
        return first
    if name == "convert_element_type" and jax.dtypes.issubdtype(
        eqn.params["new_dtype"], np.integer
    ):
        return first
    constant = eqn.invars[-1].val if isinstance(eqn.invars[-1], Literal) else None
    if first is not None and first[0] == "raw" and constant is not None:
        if name == "lt" and constant == 0:
            return "negative", first[1]
        if name == "add":
            return "from the end", first[1], int(constant)
    if name == "select_n" and [x and x[0] for x in read] == ["negative", "raw", "from the end"]:
        assert read[2] is not None
        return "index", *read[2][1:]
    return None


def _looked_up(eqn: Equation, read: Sequence[State | None]) -> dict[int, int]:
    """Rows of the table that an equation reads, by the operand that names the row."""
    shape = eqn.invars[0].aval.shape
    if eqn.primitive.name == "dynamic_slice":
        axes: list[int] = list(range(len(shape)))
    elif eqn.primitive.name == "gather" and (
        eqn.params["mode"] == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    ):
        axes = list(eqn.params["dimension_numbers"].start_index_map)
        if len(axes) != 1:
            return {}
    else:
        return {}
    return {
        x[1]: x[2]
        for axis, x in zip(axes, read[1:], strict=False)
        if x is not None
        and x[0] == "index"
        and x[2] == shape[axis]
        and eqn.params["slice_sizes"][axis] == 1
    }


def check_rows(
    registry: Registry,
    type_ids: Iterable[int],
    inputs: Mapping[str, np.ndarray | Any],
    placed_of: Callable[[], Placement],
    numbers: Sequence[int] | None = None,
) -> None:
    """Raises an `IndexError` if a number of an instance names a row that is not there.

    Args:
      registry: of the node types.
      type_ids: of the nodes of a minibatch.
      inputs: the rows, by the name of their arena; tracers are not looked at.
      placed_of: returns the minibatch, which is looked at if some number may name no row.
      numbers: of the instances, for messages; None if they count from 0.
    """

    def reads(t: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        placed = placed_of()
        graph = placed.graph
        nodes = np.flatnonzero(graph.node_type == t)
        return nodes, graph.operand[graph.operand_ptr[nodes] + k], placed.input_row

    def instance_of(node: int) -> int:
        i = int(np.searchsorted(placed_of().graph.node_ptr, node, "right")) - 1
        return i if numbers is None else int(numbers[i])

    check_look_ups(registry, type_ids, lambda x: inputs.get(input_name(x)), reads, instance_of)


def check_look_ups(
    registry: Registry,
    type_ids: Iterable[int],
    rows_of: Callable[[Kind], Any],
    reads: Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]],
    instance_of: Callable[[int], int],
) -> None:
    """Does the same as `check_rows` for nodes that are kept in any way.

    Args:
      registry: of the node types.
      type_ids: of the nodes.
      rows_of: the rows of the arena of a kind of value.
      reads: of a type and an operand, (the nodes, what they read as that, the row of every input);
        what is an input is negative.
      instance_of: the instance of a node.
    """
    for t in type_ids:
        for k, n, kind in _known_rows(registry, t):
            rows = rows_of(kind)
            if not (type(rows) is np.ndarray and rows.size) or _all_below(rows, n):
                continue
            nodes, read, input_row = reads(t, k)
            from_inputs = np.flatnonzero(read < 0)
            its_row = input_row[-1 - read[from_inputs]]  # of a number that a node computed, behind
            from_inputs = from_inputs[its_row < len(rows)]
            if not len(from_inputs):
                continue
            indices = rows[input_row[-1 - read[from_inputs]]].reshape(len(from_inputs), -1)
            bad = np.flatnonzero(((indices < -n) | (indices >= n)).any(1))
            if len(bad):
                value = next(x for x in indices[bad[0]].tolist() if not -n <= x < n)
                instance = instance_of(nodes[from_inputs[bad[0]]])
                raise IndexError(_message(registry.node_types[t].name, instance, value, n))


def fewest_rows(registry: Registry, type_ids: Iterable[int]) -> int | None:
    """Returns the rows of the smallest table that nodes of these types look up; None without."""
    return min((n for t in type_ids for _, n, _ in _known_rows(registry, t)), default=None)


def _known_rows(registry: Registry, t: int) -> tuple[tuple[int, int, Kind], ...]:
    """Returns (operand, rows that there are, kind) of the look-ups of a type."""
    rows_known = registry.table_rows
    if t not in rows_known:
        node_type = registry.node_types[t]
        rows_known[t] = tuple(
            (k, n, stored(node_type.operands[k])) for k, n in table_rows(node_type).items()
        )
    return rows_known[t]


def _all_below(rows: np.ndarray, n: int) -> bool:
    """Returns whether all are from 0 to n - 1, at a glance."""
    return bool(rows.view(f"u{rows.dtype.itemsize}").max() < n)


def _message(name: str, instance: int, value: int, n: int) -> str:
    return (
        f"`{name}` of instance {instance} looks up row {value} of a table of "
        f"{n} rows; expected a number from 0 to {n - 1}. JAX would take the nearest row that "
        'there is. Where that is meant, write `jnp.take(table, word, axis=0, mode="clip")`.'
    )
