"""Compression over one axis of several: what is sharded stays so, what crosses hosts is thin."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers import hlo
from tests.helpers.autoencoder import loss
from tests.helpers.classifier import grid, placed
from tests.helpers.control import apart, assert_no_further
from tests.helpers.leaves import normal, random_grads
from tests.helpers.reducers import batched, powersgd
from tests.helpers.runners import first, sharded, stack

P = jax.P
SHAPES = {"bias": (96,), "down": (96, 64), "up": (64, 96)}
LAYOUTS = {
    "tensor": {"bias": P("ici"), "down": P("ici", None), "up": P(None, "ici")},
    "fsdp": {"bias": P("ici"), "down": P(None, "ici"), "up": P("ici", None)},
}


def mesh(fast=4):
    kinds = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[: 2 * fast]}
    return jax.make_mesh((2, fast), ("dcn", "ici"), **kinds)


def training(tx, layout, fast=4):
    """Returns (step, params, state, batch) with the weights sharded as in `layout`."""
    grid = mesh(fast)
    values = random_grads(SHAPES, 1, 1)
    params = {
        name: placed(grid, x[0, 0] * 0.1, layout.get(name, P())) for name, x in values.items()
    }
    state = jaxcomp.shard_state(tx.init(params), grid, "dcn")
    specs = jaxcomp.state_specs(state, "dcn")

    def step(params, state, x):
        grads = jaxcomp.local_value_and_grad(loss, "dcn")(params, x)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = sharded(grid, step, (P(), specs, P("dcn")), (P(), specs), axis_names={"dcn"})
    batch = normal(32, 64, seed=1)
    return mapped, params, state, placed(grid, batch, P("dcn"))


HOSTS = jax.sharding.AbstractMesh((2, 4), ("host", "device"))


def compiled_step(tx, layout):
    step, *arguments = training(tx, layout)
    return hlo.program(step, *arguments)


def sizes(compiled, slow):
    """Lists kind and values of every array that crosses hosts, or that stays within one."""
    found = []
    for use in jaxcomp.collectives(compiled, mesh=HOSTS):
        if ("host" in use.axes) == slow:
            found += [(use.kind, values) for _, values in use.arrays]
    return found


def crossing(compiled):
    """Values that one device sends to other hosts, all of them in all-reduces."""
    found = sizes(compiled, slow=True)
    assert {kind for kind, _ in found} == {"all-reduce"}
    return sum(values for _, values in found)


def moved(compiled):
    """Values that are gathered or laid out anew within a host: (largest array, all)."""
    found = [values for kind, values in sizes(compiled, slow=False) if kind != "all-reduce"]
    return max(found, default=0), sum(found)


VALUES = 96 + 2 * 64 * 96
FACTORS = 2 * 2 * (64 + 96)


@pytest.fixture(scope="module")
def moved_by_hand():
    """Returns what `lax.pmean` of every gradient, written by hand, moves within a host."""
    mean = optax.stateless(lambda updates, _: jax.lax.pmean(updates, "dcn"))
    tx = optax.chain(mean, optax.sgd(0.1))
    return {name: moved(compiled_step(tx, layout)) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize(("layout", "start_step"), [("tensor", 0), ("fsdp", 5)])
def test_what_is_sharded_stays_so_and_no_weight_is_gathered(layout, start_step, moved_by_hand):
    reducer = jaxcomp.powersgd(2, axis_name="dcn", start_step=start_step)
    tx = optax.chain(reducer, optax.sgd(0.1))
    step, params, state, batch = training(tx, LAYOUTS[layout])
    compiled = hlo.program(step, params, state, batch)
    # Everything once for the exact averages, a quarter on each device; factors and bias after them.
    exact = VALUES // 4 if start_step else 0
    assert crossing(compiled) == exact + (FACTORS + 96) // 4
    # FSDP itself gathers weights for the forward pass. Beyond that, nothing but thin factors: to
    # its share of each from everybody, and the own one of each replica.
    largest, total = moved(compiled)
    largest_by_hand, total_by_hand = moved_by_hand[layout]
    assert largest <= max(largest_by_hand, 2 * 96)
    assert total <= total_by_hand + 2 * FACTORS
    if layout == "tensor":
        assert total_by_hand == 0

    for _ in range(2):
        params, state = step(params, state, batch)
    for name in ("down", "up"):
        residual = state[0].residual[name]
        assert residual.shape == (2, *SHAPES[name])
        assert residual.addressable_shards[0].data.size == 64 * 96 // 4
        assert params[name].addressable_shards[0].data.size == 64 * 96 // 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [None, jnp.float16])
def test_an_average_moves_no_more_within_a_host_than_pmean(layout, dtype, moved_by_hand):
    reducer = jaxcomp.allreduce(axis_name="dcn", comm_dtype=dtype)
    compiled = compiled_step(optax.chain(reducer, optax.sgd(0.1)), LAYOUTS[layout])
    assert crossing(compiled) == VALUES // 4
    uses = jaxcomp.collectives(compiled, mesh=HOSTS)
    assert ["host" in use.axes for use in uses].count(True) == 1  # one psum has all operands
    largest, total = moved(compiled)
    largest_by_hand, total_by_hand = moved_by_hand[layout]
    assert largest <= largest_by_hand
    assert total <= total_by_hand


def test_equal_leaves_are_no_stack_beside_an_automatic_axis():
    """One array of them all would gather every leaf along the axis that it is sharded over."""
    devices = mesh()
    specs = [P(None, "ici"), P("ici", None)] * 3
    params = [placed(devices, np.ones((64, 64), "f4"), spec) for spec in specs]
    tx = jaxcomp.powersgd(2, axis_name="dcn", start_step=0)
    state = jaxcomp.shard_state(tx.init(params), devices, "dcn")
    specs = jaxcomp.state_specs(state, "dcn")

    def step(params, state, x):
        grads = jax.tree.map(lambda p: p * x.mean(), jaxcomp.as_local(params, "dcn"))
        return tx.update(grads, state)

    mapped = sharded(devices, step, (P(), specs, P("dcn")), (P(), specs), axis_names={"dcn"})
    found = hlo.program(mapped, params, state, jnp.ones((8, 4)))
    factors = 6 * 2 * (64 + 64)
    assert crossing(found) == factors // 4
    largest, total = moved(found)
    assert largest <= 2 * 64  # a factor, and no leaf
    assert total <= 3 * factors


FLOAT16 = jaxcomp.allreduce(axis_name="dcn", comm_dtype=jnp.float16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_consolidate_gathers_nothing_and_its_state_is_sharded_again(layout):
    tx = jaxcomp.powersgd(2, axis_name="dcn", start_step=0)
    state = training(tx, LAYOUTS[layout])[2]
    specs = jaxcomp.state_specs(state, "dcn")
    inside = lambda s: jaxcomp.consolidate(s, "dcn")  # noqa: E731
    mapped = sharded(mesh(), inside, (specs,), P(), axis_names={"dcn"})
    found = hlo.program(mapped, state)
    assert crossing(found) == 2 * 64 * 96 // 4 + 2  # and whose residual it is
    assert moved(found) == (0, 0)
    for each in (jaxcomp.shard_state(mapped(state), mesh(), "dcn"), state):
        assert each.residual["up"].shape == (2, 64, 96)
        assert each.residual["up"].addressable_shards[0].data.size == 64 * 96 // 4


INT8_FACTORS = jaxcomp.powersgd(2, axis_name="dcn", start_step=0, comm_dtype=jnp.int8)


def largest_gradient():
    """Returns the largest gradient of any replica at the start."""
    _, params, _, batch = training(optax.identity(), {}, fast=1)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, batch.reshape(2, -1, 64))
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))


def trained(step, params, state, batch):
    """Returns parameters and residuals after three steps."""
    for _ in range(3):
        params, state = step(params, state, batch)
    return jax.device_get((params, state[0].residual))


@pytest.mark.parametrize(
    ("layout", "reducer", "level"),
    [
        ("fsdp", jaxcomp.powersgd(2, axis_name="dcn", start_step=2), 0.0),
        ("tensor", jaxcomp.error_feedback(FLOAT16), float(jnp.finfo(jnp.float16).eps)),
        ("fsdp", jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="dcn")), 1 / 127),
        # Two columns of two factors may be a level off, and what is sent of them later.
        ("tensor", INT8_FACTORS, 5 / 127),
    ],
    ids=["powersgd", "float16", "int8", "factors"],
)
def test_sharding_changes_nothing_but_rounding(layout, reducer, level):
    """Equal to a run on two devices, one for each replica."""
    tx = optax.chain(reducer, optax.sgd(0.1))
    found = trained(*training(tx, LAYOUTS[layout]))
    step, params, *others = training(tx, {}, fast=1)
    expected = trained(step, params, *others)
    control = trained(step, apart(params), *others)
    assert_no_further(found, expected, control, level=level * largest_gradient())


@pytest.mark.parametrize("axes", ["data", ("data", "model")])
@pytest.mark.parametrize(
    "tx",
    [powersgd(1), powersgd(1, start_step=1, comm_dtype="int8", warm_start=False), batched(1)],
    ids=["powersgd", "int8 later", "batched"],
)
def test_a_state_may_vary_over_every_mapped_axis(tx, axes):
    """Also its count and factors, which are equal; also along an axis beside the replicas'."""
    grads = {"w": jnp.ones((4, 8, 8))}
    state = stack(tx.init(first(grads)), 4)

    def update(grads, state):
        return jax.tree.map(lambda x: x[None], tx.update(first(grads), first(state)))

    step = sharded(grid(4 if axes == "data" else 2, model=2), update, jax.P(axes), jax.P(axes))
    found = jax.eval_shape(step, grads, state)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, (grads, state))
