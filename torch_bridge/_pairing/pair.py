"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import is_tensor, shape_of, storage_key, to_numpy
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.match import Matcher, Options
from torch_bridge._pairing.pairing import Pairing
from torch_bridge._pairing.units import clean_names, flax_units, torch_units

Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten: TypeAlias = Mapping[str, tuple[int, ...]]


class HasStateDict(Protocol):
    """A torch module, as far as it matters here."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors by name."""
        ...


Model: TypeAlias = Mapping[str, Any] | HasStateDict


def pair(
    model: Model,
    like: Any,
    rules: Rules = (),
    *,
    flatten: Flatten | None = None,
    conv_transpose: str | None = None,
    ignore: str | None = None,
) -> tuple[Pairing, ...]:
    r"""Finds for every torch tensor its Flax leaf.

    Layers correspond by name (``layers.0.conv1.weight`` and ``layers_0/conv1/kernel``), else by
    structure and shape (the layers of a Sequential and ``Dense_0``, ``Dense_1``, ...): layers of
    equal shape whose names differ in numbers only are taken in the order of these numbers, and
    anything less clear is refused. Prefixes of DDP, FSDP and ``torch.compile`` are skipped.

    Args:
      model: torch state dict (or module): name -> tensor, array or anything with a ``shape``.
      like: linen parameters, linen variables, ``nnx.State`` or an nnx module. Where it has no place
        for running statistics, those of `model` are left out.
      rules: regular expression -> path, tried in order before anything else. The expression has to
        match a whole tensor or module name; the path is a leaf or a module, with groups as in
        ``r"block_\1/kernel"``. A Linear that packs several goes to several modules, in the order of
        its rows: ``{r"h\.(\d+)\.c_attn": r"h_\1/query|h_\1/key|h_\1/value"}``.
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
    model = named(model)
    if ignore:
        cleaned = clean_names(list(model))
        model = {n: v for n, v in model.items() if not re.fullmatch(ignore, cleaned[n])}
    tree = flatten_tree(like)
    first: CheckpointMismatch | None = None
    for tied in _tie_attempts(model):
        try:
            return _pair(model, tree, options, tied)
        except CheckpointMismatch as error:
            first = first or error
    assert first is not None  # there is always an attempt
    raise first


def _tie_attempts(model: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Ways to see the tied tensors, as alias -> first name, the likeliest first."""
    shared: dict[Any, str] = {}
    first = {n: shared.setdefault(k, n) for n, v in model.items() if (k := storage_key(v))}
    by_storage = {alias: name for alias, name in first.items() if alias != name}
    yield by_storage
    if by_storage:
        yield {}
    by_value = _equal_matrices(model)
    if by_value and by_value != by_storage:
        yield by_value


def _equal_matrices(model: Mapping[str, Any]) -> dict[str, str]:
    """Matrices with equal values: a file without shared storage shows ties in no other way."""
    seen: dict[Any, list[str]] = {}
    tied: dict[str, str] = {}
    for name, value in model.items():
        shape = shape_of(value)
        if len(shape) < 2 or 0 in shape or not (is_tensor(value) or isinstance(value, np.ndarray)):
            continue
        array = to_numpy(value)
        row = array[0]
        if np.all(row == row.flat[0]):
            continue  # constant values are fresh ones, not tied
        alike = seen.setdefault((shape, array.dtype, row.tobytes()), [])
        found = next((n for n in alike if np.array_equal(to_numpy(model[n]), array)), None)
        if found is None:
            alike.append(name)
        else:
            tied[name] = found
    return tied


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


def named(model: Model) -> Mapping[str, Any]:
    """The state dict of a torch module, or the mapping itself."""
    return model if isinstance(model, Mapping) else model.state_dict()
