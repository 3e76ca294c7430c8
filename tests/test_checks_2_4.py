"""The checks of lesson 2.4: the stub and plausible wrong answers are rejected with a message that helps."""

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub

from shared import checks


def kept_reports(scores: list[float], num_to_keep: int, order: str | None) -> list[int]:
    ranking = list(range(len(scores)))
    if order is not None:
        ranking.sort(key=lambda number: scores[number], reverse=order == "min")
    return sorted({*ranking[-num_to_keep:], len(scores) - 1})


def best_only(scores, num_to_keep, order):
    return sorted(range(len(scores)), key=lambda number: scores[number])[-num_to_keep:]


def one_for_the_newest(scores, num_to_keep, order):
    best = sorted(range(len(scores)), key=lambda number: scores[number], reverse=order != "min")
    return sorted({*best[: num_to_keep - 1], len(scores) - 1})


def test_2_4a_accepts(capsys):
    assert_accepts(checks.exercise_2_4a, kept_reports, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("The newest is always kept", best_only),
    ("the lowest scores are the best", lambda scores, keep, order: kept_reports(scores, keep, order and "max")),
    ("Without a score", lambda scores, keep, order: kept_reports(scores, keep, order or "max")),
    ("is [1, 2, 3]; you say", lambda scores, keep, order: [*range(len(scores))][-keep:]),
    ("The newest does not count", one_for_the_newest),
    ("the highest scores are the best", lambda scores, keep, order: kept_reports(scores, keep, order and "min")),
    ("the first one has the number 0", lambda *given: [number + 1 for number in kept_reports(*given)]),
    ("Each number once", lambda scores, *rest: [*kept_reports(scores, *rest), len(scores) - 1]),
    ("not their scores", lambda scores, *rest: [scores[number] for number in kept_reports(scores, *rest)]),
    ("a list of numbers", lambda scores, keep, order: None),
])  # fmt: skip
def test_2_4a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_4a, answer, because, capsys)


def load_weights(model, path, weights_only=True, strict=True, strip=str.removeprefix, ready=True):
    state = torch.load(path, map_location="cpu", weights_only=weights_only)
    if all(name.startswith("module.") for name in state):
        state = {strip(name, "module."): value for name, value in state.items()}
    model.load_state_dict(state, strict=strict)
    return model.eval() if ready else model


def test_2_4b_accepts(capsys):
    assert_accepts(checks.exercise_2_4b, load_weights, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("saved from its DDP wrapper, it raises", lambda m, p: load_weights(m, p, strip=lambda name, _: name)),
    ("Was it strict?", lambda m, p: load_weights(m, p, strict=False, strip=lambda name, _: name)),
    ("taken without a word", lambda m, p: load_weights(m, p, strict=False)),
    ("a part called `module`", lambda m, p: load_weights(m, p, strip=lambda name, part: name.replace(part, ""))),
    ("call eval()", lambda m, p: load_weights(m, p, ready=False)),
    ("weights_only=True", lambda m, p: load_weights(m, p, weights_only=False)),
    ("return the model", lambda m, p: load_weights(m, p) and None),
    ("in_state_dict_if_present returns nothing", lambda m, p: m.load_state_dict(None)),
])  # fmt: skip
def test_2_4b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_4b, answer, because, capsys)
