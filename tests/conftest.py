"""Fixtures of several test files."""

import sys
from pathlib import Path

import pytest
import torch
from runs import UNEVEN, idx_bytes, train
from sklearn.datasets import load_digits


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """A data folder with 192 digits of 8x8 as MNIST: 176 for training, enough for uneven tails."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images * 15.9).byte(), torch.from_numpy(digits.target).byte()
    for name, part in (("train", slice(0, 192)), ("t10k", slice(192, 224))):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx_bytes(images[part]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx_bytes(labels[part]))
    return folder


@pytest.fixture(scope="session")
def one_process(small_mnist, tmp_path_factory) -> list[dict]:
    """The metrics that all numbers of processes must have with the options UNEVEN."""
    return train(0, tmp_path_factory.mktemp("one"), *UNEVEN, "--data-dir", small_mnist)


@pytest.fixture(scope="module")
def ray_cluster():
    """The address of a Ray cluster of one node with four CPUs in its books: scripts that join it start sooner."""
    from ray.cluster_utils import Cluster  # takes a second, and few tests need it

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process less a run
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
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
