"""Makes a torch model and a Flax model from one function of layers and inputs.

In the function arrays have their channels last; torch's layers get them with the channels first.
The torch layer ``h.0.attn`` is named ``h_0_attn`` in Flax, and a layer whose name is a number gets
Flax's automatic name. With `names`, all layers get automatic names, except for those in `names`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import torch
from torch import nn as tnn
from torch.nn.utils.parametrizations import weight_norm

F = tnn.functional
ONES = nn.initializers.ones
NEVER = 99  # axes


def attend(n, q, k, v, heads=2, bias=None):
    """Computes attention between projections, each (batch, length, width)."""
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k, v))
    weights = n.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        weights = weights + n.asarray(bias)
    y = n.einsum("bhqk,bkhd->bqhd", n.softmax(weights, -1), v)
    return y.reshape(*y.shape[:2], -1)


def projected(n, x, of, name, words, biased=True, **more):
    """Computes attention of `x` to `of`, with four layers that `words` name below `name`."""
    query, key, value, out = (f"{name}.{word}" for word in words)
    q = n.dense(x, query, 8, biased)
    y = attend(n, q, n.dense(of, key, 8, biased), n.dense(of, value, 8, biased), **more)
    return n.dense(y, out, 8, biased)


class TorchModel(tnn.Module):
    """A torch model of `body`, which makes each layer at its first use.

    Layers in `declared` come before all others. Inputs and outputs with at least `channels` axes
    have their channels first.
    """

    def __init__(self, body, declared="", channels=NEVER):
        super().__init__()
        self._body = body
        self._channels = channels
        for name in declared.split():
            self.add_module(name, tnn.Module())

    def forward(self, *inputs):
        inputs = [self._moved(x, 1, -1) for x in inputs]
        return self._moved(self._body(TorchLayers(self), *inputs), -1, 1)

    def _moved(self, x, source, target):
        is_map = x.ndim >= self._channels and x.is_floating_point()
        return x.movedim(source, target) if is_map else x


class FlaxModel(nn.Module):
    body: Callable[..., Any]
    train: bool = False
    names: Mapping[str, str] | None = None

    @nn.compact
    def __call__(self, *inputs):
        return self.body(FlaxLayers(self), *inputs)


class Conv1D(tnn.Module):
    """The Linear layer of transformers, which stores its weight as (in, out)."""

    def __init__(self, ins, out):
        super().__init__()
        self.weight = tnn.Parameter(torch.ones(ins, out))
        self.bias = tnn.Parameter(torch.ones(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class TorchLayers:
    """The layers of a torch module, by name; a layer is made at its first use."""

    max = staticmethod(torch.amax)
    asarray = staticmethod(torch.as_tensor)

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        """Returns a function without parameters from torch."""
        return getattr(F, name, None) or getattr(torch, name)

    def _at(self, name, make, *sizes, **more):
        """Returns the layer with this name; makes it at the first call."""
        parent, _, last = name.rpartition(".")
        node = self._at(parent, tnn.Module) if parent else self.module
        layer = getattr(node, last, None)
        only_declared = type(layer) is tnn.Module and make is not tnn.Module
        if layer is None or only_declared:
            layer = make(*sizes, **more)
            setattr(node, last, layer)
        return layer

    def _of_map(self, x, name, make, *sizes, **more):
        return self._at(name, make, x.shape[-1], *sizes, **more)(x.movedim(-1, 1)).movedim(1, -1)

    def block(self, name, body, *inputs):
        return body(TorchLayers(self._at(name, tnn.Module)), *inputs)

    def conv(self, x, name, out, k, s=1, p=0, groups=1, bias=True, dilation=1, normed=False):
        plain = (tnn.Conv1d, tnn.Conv2d, tnn.Conv3d)[x.ndim - 3]

        def make(*sizes):
            layer = plain(*sizes, dilation, groups, bias)
            return weight_norm(layer) if normed else layer

        return self._of_map(x, name, make, out, k, s, p)

    def pointwise(self, x, name, out):
        """Applies a convolution with a kernel of size 1, which is a Dense in Flax."""
        return self.conv(x, name, out, 1)

    def rows_conv(self, x, name, out, k):
        """Applies a Conv2d over whole rows, whose values are channels in Flax."""
        layer = self._at(name, tnn.Conv2d, 1, out, (k, x.shape[-1]))
        return layer(x[:, None])[..., 0].movedim(1, -1)

    def conv_transpose(self, x, name, out, k, s=2, p=0, bias=True):
        return self._of_map(x, name, tnn.ConvTranspose2d, out, k, s, p, bias=bias)

    def bn(self, x, name):
        flat = x.ndim < 4
        return self._of_map(x, name, tnn.BatchNorm1d if flat else tnn.BatchNorm2d)

    def gn(self, x, name, groups):
        make = functools.partial(tnn.GroupNorm, groups)
        return self._of_map(x, name, make)

    def dense(self, x, name, out, bias=True):
        return self._at(name, tnn.Linear, x.shape[-1], out, bias)(x)

    def general(self, x, name, *shape):
        """Applies a Linear with outputs of several axes, which is a DenseGeneral in Flax."""
        return self.dense(x, name, math.prod(shape)).unflatten(-1, shape)

    def packed(self, x, name, out):
        """Applies one layer that packs three projections, which are three layers in Flax."""
        y = self.dense(x, name, 3 * out)
        return y.chunk(3, -1)

    def matrix(self, x, name, out):
        """Multiplies by the weight of a layer, which is a bare parameter in Flax."""
        return self.dense(x, name, out, bias=False)

    def bare(self, x, name, out):
        """Multiplies by a bare parameter, which is the kernel of a layer in Flax."""
        return x @ self.param(name, x.shape[-1], out)

    def bilinear(self, x, y, name, out):
        return self._at(name, tnn.Bilinear, x.shape[-1], y.shape[-1], out)(x, y)

    def conv1d(self, x, name, out):
        return self._at(name, Conv1D, x.shape[-1], out)(x)

    def ln(self, x, name, eps=1e-5):
        return self._at(name, tnn.LayerNorm, x.shape[-1], eps)(x)

    def rms(self, x, name):
        return self._at(name, tnn.RMSNorm, x.shape[-1], eps=1e-6)(x)

    def prelu(self, x, name):
        return self._at(name, tnn.PReLU)(x)

    def embed(self, ids, name, size, width):
        return self._at(name, tnn.Embedding, size, width)(ids)

    def tied(self, x, name, table):
        """Applies a head whose weight is tied to an embedding."""
        weight = self._at(table, None).weight
        head = self._at(name, tnn.Linear, *weight.shape[::-1], bias=False)
        head.weight = weight
        return head(x)

    def attention(self, x, name, heads, of=None):
        layer = self._at(name, tnn.MultiheadAttention, x.shape[-1], heads, batch_first=True)
        of = x if of is None else of
        return layer(x, of, of)[0]

    def separate(self, x, name, words):
        """Computes attention with four layers, which are one layer in Flax."""
        return projected(self, x, x, name, words)

    def recurrent(self, x, name, kind, width, layers=1, both=False):
        make = functools.partial(getattr(tnn, kind), batch_first=True, bidirectional=both)
        return self._at(name, make, x.shape[-1], width, layers)(x)[0]

    def param(self, name, *shape):
        return self._at(name, lambda: tnn.Parameter(torch.ones(shape)))

    def buffer(self, name, value):
        return self._at(name, lambda: tnn.Buffer(torch.as_tensor(value)))

    def flatten(self, x, start=1):
        return x.movedim(-1, start).flatten(start)

    def unflatten(self, x, *shape):
        return x.unflatten(1, shape).movedim(1, -1)


class Bare(nn.Module):
    """A module with one bare parameter."""

    @nn.compact
    def __call__(self, name, shape):
        return self.param(name, ONES, shape)


class FlaxLayers:
    """The same layers in Flax."""

    gelu = staticmethod(functools.partial(nn.gelu, approximate=False))
    permute = staticmethod(jnp.permute_dims)

    def __init__(self, module):
        self.module = module
        self.made = {}

    def __getattr__(self, name):
        """Returns a function without parameters from JAX or Flax."""
        return getattr(jnp, name, None) or getattr(nn, name)

    def _name(self, name):
        if self.module.names is not None:
            return self.module.names.get(name)
        return None if name.isdecimal() else name.replace(".", "_")

    def _at(self, name, make, *sizes, **more):
        """Returns the layer with this name in torch; makes it at the first call."""
        if name not in self.made:
            self.made[name] = make(*sizes, name=self._name(name), **more)
        return self.made[name]

    def block(self, name, body, *inputs):
        return self._at(name, FlaxModel, body, self.module.train, self.module.names)(*inputs)

    def conv(self, x, name, out, k, s=1, p=0, groups=1, bias=True, dilation=1, normed=False):
        layer = self._at(
            name,
            nn.Conv,
            out,
            (k,) * (x.ndim - 2),
            s,
            p,
            kernel_dilation=dilation,
            feature_group_count=groups,
            use_bias=bias,
        )
        return nn.WeightNorm(layer)(x) if normed else layer(x)

    def rows_conv(self, x, name, out, k):
        return self.conv(x, name, out, k)

    def conv_transpose(self, x, name, out, k, s=2, p=0, bias=True):
        pad = (k - 1 - p, k - 1 - p)
        make = functools.partial(nn.ConvTranspose, padding=(pad, pad), use_bias=bias)
        return self._at(name, make, out, (k, k), (s, s))(x)

    def bn(self, x, name):
        return self._at(name, nn.BatchNorm, not self.module.train, momentum=0.9, epsilon=1e-5)(x)

    def gn(self, x, name, groups):
        return self._at(name, nn.GroupNorm, groups, epsilon=1e-5)(x)

    def dense(self, x, name, out, bias=True):
        return self._at(name, nn.Dense, out, bias)(x)

    conv1d = dense
    pointwise = dense

    def general(self, x, name, *shape):
        return self._at(name, nn.DenseGeneral, shape)(x)

    def packed(self, x, name, out):
        return [self.dense(x, f"{name}.{part}", out) for part in range(3)]

    def matrix(self, x, name, out):
        return x @ self.param(name, x.shape[-1], out)

    def bare(self, x, name, out):
        return self.dense(x, name, out, bias=False)

    def bilinear(self, x, y, name, out):
        kernel = self.param("kernel", x.shape[-1], y.shape[-1], out)
        return jnp.einsum("bxi,ijo,bxj->bxo", x, kernel, y) + self.param("bias", out)

    def ln(self, x, name, eps=1e-5):
        return self._at(name, nn.LayerNorm, eps)(x)

    def rms(self, x, name):
        return self._at(name, nn.RMSNorm, 1e-6)(x)

    def prelu(self, x, name):
        return self._at(name, nn.PReLU, negative_slope_init=0.25)(x)

    def embed(self, ids, name, size, width):
        return self._at(name, nn.Embed, size, width)(ids)

    def tied(self, x, name, table):
        return self.made[table].attend(x)

    def attention(self, x, name, heads, of=None):
        return self._at(name, nn.MultiHeadDotProductAttention, heads)(x, of)

    def separate(self, x, name, words):
        return self.attention(x, name, 2)

    def recurrent(self, x, name, kind, width, layers=1, both=False):
        cell = {"LSTM": nn.OptimizedLSTMCell, "GRU": nn.GRUCell}[kind]
        if both:
            return nn.Bidirectional(nn.RNN(cell(width)), nn.RNN(cell(width)))(x)
        for k in range(layers):
            x = nn.RNN(self._at(f"{name}_{k}", cell, width))(x)
        return x

    def param(self, name, *shape):
        parents, _, last = name.rpartition(".")
        if self.module.names is not None:
            return self.module.param(self.module.names.get(name, last), ONES, shape)
        if parents:
            return Bare(name=self._name(parents))(last, shape)
        return self.module.param(last, ONES, shape)

    def buffer(self, name, value):
        return value

    def flatten(self, x, start=1):
        return x.reshape(*x.shape[:start], -1)

    def unflatten(self, x, channels, *spatial):
        return x.reshape(len(x), *spatial, channels)
