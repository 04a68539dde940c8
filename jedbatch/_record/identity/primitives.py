"""Keys that tell operations of JAX apart: keys of primitives, their parameters and jaxprs."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jedbatch._graph.operations import PrimitiveKey
from jedbatch._jaxpr.closed_over import value_that_is_gone
from jedbatch._jaxpr.identity import Same, typed_or_same
from jedbatch._jaxpr.numbers import (
    BODIES,
    Number,
    is_literal,
    is_number,
    numbers_of,
    reads_numbers,
    traced_bodies,
)
from jedbatch._jaxpr.symbolic_dims import SYMBOL, Base, symbols_in
from jedbatch._jaxpr.versions import (
    RULES_OF,
    OpenProgram,
    consts_of,
    is_program,
    traced_rule,
    without_consts,
)
from jedbatch._record.identity.environment import Environment
from jedbatch._record.identity.function_leaves import held_values
from jedbatch._record.identity.functions import function_identity
from jedbatch._record.instances.arrays import is_array
from jedbatch._support.caches import Budget, Memory, each
from jedbatch._support.types import Leaf
from jedbatch.errors import EscapedValueError

KEY_BYTES = 1 << 10  # of a key and how it is found, about
PROGRAM_BYTES = 1 << 13  # of a program that is kept alive, about
RULE_BYTES = 1 << 15  # of a derivative rule and what it reads, about
MAX_RULES = 3  # of differentiation of one operation, each in the program of another
MAX_RULES_INSIDE = 8  # the same of any operations


class Keys:
    """The keys of what has been met.

    Args:
      budget: of bytes for those that can be found again.

    Attributes:
      reached: see `Registry`.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.reached: Mapping[int, Hashable] = {}
        of_key, of_program = each(KEY_BYTES), each(PROGRAM_BYTES)
        self._ids: dict[Hashable, Any] = {}  # of programs
        self._primitives: dict[Hashable, PrimitiveKey] = Memory(None, budget, of_key)
        self._jaxprs: dict[Hashable, tuple[Hashable, tuple[Number, ...]]] = Memory(
            None, budget, of_program
        )
        self._latest: dict[int, tuple[Any, PrimitiveKey, dict]] = Memory(None, budget, of_program)
        self._read_by: dict[int, Environment] = Memory(None, budget, each(RULE_BYTES))
        self._rules: list[Hashable] = []  # what they belong to, of those that are being written

    def __len__(self) -> int:
        return len(self._ids)

    def custom_key(self, fun: Any, rules: Sequence[Any]) -> tuple[Hashable, ...]:
        """The key of a function with derivative rules.

        Arrays that the function reads are operands. Those that rules read are constants of them: so
        all that these read now is part of the key.
        """
        key = [function_identity(fun, self.reached, self.jaxpr_key)]
        for rule in rules:
            key += self._read_now(rule)
        return ("custom", *key)

    def _read_now(self, rule: Any) -> tuple[Hashable, Hashable]:
        """Returns the identity of a rule, and all that it reads now."""
        own = getattr(rule, "f", rule)
        identity = function_identity(rule, program_key=self.jaxpr_key)
        if id(own) not in self._read_by:
            self._read_by[id(own)] = Environment(own)
        return identity, self._read_by[id(own)].written()

    def _interned(
        self, skeleton: tuple, numbers: tuple[Number, ...], *, is_ragged: bool
    ) -> PrimitiveKey:
        """Returns the key of an operation without its numbers and of these, one for equal ones."""
        content = (*skeleton, *(x.key for x in numbers)) if numbers else skeleton
        key = self._primitives.get(content)
        if key is None:
            key = PrimitiveKey(content, is_ragged, numbers, skeleton)
            self._primitives[content] = key
        return key

    def primitive_key(self, primitive: object, params: dict[str, Any]) -> PrimitiveKey:
        """A primitive and its parameters as one object.

        JAX hands us the same program whenever a jit-ted function meets the same types, so that is
        known by identity.
        """
        program = params.get("jaxpr")
        latest = self._latest.get(id(program)) if program is not None else None
        if latest is not None and latest[0] is primitive and _all_same(latest[2], params):
            return latest[1]
        skeleton, numbers = self._without_numbers(primitive, params)
        key = self._interned(skeleton, numbers, is_ragged=bool(symbols_in(params)))
        if program is not None:
            self._latest[id(program)] = primitive, key, params  # which keep the id alive
        return key

    def _without_numbers(self, primitive: Any, params: dict[str, Any]) -> tuple[tuple, tuple]:
        """(a primitive and its parameters without the numbers in its bodies, these numbers)."""
        bodies = traced_bodies(primitive.name, params)
        if primitive.name in RULES_OF:
            return (primitive, *self.rule_key(primitive.name, params)), ()
        if not bodies:
            return (primitive, self.params_key(params)), ()
        names = BODIES[primitive.name]
        others = {name: value for name, value in params.items() if name not in names}
        parts: list[Hashable] = [primitive, self.params_key(others)]
        numbers: list[Number] = []
        for body in bodies:
            skeleton, inside = self.written(body)
            parts.append(skeleton)
            numbers += inside
        return tuple(parts), tuple(numbers)

    def rule_key(self, name: str, params: dict[str, Any]) -> tuple[Hashable, ...]:
        """The parameters of an operation with a rule of differentiation, which is traced.

        By what it is made of it would be another one whenever the operation is met in a program. A
        rule mostly leads to the operation again; those of its derivatives beyond the third are not
        compared.

        Raises `EscapedValueError` of rules that read values of what they were made in.
        """
        others = self.params_key({k: x for k, x in params.items() if k not in RULES_OF[name]})
        if self._rules.count(others) == MAX_RULES:
            return (others,)
        if len(self._rules) == MAX_RULES_INSIDE:
            return (self.params_key(params),)
        self._rules.append(others)
        try:
            program, consts, rest = traced_rule(name, params)
            back = getattr(params.get("bwd"), "f", None)
            for x in (*consts, *held_values(back)):
                if isinstance(x, Tracer):
                    raise value_that_is_gone(x)
            key = others, self.jaxpr_key(program), *map(constant_key, consts)
            if name != "custom_vjp_call":
                return *key, self.params_key(rest)
            # What goes on to the backward rule; that has not been traced.
            return *key, self.params_key(params["out_trees"]()), *self._read_now(params["bwd"])
        except EscapedValueError:
            raise
        except Exception:  # it may be an error to differentiate it at all
            return (self.params_key(params),)
        finally:
            self._rules.pop()

    def params_key(self, value: Any) -> Hashable:
        """The parameters of a primitive as something hashable; unequal if in doubt."""
        kind = type(value)
        if kind is int or kind is str or kind is bool or value is None:
            return kind, value
        if kind is tuple:
            return kind, *map(self.params_key, value)
        if is_program(value):
            return self.jaxpr_key(value)
        if isinstance(value, dict):
            return dict, *((k, self.params_key(v)) for k, v in sorted(value.items()))
        if isinstance(value, tuple | list):
            return type(value), *map(self.params_key, value)
        if callable(value):
            return function_identity(value, self.reached)
        return typed_or_same(value)

    def jaxpr_key(self, jaxpr: OpenProgram) -> Hashable:
        """Equal for programs that are equal up to the names of their variables."""
        skeleton, numbers = self.written(jaxpr)
        return (skeleton, *(x.key for x in numbers)) if numbers else skeleton

    def written(
        self, program: OpenProgram, is_kept: bool = True
    ) -> tuple[Hashable, tuple[Number, ...]]:
        """(a program without its numbers, its numbers), found at once for one that is kept."""
        same = Same(program)
        entry = self._jaxprs.get(same)
        if entry is None:
            content = ("written", self._write(program))
            key = self._ids.setdefault(content, ("jaxpr", len(self._ids)))
            entry = key, tuple(numbers_of(program))
            if is_kept and not self._rules:  # inside of rules not all rules are compared
                self._jaxprs[same] = entry
        return entry

    def _write(self, program: OpenProgram) -> Hashable:
        """A program as nested tuples, variables numbered by first appearance."""
        inner = without_consts(program)
        names: dict[Any, int] = {}
        types: dict[int, tuple[Hashable, Any]] = {}  # most variables of a type share one object

        def type_of(x: Leaf) -> Hashable:
            written = types.get(id(x.aval))
            if written is None:
                written = types[id(x.aval)] = self._type(x.aval), x.aval
            return written[0]

        def atom(x: Leaf, reads_numbers: bool = True) -> Hashable:
            if isinstance(x, Literal):
                value = b"" if reads_numbers and is_literal(x) else np.asarray(x.val).tobytes()
                return "literal", value, type_of(x)
            return names.setdefault(x, len(names)), type_of(x)

        parts: list[Hashable] = [
            ("number", str(jax.typeof(c))) if is_number(c) else constant_key(c)
            for c in consts_of(program)
        ]
        parts += map(atom, (*inner.constvars, *inner.invars))
        for eqn in inner.eqns:
            skeleton, _ = self._without_numbers(eqn.primitive, eqn.params)
            parts += skeleton
            are_numbers = reads_numbers(eqn)
            parts += [atom(x, are_numbers) for x in eqn.invars]
            parts += map(atom, eqn.outvars)
        return (*parts, *map(atom, inner.outvars))

    def _type(self, aval: Any) -> Hashable:
        return str(aval)


