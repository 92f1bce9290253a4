"""benchmarks.cluster: arithmetic, refusals, and a small run where the machine allows it."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from paths import ROOT

import benchmarks.cluster.__main__ as cluster
from benchmarks.cluster.jax_trainer import payload
from benchmarks.cluster.net import Network, NetworkUnavailable, check_available
from benchmarks.cluster.plan import (
    counts_as_sample,
    parse_rate,
    parse_strategy,
    ring_factor,
    sample_count,
)
from benchmarks.cluster.report import Case, all_figures, compare, conditions, figures_of, table
from benchmarks.common.models import FULL, MLP, make_batches


def command(*arguments):
    return [sys.executable, "-m", "benchmarks.cluster", *map(str, arguments)]


def run(*arguments, **options):
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


def case(strategy="none", framework="jax", seconds=((0.1, 0.1),), **changes):
    fields = {
        "framework": framework,
        "model": "mlp",
        "rate": "1gbit",
        "strategy": strategy,
        "steps_per_sample": 1,
        "seconds": [list(times) for times in seconds],
        "tx_bytes": [0 for _ in seconds],
        "rx_bytes": [0 for _ in seconds],
        "payload": None,
        "loss": 1.0,
    }
    return Case(**{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "bits"),
    [("unlimited", None), ("1gbit", 1e9), ("100MBit", 1e8), ("2.5mbit", 2.5e6), ("64kbit", 64e3)],
)
def test_rates(text, bits):
    assert parse_rate(text).bits_per_second == bits


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("unlimited", "unlimited"),
        ("1gbit", "1 Gbit/s"),
        ("2.5mbit", "2.5 Mbit/s"),
        ("64kbit", "64 kbit/s"),
        ("0.5kbit", "0.5 kbit/s"),
    ],
)
def test_rates_as_people_write_them(text, shown):
    assert parse_rate(text).shown == shown


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1mbit", "1gbps", "nan mbit"])
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match=r"`--rates` takes 'unlimited' or a rate such as 100mbit"):
        parse_rate(text)


def test_bursts_stay_below_what_lets_messages_through_for_free():
    assert parse_rate("10mbit").burst == 16_384
    assert parse_rate("1gbit").burst == 32_000
    assert parse_rate("100gbit").burst == 65_536


def test_strategies():
    powersgd, rounds = parse_strategy("powersgd-16"), parse_strategy("local-sgd-8")
    assert (powersgd.kind, powersgd.number, powersgd.round_steps) == ("powersgd", 16, 1)
    assert (rounds.kind, rounds.number, rounds.round_steps) == ("local-sgd", 8, 8)
    streaming = parse_strategy("streaming-8")
    assert (streaming.name, streaming.round_steps) == ("streaming-8", 8)
    assert not streaming.runs_in("torch")
    rare = parse_strategy("powersgd-4-int6-every-8")
    assert (rare.name, rare.number, rare.comm_dtype) == ("powersgd-4-int6-every-8", 4, "int6")
    assert (rare.round_steps, rare.in_rounds) == (8, True)
    assert not parse_strategy("powersgd-4-every-2").runs_in("torch")
    assert parse_strategy("local-sgd-1").in_rounds
    assert not parse_strategy("powersgd-4-every-1").in_rounds
    assert not parse_strategy("int8").runs_in("torch")
    narrow = parse_strategy("powersgd-4-int8")
    assert (narrow.name, narrow.number, narrow.comm_dtype) == ("powersgd-4-int8", 4, "int8")
    assert powersgd.comm_dtype is None
    assert parse_strategy("powersgd-2-fp16").comm_dtype == "float16"
    assert not narrow.runs_in("torch")
    assert all(parse_strategy(s).runs_in("torch") for s in ("none", "fp16", "local-sgd-2"))


def test_a_round_promises_a_part_of_what_its_reducer_sends():
    params = {"w": jnp.zeros((64, 32))}
    each, rare = (parse_strategy(x) for x in ("powersgd-4-int6", "powersgd-4-int6-every-8"))
    assert payload(rare, params, 2) == payload(each, params, 2) / 8
    assert payload(parse_strategy("local-sgd-8"), params, 2) == 4 * 64 * 32 / 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "powersgd",
        "powersgd-0",
        "powersgd-x",
        "none-1",
        "zip",
        "local-sgd-4-every-8",
        "powersgd-4-every-0",
    ],
)
def test_what_is_no_strategy(text):
    with pytest.raises(ValueError, match=r"`--strategies` has no .*powersgd-N \(N: rank\)"):
        parse_strategy(text)


def test_ring_factor():
    assert [ring_factor(n) for n in (1, 2, 4)] == [0.0, 1.0, 1.5]


def test_slow_cases_take_fewer_steps_but_never_one():
    assert sample_count(0.01, budget=3.0, most=40) == 40
    assert sample_count(0.3, budget=3.0, most=40) == 10
    assert sample_count(32.0, budget=3.0, most=40) == 2
    assert sample_count(0.01, budget=3.0, most=0) == 2
    assert counts_as_sample(32.0, budget=3.0)
    assert not counts_as_sample(0.3, budget=3.0)


def test_figures_are_per_step_and_over_all_processes():
    figures = figures_of(
        case(
            "local-sgd-8",
            seconds=[[0.8, 1.6], [1.6, 2.4]],
            steps_per_sample=8,
            tx_bytes=[16_000, 32_000],
            payload=1_400.0,
        )
    )
    assert figures.median == pytest.approx(0.2)
    assert (figures.low, figures.high) == (pytest.approx(0.13), pytest.approx(0.27))
    assert figures.wire == 1_500
    assert figures.promised == 1_400


def test_promised_bytes_of_four_processes_are_those_of_a_ring():
    assert figures_of(case(seconds=[[1.0]] * 4, payload=1_000.0)).promised == 1_500


def test_ratios():
    figures = all_figures(
        [
            case("none", "jax", [[0.04]]),
            case("none", "torch", [[0.06]]),
            case("allreduce", "jax", [[0.44]]),
            case("powersgd-4", "jax", [[0.05]]),
            case("powersgd-4", "torch", [[0.21]]),
        ]
    )
    found = compare(figures, ("mlp", "1gbit", "powersgd-4", "jax"))
    assert found.to_alone == pytest.approx(1.25)
    assert found.over_allreduce == pytest.approx(8.8)
    assert found.over_torch == pytest.approx(4.2)
    assert found.overhead == pytest.approx(0.01)
    assert found.overhead_of_torch == pytest.approx(0.01 / 0.15)

    torch = compare(figures, ("mlp", "1gbit", "powersgd-4", "torch"))
    assert torch.to_alone == pytest.approx(3.5)
    assert torch.over_allreduce is None
    assert torch.over_torch is None
    lines = table(figures).splitlines()
    assert "| powersgd-4 | 50.0 / 210.0 |" in lines
    assert "| allreduce | 440.0 / - |" in lines
    assert "#### mlp, 1gbit" in lines
    row = "| powersgd-4 | jax | 50.0 | 50.0 to 50.0 | 1.25 | 8.80 | 4.20 | 10.0 | 0.07 | 0.0 |  |"
    assert row in lines


def test_a_run_that_ended_early_says_so_in_its_report():
    machine = {"cpu": "A CPU", "cores": 2, "kernel": "6.1", "versions": {}}
    machine["busy_cores_at_start"] = 0.01
    described = {"command": "c", "date": "d", "machine": machine, "settings": {"processes": 2}}
    assert "cases are missing" in conditions({**described, "complete": False})
    assert "missing" not in conditions({**described, "complete": True})
    busy = {**described, "complete": True, "machine": {**machine, "busy_cores_at_start": 1.5}}
    assert "1.50 cores busy at the start: **these are no results.**" in conditions(busy)


def test_an_overhead_below_the_noise_gives_no_ratio():
    figures = all_figures(
        [
            case("none", "jax", [[0.04]]),
            case("none", "torch", [[0.06]]),
            case("fp16", "jax", [[0.05]]),
            case("fp16", "torch", [[0.059]]),
        ]
    )
    assert compare(figures, ("mlp", "1gbit", "fp16", "jax")).overhead_of_torch is None


def test_the_models_have_ten_million_parameters_and_every_process_other_data():
    widths = FULL["mlp"].widths
    assert sum(a * b + b for a, b in itertools.pairwise(widths)) == 10_020_874
    assert isinstance(FULL["mlp"], MLP)
    (x, y), (other, _) = (make_batches(FULL["mlp"], i)[0] for i in (0, 1))
    assert x.shape == (32, 784)
    assert y.shape == (32,)
    assert (x != other).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "fast"], "`--rates` takes 'unlimited' or a rate such as 100mbit"),
        (["--rates", ","], "`--rates` is empty"),
        (["--strategies", "powersgd"], "`--strategies` has no 'powersgd'"),
        (["--models", "resnet"], "`--models` has no 'resnet'; there are mlp, transformer"),
        (["--frameworks", "mpi"], "`--frameworks` has no 'mpi'; there are jax, torch"),
        (["--processes", "1"], "`--processes` must be at least 2, got 1"),
        (["--steps", "1"], "`--steps` must be at least 2, got 1"),
        (["--seconds-per-case", "nan"], "`--seconds-per-case` must be at least 0.1, got nan"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cluster.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_root_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster.main(["--out", str(tmp_path / "out")]) == cluster.EXIT_UNAVAILABLE
    assert "needs root on Linux: run it with sudo" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_iproute2_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster.main([]) == cluster.EXIT_UNAVAILABLE
    message = capsys.readouterr().err
    assert "apt-get install iproute2 util-linux" in message


def test_help_has_an_example_and_the_limits():
    said = run("--help").stdout
    assert "sudo python -m benchmarks.cluster --rates 1gbit" in said
    assert "no added delay" in said


def networks_work_here():
    """Whether this machine has shaped networks: root alone does not say so."""
    try:
        check_available()
        with Network(1) as network:
            network.shape(parse_rate("100mbit"))
    except NetworkUnavailable:
        return False
    return True


def namespaces_of(run):
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"cluster-{run.pid}-")]


TINY = ("--tiny", "--models", "mlp", "--rates", "100mbit", "--strategies", "powersgd-4")


@pytest.mark.torch
def test_a_small_run_measures_both_frameworks_or_is_refused(tmp_path):
    done = run(*TINY, "--steps", 20, "--out", tmp_path)
    if not networks_work_here():
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
    if networks_work_here():
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
