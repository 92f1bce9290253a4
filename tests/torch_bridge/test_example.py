"""One example through both models: it finds out, proves or refuses."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn as tnn

import torch_bridge
from tests.helpers.bridge import randomize, values
from torch_bridge import Checkpoint, CheckpointMismatch, params_from_torch


def proof(module, *inputs):
    """Returns the state dict of a module with values of its own, and an example of it."""
    torch.manual_seed(0)
    outputs = randomize(module.eval())(*map(torch.from_numpy, inputs))
    return module.state_dict(), (inputs, jax.tree.map(lambda x: x.detach().numpy(), outputs))


def abstract(model, *inputs):
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)


def mlp():
    return tnn.Sequential(tnn.Linear(6, 6), tnn.Tanh(), tnn.Linear(6, 6), tnn.Tanh())


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(6)(jnp.tanh(nn.Dense(6)(x))))


ROWS = values(4, 6)


def test_the_run_says_how_far_the_outputs_are_apart_and_goes_back():
    state, example = proof(mlp(), ROWS)
    like = abstract(Nested(), ROWS)
    arrays = {name: value.numpy() for name, value in state.items()}
    run = torch_bridge.to_flax(
        Checkpoint(dict(arrays), example=example), like, apply=Nested().apply
    )
    assert run.difference < 1e-6
    assert run.params["params"]["Dense_1"]["kernel"].tolist() == arrays["0.weight"].T.tolist()
    checkpoint = Checkpoint(arrays, example=example)
    for said in ({"pairs": run.pairs}, {"apply": Nested().apply}):
        back = torch_bridge.to_torch(run.params, (), checkpoint, **said)
        for name, value in arrays.items():
            np.testing.assert_array_equal(back["state_dict"][name], value)
    with pytest.warns(UserWarning, match="Assumed, because neither names nor shapes show it"):
        run = torch_bridge.to_flax(checkpoint, like, plain=True)
    assert run.difference is None


class Wrong(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(6, name="b")(nn.relu(nn.Dense(6, name="a")(x))))


class Sum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(6)(x) + nn.Dense(6)(x)


class TorchSum(tnn.Module):
    def __init__(self):
        super().__init__()
        self.left = tnn.Linear(6, 6)
        self.right = tnn.Linear(6, 6)

    def forward(self, x):
        return self.left(x) + self.right(x)


def test_what_does_not_give_the_outputs_is_refused_with_how_far_it_is_off():
    state, example = proof(mlp(), ROWS)
    with pytest.raises(
        CheckpointMismatch, match=r"after \d+ tries the nearest are .* off"
    ) as error:
        params_from_torch(state, abstract(Wrong(), ROWS), apply=Wrong().apply, example=example)
    assert any("or the other way round" in line for line in error.value.ambiguous)


def test_what_an_example_cannot_tell_is_refused_until_it_is_said():
    state, example = proof(TorchSum(), ROWS)
    like = abstract(Sum(), ROWS)
    with pytest.raises(CheckpointMismatch, match="does not tell which is which") as error:
        params_from_torch(state, like, apply=Sum().apply, example=example)
    assert error.value.ambiguous == (
        "left is Dense_0, and right is Dense_1, or the other way round",
    )
    said = {"rules": {"left": "Dense_1", "right": "Dense_0"}}
    params = params_from_torch(state, like, apply=Sum().apply, example=example, **said)
    np.testing.assert_array_equal(params["params"]["Dense_1"]["kernel"].T, state["left.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"apply": Nested().apply}, "`example` is missing"),
        ({"example": ((ROWS,), ROWS)}, "`apply` is missing"),
        ({"apply": Nested().apply, "example": 3}, r"must be \(inputs, outputs\)"),
        ({"apply": lambda params, x: 1 / 0, "example": ((ROWS,), ROWS)}, "ZeroDivisionError"),
        ({"apply": lambda params, x: x[:1], "example": ((ROWS,), ROWS)}, r"outputs of \(1, 6\)"),
        ({"apply": Nested().apply, "example": ((ROWS,), ROWS * np.nan)}, "not finite"),
        ({"apply": Nested().apply, "example": ((ROWS,), [3])}, "no floating-point outputs"),
    ],
)
def test_arguments_of_another_form_are_refused_in_one_sentence(arguments, message):
    state = mlp().state_dict()
    like = abstract(Nested(), ROWS)
    with pytest.raises(ValueError, match=message):
        params_from_torch(state, like, **arguments)


class Picture(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.out = nnx.Linear(64, 5, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.conv(x))))
        return self.out(x.reshape(len(x), -1))


def torch_picture():
    body = [tnn.Conv2d(3, 4, 3, padding=1), tnn.BatchNorm2d(4), tnn.ReLU(), tnn.Flatten()]
    return tnn.Sequential(*body, tnn.Linear(64, 5))


PICTURES = values(2, 3, 4, 4)


class Pooled(nn.Module):
    """Has a hidden layer of as many outputs as the flattened map has values."""

    names: tuple[str | None, ...] = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x):
        first, second = self.names
        x = nn.relu(nn.Conv(8, (3, 3), name="conv")(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        x = nn.relu(nn.Dense(32, name=first)(x))
        return nn.Dense(10, name=second)(x)


def torch_pooled():
    layers = {"conv": tnn.Conv2d(3, 8, 3, padding=1), "relu": tnn.ReLU(), "pool": tnn.MaxPool2d(2)}
    layers |= {"flat": tnn.Flatten(), "fc1": tnn.Linear(32, 32), "last": tnn.ReLU()}
    return tnn.Sequential(collections.OrderedDict(layers, fc2=tnn.Linear(32, 10)))


ALL_SAID = {"flatten": {"fc1": (8, 2, 2)}, "unflatten": {}}


@pytest.mark.parametrize("said", [{}, {"flatten": {"fc1": (8, 2, 2)}}, {"unflatten": {}}, ALL_SAID])
@pytest.mark.parametrize("names", [("fc1", "fc2"), (None, None)])
def test_hidden_units_are_not_permuted_beside_a_flattened_map(names, said):
    state, example = proof(torch_pooled(), PICTURES)
    model = Pooled(names)
    like = abstract(model, np.moveaxis(PICTURES, 1, -1))
    params = params_from_torch(state, like, apply=model.apply, example=example, **said)
    first, second = (params["params"][name or f"Dense_{k}"] for k, name in enumerate(names))
    np.testing.assert_array_equal(first["bias"], state["fc1.bias"])
    np.testing.assert_array_equal(second["kernel"].T, state["fc2.weight"])


def test_an_answer_that_names_no_map_is_not_searched_around():
    state, example = proof(torch_pooled(), PICTURES)
    like = abstract(Pooled(), np.moveaxis(PICTURES, 1, -1))
    with pytest.raises(CheckpointMismatch, match="does not give torch's outputs"):
        params_from_torch(state, like, apply=Pooled().apply, example=example, flatten={})


def test_states_and_modules_of_nnx_and_an_apply_that_moves_the_axes_itself():
    state, example = proof(torch_picture(), PICTURES)
    model = Picture(nnx.Rngs(0))
    graph, like = nnx.split(model)

    def apply(params, x):
        return nnx.merge(graph, params)(x)

    def moving(params, x):
        return apply(params, jnp.moveaxis(x, 1, -1))

    for function, tree in ((apply, like), (moving, like), (lambda m, x: m(x), model)):
        params = params_from_torch(state, tree, apply=function, example=example)
        if tree is model:
            params = nnx.state(params)
        outputs = apply(params, np.moveaxis(PICTURES, 1, -1))
        np.testing.assert_allclose(outputs, example[1], atol=1e-5)


def test_what_is_wrong_in_every_layout_is_said_once():
    state, example = proof(torch_picture(), PICTURES)
    model = Picture(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\(2, 4, 4, 3\) or \(2, 3, 4, 4\): ZeroDiv") as error:
        params_from_torch(state, model, apply=lambda params, x: 1 / 0, example=example)
    assert str(error.value).count("ZeroDivisionError") == 1


class General(nn.Module):
    """Reads and gives a map without a reshape."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral(6, axis=(1, 2, 3))(nn.relu(nn.Conv(4, (3, 3))(x)))
        return nn.ConvTranspose(3, (2, 2), (2, 2))(nn.DenseGeneral((2, 2, 4))(nn.relu(x)))


