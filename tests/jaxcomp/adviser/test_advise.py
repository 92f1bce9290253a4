"""The adviser: times against the formula by hand, its verdicts, its law, and what it measures."""

import dataclasses
import functools
import math
import re
import runpy
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.__main__ import main
from jaxcomp._adviser import measure as timing
from jaxcomp._bytes.gap import LAWS
from tests.helpers.paths import DOCS
from tests.helpers.tables import rows


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


def test_the_assumed_costs_are_those_that_are_said():
    assumed = jaxcomp.advise(PARAMS, device="cpu", **SLOW).device
    assert "500 us per collective, which reaches 1 GB/s (100 MB/s in f" in assumed.device
    for costs, bandwidth in ((assumed.allreduce, 1e9), (assumed.allreduce_16, 100e6)):
        assert (costs.overhead, costs.bandwidth) == (500e-6, bandwidth)


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


def test_every_reducer_that_is_named_can_be_made_and_sends_what_was_said():
    advice = jaxcomp.advise(PARAMS, **SLOW)
    for prediction in advice.predictions:
        reducer = prediction.reducer("data")
        assert reducer.bytes(PARAMS, replicas=8).bytes_after == prediction.bytes_per_step
        assert reducer.init({"w": jnp.zeros((256, 256))}) is not None
    assert repr(advice.reducer("data")) == repr(advice.recommended.reducer("data"))


def test_times_by_hand():
    exact = {"overhead": 8e-3, "bandwidth": 1e7, "overlap": 0.5}
    low_rank = {"overhead": 9e-3, "per_value": 3e-9, "per_column": 2e-10}
    costs = device("gpu", allreduce=exact, powersgd=low_rank, int8={"per_value": 5e-9})
    advice = jaxcomp.advise(shapes(w=(512, 1024), b=(50,)), device=costs, **SLOW)
    values = 512 * 1024

    def check(prediction, bandwidth, rest):
        """Checks seven eighths of twice the payload at such a rate, and what comes besides."""
        sent = 2 * 7 / 8 * prediction.bytes_per_step / bandwidth
        assert prediction.step_time == pytest.approx(20e-3 + sent + rest)

    hops = 14 * 50e-6
    # At 10 MB/s: the link has 12.5. Two thirds of the 20 ms are backward pass: of an average half
    # of that is hidden.
    check(by_name(advice)["all-reduce float32"], 1e7, 8e-3 + hops - 0.5 * 2 / 3 * 20e-3)
    # Two pairs of an all-to-all and an all-gather, behind it, at the rate of the link.
    first = powersgd(advice)[0]
    check(first, 12.5e6, 2 * (9e-3 + hops) + values * (3e-9 + 2e-10 * first.rank))
    check(by_name(advice)["int8 all-reduce"], 12.5e6, 40e-6 + hops + 5e-9 * (values + 50))


def first_at(bandwidth, **slower):
    given = SLOW | {"device": device("cpu", **slower), "bandwidth": bandwidth}
    return powersgd(jaxcomp.advise(PARAMS, **given))[0]


def test_the_break_even_is_where_the_times_cross():
    half_hidden = {"allreduce": {"overlap": 0.5}}
    found = first_at(1e6, **half_hidden).break_even
    assert first_at(found / 1.01, **half_hidden).speedup > 1
    assert first_at(found * 1.01, **half_hidden).speedup <= 1
    assert first_at(1e7).step_time <= first_at(1e6).step_time


@pytest.mark.parametrize(
    ("slower", "limit"),
    [
        ({"powersgd": {"per_value": 1e3}}, 0.0),
        ({"allreduce": {"bandwidth": 1e3}, "allreduce_16": {"bandwidth": 1e3}}, math.inf),
    ],
)
def test_where_the_times_do_not_cross_the_break_even_is_at_an_end(slower, limit):
    assert first_at(1e6, **slower).break_even == limit
    for bandwidth in (1.0, 1e13):
        assert (first_at(bandwidth, **slower).speedup > 1) == bool(limit)


INSIDE = {"tokens": 1024, **SLOW}  # of the law, with PARAMS of width 256


@pytest.mark.parametrize("optimizer", LAWS)
@pytest.mark.parametrize("budget", [0.005, 0.02])
def test_the_law_gives_the_lowest_rank_that_keeps_a_budget(optimizer, budget):
    law = LAWS[optimizer]
    for width, tokens in ((128, 512), (256, 1024), (512, 4096), (4096, 500_000)):
        rank = law.rank(budget, width, tokens)
        assert law.gap(rank, width, tokens) <= budget + 1e-12
        assert rank == 8 or law.gap(rank - 8, width, tokens) > budget
        assert law.half_width(16, width, tokens) >= law.half_width(64, width, tokens)


