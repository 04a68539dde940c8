"""Parameters that a library keeps in a context, as `haiku.transform` does."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check

import jedbatch
from jedbatch.errors import SymbolicValueError

CONTEXTS = []  # of parameters by the names of layers; the innermost last


def transform(function):
    """A function of parameters, in which layers find them by name."""

    def apply(params, *args):
        CONTEXTS.append(params)
        try:
            return function(*args)
        finally:
            CONTEXTS.pop()

    return apply


class Layer:
    """A layer that knows its name and nothing else."""

    def __init__(self, name):
        self.name = name
        self.calls = []

    def __call__(self, *parts):
        params = CONTEXTS[-1][self.name]
        return jnp.tanh(jnp.concatenate(parts) @ params["w"] + params["b"])


def tree_with(leaf, node):
    """Returns a function of a tree that applies `leaf` and `node`."""

    def encode(tree):
        if isinstance(tree, tuple):
            return node(encode(tree[0]), encode(tree[1]))
        return leaf(tree)

    return encode


def plain(tree):
    return tree_with(Layer("leaf"), Layer("node"))(tree)


def with_cells(tree):
    return tree_with(*(jedbatch.cell(Layer(name), name=name) for name in ("leaf", "node")))(tree)


def with_cells_of_layers(tree):
    leaf, node = Layer("leaf"), Layer("node")
    return tree_with(
        jedbatch.cell(lambda x: leaf(x), name="leaf"),
        jedbatch.cell(lambda a, b: node(a, b), name="node"),
    )(tree)


leaf_in_context = jedbatch.cell(lambda x: Layer("leaf")(x), name="leaf")
node_in_context = jedbatch.cell(lambda a, b: Layer("node")(a, b), name="node")
global_cells = tree_with(leaf_in_context, node_in_context)

cells_of_applies = tuple(
    jedbatch.cell(transform(lambda *parts, name=name: Layer(name)(*parts)), name=name)
    for name in ("leaf", "node")
)


def cells_of_transforms(params, tree):
    leaf, node = ((lambda *x, c=c: c(params, *x)) for c in cells_of_applies)
    return tree_with(leaf, node)(tree)


def random_params(seed):
    rng = np.random.default_rng(seed)
    sizes = {"leaf": 2, "node": 6}
    return {
        name: {
            "w": jnp.asarray(rng.normal(size=(n, 3)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=3), jnp.float32),
        }
        for name, n in sizes.items()
    }


A, B, C = np.random.default_rng(2).normal(size=(3, 2)).astype(np.float32)
TREES = [((A, B), C), (B, A), C, (A, (B, (C, A)))]
P, Q = random_params(0), random_params(1)


@pytest.mark.parametrize(
    ("apply", "granularity"),
    [
        pytest.param(transform(plain), "auto", marks=pytest.mark.slow),
        (cells_of_transforms, "cell"),
    ],
)
def test_models_with_parameters_in_a_context_batch_as_well_as_any(apply, granularity):
    batched = jedbatch.batch(apply, granularity=granularity)
    check(apply, P, TREES, granularity=granularity)
    for trees in (TREES, TREES[::-1], [(x, x) for x in TREES]):
        plan = batched.plan(P, trees)
        assert len(plan.graph.present_types) == 2
        assert len(plan.graph.node_type) == sum(map(size, trees))


def size(tree):
    return 1 + sum(map(size, tree)) if isinstance(tree, tuple) else 1


SEARCHING = [with_cells, with_cells_of_layers, global_cells]


@pytest.mark.parametrize("tree_fn", SEARCHING)
def test_cells_that_find_parameters_in_a_context_are_refused(tree_fn):
    batched = jedbatch.batch(transform(tree_fn))
    for _ in range(2):
        with pytest.raises(SymbolicValueError, match=r"`(leaf|node)` reads .*float32\[.*Haiku"):
            batched(P, TREES)


@pytest.mark.parametrize("apply", [transform(plain), cells_of_transforms])
def test_two_contexts(apply):
    def difference(params, tree):
        return apply(params[0], tree) - 2 * apply(params[1], tree)

    check(difference, (P, Q), TREES[:2], gradients=apply is cells_of_transforms)


def test_values_of_an_instance_in_a_context():
    def fn(params, tree):
        weights = {"w": params["node"]["w"] * transform(plain)(params, tree).sum()}
        return transform(global_cells)(
            {"leaf": params["leaf"], "node": params["node"] | weights}, tree
        )

    with pytest.raises(SymbolicValueError, match="the cell as an argument"):
        jedbatch.batch(fn)(P, TREES)


class Weighted:
    """A layer that holds its parameters."""

    def __init__(self, params):
        self.params = params

    def __call__(self, *parts):
        return jnp.tanh(jnp.concatenate(parts) @ self.params["w"] + self.params["b"])


def with_weighted_layers(params, tree):
    leaf, node = Weighted(params["leaf"]), Weighted(params["node"])
    return tree_with(
        jedbatch.cell(lambda x: leaf(x), name="leaf"),
        jedbatch.cell(lambda a, b: node(a, b), name="node"),
    )(tree)


def test_layers_made_for_each_instance_are_of_two_types():
    check(with_weighted_layers, P, TREES)
    numbered = [(k, (A, B)) for k in range(40)]  # each recorded by itself
    plan = jedbatch.batch(lambda p, item: with_weighted_layers(p, item[1])).plan(P, numbered)
    assert len(plan.graph.present_types) == 2
