"""A run that moves from mesh to mesh on Ray, and to the FSDP2 script and back, computes what one process computes."""

import pytest
from runs import ROOT, Fork, assert_same_losses, refused, train

DDP = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
FSDP2 = ROOT / "03-fsdp-deepspeed/train_ray_fsdp2.py"
DEEPSPEED = ROOT / "03-fsdp-deepspeed/train_ray_deepspeed.py"
MESH = ROOT / "06-beyond-data-parallel/train_ray_mesh.py"

pytestmark = pytest.mark.usefixtures("no_ray")


def test_a_run_moves_from_mesh_to_mesh_and_to_fsdp2_and_back(on_cluster, tmp_path):
    """2 x 2, 1 x 2, one worker of the FSDP2 script, 1 x 4: three steps each, with an epoch's end after the tenth."""
    options = ("--seed", 7, "--batch-size", 128, "--epochs", 2, "--precision", "fp64")
    (tmp_path / "alone").mkdir()
    expected = train(0, tmp_path / "alone", *options, "--max-steps", 12, "--num-workers", 0, "--dataset", "text",
        script=DDP)  # fmt: skip
    stages = (
        (MESH, ("--num-workers", 4, "--tensor-parallel", 2)),
        (MESH, ("--num-workers", 2, "--tensor-parallel", 2)),
        (FSDP2, ("--num-workers", 1)),
        (MESH, ("--num-workers", 4, "--tensor-parallel", 4)),
    )
    for number, (script, words) in enumerate(stages):
        resume = ("--resume",) if number else ()
        more = ("--max-steps", 3 * number + 3, "--run-name", "run", *words, *resume)
        run = Fork(0, tmp_path, *options, *more, script=script)
        assert run.finish() == 0, run.text
        assert (f"continuing after step {3 * number}" in run.text) == (number > 0), run.text
    assert_same_losses(run.metrics(), expected)
    error = refused(0, tmp_path, *options[:-2], "--run-name", "run", "--resume", script=DEEPSPEED)
    assert "was not written by this training script" in error
