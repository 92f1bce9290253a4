"""``python -m jaxcomp``: whether compression pays on a network, and which reducer to use."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxcomp._adviser.advise import advise
from jaxcomp._adviser.units import COUNTS, parse

OK, USAGE = 0, 2
_EPILOG = """\
example:
  jaxcomp advise --params 124M --workers 16 --bandwidth 1Gbit --step-time 120ms

It assumes a transformer's shapes and a device's speed. In Python, jaxcomp.advise(params, ...) takes
your own parameters, and with device=jaxcomp.measure(params) the speed of what you have.
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
    command = commands.add_parser(
        "advise",
        help="whether to compress, and with which rank",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, shown = command.add_argument, " (default: %(default)s)"
    add("--params", required=True, metavar="N", help="number of parameters: 124M or 1.5B")
    add("--workers", type=int, required=True, metavar="N", help="replicas")
    add("--step-time", required=True, metavar="TIME", help="of a step without communication: 120ms")
    add("--bandwidth", required=True, metavar="RATE",
        help="of each replica's link, each way: 10Gbit, 1.2GB/s")  # fmt: skip
    add("--latency", default="50us", metavar="TIME", help="from one replica to the next" + shown)
    add("--loss-budget", default="0.5%", metavar="X",
        help="how far above the exact run the loss may end (default: 0.5%%)")  # fmt: skip
    add("--optimizer", default="adamw", metavar="NAME", help="adamw or muon" + shown)
    add("--device", default="gpu", metavar="KIND", help="gpu or cpu" + shown)
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; errors become one sentence on standard error and exit code 2."""
    options = vars(parser().parse_args(arguments))
    del options["command"]
    try:
        count = parse("params", options.pop("params"), COUNTS, "124M")
        print(advise(round(count), **options))
    except ValueError as error:
        # The function's arguments, `step_time`, are options here.
        sentence = re.sub(r"^`(\w+)`", lambda m: f"--{m[1].replace('_', '-')}", str(error))
        print(f"error: {sentence}", file=sys.stderr)
        return USAGE
    return OK


if __name__ == "__main__":
    sys.exit(main())
