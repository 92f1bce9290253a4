"""Whole rounds: exact on every replica, typed as replicated, the same steps as local_sgd's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, once, sent_bytes, text
from leaves import random_grads
from local_runs import NESTEROV, PARAMS, SHAPES, rounds, run, step_of
from runners import AXIS, MAPPINGS, sharded

import jaxcomp

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


def test_a_round_sets_the_exact_mean():
    targets = random_grads(SHAPES, 4, 2)
    round_ = jaxcomp.local_sgd_round(step_of(optax.sgd(0.1)), sync_every=2, axis_name=AXIS)
    state = round_.init(PARAMS, optax.sgd(0.1).init(PARAMS))
    got, _, _ = rounds(round_, PARAMS, targets, state, "vmap")
    local, _ = run("vmap", optax.sgd(0.1), PARAMS, targets)
    for name in SHAPES:
        np.testing.assert_array_equal(got[name][0], local[name][:, -1].sum(0) / 4)


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


def test_statistics_in_the_parameters_are_averaged():
    def step(params, state, x):
        statistics = 0.5 * params["statistics"] + 0.5 * x.mean()
        return (
            {"w": params["w"] - x, "steps": params["steps"] + 1, "statistics": statistics},
            state,
            x,
        )

    params = {"w": jnp.zeros(2), "steps": jnp.array(0), "statistics": jnp.array(0.0)}
    round_ = jaxcomp.local_sgd_round(step, sync_every=2, axis_name=AXIS)
    x = jnp.array([[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [4.0, 4.0]]])
    train = lambda p, x: round_(p, round_.init(p, ()), x[0])[0]  # noqa: E731
    got = sharded(2, train, (jax.P(), jax.P(AXIS)), jax.P())(params, x)
    np.testing.assert_array_equal(got["w"], [-5.0, -5.0])
    assert int(got["steps"]) == 2
    assert float(got["statistics"]) == (0.25 + 1.0 + 0.75 + 2.0) / 2


def test_averaged_momenta_are_counted():
    params, inner = {"w": jnp.zeros((17, 10)), "c": jnp.zeros(10)}, optax.adam(0.1)
    average = {"sync_every": 2, "axis_name": AXIS, "average_inner_state": True}
    round_ = jaxcomp.local_sgd_round(step_of(inner), **average)
    batches = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), params)

    def states(params, batches):
        state = round_.init(params, inner.init(params))
        params, state, _ = round_(params, state, batches)
        kept = sum(jnp.sum(x) for x in jax.tree.leaves(state.inner))
        return params, kept[None]

    mapped = sharded(2, states, (jax.P(), jax.P(AXIS)), (jax.P(), jax.P(AXIS)))
    with jax.numpy_dtype_promotion("standard"):  # for Adam
        hlo = text(mapped, params, batches)
    assert once(hlo) == collectives(hlo)  # after the loop, and not in its body
    sent = sent_bytes(once(hlo))
    with_init = jaxcomp.local_sgd_round(step_of(inner), inner_init=inner.init, **average)
    assert sent == 3 * 720 == with_init.bytes(params, step=1).bytes_after
    with pytest.raises(ValueError, match="The inner state is averaged too"):
        round_.bytes(params)


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
