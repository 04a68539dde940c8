"""Changes to the values that a function reads besides its arguments are detected."""

import dataclasses
import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close

import jedbatch
from jedbatch._record.identity import accessors as readers
from jedbatch._record.identity import environment as _environment
from jedbatch._record.identity.environment import Environment

XS = [1.0, 2.0]
X = np.ones(3, np.float32)
TABLE = {"w": jnp.arange(3.0)}
SETTINGS = types.ModuleType("settings_of_this_test")
SETTINGS.scale = 2.0
SETTINGS.unread = 0.0


def with_table(x):
    return jnp.tanh(TABLE["w"] * x)


class Layer:
    """Weights that are changed in place, and everything else an object may hold."""

    bias = 1.0

    def __init__(self):
        self.w = jnp.ones(3)
        self.steps = []
        self.rows = np.ones(3, np.float32)
        self.nested = types.SimpleNamespace(factor=2.0)

    @property
    def doubled(self):
        return self.nested.factor * self.w

    def __call__(self, x):
        return jnp.tanh(self.doubled * x + self.bias + self.rows)


@dataclasses.dataclass(frozen=True)
class Weights:
    w: jax.Array


def agrees(batched, fn, instances=XS):
    assert_close(batched(instances), jnp.stack([fn(x) for x in instances]), 1e-6)


# --- what is looked at ---


def test_every_place_is_looked_at():
    layer = Layer()
    scale = 1.0
    slots = type("Slots", (), {"__slots__": ("x",)})()
    slots.x = 1

    def helper(x, by=1.0, *, plus=0.0):
        return x * by + plus

    def fn(x):
        return helper(layer(x)) * scale * slots.x * SETTINGS.scale + fn.extra

    fn.extra = 1.0
    environment = Environment(functools.partial(fn))
    seen = {environment.look().number}

    def changed():
        number = environment.look().number
        new = number not in seen
        seen.add(number)
        assert environment.look().number == number
        return new

    def rebind():
        nonlocal scale
        scale = 2.0

    changes = [
        lambda: setattr(layer, "w", jnp.zeros(3)),
        lambda: layer.steps.append(1),
        lambda: layer.rows.__setitem__(0, 5.0),
        lambda: setattr(layer.nested, "factor", 3.0),
        lambda: setattr(layer.nested, "factor", 3),
        lambda: setattr(layer, "new", None),
        lambda: setattr(Layer, "bias", 2.0),
        lambda: setattr(slots, "x", True),
        lambda: setattr(fn, "extra", 2.0),
        lambda: setattr(helper, "__defaults__", (3.0,)),
        lambda: helper.__kwdefaults__.update(plus=1.0),
        lambda: setattr(helper, "__code__", (lambda x, by=1.0, *, plus=0.0: x).__code__),
        lambda: setattr(SETTINGS, "scale", 4.0),
        rebind,
    ]
    try:
        for k, change in enumerate(changes):
            assert not changed(), k
            change()
            assert changed(), k
        SETTINGS.unread = 1.0
        assert not changed()
    finally:
        Layer.bias, SETTINGS.scale = 1.0, 2.0


@pytest.mark.parametrize("size", [3, 300, 70_000])
def test_what_is_large_is_the_same_when_it_is_looked_at_again(size):
    """Interpreters have one object for each small number, and make others anew."""
    names = [f"a{i}" for i in range(size)]
    kind = type("Kind", (), dict.fromkeys(names, 1))
    fn = lambda x: x  # noqa: E731
    fn.__dict__.update(dict.fromkeys(names))
    read = {
        "class": lambda: readers.of_class(kind),
        "some of a class": lambda: readers.of_some_of_class(names[:2], kind),
        "functions": lambda: readers.of_functions([fn]),
    }
    for what, look in read.items():
        assert all(map(operator.is_, look(), look())), what


class Base:
    __slots__ = ("n",)
    made = 0

    def __init__(self, n):
        self.n = n
        Base.made += 1

    def __getitem__(self, _):
        return self.n

    @property
    def twice(self):
        return 2 * self.factor()

    def factor(self):
        return SETTINGS.scale

    def unread(self):
        return 1.0


@pytest.mark.parametrize("native", ["0", "1"])
def test_classes_of_instances_are_looked_at(native, monkeypatch):
    """They are reached through instances alone; counters of the objects made do not count."""
    monkeypatch.setenv("JEDBATCH_NATIVE", native)

    class Kind(Base):
        by = 2.0
        rows = jnp.ones(3)

    @dataclasses.dataclass
    class Fields:
        kind: object
        by = 1.0

    def fn(x):
        return (x[0].rows * x[0].by * x[0].twice + x[0][0] * x[1].by).sum()

    batched = jedbatch.batch(fn, in_axes=0)

    def same():
        instances = [(Kind(n), Fields(n)) for n in range(3)]
        agrees(batched, fn, instances)
        return batched._core.environment.look().number

    changes = [
        lambda: setattr(Kind, "by", 3.0),
        lambda: setattr(Kind, "rows", jnp.arange(3.0)),
        lambda: setattr(Fields, "by", 4.0),
        lambda: monkeypatch.setattr(SETTINGS, "scale", 5.0),
        lambda: monkeypatch.setattr(Base, "factor", lambda _: 6.0),
        lambda: monkeypatch.setattr(Base, "__getitem__", lambda x, _: x.n + 1),
        lambda: setattr(Kind, "factor", lambda _: 7.0),
        lambda: setattr(Kind, "factor", lambda x: x.twice if x is None else 8.0),
    ]
    same()
    number = same()
    for change in changes:
        assert same() == number
        change()
        later = same()
        assert later != number
        number = same()
    monkeypatch.setattr(Base, "unread", None)
    assert same() == number


