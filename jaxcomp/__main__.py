"""``python -m jaxcomp``: whether compression pays on a network, and which reducer to use."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxcomp._adviser.advise import advise
from jaxcomp._adviser.calibration import ASSUMED, Calibration
from jaxcomp._adviser.measure import measure
from jaxcomp._adviser.shapes import read_params
from jaxcomp._adviser.units import parse_count
from jaxcomp._base.checks import ParameterError
from jaxcomp._base.typing import PyTree

OK, USAGE = 0, 2
_PARAMS = """\
--params takes
  N              a number of parameters, 124M or 1.5B; a transformer's shapes are then assumed
  FILE.json      {"embedding": [50257, 768], "layer_0": {"kernel": [768, 3072], ...}, ...}: names
                 to shapes, nested as you like; or {"shape": [...], "dtype": "bfloat16"} for a leaf
"""
_ADVISE = f"""\
{_PARAMS}
examples:
  jaxcomp advise --params 124M --workers 16 --bandwidth 1Gbit --step-time 120ms
  jaxcomp advise --params shapes.json --workers 4 --step-time 90ms --calibration here.json

Without --bandwidth, what the calibration found among its devices is used. With it, that is taken
for the software, and the slower of software and link counts.
"""
_MEASURE = f"""\
{_PARAMS}
example:
  jaxcomp measure --params shapes.json > here.json

It sees the devices of this process. On several hosts call jaxcomp.measure in your own script.
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, like the library's own."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}. See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(USAGE)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = _Parser(prog="jaxcomp", description="Whether compressing gradients pays on a network.")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    advice = _command(commands, "advise", "whether to compress, and with which rank", _ADVISE)
    add = advice.add_argument
    add("--workers", type=int, required=True, metavar="N", help="replicas")
    add("--step-time", required=True, metavar="TIME", help="of a step without communication: 120ms")
    add("--bandwidth", metavar="RATE", help="of each replica's link, each way: 10Gbit, 1.2GB/s")
    add("--latency", metavar="TIME", help="from one replica to the next: 50us (the default)")
    add("--loss-budget", default="0.5%", metavar="X",
        help="how far above the exact run the loss may end (default: 0.5%%)")  # fmt: skip
    add("--optimizer", default="adamw", metavar="NAME", help="adamw or muon (default: adamw)")
    add("--backward-overlap", type=float, metavar="X",
        help="share of the backward pass with which an exact average overlaps "
        "(default: 0.7; 0 on CPU)")  # fmt: skip
    add("--device", default="gpu", metavar="KIND",
        help=f"whose constants to assume: {' or '.join(ASSUMED)} (default: gpu)")  # fmt: skip
    add("--calibration", type=pathlib.Path, metavar="FILE",
        help="constants that `jaxcomp measure` printed")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    timing = _command(commands, "measure", "time the present devices", _MEASURE)
    timing.add_argument("--rank", type=int, default=16, help="(default: 16)")
    return main


def _command(commands: Any, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary.capitalize()}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--params", required=True, metavar="FILE|N", help="see below")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors become one sentence on standard error and exit code 2."""
    options = vars(parser().parse_args(arguments))
    command = {"advise": _advise, "measure": _measure}[options.pop("command")]
    try:
        print(command(**options))
    except ParameterError as error:
        option = f"--{error.parameter.replace('_', '-')}"
        print(f"error: {option} {error.problem}", file=sys.stderr)
        return USAGE
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror or error}.", file=sys.stderr)
        return USAGE
    return OK


def _advise(params: str, calibration: pathlib.Path | None, json: bool, **options: Any) -> str:
    measured = Calibration.from_json(calibration.read_text()) if calibration else None
    advice = advise(_params(params), calibration=measured, **options)
    return _dumps(advice.to_dict()) if json else str(advice)


def _measure(params: str, rank: int) -> str:
    return measure(_params(params), rank=rank).to_json()


def _dumps(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2)


def _params(text: str) -> PyTree | int:
    count = parse_count(text)
    return read_params(pathlib.Path(text)) if count is None else count


if __name__ == "__main__":
    sys.exit(main())
