"""One example through both models: it finds out, proves or refuses."""

from functools import partial, reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn as tnn

import torch_bridge
from tests.helpers.bridge import kernels, randomize, values
from tests.helpers.control import apart, assert_no_further
from tests.helpers.leaves import equal
from tests.helpers.two_frameworks import NEVER, FlaxModel, TorchModel, attend
from tests.helpers.zoo.images import halved
from torch_bridge import Checkpoint, CheckpointMismatch, params_from_torch


def proof(module, *inputs):
    """Returns the state dict of a module with values of its own, and an example of it."""
    tensors = [torch.from_numpy(x) for x in inputs]
    torch.manual_seed(0)
    module.eval()(*tensors)  # at the first call a TorchModel makes its layers
    outputs = randomize(module)(*tensors)
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
TWO = (0, 1)


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
            assert_array_equal(back["state_dict"][name], value)
    with pytest.warns(UserWarning, match="Assumed, because neither names nor shapes show it"):
        run = torch_bridge.to_flax(checkpoint, like, plain=True)
    assert run.difference is None


class Wrong(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(6, name="b")(nn.relu(nn.Dense(6, name="a")(x))))


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({"0": "nowhere"}, "the rule '0' sends 0 to nowhere"),
        ({"0|2": "params/Dense_0"}, "sends 2 to Dense_0, where an earlier rule sends another"),
        ({r"0\.weight": "params/Dense_0/bias"}, "0.weight (6, 6) <-> Dense_0/bias (6,)"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_beside_an_example(rules, line):
    state, example = proof(mlp(), ROWS)
    with pytest.raises(CheckpointMismatch, match="do not correspond") as error:
        params_from_torch(
            state, abstract(Nested(), ROWS), apply=Nested().apply, example=example, rules=rules
        )
    assert line in str(error.value)


def test_pairs_that_do_not_give_the_outputs_are_refused():
    state, example = proof(mlp(), ROWS)
    checkpoint = Checkpoint({name: value.numpy() for name, value in state.items()})
    like = abstract(Nested(), ROWS)
    right = torch_bridge.pair(state, like, {"0": "params/Dense_1"}, conv1d="")
    wrong = torch_bridge.pair(state, like, {"0": "params/Dense_0"}, conv1d="")
    proofs = {"apply": Nested().apply, "example": example}
    run = torch_bridge.to_flax(checkpoint, like, pairs=right, **proofs)
    assert run.difference <= 10 * run.control
    with pytest.raises(CheckpointMismatch, match="does not give torch's outputs with these `pair"):
        torch_bridge.to_flax(checkpoint, like, pairs=wrong, **proofs)
    with pytest.raises(CheckpointMismatch, match="does not give torch's outputs with these `pair"):
        params_from_torch(state, like, pairs=wrong, **proofs)
    with pytest.raises(ValueError, match="`example` is missing"):
        params_from_torch(state, like, pairs=right, apply=Nested().apply)
    saved = Checkpoint(checkpoint.model, example=example)
    with pytest.raises(CheckpointMismatch, match="does not give torch's outputs with these `pair"):
        torch_bridge.to_torch(run.params, (), saved, pairs=wrong, apply=Nested().apply)
    # Without an example in the file nothing is run.
    torch_bridge.to_torch(run.params, (), checkpoint, pairs=right, apply=Nested().apply)


def summed(n, x):
    return n.dense(x, "left", 6) + n.dense(x, "right", 6)


def test_what_does_not_give_the_outputs_is_refused_with_how_far_it_is_off():
    state, example = proof(mlp(), ROWS)
    with pytest.raises(
        CheckpointMismatch, match=r"after \d+ tries the nearest are .* off"
    ) as error:
        params_from_torch(state, abstract(Wrong(), ROWS), apply=Wrong().apply, example=example)
    assert any("or the other way round" in line for line in error.value.ambiguous)


def test_what_an_example_cannot_tell_is_refused_until_it_is_said():
    state, example = proof(TorchModel(summed), ROWS)
    model = FlaxModel(summed, names={})
    like = abstract(model, ROWS)
    with pytest.raises(CheckpointMismatch, match="does not tell which is which") as error:
        params_from_torch(state, like, apply=model.apply, example=example)
    assert error.value.ambiguous == (
        "left is Dense_0, and right is Dense_1, or the other way round",
    )
    said = {"rules": {"left": "Dense_1", "right": "Dense_0"}}
    params = params_from_torch(state, like, apply=model.apply, example=example, **said)
    assert_array_equal(params["params"]["Dense_1"]["kernel"].T, state["left.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"apply": Nested().apply}, "`example` is missing"),
        ({"example": ((ROWS,), ROWS)}, "`apply` is missing"),
        ({"apply": Nested().apply, "example": 3}, r"or \(inputs, outputs\) of"),
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


def pooled(n, x):
    """Has a hidden layer of as many outputs as the flattened map has values."""
    x = n.flatten(halved(n.max, n.relu(n.conv(x, "conv", 8, 3, p=1))))
    return n.dense(n.relu(n.dense(x, "fc1", 32)), "fc2", 10)


ALL_SAID = {"flatten": {"fc1": (8, 2, 2)}, "unflatten": {}}


@pytest.mark.parametrize("said", [{}, {"flatten": {"fc1": (8, 2, 2)}}, {"unflatten": {}}, ALL_SAID])
@pytest.mark.parametrize("names", [None, {"conv": "conv"}])
def test_hidden_units_are_not_permuted_beside_a_flattened_map(names, said):
    state, example = proof(TorchModel(pooled, channels=4), PICTURES)
    model = FlaxModel(pooled, names=names)
    like = abstract(model, np.moveaxis(PICTURES, 1, -1))
    params = params_from_torch(state, like, apply=model.apply, example=example, **said)["params"]
    first, second = ("Dense_0", "Dense_1") if names else ("fc1", "fc2")
    assert_array_equal(params[first]["bias"], state["fc1.bias"])
    assert_array_equal(params[second]["kernel"].T, state["fc2.weight"])


def test_an_answer_that_names_no_map_is_not_searched_around():
    state, example = proof(TorchModel(pooled, channels=4), PICTURES)
    model = FlaxModel(pooled)
    like = abstract(model, np.moveaxis(PICTURES, 1, -1))
    with pytest.raises(CheckpointMismatch, match="does not give torch's outputs"):
        params_from_torch(state, like, apply=model.apply, example=example, flatten={})


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
        assert_allclose(outputs, example[1], atol=1e-5)


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
    assert_allclose(outputs, example[1], atol=1e-5)


def test_a_model_that_decides_by_values_is_run_as_it_is():
    state, example = proof(mlp(), ROWS)

    def apply(params, x):
        return Nested().apply(params, x if x.sum() < 1e6 else 0 * x)

    params = params_from_torch(state, abstract(Nested(), ROWS), apply=apply, example=example)
    assert_allclose(apply(params, ROWS), example[1], atol=1e-5)


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
        assert_allclose(apply(params, ROWS), example[1], atol=1e-6)


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
        with pytest.warns(UserWarning, match=r"Left out.* unused\.weight \(2, 6\)") as warned:
            params = params_from_torch(state, like, apply=apply, example=example)
        assert warned[0].filename == __file__
        assert_allclose(value(params, ROWS)[:, 0], example[1]["value"], atol=1e-6)
        params_from_torch(state, like, apply=apply, example=example, ignore=r"unused\..*")


# One function of layers (two_frameworks.py) makes the model in torch and in Flax, with the rows of
# packed layers in different orders.


def found_by_trying(theirs, model, *inputs, channels=NEVER, declared=""):
    """Finds the order of the rows with an example, and asserts that the way back is exact.

    Returns the parameters in Flax. Inputs with `channels` axes are maps.
    """
    state, example = proof(TorchModel(theirs, declared, channels), *inputs)
    ours = [np.moveaxis(x, 1, -1) if x.ndim == channels else x for x in inputs]
    like = abstract(model, *ours)
    pairs = torch_bridge.pair(state, like, apply=model.apply, example=example)
    params = params_from_torch(state, like, pairs=pairs)
    outputs = np.asarray(example[1])
    if channels != NEVER:
        outputs = np.moveaxis(outputs, 1, -1)
    control = model.apply(apart(params), *ours)
    assert_no_further(outputs, model.apply(params, *ours), control)
    back = torch_bridge.params_to_torch(params, state, pairs=pairs)
    assert all(torch.equal(back[name], value) for name, value in state.items())
    return params["params"]


def in_parts(rows, order):
    """Takes query, key and value of 2 heads from packed rows: head by head, or in an order."""
    if order == "heads":  # as in GPT-NeoX and BLOOM
        heads = rows.reshape(*rows.shape[:-1], 2, 3, 4)
        return [heads[..., part, :].reshape(*rows.shape[:-1], 8) for part in range(3)]
    parts = rows.reshape(*rows.shape[:-1], 3, 8)
    return [parts[..., order.index(name), :] for name in "qkv"]


def attention(n, x, order):
    """Has query, key and value in layers of their own, or in one layer in one of several orders."""
    if order == "dense":
        q, k, v = (n.dense(x, name, 8) for name in "qkv")
    elif order == "general":
        q, k, v = (n.general(x, name, 2, 4).reshape(x.shape) for name in "qkv")
    elif order == "general heads":
        rows = n.general(x, "qkv", 2, 12)
        q, k, v = in_parts(rows.reshape(*x.shape[:2], 24), "heads")
    elif order == "one and two":
        rows = n.dense(x, "qkv", 24)
        rest = rows[..., 8:]
        q, k, v = rows[..., :8], rest[..., :8], rest[..., 8:]
    elif order == "general parts":
        rows = n.general(x, "qkv", 3, 2, 4)
        q, k, v = in_parts(rows.reshape(*x.shape[:2], 24), "qkv")
    else:
        q, k, v = in_parts(n.dense(x, "qkv", 24), order)
    return n.dense(attend(n, q, k, v), "out", 8)


SENTENCE = values(2, 5, 8)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("heads", "dense"),
        ("heads", "general"),
        ("heads", "qkv"),
        ("heads", "general heads"),
        ("heads", "general parts"),
        ("heads", "one and two"),
        ("qkv", "heads"),
        ("qkv", "general heads"),
        ("vqk", "dense"),
        ("kvq", "qkv"),
        ("vkq", "heads"),
    ],
)
def test_packed_parts_in_any_order(theirs, ours):
    model = FlaxModel(partial(attention, order=ours))
    found_by_trying(partial(attention, order=theirs), model, SENTENCE)


def gated(n, x, order):
    """Has value and gate in the halves of its outputs, as GEGLU in diffusers."""
    halves = n.dense(x, "up", 16).reshape(*x.shape[:-1], 2, 8)
    value, gate = (halves[..., order.index(name), :] for name in "vg")
    return n.dense(value * n.tanh(gate), "down", x.shape[-1])


def test_gate_and_value_in_the_other_order():
    theirs = partial(gated, order="vg")
    params = found_by_trying(theirs, FlaxModel(partial(gated, order="gv")), ROWS)
    state, _ = proof(TorchModel(theirs), ROWS)
    bias = state["up.bias"].numpy()
    assert_array_equal(params["up"]["bias"], [*bias[8:], *bias[:8]])


def deep(n, x, parts, halves):
    for place in range(3):
        x = x + n.block(f"mixers.{place}", partial(attention, order=parts), x)
        x = x + n.block(f"gates.{place}", partial(gated, order=halves), x)
    return x


@pytest.mark.parametrize("ours", ["dense", "general", "qkv"])
def test_packed_rows_of_many_layers(ours):
    theirs = partial(deep, parts="heads", halves="vg")
    found_by_trying(theirs, FlaxModel(partial(deep, parts=ours, halves="gv")), SENTENCE)


def shared_keys(n, x, order):
    """Has 4 heads of queries, of which 2 share a key and a value.

    They are in several layers, or in one: group by group, as in Falcon, or one after the other.
    """
    batch = x.shape[:2]
    if order == "dense":
        q = n.dense(x, "q", 16)
        k = n.dense(x, "k", 8)
        v = n.dense(x, "v", 8)
    elif order == "by group":
        groups = n.dense(x, "qkv", 32).reshape(*batch, 2, 4, 4)
        q = groups[..., :2, :]
        k = groups[..., 2, :]
        v = groups[..., 3, :]
    else:
        packed = n.dense(x, "qkv", 32)
        q = packed[..., :16]
        k = packed[..., 16:24]
        v = packed[..., 24:]
    q = q.reshape(*batch, 2, 2, 4)
    k = k.reshape(*batch, 2, 4)
    v = v.reshape(*batch, 2, 4)
    scores = n.softmax(n.einsum("bqghd,bkgd->bghqk", q, k), -1)
    mixed = n.einsum("bghqk,bkgd->bqghd", scores, v)
    return n.dense(mixed.reshape(*batch, 16), "out", 8)


@pytest.mark.parametrize("theirs", ["by group", "in turn"])
@pytest.mark.parametrize("ours", ["dense", "by group", "in turn"])
def test_heads_that_share_a_key_and_a_value(theirs, ours):
    model = FlaxModel(partial(shared_keys, order=ours))
    found_by_trying(partial(shared_keys, order=theirs), model, SENTENCE)


def grouped_queries(n, x, packed):
    """Attends in two blocks whose queries are as wide as their outputs, with a packed layer each.

    One half of the packed rows fits where queries and outputs fit.
    """
    for k in range(2):
        if packed:
            rows = n.dense(x, f"{k}.qkv", 32)
            q, k_, v = rows[..., :16], rows[..., 16:24], rows[..., 24:]
        else:
            q = n.dense(x, f"{k}.q", 16)
            k_ = n.dense(x, f"{k}.k", 8)
            v = n.dense(x, f"{k}.v", 8)
        scores = n.softmax(n.einsum("bqgd,bkd->bgqk", q.reshape(*q.shape[:2], 2, 8), k_), -1)
        mixed = n.einsum("bgqk,bkd->bqgd", scores, v)
        x = x + n.dense(mixed.reshape(*x.shape), f"{k}.out", 16)
    return x


def test_rows_are_divided_so_that_all_layers_have_a_partner():
    model = FlaxModel(partial(grouped_queries, packed=False), names={})
    found_by_trying(partial(grouped_queries, packed=True), model, values(2, 5, 16))


def cell(n, x, order):
    gates = n.dense(x, "gates", 16).reshape(*x.shape[:-1], 4, 4)
    i, f, g, o = (gates[..., order.index(name), :] for name in "ifgo")
    return n.sigmoid(o) * n.tanh(n.sigmoid(f) + n.sigmoid(i) * n.tanh(g))


@pytest.mark.parametrize("order", ["iogf", "gifo", "ofig"])
def test_four_gates_in_any_order(order):
    found_by_trying(partial(cell, order="ifgo"), FlaxModel(partial(cell, order=order)), ROWS)


def mixer(n, x, order):
    """Packs the inputs of a state-space layer, which Mamba-2 has in the order z, x, B, C, dt."""
    widths = {"z": 8, "x": 8, "b": 4, "c": 4, "d": 2}
    packed = n.dense(x, "in_proj", 26)
    parts = {}
    start = 0
    for name in order:
        parts[name] = packed[..., start : start + widths[name]]
        start += widths[name]
    mixed = n.tanh(parts["x"]) * (parts["b"] * n.sigmoid(parts["c"])).sum(-1, keepdims=True)
    return mixed * n.sigmoid(parts["z"]) * parts["d"].sum(-1, keepdims=True)


def test_two_of_five_unequal_parts_exchanged():
    found_by_trying(partial(mixer, order="zxbcd"), FlaxModel(partial(mixer, order="xzbcd")), ROWS)


def reader(n, x, order):
    """Packs key and value, as Perceiver does, in two layers."""
    for layer in range(2):
        q = n.dense(x, f"queries.{layer}", 8)
        halves = n.dense(x, f"kv.{layer}", 16).reshape(*x.shape[:2], 2, 8)
        k, v = (halves[..., order.index(name), :] for name in "kv")
        x = x + attend(n, q, k, v)
    return x


def test_key_and_value_in_the_other_order_beside_a_query_of_two_heads():
    model = FlaxModel(partial(reader, order="vk"), names={})
    found_by_trying(partial(reader, order="kv"), model, SENTENCE)


def pixels(n, x, order):
    """Attends with convolutions, packed or not; guided diffusion packs them head by head."""
    if order == "dense":
        parts = [n.conv(x, name, 8, 1) for name in "qkv"]
    else:
        parts = in_parts(n.conv(x, "qkv", 24, 1), order)
    q, k, v = (part.reshape(len(x), -1, 8) for part in parts)
    return n.conv(attend(n, q, k, v).reshape(x.shape), "out", 8, 1)


@pytest.mark.parametrize("ours", ["qkv", "dense"])
def test_packed_rows_of_a_convolution(ours):
    model = FlaxModel(partial(pixels, order=ours), names={})
    found_by_trying(partial(pixels, order="heads"), model, values(2, 8, 3, 4), channels=4)


@pytest.mark.parametrize(("theirs", "ours"), [("heads", "dense"), ("kvq", "qkv")])
def test_a_sequence_of_one_value_does_not_tell_query_from_key(theirs, ours):
    x = values(2, 1, 8)
    state, example = proof(TorchModel(partial(attention, order=theirs)), x)
    model = FlaxModel(partial(attention, order=ours))
    with pytest.raises(CheckpointMismatch, match="does not tell which is which") as error:
        params_from_torch(state, abstract(model, x), apply=model.apply, example=example)
    assert error.value.ambiguous[0].startswith("qkv")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounds_to_16_bits_is_compared_in_its_units(dtype):
    module = randomize(mlp()).to(dtype)
    x = torch.from_numpy(ROWS).to(dtype)
    example = ((x,), module(x).detach())
    like = abstract(Nested(), ROWS)
    pairs = torch_bridge.pair(module.state_dict(), like, apply=Nested().apply, example=example)
    assert {p.torch_name: p.path[0] for p in pairs}["0.weight"] == "Dense_1"


def two_readers(n, x, eps=1e-5, gelu=None):
    """Has two layers of one flattened map."""
    x = n.flatten(n.conv(x, "conv", 3, 3))
    x = n.ln(n.dense(x, "a", 5) + n.dense(x, "b", 5), "norm", eps)
    x = (gelu or n.gelu)(x)
    return n.dense(n.dense(x, "last", 5), "out", 2)


MAPS = values(2, 2, 6, 6)


def proved(body=two_readers, **options):
    state, example = proof(TorchModel(two_readers, channels=4), MAPS)
    model = FlaxModel(body)
    like = abstract(model, np.moveaxis(MAPS, 1, -1))
    return params_from_torch(state, like, apply=model.apply, example=example, **options)


def test_a_map_that_is_said_leaves_the_others_to_the_example():
    expected = proved()
    for said in ({"a": (3, 4, 4)}, {"b": (3, 4, 4)}):
        equal(proved(flatten=said), expected)
    for wrong in ({}, {"a": (3, 4, 4), "b": None}):
        with pytest.raises(CheckpointMismatch, match="off"):
            proved(flatten=wrong)


@pytest.mark.parametrize("other", [{"eps": 1e-2}, {"gelu": nn.gelu}])  # flax's is by tanh
def test_a_slight_difference_is_said_to_be_of_a_formula(other):
    with pytest.raises(CheckpointMismatch, match="often another formula: look at the eps and"):
        proved(partial(two_readers, **other))


def normed(n, ids, eps=1e-5):
    x = 4 * n.embed(ids, "embed", 11, 8)
    return n.dense(n.ln(x, "norm", eps), "out", 8)


IDS = np.arange(10).reshape(2, 5)


def test_outputs_may_differ_by_ten_times_what_one_rounding_moves_them():
    module = TorchModel(normed)
    state, example = proof(module, IDS)
    arrays = {name: value.numpy() for name, value in state.items()}
    checkpoint = Checkpoint(arrays, example=example)
    right = FlaxModel(normed)
    like = abstract(right, IDS)
    run = torch_bridge.to_flax(checkpoint, like, apply=right.apply)
    assert run.difference <= 10 * run.control < 1e-5
    wrong = FlaxModel(partial(normed, eps=1e-6))
    off = np.asarray(wrong.apply(run.params, IDS)) - example[1]
    assert np.abs(off).max() < 1e-5 * np.abs(example[1]).max()
    with pytest.raises(
        CheckpointMismatch, match=r"e-06 of the largest output off, where .*e-06 is"
    ):
        torch_bridge.to_flax(checkpoint, like, apply=wrong.apply)
    back = {"apply": wrong.apply, "module": module, "pairs": run.pairs}
    with pytest.raises(CheckpointMismatch, match=r"outputs with these `pairs`: .*e-06 of the larg"):
        torch_bridge.to_torch(run.params, (), checkpoint, **back)


def test_a_model_that_multiplies_roundings_proves_nothing():
    kernel = values(6, 4)
    exact = np.sin(1e4 * (np.float64(ROWS) @ kernel))  # float32 rounds the angle to a thousandth
    checkpoint = Checkpoint({"weight": kernel.T}, example=((ROWS,), exact))

    def apply(params, x):
        return jnp.sin(1e4 * (x @ params["kernel"]))

    with pytest.raises(CheckpointMismatch, match=r"output off, where 1\.0e-05 is rounding"):
        torch_bridge.to_flax(checkpoint, {"kernel": np.zeros((6, 4), np.float32)}, apply=apply)


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


def test_terms_that_differ_in_an_axis_of_length_one_are_asked_for():
    one, other = values(1, 4), values(4)
    like = {"x": np.zeros(4, np.float32), "y": np.zeros((1, 4), np.float32)}
    x = values(3, 4)
    with pytest.raises(CheckpointMismatch, match="or the other way round"):
        params_from_torch(
            {"one": one, "other": other},
            like,
            apply=lambda params, x: x + params["x"] + params["y"],
            example=((x,), x + one + other),
        )


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

    outputs = reduce(lambda row, weight: row @ weight.T, weights, x)
    params = params_from_torch(state, like, apply=apply, example=((x,), outputs))
    assert_array_equal(params["layers_199"]["kernel"].T, weights[199])


def test_a_sum_behind_a_hundred_layers_does_not_tell_its_terms():
    weights = values(100, 4, 4) / 2
    ends = {f"end.{place}.weight": values(3, 4) + place for place in TWO}
    state = {f"layers.{place}.weight": weight for place, weight in enumerate(weights)} | ends
    like = kernels(x=(4, 3), y=(4, 3))
    for place in range(100):
        like[f"Dense_{place}"] = {"kernel": np.zeros((4, 4), np.float32)}
    x = values(3, 4)

    def apply(params, x):
        kernels = jnp.stack([params[f"Dense_{place}"]["kernel"] for place in range(100)])
        x, _ = jax.lax.scan(lambda row, kernel: (jnp.tanh(row @ kernel), None), x, kernels)
        return x @ params["x"]["kernel"] + x @ params["y"]["kernel"]

    hidden = reduce(lambda row, weight: np.tanh(row @ weight.T), weights, x)
    outputs = sum(hidden @ weight.T for weight in ends.values())
    with pytest.raises(CheckpointMismatch, match="does not tell which is which") as error:
        params_from_torch(state, like, apply=apply, example=((x,), outputs))
    assert error.value.ambiguous == ("end.0 is x, and end.1 is y, or the other way round",)


def test_a_refusal_names_what_has_no_place_in_flax():
    module = tnn.Sequential(tnn.Embedding(7, 4), tnn.Linear(4, 7, bias=False))
    state, example = proof(module, np.arange(6).reshape(2, 3))

    def tied(params, ids):
        return params["table"][ids] @ params["table"].T

    like = {"table": np.zeros((7, 4), np.float32)}
    with pytest.raises(CheckpointMismatch, match="has no place for 1 of torch"):
        torch_bridge.pair(state, like, apply=tied, example=example)


def rooted(n, x, bare):
    """Computes two layers that may be bare parameters in torch, and two alike that are not."""
    for k in range(2):
        if bare:
            x = n.tanh(x @ n.param(f"{k}.root", 8, 8) + n.param(f"{k}.bias", 8))
        else:
            x = n.tanh(n.dense(x, f"{k}.root", 8))
    for k in range(2):
        x = n.tanh(n.dense(x, f"last.{k}", 8))
    return n.dense(x, "head", 3)


def test_any_of_several_alike_layers_may_be_bare_parameters():
    model = FlaxModel(partial(rooted, bare=False), names={})
    found_by_trying(partial(rooted, bare=True), model, values(4, 8))


def branches(n, x, order):
    """Computes an Inception block, whose branches are called in an order."""
    outputs = {}
    for name in order:
        if name == "point":
            y = n.conv(x, name, 4, 1)
        elif name == "centred":
            y = n.conv(x - x.mean((1, 2), keepdims=True), name, 4, 1)
        else:
            size = {"small": 3, "large": 5}[name]
            y = n.relu(n.conv(x, f"{name}.0", 4, 1))
            y = n.conv(y, f"{name}.2", 4, size, p=size // 2)
        outputs[name] = y
    return n.concatenate([outputs[name] for name in BRANCHES], -1)


BRANCHES = ("point", "small", "large", "centred")


def inception(n, x, order):
    block = partial(branches, order=order)
    x = n.block("2", block, n.relu(n.conv(x, "0", 8, 3, p=1)))
    return n.block("6", block, n.relu(n.conv(n.relu(x), "4", 8, 1)))


def test_alike_branches_of_alike_blocks_are_told_apart():
    theirs = partial(inception, order=BRANCHES)
    model = FlaxModel(partial(inception, order=BRANCHES[::-1]), names={})
    images = values(2, 3, 6, 6)
    params = found_by_trying(theirs, model, images, channels=4)
    state, _ = proof(TorchModel(theirs, channels=4), images)
    kernel = params["FlaxModel_0"]["Conv_5"]["kernel"][0, 0]
    assert_array_equal(kernel.T, state["2.point.weight"][:, :, 0, 0])


def test_readings_of_untied_tensors_get_only_the_runs_that_are_left():
    """Tries readings with tied tensors first, which use up most runs, in both orders of inputs."""
    first, second, third, fourth = values(4, 3, 2)
    shapes = {"fifth": (4, 4), "sixth": (5, 5)}
    state = {"a.weight": first, "b.weight": second, "c.weight": third, "d.weight": fourth}
    state["tied.weight"] = fourth
    for name, shape in shapes.items():
        state[f"{name}.weight"] = values(*shape)
    like = kernels(w=(2, 3), x=(2, 3), y=(2, 3), z=(2, 3), **shapes)

    def apply(params, x):
        return x.sum() + sum(leaf.sum() for leaf in jax.tree.leaves(params))

    example = ((values(1, 3, 3, 3),), np.float32(0.5))
    with pytest.raises(CheckpointMismatch, match=r"after \d+ tries the nearest are"):
        params_from_torch(state, like, apply=apply, example=example)


def test_with_an_example_no_error_advises_to_pass_one():
    """Names a leaf without a tensor, and a map of another size: errors that no run mends."""
    inputs = values(2, 3)
    weight = values(4, 3)
    proofs = {
        "apply": lambda params, x: x @ params["x"]["kernel"],
        "example": ((inputs,), inputs @ weight.T),
    }
    two = kernels(x=(3, 4), y=(3, 4))
    for like, said in ((two, {}), (kernels(x=(3, 4)), {"flatten": {"a": (2, 2, 2)}})):
        with pytest.raises(CheckpointMismatch, match="do not correspond") as error:
            params_from_torch({"a.weight": weight}, like, **proofs, **said)
        assert "example=" not in str(error.value)
        assert len(error.value.missing) == len(like) - 1
        assert not error.value.ambiguous


def cross_and_deep(n, x, last):
    """Multiplies inputs by alike layers, beside a network of such layers; one part comes last."""
    parts = {"cross": x, "deep": x}
    for name in sorted(parts, key=last.__eq__):
        for place in range(3):
            y = n.dense(parts[name], f"{name}.{place}", 6)
            parts[name] = x * y + parts[name] if name == "cross" else n.relu(y)
    return n.dense(n.concatenate([parts["cross"], parts["deep"]], -1), "out", 2)


def test_alike_parts_that_are_used_in_the_other_order():
    model = FlaxModel(partial(cross_and_deep, last="cross"), names={})
    params = found_by_trying(partial(cross_and_deep, last="deep"), model, values(3, 6))
    state, _ = proof(TorchModel(partial(cross_and_deep, last="deep")), values(3, 6))
    assert_array_equal(params["Dense_3"]["kernel"].T, state["cross.0.weight"])


def pyramid(n, x):
    """Computes three stages as ConvNeXt does, which declares the layers between them first."""
    for k in range(3):
        x = n.dense(n.ln(x, f"down.{k}.0"), f"down.{k}.1", 6)
        for j in range(2):
            name = f"stages.{k}.{j}"
            y = n.gelu(n.dense(n.ln(x, f"{name}.norm"), f"{name}.fc", 6))
            x = x + n.param(f"{name}.gamma", 6) * y
    return n.dense(n.ln(x, "norm"), "head", 2)


def test_two_lists_of_blocks_in_turn():
    names = {f"stages.{k}.{j}.gamma": f"scale_{k}{j}" for k in range(3) for j in range(2)}
    model = FlaxModel(pyramid, names=names)
    found_by_trying(pyramid, model, values(4, 6), declared="down stages")


def tokens(n, x, ids, first):
    """Makes tokens of numbers and of categories; the bare parameters have an embedding's shape."""

    def of_numbers():
        return x[..., None] * n.param("t.0", 5, 6) + n.param("t.1", 5, 6)

    def of_categories():
        first = n.embed(ids[:, :1], "t.2", 5, 6)
        return first - n.tanh(n.embed(ids[:, 1:], "t.3", 5, 6))

    parts = {"numbers": of_numbers, "categories": of_categories}
    made = {name: parts[name]() for name in sorted(parts, key=first.__ne__)}
    y = n.concatenate([made["numbers"], n.tanh(made["categories"])], 1)
    return n.dense(n.tanh(n.dense(y, "fc", 6)).mean(1), "head", 2)


def test_embeddings_and_bare_parameters_of_one_shape():
    names = {"t.0": "a", "t.1": "b"}
    model = FlaxModel(partial(tokens, first="categories"), names=names)
    ids = np.random.default_rng(0).integers(5, size=(8, 4))
    found_by_trying(partial(tokens, first="numbers"), model, values(8, 5), ids)


class Trajectory(tnn.Module):
    """A Decision Transformer, which predicts states, actions and rewards."""

    def __init__(self):
        super().__init__()
        self.embed_time = tnn.Embedding(11, 8)
        self.embed_reward = tnn.Linear(1, 8)
        self.embed_state = tnn.Linear(5, 8)
        self.embed_action = tnn.Linear(5, 8)
        self.embed_ln = tnn.LayerNorm(8)
        layer = partial(tnn.TransformerEncoderLayer, 8, 2, 16, 0.0, batch_first=True)
        self.blocks = tnn.Sequential(layer(), layer())
        self.predict_state = tnn.Linear(8, 5)
        self.predict_action = tnn.Sequential(tnn.Linear(8, 5), tnn.Tanh())
        self.predict_reward = tnn.Linear(8, 1)

    def forward(self, states, actions, rewards, times):
        time = self.embed_time(times)
        rows = self.embed_reward(rewards), self.embed_state(states), self.embed_action(actions)
        x = torch.stack([row + time for row in rows], 2).flatten(1, 2)
        x = self.blocks(self.embed_ln(x)).unflatten(1, (-1, 3))
        actions = self.predict_action(x[:, :, 1])
        return self.predict_state(x[:, :, 2]), actions, self.predict_reward(x[:, :, 2])


class FlaxTrajectory(nn.Module):
    """The same, which predicts the actions first, and whose layers are called in each other."""

    @nn.compact
    def __call__(self, states, actions, rewards, times):
        time = nn.Embed(11, 8)(times)
        rows = [nn.Dense(8)(row) + time for row in (rewards, states, actions)]
        x = jnp.stack(rows, 2).reshape(len(states), -1, 8)
        x = nn.LayerNorm(epsilon=1e-5)(x)
        for _ in range(2):
            x = nn.LayerNorm(epsilon=1e-5)(x + nn.MultiHeadDotProductAttention(2)(x))
            x = nn.LayerNorm(epsilon=1e-5)(x + nn.Dense(8)(nn.relu(nn.Dense(16)(x))))
        x = x.reshape(len(states), -1, 3, 8)
        actions = nn.tanh(nn.Dense(5)(x[:, :, 1]))
        return nn.Dense(5)(x[:, :, 2]), actions, nn.Dense(1)(x[:, :, 2])


def test_two_heads_that_are_used_in_the_other_order():
    """Needs one change, while another one brings the outputs near by chance."""
    model = FlaxTrajectory()
    inputs = []
    for seed, shape in ((12, (3, 4, 5)), (19, (3, 4, 5)), (8, (3, 4, 1))):
        row = np.random.default_rng(seed).standard_normal(shape)
        inputs.append(row.astype(np.float32))
    inputs.append(np.random.default_rng(1).integers(11, size=(3, 4)))
    torch.manual_seed(0)
    module = randomize(Trajectory().eval())
    outputs = [y.detach().numpy() for y in module(*map(torch.from_numpy, inputs))]
    state = module.state_dict()
    like = abstract(model, *inputs)
    params = params_from_torch(state, like, apply=model.apply, example=(inputs, outputs))
    assert_array_equal(params["params"]["Dense_7"]["kernel"].T, state["predict_action.0.weight"])
