"""Readers of data files that are damaged, too large or not what they should be."""

import gzip

import numpy as np
import pytest

from jedbatch import data

LINE = b"(S (N x) (V y))\n"
ZIPPED = gzip.compress(np.random.default_rng(0).bytes(3000).hex().encode())
READERS = [getattr(data, name) for name in dir(data) if name.startswith("read_")]


@pytest.mark.parametrize("limit", [-1, "3", 2.5, float("nan"), True, [1]])
def test_what_is_no_limit(limit):
    for read in READERS:
        if read is not data.read_lexicon:
            for run in (read, read.stream):
                with pytest.raises((TypeError, ValueError), match=f"`{read.__name__}` got limit="):
                    run("nowhere", limit=limit)


@pytest.mark.parametrize("path", [None, 1, ["a"]])
def test_what_is_no_path(path):
    for read in READERS:
        with pytest.raises(TypeError, match=f"`{read.__name__}` got .*the name of a file"):
            read(path)
    with pytest.raises(TypeError, match="`read_lattices` got 1 of type int"):
        data.read_lattices("nowhere", tags=1)


DAMAGED = {
    "Compressed file ended": ZIPPED[:-20],
    "while decompressing": ZIPPED[:20] + b"\xff" * 10 + ZIPPED[30:],
    "Not a gzipped file": LINE,
    "CRC check failed": ZIPPED[:-8] + b"\0" + ZIPPED[-7:],
}


@pytest.mark.parametrize("match", DAMAGED)
def test_damaged_archives(match, tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(DAMAGED[match])
    for read in READERS:
        with pytest.raises(ValueError, match=rf"a\.gz, line 1: .*{match}.*a whole file of gzip"):
            read(path)


LONG = {
    "longer than 4,194,304 bytes": b"(" * 20_000_000,
    "1000000 brackets are not closed": b"(" * 1_000_000,
    "'xxx.* follows the end": LINE[:-1] + b"x" * 1_000_000,
    "holds 'xxx.* alone": b"(" + b"x" * 1_000_000 + b")",
}


@pytest.mark.parametrize("match", LONG)
def test_long_lines_make_short_messages(match, tmp_path):
    path = tmp_path / "trees.gz"
    path.write_bytes(gzip.compress(LONG[match], 1))
    with pytest.raises(ValueError, match=match) as caught:
        data.read_trees(path)
    assert len(str(caught.value)) < 1000


def test_entries_make_short_messages(tmp_path):
    path = tmp_path / "code"
    for types in ('"' + "a" * 1_000_000 + '"', "[" * 1000 + "]" * 1000, "1" * 5000):
        path.write_text('{"types": ' + types + ', "parents": []}')
        with pytest.raises(ValueError, match="code, line 1: ") as caught:
            data.read_code(path)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (((2**40,),), r"1099511627776 in record 1; .* int32"),
        (((-(2**31) - 1,),), r"-2147483649 in record 1; .* int32"),
        ((2**70,), "in record 1; .* int32"),
        ((np.uint64(2**63),), "9223372036854775808 in record 1"),
        (((1.0, 1e300),), r"1e\+300 in record 1; .* float32"),
        ((np.full(3, -1e39),), "-1e.39 in record 1"),
    ],
)
def test_numbers_that_do_not_fit_arrays(record, match):
    with pytest.raises(ValueError, match=match):
        data.as_arrays([((1,),), record])


def test_numbers_that_do_fit_arrays():
    whole = (-(2**31), 2**31 - 1), np.array([True]), np.uint64(7)
    assert [x.tolist() for x in data.as_arrays([whole])[0]] == [[-(2**31), 2**31 - 1], [1], 7]
    ((wide,),) = data.as_arrays([((np.inf, -np.inf, 1e38),)])
    assert wide.tolist() == [np.inf, -np.inf, np.float32(1e38)]


@pytest.mark.parametrize("records", [5, "ab", None, [5], ["ab"], {"a": 1}])
def test_what_are_no_records(records):
    with pytest.raises(TypeError, match="`as_arrays` got record"):
        data.as_arrays(records)