class NumberedKeys(Keys):
    """The same, so that the names of symbols do not matter.

    Every array of an instance has a symbol of its own for its length. So what a function does to
    two sentences is recorded twice, once with n and once with m. Symbols are numbered as they come
    up, and extents are written with the numbers:

        tanh of f32[n,4], f32[m,4]            both    tanh of f32[s0,4]
        broadcast to (m, 2*m)                         broadcast to (s0, 2*s0)

    Args:
      keys: by which all else is told apart.
      numbers: of symbols, given so far.
    """

    def __init__(self, keys: Keys, numbers: dict[str, int]) -> None:
        super().__init__()
        self.reached, self._ids, self._numbers = keys.reached, keys._ids, numbers

    def params_key(self, value: Any) -> Hashable:
        is_extent = isinstance(value, Base)
        return numbered(value, self._numbers) if is_extent else super().params_key(value)

    def _type(self, aval: Any) -> Hashable:
        return numbered((aval.shape, aval.dtype, aval.weak_type), self._numbers)


def numbered(value: Any, numbers: dict[str, int]) -> Hashable:
    """Extents in tuples with numbers for symbols; a new one gets the next number."""
    if type(value) is tuple:
        return tuple([numbered(x, numbers) for x in value])
    if not isinstance(value, Base):
        return value
    for s in sorted(symbols_in(value)):
        numbers.setdefault(s, len(numbers))
    names = {s: f"s{k}" for s, k in numbers.items()}
    return "extent", SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(value))


