"""Where the parts of the repository lie."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS, DOCS, EXAMPLES = (ROOT / name for name in ("benchmarks", "docs", "examples"))
SUPPORT = ROOT / "tests" / "support"
