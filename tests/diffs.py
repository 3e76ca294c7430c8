"""`make diffs`: the diffs between training scripts that the chapters' READMEs show, between their two marks.

<!-- diff: OLD NEW -->      paths from the repository's root
...
<!-- end of diff -->
"""

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- diff: (\S+) (\S+) -->\n).*?(<!-- end of diff -->)", re.DOTALL)


def with_fresh_diffs(text: str) -> str:
    """A README's text with the diffs of today's scripts."""

    def fresh(mark: re.Match) -> str:
        old, new = ((ROOT / name).read_text().splitlines() for name in mark.group(2, 3))
        lines = list(difflib.unified_diff(old, new, *mark.group(2, 3), lineterm="", n=2))
        return "\n".join([f"{mark[1]}```diff", *lines, "```", mark[4]])

    return MARKED.sub(fresh, text)


def readmes() -> list[Path]:
    return [path for path in sorted(ROOT.glob("0*/README.md")) if MARKED.search(path.read_text())]


if __name__ == "__main__":
    for path in readmes():
        path.write_text(with_fresh_diffs(path.read_text()))
        print(path.relative_to(ROOT), file=sys.stderr)
