"""The command lines' common part, and checks of values; a `ValueError` says what to give."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)


def command_line(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m module``; its ``--help`` is the module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def call(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns; Ctrl-C is a sentence and exit code 130."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def at_least(name: str, value: N, least: N) -> N:
    """`value`, unless it is smaller.

    Raises:
      ValueError: If it is.
    """
    if not value >= least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    return value


def listed(name: str, text: str, parse_one: Callable[[str], T]) -> tuple[T, ...]:
    """What stands between the commas of `text`, each once.

    Raises:
      ValueError: If there is nothing, or `parse_one` refuses a part.
    """
    found = dict.fromkeys(parse_one(part.strip()) for part in text.split(",") if part.strip())
    if not found:
        raise ValueError(f"`{name}` is empty; separate what you want by commas.")
    return tuple(found)


def one_of(name: str, known: Iterable[str]) -> Callable[[str], str]:
    """A parser for `listed` that lets known names pass.

    Raises:
      ValueError: In the parser, for any other.
    """

    def parse_one(text: str) -> str:
        if text not in known:
            raise ValueError(f"`{name}` has no {text!r}; there are {', '.join(known)}.")
        return text

    return parse_one


def positive_int(name: str) -> Callable[[str], int]:
    """A parser for `listed` of integers from 1 on.

    Raises:
      ValueError: In the parser, for anything else.
    """

    def parse_one(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"`{name}` takes integers from 1 on, got {text!r}.")
        return int(text)

    return parse_one


def check_sizes(config: Any, *multiples: tuple[str, str]) -> None:
    """Checks the fields of a dataclass of sizes.

    Args:
      config: The dataclass.
      *multiples: Pairs of fields of which the first must be a multiple of the second.

    Raises:
      ValueError: Naming what is not positive, or no multiple.
    """
    numbers = {name: value for name, value in vars(config).items() if not isinstance(value, str)}
    wrong = [name for name, value in numbers.items() if value <= 0]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be positive")
    for whole, part in multiples:
        if getattr(config, whole) % getattr(config, part):
            raise ValueError(f"{whole} must be a multiple of {part}")
