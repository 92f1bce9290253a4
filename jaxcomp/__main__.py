"""``python -m jaxcomp``: whether compression pays, what to use, and what it puts on the wire."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxcomp._adviser.advice import advice_dict
from jaxcomp._adviser.advise import advise
from jaxcomp._adviser.calibration import ASSUMED, Calibration
from jaxcomp._adviser.measure import measure
from jaxcomp._adviser.recommend import recommend
from jaxcomp._adviser.recommendation import recommendation_dict
from jaxcomp._adviser.shapes import assumed_params, read_params
from jaxcomp._adviser.units import parse_bandwidth, parse_count
from jaxcomp._base.checks import ParameterError
from jaxcomp._base.typing import PyTree
from jaxcomp._bytes.stats import compression_stats

OK, USAGE = 0, 2
_DESCRIPTION = (
    "Whether compressing gradients pays on a network, what to use for a loss budget, and what it "
    "puts on the wire."
)
_PARAMS = """\
--params takes
  N              a number of parameters, 124M or 1.5B; a transformer's shapes are then assumed
  FILE.json      {"embedding": [50257, 768], "layer_0": {"kernel": [768, 3072], ...}, ...}: names
                 to shapes, nested as you like; or {"shape": [...], "dtype": "bfloat16"} for a leaf
  FILE.npz, FILE.safetensors
                 only the headers are read
"""
_ADVISE = f"""\
{_PARAMS}
examples:
  python -m jaxcomp advise --params 124M --workers 16 --bandwidth 10Gbit --latency 50us \\
      --step-time 120ms
  python -m jaxcomp advise --params model.safetensors --workers 8 --bandwidth 1Gbit \\
      --step-time 0.8s --device-bandwidth 900GB --backward-overlap 0
  python -m jaxcomp advise --params shapes.json --workers 4 --step-time 90ms --measure

Without --bandwidth, what --measure or --calibration found among the present devices is used. With
it, what they found is taken for the software, and the slower of software and link counts.
"""
_RECOMMEND = f"""\
{_PARAMS}
examples:
  python -m jaxcomp recommend --params 124M --workers 8 --optimizer adamw --budget 1%
  python -m jaxcomp recommend --params shapes.json --workers 8 --optimizer muon --budget 2% \\
      --bandwidth 1Gbit --step-time 120ms

With --step-time the network is looked at too, and where compression does not pay it says so.
"""
_STATS = f"""\
{_PARAMS}
examples:
  python -m jaxcomp stats --params shapes.json --rank 4
  python -m jaxcomp stats --params shapes.json --rank 16 --comm-dtype int8 --replicas 8
"""
_MEASURE = f"""\
{_PARAMS}
example:
  python -m jaxcomp measure --params shapes.json > here.json
  python -m jaxcomp advise --params shapes.json --calibration here.json --workers 16 \\
      --bandwidth 10Gbit --step-time 120ms

It sees the devices of this process. On several hosts call jaxcomp.measure in your own script.
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, like the library's own."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}. See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(USAGE)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = _Parser(prog="python -m jaxcomp", description=_DESCRIPTION)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    advice = _command(commands, "advise", "predict every strategy's step time", _ADVISE)
    _add_network(advice, step_time=True)
    _add_strategies(advice)
    _add_device(advice)
    choice = _command(commands, "recommend", "rank, wire and start for a loss budget", _RECOMMEND)
    choice.add_argument("--optimizer", default="adamw", metavar="NAME",
                        help="that follows the reducer (default: %(default)s)")  # fmt: skip
    choice.add_argument("--budget", default="1%", metavar="X",
                        help="how much higher the loss may end (default: 1%%)")  # fmt: skip
    _add_network(choice, step_time=False)
    _add_device(choice)
    stats = _command(commands, "stats", "count the bytes of PowerSGD, leaf by leaf", _STATS)
    stats.add_argument("--rank", type=int, default=1, help="(default: %(default)s)")
    stats.add_argument("--min-compression-rate", type=float, default=2.0, metavar="X",
                       help="(default: %(default)s)")  # fmt: skip
    stats.add_argument("--alternating", action="store_true", help="one-sided steps")
    _add_wire(stats)
    stats.add_argument(
        "--replicas", type=int, metavar="N", help="with integers: how many there are"
    )
    timing = _command(commands, "measure", "fit the model to the present devices", _MEASURE)
    timing.add_argument("--ranks", type=_numbers, default=(1, 4, 16), metavar="1,4,16")
    for command in (advice, choice, stats):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return main


