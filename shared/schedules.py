"""Pipeline schedules as tables: what each rank computes, in order, and what that costs at unit cost.

A table has one row per rank, and a row holds cells in the notation of torch.distributed.pipelining: `0F1` is the
forward pass of stage 0 for microbatch 1. `B` is a whole backward pass. `I` and `W` are its halves: the gradients of the
stage's input, and those of its weights. A forward pass takes one unit of time, `B` two, and each half one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shared import plots

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
FILLS = {"F": plots.COLORS[0], "B": plots.COLORS[1], "I": plots.COLORS[1], "W": plots.COLORS[2]}


class Cell(NamedTuple):
    """One computation of a schedule."""

    stage: int
    kind: str  # F, B, I or W
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Placed(NamedTuple):
    """A cell on the clock of unit costs."""

    start: int
    end: int
    cell: Cell


def read(rows: Sequence[str | Sequence[str]]) -> list[list[Cell]]:
    """Return the table's cells. rows: one per rank, as a list of cells, or as a string with spaces between them.

    Raises ValueError for a cell that is not written as in `0F1`.
    """
    table = []
    for rank, row in enumerate(rows):
        names = row.split() if isinstance(row, str) else row
        table.append([])
        for name in names:
            if not (found := re.fullmatch(r"(\d+)([FBIW])(\d+)", str(name))):
                raise ValueError(f"rank {rank}: {name!r} is not a cell. 0F1 is stage 0, forward, microbatch 1")
            table[rank].append(Cell(int(found[1]), found[2], int(found[3])))
    return table


def needs(cell: Cell, cells: set[Cell], num_stages: int) -> list[Cell]:
    """Return the cells that have to end before `cell` starts. cells: all cells of the table."""
    stage, kind, microbatch = cell
    if kind == "F":
        return [Cell(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Cell(stage, "I", microbatch)]
    above = [] if stage == num_stages - 1 else [Cell(stage + 1, each, microbatch) for each in "BI"]
    return [Cell(stage, "F", microbatch), *(each for each in above if each in cells)]


def timeline(table: list[list[Cell]]) -> list[list[Placed]]:
    """Return the same rows on a clock: each cell starts as soon as its rank is free and what it needs has ended.

    Sending takes no time. Raises ValueError if the ranks would wait for each other forever.
    """
    cells = {cell for row in table for cell in row}
    num_stages = 1 + max(cell.stage for cell in cells)
    ends, rows, progress = {}, [[] for _ in table], True
    while progress:
        progress = False
        for row, placed in zip(table, rows, strict=True):
            while len(placed) < len(row):
                cell = row[len(placed)]
                needed = needs(cell, cells, num_stages)
                if not all(each in ends for each in needed):
                    break
                start = max([placed[-1].end if placed else 0, *(ends[each] for each in needed)])
                placed.append(Placed(start, start + UNITS[cell.kind], cell))
                ends[cell], progress = placed[-1].end, True
    if waiting := [f"rank {rank} at {table[rank][len(row)]}" for rank, row in enumerate(rows)
                   if len(row) < len(table[rank])]:  # fmt: skip
        raise ValueError(f"no rank can continue: {', '.join(waiting)}")
    return rows


def idle_units(rows: list[list[Placed]]) -> list[int]:
    """Return for each rank how many units of the step it does not compute."""
    last = max(row[-1].end for row in rows)
    return [last - sum(placed.end - placed.start for placed in row) for row in rows]


def idle_share(rows: list[list[Placed]]) -> float:
    """Return the idle part of all ranks' time, often called the bubble."""
    return sum(idle_units(rows)) / (len(rows) * max(row[-1].end for row in rows))


def most_live(table: list[list[Cell]]) -> list[int]:
    """Return for each rank the largest number of forward passes whose activations it holds at once.

    The activations of a forward pass are kept until its `B` or `W` has ended.
    """
    most = []
    for row in table:
        live, largest = 0, 0
        for cell in row:
            live += {"F": 1, "I": 0}.get(cell.kind, -1)
            largest = max(largest, live)
        most.append(largest)
    return most


def draw(rows: list[list[Placed]], title: str) -> Axes:
    """Draw the rows over time. A box shows the microbatch; with several stages on a rank, the later ones are darker."""
    last = max(row[-1].end for row in rows)
    axes = plots.new_axes(title, "time in units of one forward pass", size=(0.9 + 0.36 * last, 0.9 + 0.42 * len(rows)))
    axes.grid(visible=False)
    for rank, row in enumerate(rows):
        stages = sorted({placed.cell.stage for placed in row})
        for start, end, cell in row:
            shade = 0.55 + 0.45 * (stages.index(cell.stage) + 1) / len(stages)
            box = Rectangle((start, rank - 0.42), end - start, 0.84, facecolor=FILLS[cell.kind], edgecolor="white")
            axes.add_patch(box).set_alpha(shade)
            axes.text((start + end) / 2, rank, f"{cell.kind}{cell.microbatch}", ha="center", va="center",
                      color="white", fontsize=8)  # fmt: skip
    axes.set(xlim=(0, last), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    return axes


def draw_together(
    schedules: Mapping[str, list[list[Placed]]], title: str, units: Mapping[str, float] | None = None
) -> Axes:
    """Draw several schedules one under the other, on the same time axis. A box shows the microbatch.

    schedules: the rows of each, by its name. units: how long a unit of a schedule is on the common axis (default 1).
    The later stages of a rank are darker, as in `draw`.
    """
    units = {name: 1.0 for name in schedules} | dict(units or {})
    ends = {name: units[name] * max(row[-1].end for row in rows) for name, rows in schedules.items()}
    height = sum(len(rows) + 1.3 for rows in schedules.values())
    axes = plots.new_axes(title, "time in units of one stage's forward pass", size=(8.6, 0.9 + 0.27 * height))
    axes.grid(visible=False)
    top, places, names = 0.0, [], []
    for name, rows in schedules.items():
        axes.text(0.1, top + 0.4, f"{name}: {ends[name]:.3g} units", fontsize=10, va="center")
        for rank, row in enumerate(rows):
            middle, stages = top + 1.3 + rank, sorted({placed.cell.stage for placed in row})
            for start, end, cell in row:
                shade = 0.55 + 0.45 * (stages.index(cell.stage) + 1) / len(stages)
                left, width = start * units[name], (end - start) * units[name]
                box = Rectangle((left, middle - 0.44), width, 0.88, facecolor=FILLS[cell.kind], edgecolor="white")
                axes.add_patch(box).set_alpha(shade)
                axes.text(left + width / 2, middle, str(cell.microbatch), ha="center", va="center", color="white",
                          fontsize=7)  # fmt: skip
            places.append(middle)
            names.append(f"rank {rank}")
        axes.plot([ends[name]] * 2, [top + 0.8, top + len(rows) + 0.8], color="black", linewidth=1.2, clip_on=False)
        top += len(rows) + 1.3
    labels = {"F": "forward", "B": "backward: whole, or its first half", "W": "backward: second half"}
    if not any(placed.cell.kind == "W" for rows in schedules.values() for row in rows for placed in row):
        labels = {"F": "forward", "B": "backward"}
    patches = [Rectangle((0, 0), 1, 1, facecolor=FILLS[kind]) for kind in labels]
    axes.figure.legend(patches, labels.values(), loc="outside lower center", ncols=len(labels), frameon=False)
    axes.set(xlim=(0, max(ends.values())), ylim=(top, 0))
    axes.set_yticks(places, names)
    return axes
