"""Small torch models of many kinds, their Flax twins, and what has to be said to move each.

    python tests/support/architectures.py

prints a table: answers needed, difference of the outputs, of ten steps in JAX and of four more in
torch after the way back. Layers that torch calls ``layer1.0.conv1`` are ``layer1_0_conv1`` in Flax.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn as tnn

F = tnn.functional


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


def dense(x, name, out, bias=True):
    return nn.Dense(out, use_bias=bias, name=flat(name))(x)


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


# --- convolutions -----------------------------------------------------------------------------


def vgg():
    layers = [tnn.Conv2d(3, 8, 3, padding=1), tnn.ReLU(), tnn.MaxPool2d(2)]
    layers += [tnn.Conv2d(8, 16, 3, padding=1), tnn.ReLU(), tnn.MaxPool2d(2), tnn.Flatten()]
    return tnn.Sequential(*layers, tnn.Linear(64, 24), tnn.ReLU(), tnn.Linear(24, 5))


def flax_vgg(x):
    for out in (8, 16):
        x = nn.max_pool(nn.relu(nn.Conv(out, (3, 3), padding=1)(x)), (2, 2), (2, 2))
    return nn.Dense(5)(nn.relu(nn.Dense(24)(x.reshape(x.shape[0], -1))))


def c(ins, out, k, s=1, p=0, groups=1, bias=False):
    return tnn.Conv2d(ins, out, k, s, p, groups=groups, bias=bias)


def block(ins, mid, out, s, bottleneck):
    shapes = [(ins, mid, 1, 1, 0), (mid, mid, 3, s, 1), (mid, out, 1, 1, 0)]
    shapes = shapes if bottleneck else [(ins, out, 3, s, 1), (out, out, 3, 1, 1)]

    def forward(self, x):
        y = x
        for k in range(1, len(shapes) + 1):
            y = getattr(self, f"bn{k}")(getattr(self, f"conv{k}")(y))
            y = torch.relu(y) if k < len(shapes) else y
        return torch.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))

    layers = {}
    for k, shape in enumerate(shapes, 1):
        layers |= {f"conv{k}": c(*shape), f"bn{k}": tnn.BatchNorm2d(shape[1])}
    if s > 1 or ins != out:
        layers["downsample"] = tnn.Sequential(c(ins, out, 1, s), tnn.BatchNorm2d(out))
    return Net(forward, **layers)


def resnet(bottleneck, depths=(2, 2), width=8):
    ins, stages, grow = width, {}, 4 if bottleneck else 1
    for k, depth in enumerate(depths, 1):
        mid = width * 2 ** (k - 1)
        blocks = []
        for j in range(depth):
            blocks.append(block(ins, mid, grow * mid, 2 if k > 1 and not j else 1, bottleneck))
            ins = grow * mid
        stages[f"layer{k}"] = tnn.Sequential(*blocks)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        for k in range(1, len(depths) + 1):
            x = getattr(self, f"layer{k}")(x)
        return self.fc(x.mean((2, 3)))

    stem = {"conv1": c(3, width, 3, 1, 1), "bn1": tnn.BatchNorm2d(width)}
    return Net(forward, **stem, **stages, fc=tnn.Linear(ins, 5))


def flax_resnet(x, bottleneck, depths=(2, 2), width=8):
    x = nn.relu(bn(conv(x, "conv1", width, 3, 1, 1, bias=False), "bn1"))
    for k, depth in enumerate(depths, 1):
        mid = width * 2 ** (k - 1)
        out = 4 * mid if bottleneck else mid
        for j in range(depth):
            s, name = 2 if k > 1 and not j else 1, f"layer{k}.{j}"
            shapes = [(mid, 1, 1, 0), (mid, 3, s, 1), (out, 1, 1, 0)]
            shapes = shapes if bottleneck else [(out, 3, s, 1), (out, 3, 1, 1)]
            y = x
            for i, shape in enumerate(shapes, 1):
                y = bn(conv(y, f"{name}.conv{i}", *shape, bias=False), f"{name}.bn{i}")
                y = nn.relu(y) if i < len(shapes) else y
            if s > 1 or x.shape[-1] != out:
                x = conv(x, f"{name}.downsample.0", out, 1, s, bias=False)
                x = bn(x, f"{name}.downsample.1")
            x = nn.relu(x + y)
    return dense(pool(x), "fc", 5)


def densenet(growth, config, first, bn_size):
    """Laid out as torchvision's, norm5 and the dotted names included."""
    ins, features = first, tnn.Sequential()
    features.add_module("conv0", c(3, first, 3, 1, 1))
    features.add_module("norm0", tnn.BatchNorm2d(first))
    for k, depth in enumerate(config, 1):
        layers = {}
        for j in range(1, depth + 1):
            layers[f"denselayer{j}"] = Net(
                lambda self, x: torch.cat(
                    [x, self.conv2(torch.relu(self.norm2(self.conv1(torch.relu(self.norm1(x))))))],
                    1,
                ),
                norm1=tnn.BatchNorm2d(ins),
                conv1=c(ins, bn_size * growth, 1),
                norm2=tnn.BatchNorm2d(bn_size * growth),
                conv2=c(bn_size * growth, growth, 3, 1, 1),
            )
            ins += growth
        order = tuple(layers)
        features.add_module(
            f"denseblock{k}",
            Net(
                lambda self, x, order=order: functools.reduce(
                    lambda y, name: getattr(self, name)(y), order, x
                ),
                **layers,
            ),
        )
        if k < len(config):
            features.add_module(
                f"transition{k}",
                Net(
                    lambda self, x: F.avg_pool2d(self.conv(torch.relu(self.norm(x))), 2),
                    norm=tnn.BatchNorm2d(ins),
                    conv=c(ins, ins // 2, 1),
                ),
            )
            ins //= 2
    features.add_module("norm5", tnn.BatchNorm2d(ins))
    return Net(
        lambda self, x: self.classifier(torch.relu(self.features(x)).mean((2, 3))),
        features=features,
        classifier=tnn.Linear(ins, 5),
    )


def flax_densenet(x, growth, config, first, bn_size):
    x = bn(conv(x, "features.conv0", first, 3, 1, 1, bias=False), "features.norm0")
    for k, depth in enumerate(config, 1):
        for j in range(1, depth + 1):
            name = f"features.denseblock{k}.denselayer{j}"
            y = conv(
                nn.relu(bn(x, f"{name}.norm1")), f"{name}.conv1", bn_size * growth, 1, bias=False
            )
            y = conv(nn.relu(bn(y, f"{name}.norm2")), f"{name}.conv2", growth, 3, 1, 1, bias=False)
            x = jnp.concatenate([x, y], -1)
        if k < len(config):
            name = f"features.transition{k}"
            x = conv(
                nn.relu(bn(x, f"{name}.norm")), f"{name}.conv", x.shape[-1] // 2, 1, bias=False
            )
            x = nn.avg_pool(x, (2, 2), (2, 2))
    return dense(pool(nn.relu(bn(x, "features.norm5"))), "classifier", 5)


def mobilenet():
    layers = [c(3, 8, 3, 2, 1), tnn.BatchNorm2d(8), tnn.ReLU6()]
    for ins, out in ((8, 16), (16, 24)):
        layers += [c(ins, ins, 3, 1, 1, ins), tnn.BatchNorm2d(ins), tnn.ReLU6()]
        layers += [c(ins, out, 1), tnn.BatchNorm2d(out)]
    return Net(
        lambda self, x: self.classifier(self.features(x).mean((2, 3))),
        features=tnn.Sequential(*layers),
        classifier=tnn.Sequential(tnn.Dropout(0.0), tnn.Linear(24, 5)),
    )


def flax_mobilenet(x):
    relu6, at = nn.relu6, 3
    x = relu6(bn(conv(x, "features.0", 8, 3, 2, 1, bias=False), "features.1"))
    for ins, out in ((8, 16), (16, 24)):
        x = conv(x, f"features.{at}", ins, 3, 1, 1, ins, False)
        x = relu6(bn(x, f"features.{at + 1}"))
        x = bn(conv(x, f"features.{at + 3}", out, 1, bias=False), f"features.{at + 4}")
        at += 5
    return dense(pool(x), "classifier.1", 5)


def efficientnet():
    def excite(self, x):
        y = self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(y)

    squeeze = Net(excite, fc1=tnn.Conv2d(16, 4, 1), fc2=tnn.Conv2d(4, 16, 1))
    body = [c(3, 16, 3, 2, 1), tnn.BatchNorm2d(16), tnn.SiLU(), c(16, 16, 3, 1, 1, 16)]
    body += [tnn.BatchNorm2d(16), tnn.SiLU(), squeeze, c(16, 24, 1), tnn.BatchNorm2d(24)]
    return Net(
        lambda self, x: self.classifier(self.features(x).mean((2, 3))),
        features=tnn.Sequential(*body),
        classifier=tnn.Linear(24, 5),
    )


def flax_efficientnet(x):
    x = nn.silu(bn(conv(x, "features.0", 16, 3, 2, 1, bias=False), "features.1"))
    x = nn.silu(bn(conv(x, "features.3", 16, 3, 1, 1, 16, False), "features.4"))
    y = conv(x.mean((1, 2), keepdims=True), "features.6.fc1", 4, 1)
    x = x * nn.sigmoid(conv(nn.silu(y), "features.6.fc2", 16, 1))
    x = bn(conv(x, "features.7", 24, 1, bias=False), "features.8")
    return dense(pool(x), "classifier", 5)


def convnext():
    def forward(self, x):
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)

    def make(d):
        return Net(
            forward,
            gamma=tnn.Parameter(torch.ones(d)),
            dwconv=c(d, d, 7, 1, 3, d, True),
            norm=tnn.LayerNorm(d),
            pwconv1=tnn.Linear(d, 4 * d),
            pwconv2=tnn.Linear(4 * d, d),
        )

    return Net(
        lambda self, x: self.head(self.norm(self.stages(self.down(x)).mean((2, 3)))),
        down=c(3, 12, 2, 2, 0, 1, True),
        stages=tnn.Sequential(make(12), make(12)),
        norm=tnn.LayerNorm(12),
        head=tnn.Linear(12, 5),
    )


