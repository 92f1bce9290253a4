"""A short run of the fuzzer, and files that fooled other readers, each by name."""

from __future__ import annotations

import fuzz_reader
import pytest
from bad_inputs import bad_inputs, bypasses

import torch_bridge

pytestmark = pytest.mark.torch
FILES = {**bad_inputs(), **bypasses()}


def test_a_short_run_of_the_fuzzer():
    found = fuzz_reader.fuzz(150, seed=1)
    assert len(found.inputs) > 10
    assert not found.executed
    assert not found.unnamed
    assert found.slowest[0] < fuzz_reader.SECONDS
    assert found.largest[0] < fuzz_reader.OVERHEAD
    assert 0 < found.read < 100


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_by_name(name, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(FILES[name])
    unsafe = name.startswith("calls ") or name in (
        "its name taken from the memo",
        "INST in place of a call",
        "OBJ in place of a call",
        "NEWOBJ_EX in place of a call",
        "an extension's number for a name",
        "broken behind the call",
    )
    expected = torch_bridge.UnsafeCheckpoint if unsafe else torch_bridge.CheckpointMismatch
    with pytest.raises(expected):
        torch_bridge.load(path)
