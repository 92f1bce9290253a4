"""Models of sequences for `architectures`: each of torch with its twin in Flax."""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import torch
from architecture_parts import Net, conv, dense, embed, gelu, ln
from torch import nn as tnn

F = tnn.functional


def heads_of(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(q, k, v, heads, mask=None):
    """Plain attention of torch tensors or JAX arrays, (batch, length, width)."""
    other = torch if isinstance(q, torch.Tensor) else jnp
    q, k, v = (heads_of(x, heads) for x in (q, k, v))
    weights = other.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
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


def lin(width, names):
    return {name: tnn.Linear(width, width) for name in names}


def bert():
    def layer(self, x):
        own = self.attention.own
        y = attend(own.query(x), own.key(x), own.value(x), 2)
        x = self.attention.norm(x + self.attention.dense(y))
        return self.norm(x + self.output(F.gelu(self.intermediate(x))))

    def make():
        own = Net(None, **lin(8, ("query", "key", "value")))
        attention = Net(None, own=own, dense=tnn.Linear(8, 8), norm=tnn.LayerNorm(8))
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
        own, name = f"layer.{k}.attention.own", f"layer.{k}"
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
