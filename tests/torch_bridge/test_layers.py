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
from numpy.testing import assert_array_equal
from torch import nn as tnn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.helpers.bridge import params_to_torch, randomize, values
from tests.helpers.leaves import equal
from torch_bridge import CheckpointMismatch, params_from_torch

# Inputs in torch's order, with 4 channels and 1, 2 or 3 axes.
MAPS = {1: (2, 4, 5), 2: (2, 4, 5, 5), 3: (2, 4, 5, 5, 5)}


class Layer(NamedTuple):
    """One layer in torch, linen and nnx, if that has it, and the shapes of its inputs in torch."""

    torch: tnn.Module
    linen: nn.Module
    nnx: Any
    shapes: tuple[Any, ...]


def conv(n, groups=1):
    """Makes a convolution over `n` axes."""
    kernel = (3,) * n
    options = {"padding": "VALID"}
    if groups > 1:
        options["feature_group_count"] = groups
    in_torch = (tnn.Conv1d, tnn.Conv2d, tnn.Conv3d)[n - 1]
    return Layer(
        in_torch(4, 6, 3, groups=groups),
        nn.Conv(6, kernel, **options),
        partial(nnx.Conv, 4, 6, kernel, **options),
        (MAPS[n],),
    )


def transposed_conv(n):
    """Makes a transposed convolution over `n` axes, with steps of 2."""
    kernel = (3,) * n
    options = {"padding": "VALID", "strides": (2,) * n}
    in_torch = (tnn.ConvTranspose1d, tnn.ConvTranspose2d, tnn.ConvTranspose3d)[n - 1]
    return Layer(
        in_torch(4, 6, 3, stride=2),
        nn.ConvTranspose(6, kernel, **options),
        partial(nnx.ConvTranspose, 4, 6, kernel, **options),
        (MAPS[n],),
    )


def recurrent(make, linen_cell, nnx_cell=None):
    """Makes a recurrent layer; nnx has none if it has no such cell."""

    def build(rngs):
        cell = nnx_cell(4, 5, rngs=rngs)
        return nnx.RNN(cell, rngs=rngs)

    if nnx_cell is None:
        build = None
    module = make(4, 5, batch_first=True)
    return Layer(module, nn.RNN(linen_cell(5)), build, ((2, 6, 4),))


def torch_attention(bias=True, key=8, value=8):
    """Makes attention of 2 heads, with keys and values of these sizes."""
    return tnn.MultiheadAttention(8, 2, bias=bias, kdim=key, vdim=value, batch_first=True)


def linen_attention(bias=True):
    return nn.MultiHeadDotProductAttention(2, qkv_features=8, out_features=8, use_bias=bias)


def attention(bias=True):
    """Makes attention of each framework's own; query, key and value may be different."""
    build = partial(nnx.MultiHeadAttention, 2, 8, decode=False, use_bias=bias)
    return Layer(torch_attention(bias), linen_attention(bias), build, (ROWS, ROWS, ROWS))


class PackedAttention(nn.Module):
    """Has the three projections of attention in one kernel, as torch."""

    flat: bool

    @nn.compact
    def __call__(self, x, *_):
        features = 24 if self.flat else (3, 2, 4)
        packed = nn.DenseGeneral(features, name="qkv")(x)
        parts = packed.reshape(*x.shape[:-1], 3, 2, 4)
        q, k, v = jnp.moveaxis(parts, -3, 0)
        y = nn.dot_product_attention(q, k, v)
        return nn.DenseGeneral(8, axis=(-2, -1), name="out")(y)


def normed(module, linen, in_nnx, shape, **options):
    """Makes a norm of 6 features, with torch's epsilon in all frameworks."""
    options["epsilon"] = 1e-5
    return Layer(module, linen(**options), partial(in_nnx, 6, **options), (shape,))


