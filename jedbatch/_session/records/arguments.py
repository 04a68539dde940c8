"""The arguments of a batched function: those that all instances share, and those of each."""

import enum
import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jedbatch import checks
from jedbatch._jaxpr.identity import Same, node_key, tree_key
from jedbatch._kernel.target import Target, target_of
from jedbatch._program.executors import is_lasting
from jedbatch._record.identity.environment import Environment
from jedbatch._record.instances.arrays import ArrayType, array_type, flatten, is_array
from jedbatch._record.types.tracing import NUMBER_TYPES
from jedbatch._support.caches import Memory
from jedbatch._support.types import Array

MAX_FUNCTIONS = 1024  # that stand for equal ones
BATCHED_ALREADY = (
    " Where `jax.vmap` or `jax.pmap` of it is called: the function is batched already, and is "
    "called with all instances, `batched(params, instances)`; what they map is minibatches."
)


class StackedInstances(NamedTuple):
    """Instances that are the rows of arrays.

    Attributes:
      shared: the shared arguments.
      arrays: whose rows they are.
      num_rows: how many rows each has.
      structure: of the mapped arguments, whose leaves the arrays are.
    """

    shared: tuple[Any, ...]
    arrays: list[Array]
    num_rows: int
    structure: PyTreeDef

    def first(self) -> tuple[list[Array], tuple[Any, ...]]:
        """Returns (the first rows of the arrays, the mapped arguments that hold these)."""
        rows = [first_row(x) for x in self.arrays]
        return rows, jax.tree.unflatten(self.structure, rows)

    def key(self) -> Hashable | None:
        """Returns a key, equal where instances are recorded as the same graph; None if not known.

        They are where all arrays have the same types, and the containers are equal and cannot
        change.
        """
        plain = tree_key(self.structure)
        try:
            structure = plain if plain is self.structure else node_key(self.structure)
            return structure, *map(array_type, self.arrays)
        except TypeError:
            return None


def first_row(x: Array) -> Array:
    """Returns the first row of an array, also where a mesh with explicit axes has its rows."""
    if isinstance(x, np.ndarray):
        return x[0, ...]
    sharding = jax.typeof(x).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return x[0, ...]
    if isinstance(x, Tracer):  # JAX does not cut traced ones; XLA drops this, as nobody reads it
        return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))[0, ...]
    row = PartitionSpec(*sharding.spec[1:])
    return x.at[0].get(out_sharding=NamedSharding(sharding.mesh, row))


