"""The values that a function reads besides its arguments, and detection of changes to them.

A batched function remembers what it recorded, and a pure function does the same again whenever it
is called. But it may close over things that change between two calls: the weights of a module that
an optimizer updates in place, an attribute of the object whose method it is, a global that is
assigned again. So everything that it can reach is looked at before each call:

    functions     closures, defaults, attributes, the globals that their code names, what they wrap
    methods       the object and the function
    containers    what is in them
    objects       attributes; methods and attributes of their class
    modules       what is named by the code that names the module
    classes of objects in instances
                  attributes and methods that code names, and operators

Numbers and strings are compared by type and value, as in `_jaxpr.identity`, arrays of JAX by
identity, arrays of NumPy by what is in them. Code of installed packages and of Python itself is not
looked into, only the objects it was given; nor are more than `MAX_VALUES` objects, the nearest
first. All that is taken to stay as it is. Arrays found nowhere are not: what reads them is recorded
every time.

The first look writes everything out. Later ones only ask whether each container still holds the
very same things, which takes 30 ns a thing; if one does not, everything is written out again. What
was recorded belongs to one such text, by its number. Arrays are known by their place in it, and
are handed to the compiled program at each call: other weights at the same places, another number
and other records, but the same program.

What changes while the function itself runs, such as a list in which it counts its calls, does not
count: a pure function does not read what it writes.
"""

import collections
import functools
import hashlib
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.identity import (
    BY_IDENTITY,
    attribute_names,
    is_all_python,
    typed,
    typed_or_same,
)
from jedbatch._record.identity.accessors import (
    attribute,
    of_attributes,
    of_cells,
    of_class,
    of_dict,
    of_functions,
    of_names,
    of_object,
    of_rows,
    of_some_of_class,
    stays,
)
from jedbatch._record.identity.functions import (
    FUNCTIONS_OF_RULES,
    cell_of,
    code_names,
    is_installed,
)
from jedbatch._support.native import function_types
from jedbatch._support.types import Array, Leaf

MAX_VALUES = 20_000  # things looked at, before the rest is taken not to change
MAX_COMPARED_BYTES = 1 << 20  # of arrays of NumPy that are compared
MAX_CLASSES = 256  # of objects in instances
MAX_TEXTS = 16  # that have a number, before the oldest is forgotten
_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None)})
_CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque)
_OPAQUE = frozenset({"jax", "jaxlib", "numpy", "ml_dtypes", "jedbatch"})


