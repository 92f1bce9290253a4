"""The convergence study: what it counts and reports, its own reducers, and a tiny run of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import random_grads, with_value, zeros_of_one
from runners import AXIS, simulate

import benchmarks.convergence.__main__ as convergence
import jaxcomp
from benchmarks.common.runs import append_run, read_runs
from benchmarks.convergence.int4 import Int4Layout
from benchmarks.convergence.reducers import difference, low_rank, whitened
from benchmarks.convergence.report import markdown, summarise
from benchmarks.convergence.strategies import CURVES, STRATEGIES, own_spectrum
from benchmarks.convergence.training import Config
from jaxcomp.extend import mean_by_shares

SHAPES = {"a": (24, 16), "b": (40, 20), "bias": (16,)}
TINY = ["--steps", "4", "--eval-every", "2", "--width", "32", "--layers", "1", "--heads", "2"]
TINY += ["--context", "16", "--batch-size", "2", "--replicas", "2", "--eval-sequences", "64"]


def run(strategy, seed, sent, loss, config="c", family="PowerSGD"):
    curve = [[1, sent // 2, 2 * loss], [2, sent, loss]]
    return {
        "strategy": strategy, "family": family, "seed": seed, "curve": curve, "config": config,
    }  # fmt: skip


def test_rows_compare_runs_of_the_same_seed():
    runs = [run("allreduce", s, 1000, loss) for s, loss in ((0, 2.0), (1, 1.0))]
    runs += [run("half", s, 500, loss) for s, loss in ((0, 2.2), (1, 1.2), (2, 9.0))]
    runs += [run("worse", 0, 500, 2.4), run("small", 0, 100, 3.0)]
    runs += [run("other", 0, 100, 1.0, config="another"), run("lone", 5, 100, 1.0)]
    rows = {row.strategy: row for row in summarise(runs, "c")}
    assert list(rows) == ["allreduce", "half", "worse", "small"]
    half = rows["half"]
    assert (half.seeds, half.ratio, half.megabytes) == (2, 2.0, 5e-4)
    assert half.loss == pytest.approx(1.7)
    assert half.gap == pytest.approx(15)  # of 10% and 20%, where the means differ by 13%
    assert half.gap_spread == pytest.approx(np.std([10, 20], ddof=1))
    assert [row.on_frontier for row in rows.values()] == [True, True, False, True]
    assert half.curve[0][:3] == (1, 2.5e-4, pytest.approx(3.4))
    assert "| half | 2.0 | +15.00% ± 7.07 | 1.700 ± 0.707 | 2 | * |" in markdown(
        list(rows.values()), "setting"
    )


def test_a_run_that_was_cut_off_is_lost_alone(tmp_path):
    path = tmp_path / "results" / "runs.jsonl"
    assert read_runs(path) == []
    append_run(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": 2, "cur')
    append_run(path, {"c": 3})
    assert read_runs(path) == [{"a": 1}, {"c": 3}]


def test_every_strategy_says_what_it_sends():
    config = Config()
    dense = STRATEGIES["allreduce"].bytes_sent(config)
    assert dense(config.steps) == config.steps * 4 * 467_584
    for name, strategy in STRATEGIES.items():
        if not name.startswith("spectrum"):  # fitted to a run
            sent = strategy.bytes_sent(config)
            assert 0 < sent(config.steps) <= dense(config.steps)
            assert sent(0) == 0
    start = STRATEGIES["powersgd-r4-start10"].bytes_sent(config)
    assert start(48) == dense(48)
    rank4 = STRATEGIES["powersgd-r4"].bytes_sent(config)
    assert start(480) - start(48) == rank4(480) - rank4(48)
    int8 = STRATEGIES["powersgd-r16-int8"].bytes_sent(config)
    assert 21 < dense(1) / int8(1) < 22  # with the scales, and with five vectors in float32
    own = STRATEGIES["spectrum-own-r16-int8"].bytes_sent(config, payload=1000)
    assert own(480) == int8(48) + 432 * 1000
    assert STRATEGIES["diloco-h32"].bytes_sent(config)(63) == dense(1)
    assert set(CURVES) <= set(STRATEGIES)


def test_strategies_are_taken_in_the_order_asked_for():
    chosen = convergence.chosen_strategies(["powersgd-r1*", "allreduce", "powersgd-r1"])
    assert chosen == ["powersgd-r1", "powersgd-r16", "powersgd-r16-int8", "allreduce"]
    assert convergence.chosen_strategies(None) == list(STRATEGIES)


def test_bytes_of_low_rank_are_those_of_powersgd():
    tree = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    stats = jaxcomp.powersgd(2, axis_name=AXIS).bytes(tree)
    once, twice = (low_rank(2, axis_name=AXIS, iterations=n).bytes(tree) for n in (1, 2))
    assert once == stats
    assert twice.bytes_after == 2 * stats.bytes_after - 16 * 4
    narrow, sizes = low_rank(2, axis_name=AXIS, wire="int4"), (48, 32, 80, 40, 16)
    expected = sum(Int4Layout.of(size, 4).wire_bytes for size in sizes)
    assert narrow.bytes(tree, replicas=4).bytes_after == expected
    with pytest.raises(ValueError, match="`replicas` is needed"):
        narrow.bytes(tree)
    assert (
        Int4Layout.of(1024, 4).wire_bytes == 1024 // 2 + 2 * 8
    )  # 8 blocks of 128 with their scales


def test_low_rank_with_a_residual_is_powersgd():
    grads = random_grads(SHAPES, 3, 4)
    expected = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    tx = jaxcomp.error_feedback(low_rank(2, axis_name=AXIS))
    # Both from the same right factors.
    start = expected.init(zeros_of_one(grads))
    state = tx.init(zeros_of_one(grads))
    state = state._replace(inner=state.inner._replace(q=start.q))
    wanted, _ = simulate("vmap", expected, grads, start)
    outputs, _ = simulate("vmap", tx, grads, state)
    for name in SHAPES:
        np.testing.assert_allclose(outputs[name], wanted[name], atol=1e-4)


def test_nothing_is_lost_with_4_bit_factors():
    grads = random_grads(SHAPES, 4, 5)
    tx = jaxcomp.error_feedback(low_rank(3, axis_name=AXIS, wire="int4"))
    outputs, state = simulate("shard_map", tx, grads, tx.init(zeros_of_one(grads)))
    for name in SHAPES:
        given = np.asarray(grads[name]).mean(0).sum(0)
        total = np.asarray(outputs[name]).sum(0) + np.asarray(state.residual[name]).mean(0)
        np.testing.assert_allclose(total, given, atol=1e-4)


def test_int4_is_off_by_no_more_than_half_a_level_in_each_stage():
    x = random_grads({"x": (37, 10)}, 4, 1)["x"][:, 0]
    layout = Int4Layout.of(370, 4)
    average = jax.jit(jax.vmap(lambda x: mean_by_shares([x], [layout], AXIS), axis_name=AXIS))
    (means,), (sent,), finite = average(x)
    assert finite.all()
    assert np.abs(means[0] - x.mean(0)).max() <= np.abs(x).max() / 7 * 1.01
    np.testing.assert_allclose(sent.mean(0), means[0], atol=1e-5)
    (means,), _, finite = average(with_value(x, (1, 3, 2), np.inf))
    assert not finite.any()


def test_difference_is_ef21_with_momentum():
    """Against each replica's own momentum and estimate, one after the other in NumPy."""
    eta, n, steps = 0.25, 3, 6
    grads = random_grads({"a": (24, 16)}, n, steps)
    powersgd = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0, error_feedback=False)
    tx = difference(powersgd, eta=eta)
    outputs, _ = simulate("vmap", tx, grads, tx.init(zeros_of_one(grads)))
    q = np.asarray(powersgd.init(zeros_of_one(grads)).q["a"], np.float64)
    g = np.asarray(grads["a"], np.float64).transpose(0, 1, 3, 2)  # rows are the trailing axis
    momentum, estimate = np.zeros((n, 16, 24)), np.zeros((n, 16, 24))
    for t in range(steps):
        momentum = (1 - eta) * momentum + eta * g[:, t]
        delta = momentum - estimate
        p = np.linalg.qr(delta.mean(0) @ np.linalg.qr(q)[0])[0]
        own = delta.transpose(0, 2, 1) @ p
        q = own.mean(0)
        estimate += p @ own.transpose(0, 2, 1)
        np.testing.assert_allclose(outputs["a"][t], estimate.mean(0).T, atol=1e-4)


