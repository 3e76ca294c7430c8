"""Chapter 4's searches: what is drawn, what is written, and what is refused. (Run and killed: all/test_searches.py.)"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import ROOT
from training import config as configuration
from training import tune

from shared.errors import RunFailed, UsageError
from shared.running import lease

SYNTHETIC = ("dataset.kind=synthetic", "model.kind=mlp", "dataset.num_samples=200", "training.batch_size=10")


@pytest.mark.parametrize(("more", "words"), [
    (["--run-name", "taken"], "taken holds a run already: add --resume to continue it"),
    (["--run-name", "new", "--resume"], "nothing to resume"),
    (["--run-name", "trained", "--resume"], "nothing to resume"),
    (["--resume"], "--resume needs the --run-name"),
    (["--set", "tuning.scheduler=hyperband"], "tuning.scheduler = 'hyperband': should be 'none' or 'asha'"),
    (["--set", "tuning.epochs=[]"], r"tuning.epochs = \[\]: should have at least 1 item"),
    (["--set", "tuning.scheduler=asha", "--set", "tuning.epochs=[1]"], "tuning.grace_epochs = 2: asha"),
    (["--out", "kept"], r"--out kept holds a configuration already \(environment.yaml\)"),
])  # fmt: skip
def test_what_a_search_refuses(more, words, tmp_path, monkeypatch):
    (tmp_path / "runs/taken").mkdir(parents=True)
    (tmp_path / "runs/taken/experiment_state-2026-11-23_00-00-00.json").touch()
    (tmp_path / "runs/trained/checkpoint-00000007-abc").mkdir(parents=True)  # of a training run
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/environment.yaml").touch()
    folder = str(ROOT / "04-ray-in-production/program/config")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--config-dir", folder, "--out", "best", *more])
    with pytest.raises(UsageError, match=words):
        tune.main()
    assert (tmp_path / "kept/environment.yaml").read_text() == ""


def test_only_a_resumed_search_writes_its_result_again_and_never_over_what_it_reads(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/environment.yaml").touch()
    configuration.prepare_to_write(str(tmp_path / "best"), str(tmp_path), may_replace=True)
    for config_dir, may_replace in ((tmp_path, False), (tmp_path / "best", True), (tmp_path / "best", False)):
        with pytest.raises(ValueError, match="holds a configuration already"):
            configuration.prepare_to_write(f"{tmp_path}/best/.", str(config_dir), may_replace)


class RayStarted(Exception):
    """Raised in place of starting Ray: nothing was refused until then."""


@pytest.fixture
def search(tmp_path, monkeypatch) -> Callable:
    """Call the program's main as far as the start of Ray, with one more word or change each."""
    (tmp_path / "config").mkdir()
    for file in configuration.SECTIONS_OF_FILE:
        (tmp_path / "config" / file).write_text((ROOT / "04-ray-in-production/program/config" / file).read_text())

    def start(*_: object, **__: object) -> None:
        raise RayStarted

    def search(*words: str) -> None:
        changes = [word if word.startswith("--") else f"--set={word}" for word in (*SYNTHETIC, *words)]
        monkeypatch.setattr(sys, "argv", ["tune.py", "--out", "best", "--run-name", "search", *changes])
        try:
            tune.main()
        finally:
            lease.release()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune.script, "stop_on_signals", lambda *_, **__: None)
    monkeypatch.setattr(tune.cluster, "start", start)
    return search


def interrupt(search: Callable, *words: str, state: str = '{"trial_data": []}') -> Path:
    """Start a search, and leave what Tune would have left in its folder, which is returned."""
    with pytest.raises(RayStarted):
        search(*words)
    (Path("runs/search") / "tuner.pkl").touch()
    (Path("runs/search") / "experiment_state-2026-11-23_00-00-00.json").write_text(state)
    return Path("runs/search")


TEXTS = ("dataset.kind=file", "dataset.file=texts.csv", "model.kind=rnn")


def write_texts(folder: Path, word: str) -> None:
    rows = [f"{word} {number},{'ab'[number % 2]}" for number in range(40)]
    (folder / "texts.csv").write_text("\n".join(["text,label", *rows]))


@pytest.mark.parametrize(("change", "before", "after"), [
    ("tuning.num_samples=3", "10", "3"),
    ("tuning.num_samples=20", "10", "20"),
    ("tuning.lr.highest=0.1", "{'lowest': 0.0001, 'highest': 0.01}", "{'lowest': 0.0001, 'highest': 0.1}"),
    ("tuning.epochs=[5, 10]", "[5, 10, 20]", "[5, 10]"),
    ("tuning.scheduler=asha", "none", "asha"),
    ("tuning.grace_epochs=1", "2", "1"),
    ("model.hidden_dim=8", "64", "8"),
    ("model.dropout=0", "0.3", "0.0"),
    ("dataset.num_samples=300", "200", "300"),
    ("training.seed=8", "7", "8"),
    ("training.batch_size=20", "10", "20"),
    ("training.precision=fp64", "fp32", "fp64"),
    ("training.early_stopping_patience=1", "None", "1"),
])  # fmt: skip
def test_a_resumed_search_keeps_what_decides_its_result(change, before, after, search):
    interrupt(search)
    key = ".".join(change.partition("=")[0].split(".")[:2])
    words = f"was started with {key} = {before}, and now it is {after}: "
    with pytest.raises(UsageError, match=re.escape(words) + "change it back, or choose a different --run-name$"):
        search("--resume", change)
    with pytest.raises(RayStarted):
        search("--resume")  # nothing was lost


