"""What no shape tells: it is recognised, said or asked for. And what 16 bits keep of a run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from bridge import params_from_torch, params_to_torch

import torch_bridge
from torch_bridge import BucketLayout, Checkpoint, CheckpointMismatch, PowerSGDRecord
from torch_bridge._hook.buckets import pack

pytestmark = pytest.mark.torch


def values(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(dtype)


def kernels(**shapes):
    return {name: {"kernel": np.zeros(shape, np.float32)} for name, shape in shapes.items()}


def test_names_that_become_one_are_refused():
    model = {"_orig_mod.fc.weight": values(4, 3), "fc.weight": -values(4, 3), "fc.bias": values(4)}
    like = {"fc": {"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}}
    for convert in (
        lambda: params_from_torch(model, like),
        lambda: params_to_torch(like, model),
        lambda: torch_bridge.to_flax(Checkpoint(model), like),
    ):
        with pytest.raises(ValueError, match="Names become one") as error:
            convert()
        assert error.value.ambiguous == ("_orig_mod.fc.weight and fc.weight",)
    compiled = {f"module._orig_mod.{name}": model[name] for name in ("fc.weight", "fc.bias")}
    assert params_from_torch(compiled, like)["fc"]["kernel"].shape == (3, 4)


# --- weights stored (in, out) -----------------------------------------------------------------


def blocks(*straight, square="square"):
    """Two matrices that are not square and one that is; `straight` ones are stored (in, out)."""
    shapes = {"up": (8, 24), "down": (24, 8)}
    model = {n: values(*(s if n in straight else s[::-1])) for n, s in shapes.items()}
    weights = {f"{name}.weight": value for name, value in {**model, square: values(8, 8)}.items()}
    return weights, kernels(**shapes, **{square: (8, 8)})


@pytest.mark.parametrize(
    ("straight", "options", "transposed"),
    [
        (("up", "down"), {"conv1d": "square"}, False),
        (("up", "down"), {"conv1d": "up|down"}, True),
        ((), {"conv1d": ""}, True),
        ((), {"conv1d": "square"}, False),
        (("up",), {"conv1d": "square"}, False),
        (("up",), {"conv1d": ""}, True),
    ],
)
def test_square_matrices_stored_in_out(straight, options, transposed):
    model, like = blocks(*straight)
    params = params_from_torch(model, like, **options)
    square = model["square.weight"]
    np.testing.assert_array_equal(params["square"]["kernel"], square.T if transposed else square)
    up = model["up.weight"]
    np.testing.assert_array_equal(params["up"]["kernel"], up if "up" in straight else up.T)
    back = params_to_torch(params, model, **options)
    assert all(np.array_equal(back[name], model[name]) for name in model)


def test_patterns_that_match_nothing_are_listed():
    model, like = blocks("up", "down")
    said = {"flatten": {"upp": None}, "conv1d": "doun"}
    with pytest.raises(CheckpointMismatch, match="match no layer") as error:
        params_from_torch(model, like, {"up": "up", "op": "up"}, **said)
    idle = ("rules: op", "flatten: upp", "conv1d: doun")
    assert error.value.unexpected == idle


def test_misspelled_options_are_refused():
    model, like = blocks("up", "down")
    checkpoint = Checkpoint(model)
    params = params_from_torch(model, like, conv1d="")
    for convert in (
        lambda **said: params_from_torch(model, like, **said),
        lambda **said: torch_bridge.to_flax(checkpoint, like, **said),
        lambda **said: torch_bridge.to_torch(params, (), checkpoint, **said),
    ):
        with pytest.raises(TypeError, match=r"'flaten'\. Did you mean 'flatten'\?"):
            convert(flaten={"up": None})
        with pytest.raises(
            TypeError,
            match=r"no argument 'missing_rank'\. From torch_bridge\.pair it takes conv1d,",
        ):
            convert(missing_rank="zero")
    with pytest.raises(ValueError, match=r"`ignore`: .* is no regular expression"):
        params_from_torch(model, like, ignore="(")


@pytest.mark.parametrize("straight", [(), ("up",), ("up", "down")])
def test_square_matrices_are_asked_about_whatever_the_others_are(straight):
    model, like = blocks(*straight)
    with pytest.raises(CheckpointMismatch, match=r"square: .* Say conv1d=''") as error:
        params_from_torch(model, like)
    assert [line.split(":")[0] for line in error.value.ambiguous] == ["square"]
    assert error.value.parameters == ("rules", "conv1d", "ignore")


def test_one_question_for_all_square_matrices():
    model = {f"fc{k}.weight": values(8, 8) + k for k in range(2)} | {"out.weight": values(4, 4)}
    like = kernels(fc0=(8, 8), fc1=(2, 4, 8), out=(4, 4))
    with pytest.raises(CheckpointMismatch) as error:
        params_from_torch(model, like)
    assert [line.split(":")[0] for line in error.value.ambiguous] == [r"fc\d+|out"]
    said = params_from_torch(model, like, conv1d="")
    np.testing.assert_array_equal(said["fc0"]["kernel"], model["fc0.weight"].T)
    straight = params_from_torch(model, like, conv1d=r"fc\d+|out")
    np.testing.assert_array_equal(straight["fc0"]["kernel"], model["fc0.weight"])


def test_torchs_own_layers_are_never_stored_in_out():
    model = {"attention.in_proj_weight": values(24, 8), "attention.out_proj.weight": values(8, 8)}
    model |= {f"rnn.weight_{side}_l0": values(6, 6) for side in ("ih", "hh")}
    heads = dict.fromkeys(("query", "key", "value"), (8, 2, 4))
    like = {"attention": kernels(**heads, out=(2, 4, 8)), "rnn_0": kernels(i=(6, 6), h=(6, 6))}
    params = params_from_torch(model, like)
    np.testing.assert_array_equal(params["rnn_0"]["h"]["kernel"], model["rnn.weight_hh_l0"].T)
    like["attention"] = kernels(qkv=(8, 24), out=(8, 8))
    params = params_from_torch(model, like, {r"attention\.in_proj": "attention/qkv"})
    out = model["attention.out_proj.weight"]
    np.testing.assert_array_equal(params["attention"]["out"]["kernel"], out.T)


def test_a_packed_matrix_that_is_stored_in_out_cannot_be_taken_apart():
    model = {"c_attn.weight": values(8, 24), "c_attn.bias": values(24)}
    part = {"kernel": np.zeros((8, 8)), "bias": np.zeros(8)}
    like = dict.fromkeys(("query", "key", "value"), part)
    with pytest.raises(CheckpointMismatch, match="3 layers side by side") as error:
        params_from_torch(model, like, {"c_attn": "query|key|value"}, conv1d="c_attn")
    line = error.value.mis_shaped[0]
    assert line.startswith("c_attn.weight (8, 24) <-> query/kernel (8, 8): stored (in, out)")
    assert "one kernel of shape (8, 24)" in line
    assert "numpy.split(weight, 3, axis=1)" in line


# --- a flatten --------------------------------------------------------------------------------


def network(places, *behind, convs=1):
    """Convolutions with 8 channels, an fc behind that has `places` inputs a channel, and more."""
    model = {f"conv{k}.weight": values(8, 3 if k == 0 else 8, 3, 3) for k in range(convs)}
    like = {f"conv{k}": (3, 3, 3 if k == 0 else 8, 8) for k in range(convs)}
    model["fc.weight"], like["fc"] = values(10, 8 * places), (8 * places, 10)
    for name in behind:
        model[f"{name}.weight"], like[name] = values(4, 8, 3, 3), (3, 3, 8, 4)
    return model, kernels(**like)


def declared_before(places, first="fc"):
    """The fc is an attribute of the module before its convolutions are, or between them."""
    model, like = network(places, convs=2)
    order = {"fc": ("fc", "conv0", "conv1"), "conv0": ("conv0", "fc", "conv1")}[first]
    model["conv0.weight"] = np.repeat(model["conv0.weight"], 3, axis=0)
    model["conv1.weight"] = np.repeat(model["conv1.weight"], 3, axis=1)
    like |= kernels(conv0=(3, 3, 3, 24), conv1=(3, 3, 24, 8))
    return {f"{name}.weight": model[f"{name}.weight"] for name in order}, like


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (network(16), (8, 4, 4)),  # a square may be pooled features of many layers
        (network(12), (8, 3, 4)),
        (network(16, "later"), (8, 4, 4)),  # a convolution follows: a decoder perhaps
        (network(4, convs=4), (8, 2, 2)),  # as many branches as places, one behind the other
        (network(7), (8, 1, 7)),  # a prime number of places
        (declared_before(16), (8, 4, 4)),
        (declared_before(7, "conv0"), (8, 7, 1)),
    ],
    ids=[
        "square",
        "not square",
        "a convolution follows",
        "side by side",
        "prime",
        "before",
        "between",
    ],
)
def test_a_map_that_may_be_something_else_is_asked_about(model, shape):
    torch_model, like = model
    with pytest.raises(CheckpointMismatch, match="flatten=") as error:
        params_from_torch(torch_model, like)
    assert [line.split()[0] for line in error.value.ambiguous] == ["fc"]
    said = params_from_torch(torch_model, like, flatten={"fc": shape})
    pooled = params_from_torch(torch_model, like, flatten={"fc": None})
    weight = torch_model["fc.weight"]
    moved = weight.reshape(10, *shape).transpose(2, 3, 1, 0).reshape(-1, 10)
    np.testing.assert_array_equal(said["fc"]["kernel"], moved)
    np.testing.assert_array_equal(pooled["fc"]["kernel"], weight.T)


def test_a_second_head_reads_the_map_too():
    model, like = network(16)
    for head, outputs in (("advantage", 4), ("value", 1)):
        model |= {f"{head}.0.weight": values(24, 128), f"{head}.2.weight": values(outputs, 24)}
        like |= {f"{head}_0": kernels(x=(128, 24))["x"], f"{head}_2": kernels(x=(24, outputs))["x"]}
    del model["fc.weight"], like["fc"]
    with pytest.raises(CheckpointMismatch) as error:
        params_from_torch(model, like)
    asked = [line.split()[0] for line in error.value.ambiguous]
    assert asked == ["advantage.0", "value.0"]
    found = params_from_torch(model, like, flatten={r"\w+\.0": (8, 4, 4)})
    for head in ("advantage", "value"):
        weight = model[f"{head}.0.weight"]
        moved = weight.reshape(24, 8, 4, 4).transpose(2, 3, 1, 0).reshape(128, 24)
        np.testing.assert_array_equal(found[f"{head}_0"]["kernel"], moved)
        np.testing.assert_array_equal(found[f"{head}_2"]["kernel"], model[f"{head}.2.weight"].T)


def test_a_matrix_behind_a_layer_as_wide_as_the_map_is_asked_about():
    model, like = network(16)
    model |= {"hidden.weight": values(128, 10), "last.weight": values(3, 128)}
    like |= kernels(hidden=(10, 128), last=(128, 3))
    with pytest.raises(CheckpointMismatch, match="flatten=") as error:
        params_from_torch(model, like)
    assert [line.split()[0] for line in error.value.ambiguous] == ["fc", "last"]
    found = params_from_torch(model, like, flatten={"fc": (8, 4, 4), "last": None})
    np.testing.assert_array_equal(found["last"]["kernel"], model["last.weight"].T)


def moved_to_last(array, shape, axis=0):
    """The entries of one axis, in torch's order of the map (C, H, W), in that of Flax."""
    order = np.arange(np.prod(shape)).reshape(shape).transpose(1, 2, 0).ravel()
    return np.take(array, order, axis)


