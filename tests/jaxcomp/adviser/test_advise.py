"""The adviser: times against the formula by hand, its verdicts, its law, and what it measures."""

import dataclasses
import functools
import math
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.__main__ import main
from jaxcomp._bytes.gap import LAWS
from tests.helpers.paths import DOCS


def shapes(**named):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in named.items()}


PARAMS = {
    "layer": shapes(kernel=(256, 1024), bias=(1024,), stack=(3, 256, 256), embedding=(1000, 256)),
    "head": jax.ShapeDtypeStruct((256, 1000), jnp.bfloat16),
    "steps": jax.ShapeDtypeStruct((), jnp.int32),
}
SLOW = {"workers": 8, "bandwidth": "100Mbit", "latency": "50us", "step_time": "20ms"}
FAST = {"workers": 8, "bandwidth": "100Gbit", "latency": "5us", "step_time": "20ms"}
advise = functools.cache(jaxcomp.advise)  # of numbers of parameters


def by_name(advice):
    return {prediction.name: prediction for prediction in advice.predictions}


def powersgd(advice):
    return [prediction for prediction in advice.predictions if prediction.rank]


def device(kind="cpu", **changed):
    """Constants of a kind of device, of which some differ: ``allreduce={"overlap": 0.5}``."""
    assumed = jaxcomp.advise(PARAMS, device=kind, **SLOW).device
    costs = {name: getattr(assumed, name)._replace(**new) for name, new in changed.items()}
    return dataclasses.replace(assumed, **costs)


def test_of_what_is_about_as_fast_the_one_that_sends_most_is_recommended():
    advice = advise(10**8, **SLOW | {"bandwidth": "3Gbit", "step_time": "500ms"})
    least, more, most = powersgd(advice)
    assert least.step_time < more.step_time < 1.1 * least.step_time < most.step_time
    assert advice.recommended is more


EXPOSED = device("gpu", allreduce={"overlap": 0}, allreduce_16={"overlap": 0})
SLOW_DEVICE = device(powersgd={"per_value": 1e-6}, int8={"per_value": 1e-6})
NOT_WORTH_IT = {
    "hidden": FAST,
    "exposed and short": FAST | {"device": EXPOSED},
    "a slow device": SLOW | {"bandwidth": "10Gbit", "device": SLOW_DEVICE},
    "alone": SLOW | {"workers": 1},
}


@pytest.mark.parametrize("given", NOT_WORTH_IT.values(), ids=NOT_WORTH_IT)
def test_where_compression_does_not_pay_it_says_so(given):
    advice = jaxcomp.advise(PARAMS, **given)
    assert not advice.compress
    assert advice.recommended is advice.baseline


def test_one_worker_sends_nothing():
    advice = jaxcomp.advise(PARAMS, **SLOW | {"workers": 1})
    assert advice.baseline.step_time == 20e-3
    assert "one sender, so nothing is sent" in str(advice)


def test_every_reducer_that_is_named_can_be_made_and_sends_what_was_said():
    advice = jaxcomp.advise(PARAMS, **SLOW)
    for prediction in advice.predictions:
        reducer = prediction.reducer("data")
        assert reducer.bytes(PARAMS, replicas=8).bytes_after == prediction.bytes_per_step
        assert reducer.init({"w": jnp.zeros((256, 256))}) is not None
    assert repr(advice.reducer("data")) == repr(advice.recommended.reducer("data"))


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_times_by_hand(overlap):
    exact = {"overhead": 8e-3, "bandwidth": 1e7, "overlap": overlap}
    low_rank = {"overhead": 9e-3, "per_value": 3e-9, "per_column": 2e-10}
    costs = device("gpu", allreduce=exact, powersgd=low_rank, int8={"per_value": 5e-9})
    advice = jaxcomp.advise(shapes(w=(512, 1024), b=(50,)), device=costs, **SLOW)
    plain = by_name(advice)["all-reduce float32"]
    int8 = by_name(advice)["int8 all-reduce"]
    first = powersgd(advice)[0]
    values = 512 * 1024
    # 14 hops of 50 us, and seven eighths of twice the payload, at 10 MB/s: the link has 12.5. Two
    # thirds of the 20 ms are backward pass: an average that it hides costs nothing.
    ring = 8e-3 + 14 * 50e-6 + 2 * 7 / 8 * plain.bytes_per_step / 1e7
    assert plain.step_time == pytest.approx(20e-3 + ring - overlap * 2 / 3 * 20e-3)
    # Two pairs of an all-to-all and an all-gather, behind it, at the rate of the link.
    pairs = 2 * (9e-3 + 14 * 50e-6) + 2 * 7 / 8 * first.bytes_per_step / 12.5e6
    compression = values * (3e-9 + 2e-10 * first.rank)
    assert first.step_time == pytest.approx(20e-3 + compression + pairs)
    pair = 40e-6 + 14 * 50e-6 + 2 * 7 / 8 * int8.bytes_per_step / 12.5e6
    assert int8.step_time == pytest.approx(20e-3 + 5e-9 * (values + 50) + pair)