def flax_convnext(x):
    x = conv(x, "down", 12, 2, 2)
    for k in range(2):
        y = ln(conv(x, f"stages.{k}.dwconv", 12, 7, 1, 3, 12), f"stages.{k}.norm")
        y = dense(gelu(dense(y, f"stages.{k}.pwconv1", 48)), f"stages.{k}.pwconv2", 12)
        x = x + y * Scale(name=f"stages_{k}")(12)
    return dense(ln(pool(x), "norm"), "head", 5)


class Scale(nn.Module):
    """A bare parameter ``gamma``."""

    @nn.compact
    def __call__(self, width):
        return self.param("gamma", nn.initializers.ones, (width,))


def unet():
    def double(ins, out):
        return tnn.Sequential(c(ins, out, 3, 1, 1, 1, True), tnn.ReLU(), tnn.BatchNorm2d(out))

    def forward(self, x):
        first = self.down1(x)
        x = self.up(self.down2(F.max_pool2d(first, 2)))
        return self.out(self.merge(torch.cat([first, x], 1)))

    return Net(
        forward,
        down1=double(3, 8),
        down2=double(8, 16),
        up=tnn.ConvTranspose2d(16, 8, 2, 2),
        merge=double(16, 8),
        out=tnn.Conv2d(8, 2, 1),
    )


