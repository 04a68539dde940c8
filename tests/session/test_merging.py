"""Functions without cells, whose first minibatches say whether operations are merged."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_no_recompile, check, loop, random_tree

import jedbatch
from jedbatch._session.records import degenerate
from jedbatch.errors import NoCellsWarning

H = 4
PARAMS = programs.weights(0, E=(20, H), W=(2 * H, H), b=(H,))
OPERATORS = {
    "add": lambda a, b: a + b,
    "max": jnp.maximum,
    "divide": lambda a, b: a / jnp.where(jnp.abs(b) > 0.1, b, 1.0),
    "root": lambda a: jnp.sqrt(jnp.abs(a) + 0.5),
}
CELLS = {name: jedbatch.cell(fn, name=name) for name, fn in OPERATORS.items()}


def encode(params, tree):
    """Six operations a node, and no cell."""
    if isinstance(tree, int):
        return jnp.tanh(params["E"][tree])
    left, right = encode(params, tree[0]), encode(params, tree[1])
    gate = jax.nn.sigmoid(left * params["b"])
    return gate * jnp.tanh(jnp.concatenate([left, right]) @ params["W"]) + (1 - gate) * right


def trees(num, seed, largest=9):
    rng = np.random.default_rng(seed)
    word = lambda: int(rng.integers(20))  # noqa: E731
    return [random_tree(rng, int(n), word) for n in rng.integers(1, largest, num)]


def evaluator(operators):
    """Evaluates expressions, by operators of their own or by cells."""

    def evaluate(params, expression):
        if isinstance(expression, int):
            return params["E"][expression]
        name, *operands = expression
        return operators[name](*[evaluate(params, x) for x in operands])

    return evaluate


def expressions(num, seed, names=tuple(OPERATORS)):
    rng = np.random.default_rng(seed)

    def grow(size):
        if size <= 1:
            return int(rng.integers(20))
        name = names[rng.integers(len(names))]
        if name == "root":
            return name, grow(size - 1)
        left = int(rng.integers(1, size))
        return name, grow(left), grow(size - left)

    return [grow(int(n)) for n in rng.integers(2, 20, num)]


def assert_close(got, expected):
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-6)


def num_nodes(batched, instances, params=PARAMS):
    return len(batched.plan(params, instances).graph.node_type)


def test_a_model_without_cells_is_merged_before_anything_is_compiled():
    """As with "auto", and unseen minibatches neither compile nor bring new types."""
    batched = check(encode, PARAMS, trees(64, seed=0))
    plan = batched.plan(PARAMS, trees(64, seed=0))
    chosen = jedbatch.batch(encode, granularity="auto")
    found = chosen.plan(PARAMS, trees(64, seed=0))
    assert len(plan.graph.present_types) == len(found.graph.present_types) == 2
    assert len(plan.graph.node_type) == len(found.graph.node_type)
    assert len(plan.schedule) == len(found.schedule)

    batched = jedbatch.batch(encode)
    batched(PARAMS, trees(64, seed=0))
    assert batched.compilations == 1
    num_types = len(batched.plan(PARAMS, trees(64, seed=0)).graph.types)
    for seed in range(1, 4):
        few = trees(48, seed)
        expected = loop(encode, PARAMS, few)
        assert_close(batched(PARAMS, few), expected)
        assert_close(chosen(PARAMS, few), expected)
    assert batched.compilations <= chosen.compilations + 1  # which has not met the first minibatch
    assert len(batched.plan(PARAMS, few).graph.types) == num_types


def test_cells_of_lists_are_cells():
    """Also where each node is of a type that is made of a cell's, for lists of many lengths."""

    @jedbatch.cell
    def document(params, states):
        q, k, v = (jnp.stack(states) @ params[name] for name in "qkv")
        return (jax.nn.softmax(jnp.tanh(q @ k.T)) @ v).sum(0)

    word = jedbatch.cell(lambda params, x: jnp.tanh(params["E"][x]))
    fn = lambda params, words: document(params, [word(params, x) for x in words])  # noqa: E731
    params = programs.weights(0, E=(20, 64), q=(64, 16), k=(64, 16), v=(64, 16))
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 500, size=(3, 10))
    minibatches = [[rng.integers(20, size=n).tolist() for n in several] for several in lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoCellsWarning)
        batched = jedbatch.batch(fn)
        plan = [batched.plan(params, minibatch) for minibatch in minibatches][-1]
    assert len(plan.graph.node_type) > 2048  # operations that would be warned of
    assert len(plan.graph.present_types) <= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_small_minibatches_come_first():
    """One more program once enough has been met; what was planned before stays as it is."""
    batched = jedbatch.batch(encode)
    operations = jedbatch.batch(encode, granularity="cell")
    few, many = trees(3, seed=5), trees(64, seed=6)
    early = batched.plan(PARAMS, few)
    expected = loop(encode, PARAMS, few)
    assert_close(batched.apply(PARAMS, early), expected)
    assert len(early.graph.node_type) == num_nodes(operations, few)
    compiled = batched.compilations
    mixed = many + few
    assert_close(batched(PARAMS, mixed), loop(encode, PARAMS, mixed))
    assert batched.compilations == compiled + 1
    assert num_nodes(batched, few) < num_nodes(operations, few) / 3
    assert_close(batched(PARAMS, few), expected)
    with assert_no_recompile():
        assert_close(batched.apply(PARAMS, early), expected)

    def loss(params, plan):
        return jnp.sin(batched.apply(params, plan)).sum()

    late = batched.plan(PARAMS, few)
    for x, y in zip(
        jax.tree.leaves(jax.grad(loss)(PARAMS, early)),
        jax.tree.leaves(jax.jit(jax.grad(loss))(PARAMS, late)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_expressions_are_merged_where_operators_are_several_operations():
    instances = expressions(96, seed=0)
    batched = check(evaluator(OPERATORS), PARAMS, instances, rtol=3e-5)
    with_cells = jedbatch.batch(evaluator(CELLS)).plan(PARAMS, instances)
    plan = batched.plan(PARAMS, instances)
    assert len(plan.graph.node_type) == len(with_cells.graph.node_type)
    assert len(plan.schedule) <= len(with_cells.schedule)
    assert len(plan.graph.present_types) == len(with_cells.graph.present_types)


@pytest.mark.parametrize(
    ("fn", "instances"),
    [
        (evaluator(OPERATORS), expressions(64, seed=1, names=("add", "max"))),
        (evaluator(CELLS), expressions(64, seed=1)),
        (lambda params, x: params["b"] * x, list(range(600))),
    ],
    ids=["single operations", "cells", "one operation"],
)
def test_what_has_nothing_to_merge_stays_as_it_is(fn, instances):
    graph = jedbatch.batch(fn).plan(PARAMS, instances).graph
    other = jedbatch.batch(fn, granularity="cell").plan(PARAMS, instances).graph
    assert [graph.types[t].name for t in graph.node_type] == [
        other.types[t].name for t in other.node_type
    ]
    assert graph.operand.tolist() == other.operand.tolist()


@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_arrays_of_any_length_are_still_packed():
    """Those of another length are recorded for all lengths, as if nothing had been merged."""

    def fn(params, instance):
        tree, rows = instance
        return jnp.tanh(rows @ params["W"][:H]).sum(0) * encode(params, tree)

    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(3, H)).astype(np.float32) for _ in range(64)]
    batched = jedbatch.batch(fn)
    equal = list(zip(trees(64, seed=2), rows, strict=True))
    assert_close(batched(PARAMS, equal), loop(fn, PARAMS, equal))
    assert num_nodes(batched, equal) < num_nodes(jedbatch.batch(fn, granularity="cell"), equal) / 2
    ragged = [(tree, x[: i % 3 + 1]) for i, (tree, x) in enumerate(equal)]
    plan = batched.plan(PARAMS, ragged)
    assert plan.ragged_rows is not None
    assert "grouped by equal shapes" not in str(plan)
    assert_close(batched.apply(PARAMS, plan), loop(fn, PARAMS, ragged))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_decisions_on_values_and_closures():
    """The function starts to decide after operations were merged, and it closes over a weight."""

    scale = jnp.full(H, 1.5)

    def fn(params, instance):
        tree, limit = instance
        h = encode(params, tree) * scale
        while limit and jnp.abs(h).max() > limit:
            h = 0.5 * h
        return h

    batched = jedbatch.batch(fn)
    plain = [(tree, 0) for tree in trees(64, seed=3)]
    assert_close(batched(PARAMS, plain), loop(fn, PARAMS, plain))
    assert num_nodes(batched, plain) < num_nodes(jedbatch.batch(fn, granularity="cell"), plain) / 3
    deciding = [(tree, 0.2) for tree in trees(12, seed=4)]
    assert_close(batched(PARAMS, deciding), loop(fn, PARAMS, deciding))


