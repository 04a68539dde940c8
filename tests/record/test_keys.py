"""The keys of what is remembered: what differs in anything that can be seen has another one."""

import collections
import copy
import dataclasses
import datetime
import decimal
import fractions
import functools
import operator
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, loop

import jedbatch
from jedbatch._jaxpr.identity import tree_key, typed
from jedbatch._jaxpr.interpret import one_by_one
from jedbatch._record.identity.functions import function_identity
from jedbatch._record.identity.primitives import Keys
from jedbatch._record.instances.arrays import replace_arrays
from jedbatch._record.instances.key import instance_key

P = jnp.arange(1.0, 3.0)
X = np.ones(2, np.float32)


class Word(str):
    pass


class Money:
    """Compares by amount alone."""

    def __init__(self, amount, currency):
        self.amount, self.currency = amount, currency

    def __eq__(self, other):
        return self.amount == other.amount

    def __hash__(self):
        return hash(self.amount)


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    note: object = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Scaled:
    x: float
    scale: dataclasses.InitVar[float] = 1.0

    def __post_init__(self, scale):
        object.__setattr__(self, "factor", scale)


@dataclasses.dataclass(frozen=True)
class Words:
    words: typing.Any

    @functools.cached_property
    def total(self):
        return jnp.sum(jnp.asarray(self.words))


@dataclasses.dataclass
class Unset:
    x: typing.Any
    y: typing.Any = 2.0
    later: typing.Any = dataclasses.field(init=False)


class Base(typing.NamedTuple):
    x: float


class Marked(Base):
    pass


class Tagged:
    """A pytree with a part, and a tag that JAX compares by `==`."""

    def __init__(self, part, tag):
        self.part, self.tag = part, tag


jax.tree_util.register_pytree_node(
    Tagged, lambda a: ((a.part,), a.tag), lambda tag, parts: Tagged(*parts, tag)
)


def marked(x, mark):
    made = Marked(x)
    made.mark = mark
    return made


def word(text, tag):
    made = Word(text)
    made.tag = tag
    return made


def with_note(tagged, note):
    tagged.note = note
    return tagged


def looked_at(words):
    made = Words(words)
    assert made.total is not None
    return made


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0j, -0j),
        (np.float32(0), np.float32(-0.0)),
        (np.datetime64(1, "D"), np.datetime64(24, "h")),
        (range(0), range(5, 5)),
        (range(0, 3, 2), range(0, 4, 2)),
        ((1, (2,)), (1.0, (2,))),
        (frozenset([0, 8]), frozenset([8, 0])),
        (word("x", 1), word("x", 2)),
        (Money(1, "EUR"), Money(1, "USD")),
        (Config(1, "a"), Config(1, "b")),
        (Config(1), Config(True)),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (marked(1.0, 2), marked(1.0, 3)),
    ],
)
def test_equal_values_that_can_be_told_apart(a, b):
    assert a == b
    assert typed(a) != typed(b)
    assert typed(a) == typed(a)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Money(2, "EUR"),
        lambda: Config(2, "a"),
        lambda: fractions.Fraction(1, 3),
        lambda: range(2, 9, 3),
        lambda: jax.tree.structure(Tagged(1, (2, 3))),
    ],
)
def test_values_that_cannot_be_told_apart_are_the_same(make):
    assert make() is not make()
    assert typed(make()) == typed(make())


def test_what_cannot_be_written_out_is_the_same_as_itself_alone():
    day = datetime.datetime(2020, 1, 1)
    assert typed(day) == typed(day) != typed(datetime.datetime(2020, 1, 1))
    around = Config(1)
    object.__setattr__(around, "note", around)
    assert typed(around) == typed(around)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (range(0), range(5, 5)),
        (Scaled(1.0, 2.0), Scaled(1.0, 3.0)),
        (marked(1.0, 2.0), marked(1.0, 3.0)),
        (Tagged(1.0, 1), Tagged(1.0, True)),
        (Tagged(1.0, (0.0, 2)), Tagged(1.0, (-0.0, 2))),
        (with_note(Tagged(1.0, 1), "a"), with_note(Tagged(1.0, 1), "b")),
        ((X, X), (X, X + 0)),
    ],
)
def test_instances_that_can_be_told_apart(a, b):
    keys = [instance_key(x)[0] for x in (a, b)]
    assert None not in keys
    assert keys[0] != keys[1]


