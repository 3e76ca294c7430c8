"""A search whose trials are runs of Ray Train, each with several workers.

    python tune_over_train.py --config-dir program/config --set cluster.num_workers=2

For trials that need more than one process. Where a trial fits into one, `python -m training.tune` is faster: no
controller and no workers have to be started for each. A trial whose worker dies has failed, and is not tried again.
"""

import os

import ray.train
import training
import training.tune as tuning
from ray import tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from training import config as configuration
from training import data, distributed_training, trainer

import shared
from shared import distributed, options, runs, script
from shared.on_ray import cluster, storage, workers


def trial(values: dict, plain: dict, data_folder: str) -> None:
    """What Tune runs: it only starts a trainer, and waits."""
    num_workers = plain["cluster"]["num_workers"][0]
    ray_trainer = TorchTrainer(
        train_worker,
        train_loop_config={"values": values, "plain": plain, "data_folder": data_folder},
        torch_config=TorchConfig(timeout_s=plain["cluster"]["timeout_s"]),
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=bool(plain["cluster"]["use_gpu"]),
            resources_per_worker=plain["cluster"]["resources_per_worker"],
        ),
        run_config=ray.train.RunConfig(
            name=f"trial-{tune.get_context().get_trial_id()}",
            storage_path=plain["paths"]["model_save_dir"],
            callbacks=[TuneReportCallback()],  # rank 0's reports become the trial's
        ),
    )
    ray_trainer.fit()


def train_worker(given: dict) -> None:
    """What each worker of a trial runs."""
    config = tuning.with_values(configuration.Config.model_validate(given["plain"]), given["values"])
    worker = workers.current_worker()

    def report(state: dict, metrics: dict) -> None:
        best = max(line["val_accuracy"] for line in state["progress"]["metrics"])
        told = {"accuracy": metrics["val_accuracy"], "best_accuracy": best, "epoch": metrics["epoch"]}
        storage.report(state, {**told, "world_size": worker.world_size}, worker)

    splits = data.load(config, given["data_folder"])
    one = trainer.Trainer(config, splits, worker, lambda *_, **__: None, report)
    one.join()
    while not one.finished():
        one.train_epoch()


def main() -> None:
    """Start Ray, search, say what was found."""
    _, config = configuration.asked_for(configuration.parser(__doc__))
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # else verbose=0 still prints a table
    driver, num_workers = distributed.Worker(label="driver"), config.cluster.num_workers[0]
    with distributed.fail_together():
        data_folder = data.prepare(config)
    # The hundredth of a CPU that a trial needs costs a whole one.
    use_gpu = cluster.start(num_workers, config.cluster.use_gpu, spare_cpus=1, packages=[shared, training])
    use_gpu = distributed_training.check_resources(config.cluster, use_gpu, driver)
    storage_path = options.path_or_uri(config.paths.model_save_dir)
    plain = config.model_dump(mode="json")
    plain["cluster"]["use_gpu"], plain["paths"]["model_save_dir"] = use_gpu, storage_path
    trainable = tune.with_parameters(trial, plain=plain, data_folder=data_folder)
    tuner = tune.Tuner(
        # Next to nothing: what a trial holds, its workers do not get. {"CPU": 0} is refused.
        tune.with_resources(trainable, {"CPU": 0.01}),
        param_space=tuning.space(config),
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", num_samples=config.tuning.num_samples, scheduler=tuning.scheduler(config)
        ),
        run_config=tune.RunConfig(name=runs.new_name(), storage_path=storage_path, verbose=0),
    )
    results = tuner.fit()
    for result in results:
        workers = f"  {result.metrics['world_size']} workers" if result.metrics else ""
        driver.log(tuning.describe(result) + workers)
    if results.num_terminated:
        driver.log(f"best: {tuning.describe(results.get_best_result('best_accuracy', 'max'))}")


if __name__ == "__main__":
    script.run_main(main)
