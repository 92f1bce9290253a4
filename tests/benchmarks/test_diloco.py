"""The study of DiLoCo: what it searches, what it sends, and that no run is made twice."""

from dataclasses import asdict, replace

import jax
import pytest

import benchmarks.diloco.__main__ as diloco
from benchmarks.common.runs import read_runs
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.diloco import report
from benchmarks.diloco.settings import LINES, Setting, in_longer, longer, parallel, search

TINY = Config(4, 2, 2, 2, 1, 32, 2, 16, eval_sequences=64)


def valley(setting, seed):
    """A loss that is least where some of the lines lead, and nowhere else."""
    if not setting.local:
        return 2.0 + abs(setting.rate - 1e-3) + seed
    away = abs(setting.outer_rate - 0.7) + abs(setting.outer_momentum - 0.4)
    return 2.1 + away + abs(setting.rate - 4e-3) + setting.average_inner - 0.1 * setting.start


def test_each_line_begins_at_the_best_of_the_one_before():
    assert parallel("muon", valley) == Setting("muon", 1e-3, every=1)
    steps = list(search("muon", valley))
    assert len(steps) == len(LINES)
    assert steps[0][0] == Setting("muon", 1e-3)
    assert [after for _, after in steps[:-1]] == [before for before, _ in steps[1:]]
    assert steps[-1][1] == Setting("muon", 4e-3, 30, 0.7, 0.4, False, 0.5)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_rounds_send_the_model_once_and_a_start_sends_it_in_every_step(inner):
    config = replace(TINY, steps=8)
    exact = Setting(inner, every=1).bytes_sent(config)
    assert len(set(exact)) == 1
    assert Setting(inner, every=4).bytes_sent(config) == [0, 0, 0, exact[0]] * 2
    started = Setting(inner, every=2, start=0.5).bytes_sent(config)
    assert started == [exact[0]] * 4 + [0, exact[0]] * 2
    narrow = Setting(inner, every=4, int8=True).bytes_sent(config)
    assert 0 < narrow[3] < 0.3 * exact[0]


def test_finished_runs_are_not_made_again(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    setting = Setting("muon", every=2, outer_rate=1.0, outer_momentum=0.0, start=0.5)
    with jax.numpy_dtype_promotion("standard"):  # what optax.contrib.muon needs
        loss = Runs(path, TINY, Setting, "benchmarks.diloco").loss(setting, 0)
    assert 3 < loss < 8
    assert capsys.readouterr().out.startswith("H=2, average, rate 0.002, after 50% data")
    assert Runs(path, TINY, Setting, "benchmarks.diloco").loss(setting, 0) == loss
    (run,) = read_runs(path)
    assert run["bytes"] == sum(setting.bytes_sent(TINY))
    assert not capsys.readouterr().out


def test_the_table_has_the_chosen_beside_data_parallel_and_every_line():
    made, runs = dict[tuple[Setting, int], float](), []
    made_later = dict[tuple[Setting, int], float]()

    def loss(setting, seed):
        made[setting, seed] = valley(setting, seed)
        return made[setting, seed]

    for inner in ("adamw", "muon"):
        best = list(search(inner, loss))[-1][1]
        exact = parallel(inner, loss)
        for setting in (exact, best, replace(best, int8=True), replace(best, every=8)):
            for seed in (0, 1):
                loss(setting, seed)
        later = [(setting, 0) for setting in (exact, *in_longer(best))]
        made_later |= {(setting, seed): valley(setting, seed) - 0.5 for setting, seed in later}
    about = {"date": "2026-11-22 08:00 UTC", "machine": {"cpu": "a processor", "versions": {}}}
    for config, finished in ((TINY, made), (longer(TINY), made_later)):
        for (setting, seed), value in finished.items():
            run = {"setting": asdict(setting), "seed": seed, "curve": [[2, 3.0], [4, value]]}
            run |= {"bytes": sum(setting.bytes_sent(config)) or 1, "about": about}
            runs.append(run | {"config": asdict(config)})
    page = "before\n<!-- python -m benchmarks.diloco --report -->\nold\n<!-- end -->\nafter\n"
    text = report.paged(page, runs, TINY)
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "after 25% data parallel, 16 steps | 1 |" in text
    chosen = [line for line in text.splitlines() if "after 50% data parallel |" in line]
    assert "| 2 | 2.050 ± 0.000 | -14.6% ± 24.2 | 2.0x |" in chosen[0]
    assert sum("AdamW: " in line for line in text.splitlines()) == len(LINES)
    assert "H=8" in text
    assert "a processor" in text
    one = report.paged(page, [run for run in runs if run["setting"]["inner"] == "muon"], TINY)
    assert "Muon: moments" in one
    assert "AdamW" not in one
    with pytest.raises(ValueError, match="no search has come to its end"):
        report.paged(page, runs[:5], TINY)


def test_the_page_shows_the_tables_of_the_results():
    page = report.PAGE.read_text()
    assert report.paged(page, read_runs(diloco.OUT), Config()) == page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--steps", "100"], "multiple of 60"), (["--seeds", "0"], "`--seeds` must be at least 1")],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        diloco.main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
