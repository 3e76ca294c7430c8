"""Search the space that hyperparameters.yaml describes, and write the best configuration as a folder.

    python -m training.tune --out config-best
    python -m training.distributed_training --config-dir config-best
    python -m training.tune --out config-best --run-name SEARCH --resume     goes on with a search that was interrupted

A trial is one training in one process, judged by its val_accuracy; the test set is not touched. Trials that run at a
time: as many as there are CPUs, or GPUs, for tuning.resources_per_trial.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator

import shared
import training
from shared import checkpoint, distributed, script
from shared.errors import RunFailed, UsageError
from shared.on_ray import cluster, storage
from training import config as configuration
from training import data, distributed_training, trainer, utils
from training.config import Config

STATE_FILE = "state.pt"


class Search(storage.RayRun):
    """The folder of a search: each trial's folder, and Tune's notes of how far they are."""

    def list_newest_first(self) -> list[str]:
        """Paths of Tune's notes; or of the checkpoints of a training run that has this name."""
        files, path = storage.file_system(self.folder)
        found = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        names = ("experiment_state", "checkpoint-")
        return sorted((each.path for each in found if each.base_name.startswith(names)), reverse=True)

    def load_newest(self, worker: distributed.Worker) -> tuple[str | None, dict | None, list[str]]:
        """The newest note, which Tune itself reads."""
        found = self.list_newest_first() if tune.Tuner.can_restore(self.folder) else []
        return (found[0], {}, []) if found else (None, None, [])


def main() -> None:
    """Check the configuration, start Ray, search, write the winner."""
    parser = configuration.run_parser(__doc__)
    parser.add_argument("--out", required=True, help="folder for the best configuration, for --config-dir")
    options, config = configuration.asked_for(parser)
    driver = distributed.Worker(label="driver")
    args = utils.run_args(config, options, num_workers=1)
    with distributed.fail_together():
        data_folder = data.prepare(config)
        search = Search.from_args(args)
        search.claim(args, driver)
        Path(options.out).mkdir(parents=True, exist_ok=True)  # else hours of work end with an error
    logging.getLogger("ray.tune.analysis").setLevel(logging.ERROR)  # it warns of trials that have not begun yet
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # else verbose=0 still prints a table
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Tune's own takes Ctrl-C for the end of the search, and goes on
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")  # trials may be short
    script.stop_on_signals(driver, search, clean_up=cluster.stop_at_once)
    use_gpu = cluster.start(1, config.cluster.use_gpu, packages=[shared, training])
    resources = config.tuning.resources_per_trial or ({"GPU": 1} if use_gpu else {"CPU": 1})
    if distributed_training.room_for(resources) == 0:
        has = ray.cluster_resources()
        there = {name: has.get(name, 0) for name in resources}
        asked = f"tuning.resources_per_trial = {resources}"
        raise UsageError(f"{asked}: more than a node has, of {there} in all")

    trainable = tune.with_resources(trial_of(config.model_dump(mode="json"), data_folder), resources)
    results = tuner(config, search, options.resume, trainable).fit()
    for result in sorted(results, key=lambda each: -(each.metrics or {}).get("best_accuracy", 0)):
        driver.log(describe(result))
    if results.num_errors == len(results):
        raise RunFailed(f"every trial failed, the first with: {last_line(results.errors[0])}")
    best = results.get_best_result("best_accuracy")
    chosen = with_values(config, best.config)
    configuration.write(chosen, options.out)
    driver.log(f"the best configuration is in {options.out}: {describe_values(best.config)}; trials in {search.folder}")


