"""The checks of lesson 2.2: right answers pass, the stub and plausible wrong ones are rejected with help."""

import math
from collections import Counter

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks


@pytest.mark.parametrize("check", [checks.exercise_2_2a, checks.exercise_2_2b])
def test_a_stub_is_not_done_yet(check, capsys):
    assert_rejects(check, stub, "not done yet", capsys)


# --- 2.2a: when a slower start pays ----------------------------------------------------------------------------------


def break_even(plain, cluster):
    late, won_per_sample = cluster[0] - plain[0], 1 / plain[1] - 1 / cluster[1]
    if late <= 0 <= won_per_sample:
        return 0
    return late / won_per_sample if won_per_sample > 0 else math.inf


def crossing(plain, cluster):
    return (cluster[0] - plain[0]) / (1 / plain[1] - 1 / cluster[1])


def by_rates(plain, cluster):
    return (cluster[0] - plain[0]) * (cluster[1] - plain[1])


def never_from_the_start(plain, cluster):
    return crossing(plain, cluster) if cluster[1] > plain[1] else math.inf


def seconds_instead(plain, cluster):
    return break_even(plain, cluster) / plain[1]


def whole_samples(plain, cluster):
    samples = break_even(plain, cluster)
    return samples if samples == math.inf else math.ceil(samples)


@pytest.mark.parametrize("answer", [break_even, whole_samples])
def test_2_2a_accepts(answer, capsys):
    assert_accepts(checks.exercise_2_2a, answer, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (crossing, "divides by zero. Expected inf: at the same rate it never makes up for its start"),
    (by_rates, "is 3200, expected 6400. See: after 6,400 samples both are done at 55 s"),
    (never_from_the_start, "expected 0. See: it is ahead from the start, and stays ahead"),
    (seconds_instead, "is 50, expected 6400"),
    (lambda plain, cluster: None, "should be a number, and is None"),
])  # fmt: skip
def test_2_2a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_2a, answer, because, capsys)


# --- 2.2b: the rank that stands elsewhere ----------------------------------------------------------------------------


def odd_ones(places):
    [(usual, _)] = Counter(places.values()).most_common(1)
    return sorted(rank for rank, place in places.items() if place != usual)


def odd_ranks(stacks):
    return odd_ones({rank: next(f for f in frames if "train.py" in f) for rank, frames in stacks.items()})


def by_the_innermost_frame(stacks):
    return odd_ones({rank: frames[0] for rank, frames in stacks.items()})


def by_the_outermost_frame(stacks):
    return odd_ones({rank: frames[-1] for rank, frames in stacks.items()})


def by_the_function(stacks):
    frames = {rank: next(f for f in frames if "train.py" in f) for rank, frames in stacks.items()}
    return odd_ones({rank: frame.split()[0] for rank, frame in frames.items()})


def other_than_rank_zero(stacks):
    places = {rank: next(f for f in frames if "train.py" in f) for rank, frames in stacks.items()}
    return [rank for rank in places if places[rank] != places[0]]


def where_most_are(stacks):
    return [rank for rank in stacks if rank not in odd_ranks(stacks)]


def where_fewest_are(stacks):
    places = {rank: next(f for f in frames if "train.py" in f) for rank, frames in stacks.items()}
    (place, _) = Counter(places.values()).most_common()[-1]
    return [rank for rank in places if places[rank] == place]


def test_2_2b_accepts(capsys):
    assert_accepts(checks.exercise_2_2b, odd_ranks, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (by_the_innermost_frame, "Compare only each rank's innermost frame in train.py"),
    (by_the_outermost_frame, "(validation): expected [2], you say [2, 3]"),
    (by_the_function, "(another line of the same function): expected [3], you say []"),
    (other_than_rank_zero, "(the first rank): expected [0], you say [1, 2, 3]"),
    (lambda stacks: odd_ranks(stacks)[::-1], "(two of six): expected [0, 5], you say [5, 0]. Sort them."),
    (where_most_are, "expected [2], you say [0, 1, 3]. These stand where most do"),
    (where_fewest_are, "(all at one place): expected [], you say [0, 1, 2, 3]. All stand at one place"),
    (lambda stacks: None, "return a list of ranks, not None"),
])  # fmt: skip
def test_2_2b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_2b, answer, because, capsys)
