"""The checks of lesson 1.3 accept the right answer, and reject the stub and plausible wrong answers with help."""

import json
import re
from pathlib import Path

import pytest
import torch

from shared import checks
from shared.checks import chapter_1, machinery

LESSON = Path(__file__).parents[1] / "01-ddp-pytorch-only" / "03_distributed_data_parallel.ipynb"


def stub(*_):
    raise NotImplementedError


RIGHT_DIAGNOSIS = {"A": "own accuracy", "B": "none", "C": "bare model", "D": "padding", "E": "no set_epoch"}


def diagnosis(**changed):
    return lambda: RIGHT_DIAGNOSIS | changed


def test_right_diagnosis_is_accepted():
    assert checks.exercise_1_3a(diagnosis(), strict=True)


@pytest.mark.parametrize(
    ("diagnose", "help_in_message"),
    [
        (stub, "not done yet"),
        (lambda: None, "return a dict with the keys A, B, C, D and E; yours is None"),
        (diagnosis(A="none"), "for run A you say 'none'. Then nothing in its logs would be wrong"),
        (diagnosis(A="bare model"), "for run A .* the two ranks' weights would differ. Is that so in run A?"),
        (diagnosis(B="no set_epoch"), "for run B .* begin both epochs with the same samples"),
        (diagnosis(C="own accuracy"), "for run C .* report different accuracies although their weights are equal"),
        (diagnosis(E="padding"), "for run E .* train on more than the 101 samples"),
        (
            diagnosis(D="padded"),
            "for D you say 'padded', which is not one of 'own accuracy', 'bare model', 'padding'",
        ),
    ],
)
def test_wrong_diagnosis_gets_help(diagnose, help_in_message):
    with pytest.raises(AssertionError, match=help_in_message):
        checks.exercise_1_3a(diagnose, strict=True)


def test_the_five_runs_show_what_the_check_says(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (printed, _) = chapter_1.run_script(LESSON.with_name("five_runs.py"), 2)
    assert re.findall("run (.)", printed) == list(RIGHT_DIAGNOSIS)
    for run, lines in zip(RIGHT_DIAGNOSIS.values(), printed.split("run ")[1:], strict=True):
        logs = re.findall(r"trained on (.+?) \.\.\. \((\d+) samples\)  sum of weights +(\S+)  accuracy (\S+)", lines)
        (first, samples, weights, accuracies) = zip(*logs, strict=True)  # rank 0's two epochs, then rank 1's
        assert (samples[0] + samples[2] != "5150") == (run == "padding")
        assert (first[0] == first[1] and first[2] == first[3]) == (run == "no set_epoch")
        assert (weights[:2] != weights[2:]) == (run == "bare model")
        assert (accuracies[:2] != accuracies[2:]) == (run == "own accuracy")


# --- exercise 1.3b: a small DDP ---------------------------------------------------------------------------------------

MY_DDP = """
import torch.distributed as dist

def attach(model):
    pending = []
    def start(parameter):
        work = dist.all_reduce(parameter.grad, async_op=True)
        pending.append((parameter, work))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    return pending

def finish(pending):
    for parameter, work in pending:
        work.wait()
        parameter.grad /= dist.get_world_size()
    pending.clear()
"""
DIVIDE = "        parameter.grad /= dist.get_world_size()\n"
WAIT = "        work.wait()\n"
BY_HAND = """
import torch.distributed as dist

def attach(model):
    return list(model.parameters())

def finish(pending):
    for parameter in pending:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""
WRONG_DDPS = {
    "not divided": (MY_DDP.replace(DIVIDE, ""), "on rank 0, 4 of 4 gradients .* are the sum. Divide by the world size"),
    "divided at once": (
        MY_DDP.replace(DIVIDE, "").replace("        pending.append", DIVIDE + "        pending.append"),
        "are the sum. Divide by the world size after `wait",
    ),
    "not waited for": (MY_DDP.replace(WAIT, ""), "half of this rank's own. You divided a gradient whose sum had not"),
    "not emptied": (MY_DDP.replace("    pending.clear()\n", ""), "in step 2 .* half of the mean. Step 1 was right"),
    "the loop's variable": (MY_DDP.replace("start(parameter)", "start(_)"), "3 of 4 gradients .* its last value"),
    "not in the background": (
        MY_DDP.replace(", async_op=True", "").replace(WAIT, ""),
        "4 all-reduces made backward.. wait",
    ),
    "growing forever": (
        MY_DDP.replace("(parameter, work)", "(parameter.grad, work)")
        .replace("for parameter, work", "for gradient, work")
        .replace("parameter.grad /=", "gradient /=")
        .replace("    pending.clear()\n", ""),
        "8 entries are left in `pending` after two steps",
    ),
    "after backward": (BY_HAND, "no all-reduce had started when backward.. returned"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the two ranks saw of each script, all of them in one launch."""
    folder = tmp_path_factory.mktemp("ddp")
    scripts = {"right": MY_DDP, **{name: script for name, (script, _) in WRONG_DDPS.items()}}
    for number, script in enumerate(scripts.values()):
        (folder / f"{number}.py").write_text(script)
    observed = chapter_1.watch_my_ddp(*(folder / f"{number}.py" for number in range(len(scripts))))
    return dict(zip(scripts, observed, strict=True))


def test_right_ddp_is_accepted(seen):
    chapter_1.judge_my_ddp(seen["right"])


@pytest.mark.parametrize("name", WRONG_DDPS)
def test_wrong_ddp_gets_help(name, seen):
    with pytest.raises(chapter_1.Wrong, match=WRONG_DDPS[name][1]):
        chapter_1.judge_my_ddp(seen[name])


def test_ddp_of_the_lesson_is_a_stub(tmp_path):
    cells = ["".join(cell["source"]) for cell in json.loads(LESSON.read_text())["cells"]]
    (cell,) = (cell for cell in cells if cell.startswith("%%writefile runs/lesson-1-3/my_ddp.py"))
    (tmp_path / "my_ddp.py").write_text(cell.partition("\n")[2])
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_1_3b(tmp_path / "my_ddp.py", strict=True)


# --- exercise 1.3c: what the two ranks report -------------------------------------------------------------------------


def shuffled(num_samples, seed):
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


ORDERS = [shuffled(1280, epoch) for epoch in (0, 1)]
RIGHT = [[True] * 100 + [False] * 28, [True] * 90 + [False] * 37]  # of 128 and 127 images
OWN = [sum(right) / len(right) for right in RIGHT]
ACCURACY = 190 / 255


def reports(accuracies, orders=ORDERS):
    return [
        {"orders": [order[rank::2] for order in orders], "right": RIGHT[rank], "accuracy": accuracies[rank]}
        for rank in range(2)
    ]


def exercise_1_3c(written, monkeypatch):
    """Run the check as if its two ranks had written these reports."""

    def run_script(script, nproc, folder):
        for rank, report in enumerate(written):
            Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))

    monkeypatch.setattr(machinery, "run_script", run_script)
    return checks.exercise_1_3c("exercise.py", strict=True)


