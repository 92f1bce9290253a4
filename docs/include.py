"""Puts the programs of examples/ into the documents that show them.

    python docs/include.py          rewrites the documents
    python docs/include.py --check  says which are behind, and changes nothing

A document shows a program between ``<!-- include FILE -->`` and the end of the code block after it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- include (\S+) -->\n```python\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Lists the documents."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def included(text: str) -> str:
    """Returns a document with its programs as they are in their files."""
    return BLOCK.sub(lambda found: found[1] + (ROOT / found[2]).read_text(), text)


def main() -> int:
    """Runs the command line; returns the exit code."""
    behind = [page for page in pages() if page.read_text() != included(page.read_text())]
    if "--check" in sys.argv[1:]:
        for page in behind:
            print(f"{page.relative_to(ROOT)} is behind its programs: run python docs/include.py")
        return int(bool(behind))
    for page in behind:
        page.write_text(included(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
