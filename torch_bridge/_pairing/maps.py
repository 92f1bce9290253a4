"""A reading of two models, and the layers in it that may read or output a flattened map.

torch flattens a map as (C, H, W) and Flax as (H, W, C), and no shape shows the difference. H and W
keep their order, so only the number of channels and the number of places (H * W) matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
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

    def with_change(self, before: Reading, after: Reading) -> Reading | None:
        """Applies the change from the reading `before` to the reading `after` to this reading.

        Returns None if this reading differs from `before` in the values to change.
        """
        partners = dict(self.partners)
        answers = dict(self.answers)
        for layer, target in after.partners.items():
            if target is not before.partners[layer]:
                if partners[layer] is not before.partners[layer]:
                    return None
                partners[layer] = target
            if after.answer(layer) != before.answer(layer):
                if self.answer(layer) != before.answer(layer):
                    return None
                answers[layer] = after.answer(layer)
        return Reading(partners, answers)

    def key(self) -> Any:
        """Returns a hashable key, equal for equal readings."""
        return frozenset(self.partners.items()), frozenset(self.answers.items())


class Conv(NamedTuple):
    """A convolution.

    Attributes:
      place: The convolution's position among the layers.
      channels: ``flatten`` -> the number of output channels, which a flattened map behind the
        convolution has; ``unflatten`` -> the number of input channels, which a map before it has.
      space: The number of spatial axes.
    """

    place: int
    channels: Mapping[str, int]
    space: int


class Flow:
    """The layers of a reading in their order, with the widths of their inputs and outputs.

    Attributes:
      layers: The torch layers that have a partner, in the order of the state dict.
      sizes: Layer -> ``flatten``: the number of input values; ``unflatten``: the number of output
        values. A norm has its width as ``flatten``.
      convs: The convolutions, in the same order.
    """

    def __init__(self, reading: Reading) -> None:
        self.layers = list(reading.partners)
        self.sizes = {}
        self.convs = []
        self._answers = reading.answers
        for place, (layer, target) in enumerate(reading.partners.items()):
            sizes = {}
            self.sizes[layer] = sizes
            form = reading.answer(layer).form
            views = [link.view(form) for link in join(layer, target).links]
            for view in views:
                sizes.setdefault(view.row_maps, math.prod(view.split[: view.row_axes]))
                sizes.setdefault(view.column_maps, math.prod(view.split[view.row_axes :]))
            shape = layer.shape("weight")
            if not views or target.sort != "kernel":
                continue
            if len(shape) > 2 and "flatten" not in sizes:
                gives, reads, *space = shape
                if views[0].flip:
                    gives, reads = reads, gives
                if reads == 1:  # a depthwise convolution
                    reads = gives
                channels = {"flatten": gives, "unflatten": reads}
                self.convs.append(Conv(place, channels, len(space)))

    def movable(self, option: str) -> list[tuple[list[Layer], int]]:
        """Lists the layers whose inputs (or outputs) may be a map, and the number of values.

        Layers of one sort and width whose names differ only in numbers are one entry.
        """
        alike = {}
        for layer in self.layers:
            values = self.sizes[layer].get(option)
            if values:
                alike.setdefault((layer.words, layer.sort, values), []).append(layer)
        movable = []
        for (_, _, values), layers in alike.items():
            movable.append((layers, values))
        return movable

    def is_table(self, layer: Layer) -> bool:
        """Returns True for a table of rows, such as an embedding."""
        return self.sizes[layer].keys() == {"", "unflatten"}

    def proposal(self, option: str, layer: Layer) -> Flattened | None:
        """Proposes the shape of the map that a layer may read (or output); None if it has no map.

        A layer reads a map with the output channels of a convolution, and outputs a map with the
        input channels of a convolution. A model without convolutions may read or output pictures.
        """
        values = self.sizes[layer][option]
        place = self.layers.index(layer)
        behind = self.following(layer)
        convs = sorted(self.convs, key=lambda one: (one.place > place, abs(one.place - place)))
        if option == "unflatten":
            if behind and self.sizes[behind].get("flatten") == values:
                return None
            convs = list(filter(lambda conv: conv.place > place, convs))
        counts = []
        for conv in convs:
            count = conv.channels[option]
            counts.append(count)
            shape = _shape(count, values, conv.space)
            if shape:
                return (shape,)
        if option == "unflatten" and (self.convs or behind):
            return None
        for other in self.layers[:place]:
            if self.sizes[other].get("unflatten") == values:
                return None  # the values come from an earlier layer
        beside = [0]  # numbers of values that may stand behind a picture, such as a table's rows
        least = _LARGE_SIDE
        for other, sizes in self.sizes.items():
            if sizes.get("flatten") == values:
                least = _LEAST_SIDE
            if option == "flatten" and self.is_table(other):
                beside.append(sizes["unflatten"])
        for rest, count in itertools.product(beside, counts or [_COLOURS]):
            picture = _shape(count, values - rest, 2)
            if len(picture) < 3 or picture[1] < least:
                continue
            if rest:
                return (picture, (rest,))
            return (picture,)
        return None

    def is_beside_convolution(self, option: str, layer: Layer) -> bool:
        """Returns True if a layer has several values for each channel of the convolution beside it.

        Then no pooling to one value a channel stands between them, and the values are probably a
        flattened map. Norms, bare parameters, layers with as many inputs (or outputs), and
        convolutions of one channel may stand between the two.
        """
        values = self.sizes[layer][option]
        place = self.layers.index(layer)
        beside = self.layers[place + 1 :]
        if option == "flatten":
            beside = self.layers[:place][::-1]
        convs = {self.layers[conv.place]: conv for conv in self.convs}
        for other in beside:
            width = self.sizes[other].get("flatten")
            if other in convs:
                channels = convs[other].channels[option]
                if channels > 1:
                    return values > channels and values % channels == 0
            elif other.is_vector:
                if option == "flatten" and width == values and self._can_be_joined(values, place):
                    return False  # the norm of several joined maps, each value a channel
            elif other.sort == "attention" or self.sizes[other].get(option, values) != values:
                return False
        return False

    def _can_be_joined(self, channels: int, place: int) -> bool:
        """Returns True if the convolutions before a place have so many output channels in all."""
        total = 0
        for conv in self.convs:
            if conv.place < place:
                total += conv.channels["flatten"]
        return total >= channels

    def has_other_end(self, option: str, values: int) -> bool:
        """Returns True if a layer gives (or reads) as many values as another one reads (or gives).

        Then these are probably the same values, and not a flattened map. A norm of joined maps
        gives its width, too.
        """
        side = {"flatten": "unflatten", "unflatten": "flatten"}[option]
        for conv in self.convs:
            if conv.channels[option] == values:
                return True
        for place, layer in enumerate(self.layers):
            sizes = self.sizes[layer]
            if not layer.is_vector:
                if sizes.get(side) == values:
                    return True
            elif sizes.get("flatten") == values and self._can_be_joined(values, place):
                return True
        return False

    def following(self, layer: Layer) -> Layer | None:
        """Returns the next layer that is not a vector, or None."""
        place = self.layers.index(layer)
        others = itertools.filterfalse(lambda other: other.is_vector, self.layers[place + 1 :])
        return next(others, None)

    def with_norms(self) -> Answers:
        """Returns the answers, with those of norms beside a map added.

        A norm is reordered like the map if it stands directly before the layer that reads the map,
        or directly behind the layer that outputs it. A norm that has an answer keeps it.
        """
        following = dict(self._answers)
        for layer, answer in self._answers.items():
            if layer not in self.sizes or layer.is_vector:
                continue
            place = self.layers.index(layer)
            sides = {"flatten": self.layers[:place][::-1], "unflatten": self.layers[place + 1 :]}
            for option, beside in sides.items():
                maps = getattr(answer, option)
                if not maps:
                    continue
                values = self.sizes[layer].get(option)
                for norm in itertools.takewhile(lambda other: other.is_vector, beside):
                    if norm not in self._answers and self.sizes[norm].get("flatten") == values:
                        following[norm] = Answer(flatten=maps)
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
