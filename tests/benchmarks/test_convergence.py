"""`benchmarks.convergence`: a tiny study, and the table that is made of the committed one."""

import dataclasses

import jax
import numpy as np
import pytest

import benchmarks.convergence.__main__ as convergence
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.convergence.report import PAGE, summarise, table
from benchmarks.convergence.strategies import STRATEGIES
from benchmarks.convergence.training import Config

TINY = "--steps 4 --eval-every 2 --replicas 2 --batch-size 1 --layers 1 --width 16 --heads 2"
TINY = [*TINY.split(), "--context", "8", "--eval-sequences", "64"]


def test_a_tiny_study(tmp_path, capsys):
    out = tmp_path / "study"
    chosen = ["--only", "allreduce", "powersgd-r1", "--seeds", "2", "--out", str(out)]
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
    assert all(np.isfinite(row.gap) for row in summarise(runs, again["config"]))
    for written in ("study.md", "study.png"):
        assert (tmp_path / written).stat().st_size > 100


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "spectrum" not in name])
def test_every_strategy_can_be_made_and_says_what_it_sends(name):
    config = Config(steps=8, replicas=2, layers=1, width=64, heads=2)
    strategy = STRATEGIES[name]
    state = jax.eval_shape(strategy.build(config).init, config.params())
    assert jax.tree.leaves(state)
    assert len(strategy.payloads(config)) == config.steps


def test_the_table_in_the_document_is_that_of_the_committed_runs():
    runs = read_runs(RESULTS / "convergence.jsonl")
    rows = summarise(runs, dataclasses.asdict(Config()))
    assert table(rows) in PAGE.read_text()


def test_a_gap_is_to_the_run_of_the_same_seed():
    config = {"steps": 1}

    def run(strategy, seed, loss, sent):
        return {"strategy": strategy, "seed": seed, "config": config, "curve": [[1, sent, loss]]}

    runs = [run("allreduce", s, 2.0 + s, 100) for s in (0, 1)]
    runs += [run("powersgd-r4", s, 1.1 * (2.0 + s), 10) for s in (0, 1, 2)]
    runs += [run("powersgd-r4", 0, 9.0, 10) | {"config": {}}, run("forgotten", 0, 1.0, 1)]
    exact, compressed = summarise(runs, config)
    assert (exact.strategy, exact.gap, exact.ratio) == ("allreduce", 0.0, 1.0)
    assert compressed.gaps == pytest.approx([10.0, 10.0])
    assert compressed.ratio == 10.0


def test_what_lines_have_in_common_is_written_once(tmp_path):
    path = tmp_path / "runs.jsonl"
    runs = [{"loss": x, "config": {"a": x // 2}, "about": {"b": 0}} for x in range(4)]
    for run in runs:
        append_run(path, run)
    assert read_runs(path) == runs
    assert path.read_text().count("about") == 1
    with path.open("a") as file:
        file.write('{"loss": 5, "con')  # a kill
    append_run(path, runs[0])
    assert read_runs(path) == [*runs, runs[0]]


def test_wrong_input_is_said_in_one_sentence(tmp_path, capsys):
    assert convergence.main(["--only", "nothing"]) == 2
    out = str(tmp_path / "x")
    assert convergence.main(["--steps", "5", "--eval-every", "2", "--out", out]) == 2
    said = capsys.readouterr().err
    assert "no strategy is called 'nothing'" in said
    assert "steps must be a multiple of eval_every" in said
    assert convergence.main(["--runs", "0", "--report", "--out", out]) == 2
    assert "no finished runs" in capsys.readouterr().err
