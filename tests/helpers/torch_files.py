"""Torch files for the tests of the reader: files that torch wrote, and pickles from opcodes."""

import io
import pickletools
import re
import struct
import zipfile

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

HOOK = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def hook_state(rank=2, buckets=1):
    generator = torch.Generator().manual_seed(3)
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=10)
    for bucket in range(buckets):
        state.error_dict[bucket] = torch.randn(100, generator=generator)
        state.p_memory_dict[bucket] = torch.randn(16, generator=generator)
        state.q_memory_dict[bucket] = torch.randn(8, generator=generator)
    state.iter = 12
    return state


def slots(**changes):
    """Returns the slots of a ``PowerSGDState``; with `changes` only the required ones and these."""
    if not changes:
        return hook_state().__getstate__()
    base = {"matrix_approximation_rank": 1, "iter": 3}
    return base | {f"{kind}_dict": {} for kind in ("error", "p_memory", "q_memory")} | changes


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 4)
    )


def documented(prefix="module."):
    return {
        "state_dict": {prefix + name: value for name, value in model().state_dict().items()},
        "comm_hook": powerSGD_hook.powerSGD_hook,
        "comm_hook_state": hook_state(),
        "epoch": 3,
    }


def own_format(**changes):
    """Makes a document in the format of `save_checkpoint`, for two ranks."""
    hook = {name: value for name, value in slots(iter=3).items() if name != "error_dict"}
    return {
        "format": "torch_bridge.checkpoint",
        "version": 1,
        "world_size": 2,
        "state_dict": {"w": torch.zeros(3)},
        "powersgd": hook,
        "errors": [{0: torch.zeros(3)}] * 2,
    } | changes


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def archive(data_pkl, entries=(), compression=zipfile.ZIP_STORED):
    """Makes a zip archive with torch's layout around a pickle."""
    entries = {"data.pkl": data_pkl, "byteorder": b"little", **dict(entries), "version": b"3\n"}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


# --- pickles ----------------------------------------------------------------------------------


def glob(module, name):
    return f"c{module}\n{name}\n".encode()


def stack_glob(module, name):
    return text(module) + text(name) + b"\x93"


def text(value):
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value):
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def get(index):
    return b"h" + bytes([index])


def tup(*parts):
    return b"(" + b"".join(parts) + b"t"


def call(function, *args):
    return function + tup(*args) + b"R"


def sized(opcode, raw):
    """Returns an opcode with its argument, whose length stands before it in four bytes."""
    return OPCODES[opcode] + struct.pack("<I", len(raw)) + raw


def assemble(program, **parts):
    """Makes the body of a pickle from the opcodes' names in `pickletools` and from values.

    ``module:name`` is a global, ``'a'`` text, ``7`` a number and ``0xff`` one byte. ``GET3`` reads
    position 3 of the memo, and ``(NONE POP) * 9`` repeats two opcodes nine times. All other words
    are names in `PARTS` or `parts`.
    """
    parts = PARTS | parts
    body = []
    for again, times, quoted, word in WORDS.findall(program):
        if times:
            body.append(assemble(again, **parts) * int(times))
        elif not word:
            body.append(text(quoted))
        elif word in OPCODES:
            body.append(OPCODES[word])
        elif word in parts:
            body.append(parts[word])
        elif ":" in word:
            body.append(glob(*word.split(":")))
        elif word.startswith("0x"):
            body.append(bytes.fromhex(word[2:]))
        elif word.startswith("GET"):
            body.append(get(int(word[3:])))
        else:
            body.append(integer(int(word)))
    return b"".join(body)


def whole(body, protocol=2):
    return b"\x80" + bytes([protocol]) + body + b"."


def storage(key="0", numel=6, kind=("torch", "FloatStorage")):
    return tup(text("storage"), glob(*kind), text(key), text("cpu"), integer(numel)) + b"Q"


OPCODES = {opcode.name: opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
WORDS = re.compile(r"\(([^()]*)\) \* (\d+)|'([^']*)'|(\S+)")
STORAGES = {"data/0": bytes(24), "data/1": bytes(24)}
EMPTY = call(glob("collections", "OrderedDict"))


def tensor_call(source=None, offset=0, size=(2, 3), stride=(3, 1), hooks=EMPTY):
    sizes = tup(*map(integer, size))
    strides = tup(*map(integer, stride))
    function = glob("torch._utils", "_rebuild_tensor_v2")
    return call(function, source or storage(), integer(offset), sizes, strides, b"\x89", hooks)


PARTS = {
    "KEEP": b"\x940",  # moves the top of the stack into the memo
    "tensor": tensor_call(),
    "storage": storage(),
    "rebuild": glob("torch._utils", "_rebuild_tensor_v2"),
    "generator": glob("numpy.random._pickle", "__randomstate_ctor"),
}


MODEL = "EMPTY_DICT 'state_dict' EMPTY_DICT 'w' tensor SETITEM SETITEM"


def pickle_of_tensor(**options):
    return whole(assemble(MODEL, tensor=tensor_call(**options)))


def beside(body, name="extra", protocol=4, compression=zipfile.ZIP_STORED):
    """Makes a file with one tensor and with `body` as a second entry."""
    document = assemble(f"{MODEL} '{name}' body SETITEM", body=body)
    return archive(whole(document, protocol), STORAGES, compression)