@pytest.mark.parametrize(
    ("slower", "limit"),
    [
        ({"allreduce": {"overlap": 0.5}}, "between"),
        ({"powersgd": {"per_value": 1e3}}, 0.0),
        ({"allreduce": {"bandwidth": 1e3}, "allreduce_16": {"bandwidth": 1e3}}, math.inf),
    ],
)
def test_the_break_even_is_where_the_times_cross(slower, limit):
    def first(bandwidth):
        given = SLOW | {"device": device("cpu", **slower), "bandwidth": bandwidth}
        return powersgd(jaxcomp.advise(PARAMS, **given))[0]

    found = first(1e6).break_even
    if limit == "between":
        assert first(found / 1.01).speedup > 1 >= first(found * 1.01).speedup
    else:
        assert found == limit
        assert (first(1e13).speedup > 1) == (first(1.0).speedup > 1) == bool(limit)
    assert first(1e7).step_time <= first(1e6).step_time


def test_what_is_predicted_for_cores_is_near_what_was_measured_on_some():
    # docs/performance.md: 12.9 million parameters at width 512, 160 ms of computation, two
    # processes. Milliseconds at 1 Gbit/s and at 100 Mbit/s.
    sizes = {"qkv": 3, "out": 1, "up": 4, "down": 4}
    block = shapes(**{name: (512, 512 * n) for name, n in sizes.items()})
    params = {f"block_{i}": block for i in range(4)}
    given = {"workers": 2, "latency": "100us", "step_time": "160ms", "device": "cpu"}
    given |= {"loss_budget": "0.8%", "tokens": 512}  # for rank 32, which was measured
    for bandwidth, exact, compressed in (("1Gbit", 592, 207), ("100Mbit", 4606, 347)):
        advice = jaxcomp.advise(params, bandwidth=bandwidth, **given)
        lowest = powersgd(advice)[0]
        assert lowest.name == "powersgd rank 32 int6"
        found = by_name(advice)
        assert 1e3 * found["all-reduce float32"].step_time == pytest.approx(exact, rel=0.25)
        assert 1e3 * lowest.step_time == pytest.approx(compressed, rel=0.25)
        assert "all-reduce float16" in found  # XLA's CPU backend sends bfloat16 as float32


INSIDE = {"tokens": 1024, **SLOW}  # of the law, with PARAMS of width 256


def test_a_smaller_budget_asks_for_a_higher_rank():
    def lowest(**options):
        return powersgd(jaxcomp.advise(PARAMS, **INSIDE | options))[0].rank

    ranks = [lowest(loss_budget=budget) for budget in ("2%", "0.5%", 0)]
    assert ranks == sorted(set(ranks))
    assert lowest(tokens="4096") > ranks[1]
    assert lowest(optimizer="muon") > ranks[1]


@pytest.mark.parametrize("optimizer", LAWS)
def test_the_law_and_its_inverse(optimizer):
    law = LAWS[optimizer]
    for at in ((64, 512), (128, 4096), (512, 1024), (4096, 500_000)):  # width and tokens
        for budget in (0.0, 0.005, 0.02):
            rank = law.rank(budget, *at)
            assert law.gap(rank, *at) <= budget + 1e-12
            assert rank == 8 or law.gap(rank - 8, *at) > budget
        assert law.half_width(16, *at) >= law.half_width(64, *at)
    for beyond in ((4096, 4096), (512, 10**6)):  # which no run had
        assert law.half_width(32, *beyond) > law.half_width(32, 512, 4096)
        assert not law.covers(*beyond)


def test_inside_of_what_was_run_there_is_a_rank_and_outside_none():
    inside = jaxcomp.advise(PARAMS, **INSIDE)
    assert inside.compress is True
    assert inside.verdict.startswith("Use powersgd rank")
    assert inside.recommended.gap <= 0.005
    for advice in (
        jaxcomp.advise(PARAMS, **INSIDE | {"tokens": "64k"}),
        advise("124M", tokens=4096, **SLOW),
        advise("1.3B", **SLOW),
    ):
        assert advice.compress is None
        assert advice.verdict == "Not known: run both."
        assert "runs were made of widths 64 to 512 with 512 to 4,096 tokens" in advice.reason
        assert "opt_state=" in str(advice)
        assert "not known" in str(advice).splitlines()[6]
        assert advice.reducer("data").init({"w": jnp.zeros((256, 256))}) is not None