def there_and_back(model, like, **options):
    """The parameters in Flax, after a look at whether they come back as they were."""
    params = params_from_torch(model, like, **options)
    back = params_to_torch(params, model, **options)
    for name, value in model.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    return params


def test_a_norm_behind_a_flatten_moves_with_what_reads_it():
    model, like = network(16)
    fc = model.pop("fc.weight")
    kinds = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    norm = {f"bn.{kind}": values(128) + k for k, kind in enumerate(kinds)}
    model |= {"bn1.weight": values(8), "bn1.bias": values(8), **norm, "fc.weight": fc}
    like = {"params": {**like, "bn": {}, "bn1": {"scale": np.zeros(8), "bias": np.zeros(8)}}}
    like["params"]["bn"] = {"scale": np.zeros(128), "bias": np.zeros(128)}
    like["batch_stats"] = {"bn": {"mean": np.zeros(128), "var": np.zeros(128)}}
    for options, shape in (
        ({"flatten": {"fc": (8, 4, 4)}}, (8, 4, 4)),
        ({"flatten": {"fc": (8, 2, 8)}}, (8, 2, 8)),
        ({"flatten": {"fc": None}}, (128, 1, 1)),
    ):
        found = there_and_back(model, like, **options)
        for kind, leaf in kinds.items():
            part = found["batch_stats" if kind.startswith("running") else "params"]["bn"]
            np.testing.assert_array_equal(part[leaf], moved_to_last(model[f"bn.{kind}"], shape))
        np.testing.assert_array_equal(found["params"]["bn1"]["bias"], model["bn1.bias"])


