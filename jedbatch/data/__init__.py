"""Readers of the data that the models eat, and synthetic twins that need no download.

For every kind of data there is a reader of files, `read_trees` and so on, that gives records of
strings; `read_trees.stream` gives them one by one. `index_trees` puts the numbers of a `Vocabulary`
in the place of strings, `synthetic_treebank` makes up records of numbers that are shaped like real
ones, `as_arrays` makes their parts arrays, and `minibatches` puts records together for training.
"""

from jedbatch.data.arrays import as_arrays
from jedbatch.data.code import Code, index_code, read_code, synthetic_code
from jedbatch.data.dependency import (
    Dependency,
    Pair,
    dependency_tree,
    index_dependencies,
    index_pairs,
    num_words,
    read_dependencies,
    read_pairs,
    synthetic_pairs,
)
from jedbatch.data.graphs import Molecule, index_molecules, read_molecules, synthetic_molecules
from jedbatch.data.lattices import (
    Lattice,
    Lexicon,
    build_lattice,
    index_lattices,
    read_lattices,
    read_lexicon,
    synthetic_lattices,
)
from jedbatch.data.minibatches import minibatches
from jedbatch.data.points import Points, synthetic_points
from jedbatch.data.tagged import Tagged, index_tagged, read_tagged, synthetic_tagged
from jedbatch.data.translations import (
    BEGIN,
    END,
    Translation,
    index_translations,
    read_translations,
    synthetic_translations,
)
from jedbatch.data.trees import (
    Tree,
    index_trees,
    num_nodes,
    parse_tree,
    read_trees,
    synthetic_treebank,
    with_kinds,
)
from jedbatch.data.vocabulary import Vocabulary

__all__ = [
    "BEGIN",
    "END",
    "Code",
    "Dependency",
    "Lattice",
    "Lexicon",
    "Molecule",
    "Pair",
    "Points",
    "Tagged",
    "Translation",
    "Tree",
    "Vocabulary",
    "as_arrays",
    "build_lattice",
    "dependency_tree",
    "index_code",
    "index_dependencies",
    "index_lattices",
    "index_molecules",
    "index_pairs",
    "index_tagged",
    "index_translations",
    "index_trees",
    "minibatches",
    "num_nodes",
    "num_words",
    "parse_tree",
    "read_code",
    "read_dependencies",
    "read_lattices",
    "read_lexicon",
    "read_molecules",
    "read_pairs",
    "read_tagged",
    "read_translations",
    "read_trees",
    "synthetic_code",
    "synthetic_lattices",
    "synthetic_molecules",
    "synthetic_pairs",
    "synthetic_points",
    "synthetic_tagged",
    "synthetic_translations",
    "synthetic_treebank",
    "with_kinds",
]
