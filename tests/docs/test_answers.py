"""The answers in `examples/answers.md` are those of the plain loop over instances."""

import re
from pathlib import Path

import pytest
from cases.helpers import mostly_slow
from cases.pages import check_by_loop, sections

PAGE = Path(__file__).parents[2] / "examples" / "answers.md"
if not PAGE.exists():
    pytest.skip("examples are not installed", allow_module_level=True)
PRELUDE, ANSWERS = sections(PAGE)


FAST = [
    "`vmap` of `cond` computes both branches",
    "Python on sets for each instance",
    "Models of different architecture under one `vmap`",
]


@pytest.mark.parametrize("question", mostly_slow(ANSWERS, *FAST))
def test_answer(question):
    check_by_loop(f"{PRELUDE}\n{ANSWERS[question]}", f"{PAGE.name}: {question}", "result")


def test_every_answer_names_its_thread():
    thread = re.compile(r"\]\(https://github\.com/[\w-]+/[\w-]+/issues/\d+\)")
    for section in PAGE.read_text().split("\n## ")[1:]:
        assert thread.search(section), section[:60]
    assert len(ANSWERS) >= 12
