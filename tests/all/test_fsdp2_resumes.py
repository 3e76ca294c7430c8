"""train_ray_fsdp2.py skips a damaged checkpoint and continues on another number of workers."""

import pytest
from runs import ROOT, Fork, assert_resumes_on_one_worker, refused, train

FSDP2 = ROOT / "03-fsdp-deepspeed/train_ray_fsdp2.py"
DEEPSPEED = ROOT / "03-fsdp-deepspeed/train_ray_deepspeed.py"

pytestmark = pytest.mark.usefixtures("no_ray")


def test_a_damaged_checkpoint_is_skipped_and_a_run_resumed_on_one_worker(on_cluster, tmp_path):
    """Two workers save inside their epochs of 20 steps, and one goes on after the last save but one.

    It halves the learning rate after the second epoch, as the schedule of the first two has begun it.
    """
    model = ("--seed", 7, "--batch-size", 64, "--epochs", 3, "--run-name", "run")
    options = (*model, "--precision", "fp64", "--max-steps", 46)
    run = Fork(
        0, tmp_path, *options, "--max-steps", 26, "--num-workers", 2, "--save-every-steps", 12, script=FSDP2
    )  # fmt: skip
    assert run.finish() == 0, run.text
    (tmp_path / "alone").mkdir()
    undisturbed = train(0, tmp_path / "alone", *options, "--num-workers", 0, script=FSDP2)
    assert "was not written by this training script" in refused(0, tmp_path, *model, "--resume", script=DEEPSPEED)
    assert_resumes_on_one_worker(run, tmp_path, options, after=24, tolerance=1e-9, undisturbed=undisturbed)
