"""The checks of chapter 6's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import functools
import re
from pathlib import Path

import pytest
from answers import cell, judge, stub

import checks
from shared import models, ranks

CHAPTER = Path(__file__).parent.parent / "06-beyond-data-parallel"
SLICED = CHAPTER / "01_tensor_parallelism_by_hand.ipynb"
SMALL = models.GPTConfig(num_layers=2, num_heads=2, dim=16, context=8)


@functools.cache
def lesson_6_1() -> dict:
    """The names of lesson 6.1 with a smaller model, and those of its solutions."""
    names = {"__name__": "lesson_6_1"}  # no module: its functions travel to the ranks as those of a notebook do
    exec(cell(SLICED, "imports"), names)
    names |= {"RANKS": 2, "SEED": 7, "CONFIG": SMALL}
    windows = names["datasets"].text(SMALL.context).train
    names["BATCH"] = [part[:2].clone() for part in windows[:2]]
    cells = "sum-over-ranks copy-to-ranks cut sliced-block step sliced-step reference compare"
    for identity in cells.split():
        exec(cell(SLICED, identity), names)
    for identity in ("exercise-a-solution", "exercise-b-solution"):
        exec(cell(CHAPTER / "solutions" / SLICED.name, identity), names)
    return names


# --- 6.1a: each rank keeps some rows of the embedding ----------------------------------------------------------------


def embedding(*changes: tuple[str, str]) -> type:
    """The solution, with changes, each (old, new)."""
    text = cell(CHAPTER / "solutions" / SLICED.name, "exercise-a-solution")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = dict(lesson_6_1())
    exec(text, names)
    return names["SlicedEmbedding"]


MASK, ADDED = " * own.unsqueeze(-1)", "SumOverRanks.apply(part)"
test_6_1a = judge(checks.exercise_6_1a, [embedding()], {
    "stub": (stub, "not done yet"),
    "not masked": (embedding((MASK, "")), "What does each rank contribute for a token that it does not have?"),
    "rows of others": (embedding(("tokens - self.start", "tokens")), "returns a wrong embedding for token"),
    "even slices": (embedding(("len(slices[0])", "len(slices[-1])")), "with 10 tokens on 3 ranks"),
    "not added": (embedding((ADDED, "part")), "returns a wrong embedding for token"),
    "added backward too": (embedding((ADDED, f"CopyToRanks.apply({ADDED})")), "is 2 times the right one. Every rank"),
    "whole table": (embedding(("slices[dist.get_rank()].clone()", "weight.clone()")), "its slice is one nn.Parameter"),
    "rows out of range": (embedding(("rows.where(own, 0)", "rows")), "IndexError"),
})  # fmt: skip


def test_6_1a_refuses_an_all_reduce_that_sums_in_both_directions():
    """It warns, too, so it is no row of the table."""
    answer = embedding((ADDED, "torch.distributed.nn.functional.all_reduce(part)"))
    with pytest.raises(AssertionError, match="is 2 times the right one"):
        checks.exercise_6_1a(answer, strict=True)


# --- 6.1b: the missing sum -------------------------------------------------------------------------------------------


@pytest.fixture
def with_runs():
    """Give an answer what the lesson's cell gives it."""
    names = lesson_6_1()
    return lambda answer: (answer, functools.partial(ranks.run, names["sliced_step"], 2, names["BATCH"]))


def first_wrong(results):
    names = lesson_6_1()
    wrong = [name for name, error in names["compare"](results).items() if error > 1e-9]
    return "none" if not wrong else f"backward, block {(wrong[0].split('.') * 2)[1]}, attention"


def without_the_loss(results):
    names = lesson_6_1()
    return names["find_missing_sum"]([(names["LOSS"], gradients, sent) for _, gradients, sent in results])


def exactly(results):
    names = lesson_6_1()
    wrong = [name for name, error in names["compare"](results).items() if error > 0]
    return names["find_missing_sum"](results) if len(wrong) < 3 else "forward"


test_6_1b = judge(checks.exercise_6_1b, [lambda results: lesson_6_1()["find_missing_sum"](results)], {
    "stub": (stub, "not done yet"),
    "first wrong": (first_wrong, "the answer was"),
    "without the loss": (without_the_loss, re.compile("ValueError|IndexError|the answer was 'forward'")),
    "exactly equal": (exactly, re.compile("the answer was '(none|backward)")),
}, prepare="with_runs")  # fmt: skip
