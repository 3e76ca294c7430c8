"""Search the space that hyperparameters.yaml describes, and write the best configuration as a folder.

    python -m training.tune --out config-best
    python -m training.distributed_training --config-dir config-best
    python -m training.tune --out config-best --run-name SEARCH --resume     goes on with a search that was interrupted

A trial is one training in one process, judged by its val_accuracy; the test set is not touched. Trials that run at a
time: as many as there are CPUs, or GPUs, for tuning.resources_per_trial.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import shared
import training
from shared import checkpoint, cli, cluster, distributed, runs
from training import config as configuration
from training import data, trainer
from training.config import Config

STATE_FILE = "state.pt"


def main() -> None:
    """Check the configuration, start Ray, search, write the winner."""
    parser = configuration.run_parser(__doc__)
    parser.add_argument("--out", required=True, help="folder for the best configuration, for --config-dir")
    options = parser.parse_args()
    config = configuration.load(options.config_dir, options.changes)
    if options.print_config:
        print(configuration.in_yaml(config), end="")
        return
    driver = cluster.Driver()
    with distributed.fail_together():
        data_folder = data.prepare(config)
        if options.resume and options.run_name is None:
            raise ValueError("--resume needs the --run-name of the search to go on with")
    storage = cli.path_or_uri(config.paths.model_save_dir)
    name = options.run_name or runs.new_name()
    needs = Namespace(num_workers=config.cluster.num_workers[0], use_gpu=config.cluster.use_gpu)
    cluster.start(needs, packages=[shared, training])
    resources = config.tuning.resources_per_trial or ({"GPU": 1} if needs.use_gpu else {"CPU": 1})
    trainable = tune.with_resources(trial_of(config, data_folder), resources)
    if options.resume:
        if not tune.Tuner.can_restore(f"{storage}/{name}"):
            raise distributed.UsageError(f"nothing to resume: no search in {storage}/{name}")
        tuner = tune.Tuner.restore(f"{storage}/{name}", trainable, resume_unfinished=True, resume_errored=True)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space=space(config),
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=config.tuning.num_samples,
                scheduler=scheduler(config),
                reuse_actors=True,  # a process for each trial at a time, not for each trial: half a minute less for ten
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
                failure_config=tune.FailureConfig(max_failures=1),
            ),
        )
    results = tuner.fit()
    for result in sorted(results, key=lambda each: -(each.metrics or {}).get("accuracy", 0)):
        driver.log(describe(result))
    best = with_values(config, results.get_best_result(scope="all").config)
    configuration.write(best, options.out)
    driver.log(
        f"written to {options.out}: lr {best.training.lr:.2e}, epochs {best.training.epochs}; "
        f"trials in {storage}/{name}"
    )


def space(config: Config) -> dict:
    """What is drawn for each trial."""
    lr = config.tuning.lr
    return {"lr": tune.uniform(lr.lowest, lr.highest), "epochs": tune.choice(config.tuning.epochs)}


def scheduler(config: Config) -> ASHAScheduler | None:
    """What ends trials early, if the configuration asks for it."""
    if config.tuning.scheduler == "none":
        return None
    return ASHAScheduler(time_attr="epoch", max_t=max(config.tuning.epochs), grace_period=config.tuning.grace_epochs)


def with_values(config: Config, values: dict) -> Config:
    """The configuration with a trial's values in its training section."""
    whole = config.model_dump()
    return Config.model_validate({**whole, "training": {**whole["training"], **values}})


def trial_of(config: Config, data_folder: str) -> Callable[[dict], None]:
    """A trainable for Tune: one training in one process, which reports its accuracy and a checkpoint each epoch.

    It goes on from a checkpoint that Tune gives it: its own, after a failure, or another trial's, when a population is
    trained. The learning rate then is the one that the trial was given, not the one in the checkpoint.
    """

    def trial(values: dict) -> None:
        torch.set_num_threads(1)
        each_epoch = config.model_copy(update={"checkpoint": configuration.Checkpoint()})
        mine = with_values(each_epoch, values)
        worker = distributed.Worker(
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )  # Ray shows its own
        one = trainer.Trainer(mine, data.load(mine, data_folder), worker, lambda *_, **__: None, report)
        if given := tune.get_checkpoint():
            with given.as_directory() as folder:
                one.restore(checkpoint.load(Path(folder) / STATE_FILE))
            for group in one.optimizer.param_groups:
                group["lr"] *= mine.training.lr / group["initial_lr"]
                group["initial_lr"] = mine.training.lr
            one.scheduler.base_lrs = [mine.training.lr]
        one.join()
        while not one.finished():
            one.train_epoch()

    def report(state: dict, metrics: dict) -> None:
        line = state["progress"]["metrics"][-1]
        told = {"accuracy": line["val_accuracy"], "epoch": line["epoch"], "lr_now": line["lr"]}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_atomically(state, Path(folder) / STATE_FILE)
            tune.report(told, checkpoint=tune.Checkpoint.from_directory(folder))

    return trial


def describe(result: tune.Result) -> str:
    """A trial in one line."""
    metrics, values = result.metrics or {}, result.config
    drawn = f"lr {values['lr']:.2e}  epochs {values['epochs']:2d}"
    if result.error is not None:
        return f"{drawn}  failed: {str(result.error).strip().splitlines()[-1]}"
    return f"{drawn}  accuracy {metrics['accuracy']:.4f} after epoch {metrics['epoch']}"


if __name__ == "__main__":
    cli.run(main)
