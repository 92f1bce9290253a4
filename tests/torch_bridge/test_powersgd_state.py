"""PowerSGD states made by hand, there and back; those of real jobs are in test_whole_run.py."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
import torch_bridge
from tests.helpers.hook_states import random_run
from tests.helpers.runners import first
from torch_bridge import (
    BucketLayout,
    Checkpoint,
    CheckpointMismatch,
    PowerSGDRecord,
    optimizer_from_torch,
    optimizer_to_torch,
    powersgd_from_torch,
    powersgd_to_torch,
)
from torch_bridge.types import Packing, Pair

MODEL = {"a.weight": np.zeros((24, 32), np.float32)}
PARAMS = {"a": {"kernel": jnp.zeros((32, 24))}}
LAYOUT = BucketLayout.from_order([["a.weight"]], MODEL)


def back_of(state, params, checkpoint, **options):
    return powersgd_to_torch(state, params, layout=checkpoint.layout, like=checkpoint, **options)


def same_q(one, other):
    assert_array_equal(one.q_memory_dict[0].numpy(), other.q_memory_dict[0])


def test_tied_parameters_have_one_state():
    weight = np.zeros((48, 24), np.float32)
    checkpoint, errors, factors = random_run({"embed.weight": weight}, [["embed.weight"]])
    both = {"embed.weight": weight, "head.weight": weight}
    params = {"embed": {"embedding": jnp.zeros((48, 24))}}
    state = powersgd_from_torch(dataclasses.replace(checkpoint, model=both), params)
    found = state.residual["embed"]["embedding"]
    assert_allclose(found, errors["embed.weight"], rtol=1e-6)
    q = factors["embed.weight"][1].astype(np.float32)
    assert_array_equal(state.q["embed"]["embedding"], q)


def test_packed_attention_shares_q_and_says_so():
    model = torch.nn.MultiheadAttention(32, 4).state_dict()
    checkpoint, errors, factors = random_run(model, [list(model)[::-1]])
    attention = nn.MultiHeadDotProductAttention(num_heads=4)
    params = attention.init(jax.random.key(0), jnp.zeros((1, 3, 32)))["params"]
    with pytest.warns(UserWarning, match=r"in_proj_weight.*next steps differ"):
        state = powersgd_from_torch(checkpoint, params)
    before = PowerSGDRecord(2, 5, {}, {}, {})  # without a Q there is nothing to say
    powersgd_from_torch(dataclasses.replace(checkpoint, powersgd=(before,)), params)
    q = np.asarray(factors["in_proj_weight"][1], np.float32)
    for part in ("query", "key", "value"):
        assert_array_equal(state.q[part]["kernel"], q)
    key = errors["in_proj_weight"][32:64].T.reshape(32, 4, 8)
    assert_allclose(state.residual["key"]["kernel"], key, rtol=1e-6)
    same_q(back_of(state, params, checkpoint), checkpoint.powersgd[0])
    state.q["key"]["kernel"] += 1
    with pytest.warns(UserWarning, match="different Q factors"):
        back_of(state, params, checkpoint)


def test_different_factors_of_all_packed_tensors_are_one_warning():
    model = torch.nn.ModuleDict({name: torch.nn.MultiheadAttention(32, 4) for name in "ab"})
    tensors = model.state_dict()
    checkpoint, _, _ = random_run(tensors, [list(tensors)[::-1]])
    attention = nn.MultiHeadDotProductAttention(num_heads=4)
    params = attention.init(jax.random.key(0), jnp.zeros((1, 3, 32)))["params"]
    with pytest.warns(UserWarning, match="next steps differ"):
        state = powersgd_from_torch(checkpoint, {"a": params, "b": params})
    for name in "ab":
        state.q[name]["key"]["kernel"] += 1
    with pytest.warns(UserWarning, match="different Q factors") as warned:
        back_of(state, {"a": params, "b": params}, checkpoint)
    (line,) = map(str, [one.message for one in warned])
    assert "a.in_proj_weight" in line
    assert "b.in_proj_weight" in line


def packed_by_head(*names):
    """Pairs a Linear that packs query, key and value of 4 heads, (4, 3, 8) rows, with kernels."""
    pairs = []
    params = {}
    columns = 96 // len(names)
    for place, name in enumerate(names):
        path = (name, "kernel")
        pair = Pair("qkv.weight", (96, 32), path, (32, columns), (columns, 32), (1, 0))
        if len(names) > 1:
            pair = dataclasses.replace(pair, rows=(32 * place, 32 * place + 32))
        pairs.append(dataclasses.replace(pair, packing=Packing((0, 1, 2), 4, 1)))
        params[name] = {"kernel": jnp.zeros((32, columns))}
    return pairs, params


@pytest.mark.parametrize("names", [("q", "k", "v"), ("qkv",)])
@pytest.mark.filterwarnings("ignore:.*next steps differ")
def test_residuals_and_moments_of_heads_that_are_packed_one_by_one(names):
    pairs, params = packed_by_head(*names)
    module = torch.nn.ModuleDict({"qkv": torch.nn.Linear(32, 96, bias=False)})
    model = module.state_dict()
    checkpoint, errors, factors = random_run(model, [["qkv.weight"]])
    state = powersgd_from_torch(checkpoint, params, pairs=pairs)
    by_head = errors["qkv.weight"].reshape(4, 3, 8, 32)
    by_part = by_head.swapaxes(0, 1).reshape(96, 32)
    residual = np.concatenate([state.residual[name]["kernel"].T for name in names])
    assert_allclose(residual, by_part, rtol=1e-6)
    for name in names:
        q = np.asarray(factors["qkv.weight"][1], np.float32)
        assert_array_equal(state.q[name]["kernel"], q)
    back = back_of(state, params, checkpoint, pairs=pairs)
    same_q(back, checkpoint.powersgd[0])
    error = back.error_dict[0].numpy().reshape(96, 32)
    assert_allclose(error, errors["qkv.weight"], rtol=1e-6)

    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    gradient = errors["qkv.weight"].astype(np.float32)
    module["qkv"].weight.grad = torch.from_numpy(gradient)
    optimizer.step()
    before = optimizer.state_dict()
    _, state = optimizer_from_torch(before, model, params, pairs=pairs)
    trace = state[0].trace
    moments = np.concatenate([trace[name]["kernel"].T for name in names])
    assert_allclose(moments, by_part, rtol=1e-6)
    after = optimizer_to_torch(state, params, before, model, pairs=pairs)
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("off", "option", "empty", "said"),
    [
        ("warm_start", "warm_start", ("p_memory_dict", "q_memory_dict"), "q of shape None"),
        ("use_error_feedback", "error_feedback", ("error_dict",), "residual of shape None"),
    ],
)
def test_states_without_factors_or_errors(off, option, empty, said):
    whole, _, _ = random_run(MODEL, [["a.weight"]])
    checkpoint, _, _ = random_run(MODEL, [["a.weight"]], **{off: False})
    record = dataclasses.replace(checkpoint.powersgd[0], **{name: {} for name in empty})
    checkpoint = dataclasses.replace(checkpoint, powersgd=(record,))
    state = powersgd_from_torch(checkpoint, PARAMS)
    tx = jaxcomp.powersgd(2, axis_name="data", **{option: False})
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
    back = back_of(state, PARAMS, checkpoint)
    for name in (*empty, off):
        assert not getattr(back, name)
    assert back.use_error_feedback != back.warm_start
    with pytest.raises(CheckpointMismatch, match=said):
        back_of(state, PARAMS, whole)


def test_saved_before_compression_began():
    record = PowerSGDRecord(2, 5, {}, {}, {}, start_powerSGD_iter=100)
    checkpoint = Checkpoint(MODEL, (record,), layout=LAYOUT)
    state = powersgd_from_torch(checkpoint, PARAMS)
    assert int(state.count) == 5
    assert state.q["a"]["kernel"].shape == (32, 2)
    assert not np.any(state.residual["a"]["kernel"])
    back = back_of(state, PARAMS, checkpoint)
    assert back.iter == 5
    assert back.start_powerSGD_iter == 100
    assert back.q_memory_dict == {}
    later = state._replace(count=jnp.int32(50))
    back = back_of(later, PARAMS, checkpoint)
    assert back.iter == 50
    assert back.start_powerSGD_iter == 100
    assert back.q_memory_dict[0].shape == (64,)


def test_compression_begins_when_buckets_have_their_order():
    """DDP's first iteration has other buckets, so the hook must not make factors for them."""
    for steps, start in ((999, 1_000), (1_000, 1_002)):
        record = PowerSGDRecord(2, steps, {}, {}, {}, start_powerSGD_iter=1_000)
        assert torch_bridge.state_from_record(record).start_powerSGD_iter == start


