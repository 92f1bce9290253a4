"""Types of arguments for the command lines, and settings whose fields are arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows a module's docstring as it is, and the default of every argument."""


def command_line(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser for ``python -m module``, whose ``--help`` is the module's docstring."""
    name = f"python -m {module}"
    return argparse.ArgumentParser(prog=name, description=doc, formatter_class=_Help)


def call(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns; Ctrl-C is a sentence and exit code 130."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def at_least(kind: Callable[[str], T], least: Any) -> Callable[[str], T]:
    """Makes an argument type: numbers that are not smaller."""

    def parse(text: str) -> T:
        number: Any = kind(text)
        if not number >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return number

    return parse


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Makes an argument type: one of the known names."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"has no {text!r}; there are {', '.join(known)}")
        return text

    return parse


def listed(parse_one: Callable[[str], T], separator: str = ",") -> Callable[[str], tuple[T, ...]]:
    """Makes an argument type: a list separated by commas, without repetition."""

    def parse(text: str) -> tuple[T, ...]:
        try:
            values = [parse_one(part.strip()) for part in text.split(separator)]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return tuple(dict.fromkeys(values))

    return parse


def add_fields(parser: argparse.ArgumentParser, config: Any) -> None:
    """Adds an argument for every field of a setting, with the setting's values as defaults."""
    group = parser.add_argument_group("setting (runs with another one do not count in a report)")
    for name, default in vars(config).items():
        kind: Any = type(default)
        if kind is int:
            kind = at_least(int, 1)
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=" ")


def read_fields(options: argparse.Namespace, config: T) -> T:
    """Returns a setting with the arguments that `add_fields` added, checked by its `check`.

    Raises:
      ValueError: If `check` raises it.
    """
    fields = {}
    for name in vars(config):
        fields[name] = getattr(options, name)
    made: Any = type(config)(**fields)
    made.check()
    return made


def check_multiples(config: Any, **parts: str) -> None:
    """Checks that some fields are multiples of others.

    Args:
      config: A setting.
      **parts: For each field, the name of the field that must divide it.

    Raises:
      ValueError: If a field is not a multiple.
    """
    for whole, part in parts.items():
        if getattr(config, whole) % getattr(config, part):
            raise ValueError(f"{whole} must be a multiple of {part}")
