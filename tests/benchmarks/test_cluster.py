"""benchmarks.cluster: arithmetic, refusals, and a small run where the machine allows it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import networks
import pytest
from paths import ROOT

import benchmarks.cluster.__main__ as cluster
from benchmarks.cluster.jax_trainer import payload
from benchmarks.cluster.plan import parse_rate, parse_strategy, sample_count
from benchmarks.cluster.report import Case, all_figures, compare, figures_of, table
from benchmarks.common.paths import RESULTS


def command(*arguments):
    return [sys.executable, "-m", "benchmarks.cluster", *map(str, arguments)]


COMMITTED = [Case(**x) for x in json.loads((RESULTS / "cluster.json").read_text())["cases"]]


def case(strategy, framework, *medians, **changes):
    """As the first that is committed, of such times."""
    fields = {"strategy": strategy, "framework": framework, "seconds": [[x] for x in medians]}
    return replace(COMMITTED[0], **{"steps_per_sample": 1, **fields, **changes})


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [
        ("unlimited", None, "unlimited"),
        ("1gbit", 1e9, "1 Gbit/s"),
        ("2.5MBit", 2.5e6, "2.5 Mbit/s"),
        ("64kbit", 64e3, "64 kbit/s"),
    ],
)
def test_rates(text, bits, shown):
    assert (parse_rate(text).bits_per_second, parse_rate(text).shown) == (bits, shown)


# What is averaged, with which number, in which dtype; the steps of a round; whether torch has it.
STRATEGIES = {
    "none": ("none", 0, None, 1, True),
    "fp16": ("fp16", 0, None, 1, True),
    "int8": ("int8", 0, None, 1, False),
    "powersgd-16": ("powersgd", 16, None, 1, True),
    "powersgd-2-fp16": ("powersgd", 2, "float16", 1, False),
    "powersgd-4-int8": ("powersgd", 4, "int8", 1, False),
    "powersgd-4-int6-every-8": ("powersgd", 4, "int6", 8, False),
    "local-sgd-8": ("local-sgd", 8, None, 8, True),
    "streaming-8": ("streaming", 8, None, 8, False),
}


def test_strategies():
    for text, expected in STRATEGIES.items():
        found = parse_strategy(text)
        said = found.kind, found.number, found.comm_dtype, found.round_steps, found.runs_in("torch")
        assert (found.name, said) == (text, expected)


def test_a_round_promises_a_part_of_what_its_reducer_sends():
    params = {"w": jnp.zeros((64, 32))}
    each, rare = (parse_strategy(x) for x in ("powersgd-4-int6", "powersgd-4-int6-every-8"))
    assert payload(rare, params, 2) == payload(each, params, 2) / 8
    assert payload(parse_strategy("local-sgd-8"), params, 2) == 4 * 64 * 32 / 8


def test_figures_are_per_step_and_over_all_processes():
    sent = {"steps_per_sample": 8, "tx_bytes": [16_000, 32_000], "payload": 1_400.0}
    seconds = [[0.8, 1.6], [1.6, 2.4]]
    figures = figures_of(case("local-sgd-8", "jax", **sent, seconds=seconds))
    assert figures.median == pytest.approx(0.2)
    assert (figures.low, figures.high) == (pytest.approx(0.13), pytest.approx(0.27))
    assert figures.wire == 1_500
    assert figures.promised == 1_400


def test_ratios():
    times = {("none", "jax"): 0.04, ("none", "torch"): 0.06, ("allreduce", "jax"): 0.44}
    times |= {("powersgd-4", "jax"): 0.05, ("powersgd-4", "torch"): 0.21}
    figures = all_figures([case(*name, seconds) for name, seconds in times.items()])
    at = COMMITTED[0].model, COMMITTED[0].rate, "powersgd-4"
    found, torch = (compare(figures, (*at, framework)) for framework in ("jax", "torch"))
    assert (found.to_alone, torch.to_alone) == (pytest.approx(1.25), pytest.approx(3.5))
    assert found.over_allreduce == pytest.approx(8.8)
    assert found.over_torch == pytest.approx(4.2)
    assert found.overhead == pytest.approx(0.01)
    assert found.overhead_of_torch == pytest.approx(0.01 / 0.15)
    assert torch.over_allreduce is torch.over_torch is None


def test_the_page_shows_the_committed_cases():
    assert table(all_figures(COMMITTED)) in (RESULTS / "cluster.md").read_text()


def namespaces_of(run):
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"cluster-{run.pid}-")]


TINY = ("--tiny", "--models", "mlp", "--rates", "100mbit", "--strategies", "powersgd-4")


@pytest.mark.torch
def test_a_small_run_measures_both_frameworks_or_is_refused(tmp_path):
    arguments = command(*TINY, "--steps", 20, "--out", tmp_path)
    done = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    if not networks.work_here():
        assert done.returncode == cluster.EXIT_UNAVAILABLE
        assert "benchmarks.cluster" in done.stderr
        assert "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cluster.json").read_text())
    assert found["complete"]
    assert [c["framework"] for c in found["cases"]] == ["jax", "torch"]
    ours, torch = (Case(**c) for c in found["cases"])
    # Two factors of each of three matrices, and the biases.
    assert ours.payload == 4 * (4 * (64 + 128 + 128 + 128 + 128 + 10) + 128 + 128 + 10)
    assert sample_count(32.0, budget=3.0, most=40) == 2  # of a slow case, but never one
    for one in (ours, torch):
        assert len(one.seconds) == len(one.tx_bytes) == 2
        # Small messages: headers and acknowledgements weigh more than with the large models.
        sent = figures_of(one).wire
        assert ours.payload < sent < ours.payload + 6_000
        assert sum(one.rx_bytes) == pytest.approx(sum(one.tx_bytes), rel=0.01)
    assert found["settings"]["environment"]["OMP_NUM_THREADS"] == "1"
    assert "#### mlp, 100mbit" in (tmp_path / "cluster.md").read_text()
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


def kill_a_process_of(run):
    os.kill(processes_of(run)[0], signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (lambda run: run.send_signal(signal.SIGINT), 130, "interrupted; processes and namespaces"),
        (lambda run: run.send_signal(signal.SIGTERM), 130, "interrupted; processes and namespaces"),
        (kill_a_process_of, cluster.EXIT_FAILED, "jax mlp, process 1: it ended"),
    ],
    ids=["interrupted", "terminated", "a process dies"],
)
def test_a_run_that_ends_early_leaves_nothing_behind(tmp_path, end, code, message):
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command(*TINY, "--out", tmp_path / "out"), cwd=ROOT, stderr=file)
    if networks.work_here():
        wait_for(lambda: processes_of(run))
        end(run)
        assert run.wait(60) == code, log.read_text()
        assert message in log.read_text()
    else:
        assert run.wait(60) == cluster.EXIT_UNAVAILABLE
    assert namespaces_of(run) == []


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
