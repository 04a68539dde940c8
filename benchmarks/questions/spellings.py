"""Does planning cost the same, however a model is spelled?

One binary TreeLSTM, written as its users would: states as tuples, named tuples, dicts, dataclasses
and modules, cells as functions, methods, partials and modules, parameters as dicts and as modules
of Flax and Equinox, with arguments by position and by keyword, and without cells. Every minibatch
is new (64 trees of 5 to 40 leaves, some 2,800 nodes), planned for inference after seven others.

us_per_node      planning of an unseen minibatch, per node of a tree.
times_tuples     that, as a multiple of states as tuples and cells as functions, planned in turns.
plan_over_run    planning, as a multiple of running the plan.

Results of all spellings are compared with those of the first one.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jedbatch
from benchmarks import common

HIDDEN, WORDS = 128, 500
WARM, UNSEEN = 7, 15  # minibatches
SEEDS = itertools.count(1000)  # of unseen minibatches


class State(typing.NamedTuple):
    """A state as a named tuple."""

    h: jax.Array
    c: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    """A state as a dataclass that JAX knows."""

    h: jax.Array
    c: jax.Array


@flax.struct.dataclass
class Frozen:
    """A state as a dataclass of Flax."""

    h: jax.Array
    c: jax.Array


class Module(eqx.Module):
    """A state as a module of Equinox."""

    h: jax.Array
    c: jax.Array


def tree(random: np.random.Generator, leaves: int) -> Any:
    """A random tree: words, and pairs of trees."""
    if leaves == 1:
        return int(random.integers(WORDS))
    left = int(random.integers(1, leaves))
    return tree(random, left), tree(random, leaves - left)


def minibatch(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [tree(random, int(random.integers(5, 41))) for _ in range(64)]


def leaf(params: Any, word: Any) -> tuple[jax.Array, jax.Array]:
    row = params["E"][word]
    return jnp.tanh(row), row


def node(params: Any, hl: Any, cl: Any, hr: Any, cr: Any) -> tuple[jax.Array, jax.Array]:
    gates = jnp.concatenate([hl, hr]) @ params["W"] + params["b"]
    i, f, g, o, u = jnp.split(gates, 5)
    c = jax.nn.sigmoid(i) * jnp.tanh(u) + jax.nn.sigmoid(f) * cl + jax.nn.sigmoid(g) * cr
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def along(tree: Any, leaf: Callable, node: Callable) -> Any:
    """The state of a tree."""
    if isinstance(tree, tuple):
        return node(along(tree[0], leaf, node), along(tree[1], leaf, node))
    return leaf(tree)


def with_states(
    make: Callable, parts: Callable, h: Callable, wrap: Callable = jedbatch.cell
) -> Any:
    """The model with states that `make` makes of (h, c), and `parts` takes apart."""
    leaf_cell = wrap(lambda p, w: make(*leaf(p, w)))
    node_cell = wrap(lambda p, left, right: make(*node(p, *parts(left), *parts(right))))

    def encode(p, t):
        return (
            node_cell(p, encode(p, t[0]), encode(p, t[1])) if type(t) is tuple else leaf_cell(p, t)
        )

    return lambda p, t: h(encode(p, t))


def by_attributes(state: Any) -> tuple[Any, Any]:
    return state.h, state.c


def list_of_children(make: Callable, parts: Callable, h: Callable) -> Any:
    leaf_cell = jedbatch.cell(lambda p, w: make(*leaf(p, w)))

    @jedbatch.cell
    def node_cell(p, children):
        return make(*node(p, *parts(children[0]), *parts(children[1])))

    def encode(p, t):
        return node_cell(p, [encode(p, x) for x in t]) if type(t) is tuple else leaf_cell(p, t)

    return lambda p, t: h(encode(p, t))


def by_keyword() -> Any:
    leaf_cell = jedbatch.cell(leaf)
    node_cell = jedbatch.cell(lambda p, *, left, right: node(p, *left, *right))

    def encode(p, t):
        if type(t) is tuple:
            return node_cell(p, left=encode(p, t[0]), right=encode(p, t[1]))
        return leaf_cell(p, t)

    return lambda p, t: encode(p, t)[0]


def of_partials() -> Any:
    def model(p, t):
        return along(
            t,
            jedbatch.cell(functools.partial(leaf, p)),
            jedbatch.cell(functools.partial(lambda q, a, b: node(q, *a, *b), p)),
        )[0]

    return model


def without_cells() -> Any:
    return lambda p, t: along(t, lambda w: leaf(p, w), lambda a, b: node(p, *a, *b))[0]


class TreeModule(eqx.Module):
    """The model as a module of Equinox; its methods are cells."""

    E: jax.Array
    W: jax.Array
    b: jax.Array

    @jedbatch.cell
    def leaf(self, word):
        """The state of a word."""
        return leaf(vars(self), word)

    @jedbatch.cell
    def node(self, left, right):
        """The state of a node."""
        return node(vars(self), *left, *right)

    def __call__(self, t):
        """The root's h."""
        return along(t, self.leaf, self.node)[0]


