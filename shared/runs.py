"""A run: the folder that holds its checkpoints, who may write there, what it has come to, and how it goes on."""

import argparse
import json
import math
import os
import shlex
import socket
import sys
import time
from pathlib import Path

from shared import checkpoint, torchrun_restarts
from shared.distributed import UsageError, Worker, from_rank_zero, gather_objects


def new_name() -> str:
    """A name for a run that was given none: the script, the time, the process."""
    return time.strftime(f"{Path(sys.argv[0]).stem}-%Y%m%d-%H%M%S-") + str(os.getpid())


class Run:
    """A run whose checkpoints are files in a folder that this node sees: one file each (`shared.checkpoint`)."""

    def __init__(self, folder: Path | str, restarted: bool = False, saved_step: int = -1) -> None:
        self.folder = folder
        self.restarted = restarted  # torchrun has started this job again, and the run is its own
        self.saved_step = saved_step  # of the newest checkpoint that all ranks know of; -1: none
        self.resumed_from: Path | str | None = None  # the checkpoint that `claim` has read

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Run":
        """The run that the options ask for, the same on every rank and after every restart by torchrun. Collective."""
        if "://" in args.storage_path:
            raise UsageError(f"--storage-path {args.storage_path}: this script writes to a folder that its node sees")
        storage_path = Path(args.storage_path).absolute()
        # Rank 0 may be on another host than before the restart: what any node has noted counts.
        notes = [note for note in gather_objects(torchrun_restarts.noted(storage_path)) if note]
        name, step = max(notes, key=lambda note: note[1], default=(from_rank_zero(new_name()), -1))
        return cls(storage_path / (args.run_name or name), bool(notes), step)

    def list_newest_first(self) -> list:
        """The paths of its checkpoints, readable or not, newest first."""
        return checkpoint.list_newest_first(self.folder)

    def load_newest(self, worker: Worker) -> tuple[Path | str | None, dict | None, list[str]]:
        """(path, state, what was skipped and why) of the newest readable checkpoint; (None, None, ...) without one.

        worker: logs how far it is, where that takes long.
        """
        return checkpoint.load_newest(self.folder)

    def make_folder(self) -> None:
        """Make the folder where it is missing. Raises OSError where it cannot be written to."""
        checkpoint.make_folder(self.folder)

    def claim(self, args: argparse.Namespace, worker: Worker) -> dict | None:
        """Make the run's folder; return the state to go on from, or None to start from nothing. For rank 0 alone.

        Raises ValueError for a run that exists and is not resumed, for one that has nothing to resume, for a restart
        that does not see what was saved before it, and for a storage path that cannot be written.
        """
        if args.resume and args.run_name is None:
            raise ValueError("--resume needs the --run-name of the run to go on with")
        found = self.list_newest_first()
        if found and not (args.resume or self.restarted):
            raise ValueError(
                f"{self.folder} holds a run already: add --resume to go on with it, or choose another --run-name"
            )
        if self.saved_step >= 0 and (not found or found[0] < checkpoint.path_for_step(self.folder, self.saved_step)):
            raise ValueError(
                f"the checkpoint after step {self.saved_step} is not in {self.folder} on {socket.gethostname()}, where "
                "rank 0 is now: give all nodes a --storage-path that they share, or --resume with rank 0 where it is"
            )
        path, state, skipped = self.load_newest(worker)
        for what in skipped:
            worker.log(f"skipped {what}")
        if state is None and (skipped or (args.resume and not self.restarted)):
            raise ValueError(f"nothing to resume: no readable checkpoint in {self.folder}")
        if state is None and self.restarted:
            worker.log("restarted before anything was saved: beginning anew")
        try:
            self.make_folder()
        except OSError as error:
            raise ValueError(f"cannot write to --storage-path: {error.strerror or error}: {self.folder}") from error
        check_metrics_out(args)
        if state is not None:
            check_same_run(args, path, state.get("progress", {}).get("options", {}), worker)
            worker.log(f"resuming from {path}")
            self.resumed_from = path
        if not self.restarted:
            torchrun_restarts.note(Path(self.folder), -1)
        return state

    def save(self, state: dict, worker: Worker) -> None:
        """Rank 0 writes a `checkpoint.training_state`, and keeps the two newest. For every rank."""
        step = state["progress"]["step"]
        if worker.rank == 0:
            checkpoint.keep_newest(checkpoint.save_atomically(state, checkpoint.path_for_step(self.folder, step)))
            self.saved_step = step
        if worker.local_rank == 0:
            torchrun_restarts.note(Path(self.folder), self.saved_step)
        self.saved_step = step  # what rank 0 is writing now the others can rely on when all come here the next time

    def farewell(self) -> str:
        """What a user whose run ends early needs to know: what is saved, and how to go on."""
        try:
            newest = self.list_newest_first()
        except Exception as error:  # a storage's own: credentials that expired, a share that is away
            return f"cannot see what is saved in {self.folder} ({error}); go on with: {self.resume_command()}"
        return f"{newest[0]} is saved; go on with: {self.resume_command()}" if newest else "nothing was saved yet"

    def resume_command(self) -> str:
        """The shell command that goes on with this run."""
        name = Path(self.folder).name
        words = [word for word in sys.argv if word != "--resume"]
        if "--run-name" not in words and not any(word.startswith("--run-name=") for word in words):
            words += ["--run-name", name]
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
            return f"the same command on every node, with --run-name {name} --resume"
        launcher = ["python"]
        if "LOCAL_WORLD_SIZE" in os.environ:
            launcher = ["torchrun", "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
        return shlex.join([*launcher, *words, "--resume"])


def check_metrics_out(args: argparse.Namespace) -> None:
    """Raises ValueError where --metrics-out cannot be written to; what is in it stays."""
    if args.metrics_out is not None:
        try:
            Path(args.metrics_out).parent.mkdir(parents=True, exist_ok=True)
            open(args.metrics_out, "a").close()
        except OSError as error:
            raise ValueError(f"cannot write to --metrics-out: {error.strerror}: {args.metrics_out}") from error


def options_of(args: argparse.Namespace) -> dict:
    """The options that decide what a run computes, for its checkpoints; an image model has no preset."""
    names = ("model", "preset", "zero_stage", "dataset", "text_file", "precision", "batch_size", "lr", "lr_step_size")
    names += ("seed", "classes", "image_size", "augment")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def check_same_run(args: argparse.Namespace, path: Path | str, saved: dict, worker: Worker) -> None:
    """Raises ValueError when a checkpoint is of another model, data set or program; says what else is not as it was."""
    now = options_of(args)
    for name in ("model", "preset", "zero_stage", "dataset"):
        if (name in saved) != (name in now):
            raise ValueError(f"{path} was not written by this training script")
        if saved.get(name) != now.get(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{path} is of {option} {saved[name]}, and this run asks for {option} {now[name]}")
    if any(saved.get(name) != now.get(name) for name in ("classes", "image_size")):
        raise ValueError(f"{path} was trained on images with other labels or of another --image-size")
    changed = [name for name in now if saved.get(name) != now[name]]
    ignored = [name for name in changed if name in ("lr", "lr_step_size")]  # optimizer and schedule are restored
    for name in ignored:
        option = f"--{name.replace('_', '-')}"
        worker.log(f"note: {option} {now[name]} is ignored: the run goes on with its own schedule, {saved.get(name)}")
    if others := [f"{name} {saved.get(name)} -> {now[name]}" for name in changed if name not in ignored]:
        worker.log(f"note: not the options it was started with ({', '.join(others)})")


def new_progress(args: argparse.Namespace) -> dict:
    """What a run's checkpoints hold beside the tensors: where it is, and the metrics so far.

    step: optimizer steps in all. epoch: the current epoch, from 0. metrics: one dict an epoch. What `new_epoch` has is
    of the current epoch.
    """
    return {"step": 0, "epoch": 0, **new_epoch(), "metrics": [], "options": options_of(args)}


def new_epoch() -> dict:
    """The part of a run's progress that every epoch begins anew.

    position: samples already trained on, over all ranks. seconds: how long that took, not counting what was lost to a
    kill. loss_sum: their losses added up. step_losses: the steps' global mean losses.
    """
    return {"position": 0, "seconds": 0.0, "loss_sum": 0.0, "step_losses": []}


def record_steps(progress: dict, step_losses: list[float], counts: list[int], seconds: float) -> None:
    """Note steps just taken: their global mean losses, how many samples each took over all ranks, and their time.

    Raises UsageError where a loss is not finite, on every rank since all have the same: what follows would be saved,
    and push out the checkpoints that are still good.
    """
    for number, loss in enumerate(step_losses, progress["step"] + 1):
        check_finite(f"the loss of step {number}", loss)
    for loss, count in zip(step_losses, counts, strict=True):
        progress["loss_sum"] += loss * count
    progress["step"] += len(counts)
    progress["position"] += sum(counts)
    progress["seconds"] += seconds
    progress["step_losses"] = progress["step_losses"] + step_losses


def check_finite(what: str, value: float) -> None:
    """Raises UsageError where a number of the training is not finite."""
    if not math.isfinite(value):
        raise UsageError(f"diverged: {what} is {value} (not saved): begin a new run with a smaller --lr")


def finish_epoch(progress: dict, num_samples: int, measured: dict) -> dict:
    """The epoch's line for --metrics-out. An epoch that --max-steps cut short stays the current one, to be resumed.

    Raises UsageError as `record_steps`, where only the validation shows what the last step has done to the weights.
    """
    check_finite("val_loss", measured["val_loss"])
    line = {
        "epoch": progress["epoch"] + 1,
        "train_loss": progress["loss_sum"] / progress["position"],
        **measured,
        "step_losses": progress["step_losses"],
        "samples_seen": progress["position"],
        "samples_per_second": progress["position"] / progress["seconds"],
    }
    progress["metrics"] = [*progress["metrics"][: progress["epoch"]], line]
    if progress["position"] == num_samples:
        progress |= {"epoch": progress["epoch"] + 1, **new_epoch()}
    return line


def describe(line: dict, epochs: int) -> str:
    """An epoch's metrics in words."""
    return (
        f"epoch {line['epoch']}/{epochs}  train_loss {line['train_loss']:.4f}  val_loss {line['val_loss']:.4f}  "
        f"val_accuracy {line['val_accuracy']:.3f}  {line['samples_per_second']:.0f} samples/s"
    )


def write_metrics(path: str | Path | None, lines: list[dict]) -> None:
    """Write one JSON line an epoch to `path`, replacing the file at once. None: nothing is written."""
    if path is None:
        return
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(partial, path)
