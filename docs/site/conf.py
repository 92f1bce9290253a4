"""Configures Sphinx: the site has the pages beside this folder, the README and the docstrings.

`make docs` builds it into out/docs. Any warning ends the build, such as one about a link that leads
nowhere or about a name that does not exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes

import jaxcomp
import torch_bridge.types

project = "jaxcomp"
author = "The jaxcomp authors"
release = jaxcomp.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["site/conf.py"]

# A notebook is executed once for each of its versions. If it fails or prints a warning, the build
# ends. The site's environment has no torch, so the notebook that needs torch is shown as it was
# committed, and tests/docs/test_notebooks.py runs it.
nb_execution_mode = "cache"
nb_execution_excludepatterns = ["notebooks/torch_and_back.ipynb"]
nb_execution_timeout = 900  # seconds, of a cell
nb_execution_raise_on_error = True
nb_output_stderr = "remove-warn"

html_theme = "furo"
html_title = f"jaxcomp {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_exclude = ".linenos, .gp"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"  # shapes and units are in the text
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # fields stand once, in their class's docstring

LINK = re.compile(
    r"(?<!!)\[([^\]]*)\]\((?:\.\./)?((?:examples|benchmarks|tests)/[^)#]*|[A-Z]+\.md|docs/index\.md)(?:#[^)]*)?\)"
)
# Sections of docs/index.md, with their captions, and the pages in one of them.
SECTION = re.compile(r"^\*\*(.+?)\*\*$(.*?)(?=^\*\*|\Z)", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"^\d+\. \[[^]]+\]\(([\w/]+)\.(?:md|ipynb)\)", re.MULTILINE)
# Single backticks. Roles such as :math:`x` and double backticks match too, without a group.
CODE = re.compile(r":\w+:`[^`]*`|``[^`]*``|`([^`]+)`")


def _public_names() -> dict[str, str]:
    """Maps the last part of every public name to the name: DataParallel -> jaxcomp.types..."""
    names = {}
    for module in (torch_bridge, torch_bridge.types, jaxcomp.types, jaxcomp.extend, jaxcomp):
        for name in module.__all__:
            names[name] = f"{module.__name__}.{name}"
    return names


PUBLIC = _public_names()
# Pages of others, by the first part of a name. optax has many names on a page.
JAX = "https://docs.jax.dev/en/latest/_autosummary/{}.html"
NUMPY = "https://numpy.org/doc/stable/reference/generated/{}.html"
# The names that have a page; numpy's scalar types share one.
NUMPY_NAMES = ("numpy.ndarray", "numpy.dtype")
OPTAX = "https://optax.readthedocs.io/en/latest/api/{page}.html#{name}"
OPTAX_PAGES = {
    "GradientTransformation": "transformations",
    "GradientTransformationExtraArgs": "transformations",
    "TransformUpdateFn": "transformations",
    "chain": "combining_optimizers",
    "apply_updates": "apply_updates",
    "adam": "optimizers",
    "adamw": "optimizers",
    "sgd": "optimizers",
}


def _repository_links(text: str) -> str:
    """Replaces links to files that are not on the site by the names of the files."""

    def name_of_file(link: re.Match[str]) -> str:
        words, file = link.groups()
        if file.endswith(words.strip("`/")):
            return f"`{file}`"
        return f"{words} (`{file}`)"

    return LINK.sub(name_of_file, text)


def _home(index: str) -> str:
    """Makes the first page: the README, with the contents of docs/index.md in the sidebar."""
    parts = ["```{include} ../README.md\n:relative-docs: docs/\n:relative-images:\n```"]
    contents = []
    for caption, section in SECTION.findall(index):
        contents.append((caption, PAGE.findall(section)))
    contents.append(("Reference", ["site/api", "site/contributing", "site/changelog"]))
    for caption, pages in contents:
        if pages:
            lines = "\n".join(pages)
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def _read_page(app: Any, page: str, source: list[str]) -> None:
    del app
    if page == "index":
        source[0] = _home(source[0])
    else:
        source[0] = _repository_links(source[0])


def _read_included(app: Any, path: Path, parent: str, source: list[str]) -> None:
    del app, path, parent
    source[0] = _repository_links(source[0])


def _reference(match: re.Match[str]) -> str:
    """Links a name in code to its entry, on this site or on the pages of jax, numpy or optax."""
    code = match[1]
    if not code:
        return match[0]
    if code in PUBLIC:
        return f":py:obj:`{code} <{PUBLIC[code]}>`"
    if _page_of(code):
        return f":py:obj:`{code}`"
    return f"``{code}``"


def _page_of(name: str) -> str | None:
    """Returns the address of a name's page in another project, or None."""
    if not re.fullmatch(r"[\w.]+", name):
        return None
    package, _, rest = name.partition(".")
    if package == "jax" and rest:
        # Annotations name the module that defines a type; pages exist for public names only.
        if "._" in name:
            return None
        return JAX.format(name)
    if name in NUMPY_NAMES:
        return NUMPY.format(name)
    if package == "optax" and rest in OPTAX_PAGES:
        return OPTAX.format(page=OPTAX_PAGES[rest], name=name)
    return None


def _missing_reference(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolves names of jax, numpy and optax, and ours by the module that defines them."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if target.startswith(("jaxcomp._", "torch_bridge._")) and name in PUBLIC:
        domain = env.get_domain("py")
        return domain.resolve_xref(
            env, node["refdoc"], app.builder, "obj", PUBLIC[name], node, content
        )
    page = _page_of(target)
    if page is None:
        return None
    link = nodes.reference("", "", internal=False, refuri=page)
    link += content
    return link


def _markdown_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]):
    """Turns code between single backticks into links and code, in the lines of a docstring."""
    del app, what, name, thing, options
    text = CODE.sub(_reference, "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Connects the functions above to Sphinx, which calls this."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-process-docstring", _markdown_code)
    app.connect("missing-reference", _missing_reference)
