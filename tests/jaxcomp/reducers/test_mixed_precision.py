"""Steps that are not finite leave no trace; loss scaling and bfloat16 training; every reducer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from leaves import random_grads
from reducers import REDUCERS, reducer
from runners import AXIS, mesh_of, simulate

import jaxcomp

SHAPES = {"bias": (8,), "dense": (12, 8)}
NOT_FINITE = ("nan", "inf", "-inf", "overflow", "all")
# Finite gradients of which a sum, or what goes on the wire, is not. A mean of int8 is divided
# before it is summed, and of `batched_powersgd` all values go through thin factors, whose sums may
# be finite: there 3e38 is a gradient like any other.
FAULTS = {
    "feedback-fp16": (*NOT_FINITE, "3e38", "1e6"),
    "powersgd": (*NOT_FINITE, "3e38"),
    "acp-sgd": (*NOT_FINITE, "3e38"),
    "powersgd-fp16": (*NOT_FINITE, "3e38", "1e6"),
    "powersgd-int8": NOT_FINITE,
    "batched": NOT_FINITE,
    "int8": NOT_FINITE,
    "feedback-int8": NOT_FINITE,
    "switch": (*NOT_FINITE, "3e38"),
}


def spoiled(grads, rng, share, kinds):
    """Gradients of which a share of the steps cannot be averaged; and those steps, by kind."""
    grads = {name: np.array(x) for name, x in grads.items()}
    n, steps = grads["bias"].shape[:2]
    bad = {int(t): rng.choice(kinds) for t in np.flatnonzero(rng.random(steps) < share)}
    for t, kind in bad.items():
        replica, name = rng.integers(n), rng.choice(list(SHAPES))
        if kind == "overflow":  # a loss scale that is too large: the larger half of the values
            x = grads[name][replica, t]
            x[np.abs(x) >= np.median(np.abs(x))] *= np.inf
        elif kind == "all":
            for x in grads.values():
                x[replica, t] = np.nan
        elif kind == "3e38":  # the sum over the replicas overflows
            grads["bias"][:, t] = 3e38
        elif kind == "1e6":  # float16 ends at 65 504
            grads[name][replica, t] = 1e6
        else:
            index = tuple(rng.integers(size) for size in SHAPES[name])
            grads[name][(replica, t, *index)] = float(kind)
    return jax.tree.map(jnp.asarray, grads), bad


@pytest.mark.parametrize("name", FAULTS)
def test_a_thousand_steps_of_which_one_in_twenty_cannot_be_averaged(name):
    n, steps = 3, 1000
    rng = np.random.default_rng(7)
    clean = random_grads(SHAPES, n, steps)
    grads, faults = spoiled(clean, rng, 0.05, FAULTS[name])
    bad = np.array(list(faults))
    good = np.setdiff1d(np.arange(steps), bad)
    assert 30 < len(bad) < 70
    assert set(faults.values()) == set(FAULTS[name])

    tx = reducer(name, 100)
    outputs, final = simulate("vmap", tx, grads, optimised=True)
    skipped, expected = simulate(
        "vmap", tx, jax.tree.map(lambda x: x[:, good], clean), optimised=True
    )
    for leaf in SHAPES:
        assert np.isnan(outputs[leaf][bad]).all()
        np.testing.assert_array_equal(np.asarray(outputs[leaf])[good], skipped[leaf])
    jax.tree.map(np.testing.assert_array_equal, final, expected)


def test_a_batch_whose_sums_overflow_leaves_no_trace_either():
    grads = jax.tree.map(lambda x: jnp.full_like(x, 3e38), random_grads(SHAPES, 3, 1))
    tx = reducer("batched", 1)
    outputs, final = simulate("vmap", tx, grads)
    assert not any(np.isfinite(x).any() for x in jax.tree.leaves(outputs["dense"]))
    assert int(final.count) == 0
    np.testing.assert_array_equal(jax.tree.leaves(final.residual)[0], 0)


def half_precision_loss(params, x, y):
    half = lambda a: a.astype(jnp.float16)  # noqa: E731
    out = jnp.maximum(half(x) @ half(params["dense"]) + half(params["bias"]), 0)
    return jnp.mean((out.astype(jnp.float32) - y) ** 2)


def scaled_step(tx, params, state, scale, x, y):
    """The recipe of docs/mixed_precision.md."""
    local = jaxcomp.as_local(params, AXIS)
    scale, _, loss, grads = scale.value_and_grad(half_precision_loss)(local, x, y)
    scale = jax.lax.pmin(jaxcomp.as_local(scale, AXIS), AXIS)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, scale, loss[None]


@pytest.mark.parametrize("name", REDUCERS)
def test_loss_scaling(name):
    n, steps = 2, 12
    rng = np.random.default_rng(0)
    tx = optax.chain(reducer(name, 3), optax.apply_if_finite(optax.sgd(0.3), 99))
    params = {"bias": jnp.zeros(8), "dense": jnp.asarray(rng.normal(size=(12, 8)) / 4, jnp.float32)}
    x = jnp.asarray(rng.normal(size=(n * 16, 12)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(n * 16, 8)), jnp.float32)
    scale = DynamicScale(growth_interval=4, fin_steps=jnp.int32(0), scale=jnp.float32(2.0**14))
    mesh = mesh_of(n)
    state = jaxcomp.shard_state(tx.init(params), mesh, AXIS)
    specs = jaxcomp.state_specs(state, AXIS)
    step = jax.jit(
        jax.shard_map(
            lambda *args: scaled_step(tx, *args),
            mesh=mesh,
            in_specs=(jax.P(), specs, jax.P(), jax.P(AXIS), jax.P(AXIS)),
            out_specs=(jax.P(), specs, jax.P(), jax.P(AXIS)),
        )
    )
    losses, expected = [], 0.0
    with jax.numpy_dtype_promotion("standard"):  # apply_if_finite needs it
        for t in range(steps):
            # Step 5 overflows in float16 on the second replica only.
            batch = x.at[16:].mul(1e4) if t == 5 else x
            before = jax.tree.map(np.asarray, (params, state[0]))
            params, state, scale, loss = step(params, state, scale, batch, y)
            if t == 5:
                after = jax.tree.map(np.asarray, (params, state[0]))
                jax.tree.map(np.testing.assert_array_equal, after, before)
                assert float(scale.scale) < expected
                assert int(scale.fin_steps) == 0
            else:
                losses.append(float(loss.mean()))
            expected = float(scale.scale)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", REDUCERS)
def test_bfloat16_training(name):
    """Parameters and gradients in bfloat16: dtypes stay, residual and factors are not rounded."""
    rng = np.random.default_rng(1)
    tx = reducer(name, 20)
    target = jnp.asarray(rng.normal(size=(12, 8)), jnp.bfloat16)
    params = {"bias": jnp.zeros(8, jnp.bfloat16), "dense": jnp.zeros((12, 8), jnp.bfloat16)}
    noise = jnp.asarray(rng.normal(size=(2, 60, 12, 8)) / 2, jnp.bfloat16)

    def train(noise):
        def one(carry, e):
            params, state = carry
            grads = {"bias": params["bias"], "dense": params["dense"] - target + e}
            updates, state = tx.update(grads, state)
            updates = jax.tree.map(lambda u: jnp.asarray(-0.1, u.dtype) * u, updates)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, tx.init(params)), noise)[0]

    trained, state = jax.jit(jax.vmap(train, axis_name=AXIS))(noise)
    assert trained["dense"].dtype == jnp.bfloat16
    distance = np.abs(np.asarray(trained["dense"][0] - target, np.float32)).mean()
    assert distance < 0.35 * np.abs(np.asarray(target, np.float32)).mean()
    np.testing.assert_array_equal(trained["dense"][0], trained["dense"][1])
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))
