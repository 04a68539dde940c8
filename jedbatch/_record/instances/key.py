"""Keys of instances: equal for instances that have the same graph.

Because the function is pure, instances that agree in everything but the contents of their arrays
have the same graph, so the graph is cached under a key that says exactly that.

Such a key is harder to make than it looks. `(1, 2) == (1.0, 2) == (True, 2)` although their
graphs differ, `0.0 == -0.0`, NaN differs from itself, and `hash` and `==` overflow the C
stack on a tree 50,000 levels deep. So what an instance is made of is written out (see
`_jaxpr.identity`), and nothing here recurses in C. Plain containers of numbers and strings take a
short cut: `marshal` writes them, with their types, at 10 ns a number, and refuses deep ones.
"""

import collections
import itertools
import marshal
import math
import struct
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.identity import Same, attribute_names, is_frozen, slot_names, typed
from jedbatch._record.instances.arrays import (
    CONSTANT_TYPES,
    LEAF_TYPES,
    PLAIN_TYPES,
    SAME_DTYPES,
    array_type,
    children_of,
    has_attributes_only,
    is_array,
    plain_fields,
    reads_its_dict,
)
from jedbatch._support.native import core
from jedbatch._support.types import Leaf, PyTree

MAX_DEPTH = 256  # of trees that are written by hand
_END: Any = object()  # of what a container holds
MANY_CLASSES = 256  # of objects in instances
SCALAR, NAMED, FIELDS, ATTRIBUTES, LEAF = range(5)  # how objects are written, as in C
ClassesMet = dict[type, tuple[int, Hashable, tuple[str, ...]] | None]  # see `_way_of`
_met: ClassesMet = {}


def instance_key(
    instance: PyTree, classes: ClassesMet | None = None
) -> tuple[Hashable | None, list[Leaf]]:
    """Returns the key that decides the graph of an instance, and its arrays in order.

    Containers and objects of classes of Python are keyed by what they contain, attributes included;
    what is met again, an array as well, by where it was met first. The arrays are listed as often
    as they are met, but for those in objects that are no containers, which are no inputs.

    The key is None if the instance holds something whose state is not to be seen, such as a
    generator or a sentinel, or arrays in an object that is no container.

    The classes of objects that are met are added to `classes`, until there are too many.
    """
    (key,), _ = plain_keys([instance])
    return written_key(instance, classes) if key is None else (key, [])


def written_key(
    instance: PyTree, classes: ClassesMet | None = None
) -> tuple[tuple[Hashable, ...] | None, list[Leaf]]:
    """Returns what `instance_key` does, with a key of one token for each part of the instance."""
    classes = _met if classes is None else classes
    found = _compiled_tokens(instance, classes)
    if found is not None:
        return found
    tokens: list[Hashable] = []
    arrays = []
    cacheable = True
    places: dict[int, tuple[int, Any]] = {}  # and the object, so that no other one has its id
    stack = [instance]
    num_outside = math.inf  # in the stack, when an object is looked into
    while stack:
        if len(stack) <= num_outside:
            num_outside = math.inf
        x = stack.pop()
        kind = type(x)
        if kind is float or kind is int:  # most of what there is
            tokens.append(typed(x))
            continue
        if kind in PLAIN_TYPES:
            tokens.append(typed(x))
            continue
        if isinstance(x, np.generic):
            tokens.append((kind, x.dtype, x.tobytes()))
            continue
        if kind is tuple and not x:  # there is one, which may be met many times
            tokens.append((kind, 0, None))
            continue
        if (kind is tuple or kind is list) and id(x) not in places:
            places[id(x)] = len(tokens), x
            tokens.append((kind, len(x), None))
            stack.extend(reversed(x))
            continue
        if num_outside < math.inf and is_array(x):
            cacheable = False
            continue
        if id(x) in places:
            tokens.append(("again", places[id(x)][0]))
            if is_array(x):
                arrays.append(x)
            continue
        if is_array(x):
            places[id(x)] = len(tokens), x
            tokens.append(("array", *array_type(x)))
            arrays.append(x)
        elif isinstance(x, Graph):  # immutable, and too large to compare
            tokens.append(Same(x))
        elif (node := children_of(x)) is not None:
            _note_class(classes, x)
            token, children, mutable = node
            places[id(x)] = len(tokens), x
            cacheable = cacheable and not mutable
            tokens.append((kind, len(children), token))
            stack.extend(reversed(children))
        elif kind is np.ndarray and not x.dtype.hasobject:  # of strings, for instance
            tokens.append((kind, x.dtype, x.shape, x.tobytes()))
        elif isinstance(x, LEAF_TYPES) or kind in (range, slice):
            _note_class(classes, x)
            tokens.append(typed(x))
        elif has_attributes_only(x) and (names := attribute_names(x)):
            _note_class(classes, x)
            places[id(x)] = len(tokens), x
            tokens.append((kind, *names))
            num_outside = min(num_outside, len(stack))
            stack.extend(getattr(x, name) for name in reversed(names))
        else:
            cacheable = False
    if not cacheable:
        return None, arrays
    try:
        hash(key := tuple(tokens))
    except TypeError:
        return None, arrays
    return key, arrays


