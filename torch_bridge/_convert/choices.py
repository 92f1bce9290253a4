"""What the user of the command line chose: Flax parameters, rules, layout."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._pairing.matrix_dims import torch_matrix_dims


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the two directions have in common.

    Attributes:
      params: the Flax parameter tree (arrays or shapes).
      pairing: keyword arguments of `pair`: ``rules``, ``flatten``, ``conv_transpose``, ``ignore``.
      torch_dims: use `torch_matrix_dims` instead of jaxcomp's default cut.
      missing_ranks: as for `powersgd_from_torch`.
      layout: the bucket layout, if it was given.
      dims: another `matrix_dims` function.
    """

    params: Any
    pairing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    torch_dims: bool = False
    missing_ranks: str = "error"
    layout: BucketLayout | None = None
    dims: Any = None

    @property
    def matrix_dims(self) -> Any:
        """The `matrix_dims` argument."""
        return torch_matrix_dims if self.torch_dims else self.dims


def import_object(reference: str) -> Any:
    """The object that ``package.module:name`` names; a function is called.

    Raises:
      ValueError: the reference has another form, there is no such module or name, or the user's
        code fails.
    """
    module, colon, name = reference.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"--params must be MODULE:NAME, got {reference!r}")
    sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value() if callable(value) else value
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--params {reference}: {error}") from error
    except Exception as error:  # it is the user's code, so it may raise anything
        raise ValueError(f"--params {reference}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)


def read_layout(path: pathlib.Path) -> BucketLayout:
    """A layout file, as ``record_layout(...).to_json()`` gives it."""
    try:
        return BucketLayout.from_json(path.read_text(encoding="utf-8"))
    except (CheckpointMismatch, UnicodeDecodeError) as error:
        raise CheckpointMismatch(f"{path}: {error}") from error


def parse_pairing(
    rules: Sequence[str], flatten: Sequence[str], conv_transpose: str | None, ignore: str | None
) -> dict[str, Any]:
    """The options of the command line as keyword arguments of `pair`.

    Args:
      rules: each ``REGEX=PATH``.
      flatten: each ``REGEX=C,H,W``.
      conv_transpose: a regular expression, or None.
      ignore: a regular expression, or None.

    Raises:
      ValueError: one of them has another form.
    """
    for pattern in (conv_transpose, ignore):
        _check_pattern(pattern or "")
    return {
        "rules": [_split("--rule", "REGEX=PATH", rule) for rule in rules],
        "flatten": dict(map(_parse_flatten, flatten)),
        "conv_transpose": conv_transpose,
        "ignore": ignore,
    }


def _parse_flatten(text: str) -> tuple[str, tuple[int, ...]]:
    pattern, shape = _split("--flatten", "REGEX=C,H,W", text)
    if not re.fullmatch(r"\d+(,\d+)*", shape):
        raise ValueError(f"--flatten must be REGEX=C,H,W, got {text!r}")
    return pattern, tuple(map(int, shape.split(",")))


def _split(option: str, form: str, text: str) -> tuple[str, str]:
    pattern, equals, value = text.partition("=")
    if not equals or not pattern or not value:
        raise ValueError(f"{option} must be {form}, got {text!r}")
    _check_pattern(pattern)
    return pattern, value


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