MAP = (2, 6, 3, 3)
ROW = (2, 6)
ROWS = (2, 5, 8)
PLAIN = partial(nnx.Linear, 6, 4, use_bias=False)
GENERAL = partial(nnx.LinearGeneral, 6, (2, 2))
BATCH_NORM = tnn.BatchNorm2d(6).eval()
WHOLE_MAP = nn.LayerNorm(epsilon=1e-5, reduction_axes=(1, 2, 3), feature_axes=(1, 2, 3))
LAYERS = {
    "no bias": Layer(tnn.Linear(6, 4, False), nn.Dense(4, False), PLAIN, (ROW,)),
    "dense general": Layer(tnn.Linear(6, 4), nn.DenseGeneral((2, 2)), GENERAL, (ROW,)),
    "conv1d": conv(1),
    "conv2d": conv(2),
    "conv3d": conv(3),
    "conv2d in groups": conv(2, groups=2),
    "conv_transpose1d": transposed_conv(1),
    "conv_transpose2d": transposed_conv(2),
    "conv_transpose3d": transposed_conv(3),
    "layer norm": normed(tnn.LayerNorm(6), nn.LayerNorm, nnx.LayerNorm, ROW),
    "layer norm of a map": Layer(tnn.LayerNorm((6, 3, 3)), WHOLE_MAP, None, (MAP,)),
    "rms norm": normed(tnn.RMSNorm(6, eps=1e-5), nn.RMSNorm, nnx.RMSNorm, ROW),
    "group norm map": normed(tnn.GroupNorm(2, 6), nn.GroupNorm, nnx.GroupNorm, MAP, num_groups=2),
    "batch norm map": normed(
        BATCH_NORM, nn.BatchNorm, nnx.BatchNorm, MAP, use_running_average=True
    ),
    "prelu": Layer(tnn.PReLU(), nn.PReLU(), lambda rngs: nnx.PReLU(), (ROW,)),
    "embedding": Layer(tnn.Embedding(7, 4), nn.Embed(7, 4), partial(nnx.Embed, 7, 4), ("ids",)),
    "attention": attention(),
    "attention without bias": attention(bias=False),
    "attention to other sizes": Layer(
        torch_attention(key=5, value=3), linen_attention(), None, (ROWS, (2, 5, 5), (2, 5, 3))
    ),
    "attention, packed": Layer(torch_attention(), PackedAttention(False), None, (ROWS,) * 3),
    "attention, packed and flat": Layer(
        torch_attention(), PackedAttention(True), None, (ROWS,) * 3
    ),
    "lstm": recurrent(tnn.LSTM, nn.OptimizedLSTMCell, nnx.OptimizedLSTMCell),
    "plain lstm": recurrent(tnn.LSTM, nn.LSTMCell, nnx.LSTMCell),
    "gru": recurrent(tnn.GRU, nn.GRUCell),
    "rnn": recurrent(tnn.RNN, nn.SimpleCell, nnx.SimpleCell),
}


def close(ours, theirs):
    """Asserts that outputs are equal up to rounding; Flax may have more axes."""
    theirs = np.asarray(theirs)
    ours = np.asarray(ours).reshape(theirs.shape)
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * scale, rtol=0)


def output(module, *inputs):
    """Returns the first output of a module, as an array."""
    outputs = module(*map(torch.from_numpy, inputs))
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    return outputs.detach().numpy()


def inputs_of(case):
    """Draws the inputs of a layer, in torch's order of axes."""
    inputs = []
    for shape in LAYERS[case].shapes:
        inputs.append(np.array([0, 3, 6]) if shape == "ids" else values(*shape))
    return inputs


def in_flax(case, array):
    """Moves the channels of a map to its end."""
    if "conv" in case or "map" in case:
        array = np.moveaxis(array, 1, -1)
    return jnp.asarray(array)


