"""Text from a file, made fit for a terminal."""

from __future__ import annotations

import re

# Control characters but the line feed, what turns the direction of text, and half characters.
_UNPRINTABLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""`text` with everything that a terminal would act on written out.

    Example:
      >>> printable("red \x1b[31m")
      'red \\x1b[31m'
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
