"""train_ddp.py in real processes, compared with one process and with themselves after a kill.

They are started as a user does it (`Run` of runs.py), or forked (`Fork`).
"""

import re
import signal
import time

import pytest
import torch
from kills import EPOCHS, STEPS, assert_equal_runs, options_for_kills, saved_after
from runs import (
    Fork,
    Run,
    assert_same_losses,
    refused,
    refused_here,
    train,
)
from small_runs import UNEVEN

# --- N ranks compute what one process computes (more of it: test_small_runs.py) ------------------------------------


def test_a_tail_smaller_than_the_world_size(small_mnist, tmp_path):
    # 176 samples in batches of 87 leave a tail of 2, and the third rank an empty batch.
    options = (*UNEVEN, "--data-dir", small_mnist, "--batch-size", "87", "--epochs", "1")
    (tmp_path / "one").mkdir()
    assert_same_losses(train(0, tmp_path / "one", *options), train(3, tmp_path, *options))


def test_the_digits_at_the_defaults_pass_95_percent(tmp_path):
    """In one process, which takes half the CPU time of two ranks. (What two compute is what one does: lesson 1.4.)"""
    metrics = train(0, tmp_path)
    assert len(metrics) == 5
    assert metrics[-1]["val_accuracy"] > 0.95
    assert {line["samples_seen"] for line in metrics} == {1280}
    assert all(line["samples_per_second"] > 0 for line in metrics)


def test_bf16_trains_with_float32_weights(small_mnist, tmp_path):
    options = (
        "--dataset", "mnist", "--data-dir", small_mnist, "--model", "mlp", "--precision", "bf16", "--run-name", "b",
        "--epochs", "3", "--batch-size", "16",
    )  # fmt: skip
    metrics = train(2, tmp_path, *options)
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    (tmp_path / "fp32").mkdir()
    exact = train(2, tmp_path / "fp32", *options, "--precision", "fp32", "--max-steps", "1")
    # The same weights and dropout to begin with: the first loss differs by bf16's rounding, which has 8 bits.
    one, other = metrics[0]["step_losses"][0], exact[0]["step_losses"][0]
    assert one != other and one == pytest.approx(other, rel=0.02)
    state = torch.load(sorted((tmp_path / "b").iterdir())[-1], weights_only=True)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}


# --- a killed run resumes exactly (a rank that torchrun restarts: lesson 1.4, all/test_torchrun_restarts.py) ---------


@pytest.mark.parametrize(("nproc", "seen", "more"), [
    (0, 0, ()),
    (2, 50, ("--save-every-steps", 5)),  # what is saved in between changes nothing
])  # fmt: skip
def test_the_whole_job_is_killed_and_resumed(nproc, seen, more, small_mnist, undisturbed, tmp_path):
    options = (*options_for_kills(small_mnist), *more)
    run = Run(nproc, tmp_path, *options)
    run.wait_for(tmp_path / "run", f"checkpoint-000000[{seen // 10}-9]?.pt")  # or a later one: two are kept
    time.sleep(0.15)
    ranks = run.descendants()
    run.kill()
    for rank in ranks:  # torchrun's children lead sessions of their own
        rank.kill()
    assert run.finish() == -signal.SIGKILL
    again = Run(nproc, tmp_path, *options, "--resume")
    assert again.finish() == 0, again.text
    assert_equal_runs(tmp_path, again.metrics(), undisturbed(nproc))
    if more:
        assert int(re.search(r"resuming from .*/checkpoint-(\d+).pt", again.text)[1]) >= seen, again.text
        assert [path.name[-6:] for path in sorted((tmp_path / "run").glob("*.pt"))] == ["215.pt", "220.pt"]


def test_a_refused_start_does_not_become_a_restart(small_mnist, tmp_path):
    options = options_for_kills(small_mnist)
    train(0, tmp_path, *options, "--epochs", "1")
    run = Run(2, tmp_path, *options, torchrun=("--max-restarts", "1"))
    assert run.finish() == 1
    assert run.text.count("holds a run already") == 2
    assert [line["epoch"] for line in run.metrics()] == [1]


def test_stopped_in_mid_epoch_and_resumed_at_another_world_size(one_process, small_mnist, tmp_path):
    options = (*UNEVEN, "--data-dir", small_mnist, "--run-name", "run")
    part = train(4, tmp_path, *options, "--max-steps", "6")
    assert [len(line["step_losses"]) for line in part] == [4, 2]
    assert part[-1]["samples_seen"] == 104
    assert_same_losses(one_process, train(2, tmp_path, *options, "--resume"))


