"""What a node is: operations, cells, or what always runs together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import (
    assert_close,
    assert_no_recompile,
    check,
    loop,
    mostly_slow,
    random_tree,
)
from flax import linen, nnx

import jedbatch
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree

H = 4
WORDS = 20
MODES = ("cell", "auto")


def plain(fn):
    """The function that a cell wraps."""
    return fn.cell.fn


def raw_scorer():
    """The TreeLSTM of `jedbatch.models` without a cell, except for sums."""
    cells = tree.plain_cells(WORDS, 5, H)
    return tree.scorer(
        cells._replace(leaf=plain(cells.leaf), node=plain(cells.node), score=plain(cells.score))
    )


def tree_lstm(embed, leaf, node, output):
    """A TreeLSTM in one function, from four layers of (params, input)."""

    def fn(params, tree):
        def visit(t):
            if isinstance(t, tuple):
                (left, a), (right, b) = visit(t[0]), visit(t[1])
                gates = node(params, jnp.concatenate([left, right]))
                i, f, g, o, u = jnp.split(gates, 5)
                c = jax.nn.sigmoid(i) * jnp.tanh(u)
                c = c + jax.nn.sigmoid(f) * a + jax.nn.sigmoid(g) * b
            else:
                i, o, u = jnp.split(leaf(params, embed(params, t)), 3)
                c = jax.nn.sigmoid(i) * jnp.tanh(u)
            return jax.nn.sigmoid(o) * jnp.tanh(c), c

        return output(params, visit(tree)[0])

    return fn


SHAPES = {"leaf": (H, 3 * H), "node": (2 * H, 5 * H), "output": (H, 3)}


def word_trees(num, seed, largest=8):
    """Nested pairs of words: a path, two sizes and some more."""
    rng = np.random.default_rng(seed)
    word = lambda: int(rng.integers(WORDS))  # noqa: E731
    path = word()
    for _ in range(4):
        path = (path, word())
    sizes = [1, 2, *rng.integers(2, largest, num).tolist()]
    return [path, *(random_tree(rng, n, word) for n in sizes)]


def raw_tree(num=5, seed=0):
    params = programs.weights(seed, E=(WORDS, H), **SHAPES)
    layer = lambda name: lambda params, x: x @ params[name] + 0.1  # noqa: E731
    fn = tree_lstm(lambda p, t: p["E"][t], *map(layer, SHAPES))
    return fn, params, word_trees(num, seed)


def linen_tree(num=5, seed=0):
    embed = linen.Embed(WORDS, H)
    layers = {name: linen.Dense(shape[1]) for name, shape in SHAPES.items()}
    key = jax.random.key(seed)
    params = {n: layers[n].init(key, jnp.zeros(shape[0])) for n, shape in SHAPES.items()}
    params["E"] = embed.init(key, jnp.int32(0))
    layer = lambda name: lambda p, x: layers[name].apply(p[name], x)  # noqa: E731
    fn = tree_lstm(lambda p, t: embed.apply(p["E"], jnp.int32(t)), *map(layer, SHAPES))
    return fn, params, word_trees(num, seed)


def nnx_tree(num=5, seed=0):
    rngs = nnx.Rngs(seed)
    layers = {name: nnx.Linear(*shape, rngs=rngs) for name, shape in SHAPES.items()}
    split = {n: nnx.split(x) for n, x in {**layers, "E": nnx.Embed(WORDS, H, rngs=rngs)}.items()}
    layer = lambda name: lambda p, x: nnx.merge(split[name][0], p[name])(x)  # noqa: E731
    fn = tree_lstm(lambda p, t: layer("E")(p, jnp.int32(t)), *map(layer, SHAPES))
    return fn, {name: state for name, (_, state) in split.items()}, word_trees(num, seed)


def recurrent(step):
    """A loop over a sequence of vectors."""

    def fn(params, sequence):
        h = params["b"]
        for x in sequence:
            h = step(params, h, x)
        return h @ params["out"]

    return fn


def step(params, h, x):
    gate = jax.nn.sigmoid(x @ params["U"] + h @ params["W"])
    return (1 - gate) * h + gate * jnp.tanh(x @ params["V"] + params["b"])


def ragged(num=6, seed=0, make=recurrent, step=step):
    params = programs.weights(seed, U=(3, H), V=(3, H), W=(H, H), b=(H,), out=(H, 2))
    rng = np.random.default_rng(seed)
    lengths = [0, 1, *rng.integers(2, 9, num).tolist()]
    return make(step), params, [rng.normal(size=(n, 3)).astype(np.float32) for n in lengths]


def lattice(num=5, seed=0):
    """A word begins and ends at characters; a character reads the words that end there."""

    def fn(params, instance):
        characters, words = instance
        states = [params["b"]]
        for k, x in enumerate(characters):
            h = jnp.tanh(x @ params["V"] + states[-1] @ params["W"])
            for begin, end in words:
                if end == k:
                    h = h + jax.nn.sigmoid(states[begin] @ params["M"]) * states[begin]
            states.append(h)
        return states[-1]

    rng = np.random.default_rng(seed)
    instances = []
    for _ in range(num):
        n = int(rng.integers(2, 8))
        ends = rng.integers(1, n, 4).tolist()
        words = tuple((int(rng.integers(0, e)), e) for e in ends)
        instances.append((rng.normal(size=(n, 3)).astype(np.float32), words))
    return fn, programs.weights(seed, V=(3, H), W=(H, H), M=(H, H), b=(H,)), instances


def child_sum(wrap):
    """A child-sum TreeLSTM without its cell state, whose node is wrapped."""

    @wrap
    def node(params, x, *children):
        total = sum(children, start=params["b"])
        kept = params["b"]
        for child in children:
            kept = kept + jax.nn.sigmoid(x @ params["F"] + child @ params["G"]) * child
        return jnp.tanh(x @ params["V"] + total @ params["W"]) + kept

    def fn(params, tree):
        word, *children = tree
        return node(params, params["E"][word], *(fn(params, child) for child in children))

    return fn


def many_children(num=6, seed=0, wrap=lambda f: f, most=9):
    rng = np.random.default_rng(seed)

    def grow(budget, width):
        children = rng.integers(0, budget, width) if budget > 1 else ()
        return (
            int(rng.integers(WORDS)),
            *(grow(int(b), int(rng.integers(0, 4))) for b in children),
        )

    leaf = (1,)
    instances = [(k, *[leaf] * k) for k in range(most + 1)]
    instances += [grow(6, int(rng.integers(1, most + 1))) for _ in range(num)]
    shapes = {"F": (H, H), "G": (H, H), "V": (H, H), "W": (H, H), "b": (H,), "E": (WORDS, H)}
    return child_sum(wrap), programs.weights(seed, **shapes), instances


def helpers_everywhere(num=5, seed=0):
    """A helper called from several places, and from another helper."""
    mix = lambda params, a, b: jnp.tanh(a @ params["W"] + b)  # noqa: E731
    twice = lambda params, a: mix(params, mix(params, a, a), params["b"])  # noqa: E731

    def fn(params, t):
        if not isinstance(t, tuple):
            return twice(params, params["E"][t])
        left, right = fn(params, t[0]), fn(params, t[1])
        return mix(params, left, right) + twice(params, right) - mix(params, right, left)

    return fn, programs.weights(seed, W=(H, H), b=(H,), E=(WORDS, H)), word_trees(num, seed, 5)


def numbers(num=5, seed=0):
    """Literals that are the same everywhere, and others that vary."""

    def fn(params, n):
        h = params["b"]
        for i in range(n):
            h = jnp.sin(h * 0.5 + 1) * i + jnp.mean(h) / n - h[i % H] + h[1]
        return 2.0 * h

    return fn, programs.weights(seed, b=(H,)), [3, *range(num)]


MODELS = [
    raw_tree,
    linen_tree,
    nnx_tree,
    ragged,
    lattice,
    many_children,
    lambda: many_children(wrap=jedbatch.cell),
    helpers_everywhere,
    numbers,
]
NAMES = [m.__name__ for m in MODELS]
NAMES[6] = "many_children_cell"


FAST = [("lattice", "auto"), ("helpers_everywhere", "cell")]
IN_ORACLE = ("raw_tree", "linen_tree")  # `tests/program/test_oracle.py` has programs like them
PER_CELL = ("lattice", "many_children", "many_children_cell", "helpers_everywhere", "numbers")
CASES = [
    pytest.param(
        make, mode, marks=[] if (name, mode) in FAST else pytest.mark.slow, id=f"{name}-{mode}"
    )
    for make, name in zip(MODELS, NAMES, strict=True)
    for mode in MODES
    if (name in PER_CELL if mode == "cell" else name not in IN_ORACLE)
]


@pytest.mark.parametrize(("make", "mode"), CASES)
def test_agrees_with_loop(make, mode):
    check(*make(), granularity=mode, rtol=3e-5)


def planned(fn, params, instances, **options):
    """The plan of a new batched function."""
    plan = jedbatch.batch(fn, out_axes=None, **options).plan(params, instances)
    plan.graph.check()
    return plan


def num_types(graph, *primitives):
    """Types in use; of those, if some are named, only types that perform one of these."""

    def performs(program):
        inner = [getattr(p, "jaxpr", p) for e in program.eqns for p in e.params.values()]
        return any(e.primitive.name in primitives for e in program.eqns) or any(
            performs(p) for p in inner if hasattr(p, "eqns")
        )

    used = [graph.types[t] for t in np.unique(graph.node_type)]
    return sum(not primitives or performs(t.operation.jaxpr.jaxpr) for t in used)


def test_tree_is_found():
    """The same types and batches as with cells, also where a label is looked up in each node.

    Leaves are one node with their scores.
    """
    cells = tree.plain_cells(WORDS, 5, H)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    trees = synthetic_treebank(16, seed=4, num_words=WORDS)
    marked = planned(tree.scorer(cells), params, trees)
    found = planned(raw_scorer(), params, trees, granularity="auto")
    num_leaves = np.count_nonzero(marked.graph.node_type == marked.graph.node_type[0])
    assert marked.graph.types[marked.graph.node_type[0]].name == "leaf"
    assert num_types(found.graph) == num_types(marked.graph)
    assert len(found.graph.node_type) == len(marked.graph.node_type) - num_leaves
    assert len(found.schedule) == len(marked.schedule)


@pytest.mark.parametrize("make", [raw_tree, linen_tree, nnx_tree])
def test_layers_are_found(make):
    """Leaves, nodes and results, whatever the layers are written in."""
    fn, params, trees = make(20)
    graph = planned(fn, params, trees, granularity="auto").graph
    sizes = [str(t).count(",") + 1 for t in trees]
    assert num_types(graph) == 3
    assert len(graph.node_type) == sum(2 * n - 1 + 1 for n in sizes)


def test_loop_is_found():
    fn, params, sequences = ragged(10)
    marked = planned(ragged(step=jedbatch.cell(step))[0], params, sequences)
    found = planned(fn, params, sequences, granularity="auto")
    assert num_types(found.graph) == num_types(marked.graph)
    assert len(found.graph.node_type) == len(marked.graph.node_type)
    assert len(found.schedule) == len(marked.schedule)


@pytest.mark.parametrize("make", mostly_slow([raw_tree, many_children, ragged], "raw_tree"))
def test_unseen_topologies_add_nothing(make):
    """Neither types nor programs, after others were met."""
    fn, params, large = make(40, seed=1)
    batched = jedbatch.batch(fn, granularity="auto")
    batched(params, large)
    batched(params, make(40, seed=2)[2])
    before = len(batched.plan(params, large).graph.types)
    with assert_no_recompile():
        for seed in range(3, 6):
            _, _, few = make(40, seed=seed)
            batched(params, few)
    assert len(batched.plan(params, large).graph.types) == before


@pytest.mark.slow
def test_many_ways_are_not_told_apart():
    """Six decisions in a row make 64 ways through a round; 40 are taken here."""

    def fn(params, labels):
        h = params["E"][labels[0]]
        for label in labels:
            h = jnp.tanh(h @ params["W"])
            h = (jnp.sin(h) if label & 1 else jnp.cos(h)) * params["b"]
            h = (jnp.square(h) if label & 2 else jnp.abs(h)) + params["b"]
            h = (jnp.exp(h) if label & 4 else jnp.log1p(h)) * 0.1
            h = (jax.nn.relu(h) if label & 8 else jax.nn.silu(h)) - params["b"]
            h = (jnp.tan(h) if label & 16 else jnp.sinh(h)) * params["b"]
            h = (jax.nn.softplus(h) if label & 32 else jax.nn.sigmoid(h)) + 0.1
        return h

    params = programs.weights(0, W=(H, H), b=(H,), E=(64, H))
    params = jax.tree.map(jnp.abs, params)
    rng = np.random.default_rng(0)
    instances = [tuple(rng.integers(0, 64, n).tolist()) for n in (3, 20, 20, 20)]
    batched = check(fn, params, instances, granularity="auto", rtol=3e-5)
    assert num_types(batched.plan(params, instances).graph) <= 30


def test_numbers_of_children_share_products():
    """Types with a matrix product do not multiply with the numbers of children there are."""
    counts = []
    for most in (4, 9):
        fn, params, instances = many_children(20, most=most)
        counts.append(
            num_types(planned(fn, params, instances, granularity="auto").graph, "dot_general")
        )
    assert max(counts) <= 5


def test_cells_stay_whole():
    """However many variants of them there are."""
    fn, params, instances = many_children(wrap=jedbatch.cell)
    graph = planned(fn, params, instances, granularity="auto").graph
    calls = sum(str(tree).count("(") for tree in instances)
    assert sum(graph.types[t].name == "node" for t in graph.node_type) == calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", MODELS, ids=NAMES)
def test_order_of_instances_makes_no_difference(make, mode):
    fn, params, instances = make()

    def described(instances):
        graph = planned(fn, params, instances, granularity=mode).graph
        return [
            (
                [str(graph.types[t]) for t in part.node_type],
                part.operand_ptr.tolist(),
                part.operand.tolist(),
                part.outputs.tolist(),
            )
            for part in graph.split()
        ]

    assert described(instances) == described(instances[::-1])[::-1]


@pytest.mark.parametrize("mode", MODES)
def test_deep_recursion(mode):
    """Call sites are read near the top of a deep stack, not down to its bottom."""

    def fn(params, n):
        return jnp.tanh(fn(params, n - 1) * params["b"] + 0.5) if n else params["E"][1]

    params = programs.weights(0, b=(H,), E=(WORDS, H))
    short = check(fn, params, [1, 3, 7], granularity=mode)
    deep = short.plan(params, [5000])
    deep.graph.check()
    assert len(deep.graph.node_type) == 1 + 5000 * (1 if mode == "auto" else 3)


@pytest.mark.parametrize("mode", MODES)
def test_instances_without_a_node(mode):
    """All that is returned is a row of what was given."""
    instances = list(np.random.default_rng(0).normal(size=(3, 2, H)).astype(np.float32))
    batched = check(lambda params, x: x[-1], jnp.ones(H), instances, granularity=mode)
    assert not len(batched.plan(jnp.ones(H), instances).graph.node_type)


def test_types_are_new_where_something_is_new():
    """Not for other trees of known nodes; once for another number, and for another operation."""

    def fn(params, instance):
        tree, scale, extra = instance

        def visit(t):
            if not isinstance(t, tuple):
                return jnp.tanh(params["E"][t] * scale)
            left, right = visit(t[0]), visit(t[1])
            h = jnp.sin(left @ params["W"] + 0.5 * right)
            return jnp.abs(h * params["b"]) + 0.1 if extra else h

        return visit(tree)

    params = programs.weights(0, W=(H, H), b=(H,), E=(WORDS, H))
    batched = jedbatch.batch(fn, granularity="auto")
    known = set()

    def new_types(seed, scale, extra):
        instances = [(t, scale, extra) for t in word_trees(8, seed)]
        assert_close(batched(params, instances), loop(fn, params, instances), 3e-5)
        present = set(batched.plan(params, instances).graph.present_types)
        new = len(present - known)
        known.update(present)
        assert len(present) == 2
        return new

    assert new_types(0, 2.0, False) == 2
    assert new_types(1, 2.0, False) == 0
    assert new_types(2, 3.0, False) == 1  # had been the same number so far
    assert new_types(3, 2.5, False) == 0
    assert new_types(4, 2.5, True) == 1
    assert new_types(5, 1.5, True) == 0
    assert new_types(6, 1.5, False) == 0


def test_granularity_is_checked():
    with pytest.raises(ValueError, match=r"granularity='fine'; expected one of .*'auto'"):
        jedbatch.batch(lambda p, x: x, granularity="fine")
    with pytest.raises(ValueError, match=r"granularity='op'.*no \"op\" any more.*Leave out"):
        jedbatch.batch(lambda p, x: x, granularity="op")


def test_twins_have_the_same_granularity():
    fn, params, trees = raw_tree()
    batched = jedbatch.batch(fn, granularity="auto")
    nodes = len(batched.plan(params, trees).graph.node_type)
    twin = batched._core.twin()
    session, _ = twin.session((params,))
    plan = twin.plan(session, [(x,) for x in trees], gradient=True)
    assert len(plan.graph.node_type) == nodes
