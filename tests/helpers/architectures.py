"""Small models of many kinds in torch and in Flax, and what it takes to move each.

    python -m tests.helpers.architectures [NAME ...]

prints a table: with one example, how often the Flax model was run and how far its outputs are from
torch's; without one, what had to be answered; and of some the losses of ten steps in JAX, and of
four more in torch after the way back, beside those of the run that stayed.
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
from tests.helpers.zoo import images, sequences

TOLERANCE = 1e-5  # of the largest output
ALWAYS_LAST = 99  # axes: of the twins, whose inputs have their channels last in torch, too


class Case(NamedTuple):
    module: Callable[[], Any]
    flax: Callable[[], Any]
    inputs: tuple[Any, ...]  # their shapes, or numbers of positions of integers below 11
    moved: int = ALWAYS_LAST  # inputs of so many axes have their channels last in Flax
    answers: dict[str, Any] | None = None  # what `pair` has to be told without an example


def twin(body, *inputs, **answers):
    """Makes a case of one function of layers and inputs, with the same names on both sides."""
    return Case(partial(TorchModel, body), partial(FlaxModel, body), inputs, answers=answers)


SMALL = {"growth": 8, "config": (2, 2, 2), "first": 16, "bn_size": 2}
LARGER = {"growth": 32, "config": (2, 3, 4, 3), "first": 64, "bn_size": 4}
IMAGE, IDS, SERIES, ROW = (2, 8, 8, 3), 6, (2, 5, 6), (2, 6)
CASES = {
    "VGG": twin(models.vgg, IMAGE, flatten={"7": (16, 2, 2)}),
    "ResNet-18": twin(partial(models.resnet, bottleneck=False), IMAGE, plain=True),
    "ResNet-50": twin(partial(models.resnet, bottleneck=True), IMAGE, plain=True),
    "DenseNet, small": twin(partial(models.densenet, **SMALL), IMAGE, plain=True),
    "DenseNet-121": twin(partial(models.densenet, **LARGER), IMAGE, plain=True),
    "MobileNet": twin(models.mobilenet, IMAGE, plain=True),
    "EfficientNet": twin(models.efficientnet, IMAGE, plain=True),
    "ConvNeXt": twin(models.convnext, IMAGE, plain=True),
    "U-Net": twin(models.unet, IMAGE),
    "pooled head with tabular columns": twin(models.tabular, IMAGE, (2, 48), plain=True),
    "BatchNorm everywhere": twin(models.normed, IMAGE, flatten={"5": (8, 4, 4)}),
    "generator": twin(models.generator, ROW, unflatten={"0": (8, 4, 4)}, flatten={}),
    "two heads of convolutions": twin(models.two_heads, IMAGE, flatten={"policy_fc": (2, 8, 8)}),
    "ViT": twin(models.vit, IMAGE, plain=True),
    "LSTM": twin(partial(models.recurrent, kind="LSTM"), SERIES),
    "GRU": twin(partial(models.recurrent, kind="GRU"), SERIES),
    "GPT-2": twin(models.gpt2, IDS, conv1d=r".*attn\.c_proj"),
    "BERT": twin(models.bert, IDS, plain=True),
    "Whisper": twin(models.whisper, (2, 12, 4), IDS, plain=True),
    "T5": twin(models.t5, IDS, IDS, plain=True),
}
CASES |= {name: Case(*case) for name, case in (images.CASES | sequences.CASES).items()}
# They train for the table, too.
TRAINED = (
    *("VGG", "GPT-2", "ResNet-18", "T5", "LSTM", "MLP of colour images", "autoencoder"),
    *("ResNet of Flax's example", "FCN-8s", "decoder with cross attention", "Llama, tied", "DLRM"),
)


class Built(NamedTuple):
    """A torch module with values of its own, the Flax module, inputs, and variables of Flax."""

    module: Any
    flax: Any
    inputs: list[np.ndarray]
    flax_inputs: list[np.ndarray]
    like: Any

    def example(self):
        """Returns inputs and outputs of the torch module."""
        outputs = self.module(*map(torch.from_numpy, self.inputs))
        return tuple(self.inputs), outputs.detach().numpy()

    def outputs(self, variables):
        """Returns the outputs of both, in Flax's layout."""
        ours = np.asarray(jax.jit(self.flax.apply)(variables, *self.flax_inputs))
        _, theirs = self.example()
        if theirs.shape != ours.shape:
            theirs = np.moveaxis(theirs, 1, -1)
        return theirs, ours

    def difference(self, variables):
        theirs, ours = self.outputs(variables)
        return np.abs(ours - theirs).max() / np.abs(theirs).max()


