"""Layers: the same input gives the same output in torch and in Flax, there and back."""

import re
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn as tnn

from tests.helpers.bridge import params_to_torch, randomize, values
from torch_bridge import CheckpointMismatch, params_from_torch


class Layer(NamedTuple):
    """One layer in torch, linen and nnx, if that has it, and the shapes of its inputs in torch."""

    torch: tnn.Module
    linen: nn.Module
    nnx: Any
    shapes: tuple[Any, ...]


def conv(n, transposed=False, groups=1):
    name = f"Conv{'Transpose' if transposed else ''}"
    strides = {"stride": 2} if transposed else {}
    module = getattr(tnn, f"{name}{n}d")(4, 6, 3, groups=groups, **strides)
    more = {"padding": "VALID", "strides": (2,) * n if transposed else (1,) * n}
    more |= {"feature_group_count": groups} if groups > 1 else {}
    linen, own = (getattr(kind, name) for kind in (nn, nnx))
    size, shape = (3,) * n, (2, 4, *(5,) * n)
    return Layer(module, linen(6, size, **more), partial(own, 4, 6, size, **more), (shape,))


def recurrent(make, linen_cell, nnx_cell=None):
    def build(rngs):
        return nnx.RNN(nnx_cell(4, 5, rngs=rngs), rngs=rngs)

    module = make(4, 5, batch_first=True)
    return Layer(module, nn.RNN(linen_cell(5)), build if nnx_cell else None, ((2, 6, 4),))


def attention(bias=True, own=nnx.MultiHeadAttention, linen=None, widths=(8, 8, 8)):
    module = tnn.MultiheadAttention(
        8, 2, kdim=widths[1], vdim=widths[2], batch_first=True, bias=bias
    )
    linen = linen or nn.MultiHeadDotProductAttention(
        2, qkv_features=8, out_features=8, use_bias=bias
    )
    build = partial(own, 2, 8, decode=False, use_bias=bias) if own else None
    return Layer(module, linen, build, tuple((2, 5, width) for width in widths))


class PackedAttention(nn.Module):
    """Attention whose three projections are one kernel, as in torch."""

    flat: bool

    @nn.compact
    def __call__(self, x, *_):
        qkv = nn.DenseGeneral(24 if self.flat else (3, 2, 4), name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:-1], 3, 2, 4), -3, 0)
        y = nn.dot_product_attention(q, k, v)
        return nn.DenseGeneral(8, axis=(-2, -1), name="out")(y)


def normed(module, name, shape, **keywords):
    keywords["epsilon"] = 1e-5
    own = partial(getattr(nnx, name), 6, **keywords)
    return Layer(module, getattr(nn, name)(**keywords), own, (shape,))


MAP, ROW = (2, 6, 3, 3), (2, 6)
PLAIN = partial(nnx.Linear, 6, 4, use_bias=False)
GENERAL = partial(nnx.LinearGeneral, 6, (2, 2))
LAYERS = {
    "no bias": Layer(tnn.Linear(6, 4, False), nn.Dense(4, False), PLAIN, (ROW,)),
    "dense general": Layer(tnn.Linear(6, 4), nn.DenseGeneral((2, 2)), GENERAL, (ROW,)),
    **{f"conv{n}d": conv(n) for n in (1, 2, 3)},
    "conv2d in groups": conv(2, groups=2),
    **{f"conv_transpose{n}d": conv(n, transposed=True) for n in (1, 2, 3)},
    "layer norm": normed(tnn.LayerNorm(6), "LayerNorm", ROW),
    "layer norm of a map": Layer(
        tnn.LayerNorm((6, 3, 3)),
        nn.LayerNorm(epsilon=1e-5, reduction_axes=(-3, -2, -1), feature_axes=(-3, -2, -1)),
        None,
        (MAP,),
    ),
    "rms norm": normed(tnn.RMSNorm(6, eps=1e-5), "RMSNorm", ROW),
    "group norm map": normed(tnn.GroupNorm(2, 6), "GroupNorm", MAP, num_groups=2),
    "batch norm map": normed(tnn.BatchNorm2d(6).eval(), "BatchNorm", MAP, use_running_average=True),
    "prelu": Layer(tnn.PReLU(), nn.PReLU(), lambda rngs: nnx.PReLU(), (ROW,)),
    "embedding": Layer(tnn.Embedding(7, 4), nn.Embed(7, 4), partial(nnx.Embed, 7, 4), ("ids",)),
    "attention": attention(),
    "attention without bias": attention(bias=False),
    "attention to other sizes": attention(widths=(8, 5, 3), own=None),
    "attention, packed": attention(linen=PackedAttention(flat=False), own=None),
    "attention, packed and flat": attention(linen=PackedAttention(flat=True), own=None),
    "lstm": recurrent(tnn.LSTM, nn.OptimizedLSTMCell, nnx.OptimizedLSTMCell),
    "plain lstm": recurrent(tnn.LSTM, nn.LSTMCell, nnx.LSTMCell),
    "gru": recurrent(tnn.GRU, nn.GRUCell),
    "rnn": recurrent(tnn.RNN, nn.SimpleCell, nnx.SimpleCell),
}


def close(ours, theirs):
    ours, theirs = (np.asarray(x) for x in (ours, theirs))
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, atol=1e-5 * scale, rtol=0)


