"""Image models, each a function of layers (`two_frameworks`) and inputs.

Sequential's numbers and torchvision's names are those of the originals.
"""


def halved(reduce, x):
    """Reduces blocks of length two along every spatial axis."""
    shape = [len(x)]
    for size in x.shape[1:-1]:
        shape += [size // 2, 2]
    blocks = x.reshape(*shape, x.shape[-1])
    return reduce(blocks, tuple(range(2, blocks.ndim - 1, 2)))


def pool(x):
    return x.mean((1, 2))


def vgg(n, x):
    for name, out in (("0", 8), ("3", 16)):
        x = halved(n.max, n.relu(n.conv(x, name, out, 3, p=1)))
    return n.dense(n.relu(n.dense(n.flatten(x), "7", 24)), "9", 5)


def resnet(n, x, bottleneck):
    x = n.relu(n.bn(n.conv(x, "conv1", 8, 3, 1, 1, bias=False), "bn1"))
    for k, mid in enumerate((8, 16), 1):
        out = 4 * mid if bottleneck else mid
        for j in range(2):
            s = 2 if k > 1 and not j else 1
            name = f"layer{k}.{j}"
            shapes = [(out, 3, s, 1), (out, 3, 1, 1)]
            if bottleneck:
                shapes = [(mid, 1, 1, 0), (mid, 3, s, 1), (out, 1, 1, 0)]
            y = x
            for i, shape in enumerate(shapes, 1):
                y = n.relu(y) if i > 1 else y
                y = n.bn(n.conv(y, f"{name}.conv{i}", *shape, bias=False), f"{name}.bn{i}")
            if s > 1 or x.shape[-1] != out:
                x = n.conv(x, f"{name}.downsample.0", out, 1, s, bias=False)
                x = n.bn(x, f"{name}.downsample.1")
            x = n.relu(x + y)
    return n.dense(pool(x), "fc", 5)


def densenet(n, x, growth, config, first, bn_size):
    """Computes a DenseNet with torchvision's names, including norm5 and the dotted names."""

    def norm_conv(x, name, k, *shape):
        return n.conv(n.relu(n.bn(x, f"{name}.norm{k}")), f"{name}.conv{k}", *shape, bias=False)

    x = n.bn(n.conv(x, "features.conv0", first, 3, 1, 1, bias=False), "features.norm0")
    for k, depth in enumerate(config, 1):
        for j in range(1, depth + 1):
            name = f"features.denseblock{k}.denselayer{j}"
            y = norm_conv(norm_conv(x, name, 1, bn_size * growth, 1), name, 2, growth, 3, 1, 1)
            x = n.concatenate([x, y], -1)
        if k < len(config):
            name = f"features.transition{k}"
            x = halved(n.mean, norm_conv(x, name, "", x.shape[-1] // 2, 1))
    return n.dense(pool(n.relu(n.bn(x, "features.norm5"))), "classifier", 5)


def mobilenet(n, x):
    at = 3
    x = n.relu6(n.bn(n.conv(x, "features.0", 8, 3, 2, 1, bias=False), "features.1"))
    for ins, out in ((8, 16), (16, 24)):
        x = n.conv(x, f"features.{at}", ins, 3, 1, 1, ins, False)
        x = n.relu6(n.bn(x, f"features.{at + 1}"))
        x = n.bn(n.conv(x, f"features.{at + 3}", out, 1, bias=False), f"features.{at + 4}")
        at += 5
    return n.dense(pool(x), "classifier.1", 5)


def efficientnet(n, x):
    def conv_norm(x, name, *shape):
        return n.bn(n.conv(x, f"{name}.0", *shape, bias=False), f"{name}.1")

    x = n.silu(conv_norm(x, "features.0", 8, 3, 2, 1))
    for k, out in enumerate((8, 12)):
        name = f"features.1.{k}.block"
        y = n.silu(conv_norm(x, f"{name}.0", 32, 1))
        y = n.silu(conv_norm(y, f"{name}.1", 32, 3, 1, 1, 32))
        z = n.silu(n.conv(y.mean((1, 2), keepdims=True), f"{name}.2.fc1", 2, 1))
        y = conv_norm(y * n.sigmoid(n.conv(z, f"{name}.2.fc2", 32, 1)), f"{name}.3", out, 1)
        x = x + y if x.shape == y.shape else y
    return n.dense(pool(n.silu(conv_norm(x, "features.2", 20, 1))), "classifier.1", 5)


def convnext(n, x):
    x = n.conv(x, "down", 12, 2, 2)
    for k in range(2):
        gamma = n.param(f"stages.{k}.gamma", 12)
        y = n.ln(n.conv(x, f"stages.{k}.dwconv", 12, 7, 1, 3, 12), f"stages.{k}.norm")
        y = n.dense(y, f"stages.{k}.pwconv1", 48)
        x = x + gamma * n.dense(n.gelu(y), f"stages.{k}.pwconv2", 12)
    return n.dense(n.ln(pool(x), "norm"), "head", 5)


def unet(n, x):
    def double(x, name, out):
        return n.bn(n.relu(n.conv(x, f"{name}.0", out, 3, 1, 1)), f"{name}.2")

    first = double(x, "down1", 8)
    x = double(halved(n.max, first), "down2", 16)
    x = n.concatenate([first, n.conv_transpose(x, "up", 8, 2)], -1)
    return n.conv(double(x, "merge", 8), "out", 2, 1)


def tabular(n, x, row):
    x = pool(n.relu(n.conv(x, "conv", 16, 3)))
    return n.dense(n.concatenate([x, row], -1), "fc", 10)


def normed(n, x):
    x = n.flatten(n.relu(n.bn(n.conv(x, "0", 8, 3, 2, 1, bias=False), "1")))
    return n.dense(n.relu(n.bn(n.dense(n.bn(x, "4"), "5", 20), "6")), "8", 5)


def generator(n, x):
    x = n.unflatten(n.relu(n.bn(n.dense(x, "0", 128), "1")), 8, 4, 4)
    return n.conv_transpose(x, "4", 3, 2)


def two_heads(n, x):
    """Computes AlphaZero's two heads, whose convolutions are declared before their Linears."""
    x = n.relu(n.conv(x, "stem", 16, 3, 1, 1))
    policy = n.conv(x, "policy_conv", 2, 1)
    value = n.conv(x, "value_conv", 1, 1)
    return n.dense(n.flatten(policy), "policy_fc", 7) + n.dense(n.flatten(value), "value_fc", 7)


# --- torch has the authors' names of the layers; Flax numbers the layers ------------------------


def colour_mlp(n, x):
    return n.dense(n.relu(n.dense(n.flatten(x), "1", 16)), "3", 5)


def nested_mlp(n, x):
    x = n.tanh(n.dense(x, "0", 12))
    x = n.tanh(n.dense(x, "2", 12))
    return n.dense(x, "4", 12)


def c3d(n, x):
    x = halved(n.max, n.relu(n.conv(x, "conv1", 4, 3, p=1)))
    x = n.relu(n.conv(x, "conv2", 6, 3, p=1))
    return n.dense(n.relu(n.dense(n.flatten(x), "fc6", 16)), "fc7", 5)


def separable(n, x):
    """Computes depthwise and pointwise convolutions with GroupNorm."""
    for k in (0, 6):
        x = n.conv(x, f"net.{k}", 8, 3, p=1, groups=8, bias=False)
        x = n.relu(n.gn(x, f"net.{k + 1}", 2))
        x = n.conv(x, f"net.{k + 3}", 8, 1, bias=False)
        x = n.relu(n.gn(x, f"net.{k + 4}", 2))
    return n.dense(pool(x), "head", 5)


def stage(n, x):
    return x + n.conv(n.gelu(n.ln(x, "norm")), "conv", 6, 3, p=1)


def stages(n, x):
    for k in range(4):
        x = n.block(f"blocks.{k}", stage, x)
    return n.dense(pool(x), "head", 5)


def fcn8s(n, x):
    def conv(x, name):
        return n.relu(n.conv(x, name, 8, 3, p=1))

    def up(x, name):
        return n.conv_transpose(x, name, 5, 4, p=1, bias=False)

    pool3 = halved(n.max, conv(conv(x, "conv1_1"), "conv1_2"))
    pool4 = halved(n.max, conv(pool3, "conv2_1"))
    x = halved(n.max, conv(pool4, "conv3_1"))
    x = up(n.conv(x, "score_fr", 5, 1), "upscore2")
    x = up(x + n.conv(pool4, "score_pool4", 5, 1), "upscore_pool4")
    return up(x + n.conv(pool3, "score_pool3", 5, 1), "upscore8")


def autoencoder(n, x):
    for name, out in (("encoder.0", 8), ("encoder.2", 16)):
        x = n.relu(n.conv(x, name, out, 3, 2, 1))
    x = n.relu(n.dense(n.flatten(x), "encoder.5", 10))
    x = n.unflatten(n.relu(n.dense(x, "decoder.0", 64)), 16, 2, 2)
    x = n.relu(n.conv_transpose(x, "decoder.3", 8, 2))
    return n.conv_transpose(x, "decoder.5", 3, 2)


def dcgan(n, z):
    """Computes layers without bias and with BatchNorm, and a last layer with bias."""
    x = z[:, None, None, :]
    for k in (0, 3):
        x = n.conv_transpose(x, f"main.{k}", 8, 2, bias=False)
        x = n.relu(n.bn(x, f"main.{k + 1}"))
    return n.tanh(n.conv_transpose(x, "main.6", 3, 2, bias=False))


def conditional(n, x, label):
    """Computes a network that reads a picture's values and its label's embedding side by side."""
    label = n.embed(label, "label_embedding", 11, 10)[:, 0]
    x = n.concatenate([n.flatten(x), label], -1)
    for name in ("model.0", "model.2"):
        x = n.leaky_relu(n.dense(x, name, 24), 0.2)
    return n.dense(x, "model.4", 1)


def projection(n, x, label):
    """Computes a network in which a flattened map meets a table of equal width, and a matrix."""
    x = n.flatten(n.leaky_relu(n.conv(x, "c1", 8, 3, 2, 1), 0.2))
    row = n.embed(label, "l_y", 11, 72)[:, 0]
    return n.dense(x, "l5", 1)[:, 0] + (row * x).sum(-1)


def mixer_block(n, x):
    """Computes an MLP-Mixer that mixes tokens with convolutions of size 1, as lucidrains does."""
    y = n.ln(x, "norm1").swapaxes(1, 2)
    y = n.pointwise(n.gelu(n.pointwise(y, "token.0", 12)), "token.2", 9)
    x = x + y.swapaxes(1, 2)
    y = n.gelu(n.dense(n.ln(x, "norm2"), "channel.0", 16))
    return x + n.dense(y, "channel.2", 8)


def mixer(n, x):
    x = n.conv(x, "patch", 8, 2, 2).reshape(len(x), -1, 8)
    for k in range(2):
        x = n.block(f"blocks.{k}", mixer_block, x)
    return n.dense(n.ln(x, "norm").mean(1), "head", 5)


def pointnet(n, x):
    for k, width in ((1, 8), (2, 16)):
        x = n.relu(n.bn(n.pointwise(x, f"conv{k}", width), f"bn{k}"))
    return n.dense(n.relu(n.dense(n.max(x, 1), "fc1", 12)), "fc2", 5)


def siamese(n, left, right):
    def embedded(x):
        for name in ("conv.0", "conv.3"):
            x = halved(n.max, n.relu(n.conv(x, name, 6, 3, p=1)))
        return n.sigmoid(n.dense(n.flatten(x), "liner.0", 8))

    return n.dense(n.abs(embedded(left) - embedded(right)), "out", 1)


def rectified(n, x):
    """Computes a network with PReLU and a list of bare parameters."""
    for k in (1, 2):
        x = n.prelu(n.conv(x, f"conv{k}", 6, 3, p=1), f"prelu{k}")
    x = pool(x)
    for k in range(2):
        x = x + n.tanh(x @ n.param(f"mixes.{k}", 6, 6))
    return x


def crnn(n, x):
    x = n.relu(n.conv(x, "cnn.0", 4, 3, p=1))
    rows, height, width, channels = x.shape
    x = n.max(x.reshape(rows, height // 2, 2, width, channels), 2)
    x = n.relu(n.conv(x, "cnn.3", 6, 3, p=1))
    x = n.flatten(x.swapaxes(1, 2), 2)  # each column is one step of the sequence
    return n.dense(n.recurrent(x, "rnn", "LSTM", 8, both=True), "embedding", 5)