def flax_unet(x):
    def double(x, name, out):
        return bn(nn.relu(conv(x, f"{name}.0", out, 3, 1, 1)), f"{name}.2")

    first = double(x, "down1", 8)
    x = double(nn.max_pool(first, (2, 2), (2, 2)), "down2", 16)
    x = nn.ConvTranspose(8, (2, 2), (2, 2), name="up")(x)
    return conv(double(jnp.concatenate([first, x], -1), "merge", 8), "out", 2, 1)


def tabular():
    def forward(self, x, row):
        return self.fc(torch.cat([torch.relu(self.conv(x)).mean((2, 3)), row], 1))

    return Net(forward, conv=tnn.Conv2d(3, 16, 3), fc=tnn.Linear(64, 10))


def flax_tabular(x, row):
    x = pool(nn.relu(conv(x, "conv", 16, 3)))
    return dense(jnp.concatenate([x, row], -1), "fc", 10)


def normed():
    layers = [c(3, 8, 3, 2, 1), tnn.BatchNorm2d(8), tnn.ReLU(), tnn.Flatten()]
    layers += [tnn.BatchNorm1d(128), tnn.Linear(128, 20), tnn.BatchNorm1d(20), tnn.ReLU()]
    return tnn.Sequential(*layers, tnn.Linear(20, 5))


