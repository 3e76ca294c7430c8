"""The checks of lesson 3.4: the stub and plausible wrong answers are rejected with a message that helps."""

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks
from shared.checks import chapter_3


def fill_in(settings, global_batch, accumulation, world_size, divide=True, agree=True, keep=True, whole=True):
    micro, rest = divmod(global_batch, accumulation * world_size)
    if divide and rest:
        raise ValueError(f"{global_batch} is not divisible by {accumulation} x {world_size}")
    micro = micro if whole else global_batch / (accumulation * world_size)
    batches = dict(zip(chapter_3.BATCHES, (global_batch, micro, accumulation), strict=True))
    for name, size in batches.items():
        if agree and settings.get(name, size) != size:
            raise ValueError(f"{name} is {settings[name]}, and must be {size}")
    return {**(settings if keep else {}), **batches}


def in_place(settings, *numbers):
    settings.update(fill_in(settings, *numbers))
    return settings


def lacking(settings, *numbers):
    return {name: value for name, value in fill_in(settings, *numbers).items() if name != "train_batch_size"}


def undivided(settings, global_batch, accumulation, world_size):
    return {**fill_in(settings, global_batch, 1, world_size), "gradient_accumulation_steps": accumulation}


def test_3_3a_accepts(capsys):
    assert_accepts(checks.exercise_3_4a, fill_in, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("should return a dict", lambda *call: None),
    ("has changed the settings", in_place),
    ("lacks 'train_batch_size'", lacking),
    ("expected 8. 64 = 8 a rank and part x 4 parts x 2 ranks", undivided),
    ("train_batch_size is 32, expected 64", lambda s, b, a, w: {**fill_in(s, b, a, w), "train_batch_size": b // w}),
    ("is 32.0, expected 32. A whole number: //", lambda *call: fill_in(*call, whole=False)),
    ("keep all other settings", lambda *call: fill_in(*call, keep=False)),
    ("64 is not divisible by 3 parts x 2 ranks", lambda *call: fill_in(*call, divide=False)),
    ("the settings say 32", lambda *call: fill_in(*call, agree=False)),
    ("the settings say 16 a rank", lambda s, *numbers: fill_in({k: s[k] for k in s if "micro" not in k}, *numbers)),
])  # fmt: skip
def test_3_3a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_4a, answer, because, capsys)


def kept_bytes(stage, precision, num_ranks, more_to_come, master_in_fp32=(1, 2, 3), whole_gradients=(0,), weights=(3,)):
    size = 4 if precision == "fp32" else 2
    has_master = stage in master_in_fp32 if precision == "fp32" else True
    whole = stage in whole_gradients or (stage == 1 and more_to_come)
    return (
        size / (num_ranks if stage in weights else 1)
        + size / (1 if whole else num_ranks)
        + (8 + 4 * has_master) / (num_ranks if stage else 1)
    )


def test_3_3b_accepts(capsys):
    assert_accepts(checks.exercise_3_4b, kept_bytes, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("kept_bytes(1, 'fp32', 1, False) is 16, expected 20", lambda *call: kept_bytes(*call, master_in_fp32=())),
    ("kept_bytes(0, 'fp32', 1, False) is 20, expected 16", lambda *call: kept_bytes(*call, master_in_fp32=range(4))),
    ("kept_bytes(1, 'fp32', 2, False) is 14, expected 12", lambda *call: kept_bytes(*call, whole_gradients=(0, 1))),
    ("kept_bytes(1, 'fp32', 2, True) is 12, expected 14", lambda s, p, n, more: kept_bytes(s, p, n, False)),
    ("kept_bytes(2, 'fp32', 2, False) is 10, expected 12", lambda *call: kept_bytes(*call, weights=(2, 3))),
    ("Weights, gradients, master copy, moments: 4 + 4 + 0 + 8", lambda *call: 12),
    ("should be a number", lambda *call: None),
])  # fmt: skip
def test_3_3b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_4b, answer, because, capsys)


def test_3_3c_accepts(capsys):
    assert_accepts(checks.exercise_3_4c, chapter_3.loss_scales, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("one scale a step", lambda *call: None),
    ("the scales are 8, 8, 8, 8, 16, 16", lambda overflows, scale, *rest: [scale] * len(overflows)),
    *(
        (words, lambda *call, fault=fault: chapter_3.loss_scales(*call, fault))
        for fault, words in chapter_3.FAULTS.items()
    ),
])  # fmt: skip
def test_3_3c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_4c, answer, because, capsys)