def state_after(steps, rank):
    """Makes the initial state of `PARAMS`, with another count."""
    state = jaxcomp.powersgd(rank, axis_name="data").init(PARAMS)
    return state._replace(count=jnp.int32(steps))


def test_a_state_born_in_jax():
    state = state_after(7, rank=3)
    back = powersgd_to_torch(state, PARAMS, layout=LAYOUT)
    assert back.matrix_approximation_rank == 3
    assert back.orthogonalization_epsilon == 0
    assert back.iter == 7
    assert back.start_powerSGD_iter == 9
    assert_array_equal(back.q_memory_dict[0].numpy(), state.q["a"]["kernel"].ravel())


def test_parts_of_a_packed_matrix_may_be_too_small_to_be_compressed_one_by_one():
    # 32 x 8 at rank 2 is compressed, and the four gates of 8 x 8 are not.
    cell = torch.nn.LSTMCell(24, 8)
    model = {name: value.numpy() for name, value in cell.state_dict().items()}
    checkpoint, *_ = random_run(model, [[*model]])
    carry = (jnp.zeros(8), jnp.zeros(8))
    params = nn.OptimizedLSTMCell(8).init(jax.random.key(0), carry, jnp.zeros(24))
    with (
        pytest.warns(UserWarning, match="next steps differ"),
        pytest.warns(UserWarning, match=r"hf/kernel.*averages them exactly"),
    ):
        run = torch_bridge.to_flax(checkpoint, params)

    def update(gradients):
        return run.reducer.update(gradients, run.reducer_state)

    gradients = jax.tree.map(lambda leaf: jnp.ones((1, *leaf.shape)), run.params["params"])
    updates, states = jax.vmap(update, axis_name="data")(gradients)
    assert_array_equal(updates["hi"]["kernel"][0], 1)
    state = first(states)
    pairs = torch_bridge.pair(model, run.params["params"])
    back = back_of(state, run.params["params"], checkpoint, pairs=pairs)
    assert np.all(back.q_memory_dict[0].numpy())


