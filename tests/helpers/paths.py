"""The folders of the repository, and the imports of a program."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
LANGUAGE_MODEL = EXAMPLES / "language_model"


def imports(source):
    """Yields the modules that a program imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
