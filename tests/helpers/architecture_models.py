"""Small models of many kinds, each a function of layers (`two_frameworks`) and inputs.

Sequential's numbers and torchvision's or transformers' names are those of the originals.
"""

import math

import numpy as np

CAUSAL = np.triu(np.full((6, 6), -1e9, np.float32), 1)
POSITIONS = np.arange(6)


# --- images -----------------------------------------------------------------------------------


def halves(x):
    """Blocks of two by two as axes 2 and 4."""
    n, h, w, channels = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, channels)


def pool(x):
    return x.mean((1, 2))


def vgg(n, x):
    for name, out in (("0", 8), ("3", 16)):
        x = n.max(halves(n.relu(n.conv(x, name, out, 3, p=1))), (2, 4))
    return n.dense(n.relu(n.dense(n.flatten(x), "7", 24)), "9", 5)


def resnet(n, x, bottleneck):
    x = n.relu(n.bn(n.conv(x, "conv1", 8, 3, 1, 1, bias=False), "bn1"))
    for k, mid in enumerate((8, 16), 1):
        out = 4 * mid if bottleneck else mid
        for j in range(2):
            s, name = 2 if k > 1 and not j else 1, f"layer{k}.{j}"
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
    """Laid out as torchvision's, norm5 and the dotted names included."""

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
            x = halves(norm_conv(x, name, "", x.shape[-1] // 2, 1)).mean((2, 4))
    return n.dense(pool(n.relu(n.bn(x, "features.norm5"))), "classifier", 5)


def mobilenet(n, x):
    at, x = 3, n.relu6(n.bn(n.conv(x, "features.0", 8, 3, 2, 1, bias=False), "features.1"))
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
    x = double(n.max(halves(first), (2, 4)), "down2", 16)
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
    """As AlphaZero has them: both convolutions are declared before what reads them."""
    x = n.relu(n.conv(x, "stem", 16, 3, 1, 1))
    policy, value = n.conv(x, "policy_conv", 2, 1), n.conv(x, "value_conv", 1, 1)
    return n.dense(n.flatten(policy), "policy_fc", 7) + n.dense(n.flatten(value), "value_fc", 7)


# --- sequences --------------------------------------------------------------------------------


def attend(n, q, k, v, heads=2, bias=None):
    """Attention between projections, each (batch, length, width)."""
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k, v))
    weights = n.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    soft = n.softmax(weights if bias is None else weights + n.asarray(bias), -1)
    y = n.einsum("bhqk,bkhd->bqhd", soft, v)
    return y.reshape(*y.shape[:2], -1)


def projected(n, x, of, name, words, biased=True, **more):
    """Attention of `x` to `of`, with the layers of such words."""
    q, k, v = (
        n.dense(y, f"{name}.{word}", 8, biased) for y, word in zip((x, of, of), words, strict=False)
    )
    return n.dense(attend(n, q, k, v, **more), f"{name}.{words[3]}", 8, biased)


def vit(n, x):
    x = n.conv(x, "conv_proj", 12, 4, 4)
    token = n.param("class_token", 1, 1, 12)
    x = n.concatenate([0 * x[:, :1, 0] + token, x.reshape(len(x), -1, 12)], 1)
    x = x + n.param("pos_embedding", 1, 5, 12)
    for k in range(2):
        name = f"encoder.layers.{k}"
        x = x + n.attention(n.ln(x, f"{name}.norm1"), f"{name}.self_attn", 3)
        y = n.gelu(n.dense(n.ln(x, f"{name}.norm2"), f"{name}.linear1", 24))
        x = x + n.dense(y, f"{name}.linear2", 12)
    return n.dense(n.ln(x, "ln")[:, 0], "head", 5)


def recurrent(n, x, kind):
    return n.dense(n.recurrent(x, "rnn", kind, 8, 2), "head", 5)


