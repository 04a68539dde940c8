"""Extents that differ from instance to instance, as JAX's symbolic dimensions.

An array [n, 128] whose n is another number in every instance is traced once, with a symbol for n.
JAX then says of every operation how its shape depends on n (`n`, `n + 1`, `2*n`, or not at all),
and a value of n, where a computation needs one (the divisor of a mean), is an operation of its own,
`dim_as_value`. An extent of which JAX knows no number is called *ragged* here, and so is the axis
it is the extent of.

A symbol has no value for Python to decide on. JAX answers `n == 2` with False where it cannot know,
and takes every extent to be 1 at least. Here both are errors (`LengthDecisionError`), and so is
everything else that Python could tell lengths apart by: using one as a key of a dict or set, as an
index, or writing it. So it is with types of arrays, of which JAX keeps one object each, to compare
them by identity: user code gets them as `RaggedType`, which compares its shape. JAX itself may ask:
its answer to what it cannot know is what holds for all lengths, or an error. Who asks is seen from
the frame that does.

To user code an extent is an instance of int, as the number is that it stands for. Its `type` is
not, and `n is m` compares objects: Python lets nobody answer these. Nor are types guarded inside of
what JAX traces by itself (a cell, a jit-ted function), whose tracers hand out JAX's own.

What is asked while an instance is recorded is noted (see `Questions`), since the function may catch
errors. Two lengths that JAX has found not to be the same may be the same in this instance; whoever
records can give both arrays one symbol then, and try again.

Source: the symbolic shapes of `jax.export`.
"""

import contextlib
import copy
import functools
import itertools
import operator
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.export import is_symbolic_dim, symbolic_shape
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._jaxpr.versions import is_program, without_consts
from jedbatch._support.frames import HOLDS_FOR_ALL_LENGTHS, is_private
from jedbatch._support.types import Array, AxisSize, Dtype

ASKERS = ("jax", "jaxlib")  # these ask about extents as generally as we do
OURS = ("us", "jax")
HELPERS = frozenset({*sys.stdlib_module_names, "numpy", "opt_einsum"})  # ask for their callers
# Functions of JAX and of ours, with what is defined inside of them, that compare two extents in
# order to complain unless they are known to be equal. Others do so to find keys of their caches.
CHECKS = re.compile(
    r"definitely_equal|\w*_rule|\w*mismatch\w*|_try_broadcast_shapes|reshape|_differ"
)
# Modules whose functions do something else where an array has no rows. JAX answers `n - 1 == 0`
# with False, too, where it does not know that there are any.
FUNCTIONS = re.compile(r"jax\._src\.(numpy|scipy|nn)\b")
DECISIONS = re.compile("array_equal|array_equiv")  # these give another result if they are not
SYMBOL = re.compile(r"\b(?:n\d*|[mkl])\b")
SUM = re.compile(r"[\w*^]+( \+ [\w*^]+)*( - \d+)?")  # of products of symbols
(_plain,) = symbolic_shape("n")
Base: Any = type(_plain)


class LengthDecisionError(Exception):
    """Python has decided on the length of an array."""


class LengthNeededError(LengthDecisionError, TypeError):
    """Python needs the length of an array as a number."""


class Questions:
    """The questions about lengths that are asked while an instance is recorded.

    Where an instance is recorded for itself alone, lengths are known and Python may decide on them.

    Attributes:
      lengths: the value of each symbol, if they are known.
      trace: where Python may know them; elsewhere, what it decides would hold for other instances.
      told: lengths that Python knows, each with its extent.
      answered: whether what is recorded is for these lengths alone.
      asked_at: where Python asked first for a length that it was told.
      begin: is called when it does; or None.
      keeps_numbers: whether no extents take the place of these lengths where Python uses them.
      placed: whether some may have taken it.
      refused: what Python has decided on, in words. The function may have caught the errors.
      unequal: pairs of symbols that JAX was not told to be the same where it compared them.
      few: extents of which JAX asked whether they are 1 at least, as of `n - 1` or `16 - n`.
      hashed: what Python has hashed, each with the frame and the instruction that did; JAX may
        turn out to have been called there.
    """

    def __init__(self, lengths: dict[str, int] | None = None, trace: Any = None) -> None:
        self.lengths, self.trace = lengths, trace
        self.told: dict[int, Any] = {}
        self.answered = self.keeps_numbers = self.placed = False
        self.asked_at = ""
        self.begin: Callable[[], None] | None = None
        self.refused: list[str] = []
        self.unequal: list[tuple[str, str]] = []
        self.few: list[Any] = []
        self.hashed: list[tuple[Any, int, str]] = []

    def check(self) -> None:
        """Raises `LengthDecisionError` if Python has decided on something."""
        for reason in (*self.refused, *(reason for *_, reason in self.hashed)):
            raise LengthDecisionError(reason)


