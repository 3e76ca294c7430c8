"""The rules for notebooks: each is a function from a Notebook to the list of its violations, in words.

`test_notebooks.py` applies them to every lesson and every solution, and proves that each catches what it is for.
"""

import ast
import json
import os
import re
import statistics
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager
from speeds import Speeds

ROOT = Path(__file__).parents[1]
SHELLS = ("bash", "sh", "script", "!", "sx", "system")
LONGEST_CELL, MEDIAN_CELL, CODE_CELLS_IN_A_ROW = 40, 8, 2
ASSERTS_A_LESSON = 3
KNOBS_WITHIN = 8
LONGEST_TIMEOUT_S = 180

# Cells whose point is the error they raise: (path from the root, cell id) -> why no other form would do.
ALLOWED_TO_RAISE: dict[tuple[str, str], str] = {}
# Cells with an assert of a time that holds on every machine, since it only catches a hang, or a sleep is in it:
# (path from the root, cell id) -> why.
TIMES_THAT_HOLD: dict[tuple[str, str], str] = {
    ("04-ray-in-production/01_failures.ipynb", "costs-compare"): "the upload that is timed sleeps as long",
    ("04-ray-in-production/03_watching.ipynb", "assert-network"): "every wait holds a sleep, and every reading another",
    ("06-beyond-data-parallel/08_experts.ipynb", "waits"): "the rank that every other one waits for sleeps as long",
}


class Cell:
    """One cell of a notebook. `number` counts from 1, as a reader would."""

    def __init__(self, number: int, raw: dict):
        self.number, self.raw, self.kind = number, raw, raw["cell_type"]
        self.source = "".join(raw["source"])
        self.tags = raw.get("metadata", {}).get("tags", [])

    def __str__(self) -> str:
        return f"cell {self.number} ({(self.source.strip().splitlines() or ['empty'])[0][:60]!r})"

    @cached_property
    def magic(self) -> list[str]:
        """The words of the cell magic, such as ["writefile", "runs/a.py"]; empty where there is none."""
        first_line = self.source.lstrip().partition("\n")[0]
        return first_line[2:].split() or [""] if self.kind == "code" and first_line.startswith("%%") else []

    @property
    def name(self) -> str:
        """The name of the cell magic, or ""."""
        return self.magic[0] if self.magic else ""

    @property
    def body(self) -> str:
        """The source without its cell magic."""
        return self.source.lstrip().partition("\n")[2] if self.magic else self.source

    @property
    def target(self) -> str:
        """The file that a %%writefile cell writes; "" for every other cell."""
        words = [word for word in self.magic[1:] if not word.startswith("-")]
        return words[0] if self.name in ("writefile", "file") and words else ""

    @property
    def is_shell(self) -> bool:
        return self.name in SHELLS or self.name.startswith("!")

    @cached_property
    def python(self) -> ast.Module:
        """What the notebook's kernel runs of this cell, line magics and ! turned into calls of get_ipython()."""
        if self.kind != "code" or self.target or self.is_shell:
            return ast.Module([], [])
        return ast.parse(TransformerManager().transform_cell(self.body))

    @cached_property
    def script(self) -> ast.Module:
        """The Python file that this cell writes; empty for every other cell."""
        return ast.parse(self.body) if self.target.endswith(".py") else ast.Module([], [])


class Notebook:
    """A notebook file `NN_name.ipynb` in a chapter's folder, or in its folder `solutions`."""

    def __init__(self, path: Path):
        self.path = path
        self.raw = json.loads(path.read_text())
        self.cells = [Cell(number, raw) for number, raw in enumerate(self.raw["cells"], start=1)]
        self.code = [cell for cell in self.cells if cell.kind == "code"]
        self.is_solution = path.parent.name == "solutions"
        self.chapter_folder = path.parents[1] if self.is_solution else path.parent
        self.chapter = int(self.chapter_folder.name[:2])
        self.number = f"{self.chapter}.{int(path.name[:2])}"
        self.folder = f"runs/lesson-{self.number.replace('.', '-')}/"  # where it may write
        self.where = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def lessons() -> list[Path]:
    return sorted(ROOT.glob("0*-*/[0-9]*.ipynb"))


