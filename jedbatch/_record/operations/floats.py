"""Floats of instances: constants until many sets of them were met, then operands.

    {"y0": array, "mu": 0.3, "t1": np.float32(2)}

Instances that differ in floats alone have the same graph, unless Python decides on one. So once
instances of one form have had more than a few sets of floats, one of them is recorded with
`PythonNumber`s in place of its floats: Python and NumPy compute with them as ever, and what an
operation of JAX reads is one more array of the instance, computed by the noted arithmetic. If the
function needs the value of a float, or asks for its type, floats are constants for good.
"""

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jedbatch._jaxpr.interpret import inner_programs
from jedbatch._jaxpr.versions import RULES_OF, without_consts
from jedbatch._record.cell import recording
from jedbatch._record.identity.arithmetic import Arithmetic, PythonNumber, as_jax_sees
from jedbatch._record.identity.assumptions import MAX_CONSTANT_NUMBERS, Assumptions
from jedbatch._record.instances.arrays import FLOAT_TYPES, with_arrays_for_floats
from jedbatch._record.operations.inlining import is_of_user
from jedbatch._record.operations.sequences import Sequenced
from jedbatch._record.operations.symbols import RecorderLike, Value
from jedbatch._support.caches import Budget, Memory
from jedbatch._support.types import Array, PyTree
from jedbatch.errors import SymbolicValueError

MOST_TRIED = 64  # more instances of new forms than of others, before floats are constants
FORM_BYTES = 1 << 11  # of what is known of a form, about
NO_ARRAY = np.zeros((), np.float32)


class Form:
    """Instances that differ in floats, and in lengths of arrays.

    Attributes:
      arithmetic: what Python computes with the floats.
      places: of the floats among the arrays and floats of an instance; None as long as nobody has
        looked, empty if some floats are none of its parts.
    """

    def __init__(self) -> None:
        self.arithmetic = Arithmetic()
        self.places: Sequence[int] | None = None
        self._met: set[tuple] = set()

    @property
    def are_operands(self) -> bool:
        """Returns whether more sets of floats were met than are constants."""
        return len(self._met) > MAX_CONSTANT_NUMBERS

    def note(self, floats: tuple) -> None:
        """Takes note of the floats of an instance."""
        if not self.are_operands:
            self._met.add(floats)

    def arrays(self, arrays: Sequence[Array], operands: Sequence[Array]) -> list[Array]:
        """Returns the arrays of an instance with others for its floats, and operands after them."""
        found = list(arrays)
        for place in self.places or ():
            found.insert(place, NO_ARRAY)
        return [*found, *operands]


class Floating(tuple):
    """The mapped arguments of an instance whose floats are operands.

    Attributes:
      form: of the instance.
      floats: in order.
      weak: of each operand, whether its dtype gives way to that of others.
      operands: of its recording, if it was recorded.
      sequences: as of `Sequenced`.
    """

    def __new__(cls, instance: tuple, *_: Any) -> "Floating":
        """Returns a tuple of the arguments."""
        return super().__new__(cls, instance)

    def __init__(self, instance: tuple, form: Form, floats: list[Any], weak: list[bool]):
        self.form, self.floats, self.weak = form, floats, weak
        self.sequences = instance.sequences if isinstance(instance, Sequenced) else {}
        self.operands: OperandsOfInstance | None = None

    def with_arrays(self) -> PyTree:
        """Returns the arguments with arrays in place of floats."""
        return with_arrays_for_floats(tuple(self))[0]

    def as_symbols(self, recorder: RecorderLike, kinds: Sequence[int]) -> list[Any]:
        """Returns what is recorded in place of its arrays and floats.

        Args:
          recorder: records the instance.
          kinds: the ids of the types of its arrays and operands.
        """
        floats = dict(zip(self.form.places or (), self.floats, strict=True))
        first, types = len(kinds) - len(self.weak), recorder.registry
        values: list[Any] = []
        for k, kind in enumerate(kinds):
            if k in floats:
                values.append(None)
                continue
            if k >= first and self.weak[k - first]:
                kind = types.value_type(types.avals[kind].shape, types.avals[kind].dtype, True)
            values.append(recorder.leaf_value(kind, k, ()))
        self.operands = OperandsOfInstance(recorder, self.form.arithmetic, values[first:])
        for k, x in floats.items():
            values[k] = self.operands.held(k, x)
        return values[:first]


class OperandsOfInstance:
    """The operands of an instance that is recorded, in place of results of Python's arithmetic.

    Attributes:
      arithmetic: of the floats of the instance.
      missing: steps whose results were read, but are no operands yet.
    """

    def __init__(self, recorder: RecorderLike, arithmetic: Arithmetic, values: Sequence[Value]):
        self.arithmetic = arithmetic
        self.missing: dict[int, None] = {}
        self._values = dict(zip(arithmetic.read, values, strict=True))
        self._recorder = recorder

    def held(self, place: int, value: Any) -> PythonNumber:
        """Returns what stands for a float of the instance."""
        return PythonNumber(self._recorder, self, ~place, value)

    def read(self, number: PythonNumber) -> Array:
        """Returns what an operation of JAX reads; a constant if it is not an operand yet.

        Raises `SymbolicValueError` if it is an operation of a cell that got the number unseen.
        """
        if recording.recorder is not self._recorder:
            raise refused(number, "a cell holds")
        if number.step in self._values:
            return self._values[number.step]
        self.missing[number.step] = None
        return self._recorder.number(as_jax_sees(number.value))

    def hash_of(self, number: PythonNumber) -> int:
        """Raises `SymbolicValueError`: what is looked up by a float depends on its value."""
        raise refused(number, "something is looked up by")


