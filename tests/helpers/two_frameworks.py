"""One function of layers and inputs as a model of torch and as its twin in Flax.

Arrays have their channels last in both; inside, torch's layers get them first, as everywhere. A
layer ``h.0.attn`` of torch is ``h_0_attn`` in Flax; one that is a number has the name Flax gives.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import torch
from torch import nn as tnn

F = tnn.functional
ONES = nn.initializers.ones


class TorchModel(tnn.Module):
    """Makes each layer when `body` first asks for it."""

    def __init__(self, body):
        super().__init__()
        self._body = body

    def forward(self, *inputs):
        return self._body(TorchLayers(self), *inputs)


class FlaxModel(nn.Module):
    body: Callable[..., Any]
    train: bool = False

    @nn.compact
    def __call__(self, *inputs):
        return self.body(FlaxLayers(self), *inputs)


class Conv1D(tnn.Module):
    """The Linear of transformers, whose weight is stored (in, out)."""

    def __init__(self, ins, out):
        super().__init__()
        self.weight = tnn.Parameter(torch.ones(ins, out))
        self.bias = tnn.Parameter(torch.ones(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class TorchLayers:
    """Layers of torch, of the module that they are made in."""

    max = staticmethod(torch.amax)

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        """Takes a function without parameters from torch."""
        return getattr(F, name, None) or getattr(torch, name)

    def _at(self, name, make, *sizes, **more):
        """Returns the layer of such a name, made at the first time."""
        *parents, last = name.split(".")
        node = self.module
        for parent in parents:
            if not hasattr(node, parent):
                node.add_module(parent, tnn.Module())
            node = getattr(node, parent)
        if not hasattr(node, last):
            setattr(node, last, make(*sizes, **more))
        return getattr(node, last)

    def _of_map(self, x, name, make, *sizes, **more):
        return self._at(name, make, x.shape[-1], *sizes, **more)(x.movedim(-1, 1)).movedim(1, -1)

    def conv(self, x, name, out, k, s=1, p=0, groups=1, bias=True):
        make = tnn.Conv1d if x.ndim == 3 else tnn.Conv2d
        return self._of_map(x, name, make, out, k, s, p, groups=groups, bias=bias)

    def conv_transpose(self, x, name, out, k):
        return self._of_map(x, name, tnn.ConvTranspose2d, out, k, k)

    def bn(self, x, name):
        return self._of_map(x, name, tnn.BatchNorm1d if x.ndim == 2 else tnn.BatchNorm2d)

    def dense(self, x, name, out, bias=True):
        return self._at(name, tnn.Linear, x.shape[-1], out, bias)(x)

    def conv1d(self, x, name, out):
        return self._at(name, Conv1D, x.shape[-1], out)(x)

    def ln(self, x, name):
        return self._at(name, tnn.LayerNorm, x.shape[-1])(x)

    def rms(self, x, name):
        return self._at(name, tnn.RMSNorm, x.shape[-1], eps=1e-6)(x)

    def embed(self, ids, name, size, width):
        return self._at(name, tnn.Embedding, size, width)(ids)

    def tied(self, x, name, table):
        """Makes a head of the weights of an embedding."""
        weight = self._at(table, None).weight
        head = self._at(name, tnn.Linear, *weight.shape[::-1], bias=False)
        head.weight = weight
        return head(x)

    def attention(self, x, name, heads):
        layer = self._at(name, tnn.MultiheadAttention, x.shape[-1], heads, batch_first=True)
        return layer(x, x, x)[0]

    def recurrent(self, x, name, kind, width, layers):
        make = getattr(tnn, kind)
        return self._at(name, make, x.shape[-1], width, layers, batch_first=True)(x)[0]

    def param(self, name, *shape):
        return self._at(name, lambda: tnn.Parameter(torch.ones(shape)))

    def flatten(self, x):
        return x.movedim(-1, 1).flatten(1)

    def unflatten(self, x, *shape):
        return x.unflatten(1, shape).movedim(1, -1)


class Bare(nn.Module):
    """A parameter beside layers."""

    @nn.compact
    def __call__(self, name, shape):
        return self.param(name, ONES, shape)


class FlaxLayers:
    """The same layers in Flax."""

    gelu = functools.partial(nn.gelu, approximate=False)

    def __init__(self, module):
        self.module = module
        self.tables = {}

    def __getattr__(self, name):
        """Takes a function without parameters from JAX or Flax."""
        return getattr(jnp, name, None) or getattr(nn, name)

    def _name(self, name):
        return None if name.isdecimal() else name.replace(".", "_")

    def conv(self, x, name, out, k, s=1, p=0, groups=1, bias=True):
        layer = nn.Conv(
            out,
            (k,) * (x.ndim - 2),
            s,
            padding=p,
            feature_group_count=groups,
            use_bias=bias,
            name=self._name(name),
        )
        return layer(x)

    def conv_transpose(self, x, name, out, k):
        return nn.ConvTranspose(out, (k, k), (k, k), name=self._name(name))(x)

    def bn(self, x, name):
        return nn.BatchNorm(
            not self.module.train, momentum=0.9, epsilon=1e-5, name=self._name(name)
        )(x)

    def dense(self, x, name, out, bias=True):
        return nn.Dense(out, bias, name=self._name(name))(x)

    conv1d = dense

    def ln(self, x, name):
        return nn.LayerNorm(1e-5, name=self._name(name))(x)

    def rms(self, x, name):
        return nn.RMSNorm(1e-6, name=self._name(name))(x)

    def embed(self, ids, name, size, width):
        if name not in self.tables:
            self.tables[name] = nn.Embed(size, width, name=self._name(name))
        return self.tables[name](ids)

    def tied(self, x, name, table):
        return self.tables[table].attend(x)

    def attention(self, x, name, heads):
        return nn.MultiHeadDotProductAttention(heads, name=self._name(name))(x)

    def recurrent(self, x, name, kind, width, layers):
        cell = {"LSTM": nn.OptimizedLSTMCell, "GRU": nn.GRUCell}[kind]
        for k in range(layers):
            x = nn.RNN(cell(width, name=self._name(f"{name}_{k}")))(x)
        return x

    def param(self, name, *shape):
        parents, _, last = name.rpartition(".")
        if parents:
            return Bare(name=self._name(parents))(last, shape)
        return self.module.param(last, ONES, shape)

    def flatten(self, x):
        return x.reshape(len(x), -1)

    def unflatten(self, x, channels, *spatial):
        return x.reshape(len(x), *spatial, channels)
