"""``python -m jaxcomp``: recommends whether to compress on a network, and with which reducer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from jaxcomp._adviser.advise import advise
from jaxcomp._version import __version__

_EPILOG = """\
example:
  jaxcomp advise --params 124M --workers 16 --bandwidth 25Gbps --step-time 120ms

It assumes a transformer's shapes and a device's speed. In Python, pass your
parameters to jaxcomp.advise(params, ...). It also takes the speed of your own device,
device=jaxcomp.measure(params), and what a rank costs your own run, opt_state=... and measured=...
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; an error is a sentence on standard error and exit code 2.

    Options that are not passed have the defaults of `advise`.
    """
    parser = argparse.ArgumentParser(
        prog="jaxcomp",
        usage="%(prog)s advise --params N --workers N --bandwidth RATE --step-time TIME [options]",
        description="Says whether compressing gradients pays on a network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # so that `advise` sees only what was passed
    )
    add = parser.add_argument
    add("--version", action="version", version=f"jaxcomp {__version__}")
    add("command", choices=["advise"], help="whether to compress, and with which rank")
    add("--params", required=True, help="number of parameters: 124M or 1.5B")
    add("--workers", required=True, type=int, help="number of replicas")
    add("--bandwidth", required=True, help="rate of a link, each way: 10Gbit, 25Gbps, 1.2GB/s")
    add("--step-time", required=True, help="time of a step without communication: 120ms")
    add("--latency", help="one-way time to the next replica (default: 50us)")
    add("--loss-budget", help="how far above the exact run the loss may end (default: 0.5%%)")
    add("--tokens", help="tokens in a step of all replicas: 8192 or 512k (default: estimated)")
    add("--hosts", type=int, help="number of hosts with one link each (default: the workers)")
    add("--optimizer", help="adamw or muon (default: adamw)")
    add("--device", help="gpu or cpu (default: gpu)")
    options = vars(parser.parse_args(arguments))
    del options["command"]
    try:
        print(advise(**options))
    except ValueError as error:
        # Arguments of the function, such as `step_time`, are options here.
        parser.error(re.sub(r"^`(\w+)`", _as_option, str(error)))


def _as_option(match: re.Match[str]) -> str:
    return "--" + match[1].replace("_", "-")


if __name__ == "__main__":
    main()
