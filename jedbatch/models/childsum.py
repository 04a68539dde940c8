"""Child-sum TreeLSTM over dependency trees, scoring pairs (Tai, Socher and Manning, 2015).

For a word with embedding x and children (h_k, c_k), any number of them, where σ is the logistic
function and ⊙ the elementwise product (section 3.1):

    word     [g_i; g_o; g_u; g_f] = W x + b
    node     h' = Σ_k h_k        [i; o; u] = [g_i; g_o; g_u] + U h'        f_k = g_f + U_f h_k
             c = σ(i) ⊙ tanh(u) + Σ_k σ(f_k) ⊙ c_k                        h = σ(o) ⊙ tanh(c)

Two sentences with states h_L and h_R at their roots are scored for relatedness (section 4.2):

    relate   s = σ(W_s [h_L ⊙ h_R; |h_L - h_R|] + b_s)       p = softmax(W_p s + b_p)
             prediction ŷ = Σ_j j p_j        loss = KL(target ‖ p)

where the target is spread over the two whole scores next to y: target_j = max(0, 1 - |y - j|).

Shapes: x, h, c [hidden]; W [hidden, 4 hidden], U [hidden, 3 hidden], U_f [hidden, hidden], W_s
[2 hidden, compared], W_p [compared, 5]. Node types: `word`, `node` once for each number of
children (a leaf has none and multiplies nothing), and `relate`.

What depends on the word alone, W x with all four gates, is a type of its own: one product for all
words of a minibatch. The model is written for one pair, as a recursive function. It comes twice:
as cells (`plain_cells`), and as plain functions of arrays that are no cells (`plain_functions`).

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import synthetic_pairs
  >>> from jedbatch.models import childsum
  >>> cells = childsum.plain_cells(num_words=500, hidden=8)
  >>> params = cells.init(jax.random.key(0))
  >>> score = jedbatch.batch(childsum.scorer(cells))
  >>> score(params, synthetic_pairs(3)).shape  # loss and squared error of three pairs
  (3, 2)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jedbatch
from jedbatch import checks
from jedbatch.models.parts import Instance, Params

State = tuple[jax.Array, jax.Array]  # (h, c), each [hidden]
NUM_SCORES = 5


class Cells(NamedTuple):
    """The parts of a child-sum TreeLSTM.

    Attributes:
      init: maps a random key to the parameters.
      word: maps (params, word) to what the word adds to the gates [4 hidden].
      node: maps (params, gates, *states of children) to a state (h, c).
      relate: maps (params, left h, right h, score) to [loss, squared error of the prediction].
    """

    init: Callable[[jax.Array], Params]
    word: Callable[..., jax.Array]
    node: Callable[..., State]
    relate: Callable[..., jax.Array]


def _word(params: Params, word: jax.Array) -> jax.Array:
    return params["embedding"][word] @ params["word_w"] + params["word_b"]


def _node(params: Params, gates: jax.Array, *children: State) -> State:
    i, o, u, f = jnp.split(gates, 4)
    if children:
        total = sum((h for h, _ in children[1:]), start=children[0][0])
        more = jnp.split(total @ params["node_u"], 3)
        i, o, u = i + more[0], o + more[1], u + more[2]
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    for child_h, child_c in children:
        c = c + jax.nn.sigmoid(f + child_h @ params["forget_u"]) * child_c
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _relate(params: Params, left: jax.Array, right: jax.Array, score: jax.Array) -> jax.Array:
    compared = jnp.concatenate([left * right, jnp.abs(left - right)])
    s = jax.nn.sigmoid(compared @ params["compare_w"] + params["compare_b"])
    log_p = jax.nn.log_softmax(s @ params["score_w"] + params["score_b"])
    scores = jnp.arange(1, NUM_SCORES + 1, dtype=log_p.dtype)
    target = jnp.maximum(0, 1 - jnp.abs(score - scores))
    loss = (jax.scipy.special.xlogy(target, target) - target * log_p).sum()
    return jnp.stack([loss, jnp.square((jnp.exp(log_p) * scores).sum() - score)])


def _init(num_words: int, hidden: int, compared: int) -> Callable[[jax.Array], Params]:
    def init(key: jax.Array) -> Params:
        shapes = {
            "word_w": (hidden, 4 * hidden),
            "node_u": (hidden, 3 * hidden),
            "forget_u": (hidden, hidden),
            "compare_w": (2 * hidden, compared),
            "score_w": (compared, NUM_SCORES),
        }
        embedding_key, *keys = jax.random.split(key, 1 + len(shapes))
        params = {"embedding": jax.random.normal(embedding_key, (num_words, hidden))}
        for (name, shape), k in zip(shapes.items(), keys, strict=True):
            params[name] = jax.nn.initializers.lecun_normal()(k, shape)
            if name.endswith("_w"):
                params[f"{name[:-2]}_b"] = jnp.zeros(shape[1])
        return params

    return init


@checks.sizes
def plain_functions(num_words: int, hidden: int, compared: int = 50) -> Cells:
    """The parts as plain functions of arrays, none of them a cell; parameters are a flat dict."""
    return Cells(_init(num_words, hidden, compared), _word, _node, _relate)


_word_cell = jedbatch.cell(_word, name="word")
_node_cell = jedbatch.cell(_node, name="node")
_relate_cell = jedbatch.cell(_relate, name="relate")


@checks.sizes
def plain_cells(num_words: int, hidden: int, compared: int = 50) -> Cells:
    """The cells, functions of arrays; parameters are a flat dict."""
    return Cells(_init(num_words, hidden, compared), _word_cell, _node_cell, _relate_cell)


@checks.fields(Cells)
def encoder(cells: Cells) -> Callable[[Params, Instance], State]:
    """A function of (params, tree): the state (h, c) at the root of `(word, *children)`."""

    def visit(params: Params, tree: Instance) -> State:
        gates = cells.word(params, tree[0])
        return cells.node(params, gates, *[visit(params, child) for child in tree[1:]])

    return visit


@checks.fields(Cells)
def scorer(cells: Cells) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, pair): [loss, squared error] of one `(left, right, score)`."""
    encode = encoder(cells)

    def score(params: Params, pair: Instance) -> jax.Array:
        left, right, score = pair
        return cells.relate(params, encode(params, left)[0], encode(params, right)[0], score)

    return score
