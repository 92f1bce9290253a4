"""Pairs two models by rules, names and shapes, or by an example; or lists all problems."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import (
    STATISTICS,
    clean_names,
    equal_matrices,
    saved_names,
    shape_of,
    tied,
)
from torch_bridge._base.terminal import printable, warn
from torch_bridge._pairing.evidence import TRIES, Apply, Difference, Evidence, Example
from torch_bridge._pairing.kinds import CONV1D, OUT_IN, join
from torch_bridge._pairing.layers import Layer, layers_of, reparametrized
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Group, Match, grouped
from torch_bridge._pairing.options import Options, PairOptions, refuse_unused_patterns
from torch_bridge._pairing.pairs import Pair
from torch_bridge._pairing.proposals import Case
from torch_bridge._pairing.questions import Questions, answered, names_of
from torch_bridge._pairing.search import Search

# Class of torch or transformers -> the form of its weight; "" if Flax has two forms of it.
_FORMS = {"Linear": OUT_IN, "_ConvTransposeNd": "", "_ConvNd": OUT_IN, "Conv1D": CONV1D}
_PACKED_IN_FLAX = (
    "A Flax kernel that packs several (query, key and value) cannot be filled from separate torch "
    "weights: convert into a tree with separate kernels, and join them with np.concatenate. "
)
_STACKED_IN_FLAX = (
    "The Flax tree stacks layers that torch has one by one (nn.scan or nn.vmap). Convert into the "
    "tree of a model without it, and stack the leaves: jax.tree.map(lambda *leaves: "
    "np.stack(leaves), *layers). "
)
_DIFFERENT = (
    "The torch model and the Flax tree do not correspond. Say what belongs together with `rules` "
    "(regular expression -> path) and what to leave out with `ignore`."
)
_ORDER_IS_OPEN = (
    "Neither names nor shapes tell how some layers correspond. Pass apply= and example=, so that a "
    "run finds it out, or answer with these arguments."
)
_FORMS_ARE_OPEN = (
    "If nothing is unusual in this model (square weights are (out, in) and not of a ConvTranspose, "
    "no map is flattened, norms have one axis), plain=True answers all questions. Else answer with "
    "these arguments, or pass apply= and example=, so that a run finds it out."
)
_PLAIN_IS_OPEN = (
    "plain=True does not answer all questions. Answer with these arguments, or pass apply= and "
    "example=, so that a run finds it out."
)
_MAPS_ARE_OPEN = (
    "A layer beside a convolution has several values for each channel, which probably are a "
    "flattened map. Answer with these arguments, or pass apply= and example=, so that a run finds "
    "it out. plain=True says that there is no map."
)
_PLAIN_ORDER = (
    " plain=True pairs only layers whose names differ in nothing but their numbers, and count "
    "in the same way on both sides."
)


class Pairing(NamedTuple):
    """The pairs that a conversion uses.

    Attributes:
      pairs: Every tensor with its leaf.
      difference: The difference between the Flax outputs and torch's; None if no example was run.
    """

    pairs: tuple[Pair, ...]
    difference: Difference | None = None


def decide(
    tensors: Mapping[str, Any],
    tree: Tree,
    options: Options,
    known: Mapping[str, str],
    apply: Apply | None,
    example: Example | None,
) -> Pairing:
    """Pairs two models, with tied torch tensors as one leaf or as several leaves.

    Args:
      tensors: The torch tensors, by name.
      tree: The Flax tree.
      options: The user's options.
      known: Tensor name -> the form of its module's weight, for torch's own classes.
      apply: The Flax model, to run on the example.
      example: Inputs and outputs of the torch module.

    Raises:
      CheckpointMismatch: Layers do not fit, questions are open, or no run gives torch's outputs.
      ValueError: Only one of `apply` and `example` is passed.
    """
    evidence = Evidence.of(apply, example, tree, tensors)
    names = clean_names(list(tensors)).values()
    kept = options.kept(tensors)
    errors = []
    # The likeliest case first: tied tensors are one leaf, or they are several leaves, or the file
    # does not show the ties and equal matrices are one leaf.
    for ties, are_one in ((tied, True), (tied, False), (equal_matrices, True)):
        first = ties(kept)
        if not first and errors:
            continue  # the same tensors as before
        shapes = {}
        for name, value in kept.items():
            if not (are_one and name in first):
                shapes[name] = shape_of(value)
        match = Match(*layers_of(shapes, tree), options, known)
        refuse_unused_patterns(options, names, [layer.name for layer in match.layers.torch])
        match.match_names(misfits=not evidence)
        _leave_out_indices(match, kept)
        try:
            reading, difference = _complete(match, evidence, kept)
        except CheckpointMismatch as error:
            errors.append(error)
            if evidence and evidence.runs >= TRIES:
                break  # the number of runs is used up
            continue
        places = dict(zip(tree.shapes, itertools.count(), strict=False))
        pairs = sorted(reading.pairs(), key=lambda one: places[one.path])
        return Pairing(_with_aliases(pairs, kept, first), difference)
    for error in errors:
        if not (error.missing or error.unexpected or error.mis_shaped):
            raise error  # with these ties no tensor or leaf lacks a partner
    raise errors[0]


def _leave_out_indices(match: Match, tensors: Mapping[str, Any]) -> None:
    """Leaves out layers of integers, which are paired only by name or by a rule.

    A model of integers alone is kept.
    """
    floating = set()
    for name, value in tensors.items():
        if not re.search(r"\b(u?int|bool)", str(getattr(value, "dtype", ""))):
            floating.add(name)
    for layer in match.open().torch:
        if floating and floating.isdisjoint(layer.tensors()):
            match.layers.torch.remove(layer)


def refuse_lost_statistics(tensors: Mapping[str, Any], tree: Tree, options: Options) -> None:
    """Refuses a Flax tree without a place for torch's running statistics.

    They would be lost on the way to JAX, and torch would keep old statistics on the way back.

    Raises:
      CheckpointMismatch: The Flax tree has no statistics; the error lists torch's.
    """
    lost = list(filter(lambda name: name.endswith(STATISTICS), options.kept(tensors)))
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
    """Adds to every pair the other names of its tied tensor."""
    alike = grouped(tensors, lambda name: first.get(name, name))
    complete = []
    for one in pairs:
        aliases = list(alike[first.get(one.torch_name, one.torch_name)])
        aliases.remove(one.torch_name)
        complete.append(dataclasses.replace(one, aliases=tuple(aliases)))
    return tuple(complete)


def _complete(
    match: Match, evidence: Evidence | None, tensors: Mapping[str, Any]
) -> tuple[Reading, Difference | None]:
    """Decides what names leave open: by shapes and the user's options, or by an example."""
    if evidence is None:
        return _complete_by_shapes(match), None
    for divide in (match.take_shares, match.take_apart):
        divide(match.layers.without(match.assign(match.partners, match.layers)))
    match.match_names(misfits=False)
    reading, wrong = answered(match, match.assign(match.partners, match.layers))
    rest = match.layers.without(match.assign({}, match.layers))
    problems = _problems(match, reading, rest._replace(torch=[]), wrong)
    if any(problems.values()):
        problems["unexpected"] += _lines(rest.torch)
        raise _mismatch(match, problems, rest, _DIFFERENT)
    reading, difference = Search(Case(match, reading, evidence), tensors).prove()
    unused = _lines(match.layers.without(reading.partners).torch)
    if unused:
        warn(
            f"{reparametrized(unused)}Left out, because the Flax model has no place for it and "
            f"gives torch's outputs on the example without it: {printable('; '.join(unused))}. "
            "With ignore= there is no warning."
        )
    return reading, difference


