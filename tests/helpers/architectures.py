"""Small models of many kinds in torch and in Flax, and what has to be said to move each.

    python -m tests.helpers.architectures [NAME ...]

prints a table: answers needed, difference of the outputs, of ten steps in JAX and of four more in
torch after the way back.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import torch_bridge
from tests.helpers import architecture_models as models
from tests.helpers.bridge import move_weights, randomize, steps_in_jax, steps_in_torch
from tests.helpers.two_frameworks import FlaxModel, TorchModel


class Case(NamedTuple):
    body: Callable[..., Any]  # its forward pass, as a function of layers and inputs
    inputs: tuple[Any, ...]  # their shapes, or numbers of positions of integers below 11
    answers: dict[str, Any]  # what `pair` has to be told


SMALL = {"growth": 8, "config": (2, 2, 2), "first": 16, "bn_size": 2}
LARGER = {"growth": 32, "config": (2, 3, 4, 3), "first": 64, "bn_size": 4}
IMAGE, IDS, SERIES, ROW = (2, 8, 8, 3), 6, (2, 5, 6), (2, 6)
PLAIN = {"plain": True}
CASES = {
    "VGG": Case(models.vgg, (IMAGE,), {"flatten": {"7": (16, 2, 2)}, "plain": True}),
    "ResNet-18": Case(partial(models.resnet, bottleneck=False), (IMAGE,), PLAIN),
    "ResNet-50": Case(partial(models.resnet, bottleneck=True), (IMAGE,), PLAIN),
    "DenseNet, small": Case(partial(models.densenet, **SMALL), (IMAGE,), PLAIN),
    "DenseNet-121": Case(partial(models.densenet, **LARGER), (IMAGE,), PLAIN),
    "MobileNet": Case(models.mobilenet, (IMAGE,), PLAIN),
    "EfficientNet": Case(models.efficientnet, (IMAGE,), PLAIN),
    "ConvNeXt": Case(models.convnext, (IMAGE,), PLAIN),
    "U-Net": Case(models.unet, (IMAGE,), {}),
    "pooled head with tabular columns": Case(models.tabular, (IMAGE, (2, 48)), PLAIN),
    "BatchNorm everywhere": Case(models.normed, (IMAGE,), {"flatten": {"5": (8, 4, 4)}}),
    "generator": Case(models.generator, (ROW,), {"unflatten": {"0": (8, 4, 4)}, "plain": True}),
    "two heads of convolutions": Case(
        models.two_heads, (IMAGE,), {"flatten": {"policy_fc": (2, 8, 8)}}
    ),
    "ViT": Case(models.vit, (IMAGE,), PLAIN),
    "LSTM": Case(partial(models.recurrent, kind="LSTM"), (SERIES,), {}),
    "GRU": Case(partial(models.recurrent, kind="GRU"), (SERIES,), {}),
    "GPT-2": Case(models.gpt2, (IDS,), {"conv1d": r".*attn\.c_proj"}),
    "BERT": Case(models.bert, (IDS,), PLAIN),
    "Whisper": Case(models.whisper, ((2, 12, 4), IDS), PLAIN),
    "T5": Case(models.t5, (IDS, IDS), PLAIN),
}


class Built(NamedTuple):
    """A torch module with values of its own, the Flax module, inputs, and variables of Flax."""

    module: TorchModel
    twin: FlaxModel
    inputs: list[np.ndarray]
    like: Any

    def example(self):
        """Inputs and outputs of the torch module."""
        outputs = self.module(*map(torch.from_numpy, self.inputs))
        return tuple(self.inputs), outputs.detach().numpy()

    def outputs(self, variables):
        theirs = self.module(*map(torch.from_numpy, self.inputs)).detach().numpy()
        return theirs, np.asarray(jax.jit(self.twin.apply)(variables, *self.inputs))


def build(name):
    body, shapes, _ = CASES[name]
    random = np.random.default_rng(0)
    inputs = [
        random.integers(11, size=(2, shape))
        if isinstance(shape, int)
        else random.standard_normal(shape).astype(np.float32)
        for shape in shapes
    ]
    torch.manual_seed(0)
    module, twin = TorchModel(body), FlaxModel(body)
    module(*map(torch.from_numpy, inputs))
    randomize(module.eval())
    like = jax.eval_shape(twin.init, jax.random.key(0), *inputs)
    return Built(module, twin, inputs, like)


def optimizer_of(module):
    return torch.optim.AdamW(module.named_parameters(), lr=1e-3, weight_decay=0.0)


def train(module, optimizer, inputs, steps):
    def loss(inputs):
        return (module(*map(torch.from_numpy, inputs)) ** 2).mean()

    return steps_in_torch(loss, optimizer, [inputs] * steps)


class Losses(NamedTuple):
    """The losses after the first move."""

    moved: np.ndarray
    stayed: np.ndarray
    controls: list[np.ndarray]  # of runs that stay, whose weights are moved before each step


def run_that_stays(name, steps, seed):
    module, _, inputs, _ = build(name)
    optimizer = optimizer_of(module)
    train(module, optimizer, inputs, steps[0])
    losses = []
    for step in range(steps[1] + steps[2]):
        move_weights(module, 1_000 * seed + step)
        losses += train(module, optimizer, inputs, 1)
    return np.array(losses)


def there_and_back(name, steps=(2, 10, 4)):
    """Returns the losses of a run that moves to JAX and back, and of those that stay."""
    module, twin, inputs, like = build(name)
    optimizer = optimizer_of(module)
    train(module, optimizer, inputs, steps[0])
    with tempfile.TemporaryDirectory() as folder:
        document = {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(document, f"{folder}/run.pt")
        checkpoint = torch_bridge.load(f"{folder}/run.pt")
    stayed = train(module, optimizer, inputs, steps[1] + steps[2])
    answers = CASES[name].answers
    variables, transformation, opt_state, _ = torch_bridge.to_flax(checkpoint, like, **answers)
    params = variables["params"]
    rest = {key: value for key, value in variables.items() if key != "params"}

    def loss(params, inputs):
        return (twin.apply({**rest, "params": params}, *inputs) ** 2).mean()

    params, opt_state, moved = steps_in_jax(
        loss, transformation, params, opt_state, [inputs] * steps[1]
    )
    back = torch_bridge.to_torch({**rest, "params": params}, opt_state, checkpoint, **answers)
    module = build(name).module
    module.load_state_dict(back["state_dict"])
    optimizer = optimizer_of(module)
    optimizer.load_state_dict(back["optimizer"])
    moved += train(module, optimizer, inputs, steps[2])
    controls = [run_that_stays(name, steps, seed) for seed in range(3)]
    return Losses(np.array(moved), np.array(stayed), controls)


def row(name):
    """Of the table: answers, differences of the outputs and of both sets of losses."""
    built, answers = build(name), CASES[name].answers
    found = torch_bridge.params_from_torch(built.module.state_dict(), built.like, **answers)
    a, b = built.outputs(found)
    said = ", ".join(f"{key}={value!r}" for key, value in answers.items()) or "none"
    losses = there_and_back(name)
    relative = np.abs(losses.moved / losses.stayed - 1)
    apart = (np.abs(a - b).max() / np.abs(a).max(), relative[:10].max(), relative[10:].max())
    return f"| {name} | {said} | {' | '.join(f'{x:.0e}' for x in apart)} |"


def main(names):
    print(
        "| architecture | answers | outputs | 10 steps in JAX | 4 back in torch |\n"
        "|---|---|---|---|---|"
    )
    for name in names or CASES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
