"""Finds the reading of two models with which Flax gives torch's outputs, by trying.

A reading says which torch layer is which Flax layer, in which form each weight is stored, and what
is a flattened map. It starts from a few likely ones, and goes on with single changes of the one
that came nearest, the likeliest change first, for a limited number of runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.evidence import Apart, Evidence
from torch_bridge._pairing.kinds import CONV_TRANSPOSE, Answer
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import words_of
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import Match, grouped
from torch_bridge._pairing.pairs import Maps, Path, leaves_from_torch

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

    layers: list[Layer]
    field: str
    values: Sequence[Any]  # the likeliest first


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
        distance = min(self.distance / _FAR, 1.0)
        impatience = 1 + self.tried / _PATIENCE
        return (distance + _STEP * self.depth) * impatience


class Search:
    """The search for one reading among those that the layers of two models allow."""

    def __init__(
        self,
        match: Match,
        answered: Reading,
        evidence: Evidence,
        tensors: Mapping[str, Any],
    ) -> None:
        """Prepares a search.

        Args:
          match: The layers, with what rules say.
          answered: A reading, with what the user says of single layers, which is not searched for.
          evidence: The example.
          tensors: The torch tensors by name.
        """
        self._match = match
        self._answered = answered
        self._evidence = evidence
        self._tensors = tensors
        self._leaves = {}
        self._tried = []

    def prove(self) -> tuple[Reading, Apart]:
        """Finds a reading that gives torch's outputs, and looks whether no other does.

        Returns:
          It, and how far the outputs are apart.

        Raises:
          CheckpointMismatch: None of those tried does, or the example does not tell one from
            another.
        """
        layouts = self._evidence.layouts
        for place, layout in enumerate(layouts):
            self._evidence.use(layout)
            self._search(TRIES * (place + 1) // len(layouts))
            apart, reading = self._nearest()
            if apart.is_rounding:
                self._check(reading)
                return reading, apart
        raise self._refusal(*self._nearest())

    def _nearest(self) -> tuple[Apart, Reading]:
        return min(self._tried, key=lambda one: (not one[0].is_rounding, one[0].mean))

    def _search(self, tries: int) -> None:
        """Looks for a reading with the inputs in one layout, until one fits.

        Args:
          tries: Runs in all, earlier layouts included.
        """
        states = [_State(self._first_readings(), 0.0, -1)]
        seen = set()
        while states and self._evidence.runs < tries:
            parent = min(states, key=_State.cost)
            change = next(parent.changes, None)
            if change is None:
                states.remove(parent)
                continue
            parent.tried += 1
            reading = change.reading
            if reading.key() in seen:
                continue
            seen.add(reading.key())
            apart = self._evidence.apart(self._leaves_of(reading))
            self._tried.append((apart, reading))
            if apart.is_rounding:
                return
            states.append(_State(self._changes(reading), apart.mean, parent.depth + 1))

    def _leaves_of(self, reading: Reading) -> dict[Path, np.ndarray]:
        """Makes the leaves of a reading; those of the last one that are the same are kept."""
        leaves = {}
        for path, pairs in grouped(reading.pairs(), lambda pair: pair.path).items():
            made_of, leaf = self._leaves.get(path, (None, None))
            if made_of != pairs:
                leaf = leaves_from_torch(pairs, self._tensors)[path]
                self._leaves[path] = (pairs, leaf)
            leaves[path] = leaf
        return leaves

    def _first_readings(self) -> Iterator[Change]:
        """Lists likely readings: by names or without, in the order of use or of names."""
        match = self._match
        by_rule = {layer: match.partners[layer] for layer in match.by_rule}
        starts = (match.partners, by_rule)
        flax_orders = (sorted(match.flax, key=self._place), match.flax)
        torch_orders = (match.torch, _in_turn(match.torch))
        for decided, flax, torch in itertools.product(starts, flax_orders, torch_orders):
            reading = Reading(match.assign(decided, torch, flax), dict(self._answered.answers))
            for layer, forms in reading.forms().items():
                if CONV_TRANSPOSE in forms and self._is_upward(reading.partners[layer]):
                    reading.answers.setdefault(layer, Answer(CONV_TRANSPOSE))
            yield Change("", reading)

    def _place(self, target: Layer) -> float:
        """Returns the place of a layer in the order in which the Flax model uses them."""
        return min(map(self._evidence.order.__getitem__, target.tensors()))

    def _is_upward(self, target: Layer) -> bool:
        """Tells whether the Flax model uses a kernel as a ConvTranspose with a stride does."""
        return not self._evidence.upward.isdisjoint(target.tensors())

    # --- what may be otherwise ------------------------------------------------------------------

    def _changes(self, reading: Reading) -> Iterator[Change]:
        """Lists the single changes of a reading, the likeliest first."""
        forms = self._forms(reading)
        matrices = []
        kernels = []  # rarely another order, nor a ConvTranspose but where it is used with a stride
        for choice in forms:
            if len(choice.layers[0].shape("weight")) < 3:
                matrices.append(choice)
            else:
                kernels.append(choice)
        yield from _changed(reading, matrices + self._maps(reading))
        yield from self._exchanges(reading)
        yield from _changed(reading, kernels)
        for choice in forms:
            for layer in choice.layers:
                yield from _changed(reading, [choice._replace(layers=[layer])])

    def _forms(self, reading: Reading) -> list[Choice]:
        """Lists the weights that fit in several forms, layers of one name together."""
        forms = reading.forms()
        unanswered = [layer for layer in forms if not self._answered.answer(layer).form]
        choices = []
        for alike in grouped(unanswered, lambda layer: (layer.words, tuple(forms[layer]))).values():
            choices.append(Choice(alike, "form", forms[alike[0]]))
        return sorted(choices, key=lambda choice: len(choice.values))

    def _maps(self, reading: Reading) -> list[Choice]:
        """Lists the layers that may read or give a map, or other values beside one.

        Those come first that read or give as many values as Flax flattens, and norms last.
        """
        likely = []
        unlikely = []
        norms = []
        flow = Flow(reading)
        for option in VERBS:
            for alike, values in flow.movable(option):
                is_norm = alike[0].is_vector
                layers = [layer for layer in alike if not self._says(option, layer)]
                patterns = getattr(self._match.options, option)
                if not layers or (patterns == () and not is_norm):
                    continue  # {} says that there is none
                maps: list[Maps] = [()]
                beside = []
                for size, channels in self._evidence.maps:
                    one = (0, channels, size // channels)
                    if size == values:
                        maps.append((one,))
                    elif size < values and not is_norm:
                        beside += [(one,), ((values - size, *one[1:]),)]
                whole = Choice(layers, option, maps + beside)
                if is_norm:
                    norms.append(whole)
                    continue
                if len(maps) == 1:
                    unlikely.append(whole)
                    continue
                if len(layers) > 1:
                    # A map is read by the first of several Linears, and given by the last.
                    in_turn = sorted(layers, key=lambda layer: self._place(reading.partners[layer]))
                    nearest = in_turn[0]
                    if option == "unflatten":
                        nearest = in_turn[-1]
                    likely.append(Choice([nearest], option, maps))
                likely.append(whole)
        return likely + unlikely + norms

    def _says(self, option: str, layer: Layer) -> bool:
        """Tells whether the user says if a layer reads or gives a map."""
        pattern, _ = self._match.options.map_of(option, layer)
        return pattern is not None or bool(getattr(self._answered.answer(layer), option))

    def _exchanges(self, reading: Reading) -> Iterator[Change]:
        """Exchanges layers, or modules, that are alike in torch, or in Flax."""
        for ones, others in _exchangeable(reading.partners):
            yield from self._exchanged(reading, ones, others)
        back = {target: layer for layer, target in reading.partners.items()}
        targets = filter(back.__contains__, self._match.flax)
        for ones, others in _exchangeable(targets):
            first = list(map(back.__getitem__, ones))
            second = list(map(back.__getitem__, others))
            yield from self._exchanged(reading, first, second)

    def _exchanged(
        self, reading: Reading, ones: Sequence[Layer], others: Sequence[Layer]
    ) -> Iterator[Change]:
        """Exchanges the partners of some layers with those of others, if they fit."""
        layers = [*ones, *others]
        if not self._match.by_rule.isdisjoint(layers):
            return
        partners = dict(reading.partners)
        for layer, other in zip(layers, [*others, *ones], strict=True):
            partners[layer] = reading.partners[other]
        if all(self._match.fits(layer, partners[layer]) for layer in layers):
            first = f"{ones[0]} is {reading.partners[ones[0]]}"
            second = f"{others[0]} is {reading.partners[others[0]]}"
            text = f"{first}, and {second}, or the other way round"
            yield Change(text, Reading(partners, reading.answers))

    # --- does the example tell? -----------------------------------------------------------------

    def _neighbours(self, reading: Reading) -> Iterator[Change]:
        """Lists for what names do not tell one other reading each."""
        yield from _changed(reading, self._forms(reading))
        for choice in self._maps(reading):
            if choice.layers[0] in reading.answers:
                yield from _changed(reading, [choice])
        named = self._match.by_name | self._match.by_rule
        for alike in grouped(reading.partners, lambda layer: layer.signature).values():
            for one, other in itertools.pairwise(alike):
                if not {one, other} <= named:
                    yield from self._exchanged(reading, [one], [other])

    def _check(self, proved: Reading) -> None:
        """Runs neighbours of a reading: what gives the same outputs is not told by the example.

        Raises:
          CheckpointMismatch: With every layer that could as well be another.
        """
        leaves = self._leaves_of(proved)
        doubtful = []
        for text, reading in itertools.islice(self._neighbours(proved), _CHECKS):
            others = self._leaves_of(reading)
            if all(np.array_equal(leaves[path], others[path]) for path in leaves):
                continue  # equal values, wherever they go
            if self._evidence.apart(others).is_rounding:
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
            f"{apart.allowed:.1e} is rounding. {hint}: look at the eps and momentum of "
            "norms, the form of an activation (GELU with tanh or without), padding, evaluation "
            "mode, and what `apply` does with the inputs.",
            ambiguous=doubtful,
            parameters=("apply", "rules", "flatten", "conv1d", "conv_transpose"),
        )


def _changed(reading: Reading, choices: Iterable[Choice]) -> Iterator[Change]:
    """Lists the readings with another value of a choice."""
    for layers, field, values in choices:
        names = str(layers[0])
        if len(layers) > 1:
            names += f" to {layers[-1]}"
        what = "what is flattened"
        if field == "form":
            what = "how its weight is stored"
        now = getattr(reading.answer(layers[0]), field) or values[0]
        for value in values:
            if value == now:
                continue
            answers = dict(reading.answers)
            for layer in layers:
                answers[layer] = reading.answer(layer)._replace(**{field: value})
            yield Change(f"{names}: {what}", Reading(reading.partners, answers))


def _in_turn(layers: Sequence[Layer]) -> list[Layer]:
    """Orders layers as if lists of modules that stand one behind the other were called in turn.

    So lists of filters and of gates become the first filter, the first gate, the second filter.
    """
    ordered = []
    for _, run in itertools.groupby(layers, lambda layer: bool(_places_in_lists(layer))):
        ordered += sorted(run, key=_places_in_lists)
    return ordered


def _places_in_lists(layer: Layer) -> list[int]:
    return list(map(int, filter(str.isdigit, layer.segments)))


def _exchangeable(layers: Iterable[Layer]) -> Iterator[tuple[list[Layer], list[Layer]]]:
    """Lists modules that can be exchanged, as two lists of the layers in them.

    First all modules of one name with all of another (every query with every key), then any two.
    """
    nodes = {}
    for layer in layers:
        for length in range(1, len(layer.segments) + 1):
            nodes.setdefault(layer.segments[:length], []).append(layer)

    def contents(node: Path) -> tuple[Any, ...]:
        return tuple(layer.signature for layer in nodes[node])

    families = grouped(nodes, contents)
    for family in families.values():
        series = {}
        for node in family:
            series.setdefault(words_of(node)[0], []).extend(nodes[node])
        for ones, others in itertools.combinations(series.values(), 2):
            if len(ones) == len(others):
                yield ones, others
    for family in families.values():
        for one, other in itertools.combinations(family, 2):
            yield nodes[one], nodes[other]
