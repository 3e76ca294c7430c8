"""Lesson 6.5: the four schedules on drawn sizes, and the checks of its exercises."""

import functools
import random
import types
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from answers import cell, judge, stub

import checks
from checks import chapter_6_pipelines, machinery
from shared import models, ranks, schedules

CHAPTER = Path(__file__).parent.parent / "06-beyond-data-parallel"
LESSON = CHAPTER / "05_pipelines.ipynb"
SOLUTION = CHAPTER / "solutions" / LESSON.name
ALL_PAIRS = [(stages, rounds * stages) for stages in (2, 3, 4) for rounds in (1, 2, 3)]
DRAWN_PAIRS = random.Random(65).sample(ALL_PAIRS, 3)


def lesson(num_ranks: int, num_microbatches: int) -> dict:
    """The names of lesson 6.5 with a small model."""
    names = {"__name__": "lesson_6_5"}  # no module: its functions travel to the ranks as those of a notebook do
    exec(cell(LESSON, "imports"), names)
    config = models.GPTConfig(num_layers=2 * num_ranks, num_heads=2, dim=8, context=4)
    batch = [
        part[:num_microbatches].clone() for part in names["datasets"].text(config.context).train[:num_microbatches]
    ]
    names |= {"RANKS": num_ranks, "MICROBATCHES": num_microbatches, "SEED": 7, "CONFIG": config, "BATCH": batch}
    names["TOKENS"], names["TARGETS"] = (part.chunk(num_microbatches) for part in batch)
    for identity in ("stage", "reference", "compare", "clock-function", "watch", "torch-step"):
        exec(cell(LESSON, identity), names)
    return names


@pytest.mark.parametrize(("p", "m"), DRAWN_PAIRS)
def test_idle_share_and_live_activations_of_the_four_schedules_are_those_of_the_formulas(p, m):
    """Read from the orders that the ranks recorded. The formulas are those of the papers, for p that divides m."""
    names, v = lesson(p, m), 2

    def all_schedules():
        return {name: names["step_with_torch"](name) for name in names["SCHEDULES"]}

    of_ranks = ranks.run(all_schedules, p)
    expected = {
        "GPipe": ((p - 1) / (m + p - 1), [m] * p),
        "1F1B": ((p - 1) / (m + p - 1), [p - r for r in range(p)]),
        "interleaved 1F1B": (
            (p - 1) / (v * m + p - 1), [min(2 * (p - r - 1) + (v - 1) * p + 1, v * m) for r in range(p)],
        ),
        "zero bubble": ((p - 1) / (3 * v * m + p - 1), [2 * p] * p),
    }  # fmt: skip
    assert expected.keys() == names["SCHEDULES"].keys()
    for name, (share, live) in expected.items():
        results = [reports[name] for reports in of_ranks]
        assert names["worst_error"](results) < 1e-9, name
        table, rows = names["on_clock"](results)
        assert schedules.idle_share(rows) == pytest.approx(share, abs=1e-12), name
        assert schedules.most_live(table) == live, name


