"""Search the hyperparameters that hyperparameters.yaml describes, and write the best configuration to a folder.

    python -m training.tune --out config-best
    python -m training.distributed_training --config-dir config-best
    python -m training.tune --out config-best --run-name SEARCH --resume     continues an interrupted search

A trial is one training in one process, judged by its val_accuracy. The search does not use the test set. It runs as
many trials at a time as the CPUs or GPUs allow with tuning.resources_per_trial.
"""

import json
import logging
import math
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
from shared import checkpoint, distributed
from shared.errors import RunFailed, UsageError
from shared.on_ray import cluster, storage
from shared.running import script
from training import config as configuration
from training import data, distributed_training, trainer
from training.config import Config

STATE_FILE = "state.pt"
OPTIONS_FILE = "search.json"  # what the search was started with
HONORED = ("tuning.resources_per_trial",)  # a resumed search may change it


class Search(storage.RayRun):
    """The folder of a search, with each trial's folder and Tune's experiment state."""

    def open_or_resume(self, resume: bool, worker: distributed.Worker) -> dict | None:
        """As `Run.open_or_resume`. A new search writes what it was started with."""
        state = super().open_or_resume(resume, worker)
        if state is None:
            self.write_file(OPTIONS_FILE, json.dumps(self.options))
        return state

    def list_newest_first(self) -> list[str]:
        """List the paths of Tune's state files, or of the checkpoints of a training run with this name."""
        files, path = storage.file_system(self.folder)
        entries = files.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        prefixes = ("experiment_state", "checkpoint-")
        return sorted((entry.path for entry in entries if entry.base_name.startswith(prefixes)), reverse=True)

    def list_foreign(self) -> list[str]:
        return []  # it looks for all of them itself

    def load_newest(self, worker: distributed.Worker) -> tuple[str | None, dict | None, list[str]]:
        """Return the path of the newest state file, which Tune will read, and what the search was started with.

        Raises ValueError if either is missing or damaged. Tune would start again without a search space.
        """
        paths = self.list_newest_first() if tune.Tuner.can_restore(self.folder) else []
        if not paths:
            return None, None, []
        self.read_json(Path(paths[0]).name)  # Tune writes it over the old one: a driver that was killed may leave half
        return paths[0], {"progress": {"options": self.read_json(OPTIONS_FILE)}}, []

    def read_json(self, name: str) -> dict:
        """Return the content of a file in the folder. Raises ValueError if it is missing or damaged."""
        found = self.read_file(name)
        try:
            return json.loads(found[0] if found else "")
        except ValueError as error:
            problem = f"{self.folder}/{name} is {'damaged' if found else 'missing'}"
            raise ValueError(f"nothing to resume: {problem}; choose a different --run-name") from error

    def check_options(self, path: str, saved: dict, worker: distributed.Worker) -> None:
        """Raise ValueError for a change that would compare trials of two different searches; report the others."""
        for key, value in self.options.items():
            if saved.get(key) != value and key in HONORED:
                worker.log(f"note: {key} {value}; the search was started with {saved.get(key)}")
            elif saved.get(key) != value:
                raise ValueError(
                    f"{self.folder} was started with {key} = {saved.get(key)}, and now it is {value}: change it back, "
                    "or choose a different --run-name"
                )


def main() -> None:
    """Check the configuration, start Ray, search and write the best configuration."""
    parser = configuration.run_parser(__doc__)
    parser.add_argument("--out", required=True, help="write the best configuration to this folder, for --config-dir")
    options, config = configuration.parse_command_line(parser)
    driver = distributed.Worker(label="driver")
    with distributed.fail_together():
        data_folder = data.prepare(
            config.dataset, config.paths.processed_data_dir, config.cluster.num_workers[1], driver.log
        )
        configuration.prepare_to_write(options.out, options.config_dir, may_replace=options.resume)
        folder = config.paths.model_save_dir
        search = Search.named(folder, options.run_name, search_options(config, data_folder))
        search.open_or_resume(options.resume, driver)
    logging.getLogger("ray.tune.analysis").setLevel(logging.ERROR)  # it warns about trials that have not started yet
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # otherwise verbose=0 still prints a table
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Tune would end only the search on Ctrl-C, and then continue
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")  # trials may be short
    script.stop_on_signals(driver, search.resume_hint, clean_up=cluster.stop_at_once)
    resources = config.tuning.resources_per_trial
    use_gpu = cluster.start(1, config.cluster.use_gpu, packages=[shared, training], check_room=not resources)
    if resources and not distributed_training.has_room(resources, 1, driver):
        total = distributed_training.available(resources)
        setting = f"tuning.resources_per_trial = {resources}"
        raise UsageError(f"{setting}: more than any node has; the cluster has {total} in total")
    resources = resources or ({"GPU": 1} if use_gpu else {"CPU": 1})

    trainable = tune.with_resources(make_trial(config.model_dump(mode="json"), data_folder), resources)
    results = build_tuner(config.tuning, config.training.seed, search, options.resume, trainable).fit()
    for result in sorted(results, key=lambda result: -(result.metrics or {}).get("best_accuracy", 0)):
        driver.log(describe(result))
    trained = [result for result in results if failure(result) is None]
    if not trained:
        raise RunFailed(f"every trial failed, the first with: {failure(results[0])}")
    best = max(trained, key=lambda result: result.metrics["best_accuracy"])
    configuration.write(with_values(config, best.config), options.out)
    driver.log(f"the best configuration is in {options.out}: {describe_values(best.config)}; trials in {search.folder}")