def test_lossless_compression_of_small_leaves_in_torch_only():
    # With a rate below one torch "compresses" even biases, at full rank: nothing is lost by it.
    model = MODEL | {"a.bias": np.zeros(24)}
    checkpoint, _, _ = random_run(model, [["a.bias", "a.weight"]], rate=0.5)
    params = {"a": PARAMS["a"] | {"bias": jnp.zeros(24)}}
    state = powersgd_from_torch(checkpoint, params)
    assert isinstance(state.q["a"]["bias"], optax.MaskedNode)
    back = back_of(state, params, checkpoint)
    assert back.q_memory_dict[0].shape == checkpoint.powersgd[0].q_memory_dict[0].shape


# --- refusals ---------------------------------------------------------------------------------


def test_no_state_and_unfit_layout():
    with pytest.raises(CheckpointMismatch, match="no PowerSGD state"):
        powersgd_from_torch(Checkpoint(MODEL), PARAMS)
    checkpoint, _, _ = random_run(MODEL, [["a.weight"]])
    more = MODEL | {"a.bias": np.zeros(24)}
    wrong = BucketLayout.from_order([["a.weight", "a.bias"]], more)
    with pytest.raises(CheckpointMismatch, match="error of bucket 0 has 768 values"):
        powersgd_from_torch(dataclasses.replace(checkpoint, model=more), PARAMS, layout=wrong)
    bare = dataclasses.replace(checkpoint, model={})
    assert powersgd_from_torch(bare, PARAMS).q["a"]["kernel"].shape == (32, 2)
    with pytest.raises(CheckpointMismatch, match="without a model"):
        powersgd_from_torch(dataclasses.replace(bare, layout=None), PARAMS)