@dataclass(frozen=True)
class Arguments:
    """Arguments of a function, shared by its instances or spread over them.

    Attributes:
      name: of the function, for messages.
      axes: None for each argument that all instances share, 0 for each that is a sequence of
        instances; or 0 if all are.
    """

    name: str
    axes: int | tuple[int | None, ...]

    @functools.cached_property
    def _shared_come_first(self) -> bool:
        axes = () if isinstance(self.axes, int) else self.axes
        is_mapped = [axis is not None for axis in axes]
        return is_mapped == sorted(is_mapped)

    def _axes(self, num_args: int) -> Sequence[int | None]:
        return (self.axes,) * num_args if isinstance(self.axes, int) else self.axes

    def _axes_of(self, args: Sequence[Any]) -> Sequence[int | None]:
        """Returns the axes of arguments, or raises `ValueError` if there are not as many."""
        axes = self._axes(len(args))
        if len(axes) != len(args):
            raise ValueError(
                f"the batched `{self.name}` got {len(args)} arguments and `in_axes` has "
                f"{len(axes)} entries, {tuple(axes)}; expected one entry per argument. Write None "
                "for what all instances share and 0 for a sequence of instances, as in "
                "`jedbatch.batch(fn, in_axes=(None, 0))`."
            )
        return axes

    def refuse_named(self, names: Sequence[str]) -> NoReturn:
        """Raises `TypeError` of arguments that were given by name."""
        name = names[0]
        raise TypeError(
            f"the batched `{self.name}` got {name}=...; expected arguments by position, one for "
            "each entry of `in_axes`. Give it by position, with None in `in_axes` if it is arrays "
            "that all instances share, or bind it before: "
            f"`jedbatch.batch(functools.partial(fn, {name}=...))`."
        )

    def split(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """Returns (shared arguments, the mapped arguments of each instance).

        Raises:
          ValueError, TypeError: they do not fit the axes, or there are no instances.
        """
        axes = self._axes_of(args)
        mapped = []
        for position, (x, axis) in enumerate(zip(args, axes, strict=True)):
            if axis is None:
                continue
            mapped.append(instances_of(x, f"argument {position} of the batched `{self.name}`"))
        lengths = [len(x) for x in mapped]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"the mapped arguments of the batched `{self.name}` have {lengths} instances; "
                "expected equally many."
            )
        if not lengths[0]:
            raise ValueError(
                f"the batched `{self.name}` got an empty list of instances; expected at least "
                "one, since the shape of the result follows from them. Skip empty minibatches."
            )
        shared = tuple(x for x, axis in zip(args, axes, strict=True) if axis is None)
        return shared, list(zip(*mapped, strict=True))

    def minibatches(self, args: Sequence[Any]) -> "Minibatches":
        """Returns an iterator of the arguments of each minibatch; the mapped ones are iterables.

        Raises:
          ValueError, TypeError: they do not fit the axes, or one is no iterable; later, if there
            are more minibatches of one than of another.
        """
        expected = "minibatches, such as a list of lists of instances or a loader of data"
        return Minibatches(
            self, *self._iterables(args, f"{expected}. For a single minibatch write `plan`")
        )

    def streams(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Iterator[tuple[Any, ...]]]:
        """Returns (shared arguments, the mapped ones of each instance); these come from iterables.

        Raises:
          ValueError, TypeError: they do not fit the axes, or one is no iterable; later, if there
            are more instances of one than of another.
        """
        expected = "instances, such as a list, a generator or an open file"
        shared, iterables = self._iterables(args, f"{expected}. For the rows of arrays, call it")
        iterators = list(map(iter, iterables))
        following = functools.partial(self.following, iterators, "instances")
        return tuple(shared), iter(following, ())

    def _iterables(self, args: Sequence[Any], expected: str) -> tuple[list[Any], list[Any]]:
        """Returns (shared arguments, the mapped ones, which are iterables)."""
        axes = self._axes_of(args)
        shared = [x for x, axis in zip(args, axes, strict=True) if axis is None]
        iterables = []
        for position, (x, axis) in enumerate(zip(args, axes, strict=True)):
            if axis is None:
                continue
            if isinstance(x, dict | str | bytes) or not hasattr(x, "__iter__"):
                raise TypeError(
                    f"argument {position} of the batched `{self.name}` is {checks.shown(x)}; "
                    f"expected an iterable of {expected}."
                )
            iterables.append(x)
        return shared, iterables

    def following(self, iterators: Sequence[Iterator[Any]], what: str) -> tuple[Any, ...]:
        """Returns the next item of each iterator, nothing if all have ended.

        Raises:
          ValueError: some have ended.
        """
        missing = object()
        mapped = tuple([next(x, missing) for x in iterators])
        if all(x is missing for x in mapped):
            return ()
        if any(x is missing for x in mapped):
            raise ValueError(
                f"the mapped arguments of the batched `{self.name}` have different numbers of "
                f"{what}; expected equally many."
            )
        return mapped

    def stacked(self, args: Sequence[Any], least: int) -> StackedInstances | None:
        """Returns instances that are the rows of arrays, if all are and there are enough of them.

        They are if every mapped argument is an array, or a pytree of arrays that is no sequence.
        The items of vectors of NumPy are numbers.
        """
        axes = self._axes(len(args))
        mapped = [x for x, axis in zip(args, axes, strict=False) if axis is not None]
        if len(axes) != len(args):
            return None
        if not all(map(_may_be_stacked, mapped)):
            return None
        arrays, structure = jax.tree.flatten(tuple(mapped))
        if not all(is_array(x) and x.ndim for x in arrays):
            return None
        if len(set(map(len, arrays))) != 1 or (num_rows := len(arrays[0])) < least:
            return None
        shared = tuple(x for x, axis in zip(args, axes, strict=True) if axis is None)
        return StackedInstances(shared, arrays, num_rows, structure)

    def join(self, shared: Sequence[Any], mapped: Sequence[Any]) -> list[Any]:
        """Returns the arguments of the function, from the shared and the mapped ones."""
        if self._shared_come_first:
            return [*shared, *mapped]
        axes = self._axes(len(shared) + len(mapped))
        sources = {True: iter(shared), False: iter(mapped)}
        return [next(sources[axis is None]) for axis in axes]

    def leaves(self, shared: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """Returns (leaves, structure) of the shared arguments.

        Functions and strings, such as the activation of a layer, are part of the structure.

        Raises:
          TypeError: a leaf is no array.
        """
        owner = f"the shared argument of the batched `{self.name}`"
        leaves, structure = flatten(shared, owner)
        if not _are_parameters(leaves):
            marked = [x if _is_parameter(x) else self._marked(x, shared) for x in leaves]
            leaves, structure = flatten(jax.tree.unflatten(structure, marked), owner)
        return leaves, structure

    def _marked(self, leaf: Any, shared: tuple) -> "StaticLeaf":
        """Returns a leaf that is no array as part of the structure."""
        if isinstance(leaf, str | bytes | np.dtype | enum.Enum) or callable(leaf):
            return StaticLeaf.of(leaf)
        path = next(p for p, x in jax.tree.leaves_with_path(shared) if x is leaf)
        raise TypeError(
            f"the shared argument of the batched `{self.name}` has {checks.shown(leaf)} "
            f"at {jax.tree_util.keystr(path)}; expected arrays, functions and strings. "
            "Close over other configuration, or bind it with `functools.partial`."
        )


class TypesOfLeaves:
    """The types of shared leaves, and the target of the device that they are on.

    They are kept as long as the very same arrays come again, as those of a model do, and JAX has
    the same default device and the same precision.
    """

    def __init__(self) -> None:
        # References to the arrays, the options that matter, what was found.
        self._latest: tuple[tuple[weakref.ref, ...], object, tuple[Any, Target]] | None = None

    def of(self, leaves: Sequence[Any]) -> tuple[tuple[ArrayType, ...], Target]:
        """Returns ((shape, dtype, weak) of each leaf, the target of their device)."""
        config: Any = jax.config
        state, latest = (config.jax_default_device, config.jax_enable_x64), self._latest
        if latest is not None and latest[1] == state and _refer_to(latest[0], leaves):
            return latest[2]
        found = tuple(map(array_type, leaves)), target_of(leaves)
        if all(map(is_lasting, leaves)):
            self._latest = tuple(map(weakref.ref, leaves)), state, found
        return found


def _refer_to(references: Sequence[weakref.ref], values: Sequence[Any]) -> bool:
    """Returns whether values are the very same as those that are referred to."""
    if len(references) != len(values):
        return False
    return all(map(operator.is_, map(operator.call, references), values))


class Minibatches(Iterator[list[Any]]):
    """The arguments of one minibatch after the other, from a position that can be read and set.

    A loader of data whose iterators have `get_state` and `set_state`, as those of Grain do, knows
    its position. Of others minibatches are counted, and those before are read again.

    Args:
      arguments: of the function.
      shared: the arguments that all instances share.
      iterables: of minibatches, one for each other argument.
    """

    def __init__(self, arguments: Arguments, shared: Sequence[Any], iterables: Sequence[Any]):
        self._arguments, self._shared, self._iterables = arguments, shared, iterables
        self._iterators = list(map(iter, iterables))
        self._position = 0

    def __next__(self) -> list[Any]:
        mapped = self._arguments.following(self._iterators, "minibatches")
        if not mapped:
            raise StopIteration
        self._position += 1
        return self._arguments.join(self._shared, mapped)

    @property
    def _is_stateful(self) -> bool:
        return all(hasattr(x, "get_state") and hasattr(x, "set_state") for x in self._iterators)

    def get_state(self) -> dict[str, Any]:
        """Returns the position: how many were read, and the states of loaders that have one."""
        states = [x.get_state() for x in self._iterators] if self._is_stateful else None
        return {"position": self._position, "sources": states}

    def at(self, state: Mapping[str, Any]) -> "Minibatches":
        """Returns the same from a position on that `get_state` returned, here or elsewhere.

        Raises:
          ValueError: there are fewer minibatches, these are of another kind, or they come from an
            iterator that has been read further.
        """
        position, states = state["position"], state["sources"]
        fresh = Minibatches(self._arguments, self._shared, self._iterables)
        if (states is not None) != fresh._is_stateful:
            kinds = "that know their position", "that are counted"
            came, expected = kinds if states is not None else kinds[::-1]
            raise ValueError(
                f"`set_state` got the position of minibatches {came}, and these are of a kind "
                f"{expected}; expected the same kind of loader of data as where it was read."
            )
        if states is not None:
            for iterator, own in zip(fresh._iterators, states, strict=True):
                iterator.set_state(own)
            fresh._position = position
            return fresh
        if any(x is y for x, y in zip(fresh._iterators, self._iterators, strict=True)):
            fresh._position = self._position  # it goes on where it is
        if fresh._position > position:
            raise ValueError(
                f"`set_state` got position {position}, and {fresh._position} minibatches were read "
                "already of an iterator that begins only once; expected a list, a loader of data, "
                "or another iterator from the beginning."
            )
        while fresh._position < position:
            if next(fresh, None) is None:
                raise ValueError(
                    f"`set_state` got position {position}, and there are {fresh._position} "
                    "minibatches; expected the same ones as where it was read."
                )
        return fresh


def _may_be_stacked(x: Any) -> bool:
    """Returns whether a mapped argument is an array, not of numbers, or a container with names."""
    if is_array(x):
        return x.ndim > 1 or (x.ndim == 1 and not isinstance(x, np.ndarray))
    if isinstance(x, list) or (isinstance(x, tuple) and not hasattr(x, "_fields")):
        return False
    return jax.tree_util.default_registry.flatten_one_level(x) is not None


def instances_of(x: Any, who: str) -> list[Any]:
    """Returns the instances in a mapped argument, called `who` in messages.

    They are the items of a sequence, the rows of an array, or the rows of the arrays of any other
    pytree: of a dict, a named tuple, a dataclass or a module.

    Raises:
      TypeError: it is none of these.
      ValueError: arrays of a pytree have different numbers of rows.
    """
    is_record = isinstance(x, dict) or (isinstance(x, tuple) and hasattr(x, "_fields"))
    is_sequence = hasattr(x, "__len__") and hasattr(x, "__getitem__") and getattr(x, "ndim", 1) > 0
    if is_sequence and not is_record and not isinstance(x, str | bytes):
        return _rows(x) if isinstance(x, jax.Array) else list(x)
    one_level = jax.tree_util.default_registry.flatten_one_level(x)
    if one_level is None or not any(True for _ in one_level[0]):
        raise TypeError(
            f"{who} is {checks.shown(x)}, but `in_axes` has 0 for it; expected a sequence of "
            "instances, such as a list, or an array or a dict of arrays, whose rows are the "
            "instances. If all instances share it, write None in `in_axes`."
            + (" An iterator is read once: write `list(...)`." if isinstance(x, Iterator) else "")
            + (BATCHED_ALREADY if isinstance(x, Tracer) else "")
        )
    leaves, structure = flatten(x, who)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(x)]
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_array(leaf) or not leaf.ndim:
            raise TypeError(
                f"{who} is a {type(x).__name__} with {checks.shown(leaf)} at {path}; expected "
                "arrays alone, whose rows belong to the instances. Write a list of instances, or "
                "None in `in_axes` if all instances share it."
                + (BATCHED_ALREADY if isinstance(leaf, Tracer) else "")
            )
    rows = [len(leaf) for leaf in leaves]
    if len(set(rows)) > 1:
        found = ", ".join(f"{n} at {path}" for path, n in zip(paths, rows, strict=True))
        raise ValueError(
            f"{who} has arrays with different numbers of rows, {checks.cut(found)}; expected one "
            "row for each instance in all of them. What all instances share is an argument of its "
            "own, with None in `in_axes`."
        )
    by_row = zip(*(_rows(leaf) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, row) for row in by_row]


