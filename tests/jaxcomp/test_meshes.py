"""Compression over one axis of several: what is sharded stays so, what crosses hosts is thin."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from runners import random_grads

import jaxcomp

P = jax.P
SHAPES = {"bias": (96,), "down": (96, 64), "up": (64, 96)}
LAYOUTS = {
    "tensor": {"bias": P("ici"), "down": P("ici", None), "up": P(None, "ici")},
    "fsdp": {"bias": P("ici"), "down": P(None, "ici"), "up": P("ici", None)},
}
COLLECTIVE = re.compile(
    r"= \(?\w+\[([\d,]*)\].*? (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\("
    r".*?(?:replica_groups=(\{\{0,\d|\[\d,\d|)|source_target_pairs=)"
)


def mesh():
    return jax.make_mesh((2, 4), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)


def loss(params, x):
    hidden = jnp.maximum(x @ params["up"] + params["bias"], 0)
    return jnp.mean((hidden @ params["down"] - x) ** 2)


def training(tx, layout, manual=("dcn",), axes="dcn"):
    """(step, params, state, batch) with the weights sharded as in `layout`."""
    grid = mesh()
    values = random_grads(SHAPES, 1, 1)
    params = {
        name: jax.device_put(x[0, 0] * 0.1, NamedSharding(grid, layout.get(name, P())))
        for name, x in values.items()
    }
    state = jaxcomp.shard_state(tx.init(params), grid, "dcn")
    specs = jaxcomp.state_specs(state, "dcn")

    def step(params, state, x):
        grads = jaxcomp.local_value_and_grad(loss, axes)(params, x)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=grid,
        in_specs=(P(), specs, P(axes)),
        out_specs=(P(), specs),
        axis_names=set(manual),
    )
    rng = np.random.default_rng(1)
    batch = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    return jax.jit(mapped), params, state, jax.device_put(batch, NamedSharding(grid, P(axes)))


def collective_sizes(compiled):
    """(operation, values in the result on one device, whether it crosses hosts)."""
    found = []
    for dims, op, groups in COLLECTIVE.findall(compiled):
        size = int(np.prod([int(d) for d in dims.split(",") if d], dtype=int))
        found.append((op, size, groups in ("{{0,4", "[4,2")))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_residuals_stay_sharded_and_no_weight_is_gathered(layout):
    tx = optax.chain(jaxcomp.powersgd(2, axis_name="dcn", start_step=0), optax.sgd(0.1))
    step, params, state, batch = training(tx, LAYOUTS[layout])
    compiled = step.lower(params, state, batch).compile().as_text()
    found = collective_sizes(compiled)
    crossing = sum(size for op, size, slow in found if slow)
    # Factors and bias, a quarter of them on each device.
    assert crossing * 4 == 2 * (96 + 64) * 2 + 96
    assert {op for op, _, slow in found if slow} == {"all-reduce"}
    exact = optax.chain(jaxcomp.allreduce(axis_name="dcn"), optax.sgd(0.1))
    plain = training(exact, LAYOUTS[layout])
    baseline = collective_sizes(plain[0].lower(*plain[1:]).compile().as_text())

    def gathers(found):
        return sum(
            op == "all-gather" and size >= 64 * 96 / 4 for op, size, slow in found if not slow
        )

    # FSDP itself gathers weights for the forward pass; compression adds none.
    assert gathers(found) <= gathers(baseline)
    if layout == "tensor":
        assert gathers(found) == 0

    for _ in range(2):
        params, state = step(params, state, batch)
    for name in ("down", "up"):
        assert params[name].addressable_shards[0].data.size == 64 * 96 // 4
        assert state[0].residual[name].addressable_shards[0].data.size == 64 * 96 // 4
        assert state[0].residual[name].shape == (2 * SHAPES[name][0], SHAPES[name][1])


def test_sharding_changes_nothing_but_rounding():
    tx = optax.chain(jaxcomp.powersgd(2, axis_name="dcn", start_step=0), optax.sgd(0.1))
    results = []
    for specs in (LAYOUTS["tensor"], {}):
        step, params, state, batch = training(tx, specs)
        for _ in range(3):
            params, state = step(params, state, batch)
        results.append((params, state[0].residual))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


@pytest.mark.parametrize(
    "reducer",
    [
        lambda **axes: jaxcomp.powersgd(2, start_step=0, **axes),
        lambda **axes: jaxcomp.batched_powersgd(2, start_step=0, **axes),
        jaxcomp.quantized_allreduce,
        lambda **axes: jaxcomp.allreduce(comm_dtype=jnp.float16, **axes),
        lambda reduce_first, axis_name: jaxcomp.error_feedback(
            jaxcomp.quantized_allreduce(axis_name=axis_name), reduce_first=reduce_first
        ),
    ],
    ids=["powersgd", "batched", "int8", "float16", "feedback"],
)
def test_reduce_first_averages_exactly_over_the_fast_axis(reducer):
    """Equal to the same reducer between hosts whose batch is four times as large."""
    both = ("dcn", "ici")
    tx = optax.chain(reducer(axis_name="dcn", reduce_first="ici"), optax.sgd(0.1))
    step, params, state, batch = training(tx, {}, manual=both, axes=both)
    slow = optax.chain(reducer(axis_name="dcn", reduce_first=None), optax.sgd(0.1))
    one, few, start, same = training(slow, {}, manual=both, axes="dcn")
    for _ in range(2):
        params, state = step(params, state, batch)
        few, start = one(few, start, same)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, few)
    # check_vma proves the residual equal along "ici": its specification names "dcn" only.
    assert jax.tree.structure(state) == jax.tree.structure(start)


@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_bfloat16_gradients_beside_automatic_axes(wire):
    """A bfloat16 all-reduce there aborts the process on CPU; so none is made."""
    grid = mesh()
    tx = jaxcomp.allreduce(axis_name="dcn", comm_dtype=wire)
    grads = jax.device_put(jnp.ones((8, 8), jnp.bfloat16), NamedSharding(grid, P("dcn", "ici")))
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=grid,
        in_specs=P("dcn"),
        out_specs=P(),
        axis_names={"dcn"},
    )
    output = jax.jit(mapped)(grads)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_array_equal(output.astype(jnp.float32), 1)


def test_the_example_trains():
    script = Path(__file__).parents[2] / "examples" / "hybrid_mesh.py"
    arguments = ["--mode", "replicated", "--width", "32", "--steps", "10", "--rank", "2"]
    result = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "bytes between hosts" in result.stdout
    assert "step   10  loss" in result.stdout


def test_a_gradient_that_was_already_averaged_over_the_fast_axis_is_refused():
    tx = jaxcomp.powersgd(2, axis_name="dcn", start_step=0, reduce_first="ici")
    both = ("dcn", "ici")
    step, params, state, batch = training(tx, {}, manual=both, axes="dcn")
    with pytest.raises(ValueError, match="the same on every replica along 'ici'"):
        step(params, state, batch)


def test_consolidate_and_restore_over_the_slow_axis_only():
    grid = mesh()
    tx = jaxcomp.powersgd(2, axis_name="dcn", start_step=0)
    state = training(tx, LAYOUTS["tensor"])[2]
    specs = jaxcomp.state_specs(state, "dcn")
    consolidate = jax.jit(
        jax.shard_map(
            lambda s: jaxcomp.consolidate(s, "dcn"),
            mesh=grid,
            in_specs=(specs,),
            out_specs=P(),
            axis_names={"dcn"},
        )
    )
    one = consolidate(state)
    assert one.residual["up"].shape == SHAPES["up"]
    again = jaxcomp.shard_state(one, grid, "dcn")
    for each in (again, state):
        assert each.residual["up"].shape == (2 * 64, 96)
        assert each.residual["up"].addressable_shards[0].data.size == 64 * 96 // 4