def test_an_interval_wider_than_three_budgets_leaves_the_question_open():
    wide = jaxcomp.advise(PARAMS, **INSIDE | {"loss_budget": "0.3%"})
    assert wide.compress is None
    assert "points wide, for a budget of 0.3%" in wide.reason
    muon = jaxcomp.advise(PARAMS, optimizer="muon", **INSIDE)
    assert muon.compress is None
    assert jaxcomp.advise(PARAMS, optimizer="muon", **INSIDE | {"loss_budget": "4%"}).compress


def test_tokens_are_estimated_and_said():
    advice = advise("124M", **SLOW)
    # Six operations for each parameter and token, at 400 Tflop/s, for 20 ms on 8 workers.
    expected = 8 * 400e12 * 20e-3 / (6 * 124e6)
    (tokens,) = re.findall(r"([\d,]+)\s+tokens\s+a\s+step\s+\(estimated", str(advice))
    assert int(tokens.replace(",", "")) == pytest.approx(expected, rel=0.06)
    assert "estimated" not in str(advise("124M", tokens="512k", **SLOW))


def test_workers_of_a_host_share_a_link():
    hosts = advise("124M", hosts=8, **SLOW | {"workers": 64})
    alone = advise("124M", **SLOW)
    for shared, single in zip(hosts.predictions[:3], alone.predictions[:3], strict=True):
        assert shared.step_time == single.step_time
    assert "64 workers on 8 hosts" in str(hosts)
    assert "average among themselves first" in str(hosts)
    assert "one sender, so nothing is sent" in str(advise("124M", hosts=1, **SLOW))
    with pytest.raises(ValueError, match="`hosts` must divide the workers, got hosts=3"):
        advise("124M", hosts=3, **SLOW)


def with_opt_state(decay):
    """Parameters, and Adam's state in a chain, whose steps have singular values that fall so."""
    params = {"w": jnp.zeros((256, 512)), "b": jnp.zeros(512)}
    clip, (adam, *others) = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.normal(size=(256, 256)))[0]
    right = np.linalg.qr(rng.normal(size=(512, 256)))[0]
    step = left * decay ** np.arange(256) @ right.T
    moments = {"mu": {"w": step, "b": np.ones(512)}, "nu": jax.tree.map(jnp.ones_like, params)}
    return params, (clip, (adam._replace(**moments), *others))


def test_a_runs_own_momentum_says_what_a_rank_costs():
    params, state = with_opt_state(0.97)
    predict_gap = functools.partial(jaxcomp.predict_gap, state, min_compression_rate=1.0)
    for budget in (0.002, 0.01, 0.04):
        advice = jaxcomp.advise(params, opt_state=state, loss_budget=budget, **SLOW)
        lowest = powersgd(advice)[0]
        assert lowest.gap == predict_gap(lowest.rank).gap <= budget
        if lowest.rank > 8:
            assert predict_gap(lowest.rank - 8).gap > budget
        if advice.recommended.rank:  # the excess that is possible is within three budgets
            sure = 2 * advice.recommended.half_width <= 3 * budget
            assert bool(advice.compress) == sure
        assert "read off the momentum" in str(advice)
    # Beyond the tails that were run nothing is known.
    params, state = with_opt_state(0.999)
    lossy = jaxcomp.advise(params, opt_state=state, loss_budget="50%", **SLOW)
    assert lossy.compress is None
    assert "of the momentum's energy lie beyond the rank" in lossy.reason


def test_stacked_layers_are_as_wide_as_one_of_them():
    stack = shapes(blocks=(12, 256, 1024))
    advice = jaxcomp.advise(stack, matrix_dims=jaxcomp.stacked("blocks"), **SLOW)
    many = jaxcomp.advise(shapes(**{f"w{i}": (256, 1024) for i in range(12)}), **SLOW)
    chosen = advice.recommended
    expected = many.recommended
    for field in ("name", "gap", "half_width"):
        assert getattr(chosen, field) == getattr(expected, field)
    time = advice.device.powersgd.compression_time
    assert time(chosen.sent) == pytest.approx(time(expected.sent))
    state = advice.reducer("data").init({"blocks": jnp.zeros((2, 256, 1024))})
    assert state.q["blocks"].shape[0] == 2


