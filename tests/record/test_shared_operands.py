"""Shared arrays in place of values: few ways are types, many ways one, with the loop's answers."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check

import jedbatch

PARAMS = {name: jnp.array([k + 0.5, -1.0]) for k, name in enumerate("xyz")} | {"w": jnp.eye(2)}

multiply = jedbatch.cell(lambda a, b, *none: a * jnp.tanh(b), name="multiply")
dense = jedbatch.cell(lambda w, a: jnp.tanh(w @ a), name="dense")


def evaluate(params, tree):
    if isinstance(tree, str):
        return params[tree]
    left, right = (evaluate(params, side) for side in tree)
    return dense(params["w"], multiply(left, right, [], None))


def types_of(plan):
    return sorted(str(plan.graph.types[t]) for t in plan.graph.present_types)


def test_many_ways_to_mix_shared_arrays_and_values():
    trees = [("x", "y"), (("y", "z"), "x"), ("z", ("x", ("y", "y"))), (("x", "x"), ("z", "y"))]
    batched = check(evaluate, PARAMS, trees)
    expected = ["dense(f32[2])", "multiply(2 × f32[2])", *["shared()"] * 3]
    for known in (trees, [*trees, (("z", "z"), ("x", "y"))]):
        names = [name.partition(" ->")[0] for name in types_of(batched.plan(PARAMS, known))]
        assert names == expected


@pytest.mark.parametrize("container", ["named tuple", "dict", "list", "keywords"])
def test_shared_leaves_of_states(container):
    """A learned initial state is a value wherever it stands in a state."""
    pair = collections.namedtuple("pair", "h c")

    @jedbatch.cell
    def join(w, a, b):
        return pair(jnp.tanh(w @ (a.h + b.h)), a.c * b.h)

    def spelled(params, tree):
        if isinstance(tree, str):
            state = pair(params[tree], params["x"])
        else:
            state = call(params["w"], *(spelled(params, side) for side in tree))
        return state

    def call(w, a, b):
        if container == "named tuple":
            return join(w, a, b)
        if container == "dict":
            return pair(**of_dicts(w, a._asdict(), b._asdict()))
        if container == "list":
            return pair(*of_lists(w, [[*a], [*b]]))
        return pair(**of_keywords(w, left=a.h, right=b.h, other=a.c))

    of_dicts = jedbatch.cell(
        lambda w, a, b: {"h": jnp.tanh(w @ (a["h"] + b["h"])), "c": a["c"] * b["h"]}
    )
    of_lists = jedbatch.cell(
        lambda w, both: (jnp.tanh(w @ (both[0][0] + both[1][0])), both[0][1] * both[1][0])
    )
    of_keywords = jedbatch.cell(
        lambda w, *, left, right, other: {"h": jnp.tanh(w @ (left + right)), "c": other * right}
    )
    trees = [("x", "y"), (("y", "z"), "x"), ("z", ("x", ("y", "y"))), (("x", "x"), ("z", "y"))]
    batched = check(spelled, PARAMS, trees)
    plan = batched.plan(PARAMS, [*trees, (("z", "z"), ("x", "y"))])
    assert len([t for t in types_of(plan) if "shared" not in t]) == 1
    assert plan.host.slow_calls == 0


def test_few_ways_are_types():
    trees = [("x", "y"), (("x", "y"), "z")]
    plan = check(evaluate, PARAMS, trees, gradients=False).plan(PARAMS, trees)
    assert len(types_of(plan)) == 3  # no row is written for a shared array


def test_weights_stay_weights():
    """They are shared in all calls, however many there are."""
    params = [jnp.eye(2) * (k + 1) for k in range(6)]

    def run(params, count):
        state = params[0][0]
        for w in params[:count]:
            state = dense(w, state)
        return state

    plan = check(run, params, [1, 3, 6], gradients=False).plan(params, [1, 3, 6])
    assert not any("shared" in name or "2,2" in name for name in types_of(plan))


def test_large_arrays_stay_shared():
    params = {name: jnp.ones((65, 64)) * k for k, name in enumerate("xyz")}

    def run(params, tree):
        if isinstance(tree, str):
            return params[tree]
        return multiply(*(run(params, side) for side in tree))

    trees = [("x", "y"), (("y", "z"), "x"), ("z", ("x", ("y", "y"))), (("x", "x"), ("z", "y"))]
    plan = check(run, params, trees, gradients=False).plan(params, trees)
    assert not any("shared" in name for name in types_of(plan))


# --- operations outside of cells ---


def arithmetic(params, tree):
    if isinstance(tree, str):
        return params[tree]
    name, *operands = tree
    a, *b = (arithmetic(params, operand) for operand in operands)
    return {"+": lambda: a + b[0], "*": lambda: a * b[0], "tanh": lambda: jnp.tanh(a)}[name]()


def expressions(count, depth, seed=0):
    """Of operators and variables at random."""
    rng = np.random.default_rng(seed)

    def grow(depth):
        if not depth:
            return str(rng.choice(list("xyz")))
        name = str(rng.choice(["+", "*", "tanh"]))
        return (name, *(grow(depth - 1) for _ in range(1 if name == "tanh" else 2)))

    return [grow(depth) for _ in range(count)]


def test_operations_on_variables_that_instances_choose():
    """Types are as many as operators and variables, and no more with other expressions."""
    batched = check(arithmetic, PARAMS, expressions(12, 3))
    for seed in (0, 1, 2):
        plan = batched.plan(PARAMS, expressions(12, 3, seed))
        names = {name.partition("(")[0] for name in types_of(plan)}
        assert names <= {"shared", "add", "multiply", "tanh", "mul"}
        assert len(types_of(plan)) <= 6
    unseen = expressions(12, 3, 3)
    expected = jnp.stack([arithmetic(PARAMS, tree) for tree in unseen])
    assert_close(batched(PARAMS, unseen), expected, 1e-5)


def test_what_every_instance_does_to_shared_arrays_is_done_once():
    def run(params, x):
        scale = jnp.tanh(params["x"]) * params["y"] + params["z"]
        return x * scale + params["y"]

    xs = [jnp.array([k, 1.0]) for k in range(12)]
    plan = check(run, PARAMS, xs).plan(PARAMS, xs)
    assert len(plan.graph.node_type) == 2 * len(xs)


def test_matrices_are_weights_however_they_are_chosen():
    params = {f"w{k}": jnp.eye(2) + k for k in range(8)}

    def run(params, k):
        return params[f"w{k}"].T @ jnp.array([k, 1.0])

    plan = check(run, params, list(range(8))).plan(params, list(range(8)))
    assert not any("2,2" in name for name in types_of(plan))


OPERATORS = {
    "+": jnp.add,
    "-": jnp.subtract,
    "*": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
}


def test_many_operations_that_meet_variables_in_few_ways_each():
    """Together they find new ways in one instance after the other: the first minibatch tells."""
    rng = np.random.default_rng(0)

    def run(params, tree):
        if isinstance(tree, str):
            return params["x"] if tree == "x" else params["y"][0] * jnp.ones(2)
        name, *operands = tree
        return OPERATORS[name](*(run(params, operand) for operand in operands))

    def grow(depth):
        if not depth or rng.random() < 0.2:
            return str(rng.choice(["x", "constant"]))
        name = str(rng.choice(list(OPERATORS)))
        return (name, *(grow(depth - 1) for _ in range(1 if name in ("tanh", "sin") else 2)))

    first, *others = ([grow(3) for _ in range(n)] for n in (32, 16, 16, 16))
    batched = check(run, PARAMS, first, gradients=False, granularity="cell")
    types = set(types_of(batched.plan(PARAMS, first)))
    assert len(types) <= 11
    for minibatch in others:
        assert types.issuperset(types_of(batched.plan(PARAMS, minibatch)))


def test_states_that_weights_lead_to():
    """Gates without a number make as many states of a circuit as there are sequences of them."""
    params = {"h": jnp.array([[0.5, 0.5], [0.5, -0.5]]), "x": jnp.eye(2)[::-1], "angle": 0.5}

    def circuit(params, gates):
        state = jnp.zeros((2, 2)).at[0, 0].set(1)
        for name, wire in gates:
            turn = jnp.diag(jnp.cos(params["angle"] * jnp.array([0.5, 2.0])))
            gate = turn if name == "turn" else params[name]
            state = jnp.moveaxis(jnp.tensordot(gate, state, axes=(1, wire)), 0, wire)
        return (state**2).sum()

    def circuits(seed):
        rng = np.random.default_rng(seed)
        names = ["h", "x", "h", "x", "turn"]
        sizes = rng.integers(1, 9, size=16)
        return [
            [(names[g], w) for g, w in rng.integers([5, 2], size=(n, 2)).tolist()] for n in sizes
        ]

    batched = check(circuit, params, circuits(0))
    num_types = [len(batched.plan(params, circuits(seed)).graph.types) for seed in range(1, 9)]
    assert len(set(num_types[3:])) == 1
    expected = jnp.stack([circuit(params, gates) for gates in circuits(8)])
    assert_close(batched(params, circuits(8)), expected, 1e-5)
