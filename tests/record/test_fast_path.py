"""The second recording of a call or an operator, against the first: nothing is compiled."""

import dataclasses
import functools
from typing import NamedTuple
from warnings import catch_warnings, simplefilter

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jedbatch
from jedbatch._record.operations import known_operations
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.types.registry import Registry
from jedbatch._support import native


@pytest.fixture(params=["compiled", "in Python"], autouse=True)
def path(request, monkeypatch):
    if request.param == "in Python":
        monkeypatch.setenv(native.SWITCH, "0")
    elif native.core() is None:
        pytest.skip("no compiled core")


@pytest.fixture
def taken(monkeypatch):
    """The cells whose calls took the slow path, one entry a call."""
    cells, slow_path = [], Recorder.slow_path

    def counted(recorder, cell, args, static):
        cells.append(cell)
        return slow_path(recorder, cell, args, static)

    monkeypatch.setattr(Recorder, "slow_path", counted)
    return cells


P = {"w": jnp.ones((3, 3)), "b": jnp.ones(3)}
X = np.arange(3, dtype=np.float32)
REACHED = jnp.arange(3.0)


@jedbatch.cell
def combine(params, a, b, *, scale=1):
    return params["w"] @ a * scale + b


@jedbatch.cell
def state(params, x):
    return x + params["b"], x * params["b"]


@jedbatch.cell
def join(params, left, right):
    return left[0] + right[1] * params["b"]


@jedbatch.cell
def nested(params, x):
    return (x, (x + params["b"], (x * 2,), ())), ((x * 3, x * 4), x * 5)


@jedbatch.cell
def containers(params, x):
    return (x, x + params["b"]), [x * 2], {"a": (x * 3, x * 4)}, None


def in_tuples(p, h, x):
    (a, (b, (c,), d)), (both, e) = nested(p, h)
    assert d == ()
    return join(p, both, (a, b)) + c + e


def in_containers(p, h, x):
    both, (c,), found, nothing = containers(p, h)
    assert nothing is None
    return join(p, both, found["a"]) + c


class Named(NamedTuple):
    a: jax.Array
    b: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    a: jax.Array
    b: jax.Array
    kind: str = dataclasses.field(default="plain", metadata={"static": True})


@flax.struct.dataclass
class Frozen:
    a: jax.Array
    b: jax.Array


class Layer(eqx.Module):
    a: jax.Array
    b: jax.Array
    is_wide: bool = eqx.field(static=True, default=True)

    @jedbatch.cell
    def apply(self, x):
        return self.a * x + self.b


class Linear(nnx.Module):
    def __init__(self, b):
        self.b = nnx.Param(b)

    @jedbatch.cell
    def apply(self, x):
        return self.b[...] * x


def parts(state):
    if isinstance(state, dict):
        return state["a"], state["b"]
    return (state.a, state.b) if hasattr(state, "a") else tuple(state)


def passed_on(make):
    """A state of some class that cells return and take, also put together outside of them."""
    first = jedbatch.cell(lambda p, x: make(x + p["b"], x * p["b"]))

    @jedbatch.cell
    def both(p, s, t):
        (a, b), (c, d) = parts(s), parts(t)
        return make(a * p["b"] + c, b * p["b"] + d)

    def call(p, h, x):
        a, b = parts(both(p, first(p, h), first(p, x)))
        return parts(both(p, make(b, a), make(h, x)))[0]

    return call


def with_one_layer(p, h, x):
    """A module made of shared arrays while an instance is recorded, and one that it changes."""
    layer, linear = Layer(p["b"], p["b"]), Linear(p["b"])
    h = layer.apply(h) + linear.apply(x)
    linear.b[...] = linear.b[...] * 1.0
    return linear.apply(h)


class Settings:
    def __init__(self, factor):
        self.factor = factor

    def __getitem__(self, _):
        return self.factor


@dataclasses.dataclass(frozen=True)
class Choice:
    k: int


def multiply(params, factors):
    return jedbatch.cell(lambda x: x * params["b"] * factors[0])


@jedbatch.cell
def shifted(x, *, by):
    return x + (by.k if isinstance(by, Choice) else by[0])


by_keyword = jedbatch.cell(lambda p, *, state, factor, name: state[0] * factor + p[name])
of_list = jedbatch.cell(lambda p, states: sum(a for s in states for a in parts(s)) * p["b"])
is_of_strings = jedbatch.cell(lambda p, x, name: x * p[name])


def captured(p, h, x):
    scale = p["b"]
    return jedbatch.cell(lambda x: x * scale + p["b"])(h) + jedbatch.cell(lambda: h * x)()


@jedbatch.cell
def applied(function, x):
    return function(x)


