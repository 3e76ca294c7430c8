"""The checks of lesson 1.4: right answers pass, the stub and plausible wrong ones are rejected with help."""

import math

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks
from shared.checks import chapter_1, machinery


@pytest.mark.parametrize("check", [checks.exercise_1_4a, checks.exercise_1_4b])
def test_a_stub_is_not_done_yet(check, capsys):
    assert_rejects(check, stub, "not done yet", capsys)


def test_1_4a_accepts(capsys):
    assert_accepts(checks.exercise_1_4a, lambda rates: {n: rates[n] / (n * rates[1]) for n in rates}, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (lambda rates: {n: rates[n] / rates[1] for n in rates}, "is 1.6, expected 0.8. That is the speed-up: divide it"),
    (lambda rates: {n: rates[n] / n for n in rates}, "is 240, expected 0.8. That is the rate of each process: divide"),
    (lambda rates: {n: n * rates[1] / rates[n] for n in rates}, "is 1.25, expected 0.8. It is upside down"),
    (lambda rates: {n: 100 * rates[n] / (n * rates[1]) for n in rates}, "is 80, expected 0.8. That is a percentage"),
    (lambda rates: {n: rates[n] / max(rates.values()) for n in rates}, "on 2 process(es) is 0.533333, expected 0.8."),
    (lambda rates: [rates[n] / (n * rates[1]) for n in rates], "return a dict with the same keys, 1, 2 and 4"),
])  # fmt: skip
def test_1_4a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_1_4a, answer, because, capsys)


def verdict(fp32, port32, fp64, port64):
    if len(fp32) != len(port32) or len(fp64) != len(port64):
        return "bug"
    if any(not math.isclose(a, b, rel_tol=1e-9) for a, b in zip(fp64, port64, strict=True)):
        return "bug"
    return "same" if fp32 == port32 else "rounding"


def by_every_step(fp32, port32, fp64, port64):
    close = all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(fp32, port32, strict=False))
    return "same" if fp32 == port32 else "rounding" if close else "bug"


def by_the_first_step(fp32, port32, fp64, port64):
    if len(fp32) != len(port32) or not math.isclose(fp32[0], port32[0], rel_tol=1e-5):
        return "bug"
    return "same" if fp32 == port32 else "rounding"


def without_lengths(fp32, port32, fp64, port64):
    return verdict(fp32[: len(port32)], port32, fp64[: len(port64)], port64)


def by_a_loose_tolerance(fp32, port32, fp64, port64):
    if len(fp64) != len(port64) or any(not math.isclose(a, b, rel_tol=1e-5) for a, b in zip(fp64, port64, strict=True)):
        return "bug"
    return "same" if fp32 == port32 else "rounding"


def test_1_4b_accepts(capsys):
    assert_accepts(checks.exercise_1_4b, verdict, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (by_every_step, "you say 'bug', expected 'rounding': in float64 nothing is left of the difference"),
    (by_the_first_step, "you say 'rounding', expected 'bug': the first step agrees, as it does where averaging"),
    (without_lengths, "you say 'same', expected 'bug': a step is missing"),
    (by_a_loose_tolerance, "expected 'bug': 1e-7 is more than rounding in float64 makes"),
    (lambda *losses: None, "you say None, expected 'same'"),
])  # fmt: skip
def test_1_4b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_1_4b, answer, because, capsys)


@pytest.fixture
def printed(monkeypatch):
    """Lets a test say what each of the learner's three ranks prints, or how it fails, without starting any."""

    def prints(outcome):
        def run_script(path, nproc):
            assert (path, nproc) == ("exercise.py", 3)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(chapter_1, "run_script", run_script)

    return prints


def test_1_4c_accepts(printed, capsys):
    printed(["hello from rank 0\nmean loss 2.0\n", "hello from rank 1\n", ""])
    assert_accepts(checks.exercise_1_4c, "exercise.py", capsys)


@pytest.mark.parametrize(("outcome", "because"), [
    (NotImplementedError(), "not done yet"),
    (["mean loss 2.0\n"] * 3, "3 ranks print 1, 1, 1 lines with `mean loss`; expected one, from rank 0 alone"),
    (["", "mean loss 2.0\n", ""], "3 ranks print 0, 1, 0 lines"),
    (["", "", ""], "3 ranks print 0, 0, 0 lines with `mean loss`"),
    (["mean loss 6.0\n", "", ""], "the mean loss of 3 ranks is 6, expected 2. Divide the sum by the world size"),
    (["mean loss 3.0\n", "", ""], "is 3, expected 2. Divide the sum by the world size, whatever it is."),
    (["mean loss 1.0\n", "", ""], "the mean loss of 3 ranks is 1, expected 2. Is it the mean over ALL ranks?"),
    (["mean loss tensor([2.0])\n", "", ""], "should be a number, and is 'tensor([2.0])'"),
    (machinery.Wrong("it hangs: no end after 120 s."), "not right yet: it hangs"),
    (machinery.Wrong("the script failed: RuntimeError: Connection closed by peer [127.0.0.1]"),
     "one rank waited for another in vain. Did every rank call every collective"),
    (machinery.Wrong("the script failed: RuntimeError: Timed out waiting 30000ms for recv"), "one inside an `if`?"),
    (machinery.Wrong("the script failed: NameError: name 'los' is not defined"), "not right yet: the script failed: "),
])  # fmt: skip
def test_1_4c_rejects(outcome, because, printed, capsys):
    printed(outcome)
    assert_rejects(checks.exercise_1_4c, "exercise.py", because, capsys)