def test_a_norm_of_the_size_of_the_map_elsewhere_is_asked_about():
    model, like = network(16)
    model |= {"norm.weight": values(128), "norm.bias": values(128) + 1}
    like["norm"] = {"scale": np.zeros(128), "bias": np.zeros(128)}
    with pytest.raises(CheckpointMismatch, match="norm reads 128 values behind conv0") as error:
        params_from_torch(model, like)
    assert error.value.parameters == ("rules", "flatten", "ignore")
    there_and_back(model, like, flatten={"fc": None})  # so that there is no map
    found = there_and_back(model, like, flatten={"fc|norm": (8, 4, 4)})
    np.testing.assert_array_equal(found["norm"]["bias"], moved_to_last(values(128) + 1, (8, 4, 4)))


def test_a_recurrent_layer_behind_a_flatten_is_asked_about():
    model, like = network(16)
    del model["fc.weight"], like["fc"]
    gates = ("weight_ih", 128), ("weight_hh", 6)
    model |= {f"lstm.{name}_l0": values(24, width) for name, width in gates}
    model |= {f"lstm.{name}_l1": values(24, 6) for name, _ in gates}
    for layer, width in ((0, 128), (1, 6)):
        shapes = {f"{side}{g}": (n, 6) for side, n in (("i", width), ("h", 6)) for g in "ifgo"}
        like[f"lstm_{layer}"] = kernels(**shapes)
    with pytest.raises(CheckpointMismatch, match="flatten=") as error:
        params_from_torch(model, like)
    assert [line.split()[0] for line in error.value.ambiguous] == ["lstm.l0"]
    weight = model["lstm.weight_ih_l0"]
    for shape in ((8, 4, 4), None):
        found = there_and_back(model, like, flatten={r"lstm\.l0": shape})["lstm_0"]
        mine = np.concatenate([found[f"i{gate}"]["kernel"] for gate in "ifgo"], axis=1)
        np.testing.assert_array_equal(mine, moved_to_last(weight.T, shape or (128, 1, 1)))


