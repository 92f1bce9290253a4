"""Types of arguments for the command lines, and checks of a setting."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def command_line(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser for ``python -m module``, whose ``--help`` is the module's docstring."""
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


def at_least(kind: Callable[[str], T], least: Any) -> Callable[[str], T]:
    """Makes a type of numbers that are not smaller."""

    def parse(text: str) -> T:
        number: Any = kind(text)
        if not number >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return number

    return parse


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Makes a type of known names."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"has no {text!r}; there are {', '.join(known)}")
        return text

    return parse


def listed(parse_one: Callable[[str], T], separator: str = ",") -> Callable[[str], tuple[T, ...]]:
    """Makes a type of what stands between commas, each once."""

    def parse(text: str) -> tuple[T, ...]:
        values = {}
        for part in text.split(separator):
            try:
                values[parse_one(part.strip())] = None
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from error
        return tuple(values)

    return parse


def add_fields(parser: argparse.ArgumentParser, config: Any) -> None:
    """Adds an argument for every field of a setting, whose defaults these are."""
    group = parser.add_argument_group("setting (runs with another one do not count in a report)")
    for name, default in vars(config).items():
        option = "--" + name.replace("_", "-")
        shown = "(default: %(default)s)"
        group.add_argument(option, type=type(default), default=default, help=shown)


def check_sizes(config: Any, *multiples: tuple[str, str]) -> None:
    """Checks the fields of a dataclass of sizes.

    Args:
      config: The dataclass.
      *multiples: Pairs of fields of which the first must be a multiple of the second.

    Raises:
      ValueError: Naming what is not positive, or no multiple.
    """
    for name, value in vars(config).items():
        if not isinstance(value, str) and value <= 0:
            raise ValueError(f"{name} must be positive")
    for whole, part in multiples:
        if getattr(config, whole) % getattr(config, part):
            raise ValueError(f"{whole} must be a multiple of {part}")
