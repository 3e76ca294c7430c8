"""Lesson 6.5: the four schedules on drawn sizes, and the checks of its exercises."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import cell, judge, stub

import checks
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
test_6_5a = judge(checks.exercise_6_5a, [order(), even_ranks_send_first], {
    "stub": (stub, "not done yet"),
    "as in the lesson": (lessons_order, "the ranks hang; rank 0 waits in send_output"),
    "one input too many": (order(("if following + 1 < last:", "if following < last:")), "there are the microbatches"),
    "all first": (all_forward_first, "rank 0 holds 4 live forward passes at once; 1F1B holds 2. Receiving"),
    "one more ahead": (order(("pipe.num_ranks - 1 - pipe.rank", "pipe.num_ranks - pipe.rank")), "rank 0 holds 3 live"),
    "one by one": (one_after_the_other, "leave ranks idle for 12 units; those of 1F1B for 3"),
    "a gradient dropped": (order(
        (BACKWARD, "        if pipe.rank == 0 and i == last - 1:\n            return\n" + BACKWARD),
    ), "rank 0 has not computed 0B3"),
    "received late": (order(("    if ahead < last:\n        pipe.receive_input(ahead)\n", "")), "is called before"),
})  # fmt: skip


# --- 6.5b: tied embeddings -------------------------------------------------------------------------------------------


def tied(*changes: tuple[str, str]) -> type:
    return solved("exercise-b-solution", *changes)["Tied"]


REDUCE, CAST = "dist.all_reduce(self.table.grad, group=self.group)", "dist.broadcast(table.data, 0, group=self.group)"
test_6_5b = judge(checks.exercise_6_5b, [tied()], {
    "stub": (stub, "not done yet"),
    "not summed": (tied((REDUCE, "pass")), "the gradient of rank 0's table is that of its own use alone"),
    "mean": (tied((REDUCE, f"{REDUCE}; self.table.grad /= 2")), "the gradient of rank 0's table is 0.50 times"),
    "own values": (tied((CAST, "pass")), "the table of rank 1 is wrong before the first step. Both copies start"),
    "the last one's values": (tied((CAST, CAST.replace("0,", "dist.get_world_size() - 1,"))), "the table of rank 0 is"),
    "sent one way": (tied((REDUCE, REDUCE.replace("all_reduce(self.table.grad,", "reduce(self.table.grad, 0,"))),
                     "the gradient of rank 1's table is that of its own use alone"),
    "everybody": (tied((
        f"        if self.table is not None:\n            {REDUCE}",
        "        part = torch.zeros(7, 4).double() if self.table is None else self.table.grad\n"
        "        dist.all_reduce(part)",
    )), "rank 1 takes part in 3 operations of sum_gradients. It has no copy"),
    "a group of its members": (tied((
        "self.group = dist.new_group([0, dist.get_world_size() - 1])",
        "self.group = dist.new_group([0, dist.get_world_size() - 1]) if table is not None else None",
    )), "on 4 ranks"),
})  # fmt: skip