def solutions() -> list[Path]:
    return sorted(ROOT.glob("0*-*/solutions/*.ipynb"))


# --- rule 1: plain files ---------------------------------------------------------------------------------------------


def plain_file(notebook: Notebook) -> Iterator[str]:
    """No outputs or counts; ids that stay when cells are added; one plain .ipynb, without a twin in another format."""
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", notebook.path.name):
        yield f"the file is called {notebook.path.name}, not NN_words_in_lower_case.ipynb: is it a copy?"
    for twin in sorted(notebook.path.parent.glob(f"{notebook.path.stem}.*")):
        if twin != notebook.path:
            yield f"{twin.name} is a second form of it"
    metadata = notebook.raw["metadata"]
    if "jupytext" in metadata:
        yield "its metadata pairs it with another file (jupytext)"
    if metadata.get("kernelspec", {}).get("name") != "python3":
        yield "its kernel is not python3, which every Jupyter has"
    if (notebook.raw["nbformat"], notebook.raw["nbformat_minor"]) < (4, 5):
        yield "its format is older than 4.5, which has cell ids"
    seen = set()
    for cell in notebook.cells:
        if cell.raw.get("outputs"):
            yield f"{cell} has outputs"
        if cell.raw.get("execution_count") is not None:
            yield f"{cell} has an execution count"
        identity = cell.raw.get("id")
        if not isinstance(identity, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", identity):
            yield f"{cell} has no valid id: {identity!r}"
        elif re.fullmatch(r"\d{1,4}", identity):
            yield f"{cell} has the id {identity!r}, its place: that changes when a cell is added before it"
        elif identity in seen:
            yield f"{cell} has the id {identity!r} of a cell before it"
        seen.add(identity)


# --- rule 2: the first and the last cell -----------------------------------------------------------------------------


def link_targets(text: str) -> list[str]:
    """The targets of the links (not pictures) in a Markdown text."""
    text = without_code(text)
    found = re.findall(r"(?<!!)\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\(\s*<?([^)\s>]+)", text)
    found += re.findall(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)", text, flags=re.MULTILINE)
    found += re.findall(r"""<a\s[^>]*href=["']?([^"'\s>]+)""", text)
    return found


def without_code(text: str) -> str:
    """Markdown without its code blocks and code spans, where a bracket is no link."""
    text = re.sub(r"^ *(```+|~~~+).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)


def links_to(notebook: Notebook, cell: Cell, path: Path) -> bool:
    """Whether a link in `cell` leads to `path`."""
    targets = (target.partition("#")[0] for target in link_targets(cell.source))
    return path.resolve() in {(notebook.path.parent / target).resolve() for target in targets if target}


def first_and_last_cell(notebook: Notebook) -> Iterator[str]:
    """Title, promise and table at the top; summary, the next lesson and the solutions at the bottom."""
    first, last = notebook.cells[0], notebook.cells[-1]
    for cell in (first, last):
        if cell.kind != "markdown":
            yield f"{cell} is not prose"
    title, *rest = first.source.split("\n\n")
    if not re.fullmatch(rf"# {re.escape(notebook.number)} \S.*", title):
        yield f"the title is {title!r}, not '# {notebook.number} Title'"
    promise = rest[0].strip() if rest else ""
    if not re.fullmatch(r"\*\*[^*]+\.\*\*", promise) or re.search(r"[.!?] [A-Z]", promise):
        yield f"after the title stands {promise!r}, not a **promise in one sentence.**"
    rows = dict(re.findall(r"^\| *\*\*(.+?)\*\* *\| *(.*?) *\|$", first.source, flags=re.MULTILINE))
    for name in ("Time", "Hardware", "Comes after", "You will be able to"):
        if not rows.get(name):
            yield f"the table in the first cell has no row **{name}**"
    if not re.search(r"^## \S", last.source, flags=re.MULTILINE):
        yield "the last cell has no heading for its summary"
    if not links_to(notebook, last, notebook.path.parent / "solutions" / notebook.path.name):
        yield f"the last cell does not link to solutions/{notebook.path.name}"
    later = [path for path in sorted(notebook.path.parent.glob("*.ipynb")) if path > notebook.path]
    if later and not links_to(notebook, last, later[0]):
        yield f"the last cell does not link to the next lesson, {later[0].name}"
    if not later and not any(target.endswith("README.md") for target in link_targets(last.source)):
        yield "the last cell of the chapter's last lesson links to no README.md"


def first_and_last_cell_of_solutions(notebook: Notebook) -> Iterator[str]:
    """A title with the lesson's number, and the way back."""
    first, last = notebook.cells[0], notebook.cells[-1]
    title = first.source.partition("\n")[0]
    if first.kind != "markdown" or not re.fullmatch(rf"# Solutions to {re.escape(notebook.number)} \S.*", title):
        yield f"the title is {title!r}, not '# Solutions to {notebook.number} Title'"
    if last.kind != "markdown" or not links_to(notebook, last, notebook.path.parents[1] / notebook.path.name):
        yield f"the last cell does not link back to ../{notebook.path.name}"


# --- rule 3: knobs ---------------------------------------------------------------------------------------------------


def dotted(node: ast.AST) -> str:
    """The text of a.b.c for such an expression."""
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def knobs(notebook: Notebook) -> Iterator[str]:
    """Environment variables with real defaults, read in one cell near the top."""
    cells_with_knobs = []
    for cell in notebook.code:
        # `os.environ.setdefault(...)` for itself prepares the processes to come; with its value taken it is a knob.
        alone = [node.value for node in ast.walk(cell.python) if isinstance(node, ast.Expr)]
        for node in ast.walk(cell.python):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and dotted(node.value) == "os.environ"
            ):
                yield f"{cell} reads {ast.unparse(node)}, which has no default"
            if not isinstance(node, ast.Call) or node in alone:
                continue
            if dotted(node.func) not in (
                "os.getenv",
                "os.environ.get",
                "os.environ.setdefault",
                "getenv",
                "environ.get",
            ):
                continue
            if cell not in cells_with_knobs:
                cells_with_knobs.append(cell)
            name = (
                ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0])
            )
            values = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            if not values or (isinstance(values[0], ast.Constant) and values[0].value in (None, "")):
                yield f"{cell} reads {name} without a real default"
            if re.search(r"(^|_)(CI|TEST|TESTS|TESTING|PYTEST|NBMAKE|SMOKE|FAST|QUICK)(_|$)", name):
                yield f"{cell} reads {name}: a knob says what it changes, not who turns it"
    if not cells_with_knobs:
        yield "it has no knobs: nothing is read from the environment"
    if len(cells_with_knobs) > 1:
        yield f"knobs stand in {len(cells_with_knobs)} cells: {', '.join(map(str, cells_with_knobs))}"
    if any(cell.number > KNOBS_WITHIN for cell in cells_with_knobs):
        yield f"knobs stand after the first {KNOBS_WITHIN} cells: {cells_with_knobs[-1]}"


