"""Lays out the book's source folder: copies of the repository's pages, run if so wanted, and pages made for the book.

The repository's Markdown files and notebooks are the only source. A copy differs from its original in three things:
links to source files and folders lead to pages that show them, a lesson begins with how to run it, and solutions are
folded away. Made for the book are the pages of source files and folders, the glossary, and those of `shared` and of
`checks`.
"""

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import time
from functools import cache
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

from shared.doctor import OPTIONAL_LESSONS

BOOK = Path(__file__).parent
ROOT = BOOK.parent
COPIED = ("0*-*", "docs", "benchmarks", "checks", "shared", "tests", "*.md", "requirements*.txt")
COPIED += ("Makefile", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "logs", "data", "*.egg-info", "yours-*")
LANGUAGES = {
    ".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".txt": "text",
    ".sbatch": "bash",
    "Dockerfile": "docker", "Makefile": "make",
}  # fmt: skip
ORPHAN = "---\norphan: true\n---\n"  # a page that is in no list of pages
LINK = re.compile(r"(?<=\]\()([^()\s#:]+)(?=[)#])")
CELL_TIMEOUT_S = 900
BUILT_FROM = "the repository that this site was built from"


def lay_out(source: Path, outputs: Path | None) -> None:
    """Fill the folder `source`. With `outputs` lessons are run, or their outputs taken from that folder."""
    for path in sorted({path for pattern in COPIED for path in ROOT.glob(pattern)}):
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=not_copied)
        else:
            shutil.copy(path, source)
    originals = [path for path in sorted(source.rglob("*")) if path.suffix in (".md", ".ipynb")]
    for path in sorted({path for page in originals for path in linked(page, source)}, key=Path.is_dir):
        if path.is_file():
            page_of(path).write_text(file_page(path, source))
        elif not page_of(path).exists():
            page_of(path).write_text(folder_page(path, source))
    for path in originals:
        name = path.relative_to(source)
        if path.suffix == ".md":
            path.write_text(with_book_links(path, path.read_text()) + contents(name.as_posix()))
        else:
            (source / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / "files" / name)  # what the reader downloads
            nbformat.write(lesson(path, name, outputs), path)
    (source / "api").mkdir()
    for name in modules():
        (source / f"api/{name}.md").write_text(module_page(name))
    (source / "api/index.md").write_text(modules_page())
    (source / "glossary.md").write_text(glossary())
    (source / "index.md").write_text(start_page(os.environ.get("REPOSITORY_URL")))


def not_copied(folder: str, names: list[str]) -> set[str]:
    """The names in a folder that the book leaves out: what .gitignore does. checks/data belongs to the repository."""
    return LEFT_OUT(folder, names) - ({"data"} if Path(folder) == ROOT / "checks" else set())


# --- links -----------------------------------------------------------------------------------------------------------


def page_of(path: Path) -> Path | None:
    """The page made for a source file, or the one that stands for a folder; None where `path` is a page or no text."""
    if path.is_dir():
        return path / ("README.md" if (path / "README.md").exists() else "index.md")
    return path.with_name(f"{path.name}.md") if path.suffix in LANGUAGES or path.name in LANGUAGES else None


def linked(page: Path, source: Path) -> list[Path]:
    """The files and folders that a page links to and that need a page of their own."""
    targets = [(page.parent / target).resolve() for target in LINK.findall(page.read_text())]
    return [path for path in targets if path.is_relative_to(source) and path.exists() and page_of(path)]


def with_book_links(page: Path, text: str) -> str:
    """A page's text, its links to source files and folders leading to their pages."""

    def to_page(link: re.Match) -> str:
        shown = page_of(page.parent / link[1])
        return os.path.relpath(shown, page.parent) if shown and shown.exists() else link[1]

    return LINK.sub(to_page, text)


