"""Files that torch itself writes, read here and by ``torch.load``.

    python -m tests.fuzz.legitimate

Each must give equal values, or a refusal that names what it is about. Prints how many there are of
either, and every difference.
"""

import argparse
import collections
import logging
import pathlib
import sys
import tempfile
import warnings

import ml_dtypes
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import torch_bridge
from tests.helpers import torch_files as files

PROTOCOLS = (2, 3, 4, 5)
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
OPTIMIZERS = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
    *("Rprop", "ASGD", "LBFGS", "Adafactor"),
)
# What torch reads and we refuse by name, each with the way out.
REFUSED = {
    "conjugated": "resolve_conj()",
    "negated": "resolve_conj()",
    "sparse": "Save sparse tensors as to_dense()",
    "sparse by rows": "Save sparse tensors as to_dense()",
    "quantized": "Save quantized tensors as dequantize()",
    "nested": "Save nested tensors as their unbind()",
    "without memory": "has no values; leave it out",
    "a class of somebody": "Somebody, which is not on the allow-list",
    "a function": "asks for builtins.len",
    "a global": "asks for torch.nn.modules.linear.Linear",
}


def of_dtype(name):
    """Makes a tensor, a view of another, and one without values."""
    dtype = getattr(torch, name)
    values = torch.arange(6).reshape(2, 3).float().to(dtype)
    twice = torch.cat([values.view(torch.uint8)] * 2).view(dtype)
    return [values, twice[1:3], values[:0]]


def tensors():
    """Tensors of every dtype, layout and kind."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    marked = torch.nn.Parameter(torch.ones(2))
    marked.tensor_parallel = True
    noted = torch.ones(2)
    noted.note = "kept"
    last = torch.channels_last_3d
    found = {f"dtype {name}": of_dtype(name) for name in DTYPES}
    return found | {
        "views": [base[:, 1:, ::2], base.transpose(0, 2), torch.ones(1).expand(5, 4)],
        "shapes": [torch.tensor(3.0), torch.zeros(0, 3), torch.ones((1,) * 64)],
        "channels_last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "channels_last_3d": torch.ones(1, 2, 3, 4, 4).to(memory_format=last),
        "parameters": [weight, torch.nn.Parameter(torch.ones(2), requires_grad=False)],
        "a buffer": torch.nn.Buffer(torch.ones(2)),
        "attributes": [marked, noted],
        "tied": [weight, weight],
        "views of one storage": list(base.unbind()),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "negated": torch.ones(2, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "sparse by rows": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "without memory": torch.ones(2, device="meta"),
    }


class Somebody:
    pass


def values():
    """Makes plain values, as training scripts put them beside a model."""
    deep = [1, "a"]
    for _ in range(97):  # as deep as is read: 100 containers with those around it
        deep = [deep]
    return {
        "numbers": [0, -1, 255, 65_536, 2**31, -(2**31), 2**63, 10**30, 0.5, float("inf"), 1 + 2j],
        "booleans and nothing": [True, False, None],
        "text": ["", "a", "\u00e9", "\U0001f600", "x" * 300, "long " * 50_000, "line\nline"],
        "bytes": [b"", b"\x00\xff", b"x" * 300, bytearray(b"ab")],
        "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [[]], {}, {1: {2: 3}}],
        "sets": [set(), {1, "a"}, frozenset({1, 2})],
        "ordered": collections.OrderedDict(a=1, b=collections.OrderedDict()),
        "counted": collections.Counter("abca"),
        "by default": collections.defaultdict(list, a=[1]),
        "a size": torch.Size([2, 3]),
        "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        "dtypes": [torch.float32, torch.bfloat16, torch.int8, torch.quint8, torch.float8_e5m2],
        "layouts": [torch.strided, torch.sparse_coo],
        "the version": torch.__version__,
        "keys of many kinds": {1: "a", (1, 2): "b", None: "c", False: "d", 0.5: "e", b"x": "f"},
        "numbers as keys": {7 * k: k for k in range(16_384)},  # as many as are read
        "many entries": {f"layers.{k}.weight": k for k in range(20_000)},
        "deep, twice": [deep, deep],
        "shared": [[1, 2]] * 5,
        "a namespace": argparse.Namespace(lr=0.1, name="run"),
        "a path": pathlib.PosixPath("/runs/a"),
        "random state": torch.get_rng_state(),
        "NumPy's numbers": [np.float64(0.5), np.int64(3), np.bool_(True), np.float32(2)],
        "NumPy's arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.ones(2, np.float16)],
        "NumPy in Fortran's order": np.arange(6.0).reshape(2, 3).T,
        "NumPy's random state": np.random.RandomState(4).get_state(),
        "a class of somebody": Somebody(),
        "a function": len,
        "a global": torch.nn.Linear,
        "a storage": torch.ones(3).untyped_storage(),
    }


def optimizers():
    """States of each of torch's optimizers after some steps, of its schedulers and of a scaler."""
    found = {}
    schedulers = torch.optim.lr_scheduler
    for name in OPTIMIZERS:
        model = torch.nn.Linear(4, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step(lambda: loss)  # noqa: B023 (LBFGS calls it at once)
        found[f"optimizer {name}"] = optimizer.state_dict()
    optimizer = torch.optim.AdamW(torch.nn.Linear(4, 3).parameters())
    made = {
        "StepLR": schedulers.StepLR(optimizer, 3),
        "MultiStepLR": schedulers.MultiStepLR(optimizer, [2, 2, 5]),
        "CosineAnnealingLR": schedulers.CosineAnnealingLR(optimizer, 10),
        "LambdaLR": schedulers.LambdaLR(optimizer, lambda _: 1.0),
        "OneCycleLR": schedulers.OneCycleLR(optimizer, 0.1, 10),
        "ReduceLROnPlateau": schedulers.ReduceLROnPlateau(optimizer),
    }
    for name, scheduler in made.items():
        found[f"scheduler {name}"] = scheduler.state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    return found | {"a scaler": scaler.state_dict()}


def modules():
    """Makes state dicts of modules, with their wrappers' names."""
    made = {
        "a network": files.model(),
        "an LSTM": torch.nn.LSTM(4, 5, 2, bidirectional=True),
        "attention": torch.nn.MultiheadAttention(8, 2),
        "a transformer": torch.nn.TransformerEncoderLayer(8, 2, 16),
        "weight norm": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3)),
        "spectral norm": torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 3)),
        "in half precision": torch.nn.Linear(4, 3).half(),
        "an average": torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 3)),
    }
    found = {name: module.state_dict() for name, module in made.items()}
    found["the documented form"] = files.documented()
    found["slots"] = files.slots()
    found["our own"] = files.own_format()
    return found


