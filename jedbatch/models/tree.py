"""Binary TreeLSTM with an output at every node (Tai, Socher and Manning, 2015, section 3.2).

For a leaf with word embedding e, and for a node with children (h_l, c_l) and (h_r, c_r), where
[·; ·] stacks vectors and σ is the logistic function:

    leaf     [i; o; u] = W_leaf e + b_leaf              c = σ(i) tanh(u)
    node     [i; f_l; f_r; o; u] = W_node [h_l; h_r] + b_node
                                                        c = σ(i) tanh(u) + σ(f_l) c_l + σ(f_r) c_r
    both     h = σ(o) tanh(c)
    output   logits = W_out h + b_out, scored by cross-entropy with the label of the node

Shapes: e, h, c [hidden]; W_leaf [hidden, 3 hidden], W_node [2 hidden, 5 hidden], W_out
[hidden, labels]. Node types: `leaf`, `node`, `score` (output and cross-entropy), and `plus` of
eight and of two scores, which adds them up.

The model is written for one tree, as a recursive function. It comes twice: with Flax modules
(`flax_cells`), and with plain functions of arrays (`plain_cells`).

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_treebank
  >>> from jedbatch.models import tree
  >>> cells = tree.plain_cells(num_words=500, num_labels=5, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> score = jedbatch.batch(tree.scorer(cells))
  >>> score(params, synthetic_treebank(3)).shape  # loss and right labels of three trees
  (3, 2)
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import jedbatch
from jedbatch import checks
from jedbatch.models.parts import Instance, Params, of_first, scored, tree_classifier, tree_scorer

State = tuple[jax.Array, jax.Array]  # (h, c), each [hidden]


class Cells(NamedTuple):
    """The parts of a TreeLSTM, each a cell.

    Attributes:
      init: maps a random key to the parameters.
      leaf: maps (params, word) to the state (h, c) of a leaf.
      node: maps (params, left state, right state) to the state of a node.
      output: maps (params, h) to logits [labels].
      score: maps (params, h, label) to [cross-entropy, 1 if the label is right].
    """

    init: Callable[[jax.Array], Params]
    leaf: Callable[..., State]
    node: Callable[..., State]
    output: Callable[..., jax.Array]
    score: Callable[..., jax.Array]


def _leaf_state(gates: jax.Array) -> State:
    i, o, u = jnp.split(gates, 3)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _node_state(gates: jax.Array, left_c: jax.Array, right_c: jax.Array) -> State:
    i, f_left, f_right, o, u = jnp.split(gates, 5)
    c = (
        jax.nn.sigmoid(i) * jnp.tanh(u)
        + jax.nn.sigmoid(f_left) * left_c
        + jax.nn.sigmoid(f_right) * right_c
    )
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


class Leaf(nn.Module):
    """The leaf of a TreeLSTM as a Flax module."""

    num_words: int
    hidden: int

    @nn.compact
    def __call__(self, word: jax.Array) -> State:
        """The state of one word, a number."""
        embedding = nn.Embed(self.num_words, self.hidden)(jnp.asarray(word))
        return _leaf_state(nn.Dense(3 * self.hidden)(embedding))


class Node(nn.Module):
    """The inner node of a TreeLSTM as a Flax module."""

    hidden: int

    @nn.compact
    def __call__(self, left: State, right: State) -> State:
        """The state above two states."""
        gates = nn.Dense(5 * self.hidden)(jnp.concatenate([left[0], right[0]]))
        return _node_state(gates, left[1], right[1])


@checks.sizes
def flax_cells(num_words: int, num_labels: int, hidden: int) -> Cells:
    """The cells of a TreeLSTM as Flax modules; parameters as Flax has them."""
    leaf, node, output = Leaf(num_words, hidden), Node(hidden), nn.Dense(num_labels)

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        h = jnp.zeros(hidden)
        return {
            "leaf": leaf.init(keys[0], 0),
            "node": node.init(keys[1], (h, h), (h, h)),
            "output": output.init(keys[2], h),
        }

    return Cells(
        init,
        jedbatch.cell(lambda params, word: leaf.apply(params["leaf"], word), name="leaf"),
        jedbatch.cell(lambda params, *states: node.apply(params["node"], *states), name="node"),
        jedbatch.cell(lambda params, h: output.apply(params["output"], h), name="output"),
        jedbatch.cell(
            lambda params, h, label: scored(output.apply(params["output"], h), label),
            name="score",
        ),
    )


@jedbatch.cell(name="leaf")
def _plain_leaf(params: Params, word: jax.Array) -> State:
    return _leaf_state(params["embedding"][word] @ params["leaf_w"] + params["leaf_b"])


@jedbatch.cell(name="node")
def _plain_node(params: Params, left: State, right: State) -> State:
    children = jnp.concatenate([left[0], right[0]])
    return _node_state(children @ params["node_w"] + params["node_b"], left[1], right[1])


@jedbatch.cell(name="output")
def _plain_output(params: Params, h: jax.Array) -> jax.Array:
    return h @ params["output_w"] + params["output_b"]


@jedbatch.cell(name="score")
def _plain_score(params: Params, h: jax.Array, label: jax.Array) -> jax.Array:
    return scored(h @ params["output_w"] + params["output_b"], label)


@checks.sizes
def plain_cells(num_words: int, num_labels: int, hidden: int) -> Cells:
    """The cells of a TreeLSTM as functions of arrays; parameters are a flat dict."""

    def init(key: jax.Array) -> Params:
        shapes = {
            "leaf": (hidden, 3 * hidden),
            "node": (2 * hidden, 5 * hidden),
            "output": (hidden, num_labels),
        }
        embedding_key, *keys = jax.random.split(key, 1 + len(shapes))
        params = {"embedding": jax.random.normal(embedding_key, (num_words, hidden))}
        for (name, shape), k in zip(shapes.items(), keys, strict=True):
            params[f"{name}_w"] = jax.nn.initializers.lecun_normal()(k, shape)
            params[f"{name}_b"] = jnp.zeros(shape[1])
        return params

    return Cells(init, _plain_leaf, _plain_node, _plain_output, _plain_score)


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): [loss, number of right labels] of one tree.

    A tree is `(label, word)` or `(label, left, right)` with integers for labels and words; loss
    and count are sums over its nodes.
    """
    return tree_scorer(cells.leaf, cells.node, of_first(cells.score))


@checks.fields(Cells)
def classifier(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): the logits [labels] at the root of one tree."""
    return tree_classifier(cells.leaf, cells.node, of_first(cells.output))
