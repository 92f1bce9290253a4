"""Trains a byte-level transformer on Python's standard library, data parallel over local devices.

Uses all GPUs, or 8 CPU devices where there is none. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from data_parallel import MAPPINGS, local_devices
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from strategies import COMM_DTYPES, STRATEGIES
from training import CheckpointError, Checkpoints, Record, Run, RunConfig, UsageError, WriteError

EXAMPLES = """
examples:
  python examples/language_model/train.py --strategy allreduce
  python examples/language_model/train.py --strategy powersgd --rank 16 --mapping shard_map
  python examples/language_model/train.py --strategy powersgd --rank 16 --comm-dtype int8
  python examples/language_model/train.py --checkpoint-dir runs/1         # and, after a crash,
  python examples/language_model/train.py --checkpoint-dir runs/1 --resume

The curve of a resumed run is that of an uninterrupted one, on any number of devices. The parts a
training script of your own needs are in data_parallel.py.
"""


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong argument with one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the sentence, without the screenful of usage that argparse puts before it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser(local: bool = True) -> Parser:
    """The command line. Defaults are those of `RunConfig`.

    Args:
      local: Offer the choice of devices and mapping, which one process alone has.
    """
    p = Parser(
        description=__doc__,
        epilog="strategies:\n"
        + "".join(f"  {name:15} {s.summary}\n" for name, s in STRATEGIES.items())
        + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = " (default: %(default)s)"

    group = p.add_argument_group("communication")
    group.add_argument("--strategy", choices=list(STRATEGIES), help="see below" + shown)
    group.add_argument("--rank", type=int, help="rank of the compressed gradients" + shown)
    group.add_argument("--start-step", type=int, help="exact steps before compression" + shown)
    group.add_argument("--comm-dtype", choices=COMM_DTYPES, help="of the factors sent" + shown)
    if local:
        mapping = "how to map the replicas" + shown
        group.add_argument("--mapping", choices=list(MAPPINGS), help=mapping)
        group.add_argument(
            "--devices", type=int, help="number of replicas (default: all GPUs, or 8 CPU devices)"
        )

    group = p.add_argument_group("training")
    group.add_argument("--steps", type=int, help="length of the run" + shown)
    group.add_argument("--batch-size", type=int, help="sequences a step, over all replicas" + shown)
    group.add_argument("--learning-rate", type=float, help="its highest value" + shown)
    group.add_argument("--seed", type=int, help="of the parameters and the data" + shown)
    group.add_argument("--eval-every", type=int, help="steps between evaluations" + shown)
    group.add_argument("--eval-sequences", type=int, help="held-out sequences" + shown)

    group = p.add_argument_group("model")
    group.add_argument("--layers", type=int, help="transformer blocks" + shown)
    group.add_argument("--width", type=int, help="features" + shown)
    group.add_argument("--heads", type=int, help="attention heads" + shown)
    group.add_argument("--context", type=int, help="bytes in a sequence" + shown)
    group.add_argument("--bf16", action="store_true", help="compute activations in bfloat16")
    p.set_defaults(**{field.name: field.default for field in fields(RunConfig)})

    group = p.add_argument_group("files")
    group.add_argument("--log", type=Path, help="write the curve to this file, as JSON lines")
    group.add_argument("--checkpoint-dir", type=Path, help="save checkpoints here")
    group.add_argument("--checkpoint-every", type=int, default=100, help="steps between" + shown)
    group.add_argument("--keep", type=int, default=3, help="checkpoints to keep" + shown)
    group.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    group.add_argument("--stop-at", type=int, help="stop after so many steps, to resume later")
    return p


class Log:
    """The curve as JSON lines: a header with the configuration, then one record every few steps."""

    EVERY = 10

    def __init__(self, path: Path, config: RunConfig, start: int):
        """Begins the file; a resumed run keeps the records up to where it continues."""
        if not path.absolute().parent.is_dir():
            raise UsageError(f"the directory {path.absolute().parent} does not exist")
        if path.is_dir():
            raise UsageError(f"{path} is a directory; --log needs a file")
        kept = [{"config": asdict(config)}]
        if start and path.is_file():
            records = []
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut off on a full disk
                    records.append(json.loads(line))
            kept = [r for r in records if r.get("step", 0) <= start]
        self._path = path
        self._write("w", *kept)

    def add(self, record: Record) -> None:
        """Writes a record, if it is one to write.

        Raises:
          WriteError: It could not be.
        """
        if record.step % self.EVERY == 0 or record.held_out is not None:
            values = {"step": record.step, "loss": record.loss, "bytes_sent": record.bytes_sent}
            values |= {} if record.held_out is None else {"held_out": record.held_out}
            self._write("a", values | {"seconds": round(record.seconds, 3)})

    def _write(self, mode: str, *records: dict[str, Any]) -> None:
        try:
            with self._path.open(mode) as file:  # closed each time: a killed run leaves its curve
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:
            raise WriteError(f"the log {self._path} could not be written ({error})") from error


def readable(size: float) -> str:
    """Bytes for a person: 1234567 -> '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


