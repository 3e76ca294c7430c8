"""The book, built without running its lessons, and the reader of its pages, proven to find what it is for."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebook_rules import ROOT, lessons, solutions

sys.path.insert(0, str(ROOT / "book"))

from pages import Page, Site
from sources import BUILT_FROM, run, start_page, terms

BENCHMARKS = [path.relative_to(ROOT) for path in sorted(ROOT.glob("benchmarks/results/*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    folder = tmp_path_factory.mktemp("book")
    (folder / "source").mkdir()
    (folder / "mermaid.min.js").write_text("// what draws diagrams comes from npm, which tests do without")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", ROOT / "book"]
    options = ["-D", f"mermaid={folder}", "-d", folder / "doctrees", folder / "source", folder / "html"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    yield Site(folder / "html")
    shutil.rmtree(folder)


def page(site: Site, name: str) -> Page:
    return site.pages[site.folder / f"{name}.html"]


def text(site: Site, name: str) -> str:
    return page(site, name).path.read_text()


def test_no_link_is_dead_and_nothing_comes_from_elsewhere(site):
    assert site.faults() == []
    assert len(site.pages) > 100


def test_every_page_of_the_repository_has_its_page(site):
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("0*/**/*.md"), *lessons(), *solutions()]
    names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in sources if "runs" not in path.parts]
    assert len(names) > 45
    assert [name for name in names if site.folder / f"{name}.html" not in site.pages] == []
    assert BENCHMARKS and all(page(site, path.with_suffix("")) for path in BENCHMARKS)


@pytest.mark.parametrize("path", lessons(), ids=lambda path: path.stem)
def test_a_lesson_says_how_to_run_it_and_leads_on(site, path):
    name = path.relative_to(ROOT).with_suffix("")
    shown = text(site, name)
    assert "Run this lesson" in shown and f"pytest --nbmake {name}.ipynb" in re.sub(r"<[^>]+>", "", shown)
    links = page(site, name).links
    assert f"solutions/{name.name}.html" in links and "../glossary.html" in links
    assert 'class="next-page"' in shown and 'class="prev-page"' in shown
    assert any(link.endswith(f"/{path.name}") and "_downloads" in link for link in links)


def test_the_start_page_links_the_repository_if_its_address_is_known():
    assert BUILT_FROM in start_page(None) and f"[{BUILT_FROM}]" not in start_page(None)
    assert f"[{BUILT_FROM}](https://example.org/me/workshop)" in start_page("https://example.org/me/workshop")


def test_lessons_link_the_words_of_their_chapter_once(site):
    links = page(site, "01-ddp-pytorch-only/02_ranks_and_collectives").links
    words = [link for link in links if link.startswith("../glossary.html#term-")]
    assert {"../glossary.html#term-rank", "../glossary.html#term-all-reduce"} <= set(words)
    assert len(words) == len(set(words))


def test_the_glossary_holds_every_term(site):
    words = {word for row, _, _ in terms() for word in row}
    assert {"rank", "driver", "reduce-scatter", "straggler"} <= words
    assert [word for word in words if f"term-{word.replace(' ', '-')}" not in page(site, "glossary").names] == []


def test_solutions_are_folded_away(site):
    for path in solutions():
        shown = text(site, path.relative_to(ROOT).with_suffix(""))
        assert "Folded away" in shown and shown.count("<details") >= shown.count('class="cell_input') > 0
        assert f"solutions/{path.stem}.html" not in page(site, path.relative_to(ROOT).parents[1] / "README").links


def test_diagrams_and_formulas_need_no_network(site):
    with_diagrams = [path for path in lessons() if "```mermaid" in path.read_text()]
    assert with_diagrams
    for path in with_diagrams:
        shown = page(site, path.relative_to(ROOT).with_suffix(""))
        assert shown.diagrams and any(address.partition("?")[0].endswith("mermaid.min.js") for address in shown.loads)
    assert "<math" in text(site, "03-fsdp-deepspeed/01_where_memory_goes")


def test_source_files_folders_and_docstrings_have_pages(site):
    assert "DistributedDataParallel" in text(site, "01-ddp-pytorch-only/train_ddp.py")
    assert "solutions/index.html" in page(site, "01-ddp-pytorch-only/README").links
    assert "shared.checkpoint.save_atomically" in page(site, "api/shared.checkpoint").names
    assert "search.html" in text(site, "index") and (site.folder / "searchindex.js").stat().st_size > 100_000


def test_outputs_are_kept_until_something_changes_and_an_error_names_its_cell(tmp_path):
    name = Path("01-a/01_b.ipynb")
    for folder in ("01-a", "shared"):
        (tmp_path / folder).mkdir()

    def outputs(source: str) -> list:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        return run(notebook, name, tmp_path / "outputs", root=tmp_path).cells[0].outputs

    source = "from pathlib import Path; Path('runs.txt').open('a').write('x'); print('hello')"
    assert outputs(source) == outputs(source) and outputs(source)[0].text == "hello\n"
    assert (tmp_path / "01-a/runs.txt").read_text() == "x"
    (tmp_path / "shared/new.py").write_text("changed = True")
    assert outputs(source)[0].text == "hello\n" and (tmp_path / "01-a/runs.txt").read_text() == "xx"
    with pytest.raises(SystemExit, match=r"(?s)01-a/01_b\.ipynb fails:.*1 / 0.*ZeroDivisionError"):
        outputs("1 / 0")


# --- proven ----------------------------------------------------------------------------------------------------------

WELL = '<html><body id="top"><a href="b.html#there">b</a><a href="https://example.org/">elsewhere</a></body></html>'


@pytest.mark.parametrize(("html", "fault"), [
    ('<a href="c.html">', "a.html: dead link: c.html"),
    ('<a href="b.html#nowhere">', "a.html: dead link: b.html#nowhere: there is no such place in b.html"),
    ('<a href="#nowhere">', "a.html: dead link: #nowhere: there is no such place in a.html"),
    ('<a href="../outside.html">', "a.html: dead link: ../outside.html"),
    ('<img src="missing.png"/>', "a.html: dead link: missing.png"),
    ('<div class="output traceback">KeyError</div>', "a.html: 1 outputs are errors"),
    ('<script src="https://example.org/x.js">', "a.html: loads https://example.org/x.js from another host"),
    ('<link rel="stylesheet" href="//example.org/x.css">', "a.html: loads //example.org/x.css from another host"),
    ('<img src="http://example.org/x.png">', "a.html: loads http://example.org/x.png from another host"),
    ('<pre class="mermaid">graph LR</pre>', "a.html: does not load what draws its diagrams"),
    ('<a href="file:///tmp/x">', "a.html: links to a file of one machine: file:///tmp/x"),
])  # fmt: skip
def test_faults_are_found(tmp_path, html, fault):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "mermaid.min.js").touch()
    (tmp_path / "b.html").write_text('<p id="there">')
    (tmp_path / "a.html").write_text(WELL)
    assert Site(tmp_path).faults() == []
    (tmp_path / "a.html").write_text(WELL.replace("</body>", f"{html}</body>"))
    assert Site(tmp_path).faults() == [fault]


def test_fonts_from_elsewhere_and_an_empty_site_are_found(tmp_path):
    assert Site(tmp_path).faults() == ["there are no pages"]
    (tmp_path / "b.html").write_text("")
    (tmp_path / "x.css").write_text("@font-face { src: url(https://example.org/font.woff2) }")
    assert Site(tmp_path).faults() == ["x.css: loads https://example.org/font.woff2 from another host"]
