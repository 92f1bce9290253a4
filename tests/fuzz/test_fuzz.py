"""A short run of the fuzzer, and what torch itself writes; test_refused.py has bad files."""

import collections

import pytest

from tests.fuzz import fuzz_reader, legitimate


def test_a_short_run_of_the_fuzzer():
    found = fuzz_reader.fuzz(230, seed=1)
    assert len(found.inputs) > 10
    assert not found.executed
    assert not found.unnamed
    assert found.slowest[0] < fuzz_reader.SECONDS
    assert found.largest[0] < fuzz_reader.OVERHEAD
    assert 0 < found.read < 160


@pytest.mark.filterwarnings("ignore")
def test_what_torch_writes_is_read_as_torch_reads_it_or_refused(tmp_path):
    verdicts = {name: legitimate.compare(path) for name, path in legitimate.corpus(tmp_path)}
    counts = collections.Counter(verdict.partition(":")[0] for verdict in verdicts.values())
    assert counts.total() > 210
    assert counts["ANOTHER VALUE"] == 0, verdicts
    assert counts["equal"] > 0.85 * counts.total()
    for name, verdict in verdicts.items():
        if verdict.startswith("refused here"):
            assert legitimate.REFUSED[name.partition(",")[0]] in verdict
