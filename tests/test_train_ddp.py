"""train_ddp.py in real processes, compared with one process and with themselves after a kill.

They are started as a user does it (`Run` of runs.py), or forked (`Fork`).
"""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from runs import (
    Fork,
    Run,
    assert_bit_for_bit,
    assert_same_losses,
    assert_same_state,
    refused,
    refused_here,
    train,
)
from small_runs import UNEVEN

from shared.rendezvous import free_port

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


# --- a killed run resumes exactly ----------------------------------------------------------------------------------


EPOCHS, STEPS = 5, 44  # steps an epoch; the MLP's are short, and a kill must fall among them


def options_for_kills(small_mnist: Path) -> tuple:
    """Of an MLP, whose dropout also draws random numbers; a ResNet's rank is killed in lesson 1.4."""
    return (
        "--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 176 // STEPS, "--epochs", EPOCHS,
        "--model", "mlp", "--run-name", "run",
    )  # fmt: skip


def saved_after(epochs: int) -> str:
    return f"checkpoint-{STEPS * epochs:08d}.pt"


@pytest.fixture(scope="module")
def undisturbed(small_mnist, tmp_path_factory):
    """(folder, metrics) of a run that nothing happened to, once for each number of processes."""
    done = {}

    def get(nproc: int):
        if nproc not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            done[nproc] = folder, train(nproc, folder, *options_for_kills(small_mnist))
        return done[nproc]

    return get


def assert_equal_runs(folder: Path, metrics: list[dict], reference: tuple[Path, list[dict]]) -> None:
    assert_bit_for_bit(metrics, reference[1])
    last = "run/" + saved_after(EPOCHS)
    assert_same_state(folder / last, reference[0] / last)


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


def test_one_rank_is_killed_and_torchrun_restarts_all(small_mnist, undisturbed, tmp_path):
    """One of four. (Of two: lesson 1.4, a ResNet, and test_two_nodes_restart_from_the_storage_that_they_share.)"""
    run = Fork(4, tmp_path, *options_for_kills(small_mnist), max_restarts=1)
    run.wait_for(tmp_path / "run", saved_after(1))
    time.sleep(0.15)
    psutil.Process(run.process.pid).children()[-1].kill()
    assert run.finish() == 0, run.text
    assert "resuming from" in run.text
    assert_equal_runs(tmp_path, run.metrics(), undisturbed(4))


def start_nodes(tmp_path: Path, min_nodes: int, options: tuple, *storage: Path) -> list[Run]:
    """One torchrun agent for each storage path, as on hosts of their own; the first one's number 0 is rank 0."""
    port, nodes = free_port(), []
    for number, path in enumerate(storage):
        folder = tmp_path / f"node-{number}"
        folder.mkdir()
        torchrun = {
            "min_nodes": min_nodes, "max_nodes": len(storage), "max_restarts": 2, "run_id": tmp_path.name,
            "rdzv_endpoint": f"127.0.0.1:{port}", "local_addr": f"127.0.0.{number + 1}",
            # The meeting point is on the last node, so that it outlives the first. Agents number themselves by address.
            "rdzv_configs": {"is_host": number == len(storage) - 1, "last_call_timeout": 3, "keep_alive_interval": 1},
            "start_method": "spawn",  # ranks of the other nodes come while this one's are made: see run_rank
        }  # fmt: skip
        nodes.append(Fork(1, folder, *options, "--storage-path", path, **torchrun))
    return nodes


def test_two_nodes_restart_from_the_storage_that_they_share(small_mnist, undisturbed, tmp_path):
    nodes = start_nodes(tmp_path, 2, options_for_kills(small_mnist), tmp_path, tmp_path)
    nodes[0].wait_for(tmp_path / "run", saved_after(2))
    psutil.Process(nodes[1].process.pid).children()[-1].kill()
    for node in nodes:
        assert node.finish() == 0, node.text
    assert "resuming from" in nodes[0].text + nodes[1].text
    (metrics,) = [node.metrics() for node in nodes if node.metrics_file.exists() and node.metrics_file.read_text()]
    assert_equal_runs(tmp_path, metrics, undisturbed(2))


@pytest.mark.parametrize("shared", [True, False])
def test_rank_0s_host_is_lost(shared, small_mnist, tmp_path):
    """The other node becomes rank 0. It goes on from storage that they share, and refuses to begin anew elsewhere."""
    storage = [tmp_path / "here", tmp_path / ("here" if shared else "there")]
    options = options_for_kills(small_mnist)
    nodes = start_nodes(tmp_path, 1, options, *storage)
    nodes[0].wait_for(storage[0] / "run", saved_after(1))
    nodes[0].kill()  # its rank too, which is of the same session
    assert nodes[1].finish() == (0 if shared else 1), nodes[1].text
    if shared:
        assert "resuming from" in nodes[1].text
        assert [line["epoch"] for line in nodes[1].metrics()] == [1, 2, 3, 4, 5]
    else:
        assert re.search(r"error: the checkpoint after step \d+ is not in .*/there/run on", nodes[1].text), nodes[
            1
        ].text
        assert not list((storage[1] / "run").glob("*.pt"))


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


def test_help_is_the_manual(tmp_path):
    run = Fork(0, tmp_path, "--help", trains=False)
    assert run.finish() == 0, run.text
    for option in ("epochs", "max-steps", "save-every-steps", "batch-size", "lr", "seed", "model", "dataset",
                   "data-dir", "precision", "storage-path", "run-name", "resume", "metrics-out"):  # fmt: skip
        assert f"--{option}" in run.text
    assert "torchrun" in run.text
