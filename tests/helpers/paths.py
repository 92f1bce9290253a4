"""Where the parts of the repository lie, and what they import."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
LANGUAGE_MODEL = EXAMPLES / "language_model"


def imports(source):
    """Modules that a program imports, also inside of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
