"""The checks of lesson 4.2: the stub and plausible wrong answers are rejected with a message that helps."""

import math

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks


def most_trials(cpus: float, per_trial: float, workers: int) -> int:
    if per_trial + workers > cpus:
        raise ValueError("too few CPUs")
    return int((cpus - workers) // per_trial)


def without_error(cpus, per_trial, workers):
    return int((cpus - workers) // per_trial)


def test_4_2a_accepts(capsys):
    assert_accepts(checks.exercise_4_2a, most_trials, capsys)
    assert_accepts(checks.exercise_4_2a, lambda *given: float(most_trials(*given)), capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("a deadlock", lambda cpus, per_trial, workers: int(cpus // per_trial)),
    ("It is enough if one can", lambda cpus, per_trial, workers: int(cpus // (per_trial + workers))),
    ("round down", lambda cpus, per_trial, workers: (cpus - workers) / per_trial),
    ("a deadlock", lambda cpus, per_trial, workers: math.ceil((cpus - workers) / per_trial)),
    ("With 4 trials 8 of 8 CPUs", lambda cpus, per_trial, workers: int((cpus - workers) // per_trial) - 1),
    ("raise a ValueError", without_error),
    ("should be a number of trials", lambda *given: None),
])  # fmt: skip
def test_4_2a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_2a, answer, because, capsys)


def schedule(rates: list, exploits: list, trial: int, step: int = 1) -> list:
    found = []
    for epoch in range(len(rates[trial]), 0, -1):
        found.insert(0, rates[trial][epoch - 1])
        for after, receiver, donor in exploits:
            if (after, receiver) == (epoch - step, trial):
                trial = donor
                break
    return found


def one_after_the_other(rates, exploits, trial):
    """As if of two exploits after the same epoch the first were done before the second."""
    found = []
    for epoch in range(len(rates[trial]), 0, -1):
        found.insert(0, rates[trial][epoch - 1])
        for after, receiver, donor in exploits:
            if (after, receiver) == (epoch - 1, trial):
                trial = donor
    return found


def only_the_last(rates, exploits, trial):
    mine = [each for each in sorted(exploits) if each[1] == trial]
    return rates[trial] if not mine else rates[mine[-1][2]][: mine[-1][0]] + rates[trial][mine[-1][0] :]


def forwards(rates, exploits, trial):
    found = list(rates[trial])
    for epoch, receiver, donor in exploits:
        if receiver == trial:
            found[:epoch] = rates[donor][:epoch]
    return found


def test_4_2b_accepts(capsys):
    assert_accepts(checks.exercise_4_2b, schedule, capsys)
    assert_accepts(checks.exercise_4_2b, lambda *given: tuple(schedule(*given)), capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("the rates of the trial, and not of its weights", lambda rates, exploits, trial: rates[trial]),
    ("after epoch 2 trial 0 got the weights of trial 1", lambda *given: schedule(*given, step=0)),
    ("which had got them from trial 1", only_the_last),
    ("which had got them from trial 1", forwards),
    ("what trial 1 had before it received", one_after_the_other),
    ("The first epoch comes first", lambda *given: schedule(*given)[::-1]),
    ("a rate for each of 4 epochs", lambda *given: schedule(*given)[1:]),
    ("a list with a rate for each epoch", lambda *given: None),
])  # fmt: skip
def test_4_2b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_2b, answer, because, capsys)


def halving_epochs(trials: int, grace: int, factor: int, longest: int, anew: bool = False, cut: bool = True) -> int:
    total, reached, rung = 0, 0, min(grace, longest)
    while True:
        total += trials * (rung if anew else rung - reached)
        if rung >= longest:
            return total
        trials, reached, rung = max(1, trials // factor), rung, rung * factor
        rung = min(rung, longest) if cut else rung


def to_none(trials, grace, factor, longest):
    total, reached, rung = 0, 0, min(grace, longest)
    while trials and reached < longest:
        total += trials * (rung - reached)
        trials, reached, rung = trials // factor, rung, min(rung * factor, longest)
    return total


def test_4_2c_accepts(capsys):
    assert_accepts(checks.exercise_4_2c, halving_epochs, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("does not begin anew", lambda *given: halving_epochs(*given, anew=True)),
    ("4 go on from epoch 1 to 2, 2 go on from epoch 2 to 4", lambda trials, grace, factor, longest: trials * longest),
    ("1 goes on from epoch 4 to 10", lambda *given: halving_epochs(*given, cut=False)),
    ("1 goes on from epoch 4 to 16", to_none),
    ("should be a number of epochs", lambda *given: None),
])  # fmt: skip
def test_4_2c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_2c, answer, because, capsys)
