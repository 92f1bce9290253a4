"""Building blocks for those who write a reducer of their own.

What the reducers of this package are made of: which leaves are compressed and how they become
matrices, orthonormal bases, means of several arrays in one collective, and the opening and closing
that every reducer's step has in common. Names here are public, as those of `jaxcomp` itself are.
"""

from jaxcomp._base.leaves import round_to, unboxed
from jaxcomp._lowrank.leafwise import map_by_shape, orthogonalize
from jaxcomp._lowrank.matricize import (
    LeafPlan,
    MatrixView,
    default_matrix_dims,
    is_compressed,
    plan_leaves,
)
from jaxcomp._mesh.axes import axis_size
from jaxcomp._mesh.collectives import Reduced, reduce_mean
from jaxcomp._mesh.per_replica import takes_rows
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, mean_by_shares
from jaxcomp._mesh.weights import Weight, WeightedMeans, mean_each, weighted_mean
from jaxcomp._reducers.contract import reduction_of
from jaxcomp._reducers.opening import OpenStep, open_step

__all__ = [
    "BlockLayout",
    "ExactLayout",
    "LeafPlan",
    "MatrixView",
    "OpenStep",
    "Reduced",
    "Weight",
    "WeightedMeans",
    "axis_size",
    "default_matrix_dims",
    "is_compressed",
    "map_by_shape",
    "mean_by_shares",
    "mean_each",
    "open_step",
    "orthogonalize",
    "plan_leaves",
    "reduce_mean",
    "reduction_of",
    "round_to",
    "takes_rows",
    "unboxed",
    "weighted_mean",
]
