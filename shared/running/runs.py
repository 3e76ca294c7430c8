"""Manage a run: the folder of its checkpoints, the right to write there, and how to continue it."""

import argparse
import errno
import os
import shlex
import sys
import time
import uuid
from pathlib import Path

from shared import checkpoint
from shared.distributed import Worker, fail_together
from shared.running import lease

SEARCH = "experiment_state"  # the prefix of Ray Tune's own files


class Run:
    """A run whose checkpoints are files in a folder that this node sees, one file each (`shared.checkpoint`).

    options: those that decide what the run computes. They are saved in its checkpoints.
    """

    restarted = False  # whether a launcher has restarted this run (`shared.running.restarts`)

    def __init__(self, folder: Path | str, options: dict | None = None) -> None:
        self.folder, self.options = folder, options or {}
        self.token = uuid.uuid4().hex  # shared by the processes that may write to the run (`shared.running.lease`)
        self.is_leased = False
        # Set from the checkpoint that `open_or_resume` has read:
        self.resumed_from: Path | str | None = None
        self.metrics: list[dict] = []

    def list_newest_first(self) -> list:
        """Return the paths of its checkpoints, readable or not, newest first."""
        return checkpoint.list_newest_first(self.folder)

    def list_foreign(self) -> list:
        """Return the paths in the run's folder that belong to Ray Train's checkpoints or to a search.

        A different kind of script has written them.
        """
        folders = [path for path in Path(self.folder).glob("checkpoint-*") if path.is_dir()]
        return [*folders, *Path(self.folder).glob(f"{SEARCH}*")]

    def load_newest(self, worker: Worker) -> tuple[Path | str | None, dict | None, list[str]]:
        """Return (path, state, skipped) for the newest readable checkpoint, as `checkpoint.first_readable` does."""
        return checkpoint.first_readable(self.list_newest_first())

    def make_folder(self) -> None:
        """Make the folder if it is missing. Raises OSError if it cannot be written to."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        self.write_file(".writable", "")
        self.delete_file(".writable")

    def write_file(self, name: str, text: str) -> None:
        """Write a small file to the run's folder."""
        path = Path(self.folder, name)
        partial = path.with_name(f"{name}.{self.token}")
        partial.write_text(text)
        os.replace(partial, path)

    def read_file(self, name: str) -> tuple[str, float] | None:
        """Return (text, modification time in seconds by the storage's clock) of such a file, or None."""
        path = Path(self.folder, name)
        try:
            return path.read_text(), path.stat().st_mtime
        except FileNotFoundError:
            return None

    def delete_file(self, name: str) -> None:
        """Delete such a file, if it exists."""
        Path(self.folder, name).unlink(missing_ok=True)

    def open_or_resume(self, args: argparse.Namespace, worker: Worker) -> dict | None:
        """Make the run's folder, and return the state to continue from, or None to start from scratch.

        Only rank 0 calls it. From here on no other process may write to the run, until `lease.release`. Raises
        ValueError if the run exists and is not resumed, and if there is nothing to resume. The same error is raised for
        a checkpoint of a different model or data set, for storage that cannot be written to, and for a run that a
        different process is writing to.
        """
        if args.resume and args.run_name is None:
            raise ValueError("--resume needs the --run-name of the run to continue")
        if foreign := self.list_foreign():
            raise ValueError(
                f"{self.folder} holds a run of a different kind of script ({Path(foreign[0]).name}): choose a "
                "different --run-name"
            )
        found = self.list_newest_first()
        if found and not (args.resume or self.restarted):
            raise ValueError(
                f"{self.folder} holds a run already: add --resume to continue it, or choose a different --run-name"
            )
        if args.resume and not (found or self.restarted):
            raise ValueError(f"nothing to resume: no readable checkpoint in {self.folder}")
        try:
            self.make_folder()
        except OSError as error:
            raise ValueError(f"cannot write to --storage-path: {error.strerror or error}: {self.folder}") from error
        check_metrics_out(args)
        lease.acquire(self, worker)
        try:
            return self.load_to_resume(args, worker)
        except BaseException:
            lease.release()
            raise

    def load_to_resume(self, args: argparse.Namespace, worker: Worker) -> dict | None:
        """Return the state to continue from, or None if there is none and none is needed.

        Raises ValueError if no checkpoint is readable but one is needed.
        """
        path, state, skipped = self.load_newest(worker)
        for what in skipped:
            worker.log(f"skipped {what}")
        if state is None and (skipped or (args.resume and not self.restarted)):
            raise ValueError(f"nothing to resume: no readable checkpoint in {self.folder}")
        if state is not None:
            progress = state.get("progress", {})
            self.check_options(path, progress.get("options", {}), worker)
            worker.log(f"resuming from {path}")
            self.resumed_from, self.metrics = path, progress.get("metrics", [])
        return state

    def check_options(self, path: Path | str, saved: dict, worker: Worker) -> None:
        """Raise ValueError if a checkpoint is of a different model, data set or script.

        Other options that differ are reported in the log.
        """
        now = self.options
        tuned = ("base", "data_file", "lora_rank", "lora_targets", "lora_alpha")
        for name in ("model", "preset", "zero_stage", "dataset", *tuned):
            if (name in saved) != (name in now):
                raise ValueError(f"{path} was not written by this training script")
            if saved.get(name) != now.get(name):
                before, after = (f"{option_of(name, each[name])} {each[name]}" for each in (saved, now))
                raise ValueError(f"{path} is of {before}, but this run asks for {after}")
        if any(saved.get(name) != now.get(name) for name in ("classes", "image_size")):
            raise ValueError(f"{path} was trained on images with different labels or a different --image-size")
        for name in saved | now:
            if saved.get(name) != now.get(name):
                ignored = " is ignored: optimizer and schedule are restored" * (name in ("lr", "lr_step_size"))
                worker.log(f"note: {name} {now.get(name)}{ignored}; the run was started with {saved.get(name)}")

    def save(self, state: dict, worker: Worker) -> None:
        """Let rank 0 write a `checkpoint.training_state` and keep the two newest. Collective.

        The other ranks wait for it. Raises UsageError on every rank if the file cannot be written, for example because
        the disk is full. The same error is raised if weights are not finite, or if a different process has taken over
        the run.
        """
        with fail_together():
            if worker.rank == 0:
                lease.check(self)
                checkpoint.check_finite(state.get("model", {}))
                path = checkpoint.path_for_step(self.folder, state["progress"]["step"])
                try:
                    checkpoint.keep_newest(checkpoint.save_safely(state, path))
                except OSError as error:
                    raise OSError(f"{error}. {self.resume_hint()}") from error

    def resume_hint(self) -> str:
        """Return what a user needs to know when a run ends early: what is saved, and how to continue."""
        try:
            newest = self.list_newest_first()
        except Exception as error:  # any error of the storage: expired credentials, an unreachable share
            return f"cannot see what is saved in {self.folder} ({error}); continue with: {self.resume_command()}"
        return f"{newest[0]} is saved; continue with: {self.resume_command()}" if newest else "nothing was saved yet"

    def resume_command(self) -> str:
        """Return the shell command that continues this run."""
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


