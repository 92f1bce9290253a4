"""What the torch models of `architectures` and their Flax twins are made of."""

import flax.linen as nn
from torch import nn as tnn


class Net(tnn.Module):
    """Layers by name, and a forward pass of them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def flat(name):
    return name.replace(".", "_")


def conv(x, name, out, k, s=1, p=0, groups=1, bias=True):
    axes = x.ndim - 2
    return nn.Conv(
        out, (k,) * axes, s, padding=p, feature_group_count=groups, use_bias=bias, name=flat(name)
    )(x)


def dense(x, name, out):
    return nn.Dense(out, name=flat(name))(x)


def bn(x, name):
    return nn.BatchNorm(True, epsilon=1e-5, name=flat(name))(x)


def ln(x, name, epsilon=1e-5):
    return nn.LayerNorm(epsilon=epsilon, name=flat(name))(x)


def embed(x, name, size, width):
    return nn.Embed(size, width, name=flat(name))(x)


def pool(x):
    return x.mean((1, 2))


def gelu(x):
    return nn.gelu(x, approximate=False)


def c(ins, out, k, s=1, p=0, groups=1, bias=False):
    return tnn.Conv2d(ins, out, k, s, p, groups=groups, bias=bias)
