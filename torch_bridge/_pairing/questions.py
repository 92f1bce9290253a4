"""Asks what neither names nor shapes tell about two models, and answers with the user's options.

`Questions` asks which layer is which, how weights are stored and what is a flattened map; each
question says which argument to write. With ``plain=True`` it assumes the usual case, and says what
it assumes. `answered` puts the user's other options into a reading.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch_bridge._base.terminal import warn
from torch_bridge._pairing.kinds import CONV1D, CONV_TRANSPOSE, OUT_IN, Answer, Form, join
from torch_bridge._pairing.layers import OF_TORCH, Layer
from torch_bridge._pairing.leaves import names_transposed
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import PACKED, Group, Match, Partners, grouped
from torch_bridge._pairing.options import Flattened, maps_of, size_of

_SHOWN = 4  # the most layers that are listed by name
# Reasons to ask about a form in spite of ``plain=True``.
_UNUSUAL = {
    "conv1d": " Other matrices of this model are stored (in, out).",
    "conv_transpose": " Another layer of this series, or the name in Flax, is of a ConvTranspose.",
}
_ASSUMED_FORMS = {
    "conv1d": "{0}: stored (out, in) (else conv1d=)",
    "conv_transpose": "{0}: not a ConvTranspose (else conv_transpose=)",
    "turned": "{0}: torch's order of axes (else turned=)",
}
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


def _by_number(match: Match, group: Group) -> Partners:
    """Pairs layers that differ only in their numbers, in the order of the numbers; else none.

    Layers of the same series that are paired already must have the same order. Names that count by
    several numbers on one side and by one on the other (``convs1.0`` and ``Conv_0``) have no common
    order: the second number may count inside the first, or the first inside the second.
    """
    ours = set(map(operator.attrgetter("words"), group.torch))
    theirs = set(map(operator.attrgetter("words"), group.flax))
    if len(group.torch) != len(group.flax) or len(ours) > 1 or len(theirs) > 1:
        return {}
    torch = sorted(group.torch, key=lambda layer: layer.numbers)
    flax = sorted(group.flax, key=lambda target: target.numbers)
    if _levels(torch) != _levels(flax):
        return {}
    partners = dict(zip(torch, flax, strict=True))
    series = dict(partners)
    for layer, target in match.partners.items():
        is_series = layer.words in ours and target.words in theirs
        if is_series and layer not in match.ruled.partners:
            series[layer] = target
    numbers = []
    for layer in sorted(series, key=lambda layer: layer.numbers):
        numbers.append(series[layer].numbers)
    if numbers != sorted(numbers):
        return {}
    return partners


def _levels(layers: Iterable[Layer]) -> list[int]:
    """Returns for each layer but the first the level of the number that changes in its name.

    Of several numbers that change together the first one counts. Level 0 is the first number that
    changes anywhere.
    """
    places = []
    for before, layer in itertools.pairwise(layers):
        goes_on = map(operator.ne, before.numbers, layer.numbers)
        places.append([*goes_on, True].index(True))
    known = sorted(set(places))
    return list(map(known.index, places))


def answered(match: Match, partners: Partners) -> tuple[Reading, list[str]]:
    """Answers questions about some pairs of layers with the options.

    Args:
      match: The layers of both models, with the user's options.
      partners: Torch layer -> Flax layer, in any order.

    Returns:
      The reading, and a line of text for each answer that does not fit.
    """
    reading = Reading(match.in_order(partners), {})
    wrong = []
    for layer, forms in reading.forms().items():
        known = _known_form(layer, forms, match)
        if known:
            reading.answers[layer] = Answer(known)
            continue
        for option in _options_of(forms):
            answer = match.options.answer(option, layer.name)
            if answer is None:
                continue
            _, form = answer
            if form in forms:
                reading.answers[layer] = Answer(form)
            else:
                wrong.append(f"{layer} <-> {reading.partners[layer]}, with {option}: {form}")
    for layer, packing in match.ruled.packings.items():
        if layer not in reading.partners:
            continue
        reading = reading.with_answers([layer], "packing", packing)
        usual = join(layer, reading.partners[layer]).forms[:1]
        if not {reading.answer(layer).form, *usual}.isdisjoint((CONV1D, CONV_TRANSPOSE)):
            wrong.append(
                f"{layer} is stored (in, out), and a rule can only order rows of (out, in): "
                "transpose the weight in torch first"
            )
    flow = Flow(reading)
    for option in VERBS:
        moving = {}  # answers with a shape -> whether they name a layer that has values to move
        for layer in flow.layers:
            answer = match.options.answer(option, layer.name)
            if answer is None:
                continue
            pattern, parts = answer
            shown = f"{option}={{{pattern!r}: {_written(parts)}}}"
            field = "flatten" if layer.is_vector else option
            values = flow.sizes[layer].get(field)
            if parts:
                moving[shown] = moving.get(shown, False) or values is not None
            if values is None:
                continue
            reads = f"{layer} {VERBS[option]} {values} values"
            if parts and size_of(parts) != values:
                wrong.append(f"{reads}, with {option}={_written(parts)}")
                continue
            if parts and not layer.is_vector:
                _warn_of_channels_last(reads, parts, option, flow.proposal(option, layer))
            reading = reading.with_answers([layer], field, maps_of(parts))
        for shown in itertools.filterfalse(moving.__getitem__, moving):
            wrong.append(f"{shown}: none of these {VERBS[option]} values in a row")
    return reading, wrong


def _warn_of_channels_last(
    reads: str, parts: Flattened, option: str, proposal: Flattened | None
) -> None:
    """Warns if a shape has the last number where the proposed shape has the first."""
    shape = parts[0]
    if proposal and len(parts) == 1 and shape[-1] == proposal[0][0] != shape[0]:
        warn(
            f"{option}={shape} seems to have the channels last: {reads} of {proposal[0][0]} "
            f"channels. Pass torch's shape (C, H, W), perhaps {proposal[0]}."
        )


class Questions:
    """The questions that the options leave open.

    Attributes:
      orders: The questions which layer is which, each a line of text that says how to answer.
      asked: All other questions, likewise.
      has_likely_map: Whether a layer probably has a flattened map of a convolution.
      assumed: A line of text for each question that ``plain=True`` answers, although neither names
        nor shapes of other layers support the answer. And one for each kind of layer that seems to
        be packed, and for layers whose parts a rule names without their order.
    """

    def __init__(self, match: Match) -> None:
        self.orders = []
        self.asked = []
        self.has_likely_map = False
        self.assumed = []
        self._match = match
        self._options = match.options

    def ask_orders(self, groups: Iterable[Group]) -> None:
        """Asks about each group of layers that cannot be told apart.

        With ``plain=True`` layers that differ only in their numbers are paired instead.
        """
        for group in groups:
            torch, flax = map(names_of, group)
            by_number = _by_number(self._match, group)
            if by_number and self._options.plain:
                self._match.partners.update(by_number)
                self.assumed.append(
                    f"{torch} and {flax} are called in the order of their numbers on both sides "
                    "(else rules=)"
                )
                continue
            first = group.torch[0]
            shapes = ", ".join(map(str, map(first.shape, first.parts)))
            hint = ""
            if by_number:
                hint = (
                    " plain=True pairs them in the order of their numbers, which is right only if "
                    "the model calls them in this order."
                )
            self.orders.append(
                f"{torch} {shapes} could be {flax}: say which is which, as with "
                f"rules={{{re.escape(first.name)!r}: {group.flax[0].name!r}}}.{hint}"
            )

    def ask(self, reading: Reading) -> None:
        """Asks about the layers of a reading, which has the user's answers."""
        self._ask_forms(reading)
        flow = Flow(reading)
        self._assume_orders(flow, reading)
        for option in VERBS:
            if getattr(self._options, option) is None:
                self._ask_maps(flow, option)

    def _ask_forms(self, reading: Reading) -> None:
        """Asks for each weight with several possible forms which form it has."""
        asked = {}  # option -> layers
        assumed = {}
        odd = set()  # options of which other layers show the unusual form
        several = reading.forms()
        shown = _shown_forms(reading)
        for layer, forms in several.items():
            target = reading.partners[layer]
            is_norm = target.kind == "norm"
            if reading.answer(layer).form:
                continue
            if is_norm and layer in self._match.ruled.partners and len(layer.shape("weight")) == 2:
                continue  # a rule transposes a matrix only if its shape requires it
            for option in _options_of(forms):
                if getattr(self._options, option) is not None:
                    continue
                others = shown.get((option, layer.words), shown.get((option, ()), set()))
                if option == CONV_TRANSPOSE and names_transposed(target.segments[-1:]):
                    others = others | {option}
                if option in others:
                    odd.add(option)
                # plain=True knows no usual order of the axes of a norm.
                if not self._options.plain or is_norm or option in others:
                    asked.setdefault(option, []).append(layer)
                elif not others:
                    assumed.setdefault(option, []).append(layer)
        for option, layers in asked.items():
            orders = list(filter(_is_order, several[layers[0]][1:]))
            line = _OF_FORMS[option].format(listed(layers), *orders[:1])
            if option in odd:
                line += f".{_UNUSUAL[option]}"
            self.asked.append(line)
        for option, layers in assumed.items():
            self.assumed.append(_ASSUMED_FORMS[option].format(listed(layers)))

    def _assume_orders(self, flow: Flow, reading: Reading) -> None:
        """Names the layers that pack several parts, whose order no shape shows, or seem to.

        If they seem to, the next layer reads one part, and no layer reads all.
        """
        ruled = self._match.ruled
        kernels = []
        for layer, target in reading.partners.items():
            if layer.kind == "weight" and target.kind == "kernel":
                kernels.append(layer)
        gives = flow.channels["flatten"]
        reads = flow.channels["unflatten"]
        packed = []
        for layer, following in itertools.pairwise(kernels):
            is_known = layer.share or layer in ruled.partners or layer.is_packed_by_torch()
            is_part = gives[layer] in [count * (reads[following] or 0) for count in PACKED]
            if is_part and gives[layer] not in reads.values() and not is_known:
                packed.append(layer)
        if packed:
            name = re.escape(packed[0].name)
            path = reading.partners[packed[0]]
            self.assumed.append(
                f"{listed(packed)}: if the outputs are several parts, both sides have them in one "
                f"order (rules={{{name!r}: '1*({path}[0]|{path}[1])'}} says so of two, and "
                "'12*(...)' that in torch each of 12 heads has rows of every part)"
            )
        if ruled.consecutive:
            self.assumed.append(
                f"{listed(ruled.consecutive)}: all rows of a part follow each other (in rules= "
                "this is '1*(query|key|value)', and '12*(query|key|value)' if each of 12 heads has "
                "rows of every part)"
            )

    def _ask_maps(self, flow: Flow, option: str) -> None:
        """Asks for each layer that may read or output a map, and names norms of the same width."""
        for layers, values in flow.movable(option):
            if layers[0].is_vector or flow.is_table(layers[0]):
                continue
            shapes = list(filter(None, map(flow.proposal, itertools.repeat(option), layers)))
            if not shapes:
                continue
            names = listed(layers)
            answer = f"{option}={{{names!r}: {_written(shapes[0])}}}"
            has_other_source = all(flow.has_other_source(option, layer) for layer in layers)
            self.has_likely_map |= bool(flow.convs) and not has_other_source
            if self._options.plain:
                if not has_other_source:
                    self.assumed.append(
                        f"{names} {VERBS[option]} no flattened map (else {answer}; if there is "
                        f"none, {option}={{}})"
                    )
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
                f"{names} {VERBS[option]} {values} values: pass {answer} if these are a flattened "
                f"map of such a shape. Name all layers with a flattened map, or pass {option}={{}} "
                f"if there is none{hint}"
            )


