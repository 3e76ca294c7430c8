"""Train the text classifier on Ray Train, on this machine or on a cluster.

    python -m training.distributed_training
    python -m training.distributed_training --set cluster.num_workers=4
    RAY_ADDRESS=HOST:6379 python -m training.distributed_training --set 'cluster.num_workers=[1, 2]'

It computes the same as local_training.py. A worker that dies is replaced, and the run continues from its newest
checkpoint. With [MINIMUM, MAXIMUM] workers it also continues on fewer nodes, and later on more.
"""

from pathlib import Path

import ray.train
from ray.train.torch import TorchTrainer

import shared
import training
from shared import distributed
from shared.errors import UsageError
from shared.on_ray import cluster, storage, workers
from shared.running import script
from training import config as configuration
from training import data, trainer, utils


def main() -> None:
    """Check the configuration, open the run's folder, start Ray and train."""
    options, config = configuration.parse_command_line(configuration.run_parser(__doc__))
    driver = distributed.Worker(label="driver")
    fewest, most = config.cluster.num_workers
    with distributed.fail_together():
        data_folder = data.prepare(config.dataset, config.paths.processed_data_dir, most, driver.log)
        run = storage.RayRun.named(config.paths.model_save_dir, options.run_name)
        run.open_or_resume(options.resume, driver)
    folders = trainer.Folders(run.folder, data_folder, str(Path(config.paths.log_dir, run.name).absolute()))
    script.stop_on_signals(driver, run.resume_hint, clean_up=cluster.stop_at_once)
    use_gpu = cluster.start(
        fewest,
        config.cluster.use_gpu,
        elastic=most > fewest,
        packages=[shared, training],
        check_room=not config.cluster.resources_per_worker,
    )
    use_gpu = check_resources(config.cluster, use_gpu, driver)

    ray_trainer = TorchTrainer(
        workers.on_workers(train_worker),
        train_loop_config={"config": config.model_dump(mode="json"), "run": run, "folders": folders},
        torch_config=workers.NodeTorchConfig(timeout_s=config.cluster.timeout_s),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(fewest, most) if most > fewest else fewest,
            use_gpu=use_gpu,
            resources_per_worker=config.cluster.resources_per_worker,
        ),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=run.storage_path,
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=config.checkpoint.keep_best, checkpoint_score_attribute="val_accuracy"
            ),
            failure_config=ray.train.FailureConfig(max_failures=config.cluster.max_failures),
        ),
    )
    result = workers.fit(ray_trainer, run, driver)
    driver.log(f"done: {utils.write_metrics(folders.logs, result)}; checkpoints in {run.folder}")


def check_resources(
    settings: configuration.Cluster, use_gpu: bool, driver: distributed.Worker, spare_cpus: int = 0
) -> bool:
    """Return whether the workers use GPUs, which cluster.resources_per_worker may request.

    If that is null, `cluster.start` has ensured a CPU or GPU for each worker. Ray Train would wait forever, without a
    message, for what no node has. spare_cpus: needed besides the workers'. Raises UsageError if the workers do not fit
    on the nodes and no more nodes are coming.
    """
    if not settings.resources_per_worker:
        return use_gpu
    use_gpu = use_gpu or "GPU" in settings.resources_per_worker
    per_worker = {**settings.resources_per_worker}
    if use_gpu:
        per_worker.setdefault("GPU", 1.0)  # as Ray Train does
    fewest = settings.num_workers[0]
    if not has_room(per_worker, fewest, driver, spare_cpus):
        more = f" and {spare_cpus} more CPU" if spare_cpus else ""
        raise UsageError(
            f"cluster.resources_per_worker = {per_worker}: {fewest} workers{more} are requested, but there is room for "
            f"{count_fitting_workers(per_worker)} on nodes with {available(per_worker)} in total: request less per "
            "worker, lower cluster.num_workers, or use a larger cluster"
        )
    return use_gpu


def has_room(resources: dict[str, float], count: int, driver: distributed.Worker, spare_cpus: int = 0) -> bool:
    """Return whether this many workers with these resources, and spare CPUs, fit on the nodes or on nodes to come."""
    cpus = count * resources.get("CPU", 0) + spare_cpus
    if count_fitting_workers(resources) >= count and ray.cluster_resources().get("CPU", 0) >= cpus - 1e-6:
        if not cluster.enough(ray.available_resources(), {name: count * each for name, each in resources.items()}):
            driver.log(f"others are using the cluster; waiting for {count} times {resources}")
        return True
    bundles = [resources] * count + [{"CPU": 1}] * spare_cpus
    return not cluster.OWN_RAY_ENV and cluster.grows(bundles, driver)


def available(resources: dict[str, float]) -> dict[str, float]:
    """Return how much of these resources all nodes have in total."""
    totals = ray.cluster_resources()
    return {name: totals.get(name, 0) for name in resources}


def count_fitting_workers(resources: dict[str, float]) -> int:
    """Count the workers with these resources that fit on the nodes, if nothing else runs there."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # Rounding may leave the quotient slightly below a whole number.
    return sum(min(int(node.get(name, 0) / amount + 1e-6) for name, amount in resources.items()) for node in nodes)


def train_worker(config: dict, run: storage.RayRun, folders: trainer.Folders, worker: distributed.Worker) -> dict:
    """Train on one Ray worker. Every worker runs this."""
    with distributed.fail_together():
        run.check_folder()
    return trainer.train(
        configuration.Config.model_validate(config),
        folders,
        worker,
        load_newest=lambda: run.load_on_all_ranks(worker)[1],
        store=lambda state, metrics: run.report(state, metrics, worker),
        patience_s=run.patience_s,
    )


if __name__ == "__main__":
    script.run_main(main, configuration.name_keys)
