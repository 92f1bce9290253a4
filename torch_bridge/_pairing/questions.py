"""What neither names nor shapes of two models tell: it is answered by the user, or asked about.

torch flattens (C, H, W) and Flax (H, W, C), so that the inputs of a Linear behind a flatten have to
move, and no shape shows it: channels times a square may be the pooled features of several layers,
too. A square matrix does not show whether it is stored (out, in) or (in, out), and a kernel of as
many inputs as outputs not whether it is that of a ConvTranspose.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch_bridge._pairing.build import Hints, orders
from torch_bridge._pairing.layers import Layer, Shape
from torch_bridge._pairing.options import Options

TRANSPOSED_WORDS = frozenset({"convtranspose", "transpose", "transposed", "deconv", "tconv"})
_UPWARD_WORDS = frozenset(
    {"up", "ups", "upconv", "upsample", "upsampling", "dec", "decoder", "gen", "generator"}
)
_OF_TORCH = re.compile(r"(.*\bin_proj_weight|.*\bweight_[ih]h(_l\d+)?(_reverse)?)$")
_IMAGE = 4  # channels, at most
# The shape to propose, if there is one, and what is known of the layer.
_Question: TypeAlias = tuple[Shape | None, str]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Values that a layer reads as a vector, and values or channels that it gives; 0 for none."""

    reads: int = 0
    gives: int = 0
    channels: int = 0  # that a convolution reads
    axes: int = 0  # of space, of a convolution
    matrix: bool = False


