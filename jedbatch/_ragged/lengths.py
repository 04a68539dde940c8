"""The arrays of instances that have lengths of their own.

Nobody says so. An instance may hold arrays `[n, ...]` whose n differs from the next one's: then
n gets a symbol, and what is done to the array is recorded for every n at once (see
`_jaxpr.symbolic_dims`). An axis is taken to be ragged once it has been seen to differ: between
instances of the same family (equal but for lengths); or, where families differ as those of trees
do, between arrays of the same kind (equal but for the length), such as sentences at the leaves.

Every array has a symbol of its own, also where two are equally long by chance. But `x + y` asks for
equal lengths. Recording fails then, and tells which two lengths JAX has compared (see
`Questions`), or says nothing of lengths: then all that are equal in this instance may have to be.
From then on instances of this family are told apart by whether these two are equal: where they are,
both arrays have one symbol; where not, the instance is recorded by itself, or by its shapes if that
fails. So the key of an instance says which of its lengths must be equal, and no record is used for
an instance that it does not hold for.

Where Python asks how long arrays are, as `range(len(x))` does, it is told, and what is recorded is
for instances of these lengths only. Nodes still have symbols in their types, which those of other
lengths share.

An instance with an operation that has no rule for lengths is recorded by its shapes, as are all
with the same key; others are not.
"""

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import export

from jedbatch._graph.union_find import UnionFind
from jedbatch._jaxpr.padding.axis_rules import CannotMergeError
from jedbatch._jaxpr.symbolic_dims import (
    SYMBOL,
    LengthDecisionError,
    Questions,
    extent_at,
    make_symbol,
    symbols_in,
    user_line_in,
)
from jedbatch._program.stopped import shown_instances
from jedbatch._ragged.length_families import ArrayType, LengthFamily, Pair, SymbolicTypes
from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._record.instances.arrays import array_type
from jedbatch._record.operations.sequences import places_of_sequences
from jedbatch._support.caches import Memory
from jedbatch._support.types import Array

LETTERS = "nmkl"
Alike = tuple[Hashable, bytes]  # key without lengths, and which of the family's pairs are equal
Scope = tuple[int | None, int, int]  # (bound of its symbols, the least they are, how many)
MAX_RAGGED_TYPES = 4096  # of arrays that are kept, for all symbols
MOST_LEAST = 8  # that lengths may be supposed to be at least
MOST_APART = 4096  # instances that are told apart by shapes before all are
MOST_IN_VAIN = 64  # instances one after the other that cannot be recorded, before all are
MOST_BOUND = 1 << 20  # that lengths may be bounded by
MAX_DISTANCES = 3  # between arrays of two kinds that have been compared


class RaggedTypes(NamedTuple):
    """The types of the arrays of an instance, with symbols for lengths.

    Attributes:
      key: that decides its graph.
      types: of its arrays.
      symbols: the arrays whose length each symbol is.
      family: of the instance.
      lengths: of its arrays; -1 for numbers.
      alike: equal for instances that are recorded alike, whatever their lengths.
      keeps_numbers: whether lengths that Python is told stay numbers where it uses them.
    """

    key: Hashable
    types: list[ArrayType]
    symbols: dict[str, list[int]]
    family: LengthFamily
    lengths: list[int]
    alike: Alike
    keeps_numbers: bool = False

    @property
    def key_if_told(self) -> Hashable:
        """The key of its graph if Python has been told lengths, which it is for alone."""
        return (self.key, *self.lengths) if self.key and self.symbols else self.key

    @property
    def length_of(self) -> dict[str, int]:
        """The value of each symbol."""
        return {s: self.lengths[leaves[0]] for s, leaves in self.symbols.items()}


