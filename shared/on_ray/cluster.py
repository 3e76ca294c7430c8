"""A Ray cluster without surprises: starting or joining it, asking it for room, and leaving it."""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import psutil
import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.utils import get_num_cpus
from ray.autoscaler.v2.sdk import get_cluster_status

import shared
from shared.distributed import Worker
from shared.errors import UsageError
from shared.paths import ray_temp_dir
from shared.rendezvous import free_port

AUTOSCALER_WAIT_S = 45  # for a cluster that may grow
OWN_RAY_ENV: dict[str, str] = {}  # of a Ray that `start` has started: in the environment of each of its processes
# Ray prints much that has to be ignored. These environment variables of its processes silence that.
QUIET = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print every line of a worker twice
    # These two would set a level of their own, and print every report of every worker.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_DATA_LOG_LEVEL": "ERROR",  # would print five lines per epoch and data set
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leaves CUDA_VISIBLE_DEVICES alone where no GPU is asked for
}
QUIET_OWN = {  # of a Ray of our own
    "RAY_USAGE_STATS_ENABLED": "0",  # reports nothing to anybody, and saves Ray Data an actor
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # would watch for machines that a cloud takes back
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a cluster's controller need not look so often
}
# Which S3 store, for Ray's processes on all nodes: they have the environment of their node's `ray start`, not ours.
# Credentials are not forwarded: they belong to the nodes.
STORE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
# After a node is lost Ray tries as many workers as before: let it see sooner that there is no room for them.
ELASTIC = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}


def start(
    num_workers: int, use_gpu: bool | None = None, spare_cpus: int = 0, dashboard: bool = False, elastic: bool = False,
    packages: Sequence[ModuleType] = (shared,), check_room: bool = True,
) -> bool:  # fmt: skip
    """Join the cluster of RAY_ADDRESS or of an Anyscale workspace, else start a Ray of our own on this machine.

    Prints one line about it, and returns whether the workers use GPUs: `use_gpu`, or if that is None, whether there are
    any. num_workers: 0 is Ray's local mode, which needs no Ray. spare_cpus: CPUs needed besides one per worker, as by
    Ray Data's tasks; with them, local mode starts Ray. dashboard: of a Ray of our own; it is ten more processes.
    elastic: workers may come and go. packages: sent to the nodes of a cluster, since they have no copy. check_room:
    whether each worker needs a CPU, and a GPU if it uses one; for other needs the caller checks. Raises UsageError if
    the address does not answer, or if there are too few CPUs or GPUs and no more to come.
    """
    if num_workers == 0:
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        if use_gpu is False:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if spare_cpus == 0:
            return bool(use_gpu)
    # Left to itself, ray.init looks for a running Ray by a file that a crash leaves behind, and waits for the dead.
    # ANYSCALE_CLUSTER_ID is set on the nodes of such a cluster; other ANYSCALE_ variables also on a user's laptop.
    address = os.environ.get("RAY_ADDRESS") or ("auto" if "ANYSCALE_CLUSTER_ID" in os.environ else "local")
    own = address == "local"
    settings = quiet_settings(own, elastic)
    dashboard_url = start_own(num_workers, spare_cpus, dashboard) if own else join(address, settings, packages)
    resources = ray.cluster_resources()
    if use_gpu is None:
        use_gpu = resources.get("GPU", 0) > 0
    what = "started Ray on this machine" if own else f"joined the Ray cluster at {address}"
    page = f"; dashboard: http://{dashboard_url}" if dashboard_url else ""
    driver = Worker(label="driver")
    driver.log(f"{what}: {in_words(resources)}{page}")
    if check_room:
        bundle = {"CPU": 1, "GPU": 1} if use_gpu else {"CPU": 1}
        require([bundle] * num_workers + [{"CPU": 1}] * spare_cpus, num_workers, driver)
    return use_gpu


def start_own(num_workers: int, spare_cpus: int, dashboard: bool) -> str | None:
    """Start a Ray on this machine, which no other Ray here takes for its own; returns its dashboard's address."""
    ray_temp_dir()
    # Ray's helpers look for "the" Ray of a machine, and complain where two run: tell them which one is theirs.
    port = str(free_port())
    OWN_RAY_ENV.clear()
    OWN_RAY_ENV.update(RAY_GCS_SERVER_PORT=port, RAY_ADDRESS=f"{ray.util.get_node_ip_address()}:{port}")
    # Ray counts the CPUs that a container may use. Four workers, and tasks beside them, may be tried on fewer.
    here = int(get_num_cpus(override_docker_cpu_warning=True))
    needed = min(num_workers, max(4, here)) + spare_cpus
    options = {"include_dashboard": dashboard} | ({"num_cpus": needed} if needed > here else {})
    if not dashboard:
        # Ray notes a dashboard's address all the same, 8265 by default. Train's helper that removes the workers of
        # a dead controller asks there: another Ray's dashboard would answer that it knows no such controller.
        options["dashboard_port"] = free_port()
    before = os.environ.get("RAY_ADDRESS")
    os.environ.update(OWN_RAY_ENV)
    try:
        return ray_init("local", log_level="ERROR", **options)  # on a busy laptop Ray warns of its own delays
    finally:
        for name in OWN_RAY_ENV:
            del os.environ[name]
        os.environ.update({"RAY_ADDRESS": before} if before else {})


