"""The checks of lesson 2.4: right answers pass, the stub and plausible wrong ones are rejected with help."""

import copy
import json

import five_resumes
import pytest
import torch
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT

from shared import checks
from shared.checks import chapter_2, machinery

# --- 2.4a: five resumes to diagnose ----------------------------------------------------------------------------------

LOG = ROOT / "02-ddp-pytorch-ray/five_resumes.json"
DIAGNOSIS = five_resumes.RUNS


def test_2_4a_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_2_4a, stub, "not done yet", capsys)


def test_2_4a_accepts(capsys):
    assert_accepts(checks.exercise_2_4a, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": "optimizer"}, "run A: you say 'optimizer'. Then both ranks' first losses are right and both"),
    (DIAGNOSIS | {"B": "random"}, "run B: you say 'random'. Then both ranks' first losses are wrong, on the r"),
    (DIAGNOSIS | {"C": "scheduler"}, "run C: you say 'scheduler'. Then several losses are right on both ranks, until"),
    (DIAGNOSIS | {"D": "optimizer"}, "both ranks' second losses are wrong. Is that what you see in run D?"),
    (DIAGNOSIS | {"D": "random on rank 1"}, "Then rank 1's first loss is wrong on the right samples, and rank 0's"),
    (DIAGNOSIS | {"E": "model"}, "Then both ranks' losses jump back to those of an untrained model. Is that"),
    (DIAGNOSIS | {"E": "samples"}, "for E you say 'samples', which is not one of 'nothing', 'model', 'optimizer'"),
    ({"A": "scheduler"}, "return a dict with the keys A, B, C, D and E"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
])  # fmt: skip
def test_2_4a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_4a, lambda: answer, because, capsys)


def test_2_4a_the_log_holds_what_the_check_says_of_it():
    logs = json.loads(LOG.read_text())
    assert list(logs) == ["uninterrupted", *DIAGNOSIS]

    def first_wrong(run, column):
        pairs = ([logs[name][f"rank {rank}"][column] for name in ("uninterrupted", run)] for rank in (0, 1))
        return [
            next((n for n, (a, b) in enumerate(zip(*pair, strict=True), start=1) if a != b), None) for pair in pairs
        ]

    assert {run: first_wrong(run, "loss") for run in DIAGNOSIS} == {
        "A": [7, 7], "B": [2, 1], "C": [None, None], "D": [3, 2], "E": [1, 1],
    }  # fmt: skip
    assert [run for run in DIAGNOSIS if first_wrong(run, "samples") != [None, None]] == ["E"]


def test_2_4a_the_log_is_what_the_ranks_see(tmp_path):
    machinery.run_script(ROOT / "tests/five_resumes.py", 2, str(tmp_path / "log.json"))
    seen, committed = (json.loads(path.read_text()) for path in (tmp_path / "log.json", LOG))
    assert list(seen) == list(committed)
    for run, ranks in committed.items():
        for rank, columns in ranks.items():
            assert seen[run][rank]["samples"] == columns["samples"]
            assert seen[run][rank]["loss"] == pytest.approx(columns["loss"], abs=1e-6)


# --- 2.4b: save and resume on two ranks ------------------------------------------------------------------------------

REFERENCE = [[1, step, 2.0 + step / 100] for step in range(1, 13)]
LOGS = {  # what both ranks have logged if all is well
    **{f"reference-{rank}": REFERENCE for rank in (0, 1)},
    **{f"run-{rank}": [*REFERENCE[:9], *([2, *line[1:]] for line in REFERENCE[6:])] for rank in (0, 1)},
}
RESTARTED = "attempt 1 begins\nRuntimeError: Connection closed by peer\nattempt 2 begins\nattempt 2 begins\n"


def resumed_at(step):
    logs = copy.deepcopy(LOGS)
    for rank in (0, 1):
        logs[f"run-{rank}"] = [*REFERENCE[:9], *([2, *line[1:]] for line in REFERENCE[step - 1 :])]
    return logs


def wrong_from(step, *ranks):
    logs = copy.deepcopy(LOGS)
    for rank in ranks:
        for line in logs[f"run-{rank}"]:
            line[2] += (line[0] == 2 and line[1] >= step) * 1e-3
    return logs


@pytest.fixture
def resumed(monkeypatch, tmp_path):
    """Lets a test say how the two ranks ended and what they logged, without starting any."""

    def ended(exit_code=0, errors=RESTARTED, killed=True, logs=LOGS):
        monkeypatch.setattr(chapter_2, "kill_in_save", lambda script: (exit_code, errors, killed, logs))
        script = tmp_path / "save_and_resume.py"
        script.write_text("def save(path, model, optimizer, scheduler, step, rank): ...")
        return script

    return ended


