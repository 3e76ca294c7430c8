"""train_ray_mesh.py as a user starts it: every mesh held to one process, killed, resumed, refused."""

import json

import pytest
import torch
from runs import ROOT, Fork, assert_same_losses, refused_here, train

from shared import measure, models

DDP = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
MESH = ROOT / "06-beyond-data-parallel/train_ray_mesh.py"
SHORT_TEXT = ROOT / "tests/short_text.py"
LOCAL = ("--num-workers", 0)
SHORT = (*LOCAL, "--seed", 7, "--batch-size", 24, "--epochs", 2)  # the last batch has 2 windows
SMALL = models.GPT(models.GPT_PRESETS["nano"])
NUM_PARAMETERS = sum(parameter.numel() for parameter in SMALL.parameters())
IN_NORMS = sum(parameter.numel() for name, parameter in SMALL.named_parameters() if "norm" in name)

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> list[dict]:
    """The metrics of six steps in one process, without a process group."""
    folder = tmp_path_factory.mktemp("one")
    return train(0, folder, *SHORT, "--precision", "fp64", "--dataset", "text", DDP, script=SHORT_TEXT)


@pytest.mark.parametrize(("data", "tensor", "options"), [
    (1, 1, ()),
    (2, 1, ("--no-reshard-after-forward",)),
    (1, 2, ("--activation-checkpointing",)),
    (2, 2, ()),
    (1, 4, ()),
    (3, 2, ()),
])  # fmt: skip
def test_a_mesh_computes_what_one_process_computes(data, tensor, options, one_process, tmp_path):
    """In an epoch of 50 windows the last step has 2, and on 3 x 2 none for one of the groups."""
    nproc = data * tensor
    words = (*SHORT, "--precision", "fp64", "--tensor-parallel", tensor, *options)
    metrics = train(nproc if nproc > 1 else 0, tmp_path, *words, MESH, script=SHORT_TEXT)
    assert [len(line["step_losses"]) for line in metrics] == [3, 3]
    assert_same_losses(metrics, one_process)
    assert {line["world_size"] for line in metrics} == {nproc}
    if data < 3:  # nothing is divided evenly by three
        _, per_parameter = measure.STATE_BYTES["fsdp2", "fp64"]
        predicted = ((NUM_PARAMETERS - IN_NORMS) / nproc + IN_NORMS / data) * per_parameter
        assert metrics[-1]["state_bytes_per_rank"] == pytest.approx(predicted, rel=1e-3)
    assert metrics[-1]["peak_memory_bytes"] > metrics[-1]["state_bytes_per_rank"]


def test_bf16_stays_near_one_process(one_process, tmp_path):
    """With recomputation. (A bfloat16 number has 8 bits, and the losses are about 5.)"""
    words = (*SHORT, "--precision", "bf16", "--tensor-parallel", 2, "--activation-checkpointing")
    metrics = train(2, tmp_path, *words, MESH, script=SHORT_TEXT)
    for line, expected in zip(metrics, one_process, strict=True):
        assert line["step_losses"] == pytest.approx(expected["step_losses"], abs=0.05)
        assert line["step_losses"] != pytest.approx(expected["step_losses"], abs=1e-6)


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory) -> dict:
    """What mesh_ranks.py finds."""
    folder = tmp_path_factory.mktemp("four")
    run = Fork(4, folder, folder, script=ROOT / "tests/mesh_ranks.py", trains=False)
    assert run.finish() == 0, run.text
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("mesh", ["4x1", "2x2", "1x4"])
def test_every_gradient_and_every_initial_weight_is_that_of_one_process(mesh, on_four_ranks):
    """AdamW would hide a gradient that is T times too large."""
    found = on_four_ranks["gradients"][mesh]
    assert found["weights"] == 0 and found["gradients"] < 1e-9 and found["smallest"] > 1e-3


def test_building_takes_three_copies_of_the_largest_parameter_whatever_the_number_of_layers(on_four_ranks):
    """On top of the slices, which are a quarter of the model and, of the norms, more."""
    found = on_four_ranks["memory"]
    assert len(found) == 8
    for name, each in found.items():
        assert 1 < each["copies"] < 3.001, name
        assert 0.25 < each["slices"] < 0.2525, name
        assert each["copies"] == found[name.replace(" 2 torch", " 6 torch")]["copies"], name


def test_a_checkpoint_is_the_same_on_another_mesh_in_the_fsdp2_script_and_back(on_four_ranks):
    """Weights and AdamW's moments, bit for bit. (Whole runs: all/test_mesh_resumes.py.)"""
    assert on_four_ranks["resharding"] == {"2x2 1x4": 0, "2x2 fsdp2": 0, "fsdp2 2x2": 0}


def test_a_killed_worker_of_a_tensor_group_is_replaced(on_cluster, tmp_path):
    """Two workers of one tensor group save every fourth step, and one is killed: the losses are one process's."""
    options = ("--seed", 7, "--batch-size", 32, "--epochs", 1, "--max-steps", 14, "--precision", "fp64")
    mesh = ("--num-workers", 2, "--tensor-parallel", 2, "--save-every-steps", 4, "--run-name", "run")
    run = Fork(0, tmp_path, *options, *mesh, script=MESH)
    (tmp_path / "alone").mkdir()
    alone = Fork(0, tmp_path / "alone", *options, *LOCAL, "--dataset", "text", script=DDP)
    run.wait_for(tmp_path / "run", "checkpoint-00000008-*")
    run.ray_processes("RayTrainWorker")[-1].kill()
    assert alone.finish() == 0, alone.text
    assert run.finish() == 0, run.text
    continued = [step for step in (4, 8) if f"continuing after step {step}" in run.text]  # 4: the kill came mid-save
    assert len(continued) == 1, run.text
    assert_same_losses(run.metrics(), alone.metrics())


@pytest.mark.parametrize(("args", "words"), [
    (["--tensor-parallel", 2], "--tensor-parallel 2 does not divide workers (1); possible here: 1"),
    (["--tensor-parallel", 3, "--num-workers", 6],
     "does not divide heads (4), width (128), vocabulary (256), context (64); possible here: 1, 2"),
    (["--tensor-parallel", 8, "--num-workers", 8], "does not divide heads (4); possible here: 1, 2, 4"),
    (["--tensor-parallel", 2, "--num-workers", 4, "--batch-size", 3],
     "global batch 3 is not divisible by 2 tensor groups"),
    (["--tensor-parallel", 0], "--tensor-parallel: '0' is not a whole number above 0"),
])  # fmt: skip
def test_what_t_does_not_divide_is_refused_before_a_worker_starts(args, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("shared.on_ray.cluster.start", lambda *_: pytest.fail("a worker is started"))
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(MESH, *LOCAL, *args)
