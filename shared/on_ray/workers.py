"""Run training on Ray Train's workers, and report in one line why it failed."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared.distributed import Worker
from shared.errors import RunFailed, StorageError, UsageError
from shared.on_ray import cluster
from shared.on_ray.storage import MetricsFile, RayRun
from shared.rendezvous import choose_gloo_interface
from shared.running import lease

MAX_FIT_ATTEMPTS = 4


def num_processes(num_workers: int) -> int:
    """Return the smallest number of processes that train.

    In local mode these are this process and its siblings under torchrun.
    """
    return num_workers or int(os.environ.get("WORLD_SIZE", 1))


def current_worker() -> Worker:
    """Return who this Ray Train worker is. Ray has made the process group and chosen the device."""
    context = ray.train.get_context()
    return Worker(context.get_world_rank(), context.get_local_rank(), context.get_world_size(), get_device())


def on_workers(train: Callable[..., object]) -> Callable[[dict], object]:
    """Return the function that TorchTrainer runs on every worker.

    It calls `train` with its config as keyword arguments, and with its worker. It returns a user's mistake, so that
    `fit` can raise it: if a worker raised it, Ray would start all workers again. It raises OSError if files are missing
    although the run has saved something. Then Ray should start the workers again, because the files may come back.
    """

    def train_worker(config: dict) -> object:
        try:
            return train(worker=current_worker(), **config)
        except UsageError as error:
            if isinstance(error, StorageError) and config["run"].has_saved:
                raise OSError(str(error)) from error
            return error

    return train_worker


class NodeTorchConfig(TorchConfig):
    """Ray Train's TorchConfig, with gloo connecting the workers by their nodes' addresses in Ray."""

    @property
    def backend_cls(self) -> type:
        return NodeBackend


class NodeBackend(TorchConfig().backend_cls):
    """A back end that chooses gloo's network interface on each worker before the process group is made."""

    def on_start(self, worker_group: object, backend_config: TorchConfig) -> None:
        worker_group.execute(lambda: choose_gloo_interface(ray.util.get_node_ip_address()))
        super().on_start(worker_group, backend_config)


def check_storage(run: RayRun) -> None:
    """Raise UsageError if a node of a cluster cannot use the run's object store.

    The message gives the node and the reason. Otherwise Ray Train's own processes would die without a word about the
    store.
    """
    if run.local_mode or cluster.OWN_RAY_ENV or "://" not in run.folder:
        return
    probes = {}
    for node in living_nodes():
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        probe = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(RayRun.probe)
        probes[probe.remote(run)] = node
    _, silent = ray.wait(list(probes), num_returns=len(probes), timeout=120)
    for probe, node in probes.items():
        try:
            problem = "no answer in 120 s" if probe in silent else ray.get(probe)
        except ray.exceptions.RayError as error:
            problem = str(getattr(error, "cause", None) or error).partition("\n")[0]
        if problem and node in living_nodes():
            raise UsageError(f"node {living_nodes()[node]} cannot use --storage-path {run.folder}: {problem}")


def living_nodes() -> dict[str, str]:
    """Return the host name and address of each living node, by its ID."""
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"]
    }


def build_trainer(
    train: Callable[..., object], config: dict, args: argparse.Namespace, run: RayRun, use_gpu: bool, **data: object
) -> TorchTrainer:
    """Return the TorchTrainer that train_ray_ddp.py builds step by step, for a fixed number of workers.

    train: what every worker runs, with `config` as keyword arguments.
    data: data sets, and how they are dealt.
    """
    return TorchTrainer(
        on_workers(train),
        train_loop_config=config,
        torch_config=NodeTorchConfig(timeout_s=600),
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=run.storage_path,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=3),
            callbacks=[MetricsFile(args.metrics_out, run.metrics)],
        ),
        **data,
    )


def fit(trainer: TorchTrainer, run: RayRun, driver: Worker) -> list[dict]:
    """Call `trainer.fit()`, and return the metrics that the workers return.

    Afterwards a different process may continue the run. Raises UsageError and RunFailed.
    """
    try:
        check_storage(run)
        return fit_until_done(trainer, run, driver)
    finally:
        lease.release()


def fit_until_done(trainer: TorchTrainer, run: RayRun, driver: Worker) -> list[dict]:
    """Call `trainer.fit()` until it returns, at most MAX_FIT_ATTEMPTS times.

    Ray Train replaces a worker that dies while it trains, as often as `max_failures` says. It repeats a start in which
    a worker dies, or for which there is no room, without a limit. Two other deaths end `fit` in ray 2.60: that of a
    worker at the moment when it is handed the training function, after the start, and that of Ray's controller. Nothing
    is wrong with the run then, and it continues from its newest checkpoint.
    """
    for attempt in range(1, MAX_FIT_ATTEMPTS + 1):
        try:
            returned = trainer.fit().return_value
            if isinstance(returned, UsageError):
                raise returned
            return returned
        except (ray.train.TrainingFailedError, RayActorError) as error:
            lost = error.controller_failure if isinstance(error, ray.train.ControllerError) else error
            reason = reason_of(lost)
            if not isinstance(lost, RayActorError) or attempt == MAX_FIT_ATTEMPTS:
                raise RunFailed(f"{reason}. {run.resume_hint()}") from None
            again = f"({attempt} of {MAX_FIT_ATTEMPTS - 1})"
            driver.log(f"{reason}; starting the workers again from the newest checkpoint {again}")
            with contextlib.suppress(OSError):  # if the storage is unreachable, the next fit gets the same error
                run.make_folder()
            remove_leftover_placement_groups()


def remove_leftover_placement_groups() -> None:
    """Free the CPUs and GPUs that a worker group of this job still holds when `fit` has ended with an error."""
    job = ray.get_runtime_context().get_job_id()
    for name, group in ray.util.placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":  # a group's name ends with its job's ID
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))


def reason_of(error: Exception) -> str:
    """Return in one line why training failed. If a worker's own code failed, its traceback goes to stderr."""
    if isinstance(error, RayActorError):
        return f"a worker or Ray's controller died where Ray Train does not replace it ({type(error).__name__})"
    if not isinstance(error, ray.train.WorkerGroupError):
        return f"Ray Train failed: {str(error).splitlines()[0]}"
    rank, failure = min(error.worker_failures.items())
    if isinstance(failure, RayActorError):
        return f"the worker of rank {rank} died, and max_failures allows no more replacements"
    print(failure, file=sys.stderr)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(failure)).strip().splitlines()
    # A library's warnings may follow a traceback. The reason is the last line that names an exception.
    reasons = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Timeout|Interrupt)\b", line)]
    return f"the worker of rank {rank} failed: {(reasons or lines)[-1]}"
