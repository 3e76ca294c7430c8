"""The checks of chapter 5's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import json
from pathlib import Path

import pytest
import torch
from answers import assert_rejects, judge, stub

import checks
from checks import chapter_5, machinery

GALLERY = Path(__file__).parent.parent / "05-bug-gallery"

# --- 5.1a: what must be equal, and what must differ -------------------------------------------------------------------


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


test_5_1a = judge(checks.exercise_5_1a, [suspicious], [
    (stub, "not done yet"),
    (first_two, "the last of three ranks differs"),
    (all_equal, "any two count, not only neighbors"),
    (by_sets, "TypeError: unhashable type: 'list'"),
    (lambda *given: suspicious(*given)[::-1], "sorted by name"),
    (lambda *given: set(suspicious(*given)), "should be a list"),
])  # fmt: skip


# --- 5.1b: a script with five mistakes --------------------------------------------------------------------------------


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
def launched(tmp_path_factory):
    """What the ranks of the solution print, the weights that they write, and what ranks print that both write."""
    folder, commands = tmp_path_factory.mktemp("room"), []
    by_both = ("if worker.rank == 0:\n    torch.save", "if True:\n    torch.save")
    for name, changes in {"right": [], "both": [by_both]}.items():
        (folder / name).mkdir()
        commands.append([machinery.probe("count_saves"), write(folder / name, *changes), folder / name / "weights.pt"])
    right, both = machinery.run_scripts(commands, 2)
    for each in (right, both):
        machinery.expect_success(each.exit_code, each.errors)
    return right.printed, torch.load(folder / "right/weights.pt"), both.printed


@pytest.fixture
def says(monkeypatch, launched, tmp_path):
    """Lets the check see a change of what the solution's ranks have printed and written; returns the solution."""

    def instead(change) -> str:
        def run_ranks(runner, nproc, script, path):
            printed, weights = change(list(launched[0]), dict(launched[1]))
            torch.save(weights, path)
            return printed

        monkeypatch.setattr(chapter_5, "run_ranks", run_ranks)
        return write(tmp_path)

    return instead


def unchanged(printed, weights):
    return printed, weights


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


test_5_1b = judge(checks.exercise_5_1b, [unchanged], [
    (half_the_steps, "an epoch has 10 steps, and 20"),
    (another_accuracy, "What is still switched on?"),
    (own_losses, "is each the mean over all ranks?"),
    (both_print, "rank 1 prints, too"),
    (both_write, "what all have, one rank writes"),
    (with_the_wrapper, "its keys begin with 'module."),
], prepare="says")  # fmt: skip


def test_5_1b_rejects_a_script_that_two_ranks_have_run(launched, says, capsys):
    answer = says(lambda printed, weights: (launched[2], weights))
    assert_rejects(checks.exercise_5_1b, answer, "ranks 0 and 1 call torch.save [1, 1] times", capsys)


def test_5_1b_rejects_the_room_as_it_was(tmp_path, capsys):
    text = script_in(GALLERY / "01_bug_gallery.ipynb")
    (tmp_path / "room.py").write_text(text)
    assert_rejects(checks.exercise_5_1b, str(tmp_path / "room.py"), "not done yet", capsys)
    (tmp_path / "room.py").write_text(text.split("\n", maxsplit=1)[1])  # without its first line, it hangs
    assert checks.exercise_5_1b(str(tmp_path / "room.py")) is False
    assert "Did every rank call every collective" in capsys.readouterr().out
