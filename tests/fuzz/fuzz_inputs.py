"""Files that torch could nearly have written, by classes of damage, for the fuzzer."""

import collections
import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
import torch

import torch_bridge
from tests.fuzz.unpickler_inputs import (
    BODIES,
    Dice,
    any_value,
    named,
    unpickler_input,
)
from tests.helpers import torch_files as files

Change: TypeAlias = Callable[[Dice, list[bytes]], list[bytes]]


def documents():
    adam = torch.optim.Adam([torch.ones(3, requires_grad=True)]).state_dict()
    state = files.hook_state()
    slots = {name: value for name, value in state.__getstate__().items() if name != "rng"}
    return [
        files.documented(),
        {"state_dict": files.model().state_dict()},
        files.own_format(powersgd=None, errors=[{}], layout=None, extra={"epoch": 3}),
        {"comm_hook_state": state, "optimizer": adam},
        {"comm_hook_state": slots, "state_dict": {"w": torch.ones(100)}},
    ]


class Good(NamedTuple):
    """A good file: the opcodes of its pickle, arguments included, and what is beside it."""

    opcodes: list[bytes]
    data: dict[str, bytes]

    @classmethod
    def of(cls, document, protocol):
        raw = files.saved(document, pickle_protocol=protocol)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        pickled = entries["data.pkl"]
        starts = [position for _, _, position in pickletools.genops(pickled)]
        ops = [pickled[a:b] for a, b in zip(starts, [*starts[1:], len(pickled)], strict=True)]
        return cls(ops, {name: raw for name, raw in entries.items() if name.startswith("data/")})

    def changed(self, dice, change):
        """Makes the same around another pickle, so that reading goes on behind it."""
        pickled = b"".join(change(dice, self.opcodes))
        return files.archive(pickled, self.data, dice.choice(files.METHODS))


def _bytes(dice, given):
    raw = bytearray(given)
    for _ in range(dice.randrange(1, 6)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


def _swapped(dice, ops):
    one, other = (dice.randrange(1, len(ops) - 1) for _ in range(2))
    return [ops[{one: other, other: one}.get(k, k)] for k in range(len(ops))]


def _spliced(dice, ops, cut, times, new):
    """Other opcodes, or the same again, in the place of `cut` opcodes."""
    where = dice.randrange(1, len(ops) - 1)
    again = ops[where : where + cut] * dice.choice(times)
    return [*ops[:where], *again, *([any_value(dice)] if new else []), *ops[where + cut :]]


CHANGES = {
    "opcode inserted": lambda dice, ops: _spliced(dice, ops, 0, [0], new=True),
    "opcodes deleted": lambda dice, ops: _spliced(dice, ops, dice.randrange(1, 4), [0], new=False),
    "opcode replaced": lambda dice, ops: _spliced(dice, ops, 1, [0], new=True),
    "opcodes swapped": _swapped,
    "opcodes repeated": lambda dice, ops: _spliced(dice, ops, 3, [2, 50, 3000], new=False),
    "other globals": lambda dice, ops: [
        named(dice) if op[:1] == b"c" and dice.random() < 0.1 else op for op in ops
    ],
    "bytes of a pickle": lambda dice, ops: [_bytes(dice, b"".join(ops))],
}
ODD = [
    None, True, 0, -1, 10**30, float("nan"), float("inf"), "text", "\ud800", b"bytes", (), [], {},
    [[1]], {1: 2, "1": 3}, {"a": {}}, {1, 2}, 2 + 1j, torch.ones(2), torch.ones(()),
    torch.Size([2]), torch.float16, torch.ones(1).expand(1 << 24), torch.ones(2, dtype=torch.int8),
    collections.Counter("ab"), 10**400, "w" * 100_000,
]  # fmt: skip


def _spots(tree):
    """Yields the container and the key of every entry."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        yield tree, key
        if isinstance(value, dict | list):
            yield from _spots(value)


def _odd_entry(dice, document):
    """Makes a document of which one entry is of another kind, or gone, or has another name."""
    changed = jax.tree.map(lambda leaf: leaf, document)  # a hook state cannot be copied deeply
    parent, last = dice.choice(list(_spots(changed)))
    if isinstance(parent, dict) and dice.random() < 0.3:
        parent[dice.choice([1, "1", None, (1, 2), "format", "w"])] = parent.pop(last)
    elif dice.random() < 0.1:
        del parent[last]
    else:
        parent[last] = dice.choice(ODD)
    return files.saved(changed)


def _odd_layout(dice):
    layout = torch_bridge.BucketLayout.from_order(
        [["w", "v"]], {"w": np.zeros(3), "v": np.zeros((2, 4))}
    ).to_json()
    layout = layout.replace('"v"', dice.choice(['"v"', '"v"', r'"\u0077"', r'"\u0076"']))
    text = list(layout)
    for _ in range(dice.randrange(1, 5)):
        text[dice.randrange(len(text))] = dice.choice('[]{}",:0123456789ae-')
    if dice.random() < 0.7:  # JSON still, with another value for a number
        text, numbers = list(layout), [k for k, c in enumerate(layout) if c.isdigit()]
        odd = ["-1", "[]", "null", "true", "2.0", "1e9", "9" * 30, '"1"', "{}", "NaN", "0"]
        text[dice.choice(numbers)] = dice.choice(odd)
    return files.beside(files.text("".join(text)), "layout")


def _odd_directory(dice, good):
    """Other numbers in the headers of a zip file, and entries twice."""
    raw, start = bytearray(good), good.index(b"PK\x01\x02")
    for _ in range(dice.randrange(1, 4)):
        raw[dice.randrange(start, len(raw))] = dice.choice([0, 1, 255, dice.randrange(256)])
    if dice.random() < 0.3:
        raw[start:start] = raw[start : start + dice.randrange(200)] * dice.choice([1, 3000])
    return bytes(raw)


def inputs(seed):
    """Files without end, each with its class."""
    dice, known = Dice(seed), documents()
    zips = [Good.of(document, protocol) for document in known for protocol in (2, 4, 5)]
    good = files.saved(known[0])
    old = files.saved(known[0], _use_new_zipfile_serialization=False)
    plain = [{"a": [1, "b"]}, [2.5, None], "text", 7, {"state_dict": {}}, (1, {2})]
    while True:
        for name, change in CHANGES.items():
            yield name, dice.choice(zips).changed(dice, change)
        for kind in BODIES:
            yield kind, unpickler_input(dice, kind)
        yield "before torch 1.6", _bytes(dice, old)
        yield "bytes of an archive", _bytes(dice, good)
        yield "zip directory", _odd_directory(dice, good)
        yield "cut short", good[: dice.randrange(len(good))]
        yield "layout", _odd_layout(dice)
        yield "entry of another kind", _odd_entry(dice, dice.choice(known))
        pickled = pickle.dumps(dice.choice(plain), dice.randrange(6))
        yield "plain pickle", pickled if dice.random() < 0.3 else files.archive(pickled)
