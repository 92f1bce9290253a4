"""Trains a byte-level transformer on Python's standard library: data parallel, on one host or many.

On one host it uses all GPUs, or --devices CPU devices. On many hosts, one process on each runs this
command. Under Slurm, Open MPI or Kubernetes pass --distributed, and JAX finds the other processes.
Elsewhere pass --coordinator, --processes and --process-id.

After SIGTERM or Ctrl-C to any process, all save after one of the next steps and exit with code 75.
Start the same command with --resume, and the run continues from the last checkpoint, on any number
of devices, with the curve of an uninterrupted run. If a process dies or is silent for
--heartbeat-timeout, JAX ends the others, with its own messages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from checkpoints import CheckpointError, Checkpoints
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from training import AXIS, COMM_DTYPES, STRATEGIES, Record, Run, RunConfig, UsageError, flag

EXAMPLES = """
examples:
  python examples/language_model/train.py --checkpoint-dir run --resume   # the first time, too
  srun python examples/language_model/train.py --distributed --checkpoint-dir /shared/run --resume
"""
EXIT_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the run is saved, start it again
EXIT_STOPPED = 128 + signal.SIGTERM  # nothing is saved
# Seconds for the other processes to end before the process with the coordinator ends.
GRACE = 3.0
# Options that may differ from the saved run, because they do not change a step's results.
FREE = ("eval_every", "eval_sequences")

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one sentence, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the sentence, without argparse's usage text."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> Parser:
    """Makes the command line; defaults are those of `RunConfig`, but for `comm_dtype`."""
    form = argparse.RawDescriptionHelpFormatter
    p = Parser(description=__doc__, epilog=EXAMPLES, formatter_class=form)
    shown = " (default: %(default)s)"
    choices = {"strategy": list(STRATEGIES), "comm_dtype": COMM_DTYPES}
    group = p.add_argument_group("the run")
    for field in fields(RunConfig):
        options: dict[str, Any] = {"type": type(field.default), "default": field.default}
        options |= {"choices": choices.get(field.name), **field.metadata}
        group.add_argument(flag(field.name), **options)

    p.set_defaults(comm_dtype=None)

    group = p.add_argument_group("files")
    group.add_argument("--log", type=Path, help="write the curve to this file, as JSON lines")
    group.add_argument("--checkpoint-dir", type=Path, help="save here; all processes must see it")
    group.add_argument("--checkpoint-every", type=int, default=100, help="steps in between" + shown)
    group.add_argument("--keep", type=int, default=3, help="checkpoints to keep" + shown)
    group.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    group.add_argument("--stop-at", type=int, help="stop after this step, to resume later")

    group = p.add_argument_group("devices and processes")
    group.add_argument("--devices", type=int, help="per process (default: all GPUs, or 8 CPU)")
    group.add_argument("--distributed", action="store_true", help="with a scheduler, as Slurm")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, help="number of processes")
    group.add_argument("--process-id", type=int, help="number of this process, from 0")
    group.add_argument("--start-timeout", type=int, default=300, help="seconds to wait" + shown)
    group.add_argument("--heartbeat-timeout", type=int, default=30, help="s of silence" + shown)
    return p


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Returns the configuration of the run from the command line."""
    values = {field.name: getattr(arguments, field.name) for field in fields(RunConfig)}
    if arguments.comm_dtype is None:
        values["comm_dtype"] = "int6" if arguments.strategy == "powersgd" else "float32"
    return RunConfig(**values)


def local_devices(count: int | None, default_cpus: int = 8) -> list[Any]:
    """Returns the devices to train on, those of other processes too.

    Call it before JAX initialises its devices. Each process uses `count` devices; None means all
    GPUs, or CPU devices if there is no GPU.
    """
    # A CPU is split into as many devices as one asks for, but only before JAX looks at it; after
    # that (in a notebook, say) one takes what is there. Where GPUs are found it changes nothing.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count or default_cpus)
    available = jax.local_device_count()
    if count is not None and not 0 < count <= available:
        raise UsageError(f"--devices must be positive and at most {available}, got {count}")
    if jax.process_count() > 1:
        return jax.devices()
    return jax.devices()[:count]


