"""Small torch models of many kinds, their Flax twins, and what has to be said to move each.

    python tests/support/architectures.py [NAME ...]

prints a table: answers needed, difference of the outputs, of ten steps in JAX and of four more in
torch after the way back. Layers that torch calls ``layer1.0.conv1`` are ``layer1_0_conv1`` in Flax.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import architecture_images as images
import architecture_sequences as sequences
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from architecture_parts import Net, dense
from torch import nn as tnn

import torch_bridge


@dataclasses.dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
      torch: Makes the module.
      flax: The forward pass of its twin, of the same inputs (images channels last).
      inputs: Shapes of the inputs in torch; integers below 11 where the last axis is a string.
      answers: What `pair` has to be told.
    """

    torch: Callable[[], tnn.Module]
    flax: Callable[..., Any]
    inputs: tuple[Any, ...]
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)


class Twin(nn.Module):
    """A function of inputs that makes its layers by name."""

    body: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs):
        return self.body(*inputs)


def frozen_and_unused():
    net = Net(
        lambda self, x: self.head(torch.relu(self.frozen(x))),
        frozen=tnn.Linear(6, 10),
        unused=tnn.Linear(7, 9),
        head=tnn.Linear(10, 5),
    )
    net.frozen.requires_grad_(False)
    return net


def flax_frozen_and_unused(x):
    dense(jnp.zeros((1, 7)), "unused", 9)
    return dense(nn.relu(dense(x, "frozen", 10)), "head", 5)


SMALL = {"growth": 8, "config": (2, 2, 2), "first": 16, "bn_size": 2}
LARGER = {"growth": 32, "config": (2, 3, 4, 3), "first": 64, "bn_size": 4}
IMAGE, IDS = (2, 3, 8, 8), (2, 6, "ids")
SQUARES = {"conv1d": ""}
CASES = {
    "VGG": Case(images.vgg, images.flax_vgg, (IMAGE,), {"flatten": {"7": (16, 2, 2)}}),
    "ResNet-18": Case(
        lambda: images.resnet(False), partial(images.flax_resnet, bottleneck=False), (IMAGE,)
    ),
    "ResNet-50": Case(
        lambda: images.resnet(True), partial(images.flax_resnet, bottleneck=True), (IMAGE,)
    ),
    "DenseNet, small": Case(
        lambda: images.densenet(**SMALL),
        partial(images.flax_densenet, **SMALL),
        (IMAGE,),
        {"flatten": {"classifier": None}},
    ),
    "DenseNet-121": Case(
        lambda: images.densenet(**LARGER),
        partial(images.flax_densenet, **LARGER),
        (IMAGE,),
        {"flatten": {"classifier": None}},
    ),
    "MobileNet": Case(images.mobilenet, images.flax_mobilenet, (IMAGE,)),
    "ConvNeXt": Case(images.convnext, images.flax_convnext, (IMAGE,)),
    "U-Net": Case(images.unet, images.flax_unet, (IMAGE,)),
    "pooled head with tabular columns": Case(
        images.tabular, images.flax_tabular, (IMAGE, (2, 48)), {"flatten": {"fc": None}}
    ),
    "BatchNorm everywhere": Case(
        images.normed, images.flax_normed, (IMAGE,), {"flatten": {"5": (8, 4, 4)}}
    ),
    "generator": Case(
        images.generator, images.flax_generator, ((2, 6),), {"unflatten": {"0": (8, 4, 4)}}
    ),
    "two heads of convolutions": Case(
        images.two_heads,
        images.flax_two_heads,
        (IMAGE,),
        {"flatten": {"policy_fc": (2, 8, 8), "value_fc": None}},
    ),
    "ViT": Case(sequences.vit, sequences.Tokens(), (IMAGE,)),
    "LSTM": Case(
        lambda: sequences.recurrent("lstm"),
        partial(sequences.flax_recurrent, kind="lstm"),
        ((2, 5, 6),),
    ),
    "GRU": Case(
        lambda: sequences.recurrent("gru"),
        partial(sequences.flax_recurrent, kind="gru"),
        ((2, 5, 6),),
    ),
    "GPT-2": Case(sequences.gpt2, sequences.flax_gpt2, (IDS,), {"conv1d": r".*attn\.c_proj"}),
    "BERT": Case(sequences.bert, sequences.flax_bert, (IDS,), SQUARES),
    "Whisper": Case(sequences.whisper, sequences.flax_whisper, ((2, 4, 12), IDS), SQUARES),
    "frozen and unused parts": Case(frozen_and_unused, flax_frozen_and_unused, ((2, 6),)),
}


