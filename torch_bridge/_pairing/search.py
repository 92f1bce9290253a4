"""Searches for the reading of two models with which Flax gives torch's outputs.

A reading has the pairs of layers, the form of each weight, and the flattened maps. If the example
has torch's calls, the search first follows them from layer to layer. Then it tries a few likely
readings. Then it tries single changes of all these, the likeliest change first, for a limited
number of runs: in turn of the reading that came nearest, and of one with few changes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.terminal import some
from torch_bridge._pairing.evidence import TRIES, Difference
from torch_bridge._pairing.kinds import CONV_TRANSPOSE, Answer
from torch_bridge._pairing.layers import Layer, reparametrized
from torch_bridge._pairing.locate import Locator
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Group, Partners, grouped
from torch_bridge._pairing.pairs import Path, leaves_from_torch
from torch_bridge._pairing.proposals import Case, Change, changes, likely_packings, neighbours

_BATCH = 20  # changes of a reading to try before another reading has its turn
# After this number of tried changes, the nearest reading comes after one that is twice as far off.
_PATIENCE = 100
_HASTE = 20  # the same for the other readings
_FAR = 0.3  # relative to the outputs' norm; larger distances of the other readings count as equal
_STEP = 0.2  # for the other readings, the cost of one more change, beside the distance
_LEAST_CHECKS = 64  # neighbours that are run even if the search has used up all runs
_SLIGHT = 1e-2  # relative to the largest output; another eps or activation differs by less
_SHOWN = 12  # the most layers in an error
OTHER_FORMULA = (
    "look at the eps and momentum of norms, the form of an activation (GELU with tanh or without), "
    "padding, a factor by which torch multiplies a weight (equalised learning rate, LoRA), "
    "evaluation mode, and what `apply` does with the inputs."
)


@dataclasses.dataclass
class _State:
    """A reading that was tried, with the changes of it to try next.

    Attributes:
      distance: The relative difference of the reading's outputs from torch's.
      changes: The changes to try next.
      depth: The number of changes since one of the first readings.
      tried: The number of changes that were new, so that the model was run.
    """

    distance: float
    changes: Iterator[Change]
    depth: int
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
        self._states = []
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
            self._states.clear()
            self._limit = before + (TRIES - before) * place // len(evidence.traces)
            self._search()
            if self._is_proved():
                difference, reading = self._tried[-1]
                self._refuse_doubtful(reading)
                return reading, difference
        raise self._refusal()

    def _search(self) -> None:
        """Tries readings with the current order of the inputs, until one gives torch's outputs."""
        match = self._case.match
        names = (match.partners, match.ruled.partners)  # with equal names, and without
        flax = sorted(match.layers.flax, key=self._case.place)
        if self._case.evidence.calls:
            locator = Locator(self._case)
            layers = Group(locator.torch, flax)
            self._follow(locator, [self._completed(decided, layers) for decided in names])
        readings = []
        for decided in names:
            for torch in _orders(match.layers.torch):
                readings.append(self._completed(decided, Group(torch, flax)))
                self._run(readings[-1], 0)
        for reading in readings:
            for packed in likely_packings(self._case, reading):
                self._run(packed, 0)
        # The nearest reading may be near by chance, so other readings are tried in turn with it.
        turns = itertools.cycle([_State.cost_by_depth, _State.cost_by_distance])
        while self._states and not self._is_over():
            state = min(self._states, key=next(turns))
            batch = list(itertools.islice(state.changes, _BATCH))
            if not batch:
                self._states.remove(state)
            for change in batch:
                if self._run(change.reading, state.depth + 1):
                    state.tried += 1

    def _follow(self, locator: Locator, first: Sequence[Reading]) -> None:
        """Runs what may locate more layers than any reading, for at most half of the runs."""
        evidence = self._case.evidence
        limit = (self._limit + evidence.runs) // 2
        runs = []  # what each run has located, and the readings that may locate more
        waiting = list(first)
        while waiting and evidence.runs < limit and not self._is_proved():
            reading = waiting.pop(0)
            difference = self._run(reading, 1)
            if difference:
                located = locator.located(reading, difference)
                changes = locator.changes(located)
                runs.append((located, changes))
                waiting += itertools.islice(changes, 1)  # with the located layers as partners
            if runs and not waiting:
                best, changes = max(runs, key=lambda run: len(run[0].partners))
                self._first_other = locator.first_other(best)
                waiting += itertools.islice(changes, 1)

    def _is_proved(self) -> bool:
        """Returns whether the last reading gives torch's outputs."""
        return bool(self._tried) and self._tried[-1][0].is_rounding

    def _is_over(self) -> bool:
        """Returns whether a reading gives torch's outputs, or all runs are used up."""
        return self._is_proved() or self._case.evidence.runs >= self._limit

    def _run(self, reading: Reading, depth: int) -> Difference | None:
        """Runs the model with a reading.

        Returns:
          The difference of the outputs from torch's; None if the model was not run, because the
          reading is not new or the search is over.
        """
        if self._is_over() or reading.key() in self._seen:
            return None
        self._seen.add(reading.key())
        difference = self._case.evidence.compare(self._leaves_of(reading))
        self._tried.append((difference, reading))
        of_all = changes(self._case, reading, reading.partners.keys())
        self._states.append(_State(difference.mean, of_all, depth))
        return difference

    def _refuse_doubtful(self, proved: Reading) -> None:
        """Runs the neighbours of a proved reading, and refuses it if one is proved, too.

        The runs that the search has left are for these checks.

        Raises:
          CheckpointMismatch: The example does not tell some layers apart; the error lists all that
            were run.
        """
        evidence = self._case.evidence
        leaves = self._leaves_of(proved)
        doubtful = []
        checks = max(_LEAST_CHECKS, TRIES - evidence.runs)
        for text, reading in itertools.islice(neighbours(self._case, proved), checks):
            others = self._leaves_of(reading)
            if all(np.array_equal(leaves[path], others[path]) for path in leaves):
                continue  # the exchanged leaves have equal values
            if evidence.compare(others).is_rounding:
                doubtful.append(text)
        if doubtful:
            raise CheckpointMismatch(
                "The Flax model gives torch's outputs, but also with some layers exchanged, so the "
                "example does not tell which is which. Use other inputs, or answer with these "
                "arguments.",
                ambiguous=doubtful,
                parameters=("rules", "conv1d", "conv_transpose", "flatten"),
            )

    def _refusal(self) -> CheckpointMismatch:
        """Returns the error if no reading gives torch's outputs, with the layers in doubt."""
        difference, reading = min(self._tried, key=lambda one: one[0].mean)
        evidence = self._case.evidence
        near = itertools.islice(neighbours(self._case, reading), _SHOWN)
        doubtful = [text for text, _ in near]
        hint = "No layer is in doubt, so the two models seem to compute different functions"
        if difference.largest < _SLIGHT:
            hint = "So small a difference is rarely a wrong layer, and often another formula"
        elif doubtful:
            hint = (
                "The layers in doubt are listed; answer for those that you know (rules, flatten, "
                "conv1d, conv_transpose). If all are right, the models compute different functions"
            )
        first_other = self._first_other
        if not evidence.is_recorded:
            first_other = (
                "The example has no record of torch's calls, which finds layers one after the "
                "other; pass example=torch_bridge.run_example(module, inputs) if you have the "
                "torch module. "
            )
        left_out = ""
        layers = self._case.match.layers.without(reading.partners).torch
        if layers:
            names = some(list(map(str, layers)))
            left_out = f"The Flax model has no place for {names} of torch. "
        return CheckpointMismatch(
            f"{reparametrized(self._tensors)}The Flax model does not give torch's outputs: after "
            f"{evidence.runs} tries the nearest are {difference}. {left_out}{first_other}{hint}: "
            f"{OTHER_FORMULA}",
            ambiguous=doubtful,
            parameters=("apply", "rules", "flatten", "conv1d", "conv_transpose"),
        )

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


def _orders(layers: list[Layer]) -> list[list[Layer]]:
    """Returns layers as they are, and as loops use them that call one module of each list a turn.

    A list of filters and a list of gates become first filter, first gate, second filter, ...
    The loop is over the outermost lists, or two loops are in each other, and so on.
    """
    runs = []
    for _, run in itertools.groupby(layers, lambda layer: any(map(str.isdigit, layer.segments))):
        runs.append(list(run))
    depth = max(map(len, map(_places_in_lists, layers)), default=0)
    orders = [layers]
    for loops in range(1, max(depth, 1) + 1):
        ordered = []
        for run in runs:
            ordered += sorted(run, key=lambda layer: _places_in_lists(layer)[:loops])
        orders.append(ordered)
    return orders


def _places_in_lists(layer: Layer) -> list[int]:
    return list(map(int, filter(str.isdigit, layer.segments)))
