"""The TreeGRU, the MV-RNN and the TreeLSTM with two kinds of nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.helpers import assert_close, mostly_slow
from cases.lstms import double
from cases.models import random_params, treebank

import jedbatch
from jedbatch.data import num_nodes
from jedbatch.models import mvrnn, treegru, twotypes

WORDS, LABELS, HIDDEN = 60, 5, 6


ALL = [treegru, mvrnn, twotypes]
MODELS = pytest.mark.parametrize("model", ALL, ids=lambda m: m.__name__[len("jedbatch.models.") :])


@MODELS
def test_scores_are_those_of_the_classifier(model):
    """The loss of a tree is the cross-entropy of all subtrees' logits."""
    cells = model.flax_cells(WORDS, LABELS, HIDDEN)
    params = random_params(cells, 1)
    (tree,) = treebank(model, 1, seed=5, mean_length=4)
    subtrees = [tree]
    for t in subtrees:
        subtrees += t[1:3] if len(t) > 2 else ()
    assert len(subtrees) == num_nodes(tree)
    logits = np.array([model.classifier(cells)(params, t) for t in subtrees])
    labels = np.array([t[0] for t in subtrees])
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(len(labels)), labels].sum()
    right = (logits.argmax(axis=1) == labels).sum()
    assert_close(model.scorer(cells)(params, tree), np.float32([loss, right]), 1e-5)


@pytest.mark.parametrize("model", mostly_slow(ALL))
def test_training_compiles_once(model):
    """28 steps halve the loss of a blind guess at least; new minibatches compile nothing."""
    cells = model.flax_cells(WORDS, LABELS, 8)
    params = random_params(cells, 2)
    score = jedbatch.batch(model.scorer(cells))
    optimizer = optax.adam(0.03)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, plan):
        loss = lambda p: score.apply(p, plan)[:, 0].sum()  # noqa: E731
        value, slope = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, updates), state, value

    trees = treebank(model, 64, seed=1)
    minibatches = [trees[i : i + 16] for i in range(0, 64, 16)]
    losses, compiled = [], []
    for minibatch in 7 * minibatches:
        params, state, loss = step(params, state, score.plan(params, minibatch))
        losses.append(float(loss) / sum(map(num_nodes, minibatch)))
        compiled.append(score.compilations)
    assert losses[0] > 0.9 * np.log(LABELS)
    assert np.mean(losses[-4:]) < 0.5 * np.log(LABELS)
    for seed in range(10, 13):
        step(params, state, score.plan(params, treebank(model, 16, seed=seed)))
        compiled.append(score.compilations)
    assert len(set(compiled)) == step._cache_size() == 1


# --- batches ---


def plan_of(model, trees):
    cells = model.flax_cells(WORDS, LABELS, 4)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    return jedbatch.batch(model.scorer(cells)).plan(params, trees)


def names(plan):
    return [plan.graph.types[t].name for t, _ in plan.schedule.batches]


@pytest.mark.parametrize(("model", "products"), [(treegru, 2), (mvrnn, 4), (twotypes, 1)])
def test_products_of_a_node(model, products):
    """All gates of a node are one product, and candidates another."""
    cells = model.flax_cells(WORDS, LABELS, HIDDEN)
    params = random_params(cells)
    node = cells.nodes[0] if model is twotypes else cells.node
    state = cells.leaf(params, 1)
    assert str(jax.make_jaxpr(node)(params, state, state)).count("dot_general") == products


@MODELS
def test_deep_trees(model):
    """Trees thousands of levels deep are planned; the loop would overflow Python's stack."""
    tree = (0, 1)
    for level in range(3000):
        tree = (level % LABELS, (1, 2), tree, *([level % 2] if model is twotypes else []))
    plan = plan_of(model, [tree])
    assert sum(name.startswith("node") for name in names(plan)) == 3000


def test_kinds_are_needed():
    cells = twotypes.flax_cells(WORDS, LABELS, 4)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    score = jedbatch.batch(twotypes.scorer(cells))
    for tree in [(0, (1, 2), (3, 4)), (0, (1, 2), (3, 4), -1)]:
        with pytest.raises(ValueError, match=r"expected 0 or 1.*with_kinds"):
            score.plan(params, [tree])


# --- equations, written out with NumPy in double precision ---


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def assert_equal(got, expected):
    assert_close(got, jax.tree.map(jnp.float32, expected), 1e-5)


