"""What every reducer does, whatever it sends: in Optax's wrappers, with odd leaves, refusals."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.leaves import SMALL, all_finite, random_grads, zeros
from tests.helpers.reducers import BARE, REDUCERS, allreduce, batched, feedback, powersgd, reducer
from tests.helpers.runners import AXIS, sharded, simulate

GRADS = random_grads(SMALL, 2, 4)
# A value within rounding of the middle of two levels goes to the other side, now and then.
LEVEL = 2 * max(np.abs(x).max() for x in GRADS.values()) / 127
ELSEWHERE = [
    (name, mapping) for name in ("allreduce-fp16", "powersgd-late") for mapping in ("vmap", "pmap")
]
# Of each kind of arithmetic one: what takes long, without a compiler or for many steps.
KINDS = ["allreduce-fp16", "powersgd", "batched", "int8"]
# Of `batched` and `feedback-late` the residual is no leaf's, or decays; what they are made of has
# others. Beside the reducers of the battery, further pairs of what rounds and what is left out.
KEEP = {name: REDUCERS[name] for name in REDUCERS if name not in ("batched", "feedback-late")} | {
    "powersgd-int8-late": lambda _: powersgd(2, start_step=1, comm_dtype="int8"),
    "powersgd-int8-cold": lambda _: powersgd(2, comm_dtype="int8", warm_start=False),
    "powersgd-int8-full": lambda _: powersgd(40, comm_dtype="int8", min_compression_rate=0.0),
    "feedback-bf16": lambda _: feedback(allreduce(comm_dtype=jnp.bfloat16)),
    "feedback-batched": lambda _: feedback(batched(2, start_step=1, error_feedback=False)),
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax itself is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def sends_int8(name):
    return "int8" in name


@pytest.mark.parametrize("name", REDUCERS)
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
    # But for `batched`, of which all leaves are one matrix, other tests have compiled this.
    grads = {"dense": GRADS["dense"]} if name == "batched" else GRADS
    expected, _ = simulate("shard_map", reducer(name), grads)
    atol = LEVEL if sends_int8(name) else 1e-5
    for t, rate in enumerate((1.0, 0.75, 0.5, 0.5)):
        np.testing.assert_allclose(outputs["dense"][t], -rate * expected["dense"][t], atol=atol)
        mean = GRADS["norm"][:, t].mean(0)
        np.testing.assert_allclose(outputs["norm"][t], -rate * mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", REDUCERS)
def test_multisteps_under_shard_map_is_told_of_accumulate(name):
    tx = optax.MultiSteps(optax.chain(reducer(name), optax.sgd(1.0)), 2)
    with pytest.raises(ValueError, match=r"jaxcomp\.accumulate"):
        simulate("shard_map", tx, GRADS)


@pytest.mark.parametrize(
    ("name", "mapping", "accumulate"),
    [
        *((*case, optax.MultiSteps) for case in ELSEWHERE),
        ("powersgd-int8", "shard_map", jaxcomp.accumulate),
    ],
)
def test_the_mean_of_the_micro_batches_is_reduced(name, mapping, accumulate):
    """Two micro-batches of g are one batch of their mean, and the updates leave replicated."""
    tx = accumulate(optax.chain(reducer(name), optax.sgd(1.0)), 2)
    outputs, _ = simulate(mapping, tx, GRADS)
    mean = jax.tree.map(lambda g: g.reshape(2, 2, 2, *g.shape[2:]).mean(2), GRADS)
    expected, _ = simulate("shard_map", reducer(name), mean)
    for leaf in SMALL:
        assert not np.any(outputs[leaf][::2])
        atol = LEVEL if sends_int8(name) else 2e-4
        np.testing.assert_allclose(outputs[leaf][1::2], -expected[leaf], atol=atol)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_bad_step_leaves_no_trace_and_apply_if_finite_skips_it(name):
    rule = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), max_consecutive_errors=5)
    tx = optax.chain(reducer(name), rule)
    bad = jax.tree.map(np.array, GRADS)
    bad["dense"][1, 2, 0, 0] = np.inf
    outputs, state = simulate("shard_map", tx, bad)
    skipped, expected = simulate(
        "shard_map", tx, jax.tree.map(lambda g: np.delete(g, 2, axis=1), GRADS)
    )
    for leaf in SMALL:
        assert not np.any(outputs[leaf][2])
        np.testing.assert_array_equal(np.delete(outputs[leaf], 2, axis=0), skipped[leaf])
    assert np.any(outputs["dense"][3])
    assert int(state[1].total_notfinite) == 1
    jax.tree.map(np.testing.assert_array_equal, state[0], expected[0])


@pytest.mark.parametrize("name", KEEP)
def test_what_is_not_sent_is_kept(name):
    """Outputs and the mean residual add up to what went in; without a residual nothing is kept."""
    tx = reducer(name) if name in REDUCERS else KEEP[name](0)
    outputs, state = simulate("shard_map", tx, GRADS)
    kept = getattr(state, "residual", {})
    if not jax.tree.leaves(kept):
        assert name.startswith(("allreduce", "int8", "powersgd-no", "own"))
        return
    # A float16 all-reduce rounds inside the sum as well, which nobody can attribute.
    rounded = {"powersgd-fp16": 5e-2, "feedback-fp16": 2e-2, "feedback-own": 2e-2}
    atol = rounded.get(name, 2e-5)
    for leaf, x in GRADS.items():
        total = np.asarray(outputs[leaf]).sum(0)
        if not isinstance(kept[leaf], optax.MaskedNode):
            total = total + np.asarray(kept[leaf], np.float32).mean(0)
        np.testing.assert_allclose(total, x.mean(0).sum(0), atol=atol)


@pytest.mark.parametrize("name", [*KINDS, "powersgd-int8", "feedback-fp16", "own"])
def test_bfloat16_training(name):
    """Parameters and gradients in bfloat16: dtypes stay, residual and factors are not rounded."""
    rng, tx = np.random.default_rng(1), reducer(name, 20)
    target = {"bias": np.ones(16), "dense": rng.normal(size=(24, 16))}
    target = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), target)
    noise = jnp.asarray(rng.normal(size=(2, 60, 24, 16)) / 2, jnp.bfloat16)

    def train(noise):
        def one(carry, e):
            params, state = carry
            grads = jax.tree.map(lambda p, t: p - t, params, target)
            updates, state = tx.update(grads | {"dense": grads["dense"] + e}, state)
            assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
            updates = jax.tree.map(lambda u: jnp.asarray(-0.1, u.dtype) * u, updates)
            return (optax.apply_updates(params, updates), state), None

        params = jax.tree.map(jnp.zeros_like, target)
        return jax.lax.scan(one, (params, tx.init(params)), noise)[0]

    trained, state = jax.jit(jax.vmap(train, axis_name=AXIS))(noise)
    for leaf, x in trained.items():
        found, wanted = (np.asarray(y, np.float32) for y in (x, target[leaf]))
        assert np.abs(found[0] - wanted).mean() < 0.35 * np.abs(wanted).mean()
        np.testing.assert_array_equal(found[0], found[1])
    assert all_finite(state)


def test_what_was_sent_of_float16_in_bfloat16_is_what_was_averaged():
    tx, grads = reducer("allreduce-bf16"), np.float16(np.arange(64.0).reshape(2, 32) / 7)
    sent = jax.vmap(lambda g: tx.reduce(g, tx.init(g)).sent, axis_name=AXIS)(grads)
    np.testing.assert_array_equal(sent, grads.astype(jnp.bfloat16).astype(np.float16))


@pytest.mark.parametrize("name", REDUCERS)
def test_float0_none_scalar_and_empty_leaves_pass(name):
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
        return {k: v for k, v in tx.update(grads, tx.init(params))[0].items() if k != "steps"}

    mapped = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name=AXIS))
    updates = mapped(params, jnp.arange(3.0))
    # int8: half a level of the largest of 0, 64 and 128, and half a level of the mean; or one each.
    rtol = 2 / 127 if sends_int8(name) else {"allreduce-bf16": 2**-8}.get(name, 1e-5)
    if name == "batched":  # in which the scalar is part of one matrix of low rank
        assert np.isfinite(updates["scalar"]).all()
    else:
        np.testing.assert_allclose(updates["scalar"], 64.0, rtol=rtol)
    assert updates["none"] is None
    assert updates["empty"].shape == (3, 0, 4)


@pytest.mark.parametrize("name", REDUCERS)
def test_of_no_tree_an_operand_is_broadcast_to_more_dimensions(name):
    """Also where there is nothing to compress."""
    tx = reducer(name)
    for shapes in ({}, {"empty": (0, 3)}, {"bias": (5,), "scalar": ()}, SMALL):
        many = jax.tree.map(lambda x: np.stack([x] * 2), zeros(shapes))
        update = lambda i, g: tx.update(g, tx.init(zeros(shapes)))[0]  # noqa: B023, E731
        with jax.numpy_rank_promotion("raise"):
            found = jax.eval_shape(jax.vmap(update, axis_name=AXIS), np.arange(2), many)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, many)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_single_replica_needs_no_mapped_gradients(name):
    """As beside automatic axes, where one replica's gradients are no operand with an axis."""
    tx = reducer(name)
    grads = {leaf: x[0, 0] for leaf, x in GRADS.items()}
    state = tx.init(zeros(SMALL))
    unmapped = jax.vmap(tx.update, in_axes=None, axis_name=AXIS, axis_size=1)
    outputs, _ = jax.jit(unmapped)(grads, state)
    mapped = jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS)
    one = {leaf: x[:1, 0] for leaf, x in GRADS.items()}
    expected, _ = jax.jit(mapped)(one, state)
    for leaf in SMALL:
        np.testing.assert_allclose(outputs[leaf], expected[leaf], rtol=1e-5, atol=1e-6)


