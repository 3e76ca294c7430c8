"""The files for Slurm, run on two hosts that share a folder.

Slurm itself is not here. Stand-ins for `srun` and `scontrol` do what the files need of it.
"""

import json
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path

import hosts
import psutil
import pytest
from runs import LIMIT, ROOT, Run, assert_same_losses
from slurm import FILES, SCONTROL, job, with_stand_ins

TRAINING = ["--model", "resnet8", "--precision", "fp64", "--epochs", "1", "--max-steps", "12", "--quiet"]
WHY_NOT = hosts.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
# As srun does, it sets the number of tasks, and a task that fails ends the others (--kill-on-bad-exit).
SRUN_STAND_IN = """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2
for pid in $PIDS; do
    nsenter --target "$pid" --net --mount --uts --ipc --pid --wd="$PWD" "$@" &
    export RAY_gcs_rpc_server_reconnect_timeout_s=10  # the others leave 10 s after the head, not 60
done
wait -n || { code=$? && kill $(jobs -p) && exit "$code"; }
wait -n
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(two nodes, the folder that they share)."""
    shared = tmp_path_factory.mktemp("shared")
    with hosts.hosts(2, tmp_path_factory.mktemp("hosts"), shared) as (_, nodes):
        yield nodes, shared


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Run:
    """The same training in one process, which runs while the first job does."""
    run = Run(0, tmp_path_factory.mktemp("one"), *TRAINING)
    yield run
    if run.is_running():
        run.kill()


@pytest.fixture
def sbatch(cluster, tmp_path):
    """Starts a file as Slurm does, on two nodes."""
    nodes, shared = cluster

    def start(file: Path, output: Path, *words: str, **variables: str) -> subprocess.Popen:
        path = with_stand_ins(tmp_path, srun=SRUN_STAND_IN, scontrol=SCONTROL)
        names, pids = " ".join(node.name for node in nodes), " ".join(str(node.pid) for node in nodes)
        environment = job(file, shared, PATH=path, NODES=names, PIDS=pids, PYTHONPATH=str(ROOT), **variables)
        with open(output, "a") as log:  # --open-mode=append
            return subprocess.Popen(["bash", file, *words], env=environment, stdout=log, stderr=log, cwd="/")

    return start


def metrics_in(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_job_with_torchrun_is_requeued_and_ends_like_one_process(cluster, sbatch, one_process, tmp_path):
    """Slurm sends SIGUSR1 to the shell, and after its `scontrol requeue` SIGTERM to the tasks; then it starts again."""
    _, shared = cluster
    output, metrics = tmp_path / "output", shared / "metrics.jsonl"
    words = [*TRAINING, "--save-every-steps", "4", "--metrics-out", metrics]
    first = sbatch(FILES[0], output, *words)
    deadline = time.monotonic() + LIMIT
    while not (shared / "train_ddp-8421/checkpoint-00000004.pt").exists():
        assert first.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    started = psutil.Process(first.pid).children(recursive=True)
    step = [each for each in started if each.name() not in ("bash", "nsenter", "sleep")]
    first.send_signal(signal.SIGUSR1)
    while not (shared / "scontrol").exists() or not (shared / "scontrol").read_text():
        assert first.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    assert (shared / "scontrol").read_text() == "requeue 8421\n"
    for process in step:
        process.send_signal(signal.SIGTERM)
    psutil.wait_procs(started, LIMIT)
    assert first.wait(LIMIT) != 0
    assert re.search(r"stopped by SIGTERM: \S+/checkpoint-\d+\.pt is saved; continue with: ", output.read_text())
    assert "SignalException: " in output.read_text()  # from torchrun

    second = sbatch(FILES[0], output, *words, SLURM_RESTART_COUNT="1")
    assert second.wait(LIMIT) == 0, output.read_text()
    assert re.search(rf"resuming from {shared}/train_ddp-8421/checkpoint-\d+\.pt", output.read_text())
    assert [line["world_size"] for line in metrics_in(metrics)] == [2]
    assert one_process.finish() == 0, one_process.text
    assert_same_losses(metrics_in(metrics), one_process.metrics())


def test_a_job_with_ray_computes_what_one_process_does(cluster, sbatch, one_process, tmp_path):
    _, shared = cluster
    output, metrics = tmp_path / "output", shared / "metrics-ray.jsonl"
    (shared / ".ray").mkdir()  # in the home that all nodes share
    (shared / ".ray/auth_token").write_text(secrets.token_hex(32))
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    run = sbatch(FILES[1], output, *TRAINING, "--max-steps", "3", "--metrics-out", metrics, **settings)
    assert run.wait(LIMIT) == 0, output.read_text()
    (line,) = metrics_in(metrics)
    assert line["world_size"] == 2
    assert one_process.finish() == 0, one_process.text
    assert line["step_losses"] == pytest.approx(one_process.metrics()[0]["step_losses"][:3], abs=1e-9)
    assert [path.name for path in (shared / "train_ray_ddp-8421").glob("checkpoint-*")] != []
    assert "Failed to start Ray" in output.read_text()  # on the other node, when the head has gone
