"""The example that moves a run to JAX and back, with real processes, as a user runs it."""

import json

import numpy as np
from paths import EXAMPLES
from script import python

SCRIPT = EXAMPLES / "migrate" / "from_torch.py"


def test_a_run_that_moves_has_the_losses_of_one_that_stays(tmp_path):
    only = ("--only", "transformer-sgd-rank1")
    assert "all below 1e-04" in python(SCRIPT, "--out", tmp_path, *only, COLUMNS="200")
    losses = json.loads((tmp_path / "losses.json").read_text())["transformer-sgd-rank1"]
    stayed, moved = np.array(losses["stayed"]), np.array(losses["moved"])
    assert len(stayed) == len(moved) == 96  # 33 steps after each of the two moves
    np.testing.assert_array_equal(moved[:30], stayed[:30])
    assert np.max(np.abs(moved - stayed) / stayed) < 1e-4
    assert stayed[-1] < stayed[0] / 2
