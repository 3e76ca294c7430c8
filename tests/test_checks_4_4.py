"""The checks of lesson 4.4: the stub and plausible wrong answers are rejected with a message that helps."""

import math

import pytest
from answers import assert_accepts, assert_rejects, stub
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from shared.checks.chapter_4 import exercise_4_4a, exercise_4_4b, exercise_4_4c


def over_the_wire(places, size):
    world, nodes = len(places), len(set(places))
    leaving = [places[rank] for rank in range(world) if places[(rank + 1) % world] != places[rank]]
    busiest = max((leaving.count(node) for node in places), default=0)
    return busiest * 2 * (world - 1) / world * size, 2 * (nodes - 1) / nodes * size


def all_nodes(places, size):
    world = len(places)
    leaving = sum(places[rank] != places[rank - 1] for rank in range(world))
    return leaving * 2 * (world - 1) / world * size, over_the_wire(places, size)[1]


def one_rank(places, size):
    return 2 * (len(places) - 1) / len(places) * size, over_the_wire(places, size)[1]


def not_round(places, size):
    world = len(places)
    leaving = [places[rank] for rank in range(world - 1) if places[rank + 1] != places[rank]]
    busiest = max((leaving.count(node) for node in places), default=0)
    return busiest * one_rank(places, size)[0], over_the_wire(places, size)[1]


def test_4_4a_accepts(capsys):
    assert_accepts(exercise_4_4a, over_the_wire, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("that of all nodes together", all_nodes),
    ("what one rank sends", one_rank),
    ("The flat ring is right", lambda places, size: (over_the_wire(places, size)[0], size / 2)),
    ("the last rank sends to the first", not_round),
    ("every rank's successor is on the other node", lambda places, size: over_the_wire(sorted(places), size)),
    ("nothing leaves it", lambda places, size: tuple(max(1, value) for value in over_the_wire(places, size))),
    ("nodes may have any numbers", lambda places, size: over_the_wire(places, size) if max(places) != 7 else (0, 0)),
    ("two numbers", lambda places, size: size),
])  # fmt: skip
def test_4_4a_rejects(answer, because, capsys):
    assert_rejects(exercise_4_4a, answer, because, capsys)


def powersgd_bytes(shapes, rank, min_rate=2, always=False, number=4, least=min, strictly=True):
    total = 0
    for shape in shapes:
        n, m = shape[0], math.prod(shape[1:])
        sent = least(n, m, rank) * (n + m)
        worth_it = sent * min_rate < n * m if strictly else sent * min_rate <= n * m
        total += sent if len(shape) > 1 and (always or worth_it) else n * m
    return number * total


def test_4_4b_accepts(capsys):
    assert_accepts(exercise_4_4b, powersgd_bytes, capsys)


@pytest.mark.parametrize("shape", [(768, 64), (64, 3, 3, 3), (10, 20), (6, 12), (2, 500), (128, 64, 3, 3)])
@pytest.mark.parametrize(("rank", "min_rate"), [(1, 2), (4, 2), (4, 1), (2, 0.9)])
def test_4_4b_asks_for_what_the_hook_does(shape, rank, min_rate):
    n, m = shape[0], math.prod(shape[1:])
    compressed, before, after = powerSGD_hook._should_compress(n, m, min(n, m, rank), min_rate)
    assert powersgd_bytes([shape], rank, min_rate) == 4 * (after if compressed else before)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("not worth it", lambda *given: powersgd_bytes(*given, always=True)),
    ("each has 4 bytes", lambda *given: powersgd_bytes(*given, number=1)),
    ("r is min(2, 500, 4)", lambda *given: powersgd_bytes(*given, least=lambda n, m, rank: rank)),
    ("not below 72", lambda *given: powersgd_bytes(*given, strictly=False)),
    ("a matrix of 64 x 27", lambda shapes, *given: powersgd_bytes([shape[:2] for shape in shapes], *given)),
    ("the minimum rate is 2", lambda shapes, rank, min_rate=1: powersgd_bytes(shapes, rank, min_rate)),
    ("a number of bytes", lambda *given: None),
])  # fmt: skip
def test_4_4b_rejects(answer, because, capsys):
    assert_rejects(exercise_4_4b, answer, because, capsys)


def pays_below(before, after, extra_s, ranks, bits=8, mega=1e6, ring=True):
    saved = (2 * (ranks - 1) / ranks if ring else 1) * (before - after)
    if saved <= 0:
        return 0
    return math.inf if extra_s <= 0 else bits * saved / extra_s / mega


def test_4_4c_accepts(capsys):
    assert_accepts(exercise_4_4c, pays_below, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("A byte has 8 bits", lambda *given: pays_below(*given, bits=1)),
    ("a million bits", lambda *given: pays_below(*given, mega=1)),
    ("With 4 ranks a ring sends 1.5 times", lambda *given: pays_below(*given, ring=False)),
    ("divides by zero", lambda before, after, extra_s, ranks: 16e-6 * (ranks - 1) / ranks * (before - after) / extra_s),
    ("pays at any bandwidth", lambda *given: pays_below(*given) if given[2] > 0 else 0),
    ("it never pays: 0", lambda *given: pays_below(*given) or math.inf),
    ("nothing to save", lambda *given: pays_below(*given) if given[3] > 1 else 1),
    ("a number of Mbit/s", lambda *given: None),
])  # fmt: skip
def test_4_4c_rejects(answer, because, capsys):
    assert_rejects(exercise_4_4c, answer, because, capsys)
