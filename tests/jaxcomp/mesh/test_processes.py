"""Real processes: training over gloo, a process that dies, a restart on another number of them."""

import os
import re
import signal
import socket
import sys
import time

import jax
import numpy as np
import pytest
import train_multihost

import jaxcomp
from benchmarks.faults.job import AGAIN, MODEL, SAID, Job, complete, free_port, held_out

STEPS = 16
ARGUMENTS = [*MODEL, "--eval-every", "8"]


@pytest.fixture(autouse=True)
def handlers():
    """As they were: the script, which some tests run in this process, takes signals over."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Held-out losses of this process alone with four devices, from the start to the end."""
    log = tmp_path_factory.mktemp("plain") / "curve.jsonl"
    command = [*ARGUMENTS, "--log", str(log), "--steps", str(STEPS)]
    arguments = train_multihost.command_line().parse_args(command)
    with jax.numpy_dtype_promotion("standard"):
        train_multihost.train(arguments, jax.devices()[:4])
    return held_out(log)


def assert_same_curve(log, expected):
    curve = held_out(log)
    assert set(curve) == set(expected)
    np.testing.assert_allclose(list(curve.values()), [expected[step] for step in curve], rtol=2e-5)


def open_mpi(process, processes):
    """What mpirun sets; JAX derives the coordinator's port from the number of the job."""
    number = (free_port(61440) - 61440) * 4096
    return {
        "OMPI_MCA_orte_hnp_uri": f"{number}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


def test_a_dead_process_ends_the_others_and_a_restart_continues(tmp_path, uninterrupted):
    """In the restart Open MPI says who the others are."""
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "curve.jsonl"
    checkpoints.mkdir()
    arguments = [*ARGUMENTS, "--log", log, "--checkpoint-dir", checkpoints, "--resume"]
    arguments += ["--checkpoint-every", "2", "--heartbeat-timeout", "10", "--steps"]
    job = Job(3, tmp_path, *arguments, STEPS)
    end = time.monotonic() + 150
    job.wait_until(lambda: complete(checkpoints) > 0 or time.monotonic() > end)
    assert complete(checkpoints), job.said()
    job.kill(1)
    codes = job.wait(60)
    for i in (0, 2):
        assert codes[i] == AGAIN
        assert SAID.search(job.said(i)), job.said(i)

    saved = complete(checkpoints)
    assert saved < STEPS
    environment = [open_mpi(i, 2) for i in range(2)]
    arguments += [STEPS, "--check-every", 5, "--local-devices", 2]
    job = Job(2, tmp_path, *arguments, scheduler=environment)
    assert job.wait(150) == [0, 0], job.said() + job.said(1)
    assert f"on 4 cpu devices of 2 processes, from step {saved}\n" in job.said()
    assert f"step    {STEPS}  loss" in job.said()
    assert "step" not in job.said(1)  # process 0 does the talking
    assert_same_curve(log, uninterrupted)


def test_a_signal_to_one_stops_all_after_the_same_saved_step(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    arguments = [*MODEL, "--eval-every", 1000, "--checkpoint-dir", checkpoints, "--resume"]
    arguments += ["--steps", 100_000, "--checkpoint-every", 100_000]
    for number, which in ((signal.SIGTERM, 1), (signal.SIGINT, 0)):
        before, job = complete(checkpoints), Job(2, tmp_path, *arguments)
        job.wait_until(lambda job=job: job.start() is not None)
        assert job.start() == before
        job.processes[which].send_signal(number)
        assert job.wait(150) == [AGAIN, AGAIN], job.said() + job.said(1)
        step = complete(checkpoints)
        assert step > before
        told = f"stopped by a signal after step {step}, which is saved"
        for i in range(2):
            assert f"process {i}: {told}" in job.said(i)


def test_a_second_signal_does_not_wait():
    asked = train_multihost.Stop()
    assert not asked(train_multihost.Stop.EVERY)
    os.kill(os.getpid(), signal.SIGTERM)  # the first is noted, and asked for after a step
    assert asked(train_multihost.Stop.EVERY - 1) is False
    assert asked(train_multihost.Stop.EVERY)
    assert asked.after == train_multihost.Stop.EVERY
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_process_that_hangs_ends_the_others(tmp_path):
    """The first one, which the others also ask who is there."""
    job = Job(2, tmp_path, *ARGUMENTS, "--steps", 100_000, "--heartbeat-timeout", 6)
    job.wait_until(lambda: job.start() is not None)
    hung, other = job.processes
    hung.send_signal(signal.SIGSTOP)
    assert other.wait(60) == AGAIN, job.said(1)  # JAX's own end comes by SIGABRT, after 22 s
    assert "(process 0 has been silent for " in job.said(1)
    assert "Check failure stack trace" not in job.said(1)
    hung.send_signal(signal.SIGCONT)
    assert job.wait(60)[0] in (AGAIN, -signal.SIGABRT)  # long after the other


def slurm(process, processes):
    """What srun sets; the first of the nodes holds the coordinator."""
    return {
        "SLURM_JOB_ID": str(free_port(61440) - 61440),
        "SLURM_STEP_NODELIST": "localhost,another",
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def test_processes_that_start_from_different_parameters_are_told(tmp_path):
    """And SLURM says who the others are."""
    environment, seeds = [slurm(i, 2) for i in range(2)], [["--seed", "0"], ["--seed", "1"]]
    job = Job(2, tmp_path, *ARGUMENTS, each=seeds, scheduler=environment)
    assert job.wait(150) == [2, 2]
    for i in range(2):
        assert f"process {i}: error: These leaves differ between replicas" in job.said(i)
        assert "['tokens']['embedding']" in job.said(i)


def test_a_process_that_does_not_arrive_ends_the_others(tmp_path):
    flags = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process-id", "0"]
    job = Job(1, tmp_path, *ARGUMENTS, "--start-timeout", 5, each=[flags], scheduler=[{}])
    assert job.wait(100) == [75]
    assert job.said().splitlines() == [
        "process 0: the other processes did not arrive within --start-timeout, 5 s; start again"
    ]


REAL = (  # as processes said when others were killed, and as XLA's sources have it for NCCL
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer [127.0.0.1]:13718",
    "INTERNAL: Error dispatching computation: Gloo all-reduce failed: "
    "[external/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:7593: Connection reset "
    "by peer",
    "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted",
    "DEADLINE_EXCEEDED: Barrier timed out. Id: 3",
    "INTERNAL: NCCL operation ncclAllReduce(...) failed: remote process exited or there was a "
    "network error",
)
LOCAL = (
    "INTERNAL: Error dispatching computation: CpuCallback error calling callback",
    "UNKNOWN: No space left on device",
    "RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.",
    "ABORTED: the compilation was aborted",
)


@pytest.mark.parametrize(("message", "code"), [*((m, 75) for m in REAL), *((m, 1) for m in LOCAL)])
def test_only_what_the_network_says_is_a_lost_process(message, code, monkeypatch, capfd):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(train_multihost, "connect", lambda *_: [])
    monkeypatch.setattr(train_multihost, "train", fail)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["train_multihost.py"])
    with pytest.raises(SystemExit) as exit_:
        train_multihost.main()
    assert exit_.value.code == code
    said = capfd.readouterr().err
    assert message.splitlines()[0] in said
    if code == 75:
        assert said.startswith("process 0: lost contact with another process; start again (")
    else:
        assert "Traceback" in said
        assert "ended by the error above" in said
        assert "lost contact" not in said


def test_replicas_that_drift_apart_are_found_on_the_way(monkeypatch):
    """One device's parameters change behind everybody's back, after three steps."""
    command = [*ARGUMENTS, "--steps", "8", "--batch-size", "8", "--check-every", "2"]
    arguments = train_multihost.command_line().parse_args(command)
    train = train_multihost.Processes.train

    def drifting(self, state, batch):
        state, losses = train(self, state, batch)
        if self._done == 3:
            parts = [np.array(x.data) for x in state.params["output"]["kernel"].addressable_shards]
            parts[5][0, 0] += 1e-3
            kernel = state.params["output"]["kernel"]
            placed = jax.tree.map(jax.device_put, parts, list(kernel.sharding.mesh.devices.flat))
            drifted = jax.make_array_from_single_device_arrays(
                kernel.shape, kernel.sharding, placed
            )
            state = state.replace(params=state.params | {"output": {"kernel": drifted}})
        return state, losses

    monkeypatch.setattr(train_multihost.Processes, "train", drifting)
    found = pytest.raises(jaxcomp.ReplicaMismatch, match=r"after 4 steps: These.*replica 5")
    with found, jax.numpy_dtype_promotion("standard"):
        train_multihost.train(arguments, jax.devices())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--coordinator", "here"], "--coordinator must be HOST:PORT, got here"),
        (["--processes", "2", "--process-id", "2"], "--process-id must be 0 or more and below"),
        (["--check-every", "0", "--local-devices", "0"],
         "--local-devices must be positive; --check-every must be positive"),
    ],
)  # fmt: skip
def test_wrong_input_gives_one_sentence(arguments, message, monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["train_multihost.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        train_multihost.main()
    assert exit_.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(r"(this process|process \d): error: ", line)
    assert message in line


def test_a_port_that_is_taken_is_named(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--coordinator", where, "--processes", "2", "--process-id", "0"]
        monkeypatch.setattr(sys, "argv", ["train_multihost.py", *flags])
        with pytest.raises(SystemExit):
            train_multihost.main()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"process 0: error: cannot listen at --coordinator {where}: ")


def test_who_the_others_are_must_be_known(tmp_path):
    job = Job(1, tmp_path, *ARGUMENTS, scheduler=[{}])
    assert job.wait(100) == [2]
    (line,) = job.said().splitlines()
    assert line.startswith("this process: error: no scheduler that JAX knows")
    assert "pass --coordinator, --processes and --process-id" in line
