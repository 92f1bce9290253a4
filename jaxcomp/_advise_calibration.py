"""What the cost model has to know of a device: measured by `measure`, or assumed and said so."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The cost model's constants for one kind of device.

    A factor is the time that something takes, divided by what the model's formula gives for a
    device that reaches `memory_bandwidth` and `flops` and does nothing in vain.
    """

    device: str  # what was measured or assumed, in words
    platform: str  # JAX's name of it: "cpu", "gpu", "tpu"
    memory_bandwidth: float  # bytes read and written per second
    flops: float  # float32 operations per second
    powersgd: tuple[tuple[int, float], ...]  # (rank, factor), by rank
    int8: float  # factor
    overhead: float = 0.0  # seconds of software per collective
    bandwidth: float = math.inf  # bytes per second and direction that the software reaches
    devices: int = 1  # among so many overhead and bandwidth were measured; 1: they are assumed

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        fields = dataclasses.asdict(self)
        if math.isinf(self.bandwidth):
            fields["bandwidth"] = None  # JSON has no infinity
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """The inverse of `to_json`.

        Raises:
          ValueError: If the text is something else; the message says what is wrong.
        """
        try:
            fields = json.loads(text)
            names = {field.name for field in dataclasses.fields(cls)}
            if not isinstance(fields, dict) or set(fields) != names:
                raise ValueError(f"its entries must be {', '.join(sorted(names))}")
            fields["powersgd"] = tuple((int(rank), _rate(x)) for rank, x in fields["powersgd"])
            for name in ("memory_bandwidth", "flops", "int8"):
                fields[name] = _rate(fields[name])
            fields["overhead"] = _rate(fields["overhead"], least=0.0)
            if fields["bandwidth"] is None:
                fields["bandwidth"] = math.inf
            fields["bandwidth"] = _rate(fields["bandwidth"], most=math.inf)
            if not fields["powersgd"] or type(fields["devices"]) is not int:
                raise ValueError("powersgd must hold a factor, and devices be an integer")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"This is no calibration: {error}. Make one with python -m jaxcomp measure."
            ) from error
        return cls(**fields)


def _rate(value: Any, least: float = math.ulp(0.0), most: float = 1e300) -> float:
    number = float(value)
    if not least <= number <= most:
        raise ValueError(f"{value!r} is out of range")
    return number


# What to expect of a device that nobody has measured. The adviser prints the words along.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "assumed, not measured: memory at 2 TB/s and 20 Tflop/s in float32 (data sheet of an "
            "A100), compression at half the speed that these allow, 20 us per collective"
        ),
        platform="gpu",
        memory_bandwidth=2e12,
        flops=20e12,
        powersgd=((1, 2.0),),
        int8=2.0,
        overhead=20e-6,
    ),
    "cpu": Calibration(
        device=(
            "assumed, not measured: one core, memory at 10 GB/s and 30 Gflop/s in float32, "
            "compression at half the speed that these allow, 500 us and 1 ns per byte of software "
            "in a collective"
        ),
        platform="cpu",
        memory_bandwidth=10e9,
        flops=30e9,
        powersgd=((1, 2.0),),
        int8=2.0,
        overhead=500e-6,
        bandwidth=1e9,
    ),
}