def flax_normed(x):
    x = nn.relu(nn.BatchNorm(True, epsilon=1e-5)(nn.Conv(8, (3, 3), 2, 1, use_bias=False)(x)))
    x = nn.BatchNorm(True, epsilon=1e-5)(x.reshape(x.shape[0], -1))
    return nn.Dense(5)(nn.relu(nn.BatchNorm(True, epsilon=1e-5)(nn.Dense(20)(x))))


def generator():
    layers = [tnn.Linear(6, 128), tnn.ReLU(), tnn.Unflatten(1, (8, 4, 4))]
    return tnn.Sequential(*layers, tnn.ConvTranspose2d(8, 3, 2, 2))


def flax_generator(x):
    x = nn.relu(nn.Dense(128)(x)).reshape(x.shape[0], 4, 4, 8)
    return nn.ConvTranspose(3, (2, 2), (2, 2))(x)


def two_heads():
    """As AlphaZero has them: both convolutions are declared before what reads them."""

    def forward(self, x):
        x = torch.relu(self.stem(x))
        policy = self.policy_fc(self.policy_conv(x).flatten(1))
        return policy + self.value_fc(self.value_conv(x).flatten(1))

    return Net(
        forward,
        stem=tnn.Conv2d(3, 16, 3, padding=1),
        policy_conv=tnn.Conv2d(16, 2, 1),
        value_conv=tnn.Conv2d(16, 1, 1),
        policy_fc=tnn.Linear(128, 7),
        value_fc=tnn.Linear(64, 7),
    )


def flax_two_heads(x):
    x = nn.relu(conv(x, "stem", 16, 3, 1, 1))
    policy = conv(x, "policy_conv", 2, 1).reshape(x.shape[0], -1)
    value = conv(x, "value_conv", 1, 1).reshape(x.shape[0], -1)
    return dense(policy, "policy_fc", 7) + dense(value, "value_fc", 7)


# --- sequences --------------------------------------------------------------------------------


def heads_of(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(q, k, v, heads, mask=None, scale=True):
    """Plain attention of torch tensors or JAX arrays, (batch, length, width)."""
    other = torch if isinstance(q, torch.Tensor) else jnp
    q, k, v = (heads_of(x, heads) for x in (q, k, v))
    weights = other.einsum("bqhd,bkhd->bhqk", q, k) / (math.sqrt(q.shape[-1]) if scale else 1)
    if mask is not None:
        weights = weights + (mask if other is jnp else torch.from_numpy(np.asarray(mask)))
    soft = weights.softmax(-1) if other is torch else nn.softmax(weights)
    y = other.einsum("bhqk,bkhd->bqhd", soft, v)
    return y.reshape(*y.shape[:2], -1)


CAUSAL = np.triu(np.full((6, 6), -1e9, np.float32), 1)


def vit():
    layer = tnn.TransformerEncoderLayer(12, 3, 24, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding
        return self.head(self.ln(self.encoder(x))[:, 0])

    return Net(
        forward,
        class_token=tnn.Parameter(torch.randn(1, 1, 12)),
        pos_embedding=tnn.Parameter(torch.randn(1, 5, 12)),
        conv_proj=tnn.Conv2d(3, 12, 4, 4),
        encoder=tnn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        ln=tnn.LayerNorm(12),
        head=tnn.Linear(12, 5),
    )


class Tokens(nn.Module):
    """What a ViT learns beside its layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(12, (4, 4), 4, name="conv_proj")(x).reshape(x.shape[0], -1, 12)
        token = self.param("class_token", nn.initializers.ones, (1, 1, 12))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 12)), x], 1)
        x = x + self.param("pos_embedding", nn.initializers.ones, (1, 5, 12))
        for k in range(2):
            name = f"encoder_layers_{k}"
            y = nn.MultiHeadDotProductAttention(3, name=f"{name}_self_attn")(ln(x, f"{name}_norm1"))
            x = x + y
            y = gelu(dense(ln(x, f"{name}_norm2"), f"{name}_linear1", 24))
            x = x + dense(y, f"{name}_linear2", 12)
        return dense(ln(x, "ln")[:, 0], "head", 5)


def recurrent(kind):
    layers = {"lstm": tnn.LSTM, "gru": tnn.GRU}[kind](6, 8, 2, batch_first=True)
    return Net(lambda self, x: self.head(self.rnn(x)[0]), rnn=layers, head=tnn.Linear(8, 5))


def flax_recurrent(x, kind):
    cell = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[kind]
    for k in range(2):
        x = nn.RNN(cell(8, name=f"rnn_{k}"))(x)
    return dense(x, "head", 5)


class Conv1D(tnn.Module):
    """transformers': a Linear whose weight is stored (in, out)."""

    def __init__(self, ins, out):
        super().__init__()
        self.weight = tnn.Parameter(torch.randn(ins, out))
        self.bias = tnn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


def gpt2():
    def forward(self, x):
        q, k, v = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.attn.c_proj(attend(q, k, v, 2, CAUSAL))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))

    def make():
        attention = Net(None, c_attn=Conv1D(8, 24), c_proj=Conv1D(8, 8))
        mlp = Net(None, c_fc=Conv1D(8, 32), c_proj=Conv1D(32, 8))
        norms = {f"ln_{k}": tnn.LayerNorm(8) for k in (1, 2)}
        return Net(forward, **norms, attn=attention, mlp=mlp)

    def whole(self, ids):
        x = self.ln_f(self.h(self.wte(ids) + self.wpe.weight))
        return self.lm_head(x)

    net = Net(
        whole,
        wte=tnn.Embedding(11, 8),
        wpe=tnn.Embedding(6, 8),
        h=tnn.Sequential(make(), make()),
        ln_f=tnn.LayerNorm(8),
        lm_head=tnn.Linear(8, 11, bias=False),
    )
    net.lm_head.weight = net.wte.weight
    return net