def generator():
    """A Linear whose outputs become a map, with a norm between."""
    model = {
        "fc.weight": values(128, 16),
        "fc.bias": values(128),
        "norm.weight": values(128) + 1,
        "norm.bias": values(128) + 2,
        "up.weight": values(8, 3, 2, 2),
    }
    like = kernels(fc=(16, 128), up=(2, 2, 8, 3))
    like["fc"]["bias"] = np.zeros(128, np.float32)
    like["norm"] = {"scale": np.zeros(128, np.float32), "bias": np.zeros(128, np.float32)}
    return model, like


def test_outputs_that_become_a_map_are_asked_about():
    model, like = generator()
    with pytest.raises(CheckpointMismatch, match="fc gives 128 values before up") as error:
        params_from_torch(model, like)
    assert len(error.value.ambiguous) == 1
    assert "unflatten={'fc': (8, 4, 4)}" in error.value.ambiguous[0]
    assert error.value.parameters == ("rules", "unflatten", "ignore")
    for shape in ((8, 4, 4), None):
        found = there_and_back(model, like, unflatten={"fc": shape})
        shape = shape or (128, 1, 1)
        np.testing.assert_array_equal(
            found["fc"]["kernel"], moved_to_last(model["fc.weight"].T, shape, 1)
        )
        np.testing.assert_array_equal(found["fc"]["bias"], moved_to_last(model["fc.bias"], shape))
        for kind, leaf in (("weight", "scale"), ("bias", "bias")):
            np.testing.assert_array_equal(
                found["norm"][leaf], moved_to_last(model[f"norm.{kind}"], shape)
            )


