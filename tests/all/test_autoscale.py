"""Chapter 4's cluster that grows and shrinks: no node, two that work, none; and one whose head dies."""

import json
import os
import subprocess
import sys
import tempfile

import psutil
from runs import LIMIT, ROOT, below

from shared.on_ray.cluster import kill

SCRIPT = ROOT / "04-ray-in-production/autoscale.py"


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


def test_a_head_that_dies_is_told_with_its_reason(no_ray):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a short path: Ray makes sockets in it
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        pipe = subprocess.PIPE
        process = psutil.Popen([sys.executable, SCRIPT], env=environment, stdout=pipe, stderr=pipe, text=True)
        while "work arrives" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        children = process.children(recursive=True)
        (server,) = below(process, r".*ray\.util\.client\.server")
        server.kill()  # a taken port ends it, too
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 1
        assert f"the head has exited; its logs are in {folder}" in said and "ray_client_server" in said
        kill(children)  # some would look for the head for a minute
