"""What neither names nor shapes of two models tell, asked about in one error.

Nothing here decides: a question that the options do not answer stays open, with what to write.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_bridge._pairing.kinds import OUT_IN, Answer, Form
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import Group, Match, Partners, grouped
from torch_bridge._pairing.options import Flattened, maps_of, size_of
from torch_bridge._pairing.pairs import Shape

# Matrices of which torch's own modules say that they are (out, in).
_OF_TORCH = re.compile(r"\b(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
_SHOWN = 4  # layers of which each is named
_OF_FORMS = {
    "conv1d": "{0}: square, which does not show whether it is stored (out, in) or, as by "
    "transformers' Conv1D, (in, out). Say conv1d='' if none of these is, else conv1d=<regular "
    "expression of those that are>",
    "conv_transpose": "{0}: as many inputs as outputs, which does not show a Conv from a "
    "ConvTranspose. Say conv_transpose='' if none of these is, else conv_transpose=<regular "
    "expression of those that are>",
    "turned": "{0}: of a shape that fits in several orders of its axes. Say turned={{}} if none of "
    "these is, else turned={{{0!r}: (1, 0)}}, or another order",
}


def asked_orders(match: Match) -> list[str]:
    """Asks which of several alike layers is which, a line for each group.

    With ``plain=True`` those that differ in numbers only are paired, and not asked about.
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
                " plain=True takes both in the order of their numbers, which is right only if they "
                "are called in this order."
            )
        lines.append(
            f"{_shown(group.torch)} {shapes} could be {_shown(group.flax)}: say which is which, as "
            f"in rules={{{re.escape(str(first))!r}: {str(group.flax[0])!r}}}.{hint}"
        )
    return lines


def _by_number(match: Match, group: Group) -> Partners:
    """Pairs layers that differ in their numbers only, in the order of these; else none.

    The order has to agree with what is decided of the same series.
    """
    ours = {layer.words for layer in group.torch}
    theirs = {target.words for target in group.flax}
    if len(group.torch) != len(group.flax) or len(ours) > 1 or len(theirs) > 1:
        return {}
    sides = (sorted(side, key=lambda layer: layer.numbers) for side in group)
    partners = dict(zip(*sides, strict=True))
    series = list(partners.items())
    for layer, target in match.partners.items():
        is_series = layer.words in ours and target.words in theirs
        if is_series and layer not in match.by_rule:
            series.append((layer, target))
    series.sort(key=lambda two: two[0].numbers)
    numbers = [target.numbers for _, target in series]
    return partners if numbers == sorted(numbers) else {}


class Questions:
    """The answers to what some pairs of layers do not tell, and the questions that have none.

    Attributes:
      reading: The pairs, with what is known about each.
      asked: The questions, each a line with its answers.
      wrong: Lines for answers that do not fit.
    """

    def __init__(self, match: Match, partners: Partners) -> None:
        """Answers what the options answer, and asks the rest.

        Args:
          match: What is known of the layers.
          partners: Torch layer -> Flax layer, in any order.
        """
        self._options = match.options
        self.reading = Reading(match.in_order(partners), {})
        self.asked = []
        self.wrong = []
        self._ask_forms(match.known)
        self._flow = Flow(self.reading)
        for option in VERBS:
            self._take_maps(option)
            if not self._options.plain and getattr(self._options, option) is None:
                self._ask_maps(option)

    def _ask_forms(self, known: Mapping[str, str]) -> None:
        """Finds the form of every weight that fits in several; asks about those left open."""
        open_layers = {}
        names = set(itertools.chain.from_iterable(map(Layer.tensors, self.reading.partners)))
        for layer, forms in self.reading.forms().items():
            form: Form | None = None
            packed = [name.replace("out_proj.weight", "in_proj_weight") for name in layer.tensors()]
            if any(map(_OF_TORCH.search, names.intersection(packed))):
                form = OUT_IN
            elif len(forms) == 2:  # of three axes of outputs a Linear does not tell the order
                form = known.get(layer.name)
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
                if form is None:
                    open_layers.setdefault(option, []).append(layer)
                elif form and form not in forms:
                    target = self.reading.partners[layer]
                    self.wrong.append(f"{layer} <-> {target}, with {option}: {form}")
                elif form:
                    self.reading.answers[layer] = Answer(form)
        for option, layers in open_layers.items():
            self.asked.append(_OF_FORMS[option].format(listed(layers)))

    # --- what is a flattened map ----------------------------------------------------------------

    def _take_maps(self, option: str) -> None:
        """Takes what the user says of flattened maps, and of norms that are of one."""
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
                    f"channels: the shape is torch's (C, H, W), here {proposal[0]} perhaps.",
                    stacklevel=2,
                )
            known = self.reading.answer(layer)
            self.reading.answers[layer] = known._replace(**{field: maps_of(parts)})
        for answer, moves_nothing in idle.items():
            if moves_nothing:
                self.wrong.append(f"{answer}: none of these {VERBS[option]} values in a row")

    def _ask_maps(self, option: str) -> None:
        """Asks where a layer may read or give a map, and names what is of as many values."""
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
            others = []
            for other in flow.layers:
                may_be = other.is_vector or flow.is_table(other)
                as_many = may_be and values in flow.sizes[other].values()
                if as_many and flow.following(other) not in layers:
                    others.append(other)
            hint = ""
            if others:
                hint = f". {listed(others)} may be of the same map; then name it, too"
            self.asked.append(
                f"{names} {VERBS[option]} {values} values: say {option}={{{names!r}: {shown}}} if "
                f"they are a flattened map of such a shape; {option} names all layers of which "
                f"that is so, {option}={{}} none{hint}"
            )


def listed(layers: Iterable[Layer]) -> str:
    """Writes the names as one regular expression: those that differ in numbers only are one."""
    patterns = []
    for names in grouped(layers, lambda layer: re.sub(r"\d+", "#", str(layer))).values():
        name = str(names[0])
        if len(names) > 1:
            name = re.sub(r"\d+", r"\\d+", name.replace(".", r"\."))
        patterns.append(name)
    return "|".join(patterns)


def _written(parts: Flattened) -> Any:
    """Returns what is flattened as users write it."""
    if len(parts) == 1:
        return parts[0]
    return list(parts)


def _shown(layers: Sequence[Layer]) -> str:
    """Names a few layers, or writes the names of many as one regular expression."""
    if len(layers) > _SHOWN:
        return listed(layers)
    return ", ".join(map(str, layers))
