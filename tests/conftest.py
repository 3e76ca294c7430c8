"""Fixtures of several test files."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from answers import stub
from kills import options_for_kills
from launcher import FAKE_SSH
from program import PROGRAM
from runs import train
from small_runs import UNEVEN, write_inputs


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """A data folder with 192 digits of 8x8 as MNIST: 176 for training, enough for uneven tails."""
    return write_inputs(tmp_path_factory.mktemp("data") / "inputs")


@pytest.fixture(scope="session")
def one_process(small_mnist, tmp_path_factory) -> list[dict]:
    """The metrics that all numbers of processes must have with the options UNEVEN."""
    return train(0, tmp_path_factory.mktemp("one"), *UNEVEN, "--data-dir", small_mnist)


@pytest.fixture(scope="session")
def undisturbed(small_mnist, tmp_path_factory):
    """(folder, metrics) of a run that nothing happened to, once for each number of processes."""
    done = {}

    def get(nproc: int):
        if nproc not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            done[nproc] = folder, train(nproc, folder, *options_for_kills(small_mnist))
        return done[nproc]

    return get


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Path:
    """A copy of chapter 4's program, installed from there into a folder of its own."""
    folder = tmp_path_factory.mktemp("copied") / "program"
    shutil.copytree(PROGRAM, folder, ignore=shutil.ignore_patterns("runs", "data", "logs", "*.egg-info", "__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", folder.parent / "site"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, folder], check=True)
    shutil.rmtree(folder / "src")
    return folder


@pytest.fixture(scope="module")
def ray_cluster():
    """The address of a Ray cluster of one node with four CPUs in its books: scripts that join it start sooner."""
    from ray.cluster_utils import Cluster  # takes a second, and few tests need it

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process less a run
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 4, "include_dashboard": False, "dashboard_port": None}  # None: a port of its own
        nodes = Cluster(initialize_head=True, head_node_args=head)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def on_cluster(ray_cluster, no_ray, monkeypatch) -> str:
    """Scripts join this cluster."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # a test sees an epoch's line before the next ends
    return ray_cluster


@pytest.fixture
def no_ray(monkeypatch):
    """No other Ray is joined by accident."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def plain_python(monkeypatch):
    """Every test starts as under plain `python train.py`: no variable of torchrun is set."""
    for name in (
        "RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Ends what a test that failed has left running."""
    yield
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def fake_ssh(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "FAKE_SSH_LOG": str(tmp_path / "ssh.log")}


@pytest.fixture
def returned():
    """Makes of a diagnosis, which is not the stub, a function that returns it."""
    return lambda answer: answer if answer is stub else lambda: answer
