"""What ``torch.load(weights_only=True)`` reads: tensors, numbers and text, in plain containers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_bridge._base.tensors import is_tensor, to_tensor

_SCALARS = (str, bytes, bool, int, float, complex, type(None))
_OF_TORCH = ("dtype", "device", "Size")
_DEEPEST = 100  # pickling goes as deep as a tree does


class _NotPlain(Exception):
    """A value that such a file cannot hold."""


def plain_copy(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy that such a file can hold, arrays as tensors; what is shared stays shared.

    Returns:
      The copy, and the names of what it lacks, as ``args.callback``. Dictionaries lack single
      entries; lists, tuples and sets are there as a whole or not at all.
    """
    copy = _Copy()
    return copy.of(dict(entries), "", 0), copy.lacking


class _Copy:
    """One copy: of anything that the entries hold twice, too."""

    def __init__(self) -> None:
        self.lacking: list[str] = []
        self._made: dict[int, Any] = {}
        self._refused: set[int] = set()

    def of(self, value: Any, name: str, depth: int) -> Any:
        value = _scalar(value)
        if type(value) in _SCALARS or is_tensor(value) or _is_of_torch(value):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if id(value) in self._refused or depth > _DEEPEST:
            raise _NotPlain
        try:
            self._make(value, name, depth + 1)
        except (_NotPlain, TypeError) as error:  # or a dtype that torch does not have
            self._made.pop(id(value), None)
            self._refused.add(id(value))
            raise _NotPlain from error
        return self._made[id(value)]

    def _make(self, value: Any, name: str, depth: int) -> None:
        made: Any
        if isinstance(value, np.ndarray):
            self._made[id(value)] = to_tensor(value)
        elif isinstance(value, dict):
            # A scheduler asks its Counter of milestones for what a dictionary does not have.
            made = self._made[id(value)] = Counter() if type(value) is Counter else {}
            for key, part in value.items():
                inner = f"{name}.{key!s:.40}".removeprefix(".")
                try:
                    made[_key(key)] = self.of(part, inner, depth)
                except _NotPlain:
                    self.lacking.append(inner)
        elif type(value) is list:
            made = self._made[id(value)] = []  # which may hold itself
            made.extend(self.of(part, name, depth) for part in value)
        elif type(value) in (tuple, set):
            self._made[id(value)] = type(value)([self.of(part, name, depth) for part in value])
        else:
            raise _NotPlain


def _key(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    key = _scalar(key)
    if type(key) not in _SCALARS:
        raise _NotPlain
    return key


def _scalar(value: Any) -> Any:
    """NumPy's numbers as Python's, and text of another type (``torch.__version__``) as text."""
    value = value.item() if isinstance(value, np.generic) else value
    return str.__str__(value) if isinstance(value, str) else value


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in _OF_TORCH
