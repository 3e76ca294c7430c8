"""Pipeline schedules as tables: what each rank computes, in order, and what that costs at unit cost.

A table has one row per rank, and a row holds cells in the notation of torch.distributed.pipelining: `0F1` is the
forward pass of stage 0 for microbatch 1. `B` is a whole backward pass. `I` and `W` are its halves: the gradients of the
stage's input, and those of its weights. A forward pass takes one unit of time, `B` two, and each half one.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the ranks that run a schedule draw nothing, and matplotlib takes half a second to import
    from matplotlib.axes import Axes

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
COLOR_NUMBERS = {"F": 0, "B": 1, "I": 1, "W": 2}  # in plots.COLORS


class Cell(NamedTuple):
    """One computation of a schedule."""

    stage: int
    kind: str  # F, B, I or W
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Placed(NamedTuple):
    """A cell on the clock of unit costs."""

    start: float
    end: float
    cell: Cell


class Wait(NamedTuple):
    """A rank that cannot start `cell`, because `owner` has not computed `needed`."""

    rank: int
    cell: Cell
    needed: Cell
    owner: int

    def __str__(self) -> str:
        whom = "itself" if self.owner == self.rank else f"rank {self.owner}"
        return f"rank {self.rank} waits for {whom}: {self.cell} needs {self.needed}"


def read_table(rows: Sequence[str | Sequence[str]]) -> list[list[Cell]]:
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


def check(table: list[list[Cell]], num_stages: int, num_microbatches: int) -> None:
    """Raise ValueError, in one line, unless the table computes each stage of each microbatch once, and in order.

    The stages must be 0 to num_stages - 1, each on one rank. Each needs an F per microbatch, and after it a B, or an I
    and then a W. Whether ranks wait for each other forever is not checked.
    """
    cells = [cell for row in table for cell in row]
    for cell, count in Counter(cells).items():
        if cell.stage >= num_stages or cell.microbatch >= num_microbatches:
            stages, microbatches = f"stages are 0 to {num_stages - 1}", f"microbatches 0 to {num_microbatches - 1}"
            raise ValueError(f"{cell}: the {stages}, and the {microbatches}")
        if len(owners := [rank for rank, row in enumerate(table) if any(cell.stage == each.stage for each in row)]) > 1:
            raise ValueError(f"stage {cell.stage} is in the rows of ranks {owners}. Only one rank has its weights")
        if count > 1:
            raise ValueError(f"{cell} is in the table {count} times")
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            whole, *halves = (Cell(stage, kind, microbatch) for kind in "BIW")
            split = any(half in cells for half in halves)
            if split and whole in cells:
                raise ValueError(f"{whole} is a whole backward pass, and the table has a half of it too")
            wanted = [Cell(stage, "F", microbatch), *(halves if split else [whole])]
            if missing := [cell for cell in wanted if cell not in cells]:
                raise ValueError(f"{missing[0]} is missing")
            for first, second in pairwise(wanted):
                if cells.index(second) < cells.index(first):
                    raise ValueError(f"{second} comes before {first}")


def needs(cell: Cell, cells: set[Cell], num_stages: int) -> list[Cell]:
    """Return the cells that have to end before `cell` starts. cells: all cells of the table."""
    stage, kind, microbatch = cell
    if kind == "F":
        return [Cell(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Cell(stage, "I", microbatch)]
    above = [] if stage == num_stages - 1 else [Cell(stage + 1, each, microbatch) for each in "BI"]
    return [Cell(stage, "F", microbatch), *(each for each in above if each in cells)]


def timeline(table: list[list[Cell]], message: float = 0) -> list[list[Placed]]:
    """Return the same rows on a clock: each cell starts as soon as its rank is free and what it needs is there.

    message: how many units a result takes to reach a different rank. Sending and receiving occupy no rank. Raises
    ValueError if the ranks would wait for each other forever.
    """
    cells = {cell for row in table for cell in row}
    num_stages = 1 + max((cell.stage for cell in cells), default=0)
    ends, rows, progress = {}, [[] for _ in table], True
    while progress:
        progress = False
        for row, placed in zip(table, rows, strict=True):
            while len(placed) < len(row):
                cell = row[len(placed)]
                needed = needs(cell, cells, num_stages)
                if not all(each in ends for each in needed):
                    break
                arrivals = [ends[each] + message * (each not in row) for each in needed]
                start = max([placed[-1].end if placed else 0, *arrivals])
                placed.append(Placed(start, start + UNITS[cell.kind], cell))
                ends[cell], progress = placed[-1].end, True
    if waiting := [f"rank {rank} at {table[rank][len(row)]}" for rank, row in enumerate(rows)
                   if len(row) < len(table[rank])]:  # fmt: skip
        raise ValueError(f"no rank can continue: {', '.join(waiting)}")
    return rows


def last_end(rows: list[list[Placed]]) -> float:
    """Return when the last rank ends."""
    return max((row[-1].end for row in rows if row), default=0)


def idle_units(rows: list[list[Placed]]) -> list[float]:
    """Return for each rank how many units of the step it does not compute."""
    last = last_end(rows)
    return [last - sum(placed.end - placed.start for placed in row) for row in rows]


def idle_share(rows: list[list[Placed]]) -> float:
    """Return the idle part of all ranks' time, often called the bubble."""
    return sum(idle_units(rows)) / (len(rows) * last_end(rows))


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


