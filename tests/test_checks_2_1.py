"""The checks of lesson 2.1: right answers pass, the stub and plausible wrong ones are rejected with help."""

from pathlib import Path

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub
from ray.train import ScalingConfig
from torch.utils.data import DistributedSampler

from shared import checks, sampling


@pytest.mark.parametrize("check", [checks.exercise_2_1a, checks.exercise_2_1b, checks.exercise_2_1c])
def test_a_stub_is_not_done_yet(check, capsys):
    assert_rejects(check, stub, "not done yet", capsys)


# --- 2.1a: the scale of a run ----------------------------------------------------------------------------------------


def plan(num_workers, num_gpus, global_batch):
    batch_size = sampling.local_batch_size(global_batch, num_workers)
    return ScalingConfig(num_workers=num_workers, use_gpu=num_gpus >= num_workers), {"batch_size": batch_size}


def by_any_gpu(num_workers, num_gpus, global_batch):
    return ScalingConfig(num_workers=num_workers, use_gpu=num_gpus > 0), plan(num_workers, num_gpus, global_batch)[1]


def always_two_workers(num_workers, num_gpus, global_batch):
    return ScalingConfig(num_workers=2), plan(num_workers, num_gpus, global_batch)[1]


def global_batch_for_each(num_workers, num_gpus, global_batch):
    return plan(num_workers, num_gpus, 4 * num_workers)[0], {"batch_size": global_batch}


def rounded_down(num_workers, num_gpus, global_batch):
    return ScalingConfig(num_workers=num_workers, use_gpu=num_gpus >= num_workers), {
        "batch_size": global_batch // num_workers
    }


def by_an_assert(num_workers, num_gpus, global_batch):
    assert global_batch % num_workers == 0
    return plan(num_workers, num_gpus, global_batch)


def by_a_text(num_workers, num_gpus, global_batch):
    return plan(num_workers, num_gpus, global_batch) if global_batch % num_workers == 0 else "does not divide"


def test_2_1a_accepts(capsys):
    assert_accepts(checks.exercise_2_1a, plan, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (by_any_gpu, "in plan(4, 2, 128) use_gpu is True, expected False. Each worker takes a GPU of its own"),
    (always_two_workers, "plan(4, 0, 64) asks for 2 workers, expected 4"),
    (global_batch_for_each, "each worker's batch is 64, expected 16. That is the global batch"),
    (lambda *sizes: (plan(*sizes)[0], {"batch_size": sizes[2] / sizes[0]}), "is 16.0: a DataLoader takes an int"),
    (rounded_down, "plan(3, 0, 64) returns {'batch_size': 21}: 64 does not divide by 3, so raise a ValueError"),
    (by_an_assert, "plan(3, 0, 64) fails by an assert: a user's mistake is a ValueError"),
    (by_a_text, "plan(3, 0, 64) returns 'does not divide': 64 does not divide by 3, so raise a ValueError"),
    (lambda *sizes: plan(*sizes)[0], "should return a ScalingConfig and a dict"),
    (lambda *sizes: (plan(*sizes)[0], 16), 'should return a train_loop_config with a "batch_size"; yours is 16'),
])  # fmt: skip
def test_2_1a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_1a, answer, because, capsys)


# --- 2.1b: the epoch's order on any number of workers ----------------------------------------------------------------


def start_epoch(loader, epoch):
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def start_epoch_by_attribute(loader, epoch):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def only_ours(loader, epoch):
    if isinstance(loader.sampler, sampling.UnpaddedDistributedSampler):
        loader.sampler.set_epoch(epoch)


def only_on_several_workers(loader, epoch):
    if getattr(loader.sampler, "num_replicas", 1) > 1:
        loader.sampler.set_epoch(epoch)


@pytest.mark.parametrize("answer", [start_epoch, start_epoch_by_attribute])
def test_2_1b_accepts(answer, capsys):
    assert_accepts(checks.exercise_2_1b, answer, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (lambda loader, epoch: loader.sampler.set_epoch(epoch), "has no attribute 'set_epoch'. Ask first what kind"),
    (lambda loader, epoch: None, "with Ray's own sampler, a DistributedSampler it should be epoch 1, and is 0"),
    (only_ours, "with Ray's own sampler, a DistributedSampler it should be epoch 1, and is 0: call its set_epoch"),
    (only_on_several_workers, "with our own sampler on one worker it should be epoch 1, and is 0"),
])  # fmt: skip
def test_2_1b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_1b, answer, because, capsys)


# --- 2.1c: the best checkpoint ---------------------------------------------------------------------------------------


def weights_in(checkpoint):
    with checkpoint.as_directory() as folder:
        return torch.load(Path(folder) / "model.pt", weights_only=True)


def best_weights(result):
    return weights_in(max(result.best_checkpoints, key=lambda pair: pair[1]["val_accuracy"])[0])


def by_loss(result):
    return weights_in(min(result.best_checkpoints, key=lambda pair: pair[1]["val_loss"])[0])


@pytest.mark.parametrize("answer", [
    best_weights,
    lambda result: weights_in(result.get_best_checkpoint("val_accuracy", "max")),
])  # fmt: skip
def test_2_1c_accepts(answer, capsys):
    assert_accepts(checks.exercise_2_1c, answer, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (lambda result: weights_in(result.checkpoint), "epoch 3, expected those of epoch 2. That is the newest one."),
    (by_loss, "the weights of epoch 3, expected those of epoch 2"),
    (lambda result: weights_in(result.best_checkpoints[0][0]), "the weights of epoch 1, expected those of epoch 2"),
    (lambda result: result.best_checkpoints[1][0], "a state dict; yours is a Checkpoint"),
    (lambda result: None, "a state dict; yours is a NoneType"),
])  # fmt: skip
def test_2_1c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_1c, answer, because, capsys)
