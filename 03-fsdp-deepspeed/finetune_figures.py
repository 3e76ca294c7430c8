"""Draw the figures of lessons 3.6 and 3.7."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from shared import plots

FONT = 11  # points, in figures at most six inches wide: readable on a phone


def tokens(words: Sequence[str], marked: Sequence[bool], title: str) -> Axes:
    """Draw a row of tokens as boxes, in lines of text, with the marked ones in color."""
    width, lines, places = 46, 0, []  # of a line, in characters
    column = 0
    for word in words:
        if column + len(word) + 2 > width:
            lines, column = lines + 1, 0
        places.append((column, lines))
        column += len(word) + 2
    axes = plots.new_axes(title, size=(5.6, 0.5 + 0.42 * (lines + 1)))
    for word, is_marked, (x, y) in zip(words, marked, places, strict=True):
        box = plt.Rectangle((x, y - 0.36), len(word) + 1.5, 0.72, color=plots.COLORS[1] if is_marked else "#e4e4e4")
        axes.add_patch(box)
        axes.text(
            x + len(word) / 2 + 0.75, y, word, ha="center", va="center", family="monospace", fontsize=FONT - 2,
            color="white" if is_marked else "black",
        )  # fmt: skip
    axes.set(xlim=(-0.5, width), ylim=(lines + 0.5, -0.5))
    axes.axis("off")
    return axes
