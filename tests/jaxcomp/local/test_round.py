"""Whole rounds: exact on every replica, typed as replicated, the same steps as local_sgd's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.leaves import random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, rounds, run, step_of
from tests.helpers.runners import AXIS, MAPPINGS

MOMENTUM = optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        *((mapping, {"outer": NESTEROV}) for mapping in MAPPINGS),
        *(("shard_map", {"average_inner_state": mode}) for mode in (False, True, "reset")),
    ],
)
def test_parameters_are_equal_bit_for_bit_and_as_local_sgd_has_them(mapping, options):
    targets = random_grads(SHAPES, 3, 8)
    options = {"sync_every": 4, "axis_name": AXIS, **options}
    round_ = jaxcomp.local_sgd_round(step_of(MOMENTUM), inner_init=MOMENTUM.init, **options)
    got, state, _ = rounds(round_, PARAMS, targets, mapping=mapping)
    expected, _ = run("vmap", jaxcomp.local_sgd(MOMENTUM, **options), PARAMS, targets)
    for name in SHAPES:
        assert len(np.unique(np.asarray(got[name]).reshape(3, -1), axis=0)) == 1
        np.testing.assert_allclose(got[name], expected[name][:, -1], rtol=1e-5, atol=1e-6)
    assert int(np.ravel(state.count)[0]) == 8


def test_rounds_of_several_lengths_share_a_state():
    targets = random_grads(SHAPES, 4, 6)
    make = functools.partial(jaxcomp.local_sgd_round, step_of(MOMENTUM), axis_name=AXIS)
    long, short = make(sync_every=4), make(sync_every=2)

    def train(targets):
        params, state = PARAMS, long.init(PARAMS, MOMENTUM.init(PARAMS))
        head = jax.tree.map(lambda x: x[:4], targets)
        tail = jax.tree.map(lambda x: x[4:], targets)
        params, state, _ = long(params, state, head)
        return short(params, state, tail)[0]

    got = jax.jit(jax.vmap(train, axis_name=AXIS))(targets)
    schedule = lambda step: jnp.where(step < 4, 4.0, 1.9999)  # noqa: E731
    tx = jaxcomp.local_sgd(MOMENTUM, sync_every=schedule, axis_name=AXIS)
    expected, _ = run("vmap", tx, PARAMS, targets)
    for name in SHAPES:
        np.testing.assert_allclose(got[name], expected[name][:, -1], rtol=1e-5, atol=1e-6)


def test_averaged_momenta_are_counted():
    params, inner = {"w": jnp.zeros((17, 10)), "c": jnp.zeros(10)}, optax.adam(0.1)
    average = {"sync_every": 2, "axis_name": AXIS, "average_inner_state": True}
    round_ = jaxcomp.local_sgd_round(step_of(inner), inner_init=inner.init, **average)
    assert round_.bytes(params, step=1).bytes_after == 3 * 720
    with pytest.raises(ValueError, match="The inner state is averaged too"):
        jaxcomp.local_sgd_round(step_of(inner), **average).bytes(params)


def test_bad_input_is_refused():
    pair = jaxcomp.local_sgd_round(lambda p, s, b: (p, s), sync_every=1, axis_name=AXIS)
    with pytest.raises(ValueError, match="must return a tuple"):
        rounds(pair, PARAMS, jnp.zeros((2, 1)), pair.init(PARAMS, ()), "vmap")
    round_ = jaxcomp.local_sgd_round(step_of(optax.sgd(0.1)), sync_every=4, axis_name=AXIS)
    with pytest.raises(ValueError, match="needs `inner_init`"):
        jaxcomp.local_sgd_round(pair, sync_every=1, axis_name=AXIS, average_inner_state="reset")
    with pytest.raises(ValueError, match="no inner state"):
        round_.init(PARAMS)
    batches = jax.tree.map(lambda x: jnp.zeros((3, *x.shape)), PARAMS)
    with pytest.raises(ValueError, match=r"\['a'\] has shape \(3, 4, 3\)"):
        round_(PARAMS, round_.init(PARAMS, ()), batches)