class _Asked(threading.local):
    questions: Questions | None = None


_asked = _Asked()


def length_known(extent: Any) -> int | None:
    """Returns the value of an extent where Python may know it; None elsewhere."""
    questions = _asked.questions
    if questions is None or questions.lengths is None:
        return None
    with take_current_trace() as current:
        trace = current
    while trace is not questions.trace:
        trace = getattr(trace, "parent_trace", None)  # of `jax.grad` and `jax.vmap`
        if trace is None:
            return None
    number = int(extent_at(extent, questions.lengths))
    questions.told.setdefault(number, extent)
    if not questions.asked_at:
        questions.answered, questions.asked_at = True, line_of_user() or "?"
        if questions.begin is not None:
            questions.begin()
    return number


def are_lengths_told() -> bool:
    """Returns whether Python has been told a length in what is recorded."""
    return _asked.questions is not None and _asked.questions.answered


def extents_told(trace: Any) -> Mapping[int, Any]:
    """Returns the extents that take the place of lengths that Python knows in what a trace records.

    That they do is noted.
    """
    questions = _asked.questions
    if questions is None or questions.trace is not trace or questions.keeps_numbers:
        return {}
    questions.placed |= bool(questions.told)
    return questions.told


def is_told(extent: AxisSize, number: int, told: Mapping[int, Any]) -> bool:
    """Returns whether Python has been told that a number is the value of an extent."""
    return number in told and _text(told[number]) == _text(extent)


@contextlib.contextmanager
def noting_questions() -> Iterator[None]:
    """Inside, `note_questions_in` says where questions about lengths are noted in this thread."""
    before = _asked.questions
    try:
        yield
    finally:
        _asked.questions = before


def note_questions_in(questions: Questions) -> None:
    """Has questions be noted there from now on."""
    _asked.questions = questions


@functools.cache
def _role(module: str, is_general: bool) -> str:
    """Returns the role of a module: "jax", "us", "helper" or "user".

    "jax" and "us" may ask about extents; a "helper" asks for its caller.
    """
    top = module.partition(".")[0]
    if is_general or is_private(module):
        return "us"
    if top in ASKERS:
        return "jax"
    return "helper" if top in HELPERS else "user"


def _role_of(frame: FrameType) -> str:
    names = frame.f_globals
    return _role(names.get("__name__") or "", HOLDS_FOR_ALL_LENGTHS in names)


def is_user_code(frame: FrameType) -> bool:
    """True of frames that do not belong to JAX, to us or to the libraries that both use."""
    return _role_of(frame) == "user"


def frame_of_user() -> FrameType | None:
    """Returns the frame of the user's code that a recorder is called from; None if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame):
        if frame.f_globals.get("__name__", "").startswith("jedbatch._session"):
            return None  # what called the recorder is us, and the user is who called us
        frame = frame.f_back
    return frame


def line_of_user() -> str:
    """Returns "file:line" of the user's code that a recorder is called from; "" if none is."""
    frame = frame_of_user()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def user_line_in(error: BaseException) -> str:
    """Returns "file:line", the innermost line of the user's that an error came through, or ""."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame):
            line = f"{frame.f_code.co_filename}:{number}"
    return line


def user_level() -> int:
    """Returns the `stacklevel` of a warning at the user's line, for who calls this."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_user_code(frame):
        frame, level = frame.f_back, level + 1
    return level


