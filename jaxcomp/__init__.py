"""Communication-efficient data-parallel training in JAX, as Optax gradient transformations."""

from jaxcomp._batched_powersgd import batched_powersgd
from jaxcomp._combinators import ErrorFeedbackState, SwitchState, error_feedback, switch_at
from jaxcomp._gradients import local_value_and_grad
from jaxcomp._powersgd import PowerSGDState, powersgd
from jaxcomp._quantize import QuantizedState, quantized_allreduce
from jaxcomp._reducers import allreduce
from jaxcomp._reduction import Reducer, Reduction
from jaxcomp._state import consolidate, shard_state, state_specs
from jaxcomp._stats import (
    CompressionStats,
    LeafStats,
    batched_stats,
    compression_stats,
    quantized_stats,
)
from jaxcomp._typing import MatrixDims

__all__ = [
    "CompressionStats",
    "ErrorFeedbackState",
    "LeafStats",
    "MatrixDims",
    "PowerSGDState",
    "QuantizedState",
    "Reducer",
    "Reduction",
    "SwitchState",
    "allreduce",
    "batched_powersgd",
    "batched_stats",
    "compression_stats",
    "consolidate",
    "error_feedback",
    "local_value_and_grad",
    "powersgd",
    "quantized_allreduce",
    "quantized_stats",
    "shard_state",
    "state_specs",
    "switch_at",
]
