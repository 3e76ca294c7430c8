"""The GPT scripts as a user starts them: FSDP2 and every ZeRO stage held to one process, killed, resumed, refused."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from runs import ROOT, TORCHRUN, Run, refused, train

from shared import data, measure, models

FSDP2 = ROOT / "03-fsdp-deepspeed/train_ray_fsdp2.py"
DEEPSPEED = ROOT / "03-fsdp-deepspeed/train_ray_deepspeed.py"
NUM_PARAMETERS = sum(parameter.numel() for parameter in models.GPT(models.GPT_PRESETS["nano"]).parameters())
STEPS = ("--seed", "7", "--batch-size", "8", "--max-steps", "20", "--epochs", "1")
LOCAL = ("--num-workers", "0")

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict:
    """The metrics of 20 steps in one process, unsharded, by precision."""
    return {
        precision: train(0, tmp_path_factory.mktemp("one"), *LOCAL, *STEPS, "--precision", precision,
            "--strategy", "ddp", script=FSDP2)[0]
        for precision in ("fp32", "fp64")
    }  # fmt: skip


def assert_close(metrics: list[dict], expected: dict, tolerance: float, strategy: str, precision: str) -> None:
    (line,) = metrics
    assert len(line["step_losses"]) == 20
    assert line["step_losses"] == pytest.approx(expected["step_losses"], abs=tolerance)
    assert line["val_loss"] == pytest.approx(expected["val_loss"], abs=tolerance)
    predicted = measure.predicted_state_bytes(strategy, precision, NUM_PARAMETERS, line["world_size"])
    assert line["state_bytes_per_rank"] == pytest.approx(predicted, rel=0.02)
    assert line["peak_memory_bytes"] > line["state_bytes_per_rank"]
    assert line["tokens_per_second"] == pytest.approx(64 * line["samples_per_second"])


@pytest.mark.parametrize(("nproc", "strategy", "more"), [
    (2, "ddp", ()), (2, "fsdp2", ("--no-reshard-after-forward", "--activation-checkpointing")), (4, "fsdp2", ()),
])  # fmt: skip
def test_ddp_and_fsdp2_compute_what_one_process_computes(nproc, strategy, more, one_process, tmp_path):
    options = (*LOCAL, *STEPS, "--precision", "fp64", "--strategy", strategy, *more)
    metrics = train(nproc, tmp_path, *options, script=FSDP2)
    if strategy == "fsdp2":
        assert_close(metrics, one_process["fp64"], 1e-9, "fsdp2", "fp64")
    else:
        assert metrics[0]["step_losses"] == pytest.approx(one_process["fp64"]["step_losses"], abs=1e-9)


@pytest.mark.parametrize(("nproc", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 3), (0, 2)])
def test_every_zero_stage_computes_what_one_process_computes(nproc, stage, one_process, tmp_path):
    metrics = train(nproc, tmp_path, *LOCAL, *STEPS, "--zero-stage", stage, script=DEEPSPEED)
    assert_close(metrics, one_process["fp32"], 1e-5, f"zero-{stage}", "fp32")


def test_bf16_and_accumulation(tmp_path):
    """Mixed precision halves what ZeRO-2 keeps of the weights; two accumulation steps make one optimizer step."""
    settings = json.loads((ROOT / "03-fsdp-deepspeed/ds_config.json").read_text()) | {"gradient_accumulation_steps": 2}
    (tmp_path / "accumulate.json").write_text(json.dumps(settings))
    options = (*LOCAL, *STEPS, "--precision", "bf16", "--zero-stage", "1", "--ds-config", tmp_path / "accumulate.json")
    (line,) = train(2, tmp_path, *options, script=DEEPSPEED)
    assert line["step_losses"][-1] < line["step_losses"][0] - 1
    predicted = measure.predicted_state_bytes("zero-1", "bf16", NUM_PARAMETERS, 2)
    assert line["state_bytes_per_rank"] == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("script", [FSDP2, DEEPSPEED])
def test_a_damaged_checkpoint_is_skipped_and_a_run_resumed_by_another_number(script, tmp_path):
    """Two workers save, one goes on from the older checkpoint. (A worker is killed in lessons 3.2 and 3.3.)"""
    options = ("--seed", 7, "--batch-size", 64, "--epochs", 2, "--run-name", "run")
    before = train(0, tmp_path, *options, "--num-workers", 2, script=script)
    damaged = sorted((tmp_path / "run").glob("checkpoint-*"))[-1]
    shard = max(damaged.rglob("*"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    again = Run(0, tmp_path, *options, "--num-workers", 1, "--resume", script=script)
    assert again.finish() == 0, again.text
    assert f"skipped {damaged.name} (truncated" in again.text
    assert "going on after step 20" in again.text
    assert again.metrics()[0]["step_losses"] == before[0]["step_losses"]
    assert again.metrics()[1]["step_losses"] == pytest.approx(before[1]["step_losses"], rel=1e-4)


@pytest.fixture(scope="module")
def sharded_states(tmp_path_factory) -> Path:
    """Checkpoints of four ranks, read again by two and by one."""
    folder = tmp_path_factory.mktemp("states")
    for nproc, action in ((4, "save"), (2, "load"), (1, "load")):
        command = [*TORCHRUN, "--nproc-per-node", str(nproc), ROOT / "tests/sharded_states.py", action, folder]
        subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_saved_by_four_ranks_and_loaded_by_two_and_by_one(name, sharded_states):
    four, *others = (torch.load(sharded_states / f"{name}-{world_size}.pt") for world_size in (4, 2, 1))
    for other in others:
        assert other["weights"].keys() == four["weights"].keys()
        assert all(torch.equal(other["weights"][key], value) for key, value in four["weights"].items())
        assert other["loss"] == pytest.approx(four["loss"], rel=1e-6)


@pytest.mark.parametrize(("script", "args", "words"), [
    (DEEPSPEED, ["--precision", "fp64"], "invalid choice: 'fp64'"),
    (DEEPSPEED, ["--zero-stage", "4"], "invalid choice: 4"),
    (DEEPSPEED, ["--precision", "fp16"], "--precision fp16 needs a GPU"),
    (FSDP2, ["--precision", "fp16"], "invalid choice: 'fp16'"),
    (FSDP2, ["--text-file", "none.txt"], "none.txt"),
    (FSDP2, ["--text-file", __file__, "--preset", "1b"], "bytes; a context of 2048 needs"),
    (FSDP2, ["--model", "resnet18"], "invalid choice: 'resnet18'"),
])  # fmt: skip
def test_bad_input(script, args, words, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert words in refused(0, tmp_path, *LOCAL, *args, script=script)


@pytest.mark.parametrize(("settings", "words"), [
    ({"train_batch_size": 32}, "train_batch_size is 32; --batch-size 64 on 2 workers"),
    ({"zero_optimization": {"stage": 5}}, "ZeRO has the stages 0, 1, 2 and 3, not 5"),
    ({"gradient_accumulation_steps": 3}, "64 is not divisible by 6"),
])  # fmt: skip
def test_contradicting_settings(settings, words, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(json.loads((ROOT / "03-fsdp-deepspeed/ds_config.json").read_text()) | settings))
    assert words in refused(0, tmp_path, "--ds-config", path, script=DEEPSPEED)


def test_text_windows_are_fixed():
    one, other = data.text(64), data.text(64)
    assert torch.equal(one.train.tensors[0], other.train.tensors[0])
    tokens, targets = one.train.tensors
    assert tokens.shape == targets.shape == (1280, 64) and tokens.max() < 256
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
