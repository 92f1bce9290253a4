"""`benchmarks.optimizers`: what is searched, what is sent, what the tables say."""

from dataclasses import asdict, replace

import jax
import pytest

import benchmarks.optimizers.__main__ as command
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.optimizers import report
from benchmarks.optimizers.law import Gap, compared, fitted, fitted_runs, law_of_adviser
from benchmarks.optimizers.settings import (
    GRID,
    MAIN,
    UNSEEN,
    Setting,
    frontier,
)
from jaxcomp.types import Law

LINKS = read_runs(RESULTS / "time_to_loss.jsonl")
TINY = Config(
    steps=4, eval_every=2, replicas=2, batch_size=1, layers=1, width=16, heads=2, context=8
)
TINY = replace(TINY, eval_sequences=64)


def valley(setting, seed):
    """A loss that falls with the bytes, least at the middle of every grid."""
    _, middle = GRID[setting.optimizer][:2]
    away = setting.rate != middle[0] or setting.momentum != middle[1]
    return 2.0 + away + seed + 0.1 * (not setting.exact) / max(setting.rank, 1)


@pytest.mark.parametrize("optimizer", GRID)
def test_the_best_of_the_grid_is_what_is_compressed(optimizer):
    exact = report.best(optimizer, valley)
    assert exact == Setting(optimizer, *GRID[optimizer][1])
    full = list(frontier(exact, full=True))
    assert set(frontier(exact, full=False)) < set(full)
    assert {(s.rate, s.momentum) for s in full} == {(exact.rate, exact.momentum)}
    assert not any(s.exact for s in full)


@pytest.mark.parametrize(
    "setting",
    [Setting("muon", 1e-3, 0.8, ratio=3.0, wire="int6"), Setting("adafactor", 1e-2, rank=2)],
    ids=lambda setting: setting.label,
)
def test_finished_runs_are_not_made_again(setting, tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    with jax.numpy_dtype_promotion("standard"):  # what optax.contrib.muon needs
        loss = Runs(path, TINY, Setting, "benchmarks.optimizers").loss(setting, 0)
    assert 3 < loss < 8
    assert capsys.readouterr().out.startswith(setting.label)
    assert Runs(path, TINY, Setting, "benchmarks.optimizers").loss(setting, 0) == loss
    (run,) = read_runs(path)
    assert run["bytes"] == sum(setting.bytes_sent(TINY))


def test_the_page_shows_the_committed_runs_of_each_search_that_came_to_its_end():
    page, runs = report.PAGE.read_text(), read_runs(command.OUT)
    assert report.paged(page, runs, Config()) == page
    rate, _ = GRID["lion"][0]
    cut = [
        run
        for run in runs
        if (run["setting"]["optimizer"], run["setting"]["rate"]) != ("lion", rate)
    ]
    assert "\n| lion, " not in report.paged(page, cut, Config())
    with pytest.raises(ValueError, match="no search has come to its end"):
        report.paged(page, [], Config())


@pytest.mark.parametrize("name", MAIN)
def test_the_law_of_the_adviser_is_fitted_to_the_committed_runs(name):
    law, found = law_of_adviser(name), fitted(fitted_runs(name, read_runs(command.OUT)))
    for field, digits in (("a", 1), ("b", 2), ("c", 2), ("spread", 2), ("error", 2)):
        written, now = getattr(law, field), getattr(found, field)
        assert written == pytest.approx(now, abs=0.51 * 10**-digits)
    assert law.runs == found.runs


def test_predicted_settings_are_run_with_the_same_seeds_as_exact_and_compared():
    unseen, made = UNSEEN[0], []

    class Recorder:
        @staticmethod
        def loss(setting, seed):
            made.append({"setting": asdict(setting), "seed": seed, "bytes": 1})
            made[-1] |= {"config": asdict(unseen.config), "curve": [(4, valley(setting, seed))]}
            return valley(setting, seed)

    command.predicted(unseen, "adamw", Recorder)
    (row,) = [line for line in compared(made, LINKS).splitlines() if unseen.name in line]
    assert row.startswith(f"| {unseen.name}, rank 21 | 8 | +0.1%")
    assert row.endswith("| outside |")
    assert unseen.name not in compared([], LINKS)


def test_a_law_is_found_again():
    law = Law(0, 50.0, 0.3, 1.0, 0.0, 0.0)
    gaps = [
        Gap(width, rank, law.a * (width / 128) ** law.b / rank - law.c)
        for width in (128, 512)
        for rank in (4, 8, 16)
    ]
    found = fitted(gaps)
    assert (found.a, found.b, found.c) == pytest.approx((50.0, 0.3, 1.0), rel=1e-6)
    assert found.spread < 1e-6
