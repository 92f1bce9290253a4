"""``python -m torch_bridge``: look into a PyTorch checkpoint, convert it to Flax and back."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from torch_bridge._base.errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._base.framework import import_torch, not_installed
from torch_bridge._base.terminal import printable
from torch_bridge._cli import arguments
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.load import load

OK, UNUSABLE, USAGE, UNSAFE = 0, 1, 2, 3
# The options of arguments that are spelled otherwise on the command line.
_AS_OPTIONS: dict[str, str] = {"rules": "--rule", "matrix_dims": "--torch-dims"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors become one message on standard error and an exit code."""
    options = arguments.parser().parse_args(argv)
    _return_freed_memory()
    commands = {"inspect": _inspect, "to-flax": _to_flax, "to-torch": _to_torch}
    try:
        commands[options.command](options)
    except UnsafeCheckpoint as error:
        return _fail(error, UNSAFE)
    except ValueError as error:  # CheckpointMismatch, or an optimizer without an equal in optax
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

    from torch_bridge._cli.inspect import render, summarize

    layout = arguments.layout(options)
    summary = summarize(_load(options.files, options), layout)
    if options.json:
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    console = Console()
    # A pipe has no width: whole lines are easier to search there than folded ones.
    render(summary, console if console.is_terminal else Console(width=200))


def _to_flax(options: argparse.Namespace) -> None:
    import jax
    import numpy as np

    from torch_bridge._cli.convert import config_of, entries
    from torch_bridge._cli.files import write_flax
    from torch_bridge._convert.to_flax import to_flax

    pairing, conversion = arguments.pairing(options), arguments.conversion(options)
    _refuse_overwriting(options)
    checkpoint = _load(options.files, options)
    _notify(options, "converting")
    config = config_of(checkpoint)
    conversion |= {"missing_ranks": options.missing_ranks, "consume": True}
    state = entries(to_flax(checkpoint, options.params, **conversion, **pairing))
    _notify(options, f"writing {options.out}")
    write_flax(options.out, state, config, force=options.force)
    size = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(state["params"]))
    print(f"{printable(str(options.out))}: step {int(state['step'])}, {size:,} values")


def _to_torch(options: argparse.Namespace) -> None:
    from torch_bridge._cli.convert import torch_document
    from torch_bridge._job.save import write_document

    import_torch()  # before large files are read
    keywords = arguments.pairing(options), arguments.conversion(options)
    if not options.checkpoint.exists():
        raise CheckpointMismatch(f"{options.checkpoint} does not exist.")
    _refuse_overwriting(options)
    like = _load(options.like, options)
    notify = functools.partial(_notify, options)
    document = torch_document(options.checkpoint, like, options.params, *keywords, notify)
    notify(f"writing {options.out}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_document(options.out, document)
    print(f"{printable(str(options.out))}: {len(document['state_dict'])} tensors")


def _refuse_overwriting(options: argparse.Namespace) -> None:
    """Before the work begins. A folder is looked into when its step is known."""
    out: pathlib.Path = options.out
    to_folder = options.command == "to-flax" and out.suffix != ".msgpack"
    kind = "folder, or a file that ends in .msgpack" if to_folder else "file here"
    if out.is_dir() and not to_folder:
        raise CheckpointMismatch(f"{out} is a folder. --out must be a {kind}.")
    if os.path.lexists(out) and not out.is_dir():  # a link to nowhere is there, too
        if to_folder:
            raise CheckpointMismatch(f"{out} is a file. --out must be a {kind}.")
        if not options.force:
            raise CheckpointMismatch(f"{out} is there already. Pass --force to overwrite it.")


def _load(files: Sequence[pathlib.Path], options: argparse.Namespace) -> Checkpoint:
    if options.quiet:
        return load(files, max_bytes=options.max_bytes)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return load(files, max_bytes=options.max_bytes, progress=progress)


def _notify(options: argparse.Namespace, stage: str) -> None:
    if not options.quiet:
        print(printable(stage), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
