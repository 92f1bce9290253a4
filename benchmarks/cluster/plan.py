"""The rates and strategies of the cluster benchmark, and their arithmetic."""

from __future__ import annotations

import dataclasses
import re

from jaxcomp._bytes.units import with_unit

FRAMEWORKS = ("jax", "torch")
STRATEGIES = (
    "none,allreduce,fp16,powersgd-4,powersgd-4-fp16,powersgd-4-int6,powersgd-32,powersgd-32-fp16,"
    "powersgd-32-int6,local-sgd-8,int8"
)
# Strategies without a number. In PyTorch "fp16" as the wire of powersgd is its
# fp16_compress_wrapper around the hook; it has no integer factors, and its quantization hooks work
# on GPUs only.
_PLAIN = ("none", "allreduce", "fp16", "int8")
_WIRES = {"fp16": "float16", "int8": "int8", "int6": "int6"}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# tbf sends a burst at line speed. Bursts over 64 kB would let whole messages of a compressed step
# through for free, and below 16 kB (two frames) the rate is not reached.
_LEAST_BURST = 16_384
_GREATEST_BURST = 65_536
_BURST_SECONDS = 256e-6


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of every link, in each direction."""

    name: str
    bits_per_second: float | None  # None: not limited

    @property
    def shown(self) -> str:
        """Writes the rate for people: ``100 Mbit/s``."""
        if self.bits_per_second is None:
            return self.name
        return with_unit(self.bits_per_second, "bit/s")

    @property
    def burst(self) -> int:
        """Returns the bytes that `tbf` may send at line speed."""
        size = (self.bits_per_second or 0.0) / 8 * _BURST_SECONDS
        return int(min(max(size, _LEAST_BURST), _GREATEST_BURST))


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way in which the replicas synchronise."""

    kind: str
    number: int = 0  # rank, or steps between averages; 0 where the kind takes none
    wire: str = ""  # how factors travel: "" for float32, else a key of `_WIRES`
    every: int = 1  # steps that each replica takes alone before their sum is compressed
    start: int = 0  # of the first such step; before it gradients are compressed

    @property
    def name(self) -> str:
        """Writes the strategy as on the command line."""
        every = f"every-{self.every}" if self.every > 1 else ""
        start = f"from-{self.start}" if self.start else ""
        parts = (self.kind, self.number, self.wire, every, start)
        return "-".join(str(part) for part in parts if part)

    @property
    def comm_dtype(self) -> str | None:
        """Returns the wire dtype of the factors, for `jaxcomp.powersgd`."""
        return _WIRES[self.wire] if self.wire else None

    @property
    def round_steps(self) -> int:
        """Counts the steps in one call of the program: those of a round, or 1."""
        return self.number if self.kind == "local-sgd" else self.every

    @property
    def in_rounds(self) -> bool:
        """Returns whether parameters, or their change, are averaged after `round_steps`."""
        return self.kind == "local-sgd" or self.every > 1

    @property
    def phases(self) -> tuple[Strategy, ...]:
        """Returns the strategy itself; or the two strategies before and after `start`."""
        if not self.start:
            return (self,)
        then = dataclasses.replace(self, start=0)
        return dataclasses.replace(then, every=1), then

    def runs_in(self, framework: str) -> bool:
        """Returns whether the framework has it: torch has no integers and no low-rank rounds."""
        if framework == "jax":
            return True
        return self.wire in ("", "fp16") and self.every == 1 and self.kind != "int8"


UNLIMITED = Rate("unlimited", None)


def parse_rate(text: str) -> Rate:
    """Reads ``unlimited``, ``1gbit``, ``100mbit``, ``2.5mbit``, ``500kbit``.

    Raises:
      ValueError: If the text is none of these.
    """
    name = text.lower()
    if name == UNLIMITED.name:
        return UNLIMITED
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", name)
    if not match or not float(match[1]):
        raise ValueError(f"takes 'unlimited' or a rate such as 100mbit or 1gbit, got {text!r}")
    return Rate(name, float(match[1]) * _UNITS[match[2]])


_NUMBER = r"([1-9]\d*)"
_STRATEGY = re.compile(
    rf"(?P<plain>{'|'.join(_PLAIN)})|local-sgd-(?P<steps>{_NUMBER})|powersgd-(?P<rank>{_NUMBER})"
    rf"(?:-(?P<wire>{'|'.join(_WIRES)}))?"
    rf"(?:-every-(?P<every>{_NUMBER})(?:-from-(?P<start>{_NUMBER}))?)?"
)


def parse_strategy(text: str) -> Strategy:
    """Reads a strategy: ``allreduce``, ``powersgd-4``, ``powersgd-4-int8``, ``local-sgd-8``, ...

    Raises:
      ValueError: If there is no such strategy.
    """
    match = _STRATEGY.fullmatch(text.lower())
    if match is None:
        raise ValueError(
            f"has no {text!r}; there are {', '.join(_PLAIN)}, local-sgd-N (N: steps between "
            f"averages) and powersgd-N[-{'|'.join(_WIRES)}][-every-H[-from-S]] (N: rank; of the "
            "change in H steps, and of the gradients in the first S steps)"
        )
    if match["plain"]:
        return Strategy(match["plain"])
    if match["steps"]:
        return Strategy("local-sgd", int(match["steps"]))
    every = int(match["every"] or 1)
    start = int(match["start"] or 0)
    if start % every:
        raise ValueError(f"{text!r}: whole rounds begin after a multiple of {every} steps.")
    return Strategy("powersgd", int(match["rank"]), match["wire"] or "", every, start)
