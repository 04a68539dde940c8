"""Code: a TreeLSTM reads syntax trees of Python, and is trained with differential privacy.

A tree is `(kind, *children)`, the kind of a node of `ast` and any number of children. The model is
a child-sum TreeLSTM (Tai, Socher and Manning, 2015) that tells from a function which module of the
standard library it is from. Private training (Abadi et al., 2016) clips the gradient of each
example and adds noise to their sum, so that it needs a gradient for each tree.

    python examples/applications/code_models.py [--quick] [--write]
"""

import ast
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

# --- state of a node ---


def state(gates, forgotten):
    """(h, c) of a node."""
    i, o, u = jnp.split(gates, 3)
    c = jax.nn.sigmoid(i) * jnp.tanh(u) + forgotten
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


# --- one function ---


@jedbatch.cell
def leaf(params, kind):
    return state(params["gates"][kind], 0.0)


@jedbatch.cell
def node(params, kind, below):
    h, c = (jnp.stack(x) for x in zip(*below, strict=True))
    forget = jax.nn.sigmoid(params["forget"][kind] + h @ params["forget_u"])
    return state(params["gates"][kind] + h.sum(0) @ params["gates_u"], (forget * c).sum(0))


@jedbatch.cell
def classify(params, h, label):
    return -jax.nn.log_softmax(h @ params["read"])[label]


def loss(params, example):
    tree, label = example

    def encode(tree):
        kind, *children = tree
        return node(params, kind, list(map(encode, children))) if children else leaf(params, kind)

    return classify(params, encode(tree)[0], label)


# --- private ---


def clipped(gradients, most=0.1):
    """The sum of gradients [examples, ...], each scaled to a norm of at most `most`."""
    squares = [jnp.square(g).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(gradients)]
    factor = jnp.minimum(1.0, most / jnp.sqrt(sum(squares)))
    return jax.tree.map(lambda g: jnp.tensordot(factor, g, 1), gradients)


# --- one by one ---


def one_by_one(batched):
    """One program, which is compiled once, adds the gradient of one example after another."""

    @jax.jit
    def add(total, params, plan):
        gradients = jax.jacrev(batched.apply)(params, plan)
        return jax.tree.map(jnp.add, total, clipped(gradients))

    def run(params, plans):
        total = jax.tree.map(jnp.zeros_like, params)
        for plan in plans:
            total = add(total, params, plan)
        return total

    return Side(lambda params, examples: [batched.plan(params, [x]) for x in examples], run)


# --- jacrev ---


def with_jacrev(batched):
    """As many reverse sweeps as examples, side by side."""
    return jax.jit(lambda params, plan: clipped(jax.jacrev(batched.apply)(params, plan)))


# --- padded ---


def by_height(tree):
    """For each height (kinds of its nodes, kinds of their parents, rows of these).

    The first row after those of all heights is what the root adds to, the second is for padding.
    """
    levels = []

    def visit(tree):
        """[height, number among those of this height]."""
        kind, *children = tree
        below = [visit(child) for child in children]
        height = 1 + max((height for height, _ in below), default=-1)
        while len(levels) <= height:
            levels.append(([], [], []))
        kinds, of_parents, parents = levels[height]
        for place in below:
            levels[place[0]][1][place[1]] = kind
            levels[place[0]][2][place[1]] = (height, len(kinds))
        kinds.append(kind)
        of_parents.append(0)
        parents.append(None)
        return height, len(kinds) - 1

    visit(tree)
    return levels


def widest(examples):
    counts = [[len(kinds) for kinds, *_ in by_height(tree)] for tree, _ in examples]
    return [max(x) for x in itertools.zip_longest(*counts, fillvalue=0)]


def padded(_, examples, widths):
    """The arrays of a minibatch, of the same shapes for all."""
    starts = np.cumsum([0, *widths])
    arrays = [np.zeros((3, len(examples), width), np.int32) for width in widths]
    for array in arrays:
        array[2] = starts[-1] + 1
    for i, (tree, _) in enumerate(examples):
        for array, (kinds, of_parents, parents) in zip(arrays, by_height(tree), strict=False):
            rows = [starts[-1] if p is None else starts[p[0]] + p[1] for p in parents]
            array[:, i, : len(kinds)] = kinds, of_parents, rows
    return list(map(tuple, arrays)), np.array([label for _, label in examples])


