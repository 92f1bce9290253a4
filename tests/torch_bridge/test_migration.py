"""The example that moves a run to JAX and back, with real processes, as a user runs it."""

import json

import numpy as np
from numpy.testing import assert_array_equal

from tests.helpers.control import assert_no_further
from tests.helpers.paths import EXAMPLES
from tests.helpers.script import python

SCRIPT = EXAMPLES / "migrate" / "from_torch.py"


def test_a_run_that_moves_has_the_losses_of_one_that_stays(tmp_path):
    only = ("--only", "transformer-sgd-rank1")
    assert "\nall within 10 times" in python(SCRIPT, "--out", tmp_path, *only, COLUMNS="200")
    losses = json.loads((tmp_path / "losses.json").read_text())["transformer-sgd-rank1"]
    stayed = np.array(losses["stayed"])
    moved = np.array(losses["moved"])
    control = np.array(losses["control"])
    assert len(stayed) == len(moved) == 96  # 33 steps after each of the two moves
    assert_array_equal(moved[:30], stayed[:30])
    assert_array_equal(control[:30], stayed[:30])
    assert_no_further(moved, stayed, control)
    assert stayed[-1] < stayed[0] / 2
