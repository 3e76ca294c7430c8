"""Draw the figures of the lessons, with small functions that share one look."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

COLORS = ("#3465a4", "#d9730d", "#2e7d5b", "#8e4b9e", "#b3312c", "#6b6b6b")


def new_axes(title: str, xlabel: str = "", ylabel: str = "", size: tuple[float, float] = (7, 3.2)) -> Axes:
    """Return the axes of an empty figure of `size` inches, in the workshop's look."""
    _, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_prop_cycle(color=COLORS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return axes


def curves(series: Mapping[str, Sequence[float]], title: str, xlabel: str, ylabel: str, log: bool = False) -> Axes:
    """Draw one line per entry of `series`, over 1, 2, 3 and so on.

    Later lines are dashed, so that equal lines stay visible.
    """
    axes = new_axes(title, xlabel, ylabel)
    for number, (label, values) in enumerate(series.items()):
        style = "-" if number == 0 else (0, (2 + 2 * number, 2))
        axes.plot(range(1, len(values) + 1), values, linestyle=style, linewidth=2.4 - 0.3 * number, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        axes.set_yscale("log")
    if len(series) > 1:
        axes.legend(frameon=False)
    return axes


def bars(values: Mapping[str, float], title: str, fmt: str = "{:.2f}") -> Axes:
    """Draw one horizontal bar per entry of `values`, labeled with its number."""
    axes = new_axes(title, size=(5.6, 0.5 + 0.42 * len(values)))
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    drawn = axes.barh(list(values), list(values.values()), color=COLORS[0], height=0.62)
    axes.bar_label(drawn, labels=[fmt.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return axes


def images(pictures: torch.Tensor, titles: Sequence[str], columns: int = 9, wrong: Sequence[bool] = ()) -> None:
    """Draw pictures (N, 1, H, W) in a grid, each under its title, which is red where `wrong` is true."""
    rows = -(-len(pictures) // columns)
    _, grid = plt.subplots(rows, columns, figsize=(columns * 0.95, rows * 1.2), squeeze=False, layout="constrained")
    for axes in grid.flat:
        axes.axis("off")
    for number, (axes, picture, title) in enumerate(zip(grid.flat, pictures, titles, strict=False)):
        axes.imshow(picture[0], cmap="gray_r")
        axes.set_title(title, fontsize=9, color=COLORS[4] if number < len(wrong) and wrong[number] else "black")


def owners(shards: Sequence[Sequence[int]], num_samples: int, title: str) -> Axes:
    """Draw which rank owns which sample: `shards[rank]` lists the samples of a rank.

    A sample that two ranks own is drawn twice.
    """
    axes = new_axes(title, "sample", size=(7, 0.8 + 0.35 * len(shards)))
    for rank, shard in enumerate(shards):
        axes.scatter(shard, [f"rank {rank}"] * len(shard), marker="s", s=2400 / num_samples)
    axes.set_xlim(-1, num_samples)
    axes.margins(y=0.5)
    axes.invert_yaxis()
    return axes


def tables(grids: Sequence[torch.Tensor], titles: Sequence[str], xlabel: str, ylabel: str) -> None:
    """Draw small tables of counts (rows, columns) side by side; a larger number has a darker cell."""
    _, row = plt.subplots(1, len(grids), figsize=(1.25 * len(grids), 1.9), sharey=True, layout="constrained")
    largest = max(grid.max().item() for grid in grids)
    for axes, grid, title in zip(row, grids, titles, strict=True):
        axes.imshow(grid, cmap="Blues", vmin=0, vmax=1.5 * largest)
        axes.set_title(title, fontsize=10)
        axes.set(xticks=range(grid.shape[1]), yticks=range(grid.shape[0]), xlabel=xlabel)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for (i, j), number in np.ndenumerate(grid.numpy()):
            axes.text(j, i, f"{number:g}", ha="center", va="center")
    row[0].set_ylabel(ylabel)


def spans(
    rows: Mapping[str, Sequence[tuple[float, float]]], title: str, xlabel: str, origin: float = 0.0, scale: float = 1.0
) -> Axes:
    """Draw a timeline: a row per entry of `rows`, with a bar per (start, end).

    Times are drawn at (time - origin) * scale.
    """
    axes = new_axes(title, xlabel, size=(7, 0.9 + 0.36 * len(rows)))
    for number, pieces in enumerate(rows.values()):
        pieces = [((start - origin) * scale, (end - start) * scale) for start, end in pieces]
        axes.broken_barh(pieces, (number - 0.3, 0.6), color=COLORS[min(number, 1)], edgecolor="white", linewidth=0.6)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.grid(visible=False)
    axes.invert_yaxis()
    return axes