def test_a_run_of_which_outputs_become_a_map_there_and_back():
    model, like = generator()
    checkpoint = run(model)
    options = {"unflatten": {"fc": (8, 4, 4)}}
    there = torch_bridge.to_flax(checkpoint, like, **options)
    back = torch_bridge.to_torch(there.params, there.opt_state, checkpoint, **options)
    for number, state in checkpoint.optimizer["state"].items():
        mine = back["optimizer"]["state"][number]["momentum_buffer"]
        np.testing.assert_array_equal(mine, state["momentum_buffer"])
    (found,) = [p for p in torch_bridge.pair(model, like, **options) if p.torch_name == "fc.weight"]
    row, col = found.matrix_order()
    weight = model["fc.weight"]
    np.testing.assert_array_equal(found.to_flax(weight).T, weight[row][:, col])
    error = checkpoint.mean_errors(checkpoint.layout)
    mine = there.reducer_state.residual["fc"]["kernel"]
    np.testing.assert_array_equal(mine, found.to_flax(error["fc.weight"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flatten": "fc"}, "`flatten` must map regular expressions to shapes"),
        ({"flatten": {"fc": 3}}, "`flatten` must map"),
        ({"flatten": {"fc": (8, -4, -4)}}, "`flatten` must map"),
        ({"flatten": {"fc": (8, "4", 4)}}, "`flatten` must map"),
        ({"unflatten": 3}, "`unflatten` must map"),
        ({"rules": "fc"}, "`rules` must map regular expressions to paths"),
        ({"rules": 3}, "`rules` must map"),
        ({"flatten": {"fc": (8, 4, 5)}}, r"\(128, 10\), with flatten=\(8, 4, 5\)"),
    ],
)
def test_options_of_another_form_are_refused_in_one_sentence(options, message):
    model, like = network(16)
    with pytest.raises(ValueError, match=message) as error:
        params_from_torch(model, like, **options)
    if isinstance(error.value, CheckpointMismatch):
        assert error.value.parameters == ("rules", "flatten", "ignore")
    params_from_torch(model, like, flatten={"fc": [8, 4, 4]})


def test_arguments_of_another_type_are_refused_in_one_sentence():
    model, like = network(16)
    for convert in (
        lambda value: torch_bridge.to_flax(value, like),
        lambda value: torch_bridge.to_torch(like, (), value),
    ):
        for value in ("checkpoint.pt", model):
            with pytest.raises(TypeError, match=r"Pass what torch_bridge\.load returned"):
                convert(value)
    for value in ("x.pt", Checkpoint(model)):
        with pytest.raises(TypeError, match=r"state dict or module is needed.* attribute `model`"):
            params_from_torch(value, like)
    for value in (None, 3, [None]):
        with pytest.raises(TypeError, match="`paths` must be one path"):
            torch_bridge.load(value)


@pytest.mark.parametrize("name", ["opt", "optimizers", "optimizer_states"])
def test_an_optimizer_elsewhere_in_the_file_is_named(name):
    model, like = network(16)
    found = run(model)
    extra = {name: found.optimizer if name == "opt" else [found.optimizer], "epoch": 3}
    checkpoint = dataclasses.replace(found, optimizer=None, extra=extra)
    said = {"flatten": {"fc": (8, 4, 4)}}
    with pytest.warns(UserWarning, match=f"'{name}'. looks like one") as warned:
        there = torch_bridge.to_flax(checkpoint, like, **said)
    assert there.optimizer is None
    assert len(there.opt_state) == 1
    assert warned[0].filename == __file__
    torch_bridge.to_flax(dataclasses.replace(checkpoint, extra={"epoch": 3}), like, **said)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"flatten": {"conv0": (8, 4, 4), "fc": None}}, "flatten: conv0"),
        ({"unflatten": {"conv0": (8, 4, 4)}, "flatten": {"fc": None}}, "unflatten: conv0"),
        ({"unflatten": {"fc": None, "f": (2, 5)}, "flatten": {"fc": None}}, "unflatten: f"),
    ],
)
def test_shapes_that_move_nothing_are_refused(options, idle):
    model, like = network(16)
    with pytest.raises(CheckpointMismatch, match="Correct them or leave them out") as error:
        params_from_torch(model, like, **options)
    assert error.value.unexpected == (idle,)
    assert error.value.parameters == (idle.partition(":")[0],)