def test_2_4b_accepts(resumed, capsys):
    assert_accepts(checks.exercise_2_4b, resumed(), capsys)


def test_2_4b_a_stub_is_not_done_yet(resumed, capsys):
    script = resumed()
    script.write_text("def save():\n    raise NotImplementedError\n")
    assert_rejects(checks.exercise_2_4b, script, "not done yet", capsys)


@pytest.mark.parametrize("line", ["from shared import checkpoint", "from shared import distributed, checkpoint",
                                  "import shared.checkpoint"])  # fmt: skip
def test_2_4b_rejects_what_it_asks_to_build(line, resumed, capsys):
    script = resumed()
    script.write_text(line)
    assert_rejects(checks.exercise_2_4b, script, "shared.checkpoint is what you are building", capsys)


@pytest.mark.parametrize(("outcome", "because"), [
    ({"killed": False}, "rank 0 never called it: which rank writes?"),
    ({"exit_code": 1, "errors": RESTARTED + "RuntimeError: PytorchStreamReader failed: finding central directory"},
     "resume() reads that half. What should be at `path` while a new checkpoint is"),
    ({"exit_code": 1, "errors": RESTARTED + "OSError: [Errno 22] Invalid argument"}, "resume() reads that half."),
    ({"exit_code": 1, "errors": RESTARTED + "TypeError: resume() should return the number of steps done, and returns"},
     "after the kill, the script failed: TypeError: resume() should return the number of steps done"),
    ({"exit_code": 1, "killed": False, "errors": "attempt 1 begins\nRuntimeError: Timed out waiting 30000ms for recv"},
     "before the kill, the script failed: RuntimeError: Timed out waiting 30000ms for recv. Does every rank call"),
    ({"exit_code": 1, "killed": False, "errors": "attempt 1 begins\nKeyError: 'x': "}, "before the kill, the script f"),
    ({"logs": resumed_at(1)}, "rank 0 begins with step 1, expected step 7, after the last whole checkpoint. Is there"),
    ({"logs": resumed_at(10)}, "rank 0 begins with step 10, expected step 7, after the last whole checkpoint. Rank 0"),
    ({"logs": resumed_at(6)}, "rank 0 begins with step 6, expected step 7, after the last whole checkpoint. What does"),
    ({"logs": wrong_from(7, 1)}, "the loss of step 7 is wrong on rank 1 alone. Both ranks have the same weights. Wh"),
    ({"logs": wrong_from(7, 0, 1)}, "the loss of step 7 is wrong on both ranks. What does the first loss depend on, b"),
    ({"logs": wrong_from(8, 1)}, "the loss of step 8 is wrong on rank 1 alone. Step 7 was right, so its update was"),
    ({"logs": wrong_from(10, 0, 1)}, "the loss of step 10 is wrong on both ranks. The steps before it are right."),
])  # fmt: skip
def test_2_4b_rejects(outcome, because, resumed, capsys):
    assert_rejects(checks.exercise_2_4b, resumed(**outcome), because, capsys)


# --- 2.4c: a file of weights -----------------------------------------------------------------------------------------


def load_weights(model, path, weights_only=True, strict=True, strip=str.removeprefix, ready=True):
    state = torch.load(path, map_location="cpu", weights_only=weights_only)
    if state.keys() != model.state_dict().keys():
        state = {strip(name, "module."): value for name, value in state.items()}
    model.load_state_dict(state, strict=strict)
    return model.eval() if ready else model


def strip_all(model, path):
    state = torch.load(path)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model.eval()


def strip_if_all(model, path):
    state = torch.load(path)
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    model.load_state_dict(state)
    return model.eval()


def test_2_4c_accepts(capsys):
    assert_accepts(checks.exercise_2_4c, load_weights, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("saved from its DDP wrapper, it raises", lambda m, p: load_weights(m, p, strip=lambda name, _: name)),
    ("Which names did not match?", lambda m, p: load_weights(m, p, strict=False, strip=lambda name, _: name)),
    ("loads without an error", lambda m, p: load_weights(m, p, strict=False)),
    ("a part called `module`", lambda m, p: load_weights(m, p, strip=lambda name, part: name.replace(part, ""))),
    # These two look at the file alone, and take a bare model's part called `module` for a wrapper.
    ("`module`, saved from the bare model, it raises", strip_all),
    ("`module` and no other, saved from the bare model, it raises", strip_if_all),
    ("call eval()", lambda m, p: load_weights(m, p, ready=False)),
    ("weights_only=True", lambda m, p: load_weights(m, p, weights_only=False)),
    ("return the model", lambda m, p: load_weights(m, p) and None),
    ("Some functions change their argument and return None", lambda m, p: m.load_state_dict(None)),
])  # fmt: skip
def test_2_4c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_4c, answer, because, capsys)
