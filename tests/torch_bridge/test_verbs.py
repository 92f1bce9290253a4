"""`to_flax` and `to_torch`: a whole run in one call each way, paired once."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
import torch_bridge
from tests.helpers.bridge import kernels, linears, norm, values
from tests.helpers.hook_states import compressed_step, random_run
from tests.helpers.leaves import all_zero, equal
from tests.helpers.runners import first, simulate
from torch_bridge import BucketLayout, Checkpoint, CheckpointMismatch, PowerSGDRecord

UNUSED = pytest.mark.filterwarnings("ignore:The state of unused:UserWarning")
LINEARS = {"frozen": (32, 24), "unused": (24, 40), "head": (24, 10)}


def network():
    """Has a frozen layer, BatchNorm and a layer that is never used."""
    torch.manual_seed(0)
    module = torch.nn.ModuleDict()
    for name, (inputs, outputs) in LINEARS.items():
        module[name] = torch.nn.Linear(inputs, outputs)
    module["norm"] = torch.nn.BatchNorm1d(24)
    module["frozen"].requires_grad_(False)
    return module


def variables():
    """Makes the variables of the same network in Flax, all zero."""
    params = linears(**LINEARS) | {"norm": norm(24)}
    statistics = {"mean": np.zeros(24, np.float32), "var": np.zeros(24, np.float32)}
    return {"params": params, "batch_stats": {"norm": statistics}}


def arrays_of(module):
    return {name: value.numpy() for name, value in module.state_dict().items()}


def checkpoint(ranks=2):
    """Saves after some steps, in two buckets; an unused layer has NaN, as torch leaves it."""
    module = network()
    trained = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    optimizer = torch.optim.SGD(trained.items(), lr=0.1, momentum=0.9)
    for _ in range(2):
        frozen = module["frozen"](torch.randn(8, 32))
        outputs = module["head"](module["norm"](frozen))
        outputs.square().mean().backward()
        optimizer.step()
    names = [*trained]
    buckets = [names[:2:-1], names[2::-1]]
    source, _, factors = random_run(
        arrays_of(module),
        buckets,
        ranks=ranks,
        unused={"unused.weight"},
        start_powerSGD_iter=5,
    )
    assert factors.keys() == {"unused.weight", "head.weight"}
    return dataclasses.replace(source, optimizer=optimizer.state_dict())


def test_a_buffer_of_the_models_own_needs_no_more_than_ignore():
    """Nothing marks buffers or buckets in a file of torch.save; the optimizer counts."""
    module = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Linear(32, 16))
    module.register_buffer("mask", torch.ones(8, 8))
    arrays = arrays_of(module)
    layout = BucketLayout.from_order([["1.bias", "1.weight", "0.bias", "0.weight"]], arrays)
    optimizer = stepped(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    source = compressed_step(layout, arrays)
    source = dataclasses.replace(source, optimizer=optimizer.state_dict())
    like = linears(layers_0=(24, 32), layers_1=(32, 16))
    params, _, opt_state, _ = torch_bridge.to_flax(source, like, ignore="mask")
    momentum = optax.tree.get(opt_state, "trace")
    assert_array_equal(momentum["layers_1"]["bias"], np.ones(16))
    document = torch_bridge.to_torch(params, opt_state, source, ignore="mask")
    assert BucketLayout.from_json(document["layout"]) == layout
    assert document["optimizer"]["state"].keys() == {0, 1, 2, 3}
    assert_array_equal(document["state_dict"]["mask"], np.ones((8, 8)))


def stepped(optimizer):
    """Makes a step with gradients of ones."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_unused_layer_starts_afresh_and_is_named():
    with pytest.warns(UserWarning, match="unused/kernel in the file is not finite"):
        state = torch_bridge.to_flax(checkpoint(), variables()).opt_state[0]
    assert not np.any(state.residual["unused"]["kernel"])
    assert np.isfinite(state.q["unused"]["kernel"]).all()
    assert np.any(state.q["unused"]["kernel"])