def _compiled_tokens(
    instance: PyTree, classes: ClassesMet
) -> tuple[tuple[Hashable, ...], list[Leaf]] | None:
    """Returns what `written_key` does, from C; None if that leaves it to Python.

    That looks into tuples, named ones, too, lists, dicts by strings, arrays of NumPy, and objects
    whose attributes are in their dicts, and at nothing twice.
    """
    compiled = core()
    if len(classes) >= MANY_CLASSES:  # before it begins: one instance may have as many
        classes.clear()
    while compiled is not None:
        found = compiled.instance_tokens(instance, classes, (np.ndarray, SAME_DTYPES, typed))
        if found is None or len(found) == 2:
            return found
        classes[type(found[0])] = _way_of(found[0])
    return None


def _note_class(classes: ClassesMet, x: object) -> None:
    """Adds the class of an object."""
    if type(x) not in classes and len(classes) < MANY_CLASSES:
        classes[type(x)] = _way_of(x)


def _way_of(x: object) -> tuple[int, Hashable, tuple[str, ...]] | None:
    """(how C writes objects of a class, the token of one, its attributes); None if it does not."""
    kind: Any = type(x)
    if isinstance(x, np.generic):
        return SCALAR, None, ()
    fields = plain_fields(kind)
    if fields is not None:
        return FIELDS, (kind, len(fields), fields), fields
    if is_array(x) or isinstance(x, (Graph, *LEAF_TYPES)):
        return (LEAF, None, ()) if isinstance(x, LEAF_TYPES) and children_of(x) is None else None
    if isinstance(x, tuple) and hasattr(kind, "_fields"):
        has_items_only = kind.__iter__ is tuple.__iter__ and not kind.__dictoffset__
        if not has_items_only or slot_names(kind) or hasattr(kind, "maxlen"):
            return None
        return NAMED, (kind, len(kind._fields), (None,)), kind._fields
    if children_of(x) is None and has_attributes_only(x):
        names = tuple(attribute_names(x))
        return (
            (ATTRIBUTES, (kind, *names), names) if names and reads_its_dict(kind, names) else None
        )
    return None


def plain_keys(instances: list[PyTree]) -> tuple[list[bytes | None], list[bool]]:
    """Returns the keys of instances that are plain trees, and whether these cannot change.

    The key is None and the flag False where `instance_key` has to look at an instance.
    """
    found = tree_keys(instances, {}, every=False)
    assert found is not None
    return found[:2]


def keys_with_arrays(
    instances: list[PyTree], dtypes: dict[np.dtype[Any], int]
) -> tuple[list[bytes], list[list[np.ndarray]]] | None:
    """Returns keys of plain trees with arrays of NumPy inside, and these; None for any others.

    Where they are equal, so are the keys that `instance_key` makes, which takes several times as
    long.

    Args:
      instances: the trees.
      dtypes: that arrays may have, with a number for each.
    """
    found: Any = tree_keys(instances, dtypes, every=True)
    return found and (found[0], found[2])


