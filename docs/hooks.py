"""Pages of the site that are made of other files of the repository.

- Notebooks, with the outputs that they are stored with.
- The README, the answers, the companions, the benchmarks, the changes, and how to contribute.
- Parts of scripts, where a page has `<!-- code: file heading -->`.
- `llms.txt`, which lists the pages.

The site's name has the version, and pages made of a file have a link to edit that.
"""

import ast
import html
import json
import posixpath
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urljoin

import latex2mathml.converter
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {  # of files that have a page in the site, or are described on one
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "notebooks/README.md": "notebooks/index.md",
    "examples/answers.md": "answers.md",
    "examples/companions": "companions.md",
    "docs/applications/index.md": "applications/index.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "jedbatch/errors.py": "api/errors.md",
    "jedbatch/models/transformer.py": "api/models.md",
}
PAGES |= {f"notebooks/{x.name}": f"notebooks/{x.stem}.md" for x in ROOT.glob("notebooks/*.ipynb")}
MADE_OF = {page: file for file, page in PAGES.items() if "." in file}  # a folder is not edited
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def relinked(text: str, folder: str, page: str) -> str:
    """Markdown of a file in `folder` of the repository, with links as they are on a page."""

    def target(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        to = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{match[2] or ''})"

    return LINK.sub(target, text)


def without_links_to_code(text: str) -> str:
    """Markdown in which links to Python files are their text."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\.py\)", r"\1", text)


# --- notebooks ---


def shown(output: dict) -> str:
    """An output of a cell as Markdown, in the richest form that it has."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if svg := data.get("image/svg+xml"):
        picture = re.sub(r"\n\s*", "\n", svg).strip()
        return f'<div class="picture">\n{picture}\n</div>'
    if png := data.get("image/png"):
        source = f"data:image/png;base64,{png.strip()}"
        return f'<div class="picture"><img alt="a plot" src="{source}"></div>'
    text = "".join(output.get("text", [])) or data.get("text/plain", "")
    return f'<pre class="output"><code>{html.escape(text.rstrip())}</code></pre>'


def with_formulas(text: str) -> str:
    """Markdown with formulas of LaTeX, `$...$` and `$$...$$`, as MathML, which browsers draw."""

    def drawn(match: re.Match) -> str:
        display = "block" if match[1] else "inline"
        formula = " ".join((match[1] or match[2]).split())
        mathml = latex2mathml.converter.convert(formula, display=display)
        return f'<div class="formula">{mathml}</div>' if match[1] else mathml

    return re.sub(r"\$\$(.+?)\$\$|\$([^$]+?)\$", drawn, text, flags=re.DOTALL)


def notebook_page(path: Path) -> str:
    """A notebook as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(with_formulas(source))
        else:
            parts += [f"```python\n{source}\n```", *map(shown, cell["outputs"])]
    return without_links_to_code("\n\n".join(parts))


# --- other pages ---


def companions_page() -> str:
    """The companions, each with its docstring as text."""
    parts = [
        "# With other libraries\n\nEach is a file in `examples/companions` that the tests run and "
        'compare with the loop over instances. `pip install -e ".[companions]"` has the libraries.'
    ]
    for path in sorted((ROOT / "examples" / "companions").glob("*.py")):
        text = path.read_text()
        doc = ast.get_docstring(ast.parse(text))
        code = text.split('"""', 2)[2].strip()
        parts.append(f"## {path.stem.removeprefix('with_')}\n\n{doc}\n\n```python\n{code}\n```")
    return "\n\n".join(parts)


def start_page() -> str:
    """The README without its badges, which are loaded from elsewhere."""
    text = re.sub(r"^\[?!\[.*\n", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return relinked(text, "", PAGES["README.md"])


def part_of_script(path: str, heading: str) -> str:
    """The code of a script below a line `# --- heading ---`, up to the next one."""
    parts = re.split(r"^# --- (.*) ---\n", (ROOT / path).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading].strip()


def on_config(config):
    """Names the version."""
    config.site_name += f" {metadata.version('jedbatch')}"
    return config


def on_files(files, config):
    """Adds what is made of files outside of `docs`."""

    def add(page: str, content: str | None = None, source: Path | None = None) -> None:
        path = None if source is None else str(source)
        files.append(File.generated(config, page, content=content, abs_src_path=path))

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        add(page, relinked(notebook_page(path), "notebooks", page))
    add(PAGES["README.md"], start_page())
    for source in ("notebooks/README.md", "examples/answers.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / source).read_text()
        add(PAGES[source], relinked(text, posixpath.dirname(source), PAGES[source]))
    add("companions.md", companions_page())
    for kind in ("plots/*.svg", "results/*.csv"):
        for path in sorted((ROOT / "benchmarks").glob(kind)):
            add(path.relative_to(ROOT).as_posix(), source=path)
    text = (ROOT / "benchmarks" / "README.md").read_text()
    add("benchmarks/index.md", without_links_to_code(text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Puts in parts of scripts, and says what file a page is made of."""
    made_of = MADE_OF.get(page.file.src_uri)
    if config.edit_uri and page.edit_url is None and made_of:
        page.edit_url = urljoin(config.edit_uri, f"../{made_of}")

    def code(match: re.Match) -> str:
        return f"```python\n{part_of_script(match[1], match[2])}\n```"

    return re.sub(r"<!-- code: (\S+) (.*?) -->", code, markdown)


LISTED: list[tuple[str, str, str]] = []


def on_page_content(content, page, config, files):
    """Notes the title of each page, and its first sentence."""
    paragraph = re.search(r"<p>(.*?)</p>", content, re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "", paragraph[1])) if paragraph else ""
    sentence = re.split(r"(?<=[.:])\s", " ".join(text.split()), maxsplit=1)[0]
    LISTED.append((page.title, page.url, sentence))


def on_post_build(config):
    """Writes `llms.txt`."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += [f"- [{title}]({url}): {sentence}" for title, url, sentence in LISTED]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n")
    LISTED.clear()
