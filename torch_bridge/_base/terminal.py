"""Makes text from a file safe to print on a terminal, and warns at the user's line."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence

_SHOWN = 8  # the most names in a sentence


def printable(text: str, keep: str = "") -> str:
    r"""Replaces control characters and invisible characters by their escapes.

    Args:
      text: Any text, also with unpaired surrogates.
      keep: Characters that stay as they are, for example a line feed.

    Example:
      >>> printable("red \x1b[31m")
      'red \\x1b[31m'
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def some(names: Sequence[str]) -> str:
    """Joins the first eight names, and says how many more there are.

    Example:
      >>> some(list("abcdefghij"))
      'a, b, c, d, e, f, g, h and 2 more'
    """
    shown = printable(", ".join(names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


def warn(text: str) -> None:
    """Warns at the user's line that called this package, however deep the call is."""
    level = 1
    frame = inspect.currentframe()
    while frame and frame.f_globals["__name__"].startswith("torch_bridge."):
        level += 1
        frame = frame.f_back
    warnings.warn(text, stacklevel=level)
