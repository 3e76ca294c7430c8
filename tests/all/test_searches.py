"""Chapter 4's searches run: killed and resumed, diverging, as a population, and with two workers for each trial."""

import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import training.tune as tuning
from program import EXACT, SMALL, begin, options, reports, result, run
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from runs import LIMIT, ROOT, has_traceback
from training import config as configuration
from training.trainer import Trainer

from checks import chapter_4
from shared import checkpoint, distributed

SYNTHETIC = ("dataset.kind=synthetic", "model.kind=mlp", "dataset.num_samples=200", "training.batch_size=10")
SEARCH = (*EXACT, "tuning.num_samples=4", "tuning.epochs=[2, 6]", "tuning.lr.lowest=1e-3", "tuning.lr.highest=3e-2")


def finished(folder: Path) -> dict[Path, bytes]:
    """The reports of the trials that are on record as finished in Tune's newest note, and whose files are there."""
    found = {}
    for note in sorted(folder.glob("experiment_state-*.json"))[-1:]:
        try:
            trials = [json.loads(trial) for trial, _ in json.loads(note.read_text())["trial_data"]]
        except json.JSONDecodeError:  # it is being written
            break
        for trial in (trial for trial in trials if trial["status"] == "TERMINATED"):
            for path in folder.glob(f"*{trial['trial_id']}*/result.json"):
                if path.read_text().count("\n") == trial["config"]["epochs"]:
                    found[path] = path.read_bytes()
    return found


def test_a_search_is_killed_and_resumed_and_writes_its_winner(program, on_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0.2")
    one_by_one = "tuning.resources_per_trial={CPU: 3}"  # of 4
    searching = [*options(program, "search", *SEARCH, one_by_one), "--out", "best"]
    process, deadline = begin(program, tmp_path, "tune", *searching), time.monotonic() + LIMIT
    folder = tmp_path / "runs/search"
    done = {}
    while not done:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.05)
        if finished(folder):
            process.send_signal(signal.SIGSTOP)  # Tune writes its note in place: let it not be in the middle of it
            time.sleep(0.1)
            done = finished(folder)
            if not done:
                process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGKILL)
    assert process.wait(LIMIT) == -signal.SIGKILL
    assert 1 <= len(done) < 4

    (tmp_path / "output").unlink()
    said = run(program, tmp_path, "tune", *searching, "--resume")
    assert not has_traceback(said) and len([line for line in said.splitlines() if "  accuracy " in line]) == 4
    assert all(path.read_bytes() == before for path, before in done.items())  # not run again
    found = reports(folder)
    assert len(found) == 4
    assert all([row["epoch"] for row in rows][-1] == rows[-1]["config"]["epochs"] for rows in found.values())

    best = max(rows[-1]["best_accuracy"] for rows in found.values())
    written = configuration.load(tmp_path / "best")
    (chosen,) = [rows[-1] for rows in found.values() if rows[-1]["config"]["lr"] == written.training.lr]
    assert chosen["best_accuracy"] == best and chosen["config"]["epochs"] == written.training.epochs
    assert 1e-3 <= written.training.lr <= 3e-2 and written.training.epochs in (2, 6)
    assert written.model.hidden_dim == 8  # and all that was not searched is as it was

    run(program, tmp_path, "distributed_training", "--config-dir", "best", "--run-name", "winner")
    (trial,) = [rows for rows in found.values() if rows[-1]["config"]["lr"] == written.training.lr]
    epochs = result(tmp_path, "winner")["epochs"]
    assert {line["world_size"] for line in epochs} == {2}
    assert [line["val_accuracy"] for line in epochs] == [row["accuracy"] for row in trial]

    too_large = [*options(program, "large", *SEARCH, "tuning.resources_per_trial={CPU: 99}"), "--out", "none"]
    (tmp_path / "output").unlink()
    said = run(program, tmp_path, "tune", *too_large, code=2)
    assert "error: tuning.resources_per_trial = {'CPU': 99.0}: more than any node has;" in said
    assert "the cluster has {'CPU': 4.0} in total" in said


