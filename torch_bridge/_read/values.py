"""What every part of the reader uses: its two errors, the budget, and the name of a global."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_bridge._base.errors import CheckpointMismatch


class Malformed(CheckpointMismatch):
    """The file is damaged, or is no checkpoint of torch's; the message says what was found."""


class Forbidden(Exception):
    """The file asks for a global that is not on the allow-list; the message is its name."""


@dataclasses.dataclass(frozen=True)
class Global:
    """A global the file names, never imported: only its name."""

    name: str


class Budget:
    """Counts down the bytes of memory that reading a file may take.

    Args:
      size: Of the file, of which three times as many and 64 MiB more may be taken.
      max_bytes: Another limit, if the user says one.
    """

    def __init__(self, size: int, max_bytes: int | None) -> None:
        self._limit = self._left = 3 * size + (64 << 20) if max_bytes is None else max_bytes

    def claim(self, nbytes: int) -> None:
        """Count `nbytes` before they are allocated, or raise Malformed when that is too much."""
        self._left -= nbytes
        if self._left < 0:
            raise Malformed(
                f"contents that unpack to more than {self._limit} bytes, the limit for this file; "
                f"if you trust it, pass a larger `max_bytes`",
                parameters=("max_bytes",),
            )


def expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """`value`, if it is of that kind; else Malformed says what was found where."""
    if isinstance(value, kind):
        return value
    raise Malformed(f"a {type(value).__name__} {where}")


def brief(value: Any) -> str:
    """`value` for a message; not that of a container, whose ``repr`` need not end."""
    if isinstance(value, str):
        return f"{value:.40}"
    small = isinstance(value, int) and value.bit_length() <= 64
    return str(value) if small else f"a {type(value).__name__}"
