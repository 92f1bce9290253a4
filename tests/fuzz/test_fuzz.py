"""A short run of the fuzzer, and the files of docs/security.md, each by name."""

from __future__ import annotations

import fuzz_reader
import pytest
from bad_inputs import bad_inputs, bypasses
from paths import ROOT

import torch_bridge

pytestmark = pytest.mark.torch
PAGE = (ROOT / "docs" / "security.md").read_text()
BAD, BYPASSES = bad_inputs(), bypasses()
FILES = {**BAD, **BYPASSES}
assert (len(BAD), len(BYPASSES)) == (21, 45)  # as the page says


def test_a_short_run_of_the_fuzzer():
    found = fuzz_reader.fuzz(150, seed=1)
    assert len(found.inputs) > 10
    assert not found.executed
    assert not found.unnamed
    assert found.slowest[0] < fuzz_reader.SECONDS
    assert found.largest[0] < fuzz_reader.OVERHEAD
    assert 0 < found.read < 100


@pytest.mark.parametrize("name", FILES)
def test_what_the_table_says_of_a_file(name, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(FILES[name])
    with pytest.raises(fuzz_reader.NAMED) as error:
        torch_bridge.load(path)
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    assert [row.split("|")[3].strip() for row in rows] == [error.type.__name__]
