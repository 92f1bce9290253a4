"""`benchmarks.optimizers`: its runs, its tables, and the adviser's law are those of the runs."""

import dataclasses
import re
from statistics import mean

import jax
import numpy as np
import pytest

import benchmarks.optimizers.__main__ as command
import jaxcomp
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import half_width
from benchmarks.convergence.models import KINDS, causal_convolution
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config, Trainer
from benchmarks.optimizers import report, tail
from benchmarks.optimizers.laws import error_from_one_rank, int8_gaps, laws, tail_laws
from benchmarks.optimizers.settings import SCALE, UNSEEN, Setting, Study, small
from jaxcomp._adviser.advise import _INT8
from jaxcomp._bytes.gap import LAWS, TAIL_LAWS

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
    assert run["bytes"] == setting.bytes_sent(TINY)


def test_the_page_shows_the_committed_runs_of_each_search_that_came_to_its_end():
    page = report.PAGE.read_text()
    runs = read_runs(command.OUT)
    assert command.paged(page, runs) == page
    with pytest.raises(ValueError, match="no search has come to its end"):
        command.paged(page, [])


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_the_adviser_is_fitted_to_the_committed_runs(name):
    law = LAWS[name]
    found = laws(read_runs(command.OUT))[name]
    for field, digits in (("a", 1), ("k", 2), ("error", 2)):
        written = getattr(law, field)
        now = getattr(found, field)
        assert written == pytest.approx(now, abs=0.51 * 10**-digits)
    assert law.runs == found.runs
    assert law.widths == found.widths
    assert law.tokens == found.tokens


def test_the_int8_all_reduce_of_the_adviser_is_that_of_its_runs():
    percents = int8_gaps(read_runs(command.OUT))
    assert abs(mean(percents)) < half_width(percents)  # nothing that could be seen
    assert 100 * _INT8.half_width == pytest.approx(half_width(percents), abs=0.05)


def test_the_law_is_compared_with_every_run_that_it_has_not_seen(capsys):
    assert command.main(["--law"]) == 0
    printed = capsys.readouterr().out
    for name in ("over links", *(study.name for study in UNSEEN)):
        assert re.search(rf"^\| {name}, .*side \|$", printed, re.MULTILINE)


@pytest.mark.parametrize("name", TAIL_LAWS)
def test_the_law_of_the_tail_is_fitted_to_the_committed_runs(name):
    law = TAIL_LAWS[name]
    fitted = tail_laws(read_runs(command.OUT), read_runs(tail.OUT))[name]
    assert law.ranks == fitted.ranks
    assert law.tails == pytest.approx(fitted.tails, abs=0.00051)
    assert law.c == pytest.approx(fitted.c, abs=0.051)
    assert law.power == pytest.approx(fitted.power, abs=0.0051)
    assert law.error == pytest.approx(fitted.error, abs=0.0051)


def test_the_error_of_a_law_through_a_measured_gap_is_that_of_its_predictions():
    error = error_from_one_rank(read_runs(command.OUT), read_runs(tail.OUT))
    assert TAIL_LAWS["adamw"].through(tail=0.2, gap=0.01).error == pytest.approx(error, abs=0.0051)


@pytest.fixture
def standard_promotion():
    """Promotes as Optax needs it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_a_tail_is_what_predict_gap_reads_and_is_read_once(tmp_path, capsys):
    config = dataclasses.replace(TINY, steps=8)
    study = Study("adamw", "tiny", config, ((1e-3, None),), ({"rank": 2, "wire": "int6"},), 1)
    path = tmp_path / "tails.jsonl"
    exact = Setting("adamw", 1e-3)
    runs = Runs(tmp_path / "runs.jsonl", config, Setting, "benchmarks.optimizers")
    for _ in range(2):
        tail.measure(runs, study, exact, path)
    assert capsys.readouterr().out.startswith("tiny: ")
    (row,) = read_runs(path)
    assert list(row["tails"]) == ["1", "2", "3", "4"]
    trainer = runs.trainer(exact)
    carry = trainer.start(0)
    for step in range(4):
        carry = trainer.advance(carry, 0, step, step + 1)
    expected = jaxcomp.predict_gap(carry[1], 2).tail
    assert row["tails"]["4"]["2"] == pytest.approx(expected, abs=1e-3)
    several = [row["tails"][step]["2"] for step in ("2", "3", "4")]
    assert tail.find(study, [row]) == {"2": pytest.approx(mean(several))}


@pytest.mark.usefixtures("standard_promotion")
def test_one_program_serves_every_rate(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl", TINY, Setting, "benchmarks.optimizers")
    rates = (1e-3, 1e-2)
    both = [runs.trainer(Setting("adamw", rate)) for rate in rates]
    assert both[0] is both[1]
    losses = [runs.loss(Setting("adamw", rate), 0) for rate in rates]
    alone = Trainer(TINY, Setting("adamw", 1e-2).build(TINY)).run(0)[-1][1]
    assert losses[1] == alone != losses[0]


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_with_the_same_rank_first_is_the_run_without(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl", TINY, Setting, "benchmarks.optimizers")
    whole = Setting("adamw", 1e-2, rank=2)
    joined = dataclasses.replace(whole, exact_steps=TINY.eval_every, first_rank=2)
    assert runs.loss(joined, 0) == pytest.approx(runs.loss(whole, 0), abs=1e-4)
    assert joined.bytes_sent(TINY) == whole.bytes_sent(TINY)
    higher = dataclasses.replace(joined, first_rank=4)
    assert higher.sent == "rank 2 after 2 steps of rank 4"
    assert higher.bytes_sent(TINY) > whole.bytes_sent(TINY)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_learns(kind):
    config = dataclasses.replace(TINY, kind=kind, steps=40, eval_every=20)
    with jax.numpy_dtype_promotion("standard"):
        curve = Trainer(config, Setting("adamw", 1e-2).build(config)).run(0)
    assert curve[1][1] < curve[0][1] < 5.8


def test_a_convolution_sees_only_the_past():
    x = jax.random.normal(jax.random.key(0), (2, 16, 8))
    kernel = jax.random.normal(jax.random.key(1), (4, 8, 6))
    y = causal_convolution(x, kernel, dilation=2)
    options = {"padding": [(6, 0)], "rhs_dilation": (2,)}
    names = ("NWC", "WIO", "NWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (1,), dimension_numbers=names, **options)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.usefixtures("standard_promotion")
def test_the_two_larger_models_go_on_where_they_stopped(tmp_path, capsys):
    study = small(SCALE[0])
    out = tmp_path / "runs.jsonl"
    tails = tmp_path / "tails.jsonl"
    command.make(study, out, tails)
    runs = read_runs(out)
    assert [run["setting"]["rank"] for run in runs] == [0, 0, 0, 2]
    assert len(read_runs(tails)) == 1
    assert "rank 2 has a tail of" in capsys.readouterr().out
    command.make(study, out, tails)
    assert read_runs(out) == runs
