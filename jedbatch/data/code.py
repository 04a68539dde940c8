"""Syntax trees of code, whose nodes are of many kinds and have any number of children.

A tree is a plain tuple `(kind, *children)`.
"""

import bisect
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jedbatch import checks
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import entry, json_object, read_lines, reader, strings
from jedbatch.data.rooted import A_TREE, Rooted, renumbered, rooted
from jedbatch.data.vocabulary import Vocabulary

Code = Rooted  # (kind, *children)


@reader
def read_code(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Code]:
    """Reads syntax trees, one JSON object a line, gzipped if the name ends in `.gz`.

    A line holds `{"types": [...], "parents": [...]}`: the kind of each node and the position of its
    parent, counted from 0; the root comes first and has the parent -1, all others come after their
    parents. What else the line holds is left alone.

    Args:
      path: the file.
      limit: the number of trees to read at most.

    Returns:
      Trees `(kind, *children)` of strings. `read_code.stream` reads them one by one.

    Raises:
      ValueError: names the file and the line that is not a tree.
    """
    expected = 'one tree a line, such as {"types": ["Return", "Name"], "parents": [-1, 0]}'
    return read_lines(path, limit, _code, expected)


def _code(line: str) -> Code:
    """The tree in a line."""
    record = json_object(line)
    kinds = strings(record, "types")
    parents = entry(record, "parents", list, "a list")
    if len(kinds) != len(parents):
        raise ValueError(f"there are {len(kinds)} types and {len(parents)} parents")
    for number, parent in enumerate(parents):
        if type(parent) is not int or not min(number - 1, 0) <= parent < number:
            at = f"from 0 to {number - 1}" if number else "-1"
            raise ValueError(f"the parent of node {number} is {checks.brief(parent)}, not {at}")
    return rooted(kinds, parents)


def index_code(trees: Sequence[Code], kinds: Vocabulary) -> list[Code]:
    """The trees with numbers for kinds."""
    vocabularies("index_code", kinds=kinds)
    return each("index_code", trees, lambda tree: renumbered(tree, kinds), A_TREE)


# A grammar after the abstract syntax of Python: for each sort of node the kinds it may be,
# how often, and the sorts of their children (. for none). A kind may have several rows. Sorts are
# (f)unctions, (p)arameters, their (n)ames, (s)tatements, (e)xpressions, (k)eywords, handlers of
# e(x)ceptions, (g)enerators, and operators that compare (<), join (+), turn (!) and connect (&).
_GRAMMAR = {
    "f": "FunctionDef 1 p",
    "p": "arguments 3 . | arguments 33 n | arguments 27 nn | arguments 15 nnn "
    "| arguments 8 nnnn | arguments 3 nnnee | arguments 2 nnnnnee",
    "n": "arg 99 . | arg 1 e",
    "s": "Assign 326 ee | Assign 4 eee | Expr 210 e | If 190 es | Return 95 e | Return 8 . "
    "| Raise 30 e | Raise 4 . | Raise 2 ee | Try 26 sx | For 26 ees | AugAssign 18 e+e "
    "| While 8 es | With 8 is | Assert 7 e | Assert 2 ee | Pass 14 . | Delete 5 e "
    "| Import 4 a | ImportFrom 5 a | Global 2 . | Break 6 . | Continue 6 . | AnnAssign 2 eee "
    "| Nonlocal 1 . | FunctionDef 3 ps | AsyncWith 0.5 is | AsyncFor 0.3 ees",
    "e": "Name 463 . | Constant 139 . | Attribute 160 e | Call 22 e | Call 62 ee | Call 18 eee "
    "| Call 8 eek | Call 6 eeee | Call 3 eekkk | Call 1 eeeekkkk | Compare 31 e<e "
    "| Compare 1 e<e<e | BinOp 21 e+e | Subscript 20 ee | UnaryOp 12 !e | Tuple 10 ee "
    "| Tuple 3 eee | Tuple 2 e | Tuple 1 eeeeee | BoolOp 8 &ee | BoolOp 2 &eee | List 2 . "
    "| List 2 ee | List 1 eeeeeeee | Dict 1 . | Dict 1 eeee | Dict 0.3 eeeeeeeeeeeeee "
    "| JoinedStr 1 vv | JoinedStr 1 vvvv | Slice 2 e | Slice 2 ee | Slice 1 . | ListComp 1 eg "
    "| GeneratorExp 1 eg | IfExp 1.5 eee | Starred 1.5 e | Lambda 1 pe | Yield 1 e "
    "| Await 0.7 e | DictComp 0.2 eeg | SetComp 0.1 eg | Set 0.2 eee | NamedExpr 0.1 ee "
    "| YieldFrom 0.2 e",
    "k": "keyword 1 e",
    "x": "ExceptHandler 5 es | ExceptHandler 1 s",
    "g": "comprehension 4 ee | comprehension 1 eee",
    "i": "withitem 1 e | withitem 1 ee",
    "a": "alias 1 .",
    "v": "Constant 1 . | FormattedValue 1 e",
    "<": "Eq 27 . | Is 19 . | NotEq 10 . | In 10 . | IsNot 10 . | Lt 7 . | Gt 7 . | NotIn 5 . "
    "| GtE 3 . | LtE 2 .",
    "+": "Add 53 . | Mod 25 . | Sub 12 . | Mult 5 . | BitOr 3 . | BitAnd 2 . | Div 1 . "
    "| FloorDiv 1 . | LShift 1 . | RShift 1 . | BitXor 0.5 . | Pow 0.5 . | MatMult 0.1 .",
    "!": "Not 67 . | USub 31 . | Invert 2 . | UAdd 0.2 .",
    "&": "And 6 . | Or 4 .",
}
# Kinds that more statements may be put into.
_BODIES = {"FunctionDef", "If", "For", "While", "With", "Try", "ExceptHandler"}


