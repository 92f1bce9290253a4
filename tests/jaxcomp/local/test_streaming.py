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


def recorded_round(recording):
    """Makes the round of torchft's test: two layers of one weight, SGD(2) outside, -2 a step."""

    def step(params, state, batch):
        params = jax.tree.map(lambda leaf: leaf - 2.0, params)
        return params, state, [layer["weight"] for layer in params["layers"]]

    return jaxcomp.local_sgd_round(
        step,
        sync_every=6,
        axis_name=AXIS,
        fragments=["layers/0", "layers/1"],
        outer=optax.sgd(2.0),
        fragment_sync_delay=recording["fragment_sync_delay"],
        fragment_update_alpha=recording["fragment_update_alpha"],
    )


@pytest.mark.parametrize("recording", RECORDED["recordings"], ids=range(6))
def test_torchfts_recorded_runs(recording):
    expected = np.asarray(recording["parameters"])
    round_ = recorded_round(recording)
    params = {"layers": [{"weight": jnp.ones((1, 1))}, {"weight": jnp.ones((1, 1))}]}

    def train(params):
        state = round_.init(params, ())
        results = []
        for _ in range(2):
            params, state, ends = round_(params, state, jnp.zeros((6, 1)))
            results.append((params, state.local, ends))
        return results

    results = jax.jit(jax.vmap(train, in_axes=None, axis_name=AXIS, axis_size=2))(params)
    for number, (shared, local, ends) in enumerate(results):
        begin = 6 * number
        for i in range(2):
            anchor = recording["global_parameters"][str(begin + 6)][i]
            weights = np.ravel(shared["layers"][i]["weight"])
            np.testing.assert_allclose(weights, [anchor] * 2, rtol=1e-5)
            kept = np.ravel(local["layers"][i]["weight"])
            np.testing.assert_allclose(kept, [expected[begin + 6, i]] * 2, rtol=1e-5)
            # What a step ends with comes before the average, which is used after steps 3 and 6.
            steps = [step for step in range(6) if step != (2, 5)[i]]
            after_steps = expected[begin + 1 : begin + 7, i][steps]
            for replica in np.reshape(np.asarray(ends[i]), (2, 6)):
                np.testing.assert_allclose(replica[steps], after_steps, rtol=1e-5, atol=1e-5)


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
    every = kwargs["sync_every"]
    turns = {"a": 3, "b": every, "c": every}
    if "fragments" in case:
        turns = dict.fromkeys("abc", 6)
    atol = 5e-3 if "reducer" in case else 2e-6
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=atol)

    targets = random_grads(SHAPES, 4, 2 * every)
    shared, state, ends = rounds(jaxcomp.local_sgd_round(sgd_step, **kwargs), PARAMS, targets)
    for name, turn in turns.items():
        local, anchors = in_numpy(
            0.5,
            targets[name],
            every,
            turn,
            kwargs["fragment_sync_delay"],
            kwargs["fragment_update_alpha"],
        )
        for copy in shared[name]:  # equal bit for bit on each device
            np.testing.assert_array_equal(copy, shared[name][0])
        close(shared[name][0], anchors[-1])
        if state.local:
            close(state.local[name].reshape(local[:, -1].shape), local[:, -1])
        # What a step ends with comes before the average.
        steps = [step for step in range(2 * every) if (step + 1 - turn) % every]
        close(ends[name][:, steps], local[:, steps])
    if "reducer" in case:
        for number, name in enumerate("ab"):  # a residual for each fragment
            assert np.any(state.reducer[number].residual[name])


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


def with_nan(targets, replica, steps):
    """Puts NaN into the targets of fragment "a", on one replica in some steps."""
    spoilt = {name: np.array(leaf) for name, leaf in targets.items()}
    spoilt["a"][replica, steps] = np.nan
    return spoilt


def test_the_steps_after_an_average_was_sent_and_the_average_share_no_data():
    round_ = jaxcomp.local_sgd_round(
        sgd_step, **streaming(fragments=1, fragment_sync_delay=2, fragment_update_alpha=0.0)
    )
    targets = random_grads(SHAPES, 2, 6)
    whole, _, steps = rounds(round_, PARAMS, targets)
    late = with_nan(targets, slice(None), slice(4, None))
    unchanged, _, _ = rounds(round_, PARAMS, late)
    np.testing.assert_array_equal(unchanged["a"], whole["a"])
    # From the other replica: in the average, and nowhere else.
    spoilt, _, others = rounds(round_, PARAMS, with_nan(targets, 1, slice(None)))
    assert np.isnan(spoilt["a"]).all()
    np.testing.assert_array_equal(others["a"][0], steps["a"][0])


