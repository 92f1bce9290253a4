"""Proposes to exchange equal layers and modules with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import words_of
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import Match, grouped
from torch_bridge._pairing.pairs import Path
from torch_bridge._pairing.proposals import Change

_T = TypeVar("_T")
# Two groups of layers, of which each takes the place of the other.
Exchange: TypeAlias = Sequence[Sequence[Layer]]


class Exchanges(NamedTuple):
    """All exchanges in one model, the likeliest kinds first.

    Attributes:
      everywhere: Exchanges of two layers or modules inside one module, in all equal modules at
        once, such as every query with every key.
      within: Exchanges of two layers or modules inside a single module.
      across: Exchanges of two layers or modules of different modules. Exchanges of layers that
        equal names have paired come last, of any kind.
    """

    everywhere: list[Exchange]
    within: list[Exchange]
    across: list[Exchange]


def exchanges_of(match: Match, reading: Reading) -> Exchanges:
    """Lists the exchanges of equal layers and modules, by the names of either model."""
    torch_of = {target: layer for layer, target in reading.partners.items()}
    in_flax = _exchanges_among(filter(torch_of.__contains__, match.layers.flax))
    # All exchanges are told by torch's layers, so those stay as they are.
    torch_of.update(zip(reading.partners, reading.partners, strict=True))
    in_torch = _exchanges_among(reading.partners)
    kinds = []
    named = []
    for both in zip(in_flax, in_torch, strict=True):
        kinds.append([])
        for exchange in in_alternation(*both):
            groups = [list(map(torch_of.__getitem__, group)) for group in exchange]
            if match.by_name.issuperset(itertools.chain(*groups)):
                named.append(groups)  # equal names rarely belong to different layers
            else:
                kinds[-1].append(groups)
    everywhere, within, across = kinds
    return Exchanges(everywhere, within, across + named)


def exchanged(match: Match, reading: Reading, exchanges: Iterable[Exchange]) -> Iterator[Change]:
    """Yields for each exchange, if all its layers fit, the reading with exchanged partners."""
    for exchange in exchanges:
        ones, others = exchange
        layers = [*ones, *others]
        if not match.ruled.partners.keys().isdisjoint(layers):
            continue
        partners = dict(reading.partners)
        for layer, other in zip(layers, [*others, *ones], strict=True):
            partners[layer] = reading.partners[other]
        if all(map(match.fits, layers, map(partners.__getitem__, layers))):
            first = f"{ones[0]} is {reading.partners[ones[0]]}"
            second = f"{others[0]} is {reading.partners[others[0]]}"
            text = f"{first}, and {second}, or the other way round"
            yield Change(text, Reading(partners, reading.answers))


def in_alternation(*lists: Iterable[_T]) -> Iterator[_T]:
    """Yields the first member of each list, then the second member of each list, and so on."""
    for members in itertools.zip_longest(*lists):
        for member in members:
            if member is not None:
                yield member


def _exchanges_among(model: Iterable[Layer]) -> Exchanges:
    """Lists the exchanges of equal layers and modules of one model.

    Args:
      model: The model's layers. Equal modules must have their layers in the same order.
    """
    layers = {}  # name of a layer or module -> all layers in it
    contents = {}  # the same -> their names in the module, and their sizes
    for layer in model:
        for length in range(len(layer.segments) + 1):
            name = layer.segments[:length]
            layers.setdefault(name, []).append(layer)
            contents.setdefault(name, []).append((layer.segments[length:], layer.sizes))
    everywhere, within, across = exchanges = Exchanges([], [], [])

    def sizes(node: Path) -> tuple[object, ...]:
        return tuple(lengths for _, lengths in contents[node])

    def together(nodes: Iterable[Path]) -> list[Layer]:
        return list(itertools.chain(*map(layers.__getitem__, nodes)))

    families = grouped(layers, sizes).values()
    for family in families:
        series = grouped(family, lambda node: words_of(node)[0]).values()
        for first, second in itertools.combinations(series, 2):
            if list(map(_around, first)) == list(map(_around, second)):
                everywhere.append([together(first), together(second)])
        for one, other in itertools.combinations(family, 2):
            if _around(one) != _around(other):
                across.append([layers[one], layers[other]])
    inner = grouped(filter(None, layers), _around)  # module -> the layers and modules in it
    for modules in grouped(layers, lambda node: tuple(contents[node])).values():
        for alike in grouped(inner.get(modules[0], ()), sizes).values():
            members = []  # for each name, the layers or modules of that name in all modules
            for node in alike:
                members.append([(*module, node[-1]) for module in modules])
            groups = list(map(together, members))
            everywhere += itertools.combinations(groups, 2)
            if len(modules) > 1:
                for nodes in zip(*members, strict=True):
                    within += itertools.combinations(map(layers.__getitem__, nodes), 2)
    # Norms come last, because their exchange changes little and may come nearer by chance.
    for kind in exchanges:
        kind.sort(key=_is_of_vectors)
    return exchanges


def _is_of_vectors(exchange: Exchange) -> bool:
    return all(layer.is_vector for layer in exchange[0])


def _around(node: Path) -> Path:
    """Returns the path of the module that contains a layer or module."""
    return node[:-1]