class Lengths:
    """The lengths of arrays that have been seen.

    Args:
      families: where those seen are kept.
      assumptions: fail where instances are recorded under other lengths than before.

    Attributes:
      off: why lengths are not told apart from shapes; None as long as they are.
      longest: the greatest length there was.
      bound: the greatest length there can be, if the function has to know one.
      least: the least length that arrays have which are recorded for all lengths.
      changes: how often a length was seen that may have changed what `look` returns.
      apart: why some instances of those looked at last are told apart by their lengths, if any are;
        it names them, unless all are.
      are_some_apart: whether some are, for a reason besides lengths that are compared.
      asked_at: where Python has asked for a length and was told; None as long as it has not.
    """

    def __init__(self, families: dict[Hashable, LengthFamily], assumptions: Assumptions):
        self.off: str | None = None
        self._assumptions = assumptions
        self.longest = 0
        self.bound: int | None = None
        self._limits: dict[int, None] = {}
        self.least = 1
        self.changes = 0
        self._families = families
        self._kinds: dict[tuple, int | None] = {}  # length of all arrays of a kind, if the same
        self._relations: dict[tuple, None] = {}  # (kind, places further on, kind) of pairs
        self._compared: set[tuple] = set()  # kinds of which all arrays are compared,
        self._with: UnionFind[tuple] = UnionFind()  # and with those of which others
        self._names = 0  # symbols that a scope must have
        self._scopes: dict[tuple, dict[str, Any]] = {}  # symbols, by their scope
        self._ragged_types: dict[tuple, ArrayType] = Memory(MAX_RAGGED_TYPES)
        # Why instances are recorded by their shapes: all that are alike, or those of some lengths.
        self._apart: dict[tuple[Hashable, bytes, tuple[int, ...] | None], str] = {}
        self._in_vain = 0  # instances that could not be recorded since one that could
        self.asked_at: str | None = None
        self._with_numbers: dict[tuple, None] = Memory(MOST_APART)  # instances that keep numbers
        self.apart: str | None = None
        self.are_some_apart = False

    @property
    def shown(self) -> str | None:
        """The reason why lengths are not told apart from shapes, if any differ."""
        if self.off is None:
            return self.apart
        return self.off if any(n is None for n in self._kinds.values()) else None

    def none_apart(self) -> None:
        """Notes instances that `look` need not look at: nothing tells them apart."""
        self._say_apart({}, 0)

    def look(
        self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Array]]
    ) -> list[RaggedTypes | None]:
        """Returns how instances are recorded; None for one without ragged arrays.

        Args:
          keys: of the instances, as `instance_key` makes them.
          arrays: of the instances.
        """
        self._say_apart({}, 0)
        if not any(arrays):
            return [None] * len(keys)
        families = [self._observe(*pair) for pair in zip(keys, arrays, strict=True)]
        types: list[RaggedTypes | None] = [None] * len(keys)
        if self.off:
            return types
        by_family: dict[LengthFamily, list[int]] = {}
        for i, (_, family, _) in enumerate(families):
            by_family.setdefault(family, []).append(i)
        ragged = {family: self._ragged(family) for family in by_family}
        scope = self._scope()
        self._names = max(self._names, *map(len, ragged.values()))
        self.changes += self._scope() != scope
        apart: dict[str, list[int]] = {}
        self.are_some_apart = False
        for family, members in by_family.items():
            if not ragged[family]:
                continue
            equal = family.equal([families[i][2] for i in members])
            for i, pattern in zip(members, equal, strict=True):
                general, _, lengths = families[i]
                reason = None
                if self._apart:
                    ways = (general, pattern, None), (general, pattern, (*lengths,))
                    reason = next(filter(None, map(self._apart.get, ways)), None)
                if reason is not None:
                    apart.setdefault(reason, []).append(i)
                    self.are_some_apart |= not any(pattern)
                elif not (family.short and _empty(lengths) in family.short):
                    types[i] = self._types_of(general, family, lengths, ragged[family], pattern)
        self._say_apart(apart, len(keys))
        return types

    def without_ragged(self, key: Hashable, arrays: Sequence[Array]) -> RaggedTypes | None:
        """Returns how an instance is recorded of which none but arrays it makes have any length.

        None if it is told apart by its shapes.
        """
        types, lengths = list(map(array_type, arrays)), [len(x) if x.ndim else -1 for x in arrays]
        if (key, b"", (*lengths,)) in self._apart:
            return None
        keeps = (key, *lengths) in self._with_numbers
        return RaggedTypes(key, types, {}, LengthFamily(types), lengths, (key, b""), keeps)

    def _say_apart(self, apart: Mapping[str, Sequence[int]], count: int) -> None:
        """Notes which of so many instances are told apart by their lengths, by the reasons."""
        are_all = sum(map(len, apart.values())) == count
        self.are_some_apart &= not are_all
        named = [f"{why}, in {shown_instances(who)}" for why, who in apart.items()]
        self.apart = "; ".join(apart if are_all else named) or None

    def _observe(
        self, key: Hashable, arrays: Sequence[Array]
    ) -> tuple[Hashable, LengthFamily, list[int]]:
        """Returns (key without lengths, family, lengths of the arrays) of an instance."""
        general, form = _general(key)
        family = None if general is None else self._families.get(form)
        if family is None:
            family = LengthFamily([array_type(x) for x in arrays], places_of_sequences(key))
            family.add(self._related(family))
            family.group(self._grouped(family))
            tells = len(self._families) > 1  # whether kinds say what is ragged, see `_ragged`
            self._families[form] = family
            self.changes += (len(self._families) > 1) != tells
        lengths = [x.shape[0] if x.ndim else -1 for x in arrays]
        if any(self._kinds.get(kind, -1) is not None for kind in family.kinds):
            self._observe_kinds(family, lengths)
        self.longest = max(self.longest, *lengths, 0)
        self.changes += family.observe(lengths)
        return general, family, lengths

    def _observe_kinds(self, family: LengthFamily, lengths: Sequence[int]) -> None:
        """Takes note of the lengths of arrays of each kind."""
        for i, (n, (shape, dtype, _)) in enumerate(zip(lengths, family.types, strict=True)):
            if i in family.sequences:
                continue
            known = self._kinds.setdefault((shape[1:], dtype), n) if n >= 0 else n
            if known is not None and known != n:
                self._kinds[shape[1:], dtype] = None
                self.changes += 1

    def _ragged(self, family: LengthFamily) -> list[int]:
        """Returns the arrays of a family whose lengths differ from instance to instance."""
        kinds = self._kinds if len(self._families) > 1 else {}
        return [
            i
            for i, (shape, dtype, _) in enumerate(family.types)
            if family.varied[i]
            or i in family.sequences
            or (shape and kinds.get((shape[1:], dtype), 0) is None)
        ]

    def _types_of(
        self,
        general: Hashable,
        family: LengthFamily,
        lengths: list[int],
        ragged: list[int],
        equal: bytes,
    ) -> RaggedTypes:
        scope = self._scope()
        which = tuple(ragged)
        others = list(lengths)
        for i in ragged:
            others[i] = -1
        decisive = scope, which, equal, tuple(others)
        known = family.known.get(decisive)
        if known is None:
            known = self._symbolic(scope, family, lengths, ragged, equal)
            family.known[decisive] = known
        types, symbols, classes = known
        key: Hashable = None
        if general is not None:
            key = ("ragged", scope, general, classes, which)
        keeps = (general, *lengths) in self._with_numbers
        return RaggedTypes(key, types, symbols, family, lengths, (general, equal), keeps)

    def _symbolic(
        self,
        scope: Scope,
        family: LengthFamily,
        lengths: Sequence[int],
        ragged: Sequence[int],
        equal: bytes,
    ) -> SymbolicTypes:
        """Returns the types of arrays with symbols for those lengths that are ragged."""
        classes = family.classes(equal)
        symbols: dict[str, list[int]] = {}
        names: dict[int, str] = {}
        types = [
            ((n, *shape[1:]) if shape else (), dtype, weak)
            for n, (shape, dtype, weak) in zip(lengths, family.types, strict=True)
        ]
        fixed = list(lengths)
        for i in ragged:
            name = names.setdefault(classes[i], _name(len(names)))
            symbols.setdefault(name, []).append(i)
            types[i] = self._ragged_type(scope, name, family.kind_of[i])
            fixed[i] = -1 - classes[i]
        return types, symbols, tuple(fixed)

    def _ragged_type(self, scope: Scope, name: str, kind: ArrayType) -> ArrayType:
        """Returns the type of arrays of a kind, given their symbol: the same object every time."""
        key = scope, name, kind
        known = self._ragged_types.get(key)
        if known is None:
            shape, dtype, weak = kind
            known = (self._symbol(scope, name), *shape), dtype, weak
            self._ragged_types[key] = known
        return known

    def type_of(self, number: int, length: int, kind: ArrayType) -> ArrayType | None:
        """Returns the type of an array of any length; None if it is longer or shorter than that.

        Args:
          number: of its symbol among those of the instance.
          length: that it has.
          kind: its type without the length.
        """
        bound, least, _ = scope = self._scope()
        if length < least or (bound is not None and length > bound):
            return None
        return self._ragged_type(scope, _name(number), kind)

    def relate(self, recorded: RaggedTypes, asked: Questions, error: Exception | None) -> bool:
        """Takes note of lengths that have been compared; whether to record again.

        Args:
          recorded: the types of an instance.
          asked: what was asked about lengths meanwhile.
          error: why it could not be recorded, if so.
        """
        compared = [pair for pair in asked.unequal if all(s in recorded.symbols for s in pair)]
        if error is not None and not isinstance(error, LengthDecisionError) and not compared:
            named = dict.fromkeys(SYMBOL.findall(str(error)))  # JAX complains of shapes
            compared = list(itertools.combinations([s for s in named if s in recorded.symbols], 2))
        family, lengths = recorded.family, recorded.lengths
        new: list[Pair] = []
        for names in compared:
            a, b = sorted(recorded.symbols[s][0] for s in names)
            if not family.tells(a, b):
                new.append((a, b))
                self._relate_kinds(family.kind_of[a], b - a, family.kind_of[b])
        if new:
            family.add(new)
            self._assumptions.fail("lengths")
        return any(error is None or lengths[a] == lengths[b] for a, b in new)

    def _relate_kinds(self, first: tuple, steps: int, second: tuple) -> None:
        """Takes note of arrays of two kinds that have been compared, so many places apart."""
        self._relations[first, steps, second] = None
        distances = {d for a, d, b in self._relations if {a, b} == {first, second}}
        if len(distances) > MAX_DISTANCES:
            self._compared |= {first, second}
            self._with.union(first, second)
            for family in self._families.values():
                family.group(self._grouped(family))

    def _grouped(self, family: LengthFamily) -> list[list[int]]:
        """Returns arrays of kinds of which all are compared."""
        if not self._compared:
            return []
        kinds = self._compared.intersection(family.kind_of)
        found = {kind: self._with.find(kind) for kind in kinds}
        groups: dict[tuple, list[int]] = {}
        for i, kind in enumerate(family.kind_of):
            if kind in found:
                groups.setdefault(found[kind], []).append(i)
        return [group for group in groups.values() if len(group) > 1]

    def _related(self, family: LengthFamily) -> list[Pair]:
        """Returns pairs of arrays like others whose lengths have been compared."""
        kinds = family.kind_of
        return [
            (a, a + steps)
            for first, steps, second in self._relations
            for a, kind in enumerate(kinds)
            if kind == first and a + steps < len(kinds) and kinds[a + steps] == second
        ]

    def join_equal(self, recorded: RaggedTypes, error: Exception) -> bool:
        """Has arrays share a symbol that are equally long in an instance; False if they do.

        Errors about shapes that are not the same need not say which, as that of `jnp.lexsort`.

        Args:
          recorded: the types of the instance.
          error: why it could not be recorded, though it can be by its shapes.
        """
        if isinstance(error, LengthDecisionError | CannotMergeError):
            return False
        family, last, new = recorded.family, dict[int, int](), list[Pair]()
        for i in sorted(arrays[0] for arrays in recorded.symbols.values()):
            n = recorded.lengths[i]
            if n in last and not family.tells(last[n], i) and (last[n], i) not in family.refuted:
                new.append((last[n], i))
            last[n] = i
        if new:
            family.add(new)
            family.supposed += new
            self._assumptions.fail("lengths")
        return bool(new)

    def keep_numbers(self, recorded: RaggedTypes, asked: Questions) -> bool:
        """Keeps lengths that Python knows as numbers in an instance; False if they were kept.

        A number may be a length by chance.

        Args:
          recorded: the types of an instance that could not be recorded.
          asked: what was asked about lengths meanwhile.
        """
        if not asked.placed:
            return False
        self._with_numbers[recorded.alike[0], *recorded.lengths] = None
        self._assumptions.fail("lengths")
        return True

    def note_short(self, types: RaggedTypes) -> None:
        """Has instances with the same empty arrays recorded by their shapes from now on.

        Of what is empty there is no part `x[1:]` with one row less.
        """
        types.family.short.add(_empty(types.lengths))
        self._assumptions.fail("lengths")

    def give_up(
        self, error: Exception, recorded: RaggedTypes | None, asked: Questions | None
    ) -> None:
        """Tells arrays apart by their shapes from now on.

        Those of instances that are recorded like one only, unless there have been many, or a number
        of them without any that could be recorded.

        Args:
          error: why it could not be recorded for all lengths.
          recorded: the types of that instance; None if it is not known which it is.
          asked: what was asked about lengths meanwhile.
        """
        self._assumptions.fail("lengths")
        reason = _reason(error)
        self._in_vain += 1
        are_many = len(self._apart) >= MOST_APART or self._in_vain > MOST_IN_VAIN
        if recorded is None or are_many:
            self.off = reason
            return
        recorded.family.drop_supposed()
        (equal,) = recorded.family.equal([recorded.lengths])
        lengths = (*recorded.lengths,) if asked is not None and asked.answered else None
        self._apart[recorded.alike[0], equal, lengths] = reason

    def note_recorded(self) -> None:
        """Notes that some instance could be recorded for all lengths."""
        self._in_vain = 0

    def next_bound(self, shared: Iterable[tuple[Any, ...]]) -> bool:
        """Bounds lengths by the rows of tables; False if there is none, or no other one.

        `shared` are shapes of arrays, some of which may be tables with a row for every position. A
        size that arrays are padded to, see `note_limits`, is a bound as well.
        """
        rows = [shape[0] for shape in shared if shape]
        bounds = [n for n in (*rows, *self._limits) if n >= self.longest]
        if not bounds or min(bounds) == self.bound:
            return False
        self.bound = min(bounds)
        self.least = 1  # what was supposed before may have had nothing to do with it
        self._assumptions.fail("lengths")
        return True

    def note_limits(self, asked: Questions) -> None:
        """Takes note of the greatest lengths for which JAX would know what it asked for.

        Of `16 - n` rows it has to know whether there are any, which is so up to 16.
        """
        for extent in asked.few:
            limit = _greatest(extent, self.longest)
            if limit is not None:
                self._limits[limit] = None

    def next_least(self, asked: Questions) -> bool:
        """Has lengths be more at least; False if that does not tell JAX what it asked for.

        Of `x[1:]` it has to know whether there are rows, which is so from two rows on.
        """
        few = [e for e in asked.few if _at(e, self.least) < 1]
        for least in range(self.least + 1, MOST_LEAST + 1):
            if any(_at(e, least) > 0 for e in few):
                self.least = least
                self._assumptions.fail("lengths")
                return True
        return False

    def _scope(self) -> Scope:
        """Returns the scope in use."""
        if self.bound is None and self.least == 1:
            return None, 1, 0  # it can have any number
        return self.bound, self.least, max(len(LETTERS), 1 << (self._names - 1).bit_length())

    def _symbol(self, key: Scope, name: str) -> Any:
        if key not in self._scopes:
            bound, least, number = key
            names = [_name(k) for k in range(number)]
            known = [f"{s} <= {bound}" for s in names if bound is not None]
            known += [f"{s} >= {least}" for s in names if least > 1]
            scope = export.SymbolicScope(known)
            self._scopes[key] = {"n": make_symbol("n", scope)}
        symbols = self._scopes[key]
        if name not in symbols:
            symbols[name] = make_symbol(name, symbols["n"].scope)
        return symbols[name]


