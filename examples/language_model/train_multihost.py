"""Trains the language model of train.py on many hosts: one process each, started by a scheduler.

Every process runs this same command. Under SLURM, Open MPI or Kubernetes, JAX finds out by itself
who the others are; elsewhere say so with --coordinator, --processes and --process-id.

If a process dies, the others end with a message and exit code 75: within seconds where connections
break, within --heartbeat-timeout or --start-timeout otherwise. On SIGTERM or SIGINT to any of them
all stop after the same step, save it and end with 75; a checkpoint that cannot be written ends the
run with 74 and the others with 75. Started again with the same command and --resume, the run
continues from the last checkpoint, on as many processes as there are then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from data_parallel import AXIS, MAPPINGS, Device, LossFn, ShardMap
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from train import Log, Parser, open_checkpoints, parser, readable
from training import CheckpointError, Run, RunConfig, UsageError, WriteError
from watch import Watch

import jaxcomp

# EX_TEMPFAIL of sysexits.h: the same command, started again, is likely to work.
EXIT_AGAIN = 75
EXIT_WRITE = 74  # EX_IOERR: starting again does not help before there is room
EXIT_STOPPED = 128 + signal.SIGTERM  # where nothing can be saved
# What only a broken connection, or the coordinator, says; an error of this process alone (out of
# memory, a full disk) must not pass for one. The errors reach Python under several types, and gloo
# reports all of its own as UNKNOWN.
LOST = re.compile(
    r"UNAVAILABLE: |DEADLINE_EXCEEDED: |coordination service|Barrier (failed|timed out)"
    r"|Gloo .*(Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Tt]imeout)"
    r"|remote process exited or there was a network error",  # NCCL
    re.DOTALL,
)


class Processes(ShardMap):
    """`ShardMap` over the devices of all processes.

    Every process computes the same global batch on the host and hands its own devices their rows.
    """

    def __init__(self, loss_fn: LossFn, devices: Sequence[Device], check_every: int | None = None):
        """See `data_parallel.ShardMap`.

        Args:
          loss_fn: As there.
          devices: Those of all processes.
          check_every: Steps after which the replicas are compared again; None for never.
        """
        super().__init__(loss_fn, devices)
        self._check_every, self._done = check_every, 0

    def place(self, state: TrainState) -> TrainState:
        """Shards the state, and makes sure that all processes began with the same one."""
        self._done = int(state.step)
        placed = super().place(state)
        self._check = jax.jit(
            jax.shard_map(
                lambda s: jaxcomp.check_replicas(s, AXIS),
                mesh=self.mesh,
                in_specs=(jaxcomp.state_specs(placed, AXIS),),
                out_specs=P(),
            )
        )
        self._check(placed).raise_if_different()
        return placed

    def train(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, jax.Array]:
        """See `DataParallel.train`; the losses are those of this process's replicas.

        Raises:
          ReplicaMismatch: The replicas were compared after this step, and differ.
        """
        state, losses = super().train(state, batch)
        self._done += 1
        # A program of its own, not `check_replicas(..., step=, every=)` inside the step: with and
        # without checks the run is then the same, bit for bit.
        if self._check_every and self._done % self._check_every == 0:
            try:
                self._check(state).raise_if_different()
            except jaxcomp.ReplicaMismatch as error:
                raise jaxcomp.ReplicaMismatch(f"after {self._done} steps: {error}") from error
        return state, multihost_utils.global_array_to_host_local_array(losses, self.mesh, P(AXIS))

    def evaluate(self, state: TrainState, batch: np.ndarray) -> Any:
        """See `DataParallel.evaluate`; all replicas' losses, on every process."""
        return multihost_utils.process_allgather(super().evaluate(state, batch), tiled=True)

    def _split(self, batch: np.ndarray) -> jax.Array:
        rows = NamedSharding(self.mesh, P(AXIS))
        return jax.make_array_from_callback(batch.shape, rows, lambda index: batch[index])


