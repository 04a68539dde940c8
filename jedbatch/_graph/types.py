"""Types of values and of nodes.

Two nodes of a graph may share a batch exactly when their types are equal. `NodeType` states that
rule once, for the whole package.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np

from jedbatch._graph.operations import Operation
from jedbatch._support.types import Dtype


@dataclass(frozen=True)
class ValueType:
    """Shape and dtype of one value of one instance.

    `weak` marks what JAX calls a weak type: a Python number, which takes the dtype of
    what it meets (bfloat16 × 0.5 stays bfloat16).
    """

    shape: tuple[int, ...]
    dtype: Dtype
    weak: bool = False

    def __str__(self) -> str:
        name = str(self.dtype)
        for long, short in (("float", "f"), ("uint", "u"), ("int", "i")):
            if name.startswith(long):
                name = short + name.removeprefix(long)
                break
        return f"{name}[{','.join(map(str, self.shape))}]{'~' if self.weak else ''}"


LENGTH = ValueType((), np.dtype(np.int32))  # of a list, or of an array that is padded


def _list(types: tuple[ValueType, ...]) -> str:
    """The types, repeats counted: `3 × f32[4], i32[]`."""
    groups = [(str(t), len(list(same))) for t, same in itertools.groupby(types)]
    return ", ".join(t if n == 1 else f"{n} × {t}" for t, n in groups)


@dataclass(frozen=True)
class NodeType:
    """The type of a node: two nodes may share a batch exactly if their types agree.

    A type is

    - the operation: the program of a cell, in which keyword arguments without arrays and Python
      values it closes over are constants; a jit-ted function or a primitive with its parameters;
    - the types of its operands: shape, dtype and weakness;
    - *which* shared values it reads: two layers with equal shapes and different weights
      have different types.

    Values are not part of it. Arrays, positional Python numbers given to a cell and scalar
    literals in raw operations are inputs: nodes that differ only in them run together, each
    with its own value. A concrete `jax.Array` that the function closes over counts as a
    weight, as under `jax.vmap`; a NumPy array counts as a value.

    Attributes:
      name: for people; also how a stored graph finds its cell again.
      label: says what the type is in words that another process uses as well, whatever the ids
        there; a learned policy knows types by it.
      operation: compared by equality; `None` in a bare graph, which can be scheduled only.
      operands: types of the operands, in order.
      shared: ids of the shared values read, in order.
      results: types of the results, in order.
      identity: a digest of what nodes compute, the same in every process; "" if it is not known.
    """

    name: str
    operation: Operation | None = None
    operands: tuple[ValueType, ...] = ()
    shared: tuple[int, ...] = ()
    results: tuple[ValueType, ...] = ()
    label: str = field(default="", compare=False)
    identity: str = field(default="", compare=False)

    @property
    def num_results(self) -> int:
        """Results per node; a node of a bare graph counts as one."""
        return len(self.results) or 1

    def __str__(self) -> str:
        if self.operation is None and not self.results:
            return self.name
        return f"{self.name}({_list(self.operands)}) -> {_list(self.results)}"


def operation_of(node_type: NodeType) -> Operation:
    """Returns the operation of a type of a graph that is not bare."""
    operation = node_type.operation
    assert operation is not None, f"{node_type} is a type of a bare graph"
    return operation
