"""The exercise checks of lesson 6.6: tables that real ranks have run, and what they must reach."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from checks.machinery import Wrong, exercise
from shared import pipeline_runner, schedules

MICROBATCHES = 4


@dataclass(frozen=True)
class Goal:
    """What a table must reach. placement: the stages of each rank; idle: units per rank; live: at most, per rank."""

    placement: list[list[int]]
    idle: int
    live: list[int] | None = None
    halves: bool = False  # whether I and W may be used


def judge(answer: tuple[Callable, Callable, Callable], goal: Goal) -> str:
    """Run the learner's table, and compare what the ranks did with the goal. Return what PyTorch's runtime did."""
    write_rows, attempt, in_torch = answer
    rows = write_rows()
    num_stages = sum(map(len, goal.placement))
    refuse(rows, goal)
    try:
        outcome, error = attempt(rows, num_stages, MICROBATCHES)
    except ValueError as problem:
        raise Wrong(f"no rank has started: {problem}") from None
    if outcome.waits:
        waits = ", and ".join(map(str, schedules.circle(outcome.waits)))
        raise Wrong(f"the ranks hang, in a circle: {waits}")
    if not error < 1e-9:
        raise Wrong(f"the gradients are off by {error:.0e}: the lesson's model or its loss has changed")
    compare(outcome, goal)
    last = [cell.microbatch for row in outcome.done for cell in row if (cell.stage, cell.kind) == (num_stages - 1, "F")]
    if last != sorted(last):  # section 4 of the lesson shows what happens then
        return "Not run in PyTorch, which needs the last stage's forward passes in the order of the microbatches."
    if not (error := in_torch(rows, num_stages)) < 1e-9:
        raise Wrong(f"in PyTorch's runtime the gradients are off by {error:.0e}")
    return f"PyTorch's runtime ran the same file, and its gradients are those of one process within {error:.0e}."


def refuse(rows: Sequence, goal: Goal) -> None:
    """Raise Wrong for a table with other rows, stages or kinds of cells than the puzzle has."""
    if isinstance(rows, str) or not isinstance(rows, Sequence) or len(rows) != len(goal.placement):
        raise Wrong(f"return a list of {len(goal.placement)} strings, one row per rank")
    try:
        table = schedules.read_table(rows)
    except ValueError as problem:
        raise Wrong(str(problem)) from None
    for rank, (row, stages) in enumerate(zip(table, goal.placement, strict=True)):
        for cell in row:
            if cell.stage not in stages:
                has = " and ".join(map(str, stages))
                raise Wrong(f"{cell} is in the row of rank {rank}, which has stage {has} in this puzzle")
            if cell.kind in "IW" and not goal.halves:
                raise Wrong(f"{cell}: this puzzle has whole backward passes only, F and B")


def compare(outcome: pipeline_runner.Outcome, goal: Goal) -> None:
    """Raise Wrong if the ranks idle longer, or keep more, than the goal allows."""
    rows = schedules.timeline(outcome.done)
    idle, problems = schedules.idle_units(rows), []
    if max(idle) > goal.idle:
        problems.append(f"the ranks idle {listed(idle)} units, and {goal.idle} is possible. {longest_gap(rows)}")
    for rank, (found, limit) in enumerate(zip(outcome.most_live, goal.live or outcome.most_live, strict=True)):
        if found > limit:
            cell = first_above(outcome.done[rank], limit)
            problems.append(f"rank {rank} keeps {found} forward passes at once, and may keep {limit}. "
                            f"{cell} is the first one too many")  # fmt: skip
    if problems:
        raise Wrong("; ".join(problems))


def listed(numbers: Sequence[int]) -> str:
    """Return the numbers with commas between them."""
    return ", ".join(map(str, numbers))


def longest_gap(rows: list[list[schedules.Placed]]) -> str:
    """Name the longest time in which a rank idles between two of its cells, and what it waits for.

    The wait for a rank's first gradient is named only if there is no other: the best orders of the puzzles have it too.
    """
    cells = {placed.cell: placed for row in rows for placed in row}
    num_stages = 1 + max(cell.stage for cell in cells)
    gaps = []
    for rank, row in enumerate(rows):
        first_gradient = next(placed for placed in row if placed.cell.kind != "F")
        gaps += [(second is not first_gradient and second.start > first.end, second.start - first.end, second.start,
                  rank, second.cell) for first, second in pairwise(row)]  # fmt: skip
    _, length, end, rank, cell = max(gaps)
    if not length:
        return "None of them idles between two cells: look at when each rank starts and ends"
    needed = max(schedules.needs(cell, set(cells), num_stages), key=lambda cell: cells[cell].end)
    return f"A gap to look at: rank {rank} idles from {end - length} to {end}, because {cell} needs {needed}"


def first_above(row: list[schedules.Cell], limit: int) -> schedules.Cell:
    """Return the cell with which a rank keeps more than `limit` forward passes for the first time."""
    return next(cell for number, cell in enumerate(row) if schedules.most_live([row[: number + 1]])[0] > limit)


THREE = [[0], [1], [2]]


@exercise("6.6a", "6 idle units per rank.")
def exercise_6_6a(answer: tuple[Callable, Callable, Callable]) -> str:
    """A function without arguments -> the table; the lesson's attempt(rows, num_stages, num_microbatches); in_torch."""
    return judge(answer, Goal(THREE, idle=6))


@exercise("6.6b", "the same step with at most 3, 2 and 1 live.")
def exercise_6_6b(answer: tuple[Callable, Callable, Callable]) -> str:
    """The same three functions."""
    return judge(answer, Goal(THREE, idle=6, live=[3, 2, 1]))


@exercise("6.6c", "3 idle units of 27, with four stages on two ranks.")
def exercise_6_6c(answer: tuple[Callable, Callable, Callable]) -> str:
    """The same three functions."""
    return judge(answer, Goal([[0, 2], [1, 3]], idle=3, live=[5, 3]))


@exercise("6.6d", "2 idle units of 14. No schedule of one step has fewer.")
def exercise_6_6d(answer: tuple[Callable, Callable, Callable]) -> str:
    """The same three functions."""
    return judge(answer, Goal(THREE, idle=2, live=[3, 3, 3], halves=True))
