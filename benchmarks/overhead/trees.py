"""The shapes of gradient trees of well-known models, for the overhead benchmark."""

from __future__ import annotations

import math

Shapes = dict[str, tuple[int, ...]]


def mlp() -> Shapes:
    """Makes ten million parameters: the perceptron of `benchmarks.cluster`, without its biases."""
    return {f"layer_{i}/kernel": (1000, 1000) for i in range(10)}


def resnet50() -> Shapes:
    """He et al. (2016), 25.6 million parameters; kernels (height, width, in, out) as in Flax."""
    shapes: Shapes = {"stem/conv": (7, 7, 3, 64), "stem/norm/scale": (64,), "stem/norm/bias": (64,)}
    channels = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            name = f"stage_{stage}/block_{block}"
            kernels = {
                "conv_0": (1, 1, channels, width),
                "conv_1": (3, 3, width, width),
                "conv_2": (1, 1, width, 4 * width),
            }
            if block == 0:
                kernels["shortcut"] = (1, 1, channels, 4 * width)
            for layer, kernel in kernels.items():
                shapes[f"{name}/{layer}/kernel"] = kernel
                shapes[f"{name}/{layer}/norm/scale"] = kernel[-1:]
                shapes[f"{name}/{layer}/norm/bias"] = kernel[-1:]
            channels = 4 * width
    return shapes | {"head/kernel": (channels, 1000), "head/bias": (1000,)}


def gpt2(layers: int, width: int) -> Shapes:
    """Radford et al. (2019): 12 layers of 768 are small (124 million), 24 of 1024 medium (355)."""
    shapes: Shapes = {"tokens/embedding": (50257, width), "positions/embedding": (1024, width)}
    kernels = {"qkv": 3, "attention_out": 1, "mlp_in": 4}
    for layer in range(layers):
        name = f"block_{layer}"
        for norm in ("norm_0", "norm_1"):
            shapes |= {f"{name}/{norm}/scale": (width,), f"{name}/{norm}/bias": (width,)}
        for kernel, factor in kernels.items():
            shapes[f"{name}/{kernel}/kernel"] = (width, factor * width)
            shapes[f"{name}/{kernel}/bias"] = (factor * width,)
        shapes[f"{name}/mlp_out/kernel"] = (4 * width, width)
        shapes[f"{name}/mlp_out/bias"] = (width,)
    return shapes | {"final_norm/scale": (width,), "final_norm/bias": (width,)}


def layers(number: int) -> Shapes:
    """Makes equal transformer layers of width 128, to show how compilation grows with depth."""
    shapes: Shapes = {}
    for i in range(number):
        shapes |= {
            f"layer_{i}/norm/scale": (128,),
            f"layer_{i}/qkv/kernel": (128, 384),
            f"layer_{i}/attention_out/kernel": (128, 128),
            f"layer_{i}/mlp_in/kernel": (128, 512),
            f"layer_{i}/mlp_out/kernel": (512, 128),
        }
    return shapes


def torch_layout(shapes: Shapes) -> Shapes:
    """Returns the parameters as torch lays them out: (out, in), (out, in, height, width)."""
    turned = {}
    for name, shape in shapes.items():
        if len(shape) == 4:
            height, width, inputs, outputs = shape
            shape = (outputs, inputs, height, width)
        elif not name.endswith("embedding"):
            shape = shape[::-1]
        turned[name] = shape
    return turned


def size(shapes: Shapes) -> int:
    """Counts the values of a tree."""
    return sum(map(math.prod, shapes.values()))


TREES = {
    "mlp": mlp,
    "resnet50": resnet50,
    "gpt2-small": lambda: gpt2(12, 768),
    "gpt2-medium": lambda: gpt2(24, 1024),
    "gpt2-large": lambda: gpt2(36, 1280),
    "layers-2": lambda: layers(2),
    "layers-20": lambda: layers(20),
    "layers-200": lambda: layers(200),
}
