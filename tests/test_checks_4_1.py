"""The checks of lesson 4.1: the stub and plausible wrong answers are rejected with a message that helps."""

import math

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks


def goes_on_after(saves, crash):
    newest, free_at = 0, 0.0
    for step, reported_at, upload_s in saves:
        free_at = max(free_at, reported_at) + upload_s
        if free_at <= crash:
            newest = step
    return newest


def without_a_queue(saves, crash):
    return max([step for step, reported_at, upload_s in saves if reported_at + upload_s <= crash], default=0)


def never_idle(saves, crash):
    newest, free_at = 0, 0.0
    for step, reported_at, upload_s in saves:
        free_at = (free_at or reported_at) + upload_s
        if free_at <= crash:
            newest = step
    return newest


def test_4_1a_accepts(capsys):
    assert_accepts(checks.exercise_4_1a, goes_on_after, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("done at 6.5, after the crash", lambda saves, crash: max([s[0] for s in saves if s[1] <= crash], default=0)),
    ("the upload of 20 waits for that of 10", without_a_queue),
    ("done at 6.5, after the crash", never_idle),
    ("in the moment of the crash", lambda saves, crash: goes_on_after(saves, crash - 1e-9)),
    ("returns None", lambda saves, crash: goes_on_after(saves, crash) or None),
    ("both have arrived", lambda saves, crash: min(goes_on_after(saves, crash), 10)),
])  # fmt: skip
def test_4_1a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_1a, answer, because, capsys)


def ask_every(notice_s, poll_s, step_s, save_s):
    return max(0, math.floor((notice_s - poll_s - save_s) / step_s))


def test_4_1b_accepts(capsys):
    assert_accepts(checks.exercise_4_1b, ask_every, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("looks only that often", lambda notice, poll, step, save: max(0, (notice - save) // step)),
    ("Saving takes 15 s", lambda notice, poll, step, save: max(0, (notice - poll) // step)),
    ("round down", lambda notice, poll, step, save: max(0, math.ceil((notice - poll - save) / step))),
    ("whole steps", lambda notice, poll, step, save: max(0, (notice - poll - save) / step)),
    ("not even one step", lambda notice, poll, step, save: max(1, ask_every(notice, poll, step, save))),
    ("not even one step", lambda notice, poll, step, save: math.floor((notice - poll - save) / step)),
    ("exactly in time counts", lambda notice, poll, step, save: max(0, math.ceil((notice - poll - save) / step) - 1)),
    ("a number of steps", lambda *given: None),
])  # fmt: skip
def test_4_1b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_1b, answer, because, capsys)


def cheapest(offers, work_h, deadline_h, late=False, restarts=True, hour=3600, best=min):
    bills = {}
    for name, (price, mtbf_h, save_s, restart_s) in offers.items():
        mtbf_s = hour * mtbf_h
        interval = math.sqrt(2 * save_s * mtbf_s)
        times = mtbf_s / interval * math.expm1((interval + save_s) / mtbf_s)
        times *= math.exp(restart_s / mtbf_s) if restarts else 1
        if late or work_h * times <= deadline_h:
            bills[name] = price * work_h * times
    return best(bills, key=bills.get, default=None)


def test_4_1c_accepts(capsys):
    assert_accepts(checks.exercise_4_1c, cheapest, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("costs less an hour, and takes more hours", lambda offers, *hours: min(offers, key=offers.get)),
    ("failures, restarts and saving count", lambda *given: cheapest(*given, late=True)),
    ("its restarts among them", lambda *given: cheapest(*given, restarts=False)),
    ("hours and seconds together", lambda *given: math.exp(300 * 3600)),
    ("expected 'spot', you say 'full price'", lambda *given: cheapest(*given, hour=60)),
    ("expected 'spot', you say 'full price'", lambda *given: cheapest(*given, best=max)),
    ("the name of an offer", lambda *given: 114.4),
])  # fmt: skip
def test_4_1c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_1c, answer, because, capsys)
