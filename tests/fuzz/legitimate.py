"""Files that torch itself writes, read here and by ``torch.load(weights_only=True)``.

    python -m tests.fuzz.legitimate

Each must give equal values, or a refusal that names what it is about. Prints how many there are of
either, and every difference.
"""

import argparse
import collections
import functools
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
# What torch wants to be told that it may make, though it is harmless.
SAFE = [
    *(np.dtype, np.ndarray, np._core.multiarray._reconstruct, np._core.multiarray.scalar),
    *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i8", "u4", "?")),
    *(argparse.Namespace, pathlib.PosixPath, collections.defaultdict, set, frozenset, list),
    *(powerSGD_hook.PowerSGDState, powerSGD_hook.powerSGD_hook),
]
# What torch reads and we refuse by name, each with the way out.
REFUSED = {
    *("conjugated", "negated", "sparse", "sparse by rows", "quantized", "nested"),
    *("without memory", "a class of somebody", "a function", "a global"),
}


def tensors():
    """Tensors of every dtype, layout and kind."""
    found = {}
    for name in DTYPES:
        values = torch.arange(6).reshape(2, 3).float().to(getattr(torch, name))
        found[f"dtype {name}"] = values
        found[f"a view of dtype {name}"] = torch.cat([values.view(torch.uint8)] * 2).view(
            getattr(torch, name)
        )[1:3]
        found[f"nothing of dtype {name}"] = values[:0]
    base = torch.arange(24.0).reshape(2, 3, 4)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    marked = torch.nn.Parameter(torch.ones(2))
    marked.tensor_parallel = True
    with_attribute = torch.ones(2)
    with_attribute.note = "kept"
    found.update(
        {
            "a slice": base[:, 1:, ::2],
            "transposed": base.transpose(0, 2),
            "expanded": torch.ones(1).expand(5, 4),
            "scalar": torch.tensor(3.0),
            "no rows": torch.zeros(0, 3),
            "channels_last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "channels_last_3d": torch.ones(1, 2, 3, 4, 4).to(memory_format=torch.channels_last_3d),
            "a parameter": weight,
            "a frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
            "a buffer": torch.nn.Buffer(torch.ones(2)),
            "a parameter with an attribute": marked,
            "a tensor with an attribute": with_attribute,
            "tied": [weight, weight],
            "views of one storage": list(base.unbind()),
            "gradients": torch.ones(2, requires_grad=True),
            "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
            "negated": torch.ones(2, dtype=torch.complex64).conj().imag,
            "sparse": torch.eye(3).to_sparse(),
            "sparse by rows": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "without memory": torch.ones(2, device="meta"),
            "64 axes": torch.ones((1,) * 64),
        }
    )
    return found


def values():
    """Plain values, as training scripts put them beside a model."""
    generator = torch.Generator().manual_seed(3)
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
        "numbers as keys": {7 * k: k for k in range(10_000)},
        "many entries": {f"layers.{k}.weight": k for k in range(20_000)},
        "deep": _deep(60),
        "shared": [[1, 2]] * 5,
        "a namespace": argparse.Namespace(lr=0.1, name="run"),
        "a path": pathlib.PosixPath("/runs/a"),
        "random state": generator.get_state(),
        "NumPy's numbers": [np.float64(0.5), np.int64(3), np.bool_(True), np.float32(2)],
        "NumPy's arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.ones(2, np.float16)],
        "NumPy in Fortran's order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "NumPy's random state": np.random.RandomState(4).get_state(),
        "a class of somebody": _Somebody(),
        "a function": len,
        "a global": torch.nn.Linear,
        "a storage": torch.ones(3).untyped_storage(),
    }


class _Somebody:
    pass


def _deep(times):
    value = [1]
    for _ in range(times):
        value = [value]
    return value


def optimizers():
    """States of each of torch's optimizers and schedulers after some steps."""
    found = {}
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.step(functools.partial(_loss, model, optimizer))
        found[f"optimizer {name}"] = optimizer.state_dict()
        for kind, make in SCHEDULERS.items():
            if name in ("SGD", "AdamW"):
                found[f"scheduler {kind} of {name}"] = make(optimizer).state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    found["a scaler"] = scaler.state_dict()
    return found


