"""What the user says about two models that names and shapes do not tell: the options of `pair`."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten: TypeAlias = Mapping[str, tuple[int, ...] | None]


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
      TypeError: `pair` has no such argument.
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
