"""What neither names nor shapes of two models tell: it is answered by the user, or asked about.

torch flattens (C, H, W) and Flax (H, W, C), so that the inputs of a Linear behind a flatten have to
move, and no shape shows it: channels times a square may be the pooled features of several layers,
too. A square matrix does not show whether it is stored (out, in) or (in, out), and a kernel of as
many inputs as outputs not whether it is that of a ConvTranspose.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_bridge._pairing.build import Build, Hints, orientation, storage
from torch_bridge._pairing.layers import Layer, Shape
from torch_bridge._pairing.options import SHAPES, Options

TRANSPOSED_WORDS = frozenset({"convtranspose", "transpose", "transposed", "deconv", "tconv"})
_UPWARD_WORDS = frozenset(
    {"up", "ups", "upconv", "upsample", "upsampling", "dec", "decoder", "gen", "generator"}
)
_OF_TORCH = re.compile(r"(.*\bin_proj_weight|.*\bweight_[ih]h(_l\d+)?(_reverse)?)$")
_IMAGE = 4  # channels, at most


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Values that a layer reads as a vector, and values or channels that it gives; 0 for none."""

    reads: int
    gives: int
    channels: int = 0  # that a convolution reads
    axes: int = 0  # of space, of a convolution
    matrix: bool = False