def of_a_partial(p, h, x):
    factor = 2.0
    return applied(functools.partial(lambda y, z: y * factor + z, z=1.0), h)


CALLS = {
    "a partial as an argument": of_a_partial,
    "named tuples": passed_on(Named),
    "dicts": passed_on(lambda a, b: {"b": b, "a": a}),
    "registered dataclasses": passed_on(Registered),
    "frozen dataclasses": passed_on(Frozen),
    "modules of Equinox": passed_on(Layer),
    "a list of named tuples": lambda p, h, x: of_list(p, [Named(h, x), Named(x, h)]),
    "dicts in tuples": lambda p, h, x: of_list(p, ({"b": h, "a": x}, {"a": h, "b": x})),
    "modules made inside": with_one_layer,
    "keywords": lambda p, h, x: by_keyword(p, state=(h, x), factor=0.5, name="b"),
    "keywords in another order": lambda p, h, x: by_keyword(p, name="b", factor=-0.0, state=[h]),
    "a string": lambda p, h, x: is_of_strings(p, h, "b"),
    "no value": lambda p, h, x: of_list(p, [Named(h, x), (None, (), {})][:1]),
    "a partial": lambda p, h, x: jedbatch.cell(functools.partial(combine.__wrapped__, p))(h, x),
    "a closure": captured,
    "a closure over a list": lambda p, h, x: multiply(p, [2.0])(h),
    "a tuple by keyword": lambda p, h, x: shifted(h, by=(1, 2.0, None)),
    "a number of NumPy by keyword": lambda p, h, x: shifted(h, by=(np.float32(1.5),)),
    "a frozen object by keyword": lambda p, h, x: shifted(h, by=Choice(h.ndim)),
    "results in tuples": in_tuples,
    "results in containers": in_containers,
    "values": lambda p, h, x: combine(p, h, x),
    "a number": lambda p, h, x: combine(p, h, 2.5),
    "an integer": lambda p, h, x: combine(p, h, 2),
    "an array of NumPy": lambda p, h, x: combine(p, h, X),
    "a number of NumPy": lambda p, h, x: combine(p, h, np.float32(2.5)),
    "an integer of NumPy": lambda p, h, x: combine(p, h, np.int64(2)),
    "a truth value": lambda p, h, x: combine(p, h, True),
    "a truth value of NumPy": lambda p, h, x: combine(p, h, np.bool_(True)),
    "an array of JAX": lambda p, h, x: combine(p, h, REACHED),
    "a state of arrays": lambda p, h, x: join(p, (X, h), (REACHED, X)),
    "a shared array": lambda p, h, x: combine(p, h, p["b"]),
    "an option": lambda p, h, x: combine(p, h, x, scale=3),
    "two results": lambda p, h, x: state(p, h)[1],
    "a state": lambda p, h, x: join(p, state(p, h), state(p, x)),
    "a state put together": lambda p, h, x: join(p, (h, x), [x, h]),
    "a state with numbers": lambda p, h, x: join(p, (h, 0.5), [np.int32(2), h]),
    "an array that was computed": lambda p, h, x: combine(p, h, jnp.full(3, 2.0)),
    "a state that was computed": lambda p, h, x: join(p, (jnp.zeros(3), h), (h, jnp.ones(3))),
    "the same twice": lambda p, h, x: combine(p, h, h),
}
OPERATORS = {
    "plus": lambda p, h, x: h + x,
    "minus": lambda p, h, x: h - x,
    "minus, turned": lambda p, h, x: x - h,
    "a number to the right": lambda p, h, x: h - 2.5,
    "a number to the left": lambda p, h, x: 2.5 - h,
    "an integer": lambda p, h, x: h * 3,
    "a number of NumPy to the right": lambda p, h, x: h / np.float32(3),
    "a number of NumPy to the left": lambda p, h, x: np.float32(3) - h,
    "power": lambda p, h, x: h**2,
    "with itself": lambda p, h, x: h * h,
    "weights to the left": lambda p, h, x: p["w"] @ h,
    "weights to the right": lambda p, h, x: h @ p["w"],
    "comparison": lambda p, h, x: (h > x) * h,
    "negation": lambda p, h, x: -h,
    "a row": lambda p, h, x: p["w"][1] + h[0],
}


def recorded(call, times):
    """Of the nodes after the first one: type, operands (inputs by value), for each call."""

    def fn(params, x):
        h = combine(params, x, x)
        return [call(params, h, x) for _ in range(times)]

    plan = jedbatch.batch(fn, out_axes=None).plan(P, [X])
    graph = plan.graph
    nodes = []
    for node in range(1, len(graph.node_type)):
        first, end = graph.operand_ptr[node : node + 2]
        nodes.append((int(graph.node_type[node]), graph.operand[first:end].tolist()))
    assert len(nodes) % times == 0
    size = len(nodes) // times
    results = len(graph.value_node) - int(graph.value_ptr[1])
    return [nodes[i : i + size] for i in range(0, len(nodes), size)], results // times


