"""What the model of a step has to know of a device: measured by `measure`, or assumed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from jaxcomp._adviser.model import Software
from jaxcomp._base.checks import ParameterError
from jaxcomp._base.stats import CompressionStats

# Reads and writes of the gradient in one step, ideally fused. PowerSGD: the sum of gradient and
# residual (3), the second product (1), output and new residual (3). int8 inside error_feedback: the
# sum (3), scales and integers (2.25), the mean's decoding (1.5), the residual (2.25).
_PASSES, _PASSES_INT8 = 7, 9
_PRODUCTS = 4  # M Q, M^T P, the output, the residual
_WORD = 4  # compression works in float32 whatever goes on the wire


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The model's constants for one kind of device.

    A factor is the time that something takes, divided by that of a device which reaches
    `memory_bandwidth` and `flops` and does nothing in vain.
    """

    device: str  # what was measured or assumed, in words
    platform: str  # JAX's name of it: "cpu", "gpu", "tpu"
    memory_bandwidth: float  # bytes read and written per second
    flops: float  # float32 operations per second
    powersgd: float  # factor
    int8: float  # factor
    allreduce: Software  # of float32
    allreduce_16: Software  # of float16 on CPU, of bfloat16 elsewhere; with its rounding
    exchange: Software  # of integers: an all-to-all and an all-gather
    devices: int = 1  # among so many the last three were measured; 1: they are assumed

    def powersgd_time(self, sent: CompressionStats) -> float:
        """Seconds to compress: 7 passes over the compressed values, 8 operations a column each."""
        values = sum(leaf.size for leaf in sent.leaves if leaf.compressed)
        operations = 2 * _PRODUCTS * sum(leaf.size * leaf.rank for leaf in sent.leaves)
        words = _PASSES * _WORD * values
        return self.powersgd * (words / self.memory_bandwidth + operations / self.flops)

    def int8_time(self, values: int) -> float:
        """Seconds to quantise so many values and keep their residual."""
        return self.int8 * _PASSES_INT8 * _WORD * values / self.memory_bandwidth

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
            fields = json.loads(text)
            names = {field.name for field in dataclasses.fields(cls)}
            if not isinstance(fields, dict) or set(fields) != names:
                raise ValueError(f"its entries must be {', '.join(sorted(names))}")
            for name in ("memory_bandwidth", "flops", "powersgd", "int8"):
                fields[name] = _positive(fields[name])
            for name in _SOFTWARE:
                fields[name] = _software(fields[name])
            if type(fields["devices"]) is not int or fields["devices"] < 1:
                raise ValueError("devices must be a positive integer")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"This is no calibration: {error}. Make one with python -m jaxcomp measure."
            ) from error
        return cls(**fields)


_SOFTWARE = ("allreduce", "allreduce_16", "exchange")


def _software(pair: Sequence[Any]) -> Software:
    overhead, bandwidth = pair
    return Software(
        _positive(overhead) if overhead else 0.0,
        math.inf if bandwidth is None else _positive(bandwidth),
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{value!r} is out of range")
    return number


# What to expect of a device that nobody has measured. The adviser prints the words along.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "assumed, never timed: memory at 4.8 TB/s and 67 Tflop/s (data sheet of an H200), "
            "compression at a quarter of that speed, 20 us per collective"
        ),
        platform="gpu",
        memory_bandwidth=4.8e12,
        flops=67e12,
        powersgd=4.0,
        int8=3.0,
        allreduce=Software(20e-6),
        allreduce_16=Software(20e-6),
        exchange=Software(40e-6),
    ),
    "cpu": Calibration(
        device=(
            "assumed, as a core of an AMD EPYC was measured: memory at 20 GB/s and 80 Gflop/s, "
            "500 us per collective, which reaches 1 GB/s (100 MB/s in float16)"
        ),
        platform="cpu",
        memory_bandwidth=20e9,
        flops=80e9,
        powersgd=1.25,
        int8=4.0,
        allreduce=Software(500e-6, 1e9),
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
