"""The identity rule: which nodes may share a batch, and what is an input."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, loop, mostly_slow

import jedbatch
from jedbatch.errors import RecompilationWarning


def types_of(batched, params, instances):
    """Number of node types in use."""
    graph = batched.plan(params, instances).graph
    return len(np.unique(graph.node_type))


@jedbatch.cell
def scale(w, x, factor=1.0, *, power=1):
    return w * x**power * factor


@jedbatch.cell
def spelled(x, *, flag):
    return x * len(str(flag))


A, B = jnp.float32([1, 2]), jnp.float32([3, 4])
X = np.float32([0.5, -1.5])


def fn_of(variant):
    """`fn(params, i)` whose call of a cell differs from instance to instance by `variant`."""
    return lambda params, i: variant(params, i).astype(jnp.float32)


DIFFERENT = {
    "a weight": lambda p, i: scale(p[i], X),
    "a static argument": lambda p, i: scale(p[0], X, power=1 + i),
    "a static bool and int": lambda p, i: spelled(X, flag=[True, 1][i]),
    "the dtype of an operand": lambda p, i: scale(p[0], X.astype([np.float32, np.float16][i])),
    "the weak type of an operand": lambda p, i: scale(p[0], X, [2.0, np.float32(2)][i]),
    "a number and an integer": lambda p, i: scale(p[0], X, [2.0, 2][i]),
    "the shape of an operand": lambda p, i: scale(p[0], [X, X[:1]][i]),
    "a closed-over number": lambda p, i: jedbatch.cell(lambda x: x * [2.0, 3.0][i])(X),
    "a closed-over array": lambda p, i: jedbatch.cell(lambda x: x * [A, B][i])(X),
    "the operation": lambda p, i: [jedbatch.cell(jnp.sin), jedbatch.cell(jnp.cos)][i](X),
    "a parameter of a primitive": lambda p, i: jax.lax.rev(p[0] * X, [(0,), ()][i]),
}

SAME = {
    "a token": lambda p, i: scale(p[0], X, 1 + i),
    "a float": lambda p, i: scale(p[0], X, 0.5 + i),
    "a float that equals another": lambda p, i: scale(p[0], X, [0.0, -0.0][i]),
    "a literal in a raw operation": lambda p, i: jedbatch.cell(jnp.sin)(p[0]) * (0.5 + i),
    "a closed-over array of NumPy": lambda p, i: scale(p[0], X + i),
    "a row of a weight": lambda p, i: jnp.sin(p[0][i] * jnp.ones(2)),
}


FAST = ("a weight", "a static bool and int", "the weak type of an operand", "a closed-over array")


@pytest.mark.parametrize("name", mostly_slow(DIFFERENT, *FAST))
def test_never_batched_together(name):
    variant = DIFFERENT[name]
    fn = lambda p, i: variant(p, i).sum().astype(jnp.float32)  # noqa: E731
    batched = check(fn, [A, B], [0, 1, 0, 1])
    each = [types_of(jedbatch.batch(fn), [A, B], [i]) for i in (0, 1)]
    graph = batched.plan([A, B], [0, 1]).graph
    first, second = (set(graph.node_type[graph.node_ptr[i] :][: each[i]]) for i in (0, 1))
    assert first != second


FAST = ("a float that equals another", "a literal in a raw operation", "a row of a weight")


@pytest.mark.parametrize("name", mostly_slow(SAME, *FAST))
def test_batched_together_each_with_its_own_value(name):
    variant = SAME[name]
    batched = check(variant, [A, B], [0, 1, 0, 1])
    alone = types_of(jedbatch.batch(variant), [A, B], [0])
    assert types_of(batched, [A, B], [0, 1]) == alone


def adding(array):
    return lambda x: x + jnp.sum(array)


def with_forward_rule(slope, depth=0):
    @jax.custom_jvp
    def once(x):
        return 1.0 * x

    inner = with_forward_rule(slope, depth - 1) if depth else lambda t: slope * t
    once.defjvp(lambda xs, ts: (once(*xs), inner(*ts)))
    return once


def with_reverse_rule(kept, slope):
    once = jax.custom_vjp(lambda x: 1.0 * x)
    once.defvjp(lambda x: (1.0 * x, kept * x), lambda x, t: (slope * t + 0 * x,))
    return once


def calling_back(factor):
    kind = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return lambda x: jax.pure_callback(lambda x: np.float32(factor) * x, kind, x)


ONE_PROGRAM = {
    "functions of other code": (lambda x: jnp.sin(x) * 2, lambda y: [jnp.sin(y)][0] * 2),
    "large arrays": (adding(np.arange(5000)), adding(np.arange(5000))),
    "a rule forwards": (with_forward_rule(2), with_forward_rule(2)),
    "a rule in a rule": (with_forward_rule(2, 2), with_forward_rule(2, 2)),
    "a rule for the reverse": (with_reverse_rule(2, 3), with_reverse_rule(2, 3)),
    "a callback": (calling_back(2), calling_back(2)),
}

TWO_PROGRAMS = {
    "the order of operands": (lambda x: jnp.sin(x) * 2, lambda x: 2 * jnp.sin(x)),
    "signs of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "large arrays": (adding(np.arange(5000)), adding(np.arange(1, 5001))),
    "dtypes of large arrays": (adding(np.arange(5000)), adding(np.arange(5000, dtype=np.uint32))),
    "rules forwards": (with_forward_rule(2), with_forward_rule(3)),
    "rules in rules": (with_forward_rule(2, 2), with_forward_rule(3, 2)),
    "what is kept for the reverse": (with_reverse_rule(2, 3), with_reverse_rule(1, 3)),
    "rules for the reverse": (with_reverse_rule(2, 3), with_reverse_rule(2, 2)),
    "callbacks": (calling_back(2), calling_back(3)),
}


@pytest.mark.parametrize(
    ("name", "functions", "number"),
    [(name, f, 1) for name, f in ONE_PROGRAM.items()]
    + [(name, f, 2) for name, f in TWO_PROGRAMS.items()],
)
def test_a_type_is_its_program(name, functions, number):
    cells = [jedbatch.cell(f, name="one") for f in functions]
    batched = jedbatch.batch(lambda i: cells[i](X), in_axes=0)
    assert len(batched.plan([0, 1]).graph.present_types) == number
    assert_close(batched([0, 1]), np.stack([f(X) for f in functions]), 1e-6)


def test_minus_zero_is_a_value():
    """0.0 and -0.0 are equal and differ."""
    batched = jedbatch.batch(lambda x: scale(jnp.float32(1), x, 1.0), in_axes=0)
    got = 1 / batched([0.0, -0.0, 0.0])
    assert got.tolist() == [np.inf, -np.inf, np.inf]


def test_equal_instances_of_different_type_are_told_apart():
    """1, 1.0 and True are equal and hash alike."""
    seen = []

    def fn(x):
        seen.append(type(x[0]))
        return jnp.float32({int: 1, float: 2, bool: 3}[type(x[0])])

    batched = jedbatch.batch(fn, in_axes=0)
    assert batched([(1, 2), (1.0, 2), (True, 2), (1, 2)]).tolist() == [1, 2, 3, 1]
    assert seen == [int, float, bool]  # the fourth is the first again


def test_cells_made_inside_are_the_same_cell():
    def fn(params, x):
        return jedbatch.cell(lambda p, y: jnp.sin(p * y))(params, x)

    assert types_of(jedbatch.batch(fn), A, [1.0, 2.0, 3.0]) == 1
    check(fn, A, [1.0, 2.0, 3.0])


def test_cells_that_close_over_symbolic_values():
    def fn(params, n):
        h = params * n
        return jedbatch.cell(lambda y: h * y + params)(jnp.sin(h))

    check(fn, A, [1.0, 2.0, 3.0])


def test_warns_when_every_call_makes_a_new_cell():
    def fn(params, n):
        h = params
        for i in range(n):  # Python decides on `i`
            h = jedbatch.cell(lambda x, i=i: functools.reduce(jnp.minimum, [x] * (i + 1)))(h)
        return h

    with pytest.warns(RecompilationWarning, match="positional argument"):
        jedbatch.batch(fn)(jnp.ones(2), [50])


def test_no_warning_without_need():
    def fn(params, n):
        for i in range(n):
            params = jedbatch.cell(lambda x, y: x + y)(params, i)
        return params

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jedbatch.batch(fn)(jnp.ones(2), [50])


def test_methods_and_partials_are_cells():
    class Layer:
        def __init__(self, power):
            self.power = power

        def __call__(self, w, x):
            return w * x**self.power

    square, cube = Layer(2), Layer(3)
    cells = [
        jedbatch.cell(square),
        jedbatch.cell(cube.__call__),
        jedbatch.cell(functools.partial(scale, factor=2.0)),
    ]
    check(lambda p, i: cells[i % 3](p, X), A, list(range(6)))


def test_shared_work_is_done_once():
    """What depends on shared arguments only is no node."""

    def fn(params, n):
        return (params["w"].T @ params["w"])[n % 2] * jnp.ones(2)

    params = {"w": jnp.arange(4.0).reshape(2, 2)}
    batched = check(fn, params, [0, 1, 2])
    graph = batched.plan(params, [0, 1, 2]).graph
    names = [t.name for t in graph.types]
    assert "dot_general" not in names
    assert "transpose" not in names


def test_constants_are_no_nodes():
    fn = lambda params, n: params + jnp.sin(jnp.arange(2.0))  # noqa: E731
    graph = jedbatch.batch(fn).plan(A, [0, 1]).graph
    assert len(graph.node_type) <= 2


def test_static_indexing_of_an_instance_gives_inputs():
    def fn(params, x):
        total = params
        for row in x[1:]:
            total = scale(params, total + 0, 1.0) + row
        return total + x[0] + x[-1, :1] + x[None, 0][0]

    instances = [np.random.default_rng(i).normal(size=(i + 2, 2)).astype("f4") for i in range(3)]
    batched = check(fn, A, instances)
    graph = batched.plan(A, instances).graph
    names = {graph.types[t].name for t in graph.node_type}
    assert not names & {"slice", "squeeze", "dynamic_slice", "gather"}


def test_same_structure_of_arrays_is_recorded_once():
    calls = []

    def fn(params, x):
        calls.append(1)
        return params * x["a"] + x["b"][0]

    batched = jedbatch.batch(fn)
    instances = [{"a": X * i, "b": [X + i]} for i in range(5)]
    assert_close(
        batched(A, instances), loop(lambda p, x: p * x["a"] + x["b"][0], A, instances), 1e-6
    )
    batched(A, [{"a": X, "b": [X + 0]}])
    assert len(calls) == 1


class Opaque:
    def __init__(self, n):
        self.n = n


def test_mutable_objects_are_read_again():
    fn = lambda params, x: params * x.n  # noqa: E731
    batched, x = jedbatch.batch(fn), Opaque(1)
    assert_close(batched(A, [x]), (A * 1)[None], 1e-6)
    x.n = 5
    assert_close(batched(A, [x]), (A * 5)[None], 1e-6)


class Branch:
    __slots__ = ("children", "parent")

    def __init__(self, *children):
        self.parent, self.children = None, children
        for child in children:
            child.parent = self


class Leaf(Opaque):
    parent = None


@dataclasses.dataclass
class Labelled:
    tree: object
    label: int
    scale: object = 1.0


def weigh(params, x):
    if isinstance(x, Labelled):
        return weigh(params, x.tree) * x.label + x.scale
    if isinstance(x, Leaf):
        return params * (x.n + (x.parent is not None))
    return jnp.tanh(sum(weigh(params, child) for child in x.children))


def test_objects_of_classes_are_known_by_what_they_hold():
    """Parents, children that are met twice, and fields that are arrays are among it."""
    calls = []

    def fn(params, x):
        calls.append(1)
        return weigh(params, x)

    def instances(n):
        shared = Leaf(2)
        return [
            Branch(Branch(Leaf(n), Leaf(3)), Leaf(1)),
            Branch(shared, Leaf(4), shared),
            Labelled(Branch(Leaf(2)), 3),
            Labelled(Leaf(2), 3, X),
        ]

    batched = jedbatch.batch(fn)
    for n, expected in [(1, 4), (1, 4), (2, 5)]:
        assert_close(batched(A, instances(n)), loop(weigh, A, instances(n)), 1e-6)
        assert len(calls) == expected


class Holder:
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    "held",
    [lambda: X + 1, lambda: [Holder(X)], lambda: iter([1]), object],
)
def test_objects_whose_state_is_not_to_be_seen_are_recorded_each_time(held):
    calls = []

    def fn(params, x):
        calls.append(1)
        return params * 2

    batched, x = jedbatch.batch(fn), Holder(held())
    batched(A, [(x, X)])
    batched(A, [(x, X)])
    assert len(calls) == 2


def test_mutable_lists_are_read_again():
    fn = lambda params, x: params * len(x)  # noqa: E731
    batched, x = jedbatch.batch(fn), [1, 2]
    batched(A, [x])
    x.append(3)
    assert_close(batched(A, [x]), (A * 3)[None], 1e-6)


def test_key_gives_objects_an_identity():
    calls = []

    def fn(params, x):
        calls.append(1)
        return params * x.n

    batched = jedbatch.batch(fn, key=lambda x: x.n)
    got = batched(A, [Opaque(2), Opaque(3), Opaque(2)])
    assert_close(got, jnp.stack([A * 2, A * 3, A * 2]), 1e-6)
    assert len(calls) == 2


def test_cache_is_bounded():
    calls = []

    def fn(params, x):
        calls.append(1)
        return params * x

    batched = jedbatch.batch(fn, cache_size=2)
    for _ in range(2):
        for i in range(4):
            batched(A, [(i,)[0]])
    assert len(calls) == 8


def test_another_structure_of_params_is_another_program():
    fn = lambda params, x: jax.tree.leaves(params)[0] * x  # noqa: E731
    batched = jedbatch.batch(fn)
    assert_close(batched(A, [2.0]), (A * 2)[None], 1e-6)
    assert_close(batched({"a": jnp.ones(3)}, [2.0]), jnp.full((1, 3), 2.0), 1e-6)
    assert_close(batched(A, [3.0]), (A * 3)[None], 1e-6)


def test_deep_recursion():
    """Recursion far beyond Python's limit, recorded, remembered and differentiated."""

    def chain(depth):
        return functools.reduce(lambda tree, _: (tree, 2), range(depth), 1)

    step = jedbatch.cell(lambda p, h, x: h * p + x * 1e-4)

    def fn(p, t):
        if not isinstance(t, tuple):
            return p * t
        return step(p, fn(p, t[0]), t[1])

    batched = jedbatch.batch(fn)
    p = jnp.float32(0.99)
    num_nodes = batched.graph(p, [chain(50_000)]).node_type.size
    assert num_nodes >= 50_000
    tree = chain(10_000)
    fixed = 2e-4 / (1 - 0.99)
    assert_close(batched(p, [tree]), jnp.float32([fixed]), 1e-3)
    slope = jax.grad(lambda p: batched(p, [tree])[0])(p)
    assert_close(slope, jnp.float32(2e-4 / 0.01**2), 1e-2)
