"""The options of `pair`: what the user says of two models."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.kinds import IN_OUT, axes_name
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.maps import Flattened

Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten: TypeAlias = Mapping[str, Sequence[Any] | None]


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


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `pair`, see there, in one form.

    Raises:
      ValueError: One of them has another form, or is not a regular expression.
    """

    rules: Any = ()  # kept as pairs of a pattern and a path
    flatten: Any = None  # kept as pattern -> Flattened or None, or as None
    unflatten: Any = None
    conv_transpose: str | None = None
    conv1d: str | None = None
    turned: Any = None  # kept as pattern -> tuple of axes, or None
    plain: bool = False
    ignore: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))
        object.__setattr__(self, "turned", _turned(self.turned))
        for name in ("flatten", "unflatten"):
            object.__setattr__(self, name, _maps(name, getattr(self, name)))
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
            if isinstance(value, tuple | dict):
                for pattern in dict(value):
                    yield name, pattern
            elif value and name != "plain":
                yield name, value

    def kept(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the tensors that shall not be left out."""
        names = clean_names(list(tensors))
        kept: dict[str, Any] = {}
        for name, value in tensors.items():
            if not (self.ignore and re.fullmatch(self.ignore, names[name])):
                kept[name] = value
        return kept

    def map_of(self, option: str, layer: Layer) -> tuple[str, Flattened | None] | None:
        """Returns the last pattern that names a layer, and what it says; None if none does."""
        answer = None
        for pattern, parts in (getattr(self, option) or {}).items():
            if re.fullmatch(pattern, layer.name):
                answer = (pattern, parts)
        return answer

    def form_of(self, option: str, layer: Layer) -> str | None:
        """Returns the form that an option says a weight has, "" for the usual one; None if open."""
        said = getattr(self, option)
        if said is None:
            return "" if self.plain else None
        if isinstance(said, str):
            # "" names none, not the layer without a name.
            return IN_OUT if said and re.fullmatch(said, layer.name) else ""
        for pattern, order in said.items():
            if re.fullmatch(pattern, layer.name):
                return axes_name(order)
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
    names = set(layers)
    for name in tensors:
        names.add(name.rpartition(".")[0])
    idle: list[str] = []
    idle_options: set[str] = set()
    for option, pattern in options.patterns():
        if not pattern or option in ("ignore", "conv_transpose"):
            continue
        matches = re.compile(pattern).fullmatch
        of_tensors = option in ("rules", "turned") and any(map(matches, tensors))
        if not of_tensors and not any(map(matches, names)):
            idle.append(f"{option}: {pattern}")
            idle_options.add(option)
    if idle:
        raise CheckpointMismatch(
            "Some patterns match no layer of the torch model, and they have to match a whole name. "
            "Correct them or leave them out.",
            unexpected=idle,
            parameters=sorted(idle_options),
        )


def _rules(value: Any) -> tuple[tuple[str, str], ...]:
    with contextlib.suppress(TypeError, ValueError):
        pairs: list[tuple[str, str]] = []
        if isinstance(value, Mapping):
            value = value.items()
        for pattern, path in value:
            pairs.append((pattern, path))
        return tuple(pairs)
    raise ValueError(
        f"`rules` must map regular expressions to paths, as in {{'fc': 'Dense_0'}}, got {value!r}."
    )


def _turned(value: Any) -> dict[str, tuple[int, ...]] | None:
    if value is None:
        return None
    axes: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(TypeError, AttributeError):
        are_orders = True
        for pattern, order in value.items():
            axes[pattern] = tuple(map(operator.index, order))
            are_orders &= sorted(axes[pattern]) == list(range(len(axes[pattern])))
        if are_orders:
            return axes
    raise ValueError(
        "`turned` must map regular expressions to orders of axes, as in {'projection': (1, 0)}, "
        f"got {value!r}."
    )


def _maps(name: str, value: Any) -> dict[str, Flattened | None] | None:
    if value is None:
        return None
    maps: dict[str, Flattened | None] = {}
    with contextlib.suppress(TypeError, AttributeError, ValueError):
        for pattern, said in value.items():
            maps[pattern] = None
            if said is not None:
                maps[pattern] = _parts(said)
        return maps
    raise ValueError(
        f"`{name}` must map regular expressions to shapes (C, H, W), to lists of shapes and "
        f"numbers of other values, or to None, as in {{'fc': (64, 7, 7)}}, got {value!r}."
    )


def _parts(said: Any) -> Flattened:
    """Reads (C, H, W), or [(C, H, W), 10] where other values stand beside the map."""
    parts: list[tuple[int, ...]] = []
    is_list = False
    for part in said:
        is_shape = isinstance(part, list | tuple)
        is_list |= is_shape
        parts.append(tuple(map(operator.index, part if is_shape else (part,))))
    if not is_list:  # one shape
        parts = [tuple(itertools.chain(*parts))]
    for shape in parts:
        if not shape or min(shape) < 1:
            raise ValueError
    return tuple(parts)
