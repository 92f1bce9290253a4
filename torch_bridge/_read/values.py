"""What every part of the reader uses: its two errors, the budget, and the name of a global."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch_bridge._base.errors import CheckpointMismatch

_ITEM = 160  # bytes of memory of an entry of a dictionary or set
# Hashing a key costs time in proportion to its size, every time, and numbers can be chosen to
# collide. These many comparisons, of 16 384 keys with each other, take half a second.
_MAX_BITS, _MAX_PARTS = 64, 8
_MAX_COMPARISONS, _TUPLE_COMPARISON = 1 << 27, 16


class Malformed(CheckpointMismatch):
    """The file is damaged, or is no checkpoint of torch's; the message says what was found."""


class Forbidden(Exception):
    """The file asks for a global that is not on the allow-list; the message is its name."""


@dataclasses.dataclass(frozen=True)
class Global:
    """A global the file names, never imported: only its name."""

    name: str


class Budget:
    """Counts down the bytes of memory and the comparisons of keys that reading a file may take.

    Args:
      size: The file's bytes. Three times as many, and 64 MiB more, may be taken.
      max_bytes: Another limit, if the user says one.
    """

    def __init__(self, size: int, max_bytes: int | None) -> None:
        self._limit = 3 * size + (64 << 20) if max_bytes is None else max_bytes
        self._left = self._limit
        self._chosen = 0
        self._comparisons = 0

    def claim(self, nbytes: int) -> None:
        """Counts `nbytes` before they are allocated, or raises Malformed when that is too much."""
        self._left -= nbytes
        if self._left < 0:
            raise Malformed(
                f"contents that unpack to more than {self._limit} bytes, the limit for this file; "
                f"if you trust it, pass a larger `max_bytes`",
                parameters=("max_bytes",),
            )

    def fill_dictionary(self, made: dict[Any, Any], items: Iterable[Any]) -> dict[Any, Any]:
        """Puts items into a dictionary, with their keys checked before they are hashed."""
        for key, value in items:
            self._check_key(key, len(made))
            made[key] = value
        return made

    def fill_set(self, made: set[Any], keys: Iterable[Any]) -> set[Any]:
        """Puts members into a set, checked before they are hashed."""
        for key in keys:
            self._check_key(key, len(made))
            made.add(key)
        return made

    def _check_key(self, key: Any, position: int) -> None:
        """Checks a key that joins a dictionary or set of `position` entries.

        Text and bytes are hashed with a secret of the process, and 0, 1, 2, ... never meet each
        other; any other key may be compared with all such keys before it.
        """
        self.claim(_ITEM)
        if isinstance(key, str | bytes) or (type(key) is int and key == position):
            return
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > _MAX_PARTS or not all(map(_is_cheap, parts)):
            raise Malformed(f"{brief(key)} as a dictionary key: too large, or none at all")
        cost = _TUPLE_COMPARISON if parts is key else 1
        self._comparisons += cost * min(position, self._chosen)
        self._chosen += 1
        if self._comparisons > _MAX_COMPARISONS:
            raise Malformed(
                "a dictionary or set of more than 16384 numbers as keys, or 4096 tuples, other "
                "than 0, 1, 2, ... in order: such keys can be chosen so that reading them takes "
                "hours. If you trust the file, read it with torch.load and save it with text as "
                "keys (str(key)) or with the keys in a tensor"
            )


def _is_cheap(key: Any) -> bool:
    if isinstance(key, int):
        return key.bit_length() <= _MAX_BITS
    return key is None or isinstance(key, float | str | bytes | Global)


def expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """Returns `value`, if it is of that kind; else Malformed says what was found where."""
    if isinstance(value, kind):
        return value
    raise Malformed(f"a {type(value).__name__} {where}")


def brief(value: Any) -> str:
    """Writes a value for a message; not that of a container, whose ``repr`` need not end."""
    if isinstance(value, str):
        return f"{value:.40}"
    small = isinstance(value, int) and value.bit_length() <= 64
    return str(value) if small else f"a {type(value).__name__}"
