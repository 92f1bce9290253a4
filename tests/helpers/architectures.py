"""Small models of many kinds in torch and in Flax, and the arguments that convert each of them.

    python -m tests.helpers.architectures [NAME ...]

prints a table: with an example, how far the Flax outputs are from torch's; without an example, the
arguments or the questions. For some models it trains ten steps in JAX and four more in torch after
the way back, and prints how far the losses are from those of a run that stays in torch.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import torch_bridge
from tests.helpers.bridge import move_weights, randomize, steps_in_jax, steps_in_torch
from tests.helpers.two_frameworks import NEVER, FlaxModel, TorchModel
from tests.helpers.zoo import images, sequences


class Case(NamedTuple):
    body: Callable[..., Any]
    inputs: tuple[Any, ...]  # shapes in torch; a number is the length of rows of integers below 11
    names: dict[str, str] | None = None  # torch name -> Flax name; None: torch's names
    declared: str = ""  # layers that torch declares before the others
    channels: int = NEVER  # inputs with at least as many axes have their channels first in torch
    answers: dict[str, Any] | None = None  # the arguments that `pair` needs without an example


def twin(body, *inputs, **answers):
    """Makes a case with equal names on both sides, and with the channels last on both sides."""
    return Case(body, inputs, answers=answers)


def user(body, *inputs, names=None, declared="", channels=4):
    """Makes a case in the style of a Flax user, in which Flax numbers the layers."""
    return Case(body, inputs, names or {}, declared, channels)


SMALL = {"growth": 8, "config": (2, 2, 2), "first": 16, "bn_size": 2}
LARGER = {"growth": 32, "config": (2, 3, 4, 3), "first": 64, "bn_size": 4}
IMAGE = (2, 8, 8, 3)
IDS = 6
STEPS = (2, 5, 6)
ROW = (2, 6)
PICTURE = (3, 3, 6, 6)
SERIES = (3, 6, 8)
SOUND = (2, 4, 12)
WAVENET = {"channels": 3, "declared": "start filter_convs gate_convs residual_convs"}
CASES = {
    "VGG": twin(images.vgg, IMAGE, flatten={"7": (16, 2, 2)}),
    "ResNet-18": twin(partial(images.resnet, bottleneck=False), IMAGE, plain=True),
    "ResNet-50": twin(partial(images.resnet, bottleneck=True), IMAGE, plain=True),
    "DenseNet, small": twin(partial(images.densenet, **SMALL), IMAGE, plain=True),
    "DenseNet-121": twin(partial(images.densenet, **LARGER), IMAGE, plain=True),
    "MobileNet": twin(images.mobilenet, IMAGE, plain=True),
    "EfficientNet": twin(images.efficientnet, IMAGE, plain=True),
    "ConvNeXt": twin(images.convnext, IMAGE, plain=True),
    "U-Net": twin(images.unet, IMAGE),
    "pooled head with tabular columns": twin(images.tabular, IMAGE, (2, 48), plain=True),
    "BatchNorm everywhere": twin(images.normed, IMAGE, flatten={"5": (8, 4, 4)}),
    "generator": twin(images.generator, ROW, unflatten={"0": (8, 4, 4)}, flatten={}),
    "two heads of convolutions": twin(images.two_heads, IMAGE, flatten={"policy_fc": (2, 8, 8)}),
    "ViT": twin(sequences.vit, IMAGE, plain=True),
    "LSTM": twin(partial(sequences.recurrent, kind="LSTM"), STEPS),
    "GRU": twin(partial(sequences.recurrent, kind="GRU"), STEPS),
    "GPT-2": twin(sequences.gpt2, IDS, conv1d=r".*attn\.c_proj"),
    "BERT": twin(sequences.bert, IDS, plain=True),
    "Whisper": twin(sequences.whisper, (2, 12, 4), IDS, plain=True),
    "T5": twin(sequences.t5, IDS, IDS, plain=True),
    "MLP of colour images": user(images.colour_mlp, PICTURE),
    # linen numbers nested calls from the outside.
    "MLP in nested calls": user(
        images.nested_mlp, (4, 12), names={"0": "Dense_2", "2": "Dense_1", "4": "Dense_0"}
    ),
    "C3D": user(images.c3d, (2, 3, 4, 4, 4)),
    "ResNet of Flax's example": user(
        partial(images.resnet, bottleneck=False),
        PICTURE,
        names={
            "conv1": "conv_init",
            "bn1": "bn_init",
            "layer2.0.downsample.0": "conv_proj",
            "layer2.0.downsample.1": "norm_proj",
        },
    ),
    "depthwise with GroupNorm, nested": user(
        images.separable,
        (2, 8, 6, 6),
        names={
            "net.1": "GroupNorm_1",
            "net.4": "GroupNorm_0",
            "net.7": "GroupNorm_3",
            "net.10": "GroupNorm_2",
        },
    ),
    "blocks numbered backwards": user(
        images.stages,
        (2, 6, 5, 5),
        names={
            "blocks.0": "blocks_3",
            "blocks.1": "blocks_2",
            "blocks.2": "blocks_1",
            "blocks.3": "blocks_0",
        },
    ),
    "FCN-8s": user(
        images.fcn8s,
        (2, 3, 8, 8),
        declared="score_fr score_pool3 score_pool4 upscore2 upscore8 upscore_pool4",
    ),
    "autoencoder": user(images.autoencoder, (2, 3, 8, 8)),
    "DCGAN's generator": user(images.dcgan, (3, 8)),
    "conditional discriminator": user(images.conditional, PICTURE, 1),
    "projection discriminator": user(images.projection, PICTURE, 1, declared="c1 l5 l_y"),
    "U-Net, declared in another order": user(
        images.unet, (2, 3, 8, 8), declared="up merge down2 down1 out"
    ),
    "MLP-Mixer": user(images.mixer, PICTURE),
    "PointNet": user(images.pointnet, (2, 3, 7), channels=3, declared="conv1 conv2 fc1 fc2"),
    "Siamese": user(images.siamese, (2, 6, 8, 8), (2, 6, 8, 8)),
    "PReLU and ParameterList": user(
        images.rectified, PICTURE, names={"mixes.0": "mix0", "mixes.1": "mix1"}
    ),
    "CRNN": user(images.crnn, (2, 3, 6, 5)),
    "decoder with cross attention": user(sequences.decoder, SERIES, SERIES),
    "BERT of transformers": user(partial(sequences.bert, in_one=True), IDS),
    "Llama, tied": user(partial(sequences.llama, tied=True), IDS),
    "Llama": user(partial(sequences.llama, tied=False), IDS),
    "packed projections": user(sequences.packed, SERIES),
    "Swin": user(sequences.swin, (2, 3, 8, 8)),
    "CLIP": user(sequences.clip, (3, 3, 6, 6), IDS, names={"visual.proj": "image_projection"}),
    "Mamba": user(sequences.mamba, SERIES, names={"A_log": "log_a", "D": "skip"}),
    "WaveNet": user(partial(sequences.wavenet, normed=False), SOUND, **WAVENET),
    "WaveNet with weight_norm": user(partial(sequences.wavenet, normed=True), SOUND, **WAVENET),
    "DLRM": user(sequences.dlrm, (3, 8), 3, declared="emb_l"),
    "LoRA": user(
        sequences.lora,
        (3, 8),
        names={
            "layers.0.lora_A.default": "lora_0_a",
            "layers.0.lora_B.default": "lora_0_b",
            "layers.1.lora_A.default": "lora_1_a",
            "layers.1.lora_B.default": "lora_1_b",
        },
    ),
    "biaffine": user(sequences.biaffine, SERIES, declared="mlp_dep"),
    "GRUs with attention": user(sequences.translator, IDS, IDS, declared="decoder encoder attn"),
    "TextCNN": user(sequences.text_cnn, IDS),
    "highway": user(sequences.highway, (4, 8), declared="nonlinear"),
    "graph convolution": user(sequences.graph, (3, 6, 8), (3, 6, 6)),
}
# The models that the table also trains.
TRAINED = (
    *("VGG", "GPT-2", "ResNet-18", "T5", "LSTM", "MLP of colour images", "autoencoder"),
    *("ResNet of Flax's example", "FCN-8s", "decoder with cross attention", "Llama, tied", "DLRM"),
)


class Built(NamedTuple):
    """A torch module with random weights, its Flax module, the inputs, and the Flax shapes."""

    module: Any
    flax: Any
    inputs: list[np.ndarray]
    flax_inputs: list[np.ndarray]
    like: Any

    def example(self):
        """Returns the inputs and the outputs of the torch module."""
        outputs = self.module(*map(torch.from_numpy, self.inputs))
        return tuple(self.inputs), outputs.detach().numpy()

    def difference(self, variables):
        """Returns the largest difference of the outputs, relative to the largest output."""
        ours = np.asarray(jax.jit(self.flax.apply)(variables, *self.flax_inputs))
        _, theirs = self.example()
        if theirs.shape != ours.shape:
            theirs = np.moveaxis(theirs, 1, -1)
        return np.abs(ours - theirs).max() / np.abs(theirs).max()


def build(name):
    case = CASES[name]
    random = np.random.default_rng(0)
    rows = [shape[0] for shape in case.inputs if not isinstance(shape, int)] or [3]
    inputs = []
    flax_inputs = []
    for shape in case.inputs:
        if isinstance(shape, int):
            values = random.integers(11, size=(rows[0], shape))
        else:
            values = random.standard_normal(shape).astype(np.float32)
        inputs.append(values)
        is_map = values.ndim >= case.channels and values.dtype == np.float32
        flax_inputs.append(np.moveaxis(values, 1, -1) if is_map else values)
    torch.manual_seed(0)
    module = TorchModel(case.body, case.declared, case.channels)
    flax = FlaxModel(case.body, names=case.names)
    module(*map(torch.from_numpy, inputs))  # the first call makes the layers
    randomize(module.eval())
    like = jax.eval_shape(flax.init, jax.random.key(0), *flax_inputs)
    return Built(module, flax, inputs, flax_inputs, like)


class Training:
    """Trains a torch module on its own inputs with AdamW."""

    def __init__(self, built):
        self.module = built.module
        self.optimizer = torch.optim.AdamW(
            self.module.named_parameters(), lr=1e-3, weight_decay=0.0
        )
        self.inputs = [torch.from_numpy(x) for x in built.inputs]

    def loss(self, inputs):
        return (self.module(*inputs) ** 2).mean()

    def steps(self, count):
        return steps_in_torch(self.loss, self.optimizer, [self.inputs] * count)


def run_that_stays(name, steps, seed):
    """Returns the losses of a control: before each step its weights change by one rounding."""
    training = Training(build(name))
    training.steps(steps[0])
    losses = []
    for step in range(steps[1] + steps[2]):
        move_weights(training.module, 1_000 * seed + step)
        losses += training.steps(1)
    return np.array(losses)


def there_and_back(name, steps=(2, 10, 4)):
    """Returns the losses after the first move: of a moved run, of a run that stays, of controls."""
    built = build(name)
    training = Training(built)
    training.steps(steps[0])
    state = {"state_dict": built.module.state_dict(), "optimizer": training.optimizer.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/run.pt")
        checkpoint = torch_bridge.load(f"{folder}/run.pt")
    apply = built.flax.apply
    example = built.example()
    stayed = training.steps(steps[1] + steps[2])
    run = torch_bridge.to_flax(checkpoint, built.like, apply=apply, example=example)
    variables = dict(run.params)
    params = variables.pop("params")

    def loss(params, inputs):
        return (apply(variables | {"params": params}, *inputs) ** 2).mean()

    batches = [built.flax_inputs] * steps[1]
    params, opt_state, moved = steps_in_jax(
        loss, run.transformation, params, run.opt_state, batches
    )
    variables["params"] = params
    back = torch_bridge.to_torch(variables, opt_state, checkpoint, pairs=run.pairs)
    returned = Training(build(name))
    returned.module.load_state_dict(back["state_dict"])
    returned.optimizer.load_state_dict(back["optimizer"])
    moved += returned.steps(steps[2])
    controls = [run_that_stays(name, steps, seed) for seed in range(3)]
    return np.array(moved), np.array(stayed), controls


def without_an_example(built):
    """Returns the table's cell for a conversion without an example."""
    state = built.module.state_dict()
    for answer in ({}, {"plain": True}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                variables = torch_bridge.params_from_torch(state, built.like, **answer)
            except torch_bridge.CheckpointMismatch as error:
                questions = len(error.ambiguous) + len(error.missing) + len(error.unexpected)
                continue
        difference = built.difference(variables)
        if not answer:
            return f"nothing asked, {difference:.0e}"
        names = " and names what it assumes" if caught else ""
        return f"plain=True gives {difference:.0e}{names}"
    return f"{questions} questions"


def row(name):
    """Returns one line of the table."""
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