def test_pairs_and_options_exclude_each_other_and_pairs_must_fit():
    source = checkpoint()
    pairs = torch_bridge.pair(source.model, variables())
    with pytest.raises(ValueError, match="`pairs` says already"):
        torch_bridge.params_from_torch(source.model, variables(), pairs=pairs, ignore="unused")
    other = {"head": {"kernel": np.zeros((9, 9))}, "x": np.zeros(1)}
    with pytest.raises(CheckpointMismatch, match="not the one that `pairs`") as error:
        torch_bridge.params_from_torch(source.model, other, pairs=pairs)
    assert error.value.missing == ("x",)
    assert len(error.value.mis_shaped) == 1


@UNUSED
def test_states_of_the_trained_parameters_alone():
    source = checkpoint()
    params = torch_bridge.to_flax(source, variables()).params
    trained = {name: leaf for name, leaf in params["params"].items() if name != "frozen"}
    pairs = torch_bridge.pair(source.model, params)
    reducer = torch_bridge.powersgd_from_torch(source, trained, pairs=pairs)
    assert set(reducer.q) == set(trained)
    sgd = optax.sgd(0.1, momentum=0.9).init(trained)
    with pytest.raises(CheckpointMismatch, match=r"must hold one jaxcomp\.PowerSGDState"):
        torch_bridge.to_torch(params, sgd, source)
    document = torch_bridge.to_torch(params, (reducer, sgd), source, pairs=pairs)
    old = source.powersgd[0].q_memory_dict[1]
    kept = np.isfinite(old)
    assert_array_equal(document["powersgd"]["q_memory_dict"][1][kept], old[kept])
    assert document["optimizer"]["state"].keys() >= source.optimizer["state"].keys()


@UNUSED
def test_a_part_of_the_paired_tree_is_refused_on_the_way_back():
    source = checkpoint()
    run = torch_bridge.to_flax(source, variables())
    with pytest.raises(CheckpointMismatch, match="'batch_stats'") as error:
        torch_bridge.to_torch(run.params["params"], run.opt_state, source, pairs=run.pairs)
    assert error.value.missing == ("norm/mean", "norm/var")


@UNUSED
def test_an_optimizer_of_the_trained_parameters_without_their_names():
    named = checkpoint()
    group = dict(named.optimizer["param_groups"][0])
    names = group.pop("param_names")
    optimizer = {**named.optimizer, "param_groups": [group]}
    source = dataclasses.replace(named, optimizer=optimizer)
    run = torch_bridge.to_flax(named, variables())
    other = torch_bridge.to_flax(source, variables())
    equal(run.opt_state, other.opt_state)
    alone = dataclasses.replace(source, layout=None, powersgd=())
    with pytest.raises(ValueError, match="param_names"):
        torch_bridge.to_torch(run.params, run.optimizer_state, alone)
    whole = torch_bridge.to_torch(run.params, run.opt_state, source)
    part = torch_bridge.to_torch(run.params, run.optimizer_state, alone, param_names=names)
    for document in (whole, part):
        back = document["optimizer"]["state"]
        for index, entry in optimizer["state"].items():
            momentum = back[index]["momentum_buffer"]
            assert_allclose(momentum, entry["momentum_buffer"], rtol=1e-6)


@UNUSED
def test_a_run_is_all_that_the_way_back_needs():
    source = checkpoint()
    group = dict(source.optimizer["param_groups"][0])
    group["params"] = group["params"][::-1]
    answers = {"param_names": group.pop("param_names")[::-1]}
    bare = dataclasses.replace(
        source,
        model=source.model | {"aux": np.ones(3, np.float32)},
        optimizer={**source.optimizer, "param_groups": [group]},
    )
    dims = torch_bridge.torch_matrix_dims
    run = torch_bridge.to_flax(bare, variables(), ignore="aux", matrix_dims=dims, **answers)
    whole = torch_bridge.to_torch(
        run.params, run.opt_state, bare, ignore="aux", matrix_dims=dims, **answers
    )
    short = torch_bridge.to_torch(run.params, run.opt_state, run)
    names = short["optimizer"]["param_groups"][0].pop("param_names")
    assert names == answers["param_names"]
    for part in ("state_dict", "optimizer", "powersgd", "errors"):
        torch.testing.assert_close(short[part], whole[part], rtol=0, atol=0, equal_nan=True)
    assert "param_names" not in bare.optimizer["param_groups"][0]
    emptied = torch_bridge.to_flax(bare, variables(), ignore="aux", consume=True, **answers)
    with pytest.raises(ValueError, match=r"pairs=run\.pairs"):
        torch_bridge.to_torch(run.params, run.opt_state, emptied)
    other = Checkpoint({"head.weight": np.zeros((9, 9))})
    with pytest.raises(CheckpointMismatch, match="not the checkpoint that `pairs`") as error:
        torch_bridge.to_torch(run.params, (), other, pairs=run.pairs)
    assert error.value.mis_shaped == ("head.weight (9, 9), paired as (10, 24)",)
    assert "norm.bias" in error.value.missing


