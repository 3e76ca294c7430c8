"""Settings of the book: `make book`. What is special about it, workshop.py does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Distributed training with PyTorch and Ray"
extensions = ["myst_nb", "sphinx.ext.autodoc", "workshop"]
exclude_patterns = ["files"]
suppress_warnings = ["misc.highlighting_failure"]  # a cell that writes a shell script is no Python

# sources.py runs the lessons.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
myst_update_mathjax = False

# Docstrings are plain sentences with `code` in single backticks.
default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False

html_theme = "furo"
html_title = "Distributed training, hands on"
html_math_renderer = "mathml"
html_favicon = "icon.svg"
html_use_index = False
html_domain_indices = False
html_static_path = ["book.css", "diagrams.js"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_copyright = False
html_permalinks_icon = "#"


def colors(accent: str) -> dict:
    names = ("color-brand-primary", "color-brand-content", "color-api-name", "color-admonition-title")
    return dict.fromkeys(names, accent) | {"color-admonition-title-background": f"{accent}1a"}


html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": colors("#3465a4"),  # the figures' own
    "dark_css_variables": colors("#8fb4e3"),
}
