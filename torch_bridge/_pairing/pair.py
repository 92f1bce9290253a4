"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.names import clean_names
from torch_bridge._base.tensors import is_tensor, shape_of, storage_key, to_numpy
from torch_bridge._base.terminal import printable
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.match import Matcher
from torch_bridge._pairing.options import (
    Flatten,
    Options,
    PairOptions,
    Rules,
    parsed,
    refuse_unknown,
)
from torch_bridge._pairing.pairing import Pairing
from torch_bridge._pairing.units import flax_units, torch_units


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
    unflatten: Flatten | None = None,
    conv_transpose: str | None = None,
    conv1d: str | None = None,
    ignore: str | None = None,
) -> tuple[Pairing, ...]:
    r"""Finds for every torch tensor its Flax leaf.

    Layers correspond by name (``layers.0.conv1.weight`` and ``layers_0/conv1/kernel``), else by
    structure and shape (the layers of a Sequential and ``Dense_0``, ``Dense_1``, ...): layers of
    equal shape whose names differ in numbers only are taken in the order of these numbers, and
    anything less clear is refused. Prefixes of DDP, FSDP and ``torch.compile`` are skipped.

    Args:
      model: Torch state dict (or module): name -> tensor, array or anything with a ``shape``.
      like: Linen parameters, linen variables, ``nnx.State`` or an nnx module. Where it has no place
        for running statistics, those of `model` are left out.
      rules: Regular expression -> path, tried in order before anything else. The expression has to
        match a whole tensor or module name; the path is a leaf or a module, with groups as in
        ``r"block_\1/kernel"``. Where it names a tensor and a leaf that are parts of
        different layers (``norm.gamma`` and ``norm/scale``), these two become one pairing, a matrix
        turned if its shape says so. A Linear that packs several goes to several modules, in the
        order of its rows: ``{r"h\.(\d+)\.c_attn": r"h_\1/query|h_\1/key|h_\1/value"}``.
      flatten: Regular expression of the module name of a Linear (or of a recurrent layer with its
        suffix, as in ``lstm.l0``) -> the channels-first shape ``(C, H, W)`` of what is flattened
        before it, or None if nothing is. Flax flattens ``(H, W, C)``, so the inputs of such a layer
        have to be reordered; no shape shows it. Where a Linear follows a convolution and has
        several inputs for each channel, a square map behind the last convolution is recognised, and
        anything else is asked about. A norm of as many values directly before it follows it; one
        that stands elsewhere can be named itself.
      unflatten: The same for the outputs of a Linear that are seen as ``(C, H, W)``, as before the
        convolutions of a decoder, with the norm directly behind it. It is asked about where a
        convolution is next and has several of the outputs for each channel.
      conv_transpose: Regular expression of the module names of those ConvTranspose layers that have
        as many inputs as outputs, which no shape tells from a Conv. Without it, the name decides.
      conv1d: Regular expression of the module names of layers that keep their weight ``(in, out)``
        and go to a Dense, as transformers' ``Conv1D``. It is needed for a square weight only where
        no other layer of its kind shows it; ``""`` says that there is none. A model of square
        matrices alone is taken for one of Linear layers, with a warning that names them.
      ignore: Regular expression of tensor names that shall be left out.

    Returns:
      The pairings, in the natural order of the leaves. Every conversion takes them as `pairings`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf, or with
        those patterns of `rules`, `flatten`, `unflatten` and `conv1d` that match nothing, or name a
        shape where it moves nothing.

    Example:
      >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
      >>> like = {"Dense_0": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
      >>> [(p.torch_name, "/".join(p.path), p.kind) for p in pair(model, like)]
      [('fc.bias', 'Dense_0/bias', 'vector'), ('fc.weight', 'Dense_0/kernel', 'linear.weight')]
    """
    model = named(model)
    options = parsed(rules, flatten, unflatten, conv_transpose, conv1d, ignore)
    _refuse_idle(model, options)
    return _pair_with(model, like, options)


def _refuse_idle(model: Mapping[str, Any], options: Options) -> None:
    """Refuse patterns that match nothing: what is misspelled would be ignored without a word."""
    asked = [("rules", pattern) for pattern, _ in options.rules]
    asked += [("flatten", pattern) for pattern, _ in options.flatten]
    asked += [("unflatten", pattern) for pattern, _ in options.unflatten]
    asked += [("conv1d", options.conv1d)]
    asked = [(name, pattern) for name, pattern in asked if pattern]
    if not asked or any(isinstance(value, jax.ShapeDtypeStruct) for value in model.values()):
        return  # a layout's shapes are a part of a model
    shapes = {name: shape_of(value) for name, value in model.items()}
    modules = {
        unit.name
        for split in (False, True)
        for unit in torch_units(shapes, split_attention=split, buffers=True)
    }
    tensors = set(clean_names(list(model)).values())
    known = {"rules": modules | tensors}
    idle = [
        (name, pattern)
        for name, pattern in asked
        if not any(re.fullmatch(pattern, text) for text in known.get(name, modules))
    ]
    if idle:
        raise CheckpointMismatch(
            "Some patterns match no layer of the torch model, and they have to match a whole "
            "name. Correct them or leave them out.",
            unexpected=[f"{name}: {pattern}" for name, pattern in idle],
            parameters=sorted({name for name, _ in idle}),
        )


