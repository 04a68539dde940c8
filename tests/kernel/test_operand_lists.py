"""Operands that are merely concatenated are one array of the program of a lane."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check

import jedbatch
from jedbatch import testing
from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.interpret import inlined
from jedbatch._kernel.operand_lists import single_parameters, with_lists

W = jnp.array([[0.3, -0.7, 0.4], [0.5, 0.2, -0.1], [-0.6, 0.8, 0.9]])


def rewritten(fn, shapes, num_shared=1):
    """(fn with arrays in place of lists, (first, length) of each parameter); results agree."""
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    closed = inlined(jax.make_jaxpr(fn)(W, *values))
    types = [ValueType(x.shape, x.dtype) for x in values]
    listed, parameters = with_lists(closed, num_shared, single_parameters(types))
    given = [
        values[p.first] if p.length is None else jnp.stack([values[j] for j in p.operands])
        for p in parameters
    ]
    assert [p.kind for p in parameters] == [(x.shape, x.dtype) for x in given]
    results = jax.core.eval_jaxpr(listed.jaxpr, listed.consts, W, *given)
    assert_close(results, jax.tree.leaves(fn(W, *values)), 1e-5)
    return listed, [(p.first, p.length) for p in parameters]


AXES = {
    "rows": lambda w, *xs: jnp.stack(xs) @ w,
    "columns": lambda w, *xs: w @ jnp.stack(xs, axis=1),
    "side by side": lambda w, *xs: jnp.concatenate(xs) ** 2,
    "each twice as long": lambda w, *xs: jnp.stack([x.reshape(1, 3) for x in xs], axis=2),
    "both ways": lambda w, *xs: jnp.stack(xs) @ w @ jnp.stack(xs, axis=1),
}


@pytest.mark.parametrize("length", [4, 40])  # `jnp.concatenate` puts sixteen together at a time
@pytest.mark.parametrize("name", AXES)
def test_lists_are_found(name, length):
    listed, parameters = rewritten(AXES[name], [(3,)] * length)
    assert parameters == [(0, length)]
    assert "concatenate" not in str(listed)


def test_rows_of_matrices():
    _, parameters = rewritten(lambda w, *xs: jnp.concatenate(xs, axis=1), [(2, 3)] * 5)
    assert parameters == [(0, 5)]


def test_lists_among_other_operands():
    def fn(w, x, *rest):
        hs, cs, y = rest[:4], rest[4:9], rest[9]
        return x @ w + jnp.stack(hs).sum(0) * y, jnp.stack(cs).prod(0)

    assert rewritten(fn, [(3,)] * 11)[1] == [(0, None), (1, 4), (5, 5), (10, None)]


ALONE = {
    "few": (lambda w, *xs: jnp.stack(xs), 3),
    "one is read elsewhere": (lambda w, *xs: (jnp.stack(xs), xs[2] + 1), 5),
    "one is returned": (lambda w, *xs: (jnp.stack(xs), xs[2]), 5),
    "another order": (lambda w, *xs: jnp.stack(xs[::-1]), 5),
    "with others": (lambda w, *xs: jnp.stack([w[0], *xs]), 5),
    "parts": (lambda w, *xs: (jnp.stack(xs[:5]), jnp.stack(xs[2:])), 7),
    "a whole and a part": (lambda w, *xs: (jnp.stack(xs), jnp.stack(xs[:5])), 7),
    "each changed": (lambda w, *xs: jnp.stack([jnp.tanh(x) for x in xs]), 5),
}


@pytest.mark.parametrize("name", ALONE)
def test_others_stay_by_themselves(name):
    fn, length = ALONE[name]
    assert rewritten(fn, [(3,)] * length)[1] == [(j, None) for j in range(length)]


def test_other_types_stay_by_themselves():
    def fn(w, *xs):
        return jnp.concatenate(xs)

    assert rewritten(fn, [(3,)] * 4 + [(2,)])[1] == [(j, None) for j in range(5)]


# --- in plans ---

PARAMS = {"w": W, "table": jnp.asarray(np.random.default_rng(1).normal(size=(7, 3)), jnp.float32)}


@jedbatch.cell
def leaf(params, word):
    return params["table"][word]


@jedbatch.cell
def attend(params, query, *states):
    rows = jnp.stack(states)
    return jax.nn.softmax(rows @ params["w"] @ query) @ rows


@jedbatch.cell
def split(params, *states):
    """Some results do not depend on all lists, and one is a number without a gradient."""
    both = jnp.stack(states[:4]), jnp.concatenate(states[4:])
    return both[0].sum(0) @ params["w"], both[1][:3] * 2.0, jnp.argmax(both[1])


def model(params, tree):
    if isinstance(tree, int):
        return leaf(params, tree)
    below = [model(params, child) for child in tree]
    if len(below) == 8:
        a, b, _ = split(params, *below)
        return a - b
    return attend(params, below[0], *below)


TREES = [
    [1, 2, 3, 4],
    [[1, 2, 3, 4], 5, [6, 5, 1, 0], [0, 0, 0, 0]],
    [3] * 8,
    [[6, 1, 1, 2], *[2] * 7],
]


def test_values_and_gradients_are_the_loops():
    check(model, PARAMS, TREES)
    plan = jedbatch.batch(model).plan(PARAMS, TREES)
    lengths = {
        k.node_type.name: [p.length for p in k.parameters] for k in plan.static.signature.kernels
    }
    assert lengths["attend"] == [None, 4]
    assert lengths["split"] == [4, 4]


def test_cotangents_that_share_rows(monkeypatch):
    monkeypatch.setattr("jedbatch._program.cotangent_rows.MIN_SHARED_BYTES", -1)
    monkeypatch.setattr("jedbatch._program.cotangent_rows.MAX_SHARED_SHARE", np.inf)
    plan = jedbatch.batch(model).plan(PARAMS, TREES)
    testing.check_plan(plan)
    assert plan.static.reverse.sent is not None
    check(model, PARAMS, TREES)


def test_one_of_several_results():
    """The program is told which results are differentiated, and marks cotangents that exist."""

    def both(params, tree):
        return {"here": model(params, tree).sum(), "below": model(params, tree[0]).sum()}

    batched = jedbatch.batch(both)
    for name in ("here", "below"):
        found = jax.grad(lambda params: batched(params, TREES[1:3])[name].sum())(PARAMS)  # noqa: B023
        expected = jax.grad(lambda params: sum(both(params, t)[name] for t in TREES[1:3]))(PARAMS)  # noqa: B023
        assert_close(found, expected, 1e-5)


def test_random_keys():
    @jedbatch.cell
    def draw(params, *keys):
        return jax.vmap(lambda key: jax.random.normal(key, (3,)))(jnp.stack(keys)).sum(0)

    def fn(params, seed):
        return draw(params, *jax.random.split(jax.random.key(seed), 5)) @ params["w"]

    check(fn, PARAMS, [1, 2, 3])


def test_derivatives_of_second_order():
    def loss(fn, params):
        return jnp.sum(jnp.sin(fn(params, TREES[:2])))

    def each(params, trees):
        return jnp.stack([model(params, tree) for tree in trees])

    batched, loop = functools.partial(loss, jedbatch.batch(model)), functools.partial(loss, each)
    direction = jax.tree.map(jnp.ones_like, PARAMS)

    def along(fn):
        return jax.jvp(jax.grad(fn), (PARAMS,), (direction,))[1]

    assert_close(along(batched), along(loop), 1e-5)


def test_beside_an_operation_without_results():
    def fn(w, *xs):
        jax.debug.callback(lambda *_: None, xs[0][0])
        return jnp.stack(xs[1:]) @ w

    assert rewritten(fn, [(3,)] * 5)[1] == [(0, None), (1, 4)]
