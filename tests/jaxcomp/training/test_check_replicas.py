"""Replicas that differ are found, and named; replicas that do not are left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, text
from runners import AXIS, MAPPINGS, mesh_of

import jaxcomp


def tree():
    rng = np.random.default_rng(0)
    return {
        "bf16": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16),
        "bool": jnp.asarray(rng.random(7) > 0.5),
        "empty": jnp.zeros((0, 3)),
        "int8": jnp.asarray(rng.integers(-9, 9, 6), jnp.int8),
        "key": jax.random.key(3),
        "scalar": jnp.float32(2.5),
        "w": jnp.asarray(rng.normal(size=(8, 9)), jnp.float32),
    }


def check(mapping, replicas, **arguments):
    """`replicas`: a list of trees, one for each replica."""
    n = len(replicas)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *replicas)
    function = lambda t: jaxcomp.check_replicas(t, AXIS, **arguments)  # noqa: E731
    if mapping == "vmap":
        return jax.jit(jax.vmap(function, axis_name=AXIS))(stacked)
    if mapping == "pmap":
        return jax.pmap(function, axis_name=AXIS, devices=jax.devices()[:n])(stacked)
    mapped = jax.shard_map(
        lambda t: function(jax.tree.map(lambda x: x[0], t)),
        mesh=mesh_of(n),
        in_specs=jax.P(AXIS),
        out_specs=jax.P(),
    )
    return jax.jit(mapped)(stacked)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_equal_and_unequal_trees(mapping):
    found = check(mapping, [tree()] * 3)
    found.raise_if_different()
    assert bool(found.equal.all())

    other = tree()
    other["w"] = other["w"].at[7, 8].add(1e-6)
    other["int8"] = other["int8"].at[0].add(1)
    message = r"\(replica 1 from the 2 others\): \['int8'\], \['w'\]"
    with pytest.raises(jaxcomp.ReplicaMismatch, match=message):
        check(mapping, [tree(), other, tree()]).raise_if_different()


@pytest.mark.parametrize("name", ["bf16", "bool", "int8", "key", "scalar", "w"])
def test_the_smallest_change_of_any_dtype_is_seen(name):
    other = tree()
    x = other[name]
    other[name] = {
        "bool": lambda: ~x,
        "key": lambda: jax.random.key(4),
    }.get(name, lambda: x.at[(0,) * x.ndim].set(x[(0,) * x.ndim] * 2))()
    with pytest.raises(jaxcomp.ReplicaMismatch, match=rf"all 2 replicas.*: \['{name}'\]"):
        check("vmap", [tree(), other]).raise_if_different()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0.0, 1.0], [1.0, 0.0]),  # a permutation
        ([0.0, 1.0], [-0.0, 1.0]),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [2.0, 4.0]]),
    ],
)
def test_positions_and_bits_count(first, second):
    assert not check("vmap", [jnp.array(first), jnp.array(second)]).equal.any()


def test_equal_nans_are_equal():
    assert check("vmap", [jnp.array([np.nan, 1.0])] * 2).equal.all()


def test_residuals_may_differ():
    tx = optax.chain(jaxcomp.powersgd(1, axis_name=AXIS), optax.adam(1e-3))
    state = tx.init({"w": jnp.zeros((16, 16))})
    other = jax.tree.map(jnp.array, state)
    other = (other[0]._replace(residual={"w": jnp.ones((16, 16))}), *other[1:])
    check("vmap", [state, other]).raise_if_different()
    other = (other[0]._replace(q={"w": other[0].q["w"] + 1}), *other[1:])
    with pytest.raises(jaxcomp.ReplicaMismatch, match=r"\[0\].q\['w'\]"):
        check("vmap", [state, other]).raise_if_different()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_few_steps(mapping):
    replicas = [jnp.zeros(3), jnp.ones(3)]
    check(mapping, replicas, step=7, every=5).raise_if_different()
    with pytest.raises(jaxcomp.ReplicaMismatch):
        check(mapping, replicas, step=10, every=5).raise_if_different()


def test_one_small_all_reduce():
    params = {"w": jnp.zeros((100, 100)), "b": jnp.zeros(100)}
    mapped = jax.shard_map(
        lambda t: jaxcomp.check_replicas(t, AXIS),
        mesh=mesh_of(4),
        in_specs=jax.P(),
        out_specs=jax.P(),
    )
    found = collectives(text(mapped, params))
    assert found == [("all-reduce", "u32", 2 * 2 + 4)]
