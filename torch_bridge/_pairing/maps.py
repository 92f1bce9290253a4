"""Flattened maps: which layers may read or give one, in torch's order or in Flax's.

torch flattens (C, H, W) and Flax (H, W, C), and no shape shows it. H and W stay as they are to each
other, so that of a map only its channels and its places matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch_bridge._pairing.kinds import CONV, IN_OUT, LINEAR, Answer, kind_of, usual_form
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.match import Partners
from torch_bridge._pairing.pairs import Maps

# What is flattened, as users say it: shapes (C, H, W), and numbers of values that are no map.
Flattened: TypeAlias = tuple[tuple[int, ...], ...]
_COLOURS = 3
_LARGE_PICTURE = 3 * 8 * 8
_LEAST_SIDE = 4  # of a picture that a matrix without convolutions reads


class Sizes(NamedTuple):
    """What a layer reads and gives, in values, or in channels of a convolution; 0 if unknown."""

    reads: int
    gives: int
    space: int = 0  # axes of space, of a convolution


def sizes_of(layer: Layer, target: Layer, answer: Answer) -> Sizes:
    """Finds what a layer reads and gives, in the form in which its weight is stored."""
    if layer.is_vector:
        values = max(math.prod(shape) for _, shape in layer.parts.values())
        return Sizes(values, values)
    if layer.sort == "recurrent":
        inputs = layer.shape("weight_ih") or (0,)
        hidden = layer.shape("weight_hh") or (0,)
        return Sizes(inputs[-1], hidden[-1])
    if layer.sort == "attention":
        outputs = layer.shape("out_proj.weight") or (0,)
        return Sizes(0, outputs[0])
    weight = layer.shape("weight")
    kind = kind_of(layer, target)
    if kind not in (LINEAR, CONV):
        return Sizes(0, weight[-1] if weight else 0)
    gives, reads = weight[:2]
    if (answer.form or usual_form(layer, target)) == IN_OUT:
        gives, reads = reads, gives
    if layer.share:
        gives //= layer.share[1]
    space = len(weight) - 2 if kind is CONV else 0
    return Sizes(reads, gives, space)


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
    return sum(math.prod(shape) for shape in parts)


def shape_of_map(channels: int, values: int, space: int = 2) -> tuple[int, ...]:
    """Returns channels and places, these as a square if they can be one."""
    places = values // channels
    side = round(places ** (1 / space))
    if side**space == places:
        return (channels, *(side,) * space)
    return (channels, places)


class Flow:
    """The layers of a model in their order, with what each reads and gives.

    Attributes:
      layers: The torch layers that have a partner, in the order of the state dict.
      sizes: What each reads and gives.
    """

    def __init__(
        self, torch: Iterable[Layer], partners: Partners, answers: Mapping[Layer, Answer]
    ) -> None:
        self.layers = [layer for layer in torch if layer in partners]
        self.sizes: dict[Layer, Sizes] = {}
        for layer in self.layers:
            answer = answers.get(layer, Answer())
            self.sizes[layer] = sizes_of(layer, partners[layer], answer)
        self.convs = [layer for layer in self.layers if self.sizes[layer].space]

    def readers(self) -> list[Layer]:
        """Lists the layers that may read a flattened map."""
        layers: list[Layer] = []
        for layer in self.layers:
            sizes = self.sizes[layer]
            if sizes.reads and not sizes.space and not layer.is_vector:
                layers.append(layer)
        return layers

    def givers(self) -> list[Layer]:
        """Lists the layers whose outputs may become a map: matrices and tables of rows."""
        layers: list[Layer] = []
        for layer in self.layers:
            if layer.sort == "weight" and self.sizes[layer].gives and not self.sizes[layer].space:
                layers.append(layer)
        return layers

    def map_before(self, layer: Layer) -> tuple[Any, str] | None:
        """Proposes the map that a layer may read, with the reason; None if it can read none.

        With convolutions it may read several values for each channel that one of them gives.
        Without, it may read a picture, unless an earlier layer gives as many values.
        """
        reads = self.sizes[layer].reads
        place = self.layers.index(layer)
        nearest = self.layers[place::-1] + self.layers[place:]
        for conv in nearest:
            sizes = self.sizes[conv]
            if sizes.space and 1 < sizes.gives <= reads // 2 and reads % sizes.gives == 0:
                shape = shape_of_map(sizes.gives, reads, sizes.space)
                return shape, f"reads {reads} values, and {conv.name} gives {sizes.gives} channels"
        channels = [self.sizes[conv].gives for conv in self.convs] or [_COLOURS]
        earlier = [self.sizes[other].gives for other in self.layers[:place]]
        for beside in (0, *self.tables):
            for count in channels:
                if _is_square_map(reads - beside, count) and reads not in earlier:
                    parts: Any = shape_of_map(count, reads - beside)
                    if beside:
                        parts = (parts, beside)
                    return parts, f"reads {reads} values, among which a picture may be"
        return None

    def is_table(self, layer: Layer) -> bool:
        """Tells whether a layer is a table of rows."""
        return layer.sort == "weight" and not self.sizes[layer].reads

    @property
    def tables(self) -> list[int]:
        """The widths of the tables of rows, whose values may stand beside a map."""
        widths: list[int] = []
        for layer in self.layers:
            if self.is_table(layer):
                widths.append(self.sizes[layer].gives)
        return list(dict.fromkeys(widths))

    def map_behind(self, layer: Layer) -> tuple[tuple[int, ...], str] | None:
        """Proposes the map that the outputs of a layer may become; None if they can be none.

        A convolution reads one channel for several of them, and no matrix behind it reads all.
        """
        gives = self.sizes[layer].gives
        place = self.layers.index(layer)
        later = [other for other in self.layers[place + 1 :] if not other.is_vector]
        if later and self.sizes[later[0]].reads == gives:
            return None
        for conv in later:
            sizes = self.sizes[conv]
            # A convolution of each channel by itself reads one, and has as many as it gives.
            channels = sizes.gives if sizes.reads == 1 else sizes.reads
            if sizes.space and 1 < channels <= gives // 2 and gives % channels == 0:
                shape = shape_of_map(channels, gives, sizes.space)
                fact = f"gives {gives} values before {conv.name}, which reads {channels} channels"
                return shape, fact
        is_picture = not self.convs and not later and _is_square_map(gives, _COLOURS)
        is_read = any(self.sizes[other].reads == gives for other in self.layers)
        if is_picture and (is_read or gives >= _LARGE_PICTURE):
            fact = f"gives {gives} values, which may be the colours of a picture"
            return shape_of_map(_COLOURS, gives), fact
        return None

    def with_norms(self, answers: Mapping[Layer, Answer]) -> dict[Layer, Answer]:
        """Adds the norms that follow a map: one directly before what reads it, or behind its giver.

        Args:
          answers: What is known; a norm that is among them stays as it is.
        """
        following = dict(answers)
        with_maps = [answer for answer in answers.values() if answer.flatten or answer.unflatten]
        for layer in self.layers:
            if not with_maps or not layer.is_vector or layer in answers:
                continue
            values = self.sizes[layer].gives
            for other in self.before(layer):
                maps = answers.get(other, Answer()).unflatten
                if maps and self.sizes[other].gives == values:
                    following[layer] = Answer(flatten=maps)
            for other in self.behind(layer):
                maps = answers.get(other, Answer()).flatten
                if maps and self.sizes[other].reads == values:
                    following[layer] = Answer(flatten=maps)
        return following

    def before(self, layer: Layer) -> list[Layer]:
        """Finds the nearest layer before one that is not a vector, if there is one."""
        place = self.layers.index(layer)
        return [other for other in self.layers[:place] if not other.is_vector][-1:]

    def behind(self, layer: Layer) -> list[Layer]:
        """Finds the nearest layer behind one that is not a vector, if there is one."""
        place = self.layers.index(layer)
        return [other for other in self.layers[place:] if not other.is_vector][:1]


def candidate_maps(values: int, channels: Sequence[int], others: Sequence[int] = ()) -> list[Maps]:
    """Lists the maps that some values may be, the likeliest first.

    Args:
      values: How many there are.
      channels: Numbers of channels to try, the likeliest first.
      others: Numbers of values that may stand beside a map, before or behind it.
    """
    found: list[Maps] = []
    for count in channels:
        if count > 1 and values % count == 0 and values // count > 1:
            found.append(((0, count, values // count),))
    for beside in others:
        rest = values - beside
        for count in channels:
            if rest > 0 and count > 1 and rest % count == 0 and rest // count > 1:
                found.append(((0, count, rest // count),))
                found.append(((beside, count, rest // count),))
    return list(dict.fromkeys(found))


def _is_square_map(values: int, channels: int) -> bool:
    """Tells whether values can be a square map or picture of so many channels."""
    side = math.isqrt(max(values, 0) // channels)
    return values == channels * side * side and side >= _LEAST_SIDE
