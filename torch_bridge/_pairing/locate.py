"""Locates layers in a Flax model, by what torch's layers were applied to.

A Flax layer is located if it is applied to what a torch layer was applied to. Then all layers
before it are right, which are called confirmed here. So a mistake is between the confirmed layers
and the first layer that is not located, and only the few layers there are changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from torch_bridge._pairing.evidence import Difference
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Group, Partners, grouped
from torch_bridge._pairing.pairs import Path
from torch_bridge._pairing.proposals import Case, changes, exchanged, rearranged
from torch_bridge._pairing.trace import Use

_FEW = 5  # up to so many layers that are applied to one array are tried in all orders


class Located(NamedTuple):
    """What a run of a reading has shown about its layers.

    Attributes:
      reading: The reading.
      partners: Torch layer -> the Flax layer that is applied to the same array.
      uses: Flax layer -> the first use of its matrix.
      confirmed: The leaves on which the inputs of the located layers depend.
    """

    reading: Reading
    partners: Partners
    uses: dict[Layer, Use]
    confirmed: frozenset[Path]

    def is_confirmed(self, target: Layer) -> bool:
        """Returns whether a Flax layer comes before a located layer."""
        return not self.confirmed.isdisjoint(target.tensors())

    def sources(self, target: Layer) -> frozenset[Path]:
        """Returns the leaves on which the inputs of a Flax layer depend; none if it has no use."""
        use = self.uses.get(target)
        return use.sources if use else frozenset()


class Locator:
    """The calls of a torch module, with which layers are located in a Flax model.

    Attributes:
      torch: The torch layers in the order of use.
    """

    def __init__(self, case: Case) -> None:
        """Reads the calls of an example."""
        self._case = case
        self._extremes = {}  # torch layer -> the extremes of what it was applied to
        calls = case.evidence.calls
        places = dict(zip(calls, itertools.count(), strict=False))
        used = {}  # torch layer -> its place in the order of use
        for layer in case.match.layers.torch:
            used[layer] = min(places.get(name, math.inf) for name in layer.tensors())
            extremes = calls.get(_matrix(layer))
            if extremes is not None and np.isfinite(extremes).all():
                self._extremes[layer] = extremes
        self.torch = sorted(case.match.layers.torch, key=used.__getitem__)
        self._together = []  # lists of layers that were applied to the same array
        for layer in filter(self._extremes.__contains__, self.torch):
            for alike in self._together:
                if self._is_same(alike[0], self._extremes[layer]):
                    alike.append(layer)
                    break
            else:
                self._together.append([layer])

    def located(self, reading: Reading, difference: Difference) -> Located:
        """Locates the layers of a reading that was run; those of its pairs stay together."""
        match = self._case.match
        by_path = difference.uses or {}
        uses = {}
        for target in match.layers.flax:
            use = by_path.get(_matrix(target))
            if use:
                uses[target] = use
        located = {}
        for torch in self._together:
            flax = [one for one, use in uses.items() if self._is_same(torch[0], use.extremes)]
            for layer in torch:
                if reading.partners.get(layer) in flax:
                    located[layer] = reading.partners[layer]
            free = Group(torch, flax).without(match.ruled.partners)
            located = match.assign(located, free)
        confirmed = frozenset()
        for target in located.values():
            confirmed |= uses[target].sources
        return Located(reading, located, uses, confirmed)

    def _is_same(self, layer: Layer, extremes: np.ndarray) -> bool:
        """Returns whether an array has the extremes of a layer's inputs but for rounding."""
        known = self._extremes[layer]
        most = self._case.evidence.rounding
        return bool(np.abs(known - extremes).max() <= most * np.abs(known).max())

    def changes(self, located: Located) -> Iterator[Reading]:
        """Yields readings that may locate more layers.

        The first one has the located layers as partners. The others change unconfirmed layers,
        first those before the first layer that is not located.
        """
        yield self._moved(located)
        reading = located.reading
        open_layers = {}
        for layer, target in reading.partners.items():
            if layer not in self._case.match.ruled.partners and not located.is_confirmed(target):
                open_layers[layer] = target
        first = self._not_located(located)
        suspects = set()
        if first:
            sources = located.uses[reading.partners[first]].sources
            for layer, target in open_layers.items():
                if not sources.isdisjoint(target.tensors()):
                    suspects.add(layer)
        yield from self._changes(reading, open_layers, suspects)
        yield from self._exchanges(located, suspects)
        yield from self._changes(reading, open_layers, set(open_layers))

    def _exchanges(self, located: Located, suspects: set[Layer]) -> Iterator[Reading]:
        """Yields exchanges of two suspects, each with what alone makes its inputs; then of more.

        Each layer keeps the inputs that it has in torch, and other layers use its outputs.
        """
        targets = {located.reading.partners[layer] for layer in suspects}
        keys = {located.reading.key()}
        readings = [located.reading]
        for reading in readings:
            layers = {target: layer for layer, target in reading.partners.items()}
            for one, other in itertools.combinations(filter(targets.__contains__, layers), 2):
                ours, theirs = map(located.sources, (one, other))
                ones = _with_makers(layers, one, ours - theirs)
                others = _with_makers(layers, other, theirs - ours)
                if len(ones) != len(others):
                    continue
                for change in exchanged(self._case.match, reading, ones, others):
                    if change.reading.key() not in keys:
                        keys.add(change.reading.key())
                        readings.append(change.reading)
                        yield change.reading

    def first_other(self, located: Located) -> str:
        """Returns a sentence about the first layer that is not located; "" without one."""
        layer = self._not_located(located)
        if layer is None:
            return ""
        return (
            f"The first layer with other inputs than in torch is {layer} "
            f"({located.reading.partners[layer]}), behind {len(located.partners)} layers with the "
            "same inputs. "
        )

    def _moved(self, located: Located) -> Reading:
        """Returns the reading with the located layers as partners."""
        match = self._case.match
        decided = match.ruled.partners | located.partners
        taken = set(decided.values())
        for layer, target in located.reading.partners.items():
            if layer not in decided and target not in taken:
                decided[layer] = target
        flax = sorted(match.layers.flax, key=self._case.place)
        partners = match.in_order(match.assign(decided, Group(self.torch, flax)))
        return Reading(partners, located.reading.answers)

    def _not_located(self, located: Located) -> Layer | None:
        """Returns the first layer in use that is neither located nor confirmed, but could be."""
        pairs = located.reading.partners.items()
        for layer, target in sorted(pairs, key=lambda pair: self._case.place(pair[1])):
            is_known = layer in self._extremes and target in located.uses
            if is_known and layer not in located.partners and not located.is_confirmed(target):
                return layer
        return None

    def _changes(self, reading: Reading, part: Partners, culprits: set[Layer]) -> Iterator[Reading]:
        """Yields changes of a part of a reading, each of one culprit at least.

        The first ones exchange a few layers that are applied to one array, with those of the same
        names. So layers of later blocks change with those of the first block.
        """
        groups = []
        for alike in self._together:
            members = [layer for layer in alike if layer in part]
            groups += grouped(members, lambda layer: layer.sizes).values()
        for same in grouped(groups, lambda group: tuple(layer.words for layer in group)).values():
            columns = []  # the layers of one name in all these groups
            for column in zip(*same, strict=True):
                if not culprits.isdisjoint(column):
                    columns.append(column)
            if len(columns) > _FEW:
                continue
            layers = list(itertools.chain(*columns))
            for order in itertools.permutations(columns):
                others = itertools.chain(*order)
                other = rearranged(self._case.match, reading, layers, others)
                if other:
                    yield other
        for change in changes(self._case, Reading(part, reading.answers), culprits):
            other = change.reading
            yield Reading(reading.partners | other.partners, other.answers)


def _with_makers(
    layers: Mapping[Layer, Layer], target: Layer, leaves: frozenset[Path]
) -> list[Layer]:
    """Returns the torch layer of a Flax layer, and those of all Flax layers with some leaves."""
    makers = [layers[target]]
    for other, layer in layers.items():
        if not leaves.isdisjoint(other.tensors()):
            makers.append(layer)
    return makers


def _matrix(layer: Layer) -> Any:
    """Returns the tensor or leaf of a layer that has at least two axes; None if there is none."""
    for name, shape in layer.parts.values():
        if len(shape) > 1:
            return name
    return None