def test_a_round_that_is_not_finite_leaves_no_trace():
    targets = random_grads(SHAPES, 2, 12)
    first_round = jax.tree.map(lambda leaf: leaf[:, :6], targets)
    spoilt = with_nan(targets, 1, 6)  # in the second round, before fragment "a" is sent
    round_ = jaxcomp.local_sgd_round(
        sgd_step, **streaming(outer=optax.apply_if_finite(NESTEROV, 3), reducer=HALF_PRECISION)
    )
    before, kept, _ = rounds(round_, PARAMS, first_round)
    after, state, _ = rounds(round_, PARAMS, spoilt)
    np.testing.assert_array_equal(after["a"], before["a"])
    jax.tree.map(np.testing.assert_array_equal, state.reducer[0], kept.reducer[0])
    momenta = state.outer[0].inner_state
    jax.tree.map(np.testing.assert_array_equal, momenta, kept.outer[0].inner_state)
    for leaf in jax.tree.leaves((after, state.local)):
        assert np.isfinite(leaf).all()


def test_bytes_of_the_compiled_round_are_those_of_its_steps():
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=3, fragment_sync_delay=1))

    def train(params, targets):
        batches = jax.tree.map(lambda leaf: leaf[0], targets)
        params, _, _ = round_(params, round_.init(params, INNER.init(params)), batches)
        return params

    def shape(leaf):
        return jax.ShapeDtypeStruct((2, 6, *leaf.shape), leaf.dtype)

    mapped = sharded(2, train, (jax.P(), jax.P(AXIS)), jax.P())
    program = hlo.program(mapped, PARAMS, jax.tree.map(shape, PARAMS))
    promised = [round_.bytes(PARAMS, step=step).bytes_after for step in range(6)]
    assert promised == [48, 0, 20, 0, 4, 0]  # for use after 2, 4 and 6 steps
    sent = [sent_bytes([one]) for one in hlo.collectives(program.as_text())]
    assert sent == [48, 20, 4]
    assert not any(collective.in_loop for collective in jaxcomp.collectives(program))
    assert round_.bytes(PARAMS).bytes_after == sum(promised) / 6


def test_fragments_by_number_are_of_about_equal_size():
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=2, fragment_sync_delay=0))
    sent = [round_.bytes(PARAMS, step=step).bytes_after for step in range(6)]
    assert sent == [0, 0, 48, 0, 0, 24]  # 12 values alone, 5 and 1 together
    every_step = streaming(fragments=3, sync_every=3, fragment_sync_delay=0)
    round_of_three = jaxcomp.local_sgd_round(sgd_step, **every_step)
    sent = [round_of_three.bytes(PARAMS, step=step).bytes_after for step in range(3)]
    assert sent == [48, 20, 4]
    empty = {"a": jnp.zeros(0), "b": jnp.zeros((0, 3))}
    state = round_.init(empty, ())
    for outer in state.outer:
        assert len(jax.tree.leaves(outer)) == 1


def test_the_start_of_a_reducer_counts_rounds():
    reducer = jaxcomp.powersgd(1, axis_name=AXIS, start_step=1)
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=["w", "b"], reducer=reducer))
    params = {"b": jnp.zeros(5), "w": jnp.zeros((32, 16))}
    sent = [round_.bytes(params, step=step).bytes_after for step in range(18)]
    first = [2048, 0, 0, 20, 0, 0]  # two steps before their use
    later = [192, 0, 0, 20, 0, 0]
    assert sent == first + later + later


BAD = [
    ({"sync_every": 0}, "sync_every=0"),
    ({"sync_every": {AXIS: 2}}, "positive integer"),
    ({"step_fn": optax.sgd(0.1)}, "`step_fn` must be a function"),
    ({"inner_init": optax.sgd(0.1)}, "`inner_init` must be a function"),
    ({"fragment_sync_delay": 3}, "leave 3 steps .* fragment_sync_delay=3 must be less"),
    ({"sync_every": 7, "fragment_sync_delay": 3}, "leave 3 steps of sync_every=7"),
    ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1"),
    ({"fragment_sync_delay": 0.5}, "`fragment_sync_delay` must be"),
    ({"fragment_update_alpha": 1.5}, "at least 0 and at most 1, got 1.5"),
    ({"fragment_update_alpha": jnp.array(0.5)}, "must be a Python number"),
    ({"outer": [NESTEROV]}, "`outer` has 1 optimizers for 2 fragments"),
    ({"outer": [NESTEROV, NESTEROV], "fragments": 1}, "`outer` has 2 optimizers for 1 fragments"),
    ({"outer": [NESTEROV, None]}, "or None in its list"),
    ({"outer": [NESTEROV, 0.7]}, "`outer` must be an Optax .* or None, got 0.7"),
    ({"fragments": []}, "`fragments` is empty"),
    ({"fragments": ["a", "("]}, r"'\(', which is not a regular expression"),
    ({"fragments": ["a", 2]}, "has 2, which is not a regular expression"),
    ({"fragments": "a"}, "`fragments` must be"),
    ({"average_inner_state": "reset", "fragments": 1}, "fragment_sync_delay=0"),
    ({"fragments": 0}, "fragments=0"),
    ({"fragments": 4, "sync_every": 3}, "leave 0 steps of sync_every=3"),
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
