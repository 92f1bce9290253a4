"""Markdown tables, as every benchmark prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table; all but the first `left` columns are aligned to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def in_page(page: str, command: str, text: str) -> str:
    """A document with `text` between the comment that names `command` and the next ``end``.

    Raises:
      ValueError: It has no such place, or several.
    """
    block = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    page, found = block.subn(lambda place: place[1] + text, page)
    if found != 1:
        raise ValueError(f"{found} places of `{command}` in the document, not one.")
    return page
