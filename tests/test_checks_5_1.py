"""The checks of lesson 5.1: the stub and plausible wrong answers are rejected with a message that helps."""

import json
from pathlib import Path

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub

from shared import checks
from shared.checks import chapter_5

GALLERY = Path(__file__).parent.parent / "05-bug-gallery"


def suspicious(gathered, equal, different):
    wrong = [name for name in equal if gathered[name].count(gathered[name][0]) < len(gathered[name])]
    wrong += [name for name in different if any(gathered[name].count(value) > 1 for value in gathered[name])]
    return sorted(wrong)


def first_two(gathered, equal, different):
    wrong = [name for name in equal if gathered[name][0] != gathered[name][1]]
    return sorted(wrong + [name for name in different if gathered[name][0] == gathered[name][1]])


def all_equal(gathered, equal, different):
    wrong = [name for name in equal if gathered[name].count(gathered[name][0]) < len(gathered[name])]
    return sorted(wrong + [name for name in different if len({str(value) for value in gathered[name]}) == 1])


def by_sets(gathered, equal, different):
    wrong = [name for name in equal if len(set(gathered[name])) > 1]
    return sorted(wrong + [name for name in different if len(set(gathered[name])) < len(gathered[name])])


def test_5_1a_accepts(capsys):
    assert_accepts(checks.exercise_5_1a, suspicious, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("the last of three ranks differs", first_two),
    ("any two count, not only neighbours", all_equal),
    ("TypeError: unhashable type: 'list'", by_sets),
    ("sorted by name", lambda *given: suspicious(*given)[::-1]),
    ("should be a list", lambda *given: set(suspicious(*given))),
])  # fmt: skip
def test_5_1a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_5_1a, answer, because, capsys)


def script_in(notebook: Path) -> str:
    """What the notebook writes as room.py."""
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    (text,) = [cell.split("\n", maxsplit=1)[1] for cell in cells if cell.startswith("%%writefile")]
    return text


def write(folder: Path, *changes: tuple[str, str]) -> str:
    """The solution, with changes, each (old, new)."""
    text = script_in(GALLERY / "solutions/01_bug_gallery.ipynb")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "room.py").write_text(text)
    return str(folder / "room.py")


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """What the ranks of the solution have printed, and the weights that they have written: one launch for all."""
    folder = tmp_path_factory.mktemp("room")
    (folder / "runner.py").write_text(chapter_5.RUNNER)
    printed = chapter_5.run_ranks(folder / "runner.py", 2, write(folder), str(folder / "weights.pt"))
    return printed, torch.load(folder / "weights.pt")


@pytest.fixture
def says(monkeypatch, right):
    """Lets the check see what a script would have printed and written that is nearly right."""

    def instead(change) -> None:
        def run_ranks(runner, nproc, script, path):
            printed, weights = change(list(right[0]), dict(right[1]))
            torch.save(weights, path)
            return printed

        monkeypatch.setattr(chapter_5, "run_ranks", run_ranks)

    return instead


def test_5_1b_accepts(tmp_path, capsys, says):
    says(lambda printed, weights: (printed, weights))
    assert_accepts(checks.exercise_5_1b, write(tmp_path), capsys)


def half_the_steps(printed, weights):
    lines = printed[0].splitlines()
    return ["\n".join(lines[10:]), *printed[1:]], weights


def another_accuracy(printed, weights):
    before, last, saves = printed[0].rpartition("accuracy ")
    return [f"{before}{last}0.5\n{saves.splitlines()[-1]}", *printed[1:]], weights


def own_losses(printed, weights):
    first, rest = printed[0].split("\n", maxsplit=1)
    return [f"{first}1\n{rest}".replace("loss 2.", "loss 3."), *printed[1:]], weights


def both_print(printed, weights):
    return [printed[0], printed[0]], weights


def both_write(printed, weights):
    return [printed[0], printed[1].replace("saves 0", "saves 1")], weights


def with_the_wrapper(printed, weights):
    return printed, {f"module.{name}": weights[name] for name in weights}


@pytest.mark.parametrize(("because", "change"), [
    ("an epoch has 10 steps, and 20", half_the_steps),
    ("What is still switched on?", another_accuracy),
    ("is each the mean over all ranks?", own_losses),
    ("rank 1 prints, too", both_print),
    ("what all have, one rank writes", both_write),
    ("its keys begin with 'module.", with_the_wrapper),
])  # fmt: skip
def test_5_1b_rejects(because, change, says, tmp_path, capsys):
    says(change)
    assert_rejects(checks.exercise_5_1b, write(tmp_path), because, capsys)


def test_5_1b_rejects_a_script_that_two_ranks_have_run(tmp_path, capsys):
    script = write(tmp_path, ("if worker.rank == 0:\n    torch.save", "if True:\n    torch.save"))
    assert checks.exercise_5_1b(script) is False
    assert "ranks 0 and 1 call torch.save [1, 1] times" in capsys.readouterr().out


def test_5_1b_rejects_the_room_as_it_was(tmp_path, capsys):
    text = script_in(GALLERY / "01_bug_gallery.ipynb")
    (tmp_path / "room.py").write_text(text)
    assert_rejects(checks.exercise_5_1b, str(tmp_path / "room.py"), "not done yet", capsys)
    (tmp_path / "room.py").write_text(text.split("\n", maxsplit=1)[1])  # without its first line, it hangs
    assert checks.exercise_5_1b(str(tmp_path / "room.py")) is False
    assert "Did every rank call every collective" in capsys.readouterr().out
