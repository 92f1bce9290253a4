"""What `save_checkpoint` records of a run of the example."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn as tnn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.bridge import values
from torch_bridge import CheckpointMismatch, load, save_checkpoint


def extremes(values):
    """Returns the four largest and the four smallest values."""
    ordered = np.sort(np.asarray(values, np.float32).ravel())
    return np.concatenate([ordered[:-5:-1], ordered[:4]])


def recorded(path, module, *inputs):
    """Saves a module with an example, and loads the file."""
    save_checkpoint(path / "x.pt", DistributedDataParallel(module), None, example=inputs)
    torch.load(path / "x.pt", weights_only=True)
    return load(path / "x.pt")


class Functional(tnn.Module):
    """Calls layers in another order than it makes them, and functions instead of layers."""

    def __init__(self):
        super().__init__()
        self.last = tnn.Linear(4, 2)
        self.first = tnn.Linear(3, 4)
        self.unused = tnn.Linear(3, 4).requires_grad_(False)
        self.matrix = tnn.Parameter(torch.randn(4, 4))
        self.alias = self.first

    def forward(self, x):
        x = tnn.functional.linear(x, self.first.weight, self.first.bias)
        return self.last(torch.relu(x) @ self.matrix.T)


ROWS = values(5, 3)


def test_the_order_and_the_inputs_are_those_of_the_run(alone, tmp_path):
    module = Functional()
    checkpoint = recorded(tmp_path, module, torch.from_numpy(ROWS))
    calls = checkpoint.calls
    order = ("first.weight", "alias.weight", "first.bias", "alias.bias", "matrix", "last.weight")
    assert tuple(calls) == (*order, "last.bias")
    hidden = module.first(torch.from_numpy(ROWS)).relu().detach()
    assert_array_equal(calls["first.weight"], extremes(ROWS))
    assert_array_equal(calls["alias.weight"], extremes(ROWS))
    assert_array_equal(calls["matrix"], extremes(hidden))
    assert np.isnan(calls["first.bias"]).all()
    inputs, outputs, same = checkpoint.recorded_example
    assert same is calls
    assert (len(inputs), outputs.shape) == (1, (5, 2))


def test_a_module_that_fails_leaves_no_recorder(alone, tmp_path):
    ddp = DistributedDataParallel(tnn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="does not run on `example`"):
        save_checkpoint(tmp_path / "x.pt", ddp, None, example=torch.ones(2, 7))
    calls = recorded(tmp_path, tnn.Linear(3, 2), torch.ones(2, 3)).calls
    assert set(calls) == {"weight", "bias"}


def test_compiled_modules_and_modules_under_activation_checkpoints(alone, tmp_path):
    module = tnn.Sequential(tnn.Linear(3, 4), tnn.ReLU(), tnn.Linear(4, 2))
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(2, 3))
    calls = recorded(tmp_path, compiled, torch.ones(2, 3)).calls
    assert list(calls) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_array_equal(calls["0.weight"], np.ones(8))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_have_no_record(alone, tmp_path):
    module = torch.jit.script(tnn.Sequential(tnn.Linear(3, 4)))
    assert recorded(tmp_path, module, torch.ones(2, 3)).calls == {}


@pytest.mark.parametrize(
    "calls",
    [
        [],
        {"names": ["weight"]},
        {"names": "ab", "extremes": torch.zeros(2, 8)},
        {"names": ["weight", 3], "extremes": torch.zeros(2, 8)},
        {"names": ["weight", "weight"], "extremes": torch.zeros(2, 8)},
        {"names": ["weight"], "extremes": torch.zeros(2, 8)},
        {"names": ["weight"], "extremes": torch.zeros(1, 7)},
        {"names": ["weight"], "extremes": torch.zeros(1, 8, dtype=torch.int64)},
    ],
)
def test_records_of_another_form_are_refused_in_one_sentence(alone, tmp_path, calls):
    recorded(tmp_path, tnn.Linear(3, 2), torch.ones(2, 3))
    document = torch.load(tmp_path / "x.pt", weights_only=True)
    document["example"]["calls"] = calls
    torch.save(document, tmp_path / "x.pt")
    with pytest.raises(CheckpointMismatch, match="`calls` of the example must have `names`"):
        load(tmp_path / "x.pt")
