"""A run's checkpoints in Ray's storage: a folder that all nodes see, or a cloud's object store."""

import argparse
import contextlib
import glob
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow.fs
import ray.train

from shared import checkpoint, lease, runs, sharded
from shared.distributed import Worker, fail_together, from_rank_zero, gather_objects, retry, wait_for_all
from shared.errors import UsageError
from shared.lease import pid_namespace
from shared.paths import path_or_uri
from shared.progress import write_metrics

STATE_FILE = "state.pt"
SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"  # Ray's own list of a run's checkpoints


def file_system(folder: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """What reads and writes a path or a URI, and the path in it. Raises ValueError for a URI that it cannot use."""
    try:
        return pyarrow.fs.FileSystem.from_uri(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot use --storage-path: {error}") from error


class RayRun(runs.Run):
    """A run whose checkpoints are folders that Ray Train has stored, under a path or a URI.

    The driver opens it and sends it to the workers.
    """

    local_mode = False  # Ray's local mode stores no checkpoints

    @classmethod
    def from_args(cls, args: argparse.Namespace, **more: object) -> "RayRun":
        """The run that the options ask for. more: what else decides what it computes.

        Raises UsageError for a URI with options in it.
        """
        if "://" in args.storage_path and "?" in args.storage_path:
            raise UsageError("--storage-path takes no options after a ?; AWS_ENDPOINT_URL names your own S3 store")
        folder = f"{path_or_uri(args.storage_path)}/{args.run_name or runs.new_name()}"
        run = cls(folder, runs.options_of(args) | more)
        run.local_mode = args.num_workers == 0
        return run

    @property
    def name(self) -> str:
        """The run's name, for Ray's RunConfig."""
        return self.folder.rpartition("/")[2]

    @property
    def storage_path(self) -> str:
        """The path or URI that holds the run's folder, for Ray's RunConfig."""
        return self.folder.rpartition("/")[0]

    @property
    def on_this_disk(self) -> bool:
        """Whether the checkpoints are files that this node sees."""
        return isinstance(file_system(self.folder)[0], pyarrow.fs.LocalFileSystem)

    def list_newest_first(self) -> list[str]:
        """Paths of its checkpoint folders, readable or not, newest first."""
        files, path = file_system(self.folder)
        found = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        return sorted((each.path for each in found if each.base_name.startswith("checkpoint-")), reverse=True)

    def list_foreign(self) -> list[str]:
        files, path = file_system(self.folder)
        found = [each.path for each in files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))]
        return [each for each in found if each.endswith(".pt") or each.rpartition("/")[2].startswith(runs.SEARCH)]

    def load_newest(self, worker: Worker) -> tuple[str | None, dict | None, list[str]]:
        """As `Run.load_newest`, of the checkpoints that `report` has made. worker: logs how far a long check is."""

        def load(path: str) -> dict:
            state = self.load(path)
            self.verify(path, state.get("files", {}), log=worker.log)
            return state

        return checkpoint.first_readable(self.list_newest_first(), load)

    def load(self, path: str) -> dict:
        """The state in a checkpoint's folder, without the slices beside it. Raises ValueError if it is damaged."""
        if self.on_this_disk:
            return checkpoint.load(Path(path) / STATE_FILE)
        with tempfile.TemporaryDirectory() as local:  # from a cloud only this small file is fetched
            copy = Path(local) / STATE_FILE
            pyarrow.fs.copy_files(f"{path}/{STATE_FILE}", str(copy), source_filesystem=file_system(self.folder)[0])
            return checkpoint.load(copy)

    def verify(self, path: str, written: dict[str, list[int]], log: Callable[[str], None] = lambda line: None) -> None:
        """Raises ValueError if a file of a checkpoint's folder is not as it was `written` (`sharded.file_checksums`).

        In a cloud only sizes are compared: the store itself keeps checksums of uploads. log: see `file_checksums`.
        """
        if self.on_this_disk:
            sharded.verify(written, sharded.file_checksums(path, written, log))
        else:
            found = file_system(self.folder)[0].get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
            sizes = {each.path.removeprefix(f"{path}/"): [each.size] for each in found}
            sharded.verify({name: entry[:1] for name, entry in written.items()}, sizes)

    def make_folder(self) -> None:
        """Make the folder where it is missing, and remove Ray's list of its checkpoints if it is wrong. Raises OSError.

        Ray refuses to continue where its list is damaged or names a checkpoint that is gone. The checkpoints themselves
        hold all that a run needs, so such a list is deleted, and Ray starts a new one.
        """
        files, path = file_system(self.folder)
        files.create_dir(path, recursive=True)
        self.write_file(".writable", "")
        self.delete_file(".writable")
        snapshot = f"{path}/{SNAPSHOT_FILE}"
        if files.get_file_info(snapshot).is_file:
            try:
                listed = json.loads(files.open_input_stream(snapshot).read())["checkpoint_results"]
                gone = {f"{path}/{each['checkpoint_dir_name']}" for each in listed} - set(self.list_newest_first())
            except (ValueError, KeyError, TypeError):
                gone = {"unreadable"}
            if gone:
                files.delete_file(snapshot)

    def write_file(self, name: str, text: str) -> None:
        files, path = file_system(self.folder)
        with files.open_output_stream(f"{path}/{name}") as stream:
            stream.write(text.encode())

    def read_file(self, name: str) -> tuple[str, float] | None:
        files, path = file_system(self.folder)
        info = files.get_file_info(f"{path}/{name}")
        try:
            return (files.open_input_stream(info.path).read().decode(), info.mtime_ns / 1e9) if info.is_file else None
        except FileNotFoundError:  # deleted a moment ago
            return None

    def delete_file(self, name: str) -> None:
        files, path = file_system(self.folder)
        with contextlib.suppress(FileNotFoundError):
            files.delete_file(f"{path}/{name}")

    def open_or_resume(self, args: argparse.Namespace, worker: Worker) -> dict | None:
        """As `Run.open_or_resume`, for the driver, before it starts a worker.

        Raises ValueError for --resume in local mode.
        """
        if not self.local_mode:
            return super().open_or_resume(args, worker)
        if args.resume:
            raise ValueError("--resume: Ray's local mode (--num-workers 0) stores no checkpoints")
        return runs.check_metrics_out(args)

    def probe(self) -> str | None:
        """Why this node cannot use the run's folder; None if it can."""
        try:
            files, path = file_system(self.folder)
            missing = files.get_file_info(path).type == pyarrow.fs.FileType.NotFound
            return "the folder that the driver has made is not there" if missing else None
        except (OSError, ValueError) as error:
            return str(error).splitlines()[0]

    @property
    def patience_s(self) -> int:
        """How many seconds a worker waits for files: longer if they were there before, when something was saved."""
        return 0 if self.local_mode else 60 if self.has_saved else 10

    @property
    def has_saved(self) -> bool:
        """Whether this run has saved a checkpoint, as a worker sees it when it starts."""
        return self.resumed_from is not None or ray.train.get_checkpoint() is not None

    def check_folder(self) -> None:
        """Raises OSError on a node that does not see the run's folder, which the driver has made.

        The folder of a node that has just started may be mounted a moment later: it waits for `patience_s`.
        """

        def look() -> None:
            if not self.local_mode and "://" not in self.folder and not os.path.isdir(self.folder):
                raise OSError(
                    f"{self.folder} is not seen from node {socket.gethostname()}: "
                    "--storage-path must be a folder that all nodes share, or a URI such as s3://BUCKET/runs"
                )

        retry(look, self.patience_s)

    def load_on_all_ranks(self, worker: Worker) -> tuple[str | None, dict | None]:
        """(path, state) of the newest readable checkpoint, on every rank; (None, None) before the first. Collective.

        The ranks share the work of checking files. Rank 0 reports what was skipped. Raises OSError if none can be read
        although the driver has read one or Ray has stored one: Ray then starts the workers again, as often as
        `max_failures` says. Starting from scratch would push out checkpoints that are good once the storage is back. (A
        worker that dies in the first upload leaves an unreadable checkpoint, and nothing is lost.)
        """
        if self.local_mode:
            return None, None
        skipped = []
        for path in from_rank_zero(self.list_newest_first() if worker.rank == 0 else None):
            try:
                with fail_together():
                    state = self.load(path) if worker.rank == 0 else None
                files = from_rank_zero(state and state.get("files", {}))
                with fail_together():
                    if path != self.resumed_from:  # which the driver has checked
                        self.verify(path, dict(list(files.items())[worker.rank :: worker.world_size]))
                return from_rank_zero((path, state))
            except UsageError as error:
                skipped.append(f"{Path(path).name} ({error})")
                if worker.rank == 0:
                    worker.log(f"skipped {skipped[-1]}")
        if skipped and self.has_saved:
            raise OSError(f"no readable checkpoint in {self.folder}: {'; '.join(skipped)}")
        return None, None

    def report(self, state: dict, metrics: dict, worker: Worker, write: Callable[[str], None] | None = None) -> None:
        """As `report` below, if this run may still be written to. Collective.

        Raises UsageError, on every rank, if weights are not finite or a different process has taken over the run.
        """
        with fail_together():
            if worker.rank == 0:
                checkpoint.check_finite(state.get("model", {}))
                if not self.local_mode:
                    lease.check(self)
        report(state, metrics, worker, write)

    @contextlib.contextmanager
    def fetch_on_all_ranks(self, worker: Worker) -> Iterator[tuple[str | None, dict | None]]:
        """As `load_on_all_ranks`, but the path is a folder that this node can read.

        If the storage is not a folder that the node sees, the checkpoint is copied to the node, once.
        """
        path, state = self.load_on_all_ranks(worker)
        if path is None:
            yield None, None
        else:
            with ray.train.Checkpoint(path, file_system(self.folder)[0]).as_directory() as local:
                wait_for_all()  # another node may still be copying
                yield local, state