def test_a_resumed_search_keeps_its_rows(search, tmp_path):
    write_texts(tmp_path, "good")
    interrupt(search, *TEXTS)
    write_texts(tmp_path, "bad")
    with pytest.raises(UsageError, match=r"was started with data = file-[0-9a-f]{8}, and now it is file-[0-9a-f]{8}: "):
        search("--resume", *TEXTS)
    write_texts(tmp_path, "good")
    (tmp_path / "texts.csv").rename("renamed.csv")
    with pytest.raises(RayStarted):
        search("--resume", *TEXTS, "dataset.file=renamed.csv")  # the same rows


@pytest.mark.parametrize(("change", "words"), [
    ("training.lr=0.5", None),  # each trial has its own
    ("training.epochs=1", None),
    ("training.log_every=1", None),
    ("cluster.num_workers=1", None),
    ("dataset.loader_workers=1", None),
    ("checkpoint.keep_best=1", None),
    ("tuning.resources_per_trial={CPU: 2}",
     "note: tuning.resources_per_trial {'CPU': 2.0}; the search was started with None\n"),
])  # fmt: skip
def test_a_resumed_search_may_change_the_rest(change, words, search, capsys):
    interrupt(search)
    with pytest.raises(RayStarted):
        search("--resume", change)
    said = capsys.readouterr().out
    assert (words in said) if words else ("note:" not in said)


def test_a_folder_that_does_not_say_how_its_search_began(search):
    folder = interrupt(search)
    description = folder / tune.OPTIONS_FILE
    whole = description.read_text()
    description.write_text(whole[:20])
    with pytest.raises(UsageError, match=r"nothing to resume: .*/runs/search/search\.json is damaged; choose a diff"):
        search("--resume")
    description.unlink()  # tune_over_train.py writes none, nor did earlier versions
    with pytest.raises(UsageError, match=r"nothing to resume: .*/runs/search/search\.json is missing; choose a diff"):
        search("--resume")
    description.write_text(whole)
    (folder / "experiment_state-2026-11-23_00-00-00.json").write_text('{"trial_data": [')
    with pytest.raises(UsageError, match=r"nothing to resume: .*/experiment_state-.*\.json is damaged; choose a"):
        search("--resume")


def test_the_defaults_are_the_space_that_was_asked_for():
    config = configuration.load(ROOT / "04-ray-in-production/program/config")
    space = tune.search_space(config.tuning)
    assert (space["lr"].lower, space["lr"].upper) == (1e-4, 1e-2) and space["epochs"].categories == [5, 10, 20]
    assert config.tuning.num_samples == 10


@pytest.mark.parametrize(("given", "device"), [([], "cpu"), (["3"], "cuda")])
def test_a_trial_computes_on_what_ray_has_given_it(given, device, monkeypatch):
    """A trial without a GPU sees those of its node, which are others'."""
    seen, finished = [], Namespace(join=lambda: None, finished=lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: Namespace(get_accelerator_ids=lambda: {"GPU": given}))
    monkeypatch.setattr("ray.tune.get_checkpoint", lambda: None)
    monkeypatch.setattr(tune.trainer, "Trainer", lambda config, splits, worker, *_: seen.append(worker) or finished)
    changes = ("dataset.kind=synthetic", "model.kind=mlp", "dataset.num_samples=100")
    config = configuration.load(ROOT / "04-ray-in-production/program/config", changes)
    tune.make_trial(config.model_dump(mode="json"), "")({"lr": 0.01, "epochs": 1})
    assert [worker.device.type for worker in seen] == [device]


@pytest.mark.parametrize("num_failed", [1, 2])
def test_a_trial_that_failed_before_its_first_report_is_a_line(num_failed, tmp_path, monkeypatch, capsys):
    """What Tune itself knows of such a trial is no number of workers. The other trials still have a winner."""
    monkeypatch.syspath_prepend(ROOT / "04-ray-in-production")
    import tune_over_train

    class Results(list):
        num_errors, num_terminated = num_failed, 2 - num_failed
        errors = [RuntimeError("Traceback ...\nRuntimeError: no such luck")] * num_failed

        def get_best_result(self, *_: str) -> Namespace:
            return self[-1]

    known = {"trial_id": "4f", "config": {"lr": 0.01, "epochs": 2}}
    failed = Namespace(config=known["config"], error=Results.errors[0], metrics=known)
    reported = known | {"best_accuracy": 0.5, "epoch": 2, "world_size": 2}
    found = Results(
        [failed, failed if num_failed == 2 else Namespace(**vars(failed) | {"error": None, "metrics": reported})]
    )
    monkeypatch.setattr(tune_over_train.cluster, "start", lambda *_, **__: False)
    monkeypatch.setattr(tune_over_train.distributed_training, "check_resources", lambda *_, **__: False)
    monkeypatch.setattr(tune_over_train.tune, "with_parameters", lambda trial, **_: trial)
    monkeypatch.setattr(tune_over_train.tune, "Tuner", lambda *_, **__: Namespace(fit=lambda: found))
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")  # as the script sets it
    changes = ("dataset.kind=synthetic", "model.kind=mlp", "cluster.num_workers=2")
    words = [word for change in changes for word in ("--set", change)]
    folder = str(ROOT / "04-ray-in-production/program/config")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tune_over_train.py", "--config-dir", folder, *words])
    if num_failed == 2:
        with pytest.raises(RunFailed, match="every trial failed, the first with: RuntimeError: no such luck"):
            tune_over_train.main()
    else:
        tune_over_train.main()
    line, *others = capsys.readouterr().out.splitlines()
    assert line == "[driver] lr 1.00e-02  epochs  2  failed: RuntimeError: no such luck"
    if num_failed == 1:
        winner = "lr 1.00e-02  epochs  2  accuracy 0.5000, the best of 2"
        assert others == [f"[driver] {winner}  2 workers", f"[driver] best: {winner}"]
