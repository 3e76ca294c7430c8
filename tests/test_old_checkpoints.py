"""Today's code on checkpoints of earlier versions (old_checkpoints.py): each kind is read, and its run goes on.

The one exception is the GPT, whose qkv has had its rows by head since: its older runs are refused.
"""

import json
import sys
from pathlib import Path

import old_checkpoints as old
import pytest
import torch
from program import PROGRAM
from runs import ROOT, Fork, refused, train

from shared import checkpoint, tasks
from shared.distributed import Worker
from shared.on_ray import storage
from shared.running import options, runs

READ_SHARDS = """
import json, sys
import torch
sys.path[:0] = sys.argv[2:]
import old_checkpoints as old
import zero
from shared import distributed, sharded
from shared.on_ray import storage

worker = distributed.Worker()
distributed.join_alone(worker.device)
torch.manual_seed(1)  # other weights than those that were saved
for kind in ("fsdp2", "deepspeed"):
    model = old.tiny()
    with torch.no_grad():
        [parameter.normal_() for parameter in model.parameters()]
    path, state, skipped = storage.RayRun(f"{sys.argv[1]}/{kind}").load_newest(worker)
    assert not skipped, skipped
    if kind == "fsdp2":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        sharded.restore_sharded(path, model, optimizer)
        steps = {value["step"].item() for value in optimizer.state.values()}
    else:
        engine = old.engine(model)
        zero.restore_zero(path, engine)
        steps = {engine.global_steps}
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    print(json.dumps({"weights": weights, "steps": sorted(steps), "progress": state["progress"]}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of each kind, written in a process of its own."""
    folder = tmp_path_factory.mktemp("old")
    run = Fork(0, folder, folder, script=ROOT / "tests/old_checkpoints.py", trains=False)
    assert run.finish() == 0, run.text
    return folder


def test_a_run_of_train_ddp_goes_on(folder):
    saved = torch.load(folder / "ddp/checkpoint-00000002.pt", weights_only=True)
    options = ("--run-name", "ddp", "--model", "mlp", "--batch-size", 640, "--epochs", 2, "--resume")
    first, second = train(0, folder, *options)
    assert first == saved["progress"]["metrics"][0]
    assert second["epoch"] == 2 and len(second["step_losses"]) == 2 and second["samples_seen"] == 1280
    newest = torch.load(folder / "ddp/checkpoint-00000004.pt", weights_only=True)
    assert {state["step"].item() for state in newest["optimizer"]["state"].values()} == {4.0}
    assert newest["optimizer"]["param_groups"][0]["lr"] == 0.0005  # halved after the second epoch


def test_a_run_in_ray_s_storage_is_read(folder):
    path, state, skipped = storage.RayRun(str(folder / "ray")).load_newest(Worker())
    assert path.endswith("/checkpoint-00000002-0a1b2c3d") and not skipped
    model = old.digits_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)
    progress = checkpoint.restore(state, model, optimizer, scheduler, Worker())
    assert progress["step"] == 2 and progress["options"]["model"] == "mlp" and scheduler.step_size == 2
    saved = torch.load(folder / "ddp/checkpoint-00000002.pt", weights_only=True)
    assert all(torch.equal(value, saved["model"][name]) for name, value in model.state_dict().items())
    assert all(torch.equal(optimizer.state_dict()["state"][number]["exp_avg"], moments["exp_avg"])
               for number, moments in saved["optimizer"]["state"].items())  # fmt: skip


def test_shards_of_fsdp2_and_deepspeed_are_read(folder, tmp_path):
    """FSDP2's equal those of two steps taken here; DeepSpeed's come as close as its AdamW does.

    (A step moves a weight by 1e-3.)
    """
    script = tmp_path / "read.py"
    script.write_text(READ_SHARDS)
    run = Fork(0, tmp_path, folder, ROOT / "tests", ROOT / "03-fsdp-deepspeed", script=script, trains=False)
    assert run.finish() == 0, run.text
    fsdp2, deepspeed = (json.loads(line) for line in run.text.splitlines() if line.startswith('{"weights"'))
    model = old.tiny()
    old.steps(model, torch.optim.AdamW(model.parameters(), lr=old.LR), width=4)
    for name, value in model.state_dict().items():
        assert torch.equal(torch.tensor(fsdp2["weights"][name]), value)
        assert torch.tensor(deepspeed["weights"][name]) == pytest.approx(value, abs=5e-5)
    assert fsdp2["steps"] == deepspeed["steps"] == [2]
    assert deepspeed["progress"]["options"] == {**fsdp2["progress"]["options"], "zero_stage": 2}


OLDER_GPT = "holds an older GPT, with the rows of qkv in a different order: begin a new run with a different --run-name"


@pytest.mark.parametrize("kind, script", [("fsdp2", "train_ray_fsdp2.py"), ("deepspeed", "train_ray_deepspeed.py")])
def test_an_older_gpt_is_refused_in_one_line_before_a_worker_starts(folder, tmp_path, kind, script):
    """It would load: names and shapes are the same."""
    script = ROOT / "03-fsdp-deepspeed" / script
    words = ("--num-workers", 1, "--batch-size", 640, "--storage-path", folder, "--run-name", kind, "--resume")
    path = folder / kind / "checkpoint-00000002-0a1b2c3d"
    assert refused(0, tmp_path, *words, script=script) == f"{script.name}: error: {path} {OLDER_GPT}"


def test_an_older_gpt_of_train_ddp_is_refused_and_a_newer_one_is_not(tmp_path):
    parser = options.training_parser("A manual.", [tasks.ImageTask, tasks.TextTask])
    text, images = (parser.parse_args(["--dataset", name]) for name in ("text", "digits"))
    before, now = old.GPT_OPTIONS, runs.options_of(text)
    run = runs.Run(tmp_path, now)
    with pytest.raises(ValueError, match=f"^older.pt {OLDER_GPT}$"):
        run.check_options("older.pt", before, Worker())
    run.check_options("newer.pt", now, Worker())
    # Classifiers have no such mark: their older checkpoints stay what they were.
    assert now.keys() - before.keys() == {"qkv_rows"} and "qkv_rows" not in runs.options_of(images)


def test_a_run_of_the_program_goes_on(folder, monkeypatch, capsys):
    from training import local_training

    monkeypatch.setattr("shared.running.script.stop_on_signals", lambda *_, **__: None)  # this process goes on

    changes = ("dataset.kind=synthetic", "dataset.num_samples=200", "model.kind=mlp", "model.hidden_dim=8",
               "training.batch_size=80", "training.epochs=2", f"paths.model_save_dir={folder}",
               f"paths.log_dir={folder}/logs", f"paths.processed_data_dir={folder}/data")  # fmt: skip
    words = [word for change in changes for word in ("--set", change)]
    options = ["--config-dir", str(PROGRAM / "config"), "--run-name", "program", "--resume", *words]
    monkeypatch.setattr(sys, "argv", ["local_training.py", *options])
    local_training.main()
    assert "continuing after step 2" in capsys.readouterr().out
    epochs = json.loads((folder / "logs/program/metrics.json").read_text())["epochs"]
    assert [line["epoch"] for line in epochs] == [1, 2] and epochs[0]["step_losses"] == [2.5, 2.0]
