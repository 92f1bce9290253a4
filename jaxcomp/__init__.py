"""Communication-efficient data-parallel training in JAX, as Optax gradient transformations.

A reducer turns the local gradients of a replica into their average, which may be compressed on the
way, and is the first link of an `optax.chain`. `data_parallel` and `value_and_grad` put one into a
`jax.jit` loop; local SGD averages parameters instead. The names in this file are the public ones,
with those of `extend` and `types`; the folders with an underscore are not. CONTRIBUTING.md says
what is where, and in which order to read it.
"""

from jaxcomp import extend, types
from jaxcomp._adviser.advise import advise
from jaxcomp._adviser.measure import measure
from jaxcomp._base.typing import MatrixDims
from jaxcomp._bytes.gap import predict_gap
from jaxcomp._bytes.ranks import Ranks, ranks_by_spectrum
from jaxcomp._local.local_adam import scale_by_local_adam
from jaxcomp._local.local_sgd import local_sgd
from jaxcomp._local.local_sgd_round import local_sgd_round
from jaxcomp._local.sync import average
from jaxcomp._lowrank.stacked import stacked
from jaxcomp._mesh.collectives import as_local
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.batched import batched_powersgd
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import PowerSGDState, powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._states.adapt import adapt_state
from jaxcomp._states.consolidate import consolidate
from jaxcomp._states.diagnostics import diagnostics
from jaxcomp._states.place import shard_state, stack_replicas, state_axes, state_specs
from jaxcomp._training.accumulate import accumulate
from jaxcomp._training.data_parallel import data_parallel, value_and_grad
from jaxcomp._training.gradients import local_value_and_grad
from jaxcomp._training.hold_state import hold_state
from jaxcomp._version import __version__ as __version__
from jaxcomp._wire.check import check
from jaxcomp._wire.collectives import collectives

__all__ = [
    "MatrixDims",
    "PowerSGDState",
    "Ranks",
    "Reducer",
    "Reduction",
    "accumulate",
    "adapt_state",
    "advise",
    "allreduce",
    "as_local",
    "average",
    "batched_powersgd",
    "check",
    "collectives",
    "consolidate",
    "data_parallel",
    "diagnostics",
    "error_feedback",
    "extend",
    "hold_state",
    "local_sgd",
    "local_sgd_round",
    "local_value_and_grad",
    "measure",
    "powersgd",
    "predict_gap",
    "quantized_allreduce",
    "ranks_by_spectrum",
    "scale_by_local_adam",
    "shard_state",
    "stack_replicas",
    "stacked",
    "state_axes",
    "state_specs",
    "types",
    "value_and_grad",
]