class Display:
    """The progress bar, and a line for each evaluation."""

    def __init__(self, run: Run, console: Console):
        """Prepares the bar; it is shown inside a `with` statement."""
        self.run = run
        self.tokens = run.config.batch_size * run.config.context
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console)
        self.task = self.progress.add_task(
            "", total=run.config.steps, completed=run.start, numbers="compiling"
        )
        self.previous: tuple[int, float] | None = None
        self.rate = 0.0

    def show(self, record: Record) -> None:
        """Moves the bar, and prints what an evaluation found."""
        numbers = None
        if record.step % 10 == 0 or record.held_out is not None:
            loss = f"loss {record.loss:.3f}"
            if self.previous:
                steps, seconds = record.step - self.previous[0], record.seconds - self.previous[1]
                self.rate = steps * self.tokens / max(seconds, 1e-9)
            self.previous = (record.step, record.seconds)
            cost = f"{self.rate:,.0f} tokens/s  {readable(record.bytes_step)}/step"
            numbers = f"{loss}  {cost}"
            if record.held_out is not None:
                self.progress.console.print(
                    f"step {record.step:5}  {loss}  held-out {record.held_out:.4f}  {cost}  "
                    f"{readable(record.bytes_sent)} sent",
                    highlight=False,
                    soft_wrap=True,
                )
        self.progress.update(self.task, completed=record.step)
        if numbers:
            self.progress.update(self.task, numbers=numbers)


def open_checkpoints(arguments: argparse.Namespace) -> Checkpoints | None:
    """The directory of checkpoints that the command line asks for, if it does."""
    if arguments.stop_at is not None and arguments.stop_at <= 0:
        raise UsageError("--stop-at must be positive")
    if not arguments.checkpoint_dir:
        if arguments.resume:
            raise UsageError("--resume needs --checkpoint-dir")
        return None
    if arguments.checkpoint_every <= 0 or arguments.keep <= 0:
        raise UsageError("--checkpoint-every and --keep must be positive")
    return Checkpoints(
        arguments.checkpoint_dir,
        every=arguments.checkpoint_every,
        keep=arguments.keep,
        resume=arguments.resume,
    )


def train(arguments: argparse.Namespace, console: Console) -> int:
    """Runs to the end, or to where it is stopped. Returns the exit code."""
    config = RunConfig(**{f.name: getattr(arguments, f.name) for f in fields(RunConfig)})
    config.check()
    if arguments.devices is not None and arguments.devices <= 0:
        raise UsageError("--devices must be positive")
    try:
        devices = local_devices(arguments.devices)  # before orbax, which looks at the devices
    except ValueError as error:
        raise UsageError(str(error)) from error
    checkpoints = open_checkpoints(arguments)
    try:
        run = Run(config, devices, checkpoints)
        log = Log(arguments.log, config, run.start) if arguments.log else None
        where = f"{len(devices)} {devices[0].platform} devices"
        console.print(f"{run.parameters:,} parameters on {where}, from step {run.start}")
        for note in run.notes:
            console.print(f"note: {note}", soft_wrap=True)
        display = Display(run, console)
        with display.progress:
            for record in run.steps(arguments.stop_at):
                display.show(record)
                if log:
                    log.add(record)
    finally:
        if checkpoints:
            checkpoints.close()
    return 0


def main() -> int:
    """The command line's entry point."""
    p = parser()
    arguments = p.parse_args()
    # What a scheduler sends before it takes the machine away: leave by the same door as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return train(arguments, Console())
    except (UsageError, CheckpointError) as error:
        p.error(str(error))
    except KeyboardInterrupt:
        hint = "; continue with --resume" if arguments.checkpoint_dir else ""
        print(f"{p.prog}: interrupted{hint}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