def command_line() -> Parser:
    """That of train.py, with what a scheduler would otherwise say."""
    p = parser(local=False)
    p.description, p.epilog = __doc__, None
    shown = " (default: %(default)s)"
    group = p.add_argument_group("processes", "the first three only where JAX knows no scheduler")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, help="how many there are")
    group.add_argument("--process-id", type=int, help="which one this is, from 0")
    group.add_argument("--local-devices", type=int, default=1, help="CPU devices of each" + shown)
    silence = "seconds of silence that mean death" + shown
    group.add_argument("--heartbeat-timeout", type=int, default=30, help=silence)
    wait = "seconds to wait for the others" + shown
    group.add_argument("--start-timeout", type=int, default=300, help=wait)
    check = "compare the replicas after every so many steps (default: only at the start)"
    group.add_argument("--check-every", type=int, metavar="STEPS", help=check)
    group.add_argument("--checkpoint-at", type=int, nargs="+", default=(), metavar="STEP",
                       help="save after these steps, too")  # fmt: skip
    return p


def check_process_arguments(arguments: argparse.Namespace) -> None:
    """Raises a `UsageError` that names everything wrong with the values."""
    names = ("processes", "local_devices", "heartbeat_timeout", "start_timeout", "check_every")
    values = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names}
    wrong = [f"{k} must be positive" for k, v in values.items() if v is not None and v <= 0]
    where = arguments.coordinator
    if where is not None and not re.fullmatch(r".+:\d+", where):
        wrong.append(f"--coordinator must be HOST:PORT, got {where}")
    which, count = arguments.process_id, arguments.processes
    if which is not None and (which < 0 or (count or which + 1) <= which):
        wrong.append(f"--process-id must be 0 or more and below --processes, got {which}")
    if wrong:
        raise UsageError("; ".join(wrong))
    if where is not None and which == 0:
        try:  # JAX would end with a stack trace, or a segmentation fault
            socket.create_server(("", int(where.rpartition(":")[2]))).close()
        except (OSError, OverflowError) as error:
            raise UsageError(f"cannot listen at --coordinator {where}: {error}") from error


@contextlib.contextmanager
def at_most(seconds: float, who: str) -> Iterator[None]:
    """Ends this process if what is inside takes longer.

    JAX's own timeout aborts a process that waits for another to join, with a stack trace, and
    leaves nothing to catch.
    """
    message = f"the other processes did not arrive within --start-timeout, {seconds} s; start again"
    timer = threading.Timer(seconds, leave, (who, message, EXIT_AGAIN))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def connect(arguments: argparse.Namespace, who: str) -> list[Device]:
    """Joins the other processes.

    Returns:
      The devices of all of them.

    Raises:
      UsageError: It is not known who the others are.
    """
    check_process_arguments(arguments)
    jax.config.update("jax_num_cpu_devices", arguments.local_devices)
    try:
        with at_most(arguments.start_timeout, who):
            jax.distributed.initialize(
                coordinator_address=arguments.coordinator,
                num_processes=arguments.processes,
                process_id=arguments.process_id,
                initialization_timeout=arguments.start_timeout + 60,  # `at_most` comes first
                heartbeat_timeout_seconds=2 * arguments.heartbeat_timeout + 10,  # `Watch` is first
            )
            return jax.devices()
    except ValueError as error:
        raise UsageError(
            "no scheduler that JAX knows started this process: pass --coordinator, --processes and "
            f"--process-id ({str(error).rstrip('.')})"
        ) from error


def watch_the_others(arguments: argparse.Namespace, who: str) -> Watch:
    """From now on this process ends soon after another one."""
    # Where no coordinator is named, it is found as gloo finds it: by the name of the host.
    if arguments.coordinator or jax.process_count() == 1:
        host = (arguments.coordinator or "").rpartition(":")[0]
    else:
        own = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
        first = multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8))
        host = socket.inet_ntoa(bytes(np.asarray(first)))
    again = "start the run again with --resume" if arguments.checkpoint_dir else "start again"

    def lost(what: str) -> None:
        leave(who, f"lost contact with another process; {again} ({what})", EXIT_AGAIN)

    return Watch(host, arguments.heartbeat_timeout, lost)


