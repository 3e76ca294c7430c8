"""Search hyperparameters with trials that are Ray Train runs with several workers each.

    python tune_over_train.py --config-dir program/config --set cluster.num_workers=2

Use it for trials that need more than one process. If a trial fits in one process, `python -m training.tune` is faster,
since it starts no controller and no workers per trial. A trial whose worker dies fails and is not retried.
"""

import os

import ray.train
import training
import training.tune as tuning
from ray import tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from training import config as configuration
from training import data, distributed_training, trainer

import shared
from shared import distributed
from shared.errors import RunFailed
from shared.on_ray import cluster, storage, workers
from shared.running import script


def trial(values: dict, config_values: dict, data_folder: str) -> None:
    """Run one trial: start a trainer and wait for it. config_values: a dumped Config."""
    num_workers = config_values["cluster"]["num_workers"][0]
    ray_trainer = TorchTrainer(
        train_worker,
        train_loop_config={"values": values, "config_values": config_values, "data_folder": data_folder},
        torch_config=workers.NodeTorchConfig(timeout_s=config_values["cluster"]["timeout_s"]),
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=bool(config_values["cluster"]["use_gpu"]),
            resources_per_worker=config_values["cluster"]["resources_per_worker"],
        ),
        run_config=ray.train.RunConfig(
            name=f"trial-{tune.get_context().get_trial_id()}",
            storage_path=config_values["paths"]["model_save_dir"],
            callbacks=[TuneReportCallback()],  # passes rank 0's reports on to Tune
        ),
    )
    ray_trainer.fit()


def train_worker(loop_config: dict) -> None:
    """Train on one worker of a trial. Every worker runs this."""
    base_config = configuration.Config.model_validate(loop_config["config_values"])
    config = tuning.with_values(base_config, loop_config["values"])
    worker = workers.current_worker()

    def report(state: dict, metrics: dict) -> None:
        best = max(line["val_accuracy"] for line in state["progress"]["metrics"])
        trial_metrics = {"accuracy": metrics["val_accuracy"], "best_accuracy": best, "epoch": metrics["epoch"]}
        storage.report(state, {**trial_metrics, "world_size": worker.world_size}, worker)

    splits = data.load(config.dataset, loop_config["data_folder"])
    text_trainer = trainer.Trainer(config, splits, worker, lambda *_, **__: None, report)
    text_trainer.join()
    while not text_trainer.finished():
        text_trainer.train_epoch()


def main() -> None:
    """Start Ray, search and print the results."""
    _, config = configuration.parse_command_line(configuration.parser(__doc__))
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # otherwise verbose=0 still prints a table
    driver, num_workers = distributed.Worker(label="driver"), config.cluster.num_workers[0]
    with distributed.fail_together():
        data_folder = data.prepare(config.dataset, config.paths.processed_data_dir, config.cluster.num_workers[1])
        search = storage.RayRun.named(config.paths.model_save_dir, name=None)
        search.open_or_resume(resume=False, worker=driver)
    # A trial requests a hundredth of a CPU, for which a whole CPU has to be free.
    use_gpu = cluster.start(
        num_workers,
        config.cluster.use_gpu,
        spare_cpus=1,
        packages=[shared, training],
        check_room=not config.cluster.resources_per_worker,
    )
    use_gpu = distributed_training.check_resources(config.cluster, use_gpu, driver, spare_cpus=1)
    config_values = config.model_dump(mode="json")
    config_values["cluster"]["use_gpu"], config_values["paths"]["model_save_dir"] = use_gpu, search.storage_path
    trainable = tune.with_parameters(trial, config_values=config_values, data_folder=data_folder)
    tuner = tune.Tuner(
        # Next to nothing: the trial's workers cannot use what the trial itself holds. Tune refuses {"CPU": 0}.
        tune.with_resources(trainable, {"CPU": 0.01}),
        param_space=tuning.search_space(config.tuning),
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=config.tuning.num_samples,
            scheduler=tuning.build_scheduler(config.tuning),
        ),
        run_config=tune.RunConfig(name=search.name, storage_path=search.storage_path, verbose=0),
    )
    results = tuner.fit()
    for result in results:
        reported = result.metrics or {}
        workers = f"  {reported['world_size']} workers" if "world_size" in reported else ""
        driver.log(tuning.describe(result) + workers)
    if results.num_errors == len(results):
        raise RunFailed(f"every trial failed, the first with: {tuning.failure(results[0])}")
    if results.num_terminated:
        driver.log(f"best: {tuning.describe(results.get_best_result('best_accuracy', 'max'))}")


if __name__ == "__main__":
    script.run_main(main, configuration.name_keys)