def test_a_layout_of_another_model_is_refused_both_ways():
    checkpoint, _, _ = random_run(MODEL, [["a.weight"]])
    state = powersgd_from_torch(checkpoint, PARAMS)
    renamed = BucketLayout.from_order([["b.weight"]], {"b.weight": MODEL["a.weight"]})
    turned = BucketLayout.from_order([["a.weight"]], {"a.weight": MODEL["a.weight"].T})
    for layout, lines in (
        (renamed, ["unexpected (1):", "b.weight"]),
        (turned, ["mis-shaped (1):", "a.weight (32, 24), in the model (24, 32)"]),
    ):
        for convert in (
            lambda layout: powersgd_from_torch(checkpoint, PARAMS, layout=layout),
            lambda layout: powersgd_to_torch(state, PARAMS, layout=layout, like=checkpoint),
            lambda layout: torch_bridge.to_torch(PARAMS, (state,), checkpoint, layout=layout),
        ):
            with pytest.raises(CheckpointMismatch, match="layout names parameters that") as error:
                convert(layout)
            assert list(map(str.strip, str(error.value).splitlines()))[1:] == lines


def test_every_leaf_that_is_cut_elsewhere_is_listed_with_the_way_out():
    # Few outputs, many inputs, a long kernel: jaxcomp's default cut is not torch's.
    model = {f"{name}.weight": np.zeros((4, 40, 30)) for name in "ab"}
    checkpoint, _, _ = random_run(model, [list(model)], rank=1, rate=1.0)
    params = {name: {"kernel": jnp.zeros((30, 40, 4))} for name in "ab"}
    with pytest.raises(CheckpointMismatch, match="torch_matrix_dims") as error:
        powersgd_from_torch(checkpoint, params)
    assert len(error.value.mis_shaped) == 2
    powersgd_from_torch(checkpoint, params, matrix_dims=torch_bridge.torch_matrix_dims)


EACH_HEAD = jaxcomp.MatrixDims(batch=(1,), rows=(2,), cols=(0,))
OF_EACH_HEAD = {"matrix_dims": lambda *_: EACH_HEAD, "rate": 0.5}
HEADS = {"a": {"kernel": jnp.zeros((32, 2, 12))}}
FEW_OUTPUTS = {"a": {"kernel": jnp.zeros((30, 40, 2))}}
LSTM = {name: value.numpy() for name, value in torch.nn.LSTM(32, 2).state_dict().items()}
GATES = jax.eval_shape(nn.RNN(nn.LSTMCell(2)).init, jax.random.key(0), jnp.ones((1, 3, 32)))


@pytest.mark.parametrize(
    ("model", "params", "options", "said"),
    [
        (MODEL, PARAMS, {"matrix_dims": lambda *_: None}, r"by torch only \(24 x 32\)"),
        (MODEL, HEADS, OF_EACH_HEAD, "several matrices in one leaf"),
        ({"a.weight": np.zeros((2, 40, 30))}, FEW_OUTPUTS, {}, "by jaxcomp only"),
        ({"a.weight": np.zeros((32, 24)).T}, PARAMS, {}, r"strides \(1, 24\) mix"),
        (LSTM, GATES["params"], {"rate": 0.5, "rank": 4}, "rank 2, torch has 4"),
    ],
)
def test_matrices_that_one_side_does_not_have_are_named(model, params, options, said):
    cut = options.pop("matrix_dims", None)
    checkpoint, _, _ = random_run(model, [list(model)], **options)
    with pytest.raises(CheckpointMismatch, match=said):
        powersgd_from_torch(checkpoint, params, matrix_dims=cut)


def test_a_state_of_another_shape_is_refused():
    state = state_after(7, rank=2)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), state.residual)
    replicas = state._replace(residual=both)
    with pytest.raises(CheckpointMismatch, match="consolidated"):
        powersgd_to_torch(replicas, PARAMS, layout=LAYOUT)
    like = Checkpoint({}, (PowerSGDRecord(1, 5, {}, {}, {}),))
    with pytest.raises(CheckpointMismatch, match="a/kernel: q of shape"):
        powersgd_to_torch(state, PARAMS, layout=LAYOUT, like=like)