def new_name() -> str:
    """Return a name for a run without --run-name: the script, the time and the process ID."""
    return time.strftime(f"{Path(sys.argv[0]).stem}-%Y%m%d-%H%M%S-") + str(os.getpid())


def option_of(name: str, value: object) -> str:
    """Return the option that sets this value: your own images come from --data-uri, not --dataset."""
    return "--data-uri" if name == "dataset" and "/" in value else f"--{name.replace('_', '-')}"


def options_of(args: argparse.Namespace) -> dict:
    """Return the options that decide what a run computes, without those that it does not have."""
    names = ("model", "preset", "dataset", "text_file", "precision", "batch_size", "lr", "lr_step_size", "seed")
    values = {name: getattr(args, name, None) for name in (*names, "image_size", "augment")}
    return {name: value for name, value in values.items() if value is not None}


def check_metrics_out(args: argparse.Namespace) -> None:
    """Raise ValueError if --metrics-out cannot be written to. Its content stays."""
    if args.metrics_out is not None:
        try:
            path = Path(args.metrics_out).resolve()
            if path.exists() and not (path.is_file() or path.is_char_device()):  # opening a pipe would block forever
                raise OSError(errno.EINVAL, "not a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            open(path, "a").close()
        except OSError as error:
            raise ValueError(f"cannot write to --metrics-out: {error.strerror}: {args.metrics_out}") from error