def _asker(frame: FrameType) -> tuple[Any, str]:
    """(the frame that asks, whose it is)."""
    role = _role_of(frame)
    while role != "user" and frame.f_back is not None:
        # Python calls these methods, of values of JAX that hold extents.
        if role != "helper" and frame.f_code.co_name not in ("__eq__", "__ne__", "__hash__"):
            break
        frame = frame.f_back
        role = _role_of(frame)
    return frame, role


def refuse_decision(what: str, frame: FrameType, error: type = LengthDecisionError) -> NoReturn:
    """Raises an error of what Python does with the length of an array."""
    reason = f"Python {what} at {frame.f_code.co_filename}:{frame.f_lineno}"
    if _asked.questions is not None:
        _asked.questions.refused.append(reason)
    raise error(reason)


def refuse_iteration() -> NoReturn:
    """Raises an error of a loop over the rows of an array of unknown length, which calls this."""
    refuse_decision("loops over the rows of an array", sys._getframe(2), LengthNeededError)


def refuse_writing() -> None:
    """Raises an error of a number that is written, which may depend on a length, as `n / m` does.

    Where lengths are known, such a number is one of Python's. The number calls this.
    """
    if _asked.questions is not None:
        frame, role = _asker(sys._getframe(2))
        if role not in OURS:
            refuse_decision("writes a number", frame)


def _ask(a: object, b: object, compare: Callable, frame: FrameType) -> bool | None:
    """Returns the answer if Python compares and may know lengths, None if it is JAX that asks.

    Raises an error unless that holds for all lengths.
    """
    frame, role = _asker(frame)
    if role in OURS and isinstance(b, Base):
        name = frame.f_code.co_qualname
        decides = DECISIONS.match(name)
        if decides or CHECKS.match(name):
            pair = equal_if(a - b)
            if pair and _asked.questions is not None:
                _asked.questions.unequal.append(pair)
        if decides:
            while not is_user_code(frame) and frame.f_back is not None:
                frame = frame.f_back
            refuse_decision("compares arrays of different lengths", frame)
    if role in OURS:
        return None
    number = length_known(a)
    if number is None:
        refuse_decision("decides on the length of an array", frame)
    other = length_known(b) if isinstance(b, Base) else b
    return getattr(operator, compare.__name__)(number, other)


@functools.lru_cache(maxsize=1024)
def equal_if(difference: Any) -> tuple[str, str] | None:
    """Two symbols, if a difference of extents is 0 exactly where they are equal; else None."""
    symbols = sorted(symbols_in(difference))
    if len(symbols) != 2:
        return None
    few = range(1, 8)
    for values in itertools.product(few, few):
        zero = extent_at(difference, dict(zip(symbols, values, strict=True))) == 0
        if zero != (values[0] == values[1]):
            return None
    return symbols[0], symbols[1]


def _deciding(compare: Callable, unsound: Callable[[bool], bool]) -> Callable:
    """A comparison that refuses to give answers which may not hold for all lengths."""
    symmetric = compare in (Base.__eq__, Base.__ne__)

    def method(self: Any, other: object) -> bool:
        left, right = self, other
        if symmetric and type(other) is Base:  # which knows nothing of us
            left, right = other, self
        try:
            answer = compare(left, right)
            asks_for_none = symmetric and unsound(answer) and type(other) is int and other == 0
            if asks_for_none and FUNCTIONS.match(sys._getframe(1).f_globals["__name__"]):
                Base.__ge__(self, 1)  # raises an error unless it is known
        except Exception:  # of JAX, that it cannot know; the function may catch it
            found = _ask(self, other, compare, sys._getframe(1))
            if found is not None:
                return found
            if type(other) is int:
                _note_few(self - other + (compare in (Base.__ge__, Base.__lt__)))
            raise
        if unsound(answer) and not (symmetric and _known_to_differ(self, other)):
            found = _ask(self, other, compare, sys._getframe(1))
            return answer if found is None else found
        return answer

    return method