@UNUSED
def test_what_the_torch_file_has_no_place_for_is_named():
    source = checkpoint()
    run = torch_bridge.to_flax(source, variables())
    bare = Checkpoint(source.model)
    with pytest.warns(UserWarning, match="no place for the state of PowerSGD and the optimizer"):
        document = torch_bridge.to_torch(run.params, run.opt_state, bare)
    assert document.get("optimizer") is None


def frozen_beside(make, steps=2, hook=(), **options):
    """Freezes one Linear of two; the optimizer was given both, and the buckets have one."""
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"stem": torch.nn.Linear(4, 3), "head": torch.nn.Linear(4, 3)})
    optimizer = make(module.parameters(), lr=0.1, **options)
    for _ in range(steps):
        module["head"](torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    arrays = arrays_of(module)
    layout = BucketLayout.from_order([["head.bias", "head.weight"]], arrays)
    source = Checkpoint(arrays, hook, optimizer.state_dict(), layout)
    return source, linears(stem=(4, 3), head=(4, 3))


def one_update(run):
    grads = jax.tree.map(lambda p: np.ones((2, 1, *p.shape), p.dtype), run.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = simulate("vmap", run.transformation, grads, run.opt_state, run.params)
    return first(updates), state


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_what_is_in_no_bucket_is_frozen_whatever_the_optimizer_was_given(make):
    source, like = frozen_beside(make, weight_decay=0.1)
    updates, state = one_update(torch_bridge.to_flax(source, like))
    assert all_zero(updates["stem"])
    assert np.all(updates["head"]["kernel"])
    assert np.all(updates["head"]["bias"])
    back = torch_bridge.to_torch(like, state, source)["optimizer"]
    assert not {0, 1} & back["state"].keys()
    assert back["param_groups"] == source.optimizer["param_groups"]


def schedule_counts(state):
    """Returns the steps that the schedules of a state have counted."""

    def is_schedule(node):
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree.leaves(state, is_leaf=is_schedule)
    return {int(node.count) for node in nodes if is_schedule(node)}


def test_a_schedule_goes_on_at_the_steps_of_the_optimizer():
    rate = optax.linear_schedule(1.0, 0.0, 100)
    hook = (PowerSGDRecord(1, 12, {}, {}, {}),)  # six steps would be two reductions each
    source, like = frozen_beside(torch.optim.AdamW, 6, hook)
    with pytest.warns(UserWarning, match="Adam has counted 6 steps and the hook 12"):
        run = torch_bridge.to_flax(source, like, learning_rate=rate)
    assert schedule_counts(run.opt_state) == {6}
    assert run.step == int(run.opt_state[0].count) == 12
    run = torch_bridge.to_flax(source, like, learning_rate=rate, step=7)
    assert schedule_counts(run.opt_state) == {7}
    assert run.step == 7
    equal = dataclasses.replace(source, powersgd=(PowerSGDRecord(1, 6, {}, {}, {}),))
    assert torch_bridge.to_flax(equal, like, learning_rate=rate).step == 6
    source, _ = frozen_beside(torch.optim.SGD, hook=hook)
    run = torch_bridge.to_flax(source, like, learning_rate=rate)
    assert schedule_counts(run.opt_state) == {12}
    assert run.step == 12


def test_what_was_frozen_late_keeps_its_state():
    source, like = frozen_beside(torch.optim.Adam)
    kept = {"step": np.float32(1), "exp_avg": np.ones(3, "f4"), "exp_avg_sq": np.ones(3, "f4")}
    source.optimizer["state"][1] = kept
    with pytest.warns(UserWarning, match="stem/bias: the optimizer has them and DDP's buckets do"):
        run = torch_bridge.to_flax(source, like)
    updates, state = one_update(run)
    assert not np.any(updates["stem"]["bias"])
    back = torch_bridge.to_torch(like, state, source)["optimizer"]["state"]
    assert back.keys() == {1, 2, 3}
    for name, value in kept.items():
        assert_array_equal(back[1][name], value)
    assert float(back[2]["step"]) == 3


MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize("make", [torch.optim.AdamW, MOMENTUM])
def test_frozen_or_never_used_is_asked_about_where_no_layout_says_it(make):
    for nothing in (None, BucketLayout(())):  # as to_torch writes it before compression began
        source, like = frozen_beside(make)
        source = dataclasses.replace(source, layout=nothing)
        with pytest.warns(UserWarning, match="stem/bias, stem/kernel: never used, or frozen"):
            updates, _ = one_update(torch_bridge.to_flax(source, like))
        assert np.all(updates["stem"]["kernel"])
    layout = BucketLayout.from_order([["head.weight", "head.bias"]], source.model)
    updates, _ = one_update(torch_bridge.to_flax(source, like, layout=layout))
    assert not np.any(updates["stem"]["kernel"])


def test_an_nnx_model_with_statistics():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(32, 24, rngs=rngs)
            self.norm = nnx.BatchNorm(24, rngs=rngs)

    module = torch.nn.ModuleDict({"fc": torch.nn.Linear(32, 24), "norm": torch.nn.BatchNorm1d(24)})
    optimizer = stepped(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)).state_dict()
    source = Checkpoint(arrays_of(module), (PowerSGDRecord(1, 3, {}, {}, {}),), optimizer)
    run = torch_bridge.to_flax(source, nnx.state(Model(nnx.Rngs(0))))
    fresh = run.transformation.init(nnx.filter_state(run.params, nnx.Param))
    assert jax.tree.structure(run.opt_state) == jax.tree.structure(fresh)
    document = torch_bridge.to_torch(run.params, run.opt_state, source)
    assert_array_equal(document["state_dict"]["fc.weight"], source.model["fc.weight"])
    kept = optimizer["state"]
    torch.testing.assert_close(document["optimizer"]["state"], kept, rtol=0, atol=0)


def test_without_powersgd_gradients_are_averaged_as_ddp_does():
    source = dataclasses.replace(checkpoint(), powersgd=(), hook="fp16_compress_hook")
    run = torch_bridge.to_flax(source, variables())
    params = run.params["params"]
    grads = jax.tree.map(lambda p: jnp.stack([p, -p])[:, None], params)
    updates, _ = simulate("vmap", run.transformation, grads, params=params)
    assert all_zero(updates)
    lost = dataclasses.replace(source, hook="powerSGD_hook")
    with pytest.warns(UserWarning, match="so that run.reducer is an exact average; save"):
        torch_bridge.to_flax(lost, variables())
    slots = dataclasses.asdict(checkpoint().powersgd[0])
    elsewhere = dataclasses.replace(source, extra={"hook": slots})
    with pytest.warns(UserWarning, match=r"extra\['hook'\] looks like one"):
        torch_bridge.to_flax(elsewhere, variables())


def test_the_wrapper_of_the_hook_sets_what_goes_on_the_wire(monkeypatch):
    powersgd = mock.Mock(wraps=jaxcomp.powersgd)
    monkeypatch.setattr(jaxcomp, "powersgd", powersgd)
    source = dataclasses.replace(checkpoint(), hook="bf16_compress_wrapper(powerSGD_hook)")
    with pytest.warns(UserWarning, match="not finite"):
        torch_bridge.to_flax(source, variables(), axis_name="batch")
    options = powersgd.call_args_list[0].kwargs
    assert options["comm_dtype"] == jnp.bfloat16
    assert options["axis_name"] == "batch"
    assert options["rank"] == 2


def test_torchs_cut_is_used_where_jaxcomps_is_another():
    # Few outputs, many inputs, a long kernel: the default rule would cut elsewhere.
    arrays = {"a.weight": np.zeros((4, 40, 30), np.float32)}
    source, _, factors = random_run(arrays, [["a.weight"]], rank=1, rate=1.0)
    run = torch_bridge.to_flax(source, {"a": {"kernel": np.zeros((30, 40, 4), np.float32)}})
    assert run.opt_state[0].q["a"]["kernel"].shape == (1200, 1)
    fresh = run.transformation.init(run.params)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, run.opt_state)
    document = torch_bridge.to_torch(run.params, run.opt_state, source)
    q = document["powersgd"]["q_memory_dict"][0]
    assert_array_equal(q, factors["a.weight"][1].ravel().astype("f4"))


