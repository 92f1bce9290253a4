"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, Unpack

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import clean_names, is_tensor, shape_of, storage_key, to_numpy
from torch_bridge._pairing.layers import flax_layers, torch_layers
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.match import Match
from torch_bridge._pairing.options import Flatten, Options, PairOptions, Rules
from torch_bridge._pairing.pairs import Pair
from torch_bridge._pairing.questions import Questions


class HasStateDict(Protocol):
    """A torch module, as far as it matters here."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors by name."""
        ...


Model: TypeAlias = Mapping[str, Any] | HasStateDict
Pairs: TypeAlias = Sequence[Pair]


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
) -> tuple[Pair, ...]:
    r"""Finds for every torch tensor its Flax leaf.

    A rule comes first. Else layers of equal names belong together (``layers.0.conv1.weight`` and
    ``layers_0/conv1/kernel``). Else layers whose names differ in numbers only go to the only group
    that fits, in the order of these numbers (those of a Sequential and ``Dense_0``, ``Dense_1``).
    Else one error lists all that is left, and the rules to write. Prefixes of DDP, FSDP and
    ``torch.compile`` are skipped. What neither names nor shapes tell is asked about; the error
    has the answers.

    Args:
      model: Torch state dict (or module): name -> tensor, array or anything with a ``shape``.
      like: Linen parameters, linen variables, ``nnx.State`` or an nnx module. Where it has no place
        for running statistics, those of `model` are left out.
      rules: Regular expression -> path, tried in order. The expression has to match a whole tensor
        or module name; the path is a leaf or a module, with groups as in ``r"block_\1/kernel"``.
        Where it names a tensor and a leaf of different kinds of layers (``norm.gamma`` and
        ``norm/scale``), these two become one pair, a matrix turned if its shape says so. A Linear
        that packs several goes to several modules, in the order of its rows:
        ``{r"h\.(\d+)\.c_attn": r"h_\1/query|h_\1/key|h_\1/value"}``.
      flatten: Regular expression of the module name of a Linear (or of a recurrent layer with its
        suffix, as in ``lstm.l0``) -> the channels-first shape ``(C, H, W)`` of what is flattened
        before it, or None if nothing is. Flax flattens ``(H, W, C)``, so the inputs of such a layer
        have to move. It is asked about behind a convolution, unless that gives one value for each
        input, or a layer before it as many. A norm of as many values directly before it follows it;
        one that stands elsewhere can be named itself.
      unflatten: The same for the outputs of a Linear that are seen as ``(C, H, W)``, as before the
        convolutions of a decoder, with the norm directly behind it. It is asked about where a
        convolution is next and has several of the outputs for each channel.
      conv_transpose: Regular expression of the module names of those ConvTranspose layers that have
        as many inputs as outputs, which no shape tells from a Conv; ``""`` for none. It is asked
        about where a name or a layer beside it suggests one.
      conv1d: Regular expression of the module names of square matrices that are stored ``(in,
        out)``, as by transformers' ``Conv1D``; ``""`` for none. All that are not square show it.
      ignore: Regular expression of tensor names that shall be left out.

    Returns:
      The pairs, in the natural order of the leaves. Every conversion takes them as `pairs`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf, with every
        question, or with those patterns of `rules`, `flatten`, `unflatten` and `conv1d` that match
        nothing, or name a shape where it moves nothing.

    Example:
      >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
      >>> like = {"Dense_0": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
      >>> [(p.torch_name, "/".join(p.path), p.kind) for p in pair(model, like)]
      [('fc.bias', 'Dense_0/bias', 'vector'), ('fc.weight', 'Dense_0/kernel', 'linear.weight')]
    """
    said = {"rules": rules, "flatten": flatten, "unflatten": unflatten}
    said |= {"conv_transpose": conv_transpose, "conv1d": conv1d, "ignore": ignore}
    return _pair_by(named(model), flatten_tree(like), Options.of(said))


