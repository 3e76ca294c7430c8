"""Chapter 4's program on two Ray nodes: one run that loses a worker, a node and its driver, one after the other."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from program import EXACT, PROGRAM, losses, options, result
from ray.cluster_utils import Cluster
from runs import LIMIT, below

from shared.on_ray import storage

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
STEPS = 3 * 43


@pytest.fixture
def nodes(monkeypatch) -> Iterator[Cluster]:
    """A head without CPUs, and two nodes of one each."""
    notes = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # short: in it Ray makes sockets
    monkeypatch.setenv("RAY_TMPDIR", notes.name)
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False, "dashboard_port": None}
    )
    cluster.add_node(**NODE), cluster.add_node(**NODE)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()
    notes.cleanup()


def test_a_worker_a_node_and_the_driver_are_lost(nodes, tmp_path):
    output, folder, draw = tmp_path / "output", tmp_path / "runs/run", random.Random(14)
    changes = (*EXACT, "checkpoint.every_steps=3", "checkpoint.keep_best=100")

    def start(module: str, name: str, *more: str) -> subprocess.Popen:
        words = [sys.executable, "-m", f"training.{module}", *options(PROGRAM, name, *changes), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(output, "a") as file:
            return subprocess.Popen(words, cwd=tmp_path, stdout=file, stderr=file, env=environment)

    def steps() -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*-*"))

    def wait_for(step: int, process: subprocess.Popen) -> None:
        deadline = time.monotonic() + LIMIT
        while not steps() or steps()[-1] < step:
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        time.sleep(draw.random() / 10)

    def workers() -> list[psutil.Process]:
        return below(psutil.Process(), "ray::RayTrainWorker")

    assert start("local_training", "undisturbed").wait(LIMIT) == 0, output.read_text()
    first, second, third = sorted(draw.sample(range(5, STEPS - 20), 3))
    process = start("distributed_training", "run")
    wait_for(first, process)
    draw.choice(workers()).kill()
    wait_for(max(second, steps()[-1] + 1), process)
    nodes.remove_node(draw.choice(list(nodes.worker_nodes)), allow_graceful=False)
    nodes.add_node(**NODE)
    wait_for(max(third, steps()[-1] + 1), process)
    left = workers()
    process.kill()
    process.wait()
    assert left and not psutil.wait_procs(left, timeout=LIMIT)[1]
    before = steps()
    again = start("distributed_training", "run", "--resume")
    assert again.wait(LIMIT) == 0, output.read_text()

    undisturbed, outcome = result(tmp_path, "undisturbed"), result(tmp_path, "run")
    assert len(losses(outcome)) == STEPS
    assert losses(outcome) == pytest.approx(losses(undisturbed), abs=1e-9)
    assert outcome["test_accuracy"] == undisturbed["test_accuracy"]
    said = output.read_text()
    assert said.count("continuing after step") == 3, said
    # Nothing that was saved is gone, and what is there can be read: but for one that a kill may have cut while it was
    # copied, and that the next start has named.
    assert set(before) <= set(steps())
    run = storage.RayRun(str(folder))
    for path in run.list_newest_first():
        if f"skipped {Path(path).name}" not in said:
            assert run.load(path)["progress"]["step"] == int(Path(path).name.split("-")[1])