def test_what_is_as_it_was_before_has_the_number_it_had():
    layer = Layer()
    environment = Environment(layer)
    first = environment.look()
    layer.nested.factor = 5.0
    assert environment.look().number != first.number
    layer.nested.factor = 2.0
    assert environment.look() == first
    environment.clear()
    assert environment.look().number > first.number


def test_the_way_to_an_array():
    layer, holder = Layer(), [{"w": Weights(jnp.ones(2))}]
    environment = Environment(lambda x: layer(x) * holder[0]["w"].w * TABLE["w"])
    reached = environment.look()
    assert len(reached.arrays) == 3
    for array, way in zip(reached.arrays, reached.names, strict=True):
        assert environment.follow(way) is array
    holder[0] = {"w": Weights(jnp.zeros(2))}
    layer.w = jnp.zeros(3)
    later = environment.look()
    assert later.names == reached.names
    assert later.number != reached.number
    holder.clear()
    assert sum(environment.follow(way) is None for way in reached.names) == 1


def test_arrays_are_not_kept_alive():
    layer = Layer()
    environment = Environment(layer)
    environment.look()
    ref = environment._arrays[0]
    layer.w = None
    assert ref() is None


def test_what_the_function_writes_does_not_count():
    calls = []
    layer = Layer()

    def fn(x):
        calls.append(x)
        return layer(x)

    batched = jedbatch.batch(fn, in_axes=0)
    for _ in range(3):
        batched(XS)
    assert len(calls) == len(XS)
    calls.append("from outside")
    batched(XS)
    assert len(calls) == 2 * len(XS) + 1


def test_large_things(monkeypatch):
    """Lists beyond the limit are taken to stay; large arrays of NumPy to change, unless frozen."""
    monkeypatch.setattr(_environment, "MAX_VALUES", 50)
    monkeypatch.setattr(_environment, "MAX_COMPARED_BYTES", 64)
    many = list(range(100))
    environment = Environment(lambda x: many[x])
    first = environment.look().number
    many[0] = 7
    assert environment.look().number == first
    rows = np.ones(100, np.float32)
    environment = Environment(lambda x: rows[x])
    assert environment.look().number != environment.look().number
    rows.flags.writeable = False
    assert environment.look().number == environment.look().number


# --- numbers ---


def test_weights_that_are_changed_in_place():
    """Recorded instances see them, and programs are used again."""
    layer = Layer()
    inner = jedbatch.cell(lambda x: layer(x))
    direct = jedbatch.cell(lambda x, w: x * w)
    fn = lambda t: inner(t[0]) + layer(t[1]) + direct(t[0], layer.w)  # noqa: E731
    pairs = [(np.float32(k) * X, np.float32(k + 1) * X) for k in (1, 2)]
    batched = jedbatch.batch(fn, in_axes=0)
    agrees(batched, fn, pairs)
    before = batched.compilations
    for k in range(3):
        layer.w = layer.w + k + 1
        agrees(batched, fn, pairs)
        agrees(batched, fn, [(pairs[0][0] + k, pairs[1][1]), pairs[0]])
    assert batched.compilations == before
    layer.nested.factor = -1.0
    agrees(batched, fn, pairs)


def test_evaluated_first_and_differentiated_then():
    batched = jedbatch.batch(with_table, in_axes=0)
    w = TABLE["w"]
    agrees(batched, with_table)

    def total(run):
        def loss(w):
            TABLE["w"] = w
            return run().sum()

        return loss

    got = jax.grad(total(lambda: batched(XS)))(w)
    expected = jax.grad(total(lambda: jnp.stack([with_table(x) for x in XS])))(w)
    TABLE["w"] = w
    assert_close(got, expected, 1e-6)
    agrees(batched, with_table)


def test_functions_that_decide_on_values():
    layer = Layer()
    fn = lambda x: layer(x) if layer(x).sum() > 0 else -2 * layer(x)  # noqa: E731
    batched = jedbatch.batch(fn, in_axes=0)
    xs = [np.float32(-1.5), np.float32(-0.5)]
    assert [bool(layer(x).sum() > 0) for x in xs] == [False, True]
    agrees(batched, fn, xs)
    layer.w = layer.w * -1
    agrees(batched, fn, xs)

    def slope(run):
        def loss(w):
            layer.w = w
            return run().sum()

        return jax.grad(loss)(jnp.ones(3))

    got = slope(lambda: batched(xs))
    assert_close(got, slope(lambda: jnp.stack([fn(x) for x in xs])), 1e-4)


def test_plans_read_what_is_there_when_they_are_applied():
    layer = Layer()
    batched = jedbatch.batch(layer, in_axes=0)
    xs = [jnp.ones(3), jnp.zeros(3)]
    plan = batched.plan(xs)
    layer.w = layer.w * 3
    assert_close(batched.apply(plan), jnp.stack([layer(x) for x in xs]), 1e-6)
    layer.w = jnp.ones(4)
    with pytest.raises(ValueError, match="make a new plan"):
        batched.apply(plan)


def test_arrays_found_nowhere_are_recorded_every_time():
    hidden = functools.lru_cache(maxsize=None)(lambda k: Weights(jnp.full(2, k)))
    calls = []

    def fn(x):
        calls.append(x)
        return hidden(3.0).w * x

    batched = jedbatch.batch(fn, in_axes=0)
    agrees(batched, fn)
    count = len(calls)
    batched(XS)
    assert len(calls) == count + len(XS)
