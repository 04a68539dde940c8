"""The models of this package, each with the data it eats and a trained policy, by name.

`WORKLOADS["treelstm"]` is what `python -m jedbatch show treelstm` shows: where instances come from,
how they become numbers, and the function of one instance to batch. Policies are state machines
learned on 32 synthetic instances, kept beside this module as JSON:

    python -m jedbatch learn NAME --save jedbatch/models/policies/NAME.json
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import jax

from jedbatch import checks, data
from jedbatch.models import childsum, lattice, mvrnn, tagger, translation, tree, treegru, twotypes
from jedbatch.models.parts import Instance, Params
from jedbatch.policies import FSM

Sizes = dict[str, int]  # keyword arguments of `Workload.cells`


@dataclass(frozen=True)
class Workload:
    """A model and the data it eats.

    Attributes:
      name: in `WORKLOADS`.
      title: for people.
      files: what its data files hold, in words; those after the first need not be given.
      read: maps paths and `limit=` to records.
      index: maps records to (instances, sizes): numbers for words, and how many there are.
      synthetic: maps (number, seed) to (instances, sizes).
      cells: maps `hidden=` and the sizes to the cells of the model, which have `init`.
      scorer: maps cells to a function of (params, instance): [sum of losses, right answers], or
        [loss, squared error] of `childsum`.
    """

    name: str
    title: str
    files: tuple[str, ...]
    read: Callable[..., list[Instance]]
    index: Callable[[Sequence[Instance]], tuple[list[Instance], Sizes]]
    synthetic: Callable[[int, int], tuple[list[Instance], Sizes]]
    cells: Callable[..., Any]
    scorer: Callable[[Any], Callable[[Params, Instance], jax.Array]]

    def __post_init__(self) -> None:
        for name in ("read", "index", "synthetic", "cells", "scorer"):
            checks.function("Workload", name, getattr(self, name), "a function")
        checks.names("Workload", "files", self.files)

    def load(
        self, *paths: str | os.PathLike[str], limit: int, seed: int = 0
    ) -> tuple[list[Instance], Sizes]:
        """Instances of data files, or synthetic ones if there are none.

        Args:
          *paths: the files, in the order of `files`.
          limit: how many instances, at most.
          seed: of synthetic instances.

        Returns:
          (instances, sizes).

        Raises:
          ValueError: names the file and the line that is no record, or says that there is none.
        """
        checks.whole("Workload.load", "limit", limit)
        checks.whole("Workload.load", "seed", seed)
        for path in paths:
            checks.path("Workload.load", path)
        if not paths:
            return self.synthetic(limit, seed)
        if len(paths) > len(self.files):
            raise ValueError(
                f"{self.title} got {len(paths)} files; expected at most {len(self.files)}: "
                f"{'; '.join(self.files)}"
            )
        records = self.read(*paths, limit=limit)
        if not records:
            raise ValueError(f"{os.fspath(paths[0])} holds nothing; expected {self.files[0]}")
        return self.index(records)

    def policy(self) -> FSM | None:
        """The policy learned for this model; None if it is not one of this package."""
        if WORKLOADS.get(self.name) is not self:  # another model may have the same name
            return None
        file = resources.files("jedbatch.models") / "policies" / f"{self.name}.json"
        return FSM.from_json(file.read_text()) if file.is_file() else None


def _index_trees(trees: Sequence[Instance]) -> tuple[list[Instance], Sizes]:
    words, labels = data.Vocabulary(), data.Vocabulary()
    instances = data.index_trees(trees, words, labels)
    return instances, {"num_words": len(words), "num_labels": len(labels)}


def _synthetic_trees(number: int, seed: int) -> tuple[list[Instance], Sizes]:
    return data.synthetic_treebank(number, seed=seed), {"num_words": 500, "num_labels": 5}


def _of_trees(name: str, title: str, module: Any) -> Workload:
    return Workload(
        name,
        title,
        ("a treebank, one bracketed tree a line",),
        data.read_trees,
        _index_trees,
        _synthetic_trees,
        module.flax_cells,
        module.scorer,
    )


def _two_types() -> Workload:
    def with_kinds(found: tuple[list[Instance], Sizes]) -> tuple[list[Instance], Sizes]:
        trees, sizes = found
        return data.with_kinds(trees), sizes

    return replace(
        _of_trees("treelstm2", "TreeLSTM, two types", twotypes),
        index=lambda trees: with_kinds(_index_trees(trees)),
        synthetic=lambda number, seed: with_kinds(_synthetic_trees(number, seed)),
    )


def _child_sum() -> Workload:
    def index(pairs: Sequence[Instance]) -> tuple[list[Instance], Sizes]:
        words = data.Vocabulary()
        return data.index_pairs(pairs, words), {"num_words": len(words)}

    return Workload(
        "childsum",
        "child-sum TreeLSTM",
        ("pairs of dependency trees, one JSON object a line",),
        data.read_pairs,
        index,
        lambda number, seed: (data.synthetic_pairs(number, seed=seed), {"num_words": 500}),
        childsum.plain_cells,
        childsum.scorer,
    )


def _of_sentences(name: str, title: str, spelled: bool) -> Workload:
    def index(sentences: Sequence[Instance]) -> tuple[list[Instance], Sizes]:
        words, tags, characters = data.Vocabulary(), data.Vocabulary(), data.Vocabulary()
        instances = data.index_tagged(sentences, words, tags, characters if spelled else None)
        sizes = {"num_words": len(words), "num_tags": len(tags)}
        return instances, sizes | ({"num_characters": len(characters)} if spelled else {})

    def synthetic(number: int, seed: int) -> tuple[list[Instance], Sizes]:
        sizes = {"num_words": 500, "num_tags": 9} | ({"num_characters": 40} if spelled else {})
        return data.synthetic_tagged(number, seed=seed, spelled=spelled), sizes

    return Workload(
        name,
        title,
        ("tagged sentences, one JSON object a line",),
        data.read_tagged,
        index,
        synthetic,
        tagger.flax_cells,
        tagger.scorer,
    )


def _translation() -> Workload:
    def index(pairs: Sequence[Instance]) -> tuple[list[Instance], Sizes]:
        source, target = data.Vocabulary(), data.Vocabulary()
        instances = data.index_translations(pairs, source, target)
        return instances, {"num_source": len(source), "num_target": len(target)}

    def synthetic(number: int, seed: int) -> tuple[list[Instance], Sizes]:
        sizes = {"num_source": 500, "num_target": 512}
        return data.synthetic_translations(number, seed=seed), sizes

    return Workload(
        "translation",
        "LSTM encoder-decoder",
        ("pairs of sentences, separated by a tab",),
        data.read_translations,
        index,
        synthetic,
        translation.flax_cells,
        translation.scorer,
    )


def _of_lattices(name: str, title: str, cells: Callable[..., Any]) -> Workload:
    def index(lattices: Sequence[Instance]) -> tuple[list[Instance], Sizes]:
        characters, words, tags = data.Vocabulary(), data.Vocabulary(), data.Vocabulary()
        instances = data.index_lattices(lattices, characters, words, tags)
        sizes = {"num_characters": len(characters), "num_words": len(words), "num_tags": len(tags)}
        return instances, sizes

    def synthetic(number: int, seed: int) -> tuple[list[Instance], Sizes]:
        sizes = {"num_characters": 300, "num_words": 500, "num_tags": 9}
        return data.synthetic_lattices(number, seed=seed), sizes

    return Workload(
        name,
        title,
        (
            "lattices of characters and words, one JSON object a line",
            "tags of their characters, one JSON object a line, if the lattices have none",
        ),
        data.read_lattices,
        index,
        synthetic,
        cells,
        lattice.scorer,
    )


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        _of_trees("treelstm", "TreeLSTM", tree),
        _two_types(),
        _of_trees("treegru", "TreeGRU", treegru),
        _of_trees("mvrnn", "MV-RNN", mvrnn),
        _child_sum(),
        _of_sentences("tagger", "BiLSTM tagger", spelled=False),
        _of_sentences("tagger_chars", "BiLSTM tagger that spells rare words", spelled=True),
        _translation(),
        _of_lattices("lattice_lstm", "LatticeLSTM", lattice.lstm_cells),
        _of_lattices("lattice_gru", "LatticeGRU", lattice.gru_cells),
    )
}