def test_a_file_serves_any_number_of_ranks():
    source = checkpoint(ranks=2)
    for world in (1, 2, 3, 4):
        records = [source.record(rank, world) for rank in range(world)]
        means = np.mean([record.error_dict[1] for record in records], axis=0)
        assert_allclose(means, source.mean.error_dict[1], atol=1e-6)


# --- runs of which all is trained -------------------------------------------------------------

LIKE = kernels(fc=(32, 24), head=(24, 48))


def run(ranks=1, dtype=np.float32):
    """Makes a checkpoint at rank 2 with two buckets and momentum."""
    model = {"fc.weight": values(24, 32), "head.weight": values(48, 24)}
    source, _, _ = random_run(model, [["head.weight"], ["fc.weight"]], ranks=ranks, dtype=dtype)
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0, 1]}
    state = {0: {"momentum_buffer": values(24, 32)}, 1: {"momentum_buffer": values(48, 24)}}
    optimizer = {"state": state, "param_groups": [group]}
    return dataclasses.replace(source, optimizer=optimizer)


def test_clipping_is_named_where_the_file_speaks_of_it_and_has_a_place():
    silent = {"args": {"clip_grad": None, "clip_dim": 512}, "grad_norm": 0.3, "max_norm": 0}
    torch_bridge.to_flax(dataclasses.replace(run(), extra=silent), LIKE)
    source = dataclasses.replace(run(), extra={"args": {"max_grad_norm": 1.0, "lr": 0.1}})
    between = r"^max_grad_norm=1\.0 in the file.* between run.reducer and run.optim"
    with pytest.warns(UserWarning, match=between) as warned:
        there = torch_bridge.to_flax(source, LIKE)
    assert warned[0].filename == __file__
    clipped = optax.chain(there.reducer, optax.clip_by_global_norm(0.01), there.optimizer)
    state = (there.reducer_state, optax.EmptyState(), there.optimizer_state)
    assert jax.tree.structure(state) == jax.tree.structure(clipped.init(there.params))
    plain = optax.chain(there.reducer, there.optimizer).init(there.params)
    assert jax.tree.structure(there.opt_state) == jax.tree.structure(plain)


