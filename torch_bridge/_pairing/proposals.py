"""Proposes changes of a reading: of the form of weights, of maps, of packed rows, of partners.

A proposal lists choices: fields in the answers of some layers, with the values to try. Or it lists
exchanges of equal layers and modules with each other. Nothing changes what the user has answered.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeAlias

from torch_bridge._pairing.evidence import Evidence
from torch_bridge._pairing.kinds import OUT_IN, join
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import VERBS, Flow, Reading
from torch_bridge._pairing.match import Match, grouped
from torch_bridge._pairing.pairs import Packing, Path, Shape
from torch_bridge._pairing.trace import Trace

_FEW_PARTS = 3  # up to this number all orders of packed parts are tried
_GATES = 4  # the same for so many equal parts, the gates of a cell
_PACKINGS = 24  # the most orders of packed rows that are tried with each of the first readings
# Two groups of layers, of which each takes the place of the other.
Exchange: TypeAlias = Sequence[Sequence[Layer]]
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


class Case(NamedTuple):
    """Two models with an example, of which a reading is searched.

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
        return min(map(self.evidence.trace.positions.__getitem__, target.tensors()))


def changes(case: Case, reading: Reading, culprits: AbstractSet[Layer]) -> Iterator[Change]:
    """Yields the single changes of a reading, the likeliest first.

    Args:
      case: The two models and the example.
      reading: The reading.
      culprits: The layers of which each change concerns one at least.
    """

    def of_choices(choices: Iterable[Choice]) -> Iterator[Change]:
        concerning = filter(lambda choice: not culprits.isdisjoint(choice.layers), choices)
        return changed(reading, concerning)

    def of_exchanges(exchanges: Iterable[Exchange]) -> Iterator[Change]:
        for ones, others in exchanges:
            if not (culprits.isdisjoint(ones) and culprits.isdisjoint(others)):
                yield from exchanged(case.match, reading, ones, others)

    torch_of = {target: layer for layer, target in reading.partners.items()}
    of_flax = {}
    for target in filter(torch_of.__contains__, case.match.layers.flax):
        of_flax[torch_of[target]] = target
    of_torch = dict(zip(reading.partners, reading.partners, strict=True))
    likely, unlikely = flattened_maps(case, reading)
    first = [*forms(case, reading), *likely]
    second = [*packed_rows(case, reading), *unlikely]
    yield from of_choices(first)
    for names in (of_torch, of_flax):
        yield from of_exchanges(_exchanges_inside(names))
    yield from of_choices(second)
    yield from of_exchanges(_exchanges_of_two(reading))
    yield from of_choices(_single([*first, *second]))


def neighbours(case: Case, reading: Reading) -> Iterator[Change]:
    """Yields one changed reading for each choice that names do not decide.

    A reading that gives torch's outputs is right if none of its neighbours gives them.
    """
    choices = forms(case, reading)
    for choice in itertools.chain(*flattened_maps(case, reading)):
        if choice.layers[0] in reading.answers:
            choices.append(choice)
    for choice in packed_rows(case, reading):
        packing = reading.answer(choice.layers[0]).packing
        if packing and packing.is_in_order:
            # Parts in torch's order need no proof that another order is wrong.
            in_order = filter(lambda value: value is None or value.is_in_order, choice.values)
            choice = choice._replace(values=list(in_order))
        if packing:
            choices.append(choice)
    yield from changed(reading, choices)
    named = case.match.by_name.union(case.match.ruled.partners)
    for alike in grouped(reading.partners, lambda layer: layer.sizes).values():
        for one, other in itertools.pairwise(alike):
            if not {one, other} <= named:
                yield from exchanged(case.match, reading, [one], [other])


def changed(reading: Reading, choices: Iterable[Choice]) -> Iterator[Change]:
    """Yields each reading in which one choice has another value."""
    for layers, field, values in choices:
        names = str(layers[0])
        if len(layers) > 1:
            names += f" to {layers[-1]}"
        text = f"{names}: {_WHAT.get(field, 'what is flattened')}"
        now = getattr(reading.answer(layers[0]), field) or values[0]
        for value in values:
            if value != now:
                yield Change(text, reading.with_answers(layers, field, value))


