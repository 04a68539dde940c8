"""Synthetic twins have the statistics of the real data, and can be learned from."""

import subprocess
import sys

import numpy as np
import pytest

from jedbatch import data

SYNTHETIC = {
    "tagged": data.synthetic_tagged,
    "spelled": lambda n, **options: data.synthetic_tagged(n, spelled=True, **options),
    "translations": data.synthetic_translations,
    "lattices": data.synthetic_lattices,
    "molecules": data.synthetic_molecules,
    "code": data.synthetic_code,
    "points": data.synthetic_points,
}


def parts_of(x):
    return [part for y in x for part in parts_of(y)] if isinstance(x, tuple) else [x]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_records_are_plain_and_follow_from_the_seed(name):
    make = SYNTHETIC[name]
    records = make(20, seed=3)
    assert records == make(20, seed=3)
    assert records[:5] != make(5, seed=4)
    assert make(0) == []
    for record in records:
        assert isinstance(record, tuple)
        assert {type(part) for part in parts_of(record)} <= {int, float}
        assert all(part >= 0 for part in parts_of(record) if type(part) is int)
        hash(record)


def test_synthetic_records_do_not_depend_on_the_process():
    code = (
        "from jedbatch import data; "
        "print(data.synthetic_lattices(3), data.synthetic_code(3), data.synthetic_molecules(3))"
    )
    got = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    made = (data.synthetic_lattices(3), data.synthetic_code(3), data.synthetic_molecules(3))
    assert got.stdout.strip() == " ".join(map(str, made))


def assert_lengths(lengths, mean, median, p95, least):
    """Statistics of many records, by the published ones of real data."""
    assert abs(np.mean(lengths) - mean) < 0.05 * mean
    assert abs(np.median(lengths) - median) < 0.09 * median
    assert abs(np.percentile(lengths, 95) - p95) < 0.08 * p95
    assert least <= min(lengths) <= least + 3


def test_synthetic_tagged_sentences_are_shaped_like_real_ones():
    sentences = data.synthetic_tagged(4000, seed=1)
    assert all(len(words) == len(tags) for words, tags in sentences)
    assert_lengths([len(words) for words, _ in sentences], 24.85, 23, 46, least=3)
    shares = np.bincount([t for _, tags in sentences for t in tags]) / sum(
        len(tags) for _, tags in sentences
    )
    assert len(shares) == 9
    assert 0.82 < shares[0] < 0.92
    assert max(w for words, _ in sentences for w in words) < 500


def test_tags_follow_from_a_word_and_its_neighbours():
    tag_of, of_word = {}, {}
    for words, tags in data.synthetic_tagged(3000, seed=2, num_words=40):
        for left, word, right, tag in zip(
            (None, *words), words, (*words[1:], None), tags, strict=False
        ):
            assert tag_of.setdefault((left, word, right), tag) == tag
            of_word.setdefault(word, set()).add(tag)
    assert len(tag_of) > 1000
    assert max(map(len, of_word.values())) == 3  # no entity, and two senses
    by_sides = {(left, word): set() for left, word, _ in tag_of}
    for (left, word, _), tag in tag_of.items():
        by_sides[left, word].add(tag)
    assert any(len(tags) == 2 for tags in by_sides.values())  # the right neighbour matters too


def test_spelled_words_tell_their_tags_by_their_last_characters():
    sentences = data.synthetic_tagged(2000, seed=2, spelled=True)
    spelled = [word for words, _ in sentences for word in words if isinstance(word, tuple)]
    assert 0.12 < len(spelled) / sum(len(words) for words, _ in sentences) < 0.21
    assert 6.5 < np.mean(list(map(len, spelled))) < 8.5
    assert max(map(max, spelled)) < 40
    assert len(set(spelled)) > 0.9 * len(spelled)
    assert {tag for _, tags in sentences for tag in tags} == set(range(9))
    for words, tags in sentences:
        for word, tag in zip(words, tags, strict=True):
            if isinstance(word, tuple):
                assert tag in {0, *word[-2:]}