def test_a_run_prints_in_one_line():
    there = torch_bridge.to_flax(run(), LIKE)
    text = "2 leaves of 1,920 values, with optimizer, difference=None, control=None)"
    assert repr(there) == f"FlaxRun(step={there.step}, {text}"


def test_parameters_of_16_bits_are_named_where_like_has_more():
    source = Checkpoint({"fc.weight": values(24, 32, dtype=np.float16)})
    with pytest.warns(UserWarning, match="fc/kernel: in 8 or 16 bits, as in the file"):
        there = torch_bridge.to_flax(source, kernels(fc=(32, 24)))
    assert there.params["fc"]["kernel"].dtype == np.float16


def test_parameters_of_64_bits_are_named_where_jax_rounds_them():
    source = Checkpoint({"fc.weight": values(24, 32, dtype=np.float64)})
    with pytest.warns(UserWarning, match="fc/kernel: in float64, as in the file. JAX rounds"):
        torch_bridge.to_flax(source, kernels(fc=(32, 24)))


@pytest.mark.parametrize("name", ["opt", "optimizers"])
def test_an_optimizer_elsewhere_in_the_file_is_named(name):
    found = run()
    extra = {name: found.optimizer if name == "opt" else [found.optimizer], "epoch": 3}
    checkpoint = dataclasses.replace(found, optimizer=None, extra=extra)
    with pytest.warns(UserWarning, match=rf"one of checkpoint\.extra\['{name}'\]") as warned:
        there = torch_bridge.to_flax(checkpoint, LIKE)
    assert there.optimizer is None
    assert len(there.opt_state) == 1
    assert warned[0].filename == __file__
    torch_bridge.to_flax(dataclasses.replace(checkpoint, extra={"epoch": 3}), LIKE)


