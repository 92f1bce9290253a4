"""The documentation as a site: the pages beside this folder, the README and the docstrings.

`make docs` builds it into out/docs; a warning (a link that leads nowhere, a name that is not there,
markup that is none) ends the build.
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

# A notebook is executed once for each of its versions; one that fails, or prints a warning, ends
# the build. That which needs torch is shown as it was committed: the site's environment stays
# without torch, and tests/docs/test_notebooks.py runs it.
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
MULTILINE = re.MULTILINE | re.DOTALL
# Single backticks, and not those of a role such as :math:`x` or of what is code already.
CODE = re.compile(r":\w+:`[^`]*`|``[^`]*``|`([^`]+)`")


def _public_names() -> dict[str, str]:
    """Every public name, by its last part: `DataParallel` -> `jaxcomp.types.DataParallel`."""
    names = {}
    for module in (torch_bridge, torch_bridge.types, jaxcomp.types, jaxcomp.extend, jaxcomp):
        for name in module.__all__:
            names[name] = f"{module.__name__}.{name}"
    return names


PUBLIC = _public_names()
# Pages of others, by the first part of a name. optax has many names on a page.
JAX = "https://docs.jax.dev/en/latest/_autosummary/{}.html"
NUMPY = "https://numpy.org/doc/stable/reference/generated/{}.html"
# Those with a page of their own; numpy's scalar types share one.
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


def _reference(found: re.Match[str]) -> str:
    """A name in code as a link to its entry, here or on the pages of jax or numpy."""
    code = found[1]
    if not code:
        return found[0]
    if code in PUBLIC:
        return f":py:obj:`{code} <{PUBLIC[code]}>`"
    if _page_of(code):
        return f":py:obj:`{code}`"
    return f"``{code}``"


def _page_of(name: str) -> str | None:
    """The page that another project has of a name."""
    if not re.fullmatch(r"[\w.]+", name):
        return None
    package, _, rest = name.partition(".")
    if package == "jax" and rest:
        # Types are written with the module that defines them; pages have the public name.
        return None if "._" in name else JAX.format(name)
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
        document, builder = node["refdoc"], app.builder
        return domain.resolve_xref(env, document, builder, "obj", PUBLIC[name], node, content)
    page = _page_of(target)
    if page is None:
        return None
    link = nodes.reference("", "", internal=False, refuri=page)
    link += content
    return link


def _markdown_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]):
    """Docstrings write code between single backticks, as comments and documents do."""
    del app, what, name, thing, options
    text = CODE.sub(_reference, "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-process-docstring", _markdown_code)
    app.connect("missing-reference", _missing_reference)
