"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._errors import CheckpointMismatch
from torch_bridge._leaves import Tree
from torch_bridge._leaves import flatten as flatten_tree
from torch_bridge._match import Matcher, Options
from torch_bridge._pairing import Pairing
from torch_bridge._torch import is_tensor, shape_of, storage_key, to_numpy
from torch_bridge._units import clean_names, flax_units, torch_units

Rules = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten = Mapping[str, tuple[int, ...]]


def pair(
    model: Mapping[str, Any],
    like: Any,
    rules: Rules = (),
    *,
    flatten: Flatten | None = None,
    conv_transpose: str | None = None,
    ignore: str | None = None,
) -> tuple[Pairing, ...]:
    r"""Finds for every torch tensor its Flax leaf.

    Layers correspond by name (``layers.0.conv1.weight`` and ``layers_0/conv1/kernel``), else by
    structure and shape (the layers of a Sequential and ``Dense_0``, ``Dense_1``, ...). Prefixes of
    DDP, FSDP and ``torch.compile`` are skipped. What is ambiguous is refused.

    Args:
      model: torch state dict: name -> tensor, array or anything with a ``shape``.
      like: linen parameters, linen variables, ``nnx.State`` or an nnx module. Where it has no place
        for running statistics, those of `model` are left out.
      rules: regular expression -> path, tried in order before anything else. The expression has to
        match a whole tensor or module name; the path is a leaf or a module, with groups as in
        ``r"block_\1/kernel"``.
      flatten: regular expression of a Linear's module name -> the channels-first shape
        ``(C, H, W)`` of what is flattened before it. Flax flattens ``(H, W, C)``, so the inputs of
        such a layer have to be reordered; no shape shows it.
      conv_transpose: regular expression of the module names of those ConvTranspose layers that have
        as many inputs as outputs, which no shape tells from a Conv. Without it, the name decides.
      ignore: regular expression of tensor names that shall be left out.

    Returns:
      The pairings, in the natural order of the leaves.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf.
    """
    rules = tuple(rules.items()) if isinstance(rules, Mapping) else tuple(rules)
    options = Options(rules, tuple((flatten or {}).items()), conv_transpose)
    cleaned = clean_names(list(named(model)))
    model = {
        n: v for n, v in named(model).items() if not ignore or not re.fullmatch(ignore, cleaned[n])
    }
    tree = flatten_tree(like)
    first: CheckpointMismatch | None = None
    for tied in _tie_attempts(model):
        try:
            return _pair(model, tree, options, tied)
        except CheckpointMismatch as error:
            first = first or error
    assert first is not None  # there is always an attempt
    raise first


def _tie_attempts(model: Mapping[str, Any]) -> list[dict[str, str]]:
    """Ways to see the tied tensors, as alias -> first name, the likeliest first."""
    shared: dict[Any, str] = {}
    by_storage = {
        name: shared.setdefault(key, name)
        for name, value in model.items()
        if (key := storage_key(value)) is not None
    }
    by_storage = {alias: name for alias, name in by_storage.items() if alias != name}
    by_value = _equal_matrices(model)
    attempts = [by_storage, {}, by_value]
    return [tied for k, tied in enumerate(attempts) if tied not in attempts[:k]]


def _equal_matrices(model: Mapping[str, Any]) -> dict[str, str]:
    """Matrices with equal values: a file without shared storage shows ties in no other way."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, value in model.items():
        if len(shape_of(value)) > 1 and (is_tensor(value) or isinstance(value, np.ndarray)):
            groups.setdefault(shape_of(value), []).append(name)
    tied: dict[str, str] = {}
    for names in groups.values():
        for position, alias in enumerate(names):
            for name in names[:position]:
                if name not in tied and _equal(model[name], model[alias]):
                    tied[alias] = name
                    break
    return tied


def _equal(one: Any, other: Any) -> bool:
    a, b = to_numpy(one), to_numpy(other)
    if a.dtype != b.dtype or not np.array_equal(a[0], b[0]) or not np.array_equal(a, b):
        return False
    return bool(np.any(a != a.flat[0]))  # constant matrices are fresh, not tied


def _pair(
    model: Mapping[str, Any], tree: Tree, options: Options, tied: Mapping[str, str]
) -> tuple[Pairing, ...]:
    shapes = {name: shape_of(value) for name, value in model.items() if name not in tied}
    mine = torch_units(shapes, split_attention=False, buffers=tree.has_statistics)
    theirs = flax_units(tree, split_attention=False)
    packed, split = (any(u.family == "attention" for u in side) for side in (mine, theirs))
    if packed and not split:
        mine = torch_units(shapes, split_attention=True, buffers=tree.has_statistics)
    elif split and not packed:
        theirs = flax_units(tree, split_attention=True)
    matcher = Matcher(mine, theirs, options)
    built = matcher.run()
    problems = {
        "missing": [line for part in built for line in part.missing]
        + [
            f"{'/'.join(path)} {shape}"
            for unit in matcher.open_flax
            if unit not in matcher.undecided
            for path, shape in unit.entries.values()
        ],
        "unexpected": [line for part in built for line in part.unexpected]
        + [
            f"{name} {shape}"
            for unit in matcher.open_torch
            if unit not in matcher.undecided
            for name, shape in unit.entries.values()
        ],
        "mis_shaped": [line for part in built for line in part.mis_shaped],
        "ambiguous": matcher.ambiguous,
    }
    if any(problems.values()):
        raise CheckpointMismatch(
            "The torch model and the Flax tree do not correspond. Say what belongs together with "
            "`rules` (regular expression -> path) and what to leave out with `ignore`.",
            **problems,
        )
    order = {path: k for k, path in enumerate(tree.shapes)}
    pairings = sorted((p for part in built for p in part.pairings), key=lambda p: order[p.path])
    return tuple(_with_aliases(pairing, tied) for pairing in pairings)


def _with_aliases(pairing: Pairing, tied: Mapping[str, str]) -> Pairing:
    aliases = tuple(alias for alias, name in tied.items() if name == pairing.torch_name)
    return dataclasses.replace(pairing, aliases=aliases) if aliases else pairing


def named(model: Any) -> Mapping[str, Any]:
    """The state dict of a torch module, or the mapping itself."""
    return model.state_dict() if hasattr(model, "state_dict") else model
