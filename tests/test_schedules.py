"""Tables of cells: what is refused, how they are timed and drawn, and what real ranks do with drawn ones."""

import itertools
import random
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from shared import pipeline_runner, ranks, schedules

GPIPE = ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3", "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3"]
ONE_F_ONE_B = ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"]
HANGS = ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]


@pytest.mark.parametrize(("rows", "idle", "live"), [(GPIPE, 6, [4, 4, 4]), (ONE_F_ONE_B, 6, [3, 2, 1])])
def test_idle_and_live_of_known_schedules(rows, idle, live):
    table = schedules.read_table(rows)
    schedules.check(table, 3, 4)
    timed = schedules.timeline(table)
    assert schedules.idle_units(timed) == [idle] * 3 and schedules.last_end(timed) == 18
    assert schedules.idle_share(timed) == pytest.approx(1 / 3)
    assert schedules.most_live(table) == live


@pytest.mark.parametrize(
    ("rows", "units"),
    [
        (GPIPE, 18 + 2),  # two boundaries, crossed forward and backward
        (ONE_F_ONE_B, 18 + 4),
        (["0F0 2F0 2B0 0B0", "1F0 1B0"], 9 + 2),  # from 2F0 to 2B0 no message is needed
    ],
)
def test_a_message_of_half_a_unit_delays_only_what_comes_from_a_different_rank(rows, units):
    assert schedules.last_end(schedules.timeline(schedules.read_table(rows), message=0.5)) == units


@pytest.mark.parametrize(
    ("rows", "because"),
    {
        "missing": (["0F0 0B0 0F1", "1F0 1B0 1F1 1B1"], "0B1 is missing"),
        "a half is missing": (["0F0 0B0 0F1 0I1", "1F0 1B0 1F1 1B1"], "0W1 is missing"),
        "twice": (["0F0 0B0 0F1 0B1 0F1", "1F0 1B0 1F1 1B1"], "0F1 is in the table 2 times"),
        "whole and half": (["0F0 0B0 0F1 0B1 0W1", "1F0 1B0 1F1 1B1"], "0B1 is a whole backward pass, and"),
        "before its forward pass": (["0F0 0B0 0B1 0F1", "1F0 1B0 1F1 1B1"], "0B1 comes before 0F1"),
        "weights first": (["0F0 0W0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"], "0W0 comes before 0I0"),
        "two owners": (["0F0 0B0 0F1 1B1", "1F0 1B0 1F1 0B1"], "stage 0 is in the rows of ranks [0, 1]"),
        "another stage": (["0F0 0B0 0F1 0B1", "1F0 1B0 2F1 1B1"], "2F1: the stages are 0 to 1, and the microbatches 0"),
        "another microbatch": (["0F0 0B0 0F2 0B1", "1F0 1B0 1F1 1B1"], "0F2: the stages are 0 to 1"),
        "no cell": (["0F0 OB0", "1F0 1B0"], "rank 0: 'OB0' is not a cell"),
    }.values(),
)
def test_a_table_that_cannot_be_right_is_refused_before_a_rank_starts(rows, because, monkeypatch):
    monkeypatch.setattr(ranks, "run", lambda *args: pytest.fail("a rank has started"))
    with pytest.raises(ValueError, match=re.escape(because)) as caught:
        pipeline_runner.run(rows, make_stages(2), make_microbatches(2), square_error)
    assert "\n" not in str(caught.value)


def test_a_hang_has_a_circle_and_others_may_wait_for_it():
    waits = [
        schedules.Wait(rank, *(schedules.read_table([f"{cell} {needed}"])[0]), owner)
        for rank, cell, needed, owner in [(0, "0B0", "1B0", 1), (1, "1F1", "0F1", 0), (2, "2F1", "1F1", 1)]
    ]
    for order in itertools.permutations(waits):
        assert sorted(wait.rank for wait in schedules.circle(order)) == [0, 1]
    assert str(waits[2]) == "rank 2 waits for rank 1: 2F1 needs 1F1"
    itself = schedules.Wait(0, *schedules.read_table(["1F0 0F0"])[0], 0)
    assert schedules.circle([itself]) == [itself]
    assert str(itself) == "rank 0 waits for itself: 1F0 needs 0F0"


