"""Numbers with units, as people write and read them: ``10Gbit``, ``120ms``, ``0.5%``, ``124M``.

`advise` reads its arguments with `parse`, in Python and on the command line, and writes its table
with `with_unit`. Each argument allows only its own units, because "25G" alone could be bits or
bytes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import NamedTuple, SupportsFloat

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PREFIXES_BY_POWER = ("u", "m", "", "k", "M", "G", "T")  # of 1000, from this power on
_LEAST_POWER = -2
_RATES = {"bit": 1 / 8, "bps": 1 / 8, "B": 1.0}  # in bytes per second
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FRACTIONS = {"%": 0.01, "": 1.0}
_NUMBER = re.compile(r"([\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([kMGT]?)([a-zA-Z%]*)(?:/s)?", re.ASCII)


class _Argument(NamedTuple):
    units: Mapping[str, float]  # value of each unit; a prefix may precede it
    example: str
    may_be_zero: bool = False
    below: float = math.inf


_ARGUMENTS = {
    "params": _Argument({"": 1.0, "B": 1e9}, "124M"),
    "tokens": _Argument({"": 1.0}, "512k"),
    "bandwidth": _Argument(_RATES, "10Gbit, 25Gbps or 12.5GB/s"),
    "latency": _Argument(_TIMES, "50us", may_be_zero=True),
    "step_time": _Argument(_TIMES, "120ms"),
    "loss_budget": _Argument(_FRACTIONS, "0.5%", may_be_zero=True, below=1),
    "measured": _Argument(_FRACTIONS, "1.2%", below=1),
}


def parse(name: str, value: str | SupportsFloat) -> float:
    """Reads the value of an argument, from a number or from a text with a unit.

    Raises:
      ValueError: If the value is not a number, has another unit, or is outside the argument's
        limits.
    """
    argument = _ARGUMENTS[name]
    number = math.nan
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        if match is not None and match[3] in argument.units:
            number = float(match[1]) * _PREFIXES[match[2]] * argument.units[match[3]]
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # None, for example
            number = float(value)
    # A comparison with NaN is false.
    inside = 0 < number < argument.below or (number == 0 and argument.may_be_zero)
    if not inside:
        least = "positive"
        if argument.may_be_zero:
            least = "not negative"
        raise ValueError(
            f"`{name}` must be {least} and below {argument.below:g}, with a unit as in "
            f"{argument.example}, got {value!r}."
        )
    return number


def with_unit(value: float, unit: str) -> str:
    """Writes a value with three digits and a prefix: ``10 Gbit/s``, ``12.3 ms``, ``1.23 MB``."""
    if not value or math.isinf(value):
        return f"{value:g} {unit}"
    # The prefix is chosen after rounding: 999.6 ms is 1 s and not 1e+03 ms.
    rounded = float(f"{value:.2e}")
    power = math.floor(math.log10(rounded)) // 3
    power = max(power, _LEAST_POWER)
    power = min(power, _LEAST_POWER + len(_PREFIXES_BY_POWER) - 1)
    prefix = _PREFIXES_BY_POWER[power - _LEAST_POWER]
    scaled = value / 1000**power
    return f"{scaled:.3g} {prefix}{unit}"