def test_what_is_predicted_for_cores_is_near_what_was_measured_on_some():
    """Compares with docs/performance.md: width 512, 160 ms of computation, two processes."""
    sizes = {"qkv": 3, "out": 1, "up": 4, "down": 4}
    block = shapes(**{name: (512, 512 * n) for name, n in sizes.items()})
    params = {f"block_{i}": block for i in range(4)}
    link = {"workers": 2, "latency": "100us", "step_time": "160ms", "device": "cpu"}
    # With this budget rank 32 comes first, which was measured.
    options = {"loss_budget": "0.8%", "tokens": 512, **link}
    for bandwidth, exact, compressed in (("1Gbit", 592, 207), ("100Mbit", 4606, 347)):
        advice = jaxcomp.advise(params, bandwidth=bandwidth, **options)
        predictions = by_name(advice)
        assert powersgd(advice)[0].name == "powersgd rank 32 int6"
        for name, milliseconds in (
            ("all-reduce float32", exact),
            ("powersgd rank 32 int6", compressed),
        ):
            assert 1e3 * predictions[name].step_time == pytest.approx(milliseconds, rel=0.25)
        assert "all-reduce float16" in predictions  # XLA's CPU backend sends bfloat16 as float32


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
        assert f"measured=({advice.recommended.rank}, '1.2%')" in " ".join(str(advice).split())
        assert "not known" in str(advice).splitlines()[6]
        assert advice.reducer("data").init({"w": jnp.zeros((256, 256))}) is not None


def test_an_interval_wider_than_three_budgets_leaves_the_question_open():
    wide = jaxcomp.advise(PARAMS, **INSIDE | {"loss_budget": "0.1%"})
    assert wide.compress is None
    assert "points wide, for a budget of 0.1%" in wide.reason
    assert jaxcomp.advise(PARAMS, optimizer="muon", **INSIDE).compress


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
    params = {"w": jnp.zeros((256, 256)), "b": jnp.zeros(512)}
    clip, (adam, *others) = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(256, 256)))
    mu = {"w": basis * decay ** np.arange(256), "b": np.ones(512)}
    adam = adam._replace(mu=mu, nu=jax.tree.map(jnp.ones_like, params))
    return params, (clip, (adam, *others))


def test_a_runs_own_momentum_says_what_a_rank_costs():
    params, state = with_opt_state(0.97)
    for budget in (0.002, 0.01, 0.04):
        advice = jaxcomp.advise(params, opt_state=state, loss_budget=budget, **SLOW)
        lowest = powersgd(advice)[0]
        gap = jaxcomp.predict_gap(state, lowest.rank, min_compression_rate=1.0).gap
        assert lowest.gap == gap <= budget
        if advice.recommended.rank:  # the excess that is possible is within three budgets
            sure = 2 * advice.recommended.half_width <= 3 * budget
            assert bool(advice.compress) == sure
        assert "read off the momentum" in str(advice)
    # Beyond the tails that were run nothing is known.
    params, state = with_opt_state(0.999)
    lossy = jaxcomp.advise(params, opt_state=state, loss_budget="50%", **SLOW)
    assert lossy.compress is None
    assert "of the momentum's energy lie beyond the rank" in lossy.reason


def test_a_measured_gap_answers_what_was_not_known():
    params, state = with_opt_state(0.97)
    options = {"opt_state": state, "loss_budget": "0.5%", **SLOW}
    by_law = jaxcomp.advise(params, **options).recommended
    for gap in ("0.5%", "2%"):
        advice = jaxcomp.advise(params, **options, measured=(16, gap))
        assert advice.compress is True
        assert advice.recommended.gap <= 0.005
        assert advice.recommended.rank < by_law.rank
        assert "the gap that was measured, scaled to other ranks" in str(advice)
        lowest = powersgd(advice)[0]
        found = jaxcomp.predict_gap(
            state, lowest.rank, measured=(16, gap), min_compression_rate=1.0
        )
        assert lowest.gap == found.gap
    with pytest.raises(ValueError, match="`measured` needs `opt_state`"):
        jaxcomp.advise(params, measured=(16, "1%"), **SLOW)


def test_stacked_layers_are_as_wide_as_one_of_them():
    stack = shapes(blocks=(12, 256, 1024))
    advice = jaxcomp.advise(stack, matrix_dims=jaxcomp.stacked("blocks"), **SLOW)
    apart = jaxcomp.advise([shapes(w=(256, 1024))] * 12, **SLOW).recommended
    found = advice.recommended
    assert found.name == apart.name
    assert found.gap == apart.gap
    assert found.half_width == apart.half_width
    assert found.step_time == pytest.approx(apart.step_time)
    assert "leaves of three axes or more, 1 here" in str(jaxcomp.advise(stack, **SLOW))
    state = advice.reducer("data").init({"blocks": jnp.zeros((2, 256, 1024))})
    assert state.q["blocks"].shape[0] == 2


def test_quantities_are_written_with_three_digits_and_a_prefix():
    about = {"workers": 2, "bandwidth": "0.1Gbit", "latency": "0us", "step_time": "999.6ms"}
    said = "100 Mbit/s, latency 0 s, 1 s of computation"
    assert said in str(jaxcomp.advise(PARAMS, device="cpu", **about))


def test_what_cannot_be_compressed_gets_no_rank():
    vectors = jaxcomp.advise({"b": jnp.zeros(1_000_000)}, **SLOW)
    assert not powersgd(vectors)
    assert "PowerSGD is left out" in str(vectors)
    assert vectors.recommended.name == "int8 all-reduce"


