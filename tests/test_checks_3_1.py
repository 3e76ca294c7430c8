"""The checks of lesson 3.1: right answers pass, the stub and plausible wrong ones are rejected with help."""

import copy
import math
import re

import pytest
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT

from shared import checks
from shared.checks import chapter_3, machinery

# --- exercise 3.1a: the largest batch ---------------------------------------------------------------------------------


def largest_batch(needed, limit, least=0):
    first = needed(1)
    sequence = needed(2) - first
    return max(least, (limit - first + sequence) // sequence)


def searched(needed, limit):
    batch = 0
    while needed(batch + 1) <= limit:
        batch += 1
    return batch


def test_3_1a_accepts(capsys):
    assert_accepts(checks.exercise_3_1a, largest_batch, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("needed(1) includes the state", lambda needed, limit: limit // needed(1)),
    ("there before the first sequence", lambda needed, limit: limit // (needed(2) - needed(1))),
    ("each is a run", searched),
    ("a batch of 0", lambda needed, limit: (limit - needed(0)) // (needed(1) - needed(0))),
    ("needed(1) already includes the first", lambda needed, limit: largest_batch(needed, limit) - 1),
    ("Round down", lambda needed, limit: math.ceil((limit - needed(1)) / (needed(2) - needed(1))) + 1),
    ("it is 0", lambda needed, limit: largest_batch(needed, limit, least=-math.inf)),
    ("a whole number", lambda needed, limit: largest_batch(needed, limit) + 0.5),
    ("a whole number", lambda needed, limit: None),
])  # fmt: skip
def test_3_1a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_1a, answer, because, capsys)


# --- exercise 3.1b: six runs whose state is sharded -------------------------------------------------------------------

DIAGNOSIS = {"A": "gradients", "B": "graph", "C": "none", "D": "moments", "E": "copy", "F": "weights"}


def test_3_1b_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_3_1b, stub, "not done yet", capsys)


def test_3_1b_accepts(capsys):
    assert_accepts(checks.exercise_3_1b, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": "weights"}, "for run A you say 'weights'. Then from the first backward pass on, both ranks"),
    (DIAGNOSIS | {"F": "gradients"}, "after backward, and no longer after zero_grad. Is that the case in run F?"),
    (DIAGNOSIS | {"B": "none"}, "Then each part of the state would be halved. How many MB are"),
    (DIAGNOSIS | {"D": "weights"}, "at all four points. Is that the case in run D?"),
    (DIAGNOSIS | {"F": "moments"}, "the first optimizer step would add 8 bytes per parameter"),
    (DIAGNOSIS | {"F": "copy"}, "the two ranks would hold different amounts"),
    (DIAGNOSIS | {"D": "graph"}, "each step would end with more than the step before it"),
    (DIAGNOSIS | {"C": "leak"}, "for C you say 'leak', which is not one of 'weights', 'gradients',"),
    ({"A": "none"}, "return a dict with the keys A, B, C, D, E and F"),
    (None, "return a dict with the keys A, B, C, D, E and F; yours is None"),
])  # fmt: skip
def test_3_1b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_1b, lambda: answer, because, capsys)


def test_3_1b_the_six_runs_show_what_the_check_says():
    (printed, _) = machinery.run_script(ROOT / "03-fsdp-deepspeed/six_shardings.py", 2)
    held = {}
    for run, numbers in re.findall(r"run (.), rank .(.*)", printed):
        held.setdefault(run, []).append([float(number) for number in re.findall(r"[\d.]+", numbers)])
    assert list(held) == list(DIAGNOSIS)
    whole = 1_059_584 * 4 / 1e6  # MB of 4 bytes per parameter
    healthy = [whole * halves / 2 for halves in (1, 2, 4, 3, *(3, 4, 4, 3) * 2)]
    for run, mistake in DIAGNOSIS.items():
        more = {
            "none": [0] * 12,
            "weights": [0, *[whole] * 11],
            "copy": [0, *[whole] * 11],
            "gradients": [0, whole / 2, whole / 2, 0] * 3,
            "moments": [0, 0, *[whole] * 10],
            "graph": [0] * 3 + [7.0] * 4 + [14.0] * 4 + [21.0],
        }[mistake]
        for rank, numbers in enumerate(held[run]):
            extra = [0] * 12 if (mistake, rank) == ("copy", 1) else more
            expected = [a + b for a, b in zip(healthy, extra, strict=True)]
            assert numbers == pytest.approx(expected, abs=0.11), (run, rank)


