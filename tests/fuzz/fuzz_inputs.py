"""Files that torch could nearly have written, by classes of damage, for the fuzzer."""

import collections
import io
import itertools
import pickle
import pickletools
import zipfile

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


def documents():
    adam = torch.optim.Adam([torch.ones(3, requires_grad=True)]).state_dict()
    state = files.hook_state()
    slots = {name: value for name, value in state.__getstate__().items() if name != "rng"}
    calls = {"names": ["w"], "extremes": torch.zeros(1, 8)}
    example = {"inputs": [torch.ones(2, 3)], "outputs": torch.ones(2), "calls": calls}
    return [
        files.documented(),
        files.own_format(powersgd=None, errors=[{}], layout=None, example=example),
        {"state_dict": files.model().state_dict()},
        files.own_format(powersgd=None, errors=[{}], layout=None, extra={"epoch": 3}),
        {"comm_hook_state": state, "optimizer": adam},
        {"comm_hook_state": slots, "state_dict": {"w": torch.ones(100)}},
    ]


def taken_apart(document, protocol):
    """Returns the opcodes of a file's pickle, arguments included, and what is beside it."""
    raw = files.saved(document, pickle_protocol=protocol)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    pickled = entries["data.pkl"]
    starts = [position for _, _, position in pickletools.genops(pickled)]
    opcodes = [pickled[a:b] for a, b in itertools.pairwise([*starts, len(pickled)])]
    return opcodes, {name: raw for name, raw in entries.items() if name.startswith("data/")}


def changed(dice, opcodes, kind):
    """Changes a pickle, so that reading goes on behind the change."""
    ops = list(opcodes)
    where, other = (dice.randrange(1, len(ops) - 1) for _ in range(2))
    match kind:
        case "opcode inserted":
            ops.insert(where, any_value(dice))
        case "opcode replaced":
            ops[where] = any_value(dice)
        case "opcodes deleted":
            del ops[where : where + dice.randrange(1, 4)]
        case "opcodes swapped":
            ops[where], ops[other] = ops[other], ops[where]
        case "opcodes repeated":
            ops[where : where + 3] *= dice.choice([2, 50, 3000])
        case "other globals":
            for index, op in enumerate(ops):
                if op[:1] == b"c" and dice.random() < 0.1:
                    ops[index] = named(dice)
        case "bytes of a pickle":
            return _bytes(dice, b"".join(ops))
    return b"".join(ops)


CHANGES = (
    *("opcode inserted", "opcodes deleted", "opcode replaced", "opcodes swapped"),
    *("opcodes repeated", "other globals", "bytes of a pickle"),
)


def _bytes(dice, given):
    raw = bytearray(given)
    for _ in range(dice.randrange(1, 6)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


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
    model = {"w": np.zeros(3), "v": np.zeros((2, 4))}
    layout = torch_bridge.BucketLayout.from_order([["w", "v"]], model).to_json()
    layout = layout.replace('"v"', dice.choice(['"v"', '"v"', r'"\u0077"', r'"\u0076"']))
    text = list(layout)
    for _ in range(dice.randrange(1, 5)):
        text[dice.randrange(len(text))] = dice.choice('[]{}",:0123456789ae-')
    if dice.random() < 0.7:  # JSON still, with another value for a number
        text = list(layout)
        numbers = [k for k, c in enumerate(layout) if c.isdigit()]
        odd = ["-1", "[]", "null", "true", "2.0", "1e9", "9" * 30, '"1"', "{}", "NaN", "0"]
        text[dice.choice(numbers)] = dice.choice(odd)
    return files.beside(files.text("".join(text)), "layout")


def _odd_directory(dice, good):
    """Changes numbers in the headers of a zip file, and repeats entries."""
    raw = bytearray(good)
    start = good.index(b"PK\x01\x02")
    for _ in range(dice.randrange(1, 4)):
        raw[dice.randrange(start, len(raw))] = dice.choice([0, 1, 255, dice.randrange(256)])
    if dice.random() < 0.3:
        raw[start:start] = raw[start : start + dice.randrange(200)] * dice.choice([1, 3000])
    return bytes(raw)


def inputs(seed):
    """Files without end, each with its class."""
    dice = Dice(seed)
    known = documents()
    zips = list(itertools.starmap(taken_apart, itertools.product(known, (2, 4, 5))))
    good = files.saved(known[0])
    old = files.saved(known[0], _use_new_zipfile_serialization=False)
    plain = [{"a": [1, "b"]}, [2.5, None], "text", 7, {"state_dict": {}}, (1, {2})]
    while True:
        for kind in CHANGES:
            opcodes, data = dice.choice(zips)
            pickled = changed(dice, opcodes, kind)
            yield kind, files.archive(pickled, data, dice.choice(files.METHODS))
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
