"""What neither names nor shapes of two models tell: it is answered by the user, or asked about.

torch flattens (C, H, W) and Flax (H, W, C), and no shape shows it. So in a model with convolutions
every layer is asked about that reads at least twice as many values as one of them gives channels,
unless the last one before it, or a layer since, gives exactly as many. And every matrix is asked
about that gives several values for each channel which a convolution directly behind it reads,
unless a later layer reads them all.

A square matrix does not show whether it is stored (out, in) or (in, out), and a kernel of as many
inputs as outputs not whether it is that of a ConvTranspose. The first is always asked about, the
second where a shape or a name shows that the model has such layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch_bridge._pairing.build import Answer, orders
from torch_bridge._pairing.layers import Layer, Shape
from torch_bridge._pairing.options import Options

TRANSPOSED_WORDS = frozenset({"convtranspose", "transpose", "transposed", "deconv", "tconv"})
_UPWARD_WORDS = TRANSPOSED_WORDS | {
    *("up", "ups", "upconv", "upsample", "upsampling", "dec", "decoder", "gen", "generator")
}
_OF_TORCH = re.compile(r".*\b(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
_STORED = {
    "conv1d": "square, which does not show whether it is stored (out, in) or, as by transformers' "
    "Conv1D, (in, out). Say conv1d='' if none of these is a Conv1D, else conv1d=<regular "
    "expression of those that are>",
    "conv_transpose": "as many inputs as outputs, which does not show a Conv from a ConvTranspose. "
    "Say conv_transpose='' if none of these is a ConvTranspose, else conv_transpose=<regular "
    "expression of those that are>",
}
# The shape to propose, if there is one, and what is known of the layer.
_Question: TypeAlias = tuple[Shape | None, str]


class _Sizes(NamedTuple):
    """What a layer reads and gives: values, or channels of a convolution; a norm's own values."""

    reads: int = 0  # 0: nothing that could be a flattened map
    gives: int = 0
    axes: int = 0  # of space, of a convolution


