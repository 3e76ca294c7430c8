"""Logs, a run's folder on this machine, and its best checkpoint."""

import json
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from shared import checkpoint, progress
from shared.distributed import Worker
from shared.on_ray.storage import RayRun
from training.config import Config


class Log:
    """A rank's structured log, a file of its own on its node: one JSON object a line. Rank 0 prints the words too."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.worker, self.run, self.node = worker, folder.name, socket.gethostname()
        self.path = folder / f"{self.node}-rank-{worker.rank}.jsonl"

    def __call__(self, message: str, step: int, **fields: object) -> None:
        """Note what happened after `step` steps, with the numbers that belong to it."""
        worker = self.worker
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "node": self.node, "rank": worker.rank,
            "local_rank": worker.local_rank, "world_size": worker.world_size, "run": self.run, "step": step,
            "message": message, **fields,
        }  # fmt: skip
        with open(self.path, "a") as file:  # opened for each line: what is written outlives a kill
            file.write(json.dumps(line) + "\n")
        if worker.rank == 0:
            worker.log(message)


def run_args(config: Config, options: Namespace, num_workers: int) -> Namespace:
    """A run's options under the names that `shared` uses. num_workers: 0 without Ray."""
    return Namespace(
        storage_path=config.paths.model_save_dir, run_name=options.run_name, resume=options.resume, metrics_out=None,
        num_workers=num_workers,
    )  # fmt: skip


def store_in(folder: Path, config: Config) -> Callable[[dict, dict], None]:
    """What keeps a state as a file in `folder`, and deletes older ones as Ray Train does: all but the best."""

    def store(state: dict, metrics: dict) -> None:
        newest = checkpoint.save_atomically(state, checkpoint.path_for_step(folder, metrics["step"]))
        lines = state["progress"]["metrics"]
        scores = {checkpoint.path_for_step(folder, line["step"]): line["val_accuracy"] for line in lines}
        kept = [path for path in checkpoint.list_newest_first(folder) if path <= newest]
        kept.sort(key=lambda path: scores.get(path, -1.0), reverse=True)  # one inside an epoch has no score
        for path in kept[config.checkpoint.keep_best :]:
            if path != newest:
                path.unlink()

    return store


def load_state(run: RayRun, path: Path | str) -> dict:
    """The state in a checkpoint of either kind: a file, or a folder in Ray's storage. Raises ValueError."""
    return checkpoint.load(path) if str(path).endswith(".pt") else run.load(path)


def best_state(folder: str) -> tuple[str, dict]:
    """Path and state of a run's checkpoint with the highest val_accuracy; of equals the newest, which is always kept.

    Raises ValueError where there is none that can be read.
    """
    run, best, problems = RayRun(folder), None, []
    for path in run.list_newest_first():
        try:
            state = load_state(run, path)
        except (ValueError, OSError) as error:  # damaged, or just deleted since a better one has come
            problems.append(f"{Path(path).name} ({error})")
            continue
        if "score" not in state:
            problems.append(f"{Path(path).name} (not a checkpoint of this program)")
        elif state["score"] is not None and (best is None or state["score"] > best[1]["score"]):
            best = str(path), state
    if best is None:
        raise ValueError(
            f"no checkpoint after a whole epoch can be read in {folder}: {'; '.join(problems) or 'it has none'}"
        )
    return best


def write_metrics(config: Config, run: str, result: dict) -> Path:
    """Write a finished run's metrics.json, beside its logs, at once."""
    path = Path(config.paths.log_dir, run, "metrics.json").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.write_metrics(path, [result])
    return path


def in_words(result: dict) -> str:
    """A finished run's result for people."""
    return (
        f"test_accuracy {result['test_accuracy']:.4f} of epoch {result['best_epoch']}, the best of "
        f"{len(result['epochs'])}; {result['seconds']:.1f} s of training"
    )