def test_drawings_show_every_cell():
    table = schedules.read_table(ONE_F_ONE_B)
    axes = schedules.draw_rows(schedules.timeline(table), "1F1B")
    assert Counter(text.get_text() for text in axes.texts) == Counter(str(cell)[1:] for row in table for cell in row)
    table = schedules.read_table(["0F0 2F0 2B0 0B0", "1F0 1B0"])
    axes = schedules.draw_rows(schedules.timeline([row[:1] for row in table]), "several stages per rank")
    assert [text.get_text() for text in axes.texts] == ["F0", "F0"]
    wait = schedules.Wait(0, table[0][1], table[1][0], 1)
    axes = schedules.draw_hang(schedules.timeline([table[0][:1], []]), table,
                               [wait, schedules.Wait(1, table[1][1], table[0][2], 0)], "a hang")  # fmt: skip
    assert [text.get_text() for text in axes.texts if text.get_text()][1:] == ["2F0", "2B0", "0B0", "F0", "B0"]
    plt.close("all")


def fewest_units(num_ranks: int, num_microbatches: int, limits: tuple[int, ...]) -> int:
    """Return the length of the shortest step with F, I and W, over all orders that take the microbatches in turn.

    A state holds for each rank how many F, I and W it has computed. All states that are possible after each unit of
    time are kept. limits: how many forward passes each rank may keep.
    """
    done = ((num_microbatches,) * 3,) * num_ranks
    states = {((0, 0, 0),) * num_ranks}
    for units in itertools.count():
        if done in states:
            return units
        states = {after for state in states for after in itertools.product(*moves(state, limits, num_microbatches))}


def moves(state: tuple, limits: tuple[int, ...], num_microbatches: int) -> list[list[tuple[int, int, int]]]:
    """Return for each rank what it may have computed one unit later."""
    possible = []
    for rank, (f, i, w) in enumerate(state):
        arrived = state[rank - 1][0] if rank else num_microbatches
        returned = state[rank + 1][1] if rank + 1 < len(state) else f
        after = [(f, i, w)]
        if f < min(arrived, limits[rank] + w, num_microbatches):
            after.append((f + 1, i, w))
        if i < min(f, returned):
            after.append((f, i + 1, w))
        if w < i:
            after.append((f, i, w + 1))
        possible.append(after)
    return possible


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "limits", "idle"),
    [
        (3, 4, (3, 3, 3), 2),  # p - 1
        (3, 4, (3, 3, 2), 3),
        (3, 4, (5, 5, 5), 2),  # more memory does not help
        (3, 4, (3, 2, 1), 4),  # 1F1B's limits: 2(p - 1)
        (2, 3, (2, 1), 2),
        (2, 4, (4, 4), 1),
    ],
)
def test_fewest_idle_units_with_halves(num_ranks, num_microbatches, limits, idle):
    assert fewest_units(num_ranks, num_microbatches, limits) == 3 * num_microbatches + idle


# --- on real ranks ---------------------------------------------------------------------------------------------------


def make_stages(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)).double() for _ in range(num_stages)]


def make_microbatches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(8)
    return list(zip(*torch.randn(2, count, 3, 4, dtype=torch.float64), strict=True))


