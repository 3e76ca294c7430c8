"""Chapter 4's round trip: two nodes, one, two again, and the losses of one process."""

import json
import os
import subprocess
import sys

from runs import LIMIT, ROOT

SCRIPT = ROOT / "04-ray-in-production/elastic.py"


def test_two_workers_one_and_two_again(no_ray, tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path / "record.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["worlds"] == [2, 1, 2] and record["largest_difference"] < 1e-9
    assert [change["what"] for change in record["changes"]] == ["node killed", "node added"]
    assert all(0 <= change["replayed"] <= record["save_every_steps"] for change in record["changes"])
