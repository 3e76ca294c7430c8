"""The checks of lesson 6.6 accept tables that reach their goal, and say of others what real ranks did with them."""

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from answers import cell, judge, stub

import checks
from shared import models

LESSON = Path(__file__).parent.parent / "06-beyond-data-parallel/06_schedule_puzzles.ipynb"
SOLUTIONS = LESSON.parent / "solutions" / LESSON.name
SMALL = models.GPTConfig(num_layers=12, num_heads=2, dim=16, context=8)
CELLS = "stage loss reference largest-error attempt torch-row in-torch"


@functools.cache
def lesson() -> dict:
    """The names of the lesson with a smaller model, and the answers of its solutions."""
    names = {"__name__": "lesson_6_6"}  # no module: its functions travel to the ranks as those of a notebook do
    for identity in ("imports", "imports-ours"):
        exec(cell(LESSON, identity), names)
    windows = names["datasets"].text(SMALL.context).train
    names |= {"CONFIG": SMALL, "SEED": 7}
    names["TOKENS"], names["TARGETS"] = (part[:4].clone() for part in windows[:4])
    for identity in CELLS.split():
        exec(cell(LESSON, identity), names)
    for exercise in "abcd":
        exec(cell(SOLUTIONS, f"exercise-{exercise}-solution"), names)
    names["launches"] = {}
    return names


@pytest.fixture
def with_runs(tmp_path, monkeypatch):
    """Give an answer what the lesson's cell gives it. A table runs once, and neither prints nor stays drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    names = lesson()

    def once(function: Callable) -> Callable:
        def call(rows, *sizes):
            key = function.__name__, str(rows), sizes
            if key not in names["launches"]:
                with contextlib.redirect_stdout(io.StringIO()):
                    names["launches"][key] = function(rows, *sizes)
            return names["launches"][key]

        return call

    return lambda answer: (answer, once(names["attempt"]), once(names["in_torch"]))


def solved(name: str, *changes: tuple[str, str]) -> Callable:
    """A function that returns the solution's table, with changes, each (old, new)."""

    def write_rows():
        text = "\n".join(lesson()[name]())
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text.splitlines()

    return write_rows


a = functools.partial(solved, "three_ranks")
b = functools.partial(solved, "three_ranks_in_less_memory")
c = functools.partial(solved, "two_ranks_four_stages")
d = functools.partial(solved, "three_ranks_with_halves")


# --- 6.6a: three ranks -----------------------------------------------------------------------------------------------


def one_at_a_time():
    return [" ".join(f"{stage}F{each} {stage}B{each}" for each in range(4)) for stage in range(3)]


test_6_6a = judge(checks.exercise_6_6a, [a(), b()], {
    "stub": (stub, "not done yet"),
    "one at a time": (one_at_a_time, "24 units, and 6 is possible. A gap to look at: rank 0 idles from 28"),
    "last in reverse": (a(("2B0 2B1 2B2 2B3", "2B3 2B2 2B1 2B0")), "A gap to look at: rank 0 idles from "),
    "hangs": (a(("0F3 0B0", "0B0 0F3"), ("1F3 1B0", "1B0 1F3"), ("2F2 2F3", "2F3 2F2")),
              "in a circle: rank 1 waits for rank 2: 1B0 needs 2B0, and rank 2 waits for rank 1: 2F3 needs 1F3"),
    "a cell is missing": (a((" 1B3", "")), "no rank has started: 1B3 is missing"),
    "a cell twice": (a(("1B3", "1B3 1F0")), "no rank has started: 1F0 is in the table 2 times"),
    "backward first": (a(("1F0 1F1", "1B1 1F0 1F1"), ("1B0 1B1", "1B0")),
                       "no rank has started: 1B1 comes before 1F1"),
    "no cell": (a(("2F0", "2f0")), "rank 2: '2f0' is not a cell"),
    "halves": (a(("0B3", "0I3 0W3")), "0I3: this puzzle has whole backward passes only"),
    "stage elsewhere": (a(("1B3", "2B3"), ("2B2 2B3", "2B2 1B3")), "2B3 is in the row of rank 1, which has stage 1"),
    "two rows": (lambda: one_at_a_time()[:2], "return a list of 3 strings"),
    "one string": (lambda: " ".join(one_at_a_time()), "return a list of 3 strings"),
}, prepare="with_runs")  # fmt: skip