def _complete_by_shapes(match: Match) -> Reading:
    """Pairs layers by shapes, and answers all questions with the user's options.

    Raises:
      CheckpointMismatch: Layers do not fit, or questions are open; the error lists all.
    """
    match.match_shapes()
    match.take_apart(match.groups()[1])
    match.match_names()
    match.match_shapes()
    groups, unmatched = match.groups()
    questions = Questions(match)
    questions.ask_orders(groups)
    reading, wrong = answered(match, match.partners)
    questions.ask(reading)
    problems = _problems(match, reading, unmatched, wrong)
    for torch, flax in groups:
        surplus = len(torch) - len(flax)
        if surplus > 0:
            problems["unexpected"].append(f"{surplus} of {names_of(torch)}")
        elif surplus < 0:
            problems["missing"].append(f"{-surplus} of {names_of(flax)}")
    is_different = any(problems.values())
    problems["ambiguous"] += questions.orders + questions.asked
    if any(problems.values()):
        is_plain = match.options.plain
        cases = (
            (is_different, _DIFFERENT),
            (questions.orders and is_plain, _ORDER_IS_OPEN + _PLAIN_ORDER),
            (questions.orders, _ORDER_IS_OPEN),
            (is_plain, _PLAIN_IS_OPEN),
            (questions.has_likely_map, _MAPS_ARE_OPEN),
            (True, _FORMS_ARE_OPEN),
        )
        message = next(sentence for applies, sentence in cases if applies)
        raise _mismatch(match, problems, unmatched, message)
    if questions.assumed:
        warn(
            "Assumed, because neither names nor shapes show it: "
            f"{printable('; '.join(questions.assumed))}. Only a run on an example proves it "
            "(apply= and example=)."
        )
    return reading


