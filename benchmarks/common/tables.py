"""Markdown tables, as every benchmark prints them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import NormalDist, mean, stdev

from scipy import stats


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Makes a table; all but the first `left` columns are aligned to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def student(number: int) -> float:
    """Returns the 97.5% quantile of Student's distribution for the mean of so many values."""
    if number < 2:
        return NormalDist().inv_cdf(0.975)
    return float(stats.t.ppf(0.975, number - 1))


def half_width(values: Sequence[float]) -> float:
    """Returns that of the 95% interval of the mean of several values."""
    return student(len(values)) * stdev(values) / len(values) ** 0.5


def with_spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Writes the mean, and beside it, of several values, their standard deviation.

    Example:
      >>> with_spread([1.0, 3.0], "+.1f", "%"), with_spread([2.0], ".2f"), with_spread([], ".2f")
      ('+2.0% ± 1.4', '2.00', '')
    """
    return _with(values, stdev, form, unit)


def with_interval(values: Sequence[float], form: str, unit: str = "") -> str:
    """Writes the mean, and beside it, of several values, half its 95% interval (Student's).

    Example:
      >>> with_interval([1.0, 3.0, 2.0], "+.1f", "%"), with_interval([2.0], ".2f")
      ('+2.0% ± 2.5', '2.00')
    """
    return _with(values, half_width, form, unit)


def _with(
    values: Sequence[float], spread: Callable[[Sequence[float]], float], form: str, unit: str
) -> str:
    if not values:
        return ""
    text = f"{mean(values):{form}}{unit}"
    if len(values) > 1:
        text += f" ± {spread(values):{form.lstrip('+')}}"
    return text


def in_page(page: str, command: str, text: str) -> str:
    """Returns a document with `text` between the comment that names `command` and the next ``end``.

    Raises:
      ValueError: It has no such place, or several.
    """
    block = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    page, found = block.subn(lambda place: place[1] + text, page)
    if found != 1:
        raise ValueError(f"{found} places of `{command}` in the document, not one.")
    return page


def write_page(program: str, page: Path, paged: Callable[[str], str]) -> int:
    """Writes a page anew; returns the exit code of a command that did so.

    Args:
      program: Who says so where there is nothing to write.
      page: The document.
      paged: From its text to the new one; a `ValueError` says what is missing.
    """
    try:
        page.write_text(paged(page.read_text()))
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0
