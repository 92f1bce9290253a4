"""`benchmarks.convergence`: a tiny study, and the table that is made of the committed one."""

import dataclasses

import jax
import numpy as np
import pytest

import benchmarks.convergence.__main__ as convergence
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.convergence.report import PAGE, table
from benchmarks.convergence.runs import results
from benchmarks.convergence.strategies import EXACT, STRATEGIES, by_name
from benchmarks.convergence.training import Config

TINY = "--steps 4 --eval-every 2 --replicas 2 --batch-size 1 --layers 1 --width 16 --heads 2"
TINY = [*TINY.split(), "--context", "8", "--eval-sequences", "64"]


def test_a_tiny_study(tmp_path, capsys):
    out = tmp_path / "study"
    chosen = ["--only", "allreduce", "powersgd-r1", "--seeds", "2", "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        assert convergence.main([*chosen, *TINY, "--seeds", "1"]) == 0
        assert convergence.main([*chosen, *TINY]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line[-1].isdecimal() for line in said) == 4  # nothing was made twice
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
    config = Config(steps=8, replicas=2, layers=1, width=64, heads=2)
    strategy = STRATEGIES[name]
    state = jax.eval_shape(strategy.build(config).init, config.params())
    assert jax.tree.leaves(state)
    assert len(strategy.bytes_sent(config)) == config.steps


def test_the_table_in_the_document_is_that_of_the_committed_runs():
    config = dataclasses.asdict(Config())
    runs = [run for run in read_runs(RESULTS / "convergence.jsonl") if run["config"] == config]
    assert table(results(runs, by_name)) in PAGE.read_text()


def test_a_gap_is_to_the_run_of_the_same_seed():
    def run(strategy, seed, loss, sent):
        return {
            "setting": {"strategy": strategy},
            "seed": seed,
            "curve": [[1, loss]],
            "bytes": sent,
        }

    runs = [run("powersgd-r4", s, 1.1 * (2.0 + s), 10) for s in (0, 1, 2)]
    runs += [run("allreduce", s, 2.0 + s, 100) for s in (0, 1)]
    compressed, exact = results(runs, by_name).values()
    assert compressed.gaps(exact) == pytest.approx([10.0, 10.0])
    *_, first, second = table({STRATEGIES["powersgd-r4"]: compressed, EXACT: exact}).splitlines()
    assert first.startswith("| float32 all-reduce | 1.0 |  |")  # most bytes first
    assert second.startswith("| rank 4 | 10.0 | +10.0% ± 0.0 |")


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
