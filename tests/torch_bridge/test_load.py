"""Reading torch files: everything torch writes, nothing that would run, errors with a name."""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import resource
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
import torch_files as files
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_bridge import CheckpointMismatch, UnsafeCheckpoint, load

pytestmark = pytest.mark.torch

# What a file would do if it could: none of these events may happen while one is read.
FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.remove",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
    "exec",
    "compile",
    "import",
)
_WATCH: list[list[str]] = []


def _audit(event: str, args: tuple) -> None:
    if _WATCH and event in FORBIDDEN_EVENTS:
        _WATCH[-1].append(f"{event} {args}")


sys.addaudithook(_audit)


@pytest.fixture
def put(tmp_path):
    def write(raw: bytes, name: str = "file.pt") -> pathlib.Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


def same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pickle_protocol": 3},
        {"pickle_protocol": 4},
        {"pickle_protocol": 5},
    ],
    ids=["zip", "protocol 3", "protocol 4", "protocol 5"],
)
def test_documented_form(put, options):
    document = files.documented()
    checkpoint = load(put(files.saved(document, **options)))
    assert list(checkpoint.model) == list(files.model().state_dict())
    for name, tensor in files.model().state_dict().items():
        same(checkpoint.model[name], tensor.numpy())
    (record,) = checkpoint.powersgd
    state = document["comm_hook_state"]
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        same(getattr(record, name)[0], getattr(state, name)[0].numpy())
    for name in (*record.hyperparameters, "iter", "next_stats_report"):
        assert getattr(record, name) == getattr(state, name)
    assert record.rng.rebuild().randint(10**9) == state.rng.randint(10**9)
    assert checkpoint.extra["epoch"] == 3
    assert checkpoint.missing_ranks


def test_object_getstate_and_state_dict(put):
    state = files.hook_state()
    for raw in (files.saved(state), files.saved(state.__getstate__())):
        checkpoint = load(put(raw))
        assert not checkpoint.model
        assert checkpoint.powersgd[0].iter == 12
    checkpoint = load(put(files.saved(files.model().state_dict())))
    assert not checkpoint.powersgd
    assert len(checkpoint.model) == 9


def test_slots_of_older_releases(put):
    old = {name: value for name, value in files.slots().items() if name in (
        "matrix_approximation_rank", "iter", "error_dict", "p_memory_dict", "q_memory_dict",
        "use_error_feedback", "warm_start", "rng", "start_powerSGD_iter",
    )}  # fmt: skip
    record = load(put(files.saved(old))).powersgd[0]
    assert record.min_compression_rate == 2.0
    assert record.batch_tensors_with_same_shape is False


def test_what_people_put_beside_it(put):
    extra = {
        "args": argparse.Namespace(lr=0.1, out=pathlib.Path("/runs/a")),
        "best": np.float64(0.5),
        "history": np.arange(6).reshape(2, 3),
        "milestones": collections.Counter([3, 3, 5]),
        "rng": torch.get_rng_state(),
        "numpy_rng": np.random.RandomState(4).get_state(),
        "device": torch.device("cuda", 1),
        "dtype": torch.float32,
        "size": torch.Size([2, 3]),
        "nested": collections.defaultdict(list, {"a": [1, (2, None)], "b": {True, 1.5}}),
        "bytes": b"\x00\xff",
    }
    got = load(put(files.saved({**files.documented(), **extra}))).extra
    assert got["args"] == {"lr": 0.1, "out": "/runs/a"}
    assert got["best"] == 0.5
    same(got["history"], extra["history"])
    assert got["milestones"] == {3: 2, 5: 1}
    same(got["rng"], extra["rng"].numpy())
    same(got["numpy_rng"][1], extra["numpy_rng"][1])
    assert got["device"] == "cuda:1"
    assert got["size"] == (2, 3)
    assert got["nested"] == {"a": [1, (2, None)], "b": {True, 1.5}}
    assert got["bytes"] == b"\x00\xff"


DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "complex64": np.complex64,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "bool": np.bool_,
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(put, name):
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    array = load(put(files.saved({"w": tensor}))).model["w"]
    assert array.dtype == DTYPES[name]
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3).astype(DTYPES[name]))