def alike(calls, results):
    """Every call makes the nodes of the first, on its own results and on inputs of its own."""
    first, *others = calls
    for k, call in enumerate(others, 1):
        for (kind, reads), (other_kind, other_reads) in zip(first, call, strict=True):
            assert kind == other_kind
            for mine, its in zip(reads, other_reads, strict=True):
                own = mine >= 1  # value 0 is what all of them read
                assert (its < 0) == (mine < 0)
                if mine >= 0:
                    assert its == mine + own * k * results


def counts_of_alike(call, noted):
    """The notes of 3 and of 9 calls, of which the later ones are recorded like the first."""
    counts = []
    for times in (3, 9):
        noted.clear()
        calls, results = recorded(call, times)
        assert calls[0]
        alike(calls, results)
        counts.append(len(noted))
    return counts


@pytest.mark.parametrize("name", CALLS)
def test_cells_take_the_fast_path_from_the_second_time_on(name, taken):
    few, many = counts_of_alike(CALLS[name], taken)
    assert 0 < few == many


@pytest.mark.parametrize("name", CALLS)
def test_later_minibatches_take_the_fast_path(name, taken):
    batched = jedbatch.batch(lambda p, n, x: CALLS[name](p, state(p, x)[1], x), (None, 0, 0))
    batched.plan(P, [1, 2], [X, X])
    first = len(taken)
    batched.plan(P, [3, 4], [X, X])
    assert 0 < first == len(taken)


def test_calls_take_the_fast_path_where_shared_arrays_are_values(taken):
    params = {name: jnp.full(3, k + 1.0) for k, name in enumerate("vxyz")}

    def evaluate(params, tree):
        if isinstance(tree, str):
            return params[tree]
        name, *of = tree
        a, b = (evaluate(params, t) for t in of)
        return join({"b": params["v"]}, (a, name), {"of": b})

    @jedbatch.cell
    def join(weights, left, right):
        return left[0] * jnp.tanh(right["of"]) + weights["b"]

    rng = np.random.default_rng(0)

    def tree(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.choice(list("xyz")))
        return ("join", tree(depth - 1), tree(depth - 1))

    minibatches = [[("join", tree(4), tree(4)) for _ in range(8)] for _ in range(6)]
    batched = jedbatch.batch(evaluate)
    for trees in minibatches[:-1]:
        batched.plan(params, trees)
    taken.clear()
    got = batched(params, minibatches[-1])
    assert not taken
    assert batched.plan(params, minibatches[-1]).host.slow_calls == 0
    expected = jnp.stack([evaluate(params, t) for t in minibatches[-1]])
    np.testing.assert_allclose(got, expected, rtol=1e-5)


OTHERS = ("power", "with itself", "negation", "a row")  # are recorded in other ways


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_the_fast_path_from_the_second_time_on(name, monkeypatch):
    noted, operate = [], known_operations._noted
    monkeypatch.setattr(
        known_operations, "_noted", lambda *args: (noted.append(args[1]), operate(*args))[1]
    )
    few, many = counts_of_alike(OPERATORS[name], noted)
    assert name in OTHERS or 0 < few == many


def test_operators_on_weights_alone_take_the_fast_path(monkeypatch):
    """As of a learned state in place of children that are not there."""

    def fn(params, tree):
        if tree is None:
            return params["b"]
        x, left, right = tree
        return params["b"] * x + fn(params, left) @ params["w"] - fn(params, right) * params["b"]

    computed, shared_results = [], Registry.shared_results
    monkeypatch.setattr(
        Registry,
        "shared_results",
        lambda *args: (computed.append(args[1]), shared_results(*args))[1],
    )
    batched = jedbatch.batch(fn)
    counts = []
    leaf = (X, None, None)
    for trees in [leaf], [(X, leaf, (X, None, leaf)), (X, leaf, None)]:
        batched.plan(P, trees)
        counts.append(len(computed))
    assert 0 < counts[0] == counts[1]
    found = batched(P, trees)
    np.testing.assert_allclose(found, [fn(P, tree) for tree in trees], rtol=1e-6)


@pytest.mark.parametrize("options", [{"scale": 1}, {"scale": True}, {"scale": 1.5}])
def test_options_that_are_equal_are_not_the_same(options):
    """1 and True are equal; floats take the slow path, since 0.0 and -0.0 are equal too."""

    def fn(params, x):
        return combine(params, x, x, scale=2), combine(params, x, x, **options)

    graph = jedbatch.batch(fn).plan(P, [X]).graph
    assert len(set(graph.node_type.tolist())) == 2


