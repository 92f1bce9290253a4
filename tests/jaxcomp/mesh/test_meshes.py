"""Compression over one axis of several: what is sharded stays so, what crosses hosts is thin."""

from collections import Counter

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
from tests.helpers.leaves import random_grads
from tests.helpers.reducers import batched, powersgd
from tests.helpers.runners import first, sharded, stack

P = jax.P
SHAPES = {"bias": (96,), "down": (96, 64), "up": (64, 96)}
LAYOUTS = {
    "tensor": {"bias": P("ici"), "down": P("ici", None), "up": P(None, "ici")},
    "fsdp": {"bias": P("ici"), "down": P(None, "ici"), "up": P("ici", None)},
}
VALUES = 2 * 64 * 96 + 96  # of all parameters
FACTORS = 2 * 2 * (64 + 96)  # of both factors of both weights, at rank 2


def mesh(fast=4):
    kinds = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[: 2 * fast]}
    return jax.make_mesh((2, fast), ("dcn", "ici"), **kinds)


def training(tx, layout, manual=("dcn",), axes="dcn", fast=4):
    """(step, params, state, batch) with the weights sharded as in `layout`."""
    grid = mesh(fast)
    values = random_grads(SHAPES, 1, 1)
    params = {
        name: placed(grid, x[0, 0] * 0.1, layout.get(name, P())) for name, x in values.items()
    }
    state = jaxcomp.shard_state(tx.init(params), grid, "dcn")
    specs = jaxcomp.state_specs(state, "dcn")

    def step(params, state, x):
        grads = jaxcomp.local_value_and_grad(loss, axes)(params, x)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = sharded(grid, step, (P(), specs, P(axes)), (P(), specs), axis_names=set(manual))
    rng = np.random.default_rng(1)
    batch = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    return mapped, params, state, placed(grid, batch, P(axes))


HOSTS = jax.sharding.AbstractMesh((2, 4), ("host", "device"))


def collectives(compiled):
    """(operation, values of every result on one device, whether it crosses hosts)."""
    found = jaxcomp.collectives(compiled, mesh=HOSTS)
    return [(x.kind, [values for _, values in x.arrays], "host" in x.axes) for x in found]


def compiled_step(tx, layout):
    step, *arguments = training(tx, layout)
    return hlo.program(step, *arguments)


def crossing(found):
    """Values that one device sends to other hosts, all of them in all-reduces."""
    assert {op for op, _, slow in found if slow} == {"all-reduce"}
    return sum(sum(sizes) for _, sizes, slow in found if slow)


def moved(found):
    """Values that are gathered or laid out anew within a host: (largest array, all)."""
    sizes = [x for op, sizes, slow in found for x in sizes if not slow and op != "all-reduce"]
    return max(sizes, default=0), sum(sizes)


@pytest.fixture(scope="module")
def by_hand():
    """Returns what `lax.pmean` of every gradient, written by hand, moves within a host."""
    mean = optax.stateless(lambda updates, _: jax.lax.pmean(updates, "dcn"))
    tx = optax.chain(mean, optax.sgd(0.1))
    return {name: moved(collectives(compiled_step(tx, LAYOUTS[name]))) for name in LAYOUTS}


@pytest.mark.parametrize(("layout", "start_step"), [("tensor", 0), ("fsdp", 5)])
def test_weights_and_residuals_stay_sharded_and_no_weight_is_gathered(layout, start_step, by_hand):
    reducer = jaxcomp.powersgd(2, axis_name="dcn", start_step=start_step)
    tx = optax.chain(reducer, optax.sgd(0.1))
    step, params, state, batch = training(tx, LAYOUTS[layout])
    found = collectives(hlo.program(step, params, state, batch))
    # Everything once for the exact averages, a quarter on each device; factors and bias after them.
    exact = VALUES // 4 if start_step else 0
    assert crossing(found) == exact + (FACTORS + 96) // 4
    # FSDP itself gathers weights for the forward pass. Beyond that, nothing but thin factors: to
    # its share of each from everybody, and the own one of each replica.
    largest, total = moved(found)
    assert largest <= max(by_hand[layout][0], 2 * 96)
    assert total <= by_hand[layout][1] + 2 * FACTORS
    if layout == "tensor":
        assert by_hand[layout] == (0, 0)

    for _ in range(2):
        params, state = step(params, state, batch)
    for name in ("down", "up"):
        assert params[name].addressable_shards[0].data.size == 64 * 96 // 4
        assert state[0].residual[name].addressable_shards[0].data.size == 64 * 96 // 4
        assert state[0].residual[name].shape == (2, *SHAPES[name])


