"""Rules for all files of the repository, each proven to catch what it is for."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import pytest
from diffs import readmes, with_fresh_diffs
from notebook_rules import ROOT, dead_links, repository_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROGRAM = "04-ray-in-production/program"
SHARED = sorted((ROOT / "shared").rglob("*.py"))
CHECKS = sorted((ROOT / "checks").glob("*.py"))


def text_of(path: Path) -> str:
    """What a reader sees of a file: for a notebook all of its strings, for one that is no text nothing."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return ""
    return "\n".join(strings(json.loads(text))) if path.suffix == ".ipynb" else text


def strings(value: object) -> Iterator[str]:
    """All strings in JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


# [p] is p: so that this file keeps its own rules.
PACKAGE_HOSTS = re.compile(
    r"[p]ypi\.org|[p]ythonhosted\.org|[a]naconda\.(org|com|cloud)|[d]ownload\.pytorch\.org|[n]pmjs\.(org|com)"
    r"|[y]arnpkg\.com|[p]roxy\.golang\.org|[c]rates\.io|/simple/?\s*$",
    re.IGNORECASE | re.MULTILINE,
)
MACHINE_PATHS = re.compile(r"(?<![\w./:-])/(?:work|root)/|(?<![\w./-])/home/\w|(?<![\w./-])/Users/\w|\b[A-Z]:\\Users\\")


def package_hosts(text: str) -> list[str]:
    """Where packages come from is each machine's own affair: mirrors and wheelhouses must keep working."""
    return [found.group() for found in PACKAGE_HOSTS.finditer(text)]


def machine_paths(text: str) -> list[str]:
    """A path that only one machine has."""
    return [text[found.start() : found.start() + 40].partition("\n")[0] for found in MACHINE_PATHS.finditer(text)]


def undocumented(source: str) -> list[str]:
    """Public top-level functions and classes without a docstring or with parameters without annotations."""
    violations = []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(source).body:
        if not isinstance(node, kinds) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            violations.append(f"{node.name} has no docstring")
        functions = [node]
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, kinds[:2])]
            functions = [each for each in methods if each.name == "__init__" or not each.name.startswith("_")]
        for function in functions:
            name = function.name if function is node else f"{node.name}.{function.name}"
            parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [each.arg for each in parameters if each.annotation is None and each.arg not in ("self", "cls")]
            if bare:
                violations.append(f"{name}: no annotation for {', '.join(bare)}")
    return violations


def project(folder: str) -> dict:
    """The table [project] of a folder's pyproject.toml."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def packages(requirements: Iterable[str]) -> set[str]:
    """The names of the packages that requirements ask for."""
    return {canonicalize_name(Requirement(each).name) for each in requirements}


LOCAL = {
    "checks", "shared", "training", "ray_images", "ds_settings", "zero", "train_ddp", "pairs", "pretrained",
    "tiny_base", "rank_tools", "sharded_port", "train_ray_fsdp2",
}  # fmt: skip


def imported(path: Path, on_import: bool = False) -> set[str]:
    """The packages of others that a file of `shared` or of the program imports, by the names that an index has them by.

    on_import: only those that are imported together with the file, and none that a function imports when it is called.
    """
    tree = ast.parse(path.read_text())
    names = [] if on_import else re.findall(r'find_spec\("(\w+)', path.read_text())
    for node in tree.body if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    known_by = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - LOCAL
    return {known_by.get(name, name) for name in roots}


# --- applied ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [package_hosts, machine_paths])
def test_no_file_holds(rule: Callable[[str], list[str]]):
    found = {path.relative_to(ROOT).as_posix(): rule(text_of(path)) for path in repository_files()}
    assert len(found) > 10
    assert {path: words for path, words in found.items() if words} == {}, rule.__doc__


def files_run_by(target: str) -> set[Path]:
    """The files with tests, lessons and solutions that `make TARGET` runs, by the command that it shows."""
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (words,) = [shlex.split(line) for line in shown.splitlines() if " -m pytest " in line]
    assert words[-2:] == ["tests", "0*-*/"]
    ignored = [ROOT / words[number + 1] for number, word in enumerate(words) if word == "--ignore"]
    folders = [ROOT / "tests", *ROOT.glob("0*-*/")]
    files = [path for path in repository_files() if any(path.is_relative_to(folder) for folder in folders)]
    files = [path for path in files if not any(path.is_relative_to(folder) for folder in ignored)]
    return {path for path in files if re.fullmatch(r"test_.*\.py|.*_test\.py|.*\.ipynb", path.name)}


def test_every_file_of_tests_and_every_lesson_belongs_to_one_tier():
    """`make test` runs all but tests/all, `make test-all` everything; no test is in a file that neither collects."""
    first, both = files_run_by("test"), files_run_by("test-all")
    second = {path for path in both if path.is_relative_to(ROOT / "tests/all")}
    assert first == both - second and first and second
    assert {path for path in repository_files() if path.suffix == ".ipynb"} <= first
    for path in repository_files():
        if path.suffix == ".py" and path not in both:
            functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            assert [each.name for each in functions if each.name.startswith("test_")] == [], path


def test_modules_that_one_pytest_imports_have_names_of_their_own():
    """Both tiers, their helpers, and the programs that they import share a process, which has one module by a name."""
    folders = ("tests", "tests/all", "book", "benchmarks", "02-ddp-pytorch-ray", "03-fsdp-deepspeed")
    names = [path.name for folder in folders for path in (ROOT / folder).glob("*.py")]
    assert sorted(names) == sorted(set(names))


def test_links_and_pictures_of_all_markdown_files_lead_somewhere():
    violations = [
        f"{path.relative_to(ROOT)}: {violation}"
        for path in repository_files() if path.suffix == ".md" for violation in dead_links(path, path.read_text())
    ]  # fmt: skip
    assert violations == []


def test_the_diffs_in_the_readmes_are_those_of_the_scripts():
    assert readmes()
    assert [path.parent.name for path in readmes() if with_fresh_diffs(path.read_text()) != path.read_text()] == [], (
        "run `make diffs`"
    )


def test_drawings_fetch_nothing():
    drawings = [path for path in repository_files() if path.suffix == ".svg"]
    assert [
        path
        for path in drawings
        if re.search(r"""<image\s[^>]*href=["']https?:|@import|url\(https?:""", path.read_text())
    ] == []