def _known_to_differ(extent: AxisSize, other: Any) -> bool:
    """Returns whether something is no extent that might be equal, whatever the length is."""
    if isinstance(other, Base):
        return extent.scope is not other.scope
    return other is None or type(other) is str


def _writing(write: Callable) -> Callable:
    """A way of writing an extent, for JAX and for us."""

    def method(self: Any, *args: Array, **kwargs: object) -> str:
        if _asked.questions is not None:
            frame, role = _asker(sys._getframe(1))
            if role not in OURS:
                number = length_known(self) if isinstance(self, Base) else None
                if number is None:
                    refuse_decision("writes the length of an array", frame)
                return write(number, *args, **kwargs)
        return write(self, *args, **kwargs)

    return method


def _calculating(calculate: Callable) -> Callable:
    """An operation whose result is an extent that refuses, too."""

    def method(self: Any, *args: Array) -> Any:
        extent = calculate(self, *args)
        return tuple(map(_watched, extent)) if type(extent) is tuple else _watched(extent)

    return method


def _choosing(choose: Callable) -> Callable:
    """The greater or lesser of two extents, which JAX may or may not know."""

    def method(self: Any, other: Any) -> Any:
        _note_few(self - other + 1)  # one of both says which it is
        _note_few(other - self + 1)
        return _watched(choose(self, other))

    return method


def _note_few(extent: AxisSize) -> None:
    """Notes that JAX asks whether an extent is 1 at least."""
    if _asked.questions is not None and isinstance(extent, Base):
        _asked.questions.few.append(extent)


