"""What a pickle can become here: tokens, unfinished objects, keys that hash cheaply, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

# Hashing a key costs time in proportion to its size, every time, and integers of more than 61 bits
# can be chosen to collide; in a tuple, where the choices multiply, floats can, too.
_MAX_KEY_BITS = 64
_MAX_PART_BITS = 60
_MAX_KEY_LENGTH = 1 << 16
_MAX_KEY_PARTS = 8
# Python hashes numbers, and tuples of them, the same in every process: keys of any size can be
# chosen so that each one meets all before it. These many comparisons, of 16 384 numbers with each
# other, take half a second; those of tuples take longer.
_MAX_COMPARISONS, _TUPLE_COMPARISON = 1 << 27, 16


class Malformed(Exception):
    """The stream is damaged, or is no checkpoint of torch's; the message says what was expected.

    Attributes:
      parameters: Names of the arguments with which the caller can decide otherwise.
    """

    def __init__(self, message: str, parameters: tuple[str, ...] = ()) -> None:
        self.parameters = parameters
        super().__init__(message)


class Forbidden(Exception):
    """The stream asks for a global that is not on the allow-list.

    Attributes:
      name: That global, ``module.name``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


@dataclasses.dataclass(frozen=True)
class Global:
    """A global the file names, never imported: only its name."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Pending:
    """An object between its creation and its BUILD, which turns it into a value.

    Args:
      what: Its kind, for messages.
      build: State from the file -> the finished value.
      value: What it counts as when the file never builds it.
    """

    __slots__ = ("build", "memo_keys", "value", "what")

    def __init__(self, what: str, build: Callable[[Any], Any], value: Any = None) -> None:
        self.what = what
        self.build = build
        self.value = value
        self.memo_keys: list[int] = []


def settle(value: Any) -> Any:
    """The value of an object that the file left unbuilt; any other value as it is."""
    return value.value if isinstance(value, Pending) else value


class Keys:
    """Checks the keys of one file, and counts what those cost whose hashes the file can choose.

    Text and bytes are hashed with a secret of the process; 0, 1, 2, ... never meet each other. Any
    other key may be compared with all such keys of its dictionary or set.
    """

    def __init__(self) -> None:
        self._chosen = self._comparisons = 0

    def checked(self, key: Any, position: int) -> Any:
        """`key`, which may join a dictionary or set that has `position` entries.

        Raises:
          Malformed: Hashing it may not end, or such keys may take too long.
        """
        key = plain_key(key)
        if isinstance(key, str | bytes) or (type(key) is int and key == position):
            return key
        weight = _TUPLE_COMPARISON if isinstance(key, tuple) else 1
        self._comparisons += weight * min(position, self._chosen)
        self._chosen += 1
        if self._comparisons > _MAX_COMPARISONS:
            raise Malformed(
                "a dictionary or set of more than 16384 numbers as keys, or 4096 tuples, other "
                "than 0, 1, 2, ... in order: such keys can be chosen so that reading them takes "
                "hours. If you trust the file, read it with torch.load and save it with text as "
                "keys (str(key)) or with the keys in a tensor"
            )
        return key

    def fill_dict(self, target: dict, pairs: Iterable[Any]) -> dict:
        """`target`, with the (key, value) of `pairs`."""
        for key, value in pairs:
            target[self.checked(key, len(target))] = value
        return target

    def fill_set(self, target: set, values: Iterable[Any]) -> set:
        """`target`, with `values`."""
        for value in values:
            target.add(self.checked(value, len(target)))
        return target


def plain_key(key: Any) -> Any:
    """Check that `key` may key a dictionary: hashing it must be cheap and end."""
    if isinstance(key, tuple) and len(key) <= _MAX_KEY_PARTS:
        parts = tuple(map(_plain_part, key))
        if any(
            isinstance(part, float)
            or (isinstance(part, int) and part.bit_length() > _MAX_PART_BITS)
            for part in parts
        ):
            raise Malformed("a tuple of floats or large integers as a dictionary key")
        return parts
    return _plain_part(key)


def _plain_part(key: Any) -> Any:
    if key is None or isinstance(key, float | Global):
        return key
    if isinstance(key, str | bytes) and len(key) <= _MAX_KEY_LENGTH:
        return key
    if isinstance(key, int) and key.bit_length() <= _MAX_KEY_BITS:
        return key
    raise Malformed(f"a {type(key).__name__} as a dictionary key that is too large or none at all")


def brief(value: Any) -> str:
    """`value` for a message; not that of a container, whose ``repr`` need not end."""
    if isinstance(value, str):
        return f"{value:.40}"
    small = isinstance(value, int) and value.bit_length() <= _MAX_KEY_BITS
    return str(value) if small else f"a {type(value).__name__}"
