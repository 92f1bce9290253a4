"""torch's hook arguments in jaxcomp's words, state dicts, and torch's matrices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

import jaxcomp
from tests.helpers.leaves import equal, normal
from tests.helpers.runners import simulate
from tests.helpers.tables import numbers, rows
from torch_bridge import (
    PowerSGDRecord,
    matrix_dims_of,
    pair,
    powersgd_kwargs_from_torch,
    reducer_from_torch,
    torch_matrix_dims,
)

ARGUMENTS = {  # of torch: jaxcomp's, and a value
    "matrix_approximation_rank": ("rank", 4),
    "start_powerSGD_iter": ("start_step", 10),
    "min_compression_rate": ("min_compression_rate", 3),
    "use_error_feedback": ("error_feedback", True),
    "warm_start": ("warm_start", False),
    "orthogonalization_epsilon": ("eps", 1e-8),
    "random_seed": ("seed", 5),
}
TORCH = {name: value for name, (_, value) in ARGUMENTS.items()}
OURS = dict(ARGUMENTS.values())


def test_every_argument_of_torch():
    extra = {"compression_stats_logging_frequency": 10, "batch_tensors_with_same_shape": True}
    assert powersgd_kwargs_from_torch(process_group=None, **TORCH, **extra) == OURS
    assert powersgd_kwargs_from_torch(None, 4, 10, 3, True, False, 1e-8, 5, 10, True) == OURS
    assert powersgd_kwargs_from_torch() == {}
    state = powerSGD_hook.PowerSGDState(process_group=None, **TORCH)
    assert powersgd_kwargs_from_torch(state) == {k: v for k, v in OURS.items() if k != "seed"}


def test_a_record_has_torchs_defaults():
    state = powerSGD_hook.PowerSGDState(process_group=None)
    record = PowerSGDRecord(1, 0, {}, {}, {})
    for field in dataclasses.fields(record):
        if field.name != "rng":  # None makes torch's, from its default seed
            assert getattr(record, field.name) == getattr(state, field.name), field.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr_scheduler": object()}, "put the schedule in the optimizer"),  # what others call it
        ({"matrix_aproximation_rank": 2}, "Did you mean 'matrix_approximation_rank'"),
        ({"zzz": 2}, "Known are process_group"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        powersgd_kwargs_from_torch(**arguments)
    with pytest.raises(ValueError, match="given twice"):
        powersgd_kwargs_from_torch(None, 2, matrix_approximation_rank=3)
    with pytest.raises(ValueError, match="10 positional"):
        powersgd_kwargs_from_torch(*range(11))


@pytest.mark.parametrize(
    ("wrapper", "dtype"),
    [
        (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), jnp.float16),
        (default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook), jnp.bfloat16),
        ("default.fp16_compress_wrapper(powerSGD.powerSGD_hook)", jnp.float16),
        ("bf16_compress_wrapper(powerSGD_hook)", jnp.bfloat16),
    ],
)
def test_wrappers_set_what_goes_on_the_wire(wrapper, dtype):
    kwargs = powersgd_kwargs_from_torch(None, 2, hook=wrapper)
    assert kwargs == {"rank": 2, "comm_dtype": dtype}
    assert isinstance(init(reducer_from_torch(wrapper, axis_name="data")), jaxcomp.PowerSGDState)


def init(tx):
    return tx.init({"w": jnp.zeros((64, 64))})


HOOKS = {
    DDPCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    DDPCommHookType.QUANTIZE_PER_TENSOR: quantization_hooks.quantization_pertensor_hook,
    DDPCommHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    DDPCommHookType.NOOP: debugging_hooks.noop_hook,
}


@pytest.mark.parametrize("member", list(DDPCommHookType), ids=lambda member: member.name)
def test_every_hook_type_is_a_reducer(member):
    tx = reducer_from_torch(member, axis_name="data")
    state = tx.init({"w": jnp.zeros((8, 8))})
    for name in {member.name, HOOKS.get(member, member)}:
        other = reducer_from_torch(name, axis_name="data")
        equal(other.init({"w": jnp.zeros((8, 8))}), state)
    grads = normal(2, 8, 8)
    update = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")
    outputs, _ = jax.jit(update)({"w": grads}, state)
    expected = np.broadcast_to(grads.mean(0), grads.shape)
    if member.name == "NOOP":
        expected = grads
    np.testing.assert_allclose(outputs["w"], expected, atol=0.05)


def test_ranks_of_hook_types():
    for name, rank in (("POWER_SGD", 1), ("POWER_SGD_RANK2", 2)):
        assert init(reducer_from_torch(name, axis_name="data")).q["w"].shape == (64, rank)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3)
    tx = reducer_from_torch(powerSGD_hook.powerSGD_hook, state, axis_name="data")
    assert init(tx).q["w"].shape == (64, 3)


def test_hooks_that_live_elsewhere():
    with pytest.raises(ValueError, match=r"jaxcomp\.local_sgd"):
        reducer_from_torch(post_localSGD_hook.post_localSGD_hook, axis_name="data")
    with pytest.raises(ValueError, match="one of ALLREDUCE"):
        reducer_from_torch("MY_HOOK", axis_name="data")
    with pytest.raises(ValueError, match="takes no arguments"):
        reducer_from_torch("ALLREDUCE", axis_name="data", random_seed=1)


# A leaf, its shape, and the axes that are rows; a vector has none.
MATRICES = rows("""
Dense_0/kernel | 4 8 | 1
Conv_0/kernel | 7 7 512 3 | 3
ConvTranspose_0/kernel | 3 3 4 8 | 2
attn/query/kernel | 8 2 4 | 1 2
attn/out/kernel | 2 4 8 | 2
attn/qkv/kernel | 8 3 2 4 | 1 2 3
Embed_0/embedding | 50 4 | 0
pos | 1 9 4 | 0
Dense_0/bias | 4 |
""")


@pytest.mark.parametrize(("path", "shape", "row_axes"), MATRICES)
def test_torch_matrix_dims(path, shape, row_axes):
    shape = numbers(shape)
    names = tuple(path.split("/"))
    dims = torch_matrix_dims(names, np.zeros(shape))
    keys = tuple(jax.tree_util.DictKey(name) for name in names)
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert torch_matrix_dims(keys, struct) == dims
    if not row_axes:
        assert dims is None
    else:
        assert dims.rows == numbers(row_axes)
        assert sorted(dims.rows + dims.cols) == list(range(len(shape)))


def test_matrix_dims_of_pairs_are_those_of_torch():
    params = {"up": {"kernel": jnp.zeros((3, 3, 6, 8))}}  # of a ConvTranspose with another name
    exact = matrix_dims_of(pair({"up.weight": np.zeros((6, 8, 3, 3))}, params))
    q = jaxcomp.powersgd(rank=1, axis_name="data", matrix_dims=exact).init(params).q
    assert q["up"]["kernel"].shape == (8 * 3 * 3, 1)


def test_the_per_channel_hook_has_blocks_of_512_values():
    gradient = np.zeros((2, 1024), np.float32)
    gradient[:, 0], gradient[:, 300], gradient[:, 600] = 1000.0, 1.0, 1.0
    tx = reducer_from_torch("QUANTIZE_PER_CHANNEL", axis_name="data")
    output = simulate("vmap", tx, {"w": gradient[:, None]})[0]["w"]
    # In the block of the large value a step of int8 is 8; in the next block it is not.
    assert abs(float(output[0, 300]) - 1) > 0.5
    assert float(output[0, 600]) == pytest.approx(1, rel=0.01)
