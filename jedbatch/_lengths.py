"""Which arrays of instances have lengths of their own.

Nobody says so. An instance may hold arrays `[n, ...]` whose n differs from the next one's: then
n gets a symbol, and what is done to the array is recorded for every n at once (see `_extents`). An
axis is taken to be ragged once it has been seen to differ: between instances of the same form
(equal but for lengths); or, where forms differ as those of trees do, between arrays of the same
kind (equal but for the length), such as sentences at the leaves.

Lengths in one instance share a symbol until the function does something that takes them to be the
same and they are not: most functions treat each array by itself, and then what is recorded is the
same for all of them. From then on arrays of this form share a symbol only if their lengths have
been the same in all instances.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import export

from jedbatch._along import CannotMergeError
from jedbatch._extents import LengthDecisionError, make_symbol
from jedbatch._instances import array_type
from jedbatch._regions import RaggedRecord

LETTERS = "nmkl"
ArrayType = tuple[tuple[Any, ...], Any, bool]  # (shape, dtype, weak), an extent may be a symbol


class Form:
    """Instances that are equal but for the lengths of arrays, and numbers.

    Attributes:
      lengths: of each array in the first instance.
      varied: for each array, whether it had another length in a later one.
      classes: for each array, the first one whose length has always been the same.
      same: pairs of arrays whose lengths the function takes to be the same.
      split: whether arrays that differ in length have symbols of their own.
    """

    def __init__(self, lengths: Sequence[int | None]):
        self.lengths = list(lengths)
        self.varied = [False] * len(lengths)
        self.classes = [0] * len(lengths)
        self.same: set[tuple[int, int]] = set()
        self.split = False

    def observe(self, lengths: Sequence[int | None]) -> None:
        """Takes note of one instance."""
        for i, (n, before) in enumerate(zip(lengths, self.lengths, strict=True)):
            self.varied[i] |= n != before
        groups: dict[tuple, int] = {}
        for i, n in enumerate(lengths):
            self.classes[i] = groups.setdefault((self.classes[i], n), i)
        self.split |= any(lengths[a] != lengths[b] for a, b in self.same)


class Given(NamedTuple):
    """How the arrays of an instance are recorded.

    Attributes:
      key: what decides its graph.
      types: of its arrays.
      symbols: the arrays whose length each symbol is.
      form: of the instance.
    """

    key: Hashable
    types: list[ArrayType]
    symbols: dict[str, list[int]]
    form: Form


class Lengths:
    """What has been seen of the lengths of arrays.

    Args:
      off: see the attribute.
      forms: where those seen are kept.

    Attributes:
      off: why lengths are not told apart from shapes; None as long as they are.
      longest: the greatest length there was.
      bound: the greatest length there can be, if the function has to know one.
    """

    def __init__(self, off: str | None, forms: dict[Hashable, Form]):
        self.off = off
        self.longest = 0
        self.bound: int | None = None
        self._forms = forms
        self._kinds: dict[tuple, int | None] = {}  # length of all arrays of a kind, if the same
        self._scopes: dict[int | None, dict[str, Any]] = {}  # symbols, by their bound

    @property
    def shown(self) -> str | None:
        """Why lengths are not told apart from shapes, if any differ."""
        return self.off if any(n is None for n in self._kinds.values()) else None

    def look(self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Any]]) -> list[Given | None]:
        """How instances are recorded; None for one without ragged arrays.

        Args:
          keys: of the instances, as `instance_key` makes them.
          arrays: of the instances.
        """
        if not any(arrays):
            return [None] * len(keys)
        found = [self._observe(*pair) for pair in zip(keys, arrays, strict=True)]
        return [None if self.off else self._given(*three) for three in found]

    def _observe(self, key: Hashable, arrays: Sequence[Any]) -> tuple:
        """(key without lengths, types of the arrays, form) of an instance."""
        types = [array_type(x) for x in arrays]
        lengths = [shape[0] if shape else None for shape, *_ in types]
        for n, (shape, dtype, _) in zip(lengths, types, strict=True):
            if n is not None and self._kinds.setdefault((shape[1:], dtype), n) != n:
                self._kinds[shape[1:], dtype] = None
        self.longest = max(self.longest, *(n for n in lengths if n is not None), 0)
        general = _without_lengths(key)
        form = self._forms.get(skeleton := _without_values(general))
        if form is None or general is None:
            form = self._forms[skeleton] = Form(lengths)
            form.split = general is None  # it is not met again
        form.observe(lengths)
        return general, types, form

    def _given(self, general: Hashable, types: list[ArrayType], form: Form) -> Given | None:
        symbols: dict[str, list[int]] = {}
        names: dict[int, str] = {}
        recorded: list[ArrayType] = []
        for i, (shape, dtype, weak) in enumerate(types):
            kind = self._kinds[shape[1:], dtype] if shape else 0
            recursive = len(self._forms) > 1 and not any(form.varied)
            differs = form.varied[i] or (recursive and kind is None)
            if not (shape and differs):
                recorded.append((shape, dtype, weak))
                continue
            first = form.classes[i] if form.split else 0
            name = names.setdefault(first, self._name(len(names)))
            symbols.setdefault(name, []).append(i)
            recorded.append(((self._symbol(name), *shape[1:]), dtype, weak))
        if not symbols:
            return None
        shown = tuple((s, tuple(i)) for s, i in symbols.items())
        key = None if general is None else ("ragged", self.bound, general, shown)
        return Given(key, recorded, symbols, form)

    def learn(self, given: Given, record: Any, arrays: Sequence[Any]) -> bool:
        """Takes note of what a function takes to be the same; whether it is, in an instance."""
        if not isinstance(record, RaggedRecord):
            return True
        groups = [mine for call in record.calls for mine in call.leaves]
        pairs = {pair for mine in groups for pair in itertools.pairwise(mine)}
        given.form.same |= pairs
        same = all(len(arrays[a]) == len(arrays[b]) for a, b in pairs)
        given.form.split |= not same
        return same

    def give_up(self, error: Exception) -> None:
        """Tells arrays apart by their shapes from now on."""
        (text, *_) = [*str(error).strip().splitlines(), ""]
        known = isinstance(error, CannotMergeError | LengthDecisionError)
        self.off = text if known else f"{type(error).__name__}: {text}"

    def next_bound(self, shared: Iterable[tuple[Any, ...]]) -> bool:
        """Bounds lengths by the rooms of tables; False if there is none, or no other one.

        `shared` are shapes of arrays, some of which may be tables with a row for every position.
        """
        rooms = [shape[0] for shape in shared if shape and shape[0] >= self.longest]
        if not rooms or min(rooms) == self.bound:
            return False
        self.bound = min(rooms)
        return True

    @staticmethod
    def _name(k: int) -> str:
        return LETTERS[k] if k < len(LETTERS) else f"n{k}"

    def _symbol(self, name: str) -> Any:
        if self.bound not in self._scopes:
            limits = [] if self.bound is None else [f"{s} <= {self.bound}" for s in LETTERS]
            scope = export.SymbolicScope(limits)
            self._scopes[self.bound] = {s: make_symbol(s, scope) for s in LETTERS}
        symbols = self._scopes[self.bound]
        if name not in symbols:
            symbols[name] = make_symbol(name, next(iter(symbols.values())).scope)
        return symbols[name]


def _without_lengths(key: Hashable) -> Hashable:
    """A key of instances (see `instance_key`) that does not depend on lengths."""
    if not isinstance(key, tuple):
        return key
    return tuple(
        ("array", token[1][1:], len(token[1]), *token[2:])
        if isinstance(token, tuple) and token and isinstance(token[0], str) and token[0] == "array"
        else token
        for token in key
    )


def _without_values(key: Hashable) -> Hashable:
    """The key without the values of numbers."""
    if not isinstance(key, tuple):
        return key
    return tuple(
        token[0]
        if isinstance(token, tuple) and token and isinstance(token[0], type) and _is_number(token)
        else token
        for token in key
    )


def _is_number(token: tuple) -> bool:
    return issubclass(token[0], int | float | complex | np.number)