def test_kernels_with_several_axes_of_a_map():
    body = [tnn.Conv2d(3, 4, 3, padding=1), tnn.ReLU(), tnn.Flatten(), tnn.Linear(64, 6)]
    ends = [tnn.ReLU(), tnn.Linear(6, 16), tnn.Unflatten(1, (4, 2, 2))]
    module = tnn.Sequential(*body, *ends, tnn.ConvTranspose2d(4, 3, 2, 2))
    state, example = proof(module, PICTURES)
    inputs = np.moveaxis(PICTURES, 1, -1)
    like = abstract(General(), inputs)
    params = params_from_torch(state, like, apply=General().apply, example=example)
    outputs = np.moveaxis(General().apply(params, inputs), -1, 1)
    np.testing.assert_allclose(outputs, example[1], atol=1e-5)


def test_a_model_that_decides_by_values_is_run_as_it_is():
    state, example = proof(mlp(), ROWS)

    def apply(params, x):
        return Nested().apply(params, x if x.sum() < 1e6 else 0 * x)

    params = params_from_torch(state, abstract(Nested(), ROWS), apply=apply, example=example)
    np.testing.assert_allclose(apply(params, ROWS), example[1], atol=1e-5)


def test_trees_without_modules():
    state, example = proof(mlp(), ROWS)
    square = np.zeros((6, 6), np.float32)
    row = np.zeros(6, np.float32)
    named = {"w1": square, "b1": row, "w2": square, "b2": row}
    listed = [(square, row), (square, row)]

    def of_names(p, x):
        return jnp.tanh(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])

    def of_list(p, x):
        for weight, bias in p:
            x = jnp.tanh(x @ weight + bias)
        return x

    for like, apply in ((named, of_names), (listed, of_list)):
        params = params_from_torch(state, like, apply=apply, example=example)
        np.testing.assert_allclose(apply(params, ROWS), example[1], atol=1e-6)


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(6)(x))
        return {"policy": nn.Dense(4)(x), "value": nn.Dense(1)(x)}


