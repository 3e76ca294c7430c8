"""The GPT scripts as a user starts them: FSDP2 and every ZeRO stage held to one process, killed, resumed, refused."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from runs import ROOT, Fork, assert_resumes_on_one_worker, refused, refused_here, train

from shared import datasets, measure, models
from shared.distributed import Worker
from shared.running.progress import Progress

DDP = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
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
            "--dataset", "text", script=DDP)[0]
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


def test_fsdp2_computes_what_one_process_computes(one_process, tmp_path):
    """With what is not the default. (The defaults on four ranks, and DDP on two: lesson 3.4.)"""
    options = (*LOCAL, *STEPS, "--precision", "fp64", "--no-reshard-after-forward", "--activation-checkpointing")
    assert_close(train(2, tmp_path, *options, script=FSDP2), one_process["fp64"], 1e-9, "fsdp2", "fp64")


@pytest.mark.parametrize(("stage", "more"), [(0, ()), (3, ("--activation-checkpointing",))])
def test_zero_computes_what_one_process_computes(stage, more, one_process, tmp_path):
    """(Stages 1 and 2: test_stages_1_and_2_compute_the_same_on_any_number_of_ranks, and lesson 3.4.)"""
    metrics = train(2, tmp_path, *LOCAL, *STEPS, "--zero-stage", stage, *more, script=DEEPSPEED)
    assert_close(metrics, one_process["fp32"], 1e-5, f"zero-{stage}", "fp32")


def test_deepspeed_loses_a_worker_skips_a_damaged_checkpoint_and_resumes_on_one_worker(on_cluster, tmp_path):
    """Two workers save inside their epochs of 20 steps. One is killed, and what all do after that is what torchrun's
    two ranks do, bit for bit. Then one worker goes on after the last save but one.

    (FSDP2: lesson 3.3 kills a worker; all/test_fsdp2_resumes.py does the rest.)
    """
    options = ("--seed", 7, "--batch-size", 64, "--epochs", 2, "--max-steps", 40, "--run-name", "run")
    run = Fork(0, tmp_path, *options, "--num-workers", 2, "--save-every-steps", 18, script=DEEPSPEED)
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Fork(2, tmp_path / "undisturbed", *options, *LOCAL, script=DEEPSPEED)
    run.wait_for_epoch(1)
    run.ray_processes("RayTrainWorker")[-1].kill()
    assert undisturbed.finish() == 0, undisturbed.text
    assert run.finish() == 0, run.text
    assert run.text.count("continuing after step 20") == 1, run.text
    measured = ("samples_per_second", "tokens_per_second", "peak_memory_bytes")
    computed = [[{**line, **dict.fromkeys(measured)} for line in each.metrics()] for each in (run, undisturbed)]
    assert computed[0] == computed[1]

    error = refused(0, tmp_path, *options, "--zero-stage", 1, "--resume", script=DEEPSPEED)
    assert "is of --zero-stage 2" in error
    assert_resumes_on_one_worker(run, tmp_path, options, after=36, tolerance=1e-4)  # in float32 another order of sums


@pytest.fixture(scope="module")
def deepspeed_script() -> ModuleType:
    """train_ray_deepspeed.py, imported."""
    spec = importlib.util.spec_from_file_location(DEEPSPEED.stem, DEEPSPEED)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_learning_rate_is_the_epochs_also_where_a_resumed_run_has_another_batch(deepspeed_script):
    """1,280 windows, halved every two epochs: what DeepSpeed counts on is the steps of the batch before."""

    def factor_of(batch_size: int, epoch: int, position: int, step: int) -> Callable[[int], float]:
        progress = Progress(Worker(), 1280, {"lr_step_size": 2}, batch_size=batch_size, epochs=9)
        progress.load_state_dict(progress.state_dict() | {"epoch": epoch, "position": position, "step": step})
        return deepspeed_script.schedule(progress)

    factor = factor_of(64, 0, 0, 0)
    assert [factor(step) for step in (0, 39, 40, 79, 80)] == [1, 1, 0.5, 0.5, 0.25]
    for batch_size, per_epoch in ((128, 10), (32, 40), (64, 20)):
        for position, step in ((0, 40), (640, 50)):
            factor = factor_of(batch_size, 2, position, step)
            rest = 2 * per_epoch - position // batch_size  # until the next halving
            assert [factor(step + more) for more in (0, rest - 1, rest)] == [0.5, 0.5, 0.25]


@pytest.fixture(scope="module")
def sharded_states(tmp_path_factory) -> Path:
    """Checkpoints of four ranks, read again by two and by one."""
    folder = tmp_path_factory.mktemp("states")
    for nproc, action in ((4, "save"), (2, "load"), (1, "load")):
        run = Fork(nproc, folder, action, folder, script=ROOT / "tests/sharded_states.py", trains=False)
        assert run.finish() == 0, run.text
    return folder


def test_every_rank_keeps_what_the_formula_says(sharded_states):
    for name, strategy in (("fsdp2", "fsdp2"), ("zero3", "zero-3"), ("zero2", "zero-2"), ("zero1", "zero-1")):
        four, two, one = (torch.load(sharded_states / f"{name}-{size}.pt")["state_bytes"] for size in (4, 2, 1))
        for world_size, seen in ((4, four), (2, two), (1, one)):
            predicted = measure.predicted_state_bytes(strategy, "fp32", NUM_PARAMETERS, world_size)
            assert seen == pytest.approx(predicted, rel=0.02), (name, world_size)
        # What is cut up halves from two ranks to four: a quarter of it is the difference.
        assert 4 * (two - four) == pytest.approx(NUM_PARAMETERS * measure.STATE_BYTES[strategy, "fp32"][1], rel=0.02)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_compute_the_same_on_any_number_of_ranks(stage, sharded_states):
    """The engine of the script, two steps, whose second loss shows whether the first update was the same."""
    one, two, four = (torch.load(sharded_states / f"zero{stage}-{size}.pt")["losses"] for size in (1, 2, 4))
    assert one[0] != pytest.approx(one[1], rel=1e-3)
    assert one == pytest.approx(two, rel=1e-6) and one == pytest.approx(four, rel=1e-6)


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
    (FSDP2, ["--offload"], "there are no GPUs"),
    (FSDP2, ["--strategy", "ddp"], "'ddp' is not fsdp2; for DDP use train_ray_ddp.py --dataset text"),
    (FSDP2, ["--dataset", "digits"], "invalid choice: 'digits'"),
    (DDP, ["--dataset", "text", "--model", "mlp"], "--model mlp does not train on --dataset text; use gpt"),
    (FSDP2, ["--text-file", __file__, "--preset", "1b"], "bytes; a context of 2048 needs"),
    (FSDP2, ["--model", "resnet18"], "invalid choice: 'resnet18'"),
])  # fmt: skip
def test_bad_input(script, args, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(script, *LOCAL, *args)


def test_text_windows_are_fixed():
    one, other = datasets.text(64), datasets.text(64)
    assert torch.equal(one.train.tensors[0], other.train.tensors[0])
    tokens, targets = one.train.tensors
    assert tokens.shape == targets.shape == (1280, 64) and tokens.max() < 256
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
