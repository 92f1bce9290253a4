"""Where the parts of the repository lie."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
LANGUAGE_MODEL = EXAMPLES / "language_model"
SUPPORT = ROOT / "tests" / "support"