class PlainModule(eqx.Module):
    """The same without cells."""

    E: jax.Array
    W: jax.Array
    b: jax.Array

    def __call__(self, t):
        """The root's h."""
        p = vars(self)
        return along(t, lambda w: leaf(p, w), lambda a, b: node(p, *a, *b))[0]


class TreeNNX(nnx.Module):
    """The model as a module of Flax NNX; its methods are cells."""

    def __init__(self, p: Any):
        self.E, self.W, self.b = (nnx.Param(p[k]) for k in "EWb")

    def _params(self) -> dict[str, Any]:
        return {"E": self.E[...], "W": self.W[...], "b": self.b[...]}

    @jedbatch.cell
    def leaf(self, word):
        """The state of a word."""
        return leaf(self._params(), word)

    @jedbatch.cell
    def node(self, left, right):
        """The state of a node."""
        return node(self._params(), *left, *right)

    def __call__(self, t):
        """The root's h."""
        return along(t, self.leaf, self.node)[0]


class Node(nn.Module):
    """The inner cell as a module of Flax Linen."""

    @nn.compact
    def __call__(self, left, right):
        """The state of a node."""
        shape = 2 * HIDDEN, 5 * HIDDEN
        w = self.param("W", nn.initializers.zeros, shape)
        b = self.param("b", nn.initializers.zeros, shape[1:])
        return node({"W": w, "b": b}, *left, *right)


def linen(p: Any) -> tuple[Callable, Any]:
    params = {"E": p["E"], "node": {"params": {"W": p["W"], "b": p["b"]}}}
    leaf_cell, node_cell = jedbatch.cell(leaf), jedbatch.cell(Node().apply)

    def model(p, t):
        return along(t, lambda w: leaf_cell(p, w), lambda a, b: node_cell(p["node"], a, b))[0]

    return model, params


