"""train_ray_deepspeed.py in bf16, with accumulation, on a text of one's own."""

import json

import pytest
from runs import ROOT, train

from shared import measure, models

DEEPSPEED = ROOT / "03-fsdp-deepspeed/train_ray_deepspeed.py"
NUM_PARAMETERS = sum(parameter.numel() for parameter in models.GPT(models.GPT_PRESETS["nano"]).parameters())
OPTIONS = ("--num-workers", 0, "--seed", 7, "--batch-size", 8, "--max-steps", 20, "--epochs", 1)

pytestmark = pytest.mark.usefixtures("no_ray")


def test_bf16_and_accumulation_on_a_text_of_ones_own(tmp_path):
    """Mixed precision halves what ZeRO-1 keeps of the weights; two accumulation steps make one optimizer step.

    Adam's step hardly depends on the gradients' scale. With a large eps it does, and shows a factor that is missing.
    """
    settings = json.loads((ROOT / "03-fsdp-deepspeed/ds_config.json").read_text())
    settings |= {"bf16": {"enabled": True}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    settings |= {"zero_optimization": settings["zero_optimization"] | {"stage": 1}}
    settings |= {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "eps": 0.1}}}
    del settings["gradient_accumulation_steps"]  # a batch of 8 on 2 ranks, in parts of 2
    (tmp_path / "accumulate.json").write_text(json.dumps(settings))
    (tmp_path / "whole.json").write_text(json.dumps(settings | {"train_micro_batch_size_per_gpu": 4}))
    (tmp_path / "text.txt").write_text("A text of one's own. " * 1000)
    options = (*OPTIONS, "--text-file", "text.txt")
    (line,) = train(2, tmp_path, *options, "--ds-config", "accumulate.json", script=DEEPSPEED)
    (whole,) = train(2, tmp_path, *options, "--ds-config", "whole.json", script=DEEPSPEED)
    assert line["step_losses"][-1] < line["step_losses"][0] - 1
    assert line["step_losses"] == pytest.approx(whole["step_losses"], rel=1e-3)
    predicted = measure.predicted_state_bytes("zero-1", "bf16", NUM_PARAMETERS, 2)
    assert line["state_bytes_per_rank"] == pytest.approx(predicted, rel=0.02)


def test_stage_0_in_bf16_takes_the_same_steps_as_stage_1(tmp_path):
    """Stage 0 keeps its float32 copies in another class, which begins with a step of its own: losses differ by 0.03."""
    losses = {}
    for stage in ("0", "1"):
        folder = tmp_path / stage
        folder.mkdir()
        options = (*OPTIONS, "--max-steps", 10, "--precision", "bf16", "--zero-stage", stage)
        (line,) = train(1, folder, *options, script=DEEPSPEED)
        losses[stage] = line["step_losses"]
    assert losses["0"] == pytest.approx(losses["1"], abs=0.01)
