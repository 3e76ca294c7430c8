"""The checks of lesson 6.8's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import cell, judge, stub

import checks
from checks import chapter_6_experts

CHAPTER = Path(__file__).parent.parent / "06-beyond-data-parallel"
TAKEN = ("settings", "experts", "block", "build-model", "all-to-all", "shared-experts", "mean-loss", "local-step")
LESSON, SOLUTIONS = CHAPTER / "08_experts.ipynb", CHAPTER / "solutions/08_experts.ipynb"


@functools.cache
def lesson() -> dict:
    """The names of the solutions up to the exercises."""
    names = {"__name__": "lesson_6_8"}  # no module: its functions travel to the ranks as those of a notebook do
    for identity in ("imports", "imports-ours", *TAKEN, "reference"):
        exec(cell(SOLUTIONS, identity), names)
    return names


def solution(exercise: str, name: str, *changes: tuple[str, str]) -> Callable:
    """The solution, with changes, each (old, new)."""
    text = cell(SOLUTIONS, f"exercise-{exercise}-solution")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = dict(lesson())
    exec(text, names)
    return names[name]


def test_the_solutions_start_from_the_cells_of_the_lesson():
    for identity in TAKEN:
        assert cell(SOLUTIONS, identity) == cell(LESSON, identity)
    assert cell(LESSON, "compare").startswith(cell(SOLUTIONS, "reference"))


# --- 6.8a: summed over which ranks? ----------------------------------------------------------------------------------


@functools.cache
def gradients() -> list:
    """What the ranks return for all versions: one launch serves all answers, because it does not depend on them."""
    names = lesson()
    exec(cell(SOLUTIONS, "exercise-a-check").partition("\n\n\n")[0], names)
    return chapter_6_experts.on_ranks(chapter_6_experts.sum_in_groups, 4, names["halves"])


@pytest.fixture
def with_gradients(monkeypatch):
    """Give an answer what the lesson's cell gives it, and let the check find what the ranks have done already."""
    launched = gradients()
    monkeypatch.setattr(chapter_6_experts, "on_ranks", lambda *arguments: launched)
    names = lesson()
    expected = names["reference"](names["EXPERTS"], names["CHOICES"])[1]["blocks.0.experts.up"]
    return lambda answer: (answer, None, expected)


find_sum = functools.partial(solution, "a", "find_sum")
DIVIDED, SAME = "sum(found) / len(summed)", "torch.allclose(gradient, found[0], rtol=1e-9, atol=0)"
test_6_8a = judge(checks.exercise_6_8a, [find_sum()], {
    "stub": (stub, "not done yet"),
    "all ranks counted": (find_sum((DIVIDED, "sum(found)")), "or on how many ranks a sum has?"),
    "of rank 0 alone": (find_sum((DIVIDED, "found[0]"), ("sum(expected.chunk(2))", "expected.chunk(2)[0]")),
                        "Does your quantity depend on who was summed with whom"),
    "believes the layout": (find_sum((SAME, "rank in (0, 2)")), "and you say [0, 2]. Which ranks have the same"),
    "right or nothing": (find_sum((SAME, "torch.allclose(gradient, expected.chunk(2)[rank % 2])")), "and you say ["),
    "no factor": (find_sum(("summed, (", "summed or (")), "return a list of ranks and a number"),
}, prepare="with_gradients")  # fmt: skip


# --- 6.8b: the balance of the whole batch ----------------------------------------------------------------------------

balance = functools.partial(solution, "b", "shared_balance")
LAST = "/ num_tokens).sum()"
SHARED, MEAN = "    dist.all_reduce(rows)\n", "probabilities.sum(dim=0) / num_tokens"
EVERYWHERE = "torch.distributed.nn.functional.all_reduce(probabilities.sum(dim=0)) / num_tokens"
GATHERED = "    dist.all_gather([torch.empty(64) for _ in range(dist.get_world_size())], torch.zeros(64))\n"
PLUS = f"(2 * {MEAN} - {MEAN.replace('.sum', '.detach().sum')})"
RIGHT = balance()
WRONG = {
    "own shares": (balance((SHARED, "")), "Which tokens are counted in each share"),
    "own mean": (balance((MEAN, "probabilities.mean(dim=0)")), "what is each mean divided by?"),
    "mean of means": (balance((MEAN, "probabilities.mean(dim=0) / dist.get_world_size()")), "times the right loss"),
    "tokens and rows confused": (balance((MEAN, "probabilities.sum(dim=0) / rows.sum()")), "6 experts, 2 of them"),
    "detached": (balance((MEAN, MEAN.replace(".sum", ".detach().sum"))), "What did you detach?"),
    "detached in part": (balance((MEAN, PLUS)), "Through which of the two factors"),
    "sends everything": (balance((SHARED, SHARED + GATHERED)), "Which numbers do the other ranks need"),
    "no tensor": (balance((LAST, f"{LAST}.item()")), "Return a tensor with one number"),
    "the whole loss everywhere": (balance((MEAN, EVERYWHERE)), "How often is the whole loss in it?"),
}


@functools.cache
def reports(batch: tuple) -> dict:
    """What each rank reports of each answer: one launch per batch for all answers."""
    answers = [RIGHT, *(answer for answer, _ in WRONG.values())]
    by_rank = chapter_6_experts.on_ranks(try_all, len(batch[2]), answers, *batch)
    return {answer: list(of_answer) for answer, *of_answer in zip(answers, *by_rank, strict=True)}


def try_all(answers, *batch):
    warnings.simplefilter("ignore")  # torch warns of the backward pass of its all_reduce
    return [chapter_6_experts.try_balance(answer, *batch) for answer in answers]


@pytest.fixture
def with_reports(monkeypatch):
    """Let the check find what the ranks have done already."""

    def prepare(answer):
        if answer is not stub:
            launched = {batch: reports(batch)[answer] for batch in chapter_6_experts.BATCHES}
            monkeypatch.setattr(chapter_6_experts, "on_ranks", lambda _, num_ranks, answer, *batch: launched[batch])
        return answer

    return prepare


test_6_8b = judge(checks.exercise_6_8b, [RIGHT], {"stub": (stub, "not done yet")} | WRONG, prepare="with_reports")
