"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import STATISTICS, clean_names, equal_matrices, shape_of, tied
from torch_bridge._pairing.build import build
from torch_bridge._pairing.layers import NO_LAYER, Shape, layers_of
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.match import Match
from torch_bridge._pairing.pairs import Pair
from torch_bridge._pairing.questions import Flatten, Options, PairOptions, Questions, Rules


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
        have to move. It is asked about where a layer reads at least twice as many values as a
        convolution gives channels, unless the last one before it, or a layer since, gives as many.
        A norm of as many values directly before it follows it; one elsewhere can be named itself.
      unflatten: The same for the outputs of a Linear that are seen as ``(C, H, W)``, as before the
        convolutions of a decoder, with the norm directly behind it. It is asked about where a
        convolution is next and has several of the outputs for each channel, unless a later layer
        reads as many.
      conv_transpose: Regular expression of the module names of those ConvTranspose layers that have
        as many inputs as outputs, which no shape tells from a Conv; ``""`` for none. It is asked
        about where a name or the shape of another layer suggests that there is one.
      conv1d: Regular expression of the module names of square matrices that are stored ``(in,
        out)``, as by transformers' ``Conv1D``; ``""`` for none. All that are not square show it.
      ignore: Regular expression of tensor names that shall be left out.

    Returns:
      The pairs, in the natural order of the leaves. Every conversion takes them as `pairs`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf, every
        question, and those patterns of `rules`, `flatten`, `unflatten` and `conv1d` that match
        nothing, or name a shape where it moves nothing.

    Warns:
      UserWarning: A shape of `flatten` or `unflatten` seems to have the channels last.

    Example:
      >>> import numpy as np
      >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
      >>> like = {"Dense_0": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
      >>> [(p.torch_name, "/".join(p.path), p.kind) for p in pair(model, like)]
      [('fc.bias', 'Dense_0/bias', 'vector'), ('fc.weight', 'Dense_0/kernel', 'linear.weight')]
    """
    options = Options(rules, flatten, unflatten, conv_transpose, conv1d, ignore)
    return _pair(named(model), flatten_tree(like), options)


def pairs_for(
    model: Model, like: Any, pairs: Pairs | None, options: PairOptions | None = None
) -> tuple[Pair, ...]:
    """The pairs of a conversion: those that it was given, or what `pair` finds.

    Args:
      model: The torch model.
      like: The Flax tree.
      pairs: What `pair` gave, or None.
      options: Of `pair`, for a whole model, which must not leave running statistics behind; None
        for a part of one.

    Raises:
      ValueError: Both `pairs` and `options` are given.
      TypeError: There is no such option.
      CheckpointMismatch: As for `pair` and `pairs_of`, or running statistics would be lost on the
        way to JAX, and stale on the way back.
    """
    known = PairOptions.__optional_keys__
    if unknown := [name for name in options or {} if name not in known]:
        there = ", ".join(sorted(known))
        raise TypeError(f"There is no argument {unknown[0]!r}; those of `pair` are {there}.")
    if pairs is None:
        whole, said = options is not None, Options(**options or {})
        return _pair(named(model), flatten_tree(like), said, whole=whole)
    if given := [name for name, value in (options or {}).items() if value]:
        raise ValueError(
            f"`pairs` says already what belongs together. Leave out {', '.join(given)}, or give "
            "these to torch_bridge.pair."
        )
    return pairs_of(like, pairs)


def pairs_of(like: Any, pairs: Pairs) -> tuple[Pair, ...]:
    """Those of the pairs whose leaves are in a tree.

    Args:
      like: The tree that `pairs` were made for, or a part of it: the parameters of linen variables,
        or the trainable ones.
      pairs: What `pair` gave.

    Raises:
      CheckpointMismatch: The tree has other leaves, or some of another shape; all are listed.
    """
    shapes = flatten_tree(like).shapes
    found = tuple(one for one in pairs if one.path in shapes)
    paired = {one.path: one.shape for one in found}
    missing = ["/".join(path) for path in shapes if path not in paired]
    wrong = [
        f"{'/'.join(path)} {shapes[path]}, paired as {shape}"
        for path, shape in paired.items()
        if shapes[path] != shape
    ]
    if missing or wrong:
        raise CheckpointMismatch(
            "The tree is not the one that `pairs` were made for. Call torch_bridge.pair with it, "
            "or with a tree that contains it.",
            missing=missing,
            mis_shaped=wrong,
        )
    return found


def _pair(
    model: Mapping[str, Any], tree: Tree, options: Options, *, whole: bool = False
) -> tuple[Pair, ...]:
    names = clean_names(list(model))
    ignored = {n for n, clean in names.items() if re.fullmatch(options.ignore or "(?!)", clean)}
    kept = {name: value for name, value in model.items() if name not in ignored}
    lost = [n for n in kept if whole and n.endswith(STATISTICS)]
    if lost and not tree.has_statistics:
        raise CheckpointMismatch(
            "The Flax tree has no place for running statistics. Pass linen variables with "
            "'batch_stats' (or an nnx.State with BatchStat), or ignore=r'.*running_(mean|var)'.",
            unexpected=[f"{name} {shape_of(kept[name])}" for name in lost],
            parameters=("ignore",),
        )
    errors: list[CheckpointMismatch] = []
    # The likeliest first: what is tied is one leaf, or several, or the file shows no ties.
    for ties, untied in ((tied, False), (tied, True), (equal_matrices, False)):
        first = ties(kept)
        shapes = {n: shape_of(value) for n, value in kept.items() if untied or n not in first}
        try:
            pairs = _pair_layers(shapes, tree, options, {*names.values()})
        except CheckpointMismatch as error:
            errors.append(error)
            continue
        alike: dict[str, list[str]] = {}
        for name in kept:
            alike.setdefault(first.get(name, name), []).append(name)
        others = {n: tuple(o for o in group if o != n) for group in alike.values() for n in group}
        return tuple(dataclasses.replace(one, aliases=others[one.torch_name]) for one in pairs)
    raise errors[0]


def _pair_layers(
    shapes: Mapping[str, Shape], tree: Tree, options: Options, tensors: Collection[str]
) -> list[Pair]:
    """The pairs of tensors; `tensors` are the names of all, ignored and tied ones included."""
    match = Match(*layers_of(shapes, tree), options.rules)
    questions = Questions(match.torch, match.partners, options)
    built = [build(a, b, questions.answers[a]) for a, b in match.partners.items()]
    built += [build(layer, NO_LAYER) for layer in match.open_torch]
    built += [build(NO_LAYER, layer) for layer in match.open_flax]
    if idle := questions.idle_patterns(tensors):
        raise CheckpointMismatch(
            "Some patterns match no layer of the torch model, and they have to match a whole name; "
            "or there is no order of (C, H, W) in it: `flatten` is for what reads a flattened map, "
            "`unflatten` for a Linear whose outputs become one. Correct them or leave them out.",
            unexpected=idle,
            parameters=sorted({line.partition(":")[0] for line in idle}),
        )
    problems = {
        kind: [line for part in built for line in part.problems[kind]]
        for kind in ("missing", "unexpected", "mis_shaped")
    }
    problems["ambiguous"] = match.ambiguous + questions.asked
    problems = {kind: lines for kind, lines in problems.items() if lines}
    if problems:
        raise CheckpointMismatch(
            "Neither names nor shapes tell how some layers correspond. Answer with these arguments."
            if problems == {"ambiguous": questions.asked}
            else "The torch model and the Flax tree do not correspond. Say what belongs together "
            "with `rules` (regular expression -> path) and what to leave out with `ignore`.",
            parameters=("rules", *_options_in(problems), "ignore"),
            **problems,
        )
    order = {path: k for k, path in enumerate(tree.shapes)}
    return sorted((p for part in built for p in part.pairs), key=lambda p: order[p.path])


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
