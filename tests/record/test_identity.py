"""What must be told apart: closures, buffers, rules, instances that are nearly equal."""

import collections
import contextlib
import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, loop, mostly_slow
from jax import lax

import jedbatch
from jedbatch._record.instances.key import instance_key

P = {
    "a": jnp.arange(1.0, 4.0),
    "b": jnp.arange(4.0, 7.0),
    "m": jnp.arange(9.0).reshape(3, 3) / 9,
}
XS = [np.arange(3, dtype=np.float32) * i + 0.5 for i in (1, 2, 3)]
cell = jedbatch.cell


# --- closures ---


def by_default_argument(p, x):
    for w in (p["a"], p["b"]):

        @cell
        def layer(v, w=w):
            return jnp.sin(v) * w

        x = layer(x)
    return x


def by_partial(p, x):
    make = lambda w: cell(functools.partial(lambda w, v: jnp.sin(v) * w, w), name="q")  # noqa: E731
    return make(p["b"])(make(p["a"])(x))


def by_helper(p, x):
    def make(w):
        helper = lambda v: jnp.sin(v) * w  # noqa: E731
        return cell(lambda v: helper(v))

    return make(p["b"])(make(p["a"])(x))


def by_checkpoint(p, x):
    make = lambda w: cell(jax.checkpoint(lambda v: jnp.tanh(v * w)), name="r")  # noqa: E731
    return make(p["b"])(make(p["a"])(x))


def by_tuple(p, x):
    make = lambda pair: cell(lambda v: jnp.sin(v) * pair[0])  # noqa: E731
    return make((p["b"], 1))(make((p["a"], 1))(x))


def by_dict(p, x):
    layer = cell(lambda v: jnp.tanh(v @ p["m"] + p["a"]))
    return layer(layer(x))


def by_rebound_name(p, x):
    scale = 1.0

    def act(v):
        return v * scale

    @cell
    def layer(v):
        return jnp.sin(act(v))

    for scale in (1.0, 2.0, 3.0):  # noqa: B007
        x = layer(x)
    return x * p["a"]


def by_changed_list(p, x):
    scale = [1.0]
    layer = cell(lambda v: jnp.sin(v) * scale[0])
    x = layer(x)
    scale[0] = 2.0
    return layer(x) * p["a"]


def by_changed_array(p, x):
    scale = np.ones(3, np.float32)
    layer = cell(lambda v: jnp.sin(v) * scale)
    x = layer(x)
    scale[1] = 2.0
    return layer(x) * p["a"]


@pytest.mark.parametrize(
    "fn",
    mostly_slow(
        [
            by_default_argument,
            by_partial,
            by_helper,
            by_checkpoint,
            by_tuple,
            by_dict,
            by_rebound_name,
            by_changed_list,
            by_changed_array,
        ],
        "by_partial",
        "by_helper",
        "by_rebound_name",
        "by_changed_array",
    ),
)
def test_what_a_cell_leads_to(fn):
    check(fn, P, XS)


def test_cells_over_a_dict_of_params_do_not_recompile():
    batched = jedbatch.batch(by_dict)
    batched(P, XS)
    before = batched.compilations
    for i in range(3):
        batched(P, [x + i for x in XS])
    assert batched.compilations == before


def attribute_of_function(p, x):
    def layer(v):
        return jnp.sin(v) * layer.scale

    layer.scale = float(x[1])
    return cell(layer)(p["a"])


def attribute_of_partial(p, x):
    held = functools.partial(jnp.multiply, jnp.sin(x))
    held.scale = float(x[1])
    return cell(lambda v: held(v) * held.scale)(p["a"])


ROWS = np.zeros(3, np.float32)
OVER_ROWS = cell(functools.partial(lambda rows, v: jnp.sin(v) * rows, ROWS))


def array_that_changes(p, x):
    ROWS[:] = x
    first = jax.block_until_ready(OVER_ROWS(p["a"]))
    ROWS[:] = 2 * x
    return first + OVER_ROWS(p["b"])


