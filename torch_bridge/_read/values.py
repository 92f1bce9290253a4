"""The reader's two errors, its budget, and the class for the name of a global.

The other files of this wing use these. The `Budget` is what makes reading safe to bound: memory in
bytes, and the comparisons of keys, since a hostile file can choose numbers whose hashes collide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch_bridge._base.errors import CheckpointMismatch

_ITEM = 160  # bytes of memory for an entry of a dictionary or set
# The time to hash a key grows with its size, and a hostile file can choose numbers whose hashes
# collide. The limit on comparisons, 16,384 keys with each other, takes half a second.
_MAX_BITS = 64
_MAX_PARTS = 8
_MAX_COMPARISONS = 1 << 27
_TUPLE_COMPARISON = 16


class Malformed(CheckpointMismatch):
    """The file is damaged, or torch did not write it; the message says what the file contains."""


class Forbidden(Exception):
    """The file asks for a global that is not on the allow-list; the message is its name."""


@dataclasses.dataclass(frozen=True)
class Global:
    """The name of a global in the file; the global itself is never imported."""

    name: str


class Budget:
    """The bytes of memory and the comparisons of keys that reading a file may still take.

    Args:
      size: The file's size in bytes. The usual limit is three times the size and 64 MiB more.
      max_bytes: The user's limit in bytes; None for the usual one.
    """

    def __init__(self, size: int, max_bytes: int | None) -> None:
        self._limit = 3 * size + (64 << 20) if max_bytes is None else max_bytes
        self._left = self._limit
        self._chosen = 0
        self._comparisons = 0

    def claim(self, nbytes: int) -> None:
        """Charges `nbytes` before the allocation; raises Malformed if the limit is exceeded."""
        self._left -= nbytes
        if self._left < 0:
            raise Malformed(
                f"contents that unpack to more than {self._limit} bytes, the limit for this file; "
                f"if you trust it, pass a larger `max_bytes`",
                parameters=("max_bytes",),
            )

    def fill_dictionary(self, made: dict[Any, Any], items: Iterable[Any]) -> dict[Any, Any]:
        """Adds items to a dictionary; checks each key before Python hashes it."""
        for key, value in items:
            self._check_key(key, len(made))
            made[key] = value
        return made

    def fill_set(self, made: set[Any], keys: Iterable[Any]) -> set[Any]:
        """Adds members to a set; checks each one before Python hashes it."""
        for key in keys:
            self._check_key(key, len(made))
            made.add(key)
        return made

    def _check_key(self, key: Any, position: int) -> None:
        """Checks and charges a new key of a dictionary or set that has `position` entries.

        The hashes of text and bytes depend on a secret of the process, and those of 0, 1, 2, ...
        never collide. Any other key may collide with all such keys before it.
        """
        self.claim(_ITEM)
        if isinstance(key, str | bytes) or (type(key) is int and key == position):
            return
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > _MAX_PARTS or not all(map(_is_cheap, parts)):
            raise Malformed(
                f"{brief(key)} as a dictionary key: too large, or not of a type that keys have"
            )
        cost = _TUPLE_COMPARISON if parts is key else 1
        self._comparisons += cost * min(position, self._chosen)
        self._chosen += 1
        if self._comparisons > _MAX_COMPARISONS:
            raise Malformed(
                "a dictionary or set with more than 16384 numbers or 4096 tuples as keys (0, 1, 2, "
                "... in order do not count). A hostile file can choose such keys so that reading "
                "them takes hours. If you trust the file, read it with torch.load and save it with "
                "text as keys (str(key)) or with the keys in a tensor"
            )


def _is_cheap(key: Any) -> bool:
    if isinstance(key, int):
        return key.bit_length() <= _MAX_BITS
    return key is None or isinstance(key, float | str | bytes | Global)


def expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """Returns `value` if it has the type `kind`; else raises Malformed with its type and place."""
    if isinstance(value, kind):
        return value
    raise Malformed(f"a {type(value).__name__} {where}")


def brief(value: Any) -> str:
    """Returns a value as short text for a message; a container becomes the name of its type."""
    if isinstance(value, str):
        return f"{value:.40}"
    small = isinstance(value, int) and value.bit_length() <= 64
    return str(value) if small else f"a {type(value).__name__}"
