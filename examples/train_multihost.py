"""Trains the language model of train_lm.py on many hosts: one process each, started by a scheduler.

Every process runs this same command. Under SLURM, Open MPI or Kubernetes, JAX finds out by itself
who the others are; elsewhere say so with --coordinator, --processes and --process-id.

If a process dies, the others end with a message and exit code 75: within seconds where connections
break, within --heartbeat-timeout otherwise. Started again with the same command and --resume, the
run continues from the last checkpoint, on as many processes as there are then.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

import jax
import numpy as np
from data_parallel import AXIS, MAPPINGS, Device, LossFn, ShardMap
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm_training import CheckpointError, Run, RunConfig, UsageError
from train_lm import Log, open_checkpoints, parser, readable

import jaxcomp

# EX_TEMPFAIL of sysexits.h: the same command, started again, is likely to work.
EXIT_PEER_LOST = 75
# How an error begins that the communication library or the coordinator reports. It reaches Python
# under several types, depending on who was waiting.
LOST = (
    "UNKNOWN: ",
    "INTERNAL: ",
    "UNAVAILABLE: ",
    "DEADLINE_EXCEEDED: ",
    "ABORTED: ",
    "CANCELLED: ",
)


class Processes(ShardMap):
    """`ShardMap` over the devices of all processes.

    Every process computes the same global batch on the host and hands its own devices their rows.
    """

    def __init__(self, loss_fn: LossFn, devices: Sequence[Device]):
        """See `data_parallel.ShardMap`; `devices` are those of all processes."""
        super().__init__(loss_fn, devices)

    def place(self, state: TrainState) -> TrainState:
        """Shards the state, and makes sure that all processes began with the same one."""
        placed = super().place(state)
        found = jax.jit(
            jax.shard_map(
                lambda s: jaxcomp.check_replicas(s, AXIS),
                mesh=self.mesh,
                in_specs=(jaxcomp.state_specs(placed, AXIS),),
                out_specs=P(),
            )
        )(placed)
        found.raise_if_different()
        return placed

    def train(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, jax.Array]:
        """See `DataParallel.train`; the losses are those of this process's replicas."""
        state, losses = super().train(state, batch)
        return state, multihost_utils.global_array_to_host_local_array(losses, self.mesh, P(AXIS))

    def evaluate(self, state: TrainState, batch: np.ndarray) -> Any:
        """See `DataParallel.evaluate`; all replicas' losses, on every process."""
        return multihost_utils.process_allgather(super().evaluate(state, batch), tiled=True)

    def _split(self, batch: np.ndarray) -> jax.Array:
        rows = NamedSharding(self.mesh, P(AXIS))
        return jax.make_array_from_callback(batch.shape, rows, lambda index: batch[index])


MAPPINGS["processes"] = Processes


def add_process_arguments(p: argparse.ArgumentParser) -> None:
    """What a scheduler would otherwise say."""
    group = p.add_argument_group("processes", "needed only where JAX cannot ask a scheduler")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, help="how many there are")
    group.add_argument("--process-id", type=int, help="which one this is, from 0")
    shown = " (default: %(default)s)"
    group.add_argument("--local-devices", type=int, default=1, help="CPU devices of each" + shown)
    group.add_argument(
        "--heartbeat-timeout",
        type=int,
        default=30,
        help="seconds of silence that mean death" + shown,
    )
    group.add_argument(
        "--start-timeout", type=int, default=300, help="seconds to wait for the others" + shown
    )


def connect(arguments: argparse.Namespace) -> list[Device]:
    """Joins the other processes.

    Returns:
      The devices of all of them.

    Raises:
      UsageError: It is not known who the others are.
    """
    jax.config.update("jax_num_cpu_devices", arguments.local_devices)
    try:
        jax.distributed.initialize(
            coordinator_address=arguments.coordinator,
            num_processes=arguments.processes,
            process_id=arguments.process_id,
            initialization_timeout=arguments.start_timeout,
            heartbeat_timeout_seconds=arguments.heartbeat_timeout,
        )
    except ValueError as error:
        raise UsageError(
            "no scheduler that JAX knows started this process: pass --coordinator, --processes and "
            f"--process-id ({str(error).rstrip('.')})"
        ) from error
    return jax.devices()


def train(arguments: argparse.Namespace, devices: list[Device]) -> None:
    """Runs to the end, or to where it is stopped. Process 0 does the talking."""
    chosen = {field.name: getattr(arguments, field.name) for field in fields(RunConfig)}
    config = replace(RunConfig(**chosen), mapping="processes")
    checkpoints = open_checkpoints(arguments)
    run, first = Run(config, devices, checkpoints), jax.process_index() == 0
    log = Log(arguments.log, config, run.start) if arguments.log and first else None
    if first:
        where = f"{len(devices)} {devices[0].platform} devices of {jax.process_count()} processes"
        print(f"{run.parameters:,} parameters on {where}, from step {run.start}", flush=True)
    for record in run.steps(arguments.stop_at):
        if first and record.held_out is not None:
            loss = f"loss {record.loss:.3f}  held-out {record.held_out:.4f}"
            print(f"step {record.step:5}  {loss}  {readable(record.bytes_sent)} sent", flush=True)
        if log:
            log.add(record)
    if checkpoints:
        checkpoints.close()


def leave(message: str, code: int) -> NoReturn:
    """Ends this process at once.

    Not by an exception: JAX and orbax wait at exit for all processes, and some never arrive.
    """
    print(f"process {jax.process_index()}: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def main() -> int:
    """The command line's entry point."""
    p = parser()
    p.description, p.epilog = __doc__, None
    add_process_arguments(p)
    arguments = p.parse_args()
    try:
        devices = connect(arguments)
    except UsageError as error:
        p.error(str(error))
    try:
        train(arguments, devices)
    except (UsageError, CheckpointError, jaxcomp.ReplicaMismatch) as error:
        leave(f"error: {error}", 2)
    except Exception as error:
        if str(error).startswith(LOST):
            hint = (
                "start the run again with --resume" if arguments.checkpoint_dir else "start again"
            )
            reason = str(error).splitlines()[0][:200]
            leave(f"lost contact with another process; {hint} ({reason})", EXIT_PEER_LOST)
        traceback.print_exc()
        leave("ended by the error above, and the others with it", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