def pairs_for(
    model: Model, like: Any, pairs: Pairs | None, **options: Unpack[PairOptions]
) -> tuple[Pair, ...]:
    """The pairs of a conversion: those that it was given, or what `pair` finds.

    Args:
      model: As for `pair`.
      like: The tree of the conversion, which may be a part of the one that `pairs` were made for:
        The parameters of linen variables, or the trainable ones.
      pairs: What `pair` gave.
      **options: Of `pair`, in place of `pairs`.

    Raises:
      TypeError: There is no such option.
      ValueError: Both are given.
      CheckpointMismatch: As for `pair`, or `like` is not of the tree that `pairs` were made for.
    """
    if pairs is None:
        return _pair_by(named(model), flatten_tree(like), Options.of(options))
    if given := [name for name, value in options.items() if value]:
        raise ValueError(
            f"`pairs` says already what belongs together. Leave out {', '.join(given)}, or give "
            "these to torch_bridge.pair."
        )
    return pairs_of(flatten_tree(like), pairs)


def pairs_of_whole(
    model: Mapping[str, Any], like: Any, pairs: Pairs | None, options: PairOptions
) -> tuple[Pair, ...]:
    """`pairs_for` what converts a whole model, and must not leave running statistics behind."""
    found = pairs_for(model, like, pairs, **options)
    if pairs is None:
        refuse_lost_statistics(model, like, options.get("ignore"))
    return found


def refuse_lost_statistics(model: Mapping[str, Any], like: Any, ignore: str | None) -> None:
    """Refuse a Flax tree without a place for the running statistics of a torch model.

    Raises:
      CheckpointMismatch: They would be lost on the way to JAX, or stale on the way back.
    """
    if flatten_tree(like).has_statistics:
        return
    homeless = [
        f"{name} {shape_of(model[name])}"
        for name, clean in clean_names(list(model)).items()
        if clean.endswith(("running_mean", "running_var"))
        and not (ignore and re.fullmatch(ignore, clean))
    ]
    if homeless:
        raise CheckpointMismatch(
            "The Flax tree has no place for running statistics. Pass linen variables with "
            "'batch_stats' (or an nnx.State with BatchStat), or ignore=r'.*running_(mean|var)'.",
            unexpected=homeless,
            parameters=("ignore",),
        )


def pairs_of(tree: Tree, pairs: Pairs) -> tuple[Pair, ...]:
    """Those of the pairs whose leaves are in a tree, by their paths there.

    Raises:
      CheckpointMismatch: The tree has other leaves, or some of another shape; all are listed.
    """
    found = []
    for pair in pairs:
        bare = pair.path[1:] if pair.path[:1] == ("params",) else pair.path
        path = next((p for p in (pair.path, bare, ("params", *bare)) if p in tree.shapes), None)
        if path is not None:
            found.append(pair if path == pair.path else dataclasses.replace(pair, path=path))
    shapes = {pair.path: pair.shape for pair in found}
    missing = ["/".join(path) for path in tree.shapes if path not in shapes]
    wrong = [
        f"{'/'.join(path)} {tree.shapes[path]}, paired as {shape}"
        for path, shape in shapes.items()
        if tree.shapes[path] != shape
    ]
    if missing or wrong:
        raise CheckpointMismatch(
            "The tree is not the one that `pairs` were made for. Call torch_bridge.pair with it, "
            "or with a tree that contains it.",
            missing=missing,
            mis_shaped=wrong,
        )
    return tuple(found)


def _pair_by(model: Mapping[str, Any], tree: Tree, options: Options) -> tuple[Pair, ...]:
    _refuse_unmatched(model, options)
    if options.ignore:
        cleaned = clean_names(list(model))
        model = {n: v for n, v in model.items() if not re.fullmatch(options.ignore, cleaned[n])}
    first: CheckpointMismatch | None = None
    for tied in _tie_attempts(model):
        try:
            return _pair(model, tree, options, tied)
        except CheckpointMismatch as error:
            first = first or error
    assert first is not None  # there is always an attempt
    raise first


