"""Shared arrays in place of values: few ways are types, many ways one, with the loop's answers."""

import jax.numpy as jnp
from cases.helpers import check

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
