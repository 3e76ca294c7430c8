"""The checks of lesson 4.3: the stub and plausible wrong answers are rejected with a message that helps."""

import statistics
from itertools import pairwise

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks


def own_work(lines: list[dict], middle=statistics.median) -> dict:
    works = {}
    for line in lines:
        works.setdefault(line["rank"], []).append(line["step_s"] - line["wait_s"])
    return {rank: middle(work) for rank, work in works.items()}


def straggler(lines, factor=1.3, middle=statistics.median, among_all=False):
    own = own_work(lines, middle)
    slowest = max(own, key=own.get)
    others = [work for rank, work in own.items() if among_all or rank != slowest]
    return slowest if own[slowest] > factor * statistics.median(others) else None


def waits_longest(lines, factor=1.3):
    waits = {rank: sum(line["wait_s"] for line in lines if line["rank"] == rank) for rank in own_work(lines)}
    return max(waits, key=waits.get)


def longest_step(lines, factor=1.3):
    steps = {rank: sum(line["step_s"] for line in lines if line["rank"] == rank) for rank in own_work(lines)}
    return max(steps, key=steps.get)


def at_least(lines, factor=1.3):
    own = own_work(lines)
    slowest = max(own, key=own.get)
    others = statistics.median(work for rank, work in own.items() if rank != slowest)
    return slowest if own[slowest] >= factor * others - 1e-9 else None


def test_4_3a_accepts(capsys):
    assert_accepts(checks.exercise_4_3a, straggler, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("it waits for the slow one", waits_longest),
    ("its own work is 0.4 s a step", longest_step),
    ("nobody is a straggler", lambda lines, factor=1.3: max(own_work(lines), key=own_work(lines).get)),
    ("Somebody always waits least", lambda lines, factor=1.3: min(lines, key=lambda line: line["wait_s"])["rank"]),
    ("a median does not mind", lambda *given: straggler(*given, middle=statistics.mean)),
    ("of two ranks the other one is the measure", lambda lines, factor=1.3: straggler(lines, factor, among_all=True)),
    ("mind `factor`", lambda lines, factor=1.3: straggler(lines)),
    ("exactly `factor` times as much is not more", at_least),
    ("Return a rank, or None", lambda lines, factor=1.3: {"rank": 1}),
])  # fmt: skip
def test_4_3a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_3a, answer, because, capsys)


def joined(pieces: list) -> list:
    found = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def overlaps(computing, sending, least=0.0) -> float:
    return sum(max(least, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in sending)


def test_4_3b_accepts(capsys):
    assert_accepts(checks.exercise_4_3b, lambda *both: overlaps(*map(joined, both)), capsys)


def joined_to_the_newest(pieces: list) -> list:
    found = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1][1] = end
        else:
            found.append([start, end])
    return found


def all_sent_where_computing_is_long(computing, sending):
    return sum(end - start for start, end in joined(sending)) if computing[0][1] > 2 else 0


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("1 to 3 lies in both pieces", overlaps),
    ("nothing is less than nothing", lambda *both: overlaps(*map(joined, both), least=-1e9)),
    ("count that once", lambda computing, sending: overlaps(joined(computing), sending)),
    ("pieces lie inside the first one", lambda *both: overlaps(*map(joined_to_the_newest, both))),
    ("they never meet", lambda *both: min(sum(end - start for start, end in joined(pieces)) for pieces in both)),
    ("only from 1.5 to 2", all_sent_where_computing_is_long),
    ("should be a number", lambda *both: None),
])  # fmt: skip
def test_4_3b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_3b, answer, because, capsys)


def rate(readings, after_restart=lambda before, value: value):
    if len(readings) < 2:
        return None
    values = [value for _, value in readings]
    grown = sum(value - old if value >= old else after_restart(old, value) for old, value in pairwise(values))
    return grown / (readings[-1][0] - readings[0][0])


def first_to_last(readings):
    return (readings[-1][1] - readings[0][1]) / (readings[-1][0] - readings[0][0])


def every_ten_seconds(readings):
    return rate([(10 * number, value) for number, (_, value) in enumerate(readings)])


def test_4_3c_accepts(capsys):
    assert_accepts(checks.exercise_4_3c, rate, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("then a restart and 30 more", first_to_last),
    ("then a restart and 30 more", lambda readings: rate(readings, lambda before, value: 0)),
    ("then a restart and 30 more", lambda readings: rate(readings, lambda before, value: before - value)),
    ("the times between the readings differ", every_ten_seconds),
    ("one reading says nothing", lambda readings: rate(readings) or 0.0),
    ("yours returns None", lambda readings: None),
])  # fmt: skip
def test_4_3c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_3c, answer, because, capsys)