class TorchHeads(tnn.Module):
    def __init__(self):
        super().__init__()
        self.policy = tnn.Linear(6, 4)
        self.value = tnn.Linear(6, 1)
        self.body = tnn.Linear(6, 6)
        self.unused = tnn.Linear(6, 2)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return {"policy": self.policy(x), "value": self.value(x)[:, 0]}


def test_outputs_in_dictionaries_and_one_of_several():
    state, example = proof(TorchHeads(), ROWS)
    like = abstract(Heads(), ROWS)

    def value(params, x):
        return Heads().apply(params, x)["value"]

    for apply in (Heads().apply, value):
        with pytest.warns(UserWarning, match=r"Left out.* unused\.weight \(2, 6\)"):
            params = params_from_torch(state, like, apply=apply, example=example)
        np.testing.assert_allclose(value(params, ROWS)[:, 0], example[1]["value"], atol=1e-6)
        params_from_torch(state, like, apply=apply, example=example, ignore=r"unused\..*")


class Packed(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.moveaxis(nn.DenseGeneral((3, 2, 4))(x), 2, 0)
        return nn.Dense(8)((jnp.tanh(q * k) * v).reshape(*x.shape[:2], 8))


class TorchPacked(tnn.Module):
    """Packs query, key and value of each head, as GPT-NeoX does."""

    def __init__(self):
        super().__init__()
        self.query_key_value = tnn.Linear(8, 24)
        self.dense = tnn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.query_key_value(x).view(*x.shape[:2], 2, 3, 4).unbind(3)
        return self.dense((torch.tanh(q * k) * v).reshape(*x.shape[:2], 8))


def test_heads_that_are_packed_in_another_order():
    x = values(2, 5, 8)
    state, example = proof(TorchPacked(), x)
    like = abstract(Packed(), x)
    pairs = torch_bridge.pair(state, like, apply=Packed().apply, example=example)
    params = params_from_torch(state, like, pairs=pairs)
    np.testing.assert_allclose(Packed().apply(params, x), example[1], atol=1e-5)
    back = torch_bridge.params_to_torch(params, state, pairs=pairs)
    assert all(torch.equal(back[name], value) for name, value in state.items())


class TorchParts(tnn.Module):
    """Packs query, key and value of 2 heads in one of several orders."""

    def __init__(self, order):
        super().__init__()
        self.qkv = tnn.Linear(8, 24)
        self.out = tnn.Linear(8, 8)
        self.order = order

    def forward(self, x):
        batch = x.shape[:2]
        if self.order == "heads":  # as in GPT-NeoX and BLOOM
            q, k, v = self.qkv(x).view(*batch, 2, 3, 4).unbind(3)
        else:
            parts = self.qkv(x).view(*batch, 3, 2, 4).unbind(2)
            q, k, v = (parts[self.order.index(name)] for name in "qkv")
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*batch, 8))