def join(address: str, settings: dict[str, str], packages: Sequence[ModuleType]) -> str | None:
    """Join the cluster at `address`; returns its dashboard's address.

    settings: environment variables for the job's processes. packages: see `start`.
    """
    OWN_RAY_ENV.clear()
    check_answers(address)
    settings = settings | {name: os.environ[name] for name in STORE if name in os.environ}
    if address != "auto":
        settings = settings | {"RAY_ADDRESS": address}
    # Ray refuses what a submitted job's own runtime environment sets already, even to the same value.
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env") or {}
    settings = {name: value for name, value in settings.items() if name not in (job.get("env_vars") or {})}
    # A module that is one file is sent as that file, a package as its folder.
    files = [Path(package.__file__) for package in packages]
    folders = [str(file.parent if file.name == "__init__.py" else file) for file in files]
    return ray_init(address, log_level="WARNING", runtime_env={"py_modules": folders, "env_vars": settings})


def ray_init(address: str, log_level: str, **options: object) -> str | None:
    """Call ray.init, and return the dashboard's address. Its errors become UsageErrors of one line."""
    try:
        return ray.init(address, logging_config=ray.LoggingConfig(log_level=log_level), **options).dashboard_url
    except (OSError, RuntimeError, ValueError) as error:
        hint = "" if address == "local" else " (start this script on a node of the cluster, the head for example)"
        raise UsageError(f"cannot join Ray at {address}: {str(error).splitlines()[0]}{hint}") from error


def require(bundles: list[dict[str, float]], num_workers: int, driver: Worker) -> None:
    """Raises UsageError if the nodes have too few CPUs or GPUs for `bundles` and no more are to come.

    bundles: what each of `num_workers` workers and each spare CPU needs.
    """
    needs = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
    has = ray.cluster_resources()
    if not enough(has, needs):
        if OWN_RAY_ENV or not grows(bundles, driver):
            workers = f"{num_workers} workers need" if num_workers > 1 else "1 worker needs"
            fixes = ["fewer --num-workers"] * (num_workers > 1) + ["--no-use-gpu"] * (needs["GPU"] > has.get("GPU", 0))
            fixes = " or ".join([*fixes, "RAY_ADDRESS of a larger cluster"])
            raise UsageError(f"{workers} {in_words(needs)}, and there are {in_words(has)}: {fixes} will do")
    elif not OWN_RAY_ENV and not enough(ray.available_resources(), needs):
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
            if OWN_RAY_ENV and process.environ().get("RAY_ADDRESS") == OWN_RAY_ENV["RAY_ADDRESS"]:
                # Those below it have put their title over their environment, and cannot be told by it.
                found += [process, *process.children(recursive=True)]
    return found


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each of them that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def quiet_settings(own: bool, elastic: bool = False) -> dict[str, str]:
    """Set environment variables for Ray's processes, those that are not set yet, and return them with their values."""
    # In this process Ray Data has read its variable by now; the other logger says at every start that tokens are on.
    for name in ("ray.data", "ray._private.authentication.authentication_token_setup"):
        logging.getLogger(name).setLevel(logging.ERROR)
    settings = QUIET | (QUIET_OWN if own else {}) | (ELASTIC if elastic else {})
    return {name: os.environ.setdefault(name, value) for name, value in settings.items()}


def check_answers(address: str) -> None:
    """Raises UsageError where nobody listens at HOST:PORT: ray.init would try forever. Other ports get advice."""
    scheme, _, place = address.rpartition("://")
    host, _, port = place.partition("/")[0].rpartition(":")
    if scheme in ("http", "https") or port == "8265":
        raise UsageError(
            f"RAY_ADDRESS={address} is Ray's dashboard, for `ray job submit`; a script on a node of the cluster joins "
            f"at {host}:6379"
        )
    if scheme == "ray" or port == "10001":
        raise UsageError(
            f"RAY_ADDRESS={address} is Ray Client's, which Ray Train does not work with; a script on a node of the "
            f"cluster joins at {host}:6379"
        )
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
    return f"{cpus:g} CPU{'s' * (cpus != 1)} and {f'{gpus:g} GPU' if gpus else 'no GPU'}{'s' * (gpus > 1)}"


def grows(bundles: list[dict[str, float]], driver: Worker) -> bool:
    """Ask the cluster for room: for each worker what it needs, on one node, and for what is needed beside them.

    Whether it has grown, or has begun to, within AUTOSCALER_WAIT_S seconds.
    """
    # As Ray Train will; an autoscaler sees it. (A worker on a GPU also needs a CPU to run on, though Ray Train does not
    # ask for it.)
    demand = ray.util.placement_group(bundles)
    deadline = time.monotonic() + AUTOSCALER_WAIT_S
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
