"""jaxcomp.data_parallel: any gradient function; auxiliary outputs as in a loop without it."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.classifier import (
    AUX,
    CLASSES,
    KINDS,
    LENGTH,
    WIDTH,
    bare_loss,
    batch,
    grid,
    loss_fn,
    new_params,
    placed,
    stepped,
)
from tests.helpers.leaves import by_layer, close, normal
from tests.helpers.reducers import powersgd, reducer
from tests.helpers.runners import MAPPINGS, over_replicas, start

P = jax.P
PARAMS = new_params()
DATA = batch()


def test_value_auxiliary_and_gradients_may_also_come_as_three():
    pair = jax.value_and_grad(loss_fn, has_aux=True)

    def three(params, *data):
        (value, aux), grads = pair(params, *data)
        return value, aux, grads

    run = jaxcomp.data_parallel(three, reducer("allreduce"), mesh=grid(2), aux=AUX)
    close(stepped(run, PARAMS, *DATA), pair(PARAMS, *DATA))


def masked_loss(params, x, y, mask):
    losses = loss_fn(params, x, y)[1]["per_example"]
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1)


@pytest.mark.parametrize(
    ("weighted", "kind"), [("mask", "auto"), ("replicas", "auto"), ("mask", "explicit")]
)
def test_weights_may_be_a_mask_or_counts_of_the_batch(weighted, kind):
    """Equals one process with the examples that there are, as in the last batch of an epoch."""
    mesh = grid(4, kind)
    params = placed(mesh, PARAMS)
    mask = np.random.default_rng(3).integers(0, 2, size=16).astype(np.float32)
    mask[:4] = 0  # the first replica sits out
    weight = {"mask": mask, "replicas": mask.reshape(4, -1).sum(1)}
    run = jaxcomp.value_and_grad(masked_loss, reducer("allreduce"), mesh=mesh)
    found = stepped(run, params, *DATA, mask, weight=weight[weighted])
    close(found, jax.value_and_grad(masked_loss)(PARAMS, *DATA, mask))
    with pytest.raises(ValueError, match=r"must have shape \(4,\), .* or 16 along axis 0 as the b"):
        stepped(run, params, *DATA, mask, weight=np.ones(7))


@pytest.mark.parametrize("known", ["explicit", "outside of jit", "batch_specs"])
def test_a_batch_is_split_as_its_sharding_says(known):
    """Here time lies first, in the outputs too."""
    mesh = grid(4, "explicit" if known == "explicit" else "auto")
    params = placed(mesh, PARAMS)
    batch = [jnp.swapaxes(x, 0, 1) for x in DATA]

    def loss(params, x, y):
        value, aux = loss_fn(params, x, y)
        return value, aux["logits"]

    run = jaxcomp.value_and_grad(
        jax.jit(loss),
        reducer("allreduce"),
        mesh=mesh,
        has_aux=True,
        batch_specs=P(None, "data") if known == "batch_specs" else None,
        aux=1,
    )
    step = run if known == "outside of jit" else jax.jit(run)
    x, y = placed(mesh, batch, P(None, "data"))
    found, _ = step(run.init(params), params, x, y, weight=np.ones((LENGTH, 16)))
    close(found, jax.value_and_grad(loss, has_aux=True)(PARAMS, *batch))


def test_two_labels_are_not_taken_for_a_key():
    make = functools.partial(jaxcomp.value_and_grad, reducer=reducer("allreduce"), mesh=grid(2))
    params = jnp.ones(2)
    numbers = np.array([1, 3], np.uint32)

    def labelled(p, x, y):
        return jnp.mean((p * x).sum(-1) * y.astype(jnp.float32))

    two = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"argument 2 is uint32 of shape \(2,\).*, or 2 examples"):
        stepped(make(labelled), params, two, numbers)
    told = stepped(make(labelled, batch_specs=P("data")), params, two, numbers)
    close(told, jax.value_and_grad(labelled)(params, two, numbers))

    def with_key(p, x, key):
        return jnp.mean(p * x) * key[0].astype(jnp.float32)

    four = np.ones((4, 2), np.float32)  # with four examples two numbers can only be a key
    expected = jax.value_and_grad(with_key)(params, four, numbers)
    close(stepped(make(with_key), params, four, numbers), expected)


def accumulated(params, x, y, steps=4):
    """Averages gradients of micro-batches, one after the other."""

    def one(total, batch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(bare_loss)(params, *batch)), None

    parts = jax.tree.map(lambda a: a.reshape(steps, -1, *a.shape[1:]), (x, y))
    start = jnp.zeros_like(x.ravel()[0]), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(one, start, parts)
    return jax.tree.map(lambda t: t / steps, total)


@pytest.mark.parametrize("kind", KINDS)
def test_any_gradient_function(kind):
    """Averages over the replicas what each makes of its part."""
    mesh = grid(4, kind)
    run = jaxcomp.data_parallel(accumulated, reducer("allreduce"), mesh=mesh)
    found = stepped(run, placed(mesh, PARAMS), *placed(mesh, DATA, P("data")))
    close(found, jax.value_and_grad(bare_loss)(PARAMS, *DATA), rtol=1e-4)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_inside_a_mapped_function_it_needs_no_mesh(mapping):
    tx = reducer("powersgd")
    run = jaxcomp.value_and_grad(loss_fn, tx, has_aux=True, aux=AUX)
    outside = jaxcomp.value_and_grad(loss_fn, tx, has_aux=True, aux=AUX, mesh=grid(4))
    ((value, aux), grads), after = jax.jit(outside)(outside.init(PARAMS), PARAMS, *DATA)

    def step(rows, state):
        ((value, aux), grads), state = run(state, PARAMS, *rows)
        return (value, grads, aux["logits"]), state

    rows = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), DATA)
    state, specs = start(mapping, tx.init(PARAMS), 4)
    mapped = over_replicas(mapping, step, 4, specs, out=(P(), P(), P("data")))
    (*found, logits), state = mapped(rows, state)
    close(np.reshape(logits, aux["logits"].shape), aux["logits"])
    # What is whole vmap and pmap leave for each replica, the same for all.
    expected = jax.tree.map(lambda x, y: np.broadcast_to(y, x.shape), found, [value, grads])
    close((found, state.residual), (expected, after.residual))


def test_accumulation_takes_the_memory_of_one_replica():
    """Takes at most 1.2 times the temporary memory of its gradients, computed once."""
    wide = {"up": np.ones((WIDTH, 1024), "f4"), "down": np.ones((1024, CLASSES), "f4")}
    grad_fn = functools.partial(accumulated, steps=16)
    run = jaxcomp.data_parallel(grad_fn, reducer("powersgd"), mesh=grid(4))

    def cost(step, *arguments):
        program = jax.jit(step).lower(*arguments).compile()
        return program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["flops"]

    memory, flops = cost(run, run.init(wide), wide, *batch(size=16 * 4 * 4))
    alone, alone_flops = cost(grad_fn, wide, *batch(size=16 * 4))
    assert memory <= 1.2 * alone
    assert flops < 2 * alone_flops  # with those of the reducer


LAYERS = {"kernel": jnp.zeros((6, 32, 32)), "bias": jnp.zeros((6, 32))}


def boxed(name):
    return [nn.Partitioned(LAYERS["kernel"], (name, "embed", "mlp"))]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (LAYERS, r"matrix_dims=jaxcomp\.stacked\('blocks'\)"),
        # Without norms or biases the shapes alone do not tell, but flax's metadata may.
        (boxed("layers"), r"of 6, called 'layers', .*jaxcomp\.stacked\('blocks'\)"),
    ],
    ids=["beside a bias", "metadata"],
)
def test_stacked_layers_are_noticed_once_with_the_line_to_write(blocks, message):
    run = jaxcomp.data_parallel(accumulated, reducer("powersgd"), mesh=grid(2))
    with pytest.warns(UserWarning, match=message) as found:
        run.init({"blocks": blocks, "head": jnp.zeros((32, 8))})
    assert len(found) == 1


@pytest.mark.parametrize(
    ("tx", "params"),
    [
        (powersgd(2), {"kernel": jnp.zeros((32, 32)), "bias": jnp.zeros(32)}),
        (powersgd(2, matrix_dims=by_layer), LAYERS),
        (powersgd(2), boxed("experts")),
    ],
    ids=["one layer", "layer by layer", "experts"],
)
def test_there_is_nothing_to_notice_of_other_layers(tx, params):
    jaxcomp.data_parallel(accumulated, tx, mesh=grid(2)).init({"blocks": params})


def test_stacked_layers_too_thin_to_compress_are_named():
    thin = powersgd(2, matrix_dims=jaxcomp.stacked("blocks"), min_compression_rate=2)
    params = {"blocks": {"kernel": jnp.zeros((64, 64, 2)), "bias": jnp.zeros((64, 2))}}
    with pytest.warns(UserWarning, match=r"nothing of \['blocks'\]\['kernel'\] of shape \(64, 64"):
        jaxcomp.data_parallel(accumulated, thin, mesh=grid(2)).init(params)


def squares(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


EXACT = jaxcomp.allreduce(axis_name="fast")
WEIGHTS = {"w": normal(24, 16)}
X = normal(32, 24, seed=1)


def two_hosts(kind="auto"):
    """Makes a mesh of two hosts with four devices each."""
    return jax.make_mesh((2, 4), ("slow", "fast"), axis_types=(KINDS[kind],) * 2)


def slow_powersgd(rank, axis_name="slow"):
    return jaxcomp.powersgd(rank, axis_name=axis_name, start_step=0, min_compression_rate=0.1)


def on_two_levels(mesh, *links):
    chain = optax.chain(*links)
    return jaxcomp.value_and_grad(squares, chain, mesh=mesh, axis_name=("slow", "fast"))


@pytest.mark.parametrize(("kind", "context"), [("auto", True), ("explicit", False)])
def test_an_exact_average_within_hosts_and_a_compressed_one_between_them(kind, context):
    """Equals two replicas of twice the batch each; there is one residual for each host."""
    mesh = two_hosts(kind)
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        run = on_two_levels(None if context else mesh, EXACT, slow_powersgd(2))
        found, state = three_steps(run)
        restored = run.restore(jax.device_get(jaxcomp.consolidate(state)), WEIGHTS)
    here = state[1].residual["w"]
    there = restored[1].residual["w"]
    assert here.shape == (2, 24, 16)
    assert there.sharding.is_equivalent_to(here.sharding, here.ndim)
    hosts = jaxcomp.value_and_grad(squares, slow_powersgd(2, "data"), mesh=grid(2))
    expected, after = three_steps(hosts)
    close(found, expected, rtol=1e-4, atol=1e-5)
    close(jax.device_get(here), after.residual["w"], atol=1e-4)


def three_steps(run):
    """Returns what the third gives, and the state."""
    step = jax.jit(run)
    state = run.init(WEIGHTS)
    for _ in range(3):
        found, state = step(state, WEIGHTS, X)
    return jax.device_get(found), state


@pytest.mark.parametrize("kind", KINDS)
def test_two_levels_beside_a_third_axis_under_set_mesh(kind):
    """JAX allows no smaller mesh inside of `jax.set_mesh`, also not to read types from."""
    mesh = jax.make_mesh((2, 2, 2), ("slow", "fast", "model"), axis_types=(KINDS[kind],) * 3)
    with jax.set_mesh(mesh):
        run = on_two_levels(None, EXACT, slow_powersgd(16))
        (_, grads), state = jax.jit(run)(run.init(WEIGHTS), WEIGHTS, X)
    assert state[1].residual["w"].shape == (2, 24, 16)
    close(jax.device_get(grads["w"]), jax.grad(squares)(WEIGHTS, X)["w"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_two_levels_weighs_along_both(kind):
    """Gives at full rank the weighted mean of all eight replicas."""
    run = on_two_levels(two_hosts(kind), EXACT, slow_powersgd(16))
    weight = np.arange(8.0, dtype=np.float32)
    (_, grads), _ = jax.jit(run)(run.init(WEIGHTS), WEIGHTS, X, weight=weight)
    each = jax.vmap(jax.grad(squares), (None, 0))(WEIGHTS, X.reshape(8, 4, 24))
    expected = np.average(each["w"], axis=0, weights=weight)
    close(jax.device_get(grads["w"]), expected, rtol=1e-4, atol=1e-5)


def test_a_chain_of_two_levels_accumulates_behind_the_exact_one():
    slow = jaxcomp.powersgd(2, axis_name="slow")
    around = on_two_levels(two_hosts(), jaxcomp.accumulate(optax.chain(EXACT, slow), 2))
    with pytest.raises(ValueError, match="or accumulate, along the slow axis"):
        around.init(WEIGHTS)
    run = on_two_levels(two_hosts(), EXACT, jaxcomp.accumulate(slow, 2))
    (_, first), state = jax.jit(run)(run.init(WEIGHTS), WEIGHTS, X)
    (_, second), state = jax.jit(run)(state, WEIGHTS, X)
    assert state[1].acc_grads["w"].shape == (2, 24, 16)
    assert not np.any(first["w"])
    close(second["w"], jax.grad(squares)(WEIGHTS, X)["w"], rtol=1e-4)


def test_chains_that_compress_before_they_have_averaged_are_refused():
    fast = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="fast"))
    slow = slow_powersgd(2)
    for links in ((fast, slow), (slow, EXACT)):
        with pytest.raises(ValueError, match="Average exactly along the fast axis first"):
            on_two_levels(two_hosts(), *links).init(WEIGHTS)


def test_integer_parameters_have_gradients_that_carry_nothing():
    mesh = two_hosts()
    reducer = slow_powersgd(2, ("slow", "fast"))
    params = WEIGHTS | {"n": np.arange(3)}
    run = jaxcomp.data_parallel(jax.value_and_grad(squares, allow_int=True), reducer, mesh=mesh)
    state = jaxcomp.shard_state(reducer.init(params), mesh, ("slow", "fast"))
    (_, gradients), _ = jax.jit(run)(state, params, X)
    assert gradients["n"].dtype == jax.dtypes.float0


def test_wrappers_of_optax_around_a_reducer_are_explained():
    axes = ("slow", "fast")
    for mesh, axis_name in ((grid(2), "data"), (two_hosts(), axes)):
        tx = optax.apply_if_finite(slow_powersgd(2, axis_name), 3)
        run = jaxcomp.value_and_grad(squares, tx, mesh=mesh, axis_name=axis_name)
        with pytest.raises(TypeError) as error:
            jax.eval_shape(run, run.init(WEIGHTS), WEIGHTS, X)
        assert any("put them around the optimizer" in note for note in error.value.__notes__)
    chain = optax.MultiSteps(optax.chain(EXACT, slow_powersgd(2)), 2)
    run = jaxcomp.value_and_grad(squares, chain, mesh=two_hosts(), axis_name=axes)
    with pytest.raises(ValueError, match=r"MultiSteps cannot .* Use jaxcomp.accumulate"):
        run.init(WEIGHTS)


def test_a_chain_that_averages_along_one_axis_alone_is_refused():
    chain = optax.chain(EXACT, optax.clip(1.0))
    axes = ("slow", "fast")
    run = jaxcomp.value_and_grad(squares, chain, mesh=two_hosts(), axis_name=axes, check_vma=False)
    with pytest.raises(ValueError, match="different on every replica along 'slow'"):
        run.init(WEIGHTS)
