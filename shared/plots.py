"""The figures of the lessons: small functions with one look."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

COLORS = ("#3465a4", "#d9730d", "#2e7d5b", "#8e4b9e", "#b3312c", "#6b6b6b")


def new_axes(title: str, xlabel: str = "", ylabel: str = "", size: tuple[float, float] = (7, 3.2)) -> Axes:
    """An empty figure of `size` inches with one set of axes in the workshop's look."""
    _, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_prop_cycle(color=COLORS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return axes


def curves(series: Mapping[str, Sequence[float]], title: str, xlabel: str, ylabel: str, log: bool = False) -> Axes:
    """One line per entry of `series`, over 1, 2, 3 ...; later lines are dashed, so that equal ones stay visible."""
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
    """One horizontal bar per entry of `values`, with its number beside it."""
    axes = new_axes(title, size=(7, 0.5 + 0.42 * len(values)))
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    drawn = axes.barh(list(values), list(values.values()), color=COLORS[0], height=0.62)
    axes.bar_label(drawn, labels=[fmt.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return axes


def images(pictures: torch.Tensor, titles: Sequence[str], columns: int = 9, wrong: Sequence[bool] = ()) -> None:
    """Pictures (N, 1, H, W) in a grid, each under its title; a title is red where `wrong` is true."""
    rows = -(-len(pictures) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(columns * 0.95, rows * 1.2), squeeze=False, layout="constrained")
    for axes in grid.flat:
        axes.axis("off")
    for number, (axes, picture, title) in enumerate(zip(grid.flat, pictures, titles, strict=False)):
        axes.imshow(picture[0], cmap="gray_r")
        axes.set_title(title, fontsize=9, color=COLORS[4] if number < len(wrong) and wrong[number] else "black")


def owners(shards: Sequence[Sequence[int]], num_samples: int, title: str) -> Axes:
    """Which rank owns which sample: `shards[rank]` lists its samples; a sample that two ranks own shows twice."""
    axes = new_axes(title, "sample", size=(7, 0.8 + 0.35 * len(shards)))
    for rank, shard in enumerate(shards):
        axes.scatter(shard, [f"rank {rank}"] * len(shard), marker="s", s=2400 / num_samples)
    axes.set_xlim(-1, num_samples)
    axes.margins(y=0.5)
    axes.invert_yaxis()
    return axes
