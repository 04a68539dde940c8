"""Every model of the package, with few numbers to compute, as a case of one table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch import ragged
from jedbatch.data import END, as_arrays, synthetic_treebank, with_kinds
from jedbatch.models import (
    childsum,
    deepsets,
    lattice,
    layers,
    mvrnn,
    tagger,
    transformer,
    translation,
    tree,
    treegru,
    twotypes,
)

SIZES = {"hidden": 8, "heads": 2, "layers": 1, "max_length": 64}
# Few kinds of nodes, so that little has to be compiled.
PAIRS_OF_TREES = [((1, (2,), (3,)), (4, (5,)), 2.5), ((6,), (7, (8, (0,))), 4.0)]
# No word, words inside of words, two that end together, one from the first to the last character.
LATTICES = [
    ((3, 1, 4, 1), ((0, 2, 5), (0, 4, 2), (1, 3, 0), (2, 4, 1)), (0, 2, 1, 2)),
    ((5,), (), (1,)),
    ((2, 0, 3), ((1, 3, 3),), (0, 0, 2)),
]
SENTENCES = [((3, 1, 4, 1), (0, 2, 1, 2)), ((5,), (1,)), ((2, 0), (0, 0))]
# Words of one character, sentences of spelled words only, of numbers only and of both.
SPELLED = [(((3, 1, 4), 1), (0, 2)), (((5,),), (1,)), ((2, (0, 5), 3), (0, 0, 2))]
TRANSLATIONS = [((3, 1, 4), (2, 4, 3, END)), ((5,), (END,)), ((2, 0), (5, END))]
OF_ONE_LABEL = as_arrays([((3, 1, 4), 1), ((5, 0), 0), ((2, 2, 1), 2)])
TAGGED = as_arrays([((3, 1, 4), (0, 2, 1)), ((5, 0), (1, 1)), ((2, 2, 1), (0, 0, 2))])
TRANSLATED = as_arrays([((3, 1, 4), (2, END)), ((5, 0), (4, 2, END)), ((0, 2, 1), (3, END))])


def encoder(attend=ragged.attention):
    return transformer.flax_encoder(6, 3, **SIZES, attend=attend)


def encoder_decoder(attend=ragged.attention):
    return transformer.flax_encoder_decoder(6, 5, **SIZES, attend=attend)


def sets(pool=jnp.mean):
    return deepsets.flax_model(2, 3, 4, layers=1, pool=pool)


def random_points(*numbers):
    """Sets of so many random points each."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 2)).astype(np.float32), np.int32(n % 3)) for n in numbers]


def treebank(module, num_trees, *, seed=0, mean_length=8.0):
    """Synthetic trees as the models of a module take them."""
    trees = synthetic_treebank(num_trees, seed=seed, num_words=60, mean_length=mean_length)
    return with_kinds(trees, seed=seed) if module is twotypes else trees


def random_params(cells, seed=0):
    """Parameters of a model, drawn by NumPy; `init` compiles a program for each of their shapes."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(cells.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)


@dataclass(frozen=True)
class Model:
    """A model to compare with the loop.

    Attributes:
      cells: makes its cells, with an attribute `init`.
      loss: from the cells to a function of parameters and an instance.
      instances: of that function.
      rtol: the tolerance.
      compiled: whether the loop runs the function compiled.
    """

    cells: Callable[[], Any]
    loss: Callable[[Any], Callable]
    instances: Sequence
    rtol: float = 3e-5
    compiled: bool = False

    def alone(self, fn):
        """The function as the loop calls it."""
        return jax.jit(fn) if self.compiled else None


def _scores_and_logits(module):
    """Both results of a model of trees at once."""

    def loss(cells):
        score, classify = module.scorer(cells), module.classifier(cells)
        return lambda params, tree: (score(params, tree), classify(params, tree))

    return loss


def _of_trees(module):
    """A kind of trees."""
    trees = treebank(module, 6, seed=3, mean_length=4)
    return Model(lambda: module.flax_cells(60, 5, 6), _scores_and_logits(module), trees, rtol=1e-4)


def _of_tree_lstm(make):
    trees = synthetic_treebank(6, seed=3, num_words=20, mean_length=6)
    return Model(lambda: make(20, 5, 6), _scores_and_logits(tree), trees)


# Instances are arrays of any length.
OF_ARRAYS = {
    "transformer tagger": Model(encoder, transformer.tagger, TAGGED, compiled=True),
    "transformer tagger in plain jnp": Model(
        lambda: encoder(layers.plain_attention), transformer.tagger, TAGGED, compiled=True
    ),
    "transformer scorer": Model(encoder, transformer.scorer, OF_ONE_LABEL, compiled=True),
    "transformer translator": Model(
        encoder_decoder, transformer.translator, TRANSLATED, compiled=True
    ),
    "deepsets mean": Model(sets, deepsets.scorer, random_points(3, 1, 3), compiled=True),
    "deepsets maximum": Model(
        lambda: sets(jnp.max), deepsets.scorer, random_points(3, 1, 3), compiled=True
    ),
}

MODELS = {
    "childsum": Model(lambda: childsum.plain_cells(9, 6, 4), childsum.scorer, PAIRS_OF_TREES),
    "childsum without cells": Model(
        lambda: childsum.plain_functions(9, 4, 3), childsum.scorer, PAIRS_OF_TREES
    ),
    "lattice lstm": Model(lambda: lattice.lstm_cells(6, 6, 3, 4), lattice.scorer, LATTICES),
    "lattice gru": Model(lambda: lattice.gru_cells(6, 6, 3, 4), lattice.scorer, LATTICES),
    "mvrnn": _of_trees(mvrnn),
    "tagger": Model(lambda: tagger.flax_cells(6, 3, 4), tagger.scorer, SENTENCES),
    "tagger of spelled words": Model(
        lambda: tagger.flax_cells(6, 3, 4, num_layers=1, num_characters=6),
        tagger.scorer,
        [*SPELLED, SENTENCES[2]],
    ),
    "translation": Model(lambda: translation.flax_cells(6, 7, 4), translation.scorer, TRANSLATIONS),
    "tree in flax": _of_tree_lstm(tree.flax_cells),
    "tree": _of_tree_lstm(tree.plain_cells),
    "treegru": _of_trees(treegru),
    "twotypes": _of_trees(twotypes),
    **OF_ARRAYS,
}
