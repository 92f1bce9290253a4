"""`diagnostics` of states of every kind, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.classifier import KINDS, grid, placed
from tests.helpers.runners import AXIS, first, mesh_of, sharded, stack

REPLICAS = 4
SHAPES = {"wide": (24, 40), "stack": (3, 16, 20), "bias": (7,)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


@functools.cache
def powersgd(rank, **options):
    """Makes a reducer that compresses from the start, and the stack layer by layer."""
    options = {"matrix_dims": jaxcomp.stacked("stack"), **options}
    return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, min_compression_rate=1.0, **options)


def gradients(step):
    """Draws gradients of all replicas with something in common."""
    rng = np.random.default_rng(step)
    common = np.random.default_rng(99)

    def draw(leaf):
        shared = common.normal(size=leaf.shape)
        own = rng.normal(size=(REPLICAS, *leaf.shape))
        return jnp.asarray(shared + own, jnp.float32)

    return jax.tree.map(draw, PARAMS)


def stepped(tx, state, grads):
    """Takes a step under vmap; the residuals come with an axis of replicas."""
    axes = jaxcomp.state_axes(state)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS))
    return step(grads, state)[1]


@functools.cache
def trained(tx):
    """Takes three steps."""
    state = jaxcomp.stack_replicas(tx.init(PARAMS), REPLICAS)
    for k in range(3):
        state = stepped(tx, state, gradients(k))
    return state


def expected(residual, q):
    """Computes share, norms and singular values in float64, from one residual a replica."""
    mean = np.asarray(residual, np.float64).mean(0)
    q = np.asarray(q, np.float64)
    output = (q**2).sum()
    rest = (mean**2).sum()
    values = np.linalg.svd(q, compute_uv=False)
    return output / (output + rest), np.sqrt(output), np.sqrt(rest), values


def check(found, state):
    """Compares with NumPy, leaf by leaf and over all of them."""
    energies = []
    assert set(found.leaves) == {"['wide']", "['stack']"}
    for name in ("wide", "stack"):
        want = expected(state.residual[name], state.q[name])
        energies.append((want[1] ** 2, want[2] ** 2))
        for seen, right in zip(found.leaves[f"['{name}']"], want, strict=True):
            np.testing.assert_allclose(seen, right, rtol=1e-4)
    output, rest = np.sum(energies, axis=0)
    np.testing.assert_allclose(found.share, output / (output + rest), rtol=1e-4)
    np.testing.assert_allclose(found.output_norm, np.sqrt(output), rtol=1e-4)
    np.testing.assert_allclose(found.residual_norm, np.sqrt(rest), rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_of_what_vmap_returned(dtype):
    state = trained(powersgd(3, residual_dtype=dtype))
    found = jaxcomp.diagnostics(state)
    check(found, state)
    assert 0.1 < found.share < 0.9
    assert found.leaves["['stack']"].singular_values.shape == (3, 3)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jaxcomp.diagnostics)(state), found)


@pytest.mark.parametrize("jitted", [False, True])
def test_of_every_way_a_state_lies(jitted):
    state = trained(powersgd(3))
    measure = jax.jit(jaxcomp.diagnostics) if jitted else jaxcomp.diagnostics
    check(measure(jaxcomp.consolidate(state)), state)
    for kind in KINDS:
        check(measure(jaxcomp.shard_state(state, grid(REPLICAS, kind), AXIS)), state)
    count, q = stack((state.count, state.q), REPLICAS)
    check(measure(state._replace(count=count, q=q)), state)  # as jax.pmap returns it


def test_beside_weights_that_are_sharded():
    state = trained(powersgd(3))
    for kind in KINDS:
        mesh = grid(2, kind, model=2)
        whole = jaxcomp.consolidate(state)
        for tree in (whole.residual, whole.q):
            tree["wide"] = placed(mesh, tree["wide"], jax.P("model"))
        spread = jaxcomp.shard_state(whole, mesh, AXIS)
        check(jaxcomp.diagnostics(spread), state)
        check(jax.jit(jaxcomp.diagnostics)(spread), state)


def test_inside_of_a_mapped_function():
    tx = powersgd(3)
    state = trained(tx)
    specs = jaxcomp.state_specs(state, AXIS)

    def whole(state):
        return jaxcomp.diagnostics(jaxcomp.consolidate(state, AXIS))

    check(sharded(REPLICAS, whole, (specs,), jax.P())(state), state)
    with pytest.raises(ValueError, match="consolidate"):
        sharded(REPLICAS, jaxcomp.diagnostics, (specs,), jax.P())(state)
    axes = jaxcomp.state_axes(state)
    local = jax.vmap(jaxcomp.diagnostics, in_axes=(axes,), axis_name=AXIS)(state)
    assert np.isnan(local.share).all()
    with pytest.raises(ValueError, match="one replica"):
        jaxcomp.diagnostics(jax.tree.map(lambda x, axis: x if axis is None else x[0], state, axes))


def test_of_an_optimizer_that_holds_it():
    tx = powersgd(3)
    state = trained(tx)
    held = optax.chain(jaxcomp.hold_state(tx), optax.adam(0.1)).init(PARAMS)
    check(jaxcomp.diagnostics({"opt": (state, *held[1:]), "step": 3}), state)


def test_of_several_reducers():
    labels = {"wide": "a", "stack": "b", "bias": "b"}
    tx = optax.partition({"a": powersgd(3, matrix_dims=None), "b": powersgd(2)}, labels)
    state = tx.init(PARAMS)
    assert set(jaxcomp.diagnostics(state).leaves) == {"['wide']", "['stack']"}
    both = jaxcomp.diagnostics((trained(powersgd(3)), trained(powersgd(1))))
    assert set(both.leaves) == {"[0]['wide']", "[0]['stack']", "[1]['wide']", "[1]['stack']"}
    assert both.leaves["[0]['wide']"].share > both.leaves["[1]['wide']"].share


def test_of_error_feedback_around_a_reducer_and_of_one_matrix():
    around = jaxcomp.error_feedback(powersgd(3, error_feedback=False))
    state = trained(around)
    same = trained(powersgd(3))
    check(jaxcomp.diagnostics(state), same)
    one = trained(jaxcomp.batched_powersgd(3, axis_name=AXIS, start_step=0))
    want = expected(one.residual, one.q)
    for seen, right in zip(jaxcomp.diagnostics(one).leaves["(root)"], want, strict=True):
        np.testing.assert_allclose(seen, right, rtol=1e-4)


def test_what_cannot_be_told_is_refused():
    integers = jaxcomp.quantized_allreduce(axis_name=AXIS)
    for tx in (
        powersgd(3, warm_start=False),
        jaxcomp.error_feedback(integers),
        optax.sgd(0.1),
        jaxcomp.powersgd(3, axis_name=AXIS, min_compression_rate=1e9),
    ):
        with pytest.raises(ValueError, match="must hold a state"):
            jaxcomp.diagnostics(tx.init(PARAMS))


def test_scales_do_not_matter_and_nothing_is_a_share_of_one():
    state = trained(powersgd(3))

    def share(scale):
        residual, q = jax.tree.map(lambda x: scale * x, (state.residual, state.q))
        return jaxcomp.diagnostics(state._replace(residual=residual, q=q)).share

    np.testing.assert_allclose([share(1e-30), share(1e30)], share(1), rtol=1e-4)
    assert share(0) == 1


def test_no_collective_but_where_the_state_is_spread():
    state = trained(powersgd(3))
    text = jax.jit(jaxcomp.diagnostics).lower(state).compile().as_text()
    assert "all-reduce" not in text
    assert "all-gather" not in text
    spread = jaxcomp.shard_state(state, mesh_of(REPLICAS), AXIS)
    assert "all-reduce" in jax.jit(jaxcomp.diagnostics).lower(spread).compile().as_text()


def test_the_table_says_which_ranks_are_off():
    rng = np.random.default_rng(0)
    left = rng.normal(size=(24, 1))
    right = rng.normal(size=(1, 40))
    fixed = {
        "one": jnp.asarray(np.stack([left @ right] * REPLICAS), jnp.float32),  # rank 1
        "all": jnp.asarray(rng.normal(size=(1, 24, 40)).repeat(REPLICAS, 0), jnp.float32),
    }
    tx = powersgd(4, matrix_dims=None)
    state = jaxcomp.stack_replicas(tx.init(first(fixed)), REPLICAS)
    lines = str(jaxcomp.diagnostics(stepped(tx, state, fixed))).splitlines()
    assert [line.split()[0] for line in lines] == ["leaf", "['all']", "['one']", "all"]
    assert lines[1].endswith("4  too low: more is left than was sent")
    assert lines[2].endswith("4  higher than it need be: 1 carry 99% of the output")
