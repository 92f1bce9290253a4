"""The documentation as a site: the pages beside this folder, the README and the docstrings.

`make docs` builds it into out/docs; a warning (a link that leads nowhere, a name that is not there,
markup that is none) ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = "jaxcomp"
author = "The jaxcomp authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["site/conf.py"]

# A notebook is executed once for each of its versions; one that fails, or prints a warning, ends
# the build. That which needs torch is shown as it was committed: the site's environment stays
# without torch, and tests/docs/test_notebooks.py runs it.
nb_execution_mode = "cache"
nb_execution_excludepatterns = ["notebooks/torch_and_back.ipynb"]
nb_execution_timeout = 900  # seconds, of a cell
nb_execution_raise_on_error = True
nb_output_stderr = "remove-warn"

html_theme = "furo"
html_title = "jaxcomp"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_exclude = ".linenos, .gp"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the docstrings give shapes and units, which types do not
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # fields stand once, in their class's docstring

LINK = re.compile(
    r"(?<!!)\[([^\]]*)\]\((?:\.\./)?((?:examples|benchmarks)/[^)#]*|[A-Z]+\.md|docs/index\.md)(?:#[^)]*)?\)"
)
MULTILINE = re.MULTILINE | re.DOTALL
# Single backticks, and not those of a role such as :math:`x` or of what is code already.
CODE = re.compile(r":\w+:`[^`]*`|``[^`]*``|`([^`]+)`")


def _repository_links(text: str) -> str:
    """What only the repository has, named instead of linked."""

    def named(found: re.Match[str]) -> str:
        said, target = found[1], f"`{found[2]}`"
        return target if found[2].endswith(said.strip("`/")) else f"{said} ({target})"

    return LINK.sub(named, text)


def _home(index: str) -> str:
    """The first page: the README, beside docs/index.md as the table of contents."""
    parts = ["```{include} ../README.md\n:relative-docs: docs/\n:relative-images:\n```"]
    contents = [
        (caption, re.findall(r"^\d+\. \[[^]]+\]\(([\w/]+)\.(?:md|ipynb)\)", section, re.MULTILINE))
        for caption, section in re.findall(r"^\*\*(.+?)\*\*$(.*?)(?=^\*\*|\Z)", index, MULTILINE)
    ]
    contents += [("Reference", ["site/api", "site/contributing", "site/changelog"])]
    for caption, pages in contents:
        if pages:
            lines = "\n".join(pages)
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def _read_page(app: Any, page: str, source: list[str]) -> None:
    del app
    source[0] = _home(source[0]) if page == "index" else _repository_links(source[0])


def _read_included(app: Any, path: Path, parent: str, source: list[str]) -> None:
    del app, path, parent
    source[0] = _repository_links(source[0])


def _markdown_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]):
    """Docstrings write code between single backticks, as comments and documents do."""
    del app, what, name, thing, options
    text = CODE.sub(lambda found: f"``{found[1]}``" if found[1] else found[0], "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-process-docstring", _markdown_code)
