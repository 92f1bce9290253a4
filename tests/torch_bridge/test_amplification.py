"""Small files that make a naive reader take hours or gigabytes: refused, soon and by name."""

from __future__ import annotations

import pathlib
import pickle
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
import torch_files as files

from torch_bridge import CheckpointMismatch, UnsafeCheckpoint, load

pytestmark = pytest.mark.torch

DEEP = b"]" * 100_000 + b"a" * 99_999
PATH = files.glob("pathlib", "PosixPath")


def laughs(doublings=40) -> bytes:
    """A list of two of a list of two of ..., whose ``repr`` would have 2**40 entries."""
    nested = b"]q\x00"
    for index in range(doublings):
        keep, used = bytes([index + 1]), bytes([index])
        nested += b"0](h" + used + b"h" + used + b"eq" + keep
    return nested


def put(index: int) -> bytes:
    return b"q" + bytes([index])


def get(index: int) -> bytes:
    return b"h" + bytes([index])


def long(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def nested_in(value: bytes) -> dict[str, bytes]:
    """A value of endless ``repr`` wherever a message could show it."""
    generator = files.glob("numpy.random._pickle", "__randomstate_ctor") + b")R"
    small = b"K\x01" * 3
    dtype = (files.storage(), b"K\x00", b"))", b"\x89", b"N", value)
    return {
        "dtype": files.call(files.glob("torch._utils", "_rebuild_tensor_v3"), *dtype),
        "device": files.call(files.glob("torch", "device"), value),
        "numpy dtype": files.call(files.glob("numpy", "dtype"), value),
        "path": files.call(PATH, value),
        "layout": files.call(files.glob("torch.serialization", "_get_layout"), value),
        "function": files.call(
            files.glob("torch._tensor", "_rebuild_from_type_v2"), value, b"N", b"N", b"N"
        ),
        "generator": generator + files.tup(value, b"K\x01", small) + b"b",
        "words": generator + files.tup(files.text("MT19937"), value, small) + b"b",
    }


def amplified() -> dict[str, bytes]:
    """Bodies that copy or hash one large value again and again."""
    table = b"}(" + b"".join(files.integer(i) + b"N" for i in range(20_000)) + b"u"
    letters = files.text("a" * 500_000)
    encode = files.glob("_codecs", "encode")
    seven = b"\x8b" + struct.pack("<i", 400_000) + b"\x7f" * 400_000
    pair = b"(" + b"K\x01" * 64 + b"t" + put(1) + b"(" + get(1) * 64 + b"t" + put(2)
    doubled = PATH + put(0) + files.text("a" * 100) + b"\x85R" + put(1)
    doubled += (get(0) + get(1) + get(1) + b"\x86R" + put(1)) * 40
    mapping = files.glob("collections", "OrderedDict") + put(1) + table + put(2)
    return {
        "paths that double": doubled,
        "text encoded 8000 times": b"](" + encode + put(1) + letters + put(2)
        + files.text("latin1") + put(3) + (get(1) + get(2) + get(3) + b"\x86R") * 8000 + b"e",
        "dictionaries copied": b"](" + mapping + (get(1) + get(2) + b"\x85R") * 8000 + b"e",
        "one huge integer as a key": b"}" + put(5) + seven + put(1) + b"0"
        + (get(1) + b"Ns") * 50_000,
        "integers of one hash": b"}("
        + b"".join(long((2**61 - 1) * i) + b"N" for i in range(1, 50_000)) + b"u",
        "tuples of tuples as keys": pair + b"00}(" + (get(2) + b"N") * 50_000 + b"u",
    }  # fmt: skip


def refused(path: pathlib.Path, raw: bytes) -> str:
    """Why `raw` is refused; fails if that takes long or much memory."""
    path.write_bytes(raw)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises((CheckpointMismatch, UnsafeCheckpoint)) as found:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20
    return str(found.value)


@pytest.mark.parametrize("kind", ["deep", "doubling"])
@pytest.mark.parametrize("place", nested_in(b"]"))
def test_values_without_an_end_are_never_shown(tmp_path, kind, place):
    body = nested_in(DEEP if kind == "deep" else laughs())[place]
    document = files.whole(files.dictionary(state_dict=b"}", extra=body))
    message = refused(tmp_path / "f.pt", files.archive(document, {"data/0": bytes(24)}))
    assert len(message) < 600


def test_nesting_has_an_end(tmp_path):
    path = tmp_path / "f.pt"
    good, deep = b"]" * 90 + b"a" * 89, DEEP
    path.write_bytes(files.archive(files.whole(files.dictionary(state_dict=b"}", extra=good))))
    assert list(load(path).extra) == ["extra"]
    body = files.whole(files.dictionary(state_dict=b"}", extra=deep))
    assert "containers in each other" in refused(path, files.archive(body))


def test_a_container_that_holds_itself(tmp_path):
    body = files.dictionary(state_dict=b"}", extra=b"]" + put(0) + get(0) + b"a")
    assert "holds itself" in refused(tmp_path / "f.pt", files.archive(files.whole(body)))


def test_entries_of_an_archive_that_overlap_are_charged_each(tmp_path):
    # 400 names in the directory for one megabyte: what they unpack to is 400.
    path, count = tmp_path / "f.pt", 400
    tensors = b"](" + b"".join(
        files.tensor_call(source=files.storage(str(k), 1 << 18)) for k in range(count)
    ) + b"e"  # fmt: skip
    body = files.dictionary(state_dict=b"}", extra=tensors)
    raw = files.archive(files.whole(body), {"data/0": bytes(1 << 20)})
    start, end = raw.index(b"PK\x01\x02"), raw.index(b"PK\x05\x06")
    directory = raw[start:end]
    at = directory.index(b"archive/data/0") - 46
    entry = directory[at : at + 46 + len(b"archive/data/0")]
    more = b""
    for k in range(1, count):
        name = f"archive/data/{k}".encode()
        more += entry[:28] + struct.pack("<H", len(name)) + entry[30:46] + name
    size = struct.pack("<4s4HLLH", b"PK\x05\x06", 0, 0, count + 3, count + 3,
                       len(directory + more), start, 0)  # fmt: skip
    refused(path, raw[:start] + directory + more + size)


@pytest.mark.parametrize("name", amplified())
def test_what_a_file_costs_grows_with_its_size(tmp_path, name):
    document = files.whole(files.dictionary(state_dict=b"}", extra=amplified()[name]))
    refused(tmp_path / "f.pt", files.archive(document))


@pytest.mark.parametrize("opcode", [pickle.EMPTY_SET, pickle.EMPTY_DICT + pickle.MEMOIZE])
def test_a_compressed_stream_of_containers(tmp_path, opcode):
    raw = files.archive(
        files.whole(opcode * (10_000_000 // len(opcode))), compression=zipfile.ZIP_DEFLATED
    )
    assert len(raw) < 50_000
    assert "max_bytes" in refused(tmp_path / "f.pt", raw)


def test_an_object_that_is_built_many_times(tmp_path):
    # Each of n builds once went over all m memo entries of the object.
    generator = files.glob("numpy.random._pickle", "__bit_generator_ctor") + b")R"
    body = generator + pickle.MEMOIZE * 100_000 + b"2Nb0" * 20_000 + b"0N"
    path = tmp_path / "f.pt"
    path.write_bytes(files.archive(files.whole(files.dictionary(state_dict=b"}", extra=body))))
    start = time.process_time()
    load(path)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_compression_that_torch_never_uses(tmp_path, method):
    # An LZMA header alone can ask for a dictionary of gigabytes, and fails with its own error.
    message = refused(
        tmp_path / "f.pt", files.archive(files.pickle_of_tensor(), {"data/0": bytes(24)}, method)
    )
    assert "compression method" in message


def slots(**changes):
    base = {"matrix_approximation_rank": 1, "iter": 3}
    return base | {f"{kind}_dict": {} for kind in ("error", "p_memory", "q_memory")} | changes


def own_format(**changes):
    hook = {name: value for name, value in slots().items() if name != "error_dict"}
    return {
        "format": "torch_bridge.checkpoint",
        "version": 1,
        "world_size": 2,
        "state_dict": {"w": torch.zeros(3)},
        "powersgd": hook,
        "errors": [{0: torch.zeros(3)}] * 2,
    } | changes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (slots(error_dict={0: torch.zeros(1).expand(1 << 20)}), "flat tensors"),
        (slots(error_dict={0: torch.zeros(3, dtype=torch.int64)}), "floating-point"),
        (slots(iter=2**40), "`iter`"),
        (slots(min_compression_rate=10**400), "min_compression_rate"),
        (slots(min_compression_rate=float("nan")), "min_compression_rate"),
        (own_format(version=[1]), "format version a list"),
        (own_format(version=2), "format version 2,"),
        (own_format(optimizer=5), "optimizer"),
        (own_format(errors=[]), "`errors`"),
        (own_format(errors=[{0: torch.zeros(3)}, {}]), "different buckets"),
        (own_format(errors=[{0: torch.zeros(3)}, {0: torch.zeros(4)}]), "different sizes"),
        (own_format(errors=[{0: torch.zeros(3)}] * 20_000), "`errors`"),
        (
            own_format(
                powersgd={
                    **slots(),
                    "rng": {
                        "key": torch.zeros(624, dtype=torch.int64),
                        "pos": "x",
                        "has_gauss": 0,
                        "cached_gaussian": 0,
                    },
                }
            ),
            "`rng`",
        ),
    ],
)
def test_entries_that_no_run_has(tmp_path, value, message):
    assert message in refused(tmp_path / "f.pt", files.saved(value))


def test_a_world_size_that_no_run_has_is_not_believed(tmp_path):
    path = tmp_path / "f.pt"
    path.write_bytes(files.saved(own_format(world_size=10**12)))
    assert load(path).world_size is None


def test_several_optimizers_are_kept(tmp_path):
    path = tmp_path / "f.pt"
    path.write_bytes(files.saved({"state_dict": {"w": torch.zeros(3)}, "optimizer": [{}, {}]}))
    checkpoint = load(path)
    assert checkpoint.optimizer is None
    assert checkpoint.extra == {"optimizer": [{}, {}]}


def test_files_that_cannot_be_the_ranks_of_one_run(tmp_path):
    def write(name, size, **more):
        path = tmp_path / name
        state = slots(error_dict={0: torch.zeros(size)})
        path.write_bytes(files.saved({"comm_hook_state": state, **more}))
        return path

    one, two, three = write("0", 3), write("1", 4), write("2", 3, world_size=1)
    with pytest.raises(CheckpointMismatch, match="given 2 times"):
        load([one, tmp_path / "." / "0"])
    with pytest.raises(CheckpointMismatch, match="errors of other buckets"):
        load([one, two])
    with pytest.raises(CheckpointMismatch, match="2 files of a run of 1 ranks"):
        load([three, write("3", 3, world_size=1)])
    np.testing.assert_array_equal(load([one, three]).powersgd[1].error_dict[0], 0)


def test_a_file_of_text_is_not_called_a_pickle(tmp_path):
    assert "no zip archive" in refused(tmp_path / "f.pt", b"hello world, not a model\n")
