"""What chapter 2's README says of the checkpoints in Ray's storage, in two runs: checkpoints_in_storage.py FILE

The first run keeps the best two of six, and waits after each report until Ray has deleted what it deletes. In the
second one the controller collects reports every four seconds only. Its worker dies when the second checkpoint is in
the storage and not yet collected. Then it uploads two asynchronously, and two more synchronously. FILE gets what is
left in the storage, and the order of events.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ray
import ray.train
from ray.train import CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.torch import TorchTrainer

LIMIT = 300  # seconds
FOLDER = Path("storage").absolute()
EVENTS = Path("events").absolute()


def note(run: str, event: str) -> None:
    with open(EVENTS, "a") as file:
        file.write(f"{run} {event}\n")


def events(run: str) -> list[str]:
    lines = EVENTS.read_text().splitlines()
    return [line.removeprefix(f"{run} ") for line in lines if line.startswith(f"{run} ")]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stored(run: str) -> list[str]:
    return sorted(path.name for path in (FOLDER / run).glob("epoch-*"))


def report(run: str, epoch: int, score: float = 0, mode: CheckpointUploadMode = CheckpointUploadMode.SYNC) -> None:
    """Report a small checkpoint, and note when its upload begins and ends, and when this function returns."""

    def upload(reported: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        note(run, f"{name} begins")
        if mode == CheckpointUploadMode.ASYNC:
            wait_until(lambda: "epoch-4 returned" in events(run))
        path = shutil.copytree(reported.path, FOLDER / run / name)
        note(run, f"{name} is stored, {len(stored(run))} in all")
        return ray.train.Checkpoint.from_directory(path)

    folder = tempfile.mkdtemp()
    Path(folder, "weights").write_text(str(epoch))
    ray.train.report(
        {"score": score}, ray.train.Checkpoint.from_directory(folder), checkpoint_dir_name=f"epoch-{epoch}",
        checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=True, checkpoint_upload_fn=upload,
    )  # fmt: skip
    note(run, f"epoch-{epoch} returned")


def wait_until_collected() -> None:
    ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)


def keep_best() -> None:
    for epoch, score in enumerate([0.91, 0.95, 0.93, 0.96, 0.94, 0.90], start=1):
        report("scored", epoch, score)
        wait_until_collected()
        wait_until(lambda: len(stored("scored")) <= 3)


def die_between() -> None:
    newest = ray.train.get_checkpoint()
    note("orphan", f"starts with {newest and Path(newest.path).name}")
    if newest is None:
        report("orphan", 1)
        wait_until_collected()
        report("orphan", 2)
        os.kill(os.getpid(), signal.SIGKILL)
    for epoch in (3, 4):
        report("orphan", epoch, mode=CheckpointUploadMode.ASYNC)
    wait_until_collected()
    for epoch in (5, 6):  # faster than the controller collects
        report("orphan", epoch)


def fit(run: str, function: Callable[[], None], **keep: object) -> None:
    TorchTrainer(
        function,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name=run,
            storage_path=str(FOLDER),
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(**keep),
        ),
    ).fit()


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    fit("scored", keep_best, num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="max")
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "4"
    fit("orphan", die_between, num_to_keep=1)
    found = {run: {"events": events(run), "left": stored(run)} for run in ("scored", "orphan")}
    Path(sys.argv[1]).write_text(json.dumps(found))
