"""What the user says about a model that names and shapes do not tell: the arguments of `pair`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
Flatten: TypeAlias = Mapping[str, tuple[int, ...] | None]


class PairOptions(TypedDict, total=False):
    r"""The options of `pair`, which every conversion takes in place of its result.

    Example:
      >>> options: PairOptions = {"flatten": {"fc1": (64, 7, 7)}, "ignore": r"aux\..*"}
    """

    flatten: Flatten | None
    unflatten: Flatten | None
    conv_transpose: str | None
    conv1d: str | None
    ignore: str | None


SHAPES = ("flatten", "unflatten")


@dataclasses.dataclass(frozen=True)
class Options:
    """The user's own word on what names and shapes do not tell; see `pair`."""

    rules: tuple[tuple[str, str], ...] = ()
    flatten: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    unflatten: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    conv_transpose: str | None = None
    conv1d: str | None = None
    ignore: str | None = None

    def __post_init__(self) -> None:
        patterns = [("rules", pattern) for pattern, _ in self.rules]
        for option in SHAPES:
            patterns += [(option, pattern) for pattern, _ in getattr(self, option)]
        patterns += [("conv_transpose", self.conv_transpose), ("conv1d", self.conv1d)]
        patterns += [("ignore", self.ignore)]
        for name, pattern in patterns:
            check_pattern(name, pattern)


def check_pattern(name: str, pattern: str | None) -> None:
    """Refuse a text that is no regular expression.

    Raises:
      ValueError: With the name of the argument.
    """
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"`{name}`: {pattern!r} is no regular expression: {error}") from error


def parsed(
    rules: Rules = (),
    flatten: Flatten | None = None,
    unflatten: Flatten | None = None,
    conv_transpose: str | None = None,
    conv1d: str | None = None,
    ignore: str | None = None,
) -> Options:
    """The arguments of `pair`, checked.

    Raises:
      ValueError: One of them has another form.
    """
    inputs, outputs = _shapes("flatten", flatten), _shapes("unflatten", unflatten)
    return Options(_pairs(rules), inputs, outputs, conv_transpose, conv1d, ignore)


def _pairs(rules: Any) -> tuple[tuple[str, str], ...]:
    with contextlib.suppress(TypeError, ValueError):
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        return tuple((pattern, path) for pattern, path in pairs)
    raise ValueError(
        f"`rules` must map regular expressions to paths, as in {{'fc': 'Dense_0'}}, got {rules!r}."
    )


def _shapes(name: str, said: Any) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    """The items of `flatten` or `unflatten`, with shapes as tuples of positive integers."""
    with contextlib.suppress(TypeError, AttributeError):
        items = (said or {}).items()
        shapes = tuple((p, None if s is None else tuple(map(operator.index, s))) for p, s in items)
        if all(shape is None or (shape and min(shape) > 0) for _, shape in shapes):
            return shapes
    raise ValueError(
        f"`{name}` must map regular expressions to shapes (C, H, W) or None, as in "
        f"{{'fc': (64, 7, 7)}}, got {said!r}."
    )


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuse options that `pair` does not have: what is misspelled would not be heard.

    Raises:
      TypeError: As Python's own for an argument that there is not.
    """
    known = sorted(PairOptions.__optional_keys__)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"Did you mean {close[0]!r}?"
                if close
                else f"From torch_bridge.pair it takes {', '.join(known)}."
            )
            raise TypeError(f"This function has no argument {name!r}. {hint}")
