"""The program's tools for a cluster: what they meet in a run's folder, and what they refuse before anything starts."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from clusters import PROGRAM, SETUP, call
from runs import LIMIT, refused_here

VERIFY = PROGRAM / "scripts/verify_cluster.py"


@pytest.fixture(scope="module")
def monitor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("monitor_training", PROGRAM / "scripts/monitor_training.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def log_line(rank: int, world_size: int, step: int = 1, second: int = 0) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 1000 + second))
    row = {
        "time": moment,
        "node": "gpu-1",
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "message": f"at {step}",
    }
    return json.dumps({**row, "loss": 1.0, "accuracy": 0.5}) + "\n"


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """The log folder of a run of two ranks with two checkpoints, in a storage folder."""
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    (logs := tmp_path / "logs/run").mkdir(parents=True)
    for rank in (0, 1):
        (logs / f"gpu-1-rank-{rank}.jsonl").write_text(log_line(rank, world_size=2))
    for step in (1, 2, "best"):  # the last is a copy that a user keeps
        (tmp_path / f"runs/run/checkpoint-{step}").mkdir(parents=True)
    return logs


def watch(monitor: ModuleType, monkeypatch, capsys, *options: object) -> str:
    """The output of one look, which has found a run."""
    storage = next(option for option in options if isinstance(option, Path))
    monkeypatch.setattr(sys, "argv", ["monitor_training.py", *map(str, options), "--once"])
    with pytest.raises(SystemExit) as caught:
        monitor.main()
    assert caught.value.code == 0, storage
    return capsys.readouterr().out


def test_the_monitor_only_reads(run, monitor, monkeypatch, capsys):
    def files() -> set[Path]:
        return set(run.parents[1].rglob("*"))

    before = files()
    assert "rank 1 " in watch(monitor, monkeypatch, capsys, run.parents[1])
    assert files() == before
    curves = run.parents[1] / "curves.png"
    assert f"curves   {curves}" in watch(monitor, monkeypatch, capsys, run.parents[1], "--curves", curves)
    assert curves.read_bytes().startswith(b"\x89PNG") and files() == {*before, curves}


def test_curves_that_cannot_be_written_do_not_end_the_monitor(run, monitor, monkeypatch, capsys):
    said = watch(monitor, monkeypatch, capsys, run.parents[1], "--curves", run.parents[1] / "none/curves.png")
    assert "curves   not written: No such file or directory" in said and "stored   2 checkpoints" in said


@pytest.mark.parametrize("gone", ["checkpoint-2", "gpu-1-rank-1.jsonl"])
def test_what_is_deleted_while_the_monitor_looks_is_left_out(gone, run, monitor, monkeypatch, capsys):
    stat, read_text = Path.stat, Path.read_text

    def deleted(call):
        def check(path: Path, *args, **options):
            if path.name == gone:
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return call(path, *args, **options)

        return check

    monkeypatch.setattr(Path, "stat", deleted(stat))
    monkeypatch.setattr(Path, "read_text", deleted(read_text))
    said = watch(monitor, monkeypatch, capsys, run.parents[1])
    assert "rank 0 " in said and ("rank 1 " in said) == (gone == "checkpoint-2")
    assert f"stored   {1 if gone == 'checkpoint-2' else 2} checkpoints" in said


def test_ranks_of_a_former_size_are_left_out(run, monitor, monkeypatch, capsys):
    with open(run / "gpu-1-rank-0.jsonl", "a") as file:
        file.write(log_line(0, world_size=1, step=9, second=60))
    said = watch(monitor, monkeypatch, capsys, run.parents[1])
    assert "rank 0   gpu-1: step 9" in said and "rank 1" not in said
    with open(run / "gpu-2-rank-1.jsonl", "a") as file:  # it has grown again, with a different node
        file.write(log_line(1, world_size=2, step=12, second=120))
    said = watch(monitor, monkeypatch, capsys, run.parents[1])
    assert "rank 0   gpu-1: step 9" in said and "rank 1   gpu-1: step 12" in said


@pytest.mark.parametrize("damage", [
    b'{"time": "2026-11-25T10:0', b'{"message": "\xc3', b"[1, 2]\n", b"null\n", b'{"step": 3}\n', b"\0\0\0",
])  # fmt: skip
@pytest.mark.parametrize("continued", [False, True])
def test_a_damaged_line_hides_none_of_the_others(damage, continued, run, monitor, monkeypatch, capsys):
    """A rank that is killed may leave half a line; a restarted one writes behind it."""
    with open(run / "gpu-1-rank-0.jsonl", "ab") as file:
        file.write(damage)
        if continued:
            file.write(b"\n" + log_line(0, world_size=2, step=7, second=5).encode())
    said = watch(monitor, monkeypatch, capsys, run.parents[1])
    assert f"rank 0   gpu-1: step {7 if continued else 1}: " in said and "rank 1 " in said


def test_other_files_and_an_empty_run(run, monitor, monkeypatch, capsys):
    (run / "notes-rank-first.jsonl").write_text(log_line(0, 2))
    (run / "empty-rank-2.jsonl").touch()
    (run / "folder-rank-3.jsonl").mkdir()
    said = watch(monitor, monkeypatch, capsys, run.parents[1])
    assert said.count("rank ") == 2
    (run.parent / "nothing").mkdir()
    said = watch(monitor, monkeypatch, capsys, run.parents[1], "--run-name", "nothing")
    assert said.splitlines()[-1] == "run      nothing"


# --- verify_cluster.py -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_the_way(tmp_path_factory) -> Path:
    (path := tmp_path_factory.mktemp("verify") / "file").touch()
    return path


def test_what_the_check_of_a_cluster_refuses(in_the_way, monkeypatch):
    monkeypatch.setenv("RAY_LOG_TO_DRIVER", "0")  # it would set it itself
    for storage, words in [("s3://bucket/runs", "'s3://bucket/runs' is a URI, but must be a path on this machine"),
                           (in_the_way, f"{in_the_way} is not a folder on this machine"),
                           ("/proc", "cannot write to /proc: ")]:  # fmt: skip
        assert words in refused_here(VERIFY, storage)


def test_one_ctrl_c_ends_the_check_of_a_cluster(tmp_path):
    """While it waits for a training that never ends."""
    script = tmp_path / "check.py"
    script.write_text(f"""
