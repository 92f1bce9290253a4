"""Layers and modules that are alike within one model, and could stand for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import words_of
from torch_bridge._pairing.match import grouped
from torch_bridge._pairing.pairs import Path

# Groups of layers of which each could take the place of the next, and the last that of the first.
Exchange: TypeAlias = Sequence[Sequence[Layer]]
_FEW = 4  # layers of one module, of which three are exchanged in a circle


class Exchanges(NamedTuple):
    """All exchanges in one model, the likeliest kinds first.

    Attributes:
      everywhere: Two layers or modules of one module, in all modules of the same contents at once:
        every query with every key.
      within: Three of one module in a circle, in all such modules, and two of one module alone.
      across: Two of different modules.
    """

    everywhere: list[Exchange]
    within: list[Exchange]
    across: list[Exchange]


def exchanges_of(layers: Iterable[Layer]) -> Exchanges:
    """Lists what could be exchanged among the layers of a model.

    Args:
      layers: Those, in an order in which equal modules have theirs in the same order.
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
        inner = [node for node in nodes if node and _around(node) == modules[0]]
        for alike in grouped(inner, lambda node: _signatures(nodes[node])).values():
            members = []  # of each name, in all the modules
            for node in alike:
                members.append([(*module, node[-1]) for module in modules])
            together = [_layers(nodes, names) for names in members]
            everywhere += itertools.combinations(together, 2)
            if len(together) <= _FEW:
                for one, two, three in itertools.combinations(together, 3):
                    circles += [(one, two, three), (three, two, one)]
            if len(modules) > 1:
                for names in zip(*members, strict=True):
                    within += itertools.combinations([nodes[name] for name in names], 2)
    for family in families.values():
        for one, other in itertools.combinations(family, 2):
            if _around(one) != _around(other):
                across.append([nodes[one], nodes[other]])
    # Norms last: exchanged, they change little, and so come nearer by chance.
    for exchanges in (everywhere, within, across):
        exchanges.sort(key=lambda exchange: all(layer.is_vector for layer in exchange[0]))
    return Exchanges(everywhere, circles + within, across)


def _layers(nodes: dict[Path, list[Layer]], modules: Iterable[Path]) -> list[Layer]:
    """Lists all layers of some modules."""
    return list(itertools.chain(*map(nodes.__getitem__, modules)))


def _around(node: Path) -> Path:
    """Returns the module that a layer or module lies in."""
    return node[:-1]


def _signatures(layers: list[Layer]) -> tuple[object, ...]:
    return tuple(layer.signature for layer in layers)


def _contents(node: Path, layers: list[Layer]) -> tuple[object, ...]:
    """Returns what is equal for modules with equal layers of equal names."""
    return tuple((layer.segments[len(node) :], layer.signature) for layer in layers)
