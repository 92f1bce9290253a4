"""Building blocks for writing your own reducer.

The reducers of this package use these functions: they decide which leaves are compressed and view
them as matrices, make orthonormal bases, average several arrays in one collective, and apply
weights. The names here are public, like those of `jaxcomp`.
"""

from jaxcomp._base.leaves import floating_leaves, unboxed, with_leaves
from jaxcomp._lowrank.matrices import (
    LeafPlan,
    MatrixView,
    default_matrix_dims,
    is_compressed,
    plan_leaves,
)
from jaxcomp._lowrank.orthogonalize import orthogonalize
from jaxcomp._mesh.collectives import Reduced, reduce_mean
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, mean_by_shares
from jaxcomp._mesh.weights import weighted_gradients

__all__ = [
    "BlockLayout",
    "ExactLayout",
    "LeafPlan",
    "MatrixView",
    "Reduced",
    "default_matrix_dims",
    "floating_leaves",
    "is_compressed",
    "mean_by_shares",
    "orthogonalize",
    "plan_leaves",
    "reduce_mean",
    "unboxed",
    "weighted_gradients",
    "with_leaves",
]
