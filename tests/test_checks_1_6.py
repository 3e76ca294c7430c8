"""The check of lesson 1.6: a right port passes, and each plausible wrong one is told what its numbers say."""

import json
from pathlib import Path

import pytest
import torch
from answers import assert_accepts, assert_rejects

from shared import checks
from shared.checks import chapter_1

LOSSES = [2.0 - 0.05 * step for step in range(32)]
WEIGHTS = {"layer.weight": torch.arange(4.0)}
RIGHT = {"step_losses": LOSSES, "val_accuracies": [0.5, 0.75], "samples": [1002, 1000], "val_samples": [256, 254]}
LATER = {"layer.weight": torch.arange(4.0) + 0.1}


def changed(step: int, factor: float) -> list[float]:
    """LOSSES, wrong by a factor from a step on, counted from 1."""
    return [loss * (factor if number >= step else 1) for number, loss in enumerate(LOSSES, start=1)]


@pytest.fixture
def port(monkeypatch, tmp_path):
    """port(metrics, weights, printed by rank 1): a script whose two ranks leave these, next to a right alone.py."""

    def make(metrics=RIGHT, weights=WEIGHTS, printed=""):
        def write(folder, metrics, weights):
            Path(folder, "metrics.json").write_text(metrics if isinstance(metrics, str) else json.dumps(metrics))
            torch.save(weights, Path(folder, "model.pt"))

        def run_ranks(script, nproc, folder):
            assert nproc == 2
            if metrics is not None:
                write(folder, metrics, weights)
            return ["epoch 1", printed]

        def run_script(script, nproc, folder):
            assert (Path(script), nproc) == (tmp_path / "alone.py", 1)
            write(folder, {**RIGHT, "samples": [2002], "val_samples": [510]}, WEIGHTS)

        monkeypatch.setattr(chapter_1, "run_ranks", run_ranks)
        monkeypatch.setattr(chapter_1, "run_script", run_script)
        return tmp_path / "ported.py"

    return make


def test_1_6a_accepts(port, capsys):
    assert_accepts(checks.exercise_1_6a, port(), capsys)


WRONG = {
    "a group of one each": ({"samples": [1001]}, {}, "one number per rank, but is [1001]"),
    "all samples on both ranks": ({"samples": [2002, 2002]}, {}, "is [2002, 2002]: both ranks see every sample"),
    "padding": ({"samples": [1002, 1002]}, {}, "samples is [1002, 1002], 2 too many: does your sampler pad"),
    "the last batch dropped": ({"samples": [960, 960]}, {}, "82 too few"),
    "one rank does it all": ({"samples": [2002, 0]}, {}, "the ranks' parts should be equal"),
    "a batch of 64 per rank": ({"step_losses": LOSSES[::2]}, {}, "16 steps, expected 32. BATCH_SIZE is the global"),
    "different samples": ({"step_losses": changed(1, 1.01)}, {"weights": LATER}, "step 1 has the loss 2.020000"),
    "rank 0's loss, too early": ({"step_losses": changed(1, 1.01)}, {"weights": LATER}, "record the mean over BOTH"),
    "no DDP": ({"step_losses": changed(2, 1.03)}, {"weights": LATER}, "every weight get the mean of both"),
    "a factor forgotten": ({"step_losses": changed(2, 1 + 4e-7)}, {"weights": LATER}, "(relative difference 4e-07)"),
    "a factor, asked for": ({"step_losses": changed(2, 1 + 5e-6)}, {"weights": LATER}, "too small by a factor?"),
    "a mean of means": ({"step_losses": changed(17, 1.0001)}, {"weights": LATER}, "Step 16 has 21 and 20 samples"),
    "one order for all epochs": ({"step_losses": changed(17, 1.2)}, {"weights": LATER}, "which order do the samples"),
    "rank 0's own loss": ({"step_losses": changed(1, 1.01)}, {}, "the mean over BOTH ranks' samples?"),
    "validation not counted": ({"val_samples": None}, {}, "val_samples should have one number per rank, but is None"),
    "validation not gathered": ({"val_samples": 255}, {}, "val_samples should have one number per rank, but is 255"),
    "validation not shared": ({"val_samples": [510, 510]}, {}, "val_samples is [510, 510]: both ranks see every"),
    "validation padded": ({"val_samples": [256, 256]}, {}, "val_samples is [256, 256], 2 too many"),
    "rank 0's own accuracy": ({"val_accuracies": [0.25, 0.375]}, {}, "val_accuracy of epoch 1 is 0.25, expected 0.5"),
    "DDP's keys": ({}, {"weights": {"module.layer.weight": torch.arange(4.0)}}, "save the bare model's state"),
    "saved too early": ({}, {"weights": LATER}, "save them after the last step"),
    "both ranks print": ({}, {"printed": "epoch 1\n"}, "rank 1 prints too: 'epoch 1'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_1_6a_rejects(what, port, capsys):
    metrics, rest, because = WRONG[what]
    assert_rejects(checks.exercise_1_6a, port({**RIGHT, **metrics}, **rest), because, capsys)


def test_1_6a_rejects_files_that_are_missing_or_damaged(port, capsys):
    assert_rejects(checks.exercise_1_6a, port(None), "there is no metrics.json", capsys)
    assert_rejects(checks.exercise_1_6a, port("{}{}"), "metrics.json is damaged: does rank 0 alone write it?", capsys)


def test_1_6a_is_not_done_yet(tmp_path, capsys):
    (tmp_path / "ported.py").write_text("raise NotImplementedError  # put alone.py's code here instead, and port it\n")
    assert_rejects(checks.exercise_1_6a, tmp_path / "ported.py", "not done yet", capsys)
