"""Cells cut in two, where large weights meet operands that no recursion makes."""

import dataclasses
import functools
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import compilations, loop

import jedbatch
from jedbatch import Graph, Target
from jedbatch._jaxpr import early_part as early_parts
from jedbatch._jaxpr.early_part import early_part
from jedbatch._record.passes.projections import late_operands
from jedbatch.testing import assert_close

close = functools.partial(assert_close, rtol=1e-5)

SMALL = dataclasses.replace(Target.named("cpu"), projection_bytes=1)
H = 8
RNG = np.random.default_rng(0)
PARAMS = {
    "words": jnp.asarray(RNG.normal(size=(20, H)), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(2 * H, 4 * H)) / 3, jnp.float32),
    "above": jnp.asarray(RNG.normal(size=(2 * H, 4 * H)) / 3, jnp.float32),
    "u": jnp.asarray(RNG.normal(size=(H, H)) / 3, jnp.float32),
    "v": jnp.asarray(RNG.normal(size=(H, H)) / 3, jnp.float32),
}


@jedbatch.cell
def embed(params, word):
    return params["words"][word]


@jedbatch.cell
def lstm(params, x, state, *, name):
    h, c = state
    i, f, o, u = jnp.split(jnp.concatenate([x, h]) @ params[name], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jedbatch.cell
def merge(params, word, left, right):
    """A word at a node of a tree, in a product of its own."""
    return jnp.tanh(params["words"][word] @ params["u"] + (left + right) @ params["v"])


@jedbatch.cell
def join(params, left, right):
    return jnp.tanh((left + right) @ params["u"])


def layers(params, words):
    """Two LSTMs, of which one reads the other."""
    states = [embed(params, word) for word in words]
    for name in ("w", "above"):
        state, read = (jnp.zeros(H), jnp.zeros(H)), states
        states = []
        for x in read:
            state = lstm(params, x, state, name=name)
            states.append(state[0])
    return states[-1]


def tree(params, node):
    if isinstance(node, int):
        return embed(params, node)
    word, left, right = node
    return merge(params, word, tree(params, left), tree(params, right))


def binary(params, node):
    if isinstance(node, int):
        return embed(params, node)
    return join(params, *(binary(params, child) for child in node))


SENTENCES = [(1, 2, 3), (4,), (5, 6, 7, 8, 9), (10, 11)]
TREES = [(3, 1, (4, 2, 7)), 5, (8, (9, 1, 2), (3, 4, (5, 6, 7)))]


def names(plan):
    """How many nodes and batches each name has."""
    types = plan.graph.types
    nodes, batches = {}, {}
    for t in plan.graph.node_type:
        nodes[types[t].name] = nodes.get(types[t].name, 0) + 1
    for t in plan.schedule.batch_type:
        batches[types[t].name] = batches.get(types[t].name, 0) + 1
    return {name: (nodes[name], batches[name]) for name in nodes}


@pytest.mark.parametrize(("fn", "instances"), [(layers, SENTENCES), (tree, TREES)])
def test_values_are_the_loops(fn, instances):
    batched = jedbatch.batch(fn, target=SMALL)
    expected = jnp.stack(loop(fn, PARAMS, instances))
    close(batched(PARAMS, instances), expected)
    plan = batched.plan(PARAMS, instances, gradient=False)
    plan.graph.check()
    assert any(name.startswith("inputs of") for name in names(plan))
    close(batched.apply(PARAMS, plan), expected)


def test_inputs_of_all_steps_are_one_batch():
    plan = jedbatch.batch(layers, target=SMALL).plan(PARAMS, SENTENCES, gradient=False)
    steps = sum(map(len, SENTENCES))
    assert names(plan) == {
        "embed": (steps, 1),
        "inputs of lstm": (2 * steps, 2),  # of two layers
        "lstm": (2 * steps, 2 * max(map(len, SENTENCES))),
    }
    types = {str(plan.graph.types[t]) for t in plan.graph.present_types}
    assert "inputs of lstm(f32[8]) -> f32[32]" in types
    assert "lstm(2 × f32[8], f32[32]) -> 2 × f32[8]" in types


def test_gradients_and_other_plans_have_cells_whole():
    """Where weights are small, a gradient is wanted, or somebody has chosen how to plan."""
    whole = names(jedbatch.batch(layers).plan(PARAMS, SENTENCES, gradient=False))
    assert set(whole) == {"embed", "lstm"}
    batched = jedbatch.batch(layers, target=SMALL)
    assert set(names(batched.plan(PARAMS, SENTENCES))) == {"embed", "lstm"}
    for options in ({"granularity": "cell"}, {"policy": jedbatch.policies.depth}):
        other = jedbatch.batch(layers, target=SMALL, **options)
        assert set(names(other.plan(PARAMS, SENTENCES, gradient=False))) == {"embed", "lstm"}
    slope = jax.grad(lambda p: batched(p, SENTENCES).sum())(PARAMS)
    close(slope, jax.grad(lambda p: sum(loop(layers, p, SENTENCES)).sum())(PARAMS))


def test_cells_of_children_alone_stay_whole():
    trees = [((1, 2), (3, (4, 5))), (6, 7)]
    plan = jedbatch.batch(binary, target=SMALL).plan(PARAMS, trees, gradient=False)
    assert set(names(plan)) == {"embed", "join"}


def test_a_type_is_cut_once_it_recurs():
    batched = jedbatch.batch(layers, target=SMALL)
    short = [(n,) for n in range(9)]
    assert set(names(batched.plan(PARAMS, short, gradient=False))) == {"embed", "lstm"}
    both = [(1,), (2, 3)]
    assert names(batched.plan(PARAMS, both, gradient=False))["inputs of lstm"] == (6, 2)
    close(batched(PARAMS, both), jnp.stack(loop(layers, PARAMS, both)))
    assert "inputs of lstm" in names(batched.plan(PARAMS, [(4,), (5,)], gradient=False))


def pairs(params, node):
    if isinstance(node, int):
        return embed(params, node)
    left, right = (pairs(params, child) for child in node)
    return lstm(params, left, (right, left), name="w")[0]


def test_a_type_is_whole_once_all_its_operands_recur():
    """Of trees that lean to one side, one child is always a word; of others, none is."""
    batched = jedbatch.batch(pairs, target=SMALL)
    leaning, other = [(1, (2, (3, 4))), (5, 6)], [((1, 2), (3, 4)), (5, (6, 7))]
    for _ in range(2):
        plan = batched.plan(PARAMS, leaning, gradient=False)
        assert names(plan) == {"embed": (6, 1), "inputs of lstm": (4, 1), "lstm": (4, 3)}
        close(batched.apply(PARAMS, plan), jnp.stack(loop(pairs, PARAMS, leaning)))
    close(batched(PARAMS, other), jnp.stack(loop(pairs, PARAMS, other)))
    for trees, embedded, merged in ((other, 7, (5, 2)), (leaning, 6, (4, 3))):
        plan = batched.plan(PARAMS, trees, gradient=False)
        assert names(plan) == {"embed": (embedded, 1), "lstm": merged}
        close(batched(PARAMS, trees), jnp.stack(loop(pairs, PARAMS, trees)))


@pytest.mark.usefixtures("older_frozen")
def test_cut_graphs_are_forgotten_with_instances():
    def alive():
        gc.collect()
        return sum(type(x) is Graph for x in gc.get_objects())  # `isinstance` asks dead proxies

    before = alive()
    batched = jedbatch.batch(layers, target=SMALL, cache_bytes=1)
    for n in range(1, 9):
        plan = batched.plan(PARAMS, [(n,) * (n + 1), (n,)], gradient=False)
        assert "inputs of lstm" in names(plan)
    del plan
    assert alive() <= before + 4


def test_new_sentences_compile_nothing():
    batched = jedbatch.batch(layers, target=SMALL)
    rng = np.random.default_rng(3)
    minibatches = [
        [tuple(rng.integers(0, 20, n).tolist()) for n in rng.integers(1, 9, 8)] for _ in range(6)
    ]
    for instances in minibatches[:2]:
        batched(PARAMS, instances)
    with compilations() as counted:
        for instances in minibatches[2:]:
            batched(PARAMS, instances)
    assert not counted


# --- programs in two ---


def of_gates(w, u, x, h):
    """Separate products, one of which is put through more before it meets the state."""
    return jnp.tanh(jnp.tanh(x @ w) @ u + h @ u) * x, h @ w + 2 * (x @ w)


def of_joined(w, u, x, h):
    """Three pieces in one product, of which the middle comes early; weights on either side."""
    both = jnp.concatenate([h, x, h])
    rows = jnp.concatenate([w, u, w])
    return both @ rows, rows.T @ both, jnp.concatenate([x, x]) @ rows[:16] + h


def of_matrices(w, u, x, h):
    """Rows put together along the axis that is summed over, and along another one."""
    m, n = jnp.outer(h, x), jnp.outer(x, x)
    return jnp.concatenate([m, n], axis=1) @ jnp.concatenate([w, u]), jnp.concatenate([m, n]) @ w


def of_numbers(w, u, x, h):
    """Products with a number, which sum over nothing."""
    return jnp.tensordot(2.0, x @ w, 0) + h @ u, jnp.tensordot(jnp.concatenate([x, h]), 3.0, 0)


@pytest.mark.parametrize("fn", [of_gates, of_joined, of_matrices, of_numbers])
def test_both_parts_compute_the_program(fn, monkeypatch):
    monkeypatch.setattr(early_parts, "FEWER", 0)
    args = [jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((8, 8), (8, 8), (8,), (8,))]
    closed = jax.make_jaxpr(fn)(*args)
    with jax.checking_leaks():
        early, rest, weights = early_part(closed, 2, [3])
    assert 3 not in early.read
    assert weights > 0
    given = early.call([args[i] for i in early.read])
    assert len(given) == early.results
    ours = rest.call([*(args[i] for i in rest.read), *given])
    close(ours, list(jax.tree.leaves(fn(*args))))
    left = jax.make_jaxpr(lambda *xs: rest.call(xs))(*(args[i] for i in rest.read), *given)
    assert sum(eqn.primitive.name == "dot_general" for eqn in left.jaxpr.eqns) == 2


def test_no_program_is_cut_for_nothing():
    w, x = jnp.ones((8, 8)), jnp.ones(8)
    no_early = jax.make_jaxpr(lambda w, x, h: (x + h) @ w)(w, x, x)
    assert early_part(no_early, 1, [2]) is None
    no_weights = jax.make_jaxpr(lambda w, x, h: (x @ x) * h)(w, x, x)
    assert early_part(no_weights, 1, [2]) is None
    wide = jax.make_jaxpr(lambda w, x, h: (jnp.outer(x, x) @ w) @ h)(w, x, x)
    assert early_part(wide, 1, [2]) is None  # it gives as much as there are weights


def test_half_precision_is_summed_in_one_product():
    """The loop rounds a product once; two products would be rounded one by one."""
    w, x = jnp.ones((16, 64), jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    joined = jax.make_jaxpr(lambda w, x, h: jnp.concatenate([x, h]) @ w)(w, x, x)
    assert early_part(joined, 1, [2]) is None
    apart = jax.make_jaxpr(lambda w, x, h: x @ w[:8] + h @ w[8:])(w, x, x)
    assert early_part(apart, 1, [2]) is not None


# --- which operands come late ---


def test_late_operands_against_all_paths():
    rng = np.random.default_rng(5)
    for _ in range(30):
        count, num_types = int(rng.integers(2, 25)), int(rng.integers(1, 5))
        types = rng.integers(0, num_types, count)
        preds = [
            sorted(set(rng.integers(-1, n, rng.integers(1, 4)).tolist())) if n else [-1]
            for n in range(count)
        ]
        graph = Graph.from_dag(types, preds, inputs=[np.zeros((1, 2), np.float32)])
        leads = np.zeros((num_types, num_types), bool)
        for n, read in enumerate(preds):
            for r in read:
                if r >= 0:
                    leads[types[r], types[n]] = True
        for middle in range(num_types):  # Warshall
            leads |= leads[:, [middle]] & leads[[middle]]
        present = sorted(set(types.tolist()))
        expected = {t: set() for t in present}
        for (n, read), place in itertools.product(enumerate(preds), range(3)):
            if place < len(read) and read[place] >= 0:
                maker, reader = types[read[place]], types[n]
                if maker == reader or leads[reader, maker]:
                    expected[reader].add(place)
        assert late_operands(graph, present) == expected
