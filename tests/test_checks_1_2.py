"""The checks of lesson 1.2: the stub and plausible wrong answers are told apart from the right one, with help."""

import json
import textwrap
from pathlib import Path

import pytest

from shared import checks
from shared.checks import chapter_1, machinery


def stub(*_):
    raise NotImplementedError


def gradient_bytes(model):
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def bytes_sent(model, world_size):
    return 2 * (world_size - 1) / world_size * gradient_bytes(model)


def samples_of(order, rank, world_size, batch_size, k):
    local = batch_size // world_size
    return order[rank::world_size][k * local : (k + 1) * local]


def cut_in_blocks(order, rank, world_size, batch_size, k):
    local = batch_size // world_size
    batch = order[k * batch_size : (k + 1) * batch_size]
    return batch[rank * local : (rank + 1) * local]


def cut_in_halves(order, rank, world_size, batch_size, k):
    local, part = batch_size // world_size, len(order) // world_size
    return order[rank * part : (rank + 1) * part][k * local : (k + 1) * local]


def batch_per_rank(order, rank, world_size, batch_size, k):
    return order[rank::world_size][k * batch_size : (k + 1) * batch_size]


def counted_from_one(order, rank, world_size, batch_size, k):
    return samples_of(order, rank, world_size, batch_size, k - 1)


@pytest.mark.parametrize(
    ("check", "answer"), [(checks.exercise_1_2a, bytes_sent), (checks.exercise_1_2b, samples_of)]
)  # fmt: skip
def test_right_answer_is_accepted(check, answer):
    assert check(answer, strict=True)


@pytest.mark.parametrize(
    ("check", "answer", "help_in_message"),
    [
        (checks.exercise_1_2a, stub, "not done yet"),
        (checks.exercise_1_2a, lambda model, n: 2 * gradient_bytes(model), "a ring of 2 sends 1 times as many"),
        (checks.exercise_1_2a, lambda model, n: (n - 1) / n * gradient_bytes(model), "a ring of 2 sends 1 times"),
        (
            checks.exercise_1_2a,
            lambda model, n: (n - 1) * gradient_bytes(model),
            "a ring of 4 sends 1.5 times as many. Yours is what rank 0 sends in the naive way",
        ),
        (
            checks.exercise_1_2a,
            lambda model, n: 2 * (n - 1) / n * 4 * sum(p.numel() for p in model.parameters()),
            "for an MLP in float64",
        ),
        (
            checks.exercise_1_2a,
            lambda model, n: 2 * (n - 1) / n * sum(p.nbytes for p in model.parameters()),
            "A frozen parameter has no gradient",
        ),
        (
            checks.exercise_1_2a,
            lambda model, n: 2 * (n - 1) / n * sum(p.numel() for p in model.parameters() if p.requires_grad),
            "That counts the numbers",
        ),
        (checks.exercise_1_2a, lambda model, n: None, "should be a number"),
        (
            checks.exercise_1_2a,
            lambda model, n: sum(p.grad.nbytes for p in model.parameters()),
            "has not been through backward",
        ),
        (
            checks.exercise_1_2a,
            lambda model, n: sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
            "every `.grad` is None",
        ),
        (checks.exercise_1_2b, stub, "not done yet"),
        (checks.exercise_1_2b, cut_in_blocks, "from the order or the batch: deal in turn"),
        (checks.exercise_1_2b, cut_in_halves, "from the order or the batch: deal in turn"),
        (checks.exercise_1_2b, batch_per_rank, "a full batch of 8 is 4 samples"),
        (checks.exercise_1_2b, counted_from_one, "The first one is k = 0"),
        (checks.exercise_1_2b, lambda order, *_: None, "return a list"),
    ],
)
def test_wrong_answer_is_rejected_with_help(check, answer, help_in_message, capsys):
    assert check(answer) is False
    assert help_in_message in capsys.readouterr().out
    with pytest.raises(AssertionError):
        check(answer, strict=True)


def exercise_file(folder, body):
    path = folder / "exercise.py"
    head = "import torch\nimport torch.distributed as dist\n\n\ndef global_accuracy(hits, samples):\n"
    path.write_text(head + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def test_global_accuracy_accepts_the_right_answer(tmp_path):
    body = """
        counts = torch.tensor([hits, samples])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()
    """
    assert checks.exercise_1_2c(exercise_file(tmp_path, body), strict=True)


@pytest.mark.parametrize(
    ("body", "help_in_message"),
    [
        ("raise NotImplementedError", "not done yet"),
        (
            """
            accuracy = torch.tensor(hits / samples)
            dist.all_reduce(accuracy)
            return accuracy.item() / dist.get_world_size()
            """,
            "mean of the ranks' accuracies",
        ),
        (
            """
            counts = torch.tensor([hits, samples])
            dist.reduce(counts, dst=0)
            return counts[0] / counts[1] if dist.get_rank() == 0 else hits / samples
            """,
            "The ranks have different answers",
        ),
    ],
)
def test_global_accuracy_rejects_wrong_answers_with_help(body, help_in_message, tmp_path, capsys):
    assert checks.exercise_1_2c(exercise_file(tmp_path, body)) is False
    assert help_in_message in capsys.readouterr().out


def answers_without_ranks(monkeypatch, answers):
    """The check's two ranks answer so, without being started; an answer in words is an error of the script."""

    def run_script(script, nproc, exercise, folder, cases):
        if isinstance(answers, str):
            raise machinery.Wrong(answers)
        for rank, answer in enumerate(answers):
            Path(folder, f"{rank}.json").write_text(json.dumps(answer))

    monkeypatch.setattr(chapter_1, "run_script", run_script)


def test_hits_added_and_samples_not_is_asked_about(tmp_path, monkeypatch, capsys):
    answers_without_ranks(monkeypatch, [[47 / 50, 37 / 4], [47 / 10, 37 / 36]])
    assert checks.exercise_1_2c(exercise_file(tmp_path, "return 0.5")) is False
    assert "Did you add up the samples too" in capsys.readouterr().out


def test_all_reduce_taken_for_its_result_gets_help(tmp_path, monkeypatch, capsys):
    said = "the script failed: [rank0]: TypeError: 'NoneType' object is not subscriptable"
    answers_without_ranks(monkeypatch, said)
    assert checks.exercise_1_2c(exercise_file(tmp_path, "return 0.5")) is False
    assert "`all_reduce` returns nothing: it writes the sum over the tensor" in capsys.readouterr().out


def test_a_rank_that_does_not_call_is_asked_about(tmp_path, monkeypatch, capsys):
    """What two ranks say where one of them reaches no all_reduce."""
    said = "the script failed: [rank0]: RuntimeError: [gloo] Connection closed by peer"
    answers_without_ranks(monkeypatch, f"{said}. This is typically caused by a remote worker crashing. GLHF!")
    assert checks.exercise_1_2c(exercise_file(tmp_path, "return 0.5")) is False
    said = capsys.readouterr().out
    assert "Did every rank call every collective" in said
    assert "Connection closed by peer)" in said
