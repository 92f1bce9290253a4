"""Models of sequences, graphs and tables, whose layers have other names in Flax."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn as tnn

F = tnn.functional
ONES = nn.initializers.ones
LayerNorm = partial(nn.LayerNorm, epsilon=1e-5)
RMSNorm = partial(nn.RMSNorm, epsilon=1e-5)
Matrix = partial(nn.Dense, use_bias=False)
LENGTH = 6
CAUSAL = np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1)


def attend(n, q, k, v, heads, mask=None):
    """Attention between projections of either framework; `n` is torch or jnp."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    weights = n.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        weights = weights + (torch.as_tensor(mask) if n is torch else mask)
    soft = torch.softmax(weights, -1) if n is torch else jax.nn.softmax(weights, -1)
    return n.einsum("bhqk,bkhd->bqhd", soft, v).reshape(*q.shape[:2], -1)


# --- transformers -------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Two layers with attention to themselves and to a memory."""

    @nn.compact
    def __call__(self, x, memory):
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(2)(x, x, x)
            x = LayerNorm()(x + y)
            y = nn.MultiHeadDotProductAttention(2)(x, memory, memory)
            x = LayerNorm()(x + y)
            y = nn.Dense(8)(nn.relu(nn.Dense(16)(x)))
            x = LayerNorm()(x + y)
        return x


class TorchDecoder(tnn.Module):
    def __init__(self):
        super().__init__()
        layer = tnn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.decoder = tnn.TransformerDecoder(layer, 2)

    def forward(self, x, memory):
        return self.decoder(x, memory)


class Encoder(nn.Module):
    """The norm comes first, and the layers are named by hand."""

    @nn.compact
    def __call__(self, x):
        for k in range(2):
            y = LayerNorm(name=f"ln_attn_{k}")(x)
            x = x + nn.MultiHeadDotProductAttention(2, name=f"attn_{k}")(y, y, y)
            y = LayerNorm(name=f"ln_mlp_{k}")(x)
            y = nn.gelu(nn.Dense(16, name=f"up_{k}")(y), approximate=False)
            x = x + nn.Dense(8, name=f"down_{k}")(y)
        return x


