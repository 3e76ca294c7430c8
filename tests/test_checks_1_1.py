"""The checks of lesson 1.1: right answers pass, the stub and plausible wrong ones are rejected with help."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from answers import assert_accepts, assert_rejects, stub

from shared import checks


@pytest.mark.parametrize("check", [checks.exercise_1_1a, checks.exercise_1_1b, checks.exercise_1_1c])
def test_a_stub_is_not_done_yet(check, capsys):
    assert_rejects(check, stub, "not done yet: replace `raise NotImplementedError`", capsys)


# --- 1.1a: a resume that lacks something -----------------------------------------------------------------------------


def restored(*names: str, more: int = 0) -> Callable:
    """An answer that does what `names` say, in order, and returns the number of finished epochs plus `more`.

    A name is a part to restore, "seed" or "replay", the colleague's substitutes for the generator and the schedule.
    """

    def resume(state, model, optimizer, scheduler):
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for name in names:
            if name == "seed":
                torch.manual_seed(0)
            elif name == "replay":
                for _ in range(state["epochs_done"]):
                    scheduler.step()
            elif name == "random":
                torch.set_rng_state(state["random"])
            else:
                parts[name].load_state_dict(state[name])
        return state["epochs_done"] + more

    return resume


WRONG_1_1a = {
    "the colleague's": (restored("seed", "model", "replay", more=1), "should be 3, since 0, 1 and 2 are done"),
    "nothing returned": (lambda *arguments: None, "resume() returned None"),
    "weights alone": (restored("model"), "no loss is right: step 1"),
    "dropout's generator forgotten": (
        restored("model", "optimizer", "scheduler"),
        "on what dropout draws: is one of them not as it was saved?",
    ),
    "dropout's generator at its start": (
        restored("seed", "model", "optimizer", "scheduler"),
        "on what dropout draws: is one of them not as it was saved?",
    ),
    "weights forgotten": (restored("optimizer", "scheduler", "random"), "It depends on the weights"),
    "optimizer forgotten": (
        restored("model", "scheduler", "random"),
        "1 of 4 losses are right, then they differ: step 2 should have",
    ),
    "optimizer forgotten, schedule replayed": (restored("model", "replay", "random"), "what does Adam remember?"),
    "schedule replayed on the restored rate": (
        restored("model", "optimizer", "replay", "random"),
        "a learning rate of 0.0001 instead of 0.001",
    ),
    "schedule forgotten": (restored("model", "optimizer", "random"), "which epoch does the schedule count?"),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the replay
def test_1_1a_accepts(capsys):
    assert_accepts(checks.exercise_1_1a, restored("model", "optimizer", "scheduler", "random"), capsys)
    assert_accepts(checks.exercise_1_1a, restored("model", "replay", "optimizer", "random"), capsys)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the replay
@pytest.mark.parametrize("what", WRONG_1_1a)
def test_1_1a_rejects(what, capsys):
    assert_rejects(checks.exercise_1_1a, *WRONG_1_1a[what], capsys)


# --- 1.1b: the gradient of a batch in parts --------------------------------------------------------------------------


def accumulated(
    part_loss: Callable, before_part=lambda model: None, after_part=lambda loss: loss.backward()
) -> Callable:
    """An answer that calls backward() for `part_loss(logits, labels, whole batch, number of parts)` of each part."""

    def accumulate(model, images, labels, sizes):
        for part, part_labels in zip(images.split(sizes), labels.split(sizes), strict=True):
            before_part(model)
            after_part(part_loss(model(part), part_labels, len(images), len(sizes)))

    return accumulate


def right_loss(logits, labels, whole, parts):
    return F.cross_entropy(logits, labels, reduction="sum") / whole


RIGHT_1_1b = [
    accumulated(right_loss),
    accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels) * len(labels) / whole),
]
WRONG_1_1b = {
    "means added up": (
        accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels)),
        "with parts of [4, 4, 4] the gradient should be the whole batch's, but it has 3.000 times its length",
    ),
    "a mean of means": (
        accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels) / parts),
        "with parts of [6, 5, 1] the gradient should be the whole batch's",
    ),
    "sums, not divided": (
        accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels, reduction="sum")),
        "it has 12.000 times its length",
    ),
    "zero_grad before each part": (
        accumulated(right_loss, before_part=lambda model: model.zero_grad()),
        "What does backward() add to .grad for each part?",
    ),
    "the whole batch at once": (
        lambda model, images, labels, sizes: F.cross_entropy(model(images), labels).backward(),
        "3 parts, and backward() ran 1 time(s)",
    ),
    "all parts' losses added up first": (
        lambda model, images, labels, sizes: sum(
            F.cross_entropy(model(part), part_labels, reduction="sum") / len(images)
            for part, part_labels in zip(images.split(sizes), labels.split(sizes), strict=True)
        ).backward(),
        "3 parts, and backward() ran 1 time(s)",
    ),
    "backward forgotten": (accumulated(right_loss, after_part=lambda loss: None), "call backward() for every part"),
}


@pytest.mark.parametrize("answer", RIGHT_1_1b)
def test_1_1b_accepts(answer, capsys):
    assert_accepts(checks.exercise_1_1b, answer, capsys)


@pytest.mark.parametrize("what", WRONG_1_1b)
def test_1_1b_rejects(what, capsys):
    assert_rejects(checks.exercise_1_1b, *WRONG_1_1b[what], capsys)


# --- 1.1c: the bytes of a checkpoint ---------------------------------------------------------------------------------


def weight_bytes(model) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


WRONG_1_1c = {
    "without Adam": (weight_bytes, "Adam keeps two more tensors"),
    "one moment": (lambda model: 2 * weight_bytes(model), "Adam keeps two more tensors"),
    "with gradients": (lambda model: 4 * weight_bytes(model), "expected 8,043,867. A checkpoint holds no gradients"),
    "always 4 bytes": (
        lambda model: 12 * sum(p.numel() for p in model.parameters()),
        "A number does not always take 4 bytes",
    ),
    "megabytes": (lambda model: 3 * weight_bytes(model) / 1e6, "Return bytes, not kilobytes or megabytes"),
    "numbers, not bytes": (lambda model: 3 * sum(p.numel() for p in model.parameters()), "how many numbers they are"),
}


def test_1_1c_accepts(capsys):
    assert_accepts(checks.exercise_1_1c, lambda model: 3 * weight_bytes(model), capsys)
    assert_accepts(checks.exercise_1_1c, lambda model: 3 * weight_bytes(model) * 1.005, capsys)


@pytest.mark.parametrize("what", WRONG_1_1c)
def test_1_1c_rejects(what, capsys):
    assert_rejects(checks.exercise_1_1c, *WRONG_1_1c[what], capsys)