def _pair_with(model: Mapping[str, Any], like: Any, options: Options) -> tuple[Pairing, ...]:
    if options.ignore:
        cleaned = clean_names(list(model))
        model = {n: v for n, v in model.items() if not re.fullmatch(options.ignore, cleaned[n])}
    tree = flatten_tree(like)
    first: CheckpointMismatch | None = None
    for tied in _tie_attempts(model):
        try:
            return _pair(model, tree, options, tied)
        except CheckpointMismatch as error:
            first = first or error
    assert first is not None  # there is always an attempt
    raise first


def paired(
    model: Model,
    like: Any,
    pairings: Sequence[Pairing] | None,
    rules: Rules,
    options: PairOptions,
    *,
    optional: Collection[str] = (),
) -> tuple[Pairing, ...]:
    """The pairings of a conversion: those that it was given, or what `pair` finds.

    Args:
      model: As for `pair`.
      like: The tree of the conversion, which may be a part of the one that `pairings` were made
        for: The parameters of linen variables, or the trainable ones.
      pairings: What `pair` gave, or None.
      rules: As for `pair`, where `pairings` is None.
      options: Likewise.
      optional: Tensors that need no place in `like`, so that it may be a part where there are no
        `pairings` either.

    Raises:
      TypeError: There is no such option.
      ValueError: Both are given.
      CheckpointMismatch: `pairings` lack a leaf of `like`, or as `pair` does.
    """
    refuse_unknown(options)
    if pairings is not None:
        if rules or any(options.values()):
            raise ValueError(
                "`pairings` says already what belongs together; leave out rules, flatten and the "
                "like, or pass them to torch_bridge.pair."
            )
        return _fitted(pairings, like)
    model, said = named(model), parsed(rules, **options)
    _refuse_idle(model, said)
    try:
        return _pair_with(model, like, said)
    except CheckpointMismatch:
        if not optional:
            raise
        needed = {name: value for name, value in model.items() if name not in optional}
        return _pair_with(needed, like, said)


def _fitted(pairings: Sequence[Pairing], like: Any) -> tuple[Pairing, ...]:
    """Those of `like`, by its paths, which may lack the collection or have it in addition."""
    tree = flatten_tree(like)
    known = set(tree.paths)
    found = []
    for pairing in pairings:
        bare = pairing.path[1:] if pairing.path[:1] == ("params",) else ("params", *pairing.path)
        path = next((path for path in (pairing.path, bare) if path in known), None)
        if path is not None:
            found.append(dataclasses.replace(pairing, path=path))
    shapes = {pairing.path: pairing.shape for pairing in found}
    missing = ["/".join(path) for path in tree.shapes if path not in shapes]
    wrong = [
        f"{'/'.join(path)} {tree.shapes[path]}, paired as {shape}"
        for path, shape in shapes.items()
        if tree.shapes.get(path, shape) != shape
    ]
    if missing or wrong:
        raise CheckpointMismatch(
            "The tree is not the one that `pairings` were made for. Call torch_bridge.pair with "
            "it, or with a tree that contains it.",
            missing=missing,
            mis_shaped=wrong,
        )
    return tuple(found)


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
            parameters=("rules", *_named_in(problems), "ignore"),
            **problems,
        )
    if matcher.idle:
        raise CheckpointMismatch(
            "Some patterns name layers in which no order of (C, H, W) is kept: `flatten` is for "
            "what reads a flattened map, `unflatten` for a Linear whose outputs become one. "
            "Correct them or leave them out.",
            unexpected=matcher.idle,
            parameters=sorted({line.partition(":")[0] for line in matcher.idle}),
        )
    if matcher.assumed:
        warnings.warn(
            f"All matrices are square, so that none shows whether it is stored (out, in) or (in, "
            f"out): {printable(', '.join(matcher.assumed))} are taken for Linear. Say so with "
            f'conv1d="", or name those of transformers\' Conv1D with conv1d=<regular expression>.',
            stacklevel=5,
        )
    order = {path: k for k, path in enumerate(tree.shapes)}
    pairings = sorted((p for part in built for p in part.pairings), key=lambda p: order[p.path])
    return tuple(_with_aliases(pairing, tied) for pairing in pairings)


def _named_in(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """The options that the lines of an error speak of."""
    text = "\n".join(line for lines in problems.values() for line in lines)
    known = sorted(PairOptions.__optional_keys__ - {"ignore"})
    return [name for name in known if re.search(rf"\b{name}=", text)]


def _with_aliases(pairing: Pairing, tied: Mapping[str, str]) -> Pairing:
    aliases = tuple(alias for alias, name in tied.items() if name == pairing.torch_name)
    return dataclasses.replace(pairing, aliases=aliases) if aliases else pairing


def named(model: Model) -> Mapping[str, Any]:
    """The state dict of a torch module, or the mapping itself.

    Raises:
      TypeError: It is neither.
    """
    if isinstance(model, Mapping):
        return model
    if not hasattr(model, "state_dict"):
        raise TypeError(
            f"A torch state dict or module is needed, got a {type(model).__name__}. Of what "
            "torch_bridge.load returns it is the attribute `model`."
        )
    return model.state_dict()
