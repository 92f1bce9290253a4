"""What is on the wire, read from the compiled program: collectives counted, bytes summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, sent_bytes
from leaves import random_grads
from reducers import reducer
from runners import AXIS, lower_update, simulate
from xla import users_program

import jaxcomp


def transformer(layers=24, width=16):
    layer = {
        "attention": {"qkv": (width, 3, 4, width // 4), "out": (4, width // 4, width)},
        "mlp": {"up": (width, 4 * width), "bias": (4 * width,), "down": (4 * width, width)},
        "norm": {"scale": (width,), "bias": (width,)},
    }
    tree = {f"layer_{i}": layer for i in range(layers)}
    tree["embed"] = {"embedding": (256, width)}
    return jax.tree.map(lambda s: jnp.zeros(s), tree, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("mapping", ["shard_map", "pmap"])
def test_a_24_layer_model_takes_two_all_reduces_and_the_promised_bytes(mapping):
    params, rank = transformer(), 2
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0)
    text = lower_update(tx, params, 8, mapping).compile().as_text()
    found = collectives(text)
    assert [op for op, _, _ in found] == ["all-reduce", "all-reduce"]
    sent = sent_bytes(found)
    assert "conditional" not in text  # start_step=0 leaves no warm-up branch

    # Counted by hand: every matrix passes the test, out (16, 16) just so: 32 * 2 * 2 < 256.
    layer = rank * (16 + 48) + rank * (16 + 16) + 2 * rank * (16 + 64) + (64 + 16 + 16)
    by_hand = 4 * (24 * layer + rank * (256 + 16))
    stats = jaxcomp.powersgd(rank, axis_name=AXIS).bytes(params)
    assert sent == by_hand == stats.bytes_after
    assert stats.bytes_before == 4 * sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["powersgd-late", "int8"])
def test_compiling_quickly_changes_no_collective_and_no_memory(name):
    """So that other tests may read the wire of programs that took a quarter of the time."""
    lowered = lower_update(reducer(name), transformer(2), 8)
    quick, users = lowered.compile(), users_program(lowered)
    assert collectives(quick.as_text()) == collectives(users.as_text())
    memory = [x.memory_analysis().temp_size_in_bytes for x in (quick, users)]
    # Of small buffers some are laid out otherwise.
    assert abs(memory[0] - memory[1]) < 1e-2 * memory[1]


def test_bfloat16_is_on_the_wire_of_every_backend_that_has_it():
    """The CPU has none; the program that is lowered for a GPU shows it."""
    params = transformer(1)
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0, comm_dtype=jnp.bfloat16)
    text = lower_update(tx, params, 8, platforms=("cuda",)).as_text()
    regions = [
        part.split("})", 1)[1].split("\n", 1)[0] for part in text.split("stablehlo.all_reduce")[1:]
    ]
    assert len(regions) == 2
    assert all("bf16>" in region for region in regions), regions


def test_many_columns_on_a_bfloat16_wire_lose_nothing():
    """Of more than 64 columns the sums are widened once, and known to be replicated."""
    tx = jaxcomp.powersgd(
        70, axis_name=AXIS, start_step=0, min_compression_rate=0.0, comm_dtype=jnp.bfloat16
    )
    grads = random_grads({"a": (72, 80)}, 2, 2)
    outputs, state = simulate("shard_map", tx, grads)
    total = outputs["a"].sum(0) + state.residual["a"].mean(0)
    np.testing.assert_allclose(total, grads["a"].mean(0).sum(0), atol=2e-5)


def test_an_empty_tree_sends_nothing():
    for tx in (jaxcomp.powersgd(axis_name=AXIS, start_step=0), jaxcomp.allreduce(axis_name=AXIS)):
        lowered = lower_update(tx, {"none": None, "empty": jnp.zeros((8, 0))}, 8)
        assert collectives(lowered.compile().as_text()) == []


def test_stats_read_well_and_follow_the_arguments():
    params = {"w": jnp.zeros((64, 32), jnp.bfloat16), "b": jnp.zeros(32, jnp.bfloat16)}
    tx = jaxcomp.powersgd(2, axis_name=AXIS)
    stats = tx.bytes(params)
    assert stats.ratio == pytest.approx(stats.bytes_before / stats.bytes_after)
    narrow = jaxcomp.powersgd(2, axis_name=AXIS, comm_dtype=jnp.bfloat16).bytes(params)
    assert narrow.bytes_after * 2 == stats.bytes_after
    weight = stats.leaves[1]
    assert (weight.path, weight.rank, weight.compressed) == ("['w']", 2, True)
    assert "['w']" in str(stats)
    assert "total" in str(stats)
    shapes = jax.eval_shape(lambda: params)
    assert tx.bytes(shapes) == stats
    assert tx.bytes({}).ratio == 1.0
    none = jaxcomp.powersgd(lambda path, leaf: None, axis_name=AXIS, comm_dtype=np.float32)
    assert none.bytes(params).bytes_after == 4 * (64 * 32 + 32)