class Labelled(list):
    """A tree as in NLTK: a list of subtrees with a label."""

    def __init__(self, label, parts=()):
        super().__init__(parts)
        self.label = label


class Reordered(list):
    def __iter__(self):
        return iter(sorted(super().__iter__()))


@pytest.mark.parametrize("kind", [Labelled, collections.UserList, type("Names", (dict,), {})])
def test_lists_and_dicts_with_attributes_are_remembered(kind):
    def made(label, *parts):
        if kind is Labelled:
            return kind(label, parts)
        named = kind(dict(enumerate(parts)) if issubclass(kind, dict) else parts)
        named.label = label
        return named

    def encode(p, t):
        if isinstance(t, int):
            return p * t
        parts = [t[k] for k in range(len(t))]
        return jnp.tanh(len(t.label) * p + sum(encode(p, x) for x in parts))

    tree = made("S", made("NP", 1, 2), made("VP", 3))
    same, other = copy.deepcopy(tree), made("S", made("N", 1, 2), made("VP", 3))
    key = instance_key(tree)[0]
    assert key is not None
    assert key == instance_key(same)[0] != instance_key(other)[0]
    same[1].label = "V"
    assert instance_key(same)[0] != key
    check(encode, P, [tree, same, other])


@pytest.mark.parametrize(
    "instance",
    [
        Tagged(1.0, [object()]),
        with_note(Tagged(1.0, 1), object()),
        Words(object()),
        Reordered([2, 1]),
    ],
)
def test_instances_that_may_change_have_no_key(instance):
    assert instance_key(instance)[0] is None


def test_attributes_beside_the_fields_are_parts():
    """They are replaced as well, and so is what was computed from arrays before."""
    for instance in (looked_at(X), marked(X, X + 1)):
        _, arrays = instance_key(instance)
        copy = replace_arrays(instance, iter(range(len(arrays))))
        assert (len(arrays), type(copy)) == (2, type(instance))
        assert list(vars(copy).values())[-1] == 1
    fn = lambda p, t: p * t.total  # noqa: E731
    check(fn, P, [looked_at(X), looked_at(5 * X), Words(3 * X)])


@pytest.mark.parametrize("x", [3.0, X])
def test_fields_that_are_not_set_and_fields_in_another_order(x):
    turned, shorter, whole = Unset(x), Unset(x), Unset(x)
    turned.x = vars(turned).pop("x")
    del shorter.y
    whole.later = 1.0
    instances = [Unset(x), turned, shorter, whole]
    assert len({instance_key(t)[0] for t in instances}) == 4

    def fn(p, t):
        first = next(iter(vars(t)))
        return p * t.x * (2 if first == "x" else 3) + t.y + getattr(t, "later", 5)

    check(fn, P, instances)


def test_an_array_at_two_places_is_one():
    fn = lambda p, t: p * (2 if t[0] is t[1] else 3) + t[0] * t[1]  # noqa: E731
    batched = check(fn, P, [(X, X), (X, X + 1)], gradients=False)
    assert (
        batched.plan(P, [(X, X)]).graph.num_inputs < batched.plan(P, [(X, X + 1)]).graph.num_inputs
    )
    named = jedbatch.batch(fn, key=lambda t: "pair")
    for instance in ((X, X), (X, X + 1)):
        np.testing.assert_allclose(named(P, [instance]), loop(fn, P, [instance]))


