"""What `recommend` makes of a study's tables, of which these are no real ones."""

import dataclasses
import json
import math
import re
import shlex

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomp
from jaxcomp.__main__ import main
from jaxcomp._adviser import evidence
from jaxcomp._adviser.calibration import ASSUMED
from jaxcomp._adviser.evidence import Curve, Measured, Study
from jaxcomp._adviser.units import parse_share
from jaxcomp._base.checks import ParameterError


def shapes(*sizes):
    return {f"w{i}": jax.ShapeDtypeStruct(size, jnp.float32) for i, size in enumerate(sizes)}


PARAMS = shapes((1024, 1024), (1024, 1024), (1024,))
LEFT = 1024 / (2 * 1024**2 + 1024)  # their share that is not compressed, as in the study here
SLOW = {"bandwidth": "100Mbit", "step_time": "20ms"}


def measured(rank, ratio, gap, optimizer="adamw", steps=480, wire="int6", spread=0.001, seeds=3):
    return Measured(optimizer, steps, wire, rank, ratio, gap, spread, seeds)


@pytest.fixture(autouse=True)
def study(monkeypatch):
    """Gaps of 0.4% at 10 times fewer bytes, 0.8% at 20, 3.2% at 40; of lion one seed."""
    points = (
        measured(32, 10.0, 0.004),
        measured(16, 20.0, 0.008, spread=0.002),
        measured(8, 40.0, 0.032),
        measured(16, 20.0, 0.003, steps=1920),
        measured(16, 16.0, 0.02, wire="int8"),
        measured(16, 20.0, 0.05, optimizer="lion", spread=None, seeds=1),
    )
    int8 = Measured("adamw", 480, "int8 all-reduce", 0, 3.94, 0.0005, None, 1)
    monkeypatch.setattr(evidence, "STUDY", Study(467_584, LEFT, 128, 64, 4, 4, 480))
    monkeypatch.setattr(evidence, "EXACT", {"adamw": "rate 0.002", "lion": "rate 0.0004"})
    monkeypatch.setattr(evidence, "INT8", int8)
    monkeypatch.setattr(evidence, "MEASURED", points)
    rounds = dataclasses.replace(measured(32, 160.0, 0.002), every=4)
    more = measured(32, 51.0, 0.03)
    wide = (measured(64, 20.0, -0.001), more, rounds, measured(64, 20.0, 0.01, optimizer="lion"))
    monkeypatch.setattr(evidence, "WIDE", wide)


def recommend(budget, params=PARAMS, **given):
    return jaxcomp.recommend(params, **{"workers": 8, "budget": budget, **given})


def fewer_bytes(rank, wire="int6", params=PARAMS):
    stats = jaxcomp.compression_stats(params, rank=rank, comm_dtype=wire, replicas=8)
    return stats.bytes_before / stats.bytes_after


def test_the_gap_is_linear_in_the_logarithm_and_ends_where_the_study_ends():
    curve = Curve.of(
        [measured(8, 40.0, 0.032), measured(32, 10.0, 0.004), measured(16, 20.0, 0.008)]
    )
    assert curve.gap(20.0) == 0.008
    assert curve.gap(math.sqrt(800)) == pytest.approx(0.02)
    assert (curve.gap(2.0), curve.gap(1000.0)) == (0.004, 0.032)
    assert curve.largest_ratio(0.02) == pytest.approx(math.sqrt(800))
    assert curve.largest_ratio(0.5) == 40.0
    assert curve.largest_ratio(0.008) == 20.0
    assert curve.largest_ratio(0.003) is None


def test_a_gap_below_that_of_more_bytes_is_taken_for_noise():
    curve = Curve.of(
        [measured(32, 10.0, 0.008), measured(16, 20.0, 0.001), measured(8, 40.0, 0.02)]
    )
    assert curve.gap(20.0) == 0.008
    assert curve.largest_ratio(0.001) is None


