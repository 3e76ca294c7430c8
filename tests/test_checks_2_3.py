"""The checks of lesson 2.3: right answers pass, the stub and plausible wrong ones are rejected with help."""

import ast
import json
from itertools import pairwise

import pytest
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT, Notebook

from shared import checks
from shared.checks import chapter_2

CHAPTER = ROOT / "02-ddp-pytorch-ray"
LESSON = CHAPTER / "03_ray_data.ipynb"

# --- 2.3a: five streams to diagnose ----------------------------------------------------------------------------------

DIAGNOSIS = {"A": "files only", "B": "rows dropped", "C": "nothing", "D": "idle rank", "E": "same order"}


def test_2_3a_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_2_3a, stub, "not done yet", capsys)


def test_2_3a_accepts(capsys):
    assert_accepts(checks.exercise_2_3a, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": "nothing"}, "stream A: it is not 'nothing'. How many rows does each rank get, how are they mix"),
    (DIAGNOSIS | {"B": "nothing"}, "stream B: it is not 'nothing'. How many rows does each rank get, how are they mix"),
    (DIAGNOSIS | {"C": "rows dropped"}, "stream C: it is not 'rows dropped'. Then some of the 101 ids reach neither"),
    (DIAGNOSIS | {"D": "not split"}, "stream D: it is not 'not split'. Then each rank would receive all 101 samples."),
    (DIAGNOSIS | {"E": "files only"}, "stream E: it is not 'files only'. Then the rows of a file still arrive one aft"),
    (DIAGNOSIS | {"C": "idle rank"}, "stream C: it is not 'idle rank'. Then one rank receives nothing."),
    (DIAGNOSIS | {"C": "same order"}, "stream C: it is not 'same order'. Compare the two epochs on one rank."),
    (
        DIAGNOSIS | {"D": "one block"},
        "for D you say 'one block', which is not one of 'nothing', 'rows dropped', 'idle rank'",
    ),
    ({"A": "nothing"}, "return a dict with the keys A, B, C, D and E"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
])  # fmt: skip
def test_2_3a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_3a, lambda: answer, because, capsys)


@pytest.mark.parametrize("stream", DIAGNOSIS)
def test_2_3a_each_stream_has_its_fault_and_no_other(stream):
    ranks = json.loads((CHAPTER / "five_streams.json").read_text())[stream].values()
    fault = DIAGNOSIS[stream]
    for epoch in (0, 1):
        received = [orders[epoch] for orders in ranks]
        every_id = sorted(received[0] + received[1])
        assert len(every_id) == len(set(every_id)) == (100 if fault == "rows dropped" else 101)
        assert (min(map(len, received)) == 0) == (fault == "idle rank")
        for order in filter(None, received):
            neighbours = sum(second == first + 1 for first, second in pairwise(order))
            assert (neighbours > len(order) / 2) == (fault == "files only")
    for first, second in filter(all, ranks):  # a rank that receives nothing has no order
        assert (first == second) == (fault == "same order")


# --- 2.3b: an error that every rank must learn of --------------------------------------------------------------------

SIZES = [[32], [32, 32, 7]]


def ends(ending="returns", steps=3, weights=None):
    return {"ending": ending, "steps": steps, "weights": weights or chapter_2.train_on_one_process(SIZES)}


RIGHT = [ends(), ends()], [ends("ValueError", 2), ends("ValueError", 2)]
CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] "
    "Connection closed by peer [127.0.0.1]:40131"
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Lets a test say how train_epoch ends on both ranks, without and with a bad image, without starting any."""

    def ending(whole, broken):
        reports = {-1: whole, 1: broken}
        monkeypatch.setattr(chapter_2, "run_train_epoch", lambda script, sizes, broken_rank: reports[broken_rank])
        script = tmp_path / "bad_image.py"
        script.write_text("def train_epoch(ddp_model, stream, optimizer): ...")
        return script

    return ending


def test_2_3b_accepts_either_time_to_stop(run, capsys):
    assert_accepts(checks.exercise_2_3b, run(*RIGHT), capsys)
    at_the_end = [ends("ValueError", 4), ends("ValueError", 4)]
    assert_accepts(checks.exercise_2_3b, run(RIGHT[0], at_the_end), capsys)


@pytest.mark.parametrize(("whole", "broken", "because"), [
    ([ends(CLOSED), ends(CLOSED)], None, "every image can be read, but on rank 0 train_epoch ends with RuntimeError"),
    ([ends(), ends("ValueError")], None, "but on rank 1 train_epoch ends with ValueError. Does every rank call every"),
    ([ends(steps=1), ends(steps=1)], None, "on rank 0 the optimizer takes 1 steps, expected 3"),
    ([ends(weights=[0.0] * 640)] * 2, None, "on rank 0 the weights are not those of one process. Keep the loss"),
    (RIGHT[0], RIGHT[0], "rank 1 cannot read an image, and both ranks return as if the epoch were complete"),
    (RIGHT[0], [ends(CLOSED), ends("ValueError")], f"and on rank 0 train_epoch ends with {CLOSED}"),
    (RIGHT[0], [ends(), ends("ValueError")], "rank 1 cannot read an image, and rank 0 returns. How could it know"),
    (RIGHT[0], [ends("ValueError", 4), ends("ValueError", 2)], "have taken 4 and 2 steps: their weights differ"),
])  # fmt: skip
def test_2_3b_rejects(whole, broken, because, run, capsys):
    assert_rejects(checks.exercise_2_3b, run(whole, broken), because, capsys)


def test_2_3b_the_stub_is_not_done_yet_and_without_its_line_leaves_a_rank_waiting(tmp_path, capsys):
    (cell,) = (cell for cell in Notebook(LESSON).cells if cell.target.endswith("bad_image.py"))
    script = tmp_path / "bad_image.py"
    script.write_text(cell.body)
    assert_rejects(checks.exercise_2_3b, script, "not done yet", capsys)
    script.write_text("".join(line for line in cell.body.splitlines(True) if not line.startswith("raise NotImpl")))
    assert checks.exercise_2_3b(script) is False
    assert "rank 1 cannot read an image, and on rank 0 train_epoch ends with RuntimeError" in capsys.readouterr().out


# --- the lesson ------------------------------------------------------------------------------------------------------


def class_named(name: str, source: str) -> str:
    """The syntax tree of the class `name` in Python source."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return ast.dump(found[0])


def test_the_lesson_shows_the_class_that_the_script_uses() -> None:
    shown = next(cell.source for cell in Notebook(LESSON).code if "class EverySample" in cell.source)
    script = (CHAPTER / "ray_images.py").read_text()
    assert class_named("EverySample", shown) == class_named("EverySample", script)