def _rows(text: str) -> tuple[list[str], list[str], list[float]]:
    """(kinds, sorts of their children, cumulative shares) of an entry of the grammar."""
    rows = [row.split() for row in text.split(" | ")]
    shares = np.cumsum([float(often) for _, often, _ in rows])
    below = [sorts.replace(".", "") for *_, sorts in rows]
    return [kind for kind, *_ in rows], below, (shares / shares[-1]).tolist()


_ROWS = {sort: _rows(text) for sort, text in _GRAMMAR.items()}
_LEAF_SHARE = 0.59  # the share of expressions without children, which come first
_KINDS = {
    kind: number
    for number, kind in enumerate(dict.fromkeys(k for kinds, *_ in _ROWS.values() for k in kinds))
}


@checks.sizes
def synthetic_code(num_trees: int, *, seed: int = 0, mean_nodes: float = 59.5) -> list[Code]:
    """Random trees shaped like syntax trees of functions.

    Sizes follow a lognormal distribution (8 nodes at least, 59.5 on average, 5 % above 190); the
    trees are derived from a small grammar of Python, so kinds of nodes say how many children they
    have and what these are. Depth is 6 on average; 51 % of the nodes have no children, 20 % one,
    16 % two, 8 % three, and few as many as twenty.

    Args:
      num_trees: how many.
      seed: of the random generator; the same seed gives the same trees.
      mean_nodes: nodes per tree on average.

    Returns:
      Trees `(kind, *children)`; kinds are numbers below 90.

    Examples:
      >>> from jedbatch.data import synthetic_code
      >>> kind, parameters, *statements = synthetic_code(1)[0]
      >>> kind
      0
    """
    rng = np.random.default_rng(seed)
    sizes = mean_nodes * (0.134 + 0.866 * rng.lognormal(-0.683, 1.169, num_trees))
    return [rooted(*_derive(rng, size)) for size in np.minimum(sizes, 15 * mean_nodes)]


def _derive(rng: np.random.Generator, size: float) -> tuple[list[int], list[int]]:
    """(kinds, parents) of the nodes of a function, parents before children."""
    kinds: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    bodies: list[int] = []  # nodes that may get more statements

    def grow(sort: str, parent: int) -> None:
        queue = [(sort, parent)]
        for sort, parent in queue:
            names, below, shares = _ROWS[sort]
            depth = depths[parent] + 1 if depths else 0
            # People write shallow code: somewhere below depth 4, expressions end.
            ends = sort == "e" and depth > 3 + rng.geometric(0.25)
            row = bisect.bisect(shares, rng.random() * (_LEAF_SHARE if ends else 1))
            if names[row] in _BODIES:
                bodies.append(len(kinds))
            queue += [(child, len(kinds)) for child in below[row]]
            kinds.append(_KINDS[names[row]])
            parents.append(parent)
            depths.append(depth)

    grow("f", -1)
    while len(kinds) < max(8, size - 7):  # the last statement makes up for it
        grow("s", bodies[int(len(bodies) * rng.random() ** 4)])  # mostly of the function
    return kinds, parents
