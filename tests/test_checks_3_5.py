"""The checks of lesson 3.5: the stub and plausible wrong answers are rejected with a message that helps."""

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks, measure


def choose(num_parameters, num_gpus, gpu_bytes, activation_bytes, names=("ddp", "zero-2", "fsdp2"), activations=1):
    for name in names:
        state = measure.predicted_state_bytes(name, "fp32", num_parameters, num_gpus)
        if state + activations * activation_bytes <= gpu_bytes:
            return name


def bytes_sent(strategy, num_parameters, num_gpus, accumulation, passes=None, own=0):
    ring = 4 * num_parameters * (num_gpus - 1 + own) / num_gpus
    return 2 * ring * (passes or 1) if strategy == "ddp" else 3 * ring * (passes or accumulation)


def test_3_4a_accepts(capsys):
    assert_accepts(checks.exercise_3_5a, choose, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("State and activations together", lambda *args: choose(*args, activations=0)),
    ("Take the first that fits", lambda *args: choose(*args, names=("ddp", "fsdp2"))),
    ("is 'ddp', you say 'fsdp2'", lambda *args: choose(*args, names=("fsdp2",))),
    ("you say None. Take the first that fits", lambda *args: None),
    ("is 'DDP'; it should be", lambda *args: "DDP"),
    ("is ('ddp', 1); it should be", lambda *args: ("ddp", 1)),
    ("just fitting is enough", lambda parameters, gpus, memory, more: choose(parameters, gpus, memory - 1, more)),
])  # fmt: skip
def test_3_4a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_5a, answer, because, capsys)


def test_3_4b_accepts(capsys):
    assert_accepts(checks.exercise_3_5b, bytes_sent, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("no_sync: one all-reduce", lambda *args: bytes_sent(*args, passes=args[3])),
    ("It gathers and reduces each time", lambda *args: bytes_sent(*args, passes=1)),
    ("does not send its own part", lambda *args: bytes_sent(*args, own=1)),
    ("two rounds, each of (N-1)/N of all gradients or weights, 4 bytes", lambda *args: bytes_sent(*args) / 4),
    ("Two gathers and a reduce-scatter are", lambda *args: bytes_sent(*args) * (1 if args[0] == "ddp" else 2 / 3)),
    ("should be a number", lambda *args: None),
])  # fmt: skip
def test_3_4b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_5b, answer, because, capsys)