def test_a_users_error_ends_a_trial_at_once(program, on_cluster, tmp_path):
    """Tune would try again what raises, and a training that has diverged diverges again."""
    too_fast = ("tuning.num_samples=1", "tuning.lr.lowest=1e30", "tuning.lr.highest=1e31")
    command = [*options(program, "search", *SYNTHETIC, *too_fast), "--out", "best"]
    said = run(program, tmp_path, "tune", *command, code=1)
    assert "tune.py: failed: every trial failed, the first with: diverged: the loss of step " in said
    assert not has_traceback(said) and not list(tmp_path.glob("runs/search/*/error.txt"))
    ((row,),) = reports(tmp_path / "runs/search").values()
    assert "diverged" in row["error"] and not (tmp_path / "best/environment.yaml").exists()


def test_a_trial_of_two_workers(on_cluster, tmp_path):
    """Lesson 4.2 shows the script, and does not run it."""
    changes = (*SMALL, "tuning.num_samples=1", "tuning.epochs=[2]", "cluster.num_workers=2", "cluster.use_gpu=false")
    command = [sys.executable, ROOT / "04-ray-in-production/tune_over_train.py"]
    command += ["--config-dir", ROOT / "04-ray-in-production/program/config"]
    command += [word for change in changes for word in ("--set", change)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    line, best = [line for line in done.stdout.splitlines() if "  accuracy " in line]
    assert line.endswith("the best of 2  2 workers")
    assert best.endswith("best: " + line.removeprefix("[driver] ").removesuffix("  2 workers"))


def resumable(after_epoch: Callable[[dict, bool, int], None]) -> Callable:
    """Return a trial that reports checkpoints and continues from them.

    It reports as `received` what a checkpoint is worth before it trains on it. after_epoch(values, resumed, epoch)
    is called after each report.
    """

    def trial(values, config, splits):
        extra = {"lr": values["lr"], "received": None}

        def report(state, metrics):
            line = {"accuracy": metrics["val_accuracy"], "epoch": metrics["epoch"], **extra}
            with tempfile.TemporaryDirectory() as folder:
                checkpoint.save_atomically(state, f"{folder}/state.pt")
                tune.report(line, checkpoint=tune.Checkpoint.from_directory(folder))
            extra["received"] = None

        config = tuning.with_values(config, {"lr": values["lr"]})
        trainer = Trainer(config, splits, distributed.Worker(), lambda *_, **__: None, report)
        start = tune.get_checkpoint()
        if start:
            with start.as_directory() as folder:
                trainer.restore(checkpoint.load(f"{folder}/state.pt"))
            tuning.set_lr(trainer, values["lr"])  # the checkpoint has brought its own
            extra["received"] = trainer.evaluate(splits.val)["accuracy"]
        trainer.join()
        while True:
            trainer.train_epoch()
            after_epoch(values, start is not None, trainer.progress.epoch)

    return trial


EPOCHS = 6


@pytest.fixture
def search(on_cluster, tmp_path, monkeypatch) -> Callable:
    """Returns a function that searches from this process, and returns the results and the reports of each trial."""
    monkeypatch.syspath_prepend(ROOT / "04-ray-in-production")
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    searches = importlib.import_module("searches")
    config, splits = searches.load_task(tmp_path, seed=7)

    def search(trial: Callable, space: dict, scheduler: object = None, max_failures: int = 0) -> tuple:
        heard = searches.Reports()
        run_config = tune.RunConfig(
            name="search", storage_path=str(tmp_path), verbose=0, stop={"epoch": EPOCHS}, callbacks=[heard],
            failure_config=tune.FailureConfig(max_failures=max_failures),
        )  # fmt: skip
        trainable = tune.with_resources(tune.with_parameters(trial, config=config, splits=splits), {"CPU": 1})
        how = tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=True, scheduler=scheduler)
        results = tune.Tuner(trainable, param_space=space, tune_config=how, run_config=run_config).fit()
        return results, heard.in_order()

    ray.init(on_cluster, log_to_driver=False, logging_level=logging.ERROR)
    yield search
    ray.shutdown()


def column(rows: list[dict], name: str) -> list:
    return [row[name] for row in rows]


