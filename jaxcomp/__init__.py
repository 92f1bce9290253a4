"""Communication-efficient data-parallel training in JAX, as Optax gradient transformations."""

from jaxcomp._accumulate import accumulate
from jaxcomp._adapt import adapt_state
from jaxcomp._advise import Advice, Prediction, advise
from jaxcomp._advise_calibration import Calibration
from jaxcomp._batched_powersgd import batched_powersgd
from jaxcomp._check_replicas import ReplicaCheck, ReplicaMismatch, check_replicas
from jaxcomp._collectives import as_local
from jaxcomp._combinators import ErrorFeedbackState, SwitchState, error_feedback, switch_at
from jaxcomp._gradients import local_value_and_grad
from jaxcomp._local_sgd import LocalSGDState, local_sgd
from jaxcomp._local_sgd_round import LocalSGDRound, local_sgd_round
from jaxcomp._local_stats import LevelStats, LocalSGDStats, local_sgd_stats
from jaxcomp._measure import measure
from jaxcomp._outer import average
from jaxcomp._powersgd import PowerSGDState, powersgd
from jaxcomp._quantize import QuantizedState, quantized_allreduce
from jaxcomp._ranks import ranks_by_spectrum
from jaxcomp._reducers import allreduce
from jaxcomp._reduction import Reducer, Reduction
from jaxcomp._sampling import sharded_indices
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
    "Advice",
    "Calibration",
    "CompressionStats",
    "ErrorFeedbackState",
    "LeafStats",
    "LevelStats",
    "LocalSGDRound",
    "LocalSGDState",
    "LocalSGDStats",
    "MatrixDims",
    "PowerSGDState",
    "Prediction",
    "QuantizedState",
    "Reducer",
    "Reduction",
    "ReplicaCheck",
    "ReplicaMismatch",
    "SwitchState",
    "accumulate",
    "adapt_state",
    "advise",
    "allreduce",
    "as_local",
    "average",
    "batched_powersgd",
    "batched_stats",
    "check_replicas",
    "compression_stats",
    "consolidate",
    "error_feedback",
    "local_sgd",
    "local_sgd_round",
    "local_sgd_stats",
    "local_value_and_grad",
    "measure",
    "powersgd",
    "quantized_allreduce",
    "quantized_stats",
    "ranks_by_spectrum",
    "shard_state",
    "sharded_indices",
    "state_specs",
    "switch_at",
]
