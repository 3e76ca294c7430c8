"""The checks of lesson 1.3: the stub and plausible wrong answers are told apart from the right one, with help."""

import json
import random
from pathlib import Path

import pytest
import torch

from shared import checks
from shared.checks import chapter_1

LESSON = Path(__file__).parents[1] / "01-ddp-pytorch-only" / "03_distributed_data_parallel.ipynb"


def stub(*_):
    raise NotImplementedError


def local_loss(losses, global_count, world_size):
    return losses.sum() / global_count * world_size


def my_samples(num_samples, world_size, rank, seed, epoch, done):
    return shuffled(num_samples, seed + epoch)[done:][rank::world_size]


def shuffled(num_samples, seed):
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


def padded(num_samples, world_size, rank, seed, epoch, done):
    order = shuffled(num_samples, seed + epoch)
    return (order + order[: -num_samples % world_size])[rank::world_size]


def tail_dropped(num_samples, world_size, rank, seed, epoch, done):
    order = shuffled(num_samples, seed + epoch)
    return order[: num_samples // world_size * world_size][rank::world_size]


def dealt_then_shuffled(num_samples, world_size, rank, seed, epoch, done):
    mine = list(range(num_samples))[rank::world_size]
    random.Random(1000 * seed + epoch).shuffle(mine)
    return mine


def never_stopped(num_samples, world_size, rank, seed, epoch, done):
    return my_samples(num_samples, world_size, rank, seed, epoch, 0)


def dealt_then_cut(num_samples, world_size, rank, seed, epoch, done):
    return my_samples(num_samples, world_size, rank, seed, epoch, 0)[done // world_size :]


def cut_by_the_global_count(num_samples, world_size, rank, seed, epoch, done):
    return my_samples(num_samples, world_size, rank, seed, epoch, 0)[done:]


@pytest.mark.parametrize(
    ("check", "answer"), [(checks.exercise_1_3a, local_loss), (checks.exercise_1_3b, my_samples)]
)  # fmt: skip
def test_right_answer_is_accepted(check, answer):
    assert check(answer, strict=True)


@pytest.mark.parametrize(
    ("check", "answer", "help_in_message"),
    [
        (checks.exercise_1_3a, stub, "not done yet"),
        (
            checks.exercise_1_3a,
            lambda losses, n, world_size: losses.mean(),
            r"7 samples dealt 4 \+ 3.* sum of this rank",
        ),
        (checks.exercise_1_3a, lambda losses, n, world_size: losses.sum() / n, "multiply by it"),
        (checks.exercise_1_3a, lambda losses, n, world_size: losses.sum() / n / world_size, "multiply by it"),
        (
            checks.exercise_1_3a,
            lambda losses, n, world_size: torch.tensor(losses.sum().item() / n * world_size, requires_grad=True),
            "its gradient is not: compute with `losses` itself",
        ),
        (
            checks.exercise_1_3a,
            lambda losses, n, world_size: losses.mean() * len(losses) / n * world_size,
            r"1 samples? dealt 1 \+ 0.* not a number",
        ),
        (
            checks.exercise_1_3a,
            lambda losses, n, world_size: losses.sum().item() / n * world_size,
            "a tensor that backward",
        ),
        (checks.exercise_1_3a, lambda losses, n, world_size: losses / n * world_size, "one number a rank"),
        (
            checks.exercise_1_3a,
            lambda losses, n, world_size: losses.sum() / n * world_size if len(losses) else torch.tensor(0.0),
            r"1 samples dealt 1 \+ 0, rank 1 has tensor\(0\.\)\. The sum of an empty tensor is such a 0",
        ),
        (checks.exercise_1_3b, stub, "not done yet"),
        (checks.exercise_1_3b, lambda n, world_size, rank, seed, epoch, done: None, "a list of sample numbers"),
        (
            checks.exercise_1_3b,
            lambda n, world_size, rank, seed, epoch, done: torch.randperm(n).tolist()[rank::world_size],
            "asked twice",
        ),
        (
            checks.exercise_1_3b,
            lambda n, world_size, rank, seed, epoch, done: shuffled(n, seed + epoch + 100 * rank)[rank::world_size],
            "must not depend on the rank",
        ),
        (
            checks.exercise_1_3b,
            lambda n, world_size, rank, seed, epoch, done: shuffled(n, seed)[rank::world_size],
            "epoch 1 has the same order as epoch 0",
        ),
        (
            checks.exercise_1_3b,
            lambda n, world_size, rank, seed, epoch, done: shuffled(n, seed * epoch)[rank::world_size],
            "seeds 7 and 8 give the same order",
        ),
        (checks.exercise_1_3b, padded, "1 sample.s. go to two ranks: no padding"),
        (checks.exercise_1_3b, tail_dropped, "3 sample.s. go to no rank"),
        (checks.exercise_1_3b, dealt_then_shuffled, "shuffle first, then deal"),
        (checks.exercise_1_3b, never_stopped, "12 of the done ones are dealt again, and 0 others to nobody"),
        (checks.exercise_1_3b, dealt_then_cut, "2 of the done ones are dealt again.* Cut them off the front"),
        (checks.exercise_1_3b, cut_by_the_global_count, "12 others to nobody.* counts the samples of all ranks"),
    ],
)
def test_wrong_answer_gets_help(check, answer, help_in_message):
    with pytest.raises(AssertionError, match=help_in_message):
        check(answer, strict=True)


# --- exercise 1.3c: what the two ranks report -------------------------------------------------------------------------

ORDERS = [shuffled(1280, epoch) for epoch in (0, 1)]
RIGHT = [[True] * 100 + [False] * 28, [True] * 90 + [False] * 37]  # of 128 and 127 images
OWN = [sum(right) / len(right) for right in RIGHT]
ACCURACY = 190 / 255


def reports(accuracies, orders=ORDERS):
    return [
        {"orders": [order[rank::2] for order in orders], "right": RIGHT[rank], "accuracy": accuracies[rank]}
        for rank in range(2)
    ]


def exercise_1_3c(written, monkeypatch):
    """Run the check as if its two ranks had written these reports."""

    def run_script(script, nproc, folder):
        for rank, report in enumerate(written):
            Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))

    monkeypatch.setattr(chapter_1, "run_script", run_script)
    return checks.exercise_1_3c("exercise.py", strict=True)


