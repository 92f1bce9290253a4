"""Files that once stopped, filled or fooled the reader, each by name."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
import torch_files as files

import torch_bridge
from torch_bridge import BucketLayout, CheckpointMismatch, load
from torch_bridge._cli.files import read_flax

pytestmark = pytest.mark.torch

NONE, POP = b"N", b"0"
HUGE = files.tensor_call(
    size=(25 << 20,), stride=(0,), source=files.storage("1", 24, ("torch", "ByteStorage"))
)


def get(index):
    return b"h" + bytes([index])


def put(index):
    return b"q" + bytes([index])


def colliding():
    """Tuples of numbers that have the hash of (1, 1, ...): 8 choices in each of 8 places."""
    base, ones = 2**61 - 1, []
    for k in range(8):
        raw = (1 + k * base).to_bytes(9, "little", signed=True)
        ones.append(b"\x8a\x09" + raw)
    keys = (
        b"(" + b"".join(ones[(i >> (3 * d)) & 7] for d in range(8)) + b"tN" for i in range(5_000)
    )
    return b"}(" + b"".join(keys) + b"u"


def chosen_keys():
    """More numbers and tuples than are read, whose hashes a file can choose, in every container."""
    numbers = [files.integer(2 * k + 1) for k in range(1 << 14)] + [files.integer(-5)]
    pairs = b"(" + b"".join(number + b"N\x86" for number in numbers) + b"t"
    listed = b"(" + b"".join(numbers) + b"t"
    tuples = b"".join(files.integer(k) + b"K\x01\x86N" for k in range((1 << 12) + 1))
    return {
        "number keys": b"}(" + b"N".join(numbers) + b"Nu",
        "number keys one by one": b"}" + b"".join(number + b"Ns" for number in numbers),
        "numbers in a set": files.call(files.glob("builtins", "set"), listed),
        "numbers in a frozenset": files.call(files.glob("builtins", "frozenset"), listed),
        "number keys of a mapping": files.call(files.glob("collections", "OrderedDict"), pairs),
        "short tuple keys": b"}(" + tuples + b"u",
        "attributes without names": files.call(files.glob("argparse", "Namespace"))
        + b"}" + files.integer(7) + b"Ns}\x86b",
    }  # fmt: skip


def bodies():
    randomness = files.glob("numpy.random._pickle", "__randomstate_ctor") + b")R"
    return {
        "a size made of an expanded array": files.call(files.glob("torch", "Size"), HUGE),
        "a set made of an expanded array": files.call(files.glob("builtins", "set"), HUGE),
        "a mapping made of an expanded array": files.call(
            files.glob("collections", "OrderedDict"), HUGE
        ),
        "sizes made of an expanded array": files.call(
            files.glob("torch._utils", "_rebuild_tensor_v2"),
            files.storage(), b"K\x00", HUGE, HUGE, b"\x89", files.EMPTY,
        ),
        "a generator made of an expanded array": randomness + HUGE + b"b",
        "tuple keys of one hash": colliding(),
        **chosen_keys(),
        "an int where a storage belongs": files.tensor_call(source=b"K\x07"),
        "an array in a persistent id": files.tup(
            files.tensor_call(), files.glob("torch", "FloatStorage"), files.text("0"),
            files.text("cpu"), b"K\x06",
        ) + b"Q",
        "an array as an encoding": files.call(
            files.glob("_codecs", "encode"), files.text("a"), files.tensor_call()
        ),
        "an array as a device's number": files.call(
            files.glob("torch", "device"), files.text("cuda"), files.tensor_call()
        ),
    }  # fmt: skip


def refused(path, raw, **options):
    """Why the file is refused; fails if that takes more than 5 s or more memory than allowed."""
    path.write_bytes(raw)
    allowed = options.get("max_bytes", 3 * len(raw) + (60 << 20)) + (4 << 20)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointMismatch) as found:
            load(path, **options)
        assert tracemalloc.get_traced_memory()[1] < allowed
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 5
    return str(found.value)


@pytest.mark.parametrize("name", bodies())
def test_values_that_would_take_hours_gigabytes_or_an_error_of_pythons(tmp_path, name):
    document = files.whole(files.dictionary(state_dict=b"}", extra=bodies()[name]))
    storages = {"data/0": bytes(24), "data/1": bytes(24)}
    message = refused(tmp_path / "f.pt", files.archive(document, storages))
    assert "ndarray where a list" in message or "expanded" not in name or name.startswith("sizes")
    assert "sizes and strides are no" in message or not name.startswith("sizes")


def test_numbers_as_keys_of_many_small_dictionaries(tmp_path):
    path = tmp_path / "f.pt"
    samples = [{7 * k: 0.5, 7 * k + 3: 0.25} for k in range(20_000)]
    torch.save({"state_dict": {"w": torch.ones(2)}, "samples": samples}, path)
    assert load(path).extra["samples"] == samples


def test_too_many_numbers_as_keys_are_refused_with_what_to_do(tmp_path):
    document = {"state_dict": {"w": torch.ones(2)}, "seen": {3 * k + 1: 0 for k in range(20_000)}}
    message = refused(tmp_path / "f.pt", files.saved(document))
    assert "more than 16384 numbers as keys" in message
    assert "save it with text as keys" in message


@pytest.mark.parametrize(
    "stream",
    [
        NONE * 4_000_000,
        b"K\x01" * 2_000_000,
        b"X\x04\x00\x00\x00abcd" * 400_000,
        b"X\x04\x00\x00\x00\xf0\x9f\x98\x80" * 400_000,
        (b"K\x01" * 3 + b"\x87") * 500_000,
        NONE * 200_000 + b"(q\x000" * 1_000_000,
    ],
    ids=["nothing", "numbers", "strings", "wide strings", "tuples", "marks"],
)
def test_compressed_streams_of_pushes(tmp_path, stream):
    raw = files.archive(files.whole(stream), compression=zipfile.ZIP_DEFLATED)
    assert len(raw) < 50_000
    refused(tmp_path / "f.pt", raw, max_bytes=9 << 20)


def built_often():
    """Small calls that each make something of kilobytes, which the file repeats."""
    words = b"B" + struct.pack("<I", 2496) + bytes(2496)
    key = files.call(
        files.glob("numpy._core.numeric", "_frombuffer"), words,
        files.call(files.glob("numpy", "dtype"), files.text("u4")),
        files.tup(files.integer(624)), files.text("C"),
    )  # fmt: skip
    state = files.tup(files.text("MT19937"), key, b"K\x01", b"K\x00", b"G" + bytes(8))
    generator = files.glob("numpy.random._pickle", "__randomstate_ctor")
    size = files.tup(b"K\x00", *[b"K\x01"] * 63)
    tensor = files.tup(files.storage("0", 6), b"K\x00", size, size, b"\x89", NONE)
    rebuild = files.glob("torch._utils", "_rebuild_tensor_v2")
    kept = lambda first, second: first + put(0) + POP + second + put(1) + POP  # noqa: E731
    return {
        "generators": kept(generator, state) + b"](" + (get(0) + b")R" + get(1) + b"b") * 20_000,
        "empty tensors": kept(rebuild, tensor) + b"](" + (get(0) + get(1) + b"R") * 60_000,
    }


@pytest.mark.parametrize("name", built_often())
def test_what_small_calls_make_is_charged(tmp_path, name):
    stream = files.whole(built_often()[name] + b"e")
    raw = files.archive(stream, {"data/0": bytes(24)}, zipfile.ZIP_DEFLATED)
    assert len(raw) < 10_000
    assert "max_bytes" in refused(tmp_path / "f.pt", raw, max_bytes=12 << 20)


def test_a_name_that_is_repeated_takes_no_memory(tmp_path):
    path = tmp_path / "f.pt"
    body = files.dictionary(state_dict=b"}", extra=b"](" + b"ctorch\nint8\n" * 100_000 + b"e")
    path.write_bytes(files.archive(files.whole(body)))
    tokens = load(path).extra["extra"]
    assert len(tokens) == 100_000
    assert len(set(map(id, tokens))) == 1


@pytest.mark.parametrize(
    "text", ["import os\nprint(1)\n", "class A:\n    pass\n", "call me\nnow\n"]
)
def test_text_is_called_no_checkpoint_rather_than_unsafe(tmp_path, text):
    assert "no zip archive" in refused(tmp_path / "f.pt", text.encode())


def test_opcodes_that_do_nothing_are_counted(tmp_path):
    path = tmp_path / "f.pt"
    stream = files.whole((NONE + POP) * 10_000_000)
    path.write_bytes(files.archive(stream, compression=zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 50_000
    start = time.process_time()
    with pytest.raises(CheckpointMismatch, match="max_bytes"):
        load(path)
    assert time.process_time() - start < 5


def test_a_directory_of_many_entries(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", files.whole(b"}"))
    raw = buffer.getvalue()
    start = raw.index(b"PK\x01\x02")
    end = raw.index(b"PK\x05\x06")
    count = 200_000
    tail = struct.pack(
        "<4s4HLLH", b"PK\x05\x06", 0, 0, 65535, 65535, (end - start) * count, start, 0
    )
    many = raw[:start] + raw[start:end] * count + tail
    assert "max_bytes" in refused(tmp_path / "f.pt", many)


@pytest.mark.parametrize(
    "layout",
    [
        json.dumps({"format": "torch_bridge.BucketLayout", "version": 1,
                    "buckets": [[{"name": "w", "shape": [1] * 30_000}]]}),
        "[" * 2_000_000,
        "[]," * 1_000_000,
    ],
    ids=["30 000 dimensions", "brackets", "empty lists"],
)  # fmt: skip
def test_layouts_that_no_model_has(layout):
    start = time.process_time()
    with pytest.raises(CheckpointMismatch):
        BucketLayout.from_json(layout)
    assert time.process_time() - start < 5


def test_a_layout_is_charged_what_it_is_parsed_to(tmp_path):
    names = '{"name":[[0],[0]]},' * 200_000
    text = f'{{"format":"torch_bridge.BucketLayout","version":1,"buckets":[[{names}0]]}}'
    body = files.dictionary(state_dict=b"}", layout=files.text(text))
    raw = files.archive(files.whole(body), compression=zipfile.ZIP_DEFLATED)
    assert len(raw) < 50_000
    assert "max_bytes" in refused(tmp_path / "f.pt", raw)


@pytest.mark.parametrize("shared", ["dictionaries", "buffers"])
def test_errors_that_thousands_of_ranks_share(tmp_path, shared):
    path = tmp_path / "f.pt"
    layout = BucketLayout.from_manifest([[("w", (512, 512))]])
    error = {0: torch.full((512 * 512,), 0.1)}
    slots = {"matrix_approximation_rank": 1, "iter": 9, "p_memory_dict": {}, "q_memory_dict": {}}
    errors = [error if shared == "dictionaries" else dict(error) for _ in range(6_000)]
    torch.save({
        "format": "torch_bridge.checkpoint", "version": 1, "state_dict": {"w": torch.zeros(2)},
        "powersgd": slots, "errors": errors, "layout": layout.to_json(),
    }, path)  # fmt: skip
    start = time.process_time()
    checkpoint = load(path)
    mean = checkpoint.mean_errors(layout)["w"]
    assert time.process_time() - start < 2
    assert len(checkpoint.powersgd) == 6_000
    assert np.all(mean == np.float32(0.1))


def test_the_mean_of_errors_counts_every_rank():
    once, thrice = {0: np.array([1, 2], np.float32)}, {0: np.array([5, 10], np.float32)}
    records = [
        torch_bridge.PowerSGDRecord(1, 9, error, {}, {}) for error in (thrice, once, thrice, thrice)
    ]
    mean = torch_bridge.Checkpoint({}, tuple(records)).mean_error(0)
    np.testing.assert_array_equal(mean, [4, 8])


def test_errors_at_one_address_are_told_apart_by_shape_and_strides():
    honest = np.array([1, 2, 3, 4], np.float32)
    expanded = np.lib.stride_tricks.as_strided(honest, (4,), (0,))
    records = [
        torch_bridge.PowerSGDRecord(1, 9, {0: error}, {}, {})
        for error in (honest, expanded, honest, honest[::-1][::-1])
    ]
    mean = torch_bridge.Checkpoint({}, tuple(records)).mean_error(0)
    np.testing.assert_array_equal(mean, [1, 1.75, 2.5, 3.25])


def test_names_of_thousands_of_wrappers():
    names = ["module." * 9300 + str(k) for k in range(200)]
    start = time.process_time()
    layout = BucketLayout.from_manifest([[(name, (1,)) for name in names]])
    assert layout.names == tuple(map(str, range(200)))
    assert time.process_time() - start < 5


def test_an_optimizer_without_an_end(tmp_path):
    doubling = b")q\x00" + b"".join(get(k) * 2 + b"\x86" + put(k + 1) + POP for k in range(40))
    body = doubling + files.dictionary(
        state_dict=files.dictionary(w=files.tensor_call()),
        optimizer=files.dictionary(state=get(40)),
    )
    message = refused(tmp_path / "f.pt", files.archive(files.whole(body), {"data/0": bytes(24)}))
    assert "max_bytes" in message


# --- entries of other kinds -------------------------------------------------------------------


def test_a_parameter_may_be_called_format(tmp_path):
    path = tmp_path / "f.pt"
    torch.save({"format": torch.ones(3), "version": torch.ones(2)}, path)
    assert list(load(path).model) == ["format", "version"]


@pytest.mark.parametrize("name", ["model", "state_dict", "hook_state", "model.weight"])
def test_a_parameter_may_be_called_as_an_entry_of_a_checkpoint(tmp_path, name):
    path = tmp_path / "f.pt"
    torch.save({name: torch.ones(3), "w": torch.ones(2), "module.v": torch.ones(1)}, path)
    checkpoint = load(path)
    assert list(checkpoint.model) == [name, "w", "module.v"]
    assert not checkpoint.extra


def test_keys_that_are_equal_as_text_are_refused(tmp_path):
    model = {"w": torch.ones(2)}
    message = refused(tmp_path / "f.pt", files.saved({"state_dict": model, 1: 2, "1": 3}))
    assert "equal as text" in message
    both = {1: torch.ones(2), "1": torch.zeros(2)}
    assert "equal as text" in refused(tmp_path / "f.pt", files.saved({"state_dict": both}))
    assert "no text" in refused(tmp_path / "f.pt", files.saved({"state_dict": model, None: 2}))


def optimizer(**changes):
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
    state = {0: {"momentum_buffer": np.zeros((2, 3), np.float32), **changes.pop("kept", {})}}
    return {"state": state, "param_groups": [group | changes]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (optimizer(lr="fast"), "`lr` must be a number, got a str"),
        (optimizer(momentum=[0.9]), "`momentum` must be a number, got a list"),
        (optimizer(weight_decay=np.zeros(3)), "`weight_decay` must be a number"),
        (optimizer(params=[[0]]), "no optimizer state"),
        (optimizer(params=0), "no optimizer state"),
        (optimizer(param_names=[b"w"]), "no optimizer state"),
        (optimizer(param_names="w"), "no optimizer state"),
        (optimizer(kept={"step": float("inf")}), "`step` must be a count"),
        (optimizer(kept={"step": "many"}), "`step` must be a number"),
        (optimizer(kept={"momentum_buffer": np.zeros(7)}), "does not belong to this model"),
        ({"state": [], "param_groups": []}, "no optimizer state"),
        ({"state": {}, "param_groups": {"lr": 0.1}}, "no optimizer state"),
    ],
)
def test_entries_of_an_optimizer_of_wrong_types(entries, message):
    source = torch_bridge.Checkpoint({"w.weight": np.zeros((2, 3), np.float32)}, (), entries)
    with pytest.raises(CheckpointMismatch, match=message):
        torch_bridge.to_flax(source, {"w": {"kernel": np.zeros((3, 2), np.float32)}})


def other_kinds():
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return {
        "gzip": gzip.compress(files.saved(files.documented())),
        "tar": tar.getvalue(),
        "safetensors": struct.pack("<Q", 20) + b'{"w":{"dtype":"F32"}}',
    }


@pytest.mark.parametrize("kind", other_kinds())
def test_files_of_other_kinds_are_called_by_their_names(tmp_path, kind):
    assert kind in refused(tmp_path / "f.pt", other_kinds()[kind])


def test_what_is_no_file_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointMismatch, match="a pipe, a socket or a device"):
        load(pipe)
    with pytest.raises(CheckpointMismatch, match="a pipe, a socket or a device"):
        load("/dev/zero")
    with pytest.raises(CheckpointMismatch, match="is a directory"):
        load(tmp_path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(CheckpointMismatch, match="dcp_to_torch"):
        load(tmp_path)


def test_a_pipe_behind_a_linked_folder_is_not_waited_for(tmp_path):
    outside, checkpoint = tmp_path / "outside", tmp_path / "checkpoint" / "0"
    outside.mkdir()
    checkpoint.mkdir(parents=True)
    os.mkfifo(outside / "_METADATA")
    (checkpoint / "circle").symlink_to(checkpoint)
    (checkpoint / "state").symlink_to(outside)
    with pytest.raises(CheckpointMismatch, match="_METADATA is a pipe, a socket or a device"):
        read_flax(checkpoint.parent, {})


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    # A file that was mapped into memory would end the process: SIGBUS.
    path = tmp_path / "f.pt"
    path.write_bytes(files.saved({str(k): torch.full((1000,), k) for k in range(30)}))
    with pytest.raises(CheckpointMismatch, match="damaged entry"):
        load(path, progress=lambda *_: os.truncate(path, 5_000))
