"""Start or join a Ray cluster, ask it for CPUs and GPUs, and leave it."""

import contextlib
import json
import logging
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import psutil
import ray
from ray._private import ray_constants
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.services import canonicalize_bootstrap_address
from ray._private.utils import get_num_cpus
from ray.autoscaler.v2.sdk import get_cluster_status

import shared
from shared.distributed import Worker
from shared.errors import UsageError
from shared.paths import ray_temp_dir
from shared.rendezvous import free_port

AUTOSCALER_WAIT_S = 45  # the time that a cluster gets to start growing
OWN_RAY_ENV: dict[str, str] = {}  # every process of the Ray that `start` started has these
# Ray prints much that has to be ignored. These environment variables of its processes silence it.
QUIET = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print every line of a worker twice
    # These two would set their own log level, and print every report of every worker.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_DATA_LOG_LEVEL": "ERROR",  # would print five lines per epoch and data set
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leaves CUDA_VISIBLE_DEVICES alone if no GPU is asked for
}
QUIET_OWN = {  # only for a Ray that we have started
    "RAY_USAGE_STATS_ENABLED": "0",  # reports no usage, and saves Ray Data an actor
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # would watch for machines that a cloud reclaims
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a cluster keeps Ray's longer default
}
# Tell Ray's processes on all nodes which S3 store to use: they have the environment of their node's `ray start`.
# Credentials are not forwarded, because they belong to the nodes.
STORE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
# After a node is lost, Ray first tries the old number of workers. This timeout lets it give up sooner.
ELASTIC = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}


