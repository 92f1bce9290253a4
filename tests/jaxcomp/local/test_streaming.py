"""Streaming DiLoCo: torchft's recorded runs, NumPy, the state between sending and use, the wire."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
from tests.helpers import hlo
from tests.helpers.hlo import sent_bytes
from tests.helpers.leaves import all_finite, close, equal, random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, in_numpy, rounds, step_of
from tests.helpers.runners import AXIS, first, mesh_of

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
    """Two layers of one weight, SGD(2) outside, -2 a step; averages come after 3 and 6 steps."""

    def step(params, state, batch):
        params = jax.tree.map(lambda leaf: leaf - 2.0, params)
        return params, state, params

    round_ = jaxcomp.local_sgd_round(
        step,
        sync_every=6,
        axis_name=AXIS,
        fragments=["0", "1"],
        outer=optax.sgd(2.0),
        fragment_sync_delay=recording["fragment_sync_delay"],
        fragment_update_alpha=recording["fragment_update_alpha"],
    )
    params = [jnp.ones(()), jnp.ones(())]
    steps = jnp.zeros((2, 6))

    def train(_):
        state = round_.init(params, ())
        first, state, ends = round_(params, state, steps[0])
        second, after, later = round_(first, state, steps[1])
        return [(first, state.local, ends), (second, after.local, later)]

    found = jax.jit(jax.vmap(train, axis_name=AXIS))(jnp.arange(2))
    expected = np.asarray(recording["parameters"])
    for begin, (shared, local, ends) in zip((0, 6), found, strict=True):
        anchors = recording["global_parameters"][str(begin + 6)]
        for i, turn in enumerate((2, 5)):
            assert_allclose(shared[i], anchors[i], rtol=1e-5)
            assert_allclose(local[i], expected[begin + 6, i], rtol=1e-5)
            # What a step ends with comes before the average.
            trajectory = np.delete(expected[begin + 1 : begin + 7, i], turn)
            close(np.delete(ends[i], turn, axis=1), [trajectory] * 2, atol=1e-5)


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
    options = streaming(**case)
    every = options["sync_every"]
    delay = options["fragment_sync_delay"]
    alpha = options["fragment_update_alpha"]
    turns = {"a": 3, "b": every, "c": every}
    if "fragments" in case:
        turns = dict.fromkeys("abc", 6)
    atol = 5e-3 if "reducer" in case else 2e-6
    targets = random_grads(SHAPES, 4, 2 * every)
    round_ = jaxcomp.local_sgd_round(sgd_step, **options)
    shared, state, ends = rounds(round_, PARAMS, targets)
    for name, turn in turns.items():
        local, anchors = in_numpy(0.5, targets[name], every, turn, delay, alpha)
        assert_array_equal(shared[name], [shared[name][0]] * 4)  # on each device
        close(shared[name][0], anchors[-1], atol=atol)
        if state.local:
            close(state.local[name], local[:, -1], atol=atol)
        # What a step ends with comes before the average.
        steps = [step for step in range(2 * every) if (step + 1 - turn) % every]
        close(ends[name][:, steps], local[:, steps], atol=atol)
    if "reducer" in case:
        for number, name in enumerate("ab"):  # a residual for each fragment
            assert np.any(state.reducer[number].residual[name])


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_a_list_of_outer_optimizers_has_one_for_each_fragment(mapping):
    """As each fragment has it in a round with that optimizer for all."""
    targets = random_grads(SHAPES, 4, 12)

    def train(outer):
        round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(outer=outer))
        params, state, _ = rounds(round_, PARAMS, targets, mapping=mapping)
        return params, state

    first = optax.sgd(0.5)
    second = NESTEROV
    one, _ = train(first)
    other, _ = train(second)
    both, state = train([first, second])
    equal(both, {"a": one["a"], "b": other["b"], "c": other["c"]})
    assert jax.tree.structure(state.outer[0]) != jax.tree.structure(state.outer[1])
    assert np.all(one["b"] != other["b"])


def with_nan(targets, replica, steps):
    """Puts NaN into the targets of fragment "a", on one replica in some steps."""
    spoilt = {name: np.array(leaf) for name, leaf in targets.items()}
    spoilt["a"][replica, steps] = np.nan
    return spoilt


def test_the_steps_after_an_average_was_sent_and_the_average_share_no_data():
    options = streaming(fragments=1, fragment_sync_delay=2, fragment_update_alpha=0.0)
    round_ = jaxcomp.local_sgd_round(sgd_step, **options)
    targets = random_grads(SHAPES, 2, 6)
    whole, _, steps = rounds(round_, PARAMS, targets)
    unchanged, _, _ = rounds(round_, PARAMS, with_nan(targets, slice(None), slice(4, None)))
    equal(unchanged["a"], whole["a"])
    # From the other replica: in the average, and nowhere else.
    spoilt, _, others = rounds(round_, PARAMS, with_nan(targets, 1, slice(None)))
    assert np.isnan(spoilt["a"]).all()
    equal(others["a"][0], steps["a"][0])


def test_a_round_that_is_not_finite_leaves_no_trace():
    targets = random_grads(SHAPES, 2, 12)
    outer = optax.apply_if_finite(NESTEROV, 3)
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(outer=outer, reducer=HALF_PRECISION))
    before, kept, _ = rounds(round_, PARAMS, jax.tree.map(lambda leaf: leaf[:, :6], targets))
    # In the second round, before fragment "a" is sent.
    after, state, _ = rounds(round_, PARAMS, with_nan(targets, 1, 6))
    equal(after["a"], before["a"])
    equal(state.reducer[0], kept.reducer[0])
    equal(state.outer[0].inner_state, kept.outer[0].inner_state)
    assert all_finite((after, state.local))


def test_bytes_of_the_compiled_round_are_those_of_its_steps():
    options = streaming(fragments=3, fragment_sync_delay=1)

    def step(params, state, batch):
        return sgd_step(params, state, first(batch))

    round_ = jaxcomp.local_sgd_round(step, **options, mesh=mesh_of(2))
    steps = jax.tree.map(lambda leaf: jnp.zeros((6, 2, *leaf.shape)), PARAMS)
    program = hlo.program(round_, PARAMS, round_.init(PARAMS), steps)
    promised = [round_.bytes(PARAMS, step=step).bytes_after for step in range(6)]
    assert promised == [48, 0, 20, 0, 4, 0]  # for use after 2, 4 and 6 steps
    sent = [sent_bytes([one]) for one in hlo.collectives(program.as_text())]
    assert sent == [48, 20, 4]
    assert not any(collective.in_loop for collective in jaxcomp.collectives(program))
    assert round_.bytes(PARAMS).bytes_after == sum(promised) / 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fragments": 2}, [0, 0, 48, 0, 0, 24]),  # 12 values alone, 5 and 1 together
        ({"fragments": 3, "sync_every": 3}, [48, 20, 4]),
    ],
)
def test_fragments_by_number_are_of_about_equal_size(options, expected):
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragment_sync_delay=0, **options))
    assert [round_.bytes(PARAMS, step=k).bytes_after for k in range(len(expected))] == expected


def test_empty_leaves_are_a_fragment_each():
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=2))
    state = round_.init({"a": jnp.zeros(0), "b": jnp.zeros((0, 3))}, ())
    assert [len(jax.tree.leaves(outer)) for outer in state.outer] == [1, 1]


def test_the_start_of_a_reducer_counts_rounds():
    reducer = jaxcomp.powersgd(1, axis_name=AXIS, start_step=1)
    round_ = jaxcomp.local_sgd_round(sgd_step, **streaming(fragments=["w", "b"], reducer=reducer))
    params = {"b": jnp.zeros(5), "w": jnp.zeros((32, 16))}
    sent = [round_.bytes(params, step=step).bytes_after for step in range(18)]
    # Two steps before their use; the first of "w" is exact.
    assert sent == [2048, 0, 0, 20, 0, 0] + 2 * [192, 0, 0, 20, 0, 0]


BAD = [
    ({"sync_every": 0}, "sync_every=0"),
    ({"sync_every": {AXIS: 2}}, "positive integer"),
    ({"step_fn": optax.sgd(0.1)}, "`step_fn` must be a function"),
    ({"step_fn": lambda params, batch: None}, r"a function of \(params, inner_state, batch\)"),
    ({"average_inner_state": np.array(["reset"])}, "`average_inner_state` must be True, F"),
    ({"inner_init": optax.sgd(0.1)}, "`inner_init` must be a function"),
    ({"fragment_sync_delay": 3}, "3 steps apart, so fragment_sync_delay must be less, got 3"),
    ({"sync_every": 7, "fragment_sync_delay": 3}, "sync_every=7 averages are 3 steps apart"),
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
    ({"fragments": 4, "sync_every": 3}, "sync_every=3 averages are 0 steps apart"),
]


@pytest.mark.parametrize(("case", "message"), BAD)
def test_bad_input_is_refused_when_built(case, message):
    with pytest.raises(ValueError, match=message):
        jaxcomp.local_sgd_round(**{"step_fn": sgd_step, **streaming(**case)})


def test_bad_input_is_refused_when_used():
    make = functools.partial(jaxcomp.local_sgd_round, sgd_step)
    with pytest.raises(
        ValueError, match="No pattern of `fragments` is found in the path of the leaf 'c'"
    ):
        make(**streaming(fragments=["a", "b"])).init(PARAMS, ())
    with pytest.raises(ValueError, match="No floating leaf belongs to the pattern 'b'"):
        make(**streaming(fragments=["a|b|c", "b"])).init(PARAMS, ())
    few = streaming(sync_every=8, fragments=4, fragment_sync_delay=0, outer=None)
    with pytest.raises(ValueError, match="more than the 3 floating leaves"):
        make(**few).init(PARAMS, ())