def _remainder(extent: Any, divisor: Any) -> Any:
    """An extent modulo a number, as `n - 2*floordiv(n, 2)`: JAX sees that n and this are even."""
    if type(divisor) is not int or divisor < 2:
        return Base.__mod__(extent, divisor)
    return extent - divisor * (extent // divisor)


def _power(extent: Any, power: Any, *modulo: Any) -> Any:
    """Returns an extent raised to a power: an extent, or an array where it may be no extent."""
    if is_symbolic_dim(power) or (type(power) is int and power >= 0):
        return Base.__pow__(extent, power, *modulo)
    base = extent * 1.0 if type(power) in (int, float) else extent.__jax_array__()
    return pow(base, power, *modulo)


class Extent(Base):
    """A symbolic dimension on which Python may not decide."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what `isinstance` asks for
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__", "").endswith("numpy.indexing"):
            return jax.Array
        return type(self) if _asker(frame)[1] in OURS else int

    @property
    def dtype(self) -> Any:
        """The type of the number it stands for, for `jax.lax.fori_loop`; numbers have none."""
        if _asker(sys._getframe(1))[1] not in OURS:
            raise AttributeError("'int' object has no attribute 'dtype'")
        return jax.dtypes.canonicalize_dtype(int)

    # What follows from a bound above is checked; that there is a row at all is not.
    __eq__ = _deciding(Base.__eq__, lambda found: not found)
    __ne__ = _deciding(Base.__ne__, lambda found: found)
    __gt__ = _deciding(Base.__gt__, lambda found: found)
    __ge__ = _deciding(Base.__ge__, lambda found: found)
    __lt__ = _deciding(Base.__lt__, lambda found: not found)
    __le__ = _deciding(Base.__le__, lambda found: not found)

    __add__ = _calculating(Base.__add__)
    __radd__ = _calculating(Base.__radd__)
    __sub__ = _calculating(Base.__sub__)
    __rsub__ = _calculating(Base.__rsub__)
    __mul__ = _calculating(Base.__mul__)
    __rmul__ = _calculating(Base.__rmul__)
    __pow__ = _calculating(_power)
    __floordiv__ = _calculating(Base.__floordiv__)
    __rfloordiv__ = _calculating(Base.__rfloordiv__)
    __mod__ = _calculating(_remainder)
    __rmod__ = _calculating(Base.__rmod__)
    __neg__ = _calculating(Base.__neg__)

    max, rmax = _choosing(Base.max), _choosing(Base.rmax)
    min, rmin = _choosing(Base.min), _choosing(Base.rmin)
    __divmod__ = _calculating(Base.__divmod__)
    __rdivmod__ = _calculating(Base.__rdivmod__)

    __str__ = _writing(lambda self: str(_text(self)))
    __repr__ = _writing(lambda self: str(_text(self)))
    __format__ = _writing(lambda self, spec: format(_text(self), spec))

    def __bool__(self) -> bool:
        frame, role = _asker(sys._getframe(1))
        if role not in OURS:
            number = length_known(self)
            if number is None:
                refuse_decision("decides on the length of an array", frame)
            return bool(number)
        return True

    def __index__(self) -> int:
        frame, role = _asker(sys._getframe(1))
        if role not in OURS:
            number = length_known(self)
            if number is None:
                refuse_decision(
                    "needs the length of an array as a number", frame, LengthNeededError
                )
            return number
        raise TypeError("the length of an array is not known while this is traced")

    __int__ = __index__

    def __hash__(self) -> int:
        questions = _asked.questions
        if questions is not None:
            _note_hash(questions, sys._getframe(1))
        return Base.__hash__(self)


def _text(extent: Any) -> Any:
    """Returns an extent as JAX writes it; a number as it is."""
    return Base.__str__(extent) if isinstance(extent, Base) else extent


EXTENTS = frozenset({Base, Extent})  # the types of extents


def _note_hash(questions: Questions, frame: Any) -> None:
    """Notes that an extent is hashed, if it may be for Python to look it up.

    Where a function compiled by JAX is called with an extent for a static argument, the caller's
    frame seems to hash it; but then JAX's own code does so, too, before that call returns.
    """
    if not questions.hashed and frame.f_code.co_name != "__hash__" and _role_of(frame) in OURS:
        return
    frame, role = _asker(frame)
    if role not in OURS:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        reason = f"Python looks up the length of an array at {where}"
        questions.hashed.append((frame, frame.f_lasti, reason))
        return
    while questions.hashed and frame is not None and _role_of(frame) != "user":
        frame = frame.f_back
    while questions.hashed and questions.hashed[-1][:2] == (frame, frame and frame.f_lasti):
        questions.hashed.pop()


def _watched(extent: AxisSize) -> AxisSize:
    """The extent as one on which Python may not decide."""
    if type(extent) is Base:
        extent = copy.copy(extent)
        extent.__class__ = Extent
    return extent


def watched_shape(shape: tuple[AxisSize, ...]) -> tuple[AxisSize, ...]:
    """A shape of extents on which Python may not decide."""
    return tuple(map(_watched, shape)) if any(type(d) is Base for d in shape) else shape


class RaggedType(ShapedArray):
    """The type of an array with ragged axes, for user code: equal where type and shape are."""

    __slots__ = ()

    @staticmethod
    def of(shape: Any, dtype: Dtype, weak: bool) -> tuple[ShapedArray, "RaggedType | None"]:
        """The type of an array: (for JAX, for user code if it is another one)."""
        aval = ShapedArray(watched_shape(shape), dtype, weak_type=weak)
        if not is_ragged(shape):
            return aval, None
        guarded = object.__new__(RaggedType)
        for name in ShapedArray.__slots__:
            if name != "__weakref__":
                object.__setattr__(guarded, name, getattr(aval, name))
        return aval, guarded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapedArray) and (
            (self.dtype, self.weak_type, self.sharding, self.shape)
            == (other.dtype, other.weak_type, other.sharding, other.shape)
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.weak_type))

    __str__ = _writing(ShapedArray.__str__)
    __repr__ = _writing(ShapedArray.__repr__)
    str_short = _writing(ShapedArray.str_short)


def asks_for_type() -> bool:
    """Returns whether user code asks who calls this for its type, maybe by `jax.typeof`."""
    frame: Any = sys._getframe(2)
    for outer in (frame, frame.f_back):
        if outer is not None and outer.f_code is jax.typeof.__code__:
            frame = outer.f_back
    return _asker(frame)[1] not in OURS


def make_symbol(name: str, scope: Any) -> AxisSize:
    """A symbol of a scope of `jax.export`."""
    return _watched(symbolic_shape(name, scope=scope)[0])


def as_number(x: object) -> AxisSize:
    """An extent as a value to compute with; anything else as it is."""
    return x.__jax_array__() if isinstance(x, Base) else x


def as_numbers(values: Sequence[Any], trace: Any) -> Sequence[Any]:
    """Operands of an operation, the extents among them as values of a trace of JAX."""
    if not EXTENTS.intersection(map(type, values)):
        return values
    with set_current_trace(trace):
        return list(map(as_number, values))


def is_ragged(shape: Sequence[AxisSize]) -> bool:
    """Returns whether an extent of a shape is symbolic."""
    return any(type(d) is not int and is_symbolic_dim(d) for d in shape)


def ragged_axes(shape: Sequence[AxisSize]) -> tuple[int, ...]:
    """The axes of a shape whose extents are symbolic."""
    return tuple(i for i, d in enumerate(shape) if type(d) is not int and is_symbolic_dim(d))


def extent_at(extent: AxisSize, values: Mapping[str, object]) -> AxisSize:
    """An extent where its symbols have these values: numbers, or arrays of them."""
    if not is_symbolic_dim(extent):
        return extent
    return eval(_compiled(str(extent)), _FUNCTIONS, dict(values))


def shape_at(shape: Sequence[AxisSize], values: Mapping[str, object]) -> tuple[AxisSize, ...]:
    """A shape where its symbols have these values."""
    return tuple(extent_at(d, values) for d in shape)


def grows(extent: AxisSize) -> bool:
    """Returns whether there is room for an extent where there is room for its symbols.

    `n - 1` and `2*n + m` grow with their symbols; `12 - n` and `mod(n, 4)` do not.
    """
    symbols = sorted(symbols_in(extent))
    if SUM.fullmatch(str(extent)):
        return True
    if len(symbols) > 3:
        return False  # not known
    for most in (8, 16, 32, 64, 256, 1024):
        few = np.unique(np.r_[1:9, np.linspace(1, most, 17).astype(int)])
        grid = np.meshgrid(*[few[few <= most]] * len(symbols))
        sizes = extent_at(extent, dict(zip(symbols, grid, strict=True)))
        if np.max(sizes) > extent_at(extent, dict.fromkeys(symbols, most)):
            return False
    return True


@functools.cache
def _compiled(text: str) -> Any:
    """An extent, as JAX writes it, as Python's code."""
    return compile(text.replace("^", "**"), "extent", "eval")


def _chosen(by_python: Any, by_numpy: Any, by_jax: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, Base):
            return getattr(a, by_python.__name__)(b)
        if isinstance(b, Base):
            return getattr(b, "r" + by_python.__name__)(a)
        if isinstance(a, jax.Array) or isinstance(b, jax.Array):
            return by_jax(a, b)
        arrays = isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        return by_numpy(a, b) if arrays else by_python(a, b)

    return choose


_FUNCTIONS = {
    "__builtins__": {},
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "max": _chosen(max, np.maximum, jnp.maximum),
    "min": _chosen(min, np.minimum, jnp.minimum),
}


def symbols_in(value: Array) -> frozenset[str]:
    """The symbols in the extents that parameters of a primitive have somewhere inside."""
    if isinstance(value, dict):
        return symbols_in(tuple(value.values()))
    if isinstance(value, tuple | list):
        return frozenset().union(*map(symbols_in, value))
    if is_program(value):
        jaxpr = without_consts(value)
        inside = [symbols_in(v.aval.shape) for v in (*jaxpr.invars, *jaxpr.outvars)]
        inside += [symbols_in(eqn.params) for eqn in jaxpr.eqns]
        return frozenset().union(*inside)
    if type(value) in (int, str, bool, type(None)) or not is_symbolic_dim(value):
        return frozenset()
    return frozenset(_compiled(str(value)).co_names) - _FUNCTIONS.keys()
