"""What tests read of the pages: their blocks, and the section on production, whose copies they make."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from notebook_rules import ROOT

PRODUCTION = "## Copy this into production"


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, language, content) of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 2, found[1], found[2]


def section(page: str) -> str:
    """A page's section on production."""
    return (ROOT / page).read_text().partition(f"\n{PRODUCTION}\n")[2].partition("\n## ")[0]


def needs(path: Path) -> set[str]:
    """The modules of `shared`, its folders, and the modules beside the file, that it imports or that these import."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module in ("shared", "shared.on_ray", "shared.running"):
                names = [f"{node.module}.{name}" for name in names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in set(names):
                file = (
                    ROOT / f"{name.replace('.', '/')}.py"
                    if name.startswith("shared.")
                    else path.with_name(f"{name}.py")
                )
                if file.is_file() and file not in found:
                    waiting.append(file)
                    found.add(file)
    return {file.parent.name if file.parent.parent == ROOT / "shared" else file.stem for file in found}


def run_in(folder: Path, home: Path, *words: object) -> str:
    """A command's output, in a folder outside the workshop."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied_out(page: str, home: Path) -> None:
    """Do what the page's section says first: make a folder, copy."""
    commands = next(content for _, language, content in blocks(section(page)) if language == "bash")
    lines = [line for line in commands.splitlines() if line.startswith(("mkdir", "cp"))]
    assert lines
    run_in((ROOT / page).parent, home, "bash", "-ec", "\n".join(lines))
