"""`benchmarks.convergence`: a tiny study, and the table that is made of the committed one."""

import jax
import numpy as np
import pytest

import benchmarks.convergence.__main__ as convergence
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.convergence.report import PAGE, table
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.strategies import STRATEGIES, by_name
from benchmarks.convergence.training import Config

TINY = "--steps 4 --eval-every 2 --replicas 2 --batch-size 1 --layers 1 --width 16 --heads 2"
TINY = [*TINY.split(), "--context", "8", "--eval-sequences", "64"]


def test_a_tiny_study(tmp_path, capsys):
    out = tmp_path / "study"
    chosen = ["--only", "allreduce", "powersgd-r1", "--seeds", "2", "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        for made in (4, 0):  # nothing is made twice
            assert convergence.main([*chosen, *TINY]) == 0
            said = capsys.readouterr().out.splitlines()
            assert sum(line[-1].isdecimal() for line in said) == made
    runs = read_runs(out.with_suffix(".jsonl"))
    assert len(runs) == 4
    assert [step for step, _ in runs[0]["curve"]] == [2, 4]
    exact, compressed = results(runs, by_name).values()
    assert exact.sent > compressed.sent
    assert np.isfinite(compressed.gaps(exact)).all()
    for written in ("study.md", "study.png"):
        assert (tmp_path / written).stat().st_size > 100


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "spectrum" not in name])
def test_every_strategy_can_be_made_and_says_what_it_sends(name):
    config = Config(steps=64, replicas=2, layers=1, width=64, heads=2)
    strategy = STRATEGIES[name]
    state = jax.eval_shape(strategy.build(config).init, config.params())
    assert jax.tree.leaves(state)
    assert strategy.bytes_sent(config) > 0


def test_gaps_of_two_settings_have_the_same_order():
    exact = Result({0: 1.0, 1: 2.0}, 100)
    assert Result({1: 2.2, 0: 1.5}, 10).gaps(exact) == pytest.approx([50, 10])


def test_the_table_in_the_document_is_that_of_the_committed_runs():
    runs = [
        run
        for run in read_runs(RESULTS / "convergence.jsonl")
        if Config(**run["config"]) == Config()
    ]
    assert table(results(runs, by_name)) in PAGE.read_text()