def test_schedules_drawn_together_share_one_axis_and_show_every_recorded_cell():
    whole = schedules.timeline(schedules.read_table(["0F0 0B0", "1F0 1B0"]))
    halves = schedules.timeline(schedules.read_table(["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]))
    axes = schedules.draw_together({"whole": whole, "halves": halves}, "", {"halves": 0.5})
    boxes = [(patch.get_x(), patch.get_width(), patch.get_y()) for patch in axes.patches]
    assert len(boxes) == 4 + 8
    assert sum(width for _, width, _ in boxes[:4]) == sum(width for _, width, _ in boxes[4:]) == 6  # the same work
    assert max(left + width for left, width, _ in boxes) == axes.get_xlim()[1] == 6
    assert len({middle for *_, middle in boxes}) == 4 == len(axes.get_yticks())
    plt.close(axes.figure)


# --- launches ---------------------------------------------------------------------------------------------------------

ENDING: list[Callable] = []  # the answers with which the ranks end by themselves: they can share a launch


def ends(answer: Callable) -> Callable:
    ENDING.append(answer)
    return answer


@functools.cache
def reports_of_all(function: Callable, num_ranks: int, sizes: tuple[int, ...]) -> list[list]:
    """What each rank reports for each answer of the exercise that ends, in one launch."""
    kind = type if function is chapter_6_pipelines.try_tied else types.FunctionType
    answers, options = [answer for answer in ENDING if isinstance(answer, kind)], [list(sizes)] * bool(sizes)
    return list(zip(*ranks.run(lambda: [function(answer, *options) for answer in answers], num_ranks), strict=True))


@functools.cache
def on_ranks_once(function: Callable, num_ranks: int, answer: Callable, sizes: tuple[int, ...]) -> list | Exception:
    """What the check's on_ranks returns or raises."""
    if answer in ENDING:
        answers = [each for each in ENDING if isinstance(each, type) == isinstance(answer, type)]
        return list(reports_of_all(function, num_ranks, sizes)[answers.index(answer)])
    try:
        return machinery.on_ranks(function, num_ranks, answer, *[list(sizes)] * bool(sizes))
    except (NotImplementedError, machinery.Wrong) as error:
        return error


@pytest.fixture
def in_shared_launches(monkeypatch) -> Callable:
    """Let the check find what the ranks have reported before."""

    def on_ranks(function, num_ranks, answer, sizes=()):
        found = on_ranks_once(function, num_ranks, answer, tuple(sizes))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(chapter_6_pipelines, "on_ranks", on_ranks)
    return lambda answer: answer


# --- 6.5a: 1F1B with sends that block --------------------------------------------------------------------------------


def solved(identity: str, *changes: tuple[str, str]) -> dict:
    """The names of a solution, with changes, each (old, new)."""
    text = cell(SOLUTION, identity)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = {"__name__": "lesson_6_5"}
    exec(cell(SOLUTION, "imports"), names)
    exec(text, names)
    return names


def order(*changes: tuple[str, str]) -> Callable:
    return solved("exercise-a-solution", *changes)["one_f_one_b"]


def lessons_order(pipe):
    ahead = min(pipe.num_ranks - 1 - pipe.rank, pipe.num_microbatches)
    for step in range(pipe.num_microbatches + ahead):
        if step < pipe.num_microbatches:
            pipe.receive_input(step)
            pipe.compute_forward(step)
            pipe.send_output(step)
        if step >= ahead:
            pipe.receive_gradient(step - ahead)
            pipe.compute_backward(step - ahead)
            pipe.send_gradient(step - ahead)


def all_forward_first(pipe):
    for i in range(pipe.num_microbatches):
        pipe.receive_input(i)
        pipe.compute_forward(i)
        pipe.send_output(i)
    for i in range(pipe.num_microbatches):
        pipe.receive_gradient(i)
        pipe.compute_backward(i)
        pipe.send_gradient(i)


def one_after_the_other(pipe):
    for i in range(pipe.num_microbatches):
        pipe.receive_input(i)
        pipe.compute_forward(i)
        pipe.send_output(i)
        pipe.receive_gradient(i)
        pipe.compute_backward(i)
        pipe.send_gradient(i)


def even_ranks_send_first(pipe):
    """Right too: the input is received only where the neighbor in front still has one to send."""
    ahead = min(pipe.num_ranks - 1 - pipe.rank, pipe.num_microbatches)
    received = 0
    for step in range(pipe.num_microbatches + ahead):
        if step < pipe.num_microbatches:
            if step == received:
                pipe.receive_input(step)
                received += 1
            pipe.compute_forward(step)
            pipe.send_output(step)
        if (i := step - ahead) >= 0:
            pipe.receive_gradient(i)
            if pipe.rank % 2 and received < pipe.num_microbatches:
                pipe.receive_input(received)
                received += 1
            pipe.compute_backward(i)
            if pipe.rank % 2 == 0 and received < pipe.num_microbatches:
                pipe.receive_input(received)
                received += 1
            pipe.send_gradient(i)


BACKWARD = "        pipe.compute_backward(i)\n"
ONE_MORE = ("pipe.num_ranks - 1 - pipe.rank", "pipe.num_ranks - pipe.rank")
DROPPED = (BACKWARD, "        if pipe.rank == 0 and i == last - 1:\n            return\n" + BACKWARD)
TOO_MANY = ("if following + 1 < last:", "if following < last:")
LATE = ("    if ahead < last:\n        pipe.receive_input(ahead)\n", "")
test_6_5a = judge(checks.exercise_6_5a, [ends(order()), ends(even_ranks_send_first)], {
    "stub": (stub, "not done yet"),
    "as in the lesson": (lessons_order, "the ranks hang: rank 0 waits in send_output"),
    "one input too many": (order(TOO_MANY), "there are the microbatches"),
    "all first": (ends(all_forward_first), "rank 0 holds 4 live forward passes at once; 1F1B holds 2. Receiving"),
    "one more ahead": (ends(order(ONE_MORE)), "rank 0 holds 3 live"),
    "one by one": (ends(one_after_the_other), "leave ranks idle for 12 units; those of 1F1B for 3"),
    "a gradient dropped": (ends(order(DROPPED)), "rank 0 has not computed 0B3"),
    "received late": (order(LATE), "is called before"),
}, prepare="in_shared_launches")  # fmt: skip


# --- 6.5b: tied embeddings -------------------------------------------------------------------------------------------


def tied(*changes: tuple[str, str]) -> type:
    return solved("exercise-b-solution", *changes)["Tied"]


REDUCE, CAST = "dist.all_reduce(self.table.grad, group=self.group)", "dist.broadcast(table.data, 0, group=self.group)"
ALL_OF_THEM = (
    f"        if self.table is not None:\n            {REDUCE}",
    "        part = torch.zeros(7, 4).double() if self.table is None else self.table.grad\n"
    "        dist.all_reduce(part)",
)
test_6_5b = judge(checks.exercise_6_5b, [ends(tied())], {
    "stub": (stub, "not done yet"),
    "not summed": (ends(tied((REDUCE, "pass"))), "the gradient of rank 0's table is that of its own use alone"),
    "mean": (ends(tied((REDUCE, f"{REDUCE}; self.table.grad /= 2"))), "the gradient of rank 0's table is 0.50 times"),
    "own values": (ends(tied((CAST, "pass"))), "the table of rank 1 is wrong before the first step. Both copies start"),
    "the last one's values": (
        ends(tied((CAST, CAST.replace("0,", "dist.get_world_size() - 1,")))), "the table of rank 0 is wrong before"),
    "summed twice": (ends(tied((REDUCE, f"{REDUCE}; {REDUCE}"))), "the gradient of rank 0's table is 2.00 times"),
    "everybody": (ends(tied(ALL_OF_THEM)), "rank 1 takes part in 3 operations of sum_gradients. It has no copy"),
}, prepare="in_shared_launches")  # fmt: skip
