"""What `save_checkpoint` records of a run of the example: it finds layers one after the other."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn as tnn
from torch.nn.parallel import DistributedDataParallel

import torch_bridge
from tests.helpers.bridge import randomize, values
from tests.helpers.two_frameworks import FlaxModel, TorchModel, attend
from torch_bridge import Checkpoint, CheckpointMismatch, load, run_example, save_checkpoint, to_flax


def extremes(values):
    """Returns the four largest and the four smallest values."""
    ordered = np.sort(np.asarray(values, np.float32).ravel())
    return np.concatenate([ordered[:-5:-1], ordered[:4]])


def recorded(path, module, *inputs):
    """Saves a module with an example, and loads the file."""
    save_checkpoint(path / "x.pt", DistributedDataParallel(module), None, example=inputs)
    torch.load(path / "x.pt", weights_only=True)
    return load(path / "x.pt")


class Functional(tnn.Module):
    """Calls layers in another order than it makes them, and functions instead of layers."""

    def __init__(self):
        super().__init__()
        self.last = tnn.Linear(4, 2)
        self.first = tnn.Linear(3, 4)
        self.unused = tnn.Linear(3, 4).requires_grad_(False)
        self.matrix = tnn.Parameter(torch.randn(4, 4))
        self.alias = self.first

    def forward(self, x):
        x = tnn.functional.linear(x, self.first.weight, self.first.bias)
        return self.last(torch.relu(x) @ self.matrix.T)


ROWS = values(5, 3)


def test_the_order_and_the_inputs_are_those_of_the_run(alone, tmp_path):
    module = Functional()
    checkpoint = recorded(tmp_path, module, torch.from_numpy(ROWS))
    calls = checkpoint.calls
    order = ("first.weight", "alias.weight", "first.bias", "alias.bias", "matrix", "last.weight")
    assert tuple(calls) == (*order, "last.bias")
    hidden = module.first(torch.from_numpy(ROWS)).relu().detach()
    assert_array_equal(calls["first.weight"], extremes(ROWS))
    assert_array_equal(calls["alias.weight"], extremes(ROWS))
    assert_array_equal(calls["matrix"], extremes(hidden))
    assert np.isnan(calls["first.bias"]).all()
    inputs, outputs, same = checkpoint.recorded_example
    assert same is calls
    assert (len(inputs), outputs.shape) == (1, (5, 2))


def test_a_module_that_fails_leaves_no_recorder(alone, tmp_path):
    ddp = DistributedDataParallel(tnn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="does not run on `example`"):
        save_checkpoint(tmp_path / "x.pt", ddp, None, example=torch.ones(2, 7))
    calls = recorded(tmp_path, tnn.Linear(3, 2), torch.ones(2, 3)).calls
    assert set(calls) == {"weight", "bias"}


def test_compiled_modules_and_modules_under_activation_checkpoints(alone, tmp_path):
    module = tnn.Sequential(tnn.Linear(3, 4), tnn.ReLU(), tnn.Linear(4, 2))
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(2, 3))
    calls = recorded(tmp_path, compiled, torch.ones(2, 3)).calls
    assert list(calls) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_array_equal(calls["0.weight"], np.ones(8))


class Spectral(tnn.Module):
    """Multiplies weights with complex numbers, and with a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.spectrum = tnn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.features = tnn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.spectrum).real + torch.eye(
            3
        ).to_sparse() @ self.features


def test_inputs_that_are_complex_or_sparse_have_no_extremes(alone, tmp_path):
    calls = recorded(tmp_path, Spectral(), torch.ones(3, 3)).calls
    assert set(calls) == {"spectrum", "features"}
    assert np.isnan(list(calls.values())).all()


class Latent(tnn.Module):
    """Attends with queries that are made of parameters alone, and divided into two heads."""

    def __init__(self):
        super().__init__()
        self.latents = tnn.Parameter(torch.randn(2, 4))
        self.query = tnn.Linear(4, 4)

    def forward(self, x):
        heads = self.query(self.latents).split(2, -1)
        return torch.cat(heads, -1) @ x.T


def test_parts_of_what_is_made_of_parameters_are_made_of_them(alone, tmp_path):
    x = values(3, 4)
    calls = recorded(tmp_path, Latent(), torch.from_numpy(x)).calls
    assert list(calls) == ["latents", "query.weight", "query.bias"]
    for known in calls.values():
        assert_array_equal(known, extremes(x))


def spectral(params, x):
    filters = params["filter"].astype(jnp.complex64)
    return jnp.fft.ifft(jnp.fft.fft(x) * filters).real @ params["kernel"]