# --- rule 4: rhythm --------------------------------------------------------------------------------------------------


def rhythm(notebook: Notebook) -> Iterator[str]:
    """Short code cells with prose between them. All lines count, and blank ones too: the reader scrolls past them."""
    lengths = [len(cell.source.strip().splitlines()) for cell in notebook.code]
    if lengths and statistics.median(lengths) > MEDIAN_CELL:
        yield f"the median code cell has {statistics.median(lengths):g} lines, more than {MEDIAN_CELL}"
    for cell, length in zip(notebook.code, lengths, strict=True):
        if length > LONGEST_CELL:
            yield f"{cell} has {length} lines, more than {LONGEST_CELL}"
    in_a_row = 0
    for cell in notebook.cells:
        if not cell.source.strip():
            yield f"{cell} is empty"
        in_a_row = in_a_row + 1 if cell.kind == "code" else 0
        if in_a_row > CODE_CELLS_IN_A_ROW:
            yield f"{cell} is code cell {in_a_row} in a row without prose"


# --- rule 5: claims are asserted -------------------------------------------------------------------------------------


def asserts(notebook: Notebook) -> Iterator[str]:
    """A lesson asserts what it claims. Exercises, and asserts that cannot fail, do not count."""
    tests = [
        node.test for cell in notebook.code if not is_stub(cell) and not checks_called(cell)
        for node in ast.walk(cell.python) if isinstance(node, ast.Assert)
    ]  # fmt: skip
    real = [test for test in tests if not isinstance(test, ast.Constant | ast.Tuple)]
    if len(real) < ASSERTS_A_LESSON:
        yield f"it asserts {len(real)} of its claims, fewer than {ASSERTS_A_LESSON}"


