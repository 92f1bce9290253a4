"""What neither names nor shapes of two models tell, asked about in one error.

Nothing here decides: a question that the options do not answer stays open, with what to write.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch_bridge._pairing.kinds import IN_OUT, OUT_IN, USUAL, forms_of
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import VERBS, Answers, Flattened, Flow, maps_of, size_of
from torch_bridge._pairing.match import Group, Match, grouped
from torch_bridge._pairing.options import Options

# Matrices of which torch's own modules say that they are (out, in).
_OF_TORCH = re.compile(r"(.*\b)(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
_SHOWN = 4  # layers of which each is named
_HEADINGS = {
    "conv1d": "square, which does not show whether it is stored (out, in) or, as by transformers' "
    "Conv1D, (in, out)",
    "conv_transpose": "as many inputs as outputs, which does not show a Conv from a ConvTranspose",
    "turned": "of a shape that fits in several orders of its axes",
}


class Questions:
    """The answers to what two models do not tell, and the questions that have none.

    Attributes:
      answers: What is known about each layer that has a partner.
      asked: The questions, each a line with its answers.
      order: Whether one of them is which of several layers is which.
      wrong: Lines for answers that do not fit.
    """

    def __init__(self, match: Match, options: Options, known: Mapping[str, str]) -> None:
        """Answers what the options answer, and asks the rest.

        Args:
          match: The layers; with ``plain=True`` alike ones are paired here.
          options: What the user says.
          known: Module name -> how its weight is stored, of torch's own classes.
        """
        self._options = options
        self.answers: Answers = {}
        self.asked: list[str] = []
        self.wrong: list[str] = []
        for group in match.groups():
            self._ask_order(match, group)
        self.order = bool(self.asked)
        self._ask_forms(match, known)
        self._flow = Flow(match.torch, match.partners, self.answers)
        self._take_maps()
        if not options.plain:
            self._ask_maps()

    def _ask_order(self, match: Match, group: Group) -> None:
        """Pairs alike layers in the order of their numbers if that was said; else asks."""
        two = group.in_order()
        in_order = bool(two) and _rising(match, two)
        if in_order and self._options.plain:
            match.partners.update(two)
            return
        first = group.torch[0]
        shapes = ", ".join(str(first.shape(part)) for part in first.parts)
        hint = ""
        if in_order:
            hint = (
                " plain=True takes both in the order of their numbers, which is right only if they "
                "are called in this order."
            )
        self.asked.append(
            f"{_shown(group.torch)} {shapes} could be {_shown(group.flax)}: say which is which, as "
            f"in rules={{{re.escape(first.label)!r}: {group.flax[0].label!r}}}.{hint}"
        )

    def _ask_forms(self, match: Match, known: Mapping[str, str]) -> None:
        """Finds the form of every weight that fits in several; asks about those left open."""
        open_layers: dict[str, list[Layer]] = {}
        of_torch = _known_linears(match.torch)
        for layer, target in match.partners.items():
            forms = forms_of(layer, target)
            if len(forms) < 2:
                continue
            # A Linear may pack its outputs in another order, and torch's own modules do not.
            if layer in of_torch or (layer.name in known and len(forms) == 2):
                self.answers[layer] = USUAL._replace(form=known.get(layer.name, OUT_IN))
                continue
            options: list[str] = []
            if IN_OUT in forms:
                is_matrix = len(layer.shape("weight")) == 2
                options.append("conv1d" if is_matrix else "conv_transpose")
            if not {OUT_IN, IN_OUT}.issuperset(forms):
                options.append("turned")
            for option in options:
                form = self._options.form_of(option, layer)
                if form is None:
                    open_layers.setdefault(option, []).append(layer)
                elif form and form not in forms:
                    leaf = target.line(next(iter(target.parts)))
                    self.wrong.append(f"{layer.label} <-> {leaf}, with {option}: {form}")
                elif form:
                    self.answers[layer] = USUAL._replace(form=form)
        for option, layers in open_layers.items():
            pattern = listed(layers)
            none = f"{option}=''"
            one = f"{option}=<regular expression of those that are>"
            if option == "turned":
                none = "turned={}"
                one = f"turned={{{pattern!r}: (1, 0)}}, or another order"
            self.asked.append(
                f"{pattern}: {_HEADINGS[option]}. Say {none} if none of these is, else {one}"
            )

    # --- what is a flattened map ----------------------------------------------------------------

    def _take_maps(self) -> None:
        """Takes what the user says of flattened maps, and of norms that are of one."""
        idle: dict[str, bool] = {}
        for layer, (option, verb) in itertools.product(self._flow.layers, VERBS.items()):
            said = self._options.map_of(option, layer)
            if said is None:
                continue
            field = "flatten" if layer.is_vector else option
            values = self._flow.sizes[layer].get(field)
            parts = said[1] or ()
            shown = parts[0] if len(parts) == 1 else list(parts)
            line = f"{option}={{{said[0]!r}: {shown}}}: none of these {verb} values in a row"
            idle[line] = idle.get(line, True) and bool(parts) and values is None
            if values is None:
                continue
            if parts and size_of(parts) != values:
                self.wrong.append(f"{layer.label} {verb} {values} values, with {option}={shown}")
                continue
            self._warn_of_channels_last(option, layer, parts)
            answer = self.answers.get(layer, USUAL)
            self.answers[layer] = answer._replace(**{field: maps_of(parts)})
        self.wrong += [line for line, moves_nothing in idle.items() if moves_nothing]

    def _warn_of_channels_last(self, option: str, layer: Layer, parts: Flattened) -> None:
        if layer.is_vector or len(parts) != 1 or len(parts[0]) < 2:
            return
        proposal = self._flow.proposal(option, layer)
        channels, *space = proposal[0] if proposal else (0,)
        *first, last = parts[0]
        if (last, math.prod(first)) == (channels, math.prod(space)) and first[0] != channels:
            warnings.warn(
                f"{option}={parts[0]} has the channels last, but {layer.name} {VERBS[option]} "
                f"{math.prod(parts[0])} values of {channels} channels: the shape is torch's "
                f"(C, H, W), here {(channels, *space)} perhaps.",
                stacklevel=2,
            )

    def _ask_maps(self) -> None:
        """Asks where a layer may read or give a map, and names what is of as many values."""
        for option, verb in VERBS.items():
            for layers, values in self._flow.movable(option):
                if layers[0].is_vector or self._flow.is_table(layers[0]):
                    continue
                if getattr(self._options, option) is not None:
                    continue
                shape = None
                for layer in layers:
                    shape = shape or self._flow.proposal(option, layer)
                if shape is None:
                    continue
                names = listed(layers)
                shown = str(shape[0] if len(shape) == 1 else shape)
                others: list[Layer] = []
                for other in self._flow.layers:
                    is_table = self._flow.is_table(other)
                    size = self._flow.sizes[other].get("unflatten" if is_table else "flatten")
                    follows = self._flow.neighbour(other, 1) in layers
                    if (other.is_vector or is_table) and not follows and size == values:
                        others.append(other)
                hint = ""
                if others:
                    hint = f". {listed(others)} may be of the same map; then name it, too"
                self.asked.append(
                    f"{names} {verb} {values} values: say {option}={{{names!r}: {shown}}} if they "
                    f"are a flattened map of such a shape; {option} names all layers of which that "
                    f"is so, {option}={{}} none{hint}"
                )


def listed(layers: Iterable[Layer]) -> str:
    """Writes the names as one regular expression: those that differ in numbers only are one."""
    patterns: list[str] = []
    for names in grouped(layers, lambda layer: re.sub(r"\d+", "#", layer.label)).values():
        name = names[0].label
        if len(names) > 1:
            name = re.sub(r"\d+", r"\\d+", name.replace(".", r"\."))
        patterns.append(name)
    return "|".join(patterns)


def _shown(layers: Sequence[Layer]) -> str:
    """Names a few layers, or writes the names of many as one regular expression."""
    if len(layers) > _SHOWN:
        return listed(layers)
    return ", ".join(layer.label for layer in layers)


def _rising(match: Match, two: Sequence[tuple[Layer, Layer]]) -> bool:
    """Tells whether the order of numbers agrees with what is decided of the same series."""
    names = two[0][0].words, two[0][1].words
    numbers = {layer.numbers: target.numbers for layer, target in two}
    for layer, target in match.partners.items():
        if (layer.words, target.words) == names and layer not in match.by_rule:
            numbers[layer.numbers] = target.numbers
    places = [numbers[number] for number in sorted(numbers)]
    return places == sorted(places)


def _known_linears(layers: Iterable[Layer]) -> set[Layer]:
    """Collects the layers whose weight one of torch's own modules stores (out, in)."""
    modules: set[str] = set()
    known: set[Layer] = set()
    for layer in layers:
        for name in layer.tensors():
            own = _OF_TORCH.match(name)
            if own:
                known.add(layer)
                modules.add(f"{own[1]}out_proj.weight")
    for layer in layers:
        if not modules.isdisjoint(layer.tensors()):
            known.add(layer)
    return known
