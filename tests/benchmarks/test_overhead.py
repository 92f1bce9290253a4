"""benchmarks.overhead: the trees are those of the models, the command runs and refuses."""

import json
import math

import pytest

from benchmarks.overhead.trees import TREES
from tests.helpers.paths import ROOT
from tests.helpers.script import python


@pytest.mark.parametrize(
    ("tree", "parameters"),
    [
        ("mlp", 10_000_000),
        ("resnet50", 25_557_032),  # torchvision's count
        ("gpt2-small", 124_439_808),  # the released checkpoints'
        ("gpt2-medium", 354_823_168),
    ],
)
def test_a_tree_has_as_many_parameters_as_its_model(tree, parameters):
    shapes = TREES[tree]()
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


@pytest.mark.torch
def test_a_small_run_measures_both_frameworks_and_writes_its_results(tmp_path):
    given = ["--trees", "mlp", "--ranks", "2", "--steps", "2", "--out", tmp_path]
    python("-m", "benchmarks.overhead", *given, cwd=ROOT)
    cases = json.loads((tmp_path / "overhead-cpu.json").read_text())["cases"]
    assert [case["rank"] for case in cases] == [2]
    for case in cases:
        assert case["floor"] > 0
        assert len(case["jax"]["seconds"]) == len(case["torch"]["seconds"]) == 2
        # The sum of gradient and residual takes the gradient's place.
        assert case["jax"]["temporary_bytes"] < 1.1 * 4 * case["words"]
    assert "| mlp (10.0 M, 10 leaves) | 2 |" in (tmp_path / "overhead-cpu.md").read_text()
    assert (tmp_path / "overhead-cpu.png").stat().st_size > 1000
