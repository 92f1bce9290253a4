"""Models of sequences, graphs and tables, each a function of layers (`two_frameworks`) and inputs.

The layers have the names of torch, transformers or the models' authors.
"""

import numpy as np

from tests.helpers.two_frameworks import attend, projected

LENGTH = 6
CAUSAL = np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1)
POSITIONS = np.arange(LENGTH)


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


def bert(n, ids, in_one=False):
    """Computes a transformer block; with `in_one` the four layers of attention are one in Flax."""
    x = n.embed(ids, "word_embeddings", 11, 8)
    x = n.ln(x + n.embed(n.asarray(POSITIONS), "position_embeddings", 6, 8), "norm")
    words = ("self.query", "self.key", "self.value", "dense")
    for k in range(2):
        name = f"layer.{k}"
        if in_one:
            y = n.separate(x, f"{name}.attention", words)
        else:
            y = projected(n, x, x, f"{name}.attention", words)
        x = n.ln(x + y, f"{name}.attention.norm")
        y = n.gelu(n.dense(x, f"{name}.intermediate", 32))
        x = n.ln(x + n.dense(y, f"{name}.output", 8), f"{name}.norm")
    return n.dense(x[:, 0], "pooler", 8)


def whisper(n, sound, ids):
    """Computes two convolutions over time, an encoder, and a decoder with attention to it."""
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
    """Computes a T5: no biases, positions in the first block's attention, one shared embedding."""
    words = ("q", "k", "v", "o")

    def stack(x, name, mask, of=None):
        bias = mask
        for k in range(2):
            block = f"{name}.block.{k}.layer"
            at = 1
            y = n.rms(x, f"{block}.0.layer_norm")
            if not k:
                apart = n.asarray(POSITIONS[:, None] - POSITIONS + 5)
                table = f"{block}.0.SelfAttention.relative_attention_bias"
                bias = n.einsum("qkh->hqk", n.embed(apart, table, 11, 2)) + n.asarray(mask)
            x = x + projected(n, y, y, f"{block}.0.SelfAttention", words, False, bias=bias)
            if of is not None:
                y = n.rms(x, f"{block}.1.layer_norm")
                at = 2
                x = x + projected(n, y, of, f"{block}.1.EncDecAttention", words, False)
            y = n.rms(x, f"{block}.{at}.layer_norm")
            y = n.relu(n.dense(y, f"{block}.{at}.DenseReluDense.wi", 32, False))
            x = x + n.dense(y, f"{block}.{at}.DenseReluDense.wo", 8, False)
        return n.rms(x, f"{name}.final_layer_norm")

    x, y = (n.embed(ids, "shared", 11, 8) for ids in (source, target))
    y = stack(y, "decoder", CAUSAL, stack(x, "encoder", 0 * CAUSAL))
    return n.tied(y, "lm_head", "shared")


# --- torch has the authors' names of the layers; Flax numbers the layers ------------------------


def decoder(n, x, memory):
    """Computes two decoder layers, with attention to themselves and to a memory."""
    for k in range(2):
        name = f"decoder.layers.{k}"
        x = n.ln(x + n.attention(x, f"{name}.self_attn", 2), f"{name}.norm1")
        x = n.ln(x + n.attention(x, f"{name}.multihead_attn", 2, memory), f"{name}.norm2")
        y = n.dense(n.relu(n.dense(x, f"{name}.linear1", 16)), f"{name}.linear2", 8)
        x = n.ln(x + y, f"{name}.norm3")
    return x


def llama_block(n, x):
    words = ("q_proj", "k_proj", "v_proj", "o_proj")
    y = n.rms(x, "input_layernorm")
    x = x + projected(n, y, y, "self_attn", words, False, bias=CAUSAL)
    y = n.rms(x, "post_attention_layernorm")
    gate = n.silu(n.dense(y, "mlp.gate_proj", 12, False))
    return x + n.dense(gate * n.dense(y, "mlp.up_proj", 12, False), "mlp.down_proj", 8, False)


