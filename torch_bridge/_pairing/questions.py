"""Collects the questions about two models that neither names nor shapes answer.

The options answer some of them. This file decides nothing itself: all other questions stay open,
and each says which argument to write.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch_bridge._pairing.kinds import OUT_IN, Answer, Form
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import Group, Match, Partners, grouped
from torch_bridge._pairing.options import Flattened, maps_of, size_of
from torch_bridge._pairing.pairs import Shape

# Matrices of torch's own modules, which always are (out, in).
_OF_TORCH = re.compile(r"\b(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
_SHOWN = 4  # the most layers that are listed by name
_OF_FORMS = {
    "conv1d": "{0}: a square matrix, which may be stored (out, in) or, as in transformers' Conv1D, "
    "(in, out). Pass conv1d='' if none of these is (in, out), else conv1d=<regular expression of "
    "those that are>",
    "conv_transpose": "{0}: as many inputs as outputs, so it may be a Conv or a ConvTranspose. "
    "Pass conv_transpose='' if none of these is a ConvTranspose, else conv_transpose=<regular "
    "expression of those that are>",
    "turned": "{0}: its shape fits in several orders of its axes. Pass turned={{}} if all have "
    "torch's order, else turned={{{0!r}: {1}}}, or another order",
}


def asked_orders(match: Match) -> list[str]:
    """Returns a question for each group of layers that cannot be told apart.

    With ``plain=True`` layers that differ only in their numbers are paired instead.
    """
    lines = []
    for group in match.groups():
        if not (group.torch and group.flax):
            continue
        by_number = _by_number(match, group)
        if by_number and match.options.plain:
            match.partners.update(by_number)
            continue
        first = group.torch[0]
        shapes = ", ".join(map(str, map(first.shape, first.parts)))
        hint = ""
        if by_number:
            hint = (
                " plain=True pairs them in the order of their numbers, which is right only if the "
                "model calls them in this order."
            )
        lines.append(
            f"{_shown(group.torch)} {shapes} could be {_shown(group.flax)}: say which is which, as "
            f"with rules={{{re.escape(str(first))!r}: {str(group.flax[0])!r}}}.{hint}"
        )
    return lines


def _by_number(match: Match, group: Group) -> Partners:
    """Pairs layers that differ only in their numbers, in the order of the numbers; else none.

    Layers of the same series that are paired already must have the same order. Names that count by
    several numbers on one side and by one on the other (``convs1.0`` and ``Conv_0``) have no common
    order: the second number may count inside the first, or the first inside the second.
    """
    ours = {layer.words for layer in group.torch}
    theirs = {target.words for target in group.flax}
    if len(group.torch) != len(group.flax) or len(ours) > 1 or len(theirs) > 1:
        return {}
    torch = sorted(group.torch, key=lambda layer: layer.numbers)
    flax = sorted(group.flax, key=lambda target: target.numbers)
    if _levels(torch) != _levels(flax):
        return {}
    partners = dict(zip(torch, flax, strict=True))
    series = list(partners.items())
    for layer, target in match.partners.items():
        is_series = layer.words in ours and target.words in theirs
        if is_series and layer not in match.by_rule:
            series.append((layer, target))
    series.sort(key=lambda two: two[0].numbers)
    numbers = [target.numbers for _, target in series]
    if numbers != sorted(numbers):
        return {}
    return partners


def _levels(layers: Sequence[Layer]) -> list[int]:
    """Returns for each layer but the first the level of the number in which its name goes on.

    Level 0 is the outermost number that goes on anywhere. Numbers that are equal in all names do
    not count, nor do those that only go on together with a number before them.
    """
    places = []
    for before, layer in itertools.pairwise(layers):
        place = 0
        for one, other in zip(before.numbers, layer.numbers, strict=True):
            if one != other:
                break
            place += 1
        places.append(place)
    known = sorted(set(places))
    return list(map(known.index, places))


class Questions:
    """The questions about some pairs of layers, with the options' answers.

    Attributes:
      reading: The pairs of layers, with the answer for each layer.
      asked: The open questions, each a line of text that says how to answer.
      wrong: A line of text for each answer that does not fit.
      likely: The arguments for flattened maps directly beside a convolution, which are likely. With
        ``plain=True`` they are not asked about.
    """

    def __init__(self, match: Match, partners: Partners) -> None:
        """Answers questions with the options, and collects those that stay open.

        Args:
          match: The layers of both models, with the user's options.
          partners: Torch layer -> Flax layer, in any order.
        """
        self._options = match.options
        self.reading = Reading(match.in_order(partners), {})
        self.asked = []
        self.wrong = []
        self.likely = []
        self._ask_forms(match)
        self._flow = Flow(self.reading)
        for option in VERBS:
            self._take_maps(option)
            if getattr(self._options, option) is None:
                self._ask_maps(option)

    def _ask_forms(self, match: Match) -> None:
        """Answers or asks for each weight with several possible forms which form it has."""
        open_layers = {}
        names = set(itertools.chain.from_iterable(map(Layer.tensors, self.reading.partners)))
        several = self.reading.forms()
        for layer, forms in several.items():
            form: Form | None = None
            packed = [name.replace("out_proj.weight", "in_proj_weight") for name in layer.tensors()]
            if any(map(_OF_TORCH.search, names.intersection(packed))):
                form = OUT_IN
            elif len(forms) == 2:  # a Linear with three output axes in Flax has more orders
                form = match.known.get(layer.name)
            is_norm = self.reading.partners[layer].sort == "norm"
            if is_norm and layer in match.by_rule and len(layer.shape("weight")) == 2:
                continue  # a rule transposes a matrix only if its shape requires it
            if form is not None:
                self.reading.answers[layer] = Answer(form)
                continue
            options = {}
            for form in forms:
                if isinstance(form, tuple):
                    options["turned"] = None
                elif form != OUT_IN:
                    options[form] = None
            for option in options:
                form = self._options.form_of(option, layer)
                if is_norm and self._options.turned is None:
                    form = None  # plain=True knows no usual order for a norm of several axes
                if form is None:
                    open_layers.setdefault(option, []).append(layer)
                elif form and form not in forms:
                    target = self.reading.partners[layer]
                    self.wrong.append(f"{layer} <-> {target}, with {option}: {form}")
                elif form:
                    self.reading.answers[layer] = Answer(form)
        for option, layers in open_layers.items():
            orders = [form for form in several[layers[0]][1:] if isinstance(form, tuple)]
            self.asked.append(_OF_FORMS[option].format(listed(layers), *orders[:1]))

    # --- flattened maps -------------------------------------------------------------------------

    def _take_maps(self, option: str) -> None:
        """Answers with the user's flattened maps, for layers and for norms."""
        idle = {}
        for layer in self._flow.layers:
            pattern, parts = self._options.map_of(option, layer)
            if pattern is None:
                continue
            field = "flatten" if layer.is_vector else option
            values = self._flow.sizes[layer].get(field)
            answer = f"{option}={{{pattern!r}: {_written(parts)}}}"
            idle[answer] = idle.get(answer, True) and bool(parts) and values is None
            if values is None:
                continue
            reads = f"{layer} {VERBS[option]} {values} values"
            if parts and size_of(parts) != values:
                self.wrong.append(f"{reads}, with {option}={_written(parts)}")
                continue
            proposal = None
            shape: Shape = ()
            if len(parts) == 1 and not layer.is_vector:
                shape = parts[0]
                proposal = self._flow.proposal(option, layer)
            if proposal and len(shape) > 1 and shape[-1] == proposal[0][0] != shape[0]:
                warnings.warn(
                    f"{option}={shape} has the channels last, but {reads} of {proposal[0][0]} "
                    f"channels: pass torch's shape (C, H, W), which here {proposal[0]} may be.",
                    stacklevel=2,
                )
            known = self.reading.answer(layer)
            self.reading.answers[layer] = known._replace(**{field: maps_of(parts)})
        for answer, moves_nothing in idle.items():
            if moves_nothing:
                self.wrong.append(f"{answer}: none of these {VERBS[option]} values in a row")

    def _ask_maps(self, option: str) -> None:
        """Asks for each layer that may read or output a map, and names norms of the same width."""
        flow = self._flow
        for layers, values in flow.movable(option):
            if layers[0].is_vector or flow.is_table(layers[0]):
                continue
            shape = None
            for layer in layers:
                shape = shape or flow.proposal(option, layer)
            if shape is None:
                continue
            names = listed(layers)
            shown = _written(shape)
            if any(flow.is_beside_convolution(option, layer) for layer in layers):
                self.likely.append(f"{option}={{{names!r}: {shown}}}")
            if self._options.plain:
                continue
            others = []
            for other in flow.layers:
                may_be = other.is_vector or flow.is_table(other)
                as_many = may_be and values in flow.sizes[other].values()
                if as_many and flow.following(other) not in layers:
                    others.append(other)
            hint = ""
            if others:
                hint = f". {listed(others)} may belong to the same map; then name it, too"
            self.asked.append(
                f"{names} {VERBS[option]} {values} values: pass {option}={{{names!r}: {shown}}} if "
                f"these are a flattened map of such a shape. Name all layers with a flattened map, "
                f"or pass {option}={{}} if there is none{hint}"
            )


def listed(layers: Iterable[Layer]) -> str:
    """Returns one regular expression for some layers; in a series, any number matches."""
    patterns = []
    for names in grouped(layers, lambda layer: re.sub(r"\d+", "#", str(layer))).values():
        name = str(names[0])
        if len(names) > 1:
            name = re.sub(r"\d+", r"\\d+", name.replace(".", r"\."))
        patterns.append(name)
    return "|".join(patterns)


def _written(parts: Flattened) -> Any:
    """Returns the parts of a flattened array as users write them."""
    if len(parts) == 1:
        return parts[0]
    return list(parts)


def _shown(layers: Sequence[Layer]) -> str:
    """Returns the names of a few layers, or one regular expression for many."""
    if len(layers) > _SHOWN:
        return listed(layers)
    return ", ".join(map(str, layers))
