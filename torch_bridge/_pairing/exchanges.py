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
from torch_bridge._pairing.proposals import Change, Problem

_T = TypeVar("_T")
# Groups of layers. Each group takes the place of the next group, and the last that of the first.
Exchange: TypeAlias = Sequence[Sequence[Layer]]
_FEW = 4  # in a module with at most as many equal layers, three are also exchanged in a circle


class Exchanges(NamedTuple):
    """All exchanges in one model, the likeliest kinds first.

    Attributes:
      everywhere: Exchanges of two layers or modules inside one module, in all equal modules at
        once, such as every query with every key.
      within: Exchanges of three layers or modules in a circle, in all equal modules at once; and of
        two layers or modules inside a single module.
      across: Exchanges of two layers or modules of different modules.
    """

    everywhere: list[Exchange]
    within: list[Exchange]
    across: list[Exchange]


class ExchangedLayers:
    """Proposes to exchange layers that fit each other's places, or whole modules of such layers.

    Exchanges of layers that equal names have paired come last.
    """

    def __init__(self, problem: Problem, reading: Reading) -> None:
        self._match = problem.match
        self._reading = reading
        back = {target: layer for layer, target in reading.partners.items()}
        of_torch = exchanges_of(reading.partners)
        of_flax = exchanges_of(filter(back.__contains__, self._match.flax))
        kinds = []
        named = []
        for mine, theirs in zip(of_torch, of_flax, strict=True):
            both = []
            for exchange in theirs:
                groups = []
                for group in exchange:
                    groups.append(list(map(back.__getitem__, group)))
                both.append(groups)
            kinds.append([])
            for exchange in in_alternation(both, mine):
                if self._match.by_name.issuperset(itertools.chain(*exchange)):
                    named.append(exchange)  # equal names rarely belong to different layers
                else:
                    kinds[-1].append(exchange)
        everywhere, within, across = kinds
        self._exchanges = Exchanges(everywhere, within, across + named)

    def likely(self) -> Iterator[Change]:
        """Yields exchanges in all equal modules at once."""
        return exchanged(self._match, self._reading, self._exchanges.everywhere)

    def within(self) -> Iterator[Change]:
        """Yields exchanges in a circle, and in a single module."""
        return exchanged(self._match, self._reading, self._exchanges.within)

    def unlikely(self) -> Iterator[Change]:
        """Yields exchanges across modules."""
        return exchanged(self._match, self._reading, self._exchanges.across)


def exchanged(match: Match, reading: Reading, exchanges: Iterable[Exchange]) -> Iterator[Change]:
    """Yields for each exchange, if all its layers fit, the reading with exchanged partners."""
    for ones, *others in exchanges:
        layers = list(itertools.chain(ones, *others))
        if not match.by_rule.isdisjoint(layers):
            continue
        partners = dict(reading.partners)
        for layer, other in zip(layers, itertools.chain(*others, ones), strict=True):
            partners[layer] = reading.partners[other]
        if all(map(match.fits, layers, map(partners.__getitem__, layers))):
            first = f"{ones[0]} is {reading.partners[ones[0]]}"
            second = f"{others[0][0]} is {reading.partners[others[0][0]]}"
            text = f"{first}, and {second}, or the other way round"
            yield Change(text, Reading(partners, reading.answers))


def in_alternation(*lists: Iterable[_T]) -> Iterator[_T]:
    """Yields the first member of each list, then the second member of each list, and so on."""
    for members in itertools.zip_longest(*lists):
        for member in members:
            if member is not None:
                yield member


def exchanges_of(layers: Iterable[Layer]) -> Exchanges:
    """Returns the possible exchanges among the layers of a model.

    Args:
      layers: The model's layers. Equal modules must have their layers in the same order.
    """
    nodes: dict[Path, list[Layer]] = {(): list(layers)}
    for layer in nodes[()]:
        for length in range(1, len(layer.segments) + 1):
            nodes.setdefault(layer.segments[:length], []).append(layer)
    everywhere: list[Exchange] = []
    within: list[Exchange] = []
    across: list[Exchange] = []
    circles: list[Exchange] = []
    families = grouped(nodes, lambda node: _signatures(nodes[node]))
    for family in families.values():
        series = grouped(family, lambda node: words_of(node)[0]).values()
        for first, second in itertools.combinations(series, 2):
            if list(map(_around, first)) == list(map(_around, second)):
                everywhere.append([_layers(nodes, first), _layers(nodes, second)])
    for modules in grouped(nodes, lambda node: _contents(node, nodes[node])).values():
        inner = []
        for node in nodes:
            if node and _around(node) == modules[0]:
                inner.append(node)
        for alike in grouped(inner, lambda node: _signatures(nodes[node])).values():
            members = []  # for each name, the layers or modules of that name in all modules
            for node in alike:
                members.append([(*module, node[-1]) for module in modules])
            together = []
            for names in members:
                together.append(_layers(nodes, names))
            everywhere += itertools.combinations(together, 2)
            if len(together) <= _FEW:
                for one, two, three in itertools.combinations(together, 3):
                    circles += [(one, two, three), (three, two, one)]
            if len(modules) > 1:
                for names in zip(*members, strict=True):
                    within += itertools.combinations(map(nodes.__getitem__, names), 2)
    for family in families.values():
        for one, other in itertools.combinations(family, 2):
            if _around(one) != _around(other):
                across.append([nodes[one], nodes[other]])
    # Norms come last, because their exchange changes little and may come nearer by chance.
    for exchanges in (everywhere, within, across):
        exchanges.sort(key=_is_of_vectors)
    return Exchanges(everywhere, circles + within, across)


def _is_of_vectors(exchange: Exchange) -> bool:
    return all(layer.is_vector for layer in exchange[0])


def _layers(nodes: dict[Path, list[Layer]], modules: Iterable[Path]) -> list[Layer]:
    """Lists all layers of some modules."""
    return list(itertools.chain(*map(nodes.__getitem__, modules)))


def _around(node: Path) -> Path:
    """Returns the path of the module that contains a layer or module."""
    return node[:-1]


def _signatures(layers: list[Layer]) -> tuple[object, ...]:
    return tuple(layer.signature for layer in layers)


def _contents(node: Path, layers: list[Layer]) -> tuple[object, ...]:
    """Returns a key that is equal for modules with equal layers of equal names."""
    return tuple((layer.segments[len(node) :], layer.signature) for layer in layers)
