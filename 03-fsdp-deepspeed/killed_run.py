"""Start the training script in the background, watch its metrics, and kill a Ray worker: the helpers of lesson 3.3."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil


class BackgroundRun:
    """A run of a training script in its own process. Its log, metrics and checkpoints are in `folder`."""

    def __init__(self, folder: Path, name: str, words: list[str], **environment: str) -> None:
        """Delete the files of an earlier run of that name, then start `python WORDS` as the run `name`."""
        self.folder, self.log, self.metrics_file = folder / name, folder / f"{name}.log", folder / f"{name}.jsonl"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.metrics_file.unlink(missing_ok=True)
        options = ["--storage-path", str(folder), "--run-name", name, "--metrics-out", str(self.metrics_file)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words, *options], stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def metrics(self) -> list[dict]:
        """Return the metrics of the epochs so far, without the speeds and peaks that differ from run to run."""
        if not self.metrics_file.exists():
            return []
        measured = ("samples_per_second", "tokens_per_second", "peak_memory_bytes")
        lines = [json.loads(line) for line in self.metrics_file.read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in measured} for line in lines]

    def step_losses(self) -> list[float]:
        """Return the losses of all steps so far."""
        return [loss for line in self.metrics() for loss in line["step_losses"]]

    def messages(self) -> list[str]:
        """Return the lines that the script itself has logged."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(("[rank", "[driver"))]

    def wait_for_epoch(self, number: int) -> None:
        """Wait until that many epochs have ended.

        Raises AssertionError with the end of the log if the run ends first.
        """
        while len(self.metrics()) < number:
            time.sleep(0.05)
            assert self.process.poll() is None, self.log.read_text()[-3000:]

    def wait(self) -> None:
        """Wait for the end of the run. Raises AssertionError with the end of the log if the run failed."""
        assert self.process.wait(timeout=600) == 0, self.log.read_text()[-3000:]


def kill_a_worker() -> int:
    """Send SIGKILL to one of the Ray workers below this process, and return its process ID."""
    workers = []
    for process in psutil.Process().children(recursive=True):  # our Ray is a child of the notebook
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            workers += [process] if process.name().startswith("ray::RayTrain") else []
    workers[-1].kill()
    return workers[-1].pid
