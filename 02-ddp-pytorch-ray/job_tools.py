"""Start a training script as a job, watch it, find its Ray workers, and draw its losses: the helpers of lesson 2.4."""

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from matplotlib.axes import Axes

from shared import plots

PATIENCE_S = 600


class Job:
    """A training script that runs in a process of its own, as if it had been started in a terminal.

    It appends its output to FOLDER/NAME.log, and stores its checkpoints in FOLDER/NAME. After each epoch it writes a
    line of metrics to FOLDER/NAME.jsonl. An earlier run of this name is deleted.

    command: the program and its options, without those that name the run and its files.
    environment: variables in addition to those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, **environment: str) -> None:
        self.folder, self.log, self.metrics_file = folder / name, folder / f"{name}.log", folder / f"{name}.jsonl"
        names = ["--run-name", name, "--storage-path", str(folder), "--metrics-out", str(self.metrics_file)]
        self.command, self.environment = [*command, *names], {**os.environ, **environment}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self.metrics_file.unlink(missing_ok=True)

    def start(self, *options: str) -> None:
        """Start the command, with further options."""
        with open(self.log, "a") as log:
            self.process = subprocess.Popen([*self.command, *options], stdout=log, stderr=log, env=self.environment)

    def kill(self) -> int:
        """Send SIGKILL to the process that `start` has started, and return its exit code."""
        self.process.kill()
        return self.process.wait()

    def wait(self) -> None:
        """Wait for the end of the job. Raises AssertionError with its output if it fails."""
        assert self.process.wait(timeout=PATIENCE_S) == 0, self.log.read_text()[-3000:]

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the job has finished this epoch.

        Raises AssertionError with the job's output if the job has ended, or is already an epoch ahead.
        """
        deadline = time.monotonic() + PATIENCE_S
        while len(self.metrics()) < epoch and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(self.metrics()) == epoch and self.process.poll() is None, self.log.read_text()[-3000:]

    def metrics(self) -> list[dict]:
        """Return the metrics of the epochs so far, without the speed, which differs from run to run."""
        text = self.metrics_file.read_text() if self.metrics_file.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return [{key: line[key] for key in line if key != "samples_per_second"} for line in lines]

    def losses(self) -> list[float]:
        """Return the loss of each step so far."""
        return [loss for line in self.metrics() for loss in line["step_losses"]]

    def said(self) -> list[str]:
        """Return what driver and ranks have logged so far, without the lines of Ray."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(("[rank", "[driver"))]


def train_workers() -> list[psutil.Process]:
    """Return the worker processes of Ray Train in the Ray that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            found += [process] if process.name().startswith("ray::RayTrain") else []
    return found


def wait_until_no_workers() -> None:
    """Wait until Ray has ended all workers of Ray Train. Raises AssertionError if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while train_workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not train_workers()


def draw_two_kills(undisturbed: Sequence[float], killed: Sequence[float], resumed_after: Sequence[int]) -> Axes:
    """Draw the losses of both runs, the killed one in a different color for each set of workers.

    Each point is the mean of 40 steps.
    resumed_after: the steps after which the second and the third set of workers have continued.
    """
    axes = plots.new_axes("", "step", "cross entropy, mean of 40 steps", size=(6, 3.8))
    axes.set_title("Three sets of workers, one curve", loc="left", fontsize=14)
    axes.plot(*mean_losses(undisturbed), color="#c9c9c9", linewidth=9, label="undisturbed, under torchrun")
    ends = [0, *resumed_after, len(killed)]
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        label = ("first", "second", "third")[number] + " workers, on Ray"
        steps, means = mean_losses(killed)
        inside = [position for position, step in enumerate(steps) if start <= step <= end]
        axes.plot(
            [steps[position] for position in inside], [means[position] for position in inside],
            color=plots.COLORS[number], linewidth=2.5, marker="o", markersize=5, label=label,
        )  # fmt: skip
    for step, who in zip(resumed_after, ("worker", "driver"), strict=True):
        axes.axvline(step, color="black", linestyle=":", linewidth=1.5)
        axes.annotate(f" {who} killed:\n back to {step}", (step, 0.42), xycoords=("data", "axes fraction"), fontsize=11)
    axes.set_ylim(bottom=0)
    axes.xaxis.label.set_fontsize(12)
    axes.yaxis.label.set_fontsize(12)
    axes.tick_params(labelsize=12)
    axes.legend(framealpha=1, edgecolor="none", fontsize=12)
    return axes


def mean_losses(losses: Sequence[float], window: int = 40) -> tuple[list[int], list[float]]:
    """Return (last steps, means) of the losses in windows of this many steps."""
    ends = [min((number + 1) * window, len(losses)) for number in range(math.ceil(len(losses) / window))]
    return ends, [sum(losses[number * window : end]) / (end - number * window) for number, end in enumerate(ends)]