class Questions:
    """The answers to what two models do not tell, and the questions that have none.

    Attributes:
      asked: The questions, each a line with its answers.
    """

    def __init__(
        self, layers: Sequence[Layer], partners: Mapping[Layer, Layer], options: Options
    ) -> None:
        self.layers, self.partners, self.options = layers, partners, options
        self.asked: list[str] = []
        self._moved: dict[tuple[str, str], bool] = {}  # pattern -> whether it moved anything
        names = [name for layer in layers for name, _ in layer.parts.values()]
        found = [n.removesuffix("in_proj_weight") for n in names if n.endswith("in_proj_weight")]
        self._of_torch = {name for name in names if _OF_TORCH.match(name)}
        self._of_torch |= {f"{module}out_proj.weight" for module in found}
        self._sizes = {layer: self._sizes_of(layer) for layer in layers if layer in partners}
        self._follows = self._norms_beside()
        self._asked_of = {"flatten": self._flattened(), "unflatten": self._unflattened()}
        self._either: list[Layer] = []  # Conv or ConvTranspose
        self._square = {layer: None for layer in partners if self._storage(layer) == "both"}

    @property
    def idle(self) -> list[str]:
        """Patterns of shapes that matched layers and moved nothing in any of them."""
        return [f"{o}: {pattern}" for (o, pattern), moved in self._moved.items() if not moved]

    def build(self) -> list[Build]:
        """The pairs of all layers, with the answers; fills `asked`."""
        built = [self._build(layer, target) for layer, target in self.partners.items()]
        if self.options.conv1d is None and self._square:
            self.asked.append(
                f"{_listed(self._square)}: square, which does not show whether it is stored (out, "
                "in) or, as by transformers' Conv1D, (in, out). Say conv1d='' if none of these is "
                "a Conv1D, else conv1d=<regular expression of those that are>"
            )
        if self._either:
            self.asked.append(
                f"{_listed(self._either)}: as many inputs as outputs, which does not show a Conv "
                "from a ConvTranspose. Say conv_transpose='' if none of these is a ConvTranspose, "
                "else conv_transpose=<regular expression of those that are>"
            )
        for option, found in self._asked_of.items():
            alike: dict[Any, list[Layer]] = {}
            for layer, (shape, text) in found.items():
                if self._said(option, layer) is None:
                    alike.setdefault((layer.words, text, shape), []).append(layer)
            for (_, text, shape), layers in alike.items():
                answers = [f"{option}={{{_listed(layers)!r}: {a}}}" for a in (shape, None) if a]
                answers.append(f"{option}={{{_listed(layers)!r}: None}}")
                for place, answer in enumerate(answers):
                    text = text.replace(f"{{{place}}}", answer)
                self.asked.append(f"{_listed(layers)} {text}")
        return built

    def _build(self, layer: Layer, target: Layer) -> Build:
        hints = Hints(
            flatten=self._answer("flatten", layer),
            unflatten=self._answer("unflatten", layer),
            transposed=self._is_transposed(layer, target),
            straight=re.fullmatch(self.options.conv1d or "", layer.name) is not None
            if layer in self._square
            else self._storage(layer) == "straight",
        )
        built = Build(layer, target, hints)
        for option in SHAPES:
            said = self._said(option, layer)
            if said is None or said[1] is None:
                continue
            without = Build(layer, target, dataclasses.replace(hints, **{option: None}))
            moved = (without.pairs, without.mis_shaped) != (built.pairs, built.mis_shaped)
            self._moved[option, said[0]] = moved or self._moved.get((option, said[0]), False)
            if moved:
                built.mis_shaped = [f"{line}, with {option}={said[1]}" for line in built.mis_shaped]
        return built

    # --- a flatten ------------------------------------------------------------------------------

    def _said(self, option: str, layer: Layer) -> tuple[str, Shape | None] | None:
        """The last pattern of `flatten` or `unflatten` that names this layer, and its shape."""
        said = [item for item in getattr(self.options, option) if re.fullmatch(item[0], layer.name)]
        return said[-1] if said else None

    def _answer(self, option: str, layer: Layer) -> Shape | None:
        said = self._said(option, layer)
        if said is not None:
            return said[1]
        beside, of = self._follows.get(layer, ("", layer))
        return self._answer(option, of) if beside == option else None

    def _sizes_of(self, layer: Layer) -> _Sizes:
        target = self.partners[layer]
        if layer.kind == "recurrent":
            return _Sizes(layer.shape("weight_ih")[-1], (layer.shape("weight_hh") or (0,))[-1])
        if layer.kind == "attention":
            return _Sizes(0, (layer.shape("out_proj.weight") or (0,))[0])
        shape, kernel = layer.shape("weight"), target.shape("kernel")
        if layer.kind != "weight" or not kernel:
            return _Sizes(0, shape[-1] if layer.kind == "weight" and shape else 0)
        if len(shape) > 2:
            gives, reads, *space = shape
            if orientation(shape, kernel) == "transposed":
                gives, reads = reads, gives
            return _Sizes(0, gives, reads, len(space))
        order = 1 if storage(shape, kernel) == "straight" else -1
        n_in, n_out = shape[0::1][::order] if len(shape) == 2 else (0, 0)
        return _Sizes(n_in, n_out // layer.share[1] if layer.share else n_out, matrix=True)

    def _norms_beside(self) -> dict[Layer, tuple[str, Layer]]:
        """Norms of as many values as the layer behind them reads, or the matrix before gives."""
        follows: dict[Layer, tuple[str, Layer]] = {}
        behind: list[Layer] = []  # norms since `before`
        before: Layer | None = None
        for layer in self.layers:
            if _is_vector(layer):
                behind.append(layer)
                continue
            last = self._sizes.get(before) if before is not None else None
            for norm in behind:
                if before is not None and last is not None and _values(norm) == last.gives:
                    if last.matrix:
                        follows[norm] = ("unflatten", before)
                elif layer in self._sizes and _values(norm) == self._sizes[layer].reads:
                    follows[norm] = ("flatten", layer)
            before, behind = layer, []
        return follows

    def _flattened(self) -> dict[Layer, tuple[Shape | None, str]]:
        """What may read a flattened map: layer -> the shape to propose, and the question.

        A layer behind a convolution is asked about, unless a layer before it gives exactly as many
        values as it reads, and so is one that its own module declares before its convolutions.
        """
        asked: dict[Layer, tuple[Shape | None, str]] = {}
        widths: dict[int, tuple[Shape | None, str]] = {}
        convs: list[Layer] = []
        given: set[int] = set()
        direct = False  # behind a convolution, with nothing but norms between
        alike = collections.Counter(layer.words for layer in self.layers if layer in self._sizes)
        for place, layer in enumerate(self.layers):
            size = self._sizes.get(layer)
            if size is not None and size.axes:
                convs.append(layer)
            elif size is not None and size.reads:
                known = size.reads in given and (not direct or alike[layer.words] > 1)
                if size.reads in widths:
                    asked[layer] = widths[size.reads]
                else:
                    conv = None if known else self._may_read(size.reads, convs)
                    if conv := conv or self._declared_later(place):
                        asked[layer] = widths[size.reads] = self._question(conv, size.reads)
            if size is not None and not size.axes:
                given |= {size.gives, 2 * size.gives if layer.kind == "recurrent" else size.gives}
            direct = bool(size and size.axes) or (direct and _is_vector(layer))
        for layer in asked:
            if (said := self._said("flatten", layer)) is not None and said[1] is None:
                widths.pop(self._sizes[layer].reads, None)  # nothing was flattened
        return asked | self._norms_of(widths)

    def _may_read(self, width: int, convs: Sequence[Layer]) -> Layer | None:
        """The convolution of which a map of several places may be among so many values."""
        if not convs or width == self._sizes[convs[-1]].gives:
            return None  # its channels, one value each
        fitting = [c for c in convs if 1 < self._sizes[c].gives <= width // 2]
        whole = [c for c in fitting if width % self._sizes[c].gives == 0]
        beside = [c for c in fitting if c is convs[-1]]  # other values beside a map of the last
        return next(reversed(whole or beside), None)

    def _declared_later(self, place: int) -> Layer | None:
        """The convolution that its own module declares after a layer, and that it may read."""
        layer, size = self.layers[place], self._sizes[self.layers[place]]
        module = layer.segments[:-1]
        later = [
            (other, self._sizes[other])
            for other in self.layers[place + 1 :]
            if other.segments[: len(module)] == module and other in self._sizes
            if self._sizes[other].axes
        ]
        others = {s.gives for o, s in self._sizes.items() if o is not layer and not s.axes}
        if not size.matrix or not later or size.reads in others:
            return None
        if later[0][1].channels > _IMAGE and size.gives % later[0][1].channels == 0:
            return None  # it feeds them
        for conv, of in reversed(later):
            if of.gives > 1 and size.reads % of.gives == 0:
                return conv if size.reads > of.gives else None
        return None

    def _question(self, conv: Layer, width: int) -> tuple[Shape | None, str]:
        size = self._sizes[conv]
        text = f"reads {width} values behind {conv.name}, which gives {size.gives} channels: "
        if width % size.gives:
            return None, (
                f"{text}say {{0}} if no flattened map is among them; if one is, have Flax flatten "
                "it in torch's order (C, H, W), and say the same"
            )
        shape = _shape_of(size.gives, size.axes, width)
        return shape, f"{text}say {{0}} if they are a flattened map, {{1}} if they are not"

    def _norms_of(
        self, widths: Mapping[int, tuple[Shape | None, str]]
    ) -> dict[Layer, tuple[Shape | None, str]]:
        """Norms of the size of a map that no layer beside them explains, and no layer's outputs.

        None that stand before a convolution: these are of its channels.
        """
        given = {size.gives for size in self._sizes.values()}
        found: dict[Layer, tuple[Shape | None, str]] = {}
        before_conv = False
        for layer in reversed(self.layers):
            if not _is_vector(layer):
                before_conv = layer in self._sizes and self._sizes[layer].axes > 0
            elif not before_conv and layer not in self._follows:
                asked = widths.get(_values(layer))
                if asked is not None and _values(layer) not in given:
                    found[layer] = asked
        return found

    def _unflattened(self) -> dict[Layer, tuple[Shape | None, str]]:
        """Matrices before a convolution that have several outputs for each channel it reads.

        Not those that have as many outputs as a later layer has inputs, unless it may read a map
        itself, and not those of many blocks.
        """
        found: dict[Layer, tuple[Shape | None, str]] = {}
        later: set[int] = set()
        after: Layer | None = None
        for layer in reversed(self.layers):
            size, next_ = self._sizes.get(layer), self._sizes.get(after) if after else None
            if size and size.matrix and after and next_ and next_.axes:
                channels, width = next_.channels, size.gives
                fits = width % channels == 0 and width > channels > _IMAGE
                if width not in later and fits:
                    shape = _shape_of(channels, next_.axes, width)
                    found[layer] = (
                        shape,
                        (
                            f"gives {width} values before {after.name}, which reads {channels} "
                            "channels: say {0} if they become a map, {1} if they do not"
                        ),
                    )
            later |= {size.reads} if size and size.reads else set()
            after = after if _is_vector(layer) else layer
        blocks = collections.Counter(layer.words for layer in found)
        return {layer: asked for layer, asked in found.items() if blocks[layer.words] == 1}

    # --- orientation ----------------------------------------------------------------------------

    def _storage(self, layer: Layer) -> str:
        """How its matrix is stored; ``none`` for no matrix, or one that can be but (out, in)."""
        shape, kernel = layer.shape("weight"), self.partners[layer].shape("kernel")
        if len(shape) != 2 or not kernel or layer.share or math.prod(shape) <= 1:
            return "none"
        found = storage(shape, kernel)
        return "none" if layer.parts["weight"][0] in self._of_torch and found == "both" else found

    def _is_transposed(self, layer: Layer, target: Layer) -> bool:
        shape, kernel = layer.shape("weight"), target.shape("kernel")
        if len(shape) < 3 or not kernel or orientation(shape, kernel) != "both":
            return False
        if self.options.conv_transpose is not None:
            return re.fullmatch(self.options.conv_transpose, layer.name) is not None
        words = {*layer.words, *target.words}
        if words & TRANSPOSED_WORDS:
            return True
        near = {layer.words, layer.segments[:-1]}
        clear = self._clearly_transposed
        if words & _UPWARD_WORDS or any(near & {c.words, c.segments[:-1]} for c in clear):
            self._either.append(layer)
        return False

    @functools.cached_property
    def _clearly_transposed(self) -> list[Layer]:
        """Layers of a kernel that only a ConvTranspose can have."""
        return [
            layer
            for layer, target in self.partners.items()
            if len(shape := layer.shape("weight")) > 2
            if (kernel := target.shape("kernel")) and orientation(shape, kernel) == "transposed"
        ]


def _is_vector(layer: Layer) -> bool:
    """A norm, or a bare parameter that may be one."""
    return layer.kind == "norm" or len(layer.shape("")) == 1


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
