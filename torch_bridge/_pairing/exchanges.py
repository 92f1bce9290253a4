"""Finds equal layers and modules in one model, which could be exchanged with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import words_of
from torch_bridge._pairing.match import grouped
from torch_bridge._pairing.pairs import Path

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
        inner = [node for node in nodes if node and _around(node) == modules[0]]
        for alike in grouped(inner, lambda node: _signatures(nodes[node])).values():
            members = []  # for each name, the layers or modules of that name in all modules
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
    # Norms come last, because their exchange changes little and may come nearer by chance.
    for exchanges in (everywhere, within, across):
        exchanges.sort(key=lambda exchange: all(layer.is_vector for layer in exchange[0]))
    return Exchanges(everywhere, circles + within, across)


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