class Stop:
    """Whether a signal asks this run to end, after a step on which all processes agree."""

    EVERY = 8  # steps between two questions to all, each a collective of a byte

    def __init__(self):
        """Takes over SIGTERM, from JAX, and SIGINT; a second one does not wait."""
        self.after: int | None = None  # the step
        self._asked = False
        signal.signal(signal.SIGTERM, partial(self._ask, signal.SIG_DFL))
        signal.signal(signal.SIGINT, partial(self._ask, signal.default_int_handler))

    def __call__(self, done: int) -> bool:
        """Whether to end after step `done`."""
        if done % self.EVERY:
            return False
        if np.any(multihost_utils.process_allgather(np.array(self._asked))):
            self.after = done
        return self.after is not None

    def _ask(self, then: Any, number: int, frame: object) -> None:
        del frame
        self._asked = True
        signal.signal(number, then)


def train(
    arguments: argparse.Namespace,
    devices: list[Device],
    asked_to_stop: Callable[[int], bool] = lambda done: False,
) -> None:
    """Runs to the end, or to where it is stopped. Process 0 does the talking."""
    MAPPINGS["processes"] = partial(Processes, check_every=arguments.check_every)
    chosen = {field.name: getattr(arguments, field.name) for field in fields(RunConfig)}
    config = replace(RunConfig(**chosen), mapping="processes")
    checkpoints = open_checkpoints(arguments)
    if checkpoints:
        checkpoints.also = frozenset(arguments.checkpoint_at)
    run, first = Run(config, devices, checkpoints), jax.process_index() == 0
    log = Log(arguments.log, config, run.start) if arguments.log and first else None
    if first:
        where = f"{len(devices)} {devices[0].platform} devices of {jax.process_count()} processes"
        print(f"{run.parameters:,} parameters on {where}, from step {run.start}", flush=True)
        for note in run.notes:
            print(f"note: {note}", flush=True)
    for record in run.steps(arguments.stop_at, asked_to_stop):
        if first and record.held_out is not None:
            loss = f"loss {record.loss:.3f}  held-out {record.held_out:.4f}"
            print(f"step {record.step:5}  {loss}  {readable(record.bytes_sent)} sent", flush=True)
        if log:
            log.add(record)
    if checkpoints:
        checkpoints.close()
        # Nobody ends before the last one is written: JAX takes the end of a process for a failure.
        multihost_utils.sync_global_devices("saved")


def leave(who: str, message: str, code: int) -> NoReturn:
    """Ends this process at once.

    Not by an exception: JAX and orbax wait at exit for all processes, and some never arrive.
    """
    print(f"{who}: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def stop(arguments: argparse.Namespace, who: str, step: int) -> NoReturn:
    """Ends this process after a signal."""
    if arguments.checkpoint_dir:
        saved = f"which is saved; start the run again with --resume ({arguments.checkpoint_dir})"
        leave(who, f"stopped by a signal after step {step}, {saved}", EXIT_AGAIN)
    lost = "and nothing is saved without --checkpoint-dir"
    leave(who, f"stopped by a signal after step {step}, {lost}", EXIT_STOPPED)


def main() -> int:
    """The command line's entry point."""
    arguments = command_line().parse_args()
    number = arguments.process_id
    who = "this process" if number is None else f"process {number}"
    try:
        devices = connect(arguments, who)
        who = f"process {jax.process_index()}"
        watch = watch_the_others(arguments, who)
        asked = Stop()
        train(arguments, devices, asked)
        watch.close()
        if asked.after is not None:
            stop(arguments, who, asked.after)
    except WriteError as error:
        leave(who, f"error: {error}", EXIT_WRITE)
    except (UsageError, CheckpointError, jaxcomp.ReplicaMismatch) as error:
        leave(who, f"error: {error}", 2)
    except KeyboardInterrupt:
        leave(who, "interrupted", 130)
    except Exception as error:
        if LOST.search(str(error)):
            resume = "start the run again with --resume"
            hint = resume if arguments.checkpoint_dir else "start again"
            reason = str(error).splitlines()[0][:200]
            leave(who, f"lost contact with another process; {hint} ({reason})", EXIT_AGAIN)
        traceback.print_exc()
        leave(who, "ended by the error above, and the others with it", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
