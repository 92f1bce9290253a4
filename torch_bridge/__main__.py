"""``python -m torch_bridge``: look into a PyTorch checkpoint, convert it to Flax and back."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch_bridge._base.errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._base.framework import import_torch, not_installed
from torch_bridge._base.terminal import plain, printable
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.load import load

if TYPE_CHECKING:
    from rich.console import Console

OK, UNUSABLE, USAGE, UNSAFE = 0, 1, 2, 3
_DESCRIPTION = """\
Move a PowerSGD training run between PyTorch DDP and JAX. Files are read without executing anything
from them.

exit codes:
  0  done
  1  a file cannot be read, is damaged, or does not fit
  2  wrong usage
  3  a file asks to run something that is not on the allow-list; nothing was run
"""
_INSPECT = """\
examples:
  python -m torch_bridge inspect checkpoint.pt
  python -m torch_bridge inspect rank0.pt rank1.pt rank2.pt rank3.pt
  python -m torch_bridge inspect checkpoint.pt --json | jq .missing
"""
_TO_FLAX = """\
`--params` names the Flax parameters, of which only the structure and the shapes are used: a tree,
or a function without arguments that returns one. With my_model.py next to you:

  def params():
      return jax.eval_shape(MyModel().init, jax.random.key(0), jnp.zeros((1, 784)))["params"]

examples:
  python -m torch_bridge to-flax checkpoint.pt --params my_model:params --out checkpoints/
  python -m torch_bridge to-flax rank0.pt rank1.pt --params my_model:params --out run.msgpack
  python -m torch_bridge to-flax checkpoint.pt --params my_model:params --flatten fc1=64,7,7 \\
      --ignore 'aux\\..*' --out checkpoints/
  python -m torch_bridge to-flax rank0.pt --missing-ranks zero --layout layout.json \\
      --params my_model:params --rule 'backbone\\.(\\d+)=block_\\1' --out checkpoints/

The result is {step, params, opt_state} as a Flax TrainState has them, with the opt_state of
optax.chain(jaxcomp.powersgd(...), optimizer): an orbax directory, or msgpack if --out ends so.
"""
_TO_TORCH = """\
`--like` is the torch checkpoint that the run came from: names, hyperparameters, random number
generator and whatever else Flax has no use for come from there.

examples:
  python -m torch_bridge to-torch checkpoints/ --like checkpoint.pt --params my_model:params \\
      --out continued.pt

In torch: torch.load("continued.pt", weights_only=True) has state_dict and optimizer;
torch_bridge.load and torch_bridge.resume_powersgd bring the hook back without a wrong step.
"""


# The options of arguments that are spelled otherwise on the command line.
_AS_OPTIONS: dict[str, str] = {"rules": "--rule", "matrix_dims": "--torch-dims"}


class _Usage(Exception):
    """The arguments cannot be used; the message says why."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(
        prog="python -m torch_bridge",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = _command(commands, "inspect", "show what a checkpoint holds", _INSPECT)
    inspect.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")
    to_flax = _command(commands, "to-flax", "convert to a Flax checkpoint", _TO_FLAX)
    to_flax.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE")
    to_flax.add_argument(
        "--missing-ranks",
        choices=("error", "zero", "replicate"),
        default="error",
        help="what to do when not every rank's error is there (default: error)",
    )
    to_torch = _command(commands, "to-torch", "convert a Flax checkpoint back", _TO_TORCH)
    to_torch.add_argument("checkpoint", type=pathlib.Path, metavar="CHECKPOINT")
    to_torch.add_argument(
        "--like", type=pathlib.Path, nargs="+", required=True, metavar="FILE",
        help="the torch checkpoint that the run came from",
    )  # fmt: skip
    for command in (to_flax, to_torch):
        command.add_argument("--params", required=True, metavar="MODULE:NAME")
        command.add_argument("--out", required=True, type=pathlib.Path)
        command.add_argument("--force", action="store_true", help="overwrite --out")
        command.add_argument(
            "--rule", action="append", default=[], metavar="REGEX=PATH",
            help="which torch names belong to which Flax path; may be repeated",
        )  # fmt: skip
        command.add_argument(
            "--flatten", action="append", default=[], metavar="REGEX=C,H,W",
            help="the shape from which the input of this Linear was flattened, or none",
        )  # fmt: skip
        command.add_argument(
            "--unflatten", action="append", default=[], metavar="REGEX=C,H,W",
            help="the shape that the output of this Linear becomes, or none",
        )  # fmt: skip
        command.add_argument(
            "--conv-transpose", metavar="REGEX",
            help="ConvTranspose layers with as many inputs as outputs",
        )  # fmt: skip
        command.add_argument(
            "--conv1d", metavar="REGEX", help="layers that keep their weight (in, out)"
        )
        command.add_argument("--ignore", metavar="REGEX", help="torch tensors to leave out")
        command.add_argument(
            "--param-names", type=pathlib.Path, metavar="JSON",
            help="the names in the order in which the optimizer was given them",
        )  # fmt: skip
        command.add_argument(
            "--torch-dims", action="store_true",
            help="see kernels as torch does (torch_bridge.torch_matrix_dims)",
        )  # fmt: skip
    for command in (inspect, to_flax, to_torch):
        command.add_argument(
            "--layout", type=pathlib.Path, metavar="JSON", help="from record_layout(...).to_json()"
        )
        command.add_argument(
            "--max-bytes", type=int, metavar="N",
            help="the most bytes that one file may unpack to (default: 3 x its size + 64 MiB)",
        )  # fmt: skip
        command.add_argument("--quiet", action="store_true", help="show no progress")
    return main