class Parts(nn.Module):
    """Has query, key and value in several kernels, or in one kernel in one of several orders."""

    order: str

    @nn.compact
    def __call__(self, x):
        heads = (*x.shape[:2], 2, 4)
        if self.order == "dense":
            q, k, v = (nn.Dense(8, name=name)(x).reshape(heads) for name in "qkv")
        elif self.order == "general":
            q, k, v = (nn.DenseGeneral((2, 4), name=name)(x) for name in "qkv")
        elif self.order == "heads":
            packed = nn.Dense(24, name="qkv")(x).reshape(*x.shape[:2], 2, 12)
            q, k, v = jnp.split(packed, 3, axis=-1)
        elif self.order == "general heads":
            q, k, v = jnp.split(nn.DenseGeneral((2, 12), name="qkv")(x), 3, axis=-1)
        else:
            packed = jnp.split(nn.Dense(24, name="qkv")(x), 3, axis=-1)
            q, k, v = (packed[self.order.index(name)].reshape(heads) for name in "qkv")
        scores = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        return nn.Dense(8, name="out")(mixed.reshape(*x.shape[:2], 8))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("heads", "dense"),
        ("heads", "general"),
        ("heads", "qkv"),
        ("heads", "general heads"),
        ("qkv", "heads"),
        ("qkv", "general heads"),
        ("vqk", "dense"),
        ("kvq", "qkv"),
        ("vkq", "heads"),
    ],
)
def test_packed_parts_in_any_order(theirs, ours):
    x = values(2, 5, 8)
    state, example = proof(TorchParts(theirs), x)
    like = abstract(Parts(ours), x)
    pairs = torch_bridge.pair(state, like, apply=Parts(ours).apply, example=example)
    params = params_from_torch(state, like, pairs=pairs)
    np.testing.assert_allclose(Parts(ours).apply(params, x), example[1], atol=1e-5)
    back = torch_bridge.params_to_torch(params, state, pairs=pairs)
    assert all(torch.equal(back[name], value) for name, value in state.items())


class TorchGated(tnn.Module):
    """Has the gate in the second half of its outputs, as GEGLU in diffusers."""

    def __init__(self, width):
        super().__init__()
        self.up = tnn.Linear(width, 16)
        self.down = tnn.Linear(8, width)

    def forward(self, x):
        value, gate = self.up(x).chunk(2, dim=-1)
        return self.down(value * torch.tanh(gate))