def test_a_gap_that_was_raised_is_no_measurement(monkeypatch):
    points = (measured(32, 10.0, 0.008), measured(16, 20.0, 0.001))
    monkeypatch.setattr(evidence, "MEASURED", points)
    assert "and no worse than 0.8% above exact averages at 20.0 times" in recommend(0.01).reason


@pytest.mark.parametrize(("budget", "target"), [(0.008, 20.0), (0.2, 40.0)])
def test_the_rank_is_the_lowest_that_sends_no_less_than_the_ratio(budget, target):
    found = recommend(budget)
    assert (found.comm_dtype, found.start_step, found.compress) == ("int6", 0, True)
    assert fewer_bytes(found.rank) <= target * 1.001 < fewer_bytes(found.rank - 1)
    assert found.ratio == fewer_bytes(found.rank)
    assert found.gap <= budget
    assert found.name == f"powersgd rank {found.rank} int6"


def test_between_measured_ratios_the_gap_is_that_of_what_is_sent():
    found = recommend("2%")
    low, high = 0.008, 0.032
    assert found.gap == pytest.approx(low + (high - low) * math.log2(found.ratio / 20))
    assert found.gap == pytest.approx(0.02, rel=0.1)
    assert found.spread == 0.002
    assert (
        "ended 0.8% above exact averages at 20.0 times fewer bytes and 3.2% above" in found.reason
    )


def test_the_wire_that_sends_least_within_the_budget(monkeypatch):
    points = (measured(16, 16.0, 0.004, wire="int8"), measured(32, 10.0, 0.004))
    monkeypatch.setattr(evidence, "MEASURED", points)
    found = recommend(0.01)
    assert found.comm_dtype == "int8"
    assert found.ratio == fewer_bytes(found.rank, "int8")


def test_a_budget_below_what_was_measured():
    int8 = recommend(0.002)
    assert (int8.name, int8.rank, int8.comm_dtype, int8.gap) == ("int8", None, "int8", 0.0005)
    assert 3.9 < int8.ratio < 4
    assert int8.reason.startswith("No rank that was measured with adamw keeps 0.2%; the int8")
    for budget in (0, 0.0001):
        exact = recommend(budget)
        assert (exact.name, exact.ratio, exact.gap) == ("all-reduce float32", 1.0, 0.0)
        assert not exact.compress


def test_a_rank_at_which_too_little_is_compressed_is_not_taken(monkeypatch):
    monkeypatch.setattr(evidence, "MEASURED", (measured(32, 9.0, 0.004),))
    found = recommend(0.004)  # from rank 256 on these matrices go as they are
    assert found.name == "int8"
    assert "which the budget needs, sends no fewer bytes than int8 would" in found.reason


def test_the_rank_before_matrices_are_left_out_serves_if_it_is_close(monkeypatch):
    monkeypatch.setattr(evidence, "MEASURED", (measured(32, 10.2, 0.004),))
    found = recommend(0.004)
    assert found.rank == 255
    assert 10.2 < found.ratio < 10.2 * 1.1


def test_parameters_without_matrices():
    vectors = recommend(0.01, shapes((1000,), (100,)))
    assert vectors.name == "int8"
    assert vectors.reason.startswith("None of these parameters is a matrix that factors would")


@pytest.mark.parametrize("budget", [0.004, 0.01, 0.2])
def test_matrices_are_compressed_as_in_the_study_whatever_lies_beside_them(budget):
    mixed = recommend(budget, shapes((1024, 1024), (1024, 1024), (200_000,)))
    assert mixed.rank == recommend(budget).rank
    assert mixed.ratio < 11
    assert "8.7% of your values are in leaves that are not compressed" in str(mixed)


def test_a_larger_budget_never_sends_more():
    params = shapes((1024, 1024), (64, 64), (300_000,))
    sent = [recommend(budget, params).ratio for budget in (0.0, 0.002, 0.004, 0.006, 0.02, 0.2)]
    assert sent == sorted(sent)