def torch_encoder():
    layer = tnn.TransformerEncoderLayer(
        8, 2, 16, activation="gelu", batch_first=True, norm_first=True
    )
    return tnn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Bert(nn.Module):
    """Separate projections in torch, Flax's own attention here."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(11, 8)(ids) + nn.Embed(LENGTH, 8)(jnp.arange(LENGTH))
        x = LayerNorm()(x)
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(2)(x, x, x)
            x = LayerNorm()(x + y)
            y = nn.Dense(8)(nn.gelu(nn.Dense(16)(x), approximate=False))
            x = LayerNorm()(x + y)
        return jnp.tanh(nn.Dense(8)(x[:, 0]))


class TorchBertLayer(tnn.Module):
    def __init__(self):
        super().__init__()
        self.attention = tnn.ModuleDict(
            {
                "self": tnn.ModuleDict({k: tnn.Linear(8, 8) for k in ("query", "key", "value")}),
                "output": tnn.ModuleDict(
                    {"dense": tnn.Linear(8, 8), "LayerNorm": tnn.LayerNorm(8)}
                ),
            }
        )
        self.intermediate = tnn.ModuleDict({"dense": tnn.Linear(8, 16)})
        self.output = tnn.ModuleDict({"dense": tnn.Linear(16, 8), "LayerNorm": tnn.LayerNorm(8)})

    def forward(self, x):
        own, out = self.attention["self"], self.attention["output"]
        y = attend(torch, own["query"](x), own["key"](x), own["value"](x), 2)
        x = out["LayerNorm"](x + out["dense"](y))
        y = self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        return self.output["LayerNorm"](x + y)


class TorchBert(tnn.Module):
    def __init__(self):
        super().__init__()
        tables = {"word_embeddings": tnn.Embedding(11, 8)}
        tables["position_embeddings"] = tnn.Embedding(LENGTH, 8)
        self.embeddings = tnn.ModuleDict(tables | {"LayerNorm": tnn.LayerNorm(8)})
        self.encoder = tnn.ModuleDict(
            {"layer": tnn.ModuleList([TorchBertLayer(), TorchBertLayer()])}
        )
        self.pooler = tnn.ModuleDict({"dense": tnn.Linear(8, 8)})

    def forward(self, ids):
        positions = self.embeddings["position_embeddings"](torch.arange(LENGTH))
        x = self.embeddings["LayerNorm"](self.embeddings["word_embeddings"](ids) + positions)
        for layer in self.encoder["layer"]:
            x = layer(x)
        return torch.tanh(self.pooler["dense"](x[:, 0]))


class LlamaBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = RMSNorm()(x)
        q, k, v = (Matrix(8, name=f"w{c}")(y) for c in "qkv")
        y = attend(jnp, q, k, v, 2, CAUSAL)
        x = x + Matrix(8, name="wo")(y)
        y = RMSNorm()(x)
        gate, up = Matrix(12, name="w1"), Matrix(12, name="w3")
        return x + Matrix(8, name="w2")(nn.silu(gate(y)) * up(y))


class Llama(nn.Module):
    tied: bool

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(11, 8)
        x = table(ids)
        for _ in range(2):
            x = LlamaBlock()(x)
        x = RMSNorm()(x)
        return table.attend(x) if self.tied else Matrix(11)(x)


class TorchLlamaBlock(tnn.Module):
    def __init__(self):
        super().__init__()
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.self_attn = tnn.ModuleDict({n: tnn.Linear(8, 8, bias=False) for n in names})
        self.mlp = tnn.ModuleDict(
            {
                "gate_proj": tnn.Linear(8, 12, bias=False),
                "up_proj": tnn.Linear(8, 12, bias=False),
                "down_proj": tnn.Linear(12, 8, bias=False),
            }
        )
        self.input_layernorm = tnn.RMSNorm(8, eps=1e-5)
        self.post_attention_layernorm = tnn.RMSNorm(8, eps=1e-5)

    def forward(self, x):
        y, at = self.input_layernorm(x), self.self_attn
        y = attend(torch, at["q_proj"](y), at["k_proj"](y), at["v_proj"](y), 2, CAUSAL)
        x = x + at["o_proj"](y)
        y, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class TorchLlama(tnn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed_tokens = tnn.Embedding(11, 8)
        self.layers = tnn.ModuleList([TorchLlamaBlock(), TorchLlamaBlock()])
        self.norm = tnn.RMSNorm(8, eps=1e-5)
        self.lm_head = tnn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class PackedGPT(nn.Module):
    """One packed kernel in torch, three kernels here."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            y = LayerNorm()(x)
            q, k, v = nn.Dense(8)(y), nn.Dense(8)(y), nn.Dense(8)(y)
            x = x + nn.Dense(8)(attend(jnp, q, k, v, 2, CAUSAL))
            y = LayerNorm()(x)
            x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(y)))
        return x


