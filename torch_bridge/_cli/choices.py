"""What the user of the command line chose: Flax parameters, rules, layout."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._convert.optimizer_from_torch import ParamNames
from torch_bridge._hook.buckets import PARSED_BYTES, BucketLayout
from torch_bridge._pairing.matrix_dims import torch_matrix_dims
from torch_bridge._pairing.options import Options
from torch_bridge._read.values import Budget, Malformed, default_limit


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the two directions have in common.

    Attributes:
      params: The Flax parameter tree (arrays or shapes).
      pairing: Keyword arguments of `pair`: ``rules``, ``flatten`` and the like.
      torch_dims: Use `torch_matrix_dims`, whatever jaxcomp's default cut is.
      missing_ranks: As for `powersgd_from_torch`.
      layout: The bucket layout, if it was given.
      param_names: As for `optimizer_from_torch`.
    """

    params: Any
    pairing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    torch_dims: bool = False
    missing_ranks: str = "error"
    layout: BucketLayout | None = None
    param_names: ParamNames = None

    @property
    def matrix_dims(self) -> Any:
        """The `matrix_dims` argument."""
        return torch_matrix_dims if self.torch_dims else None


def import_object(reference: str) -> Any:
    """The object that ``package.module:name`` names; a function is called.

    Raises:
      ValueError: The reference has another form, there is no such module or name, the user's code
        fails, or gives something else than parameters.
    """
    module, colon, name = reference.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"--params must be MODULE:NAME, got {reference!r}")
    sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        value = value() if callable(value) else value
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--params {reference}: {error}") from error
    except Exception as error:  # it is the user's code, so it may raise anything
        raise ValueError(f"--params {reference}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"--params {reference}: {jax.tree_util.keystr(path) or 'the result'} is a "
                f"{type(leaf).__name__}. It must be a tree of Flax parameters, or of their shapes "
                "as jax.eval_shape gives them."
            )
    return value


def read_layout(path: pathlib.Path, max_bytes: int | None = None) -> BucketLayout:
    """A layout file, as ``record_layout(...).to_json()`` gives it.

    Raises:
      CheckpointMismatch: It is no layout, or takes more than `max_bytes` (None: three times its
        size and 64 MiB).
    """
    text = _text(path, "--layout", max_bytes)
    try:
        return BucketLayout.from_json(text)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{path}: {error}") from error


def read_names(path: pathlib.Path, max_bytes: int | None = None) -> ParamNames:
    """A file with a list of names, or of one list of names for each param group.

    Raises:
      CheckpointMismatch: As for `read_layout`.
    """
    text = _text(path, "--param-names", max_bytes)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointMismatch(f"{path} is no JSON: {error}") from error
    groups = names if isinstance(names, list) and names and isinstance(names[0], list) else [names]
    if not all(isinstance(g, list) and all(isinstance(n, str) for n in g) for g in groups):
        raise CheckpointMismatch(
            f"{path}: --param-names must be a list of names, or one list for each param group."
        )
    return names


def _text(path: pathlib.Path, option: str, max_bytes: int | None) -> str:
    """The text of a file of JSON, charged with what parsing may take before it is read."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointMismatch(f"{path} is no file. {option} must be a file of JSON.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            budget = Budget(default_limit(size) if max_bytes is None else max_bytes)
            budget.claim(PARSED_BYTES * size)
            return file.read(size).decode()
        except Malformed as error:
            raise CheckpointMismatch(f"{path}: {error}", parameters=error.parameters) from error
        except UnicodeDecodeError as error:
            raise CheckpointMismatch(f"{path}: {error}") from error


def parse_pairing(
    rules: Sequence[str],
    flatten: Sequence[str],
    unflatten: Sequence[str],
    conv_transpose: str | None,
    conv1d: str | None,
    ignore: str | None,
) -> dict[str, Any]:
    """The options of the command line as keyword arguments of `pair`.

    Args:
      rules: Each ``REGEX=PATH``.
      flatten: Each ``REGEX=C,H,W`` or ``REGEX=none``.
      unflatten: Likewise.
      conv_transpose: A regular expression, or None.
      conv1d: Likewise.
      ignore: Likewise.

    Raises:
      ValueError: One of them has another form.
    """
    options = {
        "rules": [_split("--rule", "REGEX=PATH", rule) for rule in rules],
        "flatten": dict(_parse_shape("--flatten", text) for text in flatten),
        "unflatten": dict(_parse_shape("--unflatten", text) for text in unflatten),
        "conv_transpose": conv_transpose,
        "conv1d": conv1d,
        "ignore": ignore,
    }
    inputs, outputs = (tuple(options[name].items()) for name in ("flatten", "unflatten"))
    Options(tuple(options["rules"]), inputs, outputs, conv_transpose, conv1d, ignore)
    return options


def _parse_shape(option: str, text: str) -> tuple[str, tuple[int, ...] | None]:
    pattern, shape = _split(option, "REGEX=C,H,W", text)
    if shape == "none":
        return pattern, None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", shape):
        raise ValueError(f"{option} must be REGEX=C,H,W or REGEX=none, got {text!r}")
    return pattern, tuple(map(int, shape.split(",")))


def _split(option: str, form: str, text: str) -> tuple[str, str]:
    pattern, equals, value = text.partition("=")
    if not equals or not pattern or not value:
        raise ValueError(f"{option} must be {form}, got {text!r}")
    return pattern, value
