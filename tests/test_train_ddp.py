"""train_ddp.py as a user runs it: real processes, compared with one process and with themselves after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from sklearn.datasets import load_digits

SCRIPT = Path(__file__).parents[1] / "01-ddp-pytorch-only/train_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 300  # seconds; what hangs is ended and fails


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write MNIST's own format: two zero bytes, 8 for bytes, the number of dimensions, their sizes, the data."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """A data folder with 192 digits of 8x8 as MNIST: 176 for training, enough for uneven tails."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    digits = load_digits()
    images, labels = (digits.images * 15.9).astype(np.uint8), digits.target
    for name, part in (("train", slice(0, 192)), ("t10k", slice(192, 224))):
        write_idx(raw / f"{name}-images-idx3-ubyte", images[part])
        write_idx(raw / f"{name}-labels-idx1-ubyte", labels[part])
    return folder


class Run:
    """One start of train_ddp.py: `nproc` 0 is plain python, else torchrun. Ended with everything it started."""

    def __init__(self, nproc: int, folder: Path, *args: object, torchrun: tuple[str, ...] = ()) -> None:
        self.metrics_file = folder / "metrics.jsonl"
        start = [sys.executable] if nproc == 0 else [*TORCHRUN, "--nproc-per-node", str(nproc), *torchrun]
        command = [*start, str(SCRIPT), "--storage-path", str(folder), "--metrics-out", str(self.metrics_file), *args]
        self.output = folder / f"output-{time.monotonic_ns()}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=file,
                stderr=file,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.killpg(self.process.pid, number)

    def finish(self) -> int:
        """Wait for the end; the exit code. A hang fails the test, with the output so far."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.kill()
            raise AssertionError(f"no end after {LIMIT} s:\n{self.text}") from None

    def wait_for(self, path: Path) -> None:
        """Wait until `path` exists."""
        deadline = time.monotonic() + LIMIT
        while not path.exists():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]


def train(nproc: int, folder: Path, *args: object) -> list[dict]:
    """Run to a good end; the metrics."""
    run = Run(nproc, folder, *args)
    assert run.finish() == 0, run.text
    return run.metrics()


def assert_same_losses(one: list[dict], other: list[dict], tolerance: float = 1e-9) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert len(a["step_losses"]) == len(b["step_losses"])
        assert a["step_losses"] == pytest.approx(b["step_losses"], abs=tolerance)
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=tolerance)
        assert a["val_loss"] == pytest.approx(b["val_loss"], abs=tolerance)
        assert a["val_accuracy"] == b["val_accuracy"]
        assert a["samples_seen"] == b["samples_seen"]


# --- N ranks compute what one process computes ---------------------------------------------------------------------

UNEVEN = ("--dataset", "mnist", "--batch-size", "52", "--epochs", "2", "--seed", "7", "--precision", "fp64")


@pytest.fixture(scope="module")
def one_process(small_mnist, tmp_path_factory) -> list[dict]:
    return train(0, tmp_path_factory.mktemp("one"), *UNEVEN, "--data-dir", small_mnist)


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_float64_losses_do_not_depend_on_the_number_of_ranks(nproc, one_process, small_mnist, tmp_path):
    # 176 samples in batches of 52 leave a tail of 20, which 4 ranks share as 5 each.
    metrics = train(nproc, tmp_path, *UNEVEN, "--data-dir", small_mnist)
    assert_same_losses(one_process, metrics)
    assert [line["epoch"] for line in metrics] == [1, 2]
    assert {line["world_size"] for line in metrics} == {nproc}
    assert {line["samples_seen"] for line in metrics} == {176}
    assert {len(line["step_losses"]) for line in metrics} == {4}


def test_a_tail_smaller_than_the_world_size(small_mnist, tmp_path):
    # 176 samples in batches of 87 leave a tail of 2, and the third rank an empty batch.
    options = (
        "--dataset",
        "mnist",
        "--data-dir",
        small_mnist,
        "--batch-size",
        "87",
        "--epochs",
        "1",
        "--precision",
        "fp64",
    )
    (tmp_path / "one").mkdir()
    assert_same_losses(train(0, tmp_path / "one", *options), train(3, tmp_path, *options))


def test_the_digits_at_the_defaults_pass_95_percent(tmp_path):
    metrics = train(2, tmp_path)
    assert len(metrics) == 5
    assert metrics[-1]["val_accuracy"] > 0.95
    assert {line["samples_seen"] for line in metrics} == {1280}
    assert all(line["samples_per_second"] > 0 for line in metrics)


def test_bf16_trains_with_float32_weights(small_mnist, tmp_path):
    options = (
        "--dataset",
        "mnist",
        "--data-dir",
        small_mnist,
        "--model",
        "mlp",
        "--precision",
        "bf16",
        "--run-name",
        "b",
    )
    metrics = train(2, tmp_path, *options, "--epochs", "3", "--batch-size", "16")
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    state = torch.load(sorted((tmp_path / "b").iterdir())[-1], weights_only=True)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}


# --- a killed run resumes exactly ----------------------------------------------------------------------------------


EPOCHS = {"resnet18": 2, "mlp": 3}
STEPS = {"resnet18": 11, "mlp": 44}  # an epoch; the MLP's steps are short, and a kill must fall among them


def options_for_kills(model: str, small_mnist: Path) -> tuple:
    return (
        "--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 176 // STEPS[model],
        "--epochs", EPOCHS[model], "--model", model, "--run-name", "run",
    )  # fmt: skip


def saved_after(epochs: int, model: str) -> str:
    return f"checkpoint-{STEPS[model] * epochs:08d}.pt"


@pytest.fixture(scope="module")
def undisturbed(small_mnist, tmp_path_factory):
    """(folder, metrics) of a run that nothing happened to, once for each number of processes and model."""
    done = {}

    def get(nproc: int, model: str):
        if (nproc, model) not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            done[nproc, model] = folder, train(nproc, folder, *options_for_kills(model, small_mnist))
        return done[nproc, model]

    return get


def assert_equal_runs(folder: Path, metrics: list[dict], reference: tuple[Path, list[dict]], model: str) -> None:
    """Bit for bit: all metrics but the throughput, and the whole final state, generators included."""
    reference_folder, reference_metrics = reference
    for line in (*metrics, *reference_metrics):
        line.pop("samples_per_second", None)
    assert metrics == reference_metrics
    name = "run/" + saved_after(EPOCHS[model], model)
    seen, expected = (torch.load(path / name, weights_only=True) for path in (folder, reference_folder))
    assert all(torch.equal(seen["model"][key], expected["model"][key]) for key in expected["model"])
    for number, moments in expected["optimizer"]["state"].items():
        assert all(torch.equal(seen["optimizer"]["state"][number][key], value) for key, value in moments.items())
    assert all(torch.equal(a["torch"], b["torch"]) for a, b in zip(seen["random"], expected["random"], strict=True))


@pytest.mark.parametrize(("nproc", "model", "killed_in_epoch"), [(0, "resnet18", 1), (2, "resnet18", 2), (2, "mlp", 1)])
def test_the_whole_job_is_killed_and_resumed(nproc, model, killed_in_epoch, small_mnist, undisturbed, tmp_path):
    options = options_for_kills(model, small_mnist)
    run = Run(nproc, tmp_path, *options)
    run.wait_for(tmp_path / "run" / saved_after(killed_in_epoch - 1, model))
    time.sleep(0.15)
    ranks = psutil.Process(run.process.pid).children(recursive=True)
    run.kill()
    for rank in ranks:  # torchrun's children lead sessions of their own
        rank.kill()
    assert run.finish() == -signal.SIGKILL
    assert_equal_runs(tmp_path, train(nproc, tmp_path, *options, "--resume"), undisturbed(nproc, model), model)


@pytest.mark.parametrize(("nproc", "model", "killed_in_epoch"), [(2, "resnet18", 1), (4, "resnet18", 2), (2, "mlp", 3)])
def test_one_rank_is_killed_and_torchrun_restarts_all(
    nproc, model, killed_in_epoch, small_mnist, undisturbed, tmp_path
):
    run = Run(nproc, tmp_path, *options_for_kills(model, small_mnist), torchrun=("--max-restarts", "1"))
    run.wait_for(tmp_path / "run" / saved_after(killed_in_epoch - 1, model))
    time.sleep(0.15)
    psutil.Process(run.process.pid).children()[-1].kill()
    assert run.finish() == 0, run.text
    assert "resuming from" in run.text
    assert_equal_runs(tmp_path, run.metrics(), undisturbed(nproc, model), model)


def test_a_refused_start_does_not_become_a_restart(small_mnist, tmp_path):
    options = options_for_kills("mlp", small_mnist)
    train(2, tmp_path, *options, "--epochs", "1")
    run = Run(2, tmp_path, *options, torchrun=("--max-restarts", "1"))
    assert run.finish() == 1
    assert run.text.count("holds a run already") == 2
    assert [line["epoch"] for line in run.metrics()] == [1]


def test_stopped_in_mid_epoch_and_resumed_at_another_world_size(one_process, small_mnist, tmp_path):
    options = (*UNEVEN, "--data-dir", small_mnist, "--run-name", "run")
    part = train(4, tmp_path, *options, "--max-steps", "6")
    assert [len(line["step_losses"]) for line in part] == [4, 2]
    assert part[-1]["samples_seen"] == 104
    assert_same_losses(one_process, train(2, tmp_path, *options, "--resume"))


@pytest.mark.parametrize(("nproc", "number"), [(0, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_ends_the_run_and_names_the_way_on(nproc, number, small_mnist, tmp_path):
    options = [*options_for_kills("resnet18", small_mnist), "--epochs", "100"]
    run = Run(nproc, tmp_path, *options)
    run.wait_for(tmp_path / "run/checkpoint-00000011.pt")
    sent = time.monotonic()
    run.process.send_signal(number)  # to torchrun alone, which passes it on
    code = run.finish()
    assert time.monotonic() - sent < 10
    assert code == (128 + number if nproc == 0 else 1)
    said = [line for line in run.text.splitlines() if "stopped by" in line]
    assert len(said) == 1, run.text
    assert f"stopped by {number.name}: {tmp_path / 'run'}" in said[0]
    assert "--run-name run " in said[0] and said[0].endswith("--resume")
    if nproc == 0:
        assert "Traceback" not in run.text


# --- bad input: one message, exit code 2, no hang ------------------------------------------------------------------


def refused(nproc: int, folder: Path, *args: object) -> str:
    """The one error line of a start that must be refused."""
    run = Run(nproc, folder, *args)
    code = run.finish()
    # torchrun ends with 1 whatever its script's exit code was, and reports that code.
    assert code == (2 if nproc == 0 else 1), run.text
    if nproc:
        assert "exitcode  : 2" in run.text
    lines = [line for line in run.text.splitlines() if line.startswith("train_ddp.py: error:")]
    assert len(lines) == 1, run.text
    if nproc == 0:
        assert "Traceback" not in run.text
    return lines[0]


def test_a_batch_that_does_not_divide(tmp_path):
    assert "global batch 130 is not divisible by 4 ranks; use 128 or 132" in refused(4, tmp_path, "--batch-size", "130")


@pytest.mark.parametrize("nproc", [0, 2])
def test_usage(nproc, tmp_path):
    assert "invalid choice: 'cats'" in refused(nproc, tmp_path, "--dataset", "cats")
    assert not list(tmp_path.glob("train_ddp*"))


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_storage_path_that_cannot_be_written(nproc, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot write to --storage-path" in refused(nproc, tmp_path, "--storage-path", tmp_path / "file/runs")


@pytest.mark.parametrize("nproc", [0, 2])
def test_damaged_and_foreign_checkpoints(nproc, small_mnist, tmp_path):
    options = options_for_kills("mlp", small_mnist)
    train(nproc, tmp_path, *options)
    older, newest = sorted((tmp_path / "run").iterdir())
    assert "holds a run already: add --resume" in refused(nproc, tmp_path, *options)
    assert "is of --model mlp" in refused(nproc, tmp_path, *options, "--resume", "--model", "resnet18")
    complete = newest.read_bytes()
    newest.write_bytes(complete[: len(complete) // 2])
    run = Run(nproc, tmp_path, *options, "--resume")
    assert run.finish() == 0, run.text
    assert run.text.count("skipped") == 1
    assert f"skipped {newest.name} (truncated" in run.text
    assert f"resuming from {older}" in run.text
    assert newest.read_bytes() == complete or torch.load(newest, weights_only=True)["progress"]["step"] == 132
    for path in (older, newest):
        path.write_bytes(path.read_bytes()[:1000])
    assert "nothing to resume: no readable checkpoint" in refused(nproc, tmp_path, *options, "--resume")


def test_help_is_the_manual():
    result = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    for option in ("epochs", "max-steps", "batch-size", "lr", "seed", "model", "dataset", "data-dir", "precision",
                   "storage-path", "run-name", "resume", "metrics-out"):  # fmt: skip
        assert f"--{option}" in result.stdout
    assert "torchrun" in result.stdout
