"""The options of `pair`, in which the user describes the two models."""

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
from torch_bridge._pairing.pairs import Maps, Shape

# The parts of a flattened array: (C, H, W) of a map, and (n,) of n values that are not a map.
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
    """The options of `pair`; all but `plain` become tuples of (pattern, value), or stay None.

    Raises:
      ValueError: An option has another form, or is not a regular expression.
    """

    rules: Any = ()
    flatten: Any = None  # the value is a `Flattened`, empty for the user's None
    unflatten: Any = None
    conv_transpose: Any = None  # the value of these two is the name, which is the form
    conv1d: Any = None
    turned: Any = None
    plain: bool = False
    ignore: Any = None

    def __post_init__(self) -> None:
        self.rules = _read_mapping("rules", self.rules, str)
        self.flatten = _read_mapping("flatten", self.flatten, _parts)
        self.unflatten = _read_mapping("unflatten", self.unflatten, _parts)
        self.turned = _read_mapping("turned", self.turned, _order)
        for name in ("conv_transpose", "conv1d", "ignore"):
            pattern = getattr(self, name)
            if pattern is not None:
                # "" means no layer, though it would match the root.
                setattr(self, name, ((pattern, name),) if pattern else ())
        for name, pattern in self.patterns():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`{name}`: {pattern!r} is not a regular expression: {error}"
                ) from error

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Yields every regular expression, after the name of its option."""
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                for pattern, _ in value:
                    yield name, pattern

    def kept(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tensors that `ignore` does not leave out."""
        kept = dict(tensors)
        for name, clean in clean_names(list(tensors)).items():
            if self.answer("ignore", clean):
                del kept[name]
        return kept

    def answer(self, option: str, name: str) -> tuple[str, Any] | None:
        """Returns the last pattern of `option` that matches a whole name, with its value."""
        answer = None
        for pattern, value in getattr(self, option) or ():
            if re.fullmatch(pattern, name):
                answer = (pattern, value)
        return answer


def refuse_unused_patterns(
    options: Options, tensors: Collection[str], layers: Collection[str]
) -> None:
    """Refuses patterns that match nothing, because they are probably misspelled.

    Args:
      options: The options.
      tensors: The names of the model's tensors.
      layers: The names of the model's layers.

    Raises:
      CheckpointMismatch: Patterns match nothing; the error lists all.
    """
    modules = {name.rpartition(".")[0] for name in tensors}.union(layers)
    unused = []
    for option, pattern in options.patterns():
        names = modules
        if option in ("rules", "turned"):
            names = modules.union(tensors)
        may_be_unused = not pattern or option in ("ignore", "conv_transpose")
        if not may_be_unused and not any(map(re.compile(pattern).fullmatch, names)):
            unused.append(f"{option}: {pattern}")
    if unused:
        raise CheckpointMismatch(
            "Some patterns match no layer of the torch model; a pattern must match a whole name. "
            "Correct them or leave them out.",
            unexpected=unused,
            parameters=sorted({line.partition(":")[0] for line in unused}),
        )


def maps_of(parts: Flattened) -> Maps:
    """Returns the maps among the parts of a flattened array."""
    maps = []
    start = 0
    for shape in parts:
        if len(shape) > 1:
            maps.append((start, shape[0], math.prod(shape[1:])))
        start += math.prod(shape)
    return tuple(maps)


def size_of(parts: Flattened) -> int:
    """Returns the number of values in all parts of a flattened array."""
    return sum(map(math.prod, parts))


def _read_mapping(
    name: str, value: Any, read: Callable[[Any], Any]
) -> tuple[tuple[str, Any], ...] | None:
    """Reads an option that maps regular expressions to values, each value with `read`."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        items = value
        if isinstance(value, Mapping):
            items = value.items()
        return tuple((pattern, read(answer)) for pattern, answer in items)
    raise ValueError(f"`{name}` must map regular expressions to {_MAPPED[name]}, got {value!r}.")


def _order(value: Any) -> Form:
    """Reads an order of axes; raises ValueError or TypeError if it is not a permutation."""
    axes = tuple(map(operator.index, value))
    if sorted(axes) != list(range(len(axes))):
        raise ValueError
    return axes


def _parts(value: Any) -> Flattened:
    """Reads the shape (C, H, W), or [(C, H, W), 10] if other values stand beside the map."""
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
