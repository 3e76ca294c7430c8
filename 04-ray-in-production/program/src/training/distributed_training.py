"""Train the text classifier on Ray Train, on this machine or on a cluster.

    python -m training.distributed_training
    python -m training.distributed_training --set cluster.num_workers=4
    RAY_ADDRESS=HOST:6379 python -m training.distributed_training --set 'cluster.num_workers=[1, 2]'

It computes what local_training.py computes. A worker that dies is replaced, and the run goes on from its newest
checkpoint; with [FEWEST, MOST] workers also on fewer nodes, and then on more.
"""

from argparse import Namespace
from pathlib import Path

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

import shared
import training
from shared import cli, cluster, distributed, ray_storage
from training import config as configuration
from training import data, trainer, utils


def main() -> None:
    """Check the configuration, claim the run's folder, start Ray, train."""
    options, config = configuration.asked_for(configuration.run_parser(__doc__))
    driver = cluster.Driver()
    fewest, most = config.cluster.num_workers
    place = utils.place(config, options, num_workers=fewest)
    with distributed.fail_together():
        place.data_folder = data.prepare(config)
        run, _ = ray_storage.claim(place, driver)
    storage_path, name = run.place
    place.log_folder = str(Path(config.paths.log_dir, name).absolute())
    cli.stop_on_signals(driver, run, clean_up=cluster.stop_at_once)
    cluster.start(place, packages=[shared, training])
    check_resources(config.cluster, place, driver)

    ray_trainer = TorchTrainer(
        cluster.on_workers(train_worker),
        train_loop_config={**vars(place), "config": config.model_dump(mode="json")},
        torch_config=TorchConfig(timeout_s=config.cluster.timeout_s),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(fewest, most) if most > fewest else fewest,
            use_gpu=bool(place.use_gpu),
            resources_per_worker=config.cluster.resources_per_worker,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage_path,
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=config.checkpoint.keep_best, checkpoint_score_attribute="val_accuracy"
            ),
            failure_config=ray.train.FailureConfig(max_failures=config.cluster.max_failures),
        ),
    )
    result = cluster.fit(ray_trainer, run, driver)
    driver.log(f"done: {utils.write_metrics(config, name, result)}; checkpoints in {run.folder}")


def check_resources(asked: configuration.Cluster, place: Namespace, driver: cluster.Driver) -> None:
    """Raises UsageError where the nodes have no room for cluster.resources_per_worker, and no more are to come.

    `cluster.start` has seen to one CPU or GPU for each worker. For more Ray Train would wait for ever, without a word.
    Sets `place.use_gpu` where a worker asks for a GPU.
    """
    if not asked.resources_per_worker:
        return
    place.use_gpu = place.use_gpu or "GPU" in asked.resources_per_worker
    each = {**asked.resources_per_worker}
    if place.use_gpu:
        each.setdefault("GPU", 1.0)  # as Ray Train does
    fewest, room = asked.num_workers[0], room_for(each)
    if room < fewest and (cluster.OWN_ADDRESS or not cluster.grows([each] * fewest, driver)):
        has = ray.cluster_resources()
        there = {name: has.get(name, 0) for name in each}
        raise distributed.UsageError(
            f"cluster.resources_per_worker = {each}: {fewest} workers are asked for, and there is room for {room} on "
            f"nodes with {there} in all: less for each, fewer cluster.num_workers or a larger cluster will do"
        )


def room_for(resources: dict[str, float]) -> int:
    """How many workers with these resources the nodes hold, while nobody else uses them. A worker is on one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # The sum of many small shares may lie a little below what they are shares of.
    return sum(min(int(node.get(name, 0) / amount + 1e-6) for name, amount in resources.items()) for node in nodes)


def train_worker(args: Namespace, worker: distributed.Worker) -> dict:
    """What every worker runs."""
    config = configuration.Config.model_validate(args.config)
    with distributed.fail_together():
        ray_storage.check_folder(args)
    return trainer.train(
        config,
        args,
        worker,
        newest=lambda: ray_storage.newest_state(args, worker)[1],
        store=lambda state, metrics: ray_storage.report(state, metrics, worker),
    )


if __name__ == "__main__":
    cli.run(main)