def test_tree_gru_against_its_equations():
    """Gate by gate: every child and gate has a block of the weights."""
    cells = treegru.flax_cells(4, 3, HIDDEN)
    params = random_params(cells, 3)
    p = double(params)

    def leaf(word):
        w, b = p["leaf"]["leaf"]["kernel"], p["leaf"]["leaf"]["bias"]
        e = p["leaf"]["embedding"]["embedding"][word]
        z = sigmoid(e @ w[:, :HIDDEN] + b[:HIDDEN])
        u = np.tanh(e @ w[:, HIDDEN:] + b[HIDDEN:])
        return (1 - z) * u  # of z ⊙ 0 + (1 - z) ⊙ u

    left, right = leaf(1), leaf(3)
    gates, b_gates = p["node"]["gates"]["kernel"], p["node"]["gates"]["bias"]

    def gate(k):
        columns = slice(k * HIDDEN, (k + 1) * HIDDEN)
        of_left, of_right = gates[:HIDDEN, columns], gates[HIDDEN:, columns]
        return sigmoid(left @ of_left + right @ of_right + b_gates[columns])

    r_l, r_r, z_l, z_r = map(gate, range(4))
    w, b = p["node"]["node"]["kernel"], p["node"]["node"]["bias"]
    u = np.tanh((r_l * left) @ w[:HIDDEN] + (r_r * right) @ w[HIDDEN:] + b)
    h = np.mean([z_l * left + (1 - z_l) * u, z_r * right + (1 - z_r) * u], axis=0)
    logits = h @ p["output"]["kernel"] + p["output"]["bias"]

    assert_equal(cells.leaf(params, 1), left)
    assert_equal(cells.node(params, cells.leaf(params, 1), cells.leaf(params, 3)), h)
    assert_equal(treegru.classifier(cells)(params, (0, (0, 1), (0, 3))), logits)


def test_mv_rnn_against_its_equations():
    cells = mvrnn.flax_cells(4, 3, HIDDEN, rank=2)
    params = random_params(cells, 4)
    p = double(params)

    def leaf(word):
        row = {name: table["embedding"][word] for name, table in p["leaf"].items()}
        matrix = np.diag(row["d"])
        for k in range(2):
            matrix = matrix + np.outer(row["u"][k::2], row["v"][k * HIDDEN : (k + 1) * HIDDEN])
        return row["vector"], matrix

    (a, matrix_a), (b, matrix_b) = leaf(1), leaf(3)
    w = p["node"]["vector"]["kernel"].T
    vector = np.tanh(w @ np.concatenate([matrix_b @ a, matrix_a @ b]) + p["node"]["vector"]["bias"])
    w_m = p["node"]["matrix"]
    matrix = w_m[:, :HIDDEN] @ matrix_a + w_m[:, HIDDEN:] @ matrix_b
    logits = vector @ p["output"]["kernel"] + p["output"]["bias"]

    assert_equal(cells.leaf(params, 1), (a, matrix_a))
    got = cells.node(params, cells.leaf(params, 1), cells.leaf(params, 3))
    assert_equal(got, (vector, matrix))
    assert_equal(mvrnn.classifier(cells)(params, (0, (0, 1), (0, 3))), logits)


def test_words_of_the_mv_rnn_begin_near_the_identity():
    cells = mvrnn.flax_cells(50, 3, 16)
    params = cells.init(jax.random.key(5))
    words = jnp.arange(50)
    vectors, matrices = jax.jit(jax.vmap(cells.leaf, (None, 0)))(params, words)
    assert np.abs(np.asarray(matrices) - np.eye(16)).mean() < 0.02
    _, above = cells.node(params, (vectors[0], matrices[0]), (vectors[1], matrices[1]))
    assert np.abs(above - (matrices[0] + matrices[1]) / 2).max() < 0.2
    assert np.linalg.matrix_rank(matrices[0] - np.eye(16), tol=1e-4) == 3


def test_two_kinds_against_their_equations():
    """Each kind has weights of its own."""
    cells = twotypes.flax_cells(4, 3, HIDDEN)
    params = random_params(cells, 6)
    p = double(params)

    def leaf(word):
        dense = p["leaf"]["params"]["Dense_0"]
        e = p["leaf"]["params"]["Embed_0"]["embedding"][word]
        i, o, u = np.split(e @ dense["kernel"] + dense["bias"], 3)
        c = sigmoid(i) * np.tanh(u)
        return sigmoid(o) * np.tanh(c), c

    (left_h, left_c), (right_h, right_c) = leaf(1), leaf(3)
    assert_equal(cells.leaf(params, 1), (left_h, left_c))
    states = cells.leaf(params, 1), cells.leaf(params, 3)
    for kind in (0, 1):
        dense = p["nodes"][kind]["params"]["Dense_0"]
        gates = np.concatenate([left_h, right_h]) @ dense["kernel"] + dense["bias"]
        i, f_l, f_r, o, u = np.split(gates, 5)
        c = sigmoid(i) * np.tanh(u) + sigmoid(f_l) * left_c + sigmoid(f_r) * right_c
        h = sigmoid(o) * np.tanh(c)
        logits = h @ p["output"]["params"]["kernel"] + p["output"]["params"]["bias"]
        assert_equal(cells.nodes[kind](params, *states), (h, c))
        assert_equal(twotypes.classifier(cells)(params, (0, (0, 1), (0, 3), kind)), logits)


def test_either_kind_begins_with_weights_of_its_own():
    params = twotypes.flax_cells(4, 3, HIDDEN).init(jax.random.key(0))
    first, second = (node["params"]["Dense_0"]["kernel"] for node in params["nodes"])
    assert np.abs(first - second).max() > 0.1