class Scale:
    def __init__(self, by):
        self.by = by

    def run(self, v):
        return jnp.sin(v) * self.by


def object_that_changes(p, x):
    held = Scale(float(x[0]))
    scaled, run = cell(lambda v: jnp.tanh(v) * held.by), cell(held.run)
    first = run(scaled(scaled(p["a"])))
    held.by = float(x[1])
    return run(scaled(scaled(first)))


@pytest.mark.parametrize(
    "fn",
    [attribute_of_function, attribute_of_partial, array_that_changes, object_that_changes],
)
def test_functions_that_hold_something_else(fn):
    found = jedbatch.batch(fn)(P, XS)
    assert_close(found, jnp.stack([fn(P, x) for x in XS]), rtol=1e-5)


TRACED, KNOWN = [], {}  # objects by themselves


class Table:
    """A table with methods that look up what they get, and others that look up the table."""

    def __init__(self, rows):
        self.rows = rows

    def row(self, k):
        """The row of a number."""
        TRACED.append("row")
        return jnp.sin(self.rows[k][:2])

    def renamed(self, k):
        """By the name of an argument."""
        v, k = k, self
        return v * KNOWN[k]

    def chosen(self, k):
        """By one of two names."""
        return k * KNOWN[self if len(self.rows) else k]

    def itself(self, k):
        """By an argument of another call."""
        return KNOWN[k] if isinstance(k, Table) else k * Table.itself(self, self)


def test_methods_of_objects_made_anew_are_traced_once():
    def fn(p, k):
        row = cell(Table(p["m"]).row)
        return row(k) + row(2 - k)

    batched = jedbatch.batch(fn)
    batched(P, [0])
    del TRACED[:]
    found = batched(P, [1, 2, 0, 1])
    assert not TRACED
    assert_close(found, jnp.stack([fn(P, k) for k in [1, 2, 0, 1]]), rtol=1e-5)


@pytest.mark.parametrize("name", ["renamed", "chosen", "itself"])
def test_methods_that_look_up_the_object_that_they_are_of(name):
    def fn(p, word):
        table = Table(p["m"])
        KNOWN[table] = len(word)
        return cell(getattr(table, name))(p["a"])

    words = ["a", "word", "or", "another"]
    found = jedbatch.batch(fn)(P, words)
    assert_close(found, jnp.stack([fn(P, word) for word in words]), rtol=1e-5)


def test_values_that_a_cell_reaches_in_containers_are_operands():
    def fn(p, x):
        held, scale = [x, {"twice": 2 * x}], Scale(jnp.cos(x))
        power = jax.jit(lambda v, n, how: getattr(jnp, how)(v, n) * x, static_argnames=("n", "how"))

        def run(v):
            return held[0] * v + held[1]["twice"] + scale.run(v) + power(v, 2, how="power")

        return cell(run)(p["a"])

    batched = check(fn, P, XS)
    assert len(batched.plan(P, XS).graph.present_types) == 3


def test_values_that_a_cell_reaches_where_nothing_is_looked_into_are_an_error():
    def fn(p, x):
        held = collections.deque([x])
        return cell(lambda v: jnp.sin(v) * held[0])(p["a"])

    with pytest.raises(jedbatch.errors.SymbolicValueError, match="as an argument"):
        jedbatch.batch(fn)(P, XS)


# --- buffers of NumPy that change ---


def read_later(p, n):
    buffer, h = np.zeros(3, np.float32), p["m"][0]
    for i in range(n):
        buffer[i] = 1
        h = h * 2 + buffer * p["a"]
    return h


def made_an_array(p, n):
    buffer, h = np.zeros(3, np.float32), p["m"][0]
    for i in range(n):
        buffer[i] = 1
        h = h * 2 + jnp.asarray(buffer) * p["a"] + jnp.sin(buffer)
    return h


def given_to_a_cell(p, n):
    buffer, h = np.zeros(3, np.float32), p["m"][0]
    add = cell(lambda h, x: h * 2 + x)
    for i in range(n):
        buffer[i] = 1
        h = add(h, buffer)
    return h


