"""The checks of lesson 1.4: right answers pass, the stub and plausible wrong ones are rejected with help."""

import json

import pytest
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT

from shared import checks
from shared.checks import machinery

DIAGNOSIS = {"A": "in the update", "B": "before the update", "C": "rounding"}


def test_1_4a_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_1_4a, stub, "not done yet", capsys)


def test_1_4a_accepts(capsys):
    assert_accepts(checks.exercise_1_4a, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": "rounding"}, "port A is not 'rounding'. In float64 its gap is as large as in float32"),
    (DIAGNOSIS | {"A": "before the update"}, "port A is not 'before the update'. Look at step 1"),
    (DIAGNOSIS | {"B": "in the update"}, "port B is not 'in the update'. Look at step 1"),
    (DIAGNOSIS | {"C": "in the update"}, "port C is not 'in the update'. Its gap grows in float32. What is left"),
    (DIAGNOSIS | {"C": "bug"}, "for C you say 'bug', which is not one of 'rounding', 'before the update'"),
    ({"A": "rounding"}, "return a dict with the keys A, B and C"),
    (None, "return a dict with the keys A, B and C; yours is None"),
])  # fmt: skip
def test_1_4a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_1_4a, lambda: answer, because, capsys)


def test_1_4a_the_logs_hold_what_the_check_says_of_them():
    logs = json.loads((ROOT / "01-ddp-pytorch-only/three_ports.json").read_text())
    assert list(logs) == ["reference", "A", "B", "C"]

    def gaps(port, precision):
        return [abs(a - b) for a, b in zip(logs["reference"][precision], logs[port][precision], strict=True)]

    for precision in ("float32", "float64"):
        assert gaps("A", precision)[0] < 1e-9 < 1e-5 < gaps("A", precision)[1]  # in the update
        assert gaps("B", precision)[0] > 1e-2  # before the update
    assert gaps("C", "float32")[0] < 1e-6 and max(gaps("C", "float64")) < 1e-12  # rounding
    assert 0.1 < max(gaps("A", "float32")) / max(gaps("C", "float32")) < 10  # these two look alike


@pytest.fixture
def printed(monkeypatch):
    """Lets a test say what each of the learner's three ranks prints, or how it fails, without starting any."""

    def prints(outcome):
        def run_script(path, nproc):
            assert path == "early_stop.py" and nproc == 3
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(machinery, "run_script", run_script)

    return prints


def stopped(*ranks, mean=("mean loss 0.465288\n", "", "")):
    """What the ranks print that stop after these steps, each with the gradients of three ranks per step."""
    return [
        f"stopped after step {step}, with {3 * step} gradients\n{line}" for step, line in zip(ranks, mean, strict=False)
    ]


def test_1_4b_accepts(printed, capsys):
    for line in ("mean loss 0.465288\n", "mean loss 0.47\n"):
        printed(stopped(10, 10, 10, mean=(line, "", "")))
        assert_accepts(checks.exercise_1_4b, "early_stop.py", capsys)


@pytest.mark.parametrize(("outcome", "because"), [
    (NotImplementedError(), "not done yet"),
    (machinery.Wrong("the script failed: RuntimeError: Connection closed by peer [127.0.0.1]"),  # as it was given
     "not right yet: one rank called a collective that another rank never reached. Which ranks are still in the loop"),
    (machinery.Wrong("the script failed: RuntimeError: Timed out waiting 30000ms for recv"), "which have left it?"),
    (machinery.Wrong("it hangs: still running after 240 s."), "never reached. Which ranks are still in the loop"),
    (machinery.Wrong("the script failed: NameError: name 'los' is not defined"), "not right yet: the script failed: "),
    (stopped(4, 9, 13), "the ranks stop after different steps, (4, 9, 13): take the decision from a value"),
    (stopped(4, 4, 4), "is 4, expected 10. That is rank 0's own loss: the others have no say."),
    (stopped(13, 13, 13), "is 13, expected 10. That is the largest loss, so the last rank decides."),
    (stopped(15, 15, 15), "is 15, expected 10. That is the sum of the losses: divide it by the world size."),
    (stopped(20, 20, 20), "is 20, expected 10. Nobody has stopped early"),
    (stopped(11, 11, 11), "is 11, expected 10. Take the mean loss."),
    ([line.replace("30", "10") for line in stopped(10, 10, 10)], "should add up 30 gradients, and the ranks have (10,"),
    ([*stopped(10), "", ""], "each rank should print one line `stopped after step ...`"),
    (stopped(10, 10, 10, mean=["mean loss 0.465288\n"] * 3),
     "the 3 ranks printed 1, 1 and 1 lines with `mean loss`; expected one, from rank 0 alone"),
    (stopped(10, 10, 10, mean=("", "mean loss 0.465288\n", "")), "the 3 ranks printed 0, 1 and 0 lines"),
    (stopped(10, 10, 10, mean=("", "", "")), "the 3 ranks printed 0, 0 and 0 lines with `mean loss`"),
    (stopped(10, 10, 10, mean=("mean loss 0.107374\n", "", "")),
     "the mean loss that rank 0 prints is 0.107374, expected 0.465288. Is it the value that the decision was taken"),
    (stopped(10, 10, 10, mean=("mean loss tensor([0.4653])\n", "", "")), "should be a number, and is 'tensor([0.4653"),
])  # fmt: skip
def test_1_4b_rejects(outcome, because, printed, capsys):
    printed(outcome)
    assert_rejects(checks.exercise_1_4b, "early_stop.py", because, capsys)
