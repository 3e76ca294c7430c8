"""Draw the figures of lessons 3.6 and 3.7."""

from collections.abc import Sequence

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