def forms(case: Case, reading: Reading) -> list[Choice]:
    """Lists the weights with several forms, such as (in, out) or of a ConvTranspose.

    Layers whose names differ in numbers change together.
    """
    families = {}
    for layer, several in reading.forms().items():
        if not case.answered.answer(layer).form:
            families.setdefault((layer.words, tuple(several)), []).append(layer)
    choices = []
    for (_, several), alike in families.items():
        choices.append(Choice(alike, "form", several))
    return choices


def _single(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Yields a choice for each single layer of the choices about several."""
    for choice in choices:
        if len(choice.layers) > 1:
            for layer in choice.layers:
                yield choice._replace(layers=[layer])


def flattened_maps(case: Case, reading: Reading) -> tuple[list[Choice], list[Choice]]:
    """Lists the layers that may read or output flattened maps, in the widths that Flax flattens.

    Returns:
      Likely choices, of maps that are all inputs (or outputs) of a layer. And unlikely choices: of
      maps that stand beside other values, and of norms.
    """
    likely = []
    unlikely = []
    flow = Flow(reading)
    options = case.match.options
    for option in VERBS:
        for alike, values in flow.movable(option):
            # The user's {} says that no layer has a map, except for norms.
            is_vector = alike[0].is_vector
            if getattr(options, option) == () and not is_vector:
                continue
            layers = []
            for layer in alike:
                answered = getattr(case.answered.answer(layer), option)
                if not (answered or options.answer(option, layer.name)):
                    layers.append(layer)
            if not layers:
                continue
            whole: list[Any] = [()]
            narrow: list[Any] = [()]
            for size, channels in case.evidence.trace.feature_maps:
                places = size // channels
                if size == values:
                    whole.append(((0, channels, places),))
                elif size < values:
                    narrow += [((0, channels, places),), ((values - size, channels, places),)]
            if is_vector:
                unlikely.append(Choice(layers, option, whole))
                continue
            unlikely.append(Choice(layers, option, narrow))
            if len(whole) == 1:
                continue
            if len(layers) > 1:  # only the first one reads a map, or the last one outputs a map
                end = {"flatten": min, "unflatten": max}[option]
                one = end(layers, key=lambda layer: case.place(reading.partners[layer]))
                likely.append(Choice([one], option, whole))
            likely.append(Choice(layers, option, whole))
    return likely, unlikely


def packed_rows(case: Case, reading: Reading) -> list[Choice]:
    """Lists the packed layers, with the orders that the rows of their parts may have in torch.

    A layer is packed if its rows go to several Flax layers, or if the Flax model divides its
    outputs into a few parts.
    """
    packed = []
    for layer, target in reading.partners.items():
        is_kernel = layer.kind == "weight" and target.kind == "kernel"
        if is_kernel and join(layer, target).forms[:1] == [OUT_IN]:
            packed.append(layer)
    choices = []
    for alike in grouped(packed, lambda layer: (layer.words, layer.signature)).values():
        if case.answered.answer(alike[0]).packing:
            continue
        orders = _orders(case.evidence.trace, alike[0])
        if orders:
            choices.append(Choice(alike, "packing", [None, *orders]))
    return choices


def likely_packings(case: Case, reading: Reading) -> Iterator[Reading]:
    """Yields a reading with the likely orders of all packed layers, equal ones for like layers.

    A deep model is far off until all its layers are right, so these are not single changes.
    """
    families = grouped(
        packed_rows(case, reading),
        lambda choice: (choice.layers[0].shape("weight")[0], tuple(choice.values)),
    )
    # The widest layers come last, whose orders change first: narrow ones are rarely packed.
    in_turn = sorted(families.items(), key=lambda item: item[0][0])
    likely = []
    for (_, values), _ in in_turn:
        likely.append([None, *filter(lambda value: value and value.is_likely, values)])
    for packings in itertools.islice(itertools.product(*likely), _PACKINGS):
        packed = reading
        for (_, choices), packing in zip(in_turn, packings, strict=True):
            for choice in choices:
                packed = packed.with_answers(choice.layers, "packing", packing)
        yield packed


def _orders(trace: Trace, layer: Layer) -> list[Packing]:
    """Returns the orders that a layer's rows may have, but the usual one."""
    rows = layer.shape("weight")[0]
    orders = []
    if layer.share:
        _, sizes = layer.share
        in_order = tuple(range(len(sizes)))
        for count in _heads(trace, rows, sizes):
            orders.append(Packing(in_order, count, 1, sizes))
        return orders
    lengths = {rows}
    for size, channels in trace.feature_maps:
        if size == rows:
            lengths.add(channels)
    ratios = set()
    for length, sizes in trace.splits:
        if length in lengths:
            ratios.add(sizes)
    for sizes in sorted(ratios):
        orders += _permuted(sizes, _heads(trace, rows, sizes))
    return orders


def _heads(trace: Trace, rows: int, sizes: Shape) -> list[int]:
    """Returns the numbers of groups (heads) that the Flax model makes of a part or of all rows.

    If several heads of queries share a key and a value, these heads are one group.
    """
    groups = set()
    blocks = sum(sizes)
    for size, channels in trace.feature_maps:
        heads = size // channels
        for several in {1, *sizes, blocks}:
            if size in (rows, rows // blocks * several):
                groups.update((heads, heads // several))
    return sorted(count for count in groups if count > 1 and rows % (count * blocks) == 0)


def _permuted(sizes: Shape, heads: Sequence[int]) -> list[Packing]:
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
    are_gates = len(set(sizes)) == 1 and len(sizes) == _GATES
    orders = []
    for order in itertools.permutations(usual):
        moved = sum(map(operator.ne, order, usual))
        in_order = tuple(sizes[order.index(place)] for place in usual)
        if len(sizes) > _FEW_PARTS and moved > 2 and not are_gates:
            continue
        for in_torch, in_flax in groups:
            if moved and len(sizes) > _FEW_PARTS:
                is_kept = in_torch == 1
            else:
                is_kept = bool(moved) or in_torch != in_flax
            if is_kept:
                orders.append(Packing(order, in_torch, in_flax, in_order))
    return orders


def exchanged(
    match: Match, reading: Reading, ones: Sequence[Layer], others: Sequence[Layer]
) -> Iterator[Change]:
    """Yields the reading in which two groups have each other's partners, if all layers fit."""
    layers = [*ones, *others]
    if match.ruled.partners.keys().isdisjoint(layers):
        other = rearranged(match, reading, layers, [*others, *ones])
        if other:
            first = f"{ones[0]} is {reading.partners[ones[0]]}"
            second = f"{others[0]} is {reading.partners[others[0]]}"
            yield Change(f"{first}, and {second}, or the other way round", other)


def rearranged(
    match: Match, reading: Reading, layers: Iterable[Layer], others: Iterable[Layer]
) -> Reading | None:
    """Returns the reading in which layers have the partners of others; None if one does not fit."""
    partners = dict(reading.partners)
    for layer, other in zip(layers, others, strict=True):
        partners[layer] = reading.partners[other]
        if not match.fits(layer, partners[layer]):
            return None
    return Reading(partners, reading.answers)


def _exchanges_inside(names: Mapping[Layer, Layer]) -> list[Exchange]:
    """Lists exchanges of two layers or modules inside one module, in all equal modules at once.

    So every query takes the place of every key.

    Args:
      names: Torch layer -> the layer whose name counts, in either model. Equal modules must have
        their layers in the same order.
    """
    layers = {}  # name of a layer or module -> all torch layers in it
    contents = {}  # the same -> their names in the module, and their sizes
    for layer, named in names.items():
        for length in range(len(named.segments) + 1):
            node = named.segments[:length]
            layers.setdefault(node, []).append(layer)
            contents.setdefault(node, []).append((named.segments[length:], named.sizes))

    def sizes(node: Path) -> tuple[object, ...]:
        return tuple(lengths for _, lengths in contents[node])

    exchanges = []
    inner = grouped(filter(None, layers), lambda node: node[:-1])  # module -> what is in it
    for modules in grouped(layers, lambda node: tuple(contents[node])).values():
        for alike in grouped(inner.get(modules[0], ()), sizes).values():
            groups = []  # for each name, the layers of that name in all modules
            for node in alike:
                members = [layers[(*module, node[-1])] for module in modules]
                groups.append(list(itertools.chain(*members)))
            exchanges += itertools.combinations(groups, 2)
    return exchanges


def _exchanges_of_two(reading: Reading) -> Iterator[Exchange]:
    """Yields the exchanges of any two equal layers."""
    for alike in grouped(reading.partners, lambda layer: layer.sizes).values():
        for one, other in itertools.combinations(alike, 2):
            yield [one], [other]
