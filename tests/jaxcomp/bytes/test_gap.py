"""The gap that an optimizer's own momentum predicts, wherever the optimizer's state lies."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from numpy.testing import assert_allclose

import jaxcomp
from jaxcomp._bytes.gap import TAIL_LAWS

PARAMS = {"a": jnp.zeros((48, 32)), "b": jnp.zeros(32), "layers": jnp.zeros((3, 24, 40))}
LAYERS = jaxcomp.stacked("layers")
RANKS = (1, 4, 8, 16)


def grads(step):
    decay = {"a": 0.8 ** jnp.arange(32.0), "b": 1.0, "layers": 0.9 ** jnp.arange(40.0)}
    normal = optax.tree.random_like(jax.random.key(step), PARAMS)
    return jax.tree.map(jnp.multiply, normal, decay)


def trained(optimizer, steps=5, params=PARAMS):
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):  # what Optax needs
        for step in range(steps):
            shown = {name: grads(step)[name] for name in params}
            _, state = optimizer.update(shown, state, params)
    return state


def by_hand(state, rank):
    """Computes the tail by its definition."""
    beyond = total = 0.0
    for name in ("a", "layers"):
        mu, nu = (np.asarray(moment[name], np.float64) for moment in (state.mu, state.nu))
        step = mu / (np.sqrt(nu) + 1e-8)
        for matrix in step.reshape(-1, *step.shape[-2:]):
            energy = np.linalg.svd(matrix, compute_uv=False) ** 2
            beyond += energy[rank:].sum()
            total += energy.sum()
    return beyond / total


predict_gap = functools.partial(jaxcomp.predict_gap, min_compression_rate=0.1, matrix_dims=LAYERS)


def tails(state):
    return [predict_gap(state, rank).tail for rank in RANKS]


def test_the_tail_is_the_energy_of_a_step_beyond_the_rank():
    state = trained(optax.scale_by_adam())
    for rank in RANKS:
        found = predict_gap(state, rank)
        assert found.tail == pytest.approx(by_hand(state, rank), rel=1e-6)
        assert found.gap > 0
        assert found.half_width >= 0.002
        assert str(found).endswith(f"tail {100 * found.tail:.1f}%")


def parted(name):
    """Makes an optimizer for each of two groups of leaves."""
    optimizers = {"x": optax.adam(1e-3), "y": optax.adam(1e-2)}
    return optax.multi_transform(optimizers, {"a": name, "b": "y", "layers": "y"})


OPTIMIZERS = {
    "chain": optax.chain(optax.clip(1e9), optax.adamw(1e-3)),
    "injected": optax.inject_hyperparams(optax.adam)(1e-3),
    "two groups": parted("x"),
    "one of two groups": parted("y"),
    "micro-batches": optax.MultiSteps(optax.adam(1e-3), 1),
    "finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "amsgrad": optax.amsgrad(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_moments_are_found_wherever_they_lie(name):
    state = trained(OPTIMIZERS[name])
    assert_allclose(tails(state), tails(trained(optax.scale_by_adam())), rtol=1e-5)


class Training(NamedTuple):
    params: Any
    ema: Any  # averaged parameters, which are no momentum
    opt_state: Any


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)])
def test_averaged_parameters_beside_the_optimizer_are_no_momentum(optimizer):
    state = trained(optimizer)
    averaged = grads(step=9)
    options = {"measured": (4, 0.02)}
    found = predict_gap(Training(PARAMS, averaged, state), 8, **options)
    assert found == predict_gap(state, 8, **options)


def test_only_the_momentum_needs_values():
    """Finds it also beside residuals, parts of which are in other processes."""
    state = trained(optax.adam(1e-3))
    reducer = jaxcomp.powersgd(2, axis_name="data", matrix_dims=LAYERS)
    held = jax.eval_shape(jaxcomp.hold_state(reducer).init, PARAMS)
    assert tails((held, state)) == tails(state)


def test_groups_of_whole_branches():
    params = {"encoder": {"a": PARAMS["a"]}, "decoder": {"layers": PARAMS["layers"]}}
    shown = {"encoder": {"a": grads(0)["a"]}, "decoder": {"layers": grads(0)["layers"]}}
    groups = {"encoder": "x", "decoder": "y"}
    optimizers = {"x": optax.adam(1e-3), "y": optax.adam(1e-2)}
    found = []
    for optimizer in (optax.partition(optimizers, groups), optax.adam(1e-3)):
        with jax.numpy_dtype_promotion("standard"):  # what Optax needs
            _, state = optimizer.update(shown, optimizer.init(params), params)
        found.append(predict_gap(state, 4))
    assert found[0] == found[1]


def test_a_train_state_and_what_a_checkpoint_gives_back():
    adam = trained(optax.scale_by_adam())
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.identity())
    restored = {"0": {"count": adam.count, "mu": adam.mu, "nu": adam.nu}, "1": {}}
    for holder in (state.replace(opt_state=(adam, ())), restored):
        assert tails(holder) == tails(adam)


def test_narrow_moments_have_about_the_same_tail():
    state = trained(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    assert_allclose(tails(state), tails(trained(optax.adam(1e-3))), rtol=0.1)


def test_behind_muon_it_is_the_momentum_itself():
    params = {"a": PARAMS["a"], "b": PARAMS["b"]}
    state = trained(optax.contrib.muon(1e-3), params=params)
    mu = state.inner_states["muon"].inner_state[0].mu["a"]
    energy = np.linalg.svd(np.float64(mu), compute_uv=False) ** 2
    for rank in RANKS:
        found = jaxcomp.predict_gap(state, rank, min_compression_rate=0.1)
        assert found.tail == pytest.approx(energy[rank:].sum() / energy.sum(), rel=1e-5)


def test_a_leaf_that_is_not_compressed_loses_nothing():
    state = trained(optax.adam(1e-3))
    only_a = predict_gap(state, lambda path, leaf: 4 if leaf.ndim == 2 else None)
    assert 0 < only_a.tail < predict_gap(state, 4).tail
    assert predict_gap(state, lambda path, leaf: None).gap == 0


@pytest.mark.parametrize(("budget", "share"), [("2%", 0.02), ("0.5%", 0.005), (0.001, 0.001)])
def test_ranks_for_a_loss_budget_keep_it_with_fewer_bytes_than_equal_ranks(budget, share):
    state = trained(optax.adam(1e-3))
    options = {"min_compression_rate": 1.0, "matrix_dims": LAYERS}
    ranks = jaxcomp.ranks_by_spectrum(state, loss_budget=budget, comm_dtype="int6", **options)
    assert jaxcomp.predict_gap(state, ranks, **options).gap <= share * (1 + 1e-9)

    def sent(rank):
        tx = jaxcomp.powersgd(rank, axis_name="data", comm_dtype="int6", **options)
        return tx.bytes(PARAMS, replicas=4).bytes_after

    equal = 1
    while jaxcomp.predict_gap(state, equal, **options).gap > share:
        equal += 1
    # What is left of a leaf after its last column is one large piece.
    assert sent(ranks) <= 1.03 * sent(equal)


def test_a_measured_gap_scales_the_gaps_of_all_ranks():
    state = trained(optax.adam(1e-3))
    by_law = {rank: predict_gap(state, rank) for rank in RANKS}
    measured = {rank: predict_gap(state, rank, measured=(4, "1.2%")) for rank in RANKS}
    assert measured[4].gap == pytest.approx(0.012)
    for rank in RANKS:
        assert measured[rank].tail == by_law[rank].tail
        expected = 0.012 * by_law[rank].gap / by_law[4].gap
        assert measured[rank].gap == pytest.approx(expected)
        # The other ranks are more certain than by the law alone.
        assert measured[rank].half_width < 0.5 * measured[rank].gap + 0.002
    for_each = {"a": 4, "b": None, "layers": 4}
    by_leaf = predict_gap(state, 8, measured=(lambda path, leaf: for_each[path[0].key], 0.012))
    assert by_leaf == measured[8]


LONE = {
    "sgd": (optax.sgd(0.1, momentum=0.9), lambda state: state[0].trace),
    "adafactor": (optax.adafactor(1e-3, momentum=0.9), lambda state: state[4].ema),
    "lion": (optax.lion(1e-3), lambda state: state[0].mu),
}


@pytest.mark.parametrize("name", LONE)
def test_a_measured_gap_makes_up_for_the_law_of_other_optimizers(name):
    optimizer, momentum = LONE[name]
    params = {"a": PARAMS["a"], "b": PARAMS["b"]}
    state = trained(optimizer, params=params)
    energy = np.linalg.svd(np.float64(momentum(state)["a"]), compute_uv=False) ** 2
    options = {"min_compression_rate": 0.1, "measured": (4, 0.02)}
    for rank in RANKS:
        found = jaxcomp.predict_gap(state, rank, **options)
        assert found.tail == pytest.approx(energy[rank:].sum() / energy.sum(), rel=1e-5)
        expected = 0.02 * (energy[rank:].sum() / energy[4:].sum()) ** TAIL_LAWS["adamw"].power
        assert found.gap == pytest.approx(expected, rel=1e-4)


def test_a_momentum_around_adam_counts_only_where_adam_has_none():
    state = trained(optax.chain(optax.trace(0.9), optax.scale_by_adam()))
    adam = optax.tree.get(state, "mu")
    whole = predict_gap(state, 4).tail
    alone = predict_gap({"mu": adam, "nu": optax.tree.get(state, "nu")}, 4).tail
    assert whole == alone


def test_ranks_for_a_loss_budget_keep_a_measured_gap():
    state = trained(optax.adam(1e-3))
    options = {"min_compression_rate": 1.0, "matrix_dims": LAYERS}
    lossy = {**options, "measured": (4, "10%")}
    strict = jaxcomp.ranks_by_spectrum(state, loss_budget="1%", **lossy)
    assert jaxcomp.predict_gap(state, strict, **lossy).gap <= 0.01 * (1 + 1e-9)
    lax = jaxcomp.ranks_by_spectrum(state, loss_budget="1%", **options, measured=(4, "1%"))
    assert lax.by_leaf["['a']"] < (strict.by_leaf["['a']"] or 32)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (4, "a rank and how far above the exact run's loss it ended"),
        ((4, 0.1, 0.2), "a rank and how far above the exact run's loss it ended"),
        ((4, 0.0), "`measured` must be positive and below 1, with a unit as in 1.2%"),
        ((4, "a little"), "`measured` must be positive and below 1, with a unit as in 1.2%"),
        ((4, None), "`measured` must be positive and below 1, with a unit as in 1.2%"),
        ((0, 0.1), "`rank` must"),
        ((40, 0.1), "leaves out nothing, so it shows no cost"),
    ],
)
def test_what_was_not_measured_is_refused(measured, message):
    state = trained(optax.adam(1e-3))
    with pytest.raises(ValueError, match=message):
        predict_gap(state, 4, measured=measured)


def test_a_measured_gap_needs_the_momentum_of_the_exact_run():
    with pytest.raises(ValueError, match="`measured` is read only with `loss_budget`"):
        jaxcomp.ranks_by_spectrum(PARAMS, ratio=2.0, measured=(4, 0.01))


def other_model():
    optimizer = optax.adam(1e-3)
    return optimizer.init({"other": jnp.zeros((8, 8))})


def stacked_twice(leaf):
    return jnp.stack([leaf, leaf])


def spoilt(moment, value):
    state = trained(optax.scale_by_adam())
    moments = getattr(state, moment)
    moments["a"] = moments["a"].at[0, 0].set(value)
    return state


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trained(optax.sgd(0.1, momentum=0.9)), "for which no law is known"),
        (lambda: trained(optax.lion(1e-3)), "for which no law is known"),
        (lambda: trained(optax.sgd(0.1)), "holds no momentum"),
        (lambda: {"trace": PARAMS, "mu": PARAMS}, "holds no momentum"),
        (lambda: trained(optax.sm3(1e-3)), "holds no momentum"),
        (lambda: optax.adam(1e-3).init(PARAMS), "is zero"),
        (lambda: trained(optax.flatten(optax.adam(1e-3))), "has no matrices"),
        (lambda: [trained(optax.adam(1e-3)), trained(optax.adam(1e-2))], "several models"),
        (lambda: [trained(optax.adam(1e-3)), other_model()], "of several models"),
        (lambda: jax.tree.map(stacked_twice, trained(optax.adam(1e-3))), "counter has an axis"),
        (lambda: jax.eval_shape(optax.adam(1e-3).init, PARAMS), r"only a shape at \[0\]\.count"),
        (lambda: spoilt("mu", jnp.nan), r"\['a'\] is not finite"),
        (lambda: spoilt("nu", jnp.inf), r"\['a'\] is not finite"),
    ],
    ids=[
        "momentum",
        "lion",
        "no momentum",
        "parameters",
        "SM3",
        "new",
        "one vector",
        "two runs",
        "two models",
        "two replicas",
        "shapes",
        "not finite",
        "an infinite square",
    ],
)
def test_states_that_tell_no_gap_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        jaxcomp.predict_gap(make(), 4)


def test_messages():
    state = trained(optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"is traced at .*: read it outside of jax\.jit"):
        jax.jit(lambda state: jaxcomp.predict_gap(state, 4).gap)(state)
    with pytest.raises(ValueError, match=r"`gradients` is traced at .*: read it outside"):
        jax.jit(lambda mu: jaxcomp.ranks_by_spectrum(mu, ratio=2.0).by_leaf)(PARAMS)
    with pytest.raises(ValueError, match="`loss_budget` must be not negative"):
        jaxcomp.ranks_by_spectrum(state, loss_budget="little")
    for both in ({}, {"ratio": 2.0, "loss_budget": "1%"}):
        with pytest.raises(ValueError, match="either `ratio`"):
            jaxcomp.ranks_by_spectrum(state, **both)
