"""Binary TreeGRU with an output at every node, after Kokkinos and Potamianos (2017).

A gated recurrent unit (Cho et al., 2014) that follows two states instead of one. For a leaf with
word embedding e, and for a node with children h_l and h_r, where [·; ·] stacks vectors, σ is the
logistic function and ⊙ the elementwise product:

    leaf     [z; u] = W_leaf e + b_leaf
             h = (1 - σ(z)) ⊙ tanh(u)
    node     [r_l; r_r; z_l; z_r] = σ(W_gates [h_l; h_r] + b_gates)
             u = tanh(W_node [r_l ⊙ h_l; r_r ⊙ h_r] + b_node)
             h = (z_l ⊙ h_l + (1 - z_l) ⊙ u) / 2 + (z_r ⊙ h_r + (1 - z_r) ⊙ u) / 2
    output   logits = W_out h + b_out, scored by cross-entropy with the label of the node

A leaf is the unit in the zero state, where the reset gate has nothing to reset. Definitions of the
node differ between papers in how much is kept of two children. Here each has reset and update
gates with rows of their own, as it has a forget gate in a TreeLSTM, and a state is the mean of
what the unit makes of either child: it stays between -1 and 1 however deep the tree.

Shapes: e, h [hidden]; W_leaf [hidden, 2 hidden], W_gates [2 hidden, 4 hidden], W_node [2 hidden,
hidden], W_out [hidden, labels]. Node types: `leaf`, `node`, `score` (output and cross-entropy),
and `plus` of eight and of two scores, which adds them up.

References:
  Kokkinos and Potamianos, Structural attention neural networks for improved sentiment analysis,
  EACL 2017.

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_treebank
  >>> from jedbatch.models import treegru
  >>> cells = treegru.flax_cells(num_words=500, num_labels=5, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> score = jedbatch.batch(treegru.scorer(cells))
  >>> score(params, synthetic_treebank(3, mean_length=4)).shape  # loss and right labels of three
  (3, 2)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jedbatch import checks
from jedbatch.models.parts import (
    Instance,
    Params,
    module_cells,
    pure,
    score_cell,
    tree_classifier,
    tree_scorer,
)


class Cells(NamedTuple):
    """The parts of a TreeGRU, each a cell.

    Attributes:
      init: maps a random key to the parameters.
      leaf: maps (params, word) to the state h of a leaf.
      node: maps (params, left h, right h) to the state h of a node.
      output: maps (params, h) to logits [labels].
      score: maps (params, h, label) to [cross-entropy, 1 if the label is right].
    """

    init: Callable[[jax.Array], Params]
    leaf: Callable[..., jax.Array]
    node: Callable[..., jax.Array]
    output: Callable[..., jax.Array]
    score: Callable[..., jax.Array]


class Leaf(nnx.Module):
    """The leaf of a TreeGRU as a Flax module."""

    def __init__(self, num_words: int, hidden: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(num_words, hidden, rngs=rngs)
        self.leaf = nnx.Linear(hidden, 2 * hidden, rngs=rngs)

    def __call__(self, word: jax.Array) -> jax.Array:
        """The state of one word, a number."""
        z, u = jnp.split(self.leaf(self.embedding(jnp.asarray(word))), 2)
        return (1 - jax.nn.sigmoid(z)) * jnp.tanh(u)


class Node(nnx.Module):
    """The inner node of a TreeGRU as a Flax module."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.gates = nnx.Linear(2 * hidden, 4 * hidden, rngs=rngs)
        self.node = nnx.Linear(2 * hidden, hidden, rngs=rngs)

    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """The state above two states."""
        gates = jax.nn.sigmoid(self.gates(jnp.concatenate([left, right])))
        r_left, r_right, z_left, z_right = jnp.split(gates, 4)
        u = jnp.tanh(self.node(jnp.concatenate([r_left * left, r_right * right])))
        return (z_left * left + (1 - z_left) * u + z_right * right + (1 - z_right) * u) / 2


@checks.sizes
def flax_cells(num_words: int, num_labels: int, hidden: int) -> Cells:
    """The cells of a TreeGRU as Flax modules; parameters are nested dicts."""
    modules = {
        "leaf": pure(lambda rngs: Leaf(num_words, hidden, rngs)),
        "node": pure(lambda rngs: Node(hidden, rngs)),
        "output": pure(lambda rngs: nnx.Linear(hidden, num_labels, rngs=rngs)),
    }
    return Cells(**module_cells(modules), score=score_cell("output", modules["output"]))


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): [loss, number of right labels] of one tree.

    A tree is `(label, word)` or `(label, left, right)` with integers for labels and words; loss
    and count are sums over its nodes.
    """
    return tree_scorer(cells.leaf, cells.node, cells.score)


@checks.fields(Cells)
def classifier(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): the logits [labels] at the root of one tree."""
    return tree_classifier(cells.leaf, cells.node, cells.output)