@pytest.mark.parametrize("path", [*SHARED, *CHECKS], ids=lambda path: path.name)
def test_what_shared_offers_is_documented(path):
    assert undocumented(path.read_text()) == []


def test_a_wheel_holds_all_of_shared_and_checks(tmp_path):
    """Ray's workers and other machines may get `shared` as a package, and a learner's machine both."""
    for name in ("checks", "shared"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = [path for name in ("checks", "shared") for path in repository_files() if path.is_relative_to(ROOT / name)]
    assert held == {path.relative_to(ROOT).as_posix() for path in files}
    assert {"checks/chapter_1.py", "checks/data/hung_job_stacks.txt"} < held


@pytest.mark.parametrize("folder", [".", PROGRAM])
def test_no_package_index_is_asked_for_a_name_of_the_workshop(folder):
    """Anyone could register such a name. Both ask for packages that a file of requirements pins, and for no others."""
    files = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
    lines = [line.partition("#")[0] for path in files for line in path.read_text().splitlines()]
    pinned = packages(line for line in lines if "==" in line)
    extras = project(folder).get("optional-dependencies", {}).values()
    asked_for = packages([*project(folder)["dependencies"], *chain(*extras)])
    assert {"torch"} < asked_for <= pinned
    assert not packages(project(each)["name"] for each in (".", PROGRAM)) & pinned


def test_the_workshop_asks_for_what_shared_and_the_training_scripts_import():
    """Ray and DeepSpeed are extras: no module of `shared` outside of `on_ray` imports them."""
    needed, extras = packages(project(".")["dependencies"]), project(".")["optional-dependencies"]
    scripts = [path for chapter in ("01", "02", "03") for path in ROOT.glob(f"{chapter}-*/*.py")]
    scripts.append(ROOT / "04-ray-in-production/replicas.py")
    assert needed | packages(chain(*extras.values())) == set().union(*map(imported, [*SHARED, *CHECKS, *scripts]))
    assert packages(extras["deepspeed"]) == {"deepspeed", "hjson", "pydantic"}
    assert packages(extras["torchft"]) == {"torchft"}
    for path in SHARED:
        assert path.parent.name == "on_ray" or imported(path) <= needed, path


def test_learners_do_not_install_the_optional_package():
    """It is pinned once, for the platforms that have it; `make torchft` installs that line."""
    learners, developers = ((ROOT / f"requirements{dev}.txt").read_text() for dev in ("", "-dev"))
    (line,) = re.findall(r"^torchft==.*", developers, re.MULTILINE)
    assert "torchft" not in learners and "platform_machine" in line
    assert "grep '^torchft' requirements-dev.txt" in (ROOT / "Makefile").read_text()


def test_no_worker_needs_the_checks():
    """They judge where the learner works: a worker, or a rank that a check starts, gets no more than `shared`."""
    programs = [path for path in repository_files() if path.suffix == ".py" and not path.is_relative_to(ROOT / "tests")]
    on_workers = [path for path in programs if path not in CHECKS]
    assert ROOT / "checks/machinery.py" not in on_workers and len(on_workers) > 60
    assert [path for path in on_workers if re.search(r"^\s*(import|from) checks\b", path.read_text(), re.M)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/scripts.md", "docs/what-else.md", "CHANGELOG.md"])
def test_the_pages_name_the_pinned_versions(page):
    pins = dict(re.findall(r"^(\w+)(?:\[.+\])?==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    named = re.search(r"torch (\S+), Ray (\S+)(?:,| and) DeepSpeed (\d+\.\d+)", (ROOT / page).read_text())
    assert named and named.groups() == tuple(pins[name] for name in ("torch", "ray", "deepspeed"))


def test_what_lessons_teach_does_not_need_the_wings():
    """A lesson's import of `shared` shows what to read: neither how scripts run nor Ray is behind it."""
    taught = [path for path in SHARED if path.parent.name == "shared"]
    wings = re.compile(r"^\s*(from|import) shared(\.| import .*\b)(running|on_ray)\b", re.MULTILINE)
    assert len(taught) > 10 and [path.name for path in taught if wings.search(path.read_text())] == []
    assert any(wings.search(path.read_text()) for path in SHARED)


def test_importing_shared_never_imports_ray():
    """Apart from `shared.on_ray`, which is there for that."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SHARED if path.stem != "__init__"]
    names = [name for name in modules if not name.startswith("shared.on_ray.")]
    code = f"import sys, {', '.join(names)}; assert not {{'ray', 'deepspeed'}} & sys.modules.keys()"
    assert len(names) > 17 and subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_program_asks_for_what_it_and_its_part_of_shared_import():
    # as its page says, see test_commands.py
    left_out = {"plots", "doctor", "measure", "ranks", "schedules", "pipeline_runner"}
    part = [path for path in SHARED if path.stem not in left_out]
    needs = set().union(*map(imported, (ROOT / PROGRAM).glob("src/training/*.py")))
    needs |= set().union(*(imported(path, on_import=True) for path in part))
    assert packages(project(PROGRAM)["dependencies"]) == needs


def test_the_lab_starts_for_root_too():
    shown = subprocess.run(["make", "-n", "lab"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"jupyter lab .*--allow-root", shown.stdout)


# --- proven ----------------------------------------------------------------------------------------------------------


# A dot in the middle, taken out by the test: so that this file keeps its own rules.
@pytest.mark.parametrize("text", [
    "pip install -i https://py·pi.org/simple torch", "https://files.python·hosted.org/x", "-c conda.ana·conda.org",
    "--extra-index-url https://down·load.pytorch.org/whl/cpu", "registry.npm·js.org", "http://mirror.local/simple·/",
])  # fmt: skip
def test_package_hosts_are_found(text):
    assert package_hosts(text.replace("·", ""))


@pytest.mark.parametrize(
    "text", ["pip install torch", "simple models", "see https://pytorch.org/docs", "a/simple/path"]
)
def test_other_hosts_are_not(text):
    assert package_hosts(text) == []


@pytest.mark.parametrize("text", [
    "cd /·work/main", "'/·root/.cache'", "path=/·home/alice/x", "/·Users/bob", "C:\\·Users\\eve", "(/·work/shared)",
])  # fmt: skip
def test_machine_paths_are_found(text):
    assert machine_paths(text.replace("·", ""))


@pytest.mark.parametrize(
    "text", ["/tmp/x", "~/x", "/usr/bin/env", "https://example.org/work/a", "frame/work/", "./home/x", "$HOME/x"]
)
def test_other_paths_are_not(text):
    assert machine_paths(text) == []


def test_a_notebook_is_read_as_its_reader_sees_it(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"source": ["# a title\n", "| a table |"]}]}))
    assert text_of(path).splitlines()[0] == "# a title"
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    assert text_of(tmp_path / "picture.png") == ""


@pytest.mark.parametrize(("source", "violations"), [
    ("def f(x: int): pass", ["f has no docstring"]),
    ("def f(x, *, y):\n    'Doc.'", ["f: no annotation for x, y"]),
    ("class A:\n    'Doc.'\n    def __init__(self, x): pass", ["A.__init__: no annotation for x"]),
    ("class A:\n    'Doc.'\n    @classmethod\n    def make(cls, x): pass", ["A.make: no annotation for x"]),
    ("class A: pass", ["A has no docstring"]),
    ("def _f(x): pass\nclass _A: pass\ndef f(*args, **kwargs):\n    'Doc.'\n    def inner(x): pass", []),
    ("class A:\n    'Doc.'\n    def __exit__(self, *error): pass\n    def _private(self, x): pass", []),
])  # fmt: skip
def test_missing_documentation_is_found(source, violations):
    assert undocumented(source) == violations


def test_ignored_files_are_left_out_and_new_ones_are_not(tmp_path):
    for name in (
        "kept.md",
        "runs/a.md",
        "01-a/runs/b/a.md",
        ".venv/lib/a.py",
        "01-a/kept.py",
        ".git/config",
        ".ci/run",
        "checks/data/a.json",
        "shared/data/a.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = [path.relative_to(tmp_path).as_posix() for path in repository_files(tmp_path)]
    assert sorted(names) == [".ci/run", "01-a/kept.py", "checks/data/a.json", "kept.md"]


def test_a_stale_diff_is_found_and_renewed():
    script = "01-ddp-pytorch-only/train_ddp.py"
    stale = f"before\n<!-- diff: {script} {script} -->\n```diff\n-old\n```\n<!-- end of diff -->\nafter\n"
    fresh = with_fresh_diffs(stale)
    assert fresh == f"before\n<!-- diff: {script} {script} -->\n```diff\n```\n<!-- end of diff -->\nafter\n"
    assert with_fresh_diffs(fresh) == fresh
    assert with_fresh_diffs("no marks\n") == "no marks\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="git ends the lines")
def test_no_line_ends_with_a_carriage_return_where_git_is_set_up_for_windows(tmp_path):
    shell = [each.relative_to(ROOT) for each in repository_files() if each.suffix in (".sh", ".sbatch")]
    scripts = [".gitattributes", "Makefile", ".ci/run", *shell]
    for name in scripts:
        (tmp_path / "origin" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "origin" / name)
    git = ["git", "-C", str(tmp_path / "origin"), "-c", "user.name=an author", "-c", "user.email=author@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "the workshop"]):
        subprocess.run([*git, *command], check=True)
    windows = ["git", "clone", "-q", "-c", "core.autocrlf=true", tmp_path / "origin", tmp_path / "copy"]
    subprocess.run(windows, check=True)
    assert [name for name in scripts if b"\r" in (tmp_path / "copy" / name).read_bytes()] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="`make reset` asks git for the lesson as it was")
def test_make_reset_brings_a_lesson_back_and_keeps_the_learners_own(tmp_path):
    lesson = "01-ddp-pytorch-only/01_one_process.ipynb"
    (tmp_path / "01-ddp-pytorch-only").mkdir()
    for name in ("Makefile", lesson):
        shutil.copy(ROOT / name, tmp_path / name)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a learner", "-c", "user.email=learner@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "the workshop"]):
        subprocess.run([*git, *command], check=True)

    def reset(which: str) -> subprocess.CompletedProcess:
        return subprocess.run(["make", "reset", f"LESSON={which}"], cwd=tmp_path, capture_output=True, text=True)

    original = (tmp_path / lesson).read_text()
    (tmp_path / lesson).write_text("my own")
    said = reset(lesson).stdout
    (mine,) = tmp_path.glob("*/yours-*-01_one_process.ipynb")
    assert (tmp_path / lesson).read_text() == original and mine.read_text() == "my own" and mine.name in said
    other = tmp_path / "01-ddp-pytorch-only/notes.ipynb"
    other.write_text("not of the workshop")
    assert reset("01-ddp-pytorch-only/notes.ipynb").returncode == 2 and other.read_text() == "not of the workshop"
    assert reset("").returncode == 2 and len(list(tmp_path.glob("0*/*"))) == 3


# --- make and .venv --------------------------------------------------------------------------------------------------


# A Python of the version VERSION for make: it makes a .venv with a copy of itself, and it installs nothing.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    -c*) exec REAL -S -c 'import sys; sys.version_info = (NUMBERS); exec(sys.argv[1])' "$2" ;;
    --version) exec echo Python VERSION ;;
    *venv*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
esac
echo "$@" >> asked
echo "user=$PIP_USER target=$PIP_TARGET prefix=$PIP_PREFIX root=$PIP_ROOT" >> pip-settings
"""


def fake_python(path: Path, version: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    script = FAKE_PYTHON.replace("REAL", sys.executable).replace("VERSION", version)
    path.write_text(script.replace("NUMBERS", version.replace(".", ", ")))
    path.chmod(0o755)


@pytest.fixture(params=["workshop", "it's a workshop"])
def workshop(request, tmp_path) -> Path:
    """A folder with all that `make .venv/installed` looks at, and a complete .venv with Python 3.11."""
    tmp_path = tmp_path / request.param
    for name in ("Makefile", "requirements.txt", "pyproject.toml", f"{PROGRAM}/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for version in ("3.9", "3.11", "3.12"):
        fake_python(tmp_path / f"bin/python{version}", f"{version}.1")
    fake_python(tmp_path / ".venv/bin/python", "3.11.4")
    (tmp_path / ".venv/bin/jupyter").write_text(f"#!{tmp_path}/.venv/bin/python\n")
    (tmp_path / ".venv/installed").touch()
    return tmp_path


def set_up(workshop: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """`make .venv/installed` there, and what it has asked the fake Pythons to do."""
    of_make = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "PYTHON", "PIP_ARGS")  # as `make test` sets them for this test
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    environment["PATH"] = f"{workshop}/.venv/bin:{workshop}/bin:{environment['PATH']}"  # .venv is active
    command = ["make", "--no-print-directory", ".venv/installed", *arguments]
    done = subprocess.run(command, cwd=workshop, env=environment, capture_output=True, text=True)
    asked = workshop / "asked"
    return done, asked.read_text().splitlines() if asked.exists() else []


@pytest.mark.parametrize("arguments", [(), ("PYTHON=python3.11",)])
def test_make_keeps_a_venv_that_fits(workshop, arguments):
    done, asked = set_up(workshop, *arguments)
    assert done.returncode == 0 and asked == [], done


@pytest.mark.parametrize(("change", "arguments", "said"), [
    (lambda venv: shutil.rmtree(venv), (), "is missing: python3.11 makes"),
    (lambda venv: (venv / "bin/python").unlink(), (), "has no Python that runs: python3.11 makes"),
    (lambda venv: fake_python(venv / "bin/python", "3.9.18"), (),
     "has Python 3.9, and the workshop needs 3.11 or newer: python3.11 makes"),
    (lambda venv: (venv / "bin/jupyter").write_text("#!/elsewhere/.venv/bin/python\n"), (),
     "was made in a different folder: python3.11 makes"),
    (lambda venv: None, ("PYTHON=python3.12",),
     "has Python 3.11, and PYTHON=python3.12 asks for a different one: python3.12 makes"),
])  # fmt: skip
def test_make_says_why_a_venv_does_not_fit_and_makes_a_new_one(workshop, change, arguments, said):
    change(workshop / ".venv")
    done, asked = set_up(workshop, *arguments)
    assert done.returncode == 0 and f".venv {said} a new one\n" in done.stdout, done
    assert asked[0] == "-m venv --clear .venv" and asked[-1].endswith("-r requirements.txt")
    assert set_up(workshop, *arguments)[1] == asked  # which fits


def test_make_installs_into_its_venv_whatever_pip_is_told(workshop, monkeypatch):
    for name in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"):
        monkeypatch.setenv(name, "1")
    shutil.rmtree(workshop / ".venv")
    assert set_up(workshop)[0].returncode == 0
    assert set((workshop / "pip-settings").read_text().splitlines()) == {"user=0 target= prefix= root="}


@pytest.mark.parametrize(("python", "version"), [("python3.9", "Python 3.9.1"), ("python3.1000", "not found")])
def test_make_touches_nothing_where_the_python_will_not_do(workshop, python, version):
    done, asked = set_up(workshop, f"PYTHON={python}")
    assert done.returncode == 2 and asked == [] and (workshop / ".venv/installed").exists()
    assert re.fullmatch(rf"error: .* 3.11 or newer. '{python} --version' says: .*{version}. Name .*\n", done.stdout)
