"""Keys of objects of all kinds of classes: the compiled core against the Python it stands for."""

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.compiled_core import both, compiled

import jedbatch
from jedbatch._record.instances import key as keys
from jedbatch._record.instances.key import instance_key
from jedbatch.testing import assert_close


class Op(enum.Enum):
    ADD = 1


@dataclasses.dataclass
class Parse:
    left: Any = None
    right: Any = None
    word: Any = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any


@dataclasses.dataclass(slots=True)
class SlottedParse:
    left: Any
    right: Any


@dataclasses.dataclass
class CountedParse(Parse):
    def __post_init__(self):
        self.count = 1 + isinstance(self.left, CountedParse)


@dataclasses.dataclass
class Guarded:
    left: Any
    right: Any

    def __setattr__(self, name, value):
        object.__setattr__(self, f"_{name}", value)

    def __getattr__(self, name):
        return f"no {name}"


class ParsePair(NamedTuple):
    left: Any
    right: Any


class Bounded(NamedTuple):
    maxlen: Any
    right: Any


class PlainParse:
    def __init__(self, left, right):
        self.left, self.right = left, right


class Turned(PlainParse):
    def __init__(self, left, right):
        if isinstance(left, int):
            self.right = right
        super().__init__(left, right)


class Answering(PlainParse):
    @property
    def right(self):
        return 7

    @right.setter
    def right(self, value):
        self.__dict__["right"] = value


CLASSES = [
    Parse,
    Frozen,
    ParsePair,
    PlainParse,
    SlottedParse,
    CountedParse,
    Guarded,
    Bounded,
    Turned,
    Answering,
]
LEAVES = [1, 0.0, -0.0, "a", None, True, np.float32(1), np.int64(1), np.bool_(True), Op.ADD]
LEAVES += [np.ones(2, np.float32), np.ones((2, 3), np.int32), np.zeros((), bool), len, {"a": 1.5}]
LEFT = [jnp.ones(2), np.array(["a"]), np.array([1, None]), b"x", 1j, {1: 2}, range(3), 1 << 70]
LEFT += [np.ones(2, np.int64), np.ones(2, jnp.bfloat16), collections.deque([1]), {1, 2}, dict]


def random_objects(rng, leaves, depth):
    if depth == 0 or rng.integers(4) == 0:
        leaf = leaves[int(rng.integers(len(leaves)))]
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    left, right = (random_objects(rng, leaves, depth - 1) for _ in range(2))
    kind = int(rng.integers(len(CLASSES) + 3))
    others = [(left, right), [left, right], {"left": left, "right": right}]
    return CLASSES[kind](left, right) if kind < len(CLASSES) else others[kind - len(CLASSES)]


@compiled
@pytest.mark.parametrize("leaves", [LEAVES, LEFT])
def test_keys_of_objects_are_equal(monkeypatch, leaves):
    rng = np.random.default_rng(len(leaves))
    instances = [random_objects(rng, leaves, 4) for _ in range(600)]
    instances += [(x, x) for x in instances[:40]]
    for a, b in zip(*both(monkeypatch, lambda: [instance_key(x) for x in instances]), strict=True):
        assert a[0] == b[0]
        assert list(map(id, a[1])) == list(map(id, b[1]))
    assert any(a[0] is not None for a in map(instance_key, instances))


def named(instance):
    return type(instance).__name__


OF_C = [
    Parse(1, Parse("a", np.int32(3), np.ones(2, np.float32))),
    Parse((), Parse((), ((), []))),
    Frozen(1, Op.ADD),
    ParsePair(1, 2.0),
    PlainParse(1, [PlainParse(None, {"a": True})]),
    {"a": np.zeros(3, np.int32)},
    (np.float32(1), []),
]
OF_PYTHON = [
    SlottedParse(1, 2),
    Bounded(1, 2),
    Guarded(1, 2),
    PlainParse(1, np.ones(2)),
    Answering(1, 2),
    (OF_C[0], OF_C[0]),
    CountedParse(1, 2),
    {1: (2, ParsePair(1, 2))},
]


@compiled
@pytest.mark.parametrize("instance", OF_C, ids=named)
def test_keys_that_the_core_writes(instance):
    assert keys._compiled_tokens(instance, {}) is not None


@compiled
@pytest.mark.parametrize("instance", OF_PYTHON, ids=named)
def test_keys_that_are_left_to_python(instance):
    assert keys._compiled_tokens(instance, {}) is None


@compiled
def test_deep_objects(monkeypatch):
    deep = None
    for i in range(50_000):
        deep = Parse(deep, None, i)
    a, b = both(monkeypatch, lambda: instance_key(deep)[0])
    assert a == b
    while deep is not None:  # so that it is not let go by recursion
        deep = deep.left


def test_classes_are_forgotten(monkeypatch):
    monkeypatch.setattr(keys, "MANY_CLASSES", 3)
    for i in range(8):
        kind = dataclasses.make_dataclass(f"Made{i}", ["x"])
        assert instance_key(kind(i))[0] == instance_key(kind(i))[0]
        assert len(keys._met) <= 3


@compiled
def test_an_instance_of_many_classes(monkeypatch):
    monkeypatch.setattr(keys, "MANY_CLASSES", 3)
    kinds = [dataclasses.make_dataclass(f"Part{i}", ["x"]) for i in range(5)]
    a, b = both(monkeypatch, lambda: [instance_key([k(n) for k in kinds]) for n in (1, 2)])
    assert a == b
    assert a[0] != a[1]


@jedbatch.cell
def merge(params, left, right, x):
    return jnp.tanh((left + right) @ params + x)


def encode(params, tree):
    if isinstance(tree, np.ndarray | jax.Array):
        return tree
    word = getattr(tree, "word", 0)
    x = 2.0 if isinstance(word, Op) else word
    return merge(params, encode(params, tree.left), encode(params, tree.right), x)


@pytest.mark.parametrize("kind", [Parse, Frozen, CountedParse, SlottedParse, ParsePair])
def test_objects_with_arrays_against_the_loop(kind):
    rng = np.random.default_rng(0)
    params = jnp.eye(3) / 2

    def grown(depth):
        if depth == 0:
            return rng.normal(size=3).astype(np.float32)
        more = {Parse: (0.5,), CountedParse: (Op.ADD,)}.get(kind, ())
        return kind(grown(depth - 1), grown(int(rng.integers(depth))), *more)

    trees = [grown(depth) for depth in (1, 3, 2, 3)]
    trees.append(kind(trees[1], trees[1]))  # holds the same twice
    found, slope = jax.value_and_grad(lambda p: jedbatch.batch(encode)(p, trees).sum())(params)
    total = jax.value_and_grad(lambda p: sum(encode(p, tree).sum() for tree in trees))
    assert_close((found, slope), total(params), 1e-5)
