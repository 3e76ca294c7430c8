"""Ray without surprises: its options, starting or joining it, and a run's checkpoints in Ray's storage."""

import argparse
import contextlib
import json
import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import psutil
import pyarrow.fs
import ray
import ray.train
import ray.train.torch
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.placement_group import placement_group, remove_placement_group

import shared
from shared import checkpoint, cli
from shared.distributed import UsageError, Worker, from_rank_zero, gather_objects
from shared.models import GPT_PRESETS

SHARED_FOLDER = Path("/mnt/cluster_storage")  # on every node of an Anyscale cluster
STATE_FILE = "state.pt"
SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"  # Ray's own list of a run's checkpoints
PATIENCE_S = 45  # for a cluster that may grow


class Driver(Worker):
    """The process that starts a Ray job, where it logs: it has no rank."""

    def log(self, message: str) -> None:
        """Print one line that says where it is from."""
        print(f"[driver] {message}", flush=True)


def num_workers(text: str) -> int:
    """An option's value as a number of workers, 0 among them."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def training_parser(description: str, **choices: Collection[str]) -> cli.Parser:
    """The options of every training script, and those of the scripts on Ray. choices: see `cli.training_parser`."""
    parser = cli.training_parser(description, **choices)
    parser.set_defaults(storage_path=str(SHARED_FOLDER / "runs") if SHARED_FOLDER.is_dir() else "runs")
    parser.add_argument("--num-workers", type=num_workers, default=2,
        help="training processes; 0: Ray's local mode, in this process, to debug (default: %(default)s)")  # fmt: skip
    parser.add_argument("--use-gpu", action=argparse.BooleanOptionalAction, default=None,
        help="one GPU a worker (default: if there are any; say so where a cluster has yet to start them)")  # fmt: skip
    return parser


def gpt_parser(description: str, precisions: Mapping[str, str]) -> cli.Parser:
    """The options of the scripts on Ray that train a GPT. precisions: see `cli.training_parser`."""
    parser = training_parser(description, models=("gpt",), datasets=("text",), precisions=precisions)
    parser.add_argument("--preset", choices=tuple(GPT_PRESETS), default="nano",
        help="size of the GPT; nano has 1 M parameters (default: %(default)s)")  # fmt: skip
    parser.add_argument("--text-file", metavar="FILE", type=os.path.abspath,
        help="train on 1,280 windows of this text, which every node has at this path, the same ones each epoch "
        "(default: Python's standard library)")  # fmt: skip
    parser.add_argument("--activation-checkpointing", action="store_true",
        help="keep only the blocks' inputs, and compute the rest again in the backward pass")  # fmt: skip
    return parser


def world_size(args: argparse.Namespace) -> int:
    """How many processes will train: the workers, or in local mode this one and its siblings under torchrun."""
    return args.num_workers or int(os.environ.get("WORLD_SIZE", 1))


def start(args: argparse.Namespace, spare_cpus: int = 0) -> None:
    """Join the cluster of RAY_ADDRESS or of an Anyscale workspace, else start a Ray of our own on this machine.

    Prints one line on what it did, and sets `args.use_gpu` where it is None. spare_cpus: CPUs needed beside one a
    worker, as by Ray Data's tasks; without them local mode needs no Ray, and starts none. Raises UsageError where the
    address does not answer, or where there are fewer CPUs or GPUs than `args.num_workers` need and no more to come.
    """
    if args.num_workers == 0:
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        if args.use_gpu is False:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if spare_cpus == 0:
            return
    # Left to itself, ray.init looks for a running Ray by a file that a crash leaves behind, and waits for the dead.
    # ANYSCALE_CLUSTER_ID is set on the nodes of such a cluster; other ANYSCALE_ variables also on a user's laptop.
    address = os.environ.get("RAY_ADDRESS") or ("auto" if "ANYSCALE_CLUSTER_ID" in os.environ else "local")
    cpus, here = args.num_workers + spare_cpus, os.cpu_count() or 1
    settings = quiet_settings(own=address == "local")
    own_address = {}
    if address == "local":
        # Ray's helpers look for "the" Ray of a machine, and complain where two run: tell them which one is theirs.
        with socket.create_server(("", 0)) as free:
            port = str(free.getsockname()[1])
        own_address = {"RAY_GCS_SERVER_PORT": port, "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{port}"}
        # CPUs in Ray's books: four workers, and the tasks beside them, may be tried on two cores.
        options = {"num_cpus": max(here, min(args.num_workers, max(4, here)) + spare_cpus)}
    else:
        # The nodes have the packages, and no copy of `shared`.
        settings |= {} if address == "auto" else {"RAY_ADDRESS": address}
        options = {"runtime_env": {"py_modules": [str(Path(shared.__file__).parent)], "env_vars": settings}}
    driver = Driver()
    check_answers(address)
    try:
        os.environ.update(own_address)
        level = "ERROR" if own_address else "WARNING"  # on a busy laptop Ray warns of its own delays
        context = ray.init(address, logging_config=ray.LoggingConfig(log_level=level), **options)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        hint = "" if address == "local" else " (start this script on a node of the cluster, the head for example)"
        raise UsageError(f"cannot join Ray at {address}: {str(error).splitlines()[0]}{hint}") from error
    finally:
        for name in own_address:
            del os.environ[name]
    has = ray.cluster_resources()
    if args.use_gpu is None:
        args.use_gpu = has.get("GPU", 0) > 0
    what = "started Ray on this machine" if address == "local" else f"joined the Ray cluster at {address}"
    page = f"; dashboard: http://{context.dashboard_url}" if context.dashboard_url else ""
    driver.log(f"{what}: {in_words(has)}{page}")

    needs = {"CPU": cpus, "GPU": args.num_workers if args.use_gpu else 0}
    if not enough(has, needs) and (address == "local" or not grows(args, spare_cpus, driver)):
        raise UsageError(
            f"{args.num_workers} workers need {in_words(needs)}, and there are {in_words(ray.cluster_resources())}: "
            f"fewer --num-workers{', --no-use-gpu' if args.use_gpu else ''} or RAY_ADDRESS of a larger cluster will do"
        )
    if address != "local" and enough(has, needs) and not enough(ray.available_resources(), needs):
        driver.log(f"others are using the cluster; waiting for {in_words(needs)}")


def stop() -> None:
    """Leave the cluster; end a Ray of our own, with every process that it has started."""
    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    psutil.wait_procs(started, timeout=2)
    kill(started)  # Ray's agents may outlive it by minutes


def stop_at_once() -> None:
    """As `stop`, in a process that is about to end, and from any thread of it."""
    # Not by ray.shutdown: Ray's own handler of Ctrl-C would start a new Ray, to tell its controller.
    kill(psutil.Process().children(recursive=True))


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each of them that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def quiet_settings(own: bool) -> dict[str, str]:
    """Environment variables for Ray's processes: without them it prints much that one has to ignore."""
    settings = {
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # prints every line of a worker twice otherwise
        # These two would set a level of their own, and print every report of every worker.
        "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
        "RAY_DATA_LOG_LEVEL": "ERROR",  # prints five lines an epoch and data set
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leaves CUDA_VISIBLE_DEVICES alone where no GPU is asked for
    }
    if own:
        settings["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # watches for machines that a cloud takes back
        settings["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # a cluster's controller need not look so often
    # In this process: Ray Data has read its variable by now; the other one says at every start that tokens are on.
    for name in ("ray.data", "ray._private.authentication.authentication_token_setup"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return {name: os.environ.setdefault(name, value) for name, value in settings.items()}


def check_answers(address: str) -> None:
    """Raises UsageError where nobody listens at HOST:PORT: ray.init would try for ever."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"no Ray answers at RAY_ADDRESS={address} ({reason}): unset it to start one here"
            ) from error


def enough(has: dict[str, float], needs: dict[str, float]) -> bool:
    """Whether there is at least as much of everything as is needed."""
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def in_words(resources: dict[str, float]) -> str:
    """CPUs and GPUs, as people say them."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:.0f} CPU{'s' * (cpus != 1)} and {f'{gpus:.0f} GPU' if gpus else 'no GPU'}{'s' * (gpus > 1)}"


def grows(args: argparse.Namespace, spare_cpus: int, driver: Worker) -> bool:
    """Ask the cluster for what the workers need; whether it has grown, or has begun to, within PATIENCE_S seconds."""
    bundle = {"CPU": 1, "GPU": 1} if args.use_gpu else {"CPU": 1}
    # As Ray Train will, and what is needed beside it; an autoscaler sees it. (A worker on a GPU also needs a CPU to run
    # on, though Ray Train does not ask for it.)
    demand = placement_group([bundle] * args.num_workers + [{"CPU": 1}] * spare_cpus)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < deadline:
            if demand.wait(1):
                return True
            status = get_cluster_status(ray.get_runtime_context().gcs_address)
            if status.pending_launches or status.pending_nodes:
                driver.log(f"the cluster is starting nodes; waiting for {args.num_workers} times {in_words(bundle)}")
                return True
        return False
    finally:
        remove_placement_group(demand)


def run_folder(args: argparse.Namespace) -> str:
    """The run's folder under --storage-path: a path or a URI. Raises UsageError for a URI with options in it."""
    if "://" not in args.storage_path:
        return str(cli.run_folder(args))
    if "?" in args.storage_path:
        raise UsageError("--storage-path takes no options after a ?; AWS_ENDPOINT_URL names an S3 store of one's own")
    return f"{args.storage_path.rstrip('/')}/{args.run_name or cli.new_run_name()}"


# --- a run's checkpoints in Ray's storage, with the names of shared.checkpoint ---------------------------------------


def file_system(folder: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """What reads and writes a path or a URI, and the path in it. Raises ValueError for a URI that it cannot use."""
    try:
        return pyarrow.fs.FileSystem.from_uri(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot use --storage-path: {error}") from error


def list_newest_first(folder: str) -> list[str]:
    """Paths of the checkpoint folders in a run's folder, readable or not, newest first."""
    files, path = file_system(folder)
    found = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
    return sorted((each.path for each in found if each.base_name.startswith("checkpoint-")), reverse=True)


def load_newest(folder: str) -> tuple[str | None, dict | None, list[str]]:
    """As `checkpoint.load_newest`, of the checkpoints that `report` has made."""
    files, _ = file_system(folder)

    def load(path: str) -> dict:
        if isinstance(files, pyarrow.fs.LocalFileSystem):
            state = checkpoint.load(Path(path) / STATE_FILE)
            checkpoint.verify(state.get("files", {}), checkpoint.check_sums(path))
            return state
        # From a cloud only the small file is fetched. Of the slices, which may be terabytes, the sizes are compared:
        # what was uploaded the store itself has check sums of.
        with tempfile.TemporaryDirectory() as local:
            copy = Path(local) / STATE_FILE
            pyarrow.fs.copy_files(f"{path}/{STATE_FILE}", str(copy), source_filesystem=files)
            state = checkpoint.load(copy)
        found = files.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
        sizes = {each.path.removeprefix(f"{path}/"): [each.size] for each in found}
        checkpoint.verify({name: entry[:1] for name, entry in state.get("files", {}).items()}, sizes)
        return state

    return checkpoint.first_readable(list_newest_first(folder), load)


def newest_state(args: argparse.Namespace, worker: Worker) -> tuple[str | None, dict | None]:
    """Path and state of the newest readable checkpoint, on every rank; (None, None) before the first. Collective.

    Raises OSError on rank 0 where none can be read, though the driver has read one or Ray has stored one: Ray then
    starts the workers again, as often as `max_failures` says. To begin anew would push out checkpoints that are good
    when the storage is back. (A worker that dies in the first upload of all leaves an unreadable one, and no loss.)
    """
    path, state = None, None
    if worker.rank == 0 and args.num_workers > 0:  # local mode stores none
        path, state, skipped = load_newest(args.folder)
        if state is None and skipped and (args.resume or ray.train.get_checkpoint() is not None):
            raise OSError(f"no readable checkpoint in {args.folder}: {'; '.join(skipped)}")
    return from_rank_zero((path, state))


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
            yield local, state


def make_folder(folder: str) -> None:
    """Make a run's folder where it is missing, and see to Ray's list of its checkpoints. Raises OSError.

    Ray refuses to go on where its list is damaged or names a checkpoint that is gone. The checkpoints themselves hold
    all that a run needs, so such a list is deleted, and Ray begins a new one.
    """
    files, path = file_system(folder)
    files.create_dir(path, recursive=True)
    files.open_output_stream(f"{path}/.writable").close()
    files.delete_file(f"{path}/.writable")
    snapshot = f"{path}/{SNAPSHOT_FILE}"
    if files.get_file_info(snapshot).is_file:
        try:
            listed = json.loads(files.open_input_stream(snapshot).read())["checkpoint_results"]
            gone = {f"{path}/{each['checkpoint_dir_name']}" for each in listed} - set(list_newest_first(folder))
        except (ValueError, KeyError, TypeError):
            gone = {"unreadable"}
        if gone:
            files.delete_file(snapshot)


def check_folder(args: argparse.Namespace) -> None:
    """Raises ValueError on a node that does not see the run's folder, which the driver has made."""
    if args.num_workers > 0 and "://" not in args.folder and not os.path.isdir(args.folder):
        raise ValueError(
            f"{args.folder} is not seen from node {socket.gethostname()}: "
            "--storage-path must be a folder that all nodes share, or a URI such as s3://BUCKET/runs"
        )


def report(state: dict, metrics: dict, worker: Worker, write: Callable[[str], None] | None = None) -> None:
    """Rank 0 writes `state`, and Ray copies it to the run's storage with `metrics` beside it. Collective.

    write: called on every rank with a folder, for its own part of a sharded checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        reported = None
        if write is not None:
            write(folder)
            parts = gather_objects(checkpoint.check_sums(folder))
            state = {**state, "files": {name: entry for part in parts for name, entry in part.items()}}
            reported = ray.train.Checkpoint.from_directory(folder)
        if worker.rank == 0:
            checkpoint.save_atomically(state, Path(folder) / STATE_FILE)
            reported = ray.train.Checkpoint.from_directory(folder)
        # A resumed run may come to the same step again: the name must still be new.
        name = f"checkpoint-{state['progress']['step']:08d}-{uuid.uuid4().hex[:8]}"
        ray.train.report(metrics, checkpoint=reported, checkpoint_dir_name=name)


class MetricsFile(ray.train.UserCallback):
    """Writes --metrics-out while a run goes on. Ray's controller calls it, on the driver's machine."""

    def __init__(self, path: str | None, lines: list[dict]) -> None:
        self.path = path and os.path.abspath(path)
        self.lines = lines

    def after_report(self, run_context: object, metrics: list[dict], checkpoint: ray.train.Checkpoint | None) -> None:
        """Add the line of the epoch that rank 0 reports, or put it in the place of an earlier one."""
        line = metrics[0]
        if line["epoch"] > 0:
            self.lines = [*self.lines[: line["epoch"] - 1], line]
            cli.write_metrics(self.path, self.lines)


def worker() -> Worker:
    """Who this Ray Train worker is: Ray has made the process group, and chosen the device."""
    context = ray.train.get_context()
    return Worker(
        context.get_world_rank(), context.get_local_rank(), context.get_world_size(), ray.train.torch.get_device()
    )
