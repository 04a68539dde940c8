"""The operations of nodes, and how their calls are recorded: records that a `Registry` interns."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class ListOperands:
    """Operands that are the elements of lists of one length, of which some do not exist.

    What they hold then changes no result, and no cotangent comes back to them.

    Attributes:
      first: position of the first of them; the lists follow one another.
      capacity: elements of each list that there is room for.
      length: position of the operand that says how many exist.
      summed: for each list whether nothing is read of it but the sum of the elements that exist.
      program: as the operation's, of the sums in place of such lists.
    """

    first: int
    capacity: int
    length: int
    summed: tuple[bool, ...]
    program: Any


@dataclass(frozen=True)
class Operation:
    """The operation that the nodes of a type compute; compared by `key` alone.

    Attributes:
      key: equal for operations that are equal.
      jaxpr: maps the shared values and then the operands to the results.
      lists: among its operands, if it serves lists of several lengths.
    """

    key: tuple[Hashable, ...]
    jaxpr: Any = field(compare=False, repr=False)
    lists: ListOperands | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> str:
        """Raises `TypeError`: programs are those of this process."""
        raise TypeError(
            "`pickle` got an operation, such as a graph or a layout of a plan has: a program of "
            "this process. Expected a graph of operations that other processes know by name: "
            "pickle what `batched.graph(*shared, instances)` returns for the same instances, or "
            "`Graph.from_dag`. Schedules and policies can be pickled, too."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Operation":
        return self  # it is frozen


class PrimitiveKey:
    """A primitive with its parameters; one object for equal ones, so hashing it is fast.

    Attributes:
      written: the primitive and what its parameters are told apart by.
      is_ragged: whether they name extents that differ from instance to instance.
      numbers: in the bodies of an operation (see `_jaxpr.numbers`).
      skeleton: as `written`, without the values of numbers.
    """

    __slots__ = ("is_ragged", "numbers", "skeleton", "written")

    def __init__(
        self, written: Hashable, is_ragged: bool, numbers: tuple = (), skeleton: Hashable = None
    ):
        self.written = written
        self.is_ragged = is_ragged
        self.numbers = numbers
        self.skeleton = skeleton


class CallSpec:
    """The recording of nodes of a type.

    Attributes:
      node_type: id of the type.
      arity: number of its operands.
      results: value type ids of its results.
      tree: pytree structure of what it returns; None if that is one array.
      unit: token of a result that stays as it is, such as a tuple; else None.
      made_values: (position of an operand, type of the node that makes it, ...), of operands that
        are shared values in the call; these nodes are recorded right before.
    """

    __slots__ = ("arity", "made_values", "node_type", "results", "tree", "unit")

    def __init__(self, node_type, arity, results, tree, unit, made_values=()):
        self.node_type = node_type
        self.arity = arity
        self.results = results
        self.tree = tree
        self.unit = unit
        self.made_values = made_values

    def making(self, made_values: tuple[int, ...]) -> "CallSpec":
        """Returns the same for calls some of whose operands have to be made first."""
        return CallSpec(self.node_type, self.arity, self.results, self.tree, self.unit, made_values)
