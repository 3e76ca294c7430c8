"""Draw the figures of lessons 3.6 and 3.7."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from shared import plots

FONT = 11  # points, in figures at most six inches wide: readable on a phone


def tokens(words: Sequence[str], marked: Sequence[bool], title: str) -> Axes:
    """Draw a row of tokens as boxes, in lines of text, with the marked ones in color."""
    width, lines, places = 34, 0, []  # of a line, in characters
    column = 0
    for word in words:
        if column + len(word) + 2 > width:
            lines, column = lines + 1, 0
        places.append((column, lines))
        column += len(word) + 2
    axes = plots.new_axes(title, size=(4.4, 0.5 + 0.42 * (lines + 1)))
    for word, is_marked, (x, y) in zip(words, marked, places, strict=True):
        box = plt.Rectangle((x, y - 0.36), len(word) + 1.5, 0.72, color=plots.COLORS[1] if is_marked else "#e4e4e4")
        axes.add_patch(box)
        axes.text(
            x + len(word) / 2 + 0.75, y, word, ha="center", va="center", family="monospace", fontsize=FONT - 1,
            color="white" if is_marked else "black",
        )  # fmt: skip
    axes.set(xlim=(-0.5, width), ylim=(lines + 0.5, -0.5))
    axes.axis("off")
    return axes


def lora(outputs: int, inputs: int, rank: int) -> Axes:
    """Draw to scale the frozen matrix W (outputs, inputs), and the adapter's B (outputs, rank) and A (rank, inputs)."""
    axes = plots.new_axes("", size=(3.6, 3.4))
    gap = 0.35 * inputs
    shapes = {"W": (0, outputs, inputs), "B": (inputs + gap, outputs, rank), "A": (inputs + 2 * gap, rank, inputs)}
    for name, (left, height, width) in shapes.items():
        color = "#cfcfcf" if name == "W" else plots.COLORS[1]
        axes.add_patch(plt.Rectangle((left, 0), width, height, color=color))
        label = f"{name}\n{height} x {width}\n{'frozen' if name == 'W' else 'trained'}"
        place = (left + width / 2, outputs / 2) if name == "W" else (left + width / 2, height + 12)
        axes.text(*place, label, ha="center", va="center" if name == "W" else "top", fontsize=FONT)
    axes.text(inputs + gap / 2, outputs / 2, "+", ha="center", va="center", fontsize=FONT + 6)
    axes.set(xlim=(-10, 2 * inputs + 2.4 * gap), ylim=(outputs + 110, -10), aspect="equal")
    axes.axis("off")
    return axes


def stacked(rows: Mapping[str, Mapping[str, float]], title: str) -> Axes:
    """Draw one horizontal bar per row, of parts given in bytes, labeled with the sum in MB."""
    axes = plots.new_axes("", size=(6, 1 + 0.45 * len(rows)))
    left = dict.fromkeys(rows, 0.0)
    for part in next(iter(rows.values())):
        widths = {name: parts[part] / 1e6 for name, parts in rows.items()}
        drawn = axes.barh(list(rows), list(widths.values()), left=list(left.values()), height=0.62, label=part)
        left = {name: left[name] + width for name, width in widths.items()}
    axes.bar_label(drawn, labels=[f"{total:.2f}" for total in left.values()], padding=4, fontsize=FONT)
    axes.figure.suptitle(title, x=0.02, ha="left", fontsize=FONT)
    axes.figure.legend(frameon=False, ncols=3, loc="outside lower center", fontsize=FONT - 1)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.margins(x=0.12)
    return axes


def learning(curves: Mapping[str, Mapping[int, float]], title: str, log: bool = False) -> Axes:
    """Draw one line per run: a number measured after some steps, against the step."""
    axes = plots.new_axes(title, "step", size=(6, 3))
    for (name, points), style in zip(curves.items(), ("o-", "s--", "^:"), strict=False):
        axes.plot(list(points), list(points.values()), style, label=name)
    if log:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=FONT - 1)
    return axes
