"""Models of images, whose layers have other names and another order in Flax."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import torch
from torch import nn as tnn

F = tnn.functional
LayerNorm = partial(nn.LayerNorm, epsilon=1e-5)
BatchNorm = partial(nn.BatchNorm, use_running_average=True)
Doubled = partial(nn.ConvTranspose, kernel_size=(2, 2), strides=(2, 2), padding="VALID")
conv3 = partial(tnn.Conv2d, kernel_size=3, padding=1)


def flat(x):
    """Flattens all but the first axis, in either framework."""
    return x.reshape(len(x), -1)


# --- plain ones ---------------------------------------------------------------------------------


class ColourMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.relu(nn.Dense(16)(flat(x))))


def colour_mlp():
    return tnn.Sequential(tnn.Flatten(), tnn.Linear(108, 16), tnn.ReLU(), tnn.Linear(16, 5))


class NestedMLP(nn.Module):
    """Calls in calls, which linen numbers from the outside."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(12)(jnp.tanh(nn.Dense(12)(jnp.tanh(nn.Dense(12)(x)))))


def nested_mlp():
    layers = [tnn.Linear(12, 12), tnn.Tanh(), tnn.Linear(12, 12), tnn.Tanh(), tnn.Linear(12, 12)]
    return tnn.Sequential(*layers)


class NestedConvs(nn.Module):
    @nn.compact
    def __call__(self, x):
        conv = nn.Conv(4, (1, 1))
        return conv(nn.relu(nn.Conv(8, (3, 3))(nn.relu(nn.Conv(8, (3, 3))(x)))))


def nested_convs():
    convs = [conv3(8, 8), tnn.ReLU(), conv3(8, 8)]
    return tnn.Sequential(*convs, tnn.ReLU(), tnn.Conv2d(8, 4, 1))


class C3D(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3, 3))(x))
        x = nn.max_pool(x, (2, 2, 2), (2, 2, 2))
        x = nn.relu(nn.Conv(6, (3, 3, 3))(x))
        return nn.Dense(5)(nn.relu(nn.Dense(16)(flat(x))))


