"""Parses the command line and turns its options into arguments of the Python functions."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.files import no_file
from torch_bridge._hook.buckets import PARSED_BYTES, BucketLayout
from torch_bridge._pairing.options import Options
from torch_bridge._read.values import Budget

_DESCRIPTION = """\
Move a PowerSGD training run between PyTorch DDP and JAX. Files are read without executing anything
from them. COMMAND --help has an example.

exit codes: 0 done; 1 a file cannot be read, is damaged, or does not fit; 2 wrong usage; 3 a file
asks to run something that is not on the allow-list (nothing was run).
"""
_COMMANDS = {
    "inspect": "show what a checkpoint holds",
    "to-flax": "convert to a Flax checkpoint",
    "to-torch": "convert a Flax checkpoint back",
}
_EPILOGS = {
    "inspect": "example: python -m torch_bridge inspect rank0.pt rank1.pt --json | jq .missing",
    "to-flax": """\
--params names a tree of arrays or shapes, or a function that returns such a tree. For a model with
BatchNorm it is all that init returns: {"params": ..., "batch_stats": ...}. --out becomes an orbax
directory with {step, params, batch_stats, opt_state}, as in a Flax TrainState, and SHA256SUMS.

examples:
  a file of save_checkpoint(..., example=inputs); the Flax model is run and its outputs compared:
    python -m torch_bridge to-flax checkpoint.pt --params my_model:variables \\
        --apply my_model:apply --out checkpoints/
  one file per rank, without an example:
    python -m torch_bridge to-flax rank0.pt rank1.pt --params my_model:variables \\
        --flatten fc1=64,7,7 --rule 'backbone\\.(\\d+)=block_\\1' --ignore 'aux\\..*' \\
        --out checkpoints/
""",
    "to-torch": """\
Names, hyperparameters and everything else that Flax does not keep come from --like.

CHECKPOINT is an orbax directory that `to-flax` wrote, or a training script that saves params and
the consolidated opt_state with StandardSave. If `to-flax` wrote a step of it, the pairs, the layout
and the names of the optimizer come from there; otherwise pass --apply or the answers again.

example: python -m torch_bridge to-torch checkpoints/ --like checkpoint.pt --out continued.pt
""",
}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; collects the options of `pair` in the attribute ``pairing``."""
    main = _parser()
    options = main.parse_args(argv)
    if options.command != "inspect":
        options.pairing = {name: getattr(options, name) for name in Options.__dataclass_fields__}
        for name in ("flatten", "unflatten", "turned"):
            options.pairing[name] = dict(options.pairing[name] or ()) or None
        try:
            Options(**options.pairing)  # checked before large files are read
        except ValueError as error:
            main.error(str(error))
    return options


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    main = argparse.ArgumentParser(
        prog="python -m torch_bridge", description=_DESCRIPTION, formatter_class=raw
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, epilog=_EPILOGS[name], formatter_class=raw
        )
        add = command.add_argument
        if name == "to-torch":
            add("checkpoint", type=pathlib.Path, metavar="CHECKPOINT", help="an orbax directory")
            like_help = "the torch checkpoint that the run came from"
            add("--like", nargs="+", required=True, metavar="FILE", help=like_help)
        else:
            add("files", nargs="+", metavar="FILE", help="a torch checkpoint, or one per rank")
        if name == "inspect":
            add("--json", action="store_true", help="print JSON instead of a table")
        else:
            _add_conversion(add)
        if name == "to-flax":
            add("--missing-ranks", choices=("error", "zero", "replicate"), default="error",
                help="if ranks' errors are missing (default: %(default)s)")  # fmt: skip
            add("--params", required=True, metavar="MODULE:NAME", type=_reference,
                help="the Flax tree to fill, or a function that returns it")  # fmt: skip
        add("--layout", type=pathlib.Path, metavar="FILE", help="JSON of record_layout(...)")
        add("--max-bytes", type=_bytes, metavar="N", help="the most bytes one file may unpack to")
    return main