def test_tags_of_shared_arguments():
    """One structure to JAX, three functions: what is returned says which."""
    fn = lambda p, x: Tagged(x * p.part, p.tag)  # noqa: E731
    batched = jedbatch.batch(fn)
    for tag in (1, True, 1.0, 1):
        got = batched(Tagged(P, tag), [2.0])
        assert type(got.tag) is type(tag)
        np.testing.assert_allclose(got.part, [P * 2])
    plans = [batched.plan(Tagged(P, tag), [2.0]).static for tag in (1, True)]
    assert plans[0] != plans[1]
    assert tree_key(jax.tree.structure({"a": 1})) == jax.tree.structure({"a": 2})


def test_cells_of_equal_code_in_different_modules():
    made = []
    for scale in (2.0, 3.0):
        module = {"SCALE": scale, "jedbatch": jedbatch}
        exec("@jedbatch.cell\ndef layer(x):\n    return x * SCALE\n", module)
        made.append(module["layer"])
    double, treble = made
    assert function_identity(double) != function_identity(treble)
    check(lambda p, x: double(p) + treble(p * x), P, [1.0, 2.0], gradients=False)


def test_classes_as_what_cells_read():
    made = jedbatch.cell(lambda p, x, *, make: p * x * make(3).size)
    closed = jedbatch.cell(lambda p, x: p * x * Config(2).size)

    def fn(p, t):
        return made(p, t[1], make=t[0]) + closed(p, t[1])

    check(fn, P, [(Config, 1.0), (Config, 2.0)], gradients=False)


# --- derivative rules ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def times(x, n):
    return x * n


times.defvjp(lambda x, n: (x * n, None), lambda n, _, g: (g * n * 2,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(fn, x):
    return fn(x)


applied.defjvp(lambda fn, p, t: (fn(p[0]), 7 * t[0]))


def test_arguments_that_derivatives_do_not_see():
    fn = lambda p, x: times(p * x, 3) + times(p * x, 4) + applied(jnp.sin, p) * applied(jnp.cos, x)  # noqa: E731
    check(fn, P, [1.0, 2.0])


def made_jvp(p, x):
    f = jax.custom_jvp(lambda x: jnp.sin(x))
    f.defjvp(lambda x, t: (jnp.sin(x[0]), 3 * t[0]))
    return f(p * x)


def made_vjp(p, x):
    f = jax.custom_vjp(lambda x: jnp.sin(x))
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))
    return jax.lax.scan(lambda c, _: (f(c), None), f(p * x), None, length=2)[0]


def by_slopes(of):
    """A rule that reads the function that it belongs to, made in each instance."""

    def fn(p, x):
        f = jax.custom_jvp(of)
        f.defjvps(lambda g, _, x: 2 * g * x)
        return f(p * x)

    return fn


of_partial = by_slopes(functools.partial(lambda x, power: x**power, power=2))
of_library = by_slopes(jax.nn.softplus)


@pytest.mark.parametrize("fn", [made_jvp, made_vjp, of_partial, of_library])
def test_rules_made_by_every_instance_are_one(fn):
    batched = check(fn, P, [X, X * 2], inference=True)
    types = len(batched.plan(P, [X]).graph.types)
    before = batched.compilations
    batched(P, [X * 4, X * 5])
    assert batched.compilations == before
    assert len(batched.plan(P, [X * 3]).graph.types) == types


def test_rules_that_hold_traced_functions():
    def root(y):
        newton = lambda f, z: z - f(z)  # noqa: E731
        return jax.lax.custom_root(
            lambda z: z - y, jnp.zeros(2), newton, lambda g, y: y / g(jnp.ones(2))
        )

    instances = [[X], [X, 2 * X]]
    batched = check(lambda p, xs: sum(root(p * x) for x in xs), P, instances)
    assert len(batched.plan(P, instances).graph.types) == 1 + 1 + 2  # products, roots, and sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def called(fn, x, *consts):
    return fn(x, *consts)


def _called_reverse(fn, read, g):
    return tuple(2 * t for t in jax.vjp(fn, *read)[1](g))


called.defvjp(lambda fn, *read: (fn(*read), read), _called_reverse)