# --- exercise 3.1c: ZeRO-1 by hand ------------------------------------------------------------------------------------


def report(share=1 / 3, **first_step):
    """What a rank reports whose three steps are right, except for `first_step` or the `step` of that number."""
    right = {"equal": {"mean": 45, "sum": 0, "own": 0}, "unchanged": 0, "gradients": 0, "parameters": 45}
    steps = [copy.deepcopy(right) for _ in range(3)]
    steps[first_step.pop("step", 1) - 1] |= first_step
    return {"steps": steps, "share": share}


def equal(mean, total=0, own=0):
    return {"mean": mean, "sum": total, "own": own}


@pytest.fixture
def reports(monkeypatch, tmp_path):
    """Lets a test say what the learner's three ranks report, or how they fail, without starting any."""

    def give(outcome):
        def watch_zero_1(script):
            return outcome if isinstance(outcome, list) else [outcome] * 3

        monkeypatch.setattr(chapter_3, "watch_zero_1", watch_zero_1)

    return give


def test_3_1c_accepts(reports, capsys):
    reports([report(0.32), report(0.33), report(0.35)])
    assert_accepts(checks.exercise_3_1c, "zero_1.py", capsys)


def test_3_1c_a_stub_is_not_done_yet(tmp_path, capsys):
    script = tmp_path / "zero_1.py"
    script.write_text('raise NotImplementedError("write both functions")\n')
    assert_rejects(checks.exercise_3_1c, script, "not done yet", capsys)


@pytest.mark.parametrize(("outcome", "because"), [
    (report(equal=equal(0, own=45)), "Many equal an update with this rank's own gradient: average it"),
    (report(equal=equal(0, total=45)), "with the sum of the ranks' gradients: divide it by the world size"),
    (report(equal=equal(12), unchanged=33), "33 have not changed. Their owners have new values: how do they"),
    (report(equal=equal(3)), "after step 1, rank 0 has 3 of 45 parameters as one AdamW with the mean gradient would"),
    (report(equal=equal(3), step=2), "Step 1 was right. What is left from it when the next backward pass begins?"),
    ([report(), report(), report(gradients=33)], "rank 2 still has 33 gradients. Whose gradients does your optimizer"),
    (report(share=1.0), "the ranks keep 100%, 100%, 100% of the moments, and none should keep more than 35%. That is"),
    ([report(0.9), report(0.05), report(0.05)], "Parameters differ in size: balance the numbers in them"),
    ([report(0.326), report(0.318), report(0.356)], "keep 33%, 32%, 36% of the moments"),  # owners by turns
    (report(share=0.2), "the ranks keep 60% of the moments together: does each parameter have an owner?"),
])  # fmt: skip
def test_3_1c_rejects(outcome, because, reports, capsys):
    reports(outcome)
    assert_rejects(checks.exercise_3_1c, "zero_1.py", because, capsys)


@pytest.mark.parametrize(("error", "because"), [
    ("the script failed: RuntimeError: Timed out waiting 20000ms for send", "and do they agree on each source?"),
    ("it hangs: still running after 240 s.", "one rank called a collective that another rank never reached."),
    ("the script failed: NameError: name 'onwer' is not defined", "not right yet: the script failed: NameError"),
])  # fmt: skip
def test_3_1c_says_why_ranks_fail(error, because, monkeypatch, tmp_path, capsys):
    def run_script(*arguments):
        raise machinery.Wrong(error)

    monkeypatch.setattr(machinery, "run_script", run_script)
    assert_rejects(checks.exercise_3_1c, tmp_path / "zero_1.py", because, capsys)
