"""What the cost model has to know of a device: measured by `measure`, or assumed and said so."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from jaxcomp._adviser.model import Software
from jaxcomp._base.checks import ParameterError


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The cost model's constants for one kind of device.

    A factor is the time that something takes, less that of `launch`, divided by what the model's
    formula gives for a device that reaches `memory_bandwidth` and `flops` and does nothing in vain.
    """

    device: str  # what was measured or assumed, in words
    platform: str  # JAX's name of it: "cpu", "gpu", "tpu"
    memory_bandwidth: float  # bytes read and written per second
    flops: float  # float32 operations per second
    powersgd: tuple[tuple[int, float], ...]  # (rank, factor), by rank
    one_sided: tuple[tuple[int, float], ...]  # likewise
    int8: float  # factor
    allreduce: Software  # of float32
    allreduce_16: Software  # of float16 on CPU, of bfloat16 elsewhere; with its rounding
    exchange: Software  # of int8: an all-to-all and an all-gather
    devices: int = 1  # among so many the last three were measured; 1: they are assumed
    launch: float = 0.0  # seconds for each kernel, on GPUs; assumed

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        fields = dataclasses.asdict(self)
        for name in _SOFTWARE:  # JSON has no infinity
            overhead, bandwidth = fields[name]
            fields[name] = [overhead, None if math.isinf(bandwidth) else bandwidth]
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """The inverse of `to_json`.

        Raises:
          ValueError: If the text is something else; the message says what is wrong.
        """
        try:
            return cls(**_checked(json.loads(text)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"This is no calibration: {error}. Make one with python -m jaxcomp measure."
            ) from error


_TABLES = ("powersgd", "one_sided")
_SOFTWARE = ("allreduce", "allreduce_16", "exchange")


def _checked(fields: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(Calibration)}
    # Older ones have no launch.
    if not isinstance(fields, dict) or set(fields) | {"launch"} != names:
        raise ValueError(f"its entries must be {', '.join(sorted(names))}")
    fields["launch"] = _rate(fields.get("launch", 0.0), least=0.0)
    for name in _TABLES:
        fields[name] = tuple((int(rank), _rate(x)) for rank, x in fields[name])
        if not fields[name]:
            raise ValueError(f"{name} must hold a factor")
    for name in ("memory_bandwidth", "flops", "int8"):
        fields[name] = _rate(fields[name])
    for name in _SOFTWARE:
        overhead, bandwidth = fields[name]
        speed = math.inf if bandwidth is None else _rate(bandwidth)
        fields[name] = Software(_rate(overhead, least=0.0), speed)
    if type(fields["devices"]) is not int:
        raise ValueError("devices must be an integer")
    return fields


def _rate(value: Any, least: float = math.ulp(0.0)) -> float:
    number = float(value)
    if not least <= number < math.inf:
        raise ValueError(f"{value!r} is out of range")
    return number


# What to expect of a device that nobody has measured. The adviser prints the words along.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "assumed, not measured: memory at 4.8 TB/s and 67 Tflop/s in float32 (data sheet of an "
            "H200), compression at four fifths of that speed, 4 us to launch a kernel, 20 us per "
            "collective"
        ),
        platform="gpu",
        memory_bandwidth=4.8e12,
        flops=67e12,
        powersgd=((1, 1.25),),
        one_sided=((1, 1.25),),
        int8=1.25,
        allreduce=Software(20e-6),
        allreduce_16=Software(20e-6),
        exchange=Software(40e-6),
        launch=4e-6,
    ),
    "cpu": Calibration(
        device=(
            "assumed, not measured: one core, memory at 10 GB/s and 30 Gflop/s in float32, "
            "compression at half the speed that these allow, 500 us per collective, which reaches "
            "500 MB/s (100 MB/s in float16)"
        ),
        platform="cpu",
        memory_bandwidth=10e9,
        flops=30e9,
        powersgd=((1, 2.0),),
        one_sided=((1, 2.0),),
        int8=2.0,
        allreduce=Software(500e-6, 500e6),
        allreduce_16=Software(500e-6, 100e6),
        exchange=Software(1e-3, 500e6),
    ),
}


def assumed_constants(device: str, calibration: Calibration | None) -> Calibration:
    """What was measured, or else what is assumed of such a device.

    Raises:
      ValueError: For a device of which nothing is assumed.
    """
    if device not in ASSUMED:
        raise ParameterError("device", f"must be one of {', '.join(ASSUMED)}, got {device!r}.")
    return calibration or ASSUMED[device]
