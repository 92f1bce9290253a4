"""The algorithm: against a NumPy reference, and the invariants that make it trustworthy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomp
from tests.helpers.leaves import COMPRESSED, SHAPES, as_matrix, random_grads, zeros, zeros_of_one
from tests.helpers.reducers import feedback, powersgd, quantized
from tests.helpers.reference import Reference, assert_steps
from tests.helpers.runners import AXIS, MAPPINGS, simulate, types_of


@pytest.mark.parametrize(
    ("mapping", "rank"), [("vmap", 1), *((mapping, r) for mapping in MAPPINGS for r in (2, 4))]
)
def test_equals_the_numpy_reference(mapping, rank):
    n, steps = 3, 6
    grads = random_grads(SHAPES, n, steps)
    tx = powersgd(rank)
    state = tx.init(zeros())
    outputs, final = simulate(mapping, tx, grads, state)

    for name in COMPRESSED:
        matrices = [as_matrix(name, x[name]) for x in (grads, outputs, final.residual)]
        q, allowed = assert_steps(*matrices, state.q[name])
        # A column of a factor is a product of so many rows: its length, not a value's.
        atol = allowed * np.sqrt(matrices[0].shape[2])
        np.testing.assert_allclose(np.abs(final.q[name]), np.abs(q), rtol=0, atol=atol)
    np.testing.assert_allclose(outputs["bias"], grads["bias"].mean(0), rtol=1e-6)
    assert isinstance(final.q["bias"], optax.MaskedNode)
    assert int(final.count) == steps


def test_decay_scales_the_residual_and_may_be_a_schedule():
    grads = random_grads({"dense": (24, 16)}, 2, 4)
    schedule = optax.linear_schedule(1.0, 0.25, 3)
    tx = feedback(powersgd(1, error_feedback=False), decay=schedule)
    state = tx.init(zeros_of_one(grads))
    outputs, _ = simulate("vmap", tx, grads, state)
    matrices = as_matrix("dense", np.asarray(grads["dense"], np.float64))
    reference = Reference(2, 16, 24, state.inner.q["dense"])
    for t in range(4):
        expected = reference.step(matrices[:, t], decay=float(schedule(t)))
        np.testing.assert_allclose(as_matrix("dense", outputs["dense"][t]), expected, atol=2e-5)


shapes = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)),
    st.tuples(st.integers(2, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
)


leaves = st.tuples(shapes, st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))


@settings(max_examples=5)  # each compiles a program of its own, of several leaves
@given(
    kinds=st.lists(leaves, min_size=4, max_size=4),
    rank=st.integers(1, 5),
    n=st.integers(1, 5),
    wire=st.sampled_from([None, jnp.bfloat16, jnp.float16]),
    seed=st.integers(0, 9),
)
def test_output_plus_mean_residual_is_the_mean_of_what_went_in(kinds, rank, n, wire, seed):
    shapes = {f"leaf_{i}": shape for i, (shape, _) in enumerate(kinds)}
    dtypes = dict(zip(shapes, (dtype for _, dtype in kinds), strict=True))
    grads = random_grads(shapes, n, 1, seed)
    grads = {name: grads[name].astype(dtypes[name]) for name in shapes}
    tx = powersgd(rank, min_compression_rate=0.0, comm_dtype=wire)
    state = tx.init(zeros_of_one(grads))
    rng = np.random.default_rng(seed)
    old = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    outputs, final = simulate("vmap", tx, grads, state._replace(residual=old))
    for name, dtype in dtypes.items():
        assert outputs[name].dtype == dtype
        assert final.residual[name].dtype == jnp.float32
        went_in = grads[name][:, 0].astype(np.float32).mean(0) + old[name]
        came_out = outputs[name][0].astype(np.float32) + final.residual[name].mean(0)
        # The output is rounded to the gradient's dtype, and a float16 sum is rounded on its way.
        tolerance = 1e-5 if (dtype == jnp.float32 and wire != jnp.float16) else 3e-2
        np.testing.assert_allclose(came_out, went_in, atol=tolerance * np.abs(went_in).max())


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


@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    st.sampled_from([{}, {"weight": 2.0}]),
)
def test_all_options_work_beside_each_other(options, extra):
    """Traced, which costs no compilation."""
    leaves = {"half": jnp.zeros((12, 8), jnp.float16), "blocks": jnp.zeros((2, 12, 8))}
    leaves["b"] = jnp.zeros(5)
    tx = powersgd(2, **options)
    usual = powersgd(2, **options | {"comm_dtype": None, "start_step": 9})
    state, other = (jax.eval_shape(x.init, leaves) for x in (tx, usual))
    assert types_of(state) == types_of(other)  # so a run can change these

    def step(grads, state):
        found = tx.reduce(grads, state, **extra)
        return found.updates, found.state, found.sent

    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), leaves)
    found = jax.eval_shape(jax.vmap(step, (0, None), axis_name=AXIS), stacked, state)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)
    assert list(map(types_of, one)) == [types_of(x) for x in (leaves, state, leaves)]


def test_many_columns_on_a_bfloat16_wire_lose_nothing():
    """Sums more than 64 columns: they are widened once, and known to be replicated."""
    tx = powersgd(70, min_compression_rate=0.0, comm_dtype=jnp.bfloat16)
    grads = random_grads({"a": (72, 80)}, 2, 2)
    outputs, state = simulate("shard_map", tx, grads)
    total = outputs["a"].sum(0) + state.residual["a"].mean(0)
    np.testing.assert_allclose(total, grads["a"].mean(0).sum(0), atol=2e-5)


@pytest.mark.parametrize(
    "tx",
    [
        powersgd(2),
        powersgd(4),
        powersgd(4, comm_dtype=jnp.int8),
        feedback(quantized()),
    ],
    ids=["rank 2", "rank 4", "factors of int8", "int8"],
)
def test_the_residual_stays_bounded(tx):
    """torch's rule lets it grow like sqrt(steps): 3.2 times from 400 to 4 000."""
    n, shape, steps = 4, (24, 16), 2_000
    state = tx.init({"w": jnp.zeros(shape)})
    signal = jax.random.normal(jax.random.key(1), shape)

    def run(key, state):
        def one(state, t):
            noise = jax.random.normal(jax.random.fold_in(key, t), shape)
            _, state = tx.update({"w": signal + noise}, state)
            return state, jnp.linalg.norm(state.residual["w"])

        return jax.lax.scan(one, state, jnp.arange(steps))[1]

    mapped = jax.jit(jax.vmap(run, in_axes=(0, None), axis_name=AXIS))
    norms = np.asarray(mapped(jax.random.split(jax.random.key(2), n), state)).mean(0)
    assert norms[-100:].mean() < 1.5 * norms[200:300].mean()