class TorchPackedBlock(tnn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = tnn.LayerNorm(8), tnn.LayerNorm(8)
        self.qkv, self.proj = tnn.Linear(8, 24), tnn.Linear(8, 8)
        self.fc, self.out = tnn.Linear(8, 16), tnn.Linear(16, 8)

    def forward(self, x):
        y = attend(torch, *self.qkv(self.ln1(x)).chunk(3, -1), 2, CAUSAL)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class SwinBlock(nn.Module):
    """Attention in windows of two by two, with a table of relative positions."""

    width: int

    @nn.compact
    def __call__(self, x):
        n, h, w, c = x.shape
        y = LayerNorm()(x)
        y = y.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        table = self.param("relative_position_bias_table", ONES, (9, 2))
        bias = table[relative_positions()].transpose(2, 0, 1)
        q, k, v = jnp.split(nn.Dense(3 * c)(y), 3, -1)
        y = nn.Dense(c)(attend(jnp, q, k, v, 2, bias))
        y = y.reshape(n, h // 2, w // 2, 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
        x = x + y
        y = nn.Dense(c)(nn.gelu(nn.Dense(2 * c)(LayerNorm()(x)), False))
        return x + y


class Swin(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = LayerNorm()(nn.Conv(6, (2, 2), (2, 2))(x))
        x = SwinBlock(6)(x)
        x = jnp.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        x = Matrix(12)(LayerNorm()(x))
        x = SwinBlock(12)(x)
        return nn.Dense(5)(LayerNorm()(x).mean((1, 2)))


def relative_positions():
    at = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None] + 1
    return apart[0] * 3 + apart[1]


class TorchSwinBlock(tnn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = tnn.LayerNorm(width)
        self.attn = tnn.Module()
        self.attn.relative_position_bias_table = tnn.Parameter(torch.ones(9, 2))
        self.attn.register_buffer("relative_position_index", torch.as_tensor(relative_positions()))
        self.attn.qkv = tnn.Linear(width, 3 * width)
        self.attn.proj = tnn.Linear(width, width)
        self.norm2 = tnn.LayerNorm(width)
        self.mlp = tnn.ModuleDict({"fc1": tnn.Linear(width, 2 * width)})
        self.mlp["fc2"] = tnn.Linear(2 * width, width)

    def forward(self, x):
        n, h, w, c = x.shape
        y = self.norm1(x).reshape(n, h // 2, 2, w // 2, 2, c)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        index = self.attn.relative_position_index
        bias = self.attn.relative_position_bias_table[index].permute(2, 0, 1)
        y = self.attn.proj(attend(torch, *self.attn.qkv(y).chunk(3, -1), 2, bias))
        y = y.reshape(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        x = x + y.reshape(x.shape)
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class TorchSwin(tnn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = tnn.ModuleDict(
            {"proj": tnn.Conv2d(3, 6, 2, 2), "norm": tnn.LayerNorm(6)}
        )
        self.layers = tnn.ModuleList([TorchSwinBlock(6), TorchSwinBlock(12)])
        self.reduction, self.merge_norm = tnn.Linear(24, 12, bias=False), tnn.LayerNorm(24)
        self.norm, self.head = tnn.LayerNorm(12), tnn.Linear(12, 5)

    def forward(self, x):
        x = self.patch_embed["norm"](self.patch_embed["proj"](x).movedim(1, -1))
        x = self.layers[0](x)
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        x = self.layers[1](self.reduction(self.merge_norm(x)))
        return self.head(self.norm(x).mean((1, 2)))


class CLIP(nn.Module):
    @nn.compact
    def __call__(self, image, ids):
        x = nn.Conv(8, (3, 3), (3, 3), use_bias=False, name="patch")(image)
        x = LayerNorm()(x.reshape(len(x), -1, 8).mean(1))
        x = x @ self.param("image_projection", ONES, (8, 8))
        y = LayerNorm()(nn.Embed(11, 8)(ids).mean(1))
        y = Matrix(8, name="text_projection")(y)
        x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
        return jnp.exp(self.param("logit_scale", ONES, ())) * x @ y.T


class TorchCLIP(tnn.Module):
    def __init__(self):
        super().__init__()
        self.text_projection = tnn.Parameter(torch.ones(8, 8))
        self.logit_scale = tnn.Parameter(torch.ones(()))
        self.visual = tnn.ModuleDict({"conv1": tnn.Conv2d(3, 8, 3, 3, bias=False)})
        self.visual["ln_post"] = tnn.LayerNorm(8)
        self.visual.proj = tnn.Parameter(torch.ones(8, 8))
        self.token_embedding = tnn.Embedding(11, 8)
        self.ln_final = tnn.LayerNorm(8)

    def forward(self, image, ids):
        x = self.visual["conv1"](image).flatten(2).mean(2)
        x = self.visual["ln_post"](x) @ self.visual.proj
        y = self.ln_final(self.token_embedding(ids).mean(1)) @ self.text_projection
        x, y = (z / z.norm(dim=-1, keepdim=True) for z in (x, y))
        return self.logit_scale.exp() * x @ y.T


# --- others -------------------------------------------------------------------------------------


class Mamba(nn.Module):
    @nn.compact
    def __call__(self, u):
        x, z = jnp.split(Matrix(16, name="in_proj")(u), 2, -1)
        x = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        x = nn.silu(nn.Conv(8, (3,), padding="VALID", feature_group_count=8, name="conv")(x))
        parts = Matrix(10, name="x_proj")(x)
        step, b, c = parts[..., :2], parts[..., 2:6], parts[..., 6:]
        step = nn.softplus(nn.Dense(8, name="dt_proj")(step))
        a = -jnp.exp(self.param("log_a", ONES, (8, 4)))
        skip = self.param("skip", ONES, (8,))
        state, outs = jnp.zeros((len(u), 8, 4)), []
        for t in range(LENGTH):
            change = step[:, t, :, None] * b[:, t, None] * x[:, t, :, None]
            state = jnp.exp(step[:, t, :, None] * a) * state + change
            outs.append(jnp.einsum("bdn,bn->bd", state, c[:, t]))
        y = (jnp.stack(outs, 1) + x * skip) * nn.silu(z)
        return Matrix(8, name="out_proj")(y)


class TorchMamba(tnn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = tnn.Parameter(torch.ones(8, 4))
        self.D = tnn.Parameter(torch.ones(8))
        self.in_proj = tnn.Linear(8, 16, bias=False)
        self.conv1d = tnn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.x_proj = tnn.Linear(8, 10, bias=False)
        self.dt_proj = tnn.Linear(2, 8)
        self.out_proj = tnn.Linear(8, 8, bias=False)

    def forward(self, u):
        x, z = self.in_proj(u).chunk(2, -1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2))
        step, b, c = self.x_proj(x).split([2, 4, 4], -1)
        step, a = F.softplus(self.dt_proj(step)), -self.A_log.exp()
        state, outs = torch.zeros(len(u), 8, 4), []
        for t in range(LENGTH):
            change = step[:, t, :, None] * b[:, t, None] * x[:, t, :, None]
            state = torch.exp(step[:, t, :, None] * a) * state + change
            outs.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
        return self.out_proj((torch.stack(outs, 1) + x * self.D) * F.silu(z))


class WaveNet(nn.Module):
    """Dilated convolutions with gates; with or without weight_norm."""

    normed: bool = False

    def conv(self, x, width, size, dilation=1):
        x = jnp.pad(x, ((0, 0), ((size - 1) * dilation, 0), (0, 0)))
        layer = nn.Conv(width, (size,), padding="VALID", kernel_dilation=(dilation,))
        return nn.WeightNorm(layer)(x) if self.normed else layer(x)

    @nn.compact
    def __call__(self, x):
        x, skips = self.conv(x, 6, 1), 0
        for dilation in (1, 2, 4):
            y = jnp.tanh(self.conv(x, 6, 2, dilation)) * nn.sigmoid(self.conv(x, 6, 2, dilation))
            skips = skips + self.conv(y, 6, 1)
            x = x + self.conv(y, 6, 1)
        return self.conv(nn.relu(self.conv(nn.relu(skips), 6, 1)), 4, 1)


class TorchWaveNet(tnn.Module):
    def __init__(self, normed=None):
        super().__init__()
        normed = normed or (lambda layer: layer)
        self.start = normed(tnn.Conv1d(4, 6, 1))
        for name in ("filter_convs", "gate_convs"):
            convs = (normed(tnn.Conv1d(6, 6, 2, dilation=d)) for d in (1, 2, 4))
            setattr(self, name, tnn.ModuleList(convs))
        for name in ("residual_convs", "skip_convs"):
            setattr(self, name, tnn.ModuleList(normed(tnn.Conv1d(6, 6, 1)) for _ in range(3)))
        self.end_conv_1, self.end_conv_2 = normed(tnn.Conv1d(6, 6, 1)), normed(tnn.Conv1d(6, 4, 1))

    def forward(self, x):
        x, skips = self.start(x), 0
        for k, dilation in enumerate((1, 2, 4)):
            past = F.pad(x, (dilation, 0))
            y = torch.tanh(self.filter_convs[k](past)) * torch.sigmoid(self.gate_convs[k](past))
            skips = skips + self.skip_convs[k](y)
            x = x + self.residual_convs[k](y)
        return self.end_conv_2(F.relu(self.end_conv_1(F.relu(skips))))


class DLRM(nn.Module):
    @nn.compact
    def __call__(self, dense, ids):
        x = dense
        for width in (8, 8):
            x = nn.relu(nn.Dense(width)(x))
        rows = [x] + [nn.Embed(11, 8)(ids[:, k]) for k in range(3)]
        rows = jnp.stack(rows, 1)
        dots = jnp.einsum("bid,bjd->bij", rows, rows)[:, *np.tril_indices(4, -1)]
        x = jnp.concatenate([x, dots], 1)
        for width in (8, 8):
            x = nn.relu(nn.Dense(width)(x))
        return nn.sigmoid(nn.Dense(1)(x))


class TorchDLRM(tnn.Module):
    def __init__(self):
        super().__init__()
        self.emb_l = tnn.ModuleList(tnn.Embedding(11, 8) for _ in range(3))
        self.bot_l = tnn.Sequential(tnn.Linear(8, 8), tnn.ReLU(), tnn.Linear(8, 8), tnn.ReLU())
        top = [tnn.Linear(14, 8), tnn.ReLU(), tnn.Linear(8, 8), tnn.ReLU(), tnn.Linear(8, 1)]
        self.top_l = tnn.Sequential(*top, tnn.Sigmoid())

    def forward(self, dense, ids):
        x = self.bot_l(dense)
        rows = torch.stack([x] + [table(ids[:, k]) for k, table in enumerate(self.emb_l)], 1)
        dots = torch.einsum("bid,bjd->bij", rows, rows)[:, *np.tril_indices(4, -1)]
        return self.top_l(torch.cat([x, dots], 1))


class LoRA(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(2):
            down = self.param(f"lora_{k}_a", ONES, (8, 2))
            up = self.param(f"lora_{k}_b", ONES, (2, 8))
            x = jnp.tanh(nn.Dense(8)(x) + 2.0 * x @ down @ up)
        return nn.Dense(5)(x)


class TorchLoRALayer(tnn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = tnn.Linear(8, 8)
        self.lora_A = tnn.ModuleDict({"default": tnn.Linear(8, 2, bias=False)})
        self.lora_B = tnn.ModuleDict({"default": tnn.Linear(2, 8, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class TorchLoRA(tnn.Module):
    def __init__(self):
        super().__init__()
        self.layers = tnn.ModuleList([TorchLoRALayer(), TorchLoRALayer()])
        self.head = tnn.Linear(8, 5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Biaffine(nn.Module):
    """Two projections of one shape, and a Bilinear."""

    @nn.compact
    def __call__(self, x):
        head, dependent = jnp.tanh(nn.Dense(6)(x)), jnp.tanh(nn.Dense(6)(x))
        kernel = self.param("kernel", ONES, (6, 6, 6))
        bias = self.param("bias", ONES, (6,))
        return jnp.einsum("bxi,ijo,bxj->bxo", head, kernel, dependent) + bias


class TorchBiaffine(tnn.Module):
    def __init__(self):
        super().__init__()
        self.mlp_dep, self.mlp_head = tnn.Linear(8, 6), tnn.Linear(8, 6)
        self.bilinear = tnn.Bilinear(6, 6, 6)

    def forward(self, x):
        return self.bilinear(torch.tanh(self.mlp_head(x)), torch.tanh(self.mlp_dep(x)))


class Seq2Seq(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        memory = nn.RNN(nn.GRUCell(8), name="encoder")(nn.Embed(11, 8)(source))
        x = nn.RNN(nn.GRUCell(8), name="decoder")(nn.Embed(11, 8)(target))
        weights = nn.softmax(jnp.einsum("btd,bsd->bts", nn.Dense(8)(x), memory), -1)
        x = jnp.concatenate([x, weights @ memory], -1)
        return nn.Dense(11)(jnp.tanh(nn.Dense(8)(x)))


class TorchSeq2Seq(tnn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = tnn.ModuleDict({"embedding": tnn.Embedding(11, 8)})
        self.decoder["gru"] = tnn.GRU(8, 8, batch_first=True)
        self.decoder["out"], self.decoder["concat"] = tnn.Linear(8, 11), tnn.Linear(16, 8)
        self.encoder = tnn.ModuleDict({"embedding": tnn.Embedding(11, 8)})
        self.encoder["gru"] = tnn.GRU(8, 8, batch_first=True)
        self.attn = tnn.Linear(8, 8)

    def forward(self, source, target):
        memory = self.encoder["gru"](self.encoder["embedding"](source))[0]
        x = self.decoder["gru"](self.decoder["embedding"](target))[0]
        weights = torch.softmax(torch.einsum("btd,bsd->bts", self.attn(x), memory), -1)
        x = torch.cat([x, weights @ memory], -1)
        return self.decoder["out"](torch.tanh(self.decoder["concat"](x)))


class TextCNN(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(11, 8)(ids)
        maps = [nn.relu(nn.Conv(4, (k,), padding="VALID")(x)).max(1) for k in (2, 3, 4)]
        return nn.Dense(5)(jnp.concatenate(maps, -1))


class TorchTextCNN(tnn.Module):
    def __init__(self):
        super().__init__()
        self.embed = tnn.Embedding(11, 8)
        self.convs = tnn.ModuleList(tnn.Conv2d(1, 4, (k, 8)) for k in (2, 3, 4))
        self.fc1 = tnn.Linear(12, 5)

    def forward(self, ids):
        x = self.embed(ids)[:, None]
        maps = [F.relu(conv(x))[..., 0].amax(2) for conv in self.convs]
        return self.fc1(torch.cat(maps, 1))


class Highway(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            gate = nn.sigmoid(nn.Dense(8)(x))
            x = gate * nn.relu(nn.Dense(8)(x)) + (1 - gate) * x
        return nn.Dense(5)(x)


class TorchHighway(tnn.Module):
    """Keeps the layers of each sort together, and calls them in turn."""

    def __init__(self):
        super().__init__()
        self.nonlinear = tnn.ModuleList(tnn.Linear(8, 8) for _ in range(3))
        self.gate = tnn.ModuleList(tnn.Linear(8, 8) for _ in range(3))
        self.out = tnn.Linear(8, 5)

    def forward(self, x):
        for gate, nonlinear in zip(self.gate, self.nonlinear, strict=True):
            g = torch.sigmoid(gate(x))
            x = g * F.relu(nonlinear(x)) + (1 - g) * x
        return self.out(x)


class GraphConv(nn.Module):
    """A graph network over a matrix of neighbours, with two matrices a layer."""

    @nn.compact
    def __call__(self, x, edges):
        for _ in range(2):
            x = nn.relu(Matrix(8)(x) + nn.Dense(8)(edges @ x))
        return nn.Dense(5)(x.sum(1))


class TorchGraphConv(tnn.Module):
    def __init__(self):
        super().__init__()
        pairs = ({"lin_rel": tnn.Linear(8, 8), "lin_root": tnn.Linear(8, 8, False)} for _ in "ab")
        self.convs = tnn.ModuleList(tnn.ModuleDict(layers) for layers in pairs)
        self.lin = tnn.Linear(8, 5)

    def forward(self, x, edges):
        for conv in self.convs:
            x = F.relu(conv["lin_rel"](edges @ x) + conv["lin_root"](x))
        return self.lin(x.sum(1))


SERIES, IDS = (3, LENGTH, 8), LENGTH
PAIRS = {
    "decoder with cross attention": (TorchDecoder, Decoder, (SERIES, SERIES)),
    "encoder, norm first": (torch_encoder, Encoder, (SERIES,)),
    "BERT of transformers": (TorchBert, Bert, (IDS,)),
    "Llama, tied": (lambda: TorchLlama(True), lambda: Llama(True), (IDS,)),
    "Llama": (lambda: TorchLlama(False), lambda: Llama(False), (IDS,)),
    "packed projections": (
        lambda: tnn.Sequential(TorchPackedBlock(), TorchPackedBlock()),
        PackedGPT,
        (SERIES,),
    ),
    "Swin": (TorchSwin, Swin, ((2, 3, 8, 8),)),
    "CLIP": (TorchCLIP, CLIP, ((3, 3, 6, 6), IDS)),
    "Mamba": (TorchMamba, Mamba, (SERIES,)),
    "WaveNet": (TorchWaveNet, WaveNet, ((2, 4, 12),)),
    "WaveNet with weight_norm": (
        lambda: TorchWaveNet(tnn.utils.parametrizations.weight_norm),
        lambda: WaveNet(True),
        ((2, 4, 12),),
    ),
    "DLRM": (TorchDLRM, DLRM, ((3, 8), 3)),
    "LoRA": (TorchLoRA, LoRA, ((3, 8),)),
    "biaffine": (TorchBiaffine, Biaffine, (SERIES,)),
    "GRUs with attention": (TorchSeq2Seq, Seq2Seq, (IDS, IDS)),
    "TextCNN": (TorchTextCNN, TextCNN, (IDS,)),
    "highway": (TorchHighway, Highway, ((4, 8),)),
    "graph convolution": (TorchGraphConv, GraphConv, ((3, 6, 8), (3, 6, 6))),
}
# In Flax, pictures and sound have their channels last.
CASES = {name: (*pair, 3 if "WaveNet" in name else 4) for name, pair in PAIRS.items()}
