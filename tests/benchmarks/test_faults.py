"""benchmarks.faults: what counts as lost, as silent and as wrong, and how the table says so."""

import pytest

import benchmarks.faults.__main__ as faults
from benchmarks.faults import report
from benchmarks.faults.job import SAID, STACK_TRACE
from benchmarks.faults.runs import Disturbed, Fault, compared, joined

NEWEST, BEFORE, OTHER = (20, {"w": "a"}), (10, {"w": "b"}), (20, {"w": "c"})
SENTENCE = "the checkpoint 20 is not used: it is damaged: state/w/0 is not what was saved"


@pytest.mark.parametrize(
    ("found", "passed_over", "outcome"),
    [
        (BEFORE, [SENTENCE], "passed over"),
        (BEFORE, ["the checkpoint 20 is not used: why?"], "passed over, file unnamed"),
        (NEWEST, [], "harmless"),
        (OTHER, [], "silent"),
        (OTHER, [SENTENCE], "silent"),
        (None, ["ValueError: no"], "lost"),
    ],
)
def test_a_flip_is_silent_if_other_values_are_used(found, passed_over, outcome):
    from benchmarks.faults import flips

    assert flips.outcome(found, passed_over, NEWEST, BEFORE, "state/w/0") == outcome


def fault(**changed):
    values = {"moment": "training", "saved": 20, "codes": [75, -9], "seconds": 1.5, "left": 20}
    return Fault(**(values | {"wrong": [], "resumed": 20} | changed))


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({}, False),
        ({"left": 30, "resumed": 30}, False),  # one more was completed on the way out
        ({"resumed": None}, False),  # struck again before it began
        ({"left": 10, "resumed": 10}, True),  # deleted
        ({"resumed": 10}, True),  # there, and not used
    ],
)
def test_what_was_saved_and_is_not_used_is_lost(changed, lost):
    assert report.lost(vars(fault(**changed))) == lost


def results(tmp_path, *curves, **changed):
    plain = tmp_path / "curve.jsonl"
    plain.write_text('{"config": {}}\n{"step": 10, "loss": 3.5}\n'
                     '{"step": 20, "loss": 3.25, "held_out": 3.125}\n')  # fmt: skip
    found = Disturbed([fault(**changed), fault(moment="saving")], list(curves), {8})
    machine = {"cpu": "a processor", "cores": 2, "kernel": "6", "versions": {"jax": "1"}}
    about = {"command": "python -m benchmarks.faults", "date": "today", "machine": machine}
    return about | {"processes": 2, "steps": 20} | compared(plain, found)


WHOLE = {10: [3.5, None], 20: [3.25, 3.125]}


def test_every_loss_after_every_start_is_compared_in_every_digit(tmp_path):
    same = results(tmp_path, {10: [3.5, None]}, WHOLE)
    assert (same["compared"], same["different"], same["held_out"]) == (3, 0, [3.125, 3.125])
    assert report.good(same)
    other = results(tmp_path, {10: [3.5000000000000004, None]}, WHOLE)
    assert (other["compared"], other["different"]) == (3, 1)
    assert not report.good(other)
    assert not report.good(results(tmp_path, {10: [3.5, None]}))  # never came to its end


def test_runs_that_ended_before_the_last_fault_count_as_one(tmp_path):
    first, second = results(tmp_path, WHOLE), results(tmp_path, {10: [3.0, None]}, WHOLE)
    both = joined([first, second])
    assert len(both["faults"]) == 4
    assert (both["compared"], both["different"]) == (2 + 3, 1)
    assert both["stopped"] == [8, 8]
    assert joined([results(tmp_path, {10: [3.5, None]}), first])["held_out"] == [3.125, None]


@pytest.mark.parametrize("changed", [{"resumed": 10}, {"wrong": ["process 0 ended with 1"]}])
def test_what_is_lost_or_wrong_is_not_good(tmp_path, changed):
    assert not report.good(results(tmp_path, WHOLE, **changed))


def test_the_table_says_what_was_seen(tmp_path):
    kills = results(tmp_path, WHOLE, seconds=2.5, resumed=10)
    flips = [{"file": ".zarray", "outcome": "passed over"}, {"file": "x", "outcome": "harmless"}]
    text = report.table({"kills": kills, "flips": results(tmp_path, WHOLE) | {"flips": flips}})
    row = "| SIGKILL to one process | 2 | 0 / 1 | 1 | 2.5 | -9: 2, 75: 2 | 0 | 2 | 0 | 3.125 |"
    assert f"{row} 3.125 |" in text.splitlines()
    assert "| all | 1 | 0 | 1 | 0 | 0 |" in text.splitlines()
    where = "`python -m benchmarks.faults`, today, 2 processes, 20 steps. a processor, 2 cores"
    assert text.count(where) == 1  # the same for both


def test_the_page_shows_the_table_of_the_results():
    page = report.PAGE.read_text()
    assert report.paged(page, faults.saved()) == page, "python -m benchmarks.faults --report"


def test_what_processes_say_is_told_from_what_they_spill():
    assert SAID.search("process 1: lost contact with another process; start again (...)")
    assert SAID.search("process 0: error: the checkpoint of step 3 could not be written, and ...")
    assert not SAID.search("process 0: error: out of memory")
    for spilled in (
        "Traceback (most recent call last):\n",
        "*** SIGABRT received",
        "    @     0x7",
    ):
        assert STACK_TRACE.search("note: x\n" + spilled)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fires"], "there is no 'fires'; choose of kills, terms"),
        (["kills", "--count", "0"], "`--count` must be at least 1, got 0"),
        (["--processes", "1"], "`--processes` must be at least 2, got 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        faults.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