class Gated(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        gate, value = jnp.split(nn.Dense(16, name="up")(x), 2, axis=-1)
        return nn.Dense(self.width, name="down")(jnp.tanh(gate) * value)


def test_gate_and_value_in_the_other_order():
    state, example = proof(TorchGated(6), ROWS)
    like = abstract(Gated(6), ROWS)
    pairs = torch_bridge.pair(state, like, apply=Gated(6).apply, example=example)
    params = params_from_torch(state, like, pairs=pairs)
    bias = state["up.bias"].numpy()
    np.testing.assert_array_equal(params["params"]["up"]["bias"], [*bias[8:], *bias[:8]])
    back = torch_bridge.params_to_torch(params, state, pairs=pairs)
    assert all(torch.equal(back[name], value) for name, value in state.items())


class TorchDeep(tnn.Module):
    def __init__(self):
        super().__init__()
        mixers = (TorchParts("heads") for _ in range(3))
        self.mixers = tnn.ModuleList(mixers)
        self.gates = tnn.ModuleList(TorchGated(8) for _ in range(3))

    def forward(self, x):
        for mixer, gate in zip(self.mixers, self.gates, strict=True):
            x = x + mixer(x)
            x = x + gate(x)
        return x


class Deep(nn.Module):
    order: str

    @nn.compact
    def __call__(self, x):
        for place in range(3):
            x = x + Parts(self.order, name=f"mixers_{place}")(x)
            x = x + Gated(8, name=f"gates_{place}")(x)
        return x


@pytest.mark.parametrize("ours", ["dense", "general", "qkv"])
def test_packed_rows_of_many_layers(ours):
    x = values(2, 5, 8)
    state, example = proof(TorchDeep(), x)
    params = params_from_torch(
        state, abstract(Deep(ours), x), apply=Deep(ours).apply, example=example
    )
    allowed = 1e-5 * np.abs(example[1]).max()
    np.testing.assert_allclose(Deep(ours).apply(params, x), example[1], atol=allowed)


class TorchGrouped(tnn.Module):
    """Packs 4 heads of queries, of which 2 share a key and a value: group by group, as Falcon does,
    or all queries before all keys and values."""

    def __init__(self, by_group):
        super().__init__()
        self.qkv = tnn.Linear(8, 32)
        self.out = tnn.Linear(16, 8)
        self.by_group = by_group

    def forward(self, x):
        batch = x.shape[:2]
        if self.by_group:
            q, k, v = self.qkv(x).view(*batch, 2, 4, 4).split((2, 1, 1), dim=3)
        else:
            q, k, v = self.qkv(x).split((16, 8, 8), dim=-1)
        q = q.reshape(*batch, 2, 2, 4)
        k = k.reshape(*batch, 2, 4)
        v = v.reshape(*batch, 2, 4)
        scores = torch.einsum("bqghd,bkgd->bghqk", q, k).softmax(-1)
        return self.out(torch.einsum("bghqk,bkgd->bqghd", scores, v).reshape(*batch, 16))


class Grouped(nn.Module):
    """Has query, key and value in several kernels, or in one, by group or one after the other."""

    order: str

    @nn.compact
    def __call__(self, x):
        batch = x.shape[:2]
        if self.order == "dense":
            q = nn.Dense(16, name="q")(x)
            k = nn.Dense(8, name="k")(x)
            v = nn.Dense(8, name="v")(x)
        elif self.order == "by group":
            packed = nn.Dense(32, name="qkv")(x).reshape(*batch, 2, 16)
            q, k, v = jnp.split(packed, (8, 12), axis=-1)
        else:
            packed = nn.Dense(32, name="qkv")(x)
            q = packed[..., :16]
            k = packed[..., 16:24]
            v = packed[..., 24:]
        q = q.reshape(*batch, 2, 2, 4)
        k = k.reshape(*batch, 2, 4)
        v = v.reshape(*batch, 2, 4)
        scores = nn.softmax(jnp.einsum("bqghd,bkgd->bghqk", q, k))
        mixed = jnp.einsum("bghqk,bkgd->bqghd", scores, v)
        return nn.Dense(8, name="out")(mixed.reshape(*batch, 16))


def found_by_trying(module, model, *inputs):
    """Asserts that an example finds the order of the rows, and that the way back is exact."""
    state, example = proof(module, *inputs)
    like = abstract(model, *inputs)
    pairs = torch_bridge.pair(state, like, apply=model.apply, example=example)
    params = params_from_torch(state, like, pairs=pairs)
    np.testing.assert_allclose(model.apply(params, *inputs), example[1], atol=1e-5)
    back = torch_bridge.params_to_torch(params, state, pairs=pairs)
    assert all(torch.equal(back[name], value) for name, value in state.items())


@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize("ours", ["dense", "by group", "in turn"])
def test_heads_that_share_a_key_and_a_value(by_group, ours):
    found_by_trying(TorchGrouped(by_group), Grouped(ours), values(2, 5, 8))


class TorchCell(tnn.Module):
    def __init__(self):
        super().__init__()
        self.gates = tnn.Linear(6, 16)

    def forward(self, x):
        i, f, g, o = self.gates(x).chunk(4, dim=-1)
        return o.sigmoid() * torch.tanh(f.sigmoid() + i.sigmoid() * torch.tanh(g))


class Cell(nn.Module):
    order: str

    @nn.compact
    def __call__(self, x):
        parts = jnp.split(nn.Dense(16, name="gates")(x), 4, axis=-1)
        i, f, g, o = (parts[self.order.index(name)] for name in "ifgo")
        return nn.sigmoid(o) * jnp.tanh(nn.sigmoid(f) + nn.sigmoid(i) * jnp.tanh(g))


@pytest.mark.parametrize("order", ["iogf", "gifo", "ofig"])
def test_four_gates_in_any_order(order):
    found_by_trying(TorchCell(), Cell(order), ROWS)


class TorchMixer(tnn.Module):
    """Packs the inputs of a state-space layer in the order z, x, B, C, dt, as Mamba-2 does."""

    def __init__(self):
        super().__init__()
        self.in_proj = tnn.Linear(6, 8 + 8 + 4 + 4 + 2)

    def forward(self, x):
        z, x, b, c, dt = self.in_proj(x).split((8, 8, 4, 4, 2), dim=-1)
        mixed = torch.tanh(x) * (b * c.sigmoid()).sum(-1, keepdim=True)
        return mixed * z.sigmoid() * dt.sum(-1, keepdim=True)


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        packed = nn.Dense(26, name="in_proj")(x)
        x, z, b, c, dt = jnp.split(packed, (8, 16, 20, 24), axis=-1)
        mixed = jnp.tanh(x) * (b * nn.sigmoid(c)).sum(-1, keepdims=True)
        return mixed * nn.sigmoid(z) * dt.sum(-1, keepdims=True)


def test_two_of_five_unequal_parts_exchanged():
    found_by_trying(TorchMixer(), Mixer(), ROWS)


class TorchReader(tnn.Module):
    """Packs key and value, as Perceiver does, and has two layers."""

    def __init__(self):
        super().__init__()
        self.queries = tnn.ModuleList(tnn.Linear(8, 8) for _ in range(2))
        self.kv = tnn.ModuleList(tnn.Linear(8, 16) for _ in range(2))

    def forward(self, x):
        for query, kv in zip(self.queries, self.kv, strict=True):
            q = query(x).view(*x.shape[:2], 2, 4)
            k, v = kv(x).view(*x.shape[:2], 2, 2, 4).unbind(2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
            x = x + torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2)
        return x


class Reader(nn.Module):
    @nn.compact
    def __call__(self, x):
        heads = (*x.shape[:2], 2, 4)
        for _ in range(2):
            q = nn.Dense(8)(x).reshape(heads)
            v, k = jnp.split(nn.Dense(16)(x), 2, axis=-1)
            scores = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k.reshape(heads)))
            x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v.reshape(heads)).reshape(x.shape)
        return x