def refused(number: PythonNumber, why: str) -> SymbolicValueError:
    """Returns the error that says that a float cannot be an operand; `why` comes before it."""
    return SymbolicValueError(
        f"{why} {number.value!r}, a float of the instance, which cannot be an operand there."
    )


def check_rules(program: Any) -> None:
    """Raises `SymbolicValueError` if functions that a program runs have rules of the user's.

    Derivative rules may hold floats, and run when their graph is long done.
    """
    for eqn in without_consts(program).eqns:
        for inner in inner_programs(eqn):
            if eqn.primitive.name in RULES_OF:
                check_rule(inner)
            check_rules(inner)


def check_rule(function: Any) -> None:
    """Raises `SymbolicValueError` unless a function with a derivative rule is of a library."""
    source = getattr(getattr(function, "debug_info", None), "func_src_info", None) or ""
    if is_of_user(source):
        raise SymbolicValueError(
            f"a function with a derivative rule ({source}) may hold floats of the instance."
        )


class Floats:
    """Which floats of instances are operands.

    Those of new forms are constants: to record numbers in their place takes many times as long, and
    pays where instances have forms that were met before. But where numbers in bodies of loops are
    operands (see `NumberOperands`), floats of all forms are: operations would have two types.

    Attributes:
      apart: why floats are constants, however many there are; None if they need not be.
    """

    def __init__(self, assumptions: Assumptions, budget: Budget):
        self.apart: str | None = None
        self._assumptions = assumptions
        self._forms: dict[Hashable, Form] = Memory(None, budget, lambda *_: FORM_BYTES)
        self._of_lengths: dict[Hashable, Form] = Memory(None, budget, lambda *_: FORM_BYTES)
        self._left = MOST_TRIED
        self._are_some_operands = False

    @property
    def are_looked_at(self) -> bool:
        """Returns whether floats may be operands."""
        return self.apart is None and self._left > 0

    def form(
        self,
        key: tuple[Hashable, ...],
        without_lengths: Callable[[Hashable], Hashable] | None,
    ) -> Form:
        """Returns the form of an instance.

        Args:
          key: of the instance, without the values of floats.
          without_lengths: makes a key that does not depend on lengths of arrays, if it has some.
        """
        form = self._of_lengths.get(key) if without_lengths else None
        if form is None:
            general = without_lengths(key) if without_lengths else key
            form = self._forms.get(general)
            if form is None:
                self._left -= 2
                form = self._forms[general] = Form()
            if without_lengths:
                self._of_lengths[key] = form
        self._left = min(MOST_TRIED, self._left + 1)
        return form

    def note_none(self) -> None:
        """Takes note of an instance without floats."""
        self._left -= 1

    def floating(self, instance: tuple, form: Form, written: Sequence[tuple[Any, ...]]) -> Any:
        """Returns (an instance whose floats are operands, the operands); None if they are not.

        Args:
          instance: the instance.
          form: of it.
          written: its floats as in its key.
        """
        are_lifted = self._are_some_operands and self._assumptions.version("numbers") > 0
        if not (form.are_operands or are_lifted):
            return None
        self._are_some_operands = True
        floats = [_float_of(*x) for x in written]
        if form.places is None:
            form.places = _places_of(instance, floats)
        if not form.places:
            return None
        try:
            operands = form.arithmetic.results(dict(zip(form.places, floats, strict=True)))
        except Exception:  # Python raises it again where it runs the function, if it gets there
            return None
        made = Floating(instance, form, floats, [x.weak for x in operands])
        return made, [x.value for x in operands]

    def note_missing(self, instances: Sequence[Any]) -> bool:
        """Returns whether JAX has read results of arithmetic that are no operands yet."""
        found = False
        for instance in instances:
            if type(instance) is Floating and instance.operands and instance.operands.missing:
                arithmetic, missing = instance.form.arithmetic, instance.operands.missing
                arithmetic.note_read([k for k in missing if k not in arithmetic.read])
                found = True
        self._assumptions.fail("floats", found)
        return found


def _places_of(instance: tuple, floats: Sequence[Any]) -> list[int]:
    """Returns the places of floats among the arrays and floats of an instance.

    There are none if some floats are in attributes of objects that are no containers.
    """
    try:
        leaves = with_arrays_for_floats(tuple(instance))[1]
    except (ValueError, RecursionError):  # it holds itself, or is deep
        return []
    places = [k for k, x in enumerate(leaves) if type(x) in FLOAT_TYPES]
    return places if list(map(repr, floats)) == [repr(leaves[k]) for k in places] else []


def without_floats(
    key: tuple[Hashable, ...],
) -> tuple[tuple[Hashable, ...], tuple[tuple[Any, ...], ...]]:
    """Returns the key of an instance (see `written_key`) without values of floats, and these."""
    places = [k for k, x in enumerate(key) if type(x) is tuple and x and x[0] in FLOAT_TYPES]
    found: list[Any] = list(key)
    floats = tuple([found[k] for k in places])
    for k in places:
        found[k] = found[k][:1]
    return tuple(found), floats


def _float_of(kind: type, *content: Any) -> Any:
    """Returns a float as `typed` wrote it."""
    if kind is float:
        return struct.unpack("d", content[-1])[0]
    if kind is complex:
        return complex(*struct.unpack("dd", content[-1]))
    return np.frombuffer(content[-1], content[0])[0]