def _rows(array: Array) -> list[Array]:
    """Returns the rows of an array as arrays, those of a vector too."""
    if isinstance(array, np.ndarray):
        return [array[i, ...] for i in range(len(array))]
    if isinstance(array, Tracer):
        # One by one, a program would be compiled for each row of an array that is differentiated.
        return _unstacked(array)
    with jax.ensure_compile_time_eval():  # JAX takes no 100 rows apart while it traces
        return list(array)


@jax.jit
def _unstacked(array: Array) -> list[Array]:
    return list(array)


_environments: dict[Same, Environment] = Memory(MAX_FUNCTIONS)
_functions: dict[Hashable, Any] = Memory(MAX_FUNCTIONS)  # by what they compute


@jax.tree_util.register_pytree_node_class
class StaticLeaf:
    """A leaf of a pytree that is part of its structure.

    Structures with such nodes are filled with the values themselves.

    Attributes:
      value: the leaf; of functions that compute the same now, one stands for all.
      content: what a function computes, with all that it reads by now; None of other leaves.
    """

    def __init__(self, value: Any, content: Hashable):
        self.value = value
        self.content = content

    @classmethod
    def of(cls, leaf: Any) -> "StaticLeaf":
        """Returns a function, or something that cannot change, as part of a structure."""
        if not callable(leaf):
            return cls(leaf, None)
        content = _written(leaf)
        first = _functions.setdefault(content, leaf)
        if first is not leaf and _written(first) != content:  # it has changed since
            first = _functions[content] = leaf
        return cls(first, content)

    def tree_flatten(self) -> tuple[tuple[()], Hashable]:
        """For JAX: (no leaves, the value and its content)."""
        return (), (self.value, self.content)

    @staticmethod
    def tree_unflatten(carried: tuple[Any, Hashable], _: object) -> Any:
        """For JAX: the value."""
        return carried[0]