@pytest.mark.parametrize("fn", [read_later, made_an_array, given_to_a_cell])
def test_buffers(fn):
    """Values only: JAX itself differentiates with what is in the buffer in the end."""
    check(fn, P, [1, 2, 3], gradients=False)


# --- derivative rules ---


def test_two_rules_for_one_function():
    plain = lambda x: x * 1.0  # noqa: E731
    rules = []
    for factor in (2, 3):
        f = jax.custom_vjp(plain)
        f.defvjp(lambda x: (x, None), lambda _, g, factor=factor: (factor * g,))
        rules.append(f)
        g = jax.custom_jvp(plain)
        g.defjvp(lambda x, t, factor=factor: (x[0], factor * t[0]))
        rules.append(g)
    a, b, c, d = rules
    check(lambda p, x: a(p["a"] * x) + b(p["b"] * x) + c(p["a"] + x) + d(p["b"] + x), P, XS)


def test_rules_on_shared_values():
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (f(x), x), lambda x, g: (2 * g,))
    check(lambda p, x: f(p["a"]) * x + jax.nn.silu(p["b"]), P, XS)


@pytest.mark.slow
def test_a_batched_function_inside():
    inner = jedbatch.batch(lambda p, t: p["m"][t] * p["a"])
    check(lambda p, n: inner(p, [0] * n).sum(0), P, [1, 2])


# --- instances that are nearly equal ---


class Word(str):
    tag: str


class Pair(tuple):
    __slots__ = ()


def tagged(tag):
    word = Word("x")
    word.tag = tag
    return word


def ordered(*keys):
    made = collections.defaultdict(float)
    for k in keys:
        made[k] = float(k)
    return made


def has_float(p, s):
    return p["a"] * (2 if any(type(v) is float for v in s) else 1)


def fold(p, d):
    return functools.reduce(lambda h, item: h * 2 + item[1], d.items(), p["a"])


@pytest.mark.parametrize(
    ("fn", "instances"),
    [
        (lambda p, x: p["a"] / x, [0.0, -0.0]),
        (lambda p, x: p["a"] / x, [-0.0, 0.0]),
        (lambda p, s: p[s.tag] * 1.0, [tagged("a"), tagged("b")]),
        (has_float, [frozenset({1}), frozenset({1.0})]),
        (has_float, [Pair((1, 2)), Pair((1.0, 2))]),
        (has_float, [(1, (2,)), (1.0, (2,))]),
        (fold, [ordered(1, 2), ordered(2, 1)]),
        (fold, [{1: 1.0, 2: 2.0}, {2: 2.0, 1: 1.0}]),
        (lambda p, s: p["a"] * s[0], [Pair((x,)) for x in XS]),
        (lambda p, s: p["a"] * s["y"] + s[1], [{"y": x, 1: x} for x in XS]),
        (lambda p, s: p["a"] * s[1], [collections.deque([x, 2 * x]) for x in XS]),
    ],
)
def test_instances(fn, instances):
    check(fn, P, instances, gradients=False)


def test_static_arguments_are_told_apart_however_often_they_are_met():
    """Equal numbers of different kinds are different options, in this instance and the next."""

    @cell
    def options(x, *, flag, name="n"):
        return x * float(zlib.crc32(f"{flag!r} {name}".encode()) % 1000)

    flags = [True, 1, 1.0, "1", None, (1,), 0, False, 0.0, -0.0]

    def fn(p, xs):
        ways = [{"flag": f} for f in flags] + [{"flag": 1, "name": "m"}, {"name": "mm", "flag": 1}]
        return sum(sum(options(x, **way) * 10.0**-k for k, way in enumerate(ways)) for x in xs)

    batched = check(fn, None, [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]], gradients=False)
    types = batched.plan(None, [[7.0, 8.0]]).graph.types
    assert len([t for t in types if t.name == "options"]) == len(flags) + 2


