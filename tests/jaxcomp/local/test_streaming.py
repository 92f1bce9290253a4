"""Streaming DiLoCo: torchft's recorded runs, NumPy, the state between sending and use, the wire."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, once, sent_bytes, text
from leaves import random_grads
from local_runs import NESTEROV, run, streaming_diloco, towards
from runners import AXIS, mesh_of

import jaxcomp

RECORDED = json.loads((Path(__file__).parent / "data" / "torchft_diloco.json").read_text())
SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
PARAMS = {name: jnp.full(shape, 0.5) for name, shape in SHAPES.items()}
INNER = optax.sgd(0.1)
HALVES = ["a", "b|c"]  # after 3 and 6 steps of each 6
HALF_PRECISION = jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.float16))


def streaming(**kwargs):
    return {
        "sync_every": 6,
        "axis_name": AXIS,
        "fragments": HALVES,
        "outer": NESTEROV,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.25,
        **kwargs,
    }


def sgd_step(params, state, target):
    updates, state = INNER.update(towards(params, target), state, params)
    new = optax.apply_updates(params, updates)
    return new, state, new


def rounds(round_, params, targets, state=None):
    """All rounds of ``(n, steps, *shape)`` targets under shard_map.

    Returns:
      ``params``, as each device has them, ``(n, *shape)``; the state; the parameters that each step
      ended with, ``(n, steps, *shape)``.
    """
    n, steps = jax.tree.leaves(targets)[0].shape[:2]
    state = round_.init(params, INNER.init(params)) if state is None else state
    specs, mesh = jaxcomp.state_specs(state, AXIS), mesh_of(n)

    def train(params, state, targets):
        seen = []
        for r in range(steps // round_.sync_every):
            part = slice(r * round_.sync_every, (r + 1) * round_.sync_every)
            batches = jax.tree.map(lambda x, part=part: x[0, part], targets)
            params, state, ends = round_(params, state, batches)
            seen.append(ends)
        return params, state, jax.tree.map(lambda *x: jnp.concatenate(x)[None], *seen)

    mapped = jax.shard_map(
        train,
        mesh=mesh,
        in_specs=(jax.P(), specs, jax.P(AXIS)),
        out_specs=(jax.P(), specs, jax.P(AXIS)),
    )
    placed = jaxcomp.shard_state(state, mesh, AXIS)
    params, state, seen = jax.jit(mapped)(params, placed, targets)
    copies = jax.tree.map(lambda x: np.stack([s.data for s in x.addressable_shards]), params)
    return copies, state, jax.device_get(seen)


@pytest.mark.parametrize("recording", RECORDED["recordings"], ids=range(6))
def test_torchfts_recorded_runs(recording):
    expected = np.asarray(recording["parameters"])
    kwargs = {
        "sync_every": 6,
        "axis_name": AXIS,
        "fragments": ["layers/0", "layers/1"],
        "outer": [optax.sgd(2.0), optax.sgd(2.0)],
        "fragment_sync_delay": recording["fragment_sync_delay"],
        "fragment_update_alpha": recording["fragment_update_alpha"],
    }
    steps = len(expected) - 1
    params = {"layers": [{"weight": jnp.ones((1, 1))}, {"weight": jnp.ones((1, 1))}]}
    targets = jax.tree.map(lambda x: np.zeros((2, steps, 1, 1), np.float32), params)
    twos = lambda params, _: jax.tree.map(lambda p: jnp.full_like(p, 2.0), params)  # noqa: E731
    got, _ = run("vmap", jaxcomp.local_sgd(optax.sgd(1.0), **kwargs), params, targets, twos)
    for i, layer in enumerate(got["layers"]):
        for replica in layer["weight"][..., 0, 0]:
            np.testing.assert_allclose(replica, expected[1:, i], rtol=1e-5, atol=1e-5)

    def step(params, state, batch):
        return jax.tree.map(lambda p: p - 2.0, params), state, batch

    round_ = jaxcomp.local_sgd_round(step, **kwargs)
    shared, state = params, round_.init(params, ())
    whole = jax.jit(jax.vmap(round_, in_axes=(None, None, None), axis_name=AXIS, axis_size=2,
                             out_axes=(None, jaxcomp.state_axes(state), 0)))  # fmt: skip
    shared, state, _ = whole(shared, state, jnp.zeros((6, 1)))
    for i, layer in enumerate(shared["layers"]):
        ours = (float(layer["weight"][0, 0]), state.local["layers"][i]["weight"][:, 0, 0, 0])
        np.testing.assert_allclose(ours[0], recording["global_parameters"]["6"][i], rtol=1e-5)
        np.testing.assert_allclose(ours[1], [expected[6, i]] * 2, rtol=1e-5)


CASES = [
    ("vmap", {"fragment_sync_delay": 1}),
    ("pmap", {"fragments": 1, "fragment_sync_delay": 4, "fragment_update_alpha": 0.0}),
    ("shard_map", {"fragment_update_alpha": 0.5}),
    ("vmap", {"fragments": ["."], "fragment_sync_delay": 0, "fragment_update_alpha": 1.0}),
    ("vmap", {"sync_every": 7}),  # after 3 and 7 of each 7
]


@pytest.mark.parametrize(("mapping", "case"), CASES)
def test_equals_numpy(mapping, case):
    kwargs = streaming(**case)
    every, delay = kwargs["sync_every"], kwargs["fragment_sync_delay"]
    alpha, turns = kwargs["fragment_update_alpha"], [3, every] if "fragments" not in case else [6]
    targets = random_grads(SHAPES, 4, 2 * every)
    stepwise, after = run(mapping, jaxcomp.local_sgd(INNER, **kwargs), PARAMS, targets)
    shared, state, ends = rounds(jaxcomp.local_sgd_round(sgd_step, **kwargs), PARAMS, targets)
    for name in SHAPES:
        turn = turns[0 if name == "a" else -1]
        local, anchors = streaming_diloco(0.5, targets[name], every, turn, delay, alpha)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
        close(stepwise[name], local)
        close(np.reshape(after.anchor[name], (-1, *SHAPES[name]))[0], anchors[-1])
        for copy in shared[name]:  # equal bit for bit on each device
            np.testing.assert_array_equal(copy, shared[name][0])
        close(shared[name][0], anchors[-1])
        if state.local:
            close(state.local[name].reshape(local[:, -1].shape), local[:, -1])
        # What a step ends with comes before the average.
        steps = [t for t in range(2 * every) if (t + 1 - turn) % every]
        close(ends[name][:, steps], local[:, steps])


def test_any_reducer_and_an_optimizer_for_each_fragment():
    targets = random_grads(SHAPES, 2, 12)
    kwargs = streaming(outer=[NESTEROV, optax.sgd(0.3)])
    exact, _ = run("vmap", jaxcomp.local_sgd(INNER, **kwargs), PARAMS, targets)
    nesterov, _ = run("vmap", jaxcomp.local_sgd(INNER, **streaming()), PARAMS, targets)
    np.testing.assert_array_equal(exact["a"], nesterov["a"])
    assert np.abs(exact["b"] - nesterov["b"]).max() > 0.01
    kwargs["reducer"] = HALF_PRECISION
    tx, round_ = jaxcomp.local_sgd(INNER, **kwargs), jaxcomp.local_sgd_round(sgd_step, **kwargs)
    got, stepwise = run("vmap", tx, PARAMS, targets)
    _, state, _ = rounds(round_, PARAMS, targets)
    for k, name in enumerate("ab"):
        np.testing.assert_allclose(got[name], exact[name], rtol=0, atol=5e-3)
        last = np.reshape(state.local[name], got[name][:, -1].shape)
        np.testing.assert_allclose(last, got[name][:, -1], rtol=1e-5, atol=1e-5)
        lost = stepwise.reducer[k].residual[name]
        assert 1e-6 < np.abs(lost).max() < 5e-3
        np.testing.assert_allclose(np.reshape(state.reducer[k].residual[name], lost.shape), lost,
                                   rtol=0, atol=1e-5)  # fmt: skip


def test_nothing_is_used_that_was_not_sent():
    # The first turn is after step 4, and before step 3 gradients are averaged: its time to be sent.
    targets = random_grads(SHAPES, 2, 6)
    kwargs = {"sync_every": 4, "axis_name": AXIS, "start_step": 3, "offset": 4}
    shifted = jaxcomp.local_sgd(INNER, **kwargs, fragment_sync_delay=2, outer=NESTEROV)
    got, state = run("vmap", shifted, PARAMS, targets)
    free, _ = run("vmap", jaxcomp.local_sgd(INNER, **(kwargs | {"offset": 7})), PARAMS, targets)
    for name in SHAPES:
        np.testing.assert_allclose(got[name], free[name], rtol=1e-6, atol=1e-6)
    assert np.ravel(state.last_sync).tolist() == [3, 3]
    assert shifted.bytes(PARAMS, step=5).bytes_after == 72  # sent after step 6, for step 8


def test_the_steps_after_an_average_was_sent_and_the_average_share_no_data():
    round_ = jaxcomp.local_sgd_round(
        sgd_step, **streaming(fragments=1, fragment_sync_delay=2, fragment_update_alpha=0.0)
    )
    targets = {name: np.array(x) for name, x in random_grads(SHAPES, 2, 6).items()}
    first, _, steps = rounds(round_, PARAMS, targets)
    late = jax.tree.map(lambda x: np.where(np.arange(6).reshape(1, 6, *[1] * (x.ndim - 2)) < 4, x,
                                           np.nan), targets)  # fmt: skip
    np.testing.assert_array_equal(rounds(round_, PARAMS, late)[0]["a"], first["a"])
    targets["a"][1] = np.nan  # from the other replica: in the average, and nowhere else
    spoilt, _, others = rounds(round_, PARAMS, targets)
    assert np.isnan(spoilt["a"]).all()
    np.testing.assert_array_equal(others["a"][0], steps["a"][0])


def test_a_round_that_is_not_finite_leaves_no_trace():
    targets = {name: np.array(x) for name, x in random_grads(SHAPES, 2, 12).items()}
    targets["a"][1, 6] = np.nan  # in the second round, before fragment "a" is sent
    round_ = jaxcomp.local_sgd_round(
        sgd_step, **streaming(outer=optax.apply_if_finite(NESTEROV, 3), reducer=HALF_PRECISION)
    )
    half = jax.tree.map(lambda x: x[:, :6], targets)
    before, kept, _ = rounds(round_, PARAMS, half)
    after, state, _ = rounds(round_, PARAMS, targets)
    np.testing.assert_array_equal(after["a"], before["a"])
    jax.tree.map(np.testing.assert_array_equal, state.reducer[0], kept.reducer[0])
    momenta = [jax.tree.leaves(x.outer[0].inner_state) for x in (state, kept)]
    jax.tree.map(np.testing.assert_array_equal, *momenta)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, state.local)))


def merged(state, n):
    """The one copy to save of a state as shard_map leaves it."""
    specs = jaxcomp.state_specs(state, AXIS)
    consolidate = jax.shard_map(
        lambda state: jaxcomp.consolidate(state, AXIS),
        mesh=mesh_of(n),
        in_specs=(specs,),
        out_specs=jax.P(),
    )
    return jax.device_get(jax.jit(consolidate)(state))


def test_a_state_with_an_average_on_its_way_restores_onto_other_replicas():
    tx = jaxcomp.local_sgd(INNER, **streaming(fragment_update_alpha=0.0))
    _, placed = run("shard_map", tx, PARAMS, random_grads(SHAPES, 4, 2))  # "a" was sent after 1
    one = merged(placed, 4)
    assert np.abs(one.anchor["a"] - PARAMS["a"]).max() > 0.01
    resumed = optax.GradientTransformationExtraArgs(lambda params: one, tx.update)
    got, state = run("shard_map", resumed, PARAMS, random_grads(SHAPES, 2, 1))
    for replica in got["a"][:, 0]:
        np.testing.assert_allclose(replica, one.anchor["a"], rtol=1e-6)
    assert int(state.last_sync) == 3
    # Rounds have nothing on its way at their end, but each replica's parameters.
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(), inner_init=INNER.init)
    params, state, _ = rounds(round_, PARAMS, random_grads(SHAPES, 4, 6))
    one = merged(state, 4)
    np.testing.assert_allclose(one.local["a"][0], state.local["a"].mean(0), rtol=1e-6)
    shared = jax.tree.map(lambda x: jnp.asarray(x[0]), params)
    again, state, _ = rounds(round_, shared, random_grads(SHAPES, 2, 6), one)
    assert state.local["a"].shape == (2, 4, 3)
    assert int(state.count) == 12
    assert np.isfinite(again["a"]).all()


def test_a_round_maps_itself_over_the_mesh_and_keeps_integers():
    def step(params, state, rows):
        new, state, _ = sgd_step(params["w"], state, jax.tree.map(lambda x: x[0], rows))
        return {"w": new, "steps": params["steps"] + 1}, state, ()

    targets = random_grads(SHAPES, 4, 6)
    shared, by_hand, _ = rounds(jaxcomp.local_sgd_round(sgd_step, **streaming()), PARAMS, targets)
    kwargs = streaming(fragments=["w/a", "w/"], mesh=mesh_of(4))
    round_ = jaxcomp.local_sgd_round(step, **kwargs)
    params = {"w": PARAMS, "steps": jnp.array(0)}
    batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), targets)  # (steps, replicas, ...)
    got, state, _ = jax.jit(round_)(params, round_.init(params, INNER.init(PARAMS)), batches)
    for name in SHAPES:
        np.testing.assert_allclose(got["w"][name], shared[name][0], rtol=1e-5, atol=1e-6)
        local = by_hand.local[name].reshape(state.local["w"][name].shape)
        np.testing.assert_allclose(state.local["w"][name], local, rtol=1e-5, atol=1e-6)
    assert int(got["steps"]) == 6
    assert isinstance(state.local["steps"], optax.MaskedNode)


def test_bytes_of_the_compiled_round_are_those_of_its_steps():
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=3, fragment_sync_delay=1))
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, 6, *x.shape), x.dtype), PARAMS)

    def train(params, targets):
        batches = jax.tree.map(lambda x: x[0], targets)
        return round_(params, round_.init(params, INNER.init(params)), batches)[0]

    mapped = jax.shard_map(
        train, mesh=mesh_of(2), in_specs=(jax.P(), jax.P(AXIS)), out_specs=jax.P()
    )
    hlo = text(mapped, PARAMS, targets)
    steps = [round_.bytes(PARAMS, step=step).bytes_after for step in range(6)]
    assert steps == [48, 0, 20, 0, 4, 0]  # for use after 2, 4 and 6 steps
    assert [sent_bytes([sent]) for sent in once(hlo)] == [48, 20, 4]
    assert sent_bytes(collectives(hlo)) == sum(steps)  # none in a loop
    assert round_.bytes(PARAMS).bytes_after == sum(steps) / 6


BAD = [
    ({"fragment_sync_delay": 3}, "fragment_sync_delay=3 must be less than .* = 3"),
    ({"sync_every": 7, "fragment_sync_delay": 3}, "sync_every // fragments = 3"),
    ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1"),
    ({"fragment_sync_delay": 0.5}, "`fragment_sync_delay` must be"),
    ({"fragment_update_alpha": 1.5}, "at least 0 and at most 1, got 1.5"),
    ({"fragment_update_alpha": jnp.array(0.5)}, "must be a Python number"),
    ({"outer": [NESTEROV] * 3}, "3 optimizers, and there are 2 fragments"),
    ({"outer": [NESTEROV, 0.7]}, "one for each fragment or None, got 0.7"),
    ({"fragments": []}, "`fragments` is empty"),
    ({"fragments": ["a", "("]}, r"'\(', which is no regular expression"),
    ({"fragments": ["a", 2]}, "has 2, which is no regular expression"),
    ({"fragments": "a"}, "`fragments` must be"),
    ({"average_inner_state": "reset", "fragments": 1}, "fragment_sync_delay=0"),
]


@pytest.mark.parametrize(("case", "message"), BAD)
def test_bad_input_is_refused_when_built(case, message):
    for make in (jaxcomp.local_sgd, jaxcomp.local_sgd_round):
        with pytest.raises(ValueError, match=message):
            make(INNER if make is jaxcomp.local_sgd else sgd_step, **streaming(**case))


def test_bad_input_is_refused_when_used():
    make = functools.partial(jaxcomp.local_sgd, INNER)
    with pytest.raises(ValueError, match="No pattern of `fragments` is found in the leaf 'c'"):
        make(**streaming(fragments=["a", "b"])).init(PARAMS)
    with pytest.raises(ValueError, match="'b', and no floating leaf is left"):
        make(**streaming(fragments=["a|b|c", "b"])).init(PARAMS)
    with pytest.raises(ValueError, match="needs one fixed period, got 2"):
        make(**streaming(fragments=1, sync_every=lambda step: 9))


def test_a_transformation_shows_its_arguments():
    text = "fragments=['a', 'b|c'], fragment_sync_delay=2, fragment_update_alpha=0.25"
    assert text in repr(jaxcomp.local_sgd(INNER, **streaming()))
    shown = repr(jaxcomp.local_sgd_round(sgd_step, **streaming(outer=[NESTEROV, NESTEROV])))
    assert shown.startswith("local_sgd_round(step_fn=sgd_step, sync_every=6, axis_name='data'")
    assert "outer=[optax.GradientTransformation(...), " in shown
    assert text in shown