def test_right_report_is_accepted(monkeypatch):
    assert exercise_1_3c(reports([ACCURACY, ACCURACY]), monkeypatch)


@pytest.mark.parametrize(
    ("written", "help_in_message"),
    [
        (
            reports([ACCURACY, ACCURACY], orders=[ORDERS[0], ORDERS[0]]),
            "call sampler.set_epoch.*accuracy is checked next",
        ),
        (
            reports([ACCURACY, ACCURACY], orders=[ORDERS[0], ORDERS[1][:-2]]),
            "epoch 1 the two ranks together did not see",
        ),
        (reports(OWN), "rank 0 reports is 0.78125, expected 0.745098. That is the accuracy on this rank's own part"),
        (reports([ACCURACY, OWN[1]]), "rank 1 reports .* this rank's own part"),
        (reports([sum(OWN) / 2] * 2), "the mean of the ranks' accuracies"),
        (reports([ACCURACY * 2] * 2), "divide once"),
        (reports([ACCURACY, ACCURACY])[:1], "rank 1 wrote no report"),
    ],
)
def test_wrong_report_gets_help(written, help_in_message, monkeypatch):
    with pytest.raises(AssertionError, match=help_in_message):
        exercise_1_3c(written, monkeypatch)


def run_lesson_script(changes: dict[str, str], tmp_path: Path, monkeypatch) -> bool:
    """Run the check for real, on the lesson's own script with these changes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two processes, even on a machine with one GPU
    cells = ["".join(cell["source"]) for cell in json.loads(LESSON.read_text())["cells"]]
    (cell,) = (cell for cell in cells if cell.startswith("%%writefile runs/lesson-1-3/exercise.py"))
    script = cell.partition("\n")[2]
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    path = tmp_path / "exercise.py"
    path.write_text(script)
    return checks.exercise_1_3c(path, strict=True)


STUB = 'raise NotImplementedError("fix the two bugs below, then delete this line")'
EPOCH = {"    orders.append([])": "    sampler.set_epoch(epoch)\n    orders.append([])"}
ACCURACY_OF_ALL = "accuracy = distributed.global_sum(right.sum()) / distributed.global_sum(torch.tensor(len(right)))"


def test_script_of_the_lesson_is_a_stub(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="not done yet"):
        run_lesson_script({}, tmp_path, monkeypatch)


def test_fixed_script_is_accepted(tmp_path, monkeypatch):
    fixed = {STUB: "", **EPOCH, "accuracy = right.sum() / len(right)": ACCURACY_OF_ALL}
    assert run_lesson_script(fixed, tmp_path, monkeypatch)


def test_collective_inside_an_if_gets_help(tmp_path, monkeypatch):
    inside = f"accuracy = right.double().mean()\nif worker.rank == 0:\n    {ACCURACY_OF_ALL}"
    with pytest.raises(AssertionError, match="inside an `if`"):
        run_lesson_script({STUB: "", **EPOCH, "accuracy = right.sum() / len(right)": inside}, tmp_path, monkeypatch)
