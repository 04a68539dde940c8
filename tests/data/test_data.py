"""Readers, numbers for words, and minibatches."""

import gzip
import json
from itertools import chain, islice

import numpy as np
import pytest

from jedbatch import data
from jedbatch.data import Vocabulary, minibatches

# --- readers ---


def of_strings(numbers, letter):
    return tuple(f"{letter}{number}" for number in numbers)


TAGGED = [
    (of_strings(words, "w"), of_strings(tags, "t"))
    for words, tags in data.synthetic_tagged(5, mean_length=5)
]
PAIRS = [
    (of_strings(source, "s"), of_strings(target, "ö"))
    for source, target in data.synthetic_translations(5, mean_length=4)
]
LATTICES = [
    (tuple("abcab"), ((0, 2, "ab"), (0, 3, "abc"), (2, 5, "cab")), ("O", "B", "I", "O", "O")),
    (("é", " ", "漢"), (), ("O", "O", "B")),
]
MOLECULES = [
    (("C",), (), -1.0),
    (("C", "O", "N"), ((0, 1, 2), (2, 1, 1), (0, 2, 4)), 0.25),
]
CODE = [("Return", ("Call", ("Name",), ("Name",)), ("Pass",)), ("Pass",)]
DEPENDENCIES = [("sings", ("man", ("A",)), ("now",)), ("No",)]
TREES = [("S", ("A", "a"), ("@S", ("B", "b"), ("C", "c"))), ("A", "a")]


def code_line(root):
    """Nodes in the order of a text, parents before children."""
    types, parents = [], []

    def visit(node, parent):
        number = len(types)
        types.append(node[0])
        parents.append(parent)
        for child in node[1:]:
            visit(child, number)

    visit(root, -1)
    return json.dumps({"types": types, "parents": parents, "source": "somewhere"})


def dependency_line(root):
    line = json.loads(code_line(root))
    return json.dumps({"words": line["types"], "heads": [p + 1 for p in line["parents"]]})


def bracketed(tree):
    below = tree[1] if len(tree) == 2 else " ".join(map(bracketed, tree[1:]))
    return f"({tree[0]} {below})"


def dumps(*names):
    return lambda record: json.dumps(dict(zip(names, record, strict=True)) | {"id": 3})


FORMATS = {
    "tokens": (data.read_tagged, TAGGED, dumps("tokens", "tags")),
    "chars": (data.read_tagged, TAGGED, dumps("chars", "tags")),
    "translations": (data.read_translations, PAIRS, lambda p: "\t".join(map(" ".join, p))),
    "lattices": (data.read_lattices, LATTICES, dumps("chars", "words", "tags")),
    "molecules": (data.read_molecules, MOLECULES, dumps("atoms", "bonds", "y")),
    "code": (data.read_code, CODE, code_line),
    "dependencies": (data.read_dependencies, DEPENDENCIES, dependency_line),
    "trees": (data.read_trees, TREES, bracketed),
}


