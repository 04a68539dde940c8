"""Readers of the data that the models eat, and synthetic twins that need no download."""

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
    "Tree",
    "Vocabulary",
    "index_trees",
    "num_nodes",
    "parse_tree",
    "read_trees",
    "synthetic_treebank",
]
