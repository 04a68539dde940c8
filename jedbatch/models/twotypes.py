"""Binary TreeLSTM with two kinds of inner nodes, "TreeLSTM-2Type" (Chen et al., 2023).

The equations are those of `jedbatch.models.tree`, once for each kind k of an inner node, with
weights of its own:

    leaf     [i; o; u] = W_leaf e + b_leaf              c = σ(i) tanh(u)
    node k   [i; f_l; f_r; o; u] = W_k [h_l; h_r] + b_k
                                                        c = σ(i) tanh(u) + σ(f_l) c_l + σ(f_r) c_r
    both     h = σ(o) tanh(c)
    output   logits = W_out h + b_out, scored by cross-entropy with the label of the node

Shapes: as there, with W_0 and W_1 [2 hidden, 5 hidden]. Node types: `leaf`, `node 0`, `node 1`,
`score` and two of `plus`.

With one kind of node, a batch for every level of the deepest tree is all that is needed. With two
it matters in which order they run: a batch of one kind is small if it does not wait for nodes
that the other will make ready. ED-Batch uses this model to show that a policy can be learned.

References:
  Chen et al., ED-Batch: Efficient automatic batching of dynamic neural networks via learned
  finite state machines, ICML 2023.

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_treebank, with_kinds
  >>> from jedbatch.models import twotypes
  >>> cells = twotypes.flax_cells(num_words=500, num_labels=5, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> score = jedbatch.batch(twotypes.scorer(cells))
  >>> trees = with_kinds(synthetic_treebank(3, mean_length=4))
  >>> score(params, trees).shape  # loss and right labels of three trees
  (3, 2)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jedbatch
from jedbatch import checks
from jedbatch.models import tree
from jedbatch.models.parts import Instance, Params, of_first, tree_classifier, tree_scorer

State = tree.State  # (h, c), each [hidden]


class Cells(NamedTuple):
    """The parts of a TreeLSTM with two kinds of inner nodes, each a cell.

    Attributes:
      init: maps a random key to the parameters.
      leaf: maps (params, word) to the state (h, c) of a leaf.
      nodes: for either kind, maps (params, left state, right state) to the state of a node.
      output: maps (params, h) to logits [labels].
      score: maps (params, h, label) to [cross-entropy, 1 if the label is right].
    """

    init: Callable[[jax.Array], Params]
    leaf: Callable[..., State]
    nodes: tuple[Callable[..., State], Callable[..., State]]
    output: Callable[..., jax.Array]
    score: Callable[..., jax.Array]


@checks.sizes
def flax_cells(num_words: int, num_labels: int, hidden: int) -> Cells:
    """The cells as Flax modules, those of `tree.flax_cells`; parameters as Flax has them."""
    one = tree.flax_cells(num_words, num_labels, hidden)

    def init(key: jax.Array) -> Params:
        first, second = map(one.init, jax.random.split(key))
        leaf, output = first["leaf"], first["output"]
        return {"leaf": leaf, "nodes": (first["node"], second["node"]), "output": output}

    def node(kind: int) -> Callable[..., State]:
        def apply(params: Params, left: State, right: State) -> State:
            return one.node({"node": params["nodes"][kind]}, left, right)

        return jedbatch.cell(apply, name=f"node {kind}")

    return Cells(init, one.leaf, (node(0), node(1)), one.output, one.score)


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): [loss, number of right labels] of one tree.

    A tree is `(label, word)` or `(label, left, right, kind)` with integers for labels and words
    and kinds 0 and 1; loss and count are sums over its nodes.
    """
    return tree_scorer(cells.leaf, _node_of_kind(cells), of_first(cells.score))


@checks.fields(Cells)
def classifier(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): the logits [labels] at the root of one tree."""
    return tree_classifier(cells.leaf, _node_of_kind(cells), of_first(cells.output))


def _node_of_kind(cells: Cells) -> Callable[..., State]:
    """A function of (params, left state, right state, kind)."""

    def node(params: Params, left: State, right: State, kind: Any = None) -> State:
        if kind not in (0, 1):
            raise ValueError(
                f"an inner node has the kind {kind!r}; expected 0 or 1, behind the children as in "
                "`(label, left, right, 1)`. `jedbatch.data.with_kinds` gives trees kinds."
            )
        return cells.nodes[kind](params, left, right)

    return node
