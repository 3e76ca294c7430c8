"""Manage a run: the folder of its checkpoints, the right to write there, and how to continue it.

What the folder holds, under torchrun, and who writes it:

    checkpoint-STEP.pt        rank 0, every save; the two newest are kept
    .checkpoint-STEP...       rank 0, while it saves; what a kill has left goes with a later save
    .writer.json              a thread of rank 0, every ten seconds: the lease (`shared.running.lease`)
    .torchrun-HOST-PID-START  the first rank of each node, after every save: the newest step (`shared.running.restarts`)

On Ray, a checkpoint is a folder that Ray names and stores (`shared.on_ray.storage`), and the driver holds the lease.
"""

import argparse
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared import checkpoint
from shared.distributed import Worker, fail_together
from shared.running import lease

SEARCH = "experiment_state"  # the prefix of Ray Tune's own files
# A run's own checkpoints: files, and on Ray folders. A copy that a user keeps beside them, as checkpoint-best, is not.
CHECKPOINT = re.compile(r"checkpoint-\d{8}(\.pt|-[0-9a-f]+)")
# What a run has read, known by its content, and how a message calls a change. Older checkpoints lack some of these.
CONTENTS = {
    "samples": "a different number of training or validation samples in --data-uri",
    "base": "different weights in --base",
    "base_config": "a different config.json in --base",
    "base_tokenizer": "a different tokenizer in --base",
    "base_template": "a different chat template in --base",
    "data_file": "a different --data-file",
    "validation_rows": "different validation rows",
}
# Marks that older checkpoints lack, and what these hold, in a message. They would load, and compute something else.
MARKS = {"qkv_rows": "an older GPT, with the rows of qkv in a different order"}
MAY_DIFFER = ("text_file", "precision", "batch_size", "lr", "lr_step_size", "seed")


class Run:
    """A run whose checkpoints are files in a folder that this node sees, one file each (`shared.checkpoint`).

    options: those that decide what the run computes. They are saved in its checkpoints.
    may_differ: the names of those in which a resumed run may differ from its checkpoint. It must share all others.
    """

    restarted = False  # whether a launcher has restarted this run (`shared.running.restarts`)

    def __init__(
        self, folder: Path | str, options: dict | None = None, may_differ: Sequence[str] = MAY_DIFFER
    ) -> None:  # fmt: skip
        self.folder, self.options, self.may_differ = folder, options or {}, may_differ
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
        folders = [
            path for path in Path(self.folder).glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()
        ]
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

    def open_or_resume(self, resume: bool, worker: Worker) -> dict | None:
        """Return the state to continue from, or None to start from scratch.

        Only rank 0 calls it. From here on no other process may write to the run, until `lease.release`. Raises
        ValueError if the run cannot be opened or continued.
        """
        self.check_opening(resume)
        lease.acquire(self, worker)
        try:
            path, state, skipped = self.load_newest(worker)
            for what in skipped:
                worker.log(f"skipped {what}")
            if state is None and (skipped or (resume and not self.restarted)):
                raise ValueError(f"nothing to resume: no readable checkpoint in {self.folder}")
            if state is not None:
                progress = state.get("progress", {})
                self.check_options(path, progress.get("options", {}), worker)
                worker.log(f"resuming from {path}")
                self.resumed_from, self.metrics = path, progress.get("metrics", [])
            return state
        except BaseException:
            lease.release()
            raise

    def check_opening(self, resume: bool) -> None:
        """Raise ValueError if the run cannot be opened, before anything is read. Its folder is made to find out.

        That is so if it exists and is not resumed, if there is nothing to resume, if a different kind of script has
        written to its folder, and if the storage cannot be written to.
        """
        if foreign := self.list_foreign():
            raise ValueError(
                f"{self.folder} holds a run of a different kind of script ({Path(foreign[0]).name}): choose a "
                "different --run-name"
            )
        found = self.list_newest_first()
        if found and not (resume or self.restarted):
            raise ValueError(
                f"{self.folder} holds a run already: add --resume to continue it, or choose a different --run-name"
            )
        if resume and not (found or self.restarted):
            raise ValueError(f"nothing to resume: no readable checkpoint in {self.folder}")
        try:
            self.make_folder()
        except OSError as error:
            raise ValueError(f"cannot write to --storage-path: {error.strerror or error}: {self.folder}") from error

    def check_options(self, path: Path | str, saved: dict, worker: Worker) -> None:
        """Raise ValueError if a checkpoint is of a different model, data set or script.

        Options that may differ, and do, are reported in the log.
        """
        now = self.options
        changed = [name for name in now | saved if saved.get(name) != now.get(name)]
        changed = [name for name in changed if name in saved or name not in CONTENTS]  # older: nothing to compare
        for name in changed:
            if name in MARKS and name in now:
                raise ValueError(f"{path} holds {MARKS[name]}: begin a new run with a different --run-name")
            if name in CONTENTS and name in now:
                raise ValueError(
                    f"{path} was written with {CONTENTS[name]}: resume with the old one, or begin a new run with a "
                    "different --run-name"
                )
            if name not in self.may_differ:
                if name not in saved or name not in now:
                    raise ValueError(f"{path} was not written by this training script")
                before, after = (option_of(name, each[name]) for each in (saved, now))
                raise ValueError(f"{path} is of {before}, but this run asks for {after}")
        for name in changed:
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
            newest = ThreadPoolExecutor().submit(self.list_newest_first).result(timeout=5)
        except TimeoutError:
            return f"{self.folder} does not answer; continue with: {self.resume_command()}"
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
    """Name a value of a run in a message, by its option. Your own images come from --data-uri, not --dataset."""
    if isinstance(value, list):  # of the data, not of an option
        return f"{name} {', '.join(map(str, value))}"
    option = "--data-uri" if name == "dataset" and "/" in value else f"--{name.replace('_', '-')}"
    return f"{option} {value}" if value is not None else f"no {option}"


def options_of(args: argparse.Namespace, *names: str) -> dict:
    """Return the options that decide what a run computes: those that all scripts have, and `names` of this script's."""
    common = ("model", "dataset", *MAY_DIFFER)
    return {name: getattr(args, name) for name in (*common, "preset", *MARKS, *names) if hasattr(args, name)}