def constant_key(x: Any) -> Hashable:
    """Equal for constants of programs that are the same to the last bit."""
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    if isinstance(x, Tracer) or not isinstance(x, np.ndarray | jax.Array):
        return Same(x)
    if isinstance(x, jax.Array) and (x.is_deleted() or not x.is_fully_addressable):
        return Same(x)
    data = np.asarray(jax.random.key_data(x) if is_key else x)
    digest = hashlib.sha256(np.ascontiguousarray(data).tobytes()).digest()
    return "constant", str(jax.typeof(x)), getattr(x, "sharding", None), digest


def _all_same(params: dict[str, Any], others: dict[str, Any]) -> bool:
    """Returns whether the parameters of a primitive are the same objects, or tuples of flags.

    Such a tuple is another one at each call of a function that is jit-ted anew, as in `jnp.einsum`.
    """
    if len(params) != len(others):
        return False
    pairs = zip(params.values(), others.values(), strict=True)
    return all(a is b or (_are_flags(a) and _are_flags(b) and a == b) for a, b in pairs)


def _are_flags(x: Any) -> bool:
    return type(x) is tuple and all(type(flag) is bool for flag in x)


def identity_of_constant(x: Leaf) -> Hashable:
    """Returns what is equal for concrete values that an operation gives the same results for."""
    if isinstance(x, np.ndarray):  # its contents may change
        return type(x), x.dtype, x.shape, x.tobytes()
    return Same(x) if is_array(x) else typed_or_same(x)


def identity_of_array(x: Any) -> Hashable:
    """Returns what an array is found by that an operation of concrete values gives, or reads.

    What JAX computes of equal values is one object (see `memory_of_constants`).
    """
    return id(x) if isinstance(x, jax.Array) else identity_of_constant(x)


def memory_of_constants(budget: Budget) -> dict[Hashable, list[Any]]:
    """Returns a place for results of operations on concrete values, by these."""
    return Memory(None, budget, _bytes_of_constant)


def _bytes_of_constant(key: Any, results: list[Any]) -> int:
    return 100 * len(key) + sum(8 * np.size(x) for x in results)
