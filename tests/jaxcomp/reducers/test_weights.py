"""``weight=``: replicas that do not count the same, for every reducer."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.classifier import grid
from tests.helpers.hlo import collectives
from tests.helpers.leaves import SMALL, all_finite, all_nan, random_grads, zeros
from tests.helpers.reducers import allreduce, batched, feedback, powersgd, reducer
from tests.helpers.runners import AXIS, lower_update

# Of three steps. Over their mean they are powers of two, by which no product is rounded.
WEIGHTS = np.array([(1, 1, 0, 2), (4, 2, 1, 1), (0, 0, 0, 8)], np.float32)
UNEVEN = np.array([3, 1, 0, 2], np.float32)  # of which two over the mean need all bits
# All have one door, which multiplies their gradients: of each kind one, and one of a user's own.
KINDS = ["allreduce", "allreduce-fp16", "powersgd", "powersgd-int8", "batched", "int8"]
KINDS += ["feedback-int8", "feedback-late", "own"]


def gradients(seed=0):
    """Draws one step of four replicas: ``(4, *shape)``."""
    return {name: x[:, 0] for name, x in random_grads(SMALL, 4, 1, seed=seed).items()}


@functools.cache
def step_of(tx, weighed=True):
    """One compiled update of all replicas; what leaves it without an axis is the same on each."""

    def step(grads, weight, state):
        return tx.update(grads, state, **({"weight": weight} if weighed else {}))

    def mapped(grads, weight, state):
        axes = jaxcomp.state_axes(state)
        return jax.vmap(step, (0, 0, axes), (None, axes), axis_name=AXIS)(grads, weight, state)

    return jax.jit(mapped)


def start(tx):
    return jaxcomp.stack_replicas(tx.init(zeros(SMALL)), 4)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_gradients_in_proportion_to_their_weights(name):
    """Repeats gradients by their weight; every other test says what comes out then."""
    tx, copied = reducer(name), copy.copy(reducer(name))
    weighed = plain = start(tx)
    for seed, weights in enumerate(WEIGHTS):
        grads = gradients(seed)
        share = weights / weights.mean()
        scaled = {k: np.einsum("n,n...->n...", share, x) for k, x in grads.items()}
        expected, plain = step_of(tx, weighed=False)(scaled, weights, plain)
        grads["dense"][weights == 0] = np.nan
        grads["norm"][weights == 0] = np.inf
        found, weighed = step_of(copied)(grads, weights, weighed)
        # A value within rounding of the middle of two levels may go to the other side.
        level = {"int8": 1 / 127, "int6": 1 / 31}.get(name.split("-")[-1], 1e-6)
        for leaf, x in scaled.items():
            atol = level * np.abs(x).max()
            np.testing.assert_allclose(found[leaf], expected[leaf], rtol=0, atol=atol)
    assert all_finite(weighed)


WITHOUT_A_MEAN = [(0, 0, 0, 0), (1, -1, 1, 1), (1, np.nan, 1, 1)]
WITHOUT_A_MEAN += [(2e38, 2e38, 1, 1), (3e38, 1, 0, 0), (1e-38, 1e-38, 1e-38, 1e-38)]


@pytest.mark.parametrize("name", KINDS)
def test_weights_without_a_mean_leave_no_trace(name):
    tx, grads = reducer(name), gradients()
    _, state = step_of(tx)(grads, WEIGHTS[0], start(tx))
    for weights in WITHOUT_A_MEAN:
        outputs, after = step_of(tx)(grads, np.array(weights, np.float32), state)
        assert all_nan(outputs)
        jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("misspelt", ["weights", "wieght", "weigths", "Weight", "example_weights"])
@pytest.mark.parametrize("name", KINDS)
def test_a_misspelt_weight_is_refused_with_the_right_name(name, misspelt):
    tx = reducer(name)
    chain = optax.chain(tx, optax.sgd(0.1))
    with jax.numpy_dtype_promotion("standard"):
        for update in (tx.update, chain.update):
            state = chain.init(zeros(SMALL)) if update == chain.update else tx.init(zeros(SMALL))
            step = functools.partial(update, state=state, **{misspelt: 2.0})
            with pytest.raises(ValueError, match=f"no argument `{misspelt}`: it is `weight`"):
                jax.vmap(step, axis_name=AXIS)(gradients())


def test_other_extra_arguments_are_for_other_links():
    step = functools.partial(allreduce().update, state=optax.EmptyState(), weight_decay=0.1)
    jax.vmap(functools.partial(step, value=1.0, key=None), axis_name=AXIS)(gradients())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_wire_rounds_a_weight(dtype):
    tx = allreduce(comm_dtype=dtype)
    weights = np.array([257, 1, 1e-3, 4095], np.float32)  # too long for the significand of either
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    means = jax.vmap(step, axis_name=AXIS)(jnp.ones((4, 3)), weights)
    # Each product is rounded by half a unit at most, and the sum of the weights not at all.
    np.testing.assert_allclose(means, 1, rtol=float(jnp.finfo(dtype).eps) / 2)


@pytest.mark.parametrize(
    "name", ["allreduce", "allreduce-bf16", "powersgd", "powersgd-int8", "int8"]
)
def test_one_all_reduce_of_a_scalar_is_added(name):
    def program(weight):
        lowered = lower_update(reducer(name), zeros(SMALL), 4, weight=weight)
        return collectives(lowered.compile().as_text())

    plain, weighed = program(None), program(np.float32(2))
    weighed.remove(("all-reduce", "f32", 1))
    assert weighed == plain


def test_a_uniform_number_needs_no_array():
    means = mapped_update(3)[0]
    np.testing.assert_allclose(means["norm"][0], gradients()["norm"].mean(0), rtol=1e-5, atol=1e-6)


def mapped_update(weight):
    """Updates replicas that all give the same for their weight."""
    step = lambda g: allreduce().update(g, optax.EmptyState(), weight=weight)  # noqa: E731
    return jax.vmap(step, axis_name=AXIS)(gradients())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (WEIGHTS[0], r"`weight` must be one number for this replica.*\(4,\)"),
        (jnp.complex64(1), "complex64"),
        ([1, 2], "`weight` must be one number for this replica"),
        ("3", "`weight` must be one number for this replica"),
    ],
)
def test_weights_that_are_no_number_of_this_replica_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        mapped_update(weight)


def test_a_bfloat16_gradient_loses_nothing_to_its_weight():
    """It reaches a reducer with a residual in float32, and the outputs are bfloat16."""
    tx = feedback(allreduce())
    grads = {k: x.astype(jnp.bfloat16) for k, x in gradients().items()}
    outputs, _ = step_of(tx)(grads, UNEVEN, start(tx))
    for leaf, x in grads.items():
        assert outputs[leaf].dtype == jnp.bfloat16
        mean = np.average(np.asarray(x, np.float64), axis=0, weights=UNEVEN)
        np.testing.assert_allclose(np.asarray(outputs[leaf], np.float64), mean, rtol=2**-8)


@pytest.mark.parametrize(
    "tx",
    [powersgd(1), batched(17), feedback(allreduce())],
    ids=["powersgd", "batched", "feedback"],
)
@pytest.mark.parametrize("weighed", [False, True])
def test_what_a_float16_mean_cannot_hold_goes_out_in_the_next_step(tx, weighed):
    params = {"w": jnp.zeros((16, 16), jnp.float16), "b": jnp.zeros(3, jnp.float16)}
    state = tx.init(params)
    large = jax.tree.map(lambda x: jnp.full(x.shape, 4e4, x.dtype), state.residual)
    state = jaxcomp.stack_replicas(state._replace(residual=large), 2)
    weights = np.ones(2, np.float32)
    total = 0.0
    for value in (4e4, 0.0):
        grads = {"w": jnp.full((2, 16, 16), value, jnp.float16), "b": jnp.ones((2, 3), jnp.float16)}
        outputs, state = step_of(tx, weighed)(grads, weights, state)
        total += np.float64(outputs["w"])
        if value:
            np.testing.assert_array_equal(outputs["w"], np.finfo(np.float16).max)
    np.testing.assert_allclose(total, 8e4, rtol=2e-3)


def test_data_parallel_weighs_a_chain_along_all_axes():
    both = AXIS, "model"
    plain = optax.stateless(lambda g, params: jax.tree.map(lambda x: jax.lax.pmean(x, both), g))
    chain = optax.chain(
        jaxcomp.allreduce(axis_name="model"), powersgd(24, min_compression_rate=0.0)
    )
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    params = {"w": jnp.ones((8, 8))}

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    parts = [jax.grad(loss)(params, rows)["w"] for rows in x.reshape(4, 2, 8)]
    x[4:6] = np.nan  # who sits out may hold anything
    for tx in (chain, plain):
        given = {"mesh": grid(2, model=2), "axis_name": both, "check_vma": False}
        dp = jaxcomp.data_parallel(jax.value_and_grad(loss), tx, **given)
        step = jax.jit(lambda w, dp=dp: dp(dp.init(params), params, x, weight=w))
        for weights in (UNEVEN, WEIGHTS[2]):
            (_, grads), _ = step(weights)
            exact = np.average(parts, axis=0, weights=weights)
            np.testing.assert_allclose(grads["w"], exact, rtol=1e-4, atol=1e-5)