@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_warming_and_learning():
    """Both record before anything is planned."""
    batched = jedbatch.batch(encode)
    batched.learn(PARAMS, trees(64, seed=7))
    batched.warm(PARAMS, trees(64, seed=8), batch_size=16, calls=False)
    few = trees(12, seed=9)
    assert len(batched.plan(PARAMS, few).graph.present_types) == 2
    assert_close(batched(PARAMS, few), loop(encode, PARAMS, few))


def test_minibatches_of_one():
    """They come to the same as a large one."""
    batched = jedbatch.batch(encode)
    for tree in trees(40, seed=11, largest=12):
        plan = batched.plan(PARAMS, [tree])
    few = trees(12, seed=12)
    plan = batched.plan(PARAMS, few)
    assert len(plan.graph.present_types) <= 4
    assert_close(batched.apply(PARAMS, plan), loop(encode, PARAMS, few))


def compose(params, left, right):
    """Three operations, and more in a helper."""
    return mixed(params, left, jnp.tanh(jnp.concatenate([left, right]) @ params["W"]))


def mixed(params, left, right):
    gate = jax.nn.sigmoid(left * params["b"])
    return gate * left + (1 - gate) * right


def prepared(params, state):
    return jnp.tanh(jnp.sin(state) * params["b"])


def leaf(params, word):
    return jnp.tanh(jnp.sin(params["E"][word]) * params["b"] + params["b"])


