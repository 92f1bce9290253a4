"""A reading of two models, and its flattened maps: which layers may read or give one.

torch flattens (C, H, W) and Flax (H, W, C), and no shape shows it. H and W stay as they are to each
other, so that of a map only its channels and its places matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch_bridge._pairing.kinds import USUAL, Answer, View, build, links_of
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.match import Partners
from torch_bridge._pairing.pairs import Maps, Pair

# What is flattened, as users say it: shapes (C, H, W), and numbers of values that are no map.
Flattened: TypeAlias = tuple[tuple[int, ...], ...]
Answers: TypeAlias = dict[Layer, Answer]
VERBS = {"flatten": "reads", "unflatten": "gives"}
_COLOURS = 3
_LEAST_SIDE = 4  # of a picture that no convolution reads
_LARGE_SIDE = 8  # of one that is given, where no layer reads as many values


def maps_of(parts: Flattened) -> Maps:
    """Turns what a user says is flattened into maps."""
    maps: list[tuple[int, int, int]] = []
    start = 0
    for shape in parts:
        if len(shape) > 1:
            maps.append((start, shape[0], math.prod(shape[1:])))
        start += math.prod(shape)
    return tuple(maps)


def size_of(parts: Flattened) -> int:
    """Returns how many values there are in what a user says is flattened."""
    return sum(map(math.prod, parts))


class Flow:
    """The layers of a model in their order, with what each reads and gives.

    Attributes:
      layers: The torch layers that have a partner, in the order of the state dict.
      sizes: Layer -> how many values `flatten` and `unflatten` speak of; a norm has the first.
      channels: Convolution -> the channels that it reads and gives.
    """

    def __init__(self, torch: Iterable[Layer], partners: Partners, answers: Answers) -> None:
        self.layers = [layer for layer in torch if layer in partners]
        self.sizes: dict[Layer, dict[str, int]] = {}
        self.channels: dict[Layer, tuple[int, int]] = {}
        self._places = {layer: place for place, layer in enumerate(self.layers)}
        for layer in self.layers:
            form = answers.get(layer, USUAL).form
            self.sizes[layer] = {}
            for link in links_of(layer, partners[layer]):
                if link.views:
                    self._note(layer, link.view(form))

    def _note(self, layer: Layer, view: View) -> None:
        """Notes what the rows and columns of one tensor are."""
        sizes = self.sizes[layer]
        sizes.setdefault(view.row_maps, math.prod(view.split[: view.row_axes]))
        sizes.setdefault(view.column_maps, math.prod(view.split[view.row_axes :]))
        if view.kind == "conv.weight":
            self.channels[layer] = (view.split[1], view.split[0])
        elif view.kind == "conv_transpose.weight":
            self.channels[layer] = (view.split[0], view.split[1])

    def movable(self, option: str) -> list[tuple[list[Layer], int]]:
        """Lists the layers whose inputs or outputs may be a map, with the number of these.

        Those that differ in the numbers of their names only are together.
        """
        alike: dict[Any, list[Layer]] = {}
        for layer in self.layers:
            values = self.sizes[layer].get(option)
            if values:
                key = (layer.words, layer.sort, values)
                alike.setdefault(key, []).append(layer)
        return [(layers, key[-1]) for key, layers in alike.items()]

    def is_table(self, layer: Layer) -> bool:
        """Tells whether a layer is a table of rows."""
        return layer.sort == "weight" and self.sizes[layer].keys() == {"", "unflatten"}

    def proposal(self, option: str, layer: Layer) -> Flattened | None:
        """Proposes the map that a layer may read or give; None if it can be none.

        It may be of any number of channels that a convolution gives, if it is read, or reads, if it
        is given. A model without convolutions may have pictures at its ends.
        """
        values = self.sizes[layer][option]
        place = self._places[layer]
        neighbour = self.neighbour(layer, 1)
        before = [conv for conv in self.channels if self._places[conv] <= place]
        behind = [conv for conv in self.channels if self._places[conv] > place]
        convs = behind
        if option == "flatten":
            convs = before[::-1] + behind
        elif neighbour and self.sizes[neighbour].get("flatten") == values:
            return None
        counts: list[int] = []
        for conv in convs:
            reads, gives = self.channels[conv]
            # A convolution of each channel by itself reads one, and has as many as it gives.
            count = gives if option == "flatten" or reads == 1 else reads
            if 1 < count <= values // 2 and values % count == 0:
                return (_shape(count, values, len(conv.shape("weight")) - 2),)
            counts.append(count)
        if option == "unflatten" and (self.channels or neighbour):
            return None
        beside = [0]  # numbers of values that may stand behind a picture: rows of a table
        is_read = False
        for other in self.layers:
            sizes = self.sizes[other]
            if self._places[other] < place and sizes.get("unflatten") == values:
                return None  # an earlier layer gives as many
            is_read |= sizes.get("flatten") == values
            if option == "flatten" and self.is_table(other):
                beside.append(sizes["unflatten"])
        side = _LEAST_SIDE if is_read else _LARGE_SIDE
        for rest, count in itertools.product(beside, counts or [_COLOURS]):
            picture = _shape(count, values - rest, 2)
            if len(picture) == 3 and picture[1] >= side:
                return (picture, (rest,)) if rest else (picture,)
        return None

    def neighbour(self, layer: Layer, step: int) -> Layer | None:
        """Finds the nearest layer that is not a vector, before one (-1) or behind it (1)."""
        place = self._places[layer] + step
        while 0 <= place < len(self.layers):
            if not self.layers[place].is_vector:
                return self.layers[place]
            place += step
        return None

    def with_norms(self, answers: Mapping[Layer, Answer]) -> Answers:
        """Adds the norms that follow a map: one directly before what reads it, or behind its giver.

        Args:
          answers: What is known; a norm that is among them stays as it is.
        """
        following = dict(answers)
        for layer in self.layers:
            if not layer.is_vector or layer in answers:
                continue
            for option, step in (("unflatten", -1), ("flatten", 1)):
                other = self.neighbour(layer, step)
                if other is None or other not in answers:
                    continue
                has_map = answers[other].flatten or answers[other].unflatten
                if has_map and self.sizes[other].get(option) == self.sizes[layer]["flatten"]:
                    following[layer] = Answer(flatten=getattr(answers[other], option))
        return following


class Reading(NamedTuple):
    """One way to read two models.

    Attributes:
      partners: Torch layer -> Flax layer, in the order of the state dict.
      answers: What else is assumed of a torch layer; nothing of those that are not in it.
    """

    partners: Partners
    answers: Answers

    def pairs(self) -> list[Pair]:
        """Makes the pairs of all layers; norms follow the maps of their neighbours."""
        following = Flow(self.partners, self.partners, self.answers).with_norms(self.answers)
        pairs: list[Pair] = []
        for layer, target in self.partners.items():
            pairs += build(layer, target, following.get(layer, USUAL)).pairs
        return pairs

    def key(self) -> Any:
        """Returns what is equal for equal readings."""
        return frozenset(self.partners.items()), frozenset(self.answers.items())


def _shape(channels: int, values: int, space: int) -> tuple[int, ...]:
    """Returns channels and places, these as a square if they can be one; () if there is no map."""
    places, rest = divmod(values, channels)
    if rest or places < 1:
        return ()
    side = round(places ** (1 / space))
    if side**space == places:
        return (channels, *(side,) * space)
    return (channels, places)