@pytest.mark.filterwarnings("ignore:Moments of another dtype")  # of this made-up file
@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [(np.float32, 1), (np.float16, 1), (ml_dtypes.bfloat16, 1), (ml_dtypes.bfloat16, 2)],
)
def test_what_a_dtype_keeps_of_a_run_with_several_buckets(dtype, ranks):
    source = run(ranks, dtype)
    like = jax.tree.map(lambda leaf: leaf.astype(dtype), LIKE)
    params, _, opt_state, _ = torch_bridge.to_flax(source, like)
    assert params["fc"]["kernel"].dtype == np.dtype(dtype)
    assert opt_state[0].q["fc"]["kernel"].dtype == jnp.float32
    document = torch_bridge.to_torch(params, opt_state, source)
    for name, weight in source.model.items():
        same(document["state_dict"][name], weight)
    for bucket in (0, 1):
        for name in ("p_memory_dict", "q_memory_dict"):
            same(document["powersgd"][name][bucket], getattr(source.powersgd[0], name)[bucket])
        back = document["errors"][0][bucket]
        # One rank's error comes back bit for bit, a mean is rounded once.
        same(back, source.mean.error_dict[bucket].astype(dtype))
        assert back.dtype == document["powersgd"]["q_memory_dict"][bucket].dtype


def same(tensor, array):
    """Asserts that a tensor of torch has these values and this dtype."""
    assert str(tensor.dtype) == f"torch.{array.dtype}"
    assert_array_equal(tensor.float(), array.astype(np.float32))


def test_the_way_back_is_proved_by_the_torch_module():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    x = torch.randn(3, 6)
    example = ((x.numpy(),), module(x).detach().numpy())
    source = Checkpoint(arrays_of(module), example=example)

    def apply(params, x):
        one = params["one"]
        two = params["two"]
        hidden = jnp.tanh(x @ one["kernel"] + one["bias"])
        return hidden @ two["kernel"] + two["bias"]

    run = torch_bridge.to_flax(source, linears(one=(6, 6), two=(6, 6)), apply=apply)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, run.params)
    before = module[0].weight.clone()
    back = functools.partial(torch_bridge.to_torch, moved, (), source, pairs=run.pairs)
    document = back(apply=apply, module=module)
    assert torch.equal(module[0].weight, before)
    assert not torch.equal(document["state_dict"]["0.weight"], before)
    other = torch.nn.Sequential(module[0], torch.nn.ReLU(), module[2])
    with pytest.raises(CheckpointMismatch, match="gives other outputs than the Flax model"):
        back(apply=apply, module=other)
    with pytest.raises(ValueError, match="save_checkpoint"):
        back(module=module)


def test_separate_kernels_for_a_packed_one_are_told_the_way():
    model = {f"attention.{name}.weight": values(8, 8) for name in "qkv"}
    with pytest.raises(CheckpointMismatch, match=r"join them with np\.concatenate") as error:
        torch_bridge.params_from_torch(model, kernels(qkv=(8, 24)))
    assert error.value.missing == ("qkv/kernel (8, 24)",)
    with pytest.raises(CheckpointMismatch) as error:
        torch_bridge.params_from_torch(model, kernels(qkv=(8, 25)))
    assert "np.concatenate" not in str(error.value)


def test_layers_that_flax_stacks_are_told_the_way():
    names = [f"experts.{k}.{name}.weight" for k in range(4) for name in ("up", "gate")]
    like = {"experts": kernels(up=(4, 8, 8), gate=(4, 8, 8))}
    model = {name: values(8, 8) for name in names}
    with pytest.raises(CheckpointMismatch, match=r"nn\.scan or nn\.vmap") as error:
        torch_bridge.params_from_torch(model, like)
    assert "np.stack(leaves)" in error.value.message
    assert "np.concatenate" not in error.value.message


def test_an_example_without_the_flax_model_is_not_left_out_in_silence():
    with pytest.raises(ValueError, match="`apply` is missing"):
        torch_bridge.to_flax(run(), LIKE, example=((values(2, 32),), values(2, 48)))