def _shown_forms(reading: Reading) -> dict[Any, set[Form]]:
    """Returns the forms that other layers show, whose kernels have only one possible form.

    A model stores all its matrices in one way, unless it shows both. But convolutions of both kinds
    often stand in one model, so only those of the same series count.

    Returns:
      An option, and the words of the series or () for all layers -> the forms.
    """
    shown = {}
    for layer, target in reading.partners.items():
        forms = join(layer, target).forms
        if len(forms) == 1 and (layer.kind, target.kind) == ("weight", "kernel"):
            key = (CONV1D, ())
            if len(layer.shape("weight")) > 2:
                key = (CONV_TRANSPOSE, layer.words)
            shown.setdefault(key, set()).update(forms)
    return shown


def _known_form(layer: Layer, forms: Sequence[Form], match: Match) -> Form | None:
    """Returns the form of a weight of torch's own modules; None if it is unknown.

    Args:
      layer: The layer of the weight.
      forms: The possible forms.
      match: The layers of both models.
    """
    for name in layer.tensors():
        # The output projection of torch's attention stands beside the packed projections.
        packed = name.replace("out_proj.weight", "in_proj_weight")
        if packed in match.tensors and OF_TORCH.search(packed):
            return OUT_IN
    if len(forms) == 2:  # a Linear with three output axes in Flax has more orders
        return next(filter(None, map(match.known.get, layer.tensors())), None)
    return None


def _options_of(forms: Iterable[Form]) -> list[str]:
    """Returns the options that choose among some forms."""
    options = {}
    for form in forms:
        if _is_order(form):
            options["turned"] = None
        elif form != OUT_IN:
            options[form] = None
    return list(options)


def _is_order(form: Form) -> bool:
    return isinstance(form, tuple)


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


def names_of(layers: Sequence[Layer]) -> str:
    """Returns the names of a few layers, or one regular expression for many."""
    if len(layers) > _SHOWN:
        return listed(layers)
    return ", ".join(map(str, layers))