@pytest.mark.parametrize(
    "wrap", [difference, lambda reducer: jaxcomp.error_feedback(whitened(reducer))]
)
def test_a_bad_step_changes_no_state(wrap):
    grads = random_grads(SHAPES, 2, 3)
    bad = dict(grads, a=with_value(grads["a"], (1, 1, 0, 0), np.nan))
    tx = wrap(low_rank(2, axis_name=AXIS))
    outputs, state = simulate("vmap", tx, bad, tx.init(zeros_of_one(grads)))
    assert np.isnan(outputs["a"][1]).all()
    skipped = jax.tree.map(lambda g: jnp.delete(g, 1, axis=1), grads)
    _, expected = simulate("vmap", tx, skipped, tx.init(zeros_of_one(grads)))
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_a_tiny_study(tmp_path, capsys):
    out = tmp_path / "study"
    chosen = ["--only", "allreduce", "spectrum-r4", "--seeds", "2", "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        assert convergence.main([*chosen, *TINY, "--runs", "1"]) == 0
        assert convergence.main([*chosen, *TINY, "--report"]) == 0
    said = capsys.readouterr().out
    assert said.count("seed ") == 4  # nothing was made twice
    runs = read_runs(out.with_suffix(".jsonl"))
    assert len(runs) == 4
    again = runs[0]
    assert [step for step, _, _ in again["curve"]] == [2, 4]
    assert again["curve"][0][1] * 2 == again["curve"][1][1]
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["seeds"] for row in rows] == [2, 2]
    assert all(np.isfinite(row["gap"]) for row in rows)
    for written in ("study.md", "study_curves.png", "study_frontier.png"):
        assert (tmp_path / written).stat().st_size > 100