def padded_loss(params, levels, label):
    rows = sum(len(kinds) for kinds, *_ in levels) + 2
    h_below = c_below = jnp.zeros((rows, len(params["gates_u"])))
    start = 0
    for kinds, of_parents, parents in levels:
        here = slice(start, start := start + len(kinds))
        gates = params["gates"][kinds] + h_below[here] @ params["gates_u"]
        h, c = jax.vmap(state)(gates, c_below[here])
        forget = jax.nn.sigmoid(params["forget"][of_parents] + h @ params["forget_u"])
        h_below, c_below = h_below.at[parents].add(h), c_below.at[parents].add(forget * c)
    return -jax.nn.log_softmax(h_below[-2] @ params["read"])[label]


@jax.jit
def by_vmap(params, arrays):
    return clipped(jax.vmap(jax.grad(padded_loss), (None, 0, 0))(params, *arrays))


# --- loop ---


def loop(params, examples):
    gradients = [jax.grad(loss)(params, example) for example in examples]
    return clipped(jax.tree.map(lambda *g: jnp.stack(g), *gradients))


# --- syntax trees ---

MODULES = ("argparse", "ast", "dataclasses", "doctest", "inspect", "pickle", "tarfile", "typing")


def functions_of(modules, most):
    """Examples (tree, number of the module) of all functions with at most so many nodes."""
    kinds = {}

    def tree_of(node):
        below = [tree_of(child) for child in ast.iter_child_nodes(node) if not is_context(child)]
        return (kinds.setdefault(type(node).__name__, len(kinds)), *below)

    def is_context(node):
        return isinstance(node, ast.expr_context)

    found = []
    for number, name in enumerate(modules):
        module = ast.parse(inspect.getsource(__import__(name)))
        functions = [x for x in ast.walk(module) if isinstance(x, ast.FunctionDef)]
        found += [(tree_of(f), number) for f in functions]
    found = [example for example in dict.fromkeys(found) if size(example[0]) <= most]
    return found, len(kinds)


def size(tree):
    return 1 + sum(map(size, tree[1:]))


def parameters(rng, kinds, hidden, classes):
    shapes = {
        "gates": (kinds, 3 * hidden),
        "forget": (kinds, hidden),
        "gates_u": (hidden, 3 * hidden),
        "forget_u": (hidden, hidden),
        "read": (hidden, classes),
    }
    draw = lambda shape: rng.normal(size=shape) / np.sqrt(shape[0])
    return {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}


def make(quick):
    rng = np.random.default_rng(0)
    modules, most, count, hidden = (MODULES[:2], 12, 3, 3) if quick else (MODULES, 150, 32, 64)
    examples, kinds = functions_of(modules, most)
    order = rng.permutation(len(examples))
    many = measuring.WARM + (1 if quick else 10)
    minibatches = [[examples[n] for n in order[i * count : (i + 1) * count]] for i in range(many)]
    params = parameters(rng, kinds, hidden, len(modules) + 1)
    widths = widest(itertools.chain(*minibatches))

    def sides():
        single, together = jedbatch.batch(loss), jedbatch.batch(loss)
        for batched, batch_size in ((single, 1), (together, count)):  # room for any minibatch
            batched.warm(params, examples, batch_size=batch_size, gradient=True, calls=False)
        return {
            "jedbatch": one_by_one(single),
            "jedbatch, `jacrev`": Side(together.plan, with_jacrev(together)),
            "padded, `vmap(grad)`": Side(functools.partial(padded, widths=widths), by_vmap),
            "loop": Side(lambda _, examples: examples, loop, few=1),
        }

    return Application(params, minibatches, loop, sides, rtol=1e-3)


def illustrate(axis):
    """Nodes and heights of the syntax trees."""
    trees = [tree for tree, _ in functions_of(MODULES, 150)[0]]
    axis.plot([size(t) for t in trees], [len(by_height(t)) for t in trees], ".", alpha=0.3)
    axis.set(xlabel="nodes of a function", ylabel="height of its syntax tree")


SHARES = {
    "jedbatch": ["state of a node", "one function", "private", "one by one"],
    "jedbatch, `jacrev`": ["state of a node", "one function", "private", "jacrev"],
    "padded, `vmap(grad)`": ["state of a node", "private", "padded"],
    "loop": ["state of a node", "one function", "private", "loop"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
