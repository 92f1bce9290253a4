"""Streaming DiLoCo: torchft's recorded runs, NumPy, the state between sending and use, the wire."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers import hlo
from tests.helpers.hlo import sent_bytes
from tests.helpers.leaves import random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, in_numpy, rounds, step_of
from tests.helpers.runners import AXIS, sharded

RECORDED = json.loads((Path(__file__).parent / "data" / "torchft_diloco.json").read_text())
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
        "inner_init": INNER.init,
        **kwargs,
    }


sgd_step = step_of(INNER)


@pytest.mark.parametrize("recording", RECORDED["recordings"], ids=range(6))
def test_torchfts_recorded_runs(recording):
    expected = np.asarray(recording["parameters"])
    kwargs = {
        "sync_every": 6,
        "axis_name": AXIS,
        "fragments": ["layers/0", "layers/1"],
        "outer": optax.sgd(2.0),
        "fragment_sync_delay": recording["fragment_sync_delay"],
        "fragment_update_alpha": recording["fragment_update_alpha"],
    }
    params = {"layers": [{"weight": jnp.ones((1, 1))}, {"weight": jnp.ones((1, 1))}]}

    def step(params, state, batch):
        params = jax.tree.map(lambda p: p - 2.0, params)
        return params, state, [layer["weight"] for layer in params["layers"]]

    round_ = jaxcomp.local_sgd_round(step, **kwargs)

    def train(params):
        state, seen = round_.init(params, ()), []
        for _ in range(2):
            params, state, ends = round_(params, state, jnp.zeros((6, 1)))
            seen.append((params, state.local, ends))
        return seen

    seen = jax.jit(jax.vmap(train, in_axes=None, axis_name=AXIS, axis_size=2))(params)
    for number, (shared, local, ends) in enumerate(seen):
        for i, layer in enumerate(shared["layers"]):
            at = 6 * number
            anchor = recording["global_parameters"][str(at + 6)][i]
            np.testing.assert_allclose(np.ravel(layer["weight"]), [anchor] * 2, rtol=1e-5)
            here = np.ravel(local["layers"][i]["weight"])
            np.testing.assert_allclose(here, [expected[at + 6, i]] * 2, rtol=1e-5)
            # What a step ends with comes before the average, which is used after steps 3 and 6.
            steps = [t for t in range(6) if t != (2, 5)[i]]
            for replica in np.reshape(ends[i], (2, 6))[:, steps]:
                wanted = expected[at + 1 : at + 7, i][steps]
                np.testing.assert_allclose(replica, wanted, rtol=1e-5, atol=1e-5)


CASES = [
    {"fragment_sync_delay": 1},
    {"fragments": 1, "fragment_sync_delay": 4, "fragment_update_alpha": 0.0},
    {"fragment_update_alpha": 0.5},
    {"fragments": ["."], "fragment_sync_delay": 0, "fragment_update_alpha": 1.0},
    {"fragment_sync_delay": 0, "fragment_update_alpha": 0.0},
    {"sync_every": 7},  # after 3 and 7 of each 7
    {"reducer": HALF_PRECISION},
]


@pytest.mark.parametrize("case", CASES)
def test_equals_numpy(case):
    kwargs = streaming(**case)
    every, delay = kwargs["sync_every"], kwargs["fragment_sync_delay"]
    alpha, turns = kwargs["fragment_update_alpha"], [3, every] if "fragments" not in case else [6]
    targets = random_grads(SHAPES, 4, 2 * every)
    shared, state, ends = rounds(jaxcomp.local_sgd_round(sgd_step, **kwargs), PARAMS, targets)
    for name in SHAPES:
        turn = turns[0 if name == "a" else -1]
        local, anchors = in_numpy(0.5, targets[name], every, turn, delay, alpha)
        atol = 5e-3 if "reducer" in case else 2e-6
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=atol)
        for copy in shared[name]:  # equal bit for bit on each device
            np.testing.assert_array_equal(copy, shared[name][0])
        close(shared[name][0], anchors[-1])
        if state.local:
            close(state.local[name].reshape(local[:, -1].shape), local[:, -1])
        # What a step ends with comes before the average.
        steps = [t for t in range(2 * every) if (t + 1 - turn) % every]
        close(ends[name][:, steps], local[:, steps])
    for k, name in enumerate("ab"):  # a residual for each fragment
        assert "reducer" not in case or np.any(state.reducer[k].residual[name])


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_a_list_of_outer_optimizers_has_one_for_each_fragment(mapping):
    """As each fragment has it in a round with that optimizer for all."""
    targets = random_grads(SHAPES, 4, 12)
    first = optax.sgd(0.5)
    second = optax.sgd(0.9, momentum=0.8, nesterov=True)
    results = []
    for outer in (first, second, [first, second], (first, second)):
        round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(outer=outer))
        results.append(rounds(round_, PARAMS, targets, mapping=mapping))
    alone = [params for params, _, _ in results]
    for params, state, _ in results[2:]:
        np.testing.assert_array_equal(params["a"], alone[0]["a"])
        for name in ("b", "c"):
            np.testing.assert_array_equal(params[name], alone[1][name])
        assert jax.tree.structure(state.outer[0]) != jax.tree.structure(state.outer[1])
    assert np.all(alone[0]["b"] != alone[1]["b"])


def test_a_list_of_one_is_the_optimizer_of_a_whole_round():
    targets = random_grads(SHAPES, 2, 6)
    whole = {"fragments": 1, "fragment_sync_delay": 0, "fragment_update_alpha": 0.0}
    results = []
    for outer in (NESTEROV, [NESTEROV]):
        round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(**whole, outer=outer))
        results.append(rounds(round_, PARAMS, targets, mapping="vmap"))
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])
    with pytest.raises(ValueError, match=r"`outer` must be an Optax .* or None, got \["):
        jaxcomp.local_sgd(INNER, sync_every=6, axis_name=AXIS, outer=[NESTEROV])


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


def test_bytes_of_the_compiled_round_are_those_of_its_steps():
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=3, fragment_sync_delay=1))
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, 6, *x.shape), x.dtype), PARAMS)

    def train(params, targets):
        batches = jax.tree.map(lambda x: x[0], targets)
        return round_(params, round_.init(params, INNER.init(params)), batches)[0]

    mapped = sharded(2, train, (jax.P(), jax.P(AXIS)), jax.P())
    program = hlo.program(mapped, PARAMS, targets)
    steps = [round_.bytes(PARAMS, step=step).bytes_after for step in range(6)]
    assert steps == [48, 0, 20, 0, 4, 0]  # for use after 2, 4 and 6 steps
    assert [sent_bytes([sent]) for sent in hlo.collectives(program.as_text())] == [48, 20, 4]
    assert not any(collective.in_loop for collective in jaxcomp.collectives(program))
    assert round_.bytes(PARAMS).bytes_after == sum(steps) / 6


BAD = [
    ({"sync_every": 0}, "sync_every=0"),
    ({"sync_every": {AXIS: 2}}, "positive integer"),
    ({"step_fn": optax.sgd(0.1)}, "`step_fn` must be a function"),
    ({"inner_init": optax.sgd(0.1)}, "`inner_init` must be a function"),
    ({"fragment_sync_delay": 3}, "fragment_sync_delay=3 must be less than .* = 3"),
    ({"sync_every": 7, "fragment_sync_delay": 3}, "sync_every // fragments = 3"),
    ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1"),
    ({"fragment_sync_delay": 0.5}, "`fragment_sync_delay` must be"),
    ({"fragment_update_alpha": 1.5}, "at least 0 and at most 1, got 1.5"),
    ({"fragment_update_alpha": jnp.array(0.5)}, "must be a Python number"),
    ({"outer": [NESTEROV]}, "`outer` has 1 optimizers for 2 fragments"),
    ({"outer": [NESTEROV, NESTEROV], "fragments": 1}, "`outer` has 2 optimizers for 1 fragments"),
    ({"outer": [NESTEROV, None]}, "`outer` has None in its list"),
    ({"outer": [NESTEROV, 0.7]}, "`outer` must be an Optax .* or None, got 0.7"),
    ({"fragments": []}, "`fragments` is empty"),
    ({"fragments": ["a", "("]}, r"'\(', which is not a regular expression"),
    ({"fragments": ["a", 2]}, "has 2, which is not a regular expression"),
    ({"fragments": "a"}, "`fragments` must be"),
    ({"average_inner_state": "reset", "fragments": 1}, "fragment_sync_delay=0"),
    ({"fragments": 0}, "fragments=0"),
    ({"fragments": 4, "sync_every": 3}, "cannot be staggered"),
]


@pytest.mark.parametrize(("case", "message"), BAD)
def test_bad_input_is_refused_when_built(case, message):
    with pytest.raises(ValueError, match=message):
        jaxcomp.local_sgd_round(**{"step_fn": sgd_step, **streaming(**case)})


def test_bad_input_is_refused_when_used():
    make = functools.partial(jaxcomp.local_sgd_round, sgd_step)
    with pytest.raises(ValueError, match="No pattern of `fragments` is found in the leaf 'c'"):
        make(**streaming(fragments=["a", "b"])).init(PARAMS, ())
    with pytest.raises(ValueError, match="'b', and no floating leaf is left"):
        make(**streaming(fragments=["a|b|c", "b"])).init(PARAMS, ())
    few = streaming(sync_every=8, fragments=4, fragment_sync_delay=0, outer=None)
    with pytest.raises(ValueError, match="more than the 3 floating leaves"):
        make(**few).init(PARAMS, ())
