"""Whole rounds: exact on every replica, typed as replicated, the same steps as local_sgd's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import close, random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, rounds, run, step_of
from tests.helpers.reducers import allreduce
from tests.helpers.runners import AXIS, MAPPINGS

MOMENTUM = optax.sgd(0.1, momentum=0.9)
CASES = [(mapping, {"outer": NESTEROV}) for mapping in MAPPINGS]
CASES += [("shard_map", {"average_inner_state": mode}) for mode in (False, True, "reset")]


@pytest.mark.parametrize(("mapping", "options"), CASES)
def test_parameters_are_equal_bit_for_bit_and_as_local_sgd_has_them(mapping, options):
    targets = random_grads(SHAPES, 3, 8)
    round_ = jaxcomp.local_sgd_round(
        step_of(MOMENTUM), inner_init=MOMENTUM.init, sync_every=4, axis_name=AXIS, **options
    )
    params, state, _ = rounds(round_, PARAMS, targets, mapping=mapping)
    tx = jaxcomp.local_sgd(MOMENTUM, sync_every=4, axis_name=AXIS, **options)
    expected, _ = run("vmap", tx, PARAMS, targets)
    for name in SHAPES:
        copies = np.asarray(params[name]).reshape(3, -1)
        assert len(np.unique(copies, axis=0)) == 1
        assert_allclose(params[name], expected[name][:, -1], rtol=1e-5, atol=1e-6)
    assert int(np.ravel(state.count)[0]) == 8


def test_rounds_of_several_lengths_share_a_state():
    targets = random_grads({"w": (4, 3)}, 4, 6)["w"]
    make = functools.partial(jaxcomp.local_sgd_round, step_of(MOMENTUM), axis_name=AXIS)
    long = make(sync_every=4)
    short = make(sync_every=2)
    start = jnp.zeros((4, 3))

    def train(targets):
        state = long.init(start, MOMENTUM.init(start))
        params, state, _ = long(start, state, targets[:4])
        return short(params, state, targets[4:])[0]

    params = jax.jit(jax.vmap(train, axis_name=AXIS))(targets)
    schedule = lambda step: jnp.where(step < 4, 4.0, 1.9999)  # noqa: E731
    tx = jaxcomp.local_sgd(MOMENTUM, sync_every=schedule, axis_name=AXIS)
    expected, _ = run("vmap", tx, start, targets)
    close(params, expected[:, -1])


def test_averaged_momenta_are_counted():
    params = {"w": jnp.zeros((17, 10)), "c": jnp.zeros(10)}
    inner = optax.adam(0.1)
    make = functools.partial(
        jaxcomp.local_sgd_round,
        step_of(inner),
        sync_every=2,
        axis_name=AXIS,
        average_inner_state=True,
    )
    assert make(inner_init=inner.init).bytes(params, step=1).bytes_after == 3 * 720
    with pytest.raises(ValueError, match="The inner state is averaged too"):
        make().bytes(params)
    with pytest.raises(ValueError, match="`step` for one step or `steps` for a whole run"):
        make().bytes(params, step=1, steps=2)


def test_bad_input_is_refused():
    def pair(params, state, batch):
        return params, state

    run = jaxcomp.local_sgd_round(pair, sync_every=1, axis_name=AXIS)
    with pytest.raises(ValueError, match="must return a tuple"):
        rounds(run, PARAMS, jnp.zeros((2, 1)), run.init(PARAMS, ()), "vmap")

    with pytest.raises(ValueError, match=r"Call a round as \(params, state, batches\).*is a dict"):
        run(run.init(PARAMS, ()), PARAMS, jnp.zeros((2, 1)))
    with pytest.raises(ValueError, match=r"`outer` must be an optimizer, got allreduce.*as reduc"):
        jaxcomp.local_sgd_round(pair, sync_every=1, axis_name=AXIS, outer=allreduce())

    def speaking(params, state, batch):
        return params, state, {"status": "ok"}

    run = jaxcomp.local_sgd_round(speaking, sync_every=1, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"output \['status'\] is a str, and outputs can only be"):
        rounds(run, PARAMS, jnp.zeros((2, 1)), run.init(PARAMS, ()), "vmap")

    def swapped(params, state, batch):
        return state, params, jnp.mean(batch)

    run = jaxcomp.local_sgd_round(swapped, sync_every=1, axis_name=AXIS)
    momenta = MOMENTUM.init(PARAMS)
    with pytest.raises(ValueError, match=r"as the third.* got \('dict', 'tuple'\) and returned"):
        rounds(run, PARAMS, jnp.zeros((2, 1)), run.init(PARAMS, momenta), "vmap")
    with pytest.raises(ValueError, match="needs `inner_init`"):
        jaxcomp.local_sgd_round(pair, sync_every=1, axis_name=AXIS, average_inner_state="reset")
    run = jaxcomp.local_sgd_round(step_of(optax.sgd(0.1)), sync_every=4, axis_name=AXIS)
    with pytest.raises(ValueError, match="no inner state"):
        run.init(PARAMS)
    batches = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape)), PARAMS)
    with pytest.raises(ValueError, match=r"\['a'\] has shape \(3, 4, 3\)"):
        run(PARAMS, run.init(PARAMS, ()), batches)
    with pytest.raises(ValueError, match=r"no mesh\. Place the state with jaxcomp\.shard"):
        run(PARAMS, run.init(PARAMS, ()), jnp.zeros((4, 2)))