def races(notebook: Notebook) -> Iterator[tuple[Cell, ast.expr]]:
    """The asserts that depend on how fast something was, in what the kernel runs and in each script."""
    kernel = Speeds()
    for cell in notebook.code:
        for assertion in kernel.read(cell.python) + Speeds().read(cell.script):
            yield cell, assertion.test


def no_race_of_speeds(notebook: Notebook) -> Iterator[str]:
    """A speed is drawn, and its verdict printed: asserted, it fails where others use the machine too."""
    for cell, test in races(notebook):
        if not TIMES_THAT_HOLD.get((notebook.where, cell.raw.get("id"))):
            yield f"{cell} asserts how fast something was: {ast.unparse(test)}"


# --- rule 6: commands that can fail ----------------------------------------------------------------------------------


def shell_commands(script: str) -> list[str]:
    """The commands of a shell script, roughly: its lines, continued ones joined, without comments."""
    lines = re.sub(r"\\\n\s*", " ", script).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def commands_can_fail(notebook: Notebook) -> Iterator[str]:
    """A command that fails ends the notebook: no ! or %pip, no skipped cells, no forgotten exit codes."""
    execution = notebook.raw["metadata"].get("execution", {})
    if execution.get("allow_errors"):
        yield "its metadata allows errors in every cell"
    for cell in notebook.code:
        timeout = cell.raw["metadata"].get("execution", {}).get("timeout", execution.get("timeout", 0))
        if not 0 <= timeout <= LONGEST_TIMEOUT_S:
            yield f"{cell} may take {timeout} s: a lesson takes at most {LONGEST_TIMEOUT_S}"
        if "skip-execution" in cell.tags:
            yield f"{cell} is skipped"
        if "raises-exception" in cell.tags and not ALLOWED_TO_RAISE.get((notebook.where, cell.raw.get("id"))):
            yield f"{cell} may raise, and ALLOWED_TO_RAISE gives no reason"
        for node in ast.walk(cell.python):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            magic = node.args[0].value if call == "get_ipython().run_line_magic" else ""
            if call in ("get_ipython().system", "get_ipython().getoutput", "os.system") or magic in SHELLS:
                yield f"{cell} runs a command with ! (or the like), whose failure nobody notices: use %%bash"
            if magic in ("pip", "conda", "mamba", "uv"):
                yield f"{cell} installs with %{magic}: packages belong into requirements.txt"
        if cell.is_shell:
            yield from shell_cell_can_fail(cell)


def shell_cell_can_fail(cell: Cell) -> Iterator[str]:
    """bash fails with its last command alone, unless it is told otherwise."""
    if cell.name != "bash":
        yield f"{cell} is a %%{cell.name} cell: use %%bash"
    if "--no-raise-error" in cell.magic:
        yield f"{cell} ignores the failure of its commands (--no-raise-error)"
    if any(word in ("pip", "conda", "uv") for command in shell_commands(cell.body) for word in command.split()[:3]):
        yield f"{cell} installs packages: they belong into requirements.txt"
    options = " ".join([*cell.magic, *re.findall(r"^\s*set .*", cell.body, flags=re.MULTILINE)])
    stops = re.search(r"\s-\w*e", options)
    if len(shell_commands(cell.body)) > 1 and not stops:
        yield f"{cell} has several commands and only the last one can fail: begin with `set -e`"
    if re.search(r"[^|]\|[^|]", re.sub(r"'[^']*'|\"[^\"]*\"", "", cell.body)) and "pipefail" not in options:
        yield f"{cell} has a pipe, whose first command cannot fail: begin with `set -o pipefail`"


