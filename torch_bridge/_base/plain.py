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
    return copy.of_dict(entries, "", 0), copy.lacking


class _Copy:
    """One copy: of anything that the entries hold twice, too."""

    def __init__(self) -> None:
        self.lacking: list[str] = []
        self._made: dict[int, Any] = {}
        self._refused: set[int] = set()

    def of_dict(self, entries: Mapping[Any, Any], name: str, depth: int) -> dict[Any, Any]:
        # A scheduler asks its Counter of milestones for what a dictionary does not have.
        made = self._made[id(entries)] = Counter() if type(entries) is Counter else {}
        for key, value in entries.items():
            inner = f"{name}.{key!s:.40}".removeprefix(".")
            try:
                made[self._of_key(key)] = self._of(value, inner, depth + 1)
            except _NotPlain:
                self.lacking.append(inner)
        return made

    def _of(self, value: Any, name: str, depth: int) -> Any:
        value = _scalar(value)
        if type(value) in _SCALARS or is_tensor(value) or _is_of_torch(value):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if id(value) in self._refused or depth > _DEEPEST:
            raise _NotPlain
        try:
            return self._of_container(value, name, depth)
        except _NotPlain:
            self._made.pop(id(value), None)
            self._refused.add(id(value))
            raise

    def _of_container(self, value: Any, name: str, depth: int) -> Any:
        made: Any
        if isinstance(value, np.ndarray):
            made = _tensor(value)
        elif isinstance(value, dict):
            return self.of_dict(value, name, depth)
        elif type(value) is list:
            made = self._made[id(value)] = []  # which may hold itself
            made.extend(self._of(entry, name, depth + 1) for entry in value)
        elif type(value) in (tuple, set):
            made = type(value)([self._of(entry, name, depth + 1) for entry in value])
        else:
            raise _NotPlain
        self._made[id(value)] = made
        return made

    def _of_key(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(map(self._of_key, key))
        key = _scalar(key)
        if type(key) not in _SCALARS:
            raise _NotPlain
        return key


def _scalar(value: Any) -> Any:
    """NumPy's numbers as Python's, and text of another type (``torch.__version__``) as text."""
    if isinstance(value, np.generic):
        value = value.item()
    return str.__str__(value) if isinstance(value, str) else value


def _is_of_torch(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in _OF_TORCH


def _tensor(array: np.ndarray) -> Any:
    try:
        return to_tensor(array)
    except TypeError as error:  # a dtype that torch does not have
        raise _NotPlain from error