def run(model, ranks=1, dtype=np.float32):
    """A checkpoint at rank 2 with one bucket and momentum."""
    layout = BucketLayout.from_order([list(model)], model)
    factors, errors = {}, []
    for slot in layout.factor_slots(2, 2.0):
        factors[slot.entry.name] = tuple(values(n, slot.rank) for n in (slot.rows, slot.cols))
    for rank in range(ranks):
        errors.append({name: values(*w.shape) * (rank + 1) for name, w in model.items()})
    records = []
    for error in errors:
        buffers = pack(layout, 2, 2.0, error, factors)
        cast = [{b: flat.astype(dtype) for b, flat in part.items()} for part in buffers]
        records.append(PowerSGDRecord(2, 20, *cast, start_powerSGD_iter=5))
    state = {k: {"momentum_buffer": values(*w.shape)} for k, w in enumerate(model.values())}
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}
    optimizer = {"state": state, "param_groups": [{**group, "params": list(range(len(model)))}]}
    arrays = {name: weight.astype(dtype) for name, weight in model.items()}
    return Checkpoint(arrays, tuple(records), optimizer, layout, world_size=ranks)


def test_clipping_is_named_and_has_a_place():
    model, like = generator()
    with pytest.warns(
        UserWarning, match="clip_grad_norm_.* between run.reducer and run.optim"
    ) as w:
        there = torch_bridge.to_flax(run(model), like, unflatten={"fc": None})
    assert w[0].filename == __file__
    clipped = optax.chain(there.reducer, optax.clip_by_global_norm(0.01), there.optimizer)
    state = (there.reducer_state, optax.EmptyState(), there.optimizer_state)
    grads = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), there.params)
    update = jax.vmap(clipped.update, in_axes=(0, None, None), axis_name="data")
    updates, _ = jax.jit(update)(grads, state, there.params)
    plain = jax.vmap(there.transformation.update, in_axes=(0, None, None), axis_name="data")
    wild, _ = jax.jit(plain)(grads, there.opt_state, there.params)
    assert optax.tree.norm(updates) < optax.tree.norm(wild)


# --- 16 bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("dtype", "bits"), [(ml_dtypes.bfloat16, 8), (np.float16, 11)])
def test_what_16_bits_keep_of_a_run(dtype, bits, ranks):
    model = {"fc.weight": values(24, 32), "head.weight": values(48, 24)}
    source = run(model, ranks, dtype)
    like = kernels(fc=(32, 24), head=(24, 48))
    params, _, opt_state, _ = torch_bridge.to_flax(source, like)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}
    assert opt_state[0].q["fc"]["kernel"].dtype == jnp.float32
    document = torch_bridge.to_torch(params, opt_state, source)
    slots = document["powersgd"]
    for name in ("p_memory_dict", "q_memory_dict"):
        old = getattr(source.powersgd[0], name)[0]
        assert str(slots[name][0].dtype).removeprefix("torch.") == np.dtype(dtype).name
        np.testing.assert_array_equal(slots[name][0].float(), old.astype(np.float32))
    for name, weight in source.model.items():
        kept = document["state_dict"][name].float()
        np.testing.assert_array_equal(kept, weight.astype(np.float32))
    mean = source.mean_error(0)
    error = document["errors"][0][0].float().numpy()
    if ranks == 1:  # one rank's error comes back bit for bit, a mean is rounded once
        np.testing.assert_array_equal(error, mean)
    assert np.max(np.abs(error - mean) / np.abs(mean)) <= 2.0**-bits