def _written(fn: Any) -> Hashable:
    """Returns a function with all that it reads now; see `Environment.written`."""
    key = Same(fn)
    environment = _environments.get(key)
    if environment is None:
        environment = _environments[key] = Environment(fn)
    return environment.written()


def _are_parameters(leaves: Sequence[object]) -> bool:
    """Returns whether all leaves of shared arguments are arrays or numbers.

    Of arrays of JAX, and of numbers, one of a type says it for all.
    """
    some: dict[type, Any] = {type(x): x for x in leaves}
    if any(issubclass(kind, np.ndarray) for kind in some):
        return all(map(_is_parameter, leaves))
    return all(map(_is_parameter, some.values()))


def _is_parameter(leaf: object) -> bool:
    """Returns whether a leaf of shared arguments is an array or a number."""
    is_known = is_array(leaf) or isinstance(leaf, (*NUMBER_TYPES, jax.ShapeDtypeStruct))
    return is_known and not getattr(getattr(leaf, "dtype", None), "hasobject", False)


def is_zero(axis: object) -> bool:
    """True of 0, but not of False."""
    return isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) and axis == 0


def checked_axes(fn: Callable, in_axes: object, out_axes: object) -> int | tuple[int | None, ...]:
    """Returns the axes of `Arguments` for what `jedbatch.batch` was given.

    Raises:
      ValueError, TypeError: `fn` is no function, or the axes make no sense.
    """
    if not callable(fn):
        raise TypeError(f"`batch` got {checks.shown(fn)}; expected a function of one instance.")
    axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,)
    if not axes or not all(axis is None or is_zero(axis) for axis in axes):
        raise ValueError(
            f"`batch` got in_axes={checks.brief(in_axes)}; expected 0 or a tuple with None (shared "
            "by all instances) or 0 (a sequence of instances) for each argument. For another axis "
            "of an array, give `jnp.moveaxis(x, axis, 0)`; what instances share that is part of an "
            "argument is an argument of its own."
        )
    if 0 not in axes:
        raise ValueError(
            f"`batch` got in_axes={in_axes!r}, which maps no argument; write 0 for the argument "
            "that holds the instances, as in `in_axes=(None, 0)`."
        )
    if not (out_axes is None or is_zero(out_axes)):
        raise ValueError(
            f"`batch` got out_axes={checks.brief(out_axes)}; expected 0 to stack results along "
            "a new first axis, or None for a list. To stack along another axis, `jnp.moveaxis` "
            "the result."
        )
    return in_axes if isinstance(in_axes, int) else axes
