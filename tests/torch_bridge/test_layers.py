"""Layers: the same input gives the same output in torch and in Flax, there and back."""

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

from torch_bridge import CheckpointMismatch, pair

pytestmark = pytest.mark.torch


def conv(n, transposed=False, square=False, groups=1):
    """Both modules and nnx's, with an input's shape."""
    ins, outs, size = (4, 4, 3) if square else (4, 6, 3)
    name = f"Conv{'Transpose' if transposed else ''}{n}d"
    strides = {"stride": 2} if transposed else {}
    module = getattr(torch.nn, name)(ins, outs, size, groups=groups, **strides)
    keywords: dict = {"padding": "VALID", "strides": (2,) * n if transposed else (1,) * n}
    keywords |= {"feature_group_count": groups} if groups > 1 else {}
    linen, own = (getattr(kind, name.rstrip("123d")) for kind in (nn, nnx))
    return (
        module,
        linen(outs, (size,) * n, **keywords),
        lambda rngs: own(ins, outs, (size,) * n, rngs=rngs, **keywords),
        (2, ins, *(5,) * n),
    )


def plain(module, linen, own, shape, *sizes, **keywords):
    return lambda: (module, linen, lambda rngs: own(*sizes, rngs=rngs, **keywords), shape)


MAP = (2, 6, 3, 3)
EPS = {"epsilon": 1e-5}
LAYERS = {
    "linear": plain(torch.nn.Linear(4, 6), nn.Dense(6), nnx.Linear, (2, 4), 4, 6),
    "linear without bias": plain(
        torch.nn.Linear(4, 6, bias=False),
        nn.Dense(6, use_bias=False),
        nnx.Linear, (2, 4), 4, 6, use_bias=False,
    ),
    "dense general": plain(
        torch.nn.Linear(4, 6), nn.DenseGeneral((2, 3)), nnx.LinearGeneral, (5, 4), 4, (2, 3)
    ),
    **{f"conv{n}d": lambda n=n: conv(n) for n in (1, 2, 3)},
    "conv2d in groups": lambda: conv(2, groups=2),
    **{f"conv_transpose{n}d": lambda n=n: conv(n, transposed=True) for n in (1, 2, 3)},
    "layer norm": plain(
        torch.nn.LayerNorm(6), nn.LayerNorm(**EPS), nnx.LayerNorm, (2, 6), 6, **EPS
    ),
    "rms norm": plain(
        torch.nn.RMSNorm(6, eps=1e-5), nn.RMSNorm(**EPS), nnx.RMSNorm, (2, 6), 6, **EPS
    ),
    "group norm": plain(
        torch.nn.GroupNorm(2, 6), nn.GroupNorm(2, **EPS), nnx.GroupNorm, MAP, 6, 2, **EPS
    ),
    "batch norm": plain(
        torch.nn.BatchNorm2d(6).eval(),
        nn.BatchNorm(use_running_average=True, **EPS),
        nnx.BatchNorm, MAP, 6, use_running_average=True, **EPS,
    ),
    "prelu": plain(torch.nn.PReLU(), nn.PReLU(), lambda rngs: nnx.PReLU(), (2, 6)),
    "embedding": plain(torch.nn.Embedding(7, 4), nn.Embed(7, 4), nnx.Embed, "ids", 7, 4),
    "attention": plain(
        torch.nn.MultiheadAttention(8, 2, batch_first=True),
        nn.MultiHeadDotProductAttention(2),
        nnx.MultiHeadAttention, (2, 5, 8), 2, 8, decode=False,
    ),
    "attention without bias": plain(
        torch.nn.MultiheadAttention(8, 2, batch_first=True, bias=False),
        nn.MultiHeadDotProductAttention(2, use_bias=False),
        nnx.MultiHeadAttention, (2, 5, 8), 2, 8, decode=False, use_bias=False,
    ),
}  # fmt: skip


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                positive = torch.rand(value.shape) + 0.1
                value.copy_(positive if "var" in name else torch.randn(value.shape))
    return module


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def close(ours, theirs) -> None:
    ours, theirs = (np.asarray(x) for x in (ours, theirs))
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, atol=1e-5 * scale, rtol=0)