def test_a_population_hands_over_its_checkpoints(search, tmp_path):
    scheduler = PopulationBasedTraining(
        time_attr="epoch", perturbation_interval=2, quantile_fraction=0.25, synch=True, perturbation_factors=(2, 0.5),
        hyperparam_mutations={"lr": tune.loguniform(1e-3, 1e-1)},
    )  # fmt: skip
    rates = [0.0001, 0.0003, 0.001, 0.01]
    _, members = search(resumable(lambda *_: None), {"lr": tune.grid_search(rates)}, scheduler)

    donors = {}
    for line in (tmp_path / "search/pbt_global.txt").read_text().splitlines():
        receiver, donor, *epochs, _, _ = json.loads(line)
        # The trial that reported last is logged one epoch early. Names begin with the trial's number.
        donors[max(epochs), int(receiver.partition("_")[0])] = int(donor.partition("_")[0])
    assert donors
    checked = 0
    for number, rows in enumerate(members):
        assert column(rows, "epoch") == [*range(1, EPOCHS + 1)]
        for row in rows:
            if row["received"] is not None:
                before = row["epoch"] - 1
                assert row["received"] == members[donors.get((before, number), number)][before - 1]["accuracy"]
                checked += (before, number) in donors
    assert checked >= 1


def test_a_trial_that_is_killed_continues_and_one_with_a_bug_ends(search):
    def suffer(values, resumed, epoch):
        if values["fate"] == "is killed" and not resumed and epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if values["fate"] == "has a bug" and epoch >= 2:
            raise KeyError("a bug")

    fates = tune.grid_search(["is killed", "has a bug", "is left alone"])
    results, (killed, bug, undisturbed) = search(resumable(suffer), {"lr": 0.03, "fate": fates}, max_failures=1)
    assert column(killed, "epoch") == column(undisturbed, "epoch") == [*range(1, EPOCHS + 1)]
    assert column(killed, "accuracy") == column(undisturbed, "accuracy")
    assert len(set(column(killed, "pid"))) == 2
    assert results.num_errors == 1 and "KeyError" in str(results.errors[0])
    assert column(bug, "epoch") == [1, 2, 3]


def test_nested_trials_hold_the_cpus_that_their_workers_wait_for():
    """Exercise 4.2a: with two trials that hold a CPU each, or four that hold half a CPU, no trial ends."""
    outcomes = chapter_4.nested_searches(({"CPU": 1}, 2), ({"CPU": 0.5}, 4))
    for outcome, (cpus, trials) in zip(outcomes, ((1.0, 2), (0.5, 4)), strict=True):
        held = [["CREATED", {"CPU": cpus}]] * trials + [["PENDING", {"CPU": 1.0}]] * trials
        assert outcome == {"ended": 0, "stuck": {"free": 0, "reservations": held}}


def test_random_orders_rarely_pass_4_2b_and_orders_by_distance_do(tmp_path, monkeypatch):
    """Exercise 4.2b: an order needs what section 1 has shown, that its good rates range from 0.0365 to 0.175."""
    monkeypatch.syspath_prepend(ROOT / "04-ray-in-production")
    searches = importlib.import_module("searches")
    config, splits = searches.load_task(tmp_path, seed=7)
    rates, last = chapter_4.RATES_4_2B, chapter_4.LAST_EPOCH
    curves = {lr: searches.train(config, splits, lr, 7, last) for lr in rates}

    def passes(order, factor):
        scheduler = ASHAScheduler(time_attr="epoch", max_t=last, grace_period=2, reduction_factor=factor)
        spent = searches.ask_scheduler(scheduler, curves, order)
        if order == rates and factor == 2:
            assert sum(spent.values()) == 116  # as the solution says
        best = max(order, key=lambda lr: max(curves[lr][: spent[lr]]))
        affordable = sum(spent.values()) <= chapter_4.BUDGET_EPOCHS
        return affordable and spent[best] == last and max(curves[best]) >= chapter_4.GOAL

    draw = random.Random(7)
    shuffled = [draw.sample(rates, len(rates)) for _ in range(300)]
    for factor in (2, 3, 4):
        for center in (0.0365, 0.06, 0.09, 0.113, 0.15, 0.175):
            assert passes(sorted(rates, key=lambda lr: max(lr / center, center / lr)), factor), (factor, center)
        assert not passes(rates, factor) and not passes(rates[::-1], factor)
        assert sum(passes(order, factor) for order in shuffled) < 0.12 * len(shuffled)