def test_key_and_value_in_the_other_order_beside_a_query_of_two_heads():
    x = values(2, 5, 8)
    state, example = proof(TorchReader(), x)
    like = abstract(Reader(), x)
    params = params_from_torch(state, like, apply=Reader().apply, example=example)
    np.testing.assert_allclose(Reader().apply(params, x), example[1], atol=1e-4)


class TorchPixels(tnn.Module):
    """Packs query, key and value of each head in a convolution, as guided diffusion does."""

    def __init__(self):
        super().__init__()
        self.qkv = tnn.Conv2d(8, 24, 1)
        self.out = tnn.Conv2d(8, 8, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(len(x), 2, 12, -1).chunk(3, dim=2)
        scores = torch.einsum("bhdq,bhdk->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bhdk->bhdq", scores, v).reshape(x.shape))


class Pixels(nn.Module):
    packed: bool

    @nn.compact
    def __call__(self, x):
        if self.packed:
            parts = jnp.split(nn.Conv(24, (1, 1))(x), 3, axis=-1)
        else:
            parts = [nn.Conv(8, (1, 1))(x) for _ in range(3)]
        q, k, v = (part.reshape(len(x), -1, 2, 4) for part in parts)
        scores = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return nn.Conv(8, (1, 1))(jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape))


@pytest.mark.parametrize("packed", [True, False])
def test_packed_rows_of_a_convolution(packed):
    x = values(2, 8, 3, 4)
    ours = np.moveaxis(x, 1, -1)
    state, example = proof(TorchPixels(), x)
    model = Pixels(packed)
    like = abstract(model, ours)
    pairs = torch_bridge.pair(state, like, apply=model.apply, example=example)
    params = params_from_torch(state, like, pairs=pairs)
    outputs = np.moveaxis(model.apply(params, ours), -1, 1)
    np.testing.assert_allclose(outputs, example[1], atol=1e-5)
    back = torch_bridge.params_to_torch(params, state, pairs=pairs)
    assert all(torch.equal(back[name], value) for name, value in state.items())


@pytest.mark.parametrize(("theirs", "ours"), [("heads", "dense"), ("kvq", "qkv")])
def test_a_sequence_of_one_value_does_not_tell_query_from_key(theirs, ours):
    x = values(2, 1, 8)
    state, example = proof(TorchParts(theirs), x)
    with pytest.raises(CheckpointMismatch, match="does not tell which is which") as error:
        params_from_torch(state, abstract(Parts(ours), x), apply=Parts(ours).apply, example=example)
    assert error.value.ambiguous[0].startswith("qkv")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounds_to_16_bits_is_compared_in_its_units(dtype):
    module = randomize(mlp()).to(dtype)
    x = torch.from_numpy(ROWS).to(dtype)
    example = ((x,), module(x).detach())
    like = abstract(Nested(), ROWS)
    pairs = torch_bridge.pair(module.state_dict(), like, apply=Nested().apply, example=example)
    assert {p.torch_name: p.path[0] for p in pairs}["0.weight"] == "Dense_1"