def test_of_float16_parameters_the_rank_is_the_same_and_the_bytes_are_counted_as_they_are():
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), PARAMS)
    found, single = recommend(0.01, half), recommend(0.01)
    assert found.rank == single.rank
    assert found.ratio == pytest.approx(single.ratio / 2, rel=0.02)


def test_the_reducer_is_the_one_that_is_named():
    chosen = recommend(0.01)
    assert repr(chosen.reducer("data")) == repr(
        jaxcomp.powersgd(chosen.rank, axis_name="data", start_step=0, comm_dtype="int6")
    )
    int8 = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="data"))
    assert repr(recommend(0.002).reducer("data")) == repr(int8)
    assert repr(recommend(0).reducer("data")) == repr(jaxcomp.allreduce(axis_name="data"))


def test_it_trains():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    chosen = recommend(0.05, params, workers=2)
    assert chosen.rank
    tx = optax.chain(chosen.reducer("data"), optax.sgd(0.1))
    state = tx.init(params)
    step = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")
    updates, _ = jax.jit(step)(jax.tree.map(lambda x: jnp.stack([x, x]), params), state)
    # A gradient of rank 1 is sent whole but for rounding.
    assert jnp.allclose(updates["w"], -0.1, atol=0.01)


def test_what_the_study_was_and_where_the_parameters_lie_outside():
    found = recommend("2%")
    said = " ".join(str(found).split())
    assert "width 128 and 467,584 parameters, 480 steps of 4 replicas" in said
    assert "adamw at rate 0.002" in said
    assert "standard deviation of 0.20%" in said
    assert "over 1,920 steps runs at 20.0 times fewer bytes ended 0.3% above" in said
    wide = "width: in a model of width 512 with 2 replicas powersgd rank "
    assert f"{wide}64 int6 sent 20.0 times fewer bytes and ended 0.1% below exact" in said
    assert "exact averages (3 seeds, standard deviation 0.10%)" in said
    assert f"{wide}32 int6 in rounds of 4 steps (local_sgd_round) sent 160.0 times fewer" in said
    assert "51.0" not in said
    more = " ".join(str(recommend("4%")).split())
    assert "sent 51.0 times fewer bytes and ended 3% above" in more
    # The int8 all-reduce was measured with AdamW; what is said of wide matrices is lion's own.
    instead = " ".join(str(recommend(0.002, optimizer="lion")).split())
    assert "this was measured with adamw, not with lion" in instead
    assert "sent 20.0 times fewer bytes and ended 1% above" in instead
    assert "in rounds of" not in instead
    assert "width: " not in str(recommend("2%", shapes((128, 512), (128,))))
    assert "2,098,176 parameters, in matrices 1,024 wide" in said
    assert "replicas: yours are 8, the study's 4" in said
    assert "other leaves" not in said
    assert str(found).startswith(f"Use {found.name}. ")
    assert "other leaves: 1.9% of your values" in str(recommend(0.2, shapes((512, 512), (5000,))))
    lion = recommend(0.1, optimizer="lion")
    assert lion.spread is None
    assert "seeds: one" in str(lion)
    assert "measured with adamw, not with lion" in str(recommend(0.01, optimizer="lion"))


def test_the_model_of_the_study_gets_the_rank_that_was_measured(monkeypatch):
    params = shapes((256, 128), (128, 512), (128,))
    left = 128 / (256 * 128 + 128 * 512 + 128)
    monkeypatch.setattr(evidence, "STUDY", Study(98_432, left, 128, 64, 4, 4, 480))
    ratio = round(fewer_bytes(16, params=params), 2)
    monkeypatch.setattr(evidence, "MEASURED", (measured(16, ratio, 0.008),))
    found = recommend(0.008, params, workers=8)
    assert (found.rank, found.gap) == (16, 0.008)


def test_a_slow_network_gets_factors_and_a_fast_one_nothing():
    slow = recommend("2%", **SLOW)
    assert slow.rank == recommend("2%").rank
    assert slow.prediction.name == slow.name
    assert slow.prediction.speedup > 1.1
    assert "; a step is predicted to take" in slow.reason
    fast = recommend("2%", bandwidth="400Gbit", latency="1us", step_time="1s")
    assert not fast.compress
    assert fast.reason.startswith("Compression does not pay: with the all-reduce")
    assert fast.baseline == fast.prediction
    assert not recommend(0, **SLOW).compress
    assert recommend(0, **SLOW).name == "all-reduce float32"


