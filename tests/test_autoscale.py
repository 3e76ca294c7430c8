"""Chapter 4's cluster that grows and shrinks: no node, two that work, none."""

import json
import os
import subprocess
import sys
from pathlib import Path

from runs import LIMIT

SCRIPT = Path(__file__).parent.parent / "04-ray-in-production/autoscale.py"


def test_nodes_come_when_work_arrives_and_go_when_it_is_done(no_ray, tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("autoscale-*.json")
    record = json.loads(path.read_text())
    nodes, busy = ([change[name] for change in record["changes"]] for name in ("nodes", "busy"))
    assert nodes[0] == nodes[-1] == 0 and max(nodes) == max(busy) == 2
    assert record["work_arrived_s"] < record["work_done_s"] < record["changes"][-1]["seconds"]
    assert "two nodes " in done.stdout and "none " in done.stdout
