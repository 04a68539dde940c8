"""Parameters found by their paths, and the structures of results.

Another process has no classes of the model. Parameters are told apart by their paths there, so
that a dict restored from a checkpoint does in place of the dataclass or module that it was made of:
`params["cell"]["kernel"]` and `params.cell.kernel` have one path, `cell/kernel`. Results come in
dicts, lists and tuples; containers of other kinds come back as dicts, if their parts have names, or
as tuples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._record.instances.arrays import array_type, is_array
from jedbatch._support.types import Leaf, PyTree

LEAF = "leaf"
MAX_NAMED = 4  # paths in a message


@dataclass(frozen=True)
class ParameterType:
    """The type expected of an array among the shared arguments.

    Attributes:
      argument: the number of the argument.
      path: to it in there; empty if it is the argument.
      shape, dtype: of the array.
    """

    argument: int
    path: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def place(self) -> str:
        """The place for messages."""
        return f"argument {self.argument}{f' at {self.path!r}' if self.path else ''}"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def named(path: Sequence[Any]) -> str:
    """Returns a path of JAX with names and positions alone: `cell/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def parameter_types(shared: Sequence[PyTree], num_leaves: int) -> list[ParameterType]:
    """Returns the types of the arrays among shared arguments, of which there are so many."""
    found = []
    for argument, tree in enumerate(shared):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not _is_static(x):
                shape, dtype, _ = array_type(x)
                found.append(ParameterType(argument, named(path), shape, dtype))
    assert len(found) == num_leaves, f"{len(found)} arrays among {num_leaves} leaves"
    paths = [(t.argument, t.path) for t in found]
    again = next((x for x in paths if paths.count(x) > 1), None)
    if again is not None:
        raise ValueError(
            f"two arrays of argument {again[0]} have the path {again[1]!r}, by which another "
            "process would find them; give their containers different keys."
        )
    return found


def _is_static(x: object) -> bool:
    """True of leaves that are no arrays, such as the activation of a layer."""
    return not (is_array(x) or isinstance(x, jax.ShapeDtypeStruct | bool | int | float | complex))


def leaves_of(who: str, types: Sequence[ParameterType], shared: Sequence[PyTree]) -> list[Leaf]:
    """Returns the arrays among shared arguments in the order of their types, or an error.

    Raises:
      TypeError: there are more or fewer shared arguments.
      ValueError: an array is missing or unknown, or of another shape or dtype.
    """
    count = 1 + max((t.argument for t in types), default=-1)
    if len(shared) < count:
        raise TypeError(
            f"`{who}` got {len(shared)} shared arguments; expected {count}, as the function that "
            "was exported, and then the graphs or the plan."
        )
    found: dict[tuple[int, str], Leaf] = {}
    for argument, tree in enumerate(shared):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not _is_static(x):
                found[argument, named(path)] = x
    wanted = {(t.argument, t.path): t for t in types}
    missing = [t.place for place, t in wanted.items() if place not in found]
    unknown = [ParameterType(*place, (), None).place for place in found if place not in wanted]
    if missing or unknown:
        parts = [f"has no array at {_listed(missing)}"] if missing else []
        parts += [f"has an array at {_listed(unknown)}, which is not known"] if unknown else []
        raise ValueError(
            f"`{who}` got shared arguments of another structure: it {' and '.join(parts)}. "
            f"Expected the {len(types)} arrays of the model as it was exported; "
            "`exported.parameters` lists them."
        )
    leaves = []
    for place, t in wanted.items():
        leaf: Any = found[place]
        shape, dtype, _ = array_type(leaf)
        if (shape, dtype) != (t.shape, t.dtype):
            came = ParameterType(0, "", shape, dtype)
            raise ValueError(
                f"`{who}` got {came} as {t.place} of the shared arguments; expected {t}, with "
                "which the model was exported."
            )
        leaves.append(leaf if is_array(leaf) else np.asarray(leaf, dtype))
    return leaves


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return checks.cut(", ".join(places[:MAX_NAMED]) + more)


def structure_to_json(tree: PyTree) -> Any:
    """Returns the structure of a pytree as JSON, its parts in the order in which JAX has them."""
    if tree is None:
        return None
    parts, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(parts) == 1 and not parts[0][0]:
        return LEAF
    pairs = [(named(path), structure_to_json(part)) for path, part in parts]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [part for _, part in pairs]]
    if isinstance(tree, Mapping):
        has_names = all(isinstance(key, str) for key in tree)
    else:
        has_names = not all(name.isdigit() for name, _ in pairs)
    if has_names:
        return ["dict", [[name, part] for name, part in pairs]]
    return ["tuple", [part for _, part in pairs]]


def filled(structure: Any, leaves: Iterator[Any]) -> PyTree:
    """Returns a pytree of the structure that `structure_to_json` wrote, with leaves in order."""
    if structure is None:
        return None
    if structure == LEAF:
        return next(leaves)
    kind, parts = structure
    if kind == "dict":
        return {name: filled(part, leaves) for name, part in parts}
    built = [filled(part, leaves) for part in parts]
    return tuple(built) if kind == "tuple" else built
