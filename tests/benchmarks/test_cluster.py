"""benchmarks.cluster: its page is that of the committed run; a small one where networks work."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster.command import EXIT_UNAVAILABLE
from benchmarks.cluster.jax_trainer import payload
from benchmarks.cluster.plan import parse_strategy
from benchmarks.cluster.report import Case, all_figures, figures_of, table
from benchmarks.cluster.task import timed_task
from benchmarks.common.paths import RESULTS
from tests.helpers import networks
from tests.helpers.paths import ROOT
from tests.helpers.script import wait_for


def command(*arguments):
    return [sys.executable, "-m", "benchmarks.cluster", *map(str, arguments)]


COMMITTED = json.loads((RESULTS / "cluster.json").read_text())["cases"]


def test_the_strategies_still_promise_what_the_committed_cases_say():
    promised = {}
    for case in COMMITTED:
        if case["framework"] == "jax":
            promised[case["strategy"]] = case["payload"]
    promised["powersgd-4-every-8"] = promised["powersgd-4"] / 8
    params = timed_task("transformer", processes=2).params
    for strategy, count in promised.items():
        assert payload(parse_strategy(strategy), params, 2) == count


def test_the_page_shows_the_committed_cases():
    assert table(all_figures(COMMITTED)) in (RESULTS / "cluster.md").read_text()


def namespaces_of(run):
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"cluster-{run.pid}-")]


TINY = ("--tiny", "--models", "mlp", "--rates", "100mbit", "--strategies", "powersgd-4")


@pytest.mark.torch
def test_a_small_run_measures_what_it_sends_or_is_refused(tmp_path):
    """In JAX; test_time_to_loss.py starts processes of both frameworks."""
    arguments = command(*TINY, "--frameworks", "jax", "--steps", 20, "--out", tmp_path)
    done = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    if not networks.work_here():
        assert done.returncode == EXIT_UNAVAILABLE
        assert "benchmarks.cluster" in done.stderr
        assert "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cluster.json").read_text())
    assert found["complete"]
    (ours,) = (Case(**case) for case in found["cases"])
    # Two factors of each of three matrices, and the biases.
    assert ours.payload == 4 * (4 * (64 + 128 + 128 + 128 + 128 + 10) + 128 + 128 + 10)
    assert len(ours.seconds) == len(ours.tx_bytes) == 2
    # Small messages: headers and acknowledgements weigh more than with the large models.
    assert ours.payload < figures_of(ours).wire < ours.payload + 6_000
    assert sum(ours.rx_bytes) == pytest.approx(sum(ours.tx_bytes), rel=0.01)
    assert table(all_figures(found["cases"])) in (tmp_path / "cluster.md").read_text()
    assert (tmp_path / "cluster.png").stat().st_size > 1_000


def processes_of(run):
    """Ids of the second host's training process: one at most, none before it has begun."""
    listed = subprocess.run(
        ["ip", "netns", "pids", f"cluster-{run.pid}-1"], capture_output=True, text=True, check=False
    )
    commands = {}
    for pid in listed.stdout.split():
        with contextlib.suppress(OSError):  # the tools that set up the network end at once
            commands[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return [pid for pid, said in commands.items() if b"python" in said.split(b"\0")[0]]


@pytest.mark.torch
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command(*TINY, "--out", tmp_path / "out"), cwd=ROOT, stderr=file)
    if networks.work_here():
        wait_for(lambda: processes_of(run), seconds=60)
        run.terminate()
        assert run.wait(60) == 130, log.read_text()
        assert "interrupted; processes and namespaces" in log.read_text()
    else:
        assert run.wait(60) == EXIT_UNAVAILABLE
    assert namespaces_of(run) == []