@pytest.mark.parametrize(("nproc", "number"), [(0, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGHUP)])
def test_a_signal_ends_the_run_and_names_the_way_on(nproc, number, small_mnist, tmp_path):
    options = [*options_for_kills(small_mnist), "--epochs", "10000"]
    run = Run(nproc, tmp_path, *options)
    run.wait_for(tmp_path / "run", saved_after(1))
    sent = time.monotonic()
    run.process.send_signal(number)  # to torchrun alone, which passes it on
    code = run.finish()
    assert time.monotonic() - sent < 120  # seconds on any machine; what it must not do is go on
    assert code == (128 + number if nproc == 0 else 1)
    said = [line for line in run.text.splitlines() if "stopped by" in line]
    assert len(said) == 1, run.text
    assert f"stopped by {number.name}: {tmp_path / 'run'}" in said[0]
    assert "--run-name run " in said[0] and said[0].endswith("--resume")
    if nproc == 0:
        assert "Traceback" not in run.text


# --- bad input: one message, exit code 2, no hang ------------------------------------------------------------------


def test_a_batch_that_does_not_divide(tmp_path):
    assert "global batch 130 is not divisible by 3 ranks; use 129 or 132" in refused(3, tmp_path, "--batch-size", "130")


@pytest.mark.parametrize("nproc", [0, 2])
def test_usage(nproc, tmp_path):
    assert "invalid choice: 'cats'" in refused(nproc, tmp_path, "--dataset", "cats")
    assert not list(tmp_path.glob("train_ddp*"))


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_storage_path_that_cannot_be_written(nproc, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot write to --storage-path" in refused(nproc, tmp_path, "--storage-path", tmp_path / "file/runs")


def test_damaged_and_foreign_checkpoints(small_mnist, tmp_path):
    options = options_for_kills(small_mnist)
    train(0, tmp_path, *options)
    older, newest = sorted((tmp_path / "run").iterdir())
    here = ("--storage-path", tmp_path, *options)
    assert "holds a run already: add --resume" in refused_here(Run.script, *here)
    assert "is of --model mlp" in refused_here(Run.script, *here, "--resume", "--model", "resnet18")
    complete = newest.read_bytes()
    newest.write_bytes(complete[: len(complete) // 2])
    run = Fork(0, tmp_path, *options, "--resume")
    assert run.finish() == 0, run.text
    assert run.text.count("skipped") == 1
    assert f"skipped {newest.name} (truncated" in run.text
    assert f"resuming from {older}" in run.text
    last_step = EPOCHS * STEPS
    assert newest.read_bytes() == complete or torch.load(newest, weights_only=True)["progress"]["step"] == last_step
    for path in (older, newest):
        path.write_bytes(path.read_bytes()[:1000])
    assert "nothing to resume: no readable checkpoint" in refused_here(Run.script, *here, "--resume")


def test_a_text_that_has_grown_is_refused_and_nothing_is_overwritten(tmp_path):
    text, copy = tmp_path / "text.txt", tmp_path / "copy.txt"
    text.write_bytes(bytes(range(256)) * 100)
    copy.write_bytes(text.read_bytes())
    options = ("--dataset", "text", "--batch-size", 4, "--run-name", "run")
    train(0, tmp_path, *options, "--max-steps", 1, "--text-file", text)
    with text.open("ab") as file:
        file.write(b"one more line")
    before = {path: path.read_bytes() for path in tmp_path.glob("run/checkpoint-*")}
    error = refused(0, tmp_path, *options, "--max-steps", 2, "--text-file", text, "--resume")
    assert "the data have changed since the run was started: resume with the old ones, or begin a new run" in error
    assert {path: path.read_bytes() for path in tmp_path.glob("run/checkpoint-*")} == before != {}
    metrics = train(0, tmp_path, *options, "--max-steps", 2, "--text-file", copy, "--resume")
    assert len(metrics[-1]["step_losses"]) == 2


def test_help_is_the_manual(tmp_path):
    run = Fork(0, tmp_path, "--help", trains=False)
    assert run.finish() == 0, run.text
    for option in ("epochs", "max-steps", "save-every-steps", "batch-size", "lr", "seed", "model", "dataset",
                   "data-dir", "precision", "storage-path", "run-name", "resume", "metrics-out"):  # fmt: skip
        assert f"--{option}" in run.text
    assert "torchrun" in run.text
