"""`benchmarks.optimizers`: its runs, its tables, and the adviser's law are those of the runs."""

import jax
import pytest

import benchmarks.optimizers.__main__ as command
from benchmarks.common.runs import read_runs
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.optimizers import report
from benchmarks.optimizers.law import laws
from benchmarks.optimizers.settings import UNSEEN, Setting
from jaxcomp._bytes.gap import LAWS

SIZES = {"replicas": 2, "batch_size": 1, "layers": 1, "width": 16, "heads": 2, "context": 8}
TINY = Config(steps=4, eval_every=2, eval_sequences=64, **SIZES)


def test_finished_runs_are_not_made_again(tmp_path, capsys):
    setting = Setting("muon", 1e-3, 0.8, ratio=3.0, wire="int6")
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
    assert report.paged(page, runs) == page
    with pytest.raises(ValueError, match="no search has come to its end"):
        report.paged(page, [])


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_the_adviser_is_fitted_to_the_committed_runs(name):
    law, found = LAWS[name], laws(read_runs(command.OUT))[name]
    for field, digits in (("a", 1), ("k", 2), ("spread", 2)):
        written, now = getattr(law, field), getattr(found, field)
        assert written == pytest.approx(now, abs=0.51 * 10**-digits)
    assert (law.runs, law.widths, law.tokens) == (found.runs, found.widths, found.tokens)


def test_the_page_shows_the_runs_that_the_law_predicted(capsys):
    assert command.main(["--law"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("side |")]
    shown = [row.rpartition(" | ")[0] for row in rows if "over links" not in row]
    assert all(any(row.startswith(f"| {study.name}, ") for row in shown) for study in UNSEEN)
    assert len(UNSEEN) <= len(shown) < len(rows)
    assert all(row in report.PAGE.read_text() for row in shown)
