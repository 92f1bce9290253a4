"""What the tests of the benchmarks leave out of a run."""

import pytest

from benchmarks.common import machine


@pytest.fixture(autouse=True)
def not_watched(monkeypatch):
    """Does not look for other programs, which takes half a second before each run."""
    monkeypatch.setattr(machine, "busy_cores", lambda: 0.0)
