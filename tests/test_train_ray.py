"""The scripts on Ray Train as a user starts them: held to train_ddp.py, killed, refused, and joined to a cluster."""

import shutil
import signal
import time
from itertools import product
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from PIL import Image
from runs import (
    ROOT,
    Fork,
    Run,
    assert_bit_for_bit,
    assert_on_record,
    assert_same_losses,
    assert_same_state,
    has_traceback,
    refused,
    refused_here,
    train,
)
from small_runs import UNEVEN

from shared import checkpoint

SCRIPT = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
WITH_RAY_DATA = ROOT / "02-ddp-pytorch-ray/train_ray_ddp_with_ray_data.py"


@pytest.fixture
def options(small_mnist) -> tuple:
    return (*UNEVEN, "--data-dir", small_mnist, "--run-name", "run")


pytestmark = pytest.mark.usefixtures("no_ray")


def fork(folder: Path, *args: object, script: Path = SCRIPT) -> Fork:
    return Fork(0, folder, *args, script=script)


def newest(folder: Path) -> Path:
    return sorted((folder / "run").glob("checkpoint-*"))[-1] / "state.pt"


def test_two_workers_and_a_damaged_checkpoint(on_cluster, one_process, options, tmp_path):
    """They save after 4, 6 and 8 steps, go on after the sixth, in mid-epoch, and end where they have ended before.

    (A worker and the driver are killed in lesson 2.4, whose run ends where torchrun's ends, bit for bit. Four workers,
    and deaths of other processes: all/test_train_ray_failures.py.)
    """
    options = (*options, "--save-every-steps", 6, "--quiet")
    run = fork(tmp_path, *options, "--num-workers", 2)
    assert run.finish() == 0, run.text
    assert f"joined the Ray cluster at {on_cluster}: 4 CPUs and no GPU" in run.text
    assert_on_record("Ray Train, 2 workers", run.metrics())
    assert_same_losses(one_process, run.metrics())
    assert {line["world_size"] for line in run.metrics()} == {2}
    said = [line.split()[0] for line in run.text.splitlines() if line.startswith(("[driver]", "[rank"))]
    # The workers' lines take a way of their own to the terminal, and may come after the driver's last.
    assert said[0] == "[driver]" and sorted(said) == ["[driver]"] * 2 + ["[rank"] * 2, run.text
    assert "Reporting training result" not in run.text and "(RayTrainWorker" not in run.text

    undisturbed, damaged = run.metrics(), newest(tmp_path)
    shutil.copy(damaged, tmp_path / "undisturbed.pt")
    damaged.write_bytes(damaged.read_bytes()[:100_000])
    assert "add --resume to continue it" in refused_here(
        SCRIPT, *options, "--num-workers", 2, "--storage-path", tmp_path
    )
    again = fork(tmp_path, *options, "--num-workers", 2, "--resume")
    assert again.finish() == 0, again.text
    assert again.text.count("[driver] skipped checkpoint-00000008") == 1, again.text
    assert again.text.count(f"[driver] resuming from {tmp_path}/run/checkpoint-00000006-") == 1, again.text
    assert_bit_for_bit(again.metrics(), undisturbed)
    (saved,) = {*(tmp_path / "run").glob("checkpoint-00000008-*/state.pt")} - {damaged}
    assert_same_state(saved, tmp_path / "undisturbed.pt")


def test_a_signal_ends_the_run_and_all_of_ray(one_process, options, tmp_path):
    """Before the signal, one worker computes what one process computes."""
    run = Run(0, tmp_path, *options, "--num-workers", 1, "--epochs", 100, script=SCRIPT)
    run.wait_for_epoch(1)
    assert_bit_for_bit(run.metrics()[:1], one_process[:1])
    ray = run.descendants()
    sent = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 128 + signal.SIGINT
    assert time.monotonic() - sent < 120  # seconds, but on any machine
    (said,) = [line for line in run.text.splitlines() if "stopped by" in line]
    assert said.startswith(f"[driver] stopped by SIGINT: {tmp_path / 'run'}/checkpoint-")
    assert "--run-name run " in said and said.endswith("--resume")
    psutil.wait_procs(ray, timeout=120)
    assert not [process for process in ray if process.is_running()]


