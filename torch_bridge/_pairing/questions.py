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

import contextlib
import dataclasses
import operator
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from torch_bridge._pairing.build import Answer, orders
from torch_bridge._pairing.layers import Layer, Shape

Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten: TypeAlias = Mapping[str, tuple[int, ...] | None]
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


class PairOptions(TypedDict, total=False):
    r"""The options of `pair`, which `to_flax`, `to_torch` and `params_from_torch` take, too.

    Example:
      >>> options: PairOptions = {"flatten": {"fc1": (64, 7, 7)}, "ignore": r"aux\..*"}
    """

    rules: Rules
    flatten: Flatten | None
    unflatten: Flatten | None
    conv_transpose: str | None
    conv1d: str | None
    ignore: str | None


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `pair`, see there, in one form.

    Raises:
      ValueError: One of them has another form, or is no regular expression.
    """

    rules: Any = ()  # kept as pairs of a pattern and a path
    flatten: Any = None  # kept as pattern -> tuple of positive integers or None
    unflatten: Any = None
    conv_transpose: str | None = None
    conv1d: str | None = None
    ignore: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))
        for name in ("flatten", "unflatten"):
            object.__setattr__(self, name, _shapes(name, getattr(self, name)))
        for name, pattern in self.patterns():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`{name}`: {pattern!r} is no regular expression: {error}"
                ) from error

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Every regular expression, with the option that it is of."""
        for name, said in vars(self).items():
            if isinstance(said, tuple | dict):
                yield from ((name, pattern) for pattern in dict(said))
            elif said:
                yield name, said

    def said(self, option: str, layer: Layer) -> tuple[Shape | None] | None:
        """What the last pattern of ``flatten`` or ``unflatten`` that names a layer says, if any."""
        said = getattr(self, option).items()
        found = [(shape,) for pattern, shape in said if re.fullmatch(pattern, layer.name)]
        return found[-1] if found else None


@dataclasses.dataclass(eq=False)
class _Place:
    """A layer in its place among those that have a partner.

    Attributes:
      layer: The torch layer.
      reads: Values, or channels of a convolution; 0 if they can be no flattened map.
      gives: Likewise; of a norm the values that it is of.
      axes: Of space, of a convolution.
      before: The place before it, of a layer that is no norm. Likewise `after`.
    """

    layer: Layer
    reads: int = 0
    gives: int = 0
    axes: int = 0
    before: _Place | None = None
    after: _Place | None = None

    @property
    def follows(self) -> tuple[str, _Place | None]:
        """Of a norm: what gives its values just before it, or reads them behind, and which map."""
        if self.layer.is_vector and self.before and self.before.gives == self.gives:
            return "unflatten", self.before
        if self.layer.is_vector and self.after and self.after.axes == 0:
            return "flatten", self.after if self.after.reads == self.gives else None
        return "", None


