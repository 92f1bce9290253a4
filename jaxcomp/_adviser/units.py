"""Numbers with units, as people write and read them: ``10Gbit``, ``120ms``, ``0.5%``, ``124M``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# Bytes per second; a bandwidth may be followed by /s.
RATES = {f"{p}bit": x / 8 for p, x in _PREFIXES.items()} | {
    f"{p}B": x for p, x in _PREFIXES.items()
}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHARES = {"%": 0.01, "": 1.0}
COUNTS = {**_PREFIXES, "B": 1e9}
_NUMBER = re.compile(r"([\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([a-zA-Z%]*)(?:/s)?", re.ASCII)


def parse(
    name: str,
    value: str | float,
    units: Mapping[str, float],
    example: str,
    *,
    positive: bool = False,
    below: float = math.inf,
) -> float:
    """A finite number that is not negative, from itself or from a text with one of the units.

    Args:
      name: Of the argument, for an error.
      value: The text or number.
      units: From each unit to what it is worth.
      example: How to write one.
      positive: Whether zero is refused.
      below: What it must be less than.

    Raises:
      ValueError: If it is anything else.
    """
    number = math.nan
    if not isinstance(value, str):
        number = float(value)
    elif (match := _NUMBER.fullmatch(value.strip())) and match[2] in units:
        number = float(match[1]) * units[match[2]]
    if not 0 <= number < below or (positive and not number):
        limits = f"{'positive' if positive else 'not negative'} and below {below:g}"
        raise ValueError(f"`{name}` must be {limits}, with a unit as in {example}, got {value!r}.")
    return number


def with_unit(value: float, unit: str) -> str:
    """With three digits and a prefix: ``10 Gbit/s``, ``12.3 ms``, ``1.23 MB``."""
    if not value or math.isinf(value):
        return f"{value:g} {unit}"
    # The prefix is chosen after rounding: 999.6 ms is 1 s and not 1e+03 ms.
    power = math.floor(math.log10(float(f"{value:.2e}"))) // 3
    power = min(max(power, -2), 4)
    return f"{value / 1000**power:.3g} {'um kMGT'[power + 2].strip()}{unit}"
