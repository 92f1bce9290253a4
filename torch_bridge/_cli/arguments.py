"""The arguments of the command line, and what they say as arguments of the three functions."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._hook.buckets import PARSED_BYTES, BucketLayout
from torch_bridge._read.values import Budget, Malformed

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
`--params` names the Flax tree to fill, of which only the structure and the shapes are used: a
tree, or a function without arguments that returns one. With my_model.py next to you:

  def variables():
      return jax.eval_shape(MyModel().init, jax.random.key(0), jnp.zeros((1, 784)))

A model with BatchNorm needs its batch_stats, too: give all that init returns, {"params": ...,
"batch_stats": ...}. Without any, ["params"] alone will do.

examples:
  python -m torch_bridge to-flax checkpoint.pt --params my_model:variables --out checkpoints/
  python -m torch_bridge to-flax rank0.pt rank1.pt --params my_model:variables --out run.msgpack
  python -m torch_bridge to-flax checkpoint.pt --params my_model:variables --flatten fc1=64,7,7 \\
      --ignore 'aux\\..*' --out checkpoints/
  python -m torch_bridge to-flax rank0.pt --missing-ranks zero --layout layout.json \\
      --params my_model:variables --rule 'backbone\\.(\\d+)=block_\\1' --out checkpoints/

The result is {step, params, batch_stats, opt_state} as a Flax TrainState has them, with the
opt_state of optax.chain(jaxcomp.powersgd(...), optimizer): an orbax directory with SHA256SUMS, or
msgpack if --out ends so.
"""
_TO_TORCH = """\
`--like` is the torch checkpoint that the run came from: names, hyperparameters, random number
generator and whatever else Flax has no use for come from there.

example:
  python -m torch_bridge to-torch checkpoints/ --like checkpoint.pt --params my_model:variables \\
      --out continued.pt

In torch: torch.load("continued.pt", weights_only=True) has state_dict and optimizer;
torch_bridge.load and torch_bridge.resume_powersgd bring the hook back without a wrong step.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(
        prog="python -m torch_bridge",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = _command(commands, "inspect", "show what a checkpoint holds", _INSPECT)
    to_flax = _command(commands, "to-flax", "convert to a Flax checkpoint", _TO_FLAX)
    to_torch = _command(commands, "to-torch", "convert a Flax checkpoint back", _TO_TORCH)
    for command in (inspect, to_flax):
        command.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")
    to_flax.add_argument(
        "--missing-ranks",
        choices=("error", "zero", "replicate"),
        default="error",
        help="what to do when not every rank's error is there (default: error)",
    )
    to_torch.add_argument("checkpoint", type=pathlib.Path, metavar="CHECKPOINT")
    to_torch.add_argument(
        "--like", type=pathlib.Path, nargs="+", required=True, metavar="FILE",
        help="the torch checkpoint that the run came from",
    )  # fmt: skip
    for command in (to_flax, to_torch):
        add = command.add_argument
        add("--params", required=True, metavar="MODULE:NAME", type=_params)
        add("--out", required=True, type=pathlib.Path)
        add("--force", action="store_true", help="overwrite --out")
        add(
            "--rule", action="append", default=[], metavar="REGEX=PATH", type=_rule,
            help="which torch names belong to which Flax path; may be repeated",
        )  # fmt: skip
        for name, what in (
            ("--flatten", "the shape from which the input of this Linear was flattened, or none"),
            ("--unflatten", "the shape that the output of this Linear becomes, or none"),
        ):
            add(name, action="append", default=[], metavar="REGEX=C,H,W", type=_shape, help=what)
        for name, what in (
            ("--conv-transpose", "ConvTranspose layers with as many inputs as outputs"),
            ("--conv1d", "layers that keep their weight (in, out)"),
            ("--ignore", "torch tensors to leave out"),
        ):
            add(name, metavar="REGEX", type=_regex, help=what)
        add(
            "--param-names", type=pathlib.Path, metavar="JSON",
            help="the names in the order in which the optimizer was given them",
        )  # fmt: skip
        add(
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


def pairing(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `torch_bridge.pair`."""
    return {
        "rules": options.rule,
        "flatten": dict(options.flatten),
        "unflatten": dict(options.unflatten),
        "conv_transpose": options.conv_transpose,
        "conv1d": options.conv1d,
        "ignore": options.ignore,
    }


def conversion(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments that `to_flax` and `to_torch` have in common, beside `pairing`.

    Raises:
      CheckpointMismatch: A file of JSON is none, or takes more than `max_bytes`.
    """
    from torch_bridge._pairing.matrix_dims import torch_matrix_dims

    names: pathlib.Path | None = options.param_names
    return {
        "layout": layout(options),
        "matrix_dims": torch_matrix_dims if options.torch_dims else None,
        "param_names": names and _parsed(names, "--param-names", options.max_bytes, _names),
    }


def layout(options: argparse.Namespace) -> BucketLayout | None:
    """What ``--layout`` names.

    Raises:
      CheckpointMismatch: It is no layout, or takes more than `max_bytes`.
    """
    if options.layout is None:
        return None
    return _parsed(options.layout, "--layout", options.max_bytes, BucketLayout.from_json)


def _names(text: str) -> Any:
    names = json.loads(text)
    groups = names if isinstance(names, list) and names and isinstance(names[0], list) else [names]
    if not all(isinstance(g, list) and all(isinstance(n, str) for n in g) for g in groups):
        raise ValueError("--param-names must be a list of names, or one list for each param group.")
    return names


def _parsed(
    path: pathlib.Path, option: str, max_bytes: int | None, parse: Callable[[str], Any]
) -> Any:
    """A file of JSON, charged with what parsing it may take before it is read."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointMismatch(f"{path} is no file. {option} must be a file of JSON.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        budget = Budget.of_file(size, max_bytes)
        try:
            budget.claim(PARSED_BYTES * size)
            return parse(file.read(size).decode())
        except (Malformed, ValueError, RecursionError) as error:
            options = getattr(error, "parameters", ())
            raise CheckpointMismatch(f"{path}: {error}", parameters=options) from error


def _params(reference: str) -> Any:
    """The tree that ``package.module:name`` names; a function is called."""
    import jax

    module, colon, name = reference.partition(":")
    if not colon or not module or not name:
        raise argparse.ArgumentTypeError(f"must be MODULE:NAME, got {reference!r}")
    sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        value = value() if callable(value) else value
    except Exception as error:  # it is the user's code, so it may raise anything
        message = f"{reference}: {type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(message) from error
    finally:
        sys.path.pop(0)
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise argparse.ArgumentTypeError(
                f"{reference}: {jax.tree_util.keystr(path) or 'the result'} is a "
                f"{type(leaf).__name__}. It must be a tree of Flax parameters, or of their shapes "
                "as jax.eval_shape gives them."
            )
    return value


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _rule(text: str) -> tuple[str, str]:
    pattern, _, path = text.partition("=")
    if not pattern or not path:
        raise argparse.ArgumentTypeError(f"must be REGEX=PATH, got {text!r}")
    return _regex(pattern), path


def _shape(text: str) -> tuple[str, tuple[int, ...] | None]:
    pattern, _, shape = text.partition("=")
    if not pattern or not re.fullmatch(r"none|[0-9]{1,9}(,[0-9]{1,9})*", shape):
        raise argparse.ArgumentTypeError(f"must be REGEX=C,H,W or REGEX=none, got {text!r}")
    return _regex(pattern), None if shape == "none" else tuple(map(int, shape.split(",")))
