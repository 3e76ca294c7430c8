"""Where the files of lesson 4.5's job are: a search on every disk, and its picture."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt

from shared import plots

FILES = {  # name on disk -> what it is
    "train.py": "script", "shared/checkpoint.py": "package `shared`", "digits.pt": "data", "newest.pt": "checkpoint",
    "losses.json": "results", "auth_token": "secret",
}  # fmt: skip
RESULTS = ("newest.pt", "losses.json")


def search(disks: Mapping[str, Path], saved_to: str) -> dict[str, set[str]]:
    """Return for each file the names of the disks on which it is now.

    saved_to: the last two folders of the path under which checkpoint and results were saved.
    """
    paths = {file: f"{saved_to}/{file}" if file in RESULTS else file for file in FILES}
    return {file: {name for name, disk in disks.items() if any(disk.rglob(path))} for file, path in paths.items()}


def draw(found: Mapping[str, Mapping[str, set[str]]], disks: list[str]) -> None:
    """Draw one panel for each run: what `search` has found after it."""
    _, panels = plt.subplots(1, len(found), figsize=(10.4, 3.1), sharey=True, layout="constrained")
    for axes, (title, places) in zip(panels, found.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        for row, file in enumerate(FILES):
            for column, disk in enumerate(disks):
                axes.add_patch(plt.Rectangle((column - 0.44, row - 0.38), 0.88, 0.76, color="0.94", linewidth=0))
                if disk in places[file]:
                    color = plots.COLORS[1 if file in RESULTS else 0]
                    axes.add_patch(plt.Rectangle((column - 0.44, row - 0.38), 0.88, 0.76, color=color, linewidth=0))
        axes.set(xlim=(-0.6, len(disks) - 0.4), ylim=(len(FILES) - 0.4, -0.6))
        axes.set_xticks(range(len(disks)), disks)
        axes.set_yticks(range(len(FILES)), [f"{what}\n{file.rpartition('/')[2]}" for file, what in FILES.items()])
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        axes.spines[:].set_visible(False)
