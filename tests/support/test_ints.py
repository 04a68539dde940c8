"""The list of ints of the compiled core against a list."""

import itertools

import numpy as np
import pytest

from jedbatch._graph.paths import int64_of
from jedbatch._support import native

pytestmark = pytest.mark.skipif(native.core() is None, reason="no compiled core")
FAR = 2**63


def pair(items=()):
    return native.core().Ints(items), list(items)


def assert_same(ints, items):
    assert len(ints) == len(items)
    assert list(ints) == ints[:] == items
    assert int64_of(ints).tolist() == items


@pytest.mark.parametrize("count", [0, 1, 7, 3_000])
def test_it_does_what_a_list_does(count):
    rng = np.random.default_rng(count)
    ints, items = pair(rng.integers(-(2**40), 2**40, count).tolist())
    assert_same(ints, items)
    more = [0, -1, FAR - 1, -FAR, *range(2_000)]
    for both in (ints, items):
        both.append(5)
        both.extend(more)
        both += more[:3]
        both[-1] = 9
        del both[2_000:]
    assert_same(ints, items)
    limits = [None, 0, 3, -2, 10**9]
    for start, stop, step in itertools.product(limits, limits, [None, 2, -1]):
        assert ints[start:stop:step] == items[start:stop:step]
    assert [ints[0], ints[-1]] == [items[0], items[-1]]
    ints += iter((1, 2))
    assert ints[-2:] == [1, 2]
    ints.extend(ints)
    assert ints[:] == 2 * [*items, 1, 2]
    ints.clear()
    assert_same(ints, [])


@pytest.mark.parametrize("wrong", ["1", 1.0, None, FAR, -FAR - 1])
def test_nothing_else_goes_in(wrong):
    ints, items = pair([3, 4])
    for add in (ints.append, lambda x: ints.extend([1, x]), lambda x: ints.__setitem__(0, x)):
        with pytest.raises((TypeError, OverflowError)):
            add(wrong)
        assert_same(ints, items)


def test_what_is_not_there_is_not_found():
    ints, items = pair([3, 4])
    for place in (2, -3, 10**30):
        with pytest.raises(IndexError):
            ints[place]
        with pytest.raises(IndexError):
            ints[place] = 1
    for cut in (slice(0, 1), slice(None, None, 2)):
        with pytest.raises(TypeError, match="the last ones be deleted"):
            del ints[cut]
    with pytest.raises(TypeError):
        ints[0:1] = [2]
    with pytest.raises(TypeError):
        ints["0"]
    with pytest.raises(TypeError):
        ints.extend(3)
    with pytest.raises(TypeError, match="keyword"):
        native.core().Ints(items=[1])
    assert_same(ints, items)


def test_an_iterator_that_fails_adds_nothing():
    ints, items = pair([3, 4])
    with pytest.raises(ZeroDivisionError):
        ints += (1 // x for x in (1, 0))
    assert_same(ints, items)


def test_memory_of_lists_that_are_gone_belongs_to_one_list():
    for count in (600, 5_000, 70_000, 600, 40_000):
        several = [pair([k]) for k in range(6)]
        for n in range(count):
            for k, both in enumerate(several):
                for x in both:
                    x.append(n * (k + 1))
        several = several[::2] + several[1::2]
        for ints, items in several:
            assert_same(ints, items)