@pytest.mark.parametrize("case", LAYERS)
def test_layer_gives_the_same_output_in_linen_and_nnx(case):
    torch.manual_seed(0)
    module, linen, build, _ = LAYERS[case]
    state = randomize(module).state_dict()
    inputs = inputs_of(case)
    theirs = in_flax(case, output(module, *inputs))
    ours = [in_flax(case, x) for x in inputs]
    answers = {"conv_transpose": ""} if "transpose" in case else {}
    like = jax.eval_shape(linen.init, jax.random.key(0), *ours)
    params = params_from_torch(state, like, **answers)
    assert jax.tree.structure(params) == jax.tree.structure(like)
    close(linen.apply(params, *ours), theirs)
    several = [params]
    if build:
        layer = build(rngs=nnx.Rngs(0))
        converted = params_from_torch(state, nnx.state(layer), **answers)
        nnx.update(layer, converted)
        close(layer(*ours), theirs)
        several.append(nnx.state(layer))
    for params in several:
        back = params_to_torch(params, state, **answers)
        assert back.keys() == state.keys()
        for name in state:
            if not re.search("bias_[ih]h", name):  # of which Flax has the sum
                assert torch.equal(back[name], state[name]), name
        module.load_state_dict(back)
        close(in_flax(case, output(module, *inputs)), theirs)


def test_square_conv_transpose_and_its_two_flax_forms():
    torch.manual_seed(0)
    module = tnn.ConvTranspose2d(4, 4, 3, stride=2)
    x = values(2, 4, 5, 5)
    theirs = np.moveaxis(output(module, x), 1, -1)
    inputs = jnp.moveaxis(x, 1, -1)
    options = {"strides": (2, 2), "padding": "VALID"}
    for transpose_kernel, hint in ((False, ".*"), (True, "never")):
        layer = nn.ConvTranspose(4, (3, 3), transpose_kernel=transpose_kernel, **options)
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
            forward = f"forward_{k}" if self.named else None
            backward = f"backward_{k}" if self.named else None
            x = nn.Bidirectional(
                nn.RNN(nn.OptimizedLSTMCell(5, name=forward)),
                nn.RNN(nn.OptimizedLSTMCell(5, name=backward)),
            )(x)
        return x


def test_layers_and_directions():
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


def test_a_cell_alone():
    cell = tnn.LSTMCell(4, 5)
    x = values(2, 4)
    carry = (jnp.zeros((2, 5)), jnp.zeros((2, 5)))
    like = nn.LSTMCell(5).init(jax.random.key(0), carry, jnp.asarray(x))
    converted = params_from_torch(cell.state_dict(), like)
    _, ours = nn.LSTMCell(5).apply(converted, carry, jnp.asarray(x))
    close(ours, output(cell, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_and_no_memory_is_shared(dtype):
    state = tnn.Linear(3, 2).to(dtype).state_dict()
    params = params_from_torch(state, {"kernel": np.ones((3, 2)), "bias": np.ones(2)})
    expected = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
    assert params["kernel"].dtype == expected.get(dtype, np.float64)
    back = params_to_torch(params, state)
    before = jax.tree.map(np.copy, params)
    for name, value in state.items():
        assert torch.equal(back[name], value)
        value.zero_()
    equal(params, before)


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

    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    with pytest.warns(UserWarning, match=r"dropout/rngs/key: torch has no values.*nnx\.reseed"):
        filled = params_from_torch(module, abstract)
    nnx.reseed(filled, default=0)
    filled.dropout(filled.fc(jnp.ones((1, 3))))


WRAPPERS = {
    "of a whole model": tnn.DataParallel,
    "compiled": lambda module: tnn.ModuleDict({"_orig_mod": module}),  # the names of torch.compile
    "of each layer": lambda module: tnn.Sequential(checkpoint_wrapper(module[0])),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_wrapped_module_shows_the_classes_of_its_layers(wrap):
    linear = tnn.Linear(4, 4)
    like = {"0": {"kernel": np.zeros((4, 4)), "bias": np.zeros(4)}}
    params = params_from_torch(wrap(tnn.Sequential(linear)), like)
    assert_array_equal(params["0"]["kernel"].T, linear.weight.detach())
    upward = wrap(tnn.Sequential(tnn.ConvTranspose2d(4, 4, 2)))
    like = {"0": {"kernel": np.zeros((2, 2, 4, 4)), "bias": np.zeros(4)}}
    with pytest.raises(CheckpointMismatch, match="conv_transpose='' if none"):
        params_from_torch(upward, like)
