"""Compare two versions of a training script: print single hunks of the diff, and draw where the lines went."""

import ast
import difflib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes

from shared import plots

ANSI_COLORS = {"+": 32, "-": 31, "@": 36}  # green, red, cyan


class ScriptDiff:
    """The diff between two Python scripts. `shown` holds the numbers of the hunks that `show` has printed."""

    def __init__(self, old: str | Path, new: str | Path) -> None:
        self.texts = [Path(path).read_text() for path in (old, new)]
        self.old, self.new = (text.splitlines() for text in self.texts)
        diff = list(difflib.unified_diff(self.old, self.new, n=1, lineterm=""))
        starts = [number for number, line in enumerate(diff) if line.startswith("@@")]
        self.hunks = [diff[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
        self.kept = len(self.old) - sum(line.startswith("-") for hunk in self.hunks for line in hunk)
        self.shown: set[int] = set()

    def show(self, *phrases: str) -> None:
        """Print the hunk that contains each phrase, new lines in green and removed lines in red.

        Raises ValueError unless each phrase occurs in exactly one hunk.
        """
        for phrase in phrases:
            (number,) = (number for number, hunk in enumerate(self.hunks) if phrase in "\n".join(hunk))
            self.shown.add(number)
            for line in self.hunks[number]:
                print(f"\x1b[{ANSI_COLORS.get(line[0], 0)}m{line}\x1b[0m")

    def source(self, function: str) -> list[str]:
        """Return the source of a function in the old and in the new script."""
        return ["\n".join(text.splitlines()[slice(*function_lines(text)[function])]) for text in self.texts]

    def count_lines(self, parts: Mapping[str, tuple[str, ...]]) -> dict[str, Counter]:
        """Count the lines that are "kept", "gone" and "new" in each part.

        parts: its title and the names of its functions. Lines outside all of these functions belong to the first part.
        """
        first = next(iter(parts))
        owner = {function: title for title, functions in parts.items() for function in functions}
        titles = []
        for text in self.texts:
            titles.append([first] * len(text.splitlines()))
            for function, (start, end) in function_lines(text).items():
                titles[-1][start:end] = [owner.get(function, first)] * (end - start)
        counts = {title: Counter() for title in parts}
        # The same matcher that unified_diff uses.
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, self.old, self.new).get_opcodes():
            for title in titles[0][i1:i2]:
                counts[title]["kept" if tag == "equal" else "gone"] += 1
            if tag != "equal":
                for title in titles[1][j1:j2]:
                    counts[title]["new"] += 1
        return counts


def function_lines(text: str) -> dict[str, tuple[int, int]]:
    """Return the first line and the end, as a slice of the lines, of each function at a script's top level.

    A decorator belongs to its function.
    """
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    starts = {node.name: min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1 for node in functions}
    return {node.name: (starts[node.name], node.end_lineno) for node in functions}


def draw(counts: Mapping[str, Counter], title: str) -> Axes:
    """Draw one bar per part: its lines that are kept, gone and new, each piece with its number."""
    axes = plots.new_axes(title, "lines", size=(7.5, 0.9 + 0.45 * len(counts)))
    axes.grid(visible=False)
    kinds = {"kept": "#c8c8c8", "gone": plots.COLORS[4], "new": plots.COLORS[2]}
    for row, count in enumerate(counts.values()):
        left, outside = 0, []
        for kind, color in kinds.items():
            axes.barh(row, count[kind], left=left, color=color, height=0.66)
            if count[kind] >= 10:  # wide enough for its label
                text = {"color": "black" if kind == "kept" else "white", "ha": "center", "va": "center", "fontsize": 8}
                axes.text(left + count[kind] / 2, row, f"{count[kind]} {kind}", **text)
            elif count[kind]:
                outside.append(f"{count[kind]} {kind}")
            left += count[kind]
        axes.text(left + 1, row, ", ".join(outside), va="center", fontsize=8)
    axes.set_yticks(range(len(counts)), list(counts))
    axes.invert_yaxis()
    return axes