def test_equal_leaves_are_no_stack_beside_an_automatic_axis():
    """One array of them all would gather every leaf along the axis that it is sharded over."""
    devices = mesh()
    params = {}
    for i in range(6):
        spec = P(None, "ici") if i % 2 else P("ici", None)
        params[f"layer{i}"] = placed(devices, jnp.ones((64, 64)), spec)
    tx = jaxcomp.powersgd(2, axis_name="dcn", start_step=0)
    state = jaxcomp.shard_state(tx.init(params), devices, "dcn")
    specs = jaxcomp.state_specs(state, "dcn")

    def step(params, state, x):
        grads = jax.tree.map(lambda p: p * x.mean(), jaxcomp.as_local(params, "dcn"))
        return tx.update(grads, state)

    mapped = sharded(devices, step, (P(), specs, P("dcn")), (P(), specs), axis_names={"dcn"})
    found = collectives(hlo.program(mapped, params, state, jnp.ones((8, 4))))
    factors = 6 * 2 * (64 + 64)
    assert crossing(found) == factors // 4
    largest, total = moved(found)
    assert largest <= 2 * 64  # a factor, and no leaf
    assert total <= 3 * factors


FLOAT16 = jaxcomp.allreduce(axis_name="dcn", comm_dtype=jnp.float16)


@pytest.mark.parametrize(
    ("layout", "reducer"),
    [
        ("tensor", jaxcomp.allreduce(axis_name="dcn")),
        ("fsdp", FLOAT16),
        ("fsdp", jaxcomp.allreduce(axis_name="dcn", comm_dtype=jnp.bfloat16)),
        ("tensor", jaxcomp.error_feedback(FLOAT16)),
    ],
    ids=["own", "float16", "bfloat16", "feedback"],
)
def test_an_average_moves_no_more_within_a_host_than_pmean(layout, reducer, by_hand):
    found = collectives(compiled_step(optax.chain(reducer, optax.sgd(0.1)), LAYOUTS[layout]))
    assert crossing(found) == VALUES // 4
    assert sum(slow for *_, slow in found) == 1  # XLA merges the operands of one psum
    largest, total = moved(found)
    assert largest <= by_hand[layout][0]
    assert total <= by_hand[layout][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_consolidate_gathers_nothing_and_its_state_is_sharded_again(layout):
    grid, tx = mesh(), jaxcomp.powersgd(2, axis_name="dcn", start_step=0)
    state = training(tx, LAYOUTS[layout])[2]
    specs = jaxcomp.state_specs(state, "dcn")
    inside = lambda s: jaxcomp.consolidate(s, "dcn")  # noqa: E731
    mapped = sharded(grid, inside, (specs,), P(), axis_names={"dcn"})
    found = collectives(hlo.program(mapped, state))
    assert crossing(found) == 2 * 64 * 96 // 4 + 2  # and whose residual it is
    assert moved(found) == (0, 0)
    one = mapped(state)
    assert one.residual["up"].shape == SHAPES["up"]
    for each in (jaxcomp.shard_state(one, grid, "dcn"), state):
        assert each.residual["up"].shape == (2, 64, 96)
        assert each.residual["up"].addressable_shards[0].data.size == 64 * 96 // 4


INT8_FACTORS = jaxcomp.powersgd(2, axis_name="dcn", start_step=0, comm_dtype=jnp.int8)


@pytest.mark.parametrize(
    ("layout", "reducer", "leaves"),
    [
        ("tensor", jaxcomp.quantized_allreduce(axis_name="dcn"), SHAPES),
        ("fsdp", jaxcomp.quantized_allreduce(axis_name="dcn"), SHAPES),
        ("fsdp", INT8_FACTORS, ("down", "up")),  # the bias goes in an all-reduce of its own
    ],
    ids=["int8 tensor", "int8 fsdp", "factors"],
)
def test_what_int8_costs_beside_automatic_axes(layout, reducer, leaves, by_hand):
    """As docs/meshes.md says: every device sends the integers of whole leaves or factors."""
    compiled = compiled_step(optax.chain(reducer, optax.sgd(0.1)), LAYOUTS[layout])
    sent = reducer.bytes({name: np.zeros(SHAPES[name], "f4") for name in leaves}, replicas=2)
    shares = Counter()
    for op, sizes, slow in collectives(compiled):
        shares[op] += sum(sizes) if slow else 0
    assert shares["all-to-all"] == shares["all-gather"] == sent.bytes_after
    within = [0]
    for collective in jaxcomp.collectives(compiled, mesh=HOSTS):
        elements = {element for element, _ in collective.arrays}
        if elements != {"s8"} and "host" not in collective.axes and collective.kind != "all-reduce":
            within += [values for _, values in collective.arrays]
    assert max(within) <= max(by_hand[layout][0], 64 * 96 // 4)


def largest_gradient():
    """Returns the largest gradient of any replica at the start."""
    _, params, _, batch = training(optax.identity(), {}, fast=1)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, batch.reshape(2, -1, 64))
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))


