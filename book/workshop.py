"""The book's own Sphinx extension: lays out the sources, links terms, draws diagrams and formulas without a network."""

import html
import re
from pathlib import Path

import sources
from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

MERMAID = "mermaid.min.js"


def lay_out(app: Sphinx) -> None:
    sources.lay_out(Path(app.srcdir), Path(app.config.outputs) if app.config.outputs else None)


def link_terms(app: Sphinx, doctree: nodes.document) -> None:
    """Link a term to the glossary where a lesson first uses it, in the lessons of the chapter that introduces it."""
    chapter, _, name = app.env.docname.partition("/")
    wanted = {word for words, where, _ in sources.terms() if where == chapter for word in words}
    if not re.fullmatch(r"\d\d_\w+", name):
        return
    for text in list(doctree.findall(nodes.Text)):
        defined = isinstance(text.parent, nodes.strong) and str(text) in wanted
        if not (defined or isinstance(text.parent, nodes.paragraph)) or inside(text, nodes.entry, nodes.Admonition):
            continue
        pieces, rest = [], str(text)
        while found := first_of(wanted, rest):
            word, start, end = found
            wanted.remove(word)
            link = {"refdomain": "std", "reftype": "term", "reftarget": word, "refdoc": app.env.docname}
            shown = nodes.inline("", rest[start:end], classes=["term"])
            pieces += [nodes.Text(rest[:start]), addnodes.pending_xref("", shown, refexplicit=True, **link)]
            rest = rest[end:]
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(rest)])


def inside(node: nodes.Node, *kinds: type) -> bool:
    return node is not None and (isinstance(node, kinds) or inside(node.parent, *kinds))


def first_of(words: set[str], text: str) -> tuple[str, int, int] | None:
    """The word that comes first in `text`, the longest of those that begin there; where it begins and ends."""
    places = [(word, re.search(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", text)) for word in words]
    found = [(match.start(), -match.end(), word) for word, match in places if match]
    return (min(found)[2], min(found)[0], -min(found)[1]) if found else None


class Mermaid(SphinxDirective):
    """A diagram: text, which diagrams.js draws in the reader's browser."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        diagram = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{diagram}</pre>', format="html")]


def add_diagrams(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Pages with a diagram, and no others, load what draws it."""
    if app.config.mermaid and '<pre class="mermaid">' in context.get("body", ""):
        app.add_js_file(MERMAID)
        app.add_js_file("diagrams.js")


def take_mermaid(app: Sphinx, config: Config) -> None:
    if config.mermaid:
        config.html_static_path.append(f"{config.mermaid}/{MERMAID}")


def formula(display: str) -> tuple:
    """The visitors that write a formula as MathML, which browsers show without a script."""

    def visit(self, node: nodes.math | nodes.math_block) -> None:
        self.body.append(convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit, None


def escape_stars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """In a docstring `*more` means its arguments, not emphasis."""
    lines[:] = [re.sub(r"(?<![\w*`])\*(?=\w[^*]*$|\w+\))", r"\\*", line) for line in lines]


def setup(app: Sphinx) -> dict:
    app.add_config_value("outputs", "", "env", str)  # where the lessons' outputs are kept; without it they are not run
    app.add_config_value("mermaid", "", "html", str)  # the folder of mermaid.min.js; without it diagrams stay text
    app.add_directive("mermaid", Mermaid)
    app.add_html_math_renderer("mathml", inline_renderers=formula("inline"), block_renderers=formula("block"))
    app.connect("config-inited", take_mermaid)
    app.connect("builder-inited", lay_out)
    app.connect("doctree-read", link_terms)
    app.connect("autodoc-process-docstring", escape_stars)
    app.connect("html-page-context", add_diagrams)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
