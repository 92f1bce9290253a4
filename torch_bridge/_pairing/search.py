"""Searches for the reading of two models with which Flax gives torch's outputs.

A reading has the pairs of layers, the form of each weight, and the flattened maps. The search tries
a few likely readings first. Then it tries single changes of the reading that came nearest, the
likeliest change first, for a limited number of runs. Changes that help are combined. In turn with
the nearest reading, it also tries changes of other readings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.evidence import Apart, Evidence
from torch_bridge._pairing.exchanges import Exchange, Exchanges, exchanges_of
from torch_bridge._pairing.kinds import CONV_TRANSPOSE, OUT_IN, Answer, join
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import Match, grouped
from torch_bridge._pairing.pairs import Maps, Packing, Path, Shape, leaves_from_torch

_T = TypeVar("_T")
TRIES = 500  # the most runs of the Flax model
_CHECKS = 64  # further runs, which check that other readings do not give torch's outputs, too
_BATCH = 60  # changes of the nearest reading to try before the best changes are combined
_GLANCE = 20  # the same for the other readings
_SURE = 0.5  # a change that reduces the distance to less than this share is kept at once
# After this number of tried changes, the nearest reading comes behind one that is twice as far off.
_PATIENCE = 100
_HASTE = 20  # the same for the other readings
_FAR = 0.3  # relative to the outputs' norm; larger distances of the other readings count as equal
_FEW_PARTS = 3  # up to this number all orders of packed parts are tried
_GATES = 4  # the same for so many equal parts, the gates of a cell
_PACKINGS = 16  # the most orders of packed rows that are tried with each of the first readings
_STEP = 0.2  # for the other readings, the cost of one more change, beside the distance
_SLIGHT = 1e-2  # relative to the largest output; another eps or activation differs by less
_SHOWN = 12  # the most layers in an error
_WHAT = {"form": "how its weight is stored", "packing": "the order of its packed rows"}


class Change(NamedTuple):
    """A changed reading, and the text with which errors describe the change."""

    text: str
    reading: Reading


class Choice(NamedTuple):
    """The possible values of one field in the answers of some layers, which change together."""

    layers: list[Layer]
    field: str  # a field of `Answer`
    values: Sequence[Any]  # the likeliest first


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

    def height(self) -> float:
        """Returns the distance, increased by the number of changes that have been tried."""
        return self.distance * (1 + self.tried / _PATIENCE)

    def cost(self) -> float:
        """Returns the cost among the other readings, which grows with distance, depth and tries."""
        distance = min(self.distance / _FAR, 1.0)
        return (distance + _STEP * self.depth) * (1 + self.tried / _HASTE)


class Search:
    """The search for the reading of two models that gives torch's outputs."""

    def __init__(
        self,
        match: Match,
        answered: Reading,
        evidence: Evidence,
        tensors: Mapping[str, Any],
    ) -> None:
        """Prepares a search.

        Args:
          match: The layers, with the pairs that rules and names decide.
          answered: A reading with the user's answers, which the search does not change.
          evidence: The example.
          tensors: The torch tensors by name.
        """
        self._match = match
        self._answered = answered
        self._evidence = evidence
        self._tensors = tensors
        self._leaves = {}
        self._tried = []
        self._seen = set()

    def prove(self) -> tuple[Reading, Apart]:
        """Finds a reading that gives torch's outputs, and checks that similar readings do not.

        Returns:
          The reading, and the difference of its outputs from torch's.

        Raises:
          CheckpointMismatch: No reading that was tried gives torch's outputs, or several give them.
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
        """Tries readings with the current layout of the inputs, until one gives torch's outputs.

        Args:
          tries: The most runs in all, with those of earlier layouts.
        """
        self._seen = set()
        states = []
        for change in self._first_readings():
            states += self._states_of([change.reading], tries, 0)
        # The nearest reading may be near by chance, so other readings are tried in turn with it.
        turns = itertools.cycle([(_State.cost, _GLANCE), (_State.height, _BATCH)])
        while states and not self._is_over(tries):
            merit, size = next(turns)
            state = min(states, key=merit)
            before = state.taken
            children = self._batch(state, size, tries)
            states += children
            states += self._together(state, children, tries)
            if state.taken == before:
                states.remove(state)

    def _is_over(self, tries: int) -> bool:
        """Returns True if a reading gives torch's outputs, or all runs are used up."""
        is_proved = bool(self._tried) and self._tried[-1][0].is_rounding
        return is_proved or self._evidence.runs >= tries

    def _states_of(self, readings: Iterable[Reading], tries: int, depth: int) -> list[_State]:
        """Runs the model with each new reading until the search is over; returns their states."""
        states = []
        for reading in readings:
            if self._is_over(tries) or reading.key() in self._seen:
                continue
            self._seen.add(reading.key())
            apart = self._evidence.apart(self._leaves_of(reading))
            self._tried.append((apart, reading))
            states.append(_State(reading, apart.mean, self._changes(reading), depth))
        return states

    def _batch(self, state: _State, size: int, tries: int) -> list[_State]:
        """Tries the next `size` changes of a reading, or fewer if one reduces the distance much.

        Returns:
          The states of the changed readings.
        """
        children = []
        for change in itertools.islice(state.changes, size):
            state.taken += 1
            new = self._states_of([change.reading], tries, state.depth + 1)
            state.tried += len(new)
            children += new
            if self._is_over(tries) or any(one.distance < _SURE * state.distance for one in new):
                break
        return children

    def _together(self, state: _State, children: Sequence[_State], tries: int) -> list[_State]:
        """Combines the changes of a reading that bring it nearer, the best change first.

        The nearest combination continues with the changes that have not been tried yet.

        Returns:
          The states of the combinations.
        """
        nearer = [child for child in children if child.distance < state.distance]
        nearer.sort(key=lambda child: child.distance)
        if not nearer:
            return []
        best = nearer[0]
        added = []
        for child in nearer[1:]:
            both = best.reading.with_change(state.reading, child.reading)
            for one in self._states_of(filter(None, [both]), tries, best.depth + 1):
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

    def _first_readings(self) -> Iterator[Change]:
        """Yields likely readings: with or without equal names, by the order of use or of names.

        Then it yields these readings with likely orders of packed rows.
        """
        match = self._match
        by_rule = {layer: match.partners[layer] for layer in match.by_rule}
        starts = (match.partners, by_rule)
        readings = []
        flax_orders = (sorted(match.flax, key=self._place), match.flax)
        torch_orders = (match.torch, _in_turn(match.torch))
        for decided, flax, torch in itertools.product(starts, flax_orders, torch_orders):
            reading = Reading(match.assign(decided, torch, flax), dict(self._answered.answers))
            for layer, forms in reading.forms().items():
                if CONV_TRANSPOSE in forms and self._is_upward(reading.partners[layer]):
                    reading.answers.setdefault(layer, Answer(CONV_TRANSPOSE))
            readings.append(reading)
            yield Change("", reading)
        for reading in readings:
            yield from self._likely_packed(reading)

    def _place(self, target: Layer) -> float:
        """Returns the position of a layer in the order in which the Flax model uses layers."""
        return min(map(self._evidence.order.__getitem__, target.tensors()))

    def _is_upward(self, target: Layer) -> bool:
        """Returns True if the Flax model uses the layer as a ConvTranspose with a stride."""
        return not self._evidence.upward.isdisjoint(target.tensors())

    # --- changes of a reading -------------------------------------------------------------------

    def _changes(self, reading: Reading) -> Iterator[Change]:
        """Yields the single changes of a reading, the likeliest first."""
        forms = self._forms(reading)
        matrices = []
        kernels = []  # these rarely have another order, or are a ConvTranspose without a stride
        for choice in forms:
            if len(choice.layers[0].shape("weight")) < 3:
                matrices.append(choice)
            else:
                kernels.append(choice)
        single = []
        for choice in matrices + kernels:
            if len(choice.layers) > 1:
                single += [choice._replace(layers=[layer]) for layer in choice.layers]
        likely, unlikely = self._maps(reading)
        exchanges = self._exchanges(reading)
        usual = _changed(reading, matrices + likely)
        yield from _in_alternation(usual, self._exchanged(reading, exchanges.everywhere))
        yield from _changed(reading, self._packings(reading))
        yield from self._exchanged(reading, exchanges.within)
        rare = _changed(reading, unlikely)
        yield from _in_alternation(rare, self._exchanged(reading, exchanges.across))
        yield from _changed(reading, kernels + single)

    def _forms(self, reading: Reading) -> list[Choice]:
        """Lists the weights with several forms; layers whose names differ in numbers are together.

        Weights for which the user has answered are left out.
        """
        forms = reading.forms()
        unanswered = [layer for layer in forms if not self._answered.answer(layer).form]
        choices = []
        for alike in grouped(unanswered, lambda layer: (layer.words, tuple(forms[layer]))).values():
            choices.append(Choice(alike, "form", forms[alike[0]]))
        return sorted(choices, key=lambda choice: len(choice.values))

    def _maps(self, reading: Reading) -> tuple[list[Choice], list[Choice]]:
        """Lists the layers that are likely to read or output a map, and those that are unlikely to.

        A likely layer has the width of a map that Flax flattens. In an unlikely layer the map may
        stand beside other values. Norms are the last unlikely layers.
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
                    continue  # the user's {} means that there is none
                maps: list[Maps] = [()]
                beside = []
                for size, channels in self._evidence.maps:
                    one = (0, channels, size // channels)
                    if size == values:
                        maps.append((one,))
                    elif size < values and not is_norm:
                        beside += [(one,), ((values - size, *one[1:]),)]
                if is_norm:
                    norms.append(Choice(layers, option, maps))
                    continue
                unlikely.append(Choice(layers, option, [(), *beside]))
                if len(maps) == 1:
                    continue
                if len(layers) > 1:
                    # Of several Linears the first one reads a map, and the last one outputs a map.
                    in_turn = sorted(layers, key=lambda layer: self._place(reading.partners[layer]))
                    nearest = in_turn[0]
                    if option == "unflatten":
                        nearest = in_turn[-1]
                    likely.append(Choice([nearest], option, maps))
                likely.append(Choice(layers, option, maps))
        return likely, unlikely + norms

    def _packings(self, reading: Reading) -> list[Choice]:
        """Lists the packed layers, with the orders that the rows of their parts may have in torch.

        A layer is packed if its rows go to several Flax layers, or if the Flax model divides its
        outputs into two or three equal parts.
        """
        choices = []
        packed = []
        for layer, target in reading.partners.items():
            is_kernel = layer.sort == "weight" and target.sort == "kernel"
            if is_kernel and join(layer, target).forms[:1] == [OUT_IN]:
                packed.append(layer)
        for alike in grouped(packed, lambda layer: (layer.words, layer.signature)).values():
            values: list[Packing | None] = [None]
            rows = alike[0].shape("weight")[0]
            share = alike[0].share
            if self._answered.answer(alike[0]).packing:
                continue
            if share:
                _, sizes = share
                for groups in self._groups(rows, sizes):
                    values.append(_packing(tuple(range(len(sizes))), groups, 1, sizes))
            else:
                for sizes in self._parts(rows):
                    values += _orders(sizes, self._groups(rows, sizes))
            if len(values) > 1:
                choices.append(Choice(alike, "packing", values))
        return choices

    def _likely_packed(self, reading: Reading) -> Iterator[Change]:
        """Yields a reading with the likely orders of packed rows, equal ones for like layers.

        A deep model is far off until all its layers are right, so these are not single changes.
        """
        layers = []
        likely = []
        together = grouped(self._packings(reading), _rows_and_values)
        # The widest layers come last, whose orders change first: narrow ones are rarely packed.
        for (_, values), choices in sorted(together.items(), key=lambda item: item[0][0]):
            layers.append(list(itertools.chain(*(choice.layers for choice in choices))))
            likely.append([value for value in values if value is None or value.is_likely])
        for packings in itertools.islice(itertools.product(*likely), _PACKINGS):
            answers = dict(reading.answers)
            for alike, packing in zip(layers, packings, strict=True):
                for layer in alike:
                    answers[layer] = reading.answer(layer)._replace(packing=packing)
            yield Change("", Reading(reading.partners, answers))

    def _parts(self, rows: int) -> list[Shape]:
        """Returns the ratios of the parts into which the Flax model divides so many values."""
        lengths = {rows}
        lengths.update(channels for size, channels in self._evidence.maps if size == rows)
        ratios = {sizes for length, sizes in self._evidence.splits if length in lengths}
        return sorted(ratios, key=lambda sizes: (len(set(sizes)), len(sizes), sizes))

    def _groups(self, rows: int, sizes: Shape) -> list[int]:
        """Returns the numbers of groups (heads) that the Flax model makes of a part or of all.

        If several heads of queries share a key and a value, these heads are one group.
        """
        groups = set()
        unit = rows // sum(sizes)
        for size, channels in self._evidence.maps:
            for several in {1, *sizes, sum(sizes)}:
                if size in (rows, unit * several):
                    groups.update((size // channels, size // channels // several))
        return sorted(one for one in groups if one > 1 and rows % (one * sum(sizes)) == 0)

    def _says(self, option: str, layer: Layer) -> bool:
        """Returns True if the user has answered whether a layer reads or outputs a map."""
        pattern, _ = self._match.options.map_of(option, layer)
        return pattern is not None or bool(getattr(self._answered.answer(layer), option))

    def _exchanges(self, reading: Reading) -> Exchanges:
        """Returns the exchanges of equal layers or modules in Flax and in torch, as torch layers.

        Exchanges of layers that equal names have paired come last.
        """
        back = {target: layer for layer, target in reading.partners.items()}
        of_torch = exchanges_of(reading.partners)
        of_flax = exchanges_of(filter(back.__contains__, self._match.flax))
        kinds = []
        named = []
        for mine, theirs in zip(of_torch, of_flax, strict=True):
            both = []
            for exchange in theirs:
                both.append([list(map(back.__getitem__, group)) for group in exchange])
            kinds.append([])
            for exchange in _in_alternation(both, mine):
                if self._match.by_name.issuperset(itertools.chain(*exchange)):
                    named.append(exchange)  # equal names rarely belong to different layers
                else:
                    kinds[-1].append(exchange)
        everywhere, within, across = kinds
        return Exchanges(everywhere, within, across + named)

    def _exchanged(self, reading: Reading, exchanges: Iterable[Exchange]) -> Iterator[Change]:
        """Yields for each exchange, if all its layers fit, the reading with exchanged partners."""
        for ones, *others in exchanges:
            layers = list(itertools.chain(ones, *others))
            if not self._match.by_rule.isdisjoint(layers):
                continue
            partners = dict(reading.partners)
            for layer, other in zip(layers, itertools.chain(*others, ones), strict=True):
                partners[layer] = reading.partners[other]
            if all(self._match.fits(layer, partners[layer]) for layer in layers):
                first = f"{ones[0]} is {reading.partners[ones[0]]}"
                second = f"{others[0][0]} is {reading.partners[others[0][0]]}"
                text = f"{first}, and {second}, or the other way round"
                yield Change(text, Reading(partners, reading.answers))

    # --- other readings with the same outputs ---------------------------------------------------

    def _neighbours(self, reading: Reading) -> Iterator[Change]:
        """Yields one changed reading for each choice that names do not decide."""
        yield from _changed(reading, self._forms(reading))
        for choice in itertools.chain(*self._maps(reading)):
            if choice.layers[0] in reading.answers:
                yield from _changed(reading, [choice])
        for choice in self._packings(reading):
            packing = reading.answer(choice.layers[0]).packing
            if packing is None:
                continue
            others = []
            for value in choice.values:
                # Parts in torch's order need no proof that another order is wrong.
                if value is None or not packing.is_in_order or value.is_in_order:
                    others.append(value)
            yield from _changed(reading, [choice._replace(values=others)])
        named = self._match.by_name | self._match.by_rule
        for alike in grouped(reading.partners, lambda layer: layer.signature).values():
            for one, other in itertools.pairwise(alike):
                if not {one, other} <= named:
                    yield from self._exchanged(reading, [([one], [other])])

    def _check(self, proved: Reading) -> None:
        """Runs the neighbours of a reading, and refuses it if one gives torch's outputs, too.

        Raises:
          CheckpointMismatch: The example does not tell some layers apart; the error lists all.
        """
        leaves = self._leaves_of(proved)
        doubtful = []
        for text, reading in itertools.islice(self._neighbours(proved), _CHECKS):
            others = self._leaves_of(reading)
            if all(np.array_equal(leaves[path], others[path]) for path in leaves):
                continue  # the exchanged leaves have equal values
            if self._evidence.apart(others).is_rounding:
                doubtful.append(text)
        if doubtful:
            raise CheckpointMismatch(
                "The Flax model gives torch's outputs, but also with some layers exchanged, so the "
                "example does not tell which is which. Use other inputs, or answer with these "
                "arguments.",
                ambiguous=doubtful,
                parameters=("rules", "conv1d", "conv_transpose", "flatten"),
            )

    def _refusal(self, apart: Apart, reading: Reading) -> CheckpointMismatch:
        """Returns the error if no reading gives torch's outputs, with the layers in doubt."""
        doubtful = [text for text, _ in itertools.islice(self._neighbours(reading), _SHOWN)]
        hint = "No layer is in doubt, so the two models seem to compute different functions"
        if apart.largest < _SLIGHT:
            hint = "So small a difference is rarely a wrong layer, and often another formula"
        elif doubtful:
            hint = (
                "The layers in doubt are listed; answer for those that you know (rules, flatten, "
                "conv1d, conv_transpose). If all are right, the models compute different functions"
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
    """Yields each reading in which one choice has another value."""
    for layers, field, values in choices:
        names = str(layers[0])
        if len(layers) > 1:
            names += f" to {layers[-1]}"
        what = _WHAT.get(field, "what is flattened")
        now = getattr(reading.answer(layers[0]), field) or values[0]
        for value in values:
            if value == now:
                continue
            answers = dict(reading.answers)
            for layer in layers:
                answers[layer] = reading.answer(layer)._replace(**{field: value})
            yield Change(f"{names}: {what}", Reading(reading.partners, answers))


def _rows_and_values(choice: Choice) -> tuple[int, tuple[Any, ...]]:
    return choice.layers[0].shape("weight")[0], tuple(choice.values)


def _orders(sizes: Shape, heads: Sequence[int]) -> list[Packing]:
    """Returns the orders of some packed parts but the usual one, the likeliest first.

    The parts may follow each other or alternate from head to head, in torch, in Flax or in both. Of
    many parts only two are exchanged, unless all are equal; four gates do not alternate.

    Args:
      sizes: The ratio of the parts in Flax.
      heads: The possible numbers of heads.
    """
    groups = [(1, 1)]
    for count in heads:
        groups += [(count, 1), (1, count), (count, count)]
    usual = tuple(range(len(sizes)))
    is_equal = len(set(sizes)) == 1
    orders = []
    for order in itertools.permutations(usual):
        moved = sum(one != other for one, other in zip(order, usual, strict=True))
        if moved > 2 and len(sizes) > _FEW_PARTS and not (is_equal and len(sizes) == _GATES):
            continue
        for in_torch, in_flax in groups:
            is_usual = order == usual and in_torch == in_flax
            if is_usual or (order != usual and in_torch > 1 and len(sizes) > _FEW_PARTS):
                continue
            in_order = tuple(sizes[order.index(place)] for place in usual)
            orders.append(_packing(order, in_torch, in_flax, in_order))
    return orders


def _packing(order: Shape, torch_groups: int, flax_groups: int, sizes: Shape) -> Packing:
    """Returns a packing, with () for equal sizes."""
    if len(set(sizes)) == 1:
        sizes = ()
    return Packing(order, torch_groups, flax_groups, sizes)


def _in_turn(layers: Sequence[Layer]) -> list[Layer]:
    """Returns layers in the order of a loop that calls several lists of modules in turn.

    A list of filters and a list of gates become first filter, first gate, second filter, ...
    """
    ordered = []
    for _, run in itertools.groupby(layers, lambda layer: bool(_places_in_lists(layer))):
        ordered += sorted(run, key=_places_in_lists)
    return ordered


def _places_in_lists(layer: Layer) -> list[int]:
    return list(map(int, filter(str.isdigit, layer.segments)))


def _in_alternation(*lists: Iterable[_T]) -> Iterator[_T]:
    """Yields the first member of each list, then the second member of each list, and so on."""
    for members in itertools.zip_longest(*lists):
        for member in members:
            if member is not None:
                yield member