class Weakly:
    """Equal to another exactly if both are of the same object, which still lives."""

    __slots__ = ("hash", "ref")

    def __init__(self, value: object):
        self.ref = weakref.ref(value)
        self.hash = id(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        own_value = self.ref()
        return isinstance(other, Weakly) and own_value is not None and own_value is other.ref()


class _Guard(NamedTuple):
    """The objects found by one read of a subject; arrays are held weakly.

    Attributes:
      read: gives them again.
      subject: where it was read.
      found: the things.
      weak: whether there are arrays among them.
    """

    read: Callable[[Any], Any]
    subject: Any
    found: tuple[Any, ...]
    weak: bool

    @staticmethod
    def of(read: Callable, subject: object) -> "_Guard":
        values = tuple(read(subject))
        weak = list(map(_is_array, values))
        if any(weak):
            values = tuple([Weakly(x) if w else x for x, w in zip(values, weak, strict=True)])
        return _Guard(read, subject, values, any(weak))


def _holds(read: Callable[[Any], Any], subject: Any, found: tuple[Any, ...], weak: bool) -> bool:
    """Returns whether a guard, given its parts, finds the same things."""
    now = tuple(read(subject))
    if not weak:
        return len(now) == len(found) and False not in map(operator.is_, now, found)
    return len(now) == len(found) and all(
        f is x or (type(f) is Weakly and f.ref() is x) for f, x in zip(found, now, strict=True)
    )


class Reached(NamedTuple):
    """A snapshot of what a function reads besides its arguments.

    Attributes:
      number: equal for times between which nothing has changed.
      arrays: the arrays of JAX.
      names: under which programs read them (see `SharedValue`): the way to each.
      things: ids of all things that were looked at.
    """

    number: int
    arrays: tuple[Any, ...]
    names: tuple["AccessPath", ...]
    things: Set[int] = frozenset()

    @property
    def ways(self) -> dict[int, "AccessPath"]:
        """The way to each array, by its id."""
        return dict(zip(map(id, self.arrays), self.names, strict=True))


class AccessPath(NamedTuple):
    """A path from a function to an array: steps of (how, key)."""

    steps: tuple[tuple[str, Any], ...]


NOWHERE = Reached(0, (), ())


class Environment:
    """The values that a function reads besides its arguments, watched for changes."""

    def __init__(self, fn: object):
        self._fn = fn
        self._classes: dict[type, None] = {}
        self._num_read = 0  # of the classes
        self._guards: list[_Guard] = []
        self._arrays: list[weakref.ref] = []
        self._names: tuple[AccessPath, ...] = ()
        self._things: Set[int] = frozenset()
        self._numbers: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
        self._count = itertools.count(1)
        self._number = 0
        self._text: Hashable = None

    @property
    def classes(self) -> tuple[type, ...]:
        """Those of objects in instances, that are looked at."""
        return tuple(self._classes)

    def written(self) -> Hashable:
        """Returns the function with all that it reads now, written out.

        Equal for functions that compute the same.
        """
        self.look()
        return self._text

    def digest(self) -> bytes:
        """Returns a digest of the numbers, texts and code that the function reads now.

        In another process it is the same, if the function is. Arrays of JAX do not count.
        """
        self.look()
        hashed = hashlib.blake2b(digest_size=16)
        for part in self._text:  # type: ignore[attr-defined]
            _add_plain(hashed, part)
        return hashed.digest()

    def look(self) -> Reached:
        """Returns a snapshot of what the function reads now."""
        if not self._is_same():
            text, arrays = self._read()
            self._number = self._numbers.pop(text, 0) or next(self._count)
            self._keep(text)
        else:
            arrays = tuple([ref() for ref in self._arrays])
        return Reached(self._number, arrays, self._names, self._things)

    def follow(self, way: AccessPath) -> Any:
        """Returns the object that is now at the end of a way; None if a step of it fails."""
        x = self._fn
        try:
            for how, key in way.steps:
                x = _FOLLOW[how](x, key)
        except (LookupError, AttributeError, TypeError, ValueError):
            return None
        return x

    def meet(self, classes: Iterable[type]) -> None:
        """Looks at classes of objects in instances from now on, too, some of them at most."""
        for kind in classes:
            if len(self._classes) < MAX_CLASSES and any(_classes_of_user(kind)):
                self._classes.setdefault(kind)

    def settle(self, before: Reached) -> None:
        """Takes note of what the function itself has changed; other arrays are another text."""
        if before.number == self._number and not self._is_same():
            text, arrays = self._read()
            same = len(arrays) == len(before.arrays)
            if not (same and all(map(operator.is_, arrays, before.arrays))):
                self._number = 0
                return
            self._keep(text)

    def clear(self) -> None:
        """Forgets what was seen."""
        self._guards, self._arrays, self._names, self._number = [], [], (), 0
        self._things = frozenset()
        self._classes.clear()
        self._text = None
        self._numbers.clear()

    def _is_same(self) -> bool:
        is_read = self._number and self._num_read == len(self._classes)
        return bool(is_read) and all(itertools.starmap(_holds, self._guards))

    def _read(self) -> tuple[Hashable, tuple[Any, ...]]:
        walk = _Walk()
        text = walk.write(self._fn, list(self._classes))
        self._num_read = len(self._classes)
        self._guards, self._arrays = walk.guards, list(map(weakref.ref, walk.arrays))
        self._names, self._things = tuple(walk.names), walk.things
        return text, tuple(walk.arrays)

    def _keep(self, text: Hashable) -> None:
        self._text = text
        self._numbers[text] = self._number
        while len(self._numbers) > MAX_TEXTS:
            self._numbers.popitem(last=False)


class _Thing(NamedTuple):
    """Something to be looked at.

    Attributes:
      value: the thing.
      way: how one gets there: (way to where it was read, how, key).
      names: those in the code that can get at it.
    """

    value: Any
    way: Any
    names: frozenset[str]


class _Walk:
    """One look at everything, the nearest first.

    Attributes:
      guards: how to see that nothing has changed.
      arrays: the arrays of JAX that were met.
      names: the way to each.
    """

    def __init__(self) -> None:
        self.guards: list[_Guard] = []
        self.arrays: list[Array] = []
        self.names: list[AccessPath] = []
        self._text: list[Hashable] = []
        self._places: dict[int, tuple[int, Any]] = {}
        self._queue: collections.deque[_Thing] = collections.deque()
        self._queued = 0
        self._bytes = 0
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self._named: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._code_names: set[str] = set()  # of all code that was met
        self._of_classes: dict[type, dict[str, None]] = {}  # what was visited of them

    @property
    def things(self) -> Set[int]:
        """Ids of all that was met."""
        return frozenset(self._places)  # a view would keep arrays alive

    def write(self, fn: object, classes: Sequence[type] = ()) -> Hashable:
        """All that a function reaches, written out, with classes of objects in instances."""
        self._queue.append(_Thing(fn, None, frozenset()))
        self._write_queue()
        kinds = dict.fromkeys(k for kind in classes for k in _classes_of_user(kind))
        while self._visit_named(kinds):  # methods name others
            self._write_queue()
        for kind in kinds:
            names = self._of_classes.get(kind, ())
            self.guards.append(_Guard.of(functools.partial(of_some_of_class, names), kind))
        self._guard()
        return tuple(self._text)

    def _write_queue(self) -> None:
        while self._queue:
            thing = self._queue.popleft()
            x = thing.value
            kind = type(x)
            if kind in _PLAIN:
                self._text.append(typed(x))
            elif isinstance(x, types.ModuleType):
                self._text.append(typed(x))
                if not is_installed(x.__name__):
                    self._visit_names(thing, "attribute", vars(x), thing.names)
            elif id(x) in self._places:
                self._text.append(("again", self._places[id(x)][0]))
            else:
                self._places[id(x)] = len(self._text), x
                self._visit(thing, x, type(x))

    def _guard(self) -> None:
        """Guards what was visited."""
        if self._functions:
            self.guards.append(_Guard.of(of_functions, self._functions))
        if self._cells:
            self.guards.append(_Guard.of(of_cells, self._cells))
        for namespace, names in self._named.values():
            self.guards.append(_Guard.of(functools.partial(of_names, tuple(names)), namespace))

    def _add(
        self, thing: _Thing, how: str, keys: Any, values: Any, names: frozenset[str] = frozenset()
    ) -> bool:
        """Adds what can be read from a thing under some keys, if there is room."""
        self._text.append(len(values))
        if self._queued + len(values) > MAX_VALUES:
            return False
        self._queued += len(values)
        pairs = zip(keys, values, strict=True)
        self._queue.extend([_Thing(x, (thing.way, how, key), names) for key, x in pairs])
        return True

    def _visit(self, thing: _Thing, x: object, kind: object) -> None:
        text = self._text
        if _is_array(x):
            text.append(Weakly(x))
            if not kind.__module__.startswith("jedbatch."):  # a symbol: its recorder's to judge
                self.arrays.append(x)
                self.names.append(_steps(thing.way))
        elif isinstance(x, np.ndarray):
            self._visit_rows(x)
        elif isinstance(x, function_types()):
            self._visit_function(thing, x)
        elif isinstance(x, type):
            text.append(typed(x))
            for k in x.__mro__:
                if not is_installed(k.__module__):
                    self._visit_class(thing, k)
        elif isinstance(x, _CONTAINERS):
            text.append(kind)
            self._visit_container(thing, x)
            self._visit_attributes(thing)
        elif kind is functools.partial:  # whose slots also hold how it was called last
            text.append(kind)
            self._visit_parts(thing)
        elif isinstance(x, BY_IDENTITY) or kind.__module__.partition(".")[0] in _OPAQUE:
            text.append(typed_or_same(x))
            self._visit_parts(thing)
        else:
            text.append(kind if is_all_python(kind) else typed_or_same(x))
            self._add(thing, "type", [None], [kind])
            self._visit_parts(thing)
            self._visit_attributes(thing)

    def _visit_function(self, thing: _Thing, fn: Any) -> None:
        if (made := cell_of(fn)) is not None:
            of_user = {k: x for k, x in vars(fn).items() if k not in _OF_EVERY_CELL}
            self._text += ["cell", *of_user]
            self.guards.append(_Guard.of(of_object, fn))
            self._add(thing, "get", ["cell.fn"], [made.fn])
            self._add(thing, "attribute", list(of_user), list(of_user.values()))
            return
        self._text.append(fn.__code__)
        names = code_names(fn.__code__)
        self._code_names |= names
        cells = list(fn.__closure__ or ())
        parts = [k for k in ("__defaults__", "__kwdefaults__", "__dict__") if getattr(fn, k)]
        room = self._add(thing, "get", parts, [getattr(fn, part) for part in parts])
        if room and self._add(thing, "cell", range(len(cells)), of_cells(cells), names):
            self._functions.append(fn)
            self._cells += cells
        if not is_installed(fn.__module__ or ""):
            self._visit_names(thing, "global", fn.__globals__, names)

    def _visit_names(
        self, thing: _Thing, how: str, namespace: dict[str, Any], names: frozenset[str]
    ) -> None:
        """Visits the entries of a module's namespace that code reads by name."""
        _, known_names = self._named.setdefault(id(namespace), (namespace, {}))
        here = sorted(name for name in names if name in namespace)
        self._text += here
        if self._add(thing, how, here, [namespace[name] for name in here], names):
            known_names.update(dict.fromkeys(sorted(names)))

    def _visit_class(self, thing: _Thing, kind: type) -> None:
        attributes = {k: x for k, x in vars(kind).items() if k not in _OF_EVERY_CLASS}
        if self._add(thing, "class", [(kind, k) for k in attributes], list(attributes.values())):
            self.guards.append(_Guard.of(of_class, kind))

    def _visit_named(self, kinds: Iterable[type]) -> bool:
        """Visits what code names of classes, and operators; returns whether there is more of it.

        So counters of a class, and methods that only others use, are not looked at.
        """
        found = False
        for kind in kinds:
            known = self._of_classes.setdefault(kind, {})
            new = [
                k
                for k in vars(kind)
                if k not in known and (k in self._code_names or _is_operator(kind, k))
            ]
            known.update(dict.fromkeys(new))
            if new:
                found = True
                self._text += [typed(kind), *new]
                places = [(kind, k) for k in new]
                way = _Thing(kind, (None, "known", kind), frozenset())
                self._add(way, "class", places, [vars(kind)[k] for k in new])
        return found

    def _visit_container(self, thing: _Thing, x: Leaf) -> None:
        self._text.append(len(x))
        if len(x) > MAX_VALUES:
            return
        if isinstance(x, dict):
            self._text += map(typed_or_same, x)
            if self._add(thing, "item", list(x), list(x.values())):
                self.guards.append(_Guard.of(of_dict, x))
        elif self._add(thing, "item", range(len(x)), list(x)) and not stays(x):
            self.guards.append(_Guard.of(tuple, x))

    def _visit_attributes(self, thing: _Thing) -> None:
        x = thing.value
        names = attribute_names(x)
        self._text += names
        if names or hasattr(x, "__dict__"):
            attributes = of_attributes(x)
            if self._add(thing, "attribute", names, attributes[len(names) :]):
                if len(names) == len(getattr(x, "__dict__", ())):
                    self.guards.append(_Guard.of(of_object, x))
                else:
                    self.guards.append(_Guard.of(of_attributes, x))

    def _visit_parts(self, thing: _Thing) -> None:
        """The functions and objects that something was made of, for good."""
        x = thing.value
        kinds = (kind for kind in _PARTS if isinstance(x, kind))
        parts = _PARTS.get(next(kinds, None), ["__wrapped__"] if callable(x) else [])
        values = {part: getattr(x, part, None) for part in parts}
        values = {k: x for k, x in values.items() if x is not None}
        self._add(thing, "get", list(values), list(values.values()))

    def _visit_rows(self, x: np.ndarray) -> None:
        """An array of NumPy: what is in it, unless it is large and may change."""
        fixed = not x.flags.writeable and (x.base is None or isinstance(x.base, bytes))
        if fixed or x.dtype.hasobject:
            self._text.append(Weakly(x))
            return
        self._bytes += x.nbytes
        if self._bytes <= MAX_COMPARED_BYTES:
            copy = x.copy()
            self._text.append((x.dtype, x.shape, copy.tobytes()))
            self.guards.append(_Guard.of(functools.partial(of_rows, copy), x))
        else:
            self._text.append(object())  # equal to nothing
            self.guards.append(_Guard(tuple, (), (None,), False))


def _add_plain(hashed: Any, part: Any) -> None:
    """Adds numbers, texts and code to a digest."""
    if isinstance(part, types.CodeType):
        hashed.update(part.co_code + repr(part.co_names).encode())
        _add_plain(hashed, part.co_consts)
    elif type(part) in (tuple, frozenset):
        for x in part if type(part) is tuple else sorted(part, key=repr):
            _add_plain(hashed, x)
    elif type(part) in _PLAIN:
        hashed.update(repr(part).encode() + b"\0")


def _classes_of_user(kind: type) -> list[type]:
    """Returns a class and those that it is derived from, but for those of installed packages."""
    return [k for k in kind.__mro__ if not is_installed(k.__module__)]


def _is_operator(kind: type, name: str) -> bool:
    """Returns whether Python calls a method by itself, other than to make or show an object."""
    is_called = name.startswith("__") and name.endswith("__") and name not in _MAKE_OR_SHOW
    return is_called and isinstance(vars(kind)[name], types.FunctionType)


def _is_array(x: object) -> bool:
    return isinstance(x, Tracer | jax.Array)  # in this order: the second asks tracers for a type


# --- what is read, and how ---


def _steps(way: Any) -> AccessPath:
    """A way from the function, which was noted from its end, as steps."""
    steps = []
    while way is not None:
        way, how, key = way
        steps.append((how, key))
    return AccessPath(tuple(reversed(steps)))


_FOLLOW: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": attribute,
    "cell": lambda fn, k: fn.__closure__[k].cell_contents,
    "class": lambda _, place: vars(place[0])[place[1]],
    "get": lambda x, name: operator.attrgetter(name)(x),
    "global": lambda fn, name: fn.__globals__[name],
    "item": lambda x, key: x[key],
    "known": lambda _, x: x,
    "type": lambda x, _: type(x),
}
_PARTS: dict[Any, list[str]] = {
    functools.partial: ["func", "args", "keywords"],
    types.MethodType: ["__func__", "__self__"],
    types.BuiltinFunctionType: ["__self__"],
    property: ["fget"],
    functools.cached_property: ["func"],
    staticmethod: ["__func__"],
    classmethod: ["__func__"],
    **{kind: list(names) for kind, names in FUNCTIONS_OF_RULES.items()},
}
_OF_EVERY_CELL = frozenset({*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cell"})
_MAKE_OR_SHOW = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "class_getitem", "del"),
        *("repr", "str", "format", "sizeof", "dir"),
        *("reduce", "reduce_ex", "getstate", "setstate", "copy", "deepcopy"),
    )
)
_OF_EVERY_CLASS = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__slotnames__"})