def assert_equal_states(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def output(module, *inputs):
    found = module(*map(torch.from_numpy, inputs))
    return (found[0] if isinstance(found, tuple) else found).detach().numpy()


@pytest.mark.parametrize("case", LAYERS)
def test_layer_gives_the_same_output_in_linen_and_nnx(case):
    torch.manual_seed(0)
    module, linen, build, shape = LAYERS[case]()
    randomize(module)
    x = np.array([0, 3, 6]) if shape == "ids" else normal(*shape)
    attends, is_map = "attention" in case, x.ndim > 2 and "attention" not in case
    theirs = output(module, *[x] * (3 if attends else 1))
    theirs = np.moveaxis(theirs, 1, -1) if is_map else theirs
    inputs = jnp.asarray(np.moveaxis(x, 1, -1) if is_map else x)
    said = {"conv_transpose": ""} if "transpose" in case else {}
    like = jax.eval_shape(linen.init, jax.random.key(0), inputs)
    variables = params_from_torch(module.state_dict(), like, **said)
    assert jax.tree.structure(variables) == jax.tree.structure(like)
    close(linen.apply(variables, inputs), theirs)
    layer = build(nnx.Rngs(0))
    nnx.update(layer, params_from_torch(module.state_dict(), nnx.state(layer), **said))
    close(layer(inputs), theirs)
    for params in (variables, nnx.state(layer)):
        back = params_to_torch(params, module.state_dict(), **said)
        assert_equal_states(back, module.state_dict())


def test_square_conv_transpose_and_its_two_flax_forms():
    torch.manual_seed(0)
    module = torch.nn.ConvTranspose2d(4, 4, 3, stride=2)
    x = normal(2, 4, 5, 5)
    theirs, inputs = np.moveaxis(output(module, x), 1, -1), jnp.asarray(np.moveaxis(x, 1, -1))
    for transpose_kernel, hint in ((False, ".*"), (True, "never")):
        layer = nn.ConvTranspose(
            4, (3, 3), strides=(2, 2), padding="VALID", transpose_kernel=transpose_kernel
        )
        like = jax.eval_shape(layer.init, jax.random.key(0), inputs)
        variables = params_from_torch(module.state_dict(), like, conv_transpose=hint)
        close(layer.apply(variables, inputs), theirs)
    state = {f"up.{name}": value for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match="conv_transpose="):
        params_from_torch(state, {"params": {"up": like["params"]}})


def test_attention_with_other_key_and_value_sizes():
    torch.manual_seed(1)
    module = randomize(torch.nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True))
    q, k, v = (normal(2, 4, n) for n in (8, 5, 3))
    linen = nn.MultiHeadDotProductAttention(2, qkv_features=8, out_features=8)
    like = jax.eval_shape(linen.init, jax.random.key(0), q, k, v)
    variables = params_from_torch(module.state_dict(), like)
    close(linen.apply(variables, q, k, v), output(module, q, k, v))
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
    x, layer = normal(2, 5, 8), PackedAttention(2, flat)
    like = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(layer.apply(variables, jnp.asarray(x)), output(module, x, x, x))
    assert all(found.rows is None and found.terms == 1 for found in pair(module.state_dict(), like))
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
    module, x = randomize(make(4, 5, batch_first=True)), normal(2, 6, 4)
    layer = nn.RNN(linen_cell(5))
    like = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(layer.apply(variables, jnp.asarray(x)), output(module, x))
    module.load_state_dict(params_to_torch(variables, module.state_dict()))
    close(layer.apply(variables, jnp.asarray(x)), output(module, x))

    cell = nnx.RNN(nnx_cell(4, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    if case == "gru":
        with pytest.raises(CheckpointMismatch, match=r"flax\.linen\.GRUCell"):
            params_from_torch(module.state_dict(), nnx.state(cell))
        with torch.no_grad():
            module.bias_hh_l0[10:] = 0
    nnx.update(cell, params_from_torch(module.state_dict(), nnx.state(cell)))
    close(cell(jnp.asarray(x)), output(module, x))
    module.load_state_dict(params_to_torch(nnx.state(cell), module.state_dict()))
    close(cell(jnp.asarray(x)), output(module, x))


class Stack(nn.Module):
    """Two bidirectional layers, whose directions have names or not."""

    named: bool

    @nn.compact
    def __call__(self, x):
        for k in range(2):
            names = (f"forward_{k}", f"backward_{k}") if self.named else (None, None)
            forward, backward = (nn.RNN(nn.OptimizedLSTMCell(5, name=n)) for n in names)
            x = nn.Bidirectional(forward, backward)(x)
        return x


def test_cells_layers_and_directions():
    torch.manual_seed(2)
    module = randomize(torch.nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True))
    x = normal(2, 6, 4)
    like = jax.eval_shape(Stack(False).init, jax.random.key(0), jnp.asarray(x))
    with pytest.raises(CheckpointMismatch, match="could be") as caught:
        params_from_torch(module.state_dict(), like)  # which of two is the backward one?
    assert not caught.value.missing + caught.value.unexpected
    like = jax.eval_shape(Stack(True).init, jax.random.key(0), jnp.asarray(x))
    variables = params_from_torch(module.state_dict(), like)
    close(Stack(True).apply(variables, jnp.asarray(x)), output(module, x))
    cell = torch.nn.LSTMCell(4, 5)
    carry = (jnp.zeros((2, 5)),) * 2
    like = nn.LSTMCell(5).init(jax.random.key(0), carry, jnp.ones((2, 4)))
    converted = params_from_torch(cell.state_dict(), like)
    ours = nn.LSTMCell(5).apply(converted, carry, jnp.asarray(x[:, 0]))[1]
    close(ours, output(cell, x[:, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_and_no_memory_is_shared(dtype):
    module = torch.nn.Linear(3, 2).to(dtype)
    params = params_from_torch(module.state_dict(), {"kernel": np.ones((3, 2)), "bias": np.ones(2)})
    expected = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
    assert params["kernel"].dtype == expected.get(dtype, np.float64)
    assert_equal_states(params_to_torch(params, module.state_dict()), module.state_dict())
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
    filled = params_from_torch(module, model)  # a module in, a module out
    close(filled.fc(jnp.ones((1, 3))), module.fc(torch.ones(1, 3)).detach())