def _add_conversion(add: Callable[..., Any]) -> None:
    """Adds the options of both conversions, which include the options of `pair`."""
    add("--out", required=True, type=pathlib.Path, help="where to write")
    add("--force", action="store_true", help="overwrite --out")
    add("--apply", metavar="MODULE:NAME", type=_reference, help="apply(params, *inputs) of the "
        "Flax model, which is run on the file's example")  # fmt: skip
    add(
        "--param-names",
        type=pathlib.Path,
        metavar="FILE",
        help="JSON list of the parameters' names",
    )
    add("--plain", action="store_true", help="answer all open questions with the usual case")
    add("--conv-transpose", metavar="REGEX", help="ConvTranspose layers with as many inputs as "
        "outputs")  # fmt: skip
    add("--conv1d", metavar="REGEX", help="layers that store their weight as (in, out)")
    add("--ignore", metavar="REGEX", help="torch tensors to leave out")
    add("--rule", action="append", default=[], dest="rules", metavar="REGEX=PATH", type=_rule,
        help="the Flax path of these torch names")  # fmt: skip
    for name, (metavar, what) in _NUMBERS.items():
        add(name, action="append", metavar=metavar, type=_numbers, help=what)


def read_files(options: argparse.Namespace) -> None:
    """Replaces the paths of ``--layout`` and ``--param-names`` by the contents of the files.

    The memory of the parser is charged to a budget before a file is read.

    Raises:
      CheckpointMismatch: A file is not valid JSON, or takes more than `max_bytes`.
    """
    for name, parse in (("layout", BucketLayout.from_json), ("param_names", _names)):
        path = getattr(options, name, None)
        if path is None:
            continue
        kind = no_file(path)
        if kind:
            raise CheckpointMismatch(f"{path} is {kind}, but it must be a JSON file.")
        size = path.stat().st_size
        try:
            Budget(size, options.max_bytes).claim(PARSED_BYTES * size)
            setattr(options, name, parse(path.read_text("utf-8")))
        except UnicodeDecodeError as error:
            raise CheckpointMismatch(f"{path} is not text, but it must be a JSON file.") from error
        except (ValueError, RecursionError) as error:
            parameters = getattr(error, "parameters", ())
            raise CheckpointMismatch(f"{path}: {error}", parameters=parameters) from error


def _names(text: str) -> Any:
    names = json.loads(text)
    groups = names if isinstance(names, list) and names and isinstance(names[0], list) else [names]
    for group in groups:
        if not (isinstance(group, list) and all(isinstance(name, str) for name in group)):
            raise ValueError(
                "--param-names must be a list of names, or one list for each param group."
            )
    return names


def _bytes(text: str) -> int:
    with contextlib.suppress(ValueError):
        count = int(text)
        if count > 0:
            return count
    raise argparse.ArgumentTypeError(f"must be a positive number of bytes, got {text!r}")


def _reference(text: str) -> str:
    if ":" not in text:
        raise argparse.ArgumentTypeError(f"must be MODULE:NAME, got {text!r}")
    return text


def imported(reference: str) -> Any:
    """Imports the object that ``package.module:name`` names.

    Raises:
      ArgumentTypeError: The import fails.
    """
    with _in_this_folder(reference):
        return pkgutil.resolve_name(reference)


def imported_tree(reference: str) -> Any:
    """Imports the tree that ``package.module:name`` names; if that is a function, calls it.

    Raises:
      ArgumentTypeError: The result is not a tree of arrays or shapes, or the user's code fails.
    """
    value = imported(reference)
    if callable(value):
        with _in_this_folder(reference):
            value = value()
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise argparse.ArgumentTypeError(
                f"{reference}: {jax.tree_util.keystr(path) or 'the result'} is a "
                f"{type(leaf).__name__}. It must be a tree of Flax parameters, or of their shapes "
                "as jax.eval_shape gives them."
            )
    return value


@contextlib.contextmanager
def _in_this_folder(reference: str) -> Iterator[None]:
    """Runs the user's code with this folder on the import path, and catches all its errors."""
    sys.path.insert(0, os.getcwd())
    try:
        yield
    except Exception as error:
        message = f"{reference}: {type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(message) from error
    finally:
        sys.path.pop(0)


def _rule(text: str) -> tuple[str, str]:
    pattern, _, path = text.partition("=")
    if not pattern or not path:
        raise argparse.ArgumentTypeError(f"must be REGEX=PATH, got {text!r}")
    return pattern, path


def _numbers(text: str) -> tuple[str, tuple[int, ...] | None]:
    pattern, path = _rule(text)
    if path.lower() == "none":
        return pattern, None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", path):
        raise argparse.ArgumentTypeError(f"must be as REGEX=C,H,W or REGEX=none, got {text!r}")
    return pattern, tuple(map(int, path.split(",")))


_NUMBERS = {
    "--flatten": ("REGEX=C,H,W", "shape of this Linear's input before it was flattened, or none"),
    "--unflatten": ("REGEX=C,H,W", "shape into which this Linear's output is cut, or none"),
    "--turned": ("REGEX=1,0", "the order of a bare parameter's axes in Flax"),
}