def _refuse_unmatched(model: Mapping[str, Any], options: Options) -> None:
    """Refuse patterns that match nothing: what is misspelled would be ignored without a word."""
    asked = [(n, p) for n, p in options.patterns if n not in ("conv_transpose", "ignore")]
    if not asked or any(isinstance(value, jax.ShapeDtypeStruct) for value in model.values()):
        return  # a layout's shapes are a part of a model
    shapes = {name: shape_of(value) for name, value in model.items()}
    names = {
        layer.name
        for split in (False, True)
        for layer in torch_layers(shapes, split_attention=split, buffers=True)
    }
    tensors = set(clean_names(list(model)).values())
    unmatched = [
        (name, pattern)
        for name, pattern in asked
        if not any(
            re.fullmatch(pattern, n) for n in names | (tensors if name == "rules" else set())
        )
    ]
    if unmatched:
        raise CheckpointMismatch(
            "Some patterns match no layer of the torch model, and they have to match a whole "
            "name. Correct them or leave them out.",
            unexpected=[f"{name}: {pattern}" for name, pattern in unmatched],
            parameters=sorted({name for name, _ in unmatched}),
        )


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
) -> tuple[Pair, ...]:
    match = _matched(model, tree, options, tied)
    questions = Questions(match.torch, match.partners, options)
    built = questions.build()
    left = [layer for layer in match.open_flax if layer not in match.undecided]
    extra = [layer for layer in match.open_torch if layer not in match.undecided]
    problems = {
        "missing": [line for part in built for line in part.missing]
        + [f"{'/'.join(path)} {s}" for layer in left for path, s in layer.parts.values()],
        "unexpected": [line for part in built for line in part.unexpected]
        + [f"{name} {s}" for layer in extra for name, s in layer.parts.values()],
        "mis_shaped": [line for part in built for line in part.mis_shaped],
        "ambiguous": [*match.ambiguous, *questions.asked],
    }
    if any(problems.values()):
        raise CheckpointMismatch(
            "The torch model and the Flax tree do not correspond. Say what belongs together with "
            "`rules` (regular expression -> path) and what to leave out with `ignore`."
            if any(lines for title, lines in problems.items() if title != "ambiguous")
            or match.ambiguous
            else "Neither names nor shapes tell how some layers correspond. Answer with these "
            "arguments.",
            parameters=("rules", *_options_in(problems), "ignore"),
            **problems,
        )
    if questions.idle:
        raise CheckpointMismatch(
            "Some patterns name layers in which no order of (C, H, W) is kept: `flatten` is for "
            "what reads a flattened map, `unflatten` for a Linear whose outputs become one. "
            "Correct them or leave them out.",
            unexpected=questions.idle,
            parameters=sorted({line.partition(":")[0] for line in questions.idle}),
        )
    order = {path: k for k, path in enumerate(tree.shapes)}
    pairs = sorted((p for part in built for p in part.pairs), key=lambda p: order[p.path])
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    return tuple(
        dataclasses.replace(pair, aliases=tuple(aliases[pair.torch_name]))
        if pair.torch_name in aliases
        else pair
        for pair in pairs
    )


def _matched(
    model: Mapping[str, Any], tree: Tree, options: Options, tied: Collection[str]
) -> Match:
    """The layers brought together; attention is taken apart where one side alone packs it."""
    shapes = {name: shape_of(value) for name, value in model.items() if name not in tied}
    mine = torch_layers(shapes, split_attention=False, buffers=tree.has_statistics)
    theirs = flax_layers(tree, mine, split_attention=False)
    packed, split = (any(a.kind == "attention" for a in side) for side in (mine, theirs))
    if packed and not split:
        mine = torch_layers(shapes, split_attention=True, buffers=tree.has_statistics)
    elif split and not packed:
        theirs = flax_layers(tree, mine, split_attention=True)
    return Match(mine, theirs, options)


def _options_in(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """The options that the lines of an error speak of."""
    text = "\n".join(line for lines in problems.values() for line in lines)
    known = sorted(PairOptions.__optional_keys__ - {"ignore", "rules"})
    return [name for name in known if re.search(rf"\b{name}=", text)]


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