class TorchC3D(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = tnn.Conv3d(3, 4, 3, padding=1)
        self.pool1 = tnn.MaxPool3d(2)
        self.conv2 = tnn.Conv3d(4, 6, 3, padding=1)
        self.fc6 = tnn.Linear(48, 16)
        self.fc7 = tnn.Linear(16, 5)

    def forward(self, x):
        x = self.pool1(F.relu(self.conv1(x)))
        return self.fc7(F.relu(self.fc6(flat(F.relu(self.conv2(x))))))


# --- residual and separable ones ----------------------------------------------------------------


class BasicBlock(nn.Module):
    """As in Flax's own example: the projection is called last, and named."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        def norm(y, name=None):
            return BatchNorm(name=name)(y)

        step = (self.stride, self.stride)
        pad = ((1, 1), (1, 1))
        y = nn.relu(norm(nn.Conv(self.width, (3, 3), step, pad, use_bias=False)(x)))
        y = norm(nn.Conv(self.width, (3, 3), padding=pad, use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), step, use_bias=False, name="conv_proj")(x)
            x = norm(x, "norm_proj")
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), padding=((1, 1), (1, 1)), use_bias=False, name="conv_init")(x)
        x = nn.relu(BatchNorm(name="bn_init")(x))
        for width, stride in ((8, 1), (8, 1), (16, 2), (16, 1)):
            x = BasicBlock(width, stride)(x)
        return nn.Dense(5)(x.mean((1, 2)))


class TorchBasicBlock(tnn.Module):
    def __init__(self, ins, out, stride):
        super().__init__()
        self.conv1 = tnn.Conv2d(ins, out, 3, stride, 1, bias=False)
        self.bn1 = tnn.BatchNorm2d(out)
        self.conv2 = tnn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = tnn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1:
            shortcut = tnn.Conv2d(ins, out, 1, stride, bias=False)
            self.downsample = tnn.Sequential(shortcut, tnn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (self.downsample(x) if self.downsample else x))


class TorchResNet(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = tnn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = tnn.BatchNorm2d(8)
        self.layer1 = tnn.Sequential(TorchBasicBlock(8, 8, 1), TorchBasicBlock(8, 8, 1))
        self.layer2 = tnn.Sequential(TorchBasicBlock(8, 16, 2), TorchBasicBlock(16, 16, 1))
        self.fc = tnn.Linear(16, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with GroupNorm, in nested calls."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            depthwise = nn.Conv(8, (3, 3), feature_group_count=8, use_bias=False)
            pointwise = nn.Conv(8, (1, 1), use_bias=False)
            norm = nn.GroupNorm(2, epsilon=1e-5)
            x = nn.relu(norm(pointwise(nn.relu(nn.GroupNorm(2, epsilon=1e-5)(depthwise(x))))))
        return nn.Dense(5)(x.mean((1, 2)))


class TorchSeparable(tnn.Module):
    def __init__(self):
        super().__init__()
        blocks = []
        for _ in range(2):
            blocks += [tnn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), tnn.GroupNorm(2, 8)]
            blocks += [tnn.ReLU(), tnn.Conv2d(8, 8, 1, bias=False), tnn.GroupNorm(2, 8), tnn.ReLU()]
        self.net = tnn.Sequential(*blocks)
        self.head = tnn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.net(x).mean((2, 3)))


class Stage(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + nn.Conv(self.width, (3, 3))(nn.gelu(LayerNorm()(x)))


class Backwards(nn.Module):
    """Blocks whose numbers run from the output to the input."""

    @nn.compact
    def __call__(self, x):
        for k in (3, 2, 1, 0):
            x = Stage(6, name=f"blocks_{k}")(x)
        return nn.Dense(5)(x.mean((1, 2)))


class TorchStage(tnn.Module):
    def __init__(self):
        super().__init__()
        self.norm = tnn.LayerNorm(6)
        self.conv = conv3(6, 6)

    def forward(self, x):
        y = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return x + self.conv(F.gelu(y, approximate="tanh"))


class TorchBackwards(tnn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = tnn.ModuleList(TorchStage() for _ in range(4))
        self.head = tnn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


# --- upwards ------------------------------------------------------------------------------------


class FCN8s(nn.Module):
    @nn.compact
    def __call__(self, x):
        def up(y, name):
            pad = ((2, 2), (2, 2))
            return nn.ConvTranspose(5, (4, 4), (2, 2), pad, use_bias=False, name=name)(y)

        x = nn.relu(nn.Conv(8, (3, 3), name="conv1_1")(x))
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3), name="conv1_2")(x)), (2, 2), (2, 2))
        pool3 = x
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3), name="conv2_1")(x)), (2, 2), (2, 2))
        pool4 = x
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3), name="conv3_1")(x)), (2, 2), (2, 2))
        x = up(nn.Conv(5, (1, 1), name="score_fr")(x), "upscore2")
        x = up(x + nn.Conv(5, (1, 1), name="score_pool4")(pool4), "upscore_pool4")
        return up(x + nn.Conv(5, (1, 1), name="score_pool3")(pool3), "upscore8")


class TorchFCN8s(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv1_1 = conv3(3, 8)
        self.conv1_2 = conv3(8, 8)
        self.conv2_1 = conv3(8, 8)
        self.conv3_1 = conv3(8, 8)
        self.score_fr = tnn.Conv2d(8, 5, 1)
        self.score_pool3 = tnn.Conv2d(8, 5, 1)
        self.score_pool4 = tnn.Conv2d(8, 5, 1)
        self.upscore2 = tnn.ConvTranspose2d(5, 5, 4, 2, 1, bias=False)
        self.upscore8 = tnn.ConvTranspose2d(5, 5, 4, 2, 1, bias=False)
        self.upscore_pool4 = tnn.ConvTranspose2d(5, 5, 4, 2, 1, bias=False)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1_2(F.relu(self.conv1_1(x)))), 2)
        pool3 = x
        x = F.max_pool2d(F.relu(self.conv2_1(x)), 2)
        pool4 = x
        x = F.max_pool2d(F.relu(self.conv3_1(x)), 2)
        x = self.upscore2(self.score_fr(x))
        x = self.upscore_pool4(x + self.score_pool4(pool4))
        return self.upscore8(x + self.score_pool3(pool3))


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        pad = ((1, 1), (1, 1))
        x = nn.relu(nn.Conv(8, (3, 3), (2, 2), pad)(x))
        x = nn.relu(nn.Conv(16, (3, 3), (2, 2), pad)(x))
        x = nn.Dense(64)(nn.relu(nn.Dense(10)(flat(x))))
        x = nn.relu(x).reshape(len(x), 2, 2, 16)
        x = nn.relu(Doubled(8)(x))
        return Doubled(3)(x)


class TorchAutoencoder(tnn.Module):
    def __init__(self):
        super().__init__()
        convs = [tnn.Conv2d(3, 8, 3, 2, 1), tnn.ReLU(), tnn.Conv2d(8, 16, 3, 2, 1), tnn.ReLU()]
        self.encoder = tnn.Sequential(*convs, tnn.Flatten(), tnn.Linear(64, 10), tnn.ReLU())
        ups = [tnn.ConvTranspose2d(16, 8, 2, 2), tnn.ReLU(), tnn.ConvTranspose2d(8, 3, 2, 2)]
        first = [tnn.Linear(10, 64), tnn.ReLU(), tnn.Unflatten(1, (16, 2, 2))]
        self.decoder = tnn.Sequential(*first, *ups)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class PixelVAE(nn.Module):
    """Fully connected, on colours, with two heads of one shape; gives a picture."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(24)(flat(x)))
        mean, spread = nn.Dense(4, name="mean")(hidden), nn.Dense(4, name="spread")(hidden)
        z = mean + jnp.exp(0.5 * spread)
        return nn.Dense(108)(nn.relu(nn.Dense(24)(z))).reshape(x.shape)


class TorchPixelVAE(tnn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = tnn.Linear(108, 24)
        self.fc21 = tnn.Linear(24, 4)
        self.fc22 = tnn.Linear(24, 4)
        self.fc3 = tnn.Linear(4, 24)
        self.fc4 = tnn.Linear(24, 108)

    def forward(self, x):
        hidden = F.relu(self.fc1(flat(x)))
        z = self.fc21(hidden) + torch.exp(0.5 * self.fc22(hidden))
        return self.fc4(F.relu(self.fc3(z))).reshape(x.shape)


class Generator(nn.Module):
    """DCGAN's: every layer but the last without a bias and with BatchNorm."""

    @nn.compact
    def __call__(self, z):
        x = z[:, None, None, :]
        for width in (8, 8):
            x = Doubled(width, use_bias=False)(x)
            x = nn.relu(BatchNorm()(x))
        return jnp.tanh(Doubled(3, use_bias=False)(x))


class TorchGenerator(tnn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for _ in range(2):
            layers += [tnn.ConvTranspose2d(8, 8, 2, 2, bias=False), tnn.BatchNorm2d(8), tnn.ReLU()]
        self.main = tnn.Sequential(*layers, tnn.ConvTranspose2d(8, 3, 2, 2, bias=False), tnn.Tanh())

    def forward(self, z):
        return self.main(z[:, :, None, None])


class ConditionalDiscriminator(nn.Module):
    """The picture's values beside those of its label."""

    @nn.compact
    def __call__(self, x, label):
        x = jnp.concatenate([flat(x), nn.Embed(11, 10)(label)[:, 0]], -1)
        x = nn.leaky_relu(nn.Dense(24)(x), 0.2)
        return nn.Dense(1)(nn.leaky_relu(nn.Dense(24)(x), 0.2))


class TorchConditionalDiscriminator(tnn.Module):
    def __init__(self):
        super().__init__()
        self.label_embedding = tnn.Embedding(11, 10)
        layers = [tnn.Linear(118, 24), tnn.LeakyReLU(0.2), tnn.Linear(24, 24), tnn.LeakyReLU(0.2)]
        self.model = tnn.Sequential(*layers, tnn.Linear(24, 1))

    def forward(self, x, label):
        return self.model(torch.cat((flat(x), self.label_embedding(label)[:, 0]), -1))


class ProjectionDiscriminator(nn.Module):
    """The flattened map meets a table of as many columns, and a matrix."""

    @nn.compact
    def __call__(self, x, label):
        x = flat(nn.leaky_relu(nn.Conv(8, (3, 3), (2, 2), ((1, 1), (1, 1)))(x), 0.2))
        return nn.Dense(1)(x)[:, 0] + (nn.Embed(11, 72)(label)[:, 0] * x).sum(-1)


class TorchProjectionDiscriminator(tnn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = tnn.Conv2d(3, 8, 3, 2, 1)
        self.l5 = tnn.Linear(72, 1)
        self.l_y = tnn.Embedding(11, 72)

    def forward(self, x, label):
        x = flat(F.leaky_relu(self.c1(x), 0.2))
        return self.l5(x)[:, 0] + (self.l_y(label)[:, 0] * x).sum(-1)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        def double(y, width):
            for _ in range(2):
                y = nn.Conv(width, (3, 3))(y)
                y = nn.relu(BatchNorm()(y))
            return y

        first = double(x, 8)
        second = double(nn.max_pool(first, (2, 2), (2, 2)), 16)
        third = double(nn.max_pool(second, (2, 2), (2, 2)), 16)
        y = Doubled(16)(third)
        y = double(jnp.concatenate([second, y], -1), 16)
        y = Doubled(8)(y)
        return nn.Conv(2, (1, 1))(double(jnp.concatenate([first, y], -1), 8))


def double_conv(ins, out):
    layers = []
    for width in (ins, out):
        layers += [conv3(width, out), tnn.BatchNorm2d(out), tnn.ReLU()]
    return tnn.Sequential(*layers)


class TorchUNet(tnn.Module):
    """Declares the decoder's parts in another order than it calls them."""

    def __init__(self):
        super().__init__()
        self.inc = double_conv(3, 8)
        self.down1 = double_conv(8, 16)
        self.down2 = double_conv(16, 16)
        self.up1 = tnn.ConvTranspose2d(16, 16, 2, 2)
        self.up2 = tnn.ConvTranspose2d(16, 8, 2, 2)
        self.conv1 = double_conv(32, 16)
        self.conv2 = double_conv(16, 8)
        self.outc = tnn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = self.inc(x)
        second = self.down1(F.max_pool2d(first, 2))
        third = self.down2(F.max_pool2d(second, 2))
        y = self.conv1(torch.cat([second, self.up1(third)], 1))
        return self.outc(self.conv2(torch.cat([first, self.up2(y)], 1)))


# --- without convolutions, or with a few --------------------------------------------------------


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(9)(nn.gelu(nn.Dense(12)(y)))
        x = x + y.swapaxes(1, 2)
        y = LayerNorm()(x)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(y)))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (2, 2), (2, 2), name="stem")(x)
        x = x.reshape(len(x), -1, 8)
        for _ in range(2):
            x = MixerBlock()(x)
        x = LayerNorm(name="pre_head_layer_norm")(x)
        return nn.Dense(5, name="head")(x.mean(1))


class TorchMixerBlock(tnn.Module):
    """Mixes the tokens with convolutions of one place, as in lucidrains' version."""

    def __init__(self):
        super().__init__()
        self.norm1 = tnn.LayerNorm(8)
        self.token = tnn.Sequential(tnn.Conv1d(9, 12, 1), tnn.GELU("tanh"), tnn.Conv1d(12, 9, 1))
        self.norm2 = tnn.LayerNorm(8)
        self.channel = tnn.Sequential(tnn.Linear(8, 16), tnn.GELU("tanh"), tnn.Linear(16, 8))

    def forward(self, x):
        x = x + self.token(self.norm1(x))
        return x + self.channel(self.norm2(x))


class TorchMixer(tnn.Module):
    def __init__(self):
        super().__init__()
        self.patch = tnn.Conv2d(3, 8, 2, 2)
        self.blocks = tnn.Sequential(TorchMixerBlock(), TorchMixerBlock())
        self.norm = tnn.LayerNorm(8)
        self.head = tnn.Linear(8, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class PointNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (8, 16):
            x = nn.relu(BatchNorm()(nn.Dense(width)(x)))
        return nn.Dense(5)(nn.relu(nn.Dense(12)(x.max(1))))


class TorchPointNet(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = tnn.Conv1d(3, 8, 1)
        self.conv2 = tnn.Conv1d(8, 16, 1)
        self.fc1 = tnn.Linear(16, 12)
        self.fc2 = tnn.Linear(12, 5)
        self.bn1 = tnn.BatchNorm1d(8)
        self.bn2 = tnn.BatchNorm1d(16)

    def forward(self, x):
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return self.fc2(F.relu(self.fc1(x.amax(2))))


class Siamese(nn.Module):
    @nn.compact
    def __call__(self, left, right):
        convs = [nn.Conv(6, (3, 3)), nn.Conv(6, (3, 3))]
        dense = nn.Dense(8)

        def embed(x):
            for conv in convs:
                x = nn.max_pool(nn.relu(conv(x)), (2, 2), (2, 2))
            return nn.sigmoid(dense(flat(x)))

        return nn.Dense(1)(jnp.abs(embed(left) - embed(right)))


class TorchSiamese(tnn.Module):
    def __init__(self):
        super().__init__()
        convs = [conv3(6, 6), tnn.ReLU(), tnn.MaxPool2d(2)]
        convs += [conv3(6, 6), tnn.ReLU(), tnn.MaxPool2d(2)]
        self.conv = tnn.Sequential(*convs)
        self.liner = tnn.Sequential(tnn.Linear(24, 8), tnn.Sigmoid())
        self.out = tnn.Linear(8, 1)

    def forward(self, left, right):
        left, right = (self.liner(flat(self.conv(x))) for x in (left, right))
        return self.out((left - right).abs())


class Rectified(nn.Module):
    """PReLU, and a list of bare parameters."""

    @nn.compact
    def __call__(self, x):
        x = nn.PReLU(negative_slope_init=0.25)(nn.Conv(6, (3, 3))(x))
        x = nn.PReLU(negative_slope_init=0.25)(nn.Conv(6, (3, 3))(x)).mean((1, 2))
        for k in range(2):
            x = x + jnp.tanh(x @ self.param(f"mix{k}", nn.initializers.ones, (6, 6)))
        return x


class TorchRectified(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = conv3(3, 6)
        self.prelu1 = tnn.PReLU()
        self.conv2 = conv3(6, 6)
        self.prelu2 = tnn.PReLU()
        self.mixes = tnn.ParameterList([tnn.Parameter(torch.ones(6, 6)) for _ in range(2)])

    def forward(self, x):
        x = self.prelu2(self.conv2(self.prelu1(self.conv1(x)))).mean((2, 3))
        for mix in self.mixes:
            x = x + torch.tanh(x @ mix)
        return x


class CRNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 1), (2, 1))
        x = nn.relu(nn.Conv(6, (3, 3))(x))
        x = x.swapaxes(1, 2)  # (batch, width, height, channels)
        x = x.reshape(*x.shape[:2], -1)
        forward, backward = nn.RNN(nn.OptimizedLSTMCell(8)), nn.RNN(nn.OptimizedLSTMCell(8))
        return nn.Dense(5)(nn.Bidirectional(forward, backward)(x))


class TorchCRNN(tnn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = tnn.Sequential(conv3(3, 4), tnn.ReLU())
        self.cnn.append(tnn.MaxPool2d((2, 1)))
        self.cnn.append(conv3(4, 6))
        self.cnn.append(tnn.ReLU())
        self.rnn = tnn.LSTM(18, 8, bidirectional=True, batch_first=True)
        self.embedding = tnn.Linear(16, 5)

    def forward(self, x):
        x = self.cnn(x).permute(0, 3, 1, 2)  # (batch, width, channels, height)
        return self.embedding(self.rnn(x.flatten(2))[0])


PICTURE = (3, 3, 6, 6)
PAIRS = {
    "MLP of colour images": (colour_mlp, ColourMLP, (PICTURE,)),
    "MLP in nested calls": (nested_mlp, NestedMLP, ((4, 12),)),
    "convolutions in nested calls": (nested_convs, NestedConvs, ((2, 8, 6, 6),)),
    "C3D": (TorchC3D, C3D, ((2, 3, 4, 4, 4),)),
    "ResNet of Flax's example": (TorchResNet, ResNet, (PICTURE,)),
    "depthwise with GroupNorm, nested": (TorchSeparable, Separable, ((2, 8, 6, 6),)),
    "blocks numbered backwards": (TorchBackwards, Backwards, ((2, 6, 5, 5),)),
    "FCN-8s": (TorchFCN8s, FCN8s, ((2, 3, 8, 8),)),
    "autoencoder": (TorchAutoencoder, Autoencoder, ((2, 3, 8, 8),)),
    "VAE of pixels": (TorchPixelVAE, PixelVAE, (PICTURE,)),
    "DCGAN's generator": (TorchGenerator, Generator, ((3, 8),)),
    "conditional discriminator": (
        TorchConditionalDiscriminator,
        ConditionalDiscriminator,
        (PICTURE, 1),
    ),
    "projection discriminator": (
        TorchProjectionDiscriminator,
        ProjectionDiscriminator,
        (PICTURE, 1),
    ),
    "U-Net, declared in another order": (TorchUNet, UNet, ((2, 3, 8, 8),)),
    "MLP-Mixer": (TorchMixer, Mixer, (PICTURE,)),
    "PointNet": (TorchPointNet, PointNet, ((2, 3, 7),)),
    "Siamese": (TorchSiamese, Siamese, ((2, 6, 8, 8), (2, 6, 8, 8))),
    "PReLU and ParameterList": (TorchRectified, Rectified, (PICTURE,)),
    "CRNN": (TorchCRNN, CRNN, ((2, 3, 6, 5),)),
}
# In Flax, arrays of three axes and more have their channels last.
CASES = {name: (*pair, 3) for name, pair in PAIRS.items()}