def circle(waits: Sequence[Wait]) -> list[Wait]:
    """Return those waits of a hang that form a circle: each rank waits for the next one, and the last for the first.

    Every hang has a circle, because a rank that waits forever waits for a rank that waits forever.
    """
    by_rank, seen, rank = {wait.rank: wait for wait in waits}, [], waits[0].rank
    while rank not in seen:
        seen.append(rank)
        rank = by_rank[rank].owner
    return [by_rank[each] for each in seen[seen.index(rank) :]]


def label(cell: Cell, stages: Collection[int]) -> str:
    """Return what a box for `cell` shows. stages: those of its rank."""
    return str(cell) if len(stages) > 1 else f"{cell.kind}{cell.microbatch}"


def add_boxes(axes: "Axes", row: list[Placed], middle: float, unit: float, fontsize: int, texts: Sequence[str]) -> None:
    """Draw a box with a text for each cell of a row, centered at `middle`. The later stages of the row are darker."""
    from matplotlib.patches import Rectangle

    from shared import plots

    stages = sorted({placed.cell.stage for placed in row})
    for (start, end, cell), text in zip(row, texts, strict=True):
        color, shade = (
            plots.COLORS[COLOR_NUMBERS[cell.kind]],
            0.55 + 0.45 * (stages.index(cell.stage) + 1) / len(stages),
        )
        box = Rectangle((start * unit, middle - 0.43), (end - start) * unit, 0.86, facecolor=color, edgecolor="white")
        axes.add_patch(box).set_alpha(shade)
        axes.text((start + end) / 2 * unit, middle, text, ha="center", va="center", color="white", fontsize=fontsize)


