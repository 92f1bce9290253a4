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


@dataclasses.dataclass
class Budget:
    """Counts down the bytes of memory that reading a file may take."""

    limit: int
    used: int = 0

    @classmethod
    def of_file(cls, size: int, max_bytes: int | None) -> Budget:
        """For a file of `size` bytes, unless the user says another limit."""
        return cls(3 * size + (64 << 20) if max_bytes is None else max_bytes)

    def claim(self, nbytes: int) -> None:
        """Count `nbytes` before they are allocated, or raise Malformed when that is too much."""
        self.used += nbytes
        if self.used > self.limit:
            raise Malformed(
                f"contents that unpack to more than {self.limit} bytes, the limit for this file; "
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