def temporary_prefix() -> str:
    """How the path of a temporary folder begins; a process number and _ follow.

    Containers may share /tmp and a host name. Their processes have numbers of their own, as the namespace tells.
    """
    name = f"ray-train-checkpoint-{socket.gethostname()}-{pid_namespace()}_"
    return os.path.join(tempfile.gettempdir(), name)


def new_folder() -> tempfile.TemporaryDirectory:
    """A folder on this node for one checkpoint, on its way to the storage.

    Ray kills the workers of a run that lost one. What such a process was writing is deleted here by the next one that
    saves, or some failures later the disk would be full.
    """
    prefix = temporary_prefix()
    for folder in glob.glob(f"{glob.escape(prefix)}*_*"):
        if not psutil.pid_exists(int(folder.removeprefix(prefix).partition("_")[0])):
            shutil.rmtree(folder, ignore_errors=True)  # another worker may be deleting it too
    return tempfile.TemporaryDirectory(prefix=f"{os.path.basename(prefix)}{os.getpid()}_")


def report(state: dict, metrics: dict, worker: Worker, write: Callable[[str], None] | None = None) -> None:
    """Rank 0 writes `state`, and Ray copies it to the run's storage, together with `metrics`. Collective.

    write: called on every rank with a folder, for its own part of a sharded checkpoint. It raises, on every rank, if
    weights are not finite: `state` then records that they were, since `load` reads only the small file.
    """
    with new_folder() as folder:
        if write is not None:
            write(folder)
            checksums = sharded.file_checksums(folder)
            wait_for_all()
            parts = gather_objects(checksums)
            files = {name: entry for part in parts for name, entry in part.items()}
            state = {**state, "files": files, "finite": True}
        if worker.rank == 0:
            checkpoint.save_safely(state, Path(folder) / STATE_FILE)
        # A resumed run may come to the same step again: the name must still be new.
        name = f"checkpoint-{state['progress']['step']:08d}-{uuid.uuid4().hex[:8]}"
        reported = ray.train.Checkpoint.from_directory(folder) if worker.rank == 0 or write is not None else None
        ray.train.report(metrics, checkpoint=reported, checkpoint_dir_name=name)


class MetricsFile(ray.train.UserCallback):
    """Writes --metrics-out while a run is training. Ray's controller calls it, on the driver's machine."""

    def __init__(self, path: str | None, lines: list[dict]) -> None:
        # To a device the driver writes all lines at the end, once.
        self.path = os.path.abspath(path) if path and not Path(path).is_char_device() else None
        self.lines = lines

    def after_report(self, run_context: object, metrics: list[dict], checkpoint: ray.train.Checkpoint | None) -> None:
        """Add the line of the epoch that rank 0 reports, or replace an earlier one.

        Epoch 0 has none: what is saved before the first step, or inside an epoch.
        """
        line = metrics[0]
        if line["epoch"] > 0 and self.path:
            if len(self.lines) < line["epoch"] - 1:  # an earlier controller has written them
                self.lines = [json.loads(text) for text in Path(self.path).read_text().splitlines()]
            self.lines = [*self.lines[: line["epoch"] - 1], line]
            write_metrics(self.path, self.lines)