def contents(name: str) -> str:
    """The list of the pages below a page, for the sidebar and for previous and next."""
    if name == "04-ray-in-production/program/README.md":
        below = "deployment/kubernetes/README"
    elif name == "benchmarks/README.md":
        below = "results/*-*"
    elif re.fullmatch(r"0\d-[^/]+/README.md", name):
        below = "[0-9][0-9]_*"
    else:
        return ""
    return f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{below}\n```\n"


# --- lessons ---------------------------------------------------------------------------------------------------------


def lesson(path: Path, name: Path, outputs: Path | None) -> nbformat.NotebookNode:
    """A lesson or a solution for the book."""
    notebook = nbformat.read(ROOT / name, as_version=4)
    package = OPTIONAL_LESSONS.get(name.name)
    if outputs and (package is None or importlib.util.find_spec(package)):
        notebook = run(notebook, name, outputs)
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_book_links(path, cell.source)
        elif name.parent.name == "solutions":
            cell.metadata.tags = ["hide-input"]
    box = nbformat.v4.new_markdown_cell(how_to_run(name), id="how-to-run")
    notebook.cells.insert(1, box)
    if name.parent.name == "solutions":
        notebook.metadata.orphan = True
    return notebook


def how_to_run(name: Path) -> str:
    """The box below a lesson's first cell."""
    if name.parent.name == "solutions":
        return f"""\
:::{{admonition}} Folded away
Try [the exercises](../{name.name}) first. A click on a bar opens it.
:::"""
    return f"""\
:::{{admonition}} Run this lesson
In JupyterLab: `make lab`, then open `{name}`. All of its cells as a test: `pytest --nbmake {name}`.

{{download}}`Download the notebook </files/{name}>` · [Solutions](solutions/{name.name}) · [Glossary](/glossary.md) \
· [How to set it up](/docs/set-up.md)
:::"""


def run(notebook: nbformat.NotebookNode, name: Path, outputs: Path, root: Path = ROOT) -> nbformat.NotebookNode:
    """The notebook with its outputs: those of an earlier run if neither it nor a program it may use has changed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    seen = hashlib.sha256("\n\n".join(cell.source for cell in code).encode())
    folders = ("shared", "checks", "benchmarks", name.parts[0])
    programs = [path for folder in folders for path in root.glob(f"{folder}/**/*.py")]
    for path in sorted([*programs, *root.glob("checks/data/*")]):
        if "runs" not in path.parts:
            seen.update(path.read_bytes())
    kept = outputs / name.with_suffix(f".{seen.hexdigest()[:16]}.ipynb")
    if not kept.exists():
        started = time.perf_counter()
        print(f"{name} ...", end=" ", flush=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(execute(notebook, root / name), kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
    done = [cell for cell in nbformat.read(kept, as_version=4).cells if cell.cell_type == "code"]
    for cell, executed in zip(code, done, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    return notebook


def execute(notebook: nbformat.NotebookNode, path: Path) -> nbformat.NotebookNode:
    """A copy of the notebook at `path`, run in its folder. An error ends the build, with the cell that raised it."""
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(nbformat.from_dict(notebook), timeout=CELL_TIMEOUT_S, resources=where)
    client.extra_arguments = ["--log-level=ERROR"]
    try:
        return client.execute()
    except (CellControlSignal, DeadKernelError) as error:  # a cell's error or time-out; a kernel that is gone
        sys.exit(f"\n{path.parent.name}/{path.name} fails:\n{error}")


# --- pages made for the book -----------------------------------------------------------------------------------------


def first_sentence(path: Path) -> str:
    """The first paragraph of a Python file's docstring."""
    documented = ast.get_docstring(ast.parse(path.read_text())) if path.suffix == ".py" else None
    return (documented or "").split("\n\n")[0].replace("\n", " ").replace("|", r"\|")


def file_page(path: Path, source: Path) -> str:
    """A page that shows a source file."""
    name, language = path.relative_to(source), LANGUAGES.get(path.suffix) or LANGUAGES[path.name]
    shown = f"```{{literalinclude}} {path.name}\n:language: {language}\n```"
    return f"{ORPHAN}\n# {path.name}\n\n`{name}` · {{download}}`Download <{path.name}>`\n\n{shown}\n"


def folder_page(path: Path, source: Path) -> str:
    """A page that lists a folder; what has a page is linked."""
    rows = []
    for each in sorted((ROOT / path.relative_to(source)).glob("*.*")):
        page = path / each.name
        if page.suffix not in (".md", ".ipynb"):
            page = path / f"{each.name}.md"
        shown = f"[{each.name}]({page.name})" if page.exists() else f"`{each.name}`"
        rows.append(f"| {shown} | {first_sentence(each)} |")
    return "\n".join([ORPHAN, f"# {path.relative_to(source)}/\n", "| | |", "|---|---|", *rows, ""])


def modules() -> list[str]:
    """The modules of `shared` and `checks`, by name."""
    files = [*ROOT.glob("shared/**/*.py"), *ROOT.glob("checks/*.py")]
    paths = [path.relative_to(ROOT).with_suffix("") for path in files]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


@cache
def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_page(module: str) -> str:
    """The page of a module, from its docstrings."""
    return f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n"


def modules_page() -> str:
    """All modules at a glance."""
    intro = (
        "What more than one chapter uses. A lesson teaches it by hand first; the lessons after it import it. "
        "`shared.running` only makes scripts run well, `shared.on_ray` needs Ray, and `checks` judges the exercises."
    )
    rows = [f"| [{module}]({module}.md) | {first_sentence(file_of(module))} |" for module in modules()]
    below = ["\n```{toctree}\n:hidden:\n", *modules(), "```\n"]
    return "\n".join(
        ["# The packages shared and checks\n", f"{intro}\n", "| module | what it holds |", "|---|---|", *rows, *below]
    )


def start_page(url: str | None) -> str:
    """The book's start page, with a card for each chapter; `url` is the repository's address, if it is known."""
    page = (BOOK / "index.md").read_text().replace("](../", "](").replace("<!-- chapters -->", cards())
    return page.replace(BUILT_FROM, f"[{BUILT_FROM}]({url})") if url else page


def cards() -> str:
    """A card for each chapter, from the table of lessons in the README."""
    cards = []
    for line in (ROOT / "README.md").read_text().splitlines():
        if found := re.fullmatch(r"\| \*\*(\d)\*\* \| \[\*\*(.+?)\*\*\]\((.+?)\) \| (.+?) \|.*", line):
            number, title, page, hours = found.groups()
            cards.append([f"[{number} · {title}]({page})\n\n{hours}\n"])
        elif found := re.fullmatch(r"\| (\d\.\d) \| \[(.+?)\]\((.+?)\) \| (.+?) \|.*", line):
            number, title, page, minutes = found.groups()
            cards[-1].append(f"- [{number} {title}]({page}) {minutes}")
    each = [":::{container} chapter\n" + "\n".join(card) + "\n:::\n" for card in cards]
    return "\n".join(["::::{container} chapters", *each, "::::"])


# --- words -----------------------------------------------------------------------------------------------------------


@cache
def terms() -> list[tuple[tuple[str, ...], str, str]]:
    """The rows of the chapters' tables of terms: a row's words, the chapter's folder, what they mean."""
    found = []
    for readme in sorted(ROOT.glob("0*-*/README.md")):
        table = readme.read_text().partition("\n## Terms\n")[2].partition("\n## ")[0]
        for words, meaning in re.findall(r"^\| (.+?) \| (.+?) \|$", table, flags=re.MULTILINE)[1:]:
            if not meaning.startswith("as in "):
                found.append((tuple(words.replace("*", "").split(", ")), readme.parent.name, meaning))
    return found


def glossary() -> str:
    """All terms, with the chapters that introduce them. A word that two rows explain stands alone, with both."""
    entries = {}
    for words, chapter, meaning in terms():
        twice = any(set(words) & set(others) for others, *_ in terms() if others != words)
        where = f"([chapter {int(chapter[:2])}](/{chapter}/README.md))"
        together = f"{', '.join(words)}: " if twice and len(words) > 1 else ""
        for entry in [(word,) for word in words] if twice else [words]:
            entries.setdefault(entry, []).append(f"  {together}{meaning} {where}\n")
    lines = ["# Glossary\n", "The workshop's words, and the chapters that introduce them.\n", "```{glossary}"]
    for words in sorted(entries, key=lambda words: words[0].lower()):
        lines += [*words, *entries[words]]
    return "\n".join([*lines, "```\n"])
