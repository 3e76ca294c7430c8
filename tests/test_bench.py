"""`make bench` in its quick form writes what its readers rely on; the speeds themselves are not tested."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table_rows

from shared import measure

ROOT = Path(__file__).parents[1]


def test_quick_run_writes_a_table_the_raw_numbers_and_a_figure(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "bench_ddp.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("ddp-*.json")
    result = json.loads(path.read_text())
    page = path.with_suffix(".md").read_text()

    assert path.name.startswith(f"ddp-{result['date']}-")
    assert result["cpus"] >= 1 and result["torch"] and result["device"] in page
    rows = [result["one_process"], *result["two_processes"]]
    assert all(math.isfinite(row[name]) and row[name] > 0 for row in rows for name in ("ratio", "lowest", "highest"))
    assert all(len(row["baseline"]) == len(row["measured"]) == result["repeats"] for row in rows)

    header, rule, *body = table_rows(page, "global batch")
    assert len(body) == 1 and len(header) == len(rule) == len(body[0]) == 5
    assert float(body[0][3]) == round(result["one_process"]["ratio"], 3)
    assert "smoke run" in page and ("goal 0.97: reached" in page or "goal 0.97: MISSED" in page)
    if result["gpus"] == 1:
        assert "Not measured" in page
        return
    header, rule, *body = table_rows(page, "local batch")
    assert [row[:2] for row in body] == [["32", "1"], ["32", "2"]]
    assert all(len(row) == len(header) == len(rule) for row in body)
    assert [float(row[4]) for row in body] == [round(row["ratio"], 3) for row in result["two_processes"]]
    assert f"]({path.stem}.svg)" in page
    header, rule, *body = table_rows(page, "bytes")
    assert [row[0] for row in body] == ["4", "4,000", "400,000"]
    assert [float(row[1]) for row in body] == [round(1e3 * seconds, 3) for _, seconds in result["all_reduce"]]
    assert "goal below 3: " in page and "goal above 100: " in page
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


def test_the_first_screen_says_what_was_measured():
    """README.md: five runs within 1e-13, and the table of memory, by the formula and counted."""
    readme = (ROOT / "README.md").read_text()
    series = json.loads((ROOT / "benchmarks/results/same-curve.json").read_text())["step_losses"]
    furthest = max(max(losses) - min(losses) for losses in zip(*series.values(), strict=True))
    assert len(series) == 5 and furthest < 1e-13 and "the losses agree to within 1e-13" in readme
    (path,) = (ROOT / "benchmarks/results").glob("sharded-*.json")
    lesson = json.loads(path.read_text())["lesson"]  # the table of lesson 3.5
    counted = {name: float(seen) for name, seen in re.findall(r"\| \*\*(.+?)\*\* \| ([\d.]+)", lesson)}
    assert f"results/{path.stem}.md" in readme
    row = r"^\| ([A-Z][\w, -]+) \| .+? \| ([\d.]+) \| ([\d.]+) \| \*\*([\d.]+)\*\* \|$"
    rows = re.findall(row, readme, flags=re.MULTILINE)
    assert [names for names, *_ in rows] == ["DDP", "ZeRO-1, ZeRO-2", "ZeRO-3", "FSDP2"]
    for names, *shown in rows:
        for name in names.split(", "):
            on_1024, on_2 = (measure.predicted_state_bytes(name.lower(), "fp32", 1, ranks) for ranks in (1024, 2))
            for text, value in zip(shown, (on_1024, on_2, counted[name]), strict=True):
                assert float(text) == round(value, len(text.partition(".")[2])), (name, text, value)


@pytest.mark.parametrize("name", ["ddp", "ray", "sharded"])
def test_the_committed_tables_are_made_of_the_committed_numbers(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = importlib.import_module(f"bench_{name}")
    paths = list((ROOT / "benchmarks/results").glob(f"{name}-*.json"))
    assert paths
    for path in paths:
        figure = [f"{path.stem}.svg"] if name == "ddp" else []
        page = path.with_suffix(".md").read_text()
        assert page == bench.report(json.loads(path.read_text()), *figure)
        assert name != "sharded" or "below 30 s: reached." in page  # an epoch of `nano`
