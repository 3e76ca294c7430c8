"""A run's checkpoints in Ray's storage: a folder that all nodes see, or a cloud's."""

import argparse
import contextlib
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

from shared import checkpoint, runs
from shared.distributed import UsageError, Worker, from_rank_zero, gather_objects, wait_for_all

STATE_FILE = "state.pt"
SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"  # Ray's own list of a run's checkpoints


def file_system(folder: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """What reads and writes a path or a URI, and the path in it. Raises ValueError for a URI that it cannot use."""
    try:
        return pyarrow.fs.FileSystem.from_uri(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot use --storage-path: {error}") from error


class RayRun(runs.Run):
    """A run whose checkpoints are folders that Ray Train has stored, under a path or a URI."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> "RayRun":
        """The run that the options ask for. Raises UsageError for a URI with options in it."""
        if "://" not in args.storage_path:
            return cls(str(runs.Run.of(args).folder))
        if "?" in args.storage_path:
            raise UsageError(
                "--storage-path takes no options after a ?; AWS_ENDPOINT_URL names an S3 store of one's own"
            )
        return cls(f"{args.storage_path.rstrip('/')}/{args.run_name or runs.new_name()}")

    @property
    def place(self) -> tuple[str, str]:
        """(storage path, name), as Ray's RunConfig wants them."""
        storage_path, _, name = self.folder.rpartition("/")
        return storage_path, name

    def list_newest_first(self) -> list[str]:
        """Paths of its checkpoint folders, readable or not, newest first."""
        files, path = file_system(self.folder)
        found = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        return sorted((each.path for each in found if each.base_name.startswith("checkpoint-")), reverse=True)

    def load_newest(self, worker: Worker) -> tuple[str | None, dict | None, list[str]]:
        """As `Run.load_newest`, of the checkpoints that `report` has made."""

        def load(path: str) -> dict:
            state = self.load(path)
            self.verify(path, state.get("files", {}), log=worker.log)
            return state

        return checkpoint.first_readable(self.list_newest_first(), load)

    def load(self, path: str) -> dict:
        """The state in a checkpoint's folder, without the slices beside it. Raises ValueError where it is damaged."""
        files, _ = file_system(self.folder)
        if isinstance(files, pyarrow.fs.LocalFileSystem):
            return checkpoint.load(Path(path) / STATE_FILE)
        with tempfile.TemporaryDirectory() as local:  # from a cloud only this small file is fetched
            copy = Path(local) / STATE_FILE
            pyarrow.fs.copy_files(f"{path}/{STATE_FILE}", str(copy), source_filesystem=files)
            return checkpoint.load(copy)

    def verify(self, path: str, written: dict[str, list[int]], log: Callable[[str], None] = lambda line: None) -> None:
        """Raises ValueError where a file of a checkpoint's folder is not as it was `written` (`checkpoint.check_sums`).

        In a cloud sizes are compared: what was uploaded the store itself has check sums of. log: see `check_sums`.
        """
        files, _ = file_system(self.folder)
        if isinstance(files, pyarrow.fs.LocalFileSystem):
            checkpoint.verify(written, checkpoint.check_sums(path, written, log))
        else:
            found = files.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
            sizes = {each.path.removeprefix(f"{path}/"): [each.size] for each in found}
            checkpoint.verify({name: entry[:1] for name, entry in written.items()}, sizes)

    def make_folder(self) -> None:
        """Make the folder where it is missing, and see to Ray's list of its checkpoints. Raises OSError.

        Ray refuses to go on where its list is damaged or names a checkpoint that is gone. The checkpoints themselves
        hold all that a run needs, so such a list is deleted, and Ray begins a new one.
        """
        files, path = file_system(self.folder)
        files.create_dir(path, recursive=True)
        files.open_output_stream(f"{path}/.writable").close()
        files.delete_file(f"{path}/.writable")
        snapshot = f"{path}/{SNAPSHOT_FILE}"
        if files.get_file_info(snapshot).is_file:
            try:
                listed = json.loads(files.open_input_stream(snapshot).read())["checkpoint_results"]
                gone = {f"{path}/{each['checkpoint_dir_name']}" for each in listed} - set(self.list_newest_first())
            except (ValueError, KeyError, TypeError):
                gone = {"unreadable"}
            if gone:
                files.delete_file(snapshot)


def claim(args: argparse.Namespace, driver: Worker) -> tuple[RayRun, list[dict]]:
    """The run that the options ask for, and its metrics so far. For the driver, before it starts a worker.

    Sets `args.folder`, where the workers find the run, and `args.checked`, a checkpoint that they need not check again.
    Raises ValueError as `Run.claim`, and for --resume in Ray's local mode.
    """
    run, state = RayRun.of(args), None
    if args.num_workers > 0:
        state = run.claim(args, driver)
    elif args.resume:
        raise ValueError("--resume: Ray's local mode (--num-workers 0) stores no checkpoints")
    runs.check_metrics_out(args)
    args.folder, args.checked = run.folder, run.resumed_from
    return run, state["progress"]["metrics"] if state else []


def newest_state(args: argparse.Namespace, worker: Worker) -> tuple[str | None, dict | None]:
    """Path and state of the newest readable checkpoint, on every rank; (None, None) before the first. Collective.

    The ranks share out the files to check. Rank 0 says what was skipped. Raises OSError where none can be read, though
    the driver has read one or Ray has stored one: Ray then starts the workers again, as often as `max_failures` says.
    To begin anew would push out checkpoints that are good when the storage is back. (A worker that dies in the first
    upload of all leaves an unreadable one, and no loss.)
    """
    if args.num_workers == 0:  # local mode stores none
        return None, None
    run, skipped = RayRun(args.folder), []
    for path in from_rank_zero(run.list_newest_first() if worker.rank == 0 else None):
        state, problem = checkpoint.tried(run.load, path) if worker.rank == 0 else (None, None)
        wait_for_all()
        problem, written = from_rank_zero((problem, state and state.get("files", {})))
        if problem is None and path != args.checked:
            share = dict(list(written.items())[worker.rank :: worker.world_size])
            _, problem = checkpoint.tried(run.verify, path, share)
            wait_for_all()
            problem = next((each for each in gather_objects(problem) if each), None)
        if problem is None:
            return from_rank_zero((path, state))
        skipped.append(problem)
        if worker.rank == 0:
            worker.log(f"skipped {problem}")
    if skipped and (args.resume or ray.train.get_checkpoint() is not None):
        raise OSError(f"no readable checkpoint in {args.folder}: {'; '.join(skipped)}")
    return None, None


@contextlib.contextmanager
def newest_checkpoint(args: argparse.Namespace, worker: Worker) -> Iterator[tuple[str | None, dict | None]]:
    """As `newest_state`, with the path of a local folder: from storage that this node does not see it is copied there,
    once a node.
    """
    path, state = newest_state(args, worker)
    if path is None:
        yield None, None
    else:
        with ray.train.Checkpoint(path, file_system(args.folder)[0]).as_directory() as local:
            wait_for_all()  # another node may still be copying
            yield local, state


def check_folder(args: argparse.Namespace) -> None:
    """Raises ValueError on a node that does not see the run's folder, which the driver has made."""
    if args.num_workers > 0 and "://" not in args.folder and not os.path.isdir(args.folder):
        raise ValueError(
            f"{args.folder} is not seen from node {socket.gethostname()}: "
            "--storage-path must be a folder that all nodes share, or a URI such as s3://BUCKET/runs"
        )


def new_folder() -> tempfile.TemporaryDirectory:
    """A folder on this node for one checkpoint, on its way to the storage.

    Ray kills the workers of a run that lost one: what such a process was writing is deleted here by the next one that
    saves, or some failures later the disk would be full.
    """
    ours = f"ray-train-checkpoint-{socket.gethostname()}_"
    for folder in Path(tempfile.gettempdir()).glob(f"{ours}*_*"):
        if not psutil.pid_exists(int(folder.name.removeprefix(ours).partition("_")[0])):
            shutil.rmtree(folder, ignore_errors=True)  # another worker may be at it too
    return tempfile.TemporaryDirectory(prefix=f"{ours}{os.getpid()}_")


def report(state: dict, metrics: dict, worker: Worker, write: Callable[[str], None] | None = None) -> None:
    """Rank 0 writes `state`, and Ray copies it to the run's storage with `metrics` beside it. Collective.

    write: called on every rank with a folder, for its own part of a sharded checkpoint.
    """
    with new_folder() as folder:
        if write is not None:
            write(folder)
            mine = checkpoint.check_sums(folder)
            wait_for_all()
            parts = gather_objects(mine)
            state = {**state, "files": {name: entry for part in parts for name, entry in part.items()}}
        if worker.rank == 0:
            checkpoint.save_atomically(state, Path(folder) / STATE_FILE)
        # A resumed run may come to the same step again: the name must still be new.
        name = f"checkpoint-{state['progress']['step']:08d}-{uuid.uuid4().hex[:8]}"
        reported = ray.train.Checkpoint.from_directory(folder) if worker.rank == 0 or write is not None else None
        ray.train.report(metrics, checkpoint=reported, checkpoint_dir_name=name)


class MetricsFile(ray.train.UserCallback):
    """Writes --metrics-out while a run goes on. Ray's controller calls it, on the driver's machine."""

    def __init__(self, path: str | None, lines: list[dict]) -> None:
        self.path = path and os.path.abspath(path)
        self.lines = lines

    def after_report(self, run_context: object, metrics: list[dict], checkpoint: ray.train.Checkpoint | None) -> None:
        """Add the line of the epoch that rank 0 reports, or put it in the place of an earlier one.

        Epoch 0 has none: what is saved before the first step, or inside an epoch.
        """
        line = metrics[0]
        if line["epoch"] > 0 and self.path:
            if len(self.lines) < line["epoch"] - 1:  # an earlier controller has written them
                self.lines = [json.loads(text) for text in Path(self.path).read_text().splitlines()]
            self.lines = [*self.lines[: line["epoch"] - 1], line]
            runs.write_metrics(self.path, self.lines)
