"""The keys of the dictionaries and sets that a file fills, each checked before it is hashed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_bridge._read.values import Budget, Global, Malformed, brief

_ITEM = 160  # bytes of memory of an entry of a dictionary or set
# Hashing a key costs time in proportion to its size, every time, and numbers can be chosen to
# collide. These many comparisons, of 16 384 keys with each other, take half a second.
_MAX_BITS, _MAX_PARTS = 64, 8
_MAX_COMPARISONS, _TUPLE_COMPARISON = 1 << 27, 16


class Keys:
    """Fills the dictionaries and sets of one file, charged to a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._chosen = 0
        self._comparisons = 0

    def mapping(self, pairs: Iterable[Any], into: dict[Any, Any] | None = None) -> dict[Any, Any]:
        """Fills a dictionary, or a new one, with checked keys."""
        made = {} if into is None else into
        for key, value in pairs:
            made[self._checked(key, len(made))] = value
        return made

    def members(self, keys: Iterable[Any], into: set[Any] | None = None) -> set[Any]:
        """Fills a set, or a new one, with checked members."""
        made = set() if into is None else into
        for key in keys:
            made.add(self._checked(key, len(made)))
        return made

    def _checked(self, key: Any, position: int) -> Any:
        """Checks a key that joins a dictionary or set of `position` entries.

        Text and bytes are hashed with a secret of the process, and 0, 1, 2, ... never meet each
        other; any other key may be compared with all such keys before it.
        """
        self._budget.claim(_ITEM)
        if isinstance(key, str | bytes) or (type(key) is int and key == position):
            return key
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
        return key


def _is_cheap(key: Any) -> bool:
    if isinstance(key, int):
        return key.bit_length() <= _MAX_BITS
    return key is None or isinstance(key, float | str | bytes | Global)