def test_what_cannot_be_compressed_gets_no_rank():
    vectors = jaxcomp.advise({"b": jnp.zeros(1_000_000)}, **SLOW)
    assert not powersgd(vectors)
    assert "PowerSGD is left out" in str(vectors)
    assert vectors.recommended.name == "int8 all-reduce"


@pytest.mark.parametrize("count", [10_000, 123_456, 10_000_000, 124_000_000, 1_500_000_000, 10**12])
def test_assumed_shapes_have_about_as_many_parameters(count):
    leaves = advise(count, **SLOW).baseline.sent.leaves
    assert sum(leaf.size for leaf in leaves) == pytest.approx(count, rel=0.1)


@pytest.mark.parametrize(
    ("argument", "text", "expected"),
    [
        ("bandwidth", "10Gbit", 1.25e9),
        ("bandwidth", "25Gbps", 3.125e9),
        ("bandwidth", "1Mbit/s", 1.25e5),
        ("bandwidth", "12.5 GB/s", 1.25e10),
        ("bandwidth", 2.5e9, 2.5e9),
        ("latency", "50us", 5e-5),
        ("latency", "1ms", 1e-3),
        ("latency", "0s", 0.0),
    ],
)
def test_units(argument, text, expected):
    advice = jaxcomp.advise(PARAMS, **SLOW | {argument: text})
    assert getattr(advice.link, argument) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("workers", [0]),
        ("bandwidth", ["", "10", "fast", "10Gbit/h", "-1Gbit", "0bit", "nanGB", math.inf]),
        ("latency", ["50", "1h", "-1ms", "1e999s", "ms", -1.0]),
        ("step_time", ["0ms", 0.0, math.nan]),
        ("loss_budget", ["little", 1, "100%"]),
        ("tokens", ["many", 0, math.inf]),
        ("optimizer", ["lion"]),
        ("device", ["abacus"]),
    ],
)
def test_wrong_arguments_are_refused(argument, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^`{argument}` "):
            jaxcomp.advise(PARAMS, **SLOW | {argument: value})
    with pytest.raises(ValueError, match=r"guessed for 10,000 to .* got 9"):
        jaxcomp.advise(9, **SLOW)


def test_the_command_line(capsys):
    command = ["advise", "--params=124M", "--loss-budget=1%", "--optimizer=muon"]
    command += ["--workers=8", "--bandwidth=100Mbit", "--latency=50us", "--step-time=20ms"]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxcomp {jaxcomp.__version__}\n"
    main(command)
    advice = advise("124M", loss_budget="1%", optimizer="muon", **SLOW)
    assert capsys.readouterr().out == f"{advice}\n"
    for wrong in ("--device=abacus", "--step-time=soon", "--params=many", "--params=-5"):
        with pytest.raises(SystemExit, match="2"):
            main([*command, wrong])
        printed = capsys.readouterr()
        assert f"error: {wrong.partition('=')[0]} must be" in printed.err
        assert not printed.out


@pytest.mark.parametrize("left_out", ["params", "workers", "bandwidth", "step-time"])
def test_the_command_names_an_option_that_is_missing(left_out, capsys):
    given = {"params": "124M", "workers": 8, "bandwidth": "1Gbit", "step-time": "20ms"}
    del given[left_out]
    with pytest.raises(SystemExit, match="2"):
        main(["advise", *(f"--{name}={value}" for name, value in given.items())])
    assert f"arguments are required: --{left_out}\n" in capsys.readouterr().err


def test_the_examples_in_the_documentation_are_what_it_prints(capsys):
    page = (DOCS / "choosing.md").read_text()
    blocks = re.findall(r"```console\n\$ jaxcomp (.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        command, _, expected = block.replace(" \\\n", " ").partition("\n")
        main(shlex.split(command))
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("number", [1, 2])
def test_measured_constants_are_positive_and_finite(number):
    params = shapes(w=(256, 512), b=(512,))
    found = jaxcomp.measure(params, rank=2, devices=jax.devices()[:number])
    figures = [found.int8.per_value, found.powersgd.per_value, found.powersgd.per_column]
    for costs in (found.allreduce, found.allreduce_16, found.int8, found.powersgd):
        figures += [costs.overhead, costs.bandwidth]
    assert np.all(np.isfinite(figures))
    assert min(figures) > 0
    assert (found.allreduce == device().allreduce) == (number == 1)
    advice = jaxcomp.advise(PARAMS, **SLOW | {"device": found})
    assert f"measured: {number} x" in str(advice)


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_to_measure(rank):
    with pytest.raises(ValueError, match=r"positive integer|nothing of this model"):
        jaxcomp.measure({"n": jnp.zeros(3, jnp.int32)}, rank=rank)
