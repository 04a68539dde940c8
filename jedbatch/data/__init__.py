"""Readers of the data that the models eat, and synthetic twins that need no download."""

from jedbatch.data.dependency import (
    Dependency,
    Pair,
    dependency_tree,
    index_pairs,
    num_words,
    read_pairs,
    synthetic_pairs,
)
from jedbatch.data.trees import (
    Tree,
    Vocabulary,
    index_trees,
    num_nodes,
    parse_tree,
    read_trees,
    synthetic_treebank,
)

__all__ = [
    "Dependency",
    "Pair",
    "Tree",
    "Vocabulary",
    "dependency_tree",
    "index_pairs",
    "index_trees",
    "num_nodes",
    "num_words",
    "parse_tree",
    "read_pairs",
    "read_trees",
    "synthetic_pairs",
    "synthetic_treebank",
]
