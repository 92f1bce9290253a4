"""Parameters: the same input gives the same output in torch and in Flax, in both directions."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from bridge import params_from_torch, params_to_torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_bridge
from torch_bridge import CheckpointMismatch, pair

pytestmark = pytest.mark.torch


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, -1)


def channels_first(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, -1, 1)


def same(x: np.ndarray) -> np.ndarray:
    return x


def conv_case(n, transposed=False, square=False, groups=1):
    ins, outs, size = (4, 4, 3) if square else (4, 6, 3)
    name = f"Conv{'Transpose' if transposed else ''}{n}d"
    module = getattr(torch.nn, name)(
        ins, outs, size, groups=groups, **({"stride": 2} if transposed else {})
    )
    keywords: dict = {"padding": "VALID", "strides": (2,) * n if transposed else (1,) * n}
    if groups > 1:
        keywords["feature_group_count"] = groups
    linen = (nn.ConvTranspose if transposed else nn.Conv)(outs, (size,) * n, **keywords)

    def build(rngs):
        layer = nnx.ConvTranspose if transposed else nnx.Conv
        return layer(ins, outs, (size,) * n, rngs=rngs, **keywords)

    shape = (2, ins, *(5,) * n)
    return module, linen, build, shape, channels_last, channels_first


LAYERS = {
    "linear": lambda: (
        torch.nn.Linear(4, 6),
        nn.Dense(6),
        lambda rngs: nnx.Linear(4, 6, rngs=rngs),
        (2, 4),
        same,
        same,
    ),
    "linear without bias": lambda: (
        torch.nn.Linear(4, 6, bias=False),
        nn.Dense(6, use_bias=False),
        lambda rngs: nnx.Linear(4, 6, use_bias=False, rngs=rngs),
        (2, 4),
        same,
        same,
    ),
    "dense general": lambda: (
        torch.nn.Linear(4, 6),
        nn.DenseGeneral((2, 3)),
        lambda rngs: nnx.LinearGeneral(4, (2, 3), rngs=rngs),
        (5, 4),
        same,
        lambda y: y.reshape(5, 6),
    ),
    **{f"conv{n}d": lambda n=n: conv_case(n) for n in (1, 2, 3)},
    "conv2d in groups": lambda: conv_case(2, groups=2),
    **{f"conv_transpose{n}d": lambda n=n: conv_case(n, transposed=True) for n in (1, 2, 3)},
    "layer norm": lambda: (
        torch.nn.LayerNorm(6),
        nn.LayerNorm(epsilon=1e-5),
        lambda rngs: nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs),
        (2, 6),
        same,
        same,
    ),
    "rms norm": lambda: (
        torch.nn.RMSNorm(6, eps=1e-6),
        nn.RMSNorm(epsilon=1e-6),
        lambda rngs: nnx.RMSNorm(6, epsilon=1e-6, rngs=rngs),
        (2, 6),
        same,
        same,
    ),
    "group norm": lambda: (
        torch.nn.GroupNorm(2, 6),
        nn.GroupNorm(2, epsilon=1e-5),
        lambda rngs: nnx.GroupNorm(6, 2, epsilon=1e-5, rngs=rngs),
        (2, 6, 3, 3),
        channels_last,
        channels_first,
    ),
    "batch norm": lambda: (
        torch.nn.BatchNorm2d(6).eval(),
        nn.BatchNorm(use_running_average=True, epsilon=1e-5),
        lambda rngs: nnx.BatchNorm(6, use_running_average=True, epsilon=1e-5, rngs=rngs),
        (2, 6, 3, 3),
        channels_last,
        channels_first,
    ),
    "prelu": lambda: (
        torch.nn.PReLU(),
        nn.PReLU(),
        lambda rngs: nnx.PReLU(),
        (2, 6),
        same,
        same,
    ),
}


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                value.copy_(
                    torch.rand_like(value) + 0.1 if "var" in name else torch.randn(value.shape)
                )
    return module


def close(ours, theirs) -> None:
    scale = max(1.0, float(np.abs(np.asarray(theirs)).max()))
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5 * scale, rtol=0)


def assert_equal_states(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("case", LAYERS)
def test_layer_gives_the_same_output_in_linen(case):
    torch.manual_seed(0)
    module, layer, _, shape, into, out = LAYERS[case]()
    randomize(module)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    like = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(into(x)))
    variables = params_from_torch(module.state_dict(), like, conv_transpose=is_transposed(module))
    assert jax.tree.structure(variables) == jax.tree.structure(like)
    theirs = module(torch.from_numpy(x)).detach().numpy()
    close(out(np.asarray(layer.apply(variables, jnp.asarray(into(x))))), theirs)
    back = params_to_torch(variables, module.state_dict(), conv_transpose=is_transposed(module))
    assert_equal_states(back, module.state_dict())


@pytest.mark.parametrize("case", LAYERS)
def test_layer_gives_the_same_output_in_nnx(case):
    torch.manual_seed(0)
    module, _, build, shape, into, out = LAYERS[case]()
    randomize(module)
    layer = build(nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    keywords = {"conv_transpose": is_transposed(module)}
    state = params_from_torch(module.state_dict(), nnx.state(layer), **keywords)
    nnx.update(layer, state)
    theirs = module(torch.from_numpy(x)).detach().numpy()
    close(out(np.asarray(layer(jnp.asarray(into(x))))), theirs)
    back = params_to_torch(nnx.state(layer), module.state_dict(), **keywords)
    assert_equal_states(back, module.state_dict())


def is_transposed(module) -> str | None:
    return "" if "ConvTranspose" in type(module).__name__ else None


def test_square_conv_transpose_and_its_two_flax_forms():
    torch.manual_seed(0)
    module = torch.nn.ConvTranspose2d(4, 4, 3, stride=2)
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 5)).astype(np.float32)
    theirs = module(torch.from_numpy(x)).detach().numpy()
    inputs = jnp.asarray(channels_last(x))
    for transpose_kernel, hint in ((False, ".*"), (True, "never")):
        layer = nn.ConvTranspose(
            4, (3, 3), strides=(2, 2), padding="VALID", transpose_kernel=transpose_kernel
        )
        like = jax.eval_shape(layer.init, jax.random.key(0), inputs)
        variables = params_from_torch(module.state_dict(), like, conv_transpose=hint)
        close(channels_first(np.asarray(layer.apply(variables, inputs))), theirs)
    named = {"params": {"up": like["params"]}}
    state = {f"up.{name}": value for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match="conv_transpose="):
        params_from_torch(state, named)


def test_embedding_in_linen_and_nnx():
    module = torch.nn.Embedding(7, 4)
    tokens = np.array([0, 3, 6])
    theirs = module(torch.from_numpy(tokens)).detach().numpy()
    like = nn.Embed(7, 4).init(jax.random.key(0), jnp.asarray(tokens))
    variables = params_from_torch(module.state_dict(), like)
    close(nn.Embed(7, 4).apply(variables, jnp.asarray(tokens)), theirs)
    layer = nnx.Embed(7, 4, rngs=nnx.Rngs(0))
    nnx.update(layer, params_from_torch(module.state_dict(), nnx.state(layer)))
    close(layer(jnp.asarray(tokens)), theirs)
    assert_equal_states(params_to_torch(variables, module.state_dict()), module.state_dict())


@pytest.mark.parametrize("bias", [True, False])
def test_attention_with_split_projections(bias):
    torch.manual_seed(1)
    module = randomize(torch.nn.MultiheadAttention(8, 2, batch_first=True, bias=bias))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    theirs = module(*[torch.from_numpy(x)] * 3)[0].detach().numpy()
    linen = nn.MultiHeadDotProductAttention(2, use_bias=bias)
    like = jax.eval_shape(linen.init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(linen.apply(variables, jnp.asarray(x)), theirs)
    layer = nnx.MultiHeadAttention(2, 8, decode=False, use_bias=bias, rngs=nnx.Rngs(0))
    nnx.update(layer, params_from_torch(module.state_dict(), nnx.state(layer)))
    close(layer(jnp.asarray(x)), theirs)
    for params in (variables, nnx.state(layer)):
        assert_equal_states(params_to_torch(params, module.state_dict()), module.state_dict())


def test_attention_with_other_key_and_value_sizes():
    torch.manual_seed(1)
    module = randomize(torch.nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 4, n)).astype(np.float32) for n in (8, 5, 3))
    theirs = module(*map(torch.from_numpy, (q, k, v)))[0].detach().numpy()
    linen = nn.MultiHeadDotProductAttention(2, qkv_features=8, out_features=8)
    like = jax.eval_shape(linen.init, jax.random.key(0), q, k, v)
    variables = params_from_torch(module.state_dict(), like)
    close(linen.apply(variables, q, k, v), theirs)
    assert_equal_states(params_to_torch(variables, module.state_dict()), module.state_dict())


class PackedAttention(nn.Module):
    """Attention whose three projections are one kernel, as in torch."""

    heads: int
    flat: bool

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        shape = (3, self.heads, features // self.heads)
        qkv = nn.DenseGeneral(3 * features if self.flat else shape, name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:-1], *shape), -3, 0)
        y = nn.dot_product_attention(q, k, v)
        return nn.DenseGeneral(features, axis=(-2, -1), name="out")(y)


@pytest.mark.parametrize("flat", [True, False])
def test_attention_with_one_packed_kernel(flat):
    torch.manual_seed(1)
    module = randomize(torch.nn.MultiheadAttention(8, 2, batch_first=True))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    layer = PackedAttention(2, flat)
    like = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    theirs = module(*[torch.from_numpy(x)] * 3)[0].detach().numpy()
    close(layer.apply(variables, jnp.asarray(x)), theirs)
    assert all(found.whole for found in pair(module.state_dict(), like))
    assert_equal_states(params_to_torch(variables, module.state_dict()), module.state_dict())


CELLS = {
    "lstm": (torch.nn.LSTM, nn.OptimizedLSTMCell, nnx.OptimizedLSTMCell),
    "plain lstm": (torch.nn.LSTM, nn.LSTMCell, nnx.LSTMCell),
    "gru": (torch.nn.GRU, nn.GRUCell, nnx.GRUCell),
    "rnn": (torch.nn.RNN, nn.SimpleCell, nnx.SimpleCell),
}


@pytest.mark.parametrize("case", CELLS)
def test_recurrent_layers(case):
    torch.manual_seed(2)
    make, linen_cell, nnx_cell = CELLS[case]
    module = randomize(make(4, 5, batch_first=True))
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    layer = nn.RNN(linen_cell(5))
    like = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(layer.apply(variables, jnp.asarray(x)), module(torch.from_numpy(x))[0].detach())
    module.load_state_dict(params_to_torch(variables, module.state_dict()))
    close(layer.apply(variables, jnp.asarray(x)), module(torch.from_numpy(x))[0].detach())

    cell = nnx.RNN(nnx_cell(4, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    if case == "gru":
        with pytest.raises(CheckpointMismatch, match=r"flax\.linen\.GRUCell"):
            params_from_torch(module.state_dict(), nnx.state(cell))
        with torch.no_grad():
            module.bias_hh_l0[10:] = 0
    nnx.update(cell, params_from_torch(module.state_dict(), nnx.state(cell)))
    close(cell(jnp.asarray(x)), module(torch.from_numpy(x))[0].detach())
    module.load_state_dict(params_to_torch(nnx.state(cell), module.state_dict()))
    close(cell(jnp.asarray(x)), module(torch.from_numpy(x))[0].detach())


def test_cells_layers_and_directions():
    torch.manual_seed(2)
    module = randomize(torch.nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True))

    class Stack(nn.Module):
        named: bool

        @nn.compact
        def __call__(self, x):
            for k in range(2):
                names = (f"forward_{k}", f"backward_{k}") if self.named else (None, None)
                forward, backward = (nn.RNN(nn.OptimizedLSTMCell(5, name=n)) for n in names)
                x = nn.Bidirectional(forward, backward)(x)
            return x

    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    like = jax.eval_shape(Stack(False).init, jax.random.key(0), jnp.asarray(x))
    with pytest.raises(CheckpointMismatch, match="could be") as caught:
        params_from_torch(module.state_dict(), like)  # which of two is the backward one?
    assert not caught.value.missing + caught.value.unexpected
    like = jax.eval_shape(Stack(True).init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(Stack(True).apply(variables, jnp.asarray(x)), module(torch.from_numpy(x))[0].detach())
    cell = torch.nn.LSTMCell(4, 5)
    like = nn.LSTMCell(5).init(jax.random.key(0), (jnp.zeros((2, 5)),) * 2, jnp.ones((2, 4)))
    converted = params_from_torch(cell.state_dict(), like)
    ours = nn.LSTMCell(5).apply(converted, (jnp.zeros((2, 5)),) * 2, jnp.asarray(x[:, 0]))[1]
    close(ours, cell(torch.from_numpy(x[:, 0]))[0].detach())


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (8, 8):
            x = nn.Conv(width, (3, 3), padding="VALID")(x)
            x = nn.relu(nn.BatchNorm(use_running_average=True, epsilon=1e-5)(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def torch_cnn() -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = []
    for ins in (3, 8):
        layers += [torch.nn.Conv2d(ins, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 4 * 4, 10))
    return randomize(module).eval()


def test_whole_network_by_structure_with_a_flattened_input():
    module = torch_cnn()
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    inputs = jnp.asarray(channels_last(x))
    like = jax.eval_shape(CNN().init, jax.random.key(0), inputs)
    keywords = {"flatten": {"7": (8, 4, 4)}}
    variables = params_from_torch(module.state_dict(), like, **keywords)
    theirs = module(torch.from_numpy(x)).detach().numpy()
    close(CNN().apply(variables, inputs), theirs)
    back = params_to_torch(variables, module.state_dict(), **keywords)
    assert_equal_states(back, module.state_dict())


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(2):
            x = EncoderBlock(name=f"block{k}")(x)
        return x


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(2)(x)
        x = nn.LayerNorm(epsilon=1e-5)(x + y)
        y = nn.relu(nn.Dense(16)(x))
        y = nn.Dense(8)(y)
        return nn.LayerNorm(epsilon=1e-5)(x + y)


def test_transformer_encoder_by_structure():
    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = randomize(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    like = jax.eval_shape(Encoder().init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(Encoder().apply(variables, jnp.asarray(x)), module(torch.from_numpy(x)).detach())
    assert_equal_states(params_to_torch(variables, module.state_dict()), module.state_dict())


def test_decoder_with_two_attentions_needs_a_rule():
    def attention(name):
        shapes = {"in_proj_weight": (24, 8), "out_proj.weight": (8, 8)}
        return {f"layers.{k}.{name}.{n}": np.ones(s) for k in (0, 1) for n, s in shapes.items()}

    model = {**attention("self_attn"), **attention("multihead_attn")}
    heads = {n: {"kernel": np.ones((8, 2, 4))} for n in ("query", "key", "value")}
    block = {f"Attention_{k}": {**heads, "out": {"kernel": np.ones((2, 4, 8))}} for k in (0, 1)}
    like = {"Block_0": block, "Block_1": block}
    with pytest.raises(CheckpointMismatch, match="could be Block_0/Attention_0 or"):
        pair(model, like)
    rules = {
        r"layers\.(\d)\.self_attn": r"Block_\1/Attention_0",
        r"layers\.(\d)\.multihead_attn": r"Block_\1/Attention_1",
    }
    paths = {p.path: p.torch_name for p in pair(model, like, rules)}
    assert paths["Block_1", "Attention_1", "key", "kernel"].startswith("layers.1.multihead_attn")


def test_prefixes_of_ddp_and_compile_are_skipped():
    module = torch_cnn()
    like = jax.eval_shape(CNN().init, jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    said = {"flatten": {"7": (8, 4, 4)}}
    plain = params_from_torch(module.state_dict(), like, **said)
    wrapped = {f"_orig_mod.module.{k}": v for k, v in module.state_dict().items()}
    jax.tree.map(np.testing.assert_array_equal, params_from_torch(wrapped, like, **said), plain)
    assert list(params_to_torch(plain, wrapped, **said)) == list(wrapped)


def test_parameters_alone_leave_no_place_for_running_statistics():
    module = torch_cnn()
    like = jax.eval_shape(CNN().init, jax.random.key(0), jnp.ones((1, 8, 8, 3)))["params"]
    said = {"flatten": {"7": (8, 4, 4)}}
    assert all(found.kind != "buffer" for found in pair(module.state_dict(), like, **said))
    with pytest.raises(CheckpointMismatch, match="batch_stats") as caught:
        params_from_torch(module.state_dict(), like, **said)
    assert len(caught.value.unexpected) == 4
    params = params_from_torch(module.state_dict(), like, ignore=r".*running_(mean|var)", **said)
    back = params_to_torch(params, module.state_dict(), **said)
    assert_equal_states(back, module.state_dict())  # the statistics of `like` stay


class Language(nn.Module):
    tied: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 6)
        x = nn.LayerNorm(epsilon=1e-5)(embed(tokens))
        return embed.attend(x) if self.tied else nn.Dense(11, use_bias=False)(x)


def torch_language(tied: bool) -> torch.nn.Sequential:
    torch.manual_seed(4)
    embed, head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False)
    parts = {"tok_emb": embed, "norm": torch.nn.LayerNorm(6), "head": head}
    module = torch.nn.Sequential()
    for name, part in parts.items():
        module.add_module(name, part)
    if tied:
        head.weight = embed.weight
    return module


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["tensors", "arrays"])
def test_embedding_and_head_tied_or_not(tied, stored):
    module = torch_language(tied)
    tokens = np.array([[1, 5, 10]])
    like = jax.eval_shape(Language(tied).init, jax.random.key(0), jnp.asarray(tokens))
    state = module.state_dict()
    if stored == "arrays":
        state = {name: value.numpy().copy() for name, value in state.items()}
    variables = params_from_torch(state, like)
    close(
        Language(tied).apply(variables, jnp.asarray(tokens)),
        module(torch.from_numpy(tokens)).detach(),
    )
    back = params_to_torch(variables, module.state_dict())
    assert_equal_states(back, module.state_dict())
    assert (back["tok_emb.weight"] is back["head.weight"]) == tied


def test_every_difference_is_listed_at_once():
    model = {
        "a.weight": np.ones((3, 2)),
        "b.weight": np.ones((5, 4)),
        "b.bias": np.ones(5),
        "extra.weight": np.ones((9, 8, 7, 6)),
    }
    like = {
        "a": {"kernel": np.ones((2, 3)), "bias": np.ones(3)},
        "b": {"kernel": np.ones((4, 6)), "bias": np.ones(5)},
        "norm": {"scale": np.ones(13)},
    }
    with pytest.raises(CheckpointMismatch) as caught:
        params_from_torch(model, like)
    assert caught.value.missing == ("a/bias (3,)", "norm/scale (13,)")
    assert caught.value.unexpected == ("extra.weight (9, 8, 7, 6)",)
    assert caught.value.mis_shaped == ("b.weight (5, 4) <-> b/kernel (4, 6)",)
    for line in ("a/bias", "norm/scale", "extra.weight", "b.weight (5, 4)"):
        assert line in str(caught.value)


def test_ambiguous_layers_are_refused_until_a_rule_decides():
    model = {f"{name}.weight": np.full((4, 4), k) for k, name in enumerate(("fast", "slow"))}
    like = {name: {"kernel": np.ones((4, 4))} for name in ("x", "y")}
    with pytest.raises(CheckpointMismatch, match="could be x or y") as caught:
        params_from_torch(model, like)
    assert len(caught.value.ambiguous) == 2
    for rules in ({"slow": "x"}, [(r"slow\.weight", "x/kernel"), ("fast", "y")]):
        params = params_from_torch(model, like, rules, conv1d="")
        assert params["x"]["kernel"][0, 0] == 1
        assert params["y"]["kernel"][0, 0] == 0
    with pytest.raises(CheckpointMismatch, match="neither a leaf nor a module"):
        params_from_torch(model, like, {"slow": "z"})


def test_rules_move_indices():
    model = {
        f"h.{k}.{n}.weight": np.full((4, 4), 10 * k + j) for k in (0, 1) for j, n in enumerate("uv")
    }
    like = {f"block_{k}": {n: {"kernel": np.ones((4, 4))} for n in ("p", "q")} for k in (0, 1)}
    rules = {r"h\.(\d+)\.u": r"block_\1/q", r"h\.(\d+)\.v": r"block_\1/p"}
    params = params_from_torch(model, like, rules, conv1d="")
    assert [int(params[f"block_{k}"][n]["kernel"][0, 0]) for k in (0, 1) for n in "pq"] == [
        1,
        0,
        11,
        10,
    ]


@pytest.mark.parametrize(
    ("name", "shape", "path", "turned"),
    [
        ("norm.gamma", (4,), "norm/scale", False),
        ("tok.table", (6, 4), "tok/embedding", False),
        ("tok.table", (4, 4), "tok/embedding", False),
        ("head.kernel", (4, 3), "head/kernel", False),
        ("pos.weight", (6, 4), "pos_embedding", False),
        ("norm.weight", (4, 4), "norm/scale", False),  # LayerNorm((T, D)), over two axes
        ("fc.weight", (3, 4), "fc/w", True),
        ("fc.matrix", (3, 4), "fc/kernel", True),
        ("conv.weight", (5, 4, 3, 3), "conv/w", True),
    ],
)
def test_rule_couples_a_tensor_and_a_leaf_of_different_layers(name, shape, path, turned):
    weight = np.random.default_rng(0).normal(size=shape)
    model = {name: weight, "last.weight": np.ones((2, 7)), "last.bias": np.ones(2)}
    wanted = weight.transpose(*range(2, len(shape)), 1, 0) if turned else weight
    module, _, leaf = path.rpartition("/")
    like = {"last": {"kernel": np.ones((7, 2)), "bias": np.ones(2)}}
    like |= {module: {leaf: np.zeros(wanted.shape)}} if module else {leaf: np.zeros(wanted.shape)}
    rules = {name.replace(".", r"\."): path}
    params = params_from_torch(model, like, rules)
    np.testing.assert_array_equal(params[module][leaf] if module else params[leaf], wanted)
    np.testing.assert_array_equal(params_to_torch(params, model, rules)[name], weight)


def test_bare_parameters_and_leaves_of_the_same_names():
    model = {"norms.0.scale": np.arange(4.0), "tok.embedding": np.ones((6, 4))}
    like = {"norms_0": {"scale": np.zeros(4)}, "tok": {"embedding": np.zeros((6, 4))}}
    params = params_from_torch(model, like)
    np.testing.assert_array_equal(params["norms_0"]["scale"], model["norms.0.scale"])
    assert params_to_torch(params, model).keys() == model.keys()
    square = {"fc.kernel": np.arange(16.0).reshape(4, 4)}  # stored (in, out) or (out, in)
    tree = {"fc": {"kernel": np.zeros((4, 4))}}
    with pytest.raises(CheckpointMismatch, match="unexpected"):
        params_from_torch(square, tree)
    for conv1d, wanted in (("", square["fc.kernel"].T), (r"fc\.kernel", square["fc.kernel"])):
        found = params_from_torch(square, tree, {r"fc\.kernel": "fc/kernel"}, conv1d=conv1d)
        np.testing.assert_array_equal(found["fc"]["kernel"], wanted)


def test_rules_take_a_recurrent_layer_to_plain_matrices():
    sizes = {"ih": 3, "hh": 4}
    model = {f"rnn.weight_{k}_l0": np.random.rand(4, n) for k, n in sizes.items()}
    like = {"rnn": {k: np.zeros((n, 4)) for k, n in sizes.items()}}
    params = params_from_torch(model, like, {r"rnn\.weight_(..)_l0": r"rnn/\1"})
    for k in sizes:  # the square one, too: torch keeps them (out, in)
        np.testing.assert_array_equal(params["rnn"][k], model[f"rnn.weight_{k}_l0"].T)


def test_rules_for_a_plain_tree_take_a_layer_apart():
    model = {"conv.weight": np.ones((8, 3, 3, 3)), "fc.weight": np.random.rand(5, 32)}
    model["fc.bias"] = np.arange(5.0)
    like = {"conv": {"kernel": np.ones((3, 3, 3, 8))}}
    like |= {"fc": {"w": np.zeros((32, 5)), "b": np.zeros(5)}}
    rules = {r"fc\.weight": "fc/w", r"fc\.bias": "fc/b"}
    params = params_from_torch(model, like, rules, flatten={"fc": (8, 2, 2)})
    moved = model["fc.weight"].reshape(5, 8, 2, 2).transpose(2, 3, 1, 0).reshape(32, 5)
    np.testing.assert_array_equal(params["fc"]["w"], moved)
    np.testing.assert_array_equal(params["fc"]["b"], model["fc.bias"])
    said = params_from_torch(model, like, rules, flatten={"fc": None})
    np.testing.assert_array_equal(said["fc"]["w"], model["fc.weight"].T)
    with pytest.raises(CheckpointMismatch, match="fc/b") as error:
        params_from_torch(model, like, {r"fc\.weight": "fc/w"}, flatten={"fc": None})
    assert error.value.unexpected == ("fc.bias (5,)",)


def test_rule_takes_a_packed_linear_apart():
    model = {
        f"{prefix}.{name}": np.random.default_rng(0).normal(size=shape)
        for prefix, size in (("h.0.c_attn", 24), ("h.0.c_proj", 8))
        for name, shape in (("weight", (size, 8)), ("bias", (size,)))
    }
    heads = {"kernel": np.ones((8, 2, 4)), "bias": np.ones((2, 4))}
    out = {"kernel": np.ones((2, 4, 8)), "bias": np.ones(8)}
    like = {"h_0": {"query": heads, "key": heads, "value": heads, "out": out}}
    with pytest.raises(CheckpointMismatch):
        params_from_torch(model, like)
    rules = {
        r"h\.(\d+)\.c_attn": r"h_\1/query|h_\1/key|h_\1/value",
        r"h\.(\d+)\.c_proj": r"h_\1/out",
    }
    params = params_from_torch(model, like, rules, conv1d="")
    expected = model["h.0.c_attn.weight"][8:16].T.reshape(8, 2, 4)
    np.testing.assert_array_equal(params["h_0"]["key"]["kernel"], expected)
    back = params_to_torch(params, model, rules, conv1d="")
    jax.tree.map(np.testing.assert_array_equal, back, model)


def test_numbers_follow_natural_order():
    model = {f"{2 * k}.weight": np.full((4, 4), k) for k in range(12)}
    like = {f"Dense_{k}": {"kernel": np.ones((4, 4))} for k in range(12)}
    params = params_from_torch(model, like, conv1d="")
    assert [int(params[f"Dense_{k}"]["kernel"][0, 0]) for k in range(12)] == list(range(12))


def test_one_layer_too_many_is_never_dropped_silently():
    model = {f"layers.{k}.weight": np.ones((4, 4)) for k in range(3)}
    like = {f"layers_{k}": {"kernel": np.ones((4, 4))} for k in range(2)}
    with pytest.raises(CheckpointMismatch) as caught:
        params_from_torch(model, like)
    assert caught.value.unexpected == ("layers.2.weight (4, 4)",)


def test_modules_of_the_same_name_decide():
    model = {
        f"{side}.{k}.weight": np.full((4, 4), ord(side[0]) + k)
        for side in ("left", "right")
        for k in (0, 2)
    }
    like = {
        side: {f"Dense_{k}": {"kernel": np.ones((4, 4))} for k in (0, 1)}
        for side in ("left", "right")
    }
    params = params_from_torch(model, like, conv1d="")
    assert int(params["right"]["Dense_1"]["kernel"][0, 0]) == ord("r") + 2
    assert int(params["left"]["Dense_0"]["kernel"][0, 0]) == ord("l")


def test_separate_projections_meet_flax_attention():
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    model = {
        f"layers.{k}.attn.{name}.weight": np.full((4, 4), 10 * k + j)
        for k in (0, 1)
        for j, name in enumerate(names)
    }
    shapes = {"query": (4, 2, 2), "key": (4, 2, 2), "value": (4, 2, 2), "out": (2, 2, 4)}
    like = {
        f"Block_{k}": {"attn": {name: {"kernel": np.ones(shapes[name])} for name in shapes}}
        for k in (0, 1)
    }
    params = params_from_torch(model, like, conv1d="")
    for k in (0, 1):
        for j, name in enumerate(names.values()):
            assert np.all(params[f"Block_{k}"]["attn"][name]["kernel"] == 10 * k + j)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept(dtype):
    module = torch.nn.Linear(3, 2).to(dtype)
    params = params_from_torch(module.state_dict(), {"kernel": np.ones((3, 2)), "bias": np.ones(2)})
    expected = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
    assert params["kernel"].dtype == expected.get(dtype, np.float64)
    assert_equal_states(params_to_torch(params, module.state_dict()), module.state_dict())


def test_result_does_not_share_memory_with_torch():
    module = torch.nn.Linear(2, 2)
    like = {"kernel": np.ones((2, 2)), "bias": np.ones(2)}
    params = params_from_torch(module.state_dict(), like, conv1d="")
    before = jax.tree.map(np.copy, params)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_random_state_and_caches_of_nnx_are_kept():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(3, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    model = Model(nnx.Rngs(0))
    module = torch.nn.Sequential()
    module.add_module("fc", torch.nn.Linear(3, 2))
    state = params_from_torch(module.state_dict(), nnx.state(model))
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    nnx.update(model, state)
    filled = params_from_torch(module, model)  # a module in, a module out
    x = jnp.ones((1, 3))
    close(filled.fc(x), module.fc(torch.ones(1, 3)).detach())


SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple)


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, transposed=st.booleans(), data=st.data())
def test_round_trip_and_matrix_order(shape, transposed, data):
    a, b, *spatial = shape
    flax_shape = (*spatial, a, b) if transposed and spatial else (*spatial, b, a)
    seed = data.draw(st.integers(0, 2**31))
    weight = np.random.default_rng(seed).normal(size=shape)
    (found,) = pair(
        {"c.weight": weight},
        {"c": {"kernel": np.ones(flax_shape)}},
        conv_transpose=".*" if transposed else "-",
        conv1d="",
    )
    leaf = found.to_flax(weight)
    assert leaf.shape == flax_shape
    np.testing.assert_array_equal(found.to_torch(leaf), weight)
    rows, cols = found.matrix_axes()
    row, col = found.matrix_order()
    matrix = leaf.transpose(*rows, *cols).reshape(shape[0], -1)
    np.testing.assert_array_equal(matrix, weight.reshape(shape[0], -1)[row][:, col])


LAYER_KINDS = st.sampled_from(["linear", "conv", "norm", "batch", "embedding"])


@settings(max_examples=25, deadline=None)
@given(kinds=st.lists(LAYER_KINDS, min_size=1, max_size=6), data=st.data())
def test_random_stacks_there_and_back(kinds, data):
    """Torch numbers all layers of a Sequential together, linen each kind by itself."""
    size = st.integers(1, 4)
    model, params, statistics = {}, {}, {}
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    for k, kind in enumerate(kinds):
        a, b, w = data.draw(size), data.draw(size), rng.normal
        number = kinds[:k].count(kind)
        if kind == "linear":
            model |= {f"{k}.weight": w(size=(a, b)), f"{k}.bias": w(size=a)}
            params[f"Dense_{number}"] = {"kernel": np.zeros((b, a)), "bias": np.zeros(a)}
        elif kind == "conv":
            model |= {f"{k}.weight": w(size=(a, b, 3, 2)), f"{k}.bias": w(size=a)}
            params[f"Conv_{number}"] = {"kernel": np.zeros((3, 2, b, a)), "bias": np.zeros(a)}
        elif kind == "embedding":  # a name that no Linear has, as in every model with both
            model |= {f"embed.{k}.weight": w(size=(a, b))}
            params[f"Embed_{number}"] = {"embedding": np.zeros((a, b))}
        else:
            model |= {f"{k}.weight": w(size=a), f"{k}.bias": w(size=a)}
            name = f"{'BatchNorm' if kind == 'batch' else 'LayerNorm'}_{number}"
            params[name] = {"scale": np.zeros(a), "bias": np.zeros(a)}
            if kind == "batch":
                model |= {f"{k}.running_mean": w(size=a), f"{k}.running_var": w(size=a)}
                statistics[name] = {"mean": np.zeros(a), "var": np.zeros(a)}
    like = {"params": params, "batch_stats": statistics}
    variables = params_from_torch(model, like, flatten={".*": None}, conv1d="")
    assert jax.tree.structure(variables) == jax.tree.structure(like)
    back = params_to_torch(variables, model, flatten={".*": None}, conv1d="")
    for name, value in model.items():
        np.testing.assert_array_equal(back[name], value)


def test_matrix_order_of_packed_and_flattened_weights():
    weight = np.random.default_rng(0).normal(size=(24, 8))
    like = {n: {"kernel": np.ones((8, 2, 4))} for n in ("query", "key", "value")}
    like["out"] = {"kernel": np.ones((2, 4, 8))}
    model = {"in_proj_weight": weight, "out_proj.weight": np.ones((8, 8))}
    parts = {p.path[0]: p for p in pair(model, like)}
    row, col = parts["key"].matrix_order((1, 2), (0,))
    leaf = parts["key"].to_flax(weight)
    np.testing.assert_array_equal(leaf.reshape(8, 8).T, weight[row][:, col])
    assert not parts["key"].whole
    with pytest.raises(CheckpointMismatch, match="torch_matrix_dims"):
        parts["key"].matrix_order((2,), (0, 1))

    weight = np.random.default_rng(0).normal(size=(5, 12))
    (flat,) = pair(
        {"fc.weight": weight}, {"fc": {"kernel": np.ones((12, 5))}}, flatten={"fc": (3, 2, 2)}
    )
    row, col = flat.matrix_order()
    np.testing.assert_array_equal(flat.to_flax(weight).T, weight[row][:, col])


def test_public_names():
    for name in ("params_from_torch", "params_to_torch", "pair", "Pair", "CheckpointMismatch"):
        assert name in torch_bridge.__all__