class TwoHeads(nn.Module):
    width: int = 5
    eps: float = 1e-5
    tanh: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3, 3), padding="VALID", name="conv")(x)
        x = x.reshape(len(x), -1)
        x = nn.Dense(5, name="a")(x) + nn.Dense(5, name="b")(x)
        x = nn.gelu(nn.LayerNorm(self.eps, name="norm")(x), approximate=self.tanh)
        return nn.Dense(2, name="out")(nn.Dense(self.width, name="last")(x))


class TorchTwoHeads(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv = tnn.Conv2d(2, 3, 3)
        self.a = tnn.Linear(48, 5)
        self.b = tnn.Linear(48, 5)
        self.norm = tnn.LayerNorm(5)
        self.last = tnn.Linear(5, 5)
        self.out = tnn.Linear(5, 2)

    def forward(self, x):
        x = self.conv(x).flatten(1)
        x = tnn.functional.gelu(self.norm(self.a(x) + self.b(x)))
        return self.out(self.last(x))


MAPS = values(2, 2, 6, 6)


def proved(model, **options):
    state, example = proof(TorchTwoHeads(), MAPS)
    like = abstract(model, np.moveaxis(MAPS, 1, -1))
    return params_from_torch(state, like, apply=model.apply, example=example, **options)


def test_a_map_that_is_said_leaves_the_others_to_the_example():
    expected = proved(TwoHeads())
    for said in ({"flatten": {"a": (3, 4, 4)}}, {"flatten": {"b": (3, 4, 4)}}):
        jax.tree.map(np.testing.assert_array_equal, proved(TwoHeads(), **said), expected)
    for wrong in ({}, {"a": (3, 4, 4), "b": None}):
        with pytest.raises(CheckpointMismatch, match="off"):
            proved(TwoHeads(), flatten=wrong)


@pytest.mark.parametrize("other", [{"eps": 1e-2}, {"tanh": True}])
def test_a_slight_difference_is_said_to_be_of_a_formula(other):
    with pytest.raises(CheckpointMismatch, match="often another formula: look at the eps and"):
        proved(TwoHeads(**other))


class Normed(nn.Module):
    eps: float = 1e-5

    @nn.compact
    def __call__(self, ids):
        x = 4 * nn.Embed(11, 8, name="embed")(ids)
        return nn.Dense(8, name="out")(nn.LayerNorm(self.eps, name="norm")(x))


class TorchNormed(tnn.Module):
    def __init__(self):
        super().__init__()
        self.embed = tnn.Embedding(11, 8)
        self.norm = tnn.LayerNorm(8)
        self.out = tnn.Linear(8, 8)

    def forward(self, ids):
        return self.out(self.norm(4 * self.embed(ids)))


IDS = np.arange(10).reshape(2, 5)


def test_outputs_may_differ_by_ten_times_what_one_rounding_moves_them():
    state, example = proof(TorchNormed(), IDS)
    arrays = {name: value.numpy() for name, value in state.items()}
    checkpoint = Checkpoint(arrays, example=example)
    like = abstract(Normed(), IDS)
    run = torch_bridge.to_flax(checkpoint, like, apply=Normed().apply)
    assert run.difference <= 10 * run.control < 1e-5
    wrong = Normed(1e-6)
    off = np.asarray(wrong.apply(run.params, IDS)) - example[1]
    assert np.abs(off).max() < 1e-5 * np.abs(example[1]).max()
    with pytest.raises(
        CheckpointMismatch, match=r"e-06 of the largest output off, where .*e-06 is"
    ):
        torch_bridge.to_flax(checkpoint, like, apply=wrong.apply)
    back = {"apply": wrong.apply, "module": TorchNormed(), "pairs": run.pairs}
    with pytest.raises(CheckpointMismatch, match=r"gives other outputs .*e-06 of the largest"):
        torch_bridge.to_torch(run.params, (), checkpoint, **back)


def test_a_sum_of_many_terms_is_no_other_model():
    """XLA adds up the products of one row one after the other, which moves more than a rounding."""
    inputs = 25_088  # as VGG's first Linear, with an example of one picture
    x = np.abs(values(1, inputs))
    layer = tnn.Linear(inputs, 64)
    torch.manual_seed(0)
    tnn.init.uniform_(layer.weight)
    outputs = layer(torch.from_numpy(x)).detach().numpy()
    arrays = {name: value.detach().numpy() for name, value in layer.state_dict().items()}
    like = {"kernel": np.zeros((inputs, 64), np.float32), "bias": np.zeros(64, np.float32)}
    run = torch_bridge.to_flax(
        Checkpoint(arrays, example=((x,), outputs)),
        like,
        apply=lambda params, x: nn.Dense(64).apply({"params": params}, x),
    )
    assert run.difference <= 10 * run.control


def test_another_width_is_said_first():
    said = r"a width differs: .* axis of \[7\], and no tensor of torch has an axis of \[11\]"
    state = {f"{name}.weight": np.ones((7, 3)) for name in "xy"}
    like = {name: {"kernel": np.zeros((3, 11))} for name in "ab"}
    with pytest.raises(CheckpointMismatch, match=said):
        torch_bridge.pair(state, like)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_weights_that_torch_makes_of_others_are_named_beside_an_example(name):
    wrap = getattr(tnn.utils.parametrizations, name)
    state, example = proof(tnn.Sequential(wrap(tnn.Linear(6, 6))), ROWS)
    model = nn.Dense(6)
    with pytest.raises(CheckpointMismatch, match=f"^{name} .*remove_parametrizations.*off"):
        params_from_torch(state, abstract(model, ROWS), apply=model.apply, example=example)


def test_a_model_of_two_hundred_layers():
    weights = values(200, 4, 4) / 2
    like = {f"layers_{place}": {"kernel": weight} for place, weight in enumerate(weights)}
    state = {f"layers.{place}.weight": weight for place, weight in enumerate(weights)}
    x = values(3, 4)

    def apply(params, x):
        kernels = jnp.stack([params[name]["kernel"] for name in like])
        return jax.lax.scan(lambda row, kernel: (row @ kernel, None), x, kernels)[0]

    outputs = functools.reduce(lambda row, weight: row @ weight.T, weights, x)
    params = params_from_torch(state, like, apply=apply, example=((x,), outputs))
    np.testing.assert_array_equal(params["layers_199"]["kernel"].T, weights[199])


class TorchBranches(tnn.Module):
    def __init__(self):
        super().__init__()
        self.point = tnn.Conv2d(8, 4, 1)
        self.small = tnn.Sequential(tnn.Conv2d(8, 4, 1), tnn.ReLU(), tnn.Conv2d(4, 4, 3, padding=1))
        self.large = tnn.Sequential(tnn.Conv2d(8, 4, 1), tnn.ReLU(), tnn.Conv2d(4, 4, 5, padding=2))
        self.pooled = tnn.Conv2d(8, 4, 1)

    def forward(self, x):
        pooled = self.pooled(tnn.functional.max_pool2d(x, 3, 1, 1))
        return torch.cat([self.point(x), self.small(x), self.large(x), pooled], 1)


class Branches(nn.Module):
    """Calls the branches in the other order."""

    @nn.compact
    def __call__(self, x):
        pooled = nn.Conv(4, (1, 1))(nn.max_pool(x, (3, 3), padding="SAME"))
        large = nn.Conv(4, (5, 5))(nn.relu(nn.Conv(4, (1, 1))(x)))
        small = nn.Conv(4, (3, 3))(nn.relu(nn.Conv(4, (1, 1))(x)))
        point = nn.Conv(4, (1, 1))(x)
        return jnp.concatenate([point, small, large, pooled], -1)


class Inception(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(Branches()(nn.relu(nn.Conv(8, (3, 3))(x))))
        return Branches()(nn.relu(nn.Conv(8, (1, 1))(x)))


def test_alike_branches_of_alike_blocks_are_told_apart():
    module = tnn.Sequential(
        tnn.Conv2d(3, 8, 3, padding=1),
        tnn.ReLU(),
        *(TorchBranches(), tnn.ReLU(), tnn.Conv2d(16, 8, 1), tnn.ReLU(), TorchBranches()),
    )
    images = values(2, 3, 6, 6)
    state, example = proof(module, images)
    like = abstract(Inception(), np.moveaxis(images, 1, -1))
    params = params_from_torch(state, like, apply=Inception().apply, example=example)["params"]
    kernel = params["Branches_0"]["Conv_5"]["kernel"][0, 0]
    np.testing.assert_array_equal(kernel.T, state["2.point.weight"][:, :, 0, 0])
