"""What the user says about two models that names and shapes do not tell: the options of `pair`."""

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
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...] | None], ...]


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


SHAPES = ("flatten", "unflatten")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `pair`, checked; see there."""

    rules: tuple[tuple[str, str], ...] = ()
    flatten: Shapes = ()
    unflatten: Shapes = ()
    conv_transpose: str | None = None
    conv1d: str | None = None
    ignore: str | None = None

    def __post_init__(self) -> None:
        for name, pattern in self.patterns:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`{name}`: {pattern!r} is no regular expression: {error}"
                ) from error

    @property
    def patterns(self) -> list[tuple[str, str]]:
        """Every regular expression, with the option that it is of."""
        several = [(n, p) for n in ("rules", *SHAPES) for p, _ in getattr(self, n)]
        single = [(n, getattr(self, n)) for n in ("conv_transpose", "conv1d", "ignore")]
        return several + [(name, pattern) for name, pattern in single if pattern]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Options:
        """The arguments of `pair`.

        Raises:
          TypeError: `pair` has no such option: what is misspelled would not be heard.
          ValueError: One of them has another form.
        """
        known = sorted(PairOptions.__optional_keys__)
        for name in said:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"From torch_bridge.pair it takes {', '.join(known)}."
                hint = f"Did you mean {close[0]!r}?" if close else hint
                raise TypeError(f"This function has no argument {name!r}. {hint}")
        shapes = {name: _shapes(name, said.get(name)) for name in SHAPES}
        return cls(**{**said, **shapes, "rules": _rules(said.get("rules", ()))})


def _rules(rules: Any) -> tuple[tuple[str, str], ...]:
    with contextlib.suppress(TypeError, ValueError):
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        return tuple((pattern, path) for pattern, path in pairs)
    raise ValueError(
        f"`rules` must map regular expressions to paths, as in {{'fc': 'Dense_0'}}, got {rules!r}."
    )


def _shapes(name: str, said: Any) -> Shapes:
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
