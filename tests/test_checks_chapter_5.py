"""The checks of chapter 5's exercises accept right answers, and reject the stub and plausible mistakes with help."""

from pathlib import Path

import pytest
import torch
from answers import OnRanks, assert_rejects, judge, written

import checks
from checks import chapter_5, machinery

GALLERY = Path(__file__).parent.parent / "05-bug-gallery"
LESSON = GALLERY / "01_bug_gallery.ipynb"
ON_RANKS = OnRanks({2: ()})
launched, run_before = ON_RANKS.fixtures()

# --- 5.1a: all ranks leave out the same steps -------------------------------------------------------------------------


SKIP = 'raise NotImplementedError("repair train_epoch, then delete this line")\n'
COLLEAGUE = written(LESSON, "skip").replace(SKIP, "")
ASKING = written(GALLERY / "solutions" / LESSON.name, "skip")
ALONE = "        if not torch.isfinite(loss):\n"
BY_GRADIENT = """
import torch.nn.functional as F

def train_epoch(ddp_model, batches, optimizer):
    skipped = 0
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(ddp_model(images), labels).backward()
        if all(parameter.grad.isfinite().all() for parameter in ddp_model.parameters()):
            optimizer.step()
        else:
            skipped += 1
    return skipped
"""
ASKING_ONLY_WHEN_DAMAGED = COLLEAGUE.replace(ALONE, f"{ALONE}            distributed.global_sum(torch.ones(()))\n")
WITHOUT_THE_DAMAGE = COLLEAGUE.replace("ddp_model(images)", "ddp_model(images.nan_to_num())")
OWN_COUNT = ASKING.replace("skipped += 1", "skipped += not torch.isfinite(loss)")
assert len({COLLEAGUE, ASKING, ASKING_ONLY_WHEN_DAMAGED, WITHOUT_THE_DAMAGE, OWN_COUNT}) == 5

test_5_1a = ON_RANKS.judge(
    checks.exercise_5_1a, 2, "damaged_batches", "", {"asking": ASKING, "by gradient": BY_GRADIENT}, {
        "the colleague's": (COLLEAGUE, "takes 4 steps, expected 3. If one rank leaves a step out"),
        "asking only when damaged": (ASKING_ONLY_WHEN_DAMAGED, "Does every rank"),
        "without the damage": (WITHOUT_THE_DAMAGE, "takes 5 steps, expected 3"),
        "own count": (OWN_COUNT, "rank 0 returns 1, and 2 steps were left out"),
    },
)  # fmt: skip


# --- 5.1b: a script with five mistakes --------------------------------------------------------------------------------


def write(folder: Path, *changes: tuple[str, str]) -> str:
    """The solution, with changes, each (old, new)."""
    text = written(GALLERY / "solutions" / LESSON.name, "room")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "room.py").write_text(text)
    return str(folder / "room.py")


@pytest.fixture(scope="module")
def room_launched(tmp_path_factory):
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
def says(monkeypatch, room_launched, tmp_path):
    """Lets the check see a change of what the solution's ranks have printed and written; returns the solution."""

    def instead(change) -> str:
        def run_ranks(runner, nproc, script, path):
            printed, weights = change(list(room_launched[0]), dict(room_launched[1]))
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
    (half_the_steps, "an epoch has 10 steps, and would have 20"),
    (another_accuracy, "What is still switched on?"),
    (own_losses, "is each the mean over all ranks?"),
    (both_print, "rank 1 prints too"),
    (both_write, "what all have, one rank writes"),
    (with_the_wrapper, "its keys begin with 'module."),
], prepare="says")  # fmt: skip


def test_5_1b_rejects_a_script_that_two_ranks_have_run(room_launched, says, capsys):
    answer = says(lambda printed, weights: (room_launched[2], weights))
    assert_rejects(checks.exercise_5_1b, answer, "ranks 0 and 1 call torch.save [1, 1] times", capsys)


def test_5_1b_rejects_the_room_as_it_was(tmp_path, capsys):
    text = written(LESSON, "room")
    (tmp_path / "room.py").write_text(text)
    assert_rejects(checks.exercise_5_1b, str(tmp_path / "room.py"), "not done yet", capsys)
    (tmp_path / "room.py").write_text(text.split("\n", maxsplit=1)[1])  # without its first line, it hangs
    assert checks.exercise_5_1b(str(tmp_path / "room.py")) is False
    assert "Did every rank call every collective" in capsys.readouterr().out


# --- 5.2a: each matrix whole on one rank -----------------------------------------------------------------------------

SHARDED = GALLERY / "02_sharded_bugs.ipynb"
STUB_5_2A = 'raise NotImplementedError("share the work, then delete this line")\n'
EVERY_RANK_DOES_ALL = written(SHARDED, "share").replace(STUB_5_2A, "")
SHARED = written(GALLERY / "solutions" / SHARDED.name, "share")
ON_LOCAL_SLICES = """
def update(parameters, lr, orthogonalize):
    for parameter in parameters:
        parameter.to_local().sub_(lr * orthogonalize(parameter.grad.to_local()))
"""
ALL_ON_RANK_0 = SHARED.replace("number % dist.get_world_size()", "0")
SENT_BY_ITS_OWNER_ALONE = SHARED.replace("        dist.broadcast(", "            dist.broadcast(")
NOT_SENT = SHARED.replace("        dist.broadcast(whole, src=owner)\n", "")
assert len({EVERY_RANK_DOES_ALL, SHARED, ON_LOCAL_SLICES, ALL_ON_RANK_0, SENT_BY_ITS_OWNER_ALONE, NOT_SENT}) == 6