def test_synthetic_translations_are_shaped_like_real_ones():
    pairs = data.synthetic_translations(4000, seed=1)
    assert_lengths([len(source) for source, _ in pairs], 19.3, 16, 43, least=2)
    assert_lengths([len(target) - 1 for _, target in pairs], 23.9, 20, 55, least=2)
    for source, target in pairs:
        assert target[-1] == data.END
        assert min(target[:-1]) > data.END
        assert max(source) < 500
        assert max(target) < 512


def test_translations_are_word_for_word():
    """As many words of each kind as the source has, whatever their order; the same every time."""
    found = {}
    pairs = data.synthetic_translations(2000, seed=3, num_words=10, mean_length=4)
    words_for = {}
    for source, target in pairs:
        assert found.setdefault(source, target) == target
        if len(set(source)) == 1:
            assert len(target[:-1]) % len(source) == 0
            words_for[source[0]] = target[: len(target[:-1]) // len(source)]
    assert len(words_for) == 10
    moved = 0
    for source, target in pairs:
        in_order = [t for word in source for t in words_for[word]]
        assert sorted(in_order) == sorted(target[:-1])
        moved += in_order != list(target[:-1])
    assert 0.1 < moved / len(pairs) < 0.9


@pytest.mark.parametrize(
    ("options", "lengths", "words"),
    [({}, (54.6, 44, 134, 10), 16.9), ({"density": 0.53, "mean_length": 44.1}, None, 23.3)],
)
def test_synthetic_lattices_are_shaped_like_real_ones(options, lengths, words):
    lattices = data.synthetic_lattices(2500, seed=1, **options)
    characters = [len(text) for text, *_ in lattices]
    assert abs(np.mean([len(found) for _, found, _ in lattices]) - words) < 0.06 * words
    if lengths:
        assert_lengths(characters, *lengths)
        assert max(characters) <= 175
    sizes = np.bincount([end - start for _, found, _ in lattices for start, end, _ in found])
    shares = sizes / sizes.sum()
    assert np.abs(shares[2:5] - [0.89, 0.08, 0.03]).max() < 0.03
    assert len(shares) == 5
    ends = [np.bincount([end for _, end, _ in found], minlength=1) for _, found, _ in lattices]
    assert 0.01 < (np.concatenate(ends) > 1).sum() / sum(characters) < 0.04


def test_words_of_synthetic_lattices_are_all_there():
    """A lattice has all the words of the lexicon, each spelled the same everywhere."""
    lattices = data.synthetic_lattices(400, seed=2, num_characters=30, num_words=60)
    spelling = {}
    for text, found, tags in lattices:
        assert len(tags) == len(text)
        assert list(found) == sorted(found)
        for start, end, word in found:
            assert spelling.setdefault(word, text[start:end]) == text[start:end]
    assert 40 < len(spelling) == len(set(spelling.values())) <= 60
    number = {"".join(map(chr, text)): word for word, text in spelling.items()}
    for text, found, _ in lattices:
        built = data.build_lattice("".join(map(chr, text)), data.Lexicon(number))
        assert [(a, b, number[word]) for a, b, word in built] == list(found)


def test_tags_of_synthetic_lattices_follow_from_words():
    entities = {}
    for _, found, tags in data.synthetic_lattices(600, seed=4):
        for begin in (k for k, tag in enumerate(tags) if tag % 2):
            inside = tags[begin] + 1
            end = next((k for k in range(begin + 1, len(tags)) if tags[k] != inside), len(tags))
            (word,) = (w for a, b, w in found if (a, b) == (begin, end))
            assert entities.setdefault(word, tags[begin]) == tags[begin]
        assert all(
            tags[k - 1] in (tag - 1, tag) for k, tag in enumerate(tags) if tag and not tag % 2
        )
    assert set(entities.values()) == {1, 3, 5, 7}


def test_synthetic_molecules_are_shaped_like_real_ones():
    molecules = data.synthetic_molecules(2000, seed=1)
    assert_lengths([len(atoms) for atoms, *_ in molecules], 24.1, 25, 37, least=1)
    assert abs(np.mean([len(bonds) for _, bonds, _ in molecules]) - 26.2) < 0.8
    assert 2.6 < np.mean([len(b) - len(a) + 1 for a, b, _ in molecules]) < 3.2
    degrees = [
        np.bincount([k for *ij, _ in b for k in ij], minlength=len(a)) for a, b, _ in molecules
    ]
    shares = np.bincount(np.concatenate(degrees), minlength=5)
    assert np.abs(shares / shares.sum() - [0, 0.169, 0.51, 0.305, 0.016]).max() < 0.03
    targets = [target for *_, target in molecules]
    assert 0.5 < np.std(targets) < 3
    for atoms, bonds, _ in molecules:
        assert len({frozenset(ij) for *ij, _ in bonds}) == len(bonds)
        reached, fresh = {0}, [0]
        for k in fresh:
            near = {sum(ij) - k for *ij, _ in bonds if k in ij} - reached
            reached |= near
            fresh += near
        assert reached == set(range(len(atoms)))


def test_synthetic_code_is_shaped_like_real_code():
    trees = data.synthetic_code(3000, seed=1)
    sizes, depths, children, kinds = [], [], [], set()
    for root in trees:
        level, size, depth = [root], 0, -1
        while level:
            size, depth = size + len(level), depth + 1
            children += [len(node) - 1 for node in level]
            kinds |= {node[0] for node in level}
            level = [child for node in level for child in node[1:]]
        sizes.append(size)
        depths.append(depth)
    assert_lengths(sizes, 59.5, 34, 195, least=8)
    assert abs(np.mean(depths) - 6) < 0.4
    assert 8 <= np.percentile(depths, 95) <= 10
    shares = np.bincount(children) / len(children)
    assert np.abs(shares[:7] - [0.515, 0.204, 0.161, 0.084, 0.016, 0.008, 0.004]).max() < 0.02
    assert 0.004 < shares[7:].sum() < 0.015
    assert len(shares) > 30
    assert 75 < len(kinds) <= 90
    assert max(kinds) < 90


def test_labels_of_points_follow_from_all_of_them():
    """The radius goes up and down with the angle, as often as the label says."""
    sets = data.synthetic_points(1000, seed=1)
    assert_lengths([len(points) for points, _ in sets], 40, 37, 76, least=10)
    for points, label in sets:
        x = np.array(points) @ [1, 1j]
        waves = [abs(np.mean((abs(x) - 1) * (x / abs(x)) ** k)) for k in range(1, 5)]
        if len(points) >= 40:
            assert np.argmax(waves) == label
        assert 0.2 < abs(x).min() <= abs(x).max() < 1.8
    assert np.abs(np.bincount([label for _, label in sets]) - 250).max() < 50


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("tagged", {"mean_length": 6}, lambda r: len(r[0])),
        ("translations", {"mean_length": 6}, lambda r: len(r[0])),
        ("lattices", {"mean_length": 6}, lambda r: len(r[0])),
        ("molecules", {"mean_atoms": 6}, lambda r: len(r[0])),
        ("code", {"mean_nodes": 20}, data.num_words),
        ("points", {"mean_size": 6}, lambda r: len(r[0])),
    ],
)
def test_small_synthetic_records(name, options, size):
    (mean,) = options.values()
    sizes = [size(record) for record in SYNTHETIC[name](1500, **options)]
    assert abs(np.mean(sizes) - mean) < 0.12 * mean
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: data.synthetic_tagged(1, num_tags=1), "num_tags is 1; expected 2 to 40"),
        (lambda: data.synthetic_lattices(1, num_tags=2), "num_tags is 2; expected at least 3"),
        (lambda: data.synthetic_lattices(1, num_characters=4), "num_words is 500; .*more than 16"),
        (lambda: data.synthetic_lattices(1, density=0.9), "density is 0.9; expected 0 to 0.8"),
    ],
)
def test_what_cannot_be_made_up(call, match):
    with pytest.raises(ValueError, match=match):
        call()