@pytest.mark.parametrize("count", [10_000, 123_456, 10_000_000, 124_000_000, 1_500_000_000, 10**12])
def test_assumed_shapes_have_about_as_many_parameters(count):
    leaves = advise(count, **SLOW).baseline.sent.leaves
    assert sum(leaf.size for leaf in leaves) == pytest.approx(count, rel=0.1)


UNITS = rows("""
bandwidth | 10Gbit | 1.25e9
bandwidth | 25Gbps | 3.125e9
bandwidth | 1Mbit/s | 1.25e5
bandwidth | 12.5 GB/s | 1.25e10
latency | 50us | 5e-5
latency | 1ms | 1e-3
latency | 0s | 0
""")


@pytest.mark.parametrize(("argument", "text", "expected"), [*UNITS, ("bandwidth", 2.5e9, 2.5e9)])
def test_units(argument, text, expected):
    advice = jaxcomp.advise(PARAMS, **SLOW | {argument: text})
    assert getattr(advice.link, argument) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("workers", [0]),
        ("bandwidth", ["", "10", "fast", "10Gbit/h", "-1Gbit", "0bit", "nanGB", math.inf]),
        ("latency", ["50", "1h", "-1ms", "1e999s", "ms", -1.0]),
        ("step_time", ["0ms", 0.0, math.nan]),
        ("loss_budget", ["little", 1, "100%"]),
        ("tokens", ["many", 0, math.inf]),
        ("optimizer", ["lion", ["adamw"]]),
        ("device", ["abacus", ["cpu"]]),
        ("matrix_dims", ["blocks"]),
    ],
)
def test_wrong_arguments_are_refused(argument, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^`{argument}` "):
            jaxcomp.advise(PARAMS, **SLOW | {argument: value})
    with pytest.raises(ValueError, match=r"guessed for 10,000 to .* got 9"):
        jaxcomp.advise(9, **SLOW)


COMMAND = {"params": "124M", "workers": 8, "bandwidth": "100Mbit", "step-time": "20ms"}


def run_command(**options):
    main(["advise", *(f"--{name}={value}" for name, value in options.items())])


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxcomp", "--version"])
    monkeypatch.delitem(sys.modules, "jaxcomp.__main__")  # runpy warns of a second import
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("jaxcomp", run_name="__main__")
    assert capsys.readouterr().out == f"jaxcomp {jaxcomp.__version__}\n"
    run_command(**COMMAND, latency="50us", optimizer="muon", **{"loss-budget": "1%"})
    advice = advise("124M", loss_budget="1%", optimizer="muon", **SLOW)
    assert capsys.readouterr().out == f"{advice}\n"


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("device", "abacus"), ("step-time", "soon"), ("params", "many"), ("params", "-5")],
)
def test_the_command_names_an_option_that_is_wrong(option, wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command(**COMMAND | {option: wrong})
    printed = capsys.readouterr()
    assert f"error: --{option} must be" in printed.err
    assert not printed.out


@pytest.mark.parametrize("left_out", COMMAND)
def test_the_command_names_an_option_that_is_missing(left_out, capsys):
    given = dict(COMMAND)
    del given[left_out]
    with pytest.raises(SystemExit, match="2"):
        run_command(**given)
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
def test_measured_constants_are_positive_and_finite(number, monkeypatch):
    monkeypatch.setattr(timing, "_MANY", 1 << 16)  # enough here: nothing depends on the times
    params = shapes(w=(256, 512), b=(512,))
    found = jaxcomp.measure(params, rank=2, devices=jax.devices()[:number])
    figures = [found.int8.per_value, found.powersgd.per_value, found.powersgd.per_column]
    for costs in (found.allreduce, found.allreduce_16, found.int8, found.powersgd):
        figures += [costs.overhead, costs.bandwidth]
    assert all(0 < figure < math.inf for figure in figures)
    assert (found.allreduce == device().allreduce) == (number == 1)
    advice = jaxcomp.advise(PARAMS, **SLOW | {"device": found})
    assert f"measured: {number} x" in str(advice)


def test_the_state_of_another_model_is_refused():
    state = optax.adam(1e-3).init({"other": jnp.zeros((96, 40))})
    moments = state[0]._replace(
        mu={"other": jax.random.normal(jax.random.key(0), (96, 40))},
        nu={"other": jnp.ones((96, 40))},
    )
    with pytest.raises(
        ValueError, match=r"momentum of shape \(96, 40\) for \['other'\].* one model"
    ):
        jaxcomp.advise({"w": jnp.zeros((96, 48))}, opt_state=moments, **SLOW)
    jaxcomp.advise({"w": jnp.zeros((96, 40)), "frozen": jnp.zeros(3)}, opt_state=moments, **SLOW)


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_to_measure(rank):
    with pytest.raises(ValueError, match=r"positive integer|no leaf of this model"):
        jaxcomp.measure({"n": jnp.zeros(3)}, rank=rank)