def test_rules_of_functions_that_close_over_values():
    def fn(p, x):
        fn, consts = jax.closure_convert(lambda y: jnp.sin(p * y) + x, x)
        return called(fn, p * x, *consts)

    inside = jedbatch.cell(fn)
    check(lambda p, xs: fn(p, xs[0]) + inside(p, fn(p, xs[1])), P, [(X, X), (2 * X, X)])


def test_rules_that_close_over_constants():
    def fn(p, x):
        @jax.custom_vjp
        def scaled(x):
            return x * jnp.asarray(np.array([1.0, 3.0], np.float32))

        scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (5 * g,))
        return jax.lax.fori_loop(0, 2, lambda _, y: scaled(y), p * x)

    inside = jedbatch.cell(fn)
    check(lambda p, xs: fn(p, xs[0]) + inside(p, fn(p, xs[1])), P, [(X, X), (2 * X, X)])


def test_numbers_that_are_not_differentiated():
    check(lambda p, x: p * x**2 * jax.lax.stop_gradient(0.5), P, [1.0, 2.0])


# --- random keys ---


def draws(key):
    """Draws of every sort, in a loop too."""
    step = lambda x, k: (x + jax.random.normal(jax.random.fold_in(key, k), (2,)), None)  # noqa: E731
    return jax.lax.scan(step, jax.random.uniform(jax.random.split(key)[0], (2,)), jnp.arange(2))[0]


@pytest.mark.parametrize(("kind", "apart"), [("threefry2x32", 0), ("rbg", 2), ("unsafe_rbg", 4)])
def test_generators_whose_numbers_depend_on_how_many_run(kind, apart):
    """`vmap` draws other numbers with some of them, so these run one by one, however deep."""
    program = one_by_one(jax.make_jaxpr(draws)(jax.random.key(0, impl=kind)))
    assert str(program).count("custom_vmap_call[") == apart


def test_random_numbers_are_those_of_the_loop():
    draw = jedbatch.cell(lambda p, k: p * jax.random.uniform(k, (2,)))
    keys = [jax.random.key(i, impl="rbg") for i in range(3)]
    np.testing.assert_allclose(jedbatch.batch(draw)(P, keys), loop(draw, P, keys), rtol=1e-6)


def test_parameters_that_are_equal_are_not_the_same():
    """Parameters of all kinds, met for the first time and again."""
    keys = Keys()
    values = [1, True, 1.0, 0.0, -0.0, "1", None, ..., (1,), (True,), ((1,),), (), [1]]
    values += [np.dtype("float32"), np.dtype("int32"), ("float32",), jax.lax.Precision.HIGH]
    values += [(np.float32(1),), (np.int32(1065353216),), (np.int8(1),), (b"\1",)]  # equal as bytes
    made = [[keys.primitive_key(jax.lax.add_p, {"a": x, "b": 2}) for x in values] for _ in "ab"]
    assert len(set(map(id, made[0]))) == len(values)
    assert all(map(operator.is_, *made))
    of_none = [
        keys.primitive_key(jax.lax.mul_p, {"a": x, "b": y})
        for x, y in ((None, np.dtype("int8")), (np.dtype("int8"), None))
    ]
    assert of_none[0] is not of_none[1]
    assert keys.primitive_key(jax.lax.sub_p, {"a": 1}) is not keys.primitive_key(
        jax.lax.sub_p, {"b": 1}
    )


def test_types_in_programs_are_written_once_each(monkeypatch):
    """However many variables of a type there are."""
    written = []
    as_text = jax.core.ShapedArray.__str__
    monkeypatch.setattr(
        jax.core.ShapedArray, "__str__", lambda aval: written.append(aval) or as_text(aval)
    )
    program = jax.make_jaxpr(lambda x: functools.reduce(lambda y, _: jnp.sin(y), range(40), x))
    jaxpr = program(jnp.ones(3))
    written.clear()
    Keys().jaxpr_key(jaxpr)
    assert 0 < len(written) < len(jaxpr.eqns)