def test_integers_along_two_axes_of_which_one_has_a_single_replica():
    tx = jaxcomp.quantized_allreduce(axis_name=("slow", "fast"))

    def update(grads):
        return tx.update(grads, optax.EmptyState())[0]

    fast = jax.vmap(update, axis_name="fast")
    both = jax.vmap(fast, in_axes=None, axis_name="slow", axis_size=1)
    grads = {leaf: x[:, 0] for leaf, x in GRADS.items()}
    outputs = jax.jit(both)(grads)
    for leaf, x in grads.items():
        np.testing.assert_allclose(outputs[leaf][0, 0], x.mean(0), atol=LEVEL)


@pytest.mark.parametrize("name", [*REDUCERS, *BARE])
def test_gradients_that_are_not_floating_are_all_named(name):
    tx = reducer(name)
    grads = {"w": jnp.ones((2, 8, 8)), "odd": jnp.ones((2, 3), int), "z": jnp.ones((2, 3), complex)}
    state = tx.init(jax.tree.map(lambda g: g[0], grads))
    with pytest.raises(ValueError, match=r"\['odd'\] has dtype int32; \['z'\] has dtype complex64"):
        jax.vmap(lambda g: tx.update(g, state)[0], axis_name=AXIS)(grads)
    with pytest.raises(ValueError, match=r"\['b'\] is a float and no array"):
        jax.vmap(lambda g: tx.update({"w": g, "b": 1.0}, state)[0], axis_name=AXIS)(grads["w"])


@pytest.mark.parametrize("name", REDUCERS)
def test_an_unbound_axis_is_named_with_the_fix(name):
    tx, grads = reducer(name), {"w": jnp.ones((8, 8))}
    with pytest.raises(ValueError, match=r"axis 'data' is not bound here. Call update\(\) inside"):
        tx.update(grads, tx.init(grads))
    with pytest.raises(ValueError, match="not bound"):
        jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="batch")({"w": jnp.ones((2, 8, 8))})


@pytest.mark.parametrize("name", [*REDUCERS, *BARE])
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
    tx, other = reducer(name), reducer("powersgd" if "feedback-" in name else "feedback-int8")
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
        assert isinstance(other, jaxcomp.Reducer)
        assert repr(other) == repr(tx)
    state = tx.init(zeros(SMALL))
    again = pickle.loads(pickle.dumps(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, again, state)
