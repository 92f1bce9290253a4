"""Searches for the reading of two models with which Flax gives torch's outputs.

A reading has the pairs of layers, the form of each weight, and the flattened maps. If the example
has torch's calls, the search first follows them from layer to layer. Then it tries a few likely
readings. Then it tries single changes of the reading that came nearest, the
likeliest change first, for a limited number of runs. Changes that help are combined. In turn with
the nearest reading, it also tries changes of other readings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._pairing.evidence import TRIES, Difference
from torch_bridge._pairing.exchanges import exchanged, exchanges_of, in_alternation
from torch_bridge._pairing.follow import Follower
from torch_bridge._pairing.kinds import CONV_TRANSPOSE, Answer
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Group, Partners, grouped
from torch_bridge._pairing.neighbours import refusal, refuse_doubtful
from torch_bridge._pairing.pairs import Path, leaves_from_torch
from torch_bridge._pairing.proposals import (
    Case,
    Change,
    changed,
    flattened_maps,
    forms,
    is_matrix,
    likely_packings,
    packed_rows,
    single,
)

_BATCH = 30  # changes of the nearest reading to try before the best changes are combined
_GLANCE = 20  # the same for the other readings
_SURE = 0.5  # a change that reduces the distance to less than this share is kept at once
# After this number of tried changes, the nearest reading comes after one that is twice as far off.
_PATIENCE = 100
_HASTE = 20  # the same for the other readings
_FAR = 0.3  # relative to the outputs' norm; larger distances of the other readings count as equal
_STEP = 0.2  # for the other readings, the cost of one more change, beside the distance


@dataclasses.dataclass
class _State:
    """A reading that was tried, with the changes of it to try next.

    Attributes:
      reading: The reading.
      distance: The relative difference of the reading's outputs from torch's.
      changes: The changes to try next.
      depth: The number of changes since one of the first readings.
      taken: The number of changes that have been taken from `changes`.
      tried: The number of these changes that were new, so that the model was run.
    """

    reading: Reading
    distance: float
    changes: Iterator[Change]
    depth: int
    taken: int = 0
    tried: int = 0

    def cost_by_distance(self) -> float:
        """Returns the distance, increased by the number of changes that have been tried."""
        return self.distance * (1 + self.tried / _PATIENCE)

    def cost_by_depth(self) -> float:
        """Returns the cost among the other readings, which grows with distance, depth and tries."""
        distance = min(self.distance / _FAR, 1.0)
        return (distance + _STEP * self.depth) * (1 + self.tried / _HASTE)


class Search:
    """The search for the reading of two models that gives torch's outputs."""

    def __init__(self, case: Case, tensors: Mapping[str, Any]) -> None:
        """Prepares a search, which has the runs that are left of `TRIES`, at least one.

        Args:
          case: The two models, the user's answers and the example.
          tensors: The torch tensors by name.
        """
        self._case = case
        self._tensors = tensors
        self._leaves = {}
        self._tried = []
        self._seen = set()
        self._first_other = ""
        self._limit = 0  # no more runs if the example has had so many

    def prove(self) -> tuple[Reading, Difference]:
        """Finds a reading that gives torch's outputs, and checks that similar ones do not.

        In a model with many alike layers not all similar readings are run.

        Returns:
          The reading, and the difference of its outputs from torch's.

        Raises:
          CheckpointMismatch: No reading that was tried gives torch's outputs, or several give them.
        """
        evidence = self._case.evidence
        before = evidence.runs
        for place, trace in enumerate(evidence.traces, start=1):
            evidence.trace = trace
            self._seen.clear()
            self._limit = before + (TRIES - before) * place // len(evidence.traces)
            self._search()
            if self._is_proved():
                difference, reading = self._tried[-1]
                refuse_doubtful(self._case, reading, self._leaves_of)
                return reading, difference
        difference, reading = min(self._tried, key=lambda one: one[0].mean)
        raise refusal(self._case, difference, reading, self._tensors, self._first_other)

    def _search(self) -> None:
        """Tries readings with the current order of the inputs, until one gives torch's outputs."""
        states = []
        evidence = self._case.evidence
        if evidence.calls and not self._is_over():

            def compare(reading: Reading) -> Difference:
                states.extend(self._run(reading, 1))
                return self._tried[-1][0]

            follower = Follower(self._case, compare, (self._limit - evidence.runs) // 2)
            for decided in (self._case.match.partners, self._case.match.ruled.partners):
                follower.follow(self._completed(decided, follower.layers))
            self._first_other = follower.first_other
        for reading in self._first_readings():
            states += self._run(reading, 0)
        # The nearest reading may be near by chance, so other readings are tried in turn with it.
        turns = itertools.cycle([_State.cost_by_depth, _State.cost_by_distance])
        while states and not self._is_over():
            cost = next(turns)
            state = min(states, key=cost)
            before = state.taken
            children = self._batch(state, goes_deep=cost == _State.cost_by_distance)
            states += children + self._together(state, children)
            if state.taken == before:
                states.remove(state)

    def _is_proved(self) -> bool:
        """Returns whether the last reading gives torch's outputs."""
        return bool(self._tried) and self._tried[-1][0].is_rounding

    def _is_over(self) -> bool:
        """Returns whether a reading gives torch's outputs, or all runs are used up."""
        return self._is_proved() or self._case.evidence.runs >= self._limit

    def _run(self, reading: Reading, depth: int) -> list[_State]:
        """Runs the model with a reading, if it is new and the search is not over.

        Returns:
          The state of the reading, or nothing if the model was not run.
        """
        if self._is_over() or reading.key() in self._seen:
            return []
        self._seen.add(reading.key())
        difference = self._case.evidence.compare(self._leaves_of(reading))
        self._tried.append((difference, reading))
        return [_State(reading, difference.mean, self._changes(reading), depth)]

    def _batch(self, state: _State, goes_deep: bool) -> list[_State]:
        """Tries the next changes of a reading.

        Args:
          state: The reading.
          goes_deep: Whether to stop at a change that reduces the distance much, and go on from
            there. Other readings get all their turn, because such a change may help by chance.

        Returns:
          The states of the changed readings.
        """
        children = []
        for change in itertools.islice(state.changes, _BATCH if goes_deep else _GLANCE):
            state.taken += 1
            children += self._run(change.reading, state.depth + 1)
            is_near = bool(children) and children[-1].distance < _SURE * state.distance
            if (is_near and goes_deep) or self._is_over():
                break
        state.tried += len(children)
        return children

    def _together(self, state: _State, children: Sequence[_State]) -> list[_State]:
        """Combines the changes of a reading that bring it nearer, the best change first.

        The nearest combination continues with the changes that have not been tried yet.

        Returns:
          The states of the combinations.
        """
        nearer = [child for child in children if child.distance < state.distance]
        if not nearer:
            return []
        best, *others = sorted(nearer, key=lambda child: child.distance)
        added = []
        for child in others:
            both = best.reading.with_change(state.reading, child.reading)
            for one in self._run(both, best.depth + 1):
                added.append(one)
                if one.distance < best.distance:
                    best = one
        later = itertools.islice(self._changes(best.reading), state.taken, None)
        best.changes = itertools.chain(later, self._changes(best.reading))
        return added

    def _leaves_of(self, reading: Reading) -> dict[Path, np.ndarray]:
        """Makes the leaves of a reading; reuses those that are the same in the last reading."""
        leaves = {}
        for path, pairs in grouped(reading.pairs(), lambda pair: pair.path).items():
            made_of, leaf = self._leaves.get(path, (None, None))
            if made_of != pairs:
                leaf = leaves_from_torch(pairs, self._tensors)[path]
                self._leaves[path] = (pairs, leaf)
            leaves[path] = leaf
        return leaves

    def _first_readings(self) -> Iterator[Reading]:
        """Yields likely readings, with or without equal names, by the order of use in Flax.

        Then it yields these readings with likely orders of packed rows.
        """
        match = self._case.match
        torch, flax = match.layers
        by_use = sorted(flax, key=self._case.place)
        *outer, all_lists = _in_turns(torch)
        names = (match.partners, match.ruled.partners)
        orders = list(itertools.product(names, (torch, all_lists)))
        orders += itertools.product((match.partners,), outer)
        readings = []
        for decided, layers in orders:
            reading = self._completed(decided, Group(layers, by_use))
            readings.append(reading)
            yield reading
        for reading in readings:
            yield from likely_packings(self._case, reading)

    def _completed(self, decided: Partners, layers: Group) -> Reading:
        """Pairs the layers that are not decided by their positions, with the likeliest answers."""
        match = self._case.match
        partners = match.in_order(match.assign(decided, layers))
        reading = Reading(partners, dict(self._case.answered.answers))
        upward = self._case.evidence.trace.upward
        for layer, several in reading.forms().items():
            is_upward = not upward.isdisjoint(partners[layer].tensors())
            if is_upward and CONV_TRANSPOSE in several:
                reading.answers.setdefault(layer, Answer(CONV_TRANSPOSE))
        return reading

    def _changes(self, reading: Reading) -> Iterator[Change]:
        """Yields the single changes of a reading, the likeliest first."""
        case = self._case
        weights = forms(case, reading)
        likely_maps, unlikely_maps = flattened_maps(case, reading)
        everywhere, within, across = exchanges_of(case.match, reading)
        choices = itertools.chain(filter(is_matrix, weights), likely_maps)
        yield from in_alternation(
            changed(reading, choices), exchanged(case.match, reading, everywhere)
        )
        yield from in_alternation(
            changed(reading, packed_rows(case, reading)), exchanged(case.match, reading, within)
        )
        yield from in_alternation(
            changed(reading, unlikely_maps), exchanged(case.match, reading, across)
        )
        yield from changed(reading, itertools.filterfalse(is_matrix, weights))
        yield from changed(reading, single(weights))


def _in_turns(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Orders layers as loops use them that call one module of each list in every turn.

    A list of filters and a list of gates become first filter, first gate, second filter, ...

    Returns:
      The order of a loop over the outermost lists, of two loops in each other, and so on.
    """
    runs = []
    for _, run in itertools.groupby(layers, lambda layer: any(map(str.isdigit, layer.segments))):
        runs.append(list(run))
    depth = max(map(len, map(_places_in_lists, layers)), default=0)
    orders = []
    for loops in range(1, max(depth, 1) + 1):
        ordered = []
        for run in runs:
            ordered += sorted(run, key=lambda layer: _places_in_lists(layer)[:loops])
        orders.append(ordered)
    return orders


def _places_in_lists(layer: Layer) -> list[int]:
    return list(map(int, filter(str.isdigit, layer.segments)))
