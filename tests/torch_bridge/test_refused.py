"""Files that are refused, each by name, soon, in little memory, and without running anything."""

import codecs
import os
import pathlib
import resource
import time

import numpy as np
import pytest
import torch

import torch_bridge
from tests.helpers import bad_files, bad_pickles
from tests.helpers import torch_files as files
from tests.helpers.watch import watched
from torch_bridge import BucketLayout, CheckpointMismatch, UnsafeCheckpoint, load


def why(path, raw, error, **options):
    """Returns what the refusal says; or a line on what was wrong with it."""
    path.write_bytes(raw)
    allowed = options.get("max_bytes", 3 * len(raw) + (60 << 20)) + (5 << 20)

    def read():
        load(path, **options)

    cost = watched(read)
    seconds = cost.seconds
    # Tracing memory takes most of it: 2 s for 60,000 tuples in each other, 0.1 s without it.
    if seconds > 1:
        seconds = watched(read, memory=False).seconds
    ran = cost.executed or pathlib.Path(bad_pickles.CANARY).exists()
    if ran or seconds > 5 or cost.peak > allowed:
        return f"{cost}, {seconds}, {ran}"
    if isinstance(cost.error, error):
        return str(cost.error)
    return repr(cost.error)


TABLES = {
    "damaged": bad_files.damaged,
    "of other kinds": bad_files.foreign,
    "tricks": bad_pickles.tricks,
    "unsafe": bad_pickles.unsafe,
    "large": bad_pickles.amplified,
    "packed": bad_pickles.packed,
}


@pytest.mark.parametrize("table", TABLES)
def test_bad_files(tmp_path, monkeypatch, table):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "f.pt"
    path.write_bytes(files.saved(files.documented()))
    load(path)  # whatever is imported lazily is imported now
    codecs.lookup("cp437")  # what zipfile takes names for
    wrong = {}
    cases = TABLES[table]()
    for name, (raw, part) in cases.items():
        # Less than this their pickles take as they are.
        options = {"max_bytes": 1 << 20} if len(raw) < 50_000 and table == "packed" else {}
        error = UnsafeCheckpoint if table == "unsafe" else CheckpointMismatch
        said = why(path, raw, error, **options)
        # What is large has to be read, or it would not show that it costs little.
        vain = table in ("large", "packed") and "damaged pickle" in said
        if part not in said or str(path) not in said or len(said) > 1000 or vain:
            wrong[name] = said
    assert len(cases) > 10
    assert not wrong


# --- what is no file, too large, or gone ------------------------------------------------------


def test_what_is_no_file_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, said in ((pipe, "a pipe"), ("/dev/zero", "a device"), (tmp_path, "a directory")):
        with pytest.raises(CheckpointMismatch, match=said):
            load(path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(CheckpointMismatch, match="dcp_to_torch"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt")


def test_a_large_file_that_is_no_archive_is_not_read(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(4 << 30)  # without blocks on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointMismatch, match="not a zip archive"):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # kilobytes


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    # A file that was mapped into memory would end the process: SIGBUS.
    path = tmp_path / "f.pt"
    empty = np.empty

    def cut(*args):
        os.truncate(path, 5_000)
        return empty(*args)

    monkeypatch.setattr(np, "empty", cut)
    path.write_bytes(files.saved({str(k): torch.full((1000,), k) for k in range(30)}))
    with pytest.raises(CheckpointMismatch, match="damaged entry"):
        load(path)


def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch):
    def empty(*_):
        raise MemoryError("Unable to allocate 30.0 GiB for an array")

    path = tmp_path / "f.pt"
    path.write_bytes(files.saved(files.documented()))
    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(CheckpointMismatch, match=r"more memory than there is \(Unable to allocate"):
        load(path)


def test_the_limit_can_be_raised(tmp_path):
    path = tmp_path / "f.pt"
    zeros = bytes(80 << 20)
    source = files.storage(numel=len(zeros) // 4)
    document = files.pickle_of_tensor(source=source)
    path.write_bytes(files.archive(document, {"data/0": zeros}, bad_pickles.PACKED))
    with pytest.raises(CheckpointMismatch, match="max_bytes") as error:
        load(path)
    assert error.value.parameters == ("max_bytes",)
    assert load(path, max_bytes=1 << 30).model["w"].shape == (2, 3)


# --- layouts and hook states ------------------------------------------------------------------

LAYOUTS = ["", "[]", "{}", "[" * 2_000_000, "[]," * 1_000_000]
BUCKETS = (
    '[[{"name": "a", "shape": [2, 3], "strides": [9, 1]}]]',  # with gaps
    '[[{"name": "a"}]]', '[[["a", [-1]]]]', '[[["a", ["x"]]]]', "[3]", "null",
    f'[[["a", {[1] * 30_000}]]]',
)  # fmt: skip
FORMAT = '{"format": "torch_bridge.BucketLayout", "version": %d, "buckets": %s}'


@pytest.mark.parametrize(
    "text",
    [
        *LAYOUTS,
        '{"format": "another", "version": 1, "buckets": []}',
        FORMAT % (2, "[]"),
        *(FORMAT % (1, b) for b in BUCKETS),
    ],
)
def test_layouts_that_no_model_has(text):
    cost = watched(lambda: BucketLayout.from_json(text))
    assert isinstance(cost.error, CheckpointMismatch)
    assert cost.seconds < 5


def test_wrappers_of_names_and_hooks_take_time_in_proportion():
    names = ["module." * 9300 + str(k) for k in range(200)]
    hook = "default_hooks.fp16_compress_wrapper(" * 100_000 + "powerSGD_hook" + ")" * 100_000
    record = torch_bridge.PowerSGDRecord(1, 9, {}, {}, {})

    def read():
        layout = BucketLayout.from_order([names], dict.fromkeys(names, np.zeros(1)))
        bare = tuple(map(str, range(200)))
        assert layout.named_as(bare).names == bare
        assert "comm_dtype" in torch_bridge.powersgd_kwargs_from_torch(record, hook=hook)

    cost = watched(read, memory=False)
    assert cost.error is None
    assert cost.seconds < 5


@pytest.mark.parametrize("shared", ["dictionaries", "buffers"])
def test_errors_that_thousands_of_ranks_share(tmp_path, shared):
    path = tmp_path / "f.pt"
    model = {"w": np.zeros((512, 512))}
    layout = BucketLayout.from_order([["w"]], model)
    error = {0: torch.full((512 * 512,), 0.1)}
    errors = [error if shared == "dictionaries" else dict(error) for _ in range(6_000)]
    torch.save(files.own_format(errors=errors, layout=layout.to_json(), world_size=10**12), path)
    start = time.process_time()
    checkpoint = load(path)
    assert np.all(checkpoint.mean.error_dict[0] == np.float32(0.1))
    assert time.process_time() - start < 2
    assert len(checkpoint.powersgd) == 6_000
    assert checkpoint.world_size is None  # which no run has
