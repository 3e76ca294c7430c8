"""Each claim of claims.yaml has its proof: the test is there and is not switched off, or the cell holds the assert."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from notebook_rules import ROOT, Notebook, lessons

CLAIMS = Path(__file__).with_name("claims.yaml")
SWITCHED_OFF = re.compile(r"mark\.(skip|xfail)\b")  # skipif, with its reason, still proves where it runs


@cache
def claims() -> dict[str, list[dict[str, str]]]:
    """The claims by the file that proves them."""
    return yaml.safe_load(CLAIMS.read_text())


def claims_of(*suffixes: str) -> list[tuple[str, dict[str, str]]]:
    """(file, claim) for each claim that a file of this kind proves."""
    return [(file, claim) for file, listed in claims().items() if file.endswith(suffixes) for claim in listed]


def conditions(tree: ast.AST) -> Iterator[str]:
    """The condition of each assert, in one spelling: without its message, comments and line breaks."""
    return (ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert))


def missing_from_notebook(claim: dict[str, str], notebook: Notebook) -> str | None:
    """Why the cell does not prove the claim; None where it does."""
    cells = [cell for cell in notebook.code if cell.raw["id"] == claim["cell"]]
    if not cells:
        return f"{notebook.where} has no code cell {claim['cell']!r}"
    (wanted,) = conditions(ast.parse(claim["holds"]))
    found = {each for tree in (cells[0].python, cells[0].script) for each in conditions(tree)}
    if wanted not in found:
        return f"cell {claim['cell']!r} of {notebook.where} does not hold: assert {wanted}"
    return None


def missing_from_tests(claim: dict[str, str], file: str, source: str) -> str | None:
    """Why the test, a function or a table that `judge` makes into one, does not prove the claim; None where it does."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == claim["test"]:
            off = SWITCHED_OFF.search(" ".join(map(ast.unparse, node.decorator_list)))
            return f"{file}::{node.name} is marked {off[1]}" if off else None
        if isinstance(node, ast.Assign) and re.match(rf"{claim['test']} = (ON_RANKS\.)?judge\(", ast.unparse(node)):
            return None
    return f"{file} has no test {claim['test']}"


@pytest.mark.parametrize("file", claims())
def test_each_claim_has_its_proof(file):
    path = ROOT / file
    assert path.exists(), f"{file} is gone, and with it the proof of: {[claim['claim'] for claim in claims()[file]]}"
    notebook = Notebook(path) if path.suffix == ".ipynb" else None
    for claim in claims()[file]:
        why = missing_from_notebook(claim, notebook) if notebook else missing_from_tests(claim, file, path.read_text())
        assert why is None, f"no proof of {claim['claim']!r}: {why}"


def test_each_lesson_proves_something():
    assert {path.relative_to(ROOT).as_posix() for path in lessons()} <= set(claims())


def test_a_claim_is_a_sentence_and_is_listed_once():
    sentences = [claim["claim"] for listed in claims().values() for claim in listed]
    assert len(sentences) == len(set(sentences))
    for sentence in sentences:
        assert sentence[0].isupper() and sentence.endswith(".") and len(sentence) < 200, sentence


# --- three planted removals ------------------------------------------------------------------------------------------


@pytest.fixture
def lesson_1_2() -> tuple[dict[str, str], Notebook]:
    """The first claim of lesson 1.2, and the lesson, to be damaged."""
    file, claim = next(each for each in claims_of(".ipynb") if each[0].endswith("02_ranks_and_collectives.ipynb"))
    notebook = Notebook(ROOT / file)
    assert missing_from_notebook(claim, notebook) is None
    return claim, notebook


def test_an_assert_that_has_gone_or_is_weaker_is_missed(lesson_1_2):
    claim, notebook = lesson_1_2
    (cell,) = [cell for cell in notebook.code if cell.raw["id"] == claim["cell"]]
    source = cell.source
    for weaker in ("assert True; ", "assert True or "):
        cell.source = source.replace("assert ", weaker)
        cell.__dict__.pop("python", None), cell.__dict__.pop("script", None)
        assert "does not hold" in missing_from_notebook(claim, notebook)


def test_a_cell_that_has_gone_is_missed(lesson_1_2):
    claim, notebook = lesson_1_2
    notebook.code = [cell for cell in notebook.code if cell.raw["id"] != claim["cell"]]
    assert "has no code cell" in missing_from_notebook(claim, notebook)


def test_a_test_that_has_gone_or_is_switched_off_is_missed():
    file, claim = claims_of(".py")[0]
    judged = {"test": "test_9_9a"}
    assert missing_from_tests(judged, file, "test_9_9a = judge(check, [1], [(2, 'no')])") is None
    assert "has no test" in missing_from_tests(judged, file, "test_9_9a = 1\n")
    source, begins = (ROOT / file).read_text(), f"def {claim['test']}("
    assert missing_from_tests(claim, file, source) is None
    assert "has no test" in missing_from_tests(claim, file, source.replace(begins, "def helper("))
    skipped = source.replace(begins, f"@pytest.mark.skip\n{begins}")
    assert "is marked skip" in missing_from_tests(claim, file, skipped)
