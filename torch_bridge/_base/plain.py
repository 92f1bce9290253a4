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
_LEFT_OUT = object()  # in the place of a value that such a file cannot hold


def plain_copy(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Copies what such a file can hold, arrays as tensors; what is shared stays shared.

    Returns:
      The copy, and the names of what it lacks, as ``args.callback``. Dictionaries lack single
      entries; lists, tuples and sets are there as a whole or not at all.
    """
    made = {}  # of anything that the entries hold twice, too
    lacking = []

    def copy(value: Any, name: str, depth: int) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, str):  # ``torch.__version__`` is of a class of its own
            value = str.__str__(value)
        kind = type(value)
        of_torch = kind.__module__ == "torch" and kind.__name__ in _OF_TORCH
        if kind in _SCALARS or of_torch or is_tensor(value):
            return value
        if id(value) not in made:
            made[id(value)] = _LEFT_OUT  # where it holds itself
            if depth < _DEEPEST:
                made[id(value)] = copy_of_parts(value, name, depth + 1)
        return made[id(value)]

    def copy_of_parts(value: Any, name: str, depth: int) -> Any:
        if isinstance(value, np.ndarray):
            try:
                return to_tensor(value)
            except TypeError:  # a dtype that torch does not have
                return _LEFT_OUT
        if type(value) in (list, tuple, set):
            parts = [copy(part, name, depth) for part in value]
            lacks = any(part is _LEFT_OUT for part in parts)
            return _LEFT_OUT if lacks else type(value)(parts)
        if not isinstance(value, dict):
            return _LEFT_OUT
        # A scheduler asks its Counter of milestones for what a dictionary does not have.
        kept: dict[Any, Any] = Counter() if type(value) is Counter else {}
        for key, part in value.items():
            inner = f"{name}.{key!s:.40}".removeprefix(".")
            plain_key = copy(key, inner, depth)
            plain_part = copy(part, inner, depth)
            if plain_key is _LEFT_OUT or plain_part is _LEFT_OUT:
                lacking.append(inner)
            else:
                kept[plain_key] = plain_part
        return kept

    return copy(dict(entries), "", 0), lacking