def _problems(
    match: Match, reading: Reading, unmatched: Group, wrong: Iterable[str]
) -> dict[str, list[str]]:
    """Lists what does not fit, by the lists of `CheckpointMismatch`.

    Args:
      match: The layers of both models.
      reading: The pairs of layers.
      unmatched: The layers without a partner.
      wrong: A line of text for each answer that does not fit.
    """
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "mis_shaped": []}
    for layer, target in reading.partners.items():
        for name, lines in join(layer, target).problems.items():
            problems[name] += lines
    problems["unexpected"] += _lines(unmatched.torch)
    problems["missing"] += _lines(unmatched.flax)
    problems["mis_shaped"] += wrong
    problems["ambiguous"] = match.ruled.problems.copy()
    return problems


def _lines(layers: Iterable[Layer]) -> list[str]:
    """Returns the name and shape of every part of some layers."""
    lines = []
    for layer in layers:
        lines += map(layer.line, layer.parts)
    return lines


def _mismatch(
    match: Match, problems: Mapping[str, list[str]], unmatched: Group, message: str
) -> CheckpointMismatch:
    """Returns the error for some problems, with hints before its message."""
    message = _hints(match, unmatched) + reparametrized(problems["unexpected"]) + message
    text = "\n".join(itertools.chain(*problems.values()))
    parameters = ["rules"]
    for name in sorted(PairOptions.__optional_keys__ - {"ignore", "rules"}):
        if re.search(rf"\b{name}=", text):
            parameters.append(name)
    parameters += ["ignore", "apply"]
    return CheckpointMismatch(message, parameters=parameters, **problems)


def _hints(match: Match, unmatched: Group) -> str:
    """Returns a hint from the shapes of layers that fit no other layer; "" if there is none."""
    kernels = [target.shape("kernel") for target in unmatched.flax]
    for shape, alike in grouped(unmatched.torch, lambda layer: layer.shape("weight")).items():
        count = len(alike)
        if not shape or count == 1:
            continue
        for kernel in kernels:
            if sorted(kernel[1:]) == sorted(shape) and math.gcd(count, kernel[0]) == kernel[0]:
                return _STACKED_IN_FLAX
            if math.prod(kernel) == count * math.prod(shape):
                return _PACKED_IN_FLAX
    of_torch, of_flax = map(_lengths, match.layers)
    only_torch = sorted(of_torch - of_flax)
    only_flax = sorted(of_flax - of_torch)
    if not (all(unmatched) and only_torch and only_flax):
        return ""
    return (
        f"It seems that a width differs: no leaf of Flax has an axis of {only_torch}, and no "
        f"tensor of torch has an axis of {only_flax}. "
    )


def _lengths(layers: Iterable[Layer]) -> set[int]:
    """Returns the lengths of all axes of some layers."""
    lengths = set()
    for layer in layers:
        lengths.update(*map(layer.shape, layer.parts))
    return lengths


def known_forms(model: Any) -> dict[str, str]:
    """Returns the form of each weight, by the class of its module; {} if `model` is a state dict.

    Returns:
      Name of each parameter of the module -> the form of its weight.
    """
    forms = {}
    for name, module in getattr(model, "named_modules", tuple)():
        for kind in reversed(type(module).__mro__):
            if kind.__name__ in _FORMS:
                names = [tensor for tensor, _ in module.named_parameters(prefix=name)]
                forms.update(dict.fromkeys(saved_names(names), _FORMS[kind.__name__]))
    return forms
