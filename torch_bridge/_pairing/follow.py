"""Finds a reading layer by layer, with what torch's layers were applied to.

A Flax layer is located if it is applied to what its partner was applied to in torch. Then all
layers before it are right, which are called confirmed here. So a mistake is between the confirmed
layers and the first layer that is not located, and only the few layers there are changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_bridge._pairing.evidence import Difference
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Group, grouped
from torch_bridge._pairing.pairs import Path
from torch_bridge._pairing.proposals import (
    Case,
    changed,
    flattened_maps,
    forms,
    packed_rows,
    single,
)
from torch_bridge._pairing.watch import Use

_LAST = 60  # changes of the last layers, which come before no located layer
_FEW = 5  # up to so many layers that are applied to one array are tried in all orders
_NEAR = 8  # so many layers with unknown inputs, the nearest in use, may change places with one


class _State(NamedTuple):
    """A reading that was run.

    Attributes:
      reading: The reading.
      uses: Flax layer -> the first use of its matrix.
      located: The torch layers whose partners are located.
      confirmed: The leaves on which the inputs of the located layers depend.
    """

    reading: Reading
    uses: dict[Layer, Use]
    located: set[Layer]
    confirmed: frozenset[Path]


class Follower:
    """Follows the calls of a torch module through a Flax model.

    Attributes:
      layers: The layers of both models, in the order of use.
      first_other: A sentence about the first layer that could not be located; "" without one.
    """

    def __init__(
        self, case: Case, compare: Callable[[Reading], Difference], most_runs: int
    ) -> None:
        """Reads the calls.

        Args:
          case: The two models and the example, with the calls.
          compare: Runs a reading.
          most_runs: The most runs.
        """
        self._case = case
        self._compare = compare
        self._most_runs = most_runs
        self._seen = set()
        self._is_proved = False
        self._most_located = 0
        self.first_other = ""
        calls = case.evidence.calls
        places = dict(zip(calls, itertools.count(), strict=False))
        used = {}  # torch layer -> its place in the order of use
        self._extremes = {}  # torch layer -> the extremes of what it was applied to
        for layer in case.match.layers.torch:
            used[layer] = min(places.get(name, math.inf) for name in layer.tensors())
            extremes = calls.get(_matrix(layer))
            if extremes is not None and np.isfinite(extremes).all():
                self._extremes[layer] = extremes
        torch, flax = case.match.layers
        self.layers = Group(sorted(torch, key=used.__getitem__), sorted(flax, key=case.place))

    def follow(self, reading: Reading) -> None:
        """Runs changes of a reading that locate more and more layers, until one is proved.

        The last layers are located whether they are right or not, so the outputs judge them.
        """
        if reading.key() in self._seen or self._is_over():
            return
        state = self._followed(self._run(reading))
        self._better(state, itertools.islice(self._changes(state, self.layers.torch), _LAST))
        if len(state.located) > self._most_located:
            self._most_located = len(state.located)
            self.first_other = ""
            layer, target = next(self._not_located(state), (None, None))
            if layer:
                self.first_other = (
                    f"The first layer with other inputs than in torch is {layer} ({target}), behind"
                    f" {len(state.located)} layers with the same inputs. "
                )

    def _is_over(self) -> bool:
        """Returns whether a reading gives torch's outputs, or all runs are used up."""
        return self._is_proved or len(self._seen) >= self._most_runs

    def _followed(self, state: _State) -> _State:
        """Changes a reading as long as more layers are located."""
        while True:
            following = self._better(state, [self._moved(state)])
            following = following or self._better(state, self._mended(state))
            if following is None:
                return state
            state = following

    def _better(self, state: _State, readings: Iterable[Reading]) -> _State | None:
        """Runs readings until one locates more layers than a state, and returns its state."""
        for reading in readings:
            if self._is_over():
                return None
            if reading.key() in self._seen:
                continue
            following = self._run(reading)
            if len(following.located) > len(state.located):
                return following
        return None

    def _run(self, reading: Reading) -> _State:
        """Runs a reading, and locates its layers."""
        self._seen.add(reading.key())
        difference = self._compare(reading)
        self._is_proved = difference.is_rounding
        by_path = difference.uses or {}
        uses = {}
        located = set()
        confirmed = frozenset()
        for layer, target in reading.partners.items():
            use = by_path.get(_matrix(target))
            if use is None:
                continue
            uses[target] = use
            if layer in self._extremes and self._is_same(self._extremes[layer], use.extremes):
                located.add(layer)
                confirmed |= use.sources
        return _State(reading, uses, located, confirmed)

    def _is_same(self, extremes: np.ndarray, others: np.ndarray) -> bool:
        """Returns whether two arrays have the same extremes but for rounding."""
        most = self._case.evidence.rounding
        return bool(np.abs(extremes - others).max() <= most * np.abs(extremes).max())

    def _together(self, state: _State) -> list[list[Layer]]:
        """Lists the Flax layers that are applied to the same array, in the order of use."""
        groups = []
        for target in self.layers.flax:
            if target not in state.uses:
                continue
            for group in groups:
                first = state.uses[group[0]]
                if self._is_same(first.extremes, state.uses[target].extremes):
                    group.append(target)
                    break
            else:
                groups.append([target])
        return groups

    def _moved(self, state: _State) -> Reading:
        """Pairs each Flax layer with a torch layer that was applied to the same array."""
        match = self._case.match
        decided = dict(match.ruled.partners)
        for layer in state.located:
            decided[layer] = state.reading.partners[layer]
        for alike in self._together(state):
            extremes = state.uses[alike[0]].extremes
            torch = []
            for layer in self.layers.torch:
                if layer in self._extremes and self._is_same(self._extremes[layer], extremes):
                    torch.append(layer)
            decided = match.assign(decided, Group(torch, alike))
        taken = set(decided.values())
        for layer, target in state.reading.partners.items():
            if layer not in decided and target not in taken:
                decided[layer] = target
        partners = match.in_order(match.assign(decided, self.layers))
        return Reading(partners, state.reading.answers)

    def _mended(self, state: _State) -> Iterator[Reading]:
        """Yields changes of the layers between the confirmed layers and one that is not located."""
        for _, target in self._not_located(state):
            sources = state.uses[target].sources
            culprits = []
            for other, its_target in self._in_use(state):
                if not sources.isdisjoint(its_target.tensors()):
                    culprits.append(other)
            yield from self._changes(state, culprits)

    def _not_located(self, state: _State) -> Iterator[tuple[Layer, Layer]]:
        """Yields the pairs with known inputs that are neither located nor confirmed."""
        for layer, target in self._in_use(state):
            is_known = layer in self._extremes and target in state.uses
            if is_known and layer not in state.located and not self._is_confirmed(state, target):
                yield layer, target

    def _in_use(self, state: _State) -> list[tuple[Layer, Layer]]:
        """Returns the pairs of a reading in the order in which Flax uses its layers."""
        return sorted(state.reading.partners.items(), key=lambda pair: self._case.place(pair[1]))

    def _is_confirmed(self, state: _State, target: Layer) -> bool:
        return not state.confirmed.isdisjoint(target.tensors())

    def _changes(self, state: _State, culprits: Collection[Layer]) -> Iterator[Reading]:
        """Yields changes of unconfirmed layers, the likeliest first, each of one culprit at least.

        Args:
          state: The state.
          culprits: Layers of which some may be wrong.
        """
        case = self._case
        reading = state.reading
        open_layers = []
        for layer, target in self._in_use(state):
            if layer not in case.match.ruled.partners and not self._is_confirmed(state, target):
                open_layers.append(layer)
        suspects = [layer for layer in open_layers if layer in culprits]
        for group in self._permutable(state, open_layers, suspects):
            for order in itertools.permutations(range(len(group[0]))):
                yield from self._exchanged(reading, group, order)
        choices = []
        likely, unlikely = flattened_maps(case, reading)
        for choice in (*likely, *forms(case, reading), *packed_rows(case, reading), *unlikely):
            layers = [layer for layer in choice.layers if layer in open_layers]
            if not set(suspects).isdisjoint(layers):
                choices.append(choice._replace(layers=layers))
        for _, other in changed(reading, itertools.chain(choices, single(choices))):
            yield other
        places = {layer: place for place, layer in enumerate(self.layers.torch)}
        for layer in suspects:
            others = [other for other in open_layers if other.sizes == layer.sizes]
            others.sort(key=lambda other: abs(places[other] - places[layer]))
            for other in others[1 : _NEAR + 1]:  # the first one is the layer itself
                yield from self._exchanged(reading, [[layer, other]], (1, 0))

    def _permutable(
        self, state: _State, layers: Collection[Layer], suspects: Collection[Layer]
    ) -> Iterator[list[list[Layer]]]:
        """Yields a few layers that are applied to one array, with those of the same names.

        So layers of later blocks change with those of the first block that is not confirmed.

        Args:
          state: The state.
          layers: The layers that may change.
          suspects: Those of which one at least must be among the first layers.
        """
        torch_of = {target: layer for layer, target in state.reading.partners.items()}
        groups = []
        for alike in self._together(state):
            members = [torch_of[target] for target in alike if torch_of[target] in layers]
            groups += grouped(members, lambda layer: layer.sizes).values()
        for group in groups:
            first = [layer for layer in group if layer in suspects]
            for members in (first, group):
                if not first or len(members) > _FEW:
                    continue
                words = [layer.words for layer in members]
                together = [members]
                for other in groups:
                    same = [layer for layer in other if layer.words in words]
                    if other is not group and [layer.words for layer in same] == words:
                        together.append(same)
                yield together

    def _exchanged(
        self, reading: Reading, groups: Sequence[Sequence[Layer]], order: Sequence[int]
    ) -> Iterator[Reading]:
        """Yields the reading in which the layers of each group have their partners in an order."""
        partners = dict(reading.partners)
        for group in groups:
            for layer, place in zip(group, order, strict=True):
                partners[layer] = reading.partners[group[place]]
                if not self._case.match.fits(layer, partners[layer]):
                    return
        yield Reading(partners, reading.answers)


def _matrix(layer: Layer) -> Any:
    """Returns the tensor or leaf of a layer that has at least two axes; None if there is none."""
    for name, shape in layer.parts.values():
        if len(shape) > 1:
            return name
    return None