# --- rule 9: where it writes -----------------------------------------------------------------------------------------


def literal_start(node: ast.AST) -> str | None:
    """The text that a string, an f-string, Path(string) or `path / string` begins with; None where it is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr) and node.values:
        return literal_start(node.values[0])
    if isinstance(node, ast.BinOp):
        return literal_start(node.left)
    if isinstance(node, ast.Call) and dotted(node.func) in ("Path", "pathlib.Path") and node.args:
        return literal_start(node.args[0])
    return None


def paths_written(tree: ast.Module) -> Iterator[str]:
    """The paths that Python code writes to, as far as they are literals."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), list(node.args)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        mode = next(
            (keyword.value for keyword in node.keywords if keyword.arg == "mode"), (arguments[1:2] or [None])[0]
        )
        written = None
        if name == "open" and isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+"):
            written = arguments[0]
        elif name in ("torch.save", "checkpoint.save_atomically") and len(arguments) > 1:
            written = arguments[1]
        elif name in ("os.makedirs", "os.mkdir") or method in ("savefig", "to_csv", "to_json", "to_parquet"):
            written = (arguments or [None])[0]
        elif method in ("write_text", "write_bytes", "mkdir", "touch"):
            written = node.func.value
        if written is not None and (start := literal_start(written)) is not None:
            yield start


def writes_only_under_runs(notebook: Notebook) -> Iterator[str]:
    """Whatever it writes lies under runs/, and the last cell says so."""
    writes = False
    for cell in notebook.code:
        paths = [*paths_written(cell.python), *paths_written(cell.script), *([cell.target] if cell.target else [])]
        if cell.is_shell:
            shell = re.sub(r"'[^']*'", "", cell.body)
            paths += re.findall(r"(?<![<>&\d])\d?>{1,2}\s*([^\s&>|;]+)", shell)
            paths += re.findall(r"--(?:storage-path|metrics-out|data-dir)[ =](\S+)", cell.body)
            paths += re.findall(r"\bmkdir\s+(?:-p\s+)?(\S+)", cell.body)
        for path in paths:
            path = path.strip("\"'")
            if not path.startswith(("runs/", "/dev/null", "$", "{")) and path != "runs":
                yield f"{cell} writes to {path}, which is not under runs/"
        writes = writes or "runs/" in cell.source
    last = notebook.cells[-1]
    if writes and not notebook.is_solution and notebook.folder.rstrip("/") not in last.source:
        yield f"the last cell does not say that it wrote to {notebook.folder}"


def leaves_nothing_running(notebook: Notebook) -> Iterator[str]:
    """A process that a cell starts in the background is waited for."""
    python = "\n".join(ast.unparse(cell.python) for cell in notebook.code)
    for cell in notebook.code:
        background = cell.is_shell and re.search(r"(^|[^&>])&\s*$", cell.body, flags=re.MULTILINE)
        if background and not re.search(r"\bwait\b", cell.body):
            yield f"{cell} leaves a process running in the background: `wait` for it"
        starts = [
            node for node in ast.walk(cell.python) if isinstance(node, ast.Call) and dotted(node.func).endswith("Popen")
        ]
        if starts and not re.search(r"\.(wait|communicate)\(|with subprocess\.Popen", python):
            yield f"{cell} starts a process, and nothing waits for its end"


# --- rule 10: links and pictures -------------------------------------------------------------------------------------


@cache
def ignored_names() -> tuple[str, ...]:
    """The patterns of .gitignore: names of files or folders at any depth, Git's own, and after "!" a path to keep."""
    lines = (line.strip().rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines())
    return (".git", *(line for line in lines if line and not line.startswith("#")))


def is_ignored(path: Path) -> bool:
    """Whether .gitignore keeps `path`, relative to the root, out of the repository."""
    places = (place for place in (path, *path.parents) if f"!{place.as_posix()}" not in ignored_names())
    return any(place.match(pattern) for place in places for pattern in ignored_names())