def start(
    num_workers: int, use_gpu: bool | None = None, spare_cpus: int = 0, dashboard: bool = False, elastic: bool = False,
    packages: Sequence[ModuleType] = (shared,), check_room: bool = True,
) -> bool:  # fmt: skip
    """Join a Ray cluster if there is one, otherwise start Ray on this machine. Return whether workers use GPUs.

    The cluster is that of RAY_ADDRESS or of an Anyscale workspace. One line is printed about it.
    num_workers: 0 is Ray's local mode, which needs no Ray.
    use_gpu: None means GPUs if there are any.
    spare_cpus: CPUs needed in addition to one per worker, for example by Ray Data's tasks. With them, local mode starts
    Ray.
    dashboard: whether a Ray started here gets one, which is ten more processes.
    elastic: workers may come and go.
    packages: modules that the nodes of a cluster lack, so they are sent.
    check_room: whether each worker needs a CPU, and a GPU if it uses one. A caller with other needs checks them itself.
    Raises UsageError if the address does not answer, or if there are too few CPUs or GPUs and no more will come.
    """
    if num_workers == 0:
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        if use_gpu is False:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if spare_cpus == 0:
            return bool(use_gpu)
    # By default ray.init looks for a running Ray in a file that a crash leaves behind, and then waits for a dead one.
    # ANYSCALE_CLUSTER_ID is set on the nodes of such a cluster only. Other ANYSCALE_ variables may be on a laptop too.
    if "RAY_ADDRESS" in os.environ:  # a blank or the CR of a file for Windows would make ray.init try forever
        os.environ["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"].strip()
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
    """Start Ray on this machine, apart from any other Ray here, and return its dashboard's address."""
    ray_temp_dir()
    # Ray's helpers expect one Ray per machine and complain if two run. These variables say which one is theirs.
    port = str(free_port())
    OWN_RAY_ENV.clear()
    OWN_RAY_ENV.update(RAY_GCS_SERVER_PORT=port, RAY_ADDRESS=f"{ray.util.get_node_ip_address()}:{port}")
    if "RAY_AUTH_TOKEN" not in os.environ and not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        OWN_RAY_ENV["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would keep it in the home folder
    # Ray counts the CPUs that a container may use. Four workers and their tasks may run on fewer than that.
    here = int(get_num_cpus(override_docker_cpu_warning=True))
    needed = min(num_workers, max(4, here)) + spare_cpus
    options = {"include_dashboard": dashboard} | ({"num_cpus": needed} if needed > here else {})
    if not dashboard:
        # Even without a dashboard Ray records an address for it, with port 8265 by default. Ray Train's helper, which
        # removes the workers of a dead controller, asks there. A different Ray's dashboard would give a wrong answer.
        options["dashboard_port"] = free_port()
    if (quoted := shlex.quote(sys.executable)) != sys.executable:
        options["runtime_env"] = {"py_executable": quoted}  # Ray lets a shell start its workers
    before = os.environ.get("RAY_ADDRESS")
    os.environ.update(OWN_RAY_ENV)
    try:
        return ray_init("local", log_level="ERROR", **options)  # on a busy laptop Ray would warn of its own delays
    finally:
        for name in OWN_RAY_ENV:
            del os.environ[name]
        os.environ.update({"RAY_ADDRESS": before} if before else {})


def join(address: str, settings: dict[str, str], packages: Sequence[ModuleType]) -> str | None:
    """Join the cluster at `address`, and return its dashboard's address.

    settings: environment variables for the job's processes.
    packages: see `start`.
    """
    OWN_RAY_ENV.clear()
    if address == "auto":
        with contextlib.suppress(ConnectionError):  # there is none: ray.init will say so
            check_answers(canonicalize_bootstrap_address(address), "auto")
    else:
        check_answers(address)
    settings = settings | {name: os.environ[name] for name in STORE if name in os.environ}
    if address != "auto":
        settings = settings | {"RAY_ADDRESS": address}
    # Ray refuses variables that a submitted job's own runtime environment sets already, even to the same value.
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env") or {}
    settings = {name: value for name, value in settings.items() if name not in (job.get("env_vars") or {})}
    # A single-file module is sent as its file, a package as its folder.
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
    """Raise UsageError if the nodes have too few CPUs or GPUs for `bundles` and no more will come.

    bundles: the needs of each of the `num_workers` workers and of each spare CPU.
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
    """Leave the cluster. If Ray was started here, end it with all its processes."""
    started = own_processes()
    ray.shutdown()
    psutil.wait_procs(started, timeout=2)
    kill(started)  # otherwise Ray's agents may outlive it by minutes


def stop_at_once() -> None:
    """Kill the Ray that was started here, if any. Any thread of a process that is about to end may call this."""
    # ray.shutdown is not used: Ray's own Ctrl-C handler would start a new Ray to notify its controller.
    kill(own_processes())


def own_processes() -> list[psutil.Process]:
    """Return the processes of the Ray that `start` has started, without other children of this process."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended since
            if OWN_RAY_ENV and process.environ().get("RAY_ADDRESS") == OWN_RAY_ENV["RAY_ADDRESS"]:
                # Its descendants have overwritten their environment with a process title.
                found += [process, *process.children(recursive=True)]
    return found


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to each process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def quiet_settings(own: bool, elastic: bool = False) -> dict[str, str]:
    """Set the quiet environment variables of Ray's processes, unless they are set, and return their values."""
    # In this process Ray Data has already read its variable. The other logger reports tokens at every start.
    for name in ("ray.data", "ray._private.authentication.authentication_token_setup"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # If this process was started by `uv run`, Ray would start its workers by it as well, in a copy of the folder.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    settings = QUIET | (QUIET_OWN if own else {}) | (ELASTIC if elastic else {})
    return {name: os.environ.setdefault(name, value) for name, value in settings.items()}


def check_answers(address: str, said: str | None = None) -> None:
    """Raise UsageError if nothing listens at HOST:PORT, where ray.init would try forever.

    The ports of the dashboard and of Ray Client get advice instead.
    said: what RAY_ADDRESS says, if that is not the address itself.
    """
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
                f"no Ray answers at RAY_ADDRESS={said or address} ({error.strerror or error}): unset it to start one "
                "here"
            ) from error


def enough(has: dict[str, float], needs: dict[str, float]) -> bool:
    """Return whether `has` covers every amount in `needs`."""
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def in_words(resources: dict[str, float]) -> str:
    """Return the number of CPUs and GPUs as a phrase."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:g} CPU{'s' * (cpus != 1)} and {f'{gpus:g} GPU' if gpus else 'no GPU'}{'s' * (gpus > 1)}"


def grows(bundles: list[dict[str, float]], driver: Worker) -> bool:
    """Ask the cluster for `bundles`, and return whether it has room or begins to grow.

    It has AUTOSCALER_WAIT_S seconds. Each bundle must fit on one node.
    """
    # Ray Train will ask in the same way, and an autoscaler sees the request. A worker on a GPU also needs a CPU,
    # although Ray Train does not ask for one.
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