def _command(commands: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors become one message on standard error and an exit code."""
    options = parser().parse_args(arguments)
    _return_freed_memory()
    commands = {"inspect": _inspect, "to-flax": _to_flax, "to-torch": _to_torch}
    try:
        commands[options.command](options)
    except UnsafeCheckpoint as error:
        return _fail(error, UNSAFE)
    except CheckpointMismatch as error:
        return _fail(error, UNUSABLE)
    except _Usage as error:
        return _fail(error, USAGE)
    except ValueError as error:  # an optimizer without an equal in optax, for example
        return _fail(error, UNUSABLE)
    except RecursionError:
        return _fail("the file nests its entries too deeply to be converted", UNUSABLE)
    except ModuleNotFoundError as error:
        return _fail(not_installed(error), USAGE)
    except OSError as error:
        return _fail(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "), UNUSABLE)
    return OK


def _return_freed_memory() -> None:
    """Have glibc give back every freed array: by default it keeps those below 32 MiB."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library: its own business
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def _fail(error: object, code: int) -> int:
    print(f"error: {printable(str(error), keep=chr(10))}", file=sys.stderr)
    names: tuple[str, ...] = getattr(error, "parameters", ())
    options = [_AS_OPTIONS.get(name, "--" + name.replace("_", "-")) for name in names]
    if options:
        print(f"  on the command line: {', '.join(options)}", file=sys.stderr)
    return code


def _inspect(options: argparse.Namespace) -> None:
    from rich.console import Console

    from torch_bridge._cli.choices import read_layout
    from torch_bridge._cli.inspect import render, summarize

    layout = read_layout(options.layout, options.max_bytes) if options.layout else None
    summary = summarize(_load(options.files, options), layout)
    if options.json:
        print(json.dumps(summary.to_dict(), indent=2, allow_nan=False))
        return
    console = Console()
    # A pipe has no width: whole lines are easier to search there than folded ones.
    render(summary, console if console.is_terminal else Console(width=200))


def _to_flax(options: argparse.Namespace) -> None:
    from torch_bridge._cli.convert import config_of, train_state
    from torch_bridge._cli.files import write_flax

    choices = _choices(options, options.missing_ranks)
    _refuse_overwriting(options)
    checkpoint = _load(options.files, options)
    with _stages(options) as notify:
        notify("converting")
        config = config_of(checkpoint)
        state = train_state(checkpoint, choices)
        _prepare(options, notify)
        write_flax(options.out, state, config, force=options.force)
    print(
        f"{printable(str(options.out))}: step {int(state['step'])}, {_size(state['params'])} values"
    )


def _to_torch(options: argparse.Namespace) -> None:
    from torch_bridge._cli.convert import torch_document
    from torch_bridge._job.save import write_document

    import_torch()  # before large files are read
    choices = _choices(options)
    if not options.checkpoint.exists():
        raise CheckpointMismatch(f"{options.checkpoint} does not exist.")
    _refuse_overwriting(options)
    like = _load(options.like, options)
    with _stages(options) as notify:
        document = torch_document(options.checkpoint, like, choices, notify)
        _prepare(options, notify)
        write_document(options.out, document)
    print(f"{printable(str(options.out))}: {len(document['state_dict'])} tensors")


def _refuse_overwriting(options: argparse.Namespace) -> None:
    """Before the work begins. A folder is looked into when its step is known."""
    out: pathlib.Path = options.out
    to_folder = options.command == "to-flax" and out.suffix != ".msgpack"
    if out.is_dir() and not to_folder:
        raise CheckpointMismatch(f"{out} is a folder. --out must be a file here.")
    if os.path.lexists(out) and not out.is_dir():  # a link to nowhere is there, too
        if to_folder:
            raise CheckpointMismatch(
                f"{out} is a file. --out must be a folder, or a file that ends in .msgpack."
            )
        if not options.force:
            raise CheckpointMismatch(f"{out} is there already. Pass --force to overwrite it.")


def _prepare(options: argparse.Namespace, notify: Callable[[str], None]) -> None:
    """Make the folder of the output."""
    notify(f"writing {options.out}")
    options.out.parent.mkdir(parents=True, exist_ok=True)


def _choices(options: argparse.Namespace, missing_ranks: str = "error") -> Any:
    from torch_bridge._cli.choices import (
        Choices,
        import_object,
        parse_pairing,
        read_layout,
        read_names,
    )

    most = options.max_bytes
    try:
        return Choices(
            params=import_object(options.params),
            pairing=parse_pairing(
                options.rule,
                options.flatten,
                options.unflatten,
                options.conv_transpose,
                options.conv1d,
                options.ignore,
            ),
            torch_dims=options.torch_dims,
            missing_ranks=missing_ranks,
            layout=read_layout(options.layout, most) if options.layout else None,
            param_names=read_names(options.param_names, most) if options.param_names else None,
        )
    except CheckpointMismatch:
        raise
    except ValueError as error:
        raise _Usage(str(error)) from error


def _load(files: Sequence[pathlib.Path], options: argparse.Namespace) -> Checkpoint:
    paths = files[0] if len(files) == 1 else files
    if options.quiet:
        return load(paths, max_bytes=options.max_bytes)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_stderr()) as bar:
        task = bar.add_task("reading", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return load(paths, max_bytes=options.max_bytes, progress=progress)


@contextlib.contextmanager
def _stages(options: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Show which stage is running; a line each where there is no terminal."""
    if options.quiet:
        yield lambda stage: None
        return
    console = _stderr()
    with console.status("") as status:

        def notify(stage: str) -> None:
            status.update(plain(stage))
            if not console.is_terminal:
                console.print(plain(stage), soft_wrap=True)

        yield notify


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _size(tree: Any) -> str:
    import jax
    import numpy as np

    return f"{sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree)):,}"


if __name__ == "__main__":
    sys.exit(main())
