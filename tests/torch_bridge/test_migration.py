"""The example that moves a run to JAX and back, with real processes, as a user runs it."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.torch

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "migrate" / "from_torch.py"


def test_a_run_that_moves_has_the_losses_of_one_that_stays(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--only", "transformer-sgd-rank1"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all below 1e-04" in done.stdout
    losses = json.loads((tmp_path / "losses.json").read_text())["transformer-sgd-rank1"]
    stayed, moved = np.array(losses["stayed"]), np.array(losses["moved"])
    assert len(stayed) == len(moved) == 96  # 33 steps after each of the two moves
    np.testing.assert_array_equal(moved[:30], stayed[:30])
    assert np.max(np.abs(moved - stayed) / stayed) < 1e-4
    assert stayed[-1] < stayed[0] / 2


def test_a_case_that_does_not_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["from_torch.py", "--out", str(tmp_path), "--only", "resnet"])
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module("from_torch").main()
    assert exit_.value.code == 2
    assert "cnn-sgd-rank1" in capsys.readouterr().err
