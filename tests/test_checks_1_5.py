"""The checks of lesson 1.5: right answers pass, the stub and plausible wrong ones are rejected with help."""

import re

import pytest
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT

from shared import checks
from shared.checks import chapter_1, machinery

DIAGNOSIS = {"A": "wrong id", "B": "missing package", "C": "wrong endpoint", "D": "wrong interface"}


def test_1_5a_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_1_5a, stub, "not done yet", capsys)


def test_1_5a_accepts(capsys):
    assert_accepts(checks.exercise_1_5a, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": "missing agent"}, "launch A is not 'missing agent'. Both agents of this launch have written"),
    (DIAGNOSIS | {"A": "wrong endpoint"}, "launch A is not 'wrong endpoint'. What does an agent print that reaches no"),
    (DIAGNOSIS | {"A": "missing package"}, "launch A is not 'missing package'. No rank was started"),
    (DIAGNOSIS | {"B": "wrong interface"}, "launch B is not 'wrong interface'. Node 0's error can be a consequence"),
    (DIAGNOSIS | {"B": "wrong id"}, "launch B is not 'wrong id'. Ranks were started"),
    (DIAGNOSIS | {"C": "missing agent"}, "launch C is not 'missing agent'. Both agents"),
    (DIAGNOSIS | {"C": "wrong id"}, "launch C is not 'wrong id'. With two ids both agents reach the store. Did both?"),
    (DIAGNOSIS | {"D": "wrong endpoint"}, "launch D is not 'wrong endpoint'. Node 1's last line is that of launch C."),
    (DIAGNOSIS | {"D": "missing package"}, "launch D is not 'missing package'. Ranks were started"),
    (DIAGNOSIS | {"D": "firewall"}, "for D you say 'firewall', which is not one of 'missing agent', 'wrong id'"),
    ({"A": "wrong id"}, "return a dict with the keys A, B, C and D"),
    (None, "return a dict with the keys A, B, C and D; yours is None"),
])  # fmt: skip
def test_1_5a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_1_5a, lambda: answer, because, capsys)


def test_1_5a_the_logs_hold_what_the_check_says_of_them():
    text = (ROOT / "01-ddp-pytorch-only/failed_launches.txt").read_text()
    parts = re.split(r"^=+ launch (\w), node (\d) =+$", text, flags=re.MULTILINE)[1:]
    logs = {launch + node: log.strip() for launch, node, log in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    assert list(logs) == ["A0", "A1", "B0", "B1", "C0", "C1", "D0", "D1"]
    started = {name for name, log in logs.items() if "train.py" in log}
    assert started == {"B0", "B1", "D0", "D1"}
    last = {name: log.splitlines()[-1] for name, log in logs.items()}
    assert all(last[name].endswith("RendezvousTimeoutError") for name in ("A0", "A1", "C0"))
    assert "RendezvousConnectionError" in last["C1"] and last["C1"] == last["D1"]
    assert "No module named" in logs["B1"] and "Unable to find address for" in logs["D0"]
    times = [re.search(r"time +: (\S+)", logs[name])[1] for name in ("B1", "B0")]
    assert times == sorted(times)  # node 1 failed first


@pytest.fixture
def happens(monkeypatch):
    """Lets a test say what the learner's script does on two nodes, without starting any."""

    def prepare(outcome):
        def run_two_nodes(script):
            assert script == "add_up.py"
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(chapter_1, "run_two_nodes", run_two_nodes)

    return prepare


def test_1_5b_accepts(happens, capsys):
    happens(([1, 1], ["5050"]))
    assert_accepts(checks.exercise_1_5b, "add_up.py", capsys)


@pytest.mark.parametrize(("outcome", "because"), [
    (NotImplementedError(), "not done yet"),
    (machinery.Wrong("the script failed: FileNotFoundError: [Errno 2] No such file: 'node-1/numbers.txt'"),  # as given
     "a rank on node 1 does not find numbers.txt on its node's disk. Which ranks are on that node"),
    (machinery.Wrong("the script failed: NameError: name 'rank' is not defined"), "not right yet: the script failed: "),
    (([2, 2], ["5050"]), "the two nodes downloaded 2 and 2 times: once on each is enough. Which number is 0"),
    (([1, 2], ["5050"]), "the two nodes downloaded 1 and 2 times"),
    (([1, 1], ["10100", "10100"]), "the sum is 10100, expected 5050. Every number counts twice. Among how many"),
    (([1, 1], ["10097"]), "the sum is 10097, expected 5050. The parts overlap"),
    (([1, 1], ["4950"]), "the sum is 4950, expected 5050. Two processes have the same part"),
    (([1, 1], ["1225"]), "the sum is 1225, expected 5050. Each number should be in the part of exactly one process"),
    (([1, 1], ["5050", "5050"]), "2 lines are reported, expected one: the condition is true on each node"),
    (([1, 1], []), "nobody reports the sum"),
])  # fmt: skip
def test_1_5b_rejects(outcome, because, happens, capsys):
    happens(outcome)
    assert_rejects(checks.exercise_1_5b, "add_up.py", because, capsys)


def test_1_5b_the_sums_are_those_of_the_mistakes_that_the_check_names():
    numbers = range(1, 101)
    ranks = [(rank, rank % 2) for rank in range(4)]  # rank and local rank of 2 nodes with 2 processes each
    assert sum(sum(numbers[rank::4]) for rank, _ in ranks) == 5050
    assert sum(sum(numbers[local_rank::2]) for _, local_rank in ranks) == 10100
    assert sum(sum(numbers[rank::2]) for rank, _ in ranks) == 10097
    assert sum(sum(numbers[local_rank::4]) for _, local_rank in ranks) == 4950