def test_right_report_is_accepted(monkeypatch):
    assert exercise_1_3c(reports([ACCURACY, ACCURACY]), monkeypatch)


@pytest.mark.parametrize(
    ("written", "help_in_message"),
    [
        (
            reports([ACCURACY, ACCURACY], orders=[ORDERS[0], ORDERS[0]]),
            "call sampler.set_epoch.*accuracy is looked at next",
        ),
        (
            reports([ACCURACY, ACCURACY], orders=[ORDERS[0], ORDERS[1][:-2]]),
            "epoch 1 the two ranks together did not see",
        ),
        (reports(OWN), "rank 0 reports is 0.78125, expected 0.745098. That is the accuracy on this rank's own part"),
        (reports([ACCURACY, OWN[1]]), "rank 1 reports .* this rank's own part"),
        (reports([sum(OWN) / 2] * 2), "the mean of the ranks' accuracies"),
        (reports([ACCURACY * 2] * 2), "divide once"),
        (reports([ACCURACY, ACCURACY])[:1], "rank 1 wrote no report"),
    ],
)
def test_wrong_report_gets_help(written, help_in_message, monkeypatch):
    with pytest.raises(AssertionError, match=help_in_message):
        exercise_1_3c(written, monkeypatch)


def run_lesson_script(changes: dict[str, str], tmp_path: Path, monkeypatch) -> bool:
    """Run the check for real, on the lesson's own script with these changes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two processes, also on a machine with one GPU
    cells = ["".join(cell["source"]) for cell in json.loads(LESSON.read_text())["cells"]]
    (cell,) = (cell for cell in cells if cell.startswith("%%writefile runs/lesson-1-3/exercise.py"))
    script = cell.partition("\n")[2]
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    path = tmp_path / "exercise.py"
    path.write_text(script)
    return checks.exercise_1_3c(path, strict=True)


STUB = 'raise NotImplementedError("mend the two bugs below, then delete this line")'
EPOCH = {"    orders.append([])": "    sampler.set_epoch(epoch)\n    orders.append([])"}
ACCURACY_OF_ALL = "accuracy = distributed.global_sum(right.sum()) / distributed.global_sum(torch.tensor(len(right)))"


def test_script_of_the_lesson_is_a_stub(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="not done yet"):
        run_lesson_script({}, tmp_path, monkeypatch)


def test_mended_script_is_accepted(tmp_path, monkeypatch):
    mended = {STUB: "", **EPOCH, "accuracy = right.sum() / len(right)": ACCURACY_OF_ALL}
    assert run_lesson_script(mended, tmp_path, monkeypatch)


def test_collective_inside_an_if_gets_help(tmp_path, monkeypatch):
    inside = f"accuracy = right.double().mean()\nif worker.rank == 0:\n    {ACCURACY_OF_ALL}"
    with pytest.raises(AssertionError, match="inside an `if`"):
        run_lesson_script({STUB: "", **EPOCH, "accuracy = right.sum() / len(right)": inside}, tmp_path, monkeypatch)