def test_of_steps_that_take_as_long_the_one_that_loses_least():
    slow_products = dataclasses.replace(ASSUMED["gpu"], powersgd=((1, 1e5),))
    found = recommend("2%", calibration=slow_products, **SLOW)
    assert found.name == found.prediction.name == "int8"
    assert found.reason.startswith("The step is no slower than with factors; the int8 all-reduce")
    narrow = recommend("2%", bandwidth="3Gbit", latency="1us", step_time="20ms", workers=2)
    assert (narrow.name, narrow.ratio) == ("all-reduce bfloat16", 2.0)
    sixteen = jaxcomp.allreduce(axis_name="data", comm_dtype="bfloat16")
    assert repr(narrow.reducer("data")) == repr(sixteen)


def test_one_worker_sends_nothing():
    assert recommend(0.01, workers=1).reason == "There is one worker, so nothing is sent."
    assert not recommend(0.01, workers=1, **SLOW).compress


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 0}, "`workers` must be a positive integer"),
        ({"optimizer": "adam"}, "`optimizer` must be one of adamw, lion, which were measured"),
        ({"optimizer": ["adamw"]}, "`optimizer` must be one of adamw, lion"),
        ({"budget": -0.1}, "`budget` must be a finite number"),
        ({"budget": 1}, "`budget` must be at least 0 and below 1, got 1. Write 0.01 or 1%."),
        ({"budget": "100%"}, "`budget` must be at least 0 and below 1"),
        ({"budget": "little"}, "`budget` is no share: 'little'. Write 0.01 or 1%."),
        ({"bandwidth": "1Gbit"}, "`step_time` is missing: `bandwidth` alone says nothing"),
        ({"latency": "1us"}, "`step_time` is missing: `latency` alone"),
        ({"step_time": "1ms"}, "`bandwidth` is missing"),
        ({"step_time": "soon", "bandwidth": "1Gbit"}, "`step_time` is no time"),
        ({"device": "abacus"}, "`device` must be one of gpu, cpu"),
        ({"params": 5}, "too few to guess shapes from"),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    given = {"params": PARAMS, "workers": 8, "budget": 0.01, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxcomp.recommend(**given)


def test_shares_with_and_without_a_per_cent_sign():
    assert [parse_share("x", text) for text in ("1%", "0.5 %", "0.01", 0.02, 0)] == [
        0.01,
        0.005,
        0.01,
        0.02,
        0.0,
    ]
    with pytest.raises(ParameterError, match="is no share"):
        parse_share("x", "1%%")


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({name: list(leaf.shape) for name, leaf in PARAMS.items()}))
    command = f"recommend --params {path} --workers 8 --budget 2% --optimizer adamw"
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == f"{recommend(0.02)}\n"
    assert main([*shlex.split(command), "--bandwidth=100Mbit", "--step-time=20ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rank"] == recommend(0.02, **SLOW).rank
    assert found["prediction"]["name"] == found["name"]
    assert found["compress"] is True
    assert main([*shlex.split(command), "--bandwidth=100Mbit"]) == 2
    assert capsys.readouterr().err.startswith("error: --step-time is missing")
    assert main(shlex.split("recommend --params 1M --workers 8")) == 0
    assert "shapes assumed" in capsys.readouterr().out


def test_what_is_no_tree_of_arrays_or_has_no_values():
    with pytest.raises(ValueError, match="`params` must hold arrays or shapes, or be a number"):
        recommend(0.01, 1.0)
    for nothing in ({}, {"w": jax.ShapeDtypeStruct((8, 8), jnp.int32)}):
        chosen = recommend(0.01, nothing)
        assert not chosen.compress
        assert "no floating-point values" in chosen.reason
