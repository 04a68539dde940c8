"""MV-RNN: a vector and a matrix for every word and phrase (Socher, Huval, Manning and Ng, 2012).

The vector of a phrase says what it means, its matrix what it does to the meaning of a phrase
beside it. For a word with vector a, and for a node with children (a, A) and (b, B), where [·; ·]
stacks vectors, and matrices one above the other:

    leaf     A = U V + diag(d)
    node     p = tanh(W [B a; A b] + bias)              P = W_M [A; B]
    output   logits = W_out p + b_out, scored by cross-entropy with the label of the node

Shapes: a, p, d [hidden]; A, P [hidden, hidden]; U [hidden, rank], V [rank, hidden], of rank 3 as
in the paper; W [2 hidden, hidden], W_M [hidden, 2 hidden], W_out [hidden, labels]. Node types:
`leaf`, `node`, `score` (output and cross-entropy), and `plus` of eight and of two scores, which
adds them up.

Words begin with matrices near the identity, d = 1 and small U and V, and W_M near ½ [I, I], the
mean of two matrices: at first a model adds up vectors as plain recursive networks do.

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_treebank
  >>> from jedbatch.models import mvrnn
  >>> cells = mvrnn.flax_cells(num_words=500, num_labels=5, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> score = jedbatch.batch(mvrnn.scorer(cells))
  >>> score(params, synthetic_treebank(3, mean_length=4)).shape  # loss and right labels of three
  (3, 2)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jedbatch import checks
from jedbatch.models.parts import (
    Instance,
    Params,
    module_cells,
    of_first,
    pure,
    score_cell,
    tree_classifier,
    tree_scorer,
)

State = tuple[jax.Array, jax.Array]  # (a, A): [hidden] and [hidden, hidden]


class Cells(NamedTuple):
    """The parts of an MV-RNN, each a cell.

    Attributes:
      init: maps a random key to the parameters.
      leaf: maps (params, word) to the state (a, A) of a leaf.
      node: maps (params, left state, right state) to the state (p, P) of a node.
      output: maps (params, vector of a state) to logits [labels].
      score: maps (params, vector of a state, label) to [cross-entropy, 1 if the label is right].
    """

    init: Callable[[jax.Array], Params]
    leaf: Callable[..., State]
    node: Callable[..., State]
    output: Callable[..., jax.Array]
    score: Callable[..., jax.Array]


class Leaf(nnx.Module):
    """The leaf of an MV-RNN as a Flax module."""

    def __init__(self, num_words: int, hidden: int, rank: int, rngs: nnx.Rngs):
        small, one = nnx.initializers.normal(0.1), nnx.initializers.ones
        self.shape = hidden, rank
        self.vector = nnx.Embed(num_words, hidden, rngs=rngs)
        self.u = nnx.Embed(num_words, hidden * rank, embedding_init=small, rngs=rngs)
        self.v = nnx.Embed(num_words, rank * hidden, embedding_init=small, rngs=rngs)
        self.d = nnx.Embed(num_words, hidden, embedding_init=one, rngs=rngs)

    def __call__(self, word: jax.Array) -> State:
        """The state of one word, a number."""
        word = jnp.asarray(word)
        u, v = self.u(word).reshape(self.shape), self.v(word).reshape(self.shape[::-1])
        return self.vector(word), u @ v + jnp.diag(self.d(word))


def _near_mean(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """A weight [hidden, 2 hidden] that makes of two matrices about their mean."""
    mean = jnp.tile(jnp.eye(shape[0], dtype=dtype) / 2, 2)
    return mean + 0.01 * jax.random.normal(key, shape, dtype)


class Node(nnx.Module):
    """The inner node of an MV-RNN as a Flax module."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.vector = nnx.Linear(2 * hidden, hidden, rngs=rngs)
        self.matrix = nnx.Param(_near_mean(rngs.params(), (hidden, 2 * hidden)))

    def __call__(self, left: State, right: State) -> State:
        """The state above two states."""
        (a, matrix_a), (b, matrix_b) = left, right
        p = jnp.tanh(self.vector(jnp.concatenate([matrix_b @ a, matrix_a @ b])))
        return p, self.matrix[...] @ jnp.concatenate([matrix_a, matrix_b])


@checks.sizes
def flax_cells(num_words: int, num_labels: int, hidden: int, rank: int = 3) -> Cells:
    """The cells of an MV-RNN as Flax modules; parameters are nested dicts.

    Args:
      num_words: size of the vocabulary; words are numbers below it.
      num_labels: labels are numbers below it.
      hidden: size of the vectors, and of the sides of the matrices.
      rank: of what is added to the diagonal in the matrix of a word.
    """
    modules = {
        "leaf": pure(lambda rngs: Leaf(num_words, hidden, rank, rngs)),
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
    return tree_scorer(cells.leaf, cells.node, of_first(cells.score))


@checks.fields(Cells)
def classifier(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): the logits [labels] at the root of one tree."""
    return tree_classifier(cells.leaf, cells.node, of_first(cells.output))
