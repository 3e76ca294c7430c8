"""Start a training script as a job, watch it, find its Ray workers, and draw its losses: the helpers of lesson 2.4."""

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import psutil

from shared import plots

PATIENCE_S = 600
WINDOW = 40  # steps


class Job:
    """A training script that runs in a process of its own, as if it had been started in a terminal.

    It appends its output to FOLDER/NAME.log, and stores its checkpoints in FOLDER/NAME. After each epoch it writes a
    line of metrics to FOLDER/NAME.jsonl. An earlier run of this name is deleted.

    command: the program and its options, without those that name the run and its files.
    pauses: steps after which the ranks wait to be killed, once each (see pause_after.py). Rank 0 then notes all its
    steps in FOLDER/NAME.steps.
    environment: variables in addition to those of this process.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, pauses: Sequence[int] = (), **environment: str
    ) -> None:
        self.folder, self.log, self.metrics_file = folder / name, folder / f"{name}.log", folder / f"{name}.jsonl"
        self.notes = folder / f"{name}.steps"
        for file in (self.log, self.metrics_file, *folder.glob(f"{name}.steps*")):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if pauses:
            pausing = [str(Path(__file__).with_name("pause_after.py")), str(self.notes), ",".join(map(str, pauses))]
            command = [sys.executable, *pausing, *command[1:]]
        names = ["--run-name", name, "--storage-path", str(folder), "--metrics-out", str(self.metrics_file)]
        self.command, self.environment = [*command, *names], {**os.environ, **environment}

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

    def wait_for_pause(self, step: int, num_ranks: int = 2) -> None:
        """Wait until all ranks pause after this step. Raises AssertionError with the output if the job has ended."""
        self._wait_until(lambda: all(Path(f"{self.notes}-{step}-{rank}").exists() for rank in range(num_ranks)))

    def wait_for_workers(self, set_number: int) -> None:
        """Wait until the first, second, ... set of workers has done a step. Raises AssertionError if the job ends."""
        self._wait_until(lambda: len(self.steps()) >= set_number)

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def steps(self) -> list[list[tuple[int, float]]]:
        """Return (step, rank 0's share of its loss) of each step so far, in a list for each process that was rank 0."""
        text = self.notes.read_text().rpartition("\n")[0]  # without a line that is being written
        lines = [json.loads(line) for line in text.splitlines()]
        by_process = itertools.groupby(lines, key=lambda line: line[0])
        return [[(step, loss) for _, step, loss in group] for _, group in by_process]

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


def draw_two_kills(
    undisturbed: Sequence[float], killed: Sequence[float], computed: Sequence[Sequence[tuple[int, float]]]
) -> None:
    """Draw which steps each set of workers has computed, and next to it the losses that both runs have on record.

    computed: what `Job.steps` returns.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    sets = [[step for step, _ in steps] for steps in computed]
    right.plot(*mean_losses(undisturbed), color="#c9c9c9", linewidth=9, label="undisturbed, torchrun")
    ends, means = mean_losses(killed)
    before = 0  # steps computed by the sets before this one
    for number, (steps, following) in enumerate(itertools.zip_longest(sets, sets[1:])):
        label = f"{('first', 'second', 'third')[number]} set of workers"
        style = {"color": plots.COLORS[number], "linewidth": 2.5, "label": label}
        left.plot(range(before + 1, before + len(steps) + 1), steps, **style)
        before += len(steps)
        kept = following[0] - 1 if following else steps[-1]
        if following:
            left.plot([before, before + 1], [steps[-1], following[0]], color="black", linestyle=":")
            left.text(before - 15, steps[-1] + 10, f"{steps[-1] - kept} steps lost", ha="right", fontsize=11)
        inside = [place for place, end in enumerate(ends) if steps[0] - 1 <= end <= kept]
        shared = slice(int(ends[inside[0]] < steps[0]), None)  # the line begins at a point of the set before
        x, y = [ends[place] for place in inside], [means[place] for place in inside]
        right.plot(x, y, marker="o", markevery=shared, **style)
    left.set_title("Computed", loc="left", fontsize=14)
    left.set(xlabel="steps that rank 0 has computed", ylabel="step")
    right.set_title("On record", loc="left", fontsize=14)
    right.set(xlabel="step", ylabel=f"cross entropy, mean of {WINDOW} steps")
    for axes, corner in ((left, "lower right"), (right, "upper right")):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_ylim(bottom=0)
        axes.legend(framealpha=1, edgecolor="none", loc=corner)


def mean_losses(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return (last steps, means) of the losses in windows of WINDOW steps."""
    ends = [min((number + 1) * WINDOW, len(losses)) for number in range(math.ceil(len(losses) / WINDOW))]
    return ends, [sum(losses[number * WINDOW : end]) / (end - number * WINDOW) for number, end in enumerate(ends)]