test_5_2a = ON_RANKS.judge(
    checks.exercise_5_2a, 2, "shared_orthogonalization", "", {"shared": SHARED}, {
        "every rank does all": (EVERY_RANK_DOES_ALL, "orthogonalized 2 times. The result is right"),
        "on local slices": (ON_LOCAL_SLICES, "which is a part of one"),
        "all on rank 0": (ALL_ON_RANK_0, "4 and 0 matrices: share them evenly"),
        "sent by its owner alone": (SENT_BY_ITS_OWNER_ALONE, "Did every rank|rows of rank"),
        "not sent": (NOT_SENT, "Is it the update of the whole matrix"),
    },
)  # fmt: skip


# --- 5.2b: what belongs to the whole matrix is added up ---------------------------------------------------------------

STUB_5_2B = 'raise NotImplementedError("repair update, then delete this line")\n'
OF_SLICES = written(SHARDED, "adafactor").replace(STUB_5_2B, "")
SUMMED = written(GALLERY / "solutions" / SHARDED.name, "adafactor")
SUMMED_ONE_BY_ONE = """
import torch
from shared import distributed

def mean(values, dim=None):
    count = torch.tensor(float(len(values) if dim == 0 else values.numel()))
    return distributed.global_sum(values.sum() if dim is None else values.sum(dim)) / distributed.global_sum(count)

def update(weights, gradients, lr):
    for weight, gradient in zip(weights, gradients):
        of_rows = gradient.square().mean(dim=1, keepdim=True)
        change = gradient / (of_rows * mean(gradient.square(), dim=0) / mean(of_rows)).sqrt()
        change /= max(1, mean(change.square()).sqrt())
        weight -= lr * max(1e-3, mean(weight.square()).sqrt()) * change
"""
SIZE_OF_A_SLICE = SUMMED_ONE_BY_ONE.replace("mean(change.square())", "change.square().mean()")
MEAN_OF_MEANS = """
import torch
import torch.distributed as dist

def mean(values):
    dist.all_reduce(values)
    return values / dist.get_world_size()

def update(weights, gradients, lr):
    for weight, gradient in zip(weights, gradients):
        squares = gradient.square()
        of_rows = squares.mean(dim=1, keepdim=True)
        change = gradient / (of_rows * mean(squares.mean(dim=0)) / mean(of_rows.mean())).sqrt()
        change /= max(1, mean(change.square().mean()).sqrt())
        weight -= lr * max(1e-3, mean(weight.square().mean()).sqrt()) * change
"""
ROWS_TOO = SUMMED_ONE_BY_ONE.replace(
    "gradient.square().mean(dim=1, keepdim=True)", "mean(gradient.square(), dim=0).mean()"
)
GATHERED = """
import torch
from shared import distributed

def update(weights, gradients, lr):
    for weight, gradient in zip(weights, gradients):
        whole, gradients_of_all = (torch.cat(distributed.gather_objects(each)) for each in (weight, gradient))
        first = sum(distributed.gather_objects(len(weight))[: torch.distributed.get_rank()])
        squares = gradients_of_all.square()
        of_rows = squares.mean(dim=1, keepdim=True)
        change = gradients_of_all / (of_rows * squares.mean(dim=0) / of_rows.mean()).sqrt()
        change /= max(1, change.square().mean().sqrt())
        change *= max(1e-3, whole.square().mean().sqrt())
        weight -= lr * change[first : first + len(weight)]
"""
SKIPPED_WITHOUT_ROWS = SUMMED.replace(
    "        squares, num_columns", "        if len(weight) == 0:\n            continue\n        squares, num_columns"
)

test_5_2b = ON_RANKS.judge(
    checks.exercise_5_2b, 2, "adafactor_on_slices", "", {"summed": SUMMED, "one by one": SUMMED_ONE_BY_ONE}, {
        "of slices": (OF_SLICES, "Each column of their change is off by its own factor"),
        "the change's size of a slice": (SIZE_OF_A_SLICE, "off by the same factor. Which single number"),
        "mean of means": (MEAN_OF_MEANS, r"the 5 rows of rank 0 of the \[9, 8\] matrix"),
        "rows too": (ROWS_TOO, "Each row of their change is off by its own factor"),
        "not in place": (SUMMED.replace("weight -= lr", "weight = weight - lr"), "They have not changed"),
        "gathered": (GATHERED, "numbers to collectives, at most 63. The result is right"),
        "skipped without rows": (SKIPPED_WITHOUT_ROWS, "same collectives, equally often|Did every rank call"),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "lesson", "cell"),
    [
        (checks.exercise_5_1a, LESSON, "skip"),
        (checks.exercise_5_2a, SHARDED, "share"),
        (checks.exercise_5_2b, SHARDED, "adafactor"),
    ],
)
def test_stubs_are_rejected(check, lesson, cell, capsys, tmp_path):
    (tmp_path / "stub.py").write_text(written(lesson, cell))
    assert_rejects(check, tmp_path / "stub.py", "not done yet", capsys)