def draw_rows(rows: list[list[Placed]], title: str) -> "Axes":
    """Draw the rows over time. A box shows the cell, without the stage if each rank has only one.

    With several stages on a rank, the later ones are darker.
    """
    from shared import plots

    last = last_end(rows)
    axes = plots.new_axes(title, "time in units of one forward pass", size=(0.9 + 0.36 * last, 0.9 + 0.42 * len(rows)))
    axes.grid(visible=False)
    for rank, row in enumerate(rows):
        stages = {placed.cell.stage for placed in row}
        add_boxes(axes, row, rank, 1, 8, [label(placed.cell, stages) for placed in row])
    axes.set(xlim=(0, last), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    return axes


def draw_hang(rows: list[list[Placed]], table: list[list[Cell]], waits: Sequence[Wait], title: str) -> "Axes":
    """Draw the rows as far as the ranks came, and after them, in gray, the cells of the table that nobody computed.

    waits: an arrow leads from the cell that a rank cannot start to the cell that it needs. It is thick where the waits
    form a circle.
    """
    from matplotlib.patches import Rectangle

    from shared import plots

    axes, places, last, red = draw_rows(rows, title), {}, 0, plots.COLORS[4]
    for rank, (row, cells) in enumerate(zip(rows, table, strict=True)):
        start, stages = row[-1].end if row else 0, {cell.stage for cell in cells}
        for cell in cells[len(row) :]:
            width = UNITS[cell.kind]
            places[cell], start = (start + width / 2, rank), start + width
            waiting = any(wait.cell == cell for wait in waits)
            box = Rectangle((start - width + 0.06, rank - 0.36), width - 0.12, 0.72, linestyle="--" if waiting else "-",
                            facecolor="#eeeeee", edgecolor=red if waiting else "#cccccc")  # fmt: skip
            axes.add_patch(box)
            axes.text(*places[cell], label(cell, stages), ha="center", va="center",
                      color=red if waiting else "#888888", fontsize=8)  # fmt: skip
        last = max(last, start)
    in_circle = circle(waits)
    for wait in waits:
        arrow = {"arrowstyle": "-|>", "color": red, "linewidth": 2 if wait in in_circle else 0.8, "shrinkA": 9,
                 "shrinkB": 9, "connectionstyle": "arc3,rad=0.25"}  # fmt: skip
        axes.annotate("", xy=places[wait.needed], xytext=places[wait.cell], arrowprops=arrow)
    axes.figure.set_size_inches(max(0.9 + 0.36 * last, 4.8), 0.9 + 0.55 * len(rows))
    axes.set(xlim=(0, last), xlabel="time in units of one forward pass; gray: never computed")
    return axes


def draw_together(
    schedules: Mapping[str, list[list[Placed]]], title: str, units: Mapping[str, float] | None = None
) -> "Axes":
    """Draw several schedules one under the other, on the same time axis. A box shows the microbatch.

    schedules: the rows of each, by its name. units: how long a unit of a schedule is on the common axis (default 1).
    The later stages of a rank are darker, as in `draw_rows`.
    """
    from matplotlib.patches import Rectangle

    from shared import plots

    units = {name: 1.0 for name in schedules} | dict(units or {})
    ends = {name: units[name] * last_end(rows) for name, rows in schedules.items()}
    height = sum(len(rows) + 1.3 for rows in schedules.values())
    label = "time in units of a forward pass through a rank's stages"
    axes = plots.new_axes(title, label, size=(8.6, 0.9 + 0.27 * height))
    axes.grid(visible=False)
    top, places, names = 0.0, [], []
    for name, rows in schedules.items():
        axes.text(0.1, top + 0.4, f"{name}: {ends[name]:.3g} units", fontsize=10, va="center")
        for rank, row in enumerate(rows):
            places.append(top + 1.3 + rank)
            add_boxes(axes, row, places[-1], units[name], 7, [str(placed.cell.microbatch) for placed in row])
            names.append(f"rank {rank}")
        axes.plot([ends[name]] * 2, [top + 0.8, top + len(rows) + 0.8], color="black", linewidth=1.2, clip_on=False)
        top += len(rows) + 1.3
    labels = {"F": "forward", "B": "backward: whole, or its first half", "W": "backward: second half"}
    if not any(placed.cell.kind == "W" for rows in schedules.values() for row in rows for placed in row):
        labels = {"F": "forward", "B": "backward"}
    patches = [Rectangle((0, 0), 1, 1, facecolor=plots.COLORS[COLOR_NUMBERS[kind]]) for kind in labels]
    axes.figure.legend(patches, labels.values(), loc="outside lower center", ncols=len(labels), frameon=False)
    axes.set(xlim=(0, max(ends.values())), ylim=(top, 0))
    axes.set_yticks(places, names)
    return axes
