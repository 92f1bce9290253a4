"""Numbers with units, as the command line takes and prints them: bandwidths, times, shares."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from jaxcomp._base.checks import ParameterError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:_\d{3})*(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*"
# A lone b is a bit and a lone B a byte; everything else is read in either case.
_BANDWIDTH = re.compile(
    _NUMBER + r"([kKmMgGtT]?)((?i:bits?)|(?i:bytes?)|b|B)(?:/s|/sec|ps)?", re.ASCII
)


def parse_bandwidth(name: str, value: str | float) -> float:
    """Bytes per second, from a text such as ``10Gbit``, ``100Mbps`` or ``12.5GB/s``.

    Args:
      name: Of the argument, for an error.
      value: The text, or a number of bytes per second.

    Raises:
      ValueError: If this is no positive finite bandwidth.
    """
    hint = "Write a number and a unit: 10Gbit, 100Mbit/s (bits) or 12.5GB/s (bytes)."
    number = value
    if isinstance(value, str):
        match = _BANDWIDTH.fullmatch(value.strip())
        if match is None:
            raise ParameterError(name, f"is no bandwidth: {value!r}. {hint}")
        unit = match[3]
        bits = unit == "b" or unit.lower().startswith("bit")
        number = _float(match[1]) * _PREFIXES[match[2].lower()] / (8 if bits else 1)
    return _checked(name, value, float(number), hint, positive=True)


def parse_time(name: str, value: str | float, *, positive: bool = False) -> float:
    """Seconds, from a text such as ``50us``, ``1ms`` or ``0.12s``.

    Args:
      name: Of the argument, for an error.
      value: The text, or a number of seconds.
      positive: Whether zero is refused.

    Raises:
      ValueError: If this is no finite time, or negative.
    """
    hint = "Write a number and a unit: 50us, 120ms or 0.12s."
    return _checked(name, value, _scaled(name, "time", value, _TIMES, hint), hint, positive)


def parse_share(name: str, value: str | float) -> float:
    """A share of at least 0 and below 1, from a number or a text such as ``0.5%``.

    Args:
      name: Of the argument, for an error.
      value: The text, with a per cent sign or without, or a number.

    Raises:
      ValueError: If this is no such share.
    """
    hint = "Write 0.01 or 1%."
    share = _scaled(name, "share", value, {"%": 0.01, "": 1.0}, hint)
    if not 0 <= share < 1:
        raise ParameterError(name, f"must be at least 0 and below 1, got {value!r}. {hint}")
    return share


def parse_count(text: str) -> int | None:
    """A number of parameters such as ``124M``, ``1.5B`` or ``124_000_000``; None for other text."""
    match = re.fullmatch(_NUMBER + r"([kmgbt]?)", text.strip(), re.IGNORECASE)
    count = _float(match[1]) * _COUNTS[match[2].lower()] if match else math.inf
    return round(count) if math.isfinite(count) else None


def format_bandwidth(bytes_per_second: float) -> str:
    """As bits per second: ``10 Gbit/s``."""
    return _shown(bytes_per_second * 8, (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)))


def format_time(seconds: float) -> str:
    """With three digits: ``12.3 ms``; from a second on ``1.23 s``."""
    return _shown(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def format_bytes(count: float) -> str:
    """With three digits in powers of ten: ``1.23 MB``."""
    return _shown(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def _shown(value: float, units: tuple[tuple[str, float], ...]) -> str:
    # 999.6 ms is 1.00 s and not 1000 ms: the unit is chosen after rounding.
    unit, scale = next((u for u in units if value >= u[1] * 0.9995), units[-1])
    number = value / scale
    digits = 0 if number >= 99.95 or value == 0 else 1 if number >= 9.995 else 2
    text = f"{number:,.{digits}f}"
    if "." in text and unit.endswith("/s"):
        text = text.rstrip("0").rstrip(".")
    return f"{text} {unit}"


def _scaled(
    name: str, kind: str, value: str | float, units: Mapping[str, float], hint: str
) -> float:
    if not isinstance(value, str):
        return float(value)
    match = re.fullmatch(_NUMBER + f"({'|'.join(units)})", value.strip())
    if match is None:
        raise ParameterError(name, f"is no {kind}: {value!r}. {hint}")
    return _float(match[1]) * units[match[2]]


def _float(digits: str) -> float:
    return float(digits.replace("_", ""))


def _checked(name: str, given: object, value: float, hint: str, positive: bool) -> float:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        kind = "positive and finite" if positive else "finite and not negative"
        raise ParameterError(name, f"must be {kind}, got {given!r}. {hint}")
    return value
