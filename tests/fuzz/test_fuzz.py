"""A short run of the fuzzer; tests/torch_bridge/test_refused.py has bad files, each by name."""

from tests.fuzz import fuzz_reader


def test_a_short_run_of_the_fuzzer():
    found = fuzz_reader.fuzz(440, seed=1)
    assert len(found.inputs) > 10
    assert not found.executed
    assert not found.unnamed
    assert found.slowest[0] < fuzz_reader.SECONDS
    assert found.largest[0] < fuzz_reader.OVERHEAD
    assert 0 < found.read < 300
