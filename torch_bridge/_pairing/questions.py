"""What neither names nor shapes of two models tell, asked about in one error.

Nothing here decides: a question that the options do not answer stays open, with what to write.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch_bridge._pairing.kinds import (
    IN_OUT,
    LINEAR,
    OUT_IN,
    Answer,
    axes_of,
    kind_of,
)
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import Flow, maps_of, size_of
from torch_bridge._pairing.match import Match, Two, common_rule, grouped, pair_in_order
from torch_bridge._pairing.options import Options

# Matrices of which torch's own modules say that they are (out, in).
_OF_TORCH = re.compile(r".*\b(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
_HEADINGS = {
    "order": "alike, so that only the user can tell which is which",
    "conv1d": "square, which does not show whether it is stored (out, in) or, as by transformers' "
    "Conv1D, (in, out)",
    "conv_transpose": "as many inputs as outputs, which does not show a Conv from a ConvTranspose",
    "turned": "bare, of a shape that fits in several orders of its axes",
}
_SHOWN = 4  # candidates of one layer


class Questions:
    """The answers to what two models do not tell, and the questions that have none.

    Attributes:
      answers: What is known about each layer that has a partner.
      asked: The questions, each a line with its answers.
      wrong: Lines for answers that do not fit.
      plain: Whether `plain=True` answers all that is asked.
    """

    def __init__(self, match: Match, options: Options, known: Mapping[str, str]) -> None:
        self.options = options
        self.answers: dict[Layer, Answer] = {}
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.plain = True
        self._ask_order(match)
        self._ask_forms(match, known)
        self.flow = Flow(match.torch, match.partners, self.answers)
        self._ask_maps("flatten", self.flow.readers())
        self._ask_maps("unflatten", self.flow.givers())
        self._say_of_norms()
        self._ask_norms()
        self.answers = self.flow.with_norms(self.answers)

    # --- which of several layers ----------------------------------------------------------------

    def _ask_order(self, match: Match) -> None:
        """Pairs alike layers in the order of their numbers if that was said; else asks."""
        candidates, _ = match.candidates()
        groups = grouped(
            [layer for layer, targets in candidates.items() if targets],
            lambda layer: (layer.words, tuple(candidates[layer])),
        )
        wanted: dict[Layer, int] = {}
        for layers in groups.values():
            for target in candidates[layers[0]]:
                wanted[target] = wanted.get(target, 0) + 1
        for layers in groups.values():
            targets = candidates[layers[0]]
            two = pair_in_order(layers, targets)
            same_words = len({target.words for target in targets}) == 1
            contested = max(wanted[target] for target in targets) > 1
            if not two or not same_words or contested or not _rising(match, two):
                self._list(layers, targets)
            elif self.options.plain:
                match.partners.update(two)
            else:
                self.asked.append(
                    f"{listed(layers)} -> {listed(targets)}: {_HEADINGS['order']}. plain=True "
                    f"takes them in the order of their numbers; else {_rule_text(two)}"
                )

    def _list(self, layers: Sequence[Layer], targets: Sequence[Layer]) -> None:
        """Says of alike layers where they could go, and the rules for it."""
        self.plain = False
        by_words = list(grouped(targets, lambda target: target.words).values())
        rules: list[tuple[str, str]] = []
        for group in by_words:
            two = pair_in_order(layers, group)
            rule = common_rule(two) if two else None
            if rule:
                rules.append(rule)
        shapes = ", ".join(str(shape) for _, shape in layers[0].parts.values())
        if len(rules) == len(by_words) and len(by_words) > 1:
            could_be = {rules[0][0]: [path for _, path in rules]}
        else:
            could_be = {}
            for layer in layers:
                could_be[re.escape(layer.label)] = [target.label for target in targets]
        for pattern, names in could_be.items():
            shown = " or ".join(names[:_SHOWN])
            if len(names) > _SHOWN:
                shown += " or ..."
            self.asked.append(
                f"{pattern} {shapes} could be {shown}: say which, as in "
                f"rules={{{pattern!r}: {names[0]!r}}}"
            )

    # --- how a weight is stored -----------------------------------------------------------------

    def _ask_forms(self, match: Match, known: Mapping[str, str]) -> None:
        """Finds the form of every weight that fits in several; asks about those left open."""
        of_torch = _known_linears(match.torch)
        open_layers: dict[str, list[Layer]] = {}
        for layer in match.torch:
            target = match.partners.get(layer)
            if target is None:
                continue
            kind = kind_of(layer, target)
            forms = kind.forms(layer, target)
            if len(forms) < 2:
                continue
            if layer.name in known or layer in of_torch:
                self._know(layer, known.get(layer.name, OUT_IN))
                continue
            options = []
            if IN_OUT in forms:
                options.append("conv1d" if kind is LINEAR else "conv_transpose")
            if any(form not in (OUT_IN, IN_OUT) for form in forms):
                options.append("turned")
            for option in options:
                form = self.options.form_of(option, layer)
                if form is None:
                    open_layers.setdefault(option, []).append(layer)
                elif axes_of(form) and form not in forms:
                    leaf = target.line(next(iter(target.parts)))
                    self.wrong.append(f"{layer.label} <-> {leaf}, with turned={axes_of(form)}")
                elif form in forms:
                    self._know(layer, form)
        for option, layers in open_layers.items():
            pattern = listed(layers)
            none, one = f"{option}=''", f"{option}=<regular expression of those that are>"
            if option == "turned":
                none, one = "turned={}", f"turned={{{pattern!r}: (1, 0)}}, or another order"
            self.asked.append(
                f"{pattern}: {_HEADINGS[option]}. Say {none} if none of these is, else {one}"
            )

    def _know(self, layer: Layer, form: str) -> None:
        self.answers[layer] = Answer(form=form)

    # --- what is a flattened map ----------------------------------------------------------------

    def _ask_maps(self, option: str, layers: Iterable[Layer]) -> None:
        """Takes what was said of flattened maps; asks where a layer may read or give one."""
        open_layers: dict[Any, list[tuple[Layer, str]]] = {}
        for layer in layers:
            sizes = self.flow.sizes[layer]
            values = sizes.reads if option == "flatten" else sizes.gives
            if option == "flatten":
                proposal = self.flow.map_before(layer)
            else:
                proposal = self.flow.map_behind(layer)
            said = self.options.map_of(option, layer)
            if said is None:
                answered = self.options.plain or getattr(self.options, option) is not None
                if proposal and not answered:
                    key = layer.words, proposal[0], values
                    open_layers.setdefault(key, []).append((layer, proposal[1]))
                continue
            parts = said[0]
            if parts is None:
                continue
            shown = parts[0] if len(parts) == 1 else list(parts)
            if size_of(parts) != values:
                verb = "reads" if option == "flatten" else "gives"
                self.wrong.append(f"{layer.label} {verb} {values} values, with {option}={shown}")
                continue
            if proposal and len(parts) == 1 and _channels_last(parts[0], proposal[0]):
                warnings.warn(
                    f"{option}={shown} has the channels last, but {layer.name} {proposal[1]}: "
                    f"the shape is torch's (C, H, W), here {proposal[0]} perhaps.",
                    stacklevel=2,
                )
            answer = self.answers.get(layer, Answer())
            self.answers[layer] = answer._replace(**{option: maps_of(parts)})
        for (_, shape, _), alike in open_layers.items():
            names = listed([layer for layer, _ in alike])
            fact = alike[0][1]
            self.asked.append(
                f"{names} {fact}: say {option}={{{names!r}: {shape}}} if they are a flattened map; "
                f"{option} names all layers of which that is so, {option}={{}} none"
            )

    def _say_of_norms(self) -> None:
        """Takes what was said of norms by their names."""
        for layer in self.flow.layers:
            if not layer.is_vector:
                continue
            for option in ("flatten", "unflatten"):
                said = self.options.map_of(option, layer)
                if said is None:
                    continue
                parts = said[0] or ()
                if parts and size_of(parts) != self.flow.sizes[layer].gives:
                    self.wrong.append(f"{layer.label}, with {option}={parts[0]}")
                else:
                    self.answers[layer] = Answer(flatten=maps_of(parts))

    def _ask_norms(self) -> None:
        """Asks about norms and tables of as many values as a map that a layer elsewhere reads."""
        if self.options.plain or self.options.flatten is not None:
            return
        following = self.flow.with_norms(self.answers)
        maps: dict[int, Any] = {}
        for layer in self.flow.readers():
            proposal = self.flow.map_before(layer)
            if proposal:
                maps[self.flow.sizes[layer].reads] = proposal[0], layer
        for layer in self.flow.layers:
            values = self.flow.sizes[layer].gives
            if layer in following or values not in maps:
                continue
            if self.flow.is_table(layer):
                shape, reader = maps[values]
                self.asked.append(
                    f"{layer.label} has rows of {values} values, as many as {reader.label} reads: "
                    f"say unflatten={{{layer.label!r}: {shape}}} if they are a flattened map; "
                    "unflatten={} if not"
                )
            if not layer.is_vector:
                continue
            shape, reader = maps[values]
            beside = self.flow.before(layer) + self.flow.behind(layer)
            if self.flow.behind(layer) == [reader]:
                continue
            if not any(self.flow.sizes[other].space for other in beside):
                self.asked.append(
                    f"{layer.label} is of {values} values, as many as {reader.label} reads: say "
                    f"flatten={{{layer.label!r}: {shape}}} if they are a flattened map"
                )

    def movable(self) -> dict[str, Collection[str]]:
        """Returns by option the names of the layers that it can move."""
        vectors = {layer.name for layer in self.flow.layers if layer.is_vector}
        return {
            "flatten": {layer.name for layer in self.flow.readers()} | vectors,
            "unflatten": {layer.name for layer in self.flow.givers()} | vectors,
        }


def listed(layers: Iterable[Layer]) -> str:
    """Writes the names as one regular expression: those that differ in numbers only are one."""
    alike: dict[Any, list[str]] = {}
    for layer in layers:
        cased = re.sub(r"\d+", "#", layer.name)
        alike.setdefault(cased, []).append(layer.name)
    patterns: list[str] = []
    for names in alike.values():
        if len(names) == 1:
            patterns.append(names[0])
        else:
            patterns.append(re.sub(r"\d+", r"\\d+", names[0].replace(".", r"\.")))
    return "|".join(patterns)


def _rising(match: Match, two: Sequence[Two]) -> bool:
    """Tells whether the order of numbers agrees with what is decided of the same series."""
    words = two[0][0].words
    others = two[0][1].words
    numbers: dict[Any, Any] = {}
    for layer, target in match.partners.items():
        if layer.words == words and target.words == others and layer not in match.by_rule:
            numbers[layer.numbers] = target.numbers
    for layer, target in two:
        numbers[layer.numbers] = target.numbers
    places = [numbers[number] for number in sorted(numbers)]
    return places == sorted(places)


def _rule_text(two: Sequence[Two]) -> str:
    rule = common_rule(two)
    if rule is None:
        rule = re.escape(two[0][0].label), two[0][1].label
    return f"rules={{{rule[0]!r}: {rule[1]!r}}} and so on"


def _known_linears(layers: Iterable[Layer]) -> set[Layer]:
    """Collects the layers whose weight one of torch's own modules stores (out, in)."""
    packed: set[str] = set()
    known: set[Layer] = set()
    by_tensor: dict[str, Layer] = {}
    for layer in layers:
        for name, _ in layer.parts.values():
            by_tensor[name] = layer
            if name.endswith("in_proj_weight"):
                packed.add(name.removesuffix("in_proj_weight"))
            if _OF_TORCH.match(name):
                known.add(layer)
    for module in packed:
        if f"{module}out_proj.weight" in by_tensor:
            known.add(by_tensor[f"{module}out_proj.weight"])
    return known


def _channels_last(shape: tuple[int, ...], proposal: tuple[int, ...]) -> bool:
    if len(shape) < 2 or shape == proposal:
        return False
    turned = (shape[-1], math.prod(shape[:-1]))
    return turned == (proposal[0], math.prod(proposal[1:])) and shape[0] != proposal[0]