class Questions:
    """The answers to what two models do not tell, and the questions that have none.

    Attributes:
      hints: What each layer was answered, or shows.
      asked: The questions, each a line with its answers.
    """

    def __init__(
        self, layers: Sequence[Layer], partners: Mapping[Layer, Layer], options: Options
    ) -> None:
        self.layers, self.partners, self.options = layers, partners, options
        self._sizes = {a: _sizes(a, partners[a]) if a in partners else _Sizes() for a in layers}
        self._before, self._after = _neighbours(layers), _neighbours(layers[::-1])
        names = [name for layer in layers for name, _ in layer.parts.values()]
        packed = [n.removesuffix("in_proj_weight") for n in names if n.endswith("in_proj_weight")]
        self._of_torch = {name for name in names if _OF_TORCH.match(name)}
        self._of_torch |= {f"{module}out_proj.weight" for module in packed}
        self._either = [layer for layer in partners if self._fits_both(layer)]
        self.hints = {
            layer: Hints(
                flatten=self._answer("flatten", layer),
                unflatten=self._answer("unflatten", layer),
                swapped=self._is_swapped(layer),
            )
            for layer in partners
        }
        square = [layer for layer in self._either if len(layer.shape("weight")) == 2]
        either = [] if options.conv_transpose is not None else self._may_be_transposed()
        self.asked: list[str] = []
        if square and options.conv1d is None:
            self.asked.append(
                f"{_listed(square)}: square, which does not show whether it is stored (out, in) "
                "or, as by transformers' Conv1D, (in, out). Say conv1d='' if none of these is a "
                "Conv1D, else conv1d=<regular expression of those that are>"
            )
        if either:
            self.asked.append(
                f"{_listed(either)}: as many inputs as outputs, which does not show a Conv from a "
                "ConvTranspose. Say conv_transpose='' if none of these is a ConvTranspose, else "
                "conv_transpose=<regular expression of those that are>"
            )
        self.asked += self._lines("flatten", self._flattened())
        self.asked += self._lines("unflatten", self._unflattened())

    def _lines(self, option: str, questions: Mapping[Layer, _Question]) -> list[str]:
        """One line for layers that differ in their numbers only."""
        alike: dict[tuple[tuple[str, ...], _Question], list[Layer]] = {}
        for layer, question in questions.items():
            if self._said(option, layer) is None:
                alike.setdefault((layer.words, question), []).append(layer)
        lines = []
        for (_, (shape, fact)), layers in alike.items():
            names = _listed(layers)
            none = f"{option}={{{names!r}: None}}"
            lines.append(
                f"{names} {fact}: say {option}={{{names!r}: {shape}}} if they are a flattened map, "
                f"{none} if they are not"
                if shape
                else f"{names} {fact}: say {none} if no flattened map is among them; if one is, "
                "have Flax flatten it in torch's order (C, H, W), and say the same"
            )
        return lines

    def idle(self, tensors: Collection[str]) -> Iterator[str]:
        """Patterns that match nothing, or with a shape no layer in which anything moves.

        What is misspelled would be ignored without a word.
        """
        modules = {name.rpartition(".")[0] for name in tensors} | {a.name for a in self.layers}
        movable = {a.name for a, size in self._sizes.items() if a.is_vector or size.matrix}
        readers = movable | {a.name for a, size in self._sizes.items() if size.reads}
        for option, pattern in self.options.patterns():
            names = {"rules": modules.union(tensors), "conv1d": modules}.get(option)
            if option in ("flatten", "unflatten"):
                moving = readers if option == "flatten" else movable
                names = moving if getattr(self.options, option)[pattern] else modules
            if names is not None and pattern and not any(re.fullmatch(pattern, n) for n in names):
                yield f"{option}: {pattern}"

    # --- a flatten ------------------------------------------------------------------------------

    def _said(self, option: str, layer: Layer) -> tuple[Shape | None] | None:
        """What the last pattern that names this layer says; None if none does."""
        said = getattr(self.options, option).items()
        found = [(shape,) for pattern, shape in said if re.fullmatch(pattern, layer.name)]
        return found[-1] if found else None

    def _answer(self, option: str, layer: Layer) -> Shape | None:
        """The map that a layer reads (or gives); a norm beside it follows it."""
        if (said := self._said(option, layer)) is not None:
            return said[0]
        beside, of = self._follows(layer)
        return self._answer(option, of) if of and beside == option else None

    def _follows(self, norm: Layer) -> tuple[str, Layer | None]:
        """The layer that gives the values of a norm just before it, or that reads them behind."""
        before, after = self._before.get(norm), self._after.get(norm)
        if norm.is_vector and before and self._sizes[before].gives == _values(norm):
            return "unflatten" if self._sizes[before].matrix else "", before
        if norm.is_vector and after and self._sizes[after].reads == _values(norm):
            return "flatten", after
        return "", None

    def _flattened(self) -> dict[Layer, _Question]:
        """What may read a flattened map.

        A layer behind a convolution is asked about, unless a layer before it gives exactly as many
        values as it reads, and so is one that its own module declares before its convolutions.
        """
        asked: dict[Layer, _Question] = {}
        widths: dict[int, _Question] = {}
        convs: list[Layer] = []
        given: set[int] = set()
        for place, layer in enumerate(self.layers):
            size, before = self._sizes[layer], self._before.get(layer)
            if size.axes:
                convs.append(layer)
                continue
            behind = before is not None and self._sizes[before].axes > 0
            if size.reads and size.reads not in widths and (behind or size.reads not in given):
                later = [] if self._feeds(layer) else self._own_convs(place)
                if found := self._may_read(size.reads, convs) or self._may_read(size.reads, later):
                    widths[size.reads] = found
            if size.reads in widths:
                asked[layer] = widths[size.reads]
            given |= {size.gives, 2 * size.gives if layer.kind == "recurrent" else size.gives}
        for layer in asked:
            if self._said("flatten", layer) == (None,):
                widths.pop(self._sizes[layer].reads, None)  # nothing was flattened
        for size in self._sizes.values():
            widths.pop(size.gives, None)
        for layer in self.layers:  # norms that no layer beside them explains
            after = self._after.get(layer)
            of_channels = after is not None and self._sizes[after].axes > 0
            explained = not layer.is_vector or of_channels or self._follows(layer)[1]
            if not explained and _values(layer) in widths:
                asked[layer] = widths[_values(layer)]
        return asked

    def _own_convs(self, place: int) -> list[Layer]:
        """The convolutions that the module of a layer declares after it."""
        module = self.layers[place].segments[:-1]
        later = self.layers[place + 1 :]
        return [a for a in later if self._sizes[a].axes and a.segments[: len(module)] == module]

    def _may_read(self, width: int, convs: Sequence[Layer]) -> _Question | None:
        """What to ask where a map of a convolution may be among so many values."""
        if not convs or width == self._sizes[convs[-1]].gives:
            return None  # its channels, one value each
        fitting = [c for c in convs if 1 < self._sizes[c].gives <= width // 2]
        whole = [c for c in fitting if width % self._sizes[c].gives == 0]
        beside = [c for c in fitting if c is convs[-1]]  # other values beside a map of the last
        for conv in (whole or beside)[-1:]:
            size = self._sizes[conv]
            shape = _shape_of(size.gives, size.axes, width) if whole else None
            return (
                shape,
                f"reads {width} values behind {conv.name}, which gives {size.gives} channels",
            )
        return None

    def _feeds(self, layer: Layer) -> Layer | None:
        """The convolution behind a matrix that has several outputs for each channel it reads."""
        after = self._after.get(layer)
        if after is None or not self._sizes[layer].matrix:
            return None
        channels, width = self._sizes[after].channels, self._sizes[layer].gives
        return after if width > channels > _IMAGE and width % channels == 0 else None

    def _unflattened(self) -> dict[Layer, _Question]:
        """Matrices whose outputs may become a map: not those that a later layer reads."""
        found: dict[Layer, _Question] = {}
        read: set[int] = set()
        for layer in reversed(self.layers):
            size, conv = self._sizes[layer], self._feeds(layer)
            if conv and size.gives not in read:
                channels, axes = self._sizes[conv].channels, self._sizes[conv].axes
                fact = (
                    f"gives {size.gives} values before {conv.name}, which reads {channels} channels"
                )
                found[layer] = _shape_of(channels, axes, size.gives), fact
            read.add(size.reads)
        return found

    # --- (out, in) or (in, out) -----------------------------------------------------------------

    def _fits_both(self, layer: Layer) -> bool:
        shape, kernel = layer.shape("weight"), self.partners[layer].shape("kernel")
        if layer.share or shape == (1, 1) or not all(orders(shape, kernel)):
            return False
        return layer.parts["weight"][0] not in self._of_torch

    def _is_swapped(self, layer: Layer) -> bool:
        """Whether a kernel that fits both was answered to be (in, out), or has such a name."""
        matrix = len(layer.shape("weight")) == 2
        said = self.options.conv1d if matrix else self.options.conv_transpose
        if layer not in self._either or (matrix and said is None):
            return False
        if said is not None:
            return re.fullmatch(said, layer.name) is not None
        return bool({*layer.words, *self.partners[layer].words} & TRANSPOSED_WORDS)

    def _may_be_transposed(self) -> list[Layer]:
        """Convolutions that a name, or a ConvTranspose beside them, suggests to be one."""
        shapes = [(a, a.shape("weight"), b.shape("kernel")) for a, b in self.partners.items()]
        clear = [a for a, s, kernel in shapes if len(s) > 2 and orders(s, kernel) == (False, True)]
        near = {key for layer in clear for key in (layer.words, layer.segments[:-1])}
        return [
            layer
            for layer in self._either
            if len(layer.shape("weight")) > 2 and not self.hints[layer].swapped
            if {*layer.words, *self.partners[layer].words} & _UPWARD_WORDS
            or near & {layer.words, layer.segments[:-1]}
        ]


def _neighbours(layers: Sequence[Layer]) -> dict[Layer, Layer]:
    """Each layer with the one before it that is no norm."""
    found: dict[Layer, Layer] = {}
    before: Layer | None = None
    for layer in layers:
        if before is not None:
            found[layer] = before
        before = before if layer.is_vector else layer
    return found


def _sizes(layer: Layer, target: Layer) -> _Sizes:
    if layer.kind == "recurrent":
        return _Sizes(layer.shape("weight_ih")[-1], (layer.shape("weight_hh") or (0,))[-1])
    if layer.kind == "attention":
        return _Sizes(gives=(layer.shape("out_proj.weight") or (0,))[0])
    shape, kernel = layer.shape("weight"), target.shape("kernel")
    if layer.kind != "weight" or not kernel:
        return _Sizes(gives=shape[-1] if layer.kind == "weight" and shape else 0)
    if len(shape) > 2:
        gives, reads, *space = shape
        if orders(shape, kernel) == (False, True):
            gives, reads = reads, gives
        return _Sizes(0, gives, reads, len(space))
    order = 1 if orders(shape, kernel) == (False, True) else -1
    n_in, n_out = shape[::order] if len(shape) == 2 else (0, 0)
    return _Sizes(n_in, n_out // layer.share[1] if layer.share else n_out, matrix=True)


def _values(norm: Layer) -> int:
    return max(shape[0] for _, shape in norm.parts.values())


def _shape_of(channels: int, axes: int, values: int) -> Shape:
    """Channels and places, as a square if it can be one."""
    places = values // channels
    side = round(places ** (1 / axes))
    return (channels, *[side] * axes) if side**axes == places else (channels, places)


def _listed(layers: Iterable[Layer]) -> str:
    """The names as one regular expression: those that differ in numbers only are one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        alike.setdefault(layer.exact, []).append(layer.name)
    patterns = [
        names[0] if len(names) == 1 else re.sub(r"\d+", r"\\d+", names[0].replace(".", r"\."))
        for names in alike.values()
    ]
    return "|".join(patterns)
