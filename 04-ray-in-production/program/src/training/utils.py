"""Structured logs, the checkpoints of a run on this machine, and its metrics."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shared import checkpoint
from shared.distributed import Worker, fail_together
from shared.on_ray.storage import RayRun
from shared.running import lease, progress
from shared.running.runs import Run


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass in this precision, as training.precision names it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


class Log:
    """A rank's log: a file on its node with one JSON object per line. Rank 0 also prints the messages."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.worker, self.run, self.node = worker, folder.name, socket.gethostname()
        self.path = folder / f"{self.node}-rank-{worker.rank}.jsonl"

    def __call__(self, message: str, step: int, **fields: object) -> None:
        """Write a message about `step`, with more fields, to the log."""
        worker = self.worker
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "node": self.node, "rank": worker.rank,
            "local_rank": worker.local_rank, "world_size": worker.world_size, "run": self.run, "step": step,
            "message": message, **fields,
        }  # fmt: skip
        with open(self.path, "a") as file:  # opened for each line, so that a kill loses no line
            file.write(json.dumps(line) + "\n")
        if worker.rank == 0:
            worker.log(message)


def store_in(run: Run, keep_best: int) -> Callable[[dict, dict], None]:
    """Return a function that saves a state of `run` and, as Ray Train does, keeps only the best and the newest.

    It raises UsageError if the state cannot be saved, or if a different process has taken over the run.
    """

    def store(state: dict, metrics: dict) -> None:
        with fail_together():
            lease.check(run)
            newest = checkpoint.save_safely(state, checkpoint.path_for_step(run.folder, metrics["step"]))
        lines = state["progress"]["metrics"]
        scores = {checkpoint.path_for_step(run.folder, line["step"]): line["val_accuracy"] for line in lines}
        ranked = [path for path in run.list_newest_first() if path <= newest]
        ranked.sort(key=lambda path: scores.get(path, -1.0), reverse=True)  # a mid-epoch checkpoint has no score
        for path in ranked[keep_best:]:
            if path != newest:
                path.unlink()

    return store


def load_state(run: RayRun, path: Path | str) -> dict:
    """Load the state in a checkpoint: a file, or a folder in Ray's storage. Raises ValueError if it is damaged."""
    return checkpoint.load(path) if str(path).endswith(".pt") else run.load(path)


def best_state(folder: str) -> tuple[str, dict]:
    """Return path and state of a run's checkpoint with the highest val_accuracy. Among equals the newest one wins.

    Raises ValueError if no checkpoint can be read.
    """
    run, best, problems = RayRun(folder), None, []
    for path in run.list_newest_first():
        try:
            state = load_state(run, path)
        except (ValueError, OSError) as error:  # damaged, or just deleted in favor of a better one
            problems.append(f"{Path(path).name} ({error})")
            continue
        if "score" not in state:
            problems.append(f"{Path(path).name} (not a checkpoint of this program)")
        elif state["score"] is not None and (best is None or state["score"] > best[1]["score"]):
            best = str(path), state
    if best is None:
        raise ValueError(
            f"no checkpoint of a finished epoch can be read in {folder}: {'; '.join(problems) or 'it has none'}"
        )
    return best


def write_metrics(folder: str, result: dict) -> Path:
    """Write a finished run's metrics.json to the folder of its logs, atomically, and return its path."""
    path = Path(folder, "metrics.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.write_metrics(path, [result])
    return path


def describe_result(result: dict) -> str:
    """Summarize a finished run's result in one line."""
    return (
        f"test_accuracy {result['test_accuracy']:.4f} of epoch {result['best_epoch']}, the best of "
        f"{len(result['epochs'])}; {result['seconds']:.1f} s of training"
    )