def by_parts(params, tree):
    if isinstance(tree, int):
        return leaf(params, tree)
    return compose(params, *[by_parts(params, child) for child in tree])


def steps(params, words):
    h = params["b"]
    for word in words[1:]:
        h = compose(params, h, leaf(params, word))
    return h


def inline_steps(params, words):
    h = params["b"]
    for word in words[1:]:
        h = h + jnp.tanh(jnp.sin(params["E"][word]) * h + params["b"])
    return h


def words(num, seed, largest):
    """Tuples that are no sequences of numbers alone, so each is recorded."""
    rng = np.random.default_rng(seed)
    numbers = [rng.integers(20, size=int(n)).tolist() for n in rng.integers(1, largest, num)]
    return [("words", *x) for x in numbers]


def place(fn):
    return rf"`{fn.__name__}` \({re.escape(__file__)}:{fn.__code__.co_firstlineno}\)"


MARK, MAKE = "write `@jedbatch.cell` above ", "make a function with .* for one node in "
COSTLY = {
    "parts": (by_parts, trees, MARK + place(compose) + ", " + place(leaf) + r"\."),
    "steps": (
        lambda params, xs: steps(params, xs),
        words,
        MARK + place(compose) + ", " + place(leaf) + r"\.",
    ),
    "recursive": (encode, trees, MAKE + place(encode) + r"\."),
    "loop": (inline_steps, words, MAKE + place(inline_steps) + r"\."),
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_recording_is_warned_of_at_once(name):
    """With the functions to mark, how many operations there were, and what a node has cost."""
    fn, made, expected = COSTLY[name]
    instances = list(dict.fromkeys(made(60, 20, 60)))  # equal ones are recorded once
    with pytest.warns(NoCellsWarning, match=expected) as warned:
        plan = jedbatch.batch(fn).plan(PARAMS, instances, gradient=False)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    single = jedbatch.batch(fn, granularity="cell").plan(PARAMS, instances, gradient=False)
    num_operations, num_nodes = (len(x.graph.node_type) for x in (single, plan))
    found = re.search(
        r"(\d+) operations .* in (\d+) ms, ([\d.]+) µs each, "
        r"or (\d+) µs for each of the (\d+) nodes",
        str(warned[0].message),
    )
    assert (int(found[1]), int(found[5])) == (num_operations, num_nodes)
    each, node = float(found[3]), int(found[4])
    assert each * num_operations / 1e3 == pytest.approx(int(found[2]), rel=0.1)
    assert node == pytest.approx(each * num_operations / num_nodes, rel=0.1)


def test_single_operations_are_warned_of():
    """Nothing is merged where each operation follows on any other; cells are recorded at once."""
    operations = {"add": jnp.add, "multiply": jnp.multiply, "divide": jnp.divide}

    def evaluate(params, tree):
        if isinstance(tree, int):
            return params["E"][tree]
        name, left, right = tree
        return operations[name](evaluate(params, left), evaluate(params, right))

    rng = np.random.default_rng(3)

    def expression(depth):
        if depth == 0:
            return int(rng.integers(20))
        name = str(rng.choice(list(operations)))
        return name, expression(depth - 1), expression(depth - 1)

    instances = [expression(6) for _ in range(40)]
    with pytest.warns(NoCellsWarning, match=r"as `jedbatch\.cell\(jnp\.add\)`, in") as warned:
        plan = jedbatch.batch(evaluate).plan(PARAMS, instances, gradient=False)
    assert f"{__file__}:{evaluate.__code__.co_firstlineno + 4}" in str(warned[0].message)
    assert "merged" not in str(warned[0].message)
    cells = {name: jedbatch.cell(operation) for name, operation in operations.items()}
    expected = len(plan.graph.node_type)
    operations |= cells
    assert len(jedbatch.batch(evaluate).plan(PARAMS, instances).graph.node_type) <= expected


def test_operations_between_cells_are_warned_of_where_they_take_long(monkeypatch):
    """Where nothing is traced any more; calls of cells alone are not warned of."""
    monkeypatch.setattr(degenerate, "MUCH_TIME", 0.0)
    node, word = jedbatch.cell(compose), jedbatch.cell(leaf)

    def between(params, tree):
        if isinstance(tree, int):
            return word(params, tree)
        left, right = [between(params, child) for child in tree]
        return node(params, left, prepared(params, right))

    def marked(params, tree):
        if isinstance(tree, int):
            return word(params, tree)
        return node(params, *[marked(params, child) for child in tree])

    def plan_some(fn):
        batched = jedbatch.batch(fn)
        for seed in range(30, 34):
            batched.plan(PARAMS, trees(60, seed, 40), gradient=False)

    plan_some(marked)
    with pytest.warns(NoCellsWarning, match=MARK + place(prepared)) as warned:
        plan_some(between)
    assert len(warned) == 1


def test_recording_is_warned_of_once_and_only_unasked():
    instances = trees(200, 20, largest=16)
    batched = jedbatch.batch(encode)
    few = [batched.plan(PARAMS, instances[k : k + 20], gradient=False) for k in range(0, 200, 20)]
    assert len({len(plan.graph.present_types) for plan in few[1:]}) == 1
    batched.plan(PARAMS, instances, gradient=False)  # known by now
    with pytest.warns(NoCellsWarning):
        batched.plan(PARAMS, trees(200, 21, largest=16), gradient=False)
    batched.plan(PARAMS, trees(200, 22, largest=16), gradient=False)
    for granularity in ("auto", "cell"):
        jedbatch.batch(encode, granularity=granularity).plan(PARAMS, instances, gradient=False)
    cells = jedbatch.cell(compose), jedbatch.cell(leaf)

    def marked(params, tree):
        if isinstance(tree, int):
            return cells[1](params, tree)
        return cells[0](params, *[marked(params, child) for child in tree])

    jedbatch.batch(marked).plan(PARAMS, instances, gradient=False)