def trained(steps, step, params, state, batch):
    """Returns parameters and state after some steps."""
    for _ in range(steps):
        params, state = step(params, state, batch)
    return jax.device_get((params, state))


def begun_apart(step, params, *arguments):
    """Begins the same training one rounding apart."""
    return step, apart(params), *arguments


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
    runs = [training(tx, LAYOUTS[layout])]
    runs.append(training(tx, {}, fast=1))
    runs.append(begun_apart(*training(tx, {}, fast=1)))
    ends = []
    for run in runs:
        params, state = trained(3, *run)
        ends.append((params, state[0].residual))
    assert_no_further(*ends, level=level * largest_gradient())


@pytest.mark.parametrize(
    ("reducer", "level"),
    [
        (jaxcomp.powersgd(2, axis_name="dcn", start_step=0), 0.0),
        (jaxcomp.batched_powersgd(2, axis_name="dcn", start_step=0), 0.0),
        (jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="dcn")), 1 / 127),
    ],
    ids=["powersgd", "batched", "int8"],
)
def test_an_allreduce_in_front_averages_exactly_over_the_fast_axis(reducer, level):
    """Equal to the same reducer between hosts whose batch is four times as large."""
    both = ("dcn", "ici")
    tx = optax.chain(jaxcomp.allreduce(axis_name="ici"), reducer, optax.sgd(0.1))
    params, state = trained(2, *training(tx, {}, manual=both, axes=both))
    slow = optax.chain(reducer, optax.sgd(0.1))
    few, start = trained(2, *training(slow, {}, manual=both, axes="dcn"))
    control, _ = trained(2, *begun_apart(*training(slow, {}, manual=both, axes="dcn")))
    assert_no_further(params, few, control, level=0.1 * level * largest_gradient())
    # check_vma proves the residual equal along "ici": its specification names "dcn" only.
    assert jax.tree.structure(state[1:]) == jax.tree.structure(start)


@pytest.mark.parametrize("start_step", [0, 1])
@pytest.mark.parametrize("axes", ["data", ("data", "model")])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (powersgd, {}),
        (batched, {}),
        (powersgd, {"comm_dtype": "int8"}),
        (powersgd, {"warm_start": False}),
    ],
)
def test_a_state_may_vary_over_every_mapped_axis(make, options, axes, start_step):
    """Also its count and factors, which are equal; also along an axis beside the replicas'."""
    tx, n = make(1, start_step=start_step, **options), 2 if axes == "data" else 4
    grads = {"w": jnp.ones((n, 8, 8))}
    state = stack(tx.init({"w": jnp.ones((8, 8))}), n)
    update = lambda *own: jax.tree.map(lambda x: x[None], tx.update(*first(own)))  # noqa: E731
    step = sharded(grid(2, model=2), update, jax.P(axes), jax.P(axes))
    found = jax.eval_shape(step, grads, state)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, (grads, state))