def repository_files(root: Path = ROOT) -> list[Path]:
    """Every file under `root` that .gitignore does not keep out, new ones too."""
    found = []
    for folder, subfolders, names in os.walk(root):
        inside = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if not is_ignored(inside / name)]
        found += [Path(folder) / name for name in names if not is_ignored(inside / name)]
    return sorted(found)


def headings(path: Path) -> set[str]:
    """The anchors of a Markdown file or notebook: as GitHub writes them, and for notebooks as JupyterLab does too."""
    if path.suffix == ".ipynb":
        text = "\n\n".join(cell.source for cell in Notebook(path).cells if cell.kind == "markdown")
    else:
        text = path.read_text()
    anchors = set(re.findall(r"""<a\s[^>]*(?:id|name)=["']([^"']+)""", text))
    plain = re.sub(r"^ *(```+|~~~+).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", plain, flags=re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        copies = sum(bool(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other)) for other in anchors)
        anchors.add(f"{anchor}-{copies}" if anchor in anchors else anchor)
        if path.suffix == ".ipynb":
            anchors.add(heading.replace(" ", "-"))
    return anchors


def dead_links(path: Path, text: str) -> Iterator[str]:
    """Relative links and pictures in the Markdown `text` of the file `path` that lead nowhere, or elsewhere."""
    pictures = re.findall(r"!\[[^\]]*\]\(\s*<?([^)\s>]+)", without_code(text))
    pictures += re.findall(
        r"""<(?:img|source|image|object|iframe|video|embed)\s[^>]*?(?:src|srcset|href|data)=["']?([^"'\s>]+)""", text
    )
    for picture in pictures:
        if re.match(r"[a-z]+:|//", picture):
            yield f"the picture {picture} lies elsewhere: keep it in the repository"
    links = [target for target in link_targets(text) if not re.match(r"[a-z]+:|//", target)]
    for target in links + [picture for picture in pictures if not re.match(r"[a-z]+:|//", picture)]:
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path.resolve()
        inside = place.relative_to(ROOT) if place.is_relative_to(ROOT) else Path(name)
        if name.startswith("/"):
            yield f"the link {target} is absolute"
        elif not place.exists():
            yield f"the link {target} leads nowhere"
        elif is_ignored(inside):
            yield f"the link {target} leads to a file that is not in the repository"
        elif anchor and place.suffix in (".md", ".ipynb") and anchor not in headings(place):
            yield f"the link {target} leads to no heading of {place.name}"


def links(notebook: Notebook) -> Iterator[str]:
    """Every relative link and picture is there, and no picture is fetched from another host."""
    for cell in notebook.cells:
        if cell.kind == "markdown":
            yield from (f"{cell}: {violation}" for violation in dead_links(notebook.path, cell.source))
        elif re.search(
            r"""(?:Image|SVG|IFrame)\(\s*(?:url\s*=|src\s*=)?\s*["']https?:|<img[^>]+https?:""", cell.source
        ):
            yield f"{cell} shows a picture from elsewhere"


# --- rule 11: taught once, and the same in shared/ -------------------------------------------------------------------


def is_stub(cell: Cell) -> bool:
    """Whether the cell leaves something for the learner to write."""
    return any(raises_not_implemented(tree) for tree in (cell.python, cell.script))


def raises_not_implemented(tree: ast.AST) -> bool:
    nodes = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None)
    return any(ast.unparse(raised).startswith("NotImplementedError") for raised in nodes)


def definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """The functions and classes at the top level of a module, by name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def without_docstrings(tree: ast.AST) -> ast.AST:
    """`tree` itself, its docstrings removed."""
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def fingerprint(tree: ast.AST) -> str:
    """Equal for two definitions that differ in docstrings, comments and layout only."""
    return ast.dump(without_docstrings(tree))


@cache
def shared_definitions() -> dict[str, dict[str, str]]:
    """Every public top-level definition in shared/: name -> {module: fingerprint}."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((ROOT / "shared").rglob("*.py")):
        for name, node in definitions(ast.parse(path.read_text())).items():
            if not name.startswith("_"):
                found.setdefault(name, {})[path.name] = fingerprint(node)
    return found


