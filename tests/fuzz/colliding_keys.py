"""Files with keys that have one hash, are equal, or become equal, for the fuzzer."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import torch_files as files

# Keys of one hash, equal ones, and text that is equal once it is escaped, unescaped or unwrapped.
HASHES: list[Callable[[int], Any]] = [
    lambda k: 7 + k % 8 * (2**61 - 1),
    lambda k: k << 40,
    lambda k: tuple(-1 - (k >> place & 1) for place in range(8)),
    lambda k: (k, -1 - k % 2),
    lambda k: (1, 1.0, True, -1, -2, -1.0)[k % 6],
    lambda k: ("w", "\\x77", "\\u0077", "_orig_mod.w", "module.w", "w\0", "w\u200b")[k % 7],
    lambda k: (1, "1", "\ud800", "\\ud800", "\x1b", "\\x1b", b"1")[k % 7],
]


def _key(value: Any) -> bytes:
    """Without the memo, which would make equal keys one."""
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_key, value)) + b"t"
    return files.text(value) if isinstance(value, str) else pickle.dumps(value, 4)[2:-1]


def colliding_keys(dice: random.Random) -> bytes:
    """Dictionaries and sets whose keys meet each other, in place of one entry."""
    count = dice.choice([2, 2, 7, 7, 40, 300, 300, 5_000, 5_000, 17_000])
    makers = dice.sample(HASHES, dice.choice([1, 1, 2]))
    keys = [_key(dice.choice(makers)(k)) for k in range(count)]
    keys = keys[: 300_000 // len(keys[0])]
    value = dice.choice([b"N", files.tensor_call(), files.text("w")]) if count < 1_000 else b"N"
    mapping = b"}(" + b"".join(key + value for key in keys) + b"u"
    listed = b"(" + b"".join(keys)
    choices = [
        ("state_dict", mapping),
        ("extra", mapping),
        ("optimizer", files.dictionary(state=mapping)),
        ("extra", files.call(files.glob("builtins", "set"), listed + b"t")),
        ("extra", files.call(files.glob("collections", "OrderedDict"), mapping)),
        ("extra", b"\x8f" + listed + b"\x90"),
    ]
    name, body = dice.choice(choices)
    return files.beside(body, name)
