"""A reading of two models, and the layers in it that may read or output a flattened feature map.

torch flattens a feature map (in all files here: a map) as (C, H, W) and Flax as (H, W, C), and no
shape shows the difference. H and W keep their order, so only the number of channels and the number
of places (H * W) matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from torch_bridge._pairing.kinds import USUAL, Answer, Form, join
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.match import Partners
from torch_bridge._pairing.options import Flattened
from torch_bridge._pairing.pairs import Pair, Shape

Answers: TypeAlias = dict[Layer, Answer]
VERBS = {"flatten": "reads", "unflatten": "gives"}
_COLOURS = 3
_LEAST_SIDE = 4  # the least height of a picture in a model without convolutions
_LARGE_SIDE = 8  # the same if no layer reads as many values


class Reading(NamedTuple):
    """A hypothesis about two models: pairs of layers, and answers to the questions about them.

    Attributes:
      partners: Torch layer -> Flax layer, in the order of the state dict.
      answers: Torch layer -> answer; other layers have the usual answer.
    """

    partners: Partners
    answers: Answers

    def pairs(self) -> list[Pair]:
        """Makes the pairs of all layers; norms get the maps of their neighbours."""
        following = Flow(self).with_norms()
        pairs = []
        for layer, target in self.partners.items():
            pairs += join(layer, target).pairs(following.get(layer, USUAL))
        return pairs

    def answer(self, layer: Layer) -> Answer:
        """Returns the answer for a layer."""
        return self.answers.get(layer, USUAL)

    def forms(self) -> dict[Layer, list[Form]]:
        """Returns the possible forms of every weight that has more than one."""
        forms = {}
        for layer, target in self.partners.items():
            several = join(layer, target).forms
            if len(several) > 1:
                forms[layer] = several
        return forms

    def with_answers(self, layers: Iterable[Layer], field: str, value: Any) -> Reading:
        """Returns the reading with one field of the answers of some layers replaced."""
        answers = dict(self.answers)
        for layer in layers:
            answers[layer] = self.answer(layer)._replace(**{field: value})
        return Reading(self.partners, answers)

    def key(self) -> Any:
        """Returns a hashable key, equal for equal readings."""
        return frozenset(self.partners.items()), frozenset(self.answers.items())


class Flow:
    """The layers of a reading in their order, with the widths of their inputs and outputs.

    Attributes:
      layers: The torch layers that have a partner, in the order of the state dict.
      sizes: Layer -> ``flatten``: the number of input values; ``unflatten``: the number of output
        values. A norm has its width as ``flatten``. A convolution has neither.
      convs: Convolution -> number of spatial axes, in the same order.
      channels: ``flatten`` -> layer -> the number of its outputs, which are the channels of a map
        that it makes and a later layer reads; ``unflatten`` -> layer -> the number of its inputs,
        which are the channels of a map that an earlier layer makes. Vectors have none.
    """

    def __init__(self, reading: Reading) -> None:
        self.layers = list(reading.partners)
        self.sizes = {}
        self.convs = {}
        self.channels = {"flatten": {}, "unflatten": {}}
        self._answers = reading.answers
        for layer, target in reading.partners.items():
            sizes = {}
            self.sizes[layer] = sizes
            views = join(layer, target).views(reading.answer(layer).form)
            for pair, row_field, column_field in views:
                sizes.setdefault(row_field, math.prod(pair.split[: pair.row_axes]))
                sizes.setdefault(column_field, math.prod(pair.split[pair.row_axes :]))
            reads = sizes.get("flatten")
            gives = sizes.get("unflatten")
            shape = layer.shape("weight")
            if views and target.kind == "kernel" and len(shape) > 2 and "flatten" not in sizes:
                gives, reads, *space = shape
                if views[0].pair.flip:
                    gives, reads = reads, gives
                if reads == 1:  # a depthwise convolution
                    reads = gives
                self.convs[layer] = len(space)
            if not layer.is_vector:
                self.channels["flatten"][layer] = gives
                self.channels["unflatten"][layer] = reads

    def movable(self, option: str) -> list[tuple[list[Layer], int]]:
        """Lists the layers whose inputs (or outputs) may be a map, and the number of values.

        Layers of one kind and width whose names differ only in numbers are one entry.
        """
        alike = {}
        for layer in self.layers:
            values = self.sizes[layer].get(option)
            if values:
                layers, _ = alike.setdefault((layer.words, layer.kind, values), ([], values))
                layers.append(layer)
        return list(alike.values())

    def is_table(self, layer: Layer) -> bool:
        """Returns True for a table of rows, such as an embedding."""
        return self.sizes[layer].keys() == {"", "unflatten"}

    def proposal(self, option: str, layer: Layer) -> Flattened | None:
        """Proposes the shape of the map that a layer may read (or output); None if it has no map.

        A layer reads a map with the output channels of a convolution, and outputs a map with the
        input channels of a convolution. A model without convolutions may read or output pictures.
        A convolution over patches, which is a Dense in Flax, reads (or outputs) its own patches.
        """
        values = self.sizes[layer][option]
        if self._has_patches(option, layer):
            return (layer.shape("weight")[1:],)
        before, after = self._beside(layer)
        following = self.following(layer)
        least = _LEAST_SIDE
        rests = [0]  # numbers of values that may follow a picture, such as a table's rows
        nearest = [*before, *after]
        if option == "unflatten":
            if following and self.sizes[following].get("flatten") == values:
                return None
            if values not in self.channels[option].values():
                least = _LARGE_SIDE
            nearest = after
        else:
            for table in filter(self.is_table, self.layers):
                rests.append(self.sizes[table]["unflatten"])
        channels = []
        for conv in filter(self.convs.__contains__, nearest):
            channels.append(self.channels[option][conv])
            shape = _shape(channels[-1], values, self.convs[conv])
            if shape:
                return (shape,)
        if option == "unflatten" and (self.convs or following):
            return None
        if values in map(self.channels["flatten"].get, before):
            return None  # the values come from an earlier layer
        for rest, count in itertools.product(rests, channels or [_COLOURS]):
            picture = _shape(count, values - rest, 2)
            if len(picture) == 3 and picture[1] >= least:
                return tuple(filter(any, (picture, (rest,))))
        conv = next(itertools.filterfalse(lambda other: other.is_vector, before), None)
        is_joined = any(self._is_joined(other, values) for other in self.layers)
        if conv in self.convs and channels[0] > 1 and not is_joined:
            space = self.convs[conv]
            side = int((values / channels[0]) ** (1 / space) + 1e-9)  # 64 has the cube root 4
            if side > 1:  # a map of this side, and other values beside it
                shape = (channels[0], *(side,) * space)
                return (shape, (values - math.prod(shape),))
        return None

    def has_other_source(self, option: str, layer: Layer) -> bool:
        """Returns whether a layer's values are probably those of another layer, and not a map.

        Then a layer that gives (or reads) as many values stands nearer than any convolution.
        """
        before, after = self._beside(layer)
        values = self.sizes[layer][option]
        for other in before if option == "flatten" else after:
            channels = self.channels[option].get(other)
            if channels == values or self._is_joined(other, values):
                return True
            if other in self.convs and channels != 1:
                return False
        return False

    def _has_patches(self, option: str, layer: Layer) -> bool:
        """Returns True for a convolution over patches that is a Dense in Flax."""
        patch = layer.shape("weight")[1:]
        return len(patch) > 1 and math.prod(patch) == self.sizes[layer][option] > patch[0]

    def _is_joined(self, layer: Layer, values: int) -> bool:
        """Returns True for the norm of several joined maps, whose values are a channel each.

        The convolutions before it have at least as many output channels in all.
        """
        if not layer.is_vector or self.sizes[layer].get("flatten") != values:
            return False
        before, _ = self._beside(layer)
        convs = filter(self.convs.__contains__, before)
        return sum(map(self.channels["flatten"].__getitem__, convs)) >= values

    def _beside(self, layer: Layer) -> tuple[list[Layer], list[Layer]]:
        """Returns the layers before a layer and those after it, the nearest first."""
        place = self.layers.index(layer)
        return self.layers[:place][::-1], self.layers[place + 1 :]

    def following(self, layer: Layer) -> Layer | None:
        """Returns the next layer that is not a vector, or None."""
        _, after = self._beside(layer)
        return next(itertools.filterfalse(lambda other: other.is_vector, after), None)

    def with_norms(self) -> Answers:
        """Returns the answers, with those of norms beside a map added.

        A norm is reordered like the map if it stands directly before the layer that reads the map,
        or directly after the layer that outputs it. A norm that has an answer keeps it.
        """
        following = dict(self._answers)
        for layer, answer in self._answers.items():
            if layer not in self.sizes or layer.is_vector:
                continue
            sides = zip(("flatten", "unflatten"), self._beside(layer), strict=True)
            for option, beside in sides:
                maps = getattr(answer, option)
                values = self.sizes[layer].get(option)
                for norm in itertools.takewhile(lambda other: other.is_vector, beside):
                    if maps and self.sizes[norm].get("flatten") == values:
                        following.setdefault(norm, Answer(flatten=maps))
        return following


def _shape(channels: int, values: int, space: int) -> Shape:
    """Returns the shape of a map, square in space if possible; () if it cannot be a map."""
    places, rest = divmod(values, channels)
    if channels < 2 or rest or places < 2:
        return ()
    side = round(places ** (1 / space))
    if side**space == places:
        return (channels, *(side,) * space)
    return (channels, places)
