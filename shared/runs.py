"""A run: the folder that holds its checkpoints, who may write there, and how to continue it."""

import argparse
import os
import shlex
import socket
import sys
import time
from pathlib import Path

import psutil

from shared import checkpoint
from shared.distributed import Worker, from_rank_zero, gather_objects
from shared.errors import UsageError


class Run:
    """A run whose checkpoints are files in a folder that this node sees: one file each (`shared.checkpoint`).

    options: what decides what the run computes, for its checkpoints. metrics: those of an earlier start.
    """

    def __init__(
        self, folder: Path | str, options: dict | None = None, restarted: bool = False, saved_step: int = -1
    ) -> None:
        self.folder, self.options, self.metrics = folder, options or {}, []
        self.restarted = restarted  # torchrun has started this job again, and the run is its own
        self.saved_step = saved_step  # of the newest checkpoint that all ranks know of; -1: none
        self.resumed_from: Path | str | None = None  # the checkpoint that `claim` has read

    @classmethod
    def from_args(cls, args: argparse.Namespace, **more: object) -> "Run":
        """The run that the options ask for, the same on every rank and after every restart by torchrun. Collective.

        more: what else decides what it computes.
        """
        if "://" in args.storage_path:
            raise UsageError(f"--storage-path {args.storage_path}: this script writes to a folder that its node sees")
        storage_path = Path(args.storage_path).absolute()
        # Rank 0 may be on a different host than before the restart: any node's note counts.
        notes = [note for note in gather_objects(find_note(storage_path)) if note]
        name, step = max(notes, key=lambda note: note[1], default=(from_rank_zero(new_name()), -1))
        return cls(storage_path / (args.run_name or name), options_of(args) | more, bool(notes), step)

    def list_newest_first(self) -> list:
        """The paths of its checkpoints, readable or not, newest first."""
        return checkpoint.list_newest_first(self.folder)

    def load_newest(self, worker: Worker) -> tuple[Path | str | None, dict | None, list[str]]:
        """(path, state, what was skipped and why) of the newest readable checkpoint; (None, None, ...) without one."""
        return checkpoint.first_readable(self.list_newest_first())

    def make_folder(self) -> None:
        """Make the folder where it is missing. Raises OSError if it cannot be written to."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()

    def claim(self, args: argparse.Namespace, worker: Worker) -> dict | None:
        """Make the run's folder; return the state to continue from, or None to start from scratch. For rank 0 alone.

        Raises ValueError for a run that exists and is not resumed, for one that has nothing to resume, for a restart
        that does not see what was saved before it, and for a storage path that cannot be written.
        """
        if args.resume and args.run_name is None:
            raise ValueError("--resume needs the --run-name of the run to continue")
        found = self.list_newest_first()
        if found and not (args.resume or self.restarted):
            raise ValueError(
                f"{self.folder} holds a run already: add --resume to continue it, or choose a different --run-name"
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
            worker.log("restarted before anything was saved: starting from scratch")
        try:
            self.make_folder()
        except OSError as error:
            raise ValueError(f"cannot write to --storage-path: {error.strerror or error}: {self.folder}") from error
        check_metrics_out(args)
        if state is not None:
            progress = state.get("progress", {})
            self.check_options(path, progress.get("options", {}), worker)
            worker.log(f"resuming from {path}")
            self.resumed_from, self.metrics = path, progress.get("metrics", [])
        if not self.restarted:
            write_note(Path(self.folder), -1)
        return state

    def check_options(self, path: Path | str, saved: dict, worker: Worker) -> None:
        """Raises ValueError if a checkpoint is of a different model, data set or program; reports what else differs."""
        now = self.options
        for name in ("model", "preset", "zero_stage", "dataset"):
            if (name in saved) != (name in now):
                raise ValueError(f"{path} was not written by this training script")
            if saved.get(name) != now.get(name):
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{path} is of {option} {saved[name]}, and this run asks for {option} {now[name]}")
        if any(saved.get(name) != now.get(name) for name in ("classes", "image_size")):
            raise ValueError(f"{path} was trained on images with other labels or of a different --image-size")
        for name in saved | now:
            if saved.get(name) != now.get(name):
                ignored = " is ignored: optimizer and schedule are restored" * (name in ("lr", "lr_step_size"))
                worker.log(f"note: {name} {now.get(name)}{ignored}; the run was started with {saved.get(name)}")

    def save(self, state: dict, worker: Worker) -> None:
        """Rank 0 writes a `checkpoint.training_state` and keeps the two newest. For every rank."""
        step = state["progress"]["step"]
        if worker.rank == 0:
            checkpoint.keep_newest(checkpoint.save_atomically(state, checkpoint.path_for_step(self.folder, step)))
            self.saved_step = step
        if worker.local_rank == 0:
            write_note(Path(self.folder), self.saved_step)
        self.saved_step = step  # what rank 0 is writing now the others can rely on when all come here the next time

    def resume_hint(self) -> str:
        """What a user whose run ends early needs to know: what is saved, and how to continue."""
        try:
            newest = self.list_newest_first()
        except Exception as error:  # the storage's own: credentials that expired, a share that is away
            return f"cannot see what is saved in {self.folder} ({error}); continue with: {self.resume_command()}"
        return f"{newest[0]} is saved; continue with: {self.resume_command()}" if newest else "nothing was saved yet"

    def resume_command(self) -> str:
        """The shell command that continues this run."""
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
    """A name for a run that was given none: the script, the time, the process."""
    return time.strftime(f"{Path(sys.argv[0]).stem}-%Y%m%d-%H%M%S-") + str(os.getpid())


def options_of(args: argparse.Namespace) -> dict:
    """The options that decide what a run computes; those that it does not have are left out."""
    names = ("model", "preset", "dataset", "text_file", "precision", "batch_size", "lr", "lr_step_size", "seed")
    values = {name: getattr(args, name, None) for name in (*names, "image_size", "augment")}
    return {name: value for name, value in values.items() if value is not None}


def check_metrics_out(args: argparse.Namespace) -> None:
    """Raises ValueError if --metrics-out cannot be written to; its content stays."""
    if args.metrics_out is not None:
        try:
            Path(args.metrics_out).parent.mkdir(parents=True, exist_ok=True)
            open(args.metrics_out, "a").close()
        except OSError as error:
            raise ValueError(f"cannot write to --metrics-out: {error.strerror}: {args.metrics_out}") from error


# --- restarts by torchrun ---------------------------------------------------------------------------------------------
# torchrun's agent, one per node, ends the processes of its node when one of them anywhere dies, and starts new ones,
# which know nothing of the old ones. The store through which the ranks meet is on the node of rank 0 and is lost with
# it. So each node keeps a note in the run's folder: a file that is named after the agent, which lives on, and holds the
# step of the newest checkpoint. A later start of the same script has a different agent, and does not find the note.


def note_name() -> str | None:
    """The name of this job's notes on this node; None if no agent has started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = psutil.Process(os.getppid())
    return f".torchrun-{socket.gethostname()}-{agent.pid}-{agent.create_time():.0f}"


def write_note(folder: Path, step: int) -> None:
    """Note on this node that the run in `folder` is this job's, and saved after `step` steps; -1: not yet."""
    if (name := note_name()) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.partial"
        partial.write_text(str(step))
        os.replace(partial, folder / name)


def find_note(storage_path: Path) -> tuple[str, int] | None:
    """(run name, newest step or -1) that this node has noted under `storage_path` before a restart; else None."""
    name = note_name()
    found = [] if name is None else list(storage_path.glob(f"*/{name}"))
    return (found[0].parent.name, int(found[0].read_text())) if found else None
