"""Settings of the site: Sphinx, Markdown by MyST, the furo theme, and nothing from the network."""

from typing import Any

import tallyroll

project = "Tallyroll"
author = "the authors of Tallyroll"
release = tallyroll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "Tallyroll"
html_show_search_summary = False  # fetches a summary, which a page opened from disk cannot
html_copy_source = False
html_show_copyright = False
html_use_index = html_domain_indices = False  # too wide for a phone, which has the search
html_theme_options = {  # lines of 96 characters fit the column
    "light_css_variables": {"code-font-size": "0.75rem"},
}

autodoc_typehints = "none"  # docstrings describe the types of arguments
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # or the words before a colon in "Returns" are linked as a type
nitpick_ignore = [("py:exc", "As iterating does."), ("py:class", "Offsets")]

_of_attributes: dict[str, list[str]] = {}


def setup(app: Any) -> None:
    """Keep napoleon from parsing the words before a colon in an attribute's docstring as a type."""
    app.connect("autodoc-process-docstring", _remember, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)


def _is_plain(what: str, lines: list[str]) -> bool:
    return what in ("attribute", "property") and not any(line.endswith(":") for line in lines)


def _remember(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if _is_plain(what, lines):
        _of_attributes[name] = list(lines)


def _restore(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _of_attributes.get(name, lines)
