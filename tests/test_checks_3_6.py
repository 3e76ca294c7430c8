"""The checks of lesson 3.6: the stub and plausible wrong answers are rejected with a message that helps."""

from itertools import pairwise
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects, launch_together, replay, stub

from shared import checks
from shared.checks import chapter_3_finetuning

# --- 3.6a: the mean over all answer tokens, on three ranks ------------------------------------------------------------

HEAD = "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n\n\n"
RIGHT = """
def train_step(model, optimizer, passes):
    answer_tokens = sum((targets != -100).sum() for _, targets in passes)
    dist.all_reduce(answer_tokens)
    optimizer.zero_grad()
    step_loss = torch.zeros((), dtype=torch.float64)
    for tokens, targets in passes:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum") / answer_tokens
        (loss * dist.get_world_size()).backward()
        step_loss += loss.detach()
    optimizer.step()
    dist.all_reduce(step_loss)
    return step_loss.item()
"""
GIVEN = """
def train_step(model, optimizer, passes):
    optimizer.zero_grad()
    step_loss = 0
    for tokens, targets in passes:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100) / len(passes)
        loss.backward()
        step_loss += loss.item()
    optimizer.step()
    return step_loss
"""
BACKWARD = "        (loss * dist.get_world_size()).backward()\n"
WRONG_3_6A = {
    "as given": (GIVEN, "the gradient is right, but rank 0 returns .* The ranks return different numbers"),
    "mean of the ranks' means": (
        GIVEN.replace("    return", "    step_loss = torch.tensor(step_loss)\n    dist.all_reduce(step_loss)\n"
                      "    step_loss /= dist.get_world_size()\n    return"),
        "but those of another rank more or fewer: the gradient is off by .* Which number has each pass",
    ),
    "not multiplied": (
        RIGHT.replace(BACKWARD, "        loss.backward()\n"),
        "every pass of every rank has 6 answer tokens: the gradient is off by 66.7%. The gradient is 0.333 times as",
    ),
    "own count": (RIGHT.replace("    dist.all_reduce(answer_tokens)\n", ""), "The gradient is 3 times as long"),
    "counted pass by pass": (
        RIGHT.replace("    answer_tokens = sum((targets != -100).sum() for _, targets in passes)\n"
                      "    dist.all_reduce(answer_tokens)\n", "")
        .replace("        logits =", "        answer_tokens = (targets != -100).sum() * len(passes)\n"
                 "        dist.all_reduce(answer_tokens)\n        logits ="),
        "every rank has one pass with 1 answer token and one with 9: the gradient is off by",
    ),
    "loss not reduced": (
        RIGHT.replace("    dist.all_reduce(step_loss)\n", ""),
        "the gradient is right, but rank 0 returns .* The ranks return different numbers",
    ),
    "no step": (RIGHT.replace("    optimizer.step()\n", ""), "the weights did not change. Do you call backward"),
    "nan": (
        RIGHT.replace('"sum") / answer_tokens', '"mean") * (targets != -100).sum() / answer_tokens'),
        "rank 0's first pass has no answer token: the loss is nan. What is the mean of no tokens",
    ),
    "empty passes left out": (
        RIGHT.replace("        logits =", "        if targets.max() < 0:\n            continue\n        logits ="),
        "one rank called a collective that another rank never reached. Does each rank call the model and backward",
    ),
    "returns nothing": (RIGHT.replace("    return step_loss.item()\n", ""), "train_step returns None: return the mean"),
}  # fmt: skip


def test_3_6a_is_a_stub(tmp_path):
    (tmp_path / "answer.py").write_text(HEAD + "    raise NotImplementedError\n")
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_3_6a(tmp_path / "answer.py", strict=True)


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Path]:
    scripts = {"right": HEAD + RIGHT} | {name: HEAD + body for name, (body, _) in WRONG_3_6A.items()}
    folder = tmp_path_factory.mktemp("answers")
    return launch_together(folder, chapter_3_finetuning.ACCUMULATE, scripts, 3)


def test_3_6a_accepts(launched, monkeypatch):
    replay(monkeypatch, chapter_3_finetuning.ACCUMULATE, 3, launched["right"])
    assert checks.exercise_3_6a(launched["right"] / "answer.py", strict=True)


@pytest.mark.parametrize("name", WRONG_3_6A)
def test_3_6a_rejects(name, launched, monkeypatch):
    replay(monkeypatch, chapter_3_finetuning.ACCUMULATE, 3, launched[name])
    with pytest.raises(AssertionError, match=WRONG_3_6A[name][1]):
        checks.exercise_3_6a(launched[name] / "answer.py", strict=True)


# --- 3.6b: which tokens of a conversation count -----------------------------------------------------------------------


def make_targets(begins=(1,), ends=(3,), shift=1, keep_end=True):
    def answer(tokens):
        targets, its_turn = [], False
        for token, following in pairwise(tokens):
            its_turn = token in begins or (its_turn and token not in ends)
            targets.append(following if its_turn and (keep_end or following not in ends) else -100)
        return targets if shift else [-100, *targets]

    return answer


def test_3_6b_accepts(capsys):
    assert_accepts(checks.exercise_3_6b, make_targets(), capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("for 8 tokens return a list of 7 targets, one for each token but the last; yours: 8", make_targets(shift=0)),
    ("for 8 tokens return a list of 7 targets, one for each token but the last; yours: None", lambda tokens: None),
    ("The assistant writes its END as well, and has to learn it.", make_targets(keep_end=False)),
    ("a system message first: ", make_targets(begins=(1, 2))),
    ("two answers: ", make_targets(ends=())),
    ("Which token comes before the answer's first word?", lambda tokens: tokens[1:]),
    ("Which token comes before the answer's first word?", lambda tokens: [*make_targets()(tokens)[1:], -100]),
    ("two answers: ", lambda tokens: [-100] * tokens.index(1) + tokens[tokens.index(1) + 1 :]),
])  # fmt: skip
def test_3_6b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_6b, answer, because, capsys)
