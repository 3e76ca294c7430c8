"""The program on a cluster of two nodes, by its own scripts: started, verified, trained on, watched, stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray
from clusters import AT_ONCE, PROGRAM, SETUP, call
from runs import LIMIT, has_traceback

TRAIN = PROGRAM / "scripts/run_distributed_training.sh"
SMALL = ("dataset.vocab_size=200", "dataset.max_length=12", "model.embedding_dim=8", "model.hidden_dim=8")


@pytest.fixture
def notes():
    """Where the set-up script keeps its notes, and Ray what it writes: a short path, in it Ray makes sockets."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {"RAY_CLUSTER_DIR": f"{folder}/notes", "RAY_PORT": "0", "DASHBOARD_PORT": "0", "RAY_TMPDIR": folder}
        variables |= AT_ONCE
        yield variables
        if Path(folder, "notes/nodes").exists():  # the test has failed in between
            call(SETUP, "stop", **variables)


def test_a_cluster_is_started_verified_trained_on_watched_and_stopped(on_cluster, notes, tmp_path):
    said = call(SETUP, "start", "localhost", "localhost", **notes)
    assert said.count(" is up (process ") == 2 and f"source {notes['RAY_CLUSTER_DIR']}/env" in said
    folder = Path(notes["RAY_CLUSTER_DIR"])
    words = (folder / "env").read_text().replace("export ", "").split()
    cluster = dict(word.split("=", maxsplit=1) for word in words)
    assert (folder / "token").stat().st_mode & 0o077 == 0  # nobody else reads it
    assert "knows a cluster: stop it first" in call(SETUP, "start", "localhost", code=2, **notes)
    pids = [int(line.split()[1]) for line in (folder / "nodes").read_text().splitlines()]
    started = [each for pid in pids for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]]

    asked = (tmp_path, "--all", "--nodes", "2", "--patience", "300")
    said = call(sys.executable, PROGRAM / "scripts/verify_cluster.py", *asked, **cluster)
    assert said.count("[OK]") == 12 and "12 items, 0 failed" in said, said
    assert "training: 2 workers on 2 nodes" in said and "continued with a new one after step" in said

    sets = [word for change in (*SMALL, "training.epochs=2") for word in ("--set", change)]
    said = call(TRAIN, *sets, "--run-name", "run", STORAGE=str(tmp_path), PYTHON=sys.executable, **cluster)
    assert "succeeded, exit code 0" in said and "test_accuracy" in said, said
    assert len(json.loads((tmp_path / "logs/run/metrics.json").read_text())["epochs"]) == 2
    wrong = call(TRAIN, "--set", "a.b=1", STORAGE=str(tmp_path), PYTHON=sys.executable, code=2, **cluster)
    assert "failed, exit code 2" in wrong and "--set a.b=1" in wrong

    watch = (sys.executable, PROGRAM / "scripts/monitor_training.py", tmp_path, "--once")
    said = call(*watch, "--curves", tmp_path / "progress.png", **cluster)
    for part in ("nodes    2 alive, 0 lost", ": succeeded", "run      run", "rank 0 ", "rank 1 ", "2 checkpoints"):
        assert part in said, said
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")

    job_goes_on_after_ctrl_c(tmp_path, {**cluster, "STORAGE": str(tmp_path), "PYTHON": sys.executable})

    said = call(SETUP, "stop", **notes)
    assert said.count("has ended") == 2
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive and not (folder / "nodes").exists()
    ray.init(on_cluster, log_to_driver=False)  # the other Ray of this machine
    try:
        assert ray.get(ray.remote(num_cpus=0)(lambda: os.getpid()).remote(), timeout=LIMIT) > 0
    finally:
        ray.shutdown()


def job_goes_on_after_ctrl_c(folder: Path, environment: dict[str, str]) -> None:
    """Ctrl-C ends the script, not its job."""
    sets = [word for change in (*SMALL, "training.epochs=10000") for word in ("--set", change)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | environment
    output = folder / "interrupted"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [TRAIN, *sets], env=variables, stdout=file, stderr=file, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip
    deadline = time.monotonic() + LIMIT
    while "epoch 1/10000" not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT) == 130, output.read_text()
    last = output.read_text().splitlines()[-1]
    assert " continues. To follow it: ray job logs --follow training-" in last and not has_traceback(output.read_text())
    job, seen = last.split()[1], (folder / "logs" / last.split()[1] / "metrics.json")
    watch = (sys.executable, PROGRAM / "scripts/monitor_training.py", folder, "--once")
    said = call(*watch, **environment)
    assert f"{job}: running" in said and not seen.exists(), said
    call("ray", "job", "stop", job, **environment)
    assert f"{job}: stopped" in call(*watch, **environment)


@pytest.mark.parametrize(("command", "variables", "words"), [
    ([SETUP], {}, "ray_cluster_setup.sh start HEAD"),
    ([SETUP, "start"], {}, "start needs a host"),
    ([SETUP, "stop"], {}, "knows no cluster"),
    ([SETUP, "status"], {}, "knows no cluster that is up"),
    ([SETUP, "stop", "localhost"], {}, "stop takes no hosts"),
    ([SETUP, "start", "localhost"], {"PYTHON": "/bin/false"}, "/bin/false has no ray"),
    ([TRAIN], {}, "no cluster to submit to: set RAY_API_SERVER_ADDRESS"),
    ([TRAIN], {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"}, "set STORAGE to the full path"),
    ([TRAIN], {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1", "STORAGE": "runs"}, "set STORAGE to the full path"),
])  # fmt: skip
def test_what_the_shell_scripts_refuse(command, variables, words, tmp_path):
    assert words in call(*command, code=2, **{"RAY_CLUSTER_DIR": str(tmp_path / "notes"), **variables})


def test_a_port_that_is_taken_and_a_host_that_does_not_answer(tmp_path):
    notes = {"RAY_CLUSTER_DIR": str(tmp_path / "notes"), "DASHBOARD_PORT": "0"}
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = call(SETUP, "start", "localhost", code=2, RAY_PORT=port, **notes)
    assert f"port {port} is taken" in said and "set RAY_PORT to another port" in said
    said = call(SETUP, "start", "nobody@host.invalid", code=2, RAY_PORT="0", **notes)
    assert "no head on nobody@host.invalid" in said
    assert not (tmp_path / "notes").exists()


def test_a_cluster_that_cannot_be_asked(tmp_path):
    closed = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1", "STORAGE": str(tmp_path)}
    assert "error: the cluster does not accept the job" in call(TRAIN, code=1, **closed)
    watch = (sys.executable, PROGRAM / "scripts/monitor_training.py", tmp_path, "--once")
    said = call(*watch, code=1, **closed)
    assert "http://127.0.0.1:1 does not answer" in said and f"run      none in {tmp_path / 'logs'}" in said
    assert "is not a folder" in call(*watch[:2], tmp_path / "nope", code=2)
    verify = PROGRAM / "scripts/verify_cluster.py"
    assert "is not a folder on this machine" in call(sys.executable, verify, tmp_path / "nope", code=2)
    assert "no Ray answers at RAY_ADDRESS" in call(sys.executable, verify, tmp_path, code=2, RAY_ADDRESS="127.0.0.1:1")