def connect(arguments: argparse.Namespace) -> None:
    """Joins the other processes, if there are any."""
    if not (arguments.distributed or arguments.coordinator):
        if arguments.processes or arguments.process_id is not None:
            raise UsageError("--processes and --process-id need --coordinator")
        return
    # JAX would take SIGTERM, and loses one that comes before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            arguments.coordinator,
            arguments.processes,
            arguments.process_id,
            initialization_timeout=arguments.start_timeout,
            heartbeat_timeout_seconds=arguments.heartbeat_timeout,
        )
    except ValueError as error:
        raise UsageError(
            "the other processes cannot be found: pass --coordinator, --processes and "
            f"--process-id ({str(error).rstrip('.')})"
        ) from error


class Stop:
    """Detects SIGTERM or Ctrl-C, and chooses a step after which all processes stop.

    Before it exists, a signal ends the process at once, and nothing is lost.
    """

    EVERY = 8  # steps between two questions to all processes, each a collective of a byte

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        multihost_utils.sync_global_devices("a signal to any process is heard")

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait

    def __call__(self, step: int) -> bool:
        """Returns whether to stop after this step; all processes must call it after every step."""
        if jax.process_count() == 1:
            return self._asked
        if step % self.EVERY:
            return False
        return bool(np.any(multihost_utils.process_allgather(np.array(self._asked))))


class Log:
    """The curve as JSON lines: a header with the configuration, then one record every few steps."""

    EVERY = 10

    def __init__(self, path: Path, config: RunConfig, start: int):
        """Opens the file; a resumed run keeps the records of the steps before it."""
        if path.is_dir():
            raise UsageError(f"{path} is a directory; --log needs a file")
        self._path = path
        kept: list[dict[str, Any]] = [{"config": asdict(config)}]
        if start and path.is_file():
            kept.clear()
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut off on a full disk
                    kept.append(json.loads(line))
        before = [record for record in kept if record.get("step", 0) <= start]
        self._write("w", before)

    @classmethod
    def takes(cls, record: Record) -> bool:
        """Returns whether a record is to be written."""
        return record.step % cls.EVERY == 0 or record.held_out is not None

    def add(self, record: Record) -> None:
        """Writes a record."""
        values = {
            "step": record.step,
            "loss": float(record.loss),
            "bytes_sent": record.bytes_sent,
            "seconds": round(record.seconds, 3),
        }
        if record.held_out is not None:
            values["held_out"] = record.held_out
        self._write("a", [values])

    def _write(self, mode: str, records: list[dict[str, Any]]) -> None:
        try:
            with self._path.open(mode) as file:  # closed: a killed run keeps its curve
                for record in records:
                    file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UsageError(f"the log {self._path} could not be written ({error})") from error


def readable(size: float) -> str:
    """Writes a number of bytes in a readable form: 1234567 -> '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


def open_checkpoints(arguments: argparse.Namespace) -> Checkpoints | None:
    """Opens the directory of checkpoints, if the command line names one."""
    if arguments.stop_at is not None and arguments.stop_at <= 0:
        raise UsageError("--stop-at must be positive")
    if arguments.resume and not arguments.checkpoint_dir:
        raise UsageError("--resume needs --checkpoint-dir")
    if not arguments.checkpoint_dir:
        return None
    if arguments.checkpoint_every <= 0 or arguments.keep <= 0:
        raise UsageError("--checkpoint-every and --keep must be positive")
    return Checkpoints(arguments.checkpoint_dir, keep=arguments.keep, resume=arguments.resume)


def together(action: Callable[[], T]) -> T | None:
    """Runs an action on all processes; if it fails on one, raises an error on all.

    If one process ended alone, the others would wait in their next step until JAX aborts them.

    Returns:
      The result of this process's action.

    Raises:
      UsageError, CheckpointError: The action failed here, or on a process that reports why.
    """
    failure: UsageError | CheckpointError | None = None
    result = None
    try:
        result = action()
    except (UsageError, CheckpointError) as error:
        failure = error
    if jax.process_count() > 1:
        try:
            failed = multihost_utils.process_allgather(np.array(failure is not None))
        except Exception:
            # The others were too slow to answer, or have ended. This process's error is the cause.
            if failure is None:
                raise
            raise failure from None
        if failure is None and np.any(failed):
            failure = CheckpointError("another process could not write; see its error")
    if failure is not None:
        raise failure
    return result


def nothing() -> None:
    """Does nothing: the action of the processes other than process 0."""


def by_flags(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration by the names of the command line, as checkpoints store it."""
    return {flag(name): value for name, value in asdict(config).items()}