def taught_as_shared(notebook: Notebook) -> Iterator[str]:
    """A function or class with the name of one in shared/ is that one, docstrings aside."""
    for cell in notebook.code:
        for name, node in {**definitions(cell.python), **definitions(cell.script)}.items():
            modules = shared_definitions().get(name, {})
            if modules and not raises_not_implemented(node) and fingerprint(node) not in modules.values():
                yield f"{cell} defines {name}, and {' and '.join(modules)} in shared/ another one"


# --- exercises -------------------------------------------------------------------------------------------------------


def checks_called(cell: Cell) -> dict[str, ast.Call]:
    """The exercise checks that a cell calls: name, such as exercise_1_2a -> the call."""
    calls = (node for node in ast.walk(cell.python) if isinstance(node, ast.Call))
    return {call.func.attr: call for call in calls if dotted(call.func).startswith("checks.exercise_")}


def all_checks(notebook: Notebook) -> list[str]:
    """The checks that a notebook calls, in order."""
    return [name for cell in notebook.code for name in checks_called(cell)]


def exercises(notebook: Notebook) -> Iterator[str]:
    """At least one: a hint, a stub, its check; nothing later depends on them."""
    for position, cell in enumerate(notebook.cells):
        calls = checks_called(cell)
        before = notebook.cells[position - 1]
        if is_stub(cell):
            after = notebook.cells[position + 1] if position + 1 < len(notebook.cells) else None
            if after is None or not checks_called(after):
                yield f"{cell} is a stub, and the next cell does not check it"
            if before.kind != "markdown" or not re.search(
                r"<details>\s*<summary>.*</summary>.*</details>", before.source, re.DOTALL
            ):
                yield f"{cell} is a stub, and the prose before it has no hint in <details>"
            later = [node for cell in notebook.cells[position + 2 :] for node in ast.walk(cell.python)]
            for name in definitions(cell.python):
                if any(isinstance(node, ast.Name) and node.id == name for node in later):
                    yield f"{cell} is an exercise, and a later cell depends on {name}"
        for name, call in calls.items():
            number = name.removeprefix("exercise_").replace("_", ".")  # 1.2a is an exercise of lesson 1.2
            if not is_stub(before):
                yield f"{cell} checks exercise {number}, and the cell before it is no stub"
            elif f"**{number}**" not in notebook.cells[position - 2].source:
                yield f"{cell} checks exercise {number}, which the prose before its stub does not call **{number}**"
            if number[:-1] != notebook.number:
                yield f"{cell} checks exercise {number}, which is not of lesson {notebook.number}"
            if call.keywords:
                yield f"{cell} must not end the lesson: call checks.{name} without strict"
    if not all_checks(notebook):
        yield "it has no exercise"


def solves_its_lesson(notebook: Notebook) -> Iterator[str]:
    """The solutions pass every check of their lesson, strictly."""
    lesson = Notebook(notebook.chapter_folder / notebook.path.name)
    if all_checks(notebook) != all_checks(lesson):
        yield f"the lesson has {', '.join(all_checks(lesson))}, the solutions {', '.join(all_checks(notebook))}"
    for cell in notebook.code:
        if is_stub(cell):
            yield f"{cell} is not solved"
        for name, call in checks_called(cell).items():
            strict = [keyword for keyword in call.keywords if keyword.arg == "strict"]
            if not strict or ast.unparse(strict[0].value) != "True":
                yield f"{cell} calls checks.{name} without strict=True: a wrong solution would pass"


FOR_LESSONS = (
    plain_file, first_and_last_cell, knobs, rhythm, asserts, no_race_of_speeds, commands_can_fail,
    writes_only_under_runs, leaves_nothing_running, links, taught_as_shared, exercises,
)  # fmt: skip
FOR_SOLUTIONS = (
    plain_file, first_and_last_cell_of_solutions, rhythm, commands_can_fail, writes_only_under_runs,
    leaves_nothing_running, links, solves_its_lesson,
)  # fmt: skip