def test_strides_views_and_ties(put):
    base = torch.arange(24.0).reshape(2, 3, 4)
    conv = torch.arange(72.0).reshape(2, 3, 3, 4).to(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    model = {
        "view": base[:, 1:, ::2],
        "transposed": base.transpose(0, 2),
        "expanded": torch.ones(1).expand(5, 4),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
        "conv": conv,
        "embed.weight": weight,
        "head.weight": weight,
    }
    checkpoint = load(put(files.saved(model)))
    for name, tensor in model.items():
        same(checkpoint.model[name], tensor.detach().numpy())
    assert checkpoint.model["conv"].strides == tuple(4 * s for s in conv.stride())
    assert checkpoint.aliases == {"head.weight": "embed.weight"}


def test_wrapper_prefixes(put):
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        assert "0.weight" in load(put(files.saved(files.documented(prefix)))).model
    model = {"module.a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    assert list(load(put(files.saved(model))).model) == list(model)


def test_cuda_storages_need_no_gpu(put):
    raw = files.saved({"w": torch.ones(2, 3)})
    pkl = files.pickle_of_tensor(source=files.storage().replace(b"cpu", b"cud"))
    legacy_type = files.storage(kind=("torch.cuda", "FloatStorage"))
    for data in (pkl, files.pickle_of_tensor(source=legacy_type)):
        array = load(put(files.archive(data, {"data/0": np.ones(6, "<f4").tobytes()}))).model["w"]
        same(array, load(put(raw)).model["w"])


def test_a_big_endian_machines_file_is_named(put):
    buffer = files.io.BytesIO()
    with files.zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a/data.pkl", files.pickle_of_tensor())
        file.writestr("a/byteorder", b"big")
        file.writestr("a/data/0", np.arange(6, dtype=">f4").tobytes())
    with pytest.raises(CheckpointMismatch, match="big-endian"):
        load(put(buffer.getvalue()))


def test_the_format_before_torch_1_6_is_named_with_the_way_out(put):
    raw = files.saved(files.documented(), _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointMismatch, match=r"as torch wrote before 1\.6; read it with"):
        load(put(raw))


OTHER_TENSORS = {
    "to_dense": lambda: torch.eye(3).to_sparse(),
    "dequantize": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "unbind": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quant:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quant:UserWarning")
@pytest.mark.parametrize("advice", OTHER_TENSORS)
def test_other_kinds_of_tensors_are_named_with_the_way_out(put, advice):
    with pytest.raises(UnsafeCheckpoint, match=f"asks for torch._utils._rebuild_.*{advice}"):
        load(put(files.saved({"w": OTHER_TENSORS[advice]()})))


def test_a_dtensor_is_named_with_the_way_out(put):
    body = files.call(files.glob("torch._utils", "_rebuild_wrapper_subclass"))
    with pytest.raises(UnsafeCheckpoint, match="full_tensor"):
        load(put(files.archive(files.whole(files.dictionary(w=body)))))


def test_reading_imports_no_torch_and_no_process_group(put):
    path = put(files.saved(files.documented()))
    code = (
        "import sys; from torch_bridge import load; c = load(sys.argv[1]); "
        "print(c.powersgd[0].iter, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["12", "False"], done.stderr


# --- several ranks ----------------------------------------------------------------------------


def test_one_file_per_rank(put):
    document = files.documented()
    paths = []
    for rank in range(3):
        document["comm_hook_state"].error_dict[0] = torch.full((100,), float(rank))
        paths.append(put(files.saved(document), f"rank{rank}.pt"))
    seen = []
    checkpoint = load(paths, progress=lambda done, total: seen.append((done, total)))
    assert [r.error_dict[0][0] for r in checkpoint.powersgd] == [0, 1, 2]
    assert checkpoint.world_size == 3
    assert not checkpoint.missing_ranks
    assert seen == sorted(seen)
    assert seen[-1][1] == sum(path.stat().st_size for path in paths)


def test_files_of_different_runs_are_refused_together(put):
    one, other, third = files.documented(), files.documented(), files.documented()
    other["comm_hook_state"].iter = 13
    other["comm_hook_state"].min_compression_rate = 3
    third["comm_hook_state"].q_memory_dict[0] = torch.zeros(8)
    paths = [put(files.saved(d), f"{i}.pt") for i, d in enumerate((one, other, third))]
    with pytest.raises(CheckpointMismatch) as error:
        load(paths)
    for part in ("1.pt: iteration 13, not 12", "min_compression_rate 3", "2.pt: other Q factors"):
        assert part in str(error.value)
    with pytest.raises(CheckpointMismatch, match="at least one file"):
        load([])


# --- damaged and hostile ----------------------------------------------------------------------


def test_200_damaged_files_each_end_in_a_mismatch(put):
    wrong = {}
    for name, raw in files.damaged().items():
        path = put(raw)
        try:
            load(path)
            wrong[name] = "was read"
        except CheckpointMismatch as error:
            if str(path) not in str(error) or "xpected" not in str(error):
                wrong[name] = str(error)
        except Exception as error:
            wrong[name] = repr(error)
    assert not wrong


def test_50_hostile_files_none_runs(put, tmp_path):
    canary = tmp_path / "canary"
    # Whatever is imported lazily is imported now.
    load(put(files.archive(files.pickle_of_tensor(), {"data/0": bytes(24)})))
    load(put(files.saved(files.documented())))
    cases = files.hostile(str(canary))
    assert len(cases) >= 50
    wrong = {}
    for name, (raw, named) in cases.items():
        path = put(raw)
        _WATCH.append([])
        try:
            load(path)
            wrong[name] = "was read"
        except UnsafeCheckpoint as error:
            if named is None or named not in str(error):
                wrong[name] = str(error)
        except CheckpointMismatch as error:
            if named is not None:
                wrong[name] = str(error)
        except BaseException as error:
            wrong[name] = repr(error)
        events = _WATCH.pop()
        if events or canary.exists():
            wrong[name] = f"something ran: {events}"
    assert not wrong, wrong


def test_bombs_cost_no_memory():
    code = (
        "import pathlib, resource, sys, tempfile, torch_bridge, torch_files\n"
        "bombs = torch_files._bombs()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'bomb.pt'\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name, (raw, _) in bombs.items():\n"
        "    path.write_bytes(raw)\n"
        "    try:\n"
        "        torch_bridge.load(path)\n"
        "    except torch_bridge.CheckpointMismatch:\n"
        "        continue\n"
        "    raise SystemExit(name)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)\n"
    )
    here = pathlib.Path(files.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 << 10  # kilobytes


def test_size_limit_says_how_to_raise_it(put):
    zeros = bytes(80 << 20)
    raw = files.archive(
        files.pickle_of_tensor(source=files.storage(numel=len(zeros) // 4)),
        {"data/0": zeros},
        compression=files.zipfile.ZIP_DEFLATED,
    )
    with pytest.raises(CheckpointMismatch, match="max_bytes"):
        load(put(raw))
    assert load(put(raw), max_bytes=1 << 30).model["w"].shape == (2, 3)
    with pytest.raises(CheckpointMismatch, match="more than 100 bytes"):
        load(put(files.saved(files.documented())), max_bytes=100)


GOOD = files.saved(files.documented())


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6
    ),
)
def test_any_change_is_read_or_refused_by_name(tmp_path_factory, changes):
    raw = bytearray(GOOD)
    for where, value in changes:
        raw[int(where * len(raw))] = value
    path = tmp_path_factory.getbasetemp() / "changed.pt"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointMismatch, UnsafeCheckpoint):
        load(path)


@settings(max_examples=300, deadline=None)
@given(body=st.lists(st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([
    files.glob("collections", "OrderedDict"), files.glob("torch._utils", "_rebuild_tensor_v2"),
    files.glob("numpy", "dtype"), files.glob("numpy.random._pickle", "__randomstate_ctor"),
    files.glob("torch._tensor", "_rebuild_from_type_v2"), files.storage(), files.tensor_call(),
    b")R", b"(tR", b"}b", b"(", b"t", b"}", b"u", b"K\x01", b"q\x00", b"h\x00", b"]", b"e", b"\x85",
    b"\x81", b"\x8f", b"\x90", b"N", b"2", b"0", b"1",
])), max_size=40))  # fmt: skip
def test_any_pickle_is_read_or_refused_by_name(tmp_path_factory, body):
    path = tmp_path_factory.getbasetemp() / "opcodes.pt"
    path.write_bytes(files.archive(files.whole(b"".join(body)), {"data/0": bytes(24)}))
    with contextlib.suppress(CheckpointMismatch, UnsafeCheckpoint):
        load(path)


def test_too_little_memory_is_one_sentence(put, monkeypatch):
    def empty(*_):
        raise MemoryError("Unable to allocate 30.0 GiB for an array")

    path = put(files.saved(files.documented()))
    monkeypatch.setattr("torch_bridge._read.archive.np.empty", empty)
    with pytest.raises(CheckpointMismatch, match=r"more memory than there is \(Unable to allocate"):
        load(path)


def test_a_large_file_that_is_no_archive_is_not_read(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(4 << 30)  # without blocks on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointMismatch, match="no zip archive"):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # kilobytes


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt")