def build(name):
    case = CASES[name]
    random = np.random.default_rng(0)
    rows = [shape[0] for shape in case.inputs if not isinstance(shape, int)] or [3]
    inputs, flax_inputs = [], []
    for shape in case.inputs:
        if isinstance(shape, int):
            values = random.integers(11, size=(rows[0], shape))
        else:
            values = random.standard_normal(shape).astype(np.float32)
        inputs.append(values)
        is_map = values.ndim >= case.moved and values.dtype == np.float32
        flax_inputs.append(np.moveaxis(values, 1, -1) if is_map else values)
    torch.manual_seed(0)
    module, flax = case.module(), case.flax()
    if case.answers is not None:
        module(*map(torch.from_numpy, inputs))  # a twin makes its layers now
    randomize(module.eval())
    like = jax.eval_shape(flax.init, jax.random.key(0), *flax_inputs)
    return Built(module, flax, inputs, flax_inputs, like)


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
    built = build(name)
    optimizer = optimizer_of(built.module)
    train(built.module, optimizer, built.inputs, steps[0])
    losses = []
    for step in range(steps[1] + steps[2]):
        move_weights(built.module, 1_000 * seed + step)
        losses += train(built.module, optimizer, built.inputs, 1)
    return np.array(losses)


def there_and_back(name, steps=(2, 10, 4)):
    """Returns the losses of a run that moves to JAX and back, and of those that stay."""
    built = build(name)
    module, flax, inputs = built.module, built.flax, built.inputs
    optimizer = optimizer_of(module)
    train(module, optimizer, inputs, steps[0])
    with tempfile.TemporaryDirectory() as folder:
        document = {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(document, f"{folder}/run.pt")
        checkpoint = torch_bridge.load(f"{folder}/run.pt")
    evidence = {"apply": flax.apply, "example": built.example()}
    stayed = train(module, optimizer, inputs, steps[1] + steps[2])
    pairs = torch_bridge.pair(checkpoint.model, built.like, **evidence)
    variables, transformation, opt_state, _ = torch_bridge.to_flax(
        checkpoint, built.like, pairs=pairs
    )
    params = variables["params"]
    rest = {key: value for key, value in variables.items() if key != "params"}

    def loss(params, inputs):
        return (flax.apply({**rest, "params": params}, *inputs) ** 2).mean()

    batches = [built.flax_inputs] * steps[1]
    params, opt_state, moved = steps_in_jax(loss, transformation, params, opt_state, batches)
    back = torch_bridge.to_torch({**rest, "params": params}, opt_state, checkpoint, pairs=pairs)
    module = build(name).module
    module.load_state_dict(back["state_dict"])
    optimizer = optimizer_of(module)
    optimizer.load_state_dict(back["optimizer"])
    moved += train(module, optimizer, inputs, steps[2])
    controls = [run_that_stays(name, steps, seed) for seed in range(3)]
    return Losses(np.array(moved), np.array(stayed), controls)


def without_an_example(built):
    """Says what a conversion without an example comes to."""
    state = built.module.state_dict()
    for answer in ({}, {"plain": True}):
        try:
            variables = torch_bridge.params_from_torch(state, built.like, **answer)
        except torch_bridge.CheckpointMismatch as error:
            questions = len(error.ambiguous) + len(error.missing) + len(error.unexpected)
            continue
        difference = built.difference(variables)
        if not answer:
            return f"nothing asked, {difference:.0e}"
        if difference < TOLERANCE:
            return f"plain=True, {difference:.0e}"
        break
    return f"{questions} questions"


def row(name):
    """Makes a line of the table."""
    built = build(name)
    state = built.module.state_dict()
    evidence = {"apply": built.flax.apply, "example": built.example()}
    variables = torch_bridge.params_from_torch(state, built.like, **evidence)
    cells = [name, f"{built.difference(variables):.0e}", without_an_example(built)]
    losses = ["", ""]
    if name in TRAINED:
        moved, stayed, _ = there_and_back(name)
        relative = np.abs(moved / stayed - 1)
        losses = [f"{relative[:10].max():.0e}", f"{relative[10:].max():.0e}"]
    return f"| {' | '.join(cells + losses)} |"


def main(names):
    print(
        "| architecture | outputs, with an example | without | 10 steps in JAX | 4 back |\n"
        "|---|---|---|---|---|"
    )
    for name in names or CASES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