def test_buffers_are_copied_when_they_are_given():
    def fn(params, n):
        buffer, h = np.zeros(3, np.float32), params["b"] * n
        for k in range(4):
            buffer[:] = k
            h = combine(params, h, buffer)
        return h

    plan = jedbatch.batch(fn).plan(P, [1.0])
    rows = np.concatenate([np.asarray(x) for x in plan.inputs.values() if x.ndim == 2])
    assert {tuple(row) for row in rows.tolist()} >= {(k, k, k) for k in range(4)}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda p, n: multiply(p, np.float32([2])), "closes over an array of NumPy"),
        (lambda p, n: jax.jit(lambda x: x * p["b"]), "goes through `jax.jit` (<lambda> at "),
    ],
)
def test_calls_without_a_description_are_counted_and_warned_of(made, reason):
    batched = jedbatch.batch(lambda p, n: [made(p, n)(X * k) for k in range(1, 4)], out_axes=None)
    warnings = []
    for k in range(6):
        with catch_warnings(record=True) as caught:
            simplefilter("always")
            plan = batched.plan(P, [3 * k, 3 * k + 1, 3 * k + 2])
        warnings += caught
    (warning,) = warnings
    assert warning.category is jedbatch.errors.SlowCallsWarning
    assert f"9 of `<lambda>`, which {reason}" in str(warning.message)
    assert plan.host.slow_calls == 9
    assert "9 calls recorded slowly" in str(plan)


def test_calls_with_descriptions_are_not_counted():
    plan = jedbatch.batch(lambda p, n: combine(p, X, n)).plan(P, [1.0, 2.0])
    assert plan.host.slow_calls == 0
    assert "slowly" not in str(plan)


def twice(change):
    """A cell that is called before and after something that it holds was changed."""

    def fn(params, x):
        things = {"list": [params["b"]] * 20, "dict": {"k": params["b"]}, "number": [1.0]}
        things["object"], k = Settings(params["b"]), 2.0
        inner = lambda x: x * k  # noqa: E731
        inner.scale = 1.0
        held = (inner, functools.partial(inner))

        def total(x, *, named=held):
            lists = things["list"][0] + things["dict"]["k"] + things["number"][0]
            return held[0](x) + named[1](x) + lists * things["object"][0] * inner.scale

        def reassign():
            nonlocal k
            k = 3.0

        changes = {
            "list": lambda: things["list"].__setitem__(0, params["w"][0]),
            "dict": lambda: things["dict"].update(k=params["w"][0] * 2),
            "number": lambda: things["number"].__setitem__(0, 5.0),
            "object": lambda: setattr(things["object"], "factor", params["w"][1]),
            "attributes of an object": lambda: things["object"].__dict__.update(factor=2.0),
            "another dict": lambda: setattr(things["object"], "__dict__", {"factor": 3.0}),
            "nonlocal": reassign,
            "attribute of a function": lambda: setattr(inner, "scale", 4.0),
            "nothing": lambda: None,
        }
        cell = jedbatch.cell(total)
        first = cell(x)
        changes[change]()
        return first, cell(x)

    return fn


CHANGES = (
    *("list", "dict", "number", "object", "attributes of an object", "another dict"),
    *("nonlocal", "attribute of a function", "nothing"),
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_cell_holds_may_change_between_two_calls(change):
    fn = twice(change)
    params = {"w": jnp.arange(9.0).reshape(3, 3), "b": jnp.ones(3)}
    batched = jedbatch.batch(fn)
    for _ in range(2):
        found, wanted = batched(params, [X, X + 1]), [fn(params, x) for x in (X, X + 1)]
        for k in range(2):
            np.testing.assert_allclose(found[k], np.stack([w[k] for w in wanted]), rtol=1e-6)


def test_unseen_trees_of_floats_take_the_fast_path(taken):
    """Floats of forms that were met before are operands; those of new ones are constants."""
    rng = np.random.default_rng(0)

    def tree(size):
        if size == 1:
            return "leaf", float(rng.normal())
        left = int(rng.integers(1, size))
        return "node", tree(left), tree(size - left)

    def fn(params, tree):
        if tree[0] == "leaf":
            return combine(params, X, tree[1])
        return combine(params, fn(params, tree[1]), fn(params, tree[2]))

    def trees():
        return [tree(size) for size in [1] * 20 + rng.integers(8, 25, 12).tolist()]

    batched = jedbatch.batch(fn)
    for _ in range(6):
        batched.plan(P, trees())
    taken.clear()
    plan = batched.plan(P, trees())
    assert not taken
    assert plan.host.num_known == 20
