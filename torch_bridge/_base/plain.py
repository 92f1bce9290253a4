"""Copies what ``torch.load(weights_only=True)`` reads: tensors, numbers, text, plain containers.

`save_checkpoint` passes everything through it that users add, such as schedulers and arguments. Any
other object would make the whole file unreadable for the safe reader of torch and for that of this
package, and the run that could write it again is over by then. So it is refused by name before the
file is written.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._base.tensors import is_tensor, to_tensor

_SCALARS = (str, bytes, bool, int, float, complex, type(None))
_OF_TORCH = ("dtype", "device", "Size")
_SEARCHED = 8  # levels of entries in `nested`
_LARGEST_KEY = 1 << 31  # in `nested`
_LONG = 40  # characters of a key in `expression`
_DEEPEST = 100  # pickling goes as deep as a tree does
_LEFT_OUT: Any = object()  # stands for a value that such a file cannot hold


def nested(entries: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields every entry of a dictionary and of the dictionaries and lists in it, with its keys.

    It looks eight levels deep, and at keys that are text or small numbers: training scripts write
    no others. Each container is entered once, even if it occurs in several places or holds itself.

    Example:
      >>> list(nested({"amp": {"scales": [2.0]}}))
      [(('amp',), {'scales': [2.0]}), (('amp', 'scales'), [2.0]), (('amp', 'scales', 0), 2.0)]
    """
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), entries)]
    seen = {id(entries)}
    for above, container in waiting:  # which grows meanwhile
        pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, value in pairs:
            # The text of other keys, which a hostile file can choose, may be very long.
            if not isinstance(key, str) and not (type(key) is int and abs(key) < _LARGEST_KEY):
                continue
            keys = (*above, key)
            yield keys, value
            is_container = isinstance(value, Mapping | list | tuple) and len(keys) < _SEARCHED
            if is_container and id(value) not in seen:
                seen.add(id(value))
                waiting.append((keys, value))


def expression(keys: Sequence[Any]) -> str:
    """Returns the Python text that reads an entry of `Checkpoint.extra`; long keys are cut.

    Example:
      >>> expression(("optimizers", 0))
      "checkpoint.extra['optimizers'][0]"
    """
    text = "checkpoint.extra"
    for key in keys:
        if isinstance(key, str):
            key = key[:_LONG]  # before repr, whose cost would be that of the whole key
        text += f"[{key!r}]"
    return text


def plain_copy(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Copies the values that ``torch.load(weights_only=True)`` reads; arrays become tensors.

    An object that occurs twice occurs twice in the copy, too.

    Returns:
      The copy, and the names of the entries that were left out, such as ``args.callback``. A
      dictionary loses single entries; a list, a tuple or a set is copied whole or left out.
    """
    made = {}  # id of a value -> its copy
    lacking = []

    def copy(value: Any, name: str, depth: int) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, str):  # ``torch.__version__`` is a subclass of str
            value = str.__str__(value)
        kind = type(value)
        of_torch = kind.__module__ == "torch" and kind.__name__ in _OF_TORCH
        if kind in _SCALARS or of_torch or is_tensor(value):
            return value
        if id(value) in made:
            return made[id(value)]
        made[id(value)] = _LEFT_OUT  # if the value holds itself
        if depth == _DEEPEST:
            return _LEFT_OUT
        result = _LEFT_OUT
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError):  # a dtype that torch does not have
                result = to_tensor(value)
        elif kind in (list, tuple, set):
            parts = [copy(part, name, depth + 1) for part in value]
            if not any(part is _LEFT_OUT for part in parts):
                result = kind(parts)
        elif isinstance(value, dict):
            # A scheduler needs its Counter of milestones: it asks for keys that are missing.
            result = Counter() if kind is Counter else {}
            for key, part in value.items():
                inner = f"{name}.{key!s:.40}".removeprefix(".")
                plain_key = copy(key, inner, depth + 1)
                plain_part = copy(part, inner, depth + 1)
                if plain_key is _LEFT_OUT or plain_part is _LEFT_OUT:
                    lacking.append(inner)
                else:
                    result[plain_key] = plain_part
        made[id(value)] = result
        return result

    return copy(dict(entries), "", 0), lacking
