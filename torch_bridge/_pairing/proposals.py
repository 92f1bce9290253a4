"""Proposes changes of a reading: of the form of weights, of flattened maps, of packed rows.

A proposal looks at one reading of two models. It yields single changes of it, the likely ones and
the unlikely ones apart, so that the search can try all likely changes before the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch_bridge._pairing.evidence import Evidence
from torch_bridge._pairing.kinds import OUT_IN, join
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import Match, grouped
from torch_bridge._pairing.pairs import Maps, Packing, Shape

_FEW_PARTS = 3  # up to this number all orders of packed parts are tried
_GATES = 4  # the same for so many equal parts, the gates of a cell
_PACKINGS = 16  # the most orders of packed rows that are tried with each of the first readings
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


class Problem(NamedTuple):
    """Two models, of which a reading is searched.

    Attributes:
      match: The layers, with the pairs that rules and names decide.
      answered: A reading with the user's answers, which no proposal changes.
      evidence: The example.
    """

    match: Match
    answered: Reading
    evidence: Evidence

    def place(self, target: Layer) -> float:
        """Returns the position of a layer in the order in which the Flax model uses layers."""
        return min(map(self.evidence.order.__getitem__, target.tensors()))


class Proposal(Protocol):
    """Changes of one reading."""

    def likely(self) -> Iterator[Change]:
        """Yields the likely changes, the likeliest first."""
        ...

    def unlikely(self) -> Iterator[Change]:
        """Yields the other changes."""
        ...


class Forms:
    """Proposes another form for a weight that has several, such as (in, out) or a ConvTranspose.

    Layers whose names differ in numbers change together, and then one by one. Kernels rarely have
    another order, or are a ConvTranspose without a stride, so only matrices are likely.

    Attributes:
      choices: The weights with several forms, without those for which the user has answered.
    """

    def __init__(self, problem: Problem, reading: Reading) -> None:
        self._reading = reading
        forms = reading.forms()
        families = {}
        for layer, several in forms.items():
            if not problem.answered.answer(layer).form:
                families.setdefault((layer.words, tuple(several)), []).append(layer)
        self.choices = []
        for (_, several), alike in families.items():
            self.choices.append(Choice(alike, "form", several))
        self.choices.sort(key=lambda choice: len(choice.values))

    def likely(self) -> Iterator[Change]:
        """Yields other forms of matrices."""
        return changed(self._reading, filter(_is_matrix, self.choices))

    def unlikely(self) -> Iterator[Change]:
        """Yields other forms of kernels, and of single layers of a series."""
        kernels = list(itertools.filterfalse(_is_matrix, self.choices))
        yield from changed(self._reading, kernels)
        for choice in itertools.chain(filter(_is_matrix, self.choices), kernels):
            if len(choice.layers) > 1:
                for layer in choice.layers:
                    yield from changed(self._reading, [choice._replace(layers=[layer])])


class FlattenedMaps:
    """Proposes flattened maps that layers may read or output.

    A likely layer has the width of a map that Flax flattens. In an unlikely layer the map may stand
    beside other values. Norms are the last unlikely layers.

    Attributes:
      choices: All layers with their possible maps, the likely ones first.
    """

    def __init__(self, problem: Problem, reading: Reading) -> None:
        self._problem = problem
        self._reading = reading
        self._likely = []
        self._unlikely = []
        norms = []
        flow = Flow(reading)
        for option in VERBS:
            for alike, values in flow.movable(option):
                layers = self._open(option, alike)
                if not layers:
                    continue
                whole, beside = self._maps(values)
                if alike[0].is_vector:
                    norms.append(Choice(layers, option, whole))
                    continue
                self._unlikely.append(Choice(layers, option, [(), *beside]))
                if len(whole) > 1:
                    if len(layers) > 1:
                        self._likely.append(
                            Choice([self._outermost(option, layers)], option, whole)
                        )
                    self._likely.append(Choice(layers, option, whole))
        self._unlikely += norms
        self.choices = self._likely + self._unlikely

    def likely(self) -> Iterator[Change]:
        """Yields maps that are all inputs (or outputs) of a layer."""
        return changed(self._reading, self._likely)

    def unlikely(self) -> Iterator[Change]:
        """Yields maps beside other values, and maps of norms."""
        return changed(self._reading, self._unlikely)

    def _open(self, option: str, alike: Iterable[Layer]) -> list[Layer]:
        """Returns the layers for which the user has not answered whether they have a map."""
        options = self._problem.match.options
        layers = []
        for layer in alike:
            pattern, _ = options.map_of(option, layer)
            is_answered = getattr(self._problem.answered.answer(layer), option)
            # The user's {} says that no layer has a map, except for norms.
            has_none = getattr(options, option) == () and not layer.is_vector
            if pattern is None and not is_answered and not has_none:
                layers.append(layer)
        return layers

    def _maps(self, values: int) -> tuple[list[Maps], list[Maps]]:
        """Returns the maps that Flax flattens to so many values, and those beside other values."""
        whole: list[Maps] = [()]
        beside = []
        for size, channels in self._problem.evidence.maps:
            places = size // channels
            if size == values:
                whole.append(((0, channels, places),))
            elif size < values:
                beside.append(((0, channels, places),))
                beside.append(((values - size, channels, places),))
        return whole, beside

    def _outermost(self, option: str, layers: Iterable[Layer]) -> Layer:
        """Returns the first layer, which reads a map, or the last one, which outputs a map."""
        partners = self._reading.partners
        in_turn = sorted(layers, key=lambda layer: self._problem.place(partners[layer]))
        if option == "flatten":
            return in_turn[0]
        return in_turn[-1]


class PackedRows:
    """Proposes other orders of the rows of packed layers.

    A layer is packed if its rows go to several Flax layers, or if the Flax model divides its
    outputs into a few parts.

    Attributes:
      choices: The packed layers, with the orders that the rows of their parts may have in torch.
    """

    def __init__(self, problem: Problem, reading: Reading) -> None:
        self._evidence = problem.evidence
        self._reading = reading
        packed = []
        for layer, target in reading.partners.items():
            is_kernel = layer.sort == "weight" and target.sort == "kernel"
            if is_kernel and join(layer, target).forms[:1] == [OUT_IN]:
                packed.append(layer)
        self.choices = []
        for alike in grouped(packed, lambda layer: (layer.words, layer.signature)).values():
            if problem.answered.answer(alike[0]).packing:
                continue
            orders = self._orders(alike[0])
            if orders:
                self.choices.append(Choice(alike, "packing", [None, *orders]))

    def likely(self) -> Iterator[Change]:
        """Yields all other orders of the rows of one series of layers."""
        return changed(self._reading, self.choices)

    def unlikely(self) -> Iterator[Change]:
        """Yields nothing: the Flax model shows for which layers an order is likely."""
        return iter(())

    def together(self) -> Iterator[Change]:
        """Yields a reading with the likely orders of all layers, equal ones for like layers.

        A deep model is far off until all its layers are right, so these are not single changes.
        """
        layers = []
        likely = []
        families = grouped(self.choices, _rows_and_values)
        # The widest layers come last, whose orders change first: narrow ones are rarely packed.
        for (_, values), choices in sorted(families.items(), key=lambda item: item[0][0]):
            members = []
            for choice in choices:
                members += choice.layers
            layers.append(members)
            few = [None]
            few += filter(lambda value: value and value.is_likely, values)
            likely.append(few)
        for packings in itertools.islice(itertools.product(*likely), _PACKINGS):
            answers = dict(self._reading.answers)
            for alike, packing in zip(layers, packings, strict=True):
                for layer in alike:
                    answers[layer] = self._reading.answer(layer)._replace(packing=packing)
            yield Change("", Reading(self._reading.partners, answers))

    def _orders(self, layer: Layer) -> list[Packing]:
        """Returns the orders that a layer's rows may have, but the usual one."""
        rows = layer.shape("weight")[0]
        orders = []
        if layer.share:
            _, sizes = layer.share
            in_order = tuple(range(len(sizes)))
            for groups in self._groups(rows, sizes):
                orders.append(_packing(in_order, groups, 1, sizes))
        else:
            for sizes in self._parts(rows):
                orders += _orders(sizes, self._groups(rows, sizes))
        return orders

    def _parts(self, rows: int) -> list[Shape]:
        """Returns the ratios of the parts into which the Flax model divides so many values."""
        lengths = {rows}
        for size, channels in self._evidence.maps:
            if size == rows:
                lengths.add(channels)
        ratios = set()
        for length, sizes in self._evidence.splits:
            if length in lengths:
                ratios.add(sizes)
        return sorted(ratios, key=lambda sizes: (len(set(sizes)), len(sizes), sizes))

    def _groups(self, rows: int, sizes: Shape) -> list[int]:
        """Returns the numbers of groups (heads) that the Flax model makes of a part or of all.

        If several heads of queries share a key and a value, these heads are one group.
        """
        groups = set()
        blocks = sum(sizes)
        for size, channels in self._evidence.maps:
            heads = size // channels
            for several in {1, *sizes, blocks}:
                if size in (rows, rows // blocks * several):
                    groups.update((heads, heads // several))
        possible = []
        for count in sorted(groups):
            if count > 1 and rows % (count * blocks) == 0:
                possible.append(count)
        return possible


def changed(reading: Reading, choices: Iterable[Choice]) -> Iterator[Change]:
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


def _is_matrix(choice: Choice) -> bool:
    return len(choice.layers[0].shape("weight")) < 3


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
