"""Text from a file, made fit for a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""`text` with everything written out that a terminal would act on, or that nobody would see.

    Args:
      text: Any text; half characters included.
      keep: Characters that stay as they are, a line feed for example.

    Example:
      >>> printable("red \x1b[31m")
      'red \\x1b[31m'
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
