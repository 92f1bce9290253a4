"""What the cluster benchmark measures: rates, strategies, and arithmetic without a network."""

from __future__ import annotations

import dataclasses
import re

FRAMEWORKS = ("jax", "torch")
MODELS = ("mlp", "transformer")
DEFAULT_RATES = ("unlimited", "1gbit", "100mbit", "10mbit")
DEFAULT_STRATEGIES = (
    "none",
    "allreduce",
    "fp16",
    "powersgd-1",
    "powersgd-2",
    "powersgd-4",
    "powersgd-4-fp16",
    "powersgd-4-int8",
    "local-sgd-8",
    "int8",
)
# Kinds of strategy; those in the second set take a number, and powersgd may say how its factors
# travel. In PyTorch "fp16" is its fp16_compress_wrapper around the hook; it has no integer factors,
# and its quantization hooks work on GPUs only.
_PLAIN = ("none", "allreduce", "fp16", "int8")
_NUMBERED = {
    "powersgd": "rank",
    "local-sgd": "steps between averages",
}
_WIRES = {"fp16": "float16", "int8": "int8", "int6": "int6"}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# tbf sends a burst at line speed. Bursts over 64 kB would let whole messages of a compressed step
# through for free, and below 16 kB (two frames) the rate is not reached.
_LEAST_BURST, _GREATEST_BURST, _BURST_SECONDS = 16_384, 65_536, 256e-6


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of every link, in each direction."""

    name: str
    bits_per_second: float | None  # None: not limited

    @property
    def shown(self) -> str:
        """As people write it."""
        if self.bits_per_second is None:
            return self.name
        # As large a unit as leaves one or more of it; the smallest below that.
        fits = [unit for unit, bits in _UNITS.items() if bits <= self.bits_per_second]
        unit = fits[-1] if fits else next(iter(_UNITS))
        prefix = unit[0] if unit == "kbit" else unit[0].upper()
        return f"{self.bits_per_second / _UNITS[unit]:g} {prefix}bit/s"

    @property
    def burst(self) -> int:
        """Bytes that `tbf` may send at line speed."""
        wanted = (self.bits_per_second or 0.0) / 8 * _BURST_SECONDS
        return int(min(max(wanted, _LEAST_BURST), _GREATEST_BURST))


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to keep the replicas together."""

    kind: str
    number: int = 0  # rank, or steps between averages; 0 where the kind takes none
    wire: str = ""  # how factors travel: "" for float32, else a key of `_WIRES`
    every: int = 1  # steps that each replica takes alone before their sum is compressed
    start: int = 0  # of the first such step; before it gradients are compressed

    @property
    def name(self) -> str:
        """As on the command line."""
        every = f"every-{self.every}" if self.every > 1 else ""
        start = f"from-{self.start}" if self.start else ""
        parts = (self.kind, self.number, self.wire, every, start)
        return "-".join(str(part) for part in parts if part)

    @property
    def comm_dtype(self) -> str | None:
        """Of the factors, as `jaxcomp.powersgd` takes it."""
        return _WIRES[self.wire] if self.wire else None

    @property
    def round_steps(self) -> int:
        """Steps that one call of the program takes: of a round; 1 where there are none."""
        return self.number if self.kind == "local-sgd" else self.every

    @property
    def in_rounds(self) -> bool:
        """Whether parameters, or their change, are averaged after `round_steps`."""
        return self.kind == "local-sgd" or self.every > 1

    @property
    def phases(self) -> tuple[Strategy, ...]:
        """Itself; or what it does before `start`, and from then on."""
        if not self.start:
            return (self,)
        then = dataclasses.replace(self, start=0)
        return dataclasses.replace(then, every=1), then

    def runs_in(self, framework: str) -> bool:
        """Tells whether the framework has it: torch has no integers, and no rounds of low rank."""
        if framework == "jax":
            return True
        return self.wire in ("", "fp16") and self.every == 1 and self.kind != "int8"


UNLIMITED = Rate("unlimited", None)


def parse_rate(text: str) -> Rate:
    """Reads ``unlimited``, ``1gbit``, ``100mbit``, ``2.5mbit``, ``500kbit``.

    Raises:
      ValueError: If it is none of these.
    """
    name = text.strip().lower()
    if name == UNLIMITED.name:
        return UNLIMITED
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", name)
    if not found or not float(found[1]):
        raise ValueError(
            f"`--rates` takes 'unlimited' or a rate such as 100mbit or 1gbit, got {text!r}."
        )
    return Rate(name, float(found[1]) * _UNITS[found[2]])


def parse_strategy(text: str) -> Strategy:
    """Reads a strategy: ``allreduce``, ``powersgd-4``, ``powersgd-4-int8``, ``local-sgd-8``, ...

    Raises:
      ValueError: If there is no such strategy.
    """
    name = text.strip().lower()
    if name in _PLAIN:
        return Strategy(name)
    wires, number = "|".join(_WIRES), r"([1-9]\d*)"
    kinds = "|".join(_NUMBERED)
    rounds = rf"(?:-every-{number}(?:-from-{number})?)?"
    found = re.fullmatch(rf"({kinds})-{number}(?:-({wires}))?{rounds}", name)
    if (
        found
        and (found[3] is None or found[1] == "powersgd")
        and (found[4] is None or found[1] == "powersgd")
    ):
        every, start = int(found[4] or 1), int(found[5] or 0)
        if start % every:
            raise ValueError(f"{text!r}: whole rounds begin after a multiple of {every} steps.")
        return Strategy(found[1], int(found[2]), found[3] or "", every, start)
    known = [*_PLAIN, *(f"{kind}-N (N: {what})" for kind, what in _NUMBERED.items())]
    known += [f"powersgd-N-{wires}"]
    known += [f"powersgd-N[-{wires}]-every-H (of the change in H steps, as local-sgd-H)"]
    known += ["the same -from-S (of the gradients in the first S steps)"]
    raise ValueError(f"`--strategies` has no {text!r}; there are {', '.join(known)}.")


def ring_factor(processes: int) -> float:
    """Bytes that a ring all-reduce sends per process, per byte of payload."""
    return 2 * (processes - 1) / processes


def sample_count(first: float, budget: float, most: int) -> int:
    """Samples that fit into `budget` seconds where the first took `first`: 2, or up to `most`.

    A median of one has no spread.
    """
    return max(2, min(most, int(budget / first)))


def counts_as_sample(first: float, budget: float) -> bool:
    """Whether the first sample at a new rate is kept.

    It is dropped where that is cheap, because it also pays for the changed link; where one sample
    takes most of the budget, the link is all that there is to it.
    """
    return first > budget / 4