def flax_gpt2(ids):
    table = nn.Embed(11, 8, name="wte")
    x = table(ids) + nn.Embed(6, 8, name="wpe")(jnp.arange(6))
    for k in range(2):
        q, k_, v = jnp.split(dense(ln(x, f"h.{k}.ln_1"), f"h.{k}.attn.c_attn", 24), 3, -1)
        x = x + dense(attend(q, k_, v, 2, CAUSAL), f"h.{k}.attn.c_proj", 8)
        y = gelu(dense(ln(x, f"h.{k}.ln_2"), f"h.{k}.mlp.c_fc", 32))
        x = x + dense(y, f"h.{k}.mlp.c_proj", 8)
    return table.attend(ln(x, "ln_f"))


def lin(width, names, bias=True, out=None):
    return {name: tnn.Linear(width, out or width, bias=bias) for name in names}


def bert():
    def layer(self, x):
        own = self.attention.self
        y = attend(own.query(x), own.key(x), own.value(x), 2)
        x = self.attention.norm(x + self.attention.dense(y))
        return self.norm(x + self.output(F.gelu(self.intermediate(x))))

    def make():
        own = Net(None, **lin(8, ("query", "key", "value")))
        attention = Net(None, self=own, dense=tnn.Linear(8, 8), norm=tnn.LayerNorm(8))
        ends = {"intermediate": tnn.Linear(8, 32), "output": tnn.Linear(32, 8)}
        return Net(layer, attention=attention, **ends, norm=tnn.LayerNorm(8))

    def forward(self, ids):
        x = self.word_embeddings(ids) + self.position_embeddings.weight
        return self.pooler(self.layer(self.norm(x))[:, 0])

    return Net(
        forward,
        word_embeddings=tnn.Embedding(11, 8),
        position_embeddings=tnn.Embedding(6, 8),
        norm=tnn.LayerNorm(8),
        layer=tnn.Sequential(make(), make()),
        pooler=tnn.Linear(8, 8),
    )


def flax_bert(ids):
    x = embed(ids, "word_embeddings", 11, 8) + embed(jnp.arange(6), "position_embeddings", 6, 8)
    x = ln(x, "norm")
    for k in range(2):
        own, name = f"layer.{k}.attention.self", f"layer.{k}"
        y = attend(*(dense(x, f"{own}.{n}", 8) for n in ("query", "key", "value")), 2)
        x = ln(x + dense(y, f"{name}.attention.dense", 8), f"{name}.attention.norm")
        y = dense(gelu(dense(x, f"{name}.intermediate", 32)), f"{name}.output", 8)
        x = ln(x + y, f"{name}.norm")
    return dense(x[:, 0], "pooler", 8)


def whisper():
    """Two convolutions over time, an encoder and a decoder with attention to it."""
    names = ("query", "key", "value", "out")

    def attention(self, x, of, mask=None):
        return self.out(attend(self.query(x), self.key(of), self.value(of), 2, mask))

    def make(cross):
        layers = {"attn": Net(attention, **lin(8, names)), "attn_ln": tnn.LayerNorm(8)}
        if cross:
            layers |= {"cross_attn": Net(attention, **lin(8, names))}
            layers |= {"cross_attn_ln": tnn.LayerNorm(8)}
        mlp = tnn.Sequential(tnn.Linear(8, 32), tnn.GELU(), tnn.Linear(32, 8))
        return Net(None, **layers, mlp=mlp, mlp_ln=tnn.LayerNorm(8))

    def forward(self, sound, ids):
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound)))).transpose(1, 2)
        for b in self.encoder:
            y = b.attn_ln(x)
            x = x + b.attn(y, y)
            x = x + b.mlp(b.mlp_ln(x))
        y = self.token_embedding(ids)
        for b in self.decoder:
            z = b.attn_ln(y)
            y = y + b.attn(z, z, CAUSAL)
            y = y + b.cross_attn(b.cross_attn_ln(y), x)
            y = y + b.mlp(b.mlp_ln(y))
        return y @ self.token_embedding.weight.T

    return Net(
        forward,
        conv1=tnn.Conv1d(4, 8, 3, padding=1),
        conv2=tnn.Conv1d(8, 8, 3, 2, 1),
        encoder=tnn.ModuleList([make(False)]),
        token_embedding=tnn.Embedding(11, 8),
        decoder=tnn.ModuleList([make(True)]),
    )


def flax_whisper(sound, ids):
    def attention(x, of, name, mask=None):
        q, k, v = (
            dense(y, f"{name}.{n}", 8) for y, n in ((x, "query"), (of, "key"), (of, "value"))
        )
        return dense(attend(q, k, v, 2, mask), f"{name}.out", 8)

    def mlp(x, name):
        return dense(gelu(dense(ln(x, f"{name}.mlp_ln"), f"{name}.mlp.0", 32)), f"{name}.mlp.2", 8)

    x = gelu(conv(gelu(conv(sound, "conv1", 8, 3, 1, 1)), "conv2", 8, 3, 2, 1))
    y = ln(x, "encoder.0.attn_ln")
    x = x + attention(y, y, "encoder.0.attn")
    x = x + mlp(x, "encoder.0")
    table = nn.Embed(11, 8, name="token_embedding")
    y = table(ids)
    z = ln(y, "decoder.0.attn_ln")
    y = y + attention(z, z, "decoder.0.attn", CAUSAL)
    y = y + attention(ln(y, "decoder.0.cross_attn_ln"), x, "decoder.0.cross_attn")
    return table.attend(y + mlp(y, "decoder.0"))


def t5():
    def layer(self, x, bias):
        y = self.norm1(x)
        x = x + self.o(attend(self.q(y), self.k(y), self.v(y), 2, scale=False) + 0 * bias)
        return x + self.wo(torch.relu(self.wi(self.norm2(x))))

    def make():
        norms = {f"norm{k}": tnn.RMSNorm(8, eps=1e-6) for k in (1, 2)}
        ends = {"wi": tnn.Linear(8, 32, bias=False), "wo": tnn.Linear(32, 8, bias=False)}
        return Net(layer, **lin(8, "qkvo", bias=False), **norms, **ends)

    def forward(self, ids):
        x = self.shared(ids)
        bias = self.relative_attention_bias.weight.sum()
        for b in self.block:
            x = b(x, bias)
        return self.lm_head(self.final(x)) + bias

    return Net(
        forward,
        shared=tnn.Embedding(11, 8),
        relative_attention_bias=tnn.Embedding(6, 2),
        block=tnn.ModuleList([make(), make()]),
        final=tnn.RMSNorm(8, eps=1e-6),
        lm_head=tnn.Linear(8, 11, bias=False),
    )