def _name(k: int) -> str:
    return LETTERS[k] if k < len(LETTERS) else f"n{k}"


def _empty(lengths: Sequence[int]) -> tuple[bool, ...]:
    return tuple([n == 0 for n in lengths])


def _at(extent: Any, length: int) -> int:
    """Returns an extent where all lengths are the same."""
    return extent_at(extent, dict.fromkeys(symbols_in(extent), length))


def _greatest(extent: Any, length: int) -> int | None:
    """Returns the greatest length up to which an extent is 1 at least.

    None if that is less than a given one, or if there is none.
    """
    beyond = 2 * length + 1
    while beyond < MOST_BOUND and _at(extent, beyond) > 0:
        beyond *= 2
    if beyond >= MOST_BOUND or _at(extent, length) < 1:
        return None
    while beyond - length > 1:
        middle = (length + beyond) // 2
        length, beyond = (middle, beyond) if _at(extent, middle) > 0 else (length, middle)
    return length


def of_lengths(error: Exception, asked: Questions | None) -> bool:
    """Returns whether an error is one of lengths, or came after something was asked about one."""
    if asked is not None and (
        asked.unequal or asked.few or asked.refused or asked.hashed or asked.answered
    ):
        return True
    return isinstance(error, LengthDecisionError | CannotMergeError)


def _reason(error: Exception) -> str:
    """Returns why instances cannot be recorded for all lengths at once, in words."""
    if isinstance(error, CannotMergeError | LengthDecisionError):
        return str(error)
    line = user_line_in(error)
    if not line:
        return "an operation of it is not known to work for several lengths at once"
    return f"the operation at {line} has to know the lengths of arrays"


def without_lengths(key: Hashable) -> Hashable:
    """Returns a key of instances (see `instance_key`) that does not depend on lengths."""
    return _general(key)[0]


def _general(key: Hashable) -> tuple[Hashable, Hashable]:
    """Returns what `without_lengths` does, and the same without the values of numbers."""
    if not isinstance(key, tuple):
        return key, key
    general: list[Any] = []
    form: list[Any] = []
    for token in key:
        head = token[0] if type(token) is tuple and token else None
        if head == "array":
            token = ("array", token[1][1:], len(token[1]), *token[2:])
        general.append(token)
        form.append(head if isinstance(head, type) and _is_number(head) else token)
    return tuple(general), tuple(form)


@functools.lru_cache(512)
def _is_number(kind: type) -> bool:
    return issubclass(kind, int | float | complex | np.number)