def spellings(p: Any) -> Iterator[tuple[str, Callable, Any]]:
    """(name, function of shared arguments and a tree, shared arguments)."""
    pair = lambda *x: x  # noqa: E731
    yield "states as tuples", with_states(pair, lambda s: s, lambda s: s[0]), p
    yield "named tuples", with_states(State, by_attributes, lambda s: s.h), p
    in_dict = (lambda h, c: {"h": h, "c": c}), (lambda s: (s["h"], s["c"])), (lambda s: s["h"])
    yield "dicts", with_states(*in_dict), p
    nested = (lambda h, c: {"s": (h, c)}), (lambda s: s["s"]), (lambda s: s["s"][0])
    yield "dicts of tuples", with_states(*nested), p
    yield "flax.struct", with_states(Frozen, by_attributes, lambda s: s.h), p
    yield "registered dataclasses", with_states(Registered, by_attributes, lambda s: s.h), p
    yield "Equinox modules as states", with_states(Module, by_attributes, lambda s: s.h), p
    yield "lists of tuples", list_of_children(pair, lambda s: s, lambda s: s[0]), p
    yield "lists of named tuples", list_of_children(State, by_attributes, lambda s: s.h), p
    yield "arrays by keyword", by_keyword(), p
    yield "jax.jit", with_states(pair, lambda s: s, lambda s: s[0], jax.jit), p
    yield "partials made inside", of_partials(), p
    yield "Linen apply", *linen(p)
    yield "Equinox methods", lambda m, t: m(t), TreeModule(**p)
    module = TreeModule(**p)
    yield "Equinox bound methods", lambda m, t: along(t, m.leaf, m.node)[0], module
    dynamic, static = eqx.partition(module, eqx.is_array)
    yield "eqx.combine", lambda d, t: eqx.combine(d, static)(t), dynamic
    in_nnx = TreeNNX(p)
    yield "NNX module shared", lambda m, t: m(t), in_nnx
    yield "NNX module closed over", lambda _, t: in_nnx(t), 0.0
    graph, state = nnx.split(in_nnx)
    yield "nnx.merge", lambda s, t: nnx.merge(graph, s)(t), state
    yield "Equinox without cells", lambda m, t: m(t), PlainModule(**p)
    yield "no cells", without_cells(), p


def main() -> None:
    options = common.options(__doc__)
    options.add_argument("--only", nargs="*", help="names of spellings, or parts of them")
    arguments = options.parse_args()
    keys = jax.random.split(jax.random.key(0), 2)
    p = {
        "E": jax.random.normal(keys[0], (WORDS, HIDDEN)) * 0.1,
        "W": jax.random.normal(keys[1], (2 * HIDDEN, 5 * HIDDEN)) * 0.05,
        "b": jnp.zeros(5 * HIDDEN),
    }
    print(common.machine())
    table = common.Table(*("spelling", "us_per_node", "times_tuples", "run_ms", "plan_over_run"))
    tuples: Planned | None = None
    for name, fn, shared in spellings(p):
        if tuples and arguments.only and not any(part in name for part in arguments.only):
            continue
        spelling = Planned(fn, shared)
        tuples = tuples or spelling
        ours, first = in_turns(spelling, tuples) if tuples is not spelling else 2 * in_turns(tuples)
        np.testing.assert_allclose(spelling.results(), tuples.results(), rtol=1e-4, atol=1e-5)
        run = float(np.median([common.seconds(spelling.results) for _ in range(5)]))
        table.row(
            name,
            f"{ours * 1e6:.2f}",
            f"{ours / first:.2f}",
            f"{run * 1e3:.2f}",
            f"{ours * spelling.num_nodes / run:.2f}",
        )


class Planned:
    """A spelling whose batched function has planned a few minibatches."""

    def __init__(self, fn: Callable, shared: Any):
        self._batched, self._shared = jedbatch.batch(fn), shared
        for seed in range(WARM):
            self.plan(minibatch(seed))
        self._compared = self.plan(minibatch(WARM))
        self.num_nodes = sum(map(nodes, minibatch(WARM)))

    def plan(self, trees: list[Any]) -> jedbatch.Plan:
        """Plans a minibatch for inference."""
        return self._batched.plan(self._shared, trees, gradient=False)

    def results(self) -> Any:
        """The results of a minibatch that is the same for all spellings."""
        return self._batched.apply(self._shared, self._compared)


def in_turns(*spellings: Planned) -> list[float]:
    """Seconds that each takes to plan unseen minibatches for each node of a tree, the median."""
    planning = []
    for _ in range(UNSEEN):
        trees = minibatch(next(SEEDS))
        size = sum(map(nodes, trees))
        turn = [functools.partial(spelling.plan, trees) for spelling in spellings]
        planning.append([common.seconds(plan) / size for plan in turn])
    return [float(x) for x in np.median(planning, axis=0)]


def nodes(t: Any) -> int:
    """Nodes of a tree."""
    return 1 + sum(map(nodes, t)) if isinstance(t, tuple) else 1


if __name__ == "__main__":
    main()