def search_options(config: Config, data_folder: str) -> dict:
    """Return the keys that a resumed search compares, with their values: all that decide its result, and HONORED.

    `data` stands for the rows. Each trial has its own training.lr and training.epochs.
    """
    rows, per_trial = {"file", "text_column", "label_column"}, {"lr", "epochs"}
    sections = config.model_dump(mode="json", exclude={
        "paths": True, "cluster": True, "checkpoint": True,
        "dataset": {*rows, "loader_workers"}, "training": {*per_trial, "log_every"},
    })  # fmt: skip
    values = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    return {**values, "data": Path(data_folder).name}


def build_tuner(
    tuning: configuration.Tuning, seed: int, search: Search, resume: bool, trainable: Callable[[dict], None]
) -> tune.Tuner:
    """Build the Tuner of a new search, or restore it: unfinished trials then continue from their last checkpoints."""
    if resume:
        return tune.Tuner.restore(search.folder, trainable, resume_unfinished=True, resume_errored=True)
    return tune.Tuner(
        trainable,
        param_space=search_space(tuning),
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=tuning.num_samples,
            search_alg=BasicVariantGenerator(random_state=seed),  # the same seed draws the same trials
            scheduler=build_scheduler(tuning),
            reuse_actors=True,  # trials reuse processes, which saves half a minute for ten trials
        ),
        run_config=tune.RunConfig(
            name=search.name,
            storage_path=search.storage_path,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            failure_config=tune.FailureConfig(max_failures=1),  # whatever failed; so a trial returns a user's error
        ),
    )


def search_space(tuning: configuration.Tuning) -> dict:
    """Return the distributions that each trial's values are drawn from. The learning rate is log-uniform."""
    return {"lr": tune.loguniform(tuning.lr.lowest, tuning.lr.highest), "epochs": tune.choice(tuning.epochs)}


def build_scheduler(tuning: configuration.Tuning) -> ASHAScheduler | None:
    """Build the scheduler that stops trials early, if the configuration asks for one."""
    if tuning.scheduler == "none":
        return None
    return ASHAScheduler(time_attr="epoch", max_t=max(tuning.epochs), grace_period=tuning.grace_epochs)


def with_values(config: Config, values: dict) -> Config:
    """Return the configuration with a trial's values in its training section."""
    fields = config.model_dump()
    return Config.model_validate({**fields, "training": {**fields["training"], **values}})


def set_lr(text_trainer: trainer.Trainer, lr: float) -> None:
    """Continue as if training had started with this learning rate. A restored checkpoint sets its own."""
    for group in text_trainer.optimizer.param_groups:
        group["lr"] *= lr / group["initial_lr"]
        group["initial_lr"] = lr
    text_trainer.scheduler.base_lrs = [lr]


def assigned_device() -> torch.device:
    """Return the device of a trial: the GPU that Ray has assigned to it, or the CPU.

    Ask Ray, not PyTorch: a trial without a GPU would see all GPUs of its node.
    """
    return torch.device("cuda" if ray.get_runtime_context().get_accelerator_ids().get("GPU") else "cpu")


def make_trial(config_values: dict, data_folder: str) -> Callable[[dict], None]:
    """Return a trainable for Tune: a training in one process that reports accuracy and a checkpoint after each epoch.

    It continues from a checkpoint that Tune provides: its own after a failure, or another trial's in population based
    training. It then uses the trial's learning rate, not the checkpoint's. A UsageError, such as weights that are not
    finite, ends it at once: it would come again. config_values: a dumped Config.
    """

    def trial(values: dict) -> dict | None:
        try:
            train(values)
        except UsageError as error:  # Tune tries again what raises; what a trial returns is its last report
            return {"accuracy": math.nan, "error": str(error)}

    def train(values: dict) -> None:
        torch.set_num_threads(1)
        config = with_values(Config.model_validate({**config_values, "checkpoint": {}}), values)  # saves every epoch
        worker = distributed.Worker(device=assigned_device())
        splits = data.load(config.dataset, data_folder)
        text_trainer = trainer.Trainer(config, splits, worker, lambda *_, **__: None, report)
        if start_checkpoint := tune.get_checkpoint():
            with start_checkpoint.as_directory() as folder:
                text_trainer.restore(checkpoint.load(Path(folder) / STATE_FILE))
            set_lr(text_trainer, config.training.lr)
        text_trainer.join()
        while not text_trainer.finished():
            text_trainer.train_epoch()

    def report(state: dict, metrics: dict) -> None:
        best = max(line["val_accuracy"] for line in state["progress"]["metrics"])
        trial_metrics = {"accuracy": metrics["val_accuracy"], "best_accuracy": best, "epoch": metrics["epoch"]}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_atomically(state, Path(folder) / STATE_FILE)
            tune.report(trial_metrics, checkpoint=tune.Checkpoint.from_directory(folder))

    return trial


def describe_values(values: dict) -> str:
    """Describe the values that were drawn for a trial."""
    return f"lr {values['lr']:.2e}  epochs {values['epochs']:2d}"


def describe(result: tune.Result) -> str:
    """Describe a trial in one line."""
    values = describe_values(result.config)
    if reason := failure(result):
        return f"{values}  failed: {reason}"
    return f"{values}  accuracy {result.metrics['best_accuracy']:.4f}, the best of {result.metrics['epoch']}"


def failure(result: tune.Result) -> str | None:
    """Return why a trial failed, in one line without its traceback; None if it did not fail."""
    reason = (result.metrics or {}).get("error") if result.error is None else str(result.error).strip().splitlines()[-1]
    return reason and reason.replace("--lr", "tuning.lr")


if __name__ == "__main__":
    script.run_main(main, configuration.name_keys)