@pytest.mark.parametrize("name", FORMATS)
def test_reading_what_was_written(name, tmp_path):
    read, records, line = FORMATS[name]
    lines = [line(record) for record in records]
    plain, zipped = tmp_path / "records", tmp_path / "records.gz"
    plain.write_text("\r\n\n".join(lines) + "\n", encoding="utf-8", newline="")
    with gzip.open(zipped, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    assert read(plain) == read(zipped) == read(str(plain)) == records
    assert read(plain, limit=1) == records[:1]
    assert read(plain, limit=0) == []
    stream = read.stream(plain)
    assert next(stream) == records[0]
    assert list(stream) == records[1:]


@pytest.mark.parametrize("name", FORMATS)
def test_streams_read_no_further_than_asked(name, tmp_path):
    read, records, line = FORMATS[name]
    path = tmp_path / "records"
    path.write_bytes(line(records[0]).encode() + b"\n\n\xff\n")
    assert read(path, limit=1) == [*islice(read.stream(path), 1)] == records[:1]
    with pytest.raises(ValueError, match=r"records, line 3: .*can't decode byte.*; expected "):
        read(path)


def changed(name, **changes):
    """A good line with other entries; None takes an entry away."""
    _, records, line = FORMATS[name]
    entries = json.loads(line(records[-1])) | changes
    return json.dumps({k: v for k, v in entries.items() if v is not None})


BAD = [
    *(
        (name, "{", "Expecting property name")
        for name in FORMATS
        if name not in ("trees", "translations")
    ),
    *((name, "[1]", "'.1.' is no object") for name in ("chars", "lattices", "molecules", "code")),
    ("tokens", changed("tokens", tokens=None), 'there is no "tokens"'),
    ("tokens", changed("tokens", tags=None), 'there is no "tags"'),
    ("tokens", changed("tokens", tokens="In Rome"), "\"tokens\" is 'In Rome', not a list"),
    ("tokens", changed("tokens", tokens=["In", 3]), '"tokens" holds 3; expected strings'),
    ("tokens", changed("tokens", tokens=["In", ""]), "\"tokens\" holds ''"),
    ("tokens", changed("tokens", tokens=[], tags=[]), '"tokens" is empty'),
    ("tokens", changed("tokens", tags=["O"]), "words and 1 tags"),
    ("translations", "one side", "there are 0 tabs"),
    ("translations", "a\tb\tc", "there are 2 tabs"),
    ("translations", "a b\t  ", "2 source words and 0 target words"),
    ("lattices", changed("lattices", tags=None), 'no "tags"; `read_lattices` reads them from'),
    ("lattices", changed("lattices", tags=["O"]), "3 characters and 1 tags"),
    ("lattices", changed("lattices", chars=None), 'there is no "chars"'),
    ("lattices", changed("lattices", words={}), '"words" is {}, not a list'),
    ("lattices", changed("lattices", words=[3]), "3 is no word, such as"),
    ("lattices", changed("lattices", words=[[0, 2]]), "is no word"),
    ("lattices", changed("lattices", words=[[0, True, "x"]]), "is no word"),
    ("lattices", changed("lattices", words=[[0, 1, "é"]]), "not made of two or more of the 3"),
    ("lattices", changed("lattices", words=[[1, 4, " 漢"]]), "not made of two or more of the 3"),
    ("lattices", changed("lattices", words=[[-2, 2, "é "]]), "not made of two or more"),
    ("lattices", changed("lattices", words=[[0, 2, "漢 "]]), "'漢 '.* are 'é '"),
    ("molecules", changed("molecules", atoms=[]), '"atoms" is empty'),
    ("molecules", changed("molecules", y=None), 'there is no "y"'),
    ("molecules", changed("molecules", y="3"), "\"y\" is '3', not a number"),
    ("molecules", changed("molecules", y=float("nan")), "finite number"),
    ("molecules", changed("molecules", bonds=[[0, 1]]), "is no bond, such as"),
    ("molecules", changed("molecules", bonds=[[0, 3, 1]]), "not between two of the 3 atoms"),
    ("molecules", changed("molecules", bonds=[[0, 0, 1]]), "not between two"),
    ("molecules", changed("molecules", bonds=[[0, 1.0, 1]]), "not between two"),
    ("molecules", changed("molecules", bonds=[[0, 1, 1], [1, 0, 2]]), "second bond between"),
    ("code", changed("code", types=[]), '"types" is empty'),
    ("code", changed("code", types=["A", "B"]), "2 types and 1 parents"),
    ("code", changed("code", parents=[0]), "parent of node 0 is 0, not -1"),
    ("code", changed("code", types=["A", "B"], parents=[-1, -1]), "node 1 is -1, not from 0 to 0"),
    ("code", changed("code", types=["A", "B"], parents=[-1, 1]), "node 1 is 1, not from 0 to 0"),
    ("code", changed("code", types=["A", "B"], parents=[-1, "0"]), "node 1 is '0'"),
    ("dependencies", changed("dependencies", heads=[2]), "head of word 1 is 2"),
    ("dependencies", changed("dependencies", words=None), 'there is no "tokens"'),
    ("molecules", f'{{"atoms": ["C"], "bonds": [], "y": 1{"0" * 400}}}', "too large"),
    ("tokens", "[" * 100_000, "recursion"),
    ("trees", "(A)", "column 2 holds 'A' alone"),
    ("trees", "(A a", "1 brackets are not closed"),
]


@pytest.mark.parametrize(("name", "bad", "match"), BAD)
def test_malformed_files(name, bad, match, tmp_path):
    read, records, line = FORMATS[name]
    path = tmp_path / "records"
    path.write_text(f"{line(records[0])}\n\n{bad}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"records, line 3: .*{match}.*; expected .* line"):
        read(path)
    assert read(path, limit=1) == records[:1]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_part_of_records(name, tmp_path):
    """A byte order mark before the first, and lines that are blank in any script."""
    read, records, line = FORMATS[name]
    path = tmp_path / "records"
    lines = [line(record) for record in records]
    path.write_text("\n\u3000\n".join(["\ufeff" + lines[0], *lines[1:]]), encoding="utf-8")
    assert read(path) == records


def write(path, records, *names):
    path.write_text("".join(dumps(*names)(record) + "\n" for record in records))
    return path


def test_tags_of_lattices_from_another_file(tmp_path):
    bare = write(tmp_path / "bare", [r[:2] for r in LATTICES], "chars", "words")
    tags = [(characters, tags) for characters, _, tags in LATTICES]
    own = write(tmp_path / "own", tags, "chars", "tags")
    assert data.read_lattices(bare, own) == data.read_lattices(bare, tags=own) == LATTICES
    assert data.read_lattices(bare, tags=own, limit=1) == LATTICES[:1]
    # Where a lattice has tags too, those of the other file count.
    others = write(tmp_path / "others", LATTICES, "chars", "words", "tags")
    new = [(characters, ("X",) * len(tags)) for characters, tags in tags]
    read = data.read_lattices(others, tags=write(tmp_path / "new", new, "chars", "tags"))
    assert [tags for *_, tags in read] == [tags for _, tags in new]


@pytest.mark.parametrize(
    ("tags", "match"),
    [
        (lambda good: good[::-1], r"bare, line 1: .*tags has other characters there; expected"),
        (lambda good: good[:1], r"bare, line 2: .*tags ends before it"),
        (lambda good: [*good, good[0]], r"bare ends before .*tags; expected as many"),
        (
            lambda good: [good[0], (good[1][0], ["O"])],
            r"bare, line 2: .*tags, line 2: there are 3 words and 1 tags",
        ),
    ],
)
def test_tags_that_belong_to_other_lattices(tags, match, tmp_path):
    good = [(characters, tags) for characters, _, tags in LATTICES]
    bare = write(tmp_path / "bare", [r[:2] for r in LATTICES], "chars", "words")
    with pytest.raises(ValueError, match=match):
        data.read_lattices(bare, tags=write(tmp_path / "tags", tags(good), "chars", "tags"))


def test_lexicon(tmp_path):
    path = tmp_path / "lexicon.txt"
    path.write_text("\ufeffab 12 n\n\u3000\n\nabc\nd\n", encoding="utf-8")
    lexicon = data.read_lexicon(path)
    assert lexicon == {"ab", "abc", "d"}
    assert lexicon.longest == 3
    assert data.Lexicon().longest == 0


@pytest.mark.parametrize("seed", range(5))
def test_lattices_against_all_substrings(seed):
    rng = np.random.default_rng(seed)
    draw = lambda n: "".join(rng.choice(list("abc"), n))  # noqa: E731
    lexicon = {draw(rng.integers(1, 6)) for _ in range(25)}
    text = draw(60)
    expected = [
        (start, end, text[start:end])
        for start in range(61)
        for end in range(start + 2, 61)
        if text[start:end] in lexicon
    ]
    assert len(expected) > 20
    assert data.build_lattice(text, lexicon) == expected
    assert data.build_lattice(list(text), data.Lexicon(lexicon)) == expected
    assert data.build_lattice(text, ()) == data.build_lattice("", lexicon) == []


def test_lattices_are_made_of_characters():
    with pytest.raises(ValueError, match=r"characters\[1\] = 'bc'; expected a single character"):
        data.build_lattice(["a", "bc"], {"ab"})


def test_text_is_searched_no_further_than_the_longest_word():
    class Counting(data.Lexicon):
        asked = 0

        def __contains__(self, word):
            type(self).asked += 1
            return super().__contains__(word)

    data.build_lattice("a" * 1000, Counting(["ab", "abcd"]))
    assert Counting.asked <= 3 * 1000


# --- numbers ---


def test_numbers_of_tagged_sentences():
    words, tags = Vocabulary(unknown="?"), Vocabulary()
    indexed = data.index_tagged(TAGGED, words, tags)
    assert [(tuple(words.words(a)), tuple(tags.words(b))) for a, b in indexed] == TAGGED


def test_rare_words_are_spelled():
    words, tags, characters = Vocabulary(), Vocabulary(), Vocabulary(unknown="?")
    sentence = (("the", "cat", "the"), ("D", "N", "D"))
    (indexed,) = data.index_tagged([sentence], words, tags, characters, rare=2)
    the, cat, again = indexed[0]
    assert the == again == 0
    assert characters.words(cat) == list("cat")
    # Words to test with are never new: known ones keep their numbers, all others are spelled.
    words.freeze()
    characters.freeze()
    sentences = [(("bat", "the", "bat", "bat"), ("N", "D", "N", "N"))]
    ((bat, the, *_), _) = data.index_tagged(sentences, words, tags, characters, rare=2)[0]
    assert the == 0
    assert bat == (0, *cat[1:])
    assert list(words) == ["the"]


def test_numbers_of_translations():
    source, target = Vocabulary(unknown="?"), Vocabulary()
    indexed = data.index_translations(PAIRS, source, target)
    assert target.words([data.BEGIN, data.END]) == ["<s>", "</s>"]
    for (a, b), (c, d) in zip(PAIRS, indexed, strict=True):
        assert tuple(source.words(c)) == a
        assert tuple(target.words(d)) == (*b, "</s>")
        assert min(d[:-1]) > 1
    with pytest.raises(ValueError, match=r"begins with \['\?'\]; expected .* as in Vocabulary\("):
        data.index_translations(PAIRS, source, Vocabulary(unknown="?"))


def test_numbers_of_lattices():
    characters, words, tags = Vocabulary(), Vocabulary(), Vocabulary()
    for lattice, expected in zip(
        data.index_lattices(LATTICES, characters, words, tags), LATTICES, strict=True
    ):
        text, found, own = lattice
        spans = tuple((a, b, *words.words([word])) for a, b, word in found)
        assert (tuple(characters.words(text)), spans, tuple(tags.words(own))) == expected


def test_numbers_of_graphs():
    atoms, bonds, kinds = Vocabulary(), Vocabulary(), Vocabulary()
    for (a, b, y), expected in zip(
        data.index_molecules(MOLECULES, atoms, bonds), MOLECULES, strict=True
    ):
        b = tuple((i, j, *bonds.words([kind])) for i, j, kind in b)
        assert (tuple(atoms.words(a)), b, y) == expected
    spell = lambda root: (*kinds.words(root[:1]), *map(spell, root[1:]))  # noqa: E731
    assert [spell(root) for root in data.index_code(CODE, kinds)] == CODE
    assert [spell(root) for root in data.index_dependencies(CODE, kinds)] == CODE


def test_records_as_arrays():
    records = [((3, 1, 4), (0, 2, 2), 5), ((), (), True), (((0.5, 2), (1, -1)), 1.5)]
    words, points = data.as_arrays(records)[0], data.as_arrays(records)[2]
    assert [x.tolist() for x in words] == [[3, 1, 4], [0, 2, 2], 5]
    assert [x.tolist() for x in points] == [[[0.5, 2], [1, -1]], 1.5]
    kinds = [[(x.dtype.name, x.ndim) for x in record] for record in data.as_arrays(records)]
    assert kinds[:2] == [[("int32", 1), ("int32", 1), ("int32", 0)]] * 2
    assert kinds[2] == [("float32", 2), ("float32", 0)]
    spelled = data.synthetic_tagged(9, spelled=True)
    for bad in (spelled, [*records, (("a",), (0,))], [*records, (None,)]):
        with pytest.raises(ValueError, match=r"in record \d; expected numbers.*`Vocabulary`"):
            data.as_arrays(bad)


def test_deep_code(tmp_path):
    n = 5000
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps({"types": ["x"] * n, "parents": list(range(-1, n - 1))}))
    (root,) = data.index_code(data.read_code(path), Vocabulary())
    assert data.num_words(root) == n


def test_vocabularies():
    words = Vocabulary(["<s>", "</s>", "?", "</s>"], unknown="?")
    assert [words[w] for w in ("<s>", "</s>", "?", "new")] == [0, 1, 2, 3]
    assert not words.frozen
    words.freeze()
    assert words.frozen
    assert "newer" not in words
    assert words["newer"] == 2
    assert "new" in words
    assert words.words(iter([3, 0])) == ["new", "<s>"]
    for number in (-1, 4):
        with pytest.raises(ValueError, match=f"there is no word {number}; the last is 3"):
            words.words([number])


# --- two kinds of nodes ---


def test_kinds_of_nodes():
    trees = data.synthetic_treebank(300, seed=3, mean_length=8)
    kinds = []

    def without(node):
        if len(node) == 2:
            return node
        label, left, right, kind = node
        kinds.append(kind)
        return (label, without(left), without(right))

    twofold = data.with_kinds(trees, seed=1)
    assert [without(tree) for tree in twofold] == trees
    assert set(kinds) == {0, 1}
    assert 0.46 < np.mean(kinds) < 0.54
    assert list(map(data.num_nodes, twofold)) == list(map(data.num_nodes, trees))
    assert twofold == data.with_kinds(trees, seed=1) != data.with_kinds(trees, seed=2)
    words, labels = Vocabulary(range(500)), Vocabulary(range(5))
    assert data.index_trees(twofold, words, labels) == twofold


def test_kinds_of_nodes_of_deep_trees():
    tree = (0, 1)
    for _ in range(3000):
        tree = (0, tree, (0, 2))
    assert data.num_nodes(data.with_kinds([tree])[0]) == 6001


# --- minibatches ---


def joined(batches):
    return list(chain.from_iterable(batches))


def streamed(count):
    yield from range(count)


@pytest.mark.parametrize("records", [range, streamed], ids=["sequence", "stream"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 50])
def test_every_record_is_in_one_minibatch(records, seed, count):
    options = {"seed": seed, "buffer": 16}
    whole = list(minibatches(records(count), 4, drop_last=False, **options))
    assert sorted(joined(whole)) == list(range(count))
    assert [len(batch) for batch in whole] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    assert whole == list(minibatches(records(count), 4, drop_last=False, **options))
    equal = list(minibatches(records(count), 4, **options))
    assert equal == whole[: count // 4]
    if seed is None:
        assert joined(whole) == list(range(count))
    elif count > 7:
        assert whole != list(minibatches(records(count), 4, seed=4, drop_last=False, buffer=16))


class Numbers:
    """A data set: records by number, and how many there are."""

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        return range(5000)[index]


@pytest.mark.parametrize("records", [range(5000), np.arange(5000), Numbers()])
def test_sequences_are_shuffled_all_together(records):
    """Not in a buffer, whatever their type."""
    shuffled = joined(minibatches(records, 50, seed=0))
    assert shuffled == joined(minibatches(range(5000), 50, seed=0))
    assert sorted(shuffled) == joined(minibatches(records, 50)) == list(range(5000))


def test_mappings_are_no_sequences():
    assert list(minibatches({"a": 1, "b": 2}, 2, seed=0)) in ([["a", "b"]], [["b", "a"]])


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("buffer", [4, 10, 64])
def test_streams_are_held_in_part(seed, buffer):
    taken = 0

    def stream():
        nonlocal taken
        for k in range(300):
            taken += 1
            yield k

    given = 0
    for batch in minibatches(stream(), 4, seed=seed, buffer=buffer):
        assert taken - given <= (4 if seed is None else buffer)
        given += len(batch)
    assert given == 300


def test_nothing_is_taken_before_it_is_asked_for():
    def stream():
        raise AssertionError
        yield

    minibatches(stream(), 4, seed=0)


def test_records_of_streams_move_about():
    """Of a buffer, every record is as likely to come first."""
    first = [next(minibatches(streamed(100), 1, seed=k, buffer=8))[0] for k in range(400)]
    counts = np.bincount(first, minlength=8)
    assert len(counts) == 8
    assert counts.min() > 25
    (batch,) = minibatches(streamed(8), 8, seed=0, buffer=8)
    assert batch != sorted(batch)


def test_generators_go_on_from_epoch_to_epoch():
    rng = np.random.default_rng(5)
    epochs = [joined(minibatches(range(30), 5, seed=rng)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert joined(minibatches(range(30), 5, seed=5)) == epochs[0]


def test_minibatches_of_a_file(tmp_path):
    path = tmp_path / "trees.txt"
    path.write_text("".join(f"(A w{k})\n" for k in range(20)))
    batches = list(minibatches(data.read_trees.stream(path), 6, seed=1, buffer=8, drop_last=False))
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]
    assert sorted(joined(batches)) == sorted(data.read_trees(path))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"size": 0}, "size=0; expected a whole number from 1"),
        ({"size": 8, "seed": 1, "buffer": 4}, "buffer=4; expected at least size=8"),
    ],
)
def test_sizes_that_are_too_small(options, match):
    with pytest.raises(ValueError, match=match):
        minibatches(streamed(10), **options)
