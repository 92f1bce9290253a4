"""`diagnostics` of states of every kind, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.classifier import grid, placed
from tests.helpers.leaves import close, random_grads
from tests.helpers.runners import AXIS, sharded, simulate, stack

REPLICAS = 4
SHAPES = {"wide": (24, 40), "stack": (3, 16, 20), "bias": (7,)}
MATRICES = ("stack", "wide")
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


@functools.cache
def powersgd(rank, **options):
    """Makes a reducer that compresses from the start, and the stack layer by layer."""
    options = {"matrix_dims": jaxcomp.stacked("stack"), **options}
    return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, min_compression_rate=1.0, **options)


@functools.cache
def trained(tx):
    """Takes three steps under vmap, from gradients that have something in common."""
    common = random_grads(SHAPES, REPLICAS, 3)
    return simulate("vmap", tx, common)[1]


def expected(residual, q):
    """Computes share, norms and singular values in float64, from one residual a replica."""
    mean = np.asarray(residual, np.float64).mean(0)
    q = np.asarray(q, np.float64)
    output = np.linalg.norm(q)
    rest = np.linalg.norm(mean)
    share = output**2 / (output**2 + rest**2)
    return share, output, rest, np.linalg.svd(q, compute_uv=False)


def check(found, state):
    """Compares with NumPy, leaf by leaf and over all of them."""
    right = {f"['{name}']": expected(state.residual[name], state.q[name]) for name in MATRICES}
    assert found.leaves.keys() == right.keys()
    for path, leaf in right.items():
        close(list(found.leaves[path]), list(leaf), rtol=1e-4)
    output, rest = np.linalg.norm([leaf[1:3] for leaf in right.values()], axis=0)
    share = output**2 / (output**2 + rest**2)
    close([found.share, found.output_norm, found.residual_norm], [share, output, rest], rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_of_what_vmap_returned(dtype):
    state = trained(powersgd(3, residual_dtype=dtype))
    found = jaxcomp.diagnostics(state)
    check(found, state)
    assert 0.1 < found.share < 0.9
    assert found.leaves["['stack']"].singular_values.shape == (3, 3)
    close(jax.jit(jaxcomp.diagnostics)(state), found)


def beside_sharded_weights(state, kind, spec=("model",)):
    mesh = grid(2, kind, model=2)
    whole = jaxcomp.consolidate(state)
    whole.residual["wide"] = placed(mesh, whole.residual["wide"], jax.P(*spec))
    whole.q["wide"] = placed(mesh, whole.q["wide"], jax.P("model"))
    return jaxcomp.shard_state(whole, mesh, AXIS)


def of_pmap(state):
    count, q = stack((state.count, state.q), REPLICAS)
    return state._replace(count=count, q=q)


def held(state):
    """Puts the state into that of an optimizer, beside its moments."""
    _, *others = optax.chain(jaxcomp.hold_state(powersgd(3)), optax.adam(0.1)).init(PARAMS)
    return {"opt": (state, *others), "step": 3}


LAID_OUT = {
    "consolidated": jaxcomp.consolidate,
    "auto": lambda state: jaxcomp.shard_state(state, grid(REPLICAS, "auto"), AXIS),
    "explicit": lambda state: jaxcomp.shard_state(state, grid(REPLICAS, "explicit"), AXIS),
    "beside auto": functools.partial(beside_sharded_weights, kind="auto"),
    "beside explicit": functools.partial(beside_sharded_weights, kind="explicit"),
    "columns beside explicit": functools.partial(
        beside_sharded_weights, kind="explicit", spec=(None, "model")
    ),
    "of pmap": of_pmap,
    "held": held,
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_of_every_way_a_state_lies(name):
    state = trained(powersgd(3))
    lies = LAID_OUT[name](state)
    check(jaxcomp.diagnostics(lies), state)
    check(jax.jit(jaxcomp.diagnostics)(lies), state)


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
    check(jaxcomp.diagnostics(trained(around)), trained(powersgd(3)))
    one = trained(jaxcomp.batched_powersgd(3, axis_name=AXIS, start_step=0))
    found = jaxcomp.diagnostics(one).leaves["(root)"]
    close(list(found), list(expected(one.residual, one.q)), rtol=1e-4)


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
    with pytest.raises(ValueError, match="lost its classes"):
        jaxcomp.diagnostics(powersgd(3).init(PARAMS)._asdict())


TAKES_A_STATE = {
    "diagnostics": jaxcomp.diagnostics,
    "consolidate": jaxcomp.consolidate,
    "stack_replicas": lambda state: jaxcomp.stack_replicas(state, 2),
    "shard_state": lambda state: jaxcomp.shard_state(state, grid(2), "data"),
    "adapt_state": lambda state: jaxcomp.adapt_state(state, PARAMS, powersgd(2)),
}


@pytest.mark.parametrize("name", TAKES_A_STATE)
def test_a_state_without_values_is_refused(name):
    """Shapes alone, arrays that a step has taken over, and one leaf of these."""
    function = TAKES_A_STATE[name]
    state = trained(powersgd(3))
    shapes = jax.eval_shape(lambda: state)
    with pytest.raises(ValueError, match=r"`state` has only a shape at .*\.count: pass the arrays"):
        function(shapes)
    with pytest.raises(ValueError, match=r"`state` has only a shape at .*\.residual\['stack'\]"):
        function(state._replace(residual=shapes.residual))
    donated = jax.tree.map(jnp.copy, state)
    donated.q["wide"].delete()
    with pytest.raises(ValueError, match=r"`state` was deleted at .*q\['wide'\], .* last step re"):
        function(donated)


def test_a_state_on_different_devices_is_refused():
    state = trained(powersgd(3))
    first, second = jax.devices()[:2]
    apart = jax.device_put(state, first)._replace(q=jax.device_put(state.q, second))
    with pytest.raises(
        ValueError, match=r"on different devices.*jaxcomp\.shard_state\(state, mesh"
    ):
        jaxcomp.diagnostics(apart)
    jaxcomp.diagnostics(jaxcomp.shard_state(apart, grid(REPLICAS), "data"))


def test_the_table_says_which_ranks_are_off():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(24, 1)) @ rng.normal(size=(1, 40))  # rank 1
    every = {"one": one, "all": rng.normal(size=(24, 40))}
    grads = jax.tree.map(lambda x: np.float32(x)[None, None], every)
    _, state = simulate("vmap", powersgd(4, matrix_dims=None), grads)
    lines = str(jaxcomp.diagnostics(state)).splitlines()
    assert [line.split()[0] for line in lines] == ["leaf", "['all']", "['one']", "all"]
    assert lines[1].endswith("4  too low: more is left than was sent")
    assert lines[2].endswith("4  higher than it need be: 1 carry 99% of the output")


def test_the_size_of_gradients_does_not_matter_and_nothing_is_carried_whole():
    state = trained(powersgd(3))

    def of(scale):
        residual, q = jax.tree.map(lambda x: scale * x, (state.residual, state.q))
        return jaxcomp.diagnostics(state._replace(residual=residual, q=q))

    def remarks(found):
        return [line.split(maxsplit=4)[4:] for line in str(found).splitlines()]

    usual = of(1)
    for scale in (1e-30, 1e30):
        close(of(scale).share, usual.share, rtol=1e-4)
        assert remarks(of(scale)) == remarks(usual)
    assert of(0).share == 1


def test_there_is_no_collective_but_where_the_state_is_spread():
    def program(state):
        return jax.jit(jaxcomp.diagnostics).lower(state).compile().as_text()

    state = trained(powersgd(3))
    here = program(state)
    assert "all-reduce" not in here
    assert "all-gather" not in here
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), devices=jax.devices()[:REPLICAS])
    assert "all-reduce" in program(jaxcomp.shard_state(state, mesh, AXIS))
