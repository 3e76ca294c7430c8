"""Ray without surprises: starting or joining it, training on its workers, and leaving it."""

import argparse
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import psutil
import ray
import ray.train
import ray.train.torch
from ray._private.utils import get_num_cpus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

import shared
from shared.cli import RunFailed
from shared.distributed import UsageError, Worker, free_port
from shared.ray_storage import RayRun

PATIENCE_S = 45  # for a cluster that may grow
FITS = 4  # how often `fit` tries
OWN_ADDRESS: dict[str, str] = {}  # of a Ray that `start` has started, in the environment of each of its processes


class Driver(Worker):
    """The process that starts a Ray job, where it logs: it has no rank."""

    def log(self, message: str) -> None:
        """Print one line that says where it is from."""
        print(f"[driver] {message}", flush=True)


def world_size(args: argparse.Namespace) -> int:
    """How many processes train, at least: the workers, or in local mode this one and its siblings under torchrun."""
    return args.num_workers or int(os.environ.get("WORLD_SIZE", 1))


def start(
    args: argparse.Namespace, spare_cpus: int = 0, dashboard: bool = False, packages: Sequence[ModuleType] = (shared,)
) -> None:
    """Join the cluster of RAY_ADDRESS or of an Anyscale workspace, else start a Ray of our own on this machine.

    Prints one line on what it did, and sets `args.use_gpu` where it is None. spare_cpus: CPUs needed beside one a
    worker, as by Ray Data's tasks; without them local mode needs no Ray, and starts none. dashboard: of a Ray of our
    own; it is ten processes more. packages: what the nodes of a cluster are sent, since they have no copy. Raises
    UsageError where the address does not answer, or where there are fewer CPUs or GPUs than `args.num_workers` need and
    no more to come.
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
    settings = quiet_settings(address == "local", elastic=getattr(args, "max_workers", 0) > args.num_workers)
    OWN_ADDRESS.clear()
    if address == "local":
        # Ray's helpers look for "the" Ray of a machine, and complain where two run: tell them which one is theirs.
        port = str(free_port())
        OWN_ADDRESS.update(RAY_GCS_SERVER_PORT=port, RAY_ADDRESS=f"{ray.util.get_node_ip_address()}:{port}")
        # Ray counts the CPUs that a container may use. Four workers, and tasks beside them, may be tried on fewer.
        here = int(get_num_cpus(override_docker_cpu_warning=True))
        needed = min(args.num_workers, max(4, here)) + spare_cpus
        options = {"include_dashboard": dashboard} | ({"num_cpus": needed} if needed > here else {})
        if not dashboard:
            # Ray notes a dashboard's address all the same, 8265 by default. Train's helper that removes the workers of
            # a dead controller asks there: another Ray's dashboard would answer that it knows no such controller.
            options["dashboard_port"] = free_port()
    else:
        settings |= {} if address == "auto" else {"RAY_ADDRESS": address}
        folders = [str(Path(package.__file__).parent) for package in packages]
        options = {"runtime_env": {"py_modules": folders, "env_vars": settings}}
    driver, asked = Driver(), os.environ.get("RAY_ADDRESS")
    check_answers(address)
    try:
        os.environ.update(OWN_ADDRESS)
        level = "ERROR" if OWN_ADDRESS else "WARNING"  # on a busy laptop Ray warns of its own delays
        context = ray.init(address, logging_config=ray.LoggingConfig(log_level=level), **options)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        hint = "" if address == "local" else " (start this script on a node of the cluster, the head for example)"
        raise UsageError(f"cannot join Ray at {address}: {str(error).splitlines()[0]}{hint}") from error
    finally:
        for name in OWN_ADDRESS:
            del os.environ[name]
        os.environ.update({"RAY_ADDRESS": asked} if asked else {})
    has = ray.cluster_resources()
    if args.use_gpu is None:
        args.use_gpu = has.get("GPU", 0) > 0
    what = "started Ray on this machine" if address == "local" else f"joined the Ray cluster at {address}"
    page = f"; dashboard: http://{context.dashboard_url}" if context.dashboard_url else ""
    driver.log(f"{what}: {in_words(has)}{page}")

    needs = {"CPU": args.num_workers + spare_cpus, "GPU": args.num_workers if args.use_gpu else 0}
    bundle = {"CPU": 1, "GPU": 1} if args.use_gpu else {"CPU": 1}
    bundles = [bundle] * args.num_workers + [{"CPU": 1}] * spare_cpus
    if not enough(has, needs) and (address == "local" or not grows(bundles, driver)):
        raise UsageError(
            f"{args.num_workers} workers need {in_words(needs)}, and there are {in_words(ray.cluster_resources())}: "
            f"fewer --num-workers{', --no-use-gpu' if args.use_gpu else ''} or RAY_ADDRESS of a larger cluster will do"
        )
    if address != "local" and enough(has, needs) and not enough(ray.available_resources(), needs):
        driver.log(f"others are using the cluster; waiting for {in_words(needs)}")


def stop() -> None:
    """Leave the cluster; end a Ray of our own, with every process that it has started."""
    started = own_processes()
    ray.shutdown()
    psutil.wait_procs(started, timeout=2)
    kill(started)  # Ray's agents may outlive it by minutes


def stop_at_once() -> None:
    """As `stop`, in a process that is about to end, and from any thread of it."""
    # Not by ray.shutdown: Ray's own handler of Ctrl-C would start a new Ray, to tell its controller.
    kill(own_processes())


def own_processes() -> list[psutil.Process]:
    """The processes of the Ray that `start` has started here; other children of this process are none of them."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # ended since
            if OWN_ADDRESS and process.environ().get("RAY_ADDRESS") == OWN_ADDRESS["RAY_ADDRESS"]:
                # Those below it have put their title over their environment, and cannot be told by it.
                found += [process, *process.children(recursive=True)]
    return found


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each of them that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def quiet_settings(own: bool, elastic: bool = False) -> dict[str, str]:
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
        settings["RAY_USAGE_STATS_ENABLED"] = "0"  # reports nothing to anybody, and needs an actor less for Ray Data
        settings["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # watches for machines that a cloud takes back
        settings["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # a cluster's controller need not look so often
    if elastic:
        # After a node is lost Ray tries as many workers as before: let it see sooner that there is no room for them.
        settings["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "10"
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
            raise UsageError(
                f"no Ray answers at RAY_ADDRESS={address} ({error.strerror or error}): unset it to start one here"
            ) from error


def enough(has: dict[str, float], needs: dict[str, float]) -> bool:
    """Whether there is at least as much of everything as is needed."""
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def in_words(resources: dict[str, float]) -> str:
    """CPUs and GPUs, as people say them."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:.0f} CPU{'s' * (cpus != 1)} and {f'{gpus:.0f} GPU' if gpus else 'no GPU'}{'s' * (gpus > 1)}"


def grows(bundles: list[dict[str, float]], driver: Worker) -> bool:
    """Ask the cluster for room: for each worker what it needs, on one node, and for what is needed beside them.

    Whether it has grown, or has begun to, within PATIENCE_S seconds.
    """
    # As Ray Train will; an autoscaler sees it. (A worker on a GPU also needs a CPU to run on, though Ray Train does not
    # ask for it.)
    demand = ray.util.placement_group(bundles)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < deadline:
            if demand.wait(1):
                return True
            status = get_cluster_status(ray.get_runtime_context().gcs_address)
            if status.pending_launches or status.pending_nodes:
                driver.log(f"the cluster is starting nodes; waiting for {len(bundles)} times {in_words(bundles[0])}")
                return True
        return False
    finally:
        ray.util.remove_placement_group(demand)


def worker() -> Worker:
    """Who this Ray Train worker is: Ray has made the process group, and chosen the device."""
    context = ray.train.get_context()
    return Worker(
        context.get_world_rank(), context.get_local_rank(), context.get_world_size(), ray.train.torch.get_device()
    )


def on_workers(train: Callable[[argparse.Namespace, Worker], list[dict]]) -> Callable[[dict], object]:
    """What TorchTrainer runs on every worker: `train` with its options and its worker.

    A user's mistake is returned, for `fit` to raise: raised in a worker, Ray would start them all again.
    """

    def train_worker(config: dict) -> list[dict] | UsageError:
        try:
            return train(argparse.Namespace(**config), worker())
        except UsageError as error:
            return error

    return train_worker


def fit(trainer: ray.train.torch.TorchTrainer, run: RayRun, driver: Worker) -> list[dict]:
    """`trainer.fit()`, and what the workers return: their metrics. Raises UsageError, and RunFailed.

    Ray Train replaces a worker that dies while it trains, as often as `max_failures` says. One that dies while the
    workers are being started, or started again, ends `fit` in ray 2.60, and so does the death of Ray's controller.
    Nothing is wrong with the run then: it goes on from its newest checkpoint, FITS times at most in all.
    """
    for attempt in range(1, FITS + 1):
        try:
            returned = trainer.fit().return_value
            if isinstance(returned, UsageError):
                raise returned
            return returned
        except (ray.train.TrainingFailedError, RayActorError) as error:
            lost = error.controller_failure if isinstance(error, ray.train.ControllerError) else error
            reason = reason_of(lost)
            if not isinstance(lost, RayActorError) or attempt == FITS:
                raise RunFailed(f"{reason}. {run.farewell()}") from None
            driver.log(f"{reason}; starting the workers again from the newest checkpoint ({attempt} of {FITS - 1})")
            with contextlib.suppress(OSError):  # a storage that is away the next fit meets itself
                run.make_folder()
            release()


def release() -> None:
    """Free the CPUs and GPUs that this job still has in Ray's books: a group that died while it started keeps them."""
    job = ray.get_runtime_context().get_job_id()
    for name, group in ray.util.placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":  # a group's name ends with that of its job
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))


def reason_of(error: Exception) -> str:
    """Why training failed, in one line; where a worker's own code did, its traceback goes to stderr."""
    if isinstance(error, RayActorError):
        return f"a worker or Ray's controller died where Ray Train does not replace it ({type(error).__name__})"
    if not isinstance(error, ray.train.WorkerGroupError):
        return f"Ray Train failed: {str(error).splitlines()[0]}"
    rank, failure = min(error.worker_failures.items())
    if isinstance(failure, RayActorError):
        return f"the worker of rank {rank} died, and workers were replaced as often as max_failures says"
    print(failure, file=sys.stderr)
    return f"the worker of rank {rank} failed: {str(failure).strip().splitlines()[-1]}"