@pytest.mark.parametrize(("args", "words"), [
    (["--num-workers", "-1"], "'-1' is not a number of workers, 0 or more"),
    (["--num-workers", "0", "--resume", "--run-name", "run"], "stores no checkpoints"),
    (["--num-workers", "0:2"], "'0:2' is not a number of workers, 0 or more, or MIN:MAX with 1 <= MIN <= MAX"),
    (["--num-workers", "1:3"], "64 is not divisible by every number of ranks from 1 to 3; use 60 or 66"),
    (["--num-workers", "4", "--batch-size", "130"], "130 is not divisible by 4 ranks; use 128 or 132"),
    (["--dataset", "cats"], "invalid choice: 'cats'"),
    (["--resume", "--run-name", "none"], "nothing to resume"),
    (["--storage-path", "/proc/runs"], "cannot write to --storage-path"),
    (["--storage-path", "ftp://host/runs"], "cannot use --storage-path: Unrecognized filesystem type"),
])  # fmt: skip
def test_bad_input(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(SCRIPT, *args)


@pytest.mark.parametrize(("args", "words"), [
    (["--num-workers", "1:2"], "'1:2' is not a number of workers, 0 or more (this script takes no MIN:MAX)"),
    (["--save-every-steps", "5"], "--save-every-steps: with Ray Data an epoch that was cut short starts again"),
])  # fmt: skip
def test_what_ray_data_does_not_serve(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(WITH_RAY_DATA, *args)


def test_more_workers_than_there_is_room_for(tmp_path, monkeypatch):
    """(One that asks for GPUs: test_cluster.py, test_a_cluster_that_is_too_small.)"""
    many = ("--num-workers", "4096", "--batch-size", "4096")
    assert "4096 workers need" in refused(0, tmp_path, *many, script=SCRIPT)


def test_a_cluster_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert "no Ray answers at RAY_ADDRESS=127.0.0.1:9" in refused(0, tmp_path, script=SCRIPT)


def test_ray_data_loses_a_worker(on_cluster, options, tmp_path):
    """The epoch that was cut short starts again: in every epoch the two workers count each of the 176 samples once."""
    run = fork(tmp_path, *options, "--model", "mlp", "--epochs", 10, "--num-workers", 2, script=WITH_RAY_DATA)
    run.wait_for_epoch(1)
    run.ray_processes("RayTrainWorker")[-1].kill()
    assert run.finish() == 0, run.text
    assert run.text.count("continuing after step") == 1, run.text
    metrics = run.metrics()
    assert [line["epoch"] for line in metrics] == list(range(1, 11))
    assert {(line["samples_seen"], line["world_size"]) for line in metrics} == {(176, 2)}
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]


def test_ray_data_in_local_mode(on_cluster, options, tmp_path):
    metrics = train(0, tmp_path, *options, "--num-workers", 0, script=WITH_RAY_DATA)
    assert [line["samples_seen"] for line in metrics] == [176] * 2
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]


def test_images_of_your_own_that_have_become_more_are_refused(tmp_path):
    """Found on the driver, with a checkpoint as the script writes it."""
    for part, label in product(("train", "val"), ("cat", "dog")):
        (tmp_path / part / label).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / part / label / "1.png")
    saved = {"model": "mlp", "dataset": str(tmp_path), "text_file": None, "precision": "fp32", "batch_size": 64,
        "lr": 1e-3, "lr_step_size": 2, "seed": 0, "image_size": None, "augment": False, "classes": ("cat", "dog"),
        "samples": [2, 2]}  # fmt: skip
    path = tmp_path / "runs/run/checkpoint-00000002-0a1b2c3d"
    path.mkdir(parents=True)
    checkpoint.save_safely({"progress": {"step": 2, "options": saved}}, path / "state.pt")
    again = (
        "--data-uri",
        tmp_path,
        "--model",
        "mlp",
        "--storage-path",
        tmp_path / "runs",
        "--run-name",
        "run",
        "--resume",
    )
    Image.new("L", (8, 8)).save(tmp_path / "val/dog/2.png")
    error = refused_here(WITH_RAY_DATA, *again)
    assert (
        f"{path} was written with a different number of training or validation samples in --data-uri: resume" in error
    )


def test_a_damaged_page_ends_the_run_and_names_its_file(on_cluster, tmp_path):
    """The first look at the data reads no images except the first one."""
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        for number in range(3):  # Ray itself looks into the first and the last file before it reads any
            table = pyarrow.table({"image": [[[0.5] * 4] * 4] * 20, "label": [0, 1] * 10})
            pyarrow.parquet.write_table(table, tmp_path / part / f"{number}.parquet")
    damaged = tmp_path / "train/1.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:4] + b"\xff" * 20 + content[24:])
    run = fork(tmp_path, "--data-uri", tmp_path, "--model", "mlp", "--num-workers", 0, script=WITH_RAY_DATA)
    assert run.finish() == 2, run.text
    assert f"error: {damaged} is damaged (" in run.text and "): copy it or write it again" in run.text
    assert not has_traceback(run.text)


@pytest.mark.parametrize("script", [SCRIPT, WITH_RAY_DATA])
def test_help_is_the_manual(script, tmp_path):
    run = Fork(0, tmp_path, "--help", script=script, trains=False)
    assert run.finish() == 0, run.text
    assert "--num-workers" in run.text and "--no-use-gpu" in run.text and "RAY_ADDRESS" in run.text
