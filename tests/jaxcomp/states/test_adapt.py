"""A checkpoint continues under another rank, and with compression newly on or off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers import reducers
from tests.helpers.leaves import by_layer, random_grads
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
    """Returns a consolidated state with something in every field, after three steps."""
    tx = optax.chain(REDUCERS[name], optax.adam(1e-3))
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        _, state = simulate("vmap", tx, random_grads(SHAPES, 2, 3))
    return jaxcomp.consolidate(state)


def kept(state, field):
    """Returns what there is of a field, by path; a reducer's around another has its factors."""
    if field == "q":
        state = getattr(state, "inner", state)
    return dict(jax.tree.leaves_with_path(getattr(state, field, {})))


@pytest.mark.parametrize("new", REDUCERS)
@pytest.mark.parametrize("old", [name for name in REDUCERS if name != "exact"])
def test_every_reducer_takes_over_from_every_other(old, new):
    """Keeps residuals, and as many columns of factors as both have; what is new begins anew."""
    before = trained_with_adam(old)
    fresh = REDUCERS[new].init(PARAMS)
    after = jaxcomp.adapt_state(before, PARAMS, REDUCERS[new])
    assert types_of(after[0]) == types_of(fresh)
    jax.tree.map(np.testing.assert_array_equal, after[1:], before[1:])
    if old == new:
        jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
        return
    if "batched" in (old, new):  # one matrix of all leaves fits its like only
        jax.tree.map(np.testing.assert_array_equal, after[0], fresh)
        return
    if jax.tree.leaves(after[0]):
        assert int(after[0].count) == (3 if type(before[0]) is type(after[0]) else 0)
    whole = kept(before[0], "residual")
    for path, x in kept(after[0], "residual").items():
        rtol = 2**-8 if x.dtype == jnp.bfloat16 else 0
        expected = np.broadcast_to(whole.get(path, 0), x.shape)
        np.testing.assert_allclose(x.astype(np.float32), expected, rtol=rtol)
    if hasattr(before[0], "inner") == hasattr(after[0], "inner"):
        factors = kept(before[0], "q")
        for path, more in kept(after[0], "q").items():
            if path not in factors:
                continue
            q = np.asarray(factors[path])
            columns = min(q.shape[-1], more.shape[-1])
            np.testing.assert_array_equal(more[..., :columns], q[..., :columns])
            # Further ones are orthonormal, and orthogonal to what was there.
            added = np.asarray(more[..., columns:])
            gram = added.mT @ added
            eye = np.eye(added.shape[-1])
            np.testing.assert_allclose(gram, np.broadcast_to(eye, gram.shape), atol=1e-5)
            np.testing.assert_allclose(q.mT @ added, 0, atol=1e-3)


def test_parameters_that_are_one_array():
    leaf = jnp.zeros((20, 20))
    _, state = simulate("vmap", powersgd(2), random_grads({"x": (20, 20)}, 1, 2)["x"])
    state = jaxcomp.consolidate(state)
    adapted = jaxcomp.adapt_state(state, leaf, REDUCERS["int8"])
    np.testing.assert_array_equal(adapted.residual, state.residual)


def test_what_does_not_fit_is_named():
    saved = trained_with_adam("rank 3")
    other = {**PARAMS, "dense": jnp.zeros((50, 30))}
    for state, reducer, message in (
        (saved, optax.chain(powersgd(2), optax.adam(1e-3)), "must be a jaxcomp reducer, got Grad"),
        (saved[1:], powersgd(2), "it holds 0. Pass that of one"),
        ((saved, saved), powersgd(2), "it holds 2"),
        (saved, powersgd(2), r"residual\['dense'\]: \(40, 30\) in the state, \(50, 30\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxcomp.adapt_state(state, other, reducer)