def corpus(folder):
    """Writes all files, as each protocol and as older and newer writers do; names and paths."""
    written = tensors() | values() | optimizers() | modules()
    for number, (name, value) in enumerate(written.items()):
        for protocol in PROTOCOLS:
            path = folder / f"{number}.{protocol}.pt"
            document = {"state_dict": {"w": torch.ones(2)}, "it": value}
            torch.save(document, path, pickle_protocol=protocol)
            yield f"{name}, protocol {protocol}", path
    for name, value in (("compute_crc32", False), ("storage_alignment", 4096)):
        path = folder / f"{name}.5.pt"
        with torch.utils.serialization.config.patch({f"save.{name}": value}):
            torch.save({"state_dict": {"w": torch.ones(2)}, "it": files.slots()}, path)
        yield f"{name}={value}", path


def plain(value):
    """Returns what `load` gives for a value of torch's, with arrays as bytes; and that as it is."""
    match value:
        case torch.Tensor():
            name = str(value.dtype).removeprefix("torch.")
            raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
            return np.dtype(getattr(ml_dtypes, name, name)), tuple(value.shape), raw.tobytes()
        case np.ndarray():
            return value.dtype, value.shape, value.tobytes()
        case torch.storage.TypedStorage():
            return plain(torch.tensor(value.untyped().tolist(), dtype=torch.uint8))
        case object(raw=np.ndarray() as raw):
            return plain(raw)
        case dict():
            return [(key, plain(entry)) for key, entry in value.items()]
        case list() | tuple():
            return [plain(entry) for entry in value]
        case argparse.Namespace():
            return plain(vars(value))
        case powerSGD_hook.PowerSGDState():
            return plain(value.__getstate__())
        case np.random.RandomState():
            return plain(value.get_state())
        case torch.dtype() | torch.layout() | torch.device() | pathlib.Path():
            return str(value)
        case bytearray():
            return bytes(value)
        case object(name=str() as name):
            return name
    return value


def compare(path):
    """Reads a file in both ways: "equal", "refused here: ..." or a fault."""
    try:
        theirs = torch.load(path, weights_only=False)["it"]  # these files are ours
    except ValueError as error:  # a hook's state, whose process group is not there
        theirs = error
    try:
        ours = torch_bridge.load(path).extra["it"]
    except (torch_bridge.CheckpointMismatch, torch_bridge.UnsafeCheckpoint) as error:
        return f"refused here: {str(error).removeprefix(str(path)):.200}"
    if isinstance(theirs, ValueError):
        return f"read here alone: {theirs!s:.100}"
    if plain(ours) != plain(theirs):
        return f"ANOTHER VALUE: {ours!s:.100} and {theirs!s:.100}"
    return "equal"


def run():
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = {name: compare(path) for name, path in corpus(pathlib.Path(folder))}
    for name, verdict in verdicts.items():
        if verdict != "equal":
            print(f"{name}: {verdict}")
    counts = collections.Counter(verdict.partition(":")[0] for verdict in verdicts.values())
    print(
        f"{counts.total()} files:", ", ".join(f"{count} {what}" for what, count in counts.items())
    )
    return 1 if counts["ANOTHER VALUE"] else 0


if __name__ == "__main__":
    sys.exit(run())