def tree_keys(
    instances: list[PyTree], dtypes: dict[np.dtype[Any], int], *, every: bool
) -> tuple[list[bytes | None], list[bool], list[list[np.ndarray]]] | None:
    """Returns keys of plain trees with arrays of NumPy inside, whether these cannot change, arrays.

    A plain tree has the key that `marshal` writes, None where that is not done: for anything else,
    what is rare (bytes, a number of 64 bits), deep trees, and trees with a part that is met twice.

    Args:
      instances: the trees.
      dtypes: that arrays may have, with a number for each.
      every: whether None is returned if one has no key.
    """
    compiled = core()
    if compiled is not None:
        return compiled.tree_keys(instances, np.ndarray, dtypes, every)
    keys: list[bytes | None] = []
    held: list[list[np.ndarray]] = []
    for instance in instances:
        parts: list[bytes] = []
        arrays: list[np.ndarray] = []
        is_written = _write(instance, parts, arrays, dtypes)
        if every and not is_written:
            return None
        keys.append(b"".join(parts) if is_written else None)
        held.append(arrays)
    pairs = zip(keys, instances, strict=True)
    return keys, [key is not None and immutable(x) for key, x in pairs], held


def _write(
    instance: PyTree,
    parts: list[bytes],
    arrays: list[np.ndarray],
    dtypes: dict[np.dtype[Any], int],
) -> bool:
    """Writes a tree, as `marshal` does, and its arrays; returns whether that was done."""
    seen_ids: set[int] = set()
    within: list[tuple[Iterator[Any], bytes]] = [(iter((instance,)), b"")]  # and how each ends
    while within:
        left, end = within[-1]
        x = next(left, _END)
        if x is _END:
            within.pop()
            parts.append(end)
            continue
        kind = type(x)
        if kind in (int, float, bool, str, type(None)):
            if kind is int and not -(1 << 31) <= x < 1 << 31:
                return False
            if kind is str and not x.isascii() and any("\ud800" <= c <= "\udfff" for c in x):
                return False
            parts.append(marshal.dumps(x, 2))
            continue
        if kind not in (np.ndarray, tuple, list, dict) or id(x) in seen_ids:
            return False
        seen_ids.add(id(x))
        if kind is np.ndarray:
            number = dtypes.get(x.dtype)
            if number is None:
                return False
            sizes = [b"g" + struct.pack("<q", n) for n in x.shape]
            parts += b"A" + struct.pack("<i", number), b"(" + struct.pack("<i", x.ndim), *sizes
            arrays.append(x)
            continue
        if len(within) > MAX_DEPTH:
            return False
        if kind is not dict:
            parts.append((b"(" if kind is tuple else b"[") + struct.pack("<i", len(x)))
            within.append((iter(x), b""))
            continue
        if not PLAIN_TYPES.issuperset(map(type, x)):
            return False
        parts.append(b"{")
        within.append((itertools.chain.from_iterable(x.items()), b"0"))
    return True


def is_constant(x: object) -> bool:
    """True of what cannot change: strings, functions, modules, frozen dataclasses of such."""
    if type(x) in PLAIN_TYPES or x is None or isinstance(x, CONSTANT_TYPES):
        return True
    if isinstance(x, tuple):
        return all(map(is_constant, x))
    return is_frozen(x)


def may_change(x: object) -> bool:
    """True of containers that are compared by what is in them and may be changed."""
    if isinstance(x, tuple):
        return any(map(may_change, x))
    return isinstance(x, list | dict | set | bytearray | np.ndarray | collections.deque)


def immutable(instance: PyTree) -> bool:
    """True of plain instances without lists or dicts in them: they will not change."""
    try:
        hash(instance)
    except TypeError:
        return False
    return True