def test_6_6a_does_not_blame_a_right_table_for_pytorchs_order(with_runs, capsys):
    """All ranks in reverse: our runner has the right gradients, and PyTorch's runtime would not."""
    rows = [row.translate(str.maketrans("0123", "3210")) for row in ("F0 F1 F2 F3 B0 B1 B2 B3",)] * 3
    rows = [" ".join(f"{rank}{name}" for name in row.split()) for rank, row in enumerate(rows)]
    answer, attempt, _ = with_runs(lambda: rows)
    in_torch = pytest.fail  # it is not asked
    assert checks.exercise_6_6a((answer, attempt, in_torch), strict=True)
    assert "Not run in PyTorch" in capsys.readouterr().out


def test_a_wrong_gradient_is_never_accepted(with_runs):
    answer, attempt, in_torch = with_runs(a())
    with pytest.raises(AssertionError, match="the gradients are off by 1e-03"):
        checks.exercise_6_6a((answer, lambda *args: (attempt(*args)[0], 1e-3), in_torch), strict=True)
    with pytest.raises(AssertionError, match="PyTorch's runtime the gradients are off by 1e-03"):
        checks.exercise_6_6a((answer, attempt, lambda *args: 1e-3), strict=True)
    with pytest.raises(AssertionError, match="the gradients are off by nan"):
        checks.exercise_6_6a((answer, lambda *args: (attempt(*args)[0], math.nan), in_torch), strict=True)


# --- 6.6b: in less memory --------------------------------------------------------------------------------------------

test_6_6b = judge(checks.exercise_6_6b, [b()], {
    "stub": (stub, "not done yet"),
    "GPipe": (a(), "rank 0 keeps 4 forward passes at once, and may keep 3. 0F3 is the first one too many; rank 1"),
    "one rank too many": (b(("1B0 1F2", "1F2 1B0")), "rank 1 keeps 3 forward passes at once, and may keep 2. 1F2"),
    "too few": (b(("0F2 0B0", "0B0 0F2")), "units, and 6 is possible"),
    "hangs": (b(("0F1 0F2 0B0", "0B0 0F1 0F2")), "0B0 needs 1B0, and rank 1 waits"),
}, prepare="with_runs")  # fmt: skip


# --- 6.6c: two ranks, four stages ------------------------------------------------------------------------------------


def one_stage_after_the_other():
    return [
        " ".join(f"{stage}{kind}{each}" for kind, order in (("F", stages), ("B", stages[::-1])) for stage in order
                 for each in range(4))
        for stages in ((0, 2), (1, 3))
    ]  # fmt: skip


test_6_6c = judge(checks.exercise_6_6c, [c()], {
    "stub": (stub, "not done yet"),
    "GPipe": (one_stage_after_the_other, "rank 0 keeps 8 forward passes at once, and may keep 5. 2F1 is the first one"),
    "V": (lambda: ["0F0 0B0", "1F0 1B0 2F0"], "2F0 is in the row of rank 1, which has stage 1 and 3 in this puzzle"),
    "later gradient": (c(("0F2 2B0 0F3 2B1", "0F2 0F3 2B0 2B1")), "rank 0 keeps 6 forward passes at once"),
    "too late": (c(("0F1 2F0", "2F0 0F1")), "units, and 3 is possible"),
}, prepare="with_runs")  # fmt: skip


# --- 6.6d: with halves -----------------------------------------------------------------------------------------------


def in_halves():
    """1F1B with an I and a W for every B. Its longest gap is in the best order too: rank 0, from 3 to 5."""
    return [re.sub(r"(\d)B(\d)", r"\1I\2 \1W\2", row) for row in b()()]


test_6_6d = judge(checks.exercise_6_6d, [d()], {
    "stub": (stub, "not done yet"),
    "1F1B": (b(), "the ranks idle 6, 6, 6 units, and 2 is possible"),
    "1F1B in halves": (in_halves, "rank 0 idles from 13 to 14, because 0I3 needs 1I3"),  # not its gap from 3 to 5
    "both halves at once": (d(("2I1 2F2 2I2 2W0 2F3 2I3 2W1", "2I1 2W0 2F2 2I2 2W1 2F3 2I3")),
                            "the ranks idle 3, 3, 3 units, and 2 is possible"),
    "weights last": (d(("2W0 2F3 2I3", "2F3 2I3 2W0")), "rank 2 keeps 4 forward passes at once, and may keep 3. 2F3"),
    "without its weights": (d((" 2W3", "")), "no rank has started: 2W3 is missing"),
    "weights first": (d(("0I3 0W3", "0W3 0I3")), "no rank has started: 0W3 comes before 0I3"),
}, prepare="with_runs")  # fmt: skip
