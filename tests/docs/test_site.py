"""The pages of the site: their code runs, and the reference has every public name."""

import importlib
import linecache
import re
from pathlib import Path

import jax
import pytest
from cases.helpers import mostly_slow

import jedbatch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
WITH_CODE = [page for page in PAGES if "```python" in (DOCS / page).read_text()]
MODULES = ("data", "errors", "models", "policies", "ragged", "serve", "testing", "viz")


@pytest.mark.parametrize("page", mostly_slow(WITH_CODE, "quick-reference.md", "guides/serving.md"))
def test_code_of_pages_runs(page):
    """All Python blocks of a page, one after the other; their assertions hold."""
    names = {"__name__": "page"}
    with jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            lines = block.splitlines(keepends=True)
            linecache.cache[page] = len(block), None, lines, page  # as notebooks do, for errors
            exec(compile(block, page, "exec"), names)


def test_the_reference_has_every_public_name():
    pages = (path.read_text() for path in (DOCS / "api").glob("*.md"))
    listed = {name for text in pages for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    public = {f"jedbatch.{name}" for name in jedbatch.__all__ if name not in MODULES}
    for module in MODULES:
        things = vars(importlib.import_module(f"jedbatch.{module}"))
        shown = (x for x in things["__all__"] if not isinstance(things[x], int | str | dict))
        public |= {f"jedbatch.{module}.{name}" for name in shown}
    assert listed == public


def test_every_error_is_found_by_its_symptom():
    page = (DOCS / "api" / "errors.md").read_text()
    symptoms = set(re.findall(r"^\| .*$", page, re.MULTILINE))
    for name in jedbatch.errors.__all__:
        assert any(f"[jedbatch.errors.{name}]" in line for line in symptoms), name


def test_every_page_is_in_the_navigation():
    """Those made of other files are checked where the site is built."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    assert {page for page in PAGES if page not in navigation} == set()
