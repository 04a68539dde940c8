"""Signatures and plans are what they were; `python -m tests.golden --write` takes them anew."""

import pytest

from golden import TEXTS
from golden.files import FOLDER, difference


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_has_changed(name):
    found = difference(name, TEXTS[name]())
    assert not found, f"\n{found}\n`python -m tests.golden --write {name}` takes this as right"


def test_every_text_is_compared():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(TEXTS)