@pytest.mark.slow
def test_arguments_put_together_by_hand():
    """Tuples and lists of values, of what cells returned and of weights, met again and again."""
    pair = cell(lambda x, y: (x + y, x * y), name="pair")
    total = cell(
        lambda *parts: sum(k * jnp.sum(x) for k, x in enumerate(jax.tree.leaves(parts), 1)),
        name="total",
    )

    def fn(p, xs):
        a, b = made = pair(p["a"], p["b"] * xs[0])
        results = []
        for x in xs:
            parts = [(a,), [a], (a, b), [b, a], (made, a), [made], (p["a"], b), ([a], b), (x, a)]
            results += [total(*group) for group in (parts, parts[:3], [parts[2], a], [a, made])]
        return jnp.stack(results).sum()

    batched = check(fn, P, [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]])
    assert batched.plan(P, [[7.0, 8.0]]).graph.num_instances == 1


def test_constants_made_by_an_instance_are_inputs_once():
    """Zeros to begin with, read by many nodes; the same array of JAX in every instance."""
    step = cell(lambda p, x, state: (jnp.sin(p + x * state[0]), state[1] + x), name="step")

    def fn(p, xs):
        zero = jnp.zeros(3)
        total = zero
        for x in xs:
            state = step(p["a"], x, (zero, zero))
            total = total + step(p["b"], x, state)[0]
        return total

    batched = check(fn, P, [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [3.0]])
    instances = [[7.0], [1.0, 8.0], [3.0]]  # two that are new
    assert_close(batched(P, instances), loop(fn, P, instances), 1e-5)
    assert batched.plan(P, [[9.0]]).graph.num_inputs == 2 + 1  # of 9.0, and zeros
    assert batched.plan(P, [[9.0], [5.0, 4.0]]).graph.num_inputs == (2 + 1) + (4 + 1)


def test_static_arguments_that_are_nearly_equal():
    Config = collections.namedtuple("Config", "c")
    scale = cell(lambda x, *, config: x * jnp.asarray(config.c))
    check(lambda p, i: scale(p["a"], config=Config([1, 1.0][i])).astype(float) + i, P, [0, 1])


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: np.ndarray
    n: int


class Plain:
    def __init__(self, x):
        self.x = x


def test_objects_with_arrays():
    check(lambda p, s: p["a"] * s.x + s.n, P, [Slotted(x, i) for i, x in enumerate(XS)])
    times = cell(lambda p, x: p * x)
    plain = [Plain(jnp.asarray(x)) for x in XS]
    check(lambda p, s: times(p["a"], s.x) + s.x, P, plain)


@dataclasses.dataclass
class Node:
    value: int
    children: list = dataclasses.field(default_factory=list)
    parent: object = None
    array: object = None


def walk(p, node):
    return p["m"][node.value] + sum((walk(p, k) for k in node.children), 0.0)


def test_instances_with_links_to_their_parents():
    root = Node(1)
    root.children.append(Node(2, [], root))
    check(walk, P, [root, Node(0)])
    root.array = XS[0]
    with pytest.raises(ValueError, match="holds itself"):
        jedbatch.batch(walk)(P, [root])


def test_instances_that_share_parts():
    """Time is linear in the parts, and what is shared is recorded once by those who remember."""
    node = cell(lambda p, x, y: jnp.sin(x) + y * p["a"])

    def fn(p, t):
        known = {}

        def visit(t):
            if not isinstance(t, tuple):
                return t * p["a"]
            if id(t) not in known:
                known[id(t)] = node(p, visit(t[0]), visit(t[1]))
            return known[id(t)]

        return visit(t)

    def ladder(leaf):
        t = leaf
        for _ in range(40):
            t = (t, t)
        return t

    instances = [ladder(1.0), ladder(jnp.float32(2))]
    for instance in instances:
        key, arrays = instance_key(instance)
        assert len(key) + len(arrays) < 100
    plan = jedbatch.batch(fn).plan(P, instances)
    assert len(plan.graph.node_type) < 100


