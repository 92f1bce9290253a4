"""The study of what does not converge: its table, and that no run is made twice.

What it is about is tested in tests/jaxcomp/reducers/test_counterexample.py.
"""

import pytest

import benchmarks.counterexample.__main__ as counterexample
from benchmarks.common.runs import append_run, read_runs
from benchmarks.counterexample import report
from benchmarks.counterexample.cases import CASES

ABOUT = {"date": "2026-11-22 08:00 UTC", "machine": {"cpu": "a processor", "versions": {}}}


def run(case, setting, seed, loss):
    return {"case": case, "setting": setting, "seed": seed, "loss": loss, "about": ABOUT}


def test_the_table_compares_with_the_default_of_the_same_seed():
    runs = [run("default", "apart", 0, 1.0), run("cold", "apart", 0, 2e-5)]
    for seed, (warm, cold) in enumerate([(2.0, 2.02), (4.0, 4.12)]):
        runs += [run("default", "r16-int8", seed, warm), run("cold", "r16-int8", seed, cold)]
    runs.append(run("cold", "r16-int8", 7, 1.0))  # without a default beside it
    page = "a\n<!-- python -m benchmarks.counterexample --report -->\nold\n<!-- end -->\nb\n"
    text = report.paged(page, runs)
    assert "old" not in text
    assert "| PowerSGD | 1e+00 |  |  | 3.000 |  |" in text
    assert "| `warm_start=False` | 2e-05 |  |  | +2.00% ± 1.41 |  |" in text
    assert "7 runs, 2026-11-22, a processor" in text
    with pytest.raises(ValueError, match="no finished runs"):
        report.paged(page, [])


def test_finished_runs_are_not_made_again(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    for name, case in CASES.items():
        for setting in (*counterexample.PROBLEMS, *(counterexample.MODELS if case.train else ())):
            append_run(path, run(name, setting, 0, 1.0))
    written = path.read_text()
    assert counterexample.main(["--out", str(path), "--seeds", "1"]) == 0
    assert path.read_text() == written
    assert not capsys.readouterr().out


def test_the_page_shows_the_table_of_the_results():
    page = report.PAGE.read_text()
    assert report.paged(page, read_runs(counterexample.OUT)) == page


def test_wrong_arguments_are_one_sentence(capsys):
    with pytest.raises(SystemExit) as stopped:
        counterexample.main(["--seeds", "0"])
    assert stopped.value.code == 2
    assert "`--seeds` must be at least 1" in capsys.readouterr().err
