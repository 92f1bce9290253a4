"""What every reducer does, whatever it sends: in Optax's wrappers, with odd leaves, refusals."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import SMALL, equal, random_grads, zeros
from tests.helpers.reducers import BARE, REDUCERS, allreduce, batched, feedback, powersgd, reducer
from tests.helpers.rounding import rounding
from tests.helpers.runners import AXIS, sharded, simulate, types_of, updated

GRADS = random_grads(SMALL, 2, 4)
# A value within rounding of the middle of two levels goes to the other side, now and then.
LEVEL = 2 * max(np.abs(x).max() for x in GRADS.values()) / 127
# Of each kind of arithmetic and of each way through the door one.
KINDS = ["allreduce-fp16", "powersgd-int8", "batched", "feedback-int8", "own"]
# Besides the reducers of the battery, further pairs of what rounds and what is left out.
KEEP = {
    "powersgd-int8-late": powersgd(2, start_step=1, comm_dtype="int8"),
    "powersgd-int8-cold": powersgd(2, comm_dtype="int8", warm_start=False),
    "powersgd-int8-full": powersgd(40, comm_dtype="int8", min_compression_rate=0.0),
    "feedback-bf16": feedback(allreduce(comm_dtype=jnp.bfloat16)),
    "feedback-batched": feedback(batched(2, start_step=1, error_feedback=False)),
}
for name in REDUCERS:
    # The residual of `batched` is no leaf's, and that of `feedback-late` decays.
    if name not in ("batched", "feedback-late"):
        KEEP[name] = reducer(name)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Promotes as Optax needs it, which is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", KINDS)
def test_multi_transform_and_inject_hyperparams_around_a_chain(name):
    """Each reducer gets its own leaves, and what comes behind it a schedule."""

    @optax.inject_hyperparams
    def optimizer(learning_rate):
        split = optax.multi_transform(
            {"matrix": reducer(name), "vector": reducer("allreduce")},
            {"dense": "matrix", "norm": "vector"},
        )
        return optax.chain(split, optax.sgd(learning_rate))

    tx = optimizer(learning_rate=optax.linear_schedule(1.0, 0.5, 2))
    # With parameters, and with an extra argument for others.
    outputs, _ = simulate("shard_map", tx, GRADS, params=zeros(SMALL), value=1.0)
    expected, _ = simulate("shard_map", reducer(name), {"dense": GRADS["dense"]})
    rates = np.array([1.0, 0.75, 0.5, 0.5])
    atol = LEVEL if "int8" in name else 1e-5
    scaled = rates[:, None, None] * expected["dense"]
    assert_allclose(outputs["dense"], -scaled, atol=atol)
    mean = rates[:, None] * GRADS["norm"].mean(0)
    assert_allclose(outputs["norm"], -mean, rtol=1e-6, atol=1e-7)


def test_multisteps_under_shard_map_is_told_of_accumulate():
    tx = optax.MultiSteps(optax.chain(reducer("powersgd"), optax.sgd(1.0)), 2)
    with pytest.raises(ValueError, match=r"jaxcomp\.accumulate"):
        simulate("shard_map", tx, GRADS)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_bad_step_leaves_no_trace_and_apply_if_finite_skips_it(name):
    rule = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), max_consecutive_errors=5)
    tx = optax.chain(reducer(name), rule)
    bad = jax.tree.map(np.array, GRADS)
    bad["dense"][1, 2, 0, 0] = np.inf
    without = jax.tree.map(lambda g: np.delete(g, 2, axis=1), GRADS)
    outputs, state = simulate("shard_map", tx, bad)
    skipped, expected = simulate("shard_map", tx, without)
    for leaf in SMALL:
        assert not np.any(outputs[leaf][2])
        equal(np.delete(outputs[leaf], 2, axis=0), skipped[leaf])
    assert np.any(outputs["dense"][3])
    assert int(state[1].total_notfinite) == 1
    equal(state[0], expected[0])


@pytest.mark.parametrize("name", KEEP)
def test_what_is_not_sent_is_kept(name):
    """Outputs and the mean residual add up to what went in; without a residual nothing is kept."""
    outputs, state = simulate("shard_map", KEEP[name], GRADS)
    kept = getattr(state, "residual", {})
    if not jax.tree.leaves(kept):
        assert name.startswith(("allreduce", "int8", "powersgd-no", "own"))
        return
    # Relative errors of a step that nobody can attribute: a float16 all-reduce rounds inside the
    # sum, and a residual in bfloat16 is rounded to nearest after the step.
    of_sum = float(np.finfo(np.float16).eps)
    rounded = {
        "powersgd-fp16": of_sum + float(jnp.finfo(jnp.bfloat16).eps) / 2,
        "feedback-fp16": of_sum,
        "feedback-own": of_sum,
    }
    for leaf, x in GRADS.items():
        steps = np.asarray(outputs[leaf])
        residual = np.zeros_like(x[:, 0])
        if not isinstance(kept[leaf], optax.MaskedNode):
            residual = np.asarray(kept[leaf], np.float32)
        # Each step adds the residual, and is added to the total.
        allowed = rounding(2 * len(steps), largest=np.abs(x).sum(1))
        if name in rounded:
            largest = max(np.abs(steps).max(), np.abs(residual).max())
            allowed += len(steps) * rounded[name] * largest
        total = steps.sum(0) + residual.mean(0)
        assert_allclose(total, x.mean(0).sum(0), rtol=0, atol=allowed)


def test_what_was_sent_of_float16_in_bfloat16_is_what_was_averaged():
    tx = reducer("allreduce-bf16")
    grads = np.float16(np.arange(64.0).reshape(2, 32) / 7)
    sent = jax.vmap(lambda g: tx.reduce(g, tx.init(g)).sent, axis_name=AXIS)(grads)
    equal(sent, grads.astype(jnp.bfloat16).astype(np.float16))


@pytest.mark.parametrize("name", REDUCERS)
def test_float0_none_scalar_and_empty_leaves_pass(name):
    """No operand is broadcast to more dimensions, either."""
    tx = reducer(name)
    params = {
        "steps": jnp.array([3, 4]),
        "w": jnp.ones((8, 8)),
        "scalar": jnp.array(2.0),
        "none": None,
        "empty": jnp.zeros((0, 4)),
    }

    def loss(p, x):
        return jnp.sum(p["w"] * x) * p["scalar"]

    def step(params, x):
        _, grads = jaxcomp.local_value_and_grad(loss, AXIS, allow_int=True)(params, x)
        updates, _ = tx.update(grads, tx.init(params))
        del updates["steps"]
        return updates

    with jax.numpy_rank_promotion("raise"):
        mapped = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name=AXIS))
        updates = mapped(params, jnp.arange(3.0))
    if name == "batched":  # in which the scalar is part of one matrix of low rank
        assert np.isfinite(updates["scalar"]).all()
    else:
        # Half a level of the largest of 0, 64 and 128, and half a level of the mean.
        assert_allclose(updates["scalar"], 64.0, rtol=2 / 127)
    assert updates["none"] is None
    assert updates["empty"].shape == (3, 0, 4)


@pytest.mark.parametrize("name", REDUCERS)
def test_numbers_and_numpy_arrays_among_the_parameters_are_taken_as_arrays(name):
    tx = reducer(name)
    params = {"w": np.ones((8, 8)), "x": 0.5, "y": np.float64(0.5), "z": np.float16(0.5)}
    state = tx.init(params)
    assert types_of(state) == types_of(tx.init(jax.tree.map(jnp.asarray, params)))


@pytest.mark.parametrize("name", ["powersgd", *BARE])
def test_gradients_that_are_not_floating_are_all_named(name):
    tx = reducer(name)
    grads = {"w": jnp.ones((2, 8, 8)), "odd": jnp.ones((2, 3), int), "z": jnp.ones((2, 3), complex)}
    with pytest.raises(ValueError, match=r"\['odd'\] has dtype int32; \['z'\] has dtype complex64"):
        updated(tx, grads)
    step = lambda w: tx.update({"w": w, "b": 1.0}, tx.init({"w": w}))[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"\['b'\] is a float and not an array"):
        jax.vmap(step, axis_name=AXIS)(grads["w"])


@pytest.mark.parametrize("name", REDUCERS)
def test_an_unbound_axis_is_named_with_the_fix(name):
    tx = reducer(name)
    grads = {"w": jnp.ones((8, 8))}
    with pytest.raises(ValueError, match=r"axis 'data' is not bound here. Call update\(\) inside"):
        tx.update(grads, tx.init(grads))


@pytest.mark.parametrize("name", ["powersgd", *BARE])
def test_a_gradient_that_is_already_reduced_is_refused_with_the_fix(name):
    tx = reducer(name)

    def step(w, x):
        grads = jax.grad(lambda w: jnp.sum(x @ w))(w)
        return tx.update({"w": grads}, tx.init({"w": w}))[0]

    mapped = sharded(2, step, (jax.P(), jax.P(AXIS)), jax.P())
    with pytest.raises(ValueError, match=r"\['w'\] is the same on every replica.*local_value_and_"):
        mapped(jnp.ones((8, 8)), jnp.ones((4, 8)))


@pytest.mark.parametrize("name", [name for name in REDUCERS if name != "own"])  # which looks itself
def test_the_state_of_another_reducer_is_refused_with_the_fix(name):
    tx = reducer(name)
    other = reducer("powersgd" if "feedback-" in name else "feedback-int8")
    update = jax.vmap(lambda g: tx.update(g, other.init(zeros(SMALL)))[0], axis_name=AXIS)
    with pytest.raises(ValueError, match=r"update needs its own .*, got .*adapt_state"):
        jax.eval_shape(update, jax.tree.map(lambda g: g[:, 0], GRADS))


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_can_be_copied_and_its_state_pickled(name):
    tx = reducer(name)
    # In a tree, as in a module that holds one, it is no leaf and stays what it is.
    assert jax.tree.map(lambda x: x + 1, {"tx": tx, "w": 1}) == {"tx": tx, "w": 2}
    for other in (copy.copy(tx), copy.deepcopy(tx)):
        assert other.axis_name == tx.axis_name
        assert repr(other) == repr(tx)
    state = tx.init(zeros(SMALL))
    equal(pickle.loads(pickle.dumps(state)), state)
