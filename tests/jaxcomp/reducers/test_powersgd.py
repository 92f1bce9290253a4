"""The algorithm: against a NumPy reference, and the invariants that make it trustworthy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import (
    COMPRESSED,
    SHAPES,
    as_matrix,
    normal,
    random_grads,
    zeros,
    zeros_of_one,
)
from tests.helpers.reducers import feedback, powersgd, quantized
from tests.helpers.reference import Reference, assert_steps
from tests.helpers.runners import AXIS, MAPPINGS, first, simulate, types_of


# A rank has its own arithmetic, and a mapping its own collectives: each pair would prove no more.
@pytest.mark.parametrize(
    ("mapping", "rank"), [("vmap", 1), ("vmap", 2), *((mapping, 4) for mapping in MAPPINGS)]
)
def test_equals_the_numpy_reference(mapping, rank):
    n = 3
    steps = 6
    grads = random_grads(SHAPES, n, steps)
    tx = powersgd(rank)
    state = tx.init(zeros())
    outputs, final = simulate(mapping, tx, grads, state)

    for name in COMPRESSED:
        matrices = [as_matrix(name, x[name]) for x in (grads, outputs, final.residual)]
        q, allowed = assert_steps(*matrices, state.q[name])
        # A column of a factor is a product of so many rows: its length, not a value's.
        atol = allowed * np.sqrt(matrices[0].shape[2])
        assert_allclose(np.abs(final.q[name]), np.abs(q), rtol=0, atol=atol)
    assert_allclose(outputs["bias"], grads["bias"].mean(0), rtol=1e-6)
    assert isinstance(final.q["bias"], optax.MaskedNode)
    assert int(final.count) == steps


def test_decay_scales_the_residual_and_may_be_a_schedule():
    grads = random_grads({"dense": (24, 16)}, 2, 4)
    schedule = optax.linear_schedule(1.0, 0.25, 3)
    tx = feedback(powersgd(1, error_feedback=False), decay=schedule)
    state = tx.init(zeros_of_one(grads))
    outputs, _ = simulate("vmap", tx, grads, state)
    reference = Reference(2, 16, 24, state.inner.q["dense"])
    matrices = as_matrix("dense", grads["dense"])
    found = as_matrix("dense", outputs["dense"])
    for t in range(4):
        expected = reference.step(matrices[:, t], decay=float(schedule(t)))
        assert_allclose(found[t], expected, atol=2e-5)


shapes = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)),
    st.tuples(st.integers(2, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
)
leaves = st.tuples(shapes, st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))


@settings(max_examples=3)  # each compiles a program of its own, of several leaves
@given(
    kinds=st.lists(leaves, min_size=4, max_size=4),
    rank=st.integers(1, 5),
    n=st.integers(1, 5),
    wire=st.sampled_from([None, jnp.bfloat16, jnp.float16]),
)
def test_output_plus_mean_residual_is_the_mean_of_what_went_in(kinds, rank, n, wire):
    grads = {}
    residual = {}
    for seed, (shape, dtype) in enumerate(kinds):
        name = f"leaf_{seed}"
        drawn = random_grads({name: shape}, n, 1, seed=seed)
        grads[name] = drawn[name].astype(dtype)
        residual[name] = normal(*shape, seed=seed)
    tx = powersgd(rank, min_compression_rate=0.0, comm_dtype=wire)
    state = tx.init(zeros_of_one(grads))
    outputs, final = simulate("vmap", tx, grads, state._replace(residual=residual))
    for name, gradient in grads.items():
        assert outputs[name].dtype == gradient.dtype
        assert final.residual[name].dtype == jnp.float32
        mean = gradient[:, 0].astype(np.float32).mean(0)
        went_in = mean + residual[name]
        output = outputs[name][0].astype(np.float32)
        came_out = output + final.residual[name].mean(0)
        # The output is rounded to the gradient's dtype, and a float16 sum is rounded on its way.
        exact = gradient.dtype == jnp.float32 and wire != jnp.float16
        tolerance = 1e-5 if exact else 3e-2
        assert_allclose(came_out, went_in, atol=tolerance * np.abs(went_in).max())


OPTIONS = {
    "start_step": [0, 3],
    "min_compression_rate": [2.0, 1.0],
    "error_feedback": [True, False],
    "warm_start": [True, False],
    "eps": [0.0, 1e-8],
    "comm_dtype": [None, jnp.bfloat16, "int8"],
    "residual_dtype": [jnp.float32, jnp.bfloat16],
    "matrix_dims": [None, jaxcomp.stacked("blocks")],
}


@settings(max_examples=16)
@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    st.sampled_from([{}, {"weight": 2.0}]),
)
def test_all_options_work_beside_each_other(options, extra):
    """Traced, which costs no compilation."""
    params = {
        "half": jnp.zeros((12, 8), jnp.float16),
        "blocks": jnp.zeros((2, 12, 8)),
        "b": jnp.zeros(5),
    }
    tx = powersgd(2, **options)
    usual = powersgd(2, **options | {"comm_dtype": None, "start_step": 9})
    state = tx.init(params)
    assert types_of(state) == types_of(usual.init(params))  # so a run can change these

    def step(grads):
        reduction = tx.reduce(grads, state, **extra)
        return reduction.updates, reduction.state, reduction.sent

    grads = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    several = jax.eval_shape(jax.vmap(step, axis_name=AXIS), grads)
    updates, new_state, sent = jax.eval_shape(first, several)
    assert types_of(updates) == types_of(sent) == types_of(params)
    assert types_of(new_state) == types_of(state)


def test_many_columns_on_a_bfloat16_wire_lose_nothing():
    """Sums more than 64 columns: they are widened once, and known to be replicated."""
    tx = powersgd(70, min_compression_rate=0.0, comm_dtype=jnp.bfloat16)
    grads = random_grads({"a": (72, 80)}, 2, 2)
    outputs, state = simulate("shard_map", tx, grads)
    total = outputs["a"].sum(0) + state.residual["a"].mean(0)
    assert_allclose(total, grads["a"].mean(0).sum(0), atol=2e-5)


@pytest.mark.parametrize(
    "tx",
    [powersgd(2), powersgd(4, comm_dtype=jnp.int8), feedback(quantized())],
    ids=["rank 2", "factors of int8", "int8"],
)
def test_the_residual_stays_bounded(tx):
    """torch's rule lets it grow like sqrt(steps): 3.2 times from 400 to 4 000."""
    n = 4
    shape = (24, 16)
    steps = 2_000
    signal = jax.random.normal(jax.random.key(1), shape)

    def run(key):
        def one(state, step):
            noise = jax.random.normal(jax.random.fold_in(key, step), shape)
            _, state = tx.update(signal + noise, state)
            return state, jnp.linalg.norm(state.residual)

        _, norms = jax.lax.scan(one, tx.init(signal), jnp.arange(steps))
        return norms

    keys = jax.random.split(jax.random.key(2), n)
    norms = jax.jit(jax.vmap(run, axis_name=AXIS))(keys)
    early = norms[:, 200:300].mean()
    late = norms[:, -100:].mean()
    assert late < 1.5 * early


def test_cold_starts_differ_from_leaf_to_leaf_and_step_to_step():
    """Takes equal gradients: what a random factor finds in them tells the factors apart."""
    one = np.repeat(random_grads({"a": (20, 24)}, 2, 1)["a"], 2, axis=1)
    tx = powersgd(3, warm_start=False, error_feedback=False)
    outputs, _ = simulate("vmap", tx, {"a0": one, "a1": one, "a2": one})
    every = np.concatenate(list(outputs.values()))
    for one, other in itertools.combinations(every, 2):
        assert np.abs(one - other).max() > 1e-2