def test_flax_models_may_apply_leaves_to_complex_numbers():
    x = values(3, 4)
    calls = {"kernel": extremes(x), "filter": extremes(x)}
    weights = {"filter": values(4), "kernel": values(4, 4)}
    outputs = spectral(weights, x)
    checkpoint = Checkpoint(weights, example=((x,), outputs), calls=calls)
    like = {"filter": np.zeros(4), "kernel": np.zeros((4, 4))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # an error would only end the following of calls
        assert to_flax(checkpoint, like, apply=spectral).difference < 1e-6
    assert not [warning for warning in caught if "complex" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_have_no_record(alone, tmp_path):
    module = torch.jit.script(tnn.Sequential(tnn.Linear(3, 4)))
    assert recorded(tmp_path, module, torch.ones(2, 3)).calls == {}


@pytest.mark.parametrize(
    "calls",
    [
        [],
        {"names": ["weight"]},
        {"names": "ab", "extremes": torch.zeros(2, 8)},
        {"names": ["weight", 3], "extremes": torch.zeros(2, 8)},
        {"names": ["weight", "weight"], "extremes": torch.zeros(2, 8)},
        {"names": ["weight"], "extremes": torch.zeros(2, 8)},
        {"names": ["weight"], "extremes": torch.zeros(1, 7)},
        {"names": ["weight"], "extremes": torch.zeros(1, 8, dtype=torch.int64)},
    ],
)
def test_records_of_another_form_are_refused_in_one_sentence(alone, tmp_path, calls):
    recorded(tmp_path, tnn.Linear(3, 2), torch.ones(2, 3))
    document = torch.load(tmp_path / "x.pt", weights_only=True)
    document["example"]["calls"] = calls
    torch.save(document, tmp_path / "x.pt")
    with pytest.raises(CheckpointMismatch, match="`calls` of the example must have `names`"):
        load(tmp_path / "x.pt")


def gated(n, x, attention, product, act="silu"):
    """Computes two blocks of attention and of a gated product, whose layers have one shape."""
    for k in range(2):
        y = n.ln(x, f"{k}.norm1")
        rows = {word: n.dense(y, f"{k}.{word}", 8) for word in attention}
        x = x + n.dense(attend(n, rows["q"], rows["k"], rows["v"]), f"{k}.o", 8)
        y = n.ln(x, f"{k}.norm2")
        rows = {word: n.dense(y, f"{k}.{word}", 8) for word in product}
        x = x + n.dense(getattr(n, act)(rows["gate"]) * rows["up"], f"{k}.down", 8)
    return n.dense(x, "head", 3)


def conformer(n, x):
    """Computes two Conformer blocks, with the convolution before the attention."""

    def feed_forward(x, name):
        return n.dense(n.silu(n.dense(n.ln(x, f"{name}.0"), f"{name}.1", 16)), f"{name}.4", 8) / 2

    for k in range(2):
        x = x + feed_forward(x, f"ffn1.{k}")
        y = n.pointwise(n.ln(x, f"conv.{k}.norm"), f"conv.{k}.0", 16)
        y = n.conv(y[..., :8] * n.sigmoid(y[..., 8:]), f"conv.{k}.2", 8, 3, p=1, groups=8)
        x = x + n.pointwise(n.silu(n.bn(y, f"conv.{k}.3")), f"conv.{k}.5", 8)
        x = x + n.attention(n.ln(x, f"attn_norm.{k}"), f"attn.{k}", 2)
        x = n.ln(x + feed_forward(x, f"ffn2.{k}"), f"final.{k}")
    return n.dense(x, "out", 5)


def mixed(n, x, order):
    """Computes two blocks whose layers are each applied to a mixture of its own, as RWKV does."""
    for k in range(2):
        y = n.ln(x, f"{k}.norm")
        rows = {}
        for place, word in enumerate(order[:3]):
            mixture = y * n.param(f"{k}.mix{k}_{place}", 8) + x
            rows[word] = n.dense(mixture, f"{k}.{word}", 8)
        weights = {word: n.param(f"{k}.{word}{k}", 8) for word in order[3:]}
        y = n.tanh(rows["k"] + weights["u"]) * weights["w"] + rows["v"]
        x = x + n.dense(n.sigmoid(rows["r"]) * y, f"{k}.o", 8)
    return n.dense(x, "head", 3)


def sets(n, x, order):
    """Computes two blocks of a Set Transformer: latents attend to rows, and rows to latents."""

    def attended(name, rows, of):
        inputs = {"q": rows, "k": of, "v": of}
        parts = {word: n.dense(inputs[word], f"{name}.{word}", 8) for word in order}
        y = parts["q"] + attend(n, parts["q"], parts["k"], parts["v"])
        y = n.ln(y, f"{name}.ln0")
        return n.ln(y + n.relu(n.dense(y, f"{name}.o", 8)), f"{name}.ln1")

    for k in range(2):
        latents = n.stack([n.param(f"{k}.latents{k}", 4, 8)] * 3)
        x = attended(f"{k}.rows", x, attended(f"{k}.latent", latents, x))
    return n.dense(x, "head", 3)


def triangle(n, z, order):
    """Computes a triangle multiplication and a transition, as AlphaFold does, twice."""
    for k in range(2):
        y = n.ln(z, f"{k}.norm_in")
        rows = {word: n.dense(y, f"{k}.{word}", 8) for word in order}
        left, right = (n.sigmoid(rows[f"{side}_gate"]) * rows[f"{side}_part"] for side in "ab")
        y = n.ln(n.einsum("bikc,bjkc->bijc", left, right), f"{k}.norm_out")
        z = z + n.dense(y, f"{k}.linear_z", 8) * n.sigmoid(rows["g"])
        z = z + n.dense(n.relu(n.dense(z, f"{k}.linear_1", 8)), f"{k}.linear_2", 8)
    return n.dense(z, "head", 3)


THEIRS = ("a_gate", "a_part", "b_gate", "b_part", "g")
OURS = ("a_part", "b_part", "a_gate", "b_gate", "g")
MODELS = {
    "gated": (
        partial(gated, attention="qkv", product=("gate", "up")),
        partial(gated, attention="vkq", product=("up", "gate")),
        values(3, 6, 8),
        "",
    ),
    "mixed": (
        partial(mixed, order="kvrwu"),
        partial(mixed, order="rkvuw"),
        values(3, 6, 8),
        "",
    ),
    "sets": (partial(sets, order="qkv"), partial(sets, order="vkq"), values(3, 6, 8), ""),
    "conformer": (conformer, conformer, values(3, 6, 8), "attn_norm attn conv ffn1 ffn2 final"),
    "triangle": (
        partial(triangle, order=THEIRS),
        partial(triangle, order=OURS),
        values(2, 5, 5, 8),
        "",
    ),
}


def built(name, path):
    """Returns the recorded checkpoint of a model, the Flax model and its abstract parameters."""
    theirs, ours, x, declared = MODELS[name]
    module = TorchModel(theirs, declared)
    torch.manual_seed(0)
    module.eval()(torch.from_numpy(x))  # the first call makes the layers
    model = FlaxModel(ours, names={})
    like = jax.eval_shape(model.init, jax.random.key(0), x)
    return recorded(path, randomize(module), torch.from_numpy(x)), model, like


@pytest.mark.parametrize("wrap", [lambda apply: apply, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_found_one_after_the_other(alone, tmp_path, name, wrap):
    checkpoint, model, like = built(name, tmp_path)
    run = to_flax(checkpoint, like, apply=wrap(model.apply))
    assert run.difference <= 1e-5
    back = torch_bridge.to_torch(run.params, (), checkpoint, apply=model.apply)
    for key, value in back["state_dict"].items():
        assert_array_equal(value, checkpoint.model[key])


WRAPPERS = {
    "no wrapper": lambda module: module,
    "DataParallel": tnn.DataParallel,
    "compiled": partial(torch.compile, backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_file_of_others_is_followed_with_an_example_that_ran_here(wrapper):
    theirs, ours, x, declared = MODELS["gated"]
    module = TorchModel(theirs, declared)
    module.eval()(torch.from_numpy(x))
    saved = randomize(module).state_dict()
    model = FlaxModel(ours, names={})
    like = jax.eval_shape(model.init, jax.random.key(0), x)
    example = run_example(WRAPPERS[wrapper](module), torch.from_numpy(x))
    checkpoint = Checkpoint({name: value.numpy() for name, value in saved.items()})
    run = to_flax(checkpoint, like, apply=model.apply, example=example)
    assert run.difference <= 1e-5
    torch_bridge.to_torch(run.params, (), run, apply=model.apply, module=module)
    changed = jax.tree.map(lambda leaf: leaf * 1.01, run.params)

    def unchanged(params, x):
        return model.apply(run.params, x)

    with pytest.raises(CheckpointMismatch, match="gives other outputs"):
        torch_bridge.to_torch(changed, (), run, apply=unchanged, module=module)
    params = torch_bridge.params_from_torch(saved, like, apply=model.apply, example=example)
    assert jax.tree.structure(params) == jax.tree.structure(like)


def test_a_refusal_advises_to_run_the_module_if_its_calls_are_not_known():
    module = tnn.Linear(3, 3)
    x = values(2, 3)
    inputs, outputs, calls = run_example(module, torch.from_numpy(x))
    like = {"kernel": np.zeros((3, 3)), "bias": np.zeros(3)}

    def apply(params, x):
        return x @ params["kernel"] - params["bias"]

    advice = r"pass example=torch_bridge\.run_example\(module, inputs\)"
    with pytest.raises(CheckpointMismatch, match=advice):
        torch_bridge.pair(module, like, apply=apply, example=(inputs, outputs))
    with pytest.raises(CheckpointMismatch, match="does not give torch's outputs") as caught:
        torch_bridge.pair(module, like, apply=apply, example=(inputs, outputs, calls))
    assert "run_example" not in str(caught.value)


class Outputs(tnn.Linear):
    """Returns what models of the Hub return, with a cache of a class of its own."""

    def forward(self, x):
        return {"y": super().forward(x), "cache": object(), "rest": [x.sum(), "tanh", 3, None]}


def test_an_example_has_the_tensors_and_plain_values_of_the_outputs():
    module = Outputs(3, 2)
    x = torch.ones(4, 3)
    _, outputs, _ = run_example(module, x)
    y = tnn.functional.linear(x, module.weight, module.bias).detach()
    expected = {"y": y, "cache": None, "rest": (torch.tensor(12.0), "tanh", 3, None)}
    jax.tree.map(assert_array_equal, outputs, expected)


def test_outputs_without_a_tensor_are_no_example():
    class Silent(tnn.Linear):
        def forward(self, x):
            return {"loss": super().forward(x).sum().item()}

    with pytest.raises(ValueError, match="gives no tensor"):
        run_example(Silent(3, 2), torch.ones(4, 3))


@pytest.mark.parametrize("module", [None, tnn.Linear(3, 3).state_dict()])
def test_an_example_runs_through_a_module_only(module):
    with pytest.raises(TypeError, match="`module` must be the torch module"):
        run_example(module, torch.ones(2, 3))


@pytest.mark.parametrize("example", [(), (1, 2, 3), ((), (), {}, 4), ((values(2, 3),), 1, [2])])
def test_examples_of_another_form_are_refused_in_one_sentence(example):
    with pytest.raises(ValueError, match="`example` must be what"):
        torch_bridge.pair(tnn.Linear(3, 3), {}, apply=lambda params, x: x, example=example)


def test_an_error_names_the_first_layer_with_other_inputs(alone, tmp_path):
    checkpoint, _, _ = built("gated", tmp_path)
    other = FlaxModel(partial(gated, attention="vkq", product=("gate", "up"), act="relu"), names={})
    like = jax.eval_shape(other.init, jax.random.key(0), values(3, 6, 8))
    said = r"in torch is 0\.down \(Dense_6\), behind 6 layers with the same inputs"
    with pytest.raises(CheckpointMismatch, match=said):
        to_flax(checkpoint, like, apply=other.apply)


def nested(n, x):
    return n.tanh(n.dense(n.tanh(n.dense(x, "last.0", 8)), "first.0", 8))


@pytest.mark.parametrize("harm", ["shuffled", "other names", "infinite"])
def test_a_wrong_record_leaves_the_search_as_it_was(alone, tmp_path, harm):
    module = TorchModel(nested)
    model = FlaxModel(nested, names={"last.0": "b", "first.0": "a"})
    x = values(4, 8)
    module(torch.from_numpy(x))
    saved = recorded(tmp_path, randomize(module), torch.from_numpy(x))
    calls = {
        "shuffled": dict(zip(saved.calls, list(saved.calls.values())[::-1], strict=True)),
        "other names": {"x" + name: value for name, value in saved.calls.items()},
        "infinite": {name: value + np.inf for name, value in saved.calls.items()},
    }[harm]
    checkpoint = Checkpoint(saved.model, example=saved.example, calls=calls)
    like = jax.eval_shape(model.init, jax.random.key(0), x)
    assert to_flax(checkpoint, like, apply=model.apply).difference < 1e-6


def branching(params, x):
    """Decides by values, so that it cannot be traced."""
    sign = 1 if float(x.sum()) > 1e9 else -1
    return -sign * FlaxModel(nested, names={}).apply(params, x)


def test_a_model_that_cannot_be_traced_is_searched_as_without_a_record(alone, tmp_path):
    module = TorchModel(nested)
    x = values(4, 8)
    module(torch.from_numpy(x))
    checkpoint = recorded(tmp_path, randomize(module), torch.from_numpy(x))
    like = jax.eval_shape(FlaxModel(nested, names={}).init, jax.random.key(0), x)
    assert to_flax(checkpoint, like, apply=branching).difference < 1e-6