def gpt2(n, ids):
    x = n.embed(ids, "wte", 11, 8) + n.embed(n.asarray(POSITIONS), "wpe", 6, 8)
    for k in range(2):
        y = n.conv1d(n.ln(x, f"h.{k}.ln_1"), f"h.{k}.attn.c_attn", 24)
        y = attend(n, y[..., :8], y[..., 8:16], y[..., 16:], bias=CAUSAL)
        x = x + n.conv1d(y, f"h.{k}.attn.c_proj", 8)
        y = n.gelu(n.conv1d(n.ln(x, f"h.{k}.ln_2"), f"h.{k}.mlp.c_fc", 32))
        x = x + n.conv1d(y, f"h.{k}.mlp.c_proj", 8)
    return n.tied(n.ln(x, "ln_f"), "lm_head", "wte")


def bert(n, ids):
    x = n.embed(ids, "word_embeddings", 11, 8)
    x = n.ln(x + n.embed(n.asarray(POSITIONS), "position_embeddings", 6, 8), "norm")
    words = ("self.query", "self.key", "self.value", "dense")
    for k in range(2):
        name = f"layer.{k}"
        y = projected(n, x, x, f"{name}.attention", words)
        x = n.ln(x + y, f"{name}.attention.norm")
        y = n.gelu(n.dense(x, f"{name}.intermediate", 32))
        x = n.ln(x + n.dense(y, f"{name}.output", 8), f"{name}.norm")
    return n.dense(x[:, 0], "pooler", 8)


def whisper(n, sound, ids):
    """Two convolutions over time, an encoder and a decoder with attention to it."""
    words = ("query", "key", "value", "out")

    def mlp(x, name):
        y = n.gelu(n.dense(n.ln(x, f"{name}.mlp_ln"), f"{name}.mlp.0", 32))
        return x + n.dense(y, f"{name}.mlp.2", 8)

    x = n.gelu(n.conv(sound, "conv1", 8, 3, 1, 1))
    x = n.gelu(n.conv(x, "conv2", 8, 3, 2, 1))
    y = n.ln(x, "encoder.0.attn_ln")
    x = mlp(x + projected(n, y, y, "encoder.0.attn", words), "encoder.0")
    z = n.embed(ids, "token_embedding", 11, 8)
    y = n.ln(z, "decoder.0.attn_ln")
    z = z + projected(n, y, y, "decoder.0.attn", words, bias=CAUSAL)
    y = n.ln(z, "decoder.0.cross_attn_ln")
    z = mlp(z + projected(n, y, x, "decoder.0.cross_attn", words), "decoder.0")
    return n.tied(z, "proj_out", "token_embedding")


def t5(n, source, target):
    """No biases, positions in the first block's attention, and one embedding for all three."""
    words = ("q", "k", "v", "o")

    def stack(x, name, mask, of=None):
        bias = mask
        for k in range(2):
            block, at = f"{name}.block.{k}.layer", 1
            y = n.rms(x, f"{block}.0.layer_norm")
            if not k:
                apart = n.asarray(POSITIONS[:, None] - POSITIONS + 5)
                table = f"{block}.0.SelfAttention.relative_attention_bias"
                bias = n.einsum("qkh->hqk", n.embed(apart, table, 11, 2)) + n.asarray(mask)
            x = x + projected(n, y, y, f"{block}.0.SelfAttention", words, False, bias=bias)
            if of is not None:
                y, at = n.rms(x, f"{block}.1.layer_norm"), 2
                x = x + projected(n, y, of, f"{block}.1.EncDecAttention", words, False)
            y = n.rms(x, f"{block}.{at}.layer_norm")
            y = n.relu(n.dense(y, f"{block}.{at}.DenseReluDense.wi", 32, False))
            x = x + n.dense(y, f"{block}.{at}.DenseReluDense.wo", 8, False)
        return n.rms(x, f"{name}.final_layer_norm")

    x, y = (n.embed(ids, "shared", 11, 8) for ids in (source, target))
    y = stack(y, "decoder", CAUSAL, stack(x, "encoder", 0 * CAUSAL))
    return n.tied(y, "lm_head", "shared")