def resume(run: Run, checkpoints: Checkpoints) -> None:
    """Continues from the last checkpoint, if there is one of the same configuration."""
    must_equal = by_flags(run.config)
    for name in FREE:
        del must_equal[flag(name)]
    restored = checkpoints.restore(run.consolidated(), must_equal)
    if restored is not None:
        state, about = restored
        run.restore(about["step"], state, about["bytes_sent"])


def save(run: Run, checkpoints: Checkpoints, step: int) -> None:
    """Saves the run after a step; all processes call it."""
    about = {"config": by_flags(run.config), "bytes_sent": run.bytes_sent}
    together(partial(checkpoints.save, step, run.consolidated(), about))


def line_of(record: Record) -> str:
    """Describes a step whose held-out loss was evaluated."""
    loss = f"loss {float(record.loss):.3f}  held-out {record.held_out:.4f}"
    sent = f"{readable(record.bytes_step)}/step  {readable(record.bytes_sent)} sent"
    return f"step {record.step:5}  {loss}  {sent}"


def train(arguments: argparse.Namespace) -> int | None:
    """Trains to the last step, or until a signal stops it. Only process 0 prints.

    Returns:
      The step after which a signal stopped the run; None if no signal came.
    """
    config = config_of(arguments)
    devices = local_devices(arguments.devices)
    run = Run(config, Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,)))
    checkpoints = open_checkpoints(arguments)
    if checkpoints and arguments.resume:
        resume(run, checkpoints)
    is_first = jax.process_index() == 0
    log: Log | None = None  # of process 0; the others take part in its errors
    if arguments.log:
        log = together(partial(Log, arguments.log, config, run.start) if is_first else nothing)
    stop = Stop()
    stopped_after = None
    if is_first:
        where = f"{len(devices)} {devices[0].platform} devices of {jax.process_count()} processes"
        print(f"{run.parameters:,} parameters on {where}, from step {run.start}", flush=True)
    for record in run.steps(arguments.stop_at):
        step = record.step
        if stop(step):
            stopped_after = step
        is_last = step in (stopped_after, config.steps, arguments.stop_at)
        if checkpoints and (is_last or step % arguments.checkpoint_every == 0):
            save(run, checkpoints, step)
        if arguments.log and Log.takes(record):
            together(partial(log.add, record) if log else nothing)
        if is_first and record.held_out is not None:
            print(line_of(record), flush=True)
        if stopped_after:
            break
    share = run.carried()
    if is_first and share is not None:
        print(f"the factors of the last step carried {share:.0%} of the gradients' energy")
    if checkpoints:
        together(checkpoints.close)
    return stopped_after


def leave(message: str, code: int) -> NoReturn:
    """Ends this process at once, because at exit JAX would wait for lost processes."""
    print(f"process {jax.process_index()}: {message}", file=sys.stderr, flush=True)
    if jax.process_index() == 0 and jax.process_count() > 1:
        time.sleep(GRACE)  # for the others: JAX aborts them when this one is gone
    os._exit(code)


def main() -> int:
    """Runs the command line; returns the exit code."""
    p = parser()
    arguments = p.parse_args()
    # orbax also logs the tracebacks of its errors; here an error is one sentence.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        connect(arguments)
        stopped = train(arguments)
    except (UsageError, CheckpointError) as error:
        if jax.process_count() > 1:
            leave(f"error: {error}", 2)
        p.error(str(error))
    except Exception as error:
        if jax.process_count() == 1:
            raise
        why = str(error).partition("\n")[0]
        # A collective with a process that has ended fails with a status, in errors of two classes.
        if not re.match("[A-Z_]+: ", why):
            traceback.print_exc()
        leave(f"error: {why}; if another process ended first, see its error", 1)
    if stopped is None:
        return 0
    if arguments.checkpoint_dir:
        ending = "which is saved: start the run again with --resume"
        code = EXIT_AGAIN
    else:
        ending = "and nothing is saved without --checkpoint-dir"
        code = EXIT_STOPPED
    print(f"{p.prog}: stopped by a signal after step {stopped}, {ending}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