def square_error(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (found - target).square().sum()


def one_process(num_stages: int, microbatches: list) -> list[dict[str, torch.Tensor]]:
    whole = nn.Sequential(*make_stages(num_stages))
    sum(square_error(whole(x), target) for x, target in microbatches).backward()
    return [{name: value.grad for name, value in stage.named_parameters()} for stage in whole]


def drawn_table(draw: random.Random) -> tuple[list[str], int, int]:
    """Draw a table of three rows that `check` accepts: a right one, with some cells moved. Returns (rows, p, m)."""
    num_stages, num_microbatches = draw.choice([3, 3, 6]), draw.choice([2, 3, 4])
    owners = [stage % 3 if draw.random() < 0.8 else 2 - stage % 3 for stage in range(num_stages)]
    rows, order = [[], [], []], draw.sample(range(num_microbatches), num_microbatches)
    split = {(stage, each): draw.random() < 0.4 for stage in range(num_stages) for each in order}
    for microbatch in order:
        for stage in range(num_stages):
            rows[owners[stage]].append(f"{stage}F{microbatch}")
    for microbatch in order:
        for stage in reversed(range(num_stages)):
            rows[owners[stage]] += [f"{stage}{kind}{microbatch}" for kind in ["B", "IW"][split[stage, microbatch]]]
    for _ in range(draw.randrange(18)):
        row = draw.choice([row for row in rows if row])
        before, place = list(row), draw.randrange(len(row))
        row.insert(draw.randrange(len(row) + 1), row.pop(place))
        try:
            schedules.check(schedules.read_table(rows), num_stages, num_microbatches)
        except ValueError:
            row[:] = before
    return rows, num_stages, num_microbatches


def has_a_circle(table: list[list[schedules.Cell]]) -> bool:
    """Whether the cells cannot be sorted so that each comes after what it needs and after the cell before it.

    It looks at neither ranks nor clocks, and not at `schedules.needs`.
    """
    cells = {cell for row in table for cell in row}
    last = max(cell.stage for cell in cells)
    graph = {cell: set() for cell in cells}
    for row in table:
        for first, second in itertools.pairwise(row):
            graph[second].add(first)
    for stage, kind, microbatch in cells:
        if kind == "F" and stage > 0:
            graph[stage, kind, microbatch].add((stage - 1, "F", microbatch))
        if kind in "BI" and stage < last:
            graph[stage, kind, microbatch] |= {(stage + 1, each, microbatch) for each in "BI"} & cells
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError:
        return True
    return False


def run_tables(tables: list[tuple], folder: Path) -> list[pipeline_runner.Outcome]:
    """Run many tables in one launch of three ranks, each with a board of its own."""
    return [
        pipeline_runner.run_row(schedules.read_table(rows), make_stages(num_stages), make_microbatches(count),
                                square_error, folder / f"{number}")
        for number, (rows, num_stages, count) in enumerate(tables)
    ]  # fmt: skip


def test_sixty_drawn_tables_get_no_wrong_verdict(tmp_path):
    """They run or hang as the graph of their cells says, hang where the clock does, and have the right gradients."""
    draw = random.Random(7)
    tables = [drawn_table(draw) for _ in range(60)]
    reports = ranks.run(run_tables, 3, tables, tmp_path)
    hangs = 0
    for (rows, num_stages, count), *of_ranks in zip(tables, *reports, strict=True):
        table, outcome = schedules.read_table(rows), pipeline_runner.together(of_ranks)
        assert bool(outcome.waits) == has_a_circle(table), rows
        if outcome.waits:
            hangs += 1
            with pytest.raises(ValueError, match="no rank can continue") as caught:
                schedules.timeline(table)
            assert all(f"rank {wait.rank} at {wait.cell}" in str(caught.value) for wait in outcome.waits)
            assert str(caught.value).count("rank ") == len(outcome.waits) + 1
            assert all(wait.needed not in outcome.done[wait.owner] for wait in outcome.waits)
            assert [row[: len(done)] for row, done in zip(table, outcome.done, strict=True)] == outcome.done
            continue
        assert outcome.done == table and outcome.most_live == schedules.most_live(table)
        for found, expected in zip(outcome.gradients, one_process(num_stages, make_microbatches(count)), strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name], expected[name], atol=1e-12) for name in expected), rows
    assert 20 <= hangs <= 40


def test_a_run_of_its_own_process_per_row(tmp_path):
    outcome = pipeline_runner.run(HANGS, make_stages(2), make_microbatches(2), square_error)
    assert [str(wait) for wait in outcome.waits] == [
        "rank 0 waits for rank 1: 0B0 needs 1B0",
        "rank 1 waits for rank 0: 1F1 needs 0F1",
    ]
    assert [list(map(str, row)) for row in outcome.done] == [["0F0"], []]
