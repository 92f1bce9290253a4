"""``buckets=``: collectives for each group of leaves, and nothing else that changes."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, sent_bytes
from leaves import random_grads
from runners import AXIS, lower_update, simulate
from xla import users_program

import jaxcomp
from jaxcomp._reducers.buckets import in_buckets

# In the order of their names' text, block_10 would come before block_2.
LAYERS = {f"block_{i}": (16, 12) for i in (2, 3, 10, 11)}
MODEL = {"embedding": (40, 12), "norm": (12,), **LAYERS}
PARAMS = {name: jnp.zeros(shape) for name, shape in MODEL.items()}
OPTIONS = {"axis_name": AXIS, "start_step": 0, "min_compression_rate": 1.0}


def named(buckets):
    names = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(PARAMS)[0]]
    return [[names[i] for i in group] for group in in_buckets(PARAMS, buckets)]


def test_the_last_layers_come_first_and_embeddings_last():
    assert named(3) == [
        ["norm", "block_11"],
        ["block_10"],
        ["block_3", "block_2", "embedding"],
    ]


def test_one_bucket_and_more_than_there_are_leaves():
    assert [len(group) for group in named(1)] == [len(MODEL)]
    assert sorted(name for group in named(100) for name in group) == sorted(MODEL)


def test_a_function_says_where_a_leaf_goes():
    groups = named(lambda path, leaf: 0 if leaf.ndim == 1 else 7)
    assert groups == [["norm"], [name for name in sorted(MODEL) if name != "norm"]]


@pytest.mark.parametrize("wrong", [-1, None, 1.5, True])
def test_a_function_that_returns_no_number_is_told_so(wrong):
    tx = jaxcomp.powersgd(2, **OPTIONS, buckets=lambda path, leaf: wrong)
    grads = random_grads(MODEL, 2, 1)
    with pytest.raises(ValueError, match=r"`buckets` must return a non-negative integer.*block_10"):
        simulate("vmap", tx, grads)


@pytest.mark.parametrize(
    "options",
    [{}, {"start_step": 2}, {"comm_dtype": jnp.int8}, {"alternating": True}],
    ids=["two-sided", "late", "int8", "alternating"],
)
def test_outputs_and_states_are_those_of_one_bucket(options):
    grads = random_grads(MODEL, 2, 4)
    one, three = (
        simulate("shard_map", jaxcomp.powersgd(2, **OPTIONS | options, buckets=k), grads)
        for k in (1, 3)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, three)


@pytest.mark.parametrize("place", ["block_11", "embedding"])
def test_a_value_that_is_not_finite_in_any_bucket_stops_them_all(place):
    tx = jaxcomp.powersgd(2, **OPTIONS, buckets=3)
    grads = random_grads(MODEL, 2, 3)
    _, before = simulate("shard_map", tx, {name: x[:, :2] for name, x in grads.items()})
    grads[place][1, 2, 0, 0] = np.nan
    outputs, after = simulate("shard_map", tx, grads)
    assert all(np.isnan(x[2]).all() for x in outputs.values())
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_every_bucket_has_two_all_reduces_and_all_together_the_same_bytes():
    one, three = (
        collectives(
            users_program(
                lower_update(jaxcomp.powersgd(2, **OPTIONS, buckets=k), PARAMS, 4)
            ).as_text()
        )
        for k in (1, 3)
    )
    assert [len(one), len(three)] == [2, 6]
    assert sent_bytes(one) == sent_bytes(three)
    assert sent_bytes(three) == jaxcomp.powersgd(2, **OPTIONS).bytes(PARAMS).bytes_after


def test_a_bucket_waits_for_no_gradient_of_the_layers_before_it():
    tx = jaxcomp.powersgd(2, **OPTIONS, buckets=3)
    state = tx.init(PARAMS)
    traced = jax.make_jaxpr(lambda grads: tx.update(grads, state), axis_env=[(AXIS, 2)])(PARAMS)
    made_by = {var: eqn for eqn in traced.eqns for var in eqn.outvars}
    names = dict(zip(traced.jaxpr.invars, sorted(MODEL), strict=True))

    def needed(var):
        """The gradients from which a value is made."""
        seen, rest = set(), [var]
        while rest:
            var = rest.pop()
            if isinstance(var, jax.extend.core.Var) and var not in seen:
                seen.add(var)
                rest += made_by[var].invars if var in made_by else []
        return {names[var] for var in seen if var in names}

    reduced = [eqn.invars[0] for eqn in traced.eqns if eqn.primitive.name.startswith("psum")]
    assert len(reduced) == 6
    groups = [set(group) for group in named(3)]
    for place, var in enumerate(reduced):
        assert needed(var) == set().union(*groups[: place // 2 + 1])