def llama(n, ids, tied):
    x = n.embed(ids, "embed_tokens", 11, 8)
    for k in range(2):
        x = n.block(f"layers.{k}", llama_block, x)
    x = n.rms(x, "norm")
    return n.tied(x, "lm_head", "embed_tokens") if tied else n.dense(x, "lm_head", 11, False)


def packed(n, x):
    """Computes attention with one packed kernel in torch, and three kernels in Flax."""
    for k in range(2):
        q, key, v = n.packed(n.ln(x, f"{k}.ln1"), f"{k}.qkv", 8)
        x = x + n.dense(attend(n, q, key, v, bias=CAUSAL), f"{k}.proj", 8)
        y = n.gelu(n.dense(n.ln(x, f"{k}.ln2"), f"{k}.fc", 16))
        x = x + n.dense(y, f"{k}.out", 8)
    return x


def relative_positions():
    at = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None] + 1
    return apart[0] * 3 + apart[1]


def swin_block(n, x):
    """Computes attention in windows of two by two, with a table of relative positions."""
    rows, height, width, c = x.shape
    y = n.ln(x, "norm1").reshape(rows, height // 2, 2, width // 2, 2, c)
    y = n.permute(y, (0, 1, 3, 2, 4, 5)).reshape(-1, 4, c)
    table = n.param("attn.relative_position_bias_table", 9, 2)
    index = n.buffer("attn.relative_position_index", relative_positions())
    y = n.dense(y, "attn.qkv", 3 * c)
    bias = n.permute(table[index], (2, 0, 1))
    y = attend(n, y[..., :c], y[..., c : 2 * c], y[..., 2 * c :], bias=bias)
    y = n.dense(y, "attn.proj", c).reshape(rows, height // 2, width // 2, 2, 2, c)
    x = x + n.permute(y, (0, 1, 3, 2, 4, 5)).reshape(x.shape)
    y = n.gelu(n.dense(n.ln(x, "norm2"), "mlp.fc1", 2 * c))
    return x + n.dense(y, "mlp.fc2", c)


def swin(n, x):
    x = n.ln(n.conv(x, "patch_embed.proj", 6, 2, 2), "patch_embed.norm")
    x = n.block("layers.0", swin_block, x)
    corners = (x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2])
    x = n.ln(n.concatenate(corners, -1), "merge_norm")
    x = n.block("layers.1", swin_block, n.dense(x, "reduction", 12, False))
    return n.dense(n.ln(x, "norm").mean((1, 2)), "head", 5)


def clip(n, image, ids):
    """Computes two projections: in Flax one is a bare parameter, too, and the other is a Dense."""
    scale = n.exp(n.param("logit_scale"))
    x = n.conv(image, "visual.conv1", 8, 3, 3, bias=False)
    x = n.ln(x.mean((1, 2)), "visual.ln_post") @ n.param("visual.proj", 8, 8)
    y = n.ln(n.embed(ids, "token_embedding", 11, 8).mean(1), "ln_final")
    y = n.bare(y, "text_projection", 8)
    x = x / (x * x).sum(-1, keepdims=True) ** 0.5
    y = y / (y * y).sum(-1, keepdims=True) ** 0.5
    return scale * x @ y.T


def mamba(n, u):
    y = n.dense(u, "in_proj", 16, False)
    x = n.silu(n.conv(y[..., :8], "conv1d", 8, 3, p=2, groups=8)[:, :LENGTH])
    parts = n.dense(x, "x_proj", 10, False)
    step = n.softplus(n.dense(parts[..., :2], "dt_proj", 8))[..., None]
    b = parts[..., None, 2:6]
    c = parts[..., None, 6:]
    a = -n.exp(n.param("A_log", 8, 4))
    state = n.zeros((len(u), 8, 4))
    outs = []
    for t in range(LENGTH):
        state = n.exp(step[:, t] * a) * state + step[:, t] * b[:, t] * x[:, t, :, None]
        outs.append((state * c[:, t]).sum(-1))
    z = n.silu(y[..., 8:])
    return n.dense((n.stack(outs, 1) + x * n.param("D", 8)) * z, "out_proj", 8, False)


def wavenet(n, x, normed):
    """Computes dilated convolutions with gates, with or without weight_norm."""

    def conv(x, name, out=6, k=1, dilation=0):
        past = n.conv(x, name, out, k, p=dilation, dilation=max(dilation, 1), normed=normed)
        return past[:, : x.shape[1]]

    x = conv(x, "start")
    skips = 0
    for k, dilation in enumerate((1, 2, 4)):
        y = n.tanh(conv(x, f"filter_convs.{k}", 6, 2, dilation))
        y = y * n.sigmoid(conv(x, f"gate_convs.{k}", 6, 2, dilation))
        skips = skips + conv(y, f"skip_convs.{k}")
        x = x + conv(y, f"residual_convs.{k}")
    return conv(n.relu(conv(n.relu(skips), "end_conv_1")), "end_conv_2", 4)


def dlrm(n, x, ids):
    for k in (0, 2):
        x = n.relu(n.dense(x, f"bot_l.{k}", 8))
    rows = [x]
    for k in range(3):
        rows.append(n.embed(ids[:, k], f"emb_l.{k}", 11, 8))
    rows = n.stack(rows, 1)
    dots = n.einsum("bid,bjd->bij", rows, rows)[:, *np.tril_indices(4, -1)]
    x = n.concatenate([x, dots], 1)
    for k in (0, 2):
        x = n.relu(n.dense(x, f"top_l.{k}", 8))
    return n.sigmoid(n.dense(x, "top_l.4", 1))


def lora(n, x):
    for k in range(2):
        name = f"layers.{k}"
        down = n.matrix(x, f"{name}.lora_A.default", 2)
        up = n.matrix(down, f"{name}.lora_B.default", 8)
        x = n.tanh(n.dense(x, f"{name}.base_layer", 8) + 2.0 * up)
    return n.dense(x, "head", 5)


def biaffine(n, x):
    """Computes two projections of one shape, and a Bilinear."""
    head = n.tanh(n.dense(x, "mlp_head", 6))
    dependent = n.tanh(n.dense(x, "mlp_dep", 6))
    return n.bilinear(head, dependent, "bilinear", 6)


def translator(n, source, target):
    """Computes two GRUs, the second of which attends to the first."""
    memory = n.recurrent(n.embed(source, "encoder.embedding", 11, 8), "encoder.gru", "GRU", 8)
    x = n.recurrent(n.embed(target, "decoder.embedding", 11, 8), "decoder.gru", "GRU", 8)
    weights = n.softmax(n.einsum("btd,bsd->bts", n.dense(x, "attn", 8), memory), -1)
    x = n.concatenate([x, weights @ memory], -1)
    return n.dense(n.tanh(n.dense(x, "decoder.concat", 8)), "decoder.out", 11)


def text_cnn(n, ids):
    x = n.embed(ids, "embed", 11, 8)
    maps = []
    for k, size in enumerate((2, 3, 4)):
        maps.append(n.max(n.relu(n.rows_conv(x, f"convs.{k}", 4, size)), 1))
    return n.dense(n.concatenate(maps, -1), "fc1", 5)


def highway(n, x):
    for k in range(3):
        gate = n.sigmoid(n.dense(x, f"gate.{k}", 8))
        x = gate * n.relu(n.dense(x, f"nonlinear.{k}", 8)) + (1 - gate) * x
    return n.dense(x, "out", 5)


def graph(n, x, edges):
    """Computes layers with two matrices each, on a graph given by its matrix of neighbours."""
    for k in range(2):
        own = n.dense(x, f"convs.{k}.lin_root", 8, False)
        x = n.relu(own + n.dense(edges @ x, f"convs.{k}.lin_rel", 8))
    return n.dense(x.sum(1), "lin", 5)