# --- single operations ---


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: x[True][0] * p["a"],
        lambda p, x: x[False].sum() * p["a"],
        lambda p, x: x[None][0] * p["a"],
        lambda p, x: x[1:][0] * p["a"],
        lambda p, x: x[..., 1] * p["a"],
        lambda p, x: jnp.asarray(2.5) * p["a"] * x + jnp.array(True) + jnp.array(1).reshape(1),
        lambda p, x: jnp.asarray(2).astype(jnp.float32) * x * p["a"],
        lambda p, x: p["a"] * lax.stop_gradient(x * p["b"]),
    ],
)
def test_single_operations(fn):
    check(fn, P, XS)


def test_random_keys_as_results():
    keys = list(jax.random.split(jax.random.key(0), 3))
    fn = lambda p, k: {"k": jax.random.split(k)[0], "x": p["a"]}  # noqa: E731
    got = jedbatch.batch(fn)(P, keys)
    expected = jax.random.key_data(jnp.stack([jax.random.split(k)[0] for k in keys]))
    np.testing.assert_array_equal(jax.random.key_data(got["k"]), expected)
    listed = jedbatch.batch(fn, out_axes=None)(P, keys)
    np.testing.assert_array_equal(jax.random.key_data(listed[1]["k"]), expected[1])


def test_precision_is_part_of_what_is_remembered():
    fn = lambda p, n: p["m"][0] * jnp.where(n > 1, jnp.array([0.1, 0.2, 0.3]), jnp.ones(3))  # noqa: E731
    batched = jedbatch.batch(fn)
    batched(P, [1])
    with jax.enable_x64(True):
        assert_close(batched(P, [1, 2]), loop(fn, P, [1, 2]), 1e-6)


@pytest.mark.parametrize("decides", [False, True], ids=["planned", "decides"])
def test_how_random_numbers_are_made_is_part_of_what_is_remembered(decides):
    @cell
    def noise(x, seed):
        return x + jax.random.normal(jax.random.key(seed), (3,))

    def fn(p, seed):
        x = noise(p["a"], seed)
        return noise(x, seed) if not decides or x[0] > 1 else x

    batched, seeds = jedbatch.batch(fn), [np.uint32(i) for i in range(4)]
    other = not jax.config.jax_threefry_partitionable
    settings = jax.default_prng_impl("rbg"), jax.threefry_partitionable(other)
    for setting in (contextlib.nullcontext(), *settings, contextlib.nullcontext()):
        with setting:
            assert_close(batched(P, seeds), loop(fn, P, seeds), 1e-6)


def test_repeated_work_on_shared_values_is_batched():
    """A recurrence on parameters alone does not recompile for every length."""

    def fn(p, n):
        h = p["a"]
        for _ in range(n):
            h = jnp.tanh(h @ p["m"])
        return h

    batched = check(fn, P, [0, 1, 7])
    batched(P, [9, 12])
    before = batched.compilations
    for n in range(5, 12):
        batched(P, [n, n + 1])
    assert batched.compilations == before


def test_what_is_no_policy():
    with pytest.raises(TypeError, match=r"jedbatch\.policies\.agenda"):
        jedbatch.batch(lambda p, x: x, policy="agenda")


def test_shared_values_used_many_times():
    """Recording takes time in proportion to the work, not to the paths through it."""

    def fn(p, x):
        bounded = jnp.maximum, jnp.minimum, jnp.fmax, jnp.fmin, jnp.arctan2
        for op in (*bounded, jnp.hypot, jnp.logaddexp, jnp.add, jnp.multiply, jnp.arctan2):
            for _ in range(3):
                p = op(p, p)
        return p * x

    found = jedbatch.batch(fn)(jnp.float32(1.0), [jnp.float32(2.0)])
    assert jnp.isfinite(found).all()
    np.testing.assert_allclose(found, [fn(jnp.float32(1.0), jnp.float32(2.0))], rtol=1e-6)
