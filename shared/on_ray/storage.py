"""Keep a run's checkpoints in Ray's storage: a folder that all nodes see, or a cloud's object store."""

import contextlib
import glob
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow.fs
import ray.train

from shared import checkpoint, sharded
from shared.distributed import Worker, fail_together, from_rank_zero, gather_objects, retry, wait_for_all
from shared.errors import UsageError
from shared.paths import path_or_uri
from shared.running import lease, runs
from shared.running.lease import pid_namespace
from shared.running.progress import write_metrics

STATE_FILE = "state.pt"
SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"  # Ray's own list of a run's checkpoints


def file_system(folder: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of a path or a URI, and the path in it.

    Raises ValueError for a URI that cannot be used.
    """
    try:
        return pyarrow.fs.FileSystem.from_uri(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot use --storage-path: {error}") from error


class RayRun(runs.Run):
    """A run whose checkpoints are folders that Ray Train stores under a path or a URI.

    The driver opens the run and sends it to the workers.
    """

    local_mode = False  # Ray's local mode stores no checkpoints

    @classmethod
    def named(
        cls, storage_path: str, name: str | None, options: dict | None = None, *, local_mode: bool = False,
        may_differ: Sequence[str] = (),
    ) -> "RayRun":  # fmt: skip
        """Return the run of this name under a path or a URI, or of a new name.

        options: see `Run`. may_differ: the names of further options that a resumed run may change. Raises UsageError
        for a URI with options in it.
        """
        if "://" in storage_path and "?" in storage_path:
            raise UsageError("--storage-path takes no options after a ?; AWS_ENDPOINT_URL names your own S3 store")
        folder = f"{path_or_uri(storage_path)}/{name or runs.new_name()}"
        run = cls(folder, options, (*runs.MAY_DIFFER, *may_differ))
        run.local_mode = local_mode
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
        """Return the paths of its checkpoint folders, readable or not, newest first."""
        files, path = file_system(self.folder)
        found = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        return sorted((each.path for each in found if runs.CHECKPOINT.fullmatch(each.base_name)), reverse=True)

    def list_foreign(self) -> list[str]:
        files, path = file_system(self.folder)
        found = [each.path for each in files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))]
        return [each for each in found if each.endswith(".pt") or each.rpartition("/")[2].startswith(runs.SEARCH)]

    def load_newest(self, worker: Worker) -> tuple[str | None, dict | None, list[str]]:
        """Return what `Run.load_newest` returns, for the checkpoints that `report` has made.

        worker: logs the progress of a long check.
        """

        def load(path: str) -> dict:
            state = self.load(path)
            self.verify(path, state.get("files", {}), log=worker.log)
            return state

        return checkpoint.first_readable(self.list_newest_first(), load)

    def load(self, path: str) -> dict:
        """Return the state in a checkpoint's folder, without the slices next to it.

        Raises ValueError if it is damaged.
        """
        if self.on_this_disk:
            return checkpoint.load(Path(path) / STATE_FILE)
        with tempfile.TemporaryDirectory() as local:  # only this small file is fetched from a cloud
            copy = Path(local) / STATE_FILE
            pyarrow.fs.copy_files(f"{path}/{STATE_FILE}", str(copy), source_filesystem=file_system(self.folder)[0])
            return checkpoint.load(copy)

    def verify(self, path: str, written: dict[str, list[int]], log: Callable[[str], None] = lambda line: None) -> None:
        """Raise ValueError if a file of a checkpoint's folder is not as it was `written`.

        In a cloud only sizes are compared, because the store itself verifies uploads.
        written, log: see `sharded.file_checksums`.
        """
        if self.on_this_disk:
            sharded.verify(written, sharded.file_checksums(path, written, log))
        else:
            found = file_system(self.folder)[0].get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
            sizes = {each.path.removeprefix(f"{path}/"): [each.size] for each in found}
            sharded.verify({name: entry[:1] for name, entry in written.items()}, sizes)

    def make_folder(self) -> None:
        """Make the folder if it is missing, and delete Ray's list of checkpoints if it is wrong.

        Ray refuses to continue if its list is damaged or names a checkpoint that is gone. The checkpoints themselves
        hold everything that a run needs, so the list can be deleted, and Ray starts a new one. Raises OSError if the
        folder cannot be written to.
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
        """Write a small file to the run's folder, on whichever storage it is."""
        files, path = file_system(self.folder)
        with files.open_output_stream(f"{path}/{name}") as stream:
            stream.write(text.encode())

    def read_file(self, name: str) -> tuple[str, float] | None:
        """Return (text, modification time in seconds by the storage's clock) of such a file, or None."""
        files, path = file_system(self.folder)
        info = files.get_file_info(f"{path}/{name}")
        try:
            return (files.open_input_stream(info.path).read().decode(), info.mtime_ns / 1e9) if info.is_file else None
        except FileNotFoundError:  # it was deleted a moment ago
            return None

    def delete_file(self, name: str) -> None:
        files, path = file_system(self.folder)
        with contextlib.suppress(FileNotFoundError):
            files.delete_file(f"{path}/{name}")

    def open_or_resume(self, resume: bool, worker: Worker) -> dict | None:
        """Do what `Run.open_or_resume` does, on the driver, before it starts a worker. In local mode do nothing."""
        return None if self.local_mode else super().open_or_resume(resume, worker)

    def probe(self) -> str | None:
        """Return why this node cannot use the run's folder, or None if it can."""
        try:
            files, path = file_system(self.folder)
            missing = files.get_file_info(path).type == pyarrow.fs.FileType.NotFound
            return "it does not see the folder that the driver has made" if missing else None
        except (OSError, ValueError) as error:
            return str(error).splitlines()[0]

    @property
    def patience_s(self) -> int:
        """The seconds that a worker waits for missing files: longer if something was saved before."""
        return 0 if self.local_mode else 60 if self.has_saved else 10

    @property
    def has_saved(self) -> bool:
        """Whether this run has saved a checkpoint, as a worker sees it when it starts."""
        return self.resumed_from is not None or ray.train.get_checkpoint() is not None

    def check_folder(self) -> None:
        """Raise OSError on a node that does not see the run's folder, which the driver has made.

        A new node may mount the folder a moment late, so this waits for `patience_s` seconds.
        """

        def look() -> None:
            if not self.local_mode and "://" not in self.folder and not os.path.isdir(self.folder):
                raise OSError(
                    f"node {socket.gethostname()} does not see {self.folder}: "
                    "--storage-path must be a folder that all nodes share, or a URI such as s3://BUCKET/runs"
                )

        retry(look, self.patience_s)

    def load_on_all_ranks(self, worker: Worker) -> tuple[str | None, dict | None]:
        """Return (path, state) of the newest readable checkpoint, on every rank. Collective.

        Before the first checkpoint it returns (None, None). The ranks share the work of checking files, and rank 0
        reports what was skipped.

        Raises OSError if no checkpoint is readable although the driver has read one or Ray has stored one. Ray then
        starts the workers again, as often as `max_failures` says. Starting from scratch would push out checkpoints that
        may be good once the storage is back. A worker that dies in the first upload also leaves an unreadable
        checkpoint, but then nothing is lost.
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
                    if path != self.resumed_from:  # the driver has checked that one
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
        """Report as the function `report` does, if this run may still be written to. Collective.

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
        """Yield what `load_on_all_ranks` returns, with the path of a folder that this node can read.

        If the node does not see the storage as a folder, the checkpoint is copied to the node, once. Collective.
        """
        path, state = self.load_on_all_ranks(worker)
        if path is None:
            yield None, None
        else:
            with ray.train.Checkpoint(path, file_system(self.folder)[0]).as_directory() as local:
                wait_for_all()  # another node may still be copying
                yield local, state


def temporary_prefix() -> str:
    """Return the beginning of a temporary folder's path; a process ID and _ follow.

    Containers may share /tmp and a host name, but number their processes independently. So the prefix names the PID
    namespace.
    """
    name = f"ray-train-checkpoint-{socket.gethostname()}-{pid_namespace()}_"
    return os.path.join(tempfile.gettempdir(), name)


def new_folder() -> tempfile.TemporaryDirectory:
    """Return a temporary folder on this node for one checkpoint, on its way to the storage.

    When a worker dies, Ray kills the others too, and they may leave half-written folders. The next process that saves
    deletes these here. Otherwise a few failures would fill the disk.
    """
    prefix = temporary_prefix()
    for folder in glob.glob(f"{glob.escape(prefix)}*_*"):
        if not psutil.pid_exists(int(folder.removeprefix(prefix).partition("_")[0])):
            shutil.rmtree(folder, ignore_errors=True)  # another worker may be deleting it too
    return tempfile.TemporaryDirectory(prefix=f"{os.path.basename(prefix)}{os.getpid()}_")


def report(state: dict, metrics: dict, worker: Worker, write: Callable[[str], None] | None = None) -> None:
    """Write `state` on rank 0, and let Ray copy it to the run's storage, together with `metrics`. Collective.

    write: called on every rank with a folder, to write its own part of a sharded checkpoint. It raises, on every rank,
    if weights are not finite. So `state` records that they were finite, because `load` reads only the small file.
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
        # A resumed run may reach the same step again, and the name must still be new.
        name = f"checkpoint-{state['progress']['step']:08d}-{uuid.uuid4().hex[:8]}"
        reported = ray.train.Checkpoint.from_directory(folder) if worker.rank == 0 or write is not None else None
        ray.train.report(metrics, checkpoint=reported, checkpoint_dir_name=name)


class MetricsFile(ray.train.UserCallback):
    """A callback that writes --metrics-out while a run is training.

    Ray's controller calls it, on the driver's machine.
    """

    def __init__(self, path: str | None, lines: list[dict]) -> None:
        # A device gets all lines once, at the end, from the driver.
        self.path = os.path.abspath(path) if path and not Path(path).is_char_device() else None
        self.lines = lines

    def after_report(self, run_context: object, metrics: list[dict], checkpoint: ray.train.Checkpoint | None) -> None:
        """Add the line of the epoch that rank 0 reports, or replace an earlier one.

        A report for epoch 0 has no line: it is a save before the first step, or inside an epoch.
        """
        line = metrics[0]
        if line["epoch"] > 0 and self.path:
            if len(self.lines) < line["epoch"] - 1:  # an earlier controller has written the lines
                self.lines = [json.loads(text) for text in Path(self.path).read_text().splitlines()]
            self.lines = [*self.lines[: line["epoch"] - 1], line]
            write_metrics(self.path, self.lines)
