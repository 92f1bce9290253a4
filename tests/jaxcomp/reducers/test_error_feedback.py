"""Reducers made of reducers: `error_feedback` and `switch_at`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from leaves import as_matrix, random_grads, zeros_of_one
from reference import Reference
from runners import AXIS, MAPPINGS, simulate

import jaxcomp

SHAPES = {"bias": (16,), "dense": (24, 16)}

REDUCERS = {
    "int8": lambda: jaxcomp.quantized_allreduce(axis_name=AXIS, block_size=32),
    "float16": lambda: jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.float16),
    "bfloat16": lambda: jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.bfloat16),
    "powersgd": lambda: jaxcomp.powersgd(
        2, axis_name=AXIS, start_step=1, error_feedback=False, min_compression_rate=1.0
    ),
    "batched": lambda: jaxcomp.batched_powersgd(
        2, axis_name=AXIS, start_step=1, error_feedback=False
    ),
    "switch": lambda: jaxcomp.switch_at(
        2, REDUCERS["bfloat16"](), jaxcomp.quantized_allreduce(axis_name=AXIS)
    ),
}


@pytest.mark.parametrize(
    ("name", "mapping"),
    [*((name, "shard_map") for name in REDUCERS), ("int8", "pmap"), ("powersgd", "vmap")],
)
def test_what_is_not_sent_is_kept(name, mapping):
    n, steps = 3, 4
    grads = random_grads(SHAPES, n, steps)
    tx = jaxcomp.error_feedback(REDUCERS[name]())
    outputs, state = simulate(mapping, tx, grads, tx.init(zeros_of_one(grads)))
    # A float16 all-reduce rounds inside the sum as well, which nobody can attribute.
    tolerance = 2e-2 if name == "float16" else 2e-5
    for leaf, x in grads.items():
        sent = np.asarray(outputs[leaf]).sum(0)
        given = np.asarray(x).mean(0).sum(0)
        np.testing.assert_allclose(
            sent + np.asarray(state.residual[leaf]).mean(0), given, atol=tolerance
        )


def test_it_gives_powersgd_the_residual_that_powersgd_keeps_itself():
    grads = random_grads(SHAPES, 3, 4)
    arguments = {"axis_name": AXIS, "start_step": 0, "min_compression_rate": 1.0}
    own = jaxcomp.powersgd(2, **arguments)
    given = jaxcomp.error_feedback(jaxcomp.powersgd(2, error_feedback=False, **arguments))
    expected, e = simulate("vmap", own, grads, own.init(zeros_of_one(grads)))
    outputs, f = simulate("vmap", given, grads, given.init(zeros_of_one(grads)))
    np.testing.assert_allclose(outputs["dense"], expected["dense"], atol=1e-5)
    np.testing.assert_allclose(f.residual["dense"], e.residual["dense"], atol=1e-5)


@pytest.mark.parametrize("foreign", [False, True])
def test_the_residual_stays_bounded_where_the_contribution_is_known(foreign):
    """Without it the replicas' deviations from the mean are never sent, as with torch's hooks."""
    grads = {"w": random_grads({"w": (64,)}, 4, 400)["w"] * 1.0}
    reducer = jaxcomp.quantized_allreduce(axis_name=AXIS)
    if foreign:
        reducer = optax.GradientTransformationExtraArgs(reducer.init, reducer.update)
    tx = jaxcomp.error_feedback(reducer)
    state = tx.init({"w": jnp.zeros(64)})
    _, early = simulate("vmap", tx, {"w": grads["w"][:, :20]}, state)
    _, late = simulate("vmap", tx, grads, state)
    growth = np.linalg.norm(late.residual["w"]) / np.linalg.norm(early.residual["w"])
    assert growth > 2.5 if foreign else growth < 1.5
    # One level of what is rounded; of a foreign reducer the residuals have grown.
    largest = np.abs(grads["w"]).max() + np.abs(late.residual["w"]).max()
    assert np.abs(late.residual["w"].mean(0)).max() < (largest / 127 if foreign else 0.1)


def test_bfloat16_gradients_and_residuals():
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_grads(SHAPES, 2, 3))
    tx = jaxcomp.error_feedback(REDUCERS["int8"](), residual_dtype=jnp.bfloat16)
    outputs, state = simulate("shard_map", tx, grads, tx.init(zeros_of_one(grads)))
    assert {x.dtype for x in jax.tree.leaves((outputs, state.residual))} == {jnp.dtype("bfloat16")}


def test_a_fast_axis_in_front_leaves_the_residual_equal_along_it():
    grads = random_grads({"w": (6, 5)}, 4, 1)["w"][:, 0].reshape(2, 2, 6, 5)
    tx = optax.chain(
        jaxcomp.allreduce(axis_name="fast"),
        jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="slow")),
    )
    step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="fast")
    outputs, (_, state) = jax.jit(jax.vmap(step, axis_name="slow"))(grads)
    np.testing.assert_array_equal(state.residual[:, 0], state.residual[:, 1])
    np.testing.assert_allclose(
        outputs[0, 0] + state.residual.mean((0, 1)), grads.mean((0, 1)), atol=1e-6
    )


def low_rank(**options):
    return jaxcomp.error_feedback(
        jaxcomp.powersgd(1, axis_name=AXIS, start_step=0, error_feedback=False), **options
    )


def test_decay_scales_the_residual_and_may_be_a_schedule():
    grads = random_grads({"dense": (24, 16)}, 2, 4)
    schedule = optax.linear_schedule(1.0, 0.25, 3)
    tx = low_rank(decay=schedule)
    state = tx.init({"dense": jnp.zeros((24, 16))})
    outputs, _ = simulate("vmap", tx, grads, state)
    matrices = as_matrix("dense", np.asarray(grads["dense"], np.float64))
    reference = Reference(2, 16, 24, state.inner.q["dense"])
    for t in range(4):
        expected = reference.step(matrices[:, t], decay=float(schedule(t)))
        np.testing.assert_allclose(as_matrix("dense", outputs["dense"][t]), expected, atol=2e-5)


def test_every_accumulates_in_between():
    grads = random_grads({"w": (10, 8)}, 2, 4)
    tx = low_rank(every=2)
    outputs, state = simulate("vmap", tx, grads, tx.init({"w": jnp.zeros((10, 8))}))
    # Nothing is lost: what went in is what came out plus what is still kept.
    total = outputs["w"].sum(0) + state.residual["w"].mean(0)
    np.testing.assert_allclose(total, grads["w"].mean(0).sum(0), atol=1e-4)
    # The first update adds nothing back, the second adds what the first lost.
    plain = jaxcomp.powersgd(1, axis_name=AXIS, start_step=0)
    expected, _ = simulate("vmap", plain, grads, plain.init({"w": jnp.zeros((10, 8))}))
    np.testing.assert_allclose(outputs["w"][:2], expected["w"][:2], atol=1e-5)
    assert np.abs(outputs["w"][2] - expected["w"][2]).max() > 1e-3


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_switch_at_is_one_reducer_and_then_the_other(mapping):
    grads = random_grads(SHAPES, 2, 5)
    first = jaxcomp.allreduce(axis_name=AXIS)
    second = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0, min_compression_rate=1.0)
    tx = jaxcomp.switch_at(2, first, second)
    outputs, state = simulate(mapping, tx, grads, tx.init(zeros_of_one(grads)))
    head, tail = (jax.tree.map(lambda x, c=c: x[:, c], grads) for c in (slice(2), slice(2, None)))
    before, _ = simulate("vmap", first, head, first.init(zeros_of_one(grads)))
    after, expected = simulate("vmap", second, tail, second.init(zeros_of_one(grads)))
    for name in SHAPES:
        np.testing.assert_allclose(outputs[name][:2], before[name], atol=1e-6)
        np.testing.assert_allclose(outputs[name][2:], after[name], atol=1e-5)
    np.testing.assert_allclose(state.after.residual["dense"], expected.residual["dense"], atol=1e-5)
    assert int(state.count) == 5
    assert int(state.after.count) == 3


def test_start_step_is_the_same_hand_over():
    grads = random_grads(SHAPES, 2, 4)
    arguments = {"axis_name": AXIS, "min_compression_rate": 1.0}
    built_in = jaxcomp.powersgd(2, start_step=2, **arguments)
    switched = jaxcomp.switch_at(
        2, jaxcomp.allreduce(axis_name=AXIS), jaxcomp.powersgd(2, start_step=0, **arguments)
    )
    expected, _ = simulate("vmap", built_in, grads, built_in.init(zeros_of_one(grads)))
    outputs, _ = simulate("vmap", switched, grads, switched.init(zeros_of_one(grads)))
    for name in SHAPES:
        np.testing.assert_allclose(outputs[name], expected[name], atol=1e-6)


def test_a_plain_transformation_can_be_switched_to():
    plain = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda g, s, params=None: (jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), g), s),
    )
    grads = random_grads(SHAPES, 2, 3)
    tx = jaxcomp.error_feedback(jaxcomp.switch_at(1, plain, plain))
    outputs, _ = simulate("vmap", tx, grads, tx.init(zeros_of_one(grads)))
    np.testing.assert_allclose(outputs["dense"], grads["dense"].mean(0), atol=1e-5)


def test_consolidation_reaches_into_both():
    tx = jaxcomp.switch_at(
        1,
        jaxcomp.error_feedback(REDUCERS["int8"]()),
        jaxcomp.powersgd(1, axis_name=AXIS, start_step=0),
    )
    state = tx.init({"w": jnp.zeros((16, 16))})
    specs = jaxcomp.state_specs(state, AXIS)
    assert specs.before.residual["w"] == specs.after.residual["w"] == jax.P(AXIS)
    assert specs.count == specs.before.count == specs.after.q["w"] == jax.P()


def test_messages():
    with pytest.raises(ValueError, match="must have the same axis_name"):
        jaxcomp.switch_at(1, jaxcomp.allreduce(axis_name="a"), jaxcomp.allreduce(axis_name="b"))
    with pytest.raises(ValueError, match="`step` must be a non-negative integer"):
        jaxcomp.switch_at(-1, optax.identity(), optax.identity())
    tx = jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS))
    state = tx.init({"w": jnp.zeros((4, 3))})
    with pytest.raises(ValueError, match=r"residual\['w'\]: expected \(2, 3\), got \(4, 3\)"):
        jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS)({"w": jnp.zeros((2, 2, 3))}, state)
    with pytest.raises(ValueError, match="different tree structures"):
        jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS)({"v": jnp.zeros((2, 2, 3))}, state)


def test_a_switch_from_a_stateless_reducer_takes_no_half_step():
    tx = jaxcomp.switch_at(
        5,
        jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.bfloat16),
        jaxcomp.powersgd(1, axis_name=AXIS, start_step=0),
    )
    grads = random_grads({"w": (8, 8), "b": (3,)}, 2, 2)
    grads["w"][0, 1, 0, 0] = np.nan
    state = tx.init({"w": jnp.zeros((8, 8)), "b": jnp.zeros(3)})
    outputs, state = simulate("vmap", tx, grads, state)
    assert np.isfinite(outputs["b"][0]).all()
    assert np.isnan(outputs["b"][1]).all()
    assert np.isnan(outputs["w"][1]).all()
    assert int(state.count) == 1


def test_a_float16_output_that_overflows_is_a_bad_step():
    tx = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
    params = {"w": jnp.zeros((4,), jnp.float16)}
    state = tx.init(params)._replace(residual={"w": jnp.full((4,), 200.0)})
    grads = {"w": jnp.full((2, 1, 4), 65504, jnp.float16)}
    outputs, after = simulate("vmap", tx, grads, state)
    assert np.isnan(outputs["w"].astype(jnp.float32)).all()
    np.testing.assert_array_equal(after.residual["w"], jnp.full((2, 4), 200.0))
    assert int(after.count) == 0


@pytest.mark.parametrize(
    "kind",
    [
        lambda: jaxcomp.powersgd(2, axis_name=AXIS),
        lambda: jaxcomp.batched_powersgd(2, axis_name=AXIS),
        lambda: jaxcomp.switch_at(3, REDUCERS["int8"](), jaxcomp.powersgd(2, axis_name=AXIS)),
        lambda: optax.chain(jaxcomp.error_feedback(REDUCERS["int8"]()), optax.scale(2.0)),
    ],
    ids=["powersgd", "batched", "switch", "error_feedback"],
)
def test_a_second_residual_is_refused(kind):
    with pytest.raises(ValueError, match=r"keeps a residual of its own.*error_feedback=False"):
        jaxcomp.error_feedback(kind()).init({"w": jnp.zeros((16, 12))})