class Questions:
    """The answers to what two models do not tell, and the questions that have none.

    Attributes:
      answers: What was said about each layer that has a partner.
      asked: The questions, each a line with its answers.
      movable: ``flatten`` and ``unflatten`` -> the names of layers in which a shape moves values.
    """

    def __init__(
        self, layers: Sequence[Layer], partners: Mapping[Layer, Layer], options: Options
    ) -> None:
        self.options = options
        self._sizes = {a: _sizes(a, partners[a]) for a in layers if a in partners}
        readers = [a for a, size in self._sizes.items() if size.reads and not size.axes]
        self.movable = {
            "flatten": {layer.name for layer in readers},
            "unflatten": {layer.name for layer in readers if layer.kind != "recurrent"},
        }
        self._before = _neighbours(self._sizes)
        self._after = _neighbours(reversed(self._sizes))
        self.asked: list[str] = []
        swapped: set[Layer] = set()
        matrices, kernels, upward = _fit_both_ways(layers, partners)
        for option, either, asks in (
            ("conv1d", matrices, True),
            ("conv_transpose", kernels, upward),
        ):
            said = getattr(options, option)
            if either and asks and said is None:
                self.asked.append(f"{_listed(either)}: {_STORED[option]}")
            swapped |= {a for a in either if said and re.fullmatch(said, a.name)}
        self.answers = {
            layer: Answer(
                self._map("flatten", layer), self._map("unflatten", layer), layer in swapped
            )
            for layer in self._sizes
        }
        self.asked += self._lines("flatten", self._flattened())
        self.asked += self._lines("unflatten", self._unflattened())

    def _said(self, option: str, layer: Layer) -> tuple[Shape | None] | None:
        """What the last pattern that names this layer says; None if none does."""
        said = getattr(self.options, option).items()
        found = [(shape,) for pattern, shape in said if re.fullmatch(pattern, layer.name)]
        return found[-1] if found else None

    def _map(self, option: str, layer: Layer) -> Shape | None:
        """The map that a layer reads (or gives); a norm beside it follows it."""
        if self._sizes[layer].axes:
            return None
        if (said := self._said(option, layer)) is not None:
            return said[0]
        beside, of = self._follows(layer)
        return self._map(option, of) if of and beside == option else None

    def _follows(self, norm: Layer) -> tuple[str, Layer | None]:
        """The layer that gives the values of a norm just before it, or that reads them behind."""
        before, after = self._before[norm], self._after[norm]
        values = self._sizes[norm].gives
        if norm.is_vector and before and self._sizes[before].gives == values:
            return "unflatten", before
        if norm.is_vector and after and self._sizes[after][::2] == (values, 0):
            return "flatten", after
        return "", None

    def _flattened(self) -> dict[Layer, _Question]:
        """Layers that may read a flattened map, all that read as many values, and lone norms."""
        order = list(self._sizes)
        widths: dict[int, _Question] = {}
        given: set[int] = set()  # since the last convolution
        for place, layer in enumerate(order):
            size = self._sizes[layer]
            if layer.is_vector:
                continue
            explained = size.axes or size.reads in given
            given = set() if size.axes else given
            given |= {size.gives, 2 * size.gives if layer.kind == "recurrent" else size.gives}
            if explained:
                continue
            nearest = [*order[place::-1], *order[place:]]
            convs = [a for a in nearest if self._sizes[a].axes]
            convs = [a for a in convs if 1 < self._sizes[a].gives <= size.reads // 2]
            whole = [a for a in convs if size.reads % self._sizes[a].gives == 0]
            for conv in (whole or convs)[:1]:
                _, channels, axes = self._sizes[conv]
                fact = f"reads {size.reads} values, and {conv.name} gives {channels} channels"
                shape = _shape_of(channels, axes, size.reads) if whole else None
                widths.setdefault(size.reads, (shape, fact))
        alike = {a: size.reads for a, size in self._sizes.items() if not size.axes}
        alike = {a: reads for a, reads in alike.items() if reads in widths}
        pooled = {n for a, n in alike.items() if self._said("flatten", a) == (None,)}
        asked = dict[Layer, _Question]()
        for layer, reads in alike.items():
            after = self._after[layer]
            beside = self._follows(layer)[1] or (after and self._sizes[after].axes)
            if not layer.is_vector or not (beside or reads in pooled):
                asked[layer] = widths[reads]
        return asked

    def _unflattened(self) -> dict[Layer, _Question]:
        """Matrices with several outputs, which nothing later reads, for each channel behind."""
        asked: dict[Layer, _Question] = {}
        later: set[int] = set()
        for layer in reversed(self._sizes):
            (reads, gives, axes), after = self._sizes[layer], self._after[layer]
            if axes or layer.is_vector:
                continue
            if after and reads and layer.kind == "weight" and gives not in later:
                channels, out, space = self._sizes[after]
                channels = out if channels == 1 else channels  # of a convolution of each by itself
                fact = f"gives {gives} values before {after.name}, which reads {channels} channels"
                if space and gives > channels and gives % channels == 0:
                    asked[layer] = _shape_of(channels, space, gives), fact
            later.add(reads)
        return asked

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


def _neighbours(layers: Iterable[Layer]) -> dict[Layer, Layer | None]:
    """Each layer with the one before it that is no norm."""
    found: dict[Layer, Layer | None] = {}
    before: Layer | None = None
    for layer in layers:
        found[layer] = before
        before = before if layer.is_vector else layer
    return found


def _sizes(layer: Layer, target: Layer) -> _Sizes:
    if layer.is_vector:
        values = max(shape[0] for _, shape in layer.parts.values())
        return _Sizes(values, values)
    if layer.kind == "recurrent":
        return _Sizes(layer.shape("weight_ih")[-1], (layer.shape("weight_hh") or (0,))[-1])
    if layer.kind == "attention":
        return _Sizes(gives=(layer.shape("out_proj.weight") or (0,))[0])
    shape, kernel = layer.shape("weight"), target.shape("kernel")
    if layer.kind != "weight" or len(shape) < 2 or not kernel:
        return _Sizes(gives=shape[-1] if shape else 0)
    gives, reads, *space = shape
    if orders(shape, kernel) == (False, True):
        gives, reads = reads, gives
    return _Sizes(reads, gives // layer.share[1] if layer.share else gives, len(space))


def _fit_both_ways(
    layers: Iterable[Layer], partners: Mapping[Layer, Layer]
) -> tuple[list[Layer], list[Layer], bool]:
    """Matrices and kernels that may be (in, out), and whether there seems to be a ConvTranspose."""
    names = [name for layer in layers for name, _ in layer.parts.values()]
    packed = [n.removesuffix("in_proj_weight") for n in names if n.endswith("in_proj_weight")]
    of_torch = {f"{module}out_proj.weight" for module in packed}
    of_torch |= {name for name in names if _OF_TORCH.match(name)}
    matrices, kernels, upward = list[Layer](), list[Layer](), False
    for layer, target in partners.items():
        shape = layer.shape("weight")
        usual, swapped = orders(shape, target.shape("kernel"))
        if usual and swapped and shape != (1, 1) and not layer.share:
            if len(shape) > 2:
                kernels.append(layer)
                upward |= bool({*layer.words, *target.words} & _UPWARD_WORDS)
            elif layer.parts["weight"][0] not in of_torch:
                matrices.append(layer)
        elif swapped and len(shape) > 2:
            upward = True
    return matrices, kernels, upward


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
