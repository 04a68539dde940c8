"""`Batched.warm`: after it, minibatches never seen before compile nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop, mostly_slow
from cases.models import random_params

import jedbatch
from jedbatch.data import synthetic_treebank
from jedbatch.models import WORKLOADS

SIZE = 8
P = {"w": jnp.full((3, 3), 0.3), "b": jnp.arange(3.0)}
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh((x + y) @ p["w"] + p["b"]), name="add")
LEAF = jedbatch.cell(lambda p, i: p["b"] * i, name="leaf")
SUM = jedbatch.cell(lambda x, y: x + y, name="sum")
NODE = jedbatch.cell(lambda p, i, h: jnp.tanh(p["b"] * i + h @ p["w"]), name="node")


def total(p, t):
    return LEAF(p, t) if isinstance(t, int) else ADD(p, total(p, t[0]), total(p, t[1]))


def childsum(p, t):
    """Of trees (word, children), any number of them."""
    h = jnp.zeros(3)
    for child in t[1]:
        h = SUM(h, childsum(p, child))
    return NODE(p, t[0], h)


def chain(n):
    t = 0
    for k in range(1, n):
        t = (t, k)
    return t


def binary(count, seed):
    """Trees of integers."""

    def plain(t):
        return t[1] if len(t) == 2 else (plain(t[1]), plain(t[2]))

    return [plain(t) for t in synthetic_treebank(count, seed=seed)]


def bushy(count, seed):
    rng = np.random.default_rng(seed)

    def grow(n):
        children = []
        while n > 1:
            size = int(rng.integers(1, n))
            children.append(grow(size))
            n -= size
        return int(rng.integers(50)), tuple(children)

    return [grow(int(n)) for n in rng.integers(2, 30, count)]


def cut(instances, size=SIZE):
    return [instances[i : i + size] for i in range(0, len(instances) - size + 1, size)]


def workload(name, count):
    """(function, policy, parameters, instances) of a model of this package."""
    found = WORKLOADS[name]
    instances, sizes = found.load(limit=count, seed=5)
    cells = found.cells(hidden=2, **sizes)
    return found.scorer(cells), found.policy(), random_params(cells), instances


# --- an epoch of unseen minibatches ---


def test_nothing_is_compiled_afterwards():
    """Calls, gradients of calls and of plans; a `jit` of `apply` compiles once."""
    batched = jedbatch.batch(total)
    trees = binary(16 * SIZE, seed=1)
    plan = batched.warm(P, trees[: 4 * SIZE], batch_size=SIZE, gradient=True)

    def loss(p, plan):
        return batched.apply(p, plan).sum()

    step = jax.jit(jax.value_and_grad(loss))
    step(P, plan)
    direct = jax.value_and_grad(lambda p, minibatch: batched(p, minibatch).sum())
    before = batched.compilations
    minibatches = cut(trees[4 * SIZE :])
    for minibatch in minibatches:
        values, gradients = step(P, batched.plan(P, minibatch))
        found = direct(P, minibatch)
        assert_close(batched(P, minibatch).sum(), values, 1e-5)
        assert_close(jax.tree.leaves(found), [values, *jax.tree.leaves(gradients)], 1e-5)
    last = minibatches[-1]
    eager = jax.grad(loss)(P, batched.plan(P, last))
    assert batched.compilations == before
    assert step._cache_size() == 1
    expected = jax.grad(lambda p: loop(total, p, last).sum())(P)
    assert_close(jax.tree.leaves(eager), jax.tree.leaves(expected), 1e-5)
    assert_close(batched(P, last), loop(total, P, last), 1e-5)


@pytest.mark.parametrize("name", ["treelstm", "childsum", "lattice_lstm"])
@pytest.mark.parametrize("size", mostly_slow([1, 8], 8))
def test_plans_of_unseen_minibatches_have_one_form(name, size):
    """So whoever compiles one program for them compiles no other."""
    if name == "childsum":
        fn, policy, params, instances = childsum, None, P, bushy(20 * size + 32, seed=2)
    else:
        fn, policy, params, instances = workload(name, 20 * size + 32)
    batched = jedbatch.batch(fn, policy=policy)
    sample, unseen = instances[: 8 * size + 32], cut(instances[8 * size + 32 :], size)
    forms = {
        jax.tree.structure(
            batched.warm(params, sample, batch_size=size, gradient=wanted, calls=False)
        )
        for wanted in (True, False)
    }
    for wanted in (True, False):
        plans = [batched.plan(params, minibatch, gradient=wanted) for minibatch in unseen]
        assert {jax.tree.structure(plan) for plan in plans} <= forms
    assert len(forms) == 2
    assert batched.compilations == 0


@pytest.mark.parametrize(
    ("name", "size"),
    [("treelstm", 8), ("treelstm", 32), ("childsum", 8), ("translation", 8), ("lattice_lstm", 32)],
)
def test_at_most_two_programs_without_warming(name, size):
    """Those of the first minibatch have headroom by how far its instances differ in size."""
    if name == "childsum":
        fn, policy, params, instances = childsum, None, P, bushy(24 * size, seed=2)
    else:
        fn, policy, params, instances = workload(name, 24 * size)
    batched = jedbatch.batch(fn, policy=policy)
    forms = [jax.tree.structure(batched.plan(params, x)) for x in cut(instances, size)]
    assert len(set(forms)) <= 2


def test_many_runs_are_few_instructions_of_a_switch():
    """A program for a GPU has room for instructions, of which there are fewer than runs."""
    fn, policy, params, instances = workload("lattice_lstm", 14 * 32)
    batched = jedbatch.batch(fn, policy=policy, target="gpu")
    plans = [batched.plan(params, x) for x in cut(instances, 32)]
    assert len({jax.tree.structure(plan) for plan in plans}) == 1
    runs = [len(plan.host.placed.runs) for plan in plans]
    assert max(runs) > plans[0].static.signature.num_instructions  # else this tests nothing


MODULES = [
    jedbatch.cell(lambda p, h, k=k: jnp.tanh(h * k + p["b"]), name=f"m{k}") for k in range(8)
]


def test_rare_types_have_room_once_programs_grow():
    """Batches of types with few nodes vary most: from one to many, from minibatch to minibatch."""

    def network(p, modules):
        h = p["b"]
        for k in modules:
            h = MODULES[k](p, h)
        return h

    rng = np.random.default_rng(0)
    networks = [tuple((8 * rng.random(6) ** 4).astype(int).tolist()) for _ in range(30 * 32)]
    batched = jedbatch.batch(network, policy=jedbatch.policies.agenda)
    forms = [jax.tree.structure(batched.plan(P, x)) for x in cut(networks, 32)]
    assert len(set(forms)) <= 2


def test_all_types_have_more_room_once_programs_grow():
    """Not only those that had too little: in the next minibatch it is another one."""
    batched = jedbatch.batch(lambda p, k: MODULES[k](p, p["b"]))
    counts = [(1100, 1100, 1200), (1500, 1140, 760), (1050, 1450, 900)]
    minibatches = [[k for k, n in enumerate(each) for _ in range(n)] for each in counts]
    params = {"b": jnp.ones(64)}
    forms = [jax.tree.structure(batched.plan(params, minibatch)) for minibatch in minibatches]
    assert forms[0] != forms[1] == forms[2]


def test_programs_are_those_of_the_largest():
    """In whatever place of the sample it is; one program for all of it, and for smaller ones."""
    batched = jedbatch.batch(total)
    sample = [chain(n) for n in (3, 2, 5, 400, 2, 2, 3, 4)]
    plan = batched.warm(P, sample, batch_size=2)
    assert plan.graph.num_instances == 2
    assert len(plan.graph.node_type) == 5 + 4 + 400 + 399
    before = batched.compilations
    for trees in ([chain(1), chain(2)], [chain(420), chain(10)]):
        assert_close(batched(P, trees), loop(total, P, trees), 1e-5)
    assert batched.compilations == before


def test_what_came_before_is_kept():
    """Warming again compiles nothing, nor does going back to other numbers of instances."""
    batched = jedbatch.batch(total)
    batched(P, [1, 2, 3])
    trees = binary(2 * SIZE, seed=3)
    batched.warm(P, trees, batch_size=SIZE)
    before = batched.compilations
    batched.warm(P, trees, batch_size=SIZE)
    assert_close(batched(P, [4, 5, 6]), loop(total, P, [4, 5, 6]), 1e-5)
    assert batched.compilations == before


# --- other kinds of functions ---


def test_several_results_of_which_some_are_differentiated():
    def both(p, t):
        h = total(p, t)
        return {"state": h, "score": h.sum()}

    batched = jedbatch.batch(both)
    trees = binary(4 * SIZE, seed=4)
    batched.warm(P, trees[: 2 * SIZE], batch_size=SIZE, gradient=True)
    before = batched.compilations
    last = trees[-SIZE:]
    plan = batched.plan(P, last)
    got = jax.grad(lambda p: batched.apply(p, plan)["score"].sum())(P)
    jax.grad(lambda p: sum(x.sum() for x in jax.tree.leaves(batched(p, last))))(P)
    assert batched.compilations == before
    expected = jax.grad(lambda p: sum(total(p, t).sum() for t in last))(P)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), 1e-5)


@pytest.mark.slow
def test_arrays_of_different_lengths():
    def attend(p, x):
        return (jax.nn.softmax(x @ p["w"] @ x.T) @ x).mean(0)

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(n, 3)).astype(np.float32) for n in rng.integers(1, 20, 40)]
    batched = jedbatch.batch(attend)
    batched.warm(P, [np.ones((20, 3), np.float32), *arrays[:20]], batch_size=5, gradient=True)
    before = batched.compilations
    for minibatch in cut(arrays[20:], 5):
        assert_close(batched(P, minibatch), loop(attend, P, minibatch), 1e-5)
        jax.grad(lambda p, minibatch=minibatch: batched(p, minibatch).sum())(P)
    assert batched.compilations == before


def test_functions_of_instances_alone():
    """Gradients are then with respect to the arrays of the instances."""
    batched = jedbatch.batch(lambda x: jnp.tanh(x) * 2, in_axes=0)
    arrays = [np.full(3, i, np.float32) for i in range(4)]
    plan = batched.warm(arrays, gradient=True)
    before = batched.compilations
    floats = {name: rows for name, rows in plan.inputs.items() if rows.dtype == np.float32}

    def loss(floats):
        return batched.apply(plan, inputs={**plan.inputs, **floats}).sum()

    (rows,) = jax.grad(loss)(floats).values()
    assert batched.compilations == before
    assert_close(rows[:4], 2 * (1 - np.tanh(np.stack(arrays)) ** 2), 1e-5)


def test_functions_that_decide_on_values_are_run():
    def settle(p, t):
        h, steps = total(p, t), 0
        while jnp.abs(h).max() > 0.4 and steps < 3:
            h, steps = ADD(p, h, -h), steps + 1
        return h

    batched = jedbatch.batch(settle)
    trees = binary(8, seed=6)
    assert batched.warm(P, trees, batch_size=4, gradient=True) is None
    before = batched.compilations
    assert_close(batched(P, trees[:4]), loop(settle, P, trees[:4]), 1e-5)
    jax.grad(lambda p: batched(p, trees[4:]).sum())(P)
    assert batched.compilations == before
    with pytest.raises(ValueError, match=r"calls=False, and `settle` decides on values"):
        batched.warm(P, trees, calls=False)


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_samples_of_any_size(count):
    """Fewer instances than a minibatch has are repeated; none is left out."""
    batched = jedbatch.batch(total)
    sample = [*range(count - 1), (1, 2)]
    plan = batched.warm(P, sample, batch_size=SIZE, calls=False)
    assert plan.graph.num_instances == SIZE
    for minibatch in ([*range(SIZE - 1), (1, 2)], list(range(SIZE))):
        again = batched.plan(P, minibatch, gradient=False)
        assert again.static.signature == plan.static.signature


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda b: b.warm(P, []), ValueError, "got an empty list of instances"),
        (lambda b: b.warm(P), ValueError, "got 1 arguments"),
        (lambda b: b.warm(P, [1], batch_size=0), ValueError, r"`warm` got batch_size=0; expected"),
        (lambda b: b.warm(P, [1], batch_size=2.0), TypeError, r"`warm` got batch_size=2\.0"),
        (lambda b: b.warm(P, [1], gradient=1), TypeError, r"`warm` got gradient=1"),
        (lambda b: b.warm(P, [1], calls=None), TypeError, r"`warm` got calls=None"),
        (
            lambda b: b.warm(jax.eval_shape(lambda: P), [1]),
            TypeError,
            "among the shared arguments of `total`; expected arrays",
        ),
        (lambda b: jax.jit(lambda p: b.warm(p, [1]))(P), TypeError, "outside of transformations"),
        (
            lambda _: jedbatch.batch(lambda i: i + 1, in_axes=0).warm([1, 2], gradient=True),
            ValueError,
            "expected something to take gradients with respect to",
        ),
    ],
)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call(jedbatch.batch(total))
