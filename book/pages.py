"""What is wrong with the book's pages, read without a browser: `python book/pages.py FOLDER`."""

import re
import sys
from collections.abc import Iterator
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = dict.fromkeys(("script", "img", "source", "iframe", "video", "audio", "embed"), "src")
LOADS |= {"link": "href", "image": "href", "object": "data"}
MERMAID = "mermaid.min.js"


class Page(HTMLParser):
    """One page: the names one can link to, its links, what it loads, and its outputs that are errors."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.diagrams, self.errors = path, 0, 0
        self.names, self.links, self.loads = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names |= {values[name] for name in ("id", "name") if values.get(name)}
        classes = (values.get("class") or "").split()
        self.diagrams += tag == "pre" and "mermaid" in classes
        self.errors += "traceback" in classes
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in LOADS and values.get(LOADS[tag]):
            self.loads.append(values[LOADS[tag]])

    handle_startendtag = handle_starttag


class Site:
    """A folder of pages."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()

    @cached_property
    def pages(self) -> dict[Path, Page]:
        return {path: Page(path) for path in sorted(self.folder.rglob("*.html"))}

    def faults(self) -> list[str]:
        """Everything that is wrong, a line each."""
        found = [] if self.pages else ["there are no pages"]
        for path, page in self.pages.items():
            found += [f"{path.relative_to(self.folder)}: {fault}" for fault in self.faults_of(page)]
        for path in sorted(self.folder.rglob("*.css")):
            for address in re.findall(r"""(?:@import\s+|url\()["']?((?:https?:)?//[^"')\s]+)""", path.read_text()):
                found.append(f"{path.relative_to(self.folder)}: loads {address} from another host")
        return found

    def faults_of(self, page: Page) -> Iterator[str]:
        if page.errors:
            yield f"{page.errors} outputs are errors"
        for address in page.loads:
            if urlsplit(address).netloc:
                yield f"loads {address} from another host"
            elif problem := self.dead(page, address):
                yield problem
        for address in sorted(set(page.links)):
            if problem := self.dead(page, address):
                yield problem
        drawn = any(urlsplit(address).path.endswith(MERMAID) for address in page.loads)
        if page.diagrams and not drawn and (self.folder / "_static" / MERMAID).exists():
            yield "does not load what draws its diagrams"

    def dead(self, page: Page, address: str) -> str | None:
        """What is wrong with a link inside the site, if anything."""
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            return f"links to a file of one machine: {address}" if parts.scheme == "file" else None
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(self.folder) or not target.is_file():
            return f"dead link: {address}"
        if parts.fragment and target in self.pages and unquote(parts.fragment) not in self.pages[target].names:
            return f"dead link: {address}: there is no such place in {target.name}"
        return None


if __name__ == "__main__":
    site = Site(Path(sys.argv[1]))
    if problems := site.faults():
        sys.exit("\n".join(problems))
    print(f"{len(site.pages)} pages: no dead link, no error output, nothing from another host")
