"""Text from a file, made fit for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8  # names in a sentence


def printable(text: str, keep: str = "") -> str:
    r"""Writes everything out that a terminal would act on, or that nobody would see.

    Args:
      text: Any text; half characters included.
      keep: Characters that stay as they are, a line feed for example.

    Example:
      >>> printable("red \x1b[31m")
      'red \\x1b[31m'
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def some(names: Sequence[str]) -> str:
    """Writes the first of many names, and how many more there are.

    Example:
      >>> some(list("abcdefghij"))
      'a, b, c, d, e, f, g, h and 2 more'
    """
    shown = printable(", ".join(names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown
