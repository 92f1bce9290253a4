"""Models of images for `architectures`: each of torch with its twin in Flax."""

from collections import OrderedDict

import flax.linen as nn
import jax.numpy as jnp
import torch
from architecture_parts import Net, bn, c, conv, dense, gelu, ln, pool
from torch import nn as tnn

F = tnn.functional


def vgg():
    layers = [tnn.Conv2d(3, 8, 3, padding=1), tnn.ReLU(), tnn.MaxPool2d(2)]
    layers += [tnn.Conv2d(8, 16, 3, padding=1), tnn.ReLU(), tnn.MaxPool2d(2), tnn.Flatten()]
    return tnn.Sequential(*layers, tnn.Linear(64, 24), tnn.ReLU(), tnn.Linear(24, 5))


def flax_vgg(x):
    for out in (8, 16):
        x = nn.max_pool(nn.relu(nn.Conv(out, (3, 3), padding=1)(x)), (2, 2), (2, 2))
    return nn.Dense(5)(nn.relu(nn.Dense(24)(x.reshape(x.shape[0], -1))))


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


def dense_layer(ins, mid, growth):
    def forward(self, x):
        y = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(y)))], 1)

    first = {"norm1": tnn.BatchNorm2d(ins), "conv1": c(ins, mid, 1)}
    return Net(forward, **first, norm2=tnn.BatchNorm2d(mid), conv2=c(mid, growth, 3, 1, 1))


def densenet(growth, config, first, bn_size):
    """Laid out as torchvision's, norm5 and the dotted names included."""
    ins, parts = first, {"conv0": c(3, first, 3, 1, 1), "norm0": tnn.BatchNorm2d(first)}
    for k, depth in enumerate(config, 1):
        layers = {}
        for j in range(1, depth + 1):
            layers[f"denselayer{j}"] = dense_layer(ins, bn_size * growth, growth)
            ins += growth
        parts[f"denseblock{k}"] = tnn.Sequential(OrderedDict(layers))
        if k < len(config):
            layers = {"norm": tnn.BatchNorm2d(ins), "relu": tnn.ReLU(), "conv": c(ins, ins // 2, 1)}
            parts[f"transition{k}"] = tnn.Sequential(OrderedDict(layers, pool=tnn.AvgPool2d(2)))
            ins //= 2
    return Net(
        lambda self, x: self.classifier(torch.relu(self.features(x)).mean((2, 3))),
        features=tnn.Sequential(OrderedDict(parts, norm5=tnn.BatchNorm2d(ins))),
        classifier=tnn.Linear(ins, 5),
    )


def flax_densenet(x, growth, config, first, bn_size):
    def norm_conv(x, norm, name, *shape):
        return conv(nn.relu(bn(x, norm)), name, *shape, bias=False)

    x = bn(conv(x, "features.conv0", first, 3, 1, 1, bias=False), "features.norm0")
    for k, depth in enumerate(config, 1):
        for j in range(1, depth + 1):
            name = f"features.denseblock{k}.denselayer{j}"
            y = norm_conv(x, f"{name}.norm1", f"{name}.conv1", bn_size * growth, 1)
            y = norm_conv(y, f"{name}.norm2", f"{name}.conv2", growth, 3, 1, 1)
            x = jnp.concatenate([x, y], -1)
        if k < len(config):
            name = f"features.transition{k}"
            x = norm_conv(x, f"{name}.norm", f"{name}.conv", x.shape[-1] // 2, 1)
            n, h, w, channels = x.shape
            x = x.reshape(n, h // 2, 2, w // 2, 2, channels).mean((2, 4))
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