def _command(commands: Any, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--params", required=True, metavar="FILE|N", help="see below")
    return command


def _add_wire(command: argparse.ArgumentParser) -> None:
    command.add_argument("--comm-dtype", metavar="DTYPE",
                         help="of factors: int8, int6, bfloat16, float16 or float32")  # fmt: skip


def _add_network(command: argparse.ArgumentParser, *, step_time: bool) -> None:
    command.add_argument("--workers", type=int, required=True, metavar="N", help="replicas")
    command.add_argument("--step-time", required=step_time, metavar="TIME",
                         help="of a step without communication: 120ms")  # fmt: skip
    command.add_argument("--bandwidth", metavar="RATE",
                         help="of each replica's link, each way: 10Gbit, 1.2GB/s")  # fmt: skip
    command.add_argument("--latency", metavar="TIME",
                         help="from one replica to the next: 50us (the default)")  # fmt: skip


def _add_strategies(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backward-overlap", type=float, default=0.7, metavar="X",
                         help="share of the backward pass behind which an exact average hides "
                         "(default: %(default)s)")  # fmt: skip
    command.add_argument("--ranks", type=_numbers, metavar="1,4,16",
                         help="(default: the powers of two that the shapes allow)")  # fmt: skip
    _add_wire(command)
    command.add_argument("--sync-every", type=int, default=8, metavar="H",
                         help="of local SGD: steps per average (default: %(default)s)")  # fmt: skip
    command.add_argument("--gpu-kernels", action="store_true",
                         help="as of powersgd(gpu_kernels=True)")  # fmt: skip
    command.add_argument("--buckets", type=_numbers, default=(2, 4, 8), metavar="2,4,8",
                         help="numbers of buckets to try on GPUs (default: 2,4,8)")  # fmt: skip


def _add_device(command: argparse.ArgumentParser) -> None:
    device = command.add_mutually_exclusive_group()
    device.add_argument("--device", choices=tuple(ASSUMED), default="gpu",
                        help="whose constants to assume (default: %(default)s)")  # fmt: skip
    device.add_argument("--measure", action="store_true",
                        help="measure them on the present devices, in about a minute")  # fmt: skip
    device.add_argument("--calibration", type=pathlib.Path, metavar="FILE",
                        help="take them from what `measure` printed")  # fmt: skip
    command.add_argument("--device-bandwidth", metavar="RATE",
                         help="of the device's memory: 900GB")  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,4,16") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors become one sentence on standard error and exit code 2."""
    options = parser().parse_args(arguments)
    commands = {"advise": _advise, "recommend": _recommend, "stats": _stats, "measure": _measure}
    try:
        print(commands[options.command](options))
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


def _advise(options: argparse.Namespace) -> str:
    params = _params(options.params)
    advice = advise(
        params,
        workers=options.workers,
        step_time=options.step_time,
        bandwidth=options.bandwidth,
        latency=options.latency,
        backward_overlap=options.backward_overlap,
        ranks=options.ranks,
        comm_dtype=options.comm_dtype,
        sync_every=options.sync_every,
        calibration=_calibration(options, params),
        gpu_kernels=options.gpu_kernels,
        buckets=options.buckets,
    )
    return json.dumps(advice_dict(advice), indent=2) if options.json else str(advice)


def _recommend(options: argparse.Namespace) -> str:
    params = _params(options.params)
    found = recommend(
        params,
        workers=options.workers,
        optimizer=options.optimizer,
        budget=options.budget,
        bandwidth=options.bandwidth,
        latency=options.latency,
        step_time=options.step_time,
        calibration=_calibration(options, params),
    )
    return json.dumps(recommendation_dict(found), indent=2) if options.json else str(found)


def _calibration(options: argparse.Namespace, params: PyTree | int) -> Calibration:
    calibration = ASSUMED[options.device]
    if options.measure:
        calibration = measure(params)
    elif options.calibration:
        calibration = Calibration.from_json(options.calibration.read_text())
    if options.device_bandwidth:
        memory = parse_bandwidth("device_bandwidth", options.device_bandwidth)
        said = f"{calibration.device}; memory at {memory / 1e9:g} GB/s as given"
        calibration = dataclasses.replace(calibration, memory_bandwidth=memory, device=said)
    return calibration


def _stats(options: argparse.Namespace) -> str:
    params = _params(options.params)
    note = ""
    if isinstance(params, int):
        params, note = assumed_params(params)
    stats = compression_stats(
        params,
        rank=options.rank,
        min_compression_rate=options.min_compression_rate,
        comm_dtype=options.comm_dtype,
        alternating=options.alternating,
        replicas=options.replicas,
    )
    if options.json:
        return json.dumps(dataclasses.asdict(stats), indent=2)
    return f"{stats}\n{note}".rstrip()


def _measure(options: argparse.Namespace) -> str:
    return measure(_params(options.params), ranks=options.ranks).to_json()


def _params(text: str) -> PyTree | int:
    count = parse_count(text)
    return read_params(pathlib.Path(text)) if count is None else count


if __name__ == "__main__":
    sys.exit(main())
