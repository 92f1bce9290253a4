"""Finds the reading of two models with which Flax gives torch's outputs, by trying.

A reading says which torch layer is which Flax layer, in which form each weight is stored, and what
is a flattened map. It starts from a few likely ones, and goes on with single changes of the one
that came nearest, the likeliest change first, for a limited number of runs.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.evidence import Apart, Evidence
from torch_bridge._pairing.kinds import IN_OUT, USUAL, forms_of
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import words_of
from torch_bridge._pairing.maps import VERBS, Answers, Flow, Reading, maps_of, size_of
from torch_bridge._pairing.match import FITS, Group, Match, Partners, grouped
from torch_bridge._pairing.options import Options
from torch_bridge._pairing.pairs import Maps, Pair, leaves_from_torch

TRIES = 500  # runs of the Flax model at most
_CHECKS = 64  # further runs that look whether the example tells the reading from its neighbours
_PATIENCE = 20  # changes of one reading after which it is put behind one twice as far off
_FAR = 0.3  # of the outputs' norm: above, a distance says nothing
_STEP = 0.2  # what one change more counts beside the distance
_SLIGHT = 1e-2  # of the largest output: as far as another eps or form of an activation leads
_SHOWN = 12  # layers in an error


class Change(NamedTuple):
    """A reading beside another, and what differs, as errors say it."""

    text: str
    reading: Reading


class Choice(NamedTuple):
    """What may be otherwise in some layers together: a field of their answers."""

    layers: tuple[Layer, ...]
    field: str
    values: tuple[Any, ...]  # the likeliest first


@dataclasses.dataclass
class _State:
    """A reading that was tried, and its changes that have not been.

    Attributes:
      changes: Those.
      distance: How far off the outputs of the reading are.
      depth: Changes since one of the first readings.
      tried: How many of its changes have been tried.
    """

    changes: Iterator[Change]
    distance: float
    depth: int
    tried: int = 0

    def cost(self) -> float:
        """Decides which state is gone on with: far ones differ by their depth only."""
        return (min(self.distance / _FAR, 1.0) + _STEP * self.depth) * (1 + self.tried / _PATIENCE)


class Search:
    """The search for one reading among those that the layers of two models allow."""

    def __init__(
        self,
        match: Match,
        answers: Answers,
        options: Options,
        evidence: Evidence,
        tensors: Mapping[str, Any],
    ) -> None:
        """Prepares a search.

        Args:
          match: The layers, with what rules say.
          answers: What the user says of single layers, which is not searched for.
          options: What the user says: `flatten` and `unflatten` name all layers with a map.
          evidence: The example.
          tensors: The torch tensors by name.
        """
        self._match = match
        self._said = answers
        self._options = options
        self._evidence = evidence
        self._tensors = tensors
        self._leaves: dict[tuple[str, ...], tuple[list[Pair], np.ndarray]] = {}
        self._tried: list[tuple[Apart, Reading]] = []

    def prove(self) -> tuple[Reading, float]:
        """Finds a reading that gives torch's outputs, and looks whether no other does.

        Returns:
          It, and how far the outputs are apart, relative to the largest of torch's.

        Raises:
          CheckpointMismatch: None of those tried does, or the example does not tell one from
            another.
        """
        layouts = self._evidence.layouts
        for place, layout in enumerate(layouts):
            self._evidence.use(layout)
            self._search(TRIES * (place + 1) // len(layouts))
            apart, reading = self._nearest()
            if apart.largest <= self._evidence.tolerance:
                self._check(reading, apart)
                return reading, apart.largest
        raise self._refusal(*self._nearest())

    def _nearest(self) -> tuple[Apart, Reading]:
        return min(self._tried, key=lambda one: one[0].mean)

    def _search(self, tries: int) -> None:
        """Looks for a reading with the inputs in one layout, until one fits.

        Args:
          tries: Runs in all, earlier layouts included.
        """
        first = _State(self._first_readings(), 0.0, -1)
        waiting: list[tuple[float, int, _State]] = [(-1.0, 0, first)]
        seen: set[Any] = set()
        while waiting and self._evidence.runs < tries:
            cost, number, parent = heapq.heappop(waiting)
            change = next(parent.changes, None)
            if change is None:
                continue
            parent.tried += 1
            if parent is not first:
                cost = parent.cost()
            heapq.heappush(waiting, (cost, number, parent))
            key = change.reading.key()
            if key in seen:
                continue
            seen.add(key)
            apart = self._evidence.apart(self._leaves_of(change.reading))
            self._tried.append((apart, change.reading))
            if apart.largest <= self._evidence.tolerance:
                return
            state = _State(self._changes(change.reading), apart.mean, parent.depth + 1)
            heapq.heappush(waiting, (state.cost(), len(seen), state))

    def _leaves_of(self, reading: Reading) -> dict[tuple[str, ...], np.ndarray]:
        """Makes the leaves of a reading; those of the last one that are the same are kept."""
        by_path: dict[tuple[str, ...], list[Pair]] = {}
        for pair in reading.pairs():
            by_path.setdefault(pair.path, []).append(pair)
        leaves: dict[tuple[str, ...], np.ndarray] = {}
        for path, pairs in by_path.items():
            kept = self._leaves.get(path)
            if kept is None or kept[0] != pairs:
                kept = pairs, leaves_from_torch(pairs, self._tensors)[path]
                self._leaves[path] = kept
            leaves[path] = kept[1]
        return leaves

    def _first_readings(self) -> Iterator[Change]:
        """Lists likely readings: by names or without, in the order of use or of names."""
        match = self._match
        by_rule = {layer: match.partners[layer] for layer in match.by_rule}
        used = sorted(match.flax, key=self._place)
        torch_orders = (match.torch, _in_turn(match.torch))
        choices = itertools.product((match.partners, by_rule), (used, match.flax), torch_orders)
        for decided, flax, torch in choices:
            partners = assign(match, decided, torch, flax)
            answers = self._answers_for(partners)
            for layer, target in partners.items():
                if self._is_upward(target) and IN_OUT in forms_of(layer, target):
                    answers.setdefault(layer, USUAL._replace(form=IN_OUT))
            yield Change("", Reading(partners, answers))

    def _answers_for(self, partners: Partners) -> Answers:
        """Adds to what the user says of layers the maps of those that names alone do not pair."""
        answers = dict(self._said)
        sizes = Flow(partners, partners, answers).sizes
        for layer, option in itertools.product(partners, VERBS):
            said = self._options.map_of(option, layer)
            field = "flatten" if layer.is_vector else option
            if layer in self._said or said is None or not said[1]:
                continue
            if size_of(said[1]) == sizes[layer].get(field):
                answer = answers.get(layer, USUAL)
                answers[layer] = answer._replace(**{field: maps_of(said[1])})
        return answers

    def _place(self, target: Layer) -> float:
        """Returns the place of a layer in the order in which the Flax model uses them."""
        return min(map(self._evidence.order.__getitem__, target.tensors()))

    def _is_upward(self, target: Layer) -> bool:
        """Tells whether the Flax model uses a kernel as a ConvTranspose with a stride does."""
        return not self._evidence.upward.isdisjoint(target.tensors())

    # --- what may be otherwise ------------------------------------------------------------------

    def _changes(self, reading: Reading) -> Iterator[Change]:
        """Lists the single changes of a reading, the likeliest first."""
        likely: list[Choice] = []
        unlikely: list[Choice] = []
        alone: list[Choice] = []
        for choice in self._forms(reading):
            first = choice.layers[0]
            # A kernel that is not used with a stride is rarely one of a ConvTranspose.
            is_kernel = len(first.shape("weight")) > 2
            if is_kernel and not self._is_upward(reading.partners[first]):
                unlikely.append(choice)
            else:
                likely.append(choice)
            if len(choice.layers) > 1:
                for layer in choice.layers:
                    alone.append(choice._replace(layers=(layer,)))
        yield from self._changed(reading, likely + self._maps(reading))
        yield from self._exchanges(reading)
        yield from self._changed(reading, unlikely)
        yield from self._changed(reading, alone)

    def _changed(self, reading: Reading, choices: Iterable[Choice]) -> Iterator[Change]:
        """Lists the readings with another value of a choice."""
        for choice in choices:
            now = getattr(reading.answers.get(choice.layers[0], USUAL), choice.field)
            names = choice.layers[0].label
            if len(choice.layers) > 1:
                names += f" to {choice.layers[-1].label}"
            what = "how its weight is stored" if choice.field == "form" else "what is flattened"
            for value in choice.values:
                if value == (now or choice.values[0]):
                    continue
                answers = dict(reading.answers)
                for layer in choice.layers:
                    answer = answers.get(layer, USUAL)
                    answers[layer] = answer._replace(**{choice.field: value})
                yield Change(f"{names}: {what}", Reading(reading.partners, answers))

    def _forms(self, reading: Reading) -> list[Choice]:
        """Lists the weights that fit in several forms, layers of one name together."""
        forms: dict[Layer, tuple[str, ...]] = {}
        for layer, target in reading.partners.items():
            several = tuple(forms_of(layer, target))
            if len(several) > 1 and not self._said.get(layer, USUAL).form:
                forms[layer] = several
        choices: list[Choice] = []
        for group in grouped(forms, lambda layer: (layer.words, forms[layer])).values():
            choices.append(Choice(tuple(group), "form", forms[group[0]]))
        return sorted(choices, key=lambda choice: len(choice.values))

    def _maps(self, reading: Reading) -> list[Choice]:
        """Lists the layers that may read or give a map, or other values beside one.

        Those come first that read or give as many values as Flax flattens, and norms last.
        """
        flow = Flow(reading.partners, reading.partners, reading.answers)
        choices: list[tuple[Any, Choice]] = []
        for option in VERBS:
            for alike, values in flow.movable(option):
                is_norm = alike[0].is_vector
                layers: list[Layer] = []
                for layer in alike:
                    said = self._options.map_of(option, layer)
                    if said is None and not getattr(self._said.get(layer, USUAL), option):
                        layers.append(layer)
                none_at_all = getattr(self._options, option) == {} and not is_norm
                if none_at_all or not layers:
                    continue
                maps: list[Maps] = [()]
                beside: list[Maps] = []
                for size, channels in self._evidence.maps:
                    places = size // channels
                    if size == values:
                        maps.append(((0, channels, places),))
                    elif size < values and not is_norm:
                        beside.append(((0, channels, places),))
                        beside.append(((values - size, channels, places),))
                unlikely = (is_norm, len(maps) == 1)
                if len(layers) > 1 and not any(unlikely):
                    # A map is read by the first of several Linears, and given by the last.
                    end = min if option == "flatten" else max
                    nearest = end(layers, key=lambda layer: self._place(reading.partners[layer]))
                    choices.append((unlikely, Choice((nearest,), option, tuple(maps))))
                choices.append((unlikely, Choice(tuple(layers), option, tuple(maps + beside))))
        choices.sort(key=lambda one: one[0])
        return [choice for _, choice in choices]

    def _exchanges(self, reading: Reading) -> Iterator[Change]:
        """Exchanges layers, or modules, that are alike in torch, or in Flax."""
        back = {target: layer for layer, target in reading.partners.items()}
        for ones, others in _exchangeable(list(reading.partners)):
            yield from self._exchanged(reading, ones, others)
        targets = [target for target in self._match.flax if target in back]
        for ones, others in _exchangeable(targets):
            first = [back[target] for target in ones]
            second = [back[target] for target in others]
            yield from self._exchanged(reading, first, second)

    def _exchanged(
        self, reading: Reading, ones: Sequence[Layer], others: Sequence[Layer]
    ) -> Iterator[Change]:
        """Exchanges the partners of some layers with those of others, if they fit."""
        layers = [*ones, *others]
        if not self._match.by_rule.isdisjoint(layers):
            return
        partners = dict(reading.partners)
        for one, other in zip(ones, others, strict=True):
            partners[one], partners[other] = partners[other], partners[one]
        if all(self._match.fits(layer, partners[layer]) for layer in layers):
            first = f"{ones[0].label} is {reading.partners[ones[0]].label}"
            second = f"{others[0].label} is {reading.partners[others[0]].label}"
            text = f"{first}, and {second}, or the other way round"
            yield Change(text, Reading(partners, reading.answers))

    # --- does the example tell? -----------------------------------------------------------------

    def _neighbours(self, reading: Reading) -> Iterator[Change]:
        """Lists for what names do not tell one other reading each."""
        maps = [choice for choice in self._maps(reading) if choice.layers[0] in reading.answers]
        yield from self._changed(reading, self._forms(reading) + maps)
        named = self._match.by_name | self._match.by_rule
        for alike in grouped(reading.partners, lambda layer: layer.signature).values():
            for one, other in itertools.pairwise(alike):
                if not {one, other} <= named:
                    yield from self._exchanged(reading, [one], [other])

    def _check(self, proved: Reading, difference: Apart) -> None:
        """Runs neighbours of a reading: what gives the same outputs is not told by the example.

        Raises:
          CheckpointMismatch: With every layer that could as well be another.
        """
        leaves = self._leaves_of(proved)
        doubtful: list[str] = []
        for text, reading in itertools.islice(self._neighbours(proved), _CHECKS):
            others = self._leaves_of(reading)
            if all(np.array_equal(leaves[path], others[path]) for path in leaves):
                continue  # equal values, wherever they go
            apart = self._evidence.apart(others)
            if apart.largest <= max(self._evidence.tolerance, difference.largest):
                doubtful.append(text)
        if doubtful:
            raise CheckpointMismatch(
                "The Flax model gives torch's outputs, but it would with some layers exchanged, "
                "too, so that the example does not tell which is which. Take other inputs, or say "
                "it with these arguments.",
                ambiguous=doubtful,
                parameters=("rules", "conv1d", "conv_transpose", "flatten"),
            )

    def _refusal(self, apart: Apart, reading: Reading) -> CheckpointMismatch:
        """Says how far the nearest reading is off, and what could have been otherwise."""
        doubtful = [text for text, _ in itertools.islice(self._neighbours(reading), _SHOWN)]
        hint = "All layers have their places, so that the two models seem to compute something else"
        if apart.largest < _SLIGHT:
            hint = "So little is rarely a layer in another's place, and often another formula"
        elif doubtful:
            hint = (
                "The layers in doubt are listed; say of them what you know (rules, flatten, "
                "conv1d, conv_transpose). If all are right, the models compute something else"
            )
        return CheckpointMismatch(
            f"The Flax model does not give torch's outputs: after {self._evidence.runs} tries the "
            f"nearest are {apart.largest:.1e} of the largest output off, where "
            f"{self._evidence.tolerance:.0e} is rounding. {hint}: look at the eps and momentum of "
            "norms, the form of an activation (GELU with tanh or without), padding, evaluation "
            "mode, and what `apply` does with the inputs.",
            ambiguous=doubtful,
            parameters=("apply", "rules", "flatten", "conv1d", "conv_transpose"),
        )


def assign(
    match: Match, decided: Mapping[Layer, Layer], torch: list[Layer], flax: list[Layer]
) -> Partners:
    """Pairs as many layers as can be, those at the same place of two orders, where they fit.

    Args:
      match: The layers.
      decided: What is paired already.
      torch: The torch layers in an order.
      flax: The Flax layers in an order.
    """
    ones, others = Group(torch, flax).without(decided)
    strengths = np.zeros((len(ones), len(others)))
    rows = grouped(range(len(ones)), lambda place: ones[place].signature)
    columns = grouped(range(len(others)), lambda place: others[place].signature)
    for alike, fitting in itertools.product(rows.values(), columns.values()):
        strengths[np.ix_(alike, fitting)] = match.fits(ones[alike[0]], others[fitting[0]])
    apart = np.arange(len(ones))[:, None] / len(ones) - np.arange(len(others)) / len(others)
    # One layer more in its usual form outweighs all places, and one more at all outweighs that.
    count = 1 + len(ones)
    costs = apart**2 + count * (FITS - strengths) + count**2 * (strengths == 0)
    partners = dict(decided)
    for row, column in zip(*linear_sum_assignment(costs), strict=True):
        if strengths[row, column]:
            partners[ones[row]] = others[column]
    return {layer: partners[layer] for layer in match.torch if layer in partners}


def _in_turn(layers: Sequence[Layer]) -> list[Layer]:
    """Orders layers as if lists of modules that stand one behind the other were called in turn.

    So lists of filters and of gates become the first filter, the first gate, the second filter.
    """
    ordered: list[Layer] = []
    for _, run in itertools.groupby(layers, key=lambda layer: bool(_places_in_lists(layer))):
        ordered += sorted(run, key=_places_in_lists)
    return ordered


def _places_in_lists(layer: Layer) -> list[int]:
    return list(map(int, filter(str.isdigit, layer.segments)))


def _exchangeable(layers: Sequence[Layer]) -> Iterator[tuple[list[Layer], list[Layer]]]:
    """Lists modules that can be exchanged, as two lists of the layers in them.

    First all modules of one name with all of another (every query with every key), then any two.
    """
    nodes: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        for length in range(1, len(layer.segments) + 1):
            nodes.setdefault(layer.segments[:length], []).append(layer)
    families = grouped(nodes, lambda node: tuple(layer.signature for layer in nodes[node]))
    for family in families.values():
        series: dict[Any, list[Layer]] = {}
        for node in family:
            series.setdefault(words_of(node)[0], []).extend(nodes[node])
        for ones, others in itertools.combinations(series.values(), 2):
            if len(ones) == len(others):
                yield ones, others
    for family in families.values():
        for one, other in itertools.combinations(family, 2):
            yield nodes[one], nodes[other]
