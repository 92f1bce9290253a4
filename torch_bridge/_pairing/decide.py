"""Pairs two models by rules, names and shapes, or by an example; or says in one error why not."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import STATISTICS, clean_names, equal_matrices, shape_of, tied
from torch_bridge._base.terminal import printable
from torch_bridge._pairing.evidence import Evidence
from torch_bridge._pairing.kinds import IN_OUT, OUT_IN, build
from torch_bridge._pairing.layers import NO_LAYER, Layer, layers_of
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Group, Match
from torch_bridge._pairing.options import Options, PairOptions, refuse_idle_patterns
from torch_bridge._pairing.pairs import Pair
from torch_bridge._pairing.questions import Questions
from torch_bridge._pairing.search import Search, assign

# How torch's own classes, and transformers', store their weights.
_FORMS = {"Linear": OUT_IN, "_ConvNd": OUT_IN, "Conv1D": IN_OUT}
_REPARAMETRIZED = {
    "weight_norm keeps a length and a direction in the place of a weight. Put flax.linen."
    "WeightNorm around the layer, or call torch.nn.utils.remove_weight_norm (or parametrize."
    "remove_parametrizations) before the file is saved.": r".*(weight_g|weight\.original0)\b.*",
    "spectral_norm divides a weight by its largest singular value. Call torch.nn.utils."
    "remove_spectral_norm (or parametrize.remove_parametrizations) before the file is saved.": (
        r".*(weight_orig|weight\.original|weight\.0\._[uv]|weight_[uv])\b.*"
    ),
    "An LSTM with proj_size has no counterpart among Flax's cells. Write the cell by hand and name "
    "its leaves with rules.": r".*weight_hr_.*",
}
_PACKED_IN_FLAX = (
    "A kernel that packs several (query, key and value) is not filled from separate ones of torch: "
    "convert into a model, or a tree, with separate kernels, and join them with np.concatenate."
)
_DIFFERENT = (
    "The torch model and the Flax tree do not correspond. Say what belongs together with `rules` "
    "(regular expression -> path) and what to leave out with `ignore`."
)
_ORDER_IS_OPEN = (
    "Neither names nor shapes tell how some layers correspond. Give apply= and example=, which "
    "find it out, or answer with these arguments."
)
_FORMS_ARE_OPEN = (
    "If nothing is unusual in this model (square weights are (out, in) and no ConvTranspose's, no "
    "map is flattened), plain=True answers all of this. Else answer with these arguments; or give "
    "apply= and example=, which find it out."
)


class Paired(NamedTuple):
    """What a conversion goes by.

    Attributes:
      pairs: Every tensor with its leaf.
      difference: How far the Flax outputs were from torch's, relative to the largest; None where
        nothing was run.
    """

    pairs: tuple[Pair, ...]
    difference: float | None = None


def decide(
    tensors: Mapping[str, Any],
    tree: Tree,
    options: Options,
    known: Mapping[str, str],
    evidence: Evidence | None,
) -> Paired:
    """Pairs two models, with what is tied in torch as one leaf or several, or as values say.

    Args:
      tensors: Torch's, by name.
      tree: The Flax tree.
      options: What the user says.
      known: Module name -> how its weight is stored, of torch's own classes.
      evidence: An example, if there is one.

    Raises:
      CheckpointMismatch: Something does not fit, is not told, or does not give torch's outputs.
    """
    names = clean_names(list(tensors))
    kept = options.kept(tensors)
    indices = _tables_of_indices(kept)
    errors: list[CheckpointMismatch] = []
    # The likeliest first: what is tied is one leaf, or several, or the file shows no ties.
    for ties, untied in ((tied, False), (tied, True), (equal_matrices, False)):
        first = ties(kept)
        if not first and errors:
            continue  # the same tensors as before
        shapes: dict[str, tuple[int, ...]] = {}
        for name, value in kept.items():
            if untied or name not in first:
                shapes[name] = shape_of(value)
        match = Match(*layers_of(shapes, tree), options.rules)
        refuse_idle_patterns(options, names.values(), [layer.name for layer in match.torch])
        match.match_names(misfits=not evidence)
        for layer in match.open().torch:
            if indices.issuperset(layer.tensors()):
                match.torch.remove(layer)
        try:
            if evidence:
                reading, difference = _proved(match, options, known, evidence, kept)
            else:
                reading = _decided(match, options, known)
                difference = None
        except CheckpointMismatch as error:
            errors.append(error)
            continue
        places = dict(zip(tree.shapes, itertools.count(), strict=False))
        pairs = sorted(reading.pairs(), key=lambda one: places[one.path])
        return Paired(_with_aliases(pairs, kept, first), difference)
    for error in errors:
        if not (error.missing or error.unexpected or error.mis_shaped):
            raise error  # of ties that leave every tensor and leaf a place
    raise errors[0]


def _tables_of_indices(tensors: Mapping[str, Any]) -> set[str]:
    """Finds the integer tensors beside floating ones: they are leaves only by name or rule."""
    integers: set[str] = set()
    for name, value in tensors.items():
        dtype = str(getattr(value, "dtype", "float32")).removeprefix("torch.")
        if re.match(r"u?int|bool", dtype):
            integers.add(name)
    if len(integers) == len(tensors):
        return set()
    return integers


def refuse_lost_statistics(tensors: Mapping[str, Any], tree: Tree, options: Options) -> None:
    """Refuses running statistics without a place, which would be lost, or stale on the way back.

    Raises:
      CheckpointMismatch: With all of them.
    """
    lost = [name for name in options.kept(tensors) if name.endswith(STATISTICS)]
    if lost and not tree.has_statistics:
        raise CheckpointMismatch(
            "The Flax tree has no place for running statistics. Pass linen variables with "
            "'batch_stats' (or an nnx.State with BatchStat), or ignore=r'.*running_(mean|var)'.",
            unexpected=lost,
            parameters=("ignore",),
        )


def _with_aliases(
    pairs: Sequence[Pair], tensors: Collection[str], first: Mapping[str, str]
) -> tuple[Pair, ...]:
    """Gives every pair the other names of its tensor."""
    alike: dict[str, list[str]] = {}
    for name in tensors:
        alike.setdefault(first.get(name, name), []).append(name)
    complete: list[Pair] = []
    for one in pairs:
        group = alike[first.get(one.torch_name, one.torch_name)]
        others = tuple(name for name in group if name != one.torch_name)
        complete.append(dataclasses.replace(one, aliases=others))
    return tuple(complete)


def _decided(match: Match, options: Options, known: Mapping[str, str]) -> Reading:
    """Pairs by names and shapes, and by what the user says."""
    match.plain = options.plain
    if any(match.open()):
        match.match_shapes()
        match.take_apart(match.lonely())
        match.match_names()
        match.match_shapes()
    questions = Questions(match, options, known)
    _refuse_problems(match, questions, options)
    partners = {layer: match.partners[layer] for layer in match.torch if layer in match.partners}
    return Reading(partners, questions.answers)


def _proved(
    match: Match,
    options: Options,
    known: Mapping[str, str],
    evidence: Evidence,
    tensors: Mapping[str, Any],
) -> tuple[Reading, float]:
    """Pairs by an example, which decides what rules, names and answers leave open."""
    for divide in (match.take_shares, match.take_apart):
        partners = assign(match, match.partners, match.torch, match.flax)
        divide(Group(match.torch, match.flax).without(partners))
    match.match_names(misfits=False)
    questions = Questions(match, options, known)
    if questions.wrong or len(assign(match, {}, match.torch, match.flax)) < len(match.flax):
        match.match_shapes()
        _refuse_problems(match, questions, options)
    reading, difference = Search(match, questions.answers, options, evidence, tensors).prove()
    unused: list[str] = []
    for layer in match.torch:
        if layer not in reading.partners:
            unused += map(layer.line, layer.parts)
    if unused:
        warnings.warn(
            f"Left out, since the Flax model has no place for it and gives torch's outputs on the "
            f"example without it: {printable('; '.join(unused))}. ignore= says the same without a "
            "warning.",
            stacklevel=2,
        )
    return reading, difference


def _refuse_problems(match: Match, questions: Questions, options: Options) -> None:
    """Collects everything that does not fit or is not told, and raises it at once."""
    both = list(match.partners.items())
    lonely = match.lonely()
    both += [(layer, NO_LAYER) for layer in lonely.torch]
    both += [(NO_LAYER, target) for target in lonely.flax]
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "mis_shaped": []}
    for layer, target in both:
        built = build(layer, target)
        for name, lines in problems.items():
            lines += getattr(built, name)
    problems["mis_shaped"] += questions.wrong
    is_different = any(problems.values()) or match.problems
    problems["ambiguous"] = match.problems + questions.asked
    if not any(problems.values()):
        return
    message = _DIFFERENT
    if not is_different:
        message = _ORDER_IS_OPEN if questions.order else _FORMS_ARE_OPEN
    for sentence, pattern in _REPARAMETRIZED.items():
        if any(map(re.compile(pattern).match, problems["unexpected"])):
            message = f"{sentence} {message}"
    if _packs(lonely.torch, lonely.flax):
        message = f"{_PACKED_IN_FLAX} {message}"
    elif lonely.torch and lonely.flax:
        of_torch, of_flax = _lengths(match.torch), _lengths(match.flax)
        only_torch, only_flax = sorted(of_torch - of_flax), sorted(of_flax - of_torch)
        if only_torch and only_flax:
            message = (
                f"A width differs, it seems: no leaf of Flax has an axis of {only_torch}, and no "
                f"tensor of torch one of {only_flax}. {message}"
            )
    text = "\n".join(itertools.chain(*problems.values()))
    asked: list[str] = []
    for name in sorted(PairOptions.__optional_keys__ - {"ignore", "rules"}):
        if re.search(rf"\b{name}=", text):
            asked.append(name)
    raise CheckpointMismatch(message, parameters=("rules", *asked, "ignore", "apply"), **problems)


def _lengths(layers: Collection[Layer]) -> set[int]:
    """Collects the lengths of all axes."""
    lengths: set[int] = set()
    for layer in layers:
        for part in layer.parts:
            lengths.update(layer.shape(part))
    return lengths


def _packs(torch: Collection[Layer], flax: Collection[Layer]) -> bool:
    """Tells whether a Flax kernel would hold several of these torch weights, all of one shape."""
    sizes: set[int] = set()
    for shape, count in collections.Counter(layer.shape("weight") for layer in torch).items():
        if shape and count > 1:
            sizes.add(count * math.prod(shape))
    return any(math.prod(target.shape("kernel")) in sizes for target in flax)


def known_forms(model: Any) -> dict[str, str]:
    """Reads from the classes of a torch module how their weights are stored; {} of a state dict."""
    forms: dict[str, str] = {}
    for name, module in getattr(model, "named_modules", tuple)():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        for kind in kinds:
            if kind in _FORMS and "_ConvTransposeNd" not in kinds:
                forms[name] = _FORMS[kind]
    return forms