def flax_t5(ids):
    def rms(x, name):
        return nn.RMSNorm(epsilon=1e-6, name=flat(name))(x)

    x = embed(ids, "shared", 11, 8)
    bias = embed(jnp.arange(6), "relative_attention_bias", 6, 2).sum()
    for k in range(2):
        y, b = rms(x, f"block.{k}.norm1"), f"block.{k}"
        q, k_, v = (dense(y, f"{b}.{n}", 8, False) for n in "qkv")
        x = x + dense(attend(q, k_, v, 2, scale=False), f"{b}.o", 8, False)
        y = nn.relu(dense(rms(x, f"{b}.norm2"), f"{b}.wi", 32, False))
        x = x + dense(y, f"{b}.wo", 8, False)
    return dense(rms(x, "final"), "lm_head", 11, False) + bias


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
    "VGG": Case(vgg, flax_vgg, (IMAGE,), {"flatten": {"7": (16, 2, 2)}}),
    "ResNet-18": Case(
        lambda: resnet(False), functools.partial(flax_resnet, bottleneck=False), (IMAGE,)
    ),
    "ResNet-50": Case(
        lambda: resnet(True), functools.partial(flax_resnet, bottleneck=True), (IMAGE,)
    ),
    "DenseNet, small": Case(
        lambda: densenet(**SMALL),
        functools.partial(flax_densenet, **SMALL),
        (IMAGE,),
        {"flatten": {"classifier": None}},
    ),
    "DenseNet-121": Case(
        lambda: densenet(**LARGER),
        functools.partial(flax_densenet, **LARGER),
        (IMAGE,),
        {"flatten": {"classifier": None}},
    ),
    "MobileNet": Case(mobilenet, flax_mobilenet, (IMAGE,)),
    "EfficientNet": Case(efficientnet, flax_efficientnet, (IMAGE,)),
    "ConvNeXt": Case(convnext, flax_convnext, (IMAGE,)),
    "U-Net": Case(unet, flax_unet, (IMAGE,)),
    "pooled head with tabular columns": Case(
        tabular, flax_tabular, (IMAGE, (2, 48)), {"flatten": {"fc": None}}
    ),
    "BatchNorm everywhere": Case(normed, flax_normed, (IMAGE,), {"flatten": {"5": (8, 4, 4)}}),
    "generator": Case(generator, flax_generator, ((2, 6),), {"unflatten": {"0": (8, 4, 4)}}),
    "two heads of convolutions": Case(
        two_heads,
        flax_two_heads,
        (IMAGE,),
        {"flatten": {"policy_fc": (2, 8, 8), "value_fc": None}},
    ),
    "ViT": Case(vit, Tokens(), (IMAGE,)),
    "LSTM": Case(
        lambda: recurrent("lstm"), functools.partial(flax_recurrent, kind="lstm"), ((2, 5, 6),)
    ),
    "GRU": Case(
        lambda: recurrent("gru"), functools.partial(flax_recurrent, kind="gru"), ((2, 5, 6),)
    ),
    "GPT-2": Case(gpt2, flax_gpt2, (IDS,), {"conv1d": r".*attn\.c_proj"}),
    "BERT": Case(bert, flax_bert, (IDS,), SQUARES),
    "Whisper": Case(whisper, flax_whisper, ((2, 4, 12), IDS), SQUARES),
    "T5": Case(t5, flax_t5, (IDS,), SQUARES),
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
    y = np.asarray(twin.apply(variables, *ours))
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
    import copy

    import optax

    import torch_bridge

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


def main():
    """Print the table."""
    import torch_bridge

    print(
        "| architecture | answers | outputs | 10 steps in JAX | 4 back in torch |\n|---|---|---|---|---|"
    )
    for name, case in CASES.items():
        module, twin, theirs, ours = build(name)
        like = jax.eval_shape(twin.init, jax.random.key(0), *ours)
        found = torch_bridge.params_from_torch(module.state_dict(), like, **case.answers)
        a, b = outputs(module, twin, found, theirs, ours)
        said = ", ".join(f"{key}={value!r}" for key, value in case.answers.items()) or "none"
        losses = there_and_back(name)
        numbers = " | ".join(f"{x:.0e}" for x in (np.abs(a - b).max() / np.abs(a).max(), *losses))
        print(f"| {name} | {said} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
