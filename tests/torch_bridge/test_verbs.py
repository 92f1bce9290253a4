"""`to_flax` and `to_torch`: a whole run in one call each way, paired once."""

from __future__ import annotations

import argparse
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

import jaxcomp
import torch_bridge
from torch_bridge import BucketLayout, Checkpoint, CheckpointMismatch, PowerSGDRecord
from torch_bridge._hook.buckets import pack

pytestmark = pytest.mark.torch


class Network(torch.nn.Module):
    """BatchNorm, a flatten, a frozen layer and one that is never used."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3)
        self.norm = torch.nn.BatchNorm2d(16)
        self.fc1 = torch.nn.Linear(16 * 2 * 2, 32)
        self.unused = torch.nn.Linear(24, 40)
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(self.frozen(torch.relu(self.fc1(x))))


class FlaxNetwork(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(16, (3, 3), padding="VALID", name="conv")(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, name="norm")(x))
        x = nn.relu(nn.Dense(32, name="fc1")(x.reshape(x.shape[0], -1)))
        nn.Dense(40, name="unused")(jnp.zeros((1, 24)))
        return nn.Dense(10, name="head")(nn.Dense(32, name="frozen")(x))


# What neither names nor shapes of the two tell.
ANSWERS = {"flatten": {"fc1": (16, 2, 2)}, "conv1d": ""}


def variables():
    return jax.eval_shape(FlaxNetwork().init, jax.random.key(0), jnp.zeros((1, 4, 4, 3)))


def checkpoint(algorithm="sgd", ranks=2, **fields):
    """After some steps, with two buckets, and NaN where torch leaves it for an unused layer."""
    torch.manual_seed(0)
    model = Network()
    trained = [p for p in model.parameters() if p.requires_grad]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    }
    optimizer = kinds[algorithm](zip(names, trained, strict=True))
    for _ in range(2):
        model(torch.randn(8, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    layout = BucketLayout.from_order([names[:2:-1], names[2::-1]], arrays)
    rng = np.random.default_rng(1)
    factors = {
        slot.entry.name: (
            rng.standard_normal((slot.rows, slot.rank)).astype("f4"),
            rng.standard_normal((slot.cols, slot.rank)).astype("f4"),
        )
        for slot in layout.factor_slots(2, 2.0)
    }
    assert {"unused.weight", "fc1.weight", "conv.weight"} <= factors.keys()
    factors["unused.weight"] = tuple(np.full_like(f, np.nan) for f in factors["unused.weight"])
    records = []
    for _ in range(ranks):
        errors = {n: rng.standard_normal(arrays[n].shape).astype("f4") for n in names}
        errors["unused.weight"][:] = np.nan
        buffers = pack(layout, 2, 2.0, errors, factors)
        records.append(PowerSGDRecord(2, 20, *buffers, start_powerSGD_iter=5))
    state = optimizer.state_dict()
    return Checkpoint(arrays, tuple(records), state, layout, world_size=ranks, **fields)


@pytest.mark.filterwarnings("ignore:The state of unused:UserWarning")
@pytest.mark.parametrize("algorithm", ["sgd", "adamw"])
def test_a_whole_run_there_and_back(algorithm, tmp_path):
    source = checkpoint(algorithm)
    params, transformation, opt_state, step = torch_bridge.to_flax(source, variables(), **ANSWERS)
    assert step == 20
    fresh = jax.eval_shape(transformation.init, params["params"])
    assert jax.tree.structure(opt_state) == jax.tree.structure(fresh)
    for mine, theirs in zip(jax.tree.leaves(opt_state), jax.tree.leaves(fresh), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    x = torch.randn(2, 3, 4, 4)
    model = Network()
    model.load_state_dict({n: torch.from_numpy(v) for n, v in source.model.items()})
    ours = FlaxNetwork().apply(params, jnp.asarray(x.permute(0, 2, 3, 1).numpy()))
    np.testing.assert_allclose(ours, model.eval()(x).detach(), atol=1e-5)

    grads = jax.tree.map(lambda p: np.full((2, *p.shape), 0.01, p.dtype), params["params"])
    update = jax.vmap(transformation.update, in_axes=(0, None, None), axis_name="data")
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        updates, _ = jax.jit(update)(grads, opt_state, params["params"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    assert not np.any(updates["frozen"]["kernel"])

    statistics = jax.tree.map(lambda x: x + 1, params["batch_stats"])
    path = tmp_path / "continued.pt"
    moved = {**params, "batch_stats": statistics}
    document = torch_bridge.to_torch(moved, opt_state, source, path=path, **ANSWERS)
    assert torch.load(path, weights_only=True).keys() == document.keys()
    Network().load_state_dict(document["state_dict"])
    mean = document["state_dict"]["norm.running_mean"]
    np.testing.assert_array_equal(mean, source.model["norm.running_mean"] + 1)
    back = torch_bridge.load(path)
    assert (back.layout, back.world_size) == (source.layout, 2)
    for name in ("fc1.weight", "conv.weight", "head.bias", "frozen.weight"):
        np.testing.assert_array_equal(back.model[name], source.model[name])
    error = back.mean_errors(back.layout)
    wanted = source.mean_errors(source.layout)
    np.testing.assert_array_equal(error["fc1.weight"], wanted["fc1.weight"])
    assert not error["unused.weight"].any()
    for index, entry in source.optimizer["state"].items():
        for key, value in entry.items():
            np.testing.assert_allclose(back.optimizer["state"][index][key], value, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The state of unused:UserWarning")
def test_what_else_the_file_holds_comes_back(tmp_path):
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    found = {
        "scheduler": scheduler.state_dict(),
        "ema": {"decay": 0.9, "shadow": [torch.ones(3)]},
        "args": argparse.Namespace(lr=0.1),
        "comm_hook": powerSGD_hook,
        "epoch": 3,
    }
    torch.save({"state_dict": model.state_dict(), **found}, tmp_path / "source.pt")
    read = torch_bridge.load(tmp_path / "source.pt")
    assert "comm_hook" not in read.extra
    read.extra["args"]["activation"] = torch.relu
    params = torch_bridge.to_flax(read, variables(), **ANSWERS).params
    with pytest.warns(UserWarning, match=r"left out: args\.activation\. Add them in torch"):
        torch_bridge.to_torch(params, (), read, path=tmp_path / "back.pt", **ANSWERS)
    extra = torch.load(tmp_path / "back.pt", weights_only=True)["extra"]
    assert extra["scheduler"] == found["scheduler"]
    assert extra["args"] == {"lr": 0.1}
    assert extra["epoch"] == 3
    np.testing.assert_array_equal(extra["ema"]["shadow"][0], np.ones(3))


def test_a_buffer_of_the_models_own_needs_no_more_than_ignore():
    """A file of torch.save marks neither buffers nor buckets; the optimizer counts parameters."""
    model = torch.nn.Module()
    model.fc1, model.fc2 = torch.nn.Linear(24, 32), torch.nn.Linear(32, 16)
    model.register_buffer("mask", torch.ones(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    layout = BucketLayout.from_order([["fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]], arrays)
    rng, q = np.random.default_rng(0), np.linalg.qr
    factors = {
        slot.entry.name: (
            q(rng.standard_normal((slot.rows, slot.rank)))[0].astype("f4"),
            rng.standard_normal((slot.cols, slot.rank)).astype("f4"),
        )
        for slot in layout.factor_slots(2, 2.0)
    }
    own = {name: rng.standard_normal(arrays[name].shape).astype("f4") for name in layout.names}
    records = []
    for sign in (1, -1):  # what is not compressed cancels, and P has taken its part of the rest
        left = {n: own[n] - factors[n][0] @ (factors[n][0].T @ own[n]) for n in factors}
        errors = {name: left.get(name, sign * own[name]) for name in own}
        records.append(PowerSGDRecord(2, 20, *pack(layout, 2, 2.0, errors, factors)))
    source = Checkpoint(arrays, tuple(records), optimizer.state_dict(), world_size=2)
    like = {
        "fc1": {"kernel": np.zeros((24, 32), "f4"), "bias": np.zeros(32, "f4")},
        "fc2": {"kernel": np.zeros((32, 16), "f4"), "bias": np.zeros(16, "f4")},
    }
    params, _, opt_state, _ = torch_bridge.to_flax(source, like, ignore="mask")
    momentum = optax.tree_utils.tree_get(opt_state, "trace")
    np.testing.assert_array_equal(momentum["fc2"]["bias"], np.ones(16))
    document = torch_bridge.to_torch(params, opt_state, source, ignore="mask")
    assert BucketLayout.from_json(document["layout"]) == layout
    assert document["optimizer"]["state"].keys() == {0, 1, 2, 3}
    np.testing.assert_array_equal(document["state_dict"]["mask"], np.ones((8, 8)))


def test_an_unused_layer_starts_afresh_and_is_named():
    with pytest.warns(UserWarning, match="unused/kernel in the file is not finite"):
        state = torch_bridge.to_flax(checkpoint(), variables(), **ANSWERS).opt_state[0]
    assert not np.any(state.residual["unused"]["kernel"])
    assert np.isfinite(state.q["unused"]["kernel"]).all()
    assert np.any(state.q["unused"]["kernel"])


def test_pairs_and_options_exclude_each_other_and_pairs_must_fit():
    source = checkpoint()
    pairs = torch_bridge.pair(source.model, variables(), **ANSWERS)
    with pytest.raises(ValueError, match="`pairs` says already"):
        torch_bridge.params_from_torch(
            source.model, variables(), pairs=pairs, flatten={"fc1": (16, 2, 2)}
        )
    with pytest.raises(CheckpointMismatch, match="not the one that `pairs`") as error:
        torch_bridge.params_from_torch(
            source.model, {"fc1": {"kernel": np.zeros((9, 9))}, "x": np.zeros(1)}, pairs=pairs
        )
    assert error.value.missing == ("x",)
    assert len(error.value.mis_shaped) == 1


@pytest.mark.filterwarnings("ignore:The state of unused:UserWarning")
def test_states_of_the_trained_parameters_alone():
    source = checkpoint()
    run = torch_bridge.to_flax(source, variables(), **ANSWERS)
    trained = {name: leaf for name, leaf in run.params["params"].items() if name != "frozen"}
    pairs = torch_bridge.pair(source.model, run.params, **ANSWERS)
    reducer = torch_bridge.powersgd_from_torch(source, trained, pairs=pairs)
    assert set(reducer.q) == set(trained)
    sgd = optax.sgd(0.1, momentum=0.9).init(trained)
    document = torch_bridge.to_torch(run.params, (reducer, sgd), source, pairs=pairs)
    old = source.powersgd[0].q_memory_dict[0]
    kept = np.isfinite(old)
    np.testing.assert_array_equal(document["powersgd"]["q_memory_dict"][0][kept], old[kept])
    assert document["optimizer"]["state"].keys() >= source.optimizer["state"].keys()


@pytest.mark.filterwarnings("ignore:The state of unused:UserWarning")
def test_running_statistics_are_neither_lost_nor_stale():
    source, alone = checkpoint(), variables()["params"]
    with pytest.raises(CheckpointMismatch, match="no place for running statistics"):
        torch_bridge.to_flax(source, alone, **ANSWERS)
    ignore = ".*running_(mean|var)"
    params, _, opt_state, _ = torch_bridge.to_flax(source, alone, ignore=ignore, **ANSWERS)
    with pytest.raises(CheckpointMismatch, match="no place for running statistics"):
        torch_bridge.to_torch(params, opt_state, source, **ANSWERS)
    document = torch_bridge.to_torch(params, opt_state, source, ignore=ignore, **ANSWERS)
    assert document["state_dict"].keys() == source.model.keys()


def test_an_optimizer_of_the_trained_parameters_without_their_names():
    named = checkpoint()
    group = dict(named.optimizer["param_groups"][0])
    names = group.pop("param_names")
    optimizer = {**named.optimizer, "param_groups": [group]}
    source = dataclasses.replace(named, optimizer=optimizer)
    with pytest.warns(UserWarning, match="not finite"):
        runs = [torch_bridge.to_flax(one, variables(), **ANSWERS) for one in (named, source)]
    for mine, theirs in zip(*(jax.tree.leaves(run.opt_state) for run in runs), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    params, _, opt_state, _ = runs[0]
    unknown = dataclasses.replace(source, layout=None)
    with pytest.raises(ValueError, match="param_names"):
        torch_bridge.to_torch(
            params, opt_state, dataclasses.replace(unknown, powersgd=()), **ANSWERS
        )
    alone = dataclasses.replace(unknown, powersgd=())
    returned = [
        torch_bridge.to_torch(params, opt_state, source, **ANSWERS)["optimizer"],
        torch_bridge.to_torch(params, opt_state, alone, param_names=names, **ANSWERS)["optimizer"],
    ]
    for back in returned:
        assert back["state"].keys() >= optimizer["state"].keys()
        for index, entry in optimizer["state"].items():
            found = back["state"][index]["momentum_buffer"]
            np.testing.assert_allclose(found, entry["momentum_buffer"], rtol=1e-6)


def frozen_beside(make, steps=2, **fields):
    """One Linear of two is frozen, and the optimizer was given both; the buckets have one."""
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"stem": torch.nn.Linear(4, 3), "head": torch.nn.Linear(4, 3)})
    optimizer = make(module.parameters())
    for _ in range(steps):
        module["head"](torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    layout = BucketLayout.from_order([["head.bias", "head.weight"]], arrays)
    fields = {"optimizer": optimizer.state_dict(), "layout": layout, **fields}
    source = Checkpoint(arrays, **fields)
    leaves = {"kernel": np.zeros((4, 3), "f4"), "bias": np.zeros(3, "f4")}
    return source, {"stem": leaves, "head": leaves}


def one_update(run):
    grads = jax.tree.map(lambda p: np.ones((2, *p.shape), p.dtype), run.params)
    update = jax.vmap(run.transformation.update, in_axes=(0, None, None), axis_name="data")
    with jax.numpy_dtype_promotion("standard"):
        updates, state = update(grads, run.opt_state, run.params)
    first = jax.tree.map(lambda leaf: leaf[0], updates)
    return first, jax.tree.map(lambda leaf: leaf[0], state)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    ],
)
def test_what_is_in_no_bucket_is_frozen_whatever_the_optimizer_was_given(make):
    source, like = frozen_beside(make)
    updates, state = one_update(torch_bridge.to_flax(source, like))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates["stem"]))
    assert all(np.all(leaf) for leaf in jax.tree.leaves(updates["head"]))
    back = torch_bridge.to_torch(like, state, source)["optimizer"]
    assert not {0, 1} & back["state"].keys()
    assert back["param_groups"] == source.optimizer["param_groups"]


def schedule_counts(state):
    def is_one(node):
        return isinstance(node, optax.ScaleByScheduleState)

    return {int(node.count) for node in jax.tree.leaves(state, is_leaf=is_one) if is_one(node)}


def test_a_schedule_goes_on_at_the_steps_of_the_optimizer():
    rate = optax.linear_schedule(1.0, 0.0, 100)
    hook = (PowerSGDRecord(1, 12, {}, {}, {}),)  # six steps would be two reductions each
    source, like = frozen_beside(lambda p: torch.optim.AdamW(p, lr=0.1), 6, powersgd=hook)
    with pytest.warns(UserWarning, match="Adam has counted 6 steps and the hook 12"):
        run = torch_bridge.to_flax(source, like, learning_rate=rate)
    assert (schedule_counts(run.opt_state), run.step, int(run.opt_state[0].count)) == ({6}, 12, 12)
    run = torch_bridge.to_flax(source, like, learning_rate=rate, step=7)
    assert (schedule_counts(run.opt_state), run.step) == ({7}, 7)
    equal = dataclasses.replace(source, powersgd=(PowerSGDRecord(1, 6, {}, {}, {}),))
    assert torch_bridge.to_flax(equal, like, learning_rate=rate).step == 6
    source, _ = frozen_beside(lambda p: torch.optim.SGD(p, lr=0.1), powersgd=hook)
    run = torch_bridge.to_flax(source, like, learning_rate=rate)
    assert (schedule_counts(run.opt_state), run.step) == ({12}, 12)


def test_what_was_frozen_late_keeps_its_state():
    source, like = frozen_beside(lambda p: torch.optim.Adam(p, lr=0.1))
    kept = {"step": np.float32(1), "exp_avg": np.ones(3, "f4"), "exp_avg_sq": np.ones(3, "f4")}
    source.optimizer["state"][1] = kept
    with pytest.warns(UserWarning, match="stem/bias: the optimizer has them and DDP's buckets do"):
        run = torch_bridge.to_flax(source, like)
    updates, state = one_update(run)
    assert not np.any(updates["stem"]["bias"])
    back = torch_bridge.to_torch(like, state, source)["optimizer"]["state"]
    assert back.keys() == {1, 2, 3}
    for name, value in kept.items():
        np.testing.assert_array_equal(back[1][name], value)
    assert float(back[2]["step"]) == 3


def test_frozen_or_never_used_is_asked_about_where_no_layout_says_it():
    for nothing in (None, BucketLayout(())):  # as to_torch writes it before compression began
        source, like = frozen_beside(lambda p: torch.optim.AdamW(p, lr=0.1), layout=nothing)
        with pytest.warns(UserWarning, match="stem/bias, stem/kernel: never used, or frozen"):
            updates, _ = one_update(torch_bridge.to_flax(source, like))
        assert np.all(updates["stem"]["kernel"])
    layout = BucketLayout.from_order([["head.weight", "head.bias"]], source.model)
    updates, _ = one_update(torch_bridge.to_flax(source, like, layout=layout))
    assert not np.any(updates["stem"]["kernel"])


def test_tied_weights_stay_one_tensor():
    weight = np.random.default_rng(0).standard_normal((48, 24)).astype("f4")
    like = Checkpoint({"embed.weight": weight, "head.weight": weight})
    params = {"embed": {"embedding": np.zeros((48, 24), np.float32)}}
    document = torch_bridge.to_torch(params, (), like)
    one, other = document["state_dict"].values()
    assert one.data_ptr() == other.data_ptr()
    assert not one.any()


def test_an_nnx_model_with_statistics():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(32, 24, rngs=rngs)
            self.norm = nnx.BatchNorm(24, rngs=rngs)

    torch.manual_seed(0)
    module = torch.nn.Sequential()
    module.fc, module.norm = torch.nn.Linear(32, 24), torch.nn.BatchNorm1d(24)
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9).state_dict()
    source = Checkpoint(arrays, (PowerSGDRecord(1, 3, {}, {}, {}),), optimizer)
    state = nnx.state(Model(nnx.Rngs(0)))
    run = torch_bridge.to_flax(source, state)
    fresh = run.transformation.init(nnx.filter_state(run.params, nnx.Param))
    assert jax.tree.structure(run.opt_state) == jax.tree.structure(fresh)
    document = torch_bridge.to_torch(run.params, run.opt_state, source)
    np.testing.assert_array_equal(document["state_dict"]["fc.weight"], arrays["fc.weight"])


def test_without_powersgd_gradients_are_averaged_as_ddp_does():
    source = dataclasses.replace(checkpoint(), powersgd=(), hook="fp16_compress_hook")
    run = torch_bridge.to_flax(source, variables(), **ANSWERS)
    grads = jax.tree.map(lambda p: jnp.stack([p, -p]), run.params["params"])
    update = jax.vmap(run.transformation.update, in_axes=(0, None, None), axis_name="data")
    state = run.transformation.init(run.params["params"])
    updates, _ = jax.jit(update)(grads, state, run.params["params"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


def test_the_wrapper_of_the_hook_sets_what_goes_on_the_wire(monkeypatch):
    seen = {}
    real = jaxcomp.powersgd
    monkeypatch.setattr(jaxcomp, "powersgd", lambda **kwargs: seen.update(kwargs) or real(**kwargs))
    source = checkpoint(hook="bf16_compress_wrapper(powerSGD_hook)")
    with pytest.warns(UserWarning, match="not finite"):
        torch_bridge.to_flax(source, variables(), **ANSWERS, axis_name="batch")
    assert (seen["comm_dtype"], seen["axis_name"], seen["rank"]) == (jnp.bfloat16, "batch", 2)


def test_torchs_cut_is_used_where_jaxcomps_is_another():
    # Few outputs, many inputs, a long kernel: the default rule would cut elsewhere.
    arrays = {"a.weight": np.zeros((4, 40, 30), np.float32)}
    layout = BucketLayout.from_order([["a.weight"]], arrays)
    factors = {"a.weight": (np.zeros((4, 1), "f4"), np.ones((1200, 1), "f4"))}
    buffers = pack(layout, 1, 1.0, {"a.weight": arrays["a.weight"]}, factors)
    record = PowerSGDRecord(1, 20, *buffers, min_compression_rate=1.0)
    source = Checkpoint(arrays, (record,), layout=layout, world_size=1)
    run = torch_bridge.to_flax(source, {"a": {"kernel": np.zeros((30, 40, 4), np.float32)}})
    assert run.opt_state[0].q["a"]["kernel"].shape == (1200, 1)
    fresh = run.transformation.init(run.params)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, run.opt_state)
    document = torch_bridge.to_torch(run.params, run.opt_state, source)
    assert document["powersgd"]["q_memory_dict"][0].all()


def test_a_run_without_its_reducer_is_refused():
    source = checkpoint()
    with pytest.warns(UserWarning, match="not finite"):
        run = torch_bridge.to_flax(source, variables(), **ANSWERS)
    with pytest.raises(CheckpointMismatch, match=r"must hold one jaxcomp\.PowerSGDState"):
        torch_bridge.to_torch(run.params, run.opt_state[1], source, **ANSWERS)


def test_a_file_serves_any_number_of_ranks():
    source = checkpoint(ranks=2)
    for world in (1, 2, 3, 4):
        records = [source.record(rank, world) for rank in range(world)]
        means = np.mean([record.error_dict[1] for record in records], axis=0)
        np.testing.assert_allclose(means, source.mean_error(1), atol=1e-6)


# --- runs with one bucket ---------------------------------------------------------------------


def values(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(dtype)


def kernels(**shapes):
    return {name: {"kernel": np.zeros(shape, np.float32)} for name, shape in shapes.items()}


def model_and_tree():
    model = {"fc.weight": values(24, 32), "head.weight": values(48, 24)}
    return model, kernels(fc=(32, 24), head=(24, 48))


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


def test_a_run_of_which_outputs_become_a_map_there_and_back():
    model, like = generator()
    checkpoint = run(model)
    options = {"unflatten": {"fc": (8, 4, 4)}}
    there = torch_bridge.to_flax(checkpoint, like, **options)
    back = torch_bridge.to_torch(there.params, there.opt_state, checkpoint, **options)
    for number, state in checkpoint.optimizer["state"].items():
        mine = back["optimizer"]["state"][number]["momentum_buffer"]
        np.testing.assert_array_equal(mine, state["momentum_buffer"])
    pairs = torch_bridge.pair(model, like, **options)
    (found,) = [p for p in pairs if p.torch_name == "fc.weight"]
    row, col = found.matrix_order()
    weight = model["fc.weight"]
    np.testing.assert_array_equal(found.to_flax(weight).T, weight[row][:, col])
    error = checkpoint.mean_errors(checkpoint.layout)
    mine = there.reducer_state.residual["fc"]["kernel"]
    np.testing.assert_array_equal(mine, found.to_flax(error["fc.weight"]))


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


@pytest.mark.parametrize("name", ["opt", "optimizers", "optimizer_states"])
def test_an_optimizer_elsewhere_in_the_file_is_named(name):
    model, like = model_and_tree()
    found = run(model)
    extra = {name: found.optimizer if name == "opt" else [found.optimizer], "epoch": 3}
    checkpoint = dataclasses.replace(found, optimizer=None, extra=extra)
    with pytest.warns(UserWarning, match=f"'{name}'. looks like one") as warned:
        there = torch_bridge.to_flax(checkpoint, like)
    assert there.optimizer is None
    assert len(there.opt_state) == 1
    assert warned[0].filename == __file__
    torch_bridge.to_flax(dataclasses.replace(checkpoint, extra={"epoch": 3}), like)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("dtype", "bits"), [(ml_dtypes.bfloat16, 8), (np.float16, 11)])
def test_what_16_bits_keep_of_a_run(dtype, bits, ranks):
    model, like = model_and_tree()
    source = run(model, ranks, dtype)
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
