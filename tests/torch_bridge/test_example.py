"""`save_checkpoint(example=...)`: what is stored, and that the training does not notice."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import torch_files as files
from torch_bridge import CheckpointMismatch, load, save_checkpoint


class Noisy(torch.nn.Module):
    """Dropout, running statistics, a frozen mode, a counter of calls, and several outputs."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, shift=None):
        self.calls += 1
        hidden = self.drop(self.norm(x))
        if not self.training:
            x += 1  # into its argument
        logits = self.head(hidden) + torch.rand(()) * 0
        if shift is not None:
            logits = logits + shift
        return {"logits": logits, "hidden": [hidden], "cache": object()}


@pytest.fixture
def noisy(alone):
    ddp = DistributedDataParallel(Noisy())
    ddp(torch.randn(8, 4))["logits"].sum().backward()
    return ddp


def test_inputs_and_outputs_in_evaluation_mode(noisy, tmp_path):
    path, x, shift = tmp_path / "c.pt", torch.randn(3, 4), torch.tensor(2.0)
    save_checkpoint(path, noisy, None, example=(x, shift))
    inputs, outputs = load(path).example
    np.testing.assert_array_equal(inputs[0], x.numpy())
    np.testing.assert_array_equal(inputs[1], np.float32(2))
    alike = copy.deepcopy(noisy.module).eval()
    expected = alike(x.clone(), shift)
    assert list(outputs) == ["logits", "hidden", "cache"]
    np.testing.assert_array_equal(outputs["logits"], expected["logits"].detach().numpy())
    np.testing.assert_array_equal(outputs["hidden"][0], expected["hidden"][0].detach().numpy())
    assert outputs["cache"] is None
    assert "example" in torch.load(path, weights_only=True)  # which reads it as well


def test_the_training_does_not_notice(noisy, tmp_path):
    module = noisy.module
    module.norm.eval()  # as of a layer that somebody froze
    x = torch.randn(3, 4)
    before = copy.deepcopy(module.state_dict())
    gradient = module.head.weight.grad.clone()
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    given = x.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        save_checkpoint(tmp_path / "c.pt", noisy, None, example=x)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(x, given)
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(module.head.weight.grad, gradient)
    modes = {name: part.training for name, part in module.named_modules()}
    assert modes == {"": True, "norm": False, "drop": True, "head": True}
    assert load(tmp_path / "c.pt").example[1]["logits"].dtype == np.float32


def test_a_model_in_bfloat16_and_one_tensor(alone, tmp_path):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 3).bfloat16())
    save_checkpoint(tmp_path / "c.pt", ddp, None, example=torch.ones(2, 4).bfloat16())
    (given,), outputs = load(tmp_path / "c.pt").example
    assert given.dtype == outputs.dtype == ml_dtypes.bfloat16
    save_checkpoint(tmp_path / "c.pt", ddp, None)
    assert load(tmp_path / "c.pt").example is None


@pytest.mark.parametrize("example", [3, (), np.ones(3), (torch.ones(1), 2)])
def test_other_examples_are_refused_before_anything_is_sent(noisy, tmp_path, example):
    with pytest.raises(TypeError, match="`example` must be an input of the model"):
        save_checkpoint(tmp_path / "c.pt", noisy, None, example=example)


def test_an_example_that_does_not_run_writes_nothing(noisy, tmp_path):
    with pytest.raises(RuntimeError, match="does not run on `example` in evaluation mode"):
        save_checkpoint(tmp_path / "c.pt", noisy, None, example=torch.ones(3, 5))
    assert noisy.module.training
    assert not list(tmp_path.glob("*.pt"))
    silent = DistributedDataParallel(torch.nn.Linear(4, 3))
    silent.module.forward = lambda x: None
    with pytest.raises(RuntimeError, match="gives no tensor"):
        save_checkpoint(tmp_path / "c.pt", silent, None, example=torch.ones(3, 4))


BROKEN = [3, [], {"inputs": []}, {"inputs": [], "outputs": 1}, {"inputs": [3], "outputs": 1}]


@pytest.mark.parametrize("example", BROKEN)
def test_a_file_with_another_example_is_refused(tmp_path, example):
    path = tmp_path / "c.pt"
    path.write_bytes(files.saved(files.own_format(example=example)))
    with pytest.raises(CheckpointMismatch, match="`example` must have"):
        load(path)