def output(module, *inputs):
    found = module(*map(torch.from_numpy, inputs))
    return (found[0] if isinstance(found, tuple) else found).detach().numpy()


@pytest.mark.parametrize("case", LAYERS)
def test_layer_gives_the_same_output_in_linen_and_nnx(case):
    torch.manual_seed(0)
    module, linen, build, shapes = LAYERS[case]
    state = randomize(module).state_dict()
    inputs = [np.array([0, 3, 6]) if shape == "ids" else values(*shape) for shape in shapes]
    moved = (lambda x: np.moveaxis(x, 1, -1)) if re.search("conv|map", case) else np.asarray
    theirs, ours = moved(output(module, *inputs)), [jnp.asarray(moved(x)) for x in inputs]
    said = {"conv_transpose": ""} if "transpose" in case else {}
    like = jax.eval_shape(linen.init, jax.random.key(0), *ours)
    params = params_from_torch(state, like, **said)
    assert jax.tree.structure(params) == jax.tree.structure(like)
    close(linen.apply(params, *ours), theirs)
    both = [params]
    if build:
        layer = build(rngs=nnx.Rngs(0))
        nnx.update(layer, params_from_torch(state, nnx.state(layer), **said))
        close(layer(*ours), theirs)
        both.append(nnx.state(layer))
    for params in both:
        back = params_to_torch(params, state, **said)
        assert back.keys() == state.keys()
        for name in state:
            if not re.search("bias_[ih]h", name):  # of which Flax has the sum
                assert torch.equal(back[name], state[name]), name
        module.load_state_dict(back)
        close(moved(output(module, *inputs)), theirs)


def test_square_conv_transpose_and_its_two_flax_forms():
    torch.manual_seed(0)
    module = tnn.ConvTranspose2d(4, 4, 3, stride=2)
    x = values(2, 4, 5, 5)
    theirs, inputs = np.moveaxis(output(module, x), 1, -1), jnp.asarray(np.moveaxis(x, 1, -1))
    for transpose_kernel, hint in ((False, ".*"), (True, "never")):
        layer = nn.ConvTranspose(
            4, (3, 3), strides=(2, 2), padding="VALID", transpose_kernel=transpose_kernel
        )
        like = jax.eval_shape(layer.init, jax.random.key(0), inputs)
        variables = params_from_torch(module.state_dict(), like, conv_transpose=hint)
        close(layer.apply(variables, inputs), theirs)
    for name in ("up", "ConvTranspose_0"):  # a name does not decide
        state = {f"{name}.{key}": value for key, value in module.state_dict().items()}
        with pytest.raises(CheckpointMismatch, match="conv_transpose="):
            params_from_torch(state, {"params": {name: like["params"]}})


def test_a_gru_of_nnx_has_no_place_for_a_bias():
    module = randomize(tnn.GRU(4, 5, batch_first=True))
    cell = nnx.RNN(nnx.GRUCell(4, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    with pytest.raises(CheckpointMismatch, match=r"flax\.linen\.GRUCell"):
        params_from_torch(module.state_dict(), nnx.state(cell))
    with torch.no_grad():
        module.bias_hh_l0[10:] = 0
    x = values(2, 6, 4)
    nnx.update(cell, params_from_torch(module.state_dict(), nnx.state(cell)))
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
    module = randomize(tnn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True))
    x = values(2, 6, 4)
    like = jax.eval_shape(Stack(False).init, jax.random.key(0), jnp.asarray(x))
    with pytest.raises(CheckpointMismatch, match="could be") as caught:
        params_from_torch(module.state_dict(), like)  # which of two is the backward one?
    assert not caught.value.missing + caught.value.unexpected
    like = jax.eval_shape(Stack(True).init, jax.random.key(0), jnp.asarray(x))
    rules = {r"l(\d)": r"forward_\1", r"l(\d)\.reverse": r"backward_\1"}
    variables = params_from_torch(module.state_dict(), like, rules=rules)
    close(Stack(True).apply(variables, jnp.asarray(x)), output(module, x))
    cell = tnn.LSTMCell(4, 5)
    carry = (jnp.zeros((2, 5)),) * 2
    like = nn.LSTMCell(5).init(jax.random.key(0), carry, jnp.ones((2, 4)))
    converted = params_from_torch(cell.state_dict(), like)
    ours = nn.LSTMCell(5).apply(converted, carry, jnp.asarray(x[:, 0]))[1]
    close(ours, output(cell, x[:, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_and_no_memory_is_shared(dtype):
    state = tnn.Linear(3, 2).to(dtype).state_dict()
    params = params_from_torch(state, {"kernel": np.ones((3, 2)), "bias": np.ones(2)})
    expected = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
    assert params["kernel"].dtype == expected.get(dtype, np.float64)
    back, before = params_to_torch(params, state), jax.tree.map(np.copy, params)
    for name, value in state.items():
        assert torch.equal(back[name], value)
        value.zero_()
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_random_state_and_caches_of_nnx_are_kept():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(3, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    model = Model(nnx.Rngs(0))
    module = tnn.Sequential()
    module.add_module("fc", tnn.Linear(3, 2))
    state = params_from_torch(module.state_dict(), nnx.state(model))
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    filled = params_from_torch(module, model)  # a module in, a module out
    close(filled.fc(jnp.ones((1, 3))), module.fc(torch.ones(1, 3)).detach())
