"""What exercises start from is found by its name, and each recording serves a lesson that says where it is."""

import re

import pytest
from notebook_rules import ROOT, Notebook, lessons

import checks

NAMES = sorted(path.name for path in (ROOT / "checks/data").iterdir())


def test_json_comes_parsed_and_logs_come_as_text():
    assert all(isinstance(checks.recorded(name), dict if name.endswith(".json") else str) for name in NAMES)
    assert set(checks.recorded("resumed_run_losses.json")["A"]) == {"rank 0", "rank 1"}
    assert "job A, rank 0" in checks.recorded("hung_job_stacks.txt")


@pytest.mark.parametrize("name", ["loaders.json", "hung_job_stacks", "../chapter_1.py", ""])
def test_an_unknown_name_gets_the_known_ones(name):
    with pytest.raises(ValueError, match=f"no recording '{name}'. checks/data holds {re.escape(', '.join(NAMES))}$"):
        checks.recorded(name)


@pytest.mark.parametrize("name", NAMES)
def test_one_lesson_links_each_recording(name):
    pages = [[cell.source for cell in Notebook(path).cells if cell.kind == "markdown"] for path in lessons()]
    assert sum(f"](../checks/data/{name})" in "\n".join(page) for page in pages) == 1