import runpy, sys, threading
sys.argv = ["verify_cluster.py", {str(tmp_path)!r}]
from shared.on_ray import cluster
from ray.train.torch import TorchTrainer
cluster.start = lambda num_workers: False
TorchTrainer.fit = lambda self: (print("training", flush=True), threading.Event().wait())
import ray
ray.nodes, ray.cluster_resources = lambda: [], lambda: {{"CPU": 2}}
source = open({str(VERIFY)!r}).read().replace("if check_nodes(", "if True or check_nodes(")
exec(compile(source, "verify_cluster.py", "exec"), {{"__name__": "__main__", "__doc__": ""}})
""")
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    line = process.stdout.readline()
    try:
        assert line == "training\n", line + process.communicate(timeout=LIMIT)[0]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "stopped by SIGINT" in said and "Traceback" not in said, said
    assert not list(tmp_path.glob(".verify-*"))


# --- run_distributed_training.sh and ray_cluster_setup.sh ------------------------------------------------------------


@pytest.fixture
def copied(tmp_path) -> dict[str, str]:
    """The job's script in a folder of its own, and the environment of a cluster that does not answer."""
    (tmp_path / "program/scripts").mkdir(parents=True)
    script = tmp_path / "program/scripts/run_distributed_training.sh"
    script.write_bytes((PROGRAM / "scripts/run_distributed_training.sh").read_bytes())
    script.chmod(0o755)
    return {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1", "STORAGE": "/mnt/shared", "script": str(script)}


def test_a_job_whose_folder_is_too_large_is_refused_with_its_largest_files(copied, tmp_path):
    (data := tmp_path / "program/archive").mkdir()
    for name, megabytes in (("small.bin", 1), ("large.bin", 60), ("larger.bin", 61), ("ignored.tar", 99)):
        (data / name).touch()
        os.truncate(data / name, megabytes * 2**20)
    (tmp_path / "program/.rayignore").write_text("*.tar\n")
    said = call(copied.pop("script"), code=2, **copied)
    assert said.startswith("error: this folder has 122 MiB") and said.count("\n") == 1, said
    assert "no more than 100 MiB" in said and ".rayignore" in said
    assert "archive/larger.bin (61 MiB), archive/large.bin (60 MiB)" in said


@pytest.mark.parametrize(("variables", "words"), [
    ({"RAY_API_SERVER_ADDRESS": "127.0.0.1:8265"}, "RAY_API_SERVER_ADDRESS=127.0.0.1:8265 has to begin with http://"),
    ({"RAY_API_SERVER_ADDRESS": "ray://head:10001"}, "RAY_API_SERVER_ADDRESS=ray://head:10001 has to begin with http"),
    ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"}, "does not accept the job: RAY_AUTH_TOKEN_PATH is set"),
])  # fmt: skip
def test_a_cluster_that_cannot_be_asked_is_one_line(variables, words, copied):
    said = call(copied.pop("script"), code=1 if "RAY_AUTH_MODE" in variables else 2, **{**copied, **variables})
    assert said.startswith("error: ") and words in said and said.count("\n") == 1, said


# Answers as Python does to ray_cluster_setup.sh, and stays as a node would.
STAND_IN = """#!/bin/bash
case "$1 $2" in
    "-m ray.scripts.scripts")
        echo "RAY_TMPDIR=$RAY_TMPDIR"; echo "Ray runtime started"; sleep 600 & trap 'kill $!' TERM; wait ;;
    "-c import ray") ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, "{tmp}/ray-{user}"), ({"RAY_TMPDIR": "/scratch"}, "/scratch"),
])  # fmt: skip
def test_two_accounts_on_a_server_have_a_folder_each_for_ray(variables, expected, tmp_path):
    (python := tmp_path / "python").write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    notes = {"RAY_CLUSTER_DIR": str(tmp_path / "notes"), "PYTHON": str(python), "RAY_PORT": "0", "DASHBOARD_PORT": "0"}
    call(SETUP, "start", "localhost", **notes, **variables, TMPDIR=str(tmp_path))
    try:
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        folder = expected.format(tmp=tmp_path, user=user)
        assert f"RAY_TMPDIR={folder}\n" in (tmp_path / "notes/head.log").read_text()
    finally:
        call(SETUP, "stop", **notes)
