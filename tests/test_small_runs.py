"""The six small runs compute what is on record, on any machine; and the script that compares two commits.

(Ray Train with 2 workers: test_train_ray.py, and all/test_train_ray_failures.py, where workers and controller die.)
"""

import re
import shutil
import sys

import pytest
import small_runs
from runs import ROOT, assert_on_record, assert_same_losses, train


def test_one_process(one_process):
    assert_on_record("one process", one_process)


@pytest.mark.parametrize("name", ["torchrun, 2 ranks", "torchrun, 4 ranks", "Ray Train, local mode"])
def test_other_ranks_compute_what_one_process_does(name, one_process, small_mnist, tmp_path):
    """Also in an epoch's last batch, a tail of 20 samples, of which 4 ranks get 5 each."""
    script, ranks, options = small_runs.RUNS[name]
    metrics = train(ranks, tmp_path, *options, *small_runs.input_options(name, small_mnist), script=ROOT / script)
    assert_on_record(name, metrics)
    assert_same_losses(one_process, metrics)
    assert [line["epoch"] for line in metrics] == [1, 2]
    assert {(line["world_size"], line["samples_seen"], len(line["step_losses"])) for line in metrics} == {
        (max(ranks, 1), 176, 4)
    }
    if "Ray" in name:
        assert not list(tmp_path.glob("*/checkpoint-*"))  # local mode stores nothing


def test_fsdp2(small_mnist, tmp_path):
    script, ranks, options = small_runs.RUNS["FSDP2, 2 ranks"]
    inputs = small_runs.input_options("FSDP2, 2 ranks", small_mnist)
    assert_on_record("FSDP2, 2 ranks", train(ranks, tmp_path, *options, *inputs, script=ROOT / script))


def test_a_commit_that_computes_something_else_is_named(tmp_path, monkeypatch, capsys):
    """A checkout in which Adam's moments decay differently: its first step, and so its first two losses, are equal."""
    for name in ("shared", "01-ddp-pytorch-only"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "runs", "data"))
    task = tmp_path / "shared/tasks.py"
    assert task.read_text().count("Adam(model.parameters(), lr=self.args.lr)") == 1
    task.write_text(task.read_text().replace("lr=self.args.lr)", "lr=self.args.lr, betas=(0.9, 0.99))"))
    monkeypatch.setattr(small_runs, "RUNS", {"one process": small_runs.RUNS["one process"]})
    inputs = small_runs.write_inputs(tmp_path / "inputs")
    assert small_runs.compare(str(ROOT), str(tmp_path), inputs, "mlp") == 1
    said = capsys.readouterr().out
    assert said.startswith("one process            epoch 1, step_losses: [")
    one, other = (losses.split(", ") for losses in re.findall(r"\[([^]]*)\]", said))
    assert len(one) == len(other) == 4 and one[0] == other[0] and one[2] != other[2]


def test_equal_metrics_are_told_from_different_ones():
    line = {"epoch": 1, "step_losses": [1.0, 2.0], "val_loss": 0.5, "samples_per_second": 10.0}
    assert small_runs.first_difference([line], [{**line, "samples_per_second": 20.0}]) is None
    assert small_runs.first_difference([line], [{**line, "val_loss": 0.5000000001}]).startswith(
        "epoch 1, val_loss: 0.5"
    )
    assert small_runs.first_difference([line], [line, line]) == "1 and 2 epochs"


@pytest.mark.parametrize(("words", "message"), [
    ([], "give --record, or two commits: OLD NEW"),
    (["HEAD"], "give --record, or two commits: OLD NEW"),
    (["--record", "HEAD"], "give --record, or two commits: OLD NEW"),
    (["no-such-commit", "HEAD"], "small_runs.py: error: "),
])  # fmt: skip
def test_wrong_calls_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["small_runs.py", *words])
    try:
        code = small_runs.main()
    except SystemExit as error:  # argparse's way
        code = error.code
    assert code == 2 and message in capsys.readouterr().err