def tuner(config: Config, search: Search, resume: bool, trainable: Callable[[dict], None]) -> tune.Tuner:
    """What runs the search, or goes on with it: finished trials stay, others go on from their last checkpoint."""
    if resume:
        return tune.Tuner.restore(search.folder, trainable, resume_unfinished=True, resume_errored=True)
    return tune.Tuner(
        trainable,
        param_space=space(config),
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=config.tuning.num_samples,
            search_alg=BasicVariantGenerator(random_state=config.training.seed),  # the same seed draws the same trials
            scheduler=scheduler(config),
            reuse_actors=True,  # a process for each trial at a time, not for each trial: half a minute less for ten
        ),
        run_config=tune.RunConfig(
            name=search.name,
            storage_path=search.storage_path,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            failure_config=tune.FailureConfig(max_failures=1),
        ),
    )


def space(config: Config) -> dict:
    """What is drawn for each trial; of the learning rate each power of ten is as likely as another."""
    lr = config.tuning.lr
    return {"lr": tune.loguniform(lr.lowest, lr.highest), "epochs": tune.choice(config.tuning.epochs)}


def scheduler(config: Config) -> ASHAScheduler | None:
    """What ends trials early, if the configuration asks for it."""
    if config.tuning.scheduler == "none":
        return None
    return ASHAScheduler(time_attr="epoch", max_t=max(config.tuning.epochs), grace_period=config.tuning.grace_epochs)


def with_values(config: Config, values: dict) -> Config:
    """The configuration with a trial's values in its training section."""
    whole = config.model_dump()
    return Config.model_validate({**whole, "training": {**whole["training"], **values}})


def set_lr(one: trainer.Trainer, lr: float) -> None:
    """Go on as if the training had begun with this learning rate: a checkpoint brings its own."""
    for group in one.optimizer.param_groups:
        group["lr"] *= lr / group["initial_lr"]
        group["initial_lr"] = lr
    one.scheduler.base_lrs = [lr]


def given_device() -> torch.device:
    """For a trial: the GPU that Ray has given it, or the CPU.

    Torch is not asked: a trial with a GPU sees that one alone, but one without sees all of its node.
    """
    return torch.device("cuda" if ray.get_runtime_context().get_accelerator_ids().get("GPU") else "cpu")


def trial_of(plain: dict, data_folder: str) -> Callable[[dict], None]:
    """A trainable for Tune: one training in one process, which reports its accuracy and a checkpoint each epoch.

    It goes on from a checkpoint that Tune gives it: its own, after a failure, or another trial's, when a population is
    trained. The learning rate then is the one that the trial was given, not the one in the checkpoint. plain: the
    configuration as plain data.
    """

    def trial(values: dict) -> None:
        torch.set_num_threads(1)
        config = with_values(Config.model_validate({**plain, "checkpoint": {}}), values)  # saves every epoch
        worker = distributed.Worker(device=given_device())
        one = trainer.Trainer(config, data.load(config, data_folder), worker, lambda *_, **__: None, report)
        if given := tune.get_checkpoint():
            with given.as_directory() as folder:
                one.restore(checkpoint.load(Path(folder) / STATE_FILE))
            set_lr(one, config.training.lr)
        one.join()
        while not one.finished():
            one.train_epoch()

    def report(state: dict, metrics: dict) -> None:
        best = max(line["val_accuracy"] for line in state["progress"]["metrics"])
        told = {"accuracy": metrics["val_accuracy"], "best_accuracy": best, "epoch": metrics["epoch"]}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_atomically(state, Path(folder) / STATE_FILE)
            tune.report(told, checkpoint=tune.Checkpoint.from_directory(folder))

    return trial


def describe_values(values: dict) -> str:
    """What was drawn for a trial."""
    return f"lr {values['lr']:.2e}  epochs {values['epochs']:2d}"


def describe(result: tune.Result) -> str:
    """A trial in one line."""
    drawn = describe_values(result.config)
    if result.error is not None:
        return f"{drawn}  failed: {last_line(result.error)}"
    return f"{drawn}  accuracy {result.metrics['best_accuracy']:.4f}, the best of {result.metrics['epoch']}"


def last_line(error: Exception) -> str:
    """What an error in a trial says, without its traceback."""
    return str(error).strip().splitlines()[-1]


if __name__ == "__main__":
    script.run_main(main)