def test_ranks_of_the_runs_own_momentum(tmp_path, monkeypatch):
    """A switch between two evaluations; the bytes of both transformations are counted."""
    strategy = own_spectrum("", 1, ratio=8.0, share=0.75)
    monkeypatch.setitem(STRATEGIES, "own", strategy)
    out = tmp_path / "study"
    arguments = ["--only", "own", "--seeds", "1", "--out", str(out), *TINY, "--eval-every", "4"]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        assert convergence.main(arguments) == 0
    (run,) = read_runs(out.with_suffix(".jsonl"))
    ((_, whole, loss),) = run["curve"]
    before = strategy.bytes_sent(Config(**run["config"]))
    assert whole - before(3) > before(1)  # the fourth step sends more than rank 1
    assert np.isfinite(loss)


def test_wrong_input_is_said_in_one_sentence(tmp_path, capsys):
    assert convergence.main(["--only", "nothing"]) == 2
    assert (
        convergence.main(["--steps", "5", "--eval-every", "2", "--out", str(tmp_path / "x")]) == 2
    )
    said = capsys.readouterr().err
    assert "no strategy is called 'nothing'" in said
    assert "steps must be a multiple of eval_every" in said
    with pytest.raises(SystemExit):
        convergence.parser().parse_args(["--help"])
    assert "spectrum-r32-int4" in capsys.readouterr().out
