"""Markdown tables, as every benchmark prints them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import NormalDist, mean, stdev

from scipy import stats

from benchmarks.common.paths import RESULTS


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Makes a table; all but the first `left` columns are aligned to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def student(number: int) -> float:
    """Returns the 97.5% quantile of Student's distribution for the mean of that many values."""
    if number < 2:
        return NormalDist().inv_cdf(0.975)
    return float(stats.t.ppf(0.975, number - 1))


def half_width(values: Sequence[float]) -> float:
    """Returns half the width of the 95% interval of the mean of several values."""
    return student(len(values)) * stdev(values) / len(values) ** 0.5


def with_interval(
    values: Sequence[float],
    form: str,
    unit: str = "",
    spread: Callable[[Sequence[float]], float] = half_width,
) -> str:
    """Writes the mean, and for several values also half its 95% interval (Student's).

    Args:
      values: None, one or several.
      form: The format of a number.
      unit: The text after the mean.
      spread: The number beside the mean, if it is not half the interval.

    Example:
      >>> with_interval([1.0, 3.0, 2.0], "+.1f", "%"), with_interval([2.0], ".2f")
      ('+2.0% ± 2.5', '2.00')
    """
    if not values:
        return ""
    text = f"{mean(values):{form}}{unit}"
    if len(values) > 1:
        text += f" ± {spread(values):{form.lstrip('+')}}"
    return text


def in_page(page: str, command: str, text: str) -> str:
    """Returns a document with `text` between the comment that names `command` and the next ``end``.

    Raises:
      ValueError: The document has no such place, or several.
    """
    block = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    page, places = block.subn(lambda place: place[1] + text, page)
    if places != 1:
        raise ValueError(f"{places} places of `{command}` in the document, not one.")
    return page


def write_table(text: str, command: str, page: Path, stem: Path) -> Path:
    """Writes a table into its place in a page, or beside a picture that is not in RESULTS."""
    if stem.parent == RESULTS:
        page.write_text(in_page(page.read_text(), command, text))
        return page
    beside = stem.with_suffix(".md")
    beside.write_text(text)
    return beside
