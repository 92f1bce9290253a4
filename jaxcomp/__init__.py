"""Communication-efficient data-parallel training in JAX, as Optax gradient transformations."""

from jaxcomp._gradients import local_value_and_grad
from jaxcomp._powersgd import PowerSGDState, powersgd
from jaxcomp._reducers import allreduce
from jaxcomp._state import consolidate, shard_state, state_specs
from jaxcomp._stats import CompressionStats, LeafStats, compression_stats
from jaxcomp._typing import MatrixDims

__all__ = [
    "CompressionStats",
    "LeafStats",
    "MatrixDims",
    "PowerSGDState",
    "allreduce",
    "compression_stats",
    "consolidate",
    "local_value_and_grad",
    "powersgd",
    "shard_state",
    "state_specs",
]