def _loss(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
}


def modules():
    """State dicts of modules, with their wrappers' names."""
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


def documents():
    """Everything that is saved, by name."""
    return {**tensors(), **values(), **optimizers(), **modules()}


def _written(path, value, protocol):
    torch.save({"state_dict": {"w": torch.ones(2)}, "it": value}, path, pickle_protocol=protocol)


def corpus(folder):
    """Writes all files; names and paths."""
    for number, (name, value) in enumerate(documents().items()):
        protocols = PROTOCOLS if number % 5 == 0 else (PROTOCOLS[number % 4],)
        for protocol in protocols:
            path = folder / f"{number}.{protocol}.pt"
            _written(path, value, protocol)
            yield f"{name}, protocol {protocol}", path
    path = folder / "odd.5.pt"
    for name, change in WRITERS.items():
        change(lambda: torch.save({"state_dict": {"w": torch.ones(2)}, "it": files.slots()}, path))
        yield name, path


def _without_sums(save):
    torch.serialization.set_crc32_options(False)
    try:
        save()
    finally:
        torch.serialization.set_crc32_options(True)


def _aligned(save):
    config = torch.utils.serialization.config.save
    before, config.storage_alignment = config.storage_alignment, 4096
    try:
        save()
    finally:
        config.storage_alignment = before


WRITERS = {"without checksums": _without_sums, "storages at 4096": _aligned}


def same(ours, theirs):
    """Compares what both have read; types that have no plain form are as `load` documents it."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, np.ndarray) or ours.shape != tuple(theirs.shape):
            return False
        name = str(theirs.dtype).removeprefix("torch.")
        if ours.dtype != np.dtype(getattr(ml_dtypes, name, name)):
            return False
        raw = theirs.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return np.ascontiguousarray(ours).tobytes() == raw
    if isinstance(theirs, np.ndarray):
        return isinstance(ours, np.ndarray) and np.array_equal(ours, theirs)
    if isinstance(theirs, torch.storage.TypedStorage | torch.UntypedStorage):
        return ours.raw.tobytes() == bytes(theirs.untyped().tolist())
    if isinstance(theirs, pathlib.Path):
        return ours == str(theirs)
    if isinstance(theirs, argparse.Namespace):
        theirs = vars(theirs)
    if hasattr(theirs, "__getstate__") and type(theirs).__name__ == "PowerSGDState":
        theirs = theirs.__getstate__()
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or list(ours) != list(theirs):
            return False
        return all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        if not isinstance(ours, list | tuple) or len(ours) != len(theirs):
            return False
        return all(map(same, ours, theirs))
    if isinstance(theirs, np.random.RandomState):
        return same(ours.get_state(), theirs.get_state())
    if isinstance(theirs, torch.dtype | torch.layout | torch.memory_format):
        return str(theirs) in str(ours) or str(theirs) == getattr(ours, "name", None)
    if isinstance(theirs, torch.device):
        return ours == str(theirs)
    if isinstance(theirs, bytearray):
        return ours == bytes(theirs)
    return ours == theirs or repr(ours) == repr(theirs)


def compare(path):
    """Reads a file in both ways: "equal", "refused by both", "refused here: ..." or a fault."""
    try:
        # torch's own safe reading knows protocols 2 and 3 alone; these files are ours.
        safely = path.suffixes[-2] in (".2", ".3")
        with torch.serialization.safe_globals(SAFE):
            theirs = torch.load(path, weights_only=safely)["it"]
    except Exception as error:
        theirs = error
    try:
        ours = torch_bridge.load(path).extra["it"]
    except (torch_bridge.CheckpointMismatch, torch_bridge.UnsafeCheckpoint) as error:
        if isinstance(theirs, Exception):
            return "refused by both"
        return f"refused here: {str(error).removeprefix(str(path)):.200}"
    if isinstance(theirs, Exception):
        return f"read here alone: {theirs!s:.100}"
    return "equal" if same(ours, theirs) else f"ANOTHER VALUE: {ours!s:.100} and {theirs!s:.100}"


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
