"""The options of `pair`: what the user says of two models."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.kinds import Form
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.pairs import Maps, Shape

# What is flattened, as users say it: shapes (C, H, W), and numbers of values that are no map.
Flattened: TypeAlias = tuple[Shape, ...]
Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten: TypeAlias = Mapping[str, Sequence[Any] | None]

_MAPS = (
    "shapes (C, H, W), to lists of shapes and numbers of other values, or to None, as in "
    "{'fc': (64, 7, 7)}"
)
_MAPPED = {
    "rules": "paths, as in {'fc': 'Dense_0'}",
    "flatten": _MAPS,
    "unflatten": _MAPS,
    "turned": "orders of axes, as in {'projection': (1, 0)}",
}


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
    turned: Mapping[str, Sequence[int]] | None
    plain: bool
    ignore: str | None


@dataclasses.dataclass
class Options:
    """The options of `pair`, see there; those that map patterns are kept as pairs of both.

    Raises:
      ValueError: One of them has another form, or is not a regular expression.
    """

    rules: Any = ()
    flatten: Any = None  # to a `Flattened`, empty for None
    unflatten: Any = None
    conv_transpose: str | None = None
    conv1d: str | None = None
    turned: Any = None
    plain: bool = False
    ignore: str | None = None

    def __post_init__(self) -> None:
        self.rules = _pairs("rules", self.rules, str)
        self.flatten = _pairs("flatten", self.flatten, _parts)
        self.unflatten = _pairs("unflatten", self.unflatten, _parts)
        self.turned = _pairs("turned", self.turned, _order)
        for name, pattern in self.patterns():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`{name}`: {pattern!r} is not a regular expression: {error}"
                ) from error

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Lists every regular expression, with the option that it is of."""
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                for pattern, _ in value:
                    yield name, pattern
            elif value and name != "plain":
                yield name, value

    def kept(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the tensors that shall not be left out."""
        kept = dict(tensors)
        for name, clean in clean_names(list(tensors)).items():
            if self.ignore and re.fullmatch(self.ignore, clean):
                del kept[name]
        return kept

    def map_of(self, option: str, layer: Layer) -> tuple[str | None, Flattened]:
        """Returns the last pattern that names a layer, if any, and the map that it says, if any."""
        answer: tuple[str | None, Flattened] = (None, ())
        for pattern, parts in getattr(self, option) or ():
            if re.fullmatch(pattern, layer.name):
                answer = (pattern, parts)
        return answer

    def form_of(self, option: str, layer: Layer) -> Form | None:
        """Returns the form that an option says a weight has, "" for the usual one; None if open."""
        patterns = getattr(self, option)
        if patterns is None and not self.plain:
            return None
        if not patterns:  # "" names none, not the layer without a name
            return ""
        if isinstance(patterns, str):
            patterns = ((patterns, option),)
        for pattern, form in patterns:
            if re.fullmatch(pattern, layer.name):
                return form
        return ""


def refuse_idle_patterns(
    options: Options, tensors: Collection[str], layers: Collection[str]
) -> None:
    """Refuses patterns that match nothing: what is misspelled would be ignored without a word.

    Args:
      options: The options.
      tensors: The names of all tensors of the model.
      layers: The names of all its layers.

    Raises:
      CheckpointMismatch: With all of them.
    """
    modules = {name.rpartition(".")[0] for name in tensors}.union(layers)
    idle = []
    for option, pattern in options.patterns():
        names = modules
        if option in ("rules", "turned"):
            names = modules.union(tensors)
        may_be_idle = not pattern or option in ("ignore", "conv_transpose")
        if not may_be_idle and not any(map(re.compile(pattern).fullmatch, names)):
            idle.append(f"{option}: {pattern}")
    if idle:
        raise CheckpointMismatch(
            "Some patterns match no layer of the torch model, and they have to match a whole name. "
            "Correct them or leave them out.",
            unexpected=idle,
            parameters=sorted({line.partition(":")[0] for line in idle}),
        )


def maps_of(parts: Flattened) -> Maps:
    """Turns what a user says is flattened into maps."""
    maps = []
    start = 0
    for shape in parts:
        if len(shape) > 1:
            maps.append((start, shape[0], math.prod(shape[1:])))
        start += math.prod(shape)
    return tuple(maps)


def size_of(parts: Flattened) -> int:
    """Returns how many values there are in what a user says is flattened."""
    return sum(map(math.prod, parts))


def _pairs(name: str, value: Any, read: Callable[[Any], Any]) -> tuple[tuple[str, Any], ...] | None:
    """Reads what an option maps regular expressions to."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        items = value
        if isinstance(value, Mapping):
            items = value.items()
        return tuple((pattern, read(answer)) for pattern, answer in items)
    raise ValueError(f"`{name}` must map regular expressions to {_MAPPED[name]}, got {value!r}.")


def _order(value: Any) -> Form:
    """Reads an order of axes."""
    axes = tuple(map(operator.index, value))
    if sorted(axes) != list(range(len(axes))):
        raise ValueError
    return axes


def _parts(value: Any) -> Flattened:
    """Reads (C, H, W), or [(C, H, W), 10] where other values stand beside the map."""
    if value is None:
        return ()
    if not any(isinstance(part, list | tuple) for part in value):
        value = [value]
    parts = []
    for part in value:
        if isinstance(part, int):
            part = (part,)
        shape = tuple(map(operator.index, part))
        if not shape or min(shape) < 1:
            raise ValueError
        parts.append(shape)
    return tuple(parts)
