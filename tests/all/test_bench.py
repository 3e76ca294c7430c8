"""`make bench` in its quick form writes what its readers rely on; the speeds themselves are not tested."""

import json
import math
import subprocess
import sys

from runs import ROOT
from tables import table_rows


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