class Questions:
    """The answers to what two models do not tell, and the questions that have none.

    Attributes:
      answers: What was said about each layer that has a partner.
      asked: The questions, each a line with its answers.
    """

    def __init__(
        self, layers: Sequence[Layer], partners: Mapping[Layer, Layer], options: Options
    ) -> None:
        self.options, self._layers = options, layers
        self._places = _places(layers, partners)
        self.asked: list[str] = []
        swapped: set[Layer] = set()
        for option, either, asks in _fit_both_ways(layers, partners):
            said = getattr(options, option)
            if either and asks and said is None:
                self.asked.append(f"{_listed(either)}: {_STORED[option]}")
            swapped |= {a for a in either if said and re.fullmatch(said, a.name)}
        self.answers = {
            at.layer: Answer(
                self._map("flatten", at), self._map("unflatten", at), at.layer in swapped
            )
            for at in self._places
        }
        self.asked += self._lines("flatten", self._flattened())
        self.asked += self._lines("unflatten", self._unflattened())

    def idle_patterns(self, tensors: Collection[str]) -> list[str]:
        """Patterns that match nothing, or with a shape no layer in which anything moves.

        What is misspelled would be ignored without a word.

        Args:
          tensors: The names of all tensors of the model.
        """
        modules = {name.rpartition(".")[0] for name in tensors} | {a.name for a in self._layers}
        readers = [place.layer for place in self._places if place.reads and not place.axes]
        movable = {
            "flatten": {layer.name for layer in readers},
            "unflatten": {layer.name for layer in readers if layer.kind != "recurrent"},
        }
        idle: list[str] = []
        for option, pattern in self.options.patterns():
            names = {"rules": {*modules, *tensors}, "conv1d": modules}.get(option)
            if option in movable:
                names = movable[option] if getattr(self.options, option)[pattern] else modules
            if names is not None and pattern and not any(re.fullmatch(pattern, n) for n in names):
                idle.append(f"{option}: {pattern}")
        return idle

    def _map(self, option: str, place: _Place) -> Shape | None:
        """The map that a layer reads (or gives); a norm beside it follows it."""
        if place.axes:
            return None
        if said := self.options.said(option, place.layer):
            return said[0]
        follows, other = place.follows
        return self._map(option, other) if other and follows == option else None

    def _flattened(self) -> dict[Layer, _Question]:
        """Layers that may read a flattened map, all that read as many values, and lone norms."""
        widths: dict[int, _Question] = {}
        given: set[int] = set()  # since the last convolution
        for k, place in enumerate(self._places):
            if place.layer.is_vector:
                continue
            explained = place.axes or place.reads in given
            given = set() if place.axes else given
            given |= {place.gives, place.gives * (2 if place.layer.kind == "recurrent" else 1)}
            if explained:
                continue
            nearest = [*self._places[k::-1], *self._places[k:]]
            convs = [a for a in nearest if a.axes and 1 < a.gives <= place.reads // 2]
            whole = [a for a in convs if place.reads % a.gives == 0]
            for conv in (whole or convs)[:1]:
                gives = f"{conv.layer.name} gives {conv.gives} channels"
                shape = _shape_of(conv.gives, conv.axes, place.reads) if whole else None
                question = shape, f"reads {place.reads} values, and {gives}"
                widths.setdefault(place.reads, question)
        alike = [place for place in self._places if not place.axes and place.reads in widths]
        pooled = {a.reads for a in alike if self.options.said("flatten", a.layer) == (None,)}
        return {
            a.layer: widths[a.reads]
            for a in alike
            if not a.layer.is_vector
            or not (a.follows[1] or (a.after and a.after.axes) or a.reads in pooled)
        }

    def _unflattened(self) -> dict[Layer, _Question]:
        """Matrices with several outputs, which nothing later reads, for each channel behind."""
        asked: dict[Layer, _Question] = {}
        later: set[int] = set()
        for place in reversed(self._places):
            layer, gives, after = place.layer, place.gives, place.after
            if place.axes or layer.is_vector:
                continue
            if after and place.reads and layer.kind == "weight" and gives not in later:
                # A convolution of each channel by itself reads one, and has as many as it gives.
                channels = after.gives if after.reads == 1 else after.reads
                name = after.layer.name
                fact = f"gives {gives} values before {name}, which reads {channels} channels"
                if after.axes and gives > channels and gives % channels == 0:
                    asked[layer] = _shape_of(channels, after.axes, gives), fact
            later.add(place.reads)
        return asked

    def _lines(self, option: str, questions: Mapping[Layer, _Question]) -> list[str]:
        """One line for layers that differ in their numbers only; warns of channels at the end."""
        alike: dict[tuple[tuple[str, ...], _Question], list[Layer]] = {}
        for layer, question in questions.items():
            said = self.options.said(option, layer)
            if said is None:
                alike.setdefault((layer.words, question), []).append(layer)
            elif said[0] and (said[0][-1], *said[0][:-1]) == question[0] != said[0]:
                warnings.warn(
                    f"{option}={said[0]} has the channels last, but {layer.name} {question[1]}: "
                    f"the shape is torch's (C, H, W), here {question[0]} perhaps.",
                    stacklevel=2,
                )
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


def _places(layers: Iterable[Layer], partners: Mapping[Layer, Layer]) -> list[_Place]:
    places = [_Place(a, *_sizes(a, partners[a])) for a in layers if a in partners]
    for side, order in (("before", places), ("after", places[::-1])):
        last: _Place | None = None
        for place in order:
            setattr(place, side, last)
            last = last if place.layer.is_vector else place
    return places


def _sizes(layer: Layer, target: Layer) -> tuple[int, int, int]:
    """What a layer reads and gives, and its axes of space."""
    if layer.is_vector:
        values = max(shape[0] for _, shape in layer.parts.values())
        return values, values, 0
    if layer.kind == "recurrent":
        return layer.shape("weight_ih")[-1], (layer.shape("weight_hh") or (0,))[-1], 0
    if layer.kind == "attention":
        return 0, (layer.shape("out_proj.weight") or (0,))[0], 0
    shape, kernel = layer.shape("weight"), target.shape("kernel")
    if layer.kind != "weight" or len(shape) < 2 or not kernel:
        return 0, shape[-1] if shape else 0, 0
    gives, reads, *space = shape
    if orders(shape, kernel) == (False, True):
        gives, reads = reads, gives
    return reads, gives // layer.share[1] if layer.share else gives, len(space)


def _fit_both_ways(
    layers: Iterable[Layer], partners: Mapping[Layer, Layer]
) -> tuple[tuple[str, list[Layer], bool], ...]:
    """By option the matrices and kernels that may be (in, out), and whether some seem to be."""
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
    return ("conv1d", matrices, True), ("conv_transpose", kernels, upward)


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


def _rules(said: Any) -> tuple[tuple[str, str], ...]:
    with contextlib.suppress(TypeError, ValueError):
        pairs = said.items() if isinstance(said, Mapping) else said
        return tuple((pattern, path) for pattern, path in pairs)
    raise ValueError(
        f"`rules` must map regular expressions to paths, as in {{'fc': 'Dense_0'}}, got {said!r}."
    )


def _shapes(name: str, said: Any) -> dict[str, tuple[int, ...] | None]:
    with contextlib.suppress(TypeError, AttributeError):
        items = (said or {}).items()
        shapes = {p: None if s is None else tuple(map(operator.index, s)) for p, s in items}
        if all(shape is None or (shape and min(shape) > 0) for shape in shapes.values()):
            return shapes
    raise ValueError(
        f"`{name}` must map regular expressions to shapes (C, H, W) or None, as in "
        f"{{'fc': (64, 7, 7)}}, got {said!r}."
    )
