"""A checkpoint continues under another rank, and with compression newly on or off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers import reducers
from tests.helpers.leaves import by_layer, equal, random_grads
from tests.helpers.reducers import feedback
from tests.helpers.runners import simulate, types_of

SHAPES = {"bias": (16,), "dense": (40, 30), "stack": (3, 20, 24)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


powersgd = functools.partial(reducers.powersgd, matrix_dims=by_layer)
REDUCERS = {
    "rank 3": powersgd(3),
    "rank 1, bfloat16": powersgd(1, residual_dtype=jnp.bfloat16),
    "some leaves": powersgd(lambda path, leaf: 3 if leaf.ndim == 2 else None),
    "int8": feedback(reducers.quantized()),
    "around rank 1": feedback(powersgd(1, error_feedback=False)),
    "around rank 2": feedback(powersgd(2, error_feedback=False), residual_dtype=jnp.bfloat16),
    "batched": reducers.batched(2),
    "exact": reducers.allreduce(),
}


@functools.cache
def trained_with_adam(name):
    """Returns a consolidated state after three steps, and a state of Adam that is not zero."""
    _, state = simulate("vmap", REDUCERS[name], random_grads(SHAPES, 2, 3))
    adam = jax.tree.map(jnp.ones_like, optax.adam(1e-3).init(PARAMS))
    return jaxcomp.consolidate((state, adam))


def kept(state, field):
    """Returns what there is of a field, by path; a reducer's around another has its factors."""
    if field == "q":
        state = getattr(state, "inner", state)
    return dict(jax.tree.leaves_with_path(getattr(state, field, {})))


def check_factor(q, more):
    """Checks that columns are kept, and that further ones are orthonormal to all."""
    columns = min(q.shape[-1], more.shape[-1])
    equal(more[..., :columns], q[..., :columns])
    added = more[..., columns:]
    gram = added.mT @ added
    assert_allclose(gram, np.broadcast_to(np.eye(len(gram.T)), gram.shape), atol=1e-5)
    assert_allclose(q.mT @ added, 0, atol=1e-3)


@pytest.mark.parametrize("new", REDUCERS)
@pytest.mark.parametrize("old", [name for name in REDUCERS if name != "exact"])
def test_every_reducer_takes_over_from_every_other(old, new):
    """Keeps residuals, and as many columns of factors as both have; what is new begins anew."""
    before, *adam = trained_with_adam(old)
    fresh = REDUCERS[new].init(PARAMS)
    after, *others = jaxcomp.adapt_state((before, *adam), PARAMS, REDUCERS[new])
    assert types_of(after) == types_of(fresh)
    equal(others, adam)
    if old == new or "batched" in (old, new):  # one matrix of all leaves fits its like only
        equal(after, before if old == new else fresh)
        return
    if jax.tree.leaves(after):
        assert int(after.count) == (3 if type(before) is type(after) else 0)
    whole = kept(before, "residual")
    for path, x in kept(after, "residual").items():
        equal(x, jnp.broadcast_to(whole.get(path, 0), x.shape).astype(x.dtype))
    if hasattr(before, "inner") == hasattr(after, "inner"):
        factors = kept(before, "q")
        more = kept(after, "q")
        for path in factors.keys() & more.keys():
            check_factor(factors[path], more[path])


def test_what_does_not_fit_is_named():
    saved = trained_with_adam("rank 3")
    other = {**PARAMS, "dense": jnp.zeros((50, 30))}
    for state, reducer, message in (
        (saved, optax.chain(powersgd(2), optax.adam(1e-3)), "must be a jaxcomp reducer, got Grad"),
        (saved[1:], powersgd(2), "it holds 0. Pass one state"),
        ((saved, saved), powersgd(2), "it holds 2"),
        (saved, powersgd(2), r"residual\['dense'\]: \(40, 30\) in the state, \(50, 30\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxcomp.adapt_state(state, other, reducer)
    # Of the same shapes in the same order, but other leaves: a residual must not change its leaf.
    square = jnp.zeros((24, 24))
    state = powersgd(2).init({"a": square, "b": square})
    with pytest.raises(ValueError, match=r"(?s)\['c'\]: only the par.*\['a'\]: only the state has"):
        jaxcomp.adapt_state(state, {"b": square, "c": square}, powersgd(3))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_the_state_of_an_explicit_mesh_is_adapted(rank):
    """JAX takes no empty slice of an array on such a mesh."""
    mesh = jax.make_mesh((4,), ("data",))
    before = powersgd(3).init(PARAMS)
    expected = jaxcomp.adapt_state(before, PARAMS, powersgd(rank))
    sharded = jaxcomp.shard_state(before, mesh, "data")
    adapted = jaxcomp.adapt_state(sharded, PARAMS, powersgd(rank))
    for path, factor in kept(expected, "q").items():
        assert_allclose(kept(adapted, "q")[path], factor, atol=1e-6)