def build(name):
    """The torch module with values of its own, the Flax module, and inputs for both."""
    case = CASES[name]
    torch.manual_seed(0)
    module = case.torch().eval()
    with torch.no_grad():
        for key, value in module.state_dict().items():
            if value.is_floating_point():
                drawn = torch.rand(value.shape) + 0.5 if "var" in key else torch.randn(value.shape)
                value.copy_(drawn if value.ndim < 2 else drawn * value[0].numel() ** -0.5)
    random = np.random.default_rng(0)
    theirs = [
        random.integers(11, size=shape[:-1])
        if shape[-1] == "ids"
        else random.standard_normal(shape).astype(np.float32)
        for shape in case.inputs
    ]
    # Whisper's sound is (channels, time) in torch; sequences and rows are alike in both.
    moved = {4, 3} if name == "Whisper" else {4}
    ours = [np.moveaxis(x, 1, -1) if x.ndim in moved else x for x in theirs]
    twin = case.flax if isinstance(case.flax, nn.Module) else Twin(case.flax)
    return module, twin, [torch.from_numpy(x) for x in theirs], [jnp.asarray(x) for x in ours]


def outputs(module, twin, variables, theirs, ours):
    """Of both, as arrays of one shape (images channels first)."""
    y = np.asarray(jax.jit(twin.apply)(variables, *ours))
    y = np.moveaxis(y, -1, 1) if y.ndim == 4 else y
    return module(*theirs).detach().numpy(), y


def train_torch(module, optimizer, inputs, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(*inputs) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def there_and_back(name, steps=(2, 10, 4)):
    """Largest relative difference of the losses in JAX and after the way back."""
    module, twin, theirs, ours = build(name)

    def optimizer_of(module):
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)

    optimizer = optimizer_of(module)
    train_torch(module, optimizer, theirs, steps[0])
    arrays = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    for key, value in module.state_dict().items():  # what is tied stays tied
        for other, value_ in module.state_dict().items():
            if value.data_ptr() == value_.data_ptr() and value.numel():
                arrays[key] = arrays[other]
                break
    state = copy.deepcopy(optimizer.state_dict())
    checkpoint = torch_bridge.Checkpoint(arrays, optimizer=state)
    stayed = train_torch(module, optimizer, theirs, steps[1] + steps[2])
    like = jax.eval_shape(twin.init, jax.random.key(0), *ours)
    answers = CASES[name].answers
    variables, transformation, opt_state, _ = torch_bridge.to_flax(checkpoint, like, **answers)
    params = variables["params"]
    rest = {key: value for key, value in variables.items() if key != "params"}

    def step(params, opt_state):
        def loss_fn(params):
            return (twin.apply({**rest, "params": params}, *ours) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    lifted = jax.vmap(step, in_axes=None, out_axes=0, axis_name="data", axis_size=1)
    moved, first = [], jax.jit(lambda *a: jax.tree.map(lambda x: x[0], lifted(*a)))
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps[1]):
            params, opt_state, loss = first(params, opt_state)
            moved.append(float(loss))
    back = torch_bridge.to_torch({**rest, "params": params}, opt_state, checkpoint, **answers)
    module = build(name)[0]
    module.load_state_dict(back["state_dict"])
    optimizer = optimizer_of(module)
    optimizer.load_state_dict(back["optimizer"])
    moved += train_torch(module, optimizer, theirs, steps[2])
    apart = np.abs(np.array(moved) / np.array(stayed) - 1)
    return apart[: steps[1]].max(), apart[steps[1] :].max()


def row(name):
    """Of the table: answers, differences of the outputs and of both sets of losses."""
    module, twin, theirs, ours = build(name)
    like = jax.eval_shape(twin.init, jax.random.key(0), *ours)
    answers = CASES[name].answers
    found = torch_bridge.params_from_torch(module.state_dict(), like, **answers)
    a, b = outputs(module, twin, found, theirs, ours)
    said = ", ".join(f"{key}={value!r}" for key, value in answers.items()) or "none"
    apart = (np.abs(a - b).max() / np.abs(a).max(), *there_and_back(name))
    return f"| {name} | {said} | {' | '.join(f'{x:.0e}' for x in apart)} |"


def main(names):
    """Print the table."""
    print(
        "| architecture | answers | outputs | 10 steps in JAX | 4 back in torch |\n"
        "|---|---|---|---|---|"
    )
    for name in names or CASES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
